# SPDX-License-Identifier: Apache-2.0
"""Styles for torch.distributed.tensor.parallel.parallelize_module(): the nn.Linear of a model of one's own, with the
ops of this package.

    parallelize_module(block, mesh["tp"], {"wq": perseus.parallel.ColwiseParallel(sequence_dim=1),
                                           "wo": perseus.parallel.RowwiseParallel(sequence_dim=1)})

Parameters are distributed as torch's styles of the same names do, so checkpoints, clipping and optimizers are the same.
A style takes the mesh of one dimension, opens its context (*collective*), and raises what perseus.init() raises. Inputs
are plain tensors, this rank's part, or DTensors. fused(plan) makes a plan of these styles from one of torch's.
"""
from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, PrepareModuleInput
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwise

from . import nn as layers
from . import ops
from ._registry import find


class _Split(nn.Linear):
    """What an nn.Linear becomes. perseus: its style; perseus_group: the group's name and ranks; perseus_mesh: its
    mesh; perseus_given: by GatheredInput, an input and its result."""
    perseus_given: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        style, (name, world), mesh, given = self.perseus, self.perseus_group, self.perseus_mesh, self.perseus_given
        if given is not None:
            self.perseus_given = None
        if given is not None and given[0] is x:
            return given[1] if style.use_local_output else style.as_output(given[1], mesh)
        if isinstance(x, DTensor):
            wanted = style.of_input(x.dim())
            x = (x if x.placements == (wanted,) else x.redistribute(mesh, [wanted])).to_local(grad_placements=[wanted])
        y = style.run(x, layers.local(self.weight),
                      None if self.bias is None else layers.local(self.bias, style.sums_bias()), name, world)
        return y if style.use_local_output else style.as_output(y, mesh)


@lru_cache(maxsize=256)
def _split(kind: type) -> type:
    return layers.picklable(type(kind.__name__, (_Split, kind), {"__module__": kind.__module__}), _split, kind)


