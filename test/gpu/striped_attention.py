# SPDX-License-Identifier: Apache-2.0
"""Claims of python.py about striped attention: it is right on GPUs, and what a step of packed sequences takes."""
import os
import random
import statistics

import flash3
import torch
import torch.distributed as dist
from attention_heads import distance

import perseus


def lengths_of(total, seed, median=700, spread=1.4):
    """Log-normal, as documents of the web are: most have some hundred tokens, a few have tens of thousands."""
    generator, lengths = random.Random(seed), []
    while sum(lengths) < total:
        lengths.append(min(1 + int(generator.lognormvariate(0, spread) * median), total - sum(lengths)))
    return lengths


def bounds_of(lengths, device):
    return torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0).int()


def reference(q, k, v, met, soft_cap, sinks):
    """[rows, heads, dim], in fp32."""
    q, k, v = (t.transpose(0, 1) for t in (q, k.repeat_interleave(q.shape[1] // k.shape[1], 1),
                                           v.repeat_interleave(q.shape[1] // v.shape[1], 1)))
    scores = q @ k.transpose(1, 2) * q.shape[2]**-0.5
    scores = soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores
    scores = scores.masked_fill(~met, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, q.shape[1], 1)), 2)
    return (scores.softmax(-1)[..., :q.shape[1]] @ v).transpose(0, 1)


def striped_attention_is_right(group):
    """60 random problems against fp32 on the whole sequence, forward and backward: sequences from one to hundreds, of
    one token and empty ones too, windows, caps, sinks, shared KV heads, both head_dims; stripes in zigzag, assigned
    from the lengths, and assigned by chance. Each runs twice, with the same bits."""
    generator, worst, equal, problem = random.Random(3), 0.0, True, {}
    for number in range(60):
        stripe = generator.choice((128, 256))
        seq = 2 * group.world * stripe * generator.choice((1, 2, 4) if stripe == 128 else (1, 2))
        heads_kv, dim, causal = generator.choice((1, 2, 8)), generator.choice((64, 128)), generator.random() < 0.7
        window, cap = generator.choice((0, 0, 1, 100, 700)), generator.choice((0.0, 0.0, 20.0))
        median = generator.choice((1, 30, 300, 100000))
        lengths = [length for n in lengths_of(seq - generator.randrange(100), number, median)
                   for length in ((n, 0) if generator.random() < 0.1 else (n,))]
        same = torch.Generator().manual_seed(number)  # whole tensors, on all ranks
        whole = [torch.rand(seq, h, dim, generator=same).mul_(2).sub_(1).bfloat16().to(group.device)
                 for h in (8, heads_kv, heads_kv, 8)]
        sinks = torch.rand(8, generator=same).to(group.device) if number % 3 == 0 else None
        bounds, at = bounds_of(lengths, group.device), torch.arange(seq, device=group.device)
        part, apart = torch.searchsorted(bounds.long(), at, right=True), at[:, None] - at
        met = (part[:, None] == part) & (apart.abs() < (window or seq)) & ((apart >= 0) | (not causal))
        met &= (at < bounds[-1])[:, None] | (apart == 0)
        *wide, of_out = (t.float().requires_grad_() for t in whole)
        wide_sinks = None if sinks is None else sinks.clone().requires_grad_()
        want = reference(*wide, met, cap, wide_sinks)
        (want * of_out.detach()).sum().backward()
        by_chance = (torch.randperm(seq // stripe, generator=same) % group.world).int().to(group.device)
        stripe_ranks = (None, by_chance, perseus.assign_stripes(bounds, group, positions=seq, causal=causal,
                                                                window=window, stripe=stripe))[number // 3 % 3]
        cut = {"group": group, "stripe": stripe, "stripe_ranks": stripe_ranks}
        runs = []
        for _ in range(2):
            leaves = [perseus.split_sequence(t, **cut).requires_grad_() for t in whole[:3]]
            mine = None if sinks is None else sinks.clone().requires_grad_()
            out = perseus.varlen_attention(*leaves, bounds, causal=causal, softcap=cap, sinks=mine,
                                           window_size=(window - 1, window - 1), **cut)
            out.backward(perseus.split_sequence(whole[3], **cut))
            runs.append([out.detach(), *(t.grad for t in leaves), *(() if mine is None else (mine.grad,))])
        equal = equal and all(torch.equal(a, b) for a, b in zip(*runs))
        right = [perseus.split_sequence(t, **cut) for t in (want.detach(), *(t.grad for t in wide))]
        if sinks is not None:
            dist.all_reduce(runs[0][4])
            right.append(wide_sinks.grad)
        for name, have, t in zip(("out", "dq", "dk", "dv", "sinks"), runs[0], right):
            size = t.square().mean().sqrt().clamp(min=1e-3) + t.abs() / 32  # large elements have larger roundings
            error = float((torch.nan_to_num((have.float() - t).abs(), nan=1e9) / size).max())
            if error > worst:
                worst, problem = error, {"number": number, "of": name, "dim": dim, "window": window, "cap": cap}
    return {"worst": round(worst, 4), "equal": equal, "rank": group.rank, **problem}, worst < 0.1 and equal


def packed_step_beside_one_gpu(group, total=65536, heads=16, dim=128, rounds=10):
    """Forward and backward of 64k tokens in sequences of the web's lengths, in zigzag and with stripes assigned to
    ranks, and beside them torch's varlen attention (FlashAttention-2) on one GPU with all of them, divided by the
    ranks; by turns. FLASH3=FILE: also by FlashAttention-3 (tools/fused/flash3.py). Also without packing, as one
    sequence, for the same tokens, and that with a window. The rounds have one of two gradients of the result in turn,
    and the result and the gradients of each are compared with FlashAttention-2's."""
    from torch.nn.attention.varlen import varlen_attn
    lengths = lengths_of(total, 1)
    packed = bounds_of(lengths, group.device)
    one = torch.tensor([0, total], dtype=torch.int32, device=group.device)
    same = torch.Generator(device=group.device).manual_seed(5)
    whole = [torch.randn(total, heads, dim, generator=same, device=group.device, dtype=torch.bfloat16)
             for _ in range(5)]
    leaves, of_out = [t.requires_grad_() for t in whole[:3]], whole[3:]

    def assigned(bounds, stripe, window=0):
        return {"stripe": stripe, "stripe_ranks": perseus.assign_stripes(bounds, group, stripe=stripe, window=window)}

    # name: sequences, window, how they are cut
    ways = {"packed": (packed, 0, {"stripe": 512}), "assigned_128": (packed, 0, assigned(packed, 128)),
            "assigned_512": (packed, 0, assigned(packed, 512)), "one_sequence": (one, 0, {"stripe": 512}),
            "window_4096": (one, 4096, {"stripe": 512}),
            "window_4096_assigned": (one, 4096, assigned(one, 512, 4096))}
    mine = {name: [perseus.split_sequence(t.detach(), group, **cut).requires_grad_() for t in leaves]
            for name, (_, _, cut) in ways.items()}
    of_mine = {name: [perseus.split_sequence(t, group, **cut) for t in of_out] for name, (_, _, cut) in ways.items()}

    def ours(name, turn):
        bounds, window, cut = ways[name]
        out = perseus.varlen_attention(*mine[name], bounds, causal=True, group=group, window_size=(window - 1, 0),
                                       **cut)
        out.backward(of_mine[name][turn])
        return out

    def torchs(name, turn):
        bounds, window, _ = ways[name]
        longest = max(lengths) if bounds is packed else total
        out = varlen_attn(*leaves, bounds, bounds, longest, longest, window_size=(window - 1, 0))
        out.backward(of_out[turn])
        return out

    def by_flash3(turn):
        out = flash3.attention(*leaves, True, packed, max(lengths))
        out.backward(of_out[turn])
        return out

    def cut_of(name, tensors):
        return [perseus.split_sequence(t, group, **ways[name][2]) for t in tensors]

    calls = {**{name: lambda turn, name=name: ours(name, turn) for name in ways},
             "flash_one_gpu": lambda turn: torchs("packed", turn)}
    if "FLASH3" in os.environ:
        flash3.load(os.environ["FLASH3"])
        calls["flash3_one_gpu"] = by_flash3
    wanted = {}
    for name in ways:
        for turn in range(2):
            for t in leaves:
                t.grad = None
            out = torchs(name, turn).detach()
            wanted[name, turn] = cut_of(name, (out, *(t.grad for t in leaves)))
    taken, worst = {name: [] for name in calls}, 0.0
    for i in range(3 + rounds):
        for name, call in calls.items():
            for t in (*leaves, *mine.get(name, ())):
                t.grad = None
            torch.cuda.synchronize()
            dist.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            out = call(i % 2)
            end.record()
            end.synchronize()
            usec = torch.tensor([begin.elapsed_time(end) * 1e3], device="cuda")
            dist.all_reduce(usec, op=dist.ReduceOp.MAX)
            if i >= 3:
                taken[name].append(float(usec))
            if name in ways:
                found = out.detach(), *(t.grad for t in mine[name])
            else:
                found = cut_of("packed", (out.detach(), *(t.grad for t in leaves)))
            for have, want in zip(found, wanted[name if name in ways else "packed", i % 2]):
                worst = max(worst, distance(have, want))
    usec = {name: round(statistics.median(values), 1) for name, values in taken.items()}
    best = min(value for name, value in usec.items() if name.endswith("_one_gpu"))
    shares = {f"share_of_one_gpu{at}": round(best / group.world / usec[name], 3)
              for name, at in (("packed", ""), ("assigned_128", "_assigned_128"), ("assigned_512", "_assigned_512"))}
    return {"sequences": len(lengths), "longest": max(lengths), **shares, "worst": round(worst, 5),
            **{f"{name}_us": value for name, value in usec.items()}}, worst < 0.01
