# SPDX-License-Identifier: Apache-2.0
"""Megatron-core (0.16.1): its tensor- and sequence-parallel layers with the products of this package, and its layers of
experts as perseus.moe_layer().

    spec = perseus.integrations.megatron.fused(get_gpt_layer_local_spec())
    model = GPTModel(config, spec, ...)

or, of Megatron's own programs, `--spec perseus.integrations.megatron layer_spec`, or PerseusSpecProvider() where a back
end is asked for.

The layers are subclasses of Megatron's, with another forward(). So arguments, initialization by its RNG tracker, marks
on parameters (tensor_model_parallel, allreduce, sequence_parallel), main_grad of its DistributedDataParallel and
sharded_state_dict() are Megatron's. What the products do not cover runs as in Megatron: experts (is_expert), LoRA's
disable_grad_reduce, deferred embedding gradients, offloading to the CPU, and a group of one rank.

Layers of experts keep Megatron's router, experts and shared experts; what its dispatcher, experts and combine do is one
launch. Experts that are no two plain bf16 products (biases, fp8, other activations, latent projections), expert tensor
parallelism, padding to a capacity and overlaps of shared experts or micro-batches run as in Megatron.
"""
from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

try:
    from megatron.core.models import backends
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import layers as theirs
    from megatron.core.transformer.moe import moe_layer as of_experts
    from megatron.core.transformer.spec_utils import ModuleSpec
except ImportError as e:
    raise ImportError(f"perseus.integrations.megatron needs megatron-core 0.16.1: {e}") from e

from .. import nn as layers
from .._registry import find, name_of
from ..moe import moe_layer, moe_plan


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


# ---- experts ----

_ACTIVATIONS = {F.silu: "silu", F.relu: "relu", F.gelu: "gelu"}
_options: dict[str, Any] = {"max_tokens": 0, "capacity": 0, "recompute": True}


def experts(*, max_tokens: int = 0, capacity: int = 0, recompute: bool = True) -> None:
    """What layers of experts keep memory for. max_tokens: the most tokens of a rank in one layer; 0: as many as the
    call has, which are then the same on all ranks, up to the next power of two. capacity: as of perseus.moe_plan(); 0:
    nothing is ever dropped. recompute: as of perseus.moe_layer(): only the inputs of experts stay until the backward
    pass.

    Example::

        perseus.integrations.megatron.experts(recompute=False)
    """
    _options.update(max_tokens=max_tokens, capacity=capacity, recompute=recompute)


class _Together(torch.autograd.Function):
    """Weights that lie one after another, as one tensor without a copy."""

    @staticmethod
    def forward(ctx: Any, *weights: torch.Tensor) -> torch.Tensor:
        first = weights[0]
        return first.as_strided((len(weights), *first.shape), (first.numel(), *first.stride()))

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple:
        return g.unbind(0)


def _in_turn(weights: tuple[torch.Tensor, ...]) -> bool:
    """Whether each begins where the one before ends, in the memory of the first."""
    memory, begin, size = weights[0].untyped_storage(), weights[0].data_ptr(), weights[0].nbytes
    return (all(w.data_ptr() == begin + i * size for i, w in enumerate(weights))
            and begin + len(weights) * size <= memory.data_ptr() + memory.nbytes())


