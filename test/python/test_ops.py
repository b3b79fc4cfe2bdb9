# SPDX-License-Identifier: Apache-2.0
"""The ops on emulated GPUs, compared with torch on the CPU."""
import ctypes
import os
import tempfile
import unittest
from unittest import mock

import ranks
import torch
from ranks import beyond, random, run

import perseus
from perseus import ops


def product(a, b):
    return a.double() @ b.double()


def weights(rank, k, n, transposed, dtype=torch.bfloat16):
    return random(rank, n, k, seed=1, dtype=dtype).t() if transposed else random(rank, k, n, seed=1, dtype=dtype)


class Products(unittest.TestCase):
    def each(self, body):
        for world in (1, 2, 4):
            for transposed in (False, True):
                with self.subTest(world=world, transposed=transposed):
                    self.assertEqual(run(world, lambda g: body(g, transposed)), [0] * world)

    def test_all_gather_matmul_multiplies_the_rows_of_all_ranks(self):
        def body(group, transposed):
            b = weights(group.rank, 128, 264, transposed)
            c = perseus.all_gather_matmul(random(group.rank, 64, 128), b, group)
            whole = torch.cat([random(r, 64, 128) for r in range(group.world)])
            return beyond(c, [product(whole, b)])
        self.each(body)

    def test_matmul_reduce_scatter_gives_a_rank_its_rows_of_the_sum(self):
        def body(group, transposed):
            m = 64 * group.world
            c = perseus.matmul_reduce_scatter(random(group.rank, m, 72),
                                              weights(group.rank, 72, 136, transposed), group)
            mine = slice(group.rank * 64, group.rank * 64 + 64)
            return beyond(c, [product(random(r, m, 72), weights(r, 72, 136, transposed))[mine]
                              for r in range(group.world)])
        self.each(body)

    def test_matmul_all_reduce_gives_all_ranks_the_sum(self):
        def body(group, transposed):
            c = perseus.matmul_all_reduce(random(group.rank, 200, 72), weights(group.rank, 72, 136, transposed), group)
            return beyond(c, [product(random(r, 200, 72), weights(r, 72, 136, transposed)) for r in range(group.world)])
        self.each(body)

    def test_tuning_is_kept_and_plans_take_it(self):
        def body(group):
            b = weights(group.rank, 64, 96, True)
            parts = [random(r, 64, 64) for r in range(group.world)]
            want = [product(p, weights(r, 64, 96, True))[group.rank * 32:][:32] for r, p in enumerate(parts)]
            bad = beyond(perseus.matmul_reduce_scatter(parts[group.rank], b, group), want)
            perseus.tune("matmul_reduce_scatter", 64, 96, 64, group, rounds=1)
            plan = group.product(ops.REDUCE_SCATTER, 64, 96, 64, True, 0, 0)
            info = group.library.prs_gemm_info()
            group.library.prs_gemm_plan_query(plan.handle, ctypes.byref(info))
            return bad + beyond(perseus.matmul_reduce_scatter(parts[group.rank], b, group), want), info.reason
        with tempfile.NamedTemporaryFile() as file, mock.patch.dict(os.environ, PERSEUS_FUSED_TUNING=file.name):
            self.assertEqual(run(2, body), [(0, b"tuning file")] * 2)
            self.assertEqual(len(file.read().splitlines()), 1)
        with self.assertRaisesRegex(ValueError, "PERSEUS_FUSED_TUNING is not set"):
            perseus.tune("matmul_reduce_scatter", 64, 96, 64)
        with self.assertRaisesRegex(ValueError, "one of all_gather_matmul"):
            perseus.tune("matmul", 64, 96, 64)

    def test_any_number_of_rows_is_multiplied(self):
        """Plans are shared by classes of rows, and the results of all-reduces lie in one buffer: sizes go up and
        down."""
        def body(group):
            bad = 0
            for rows in (1, 33, 8, 100, 3, 64):
                m = rows * group.world
                a, b = random(group.rank, m, 64, seed=rows), weights(group.rank, 64, 96, True)
                partials = [product(random(r, m, 64, seed=rows), weights(r, 64, 96, True)) for r in range(group.world)]
                mine = slice(group.rank * rows, (group.rank + 1) * rows)
                bad += beyond(perseus.matmul_reduce_scatter(a, b, group), [p[mine] for p in partials])
                bad += beyond(perseus.matmul_all_reduce(a, b, group), partials)
                bad += beyond(perseus.all_gather_matmul(a[mine].contiguous(), b, group),
                              [product(torch.cat([random(r, m, 64, seed=rows)[r * rows:(r + 1) * rows]
                                                  for r in range(group.world)]), b)])
            return bad
        self.assertEqual(run(2, body), [0, 0])

    def test_an_all_reduce_takes_rows_that_the_ranks_do_not_divide(self):
        def body(group):
            b = weights(group.rank, 64, 96, True)
            return sum(beyond(perseus.matmul_all_reduce(random(group.rank, m, 64), b, group),
                              [product(random(r, m, 64), weights(r, 64, 96, True)) for r in range(group.world)])
                       for m in (1, 33, 31, 32, 63))
        self.assertEqual(run(2, body), [0, 0])

    def test_a_bias_is_added_once(self):
        def body(group):
            b, bias = weights(group.rank, 64, 96, True), random(7, 96).mul(8)
            a, wide = random(group.rank, 32, 64), bias.double().expand(1, 96)
            whole = torch.cat([random(r, 32, 64) for r in range(group.world)])
            partials = [product(random(r, 32, 64), weights(r, 64, 96, True)) for r in range(group.world)]
            mine = slice(group.rank * 16, group.rank * 16 + 16)
            return [beyond(perseus.all_gather_matmul(a, b, group, bias=bias), [product(whole, b), wide]),
                    beyond(perseus.matmul_reduce_scatter(a, b, group, bias=bias), [p[mine] for p in partials] + [wide]),
                    beyond(perseus.matmul_all_reduce(a, b, group, bias=bias), partials + [wide]),
                    beyond(perseus.replicated_matmul(a, b, group, bias=bias), [product(a, b), wide])]
        self.assertEqual(run(2, body), [[0] * 4] * 2)

    def test_float16_is_multiplied_as_precisely_as_it_is(self):
        half = {"dtype": torch.float16}

        def body(group):
            mine, bias = slice(group.rank * 16, group.rank * 16 + 16), random(7, 96, **half)
            parts, ws = ([random(r, 32, 64, **half) for r in range(group.world)],
                         [weights(r, 64, 96, True, **half) for r in range(group.world)])
            a, b, partials = parts[group.rank], ws[group.rank], [product(x, y) for x, y in zip(parts, ws)]
            wide = bias.double().expand(1, 96)
            results = [(perseus.all_gather_matmul(a, b, group, bias=bias), [product(torch.cat(parts), b), wide]),
                       (perseus.all_gather_matmuls(a, [b, b], group)[0], [product(torch.cat(parts), b)]),
                       (perseus.matmul_reduce_scatter(a, b, group), [p[mine] for p in partials]),
                       (perseus.matmul_all_reduce(a, b, group), partials),
                       (torch.ops.perseus.fused_matmul_reduce_scatter(a, b, "sum", 0, group.name),
                        [p[mine] for p in partials])]
            same = perseus.matmul_all_reduce(a.bfloat16(), b.bfloat16(), group).dtype  # a plan of its own
            return [beyond(c, want) for c, want in results], [c.dtype for c, _ in results], same
        self.assertEqual(run(2, body), [([0] * 5, [torch.float16] * 5, torch.bfloat16)] * 2)

    def test_results_may_be_float32(self):
        def body(group, dtype):
            mine, out = slice(group.rank * 16, group.rank * 16 + 16), {"out_dtype": torch.float32}
            parts, ws = ([random(r, 32, 64, dtype=dtype) for r in range(group.world)],
                         [weights(r, 64, 96, True, dtype) for r in range(group.world)])
            a, b, partials, bias = (parts[group.rank], ws[group.rank], [product(x, y) for x, y in zip(parts, ws)],
                                    random(7, 96, dtype=dtype))
            gathered = perseus.all_gather_matmul(a, b, group, bias=bias, **out)
            # nothing is rounded
            exact = (gathered.double() - (product(torch.cat(parts), b) + bias.double())).abs().max() < 1e-5
            results = [(gathered, [product(torch.cat(parts), b) + bias.double()]),
                       (perseus.matmul_reduce_scatter(a, b, group, **out), [p[mine] for p in partials]),
                       (perseus.matmul_all_reduce(a, b, group, **out), partials)]
            return bool(exact), [beyond(c, want) for c, want in results], [c.dtype for c, _ in results]
        for dtype in (torch.bfloat16, torch.float16):
            self.assertEqual(run(2, lambda g: body(g, dtype)), [(True, [0] * 3, [torch.float32] * 3)] * 2)

    def test_no_rows_give_no_rows(self):
        def body(group):
            b = weights(0, 64, 96, True)
            empty = torch.empty(0, 64, dtype=torch.bfloat16)
            return [tuple(op(empty, b, group).shape)
                    for op in (perseus.all_gather_matmul, perseus.matmul_reduce_scatter, perseus.matmul_all_reduce)]
        self.assertEqual(run(2, body), [[(0, 96)] * 3] * 2)

    def test_sizes_that_the_fused_kernels_cannot_run_are_multiplied_too(self):
        def body(group):
            c = perseus.matmul_reduce_scatter(random(group.rank, 20, 33), weights(group.rank, 33, 19, False), group)
            mine = slice(group.rank * 10, group.rank * 10 + 10)
            return beyond(c, [product(random(r, 20, 33), weights(r, 33, 19, False))[mine] for r in range(group.world)])
        self.assertEqual(run(2, body), [0, 0])

    def test_a_plan_serves_all_sizes_of_its_class(self):
        def body(group):
            for rows in (40, 50, 64):
                perseus.matmul_reduce_scatter(random(group.rank, rows * 2, 64),
                                              weights(group.rank, 64, 96, True), group)
            return len(group._plans)
        for plans in run(2, body):
            self.assertEqual(plans, 1)


