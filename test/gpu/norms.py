# SPDX-License-Identifier: Apache-2.0
"""The claim norms_are_right of python.py: sums over ranks with residual and RMS norm, with a product and without, in
every kind of result, compared with fp64 in every element; the same bits on all ranks and in every replay of a graph."""
import torch
import torch.distributed as dist
from perseus.bench import captured

import perseus

EPS, E4M3 = 1e-5, torch.float8_e4m3fn
ROWS, SIZES = (1, 5, 16, 33, 130, 1024, 4100), ((8192, 2048), (7168, 512), (2048, 1024))


def uniform(*shape):
    return torch.rand(*shape, device="cuda").mul_(2).sub_(1).bfloat16()


def same(*shape):
    """The same on all ranks."""
    x = uniform(*shape)
    dist.broadcast(x, 0)
    return x


def beyond(have, want, more=0.0, roundings=1):
    """Elements that differ by more than so many roundings to bf16, and `more`."""
    bound = want.abs() * 2**-8 * roundings * 1.01 + more + 2**-16
    return int((~((have.double() - want).abs() <= bound)).sum())


def quantised(found, want, scales, more):
    """Elements that are not what their scale says."""
    bits, scale, _ = found
    wide = (scale.repeat_interleave(128, 1) if scales == "blocks" else scale).double()
    bound = want.abs() * 2**-4 * 1.01 + wide * 2**-10 + more + want.abs() * 2**-8 + 2**-16
    clamped = torch.maximum(torch.minimum(want, wide * 448), wide * -448)
    return int((~((bits.double() * wide - clamped).abs() <= bound)).sum())


def ranks_differ(x):
    first = x.view(torch.uint8).clone()
    dist.broadcast(first, 0)
    return int((first != x.view(torch.uint8)).sum())


def one(group, rows, n, k, product):
    a, w = uniform(rows, k), uniform(n, k)
    x, residual, weight = uniform(rows, n), same(rows, n), same(n)
    part = a.double() @ w.double().t() if product else x.double()
    total, size = part.clone(), part.abs()
    dist.all_reduce(total)
    dist.all_reduce(size)
    total += residual.double()
    off = float(size.max()) * 2**-8 if product else 2**-14  # each part is rounded to travel
    factor = torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS)
    want = total * factor * weight.double()
    near = off * float(factor.max()) * 1.1

    def normed():
        if product:
            return perseus.matmul_all_reduce_rms_norm(a, w.t(), residual, weight, EPS, group)
        return perseus.all_reduce_rms_norm(x, residual, weight, EPS, group)

    def quant(scales):
        scale = torch.tensor([0.01], device="cuda") if scales == "tensor" else None
        if product:
            return perseus.matmul_all_reduce_rms_norm_quant(a, w.t(), residual, weight, EPS, group, scales=scales,
                                                            scale=scale)
        return perseus.all_reduce_rms_norm_quant(x, residual, weight, EPS, group, scales=scales, scale=scale)
    h, stream = normed()
    wrong = {"sum": beyond(stream, total, off), "normed": beyond(h, want, near, 2), "ranks": ranks_differ(h)}
    for scales in ("tensor", "rows", "blocks"):
        wrong[scales] = quantised(quant(scales), want, scales, near)
    replay = captured(lambda: [normed() for _ in range(4)])
    results, wrong["replays"] = [result for pair in replay() for result in pair], 0
    for _ in range(10):
        for result in results:
            result.fill_(float("nan"))
        replay()
        wrong["replays"] += sum(int((result != (stream if i % 2 else h)).sum()) for i, result in enumerate(results))
    return wrong


def norms_are_right(group):
    found = {}
    for n, k in SIZES:
        for rows in ROWS:
            for product in (False, True):
                wrong = one(group, rows, n, k, product)
                if any(wrong.values()):
                    found[f"{rows}x{n}x{k if product else 0}"] = wrong
    bad = torch.tensor([len(found)], device="cuda")
    dist.all_reduce(bad)
    return {"cells": 2 * len(SIZES) * len(ROWS), "wrong": found}, int(bad) == 0
