#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A rail is lost while fused kernels run between two nodes. Their results stay right, and no launch takes long.

usage: pauses.py SOFTNIC_RUN SOFTNICCTL TEST_HOPPER_NODES [--fault port|cut|queue] [--standby] [--runs N]
                 [--seed S] [--json]

port: a cable is pulled, and the NIC reports it. cut: nothing passes, and no port says so. queue: a queue pair fails.
The rail is replaced when the last side has sent again what was lost: 200 ms after the event of a port, else 1 s more
than the NIC retries, and BUSY_MS for a busy machine. The pause is the time of the slowest launch less that of the usual
one; the emulator is slow, so BUSY_LAUNCH_MS more is allowed there. --standby: each rank has one rail, and another
stands by. --json: the runs, one a line, for tools/dev/record.py.
"""
import argparse
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "plugin"))
from world import World  # noqa: E402

LAUNCHES, LIMIT_S, BUSY_MS, BUSY_LAUNCH_MS = 60, 280, 1000, 5000
# 2^13 * 4.096 us = 33.6 ms for a try: eight tries last 268 ms.
RETRY_MS, RETRY = 268, {"NCCL_IB_TIMEOUT": "13", "NCCL_IB_RETRY_CNT": "7"}
ALLOWED_MS = {"port": 200, "cut": RETRY_MS + 1000, "queue": RETRY_MS + 1000}


class Output:
    """The lines of a program, and when each came."""

    def __init__(self, stream):
        self.lines, self.stream = [], stream
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self):
        self.lines += ((time.monotonic(), line) for line in self.stream)

    def find(self, pattern):
        """[(when, first group)]"""
        found = ((when, re.search(pattern, line)) for when, line in self.lines)
        return [(when, match[1]) for when, match in found if match]

    def __str__(self):
        return "".join(line for _, line in self.lines)


def lose_rail(world, fault, chance, node_devices):
    device = chance.choice(node_devices)
    if fault == "port":
        world.control("link", device, "down")
    elif fault == "cut":
        world.control("set", device, "loss", "1")
    else:
        pairs = json.loads(world.control("status"))["queue_pairs"]
        world.control("qp-error", str(chance.choice([p["qpn"] for p in pairs if p["device"] == device
                                                     and p["qpn"] != p["dest_qpn"]])))
    return device


def one_run(args, seed):
    chance = random.Random(seed)
    world = World(args.softnicctl, f"pauses-{seed}-{os.getpid()}")
    test = "launches_over_a_rail_each_go_on" if args.standby else "launches_of_allreduce_go_on"
    env = {**os.environ, **RETRY, "NCCL_IB_RESILIENCY_PORT_FAILOVER": "1", "PERSEUS_LOG": "warn",
           "PRS_TEST_LAUNCHES": str(LAUNCHES), "PRS_TEST_LAUNCH_TIMES": "1",
           "PERSEUS_STANDBY_RAIL": str(int(args.standby))}
    command = [args.softnic_run, "--quiet", "--no-sysfs", "--name", world.name, "--nodes", "2" if args.standby else "1",
               "--nics", "2", "--", args.hopper_nodes, "--jobs", "1", "--filter", f"nodes/{test}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as job:
        try:
            out = Output(job.stdout)
            world.wait_for_traffic(job, 1 << 16)
            time.sleep(chance.random() * args.spread)
            began = time.monotonic()
            lost = lose_rail(world, args.fault, chance, ["softnic0", "softnic1"])
            job.wait(LIMIT_S)
        finally:
            job.kill()
        out.thread.join(LIMIT_S)
    took = [float(t) for _, t in out.find(r"launch \d+ took ([\d.]+) ms")]
    replaced = [1e3 * (when - began) for when, _ in out.find(r" is lost: .*; agreed after ([\d.]+) ms")]
    usual = statistics.median(took or [0])
    return {"seed": seed, "fault": args.fault, "standby": args.standby, "lost": lost, "status": job.returncode,
            "sides": len(replaced), "replaced_ms": round(max(replaced, default=0), 1), "usual_ms": round(usual, 1),
            "pause_ms": round(max(took, default=0) - usual, 1)}, out


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for tool in ("softnic_run", "softnicctl", "hopper_nodes"):
        parser.add_argument(tool)
    parser.add_argument("--fault", choices=ALLOWED_MS, default="port")
    parser.add_argument("--standby", action="store_true", help="one rail a rank, and another that stands by")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--spread", type=float, default=1,
                        help="seconds after the first traffic within which the rail is lost")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    allowed = ALLOWED_MS[args.fault]
    done = []
    while sum(row["sides"] > 0 for row in done) < args.runs:
        assert len(done) < 2 * args.runs + 3, f"most runs lose no rail: {done}"
        row, out = one_run(args, args.seed + len(done))
        done.append(row)
        if args.json:
            print(json.dumps(row), flush=True)
        assert row["status"] == 0, f"{row}\n{out}"
        assert row["replaced_ms"] <= allowed + BUSY_MS, (
            f"the rail was not replaced within {allowed + BUSY_MS} ms: {row}\n{out}")
        assert row["pause_ms"] <= allowed + BUSY_LAUNCH_MS, (
            f"a launch paused for longer than {allowed + BUSY_LAUNCH_MS} ms: {row}\n{out}")
    for what in ("replaced_ms", "pause_ms"):
        times = sorted(row[what] for row in done if row["sides"])
        print(f"{len(times)} lost rails, {what}: {times[0]} to {times[-1]}, {statistics.median(times):.1f} in the "
              "middle", file=sys.stderr)


if __name__ == "__main__":
    main()