def _together(weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Experts' weights as one [E / W, out, in]. The first time those that own their memory move into one, so that no
    pass copies them. Those that do not (the distributed optimizer has a buffer of its own) are copied in every pass."""
    if not _in_turn(weights):
        if not all(w.is_contiguous() and w.untyped_storage().nbytes() == w.nbytes for w in weights):
            return torch.stack(weights)
        with torch.no_grad():
            for w, part in zip(weights, torch.stack(weights)):
                w.data = part
    return _Together.apply(*weights)


def _weights(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """gate_up and down of Megatron's experts, and whether they are laid out as nn.Linear's."""
    kind = type(module).__name__
    if kind == "GroupedMLP":
        count, hidden = module.num_local_experts, module.config.hidden_size
        return module.weight1.view(count, hidden, -1), module.weight2.view(count, -1, hidden), False
    if kind == "SequentialMLP":
        pairs = [(e.linear_fc1.weight, e.linear_fc2.weight) for e in module.local_experts]
    else:  # TEGroupedMLP
        pairs = [tuple(getattr(layer, f"weight{i}") for layer in (module.linear_fc1, module.linear_fc2))
                 for i in range(module.num_local_experts)]
    first, second = zip(*pairs)
    return _together(first), _together(second), True


class MoELayer(of_experts.MoELayer):
    """Megatron's layer, whose dispatcher, experts and combine are perseus.moe_layer()."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        config = self.config
        self.perseus_ours = (
            self.ep_group.size() > 1 and self.token_dispatcher.tp_size == 1 and config.bf16
            and config.activation_func in _ACTIVATIONS
            and type(self.experts).__name__ in ("GroupedMLP", "SequentialMLP", "TEGroupedMLP")
            and not (config.add_bias_linear or config.fp8 or config.fp4 or config.moe_latent_size
                     or config.moe_apply_probs_on_input or config.moe_pad_expert_input_to_capacity
                     or config.activation_func_clamp_value is not None or config.glu_linear_offset
                     or self.shared_expert_overlap or config.overlap_moe_expert_parallel_comm))
        if self.perseus_ours:
            find(self.ep_group)

    def preprocess(self, hidden_states: torch.Tensor, probs: torch.Tensor,
                   routing_map: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.perseus_ours:
            return super().preprocess(hidden_states, probs, routing_map)
        self.perseus_shape = hidden_states.shape
        taken, chosen = routing_map.to(torch.int8).topk(self.config.moe_router_topk, -1, sorted=False)
        self.perseus_chosen = chosen.masked_fill(taken == 0, -1)  # tokens that the router has dropped
        return hidden_states.reshape(-1, hidden_states.shape[-1]), probs.gather(1, chosen)

    def dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (hidden_states, probs) if self.perseus_ours else super().dispatch(hidden_states, probs)

    def routed_experts_compute(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        if not self.perseus_ours:
            return super().routed_experts_compute(hidden_states, probs)
        chosen, gated = self.__dict__.pop("perseus_chosen"), self.config.gated_linear_unit
        first, second, linear = _weights(self.experts)
        most = _options["max_tokens"] or 1 << max(hidden_states.shape[0] - 1, 0).bit_length()
        plan = moe_plan(max_tokens=most, hidden=hidden_states.shape[1], experts=self.config.num_moe_experts,
                        top_k=chosen.shape[1], inner=second.shape[2 if linear else 1], gated=gated,
                        activation=_ACTIVATIONS[self.config.activation_func], linear_layout=linear,
                        capacity=_options["capacity"], group=self.ep_group)
        y, _ = moe_layer(hidden_states.contiguous(), chosen, probs.float().contiguous(), first.contiguous(),
                         second.contiguous(), plan, recompute=_options["recompute"])
        return y, None

    def combine(self, output: torch.Tensor) -> torch.Tensor:
        return output if self.perseus_ours else super().combine(output)

    def postprocess(self, output: torch.Tensor, shared_expert_output: torch.Tensor | None) -> torch.Tensor:
        if not self.perseus_ours:
            return super().postprocess(output, shared_expert_output)
        output = output.view(self.perseus_shape)
        return output if shared_expert_output is None else output + shared_expert_output


# ---- specs ----

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


_EXCHANGED = {theirs.ColumnParallelLinear: ColumnParallelLinear, theirs.RowParallelLinear: RowParallelLinear,
              of_experts.MoELayer: MoELayer}
_BY_NAME = {"TEColumnParallelLinear": ColumnParallelLinear, "TERowParallelLinear": RowParallelLinear}


def fused(spec: Any) -> Any:
    """A copy of a ModuleSpec, or of submodules, with our linear layers in the place of Megatron's and those of its
    TransformerEngine extension, and our layer of experts. Raises TypeError for a norm that is fused with its linear
    layer: make the spec from PerseusSpecProvider(), or take get_gpt_layer_local_spec().

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


__all__ = ["ColumnParallelLinear", "MoELayer", "PerseusSpecProvider", "RowParallelLinear", "experts", "fused"]
