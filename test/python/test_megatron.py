# SPDX-License-Identifier: Apache-2.0
"""Megatron-core's GPT and its linear layers with our products, compared with its own over gloo. Ranks are processes,
each on an emulated node of its own; run.py runs it on the software NIC. Not tested for want of a GPU: initialization by
Megatron's RNG tracker, and dropout."""
import contextlib
import os
import unittest
from unittest import mock

import ranks
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_mlp_module_spec_for_backend
from megatron.core.transformer import transformer_block
from megatron.core.transformer.transformer_config import TransformerConfig
from ranks import random

import perseus
import perseus.integrations.megatron as adaptor

WORLD, STEPS, HIDDEN, SEQUENCE = 2, 3, 64, 16


def config(**options):
    return TransformerConfig(num_layers=2, hidden_size=HIDDEN, num_attention_heads=4, ffn_hidden_size=96,
                             tensor_model_parallel_size=WORLD, params_dtype=torch.bfloat16, bf16=True,
                             pipeline_dtype=torch.bfloat16, use_cpu_initialization=True, hidden_dropout=0.0,
                             attention_dropout=0.0, masked_softmax_fusion=False, bias_dropout_fusion=False,
                             gradient_accumulation_fusion=False, **options)


class Norm(torch.nn.LayerNorm):
    """Megatron takes those of TransformerEngine or Apex: its own does not know sequence parallelism."""

    def __init__(self, config, hidden_size, eps=1e-5):
        super().__init__(hidden_size, eps)
        for p in self.parameters():
            p.sequence_parallel = config.sequence_parallel


def made_spec(**options):
    transformer_block.LayerNormImpl = Norm
    spec = get_gpt_layer_local_spec(**options)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    return spec


