# SPDX-License-Identifier: Apache-2.0
"""vLLM (0.32.0): MoE layers with expert parallelism as one call, dispatch and combine included; and, by vllm_norm.py,
sums over tensor-parallel ranks with their norms. With --enable-sleep-mode memory of plans goes too (vllm_sleep.py).

    vllm serve Qwen/Qwen3-30B-A3B --data-parallel-size 4 --enable-expert-parallel \\
        --additional-config '{"perseus": true}'

vLLM loads register() by the entry point vllm.general_plugins, in each of its processes; nothing else changes until the
option asks for it. Then a layer that the kernels cannot take is an error that says why. It uses vLLM's own hooks: an
out-of-tree UnquantizedFusedMoEMethod, and a quantization config "fp8" that is vLLM's with another method for MoE.
"""
from __future__ import annotations

from typing import Any

import torch

try:
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.config import get_current_vllm_config
    from vllm.distributed import get_ep_group
    from vllm.distributed.parallel_state import in_the_same_node_as
    from vllm.forward_context import get_forward_context, is_forward_context_available
    from vllm.logger import init_logger
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.prepare_finalize.passthrough import PassThroughPrepareAndFinalize
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym, kFp8Static128BlockSym
    from vllm.platforms import current_platform
except ImportError as e:
    raise ImportError(f"perseus.integrations.vllm needs vLLM 0.32.0: {e}") from e

from .._group import Group
from .._library import library
from .._registry import init
from . import vllm_sleep
from ._serving import Layer, cannot

_logger = init_logger(f"vllm.{__name__}")  # below vLLM's, so that its settings hold
_ACTIVATIONS = {MoEActivation.SILU: "silu", MoEActivation.GELU: "gelu", MoEActivation.GELU_TANH: "gelu_tanh",
                MoEActivation.SILU_NO_MUL: "silu", MoEActivation.GELU_NO_MUL: "gelu",
                MoEActivation.GELU_TANH_NO_MUL: "gelu_tanh"}
_SCHEMES = ((None, None), (kFp8Static128BlockSym, kFp8Dynamic128Sym))
_PASS_MANAGER = "vllm.compilation.passes.pass_manager.PostGradPassManager"
_OPTIONS = {"moe": bool, "tokens": list, "norm": (bool, int), "leave_out": bool}


def options_of(config: Any) -> dict[str, Any] | None:
    """What --additional-config says of us; None: nothing. moe: whether MoE layers are ours, by default they are.
    tokens: sizes of batches for which they have plans. norm: whether sums with norms are ours, or up to how many
    tokens. leave_out: whether layers go on without a rank that was lost."""
    given = config.additional_config
    asked = given.get("perseus", False) if isinstance(given, dict) else False
    if asked is False or asked is None:
        return None
    options = {} if asked is True else asked
    if not isinstance(options, dict) or not all(isinstance(options[k], _OPTIONS.get(k, ())) for k in options):
        raise ValueError(f"--additional-config: perseus is {asked!r}; it must be true, false, or an object with some "
                         "of moe, leave_out (true or false), tokens (a list of numbers) and norm (true, false or a "
                         "number)")
    return options


def wanted() -> dict[str, Any] | None:
    """The options, where MoE layers are ours."""
    options = options_of(get_current_vllm_config())
    return None if options is None or not options.get("moe", True) else options


def _replicated(moe: Any) -> bool:
    """Whether all ranks of a layer get the same tokens: tensor parallelism without data parallelism."""
    return moe.dp_size == 1 and not moe.is_sequence_parallel


