# SPDX-License-Identifier: Apache-2.0
"""How ops are registered with torch: names and implementations, the way around torch's dispatcher for calls without
gradients, autocast, and backward passes that nobody differentiates in silence."""
from __future__ import annotations

import types
from typing import Any

import torch

_library = torch.library.Library("perseus", "DEF")
_fixed = (torch._C.Tag.needs_fixed_stride_order,)


_ops = torch.ops.perseus
_call = types.SimpleNamespace()  # the ops by name, for calls from Python
_meeting: list[str] = []  # ops in which ranks wait for each other


def _define(schema: str, run: Any, fake: Any, local: bool = False, alone: Any = None) -> None:
    """local: the op has a group, and waits for no other rank. alone: what calls from Python run instead where they need
    no gradient."""
    name = schema.partition("(")[0]
    if "str group_name" in schema and not local:
        _meeting.append(name)
    _library.define(schema, tags=_fixed)
    _library.impl(name, run, "CUDA")
    _library.impl(name, run, "CPU")  # with the emulated library; otherwise the check of devices says what is wrong
    torch.library.register_fake(f"perseus::{name}", fake, lib=_library)
    setattr(_call, name, _Call(name, run, alone or run))


# ---- calls that torch's dispatcher need not see ----

_ordinary = frozenset((torch.Tensor, torch.nn.Parameter))
_profiler = torch.autograd.profiler
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_autocasts, _transforms = torch._C._is_any_autocast_enabled, torch._C._functorch.peek_interpreter_stack
_traces = torch._C._get_tracing_state
_tracing = torch.compiler.is_dynamo_compiling  # other tracers have modes


def _nobody_looks() -> bool:
    """Whether no mode, trace, transform, profiler or autocast of torch wants to see ops."""
    return not (_dispatch_modes() or _function_modes() or _profiler._is_profiler_enabled or _autocasts()
                or _transforms() is not None or _traces() is not None)


class _Call:
    """An op as a function of Python. The dispatcher of torch takes some 10 us of the host for an op in Python, and 80
    where a gradient is needed. Where nobody looks, the call goes straight to the implementation, or to a node of
    autograd."""

    def __init__(self, name: str, run: Any, alone: Any) -> None:
        self.name, self.packet, self.run, self.alone, self.node = name, getattr(_ops, name), run, alone, None
        kinds = [str(x.type) for x in self.packet.default._schema.arguments]
        self.tensors = [(i, kind) for i, kind in enumerate(kinds) if "Tensor" in kind]  # places, by type

    def __call__(self, *arguments: Any) -> Any:
        if _tracing():
            return self.packet(*arguments)
        way = self.way(arguments)
        if way is None:
            self.refuse_none(arguments)
            return self.packet(*arguments)
        return way(*arguments)

    def refuse_none(self, arguments: tuple) -> None:
        """torch's dispatcher lets None through."""
        for i, kind in self.tensors:
            if kind == "Tensor" and i < len(arguments) and arguments[i] is None:
                name = self.packet.default._schema.arguments[i].name
                raise TypeError(f"perseus.{self.name}: {name} is None; it must be a tensor")

    def way(self, arguments: tuple) -> Any:
        """The implementation, or what records it for a gradient; None: the dispatcher must see the call."""
        if not _nobody_looks():
            return None
        needs, given = False, len(arguments)
        for i, kind in self.tensors:
            x = arguments[i] if i < given else None
            if type(x) in _ordinary:
                if x.is_meta:
                    return None
                needs = needs or x.requires_grad
            elif kind == "List[Tensor]" and isinstance(x, (list, tuple)):
                if any(type(each) not in _ordinary or each.is_meta for each in x):
                    return None
                needs = needs or any(each.requires_grad for each in x)
            elif x is not None or kind != "Optional[Tensor]":
                return None  # a tensor that the implementation does not take as it is, or torch says what is wrong
        return self.node if needs and torch.is_grad_enabled() else self.alone


class _Direct:
    """Where register_autograd() puts its kernel: behind the ways of _Call, for who calls torch.ops.perseus."""

    def __init__(self, call: _Call) -> None:
        self.call = call

    def impl(self, name: str, kernel: Any, key: str, with_keyset: bool) -> None:
        call = self.call

        def direct(keyset: Any, *arguments: Any) -> Any:
            way = call.way(arguments)
            return kernel(keyset, *arguments) if way is None else way(*arguments)
        _library.impl(name, direct, key, with_keyset=with_keyset)


# ---- gradients ----

def _differentiate(name: str, backward: Any, setup: Any) -> None:
    """Gradients of an op, for torch.library.register_autograd() and for calls that the dispatcher does not see.

    backward(ctx, *gradients), setup(ctx, inputs, output): as register_autograd() takes them. At most one argument is a
    list of tensors, and then the result is one."""
    call, backward, setup = getattr(_call, name), _once(name, backward), _splittable(name, setup)
    call.node = _recorded(call, backward, setup)
    torch.library.register_autograd(f"perseus::{name}", backward, setup_context=setup, lib=_Direct(call))


def _recorded(call: _Call, backward: Any, setup: Any) -> Any:
    """The op as a node of autograd. torch.autograd.Function sees no tensors in lists, so a list comes last, taken
    apart."""
    parameters = call.packet.default._schema.arguments
    defaults = [x.default_value for x in parameters]
    at = next((i for i, x in enumerate(parameters) if str(x.type) == "List[Tensor]"), None)
    others = len(parameters) - 1

    def nested(flat: tuple) -> tuple:
        return flat if at is None else (*flat[:at], list(flat[others:]), *flat[at:others])

    def forward(ctx: Any, *flat: Any) -> Any:
        inputs = nested(flat)
        output = call.run(*inputs)
        setup(ctx, inputs, output)
        return output if at is None else tuple(output)

    def gradients(ctx: Any, *given: Any) -> Any:
        if at is None:
            return backward(ctx, *given)
        needed = ctx.needs_input_grad
        ctx.needs_input_grad = nested(needed)
        try:
            found = backward(ctx, list(given))
        finally:
            ctx.needs_input_grad = needed
        missing = (None,) * (len(parameters) - len(found))  # arguments that the dispatcher would have left out
        return *found[:at], *found[at + 1:], *missing, *found[at]

    node = type(call.name, (torch.autograd.Function,),
                {"forward": staticmethod(forward), "backward": staticmethod(gradients)})

    def record(*arguments: Any) -> Any:
        whole = (*arguments, *defaults[len(arguments):])
        if at is None:
            return node.apply(*whole)
        return list(node.apply(*whole[:at], *whole[at + 1:], *whole[at]))
    return record


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
