# SPDX-License-Identifier: Apache-2.0
"""MoE in float8_e4m3fn on emulated GPUs, compared with torch's products of the quantised operands."""
import unittest

import torch
import torch.nn.functional as F
from ranks import random, run

import perseus

E4M3 = torch.float8_e4m3fn
EXPERTS, TOP_K, HIDDEN, INNER = 4, 2, 256, 128
COUNTS = (9, 6)


def quantised(x, rows):
    return perseus.quantise_reference(x, (rows, 128))


def whole(numbers, scale, rows):
    return numbers.double() * scale.double().repeat_interleave(rows, -2).repeat_interleave(128, -1)


def inputs(rank):
    generator = torch.Generator().manual_seed(70 + rank)
    weights, chosen = torch.rand(COUNTS[rank], EXPERTS, generator=generator).topk(TOP_K)
    chosen[::4, 1] = -1
    return random(rank, COUNTS[rank], HIDDEN, seed=33), chosen, weights.contiguous()


def matrices():
    """Of all experts: [gate | up] and down, each with its scales."""
    return (quantised(random(0, EXPERTS, 2 * INNER, HIDDEN, seed=31).mul_(0.3), 128),
            quantised(random(0, EXPERTS, HIDDEN, INNER, seed=32).mul_(0.3), 128))


def reference(rank, residual):
    (x, chosen, weights), ((w13, s13), (w2, s2)) = inputs(rank), matrices()
    x, w13, w2 = whole(*quantised(x, 1), 1), whole(w13, s13, 128), whole(w2, s2, 128)
    out = residual.double()
    for token in range(x.shape[0]):
        for slot in range(TOP_K):
            expert = int(chosen[token, slot])
            if expert < 0:
                continue
            gate, up = (w13[expert] @ x[token]).chunk(2)
            h = whole(*quantised((F.silu(gate) * up)[None].float(), 1), 1)[0]
            out[token] += float(weights[token, slot]) * (w2[expert] @ h)
    return out


def plan_of(group, **more):
    return perseus.moe_plan(max_tokens=16, hidden=HIDDEN, experts=EXPERTS, top_k=TOP_K, inner=INNER, dtype=E4M3,
                            group=group, **more)


def here(group, t):
    local = EXPERTS // group.world
    return t[group.rank * local:(group.rank + 1) * local]


