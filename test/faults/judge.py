#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What tools/dev/faults makes of the end of a program, and that it leaves a world well. usage: judge.py FAULTS"""
import importlib.machinery
import importlib.util
import random
import signal
import sys
import types

loader = importlib.machinery.SourceFileLoader("faults", sys.argv[1])
faults = importlib.util.module_from_spec(importlib.util.spec_from_loader("faults", loader))
sys.dont_write_bytecode = True
loader.exec_module(faults)

# As the programs print them.
FLUSHED = ("peer.c:39 WARN NET/Perseus: Work Request Flushed Error (status 5, vendor 0) on queue 0, softnic1:1 GID "
           "::ffff:10.1.1.1 to softnic1:1: the queue was closed by an earlier error, here or at the peer")
LOST = ("failover.c:2 WARN NET/Perseus: softnic1:1 to softnic3:1 at 10.0.0.1:5 is lost: port down. The other rails go "
        "on: 3 requests (64 bytes) are sent again, 5 had arrived; agreed after 1.5 ms\n")
BACK = "recovery.c:2 WARN NET/Perseus: softnic1:1 to softnic3:1 at 10.0.0.1:5 is used again, 0.3 s after it was lost\n"
KILLED = "perseus-netbench: rank 0 was killed by signal 9 (Killed)"
ROWS = (
    # kind, failover, hung, status, text, expected
    ("drop", False, False, 0, "", "ok: went on"),
    ("port", True, False, 0, 2 * LOST + BACK, "ok: went on (1.0 s, 2 lost a rail, 1 got it back)"),
    ("drop", False, False, 1, FLUSHED, "FAILED: ended with status 1, and should have gone on"),
    ("port", False, False, 1, FLUSHED, "ok: ended with a named error"),
    ("port", True, False, 1, FLUSHED, "FAILED: ended with status 1, and should have gone on"),
    ("kill", True, False, 1, KILLED, "ok: ended with a named error"),
    ("kill", False, False, 1, "something failed", "FAILED: ended with status 1, and named nothing"),
    ("kill", False, True, 1, KILLED, "FAILED: a hang"),
    ("kill", False, False, 1, "perseus-netbench: rank 1: no progress for 30 s (60 s while all ranks meet)",
     "FAILED: a hang"),
    ("kill", False, False, 1, "perseus-netbench: rank 1: 3 of 64 bytes are wrong, the first at 7 (0x7)\n" + KILLED,
     "FAILED: wrong bytes"),
    ("stop", False, False, 1, "perseus-perf: 4 words were wrong", "FAILED: wrong bytes"),
    ("kill", False, False, 128 + signal.SIGSEGV, KILLED, "FAILED: a crash"),
    ("port", False, False, 1, FLUSHED + "\nperseus-netbench: rank 1 was killed by signal 11 (Segmentation fault)",
     "FAILED: a crash"),
)


# Faults that end after a while, and the settings that must hold again then.
PASSING = {"drop": {"loss": "0"}, "delay": {"latency": "0us"}, "reorder": {"latency": "0us"}, "port": {"link": "up"},
           "flap": {"link": "up"}, "cut": {"loss": "0"}}


class FakeWorld(faults.World):
    """What was set last, by device and by what it is."""

    def __init__(self):
        self.set, self.broken = {}, None

    def devices(self):
        return ["softnic0", "softnic1"]

    def control(self, *words):
        if words[0] == "set":
            self.set[words[1], words[2]] = words[3]
        else:
            self.set[words[1], words[0]] = words[2]


class OverSoon:
    """An event that is set after some waits. No test waits for real, so none depends on how fast the machine is."""

    def __init__(self, waits):
        self.waits = waits

    def is_set(self):
        return self.waits <= 0

    def wait(self, _seconds):
        self.waits -= 1
        return self.is_set()


def faults_pass():
    for kind, well in PASSING.items():
        for seed in range(5):
            world = FakeWorld()
            faults.KINDS[kind].during(world, random.Random(seed), OverSoon(waits=seed + 1))
            good = world.set and all(value == well[what] for (_, what), value in world.set.items())
            assert good, f"{kind}, seed {seed}: left {world.set}"


def one_rail_stays():
    for kind in ("port", "cut", "flap"):
        world, rng = FakeWorld(), random.Random(1)
        for _ in range(20):
            faults.KINDS[kind].during(world, rng, OverSoon(waits=20))
        assert len({device for device, _ in world.set}) == 1, f"{kind}: broke {world.set}"


def main():
    faults_pass()
    one_rail_stays()
    for kind, failover, hung, status, text, expected in ROWS:
        round_ = object.__new__(faults.Round)
        round_.spare_rail = True
        round_.kind, round_.broken, round_.options = faults.KINDS[kind], True, types.SimpleNamespace(failover=failover)
        how = round_.judge(hung, status, text, 1.0)
        said = f"{kind}, failover {failover}, status {status}, {text!r}: {how}, and not {expected}"
        assert how.startswith(expected), said
    return 0


if __name__ == "__main__":
    sys.exit(main())
