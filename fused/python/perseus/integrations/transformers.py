# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers (5.24): tensor and expert parallelism of its models by the ops of this package.

    perseus.integrations.transformers.enable()   # before from_pretrained()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16,
                                                 distributed_config=DistributedConfig(tp_size=4))

enable() puts styles of ours into the place of transformers' own "colwise" and "rowwise" ones, so the plans of its
models stay as they are, and registers the expert parallelism "perseus" (DistributedConfig(ep_implementation=)).
Parameters, checkpoints and generation are transformers' own. It has no sequence parallelism: activations between the
products are the same on all ranks.
"""
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

try:
    from transformers.distributed import tensor_parallel as theirs
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
    from transformers.integrations.moe import _default_apply_gate
except ImportError as e:
    raise ImportError("perseus.integrations.transformers needs transformers 5.24, where styles and implementations of "
                      f"expert parallelism are registered by name: {e}") from e

from .. import parallel
from ..moe import BLOCK, MoePlan, moe_combine, moe_dispatch, moe_layer, moe_plan

# ---- tensor parallelism ----


class _Multiplied:
    """A style of transformers whose nn.Linear is multiplied by an op of ours. ours: the style of perseus.parallel;
    usual: its layouts of input and output."""
    ours: type
    usual: tuple

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        reason = self._refused(module, mesh)
        if reason:
            theirs.logger.warning_once(f"perseus: {type(module).__name__} keeps transformers' own "
                                       f"{type(self).__name__}, because {reason}")
            return super().install_forward(module, mesh)
        usual = self.use_local_output and (self.input_layouts, self.output_layouts) == self.usual
        self.ours(use_local_output=usual)._apply(module, mesh)
        if not usual:
            self._convert(module, mesh)
        return module

    def _refused(self, module: nn.Module, mesh: DeviceMesh) -> str:
        if type(module) is not nn.Linear or getattr(module, "_hf_quantized_needs_local_tp", False):
            return "it is no plain nn.Linear"
        size = module.weight.shape[self.ours.split]
        return f"{mesh.size()} ranks do not divide dimension {self.ours.split} of its weight, {size}" * (
            size % mesh.size() != 0)

    def _convert(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Changes what comes in and goes out to the layouts of this style."""
        multiply = module.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, mesh, [self.input_layouts], run_check=False)
            y = multiply(x).redistribute(mesh, [self.output_layouts])
            return y.to_local() if self.use_local_output else y
        module.forward = forward


class ColwiseParallel(_Multiplied, theirs.ColwiseParallel):
    ours, usual = parallel.ColwiseParallel, (Replicate(), Shard(-1))


class RowwiseParallel(_Multiplied, theirs.RowwiseParallel):
    ours, usual = parallel.RowwiseParallel, (Shard(-1), Replicate())


# ---- expert parallelism ----

_ACTIVATIONS = {"SiLUActivation": "silu", "SiLU": "silu", "ReLU": "relu", "GELUTanh": "gelu_tanh"}
_options: dict[str, Any] = {"max_tokens": 0, "recompute": True}


class PerseusEP(EPImplementation):
    """Tokens reach their experts by the kernels of perseus.moe. Experts that are two plain products run in one launch,
    moe_layer(); others run their own forward() between moe_dispatch() and moe_combine()."""

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts = (experts,)  # no submodule of what holds this
        plain = (getattr(type(experts), "_apply_gate", None) is _default_apply_gate and experts.is_concatenated
                 and not experts.has_bias and not experts.has_post_expert_norm)
        self.activation = _ACTIVATIONS.get(type(getattr(experts, "act_fn", None)).__name__) if plain else None

    def __call__(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
                 top_k_weights: torch.Tensor) -> torch.Tensor:
        count, split = hidden_states.shape[0], self.tp_mesh.size() > 1
        if split:  # its ranks have the same tokens
            hidden_states, top_k_index, top_k_weights = (
                DTensor.from_local(t, self.tp_mesh, [Replicate()], run_check=False).redistribute(
                    self.tp_mesh, [Shard(0)]).to_local() for t in (hidden_states, top_k_index, top_k_weights))
        # the first rank of tp_mesh has the most tokens
        most = _options["max_tokens"] or max(-(-count // self.tp_mesh.size()), 1)
        y = self._run(hidden_states.contiguous(), top_k_index.contiguous(), top_k_weights.float().contiguous(),
                      1 << (most - 1).bit_length())
        if not split:
            return y
        return DTensor.from_local(y, self.tp_mesh, [Shard(0)], shape=(count, y.shape[1]),
                                  stride=(y.shape[1], 1)).full_tensor()

    def _run(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, max_tokens: int) -> torch.Tensor:
        experts, = self.experts
        sizes = {"max_tokens": max_tokens, "hidden": x.shape[1], "top_k": chosen.shape[1], "group": self.ep_mesh,
                 "experts": self.num_local_experts * self.ep_mesh.size()}
        if self.activation is None:
            return self._by_parts(x, chosen, weights, moe_plan(**sizes))
        first = experts.gate_up_proj if experts.has_gate else experts.up_proj
        down = experts.down_proj
        plan = moe_plan(**sizes, inner=down.shape[1 if experts.is_transposed else 2], activation=self.activation,
                        gated=experts.has_gate, linear_layout=not experts.is_transposed)
        return moe_layer(x, chosen, weights, first, down, plan, recompute=_options["recompute"])[0]

    def _by_parts(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, plan: MoePlan) -> torch.Tensor:
        d = moe_dispatch(x, chosen, weights, plan)
        blocks = d.ends.diff(prepend=d.ends.new_zeros(1)) // BLOCK
        used = int(d.ends[-1])  # the host waits here
        expert = torch.arange(len(blocks), device=x.device).repeat_interleave(blocks * BLOCK, output_size=used)
        rows = d.rows[:used]
        if used == 0:  # a row of zeros, whose result is left out: the backward pass has the calls of the other ranks
            rows, expert = rows.sum(0, keepdim=True), expert.new_zeros(1)
        y = self.experts_forward(rows, expert[:, None], rows.new_ones(len(rows), 1))[:used]
        return moe_combine(F.pad(y, (0, 0, 0, len(d.rows) - len(y))), d)


def enable(*, max_tokens: int = 0, recompute: bool = True) -> None:
    """Makes models that are loaded after this call multiply by the ops of this package, in every DistributedConfig with
    tp_size > 1. For experts give it ep_implementation="perseus" too.

    max_tokens: of experts, the most of a rank in one call; 0: the ranks' own number, which must then be the same, up to
    the next power of two. recompute: as of perseus.moe_layer(): only the inputs of experts stay until the backward
    pass.

    Example::

        perseus.integrations.transformers.enable()
    """
    _options.update(max_tokens=max_tokens, recompute=recompute)
    for name, style in list(theirs.ALL_PARALLEL_STYLES.items()):
        if type(style) in (theirs.ColwiseParallel, theirs.RowwiseParallel):
            kind = ColwiseParallel if type(style) is theirs.ColwiseParallel else RowwiseParallel
            theirs.ALL_PARALLEL_STYLES.register(name, kind(input_layouts=style.input_layouts,
                                                           output_layouts=style.output_layouts,
                                                           use_local_output=style.use_local_output))
    EPImplementationInterface.register("perseus", PerseusEP)


__all__ = ["ColwiseParallel", "PerseusEP", "RowwiseParallel", "enable"]
