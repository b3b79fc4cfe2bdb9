# SPDX-License-Identifier: Apache-2.0
"""Claim of python.py: launches of attention that are smaller than their plan are right on GPUs, and what they take
compared with a plan of their own size."""
import statistics

import torch
import torch.distributed as dist
from attention_heads import distance
from perseus.bench import captured, once

import perseus

MOST = (4, 16384)  # batch, positions
SMALLER = ((4, 10240), (4, 8192), (4, 2048), (1, 16384), (2, 10240))
HEADS, DIM, CALLS = 16, 128, 3


def leaves(group, batch, seq):
    """q, k, v and the gradient of out of this rank, [batch, rows, heads, head_dim]."""
    generator = torch.Generator(device=group.device).manual_seed(9 + group.rank)
    made = [torch.rand(batch, seq // group.world, HEADS, DIM, generator=generator, device=group.device).mul_(2).sub_(1)
            .bfloat16() for _ in range(4)]
    return *(t.requires_grad_() for t in made[:3]), made[3]


def passes(group, kind, q, k, v, dout):
    """Results of a forward and a backward pass."""
    if kind == "striped":
        out, lse = perseus.striped_attention(q, k, v, group, causal=True, stripe=256)
    else:
        out, lse = perseus.ring_attention(q, k, v, group, causal=kind == "causal")
    return out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout)


def smaller_launches(group, rounds=10):
    """Forward and backward by turns: in the plans of MOST, and in plans that were opened for this size. Plans differ in
    overlap, which moves the last bits, so results are compared by distance; the large plan's own repeats are equal."""
    found, fine = {}, True
    alone = perseus.init(dist.group.WORLD, name="alone", timeout_ms=60000)
    for kind in ("causal", "full", "striped"):
        passes(group, kind, *leaves(group, *MOST))
    opened = len(group._plans)
    group.freeze()
    for kind in ("causal", "full", "striped"):
        for size in (MOST, *SMALLER):
            tensors = leaves(group, *size)
            ways = {"most": group, "own": alone}
            graphs = {name: captured(lambda of=of: [passes(of, kind, *tensors) for _ in range(CALLS)])
                      for name, of in ways.items()}
            taken, results = {name: [] for name in ways}, {}
            for i in range(2 + rounds):
                for name, graph in graphs.items():
                    for t in sum(results.get(name, ()), ()):
                        t.fill_(torch.nan)
                    usec, results[name] = once(graph, group)
                    taken[name].append(usec / CALLS)
            usec = {name: round(statistics.median(values[2:]), 1) for name, values in taken.items()}
            equal = all(torch.equal(a, b) for other in results["most"][1:] for a, b in zip(results["most"][0], other))
            off = max(distance(a, b) for a, b in zip(results["most"][0], results["own"][0]))
            found[f"{kind}_{size[0]}x{size[1]}"] = {**{f"{name}_us": value for name, value in usec.items()},
                                                    "over_own": round(usec["most"] / usec["own"], 3),
                                                    "distance": round(off, 5), "equal": equal}
            fine = fine and equal and off < 0.01
            del graphs, results
            alone.close()
            alone = perseus.init(dist.group.WORLD, name=f"alone {kind} {size}", timeout_ms=60000)
    alone.close()
    return found, fine and len(group._plans) == opened