class _Style(ParallelStyle):
    split: int
    sequence_dim: int | None
    use_local_output: bool

    def as_output(self, y: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        return DTensor.from_local(y, mesh, [self.of_output(y.dim())], run_check=False)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise NotImplementedError(f"perseus.parallel.{type(self).__name__}: {type(module).__name__} is no "
                                      "nn.Linear")
        group, size = find(device_mesh), module.weight.shape[self.split]
        if size % group.world:
            raise ValueError(f"perseus.parallel.{type(self).__name__}: {group.world} ranks must divide dimension "
                             f"{self.split} of the weight, {size}")
        of_bias = Replicate() if self.split else Shard(0)
        for name, placement in (("weight", Shard(self.split)), ("bias", of_bias)):
            p = module._parameters[name]
            if p is not None and not isinstance(p, DTensor):
                whole = distribute_tensor(p.detach(), device_mesh, [placement],
                                          src_data_rank=getattr(self, "src_data_rank", 0))
                module.register_parameter(name, nn.Parameter(whole, p.requires_grad))
        module.perseus, module.perseus_group, module.perseus_mesh = self, (group.name, group.world), device_mesh
        module.__class__ = _Split if type(module) is nn.Linear else _split(type(module))
        return module


class ColwiseParallel(_Style):
    """A rank has out / W rows of the weight [out, in], and of the bias. y is this rank's columns, [..., out / W].

    sequence_dim: x is this rank's part of the sequence along it, and y has the whole sequence (all_gather_matmul).
    None: x is the same on all ranks (replicated_matmul). keep_gathered, fp8: see perseus.nn.ColumnParallelLinear.
    use_local_output: False: y is a DTensor, Shard on its last dimension.
    """
    split = 0

    def __init__(self, *, sequence_dim: int | None = None, keep_gathered: bool = True,
                 use_local_output: bool = True, fp8: str | None = None) -> None:
        super().__init__()
        layers.check_recipe("perseus.parallel.ColwiseParallel: fp8", fp8)
        self.sequence_dim, self.keep_gathered, self.use_local_output = sequence_dim, keep_gathered, use_local_output
        self.fp8 = fp8

    def run(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, name: str,
            world: int) -> torch.Tensor:
        return layers.column_linear(x, weight, bias, name, world, self.sequence_dim, self.keep_gathered,
                                    "perseus.parallel.ColwiseParallel", self.fp8)

    def sums_bias(self) -> bool:
        return False

    def of_input(self, dims: int) -> Placement:
        return Replicate() if self.sequence_dim is None else Shard(self.sequence_dim)

    def of_output(self, dims: int) -> Placement:
        return Shard(dims - 1)


class RowwiseParallel(_Style):
    """A rank has in / W columns of the weight [out, in], and the whole bias. x is this rank's columns, [..., in / W].

    sequence_dim: y is this rank's part of the sequence along it, which W divides (matmul_reduce_scatter). None: y is
    the same on all ranks (matmul_all_reduce). fp8: see perseus.nn. use_local_output: False: y is a DTensor, Shard on
    sequence_dim, or Replicate. With sequence_dim the gradient of the bias is a part (Partial): call
    perseus.nn.sum_replicated_gradients(model).
    """
    split = 1

    def __init__(self, *, sequence_dim: int | None = None, use_local_output: bool = True,
                 fp8: str | None = None) -> None:
        super().__init__()
        layers.check_recipe("perseus.parallel.RowwiseParallel: fp8", fp8)
        self.sequence_dim, self.use_local_output, self.fp8 = sequence_dim, use_local_output, fp8

    def run(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, name: str,
            world: int) -> torch.Tensor:
        return layers.row_linear(x, weight, bias, name, world, self.sequence_dim, "perseus.parallel.RowwiseParallel",
                                 self.fp8)

    def sums_bias(self) -> bool:
        return self.sequence_dim is not None

    def of_input(self, dims: int) -> Placement:
        return Shard(dims - 1)

    def of_output(self, dims: int) -> Placement:
        return Replicate() if self.sequence_dim is None else Shard(self.sequence_dim)


# ---- one gather for several products ----

class _Whole(torch.autograd.Function):
    """The gathered input, for modules that read it and are not part of the product that gathers it. As after torch's
    PrepareModuleInput, its gradient is the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, whole: torch.Tensor, rank: int, dim: int) -> torch.Tensor:
        ctx.begin, ctx.size, ctx.dim = rank * x.shape[dim], x.shape[dim], dim
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple:
        return g.narrow(ctx.dim, ctx.begin, ctx.size), None, None, None


class GatheredInput(ParallelStyle):
    """For a module whose first input is this rank's part of the sequence: gathers it once, in the kernel that also
    multiplies, for all `products`. These are submodules with ColwiseParallel() that take the whole input, as the
    projections of an attention do. The module gets the whole sequence.

    sequence_dim: the dimension of the input that is split. use_local_output: False: the module gets a DTensor.

    Example::

        parallelize_module(block, mesh["tp"], {"attention": perseus.parallel.GatheredInput("wq", "wk", "wv"),
                                               "attention.w[qkv]": perseus.parallel.ColwiseParallel()})
    """

    def __init__(self, *products: str, sequence_dim: int = 1, use_local_output: bool = True) -> None:
        super().__init__()
        self.products, self.sequence_dim, self.use_local_output = products, sequence_dim, use_local_output
        self.others: ParallelStyle | None = None  # a style of torch for the other inputs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = find(device_mesh)
        place = group.name, group.rank, group.world
        if self.others:
            self.others._apply(module, device_mesh)
        module.register_forward_pre_hook(partial(self._before, device_mesh, *place))
        module.register_forward_hook(self._after, always_call=True)
        return module

    def _after(self, module: nn.Module, *unused: Any) -> None:
        """Results of products that were not called do not stay, and their modules can be copied and saved."""
        for product in self.products:
            m = module.get_submodule(product)
            if isinstance(m, _Split) and m.perseus_given is not None:
                m.perseus_given = None

    def _before(self, mesh: DeviceMesh, name: str, rank: int, world: int, module: nn.Module, arguments: tuple) -> tuple:
        if not arguments:
            raise TypeError(f"perseus.parallel.GatheredInput: {type(module).__name__} was called without a positional "
                            "input; the first one is what is gathered")
        return self._gather(module, arguments[0], mesh, name, rank, world), *arguments[1:]

    def _gather(self, module: nn.Module, x: torch.Tensor, mesh: DeviceMesh, name: str, rank: int,
                world: int) -> torch.Tensor:
        dim = self.sequence_dim
        found = [module.get_submodule(product) for product in self.products]
        made = [m for m in found if isinstance(m, _Split) and m.perseus.of_input(x.dim()) == Replicate()
                and m.weight.shape[1] == x.shape[-1]]
        if not made:
            x = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Shard(dim)], run_check=False)
            x = x.redistribute(mesh, [Replicate()])
            return x.to_local() if self.use_local_output else x
        if isinstance(x, DTensor):
            x = x.redistribute(mesh, [Shard(dim)]).to_local(grad_placements=[Shard(dim)])
        rows = layers._matrix("perseus.parallel.GatheredInput", x, x.shape[-1], dim)
        *results, gathered = ops._call.all_gather_matmuls(rows, [layers.local(m.weight).t() for m in made], name)
        sequence = x.shape[dim] * world
        whole = _Whole.apply(x, layers._tensor(gathered, x, dim, sequence), rank, dim)
        if not self.use_local_output:
            whole = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
        for m, y in zip(made, results):
            y = layers._tensor(y, x, dim, sequence)
            m.perseus_given = whole, y if m.bias is None else y + layers.local(m.bias).to(y.dtype)
        return whole


# ---- plans of torch's styles ----

class _Instead(ParallelStyle):
    """A style of ours, where it can take the module: otherwise torch's."""

    def __init__(self, ours: _Style, torchs: ParallelStyle) -> None:
        super().__init__()
        self.ours, self.torchs = ours, torchs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        fits = type(module) is nn.Linear and module.weight.shape[self.ours.split] % device_mesh.size() == 0
        style = self.ours if fits else self.torchs
        style.src_data_rank = self.src_data_rank
        return style._apply(module, device_mesh)


def _sequence_dim(layout: Placement) -> int | None:
    return layout.dim if isinstance(layout, Shard) else None


def _instead(style: ParallelStyle) -> ParallelStyle:
    """Our style for one of torch's, or itself."""
    kind = {TorchColwise: ColwiseParallel, TorchRowwise: RowwiseParallel}.get(type(style))
    if kind is None:
        return style
    (before,), (after,) = style.input_layouts, style.output_layouts
    split, other = (after, before) if kind is ColwiseParallel else (before, after)
    if split != Shard(-1) or not (other == Replicate() or (isinstance(other, Shard) and other.dim >= 0)):
        return style
    return _Instead(kind(sequence_dim=_sequence_dim(other), use_local_output=style.use_local_output), style)


def _gathered(style: ParallelStyle, products: list[str]) -> GatheredInput | None:
    """Our style for one of torch's that gathers the first input of a module."""
    if type(style) is not PrepareModuleInput or style.input_kwarg_layouts or not (products and style.input_layouts):
        return None
    (first, *rest), (wanted, *wanted_rest) = style.input_layouts, style.desired_input_layouts
    if not isinstance(first, Shard) or first.dim < 0 or wanted != Replicate():
        return None
    made = GatheredInput(*products, sequence_dim=first.dim, use_local_output=style.use_local_output)
    if rest != wanted_rest or any(rest):
        made.others = PrepareModuleInput(input_layouts=(None, *rest), desired_input_layouts=(None, *wanted_rest),
                                         use_local_output=style.use_local_output)
    return made


def fused(plan: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """A plan for parallelize_module() with styles of ours in the place of torch's: ColwiseParallel, RowwiseParallel,
    and PrepareModuleInput where it gathers the sequence. Everything else stays, and so does what our styles cannot
    take: modules that are no plain nn.Linear, sizes that the ranks do not divide, other layouts.

    Example::

        parallelize_module(model, mesh["tp"], perseus.parallel.fused(plan))
    """
    made = {path: _instead(style) for path, style in plan.items()}
    for path, style in plan.items():
        under = [(p.removeprefix(f"{path}."), s) for p, s in made.items() if p.startswith(f"{path}.")]
        products = [p for p, s in under if isinstance(s, _Instead) and isinstance(s.ours, ColwiseParallel)
                    and s.ours.sequence_dim is None and not set(p) & set("*?[.")]
        made[path] = _gathered(style, products) or made[path]
    return made


__all__ = ["ColwiseParallel", "GatheredInput", "RowwiseParallel", "fused"]
