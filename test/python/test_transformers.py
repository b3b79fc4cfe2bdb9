# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face transformers whose products and experts are ours, compared with transformers' own parallelism
over gloo. Ranks are processes, each on an emulated node of its own; run.py runs it on the software NIC."""
import os
import tempfile
import unittest

import ranks
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

import perseus.integrations.transformers as adaptor

WORLD, STEPS = 2, 3
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16}


def train(model, **parallel):
    """Losses, the gradients of the first step, and the names of the modules that multiply by our ops."""
    kind, folder = model
    model = kind.from_pretrained(folder, dtype=torch.bfloat16, distributed_config=DistributedConfig(**parallel))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.2), []
    alone = parallel["tp_size"] == 1  # a rank has a batch of its own
    for step in range(STEPS):
        seed = step % 2 + (10 * dist.get_rank() if alone else 0)
        tokens = torch.randint(0, 100, (2, 9 + 4 * dist.get_rank() * alone),
                               generator=torch.Generator().manual_seed(seed))
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            grads = {name: p.grad.full_tensor().float() if isinstance(p.grad, DTensor) else p.grad.float().clone()
                     for name, p in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return losses, grads, {name.rpartition(".")[2] for name, m in model.named_modules() if type(m).__name__ == "_Split"}


def compared(ours, wanted):
    """wanted: by transformers alone."""
    (losses, grads, _), (wanted_losses, wanted_grads, theirs) = ours, wanted
    yield (f"losses {losses}, transformers' {wanted_losses}",
           all(abs(a - b) < 0.01 * b for a, b in zip(losses, wanted_losses)))
    yield "losses fall", losses[2] < losses[0]
    yield "transformers' own has no product of ours", not theirs
    least = 0.05 * max(float(g.square().mean().sqrt()) for g in wanted_grads.values())
    for name, g in grads.items():
        error = float((g - wanted_grads[name]).abs().max() /
                      wanted_grads[name].square().mean().sqrt().clamp_min(least))
        yield f"gradient of {name}: {error:g}", error < 0.25


def made(folder):
    """A Llama, and a Qwen3-MoE whose vocabulary the ranks do not divide, and whose second layer sends all tokens to the
    experts of one rank."""
    models = [(LlamaForCausalLM, LlamaConfig(vocab_size=128, **SIZES)),
              (Qwen3MoeForCausalLM, Qwen3MoeConfig(vocab_size=131, **SIZES, **EXPERTS))]
    torch.manual_seed(0)
    for kind, config in models if dist.get_rank() == 0 else ():
        model = kind(config)
        if kind is Qwen3MoeForCausalLM:
            torch.nn.init.zeros_(model.model.layers[1].mlp.gate.weight)
        model.save_pretrained(os.path.join(folder, kind.__name__))
    dist.barrier()
    return [(kind, os.path.join(folder, kind.__name__)) for kind, _ in models]


def everything(folder):
    llama, qwen = made(folder)
    together, apart = {"tp_size": 2, "ep_size": 2}, {"tp_size": 1, "fsdp_size": 2, "ep_size": 2}
    wanted = [train(llama, tp_size=2)] + [train(qwen, ep_implementation="all_to_all", **p) for p in (together, apart)]
    ran = {}
    exec(ranks.page("transformers", "python", [("meta-llama/Llama-3.1-8B", llama[1]), ("4096", "16")]), ran)
    yield "the program of the page", 0 < ran["loss"].item() < 10
    found = train(llama, tp_size=2)
    yield from ((f"Llama: {what}", good) for what, good in compared(found, wanted[0]))
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    yield f"Llama: ours are {found[2]}", found[2] == attention | {"gate_proj", "up_proj", "down_proj", "lm_head"}
    found = train(qwen, ep_implementation="perseus", **together)
    yield from ((f"experts in one launch: {what}", good) for what, good in compared(found, wanted[1]))
    yield f"experts in one launch: ours are {found[2]}", found[2] == attention
    adaptor._ACTIVATIONS.clear()  # an activation that the kernels do not have
    yield "a rank's experts get no token", sorted(torch.zeros(1, 4).topk(2).indices[0].tolist()) in ([0, 1], [2, 3])
    found = train(qwen, ep_implementation="perseus", **apart)
    yield from ((f"experts of their own, other batches: {what}", good) for what, good in compared(found, wanted[2]))


def rank_main(folder):
    dist.init_process_group("gloo")
    os._exit(ranks.judge("transformers", everything(folder)))


class Transformers(unittest.TestCase):
    def test_models_train_with_the_losses_and_gradients_that_transformers_alone_has(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual(ranks.processes(rank_main, WORLD, folder), [0] * WORLD)


if __name__ == "__main__":
    ranks.main()
