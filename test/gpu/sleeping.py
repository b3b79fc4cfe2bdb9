# SPDX-License-Identifier: Apache-2.0
"""Claim of python.py: on GPUs, a group that has slept works again, and so do captured graphs."""
import statistics
import time

import torch
import torch.distributed as dist
from perseus.bench import captured, once

import perseus

ROWS, COLUMNS, DEPTH = 8192, 4096, 4096
TOKENS, EXPERTS, TOP, HIDDEN, INNER = 512, 16, 4, 2048, 1024


def uniform(*shape):
    return torch.rand(*shape, device="cuda").mul_(2).sub_(1).bfloat16()


def calls_of(group):
    """Kernels that CTAs feed, and such as copy engines do: nodes of a graph that are copies."""
    torch.manual_seed(3 + group.rank)
    a, w, sums = uniform(ROWS // group.world, DEPTH), uniform(COLUMNS, DEPTH), uniform(ROWS, DEPTH)
    few, head = uniform(64, DEPTH), uniform(2, 4096, 8, 128)
    tokens, router = uniform(TOKENS, HIDDEN), torch.rand(TOKENS, EXPERTS, device="cuda")
    weights, chosen = torch.topk(router.softmax(-1), TOP)
    experts = EXPERTS // group.world
    up, down = uniform(experts, HIDDEN, 2 * INNER), uniform(experts, INNER, HIDDEN)
    plan = perseus.moe_plan(max_tokens=TOKENS, hidden=HIDDEN, experts=EXPERTS, top_k=TOP, inner=INNER, group=group)
    return {"all_gather": lambda: perseus.all_gather_matmul(a, w.t(), group),
            "reduce_scatter": lambda: perseus.matmul_reduce_scatter(sums, w.t(), group),
            "all_reduce": lambda: perseus.matmul_all_reduce(sums, w.t(), group),
            "few_rows": lambda: perseus.matmul_all_reduce(few, w.t(), group),
            "attention": lambda: perseus.ring_attention(head, head, head, group)[0],
            "moe_layer": lambda: perseus.moe_layer(tokens, chosen, weights, up, down, plan)[0]}


def used():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def timed(call):
    torch.cuda.synchronize()
    dist.barrier()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return round((time.perf_counter() - began) * 1e3, 2)


def a_group_sleeps(group, rounds=9, sleeps=5):
    """Graphs of all kernels, captured once and replayed after each of five times asleep, in which others write all
    memory that is free: the same bits each time. What sleeping and waking take; and what kernels take on memory that
    can sleep, by turns with a group whose memory cannot."""
    able = perseus.init(dist.new_group(list(range(group.world))), name="sleeper", sleeps=True, timeout_ms=60000)
    graphs = {which: {name: captured(call) for name, call in calls_of(g).items()}
              for which, g in (("cannot", group), ("can", able))}
    taken = {which: {name: [] for name in calls} for which, calls in graphs.items()}
    for i in range(2 + rounds):
        for name in graphs["can"]:
            for which in sorted(graphs, reverse=bool(i % 2)):
                usec, _ = once(graphs[which][name], group)
                if i >= 2:
                    taken[which][name].append(usec)
    usec = {name: [round(statistics.median(taken[which][name]), 1) for which in ("cannot", "can")]
            for name in graphs["can"]}
    before = {name: graph().clone() for name, graph in graphs["can"].items()}
    held, awake, wrong, freed = able.memory()[0], used(), [], []
    took = {"sleep_ms": [], "wake_ms": []}
    for _ in range(sleeps):
        took["sleep_ms"].append(timed(able.sleep))
        freed.append(awake - used())
        others = torch.full((int(torch.cuda.mem_get_info()[0] * 0.9),), 0xff, dtype=torch.uint8, device="cuda")
        del others
        torch.cuda.empty_cache()
        took["wake_ms"].append(timed(able.wake))
        for name, graph in graphs["can"].items():
            graph().fill_(torch.nan)
            if not torch.equal(graph(), before[name]):
                wrong.append(name)
    able.check()
    wrong += [f"{name} of the other group" for name, graph in graphs["cannot"].items()
              if not torch.equal(graph(), before[name])]
    graphs.clear()
    able.close()
    return {"held_mb": round(held / 2**20), "freed_mb": round(min(freed) / 2**20), **took,
            "us_cannot_and_can_sleep": usec, "differ": wrong}, min(freed) > 0.95 * held and not wrong
