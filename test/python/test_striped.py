# SPDX-License-Identifier: Apache-2.0
"""Striped attention, its gradients and what cuts inputs for it, on emulated GPUs, compared with torch's own products in
double precision."""
import unittest

import ranks
import torch
from ranks import random, run

import perseus

SEQ, HEADS, DIM = 512, 2, 64


def attention(q, k, v, met, soft_cap, sinks, scale=DIM**-0.5):
    """[rows, heads, dim]. met: which keys each query meets. Returns out, lse [heads, rows]."""
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    scores = q @ k.transpose(1, 2) * scale
    scores = soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores
    scores = scores.masked_fill(~met, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, q.shape[1], 1)), 2)
    return (scores.softmax(-1)[..., :q.shape[1]] @ v).transpose(0, 1), scores.logsumexp(-1)


def met_by(causal, window, cu_seqlens, seq=SEQ):
    at = torch.arange(seq)
    apart = at[:, None] - at
    part = torch.searchsorted(torch.tensor(cu_seqlens), at, right=True) if cu_seqlens else torch.zeros(seq)
    met = (part[:, None] == part) & (apart.abs() < (window or seq)) & ((apart >= 0) | (not causal))
    if cu_seqlens:  # what no sequence has
        met &= ((at < cu_seqlens[-1]) & (at >= cu_seqlens[0]))[:, None] | (apart == 0)
    return met


class Results(unittest.TestCase):
    def check(self, world, causal, window_size, softcap, with_sinks, cu_seqlens, assigned=False):
        whole = [random(0, SEQ, HEADS, DIM, seed=seed) for seed in (1, 2, 3)]
        of_out, of_lse = random(0, SEQ, HEADS, DIM, seed=4), random(0, HEADS, SEQ, seed=5).float()
        sinks = torch.tensor([0.5, -1.0]) if with_sinks else None
        wide = [t.double().requires_grad_() for t in whole]
        wide_sinks = None if sinks is None else sinks.double().requires_grad_()
        window = window_size[0] + 1 if window_size[0] >= 0 else 0
        want, want_lse = attention(*wide, met_by(causal, window, cu_seqlens), softcap, wide_sinks, 0.2)
        ((want * of_out).sum() + (want_lse * of_lse).sum()).backward()

        def body(group):
            ranks_of = perseus.assign_stripes(cu_seqlens, group, positions=SEQ, causal=causal,
                                              window=window) if assigned else None

            def part(t, dim=0):
                return perseus.split_sequence(t, group, dim=dim, stripe_ranks=ranks_of)
            leaves = [part(t).requires_grad_() for t in whole]
            mine = None if sinks is None else sinks.clone().requires_grad_()
            if cu_seqlens:
                out, lse = perseus.varlen_attention(*leaves, torch.tensor(cu_seqlens, dtype=torch.int32), causal=causal,
                                                    window_size=window_size, softcap=softcap, sinks=mine,
                                                    softmax_scale=0.2, return_lse=True, group=group,
                                                    stripe_ranks=ranks_of)
            else:
                out, lse = (t[0] for t in perseus.striped_attention(
                    *(t.unsqueeze(0) for t in leaves), group, causal=causal, window=window, soft_cap=softcap,
                    sinks=mine, scale=0.2, stripe_ranks=ranks_of))
            torch.autograd.backward([out, lse], [part(of_out), part(of_lse, 1)])
            pairs = [(part(want), out), (part(want_lse, 1), lse),
                     *((part(w.grad), t.grad) for w, t in zip(wide, leaves))]
            return [(a.detach().double(), b.detach().double()) for a, b in pairs], None if mine is None else mine.grad
        found = run(world, body)
        for pairs, _ in found:
            for name, (a, b) in zip(("out", "lse", "dq", "dk", "dv"), pairs):
                self.assertEqual(a.shape, b.shape)
                self.assertLessEqual(float((a - b).abs().max()), 0.1 * float(a.square().mean().sqrt()), name)
        if with_sinks:  # the sum over ranks is the caller's
            have = sum(grad for _, grad in found).double()
            self.assertLessEqual(float((have - wide_sinks.grad).abs().max()), 0.02 * float(wide_sinks.grad.abs().max()))

    def test_they_are_attention_over_each_sequence(self):
        for row in ((2, True, (-1, -1), 0.0, False, [0, 100, 100, 101, 400]), (2, True, (70, 0), 20.0, True, None),
                    (1, False, (90, 90), 0.0, False, [0, 512]), (2, True, (50, -1), 0.0, True, [0, 30, 512]),
                    (2, True, (-1, -1), 0.0, False, [0, 250, 500], True), (2, True, (70, 0), 0.0, True, None, True)):
            with self.subTest(row=row):
                self.check(*row)

    def test_what_cannot_run_is_refused_by_name(self):
        def body(group):
            q, bounds = random(0, 256, HEADS, DIM), torch.tensor([0, 256], dtype=torch.int32)
            for error, text, call in (
                    (ValueError, "window_size", lambda: perseus.varlen_attention(q, q, q, bounds, group=group,
                                                                                 window_size=(3, 4))),
                    (ValueError, "softmax_scale is 0", lambda: perseus.varlen_attention(q, q, q, bounds, group=group,
                                                                                        softmax_scale=0.0)),
                    (TypeError, "cu_seqlens is torch.int64", lambda: perseus.varlen_attention(q, q, q, bounds.long(),
                                                                                              group=group)),
                    (ValueError, "cu_seqlens has 1 elements", lambda: perseus.varlen_attention(q, q, q, bounds[:1],
                                                                                               group=group)),
                    (ValueError, "sinks has shape", lambda: perseus.varlen_attention(q, q, q, bounds, group=group,
                                                                                     sinks=torch.zeros(3))),
                    (ValueError, "window is -4", lambda: perseus.striped_attention(
                        *(q.unsqueeze(0) for _ in range(3)), group, window=-4)),
                    (ValueError, "stripe_ranks has shape", lambda: perseus.varlen_attention(
                        q, q, q, bounds, group=group, stripe_ranks=torch.zeros(3, dtype=torch.int32))),
                    (TypeError, "stripe_ranks is torch.int64", lambda: perseus.varlen_attention(
                        q, q, q, bounds, group=group, stripe_ranks=torch.zeros(2, dtype=torch.int64))),
                    (perseus.PerseusError, "stripes of 192",
                     lambda: perseus.varlen_attention(q, q, q, bounds, group=group, stripe=192))):
                with self.assertRaisesRegex(error, text):
                    call()
        run(1, body)


