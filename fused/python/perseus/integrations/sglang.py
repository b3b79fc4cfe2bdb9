# SPDX-License-Identifier: Apache-2.0
"""SGLang (0.5.23): MoE layers with expert parallelism as one call, dispatch and combine included.

    sglang serve --model-path Qwen/Qwen3-30B-A3B --tp-size 4 --dp-size 4 --enable-dp-attention \\
        --moe-a2a-backend deepep --moe-runner-backend perseus

SGLang loads register() by the entry point sglang.srt.plugins, in each of its processes. It adds the name `perseus` to
the runners. Models then take the way of deepep, where each rank has tokens of its own and nothing is added up after the
layer. Two of their calls are hooked: what class a MoE layer is, and what dispatcher it makes. Under another name of a
runner nothing changes. A layer that the kernels cannot take is an error that says why.
"""
from __future__ import annotations

from typing import Any

try:
    from sglang.srt.arg_groups.choices import MOE_RUNNER_BACKEND_CHOICES, add_moe_runner_backend_choices
    from sglang.srt.layers.moe.utils import (get_moe_a2a_backend, get_moe_runner_backend,
                                             register_moe_runner_backend_name)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
except ImportError as e:
    raise ImportError(f"perseus.integrations.sglang needs SGLang 0.5.23: {e}") from e

NAME = "perseus"
_MOE = "sglang.srt.layers.moe"


def asked() -> bool:
    return get_moe_runner_backend().value == NAME


def _class_of_layers(original: Any, quant_config: Any = None) -> type:
    """The hook of get_moe_impl_class()."""
    if not asked():
        return original(quant_config)
    from .sglang_moe import PerseusMoE  # SGLang's layers are loaded when a model asks for them
    return PerseusMoE


def _dispatcher(original: Any, moe_runner_config: Any, quant_method: Any = None) -> Any:
    """The hook of create_moe_dispatcher(). DeepEP's needs DeepEP, and nothing calls it here."""
    if not asked():
        return original(moe_runner_config, quant_method=quant_method)
    if not get_moe_a2a_backend().is_deepep():
        raise ValueError(f"perseus.integrations.sglang: --moe-runner-backend {NAME} needs --moe-a2a-backend deepep; it "
                         f"is {get_moe_a2a_backend().value}")
    from .sglang_moe import NoDispatcher
    return NoDispatcher()


def register() -> None:
    """The entry point. A second call changes nothing."""
    if NAME in MOE_RUNNER_BACKEND_CHOICES:
        return
    register_moe_runner_backend_name(NAME)
    add_moe_runner_backend_choices([NAME])
    HookRegistry.register(f"{_MOE}.ep_moe.layer.get_moe_impl_class", _class_of_layers, HookType.AROUND)
    HookRegistry.register(f"{_MOE}.fused_moe_triton.layer.create_moe_dispatcher", _dispatcher, HookType.AROUND)


__all__ = ["NAME", "register"]
