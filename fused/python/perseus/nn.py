# SPDX-License-Identifier: Apache-2.0
"""Linear layers that are split among the ranks of a group (tensor parallelism), with sequence parallelism if wanted.

A column-parallel layer holds out_features / W rows of the weight, a row-parallel one in_features / W columns. With
sequence parallelism the activations between the two pairs of a transformer are split along `sequence_dim` (tokens, or
sequence in [sequence, batch, features]):

    x [t / W, ..., in]  -> ColumnParallelLinear -> [t, ..., hidden / W] -> RowParallelLinear -> [t / W, ..., out]

Without it x and the result have t rows on every rank. Weights are laid out as torch.nn.Linear's; dtype is bfloat16, or
float16. Layers take what torch.nn.Linear takes: views are copied where the ops need dense rows.

fp8="blocks" or "rows" multiplies in float8_e4m3fn in the forward pass, which quantises x and the weight (fp8.py).
Parameters, results and gradients are bfloat16 as before. None: not. Each call quantises the weight; to a server whose
weights seldom change, keep_quantised_weights() saves that.

Parameters are DTensors on the group's mesh, so that state_dict(), torch.distributed.checkpoint, clip_grad_norm_() and
optimizers know which part a rank has: weight Shard(0) or Shard(1), a row-parallel bias Replicate. Groups of which torch
has no mesh (those made from a store) have plain tensors, where torch.distributed is not initialized, else none.
"""
from __future__ import annotations

import copyreg
import errno
import functools
import math
from typing import Any, Iterable, Iterator, Union

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from . import ops
from ._group import Group
from ._library import PerseusError
from ._registry import GroupLike, find, name_of
from .fp8 import check_recipe, forget_quantised_weights, keep_quantised_weights


# ---- tensors of any shape as matrices ----

def _matrix(layer: str, x: torch.Tensor, columns: int, sequence_dim: int | None) -> torch.Tensor:
    """x as dense rows, its sequence first. sequence_dim: None without sequence parallelism."""
    if x.dim() == 0 or x.shape[-1] != columns:
        raise ValueError(f"{layer}: x has shape {tuple(x.shape)}; its last dimension must be {columns}")
    if sequence_dim is not None and sequence_dim >= x.dim() - 1:
        raise ValueError(f"{layer}: x has shape {tuple(x.shape)}; its dimension {sequence_dim} must be the sequence, "
                         "before the features (sequence_dim=)")
    first = x.movedim(sequence_dim, 0) if sequence_dim else x
    rows = first if first.dim() == 2 else first.reshape(math.prod(first.shape[:-1]), columns)  # a view is a node more
    rows = rows.contiguous()
    if torch.compiler.is_compiling():  # a graph has no offsets; the op refuses what is not aligned
        return rows
    return rows.clone() if rows.storage_offset() * rows.element_size() % 16 else rows


def _tensor(y: torch.Tensor, x: torch.Tensor, sequence_dim: int | None, sequence: int) -> torch.Tensor:
    """A result as a tensor shaped like x, with `sequence` positions along sequence_dim. Not a view, as
    torch.nn.Linear's results are not."""
    shape = list(x.shape[:-1]) + [y.shape[-1]]
    if sequence_dim is not None:
        shape[sequence_dim] = sequence
    if len(shape) == 2:
        return y
    others = math.prod(shape[:sequence_dim]) if sequence_dim else 1
    if others == 1:
        return torch.ops.aten._unsafe_view(y, shape)
    moved = [shape[sequence_dim], *shape[:sequence_dim], *shape[sequence_dim + 1:]]
    return y.view(moved).movedim(0, sequence_dim).contiguous()


def column_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group_name: str, world: int,
                  sequence_dim: int | None, keep_gathered: bool = True, layer: str = "ColumnParallelLinear",
                  fp8: str | None = None) -> torch.Tensor:
    """x @ weight.t() + bias for a weight [out / W, in]; see ColumnParallelLinear."""
    rows, b = _matrix(layer, x, weight.shape[1], sequence_dim), weight.t()
    if sequence_dim is None:
        y = (ops._call.fp8_replicated_matmul(rows, b, group_name, bias, fp8) if fp8 else
             ops._call.replicated_matmul(rows, b, group_name, bias))
        return _tensor(y, x, None, 0)
    y = (ops._call.fp8_all_gather_matmul(rows, b, group_name, bias, fp8) if fp8 else
         ops.all_gather_matmul(rows, b, group_name, bias=bias, keep_gathered=keep_gathered))
    return _tensor(y, x, sequence_dim, x.shape[sequence_dim] * world)


