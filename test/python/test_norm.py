# SPDX-License-Identifier: Apache-2.0
"""Sums over the ranks with residual and RMS norm on emulated GPUs, compared with fp64. test/hopper/test_norm.c has more
shapes and a sharper bound."""
import unittest

import ranks
import torch
from ranks import random, run

import perseus
from perseus import norm

N, K, EPS = 264, 40, 1e-3


def inputs(rank, rows, n=N, dtype=torch.bfloat16):
    """x of this rank; residual, weight and bias of all."""
    return (random(rank, rows, n, dtype=dtype), random(0, rows, n, seed=5, dtype=dtype),
            random(0, n, seed=6, dtype=dtype), random(0, n, seed=7, dtype=dtype))


def reference(parts, residual, weight, bias=None):
    """The sum and the normed rows, in fp64."""
    total = sum(parts).double() + (0 if residual is None else residual.double())
    total = total + (0 if bias is None else bias.double())
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS)
    return total, normed * (1 if weight is None else weight.double())


def wrong(result, want, roundings=1, more=0):
    """Elements that differ by more than roundings to the dtype of the result."""
    bound = want.abs() * torch.finfo(result.dtype).eps / 2 * roundings * 1.01 + 2**-16 + more
    return int((~((result.double() - want).abs() <= bound)).sum())


