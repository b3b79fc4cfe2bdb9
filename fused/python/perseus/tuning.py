# SPDX-License-Identifier: Apache-2.0
"""Measure how products of given shapes run fastest on these GPUs, and keep that in the file that PERSEUS_FUSED_TUNING
names.

    PERSEUS_FUSED_TUNING=tunings.txt torchrun --nproc-per-node 4 -m perseus.tuning all_gather_matmul:2048x14336x8192 ...

A shape is OP:MxNxK, with M rows of the whole product, and N and K those of this rank's b [K, N]. Plans find the entry
of the nearest shape in that file (fused/gemm/table.h), so that the powers of two of M are enough.
"""
from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist

from ._command import Parser
from ._library import library
from ._registry import init
from ._tuning import OPS, tune


def shape(text: str) -> tuple[str, int, int, int]:
    op, _, sizes = text.partition(":")
    m, n, k = (int(part) for part in sizes.split("x"))
    if op not in OPS or min(m, n, k) < 1:
        raise ValueError(text)
    return op, m, n, k


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m perseus.tuning", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="+", type=shape, metavar="OP:MxNxK", help=f"OP: {', '.join(OPS)}")
    parser.add_argument("--layout", choices=("nk", "kn"), default="nk", help="of the weight; nk: as nn.Linear's")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: want 1 or more")
    if not os.environ.get("PERSEUS_FUSED_TUNING"):
        parser.error("PERSEUS_FUSED_TUNING is not set: it names the file that keeps what is measured")
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
            parser.say(f"{op} {m}x{n}x{k}: " + (" ".join(f"{name} {value}" for name, value in found.items() if value)
                                                or "as without tuning"))
    group.close()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