def row_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group_name: str, world: int,
               sequence_dim: int | None, layer: str = "RowParallelLinear", fp8: str | None = None) -> torch.Tensor:
    """The sum over the ranks of x @ weight.t(), + bias, for a weight [out, in / W]; see RowParallelLinear."""
    rows = _matrix(layer, x, weight.shape[1], sequence_dim)
    if sequence_dim is None:
        y = (ops._call.fp8_matmul_all_reduce(rows, weight.t(), group_name, bias, fp8) if fp8 else
             ops._call.matmul_all_reduce(rows, weight.t(), group_name, bias))
        return _tensor(y, x, None, 0)
    sequence = x.shape[sequence_dim]
    if sequence % world:
        raise ValueError(f"{layer}: x has shape {tuple(x.shape)}; the {world} ranks must divide its sequence, "
                         f"dimension {sequence_dim}, which has {sequence} positions")
    y = (ops._call.fp8_matmul_reduce_scatter(rows, weight.t(), group_name, bias, fp8) if fp8 else
         ops._call.matmul_reduce_scatter(rows, weight.t(), group_name, bias))
    return _tensor(y, x, sequence_dim, sequence // world)


# ---- parameters ----

@functools.lru_cache(maxsize=256)
def _in_parts(spec: DTensorSpec) -> DTensorSpec:
    """The spec of a replicated parameter's gradient on a rank, which is a part of the sum over ranks."""
    return DTensorSpec(spec.mesh, (Partial(),), tensor_meta=spec.tensor_meta)


class _Local(torch.autograd.Function):
    """DTensor.to_local() for a parameter, whose gradient is laid out as the parameter. Less for the host than
    to_local() itself."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, partial: bool) -> torch.Tensor:
        spec, part = parameter._spec, parameter._local_tensor
        ctx.spec = _in_parts(spec) if partial else spec
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple:
        return DTensor(g.contiguous(), ctx.spec, requires_grad=False), None


_local = super(torch.autograd.Function, _Local).apply  # Function.apply() looks for transforms, and so does local()


def local(parameter: torch.Tensor, partial: bool = False) -> torch.Tensor:
    """This rank's part of a parameter, as a plain tensor that gives it gradients. partial: gradients of a replicated
    one are this rank's part of a sum."""
    if not isinstance(parameter, DTensor):
        return parameter
    partial = partial and parameter.device_mesh.ndim == 1
    if (parameter.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active() and parameter._local_tensor.is_contiguous()):
        return _local(parameter, partial)
    return parameter.to_local(grad_placements=[Partial()] if partial else None)


def _distributed(shard: torch.Tensor, group: Group, placement: Placement) -> nn.Parameter:
    mesh = group.mesh
    if mesh is None and group.world > 1 and dist.is_initialized():
        raise PerseusError(f"perseus.nn: torch.distributed does not know the ranks of group {group.name} (it was made "
                           "from a store), and would take this rank's part of a parameter for the whole, in "
                           "checkpoints and clip_grad_norm_(): give perseus.init() the process group or the DeviceMesh",
                           -errno.EINVAL)
    return nn.Parameter(shard if mesh is None else DTensor.from_local(shard, mesh, [placement], run_check=False))


@torch.no_grad()
def _keep_part(parameter: torch.Tensor, whole: torch.Tensor, rank: int, world: int, dim: int | None) -> None:
    """Copies this rank's part of a whole tensor; of a DTensor, whatever mesh it lies on by now."""
    if isinstance(parameter, DTensor):
        shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh,
                                                              parameter.placements)
        for i, (size, begin) in enumerate(zip(shape, offset)):
            whole = whole.narrow(i, begin if size else 0, size)
        parameter.to_local().copy_(whole)
    else:
        parameter.copy_(whole if dim is None else whole.chunk(world, dim)[rank])


