#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A small model trained with PyTorch's DistributedDataParallel must have the same losses with Perseus under NCCL as without it.

Needs GPUs and PyTorch; run by hand on a GPU host: test/gpu/ddp_losses.py --ranks 2 [--softnic "--nics 1"]. Exit status 77 where they are
missing. Every variant trains from the same seed on the same data. NCCL's algorithm, protocol and channel count are fixed, so that the order
of its additions is the same over every transport and losses can be compared bit for bit.
"""
import argparse
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile

BUILD = pathlib.Path(__file__).resolve().parents[2] / "build"
FIXED = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_MIN_NCHANNELS": "2", "NCCL_MAX_NCHANNELS": "2", "NCCL_NVLS_ENABLE": "0",
         "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
VARIANTS = {"socket": {"NCCL_NET_PLUGIN": "none", "NCCL_NET": "Socket"},
            "perseus": {"NCCL_NET_PLUGIN": str(BUILD / "plugin/libnccl-net-perseus.so"), "NCCL_NET": "Perseus", "PERSEUS_REQUIRED": "1"},
            "perseus-gpu": {"NCCL_NET_PLUGIN": str(BUILD / "plugin/libnccl-net-perseus.so"), "NCCL_NET": "Perseus", "PERSEUS_REQUIRED": "1",
                            "NCCL_NET_GDR_LEVEL": "SYS"}}


def train(rank, ranks, steps, store):
    """One rank: 50 MB of gradients a step in several buckets; returns the losses as exact hexadecimal floats."""
    import torch
    import torch.distributed as dist
    torch.manual_seed(7)
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=ranks)
    layers = [torch.nn.Linear(1024, 2048), torch.nn.GELU(), *[torch.nn.Linear(2048, 2048) for _ in range(2)], torch.nn.Linear(2048, 1024)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).cuda(), device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    noise = torch.Generator().manual_seed(100 + rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 1024, generator=noise).cuda()
        loss = torch.nn.functional.mse_loss(model(x), x.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())
        losses.append(loss.item().hex())
    dist.destroy_process_group()
    return losses


def run_variant(name, args):
    with tempfile.TemporaryDirectory() as folder:
        env = dict(os.environ, **FIXED, **VARIANTS[name])
        command = [sys.executable, __file__, "--launch", "--ranks", str(args.ranks), "--steps", str(args.steps), "--folder", folder]
        if args.softnic is not None and name != "socket":
            command = [str(BUILD / "tools/softnic/softnic-run"), "--quiet", *shlex.split(args.softnic), "--", *command]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=args.timeout, check=False)
        if done.returncode != 0:
            sys.exit(f"ddp: {name}: exit {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        return [json.loads((pathlib.Path(folder) / f"losses.{r}").read_text()) for r in range(args.ranks)]


def launch(args):
    """All ranks of one variant; the first that fails ends the others."""
    ranks = [subprocess.Popen([sys.executable, __file__, "--rank", str(r), "--ranks", str(args.ranks), "--steps", str(args.steps), "--folder",
                               args.folder]) for r in range(args.ranks)]
    failed = [p for p in ranks if p.wait(timeout=args.timeout) != 0]
    return 1 if failed else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--softnic", metavar="OPTIONS", help="carry Perseus over the software NIC with these options")
    parser.add_argument("--timeout", type=int, default=180)
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank >= 0:
        losses = train(args.rank, args.ranks, args.steps, os.path.join(args.folder, "store"))
        pathlib.Path(args.folder, f"losses.{args.rank}").write_text(json.dumps(losses))
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
    losses = {name: run_variant(name, args) for name in VARIANTS}
    same = all(losses[name] == losses["socket"] for name in VARIANTS)
    first, last = (float.fromhex(losses["socket"][0][i]) for i in (0, -1))
    print(json.dumps({"test": "ddp_losses", "ranks": args.ranks, "steps": args.steps, "variants": list(VARIANTS), "identical": same,
                      "first_loss": first, "last_loss": last}))
    return 0 if same and last < first else 1


if __name__ == "__main__":
    sys.exit(main())