def _most(moe: Any, count: int) -> int | None:
    """The most tokens of a rank in this step; None: not known, as outside of a forward pass."""
    if _replicated(moe):
        return count
    metadata = get_forward_context().dp_metadata if is_forward_context_available() else None
    if metadata is None:
        return None
    return -(-int(metadata.num_tokens_across_dp_cpu.max()) // moe.sp_size)


def answer_for(manager: Any, group: Group) -> None:
    """From now on layers go on without ranks that are lost (Group.leave_out()), and vLLM's questions after faults,
    which it asks its manager of all-to-all, get our answers."""
    mask = torch.zeros(group.world, dtype=torch.int32, device=group.device)
    seen = mask.clone()

    def query_active_mask() -> torch.Tensor:
        for rank in group.absent:
            mask[rank] = 1
        return mask

    def clean_buffers() -> None:  # vLLM has dealt with the fault; our buffers are clean
        seen.copy_(query_active_mask())
    group.leaves_out = manager.support_fault_tolerance = True
    manager.query_active_mask, manager.clean_buffers = query_active_mask, clean_buffers
    manager.query_fault = lambda: (query_active_mask() != seen).any()


class PrepareAndFinalize(PassThroughPrepareAndFinalize):
    """vLLM's, which does nothing. replicated: results of the experts are parts, which vLLM's all-reduce adds up."""

    def __init__(self, replicated: bool) -> None:
        super().__init__()
        self.replicated = replicated

    def output_is_reduced(self) -> bool:
        return not self.replicated

    def topk_indices_dtype(self) -> torch.dtype:
        return torch.int64


class PerseusExperts(mk.FusedMoEExpertsModular):
    """The whole layer. Tokens go to their experts' ranks and come back within apply()."""

    def __init__(self, moe_config: Any, quant_config: Any, tokens: Any = (), leave_out: bool = False,
                 sleeps: bool = False) -> None:
        super().__init__(moe_config, quant_config)
        self.tokens, self.leave_out, self.sleeps, self.layer = tokens, leave_out, sleeps, None

    @staticmethod
    def is_supported_config(cls: type, moe_config: Any, weight_key: Any, activation_key: Any,
                            activation_format: Any) -> tuple[bool, str | None]:
        supported, reason = mk.FusedMoEExperts.is_supported_config(cls, moe_config, weight_key, activation_key,
                                                                   activation_format)
        if supported:
            reason = _refused(moe_config, weight_key is not None) or None
        return not reason, reason

    @staticmethod
    def activation_format() -> Any:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return library().emulated or current_platform.is_device_capability(90)

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) in _SCHEMES

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation in _ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return moe_parallel_config.use_ep and not moe_parallel_config.use_batched_activation_format

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(self, M: int, N: int, K: int, *unused: Any) -> tuple:
        return (0,), (0,), (M, K)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Opens the plans. All ranks load the same layers in the same order."""
        if self.layer is not None:  # vLLM's method for bf16 calls this too
            return
        moe = self.moe_config
        if layer.expert_map_manager.placement_strategy != "linear" or layer.apply_router_weight_on_input:
            raise ValueError("perseus.integrations.vllm: experts must be placed linearly "
                             f"(they are {layer.expert_map_manager.placement_strategy}), and router weights must be "
                             "for their results, not inputs")
        ranks = moe.ep_size if _replicated(moe) else moe.sp_size  # that have a part of the tokens of a batch
        self.layer = Layer(self.open_group(), max_tokens=-(-moe.max_num_tokens // ranks),
                           top_k=moe.experts_per_token, wanted=self.tokens, hidden=moe.hidden_dim,
                           inner=moe.intermediate_size_per_partition, experts=moe.num_experts,
                           activation=_ACTIVATIONS[moe.activation], gated=moe.activation.is_gated,
                           dtype=layer.w13_weight.dtype)
        if self.leave_out and not self.layer.group.leaves_out:
            answer_for(get_ep_group().device_communicator.all2all_manager, self.layer.group)
        _logger.info_once("Perseus runs MoE layers: %s, plans for %s tokens", str(self.layer.group),
                          ", ".join(str(plan.sizes[0]) for plan in self.layer.plans))

    def open_group(self) -> Group:
        ranks = get_ep_group()
        if self.sleeps and not all(in_the_same_node_as(ranks.cpu_group)):
            _logger.warning_once("Perseus keeps the memory of its plans while vLLM sleeps: its ranks are on several "
                                 "nodes")
            self.sleeps = False
        return init(ranks.device_group, sleeps=self.sleeps)

    def apply(self, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor,
              topk_weights: torch.Tensor, topk_ids: torch.Tensor, *unused: Any, **ignored: Any) -> None:
        if self.layer is None:
            raise RuntimeError("perseus.integrations.vllm: a MoE layer runs whose weights were not processed")
        scales = (self.w1_scale, self.w2_scale) if self.layer.scaled else None
        operands = hidden_states, topk_ids, topk_weights, w1, w2
        if _replicated(self.moe_config):
            self.layer.of_replicated(output, *operands, scales)
            return
        most = _most(self.moe_config, hidden_states.shape[0])
        output.copy_(self.layer(*operands, self.layer.plans[-1].sizes[0] if most is None else most, scales))


def _refused(moe: Any, scaled: bool) -> str:
    """What of a layer the kernels, or this adaptor, do not do."""
    parallel = get_current_vllm_config().parallel_config
    return next((text for text, holds in (
        (f"activations of {moe.in_dtype}: they must be torch.bfloat16", moe.in_dtype is not torch.bfloat16),
        ("biases of experts", moe.has_bias),
        ("limits, alpha or beta of SwiGLU", (moe.swiglu_limit, moe.swiglu_alpha, moe.swiglu_beta) != (None,) * 3),
        ("--enable-eplb", moe.moe_parallel_config.enable_eplb),
        ("prefill context parallelism", moe.pcp_size > 1),
        ("--enable-dbo: both micro-batches would use the memory of one group", parallel.enable_dbo),
        ("an all-reduce that the model leaves out", moe.skip_final_all_reduce and not _replicated(moe))) if holds),
        "") or cannot(hidden=moe.hidden_dim, inner=moe.intermediate_size_per_partition, experts=moe.num_experts,
                      world=moe.ep_size, gated=moe.activation.is_gated, scaled=scaled)


class _Method:
    """What both methods have in common: vLLM's own, but for the kernel. options: None where it stays vLLM's own."""
    options: dict[str, Any] | None = None
    sleeps = False

    def choose(self, weight_key: Any, activation_key: Any) -> bool:
        self.options = wanted()
        if self.options is None:
            return False
        supported, reason = PerseusExperts.is_supported_config(PerseusExperts, self.moe, weight_key, activation_key,
                                                               mk.FusedMoEActivationFormat.Standard)
        if not self.moe.moe_parallel_config.use_ep:
            supported, reason = False, "--enable-expert-parallel is not given, or there is one GPU"
        if not supported:
            raise ValueError("perseus.integrations.vllm: --additional-config asks for Perseus, which cannot run this "
                             f"MoE layer: {reason}")
        self.experts_cls = PerseusExperts
        self.sleeps = vllm_sleep.choose(get_current_vllm_config())
        return True

    def _init_moe_kernel(self, layer: torch.nn.Module) -> None:
        if self.options is None:
            super()._init_moe_kernel(layer)
            return
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        self.moe_kernel = mk.FusedMoEKernel(
            PrepareAndFinalize(_replicated(self.moe)),
            PerseusExperts(self.moe, self.moe_quant_config, self.options.get("tokens", ()),
                           self.options.get("leave_out", False), self.sleeps))
        self.moe_kernel.fused_experts.process_weights_after_loading(layer)


class PerseusMoEMethod(_Method, UnquantizedFusedMoEMethod):
    def __init__(self, moe: Any) -> None:
        super().__init__(moe)
        if self.choose(None, None):
            self.unquantized_backend = UnquantizedMoeBackend.TRITON  # which takes the weights as they are loaded


class PerseusFp8MoEMethod(_Method, Fp8MoEMethod):
    def __init__(self, quant_config: Any, layer: torch.nn.Module) -> None:
        super().__init__(quant_config, layer)
        blocks = self.moe_block_shape is not None and tuple(self.moe_block_shape) == (128, 128)
        if self.choose(*(_SCHEMES[1] if blocks else ("not blocks of 128 x 128", None))):
            self.fp8_backend = Fp8MoeBackend.TRITON


class PerseusFp8Config(Fp8Config):
    """vLLM's configuration of FP8, except that MoE layers run on Perseus where it was asked for."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        method = super().get_quant_method(layer, prefix)
        return method if type(method) is not Fp8MoEMethod or wanted() is None else PerseusFp8MoEMethod(self, layer)


def register() -> None:
    """The entry point. A second call changes nothing."""
    name = UnquantizedFusedMoEMethod.__name__
    known = op_registry_oot.get(name)
    if known is PerseusMoEMethod:
        return
    if known is not None:
        raise RuntimeError(f"perseus.integrations.vllm: another plugin has replaced {name} by {known.__module__}."
                           f"{known.__name__}: name one of them in VLLM_PLUGINS")
    UnquantizedFusedMoEMethod.register_oot(PerseusMoEMethod)
    register_quantization_config("fp8")(PerseusFp8Config)
    vllm_sleep.register()
    # The one thing that has no hook. vLLM imports what this names when it compiles; other platforms have their own.
    if current_platform.get_pass_manager_cls() == _PASS_MANAGER:
        ours = f"{__package__}.vllm_norm.PassManager"
        type(current_platform).get_pass_manager_cls = classmethod(lambda platform: ours)


__all__ = ["PerseusExperts", "PerseusFp8Config", "PerseusFp8MoEMethod", "PerseusMoEMethod", "register"]
