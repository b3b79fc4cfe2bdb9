# SPDX-License-Identifier: Apache-2.0
"""MoE in float8_e4m3fn with scales of blocks, as checkpoints of DeepSeek-V3 have them. Importing this module registers
its ops.

    plan = perseus.moe_plan(max_tokens=4096, hidden=7168, experts=256, top_k=8, inner=2048, dtype=torch.float8_e4m3fn)
    y, status = perseus.moe_scaled_layer(x, chosen, weights, gate_up, down, gate_up_scales, down_scales, plan)

A number stands for itself times its scale: one for 128 columns of a token, and one for 128 x 128 weights. Results are
bfloat16. Forward only; moe.h says how numbers are quantised.
"""
from __future__ import annotations

import ctypes
from typing import Any

import torch

from ._checks import _bf16, _check_kind, _check_tensor
from ._dispatch import _call, _define
from ._group import Group
from ._registry import find, world_of
from .moe import (BLOCK, EXPERTS, HIDDEN, LAYER, SIZES, Dispatched, MoePlan, _at_least_one, _batch, _layer_columns,
                  _made, moe_ends)
from .ops import _forward_only

_E4M3 = torch.float8_e4m3fn


def _scaled_batch(op: str, group: Group, sizes: list[int], capacity: int, maps_bytes: int, tokens: torch.Tensor,
                  token_scales: torch.Tensor | None, chosen: torch.Tensor, router_weights: torch.Tensor,
                  placement: torch.Tensor | None, maps: bool = True) -> tuple[Any, Any, tuple[torch.Tensor, ...]]:
    if token_scales is None and tokens.dtype is _E4M3:
        raise ValueError(f"perseus.{op}: tokens are {_E4M3} without token_scales: give their scales, or tokens of "
                         "torch.bfloat16, which are then quantised")
    found = _batch(op, group, sizes, capacity, maps_bytes, tokens, chosen, router_weights, placement, _E4M3,
                   _bf16 if token_scales is None else _E4M3, maps)
    if token_scales is not None:
        _check_tensor(group, op, "token_scales", token_scales, torch.float32,
                      (tokens.shape[0], sizes[HIDDEN] // BLOCK))
        found[1].token_scales = group.place.read(token_scales)
    return found


def _row_bytes(hidden: int) -> int:
    """Of a row that travels: the numbers, their scales, and a gap."""
    return (hidden + hidden // BLOCK * 4 + 127) // 128 * 128


def _moe_scaled_dispatch(tokens: torch.Tensor, token_scales: torch.Tensor | None, chosen: torch.Tensor,
                         router_weights: torch.Tensor, sizes: list[int], capacity: int, maps_bytes: int,
                         group_name: str, placement: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    group = find(group_name)
    plan, batch, made = _scaled_batch("moe_scaled_dispatch", group, sizes, capacity, maps_bytes, tokens, token_scales,
                                      chosen, router_weights, placement)
    rows = tokens.new_empty(capacity, plan.info.row_bytes, dtype=torch.uint8)
    batch.out, batch.clear_fill = group.place.write(rows), 1
    group.launch(group.library.prs_moe_dispatch, plan.handle, ctypes.byref(batch))
    return rows, *made


def _moe_scaled_dispatch_fake(tokens: torch.Tensor, token_scales: torch.Tensor | None, chosen: torch.Tensor,
                              router_weights: torch.Tensor, sizes: list[int], capacity: int, maps_bytes: int,
                              group_name: str, placement: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    return (tokens.new_empty(capacity, _row_bytes(sizes[HIDDEN]), dtype=torch.uint8),
            *_made(tokens, capacity, maps_bytes, sizes[EXPERTS] // world_of(group_name)))


def _moe_scaled_layer(tokens: torch.Tensor, token_scales: torch.Tensor | None, chosen: torch.Tensor,
                      router_weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
                      gate_up_scales: torch.Tensor, down_scales: torch.Tensor, residual: torch.Tensor | None,
                      sizes: list[int], capacity: int, maps_bytes: int, group_name: str,
                      placement: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    group, op = find(group_name), "moe_scaled_layer"
    if len(sizes) != SIZES or not sizes[LAYER]:
        raise ValueError(f"perseus.{op}: the plan has no layer: perseus.moe_plan() wants inner=, the columns between "
                         "the products")
    local, hidden, (columns, inner) = sizes[EXPERTS] // group.world, sizes[HIDDEN], _layer_columns(sizes)
    for what, t, n, k in (("gate_up", gate_up, columns, hidden), ("down", down, hidden, inner)):
        _check_tensor(group, op, what, t, _E4M3, (local, n, k))
    for what, t, n, k in (("gate_up_scales", gate_up_scales, columns, hidden), ("down_scales", down_scales, hidden,
                                                                               inner)):
        _check_tensor(group, op, what, t, torch.float32, (local, n // BLOCK, k // BLOCK))
    if residual is not None:
        _check_tensor(group, op, "residual", residual, _bf16, tuple(tokens.shape))
    plan, batch, made = _scaled_batch(op, group, sizes, capacity, maps_bytes, tokens, token_scales, chosen,
                                      router_weights, placement, maps=False)
    out, place = tokens.new_empty(tokens.shape, dtype=_bf16), group.place
    batch.weights, batch.down, batch.out = place.read(gate_up), place.read(down), place.write(_at_least_one(out))
    batch.weight_scales, batch.down_scales = place.read(gate_up_scales), place.read(down_scales)
    batch.residual = None if residual is None else place.read(residual)
    group.launch(group.library.prs_moe_layer, plan.handle, ctypes.byref(batch))
    return out, made[2]


def _moe_scaled_layer_fake(tokens: torch.Tensor, token_scales: torch.Tensor | None, chosen: torch.Tensor,
                           router_weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
                           gate_up_scales: torch.Tensor, down_scales: torch.Tensor, residual: torch.Tensor | None,
                           sizes: list[int], capacity: int, maps_bytes: int, group_name: str,
                           placement: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return (tokens.new_empty(tokens.shape, dtype=_bf16),
            _made(tokens, capacity, maps_bytes, sizes[EXPERTS] // world_of(group_name), False)[2])


_define("moe_scaled_dispatch(Tensor tokens, Tensor? token_scales, Tensor chosen, Tensor router_weights, int[] sizes, "
        "int capacity, int maps_bytes, str group_name, Tensor? placement=None) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor)",
        _moe_scaled_dispatch, _moe_scaled_dispatch_fake)
_define("moe_scaled_layer(Tensor tokens, Tensor? token_scales, Tensor chosen, Tensor router_weights, Tensor gate_up, "
        "Tensor down, Tensor gate_up_scales, Tensor down_scales, Tensor? residual, int[] sizes, int capacity, int "
        "maps_bytes, str group_name, Tensor? placement=None) -> (Tensor, Tensor)", _moe_scaled_layer,
        _moe_scaled_layer_fake)
for _name in ("moe_scaled_dispatch", "moe_scaled_layer"):
    _forward_only(_name)


def moe_scaled_dispatch(tokens: torch.Tensor, chosen: torch.Tensor, router_weights: torch.Tensor, plan: MoePlan,
                        placement: torch.Tensor | None = None, *,
                        token_scales: torch.Tensor | None = None) -> Dispatched:
    """moe_dispatch() of rows that travel quantised: `rows` are float8_e4m3fn [capacity, H] and `scales` fp32
    [capacity, H / 128], both views of memory that has the scales of a row after it. perseus.moe_combine() brings
    results back.

    tokens: bf16 [count, H], which the launch quantises, or float8_e4m3fn with token_scales: fp32 [count, H / 128].

    Example::

        d = perseus.moe_scaled_dispatch(x, chosen, weights, plan)
        y = perseus.moe_combine(grouped_scaled_products(d.rows, d.scales, d.ends), d)
    """
    _check_kind("moe_scaled_dispatch", "plan", plan, MoePlan)
    memory, origins, expert_rows, status, maps = _call.moe_scaled_dispatch(
        tokens, token_scales, chosen, router_weights.detach(), plan.sizes, plan.capacity, plan.maps_bytes,
        plan.group_name, placement)
    hidden = plan.sizes[HIDDEN]
    rows = memory.narrow(1, 0, hidden).view(_E4M3)
    scales = memory.narrow(1, hidden, hidden // BLOCK * 4).view(torch.float32)
    return Dispatched(rows, expert_rows, moe_ends(expert_rows), origins, status, router_weights, maps, plan, scales)


def moe_scaled_layer(tokens: torch.Tensor, chosen: torch.Tensor, router_weights: torch.Tensor, gate_up: torch.Tensor,
                     down: torch.Tensor, gate_up_scales: torch.Tensor, down_scales: torch.Tensor, plan: MoePlan,
                     residual: torch.Tensor | None = None, placement: torch.Tensor | None = None, *,
                     token_scales: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """moe_layer() in float8_e4m3fn. Returns (out, status): bf16 [count, H], and int32 [8] as of moe_dispatch_gemm().

    tokens, token_scales: as of moe_scaled_dispatch(). gate_up: float8_e4m3fn [E / W, 2 inner, H], the gate first, as
    checkpoints stack w1 and w3; not gated [E / W, inner, H]. down: [E / W, H, inner]. Their scales: fp32 [E / W, rows /
    128, columns / 128], a checkpoint's weight_scale_inv. residual: bf16. The columns between the products are quantised
    again. No gradients.

    Example::

        plan = perseus.moe_plan(..., inner=2048, dtype=torch.float8_e4m3fn)
        y, status = perseus.moe_scaled_layer(x, chosen, weights, w13, w2, w13_scale_inv, w2_scale_inv, plan)
    """
    _check_kind("moe_scaled_layer", "plan", plan, MoePlan)
    return _call.moe_scaled_layer(tokens, token_scales, chosen, router_weights, gate_up, down, gate_up_scales,
                                 down_scales, residual, plan.sizes, plan.capacity, plan.maps_bytes, plan.group_name,
                                 placement)


__all__ = ["moe_scaled_dispatch", "moe_scaled_layer"]
