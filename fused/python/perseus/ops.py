# SPDX-License-Identifier: Apache-2.0
"""The ops. Importing this module registers torch.ops.perseus.*; the functions here are the same ops with a group in
place of its name.

Products take bfloat16 or float16, the others bfloat16, on the group's device. W is the number of ranks, r this rank.
Sums are fp32; a rank's partial product is rounded once to the dtype of a to travel, and the sum once more. Every op is
enqueued on the current stream and returns at once; it may be captured into a CUDA graph after it has run once with
these sizes. All ranks of a group call the same ops with the same sizes in the same order.

Every op raises TypeError or ValueError for a wrong dtype, device, shape, stride or alignment, which it names;
PerseusError if a plan cannot be opened, and PerseusError with the rank to blame once a launch of the group has failed.
"""
from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from ._checks import _LOWEST, _PRODUCTS, _bf16, _check_bias, _check_rows, _check_tensor, _check_weights
from ._dispatch import _autocast, _call, _define, _differentiate, _library
from ._group import Group
from ._library import PerseusError
from ._registry import GroupLike, find, name_of, world_of

GEMM, REDUCE_SCATTER, ALLGATHER, ALLREDUCE = range(4)  # enum prs_gemm_op; test/python/test_header.py compares
MOE_STATUS_WORDS = 8  # of struct prs_moe_status
_FP32 = 3


# ---- products ----

def _new(op: str, a: torch.Tensor, rows: int, columns: int, out_dtype: torch.dtype | None) -> torch.Tensor:
    """A result of that dtype; None: that of a."""
    if out_dtype is None or out_dtype is a.dtype:
        return a.new_empty(rows, columns)  # a named dtype would cost the host a microsecond
    if out_dtype is torch.float32:
        return a.new_empty(rows, columns, dtype=out_dtype)
    raise TypeError(f"perseus.{op}: out_dtype is {out_dtype}; it must be {a.dtype}, as a, or torch.float32")


def _plan(group: Group, op: str, number: int, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None,
          out_dtype: torch.dtype | None) -> tuple:
    """What a product of these operands is, all checked: its rows, the result's rows and columns, and the plan; None: a
    result without elements, or a sum of nothing."""
    _check_rows(group, op, "a", a)
    b_is_n_k = _check_weights(group, op, a, b)
    (k, n), m = b.shape, a.shape[0] * (group.world if number == ALLGATHER else 1)
    _check_bias(group, op, a, bias, n)
    if number == REDUCE_SCATTER and m % group.world:
        raise ValueError(f"perseus.{op}: a has {m} rows; the {group.world} ranks of group {group.name} must divide "
                         "them")
    rows, c_dtype = m // group.world if number == REDUCE_SCATTER else m, _new(op, a, 0, 0, out_dtype).dtype
    plan = group.product(number, m, n, k, b_is_n_k, _PRODUCTS[a.dtype],
                         _FP32 if c_dtype is torch.float32 else 0) if rows and n and k else None
    return m, rows, n, plan


