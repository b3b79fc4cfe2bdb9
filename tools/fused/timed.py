# SPDX-License-Identifier: Apache-2.0
"""Ways that take turns, timed by events, and that each timed launch of our own did what it was timed for (timed.h is the same in C): in all that it
writes it leaves the bits of the last warm-up launch, and the last one is compared with a reference where it lies."""
import statistics

import torch
import torch.distributed as dist

WARMUP = 3
PAUSE_CLOCKS = 4_000_000  # some 2 ms
SAME_SIZE = {2: torch.int16, 4: torch.int32}


def bits(tensor):
    """Not-a-numbers of the same bits are equal here."""
    return tensor.view(SAME_SIZE[tensor.element_size()])


class Way:
    """`run` gives its result, or whatever `check` wants of it. Of our own only: `wrote` gives what a launch writes, `travels` of its inputs what goes
    to other ranks. `check` looks at what the last timed run left and its value is kept as `found`; `sampled` is one element, a view, that it looks at."""

    def __init__(self, run, poison=None, wrote=None, check=None, sampled=None, travels=()):
        self.run, self.poison, self.wrote, self.check, self.sampled, self.travels = run, poison, wrote, check, sampled, travels
        self.usec, self.kept, self.differing, self.checked, self.found = [], None, 0, 0, None

    def keep(self):
        self.kept = [bits(t).clone() for t in self.wrote()]

    def differences(self):
        return sum(int((bits(a) != b).sum()) for a, b in zip(self.wrote(), self.kept))


def together(world):
    """What is enqueued next starts at the same time on all GPUs, and all of it has been enqueued by then, as in a program that does not wait for each
    step: ranks of Python are 100 us apart, and take 10 us and more for a call that they have just come to."""
    torch.cuda.synchronize()
    if world > 1:
        dist.barrier()
        torch.cuda.synchronize()
    torch.cuda._sleep(PAUSE_CLOCKS)
    if world > 1:
        dist.all_reduce(torch.zeros(1, device="cuda"))


def leave_other_data(own):
    """What other ranks send waits in memory of the plan, which has two banks at most. A launch that did not wait for it would find what the launch
    before it, or the one before that, was sent: so those are of other data."""
    for tensor in own.travels:
        tensor.neg_()
    for _ in range(2):
        own.run()
    for tensor in own.travels:
        tensor.neg_()


def time_once(way, own, world, slowest):
    leave_other_data(own)  # before others' runs too: all find the caches alike
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if way.poison:
        way.poison()  # what an earlier run left must not pass for this one's
    together(world)
    begin.record()
    result = way.run()
    end.record()
    end.synchronize()
    return slowest(begin.elapsed_time(end) * 1e3), result


def look_at(way, own, result, timed, rounds, corrupt):
    """Before anything else writes there. Behind others' runs our own results are compared too, for nothing: each way then finds the caches as the
    others do. timed: number of the timed round, from 1."""
    if timed == 0 and way.wrote:
        way.keep()
    if timed < 1:
        return
    if way.wrote and timed == corrupt:  # what this looks like when a launch was wrong
        bits(way.sampled()).bitwise_xor_(0x4000)
    differing = (way if way.wrote else own).differences()
    if way.wrote:
        way.differing += differing
        way.checked += 1
    if way.check and timed == rounds:
        way.found = way.check(result)


def time_all(ways, rounds, world, slowest, corrupt=0):
    """Microseconds by name: median over rounds of the slowest rank. slowest(usec): over all ranks, which
    are then through. corrupt: the timed round in which an element is changed before it is compared; 0: in none."""
    own = next(way for way in ways.values() if way.wrote)
    for i in range(WARMUP + rounds):
        for way in ways.values():
            usec, result = time_once(way, way if way.wrote else own, world, slowest)
            if i >= WARMUP:
                way.usec.append(usec)
            look_at(way, own, result, i + 1 - WARMUP, rounds, corrupt)
    return {name: round(statistics.median(way.usec), 1) for name, way in ways.items()}
