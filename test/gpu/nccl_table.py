#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A short table of what a step of nccl.sh wrote: Perseus's time, and how many times as long the others took. Other
lines are copied."""
import collections
import json
import sys

cells = collections.defaultdict(dict)
wrong = 0
for line in open(sys.argv[1]):
    row = json.loads(line) if line.startswith("{") else {}
    if "transport" not in row:
        print(line, end="")
        continue
    cells[row["op"], row["bytes"], row["in_place"]][row["transport"]] = row
    wrong += row["wrong"]
for (op, size, in_place), by in sorted(cells.items()):
    if in_place or "perseus" not in by:
        continue
    own = by["perseus"]
    others = "  ".join(f"{name} x{row['usec_p50'] / own['usec_p50']:.2f}" for name, row in sorted(by.items())
                       if name != "perseus")
    print(f"{op:15} {size:>11} {own['usec_p50']:>10.1f} us {own['busbw_GBps']:>8.2f} GB/s  {others}")
if cells:
    print(f"#wrong {wrong} in {sum(len(by) for by in cells.values())} rows")
