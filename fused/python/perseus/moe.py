# SPDX-License-Identifier: Apache-2.0
"""MoE: dispatch, combine, the whole layer, and their gradients. Importing this module registers
torch.ops.perseus.moe_*.

Rank r has experts r E / W ... of E. A token travels once to each rank that has one of its experts, and gets one row
there for each of them:

    plan = perseus.moe_plan(max_tokens=4096, hidden=7168, experts=256, top_k=8)  # all ranks, once
    d = perseus.moe_dispatch(x, chosen, weights, plan)  # d.rows: the tokens of this rank's experts, expert by expert
    h = torch._grouped_mm(d.rows, w1, offs=d.ends)  # your own products
    y = perseus.moe_combine(torch._grouped_mm(act(h), w2, offs=d.ends), d)  # y: [count, H], this rank's tokens again

or in one call `y, status = perseus.moe_layer(x, chosen, weights, gate_up, down, plan)`. What perseus.ops says of
tensors, streams, graphs and errors holds here too. All ranks make the same calls, also those without tokens, and need
the same gradients.
"""
from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch

from ._checks import _bf16, _check_kind, _check_tensor
from ._dispatch import _autocast, _call, _define, _differentiate
from ._group import Group, Plan
from ._library import library
from ._registry import GroupLike, find, world_of
from .ops import MOE_STATUS_WORDS

ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}  # enum prs_activation; a test compares
(TOKENS, HIDDEN, COLUMNS, EXPERTS, TOP_K, CAPACITY, LINEAR_LAYOUT, ACTIVATION, GATED, LAYER, LOGICAL_EXPERTS, REPLICAS,
 DTYPE, SIZES) = range(14)  # in `sizes`: struct prs_moe_shape
PATHS = {1: "kernels", 2: "one kernel"}  # enum prs_moe_path
DTYPES = {_bf16: 0, torch.float8_e4m3fn: 4}  # enum prs_dtype, 0 its default
ORIGIN_WORDS = 4  # of struct prs_moe_row
BLOCK = 128  # each expert's rows begin at a multiple of it


class MoePlan(NamedTuple):
    """What moe_plan() gives. sizes: the fields of struct prs_moe_shape."""
    group_name: str
    sizes: tuple[int, ...]
    capacity: int  # rows on this rank
    maps_bytes: int
    path: str = "kernels"  # how moe_layer() runs where no gradient is needed: "one kernel" or "kernels"


class Dispatched(NamedTuple):
    """Tokens at their experts, and what moe_combine() must know of the way they came."""
    # bf16 [capacity, H]: expert e's rows begin at expert_rows[e, 0]; those that only fill its last 128 are zeros
    rows: torch.Tensor
    expert_rows: torch.Tensor  # int32 [E / W, 2]: first row, number of rows
    ends: torch.Tensor  # int32 [E / W]: where each expert's last 128 end, for torch._grouped_mm(offs=)
    # int32 [capacity, 4]: rank, token, slot (-1 in rows that only fill up), the router's weight (.view(torch.float32))
    origins: torch.Tensor
    # int32 [8], as of moe_dispatch_gemm(); [5], [6]: choices of absent experts, and of places that do not exist
    status: torch.Tensor
    router_weights: torch.Tensor
    maps: torch.Tensor
    plan: MoePlan
    scales: torch.Tensor | None = None  # of moe_scaled_dispatch(): fp32 [capacity, H / 128]


# ---- launches ----

def _plan_of(op: str, group: Group, sizes: list[int], dtype: torch.dtype | None = _bf16) -> Plan:
    """dtype: of tokens and weights; None: any."""
    if len(sizes) != SIZES:
        raise ValueError(f"perseus.{op}: {len(sizes)} sizes; they are the {SIZES} of perseus.moe_plan().sizes")
    if dtype is not None and sizes[DTYPE] != DTYPES[dtype]:
        raise TypeError(f"perseus.{op}: the plan's dtype is not {dtype}: perseus.moe_plan(dtype=) says which it is. "
                        "moe_scaled_dispatch() and moe_scaled_layer() take plans of torch.float8_e4m3fn, moe_combine() "
                        "takes any, all others take plans of torch.bfloat16")
    return group.moe_of(tuple(sizes))


def _check_plan(op: str, plan: Plan, capacity: int, maps_bytes: int) -> None:
    if (capacity, maps_bytes) != (plan.info.capacity, plan.info.maps_bytes):
        raise ValueError(f"perseus.{op}: capacity {capacity} and maps of {maps_bytes} bytes; the plan has "
                         f"{plan.info.capacity} and {plan.info.maps_bytes}: take them from the perseus.moe_plan() of "
                         "this group and these sizes")


