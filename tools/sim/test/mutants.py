#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Take rules of the order engine away, and check that perseus-sim sees it. usage: mutants.py ROOT BUILD CC...

The rules are the MUTANT(order) markers (mutants_lib.py). The simulator is linked anew with the changed source in place
of the archive's. unit/mutants.py tries every rule with tests that look for it; here it is enough that workloads on a
cluster notice broken order.
"""
import os
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "test"))
from mutants_lib import compile_or_exit, mutated, rules  # noqa: E402

MOE = ["moe", "--nodes", "3", "--tokens", "64", "--group", "coupled,peer"]
ALL = ["putsignal", "--all", "--nodes", "4", "--bytes", "64K"]
LOST = ["alltoall", "--nodes", "4", "--policy", "counted", "--set", "nics_per_gpu=2", "--group", "peer",
        "--outstanding", "16", "--bytes", "64K", "--lose-rail", "0:2:30"]
# rule, and a run that must fail without it
TRIED = [
    ("a record waits for its arrivals", [*MOE, "--policy", "counted", "--cluster", "efa-p5"]),
    ("a put counts all its parts for its tag", [*ALL, "--bytes", "1M", "--policy", "counted", "--cluster", "efa-p5"]),
    ("nic_fence fences behind puts",
     [*MOE, "--policy", "nic_fence", "--set", "fence_strict=1", "--set", "adaptive_unordered=1", "--set", "routing=2"]),
    ("nic_fence keeps a peer on one queue",
     [*ALL, "--policy", "nic_fence", "--queues", "4", "--set", "fence_strict=1"]),
    ("credits free tags", ["putsignal", "--nodes", "2", "--peers", "1", "--concurrency", "2500", "--policy", "counted",
                           "--group", "coupled"]),
    ("a record is raised once", [*MOE, "--policy", "counted"]),
    ("what was taken is not replayed", LOST),
]


def run(program, arguments):
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60)


def main():
    root, build, cc = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3:]
    sources = sorted({path.relative_to(root).as_posix() for path in (root / "transport").rglob("*.c")})
    known = {rule.name: rule for rule in rules(root, "order", sources)}
    objects = sorted(map(str, (build / "tools/perseus-sim.p").glob("*.o")))
    libraries = [build / "tools/sim/libsim_transport.a", build / "tools/common/libtools_common.a",
                 build / "transport/util/libperseus_util.a"]
    failed = 0
    with tempfile.TemporaryDirectory() as work:
        program = os.path.join(work, "perseus-sim")
        for name, arguments in TRIED:
            whole = run(build / "tools/perseus-sim", arguments)
            if whole.returncode:
                raise SystemExit(f"without a mutation: {arguments}: {whole.stderr}")
            (source, text), = mutated(root, known[name]).items()
            changed = os.path.join(work, os.path.basename(source))
            pathlib.Path(changed).write_text(text)
            compile_or_exit([*cc, "-std=gnu11", "-O2", "-D_GNU_SOURCE", '-DPRS_VERSION="test"', "-I", root, "-I",
                             root / "include", "-include", root / "tools/sim/host.h", "-c", changed, "-o",
                             changed + ".o"], source)
            # The archive's member of the same name is left out: what it defines is defined already.
            compile_or_exit([*cc, "-o", program, *objects, changed + ".o", *libraries, "-lm", "-lpthread",
                             "-Wl,--wrap=prs_peer_put", "-Wl,--wrap=prs_peer_signal", "-Wl,--wrap=prs_order_path_down"],
                            "linking")
            done = run(program, arguments)
            seen = done.returncode != 0
            failed += not seen
            print(f"{'ok' if seen else 'FAILED':6} {name}: "
                  f"{done.stderr.splitlines()[0] if done.stderr else 'NOTHING IS SEEN'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
