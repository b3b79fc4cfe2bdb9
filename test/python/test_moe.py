# SPDX-License-Identifier: Apache-2.0
"""MoE there and back on emulated GPUs, with gradients, compared with a plain layer in fp32 that sees all ranks'
tokens."""
import unittest

import moe_block
import ranks
import torch
import torch.nn.functional as F
from ranks import random, run

import perseus
from perseus import moe

EXPERTS, TOP_K, HIDDEN, INNER = 8, 3, 64, 48
COUNTS = {1: (20,), 2: (23, 0), 4: (17, 0, 9, 24)}  # tokens of each rank: one has none
ACTIVATE = {"silu": F.silu, "relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
            "none": lambda x: x}


def routed(rank, count):
    """Choices and weights. No token chooses expert 5; some have a slot without an expert."""
    generator = torch.Generator().manual_seed(70 + rank)
    scores = torch.rand(count, EXPERTS, generator=generator)
    scores[:, 5] = -1
    weights, chosen = scores.topk(TOP_K)
    chosen[::4, 1] = -1
    return chosen, weights.contiguous()


def matrices(gated, linear):
    """Of all experts, in bf16: first and second."""
    first, second = (random(0, EXPERTS, HIDDEN, INNER * (2 if gated else 1), seed=31).mul_(0.3),
                     random(0, EXPERTS, INNER, HIDDEN, seed=32).mul_(0.3))
    return tuple((t.transpose(1, 2) if linear else t).contiguous() for t in (first, second))


def reference(world, activation, gated, linear, residual):
    """Results, and gradients of the sum of result * a random matrix: tokens, router weights, residual of each rank; the
    two matrices."""
    leaves = []

    def leaf(t):
        leaves.append(t.float().requires_grad_())
        return leaves[-1]
    first, second = (leaf(t) for t in matrices(gated, linear))
    w1, w2 = ((t.transpose(1, 2) if linear else t) for t in (first, second))
    results, inputs, loss = [], [], 0
    for rank, count in enumerate(COUNTS[world]):
        chosen, router = routed(rank, count)
        x, weights, added = (leaf(random(rank, count, HIDDEN, seed=33)), leaf(router),
                             leaf(random(rank, count, HIDDEN, seed=34)))
        out = []
        for token in range(count):
            y = added[token] if residual else torch.zeros(HIDDEN)
            for slot, expert in enumerate(chosen[token].tolist()):
                if expert < 0:
                    continue
                h = x[token] @ w1[expert]
                h = ACTIVATE[activation](h[:INNER]) * h[INNER:] if gated else ACTIVATE[activation](h)
                y = y + weights[token, slot] * (h @ w2[expert])
            out.append(y)
        results.append(torch.stack(out) if count else torch.zeros(0, HIDDEN))
        inputs.append((x, weights, added))
        loss = loss + (results[-1] * random(rank, count, HIDDEN, seed=35).float()).sum()
    loss.backward()
    return results, inputs, first, second


def experts(dispatched, first, second, activation, gated, linear):
    """The caller's own experts, in plain torch."""
    w1, w2 = ((t.transpose(1, 2) if linear else t) for t in (first, second))
    h = torch._grouped_mm(dispatched.rows, w1, offs=dispatched.ends).float()
    h = ACTIVATE[activation](h[:, :INNER]) * h[:, INNER:] if gated else ACTIVATE[activation](h)
    return torch._grouped_mm(h.bfloat16(), w2, offs=dispatched.ends)


def by_parts(tokens, chosen, router, first, second, plan, residual, activation, gated, linear, placement=None):
    d = perseus.moe_dispatch(tokens, chosen, router, plan, placement)
    return perseus.moe_combine(experts(d, first, second, activation, gated, linear), d, residual), d.status


def in_one(tokens, chosen, router, first, second, plan, residual, activation, gated, linear, placement=None):
    return perseus.moe_layer(tokens, chosen, router, first, second, plan, residual, placement)


def recomputed(tokens, chosen, router, first, second, plan, residual, activation, gated, linear, placement=None):
    return perseus.moe_layer(tokens, chosen, router, first, second, plan, residual, placement, recompute=True)


def parted(tokens, chosen, router, first, second, plan, residual, activation, gated, linear, placement=None):
    """Gate and up as two tensors."""
    pair = tuple(t.contiguous() for t in first.chunk(2, 1 if linear else 2))
    return perseus.moe_layer(tokens, chosen, router, pair, second, plan, residual, placement, recompute=linear)


