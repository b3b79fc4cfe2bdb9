# SPDX-License-Identifier: Apache-2.0
"""FlashInfer (0.7.2.post1): the MoE layer as a mega kernel of flashinfer.moe_ep. Importing this module registers it:

    import perseus.integrations.flashinfer as ours
    layer = MoEEpMegaLayer(bootstrap, fleet, MoEWeightPack(w13, w2), MegaConfig(ours.MegaMoeConfig(768, top_k=8)))
    layer.warmup()  # all ranks, before a CUDA graph is captured
    y = layer(MoEEpTensors(x, topk_ids, topk_weights))
"""
from __future__ import annotations

import dataclasses
from typing import Any

import torch

try:
    from flashinfer.moe_ep.core.kernel.base import MegaKernelBackend
    from flashinfer.moe_ep.core.kernel.registry import register_mega_kernel
    from flashinfer.moe_ep.core.validation.common import MoEEpArchError, MoEEpConfigError
    from flashinfer.moe_ep.weights import PrequantizedMoEWeights
except ImportError as e:
    raise ImportError(f"perseus.integrations.flashinfer needs flashinfer-python 0.7.2.post1: {e}") from e

from .._library import library
from ..moe import ACTIVATIONS
from ._serving import Layer, cannot

NAME = "sm90_bf16_perseus"


@dataclasses.dataclass
class MegaMoeConfig:
    """tokens: sizes of batches that get a plan of their own, besides max_tokens_per_rank, for calls that name their
    size (compile_tokens_per_rank=). Else the largest serves. A workspace of create_workspace() has plans of its own."""
    intermediate_size: int
    top_k: int
    activation: str = "silu"
    tokens: tuple[int, ...] = ()
    kernel_name: str = NAME


@dataclasses.dataclass
class _Workspace:
    layer: Layer
    inputs: Any = None
    most: int | None = None  # tokens of any rank in the call

    def destroy(self) -> None:
        """The memory is the group's, whose other plans share it."""


@register_mega_kernel(NAME)
class PerseusMegaKernel(MegaKernelBackend):
    """Weights are bfloat16, or float8_e4m3fn with fp32 scales of blocks of 128 x 128, as checkpoints have them."""
    _weights: Any = None

    @classmethod
    def kernel_name(cls) -> str:
        return NAME

    def validate_init(self, bootstrap: Any, fleet_params: Any) -> None:
        config = self._config
        if not library().emulated and torch.cuda.get_device_capability()[0] != 9:
            raise MoEEpArchError(f"{NAME}: the kernels need a Hopper GPU (sm_90)")
        reason = cannot(hidden=fleet_params.token_hidden_size, inner=config.intermediate_size,
                        experts=fleet_params.num_experts, world=bootstrap.world_size, gated=True, scaled=False)
        if config.activation not in ACTIVATIONS:
            reason = f"activation {config.activation!r} is none of {', '.join(ACTIVATIONS)}"
        if reason:
            raise MoEEpConfigError(f"{NAME}: {reason}")

    def preprocess_weights(self, weights: Any, fleet_params: Any) -> Any:
        inner, hidden = self._config.intermediate_size, fleet_params.token_hidden_size
        scaled = isinstance(weights, PrequantizedMoEWeights)
        dtype = torch.float8_e4m3fn if scaled else torch.bfloat16
        local = fleet_params.num_experts // self.ep_world_size
        wanted = [("w13", dtype, (local, 2 * inner, hidden)), ("w2", dtype, (local, hidden, inner))]
        if scaled:
            wanted += [(f"{name}_scale", torch.float32, (shape[0], shape[1] // 128, shape[2] // 128))
                       for name, _, shape in wanted]
        for name, kind, shape in wanted:
            t = getattr(weights, name)
            if t.dtype is not kind or tuple(t.shape) != shape:
                raise MoEEpConfigError(f"{NAME}: {name} is {t.dtype} {tuple(t.shape)}; it must be {kind} {shape}")
        self._weights = tuple(getattr(weights, name).contiguous() for name, _, _ in wanted)
        return self._weights

    def validate_transformed_weights(self, transformed_weights: Any, bootstrap: Any, fleet_params: Any) -> None:
        self._weights = transformed_weights

    def _allocate_workspace(self, fleet_params: Any) -> _Workspace:
        config, most = self._config, fleet_params.max_tokens_per_rank
        return _Workspace(Layer(self.ep_comm_group, max_tokens=most, top_k=config.top_k,
                                wanted=config.tokens or (most,), hidden=fleet_params.token_hidden_size,
                                inner=config.intermediate_size, experts=fleet_params.num_experts,
                                activation=config.activation, dtype=self._weights[0].dtype))

    def set_compile_tokens_per_rank(self, workspace: _Workspace, compile_tokens_per_rank: int | None) -> None:
        workspace.most = compile_tokens_per_rank

    def stage_inputs(self, t: Any, workspace: _Workspace, *, quantize_input: bool) -> None:
        if t.hidden_states.dtype is not torch.bfloat16:
            raise MoEEpConfigError(f"{NAME}: hidden_states are {t.hidden_states.dtype}; they must be torch.bfloat16, "
                                   "which the launch quantises where the weights are e4m3")
        workspace.inputs = t

    def compute(self, workspace: _Workspace, transformed_weights: Any, *, output: Any) -> torch.Tensor:
        t, layer = workspace.inputs, workspace.layer
        workspace.inputs = None
        most = layer.plans[-1].sizes[0] if workspace.most is None else workspace.most
        gate_up, down, *scales = transformed_weights
        y = layer(t.hidden_states, t.topk_ids, t.topk_weights, gate_up, down, most, tuple(scales) or None)
        return y if output is None else output.copy_(y)


__all__ = ["NAME", "MegaMoeConfig", "PerseusMegaKernel"]
