#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""evidence.py ROOT: test/evidence.py finds each kind of row that nobody could measure again."""
import json
import pathlib
import subprocess
import sys
import tempfile

UNKNOWN = "--option-" + "of-yesterday"  # not as one word, which would make it known
ROWS = [  # (what a file has instead, what must be found)
    ({"commit": "0123456abcdef"}, "commit 0123456abcdef is not one that HEAD comes from"),
    ({"commit": "of a branch"}, 'its commit is "of a branch"'),
    ({"rows": [{"commit": "attn2"}]}, "commit attn2 is not"),
    ({"rows": [{"commit": "attn2"}], "rebased": {"attn2": "0123456abcdef"}}, "commit 0123456abcdef is not"),
    ({"command": f"softnic-run {UNKNOWN} -- perseus-perf latency"}, f"no tool has the option {UNKNOWN}"),
    ({"command": "test/gpu/nothere.sh BUILD"}, "there is no test/gpu/nothere.sh"),
    ({"command": f"softnic-run {UNKNOWN} -- true", "today": "gone"}, None),
    ({"command": "torchrun --nproc-per-node 4 x.py --some-option"}, None),
    ({}, None),
]


def main(root):
    head = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    for change, found in ROWS:
        with tempfile.TemporaryDirectory() as folder:
            good = {"commit": head, "command": "perseus-perf latency --json", "rows": []}
            pathlib.Path(folder, "some.json").write_text(json.dumps({**good, **change}))
            done = subprocess.run([sys.executable, f"{root}/test/evidence.py", root, folder], capture_output=True,
                                  text=True)
        if done.returncode == 77:
            print(done.stdout)
            return 77
        assert done.returncode == (1 if found else 0) and (found or "1 files") in done.stdout, (change, done)
    print(f"{len(ROWS)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
