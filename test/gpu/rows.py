#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A plan for 16384 rows, launched with fewer, on this host's GPUs, in CUDA graphs; each way by turns.

    test/gpu/rows.py --gpus 2 --budget-s 110 [--out FOLDER]     FOLDER/rows-NxGPU.json: a row a cell; options of grid.py

perseus: the plan chooses path and tuning by the rows of the launch. most: on the fused path with the tuning of the
plan's most rows. unfused: on the other path. own: a plan for no more rows than the next power of two. path: that of
perseus. Every timed result is compared with sums in fp32; what the round before left is poisoned. Cells that the budget
leaves out are named. Exit status 1: a result was wrong.
"""
import collections
import statistics
import sys

import grid
from grid_ways import FUSED, UNFUSED, Chosen, Planned, Product

MOST = 16384
# As in grid.py.
TIERS = tuple((tokens, "forward", True, "nk") for tokens in ((11000, 3000, 1544, 512),
                                                             (128, 256, 1000, 1024, 2048, 4096, 6000, 8192)))
WAYS = ("product", "perseus", "most", "unfused", "own")


def cells_of(options, _world):
    return grid.cells_of(options.model, TIERS)


def row_of(cell, device, group, kept, options):
    x = grid.operands_of(cell, group, kept, options)
    runner, one = grid.Runner(device, x, cell.graph), Planned(x, most=MOST)
    tuning = {**one.decided(), "path": FUSED}
    ways = {"perseus": one, "most": Planned(x, most=MOST, **tuning), "unfused": Planned(x, path=UNFUSED),
            "own": Chosen(x)}
    runner.add("product", Product(x), False)
    for name, way in ways.items():
        runner.add(name, way)
    runner.rounds(options.rounds, options.warmup)
    usec, errors, path = runner.medians(), runner.errors(), one.path()
    runner.calls.clear()
    for way in ways.values():
        way.close()
    group.check()
    return {**grid.base_row(cell, x, group.world), "most": MOST, **{f"{name}_us": usec[name] for name in WAYS},
            "path": path, "tuning_of_most": tuning, "checked": max(errors.values()) <= 1}


def line_of(cell, row):
    times = "  ".join(f"{name} {row[f'{name}_us']}" for name in WAYS)
    best = min(row[f"{name}_us"] for name in WAYS[1:])
    return (f"{grid.title(cell)}: {times}  {'un' if row['path'] == UNFUSED else ''}fused, "
            f"{row['perseus_us'] / row['most_us']:.3f} of the tuning of the most rows, "
            f"{row['perseus_us'] / best:.3f} of the best{'' if row['checked'] else ' WRONG'}")


def summary(rows):
    """A line for each number of rows, on the launches that take the fused path."""
    found = collections.defaultdict(list)
    for row in rows:
        if row["path"] == FUSED:
            found[row["tokens"]].append((row["perseus_us"] / row["most_us"], row["perseus_us"] / row["own_us"]))
    for tokens, pairs in sorted(found.items()):
        most, own = zip(*pairs)
        yield (f"{tokens:6} tokens, {len(pairs):2} fused: {statistics.median(most):.3f} ({min(most):.3f} to "
               f"{max(most):.3f}) of the tuning of the most rows, {statistics.median(own):.3f} ({min(own):.3f} to "
               f"{max(own):.3f}) of a plan of their own")


RUN = grid.Run("rows.py", __doc__, "rows", cells_of, row_of, line_of, summary, lambda rows: [])

if __name__ == "__main__":
    sys.exit(grid.main(RUN))
