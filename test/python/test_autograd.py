# SPDX-License-Identifier: Apache-2.0
"""Gradients on emulated GPUs, compared with torch's in fp32; layers; and the same under
torch.compile(fullgraph=True)."""
import copy
import sys
import unittest
from unittest import mock

import ranks
import torch
import torch.nn.functional as F
from llama_block import Config, LlamaBlock, Unfused
from ranks import random, run
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from train import furthest, initialize, train

import perseus
from perseus import ops

SMALL = Config(hidden=64, heads=4, kv_heads=2, intermediate=96)


def apart(a, b):
    """The largest difference, over the root mean square of b."""
    return float((a.detach().double() - b.detach().double()).abs().max()
                 / b.detach().double().square().mean().sqrt().clamp_min(1e-9))


class Gradients(unittest.TestCase):
    """Each rank's loss is the sum of result * its own random matrix. The reference has all ranks' tensors in fp32 in
    one graph."""

    def check(self, world, op, a_shape, k, n, reference, needs=(True, True), dtype=torch.bfloat16, **more):
        m, precision = a_shape[0], 0.01 if dtype is torch.float16 else 0.05
        parts = [random(r, m, k, seed=11, dtype=dtype) for r in range(world)]
        ws = [random(r, n, k, seed=12, dtype=dtype) for r in range(world)]

        def loss_weights(rank, shape):
            return random(rank, *shape, seed=13).float()

        def body(group):
            a, w = parts[group.rank].clone().requires_grad_(needs[0]), ws[group.rank].clone().requires_grad_(needs[1])
            c = getattr(perseus, op)(a, w.t(), group, **more)
            c = c[0] + c[1] if isinstance(c, list) else c
            same = 0 if op == "matmul_all_reduce" else group.rank  # its gradient is the same on all ranks
            (c.float() * loss_weights(same, c.shape)).sum().backward()
            return c.detach(), a.grad, w.grad
        got = run(world, body)
        wide_a, wide_w = ([t.float().requires_grad_() for t in ts] for ts in (parts, ws))
        cs = reference(wide_a, wide_w)
        total = sum((c * loss_weights(0 if op == "matmul_all_reduce" else r, c.shape)).sum() for r, c in enumerate(cs))
        if op == "matmul_all_reduce":  # one result that all ranks have
            total = (cs[0] * loss_weights(0, cs[0].shape)).sum()
        total.backward()
        for r, (c, of_a, of_w) in enumerate(got):
            self.assertEqual(c.dtype, more.get("out_dtype", dtype))
            self.assertLess(apart(c, cs[r]), precision)
            for have, want, needed in ((of_a, wide_a[r].grad, needs[0]), (of_w, wide_w[r].grad, needs[1])):
                self.assertEqual(have is not None, needed)
                if needed:
                    self.assertLess(apart(have, want), precision)
                    self.assertTrue(have.is_contiguous())

    def test_all_gather_matmul(self):
        def reference(a, w):
            return [torch.cat(a) @ x.t() for x in w]
        for needs in ((True, True), (True, False), (False, True)):
            self.check(2, "all_gather_matmul", (32,), 72, 96, reference, needs)
        self.check(4, "all_gather_matmul", (16,), 64, 80, reference)
        self.check(2, "all_gather_matmul", (32,), 72, 96, reference, dtype=torch.float16)
        self.check(2, "all_gather_matmul", (32,), 72, 96, reference, out_dtype=torch.float32)

    def test_gradients_are_the_same_where_a_mode_sees_the_ops(self):
        """A mode of torch makes calls go through its dispatcher, which they otherwise avoid."""
        class Log(TorchDispatchMode):
            def __init__(self):
                super().__init__()
                self.seen = []

            def __torch_dispatch__(self, op, types, arguments=(), options=None):
                self.seen.append(op._schema.name)
                return op(*arguments, **(options or {}))

        def results(group, op, out_dtype):
            a, w = random(0, 32, 64).requires_grad_(), random(1, 80, 64).requires_grad_()
            c = getattr(perseus, op)(a, [w.t()] if op.endswith("matmuls") else w.t(), group, **out_dtype)
            c = c[0] if isinstance(c, list) else c
            return [c.detach(), *torch.autograd.grad(c.float().square().sum(), (a, w))]

        def body(group):
            for op, options in (("all_gather_matmul", {}), ("all_gather_matmul", {"keep_gathered": False}),
                                ("all_gather_matmul", {"out_dtype": torch.float32}), ("all_gather_matmuls", {}),
                                ("matmul_reduce_scatter", {}), ("matmul_all_reduce", {}), ("replicated_matmul", {})):
                straight = results(group, op, options)
                with Log() as log:
                    logged = results(group, op, options)
                self.assertTrue(any(op in name for name in log.seen), (op, log.seen))
                self.assertNotIn("aten::add", log.seen)  # one product has one gradient: nothing to add to it
                for one, other in zip(straight, logged):
                    self.assertTrue(torch.equal(one, other), op)
        run(1, body)

    def test_a_tuple_of_weights_has_gradients_and_what_is_no_tensor_is_named(self):
        def body(group):
            a, ws = random(0, 32, 64), [random(i, 80, 64).requires_grad_() for i in (1, 2)]
            c, d, _ = perseus.all_gather_matmuls(a, tuple(w.t() for w in ws), group)
            (c + d).float().sum().backward()
            with self.assertRaisesRegex((RuntimeError, TypeError), "Tensor"):
                perseus.matmul_all_reduce([1.0], ws[0].t(), group)
            return [w.grad is not None for w in ws]
        self.assertEqual(run(1, body), [[True, True]])

    def test_a_profiler_sees_the_names_of_ops(self):
        def body(group):
            a, w = random(0, 32, 64), random(1, 80, 64)
            with torch.autograd.profiler.profile() as profile:
                perseus.matmul_all_reduce(a, w.t(), group)
            return [event.name for event in profile.function_events]
        self.assertIn("perseus::matmul_all_reduce", run(1, body)[0])

    def test_the_backward_pass_gathers_nothing_that_a_kernel_has_gathered(self):
        def body(group):
            counted, gather = [], group.gather_rows
            group.gather_rows = lambda a: counted.append(tuple(a.shape)) or gather(a)
            for keep in (True, False):
                a, w = random(group.rank, 32, 64).requires_grad_(), random(group.rank, 80, 64).requires_grad_()
                c = perseus.all_gather_matmul(a, w.t(), group, keep_gathered=keep)
                perseus.matmul_reduce_scatter(c, random(group.rank, 96, 80).requires_grad_().t(),
                                              group).sum().backward()
            return counted
        self.assertEqual(run(2, body), [[(32, 64)]] * 2)

    def test_matmul_reduce_scatter(self):
        def reference(a, w):
            return sum(x @ y.t() for x, y in zip(a, w)).chunk(len(a))
        for needs in ((True, True), (True, False), (False, True)):
            self.check(2, "matmul_reduce_scatter", (64,), 72, 96, reference, needs)
        self.check(4, "matmul_reduce_scatter", (64,), 64, 80, reference)
        self.check(2, "matmul_reduce_scatter", (64,), 72, 96, reference, dtype=torch.float16)
        self.check(2, "matmul_reduce_scatter", (64,), 72, 96, reference, out_dtype=torch.float32)

    def test_a_bias_gets_the_sum_over_the_rows_of_this_rank(self):
        for op, rows in (("all_gather_matmul", 64), ("matmul_reduce_scatter", 16), ("matmul_all_reduce", 32),
                         ("replicated_matmul", 32)):
            for keep, alone in (((True, False), (False, False), (None, True)) if op == "all_gather_matmul"
                                else ((None, False), (None, True))):
                def body(group):
                    a, w = (random(group.rank, *size).requires_grad_(not alone) for size in ((32, 64), (80, 64)))
                    bias = random(9, 80).requires_grad_()
                    c = getattr(perseus, op)(a, w.t(), group, bias=bias,
                                             **({} if keep is None else {"keep_gathered": keep}))
                    g = random(group.rank, rows, 80, seed=4)
                    c.backward(g)
                    return apart(bias.grad, g.float().sum(0)), (a.grad is None) == alone == (w.grad is None)
                for distance, others in run(2, body):
                    self.assertLess(distance, 0.02, op)
                    self.assertTrue(others)

    def test_matmul_all_reduce(self):
        def reference(a, w):
            return [sum(x @ y.t() for x, y in zip(a, w))] * len(a)
        self.check(2, "matmul_all_reduce", (48,), 72, 96, reference)
        self.check(2, "matmul_all_reduce", (48,), 72, 96, reference, dtype=torch.float16)
        self.check(2, "matmul_all_reduce", (48,), 72, 96, reference, out_dtype=torch.float32)

    def test_replicated_matmul_adds_up_the_gradients_of_all_ranks(self):
        def body(group):
            a, w = random(0, 48, 72).requires_grad_(), random(group.rank, 96, 72).requires_grad_()
            perseus.replicated_matmul(a, w.t(), group).backward(random(group.rank, 48, 96, seed=2))
            return a.grad, w.grad
        got = run(2, body)
        want = sum(random(r, 48, 96, seed=2).float() @ random(r, 96, 72).float() for r in range(2))
        for r, (of_a, of_w) in enumerate(got):
            self.assertLess(apart(of_a, want), 0.05)
            self.assertLess(apart(of_w, random(r, 48, 96, seed=2).float().t() @ random(0, 48, 72).float()), 0.05)

    def test_several_products_of_one_gather(self):
        def body(group):
            a, ws = random(group.rank, 32, 64).requires_grad_(), [random(r, 80, 64).requires_grad_() for r in range(2)]
            first, second, gathered = perseus.all_gather_matmuls(a, [w.t() for w in ws], group)
            (first.sum() + 2 * second.sum()).backward()
            return a.grad, ws[0].grad, ws[1].grad, gathered
        wide = [random(r, 32, 64).float().requires_grad_() for r in range(2)]
        ws = [[random(r, 80, 64).float().requires_grad_() for r in range(2)] for _ in range(2)]
        sum((torch.cat(wide) @ w[0].t()).sum() + 2 * (torch.cat(wide) @ w[1].t()).sum() for w in ws).backward()
        for r, (of_a, of_first, of_second, gathered) in enumerate(run(2, body)):
            self.assertLess(apart(of_a, wide[r].grad), 0.05)
            self.assertLess(apart(of_first, ws[r][0].grad), 0.05)
            self.assertLess(apart(of_second, ws[r][1].grad), 0.05)
            self.assertTrue(torch.equal(gathered, torch.cat([random(r, 32, 64) for r in range(2)])))

    def test_narrow_products_of_one_gather_send_one_sum_of_gradients(self):
        """Wide: 1050 columns on 2 ranks."""
        for columns, joined in (((80, 40), [0, 1]), ((2048, 64, 64), [0, 1, 2]), ((2048, 1100, 64), [1, 2]),
                                ((2048, 600, 600), [1, 2]), ((2048, 2048), []), ((64,), [0]), ((), [])):
            self.assertEqual(ops._joined([torch.empty(8, n, device="meta") for n in columns], 2), joined, columns)

        sizes = (1064, 40, 56)

        def weight(rank, n):
            return random(rank, 24, n, seed=n) if n == 56 else random(rank, n, 24, seed=n).t()

        def body(group):
            a = random(group.rank, 16, 24).requires_grad_()
            *found, _ = perseus.all_gather_matmuls(a, [weight(group.rank, n) for n in sizes], group)
            torch.autograd.backward(found, [random(group.rank, 32, n, seed=3) for n in sizes])
            return a.grad
        want = sum(random(r, 32, n, seed=3).float() @ weight(r, n).t().float() for r in range(2) for n in sizes)
        launch = ops._call.matmul_reduce_scatter.alone
        for join, shapes in ((ops._joined, [(1160, 24)]), (lambda bs, world: [], [(n, 24) for n in sizes])):
            launched = []

            def counted(g, b, name):
                launched.append(tuple(b.shape))
                return launch(g, b, name)
            with mock.patch.object(ops, "_joined", join), \
                    mock.patch.object(ops._call.matmul_reduce_scatter, "alone", counted):
                got = run(2, body)
            self.assertEqual(sorted(launched), sorted(2 * shapes))
            for r, of_a in enumerate(got):
                self.assertLess(apart(of_a, want[16 * r:][:16]), 0.05)

    def test_the_drop_in_ops_have_gradients(self):
        def body(group):
            a, w = random(group.rank, 2, 8, 64).requires_grad_(), random(group.rank, 80, 64).requires_grad_()
            _, (c,) = torch.ops.perseus.fused_all_gather_matmul(a, [w.t()], 1, group.name)
            d = torch.ops.perseus.fused_matmul_reduce_scatter(c, w, "sum", 1, group.name)
            d.float().sum().backward()
            return a.grad, w.grad
        wide, ws = ([random(r, *shape).float().requires_grad_() for r in range(2)] for shape in ((2, 8, 64), (80, 64)))
        sum((torch.cat(wide, 1) @ w.t()) @ w for w in ws).sum().backward()
        for r, (of_a, of_w) in enumerate(run(2, body)):
            self.assertLess(apart(of_a, wide[r].grad), 0.1)
            self.assertLess(apart(of_w, ws[r].grad), 0.1)

    def test_gradients_of_gradients_are_refused_by_name(self):
        def refused(op, y, *leaves, rows=None):
            # itself right: a penalty may never ask for more
            grads = torch.autograd.grad(y.float().square().sum(), leaves, create_graph=True)
            plain = torch.autograd.grad(y.float().square().sum(), leaves)
            for again, once in zip(grads, plain):
                self.assertTrue(torch.equal(again[:rows], once[:rows]), op)
                with self.assertRaisesRegex(NotImplementedError, f"perseus.{op}: gradients of gradients"):
                    again.float().square().sum().backward(retain_graph=True)

        def body(group):
            def leaf(*shape, seed=0):
                return random(0, *shape, seed=seed).requires_grad_()
            for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "replicated_matmul"):
                a, w = leaf(32, 64), leaf(48, 64)
                refused(op, getattr(torch.ops.perseus, op)(a, w.t(), group.name), a, w)
            a, w = leaf(32, 64), leaf(48, 64)
            refused("all_gather_matmul_kept", perseus.all_gather_matmul(a, w.t(), group), a, w)
            refused("all_gather_matmuls", perseus.all_gather_matmuls(a, [w.t()], group)[0], a, w)
            q, k, v = (leaf(1, 64, heads, 64, seed=heads) for heads in (2, 1, 1))
            refused("ring_attention", perseus.ring_attention(q, k, v, group)[0], q, k, v)
            plan = perseus.moe_plan(max_tokens=16, hidden=64, experts=4, top_k=2, inner=48, group=group)
            x, first, second = leaf(16, 64), leaf(4, 64, 96), leaf(4, 48, 64)
            weights, chosen = torch.rand(16, 4, generator=torch.Generator().manual_seed(0)).topk(2)
            refused("moe_layer", perseus.moe_layer(x, chosen, weights, first, second, plan)[0], x, first, second)
            d = perseus.moe_dispatch(x, chosen, weights, plan)
            refused("moe_dispatch", d.rows, x)
            rows = d.rows.detach().requires_grad_()
            refused("moe_combine", perseus.moe_combine(rows, d), rows, rows=d.ends[-1])  # what follows is not written
        run(1, body)

    def test_derivatives_that_only_torchs_own_ops_have_are_refused_by_name(self):
        """Without it, forward mode gives a result without a derivative, which is then taken for zero."""
        def forward(op, call, x):
            with self.assertRaisesRegex(NotImplementedError, f"perseus.{op}: forward-mode"):
                torch.func.jvp(call, (x,), (x,))
            with forward_ad.dual_level():
                call(x)  # nobody asks for one
                with self.assertRaisesRegex(NotImplementedError, f"perseus.{op}: forward-mode"):
                    call(forward_ad.make_dual(x, x))

        def body(group):
            a, w, q = random(0, 32, 64), random(1, 48, 64), random(0, 1, 64, 2, 64)
            for op in ("matmul_reduce_scatter", "matmul_all_reduce", "all_gather_matmul"):
                def product(x):
                    return getattr(perseus, op)(x, w.t(), group)
                forward(op, product, a)
                forward(op, lambda x: getattr(torch.ops.perseus, op)(x, w.t(), group.name), a)
                for transform in (torch.func.grad, torch.func.jacrev):
                    with self.assertRaisesRegex(NotImplementedError, f"perseus.{op}.*: the derivatives of torch.func"):
                        transform(lambda x: product(x).float().sum())(a)
                each = torch.func.vmap(product)(torch.stack((a, -a)))  # no derivative
                self.assertTrue(torch.equal(each[1], product(-a)), op)
            forward("all_gather_matmuls", lambda x: perseus.all_gather_matmuls(a, [x], group)[0], w.t().contiguous())
            forward("all_reduce", lambda x: perseus.all_reduce(x, group), a)
            forward("ring_attention", lambda x: perseus.ring_attention(x, q, q, group)[0], q)
        run(1, body)

    def test_results_that_get_no_gradient_are_zeros_to_the_other_ranks(self):
        class Nothing(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, g):
                return None

        def body(group):
            found = []
            for op in ("all_gather_matmul", "all_gather_matmuls", "matmul_reduce_scatter", "matmul_all_reduce"):
                a, w = (random(group.rank, *shape).requires_grad_() for shape in ((32, 64), (48, 64)))
                y = getattr(perseus, op)(a, [w.t()] if op == "all_gather_matmuls" else w.t(), group)
                y = y[0] if isinstance(y, list) else y
                (y if group.rank else Nothing.apply(y)).float().sum().backward()
                found.append(bool(a.grad.any()) == (group.rank == 1 or op != "matmul_all_reduce"))
            return found
        self.assertEqual(run(2, body), [[True] * 4] * 2)

    def test_autocast_casts_what_torchs_products_cast(self):
        def body(group):
            for dtype in (torch.bfloat16, torch.float16):
                for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "replicated_matmul"):
                    a, w, bias = (random(0, *shape).float().requires_grad_() for shape in ((32, 64), (48, 64), (48,)))
                    with torch.autocast("cpu", dtype=dtype):
                        y = getattr(perseus, op)(a, w.t(), group, bias=bias)
                    want = getattr(perseus, op)(a.to(dtype), w.t().to(dtype), group, bias=bias.to(dtype))
                    self.assertTrue(torch.equal(y, want) and y.dtype is dtype, op)
                    y.float().sum().backward()
                    self.assertEqual({t.grad.dtype for t in (a, w, bias)}, {torch.float32})
                with torch.autocast("cpu", dtype=dtype), torch.no_grad():
                    c = torch.ops.perseus.fused_matmul_reduce_scatter(a, w.t(), "sum", 0, group.name)
                    _, (d,) = torch.ops.perseus.fused_all_gather_matmul(a, [w.t()], 0, group.name)
                    layer = perseus.nn.ColumnParallelLinear(64, 48, group, dtype=torch.float32)
                    self.assertEqual({c.dtype, d.dtype, layer(a).dtype}, {dtype})
            with torch.autocast("cpu", dtype=torch.bfloat16):
                q = random(0, 1, 128, 2, 64).float()
                y = perseus.ring_attention(q.requires_grad_(), q, q, group)[0]
                y.float().sum().backward()
                self.assertEqual((y.dtype, q.grad.dtype), (torch.bfloat16, torch.float32))
                plan = perseus.moe_plan(max_tokens=16, hidden=64, experts=4, top_k=2, inner=48, group=group)
                x, first, second = (random(0, *shape).float() for shape in ((16, 64), (4, 64, 96), (4, 48, 64)))
                weights, chosen = torch.rand(16, 4).topk(2)
                y = perseus.moe_layer(x, chosen, weights, first, second, plan)[0]
                self.assertEqual(perseus.moe_combine(perseus.moe_dispatch(x, chosen, weights, plan).rows.float(),
                                                     perseus.moe_dispatch(x, chosen, weights, plan)).dtype,
                                 torch.bfloat16)
            self.assertTrue(torch.equal(y, perseus.moe_layer(x.bfloat16(), chosen, weights, first.bfloat16(),
                                                             second.bfloat16(), plan)[0]))
        run(1, body)

    def test_no_columns_are_a_sum_of_nothing(self):
        def body(group):
            for op, rows in (("all_gather_matmul", 64), ("matmul_reduce_scatter", 16), ("matmul_all_reduce", 32),
                             ("replicated_matmul", 32)):
                a, w, bias = random(0, 32, 0).requires_grad_(), random(0, 48, 0).requires_grad_(), random(0, 48)
                y = getattr(perseus, op)(a, w.t(), group)
                self.assertTrue(torch.equal(y, torch.zeros(rows, 48, dtype=torch.bfloat16)), op)
                y.sum().backward()
                self.assertEqual((a.grad.shape, w.grad.shape), (a.shape, w.shape))
                self.assertTrue(torch.equal(getattr(perseus, op)(a, w.t(), group, bias=bias), bias.expand(rows, 48)),
                                op)
        run(2, body)

    def test_what_has_no_backward_says_so(self):
        def body(group):
            x, weights = random(0, 16, 64).requires_grad_(), random(0, 4, 64, 96)
            y = perseus.moe_dispatch_gemm(x, torch.zeros(16, 1, dtype=torch.int64), torch.ones(16, 1), weights,
                                          max_tokens=16, capacity=512, group=group)[0]
            with self.assertRaisesRegex(NotImplementedError, "perseus.moe_dispatch_gemm has no backward"):
                y.sum().backward()
        run(1, body)


