# SPDX-License-Identifier: Apache-2.0
"""Megatron-core (0.16.1): its tensor- and sequence-parallel layers with the products of this package.

    spec = perseus.integrations.megatron.fused(get_gpt_layer_local_spec())
    model = GPTModel(config, spec, ...)

or, of Megatron's own programs, `--spec perseus.integrations.megatron layer_spec`, or PerseusSpecProvider() where a back
end is asked for.

The layers are subclasses of Megatron's, with another forward(). So arguments, initialization by its RNG tracker, marks
on parameters (tensor_model_parallel, allreduce, sequence_parallel), main_grad of its DistributedDataParallel and
sharded_state_dict() are Megatron's. What the products do not cover runs as in Megatron: experts (is_expert), LoRA's
disable_grad_reduce, deferred embedding gradients, offloading to the CPU, and a group of one rank.
"""
from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch

try:
    from megatron.core.models import backends
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import layers as theirs
    from megatron.core.transformer.spec_utils import ModuleSpec
except ImportError as e:
    raise ImportError(f"perseus.integrations.megatron needs megatron-core 0.16.1: {e}") from e

from .. import nn as layers
from .._registry import find, name_of


def _ours(layer: Any) -> bool:
    """Whether the product of the layer may be ours."""
    config = layer.config
    return not (layer.is_expert or layer.tp_group.size() == 1 or getattr(layer, "disable_grad_reduce", False)
                or config.defer_embedding_wgrad_compute or config._cpu_offloading_context is not None)


class ColumnParallelLinear(theirs.ColumnParallelLinear):
    """Megatron's layer; its product is all_gather_matmul(), or replicated_matmul() without sequence parallelism."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if _ours(self):
            find(self.tp_group)

    def forward(self, input_: torch.Tensor, weight: torch.Tensor | None = None,
                runtime_gather_output: bool | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        given = self.weight if weight is None else weight
        if given is None or given.shape != (self.output_size_per_partition, self.input_size) or not _ours(self):
            return super().forward(input_, weight, runtime_gather_output)
        y = layers.column_linear(input_, given, None if self.skip_bias_add else self.bias, name_of(self.tp_group),
                                 self.tp_group.size(), 0 if self.sequence_parallel else None,
                                 layer="perseus.integrations.megatron.ColumnParallelLinear")
        if self.gather_output if runtime_gather_output is None else runtime_gather_output:
            y = theirs.gather_from_tensor_model_parallel_region(y, group=self.tp_group)
        return y, self.bias if self.skip_bias_add else None


class RowParallelLinear(theirs.RowParallelLinear):
    """Megatron's layer; its product is matmul_reduce_scatter(), or matmul_all_reduce() without sequence parallelism."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if _ours(self):
            find(self.tp_group)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not _ours(self):
            return super().forward(input_)
        x = (input_ if self.input_is_parallel
             else theirs.scatter_to_tensor_model_parallel_region(input_, group=self.tp_group))
        y = layers.row_linear(x, self.weight, None if self.skip_bias_add else self.bias, name_of(self.tp_group),
                              self.tp_group.size(), 0 if self.sequence_parallel else None,
                              "perseus.integrations.megatron.RowParallelLinear")
        return y, self.bias if self.skip_bias_add else None


class PerseusSpecProvider(backends.BackendSpecProvider):
    """Megatron's choice of modules with our linear layers. base: where all others come from; default: Megatron's local
    ones. With TESpecProvider() norms and attention are those of TransformerEngine."""

    def __init__(self, base: Any = None) -> None:
        self.base = backends.LocalSpecProvider() if base is None else base

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return False

    def column_parallel_layer_norm_linear(self) -> type | None:
        return None

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return self.base.layer_norm(rms_norm=rms_norm, for_qk=for_qk)

    def core_attention(self) -> type:
        return self.base.core_attention()

    def grouped_mlp_modules(self, *arguments: Any, **options: Any) -> tuple:
        return self.base.grouped_mlp_modules(*arguments, **options)

    def activation_func(self) -> type:
        return self.base.activation_func()


_EXCHANGED = {theirs.ColumnParallelLinear: ColumnParallelLinear, theirs.RowParallelLinear: RowParallelLinear}
_BY_NAME = {"TEColumnParallelLinear": ColumnParallelLinear, "TERowParallelLinear": RowParallelLinear}


def fused(spec: Any) -> Any:
    """A copy of a ModuleSpec, or of submodules, with our linear layers in the place of Megatron's and those of its
    TransformerEngine extension. Raises TypeError for a norm that is fused with its linear layer: make the spec from
    PerseusSpecProvider(), or take get_gpt_layer_local_spec().

    Example::

        model = GPTModel(config, perseus.integrations.megatron.fused(get_gpt_layer_local_spec()), ...)
    """
    if isinstance(spec, type):
        if spec.__name__ == "TELayerNormColumnParallelLinear":
            raise TypeError("perseus.integrations.megatron.fused: the spec has TELayerNormColumnParallelLinear, a norm "
                            "fused with its linear layer: take get_gpt_layer_local_spec(), or make the spec from "
                            "PerseusSpecProvider(TESpecProvider())")
        return _EXCHANGED.get(spec) or _BY_NAME.get(spec.__name__, spec)
    if isinstance(spec, (list, tuple)):
        return type(spec)(fused(each) for each in spec)
    if dataclasses.is_dataclass(spec):
        made = copy.copy(spec)
        for field in dataclasses.fields(spec):
            if field.name != "params":
                setattr(made, field.name, fused(getattr(spec, field.name)))
        return made
    return spec


def __getattr__(name: str) -> ModuleSpec:
    if name == "layer_spec":  # for --spec, which takes a spec and no function
        return fused(get_gpt_layer_local_spec())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["ColumnParallelLinear", "PerseusSpecProvider", "RowParallelLinear", "fused"]
