#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Several rails and queues, as NCCL uses them: how much faster striping is, and that it keeps the data intact.

usage: test_striping.py SOFTNIC_RUN SOFTNICCTL NETBENCH PLUGIN CLAIM|all [--json]
--json: the measurements, one a line

The model of the software NIC decides, not this machine: at 400 Mbit/s a message of 512 KB takes 10 ms, which is enough
for a busy host. No operation can be faster than the model, so the fastest counts. A measurement that a busy machine may
have disturbed is repeated, and fails after PATIENCE_S.
"""
import argparse
import json
import os
import subprocess
import sys
import time

from world import World

PATIENCE_S = 60
LIMIT_S = 120
MESSAGE = 512 << 10  # netbench's chunk
FAST, SLOW = 400e6 / 8 / 1e9, 100e6 / 8 / 1e9  # GB/s of rails of 400M and 100M
SIZES = ("--sizes", "4M", "--iters", "10", "--warmup", "2")  # all messages of a size are posted at once
tools, rows = None, []


def command(softnic, bench):
    return [tools.softnic_run, "--quiet", "--no-sysfs", "--nodes", "2", *softnic, "--", tools.netbench, "--plugin",
            tools.plugin, "--op", "sendrecv", "--ranks", "2", "--nodes", "2", "--json", *bench]


def bench(softnic, options, env=None):
    done = subprocess.run(command(softnic, options), capture_output=True, text=True, timeout=LIMIT_S,
                          env={**os.environ, "NCCL_DEBUG": "INFO", **(env or {})})
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0 and found and not any(row["errors"] for row in found), done.stderr[-3000:]
    return found, done.stderr


def speed(name, rates, least, want, fuse=True, env=None):
    """Bandwidth over rails of these rates must be at least `least`; the ideal is `want`. In GB/s."""
    best, give_up = 0, time.monotonic() + PATIENCE_S
    while best < least and (best == 0 or time.monotonic() < give_up):
        found, _ = bench(["--nics", str(rates.count(",") + 1), "--rate", rates, "--latency", "20us"],
                         [*SIZES, *(["--fuse"] if fuse else [])], env)
        best = max(best, found[0]["bytes"] / found[0]["usec_min"] / 1e3)
    rows.append({"claim": name, "rates": rates, "env": env or {}, "want_GBps": round(want, 5),
                 "least_GBps": round(least, 5), "of_ideal": round(best / want, 3), "best_GBps": round(best, 5),
                 **found[0]})
    assert best >= least, f"{name}: {best:.4f} GB/s, want {least:.4f} of {want:.4f}"
    return best


def two_equal_rails_carry_nearly_twice_as_much():
    one = speed("one rail", "400M", 0.9 * FAST, FAST, fuse=False)
    speed("two equal rails", "400M,400M", 1.8 * one, 2 * FAST)


def shares_follow_speed():
    one = speed("the fast rail alone", "400M", 0.9 * FAST, FAST, fuse=False)
    speed("a fast rail and one of a quarter", "400M,100M", 0.9 * 1.25 * one, FAST + SLOW)


def four_queues_are_not_slower_than_one():
    one = speed("one queue", "400M", 0.9 * FAST, FAST, fuse=False)
    for split in ("0", "1"):
        speed("four queues", "400M", 0.97 * one, FAST, fuse=False,
              env={"NCCL_IB_QPS_PER_CONNECTION": "4", "NCCL_IB_SPLIT_DATA_ON_QPS": split})


class Watch(World):
    """What node 0 has sent on each rail, from the software NIC's own counters."""

    def window(self, messages):
        """Bytes of each rail and total GB/s over the next `messages` messages. The clock is read before and after the
        counters."""
        start, before = time.monotonic(), self.sent()[:2]
        while True:
            time.sleep(0.02)
            moved = [a - b for a, b in zip(self.sent(), before)]
            took = time.monotonic() - start
            if sum(moved) >= messages * MESSAGE:
                return moved, sum(moved) / took / 1e9
            assert took < LIMIT_S, f"no {messages} messages in {LIMIT_S} s: {moved}"

    def settle(self, name, rate, share, want, most_messages):
        """Within most_messages, 32 messages in a row must have this share on rail 1; then 32 must have 80 % of the
        bandwidth `want`."""
        seen, step, give_up = 0, 32, time.monotonic() + PATIENCE_S
        while True:
            moved, gbps = self.window(step)
            seen += sum(moved) / MESSAGE
            got = moved[1] / sum(moved)
            shared = abs(got - share) <= 0.05
            good = shared and gbps >= 0.8 * want
            if good or (not shared and seen >= most_messages) or time.monotonic() > give_up:
                break
            if shared:
                most_messages = float("inf")
        rows.append({"claim": name, "rail1": rate, "messages": round(seen), "share_of_rail1": round(got, 3),
                     "want_share": share, "algbw_GBps": round(gbps, 4), "want_GBps": want})
        assert good, (f"{name}: after {seen:.0f} messages rail 1 has {got:.2f} of the bytes, want {share}; "
                      f"{gbps:.4f} GB/s of {want:.4f}")


