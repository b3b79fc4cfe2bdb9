# SPDX-License-Identifier: Apache-2.0
"""Matrices to float8_e4m3fn and scales, in one pass over memory, without a group. Importing this module registers the
ops.

    block        who shares a scale                         scales
    (1, 128)     128 columns of a row: tokens, activations  [..., rows, columns / 128]
    (128, 128)   a square: weights                          [..., ceil(rows / 128), columns / 128]
    (1, -1)      a row                                      [..., rows, 1]
    (-1, -1)     all                                        [1]

A scale is the largest magnitude of its numbers / 448, and at least 2^-126: zeros stay zeros, and nothing saturates. A
number that is not one stays so, alone. An infinity makes its scale infinite and itself not a number. With a given
scale, what is too large becomes 448 times it. quantise_reference() is the same in torch, bit by bit.
"""
from __future__ import annotations

import ctypes
import math
from typing import Any

import torch

from ._checks import _check_memory
from ._device import Emulated
from ._dispatch import _call, _define
from ._library import library
from .ops import _forward_only

_E4M3 = torch.float8_e4m3fn
_DTYPES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}  # enum prs_dtype
_GROUPS = {(-1, -1): 1, (1, -1): 2, (1, 128): 3, (128, 128): 4}  # enum prs_quantise_group; a test compares
_MOST, _LEAST_SCALE = 448.0, 2.0**-126


def _check(x: torch.Tensor, block: tuple[int, int], column_major: bool = False) -> None:
    if block not in _GROUPS:
        raise ValueError(f"perseus.quantise: block is {block}; it must be one of {', '.join(map(str, _GROUPS))}")
    if x.dtype not in _DTYPES:
        raise TypeError(f"perseus.quantise: x is {x.dtype}; it must be torch.bfloat16, torch.float16 or torch.float32")
    if x.dim() < 2:
        raise ValueError(f"perseus.quantise: x has shape {tuple(x.shape)}; it must have 2 dimensions or more")
    multiple = 128 if block[1] == 128 else 16
    if x.shape[-1] % multiple:
        raise ValueError(f"perseus.quantise: x has {x.shape[-1]} columns; with block {block} they must be a multiple "
                         f"of {multiple}")
    if block[0] == 128 and x.dim() > 2 and x.shape[-2] % 128:
        raise ValueError(f"perseus.quantise: x has shape {tuple(x.shape)}; the rows of each matrix must be a multiple "
                         "of 128, or quantise one matrix at a time")
    if column_major and (x.dim() != 2 or block != (1, 128)):
        raise ValueError(f"perseus.quantise: column_major scales of block {block} and {x.dim()} dimensions: only those "
                         "of (1, 128) and 2 dimensions can be")


def _check_place(x: torch.Tensor, emulated: bool) -> None:
    kind = "cpu" if emulated else "cuda"
    if x.device.type != kind:
        raise ValueError(f"perseus.quantise: x is on {x.device}; the library works on {kind}")
    if not x.is_contiguous():
        raise ValueError(f"perseus.quantise: x with shape {tuple(x.shape)} has strides {x.stride()}; it must be "
                         "contiguous")
    _check_memory("quantise", "x", x)


def _launch(x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, group: int, given: bool,
            column_major: bool = False) -> None:
    lib, emulated = library(), library().emulated
    _check_place(x, emulated)
    if not x.numel():
        return
    rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
    fields: dict[str, Any] = {"dtype": _DTYPES[x.dtype], "group": group, "rows": rows, "columns": columns,
                              "given": int(given)}
    if column_major:
        fields.update(scale_row=1, scale_column=rows)
    if emulated:
        place = Emulated(lib)
        call = lib.prs_quantise(place.read(x), place.write(numbers),
                                (place.read if given else place.write)(scales), **fields)
        status = lib.prs_fused_quantise(ctypes.byref(call), 0)
        place.done()
    else:
        with torch.cuda.device(x.device):
            call = lib.prs_quantise(x.data_ptr(), numbers.data_ptr(), scales.data_ptr(), **fields)
            status = lib.prs_fused_quantise(ctypes.byref(call), torch.cuda.current_stream().cuda_stream)
    lib.check(status, "perseus.quantise")


