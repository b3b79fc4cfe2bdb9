#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Python package on GPUs: torchrun --nproc-per-node 2 test/gpu/python.py CLAIM. Rank 0 prints a JSON object; exit
status 1: the claim does not hold.

Run by test/gpu/python.sh. A claim is a function of this file.
"""
import ctypes
import errno
import faulthandler
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "fused/python"), str(ROOT / "fused/python/examples"), str(ROOT / "tools/fused")]
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # NVLink multicast is never used on these hosts
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import perseus  # noqa: E402
from attention_heads import attention_of_any_head, distance  # noqa: E402
from moe_training import moe_training  # noqa: E402
from norms import norms_are_right  # noqa: E402
from scaled_products import paths_of_one_rank, quantised_results, scaled_paths, scaled_products  # noqa: E402
from sleeping import a_group_sleeps  # noqa: E402
from smaller_attention import smaller_launches  # noqa: E402
from striped_attention import packed_step_beside_one_gpu, striped_attention_is_right  # noqa: E402

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
    """Each op and layout, compared with NCCL + fp32."""
    worst = 0.0
    for m, n, k in ((512, 768, 256), (4096, 4096, 1024), (8192, 2048, 4096), (64, 4096, 4096), (1000, 999, 333)):
        for op in OPS:
            a, w = operands(op, m, n, k, group.world)
            want = unfused(op, a, w, group.world)
            for b in (w.t(), w.t().contiguous()):
                worst = max(worst, error(getattr(perseus, op)(a, b, group), want))
    return {"worst": worst}, worst < 0.05


def memory_used(before):
    """MB of this GPU taken since, without what torch's allocator keeps: plans, and what NCCL and cuBLAS take."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return round((before - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()) / 2**20)


def any_number_of_rows(group, steps=10000):
    """Random m each step, with graphs and without, mixed."""
    generator, worst, graphs = random.Random(5), 0.0, {}
    n, k = 2048, 1024
    w = uniform(n, k)
    for step in range(steps):
        m, op = generator.randrange(1, 2049) * group.world, generator.choice(OPS)
        a = operands(op, m, n, k, group.world)[0]
        c = getattr(perseus, op)(a, w.t(), group)
        if step % 20 == 0:
            worst = max(worst, error(c, unfused(op, a, w, group.world)))
        if step % 500 == 499:
            torch.cuda.synchronize()
            graphs[step] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[step]):
                captured = getattr(perseus, op)(a, w.t(), group)
            a.neg_()
            graphs[step].replay()
            worst = max(worst, error(captured, unfused(op, a, w, group.world)))
    torch.cuda.synchronize()
    group.check()
    return {"steps": steps, "worst": worst, "plans": len(group._plans)}, worst < 0.05


