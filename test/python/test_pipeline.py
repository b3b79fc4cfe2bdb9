# SPDX-License-Identifier: Apache-2.0
"""Schedules of torch.distributed.pipelining over stages of our layers, tensor parallelism within a stage: ranks are
processes with gloo, each on an emulated node of its own. run.py runs it on the software NIC."""
import os
import unittest
from unittest import mock

import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import random
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor

import perseus

HIDDEN, INNER, ROWS, BATCHES, STAGES = 128, 96, 128, 4, 4  # rows of a rank in a microbatch


class Mlp(nn.Module):
    """The two layers with sequence parallelism, then two without."""

    def __init__(self, group):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, dtype=torch.bfloat16)
        self.up = perseus.nn.ColumnParallelLinear(HIDDEN, INNER, group, bias=True)
        self.down = perseus.nn.RowParallelLinear(INNER, HIDDEN, group, bias=True)
        self.whole_up = perseus.nn.ColumnParallelLinear(HIDDEN, INNER, group, sequence_parallel=False)
        self.whole_down = perseus.nn.RowParallelLinear(INNER, HIDDEN, group, sequence_parallel=False)

    def forward(self, x):
        x = x + self.down(F.silu(self.up(self.norm(x))))
        return x + self.whole_down(F.silu(self.whole_up(x)))


class Attention(nn.Module):
    """The rows of both ranks are one sequence."""

    def __init__(self, group):
        super().__init__()
        self.group = group
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, dtype=torch.bfloat16) for _ in range(4))

    def forward(self, x):
        q, k, v = (linear(x).view(1, -1, HIDDEN // 64, 64) for linear in (self.q, self.k, self.v))
        return x + self.o(perseus.ring_attention(q, k, v, self.group)[0].reshape(x.shape))


class Moe(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.plan = perseus.moe_plan(max_tokens=ROWS, hidden=HIDDEN, experts=4, top_k=2, inner=64, linear_layout=True,
                                     group=group)
        self.router = nn.Parameter(random(0, 4, HIDDEN))
        self.gate_up = nn.Parameter(random(group.rank, 4 // group.world, 128, HIDDEN).mul_(HIDDEN**-0.5))
        self.down = nn.Parameter(random(group.rank, 4 // group.world, HIDDEN, 64).mul_(0.125))

    def forward(self, x):
        weights, chosen = F.linear(x, self.router).float().softmax(-1).topk(2, -1)
        return perseus.moe_layer(x, chosen, weights, self.gate_up, self.down, self.plan, residual=x)[0]


KINDS = (Mlp, Attention, Moe, Mlp)


def made(index, group):
    torch.manual_seed(index)
    return KINDS[index](group)


def loss_of(y, target):
    return (y.float() - target.float()).square().mean()


def part(t):
    return t.to_local() if isinstance(t, DTensor) else t


def gradients(stage):
    return {name: part(p.grad) for name, p in stage.named_parameters()}


def without_pipeline(group, x, target):
    """Losses, and the gradients of each stage."""
    stages = nn.ModuleList(made(i, group) for i in range(STAGES))
    losses = []
    for inputs, wanted in zip(x.chunk(BATCHES), target.chunk(BATCHES)):
        for stage in stages:
            inputs = stage(inputs)
        loss = loss_of(inputs, wanted)
        loss.backward()
        losses.append(loss.detach())
    for p in stages.parameters():
        p.grad.div_(BATCHES)
    return losses, [gradients(stage) for stage in stages]


def pipelined(kind, mine, pipe, group, x, target):
    """The losses, on the rank that has the last stage, the gradients of the stages of this rank, and how often the
    gradients of weights came by themselves."""
    example = torch.empty(ROWS, HIDDEN, dtype=torch.bfloat16, device="meta")
    stages = [PipelineStage(made(i, group), i, STAGES, torch.device("cpu"), input_args=(example,),
                            output_args=(example,), group=pipe) for i in mine]
    base, losses = schedules._PipelineStageBase, []
    with (mock.patch.object(base, "backward_weight_one_chunk", autospec=True,
                            side_effect=base.backward_weight_one_chunk) as came,
          # messages that connect stages; gloo is connected, and has none of a rank to itself, as ZBV wants
          mock.patch.object(base, "_get_init_p2p_neighbors_ops", return_value=[])):
        schedule = kind(stages, BATCHES, loss_fn=loss_of)
        first, last = 0 in mine, STAGES - 1 in mine
        schedule.step(*((x,) if first else ()), **({"target": target, "losses": losses} if last else {}))
    return losses, {i: gradients(stage.submod) for i, stage in zip(mine, stages)}, came.call_count


def compare(pipe, group):
    x, target = (random(group.rank, BATCHES * ROWS, HIDDEN, seed=seed) for seed in (1, 2))
    losses, wanted = without_pipeline(group, x, target)
    rank = pipe.rank()
    in_turn, there_and_back = (rank, rank + 2), (rank, STAGES - 1 - rank)
    for kind, mine, splits in ((schedules.ScheduleInterleaved1F1B, in_turn, False),
                               (schedules.ScheduleInterleavedZeroBubble, in_turn, True),
                               (schedules.ScheduleZBVZeroBubble, there_and_back, True)):
        found, grads, came = pipelined(kind, mine, pipe, group, x, target)
        name = kind.__name__
        yield f"{name}: {came} weights by themselves", (came > 0) == splits
        yield f"{name}: losses {found}, wanted {losses}", not found or all(map(torch.equal, found, losses))
        for i in mine:
            for parameter, g in grads[i].items():
                yield f"{name}: stage {i}, {parameter}", torch.equal(g, wanted[i][parameter])


def rank_main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    group = perseus.init(mesh["tp"], device=0, timeout_ms=ranks.LIMIT_S * 1000)
    os._exit(ranks.judge("pipeline", compare(mesh["pp"].get_group(), group)))


class Pipeline(unittest.TestCase):
    def test_losses_and_gradients_are_those_of_no_pipeline(self):
        self.assertEqual(ranks.processes(rank_main, 4), [0] * 4)


if __name__ == "__main__":
    ranks.main()
