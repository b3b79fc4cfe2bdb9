#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One of two rails is lost at a random moment of an allreduce between two nodes. The data stays right, and the job goes on.

usage: test_failover.py SOFTNIC_RUN SOFTNICCTL NETBENCH PLUGIN [--fault link|queue] [--runs N] [--seed S] [--limit-ms T] [--json]

link: a cable is pulled, and the NIC reports it. queue: a queue pair fails, and nothing else. The pause is the time of the slowest
iteration less that of the usual one. --json: the runs, one a line, for tools/record.py.
"""
import argparse
import json
import os
import random
import re
import subprocess
import sys
import time

from world import World

LIMIT_S = 120
ITERATIONS = "400"
# 2^13 * 4.096 us = 33.6 ms for a try: eight tries last 268 ms.
RETRY_MS, RETRY = 268, {"NCCL_IB_TIMEOUT": "13", "NCCL_IB_RETRY_CNT": "7"}
FAILOVER = {"NCCL_IB_RESILIENCY_PORT_FAILOVER": "1"}


def queue_of_a_rail(world, chance):
    """A connected queue pair. Those of one node and rail are alike."""
    pairs = json.loads(world.control("status"))["queue_pairs"]
    return chance.choice([pair["qpn"] for pair in pairs if pair["state"] == "RTS"])


def lose_rail(world, fault, chance):
    if fault == "link":
        device = f"softnic{chance.randrange(4)}"
        world.control("link", device, "down")
        return device
    number = queue_of_a_rail(world, chance)
    world.control("qp-error", str(number))
    return f"queue pair {number}"


def one_run(args, seed):
    chance = random.Random(seed)
    world = World(args.softnicctl, f"failover-{seed}-{os.getpid()}")
    bench = subprocess.Popen(
        [args.softnic_run, "--quiet", "--no-sysfs", "--name", world.name, "--nodes", "2", "--nics", "2", "--", args.netbench, "--plugin", args.plugin,
         "--op", "allreduce", "--ranks", "2", "--nodes", "2", "--fuse", "--sizes", "1M", "--iters", ITERATIONS, "--warmup", "2", "--check", "--json",
         "--timeout", "60", "--setup-timeout", "60"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "NCCL_DEBUG": "WARN", **RETRY, **FAILOVER})
    try:
        world.wait_for_traffic(bench, 4 << 20)
        time.sleep(chance.random() * args.spread)
        lost = lose_rail(world, args.fault, chance) if bench.poll() is None else "too late"
        out, err = bench.communicate(timeout=LIMIT_S)
    finally:
        bench.kill()
        bench.wait()
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    good = bench.returncode == 0 and len(rows) == 1 and rows[0]["errors"] == 0
    said = re.findall(r"(\S+) to \S+ at \S+ is lost: (.*?)\. The other rails go on: (\d+) requests \((\d+) bytes\) are sent again, (\d+) had arrived; "
                      r"agreed after ([\d.]+) ms", err)
    row = {"seed": seed, "fault": args.fault, "lost": lost, "good": good, "status": bench.returncode, "failovers": len(said),
           "replayed": sum(int(s[2]) for s in said), "arrived": sum(int(s[4]) for s in said),
           "agreed_ms": max((float(s[5]) for s in said), default=None)}
    if rows:
        row.update(errors=rows[0]["errors"], usual_ms=round(rows[0]["usec_p50"] / 1e3, 3), slowest_ms=round(rows[0]["usec_max"] / 1e3, 3),
                   pause_ms=round((rows[0]["usec_max"] - rows[0]["usec_p50"]) / 1e3, 3))
    return row, err


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for tool in ("softnic_run", "softnicctl", "netbench", "plugin"):
        parser.add_argument(tool)
    parser.add_argument("--fault", choices=("link", "queue"), default="link")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--spread", type=float, default=0.5, help="seconds after the first traffic within which the rail is lost")
    parser.add_argument("--limit-ms", type=float, default=RETRY_MS + 1000, help="longest pause")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    done = []
    while sum(row["failovers"] > 0 or not row["good"] for row in done) < args.runs:
        assert len(done) < 2 * args.runs + 5, f"most runs end before a rail is lost: {done}"
        row, err = one_run(args, args.seed + len(done))
        done.append(row)
        if args.json:
            print(json.dumps(row), flush=True)
        assert row["good"], f"{row}\n{err[-3000:]}"
    lost = [row for row in done if row["failovers"]]
    pauses = sorted(row["pause_ms"] for row in lost)
    summary = {"fault": args.fault, "runs": len(lost), "wrong": 0, "hung": 0, "replayed": sum(row["replayed"] for row in lost),
               "pause_ms_p50": pauses[len(pauses) // 2], "pause_ms_max": pauses[-1]}
    print(json.dumps(summary))
    assert pauses[-1] <= args.limit_ms, f"a pause of {pauses[-1]} ms, want at most {args.limit_ms}"


if __name__ == "__main__":
    sys.exit(main())
