# SPDX-License-Identifier: Apache-2.0
"""Linear layers that are split among the ranks of a group (tensor parallelism), with sequence parallelism if wanted.

A column-parallel layer holds out_features / W rows of the weight, a row-parallel one in_features / W columns. With sequence parallelism the
activations between the two pairs of a transformer are split along their first dimension (tokens, or sequence in [sequence, batch, features]):

    x [t / W, ..., in]  -> ColumnParallelLinear -> [t, ..., hidden / W] -> RowParallelLinear -> [t / W, ..., out]

Without it x and the result have t rows on every rank. Weights are laid out as torch.nn.Linear's; dtype is bfloat16, or float16.
"""
from __future__ import annotations

from typing import Any, Iterable

import torch
from torch import nn

from . import ops
from ._registry import GroupLike, find, name_of


class _Parallel(nn.Module):
    def __init__(self, in_features: int, out_features: int, split: str, group: GroupLike, bias: bool, sequence_parallel: bool, device: Any,
                 dtype: torch.dtype) -> None:
        super().__init__()
        opened = find(group)
        self.group_name, self.world, self.sequence_parallel = name_of(opened), opened.world, sequence_parallel
        whole = {"out_features": out_features, "in_features": in_features}
        if whole[split] % opened.world:
            raise ValueError(f"{type(self).__name__}: {opened.world} ranks must divide {split} {whole[split]}")
        self.in_features, self.out_features = in_features, out_features
        shape = [size // opened.world if name == split else size for name, size in whole.items()]
        device = opened.device if device is None else device
        self.weight = nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(shape[0], dtype=dtype, device=device)) if bias else None
        nn.init.normal_(self.weight, std=in_features**-0.5)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, ranks={self.world}, sequence_parallel={self.sequence_parallel}, bias={self.bias is not None}"


class ColumnParallelLinear(_Parallel):
    """y = x @ weight.t() with the rows of weight [out / W, in] of this rank. bias [out / W].

    With sequence parallelism x is [t / W, ..., in] and y [t, ..., out / W] (all_gather_matmul); without, both have t rows (replicated_matmul).
    keep_gathered: the x of all ranks [t, ..., in] stays for the weight's gradient; False: the backward pass gathers it once more.

    Example::

        up = perseus.nn.ColumnParallelLinear(4096, 14336)
    """

    def __init__(self, in_features: int, out_features: int, group: GroupLike = None, *, bias: bool = False, sequence_parallel: bool = True,
                 keep_gathered: bool = True, device: Any = None, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(in_features, out_features, "out_features", group, bias, sequence_parallel, device, dtype)
        self.keep_gathered = keep_gathered

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, b = x.reshape(-1, self.in_features), self.weight.t()
        if self.sequence_parallel:
            y = ops.all_gather_matmul(rows, b, self.group_name, bias=self.bias, keep_gathered=self.keep_gathered)
        else:
            y = ops._ops.replicated_matmul(rows, b, self.group_name, self.bias)
        return y.view(-1, *x.shape[1:-1], self.weight.shape[0])


class RowParallelLinear(_Parallel):
    """y = the sum over all ranks of x @ weight.t(), with the columns of weight [out, in / W] of this rank. bias [out], the same on all ranks.

    x is [t, ..., in / W]. With sequence parallelism y is [t / W, ..., out] (matmul_reduce_scatter); the gradient of bias is then this rank's
    part, see sum_replicated_gradients(). Without, y has t rows (matmul_all_reduce).

    Example::

        down = perseus.nn.RowParallelLinear(14336, 4096)
    """

    def __init__(self, in_features: int, out_features: int, group: GroupLike = None, *, bias: bool = False, sequence_parallel: bool = True,
                 device: Any = None, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(in_features, out_features, "in_features", group, bias, sequence_parallel, device, dtype)
        if self.bias is not None and sequence_parallel:
            mark_replicated(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        op = ops._ops.matmul_reduce_scatter if self.sequence_parallel else ops._ops.matmul_all_reduce
        y = op(x.reshape(-1, self.weight.shape[1]), self.weight.t(), self.group_name, self.bias)
        return y.view(-1, *x.shape[1:-1], self.out_features)


def mark_replicated(parameter: nn.Parameter) -> nn.Parameter:
    """Says that a parameter is the same on all ranks but sees only this rank's part of the sequence: a norm's weight under sequence parallelism."""
    parameter.perseus_replicated = True  # type: ignore[attr-defined]
    return parameter


def sum_replicated_gradients(parameters: Iterable[nn.Parameter], group: GroupLike = None) -> None:
    """Adds up the gradients of marked parameters over the ranks; after backward(), before the optimizer.

    Example::

        loss.backward()
        perseus.nn.sum_replicated_gradients(model.parameters())
        optimizer.step()
    """
    process_group = find(group).process_group
    grads = [p.grad for p in parameters if getattr(p, "perseus_replicated", False) and p.grad is not None]
    if not grads or find(group).world == 1:
        return
    together = torch.cat([g.reshape(-1).float() for g in grads])
    process_group.allreduce([together]).wait()
    for grad, part in zip(grads, together.split([g.numel() for g in grads])):
        grad.copy_(part.view_as(grad))


__all__ = ["ColumnParallelLinear", "RowParallelLinear", "mark_replicated", "sum_replicated_gradients"]
