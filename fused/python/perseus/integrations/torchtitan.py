# SPDX-License-Identifier: Apache-2.0
"""torchtitan (0.2.2, that of torch 2.11): tensor and sequence parallelism of its Llama 3 and dense Qwen3 by the ops of
this package. Importing this module is what switches it on:

    ./run_train.sh --experimental.custom_import perseus.integrations.torchtitan --parallelism.tensor_parallel_degree 4

torchtitan's plans of parallel styles stay as they are; perseus.parallel.fused() puts styles of ours into them. So
checkpoints, FSDP2, activation checkpointing and the loss are torchtitan's own.
"""
from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from ..parallel import fused

MODELS = ("llama3", "qwen3")


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
    if hasattr(_module, "_op_sac_save_list"):  # torchtitan keeps the results of its reduce-scatters
        _module._op_sac_save_list.add(torch.ops.perseus.matmul_reduce_scatter.default)

__all__: list[str] = []
