# SPDX-License-Identifier: Apache-2.0
"""SGLang's MoE layer whose forward pass is one call of ours. sglang.py says where models get it from."""
from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.dp_attention import get_dp_global_num_tokens
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher
from sglang.srt.layers.moe.topk import TopKOutputChecker
from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.runtime_context import get_exec, get_lora, get_parallel, get_schedule
from sglang.srt.utils.common import print_info_once

from ._serving import Layer, cannot

_ACTIVATIONS = {name: name for name in ("silu", "gelu", "gelu_tanh")}


class NoDispatcher(BaseDispatcher):
    """The layer sends its tokens itself."""

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> Any:
        raise NotImplementedError("perseus.integrations.sglang: a MoE layer has no dispatch of its own here, so "
                                  "batches cannot overlap")

    def combine(self, combine_input: Any) -> Any:
        return self.dispatch(combine_input, None)


def _most_of_a_batch() -> int:
    chunk = get_schedule().chunked_prefill_size
    if chunk is None or chunk <= 0:
        raise ValueError(f"perseus.integrations.sglang: --chunked-prefill-size is {chunk}; it must be the most tokens "
                         "of a batch, since plans are opened for so many")
    return -(-chunk // get_parallel().attn_tp_size)


def _most() -> int | None:
    """The most tokens of a rank in this step; None: not known. All ranks get the same."""
    counts = get_dp_global_num_tokens()
    return -(-max(counts) // get_parallel().attn_tp_size) if counts else None


class PerseusMoE(FusedMoE):
    """Opens its plans when the model is built: all ranks build the same layers in the same order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        reason = self._refused()
        if reason:
            raise ValueError(f"perseus.integrations.sglang: --moe-runner-backend perseus cannot run the MoE layer "
                             f"{self.layer_name}: {reason}")
        group, config = get_parallel().moe_ep_group.device_group, self.moe_runner_config
        shape = {"max_tokens": _most_of_a_batch(), "top_k": self.top_k, "hidden": self.hidden_size,
                 "inner": self.intermediate_size_per_partition, "experts": self.num_experts,
                 "activation": _ACTIVATIONS[config.activation], "gated": config.is_gated,
                 "dtype": self.w13_weight.dtype}
        self.perseus = Layer(group, **shape)
        print_info_once(f"Perseus runs MoE layers: {self.perseus.group}, plans for "
                        f"{', '.join(str(plan.sizes[0]) for plan in self.perseus.plans)} tokens")

    def _refused(self) -> str:
        """What of a layer the kernels, or this adaptor, do not do."""
        config, method, moe = self.moe_runner_config, self.quant_method, get_exec().moe
        scaled = type(method) is Fp8MoEMethod
        blocks = scaled and method.quant_config.is_checkpoint_fp8_serialized and not method.use_mxfp8 and list(
            method.weight_block_size or ()) == [128, 128] and not method.is_fp4_expert
        return next((text for text, holds in (
            (f"its weights are of {type(method).__name__}; they must be torch.bfloat16, or e4m3 with scales of blocks "
             "of 128 x 128", not (blocks or type(method) is UnquantizedFusedMoEMethod)),
            (f"activations of {self.params_dtype}: they must be torch.bfloat16",
             self.params_dtype is not torch.bfloat16),
            (f"activation {config.activation!r}", config.activation not in _ACTIVATIONS),
            ("biases of experts", self.with_bias),
            ("limits, alpha or beta of SwiGLU",
             (config.swiglu_limit, config.gemm1_alpha, config.gemm1_clamp_limit) != (None,) * 3),
            ("router weights on inputs", config.apply_router_weight_on_input),
            ("shared experts fused with the others", self.num_fused_shared_experts),
            ("--enable-eplb, --ep-num-redundant-experts or --init-expert-location: experts must lie linearly",
             moe.enable_eplb or moe.ep_num_redundant_experts or moe.init_expert_location != "trivial"),
            ("LoRA", get_lora().enable_lora),
            ("--enable-two-batch-overlap or --enable-single-batch-overlap",
             get_exec().overlap.enable_two_batch_overlap or get_exec().overlap.enable_single_batch_overlap),
            (f"--ep-size {self.moe_ep_size}: expert parallelism must be over all ranks, and over more than one",
             self.moe_tp_size != 1 or self.moe_ep_size < 2),
            ("an all-reduce after the layer", self.reduce_results)) if holds), "") or cannot(
                hidden=self.hidden_size, inner=self.intermediate_size_per_partition, experts=self.num_experts,
                world=self.moe_ep_size, gated=config.is_gated, scaled=scaled)

    def forward_impl(self, hidden_states: torch.Tensor, topk_output: Any, pre_quant_input: Any = None) -> torch.Tensor:
        if not TopKOutputChecker.format_is_standard(topk_output):
            raise ValueError(f"perseus.integrations.sglang: the choices of the router are {topk_output.format}; they "
                             "must be of the standard format")
        layer, most = self.perseus, _most()
        scales = (self.w13_weight_scale_inv, self.w2_weight_scale_inv) if layer.scaled else None
        return layer(hidden_states, topk_output.topk_ids, topk_output.topk_weights, self.w13_weight, self.w2_weight,
                     layer.plans[-1].sizes[0] if most is None else most, scales)


__all__ = ["NoDispatcher", "PerseusMoE"]
