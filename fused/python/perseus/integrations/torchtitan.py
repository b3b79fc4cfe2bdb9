# SPDX-License-Identifier: Apache-2.0
"""torchtitan (0.2.2, that of torch 2.11): tensor and sequence parallelism of its Llama 3 and Qwen3, and expert
parallelism of its mixtures of experts (Qwen3, DeepSeek-V3, Llama 4), by the ops of this package. Importing this module
is what switches it on:

    ./run_train.sh --experimental.custom_import perseus.integrations.torchtitan --parallelism.tensor_parallel_degree 4

torchtitan's plans of parallel styles stay as they are; perseus.parallel.fused() puts styles of ours into them. So
checkpoints, FSDP2, activation checkpointing and the loss are torchtitan's own.

Experts with --parallelism.expert_parallel_degree run as perseus.moe_layer(), in one launch, where torchtitan would send
its tokens by all-to-all. Weights, their placement, routers, counts of tokens and shared experts are torchtitan's.
Scores that are applied before the experts (Llama 4), expert_tensor_parallel_degree above 1 and DualPipeV stay
torchtitan's own.
"""
from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from .._registry import find
from ..moe import moe_layer, moe_plan
from ..nn import local
from ..parallel import fused

MODELS = ("llama3", "qwen3")
_options: dict[str, Any] = {"max_tokens": 0, "capacity": 0, "recompute": True}

try:
    from torchtitan.distributed import expert_parallel
    from torchtitan.models.llama4.infra import parallelize as of_experts
    from torchtitan.models.moe import moe
except ImportError as e:
    raise ImportError(f"perseus.integrations.torchtitan needs torchtitan 0.2.2: {e}") from e


# ---- experts ----

def experts(*, max_tokens: int = 0, capacity: int = 0, recompute: bool = True) -> None:
    """Options of expert parallelism. max_tokens: the most tokens of a rank in one layer; 0: those of the
    first step, up to the next power of two. capacity: as of perseus.moe_plan(); 0: nothing is ever dropped. recompute:
    as of perseus.moe_layer(): only the inputs of experts stay until the backward pass.

    Example::

        perseus.integrations.torchtitan.experts(recompute=False)
    """
    _options.update(max_tokens=max_tokens, capacity=capacity, recompute=recompute)


class _Experts(moe.GroupedExperts):
    """What torchtitan's experts become. perseus: the style and the mesh."""

    def forward(self, x: torch.Tensor, *routed: torch.Tensor) -> torch.Tensor:
        style, mesh = self.perseus
        if len(routed) == 1:  # rows that torchtitan has sorted, with their numbers: its own way
            rows, counts = style._token_dispatch(self, (x, routed[0]), mesh)
            return style._token_combine(self, super().forward(rows, counts), mesh)
        scores, chosen = routed
        w1, w2, w3 = (local(w) for w in (self.w1, self.w2, self.w3))
        most = _options["max_tokens"] or 1 << max(x.shape[0] - 1, 0).bit_length()
        plan = moe_plan(max_tokens=most, hidden=x.shape[1], experts=self.num_experts, top_k=chosen.shape[1],
                        inner=w1.shape[1], linear_layout=True, capacity=_options["capacity"], group=mesh)
        return moe_layer(x.contiguous(), chosen.contiguous(), scores.float().contiguous(), (w1, w3), w2, plan,
                         recompute=_options["recompute"])[0]


class ExpertParallel(expert_parallel.ExpertParallel):
    """torchtitan's style, whose tokens travel within moe_layer()."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        find(device_mesh)
        self._partition_fn("", module, device_mesh)
        module.perseus = self, device_mesh
        module.__class__ = _Experts
        return module


class ReordererSequenceParallel(expert_parallel.ReordererSequenceParallel):
    """torchtitan's style, which tells the layer that the ranks of a tensor-parallel group share its tokens."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.perseus_mesh = device_mesh
        return super()._apply(module, device_mesh)


_theirs = moe.MoE.forward


def _forward(self: moe.MoE, x: torch.Tensor) -> torch.Tensor:
    if not isinstance(self.experts, _Experts) or self.score_before_experts:
        return _theirs(self, x)
    shape, x = x.shape, x.view(-1, x.shape[-1])
    scores, chosen, counts = self.router(x, self.expert_bias)
    with torch.no_grad():
        self.tokens_per_expert.add_(counts)
    mesh = getattr(self.reorderer, "perseus_mesh", None)
    routed = self.experts(x, scores, chosen) if mesh is None else _share(self.experts, mesh, x, scores, chosen)
    return (routed if self.shared_experts is None else routed + self.shared_experts(x)).view(shape)


def _share(run: nn.Module, mesh: DeviceMesh, *tensors: torch.Tensor) -> torch.Tensor:
    """Experts of this rank's share of tokens that all ranks of `mesh` have. The other rows are zeros: the layer's style
    adds the ranks' results up."""
    count = tensors[0].shape[0]
    if count % mesh.size():
        raise ValueError(f"perseus.integrations.torchtitan: {mesh.size()} tensor-parallel ranks must divide the "
                         f"{count} tokens of a layer of experts")
    share = count // mesh.size()
    begin = share * mesh.get_local_rank()
    return F.pad(run(*(t.narrow(0, begin, share) for t in tensors)), (0, 0, begin, count - begin - share))


# ---- what is exchanged ----

def _parallelize_module(module: nn.Module, device_mesh: Any = None, parallelize_plan: Any = None,
                        **options: Any) -> nn.Module:
    plan = fused(parallelize_plan) if isinstance(parallelize_plan, dict) else parallelize_plan
    return parallelize_module(module, device_mesh, plan, **options)


for _model in MODELS:
    _name = f"torchtitan.models.{_model}.infra.parallelize"
    try:
        _module = importlib.import_module(_name)
        _module.parallelize_module  # noqa: B018: what is replaced must be there
    except (ImportError, AttributeError) as e:
        raise ImportError(f"perseus.integrations.torchtitan needs torchtitan 0.2.2, whose {_name} calls "
                          f"parallelize_module(): {e}") from e
    _module.parallelize_module = _parallelize_module

of_experts.ExpertParallel, of_experts.ReordererSequenceParallel = ExpertParallel, ReordererSequenceParallel
moe.MoE.forward = _forward

for _model in ("llama3", "llama4", "qwen3", "deepseek_v3"):  # torchtitan keeps the results of its reduce-scatters
    _kept = getattr(importlib.import_module(f"torchtitan.models.{_model}.infra.parallelize"), "_op_sac_save_list", None)
    if _kept is not None:
        _kept |= {torch.ops.perseus.matmul_reduce_scatter.default, torch.ops.perseus.moe_layer.default}

__all__ = ["experts"]