def train(spec, **sizes):
    """Losses of a GPT, main_grad of the first step, and the model. As Megatron's schedules train it: with its
    DistributedDataParallel, and the gradients of norms summed over the tensor-parallel ranks."""
    torch.manual_seed(1)
    made = config(sequence_parallel=True, **sizes)
    model = GPTModel(made, spec, vocab_size=96, max_sequence_length=SEQUENCE)
    model = model.bfloat16()
    wrapped = DistributedDataParallel(made, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    losses, grads, positions = [], {}, torch.arange(SEQUENCE).expand(2, -1)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    for step in range(STEPS):
        tokens = torch.randint(0, 96, (2, SEQUENCE + 1), generator=torch.Generator().manual_seed(step % 2))
        wrapped.zero_grad_buffer()
        loss = wrapped(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous()).mean()
        loss.backward()
        finalize_model_grads([wrapped])
        if not grads:
            grads = {name: p.main_grad.clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.main_grad, alpha=-0.5)
        losses.append(loss.item())
    return losses, grads, model


def compared(losses, grads, wanted_losses, wanted):
    yield (f"losses {losses}, Megatron's {wanted_losses}",
           all(abs(a - b) < 0.01 * b for a, b in zip(losses, wanted_losses)) and losses[2] < losses[0])
    least = 0.05 * max(float(g.square().mean().sqrt()) for g in wanted.values())
    for name, g in grads.items():
        error = float((g - wanted[name]).abs().max() / wanted[name].square().mean().sqrt().clamp_min(least))
        yield f"main_grad of {name}: {error:g}", error < 0.25


def gpt():
    wanted_losses, wanted, theirs = train(made_spec())
    with mock.patch.object(perseus.nn, "column_linear", wraps=perseus.nn.column_linear) as columns, \
         mock.patch.object(perseus.nn, "row_linear", wraps=perseus.nn.row_linear) as rows:
        losses, grads, model = train(adaptor.fused(made_spec()))
    yield f"products {columns.call_count}, {rows.call_count}", columns.call_count == rows.call_count == 2 * 2 * STEPS
    yield from compared(losses, grads, wanted_losses, wanted)
    kinds = {type(m).__module__ for name, m in model.decoder.named_modules() if "linear" in name}
    yield f"linear layers of {kinds}", kinds == {adaptor.__name__}
    ours, others = (m.sharded_state_dict() for m in (model, theirs))
    yield "sharded_state_dict", ours.keys() == others.keys() and all(
        (getattr(t, "global_shape", 0), getattr(t, "global_offset", 0)) ==
        (getattr(others[key], "global_shape", 0), getattr(others[key], "global_offset", 0)) for key, t in ours.items())
    marks = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce", "sequence_parallel")
    yield "marks of parameters", all(
        [getattr(p, mark, None) for mark in marks] == [getattr(q, mark, None) for mark in marks]
        for p, q in zip(model.parameters(), theirs.parameters()))


def arguments():
    """Each option of the layers, compared with Megatron's layer of the same weights: results and gradients."""
    columns = [(tensor_parallel.ColumnParallelLinear, adaptor.ColumnParallelLinear, HIDDEN, 96, options)
               for options in ({}, {"gather_output": True}, {"skip_bias_add": True}, {"bias": False},
                               {"skip_weight_param_allocation": True}, {"disable_grad_reduce": True},
                               {"is_expert": True, "skip_bias_add": True})]
    rows = [(tensor_parallel.RowParallelLinear, adaptor.RowParallelLinear, 96, HIDDEN,
             {"bias": True, "input_is_parallel": True, "skip_bias_add": False, **options})
            for options in ({}, {"input_is_parallel": False}, {"skip_bias_add": True}, {"bias": False},
                            {"is_expert": True, "skip_bias_add": True})]
    for theirs, ours, inputs, outputs, options in columns + rows:
        for parallel in (False, True):
            if parallel and not options.get("input_is_parallel", True) or (
                parallel and (options.get("gather_output") or options.get("disable_grad_reduce"))):
                continue
            found = []
            for kind in (theirs, ours):
                torch.manual_seed(2)
                layer = kind(inputs, outputs, config=config(sequence_parallel=parallel),
                             init_method=torch.nn.init.normal_, **options)
                weight = {}
                if options.get("skip_weight_param_allocation"):
                    weight["weight"] = random(dist.get_rank(), 96 // WORLD, HIDDEN, seed=4).requires_grad_()
                column = theirs is tensor_parallel.ColumnParallelLinear
                split = parallel and column
                shape = (8 // WORLD if split else 8, 2,
                         inputs // (WORLD if options.get("input_is_parallel") else 1))
                differs = split or options.get("input_is_parallel") or options.get("is_expert")
                x = random(dist.get_rank() if differs else 0, *shape, seed=5).requires_grad_()
                y, bias = layer(x, **weight)
                alike = options.get("gather_output") or (not column and not parallel)
                y.backward(random(0 if alike else dist.get_rank(), *y.shape, seed=6))
                found.append([y.detach(), None if bias is None else bias.detach(), x.grad,
                              *(p.grad for p in layer.parameters()), *(w.grad for w in weight.values())])
            for i, (a, b) in enumerate(zip(*found, strict=True)):
                what = f"{ours.__name__} {options}, sequence_parallel {parallel}, {i}"
                if a is None or b is None:
                    yield f"{what}: {a is None} {b is None}", a is b
                    continue
                error = float((a.float() - b.float()).abs().max() / b.float().square().mean().sqrt().clamp_min(1e-6))
                yield f"{what}: {error:g}", error < 0.2


def specs():
    spec = get_mlp_module_spec_for_backend(adaptor.PerseusSpecProvider())
    yield "a spec by the provider", (spec.submodules.linear_fc1, spec.submodules.linear_fc2) == (
        adaptor.ColumnParallelLinear, adaptor.RowParallelLinear)
    attention = adaptor.layer_spec.submodules.self_attention.submodules
    yield "layer_spec", (attention.linear_qkv, attention.linear_proj) == (adaptor.ColumnParallelLinear,
                                                                         adaptor.RowParallelLinear)
    local = get_gpt_layer_local_spec()
    adaptor.fused(local)
    yield "the spec stays as it was", (local.submodules.self_attention.submodules.linear_qkv
                                       is tensor_parallel.ColumnParallelLinear)
    try:
        adaptor.fused(type("TELayerNormColumnParallelLinear", (), {}))
        yield "a fused norm", False
    except TypeError as e:
        yield "a fused norm", "PerseusSpecProvider" in str(e)


@contextlib.contextmanager
def no_streams():
    """Megatron's all-to-all copies its counts to the host on a stream of CUDA, and its router has a name of
    TransformerEngine's that is not there."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    with mock.patch.multiple(torch.cuda, Stream=mock.MagicMock(), stream=mock.MagicMock(),
                             current_stream=mock.MagicMock()), \
         mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu",
                           lambda t, as_numpy=False, **_: t.numpy() if as_numpy and torch.is_tensor(t) else t), \
         mock.patch.object(moe_utils, "te_general_gemm", None, create=True):
        yield


def experts():
    """A GPT whose experts lie on the ranks that share its sequences. The router drops tokens."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=WORLD, expert_model_parallel_size=WORLD,
                                             expert_tensor_parallel_size=1)
    sizes = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48, "gated_linear_unit": True,
             "activation_func": torch.nn.functional.silu, "add_bias_linear": False, "expert_model_parallel_size": WORLD,
             "expert_tensor_parallel_size": 1, "moe_token_dispatcher_type": "alltoall",
             "moe_expert_capacity_factor": 1.0, "moe_router_load_balancing_type": "none"}
    with no_streams():
        wanted_losses, wanted, _ = train(made_spec(num_experts=4), **sizes)
        with mock.patch.object(adaptor, "moe_layer", wraps=adaptor.moe_layer) as launches:
            losses, grads, model = train(adaptor.fused(made_spec(num_experts=4)), **sizes)
    yield f"launches {launches.call_count}", launches.call_count == 2 * STEPS
    dropped = [int((call.args[1] < 0).sum()) for call in launches.call_args_list]
    yield f"dropped {dropped}", max(dropped) > 0
    yield from compared(losses, grads, wanted_losses, wanted)
    experts = model.decoder.layers[0].mlp.experts.local_experts
    yield "each expert has a gradient", all(float(e.linear_fc1.weight.main_grad.abs().max()) > 0 for e in experts)
    first, second = (tuple(getattr(e, name).weight for e in experts) for name in ("linear_fc1", "linear_fc2"))
    yield "no pass copies experts' weights", launches.call_args_list[-2].args[3].data_ptr() == first[0].data_ptr()
    yield "weights of a buffer of others", torch.equal(adaptor._together(torch.stack(second).unbind()[::-1]),
                                                       torch.stack(second[::-1]))


def page():
    """The program of the page, and one pass of its model, without sequence parallelism."""
    made = {"config": config(sequence_parallel=False)}
    exec(ranks.page("Megatron-core", "python", [("128256", "96"), ("8192", str(SEQUENCE))]), made)
    tokens, model = torch.arange(SEQUENCE).view(1, -1), made["model"].bfloat16()
    y = model(tokens, tokens, torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1), labels=tokens)
    y.mean().backward()
    yield f"losses {y.mean().item()}", 0 < y.mean().item() < 20
    yield "gradients", all(p.grad is not None for p in model.parameters())


def rank_main():
    torch.cuda.current_device = lambda: "cpu"  # where Megatron makes its buffers
    type(tensor_parallel.get_cuda_rng_tracker()).fork = lambda *names: contextlib.nullcontext()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=WORLD)
    os._exit(min(100, sum(ranks.judge(body.__name__, body()) for body in (specs, arguments, gpt, page, experts))))


class Megatron(unittest.TestCase):
    def test_layers_and_a_gpt_give_what_megatrons_own_give(self):
        self.assertEqual(ranks.processes(rank_main, WORLD), [0] * WORLD)


if __name__ == "__main__":
    ranks.main()