def apart(a, b):
    """The largest difference, over the root mean square of b."""
    return (float((a.detach().double() - b.detach().double()).abs().max()
                  / b.detach().double().square().mean().sqrt().clamp_min(1e-9)) if b.numel() else 0.0)


class Moe(unittest.TestCase):
    def check(self, way, world, activation="silu", gated=True, linear=False, residual=True, times=1):
        def body(group):
            count, local = COUNTS[world][group.rank], EXPERTS // world
            plan = perseus.moe_plan(max_tokens=24, hidden=HIDDEN, experts=EXPERTS, top_k=TOP_K, inner=INNER,
                                    activation=activation, gated=gated, linear_layout=linear, group=group)
            chosen, router = routed(group.rank, count)
            x, added = (random(group.rank, count, HIDDEN, seed=33).requires_grad_(),
                        random(group.rank, count, HIDDEN, seed=34).requires_grad_())
            first, second = (t[group.rank * local:(group.rank + 1) * local].clone().requires_grad_()
                             for t in matrices(gated, linear))
            router.requires_grad_()
            outs = [way(x, chosen, router, first, second, plan, added if residual else None, activation, gated, linear)
                    for _ in range(times)]
            for out, status in outs:  # all forward before all back, as layers of a model do
                self.assertEqual(status[1:5].tolist(), [0, 0, -1, 0])
            for out, _ in reversed(outs):
                out.backward(random(group.rank, count, HIDDEN, seed=35))
            group.check()
            return [outs[0][0], x.grad, router.grad, added.grad, first.grad, second.grad]
        got = run(world, body)
        results, inputs, first, second = reference(world, activation, gated, linear, residual)
        for rank, (out, of_x, of_router, of_added, of_first, of_second) in enumerate(got):
            x, weights, added = inputs[rank]
            mine = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
            self.assertLess(apart(out, results[rank]), 0.05)
            for name, have, want in (("tokens", of_x, x.grad), ("router weights", of_router, weights.grad),
                                     ("first", of_first, first.grad[mine]), ("second", of_second, second.grad[mine])):
                self.assertTrue(have.is_contiguous(), name)
                self.assertEqual(have.shape[0] == 0, want is None, name)  # torch gives an unused leaf no gradient
                if want is not None:  # several gradients are added up in bf16
                    self.assertLess(apart(have, want * times), 0.06 if times == 1 else 0.1, f"{name} of rank {rank}")
            self.assertEqual(of_added is not None, residual)
            if residual and COUNTS[world][rank]:
                self.assertLess(apart(of_added, added.grad * times), 0.01)

    def test_dispatch_own_experts_and_combine_are_a_layer_with_gradients(self):
        for world, linear in ((1, False), (2, True), (4, False)):
            with self.subTest(world=world):
                self.check(by_parts, world, linear=linear)

    def test_a_layer_in_one_call_has_the_same_gradients(self):
        for world, activation, gated, linear, residual in ((1, "silu", True, False, True),
                                                           (2, "silu", True, True, True),
                                                           (4, "gelu", True, False, False),
                                                           (2, "relu", False, True, True),
                                                           (2, "gelu_tanh", False, False, False),
                                                           (2, "none", True, True, True)):
            with self.subTest(world=world, activation=activation, gated=gated, linear=linear):
                for way in (in_one, recomputed):
                    self.check(way, world, activation, gated, linear, residual)

    def test_choices_without_room_are_counted_and_their_gradient_is_zero(self):
        def body(group):
            plan = perseus.moe_plan(max_tokens=200, hidden=HIDDEN, experts=2, top_k=1, capacity=128, group=group)
            x, router = random(0, 200, HIDDEN).requires_grad_(), torch.ones(200, 1, requires_grad=True)
            d = perseus.moe_dispatch(x, torch.zeros(200, 1, dtype=torch.int64), router, plan)
            out = perseus.moe_combine(d.rows, d)
            out.backward(random(0, 200, HIDDEN, seed=2))
            self.assertEqual(d.status[:2].tolist(), [256, 72])
            want = (x.detach().float() * random(0, 200, HIDDEN, seed=2).float()).sum(-1)
            self.assertLess(apart(router.grad[:128, 0], want[:128]), 1e-5)
            return (float(out.detach()[128:].abs().sum()), float(router.grad[128:].abs().sum()),
                    float(x.grad[128:].abs().sum()))
        self.assertEqual(run(1, body), [(0.0, 0.0, 0.0)])

    def test_gate_and_up_may_be_two_tensors(self):
        for world, linear in ((1, False), (2, True)):
            with self.subTest(world=world):
                self.check(parted, world, linear=linear)

    def test_several_layers_go_forward_before_they_go_back(self):
        for way in (by_parts, in_one, recomputed):
            self.check(way, 2, times=3)

    def test_what_needs_no_gradient_gets_none(self):
        def body(group):
            plan = perseus.moe_plan(max_tokens=24, hidden=HIDDEN, experts=EXPERTS, top_k=TOP_K, inner=INNER,
                                    group=group)
            chosen, router = routed(group.rank, 12)
            first, second = (t[group.rank * 4:][:4].clone() for t in matrices(True, False))
            second.requires_grad_()
            for way in (by_parts, in_one, recomputed):
                x = random(group.rank, 12, HIDDEN)
                way(x, chosen, router, first, second, plan, None, "silu", True,
                    False)[0].sum(0, keepdim=True).expand(12, -1).contiguous().sum().backward()
                self.assertTrue(x.grad is None and router.grad is None and first.grad is None
                                and second.grad is not None)
            return True
        self.assertEqual(run(2, body), [True, True])


