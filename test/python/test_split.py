# SPDX-License-Identifier: Apache-2.0
"""A backward pass in halves, as pipelines of zero bubble want it, on emulated GPUs; test_pipeline.py has the schedules
themselves."""
import contextlib
import unittest
import weakref

import ranks
import torch
import torch.nn.functional as F
from ranks import random, run
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode

import perseus


class Seen(TorchDispatchMode):
    """A mode that makes ops go through torch's dispatcher."""

    def __torch_dispatch__(self, op, types, arguments=(), options=None):
        return op(*arguments, **(options or {}))


class SplitBackward(unittest.TestCase):
    """Schedules of zero bubble compute the gradients of inputs first, and later those of weights."""

    @staticmethod
    def halves(layer, x, seen):
        """The gradients of x and of the parameters, and what each half has launched."""
        x = x.clone().requires_grad_()
        loss = layer(x).float().square().mean()
        seen.clear()
        (of_x,), groups = stage_backward_input([loss], None, [x], iter(list(layer.parameters())))
        first = list(seen)
        seen.clear()
        del loss  # as a schedule does
        stage_backward_weight(iter(list(layer.parameters())), groups)
        return [of_x, *(p.grad for p in layer.parameters())], (first, list(seen))

    def test_each_half_launches_only_what_it_is_for(self):
        column, row = perseus.nn.ColumnParallelLinear, perseus.nn.RowParallelLinear
        launch, gather = "prs_gemm_launch", "gather"
        cases = [(column, {}, [launch], []), (column, {"keep_gathered": False}, [launch], [gather]),
                 (column, {"sequence_parallel": False}, [launch], []), (row, {}, [launch], [gather]),
                 (row, {"sequence_parallel": False}, [], []), (row, {"fp8": "rows"}, [launch], [gather])]

        def body(group):
            seen, launched, gathered = [], group.launch, group.gather_rows
            group.launch = lambda f, *rest: seen.append(f.__name__) or launched(f, *rest)
            group.gather_rows = lambda a: seen.append("gather") or gathered(a)
            for kind, options, first, second in cases:
                layer = kind(128, 96, group, bias=True, **options)
                x = random(group.rank, 32, 128 if kind is column else 64)
                whole = x.clone().requires_grad_()
                layer(whole).float().square().mean().backward()
                wanted = [whole.grad, *(p.grad.clone() for p in layer.parameters())]
                for mode in (contextlib.nullcontext(), Seen(), torch.autocast("cpu", torch.bfloat16)):
                    layer.zero_grad()
                    with mode:
                        got, halves = self.halves(layer, x, seen)
                    self.assertEqual(halves, (first, second), (kind, options, mode))
                    for have, want in zip(got, wanted):
                        self.assertTrue(torch.equal(have, want), (kind, options, mode))
        run(2, body)

    def test_a_layer_of_experts(self):
        """Its second half goes the rows' way again, for the weights alone."""
        class Experts(torch.nn.Module):
            def __init__(self, group):
                super().__init__()
                self.plan = perseus.moe_plan(max_tokens=32, hidden=64, experts=4, top_k=2, inner=64, linear_layout=True,
                                             group=group)
                self.router = torch.nn.Parameter(random(0, 4, 64))
                self.gate_up = torch.nn.Parameter(random(group.rank, 4 // group.world, 128, 64).mul_(0.125))
                self.down = torch.nn.Parameter(random(group.rank, 4 // group.world, 64, 64).mul_(0.125))

            def forward(self, x):
                weights, chosen = F.linear(x, self.router).float().softmax(-1).topk(2, -1)
                return perseus.moe_layer(x, chosen, weights, self.gate_up, self.down, self.plan, residual=x)[0]

        def body(group):
            layer, x = Experts(group), random(group.rank, 32, 64)
            whole = x.clone().requires_grad_()
            layer(whole).float().square().mean().backward()
            wanted = [whole.grad, *(p.grad.clone() for p in layer.parameters())]
            layer.zero_grad()
            got, _ = self.halves(layer, x, [])
            for have, want in zip(got, wanted):
                self.assertTrue(torch.equal(have, want))
        run(2, body)

    def test_a_part_of_the_gradients_with_another_gradient_each_time(self):
        """torch.autograd.grad() of one input at a time, and backward(inputs=), give what the whole pass gives."""
        def body(group):
            for op in ("all_gather_matmul", "matmul_reduce_scatter", "replicated_matmul", "matmul_all_reduce"):
                given = [random(group.rank, 32, 64), random(group.rank, 96, 64), random(group.rank, 96)]
                a, w, bias = (t.requires_grad_() for t in given)
                y = getattr(perseus, op)(a, w.t(), group, bias=bias)
                for i, part in enumerate((a, w, bias)):
                    g = random(group.rank, *y.shape, seed=i)
                    whole = torch.autograd.grad(y, (a, w, bias), g, retain_graph=True)
                    self.assertTrue(torch.equal(torch.autograd.grad(y, part, g, retain_graph=True)[0], whole[i]), op)
                    y.backward(g, inputs=[part], retain_graph=True)
                    self.assertTrue(torch.equal(part.grad, whole[i]), op)
                self.assertEqual([t.grad is None for t in (a, w, bias)], [False] * 3)
        run(2, body)

    def test_a_node_that_is_not_come_back_to_is_freed(self):
        def body(group):
            g = torch.ones(32, 96, dtype=torch.bfloat16)  # the caller keeps it
            a, w = random(0, 32, 64).requires_grad_(), random(0, 96, 64).requires_grad_()
            rows = []
            for _ in range(3):
                y = perseus.matmul_reduce_scatter(a * 1, w.t(), group)
                rows.append(weakref.ref(y.grad_fn.saved_tensors[0]))
                torch.autograd.grad(y, a, g)
                torch.autograd.grad((y := perseus.matmul_reduce_scatter(a, w.t(), group)), a, g, retain_graph=True)
                del y
            self.assertEqual([r() for r in rows], [None] * 3)
            self.assertEqual(len(g.perseus_nodes), 2)  # the pass, and the last node
        run(1, body)

    def test_an_op_whose_results_have_several_gradients_is_refused_by_its_name(self):
        class Several(torch.nn.Module):
            def __init__(self, group):
                super().__init__()
                self.group = group
                self.q, self.k, self.o = (torch.nn.Parameter(random(i, 64, 64)) for i in range(3))

            def forward(self, x):
                q, k, _ = perseus.all_gather_matmuls(x, [self.q.t(), self.k.t()], self.group)
                return F.linear(F.silu(q) * k, self.o)  # its node keeps those below it

        class Sinks(torch.nn.Module):
            def __init__(self, group):
                super().__init__()
                self.group, self.sinks = group, torch.nn.Parameter(random(0, 2, dtype=torch.float32))

            def forward(self, x):
                heads = x.view(1, -1, 2, 64)
                return perseus.striped_attention(heads, heads, heads, self.group, sinks=self.sinks)[0]

        def body(group):
            for op, kind, x in (("all_gather_matmuls", Several, random(0, 32, 64)),
                                ("striped_attention", Sinks, random(0, 256, 128))):
                with self.assertRaisesRegex(NotImplementedError, rf"perseus\.{op}: .* splits the backward pass"):
                    self.halves(kind(group), x, [])
        run(1, body)


if __name__ == "__main__":
    ranks.main()
