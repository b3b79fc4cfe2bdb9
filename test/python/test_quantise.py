# SPDX-License-Identifier: Apache-2.0
"""Quantisers on an emulated GPU, compared bit by bit with torch's own ops."""
import unittest

import torch
from ranks import random, run

import perseus
from perseus import quantisers as module

E4M3 = torch.float8_e4m3fn
BLOCKS = ((1, 128), (128, 128), (1, -1), (-1, -1))


def bits(t):
    """All that are no numbers are alike."""
    return torch.where(t.float().isnan(), 0x7f, t.view(torch.uint8).int())


def matrix(dtype, *shape, odd=False):
    x = random(0, *shape, dtype=torch.float32).mul_(torch.logspace(-6, 2, shape[-1], base=2)).to(dtype)
    x[..., 1, :128] = 0
    if odd:
        x[..., 2, 3], x[..., 0, 5] = float("nan"), float("-inf")
    return x


class Quantise(unittest.TestCase):
    def test_numbers_and_scales_are_torchs_bit_by_bit(self):
        for block in BLOCKS:
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                for shape, odd in (((130, 256), False), ((3, 128, 128), True), ((0, 128), False)):
                    with self.subTest(block=block, dtype=dtype, shape=shape):
                        x = matrix(dtype, *shape, odd=odd) if shape[0] else torch.empty(shape, dtype=dtype)
                        if not shape[0] and block[0] == -1:
                            continue
                        numbers, scales = perseus.quantise(x, block)
                        want, want_scales = perseus.quantise_reference(x, block)
                        self.assertEqual((numbers.shape, numbers.dtype, scales.shape),
                                         (x.shape, E4M3, want_scales.shape))
                        self.assertTrue(torch.equal(scales, want_scales))
                        self.assertTrue(torch.equal(bits(numbers), bits(want)))

    def test_a_given_scale_saturates_as_torch_does(self):
        x, scale = matrix(torch.bfloat16, 5, 256, odd=True), torch.tensor([2.0**-9])
        numbers, same = perseus.quantise(x, (-1, -1), scale=scale)
        want, _ = perseus.quantise_reference(x, (-1, -1), scale=scale)
        self.assertIs(same, scale)
        self.assertTrue(torch.equal(bits(numbers), bits(want)))
        self.assertEqual(float(numbers.float().nan_to_num(0).abs().max()), 448)

    def test_scales_are_those_that_products_take(self):
        def body(group):
            x, w = random(group.rank, 8, 256), random(9, 136, 256)
            a, scale_a = perseus.quantise(x, (1, 128), column_major=True)
            b, scale_b = perseus.quantise(w, (128, 128))
            c = perseus.all_gather_scaled_matmul(a, b.t(), scale_a, scale_b.t(), group)
            want = torch.cat([random(r, 8, 256) for r in range(2)]).float() @ w.float().t()
            return float((c.float() - want).square().mean().sqrt() / want.square().mean().sqrt())
        self.assertLess(max(run(2, body)), 0.05)

    def test_fakes_have_the_shapes_and_the_compiler_takes_the_ops(self):
        x = matrix(torch.bfloat16, 130, 256)

        def both(x, scale):
            return (*perseus.quantise(x, (1, 128), column_major=True), *perseus.quantise(x, (128, 128)),
                    perseus.quantise(x, (-1, -1), scale=scale)[0])
        real, fake = both(x, torch.ones(1)), both(x.to("meta"), torch.ones(1, device="meta"))
        self.assertEqual([(t.shape, t.dtype, t.stride()) for t in real], [(t.shape, t.dtype, t.stride()) for t in fake])
        compiled = torch.compile(both, fullgraph=True, backend="aot_eager")(x, torch.ones(1))
        self.assertTrue(all(torch.equal(a.float(), b.float()) for a, b in zip(compiled, real)))

    def test_what_cannot_be_is_refused_by_name(self):
        constants = perseus.library().constants
        self.assertEqual([constants[f"PRS_QUANTISE_{name}"] for name in ("TENSOR", "ROWS", "BLOCKS", "SQUARES")],
                         [module._GROUPS[block] for block in ((-1, -1), (1, -1), (1, 128), (128, 128))])
        x = matrix(torch.bfloat16, 4, 256)
        for call, error, why in (
                (lambda: perseus.quantise(x, (1, 64)), ValueError, r"block is \(1, 64\)"),
                (lambda: perseus.quantise(x.double()), TypeError, "x is torch.float64"),
                (lambda: perseus.quantise(x[0]), ValueError, "2 dimensions or more"),
                (lambda: perseus.quantise(x[:, :192].contiguous()), ValueError, "x has 192 columns"),
                (lambda: perseus.quantise(x[:, :24].contiguous(), (1, -1)), ValueError, "a multiple of 16"),
                (lambda: perseus.quantise(x[:, :128]), ValueError, "must be contiguous"),
                (lambda: perseus.quantise(x[None], (128, 128)), ValueError, "the rows of each matrix"),
                (lambda: perseus.quantise(x, (1, -1), column_major=True), ValueError, "column_major scales"),
                (lambda: perseus.quantise(x, scale=torch.ones(1)), ValueError, "with a given scale"),
                (lambda: perseus.quantise(x, (-1, -1), scale=torch.ones(2)), ValueError, "must be one torch.float32"),
        ):
            with self.assertRaisesRegex(error, why):
                call()
        with self.assertRaisesRegex(NotImplementedError, "perseus.quantise has no backward"):
            perseus.quantise(x.requires_grad_())[1].sum().backward()


if __name__ == "__main__":
    unittest.main()
