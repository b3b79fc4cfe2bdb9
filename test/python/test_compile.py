# SPDX-License-Identifier: Apache-2.0
"""torch.compile(fullgraph=True): no graph breaks, the same results. Fake implementations agree with the real ones."""
import types
import unittest

import ranks
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from llama_block import Config, LlamaBlock
from ranks import random, run
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from train import initialize

import perseus
from perseus._dispatch import _meeting
from perseus._registry import _groups
from perseus.parallel import ColwiseParallel, GatheredInput, RowwiseParallel

SMALL = Config(hidden=64, heads=4, kv_heads=2, intermediate=96)


class Fake(unittest.TestCase):
    """The shapes, dtypes and strides that are traced are those that the op gives."""

    def same(self, world, call, *tensors, dtype=torch.bfloat16):
        def described(results):
            return [(tuple(t.shape), t.dtype, t.stride())
                    for t in (results if isinstance(results, (list, tuple)) else [results])]

        real = run(world, lambda group: described(call(group.name, *(random(group.rank, *shape, dtype=dtype)
                                                                     for shape in tensors))))
        _groups["traced"] = types.SimpleNamespace(world=world)  # torch traces in the main thread only, where no rank is
        with FakeTensorMode() as mode:
            fake = described(call("traced", *(mode.from_tensor(random(0, *shape, dtype=dtype)) for shape in tensors)))
        del _groups["traced"]
        self.assertEqual(real, [fake] * world)

    def test_products(self):
        for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "replicated_matmul"):
            for dtype in (torch.bfloat16, torch.float16):
                self.same(2, lambda g, a, w: getattr(perseus, op)(a, w.t(), g), (32, 64), (96, 64), dtype=dtype)
            if op != "replicated_matmul":
                self.same(2, lambda g, a, w: getattr(perseus, op)(a, w.t(), g, out_dtype=torch.float32),
                          (32, 64), (96, 64))
        self.same(2, lambda g, a, w: perseus.all_gather_matmuls(a, [w.t(), w.t()], g), (32, 64), (96, 64))
        self.same(2, lambda g, a, w: torch.ops.perseus.fused_all_gather_matmul(a, [w.t()], 1, g, return_A=False)[1],
                  (4, 8, 64), (96, 64))

    def test_products_of_inductors_pass(self):
        for dim, gathered in ((0, True), (1, True), (1, False)):
            def gather(g, a, w):
                whole, (c,) = torch.ops.perseus.post_grad_all_gather_matmul(a, [w.t()], dim, g, return_A=gathered)
                return [c] if whole is None else [whole, c]
            self.same(2, gather, (4, 8, 64), (96, 64))
            self.same(2, lambda g, a, w: torch.ops.perseus.post_grad_matmul_reduce_scatter(a, w.t(), "sum", dim, g),
                      (4, 8, 64), (96, 64))

    def test_ring_attention(self):
        for heads_first, shape in ((False, (1, 128, 2, 64)), (True, (1, 2, 128, 64))):
            self.same(2, lambda g, q: perseus.ring_attention(q, q, q, g, heads_first=heads_first), shape)
            self.same(2, lambda g, q: torch.ops.perseus.ring_attention_backward(
                q, None, q, q, q, q, torch.zeros(1, 2, 128), g, heads_first=heads_first), shape)

    def test_moe_dispatch_gemm(self):
        def call(group, tokens, weights):
            chosen = torch.zeros(20, 2, dtype=torch.int64)
            chosen[:, 1] = 3
            return perseus.moe_dispatch_gemm(tokens, chosen, torch.ones(20, 2), weights, max_tokens=32, capacity=512,
                                             group=group)
        self.same(2, call, (20, 64), (2, 64, 96))


def orders(ranks_own):
    """The targets of our ops in the graphs of a program with independent products, forward and backward, and whether
    each takes the token of the one before."""
    found = []

    def look(graph, inputs):
        nodes = [n for n in graph.graph.nodes if "perseus" in str(n.target) or "perseus" in str(n.args[1:2])]
        chained = all(before in {a for token in n.all_input_nodes for a in (token, *token.all_input_nodes)}
                      for before, n in zip(nodes, nodes[1:]))
        found.append(([str(n.target if "perseus" in str(n.target) else n.args[1]).split(".")[1] for n in nodes],
                      chained))
        return make_boxed_func(graph.forward)

    def program(x, w):
        a = perseus.matmul_all_reduce(x, w.t(), ranks_own)
        b = perseus.matmul_reduce_scatter(x, w.t(), ranks_own)
        perseus.all_gather_matmul(x, w.t(), ranks_own)  # unused: dropped without keep_order()
        return torch.relu(a) + b
    torch._dynamo.reset()
    x, w = (random(0, 32, 64).requires_grad_() for _ in range(2))
    y = torch.compile(program, fullgraph=True, backend=aot_autograd(fw_compiler=look, bw_compiler=look))(x, w)
    y.float().sum().backward()
    return found, torch.equal(y, program(x, w))


