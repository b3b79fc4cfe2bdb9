# SPDX-License-Identifier: Apache-2.0
"""How ops are registered with torch: names and implementations, the way around torch's dispatcher for calls without
gradients, autocast, and backward passes that nobody differentiates in silence."""
from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch.autograd import forward_ad

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
    call = _Call(name, run, alone or run)
    torch.library.register_fake(f"perseus::{name}", call.shapes(fake), lib=_library)
    setattr(_call, name, call)


# ---- calls that torch's dispatcher need not see ----

_ordinary = frozenset((torch.Tensor, torch.nn.Parameter))
_profiler = torch.autograd.profiler
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_autocasts, _transforms = torch._C._is_any_autocast_enabled, torch._C._are_functorch_transforms_active
_traces = torch._C._is_tracing
_tracing = torch.compiler.is_dynamo_compiling  # other tracers have modes


def _nobody_looks() -> bool:
    """Whether no mode, trace, transform, profiler or autocast of torch wants to see ops."""
    return not (_dispatch_modes() or _function_modes() or _profiler._is_profiler_enabled or _autocasts()
                or _transforms() or _traces())


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

    def shapes(self, fake: Any) -> Any:
        """What torch calls where a tensor is on the meta device. A result of ordinary tensors and one of these would be
        memory that nobody writes."""
        @functools.wraps(fake)
        def checked(*arguments: Any, **options: Any) -> Any:
            places: dict[torch.device, str] = {}
            for what, x in zip(self.packet.default._schema.arguments, arguments):
                for t in x if isinstance(x, (list, tuple)) else (x,):
                    if isinstance(t, torch.Tensor):
                        places.setdefault(t.device, what.name)
            meta = places.pop(torch.device("meta"), None)
            if meta and places:
                other, what = next(iter(places.items()))
                raise ValueError(f"perseus.{self.name}: {meta} is on the meta device, and {what} on {other}: has a "
                                 "parameter no memory yet (module.to_empty())?")
            return fake(*arguments, **options)
        return checked

    def refuse_tangents(self, arguments: tuple) -> None:
        """The op would give a result without them, as if its derivative were zero."""
        if any(isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None
               for x in torch.utils._pytree.tree_leaves(arguments)):
            raise NotImplementedError(f"perseus.{self.name}: forward-mode derivatives are not implemented (torch.func."
                                      "jvp() and jacfwd(), torch.autograd.forward_ad): use backward() or "
                                      "torch.autograd.grad()")

    def way(self, arguments: tuple) -> Any:
        """The implementation, or what records it for a gradient; None: the dispatcher must see the call."""
        if forward_ad._current_level >= 0:
            self.refuse_tangents(arguments)
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


# ---- gradients ----

_whole = torch.autograd.Variable._execution_engine.is_checkpoint_valid  # False: the engine wants some gradients only
_metadata = torch._C._FunctionBase._input_metadata  # of a node's results


