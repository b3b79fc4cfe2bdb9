#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""perseus-fused-bench on emulated GPUs: it checks every launch that it times, and notices a wrong one.

usage: bench.py PROGRAM CLAIM
"""
import json
import os
import subprocess
import sys

ROUNDS = 2
KERNELS = {  # arguments, rows of output, and how many of our kernels a row times
    "products": (["--kernel", "all", "--shape", "512x264x72"], 4, 1),
    "finished products": (["--kernel", "allgather", "--kernel", "reduce_scatter", "--shape", "512x272x72", "--gated",
                           "--activation", "silu", "--bias", "--residual", "--keep-gathered"], 2, 1),
    "fp16 products": (["--kernel", "all", "--dtype", "fp16", "--shape", "512x264x72"], 4, 1),
    "fp32 results": (["--kernel", "all", "--dtype", "fp16", "--c-dtype", "fp32", "--residual", "--shape", "512x264x72"],
                     4, 1),
    "e4m3 products": (["--kernel", "all", "--dtype", "e4m3", "--layout", "nk", "--scaling", "blocks", "--shape",
                       "512x264x256"], 4, 1),
    "normed products": (["--kernel", "allreduce", "--norm", "--residual", "--shape", "20x264x72"], 1, 1),
    "moe": (["--kernel", "moe", "--preset", "256x128x8x2", "--tokens", "100"], 1, 2),
    "attention": (["--kernel", "attention", "--shape", "1x2x2x512x64"], 1, 1),
    "attention, backward": (["--kernel", "attention", "--backward", "--causal", "--attention-ctas", "2",
                             "--shape", "1x2x1x128x64"], 1, 3),
}
# What compares launches is the same for all products.
COMPARED_APART = ("products", "normed products", "moe", "attention", "attention, backward")


def rows_of(program, what, *more):
    """Run the bench; return its rows and its exit status."""
    done = subprocess.run([program, "--gpus", "2", "--no-baselines", "--json", "--samples", "64", "--timeout-ms",
                           "60000", *KERNELS[what][0], *more],
                          stdout=subprocess.PIPE, text=True, timeout=600, env={**os.environ, "HOPPER_SMS": "4"})
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == KERNELS[what][1], f"{what}: {len(rows)} rows: {done.stdout}"
    return rows, done.returncode


def expect(what, row, **values):
    for name, value in values.items():
        assert row[name] == value, f"{what}: {name} is {row[name]}, not {value}: {row}"


def differing(row):
    return row["differing_elements" if row["kernel"] == "moe" else "differing_vectors"]


def a_right_launch_is_found_right(program):
    """The other kernels need no run of their own: where one element is changed, the others are found right."""
    for what in COMPARED_APART:
        own = KERNELS[what][2]
        for rounds in (ROUNDS, 0) if what == "moe" else (ROUNDS,):  # 0: one launch, not timed
            rows, status = rows_of(program, what, "--iterations", str(rounds))
            for row in rows:
                expect(what, row, beyond_bound=0, checked_launches=rounds * own)
                assert differing(row) == 0 and row["sampled"] > 0 and (row["usec"] is None) == (rounds == 0), row
            assert status == 0, f"{what} ended with {status}"


def corrupted(program, launch, beyond, kernels=KERNELS):
    """Change one element in each of our kernels of timed launch `launch`; each change is counted `beyond` times."""
    for what in kernels:
        own = KERNELS[what][2]
        rows, status = rows_of(program, what, "--iterations", str(ROUNDS), "--corrupt", str(launch))
        for row in rows:
            if what == "normed products":  # and what was normed fits a changed C no longer
                assert row["beyond_bound"] >= beyond * own, row
            else:
                expect(what, row, beyond_bound=beyond * own)
            expect(what, row, checked_launches=ROUNDS * own)
            assert differing(row) == own and row["sampled"] > 0 and row["usec"] is not None, row
        assert status == 1, f"{what} ended with {status}"


def the_last_timed_launch_is_compared_with_the_reference(program):
    corrupted(program, ROUNDS, 2)  # once by the reference, once by the comparison with the other launches


def every_timed_launch_is_compared(program):
    corrupted(program, 1, 1, COMPARED_APART)


if __name__ == "__main__":
    globals()[sys.argv[2]](sys.argv[1])