def shares_follow_a_rail_that_changes():
    give_up, tries = time.monotonic() + 4 * PATIENCE_S, 0
    while True:
        kept, tries = len(rows), tries + 1
        try:
            return follow_a_change(f"striping{os.getpid()}.{tries}")
        except AssertionError as why:
            if time.monotonic() > give_up:
                raise
            del rows[kept:]
            print(f"measured again, since other work may have used the cores: {why}", file=sys.stderr)


def follow_a_change(world):
    fast, slow = "200M", "50M"  # slow enough that 32 messages ahead last while this process does not run
    both, slowed = 2 * FAST / 2, (FAST + SLOW) / 2
    run = subprocess.Popen(command(["--name", world, "--nics", "2", "--rate", fast, "--latency", "20us"],
                                   ["--fuse", "--sizes", "32M", "--iters", "100000", "--outstanding", "32",
                                    "--timeout", "60"]),
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        watch = Watch(tools.softnicctl, world)
        watch.wait_for_traffic(run, 4 * MESSAGE)
        watch.settle("two equal rails", fast, 0.5, both, 256)
        for device in ("softnic1", "softnic3"):
            watch.control("set", device, "rate", slow)
        watch.settle("one rail has become four times slower", slow, 0.2, slowed, 256)
        for device in ("softnic1", "softnic3"):
            watch.control("set", device, "rate", fast)
        watch.settle("and is fast again", fast, 0.5, both, 256)
    finally:
        run.terminate()
        run.wait()


def unequal_rail_counts_work_and_are_named():
    for nics, hca, many, few in ((2, "softnic0,softnic1,softnic2", ["softnic0:1", "softnic1:1"], ["softnic2:1"]),
                                 (3, "softnic0,softnic1,softnic2,softnic3,softnic4",
                                  ["softnic0:1", "softnic1:1", "softnic2:1"], ["softnic3:1", "softnic4:1"])):
        found, said = bench(["--nics", str(nics)],
                            ["--fuse", "--check", "--sizes", "0:2M:x64", "--odd", "--iters", "4"], {"NCCL_IB_HCA": hca})
        lines = [line for line in said.splitlines() if "rails are unequal" in line]
        assert any(",".join(many) in line and ",".join(few) in line for line in lines), (many, few, lines, said[-2000:])
        rows.append({"claim": "unequal rail counts", "rails": [len(many), len(few)], "checked_sizes": len(found),
                     "errors": 0})


def content_is_whole_under_jitter():
    for env in ({"NCCL_IB_QPS_PER_CONNECTION": "4"},
                {"NCCL_IB_QPS_PER_CONNECTION": "3", "NCCL_IB_SPLIT_DATA_ON_QPS": "1"}):
        for order in ("auto", "in_order", "counted", "nic_fence", "drain"):
            found, _ = bench(["--nics", "2", "--jitter", "200us", "--latency", "10us", "--seed", str(len(order))],
                             ["--fuse", "--check", "--sizes", "1:1M:x32", "--odd", "--iters", "6", "--group", "2",
                              "--chunk", "200001"],
                             {**env, "PERSEUS_ORDER": order})
            rows.append({"claim": "content under jitter", "env": env, "order": order, "checked_sizes": len(found),
                         "errors": 0})


def content_is_whole_under_loss():
    found, _ = bench(["--nics", "2", "--loss", "2%", "--latency", "10us"],
                        ["--fuse", "--check", "--sizes", "1:1M:x32", "--odd", "--iters", "6", "--group", "2",
                         "--chunk", "200001"],
                        {"NCCL_IB_TIMEOUT": "6", "NCCL_IB_QPS_PER_CONNECTION": "2"})
    rows.append({"claim": "content under loss", "loss": 0.02, "checked_sizes": len(found), "errors": 0})


CLAIMS = [two_equal_rails_carry_nearly_twice_as_much, shares_follow_speed, four_queues_are_not_slower_than_one,
          shares_follow_a_rail_that_changes, unequal_rail_counts_work_and_are_named, content_is_whole_under_jitter,
          content_is_whole_under_loss]


def main():
    global tools
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for word in ("softnic_run", "softnicctl", "netbench", "plugin"):
        parser.add_argument(word)
    parser.add_argument("claim", choices=["all", *(c.__name__ for c in CLAIMS)])
    parser.add_argument("--json", action="store_true")
    tools = parser.parse_args()
    failed = 0
    for claim in CLAIMS:
        if tools.claim in ("all", claim.__name__):
            try:
                claim()
            except AssertionError as why:
                failed += 1
                print(f"FAIL {claim.__name__}: {why}", file=sys.stderr)
    for row in rows:
        print(json.dumps(row) if tools.json else row)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
