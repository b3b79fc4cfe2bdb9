#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Two ranks on emulated Hopper GPUs: a product with all-gather, its gradient, and both compared with torch.

    PERSEUS_FUSED_LIBRARY=emulated python fused/python/examples/emulated.py

No GPU is needed. The emulated GPUs belong to a process, so ranks are threads of it, and tensors lie on the CPU. On GPUs
a rank is a process (train.py); the calls of perseus are the same."""
import threading

import torch
import torch.distributed as dist

import perseus

RANKS, ROWS, COLUMNS, DEPTH = 2, 64, 128, 64  # rows and columns of each rank


def rank_main(rank, store, a, b, results):
    group = perseus.init((store, rank, RANKS), timeout_ms=60000)
    mine = a[rank].clone().requires_grad_()
    h = perseus.all_gather_matmul(mine, b[rank], group)  # the rows of all ranks, times this rank's columns
    h.float().sum().backward()
    results[rank] = h.detach(), mine.grad
    group.close()


def main():
    if not perseus.library().emulated:
        raise SystemExit("emulated.py: set PERSEUS_FUSED_LIBRARY=emulated: this is the library for GPUs")
    torch.manual_seed(0)
    a, b = (torch.randn(RANKS, *shape).bfloat16() for shape in ((ROWS, DEPTH), (DEPTH, COLUMNS)))
    store, results = dist.HashStore(), [None] * RANKS
    threads = [threading.Thread(target=rank_main, args=(rank, store, a, b, results), daemon=True)
               for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if None in results:
        raise SystemExit("emulated.py: a rank failed: see above")
    for rank, (h, gradient) in enumerate(results):
        torch.testing.assert_close(h.float(), a.flatten(0, 1).float() @ b[rank].float(), rtol=2**-7, atol=2**-5)
        expected = sum(b[r].float().sum(1) for r in range(RANKS)).expand(ROWS, DEPTH)
        torch.testing.assert_close(gradient.float(), expected, rtol=2**-6, atol=0.5)
        print(f"rank {rank}: h {tuple(h.shape)} and the gradient {tuple(gradient.shape)} are right")


if __name__ == "__main__":
    main()
