#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torchrun --nproc-per-node N test/gpu/servers.py OUT.json: what the adaptors for servers run, in captured graphs,
compared with torch in fp32: MoE layers of Qwen3-30B-A3B in bf16 and e4m3 with tokens of the ranks' own and tokens that
all ranks have, and DeepEP's interface. Beside the latter the time of the ops that it calls, by turns."""
import json
import os
import statistics
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

import perseus
from perseus.integrations import deep_ep
from perseus.integrations._serving import Layer

EXPERTS, TOP_K, HIDDEN, INNER, E4M3 = 128, 8, 2048, 768, torch.float8_e4m3fn
ROUNDS, REPLAYS = 15, 5
rows = []


def inputs(count, seed):
    generator = torch.Generator().manual_seed(seed)
    weights, chosen = torch.rand(count, EXPERTS, generator=generator).topk(TOP_K)
    weights = weights / weights.sum(1, keepdim=True)
    return torch.randn(count, HIDDEN, generator=generator).bfloat16().cuda(), chosen.cuda(), weights.cuda()


def captured(call):
    """The graph of a call, after one that opened its plans; and the call's result."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):  # NCCL's watchdog asks for events
        out = call()
    torch.cuda.synchronize()
    graph.inputs = call  # a graph has addresses only: what it reads must stay
    return graph, out


def whole(numbers, scales):
    return numbers.float() * scales.repeat_interleave(128, 1).repeat_interleave(128, 2)


def error(y, want):
    """The largest of all ranks."""
    found = ((y.float() - want).norm() / want.norm()).reshape(1)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def record(what, bound, **row):
    rows.append({"what": what, "gpus": dist.get_world_size(), **row, "right": row["error"] < bound})
    if dist.get_rank() == 0:
        print(rows[-1], flush=True)


def reference(x, chosen, weights, w13, w2):
    out = torch.zeros(x.shape, device="cuda")
    for expert in chosen.unique().tolist():
        token, slot = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x[token].float() @ w13[expert].float().t()).chunk(2, 1)
        out.index_add_(0, token, weights[token, slot, None] * ((F.silu(gate) * up) @ w2[expert].float().t()))
    return out


def layers(group, dtype):
    generator = torch.Generator("cuda").manual_seed(5)
    matrices = [(torch.randn(EXPERTS, n, k, generator=generator, device="cuda") / k**0.5).bfloat16()
                for n, k in ((2 * INNER, HIDDEN), (HIDDEN, INNER))]
    mine = slice(group.rank * EXPERTS // group.world, (group.rank + 1) * EXPERTS // group.world)
    scales = None
    if dtype is E4M3:
        scaled = [[torch.stack(t) for t in zip(*(perseus.quantise_reference(w, (128, 128)) for w in m))]
                  for m in matrices]
        matrices, scales = [whole(*s) for s in scaled], tuple(s[mine].contiguous() for _, s in scaled)
        here = [numbers[mine].contiguous() for numbers, _ in scaled]
    else:
        here = [m[mine].contiguous() for m in matrices]
    layer = Layer(group, max_tokens=1024, top_k=TOP_K, hidden=HIDDEN, inner=INNER, experts=EXPERTS, dtype=dtype)
    for count in (3, 100, 700):
        own, all_have = inputs(count + group.rank, 1000 * group.rank + count), inputs(count, count)
        most, out = count + group.world, torch.empty_like(all_have[0])
        graph, y = captured(lambda: layer(*own, *here, most, scales))
        group.replay(graph)
        plan = layer.plan(most)
        record("layer", 0.06 if scales else 0.01, dtype=str(dtype), tokens=count, plan=plan.sizes[0], path=plan.path,
               error=error(y, reference(*own, *matrices)))
        graph, _ = captured(lambda: layer.of_replicated(out, *all_have, *here, scales))
        group.replay(graph)
        dist.all_reduce(out)
        record("layer, replicated tokens", 0.06 if scales else 0.01, dtype=str(dtype), tokens=count,
               error=error(out, reference(*all_have, *matrices)))


def factors(group):
    local = EXPERTS // group.world
    return (1 + torch.arange(local, device="cuda") + group.rank * local).float() / EXPERTS


def normal(group, scaled):
    buffer, (x, chosen, weights) = deep_ep.Buffer(group, max_tokens=2048), inputs(2048, group.rank)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(chosen, EXPERTS)
    given = perseus.quantise_reference(x, (1, 128)) if scaled else x
    received, idx, w, counts, handle, _ = buffer.dispatch(
        given, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
        topk_idx=chosen, topk_weights=weights)
    numbers = received[0].float() * received[1].repeat_interleave(128, 1) if scaled else received.float()
    part = numbers * (w * factors(group)[idx.clamp(min=0)]).sum(1, keepdim=True)
    y, back, _ = buffer.combine(part.bfloat16(), handle, topk_weights=w)
    exact = torch.equal(back, weights) and sum(counts) == int((idx >= 0).sum())
    record("DeepEP, normal", 0.05 if scaled else 0.01, scaled=scaled, tokens=2048,
           error=error(y, x.float() * (weights * (1 + chosen) / EXPERTS).sum(1, keepdim=True)) if exact else 9.0)


def low_latency(group, count, scaled):
    buffer, (x, chosen, weights) = deep_ep.Buffer(group), inputs(count, group.rank)

    def there_and_back():
        received, arrived, handle, _, _ = buffer.low_latency_dispatch(x, chosen, count, EXPERTS, use_fp8=scaled)
        numbers = received[0].float() * received[1].repeat_interleave(128, 2) if scaled else received.float()
        there = torch.arange(numbers.shape[1], device="cuda") < arrived[:, None]
        part = torch.where(there[:, :, None], numbers * factors(group)[:, None, None], 0).bfloat16()
        return buffer.low_latency_combine(part, chosen, weights, handle)[0]

    def facade():
        received, _, handle, _, _ = buffer.low_latency_dispatch(x, chosen, count, EXPERTS, use_fp8=False)
        return buffer.low_latency_combine(received, chosen, weights, handle)[0]

    def ops():
        dispatched = perseus.moe_dispatch(x, chosen, weights, plan)
        return perseus.moe_combine(dispatched.rows, dispatched)
    graph, y = captured(there_and_back)
    group.replay(graph)
    row = {"scaled": scaled, "tokens": count,
           "error": error(y, x.float() * (weights * (1 + chosen) / EXPERTS).sum(1, keepdim=True))}
    if not scaled:
        local = EXPERTS // group.world
        plan = perseus.moe_plan(max_tokens=count, hidden=HIDDEN, experts=EXPERTS, top_k=TOP_K, group=group,
                                capacity=-(-count * group.world * TOP_K // 128) * 128 + local * 128)
        row["usec"], row["ops_usec"] = timed(group, captured(facade)[0], captured(ops)[0])
    record("DeepEP, low latency", 0.05 if scaled else 0.01, **row)


def timed(group, *graphs):
    """Medians by turns, of the slowest rank."""
    times = [[] for _ in graphs]
    for _ in range(ROUNDS):
        for graph, found in zip(graphs, times):
            dist.barrier()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            group.replay(graph)
            start.record()
            for _ in range(REPLAYS):
                group.replay(graph)
            end.record()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(end) * 1000 / REPLAYS)
    medians = torch.tensor([statistics.median(t) for t in times], device="cuda")
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    return [round(t, 1) for t in medians.tolist()]


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    group = perseus.init(timeout_ms=20000)
    for dtype in (torch.bfloat16, E4M3):
        layers(group, dtype)
    for scaled in (False, True):
        normal(group, scaled)
        for count in (8, 128):
            low_latency(group, count, scaled)
    group.check()
    if group.rank == 0:
        with open(sys.argv[1], "w") as file:
            json.dump({"rows": rows}, file, indent=1)
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(0 if all(row["right"] for row in rows) else 1)


if __name__ == "__main__":
    main()
