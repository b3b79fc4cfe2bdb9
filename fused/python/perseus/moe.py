# SPDX-License-Identifier: Apache-2.0
"""MoE: dispatch, combine and the whole layer. Importing this module registers their ops; moe_gradients.py has their
gradients.

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
from ._dispatch import _autocast, _call, _define
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


def _combined(group: Group, plan: Plan, rows: torch.Tensor, maps: torch.Tensor, residual: torch.Tensor | None,
              weighted: bool, out: torch.Tensor) -> torch.Tensor:
    place = group.place
    results = group.library.prs_moe_results(rows=place.read(rows), out=place.write(_at_least_one(out)),
                                            maps=place.read(maps), unweighted=not weighted,
                                            residual=None if residual is None else place.read(residual))
    group.launch(group.library.prs_moe_combine, plan.handle, ctypes.byref(results))
    return out


def _moe_combine(rows: torch.Tensor, router_weights: torch.Tensor, origins: torch.Tensor, maps: torch.Tensor,
                 residual: torch.Tensor | None, weighted: bool, sizes: list[int], group_name: str) -> torch.Tensor:
    group, op = find(group_name), "moe_combine"
    plan, count, hidden = _plan_of(op, group, sizes, None), router_weights.shape[0], sizes[HIDDEN]
    _check_tensor(group, op, "rows", rows, _bf16, (plan.info.capacity, hidden))
    _check_maps(op, group, plan, maps)
    if residual is not None:
        _check_tensor(group, op, "residual", residual, _bf16, (count, hidden))
    return _combined(group, plan, rows, maps, residual, weighted, rows.new_empty(count, hidden))


def _moe_combine_fake(rows: torch.Tensor, router_weights: torch.Tensor, origins: torch.Tensor, maps: torch.Tensor,
                      residual: torch.Tensor | None, weighted: bool, sizes: list[int], group_name: str) -> torch.Tensor:
    return rows.new_empty(router_weights.shape[0], rows.shape[1])


def _layer_columns(sizes: list[int]) -> tuple[int, int]:
    """Of a layer's first product, and of the result of its activation."""
    return sizes[COLUMNS], sizes[COLUMNS] // (2 if sizes[GATED] else 1)


def _joined(op: str, group: Group, sizes: list[int], gate_up: torch.Tensor, down: torch.Tensor,
            up: torch.Tensor | None) -> torch.Tensor:
    """The first product's weights as one tensor: a copy where gate and up are two. Checks those of both products."""
    if len(sizes) != SIZES or not sizes[LAYER]:
        raise ValueError(f"perseus.{op}: the plan has no layer: perseus.moe_plan() wants inner=, the columns between "
                         "the products")
    if up is not None and not sizes[GATED]:
        raise ValueError(f"perseus.{op}: up is given, and the plan is not gated: perseus.moe_plan(gated=True)")
    local, hidden, linear, (columns, inner) = (sizes[EXPERTS] // group.world, sizes[HIDDEN], sizes[LINEAR_LAYOUT],
                                               _layer_columns(sizes))
    _check_tensor(group, op, "down", down, _bf16, (local, hidden, inner) if linear else (local, inner, hidden))
    for what, t in (("gate_up", gate_up),) if up is None else (("gate", gate_up), ("up", up)):
        width = columns if up is None else inner
        _check_tensor(group, op, what, t, _bf16, (local, width, hidden) if linear else (local, hidden, width))
    return gate_up if up is None else torch.cat((gate_up, up), 1 if linear else 2)


