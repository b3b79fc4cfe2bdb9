# SPDX-License-Identifier: Apache-2.0
"""Products of float8_e4m3fn with scales. Importing this module registers their ops.

Scales are torch.float32, of one kind for both operands, and laid out as the operands are:

    kind    scale_a                                       scale_b
    tensor  one element; all_gather: equal on all ranks   one element
    rows    [rows of a, 1]                                [1, n]
    blocks  [rows of a, k / 128], column-major            [k / 128, ceil(n / 128)], weight_scale_inv.t()

b is weight.t() of an [n, k] weight. Results and bias are bfloat16, sums fp32: each rank multiplies its own partial sum
by its own scales before that is rounded to bfloat16 to travel, so the ranks of a sum may have different ones.
out_dtype: torch.float32 for a result in fp32; the plan then takes the unfused path. Results of the ops whose name ends
in _quantised are float8_e4m3fn with scales [rows, n / 128], column-major: a and scale_a of a product with blocks.
use_fast_accum: the tensor cores keep about 14 bits of a sum; otherwise, and always with blocks, or fused between nodes,
it is promoted to fp32 every 128 of k. Forward only.
"""
from __future__ import annotations

import math

import torch

from ._checks import _bf16, _check_scaled, _check_tensor
from ._dispatch import _call, _define, _fixed, _library
from ._group import Group
from ._registry import GroupLike, find, name_of, world_of
from .moe import ACTIVATIONS
from .ops import _FP32, ALLGATHER, ALLREDUCE, GEMM, REDUCE_SCATTER, _forward_only

_E4M3 = 4  # enum prs_dtype
TENSOR, ROWS, BLOCKS = 1, 2, 3  # enum prs_scaling; test/python/test_scaled.py compares
_C_DTYPES = {_bf16: 0, torch.float32: _FP32, torch.float8_e4m3fn: _E4M3}
_BLOCK = 128


def _aligned(t: torch.Tensor) -> torch.Tensor:
    """A part of a tensor of scales may begin anywhere."""
    return t.clone() if t.data_ptr() & 15 else t


