# SPDX-License-Identifier: Apache-2.0
"""Sums over the ranks, with the residual and the RMS norm that follow them in a transformer. Importing this module
registers their ops.

    sum      = the sum over all ranks of x (or of a @ b), + bias + residual, in fp32
    residual = sum, rounded to the dtype of x: what the next layer adds to
    normed   = sum / sqrt(mean(sum^2) + eps) * weight, in fp32, rounded to the dtype of x or quantised to float8_e4m3fn

Few rows on one node (up to 16 MB of x) take one kernel after the product, which rounds only what it returns. Otherwise
a second kernel normalises, which reads the residual as it was rounded. Ranks get the same bits. Forward only.

vLLM and FlashInfer call this fused_add_rms_norm after an all-reduce, and allreduce_fusion (kARResidualRMSNorm,
kARResidualRMSNormFP8Quant).
"""
from __future__ import annotations

import torch

from ._checks import _PRODUCTS, _check_bias, _check_rows, _check_tensor, _check_weights
from ._dispatch import _call, _define
from ._group import Group
from ._registry import GroupLike, find, name_of, world_of
from .ops import ALLREDUCE, REDUCE_SCATTER, _forward_only

_E4M3 = torch.float8_e4m3fn
SCALES = {"tensor": 1, "rows": 2, "blocks": 3}  # enum prs_scaling; test/python/test_norm.py compares
_BLOCK = 128


