# SPDX-License-Identifier: Apache-2.0
"""DeepEP's interface over our MoE ops, on emulated GPUs: what arrives, what comes back, and the sums of a layer."""
import sys
import types
import unittest
from unittest import mock

import ranks
import torch
from ranks import random, run

import perseus
import perseus.integrations.deep_ep as deep_ep

E4M3 = torch.float8_e4m3fn
WORLD, EXPERTS, TOP_K, HIDDEN, MOST = 2, 4, 3, 128, 16
COUNTS = (9, 5)


def inputs(rank):
    """Tokens, choices and weights. Some slots have no expert, and one token has none at all; no token chooses expert 3,
    and none of the second rank leaves it."""
    generator = torch.Generator().manual_seed(70 + rank)
    weights, chosen = torch.rand(COUNTS[rank], EXPERTS - 1, generator=generator).topk(TOP_K)
    chosen[::4, 1] = -1
    chosen[2] = -1
    if rank == 1:
        chosen = torch.where(chosen < 2, -1, chosen)
    return random(rank, COUNTS[rank], HIDDEN, seed=33), chosen, weights.contiguous()


def here(rank):
    """What a rank must get in normal mode: tokens, local choices, weights, by token's first elements."""
    found = []
    for source in range(WORLD):
        x, chosen, weights = inputs(source)
        for token in range(len(x)):
            local = torch.where(chosen[token] // 2 == rank, chosen[token] - 2 * rank, -1)
            if (local >= 0).any():
                found.append((x[token], local, torch.where(local >= 0, weights[token], 0)))
    return found


def order(x):
    return sorted(range(len(x)), key=lambda i: x[i].float().tolist())


def sent(buffer, x, chosen, weights, **more):
    per_rank, _, per_expert, in_rank, event = buffer.get_dispatch_layout(chosen, EXPERTS)
    event.current_stream_wait()
    return (per_rank, per_expert), buffer.dispatch(
        x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=chosen,
        topk_weights=weights, **more)


def weighed(weights, chosen):
    return torch.where(chosen >= 0, weights, 0)


class DeepEp(unittest.TestCase):
    def test_tokens_arrive_once_with_their_choices_and_come_back_as_sums(self):
        def body(group):
            buffer, (x, chosen, weights) = deep_ep.Buffer(group, 1 << 30, max_tokens=MOST), inputs(group.rank)
            layout, (rows, idx, w, per_expert, handle, event) = sent(buffer, x, chosen, weights, expert_alignment=4)
            want, mine, got = here(group.rank), 0, order(rows)
            self.assertEqual(layout[0].tolist(), [int(((chosen // 2) == r).any(1).sum()) for r in range(WORLD)])
            self.assertEqual(layout[1].tolist(), [int((chosen == e).sum()) for e in range(EXPERTS)])
            self.assertEqual(len(rows), len(want))
            for i, j in zip(got, order([t for t, _, _ in want])):
                for a, b in zip((rows[i], idx[i], w[i]), want[j]):
                    self.assertTrue(torch.equal(a, b.to(a.dtype)))
            counts = [sum(int((local == e).sum()) for _, local, _ in want) for e in range(2)]
            self.assertEqual(per_expert, [-(-n // 4) * 4 for n in counts])
            # each rank weighs its part, as a layer does; weights come back too
            y, back, _ = buffer.combine((rows.float() * w.sum(1, keepdim=True)).bfloat16(), handle, topk_weights=w)
            total = x.float() * weighed(weights, chosen).sum(1, keepdim=True)
            self.assertLess(float((y.float() - total).abs().max()), 0.05)
            self.assertTrue(torch.equal(back, weighed(weights, chosen)))
            # the same way again
            again, *none = buffer.dispatch(-x, handle=handle)
            self.assertTrue(torch.equal(again, -rows))
            self.assertEqual(none[:4], [None] * 4)
            with self.assertRaisesRegex(ValueError, "the handle's dispatch gave"):
                buffer.combine(rows[:, 1:], handle)
            group.check()
            return len(rows)
        self.assertEqual(run(WORLD, body), [len(here(r)) for r in range(WORLD)])

    def test_e4m3_tokens_keep_their_scales_and_nothing_waits_for_the_number_of_rows(self):
        def body(group):
            buffer, (x, chosen, weights) = deep_ep.Buffer(group, max_tokens=MOST), inputs(group.rank)
            numbers, scales = perseus.quantise_reference(x, (1, 128))
            _, ((rows, s), idx, w, per_expert, handle, _) = sent(buffer, (numbers, scales), chosen, weights,
                                                                 num_worst_tokens=2 * MOST)
            want = here(group.rank)
            there = (idx >= 0).any(1)
            self.assertEqual((rows.dtype, len(rows), int(there.sum()), per_expert), (E4M3, 2 * MOST, len(want), []))
            values = rows[there].float() * s[there].repeat_interleave(128, 1)
            whole = [(lambda n, c: n.float()[0] * c[0])(*perseus.quantise_reference(t[None], (1, 128)))
                     for t, _, _ in want]
            for i, j in zip(order(values), order(whole)):
                self.assertTrue(torch.equal(values[i], whole[j]))
                self.assertTrue(torch.equal(idx[there][i], want[j][1]))
            rows = (rows.float() * s.repeat_interleave(128, 1)).nan_to_num().bfloat16()
            y, back, _ = buffer.combine(rows, handle)
            ranks_of = sum(((chosen // 2) == r).any(1).float() for r in range(WORLD))
            self.assertLess(float((y.float() - x.float() * ranks_of[:, None]).abs().max()), 0.2)
            self.assertIsNone(back)
            with self.assertRaisesRegex(NotImplementedError, "torch.bfloat16"):
                buffer.dispatch(x, handle=handle)
            return True
        self.assertEqual(run(WORLD, body), [True] * WORLD)

    def test_low_latency_gives_each_expert_room_for_all_and_weighs_what_comes_back(self):
        def body(group):
            buffer, (x, chosen, weights) = deep_ep.Buffer(group, low_latency_mode=True), inputs(group.rank)
            for fp8 in (False, True):
                stats = torch.zeros(2, dtype=torch.int32)
                received, count, handle, event, hook = buffer.low_latency_dispatch(
                    x, chosen, MOST, EXPERTS, use_fp8=fp8, return_recv_hook=True,
                    cumulative_local_expert_recv_stats=stats)
                hook()
                if fp8:
                    numbers, scales = received
                    self.assertEqual((numbers.dtype, scales.stride(1)), (E4M3, 1))
                    received = (numbers.float() * scales.repeat_interleave(128, 2)).bfloat16()
                self.assertEqual(received.shape, (2, WORLD * MOST, HIDDEN))
                for expert in range(2):
                    want = [x[t] for x, c, _ in map(inputs, range(WORLD)) for t in range(len(x))
                            if (c[t] == 2 * group.rank + expert).any()]
                    got = received[expert, :count[expert]]
                    self.assertEqual(len(got), len(want))
                    for i, j in zip(order(got), order(want)):
                        self.assertLess(float((got[i] - want[j]).abs().max()), 0.1 if fp8 else 1e-9)
                self.assertEqual(stats.tolist(), count.tolist())
                factor = 1 + torch.arange(2) + 2 * group.rank  # of each expert
                rows = buffer.get_next_low_latency_combine_buffer(handle)
                rows.copy_(received.nan_to_num() * factor[:, None, None])
                out = torch.empty_like(x)
                y, _, hook = buffer.low_latency_combine(rows, chosen, weights, handle, zero_copy=True, out=out)
                self.assertIs(y, out)
                sums = (weighed(weights, chosen) * (1 + chosen)).sum(1, keepdim=True)
                self.assertLess(float((y.float() - x.float() * sums).abs().max()), 0.5 if fp8 else 0.1)
            group.check()
            return True
        self.assertEqual(run(WORLD, body), [True] * WORLD)

    def test_rows_find_their_slots_by_the_shorter_of_both_lists(self):
        expert_rows = torch.tensor([[0, 3], [128, 0], [256, 5]], dtype=torch.int32)
        rows = random(0, 384, 8)
        for slots, of_slots in ((5, True), (200, False)):
            places = deep_ep._places(expert_rows, len(rows), slots)
            self.assertEqual(places.of_slots, of_slots)
            spread = places.spread(rows).view(3, slots, 8)
            back = places.collected(spread.reshape(-1, 8))
            for (first, count), found in zip(expert_rows.tolist(), spread):
                self.assertTrue(torch.equal(found[:count], rows[first:first + count]))
                self.assertTrue(torch.equal(back[first:first + count], rows[first:first + count]))

    def test_the_program_of_the_page(self):
        def body(group):
            x, chosen, router = inputs(group.rank)
            made = {"group": group, "x": x, "chosen": chosen, "router": router, "num_experts": EXPERTS,
                    "experts": lambda rows, idx, weights: (rows.float() * weights.sum(1, keepdim=True)).bfloat16()}
            exec(program, made)
            want = x.float() * weighed(router, chosen).sum(1, keepdim=True)
            return float((made["y"].float() - want).abs().max()) < 0.05
        program = ranks.page("A program for DeepEP", "python", [("4096", "16"), ("128", "16")], "serving")
        with mock.patch.dict(sys.modules):
            self.assertEqual(run(WORLD, body), [True] * WORLD)

    def test_what_is_not_there_is_refused_by_name(self):
        def body(group):
            with self.assertRaisesRegex(TypeError, "enable_shrink"):
                deep_ep.Buffer(group, enable_shrink=True)
            buffer, (x, chosen, weights) = deep_ep.Buffer(group), inputs(0)
            with self.assertRaisesRegex(NotImplementedError, "use_ue8m0"):
                buffer.low_latency_dispatch(x, chosen, MOST, EXPERTS, use_ue8m0=True)
            with self.assertRaisesRegex(ValueError, "needs topk_idx"):
                buffer.dispatch(x)
            return True
        self.assertEqual(run(1, body), [True])

    def test_it_takes_deep_eps_name_unless_that_is_taken(self):
        with mock.patch.dict(sys.modules):
            deep_ep.install()
            deep_ep.install()
            import deep_ep as found
            self.assertIs(found, deep_ep)
            sys.modules["deep_ep"] = types.SimpleNamespace(__file__="/somewhere")
            with self.assertRaisesRegex(RuntimeError, "/somewhere"):
                deep_ep.install()


if __name__ == "__main__":
    ranks.main()