class Norm(unittest.TestCase):
    def test_the_kinds_of_scales_are_those_of_the_header(self):
        constants = perseus.library().constants
        self.assertEqual({name: constants[f"PRS_SCALING_{name.upper()}"] for name in norm.SCALES}, norm.SCALES)

    def test_all_reduce_adds_up(self):
        def body(group):
            found = []
            for rows in (1, 16, 130):
                parts = [inputs(r, rows)[0] for r in range(2)]
                found.append(wrong(perseus.all_reduce(parts[group.rank], group), sum(p.double() for p in parts)))
            return found
        self.assertEqual(run(2, body), [[0, 0, 0]] * 2)

    def test_all_reduce_rms_norm_adds_and_normalises(self):
        def body(group):
            found = []
            for rows, dtype in ((1, torch.bfloat16), (5, torch.float16), (16, torch.bfloat16), (130, torch.bfloat16)):
                parts = [inputs(r, rows, dtype=dtype)[0].double() for r in range(2)]
                x, residual, weight, bias = inputs(group.rank, rows, dtype=dtype)
                for r, w, b in ((residual, weight, bias), (None, None, None)):
                    normed, stream = perseus.all_reduce_rms_norm(x, r, w, EPS, group, bias=b)
                    total, want = reference(parts, r, w, b)
                    found += [wrong(stream, total), wrong(normed, want)]
            return found
        self.assertEqual(run(2, body), [[0] * 16] * 2)

    def test_matmul_all_reduce_rms_norm_multiplies_first(self):
        def body(group):
            parts = [(random(r, 5, K).double() @ random(r, N, K, seed=1).double().t()) for r in range(2)]
            _, residual, weight, bias = inputs(group.rank, 5)
            normed, stream = perseus.matmul_all_reduce_rms_norm(
                random(group.rank, 5, K), random(group.rank, N, K, seed=1).t(), residual, weight, EPS, group, bias=bias)
            total, want = reference(parts, residual, weight, bias)
            off = sum(p.abs() for p in parts).amax() * 2**-8  # each part is rounded to travel
            return wrong(stream, total, more=off), wrong(normed, want, more=off)
        self.assertEqual(run(2, body), [(0, 0)] * 2)

    def test_reduce_scatter_rms_norm_has_the_rows_of_a_rank(self):
        def body(group):
            mine = slice(group.rank * 3, group.rank * 3 + 3)
            parts = [inputs(r, 6)[0].double() for r in range(2)]
            x, residual, weight, _ = inputs(group.rank, 6)
            normed, stream = perseus.reduce_scatter_rms_norm(x, residual[mine], weight, EPS, group)
            total, want = reference(parts, residual, weight)
            found = [wrong(normed, want[mine]), wrong(stream, total[mine]),
                     wrong(perseus.reduce_scatter(x, group), sum(parts)[mine])]
            products = [random(r, 6, K).double() @ random(r, N, K, seed=1).double().t() for r in range(2)]
            off = sum(p.abs() for p in products).amax() * 2**-8
            normed, _ = perseus.matmul_reduce_scatter_rms_norm(
                random(group.rank, 6, K), random(group.rank, N, K, seed=1).t(), residual[mine], weight, EPS, group)
            with self.assertRaises(ValueError) as caught:
                perseus.reduce_scatter(x[:5], group)
            self.assertIn("5 rows; the 2 ranks", str(caught.exception))
            return [*found, wrong(normed, reference(products, residual, weight)[1][mine], more=off)]
        self.assertEqual(run(2, body), [[0] * 4] * 2)

    def test_what_is_quantised_has_its_scales(self):
        n, fixed = 384, 0.02

        def body(group):
            parts = [inputs(r, 3, n)[0].double() for r in range(2)]
            x, residual, weight, _ = inputs(group.rank, 3, n)
            _, want = reference(parts, residual, weight)
            found = []
            for scales in norm.SCALES:
                given = torch.tensor([fixed]) if scales == "tensor" else None
                quantised, scale, stream = perseus.all_reduce_rms_norm_quant(x, residual, weight, EPS, group,
                                                                             scales=scales, scale=given)
                wide = scale.repeat_interleave(128, 1) if scales == "blocks" else scale
                have = quantised.double() * wide
                bound = want.abs() * 2**-4 * 1.01 + wide * 2**-10 + 2**-16
                found += [int(((have - want).abs() > bound).sum()),
                          wrong(stream, reference(parts, residual, weight)[0])]
            return found
        self.assertEqual(run(2, body), [[0] * 6] * 2)

    def test_a_fp8_product_takes_what_was_quantised(self):
        n = 256

        def body(group):
            x, residual, weight, _ = inputs(group.rank, 4, n)
            b = random(group.rank, 136, n, seed=8).to(torch.float8_e4m3fn).t()
            quantised, scale, _ = perseus.all_reduce_rms_norm_quant(x, residual, weight, EPS, group, scales="blocks")
            y = perseus.scaled_matmul_all_reduce(quantised, b, scale, torch.ones(2, 2).t().contiguous().t(), group)
            whole = quantised.double() * scale.double().repeat_interleave(128, 1)
            want = sum(whole @ random(r, 136, n, seed=8).to(torch.float8_e4m3fn).t().double() for r in range(2))
            return bool(((y.double() - want).abs() <= want.abs() * 2**-6 + 0.5).all())
        self.assertEqual(run(2, body), [True, True])

    def test_no_rows_are_no_launch(self):
        def body(group):
            x, residual, weight, _ = inputs(0, 0)
            return [tuple(t.shape) for t in perseus.all_reduce_rms_norm(x, residual, weight, EPS, group)]
        self.assertEqual(run(1, body), [[(0, N), (0, N)]])

    def test_what_does_not_fit_is_refused_by_name(self):
        def body(group):
            x, residual, weight, bias = inputs(0, 4)
            for kind, text, call in (
                    (TypeError, "residual is torch.float32", lambda: (x, residual.float(), weight)),
                    (ValueError, "residual has shape (3, 264)", lambda: (x, residual[:3], weight)),
                    (ValueError, "weight has shape (256,)", lambda: (x, residual, weight[:256])),
                    (ValueError, "260 columns", lambda: (x[:, :260].contiguous(), None, None)),
                    (TypeError, "x is torch.float32", lambda: (x.float(), None, None))):
                with self.assertRaises(kind) as caught:
                    perseus.all_reduce_rms_norm(*call(), EPS, group)
                self.assertIn(text, str(caught.exception))
            for text, more in (("scales is 'columns'", {"scales": "columns"}),
                               ("128 must divide them", {"scales": "blocks"}),
                               ("only that of a tensor is given", {"scales": "tensor"}),
                               ("one torch.float32", {"scales": "tensor", "scale": torch.ones(2)})):
                with self.assertRaises(ValueError) as caught:
                    perseus.all_reduce_rms_norm_quant(x, residual, weight, EPS, group, **more)
                self.assertIn(text, str(caught.exception))
            with self.assertRaises(perseus.PerseusError) as caught:
                perseus.all_reduce_rms_norm(x, residual, weight, float("nan"), group)
            self.assertIn("norm_eps nan", str(caught.exception))
            with self.assertRaises(NotImplementedError):
                perseus.all_reduce_rms_norm(x.requires_grad_(), residual, weight, EPS, group)[0].sum().backward()
        run(1, body)

    def test_a_frozen_group_serves_by_what_is_open(self):
        def body(group):
            group.prepare((m for m in (1, 5, 100)), ("all_reduce_rms_norm", N, 0), ("matmul_all_reduce", N, K))
            group.freeze()
            held, used = group.memory()
            self.assertTrue(0 < used <= held)
            opened, found = len(group._plans), []
            for rows in (1, 40, 128):  # 40: no plan of its own
                parts = [inputs(r, rows)[0].double() for r in range(2)]
                x, residual, weight, _ = inputs(group.rank, rows)
                normed, _ = perseus.all_reduce_rms_norm(x, residual, weight, EPS, group)
                found.append(wrong(normed, reference(parts, residual, weight)[1]))
            for call, what in ((lambda: perseus.all_reduce(inputs(0, 129)[0], group), "all_reduce"),
                               (lambda: perseus.all_reduce_rms_norm(inputs(0, 129)[0], None, None, EPS, group),
                                "all_reduce_rms_norm with at most 256 rows")):
                with self.assertRaises(perseus.PerseusError) as caught:
                    call()
                self.assertIn(what, str(caught.exception))
                self.assertIn("is frozen", str(caught.exception))
            return found, len(group._plans) - opened
        self.assertEqual(run(2, body), [([0, 0, 0], 0)] * 2)

    def test_prepare_refuses_what_it_does_not_know(self):
        def body(group):
            for product in (("matmul", N, K), ("all_reduce", N, K), ("matmul_all_reduce", N, 0)):
                with self.assertRaises(ValueError) as caught:
                    group.prepare([1], product)
                self.assertIn(repr(product[0]), str(caught.exception))
        run(1, body)

    def test_torch_compiles_it(self):
        def body(group):
            x, residual, weight, _ = inputs(0, 5)

            def layer(x, residual):
                normed, stream = perseus.all_reduce_rms_norm(x, residual, weight, EPS, group.name)
                return normed * 2, stream
            compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
            return all(torch.equal(a, b) for a, b in zip(compiled(x, residual), layer(x, residual)))
        self.assertEqual(run(1, body), [True])


if __name__ == "__main__":
    ranks.main()
