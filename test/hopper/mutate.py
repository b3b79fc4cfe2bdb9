#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Remove each rule of synchronisation of the fused kernels in turn, and count the seeds that find it
(tools/hopper/README.md). The rules are MUTANT(emulator TEST) markers in fused/.

    test/hopper/mutate.py BUILD [--seeds N] [--only TEXT]

Needs a build with tools/hopper. A run finds a mutation when the test fails, is killed, or takes longer than 40 s. If no
seed does, the same seeds run with the lanes of a warp far apart.
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

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Before a test's name: of test_nodes.c, test_moe.c, test_moe_combine.c and test_moe_gradients.c (over the software
# NIC), of test_attention.c.
NODES, MOE, COMBINE, GRADIENTS, ATTENTION = "nodes/", "moe/", "moe_combine", "moe_gradients", "attention/"
# Of test_sharing.c, of test_attention_backward.c, of test_attention_striped.c, of test_fp8.c, of test_moe_few.c, of
# test_norm.c, of test_moe_fp8.c, of test_quantise.c, of test_errors.c, of test_absent.c, of test_fp8_results.c.
SHARING, BACKWARD, STRIPED, FP8 = "sharing/", "attention_backward/", "attention_striped/", "fp8/"
FP8_RESULTS = "fp8_results/"
FEW, NORM, MOE_FP8, QUANTISE, ERRORS, ABSENT = "moe_few/", "norm/", "moe_fp8/", "quantise/", "errors/", "absent/"
PROGRAMS = {NODES: "nodes", MOE: "moe", COMBINE: "moe_combine", GRADIENTS: "moe_gradients", ATTENTION: "attention",
            SHARING: "sharing", BACKWARD: "attention_backward", STRIPED: "attention_striped", FP8: "fp8",
            FEW: "moe_few", NORM: "norm", MOE_FP8: "moe_fp8", QUANTISE: "quantise",
            ERRORS: "errors", ABSENT: "absent", FP8_RESULTS: "fp8_results"}


def link_command(build, test, kernels):
    names = (name for prefix, name in PROGRAMS.items() if test.startswith(prefix))
    program = "test/hopper/test_hopper_" + next(names, "fused")
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
    if room != "core":
        return room
    if rule.target.startswith((MOE, MOE_FP8, SHARING + "moe")):
        return "moe"
    return "attention" if rule.target.startswith((ATTENTION, STRIPED, SHARING + "attention")) else "gemm"


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
    objects = [str(p) for p in (build / "tools/hopper/libhopper_fused.a.p").glob("*.o")
               if not p.name.endswith(f".._{kernels}.cpp.o")]
    subprocess.run(["ar", "rcs", f"{folder}/fused.a", f"{folder}/kernels.o", *objects], check=True)
    link_line = link_line.replace("tools/hopper/libhopper_fused.a", f"{folder}/fused.a")
    link_line = re.sub(r"-o \S+", f"-o {folder}/test", link_line, count=1)
    subprocess.run(link_line, shell=True, cwd=build, check=True, capture_output=True)
    return folder / "test"


def runs(build, program, test, seeds, **env):
    found, first, why = 0, None, ""
    under = []
    if test.startswith((NODES, MOE, COMBINE, GRADIENTS)):
        under = [build / "tools/softnic/softnic-run", "--quiet", "--jitter", "100us", "--"]
    test = test.rpartition("/")[2]
    for seed in range(1, seeds + 1):
        try:
            r = subprocess.run([*under, program, "--filter", f"*/{test}", "-j1"],
                               env={**os.environ, "HOPPER_SEED": str(seed), **env}, capture_output=True, text=True,
                               timeout=40)
            bad, output = r.returncode != 0, r.stderr + r.stdout
        except subprocess.TimeoutExpired:
            bad, output = True, "hopper: did not end"
        if bad:
            found += 1
            first = first or seed
            telling = (l.strip() for l in output.splitlines()
                       if l.startswith("hopper:") or "elements are wrong" in l or "returned" in l)
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
