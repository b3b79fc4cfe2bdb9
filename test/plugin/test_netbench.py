#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""perseus-netbench finds the faults of a plugin in bounded time, and no fault in a plugin that works."""
import json
import os
import shutil
import subprocess
import sys
import tempfile

OPS = ("sendrecv", "allreduce", "allgather", "reducescatter", "alltoall")
FAULTS = {  # TOY_FAULT: what netbench must print, and its options
    "init": ("init returned 2 (system error)",),
    "connect": ("still connecting to rank", "--setup-timeout", "2"),
    "unwritten": ("isend succeeded without writing *request",),
    "corrupt": ("bytes are wrong",),
    "short": ("was said to have",),
    # for this fault only: before it, the ranks have to wait for each other on a slow machine
    "hang": ("waits for data", "--timeout", "2"),
    "leak": ("holds more than before", "--rounds", "30", "--iters", "1"),
    "die": ("was killed by signal 9",),
}
LIMIT_S = 60


def run(netbench, plugin, *options, fault=""):
    command = [netbench, "--plugin", plugin, "--check", "--json", "--iters", "5", "--timeout", str(LIMIT_S),
               "--setup-timeout", str(LIMIT_S), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * LIMIT_S,
                          env={**os.environ, "TOY_FAULT": fault})
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def main():
    netbench, plugin = sys.argv[1:3]
    failed = 0
    for op in OPS:
        for more in ((), ("--group", "4", "--chunk", "1000", "--comms", "2")):
            status, rows, said = run(netbench, plugin, "--op", op, "--ranks", "3", "--sizes", "0:64K:x16",
                                     "--odd", *more)
            good = status == 0 and len(rows) == 15 and not any(row["errors"] for row in rows)
            print("ok" if good else "FAIL", "a working plugin has no errors:", op, *more, "" if good else said)
            failed += not good
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copy(plugin, folder)
        status, rows, said = run(netbench, plugin, "--peer", copy, "--ranks", "2", "--sizes", "8:512:x64",
                                 "--iters", "2000")
        good = (status == 0 and [row["bytes"] for row in rows] == [8, 8, 8, 512, 512, 512]
                and {plugin, copy} == {r["plugin"] for r in rows if "plugin" in r})
        good = (good and all(row["slices"] > 0 and row["time_ratio_p25"] <= row["time_ratio"] <= row["time_ratio_p75"]
                             for row in rows if "slices" in row))
        print("ok" if good else "FAIL", "two plugins take turns in one run", "" if good else f"{rows} {said}")
        failed += not good
        status, rows, said = run(netbench, plugin, "--peer", copy, "--ranks", "2", "--sizes", "1000", "--chunk", "200",
                                 fault="corrupt")
        good = status != 0 and "bytes are wrong" in said
        print("ok" if good else "FAIL", "a fault is found in turns, too", "" if good else said)
        failed += not good
    for options in ((), ("--peer", plugin)):
        status, rows, said = run(netbench, plugin, *options, "--ranks", "3", "--sizes", "8:512:x64", "--iters",
                                 "1000000", "--until", plugin)
        done = [row["iterations"] for row in rows if "iterations" in row]
        good = status == 0 and len(done) == (4 if options else 2) and all(0 < n < 1000 for n in done)
        print("ok" if good else "FAIL", "it ends once a file exists:", *options, "" if good else f"{rows} {said}")
        failed += not good
    for fault, (words, *more) in FAULTS.items():
        status, rows, said = run(netbench, plugin, "--ranks", "2", "--sizes", "1000", "--chunk", "200", *more,
                                 fault=fault)
        good = status != 0 and words in said
        print("ok" if good else "FAIL", f"the fault '{fault}' of a plugin is found", "" if good else said)
        failed += not good
    # A rank may be silent for the longer limit and 15 s: these operations take longer together, but none of them alone.
    status, rows, said = run(netbench, plugin, "--ranks", "2", "--sizes", "1000", "--iters", "40", "--timeout", "2",
                             "--setup-timeout", "2", fault="slow")
    good = status == 0 and len(rows) == 1
    print("ok" if good else "FAIL", "a rank that is slow, but goes on, is not killed", "" if good else said)
    failed += not good
    status, rows, said = run(netbench, plugin, "--ranks", "2", "--sizes", "1000", "--iters", "1", "--rounds", "30")
    good = (status == 0 and len(rows) == 2 and rows[1]["rounds"] == 30
            and rows[1]["descriptors"] == rows[1]["descriptors_before"])
    print("ok" if good else "FAIL", "a plugin that is opened and closed again and again holds no more than before",
          "" if good else f"{rows} {said}")
    failed += not good
    for options in (("--ranks", "1"), ("--rounds", "0"), ("--sizes", "5:1"), ("--sizes", "1:16G:x16G"),
                    ("--op", "gossip"), ("--api", "v5"), ("--mem", "cuda"), ("--api", "v9")):
        status, _, said = run(netbench, plugin, *options)
        good = status != 0 and "perseus-netbench: " in said
        print("ok" if good else "FAIL", "an impossible option is refused:", *options, "" if good else said)
        failed += not good
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
