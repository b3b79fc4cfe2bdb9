# SPDX-License-Identifier: Apache-2.0
"""Time the ops, NCCL + torch.mm and torch.ops.symm_mem in one process group, and check each result.

    torchrun --nproc-per-node 2 -m perseus.bench [--shape 8192x14336x4096] [--graphs] [--json]
    python -m perseus.bench --host-cost  # what an op costs the host, and an empty op; also without a GPU

A shape is MxNxK of the product of the whole group: all-gather splits M and N, reduce-scatter and all-reduce split K.
The ways take turns in every round; a time is the median over rounds of the slowest rank. Exit status 1: a result was
wrong.
"""
from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from typing import Any, Callable

import torch
import torch.distributed as dist

import perseus

from ._command import Parser

SHAPES = ["8192x28672x8192", "8192x8192x28672", "8192x14336x4096", "8192x4096x14336", "1024x14336x4096",
          "1024x4096x14336"]
OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
PAUSE_CLOCKS = 4_000_000  # about 2 ms: what follows is enqueued before any of it starts

_empty = torch.library.Library("perseus_bench", "DEF")
_empty.define("empty(Tensor a, Tensor b, str group_name) -> Tensor")
for _key in ("CUDA", "CPU"):
    _empty.impl("empty", lambda a, b, group_name: a.new_empty(a.shape[0], b.shape[1]), _key)
torch.library.register_autograd("perseus_bench::empty", lambda ctx, g: (None, None, None), lib=_empty)


# ---- host cost ----

class _NoDevice:
    """In place of a device, so that without a GPU everything but the launch itself is timed."""

    kind, read, write = "none", staticmethod(torch.Tensor.data_ptr), staticmethod(torch.Tensor.data_ptr)

    def stream(self) -> int:
        return 0

    def capturing(self) -> bool:
        return False

    def done(self) -> None:
        pass


def _no_launch(launch: Any) -> Any:
    """A function of C that takes what a launch takes, does nothing, and returns 0."""
    function = ctypes.CDLL("libm.so.6").fegetround
    function.argtypes = launch.argtypes
    return function


def per_call(call: Callable[[], Any], wait: Callable[[], None], calls: int = 100, rounds: int = 20) -> float:
    """Microseconds of the host: the median of rounds, in which the GPU has nothing to make the host wait."""
    taken = []
    for _ in range(rounds):
        wait()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        taken.append((time.perf_counter() - begin) / calls * 1e6)
    wait()
    return statistics.median(taken)


