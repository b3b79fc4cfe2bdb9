#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
r"""An MoE block as DeepSeek-V3 has it: sigmoid scores, a bias that only selects, experts in groups, weights that are
scaled to a sum, and shared experts. The routed experts are split among the ranks. They run in one call
(perseus.moe_layer), or as dispatch, products of torch, combine.

    block = MoeBlock(Config(), group)
    y = block(x)          # x, y: [..., hidden], this rank's tokens; gradients of x and of all weights

Run it: forward and backward in both ways, which must agree.

    torchrun --nproc-per-node 2 fused/python/examples/moe_block.py \
        [--hidden 7168 --inner 2048 --experts 256 --tokens 4096 --rounds 5]
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import perseus


@dataclasses.dataclass
class Config:
    hidden: int = 7168
    inner: int = 2048
    experts: int = 256
    top_k: int = 8
    groups: int = 8  # of experts
    top_groups: int = 4  # that a token may choose from
    shared: int = 1  # experts that take every token
    scale: float = 2.5  # the sum of a token's router weights
    max_tokens: int = 4096  # of a rank


class MoeBlock(nn.Module):
    """one_call: perseus.moe_layer; else dispatch, own products, combine. status: of the last forward, int32 [8] as of
    moe_dispatch_gemm()."""

    def __init__(self, config: Config, group: perseus.Group, one_call: bool = True) -> None:
        super().__init__()
        c, self.one_call = config, one_call
        self.config, local = c, c.experts // group.world
        self.plan = perseus.moe_plan(max_tokens=c.max_tokens, hidden=c.hidden, experts=c.experts, top_k=c.top_k,
                                     inner=c.inner, linear_layout=True, group=group)

        def matrix(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, device=group.device,
                                            dtype=torch.float32).mul_(shape[-1]**-0.5).bfloat16())
        self.router = perseus.nn.mark_replicated(matrix(c.experts, c.hidden))
        self.register_buffer("bias", torch.zeros(c.experts, device=group.device))  # set by whoever balances the load
        self.gate_up, self.down = matrix(local, 2 * c.inner, c.hidden), matrix(local, c.hidden, c.inner)
        self.shared_gate_up = perseus.nn.mark_replicated(matrix(2 * c.inner * c.shared, c.hidden))
        self.shared_down = perseus.nn.mark_replicated(matrix(c.hidden, c.inner * c.shared))

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts int64 and weights fp32, [tokens, top_k]."""
        c, scores = self.config, F.linear(x.float(), self.router.float()).sigmoid()
        biased = (scores.detach() + self.bias).view(-1, c.groups, c.experts // c.groups)
        # a group counts by its two best experts
        best = biased.topk(2, -1).values.sum(-1).topk(c.top_groups, -1).indices
        allowed = torch.zeros_like(biased[..., 0], dtype=torch.bool).scatter_(1, best, True)
        chosen = biased.masked_fill(~allowed[..., None], float("-inf")).flatten(1).topk(c.top_k, -1).indices
        weights = scores.gather(1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True) * c.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.config.hidden)
        chosen, weights = self.route(rows)
        gate, up = F.linear(rows, self.shared_gate_up).chunk(2, -1)
        shared = F.linear(F.silu(gate) * up, self.shared_down)
        if self.one_call:
            y, self.status = perseus.moe_layer(rows, chosen, weights, self.gate_up, self.down, self.plan,
                                               residual=shared)
            return y.view_as(x)
        d = perseus.moe_dispatch(rows, chosen, weights, self.plan)
        gate, up = torch._grouped_mm(d.rows, self.gate_up.transpose(1, 2), offs=d.ends).chunk(2, -1)
        y = torch._grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=d.ends)
        self.status = d.status
        return perseus.moe_combine(y, d, residual=shared).view_as(x)


def forward_and_backward(block: MoeBlock, x: torch.Tensor, group: perseus.Group) -> list[torch.Tensor]:
    """The result, the gradient of x, and those of all weights."""
    block.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    y = block(x)
    y.float().square().mean().backward()
    perseus.nn.sum_replicated_gradients(block, group)
    return [y.detach(), x.grad, *(p.grad for p in block.parameters())]


def furthest(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """The largest distance of two tensors, over the norm of the second."""
    return max(float((x.float() - y.float()).norm() / y.float().norm().clamp_min(1e-12)) for x, y in zip(a, b))


def both_ways(config: Config, group: perseus.Group, tokens: int, rounds: int = 0) -> dict[str, float]:
    """How far the two ways are apart; of each way, microseconds of a forward and backward of this rank, routing and
    shared expert included."""
    torch.manual_seed(group.rank)
    block, x = MoeBlock(config, group), torch.randn(tokens, config.hidden, device=group.device).bfloat16()
    found, results = {}, []
    for name, block.one_call in (("one_call", True), ("by_parts", False)):
        results.append(forward_and_backward(block, x, group))
        group.place.synchronize()
        begin = time.perf_counter()
        for _ in range(rounds):
            forward_and_backward(block, x, group)
        group.place.synchronize()
        if rounds:
            found[f"{name}_us"] = (time.perf_counter() - begin) / rounds * 1e6
    return {"apart": furthest(results[1], results[0]), **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(Config):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank")
    parser.add_argument("--rounds", type=int, default=0, help="of each way, timed")
    parser.add_argument("--tolerance", type=float, default=0.02,
                        help="of the distance of a result or gradient, over its norm")
    options = vars(parser.parse_args())
    tokens, rounds, tolerance = (options.pop(name) for name in ("tokens", "rounds", "tolerance"))
    if "LOCAL_RANK" not in os.environ:
        parser.exit(1, f"{parser.prog}: start it by torchrun --nproc-per-node GPUS, on Hopper GPUs; emulated.py needs "
                       "none\n")
    if int(os.environ["LOCAL_RANK"]) >= torch.cuda.device_count():
        parser.exit(1, f"{parser.prog}: no GPU for local rank {os.environ['LOCAL_RANK']}: torch finds "
                       f"{torch.cuda.device_count()}; emulated.py needs none\n")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    group = perseus.init()
    found = both_ways(Config(**options), group, tokens, rounds)
    good = found["apart"] <= tolerance
    print(json.dumps({"rank": group.rank, "ranks": group.world, "tokens": tokens, **found, "ok": good}))
    group.close()
    torch.distributed.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