def _scales_of(op: str, scales: str, scale: torch.Tensor | None, x: torch.Tensor, columns: int) -> torch.Tensor:
    """The memory of the scales, as the library writes them; for the scale of a tensor, nothing."""
    if scales not in SCALES:
        raise ValueError(f"perseus.{op}: scales is {scales!r}; it must be one of {', '.join(SCALES)}")
    if (scale is not None) != (scales == "tensor"):
        raise ValueError(f"perseus.{op}: scales is {scales!r} and scale is {'' if scale is None else 'not '}None: only "
                         "that of a tensor is given")
    if scales == "blocks" and columns % _BLOCK:
        raise ValueError(f"perseus.{op}: {columns} columns; for scales of blocks {_BLOCK} must divide them")
    shape = {"tensor": (0,), "rows": (x.shape[0], 1), "blocks": (columns // _BLOCK, x.shape[0])}[scales]
    return x.new_empty(shape, dtype=torch.float32)


def _own_rows(group: Group, op: str, rows: int) -> int:
    """Of the result on this rank."""
    if "reduce_scatter" not in op:
        return rows
    if rows % group.world:
        raise ValueError(f"perseus.{op}: {rows} rows; the {group.world} ranks of group {group.name} must divide them")
    return rows // group.world


def _check(group: Group, op: str, x: torch.Tensor, columns: int, residual: torch.Tensor | None,
           weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    if columns % 8:
        raise ValueError(f"perseus.{op}: {columns} columns: they must be a multiple of 8")
    if residual is not None:
        _check_tensor(group, op, "residual", residual, x.dtype, (_own_rows(group, op, x.shape[0]), columns))
    if weight is not None:
        _check_tensor(group, op, "weight", weight, x.dtype, (columns,))
    _check_bias(group, op, x, bias, columns)


def _launch(group: Group, op: str, a: torch.Tensor, b: torch.Tensor | None, b_is_n_k: bool, c: torch.Tensor,
            residual: torch.Tensor | None, bias: torch.Tensor | None, norm: tuple | None) -> None:
    """norm: (weight, eps, normed, quantised, kind of scales, scales), without the third or the last three."""
    m, n, place = a.shape[0], c.shape[1], group.place
    plan = group.product(REDUCE_SCATTER if "reduce_scatter" in op else ALLREDUCE, m, n,
                         0 if b is None else a.shape[1], b_is_n_k, _PRODUCTS[a.dtype], 0, norm=int(norm is not None))
    x = plan.operands
    x.a, x.b, x.c, x.m = place.read(a), None if b is None else place.read(b), place.write(c), m
    x.residual = None if residual is None else place.read(residual)
    x.bias = None if bias is None else place.read(bias)
    if norm is not None:
        weight, x.norm_eps, normed, quantised, x.quantised_scaling, scales = norm
        x.norm_weight = None if weight is None else place.read(weight)
        x.normed = None if normed is None else place.write(normed)
        x.quantised = None if quantised is None else place.write(quantised)
        x.quantised_scale = None if scales is None else (place.read if x.quantised_scaling == 1 else
                                                         place.write)(scales)
    group.launch(group.library.prs_gemm_launch, plan.handle, plan.reference)


# ---- the ops ----

def _sum(op: str, x: torch.Tensor, group_name: str) -> torch.Tensor:
    group = find(group_name)
    _check_rows(group, op, "x", x)
    c = x.new_empty(_own_rows(group, op, x.shape[0]), x.shape[1])
    if c.numel():
        _launch(group, op, x, None, True, c, None, None, None)
    return c


def _all_reduce(x: torch.Tensor, group_name: str) -> torch.Tensor:
    return _sum("all_reduce", x, group_name)


def _all_reduce_fake(x: torch.Tensor, group_name: str) -> torch.Tensor:
    return torch.empty_like(x)


def _reduce_scatter(x: torch.Tensor, group_name: str) -> torch.Tensor:
    return _sum("reduce_scatter", x, group_name)


def _reduce_scatter_fake(x: torch.Tensor, group_name: str) -> torch.Tensor:
    return x.new_empty(x.shape[0] // world_of(group_name), x.shape[1])


def _normed(op: str, a: torch.Tensor, b: torch.Tensor | None, residual: torch.Tensor | None,
            weight: torch.Tensor | None, eps: float, group_name: str,
            bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    group = find(group_name)
    _check_rows(group, op, "x" if b is None else "a", a)
    b_is_n_k = b is None or _check_weights(group, op, a, b)
    if a.shape[1] == 0:
        raise ValueError(f"perseus.{op}: {'x' if b is None else 'a'} has no columns")
    columns = a.shape[1] if b is None else b.shape[1]
    _check(group, op, a, columns, residual, weight, bias)
    rows = _own_rows(group, op, a.shape[0])
    normed, c = a.new_empty(rows, columns), a.new_empty(rows, columns)
    if c.numel():
        _launch(group, op, a, b, b_is_n_k, c, residual, bias, (weight, eps, normed, None, 0, None))
    return normed, c


def _quantised(op: str, a: torch.Tensor, b: torch.Tensor | None, residual: torch.Tensor | None,
               weight: torch.Tensor | None, eps: float, scales: str, group_name: str, scale: torch.Tensor | None,
               bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    group = find(group_name)
    _check_rows(group, op, "x" if b is None else "a", a)
    b_is_n_k = b is None or _check_weights(group, op, a, b)
    if a.shape[1] == 0:
        raise ValueError(f"perseus.{op}: {'x' if b is None else 'a'} has no columns")
    columns = a.shape[1] if b is None else b.shape[1]
    _check(group, op, a, columns, residual, weight, bias)
    written, c = _scales_of(op, scales, scale, a, columns), a.new_empty(a.shape[0], columns)
    if scale is not None and (scale.dtype is not torch.float32 or scale.numel() != 1
                              or scale.get_device() != group.number):
        raise ValueError(f"perseus.{op}: scale is {scale.dtype} with shape {tuple(scale.shape)} on {scale.device}; it "
                         f"must be one torch.float32 on {group.device}")
    quantised = a.new_empty(a.shape[0], columns, dtype=_E4M3)
    if c.numel():
        _launch(group, op, a, b, b_is_n_k, c, residual, bias,
                (weight, eps, None, quantised, SCALES[scales], written if scale is None else scale))
    return quantised, written.t() if scales == "blocks" else written, c


def _all_reduce_rms_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float,
                         group_name: str, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return _normed("all_reduce_rms_norm", x, None, residual, weight, eps, group_name, bias)


def _all_reduce_rms_norm_fake(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float,
                              group_name: str, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _matmul_all_reduce_rms_norm(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor | None,
                                weight: torch.Tensor | None, eps: float, group_name: str,
                                bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return _normed("matmul_all_reduce_rms_norm", a, b, residual, weight, eps, group_name, bias)


def _matmul_all_reduce_rms_norm_fake(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor | None,
                                     weight: torch.Tensor | None, eps: float, group_name: str,
                                     bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return a.new_empty(a.shape[0], b.shape[1]), a.new_empty(a.shape[0], b.shape[1])


def _reduce_scatter_rms_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float,
                             group_name: str, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return _normed("reduce_scatter_rms_norm", x, None, residual, weight, eps, group_name, bias)


def _reduce_scatter_rms_norm_fake(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None,
                                  eps: float, group_name: str,
                                  bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return _reduce_scatter_fake(x, group_name), _reduce_scatter_fake(x, group_name)


def _matmul_reduce_scatter_rms_norm(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor | None,
                                    weight: torch.Tensor | None, eps: float, group_name: str,
                                    bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return _normed("matmul_reduce_scatter_rms_norm", a, b, residual, weight, eps, group_name, bias)


def _matmul_reduce_scatter_rms_norm_fake(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor | None,
                                         weight: torch.Tensor | None, eps: float, group_name: str,
                                         bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    rows = a.shape[0] // world_of(group_name)
    return a.new_empty(rows, b.shape[1]), a.new_empty(rows, b.shape[1])


def _all_reduce_rms_norm_quant(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float,
                               scales: str, group_name: str, scale: torch.Tensor | None = None,
                               bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _quantised("all_reduce_rms_norm_quant", x, None, residual, weight, eps, scales, group_name, scale, bias)


def _quantised_fake(op: str, a: torch.Tensor, columns: int, scales: str,
                    scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    written = _scales_of(op, scales, scale, a, columns)
    return (a.new_empty(a.shape[0], columns, dtype=_E4M3), written.t() if scales == "blocks" else written,
            a.new_empty(a.shape[0], columns))


def _all_reduce_rms_norm_quant_fake(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None,
                                    eps: float, scales: str, group_name: str, scale: torch.Tensor | None = None,
                                    bias: torch.Tensor | None = None) -> tuple:
    return _quantised_fake("all_reduce_rms_norm_quant", x, x.shape[1], scales, scale)


def _matmul_all_reduce_rms_norm_quant(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor | None,
                                      weight: torch.Tensor | None, eps: float, scales: str, group_name: str,
                                      scale: torch.Tensor | None = None, bias: torch.Tensor | None = None) -> tuple:
    return _quantised("matmul_all_reduce_rms_norm_quant", a, b, residual, weight, eps, scales, group_name, scale, bias)


def _matmul_all_reduce_rms_norm_quant_fake(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor | None,
                                           weight: torch.Tensor | None, eps: float, scales: str, group_name: str,
                                           scale: torch.Tensor | None = None,
                                           bias: torch.Tensor | None = None) -> tuple:
    return _quantised_fake("matmul_all_reduce_rms_norm_quant", a, b.shape[1], scales, scale)


_NORM, _LAST = "Tensor? residual, Tensor? weight, float eps, str group_name, ", "Tensor? bias=None) -> "
for _run, _fake, _schema in (
        (_all_reduce, _all_reduce_fake, "(Tensor x, str group_name) -> Tensor"),
        (_reduce_scatter, _reduce_scatter_fake, "(Tensor x, str group_name) -> Tensor"),
        (_all_reduce_rms_norm, _all_reduce_rms_norm_fake, f"(Tensor x, {_NORM}{_LAST}(Tensor, Tensor)"),
        (_reduce_scatter_rms_norm, _reduce_scatter_rms_norm_fake, f"(Tensor x, {_NORM}{_LAST}(Tensor, Tensor)"),
        (_matmul_all_reduce_rms_norm, _matmul_all_reduce_rms_norm_fake,
         f"(Tensor a, Tensor b, {_NORM}{_LAST}(Tensor, Tensor)"),
        (_matmul_reduce_scatter_rms_norm, _matmul_reduce_scatter_rms_norm_fake,
         f"(Tensor a, Tensor b, {_NORM}{_LAST}(Tensor, Tensor)"),
        (_all_reduce_rms_norm_quant, _all_reduce_rms_norm_quant_fake,
         "(Tensor x, Tensor? residual, Tensor? weight, float eps, str scales, str group_name, Tensor? scale=None, "
         f"{_LAST}(Tensor, Tensor, Tensor)"),
        (_matmul_all_reduce_rms_norm_quant, _matmul_all_reduce_rms_norm_quant_fake,
         "(Tensor a, Tensor b, Tensor? residual, Tensor? weight, float eps, str scales, str group_name, Tensor? "
         f"scale=None, {_LAST}(Tensor, Tensor, Tensor)")):
    _define(_run.__name__[1:] + _schema, _run, _fake)
    _forward_only(_run.__name__[1:])


# ---- the ops as functions of a group ----

def all_reduce(x: torch.Tensor, group: GroupLike = None) -> torch.Tensor:
    """The sum of x [m, n] over all ranks, on every rank, in new memory. Added up in fp32, rounded once."""
    return _call.all_reduce(x, name_of(group))


def reduce_scatter(x: torch.Tensor, group: GroupLike = None) -> torch.Tensor:
    """Rows r m / W ... (r + 1) m / W of the sum of x [m, n] over all ranks. Added up in fp32, rounded once."""
    return _call.reduce_scatter(x, name_of(group))


def all_reduce_rms_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float = 1e-6,
                        group: GroupLike = None, *, bias: torch.Tensor | None = None,
                        ) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, residual) of the sum of x over all ranks; the module says how they are made.

    x: [m, n], row-major, n a multiple of 8. residual: as x, or None; weight, bias: [n], or None. They are the same on
    all ranks. Returns new memory.

    Example::

        h, residual = perseus.all_reduce_rms_norm(partial, residual, norm.weight, norm.eps)
    """
    return _call.all_reduce_rms_norm(x, residual, weight, eps, name_of(group), bias)


def matmul_all_reduce_rms_norm(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor | None,
                               weight: torch.Tensor | None, eps: float = 1e-6, group: GroupLike = None, *,
                               bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """all_reduce_rms_norm(a @ b, ...) in one call. a: [m, k], b: [k, n] or weight.t(), as of matmul_all_reduce().

    Example::

        h, residual = perseus.matmul_all_reduce_rms_norm(attention, o.weight.t(), residual, norm.weight, norm.eps)
    """
    return _call.matmul_all_reduce_rms_norm(a, b, residual, weight, eps, name_of(group), bias)


def reduce_scatter_rms_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None,
                            eps: float = 1e-6, group: GroupLike = None, *, bias: torch.Tensor | None = None,
                            ) -> tuple[torch.Tensor, torch.Tensor]:
    """all_reduce_rms_norm() of this rank's rows alone, which residual and the results have: [m / W, n]."""
    return _call.reduce_scatter_rms_norm(x, residual, weight, eps, name_of(group), bias)


def matmul_reduce_scatter_rms_norm(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor | None,
                                   weight: torch.Tensor | None, eps: float = 1e-6, group: GroupLike = None, *,
                                   bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """reduce_scatter_rms_norm(a @ b, ...) in one call."""
    return _call.matmul_reduce_scatter_rms_norm(a, b, residual, weight, eps, name_of(group), bias)


def all_reduce_rms_norm_quant(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None,
                              eps: float = 1e-6, group: GroupLike = None, *, scales: str = "rows",
                              scale: torch.Tensor | None = None, bias: torch.Tensor | None = None,
                              ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(quantised, scale, residual): all_reduce_rms_norm() with the normed rows as float8_e4m3fn.

    scales: "rows": one for each row, [m, 1]; "blocks": one for each 128 columns, [m, n / 128], column-major; both as
    the scaled products take them. "tensor": `scale` is given, one torch.float32, and returned.
    """
    quantised, written, residual = _call.all_reduce_rms_norm_quant(x, residual, weight, eps, scales, name_of(group),
                                                                  scale, bias)
    return quantised, written if scale is None else scale, residual


def matmul_all_reduce_rms_norm_quant(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor | None,
                                     weight: torch.Tensor | None, eps: float = 1e-6, group: GroupLike = None, *,
                                     scales: str = "rows", scale: torch.Tensor | None = None,
                                     bias: torch.Tensor | None = None,
                                     ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """all_reduce_rms_norm_quant(a @ b, ...) in one call."""
    quantised, written, residual = _call.matmul_all_reduce_rms_norm_quant(a, b, residual, weight, eps, scales,
                                                                         name_of(group), scale, bias)
    return quantised, written if scale is None else scale, residual


__all__ = ["all_reduce", "all_reduce_rms_norm", "all_reduce_rms_norm_quant", "matmul_all_reduce_rms_norm",
           "matmul_all_reduce_rms_norm_quant", "matmul_reduce_scatter_rms_norm", "reduce_scatter",
           "reduce_scatter_rms_norm"]
