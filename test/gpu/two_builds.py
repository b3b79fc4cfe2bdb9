#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time the fused kernels of two builds by turns on a GPU host: one run of each build a round, in alternating order.

    test/gpu/two_builds.py OLD NEW [--gpus 2] [--rounds 6] [--limit 1.01]

OLD and NEW are build folders. Prints one JSON object for each kernel and shape: median times of both builds, their
ratio, the spread of the rounds, and how many elements differed from the reference. The exit status is 1 if an element
differed, a launch was not checked, a run failed, or a ratio is above the limit.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys


def cases(gpus):
    """Arguments of perseus-fused-bench, one list for each run: the issue's sizes, with n or k split over the ranks."""
    sizes = (4096, 8192, 16384)
    shapes = {"allgather": [f"{s}x{s // gpus}x{s}" for s in sizes],
              "reduce_scatter": [f"{s}x{s}x{s // gpus}" for s in sizes]}
    shapes["allreduce"] = shapes["reduce_scatter"]
    runs = [["--kernel", kernel, "--iterations", "12", *(a for s in of for a in ("--shape", s))]
            for kernel, of in shapes.items()]
    runs.append(["--kernel", "moe", "--preset", "deepseek-v3", "--layout", "nk", "--iterations", "12", "--tokens",
                 "512", "--tokens", "2048", "--tokens", "8192"])
    runs.append(["--kernel", "attention", "--iterations", "8", "--shape", "4x16x16x8192x128", "--shape",
                 "4x16x16x32768x128"])
    runs.append(["--kernel", "attention", "--causal", "--iterations", "8", "--shape", "4x16x16x8192x128", "--shape",
                 "4x16x16x32768x128"])
    return runs


def rows_of(build, gpus, arguments):
    command = [build / "tools/perseus-fused-bench", "--json", "--gpus", str(gpus), "--no-baselines", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not rows or any(row["checked_launches"] == 0 for row in rows):
        sys.exit(f"{build}: {' '.join(arguments)}: exit status {done.returncode}, or a launch was not checked: "
                 f"{done.stderr[-400:]}")
    return rows


def key_of(row):
    shape = (row.get("shape") or " ".join(f"{name} {row[name]}" for name in ("M", "N", "K", "B", "S", "tokens", "zipf")
                                          if name in row))
    return f"{row['kernel']}{' causal' if row.get('causal') else ''} {shape}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("old", type=pathlib.Path)
    parser.add_argument("new", type=pathlib.Path)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--limit", type=float, default=1.01)
    options = parser.parse_args()
    times, wrong = {}, {}  # by case: times of both builds in microseconds; elements that differed
    for arguments in cases(options.gpus):
        for turn in range(options.rounds):
            order = ("old", "new") if turn % 2 == 0 else ("new", "old")
            for name in order:
                for row in rows_of(getattr(options, name).resolve(), options.gpus, arguments):
                    times.setdefault(key_of(row), {"old": [], "new": []})[name].append(row["usec"])
                    wrong[key_of(row), name] = (wrong.get((key_of(row), name), 0) + row["beyond_bound"]
                                                + row.get("differing_elements", 0))
    failed = 0
    for key, of in times.items():
        if not of["old"] or not of["new"]:
            print(json.dumps({"case": key, "error": "one build gave no row"}), flush=True)
            failed += 1
            continue
        old, new = statistics.median(of["old"]), statistics.median(of["new"])
        bad = wrong[key, "new"] > 0 or new / old > options.limit
        failed += bad
        print(json.dumps({"case": key, "gpus": options.gpus, "rounds": options.rounds, "old_usec": old, "new_usec": new,
                          "ratio": round(new / old, 4), "old_range": [min(of["old"]), max(of["old"])],
                          "new_range": [min(of["new"]), max(of["new"])], "beyond_bound": wrong[key, "new"],
                          "slower": bool(new / old > options.limit)}), flush=True)
    return 1 if failed or not times else 0


if __name__ == "__main__":
    sys.exit(main())
