# SPDX-License-Identifier: Apache-2.0
"""MoE there and back: dispatch, combine, the whole layer, and their gradients. Importing this module registers torch.ops.perseus.moe_*.

Rank r has experts r E / W ... of E. A token travels once to each rank that has one of its experts, and gets one row there for each of them:

    plan = perseus.moe_plan(max_tokens=4096, hidden=7168, experts=256, top_k=8)      # all ranks, once
    d = perseus.moe_dispatch(x, chosen, weights, plan)                               # d.rows: the tokens of this rank's experts, expert by expert
    h = torch._grouped_mm(d.rows, w1, offs=d.ends)                                   # products of yours
    y = perseus.moe_combine(torch._grouped_mm(act(h), w2, offs=d.ends), d)           # y: [count, H], this rank's tokens again

or in one call `y, status = perseus.moe_layer(x, chosen, weights, gate_up, down, plan)`. What perseus.ops says of tensors, streams, graphs and
errors holds here too. All ranks make the same calls, also those without tokens, and need the same gradients.
"""
from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch

from ._group import Group, GroupLike, Plan, find, world_of
from .ops import MOE_STATUS_WORDS, _bf16, _check_tensor, _define, _library, _ops

ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}  # enum prs_fused_activation; a test compares
TOKENS, HIDDEN, COLUMNS, EXPERTS, TOP_K, CAPACITY, LINEAR_LAYOUT, ACTIVATION, GATED, LAYER = range(10)  # in `sizes`: struct prs_moe_shape
ORIGIN_WORDS, ORIGIN_WEIGHT = 4, 3  # of struct prs_moe_row
BLOCK = 128  # each expert's rows begin at a multiple of it


class MoePlan(NamedTuple):
    """What moe_plan() gives. sizes: the fields of struct prs_moe_shape."""
    group_name: str
    sizes: tuple[int, ...]
    capacity: int  # rows on this rank
    maps_bytes: int


class Dispatched(NamedTuple):
    """Tokens at their experts, and what moe_combine() must know of the way they came."""
    rows: torch.Tensor  # bf16 [capacity, H]: expert e's rows begin at expert_rows[e, 0]; those that only fill its last 128 are zeros
    expert_rows: torch.Tensor  # int32 [E / W, 2]: first row, number of rows
    ends: torch.Tensor  # int32 [E / W]: where each expert's last 128 end, for torch._grouped_mm(offs=)
    origins: torch.Tensor  # int32 [capacity, 4]: rank, token, slot (-1 in rows that only fill up), the router's weight (.view(torch.float32))
    status: torch.Tensor  # int32 [8], as of moe_dispatch_gemm()
    router_weights: torch.Tensor
    maps: torch.Tensor
    plan: MoePlan


# ---- launches ----

def _plan_of(op: str, group: Group, sizes: list[int]) -> Plan:
    if len(sizes) != LAYER + 1:
        raise ValueError(f"perseus.{op}: {len(sizes)} sizes; they are the {LAYER + 1} of perseus.moe_plan().sizes")
    return group.moe_of(tuple(sizes))


def _check_plan(op: str, plan: Plan, capacity: int, maps_bytes: int) -> None:
    if (capacity, maps_bytes) != (plan.info.capacity, plan.info.maps_bytes):
        raise ValueError(f"perseus.{op}: capacity {capacity} and maps of {maps_bytes} bytes; the plan has {plan.info.capacity} and "
                         f"{plan.info.maps_bytes}: take them from the perseus.moe_plan() of this group and these sizes")


def _check_maps(op: str, group: Group, plan: Plan, maps: torch.Tensor, origins: torch.Tensor | None = None) -> None:
    _check_tensor(group, op, "maps", maps, torch.uint8, (plan.info.maps_bytes,))
    if origins is not None:
        _check_tensor(group, op, "origins", origins, torch.int32, (plan.info.capacity, ORIGIN_WORDS))


