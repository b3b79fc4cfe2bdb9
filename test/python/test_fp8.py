# SPDX-License-Identifier: Apache-2.0
"""Products of bfloat16 whose forward pass is in FP8, and layers of them, on emulated GPUs."""
import copy
import gc
import time
import unittest

import ranks
import torch
import torch.nn.functional as F
from ranks import random, run

import perseus
from perseus import fp8

PAIRS = (("fp8_all_gather_matmul", "all_gather_matmul"), ("fp8_matmul_reduce_scatter", "matmul_reduce_scatter"),
         ("fp8_matmul_all_reduce", "matmul_all_reduce"), ("fp8_replicated_matmul", "replicated_matmul"))


def dequantised(x, block):
    numbers, scale = perseus.quantise_reference(x, block)
    rows, columns = (n if size == -1 else size for size, n in zip(block, x.shape))
    return numbers.double() * scale.double().repeat_interleave(rows, 0)[:x.shape[0]].repeat_interleave(columns, 1)


def apart(have, want):
    """Over the root mean square."""
    return float((have.double() - want.double()).abs().max() / want.double().square().mean().sqrt())


def mean_error(have, want):
    return float((have.double() - want.double()).norm() / want.double().norm())


class Fp8(unittest.TestCase):
    N, K = 144, 256

    def operands(self, rank, op):
        same = op == "fp8_replicated_matmul"
        return random(0 if same else rank, 24, self.K), random(rank, self.N, self.K, seed=1), random(3, self.N, seed=4)

    def test_results_are_the_products_of_what_is_quantised(self):
        def body(group):
            worst = 0
            for recipe, (of_a, of_weight) in fp8.RECIPES.items():
                for op, _ in PAIRS:
                    a, w, bias = self.operands(group.rank, op)
                    have = getattr(perseus, op)(a, w.t(), group, bias=bias, recipe=recipe)
                    every = [self.operands(r, op) for r in range(2)]
                    wide = [dequantised(x[0], of_a) for x in every], [dequantised(x[1], of_weight) for x in every]
                    if op == "fp8_all_gather_matmul":
                        want = torch.cat(wide[0]) @ wide[1][group.rank].t()
                    elif op == "fp8_replicated_matmul":
                        want = wide[0][0] @ wide[1][group.rank].t()
                    else:
                        want = sum(x @ y.t() for x, y in zip(*wide))
                    want = want + bias.double()
                    if op == "fp8_matmul_reduce_scatter":
                        want = want.chunk(2)[group.rank]
                    self.assertEqual((have.shape, have.dtype), (want.shape, torch.bfloat16))
                    worst = max(worst, apart(have, want))
            return worst
        for worst in run(2, body):
            self.assertLess(worst, 0.03)

    def test_a_rank_that_is_late_can_still_quantise(self):
        """Its GPU is not that of the rank that waits for it."""
        def body(group):
            a, w, _ = self.operands(group.rank, "")
            for _ in range(3):  # the first opens a plan, for which ranks wait; the last says what failed before it
                c = perseus.fp8_all_gather_matmul(a, w.t(), group)
                time.sleep(0.5 * group.rank)
            return tuple(c.shape)
        self.assertEqual(run(2, body, timeout_ms=20000), [(48, self.N)] * 2)

    def test_gradients_are_those_of_bfloat16(self):
        def gradients(op, group, a, w, bias, **recipe):
            inputs = [t.clone().requires_grad_() for t in (a, w, bias)]
            c = op(inputs[0], inputs[1].t(), group, bias=inputs[2], **recipe)
            c.backward(random(5, *c.shape))
            return [t.grad for t in inputs]

        def body(group):
            differ = 0
            for ours, plain in PAIRS:
                want = gradients(getattr(perseus, plain), group, *self.operands(group.rank, ours))
                for recipe in fp8.RECIPES:
                    found = gradients(getattr(perseus, ours), group, *self.operands(group.rank, ours), recipe=recipe)
                    differ += sum(int((x != y).sum()) for x, y in zip(found, want))
            return differ
        self.assertEqual(run(2, body), [0, 0])

    def test_layers_multiply_in_fp8(self):
        x = random(0, 32, 128)

        def body(group, options):
            up = perseus.nn.ColumnParallelLinear(128, 256, group, bias=True, **options)
            down = perseus.nn.RowParallelLinear(256, 128, group, bias=True, **options)
            for seed, layer in enumerate((up, down)):  # ranks are threads, and share a generator
                weight = perseus.nn.local(layer.weight.detach())
                weight.copy_(random(group.rank, *weight.shape, seed=seed) * 0.1)
            mine = (x.chunk(2)[group.rank] if options["sequence_parallel"] else x).clone().requires_grad_()
            y = down(F.silu(up(mine)))
            y.float().square().sum().backward()
            return y.detach(), mine.grad, up.weight.grad, down.weight.grad
        for parallel in (True, False):
            plain = run(2, lambda group: body(group, {"sequence_parallel": parallel}))
            for recipe in fp8.RECIPES:
                found = run(2, lambda group: body(group, {"sequence_parallel": parallel, "fp8": recipe}))
                for have, want in zip(found, plain):
                    self.assertGreater(mean_error(have[0], want[0]), 0.01)  # bfloat16 alone: 0.004
                    for a, b in zip(have, want):
                        self.assertLess(mean_error(a, b), 0.1)

    def keep(self):
        perseus.nn.keep_quantised_weights()
        self.addCleanup(perseus.nn.keep_quantised_weights, False)

    def test_no_change_of_a_weight_is_missed_unless_weights_are_kept(self):
        """torch counts none of these writes."""
        def body(group):
            layer, x, wrong = perseus.nn.ColumnParallelLinear(128, 64, group, fp8="rows"), random(0, 16, 128), []
            for what, write in (("data", lambda: layer.weight.data.mul_(2)),
                                ("a collective", lambda: group.process_group.allreduce([layer.weight.detach()])),
                                ("shared memory", lambda: torch.from_dlpack(layer.weight.detach()).mul_(2))):
                with torch.no_grad():
                    layer(x)
                    write()
                    have = layer(x)
                if int((have != layer(x)).sum()):
                    wrong.append(what)
            return wrong
        self.assertEqual(run(1, body), [[]])

    def test_weights_are_quantised_again_when_they_have_changed(self):
        """What a layer gives without gradients is what it gives with them, whatever changed the weight."""
        self.keep()
        x = random(0, 32, 128)

        def body(group):
            layer, wrong = perseus.nn.RowParallelLinear(128, 64, group, fp8="blocks"), []
            other = perseus.nn.RowParallelLinear(128, 64, group, fp8="blocks")
            mine, weight = x.clone(), perseus.nn.local(layer.weight.detach())

            def right(what, layer=layer):
                with torch.no_grad():
                    first, again = layer(mine), layer(mine)
                if int((first != layer(mine)).sum() + (again != first).sum()):
                    wrong.append(what)
                return first

            def differs(what, *tensors):
                if not all(int((t != tensors[0]).sum()) for t in tensors[1:]):
                    wrong.append(f"{what} changes nothing")
            was = right("at first")
            weight.mul_(2)
            differs("a write in place", was, now := right("a write in place"))
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
            layer(mine).float().square().sum().backward()
            optimizer.step()
            differs("an optimizer's step", now, was := right("an optimizer's step"))
            layer.load_state_dict(other.state_dict())
            differs("load_state_dict()", was, right("load_state_dict()"))
            twin = copy.deepcopy(layer)
            perseus.nn.local(twin.weight.detach()).mul_(3)
            differs("a copy", right("the copied"), right("a copy", twin))
            with torch.inference_mode():
                perseus.nn.local(layer.weight.detach()).mul_(0.5)
                right("inference mode")
            layer.weight.requires_grad_(False)
            was = right("a frozen weight")
            perseus.nn.local(layer.weight).data = perseus.nn.local(layer.weight).data * 2
            differs("other memory", was, right("other memory"))
            perseus.nn.local(layer.weight).data.mul_(2)  # which torch does not count
            perseus.nn.forget_quantised_weights()
            right("what was forgotten")
            return wrong
        self.assertEqual(run(1, body), [[]])

    def test_a_weight_is_quantised_once_while_it_does_not_change(self):
        def body(group):
            layer, calls = perseus.nn.ColumnParallelLinear(128, 64, group, fp8="blocks"), []

            def counted(x, block, column_major):
                calls.append(block)
                return quantise(x, block, column_major)
            quantise, fp8._quantise = fp8._quantise, counted
            try:
                for _ in range(3):
                    with torch.no_grad():
                        layer(random(0, 16, 128))
                kept = calls.count([128, 128])
                for _ in range(2):  # of a weight that will change
                    layer(random(0, 16, 128))
                held = len(fp8._kept)
                del layer
                gc.collect()
                return kept, calls.count([128, 128]), held - len(fp8._kept)
            finally:
                fp8._quantise = quantise
        self.keep()
        self.assertEqual(run(1, body), [(1, 3, 1)])

    def test_layers_are_compiled_without_a_graph_break(self):
        def body(group):
            layer = perseus.nn.ColumnParallelLinear(128, 64, group, fp8="rows")
            x = random(0, 16, 128)
            return int((torch.compile(layer, fullgraph=True, backend="aot_eager")(x) != layer(x)).sum())
        self.assertEqual(run(1, body), [0])

    def test_what_cannot_be_is_refused_by_name(self):
        def body(group):
            a, w, bias = self.operands(0, "")
            multiply = perseus.fp8_all_gather_matmul
            for call, error, why in (
                    (lambda: multiply(a, w.t(), group, recipe="columns"), ValueError,
                     "recipe is 'columns'; it must be None or one of 'rows', 'blocks'"),
                    (lambda: multiply(a.half(), w.half().t(), group), TypeError, "a is torch.float16"),
                    (lambda: multiply(a, w.t().contiguous(), group), ValueError, r"it must be weight.t\(\)"),
                    (lambda: multiply(a[:, :144].contiguous(), w[:, :144].contiguous().t(), group), ValueError,
                     "a multiple of 128"),
                    (lambda: multiply(a[:6], w.t(), group), ValueError, "a has 6 rows; with scales of blocks"),
                    (lambda: multiply(a, w.t(), group, bias=bias[1:]), ValueError, "bias has shape"),
                    (lambda: perseus.nn.ColumnParallelLinear(128, 64, group, fp8="block"), ValueError,
                     "ColumnParallelLinear: fp8 is 'block'"),
                    (lambda: perseus.parallel.RowwiseParallel(fp8="block"), ValueError, "RowwiseParallel: fp8 is"),
            ):
                with self.assertRaisesRegex(error, why):
                    call()
            return 0
        self.assertEqual(run(1, body), [0])


if __name__ == "__main__":
    ranks.main()
