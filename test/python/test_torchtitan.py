# SPDX-License-Identifier: Apache-2.0
"""Models of torchtitan under its own parallelize functions, whose products are ours, compared with torchtitan's tensor
parallelism over gloo. Ranks are processes, each on an emulated node of its own; run.py runs it on the software NIC."""
import copy
import importlib
import importlib.machinery
import os
import sys
import unittest
from unittest import mock

import ranks
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention

import perseus

WORLD, STEPS, SEQUENCE = 2, 3, 16
SIZES = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 96}
MODELS = {"llama3": ("parallelize_llama", {"multiple_of": 32}),
          "qwen3": ("parallelize_qwen3", {"hidden_dim": 96, "head_dim": 16})}


def stand_ins():
    """torchtitan imports these for kernels of MoE (triton), logs and data sets, which nothing here runs: 300 MB."""
    for name in ("torchtitan.models.moe.kernels", "torch.utils.tensorboard", "datasets", "datasets.distributed"):
        sys.modules[name] = mock.MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None), __path__=[])


def attend(self, *heads, **options):
    """What torchtitan's module of attention does; DTensors do not know the CPU's kernel of it."""
    if not isinstance(heads[0], DTensor):
        return scaled_dot_product_attention(*heads, is_causal=True, **options)
    y = scaled_dot_product_attention(*(t.to_local() for t in heads), is_causal=True, **options)
    return DTensor.from_local(y, heads[0].device_mesh, heads[0].placements, run_check=False)


def train(name, state):
    """Losses, gradients of the first step, what multiplies by our ops; torchtitan's trainer without its data. state:
    None, or the weights."""
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.models import attention
    from torchtitan.protocols.train_spec import get_train_spec
    from torchtitan.tools.utils import set_default_dtype
    parallel_dims.device_type = "cpu"  # it takes cuda where it finds nothing
    attention.ScaledDotProductAttentionWrapper.forward = attend
    spec, (parallelize, sizes) = get_train_spec(name), MODELS[name]
    config = JobConfig()
    config.training.seq_len, config.training.dtype = SEQUENCE, "bfloat16"
    config.parallelism.tensor_parallel_degree = WORLD
    arguments = type(next(iter(spec.model_args.values())))(**SIZES, **sizes, max_seq_len=SEQUENCE)
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=WORLD, pp=1, ep=1, etp=1, world_size=WORLD)
    with torch.device("meta"), set_default_dtype(torch.bfloat16):
        model = spec.model_cls(arguments)
    model = importlib.import_module(f"torchtitan.models.{name}").__dict__[parallelize](model, dims, config)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    if state:
        model.load_state_dict(state)
    state = copy.deepcopy(model.state_dict())
    optimizer, losses, grads = torch.optim.SGD(model.parameters(), lr=0.1), [], {}
    for step in range(STEPS):
        tokens = torch.randint(0, 96, (2, SEQUENCE + 1), generator=torch.Generator().manual_seed(step % 2))
        with dist_utils.get_train_context(True)():
            loss = cross_entropy_loss(model(tokens[:, :-1]), tokens[:, 1:]) / tokens[:, 1:].numel()
            optimizer.zero_grad()
            loss.backward()
        if not grads:
            grads = {key: p.grad.full_tensor().float() for key, p in model.named_parameters()}
        dist_utils.clip_grad_norm_(list(model.parameters()), 1.0)
        optimizer.step()
        losses.append((loss.full_tensor() if isinstance(loss, DTensor) else loss).item())
    return losses, grads, {key.rpartition(".")[2] for key, m in model.named_modules()
                           if hasattr(m, "perseus")}, state


def compared():
    from torchtitan.config import ConfigManager
    wanted = {name: train(name, None) for name in MODELS}
    command = ranks.page("torchtitan", "", [("\\\n", "")]).split("run_train.sh")[1].split()
    options = ConfigManager().parse_args(command)
    yield "the options of the page", options.parallelism.tensor_parallel_degree == WORLD
    importlib.import_module(options.experimental.custom_import)  # as torchtitan's trainer does
    for name, (wanted_losses, wanted_grads, theirs, state) in wanted.items():
        with mock.patch.object(perseus.nn, "column_linear", wraps=perseus.nn.column_linear) as alone:
            losses, grads, ours, _ = train(name, state)
        yield f"{name}: {alone.call_count} products alone, and the others share a gather", alone.call_count == STEPS
        yield f"{name}: torchtitan's own has no product of ours", not theirs
        yield f"{name}: ours are {ours}", ours == {"wq", "wk", "wv", "wo", "w1", "w2", "w3", "output"}
        yield (f"{name}: losses {losses}, torchtitan's {wanted_losses}",
               all(abs(a - b) < 0.01 * b for a, b in zip(losses, wanted_losses)) and losses[2] < losses[0])
        least = 0.05 * max(float(g.square().mean().sqrt()) for g in wanted_grads.values())
        for key, g in grads.items():
            error = float((g - wanted_grads[key]).abs().max() /
                          wanted_grads[key].square().mean().sqrt().clamp_min(least))
            yield f"{name}: gradient of {key}: {error:g}", error < 0.25


def rank_main():
    stand_ins()
    dist.init_process_group("gloo")
    os._exit(ranks.judge("torchtitan", compared()))


class Torchtitan(unittest.TestCase):
    def test_models_train_with_the_losses_and_gradients_that_torchtitan_alone_has(self):
        self.assertEqual(ranks.processes(__file__, WORLD), [0] * WORLD)


if __name__ == "__main__":
    rank_main() if sys.argv[1:2] == ["rank"] else ranks.main()
