# SPDX-License-Identifier: Apache-2.0
"""Models with random weights for serving.py, and the ways in which their ranks communicate.

Dense: tensor parallel. Heads and columns are split over the ranks; a way makes the sum over the ranks after o and down,
adds it to the residual and normalises. Moe: each rank has its own sequences and all heads; experts are split over the
ranks, and a way makes the whole layer. Positions are not rotated. Routers' choices are drawn once, and do not depend on
what is routed: otherwise a rounding would change them.
"""
import collections

import torch
import torch.distributed.distributed_c10d as c10d
import torch.nn.functional as F

import perseus

EPS, TYPE = 1e-5, torch.bfloat16
Sizes = collections.namedtuple("Sizes", "hidden heads kv_heads inner experts top_k", defaults=(0, 0))
MODELS = {"llama3-70b": Sizes(8192, 64, 8, 28672), "qwen3-30b": Sizes(2048, 32, 4, 768, 128, 8)}
HEAD = 128


def _done(work):
    if work is not None:
        work.wait()


def _options(kind):
    options = kind()
    options.asyncOp = False
    return options


def _add_norm(c, residual, weight):
    residual = residual + c
    return F.rms_norm(residual, (residual.shape[-1],), weight, EPS), residual


class Norms:
    """The residual and the norm as one kernel of torch's compiler, where it works here, else as two of torch."""
    add = staticmethod(_add_norm)
    compiled = False

    @classmethod
    def compile(cls):
        try:
            import triton  # noqa: F401
        except ImportError:
            return
        cls.add, cls.compiled = staticmethod(torch.compile(_add_norm, dynamic=True)), True


# ---- the sum, the residual and the norm after a product ----

class Perseus:
    """One call."""

    def __init__(self, group, rows, hidden):
        self.group = group

    def __call__(self, a, w, residual, norm):
        return perseus.matmul_all_reduce_rms_norm(a, w.t(), residual, norm, EPS, self.group)


class PerseusApart(Perseus):
    """The sum by a call, then residual and norm."""

    def __call__(self, a, w, residual, norm):
        return Norms.add(perseus.matmul_all_reduce(a, w.t(), self.group), residual, norm)


class PerseusAfter(Perseus):
    """torch's product, then a call."""

    def __call__(self, a, w, residual, norm):
        return perseus.all_reduce_rms_norm(torch.mm(a, w.t()), residual, norm, EPS, self.group)


class Nccl(Perseus):
    def __call__(self, a, w, residual, norm):
        c = torch.mm(a, w.t())
        _done(self.group.process_group.allreduce([c], _options(c10d.AllreduceOptions)))
        return Norms.add(c, residual, norm)


class Reference(Perseus):
    """Sums, residual and norm in fp32."""

    def __call__(self, a, w, residual, norm):
        c = torch.mm(a, w.t()).float()
        _done(self.group.process_group.allreduce([c], _options(c10d.AllreduceOptions)))
        c += residual
        return F.rms_norm(c, (c.shape[-1],), norm.float(), EPS).to(TYPE), c.to(TYPE)


class OneShot(Perseus):
    """torch's symmetric memory. Two buffers take turns."""

    def __init__(self, group, rows, hidden):
        import torch.distributed._symmetric_memory as symm_mem
        super().__init__(group, rows, hidden)
        self.name = group.process_group.group_name
        self.buffers = [symm_mem.empty(rows, hidden, dtype=TYPE, device=group.device) for _ in range(2)]
        for buffer in self.buffers:
            symm_mem.rendezvous(buffer, self.name)

    def product(self, a, w):
        self.buffers.reverse()
        return torch.mm(a, w.t(), out=self.buffers[0])

    def __call__(self, a, w, residual, norm):
        return Norms.add(torch.ops.symm_mem.one_shot_all_reduce(self.product(a, w), "sum", self.name), residual, norm)


class TwoShot(OneShot):
    def __call__(self, a, w, residual, norm):
        c = self.product(a, w)
        torch.ops.symm_mem.two_shot_all_reduce_(c.view(-1), "sum", self.name)
        return Norms.add(c, residual, norm)


# ---- a MoE layer ----

class PerseusLayer:
    """One launch."""

    def __init__(self, group, rows, hidden, sizes):
        self.plan = perseus.moe_plan(max_tokens=rows, hidden=hidden, experts=sizes.experts, top_k=sizes.top_k,
                                     inner=sizes.inner, linear_layout=True, group=group)

    def __call__(self, x, residual, layer):
        return perseus.moe_layer(x, layer.chosen, layer.router, layer.gate_up, layer.down, self.plan, residual)[0]