class MoeScaled(unittest.TestCase):
    def test_the_layer_is_that_of_the_quantised_operands(self):
        def body(group):
            plan, (x, chosen, weights), bad = plan_of(group), inputs(group.rank), 0
            (w13, s13), (w2, s2) = matrices()
            arguments = [here(group, t) for t in (w13, w2, s13, s2)]
            residual = random(group.rank, *x.shape, seed=34)
            numbers, scales = quantised(x, 1)
            want = reference(group.rank, residual)
            for tokens, given in ((x, None), (numbers, scales)):
                y, status = perseus.moe_scaled_layer(tokens, chosen, weights, *arguments, plan, residual=residual,
                                                     token_scales=given)
                error = (y.double() - want).square().mean().sqrt() / (want - residual).square().mean().sqrt()
                bad += int(not error < 0.02) + int(status[1]) + int(y.dtype is not torch.bfloat16)
            return bad
        self.assertEqual(run(2, body), [0, 0])

    def test_rows_and_scales_come_and_go(self):
        """Dispatched rows have the numbers of their tokens; what comes back is the sum of them, weighted."""
        def body(group):
            plan, (x, chosen, weights) = plan_of(group), inputs(group.rank)
            every = [quantised(inputs(r)[0], 1) for r in range(2)]
            d = perseus.moe_scaled_dispatch(x, chosen, weights, plan)
            bad = int(d.rows.shape != (plan.capacity, HIDDEN)) + int(d.scales.shape != (plan.capacity, HIDDEN // 128))
            for first, rows in d.expert_rows.tolist():
                for row in range(first, first + rows):
                    rank, token = d.origins[row, :2].tolist()
                    numbers, scales = every[rank]
                    bad += int((d.rows[row].view(torch.uint8) != numbers[token].view(torch.uint8)).sum())
                    bad += int((d.scales[row] != scales[token]).sum())
            rows = (d.rows.float() * d.scales.repeat_interleave(128, 1)).bfloat16()
            y = perseus.moe_combine(rows, d)
            want = (weights * (chosen >= 0)).sum(1, keepdim=True) * whole(*every[group.rank], 1)
            return bad + int(((y.double() - want).abs() > want.abs() * 2**-6 + 1e-6).sum())
        self.assertEqual(run(2, body), [0, 0])

    def test_fake_results_have_the_shapes_of_real_ones(self):
        def body(group):
            plan, (x, chosen, weights) = plan_of(group), inputs(group.rank)
            (w13, s13), (w2, s2) = matrices()
            arguments = [here(group, t) for t in (w13, w2, s13, s2)]
            d, layer = (perseus.moe_scaled_dispatch(x, chosen, weights, plan),
                        perseus.moe_scaled_layer(x, chosen, weights, *arguments, plan))
            f = [t.to("meta") for t in (x, chosen, weights, *arguments)]
            fake = (perseus.moe_scaled_dispatch(*f[:3], plan), perseus.moe_scaled_layer(*f, plan))
            pairs = [(d.rows, fake[0].rows), (d.scales, fake[0].scales), (d.maps, fake[0].maps),
                     (d.origins, fake[0].origins), *zip(layer, fake[1])]
            return sum(int((a.shape, a.dtype, a.stride()) != (b.shape, b.dtype, b.stride())) for a, b in pairs)
        self.assertEqual(run(2, body), [0, 0])

    def test_what_cannot_be_is_refused_by_name(self):
        def body(group):
            scaled, plain = plan_of(group), perseus.moe_plan(max_tokens=16, hidden=HIDDEN, experts=EXPERTS,
                                                             top_k=TOP_K, inner=INNER, group=group)
            x, chosen, weights = inputs(0)
            (w13, s13), (w2, s2) = matrices()
            call, dispatch = perseus.moe_scaled_layer, perseus.moe_scaled_dispatch
            for kind, text, refused in (
                    (TypeError, "the plan's dtype is not torch.float8_e4m3fn",
                     lambda: dispatch(x, chosen, weights, plain)),
                    (TypeError, "the plan's dtype is not torch.bfloat16",
                     lambda: perseus.moe_dispatch(x, chosen, weights, scaled)),
                    (TypeError, "the plan's dtype is not torch.bfloat16",
                     lambda: torch.ops.perseus.moe_layer_backward(x, x[None], x[None], x, x, x, [x], (True,) * 5,
                                                                  list(scaled.sizes), scaled.group_name)),
                    (TypeError, "gate_up is torch.bfloat16",
                     lambda: call(x, chosen, weights, w13.bfloat16(), w2, s13, s2, scaled)),
                    (ValueError, "gate_up_scales has shape (4, 2, 1)",
                     lambda: call(x, chosen, weights, w13, w2, s13[..., :1], s2, scaled)),
                    (TypeError, "down_scales is torch.float64",
                     lambda: call(x, chosen, weights, w13, w2, s13, s2.double(), scaled)),
                    (ValueError, "tokens are torch.float8_e4m3fn without token_scales",
                     lambda: dispatch(x.to(E4M3), chosen, weights, scaled)),
                    (TypeError, "tokens is torch.bfloat16; it must be torch.float8_e4m3fn",
                     lambda: dispatch(x, chosen, weights, scaled, token_scales=s2)),
                    (ValueError, "token_scales has shape",
                     lambda: dispatch(x.to(E4M3), chosen, weights, scaled, token_scales=s2[0])),
                    (TypeError, "dtype is torch.float16", lambda: perseus.moe_plan(
                        max_tokens=16, hidden=HIDDEN, experts=EXPERTS, top_k=TOP_K, dtype=torch.float16, group=group))):
                with self.assertRaises(kind) as e:
                    refused()
                self.assertIn(text, str(e.exception))
            with self.assertRaises(NotImplementedError) as e:
                call(x.requires_grad_(), chosen, weights, w13, w2, s13, s2, scaled)[0].sum().backward()
            self.assertIn("moe_scaled_layer has no backward", str(e.exception))
        run(1, body)


if __name__ == "__main__":
    unittest.main()