def _moe_layer(tokens: torch.Tensor, chosen: torch.Tensor, router_weights: torch.Tensor, gate_up: torch.Tensor,
               down: torch.Tensor, residual: torch.Tensor | None, sizes: list[int], capacity: int, maps_bytes: int,
               group_name: str, placement: torch.Tensor | None = None, keep: bool = False, maps: bool = True,
               up: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """maps False: nothing stays for a backward pass, and the library may run the layer as one kernel. up: gate_up is
    the gate alone."""
    group, op = find(group_name), "moe_layer"
    if keep and not maps:
        raise ValueError(f"perseus.{op}: keep without maps: what is kept is of no use without them")
    weights = _joined(op, group, sizes, gate_up, down, up)
    if residual is not None:
        _check_tensor(group, op, "residual", residual, _bf16, tuple(tokens.shape))
    plan, batch, made = _batch(op, group, sizes, capacity, maps_bytes, tokens, chosen, router_weights, placement,
                               maps=maps)
    out, kept, place = torch.empty_like(tokens), _kept(tokens, capacity, sizes, keep), group.place
    batch.weights, batch.down, batch.out = place.read(weights), place.read(down), place.write(_at_least_one(out))
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
                    group_name: str, placement: torch.Tensor | None = None, keep: bool = False, maps: bool = True,
                    up: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    return (torch.empty_like(tokens),
            *_made(tokens, capacity, maps_bytes, sizes[EXPERTS] // world_of(group_name), maps),
            *_kept(tokens, capacity, sizes, keep))


_define("moe_dispatch(Tensor tokens, Tensor chosen, Tensor router_weights, int[] sizes, int capacity, int maps_bytes, "
        "str group_name, Tensor? placement=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", _moe_dispatch,
        _moe_dispatch_fake)
_define("moe_combine(Tensor rows, Tensor router_weights, Tensor origins, Tensor maps, Tensor? residual, bool weighted, "
        "int[] sizes, str group_name) -> Tensor", _moe_combine, _moe_combine_fake)
_define("moe_layer(Tensor tokens, Tensor chosen, Tensor router_weights, Tensor gate_up, Tensor down, Tensor? residual, "
        "int[] sizes, int capacity, int maps_bytes, str group_name, Tensor? placement=None, bool keep=False, "
        "bool maps=True, Tensor? up=None) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", _moe_layer, _moe_layer_fake)
_autocast("moe_dispatch", (0,), (_bf16,))
_autocast("moe_combine", (0, 4), (_bf16,))
_autocast("moe_layer", (0, 3, 4, 5, 13), (_bf16,))


# ---- the ops as functions of a plan ----

def moe_plan(*, max_tokens: int, hidden: int, experts: int, top_k: int, capacity: int = 0, inner: int = 0,
             activation: str = "silu", gated: bool = True, linear_layout: bool = False, logical_experts: int = 0,
             replicas: int = 0, dtype: torch.dtype = _bf16, group: GroupLike = None) -> MoePlan:
    """*Collective.* Opens a plan, or finds the one of these sizes. All arguments but capacity are the same on all
    ranks.

    For few tokens a plan makes moe_layer() one kernel, where it can: linear_layout, capacity 0, one node, and at most
    32768 choices of all ranks (world * max_tokens * top_k). plan.path says whether it does. This follows from
    max_tokens alone, which all ranks know, and not from the tokens of a call. So a server opens a plan for each size of
    its batches, as 8, 64 and 2048, then freezes the group; from then on moe_plan() is local and returns the plan with
    the least max_tokens that is enough. Plans share most of their memory.

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
    # Not in place: a selective checkpoint may keep each of these.
    return expert_rows.sum(1, dtype=torch.int32).add(BLOCK - 1).bitwise_and(-BLOCK)


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


def _pair(op: str, gate_up: Any) -> Any:
    if (not isinstance(gate_up, (tuple, list)) or len(gate_up) != 2
        or not all(isinstance(t, torch.Tensor) for t in gate_up)):
        kinds = f" of {[type(t).__name__ for t in gate_up]}" if isinstance(gate_up, (tuple, list)) else ""
        raise TypeError(f"perseus.{op}: gate_up is a {type(gate_up).__name__}{kinds}; it must be a tensor, or a "
                        "pair of them, gate and up")
    return gate_up


def moe_layer(tokens: torch.Tensor, chosen: torch.Tensor, router_weights: torch.Tensor,
              gate_up: torch.Tensor | tuple[torch.Tensor, torch.Tensor], down: torch.Tensor, plan: MoePlan,
              residual: torch.Tensor | None = None, placement: torch.Tensor | None = None, *,
              recompute: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole layer in one launch. Returns (out, status): bf16 [count, H], and int32 [8] as of moe_dispatch_gemm().

    out = the sum over a token's experts of router weight * (activation(x @ gate) * (x @ up)) @ down, + residual.
    tokens, chosen, router_weights, placement: as of moe_dispatch(). gate_up: bf16 [E / W, H, 2 inner], the gate's
    columns first, or, not gated, [E / W, H, inner]; down: [E / W, inner, H]. With linear_layout both are transposed, as
    torch.nn.Linear keeps weights. gate_up may be a pair, gate and up: each pass then copies them into one tensor, which
    does not stay, and each gets its gradient without a copy. Gradients of all of them, and of residual.

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
    first, up = (gate_up, None) if isinstance(gate_up, torch.Tensor) else _pair("moe_layer", gate_up)
    operands = (tokens, router_weights, first, down, *(() if up is None else (up,)))
    keep = torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in operands)
    maps = keep or torch.is_grad_enabled() and residual is not None and residual.requires_grad
    out, _, _, status, *_ = _call.moe_layer(tokens, chosen, router_weights, first, down, residual, plan.sizes,
                                           plan.capacity, plan.maps_bytes, plan.group_name, placement,
                                           keep and not recompute, maps, up)
    return out, status


__all__ = ["Balanced", "Dispatched", "MoePlan", "moe_balance", "moe_combine", "moe_dispatch", "moe_ends", "moe_layer",
           "moe_plan", "moe_survivors"]
