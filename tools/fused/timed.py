# SPDX-License-Identifier: Apache-2.0
"""Time methods in turn, by events, and check that each timed launch of our own did its work (timed.h is the same in C):
it must write the same bits as the last warm-up launch, and the last one is also compared with a reference."""
import statistics

import torch
import torch.distributed as dist

WARMUP = 3
PAUSE_CLOCKS = 4_000_000  # about 2 ms
SAME_SIZE = {2: torch.int16, 4: torch.int32}


def bits(tensor):
    """NaNs of the same bits are equal here."""
    return tensor.view(SAME_SIZE[tensor.element_size()])


class Way:
    """`run` returns its result, as `check` takes it. For our own methods only: `wrote` returns what a launch writes,
    and `travels` the inputs that are sent to other ranks. `check` reads the result of the last timed run, and its value
    is kept as `found`; `sampled` is a view of one element that it reads."""

    def __init__(self, run, poison=None, wrote=None, check=None, sampled=None, travels=()):
        self.run, self.poison, self.wrote, self.check = run, poison, wrote, check
        self.sampled, self.travels = sampled, travels
        self.usec, self.kept, self.differing, self.checked, self.found = [], None, 0, 0, None

    def keep(self):
        self.kept = [bits(t).clone() for t in self.wrote()]

    def differences(self):
        return sum(int((bits(a) != b).sum()) for a, b in zip(self.wrote(), self.kept))


def together(world):
    """What is enqueued next starts at the same time on all GPUs, and after all of it was enqueued, as in a program that
    does not wait for each step: ranks in Python are 100 us apart, and need 10 us and more for a call."""
    torch.cuda.synchronize()
    if world > 1:
        dist.barrier()
        torch.cuda.synchronize()
    torch.cuda._sleep(PAUSE_CLOCKS)
    if world > 1:
        dist.all_reduce(torch.zeros(1, device="cuda"))


def leave_other_data(own):
    """What other ranks send goes to memory of the plan, which has at most two banks. A launch that does not wait for it
    reads what one of the two launches before it was sent: so those two get other data, and the error shows."""
    for tensor in own.travels:
        tensor.neg_()
    for _ in range(2):
        own.run()
    for tensor in own.travels:
        tensor.neg_()


def time_once(way, own, world, slowest):
    leave_other_data(own)  # before the baselines too, so that all methods find the caches alike
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if way.poison:
        way.poison()  # results of an earlier run must not pass for this one's
    together(world)
    begin.record()
    result = way.run()
    end.record()
    end.synchronize()
    return slowest(begin.elapsed_time(end) * 1e3), result


def look_at(way, own, result, timed, rounds, corrupt):
    """Call it before anything overwrites the results. After the baselines our own results are compared too, only so
    that every method finds the caches alike. timed: number of the timed round, from 1."""
    if timed == 0 and way.wrote:
        way.keep()
    if timed < 1:
        return
    if way.wrote and timed == corrupt:  # make the launch look wrong
        bits(way.sampled()).bitwise_xor_(0x4000)
    differing = (way if way.wrote else own).differences()
    if way.wrote:
        way.differing += differing
        way.checked += 1
    if way.check and timed == rounds:
        way.found = way.check(result)


def time_all(ways, rounds, world, slowest, corrupt=0):
    """Microseconds by name: median over rounds of the slowest rank. slowest(usec): the largest over all
    ranks, which are done then. corrupt: the timed round in which an element is changed before it is compared; 0: in
    none."""
    own = next(way for way in ways.values() if way.wrote)
    for i in range(WARMUP + rounds):
        for way in ways.values():
            usec, result = time_once(way, way if way.wrote else own, world, slowest)
            if i >= WARMUP:
                way.usec.append(usec)
            look_at(way, own, result, i + 1 - WARMUP, rounds, corrupt)
    return {name: round(statistics.median(way.usec), 1) for name, way in ways.items()}
