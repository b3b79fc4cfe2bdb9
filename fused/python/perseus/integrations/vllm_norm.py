# SPDX-License-Identifier: Apache-2.0
"""vLLM (0.32.0): all-reduce, residual and RMS norm after a row-parallel layer in one kernel, as a pass of its compiler.

perseus.integrations.vllm names PassManager to vLLM, which imports it when it compiles.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import fx
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.compilation.passes.utility.noop_elimination import NoOpEliminationPass
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.logger import init_logger

import perseus.norm  # noqa: F401: registers the op

from .vllm import options_of

_logger = init_logger(f"vllm.{__name__}")


def _argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def _fits(summed: Any, node: fx.Node, group: Any) -> bool:
    """Whether the norm's input is a sum that nothing else uses, of types that the kernel takes."""
    if not isinstance(summed, fx.Node) or summed.target is not torch.ops.vllm.all_reduce.default:
        return False
    x, weight = (n.meta["val"] if isinstance(n, fx.Node) else None for n in (summed, _argument(node, 2, "weight")))
    return (len(summed.users) == 1 and _argument(summed, 1, "group_name") == group.unique_name
            and _argument(node, 4, "variance_size") is None and x.ndim == 2 and x.shape[1] % 8 == 0
            and x.dtype in (torch.bfloat16, torch.float16) and (weight is None or weight.dtype == x.dtype))


class AllReduceNorm(InductorPass):
    """most: of the tokens of a batch; 0: any."""

    def __init__(self, most: int = 0) -> None:
        self.most = most

    def is_applicable_for_range(self, compile_range: Any) -> bool:
        holds = not self.most or compile_range.end <= self.most
        if not holds and compile_range.start <= self.most:
            _logger.warning_once("Perseus: norms of up to %s tokens were asked for, and vLLM compiles %s to %s tokens "
                                 "in one: they stay as they are. Give compile_ranges_endpoints in --compilation-config",
                                 self.most, compile_range.start, compile_range.end)
        return holds

    def __call__(self, graph: fx.Graph) -> None:
        group, count = get_tp_group(), 0
        for node in list(graph.find_nodes(op="call_function", target=torch.ops.vllm_ir.fused_add_rms_norm.default)):
            summed = _argument(node, 0, "x")
            if not _fits(summed, node, group):
                continue
            with graph.inserting_before(node):
                made = graph.call_function(torch.ops.perseus.all_reduce_rms_norm.default, (
                    summed.args[0], _argument(node, 1, "x_residual"), _argument(node, 2, "weight"),
                    _argument(node, 3, "epsilon"), group.device_group.group_name))
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            graph.erase_node(node)
            graph.erase_node(summed)
            count += 1
        _logger.debug("Perseus: %s sums with norms in this graph", count)

    def uuid(self) -> str:
        return self.hash_source(self, _fits, str(self.most))


class PassManager(PostGradPassManager):
    """vLLM's, with our pass before its own fusions."""

    def configure(self, config: VllmConfig) -> None:
        super().configure(config)
        norm = (options_of(config) or {}).get("norm", False)
        if norm and config.parallel_config.tensor_parallel_size > 1:
            first = sum(isinstance(p, NoOpEliminationPass) for p in self.passes)
            self.passes.insert(first, AllReduceNorm(0 if norm is True else norm))
            _logger.info_once("Perseus runs all-reduce, residual and RMS norm in one kernel")


__all__ = ["AllReduceNorm", "PassManager"]
