# SPDX-License-Identifier: Apache-2.0
"""vLLM (0.32.0): the memory of our groups goes when its engine sleeps, and comes back before the KV cache is used."""
from __future__ import annotations

from typing import Any

from vllm.device_allocator.sleep_mode_backend import CuMemBackend, SleepModeBackendFactory

from .._registry import sleepers

NAME = "perseus"


def register() -> None:
    SleepModeBackendFactory.register_backend(NAME, __name__, Backend.__name__)


def choose(config: Any) -> bool:
    """Whether our groups sleep with vLLM's engine, whose backend is then ours. The command line has no option for it.
    vLLM moves the pool of CUDA graphs with its own backend only, so where that is asked for, ours stay awake."""
    model = config.model_config
    if model is None or not model.enable_sleep_mode:
        return False
    if model.sleep_mode_backend == "cumem" and not model.sleep_mode_offload_cudagraph:
        model.sleep_mode_backend = NAME
    return model.sleep_mode_backend == NAME


class Backend(CuMemBackend):
    """vLLM's own, and our groups."""

    def suspend(self, level: int = 1) -> None:
        for group in sleepers():
            if not group.asleep:
                group.sleep()
        super().suspend(level)

    def resume(self, tags: list[str] | None = None) -> None:
        super().resume(tags)
        for group in sleepers() if tags is None or "kv_cache" in tags else ():
            if group.asleep:
                group.wake()
