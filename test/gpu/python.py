#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Python package on GPUs: torchrun --nproc-per-node 2 test/gpu/python.py CLAIM. Rank 0 prints a JSON object; exit status 1: the claim does not hold.

Run by test/gpu/python.sh. A claim is a function of this file.
"""
import faulthandler
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "fused/python"), str(ROOT / "fused/python/examples")]
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # NVLink multicast is never used on these hosts
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import perseus  # noqa: E402

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def uniform(*shape):
    return torch.rand(*shape, device="cuda").mul_(2).sub_(1).bfloat16()


def unfused(op, a, w, world):
    """The same in fp32, by NCCL."""
    if op == "all_gather_matmul":
        whole = torch.empty(a.shape[0] * world, a.shape[1], dtype=a.dtype, device="cuda")
        dist.all_gather_into_tensor(whole, a)
        return whole.float() @ w.float().t()
    c = a.float() @ w.float().t()
    dist.all_reduce(c)
    rank = dist.get_rank()
    return c.chunk(world)[rank] if op == "matmul_reduce_scatter" else c


def error(have, want):
    """The largest error over the root mean square."""
    return float(torch.nan_to_num((have.float() - want).abs(), nan=1e9).max() / want.square().mean().sqrt())


def operands(op, m, n, k, world):
    return (uniform(m // world if op == "all_gather_matmul" else m, k), uniform(n, k))


def ops_are_right(group):
    """Each op and layout beside NCCL + fp32."""
    worst = 0.0
    for m, n, k in ((512, 768, 256), (4096, 4096, 1024), (8192, 2048, 4096), (64, 4096, 4096), (1000, 999, 333)):
        for op in OPS:
            a, w = operands(op, m, n, k, group.world)
            want = unfused(op, a, w, group.world)
            for b in (w.t(), w.t().contiguous()):
                worst = max(worst, error(getattr(perseus, op)(a, b, group), want))
    return {"worst": worst}, worst < 0.05


def any_number_of_rows(group, steps=400):
    """Random m each step, with graphs and without, mixed; plans and memory stay bounded."""
    generator, worst, graphs = random.Random(5), 0.0, {}
    n, k = 2048, 1024
    w = uniform(n, k)
    torch.cuda.synchronize()
    before, openings = torch.cuda.mem_get_info()[0], []
    for step in range(steps):
        m, op = generator.randrange(1, 2049) * group.world, generator.choice(OPS)
        a = operands(op, m, n, k, group.world)[0]
        plans = len(group._plans)
        begin = time.perf_counter()
        c = getattr(perseus, op)(a, w.t(), group)
        if len(group._plans) > plans:
            openings.append((time.perf_counter() - begin) * 1e3)
        if step % 20 == 0:
            worst = max(worst, error(c, unfused(op, a, w, group.world)))
        if step % 40 == 39:
            torch.cuda.synchronize()
            graphs[step] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[step]):
                captured = getattr(perseus, op)(a, w.t(), group)
            a.neg_()
            graphs[step].replay()
            worst = max(worst, error(captured, unfused(op, a, w, group.world)))
    torch.cuda.synchronize()
    group.check()
    used = (before - torch.cuda.mem_get_info()[0]) / 2**20
    return {"steps": steps, "worst": worst, "plans": len(group._plans), "memory_mb": round(used), "opening_ms_max": round(max(openings), 1)}, worst < 0.05


def gradients_are_right(group):
    """Forward and backward of the Llama block, eager and compiled, beside the unfused block."""
    from llama_block import Config, LlamaBlock, Unfused
    from train import initialize
    config, found, ok = Config(hidden=1024, heads=16, kv_heads=4, intermediate=3584), {}, True
    results = {}
    for name, layers, compiled in (("unfused", Unfused, False), ("fused", perseus.nn, False), ("compiled", perseus.nn, True)):
        block = LlamaBlock(config, layers, group)
        initialize(block, group)
        torch.manual_seed(dist.get_rank())
        x = uniform(512 // group.world, 4, config.hidden).requires_grad_()
        run = torch.compile(block, fullgraph=True) if compiled else block
        run(x).float().square().mean().backward()
        results[name] = [x.grad, *(p.grad for p in block.parameters())]
    for name in ("fused", "compiled"):
        found[name] = round(max(error(have, want.float()) for have, want in zip(results[name], results["unfused"])), 4)
        ok = ok and found[name] < 0.2
    return found, ok


def a_step_beside_torchs(group, rounds=20):
    """Time of forward and backward of the block: fused, compiled, unfused, unfused compiled."""
    from llama_block import Config, LlamaBlock, Unfused
    config, calls = Config(), {}
    for name, layers, compiled in (("fused", perseus.nn, False), ("fused_compiled", perseus.nn, True), ("unfused", Unfused, False)):
        block = LlamaBlock(config, layers, group)
        calls[name] = torch.compile(block, fullgraph=True) if compiled else block
    x = uniform(4096 // group.world, 1, config.hidden)
    taken = {name: [] for name in calls}
    for i in range(3 + rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            dist.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call(x.clone().requires_grad_()).float().square().mean().backward()
            end.record()
            end.synchronize()
            usec = torch.tensor([begin.elapsed_time(end) * 1e3], device="cuda")
            dist.all_reduce(usec, op=dist.ReduceOp.MAX)
            if i >= 3:
                taken[name].append(float(usec))
    found = {name: round(sorted(values)[len(values) // 2], 1) for name, values in taken.items()}
    return {f"{name}_us": value for name, value in found.items()}, all(value > 0 for value in found.values())


def a_killed_rank_is_named(group):
    """Run with --max-restarts 0: rank 1 dies; rank 0 gets an exception that names it, and goes on alone."""
    a, w = operands("all_gather_matmul", 4096, 2048, 2048, group.world)
    for _ in range(3):
        perseus.all_gather_matmul(a, w.t(), group)
    torch.cuda.synchronize()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        while time.monotonic() - begin < 60:
            perseus.all_gather_matmul(a, w.t(), group)
            torch.cuda.synchronize()
            time.sleep(0.01)
        return {"raised": False}, False
    except perseus.PerseusError as e:
        found = {"raised": True, "rank": e.rank, "after_s": round(time.monotonic() - begin, 2), "text": str(e)}
    group.close()
    smaller = perseus.init((dist.HashStore(), 0, 1), name="survivors", watchdog=False)
    c = perseus.all_gather_matmul(a, w.t(), smaller)
    found["smaller_world"] = error(c, a.float() @ w.float().t())
    return found, found["rank"] == 1 and found["smaller_world"] < 0.05


CLAIMS = [ops_are_right, any_number_of_rows, gradients_are_right, a_step_beside_torchs, a_killed_rank_is_named]


def rank_main(claim):
    faulthandler.dump_traceback_later(280, exit=True)
    rank, device = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    lost = claim is a_killed_rank_is_named
    # The process that may die must not hold the store, and gloo does not end the process of a survivor.
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", device))
    group = perseus.init(timeout_ms=3000 if lost else 60000)
    torch.manual_seed(1 + rank)
    found, ok = claim(group)
    if rank == 0:
        print(json.dumps({"claim": claim.__name__, "ok": ok, **found}), flush=True)
    if lost:
        os._exit(0 if ok else 1)
    group.close()
    dist.destroy_process_group()
    return 0 if ok else 1


def main():
    claim = next((c for c in CLAIMS if c.__name__ == sys.argv[1]), None) if len(sys.argv) > 1 else None
    if claim is None:
        sys.exit(f"usage: python.py CLAIM, one of {', '.join(c.__name__ for c in CLAIMS)}")
    if "RANK" in os.environ:
        return rank_main(claim)
    # Ranks as plain processes: torchrun ends all of them when one dies.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = int(os.environ.get("GPUS", "2"))
    ranks = [subprocess.Popen([sys.executable, __file__, *sys.argv[1:]],
                              env=dict(os.environ, RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
                                       MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")) for r in range(world)]
    ends = [p.wait(timeout=290) for p in ranks]
    return ends[0]


if __name__ == "__main__":
    sys.exit(main())
