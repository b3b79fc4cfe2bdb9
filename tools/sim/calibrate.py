#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fit perseus-sim to perseus-perf over the software NIC with 2 ranks, predict 4 and 8 ranks, then measure them and
compare.

    tools/sim/calibrate.py                    # with ./build; prints a table and a summary
    tools/sim/calibrate.py --json > rows      # rows for tools/dev/record.py
    tools/sim/calibrate.py --measured FILE    # with what an earlier run measured, after the model has changed
                                              # (doc/results/sim-calibration.json)
    tools/sim/calibrate.py --pack FOLDER      # copy all that is needed; there: FOLDER/tools/sim/calibrate.py

Run it on an idle machine with 16 cores or more (8 ranks poll, and so do the NIC's threads); it takes about two minutes,
no network and no root. Two modelled links, 50 us at 10 Gbit/s and 5 us at 400 Gbit/s; all policies, coupled and
grouped. One set of parameters is fitted to both links. The predictions are made before 4 and 8 ranks are measured.
"""
import argparse
import json
import math
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LINKS = {"softnic-slow": ["--latency", "50us", "--rate", "10G"], "softnic-fast": ["--latency", "5us", "--rate", "400G"]}
POLICIES = ("drain", "nic_fence", "in_order", "counted")
NEEDED = ("tools/perseus-perf", "tools/perseus-sim", "tools/softnic/softnic-run", "tools/softnic/softnicctl",
          "tools/softnic/lib/*.so*", "transport/libperseus.so*")
# What the software NIC and the CPU cost, where the fit begins. Times in ns; the rate is that of copying.
START = {"push_ns": 40, "command_ns": 120, "post_ns": 500, "completion_ns": 60, "step_ns": 60, "poll_ns": 20,
         "arrival_ns": 100, "loopback_ns": 300, "call_ns": 500, "request_ns": 100, "copy_gbps": 60}
# No CPU does these in less: a system call with two processes' pages, a lock and a wake-up, a look at a queue in memory
# of another process.
LEAST = {**{name: 1 for name in START}, "call_ns": 200, "post_ns": 200, "poll_ns": 10, "step_ns": 20,
         "completion_ns": 20, "command_ns": 50}
STARTS = 8
STEPS = (4, 2, 1.4, 1.15, 1.05)
METRICS = ("put_only_us", "put_signal_us")
EXACT = ("fences", "signals", "both_work_requests")
TIMED = ("both_doorbells", "both_completions")  # they depend on when completions come


def json_rows(command, timeout=200):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        sys.exit(f"calibrate: {' '.join(map(str, command))}: status {done.returncode}: {done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def key(link, row):
    return link, row["policy"], row["group"], row["bytes"]


class Machine:
    """What was measured: medians over several programs, each of them a median of its iterations."""

    def __init__(self, args):
        self.args = args

    def measure(self, ranks):
        found = {}
        for link, model in LINKS.items():
            for _ in range(self.args.repeat):
                rows = json_rows([self.args.build / "tools/softnic/softnic-run", "--quiet", *model, "--fence",
                                  "strict", "--", self.args.build / "tools/perseus-perf", "putsignal", "--json",
                                  "--peers", ranks - 1, "--bytes", self.args.bytes, "--concurrency", "96",
                                  "--iterations", self.args.iterations, "--warmup", "5"])
                for row in rows:
                    if row["op"] == "putsignal":
                        found.setdefault(key(link, row), []).append(row)
        return {cell: {name: statistics.median(row[name] for row in rows) for name in (*METRICS, *EXACT, *TIMED)}
                for cell, rows in found.items()}


class Recorded:
    """The same from the rows of an earlier run."""

    def __init__(self, path):
        self.found = {}
        for row in json.loads(pathlib.Path(path).read_text())["rows"]:
            if row["op"] not in ("calibration", "calibration_counts"):
                continue
            cell = self.found.setdefault(row["ranks"], {}).setdefault(key(row["link"], row), {})
            if row["op"] == "calibration":
                cell[row["what"]] = row["measured_us"]
            else:
                cell.update({name: row[f"measured_{name}"] for name in (*EXACT, *TIMED)})

    def measure(self, ranks):
        return self.found[ranks]


class Model:
    def __init__(self, args):
        self.args = args

    def play(self, ranks, parameters):
        settings = [word for name, value in parameters.items() for word in ("--set", f"{name}={value:.6g}")]
        found = {}
        for link in LINKS:
            rows = json_rows([self.args.build / "tools/perseus-sim", "putsignal", "--json", "--cluster",
                              self.args.clusters / f"{link}.cluster", "--nodes", ranks, "--turn", "16", "--window",
                              "1024", "--ring", "4096", "--bytes", self.args.bytes, "--iterations", "3", *settings])
            found.update({key(link, row): row for row in rows})
        return found


def misfit(model, parameters, measured):
    """Relative errors, mostly not squared, so that a cell that was disturbed does not move all parameters."""
    played = model.play(2, parameters)
    errors = [abs(math.log(played[cell][name] / measured[cell][name])) for cell in measured for name in METRICS]
    return statistics.mean(error + error * error for error in errors)


def descend(model, measured, best):
    least = misfit(model, best, measured)
    for step in STEPS:
        improved = True
        for _ in range(3):
            if not improved:
                break
            improved = False
            for name in best:
                for factor in (step, 1 / step):
                    tried = {**best, name: max(LEAST[name], min(best[name] * factor, 1e5))}
                    value = misfit(model, tried, measured)
                    if value < least * 0.999:
                        best, least, improved = tried, value, True
                        break
    return best, least


def fit(model, measured):
    """Several descents, since some parameters can stand in for others with 2 ranks. Equal inputs give equal fits."""
    draw = random.Random(1)
    starts = [START] + [{name: max(LEAST[name], value * 4 ** draw.uniform(-1, 1)) for name, value in START.items()}
                        for _ in range(STARTS - 1)]
    found = [descend(model, measured, start) for start in starts]
    return min(found, key=lambda pair: pair[1])[0]


def compare(ranks, predicted, measured):
    for cell, found in sorted(measured.items()):
        link, policy, group, size = cell
        for name in METRICS:
            yield {"op": "calibration", "link": link, "ranks": ranks, "policy": policy, "group": group, "bytes": size,
                   "what": name, "measured_us": round(found[name], 2), "predicted_us": round(predicted[cell][name], 2),
                   "error": round(predicted[cell][name] / found[name] - 1, 4)}
        yield {"op": "calibration_counts", "link": link, "ranks": ranks, "policy": policy, "group": group,
               "bytes": size, **{f"measured_{name}": found[name] for name in (*EXACT, *TIMED)},
               **{f"predicted_{name}": predicted[cell][name] for name in (*EXACT, *TIMED)},
               "equal": all(found[name] == predicted[cell][name] for name in EXACT),
               "timed_equal": all(found[name] == predicted[cell][name] for name in TIMED)}


def summary(ranks, rows):
    wrong = [abs(row["error"]) for row in rows if row["op"] == "calibration"]
    counts = [row for row in rows if row["op"] == "calibration_counts"]
    return {"op": "calibration_summary", "ranks": ranks, "fitted": ranks == 2, "times": len(wrong),
            "median_error": round(statistics.median(wrong), 4),
            "worst_error": round(max(wrong), 4), "cells": len(counts),
            "counts_equal": sum(row["equal"] for row in counts),
            "doorbells_and_completions_equal": sum(row["timed_equal"] for row in counts)}


def pack(args):
    folder = pathlib.Path(args.pack)
    for pattern in NEEDED:
        for path in args.build.glob(pattern):
            if path.is_file() or path.is_symlink():
                target = folder / "build" / path.relative_to(args.build)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target, follow_symlinks=False)
    (folder / "tools/sim").mkdir(parents=True, exist_ok=True)
    shutil.copy2(HERE / "calibrate.py", folder / "tools/sim")
    shutil.copytree(args.clusters, folder / "tools/sim/clusters", dirs_exist_ok=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    parser.add_argument("--clusters", type=pathlib.Path, default=HERE / "clusters")
    parser.add_argument("--pack", metavar="FOLDER")
    parser.add_argument("--measured", metavar="FILE")
    parser.add_argument("--bytes", default="4K,64K")
    parser.add_argument("--ranks", default="4,8", help="to predict")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.build = args.build.resolve()
    if args.pack:
        pack(args)
        return
    cores = len(os.sched_getaffinity(0))
    if cores < 16 and not args.measured:
        print(f"calibrate: {cores} cores for 8 ranks that poll: the measured times are not the NIC's", file=sys.stderr)
    machine, model = Recorded(args.measured) if args.measured else Machine(args), Model(args)
    measured = machine.measure(2)
    parameters = fit(model, measured)
    ranks = [int(word) for word in args.ranks.split(",")]
    predicted = {count: model.play(count, parameters) for count in (2, *ranks)}
    rows = [{"op": "calibration_parameters", **{name: float(f"{value:.4g}") for name, value in parameters.items()}}]
    for count in (2, *ranks):
        part = list(compare(count, predicted[count], measured if count == 2 else machine.measure(count)))
        rows += [*part, summary(count, part)]
    predictions = [abs(row["error"]) for row in rows if row["op"] == "calibration" and row["ranks"] != 2]
    rows.append({"op": "calibration_result", "times": len(predictions),
                 "median_error": round(statistics.median(predictions), 4),
                 "worst_error": round(max(predictions), 4),
                 "counts_equal": all(row["equal"] for row in rows if row["op"] == "calibration_counts")})
    for row in rows:
        if args.json:
            print(json.dumps(row))
        elif row["op"] == "calibration":
            print(f"{row['link']:13} {row['ranks']} ranks {row['policy']:9} {row['group']:8} {row['bytes']:6} "
                  f"{row['what']:13} measured {row['measured_us']:9.1f} model {row['predicted_us']:9.1f} "
                  f"{100 * row['error']:+6.1f} %")
        elif row["op"] != "calibration_counts" or not (row["equal"] and row["timed_equal"]):
            print(json.dumps(row))


if __name__ == "__main__":
    main()