def _multiply(op: str, number: int, a: torch.Tensor, b: torch.Tensor, group_name: str, bias: torch.Tensor | None = None,
              out_dtype: torch.dtype | None = None, keeps: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The result, and where it keeps them the gathered rows of a. What a product is depends on sizes only, and is found
    once for these."""
    group = find(group_name)
    sizes = number, a.shape, b.shape, b.stride(), a.dtype, b.dtype, out_dtype
    found, begins = group.products.get(sizes), (a.data_ptr(), b.data_ptr())
    if (found is None or (begins[0] | begins[1]) & 15 or min(begins) < _LOWEST or a.get_device() != group.number
        or b.get_device() != group.number or not a.is_contiguous()):
        found = group.products[sizes] = _plan(group, op, number, a, b, bias, out_dtype)
    m, rows, columns, plan = found
    if bias is not None:
        _check_bias(group, op, a, bias, columns)
    c = a.new_empty(rows, columns) if out_dtype is None else _new(op, a, rows, columns, out_dtype)
    if plan is None:
        if c.numel():
            c.zero_() if bias is None else c.copy_(bias.expand_as(c))
        return c, _all_gather(a, group_name) if keeps else None
    gathered, place, operands = a.new_empty(m, a.shape[1]) if keeps else None, group.place, plan.operands
    operands.a, operands.b, operands.c, operands.m = place.read(a), place.read(b), place.write(c), m
    operands.bias = None if bias is None else place.read(bias)
    operands.gathered = None if gathered is None else place.write(gathered)
    group.launch(group.library.prs_gemm_launch, plan.handle, plan.reference)
    return c, gathered


def _all_gather_matmul(a: torch.Tensor, b: torch.Tensor, group_name: str, bias: torch.Tensor | None = None,
                       out_dtype: torch.dtype | None = None) -> torch.Tensor:
    return _multiply("all_gather_matmul", ALLGATHER, a, b, group_name, bias, out_dtype)[0]


def _all_gather_matmul_fake(a: torch.Tensor, b: torch.Tensor, group_name: str, bias: torch.Tensor | None = None,
                            out_dtype: torch.dtype | None = None) -> torch.Tensor:
    return _new("all_gather_matmul", a, a.shape[0] * world_of(group_name), b.shape[1], out_dtype)


def _all_gather_matmul_kept(a: torch.Tensor, b: torch.Tensor, group_name: str,
                            bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The product, and the gathered a, which the kernel writes too."""
    return _multiply("all_gather_matmul", ALLGATHER, a, b, group_name, bias, keeps=True)


def _all_gather_matmul_kept_fake(a: torch.Tensor, b: torch.Tensor, group_name: str,
                                 bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return _all_gather_matmul_fake(a, b, group_name), _all_gather_fake(a, group_name)


def _all_gather_matmuls(a: torch.Tensor, bs: list[torch.Tensor], group_name: str) -> list[torch.Tensor]:
    """The largest product hides the gather; the others multiply what it has gathered."""
    if not bs:
        _check_rows(find(group_name), "all_gather_matmuls", "a", a)
        return [_all_gather(a, group_name)]
    for b in bs:
        _check_weights(find(group_name), "all_gather_matmuls", a, b)
    largest = max(range(len(bs)), key=lambda i: bs[i].shape[1])
    first, gathered = _all_gather_matmul_kept(a, bs[largest], group_name)
    return [*(first if i == largest else torch.mm(gathered, b) for i, b in enumerate(bs)), gathered]


def _all_gather_matmuls_fake(a: torch.Tensor, bs: list[torch.Tensor], group_name: str) -> list[torch.Tensor]:
    return [*(_all_gather_matmul_fake(a, b, group_name) for b in bs), _all_gather_fake(a, group_name)]


def _all_gather(a: torch.Tensor, group_name: str) -> torch.Tensor:
    """The only place that gathers rows outside a kernel: for weight gradients."""
    gathered = find(group_name).gather_rows(a)
    return gathered.clone() if gathered is a else gathered


def _all_gather_fake(a: torch.Tensor, group_name: str) -> torch.Tensor:
    return a.new_empty(a.shape[0] * world_of(group_name), *a.shape[1:])


def _matmul_reduce_scatter(a: torch.Tensor, b: torch.Tensor, group_name: str, bias: torch.Tensor | None = None,
                           out_dtype: torch.dtype | None = None) -> torch.Tensor:
    return _multiply("matmul_reduce_scatter", REDUCE_SCATTER, a, b, group_name, bias, out_dtype)[0]


def _matmul_reduce_scatter_fake(a: torch.Tensor, b: torch.Tensor, group_name: str, bias: torch.Tensor | None = None,
                                out_dtype: torch.dtype | None = None) -> torch.Tensor:
    return _new("matmul_reduce_scatter", a, a.shape[0] // world_of(group_name), b.shape[1], out_dtype)


def _matmul_all_reduce(a: torch.Tensor, b: torch.Tensor, group_name: str, bias: torch.Tensor | None = None,
                       out_dtype: torch.dtype | None = None) -> torch.Tensor:
    return _multiply("matmul_all_reduce", ALLREDUCE, a, b, group_name, bias, out_dtype)[0]


def _matmul_all_reduce_fake(a: torch.Tensor, b: torch.Tensor, group_name: str, bias: torch.Tensor | None = None,
                            out_dtype: torch.dtype | None = None) -> torch.Tensor:
    return _new("matmul_all_reduce", a, a.shape[0], b.shape[1], out_dtype)


def _replicated_matmul(a: torch.Tensor, b: torch.Tensor, group_name: str,
                       bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


_define("all_gather_matmul(Tensor a, Tensor b, str group_name, Tensor? bias=None, ScalarType? out_dtype=None) -> "
        "Tensor", _all_gather_matmul, _all_gather_matmul_fake)
_define("all_gather_matmul_kept(Tensor a, Tensor b, str group_name, Tensor? bias=None) -> (Tensor, Tensor)",
        _all_gather_matmul_kept, _all_gather_matmul_kept_fake)
_define("all_gather_matmuls(Tensor a, Tensor[] bs, str group_name) -> Tensor[]", _all_gather_matmuls,
        _all_gather_matmuls_fake)
_define("all_gather(Tensor a, str group_name) -> Tensor", _all_gather, _all_gather_fake)
_define("matmul_reduce_scatter(Tensor a, Tensor b, str group_name, Tensor? bias=None, ScalarType? out_dtype=None) -> "
        "Tensor", _matmul_reduce_scatter, _matmul_reduce_scatter_fake)
_define("matmul_all_reduce(Tensor a, Tensor b, str group_name, Tensor? bias=None, ScalarType? out_dtype=None) -> "
        "Tensor", _matmul_all_reduce, _matmul_all_reduce_fake)
_define("replicated_matmul(Tensor a, Tensor b, str group_name, Tensor? bias=None) -> Tensor", _replicated_matmul,
        _matmul_all_reduce_fake, local=True)


# ---- gradients of products ----

def _weight_gradient(a: torch.Tensor, g: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a^T g, in the layout of b, so that a weight's gradient is laid out as the weight."""
    return torch.mm(a.t(), g) if b.is_contiguous() else torch.mm(g.t(), a).t()


def _save(ctx: Any, inputs: tuple, output: Any) -> tuple:
    a, b, ctx.group_name, bias, *_ = inputs
    return a, b


def _bias_gradient(needed: tuple, g: torch.Tensor) -> torch.Tensor | None:
    return g.sum(0) if needed[3] else None


def _as_operand(a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """The gradient of a result, which may be fp32, as an operand of a product with a."""
    return (g if g.dtype is a.dtype else g.to(a.dtype)).contiguous()


def _all_gather_matmul_backward(ctx: Any, saved: Any, needed: tuple, g: torch.Tensor, *_: Any) -> tuple:
    (a, b), name = saved, ctx.group_name
    g = _as_operand(a, g)
    return (_call.matmul_reduce_scatter(g, b.t(), name) if needed[0] else None,
            _weight_gradient(_call.all_gather(a, name), g, b) if needed[1] else None, None, _bias_gradient(needed, g),
            None)


def _matmul_reduce_scatter_backward(ctx: Any, saved: Any, needed: tuple, g: torch.Tensor, *_: Any) -> tuple:
    (a, b), name = saved, ctx.group_name
    g, of_a, gathered = _as_operand(a, g), None, None
    if needed[0] and needed[1]:
        of_a, gathered = _call.all_gather_matmul_kept(g, b.t(), name)
    elif needed[0]:
        of_a = _call.all_gather_matmul(g, b.t(), name)
    elif needed[1]:
        gathered = _call.all_gather(g, name)
    return (of_a, None if gathered is None else _weight_gradient(a, gathered, b), None, _bias_gradient(needed, g), None)


def _matmul_all_reduce_backward(ctx: Any, saved: Any, needed: tuple, g: torch.Tensor, *_: Any) -> tuple:
    a, b = saved
    g = _as_operand(a, g)  # the same on all ranks, as the result is
    return (torch.mm(g, b.t()) if needed[0] else None, _weight_gradient(a, g, b) if needed[1] else None, None,
            _bias_gradient(needed, g), None)


def _replicated_matmul_backward(ctx: Any, saved: Any, needed: tuple, g: torch.Tensor, *_: Any) -> tuple:
    (a, b), g = saved, g.contiguous()
    return (_call.matmul_all_reduce(g, b.t(), ctx.group_name) if needed[0] else None,
            _weight_gradient(a, g, b) if needed[1] else None, None, _bias_gradient(needed, g), None)


def _save_kept(ctx: Any, inputs: tuple, output: Any) -> tuple:
    a, b, ctx.group_name, bias = inputs
    ctx.mark_non_differentiable(output[1])
    return b, output[1]


def _all_gather_matmul_kept_backward(ctx: Any, saved: Any, needed: tuple, g: torch.Tensor, *_: Any) -> tuple:
    (b, gathered), g = saved, g.contiguous()
    return (_call.matmul_reduce_scatter(g, b.t(), ctx.group_name) if needed[0] else None,
            _weight_gradient(gathered, g, b) if needed[1] else None, None, _bias_gradient(needed, g))


def _save_several(ctx: Any, inputs: tuple, output: Any) -> tuple:
    a, bs, ctx.group_name = inputs
    ctx.mark_non_differentiable(output[-1])
    return *bs, output[-1]


_WIDE = 2100  # columns of a b whose product takes as long as all of its sums on the link: a ratio of their speeds


def _joined(bs: list[torch.Tensor], world: int) -> list[int]:
    """Which of bs, as indices, have one product of their gradients for the gradient of a. A narrow one alone would not
    hide its transfer, and they share one: with the narrowest wide one, if all of them are still narrow. The others
    have a transfer each, which is cheaper than copying them."""
    wide = _WIDE * (world - 1) // world
    narrow = [i for i, b in enumerate(bs) if b.shape[1] < wide]
    others = [i for i in range(len(bs)) if i not in narrow]
    if narrow and others and sum(bs[i].shape[1] for i in narrow) < wide:
        narrow.append(min(others, key=lambda i: bs[i].shape[1]))
    return sorted(narrow)


def _join(bs: list[torch.Tensor]) -> torch.Tensor:
    """All columns, laid out as the operand of a product."""
    weights = [b.t() for b in bs]
    return torch.cat(weights) if all(w.is_contiguous() for w in weights) else torch.cat(bs, 1).t()


def _all_gather_matmuls_backward(ctx: Any, saved: Any, needed: tuple, *grads: Any) -> tuple:
    (*bs, gathered), name = saved, ctx.group_name
    grads = [None if g is None else g.contiguous() for g in grads[:len(bs)]]
    of_bs = [_weight_gradient(gathered, g, b) if asked and g is not None else None
             for b, g, asked in zip(bs, grads, needed[1])]
    if not needed[0]:
        return None, of_bs, None
    used = [(g, b) for g, b in zip(grads, bs) if g is not None]
    if not used:  # of no result, as a function of the program's may give: other ranks wait for a sum, which is of zeros
        used = [(gathered.new_zeros(gathered.shape[0], b.shape[1]), b) for b in bs]
    together = _joined([b for _, b in used], world_of(name))
    pairs = [(g, b.t()) for i, (g, b) in enumerate(used) if len(together) < 2 or i not in together]
    if len(together) > 1:
        pairs.append((torch.cat([used[i][0] for i in together], 1), _join([used[i][1] for i in together])))
    return functools.reduce(torch.add, (_call.matmul_reduce_scatter(g, w, name) for g, w in pairs)), of_bs, None


for _run, _backward in ((_all_gather_matmul, _all_gather_matmul_backward),
                        (_matmul_reduce_scatter, _matmul_reduce_scatter_backward),
                        (_matmul_all_reduce, _matmul_all_reduce_backward),
                        (_replicated_matmul, _replicated_matmul_backward)):
    _differentiate(_run.__name__[1:], _backward, _save)
_differentiate("all_gather_matmul_kept", _all_gather_matmul_kept_backward, _save_kept)
_differentiate("all_gather_matmuls", _all_gather_matmuls_backward, _save_several, several=True)


for _name in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "replicated_matmul",
              "all_gather_matmul_kept", "all_gather_matmuls"):
    _autocast(_name, (0, 1, 3), tuple(_PRODUCTS))


# ---- ring attention ----

def _attention_sizes(group: Group, op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool,
                     heads_first: bool) -> dict[str, Any]:
    """The fields of struct prs_attention_shape, of tensors that are checked. The scale is of a launch."""
    _check_tensor(group, op, "q", q, _bf16, (-1, -1, -1, -1))
    batch, dim = q.shape[0], q.shape[3]
    rows, heads_q = (q.shape[2], q.shape[1]) if heads_first else (q.shape[1], q.shape[2])
    _check_tensor(group, op, "k", k, _bf16, (batch, -1, rows, dim) if heads_first else (batch, rows, -1, dim))
    _check_tensor(group, op, "v", v, _bf16, (*k.shape[:3], -1))
    return {"batch": batch, "heads_q": heads_q, "heads_kv": k.shape[1 if heads_first else 2], "head_dim": dim,
            "seq": rows * group.world, "causal": int(causal), "heads_first": int(heads_first),
            "value_dim": v.shape[3]}


def _ring_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group_name: str, causal: bool = False,
                    scale: float = 0.0, heads_first: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    group = find(group_name)
    sizes = _attention_sizes(group, "ring_attention", q, k, v, causal, heads_first)
    plan = group.attention(**sizes)
    out, lse = _ring_attention_fake(q, k, v, group_name, causal, scale, heads_first)
    x, place = plan.operands, group.place
    x.q, x.k, x.v, x.out, x.lse = place.read(q), place.read(k), place.read(v), place.write(out), place.write(lse)
    x.seq, x.batch, x.scale = sizes["seq"], sizes["batch"], scale
    group.launch(group.library.prs_attention_launch, plan.handle, plan.reference)
    return out, lse


def _ring_attention_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group_name: str, causal: bool = False,
                         scale: float = 0.0, heads_first: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads = (q.shape[2], q.shape[1]) if heads_first else (q.shape[1], q.shape[2])
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[0], heads, rows, dtype=torch.float32)


def _ring_attention_backward(dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor,
                             v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, group_name: str,
                             causal: bool = False, scale: float = 0.0,
                             heads_first: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    group, op = find(group_name), "ring_attention_backward"
    sizes = _attention_sizes(group, op, q, k, v, causal, heads_first)
    values = sizes["batch"], sizes["heads_q"], sizes["seq"] // group.world
    for name, t in (("out", out), ("dout", dout)):
        _check_tensor(group, op, name, t, _bf16, (*q.shape[:3], v.shape[3]))
    _check_tensor(group, op, "lse", lse, torch.float32, values)
    if dlse is not None:
        _check_tensor(group, op, "dlse", dlse, torch.float32, values)
    plan, place = group.attention_backward(**sizes), group.place
    x, results = plan.operands, tuple(torch.empty_like(t) for t in (q, k, v))
    for field, tensor in (("q", q), ("k", k), ("v", v), ("out", out), ("lse", lse), ("dout", dout)):
        setattr(x, field, place.read(tensor))
    x.dlse = None if dlse is None else place.read(dlse)
    x.dq, x.dk, x.dv = (place.write(t) for t in results)
    x.seq, x.batch, x.scale = sizes["seq"], sizes["batch"], scale
    group.launch(group.library.prs_attention_backward_launch, plan.handle, plan.reference)
    return results


def _ring_attention_backward_fake(dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor,
                                  v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, group_name: str,
                                  causal: bool = False, scale: float = 0.0,
                                  heads_first: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save_attention(ctx: Any, inputs: tuple, output: tuple) -> tuple:
    q, k, v, *ctx.rest = inputs
    return q, k, v, *output


def _attention_gradients(ctx: Any, saved: Any, needed: tuple, dout: torch.Tensor | None,
                         dlse: torch.Tensor | None) -> tuple:
    """One launch for all three, also where not all are needed: every rank takes part in it."""
    q, k, v, out, lse = saved
    dout = torch.zeros_like(out) if dout is None else dout.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    return *_call.ring_attention_backward(dout, dlse, q, k, v, out, lse, *ctx.rest), *(None for _ in ctx.rest)


# ---- MoE ----

def _moe_dispatch_gemm(tokens: torch.Tensor, chosen: torch.Tensor, router_weights: torch.Tensor, weights: torch.Tensor,
                       max_tokens: int, capacity: int,
                       group_name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    group, op = find(group_name), "moe_dispatch_gemm"
    _check_tensor(group, op, "tokens", tokens, _bf16, (-1, -1))
    count, hidden = tokens.shape
    _check_tensor(group, op, "chosen", chosen, torch.int64, (count, -1))
    top_k = chosen.shape[1]
    _check_tensor(group, op, "router_weights", router_weights, torch.float32, (count, top_k))
    transposed = not weights.is_contiguous()
    _check_tensor(group, op, "weights",
                  weights.transpose(1, 2) if transposed and weights.dim() == 3 else weights, _bf16,
                  (-1, -1, hidden) if transposed else (-1, hidden, -1))
    local, _, columns = weights.shape
    if count > max_tokens:
        raise ValueError(f"perseus.{op}: tokens has {count} rows, and max_tokens is {max_tokens}")
    if capacity < 128 or capacity % 128:
        raise ValueError(f"perseus.{op}: capacity {capacity} is not a multiple of 128: perseus.moe_capacity() gives "
                         "one that is always enough")
    plan = group.moe(tokens=max_tokens, hidden=hidden, columns=columns, experts=local * group.world, top_k=top_k,
                     capacity=capacity, weights_transposed=int(transposed))
    out = tokens.new_empty(capacity, columns)
    rows, expert_rows, status = (tokens.new_empty(*shape, dtype=torch.int32)
                                 for shape in ((capacity, 4), (local, 2), (MOE_STATUS_WORDS,)))
    batch, place = plan.operands, group.place
    batch.count = count
    for field, tensor in (("tokens", tokens), ("chosen", chosen), ("router_weights", router_weights),
                          ("weights", weights.transpose(1, 2) if transposed else weights)):
        setattr(batch, field, place.read(tensor))
    for field, tensor in (("out", out), ("rows", rows), ("expert_rows", expert_rows), ("status", status)):
        setattr(batch, field, place.write(tensor))
    group.launch(group.library.prs_moe_dispatch_gemm, plan.handle, plan.reference)
    return out, rows, expert_rows, status


def _moe_dispatch_gemm_fake(tokens: torch.Tensor, chosen: torch.Tensor, router_weights: torch.Tensor,
                            weights: torch.Tensor, max_tokens: int, capacity: int,
                            group_name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (tokens.new_empty(capacity, weights.shape[2]), tokens.new_empty(capacity, 4, dtype=torch.int32),
            tokens.new_empty(weights.shape[0], 2, dtype=torch.int32),
            tokens.new_empty(MOE_STATUS_WORDS, dtype=torch.int32))


_define("ring_attention(Tensor q, Tensor k, Tensor v, str group_name, bool causal=False, float scale=0.0, bool "
        "heads_first=False) -> (Tensor, Tensor)", _ring_attention, _ring_attention_fake)
_define("ring_attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, str "
        "group_name, bool causal=False, float scale=0.0, bool heads_first=False) -> (Tensor, Tensor, Tensor)",
        _ring_attention_backward, _ring_attention_backward_fake)
_define("moe_dispatch_gemm(Tensor tokens, Tensor chosen, Tensor router_weights, Tensor weights, int max_tokens, int "
        "capacity, str group_name) -> (Tensor, Tensor, Tensor, Tensor)", _moe_dispatch_gemm, _moe_dispatch_gemm_fake)


def _forward_only(name: str) -> None:
    def backward(ctx: Any, *grads: Any) -> tuple:
        raise NotImplementedError(f"perseus.{name} has no backward: the kernels compute the forward only")
    torch.library.register_autograd(f"perseus::{name}", backward, lib=_library)


_differentiate("ring_attention", _attention_gradients, _save_attention, several=True)
_forward_only("moe_dispatch_gemm")
_autocast("ring_attention", (0, 1, 2), (_bf16,))
_autocast("moe_dispatch_gemm", (0, 3), (_bf16,))


# ---- the ops as functions of a group ----

def all_gather_matmul(a: torch.Tensor, b: torch.Tensor, group: GroupLike = None, *, bias: torch.Tensor | None = None,
                      keep_gathered: bool = True, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """(the a of all ranks, stacked) @ b. The gradient of a is matmul_reduce_scatter().

    a: [m / W, k], row-major. b: [k, n], row-major, or weight.t() of an [n, k] weight. Returns [m, n], new memory. bias
    [n] is added in fp32.
    keep_gathered: where b needs a gradient, the kernel also writes the gathered a [m, k], which stays until the
    backward pass. False: only a stays, and the backward pass gathers it once more.
    out_dtype: torch.float32 for a result in fp32; the plan then takes the unfused path, and the backward pass gathers a
    once more.

    Example::

        y = perseus.all_gather_matmul(x, linear.weight.t())   # x: [tokens / W, in], y: [tokens, out / W]
    """
    if keep_gathered and out_dtype is None and b is not None and b.requires_grad and torch.is_grad_enabled():
        return _call.all_gather_matmul_kept(a, b, name_of(group), bias)[0]
    return _call.all_gather_matmul(a, b, name_of(group), bias, out_dtype)


def all_gather_matmuls(a: torch.Tensor, bs: list[torch.Tensor], group: GroupLike = None) -> list[torch.Tensor]:
    """all_gather_matmul(a, b) for each b, then the gathered a [m, k] itself, for which no gradient is given. One gather
    in all: the kernel of the largest product writes the gathered a, and the other products follow it.

    Example::

        q, k, v, gathered = perseus.all_gather_matmuls(x, [wq.t(), wk.t(), wv.t()])
    """
    return _call.all_gather_matmuls(a, bs, name_of(group))


def matmul_reduce_scatter(a: torch.Tensor, b: torch.Tensor, group: GroupLike = None, *,
                          bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Rows r m / W ... (r + 1) m / W of the sum over all ranks of a @ b. The gradient of a is all_gather_matmul().

    a: [m, k], row-major; W divides m. b: [k, n], row-major, or weight.t(). Returns [m / W, n], new memory. bias [n] is
    added once, in fp32; the gradient of this rank's rows is this rank's part of that of bias.
    out_dtype: torch.float32 for a result in fp32; the plan then takes the unfused path.

    Example::

        y = perseus.matmul_reduce_scatter(h, linear.weight.t())   # h: [tokens, in / W], y: [tokens / W, out]
    """
    return _call.matmul_reduce_scatter(a, b, name_of(group), bias, out_dtype)


def matmul_all_reduce(a: torch.Tensor, b: torch.Tensor, group: GroupLike = None, *, bias: torch.Tensor | None = None,
                      out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """The sum over all ranks of a @ b, on every rank. Its gradient is taken to be the same on all ranks, as the result
    is.

    a: [m, k], row-major. b: [k, n], row-major, or weight.t(). Returns [m, n], new memory. bias [n], the same on all
    ranks, is added once, in fp32.
    out_dtype: torch.float32 for a result in fp32; the plan then takes the unfused path.

    Example::

        y = perseus.matmul_all_reduce(h, linear.weight.t())   # h: [tokens, in / W], y: [tokens, out]
    """
    return _call.matmul_all_reduce(a, b, name_of(group), bias, out_dtype)


def replicated_matmul(a: torch.Tensor, b: torch.Tensor, group: GroupLike = None, *,
                      bias: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b, for an a that is the same on all ranks: the gradient of a is the sum of all ranks' (matmul_all_reduce).

    Example::

        h = perseus.replicated_matmul(x, linear.weight.t())   # x: [tokens, in] on every rank, h: [tokens, out / W]
    """
    return _call.replicated_matmul(a, b, name_of(group), bias)


def ring_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: GroupLike = None, *, causal: bool = False,
                   scale: float = 0.0, heads_first: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a sequence that is split among the ranks.

    q: [batch, rows, heads_q, head_dim]; k, v: [batch, rows, heads_kv, head_dim]; heads_first: [batch, heads, rows,
    head_dim]. head_dim is 64, 96, 128 or 256, or 192 with v's of 128 (DeepSeek's MLA), heads_kv divides heads_q, the
    sequence has rows * W positions. Not causal: rank r has positions r * rows ... Causal with W > 1: the sequence is
    cut into 2 W chunks, and rank r has chunk r followed by chunk 2 W - 1 - r. scale: positive, the same on all ranks;
    0: 1 / sqrt(head_dim); all scales share a plan. Returns (out, lse): out as q, with v's head_dim; lse fp32 [batch,
    heads_q, rows], the log of the sum of exponentials.

    Both results have gradients, for head_dim 64 and 128 (between nodes there are no others at all); q, k, v and the
    results stay for the backward pass. Every rank runs it, or none: a rank gets the gradients of its keys and values
    from the queries of all ranks.

    Example::

        out, lse = perseus.ring_attention(q, k, v, causal=True)
        (out * w).sum().backward()
    """
    return _call.ring_attention(q, k, v, name_of(group), causal, scale, heads_first)


def moe_dispatch_gemm(tokens: torch.Tensor, chosen: torch.Tensor, router_weights: torch.Tensor, weights: torch.Tensor,
                      *, max_tokens: int, capacity: int,
                      group: GroupLike = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sends each token to the ranks of its experts, and multiplies it there by each of them. Forward only.

    tokens: bf16 [count, H], count <= max_tokens, may differ between ranks. chosen: int64 [count, top_k], experts 0 ...
    E - 1, negative: none.
    router_weights: fp32 [count, top_k]. weights: bf16 [E / W, H, N] of this rank's experts, or .transpose(1, 2) of an
    [E / W, N, H] tensor. max_tokens, and all sizes but count and capacity, are the same on all ranks.
    Returns (out, rows, expert_rows, status): out bf16 [capacity, N], rows of expert e from expert_rows[e, 0],
    expert_rows[e, 1] of them; expert_rows int32 [E / W, 2]; rows int32 [capacity, 4]: source rank, token, slot (-1 in
    rows that only fill up), and the router's weight (.view(torch.float32)). status int32 [8], of this launch on this
    rank: rows needed; choices that found no room and were dropped; choices of experts that do not exist, which are
    ignored; the first token with such a choice, or -1. Nothing is dropped while rows needed <= capacity.

    Example::

        capacity = perseus.moe_capacity(max_tokens=4096, hidden=H, columns=N, experts=64, top_k=8)
        weight, chosen = torch.topk(router(x).softmax(-1), 8)
        out, rows, expert_rows, status = perseus.moe_dispatch_gemm(x, chosen, weight.float(), experts, max_tokens=4096,
                                                                   capacity=capacity)
    """
    return _call.moe_dispatch_gemm(tokens, chosen, router_weights, weights, max_tokens, capacity, name_of(group))


def moe_capacity(*, max_tokens: int, hidden: int, columns: int, experts: int, top_k: int,
                 group: GroupLike = None) -> int:
    """*Collective.* The rows of moe_dispatch_gemm() that are always enough: all tokens of all ranks on this one."""
    g = find(group)
    plan = g.moe(tokens=max_tokens, hidden=hidden, columns=columns, experts=experts, top_k=top_k, capacity=0,
                 weights_transposed=0)
    info = g.library.prs_moe_info()
    g.library.prs_moe_plan_query(plan.handle, ctypes.byref(info))
    return int(info.capacity)


__all__ = ["all_gather_matmul", "all_gather_matmuls", "matmul_reduce_scatter", "matmul_all_reduce", "replicated_matmul",
           "ring_attention", "moe_dispatch_gemm", "moe_capacity", "PerseusError"]
