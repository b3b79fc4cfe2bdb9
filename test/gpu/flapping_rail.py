#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""NCCL's all-reduce on two GPUs while one of two merged rails is pulled and plugged in again at random moments, over
Perseus and over NCCL's IB transport: does the job end, is its data right, and how much longer does it take?

    test/gpu/flapping_rail.py BUILD --nccl FILE [--pulls N] [--transports perseus,ib] [--seed S]

Both transports get NCCL's variables for failover and recovery. One JSON object a transport. Data is checked after each
all-reduce. A job in which a pull was the end is started again until all pulls are done; `ended` counts these. Stopped
by SIGTERM, it prints what it has. Exit status 1: data of Perseus was wrong, or one of its jobs ended. Memory is the
host's (NCCL_NET_GDR_LEVEL=LOC), so that the NIC's copies do not wait for the GPU's driver.
"""
import argparse
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

RESILIENCE = {"NCCL_IB_RESILIENCY_PORT_FAILOVER": "1", "NCCL_IB_RESILIENCY_PORT_RECOVERY": "1", "NCCL_IB_TIMEOUT": "12",
              "NCCL_IB_RETRY_CNT": "3"}
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET_GDR_LEVEL": "LOC",
               "NCCL_IB_GID_INDEX": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET_FORCE_MERGE": "softnic0,softnic1",
               "NCCL_DEBUG": "WARN", "PERSEUS_LOG": "warn"}
QUIET_S, LIMIT_S = 2, 60  # before the first pull of a job; a wait that is so long is a hang
PULL_S = 0.51             # how long a pull and the pause after it take on average
FEW, MANY = 200, 2200     # iterations of jobs without a pull
MOST = 100000             # iterations that perseus-nccl-ranks takes


class Job:
    """One run of perseus-nccl-ranks on a world of its own."""

    def __init__(self, args, transport, number, iterations):
        self.world, build = f"flap-{os.getpid()}-{transport}-{number}", args.build
        self.control = [str(build / "tools/softnic/softnicctl"), "--world", self.world]
        env = {**os.environ, **ENVIRONMENT, **RESILIENCE}
        plugin = build / "plugin/libnccl-net-perseus.so"
        env.update({"NCCL_NET_PLUGIN": str(plugin), "NCCL_NET": "Perseus"} if transport == "perseus"
                   else {"NCCL_NET_PLUGIN": "none", "NCCL_NET": "IB"})
        env["LD_LIBRARY_PATH"] = f"{args.nccl.parent}:{env.get('LD_LIBRARY_PATH', '')}"
        self.output = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [build / "tools/softnic/softnic-run", "--quiet", "--name", self.world, "--nics", "2", "--rate", "16G", "--",
             build / "tools/perseus-nccl-ranks", "--ranks", "2", "--nccl", args.nccl, "--ops", "all_reduce", "--sizes",
             "256K:256K", "--iters", str(iterations), "--timeout", str(LIMIT_S)],
            env=env, stdout=self.output, stderr=subprocess.STDOUT)

    def pull(self, chance):
        """Pull a cable for a while. Both rails are never down together."""
        device = f"softnic{chance.randrange(2)}"
        subprocess.run([*self.control, "link", device, "down"], capture_output=True, check=False, timeout=LIMIT_S)
        time.sleep(chance.uniform(0.1, 0.2))
        subprocess.run([*self.control, "link", device, "up"], capture_output=True, check=False, timeout=LIMIT_S)
        time.sleep(chance.uniform(0.25, 0.45))

    def end(self):
        """(exit status, or None when it had to be stopped; rows; output)."""
        try:
            status = self.process.wait(timeout=2 * LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = None
        self.output.seek(0)
        text = self.output.read()
        return status, [json.loads(line) for line in text.splitlines() if line.startswith("{")], text


def without_pulls(args, transport):
    """(usec of an all-reduce, seconds of one with filling and checking): from two lengths of a job, since starting it
    takes seconds."""
    took, usec = [], 0
    for iterations in FEW, MANY:
        begin = time.monotonic()
        status, rows, text = Job(args, transport, f"alone{iterations}", iterations).end()
        took.append(time.monotonic() - begin)
        if status != 0 or not rows or rows[0]["wrong"]:
            raise SystemExit(f"{transport}: fails without a pull: status {status}\n{text[-2000:]}")
        usec = rows[0]["usec_p50"]
    return usec, max((took[1] - took[0]) / (MANY - FEW), usec / 1e6)


def run(args, transport):
    chance, (usec, seconds) = random.Random(args.seed), without_pulls(args, transport)
    row = {"transport": transport, "usec_alone": usec, "pulls": 0, "jobs": 0, "ended": 0, "hung": 0,
           "wrong": 0, "usec": []}

    def stop(*_):
        print(json.dumps({**row, "stopped": True}), flush=True)
        os._exit(1)
    signal.signal(signal.SIGTERM, stop)
    while row["pulls"] < args.pulls and row["ended"] < args.most_ended:
        left = args.pulls - row["pulls"]
        job = Job(args, transport, row["jobs"], min(MOST, int((QUIET_S + left * PULL_S) / seconds)))
        row["jobs"] += 1
        time.sleep(QUIET_S)
        while job.process.poll() is None and row["pulls"] < args.pulls:
            job.pull(chance)
            row["pulls"] += 1
        status, rows, text = job.end()
        row["wrong"] += sum(r["wrong"] for r in rows)
        row["ended"] += status not in (0, None)
        row["hung"] += status is None
        row["usec"] += [r["usec_p50"] for r in rows]
        if status != 0:
            print(f"{transport}, job {row['jobs']}, after {row['pulls']} pulls: status {status}: {text[-600:]}",
                  file=sys.stderr)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--nccl", type=pathlib.Path, required=True,
                        help="libnccl.so.2; NCCL's own failover needs 2.30 or newer")
    parser.add_argument("--pulls", type=int, default=200, help="of each transport (%(default)s)")
    parser.add_argument("--most-ended", type=int, default=20,
                        help="give a transport up after so many jobs that ended (%(default)s)")
    parser.add_argument("--transports", default="perseus,ib", help="comma list (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.build, args.nccl = args.build.resolve(), args.nccl.resolve()
    failed = False
    for transport in args.transports.split(","):
        row = run(args, transport)
        print(json.dumps(row), flush=True)
        failed |= transport == "perseus" and bool(row["wrong"] or row["ended"] or row["hung"])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