def _scaling(op: str, a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor,
             scale_b: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor]:
    """The kind of the scales, and what the kernel reads."""
    (rows, k), n = a.shape, b.shape[1]
    if scale_a.numel() == 1 and scale_b.numel() == 1:
        return TENSOR, scale_a.reshape(1), scale_b.reshape(1)
    if scale_a.shape == (rows, 1) and scale_b.shape == (1, n):
        return ROWS, scale_a.reshape(rows), scale_b.reshape(n)
    if k % _BLOCK == 0 and scale_a.shape == (rows, k // _BLOCK) and scale_b.shape == (k // _BLOCK, -(-n // _BLOCK)):
        if rows % 4:
            raise ValueError(f"perseus.{op}: a has {rows} rows; with scales of blocks they must be a multiple of 4")
        for what, t in (("scale_a", scale_a), ("scale_b", scale_b)):
            if not t.t().is_contiguous():
                raise ValueError(f"perseus.{op}: {what} with shape {tuple(t.shape)} has strides {t.stride()}; scales "
                                 "of blocks must be column-major: call .t().contiguous().t()")
        return BLOCKS, scale_a.t(), scale_b.t()
    raise ValueError(f"perseus.{op}: scale_a has shape {tuple(scale_a.shape)} and scale_b {tuple(scale_b.shape)}, for "
                     f"{rows} rows, k {k} and n {n}: they must be one element each, ({rows}, 1) and (1, {n}), or, if "
                     f"{_BLOCK} divides k, ({rows}, k / {_BLOCK}) and (k / {_BLOCK}, ceil(n / {_BLOCK}))")


def _new(op: str, a: torch.Tensor, rows: int, columns: int, out_dtype: torch.dtype | None) -> torch.Tensor:
    if out_dtype is torch.float8_e4m3fn:
        raise TypeError(f"perseus.{op}: out_dtype is {out_dtype}, which has scales: call "
                        "all_gather_scaled_matmul_quantised() or scaled_matmul_quantised()")
    if out_dtype not in (None, _bf16, torch.float32):
        raise TypeError(f"perseus.{op}: out_dtype is {out_dtype}; it must be torch.bfloat16 or torch.float32")
    return a.new_empty(rows, columns, dtype=out_dtype or _bf16)


def _multiply(group: Group, op: str, number: int, m: int, a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor,
              scale_b: torch.Tensor, c: torch.Tensor, bias: torch.Tensor | None, use_fast_accum: bool,
              gathered: torch.Tensor | None = None, scale_c: torch.Tensor | None = None, activation: int = 0,
              gated: bool = False) -> torch.Tensor:
    """scale_c: [n / 128, rows of c], of a c in e4m3."""
    _check_scaled(group, op, a, b, scale_a, scale_b)
    if bias is not None:
        _check_tensor(group, op, "bias", bias, _bf16, (b.shape[1],))
    kind, scale_a, scale_b = _scaling(op, a, b, scale_a, scale_b)
    if not c.numel():
        return c
    place, scales = group.place, (_aligned(scale_a.contiguous()), _aligned(scale_b.contiguous()))
    plan = group.product(number, m, b.shape[1], b.shape[0], True, _E4M3, _C_DTYPES[c.dtype], kind,
                         int(use_fast_accum and kind != BLOCKS), activation=activation, gated=int(gated))
    operands = plan.operands
    if scale_c is not None:
        operands.quantised_scale, operands.quantised_scaling = place.write(scale_c), BLOCKS
    operands.a, operands.b, operands.c, operands.m = place.read(a), place.read(b), place.write(c), m
    operands.scale_a, operands.scale_b = place.read(scales[0]), place.read(scales[1])
    operands.bias = None if bias is None else place.read(bias)
    operands.gathered = None if gathered is None else place.write(gathered)
    group.launch(group.library.prs_gemm_launch, plan.handle, plan.reference)
    return c


def _all_gather_scaled_matmul(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
                              group_name: str, bias: torch.Tensor | None = None,
                              use_fast_accum: bool = False, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    group, c = find(group_name), _all_gather_scaled_matmul_fake(a, b, scale_a, scale_b, group_name, out_dtype=out_dtype)
    return _multiply(group, "all_gather_scaled_matmul", ALLGATHER, c.shape[0], a, b, scale_a, scale_b, c, bias,
                     use_fast_accum)


def _all_gather_scaled_matmul_fake(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
                                   group_name: str, bias: torch.Tensor | None = None,
                                   use_fast_accum: bool = False, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    return _new("all_gather_scaled_matmul", a, a.shape[0] * world_of(group_name), b.shape[1], out_dtype)


def _all_gather_scaled_matmul_kept(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
                                   group_name: str, bias: torch.Tensor | None = None,
                                   use_fast_accum: bool = False,
                                   out_dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    group = find(group_name)
    c, gathered = _all_gather_scaled_matmul_kept_fake(a, b, scale_a, scale_b, group_name, out_dtype=out_dtype)
    _multiply(group, "all_gather_scaled_matmul_kept", ALLGATHER, c.shape[0], a, b, scale_a, scale_b, c, bias,
              use_fast_accum, gathered)
    return c, gathered


def _all_gather_scaled_matmul_kept_fake(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
                                        group_name: str, bias: torch.Tensor | None = None,
                                        use_fast_accum: bool = False,
                                        out_dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    rows = a.shape[0] * world_of(group_name)
    return _new("all_gather_scaled_matmul_kept", a, rows, b.shape[1], out_dtype), a.new_empty(rows, a.shape[1])


def _scaled_matmul_reduce_scatter(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
                                  group_name: str, bias: torch.Tensor | None = None,
                                  use_fast_accum: bool = False, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    group = find(group_name)
    if a.shape[0] % group.world:
        raise ValueError(f"perseus.scaled_matmul_reduce_scatter: a has {a.shape[0]} rows; the {group.world} ranks of "
                         f"group {group.name} must divide them")
    c = _scaled_matmul_reduce_scatter_fake(a, b, scale_a, scale_b, group_name, out_dtype=out_dtype)
    return _multiply(group, "scaled_matmul_reduce_scatter", REDUCE_SCATTER, a.shape[0], a, b, scale_a, scale_b, c,
                     bias, use_fast_accum)


def _scaled_matmul_reduce_scatter_fake(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
                                       group_name: str, bias: torch.Tensor | None = None,
                                       use_fast_accum: bool = False,
                                       out_dtype: torch.dtype | None = None) -> torch.Tensor:
    return _new("scaled_matmul_reduce_scatter", a, a.shape[0] // world_of(group_name), b.shape[1], out_dtype)


def _scaled_matmul_all_reduce(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
                              group_name: str, bias: torch.Tensor | None = None,
                              use_fast_accum: bool = False, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    group, c = find(group_name), _scaled_matmul_all_reduce_fake(a, b, scale_a, scale_b, group_name, out_dtype=out_dtype)
    return _multiply(group, "scaled_matmul_all_reduce", ALLREDUCE, a.shape[0], a, b, scale_a, scale_b, c, bias,
                     use_fast_accum)


def _scaled_matmul_all_reduce_fake(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
                                   group_name: str, bias: torch.Tensor | None = None,
                                   use_fast_accum: bool = False, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    return _new("scaled_matmul_all_reduce", a, a.shape[0], b.shape[1], out_dtype)


_PARAMETERS = ("(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, str group_name, Tensor? bias=None, bool "
               "use_fast_accum=False, ScalarType? out_dtype=None) -> ")
for _run, _fake, _results in (
        (_all_gather_scaled_matmul, _all_gather_scaled_matmul_fake, "Tensor"),
        (_all_gather_scaled_matmul_kept, _all_gather_scaled_matmul_kept_fake, "(Tensor, Tensor)"),
        (_scaled_matmul_reduce_scatter, _scaled_matmul_reduce_scatter_fake, "Tensor"),
        (_scaled_matmul_all_reduce, _scaled_matmul_all_reduce_fake, "Tensor")):
    _define(_run.__name__[1:] + _PARAMETERS + _results, _run, _fake)
    _forward_only(_run.__name__[1:])


# ---- results in float8_e4m3fn ----

def _new_quantised(op: str, a: torch.Tensor, b: torch.Tensor, rows: int, activation: str,
                   gated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if activation not in ACTIVATIONS:
        raise ValueError(f"perseus.{op}: activation {activation!r} is none of {', '.join(ACTIVATIONS)}")
    columns, rest = divmod(b.shape[1], 2) if gated else (b.shape[1], 0)
    if rest or columns % _BLOCK:
        raise ValueError(f"perseus.{op}: b has {b.shape[1]} columns{' of gate and up' if gated else ''}; the result "
                         f"has a scale for each {_BLOCK}, so they must be a multiple of {_BLOCK * (1 + gated)}")
    return a.new_empty(rows, columns), a.new_empty(columns // _BLOCK, rows, dtype=torch.float32).t()


def _multiply_quantised(op: str, number: int, group: Group, a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor,
                        scale_b: torch.Tensor, bias: torch.Tensor | None, activation: str, gated: bool,
                        use_fast_accum: bool) -> tuple[torch.Tensor, torch.Tensor]:
    _check_scaled(group, op, a, b, scale_a, scale_b)
    rows = a.shape[0] * (group.world if number == ALLGATHER else 1)
    c, scale_c = _new_quantised(op, a, b, rows, activation, gated)
    _multiply(group, op, number, rows, a, b, scale_a, scale_b, c, bias, use_fast_accum, None, scale_c.t(),
              ACTIVATIONS[activation], gated)
    return c, scale_c


def _all_gather_scaled_matmul_quantised(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
                                        group_name: str, bias: torch.Tensor | None = None, activation: str = "none",
                                        gated: bool = False,
                                        use_fast_accum: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return _multiply_quantised("all_gather_scaled_matmul_quantised", ALLGATHER, find(group_name), a, b, scale_a,
                               scale_b, bias, activation, gated, use_fast_accum)


def _all_gather_scaled_matmul_quantised_fake(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor,
                                             scale_b: torch.Tensor, group_name: str, bias: torch.Tensor | None = None,
                                             activation: str = "none", gated: bool = False,
                                             use_fast_accum: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return _new_quantised("all_gather_scaled_matmul_quantised", a, b, a.shape[0] * world_of(group_name), activation,
                          gated)


def _scaled_matmul_quantised(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
                             group_name: str, bias: torch.Tensor | None = None, activation: str = "none",
                             gated: bool = False, use_fast_accum: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return _multiply_quantised("scaled_matmul_quantised", GEMM, find(group_name), a, b, scale_a, scale_b, bias,
                               activation, gated, use_fast_accum)


def _scaled_matmul_quantised_fake(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
                                  group_name: str, bias: torch.Tensor | None = None, activation: str = "none",
                                  gated: bool = False,
                                  use_fast_accum: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return _new_quantised("scaled_matmul_quantised", a, b, a.shape[0], activation, gated)


for _run, _fake in ((_all_gather_scaled_matmul_quantised, _all_gather_scaled_matmul_quantised_fake),
                    (_scaled_matmul_quantised, _scaled_matmul_quantised_fake)):
    _define(_run.__name__[1:] + "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, str group_name, Tensor? "
            'bias=None, str activation="none", bool gated=False, bool use_fast_accum=False) -> (Tensor, Tensor)',
            _run, _fake, local=_run is _scaled_matmul_quantised)
    _forward_only(_run.__name__[1:])


# ---- torch.ops.symm_mem's signatures ----

_RESULTS = {15: _bf16, 6: torch.float32}  # c10::ScalarType, as which torch passes the dtypes of a list


def _result(op: str, result_scale: torch.Tensor | None, out_dtype: torch.dtype | int | None) -> torch.dtype:
    if result_scale is not None:
        raise ValueError(f"perseus.{op}: result_scale is set: results are bfloat16 or float32, which have none")
    found = _RESULTS.get(out_dtype, out_dtype)
    if found not in _RESULTS.values():
        raise TypeError(f"perseus.{op}: out_dtype is {out_dtype}; it must be torch.bfloat16 or torch.float32")
    return found


def _own_scales(op: str, A: torch.Tensor, A_scale: torch.Tensor, dim: int, group_name: str) -> torch.Tensor:
    """The scales of this rank's rows, which may be given for the rows of all ranks."""
    whole = list(A.shape)
    whole[dim] *= world_of(group_name)
    if A_scale.numel() == 1:
        return A_scale
    if list(A_scale.shape[:-1]) == whole[:-1] and whole != list(A.shape):
        return A_scale.narrow(dim, find(group_name).rank * A.shape[dim], A.shape[dim])
    if A_scale.shape[:-1] != A.shape[:-1]:
        raise ValueError(f"perseus.{op}: A_scale has shape {tuple(A_scale.shape)}; its leading dimensions must be "
                         f"those of A {tuple(A.shape)}, on this rank or of all ranks, or it has one element")
    return A_scale


def _as_rows(t: torch.Tensor, dim: int) -> torch.Tensor:
    return t if t.numel() == 1 else t.movedim(dim, 0).reshape(-1, t.shape[-1]).contiguous()


def _fused_all_gather_scaled_matmul(A: torch.Tensor, Bs: list[torch.Tensor], A_scale: torch.Tensor,
                                    B_scales: list[torch.Tensor], gather_dim: int, group_name: str,
                                    biases: list, result_scales: list, out_dtypes: list,
                                    use_fast_accum: list[bool]) -> tuple:
    op = "fused_all_gather_scaled_matmul"
    for what, given in (("B_scales", B_scales), ("biases", biases), ("result_scales", result_scales),
                        ("out_dtypes", out_dtypes), ("use_fast_accum", use_fast_accum)):
        if len(given) != len(Bs):
            raise ValueError(f"perseus.{op}: {len(given)} {what} for {len(Bs)} Bs: they must be as many")
    if not Bs:
        raise ValueError(f"perseus.{op}: Bs is empty")
    if not 0 <= gather_dim < A.dim() - 1:
        raise ValueError(f"perseus.{op}: gather_dim {gather_dim} is not a leading dimension of A, whose shape is "
                         f"{tuple(A.shape)}")
    dtypes = [_result(op, scale, dtype) for scale, dtype in zip(result_scales, out_dtypes)]
    scales = _as_rows(_own_scales(op, A, A_scale, gather_dim, group_name), gather_dim)
    rows, others = _as_rows(A, gather_dim), A.movedim(gather_dim, 0).shape[1:-1]

    def restored(t: torch.Tensor) -> torch.Tensor:
        return t.view(-1, *others, t.shape[-1]).movedim(0, gather_dim)
    first, gathered = _call.all_gather_scaled_matmul_kept(rows, Bs[0], scales, B_scales[0], group_name, biases[0],
                                                         use_fast_accum[0], dtypes[0])
    rest = zip(Bs[1:], B_scales[1:], biases[1:], use_fast_accum[1:], dtypes[1:])
    products = [first, *(_call.all_gather_scaled_matmul(rows, b, scales, scale, group_name, bias, fast, dtype)
                         for b, scale, bias, fast, dtype in rest)]
    return restored(gathered), [restored(t) for t in products]


def _fused_scaled_matmul_reduce_scatter(A: torch.Tensor, B: torch.Tensor, A_scale: torch.Tensor, B_scale: torch.Tensor,
                                        reduce_op: str, orig_scatter_dim: int, scatter_dim_after_maybe_reshape: int,
                                        group_name: str, output_shape: list[int] | None,
                                        bias: torch.Tensor | None = None, result_scale: torch.Tensor | None = None,
                                        out_dtype: torch.dtype | None = None,
                                        use_fast_accum: bool = False) -> torch.Tensor:
    """A is the [..., k] tensor whose product has output_shape; where torch has flattened it to two dimensions, their
    scattered one is orig_scatter_dim of output_shape."""
    op = "fused_scaled_matmul_reduce_scatter"
    if reduce_op not in ("sum", "avg"):
        raise ValueError(f"perseus.{op}: reduce_op {reduce_op!r} is neither 'sum' nor 'avg'")
    if not 0 <= scatter_dim_after_maybe_reshape < A.dim() - 1:
        raise ValueError(f"perseus.{op}: scatter_dim_after_maybe_reshape {scatter_dim_after_maybe_reshape} is not a "
                         f"leading dimension of A, whose shape is {tuple(A.shape)}")
    leading = list(A.shape[:-1] if output_shape is None else output_shape[:-1])
    if math.prod(leading) != math.prod(A.shape[:-1]) or not 0 <= orig_scatter_dim < len(leading):
        raise ValueError(f"perseus.{op}: output_shape {output_shape} and orig_scatter_dim {orig_scatter_dim} do not "
                         f"fit A, whose shape is {tuple(A.shape)}")
    world = world_of(group_name)
    if leading[orig_scatter_dim] % world:
        raise ValueError(f"perseus.{op}: dimension {orig_scatter_dim} of the product has {leading[orig_scatter_dim]} "
                         f"elements; {world} ranks must divide them")
    dtype = _result(op, result_scale, out_dtype)
    if A_scale.numel() != 1 and A_scale.shape[:-1] != A.shape[:-1]:
        raise ValueError(f"perseus.{op}: A_scale has shape {tuple(A_scale.shape)}; its leading dimensions must be "
                         f"those of A {tuple(A.shape)}, or it has one element")
    rows = _as_rows(A.reshape(*leading, A.shape[-1]), orig_scatter_dim)
    scales = A_scale if A_scale.numel() == 1 else _as_rows(A_scale.reshape(*leading, A_scale.shape[-1]),
                                                           orig_scatter_dim)
    c = _call.scaled_matmul_reduce_scatter(rows, B, scales, B_scale, group_name, bias, use_fast_accum, dtype)
    others = leading[:orig_scatter_dim] + leading[orig_scatter_dim + 1:]
    c = c.view(-1, *others, B.shape[1]).movedim(0, orig_scatter_dim)
    return c / world if reduce_op == "avg" else c


_library.define("fused_all_gather_scaled_matmul(Tensor A, Tensor[] Bs, Tensor A_scale, Tensor[] B_scales, int "
                "gather_dim, str group_name, Tensor?[] biases, Tensor?[] result_scales, ScalarType?[] out_dtypes, "
                "bool[] use_fast_accum) -> (Tensor, Tensor[])", tags=_fixed)
_library.impl("fused_all_gather_scaled_matmul", _fused_all_gather_scaled_matmul, "CompositeImplicitAutograd")
_library.define("fused_scaled_matmul_reduce_scatter(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, str reduce_op, "
                "int orig_scatter_dim, int scatter_dim_after_maybe_reshape, str group_name, SymInt[]? output_shape, "
                "Tensor? bias = None, Tensor? result_scale = None, ScalarType? out_dtype = None, bool use_fast_accum = "
                "False) -> Tensor", tags=_fixed)
_library.impl("fused_scaled_matmul_reduce_scatter", _fused_scaled_matmul_reduce_scatter, "CompositeImplicitAutograd")


# ---- the ops as functions of a group ----

def all_gather_scaled_matmul(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
                             group: GroupLike = None, *, bias: torch.Tensor | None = None,
                             use_fast_accum: bool = False, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """(the a of all ranks, stacked) @ b, with the scales of both. Those of a travel with its rows.

    a: float8_e4m3fn [m / W, k], row-major. b: weight.t() of a float8_e4m3fn [n, k] weight. Returns [m, n].

    Example::

        y = perseus.all_gather_scaled_matmul(x8, weight8.t(), x_scale, weight_scale_inv.t())
    """
    return _call.all_gather_scaled_matmul(a, b, scale_a, scale_b, name_of(group), bias, use_fast_accum, out_dtype)


def scaled_matmul_reduce_scatter(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
                                 group: GroupLike = None, *, bias: torch.Tensor | None = None,
                                 use_fast_accum: bool = False, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Rows r m / W ... (r + 1) m / W of the sum over all ranks of a @ b, each with the scales of its rank.

    a: float8_e4m3fn [m, k], row-major; W divides m. b: weight.t() of a float8_e4m3fn [n, k] weight. Returns
    [m / W, n]. bias [n] is added once."""
    return _call.scaled_matmul_reduce_scatter(a, b, scale_a, scale_b, name_of(group), bias, use_fast_accum, out_dtype)


def scaled_matmul_all_reduce(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
                             group: GroupLike = None, *, bias: torch.Tensor | None = None,
                             use_fast_accum: bool = False, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """The sum over all ranks of a @ b, each with the scales of its rank, on every rank; the arguments are those of
    scaled_matmul_reduce_scatter(). Returns [m, n]."""
    return _call.scaled_matmul_all_reduce(a, b, scale_a, scale_b, name_of(group), bias, use_fast_accum, out_dtype)


def all_gather_scaled_matmul_quantised(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
                                       group: GroupLike = None, *, bias: torch.Tensor | None = None,
                                       activation: str = "none", gated: bool = False,
                                       use_fast_accum: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """all_gather_scaled_matmul() whose result is quantised for the next product, before it is rounded to bfloat16 where
    the plan takes the fused path.

    activation: none, relu, gelu, gelu_tanh or silu, of the product + bias. gated: b is [gate | up], and the result
    activation(gate) * up, of half the columns; those of the result are a multiple of 128. Returns float8_e4m3fn
    [m, columns] and scales [m, columns / 128], which are what scaled_matmul_reduce_scatter() takes.

    Example::

        h, h_scale = perseus.all_gather_scaled_matmul_quantised(x8, w13.t(), x_scale, w13_scale_inv.t(),
                                                                activation="silu", gated=True)
        y = perseus.scaled_matmul_reduce_scatter(h, w2.t(), h_scale, w2_scale_inv.t())
    """
    return _call.all_gather_scaled_matmul_quantised(a, b, scale_a, scale_b, name_of(group), bias, activation, gated,
                                                    use_fast_accum)


def scaled_matmul_quantised(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
                            group: GroupLike = None, *, bias: torch.Tensor | None = None, activation: str = "none",
                            gated: bool = False, use_fast_accum: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of this rank's rows: a @ b, without communication. The result goes to scaled_matmul_all_reduce()."""
    return _call.scaled_matmul_quantised(a, b, scale_a, scale_b, name_of(group), bias, activation, gated,
                                         use_fast_accum)


__all__ = ["all_gather_scaled_matmul", "all_gather_scaled_matmul_quantised", "scaled_matmul_quantised",
           "scaled_matmul_reduce_scatter", "scaled_matmul_all_reduce"]
