# SPDX-License-Identifier: Apache-2.0
"""Gradients of moe.py's ops (doc/decisions/0015): what goes back along the maps of a dispatch, and the backward pass of
a layer, which is one op."""
from __future__ import annotations

import ctypes
from typing import Any

import torch

from ._checks import _bf16, _check_tensor
from ._dispatch import _call, _define, _differentiate
from ._group import Group, Plan
from ._registry import find
from .moe import (COLUMNS, HIDDEN, LINEAR_LAYOUT, TOP_K, _at_least_one, _check_maps, _check_plan, _combined, _joined,
                  _plan_of, moe_ends)

# ---- launches ----

def _again(group: Group, plan: Plan, tokens: torch.Tensor, maps: torch.Tensor, beside: torch.Tensor | None,
           weighted: bool, made: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Sends tokens along the maps of an earlier dispatch, into made[0], the rows."""
    place = group.place
    x = group.library.prs_moe_again(tokens=place.read(tokens), out=place.write(made[0]), maps=place.read(maps),
                                    weighted=weighted, clear_fill=1)
    if beside is not None:
        x.beside, x.products = place.read(beside), place.write(made[1])
    group.launch(group.library.prs_moe_dispatch_again, plan.handle, ctypes.byref(x))
    return made[0]


def _moe_dispatch_again(tokens: torch.Tensor, maps: torch.Tensor, beside: torch.Tensor | None, weighted: bool,
                        capacity: int, sizes: list[int], group_name: str) -> tuple[torch.Tensor, torch.Tensor]:
    group, op = find(group_name), "moe_dispatch_again"
    plan = _plan_of(op, group, sizes)
    _check_tensor(group, op, "tokens", tokens, _bf16, (-1, sizes[HIDDEN]))
    _check_maps(op, group, plan, maps)
    _check_plan(op, plan, capacity, maps.shape[0])
    if beside is not None:
        _check_tensor(group, op, "beside", beside, _bf16, (capacity, sizes[HIDDEN]))
    made = _moe_dispatch_again_fake(tokens, maps, beside, weighted, capacity, sizes, group_name)
    _again(group, plan, tokens, maps, beside, weighted, made)
    return made


def _moe_dispatch_again_fake(tokens: torch.Tensor, maps: torch.Tensor, beside: torch.Tensor | None, weighted: bool,
                             capacity: int, sizes: list[int], group_name: str) -> tuple[torch.Tensor, torch.Tensor]:
    return (tokens.new_empty(capacity, sizes[HIDDEN]),
            tokens.new_empty(0 if beside is None else capacity, dtype=torch.float32))


def _values(group: Group, plan: Plan, values: torch.Tensor, origins: torch.Tensor, maps: torch.Tensor,
            out: torch.Tensor) -> torch.Tensor:
    """Brings a value of each row to its token."""
    place = group.place
    x = group.library.prs_moe_values(values=place.read(values), rows=place.read(origins),
                                     out=place.write(_at_least_one(out)), maps=place.read(maps))
    group.launch(group.library.prs_moe_return_values, plan.handle, ctypes.byref(x))
    return out


def _moe_return_values(values: torch.Tensor, origins: torch.Tensor, maps: torch.Tensor, count: int, sizes: list[int],
                       group_name: str) -> torch.Tensor:
    group, op = find(group_name), "moe_return_values"
    plan = _plan_of(op, group, sizes)
    _check_tensor(group, op, "values", values, torch.float32, (plan.info.capacity,))
    _check_maps(op, group, plan, maps, origins)
    return _values(group, plan, values, origins, maps, values.new_empty(count, sizes[TOP_K]))


def _moe_return_values_fake(values: torch.Tensor, origins: torch.Tensor, maps: torch.Tensor, count: int,
                            sizes: list[int], group_name: str) -> torch.Tensor:
    return values.new_empty(count, sizes[TOP_K])


def _multiplied(group: Group, plan: Plan, rows: torch.Tensor, weights: torch.Tensor, transposed: bool,
                maps: torch.Tensor) -> torch.Tensor:
    """The rows of each expert times its matrix."""
    place, (k, n) = group.place, weights.shape[:0:-1] if transposed else weights.shape[1:]
    out = rows.new_empty(rows.shape[0], n)
    x = group.library.prs_moe_product(rows=place.read(rows), weights=place.read(weights), out=place.write(out), k=k,
                                      n=n, weights_transposed=transposed, maps=place.read(maps))
    group.launch(group.library.prs_moe_multiply, plan.handle, ctypes.byref(x))
    return out


def _activation_back(group: Group, plan: Plan, columns: torch.Tensor, gradients: torch.Tensor, origins: torch.Tensor,
                     maps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient of columns, what the second product multiplied, times the router's weights, and the gradient of
    these in each row."""
    place, made = group.place, (torch.empty_like(columns), torch.empty_like(gradients),
                                columns.new_empty(columns.shape[0], dtype=torch.float32))
    x = group.library.prs_moe_activation(columns=place.read(columns), gradients=place.read(gradients),
                                         rows=place.read(origins), maps=place.read(maps))
    x.of_columns, x.weighted, x.products = (place.write(t) for t in made)
    group.launch(group.library.prs_moe_activation_back, plan.handle, ctypes.byref(x))
    return made


def _moe_layer_backward(g: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, origins: torch.Tensor,
                        expert_rows: torch.Tensor, maps: torch.Tensor, kept: list[torch.Tensor], needed: list[bool],
                        sizes: list[int], group_name: str,
                        up: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Gradients of tokens, router weights, gate_up, down and up; empty where not needed. kept: the tokens, or the
    dispatched rows and the first product of them. Rows that only fill up are zeros in all matrices whose products run
    over whole blocks. What is large goes when it has been used."""
    group, op = find(group_name), "moe_layer_backward"
    plan, hidden, linear = _plan_of(op, group, sizes), sizes[HIDDEN], bool(sizes[LINEAR_LAYOUT])
    capacity = plan.info.capacity
    _check_tensor(group, op, "g", g, _bf16, (-1, hidden))
    weights = _joined(op, group, sizes, gate_up, down, up)
    _check_maps(op, group, plan, maps, origins)
    for t, shape in zip(kept, ((capacity, hidden), (capacity, sizes[COLUMNS])) if len(kept) == 2 else ((-1, hidden),)):
        _check_tensor(group, op, "kept", t, _bf16, shape)
    made = list(_moe_layer_backward_fake(g, gate_up, down, origins, expert_rows, maps, kept,
                                         [*needed[:2], False, False, False], sizes, group_name))
    ends = moe_ends(expert_rows)

    def dispatched(tokens: torch.Tensor) -> torch.Tensor:
        return _again(group, plan, tokens, maps, None, False, (tokens.new_empty(capacity, hidden), tokens))

    def of_matrix(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The gradient of weights that make b's columns of a's, in the layout of the weights."""
        return torch._grouped_mm(b.t(), a, offs=ends) if linear else torch._grouped_mm(a.t(), b, offs=ends)
    x, columns = kept if len(kept) == 2 else (dispatched(kept[0]), None)
    if columns is None:
        columns = _multiplied(group, plan, x, weights, linear, maps)
    of_sums = dispatched(g)
    of_active = _multiplied(group, plan, of_sums, down, not linear, maps)  # but for the router's weights
    of_columns, weighted, products = _activation_back(group, plan, columns, of_active, origins, maps)
    del columns, of_active
    if needed[1]:
        _values(group, plan, products, origins, maps, made[1])
    if needed[3]:
        made[3] = of_matrix(weighted, of_sums)
    del weighted, of_sums
    if needed[0]:
        of_x = _multiplied(group, plan, of_columns, weights, not linear, maps)
        _combined(group, plan, of_x, maps, None, False, made[0])
        del of_x
    del weights
    for i, part in ((2, of_columns),) if up is None else zip((2, 4), of_columns.chunk(2, 1)):
        if needed[i]:
            made[i] = of_matrix(x, part)
    return tuple(made)


def _moe_layer_backward_fake(g: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, origins: torch.Tensor,
                             expert_rows: torch.Tensor, maps: torch.Tensor, kept: list[torch.Tensor],
                             needed: list[bool], sizes: list[int], group_name: str,
                             up: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    shapes = g.shape, (g.shape[0], sizes[TOP_K]), gate_up.shape, down.shape, gate_up.shape
    return tuple(g.new_empty(shape if want else (0,), dtype=torch.float32 if i == 1 else _bf16)
                 for i, (shape, want) in enumerate(zip(shapes, needed)))


_define("moe_dispatch_again(Tensor tokens, Tensor maps, Tensor? beside, bool weighted, int capacity, int[] sizes, str "
        "group_name) -> (Tensor, Tensor)", _moe_dispatch_again, _moe_dispatch_again_fake)
_define("moe_return_values(Tensor values, Tensor origins, Tensor maps, int count, int[] sizes, str group_name) -> "
        "Tensor", _moe_return_values, _moe_return_values_fake)
_define("moe_layer_backward(Tensor g, Tensor gate_up, Tensor down, Tensor origins, Tensor expert_rows, Tensor maps, "
        "Tensor[] kept, bool[] needed, int[] sizes, str group_name, Tensor? up=None) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor)", _moe_layer_backward, _moe_layer_backward_fake)


# ---- what autograd keeps, and calls ----

def _save_dispatch(ctx: Any, inputs: tuple, output: tuple) -> tuple:
    _, _, router_weights, ctx.sizes, _, _, ctx.group_name, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    return router_weights, output[1], output[4]


def _dispatch_backward(ctx: Any, saved: Any, needed: tuple, of_rows: torch.Tensor, *unused: Any) -> tuple:
    router_weights, origins, maps = saved
    of_tokens = _call.moe_combine(of_rows.contiguous(), router_weights, origins, maps, None, False, ctx.sizes,
                                 ctx.group_name)
    return of_tokens, None, None, None, None, None, None, None


def _save_combine(ctx: Any, inputs: tuple, output: torch.Tensor) -> tuple:
    rows, router_weights, origins, maps, residual, ctx.weighted, ctx.sizes, ctx.group_name = inputs
    ctx.capacity, ctx.count, ctx.has_residual = rows.shape[0], router_weights.shape[0], residual is not None
    return rows, origins, maps


def _combine_backward(ctx: Any, saved: Any, needed: tuple, g: torch.Tensor, *unused: Any) -> tuple:
    rows, origins, maps = saved
    g, weights = g.contiguous(), ctx.weighted and needed[1]
    of_rows = of_weights = None
    if needed[0] or weights:
        of_rows, products = _call.moe_dispatch_again(g, maps, rows if weights else None, ctx.weighted, ctx.capacity,
                                                    ctx.sizes, ctx.group_name)
    if weights:
        of_weights = _call.moe_return_values(products, origins, maps, ctx.count, ctx.sizes, ctx.group_name)
    return of_rows, of_weights, None, None, g if ctx.has_residual else None, None, None, None


def _save_layer(ctx: Any, inputs: tuple, output: tuple) -> tuple:
    tokens, _, _, gate_up, down, residual, ctx.sizes, _, _, ctx.group_name, _, keep, maps, up = inputs
    if not maps:
        raise RuntimeError("perseus.moe_layer: a gradient is needed, and the call keeps no maps (maps=False): they say "
                           "which way the tokens went")
    ctx.has_residual = residual is not None
    ctx.mark_non_differentiable(*output[1:])
    return gate_up, down, up, output[1], output[2], output[4], *(output[5:] if keep else (tokens,))


def _layer_backward(ctx: Any, saved: Any, needed: tuple, g: torch.Tensor, *unused: Any) -> tuple:
    gate_up, down, up, origins, expert_rows, maps, *kept = saved
    wanted = [needed[i] for i in (0, 2, 3, 4, 13)]
    found = _call.moe_layer_backward(g.contiguous(), gate_up, down, origins, expert_rows, maps, kept, wanted, ctx.sizes,
                                     ctx.group_name, up)
    of_tokens, of_weights, of_gate_up, of_down, of_up = (t if want else None for t, want in zip(found, wanted))
    return (of_tokens, None, of_weights, of_gate_up, of_down, g if ctx.has_residual else None, None, None, None, None,
            None, None, None, of_up)


for _name, _backward, _setup in (("moe_dispatch", _dispatch_backward, _save_dispatch),
                                 ("moe_combine", _combine_backward, _save_combine),
                                 ("moe_layer", _layer_backward, _save_layer)):
    _differentiate(_name, _backward, _setup)
