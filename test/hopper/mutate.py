#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Remove each rule of synchronisation of the fused kernels in turn, and count the seeds that find it
(tools/hopper/README.md). The rules are MUTANT(emulator TEST) markers in fused/.

    test/hopper/mutate.py BUILD [--seeds N] [--only TEXT]

Needs a build with tools/hopper. A run finds a mutation when the test fails, is killed, or uses more than 40 s of CPU: a
busy machine finds none. One that has not ended after 600 s has found it too, since then it waits. If no seed does, the
same seeds run with the lanes of a warp far apart.
"""
import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from mutants_lib import mutated, rules  # noqa: E402

CPU_S, WALL_S = 40, 600
ROOT = pathlib.Path(__file__).resolve().parents[2]


def program_of(test):
    """A test's program has the name of its suite, without "_nodes"; tests of "fused" stand without a suite. That of
    "X_order" is "order_X", with the checker of memory order."""
    suite = test.rpartition("/")[0]
    if suite.endswith("_order"):
        return "order_" + suite.removesuffix("_order")
    return suite.removesuffix("_nodes") or "fused"


def library_of(test):
    return "libhopper_order.a" if program_of(test).startswith("order_") else "libhopper_fused.a"


def needs_nic(test):
    return program_of(test) in ("moe", "moe_combine", "moe_gradients") or test.rpartition("/")[0].endswith("nodes")


def link_command(build, test, kernels):
    program = "test/hopper/test_hopper_" + program_of(test)
    lines = subprocess.run(["ninja", "-C", build, "-t", "commands", program], capture_output=True, text=True,
                           check=True).stdout.splitlines()
    compile_line = next(line for line in lines if f"-c tools/hopper/{kernels}.cpp" in line)
    return compile_line, lines[-1]


def kernels_of(rule):
    """The object that has the rule's kernels is named after the folder in which they stand."""
    file = pathlib.PurePath(rule.edits[0].file)
    room = file.parts[-2]
    if file.stem.startswith("few"):
        return "moe_few"
    if file.stem == "inbox_word":
        return "unfused"
    if room == "attention" and program_of(rule.target) == "attention_backward":
        return "backward"  # it uses the forward pass's files
    if room != "core":
        return room
    if rule.target.startswith(("moe/", "moe_fp8/", "sharing/moe")):
        return "moe"
    return "attention" if rule.target.startswith(("attention", "sharing/attention")) else "gemm"


def make(build, folder, rule):
    kernels, test = kernels_of(rule), rule.target
    shutil.copytree(ROOT / "fused", folder / "fused")
    os.remove(folder / "fused/core/ptx.cuh")
    for file, text in mutated(ROOT, rule).items():
        (folder / file).write_text(text)
    compile_line, link_line = link_command(build, test, kernels)
    shadow = ROOT / "tools/hopper/include"
    # before all others; the compiler may be two words
    compile_line = compile_line.replace(" -I", f" -I{shadow} -I{folder} -I", 1)
    compile_line = compile_line.replace(" -Werror ", " ")  # the mutation may leave something unused
    compile_line = re.sub(r"-MD.*?-o \S+", f"-o {folder}/kernels.o", compile_line)
    subprocess.run(compile_line, shell=True, cwd=build, check=True, capture_output=True)
    objects = [str(p) for p in (build / f"tools/hopper/{library_of(test)}.p").glob("*.o")
               if not p.name.endswith(f".._{kernels}.cpp.o")]
    subprocess.run(["ar", "rcs", f"{folder}/fused.a", f"{folder}/kernels.o", *objects], check=True)
    link_line = link_line.replace(f"tools/hopper/{library_of(test)}", f"{folder}/fused.a")
    link_line = re.sub(r"-o \S+", f"-o {folder}/test", link_line, count=1)
    subprocess.run(link_line, shell=True, cwd=build, check=True, capture_output=True)
    return folder / "test"


def runs(build, program, test, seeds, **env):
    found, first, why = 0, None, ""
    under = []
    if needs_nic(test):
        under = [build / "tools/softnic/softnic-run", "--quiet", "--jitter", "100us", "--"]
    suite, _, test = test.rpartition("/")
    for seed in range(1, seeds + 1):
        try:
            r = subprocess.run(["prlimit", f"--cpu={CPU_S}", *under, program, "--filter", f"{suite}*/{test}", "-j1"],
                               env={**os.environ, "HOPPER_SEED": str(seed), **env}, capture_output=True, text=True,
                               timeout=WALL_S)
            bad, output = r.returncode != 0, r.stderr + r.stdout
        except subprocess.TimeoutExpired:
            bad, output = True, "hopper: did not end"
        if bad:
            found += 1
            first = first or seed
            telling = (l.strip() for l in output.splitlines()
                       if l.startswith("hopper:") or " wrong" in l or "returned" in l or l.endswith("CRASH!"))
            why = why or next(telling, "")
    return found, first, why


def files(root):
    """Where the rules of kernels stand."""
    return [path.relative_to(root).as_posix() for path in sorted((root / "fused").rglob("*.cu*"))]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    for rule in rules(ROOT, "emulator", files(ROOT)):
        if options.only not in f"{rule.target} {rule.name}":
            continue
        with tempfile.TemporaryDirectory() as folder:
            program = make(options.build.resolve(), pathlib.Path(folder), rule)
            run = [options.build.resolve(), program, rule.target, options.seeds]
            found, first, why = runs(*run)
            if not found:
                found, first, why = runs(*run, HOPPER_LANES="free")
                why = f"lanes far apart: {why}"
        print(f"{rule.name} | {found} of {options.seeds} seeds, first {first} | {why[:240]}", flush=True)


if __name__ == "__main__":
    main()
