# SPDX-License-Identifier: Apache-2.0
"""Recomputed activations: every op and layer under torch.utils.checkpoint, whole and selective, gives the gradients of
the plain run, bit by bit. PERSEUS_TEST_WAYS=rare: the ways of recomputing that programs seldom take, not the others."""
import functools
import os
import unittest

import ranks
import torch
import torch.nn.functional as F
from ranks import random, run
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import perseus

EXPERTS, TOP_K, HIDDEN, INNER, COUNT = 4, 2, 64, 48, 20
RARE = ("reentrant", "without early stop", "keeps_the_rest", "nested")


def keeps_products(context, op, *arguments, **options):
    """Keeps what ops of perseus give, and recomputes the rest."""
    return CheckpointPolicy.MUST_SAVE if op.namespace == "perseus" else CheckpointPolicy.PREFER_RECOMPUTE


def keeps_the_rest(context, op, *arguments, **options):
    return CheckpointPolicy.PREFER_RECOMPUTE if op.namespace == "perseus" else CheckpointPolicy.MUST_SAVE


def ways():
    """Of running a body: torch's documented ones."""
    yield "whole", functools.partial(checkpoint, use_reentrant=False)
    yield "reentrant", functools.partial(checkpoint, use_reentrant=True)
    yield "without early stop", lambda body, *inputs: _to_the_end(body, *inputs)
    for policy in (keeps_products, keeps_the_rest):
        yield policy.__name__, functools.partial(
            checkpoint, use_reentrant=False, context_fn=functools.partial(create_selective_checkpoint_contexts, policy))
    yield ("nested", lambda body, *inputs: checkpoint(lambda *x: checkpoint(body, *x, use_reentrant=False), *inputs,
                                                      use_reentrant=False))
    yield "on the CPU", _on_the_cpu


def _to_the_end(body, *inputs):
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        return checkpoint(body, *inputs, use_reentrant=False)


def _on_the_cpu(body, *inputs):
    with torch.autograd.graph.save_on_cpu():
        return body(*inputs)


class Recomputed(unittest.TestCase):
    def same(self, world, make):
        """make(group): a body, and the tensors that it takes and that get gradients."""
        def body(group):
            function, inputs = make(group)

            def gradients(way):
                leaves = [t.detach().clone().requires_grad_() for t in inputs]
                y = way(lambda *x: torch.tanh(function(*x)), *(torch.tanh(t) for t in leaves))
                (y.float() * random(group.rank, *y.shape, seed=5).float()).sum().backward()
                return [t.grad for t in leaves]
            plain = gradients(lambda f, *x: f(*x))
            assert all(t is not None for t in plain)
            rare = os.environ.get("PERSEUS_TEST_WAYS") == "rare"
            return [name for name, way in ways() if (name in RARE) == rare
                    and not all(map(torch.equal, plain, gradients(way)))]
        self.assertEqual(run(world, body), [[]] * world)

    def test_products(self):
        ops = {"all_gather_matmul": {}, "all_gather_matmul without the gathered rows": {"keep_gathered": False},
               "matmul_reduce_scatter": {}, "matmul_all_reduce": {}, "replicated_matmul": {},
               "all_gather_matmul to fp32": {"out_dtype": torch.float32},
               "matmul_reduce_scatter to fp32": {"out_dtype": torch.float32},
               "matmul_all_reduce to fp32": {"out_dtype": torch.float32}}
        for name, options in ops.items():
            def make(group):
                rank = 0 if "replicated" in name else group.rank
                op = getattr(perseus, name.split()[0])
                return (lambda a, w, b: op(a, w.t(), group, bias=b, **options),
                        [random(rank, 32, 64), random(group.rank, 48, 64), random(1, 48)])
            with self.subTest(name):
                self.same(2, make)

    def test_several_products_of_one_gather_and_the_drop_in_ops(self):
        def several(group):
            return (lambda a, v, w: torch.cat(perseus.all_gather_matmuls(a, [v.t(), w.t()], group)[:2], 1),
                    [random(group.rank, 32, 64), random(group.rank, 48, 64), random(group.rank, 80, 64)])

        def drop_in(group):
            def body(a, w):
                _, (c,) = torch.ops.perseus.fused_all_gather_matmul(a, [w.t()], 1, group.name)
                return torch.ops.perseus.fused_matmul_reduce_scatter(c, w, "avg", 1, group.name)
            return body, [random(group.rank, 2, 8, 64), random(group.rank, 80, 64)]
        self.same(2, several)
        self.same(2, drop_in)

    def test_layers(self):
        for sequence_parallel in (True, False):
            def make(group):
                options = {"bias": True, "sequence_parallel": sequence_parallel}
                up, down = (perseus.nn.ColumnParallelLinear(64, 96, group, **options),
                            perseus.nn.RowParallelLinear(96, 64, group, **options))

                def body(x, *parameters):
                    y = torch.func.functional_call(up, dict(zip(("weight", "bias"), parameters[:2])), (x,))
                    return torch.func.functional_call(down, dict(zip(("weight", "bias"), parameters[2:])), (F.silu(y),))
                return (body, [random(group.rank if sequence_parallel else 0, 16, 2, 64), random(group.rank, 48, 64),
                               random(0, 48), random(group.rank, 64, 48), random(0, 64)])
            with self.subTest(sequence_parallel=sequence_parallel):
                self.same(2, make)

    def test_moe(self):
        for name in ("by parts", "in one", "recomputed"):
            def make(group):
                plan = perseus.moe_plan(max_tokens=COUNT, hidden=HIDDEN, experts=EXPERTS, top_k=TOP_K, inner=INNER,
                                        group=group)
                scores = torch.rand(COUNT, EXPERTS, generator=torch.Generator().manual_seed(group.rank))

                def body(x, router, first, second, residual):
                    weights, chosen = (scores + router).softmax(-1).topk(TOP_K)
                    if name != "by parts":
                        return perseus.moe_layer(x, chosen, weights, first, second, plan, residual,
                                                 recompute=name == "recomputed")[0]
                    d = perseus.moe_dispatch(x, chosen, weights, plan)
                    gate, up = torch._grouped_mm(d.rows, first, offs=d.ends).chunk(2, -1)
                    return perseus.moe_combine(torch._grouped_mm(F.silu(gate) * up, second, offs=d.ends), d, residual)
                local = EXPERTS // group.world
                return (body, [random(group.rank, COUNT, HIDDEN), random(group.rank, COUNT, EXPERTS).float(),
                               random(group.rank, local, HIDDEN, 2 * INNER), random(group.rank, local, INNER, HIDDEN),
                               random(group.rank, COUNT, HIDDEN)])
            with self.subTest(name):
                self.same(2, make)

    def test_attention_in_a_region_that_is_recomputed(self):
        def make(group):
            def body(x, w):
                q, k, v = x.view(1, 128, 4, 64).split((2, 1, 1), 2)
                y = perseus.ring_attention(q.contiguous(), k.contiguous(), v.contiguous(), group, causal=True)[0]
                return perseus.matmul_reduce_scatter(y.view(128, 128), w.t(), group)
            return body, [random(group.rank, 128, 256), random(group.rank, 48, 128)]
        self.same(2, make)


if __name__ == "__main__":
    ranks.main()
