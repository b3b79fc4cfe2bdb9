# SPDX-License-Identifier: Apache-2.0
"""What the adaptors for servers share: a MoE layer with a plan for each size of batches."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .._registry import GroupLike, find
from ..moe import DTYPES, MoePlan, moe_layer, moe_plan
from ..moe_scaled import moe_scaled_layer

# Of all ranks. A plan for so few reads fewer choices than one for 512 tokens a rank, and its tiles fit their rows.
FEW_CHOICES = 4096
_bf16, _e4m3 = DTYPES


def sizes_of(max_tokens: int, choices: int, wanted: Iterable[int] = ()) -> list[int]:
    """The max_tokens of the plans to open, the largest first, since then they share memory. choices: of all ranks, if
    each had one token. wanted: what the operator asks for; else 8, those of FEW_CHOICES, and 512."""
    sizes = sorted({max_tokens, *(n for n in (tuple(wanted) or (8, FEW_CHOICES // choices, 512)) if n < max_tokens)})
    if sizes[0] < 1:
        raise ValueError(f"perseus: plans for {sizes} tokens: at least 1 each")
    return sizes[::-1]


def cannot(*, hidden: int, inner: int, experts: int, world: int, gated: bool, scaled: bool) -> str:
    """Why the kernels do not take a layer of these sizes; empty: they do."""
    least = 128 if scaled else 8
    return next((text for text, holds in (
        (f"hidden size {hidden}: not a multiple of {least}", hidden % least),
        (f"inner size {inner}: not a multiple of {least}", inner % (least if gated or scaled else 8)),
        (f"{experts} experts on {world} ranks: not as many on each", experts % world)) if holds), "")


class Layer:
    """*Collective.* Opens the plans of MoE layers of one shape, before CUDA graphs are captured. All layers of a model
    that have this shape share them.

    max_tokens: the most of a rank in one call. wanted: sizes of batches, as of sizes_of(). dtype: of the weights,
    torch.bfloat16 or torch.float8_e4m3fn with scales of blocks.
    """

    def __init__(self, group: GroupLike, *, max_tokens: int, top_k: int, wanted: Iterable[int] = (),
                 dtype: torch.dtype = _bf16, **shape: Any) -> None:
        self.group, self.scaled = find(group), dtype is _e4m3
        self.plans = [moe_plan(max_tokens=most, top_k=top_k, linear_layout=True, dtype=dtype, group=self.group, **shape)
                      for most in sizes_of(max_tokens, self.group.world * top_k, wanted)][::-1]

    def plan(self, most: int) -> MoePlan:
        """The smallest plan for `most` tokens, the most of any rank in this call, so that all ranks take the same."""
        for plan in self.plans:
            if plan.sizes[0] >= most:
                return plan
        raise ValueError(f"perseus: {most} tokens on a rank, and the largest plan of this MoE layer is for "
                         f"{self.plans[-1].sizes[0]}: it was opened for the server's own limit of a batch")

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor,
                 down: torch.Tensor, most: int,
                 scales: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
        """The layer's results for this rank's tokens. gate_up, down, scales: as torch.nn.Linear and checkpoints keep
        them."""
        plan = self.plan(most)
        tokens = x.contiguous(), chosen.to(torch.int64).contiguous(), weights.float().contiguous()
        if self.scaled:
            return moe_scaled_layer(*tokens, gate_up, down, *scales, plan)[0]
        return moe_layer(*tokens, gate_up, down, plan)[0]

    def of_replicated(self, out: torch.Tensor, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor,
                      *operands: Any) -> None:
        """The layer for tokens that all ranks have: each rank takes a part of them, and the sum of `out` over the ranks
        is the result."""
        most = -(-x.shape[0] // self.group.world)
        mine = slice(min(self.group.rank * most, x.shape[0]), min((self.group.rank + 1) * most, x.shape[0]))
        gate_up, down, *scales = operands
        out.zero_()
        # clones begin where the kernels may read them
        out[mine] = self(x[mine], chosen[mine].clone(), weights[mine].clone(), gate_up, down, most, *scales)
