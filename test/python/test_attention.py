# SPDX-License-Identifier: Apache-2.0
"""Ring attention and its gradients on emulated GPUs, compared with torch's own products in double precision."""
import unittest

import ranks
import torch
from ranks import random, run

import perseus


def positions(rank, world, seq, causal):
    """Of the sequence, that this rank has."""
    if not causal or world == 1:
        return torch.arange(seq).chunk(world)[rank]
    chunks = torch.arange(seq).chunk(2 * world)
    return torch.cat([chunks[rank], chunks[2 * world - 1 - rank]])


def attention(q, k, v, causal):
    """Heads first. Returns out, lse."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[3]**-0.5
    if causal:
        scores = scores.masked_fill(torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


class Results(unittest.TestCase):
    def check(self, world, causal, heads_first, dim, values):
        seq = 128 * world
        sizes = (4, dim), (2, dim), (2, values)
        whole = [random(0, 2, heads, seq, columns, seed=1 + i) for i, (heads, columns) in enumerate(sizes)]
        want, want_lse = attention(*(t.double() for t in whole), causal)

        def body(group):
            mine = positions(group.rank, world, seq, causal)
            q, k, v = (t[:, :, mine] if heads_first else t[:, :, mine].transpose(1, 2) for t in whole)
            out, lse = perseus.ring_attention(q.contiguous(), k.contiguous(), v.contiguous(), group, causal=causal,
                                              heads_first=heads_first)
            out = out if heads_first else out.transpose(1, 2)
            return (float((out.double() - want[:, :, mine]).abs().max()),
                    float((lse.double() - want_lse[:, :, mine]).abs().max()))
        for out, lse in run(world, body):
            self.assertLess(out, 0.02)
            self.assertLess(lse, 0.01)

    def test_they_are_attention_over_the_whole_sequence(self):
        for row in ((1, True, True, 64, 64), (2, False, True, 64, 64), (2, True, False, 192, 128),
                    (4, True, True, 64, 64)):
            with self.subTest(row=row):
                self.check(*row)


def assert_close(test, tensors, whose):
    """tensors: what is wanted and what came, of out and of the gradients."""
    for name, (want, got) in zip(("out", "dq", "dk", "dv"), tensors):
        test.assertEqual(got.shape, want.shape)
        test.assertLessEqual(float((got.double() - want).abs().max()), 0.06 * float(want.square().mean().sqrt()),
                             f"{name} {whose}")


class Lengths(unittest.TestCase):
    """Many lengths open few plans: the first has the length of its call, further ones powers of two."""

    def check(self, world, causal, heads_first, lengths):
        whole = {rows: [random(0, 1, heads, rows * world, 64, seed=rows + heads) for heads in (4, 2, 2, 4)]
                 for rows in lengths}
        wide = {}
        for rows, (q, k, v, of_out) in whole.items():
            leaves = [t.double().requires_grad_() for t in (q, k, v)]
            out = attention(*leaves, causal)[0]
            (out * of_out).sum().backward()
            wide[rows] = [out.detach(), *(t.grad for t in leaves)]

        def body(group):
            found = []
            for rows in lengths:
                mine = positions(group.rank, world, rows * world, causal)

                def part(t):
                    return (t[:, :, mine] if heads_first else t[:, :, mine].transpose(1, 2)).contiguous()
                *leaves, of_out = (part(t) for t in whole[rows])
                leaves = [t.requires_grad_() for t in leaves]
                out = perseus.ring_attention(*leaves, group, causal=causal, heads_first=heads_first)[0]
                out.backward(of_out)
                found.append([(part(w), t) for w, t in zip(wide[rows], (out.detach(), *(t.grad for t in leaves)))])
            return len(group._plans), found
        for rank, (plans, found) in enumerate(run(world, body)):
            self.assertLessEqual(plans, 4, "two of each pass")
            for rows, tensors in zip(lengths, found):
                assert_close(self, tensors, f"of rank {rank}, {rows} rows")

    def test_many_lengths_share_few_plans(self):
        for row in ((1, True, True, (60, 128, 33, 96, 7, 110)), (2, True, False, (64, 128, 32, 96, 100, 8, 110, 64)),
                    (2, False, True, (64, 3, 90, 33))):
            with self.subTest(row=row):
                self.check(*row)

    def test_a_frozen_group_serves_shorter_lengths_only(self):
        def body(group):
            q = random(group.rank, 1, 64, 2, 64, seed=1)
            perseus.ring_attention(q, q, q, group)
            group.freeze()
            shorter = q[:, :40].contiguous()
            self.assertTrue(perseus.ring_attention(shorter, shorter, shorter, group)[0].isfinite().all())
            longer = torch.cat((q, q), 1)
            with self.assertRaisesRegex(perseus.PerseusError, "ring_attention.*frozen"):
                perseus.ring_attention(longer, longer, longer, group)
        run(2, body)


class Batches(unittest.TestCase):
    """A plan serves smaller batches. A larger one opens a plan for a power of two."""

    def check(self, causal, heads_first, batches, plans):
        world, rows = 2, 64
        whole = [random(0, max(batches), heads, rows * world, 64, seed=heads + i)
                 for i, heads in enumerate((4, 2, 2, 4))]
        leaves = [t.double().requires_grad_() for t in whole[:3]]
        out = attention(*leaves, causal)[0]
        (out * whole[3]).sum().backward()
        wide = [out.detach(), *(t.grad for t in leaves)]

        def body(group):
            mine, found = positions(group.rank, world, rows * world, causal), []
            for batch in batches:
                def part(t):
                    t = t[:batch, :, mine]
                    return (t if heads_first else t.transpose(1, 2)).contiguous()
                *inputs, of_out = (part(t) for t in whole)
                inputs = [t.requires_grad_() for t in inputs]
                out = perseus.ring_attention(*inputs, group, causal=causal, heads_first=heads_first)[0]
                out.backward(of_out)
                pairs = zip((part(w) for w in wide), (out.detach(), *(t.grad for t in inputs)))
                found.append((len(group._plans), list(pairs)))
            return found
        for rank, found in enumerate(run(world, body)):
            self.assertEqual([count for count, _ in found], plans)
            for batch, (_, tensors) in zip(batches, found):
                assert_close(self, tensors, f"of rank {rank}, batch {batch}")

    def test_a_plan_serves_smaller_batches(self):
        self.check(True, False, (3, 1, 2, 3, 1), [2, 2, 2, 2, 2])  # a plan of each pass
        self.check(False, True, (1, 3, 4, 2, 1), [2, 4, 4, 4, 4])

    def test_a_frozen_group_serves_smaller_batches_only(self):
        def body(group):
            q = random(group.rank, 2, 64, 2, 64, seed=1)
            perseus.ring_attention(q, q, q, group)
            group.freeze()
            one, three = q[:1].contiguous(), torch.cat((q, q[:1]))
            self.assertTrue(perseus.ring_attention(one, one, one, group)[0].isfinite().all())
            with self.assertRaisesRegex(perseus.PerseusError, "ring_attention.*frozen"):
                perseus.ring_attention(three, three, three, group)
            none = q[:0].contiguous()
            with self.assertRaisesRegex(ValueError, "batch of 0 sequences of 128 positions is empty"):
                perseus.ring_attention(none, none, none, group)
        run(2, body)


class Scales(unittest.TestCase):
    def test_all_scales_share_the_plans_of_both_passes(self):
        whole = [random(0, 1, heads, 72, 64, seed=1 + i) for i, heads in enumerate((2, 1, 1, 2))]
        wide = {}
        for scale in (0, 0.3, 0.07):
            leaves = [t.double().requires_grad_() for t in whole[:3]]
            out = attention(leaves[0] * (scale * 8 or 1), *leaves[1:], True)[0]  # 8: sqrt(64)
            out.backward(whole[3].double())
            wide[scale] = [out.detach(), *(t.grad for t in leaves)]

        def body(group):
            mine, found = positions(group.rank, 2, 72, True), []
            for scale in (0, 0.3, 0.07, 0):
                *leaves, of_out = (t[:, :, mine].contiguous() for t in whole)
                leaves = [t.requires_grad_() for t in leaves]
                out = perseus.ring_attention(*leaves, group, causal=True, scale=scale, heads_first=True)[0]
                out.backward(of_out)
                found.append((scale, [out.detach(), *(t.grad for t in leaves)]))
            return len(group._plans), found
        for rank, (plans, found) in enumerate(run(2, body)):
            self.assertEqual(plans, 2)
            for scale, tensors in found:
                mine = positions(rank, 2, 72, True)
                assert_close(self, zip((w[:, :, mine] for w in wide[scale]), tensors), f"of rank {rank}, scale {scale}")
            for first, last in zip(found[0][1], found[-1][1]):
                self.assertTrue(torch.equal(first, last), "of no scale, before and after others")

    def test_a_negative_scale_is_refused_and_nothing_is_launched(self):
        def body(group):
            q = random(0, 1, 64, 1, 64, seed=1)
            with self.assertRaisesRegex(perseus.PerseusError, "scale -0.125 of a launch.*negate the queries"):
                perseus.ring_attention(q, q, q, group, scale=-0.125)
            return bool(perseus.ring_attention(q, q, q, group)[0].isfinite().all())
        self.assertEqual(run(1, body), [True])


class Gradients(unittest.TestCase):
    """The loss of all ranks: the sum of out and of lse, each times random values that are rounded to bf16."""

    def check(self, world, causal, heads_first, dim, of):
        seq = 72 * world
        whole = [random(0, 2, heads, seq, dim, seed=seed) for heads, seed in ((4, 1), (2, 2), (2, 3))]
        of_out, of_lse = random(0, 2, 4, seq, dim, seed=4), random(0, 2, 4, seq, seed=5)
        wide = [t.double().requires_grad_() for t in whole]
        out, lse = attention(*wide, causal)
        ((out * of_out).sum() * ("out" in of) + (lse * of_lse).sum() * ("lse" in of)).backward()

        def body(group):
            mine = positions(group.rank, world, seq, causal)

            def part(t):
                return (t[:, :, mine] if heads_first else t[:, :, mine].transpose(1, 2)).contiguous()
            leaves = [part(t).requires_grad_() for t in whole]
            have, have_lse = perseus.ring_attention(*leaves, group, causal=causal, heads_first=heads_first)
            results, gradients = [], []
            if "out" in of:
                results, gradients = [have], [part(of_out)]
            if "lse" in of:
                results, gradients = [*results, have_lse], [*gradients, of_lse[:, :, mine].float()]
            torch.autograd.backward(results, gradients)
            return [(part(w.grad), t.grad) for w, t in zip(wide, leaves)]
        for rank, found in enumerate(run(world, body)):
            for name, (want, got) in zip(("q", "k", "v"), found):
                size = float(want.square().mean().sqrt())
                self.assertEqual((got.shape, got.dtype), (want.shape, torch.bfloat16))
                # some roundings to bf16 of values that are larger than their sum
                self.assertLessEqual(float((got.double() - want).abs().max()), 0.06 * size, f"d{name} of rank {rank}")

    def test_they_are_those_of_attention_over_the_whole_sequence(self):
        for row in ((1, True, True, 128, ("out", "lse")), (2, False, True, 64, ("out",)),
                    (2, True, False, 128, ("out", "lse")), (3, True, True, 64, ("lse",))):
            with self.subTest(row=row):
                self.check(*row)

    def test_what_needs_no_gradient_gets_none(self):
        def body(group):
            q, k = (random(group.rank, 1, 64, 2, 64, seed=seed) for seed in (1, 2))
            v = random(group.rank, 1, 64, 2, 64, seed=3).requires_grad_()
            with torch.no_grad():
                self.assertFalse(perseus.ring_attention(q, k, v, group)[0].requires_grad)
            out = perseus.ring_attention(q, k, v, group)[0]
            out.sum().backward()  # of an expanded 1
            return q.grad is None and k.grad is None and v.grad.shape == v.shape
        self.assertEqual(run(2, body), [True] * 2)

    def test_repeats_are_equal_bit_by_bit(self):
        def body(group):
            results = []
            for _ in range(2):
                leaves = [random(group.rank, 1, 80, 2, 64, seed=seed).requires_grad_() for seed in (1, 2, 3)]
                perseus.ring_attention(*leaves, group, causal=True)[0].square().sum().backward()
                results.append([t.grad for t in leaves])
            return all(torch.equal(a, b) for a, b in zip(*results))
        self.assertEqual(run(2, body), [True] * 2)

    def test_wrong_gradients_are_refused_by_name(self):
        def body(group):
            q, lse = random(0, 1, 64, 2, 64), torch.zeros(1, 2, 64)
            backward = torch.ops.perseus.ring_attention_backward
            for error, text, arguments in (
                    (TypeError, "dout is torch.float32", (q.float(), None, q, q, q, q, lse)),
                    (ValueError, "dlse has shape", (q, lse[:, :1], q, q, q, q, lse)),
                    (ValueError, "out has shape", (q, None, q, q, q, q[:, :32], lse))):
                with self.assertRaisesRegex(error, f"perseus.ring_attention_backward: {text}"):
                    backward(*arguments, group.name)
        run(1, body)


if __name__ == "__main__":
    ranks.main()
