#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One of two rails is lost at a random moment of an allreduce between two nodes. The data stays right, and the job goes
on.

usage: test_failover.py SOFTNIC_RUN SOFTNICCTL NETBENCH PLUGIN [--fault link|queue|nic] [--recover] [--standby]
                        [--runs N] [--seed S] [--limit-ms T] [--json]

link: a cable is pulled, and the NIC reports it. queue: a queue pair fails, and nothing else. nic: a NIC dies: it
reports that, and then completes and flushes nothing. The pause is the time of the slowest iteration less that of the
usual one. --recover: the rail comes back, and both rails carry data again. --standby: each connection has one rail, and
the other stands by: it carries data only while the first is lost. The job ends once all that has happened. --json: the
runs, one a line, for tools/dev/record.py. Failover and recovery are on by default.
"""
import argparse
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time

from world import World

LIMIT_S = 300
MOST_ITERATIONS = 1000000  # of netbench: it is told to end long before
# 2^13 * 4.096 us = 33.6 ms for a try: eight tries last 268 ms.
RETRY_MS, RETRY = 268, {"NCCL_IB_TIMEOUT": "13", "NCCL_IB_RETRY_CNT": "7"}
GROWN_BYTES = 4 << 20            # that each device in use must send after the rail is back
STANDBY_BYTES = 1 << 20          # a rail that stands by has sent less
USED_AGAIN = re.compile(r"(\S+) to \S+ at \S+ is used again, ([\d.]+) s after it was lost")
LOST = re.compile(r"(\S+) to \S+ at \S+ is lost: (.*?)\. The other rails go on: (\d+) requests \((\d+) bytes\) are "
                  r"sent again, (\d+) had arrived; agreed after ([\d.]+) ms")


def queue_of_a_rail(world, chance, to_itself):
    """A connected queue pair. Those of one node and rail are alike, except that half of them are connected to
    themselves, for flushes."""
    pairs = json.loads(world.control("status"))["queue_pairs"]
    return chance.choice([pair["qpn"] for pair in pairs if pair["state"] == "RTS"
                          and (to_itself or pair["qpn"] != pair["dest_qpn"])])


def rails_in_use(standby):
    """Of softnic0 to 3; a node has two."""
    return [0, 2] if standby else [0, 1, 2, 3]


def lose_rail(world, fault, chance, recover, standby):
    if fault in ("link", "nic"):
        device = f"softnic{chance.choice(rails_in_use(standby))}"
        world.control(*(["link", device, "down"] if fault == "link" else ["fatal", device]))
        return device
    number = queue_of_a_rail(world, chance, to_itself=not recover)
    world.control("qp-error", str(number))
    return f"queue pair {number}"


def wait_until(bench, log, what, has_happened):
    """What has_happened() returns as soon as that is true."""
    deadline = time.monotonic() + LIMIT_S
    while not (seen := has_happened()):
        assert bench.poll() is None and time.monotonic() < deadline, (
            f"{what}: not within {LIMIT_S} s, or the program ended before\n{log.read_text()[-3000:]}")
        time.sleep(0.02)
    return seen


def watch_return(world, bench, chance, lost, log, args):
    """The rail, which is lost, comes back. Return how many bytes each device has sent since all sides that lost it use
    it again, when those in use have sent enough. A connection that had nothing to send meanwhile has not lost it."""
    time.sleep(0.02 + chance.random() * 0.5)
    if lost.startswith("softnic"):
        world.control("link", lost, "up")
    began = None

    def grown():
        nonlocal began
        said = log.read_text()
        if len(LOST.findall(said)) > len(USED_AGAIN.findall(said)):
            began = None
            return None
        began, now = began or world.sent(), world.sent()
        sent = [b - a for a, b in zip(began, now)]
        return min(sent[i] for i in rails_in_use(args.standby)) >= GROWN_BYTES and sent
    return wait_until(bench, log, "the rail is used again by all sides, and all rails in use send", grown)


def one_run(args, seed):
    with tempfile.TemporaryDirectory() as name:
        return one_logged_run(args, seed, pathlib.Path(name))


def one_logged_run(args, seed, folder):
    log, end = folder / "log", folder / "end"
    chance = random.Random(seed)
    world = World(args.softnicctl, f"failover-{seed}-{os.getpid()}")
    recovery = {} if args.recover else {"NCCL_IB_RESILIENCY_PORT_RECOVERY": "0"}
    standby = {"PERSEUS_STANDBY_RAIL": "1"} if args.standby else {}
    with log.open("w") as stderr:
        bench = subprocess.Popen(
            [args.softnic_run, "--quiet", "--no-sysfs", "--name", world.name, "--nodes", "2", "--nics", "2", "--",
             args.netbench, "--plugin", args.plugin, "--op", "allreduce", "--ranks", "2", "--nodes", "2",
             *([] if args.standby else ["--fuse"]), "--sizes", "1M", "--iters", str(MOST_ITERATIONS), "--until",
             str(end), "--warmup", "2", "--check", "--json", "--timeout", "60", "--setup-timeout", "60"],
            stdout=subprocess.PIPE, stderr=stderr, text=True,
            env={**os.environ, "NCCL_DEBUG": "WARN", **RETRY, **recovery, **standby})
    try:
        world.wait_for_traffic(bench, 4 << 20)
        idle = max(world.sent()[1::2]) if args.standby else 0
        time.sleep(chance.random() * args.spread)
        lost = lose_rail(world, args.fault, chance, args.recover, args.standby)
        # A cable that comes back within the retries loses nothing: that is a claim of test_cable.py.
        wait_until(bench, log, "both sides know that it is lost", lambda: len(LOST.findall(log.read_text())) >= 2)
        if args.recover:
            grown = watch_return(world, bench, chance, lost, log, args)
        end.touch()
        out, _ = bench.communicate(timeout=LIMIT_S)
    except subprocess.CalledProcessError as error:  # of softnicctl: the program has ended, and its world with it
        raise AssertionError(f"{error}\n{log.read_text()[-3000:]}") from error
    finally:
        bench.kill()
        bench.wait()
    err = log.read_text()
    again = [float(s) for _, s in USED_AGAIN.findall(err)]
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    good = bench.returncode == 0 and len(rows) == 1 and rows[0]["errors"] == 0
    said = LOST.findall(err)
    row = {"seed": seed, "fault": args.fault, "lost": lost, "good": good, "status": bench.returncode,
           "failovers": len(said), "replayed": sum(int(s[2]) for s in said), "arrived": sum(int(s[4]) for s in said),
           "agreed_ms": max((float(s[5]) for s in said), default=None)}
    if args.recover:
        row.update(used_again=len(again), away_s=max(again, default=None),
                   grown_bytes=min(grown[i] for i in rails_in_use(args.standby)))
        if args.standby:
            row["standby_bytes"] = max(grown[1::2])
            good = good and row["standby_bytes"] < STANDBY_BYTES
    row["good"] = good = good and idle < STANDBY_BYTES
    if rows:
        row.update(errors=rows[0]["errors"], usual_ms=round(rows[0]["usec_p50"] / 1e3, 3),
                   slowest_ms=round(rows[0]["usec_max"] / 1e3, 3),
                   pause_ms=round((rows[0]["usec_max"] - rows[0]["usec_p50"]) / 1e3, 3))
    return row, err


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for tool in ("softnic_run", "softnicctl", "netbench", "plugin"):
        parser.add_argument(tool)
    parser.add_argument("--fault", choices=("link", "queue", "nic"), default="link")
    parser.add_argument("--recover", action="store_true", help="the rail comes back, and must be used again")
    parser.add_argument("--standby", action="store_true", help="one rail a connection, and another that stands by")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--spread", type=float, default=0.5,
                        help="seconds after the first traffic within which the rail is lost")
    parser.add_argument("--limit-ms", type=float, default=RETRY_MS + 1000, help="longest pause")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    done = []
    for seed in range(args.seed, args.seed + args.runs):
        row, err = one_run(args, seed)
        done.append(row)
        if args.json:
            print(json.dumps(row), flush=True)
        assert row["good"], f"{row}\n{err[-3000:]}"
    pauses = sorted(row["pause_ms"] for row in done)
    summary = {"fault": args.fault, "runs": len(done), "wrong": 0, "hung": 0,
               "replayed": sum(row["replayed"] for row in done), "pause_ms_p50": pauses[len(pauses) // 2],
               "pause_ms_max": pauses[-1]}
    if args.recover:
        summary.update(away_s_max=max(row["away_s"] for row in done),
                       grown_bytes_min=min(row["grown_bytes"] for row in done))
    print(json.dumps(summary))
    assert pauses[-1] <= args.limit_ms, f"a pause of {pauses[-1]} ms, want at most {args.limit_ms}"


if __name__ == "__main__":
    sys.exit(main())
