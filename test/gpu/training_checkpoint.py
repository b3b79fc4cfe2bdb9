#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of a world, read by another one and compared bit by bit: small models of torchtitan with Perseus, a
dense one (tensor parallel) and one with experts (expert parallel with FSDP), and their AdamW's state.

    torchrun --nproc-per-node 4 test/gpu/training_checkpoint.py save FOLDER
    torchrun --nproc-per-node 2 test/gpu/training_checkpoint.py load FOLDER

save trains three steps, saves, and notes the hash of each whole tensor. load makes the models of its world with other
weights, reads, and compares. Both make one more step, whose losses are compared within rounding. Exit status 1: a
tensor differs. A line of JSON for each model."""
import argparse
import hashlib
import json
import os
import pathlib
import sys

import training  # noqa: F401  the environment for torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import training_models
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

SMALL = {"hidden": 1024, "heads": 8, "kv_heads": 4, "inner": 2048, "vocabulary": 4096}
SMALL_EXPERTS = {**SMALL, "inner": 768, "experts": 16, "top_k": 4}
TINY = {**training_models.TINY, "kv_heads": 4}  # on the emulator
training_models.MODELS = {"llama3-small": (SMALL, TINY),
                          "qwen3-small": (SMALL_EXPERTS, {**TINY, "experts": 4, "top_k": 2})}
STEPS, APART = 3, 0.01
BATCH = 4  # of the whole world


def hashes(state):
    """Of every whole tensor, by its name."""
    found = {}

    def visit(name, value):
        if isinstance(value, dict):
            for key, each in value.items():
                visit(f"{name}.{key}", each)
        elif isinstance(value, torch.Tensor):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            data = whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            found[name] = hashlib.sha256(data).hexdigest()
    visit("", state)
    return found


def made(name, device):
    """A model of this world; tokens that depend on the world's whole batch alone."""
    world, experts = dist.get_world_size(), name.startswith("qwen3")
    options = argparse.Namespace(tp=1 if experts else world, ep=world if experts else 1, layers=2, model=name,
                                 batch=BATCH // world if experts else BATCH, dtype="bfloat16", checkpoint="none",
                                 sequence=256 if device.type == "cuda" else 32)
    framework = training_models.Torchtitan(options, device)
    way = framework.build("perseus")

    def step(seed):
        generator = torch.Generator().manual_seed(seed)
        most = training_models.MODELS[name][device.type != "cuda"]["vocabulary"]
        tokens = torch.randint(0, most, (BATCH, options.sequence + 1), generator=generator).to(device)
        mine = tokens.chunk(framework.data_parallel)[framework.data_rank]
        return framework.loss(way.step(mine[:, :-1].contiguous(), mine[:, 1:].contiguous()).float()).item()
    return way, step


def state_of(way):
    model, optimizer = get_state_dict(way.model, way.optimizer)
    return {"model": model, "optimizer": optimizer}


def save(name, folder, device):
    way, step = made(name, device)
    for seed in range(STEPS):
        step(seed)
    state = state_of(way)
    dcp.save(state, checkpoint_id=folder)
    noted = {"world": dist.get_world_size(), "hashes": hashes(state), "loss": step(STEPS)}
    if dist.get_rank() == 0:
        (folder / "noted.json").write_text(json.dumps(noted))
    return {"saved_by": noted["world"], "tensors": len(noted["hashes"]), "loss": noted["loss"], "ok": True}


def load(name, folder, device):
    noted = json.loads((folder / "noted.json").read_text())
    way, step = made(name, device)
    step(99)  # so that there is a state of the optimizer, of other numbers
    state = state_of(way)
    before = hashes(state)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(way.model, way.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    found = hashes(state_of(way))
    way.done = STEPS
    loss = step(STEPS)
    differ = sorted(key for key in noted["hashes"] if found.get(key) != noted["hashes"][key])
    other = sum(before.get(key) != value for key, value in noted["hashes"].items())
    good = (not differ and found.keys() == noted["hashes"].keys() and other > len(found) // 2
            and abs(loss - noted["loss"]) < APART * noted["loss"])
    return {"saved_by": noted["world"], "loaded_by": dist.get_world_size(), "tensors": len(found),
            "other_before": other, "differ": differ[:5], "loss": loss, "loss_of_saver": noted["loss"], "ok": good}


def main():
    job, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    emulated = os.environ.get("PERSEUS_FUSED_LIBRARY", "").endswith("emulated.so")
    device = (training.Emulated() if emulated else training.Gpu()).device
    good = True
    for name in training_models.MODELS:
        (folder / name).mkdir(parents=True, exist_ok=True)
        row = {"claim": f"{job} {name}", **{"save": save, "load": load}[job](name, folder / name, device)}
        good = good and row["ok"]
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
    dist.barrier()
    os._exit(0 if good else 1)


if __name__ == "__main__":
    main()
