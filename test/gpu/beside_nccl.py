#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run each fused kernel on GPUs beside NCCL collectives and beside a stranger's kernel that holds SMs.

    test/gpu/beside_nccl.py --library build/fused/libperseus-fused.so [--rounds 100] [--json FILE]

Each case runs in processes of its own, with lazy module loading. The first round is cold: the collective and the fused
launch are the first of the process, apart from the launch that opens NCCL's communicator. In each round one rank
enqueues an all-reduce before the fused launch and the other rank after it, on two streams; in the next round the other
way round. Rounds take two sets of inputs in turn, and a result is overwritten with NaN once it was compared, so that
what an earlier round left in memory does not pass. Results must be equal, bit by bit, to those of a launch alone. The
longest round must stay below 100 ms (and below what the stranger holds its SMs for, added). The exit status is 1 when a
case fails.
"""
import argparse
import faulthandler
import json
import os
import pathlib
import statistics
import sys
import time

KERNELS = ("all_gather", "reduce_scatter", "all_reduce", "moe", "attention")
LIMIT_MS, HOLD_MS, COLLECTIVE_MB = 100, 20, 64
ENVIRONMENT = {"CUDA_MODULE_LOADING": "LAZY", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
               "NVSHMEM_DISABLE_NVLS": "1", "MASTER_ADDR": "127.0.0.1", "PERSEUS_LOG": "warn"}

HOLDER = r"""
extern "C" __global__ void hold(unsigned long long ns)
{
    extern __shared__ char all_of_it[];
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - begin < ns);
    all_of_it[threadIdx.x] = (char)now;
}
"""


class Holder:
    """A kernel of another library: it takes whole SMs for a while."""

    def __init__(self):
        import cupy
        self.cupy, self.kernel = cupy, cupy.RawKernel(HOLDER, "hold")
        self.kernel.max_dynamic_shared_size_bytes = 200 << 10

    def launch(self, sms, stream):
        with self.cupy.cuda.ExternalStream(stream.cuda_stream):
            self.kernel((sms,), (128,), (self.cupy.uint64(HOLD_MS * 1000000),), shared_mem=200 << 10)


def make(kernel, perseus, torch, rank, world, group, inputs):
    """A function that launches the kernel on a set of inputs (a number) and returns what it computed."""
    torch.manual_seed(inputs * world + rank)

    def matrix(*size):
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16)

    if kernel in ("all_gather", "reduce_scatter", "all_reduce"):
        m, n, k = 8192, 8192 // world, 4096
        if kernel == "all_gather":
            a, b = matrix(m // world, k), matrix(n, k)
            return lambda: perseus.all_gather_matmul(a, b.t(), group)
        a, b = matrix(m, k // world), matrix(8192, k // world)
        op = perseus.matmul_reduce_scatter if kernel == "reduce_scatter" else perseus.matmul_all_reduce
        return lambda: op(a, b.t(), group)
    if kernel == "moe":
        tokens, hidden, columns, experts, top_k = 2048, 4096, 1024, 64, 8
        x, weights = matrix(tokens, hidden), matrix(experts // world, columns, hidden)
        weight, chosen = torch.topk(torch.randn(tokens, experts, device="cuda").softmax(-1), top_k)
        capacity = perseus.moe_capacity(max_tokens=tokens, hidden=hidden, columns=columns, experts=experts, top_k=top_k,
                                        group=group)
        return lambda: perseus.moe_dispatch_gemm(x, chosen, weight.float(), weights.transpose(1, 2), max_tokens=tokens,
                                                 capacity=capacity, group=group)
    q, k, v = (matrix(2, 4096 // world, 16, 128) for _ in range(3))
    return lambda: perseus.ring_attention(q, k, v, group, causal=True)[0]


def valid(kernel, result, torch):
    """What a launch defines of its result."""
    if kernel != "moe":
        return [result]
    out, rows, expert_rows = result[:3]
    used = torch.cat([torch.arange(first, first + count, device=out.device) for first, count in expert_rows.tolist()])
    return [out[used], rows[used]]


def take(kernel, result, torch):
    """Copies of the part of a result that a launch defines. The whole result is then overwritten."""
    copies = [part.clone() for part in valid(kernel, result, torch)]
    for tensor in result if kernel == "moe" else (result,):
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
    return copies


def timed(torch, streams, enqueue, count):
    """Milliseconds for `count` calls of enqueue(), from the first to the end of all streams."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        enqueue()
    for stream in streams:
        stream.synchronize()
    return (time.perf_counter() - begin) * 1e3


