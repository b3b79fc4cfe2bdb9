# SPDX-License-Identifier: Apache-2.0
"""How ops are registered with torch: names and implementations, the way around torch's dispatcher for calls without
gradients, autocast, and backward passes that nobody differentiates in silence."""
from __future__ import annotations

from typing import Any

import torch

_library = torch.library.Library("perseus", "DEF")
_fixed = (torch._C.Tag.needs_fixed_stride_order,)


def _define(schema: str, run: Any, fake: Any) -> None:
    name = schema.partition("(")[0]
    _library.define(schema, tags=_fixed)
    _library.impl(name, run, "CUDA")
    _library.impl(name, run, "CPU")  # with the emulated library; otherwise the check of devices says what is wrong
    torch.library.register_fake(f"perseus::{name}", fake, lib=_library)


_ops = torch.ops.perseus


# ---- calls without gradients ----

_ordinary = (torch.Tensor, torch.nn.Parameter)


def _nothing_to_record(a: torch.Tensor, bs: list[torch.Tensor]) -> bool:
    """Whether the call may go straight to the implementation: no gradient, no trace and no mode of torch wants to see
    the op. That saves the host a second pass through torch's dispatcher, and its conversion of each tensor."""
    return (type(a) is torch.Tensor and a.is_contiguous() and all(type(b) in _ordinary for b in bs)
            and torch._C._len_torch_dispatch_stack() == 0
            and not (torch.is_grad_enabled() and (a.requires_grad or any(b.requires_grad for b in bs)))
            and torch._C._functorch.peek_interpreter_stack() is None)


class _Direct:
    """Where register_autograd() puts its kernel: behind a test that a call without gradients passes."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def impl(self, name: str, kernel: Any, key: str, with_keyset: bool) -> None:
        run = self.run

        def direct(keyset: Any, a: torch.Tensor, b: torch.Tensor, group_name: str, bias: torch.Tensor | None = None,
                   *rest: Any) -> torch.Tensor:
            if _nothing_to_record(a, [b] if bias is None else [b, bias]):
                return run(a, b, group_name, bias, *rest)
            return kernel(keyset, a, b, group_name, bias, *rest)
        _library.impl(name, direct, key, with_keyset=with_keyset)


# ---- gradients of gradients ----

class _Once(torch.autograd.Function):
    """Gradients as they are, whose own gradients are refused: the backward passes are ops without them."""

    @staticmethod
    def forward(ctx: Any, op: str, anchor: torch.Tensor, *gradients: torch.Tensor) -> tuple:
        ctx.op = op
        return tuple(g.view_as(g) for g in gradients)

    @staticmethod
    def backward(ctx: Any, *unused: Any) -> tuple:
        raise NotImplementedError(f"perseus.{ctx.op}: gradients of gradients are not implemented (create_graph=True): "
                                  "use torch's own ops where a loss has them")


def _once(op: str, backward: Any) -> Any:
    """A backward pass that can be differentiated by nobody in silence."""
    def run(ctx: Any, *grads: Any) -> tuple:
        if not torch.is_grad_enabled():  # no create_graph
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        flat, structure = torch.utils._pytree.tree_flatten(found)
        tensors = [t for t in flat if isinstance(t, torch.Tensor)]
        refused = iter(_Once.apply(op, torch.empty(0, requires_grad=True), *tensors) if tensors else ())
        return torch.utils._pytree.tree_unflatten([next(refused) if isinstance(t, torch.Tensor) else t for t in flat],
                                                  structure)
    return run


# ---- pipelines that split the backward pass ----

def _splittable(op: str, setup: Any) -> Any:
    """A setup_context whose nodes say what they cannot do. Pipelines with a split backward pass (zero bubble) come back
    to a node for the gradients of weights, when torch has freed what a node of Python stands for."""
    def run(ctx: Any, inputs: tuple, output: Any) -> None:
        kind = type(ctx)
        if "_input_metadata" not in vars(kind):
            kind._input_metadata = property(ask)
        setup(ctx, inputs, output)

    def ask(node: Any) -> Any:
        try:
            return torch._C._FunctionBase._input_metadata.__get__(node)
        except RuntimeError as e:
            raise NotImplementedError(f"perseus.{op}: a pipeline that splits the backward pass (as schedules of zero "
                                      "bubble do, by stage_backward_weight()) cannot have this op: take a schedule "
                                      "without the split, as 1F1B or Interleaved1F1B") from e
    return run


# ---- autocast ----

def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype is not torch.float64 else value
    return [_cast(v, dtype) for v in value] if isinstance(value, (list, tuple)) else value


def _autocast(name: str, places: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    """Under torch.autocast the arguments at these places get its dtype, as those of torch's own products do. dtypes:
    what the op takes; the first where autocast's is none of them."""
    op = getattr(_ops, name).default

    def of(kind: str) -> Any:
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{kind.upper()}"))

        def run(*arguments: Any, **options: Any) -> Any:
            wanted = torch.get_autocast_dtype(kind)
            wanted = wanted if wanted in dtypes else dtypes[0]
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return op(*(_cast(v, wanted) if i in places else v for i, v in enumerate(arguments)), **{
                    key: _cast(v, wanted) if key in ("bias", "residual") else v for key, v in options.items()})
        return run
    for kind in ("cuda", "cpu"):
        _library.impl(name, of(kind), f"Autocast{kind.upper()}")
