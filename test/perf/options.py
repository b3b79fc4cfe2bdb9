#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""perseus-perf refuses what it cannot do by option and value. usage: options.py PERSEUS_PERF"""
import subprocess
import sys

BAD = [  # arguments, what the message must name
    ([], "one operation"),
    (["fly"], "'fly'"),
    (["put", "put"], "one operation"),
    (["putsignal", "--bytes", "12"], "bytes"),
    (["putsignal", "--bytes", "4K:8K"], "4K:8K"),
    (["putsignal", "--bytes", "4K:8K:x1"], "4K:8K:x1"),
    (["putsignal", "--concurrency", "129"], "129"),
    (["putsignal", "--concurrency", ""], "concurrency"),
    (["putsignal", "--peers", "0"], "peers"),
    (["putsignal", "--group", "some"], "some"),
    (["putsignal", "--policy", "hope"], "hope"),
    (["putsignal", "--iterations", "3,4"], "3,4"),
    (["alltoall", "--gpu"], "--gpu"),
    (["putsignal", "--trace", "/dev/null"], "one --policy"),
    (["put", "--what"], "what"),
]


def main():
    for arguments, names in BAD:
        done = subprocess.run([sys.argv[1], *arguments], capture_output=True, text=True, timeout=100)
        if done.returncode != 2 or names not in done.stderr:
            raise SystemExit(f"{arguments}: status {done.returncode}, want 2 and '{names}' in: {done.stderr}")
    done = subprocess.run([sys.argv[1], "--help"], capture_output=True, text=True, timeout=100)
    if done.returncode != 0 or "putsignal" not in done.stdout:
        raise SystemExit(f"--help: status {done.returncode}: {done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