class Order(unittest.TestCase):
    def test_all_ops_in_which_ranks_meet_keep_their_order(self):
        for name in ("all_reduce", "reduce_scatter", "matmul_all_reduce_rms_norm_quant", "moe_scaled_layer",
                     "moe_layer_backward", "striped_attention_backward"):
            self.assertIn(name, _meeting)
        for name in ("replicated_matmul", "quantise"):
            self.assertNotIn(name, _meeting)

    def test_keep_order_chains_ops_and_keeps_the_unused(self):
        (_, same), = run(1, lambda group: orders(group.name))
        self.assertTrue(same)
        perseus.keep_order()
        try:
            (found, same), = run(1, lambda group: orders(group.name))
            self.assertTrue(same)
            forward, backward = found
            self.assertEqual(forward, (["matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul_kept"], True))
            self.assertTrue(backward[0] and backward[1], backward)
        finally:
            for name in _meeting:
                torch.library._register_effectful_op(f"perseus::{name}", None)


class FeedForward(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (torch.nn.Linear(*sizes, bias=False, dtype=torch.bfloat16)
                                         for sizes in ((64, 96), (64, 96), (96, 64)))

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def initialized(module):
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(random(0, *p.shape, seed=i) / 8)
    return module


class Compiled(unittest.TestCase):
    def compare(self, backend, dynamic=None):
        def body(group):
            block = LlamaBlock(SMALL, perseus.nn, group)
            initialize(block)
            compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=dynamic)
            worst = 0.0
            for sequence in (16, 24) if dynamic else (16,):
                results = []
                for run_block in (block, compiled):
                    x = random(group.rank, sequence, 2, 64).requires_grad_()
                    y = run_block(x)
                    y.float().square().mean().backward()
                    results.append([y.detach(), x.grad, *(p.grad.clone() for p in block.parameters())])
                    block.zero_grad()
                worst = max([worst, *(float((a.double() - b.double()).abs().max() / b.double().square().mean().sqrt())
                                      for a, b in zip(*results))])
            return worst
        # One rank: torch's compiler may be used by one thread of a process at a time.
        for worst in run(1, body):
            self.assertLess(worst, 0.15)

    def test_the_llama_block_compiles_in_one_graph_with_its_backward(self):
        self.compare("aot_eager")

    def test_parameters_that_are_dtensors_compile_in_one_graph(self):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group = perseus.init(init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)), device=0, watchdog=False)
        block, results = perseus.nn.replicate(LlamaBlock(SMALL, perseus.nn, group), group), []
        for run_block in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
            block.zero_grad()
            y = run_block(random(0, 16, 2, 64))
            y.float().square().mean().backward()
            results.append([y.detach(), *(p.grad.full_tensor() for p in block.parameters())])
        self.assertTrue(all(isinstance(p, DTensor) for p in block.parameters()))
        self.assertTrue(all(map(torch.equal, *results)))
        group.close()
        dist.destroy_process_group()

    def test_styles_compile_in_one_graph_and_share_a_gather(self):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        group, results = perseus.init(mesh, device=0, watchdog=False), []
        for backend in (None, "aot_eager"):
            block = initialized(FeedForward())
            parallelize_module(block, mesh, {"": GatheredInput("gate", "up"), "gate": ColwiseParallel(),
                                             "up": ColwiseParallel(), "down": RowwiseParallel(sequence_dim=1)})
            run_block = torch.compile(block, fullgraph=True, backend=backend) if backend else block
            x = random(0, 2, 16, 64).requires_grad_()
            y = run_block(x)
            y.float().square().mean().backward()
            self.assertIsNone(getattr(block.up, "perseus_given", None))  # no tensor is kept
            results.append([y.detach(), x.grad, *(p.grad.full_tensor() for p in block.parameters())])
        self.assertTrue(all(map(torch.equal, *results)))
        group.close()
        dist.destroy_process_group()

    def test_a_dynamic_number_of_rows_compiles(self):
        self.compare("aot_eager", dynamic=True)

    def test_the_drop_in_ops_compile_in_one_graph(self):
        def body(group):
            def pair(x, w):
                _, (c,) = torch.ops.perseus.fused_all_gather_matmul(x, [w.t()], 0, group.name)
                return torch.ops.perseus.fused_matmul_reduce_scatter(torch.relu(c), w, "sum", 0, group.name)
            x, w = random(0, 16, 2, 64), random(0, 96, 64)
            return torch.equal(torch.compile(pair, fullgraph=True, backend="aot_eager")(x, w), pair(x, w))
        self.assertEqual(run(1, body), [True])

    def test_attention_and_its_gradients(self):
        def body(group):
            def loss(q, k, v):
                out, lse = perseus.ring_attention(q.relu(), k, v, group, causal=True)
                return out.float().square().sum() + lse.sum()
            results = []
            for call in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
                leaves = [random(0, 1, 64, heads, 64, seed=heads).requires_grad_() for heads in (2, 1, 1)]
                call(*leaves).backward()
                results.append([t.grad for t in leaves])
            return [torch.equal(a, b) for a, b in zip(*results)]
        self.assertEqual(run(1, body), [[True] * 3])

    def test_each_op_passes_torchs_own_check_of_ops(self):
        def body(group):
            a, w = random(0, 32, 64).requires_grad_(), random(0, 96, 64).requires_grad_()
            tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
            for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "replicated_matmul"):
                torch.library.opcheck(getattr(torch.ops.perseus, op).default, (a, w.t(), group.name), test_utils=tests,
                                      rtol=0.02, atol=0.05)
            q, k, v = (random(0, 1, 64, heads, 64, seed=heads).requires_grad_() for heads in (2, 1, 1))
            torch.library.opcheck(torch.ops.perseus.ring_attention.default, (q, k, v, group.name, True),
                                  test_utils=tests, rtol=0.02, atol=0.05)
        run(1, body)


if __name__ == "__main__":
    ranks.main()
