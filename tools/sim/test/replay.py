#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What perseus-perf recorded, perseus-sim plays with the same counts.
usage: replay.py SOFTNIC_RUN PERSEUS_PERF PERSEUS_SIM"""
import json
import os
import subprocess
import sys
import tempfile

SOFTNIC_RUN, PERF, SIM = sys.argv[1:4]


def rows(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: status {done.returncode}: {done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "recorded.trace")
        for policy in ("drain", "nic_fence", "in_order", "counted"):
            for group in ("coupled", "peer"):
                recorded, = (row for row in rows(SOFTNIC_RUN, "--quiet", "--fence", "strict", "--", PERF, "putsignal",
                                                 "--policy", policy, "--group", group, "--peers", "3", "--concurrency",
                                                 "48", "--iterations", "2", "--trace", path, "--json")
                             if row["op"] == "putsignal")
                played, = rows(SIM, "trace", "--trace", path, "--cluster", "softnic-fast", "--nodes", "4", "--policy",
                               policy, "--json")
                # perf counts an iteration without signals and one with them; only the second is in the trace.
                want = {"puts": 48, "signals": recorded["signals"], "fences": recorded["fences"],
                        "work_requests": recorded["both_work_requests"] - 48, "errors": 0}
                found = {name: played[name] for name in want}
                if found != want or want["signals"] != 48:
                    raise SystemExit(f"{policy}, {group}: played {found}, recorded {want}")
                print(f"ok {policy} {group}: {found}", flush=True)
    done = subprocess.run([SOFTNIC_RUN, "--quiet", "--", PERF, "putsignal", "--policy", "drain", "--group", "peer",
                           "--peers", "1", "--trace", "/nowhere/file"], capture_output=True, text=True, timeout=200)
    if done.returncode == 0 or "/nowhere/file" not in done.stderr:
        raise SystemExit(f"a trace that cannot be written: status {done.returncode}: {done.stderr}")


if __name__ == "__main__":
    main()
