#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Two choices within products, on this host's GPUs, in CUDA graphs; each way by turns.

    torchrun --nproc-per-node 4 test/gpu/products.py [--out FOLDER] [joined] [rows]

joined: several products of one gather and their gradients, whose gradients of the gathered rows are one product of
joined operands, or one each. error: of the gradient of a over its norm, compared with sums in fp32; it is the same sum.
rows: cuBLASLt's product of m rows by its algorithm for m rows rounded up to 8, 32 and so on, and torch.mm's.

FOLDER/products-NxGPU.json: a row a case. Exit status 1: a result was wrong.
"""
import argparse
import ctypes
import os
import pathlib
import random
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "fused/python"), str(ROOT / "test/gpu")]
import grid  # noqa: E402  (sets the environment for torch)
import grid_ways  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import perseus  # noqa: E402
from perseus import ops  # noqa: E402

WEIGHTS, ROUNDS, MOST_ERROR = 4, 7, 0.01
TOKENS = (512, 2048, 8192)
GATHERED = (("llama3-70b qkv", 8192, (2048, 256, 256)), ("llama3-8b qkv", 4096, (1024, 256, 256)),
            ("qwen3-32b qkv", 5120, (2048, 256, 256)), ("llama3-8b gate_up", 4096, (3584, 3584)),
            ("two of 1408 columns", 4096, (1408, 1408)))
PRODUCTS, ROWS, ROUNDED = ((14336, 8192), (8192, 7168)), (1112, 1544, 1612, 1900, 3000), (8, 32, 64, 128, 256)


def timed(device, group, ways):
    """Medians of the slowest rank for one call of each way, in a random order of turns."""
    runner = grid.Runner.__new__(grid.Runner)
    runner.device, runner.graph, runner.failed, runner.calls, runner.taken = device, True, {}, {}, {}
    names = list(ways)
    for name, way in ways.items():
        if not runner.add(name, way, checked=False):
            raise RuntimeError(f"{name}: {runner.failed[name]}")
    taken = {name: [] for name in names}
    for i in range(ROUNDS + 1):
        random.Random(i).shuffle(names)
        spans = []
        for name in names:
            device.together(True)
            spans.append(device.span(runner.calls[name])[0])
        device.synchronize()
        for name, usec in zip(names, grid.most([span() for span in spans], group)):
            taken[name] += [usec] if i else []  # the first one warms up
    return {name: round(statistics.median(values), 1) for name, values in taken.items()}


# ---- gradients of several products ----

class Several:
    """The products of each of some sets of weights, and their gradients."""

    def __init__(self, group, a, sets, gradients, joined):
        self.group, self.a, self.sets, self.gradients, self.joined = group, a, sets, gradients, joined

    def __call__(self):
        chosen, ops._joined, found = ops._joined, self.joined, []
        for weights in self.sets:
            a, weights = self.a.detach().requires_grad_(), [w.detach().requires_grad_() for w in weights]
            *products, _ = perseus.all_gather_matmuls(a, [w.t() for w in weights], self.group)
            found.append(torch.autograd.grad(products, [a, *weights], self.gradients))
        ops._joined = chosen
        return found


def joined(group, device):
    for name, k, columns in GATHERED:
        torch.manual_seed(group.rank)
        sets = [[torch.randn(n, k, device=group.device).bfloat16() for n in columns] for _ in range(WEIGHTS)]
        for m in TOKENS:
            a = torch.randn(m // group.world, k, device=group.device).bfloat16()
            gradients = [torch.randn(m, n, device=group.device).bfloat16() for n in columns]
            ways = {"apart": Several(group, a, sets, gradients, lambda bs, world: []),
                    "joined": Several(group, a, sets, gradients, lambda bs, world: list(range(len(bs))))}
            want = grid_ways.scattered_sum(sum(g.float() @ w.float() for g, w in zip(gradients, sets[0])), group)
            errors = [float((way()[0][0].float() - want).norm() / want.norm()) for way in ways.values()]
            usec = timed(device, group, ways)
            yield {"case": "joined", "products": name, "k": k, "n": list(columns), "tokens": m, "gpus": group.world,
                   **{f"{way}_us": round(value / WEIGHTS, 1) for way, value in usec.items()},
                   "taken": "joined" if len(ops._joined([w.t() for w in sets[0]], group.world)) > 1 else "apart",
                   "errors": [round(error, 5) for error in errors], "checked": max(errors) < MOST_ERROR}
            device.tidy()


# ---- algorithms by rows ----

class Rows:
    """Products of m rows by a plan of at most `most`, whose algorithms begin with that of `fewest` rows."""

    def __init__(self, group, m, most, fewest, a, weights):
        lib, (n, k) = group.library, weights[0].shape
        shape = lib.prs_gemm_shape(op=ops.GEMM, m=most, n=n, k=k, b_transposed=1, fewest_m=fewest)
        tuning = lib.prs_gemm_tuning(path=grid_ways.UNFUSED)
        self.group, self.m, self.a, self.weights = group, m, a, weights
        self.results = [a.new_empty(m, n) for _ in weights]
        self.plan = group._open("a product alone", "prs_gemm_plan_open", group.handle, ctypes.byref(shape),
                                ctypes.byref(tuning))

    def __call__(self):
        place, lib = self.group.place, self.group.library
        for weight, c in zip(self.weights, self.results):
            x = lib.prs_gemm_operands(a=place.read(self.a), b=place.read(weight), c=place.write(c), m=self.m)
            self.group.launch(lib.prs_gemm_launch, self.plan, ctypes.byref(x))
        return self.results

    def close(self):
        self.group.library.prs_gemm_plan_close(self.plan)


def rows(group, device):
    for n, k in PRODUCTS:
        weights = [torch.randn(n, k, device=group.device).bfloat16() for _ in range(3)]
        for m in ROWS:
            a = torch.randn(m, k, device=group.device).bfloat16()
            most = group.rows(m)
            plans = {f"rounded_to_{step}": Rows(group, m, -(-m // step) * step, -(-m // step) * step, a, weights)
                     for step in ROUNDED}
            plans["plan"] = Rows(group, m, most, most // 2 + 1, a, weights)
            want = torch.mm(a, weights[0].t()).float()
            errors = [float((plan()[0].float() - want).norm() / want.norm()) for plan in plans.values()]
            usec = timed(device, group, {"torch": lambda: [torch.mm(a, w.t()) for w in weights], **plans})
            yield {"case": "rows", "m": m, "n": n, "k": k, "gpus": 1,
                   **{f"{way}_us": round(value / len(weights), 1) for way, value in usec.items()},
                   "errors": [round(error, 5) for error in errors], "checked": max(errors) < MOST_ERROR}
            for plan in plans.values():
                plan.close()
            device.tidy()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", default=["joined", "rows"])
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "doc/results")
    parser.add_argument("--commit", default=os.environ.get("COMMIT", "unknown"))
    options = parser.parse_args()
    index, options.command = int(os.environ["LOCAL_RANK"]), sys.argv[1:]
    torch.cuda.set_device(index)
    dist.init_process_group("nccl", device_id=torch.device("cuda", index))
    group = perseus.init(timeout_ms=60000)
    device, found = grid.Gpu(group), []
    for case in options.case:
        for row in {"joined": joined, "rows": rows}[case](group, device):
            found.append(row)
            if group.rank == 0:
                print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
                path = options.out / f"products-{group.world}x{device.name()}.json"
                grid.written(path, found, [], device, group.world, options, "products.py", __doc__)
    group.check()
    group.close()
    dist.destroy_process_group()
    return 0 if found and all(row["checked"] for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
