# SPDX-License-Identifier: Apache-2.0
"""Products of float8_e4m3fn on emulated GPUs, compared with torch's of the quantised operands in fp64."""
import unittest

import ranks
import torch
from ranks import random, run

import perseus
from perseus import scaled

E4M3 = torch.float8_e4m3fn


def scales(rank, *shape, seed):
    return random(rank, *shape, seed=seed, dtype=torch.float32).mul_(0.75).add_(1)


class Operands:
    """Of one rank: a [rows, k], b = weight.t(), and their scales of one kind; whole: what they stand for."""

    def __init__(self, rank, kind, rows, n, k, of_a=None):
        self.a = random(rank, rows, k).to(E4M3)
        self.b = random(rank, n, k, seed=1).to(E4M3).t()
        if kind == scaled.TENSOR:
            self.scale_a = scales(rank if of_a is None else of_a, 1, seed=2)
            self.scale_b = scales(rank, 1, seed=3)
            a, b = self.scale_a, self.scale_b
        elif kind == scaled.ROWS:
            self.scale_a, self.scale_b = scales(rank, rows, 1, seed=2), scales(rank, 1, n, seed=3)
            a, b = self.scale_a, self.scale_b
        else:
            self.scale_a = scales(rank, k // 128, rows, seed=2).t()
            self.scale_b = scales(rank, -(-n // 128), k // 128, seed=3).t()
            a = self.scale_a.repeat_interleave(128, 1)
            b = self.scale_b.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :n]
        self.whole_a, self.whole_b = self.a.double() * a.double(), self.b.double() * b.double()

    def __iter__(self):
        return iter((self.a, self.b, self.scale_a, self.scale_b))


def wrong(result, partials, k):
    """How many elements differ from the sum of the partial products by more than roundings to bfloat16, and what the
    tensor cores may lose: in each of k / 32 steps 34 times the last of the 14 bits of what they hold, which is at most
    the sum of the terms' sizes. test_fp8.c has a sharper bound."""
    total, size = sum(p for p, _ in partials), sum(p.abs() for p, _ in partials)
    lost = sum(q for _, q in partials) * k / 32 * 34 * 2**-13
    bound = (total.abs() + size) * 2**-8 * 1.01 + lost
    return int((~((result.double() - total).abs() <= bound)).sum())


def product(a, b):
    return a @ b, a.abs() @ b.abs()


class Scaled(unittest.TestCase):
    N, K = 136, 256

    def each(self, body):
        for kind in (scaled.TENSOR, scaled.ROWS, scaled.BLOCKS):
            with self.subTest(kind=kind):
                self.assertEqual(run(2, lambda group: body(group, kind)), [0, 0])

    def test_the_kinds_of_scales_are_those_of_the_header(self):
        constants = perseus.library().constants
        self.assertEqual([constants[f"PRS_SCALING_{name}"] for name in ("TENSOR", "ROWS", "BLOCKS")],
                         [scaled.TENSOR, scaled.ROWS, scaled.BLOCKS])
        self.assertEqual(constants["PRS_DTYPE_E4M3"], scaled._E4M3)

    def test_all_gather_scaled_matmul_multiplies_the_rows_of_all_ranks(self):
        def body(group, kind):
            every = [Operands(r, kind, 36, self.N, self.K, of_a=0) for r in range(2)]
            c = perseus.all_gather_scaled_matmul(*every[group.rank], group)
            return wrong(c, [product(torch.cat([x.whole_a for x in every]), every[group.rank].whole_b)], self.K)
        self.each(body)

    def test_sums_over_ranks_have_the_scales_of_each(self):
        def body(group, kind):
            every = [Operands(r, kind, 72, self.N, self.K) for r in range(2)]
            bias = random(9, self.N)
            partials = [product(x.whole_a, x.whole_b) for x in every]
            partials[0] = (partials[0][0] + bias.double(), partials[0][1])
            whole = perseus.scaled_matmul_all_reduce(*every[group.rank], group, bias=bias)
            bias = bias if group.rank == 0 else bias.clone()
            part = perseus.scaled_matmul_reduce_scatter(*every[group.rank], group, bias=bias, use_fast_accum=True)
            mine = slice(36 * group.rank, 36 * group.rank + 36)
            return (wrong(whole, partials, self.K)
                    + wrong(part, [(p[mine], q[mine]) for p, q in partials], self.K))
        self.each(body)

    def test_results_can_be_fp32(self):
        """Then a gathered product has errors of fp32, not of bfloat16. Sums still travel as bfloat16."""
        def body(group, kind):
            every = [Operands(r, kind, 24, 128, 512, of_a=0) for r in range(2)]
            x, name = every[group.rank], group.name
            want = torch.cat([o.whole_a for o in every]) @ x.whole_b
            c = perseus.all_gather_scaled_matmul(*x, group, out_dtype=torch.float32)
            torchs = c if kind == scaled.BLOCKS else torch.ops.perseus.fused_all_gather_scaled_matmul(
                x.a, [x.b], x.scale_a, [x.scale_b], 0, name, [None], [None], [torch.float32], [False])[1][0]
            bad = sum(int(((t.double() - want).abs() > want.abs() * 2**-16 + 2**-12).sum()) for t in (c, torchs))
            partials = [product(o.whole_a, o.whole_b) for o in every]
            part = perseus.scaled_matmul_reduce_scatter(*x, group, out_dtype=torch.float32)
            mine = slice(12 * group.rank, 12 * group.rank + 12)
            bad += wrong(part, [(p[mine], q[mine]) for p, q in partials], 512)
            whole = perseus.scaled_matmul_all_reduce(*x, group, out_dtype=torch.float32)
            bad += wrong(whole, partials, 512)
            return bad + sum(t.dtype is not torch.float32 for t in (c, torchs, part, whole))
        self.each(body)

    def test_fused_all_gather_scaled_matmul_has_torchs_arguments(self):
        def body(group):
            bad, fused = 0, torch.ops.perseus.fused_all_gather_scaled_matmul
            every = [Operands(r, scaled.ROWS, 48, self.N, self.K) for r in range(2)]
            x = every[group.rank]
            others = [Operands(7, scaled.ROWS, 48, self.N, self.K), x]
            for dim in (0, 1):  # a is [2, 24, k] or, gathered along 1, the same rows
                for replicated in (False, True):
                    parts = [o.a.view(2, 24, -1) for o in every]
                    row_scales = [o.scale_a.view(2, 24, 1) for o in every]
                    scale = torch.cat(row_scales, dim) if replicated else row_scales[group.rank]
                    a, results = fused(parts[group.rank], [o.b for o in others], scale, [o.scale_b for o in others],
                                       dim, group.name, [None, None], [None, None], [torch.bfloat16] * 2, [False, True])
                    bad += int((a.float() != torch.cat(parts, dim).float()).sum())
                    whole = torch.cat([o.whole_a.view(2, 24, -1) for o in every], dim).flatten(0, 1)
                    bad += sum(wrong(c.flatten(0, 1), [product(whole, o.whole_b)], self.K)
                               for c, o in zip(results, others))
            return bad
        self.assertEqual(run(2, body), [0, 0])

    def test_fused_scaled_matmul_reduce_scatter_has_torchs_arguments(self):
        def body(group):
            bad, fused = 0, torch.ops.perseus.fused_scaled_matmul_reduce_scatter
            every = [Operands(r, scaled.ROWS, 48, self.N, self.K) for r in range(2)]
            x = every[group.rank]
            sums = [[t.view(4, 12, -1) for t in product(o.whole_a, o.whole_b)] for o in every]
            for dim in (0, 1):
                mine = [[t.chunk(2, dim)[group.rank] for t in pair] for pair in sums]
                for flat in (False, True):
                    a = (x.a, x.scale_a) if flat else (x.a.view(4, 12, -1), x.scale_a.view(4, 12, 1))
                    c = fused(a[0], x.b, a[1], x.scale_b, "sum", dim, 0 if flat else dim, group.name, [4, 12, self.N],
                              None, None, torch.bfloat16)
                    bad += wrong(c, mine, self.K)
                c = fused(x.a, x.b, x.scale_a, x.scale_b, "avg", dim, 0, group.name, [4, 12, self.N],
                          out_dtype=torch.bfloat16)
                bad += wrong(c * 2, mine, self.K)
            return bad
        self.assertEqual(run(2, body), [0, 0])

    def test_results_are_quantised_for_the_next_product(self):
        """As a gated MLP: the bound of a number is its rounding to e4m3, and that of the sums before it."""
        def body(group, kind):
            every = [Operands(r, kind, 36, 512, 256, of_a=0) for r in range(2)]
            x, bad = every[group.rank], 0
            for op, whole in ((perseus.all_gather_scaled_matmul_quantised, torch.cat([o.whole_a for o in every])),
                              (perseus.scaled_matmul_quantised, x.whole_a)):
                for gated in (False, True):
                    h, scale = op(*x, group, activation="silu", gated=gated)
                    want, size = product(whole, x.whole_b)
                    lost = size * 256 / 32 * 34 * 2**-13 * 1.2
                    if gated:
                        (gate, up), (of_gate, of_up) = want.chunk(2, 1), lost.chunk(2, 1)
                        gate = torch.nn.functional.silu(gate)
                        want, lost = gate * up, of_gate * (up.abs() + of_up) + gate.abs() * of_up
                    else:
                        want = torch.nn.functional.silu(want)
                    self.assertEqual((h.dtype, h.shape), (E4M3, want.shape))
                    self.assertEqual(scale.shape, (want.shape[0], want.shape[1] // 128))
                    wide = scale.double().repeat_interleave(128, 1)
                    off = (h.double() * wide - want).abs()
                    bound = lost + torch.maximum((want.abs() + lost) * 2**-4, wide * 2**-10)
                    bad += int((~(off <= bound)).sum())
                    largest = want.abs().unflatten(1, (-1, 128)).amax(2)
                    bad += int((~((scale * 448 - largest).abs() <= lost.unflatten(1, (-1, 128)).amax(2))).sum())
                    down = torch.ones(128, h.shape[1]).to(E4M3)  # what takes it next
                    y = perseus.scaled_matmul_reduce_scatter(h, down.t(), scale, torch.ones(scale.shape[1], 1), group)
                    bad += int(y.isnan().sum())
            return bad
        for kind in (scaled.ROWS, scaled.BLOCKS):
            with self.subTest(kind=kind):
                self.assertEqual(run(2, lambda group: body(group, kind)), [0, 0])

    def test_fake_results_have_the_shapes_of_real_ones(self):
        def body(group):
            x = Operands(group.rank, scaled.ROWS, 48, 256, self.K)
            bad = 0
            for name in ("all_gather_scaled_matmul", "all_gather_scaled_matmul_kept", "scaled_matmul_reduce_scatter",
                         "scaled_matmul_all_reduce", "all_gather_scaled_matmul_quantised", "scaled_matmul_quantised"):
                op = getattr(torch.ops.perseus, name)
                real = op(*x, group.name)
                fake = op(*(t.to("meta") for t in x), group.name)
                for have, want in zip(*((t,) if isinstance(t, torch.Tensor) else t for t in (fake, real))):
                    bad += have.shape != want.shape or have.dtype != want.dtype or have.stride() != want.stride()
            return bad
        self.assertEqual(run(2, body), [0, 0])

    def test_torchs_ops_are_compiled_without_a_graph_break(self):
        def body(group):
            x, name, bf16 = Operands(0, scaled.ROWS, 48, self.N, self.K), group.name, torch.bfloat16

            def both(a, b, scale_a, scale_b):
                gathered, (c,) = torch.ops.perseus.fused_all_gather_scaled_matmul(
                    a, [b], scale_a, [scale_b], 0, name, [None], [None], [bf16], [False])
                return gathered, c, torch.ops.perseus.fused_scaled_matmul_reduce_scatter(
                    a, b, scale_a, scale_b, "avg", 0, 0, name, [48, self.N], out_dtype=bf16)
            compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
            return sum(int((have.float() != want.float()).sum()) for have, want in zip(compiled(*x), both(*x)))
        self.assertEqual(run(1, body), [0])

    def test_what_cannot_be_is_refused_by_name(self):
        fused, scatter = (torch.ops.perseus.fused_all_gather_scaled_matmul,
                          torch.ops.perseus.fused_scaled_matmul_reduce_scatter)

        def body(group):
            x = Operands(0, scaled.ROWS, 48, self.N, self.K)
            blocks = Operands(0, scaled.BLOCKS, 48, self.N, self.K)
            wide = Operands(0, scaled.ROWS, 48, 384, self.K)
            one = torch.ones(1)

            def gather(a=x.a, b=x.b, scale_a=x.scale_a, scale_b=x.scale_b, **more):
                return perseus.all_gather_scaled_matmul(a, b, scale_a, scale_b, group, **more)

            def gathers(dtype=torch.bfloat16, result_scale=None, scale=x.scale_a):
                return fused(x.a, [x.b], scale, [x.scale_b], 0, group.name, [None], [result_scale], [dtype], [False])
            for call, error, why in (
                    (lambda: gather(a=x.a.bfloat16()), TypeError, "a is torch.bfloat16; it must be torch.float8_e4"),
                    (lambda: gather(b=x.b.contiguous()), ValueError, "b with shape .* must be weight.t"),
                    (lambda: gather(a=x.a.t().contiguous().t()), ValueError, "a with shape .* must be row-major"),
                    (lambda: gather(a=x.a[:, :128].contiguous()), ValueError, "a has 128 columns and b 256 rows"),
                    (lambda: gather(scale_a=x.scale_a.double()), TypeError, "scale_a is torch.float64"),
                    (lambda: gather(scale_b=one), ValueError, "scale_a has shape .48, 1. and scale_b .1,."),
                    (lambda: gather(scale_a=x.scale_a[:8]), ValueError, "scale_a has shape .8, 1."),
                    (lambda: gather(scale_a=blocks.scale_a.contiguous(), scale_b=blocks.scale_b), ValueError,
                     "scale_a with shape .* must be column-major"),
                    (lambda: gather(bias=torch.ones(self.N)), TypeError, "bias is torch.float32"),
                    (lambda: gathers(dtype=None), TypeError, "out_dtype is None; it must be torch.bfloat16"),
                    (lambda: gathers(dtype=torch.float16), TypeError, "it must be torch.bfloat16 or torch.float32"),
                    (lambda: gather(out_dtype=torch.float16), TypeError, "out_dtype is torch.float16; it must be"),
                    (lambda: gather(out_dtype=E4M3), TypeError, r"call all_gather_scaled_matmul_quantised\(\)"),
                    (lambda: perseus.scaled_matmul_quantised(*x, group), ValueError,
                     "b has 136 columns; the result has a scale for each 128"),
                    (lambda: perseus.scaled_matmul_quantised(*wide, group, gated=True), ValueError,
                     "b has 384 columns of gate and up; .* a multiple of 256"),
                    (lambda: perseus.all_gather_scaled_matmul_quantised(*wide, group, activation="tanh"), ValueError,
                     "activation 'tanh' is none of none, relu"),
                    (lambda: gathers(result_scale=one), ValueError, "result_scale is set"),
                    (lambda: gathers(scale=x.scale_a[:8]), ValueError, "A_scale has shape .8, 1."),
                    (lambda: scatter(x.a, x.b, x.scale_a, x.scale_b, "max", 0, 0, group.name, None), ValueError,
                     "'max'"),
                    (lambda: scatter(x.a, x.b, x.scale_a, x.scale_b, "sum", 0, 0, group.name, [7, self.N]), ValueError,
                     "do not fit A"),
            ):
                with self.assertRaisesRegex(error, why):
                    call()
            y = Operands(0, scaled.BLOCKS, 6, self.N, self.K)
            with self.assertRaisesRegex(ValueError, "a has 6 rows; with scales of blocks"):
                perseus.all_gather_scaled_matmul(*y, group)
            x.scale_a.requires_grad_()
            with self.assertRaisesRegex(NotImplementedError, "has no backward"):
                gather().sum().backward()
            return 0
        self.assertEqual(run(1, body), [0])


if __name__ == "__main__":
    ranks.main()