def _quantise(x: torch.Tensor, block: list[int], column_major: bool) -> tuple[torch.Tensor, torch.Tensor]:
    numbers, scales = _quantise_fake(x, block, column_major)
    _launch(x, numbers, scales.t() if column_major else scales, _GROUPS[block[0], block[1]], False, column_major)
    return numbers, scales


def _quantise_fake(x: torch.Tensor, block: list[int], column_major: bool) -> tuple[torch.Tensor, torch.Tensor]:
    _check(x, (block[0], block[1]), column_major)
    if block[0] == -1:
        shape = [1]
    else:
        rows = (x.shape[-2] + 127) // 128 if block[0] == 128 else x.shape[-2]
        shape = [*x.shape[:-2], rows, x.shape[-1] // 128 if block[1] == 128 else 1]
    scales = x.new_empty(shape[::-1] if column_major else shape, dtype=torch.float32)
    return torch.empty_like(x, dtype=_E4M3), scales.t() if column_major else scales


def _quantise_given(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    numbers = _quantise_given_fake(x, scale)
    if scale.device != x.device:
        raise ValueError(f"perseus.quantise: scale is on {scale.device}, and x on {x.device}")
    _launch(x, numbers, scale.reshape(1), _GROUPS[-1, -1], True)
    return numbers


def _quantise_given_fake(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    _check(x, (-1, -1))
    if scale.dtype is not torch.float32 or scale.numel() != 1:
        raise ValueError(f"perseus.quantise: scale is {scale.dtype} with shape {tuple(scale.shape)}; it must be one "
                         "torch.float32")
    return torch.empty_like(x, dtype=_E4M3)


_define("quantise(Tensor x, int[] block, bool column_major) -> (Tensor, Tensor)", _quantise, _quantise_fake)
_define("quantise_given(Tensor x, Tensor scale) -> Tensor", _quantise_given, _quantise_given_fake)
for _name in ("quantise", "quantise_given"):
    _forward_only(_name)


def quantise(x: torch.Tensor, block: tuple[int, int] = (1, 128), *, column_major: bool = False,
             scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x in float8_e4m3fn, of the shape of x, and the scales. Local, without a group. No gradients.

    x: bf16, fp16 or fp32 [..., rows, columns], contiguous; columns a multiple of 16, or of 128. block: see the top of
    this module. column_major: the scales of (1, 128) as all_gather_scaled_matmul() takes them. scale: one for all, with
    block (-1, -1); it is returned.

    Example::

        a, scale_a = perseus.quantise(x, (1, 128), column_major=True)
        w13, w13_scale_inv = perseus.quantise(gate_up, (128, 128))      # [experts, 2 inner, hidden]
    """
    if isinstance(block, int):
        raise TypeError(f"perseus.quantise: block is {block}; it must be two numbers: rows and columns, as (1, 128)")
    if scale is not None:
        if block != (-1, -1):
            raise ValueError(f"perseus.quantise: block is {block} with a given scale; it must be (-1, -1)")
        return _call.quantise_given(x, scale), scale
    return _call.quantise(x, list(block), column_major)


def quantise_reference(x: torch.Tensor, block: tuple[int, int] = (1, 128), *,
                       scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """quantise() by torch's own ops, on any device."""
    _check(x, block)
    rows, columns = (math.prod(x.shape[:-1]) if block[0] == -1 else block[0]), block[1] if block[1] > 0 else x.shape[-1]
    matrix = x.float().reshape(1, -1, x.shape[-1]) if block[0] == -1 else x.float()
    blocks = torch.nn.functional.pad(matrix, (0, 0, 0, -matrix.shape[-2] % rows))
    blocks = blocks.unflatten(-2, (-1, rows)).unflatten(-1, (-1, columns))
    if scale is None:
        most = blocks.abs().nan_to_num(0, math.inf).amax((-3, -1), keepdim=True)
        scales = (most / _MOST).clamp(min=_LEAST_SCALE)
    else:
        scales = scale.reshape(1)
    numbers = (blocks * (1 / scales)).clamp(-_MOST, _MOST).to(_E4M3).flatten(-2).flatten(-3, -2)
    numbers = numbers[..., :matrix.shape[-2], :].reshape(x.shape)
    if scale is not None:
        return numbers, scale
    return numbers, scales.reshape(1) if block[0] == -1 else scales.squeeze(-1).squeeze(-2)


__all__ = ["quantise", "quantise_reference"]
