#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train a small tensor-parallel Llama twice from the same weights on the same data: with the fused layers and without.
The losses must agree.

    torchrun --nproc-per-node 2 fused/python/examples/train.py --steps 200 [--compile] [--hidden 1024]
"""
from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import torch
import torch.nn.functional as F
from llama_block import Config, LlamaBlock, RMSNorm, Unfused
from torch import nn

import perseus


class Llama(nn.Module):
    """Embedding and head see this rank's part of the sequence, and are the same on all ranks."""

    def __init__(self, config: Config, blocks: int, vocabulary: int, layers: Any, group: perseus.Group) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LlamaBlock(config, layers, group) for _ in range(blocks))
        self.embedding, self.head = (nn.Parameter(torch.empty(vocabulary, config.hidden, dtype=torch.bfloat16,
                                                              device=group.device)) for _ in range(2))
        self.norm = RMSNorm(config.hidden, config.eps, group.device)
        initialize(self)
        perseus.nn.replicate(self, group)  # what is not split

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.embedding(tokens, self.embedding)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.head).float()


def initialize(model: nn.Module, seed: int = 0) -> None:
    """Random matrices, by a generator that is alike on all ranks: a layer that is split draws the whole matrix and
    keeps its part."""
    for module in model.modules():
        generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
        if hasattr(module, "reset_parameters"):
            module.reset_parameters(generator)
        else:
            for p in module.parameters(recurse=False):
                if p.dim() > 1:
                    nn.init.normal_(p, std=p.shape[-1]**-0.5, generator=generator)
        seed += 1


def batches(steps: int, sequence: int, batch: int, vocabulary: int) -> Any:
    """Sequences in which a token mostly decides the next one, so that there is something to learn. The same on all
    ranks."""
    generator = torch.Generator().manual_seed(3)
    follows = torch.randperm(vocabulary, generator=generator)
    for _ in range(steps):
        tokens = torch.randint(vocabulary, (sequence + 1, batch), generator=generator)
        for i in range(sequence):
            kept = torch.rand(batch, generator=generator) < 0.9
            tokens[i + 1] = torch.where(kept, follows[tokens[i]], tokens[i + 1])
        yield tokens


def train(group: perseus.Group, layers: Any, config: Config, steps: int, *, blocks: int = 2, sequence: int = 128,
          batch: int = 2, vocabulary: int = 128, rate: float = 1e-3, compiled: Any = None) -> list[float]:
    """The mean loss of each step, over all ranks. compiled: a backend of torch.compile(), or None."""
    model = Llama(config, blocks, vocabulary, layers, group)
    run = torch.compile(model, fullgraph=True, backend=compiled) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    part = sequence // group.world
    mine = slice(group.rank * part, (group.rank + 1) * part)
    losses = []
    for tokens in batches(steps, sequence, batch, vocabulary):
        tokens = tokens.to(group.device)
        logits = run(tokens[:-1][mine])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[1:][mine].flatten(), reduction="sum") / (sequence * batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        perseus.nn.sum_replicated_gradients(model, group)
        optimizer.step()
        total = loss.detach().clone()
        if group.world > 1:
            group.process_group.allreduce([total]).wait()
        losses.append(total.item())
    return losses


def furthest(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--tolerance", type=float, default=0.05, help="of the loss, at any step")
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.exit(1, f"{parser.prog}: start it by torchrun --nproc-per-node GPUS, on Hopper GPUs; emulated.py needs "
                       "none\n")
    if int(os.environ["LOCAL_RANK"]) >= torch.cuda.device_count():
        parser.exit(1, f"{parser.prog}: no GPU for local rank {os.environ['LOCAL_RANK']}: torch finds "
                       f"{torch.cuda.device_count()}; emulated.py needs none\n")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    group = perseus.init()
    config = Config(hidden=options.hidden, heads=options.hidden // 64, kv_heads=options.hidden // 128,
                    intermediate=options.hidden * 7 // 2)
    ways = {"fused": (perseus.nn, None), "unfused": (Unfused, None)}
    if options.compile:
        ways["compiled"] = (perseus.nn, "inductor")
    losses = {name: train(group, layers, config, options.steps, sequence=options.sequence, rate=3e-4, compiled=backend)
              for name, (layers, backend) in ways.items()}
    worst = {name: furthest(values, losses["unfused"]) for name, values in losses.items() if name != "unfused"}
    good = all(value <= options.tolerance for value in worst.values())
    if group.rank == 0:
        print(json.dumps({"steps": options.steps, "ranks": group.world, "first": losses["fused"][0],
                          "last": losses["fused"][-1], "last_unfused": losses["unfused"][-1], "furthest_apart": worst,
                          "ok": good}))
    group.close()
    torch.distributed.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
