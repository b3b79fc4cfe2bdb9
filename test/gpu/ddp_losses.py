#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A small model trained with PyTorch's DistributedDataParallel or FSDP2 must have the same losses with Perseus under
NCCL as without it.

Needs GPUs and PyTorch; run by hand on a GPU host: test/gpu/ddp_losses.py --ranks 2 [--fsdp] [--softnic "--nics 1"].
Exit status 77 where they are missing. Every variant trains from the same seed on the same data. NCCL's algorithm,
protocol and channel count are fixed, so that the order of its additions is the same over every transport and losses can
be compared bit for bit.
"""
import argparse
import faulthandler
import hashlib
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile
import time

STALL_S = 25
BUILD = pathlib.Path(__file__).resolve().parents[2] / "build"
FIXED = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_MIN_NCHANNELS": "2", "NCCL_MAX_NCHANNELS": "2",
         "NCCL_NVLS_ENABLE": "0", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1",
         "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
VARIANTS = {"socket": {"NCCL_NET_PLUGIN": "none", "NCCL_NET": "Socket"},
            "perseus": {"NCCL_NET_PLUGIN": str(BUILD / "plugin/libnccl-net-perseus.so"), "NCCL_NET": "Perseus",
                        "PERSEUS_REQUIRED": "1"},
            "perseus-gpu": {"NCCL_NET_PLUGIN": str(BUILD / "plugin/libnccl-net-perseus.so"), "NCCL_NET": "Perseus",
                            "PERSEUS_REQUIRED": "1", "NCCL_NET_GDR_LEVEL": "SYS"},
            "ib-gpu": {"NCCL_NET_PLUGIN": "none", "NCCL_NET": "IB", "NCCL_IB_HCA": "softnic", "NCCL_IB_GID_INDEX": "1",
                       "NCCL_GIN_TYPE": "2", "NCCL_NET_GDR_LEVEL": "SYS"}}


def wrap(layers, rank, fsdp):
    """The model, and the layers of FSDP2 that are gathered one by one."""
    import torch
    if not fsdp:
        return torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).cuda(), device_ids=[rank])
    from torch.distributed.fsdp import fully_shard
    model = torch.nn.Sequential(*layers).cuda()
    for layer in layers:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def train(rank, ranks, steps, store, fsdp):
    """One rank: 50 MB of gradients a step in several buckets; returns the losses as exact hexadecimal floats, and the
    median step in ms."""
    import torch
    import torch.distributed as dist
    faulthandler.dump_traceback_later(STALL_S)  # says where a rank stands still
    torch.manual_seed(7)
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=ranks)
    layers = [torch.nn.Linear(1024, 2048), torch.nn.GELU(), *[torch.nn.Linear(2048, 2048) for _ in range(2)],
              torch.nn.Linear(2048, 1024)]
    model = wrap(layers, rank, fsdp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    noise = torch.Generator().manual_seed(100 + rank)
    losses, times = [], []
    for _ in range(steps):
        began = time.monotonic()
        x = torch.randn(64, 1024, generator=noise).cuda()
        loss = torch.nn.functional.mse_loss(model(x), x.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())
        losses.append(loss.item().hex())
        times.append((time.monotonic() - began) * 1e3)
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()
    return losses, statistics.median(times)


def run_variant(name, args):
    with tempfile.TemporaryDirectory() as folder:
        env = dict(os.environ, **FIXED, **VARIANTS[name])
        command = [sys.executable, __file__, "--launch", "--ranks", str(args.ranks), "--steps", str(args.steps),
                   "--folder", folder, "--timeout", str(args.timeout), *(["--fsdp"] if args.fsdp else [])]
        if args.softnic is not None and name != "socket":
            command = [str(BUILD / "tools/softnic/softnic-run"), "--quiet", *shlex.split(args.softnic), "--", *command]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=args.timeout + 60, check=False)
        if done.returncode != 0:
            sys.exit(f"ddp_losses: {name}: exit {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        ranks = [json.loads((pathlib.Path(folder) / f"losses.{r}").read_text()) for r in range(args.ranks)]
        return [rank["losses"] for rank in ranks], max(rank["step_ms"] for rank in ranks)


def launch(args):
    """All ranks of one variant. None is left when this ends: one that stands still would hold its GPU."""
    end = time.monotonic() + args.timeout
    ranks = [subprocess.Popen([sys.executable, __file__, "--rank", str(r), "--ranks", str(args.ranks), "--steps",
                               str(args.steps), "--folder", args.folder, *(["--fsdp"] if args.fsdp else [])])
             for r in range(args.ranks)]
    try:
        return 1 if any(p.wait(timeout=max(0, end - time.monotonic())) for p in ranks) else 0
    except subprocess.TimeoutExpired:
        print(f"ddp_losses: not done within {args.timeout} s", file=sys.stderr)
        return 1
    finally:
        for p in ranks:
            p.kill()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 instead of DistributedDataParallel")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma list (%(default)s)")
    parser.add_argument("--softnic", metavar="OPTIONS", help="carry Perseus over the software NIC with these options")
    parser.add_argument("--timeout", type=int, default=180)
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank >= 0:
        losses, step_ms = train(args.rank, args.ranks, args.steps, os.path.join(args.folder, "store"), args.fsdp)
        pathlib.Path(args.folder, f"losses.{args.rank}").write_text(json.dumps({"losses": losses, "step_ms": step_ms}))
        return 0
    if args.launch:
        return launch(args)
    try:
        import torch
        gpus = torch.cuda.device_count()
    except ImportError:
        gpus = 0
    if gpus < args.ranks:
        print(f"skipped: needs PyTorch and {args.ranks} GPUs, found {gpus}")
        return 77
    found = {name: run_variant(name, args) for name in args.variants.split(",")}
    losses = [losses for losses, _ in found.values()]
    same = all(one == losses[0] for one in losses)
    first, last = (float.fromhex(losses[0][0][i]) for i in (0, -1))
    print(json.dumps({"test": "ddp_losses", "model": "fsdp2" if args.fsdp else "ddp", "ranks": args.ranks,
                      "steps": args.steps, "step_ms": {name: round(step_ms, 2) for name, (_, step_ms) in found.items()},
                      "identical": same, "first_loss": first, "last_loss": last,
                      "losses": hashlib.sha256(json.dumps(losses[0]).encode()).hexdigest()[:12]}))
    return 0 if same and last < first else 1


if __name__ == "__main__":
    sys.exit(main())