def memory_does_not_grow(group, steps=10000):
    """Forward and backward of random numbers of rows and tokens: products in each step, a layer of experts in every
    fourth. What torch has allocated, memory of the GPU outside of torch, the host's memory and the number of plans,
    after a fifth of the steps and at the end."""
    generator, world, found, began = random.Random(11 + group.rank), group.world, [], time.monotonic()
    shared = random.Random(11)  # of what must be the same on all ranks
    up, down = uniform(1024 // world, 1024).requires_grad_(), uniform(1024, 1024 // world).requires_grad_()
    plan = perseus.moe_plan(max_tokens=512, hidden=1024, experts=8 * world, top_k=4, inner=256, linear_layout=True)
    experts = [uniform(8, 512, 1024).requires_grad_(), uniform(8, 1024, 256).requires_grad_()]

    def products(rows):
        x = uniform(rows, 1024).requires_grad_()
        h = perseus.all_gather_matmul(x, up.t(), group)
        perseus.matmul_reduce_scatter(torch.relu(h), down.t(), group).sum().backward()

    def layer(tokens):
        x, scores = uniform(tokens, 1024).requires_grad_(), torch.rand(tokens, 8 * world, device="cuda")
        weights, chosen = scores.requires_grad_().softmax(-1).topk(4)
        perseus.moe_layer(x, chosen, weights, *experts, plan, recompute=True)[0].sum().backward()

    def used():
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        host = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return [torch.cuda.memory_stats()["allocated_bytes.all.current"],
                total - free - torch.cuda.memory_reserved(), host, len(group._plans)]
    for step in range(steps):
        first = step < 2  # the largest sizes come first
        products(512 if first else shared.randrange(1, 513))
        if step % 4 == 0:
            layer(512 if first else generator.randrange(0, 513))
        for t in (up, down, *experts):
            t.grad = None
        if step in (steps // 5, steps - 1):
            found.append(used())
    group.check()
    grown = [(b - a) / 2**20 for a, b in zip(*found)]
    return ({"steps": steps, "seconds": round(time.monotonic() - began, 1), "plans": found[1][3],
             "grown_mb": {name: round(value, 2) for name, value in zip(("torch", "gpu_outside_torch", "host"), grown)}},
            found[0][3] == found[1][3] and grown[0] < 1 and grown[1] < 4 and grown[2] < 64)


def any_stream(group, steps=300):
    """Ops on three streams without a wait between them: each launch of a group follows the one before, whatever its
    stream."""
    streams, generator, w = ([torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(2))], random.Random(7),
                             uniform(4096, 2048))
    inputs = {op: operands(op, 4096, 4096, 2048, group.world)[0] for op in OPS}
    want = {op: unfused(op, a, w, group.world) for op, a in inputs.items()}
    torch.cuda.synchronize()
    results = []
    for _ in range(steps):
        op, stream = generator.choice(OPS), generator.choice(streams)
        with torch.cuda.stream(stream):
            results.append((op, getattr(perseus, op)(inputs[op], w.t(), group)))
    torch.cuda.synchronize()
    worst = max(error(have, want[op]) for op, have in results)
    return {"steps": steps, "worst": worst}, worst < 0.05


# Columns and depth of the products of a tensor-parallel layer of Llama-3 8B over all ranks: QKV, attention's output,
# gate and up, down.
LAYER = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
LAYER_OPS = ("all_gather_matmul", "matmul_reduce_scatter") * 2


def split(op, n, k, world):
    """Columns and depth of a rank's weight."""
    return (n // world, k) if op == "all_gather_matmul" else (n, k // world)


def sixty_seven_sizes(group):
    """67 numbers of rows through four layers: memory of the plans, and the host's time to the first launch of a
    number."""
    weights = [(op, uniform(*split(op, *dims, group.world))) for op, dims in zip(LAYER_OPS, LAYER)]
    dist.barrier()
    torch.cuda.synchronize()
    before, first, opening = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved(), [], []
    for size in random.Random(3).sample(range(64, 8193, 8), 67):
        for op, w in weights:
            a = operands(op, size * group.world, *w.shape, group.world)[0]
            plans = len(group._plans)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            getattr(torch.ops.perseus, op)(a, w.t(), group.name)
            took = (time.perf_counter() - begin) * 1e3
            (opening if len(group._plans) > plans else first).append(took)
            torch.cuda.synchronize()
    group.check()
    found = {"plans": len(group._plans), "memory_mb": memory_used(before), "first_launch_ms": round(max(first), 3),
             "first_launch_ms_median": round(sorted(first)[len(first) // 2], 3), "opening_ms": round(max(opening), 1),
             "opening_ms_median": round(sorted(opening)[len(opening) // 2], 1)}
    return found, found["memory_mb"] <= 1024 and found["first_launch_ms"] <= 1


def few_rows(group, rounds=20):
    """1 to 128 rows of a row-parallel layer under CUDA graphs: ours, NCCL, and torch's one-shot all-reduce after the
    product."""
    import torch.distributed._symmetric_memory as symm_mem
    from perseus.bench import captured, once, wrong
    name, found, fine = dist.group.WORLD.group_name, {}, True
    symm_mem.enable_symm_mem_for_group(name)
    for n, k in ((8192, 8192), (8192, 28672), (4096, 14336)):
        w = uniform(n, k // group.world)
        for m in (1, 8, 32, 64, 128):
            a, shared = uniform(m, k // group.world), symm_mem.empty(m, n, dtype=torch.bfloat16, device="cuda")
            symm_mem.rendezvous(shared, name)

            def nccl():
                c = a @ w.t()
                dist.all_reduce(c)
                return c

            def one_shot():
                torch.matmul(a, w.t(), out=shared)
                return torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", name)
            ways = {"perseus": lambda: torch.ops.perseus.matmul_all_reduce(a, w.t(), group.name), "nccl": nccl,
                    "one_shot": one_shot, "product": lambda: a @ w.t()}
            calls = {way: captured(lambda call=call: [call() for _ in range(8)]) for way, call in ways.items()}
            taken, worst = {way: [] for way in calls}, 0.0
            for i in range(3 + rounds):
                a.neg_()
                results = {}
                for way, call in calls.items():
                    usec, results[way] = once(call, group)
                    if i >= 3:
                        taken[way].append(usec / 8)
                worst = max(worst, *(wrong(have, want, k) for have, want in zip(results["perseus"], results["nccl"])))
            usec = {way: sorted(values)[len(values) // 2] for way, values in taken.items()}
            fine = fine and worst <= 1
            found[f"{m}x{n}x{k}"] = {**{f"{way}_us": round(value, 1) for way, value in usec.items()},
                                     "over_nccl": round(usec["perseus"] / usec["nccl"], 3), "error": round(worst, 3)}
            del calls, results
    return found, fine


def gradients_are_right(group):
    """Forward and backward of the Llama block, eager and compiled, compared with the unfused block."""
    from llama_block import Config, LlamaBlock, Unfused
    from train import initialize
    config, found, ok = Config(hidden=1024, heads=16, kv_heads=4, intermediate=3584), {}, True
    results = {}
    for name, layers, compiled in (("unfused", Unfused, False), ("fused", perseus.nn, False),
                                   ("compiled", perseus.nn, True)):
        block = LlamaBlock(config, layers, group)
        initialize(block)
        torch.manual_seed(dist.get_rank())
        x = uniform(512 // group.world, 4, config.hidden).requires_grad_()
        run = torch.compile(block, fullgraph=True) if compiled else block
        run(x).float().square().mean().backward()
        results[name] = [x.grad, *(p.grad for p in block.parameters())]
    for name in ("fused", "compiled"):
        found[name] = round(max(error(have, want.float()) for have, want in zip(results[name], results["unfused"])), 4)
        ok = ok and found[name] < 0.2
    return found, ok


def gradients_of_attention_are_right(group, rows=1024):
    """The gradients of ring attention have errors, against fp32 on the whole sequence, like those of torch's own
    attention in bf16; a second launch must give the same bits. rows: of a rank."""
    found, ok, seq, rank, world = {}, True, rows * group.world, group.rank, group.world
    for heads, heads_kv, dim, causal in ((8, 8, 128, False), (8, 2, 128, True), (8, 8, 64, True), (8, 2, 64, False)):
        same = torch.Generator().manual_seed(7)  # whole tensors, on all ranks
        whole = [torch.rand(1, h, seq, dim, generator=same).mul_(2).sub_(1).bfloat16().to(group.device)
                 for h in (heads, heads_kv, heads_kv, heads)]
        chunks = torch.arange(seq).chunk(2 * world if causal else world)
        mine = torch.cat([chunks[rank], chunks[2 * world - 1 - rank]]) if causal else chunks[rank]  # one rank: all
        *wide, of_out = (t.float().requires_grad_() for t in whole)
        k, v = (t.repeat_interleave(heads // heads_kv, 1) for t in wide[1:])
        scores = wide[0] @ k.transpose(2, 3) * dim**-0.5
        if causal:
            scores = scores.masked_fill(torch.ones(seq, seq, dtype=torch.bool, device=group.device).triu(1), -torch.inf)
        ((scores.softmax(-1) @ v) * of_out.detach()).sum().backward()
        alone = [t.clone().requires_grad_() for t in whole[:3]]
        torch.nn.functional.scaled_dot_product_attention(*alone, is_causal=causal, enable_gqa=True).backward(whole[3])
        runs = []
        for _ in range(2):
            leaves = [t[:, :, mine].contiguous().requires_grad_() for t in whole[:3]]
            out = perseus.ring_attention(*leaves, group, causal=causal, heads_first=True)[0]
            out.backward(whole[3][:, :, mine].contiguous())
            runs.append([t.grad for t in leaves])
        name = f"{heads}x{heads_kv}x{dim}{' causal' if causal else ''}"
        for what, have, want, torchs in zip(("dq", "dk", "dv"), runs[0], wide, alone):
            ours, theirs = (distance(t, want.grad[:, :, mine]) for t in (have, torchs.grad[:, :, mine]))
            found[f"{name} {what}"] = [round(ours, 5), round(theirs, 5)]
            ok = ok and ours < 1.1 * theirs
        ok = ok and all(torch.equal(x, y) for x, y in zip(*runs))
    return found, ok


def a_step_beside_torchs(group, rounds=20):
    """Time of forward and backward of the block: fused, compiled, unfused, unfused compiled."""
    from llama_block import Config, LlamaBlock, Unfused
    config, calls = Config(), {}
    for name, layers, compiled in (("fused", perseus.nn, False), ("fused_compiled", perseus.nn, True),
                                   ("unfused", Unfused, False)):
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


def choices(tokens, experts, top_k, zipf):
    """Distinct experts for each token; expert e is drawn with (e + 1) ** -zipf."""
    odds = torch.arange(1, experts + 1, device="cuda", dtype=torch.float32).pow(-zipf)
    return torch.multinomial(odds.expand(tokens, experts), top_k)


def maps_of_experts(group, rounds=20):
    """A whole MoE layer without a map of experts, with one that changes nothing, and with one that prs_moe_balance()
    made: times under graphs."""
    from perseus.bench import captured, once
    found, fine = {}, True
    for model, hidden, inner, experts, tokens in (("qwen3", 2048, 768, 128, 512), ("qwen3", 2048, 768, 128, 4096),
                                                  ("deepseek", 7168, 2048, 256, 128),
                                                  ("deepseek", 7168, 2048, 256, 2048)):
        top_k, world, extra = 8, group.world, 8 * group.world
        places, sizes = (experts + extra,
                         {"max_tokens": tokens, "hidden": hidden, "top_k": top_k, "inner": inner, "group": group})
        x, weights = uniform(tokens, hidden), torch.rand(tokens, top_k, device="cuda")
        torch.manual_seed(99)  # the same experts on all ranks
        all_up, all_down = (uniform(experts, hidden, 2 * inner).div_(hidden ** 0.5),
                            uniform(experts, inner, hidden).div_(inner ** 0.5))
        torch.manual_seed(1 + group.rank)

        def mine(held, all_up=all_up, all_down=all_down):
            own = held.clamp(min=0).chunk(group.world)[group.rank].long().cuda()
            return all_up[own].contiguous(), all_down[own].contiguous()
        identity = torch.arange(experts, dtype=torch.int32)
        no_map = perseus.moe_plan(experts=experts, **sizes)
        same = perseus.moe_plan(experts=experts, logical_experts=experts, replicas=1, **sizes)
        spread = perseus.moe_plan(experts=places, logical_experts=experts, replicas=4, **sizes)
        for zipf in (0.0, 1.5):
            chosen = choices(tokens, experts, top_k, zipf)
            loads = torch.bincount(chosen.flatten(), minlength=experts).double()
            dist.all_reduce(loads)
            balanced = perseus.moe_balance(loads.cpu(), places=places, world=world, replicas=4)
            plain, placed, unit = mine(identity), mine(balanced.held), identity[:, None].cuda()
            turns = balanced.placement.cuda()
            calls = {"no_map": lambda: perseus.moe_layer(x, chosen, weights, *plain, no_map)[0],
                     "same_places": lambda: perseus.moe_layer(x, chosen, weights, *plain, same, placement=unit)[0],
                     "balanced": lambda: perseus.moe_layer(x, chosen, weights, *placed, spread, placement=turns)[0]}
            calls = {name: captured(call) for name, call in calls.items()}
            taken, worst = {name: [] for name in calls}, 0.0
            for i in range(3 + rounds):
                x.neg_()
                results = {}
                for name, call in calls.items():
                    usec, results[name] = once(call, group)
                    if i >= 3:
                        taken[name].append(usec)
                fine = fine and torch.equal(results["same_places"], results["no_map"]) and bool(results["no_map"].any())
                worst = max(worst, error(results["balanced"], results["no_map"].float()))
            usec = {name: sorted(values)[len(values) // 2] for name, values in taken.items()}
            fine = fine and worst < 0.05
            found[f"{model} {tokens} zipf {zipf}"] = {**{f"{name}_us": round(value, 1) for name, value in usec.items()},
                                                      "error": round(worst, 4)}
            del calls, results, plain, placed
        del all_up, all_down
        torch.cuda.empty_cache()
    return found, fine


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


def memory_of_torch_is_imported(group, rounds=20):
    """An all-reduce writes into buffers of torch's symmetric memory, which prs_fused_import() takes: right, and written
    on all ranks."""
    import torch.distributed._symmetric_memory as symm
    lib, (m, n, k) = group.library, (2048, 2048, 1024)
    buffer = symm.empty(m * n, dtype=torch.bfloat16, device=torch.device("cuda", torch.cuda.current_device()))
    pointers = list(symm.rendezvous(buffer, dist.group.WORLD).buffer_ptrs)
    lib.check(lib.prs_fused_import(group.handle, (ctypes.c_void_p * group.world)(*pointers), m * n * 2),
              "prs_fused_import")
    plan = group._open("plan", "prs_gemm_plan_open", group.handle,
                       ctypes.byref(lib.prs_gemm_shape(op=lib.PRS_GEMM_ALLREDUCE, m=m, n=n, k=k, b_transposed=1)), None)
    worst = 0.0
    for _ in range(rounds):
        a, w = operands("matmul_all_reduce", m, n, k, group.world)
        buffer.fill_(float("nan"))
        torch.cuda.synchronize()
        dist.barrier()
        x = lib.prs_gemm_operands(a=a.data_ptr(), b=w.data_ptr(), c=pointers[group.rank])
        group.launch(lib.prs_gemm_launch, plan, ctypes.byref(x))
        worst = max(worst, error(buffer.view(m, n), unfused("matmul_all_reduce", a, w, group.world)))
    group.check()
    torch.cuda.synchronize()
    lib.prs_gemm_plan_close(plan)
    lib.check(lib.prs_fused_free(group.handle, pointers[group.rank]), "prs_fused_free")
    return {"rounds": rounds, "error": worst}, worst < 0.05


def abort_ends_waits(group):
    """Rank 0 launches an operation that rank 1 never joins. abort() from another thread ends the kernel at once, and
    the error says so."""
    a, w = operands("matmul_reduce_scatter", 4096, 2048, 2048, group.world)
    for _ in range(3):
        perseus.matmul_reduce_scatter(a, w.t(), group)
    torch.cuda.synchronize()
    dist.barrier()
    if group.rank == 1:
        time.sleep(3)
        group.abort()
        return {}, True
    found = {}

    def stop():
        found["began"] = time.monotonic()
        group.abort()

    timer = threading.Timer(1.0, stop)
    timer.start()
    perseus.matmul_reduce_scatter(a, w.t(), group)
    torch.cuda.synchronize()
    ended_ms = (time.monotonic() - found["began"]) * 1e3 if "began" in found else -1.0
    failure = group.error()
    return ({"ended_ms": round(ended_ms, 2), "text": str(failure)},
            0 <= ended_ms < 100 and failure is not None and failure.code == -errno.ECANCELED)


CLAIMS = [ops_are_right, norms_are_right, any_stream, any_number_of_rows, memory_does_not_grow, sixty_seven_sizes,
          few_rows, gradients_are_right, gradients_of_attention_are_right, striped_attention_is_right,
          packed_step_beside_one_gpu, smaller_launches, a_step_beside_torchs, maps_of_experts, moe_training,
          scaled_products, scaled_paths, paths_of_one_rank, quantised_results, attention_of_any_head, a_group_sleeps,
          a_killed_rank_is_named, memory_of_torch_is_imported, abort_ends_waits]


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
    if not lost:  # a claim holds if it holds on all ranks; what one of the others found is shown
        every = [None] * group.world
        dist.all_gather_object(every, (ok, found))
        ok, found = next((e for e in every if not e[0]), every[0])
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
                              env=dict(os.environ, RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE=str(world),
                                       MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port),
                                       TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0"))
             for r in range(world)]
    ends = [p.wait(timeout=290) for p in ranks]
    return ends[0]


if __name__ == "__main__":
    sys.exit(main())
