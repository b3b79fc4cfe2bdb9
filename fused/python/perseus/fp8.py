# SPDX-License-Identifier: Apache-2.0
"""Products of bfloat16 whose forward pass is in float8_e4m3fn. Importing this module registers their ops.

    recipe   who shares a scale of a   of the weight [n, k]
    rows     a row                     a row
    blocks   1 x 128                   128 x 128

Each call quantises both operands, by one pass over each, and multiplies them with their scales (scaled.py). Gradients
are those of the bfloat16 operands, by products of bfloat16: the backward passes of ops.py. What a recipe asks of sizes:
scaled.py and quantisers.py.

Weights are quantised by each call, unless keep_quantised_weights() says that they may stay.
"""
from __future__ import annotations

import functools
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from ._checks import _bf16, _check_bias, _check_weights
from ._dispatch import _autocast, _call, _define, _differentiate
from ._group import Group
from ._registry import GroupLike, find, name_of, world_of
from .ops import (ALLGATHER, ALLREDUCE, GEMM, REDUCE_SCATTER, _all_gather_matmul_backward, _matmul_all_reduce_backward,
                  _matmul_reduce_scatter_backward, _replicated_matmul_backward, _save)
from .quantisers import _quantise
from .scaled import _multiply

RECIPES = {"rows": ((1, -1), (1, -1)), "blocks": ((1, 128), (128, 128))}  # of a, of the weight


def check_recipe(what: str, recipe: str | None) -> None:
    if recipe is not None and recipe not in RECIPES:
        raise ValueError(f"{what} is {recipe!r}; it must be None or one of {', '.join(map(repr, RECIPES))}")


# ---- weights that stay ----

_kept = WeakIdKeyDictionary()  # by weight: what it was, and its numbers and scales
_keeping = False


def keep_quantised_weights(keep: bool = True) -> None:
    """For serving: from now on products that need no gradient keep what they made of a weight, half its memory, until
    it changes. False: every call quantises again, as it does at first.

    They see an optimizer's step, load_state_dict() of a layer, other memory, and writes that torch counts
    (`weight.mul_()`). They do not see these; call forget_quantised_weights() after them:

    - a write in place of a DTensor (as parameters of perseus.nn are), torch._foreach_*() of DTensors, and averages of
      weights made so
    - what FSDP gathers after a sharded parameter was written
    - a collective of torch.distributed into a weight, as where a trainer sends weights to a server
    - writes through weight.data, by a replayed CUDA graph, or by kernels that torch does not know

    What a CUDA graph captures quantises in each replay, whatever was said here.
    """
    global _keeping
    _keeping = keep
    forget_quantised_weights()


def forget_quantised_weights() -> None:
    """The next product of each weight quantises it again."""
    _kept.clear()


register_optimizer_step_post_hook(lambda *_: forget_quantised_weights())