class OneKernel(unittest.TestCase):
    """A layer without gradients, in a plan whose layer is one kernel. That kernel does not round what a rank's experts
    make of a token, so some bits differ from those of several kernels."""

    def body(self, group):
        count, local = COUNTS[2][group.rank], EXPERTS // 2
        chosen, router = routed(group.rank, count)
        x, added = random(group.rank, count, HIDDEN, seed=33), random(group.rank, count, HIDDEN, seed=34)
        first, second = (t[group.rank * local:(group.rank + 1) * local].clone() for t in matrices(True, True))
        sizes = {"hidden": HIDDEN, "experts": EXPERTS, "top_k": TOP_K, "inner": INNER, "linear_layout": True,
                 "group": group}
        small, large = (perseus.moe_plan(max_tokens=n, **sizes) for n in (24, 6000))
        self.assertEqual((small.path, large.path), ("one kernel", "kernels"))

        def layer(plan, x, added=added):  # recompute: else several kernels round the first product, too
            return perseus.moe_layer(x, chosen, router, first, second, plan, added, recompute=True)[0]
        wanting = x.clone().requires_grad_()
        kept, one, many = layer(small, wanting).detach(), layer(small, x), layer(large, x)
        with torch.no_grad():
            without = layer(small, wanting)
        self.assertTrue(torch.equal(many, kept))
        self.assertTrue(torch.equal(one, without))
        of_added = layer(small, x, added.clone().requires_grad_())  # the residual alone has a gradient
        self.assertTrue(torch.equal(of_added.detach(), kept))
        of_added.sum().backward()
        group.check()
        return one, int((one != kept).sum())

    def test_a_layer_without_gradients_takes_it(self):
        got = run(2, self.body)
        for (one, _), want in zip(got, reference(2, "silu", True, True, True)[0]):
            self.assertLess(apart(one, want), 0.05)
        self.assertGreater(sum(differing for _, differing in got), 0)

    def test_compiled_it_keeps_maps_only_for_gradients(self):
        def body(group):
            plan = perseus.moe_plan(max_tokens=8, hidden=HIDDEN, experts=EXPERTS, top_k=TOP_K, inner=INNER,
                                    linear_layout=True, group=group)
            (chosen, router), (first, second), flags = routed(0, 8), matrices(True, True), []

            def backend(module, inputs):
                flags.extend(node.args[11:13] for node in module.graph.nodes if "moe_layer" in str(node.target))
                return module
            torch._dynamo.reset()
            compiled = torch.compile(perseus.moe_layer, fullgraph=True, backend=backend)
            x = random(0, 8, HIDDEN)
            self.assertTrue(torch.equal(compiled(x, chosen, router, first, second, plan)[0],
                                        perseus.moe_layer(x, chosen, router, first, second, plan)[0]))
            compiled(x.clone().requires_grad_(), chosen, router, first, second, plan)
            self.assertEqual(flags, [(False, False), (True, True)])  # keep, maps
        run(1, body)

    def test_maps_that_were_not_kept_are_named(self):
        def body(group):
            plan = perseus.moe_plan(max_tokens=8, hidden=HIDDEN, experts=EXPERTS, top_k=TOP_K, inner=INNER, group=group)
            arguments = (random(0, 8, HIDDEN).requires_grad_(), *routed(0, 8), *matrices(True, False), None, plan.sizes,
                         plan.capacity, plan.maps_bytes, plan.group_name, None)
            with self.assertRaisesRegex(RuntimeError, "keeps no maps"):
                torch.ops.perseus.moe_layer(*arguments, False, False)
            with self.assertRaisesRegex(ValueError, "keep without maps"):
                torch.ops.perseus.moe_layer(arguments[0].detach(), *arguments[1:], True, False)
        run(1, body)

    def test_a_frozen_group_takes_the_least_plan_that_is_enough(self):
        def body(group):
            sizes = {"hidden": HIDDEN, "experts": EXPERTS, "top_k": TOP_K, "inner": INNER, "group": group}
            opened = [perseus.moe_plan(max_tokens=n, **sizes) for n in (8, 64, 32)]
            group.freeze()
            self.assertEqual([perseus.moe_plan(max_tokens=n, **sizes) for n in (8, 3, 9, 33)],
                             [opened[0], opened[0], opened[2], opened[1]])
            for wrong in ({"max_tokens": 65}, {"max_tokens": 8, "top_k": 2}):
                with self.assertRaisesRegex(perseus.PerseusError, "has no plan, no larger plan serves it"):
                    perseus.moe_plan(**{**sizes, **wrong})
        run(1, body)


