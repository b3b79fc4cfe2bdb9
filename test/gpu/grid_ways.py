# SPDX-License-Identifier: Apache-2.0
"""The products of a tensor-parallel layer by each library, for grid.py: one call runs one product, or it and its
gradients, with each of several weights, so that no weight is found in L2. Matrices are of bf16, or of e4m3 with scales.

A call returns the results, weight by weight: [c] or [c, gradient of a, gradient of the weight].
"""
import collections
import ctypes

import torch
import torch.distributed.distributed_c10d as c10d

import perseus

L2_BYTES = 50 << 20
ROTATE_BYTES = 4 * L2_BYTES
FEWEST_WEIGHTS, MOST_WEIGHTS = 2, 32
# Fields of struct prs_gemm_tuning.
TUNING = ("path", "clusters", "band", "mover", "segments", "spread", "paced", "tiles_per_signal", "columns")
FUSED, UNFUSED = 1, 2  # enum prs_gemm_path
TYPE = torch.bfloat16
SCALINGS = {"tensor": 1, "rows": 2}  # enum prs_scaling
Scaled = collections.namedtuple("Scaled", "numbers scale")  # a matrix of e4m3: numbers * scale


def weights_of(n, k, numbers, rotate=ROTATE_BYTES):
    """How many weights are more than the cache holds."""
    return min(max(-(-rotate // (n * k * numbers.bytes)), FEWEST_WEIGHTS), MOST_WEIGHTS)


def _done(work):
    if work is not None:
        work.wait()


def gathered_rows(x, group):
    """The rows of all ranks, by the process group, as dist.all_gather_into_tensor() does it."""
    out = torch.empty(x.shape[0] * group.world, x.shape[1], dtype=x.dtype, device=x.device)
    options = c10d.AllgatherOptions()
    options.asyncOp = False
    _done(group.process_group._allgather_base(out.view(torch.uint8), x.view(torch.uint8), options))
    return out


def scattered_sum(x, group):
    """This rank's rows of the sum over the ranks, as dist.reduce_scatter_tensor() does it."""
    out = torch.empty(x.shape[0] // group.world, x.shape[1], dtype=x.dtype, device=x.device)
    options = c10d.ReduceScatterOptions()
    options.asyncOp = False
    _done(group.process_group._reduce_scatter_base(out, x, options))
    return out


# ---- what matrices are made of ----

class Bf16:
    """What A and B are made of, and what each library multiplies them by. made(x): a matrix near x, of fp32."""
    bytes, scale_bytes, scaling, dtype = 2, 0, 0, 0

    def made(self, x):
        return x.to(TYPE)

    def transposed(self, x):
        return x.t()

    def wide(self, x):
        return x.float()

    def negate(self, x):
        x.neg_()

    def gathered(self, x, group):
        return gathered_rows(x, group)

    def multiply(self, a, b):
        return torch.mm(a, b)

    def symm_gather(self, a, b, name):
        whole, (c,) = torch.ops.symm_mem.fused_all_gather_matmul(a, [b], 0, name)
        return c, whole

    def symm_scatter(self, a, b, name):
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, name)

    def op(self, gathers):
        return perseus.all_gather_matmul if gathers else perseus.matmul_reduce_scatter

    def operands(self, a, b, place):
        """Fields of struct prs_gemm_operands."""
        return {"a": place.read(a), "b": place.read(b)}


class E4m3(Bf16):
    """With a scale for each row of A and column of B, or for each matrix; sums are promoted to fp32."""
    bytes, dtype = 1, 4  # enum prs_dtype

    def __init__(self, scaling):
        self.scaling, self.rows = SCALINGS[scaling], scaling == "rows"
        self.scale_bytes = 4 if self.rows else 0  # of a row that travels

    def made(self, x):
        # A tensor's scale is the same on all ranks, as values are in -1 ... 1.
        scale = x.abs().amax(1, keepdim=True) / 448 if self.rows else torch.full((1, 1), 1 / 448, device=x.device)
        return Scaled((x / scale).to(torch.float8_e4m3fn), scale)

    def transposed(self, x):
        return Scaled(x.numbers.t(), x.scale.t())

    def wide(self, x):
        return x.numbers.float() * x.scale

    def negate(self, x):
        x.numbers.view(torch.uint8).bitwise_xor_(0x80)

    def gathered(self, x, group):
        return Scaled(gathered_rows(x.numbers, group), gathered_rows(x.scale, group) if self.rows else x.scale)

    def multiply(self, a, b):
        return torch._scaled_mm(a.numbers, b.numbers, a.scale, b.scale, out_dtype=TYPE, use_fast_accum=False)

    def symm_gather(self, a, b, name):
        _, (c,) = torch.ops.symm_mem.fused_all_gather_scaled_matmul(a.numbers, [b.numbers], a.scale, [b.scale], 0, name,
                                                                    [None], [None], [TYPE], [False])
        return c, None

    def symm_scatter(self, a, b, name):
        shape = [a.numbers.shape[0], b.numbers.shape[1]]
        return torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(a.numbers, b.numbers, a.scale, b.scale, "sum", 0,
                                                                     0, name, shape, None, None, TYPE, False)

    def op(self, gathers):
        scaled = perseus.all_gather_scaled_matmul if gathers else perseus.scaled_matmul_reduce_scatter
        return lambda a, b, group: scaled(a.numbers, b.numbers, a.scale, b.scale, group)

    def operands(self, a, b, place):
        return {"a": place.read(a.numbers), "b": place.read(b.numbers), "scale_a": place.read(a.scale),
                "scale_b": place.read(b.scale)}


def numbers_of(dtype, scaling):
    return Bf16() if dtype == "bf16" else E4m3(scaling)


# ---- operands ----

class Operands:
    """Of one product on this rank. `gathers`: all-gather + product, else product + reduce-scatter. n, k: this rank's.

    a, g: the input, and the gradient of the result. whole: what the products alone multiply.
    """

    def __init__(self, group, numbers, gathers, m, n, k, layout, weights, backward):
        self.group, self.numbers, self.gathers, self.m, self.n, self.k = group, numbers, gathers, m, n, k
        self.layout, self.weights, self.backward = layout, weights, backward
        own = m // group.world
        self.a = numbers.made(self.random(own if gathers else m, k))
        self.g = self.random(m if gathers else own, n).to(TYPE) if backward else None
        self.whole_a = numbers.gathered(self.a, group) if gathers else self.a
        self.whole_g = None if not backward else self.g if gathers else gathered_rows(self.g, group)
        self.signs = [1, 1]
        self.rooms = {}

    def random(self, *shape):
        return torch.rand(*shape, device=self.group.device).mul_(2).sub_(1)

    def room(self, key, rows, columns):
        """Memory for a result that all plans share: a result is looked at before another way runs."""
        if key not in self.rooms:
            self.rooms[key] = torch.empty(rows, columns, dtype=TYPE, device=self.group.device)
        return self.rooms[key]

    def b(self, w):
        """The second operand of the product."""
        return self.numbers.transposed(w) if self.layout == "nk" else w

    def weight_gradient(self, a, g):
        return torch.mm(g.t(), a) if self.layout == "nk" else torch.mm(a.t(), g)

    def turn(self, step):
        """Other inputs than in the step before, so that what it left in memory is wrong."""
        flips = [self.a, *([self.whole_a] if self.whole_a is not self.a else [])]
        self.signs[0] = -self.signs[0]
        if self.backward and step % 2:
            flips += [self.g, *([self.whole_g] if self.whole_g is not self.g else [])]
            self.signs[1] = -self.signs[1]
        for matrix in flips:
            (self.numbers if matrix is self.a or matrix is self.whole_a else Bf16()).negate(matrix)

    def sign_of(self, index):
        """Of the index-th result of a call: c, the gradient of a, that of the weight."""
        return (self.signs[0], self.signs[1], self.signs[0] * self.signs[1])[index]

    def references(self):
        """In fp32, rounded once: the results of a call, with the signs that hold now."""
        a, found = self.numbers.wide(self.whole_a), []
        for w in self.weights:
            b = self.numbers.wide(self.b(w))
            results = [a @ b]
            if not self.gathers:
                results[0] = scattered_sum(results[0], self.group)
            if self.backward:
                g = self.whole_g.float()
                back = g @ b.t()
                results += [scattered_sum(back, self.group) if self.gathers else back, self.weight_gradient(a, g)]
            found.append([r.to(TYPE) for r in results])
        return found

    def bounds(self):
        """What differences from the references a few roundings explain: sums of products of values in -1 ... 1."""
        world = self.group.world
        depths = (self.k if self.gathers else self.k * world, self.n * world if self.gathers else self.n, self.m)
        return [8 * (depth / 9) ** 0.5 * 2**-7 for depth in depths]

    def link_bytes(self):
        """What this rank must receive."""
        row = self.k * self.numbers.bytes + self.numbers.scale_bytes if self.gathers else self.n * 2
        forward = self.m * row
        return forward * (2 if self.backward else 1) * (self.group.world - 1) / self.group.world


class Node(torch.autograd.Function):
    """A product of a way in autograd's graph: its gradients are other products of the way."""

    @staticmethod
    def forward(ctx, way, a, w):
        c, kept = way.forward(a, w)
        ctx.way = way
        ctx.save_for_backward(w, kept)
        return c.detach()  # memory that ways use again is no result of an earlier node

    @staticmethod
    def backward(ctx, g):
        w, kept = ctx.saved_tensors
        return None, *ctx.way.gradients(g, w, kept)


class Way:
    """gather(a, b) returns c and the gathered a; scatter(a, b) returns c.

    With gradients all ways go through torch's autograd, as programs do: all products first, then one backward pass."""

    def __init__(self, operands):
        self.x = operands

    def forward(self, a, w):
        """The result, and what the weight's gradient needs of the input."""
        b = self.x.b(w)
        return self.gather(a, b) if self.x.gathers else (self.scatter(a, b), a)

    def gradients(self, g, w, kept):
        """Of the input and of the weight."""
        x, back = self.x, self.x.b(w).t()
        if x.gathers:
            return self.scatter(g, back), x.weight_gradient(kept, g)
        of_a, whole = self.gather(g, back)
        return of_a, x.weight_gradient(kept, whole)

    def recorded(self, a, w):
        return Node.apply(self, a, w)

    def __call__(self):
        x = self.x
        if not x.backward:
            return [[self.forward(x.a, w)[0]] for w in x.weights]
        inputs = [(x.a.detach().requires_grad_(), w.detach().requires_grad_()) for w in x.weights]
        results = [self.recorded(a, w) for a, w in inputs]
        gradients = torch.autograd.grad(results, [t for pair in inputs for t in pair], [x.g] * len(results))
        return [[c.detach(), of_a, of_weight]
                for c, of_a, of_weight in zip(results, gradients[::2], gradients[1::2])]

    def close(self):
        pass


class Product(Way):
    """The products alone, called directly."""

    def __call__(self):
        return [self.one(w) for w in self.x.weights]

    def one(self, w):
        x, b = self.x, self.x.b(w)
        c = x.numbers.multiply(x.whole_a, b)
        return [c] if not x.backward else [c, torch.mm(x.whole_g, b.t()), x.weight_gradient(x.whole_a, x.whole_g)]


class Nccl(Way):
    """The process group's collectives (NCCL on GPUs) and torch's products."""

    def gather(self, a, b):
        whole = self.x.numbers.gathered(a, self.x.group)
        return self.x.numbers.multiply(whole, b), whole

    def scatter(self, a, b):
        return scattered_sum(self.x.numbers.multiply(a, b), self.x.group)


class SymmMem(Way):
    """torch.ops.symm_mem.fused_*"""

    def gather(self, a, b):
        return self.x.numbers.symm_gather(a, b, self.x.group.process_group.group_name)

    def scatter(self, a, b):
        return self.x.numbers.symm_scatter(a, b, self.x.group.process_group.group_name)


class Chosen(Way):
    """The ops of the package, as a program uses them: the plan chooses."""

    def forward(self, a, w):
        return self.recorded(a, w), None

    def recorded(self, a, w):
        return self.x.numbers.op(self.x.gathers)(a, self.x.b(w), self.x.group)


def key_of(b):
    return (b.numbers if isinstance(b, Scaled) else b).data_ptr()


def columns_of(b):
    return (b.numbers if isinstance(b, Scaled) else b).shape[1]


class Planned(Way):
    """Plans with a given tuning, or that choose; for `most` rows, or as many as the ops' plans have."""

    def __init__(self, operands, most=None, **tuning):
        super().__init__(operands)
        self.plans, self.tuning, self.most = {}, tuning, most
        x, first, second = operands, perseus.ops.ALLGATHER, perseus.ops.REDUCE_SCATTER
        if not x.gathers:
            first, second = second, first
        try:
            self._open(first, x.n, x.k, x.layout == "nk")
            if x.backward:
                self._open(second, x.k, x.n, x.layout != "nk")
        except perseus.PerseusError:
            self.close()
            raise

    def _open(self, op, n, k, transposed):
        group, lib = self.x.group, self.x.group.library
        shape = lib.prs_gemm_shape(op=op, m=self.most or group.rows(self.x.m), n=n, k=k, b_transposed=transposed,
                                   dtype=self.x.numbers.dtype, scaling=self.x.numbers.scaling)
        tuning = ctypes.byref(lib.prs_gemm_tuning(**self.tuning)) if self.tuning else None
        what = f"plan of a product of {n} columns and depth {k}"
        self.plans[op] = group._open(what, "prs_gemm_plan_open", group.handle, ctypes.byref(shape), tuning)

    def decided(self):
        """The whole tuning of the forward pass."""
        return plan_info(self.x.group, next(iter(self.plans.values())))[0]

    def path(self):
        """Of the forward pass."""
        return self.x.group.library.prs_gemm_plan_path(next(iter(self.plans.values())), self.x.m)

    def _launch(self, op, a, b, c, gathered=None):
        group, place = self.x.group, self.x.group.place
        operands = group.library.prs_gemm_operands(c=place.write(c), m=self.x.m,
                                                    gathered=None if gathered is None else place.write(gathered),
                                                    **self.x.numbers.operands(a, b, place))
        group.launch(group.library.prs_gemm_launch, self.plans[op], ctypes.byref(operands))
        return c

    def gather(self, a, b):
        x = self.x
        key = ("whole", key_of(b)) if x.gathers else "whole"  # of bf16; what the forward pass has gathered is kept
        whole = x.room(key, x.m, a.shape[1]) if x.backward else None
        room = x.room(("gather", key_of(b)), x.m, columns_of(b))
        return self._launch(perseus.ops.ALLGATHER, a, b, room, whole), whole

    def scatter(self, a, b):
        room = self.x.room(("scatter", key_of(b)), self.x.m // self.x.group.world, columns_of(b))
        return self._launch(perseus.ops.REDUCE_SCATTER, a, b, room)

    def close(self):
        for plan in self.plans.values():
            self.x.group.library.prs_gemm_plan_close(plan)
        self.plans.clear()


def plan_info(group, handle):
    """The plan's tuning as a dictionary, the time that it predicts, and why its path was chosen."""
    info = group.library.prs_gemm_info()
    group.library.prs_gemm_plan_query(handle, ctypes.byref(info))
    return {name: getattr(info.tuning, name) for name in TUNING}, info.predicted_us, (info.reason or b"").decode()


def chosen_plan(operands):
    """plan_info() of the plan that the package's op takes in the forward pass, and the path of its launches: that of
    the tuning is for the plan's most rows."""
    x = operands
    op = perseus.ops.ALLGATHER if x.gathers else perseus.ops.REDUCE_SCATTER
    plan = x.group.product(op, x.m, x.n, x.k, x.layout == "nk", x.numbers.dtype, 0, x.numbers.scaling)
    return *plan_info(x.group, plan.handle), x.group.library.prs_gemm_plan_path(plan.handle, x.m)
