# SPDX-License-Identifier: Apache-2.0
"""An elastic run: a rank is killed in the middle of a step; the others name it, and the same processes train on from a
checkpoint, as a smaller world and with a new rank in its place. Ranks are processes, each on an emulated node of its
own; run.py runs it on the software NIC."""
import datetime
import itertools
import os
import signal
import sys
import tempfile
import unittest

import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from train import batches

import perseus
from perseus.parallel import ColwiseParallel, GatheredInput, RowwiseParallel

WORLD, LOST, SAVED, LAST, VOCABULARY, SEQUENCE = 3, 2, 1, 3, 96, 12  # the checkpoint has step SAVED
HIDDEN, HEADS = 96, 6
LIMIT = datetime.timedelta(seconds=ranks.LIMIT_S)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for t in (self.q(x), self.k(x), self.v(x)))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Model(nn.Module):
    """A transformer of one block; x is this rank's part of the sequences."""

    def __init__(self, mesh):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(3))
        self.attention, self.ffn = Attention(), FeedForward()
        self.bfloat16()
        parallelize_module(self, mesh, {
            "attention": GatheredInput("q", "k", "v"), "attention.[qkv]": ColwiseParallel(),
            "attention.out": RowwiseParallel(sequence_dim=1), "ffn": GatheredInput("gate", "up"),
            "ffn.gate": ColwiseParallel(), "ffn.up": ColwiseParallel(), "ffn.down": RowwiseParallel(sequence_dim=1)})
        perseus.nn.replicate(self, mesh)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.attention(self.norms[0](x))
        x = x + self.ffn(self.norms[1](x))
        return self.head(self.norms[2](x)).float()


class Trainer:
    """What a loop of one's own makes for a world, and drops when the world has lost a rank."""

    def __init__(self, store, era, rank, world):
        dist.init_process_group("gloo", store=dist.PrefixStore(era, store), rank=rank, world_size=world, timeout=LIMIT)
        self.mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        self.group = perseus.init(self.mesh, timeout_ms=ranks.LIMIT_S * 1000)
        self.model = Model(self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, number, killed=False):
        tokens = next(itertools.islice(batches(LAST + 2, SEQUENCE, 2, VOCABULARY), number, None))
        given, wanted = (t.t().chunk(self.mesh.size(), 1)[self.mesh.get_local_rank()].contiguous()
                         for t in (tokens[:-1], tokens[1:]))
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(given).flatten(0, 1), wanted.flatten()) / self.mesh.size()
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)  # the others are, or come, in the backward pass
        loss.backward()
        perseus.nn.sum_replicated_gradients(self.model, self.mesh)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss.item()

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": get_optimizer_state_dict(self.model, self.optimizer)}

    def load(self, folder):
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        self.model.load_state_dict(state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])

    def end(self):
        self.group.close()
        dist.destroy_process_group()


def train_on(store, era, rank, world, folder, wanted):
    """The steps after the checkpoint, by another world: the losses that the first one had."""
    trainer = Trainer(store, era, rank, world)
    trainer.load(folder)
    losses = [trainer.step(number) for number in range(SAVED + 1, LAST + 1)]
    trainer.end()
    yield f"{era}: losses {losses}, of the first world {wanted}", all(
        abs(a - b) < 0.01 * b for a, b in zip(losses, wanted, strict=True))


def run(store, rank, folder):
    trainer, losses = Trainer(store, "first", rank, WORLD), []
    for number in range(LAST + 1):
        losses.append(trainer.step(number))
        if number == SAVED:
            dcp.save(trainer.state(), checkpoint_id=folder)
    try:
        trainer.step(LAST + 1, rank == LOST)
        yield "the step of a lost rank ends", False
    except perseus.PerseusError as e:
        yield f"the lost rank is {e.rank}: {e}", e.rank == LOST
    store.set(f"named/{rank}", "")  # who closes before the others have an error may be taken for the lost one
    store.wait([f"named/{r}" for r in range(WORLD) if r != LOST])
    wanted = losses[SAVED + 1:]
    yield f"losses fall: {losses}", losses[-1] < losses[0]
    trainer.end()
    if rank == 0:
        store.set("losses", ",".join(map(str, wanted)))
    yield from train_on(store, "smaller", rank, WORLD - 1, folder, wanted)
    yield from train_on(store, "replaced", rank, WORLD, folder, wanted)


def replacement(store, folder):
    wanted = [float(loss) for loss in store.get("losses").decode().split(",")]
    yield from train_on(store, "replaced", LOST, WORLD, folder, wanted)


def rank_main(port, rank, folder, begins):
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)
    found = list(run(store, rank, folder) if begins == "first" else replacement(store, folder))
    bad = [what for what, good in found if not good]
    print("".join(f"rank {rank}, {begins}: {what}: wrong\n" for what in bad), file=sys.stderr, end="", flush=True)
    os._exit(min(len(bad), 100))


class Elastic(unittest.TestCase):
    def test_others_name_a_killed_rank_and_train_on_from_a_checkpoint(self):
        port, killed = ranks.free_port(), ranks.FORK.Event()

        def replace(folder):
            killed.wait()
            rank_main(port, LOST, folder, "replacement")
        with tempfile.TemporaryDirectory() as folder:
            first = [ranks.forked(rank, rank_main, port, rank, folder, "first") for rank in range(WORLD)]
            new = ranks.forked(LOST, replace, folder)
            # After the forks, because it starts a thread.
            store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=LIMIT)
            self.assertEqual(ranks.ended(first[LOST], 300), -signal.SIGKILL)
            killed.set()
            others = [process for rank, process in enumerate(first) if rank != LOST]
            self.assertEqual([ranks.ended(process, 300) for process in (*others, new)], [0] * WORLD)
            del store


if __name__ == "__main__":
    ranks.main()
