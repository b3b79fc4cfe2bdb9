# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads of a test, on emulated GPUs, each with a gloo group of its own."""
import datetime
import faulthandler
import itertools
import multiprocessing
import os
import pathlib
import sys
import threading
import time
import traceback
import unittest

import torch
import torch.distributed as dist

import perseus

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from ports import free_port  # noqa: E402

LIMIT_S = 300  # of a wait for another rank, which on a busy machine may take a while to get there
_names = itertools.count()
torch.set_num_threads(1)


def gloo(store, rank, world, name):
    """A process group of one thread; torch's own default group belongs to a process."""
    group = dist.ProcessGroup(dist.PrefixStore("group", store), rank, world)
    limit = datetime.timedelta(seconds=LIMIT_S)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO,
                            dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, world, limit))
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._set_group_name(name)
    return group


def run(world, body, watchdog=False, timeout_ms=LIMIT_S * 1000, sleeps=False):
    """body(group) on `world` threads, and what each returned. The first exception is raised here."""
    store, number = dist.HashStore(), next(_names)
    store.set_timeout(datetime.timedelta(seconds=LIMIT_S))
    results, failures = [None] * world, []

    def one(rank):
        try:
            group = perseus.init(gloo(store, rank, world, f"test{number}-{rank}"), device=rank, timeout_ms=timeout_ms,
                                 watchdog=watchdog, sleeps=sleeps)
            results[rank] = body(group)
            group.close()
        except BaseException as e:
            failures.append(e)
            traceback.print_exc()

    if world == 1:  # torch's compiler wants to be used by the main thread
        one(0)
    threads = [] if world == 1 else [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


FORK = multiprocessing.get_context("fork")


def forked(rank, body, *arguments, **variables):
    """A process that exits with body(*arguments), on a node of its own. It is forked, so that torch and frameworks are
    imported once; nothing here may have opened a group before."""
    def main():
        os.environ.update(variables, LOCAL_RANK=str(rank), PERSEUS_NODE=f"node{rank}")
        sys.exit(body(*arguments))
    process = FORK.Process(target=main, daemon=True)  # ends with the test, also where that fails
    process.start()
    return process


def ended(process, limit_s):
    """What it exits with; None: not in time, and it was killed."""
    process.join(limit_s)
    status = process.exitcode
    if status is None:
        process.kill()
    return status


def processes(body, world, *arguments, limit_s=500):
    """What `world` processes exit with that call body(*arguments), each with torch's variables."""
    variables, give_up = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}, time.monotonic() + limit_s
    started = [forked(rank, body, *arguments, RANK=str(rank), WORLD_SIZE=str(world), **variables)
               for rank in range(world)]
    return [ended(process, max(0, give_up - time.monotonic())) for process in started]


def page(section, kind, changes=(), name="training"):
    """The first block of code of this kind in a section of doc/NAME.md. changes: what to exchange in it, each of
    which must be there."""
    text = (pathlib.Path(__file__).resolve().parents[2] / f"doc/{name}.md").read_text()
    code = text.split(f"\n## {section}\n")[1].split("\n## ")[0].split(f"```{kind}\n")[1].split("```")[0]
    for old, new in changes:
        assert old in code, (section, old)
        code = code.replace(old, new)
    return code


def judge(name, found):
    """Prints which of `found`, (what, whether it is right), are wrong. Returns their number, an exit status, when all
    ranks are done: one that ends breaks the groups that another still makes."""
    bad = 0
    for what, good in found:
        if not good:
            bad += 1
            print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {name}: {what}: wrong", file=sys.stderr)
    sys.stderr.flush()
    dist.barrier()
    return min(bad, 100)


def random(rank, *shape, seed=0, dtype=torch.bfloat16):
    """Values that depend on the rank, the seed and the shape."""
    generator = torch.Generator().manual_seed(1000003 * seed + 7919 * rank + sum(shape))
    return torch.rand(*shape, generator=generator).mul_(2).sub_(1).to(dtype)


def beyond(result, partials):
    """How many elements differ from the sum of the partial products (fp64) by more than two roundings and the sums' own
    error."""
    total = sum(partials)
    rounding = 2**-11 if result.dtype is torch.float16 else 2**-8
    bound = (total.abs() + sum(p.abs() for p in partials)) * rounding * 1.01 + 1e-3 * 2**8 * rounding
    return int((~((result.double() - total).abs() <= bound)).sum())


def main():
    faulthandler.dump_traceback_later(int(os.environ.get("PERSEUS_TEST_LIMIT_S", "540")), exit=True)
    unittest.main(module=sys.modules["__main__"], verbosity=2)
