# SPDX-License-Identifier: Apache-2.0
"""Claim of python.py: attention of every head_dim is right on GPUs, and its time compared with torch on one GPU."""
import statistics

import torch
import torch.nn.functional as functional
from perseus.bench import captured, once
from torch.nn.attention import SDPBackend, sdpa_kernel

import perseus

HEADS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))  # of queries and keys, and of values
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
CALLS = 3  # of one graph


def rows_of(group, seq, causal):
    """The positions that this rank has."""
    chunks = torch.arange(seq).chunk(2 * group.world if causal else group.world)
    if not causal:
        return chunks[group.rank]
    return torch.cat([chunks[group.rank], chunks[2 * group.world - 1 - group.rank]])


def made(group, batch, heads, heads_kv, seq, dims):
    """Whole q, k, v, the same on all ranks: [batch, heads, positions, head_dim]."""
    same = torch.Generator(device=group.device).manual_seed(7)
    return [torch.rand(batch, h, seq, dim, generator=same, device=group.device).mul_(2).sub_(1).bfloat16()
            for h, dim in ((heads, dims[0]), (heads_kv, dims[0]), (heads_kv, dims[1]))]


def reference(q, k, v, causal, rows):
    """Rows of the result and of the log of the sum of exponentials, in fp32."""
    q, k, v = q[:, :, rows].float(), *(t.float().repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[3]**-0.5
    if causal:
        after = torch.arange(k.shape[2], device=q.device) > rows[:, None]
        scores = scores.masked_fill(after, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def distance(have, want):
    """The root mean square of the error over that of what is wanted."""
    have, want = have.float(), want.float()
    return float(torch.nan_to_num((have - want).square(), nan=1e9).mean().sqrt() / want.square().mean().sqrt())


def torchs(q, k, v, causal):
    """A call for each of torch's back ends that takes these tensors, by name."""
    calls = {}
    for backend in BACKENDS:
        def call(backend=backend):
            with sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        try:
            call()
        except RuntimeError:
            continue
        calls[backend.name.split("_")[0].lower()] = call
    return calls


def errors(group, dims, causal):
    """Of two launches with the same bits: distance of out and lse; and torch's distance of out."""
    seq = 1040 * group.world if not causal else 1000 * group.world
    whole, rows = made(group, 2, 6, 2, seq, dims), rows_of(group, seq, causal).to(group.device)
    mine = [t[:, :, rows].contiguous() for t in whole]
    runs = [perseus.ring_attention(*mine, group, causal=causal, heads_first=True) for _ in range(2)]
    want, lse = reference(*whole, causal, rows)
    theirs = functional.scaled_dot_product_attention(*whole, is_causal=causal, enable_gqa=True)[:, :, rows]
    equal = all(torch.equal(a, b) for a, b in zip(*runs))
    return distance(runs[0][0], want), distance(runs[0][1], lse), distance(theirs, want), equal


def times(group, dims, causal, seq, rounds):
    """Medians of rounds in which ours of all ranks and torch's of one GPU take turns. The results of the last round
    are compared with those of torch."""
    whole, rows = made(group, 4, 16, 16, seq, dims), rows_of(group, seq, causal).to(group.device)
    mine = [t[:, :, rows].contiguous() for t in whole]
    calls = {"ring": lambda: perseus.ring_attention(*mine, group, causal=causal, heads_first=True)[0],
             **torchs(*whole, causal)}
    graphs = {name: captured(lambda call=call: [call() for _ in range(CALLS)]) for name, call in calls.items()}
    taken, results = {name: [] for name in calls}, {}
    for i in range(2 + rounds):
        for name, graph in graphs.items():
            for result in results.get(name, ()):
                result.fill_(torch.nan)
            usec, results[name] = once(graph, group)
            if i >= 2:
                taken[name].append(usec / CALLS)
    usec = {name: round(statistics.median(values), 1) for name, values in taken.items()}
    theirs = min((name for name in usec if name != "ring"), key=usec.get)
    off = max(distance(out, results[theirs][0][:, :, rows].float()) for out in results["ring"])
    share = round(usec[theirs] / group.world / usec["ring"], 3)
    return {**{f"{name}_us": value for name, value in usec.items()}, "share_of_one_gpu": share,
            "distance": round(off, 4)}, off < 0.02


def attention_of_any_head(group, seq=16384, rounds=8):
    """4 sequences of 16 heads for times. share_of_one_gpu: torch's faster back end, on one GPU with all of it, divided
    by the ranks, over ours."""
    found, fine = {}, True
    for dims in HEADS:
        for causal in (False, True):
            name = f"head_{dims[0]}{'' if dims[0] == dims[1] else f'_with_{dims[1]}'}{'_causal' if causal else ''}"
            out, lse, theirs, equal = errors(group, dims, causal)
            row, right = times(group, dims, causal, seq, rounds)
            found[name] = {"error": round(out, 5), "error_lse": round(lse, 7), "torchs_error": round(theirs, 5), **row}
            fine = fine and right and equal and out < 1.1 * theirs and lse < 1e-3
            torch.cuda.empty_cache()
    return found, fine
