# SPDX-License-Identifier: Apache-2.0
"""Measure how products of given shapes run fastest on these GPUs, and keep that in the file that PERSEUS_FUSED_TUNING
names.

    PERSEUS_FUSED_TUNING=tunings.txt torchrun --nproc-per-node 4 -m perseus.tuning all_gather_matmul:2048x14336x8192 ...

A shape is OP:MxNxK, with M rows of the whole product, and N and K those of this rank's b [K, N]. Plans find the entry
of the nearest shape in that file (fused/gemm/table.h), so that the powers of two of M are enough.
"""
from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
from typing import Any

import torch
import torch.distributed as dist

from . import ops
from ._library import library
from ._registry import GroupLike, find, init

_OPS = {"all_gather_matmul": ops.ALLGATHER, "matmul_reduce_scatter": ops.REDUCE_SCATTER,
        "matmul_all_reduce": ops.ALLREDUCE}


def tune(op: str, m: int, n: int, k: int, group: GroupLike = None, *, transposed: bool = True,
         dtype: torch.dtype = torch.bfloat16, rounds: int = 10) -> dict[str, int]:
    """*Collective.* Times the ways in which `op` can run and keeps the fastest, for plans that are opened from now on.

    op: the name of an op. m: rows of the whole product; n, k: of this rank's b [k, n]. transposed: b is weight.t().
    Returns the fields of struct prs_gemm_tuning; 0: as without tuning.

    Example::

        perseus.tune("all_gather_matmul", 2048, 14336, 8192)
    """
    if op not in _OPS:
        raise ValueError(f"perseus.tune: {op!r} is no op that can be tuned: one of {', '.join(_OPS)}")
    if dtype not in ops._PRODUCTS:
        raise TypeError(f"perseus.tune: dtype is {dtype}; it must be torch.bfloat16 or torch.float16")
    if not os.environ.get("PERSEUS_FUSED_TUNING"):
        raise ValueError("perseus.tune: PERSEUS_FUSED_TUNING is not set: it names the file that keeps what is measured")
    g = find(group)
    lib, place, rows = g.library, g.place, g.rows(m)
    a = torch.rand(rows // g.world if op == "all_gather_matmul" else rows, k, device=g.device).mul_(2).sub_(1).to(dtype)
    b = torch.rand(n, k, device=g.device).mul_(2).sub_(1).to(dtype)
    c = a.new_empty(rows // g.world if op == "matmul_reduce_scatter" else rows, n)
    shape = lib.prs_gemm_shape(op=_OPS[op], m=rows, n=n, k=k, b_transposed=transposed, c_anywhere=1,
                               dtype=ops._PRODUCTS[dtype])
    operands, best = lib.prs_gemm_operands(a=place.read(a), b=place.read(b), c=place.write(c)), lib.prs_gemm_tuning()
    with g.exchange.entered() if g.exchange else contextlib.nullcontext():
        status = lib.prs_gemm_autotune(g.handle, ctypes.byref(shape), ctypes.byref(operands), rounds, place.stream(),
                                       ctypes.byref(best))
    place.done()
    lib.check(status, f"perseus.tune: group {g.name}")
    for key in [key for key in g._plans if key[:3] == (_OPS[op], n, k) and key[-1] == rows]:
        retired = ("before tuning", len(g._plans), *key)
        g._plans[retired] = g._plans.pop(key)  # captured graphs may still use it
    return {name: getattr(best, name) for name, _ in best._fields_}


def _shape(text: str) -> tuple[str, int, int, int]:
    op, _, sizes = text.partition(":")
    m, n, k = (int(part) for part in sizes.split("x"))
    return op, m, n, k


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perseus.tuning", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="+", type=_shape, metavar="OP:MxNxK", help=f"OP: {', '.join(_OPS)}")
    parser.add_argument("--layout", choices=("nk", "kn"), default="nk", help="of the weight; nk: as nn.Linear's")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args(arguments)
    if library().emulated:
        parser.error("the emulator has no times: use libperseus-fused.so on GPUs")
    if "RANK" not in os.environ:
        parser.error("start it by torchrun --nproc-per-node GPUS -m perseus.tuning")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    group = init()
    for op, m, n, k in options.shape:
        found: dict[str, Any] = tune(op, m, n, k, group, transposed=options.layout == "nk", rounds=options.rounds)
        if group.rank == 0:
            print(f"{op} {m}x{n}x{k}: " + (" ".join(f"{name} {value}" for name, value in found.items() if value)
                                          or "as without tuning"), flush=True)
    group.close()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