def run_rank(rank, world, port, kernel, held, rounds, seconds, results):
    faulthandler.dump_traceback_later(seconds * 0.8, exit=True)  # says where a rank stood still
    os.environ.update(ENVIRONMENT, MASTER_PORT=str(port))
    import torch
    import torch.distributed as dist
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world)
    import perseus
    ours, other, third = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream()
    payload = torch.ones(COLLECTIVE_MB << 18, device="cuda")
    with torch.cuda.stream(other):
        dist.all_reduce(payload)
    torch.cuda.synchronize()
    group = perseus.init(watchdog=False, timeout_ms=20000)
    launches = [make(kernel, perseus, torch, rank, world, group, inputs) for inputs in range(2)]
    holder = Holder() if held else None
    if held:
        holder.launch(1, third)

    def alone():
        """The result of each set of inputs, by a launch that nothing else runs with."""
        torch.cuda.synchronize()
        copies = []
        with torch.cuda.stream(ours):
            for launch in launches:
                copies.append(take(kernel, launch(), torch))
        torch.cuda.synchronize()
        return copies

    expected = alone() if held else None
    dist.barrier()
    torch.cuda.synchronize()
    longest, wrong = 0.0, 0
    for i in range(rounds):
        begin = time.perf_counter()
        if held:
            holder.launch(held, third)
        for what in ("collective", "launch") if (rank + i) % 2 == 0 else ("launch", "collective"):
            if what == "collective":
                with torch.cuda.stream(other):
                    dist.all_reduce(payload)
            else:
                with torch.cuda.stream(ours):
                    result = launches[i % 2]()
        for stream in (ours, other, third):
            stream.synchronize()
        longest = max(longest, (time.perf_counter() - begin) * 1e3) if i or held else longest
        cold = (time.perf_counter() - begin) * 1e3 if i == 0 else cold
        parts = take(kernel, result, torch)
        expected = expected or alone()  # the cold round comes first; then those alone, to compare with
        wrong += not all(torch.equal(x, y) for x, y in zip(parts, expected[i % 2]))
        payload.fill_(1)
        torch.cuda.synchronize()
    count, times = 20, {}

    def fused():
        with torch.cuda.stream(ours):
            launches[0]()

    def collective():
        with torch.cuda.stream(other):
            dist.all_reduce(payload)

    def both():
        collective()
        fused()

    payload.fill_(0)
    for name, enqueue in (("fused", fused), ("nccl", collective), ("both", both)):
        for repeat in range(4):
            dist.barrier()
            times.setdefault(name, []).append(timed(torch, (ours, other), enqueue, count) / count)
    error = group.error()
    slowest = torch.tensor([longest, cold, float(wrong), *(statistics.median(v[1:]) for v in times.values())],
                           device="cuda", dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    longest, cold, wrong, fused_ms, nccl_ms, both_ms = slowest.tolist()
    if rank == 0:
        results.put({"kernel": kernel, "sms_held": held, "rounds": rounds, "cold_ms": round(cold, 2),
                     "longest_ms": round(longest, 2), "wrong": int(wrong),
                     "fused_ms": round(fused_ms, 3), "nccl_ms": round(nccl_ms, 3), "both_ms": round(both_ms, 3),
                     "both_over_sum": round(both_ms / (fused_ms + nccl_ms), 3), "error": str(error) if error else ""})
    dist.barrier()
    perseus.find(group).close()
    dist.destroy_process_group()


def run_case(options, kernel, held, port):
    import torch.multiprocessing as mp
    context = mp.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=run_rank, args=(r, options.gpus, port, kernel, held, options.rounds,
                                                    options.case_seconds, results)) for r in range(options.gpus)]
    for process in ranks:
        process.start()
    end = time.monotonic() + options.case_seconds
    for process in ranks:
        process.join(max(0.1, end - time.monotonic()))
    hung = [process for process in ranks if process.is_alive()]
    for process in hung:
        process.kill()
    if hung or any(process.exitcode for process in ranks):
        return {"kernel": kernel, "sms_held": held,
                "failed": "did not end" if hung else f"exit status {[p.exitcode for p in ranks]}"}
    return results.get(timeout=5)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--library", type=pathlib.Path, required=True)
    parser.add_argument("--python", type=pathlib.Path,
                        default=pathlib.Path(__file__).resolve().parents[2] / "fused/python")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--kernel", action="append", choices=KERNELS)
    parser.add_argument("--held", type=int, action="append",
                        help="SMs that a stranger holds; 0: NCCL alone (default: 0, 8, 24, 64)")
    parser.add_argument("--case-seconds", type=int, default=90)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    os.environ["PERSEUS_FUSED_LIBRARY"] = str(options.library.resolve())
    sys.path.insert(0, str(options.python))  # the ranks' processes begin with this path
    rows, bad = [], 0
    for kernel in options.kernel or KERNELS:
        for held in options.held if options.held is not None else (0, 8, 24, 64):
            row = run_case(options, kernel, held, 29500 + len(rows))
            limit = LIMIT_MS + (HOLD_MS if held else 0)
            row["ok"] = "failed" not in row and not row["wrong"] and not row["error"] and row["longest_ms"] < limit
            bad += not row["ok"]
            rows.append(row)
            print(json.dumps(row), flush=True)
    if options.json:
        options.json.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