class Placement(unittest.TestCase):
    PLACES = 12

    def map(self, world, absent=()):
        loads = torch.tensor([40.0, 3, 9, 2, 20, 1, 5, 4])
        loads[list(absent)] = -1
        return perseus.moe_balance(loads, places=self.PLACES, world=world, replicas=3)

    def run_mapped(self, way, world, found):
        def body(group):
            count, room = COUNTS[world][group.rank], self.PLACES // world
            plan = perseus.moe_plan(max_tokens=24, hidden=HIDDEN, experts=self.PLACES, top_k=TOP_K, inner=INNER,
                                    logical_experts=EXPERTS, replicas=3, group=group)
            chosen, router = routed(group.rank, count)
            x, mine = (random(group.rank, count, HIDDEN, seed=33).requires_grad_(),
                       found.held[group.rank * room:][:room].clamp(min=0).long())
            first, second = (t[mine].clone().requires_grad_() for t in matrices(True, False))
            router.requires_grad_()
            out, status = way(x, chosen, router, first, second, plan, None, "silu", True, False, found.placement)
            out.backward(random(group.rank, count, HIDDEN, seed=35))
            group.check()
            return out, x.grad, router.grad, status, first.grad, second.grad
        return run(world, body)

    def added_up(self, got, found, number):
        """What whoever trains does: the gradients of an expert's places, over all ranks."""
        by_place = torch.cat([grads[number] for grads in got]).float()
        return torch.stack([by_place[(found.held == e).nonzero()[:, 0]].sum(0) for e in range(EXPERTS)])

    def test_replicas_give_the_results_and_gradients_of_one_expert(self):
        for way, world in ((by_parts, 2), (in_one, 2), (by_parts, 4), (in_one, 1)):
            with self.subTest(world=world, way=way.__name__):
                found = self.map(world)
                self.assertEqual(int((found.placement >= 0).sum(1).max()), min(world, 3))
                got = self.run_mapped(way, world, found)
                results, inputs, first, second = reference(world, "silu", True, False, False)
                for rank, (out, of_x, of_router, status, *_) in enumerate(got):
                    self.assertLess(apart(out, results[rank]), 0.05)
                    self.assertEqual(status[5:7].tolist(), [0, 0])
                    if COUNTS[world][rank]:
                        self.assertLess(apart(of_x, inputs[rank][0].grad), 0.06)
                        self.assertLess(apart(of_router, inputs[rank][1].grad), 0.06)
                self.assertLess(apart(self.added_up(got, found, 4), first.grad), 0.06)
                self.assertLess(apart(self.added_up(got, found, 5), second.grad), 0.06)

    def test_tokens_keep_their_other_experts_when_some_are_absent(self):
        found, world = self.map(2, absent=(0, 3)), 2
        got = self.run_mapped(in_one, world, found)
        chosen = [routed(rank, COUNTS[world][rank])[0] for rank in range(world)]
        w1, w2 = (t.float() for t in matrices(True, False))
        for rank, (out, _, _, status, *_) in enumerate(got):
            x, weights, want = (random(rank, COUNTS[world][rank], HIDDEN, seed=33).float(),
                                routed(rank, COUNTS[world][rank])[1], torch.zeros(out.shape))
            for token, slot in ((t, s) for t in range(len(x)) for s in range(TOP_K)):
                expert = int(chosen[rank][token, slot])
                if expert not in (-1, 0, 3):
                    gate, up = (x[token] @ w1[expert]).chunk(2)
                    want[token] += weights[token, slot] * ((F.silu(gate) * up) @ w2[expert])
            self.assertLess(apart(out, want), 0.05)
            self.assertEqual(int(status[5]), int(((chosen[rank] == 0) | (chosen[rank] == 3)).sum()))

    def test_survivors_keep_the_places_that_they_had(self):
        found = self.map(4)
        smaller, room = perseus.moe_survivors(found.placement, [1], places=12, world=4), 3
        held = torch.cat([found.held[:room], found.held[2 * room:]])
        for expert in range(EXPERTS):
            places = smaller[expert][smaller[expert] >= 0].long()
            self.assertEqual(held[places].tolist(), [expert] * len(places))
            self.assertEqual(len(places), int((held == expert).sum()))
        self.assertEqual(smaller.dtype, torch.int32)
        self.assertEqual(perseus.moe_survivors(found.placement, [], places=12, world=4).tolist(),
                         found.placement.tolist())

    def test_bad_input_is_named(self):
        def body(group):
            sizes = {"max_tokens": 8, "hidden": 64, "experts": 6, "top_k": 2, "group": group}
            plan, none = perseus.moe_plan(logical_experts=4, replicas=2, **sizes), perseus.moe_plan(**sizes)
            x, chosen, router, placement = (random(0, 8, 64), torch.zeros(8, 2, dtype=torch.int64), torch.ones(8, 2),
                                            torch.zeros(4, 2, dtype=torch.int32))
            for error, text, call in (
                    (ValueError, "placement is None, and the plan has 4 logical",
                     lambda: perseus.moe_dispatch(x, chosen, router, plan)),
                    (ValueError, "placement is given, and the plan has 0 logical",
                     lambda: perseus.moe_dispatch(x, chosen, router, none, placement)),
                    (ValueError, r"placement has shape \(3, 2\)",
                     lambda: perseus.moe_dispatch(x, chosen, router, plan, placement[:3])),
                    (TypeError, "placement is torch.int64",
                     lambda: perseus.moe_dispatch(x, chosen, router, plan, placement.long())),
                    (perseus.PerseusError, "a MoE map of 4 experts with 0 places",
                     lambda: perseus.moe_plan(logical_experts=4, **sizes)),
                    (perseus.PerseusError, "9 experts in 8 places",
                     lambda: perseus.moe_balance(torch.ones(9), places=8, world=2, replicas=2)),
                    (perseus.PerseusError, "8 places on 3 ranks",
                     lambda: perseus.moe_balance(torch.ones(8), places=8, world=3, replicas=2)),
                    (ValueError, "8 places, 0 ranks",
                     lambda: perseus.moe_balance(torch.ones(8), places=8, world=0, replicas=2)),
                    (ValueError, r"loads has shape \(2, 2\)",
                     lambda: perseus.moe_balance(torch.ones(2, 2), places=8, world=2, replicas=2)),
                    (ValueError, r"lost \[4\]", lambda: perseus.moe_survivors(placement, [4], places=8, world=4))):
                with self.assertRaisesRegex(error, text):
                    call()
            d = perseus.moe_dispatch(x, chosen, router, plan, placement)
            return (d.status[:7].tolist(),
                    perseus.moe_dispatch(x, chosen, router, plan, placement + 6).status[4:7].tolist())
        self.assertEqual(run(1, body), [([128, 0, 0, -1, 0, 0, 0], [0, 0, 16])])


