# SPDX-License-Identifier: Apache-2.0
"""perseus.tune(): how products of a shape run fastest on these GPUs. perseus.tuning is its command."""
from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any

import torch

from . import ops
from ._registry import GroupLike, find

OPS = {"all_gather_matmul": ops.ALLGATHER, "matmul_reduce_scatter": ops.REDUCE_SCATTER,
        "matmul_all_reduce": ops.ALLREDUCE}


def tune(op: str, m: int, n: int, k: int, group: GroupLike = None, *, transposed: bool = True,
         dtype: torch.dtype = torch.bfloat16, rounds: int = 10) -> dict[str, int]:
    """*Collective.* Times the ways in which `op` can run and keeps the fastest, for plans that are opened from now on.

    op: the name of an op. m: rows of the whole product; n, k: of this rank's b [k, n]. transposed: b is weight.t().
    Returns the fields of struct prs_gemm_tuning; 0: as without tuning.

    Example::

        perseus.tune("all_gather_matmul", 2048, 14336, 8192)
    """
    if op not in OPS:
        raise ValueError(f"perseus.tune: {op!r} is no op that can be tuned: one of {', '.join(OPS)}")
    if dtype not in ops._PRODUCTS:
        raise TypeError(f"perseus.tune: dtype is {dtype}; it must be torch.bfloat16 or torch.float16")
    if not os.environ.get("PERSEUS_FUSED_TUNING"):
        raise ValueError("perseus.tune: PERSEUS_FUSED_TUNING is not set: it names the file that keeps what is measured")
    g = find(group)
    lib, place, rows = g.library, g.place, g.rows(m)
    a = torch.rand(rows // g.world if op == "all_gather_matmul" else rows, k, device=g.device).mul_(2).sub_(1).to(dtype)
    b = torch.rand(n, k, device=g.device).mul_(2).sub_(1).to(dtype)
    c = a.new_empty(rows // g.world if op == "matmul_reduce_scatter" else rows, n)
    shape = lib.prs_gemm_shape(op=OPS[op], m=rows, n=n, k=k, b_transposed=transposed, c_anywhere=1,
                               dtype=ops._PRODUCTS[dtype])
    operands, best = lib.prs_gemm_operands(a=place.read(a), b=place.read(b), c=place.write(c)), lib.prs_gemm_tuning()
    with g.exchange.entered() if g.exchange else contextlib.nullcontext():
        status = lib.prs_gemm_autotune(g.handle, ctypes.byref(shape), ctypes.byref(operands), rounds, place.stream(),
                                       ctypes.byref(best))
    place.done()
    lib.check(status, f"perseus.tune: group {g.name}")
    for key in [key for key in g._plans if key[:3] == (OPS[op], n, k) and key[-1] == rows]:
        retired = ("before tuning", len(g._plans), *key)
        g._plans[retired] = g._plans.pop(key)  # captured graphs may still use it
    g.products.clear()
    return {name: getattr(best, name) for name, _ in best._fields_}
