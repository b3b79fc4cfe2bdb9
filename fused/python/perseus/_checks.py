# SPDX-License-Identifier: Apache-2.0
"""Whether an op can take a tensor, and the error that says why not. Each check costs the host little where it holds:
they run in every call."""
from __future__ import annotations

from typing import Any

import torch

from ._group import Group

_bf16 = torch.bfloat16
_PRODUCTS = {torch.bfloat16: 1, torch.float16: 2}  # enum prs_dtype of what products take


def _refuse(group: Group, op: str, what: str, t: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Says which claim a matrix does not meet. dtype: of a, for a second operand, which may be the transpose of a
    row-major matrix."""
    if t.dtype not in _PRODUCTS:
        raise TypeError(f"perseus.{op}: {what} is {t.dtype}; it must be torch.bfloat16 or torch.float16")
    if dtype not in (None, t.dtype):
        raise TypeError(f"perseus.{op}: {what} is {t.dtype}, and a {dtype}: they must be equal")
    if t.dim() != 2:
        raise ValueError(f"perseus.{op}: {what} has shape {tuple(t.shape)}; it must have 2 dimensions")
    if t.device != group.device:
        raise ValueError(f"perseus.{op}: {what} is on {t.device}; group {group.name} works on {group.device}")
    _check_memory(op, what, t)
    layout = "row-major or the transpose of a row-major matrix" if dtype else "row-major"
    raise ValueError(f"perseus.{op}: {what} with shape {tuple(t.shape)} has strides {t.stride()}; it must be {layout}, "
                     "without gaps: call .contiguous()")


_LOWEST = 1 << 32  # a lower address may be that of no memory


def _has_no_memory(t: torch.Tensor) -> bool:
    """Its storage was freed. A view into it then has its offset as address. To the library 0 is an operand that was not
    given."""
    return t.data_ptr() < _LOWEST and t.numel() != 0 and t.untyped_storage().nbytes() == 0


def _misplaced(t: torch.Tensor) -> bool:
    begin = t.data_ptr()
    return begin & 15 != 0 or begin < _LOWEST and _has_no_memory(t)


def _check_memory(op: str, what: str, t: torch.Tensor) -> None:
    begin = t.data_ptr()
    if _has_no_memory(t):
        raise ValueError(f"perseus.{op}: {what} with shape {tuple(t.shape)} has no memory: its storage was freed (is "
                         "it a parameter that FSDP has gathered and freed again?)")
    if begin & 15:
        raise ValueError(f"perseus.{op}: {what} begins at {begin:#x}; it must be aligned to 16 bytes (is it a slice of "
                         "a larger tensor?)")


def _check_kind(op: str, what: str, given: Any, kind: type) -> None:
    """Whether an argument that is no tensor is an object of ours."""
    if not isinstance(given, kind):
        raise TypeError(f"perseus.{op}: {what} is of type {type(given).__name__}; it must be a perseus.{kind.__name__}")


def _check_rows(group: Group, op: str, what: str, a: torch.Tensor) -> None:
    if (a.dtype not in _PRODUCTS or a.dim() != 2 or a.get_device() != group.number or _misplaced(a)
        or not a.is_contiguous()):
        _refuse(group, op, what, a)


def _check_weights(group: Group, op: str, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether b is the transpose of an [n, k] matrix."""
    if b.dtype is not a.dtype or b.dim() != 2 or b.get_device() != group.number or _misplaced(b):
        _refuse(group, op, "b", b, a.dtype)
    rows, columns = b.shape
    if a.shape[1] != rows:
        raise ValueError(f"perseus.{op}: a has {a.shape[1]} columns and b {rows} rows: they must be equal")
    strides = b.stride()  # a view made to ask is_contiguous() costs the host ten times as much
    if strides == (columns, 1):
        return False
    if strides == (1, rows):
        return True
    if b.is_contiguous():
        return False
    if not b.t().is_contiguous():
        _refuse(group, op, "b", b, a.dtype)
    return True


def _check_bias(group: Group, op: str, a: torch.Tensor, bias: torch.Tensor | None, n: int) -> None:
    if bias is None:
        return
    if bias.dtype is not a.dtype:
        raise TypeError(f"perseus.{op}: bias is {bias.dtype}; it must be {a.dtype}, as a")
    if bias.shape != (n,) or not bias.is_contiguous():
        raise ValueError(f"perseus.{op}: bias has shape {tuple(bias.shape)} and strides {bias.stride()}; it must be "
                         f"({n},), one for each column of b, without gaps")
    if bias.get_device() != group.number:
        raise ValueError(f"perseus.{op}: bias is on {bias.device}; group {group.name} works on {group.device}")
    _check_memory(op, "bias", bias)


def _check_tensor(group: Group, op: str, what: str, t: torch.Tensor, dtype: torch.dtype, shape: tuple) -> None:
    """shape: -1 for any size."""
    if (t.dtype is not dtype or t.get_device() != group.number or _misplaced(t) or not t.is_contiguous()
        or t.shape != shape and not _fits(t.shape, shape)):
        _refuse_tensor(group, op, what, t, dtype, shape)


def _fits(sizes: torch.Size, shape: tuple) -> bool:
    return len(sizes) == len(shape) and all(want in (-1, have) for have, want in zip(sizes, shape))


def _refuse_tensor(group: Group, op: str, what: str, t: torch.Tensor, dtype: torch.dtype, shape: tuple) -> None:
    """Says which claim of _check_tensor() does not hold."""
    if t.dtype is not dtype:
        raise TypeError(f"perseus.{op}: {what} is {t.dtype}; it must be {dtype}")
    if not _fits(t.shape, shape):
        raise ValueError(f"perseus.{op}: {what} has shape {tuple(t.shape)}; it must be {shape} (-1: any)")
    if t.get_device() != group.number:
        raise ValueError(f"perseus.{op}: {what} is on {t.device}; group {group.name} works on {group.device}")
    if not t.is_contiguous():
        raise ValueError(f"perseus.{op}: {what} with shape {tuple(t.shape)} has strides {t.stride()}; it must be "
                         "contiguous")
    _check_memory(op, what, t)


def _check_scaled(group: Group, op: str, a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor,
                  scale_b: torch.Tensor) -> None:
    """Operands of float8_e4m3fn, b the transpose of an [n, k] matrix, and the types of their scales."""
    for what, t in (("a", a), ("b", b)):
        if t.dtype is not torch.float8_e4m3fn:
            raise TypeError(f"perseus.{op}: {what} is {t.dtype}; it must be torch.float8_e4m3fn")
        if t.dim() != 2:
            raise ValueError(f"perseus.{op}: {what} has shape {tuple(t.shape)}; it must have 2 dimensions")
        if t.get_device() != group.number:
            raise ValueError(f"perseus.{op}: {what} is on {t.device}; group {group.name} works on {group.device}")
        _check_memory(op, what, t)
        if not (t if what == "a" else t.t()).is_contiguous():
            raise ValueError(f"perseus.{op}: {what} with shape {tuple(t.shape)} has strides {t.stride()}; "
                             + ("it must be row-major, without gaps: call .contiguous()" if what == "a" else
                                "it must be weight.t() of a row-major [n, k] weight: tensor cores take no other layout "
                                "of one-byte types"))
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"perseus.{op}: a has {a.shape[1]} columns and b {b.shape[0]} rows: they must be equal")
    if a.shape[1] % 16 or a.shape[1] == 0 or b.shape[1] % 8:
        raise ValueError(f"perseus.{op}: k is {a.shape[1]} and n is {b.shape[1]}: k must be a multiple of 16, n of 8")
    for what, t in (("scale_a", scale_a), ("scale_b", scale_b)):
        if t.dtype is not torch.float32:
            raise TypeError(f"perseus.{op}: {what} is {t.dtype}; it must be torch.float32")
        if t.get_device() != group.number:
            raise ValueError(f"perseus.{op}: {what} is on {t.device}; group {group.name} works on {group.device}")