def _differentiate(name: str, backward: Any, setup: Any, *, several: bool = False) -> None:
    """Gradients of an op, for calls that torch's dispatcher sees and for those that it does not.

    setup(ctx, inputs, output): returns what the backward pass needs of them, as tensors.
    backward(ctx, saved, needed, *gradients): saved: those tensors; needed: a bool for each input. Returns a gradient
    or None for each input. It may run twice, each time for some of the inputs, as pipelines of zero bubble do.
    several: more than the first result has a gradient. At most one argument is a list of tensors, and then the result
    is one."""
    call = getattr(_call, name)
    node, record = _recorded(call, backward, setup, several)

    def direct(keyset: Any, *arguments: Any) -> Any:
        way = call.way(arguments)
        if way is not None:
            return way(*arguments)

        def below(*inputs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return call.packet.default.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            if _transforms():
                raise NotImplementedError(f"perseus.{name}: the derivatives of torch.func (grad(), vjp(), jacrev()) "
                                          "are not implemented: use backward() or torch.autograd.grad()")
            return record(node.apply, below, *arguments)
        return below(*arguments)
    # Function.apply() looks for transforms, as way() has done
    call.node = functools.partial(record, super(torch.autograd.Function, node).apply, call.run)
    _library.impl(name, direct, "Autograd", with_keyset=True)


def _recorded(call: _Call, backward: Any, setup: Any, several: bool) -> tuple[Any, Any]:
    """The op as a node of autograd, and the function that calls it. torch.autograd.Function sees no tensors in lists,
    so a list comes last, taken apart. Unless results have several gradients there is one more, without elements: the
    anchor, by which _hold() reaches the node."""
    parameters = call.packet.default._schema.arguments
    defaults = tuple(x.default_value for x in parameters)
    at = next((i for i, x in enumerate(parameters) if str(x.type) == "List[Tensor]"), None)
    others, single = len(parameters) - 1, len(call.packet.default._schema.returns) == 1 and at is None

    def nested(flat: tuple) -> tuple:
        return *flat[:at], list(flat[others:]), *flat[at:others]

    def forward(ctx: Any, run: Any, *flat: Any) -> Any:
        inputs = flat if at is None else nested(flat)
        output = run(*inputs)
        saved = setup(ctx, inputs, output)
        ctx.set_materialize_grads(False)  # torch would fill zeros of the size of each result without a gradient
        if several:
            ctx.save_for_backward(*saved)
            return tuple(output)
        anchor = flat[0].new_empty(0)
        ctx.save_for_backward(*saved, anchor)
        return (output, anchor) if single else (*output, anchor)

    def gradients(ctx: Any, *given: Any) -> tuple:
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad  # read once: torch.utils.checkpoint unpacks once
        if not _whole():
            needed = _asked(ctx)
        if not several:
            *saved, anchor = saved
            if needed != ctx.needs_input_grad:
                _hold(given[0], anchor)
            if given[0] is None:
                of = _metadata.__get__(ctx)[0]
                given = torch.zeros(of.shape, dtype=of.dtype, device=of.device), *given[1:]
        needed = needed[1:] if at is None else nested(needed[1:])
        if torch.is_grad_enabled():  # create_graph
            found = _once(call.name, backward, ctx, saved, needed, given)
        else:
            found = backward(ctx, saved, needed, *given)
        return (None, *found) if at is None else (None, *found[:at], *found[at + 1:], *found[at])

    def record(apply: Any, run: Any, *arguments: Any) -> Any:
        whole = (*arguments, *defaults[len(arguments):])
        if at is not None:
            return list(apply(run, *whole[:at], *whole[at + 1:], *whole[at]))
        found = apply(run, *whole)
        return found if several else found[0] if single else found[:-1]

    node = type(call.name, (torch.autograd.Function,),
                {"forward": staticmethod(forward), "backward": staticmethod(gradients)})
    node._backward_cls._input_metadata = property(functools.partial(_begin, call.name, several))
    node._backward_cls.apply = gradients  # torch's asks for each call which of its two names the function has
    return node, record


# ---- a part of the gradients ----

def _asked(ctx: Any) -> tuple[bool, ...]:
    """Of which inputs the engine wants gradients in this pass. torch's own nodes see that; needs_input_grad says what
    was known when the graph was made."""
    edges = (node for node, _ in ctx.next_functions if node is not None)  # one for each input with a gradient
    return tuple(needed and _will_run(next(edges)) for needed in ctx.needs_input_grad)


def _will_run(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf of torch.autograd.grad(): its gradient is a result
        return True


def _hold(gradient: Any, anchor: torch.Tensor) -> None:
    """Keeps a node for a second pass as long as the gradient that it got. Pipelines of zero bubble come back with that
    gradient for those of the weights, when the graph above the node is gone, and hold torch's own nodes. What they hold
    of a node of Python does not keep it: its results do, and the anchor is one."""
    if gradient is not None:
        task = torch._C._current_graph_task_id()
        held = gradient.__dict__.get("perseus_nodes", (None,))
        gradient.perseus_nodes = (task, *held[1:], anchor) if held[0] == task else (task, anchor)


def _begin(op: str, several: bool, node: Any) -> Any:
    """What torch.autograd.grad() asks of a node from which it begins. From one with several gradients pipelines begin
    with a sum of them, as if it were that of the first."""
    try:
        if not several:
            return _metadata.__get__(node)
        cause = None
    except RuntimeError as e:  # freed: nothing kept the gradient that _hold() had
        cause = e
    raise NotImplementedError(f"perseus.{op}: torch.autograd.grad() cannot begin at this node of the graph. A pipeline "
                              "that splits the backward pass (as schedules of zero bubble do, by "
                              "stage_backward_weight()) can have no weight in an op whose results have several "
                              "gradients: take a schedule without the split, as 1F1B or Interleaved1F1B") from cause


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


def _once(op: str, backward: Any, ctx: Any, saved: Any, needed: tuple, grads: tuple) -> tuple:
    """A backward pass that can be differentiated by nobody in silence."""
    with torch.no_grad():
        found = backward(ctx, saved, needed, *grads)
    flat, structure = torch.utils._pytree.tree_flatten(found)
    tensors = [t for t in flat if isinstance(t, torch.Tensor)]
    refused = iter(_Once.apply(op, torch.empty(0, requires_grad=True), *tensors) if tensors else ())
    return torch.utils._pytree.tree_unflatten([next(refused) if isinstance(t, torch.Tensor) else t for t in flat],
                                              structure)


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