class Block(unittest.TestCase):
    """The example: a block as DeepSeek-V3 has it, small."""
    SMALL = moe_block.Config(hidden=64, inner=32, experts=16, top_k=4, groups=4, top_groups=2, max_tokens=32)

    def plain(self, block, x, gate_up, down):
        """The block in fp32, with the weights of all experts."""
        chosen, weights = block.route(x)
        gate, up = (x.float() @ block.shared_gate_up.float().t()).chunk(2, -1)
        y = (F.silu(gate) * up) @ block.shared_down.float().t()
        for slot in range(chosen.shape[1]):
            h = torch.einsum("th,tnh->tn", x.float(), gate_up[chosen[:, slot]].float())
            gate, up = h.chunk(2, -1)
            y = y + weights[:, slot, None] * torch.einsum("tn,thn->th", F.silu(gate) * up,
                                                          down[chosen[:, slot]].float())
        return y

    def test_both_ways_give_what_a_plain_block_gives(self):
        whole = [torch.cat([random(r, 8, 64, 64, seed=41) for r in range(2)]).mul_(0.2),
                 torch.cat([random(r, 8, 64, 32, seed=42) for r in range(2)]).mul_(0.2)]

        def body(group):
            torch.manual_seed(0)  # what is not split is the same on all ranks
            block, mine = moe_block.MoeBlock(self.SMALL, group), slice(8 * group.rank, 8 * group.rank + 8)
            block.bias.copy_(random(0, 16).float() * 0.05)
            block.gate_up.data.copy_(whole[0][mine])
            block.down.data.copy_(whole[1][mine])
            x = random(group.rank, 3, 9, 64)
            want = self.plain(block, x.view(-1, 64), *whole).view_as(x)
            chosen, weights = block.route(x.view(-1, 64))
            self.assertTrue(torch.allclose(weights.sum(-1), torch.full((27,), 2.5)))
            self.assertTrue(all(len(set((row // 4).tolist())) <= 2 and len(set(row.tolist())) == 4 for row in chosen))
            results = []
            for block.one_call in (True, False):
                results.append(apart(block(x), want))
                self.assertEqual(block.status[1:5].tolist(), [0, 0, -1, 0])
            return max(results)
        for worst in run(2, body):
            self.assertLess(worst, 0.06)

    def test_both_ways_have_the_same_gradients(self):
        for found in run(2, lambda group: moe_block.both_ways(self.SMALL, group, 32 - 16 * group.rank, rounds=1)):
            self.assertLess(found["apart"], 0.02)
            self.assertGreater(min(found["one_call_us"], found["by_parts_us"]), 0)

    def test_the_block_compiles_in_one_graph_with_its_backward(self):
        def body(group):
            torch.manual_seed(0)
            block, x, worst = moe_block.MoeBlock(self.SMALL, group), random(0, 24, 64), []
            for block.one_call in (True, False):
                plain = moe_block.forward_and_backward(block, x, group)
                torch._dynamo.reset()
                worst.append(moe_block.furthest(
                    moe_block.forward_and_backward(torch.compile(block, fullgraph=True, backend="aot_eager"), x, group),
                    plain))
            return max(worst)
        self.assertLess(run(1, body)[0], 0.02)


class Refused(unittest.TestCase):
    """Bad input gets a clear error, and no launch."""

    def test_bad_input_is_named(self):
        def body(group):
            plan = perseus.moe_plan(max_tokens=8, hidden=64, experts=4, top_k=2, inner=32, group=group)
            alone = perseus.moe_plan(max_tokens=8, hidden=64, experts=4, top_k=2, group=group)
            x, chosen, router = random(0, 8, 64), torch.zeros(8, 2, dtype=torch.int64), torch.ones(8, 2)
            first, second = random(0, 4, 64, 64), random(0, 4, 32, 64)
            d = perseus.moe_dispatch(x, chosen, router, plan)
            for error, text, call in (
                    (TypeError, "moe_dispatch: tokens is torch.float32",
                     lambda: perseus.moe_dispatch(x.float(), chosen, router, plan)),
                    (ValueError, r"tokens has shape \(8, 32\)",
                     lambda: perseus.moe_dispatch(random(0, 8, 32), chosen, router, plan)),
                    (TypeError, "chosen is torch.int32", lambda: perseus.moe_dispatch(x, chosen.int(), router, plan)),
                    (ValueError, r"router_weights has shape \(8, 3\)",
                     lambda: perseus.moe_dispatch(x, chosen, torch.ones(8, 3), plan)),
                    (ValueError, "tokens has 9 rows, and the plan's max_tokens is 8", lambda: perseus.moe_dispatch(
                        random(0, 9, 64), torch.zeros(9, 2, dtype=torch.int64), torch.ones(9, 2), plan)),
                    (ValueError, "capacity 128 and maps of .* bytes; the plan has",
                     lambda: perseus.moe_dispatch(x, chosen, router, plan._replace(capacity=128))),
                    (ValueError, "3 sizes; they are the 13",
                     lambda: perseus.moe_dispatch(x, chosen, router, plan._replace(sizes=(1, 2, 3)))),
                    (ValueError, r"rows has shape \(128, 64\)", lambda: perseus.moe_combine(random(0, 128, 64), d)),
                    (ValueError, r"residual has shape \(7, 64\)",
                     lambda: perseus.moe_combine(d.rows, d, random(0, 7, 64))),
                    (ValueError, "maps has shape", lambda: perseus.moe_combine(d.rows, d._replace(maps=d.maps[:256]))),
                    (TypeError, "moe_layer: plan is of type Group; it must be a perseus.MoePlan",
                     lambda: perseus.moe_layer(x, chosen, router, first, second, group)),
                    (TypeError, "moe_dispatch: plan is of type str",
                     lambda: perseus.moe_dispatch(x, chosen, router, group.name)),
                    (TypeError, "moe_combine: dispatched is of type Tensor",
                     lambda: perseus.moe_combine(d.rows, d.rows)),
                    (ValueError, "the plan has no layer",
                     lambda: perseus.moe_layer(x, chosen, router, first, second, alone)),
                    (ValueError, r"gate_up has shape \(4, 64, 32\)",
                     lambda: perseus.moe_layer(x, chosen, router, random(0, 4, 64, 32), second, plan)),
                    (TypeError, r"gate_up is a list of \['Tensor'\]; it must be a tensor, or a pair of them",
                     lambda: perseus.moe_layer(x, chosen, router, [first], second, plan)),
                    (TypeError, r"gate_up is a tuple of \['Tensor', 'NoneType'\]",
                     lambda: perseus.moe_layer(x, chosen, router, (first, None), second, plan)),
                    (TypeError, "gate_up is a NoneType",
                     lambda: perseus.moe_layer(x, chosen, router, None, second, plan)),
                    (TypeError, "down is None; it must be a tensor",
                     lambda: perseus.moe_layer(x, chosen, router, first, None, plan)),
                    (ValueError, r"down has shape \(2, 32, 64\)",
                     lambda: perseus.moe_layer(x, chosen, router, first, random(0, 2, 32, 64), plan)),
                    (ValueError, "activation 'tanh' is none of none, relu", lambda: perseus.moe_plan(
                        max_tokens=8, hidden=64, experts=4, top_k=2, activation="tanh", group=group)),
                    (perseus.PerseusError, "hidden|multiples of 8",
                     lambda: perseus.moe_plan(max_tokens=8, hidden=60, experts=4, top_k=2, group=group))):
                with self.assertRaisesRegex(error, text):
                    call()
            return float((perseus.moe_combine(d.rows, d).float() - 2 * x.float()).abs().max())
        self.assertEqual(run(1, body), [0.0])

    def test_numbers_are_those_of_the_header(self):
        lib = perseus.library()
        names = [name for name, _ in lib.prs_moe_shape._fields_ if name not in ("reserved", "scaling")]
        self.assertEqual([names[i] for i in (moe.TOKENS, moe.HIDDEN, moe.COLUMNS, moe.EXPERTS, moe.TOP_K, moe.CAPACITY,
                                             moe.LINEAR_LAYOUT, moe.ACTIVATION, moe.GATED, moe.LAYER,
                                             moe.LOGICAL_EXPERTS, moe.REPLICAS, moe.DTYPE)],
                         ["tokens", "hidden", "columns", "experts", "top_k", "capacity", "weights_transposed",
                          "activation", "gated", "layer", "logical_experts", "replicas", "dtype"])
        self.assertEqual(len(names), moe.SIZES)
        self.assertEqual(len(lib.prs_moe_row._fields_), moe.ORIGIN_WORDS)
        self.assertEqual(moe.ACTIVATIONS,
                         {name: getattr(lib, f"PRS_ACTIVATION_{name.upper()}") for name in moe.ACTIVATIONS})


if __name__ == "__main__":
    ranks.main()