def _batch(op: str, group: Group, sizes: list[int], capacity: int, maps_bytes: int, tokens: torch.Tensor, chosen: torch.Tensor,
           router_weights: torch.Tensor) -> tuple[Plan, Any, tuple[torch.Tensor, ...]]:
    """What dispatch and layer have in common: the plan, the operands, and new origins, expert_rows, status and maps."""
    plan = _plan_of(op, group, sizes)
    _check_tensor(group, op, "tokens", tokens, _bf16, (-1, sizes[HIDDEN]))
    count, place = tokens.shape[0], group.place
    _check_tensor(group, op, "chosen", chosen, torch.int64, (count, sizes[TOP_K]))
    _check_tensor(group, op, "router_weights", router_weights, torch.float32, (count, sizes[TOP_K]))
    if count > sizes[TOKENS]:
        raise ValueError(f"perseus.{op}: tokens has {count} rows, and the plan's max_tokens is {sizes[TOKENS]}")
    _check_plan(op, plan, capacity, maps_bytes)
    made = _made(tokens, capacity, maps_bytes, sizes[EXPERTS] // group.world)
    batch = group.library.prs_moe_batch(count=count, tokens=place.read(tokens), chosen=place.read(chosen), router_weights=place.read(router_weights))
    batch.rows, batch.expert_rows, batch.status, batch.maps = (place.write(t) for t in made)
    return plan, batch, made


def _made(tokens: torch.Tensor, capacity: int, maps_bytes: int, local: int) -> tuple[torch.Tensor, ...]:
    integers = [tokens.new_empty(*shape, dtype=torch.int32) for shape in ((capacity, ORIGIN_WORDS), (local, 2), (MOE_STATUS_WORDS,))]
    return *integers, tokens.new_empty(maps_bytes, dtype=torch.uint8)


def _at_least_one(t: torch.Tensor) -> torch.Tensor:
    """The library wants an address even where a rank has no tokens, and then writes nothing there."""
    return t if t.shape[0] else t.new_empty(1, *t.shape[1:])


def _moe_dispatch(tokens: torch.Tensor, chosen: torch.Tensor, router_weights: torch.Tensor, sizes: list[int], capacity: int, maps_bytes: int,
                  group_name: str) -> tuple[torch.Tensor, ...]:
    group = find(group_name)
    plan, batch, made = _batch("moe_dispatch", group, sizes, capacity, maps_bytes, tokens, chosen, router_weights)
    rows = tokens.new_empty(capacity, sizes[HIDDEN])
    batch.out, batch.clear_fill = group.place.write(rows), 1
    group.launch(group.library.prs_moe_dispatch, plan.handle, ctypes.byref(batch))
    return rows, *made


def _moe_dispatch_fake(tokens: torch.Tensor, chosen: torch.Tensor, router_weights: torch.Tensor, sizes: list[int], capacity: int, maps_bytes: int,
                       group_name: str) -> tuple[torch.Tensor, ...]:
    return tokens.new_empty(capacity, sizes[HIDDEN]), *_made(tokens, capacity, maps_bytes, sizes[EXPERTS] // world_of(group_name))


def _moe_combine(rows: torch.Tensor, router_weights: torch.Tensor, origins: torch.Tensor, maps: torch.Tensor, residual: torch.Tensor | None,
                 weighted: bool, sizes: list[int], group_name: str) -> torch.Tensor:
    group, op = find(group_name), "moe_combine"
    plan, count, hidden, place = _plan_of(op, group, sizes), router_weights.shape[0], sizes[HIDDEN], group.place
    _check_tensor(group, op, "rows", rows, _bf16, (plan.info.capacity, hidden))
    _check_maps(op, group, plan, maps)
    if residual is not None:
        _check_tensor(group, op, "residual", residual, _bf16, (count, hidden))
    out = rows.new_empty(count, hidden)
    results = group.library.prs_moe_results(rows=place.read(rows), out=place.write(_at_least_one(out)), maps=place.read(maps), unweighted=not weighted,
                                            residual=None if residual is None else place.read(residual))
    group.launch(group.library.prs_moe_combine, plan.handle, ctypes.byref(results))
    return out


def _moe_combine_fake(rows: torch.Tensor, router_weights: torch.Tensor, origins: torch.Tensor, maps: torch.Tensor, residual: torch.Tensor | None,
                      weighted: bool, sizes: list[int], group_name: str) -> torch.Tensor:
    return rows.new_empty(router_weights.shape[0], rows.shape[1])


def _moe_dispatch_again(tokens: torch.Tensor, maps: torch.Tensor, beside: torch.Tensor | None, weighted: bool, capacity: int, sizes: list[int],
                        group_name: str) -> tuple[torch.Tensor, torch.Tensor]:
    group, op = find(group_name), "moe_dispatch_again"
    plan, place = _plan_of(op, group, sizes), group.place
    _check_tensor(group, op, "tokens", tokens, _bf16, (-1, sizes[HIDDEN]))
    _check_maps(op, group, plan, maps)
    _check_plan(op, plan, capacity, maps.shape[0])
    if beside is not None:
        _check_tensor(group, op, "beside", beside, _bf16, (capacity, sizes[HIDDEN]))
    rows, products = _moe_dispatch_again_fake(tokens, maps, beside, weighted, capacity, sizes, group_name)
    again = group.library.prs_moe_again(tokens=place.read(tokens), out=place.write(rows), maps=place.read(maps), weighted=weighted, clear_fill=1)
    if beside is not None:
        again.beside, again.products = place.read(beside), place.write(products)
    group.launch(group.library.prs_moe_dispatch_again, plan.handle, ctypes.byref(again))
    return rows, products


def _moe_dispatch_again_fake(tokens: torch.Tensor, maps: torch.Tensor, beside: torch.Tensor | None, weighted: bool, capacity: int, sizes: list[int],
                             group_name: str) -> tuple[torch.Tensor, torch.Tensor]:
    return tokens.new_empty(capacity, sizes[HIDDEN]), tokens.new_empty(0 if beside is None else capacity, dtype=torch.float32)


def _moe_return_values(values: torch.Tensor, origins: torch.Tensor, maps: torch.Tensor, count: int, sizes: list[int], group_name: str) -> torch.Tensor:
    group, op = find(group_name), "moe_return_values"
    plan, place = _plan_of(op, group, sizes), group.place
    _check_tensor(group, op, "values", values, torch.float32, (plan.info.capacity,))
    _check_maps(op, group, plan, maps, origins)
    out = values.new_empty(count, sizes[TOP_K])
    x = group.library.prs_moe_values(values=place.read(values), rows=place.read(origins), out=place.write(_at_least_one(out)), maps=place.read(maps))
    group.launch(group.library.prs_moe_return_values, plan.handle, ctypes.byref(x))
    return out


def _moe_return_values_fake(values: torch.Tensor, origins: torch.Tensor, maps: torch.Tensor, count: int, sizes: list[int],
                            group_name: str) -> torch.Tensor:
    return values.new_empty(count, sizes[TOP_K])


def _moe_layer(tokens: torch.Tensor, chosen: torch.Tensor, router_weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
               residual: torch.Tensor | None, sizes: list[int], capacity: int, maps_bytes: int, group_name: str) -> tuple[torch.Tensor, ...]:
    group, op = find(group_name), "moe_layer"
    if len(sizes) != LAYER + 1 or not sizes[LAYER]:
        raise ValueError(f"perseus.{op}: the plan has no layer: perseus.moe_plan() wants inner=, the columns between the products")
    local, hidden, columns, inner = sizes[EXPERTS] // group.world, sizes[HIDDEN], sizes[COLUMNS], sizes[COLUMNS] // (2 if sizes[GATED] else 1)
    _check_tensor(group, op, "gate_up", gate_up, _bf16, (local, columns, hidden) if sizes[LINEAR_LAYOUT] else (local, hidden, columns))
    _check_tensor(group, op, "down", down, _bf16, (local, hidden, inner) if sizes[LINEAR_LAYOUT] else (local, inner, hidden))
    if residual is not None:
        _check_tensor(group, op, "residual", residual, _bf16, tuple(tokens.shape))
    plan, batch, made = _batch(op, group, sizes, capacity, maps_bytes, tokens, chosen, router_weights)
    out, place = torch.empty_like(tokens), group.place
    batch.weights, batch.down, batch.out = place.read(gate_up), place.read(down), place.write(_at_least_one(out))
    batch.residual = None if residual is None else place.read(residual)
    group.launch(group.library.prs_moe_layer, plan.handle, ctypes.byref(batch))
    return out, *made


def _moe_layer_fake(tokens: torch.Tensor, chosen: torch.Tensor, router_weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
                    residual: torch.Tensor | None, sizes: list[int], capacity: int, maps_bytes: int, group_name: str) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(tokens), *_made(tokens, capacity, maps_bytes, sizes[EXPERTS] // world_of(group_name))


_define("moe_dispatch(Tensor tokens, Tensor chosen, Tensor router_weights, int[] sizes, int capacity, int maps_bytes, str group_name)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)", _moe_dispatch, _moe_dispatch_fake)
_define("moe_combine(Tensor rows, Tensor router_weights, Tensor origins, Tensor maps, Tensor? residual, bool weighted, int[] sizes, str group_name)"
        " -> Tensor", _moe_combine, _moe_combine_fake)
_define("moe_dispatch_again(Tensor tokens, Tensor maps, Tensor? beside, bool weighted, int capacity, int[] sizes, str group_name) -> (Tensor, Tensor)",
        _moe_dispatch_again, _moe_dispatch_again_fake)
_define("moe_return_values(Tensor values, Tensor origins, Tensor maps, int count, int[] sizes, str group_name) -> Tensor",
        _moe_return_values, _moe_return_values_fake)
_define("moe_layer(Tensor tokens, Tensor chosen, Tensor router_weights, Tensor gate_up, Tensor down, Tensor? residual, int[] sizes, int capacity, "
        "int maps_bytes, str group_name) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", _moe_layer, _moe_layer_fake)


# ---- gradients (doc/decisions/0015) ----

def _save_dispatch(ctx: Any, inputs: tuple, output: tuple) -> None:
    _, _, router_weights, ctx.sizes, _, _, ctx.group_name = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(router_weights, output[1], output[4])


def _dispatch_backward(ctx: Any, of_rows: torch.Tensor, *unused: Any) -> tuple:
    router_weights, origins, maps = ctx.saved_tensors
    of_tokens = _ops.moe_combine(of_rows.contiguous(), router_weights, origins, maps, None, False, ctx.sizes, ctx.group_name)
    return of_tokens, None, None, None, None, None, None


def _save_combine(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    rows, router_weights, origins, maps, residual, ctx.weighted, ctx.sizes, ctx.group_name = inputs
    ctx.capacity, ctx.count, ctx.has_residual = rows.shape[0], router_weights.shape[0], residual is not None
    ctx.save_for_backward(rows, origins, maps)


def _combine_backward(ctx: Any, g: torch.Tensor) -> tuple:
    rows, origins, maps = ctx.saved_tensors
    g, weights = g.contiguous(), ctx.weighted and ctx.needs_input_grad[1]
    of_rows = of_weights = None
    if ctx.needs_input_grad[0] or weights:
        of_rows, products = _ops.moe_dispatch_again(g, maps, rows if weights else None, ctx.weighted, ctx.capacity, ctx.sizes, ctx.group_name)
    if weights:
        of_weights = _ops.moe_return_values(products, origins, maps, ctx.count, ctx.sizes, ctx.group_name)
    return of_rows, of_weights, None, None, g if ctx.has_residual else None, None, None, None


def _activate(kind: int, x: torch.Tensor) -> torch.Tensor:
    if kind in (ACTIVATIONS["gelu"], ACTIVATIONS["gelu_tanh"]):
        return torch.nn.functional.gelu(x, approximate="tanh" if kind == ACTIVATIONS["gelu_tanh"] else "none")
    return {ACTIVATIONS["none"]: torch.clone, ACTIVATIONS["relu"]: torch.relu, ACTIVATIONS["silu"]: torch.nn.functional.silu}[kind](x)


def _activate_backward(kind: int, g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if kind in (ACTIVATIONS["gelu"], ACTIVATIONS["gelu_tanh"]):
        return torch.ops.aten.gelu_backward(g, x, approximate="tanh" if kind == ACTIVATIONS["gelu_tanh"] else "none")
    if kind == ACTIVATIONS["silu"]:
        return torch.ops.aten.silu_backward(g, x)
    return g if kind == ACTIVATIONS["none"] else g * (x > 0)


def _save_layer(ctx: Any, inputs: tuple, output: tuple) -> None:
    tokens, _, router_weights, gate_up, down, residual, ctx.sizes, ctx.capacity, _, ctx.group_name = inputs
    ctx.has_residual = residual is not None
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(tokens, router_weights, gate_up, down, output[1], output[2], output[4])


def _layer_backward(ctx: Any, g: torch.Tensor, *unused: Any) -> tuple:
    """Dispatches tokens and gradients again, multiplies what was not kept, and goes back. Rows that only fill up are zeros in both."""
    tokens, router_weights, gate_up, down, origins, expert_rows, maps = ctx.saved_tensors
    sizes, name, g, linear = ctx.sizes, ctx.group_name, g.contiguous(), ctx.sizes[LINEAR_LAYOUT]
    kind, gated, ends = sizes[ACTIVATION], sizes[GATED], moe_ends(expert_rows)
    first_weights, second_weights = (t.transpose(1, 2) if linear else t for t in (gate_up, down))
    x, gs = (_ops.moe_dispatch_again(t, maps, None, False, ctx.capacity, sizes, name)[0] for t in (tokens, g))
    weight = origins.view(torch.float32)[:, ORIGIN_WEIGHT:]
    first = torch._grouped_mm(x, first_weights, offs=ends).float()
    gate, up = first.chunk(2, -1) if gated else (first, None)
    active = _activate(kind, gate)
    h = active if up is None else active * up
    u = torch._grouped_mm(gs, second_weights.transpose(1, 2), offs=ends).float()  # the gradient of h, but for the router's weight
    of_weights = _ops.moe_return_values((u * h).sum(-1), origins, maps, tokens.shape[0], sizes, name) if ctx.needs_input_grad[2] else None
    of_h = u * weight
    of_gate = _activate_backward(kind, of_h if up is None else of_h * up, gate)
    of_first = (of_gate if up is None else torch.cat((of_gate, of_h * active), -1)).to(_bf16)
    of_x = torch._grouped_mm(of_first, first_weights.transpose(1, 2), offs=ends) if ctx.needs_input_grad[0] else None
    of_tokens = None if of_x is None else _ops.moe_combine(of_x, router_weights, origins, maps, None, False, sizes, name)
    weighted = (h * weight).to(_bf16)

    def of_matrix(needed: bool, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
        """The gradient of weights that make b's columns of a's, in the layout of the weights."""
        return None if not needed else torch._grouped_mm(b.t(), a, offs=ends) if linear else torch._grouped_mm(a.t(), b, offs=ends)
    return (of_tokens, None, of_weights, of_matrix(ctx.needs_input_grad[3], x, of_first), of_matrix(ctx.needs_input_grad[4], weighted, gs),
            g if ctx.has_residual else None, None, None, None, None)


for _name, _backward, _setup in (("moe_dispatch", _dispatch_backward, _save_dispatch), ("moe_combine", _combine_backward, _save_combine),
                                 ("moe_layer", _layer_backward, _save_layer)):
    torch.library.register_autograd(f"perseus::{_name}", _backward, setup_context=_setup, lib=_library)


# ---- the ops as functions of a plan ----

def moe_plan(*, max_tokens: int, hidden: int, experts: int, top_k: int, capacity: int = 0, inner: int = 0, activation: str = "silu", gated: bool = True,
             linear_layout: bool = False, group: GroupLike = None) -> MoePlan:
    """*Collective.* Opens a plan, or finds the one of these sizes. All arguments but capacity are the same on all ranks.

    max_tokens: the most of any rank. experts: of all ranks. capacity: rows on this rank, a multiple of 128; 0: as many as can ever arrive, so
    that nothing is dropped. inner: for moe_layer(), the columns between its products; activation ("none", "relu", "gelu", "gelu_tanh", "silu"), gated and
    linear_layout say what its weights are.

    Example::

        plan = perseus.moe_plan(max_tokens=4096, hidden=7168, experts=256, top_k=8, inner=2048)
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"perseus.moe_plan: activation {activation!r} is none of {', '.join(ACTIVATIONS)}")
    opened, layer = find(group), int(inner != 0)
    sizes = (max_tokens, hidden, inner * (2 if gated else 1), experts, top_k, capacity, int(linear_layout), layer * ACTIVATIONS[activation],
             layer * int(gated), layer)
    info = opened.moe_of(sizes).info
    return MoePlan(opened.name, sizes, info.capacity, info.maps_bytes)


def moe_ends(expert_rows: torch.Tensor) -> torch.Tensor:
    """Where the last 128 rows of each expert end: int32 [E / W], for torch._grouped_mm(offs=)."""
    return ((expert_rows.sum(1) + (BLOCK - 1)) // BLOCK * BLOCK).to(torch.int32)


def moe_dispatch(tokens: torch.Tensor, chosen: torch.Tensor, router_weights: torch.Tensor, plan: MoePlan) -> Dispatched:
    """Sends each token to the ranks of its experts. The gradient of tokens is moe_combine() of the rows' gradients, without weights.

    tokens: bf16 [count, H], count <= max_tokens, may differ between ranks. chosen: int64 [count, top_k], experts 0 ... E - 1, negative: none.
    router_weights: fp32 [count, top_k]; they get their gradient in moe_combine().

    Example::

        d = perseus.moe_dispatch(x, chosen, weights, plan)
        y = perseus.moe_combine(torch._grouped_mm(d.rows, w, offs=d.ends), d)
    """
    rows, origins, expert_rows, status, maps = _ops.moe_dispatch(tokens, chosen, router_weights.detach(), plan.sizes, plan.capacity, plan.maps_bytes,
                                                                 plan.group_name)
    return Dispatched(rows, expert_rows, moe_ends(expert_rows), origins, status, router_weights, maps, plan)


def moe_combine(rows: torch.Tensor, dispatched: Dispatched, residual: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of each token's rows, times their router weights, + residual: bf16 [count, H]. Gradients of rows, router weights and residual.

    rows: bf16 [capacity, H], in the order of dispatched.rows. A rank adds up its experts' rows of a token before they travel.

    Example::

        y = perseus.moe_combine(experts(d.rows), d, residual=x)
    """
    d = dispatched
    return _ops.moe_combine(rows, d.router_weights, d.origins, d.maps, residual, True, d.plan.sizes, d.plan.group_name)


def moe_layer(tokens: torch.Tensor, chosen: torch.Tensor, router_weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, plan: MoePlan,
              residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole layer in one launch. Returns (out, status): bf16 [count, H], and int32 [8] as of moe_dispatch_gemm().

    out = the sum over a token's experts of router weight * (activation(x @ gate) * (x @ up)) @ down, + residual.
    tokens, chosen, router_weights: as of moe_dispatch(). gate_up: bf16 [E / W, H, 2 inner], the gate's columns first, or, not gated, [E / W, H,
    inner]; down: [E / W, inner, H]. With linear_layout both are transposed, as torch.nn.Linear keeps weights. Gradients of all of them, and of residual:
    the backward pass dispatches tokens and gradients again, and makes the first product once more.

    Example::

        plan = perseus.moe_plan(max_tokens=4096, hidden=7168, experts=256, top_k=8, inner=2048)
        y, status = perseus.moe_layer(x, chosen, weights, gate_up, down, plan, residual=x)
    """
    out, _, _, status, _ = _ops.moe_layer(tokens, chosen, router_weights, gate_up, down, residual, plan.sizes, plan.capacity, plan.maps_bytes,
                                          plan.group_name)
    return out, status


__all__ = ["Dispatched", "MoePlan", "moe_combine", "moe_dispatch", "moe_ends", "moe_layer", "moe_plan"]
