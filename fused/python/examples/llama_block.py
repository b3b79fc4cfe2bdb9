# SPDX-License-Identifier: Apache-2.0
"""A tensor-parallel Llama block with sequence parallelism, in plain PyTorch, and what it is made of: four products,
each fused with its communication. `layers` decides which: perseus.nn, or Unfused below, the same layers by
torch.distributed and torch.mm.

    block = LlamaBlock(Config(), perseus.nn, group)
    y = block(x)          # x, y: [sequence / W, batch, hidden]
"""
from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import perseus


@dataclasses.dataclass
class Config:
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    intermediate: int = 14336
    rope_theta: float = 500000.0
    eps: float = 1e-5


class RMSNorm(nn.Module):
    """Works on this rank's part of the sequence, so its weight's gradient is a part: see perseus.nn.replicate()."""

    def __init__(self, size: int, eps: float, device: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.bfloat16, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


def rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary position embedding. x: [sequence, batch, heads, dim]."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[0], device=x.device, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
    first, second = x.float().split(half, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class LlamaBlock(nn.Module):
    """Each rank holds heads / W query heads, kv_heads / W key and value heads, and intermediate / W columns of the
    MLP."""

    def __init__(self, config: Config, layers: Any, group: perseus.Group) -> None:
        super().__init__()
        c, self.world = config, group.world
        self.config, self.dim = c, c.hidden // c.heads
        self.heads, self.kv_heads = c.heads // group.world, c.kv_heads // group.world
        self.attention_norm, self.mlp_norm = (RMSNorm(c.hidden, c.eps, group.device) for _ in range(2))
        # Query, key and value in one product, gate and up in another: one gather each. A rank has its heads of all
        # three, so a checkpoint belongs to its number of ranks; perseus.parallel.GatheredInput gathers once for
        # matrices that stay apart.
        self.qkv = layers.ColumnParallelLinear(c.hidden, (c.heads + 2 * c.kv_heads) * self.dim, group)
        self.out = layers.RowParallelLinear(c.hidden, c.hidden, group)
        self.gate_up = layers.ColumnParallelLinear(c.hidden, 2 * c.intermediate, group)
        self.down = layers.RowParallelLinear(c.intermediate, c.hidden, group)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x)  # [sequence, batch, (heads + 2 kv_heads) dim / W]
        sequence, batch, _ = qkv.shape
        q, k, v = (t.view(sequence, batch, -1, self.dim)
                   for t in qkv.split([self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim], -1))
        q, k = rotate(q, self.config.rope_theta), rotate(k, self.config.rope_theta)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 2) for t in (k, v))
        y = F.scaled_dot_product_attention(*(t.permute(1, 2, 0, 3) for t in (q, k, v)), is_causal=True)
        return self.out(y.permute(2, 0, 1, 3).reshape(sequence, batch, -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


# ---- the same layers without fusion, to compare with ----

class _Gather(torch.autograd.Function):
    """The rows of all ranks; backward: the sum of all ranks' gradients, of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: perseus.Group) -> torch.Tensor:
        ctx.group = group
        return group.gather_rows(x.contiguous())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return scatter_sum(grad.contiguous(), ctx.group), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: perseus.Group) -> torch.Tensor:
        ctx.group = group
        return scatter_sum(x.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return ctx.group.gather_rows(grad.contiguous()), None


def scatter_sum(x: torch.Tensor, group: perseus.Group) -> torch.Tensor:
    if group.world == 1:
        return x.clone()
    if x.is_cuda:
        out = x.new_empty(x.shape[0] // group.world, *x.shape[1:])
        group.process_group._reduce_scatter_base(out, x).wait()
        return out
    wide = x.float()  # gloo has no bfloat16 sums
    group.process_group.allreduce([wide]).wait()
    return wide.chunk(group.world)[group.rank].to(x.dtype)


class Unfused:
    class ColumnParallelLinear(perseus.nn.ColumnParallelLinear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(_Gather.apply(x, perseus.find(self.group_name)), perseus.nn.local(self.weight))

    class RowParallelLinear(perseus.nn.RowParallelLinear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _ScatterSum.apply(F.linear(x, perseus.nn.local(self.weight)), perseus.find(self.group_name))
