#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Two ranks on emulated Hopper GPUs: a product with all-gather and its gradient, then an MoE layer as a server calls
it, all compared with torch.

    PERSEUS_FUSED_LIBRARY=emulated python fused/python/examples/emulated.py

No GPU is needed. The emulated GPUs belong to a process, so ranks are threads of it, and tensors lie on the CPU. On GPUs
a rank is a process (train.py); the calls of perseus are the same."""
import threading

import torch
import torch.distributed as dist
import torch.nn.functional as F

import perseus

RANKS, ROWS, COLUMNS, DEPTH = 2, 64, 128, 64  # rows and columns of each rank
TOKENS, EXPERTS, TOP_K, WIDTH = 8, 4, 2, 128  # tokens of each rank, experts of all; hidden size, which is inner too


def rank_main(rank, store, a, b, layer, results):
    group = perseus.init((store, rank, RANKS), timeout_ms=60000)
    mine = a[rank].clone().requires_grad_()
    h = perseus.all_gather_matmul(mine, b[rank], group)  # the rows of all ranks, times this rank's columns
    h.float().sum().backward()
    # Rank r holds experts r EXPERTS / RANKS and following; weights as torch.nn.Linear keeps them.
    tokens, chosen, router, gate_up, down = layer
    plan = perseus.moe_plan(max_tokens=TOKENS, hidden=WIDTH, inner=WIDTH, experts=EXPERTS, top_k=TOP_K,
                            linear_layout=True, group=group)
    experts = slice(rank * EXPERTS // RANKS, (rank + 1) * EXPERTS // RANKS)
    y, _ = perseus.moe_layer(tokens[rank], chosen[rank], router[rank], gate_up[experts], down[experts], plan)
    results[rank] = h.detach(), mine.grad, y, plan.path
    group.close()


def expected_layer(x, chosen, router, gate_up, down):
    """The MoE layer of one rank's tokens, in fp32."""
    y = torch.zeros(x.shape)
    for token in range(TOKENS):
        for expert, weight in zip(chosen[token], router[token]):
            gate, up = (gate_up[expert].float() @ x[token].float()).chunk(2)
            y[token] += weight * (down[expert].float() @ (F.silu(gate) * up))
    return y


def main():
    if not perseus.library().emulated:
        raise SystemExit("emulated.py: set PERSEUS_FUSED_LIBRARY=emulated: this is the library for GPUs")
    torch.manual_seed(0)
    a, b = (torch.randn(RANKS, *shape).bfloat16() for shape in ((ROWS, DEPTH), (DEPTH, COLUMNS)))
    tokens, gate_up, down = (torch.randn(*shape).mul(0.3).bfloat16() for shape in
                             ((RANKS, TOKENS, WIDTH), (EXPERTS, 2 * WIDTH, WIDTH), (EXPERTS, WIDTH, WIDTH)))
    router, chosen = torch.randn(RANKS, TOKENS, EXPERTS).softmax(-1).topk(TOP_K)
    layer = tokens, chosen, router, gate_up, down
    store, results = dist.HashStore(), [None] * RANKS
    threads = [threading.Thread(target=rank_main, args=(rank, store, a, b, layer, results), daemon=True)
               for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if None in results:
        raise SystemExit("emulated.py: a rank failed: see above")
    for rank, (h, gradient, y, path) in enumerate(results):
        torch.testing.assert_close(h.float(), a.flatten(0, 1).float() @ b[rank].float(), rtol=2**-7, atol=2**-5)
        expected = sum(b[r].float().sum(1) for r in range(RANKS)).expand(ROWS, DEPTH)
        torch.testing.assert_close(gradient.float(), expected, rtol=2**-6, atol=0.5)
        print(f"rank {rank}: h {tuple(h.shape)} and the gradient {tuple(gradient.shape)} are right")
        torch.testing.assert_close(y.float(), expected_layer(tokens[rank], chosen[rank], router[rank], gate_up, down),
                                   rtol=2**-5, atol=2**-4)
        print(f"rank {rank}: the MoE layer of its {TOKENS} tokens and {EXPERTS} experts, as {path}, is right")


if __name__ == "__main__":
    main()
