# SPDX-License-Identifier: Apache-2.0
"""torch.ops.perseus.fused_*: our products with the signatures of torch.ops.symm_mem's."""
from __future__ import annotations

import torch

from ._dispatch import _call, _fixed, _library
from ._registry import world_of


def _fused_all_gather_matmul(A: torch.Tensor, Bs: list[torch.Tensor], gather_dim: int, group_name: str, *,
                             return_A: bool = True) -> tuple:
    if not 0 <= gather_dim < A.dim() - 1:
        raise ValueError(f"perseus.fused_all_gather_matmul: gather_dim {gather_dim} is not a leading dimension of A, "
                         f"whose shape is {tuple(A.shape)}")
    plain = A.dim() == 2  # nothing to move or to restore
    first = A if plain else A.movedim(gather_dim, 0)
    rows, others = first.reshape(-1, A.shape[-1]).contiguous(), first.shape[1:-1]
    if return_A:
        *products, gathered = (_call.all_gather_matmul_kept(rows, Bs[0], group_name) if len(Bs) == 1
                               else _call.all_gather_matmuls(rows, Bs, group_name))
    else:
        products, gathered = [_call.all_gather_matmul(rows, b, group_name) for b in Bs], None

    if plain:
        return gathered, products

    def restored(t: torch.Tensor) -> torch.Tensor:
        return t.view(-1, *others, t.shape[-1]).movedim(0, gather_dim)
    return None if gathered is None else restored(gathered), [restored(t) for t in products]


def _fused_matmul_reduce_scatter(A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int,
                                 group_name: str) -> torch.Tensor:
    if reduce_op not in ("sum", "avg"):
        raise ValueError(f"perseus.fused_matmul_reduce_scatter: reduce_op {reduce_op!r} is neither 'sum' nor 'avg'")
    if not 0 <= scatter_dim < A.dim() - 1:
        raise ValueError(f"perseus.fused_matmul_reduce_scatter: scatter_dim {scatter_dim} is not a leading dimension "
                         f"of A, whose shape is {tuple(A.shape)}")
    if reduce_op == "sum" and A.dim() == 2:
        return _call.matmul_reduce_scatter(A, B, group_name)
    first = A.movedim(scatter_dim, 0)
    world = world_of(group_name)
    if first.shape[0] % world:
        raise ValueError(f"perseus.fused_matmul_reduce_scatter: dimension {scatter_dim} of A has {first.shape[0]} "
                         f"elements; {world} ranks must divide them")
    c = _call.matmul_reduce_scatter(first.reshape(-1, A.shape[-1]).contiguous(), B, group_name)
    c = c.view(-1, *first.shape[1:-1], B.shape[1]).movedim(0, scatter_dim)
    return c / world if reduce_op == "avg" else c


_library.define("fused_all_gather_matmul(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, bool return_A = "
                "True) -> (Tensor?, Tensor[])", tags=_fixed)
_library.impl("fused_all_gather_matmul", _fused_all_gather_matmul, "CompositeImplicitAutograd")
_library.define("fused_matmul_reduce_scatter(Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name) -> "
                "Tensor", tags=_fixed)
_library.impl("fused_matmul_reduce_scatter", _fused_matmul_reduce_scatter, "CompositeImplicitAutograd")
