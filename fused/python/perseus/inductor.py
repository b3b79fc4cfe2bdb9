# SPDX-License-Identifier: Apache-2.0
"""torch.compile: its pass for asynchronous tensor parallelism with our ops, and ops that keep their order. Written
against torch 2.11, parts of which are private: other versions may refuse."""
from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import fx

from ._checks import _PRODUCTS
from ._dispatch import _define, _meeting
from ._registry import _groups
from .symm_mem import _fused_all_gather_matmul, _fused_matmul_reduce_scatter

# The ops of symm_mem's schemas, for graphs whose gradients are made: Inductor wants ops that it need not decompose.
# local: keep_order() is for graphs of before.
_define("post_grad_all_gather_matmul(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, bool return_A = True) "
        "-> (Tensor?, Tensor[])", _fused_all_gather_matmul, _fused_all_gather_matmul, local=True)
_define("post_grad_matmul_reduce_scatter(Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name) -> Tensor",
        _fused_matmul_reduce_scatter, _fused_matmul_reduce_scatter, local=True)
_EXCHANGED = {"symm_mem::fused_all_gather_matmul": "post_grad_all_gather_matmul",
              "symm_mem::fused_matmul_reduce_scatter": "post_grad_matmul_reduce_scatter"}


def _takes(node: fx.Node) -> bool:
    """Whether our op can take what the node multiplies."""
    a = node.args[0]
    while isinstance(a, fx.Node) and "val" not in a.meta and a.args:  # a change of strides that the pass has put in
        a = a.args[0]
    a = a.meta.get("val") if isinstance(a, fx.Node) else None
    dim = node.args[2 if "gather_matmul" in str(node.target) else 3]
    return a is not None and a.dtype in _PRODUCTS and 0 <= dim < a.dim() - 1


def exchange(graph: fx.Graph) -> int:
    """Puts our ops into the place of torch.ops.symm_mem's fused products. Returns how many."""
    count = 0
    for node in graph.nodes:
        name = node.target.name() if isinstance(node.target, torch._ops.OpOverload) else ""
        if name in _EXCHANGED and _takes(node):
            node.target = getattr(torch.ops.perseus, _EXCHANGED[name]).default
            count += 1
    return count


def _as_rows(graph: fx.Graph) -> None:
    """Gathers rows where torch gathers [1, sequence, features] and views the result: its pass does not look through
    such a view, so it finds no gather before the products of a batch of one sequence."""
    c10d, reshape = torch.ops._c10d_functional, torch.ops.aten.reshape.default
    for gather in list(graph.nodes):
        if gather.target is not c10d.all_gather_into_tensor.default or len(gather.users) != 1:
            continue
        (wait,), (x, ranks, *_) = gather.users, gather.args
        part = x.meta.get("val")
        if wait.target is not c10d.wait_tensor.default or part is None or part.dim() != 3 or part.shape[0] != 1:
            continue
        count, columns = part.shape[1:]
        if not isinstance(count, int) or not isinstance(columns, int):
            continue

        def made(target: Any, rows: int, *arguments: Any) -> fx.Node:
            node = graph.call_function(target, arguments)
            node.meta["val"] = part.new_empty(rows, columns)
            return node
        with graph.inserting_before(gather):
            rows = made(gather.target, ranks * count, made(reshape, count, x, [count, columns]), *gather.args[1:])
            rows = made(wait.target, ranks * count, rows)
        for view in [user for user in wait.users if user.target is reshape]:
            view.replace_input_with(wait, rows)
            for user in [user for user in view.users if user.target is reshape]:
                if list(user.args[1]) == [ranks * count, columns]:
                    user.replace_all_uses_with(rows)
                    graph.erase_node(user)
        if not wait.users:
            graph.erase_node(wait)
            graph.erase_node(gather)


def _passes() -> Any:
    passes = importlib.import_module("torch._inductor.fx_passes.micro_pipeline_tp")
    if not hasattr(passes, "micro_pipeline_tp_pass"):
        raise NotImplementedError(f"perseus.enable_inductor: torch {torch.__version__} has no "
                                  "micro_pipeline_tp_pass() in torch._inductor.fx_passes.micro_pipeline_tp")
    return passes


@functools.cache
def _kind() -> type:
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files  # Inductor takes a second

    class FusedProducts(CustomGraphPass):
        of_perseus = True

        def __init__(self, before: Any) -> None:
            self.before, self.fuse = before, _passes().micro_pipeline_tp_pass

        def __call__(self, graph: fx.Graph) -> None:
            from torch.distributed._symmetric_memory import _test_mode
            if self.before:
                self.before(graph)
            _as_rows(graph)
            with _test_mode(set(_groups)):  # what says to the pass that a group takes fused products
                self.fuse(graph)
            exchange(graph)

        def uuid(self) -> Any:
            """Inductor's cache takes a graph that was compiled without this pass, or for other groups, for another."""
            return get_hash_for_files((__file__,)), sorted(_groups), self.before and self.before.uuid()
    return FusedProducts


def fused_products(before: Any = None) -> Any:
    """A pass for torch._inductor.config.post_grad_custom_post_pass: torch's own for asynchronous tensor parallelism,
    for groups that are open here, and then exchange(). before: a pass that comes first."""
    return _kind()(before)


def enable_inductor() -> None:
    """Makes torch.compile fuse collectives and products of tensor parallelism into ops of this package: torch's pass
    for asynchronous tensor parallelism finds an all-gather before, or a reduce-scatter after, a product, as DTensors
    make them. Call perseus.init(group) before the first compilation: the pass takes the groups that are open. Products
    of other types than bfloat16 and float16 stay as they are on torch's symmetric memory. Once for a process. It is
    torch._inductor.config.post_grad_custom_post_pass, after a pass that is there already.

    Example::

        perseus.init(mesh["tp"])
        perseus.enable_inductor()
        model = torch.compile(parallelize_module(model, mesh["tp"], plan))
    """
    before = torch._inductor.config.post_grad_custom_post_pass
    if not getattr(before, "of_perseus", False):
        torch._inductor.config.post_grad_custom_post_pass = fused_products(before)


def keep_order() -> None:
    """Makes torch.compile keep the ops of this package in the order of the program, and ops whose results nobody uses.
    Without it torch may move or drop them, by what it knows of the graph: ranks whose graphs differ, as with dynamic
    shapes on one of them, may then wait for each other. Call it before the first compilation.

    torch 2.11 cannot compile two regions of torch.utils.checkpoint with such ops in one graph; its error is an
    AssertionError.

    Example::

        perseus.keep_order()
    """
    from torch._library.effects import EffectType
    from torch.library import _register_effectful_op
    for name in _meeting:
        _register_effectful_op(f"perseus::{name}", EffectType.ORDERED)


__all__ = ["enable_inductor", "exchange", "fused_products", "keep_order"]