class _Parallel(nn.Module):
    split: int  # the dimension of the weight that is split

    def __init__(self, in_features: int, out_features: int, group: GroupLike, bias: bool, sequence_parallel: bool,
                 sequence_dim: int, device: Any, dtype: torch.dtype, fp8: str | None) -> None:
        super().__init__()
        check_recipe(f"{type(self).__name__}: fp8", fp8)
        self.fp8 = fp8
        opened = find(group)
        self.group_name, self.rank, self.world = name_of(opened), opened.rank, opened.world
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self.in_features, self.out_features = in_features, out_features
        shape = [out_features, in_features]
        if shape[self.split] % opened.world:
            raise ValueError(f"{type(self).__name__}: {opened.world} ranks must divide "
                             f"{('out_features', 'in_features')[self.split]} {shape[self.split]}")
        if sequence_dim < 0:
            raise ValueError(f"{type(self).__name__}: sequence_dim {sequence_dim} must not be negative")
        shape[self.split] //= opened.world
        device = opened.device if device is None else device
        self.weight = _distributed(torch.empty(*shape, dtype=dtype, device=device), opened, Shard(self.split))
        of_bias = Replicate() if self.split else Shard(0)
        self.bias = _distributed(torch.empty(shape[0], dtype=dtype, device=device), opened, of_bias) if bias else None
        self._mark()
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Normal weights of deviation in_features**-0.5, and no bias. Draws the whole weight and keeps this rank's
        part, so the model depends on the generator (default: torch's, the same seed on all ranks) and not on the number
        of ranks. Does nothing on the meta device."""
        if self.weight.is_meta:
            return
        whole = torch.empty(self.out_features, self.in_features, dtype=self.weight.dtype, device=self.weight.device)
        nn.init.normal_(whole, std=self.in_features**-0.5, generator=generator)
        _keep_part(self.weight, whole, self.rank, self.world, self.split)
        if self.bias is not None:
            with torch.no_grad():
                local(self.bias).zero_()

    def _mark(self) -> None:
        """Says of each parameter whether its gradients are parts of a sum. A tensor's attributes go where it is copied,
        moved or replaced."""
        for name, p in self._parameters.items():
            if p is not None:
                parts = name == "bias" and self.split == 1 and self.sequence_parallel
                setattr(p, _MARK, parts)
                if parts:
                    setattr(self, _MARK, frozenset((name,)))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark()

    def _apply(self, *arguments: Any, **options: Any) -> "_Parallel":
        super()._apply(*arguments, **options)
        self._mark()
        return self

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        super()._load_from_state_dict(*arguments, **options)
        self._mark()
        forget_quantised_weights()  # FSDP gathers into memory whose version it does not raise

    def _sequence(self) -> int | None:
        return self.sequence_dim if self.sequence_parallel else None

    def extra_repr(self) -> str:
        return (f"{self.in_features}, {self.out_features}, ranks={self.world}, "
                f"sequence_parallel={self.sequence_parallel}, bias={self.bias is not None}"
                f"{f', fp8={self.fp8}' if self.fp8 else ''}")


class ColumnParallelLinear(_Parallel):
    """y = x @ weight.t() with the rows of weight [out / W, in] of this rank. bias [out / W].

    With sequence parallelism x is [t / W, ..., in] and y [t, ..., out / W] (all_gather_matmul); without, both have t
    rows (replicated_matmul).
    sequence_dim: the dimension of x that is split: 0 for [sequence, batch, in], 1 for [batch, sequence, in], which
    costs a copy where batch > 1.
    keep_gathered: the x of all ranks [t, ..., in] stays for the weight's gradient; False, and with fp8: the backward
    pass gathers it once more.

    Example::

        up = perseus.nn.ColumnParallelLinear(4096, 14336)
    """
    split = 0

    def __init__(self, in_features: int, out_features: int, group: GroupLike = None, *, bias: bool = False,
                 sequence_parallel: bool = True, sequence_dim: int = 0, keep_gathered: bool = True, device: Any = None,
                 dtype: torch.dtype = torch.bfloat16, fp8: str | None = None) -> None:
        super().__init__(in_features, out_features, group, bias, sequence_parallel, sequence_dim, device, dtype, fp8)
        self.keep_gathered = keep_gathered

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else local(self.bias)
        return column_linear(x, local(self.weight), bias, self.group_name, self.world, self._sequence(),
                             self.keep_gathered, fp8=self.fp8)


class RowParallelLinear(_Parallel):
    """y = the sum over all ranks of x @ weight.t(), with the columns of weight [out, in / W] of this rank. bias [out],
    the same on all ranks.

    x is [t, ..., in / W]. With sequence parallelism y is [t / W, ..., out] (matmul_reduce_scatter), and W divides t;
    the gradient of bias is then this rank's part, see sum_replicated_gradients(). Without, y has t rows
    (matmul_all_reduce). sequence_dim: as of ColumnParallelLinear.

    Example::

        down = perseus.nn.RowParallelLinear(14336, 4096)
    """
    split = 1

    def __init__(self, in_features: int, out_features: int, group: GroupLike = None, *, bias: bool = False,
                 sequence_parallel: bool = True, sequence_dim: int = 0, device: Any = None,
                 dtype: torch.dtype = torch.bfloat16, fp8: str | None = None) -> None:
        super().__init__(in_features, out_features, group, bias, sequence_parallel, sequence_dim, device, dtype, fp8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else local(self.bias, self.sequence_parallel)
        return row_linear(x, local(self.weight), bias, self.group_name, self.world, self._sequence(), fp8=self.fp8)


# ---- replicated parameters ----

# Of a parameter: whether its gradients are parts of a sum; False also where it is split. Of a module: the names of the
# parameters whose gradients are.
_MARK = "perseus_replicated"


def mark_replicated(what: Union[nn.Parameter, nn.Module], *names: str) -> Any:
    """Says that parameters are the same on all ranks but see only this rank's part of the sequence, as a norm's weight
    under sequence parallelism, so that sum_replicated_gradients() adds up their gradients. Returns `what`.

    what: a module, with names of its own parameters, or without for all of it and of its submodules; or a parameter
    before it is assigned to its module. The module remembers the names, so the marks outlive deepcopy(), to_empty(),
    load_state_dict(assign=True) and fully_shard(). A parameter that is marked after it was assigned loses its mark
    there.

    Example::

        perseus.nn.mark_replicated(block.norm)
    """
    if isinstance(what, nn.Module):
        for module in [what] if names else what.modules():
            marked = (set(names) if names else {name for name, p in module._parameters.items()
                                                if p is not None and not isinstance(p, DTensor)})
            if marked:
                setattr(module, _MARK, frozenset(getattr(module, _MARK, ())) | marked)
            for name in marked:
                setattr(module._parameters[name], _MARK, True)
        return what
    setattr(what, _MARK, True)
    return what


def _remember(module: nn.Module, name: str, parameter: Any) -> None:
    if getattr(parameter, _MARK, False):
        setattr(module, _MARK, frozenset(getattr(module, _MARK, ())) | {name})


nn.modules.module.register_module_parameter_registration_hook(_remember)


def replicate(model: nn.Module, group: GroupLike = None, *, sequence_parallel: bool = True) -> nn.Module:
    """Makes the parameters of a model that are plain tensors (norms, embeddings, heads: the same on all ranks) DTensors
    too, Replicate on the group's mesh, as torch's clip_grad_norm_() and fused optimizers want all parameters of a list
    to be of one kind. While their modules' forward() runs, the attributes are plain tensors, so it computes as before.
    Returns the model.

    sequence_parallel: the modules see this rank's part of the sequence, so their gradients are parts (Partial), which
    sum_replicated_gradients() adds up. Values are taken to be the same on all ranks. A group without a mesh: the
    parameters are marked (mark_replicated) and stay plain.

    Example::

        perseus.nn.replicate(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    """
    opened = find(group)
    if opened.mesh is None:
        return mark_replicated(model) if sequence_parallel else model
    made: dict[int, nn.Parameter] = {}  # tied parameters stay one
    for module in model.modules():
        names = [name for name, p in module._parameters.items() if p is not None and not isinstance(p, DTensor)]
        for name in names:
            p = module._parameters[name]
            if id(p) not in made:
                made[id(p)] = nn.Parameter(DTensor.from_local(p.detach(), opened.mesh, [Replicate()], run_check=False),
                                           p.requires_grad)
            module._parameters[name] = made[id(p)]
        if names:
            module.__class__ = _with_local_views(type(module), tuple(names), sequence_parallel)
    return model


def picklable(made: type, make: Any, *arguments: Any) -> type:
    """Has objects of a class that make(*arguments) gives pickled as that: no module has it. Classes derived from it, as
    those of FSDP, are pickled as they would be."""
    def reduce(self: Any, protocol: Any) -> tuple:
        function, given, *rest = super(made, self).__reduce_ex__(protocol)
        if function is copyreg.__newobj__ and given[0] is made:
            return (_new, (make, arguments, *given[1:]), *rest)
        return (function, given, *rest)
    made.__reduce_ex__ = reduce
    return made


def _new(make: Any, arguments: tuple, *given: Any) -> Any:
    kind = make(*arguments)
    return kind.__new__(kind, *given)


@functools.lru_cache(maxsize=256)
def _with_local_views(kind: type, names: tuple[str, ...], partial: bool) -> type:
    """A class whose parameters of these names are this rank's plain tensors while forward() runs, and themselves for
    all others (FSDP, initialization)."""
    def view(name: str) -> property:
        def get(self: nn.Module) -> torch.Tensor:
            p = self._parameters[name]
            return local(p, partial) if self.perseus_forward else p
        return property(get)

    def forward(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        self.perseus_forward = True
        try:
            return kind.forward(self, *arguments, **options)
        finally:
            self.perseus_forward = False
    made = type(kind.__name__, (kind,), {"__module__": kind.__module__, "perseus_forward": False, "forward": forward,
                                         **{name: view(name) for name in names}})
    return picklable(made, _with_local_views, kind, names, partial)


def _marks(what: Any) -> Iterator[tuple[nn.Parameter, bool | None]]:
    """The parameters of modules or of an iterable, and what is known of each: True: its gradients are parts; None:
    nothing."""
    items = [what] if isinstance(what, (nn.Module, torch.Tensor)) else list(what)
    for item in items:
        if isinstance(item, nn.Module):
            for module in item.modules():
                names = getattr(module, _MARK, ())
                yield from ((p, name in names or getattr(p, _MARK, None)) for name, p in module._parameters.items()
                            if p is not None)
        else:
            yield item, getattr(item, _MARK, None)


def _dimension(t: DTensor, group: Group) -> int | None:
    """The dimension of its mesh that is the group's ranks."""
    names = [t.device_mesh.get_group(i).group_name for i in range(t.device_mesh.ndim)]
    name = group.process_group.group_name
    return names.index(name) if name in names else None


def sum_replicated_gradients(what: Union[nn.Module, Iterable[nn.Module], Iterable[nn.Parameter]],
                             group: GroupLike = None) -> None:
    """*Collective.* Adds up the gradients of replicated parameters over the ranks, in fp32 and one all-reduce; after
    backward(), before the optimizer. Once for a step, after the last microbatch: of a parameter that is only marked
    nobody knows that its gradient is a sum already, and a second call would add the sums of all ranks up.

    what: the model, or parameters. Summed are gradients that DTensors know to be parts (Partial on the group's ranks),
    and those of parameters that are marked. Give the model: parameters alone do not show the marks of their modules.
    Raises PerseusError if W > 1 and nothing is marked, but for models whose parameters are all known to be split or
    alike (layers of this module, DTensors).

    Example::

        loss.backward()
        perseus.nn.sum_replicated_gradients(model)
        optimizer.step()
    """
    opened = find(group)
    if opened.world == 1:
        return
    found, unknown, grads, seen = False, 0, [], set()
    for p, marked in _marks(what):
        if id(p) in seen:
            continue
        seen.add(id(p))
        dim = _dimension(p, opened) if isinstance(p, DTensor) else None
        replicated = dim is not None and not p.placements[dim].is_shard()
        found = found or bool(marked) or replicated
        unknown += marked is None and dim is None
        if p.grad is None:
            continue
        if isinstance(p.grad, DTensor) and dim is not None:
            if p.grad.placements[dim].is_partial():
                grads.append((p, dim))
        elif marked:
            grads.append((p, None))
    if unknown and not found:
        raise ops.PerseusError(f"perseus.nn.sum_replicated_gradients: none of {len(seen)} parameters is marked as "
                               f"replicated on group {opened.name}: give the model rather than its parameters, and "
                               "call perseus.nn.mark_replicated(module) or perseus.nn.replicate(model)")
    if grads:
        _add_up(grads, opened)


def _add_up(grads: list[tuple[nn.Parameter, int | None]], group: Group) -> None:
    parts = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p, _ in grads]
    together = torch.cat([g.reshape(-1).float() for g in parts])
    group.process_group.allreduce([together]).wait()
    for (p, dim), part, total in zip(grads, parts, together.split([g.numel() for g in parts])):
        part.copy_(total.view_as(part))
        if dim is not None:
            placements = [Replicate() if i == dim else old for i, old in enumerate(p.grad.placements)]
            p.grad = DTensor.from_local(part, p.grad.device_mesh, placements, run_check=False, shape=p.grad.shape,
                                        stride=p.grad.stride())


__all__ = ["ColumnParallelLinear", "RowParallelLinear", "forget_quantised_weights", "keep_quantised_weights", "local",
           "mark_replicated", "replicate", "sum_replicated_gradients"]
