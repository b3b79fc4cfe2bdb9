# SPDX-License-Identifier: Apache-2.0
"""Models of torchtitan under its own parallelize functions, whose products and experts are ours, compared with
torchtitan's own over gloo. Ranks are processes, each on an emulated node of its own; run.py runs it on the software
NIC."""
import collections
import copy
import dataclasses
import functools
import importlib
import importlib.machinery
import importlib.util
import itertools
import os
import pathlib
import re
import sys
import types
import unittest
from unittest import mock

import ranks
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention

import perseus

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "gpu"))
import training  # noqa: E402
import training_models  # noqa: E402

WORLD, STEPS, SEQUENCE = 2, 3, 16
SIZES = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 96}
OF_EXPERTS = {"num_experts": 4, "top_k": 2, "use_grouped_mm": False, "score_before_experts": False}
MLA = {"q_lora_rank": 0, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
Case = collections.namedtuple("Case", "model function sizes experts tp", defaults=(None, WORLD))
# A dense model, or one whose experts lie on the ranks, which share sequences (tp) or have their own (FSDP).
CASES = {"llama3": Case("llama3", "parallelize_llama", {"multiple_of": 32}),
         "qwen3": Case("qwen3", "parallelize_qwen3", {"hidden_dim": 96, "head_dim": 16}),
         "experts": Case("deepseek_v3", "parallelize_deepseekv3",
                         {"inter_dim": 96, "moe_inter_dim": 48, "n_dense_layers": 0, "n_layers": 1, **MLA},
                         {"num_shared_experts": 1}, 1),
         "experts of a shared sequence": Case("qwen3", "parallelize_qwen3",
                                              {"head_dim": 16, "moe_enabled": True, "moe_inter_dim": 48, "n_layers": 1},
                                              {"num_shared_experts": 0, "score_func": "softmax", "route_norm": True})}


def stand_ins():
    """torchtitan imports these for logs and data sets, which nothing here uses. Its kernels of MoE have versions for
    the CPU, but want triton."""
    for name in ("torch.utils.tensorboard", "datasets", "datasets.distributed"):
        sys.modules[name] = mock.MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None), __path__=[])
    folder = pathlib.Path(importlib.util.find_spec("torchtitan").origin).parent
    kernels = types.ModuleType("torchtitan.models.moe.kernels")
    kernels.triton = kernels.tl = mock.MagicMock()
    exec(re.sub("(?m)^import triton.*$", "", (folder / "models/moe/kernels.py").read_text()), kernels.__dict__)
    kernels.generate_permute_indices = functools.partial(kernels.generate_permute_indices, use_cpu=True)
    sys.modules[kernels.__name__] = kernels
    count = torch.histc  # not for integers on the CPU
    torch.histc = lambda t, **options: count(t.float(), **options).to(t.dtype)


def attend(self, *heads, **options):
    """What torchtitan's module of attention does; DTensors do not know the CPU's kernel of it."""
    if not isinstance(heads[0], DTensor):
        return scaled_dot_product_attention(*heads, is_causal=True, **options)
    y = scaled_dot_product_attention(*(t.to_local() for t in heads), is_causal=True, **options)
    return DTensor.from_local(y, heads[0].device_mesh, heads[0].placements, run_check=False)


def built(case):
    """torchtitan's trainer makes a model so."""
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.moe import MoEArgs
    from torchtitan.protocols.train_spec import get_train_spec
    from torchtitan.tools.utils import set_default_dtype
    spec, config, sizes = get_train_spec(case.model), JobConfig(), {**SIZES, **case.sizes}
    config.training.seq_len, config.training.dtype = SEQUENCE, "bfloat16"
    config.parallelism.tensor_parallel_degree = case.tp
    kind = type(next(iter(spec.model_args.values())))
    if case.experts:
        sizes["moe_args"] = MoEArgs(**OF_EXPERTS, **case.experts)
    known = {field.name for field in dataclasses.fields(kind)}
    arguments = kind(**{name: value for name, value in sizes.items() if name in known}, max_seq_len=SEQUENCE)
    dims = ParallelDims(dp_replicate=1, dp_shard=WORLD // case.tp, cp=1, tp=case.tp, pp=1,
                        ep=WORLD if case.experts else 1, etp=1, world_size=WORLD)
    arguments.moe_impl = "standard"  # DeepSeek-V3's takes it from the options
    with torch.device("meta"), set_default_dtype(torch.bfloat16):
        model = spec.model_cls(arguments)
    model = importlib.import_module(f"torchtitan.models.{case.model}").__dict__[case.function](model, dims, config)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu") if case.experts else None)
    return model


def gradient(p):
    """Of the whole parameter, where it lies on one mesh of ranks."""
    return (p.grad.full_tensor() if p.grad.device_mesh.ndim == 1 else p.grad.to_local()).float()