class NcclLayer:
    """All ranks' tokens to every rank, torch's grouped products of its experts' rows, the sum back. All sizes are known
    beforehand, so that graphs can hold it: rows of other ranks' experts come last, and are not multiplied."""

    def __init__(self, group, rows, hidden, sizes):
        self.group, self.sizes = group, sizes

    def gathered(self, x):
        out = torch.empty(x.shape[0] * self.group.world, *x.shape[1:], dtype=x.dtype, device=x.device)
        _done(self.group.process_group._allgather_base(out.view(torch.uint8), x.contiguous().view(torch.uint8),
                                                       _options(c10d.AllgatherOptions)))
        return out

    def products(self, rows, layer, ends):
        if rows.device.type == "cpu":  # the emulator has no grouped product
            first, out = 0, torch.zeros_like(rows)
            for e, end in enumerate(ends.tolist()):
                g = rows[first:end] @ layer.gate_up[e].t()
                half = g.shape[1] // 2
                out[first:end] = (F.silu(g[:, :half]) * g[:, half:]) @ layer.down[e].t()
                first = end
            return out
        g = torch._grouped_mm(rows, layer.gate_up.transpose(1, 2), offs=ends)
        half = g.shape[1] // 2
        return torch._grouped_mm(F.silu(g[:, :half]) * g[:, half:], layer.down.transpose(1, 2), offs=ends)

    def __call__(self, x, residual, layer):
        local, top_k = self.sizes.experts // self.group.world, self.sizes.top_k
        tokens, router = self.gathered(x), self.gathered(layer.router).flatten()
        expert = (self.gathered(layer.chosen) - self.group.rank * local).flatten()
        expert = torch.where((expert < 0) | (expert >= local), local, expert)
        expert, order = torch.sort(expert, stable=True)
        ends = torch.searchsorted(expert, torch.arange(local, device=x.device), right=True).to(torch.int32)
        token, inside = order // top_k, (expert < local).unsqueeze(1)
        y = torch.where(inside, self.products(tokens[token], layer, ends).float() * router[order].unsqueeze(1), 0)
        total = torch.zeros(tokens.shape, dtype=torch.float32, device=x.device).index_add_(0, token, y).to(TYPE)
        out = torch.empty_like(x)
        _done(self.group.process_group._reduce_scatter_base(out, total, _options(c10d.ReduceScatterOptions)))
        return residual + out


# ---- models ----

class Layer:
    pass


class Model:
    """Weights of a rank for `layers` layers; caches for `batch` sequences of `context` tokens, and one more."""

    def __init__(self, name, sizes, layers, group):
        self.name, self.sizes, self.group = name, sizes, group
        world, hidden = group.world, sizes.hidden
        split = 1 if sizes.experts else world
        self.heads, self.kv_heads = sizes.heads // split, max(sizes.kv_heads // split, 1)
        self.first, self.layers = self.norm(hidden), []
        for _ in range(layers):
            layer = Layer()
            layer.qkv = self.random(hidden, (self.heads + 2 * self.kv_heads) * HEAD, hidden)
            layer.o = self.random(sizes.heads * HEAD, hidden, self.heads * HEAD)
            layer.norms = self.norm(hidden), self.norm(hidden)
            if sizes.experts:
                layer.gate_up = self.random(hidden, sizes.experts // world, 2 * sizes.inner, hidden)
                layer.down = self.random(sizes.inner, sizes.experts // world, hidden, sizes.inner)
            else:
                layer.gate_up = self.random(hidden, 2 * sizes.inner // world, hidden)
                layer.down = self.random(sizes.inner, hidden, sizes.inner // world)
            self.layers.append(layer)

    def random(self, depth, *shape):
        """depth: of the whole product, whose results then have about the size of its operands."""
        drawn = torch.rand(*shape, device=self.group.device).mul_(2).sub_(1)
        return drawn.mul_((3 / depth) ** 0.5).to(TYPE)

    def norm(self, hidden):
        torch.manual_seed(7)  # the same on all ranks
        weight = torch.rand(hidden, device=self.group.device).add_(0.5).to(TYPE)
        torch.manual_seed(1000 + self.group.rank)
        return weight

    def prepare(self, batch, context):
        """For a step of `batch` tokens. context: tokens before it of each of `batch` sequences; None: the tokens are
        the beginning of one."""
        self.batch, self.context = batch, context
        for layer in self.layers:
            layer.cache = None
            if context is not None:
                layer.cache = [self.random(1, batch, self.kv_heads, context + 1, HEAD) for _ in range(2)]
            if self.sizes.experts:
                scores = torch.rand(batch, self.sizes.experts, device=self.group.device)
                layer.router, layer.chosen = torch.topk(scores.softmax(-1), self.sizes.top_k)
                layer.router = layer.router / layer.router.sum(-1, keepdim=True)

    def attend(self, layer, h):
        q, k, v = (t.view(self.batch, -1, HEAD) for t in torch.mm(h, layer.qkv.t()).split(
            [self.heads * HEAD, self.kv_heads * HEAD, self.kv_heads * HEAD], 1))
        if layer.cache is None:
            q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.squeeze(0).transpose(0, 1).reshape(self.batch, -1)
        for cache, new in zip(layer.cache, (k, v)):
            cache[:, :, self.context] = new
        return F.scaled_dot_product_attention(q.unsqueeze(2), *layer.cache, enable_gqa=True).view(self.batch, -1)

    def step(self, x, way):
        """What the last layer gives, normed."""
        h, residual = F.rms_norm(x, (x.shape[1],), self.first, EPS), x
        for layer in self.layers:
            a = self.attend(layer, h)
            if self.sizes.experts:
                h, residual = Norms.add(torch.mm(a, layer.o.t()), residual, layer.norms[0])
                residual = way(h, residual, layer)
                h = F.rms_norm(residual, (x.shape[1],), layer.norms[1], EPS)
                continue
            h, residual = way(a, layer.o, residual, layer.norms[0])
            gate, up = torch.mm(h, layer.gate_up.t()).chunk(2, 1)
            h, residual = way(F.silu(gate) * up, layer.down, residual, layer.norms[1])
        return h

    def ways(self, rows, symm):
        """By name; the reference first."""
        group, hidden = self.group, self.sizes.hidden
        if self.sizes.experts:
            return {"reference": NcclLayer(group, rows, hidden, self.sizes),
                    "perseus": PerseusLayer(group, rows, hidden, self.sizes),
                    "nccl": NcclLayer(group, rows, hidden, self.sizes)}
        kinds = {"reference": Reference, "perseus": Perseus, "perseus_apart": PerseusApart,
                 "perseus_after": PerseusAfter, "nccl": Nccl,
                 **({"one_shot": OneShot, "two_shot": TwoShot} if symm else {})}
        return {name: kind(group, rows, hidden) for name, kind in kinds.items()}