class Layers(unittest.TestCase):
    def test_a_column_and_a_row_layer_are_a_two_layer_perceptron(self):
        for sequence_parallel in (True, False):
            with self.subTest(sequence_parallel=sequence_parallel):
                self.check_pair(sequence_parallel)

    def check_pair(self, sequence_parallel):
        world, tokens, hidden, inner = 2, 32, 64, 96
        x = random(0, tokens, hidden)

        def body(group):
            options = {"bias": True, "sequence_parallel": sequence_parallel}
            up = perseus.nn.ColumnParallelLinear(hidden, inner, group, **options)
            down = perseus.nn.RowParallelLinear(inner, hidden, group, **options)
            mine = (x.chunk(world)[group.rank] if sequence_parallel else x).clone().requires_grad_()
            y = down(F.silu(up(mine)))
            y.float().sum().backward()
            perseus.nn.sum_replicated_gradients([*up.parameters(), *down.parameters()], group)
            return (y.detach(), mine.grad, up.weight.detach(), down.weight.detach(), up.weight.grad, down.weight.grad,
                    down.bias.grad)
        got = run(world, body)
        wide = x.float().requires_grad_()
        up, down = (torch.cat([g[2] for g in got]).float().requires_grad_(),
                    torch.cat([g[3] for g in got], 1).float().requires_grad_())
        y = F.silu(wide @ up.t()) @ down.t()
        y.sum().backward()
        for r, (c, of_x, _, _, of_up, of_down, of_bias) in enumerate(got):
            self.assertLess(apart(c, y.chunk(world)[r] if sequence_parallel else y), 0.05)
            self.assertLess(apart(of_x, wide.grad.chunk(world)[r] if sequence_parallel else wide.grad), 0.05)
            self.assertLess(apart(of_up, up.grad.chunk(world)[r]), 0.06)
            self.assertLess(apart(of_down, down.grad.chunk(world, 1)[r]), 0.06)
            self.assertEqual(of_bias.float().tolist(), [float(tokens)] * hidden)

    def test_layers_take_what_nn_linear_takes(self):
        wide = random(0, 8, 6, 128)
        inputs = {"a slice": wide[:, :, :64], "every second": wide[::2, :, 64:],
                  "transposed": wide[:, :, :64].transpose(0, 1), "expanded": wide[:1, :, :64].expand(8, 6, 64),
                  "odd start": wide.view(-1)[1:1 + 8 * 64].view(8, 64), "empty": wide[:, :0, :64],
                  "two": wide[:, 0, :64], "columns": random(0, 64, 8).t()}

        def body(group):
            for sequence_parallel in (True, False):
                up, down = (kind(64, 64, group, bias=True, sequence_parallel=sequence_parallel)
                            for kind in (perseus.nn.ColumnParallelLinear, perseus.nn.RowParallelLinear))
                for name, x in inputs.items():
                    for layer in (up, down):
                        y = layer(x)
                        want = F.linear(x, layer.weight, layer.bias)
                        self.assertEqual(y.shape, want.shape, name)
                        self.assertFalse(y.is_contiguous() and y._is_view(), name)
                        self.assertLess(apart(y, want) if y.numel() else 0, 0.05, name)
                for sequence_dim in (1, 2):
                    column, row = (kind(64, 64, group, sequence_parallel=sequence_parallel, sequence_dim=sequence_dim)
                                   for kind in (perseus.nn.ColumnParallelLinear, perseus.nn.RowParallelLinear))
                    if sequence_dim == 1 or not sequence_parallel:
                        self.assertLess(apart(row(column(wide[:, :, :64])),
                                              F.linear(F.linear(wide[:, :, :64], column.weight), row.weight)), 0.1)
                    else:
                        with self.assertRaisesRegex(ValueError, r"ColumnParallelLinear: x has shape \(8, 6, 64\); its "
                                                                r"dimension 2 must be the sequence"):
                            column(wide[:, :, :64])
            self.assertEqual(up(random(0, 64)).shape, (64,))  # without sequence parallelism
            with self.assertRaisesRegex(ValueError, r"x has shape \(8, 63\); its last dimension must be 64"):
                up(random(0, 8, 63))
        run(1, body)

    def test_a_sequence_in_the_second_dimension(self):
        x = random(0, 3, 8, 64)  # batch, sequence, features

        def body(group):
            part = x.chunk(2, 1)[group.rank].clone().requires_grad_()
            column, row = (kind(64, 64, group, sequence_dim=1)
                           for kind in (perseus.nn.ColumnParallelLinear, perseus.nn.RowParallelLinear))
            y = row(column(part))
            y.float().square().sum().backward()
            first = perseus.nn.RowParallelLinear(64, 64, group)  # the same by the first dimension
            with torch.no_grad():
                first.weight.copy_(row.weight)
                again = first(perseus.all_gather_matmul(part.transpose(0, 1).reshape(-1, 64), column.weight.t(),
                                                        group).view(8, 3, 32)).transpose(0, 1)
            return torch.equal(y, again), y.shape, part.grad.shape
        self.assertEqual(run(2, body), [(True, (3, 4, 64), (3, 4, 64))] * 2)

    def test_a_sequence_that_the_ranks_do_not_divide_is_named_before_the_launch(self):
        def body(group):
            row = perseus.nn.RowParallelLinear(128, 64, group)
            launched = []
            group.launch = lambda *arguments: launched.append(arguments)
            for shape, sequence in (((3, 2, 64), 3), ((1, 4, 64), 1)):
                with self.assertRaisesRegex(ValueError, "the 2 ranks must divide its sequence, dimension 0, which has "
                                                        f"{sequence} positions"):
                    row(random(0, *shape))
            self.assertEqual(launched, [])
            del group.launch
        run(2, body)

    def test_a_seed_gives_one_model_for_any_number_of_ranks(self):
        def body(group):
            kinds = (perseus.nn.ColumnParallelLinear, perseus.nn.RowParallelLinear)
            layers = [kind(64, 96, group, bias=True) for kind in kinds]
            for layer in layers:  # ranks that are threads share torch's own generator
                layer.reset_parameters(torch.Generator().manual_seed(3))
            return [layer.weight.detach() for layer in layers]
        (column, row), = run(1, body)
        for world in (2, 4):
            got = run(world, body)
            self.assertTrue(torch.equal(torch.cat([g[0] for g in got]), column))
            self.assertTrue(torch.equal(torch.cat([g[1] for g in got], 1), row))
            self.assertFalse(torch.equal(got[0][0], got[1][0]))

    def test_marks_outlive_what_replaces_parameters(self):
        """Of a layer's bias, and of a norm that is the user's; or the sum is refused."""
        def body(group):
            def model():
                row, norm = (perseus.nn.RowParallelLinear(64, 32, group, bias=True),
                             torch.nn.LayerNorm(64, dtype=torch.bfloat16))
                norm.weight = perseus.nn.mark_replicated(torch.nn.Parameter(norm.weight.detach()))
                return torch.nn.Sequential(norm, row)

            def assigned():
                m = model()
                m.load_state_dict({key: t.clone() for key, t in m.state_dict().items()}, assign=True)
                return m
            plain = torch.nn.LayerNorm(64, dtype=torch.bfloat16)
            made = {"itself": model(), "a copy": copy.deepcopy(model()),
                    "a copy of a copy": copy.deepcopy(copy.deepcopy(model())), "assigned": assigned(),
                    "from meta": model().to("meta").to_empty(device="cpu"), "cast": model().half(),
                    "whole": torch.nn.Sequential(perseus.nn.mark_replicated(plain)),
                    "replicate()": perseus.nn.replicate(torch.nn.Sequential(torch.nn.LayerNorm(64)), group),
                    "of a layer": copy.deepcopy(model())[1]}
            for name, m in made.items():
                marked = [p for key, p in m.named_parameters() if key in ("0.weight", "1.bias", "bias")]
                for p in m.parameters():
                    p.grad = torch.full_like(p, group.rank + 1.0)
                perseus.nn.sum_replicated_gradients(m.parameters() if name == "of a layer" else m, group)
                self.assertEqual([p.grad.unique().tolist() for p in marked], [[3.0]] * len(marked), name)
                others = [p for p in m.parameters() if all(p is not q for q in marked)]
                if name not in ("whole", "replicate()"):
                    self.assertTrue(all(p.grad.unique().tolist() == [group.rank + 1.0] for p in others), name)
            for lost in (torch.nn.LayerNorm(8), copy.deepcopy(plain).parameters()):
                with self.assertRaisesRegex(perseus.PerseusError, "none of 2 parameters is marked as replicated"):
                    perseus.nn.sum_replicated_gradients(lost, group)
        run(2, body)

    def test_features_that_the_ranks_do_not_divide_are_refused(self):
        def body(group):
            with self.assertRaisesRegex(ValueError, "2 ranks must divide out_features 9"):
                perseus.nn.ColumnParallelLinear(8, 9, group)
        run(2, body)

    def test_the_llama_block_gives_what_the_unfused_one_gives(self):
        def body(group):
            results = []
            for layers in (perseus.nn, Unfused):
                block = LlamaBlock(SMALL, layers, group)
                initialize(block)
                x = random(group.rank, 32, 2, 64).requires_grad_()
                y = block(x)
                y.float().square().mean().backward()
                results.append([y.detach(), x.grad, *(p.grad for p in block.parameters())])
            return [apart(a, b) for a, b in zip(*results)]
        for worst in run(2, body):
            self.assertLess(max(worst), 0.15)


class Training(unittest.TestCase):
    def test_training_has_the_losses_of_the_unfused_run(self):
        steps = 40  # train.py runs 200 on GPUs

        def body(group):
            return [train(group, layers, SMALL, steps, blocks=1, sequence=32, vocabulary=32, rate=3e-3)
                    for layers in (perseus.nn, Unfused)]
        for fused, unfused in run(2, body):
            self.assertLess(furthest(fused, unfused), 0.1)
            self.assertLess(fused[-1], fused[0] - 0.5)
            print(f"losses: first {fused[0]:.3f}, last {fused[-1]:.3f}, unfused {unfused[-1]:.3f}, furthest apart "
                  f"{furthest(fused, unfused):.4f}", file=sys.stderr)


if __name__ == "__main__":
    ranks.main()