def train(case, state):
    """Losses, gradients of the first step, what multiplies by our ops; torchtitan's trainer without its data. state:
    None, or the weights."""
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.distributed import parallel_dims
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.models import attention
    parallel_dims.device_type = "cpu"  # it takes cuda where it finds nothing
    attention.ScaledDotProductAttentionWrapper.forward = attend
    model = built(case)
    if state:
        model.load_state_dict(state)
    state = copy.deepcopy(model.state_dict())
    optimizer, losses, grads = torch.optim.SGD(model.parameters(), lr=0.1), [], {}
    for step in range(STEPS):
        seed = step % 2 + (10 * dist.get_rank() if case.tp == 1 else 0)
        tokens = torch.randint(0, 96, (2, SEQUENCE + 1), generator=torch.Generator().manual_seed(seed))
        with dist_utils.get_train_context(case.tp > 1)():
            loss = cross_entropy_loss(model(tokens[:, :-1]), tokens[:, 1:]) / tokens[:, 1:].numel()
            optimizer.zero_grad()
            loss.backward()
        if not grads:
            grads = {key: gradient(p) for key, p in model.named_parameters()}
        dist_utils.clip_grad_norm_(list(model.parameters()), 1.0, ep_enabled=case.experts is not None)
        optimizer.step()
        losses.append((loss.full_tensor() if isinstance(loss, DTensor) else loss).item())
    return losses, grads, {key.rpartition(".")[2] for key, m in model.named_modules()
                           if hasattr(m, "perseus")}, state


def compared():
    from torchtitan.config import ConfigManager
    wanted = {name: train(case, None) for name, case in CASES.items()}
    command = ranks.page("torchtitan", "", [("\\\n", "")]).split("run_train.sh")[1].split()
    options = ConfigManager().parse_args(command)
    yield "the options of the page", options.parallelism.tensor_parallel_degree == WORLD
    adaptor = importlib.import_module(options.experimental.custom_import)  # as torchtitan's trainer does
    for name, (wanted_losses, wanted_grads, theirs, state) in wanted.items():
        case = CASES[name]
        with mock.patch.object(perseus.nn, "column_linear", wraps=perseus.nn.column_linear) as alone, \
             mock.patch.object(adaptor, "moe_layer", wraps=adaptor.moe_layer) as launches:
            losses, grads, ours, _ = train(case, state)
        products = {"wq", "wk", "wv", "wo", "output"} if case.tp > 1 else set()
        yield (f"{name}: {alone.call_count} products alone, and the others share a gather",
               alone.call_count == STEPS * bool(products))
        yield (f"{name}: {launches.call_count} layers of experts, recomputed or not",
               launches.call_count in ((STEPS, 2 * STEPS) if case.experts else (0,)))
        yield f"{name}: torchtitan's own has no product of ours", not theirs
        yield f"{name}: ours are {ours}", ours == products | ({"experts"} if case.experts else {"w1", "w2", "w3"})
        yield (f"{name}: losses {losses}, torchtitan's {wanted_losses}",
               all(abs(a - b) < 0.01 * b for a, b in zip(losses, wanted_losses)) and losses[2] < losses[0])
        least = 0.05 * max(float(g.square().mean().sqrt()) for g in wanted_grads.values())
        for key, g in grads.items():
            error = float((g - wanted_grads[key]).abs().max() /
                          wanted_grads[key].square().mean().sqrt().clamp_min(least))
            yield f"{name}: gradient of {key}: {error:g}", error < 0.25


def measured():
    """test/gpu/training.py takes no model with our modules for one of torchtitan alone."""
    options = types.SimpleNamespace(tp=WORLD, ep=1, layers=1, sequence=SEQUENCE, batch=1, dtype="bfloat16",
                                    checkpoint="none", model="llama3-8b")
    framework, said = training_models.Torchtitan(options, torch.device("cpu")), ""
    try:
        framework.build("torchtitan")
    except RuntimeError as e:
        said = str(e)
    yield f"a model of torchtitan alone, after the import of the adaptor: {said}", "before the adaptor" in said
    yield "ours", any(hasattr(module, "perseus") for module in framework.build("perseus").model.modules())


def rank_main():
    dist.init_process_group("gloo")
    os._exit(ranks.judge("torchtitan", itertools.chain(compared(), measured())))


class Torchtitan(unittest.TestCase):
    def test_models_train_with_the_losses_and_gradients_that_torchtitan_alone_has(self):
        stand_ins()
        from torchtitan.protocols.train_spec import get_train_spec
        for case in CASES.values():
            get_train_spec(case.model)  # imports it, for all ranks
        self.assertEqual(ranks.processes(rank_main, WORLD), [0] * WORLD)

    def test_measured_models_are_built_before_the_adaptor_and_run_in_the_order_that_was_asked_for(self):
        built, device = [], mock.Mock(allocated=lambda: 0, device=torch.device("cpu"))
        framework = mock.Mock(ways=training_models.Torchtitan.ways)
        framework.build.side_effect = lambda name: built.append(name) or types.SimpleNamespace(name=name,
                                                                                                   like=mock.Mock())
        with mock.patch.object(training.Turns, "agreed", lambda turns, bad: bool(bad)), \
             mock.patch.object(dist, "get_rank", lambda: 1):
            turns = training.Turns(device, framework, None)
            turns.build(["perseus_compiled", "torchtitan_compiled"])
        self.assertEqual(built, ["torchtitan_compiled", "perseus_compiled"])
        self.assertEqual(len(turns.waiting), 2)
        self.assertEqual(turns.waiting[0].like.call_count, 1)  # the one that was built last took the other's weights


if __name__ == "__main__":
    ranks.main()