def _check_maps(op: str, group: Group, plan: Plan, maps: torch.Tensor, origins: torch.Tensor | None = None) -> None:
    _check_tensor(group, op, "maps", maps, torch.uint8, (plan.info.maps_bytes,))
    if origins is not None:
        _check_tensor(group, op, "origins", origins, torch.int32, (plan.info.capacity, ORIGIN_WORDS))


def _check_placement(op: str, group: Group, sizes: list[int], placement: torch.Tensor | None) -> None:
    if (placement is None) != (sizes[LOGICAL_EXPERTS] == 0):
        raise ValueError(f"perseus.{op}: placement is {'None' if placement is None else 'given'}, and the plan has "
                         f"{sizes[LOGICAL_EXPERTS]} logical experts: perseus.moe_plan(logical_experts=, replicas=) and "
                         "placement= go together")
    if placement is not None:
        _check_tensor(group, op, "placement", placement, torch.int32, (sizes[LOGICAL_EXPERTS], sizes[REPLICAS]))


def _batch(op: str, group: Group, sizes: list[int], capacity: int, maps_bytes: int, tokens: torch.Tensor,
           chosen: torch.Tensor, router_weights: torch.Tensor, placement: torch.Tensor | None,
           of_plan: torch.dtype = _bf16, of_tokens: torch.dtype = _bf16,
           maps: bool = True) -> tuple[Plan, Any, tuple[torch.Tensor, ...]]:
    """What dispatch and layer have in common: the plan, the operands, and new origins, expert_rows, status and maps.
    of_plan, of_tokens: their dtypes. maps False: status alone is written, and the others are empty."""
    plan = _plan_of(op, group, sizes, of_plan)
    _check_tensor(group, op, "tokens", tokens, of_tokens, (-1, sizes[HIDDEN]))
    count, place = tokens.shape[0], group.place
    _check_tensor(group, op, "chosen", chosen, torch.int64, (count, sizes[TOP_K]))
    _check_tensor(group, op, "router_weights", router_weights, torch.float32, (count, sizes[TOP_K]))
    if count > sizes[TOKENS]:
        raise ValueError(f"perseus.{op}: tokens has {count} rows, and the plan's max_tokens is {sizes[TOKENS]}")
    _check_plan(op, plan, capacity, maps_bytes)
    _check_placement(op, group, sizes, placement)
    made = _made(tokens, capacity, maps_bytes, sizes[EXPERTS] // group.world, maps)
    batch = group.library.prs_moe_batch(count=count, tokens=place.read(tokens), chosen=place.read(chosen),
                                        router_weights=place.read(router_weights), status=place.write(made[2]))
    if maps:
        batch.rows, batch.expert_rows, batch.maps = (place.write(made[i]) for i in (0, 1, 3))
    batch.placement = None if placement is None else place.read(placement)
    return plan, batch, made


def _made(tokens: torch.Tensor, capacity: int, maps_bytes: int, local: int,
          maps: bool = True) -> tuple[torch.Tensor, ...]:
    integers = [tokens.new_empty(*shape, dtype=torch.int32)
                for shape in ((capacity if maps else 0, ORIGIN_WORDS), (local if maps else 0, 2), (MOE_STATUS_WORDS,))]
    return *integers, tokens.new_empty(maps_bytes if maps else 0, dtype=torch.uint8)


def _at_least_one(t: torch.Tensor) -> torch.Tensor:
    """The library wants an address even where a rank has no tokens, and then writes nothing there."""
    return t if t.shape[0] else t.new_empty(1, *t.shape[1:])


def _moe_dispatch(tokens: torch.Tensor, chosen: torch.Tensor, router_weights: torch.Tensor, sizes: list[int],
                  capacity: int, maps_bytes: int, group_name: str,
                  placement: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    group = find(group_name)
    plan, batch, made = _batch("moe_dispatch", group, sizes, capacity, maps_bytes, tokens, chosen,
                               router_weights, placement)
    rows = tokens.new_empty(capacity, sizes[HIDDEN])
    batch.out, batch.clear_fill = group.place.write(rows), 1
    group.launch(group.library.prs_moe_dispatch, plan.handle, ctypes.byref(batch))
    return rows, *made


def _moe_dispatch_fake(tokens: torch.Tensor, chosen: torch.Tensor, router_weights: torch.Tensor, sizes: list[int],
                       capacity: int, maps_bytes: int, group_name: str,
                       placement: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    return (tokens.new_empty(capacity, sizes[HIDDEN]),
            *_made(tokens, capacity, maps_bytes, sizes[EXPERTS] // world_of(group_name)))


def _moe_combine(rows: torch.Tensor, router_weights: torch.Tensor, origins: torch.Tensor, maps: torch.Tensor,
                 residual: torch.Tensor | None, weighted: bool, sizes: list[int], group_name: str) -> torch.Tensor:
    group, op = find(group_name), "moe_combine"
    plan, count, hidden, place = _plan_of(op, group, sizes, None), router_weights.shape[0], sizes[HIDDEN], group.place
    _check_tensor(group, op, "rows", rows, _bf16, (plan.info.capacity, hidden))
    _check_maps(op, group, plan, maps)
    if residual is not None:
        _check_tensor(group, op, "residual", residual, _bf16, (count, hidden))
    out = rows.new_empty(count, hidden)
    results = group.library.prs_moe_results(rows=place.read(rows), out=place.write(_at_least_one(out)),
                                            maps=place.read(maps), unweighted=not weighted,
                                            residual=None if residual is None else place.read(residual))
    group.launch(group.library.prs_moe_combine, plan.handle, ctypes.byref(results))
    return out


def _moe_combine_fake(rows: torch.Tensor, router_weights: torch.Tensor, origins: torch.Tensor, maps: torch.Tensor,
                      residual: torch.Tensor | None, weighted: bool, sizes: list[int], group_name: str) -> torch.Tensor:
    return rows.new_empty(router_weights.shape[0], rows.shape[1])


def _moe_dispatch_again(tokens: torch.Tensor, maps: torch.Tensor, beside: torch.Tensor | None, weighted: bool,
                        capacity: int, sizes: list[int], group_name: str) -> tuple[torch.Tensor, torch.Tensor]:
    group, op = find(group_name), "moe_dispatch_again"
    plan, place = _plan_of(op, group, sizes), group.place
    _check_tensor(group, op, "tokens", tokens, _bf16, (-1, sizes[HIDDEN]))
    _check_maps(op, group, plan, maps)
    _check_plan(op, plan, capacity, maps.shape[0])
    if beside is not None:
        _check_tensor(group, op, "beside", beside, _bf16, (capacity, sizes[HIDDEN]))
    rows, products = _moe_dispatch_again_fake(tokens, maps, beside, weighted, capacity, sizes, group_name)
    again = group.library.prs_moe_again(tokens=place.read(tokens), out=place.write(rows), maps=place.read(maps),
                                        weighted=weighted, clear_fill=1)
    if beside is not None:
        again.beside, again.products = place.read(beside), place.write(products)
    group.launch(group.library.prs_moe_dispatch_again, plan.handle, ctypes.byref(again))
    return rows, products


def _moe_dispatch_again_fake(tokens: torch.Tensor, maps: torch.Tensor, beside: torch.Tensor | None, weighted: bool,
                             capacity: int, sizes: list[int], group_name: str) -> tuple[torch.Tensor, torch.Tensor]:
    return (tokens.new_empty(capacity, sizes[HIDDEN]),
            tokens.new_empty(0 if beside is None else capacity, dtype=torch.float32))


def _moe_return_values(values: torch.Tensor, origins: torch.Tensor, maps: torch.Tensor, count: int, sizes: list[int],
                       group_name: str) -> torch.Tensor:
    group, op = find(group_name), "moe_return_values"
    plan, place = _plan_of(op, group, sizes), group.place
    _check_tensor(group, op, "values", values, torch.float32, (plan.info.capacity,))
    _check_maps(op, group, plan, maps, origins)
    out = values.new_empty(count, sizes[TOP_K])
    x = group.library.prs_moe_values(values=place.read(values), rows=place.read(origins),
                                     out=place.write(_at_least_one(out)), maps=place.read(maps))
    group.launch(group.library.prs_moe_return_values, plan.handle, ctypes.byref(x))
    return out


def _moe_return_values_fake(values: torch.Tensor, origins: torch.Tensor, maps: torch.Tensor, count: int,
                            sizes: list[int], group_name: str) -> torch.Tensor:
    return values.new_empty(count, sizes[TOP_K])


def _layer_columns(sizes: list[int]) -> tuple[int, int]:
    """Of a layer's first product, and of the result of its activation."""
    return sizes[COLUMNS], sizes[COLUMNS] // (2 if sizes[GATED] else 1)


def _moe_layer(tokens: torch.Tensor, chosen: torch.Tensor, router_weights: torch.Tensor, gate_up: torch.Tensor,
               down: torch.Tensor, residual: torch.Tensor | None, sizes: list[int], capacity: int, maps_bytes: int,
               group_name: str, placement: torch.Tensor | None = None, keep: bool = False,
               maps: bool = True) -> tuple[torch.Tensor, ...]:
    """maps False: nothing stays for a backward pass, and the library may run the layer as one kernel."""
    group, op = find(group_name), "moe_layer"
    if keep and not maps:
        raise ValueError(f"perseus.{op}: keep without maps: what is kept is of no use without them")
    if len(sizes) != SIZES or not sizes[LAYER]:
        raise ValueError(f"perseus.{op}: the plan has no layer: perseus.moe_plan() wants inner=, the columns between "
                         "the products")
    local, hidden, (columns, inner) = sizes[EXPERTS] // group.world, sizes[HIDDEN], _layer_columns(sizes)
    _check_tensor(group, op, "gate_up", gate_up, _bf16,
                  (local, columns, hidden) if sizes[LINEAR_LAYOUT] else (local, hidden, columns))
    _check_tensor(group, op, "down", down, _bf16,
                  (local, hidden, inner) if sizes[LINEAR_LAYOUT] else (local, inner, hidden))
    if residual is not None:
        _check_tensor(group, op, "residual", residual, _bf16, tuple(tokens.shape))
    plan, batch, made = _batch(op, group, sizes, capacity, maps_bytes, tokens, chosen, router_weights, placement,
                               maps=maps)
    out, kept, place = torch.empty_like(tokens), _kept(tokens, capacity, sizes, keep), group.place
    batch.weights, batch.down, batch.out = place.read(gate_up), place.read(down), place.write(_at_least_one(out))
    batch.residual = None if residual is None else place.read(residual)
    if keep:
        batch.kept_rows, batch.kept_columns = (place.write(t) for t in kept)
    group.launch(group.library.prs_moe_layer, plan.handle, ctypes.byref(batch))
    return out, *made, *kept


def _kept(tokens: torch.Tensor, capacity: int, sizes: list[int], keep: bool) -> tuple[torch.Tensor, ...]:
    """The dispatched rows, and the first product of them; empty where nothing is kept."""
    return tuple(tokens.new_empty(capacity if keep else 0, width) for width in (sizes[HIDDEN], sizes[COLUMNS]))


def _moe_layer_fake(tokens: torch.Tensor, chosen: torch.Tensor, router_weights: torch.Tensor, gate_up: torch.Tensor,
                    down: torch.Tensor, residual: torch.Tensor | None, sizes: list[int], capacity: int, maps_bytes: int,
                    group_name: str, placement: torch.Tensor | None = None, keep: bool = False,
                    maps: bool = True) -> tuple[torch.Tensor, ...]:
    return (torch.empty_like(tokens),
            *_made(tokens, capacity, maps_bytes, sizes[EXPERTS] // world_of(group_name), maps),
            *_kept(tokens, capacity, sizes, keep))


def _moe_multiply(rows: torch.Tensor, weights: torch.Tensor, transposed: bool, maps: torch.Tensor, sizes: list[int],
                  group_name: str) -> torch.Tensor:
    group, op = find(group_name), "moe_multiply"
    plan, place = _plan_of(op, group, sizes), group.place
    _check_tensor(group, op, "weights", weights, _bf16, (sizes[EXPERTS] // group.world, -1, -1))
    k, n = weights.shape[:0:-1] if transposed else weights.shape[1:]
    _check_tensor(group, op, "rows", rows, _bf16, (plan.info.capacity, k))
    _check_maps(op, group, plan, maps)
    out = _moe_multiply_fake(rows, weights, transposed, maps, sizes, group_name)
    x = group.library.prs_moe_product(rows=place.read(rows), weights=place.read(weights), out=place.write(out), k=k,
                                      n=n, weights_transposed=transposed, maps=place.read(maps))
    group.launch(group.library.prs_moe_multiply, plan.handle, ctypes.byref(x))
    return out


def _moe_multiply_fake(rows: torch.Tensor, weights: torch.Tensor, transposed: bool, maps: torch.Tensor,
                       sizes: list[int], group_name: str) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1 if transposed else 2])


def _moe_activation_back(columns: torch.Tensor, gradients: torch.Tensor, origins: torch.Tensor, maps: torch.Tensor,
                         sizes: list[int], group_name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    group, op = find(group_name), "moe_activation_back"
    plan, place, capacity = _plan_of(op, group, sizes), group.place, columns.shape[0]
    _check_tensor(group, op, "columns", columns, _bf16, (plan.info.capacity, sizes[COLUMNS]))
    _check_tensor(group, op, "gradients", gradients, _bf16, (capacity, _layer_columns(sizes)[1]))
    _check_maps(op, group, plan, maps, origins)
    made = _moe_activation_back_fake(columns, gradients, origins, maps, sizes, group_name)
    x = group.library.prs_moe_activation(columns=place.read(columns), gradients=place.read(gradients),
                                         rows=place.read(origins), maps=place.read(maps))
    x.of_columns, x.weighted, x.products = (place.write(t) for t in made)
    group.launch(group.library.prs_moe_activation_back, plan.handle, ctypes.byref(x))
    return made


def _moe_activation_back_fake(columns: torch.Tensor, gradients: torch.Tensor, origins: torch.Tensor, maps: torch.Tensor,
                              sizes: list[int], group_name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (torch.empty_like(columns), torch.empty_like(gradients),
            columns.new_empty(columns.shape[0], dtype=torch.float32))


_define("moe_dispatch(Tensor tokens, Tensor chosen, Tensor router_weights, int[] sizes, int capacity, int maps_bytes, "
        "str group_name, Tensor? placement=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", _moe_dispatch,
        _moe_dispatch_fake)
_define("moe_combine(Tensor rows, Tensor router_weights, Tensor origins, Tensor maps, Tensor? residual, bool weighted, "
        "int[] sizes, str group_name) -> Tensor", _moe_combine, _moe_combine_fake)
_define("moe_dispatch_again(Tensor tokens, Tensor maps, Tensor? beside, bool weighted, int capacity, int[] sizes, str "
        "group_name) -> (Tensor, Tensor)", _moe_dispatch_again, _moe_dispatch_again_fake)
_define("moe_return_values(Tensor values, Tensor origins, Tensor maps, int count, int[] sizes, str group_name) -> "
        "Tensor", _moe_return_values, _moe_return_values_fake)
_define("moe_layer(Tensor tokens, Tensor chosen, Tensor router_weights, Tensor gate_up, Tensor down, Tensor? residual, "
        "int[] sizes, int capacity, int maps_bytes, str group_name, Tensor? placement=None, bool keep=False, "
        "bool maps=True) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", _moe_layer, _moe_layer_fake)
_define("moe_multiply(Tensor rows, Tensor weights, bool transposed, Tensor maps, int[] sizes, str group_name) -> "
        "Tensor", _moe_multiply, _moe_multiply_fake, local=True)
_define("moe_activation_back(Tensor columns, Tensor gradients, Tensor origins, Tensor maps, int[] sizes, str "
        "group_name) -> (Tensor, Tensor, Tensor)", _moe_activation_back, _moe_activation_back_fake, local=True)


# ---- gradients (doc/decisions/0015) ----

def _only_first_differentiable(ctx: Any, output: tuple) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # torch would fill zeros of the size of each other output, kept rows included


def _save_dispatch(ctx: Any, inputs: tuple, output: tuple) -> None:
    _, _, router_weights, ctx.sizes, _, _, ctx.group_name, _ = inputs
    _only_first_differentiable(ctx, output)
    ctx.save_for_backward(router_weights, output[1], output[4])


def _dispatch_backward(ctx: Any, of_rows: torch.Tensor, *unused: Any) -> tuple:
    router_weights, origins, maps = ctx.saved_tensors
    of_tokens = _call.moe_combine(of_rows.contiguous(), router_weights, origins, maps, None, False, ctx.sizes,
                                 ctx.group_name)
    return of_tokens, None, None, None, None, None, None, None


def _save_combine(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    rows, router_weights, origins, maps, residual, ctx.weighted, ctx.sizes, ctx.group_name = inputs
    ctx.capacity, ctx.count, ctx.has_residual = rows.shape[0], router_weights.shape[0], residual is not None
    ctx.save_for_backward(rows, origins, maps)


def _combine_backward(ctx: Any, g: torch.Tensor) -> tuple:
    rows, origins, maps = ctx.saved_tensors
    g, weights = g.contiguous(), ctx.weighted and ctx.needs_input_grad[1]
    of_rows = of_weights = None
    if ctx.needs_input_grad[0] or weights:
        of_rows, products = _call.moe_dispatch_again(g, maps, rows if weights else None, ctx.weighted, ctx.capacity,
                                                    ctx.sizes, ctx.group_name)
    if weights:
        of_weights = _call.moe_return_values(products, origins, maps, ctx.count, ctx.sizes, ctx.group_name)
    return of_rows, of_weights, None, None, g if ctx.has_residual else None, None, None, None


def _save_layer(ctx: Any, inputs: tuple, output: tuple) -> None:
    (tokens, _, router_weights, gate_up, down, residual, ctx.sizes, ctx.capacity, _, ctx.group_name, _, keep,
     maps) = inputs
    if not maps:
        raise RuntimeError("perseus.moe_layer: a gradient is needed, and the call keeps no maps (maps=False): they say "
                           "which way the tokens went")
    ctx.has_residual, ctx.count = residual is not None, tokens.shape[0]
    _only_first_differentiable(ctx, output)
    ctx.save_for_backward(router_weights, gate_up, down, output[1], output[2], output[4],
                          *(output[5:] if keep else (tokens,)))


def _layer_backward(ctx: Any, g: torch.Tensor, *unused: Any) -> tuple:
    """Rows that only fill up are zeros in all matrices whose products run over whole blocks. What is large goes when it
    has been used."""
    router_weights, gate_up, down, origins, expert_rows, maps, *saved = ctx.saved_tensors
    sizes, name, linear, ends = ctx.sizes, ctx.group_name, bool(ctx.sizes[LINEAR_LAYOUT]), moe_ends(expert_rows)

    def dispatched(tokens: torch.Tensor) -> torch.Tensor:
        return _call.moe_dispatch_again(tokens, maps, None, False, ctx.capacity, sizes, name)[0]

    def of_matrix(needed: bool, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
        """The gradient of weights that make b's columns of a's, in the layout of the weights."""
        return (None if not needed else torch._grouped_mm(b.t(), a, offs=ends) if linear
                else torch._grouped_mm(a.t(), b, offs=ends))
    x, columns = saved if len(saved) == 2 else (dispatched(saved[0]), None)
    if columns is None:
        columns = _call.moe_multiply(x, gate_up, linear, maps, sizes, name)
    of_sums = dispatched(g.contiguous())
    of_active = _call.moe_multiply(of_sums, down, not linear, maps, sizes, name)  # but for the router's weights
    of_columns, weighted, products = _call.moe_activation_back(columns, of_active, origins, maps, sizes, name)
    del columns, of_active
    of_weights = (_call.moe_return_values(products, origins, maps, ctx.count, sizes, name)
                  if ctx.needs_input_grad[2] else None)
    of_down = of_matrix(ctx.needs_input_grad[4], weighted, of_sums)
    del weighted, of_sums
    of_tokens = None
    if ctx.needs_input_grad[0]:
        of_x = _call.moe_multiply(of_columns, gate_up, not linear, maps, sizes, name)
        of_tokens = _call.moe_combine(of_x, router_weights, origins, maps, None, False, sizes, name)
        del of_x
    of_gate_up = of_matrix(ctx.needs_input_grad[3], x, of_columns)
    return (of_tokens, None, of_weights, of_gate_up, of_down, g if ctx.has_residual else None, None, None, None,
            None, None, None, None)


for _name, _backward, _setup in (("moe_dispatch", _dispatch_backward, _save_dispatch),
                                 ("moe_combine", _combine_backward, _save_combine),
                                 ("moe_layer", _layer_backward, _save_layer)):
    _differentiate(_name, _backward, _setup)
_autocast("moe_dispatch", (0,), (_bf16,))
_autocast("moe_combine", (0, 4), (_bf16,))
_autocast("moe_layer", (0, 3, 4, 5), (_bf16,))


# ---- the ops as functions of a plan ----

def moe_plan(*, max_tokens: int, hidden: int, experts: int, top_k: int, capacity: int = 0, inner: int = 0,
             activation: str = "silu", gated: bool = True, linear_layout: bool = False, logical_experts: int = 0,
             replicas: int = 0, dtype: torch.dtype = _bf16, group: GroupLike = None) -> MoePlan:
    """*Collective.* Opens a plan, or finds the one of these sizes. All arguments but capacity are the same on all
    ranks.

    For few tokens a plan makes moe_layer() one kernel, where it can: linear_layout, capacity 0, one node, and at most
    4096 choices of all ranks (world * max_tokens * top_k). plan.path says whether it does. That follows from max_tokens
    alone, which all ranks know, and not from the tokens of a call. So a server opens a plan for each size of its
    batches, as 8, 64 and 2048, then freezes the group; from then on moe_plan() is local and returns the plan with the
    least max_tokens that is enough. Plans share most of their memory.

    max_tokens: the most of any rank. experts: of all ranks. capacity: rows on this rank, a multiple of 128; 0: as many
    as can ever arrive, so that nothing is dropped. inner: for moe_layer(), the columns between its products; activation
    ("none", "relu", "gelu", "gelu_tanh", "silu"), gated and linear_layout say what its weights are. logical_experts,
    replicas: dispatches then take `placement`, a map of so many experts to `experts` places, with so many places for
    each; see moe_balance(). dtype: torch.float8_e4m3fn for moe_scaled_layer() and moe_scaled_dispatch(), whose weights
    always have the linear layout.

    Example::

        plan = perseus.moe_plan(max_tokens=4096, hidden=7168, experts=256, top_k=8, inner=2048)
    """
    if dtype not in DTYPES:
        raise TypeError(f"perseus.moe_plan: dtype is {dtype}; it must be torch.bfloat16 or torch.float8_e4m3fn")
    if activation not in ACTIVATIONS:
        raise ValueError(f"perseus.moe_plan: activation {activation!r} is none of {', '.join(ACTIVATIONS)}")
    opened, layer = find(group), int(inner != 0)
    sizes = (max_tokens, hidden, inner * (2 if gated else 1), experts, top_k, capacity,
             int(linear_layout or dtype is not _bf16), layer * ACTIVATIONS[activation], layer * int(gated), layer,
             logical_experts, replicas, DTYPES[dtype])
    info, sizes = opened.moe_for(sizes)
    return MoePlan(opened.name, sizes, info.capacity, info.maps_bytes, PATHS[info.tuning.path])


def moe_ends(expert_rows: torch.Tensor) -> torch.Tensor:
    """Where the last 128 rows of each expert end: int32 [E / W], for torch._grouped_mm(offs=)."""
    return ((expert_rows.sum(1) + (BLOCK - 1)) // BLOCK * BLOCK).to(torch.int32)


class Balanced(NamedTuple):
    """What moe_balance() gives."""
    placement: torch.Tensor  # int32 [L, R], on the CPU: the places of each expert, -1: none
    # int32 [places]: the expert whose weights each place must hold, -1: none; rank r has places r * places / W and
    # following
    held: torch.Tensor
    rank_loads: torch.Tensor  # float64 [W]: what each rank gets if the loads stay as they are


def moe_balance(loads: torch.Tensor, *, places: int, world: int, replicas: int) -> Balanced:
    """Replicas for hot experts, and experts on ranks so that their loads are even (prs_moe_balance() in fused.h says
    how). Local.

    loads: how often each expert is chosen, [L], in any unit; negative: the expert is absent. All ranks must call it
    with the same numbers. places: of all ranks, at least L. replicas: the most places of an expert.

    Example::

        map = perseus.moe_balance(counts, places=288, world=8, replicas=4)   # 256 experts, 32 more places
        plan = perseus.moe_plan(max_tokens=4096, hidden=7168, experts=288, top_k=8, logical_experts=256, replicas=4)
        d = perseus.moe_dispatch(x, chosen, weights, plan, placement=map.placement.to(x.device))
    """
    lib, wanted = library(), loads.detach().to("cpu", torch.float64).contiguous()
    if wanted.dim() != 1:
        raise ValueError(f"perseus.moe_balance: loads has shape {tuple(loads.shape)}; it must be one number for each "
                         "expert")
    if min(places, world, replicas) < 1:
        raise ValueError(f"perseus.moe_balance: {places} places, {world} ranks, {replicas} replicas: at least 1 each")
    found = Balanced(torch.empty(wanted.shape[0], replicas, dtype=torch.int32), torch.empty(places, dtype=torch.int32),
                     torch.empty(world, dtype=torch.float64))
    x = lib.prs_moe_loads(world=world, experts=places, logical_experts=wanted.shape[0], replicas=replicas,
                          loads=wanted.data_ptr(), placement=found.placement.data_ptr(), held=found.held.data_ptr(),
                          rank_loads=found.rank_loads.data_ptr())
    lib.check(lib.prs_moe_balance(ctypes.byref(x)), "perseus.moe_balance")
    return found


def moe_survivors(placement: torch.Tensor, lost: list[int], *, places: int, world: int) -> torch.Tensor:
    """The map of a smaller world, whose ranks are those that are left, in their order, and hold what they held: places
    of lost ranks are gone, and experts that had no others are absent.

    lost: their ranks in the old world, of `world` ranks and `places` places. The new plan has experts = places / world
    * (world - len(lost)).

    Example::

        smaller = perseus.init(survivors)                                    # see group.close()
        map = perseus.moe_survivors(map, [error.rank], places=288, world=8)
        plan = perseus.moe_plan(..., experts=252, logical_experts=256, replicas=4, group=smaller)
    """
    room, gone = places // world, set(lost)
    if places % world != 0 or not gone <= set(range(world)):
        raise ValueError(f"perseus.moe_survivors: {places} places, {world} ranks, lost {sorted(gone)}: as many places "
                         f"on each rank, and ranks below {world}")
    renumbered = [-1] * world
    for new, rank in enumerate(r for r in range(world) if r not in gone):
        renumbered[rank] = new
    rank = placement.new_tensor(renumbered)[(placement.clamp(min=0) // room).long()]
    return torch.where((placement < 0) | (rank < 0), -1, rank * room + placement % room).to(placement.dtype)


def moe_dispatch(tokens: torch.Tensor, chosen: torch.Tensor, router_weights: torch.Tensor, plan: MoePlan,
                 placement: torch.Tensor | None = None) -> Dispatched:
    """Sends each token to the ranks of its experts. The gradient of tokens is moe_combine() of the rows' gradients,
    without weights.

    tokens: bf16 [count, H], count <= max_tokens, may differ between ranks. chosen: int64 [count, top_k], experts 0 ...
    E - 1, negative: none.
    router_weights: fp32 [count, top_k]; they get their gradient in moe_combine().
    placement: int32 [logical_experts, replicas], of a plan with a map: chosen are then experts 0 ... logical_experts -
    1, and this says in which places each lies (negative: none). Tokens take turns among an expert's places; an expert
    without any is absent, and status[5] counts its choices. Ranks may have different maps, and a captured graph reads
    the tensor's values when it runs. Each place has weights of its own, and gradients of them: add up those of an
    expert's places, over ranks too, before the optimizer's step.

    Example::

        d = perseus.moe_dispatch(x, chosen, weights, plan)
        y = perseus.moe_combine(torch._grouped_mm(d.rows, w, offs=d.ends), d)
    """
    _check_kind("moe_dispatch", "plan", plan, MoePlan)
    rows, origins, expert_rows, status, maps = _call.moe_dispatch(tokens, chosen, router_weights.detach(), plan.sizes,
                                                                 plan.capacity, plan.maps_bytes,
                                                                 plan.group_name, placement)
    return Dispatched(rows, expert_rows, moe_ends(expert_rows), origins, status, router_weights, maps, plan)


def moe_combine(rows: torch.Tensor, dispatched: Dispatched, residual: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of each token's rows, times their router weights, + residual: bf16 [count, H]. Gradients of rows, router
    weights and residual.

    rows: bf16 [capacity, H], in the order of dispatched.rows. A rank adds up its experts' rows of a token before they
    travel.

    Example::

        y = perseus.moe_combine(experts(d.rows), d, residual=x)
    """
    _check_kind("moe_combine", "dispatched", dispatched, Dispatched)
    d = dispatched
    return _call.moe_combine(rows, d.router_weights, d.origins, d.maps, residual, True, d.plan.sizes, d.plan.group_name)


def moe_layer(tokens: torch.Tensor, chosen: torch.Tensor, router_weights: torch.Tensor, gate_up: torch.Tensor,
              down: torch.Tensor, plan: MoePlan, residual: torch.Tensor | None = None,
              placement: torch.Tensor | None = None, *, recompute: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole layer in one launch. Returns (out, status): bf16 [count, H], and int32 [8] as of moe_dispatch_gemm().

    out = the sum over a token's experts of router weight * (activation(x @ gate) * (x @ up)) @ down, + residual.
    tokens, chosen, router_weights, placement: as of moe_dispatch(). gate_up: bf16 [E / W, H, 2 inner], the gate's
    columns first, or, not gated, [E / W, H, inner]; down: [E / W, inner, H]. With linear_layout both are transposed, as
    torch.nn.Linear keeps weights. Gradients of all of them, and of residual.

    Where a gradient is needed, the dispatched rows and the first product stay until the backward pass: 2 capacity (H +
    N) bytes, N = 2 inner, not gated inner. Capacity 0 of a plan is the worst case: for training give it what routing
    needs. recompute: only the inputs stay, and the backward pass dispatches the tokens again and makes the first
    product once more.

    Where no gradient is needed nothing stays, and the layer is one kernel if plan.path says so: moe_plan() says when.

    Example::

        plan = perseus.moe_plan(max_tokens=4096, hidden=7168, experts=256, top_k=8, inner=2048)
        y, status = perseus.moe_layer(x, chosen, weights, gate_up, down, plan, residual=x)
    """
    _check_kind("moe_layer", "plan", plan, MoePlan)
    operands = (tokens, router_weights, gate_up, down)
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in operands)
    maps = keep or torch.is_grad_enabled() and residual is not None and residual.requires_grad
    out, _, _, status, *_ = _call.moe_layer(tokens, chosen, router_weights, gate_up, down, residual, plan.sizes,
                                           plan.capacity, plan.maps_bytes, plan.group_name, placement,
                                           keep and not recompute, maps)
    return out, status


__all__ = ["Balanced", "Dispatched", "MoePlan", "moe_balance", "moe_combine", "moe_dispatch", "moe_ends", "moe_layer",
           "moe_plan", "moe_survivors"]