class SymmMem(unittest.TestCase):
    """The signatures of torch.ops.symm_mem, compared with what torch documents."""

    def test_fused_all_gather_matmul_gathers_along_any_leading_dimension(self):
        def body(group, dim, return_A):
            parts = [random(r, 6, 8, 64, seed=4) for r in range(group.world)]
            bs = [weights(group.rank, 64, n, True) for n in (96, 40)]
            gathered, products = torch.ops.perseus.fused_all_gather_matmul(parts[group.rank], bs, dim, group.name,
                                                                           return_A=return_A)
            whole = torch.cat(parts, dim)
            self.assertEqual(gathered is None, not return_A)
            same = gathered is None or torch.equal(gathered, whole)
            return [0 if same else 1, *(beyond(c, [product(whole, b)]) for c, b in zip(products, bs))]
        for dim in (0, 1):
            for return_A in (True, False):
                self.assertEqual(run(2, lambda g: body(g, dim, return_A)), [[0, 0, 0]] * 2)

    def test_plain_matrices_are_multiplied_with_and_without_a_mode_that_watches(self):
        """Without gradients and modes the drop-in ops go straight to the implementation."""
        from torch.utils._python_dispatch import TorchDispatchMode

        class Watch(TorchDispatchMode):
            def __init__(self):
                super().__init__()
                self.seen = set()

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                self.seen.add(func.overloadpacket.__name__)
                return func(*args, **(kwargs or {}))

        def once(group):
            a, bs = random(group.rank, 32, 64, seed=6), [weights(group.rank, 64, n, True) for n in (40, 96)]
            whole = torch.cat([random(r, 32, 64, seed=6) for r in range(group.world)])
            gathered, products = torch.ops.perseus.fused_all_gather_matmul(a, bs, 0, group.name, return_A=True)
            bad = [0 if torch.equal(gathered, whole) else 1,
                   *(beyond(c, [product(whole, b)]) for c, b in zip(products, bs))]
            none, (c,) = torch.ops.perseus.fused_all_gather_matmul(a, bs[:1], 0, group.name, return_A=False)
            bad += [0 if none is None else 1, beyond(c, [product(whole, bs[0])])]
            d = torch.ops.perseus.fused_matmul_reduce_scatter(a, bs[0], "sum", 0, group.name)
            mine = slice(group.rank * 32 // group.world, (group.rank + 1) * 32 // group.world)
            return [*bad, beyond(d, [product(random(r, 32, 64, seed=6), weights(r, 64, 40, True))[mine]
                                     for r in range(group.world)])]

        def body(group):
            plain = once(group)
            with Watch() as watch:
                watched = once(group)
            return plain, watched, {"all_gather_matmuls", "all_gather_matmul", "matmul_reduce_scatter"} <= watch.seen
        self.assertEqual(run(2, body), [([0] * 6, [0] * 6, True)] * 2)

    def test_fused_matmul_reduce_scatter_scatters_along_any_leading_dimension(self):
        def body(group, dim, op):
            parts = [random(r, 6, 8, 64, seed=5) for r in range(group.world)]
            c = torch.ops.perseus.fused_matmul_reduce_scatter(parts[group.rank], weights(group.rank, 64, 96, True), op,
                                                              dim, group.name)
            share = 1 if op == "sum" else group.world
            return beyond(c, [product(p, weights(r, 64, 96, True)).chunk(group.world, dim)[group.rank] / share
                              for r, p in enumerate(parts)])
        for dim in (0, 1):
            for op in ("sum", "avg"):
                self.assertEqual(run(2, lambda g: body(g, dim, op)), [0, 0])

    def test_the_schemas_are_those_of_symm_mem(self):
        import torch.distributed._symmetric_memory  # noqa: F401
        for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
            ours, theirs = (str(getattr(getattr(torch.ops, space), name).default._schema)
                            for space in ("perseus", "symm_mem"))
            self.assertEqual(ours.replace("perseus::", ""), theirs.replace("symm_mem::", ""))

    def test_dimensions_that_do_not_exist_are_refused(self):
        def body(group):
            a, b = random(0, 8, 64), weights(0, 64, 96, True)
            with self.assertRaisesRegex(ValueError, "gather_dim 1 is not a leading dimension"):
                torch.ops.perseus.fused_all_gather_matmul(a, [b], 1, group.name)
            with self.assertRaisesRegex(ValueError, "reduce_op 'max'"):
                torch.ops.perseus.fused_matmul_reduce_scatter(a, b, "max", 0, group.name)
        run(1, body)


class Moe(unittest.TestCase):
    def check(self, transposed):
        experts, top_k, hidden, columns, world = 8, 2, 64, 96, 2
        counts = (70, 33)

        def inputs(rank):
            generator = torch.Generator().manual_seed(rank)
            chosen = torch.rand(counts[rank], experts, generator=generator).topk(top_k).indices
            return (random(rank, counts[rank], hidden, seed=8), chosen,
                    torch.rand(counts[rank], top_k, generator=generator))

        def body(group):
            tokens, chosen, router = inputs(group.rank)
            shape = (experts // world, columns, hidden) if transposed else (experts // world, hidden, columns)
            own = random(group.rank, *shape, seed=9)
            own = own.transpose(1, 2) if transposed else own
            capacity = perseus.moe_capacity(max_tokens=128, hidden=hidden, columns=columns, experts=experts,
                                            top_k=top_k, group=group)
            out, rows, expert_rows, status = perseus.moe_dispatch_gemm(tokens, chosen, router, own, max_tokens=128,
                                                                       capacity=capacity, group=group)
            self.assertEqual(status[1:5].tolist(), [0, 0, -1, 0])
            seen = 0
            for e in range(experts // world):
                first, number = expert_rows[e].tolist()
                for at in range(first, first + number):
                    source, token, slot = rows[at, :3].tolist()
                    theirs = inputs(source)
                    self.assertEqual(int(theirs[1][token, slot]), group.rank * experts // world + e)
                    self.assertEqual(float(rows[at, 3].view(torch.float32)), float(theirs[2][token, slot]))
                    self.assertEqual(beyond(out[at:at + 1], [product(theirs[0][token:token + 1], own[e])]), 0)
                    seen += 1
            return seen
        self.assertEqual(sum(run(world, body)), sum(counts) * top_k)

    def test_moe_dispatch_gemm_multiplies_each_token_by_its_experts(self):
        for transposed in (False, True):
            with self.subTest(transposed=transposed):
                self.check(transposed)

    def test_the_status_counts_what_was_dropped_and_wrong_choices(self):
        def body(group):
            tokens, chosen = random(0, 200, 64), torch.zeros(200, 2, dtype=torch.int64)
            chosen[:, 1] = -1
            chosen[7, 1] = 2
            status = perseus.moe_dispatch_gemm(tokens, chosen, torch.ones(200, 2), random(0, 2, 64, 96), max_tokens=200,
                                               capacity=128, group=group)[3]
            group.check()
            return status[:4].tolist()
        self.assertEqual(run(1, body), [[256, 72, 1, 7]])

class Refused(unittest.TestCase):
    """Bad input gets a clear error, and no launch."""

    def refused(self, error, text, call):
        def body(group):
            with self.assertRaisesRegex(error, text):
                call(group)
            return beyond(perseus.all_gather_matmul(random(0, 64, 64), random(0, 64, 64), group),
                          [product(random(0, 64, 64), random(0, 64, 64))])
        self.assertEqual(run(1, body), [0])

    def test_operands_of_sizes_that_were_right_before(self):
        """What depends on sizes is found once; the rest is looked at in each call."""
        a, b = random(0, 32, 64), random(0, 96, 64).t()
        cases = [("a begins at", random(0, 32 * 64 + 1)[1:].view(32, 64), b, None),
                 ("a with shape .* has strides", random(0, 64, 32).t(), b, None),
                 ("b begins at", a, random(0, 96 * 64 + 1)[1:].view(96, 64).t(), None),
                 ("b with shape .* has strides", a, random(0, 96, 128)[:, ::2].t(), None),
                 ("b is torch.float16, and a", a, b.half(), None),
                 ("bias is torch.float16", a, b, random(0, 96).half()), ("bias has shape", a, b, random(0, 95))]

        def body(group):
            for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
                want = [product(a, b)]
                for _ in range(2):
                    self.assertEqual(beyond(getattr(perseus, op)(a, b, group, bias=random(0, 96).zero_()), want), 0)
                    for said, x, y, bias in cases:
                        with self.assertRaisesRegex((TypeError, ValueError), f"perseus.{op}: {said}"):
                            getattr(perseus, op)(x, y, group, bias=bias)
        run(1, body)

    def test_what_was_found_for_sizes_is_bounded(self):
        def body(group):
            with mock.patch.object(type(group.products), "MOST", 2):
                bad = sum(beyond(perseus.matmul_all_reduce(random(0, rows, 64), random(0, 64, 96), group),
                                 [product(random(0, rows, 64), random(0, 64, 96))]) for rows in (1, 2, 3, 4, 1))
            return bad, len(group.products) <= 2
        self.assertEqual(run(1, body), [(0, True)])

    def test_wrong_dtypes(self):
        half, wide = torch.zeros(8, 8, dtype=torch.float16), torch.zeros(8, 8)
        self.refused(TypeError, "a is torch.float32; it must be torch.bfloat16 or torch.float16",
                     lambda g: perseus.all_gather_matmul(wide, wide, g))
        self.refused(TypeError, "b is torch.float32; it must be", lambda g: perseus.matmul_all_reduce(half, wide, g))
        self.refused(TypeError, "b is torch.float16, and a torch.bfloat16: they must be equal",
                     lambda g: perseus.all_gather_matmul(random(0, 8, 8), half, g))
        self.refused(TypeError, "out_dtype is torch.float64; it must be torch.bfloat16, as a, or torch.float32",
                     lambda g: perseus.matmul_reduce_scatter(random(0, 8, 8), random(0, 8, 8), g,
                                                             out_dtype=torch.float64))
        self.refused(TypeError, "tokens is torch.float16; it must be torch.bfloat16",
                     lambda g: perseus.moe_dispatch_gemm(half, torch.zeros(8, 2, dtype=torch.int64), torch.zeros(8, 2),
                                                         random(0, 2, 8, 96), max_tokens=8, capacity=128, group=g))
        self.refused(TypeError, "q is torch.float16; it must be torch.bfloat16", lambda g: perseus.ring_attention(
            *[torch.zeros(1, 8, 1, 64, dtype=torch.float16)] * 3, g))
        self.refused(TypeError, "q is torch.float32",
                     lambda g: perseus.ring_attention(*[torch.zeros(1, 8, 1, 64)] * 3, g))
        self.refused(TypeError, "chosen is torch.int32", lambda g: perseus.moe_dispatch_gemm(
            random(0, 8, 64), torch.zeros(8, 2, dtype=torch.int32), torch.zeros(8, 2), random(0, 2, 64, 96),
            max_tokens=8, capacity=128, group=g))

    def test_what_is_no_tensor(self):
        self.refused(TypeError, "perseus.all_gather_matmul: b is None; it must be a tensor",
                     lambda g: perseus.all_gather_matmul(random(0, 8, 8), None, g))
        self.refused(TypeError, "block is 128; it must be two numbers",
                     lambda g: perseus.quantise(random(0, 8, 8), 128))

    def test_numbers_that_the_library_cannot_hold(self):
        """ctypes would pass -1 on as 4294967295."""
        sizes = {"hidden": 128, "experts": 4, "top_k": 2, "inner": 128}
        self.refused(ValueError, "tokens of prs_moe_shape is -1; it must be a number from 0 to 4294967295",
                     lambda g: perseus.moe_plan(max_tokens=-1, **sizes, group=g))
        self.refused(TypeError, "tokens of prs_moe_shape is '16', of type str; it must be a whole number",
                     lambda g: perseus.moe_plan(max_tokens="16", **sizes, group=g))

    def test_fields_that_the_library_does_not_have(self):
        """As of a package that is newer. ctypes would make attributes of them, which no launch reads."""
        lib = perseus.library()
        with self.assertRaisesRegex(TypeError, "prs_gemm_shape has no field of_tomorrow: the library is of another"):
            lib.prs_gemm_shape(m=8, of_tomorrow=1)
        with self.assertRaisesRegex(AttributeError, "of_tomorrow"):
            lib.prs_gemm_operands().of_tomorrow = 1
        with self.assertRaisesRegex(TypeError, r"m of prs_gemm_shape is tensor\(\[5, 6\]\), of type Tensor"):
            lib.prs_gemm_shape(m=torch.tensor([5, 6]))
        self.assertEqual(lib.prs_gemm_shape(m=torch.tensor(5)).m, 5)

    def test_wrong_calls_of_a_group(self):
        self.refused(ValueError, "rows has -1; they must be whole numbers of at least 1",
                     lambda g: g.prepare([8, -1], ("matmul_all_reduce", 128, 64)))
        self.refused(TypeError, "prepare: rows is 8; it must be a list of whole numbers",
                     lambda g: g.prepare(8, ("matmul_all_reduce", 128, 64)))
        self.refused(TypeError, r"a product is \('all_reduce', 128\); it must be \(op, n, k\)",
                     lambda g: g.prepare([8], ("all_reduce", 128)))
        self.refused(TypeError, "a product is 'all_reduce'", lambda g: g.prepare([8], "all_reduce"))
        self.refused(TypeError, "leave_out: ranks is 1.5; it must be a list", lambda g: g.leave_out(1.5))
        self.refused(ValueError, "rows has 'a'", lambda g: g.prepare("ab", ("matmul_all_reduce", 128, 64)))
        self.refused(TypeError, "dtype is torch.float32; it must be torch.bfloat16 or torch.float16",
                     lambda g: g.prepare([8], ("matmul_all_reduce", 128, 64), dtype=torch.float32))
        self.refused(ValueError, "leave_out: 5 is no rank of group .*: they are 0 to 0", lambda g: g.leave_out(5))
        self.refused(ValueError, "leave_out: 'x' is no rank", lambda g: g.leave_out("x"))
        self.refused(TypeError, "perseus.watch: group is of type float; it must be a perseus.Group",
                     lambda g: perseus.watch(0.5))

    def test_wrong_biases(self):
        self.refused(ValueError, r"bias has shape \(16,\)",
                     lambda g: perseus.all_gather_matmul(random(0, 8, 8), random(0, 8, 8), g, bias=random(0, 16)))
        self.refused(TypeError, "bias is torch.float32; it must be torch.bfloat16, as a",
                     lambda g: perseus.matmul_all_reduce(random(0, 8, 8), random(0, 8, 8), g, bias=torch.zeros(8)))

    def test_wrong_strides(self):
        self.refused(ValueError, r"a with shape \(8, 8\) has strides \(16, 1\); it must be row-major",
                     lambda g: perseus.all_gather_matmul(random(0, 8, 16)[:, :8], random(0, 8, 8), g))
        self.refused(ValueError, "row-major or the transpose of a row-major", lambda g: perseus.matmul_reduce_scatter(
            random(0, 8, 8), random(0, 8, 16)[:, :8], g))

    def test_wrong_alignment(self):
        shifted = torch.zeros(8 * 8 + 1, dtype=torch.bfloat16)[1:].view(8, 8)
        self.refused(ValueError, "aligned to 16 bytes",
                     lambda g: perseus.matmul_all_reduce(shifted, random(0, 8, 8), g))

    def test_memory_that_was_freed(self):
        """To the library it would be an operand that was not given: a product without its bias."""
        def freed(*shape):
            t = random(0, *shape) if whole else random(0, 2, *shape)[1]  # FSDP1's parameters are such views
            t.untyped_storage().resize_(0)
            return t

        def body(group):
            a, b, row = random(0, 32, 64), random(0, 64, 48), random(0, 48)
            plan = perseus.moe_plan(max_tokens=32, hidden=64, experts=2, top_k=1, inner=48, group=group)
            chosen, weights, down = torch.zeros(32, 1, dtype=torch.int64), torch.ones(32, 1), random(0, 2, 48, 64)
            perseus.matmul_all_reduce(a, b, group)  # its sizes are known from now on
            for what, call in (
                    ("matmul_all_reduce: a", lambda: perseus.matmul_all_reduce(freed(32, 64), b, group)),
                    ("matmul_all_reduce: b", lambda: perseus.matmul_all_reduce(a, freed(64, 48), group)),
                    ("matmul_all_reduce: bias", lambda: perseus.matmul_all_reduce(a, b, group, bias=freed(48))),
                    ("matmul_all_reduce_rms_norm: residual",
                     lambda: perseus.matmul_all_reduce_rms_norm(a, b, freed(32, 48), row, 1e-6, group)),
                    ("all_reduce: x", lambda: perseus.all_reduce(freed(32, 64), group)),
                    ("quantise: x", lambda: perseus.quantise(freed(32, 128))),
                    ("moe_layer: gate_up",
                     lambda: perseus.moe_layer(a, chosen, weights, freed(2, 64, 96), down, plan))):
                with self.assertRaisesRegex(ValueError, f"perseus.{what} with shape .* has no memory"):
                    call()
            self.assertEqual(perseus.matmul_all_reduce(a[:0], b, group).shape, (0, 48))
        for whole in (True, False):
            with self.subTest(whole=whole):
                run(1, body)

    def test_memory_that_a_parameter_does_not_have_yet(self):
        """Nobody would write the result."""
        def body(group):
            a, b = random(0, 32, 64), random(0, 64, 48)
            for op in ("all_gather_matmul", "matmul_all_reduce", "replicated_matmul"):
                call = getattr(perseus, op)
                with self.assertRaisesRegex(ValueError, f"perseus.{op}: b is on the meta device, and a on cpu"):
                    call(a, b.to("meta"), group)
                with self.assertRaisesRegex(ValueError, f"perseus.{op}: bias is on the meta device, and a on cpu"):
                    call(a, b, group, bias=random(0, 48).to("meta"))
                self.assertTrue(call(a.to("meta"), b.to("meta"), group).is_meta)
            with self.assertRaisesRegex(ValueError, "all_gather_matmuls: bs is on the meta device"):
                perseus.all_gather_matmuls(a, [b, b.to("meta")], group)
        run(1, body)

    def test_wrong_shapes(self):
        self.refused(ValueError, "a has 8 columns and b 16 rows",
                     lambda g: perseus.matmul_all_reduce(random(0, 8, 8), random(0, 16, 8), g))
        self.refused(ValueError, r"a has shape \(2, 8, 8\)",
                     lambda g: perseus.matmul_all_reduce(random(0, 2, 8, 8), random(0, 8, 8), g))
        self.refused(ValueError, "capacity 100 is not a multiple of 128", lambda g: perseus.moe_dispatch_gemm(
            random(0, 8, 64), torch.zeros(8, 2, dtype=torch.int64), torch.zeros(8, 2), random(0, 2, 64, 96),
            max_tokens=8, capacity=100, group=g))

    def test_wrong_devices(self):
        def body(group):
            real, (group.number, group.device) = (group.number, group.device), (0, torch.device("cuda", 0))
            with self.assertRaisesRegex(ValueError, "a is on cpu; group test.* works on cuda:0"):
                perseus.all_gather_matmul(random(0, 8, 8), random(0, 8, 8), group)
            group.number, group.device = real
        run(1, body)

    def test_rows_that_the_ranks_do_not_divide(self):
        def body(group):
            with self.assertRaisesRegex(ValueError, "a has 9 rows; the 2 ranks of group"):
                perseus.matmul_reduce_scatter(random(0, 9, 8), random(0, 8, 8), group)
        run(2, body)

    def test_a_group_that_is_closed(self):
        groups = run(1, lambda g: g)
        with self.assertRaisesRegex(perseus.PerseusError, "closed"):
            _ = groups[0].handle

    def test_numbers_are_those_of_the_header(self):
        lib = perseus.library()
        self.assertEqual([ops.GEMM, ops.REDUCE_SCATTER, ops.ALLGATHER, ops.ALLREDUCE],
                         [lib.PRS_GEMM_ALONE, lib.PRS_GEMM_REDUCE_SCATTER, lib.PRS_GEMM_ALLGATHER,
                          lib.PRS_GEMM_ALLREDUCE])
        self.assertEqual(ops._PRODUCTS, {torch.bfloat16: lib.PRS_DTYPE_BF16, torch.float16: lib.PRS_DTYPE_FP16})
        self.assertEqual(ops._FP32, lib.PRS_DTYPE_FP32)
        self.assertEqual(ops.MOE_STATUS_WORDS * 4, ctypes.sizeof(lib.prs_moe_status))


if __name__ == "__main__":
    ranks.main()
