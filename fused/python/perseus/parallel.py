# SPDX-License-Identifier: Apache-2.0
"""Styles for torch.distributed.tensor.parallel.parallelize_module(): the nn.Linear of a model of one's own, with the
ops of this package.

    parallelize_module(block, mesh["tp"], {"wq": perseus.parallel.ColwiseParallel(sequence_dim=1),
                                           "wo": perseus.parallel.RowwiseParallel(sequence_dim=1)})

Parameters are distributed as torch's styles of the same names do, so checkpoints, clipping and optimizers are the same.
A style takes the mesh of one dimension, opens its context (*collective*), and raises what perseus.init() raises. Inputs
are plain tensors, this rank's part, or DTensors.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from . import nn as layers
from ._registry import find


class _Split(nn.Linear):
    """What an nn.Linear becomes. perseus: its style; perseus_group: the group's name and ranks; perseus_mesh: its
    mesh."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        style, (name, world), mesh = self.perseus, self.perseus_group, self.perseus_mesh
        if isinstance(x, DTensor):
            wanted = style.of_input(x.dim())
            x = (x if x.placements == (wanted,) else x.redistribute(mesh, [wanted])).to_local(grad_placements=[wanted])
        y = style.run(x, layers.local(self.weight),
                      None if self.bias is None else layers.local(self.bias, style.sums_bias()), name, world)
        return y if style.use_local_output else DTensor.from_local(y, mesh, [style.of_output(y.dim())], run_check=False)


class _Style(ParallelStyle):
    split: int
    sequence_dim: int | None
    use_local_output: bool

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
        module.__class__ = (_Split if type(module) is nn.Linear
                            else type(type(module).__name__, (_Split, type(module)), {}))
        return module


class ColwiseParallel(_Style):
    """A rank has out / W rows of the weight [out, in], and of the bias. y is this rank's columns, [..., out / W].

    sequence_dim: x is this rank's part of the sequence along it, and y has the whole sequence (all_gather_matmul).
    None: x is the same on all ranks (replicated_matmul). keep_gathered: see perseus.nn.ColumnParallelLinear.
    use_local_output: False: y is a DTensor, Shard on its last dimension.
    """
    split = 0

    def __init__(self, *, sequence_dim: int | None = None, keep_gathered: bool = True,
                 use_local_output: bool = True) -> None:
        super().__init__()
        self.sequence_dim, self.keep_gathered, self.use_local_output = sequence_dim, keep_gathered, use_local_output

    def run(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, name: str,
            world: int) -> torch.Tensor:
        return layers.column_linear(x, weight, bias, name, world, self.sequence_dim, self.keep_gathered,
                                    "perseus.parallel.ColwiseParallel")

    def sums_bias(self) -> bool:
        return False

    def of_input(self, dims: int) -> Placement:
        return Replicate() if self.sequence_dim is None else Shard(self.sequence_dim)

    def of_output(self, dims: int) -> Placement:
        return Shard(dims - 1)


class RowwiseParallel(_Style):
    """A rank has in / W columns of the weight [out, in], and the whole bias. x is this rank's columns, [..., in / W].

    sequence_dim: y is this rank's part of the sequence along it, which W divides (matmul_reduce_scatter). None: y is
    the same on all ranks (matmul_all_reduce). use_local_output: False: y is a DTensor, Shard on sequence_dim, or
    Replicate. With sequence_dim the gradient of the bias is a part (Partial): call
    perseus.nn.sum_replicated_gradients(model).
    """
    split = 1

    def __init__(self, *, sequence_dim: int | None = None, use_local_output: bool = True) -> None:
        super().__init__()
        self.sequence_dim, self.use_local_output = sequence_dim, use_local_output

    def run(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, name: str,
            world: int) -> torch.Tensor:
        return layers.row_linear(x, weight, bias, name, world, self.sequence_dim, "perseus.parallel.RowwiseParallel")

    def sums_bias(self) -> bool:
        return self.sequence_dim is not None

    def of_input(self, dims: int) -> Placement:
        return Shard(dims - 1)

    def of_output(self, dims: int) -> Placement:
        return Replicate() if self.sequence_dim is None else Shard(self.sequence_dim)


__all__ = ["ColwiseParallel", "RowwiseParallel"]
