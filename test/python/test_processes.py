# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes with torch's default group of gloo, each on an emulated node of its own; run.py runs it on the
software NIC."""
import unittest

import ranks
import torch
import torch.distributed as dist
from ranks import beyond, random
from test_scaled import Operands, product, wrong

import perseus
from perseus import scaled

WORLD = 2


def products(group):
    """Results with too large an error, of each op and of a gradient."""
    m, k, n, r = 128, 64, 96, group.rank
    w = random(0, n, k, seed=1)
    partials = [random(s, m, k).double() @ w.double().t() for s in range(WORLD)]
    a, rows = random(r, m, k), m // WORLD
    bad = beyond(perseus.matmul_reduce_scatter(a, w.t()), [p[r * rows:(r + 1) * rows] for p in partials])
    bad += beyond(perseus.matmul_all_reduce(a, w.t()), partials)
    x = random(r, rows, k, seed=2).requires_grad_()
    y = torch.ops.perseus.fused_all_gather_matmul(x, [w.t()], 0, dist.group.WORLD.group_name)[1][0]
    bad += beyond(y.detach(), [torch.cat([random(s, rows, k, seed=2) for s in range(WORLD)]).double() @ w.double().t()])
    y.backward(torch.ones_like(y))
    return bad + beyond(x.grad, [torch.ones(rows, n, dtype=torch.float64) @ w.double()] * WORLD)


def scaled_products(group):
    """The same of float8_e4m3fn with each kind of scale; the second size is one that the unfused path takes."""
    bad = 0
    for kind in (scaled.TENSOR, scaled.ROWS, scaled.BLOCKS):
        for n, k in ((136, 256), (128, 512)):
            every = [Operands(r, kind, 64, n, k, of_a=0) for r in range(WORLD)]
            x, sums = every[group.rank], [product(o.whole_a, o.whole_b) for o in every]
            mine = [(p.chunk(WORLD)[group.rank], q.chunk(WORLD)[group.rank]) for p, q in sums]
            bad += wrong(perseus.all_gather_scaled_matmul(*x, group),
                         [product(torch.cat([o.whole_a for o in every]), x.whole_b)], k)
            bad += wrong(perseus.scaled_matmul_all_reduce(*x, group), sums, k)
            bad += wrong(perseus.scaled_matmul_reduce_scatter(*x, group), mine, k)
    return bad


def rank_main():
    dist.init_process_group("gloo")
    group = perseus.init(device=0, timeout_ms=ranks.LIMIT_S * 1000)
    bad = products(group) + scaled_products(group)
    assert group is perseus.find(None) and group.rank == dist.get_rank()
    group.close()
    dist.destroy_process_group()
    return min(bad, 100)


class Processes(unittest.TestCase):
    def test_the_ops_find_the_default_group_and_multiply(self):
        self.assertEqual(ranks.processes(rank_main, WORLD, limit_s=800), [0] * WORLD)


if __name__ == "__main__":
    ranks.main()