class Lengths(unittest.TestCase):
    """Launches of lengths that differ share plans, as those of ring attention do (test_attention.py)."""

    def test_many_lengths_share_few_plans(self):
        lengths, bounds = (1536, 1024, 1536, 512, 1024), {512: [0, 200, 500], 1024: [0, 600, 610, 1024], 1536: [0, 900]}
        wide = {}
        for seq in bounds:
            tensors = [random(0, seq, HEADS, DIM, seed=seed) for seed in (1, 2, 3, 4)]
            leaves = [t.double().requires_grad_() for t in tensors[:3]]
            out = attention(*leaves, met_by(True, 0, bounds[seq], seq), 0, None)[0]
            (out * tensors[3]).sum().backward()
            wide[seq] = tensors, [out.detach(), *(t.grad for t in leaves)]

        def body(group):
            found = []
            for seq in lengths:
                tensors, want = wide[seq]
                *leaves, of_out = (perseus.split_sequence(t, group) for t in tensors)
                leaves = [t.requires_grad_() for t in leaves]
                out = perseus.varlen_attention(*leaves, torch.tensor(bounds[seq], dtype=torch.int32), causal=True,
                                               group=group)
                out.backward(of_out)
                found.append([(perseus.split_sequence(w, group), t.detach().double())
                              for w, t in zip(want, (out, *(t.grad for t in leaves)))])
            return len(group._plans), found
        for plans, found in run(2, body):
            self.assertEqual(plans, 4, "of 1536 and of 512 positions, for each pass")
            for seq, pairs in zip(lengths, found):
                for name, (a, b) in zip(("out", "dq", "dk", "dv"), pairs):
                    self.assertEqual(a.shape, b.shape)
                    self.assertLessEqual(float((a - b).abs().max()), 0.1 * float(a.square().mean().sqrt()),
                                         f"{name} of {seq} positions")

    def test_a_plan_serves_smaller_batches(self):
        def body(group):
            q = random(group.rank, 3, 256, 1, DIM, seed=1)
            of_out = random(group.rank, 3, 256, 1, DIM, seed=2)
            found = []
            for batch in (3, 1, 2):
                leaf = q[:batch].clone().requires_grad_()
                out = perseus.striped_attention(leaf, leaf, leaf, group, causal=True, window=100)[0]
                out.backward(of_out[:batch])
                found.append((out.detach(), leaf.grad))
            self.assertEqual(len(group._plans), 2, "one of each pass")
            return found
        for most, *fewer in run(2, body):
            for few in fewer:
                for whole, part in zip(most, few):
                    self.assertTrue(torch.equal(whole[:len(part)], part))

    def test_a_frozen_group_serves_shorter_lengths_only(self):
        def body(group):
            q = random(group.rank, 1, 512, 1, DIM, seed=1)
            perseus.striped_attention(q, q, q, group)
            group.freeze()
            shorter = q[:, :256].contiguous()
            self.assertTrue(perseus.striped_attention(shorter, shorter, shorter, group)[0].isfinite().all())
            longer = torch.cat((q, q), 1)
            with self.assertRaisesRegex(perseus.PerseusError, "frozen"):
                perseus.striped_attention(longer, longer, longer, group)
        run(2, body)