class _Node(torch.autograd.Function):
    """What any op with gradients costs the host: a node of torch, two launches of a plan into memory that is there, and
    the product of the weight's gradient. Nothing is checked."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, launch: Any) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.launch = launch
        return launch(a, b)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple:
        a, b = ctx.saved_tensors
        return ctx.launch(g, b.t()), g.t().mm(a).t(), None


def _steps(group: perseus.Group) -> dict[str, Callable[[], Any]]:
    """An op forward and backward, small enough that products cost the host little, and the same by _Node."""
    a, w = (torch.randn(16, 16, device=group.device).bfloat16().requires_grad_() for _ in range(2))
    g, out, function = torch.ones_like(a), torch.empty_like(a), group.library.prs_gemm_launch
    plan = group.product(perseus.ops.ALLREDUCE, 16, 16, 16, True, 1, 0)

    def launch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x = plan.operands
        x.a, x.b, x.c, x.m = a.data_ptr(), b.data_ptr(), out.data_ptr(), 16
        function(plan.handle, plan.reference, group.place.stream())
        return out.detach()

    def step(call: Callable[..., torch.Tensor], *rest: Any) -> Callable[[], None]:
        def run() -> None:
            call(a, w.t(), *rest).backward(g)
            a.grad = w.grad = None
        return run
    return {"a node": step(_Node.apply, launch),
            **{op: step(getattr(perseus, op), group) for op in (*OPS, "replicated_matmul")}}


def host_cost(group: perseus.Group) -> dict[str, float]:
    """The cost of an op beyond an empty one, and of the library's launch in it; then of ops with their backward pass. A
    small product on one rank: no other rank to wait for."""
    torch.set_num_threads(1)
    a = torch.randn(128, 128, device=group.device).bfloat16()
    b, name, ops = torch.randn(128, 128, device=group.device).bfloat16().t(), group.name, torch.ops.perseus
    for op in OPS:
        getattr(ops, op)(a, b, name)
    for step in list(_steps(group).values())[1:]:  # opens the plans
        step()
    plan = group.product(perseus.ops.ALLGATHER, 128, 128, 128, True, 1, 0)  # bf16, the one of the op
    found = {}
    emulated = group.library.emulated
    if emulated:
        group.place.synchronize()
        launch, group.place, group.library.prs_gemm_launch = (
            (group.library.prs_gemm_launch, group.place), _NoDevice(), _no_launch(group.library.prs_gemm_launch))
    wait = (lambda: None) if emulated else torch.cuda.synchronize
    found["empty"] = per_call(lambda: torch.ops.perseus_bench.empty(a, b, name), wait)
    for op in OPS:
        found[op] = per_call(lambda: getattr(ops, op)(a, b, name), wait)
    found["fused_all_gather_matmul"] = per_call(lambda: ops.fused_all_gather_matmul(a, [b], 0, name, return_A=False),
                                                wait)
    for name, step in _steps(group).items():
        found[f"{name}, both passes"] = per_call(step, wait)
    if emulated:
        group.library.prs_gemm_launch, group.place = launch
        return found
    found["launch"] = per_call(lambda: group.library.prs_gemm_launch(plan.handle, plan.reference, group.place.stream()),
                               wait)
    return found


# ---- times ----

def ways(op: str, m: int, n: int, k: int,
         group: perseus.Group) -> tuple[dict[str, Callable[[], torch.Tensor]], torch.Tensor]:
    """Functions by name that compute the same, and the tensor a that they read."""
    world, device, pg = group.world, group.device, dist.group.WORLD
    torch.manual_seed(group.rank)
    rows, columns, depth = (m // world, n // world, k) if op == "all_gather_matmul" else (m, n, k // world)
    a = torch.rand(rows, depth, device=device).mul_(2).sub_(1).bfloat16()
    w = torch.rand(columns, depth, device=device).mul_(2).sub_(1).bfloat16()
    result: dict[str, Callable[[], torch.Tensor]] = {
        "perseus": lambda: getattr(torch.ops.perseus, op)(a, w.t(), group.name)}
    if op == "all_gather_matmul":
        gathered = torch.empty(m, depth, dtype=a.dtype, device=device)

        def unfused() -> torch.Tensor:
            dist.all_gather_into_tensor(gathered, a)
            return gathered @ w.t()
        result["symm_mem"] = lambda: torch.ops.symm_mem.fused_all_gather_matmul(a, [w.t()], 0, pg.group_name)[1][0]
    elif op == "matmul_reduce_scatter":
        def unfused() -> torch.Tensor:
            out = torch.empty(m // world, columns, dtype=a.dtype, device=device)
            dist.reduce_scatter_tensor(out, a @ w.t())
            return out
        result["symm_mem"] = lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(a, w.t(), "sum", 0, pg.group_name)
    else:
        def unfused() -> torch.Tensor:
            c = a @ w.t()
            dist.all_reduce(c)
            return c
    result["unfused"] = unfused
    whole = a.new_empty(m, depth) if op == "all_gather_matmul" else a
    result["product"] = lambda: whole @ w.t()
    return result, a


def captured(call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = call()

    def replay() -> torch.Tensor:
        graph.replay()
        return out
    replay.inputs = call  # a graph has addresses only: what it reads must stay
    return replay


def once(call: Callable[[], torch.Tensor], group: perseus.Group) -> tuple[float, torch.Tensor]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda._sleep(PAUSE_CLOCKS)
    dist.all_reduce(torch.zeros(1, device=group.device))
    begin.record()
    result = call()
    end.record()
    end.synchronize()
    usec = torch.tensor([begin.elapsed_time(end) * 1e3], device=group.device)
    dist.all_reduce(usec, op=dist.ReduceOp.MAX)
    return float(usec), result


def wrong(result: torch.Tensor, expected: torch.Tensor, depth: int) -> float:
    """The largest difference from the unfused result, over what a few roundings to bf16 explain: above 1 is wrong."""
    scale = (depth / 9) ** 0.5  # of a sum of products of values in -1 .. 1
    return (float(torch.nan_to_num((result.float() - expected.float()).abs(), nan=float("inf")).max())
            / (8 * scale * 2**-7))


def row(op: str, m: int, n: int, k: int, options: argparse.Namespace, group: perseus.Group) -> dict[str, Any]:
    calls, a = ways(op, m, n, k, group)
    if options.graphs:
        calls = {name: captured(call) for name, call in calls.items() if name != "symm_mem"}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    worst = 0.0
    for i in range(3 + options.rounds):
        results = {}
        a.neg_()  # what an earlier round left in memory must not pass
        for name, call in calls.items():
            usec, results[name] = once(call, group)
            if i >= 3:
                taken[name].append(usec)
        worst = max(worst, wrong(results["perseus"], results["unfused"], k))
    found = {name: statistics.median(values) for name, values in taken.items()}
    group.check()
    return {"op": op, "shape": f"{m}x{n}x{k}", "gpus": group.world, "graphs": options.graphs,
            **{f"{name}_us": round(v, 1) for name, v in found.items()},
            "over_product": round(found["perseus"] / found["product"], 3),
            "speedup": round(found["unfused"] / found["perseus"], 3), "error": round(worst, 3), "ok": worst <= 1}


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m perseus.bench", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", metavar="MxNxK",
                        help="may be given several times; default: layers of Llama-3 70B and 8B")
    parser.add_argument("--op", action="append", choices=OPS, help="default: all")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--graphs", action="store_true", help="capture each way into a CUDA graph")
    parser.add_argument("--host-cost", action="store_true", help="only the host's time of an op, on this process alone")
    parser.add_argument("--json", action="store_true", help="a JSON object a row")
    options = parser.parse_args(arguments)
    try:
        shapes = [tuple(int(part) for part in text.split("x")) for text in options.shape or SHAPES]
        if any(len(shape) != 3 or min(shape) < 1 for shape in shapes):
            raise ValueError
    except ValueError:
        parser.error(f"--shape {options.shape}: wants MxNxK, such as 8192x14336x4096")
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: want 1 or more")
    if options.host_cost:
        group = perseus.init((dist.HashStore(), 0, 1), name="host-cost", device=0, watchdog=False)
        cost = host_cost(group)
        group.close()
        lines = (f"{name:26} {v:7.2f} us" + ("" if name in ("empty", "launch") else f"  ({v - cost['empty']:+.2f})")
                 for name, v in cost.items())
        parser.say(json.dumps({"host_us": {name: round(v, 2) for name, v in cost.items()}}) if options.json else
                   "\n".join(lines))
        return 0
    if perseus.library().emulated:
        sys.exit("perseus.bench: the emulator has no times: use libperseus-fused.so on GPUs, or --host-cost")
    if "RANK" not in os.environ:
        sys.exit("perseus.bench: start it by torchrun --nproc-per-node GPUS -m perseus.bench")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    import torch.distributed._symmetric_memory as symm_mem
    symm_mem.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    group, bad = perseus.init(), 0
    for shape in shapes:
        for op in options.op or OPS:
            found = row(op, *shape, options, group)
            bad += not found["ok"]
            if group.rank == 0:
                parser.say(json.dumps(found) if options.json
                           else "  ".join(f"{name} {value}" for name, value in found.items()))
    group.close()
    dist.destroy_process_group()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