def _quantised_weight(group: Group, b: torch.Tensor, recipe: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Of b.t(), by _quantise()."""
    weight, block = b._base, list(RECIPES[recipe][1])
    # Below autograd, as in what Inductor compiles, views are not known as such, and do not have the weight's version. A
    # CUDA graph outlives what is kept here.
    if weight is None or weight.is_inference() or group.place.capturing():
        return _quantise(b.t(), block, False)
    stream = torch.cuda.current_stream(b.device).cuda_stream if b.is_cuda else 0
    now = recipe, stream, weight._version, b.data_ptr(), b.shape, weight.untyped_storage()._cdata
    was, memory, found = _kept.get(weight, (None, None, None))
    if was != now or memory.expired():
        found = _quantise(b.t(), block, False)
        _kept[weight] = now, StorageWeakRef(weight.untyped_storage()), found
    return found


def _product(op: str, number: int, rows: int, a: torch.Tensor, b: torch.Tensor, group: Group,
             bias: torch.Tensor | None, recipe: str, keeps: bool) -> torch.Tensor:
    """rows: of the result. keeps: what is made of b may stay."""
    check_recipe(f"perseus.{op}: recipe", recipe)
    if a.dtype is not _bf16:
        raise TypeError(f"perseus.{op}: a is {a.dtype}; it must be torch.bfloat16")
    if not _check_weights(group, op, a, b):
        raise ValueError(f"perseus.{op}: b with shape {tuple(b.shape)} has strides {b.stride()}; it must be weight.t() "
                         "of an [n, k] weight")
    _check_bias(group, op, a, bias, b.shape[1])
    a8, scale_a = _quantise(a, list(RECIPES[recipe][0]), recipe == "blocks")
    weight8, scale_weight = (_quantised_weight(group, b, recipe) if keeps and _keeping else
                             _quantise(b.t(), list(RECIPES[recipe][1]), False))
    m = a.shape[0] * (group.world if number == ALLGATHER else 1)
    return _multiply(group, op, number, m, a8, weight8.t(), scale_a, scale_weight.t(), a.new_empty(rows, b.shape[1]),
                     bias, False)


def _fp8_all_gather_matmul(a: torch.Tensor, b: torch.Tensor, group_name: str, bias: torch.Tensor | None = None,
                           recipe: str = "blocks", keeps: bool = False) -> torch.Tensor:
    group = find(group_name)
    return _product("fp8_all_gather_matmul", ALLGATHER, a.shape[0] * group.world, a, b, group, bias, recipe, keeps)


def _fp8_all_gather_matmul_fake(a: torch.Tensor, b: torch.Tensor, group_name: str, bias: torch.Tensor | None = None,
                                recipe: str = "blocks") -> torch.Tensor:
    return a.new_empty(a.shape[0] * world_of(group_name), b.shape[1])


def _fp8_matmul_reduce_scatter(a: torch.Tensor, b: torch.Tensor, group_name: str, bias: torch.Tensor | None = None,
                               recipe: str = "blocks", keeps: bool = False) -> torch.Tensor:
    group = find(group_name)
    if a.shape[0] % group.world:
        raise ValueError(f"perseus.fp8_matmul_reduce_scatter: a has {a.shape[0]} rows; the {group.world} ranks of "
                         f"group {group.name} must divide them")
    return _product("fp8_matmul_reduce_scatter", REDUCE_SCATTER, a.shape[0] // group.world, a, b, group, bias, recipe,
                    keeps)


def _fp8_matmul_reduce_scatter_fake(a: torch.Tensor, b: torch.Tensor, group_name: str,
                                    bias: torch.Tensor | None = None, recipe: str = "blocks") -> torch.Tensor:
    return a.new_empty(a.shape[0] // world_of(group_name), b.shape[1])


def _fp8_matmul_all_reduce(a: torch.Tensor, b: torch.Tensor, group_name: str, bias: torch.Tensor | None = None,
                           recipe: str = "blocks", keeps: bool = False) -> torch.Tensor:
    return _product("fp8_matmul_all_reduce", ALLREDUCE, a.shape[0], a, b, find(group_name), bias, recipe, keeps)


def _fp8_replicated_matmul(a: torch.Tensor, b: torch.Tensor, group_name: str, bias: torch.Tensor | None = None,
                           recipe: str = "blocks", keeps: bool = False) -> torch.Tensor:
    return _product("fp8_replicated_matmul", GEMM, a.shape[0], a, b, find(group_name), bias, recipe, keeps)


def _same_rows_fake(a: torch.Tensor, b: torch.Tensor, group_name: str, bias: torch.Tensor | None = None,
                    recipe: str = "blocks") -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _register(run: Any, fake: Any, backward: Any) -> None:
    name = run.__name__[1:]
    _define(name + '(Tensor a, Tensor b, str group_name, Tensor? bias=None, str recipe="blocks") -> Tensor', run, fake,
            local=name == "fp8_replicated_matmul", alone=functools.partial(run, keeps=True))
    _differentiate(name, backward, _save)
    _autocast(name, (0, 1, 3), (_bf16,))


_register(_fp8_all_gather_matmul, _fp8_all_gather_matmul_fake, _all_gather_matmul_backward)
_register(_fp8_matmul_reduce_scatter, _fp8_matmul_reduce_scatter_fake, _matmul_reduce_scatter_backward)
_register(_fp8_matmul_all_reduce, _same_rows_fake, _matmul_all_reduce_backward)
_register(_fp8_replicated_matmul, _same_rows_fake, _replicated_matmul_backward)


# ---- the ops as functions of a group ----

def fp8_all_gather_matmul(a: torch.Tensor, b: torch.Tensor, group: GroupLike = None, *,
                          bias: torch.Tensor | None = None, recipe: str = "blocks") -> torch.Tensor:
    """all_gather_matmul() with its forward pass in FP8: the rows of a travel quantised. The backward pass gathers a
    once more, in bfloat16. b: weight.t() of an [n, k] weight.

    Example::

        y = perseus.fp8_all_gather_matmul(x, linear.weight.t())   # x, linear.weight: bfloat16, as is y
    """
    return _call.fp8_all_gather_matmul(a, b, name_of(group), bias, recipe)


def fp8_matmul_reduce_scatter(a: torch.Tensor, b: torch.Tensor, group: GroupLike = None, *,
                              bias: torch.Tensor | None = None, recipe: str = "blocks") -> torch.Tensor:
    """matmul_reduce_scatter() with its products in FP8. Sums travel in bfloat16."""
    return _call.fp8_matmul_reduce_scatter(a, b, name_of(group), bias, recipe)


def fp8_matmul_all_reduce(a: torch.Tensor, b: torch.Tensor, group: GroupLike = None, *,
                          bias: torch.Tensor | None = None, recipe: str = "blocks") -> torch.Tensor:
    """matmul_all_reduce() with its products in FP8. Sums travel in bfloat16."""
    return _call.fp8_matmul_all_reduce(a, b, name_of(group), bias, recipe)


def fp8_replicated_matmul(a: torch.Tensor, b: torch.Tensor, group: GroupLike = None, *,
                          bias: torch.Tensor | None = None, recipe: str = "blocks") -> torch.Tensor:
    """replicated_matmul() with its product in FP8."""
    return _call.fp8_replicated_matmul(a, b, name_of(group), bias, recipe)


__all__ = ["fp8_all_gather_matmul", "fp8_matmul_all_reduce", "fp8_matmul_reduce_scatter", "fp8_replicated_matmul"]