class Cutting(unittest.TestCase):
    def test_what_is_cut_is_joined_again(self):
        def body(group):
            whole = torch.arange(2 * 900 * 3).view(2, 900, 3)
            mine = perseus.split_sequence(whole, group, dim=1, fill=-1)
            self.assertEqual(tuple(mine.shape), (2, 1024 // group.world, 3))
            self.assertTrue(torch.equal(perseus.join_sequence(mine, group, dim=1, length=900), whole))
            with self.assertRaisesRegex(ValueError, "900 positions"):
                perseus.split_sequence(whole, group, dim=1)
            for call in (perseus.split_sequence, perseus.join_sequence):
                for x, dim in ((whole, 3), (whole, -4), (torch.tensor(1), 0)):
                    with self.assertRaisesRegex(IndexError, f"{call.__name__}: x with shape .* has no dimension {dim}"):
                        call(x, group, dim=dim)
            return True
        self.assertEqual(run(2, body), [True] * 2)

    def test_sequences_stay_on_one_rank_if_stripes_are_assigned(self):
        bounds = [0, 256, 512, 768, 1024]

        def body(group):
            ranks_of = perseus.assign_stripes(torch.tensor(bounds, dtype=torch.int32), group)
            self.assertEqual(ranks_of.dtype, torch.int32)
            whole = torch.arange(1000)
            mine = perseus.split_sequence(whole, group, stripe_ranks=ranks_of, fill=-1)
            self.assertTrue(torch.equal(perseus.join_sequence(mine, group, length=1000, stripe_ranks=ranks_of), whole))
            at = perseus.sequence_positions(1024, torch.tensor(bounds), group, stripe_ranks=ranks_of)
            for row, position in zip(mine.tolist(), at.tolist()):
                self.assertTrue(row < 0 or position == row - max(b for b in bounds if b <= row))
            return ranks_of.tolist()
        found = run(2, body)
        self.assertEqual(found[0], found[1])
        self.assertIn(found[0], ([0] * 4 + [1] * 4, [1] * 4 + [0] * 4))

    def test_what_cannot_be_assigned_is_refused_by_name(self):
        def body(group):
            ranks_of = perseus.assign_stripes([0, 512], group)
            for error, text, call in (
                    (ValueError, "cu_seqlens has 1 elements", lambda: perseus.assign_stripes([0], group)),
                    (ValueError, "cu_seqlens has 0.0", lambda: perseus.assign_stripes(torch.tensor([0, 1.5]), group)),
                    (ValueError, r"cu_seqlens has \[0, 1\]",
                     lambda: perseus.assign_stripes(torch.tensor([[0, 1]]), group)),
                    (ValueError, "cu_seqlens has 4294967808", lambda: perseus.assign_stripes([0, 2**32 + 512], group)),
                    (ValueError, "positions is -512",
                     lambda: perseus.assign_stripes(None, group, positions=-512, window=9)),
                    (ValueError, "window is -5",
                     lambda: perseus.assign_stripes(None, group, positions=512, window=-5)),
                    (ValueError, "stripe is 100", lambda: perseus.assign_stripes([0, 9], group, stripe=100)),
                    (perseus.PerseusError, r"cu_seqlens\[1\] is -3", lambda: perseus.assign_stripes([0, -3], group)),
                    (perseus.PerseusError, r"cu_seqlens\[1\] is 600",
                     lambda: perseus.assign_stripes([0, 600], group, positions=512)),
                    (perseus.PerseusError, "a sequence of 500",
                     lambda: perseus.assign_stripes(None, group, positions=500, window=9)),
                    (perseus.PerseusError, "empty shape", lambda: perseus.assign_stripes(None, group, window=9)),
                    (ValueError, r"stripe_ranks has shape \(4,\): 1024 positions are 8 stripes of 128 rows",
                     lambda: perseus.split_sequence(torch.arange(1024), group, stripe_ranks=ranks_of))):
                with self.assertRaisesRegex(error, text):
                    call()
        run(2, body)

    def test_stripes_that_no_attention_takes_are_refused(self):
        def body(group):
            for stripe in (64, 384, -128, True, "128", 128.0):
                for call in (lambda: perseus.split_sequence(torch.arange(3072), group, stripe=stripe),
                             lambda: perseus.sequence_positions(3072, group=group, stripe=stripe)):
                    with self.assertRaisesRegex(ValueError, f"stripe is {stripe!r}; it must be 0 or a power of two"):
                        call()
        run(1, body)

    def test_stripes_are_as_long_as_each_rank_has_many(self):
        from perseus.striped import stripe_of
        for positions, world, stripe in ((65536, 4, 512), (65536, 8, 256), (65536, 2, 512), (32768, 4, 256),
                                         (32768, 8, 128), (1 << 20, 8, 512), (512, 2, 128), (65536 + 1024, 4, 128),
                                         (65536 + 2048, 4, 256)):
            with self.subTest(positions=positions, world=world):
                self.assertEqual(stripe_of(positions, world), stripe)

        def body(group):
            total = 2 * 64 * 256  # two ranks have 64 stripes of 256, or 32 of 512
            whole = torch.arange(total)
            mine = perseus.split_sequence(whole, group)
            self.assertTrue(torch.equal(mine, perseus.split_sequence(whole, group, stripe=512)))
            self.assertTrue(torch.equal(mine, perseus.sequence_positions(total, group=group)))
            self.assertTrue(torch.equal(perseus.join_sequence(mine, group), whole))
            return True
        self.assertEqual(run(2, body), [True] * 2)

    def test_positions_are_those_in_each_sequence(self):
        def body(group):
            bounds = torch.tensor([3, 3, 200, 700], dtype=torch.int32)
            want = torch.tensor([p - 3 if 3 <= p < 200 else p - 200 if 200 <= p < 700 else 0 for p in range(1024)])
            rows = perseus.sequence_positions(1024, group=group)
            self.assertTrue(torch.equal(rows, perseus.split_sequence(torch.arange(1024), group)))
            self.assertTrue(torch.equal(perseus.sequence_positions(1024, bounds, group), want[rows]))
            return rows
        self.assertEqual(sorted(torch.cat(run(2, body)).tolist()), list(range(1024)))


class Compiled(unittest.TestCase):
    def test_the_op_is_traced_with_its_gradients(self):
        def body(group):
            q = random(0, 256, HEADS, DIM)
            bounds = torch.tensor([0, 77, 256], dtype=torch.int32)

            def loss(q, k, v):
                return perseus.varlen_attention(q, k, v, bounds, causal=True, group=group).float().square().sum()
            found = []
            for call in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
                leaves = [q.clone().requires_grad_() for _ in range(3)]
                call(*leaves).backward()
                found.append([t.grad for t in leaves])
            return all(torch.equal(a, b) for a, b in zip(*found))
        self.assertEqual(run(1, body), [True])


if __name__ == "__main__":
    ranks.main()
