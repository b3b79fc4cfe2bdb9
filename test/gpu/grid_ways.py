# SPDX-License-Identifier: Apache-2.0
"""The products of a tensor-parallel layer by each library, for grid.py: one call runs one product, or it and its
gradients, with each of several weights, so that no weight is found in L2.

A call returns the results, weight by weight: [c] or [c, gradient of a, gradient of the weight].
"""
import ctypes

import torch
import torch.distributed.distributed_c10d as c10d

import perseus

L2_BYTES = 50 << 20
ROTATE_BYTES = 4 * L2_BYTES
FEWEST_WEIGHTS, MOST_WEIGHTS = 2, 32
# Fields of struct prs_gemm_tuning.
TUNING = ("path", "clusters", "band", "mover", "segments", "spread", "paced", "tiles_per_signal")
FUSED, UNFUSED = 1, 2  # enum prs_gemm_path
TYPE = torch.bfloat16


def weights_of(n, k, rotate=ROTATE_BYTES):
    """How many weights are more than the cache holds."""
    return min(max(-(-rotate // (n * k * 2)), FEWEST_WEIGHTS), MOST_WEIGHTS)


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


class Operands:
    """Of one product on this rank. `gathers`: all-gather + product, else product + reduce-scatter. n, k: this rank's.

    a, g: the input, and the gradient of the result. whole: what the products alone multiply.
    """

    def __init__(self, group, gathers, m, n, k, layout, weights, backward):
        self.group, self.gathers, self.m, self.n, self.k = group, gathers, m, n, k
        self.layout, self.weights, self.backward = layout, weights, backward
        own = m // group.world
        self.a = self.random(own if gathers else m, k)
        self.g = self.random(m if gathers else own, n) if backward else None
        self.whole_a = gathered_rows(self.a, group) if gathers else self.a
        self.whole_g = None if not backward else self.g if gathers else gathered_rows(self.g, group)
        self.signs = [1, 1]
        self.rooms = {}

    def random(self, *shape):
        return torch.rand(*shape, device=self.group.device).mul_(2).sub_(1).to(TYPE)

    def room(self, key, rows, columns):
        """Memory for a result that all plans share: a result is looked at before another way runs."""
        if key not in self.rooms:
            self.rooms[key] = torch.empty(rows, columns, dtype=TYPE, device=self.group.device)
        return self.rooms[key]

    def b(self, w):
        """The second operand of the product."""
        return w.t() if self.layout == "nk" else w

    def weight_gradient(self, a, g):
        return torch.mm(g.t(), a) if self.layout == "nk" else torch.mm(a.t(), g)

    def turn(self, step):
        """Other inputs than in the step before, so that what it left in memory is wrong."""
        flips = [self.a, *([self.whole_a] if self.whole_a is not self.a else [])]
        self.signs[0] = -self.signs[0]
        if self.backward and step % 2:
            flips += [self.g, *([self.whole_g] if self.whole_g is not self.g else [])]
            self.signs[1] = -self.signs[1]
        for tensor in flips:
            tensor.neg_()

    def sign_of(self, index):
        """Of the index-th result of a call: c, the gradient of a, that of the weight."""
        return (self.signs[0], self.signs[1], self.signs[0] * self.signs[1])[index]

    def references(self):
        """In fp32, rounded once: the results of a call, with the signs that hold now."""
        a, found = self.whole_a.float(), []
        for w in self.weights:
            b = self.b(w).float()
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
        forward = self.m * (self.k if self.gathers else self.n) * 2
        return forward * (2 if self.backward else 1) * (self.group.world - 1) / self.group.world


class Way:
    """gather(a, b) returns c and the gathered a; scatter(a, b) returns c."""

    def __init__(self, operands):
        self.x = operands

    def one(self, w):
        x, b = self.x, self.x.b(w)
        if x.gathers:
            c, whole = self.gather(x.a, b)
            return [c] if not x.backward else [c, self.scatter(x.g, b.t()), x.weight_gradient(whole, x.g)]
        c = self.scatter(x.a, b)
        if not x.backward:
            return [c]
        back, whole = self.gather(x.g, b.t())
        return [c, back, x.weight_gradient(x.a, whole)]

    def __call__(self):
        return [self.one(w) for w in self.x.weights]

    def close(self):
        pass


class Product(Way):
    """The products alone."""

    def one(self, w):
        x, b = self.x, self.x.b(w)
        c = torch.mm(x.whole_a, b)
        return [c] if not x.backward else [c, torch.mm(x.whole_g, b.t()), x.weight_gradient(x.whole_a, x.whole_g)]


class Nccl(Way):
    """The process group's collectives (NCCL on GPUs) and torch.mm."""

    def gather(self, a, b):
        whole = gathered_rows(a, self.x.group)
        return torch.mm(whole, b), whole

    def scatter(self, a, b):
        return scattered_sum(torch.mm(a, b), self.x.group)


class SymmMem(Way):
    """torch.ops.symm_mem.fused_*"""

    def gather(self, a, b):
        whole, (c,) = torch.ops.symm_mem.fused_all_gather_matmul(a, [b], 0, self.x.group.process_group.group_name)
        return c, whole

    def scatter(self, a, b):
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, self.x.group.process_group.group_name)


class Chosen(Way):
    """The ops of the package, as a program uses them: the plan chooses."""

    def one(self, w):
        x, op = self.x, perseus.all_gather_matmul if self.x.gathers else perseus.matmul_reduce_scatter
        if not x.backward:
            return [op(x.a, x.b(w), x.group)]
        a, weight = x.a.detach().requires_grad_(), w.detach().requires_grad_()
        c = op(a, x.b(weight), x.group)
        return [c.detach(), *torch.autograd.grad(c, (a, weight), x.g)]


class Planned(Way):
    """Plans with a given tuning, for as many rows as the ops' plans have."""

    def __init__(self, operands, **tuning):
        super().__init__(operands)
        self.plans, self.tuning = {}, tuning
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
        shape = lib.prs_gemm_shape(op=op, m=group.rows(self.x.m), n=n, k=k, b_transposed=transposed)
        tuning = lib.prs_gemm_tuning(**self.tuning)
        what = f"plan of a product of {n} columns and depth {k}"
        shape, tuning = ctypes.byref(shape), ctypes.byref(tuning)
        self.plans[op] = group._open(what, "prs_gemm_plan_open", group.handle, shape, tuning)

    def decided(self):
        """The whole tuning of the forward pass."""
        return plan_info(self.x.group, next(iter(self.plans.values())))[0]

    def _launch(self, op, a, b, c, gathered=None):
        group, place = self.x.group, self.x.group.place
        operands = group.library.prs_gemm_operands(a=place.read(a), b=place.read(b), c=place.write(c), m=self.x.m,
                                                    gathered=None if gathered is None else place.write(gathered))
        group.launch(group.library.prs_gemm_launch, self.plans[op], ctypes.byref(operands))
        return c

    def gather(self, a, b):
        x = self.x
        whole = x.room("whole", x.m, a.shape[1]) if x.backward else None
        room = x.room(("gather", b.data_ptr()), x.m, b.shape[1])
        return self._launch(perseus.ops.ALLGATHER, a, b, room, whole), whole

    def scatter(self, a, b):
        room = self.x.room(("scatter", b.data_ptr()), self.x.m // self.x.group.world, b.shape[1])
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
    """plan_info() of the plan that the package's op takes in the forward pass."""
    x = operands
    op = perseus.ops.ALLGATHER if x.gathers else perseus.ops.REDUCE_SCATTER
    return plan_info(x.group, x.group.product(op, x.m, x.n, x.k, x.layout == "nk", 0, 0).handle)
