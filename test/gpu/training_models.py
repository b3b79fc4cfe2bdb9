# SPDX-License-Identifier: Apache-2.0
"""Models of the frameworks with random weights for training.py, under each framework's own parallelism and under ours.

A way is one model, its optimizer and one loss a step. build() makes it; its adaptor, where it has one, is imported
then and exchanges parts of the framework for all models that are built later. So `ways` names those of a framework
alone first, and this order is that of building. The first call of step() compiles what is to be compiled.
"""
import importlib
import importlib.machinery
import sys
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import perseus

RATE, WARM_STEPS = 1e-4, 30  # without a warm-up losses jump, and then differ between ways of one framework too
# hidden, heads, heads of keys, inner, vocabulary; experts, top_k, inner of experts
LLAMA_8B = {"hidden": 4096, "heads": 32, "kv_heads": 8, "inner": 14336, "vocabulary": 128256}
QWEN_30B = {"hidden": 2048, "heads": 32, "kv_heads": 4, "inner": 768, "vocabulary": 151936, "experts": 128, "top_k": 8}
TINY = {"hidden": 64, "heads": 4, "kv_heads": 2, "inner": 96, "vocabulary": 128}
TINY_EXPERTS = {**TINY, "experts": 4, "top_k": 2}
MODELS = {"llama3-8b": (LLAMA_8B, TINY), "qwen3-30b-a3b": (QWEN_30B, TINY_EXPERTS)}


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


class Way:
    """scaled: what the loss of a step is multiplied by, since torchtitan adds gradients of data-parallel ranks up."""

    def __init__(self, name, model, loss_of, device, clip=torch.nn.utils.clip_grad_norm_):
        self.name, self.model, self.loss_of, self.clip = name, model, loss_of, clip
        parameters = list(model.parameters())
        kinds = [[p for p in parameters if isinstance(p, DTensor) == split] for split in (True, False)]
        self.optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds if kind], lr=RATE, betas=(0.9, 0.95),
                                           fused=device.type == "cuda")
        self.done = 0

    def step(self, tokens, labels):
        self.done += 1
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * min(1, self.done / WARM_STEPS)
        loss = self.loss_of(tokens, labels)
        self.clip([p for p in self.model.parameters() if p.grad is not None], 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def like(self, other):
        """Takes the weights of another way."""
        with torch.no_grad():
            for p, q in zip(self.model.parameters(), other.model.parameters(), strict=True):
                local(p).copy_(local(q))


# ---- torchtitan ----

def stand_ins():
    """torchtitan imports these for logs and data sets, which nothing here uses."""
    for name in ("torch.utils.tensorboard", "datasets", "datasets.distributed"):
        sys.modules[name] = mock.MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None), __path__=[])


class Torchtitan:
    ways = ("torchtitan", "torchtitan_compiled", "torchtitan_async_tp", "perseus_inductor", "perseus",
            "perseus_compiled")

    def __init__(self, options, device):
        if device.type == "cuda":
            stand_ins()
        else:  # there is no triton
            importlib.import_module("test_torchtitan").stand_ins()
        from torchtitan.distributed import ParallelDims, parallel_dims
        self.options, self.device = options, device
        parallel_dims.device_type = device.type
        world = dist.get_world_size()
        self.data_parallel = world // options.tp
        self.dims = ParallelDims(dp_replicate=1, dp_shard=self.data_parallel, cp=1, tp=options.tp, pp=1, ep=options.ep,
                                 etp=1, world_size=world)
        self.dims.build_mesh()
        self.groups = [perseus.init(self.dims.get_mesh(name), timeout_ms=60000)
                       for name, size in (("tp", options.tp), ("ep", options.ep)) if size > 1]
        self.data_rank = dist.get_rank() // options.tp

    def arguments(self, spec, sizes):
        kind = type(next(iter(spec.model_args.values())))
        made = {"dim": sizes["hidden"], "n_layers": self.options.layers, "n_heads": sizes["heads"],
                "n_kv_heads": sizes["kv_heads"], "vocab_size": sizes["vocabulary"],
                "max_seq_len": self.options.sequence}
        if "experts" in sizes:
            from torchtitan.models.moe import MoEArgs
            moe = MoEArgs(num_experts=sizes["experts"], num_shared_experts=0, top_k=sizes["top_k"],
                          score_func="softmax", route_norm=True, score_before_experts=False,
                          use_grouped_mm=self.device.type == "cuda")
            return kind(**made, head_dim=128 if self.device.type == "cuda" else 16, qk_norm=True,
                        hidden_dim=sizes["inner"], moe_enabled=True, moe_inter_dim=sizes["inner"], moe_args=moe)
        multiple = 1024 if self.device.type == "cuda" else 32
        return kind(**made, multiple_of=multiple, ffn_dim_multiplier=1.3, rope_theta=500000)

    def config(self, name):
        from torchtitan.config import JobConfig
        config = JobConfig()
        config.training.seq_len, config.training.dtype = self.options.sequence, self.options.dtype
        config.parallelism.tensor_parallel_degree = self.options.tp
        config.parallelism.expert_parallel_degree = self.options.ep
        config.activation_checkpoint.mode = self.options.checkpoint
        config.compile.enable = name.partition("_")[2] in ("compiled", "async_tp", "inductor")
        config.parallelism.enable_async_tensor_parallel = name == "torchtitan_async_tp"
        patches = {"_micro_pipeline_tp": name == "torchtitan_async_tp", "post_grad_custom_post_pass":
                   perseus.inductor.fused_products() if name == "perseus_inductor" else None}
        config.compile.backend = backend(patches) if self.device.type == "cuda" else "aot_eager"
        return config

    def build(self, name):
        from torchtitan.components.loss import build_cross_entropy_loss
        from torchtitan.distributed import utils as dist_utils
        from torchtitan.protocols.train_spec import get_train_spec
        from torchtitan.tools.utils import set_default_dtype
        family = self.options.model.partition("-")[0]
        spec, config = get_train_spec(family), self.config(name)
        if name in ("perseus", "perseus_compiled"):
            importlib.import_module("perseus.integrations.torchtitan")
        sizes = MODELS[self.options.model][self.device.type != "cuda"]
        arguments = self.arguments(spec, sizes)
        if name == "torchtitan_async_tp" and self.device.type == "cuda":
            import torch.distributed._symmetric_memory as symm_mem
            symm_mem.enable_symm_mem_for_group(self.dims.get_mesh("tp").get_group().group_name)
        with torch.device("meta"), set_default_dtype(getattr(torch, config.training.dtype)):
            model = spec.model_cls(arguments)
        model = spec.parallelize_fn(model, self.dims, config)
        torch._inductor.config._micro_pipeline_tp = False  # as each way's back end says
        for module in model.modules() if self.device.type != "cuda" else ():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other
        if config.compile.enable:  # the first layer is no graph of its own, so compiling takes half the time
            model.tok_embeddings.register_forward_hook(lambda module, inputs, y: y.clone())
        if name.startswith("torchtitan") and any(hasattr(module, "perseus") for module in model.modules()):
            raise RuntimeError(f"{name} has modules of perseus: it must be built before the adaptor is imported")
        model.to_empty(device=self.device)
        torch.manual_seed(0)
        with torch.no_grad():
            model.init_weights(buffer_device=self.device if "experts" in sizes else None)
        config.compile.backend = "inductor" if self.device.type == "cuda" else "aot_eager"  # one loss for all ways
        cross_entropy = build_cross_entropy_loss(config)
        total = self.options.batch * self.options.sequence * self.data_parallel

        def loss_of(tokens, labels):
            with dist_utils.get_train_context(self.options.tp > 1)():
                loss = cross_entropy(model(tokens), labels) / total
                loss.backward()
            return (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach()

        def clip(parameters, norm):
            dist_utils.clip_grad_norm_(parameters, norm, ep_enabled=self.options.ep > 1)
        return Way(name, model, loss_of, self.device, clip)

    def loss(self, value):
        """The mean over all ranks' tokens."""
        if self.data_parallel > 1:
            dist.all_reduce(value, group=self.dims.get_mesh("fsdp").get_group())
        return value


def backend(patches):
    """A back end of torch.compile of its own: graphs of two ways are then never taken for each other."""
    from torch._inductor.compile_fx import compile_fx

    def compiled(graph, inputs):
        return compile_fx(graph, inputs, config_patches=patches)
    return compiled


# ---- transformers ----

class Transformers:
    ways = ("transformers", "perseus")

    def __init__(self, options, device):
        self.options, self.device = options, device
        self.data_rank = dist.get_rank() // options.tp

    def config(self, sizes):
        from transformers import LlamaConfig, Qwen3MoeConfig
        made = {"hidden_size": sizes["hidden"], "intermediate_size": sizes["inner"], "use_cache": False,
                "num_hidden_layers": self.options.layers, "num_attention_heads": sizes["heads"],
                "num_key_value_heads": sizes["kv_heads"], "vocab_size": sizes["vocabulary"],
                "max_position_embeddings": self.options.sequence, "tie_word_embeddings": False}
        if "experts" not in sizes:
            return LlamaConfig(**made)
        return Qwen3MoeConfig(**made, num_experts=sizes["experts"], num_experts_per_tok=sizes["top_k"],
                              moe_intermediate_size=sizes["inner"], norm_topk_prob=True,
                              head_dim=128 if self.device.type == "cuda" else 16)

    def build(self, name):
        from transformers import LlamaForCausalLM, Qwen3MoeForCausalLM
        from transformers.distributed import DistributedConfig
        if name == "perseus":
            importlib.import_module("perseus.integrations.transformers").enable()
        config, ep = self.config(MODELS[self.options.model][self.device.type != "cuda"]), self.options.ep
        parallel = {"tp_size": self.options.tp}
        if ep > 1:
            parallel.update(ep_size=ep, ep_implementation="perseus" if name == "perseus" else "all_to_all")
        if dist.get_world_size() > self.options.tp:
            parallel["fsdp_size"] = dist.get_world_size() // self.options.tp
        torch.manual_seed(0)
        model = (Qwen3MoeForCausalLM if ep > 1 else LlamaForCausalLM).from_pretrained(
            None, config=config, state_dict={}, dtype=torch.bfloat16, attn_implementation="sdpa",
            distributed_config=DistributedConfig(**parallel))
        model.train()

        def loss_of(tokens, labels):
            logits = model(input_ids=tokens).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
            loss.backward()
            return loss.detach()
        return Way(name, model, loss_of, self.device, self.clip)

    def clip(self, parameters, norm):
        """torch's wants tensors of one mesh, or plain tensors alone."""
        kinds = {}
        for p in parameters:
            kinds.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
        norms = [torch.nn.utils.get_total_norm([p.grad for p in kind]) for kind in kinds.values()]
        total = torch.stack([t.full_tensor() if isinstance(t, DTensor) else t for t in norms]).norm()
        for kind in kinds.values():
            torch.nn.utils.clip_grads_with_norm_(kind, norm, total)

    def loss(self, value):
        return mean_of_ranks(value)


def mean_of_ranks(value):
    dist.all_reduce(value)
    return value / dist.get_world_size()


# ---- Megatron-core ----

class Megatron:
    ways = ("megatron", "perseus")

    def __init__(self, options, device):
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.transformer.moe import moe_utils
        self.options, self.device, self.data_rank = options, device, dist.get_rank() // options.tp
        if device.type != "cuda":
            import contextlib
            torch.cuda.current_device = lambda: "cpu"
            type(tensor_parallel.get_cuda_rng_tracker()).fork = lambda *names: contextlib.nullcontext()
            self.no_streams = importlib.import_module("test_megatron").no_streams()
            self.no_streams.__enter__()
        moe_utils.te_general_gemm = None  # the router has a name of TransformerEngine's
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=options.tp,
                                                 expert_model_parallel_size=options.ep, expert_tensor_parallel_size=1)
        if device.type == "cuda":
            tensor_parallel.model_parallel_cuda_manual_seed(1)
        self.group = (parallel_state.get_expert_model_parallel_group() if options.ep > 1 else
                      parallel_state.get_tensor_model_parallel_group())
        perseus.init(self.group, timeout_ms=60000)

    def config(self, sizes):
        from megatron.core.transformer.transformer_config import TransformerConfig
        experts = {"num_moe_experts": sizes["experts"], "moe_router_topk": sizes["top_k"],
                   "moe_ffn_hidden_size": sizes["inner"], "expert_model_parallel_size": self.options.ep,
                   "expert_tensor_parallel_size": 1, "moe_token_dispatcher_type": "alltoall",
                   "moe_router_load_balancing_type": "none",
                   "kv_channels": 128 if self.device.type == "cuda" else 16} if "experts" in sizes else {}
        return TransformerConfig(
            num_layers=self.options.layers, hidden_size=sizes["hidden"], num_attention_heads=sizes["heads"],
            num_query_groups=sizes["kv_heads"], ffn_hidden_size=sizes["inner"], gated_linear_unit=True,
            activation_func=F.silu, add_bias_linear=False, normalization="RMSNorm",
            tensor_model_parallel_size=self.options.tp, sequence_parallel=self.options.tp > 1, bf16=True,
            params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
            use_cpu_initialization=self.device.type != "cuda", hidden_dropout=0.0, attention_dropout=0.0,
            masked_softmax_fusion=False, bias_dropout_fusion=False, bias_activation_fusion=False,
            gradient_accumulation_fusion=False, **experts)

    def build(self, name):
        from megatron.core.distributed import (DistributedDataParallel, DistributedDataParallelConfig,
                                               finalize_model_grads)
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer import transformer_block
        norm, attention = megatron_modules()
        transformer_block.LayerNormImpl = norm
        sizes = MODELS[self.options.model][self.device.type != "cuda"]
        spec = get_gpt_layer_local_spec(num_experts=sizes.get("experts"))
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
        spec.submodules.self_attention.submodules.core_attention = attention
        if name == "perseus":
            spec = importlib.import_module("perseus.integrations.megatron").fused(spec)
        config, sequence = self.config(sizes), self.options.sequence
        model = GPTModel(config, spec, vocab_size=sizes["vocabulary"], max_sequence_length=sequence,
                         position_embedding_type="rope", rotary_base=500000,
                         share_embeddings_and_output_weights=False).to(self.device, torch.bfloat16)
        wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=False), model)
        positions = torch.arange(sequence, device=self.device).view(1, -1)

        def loss_of(tokens, labels):
            wrapped.zero_grad_buffer()
            loss = wrapped(tokens, positions, None, labels=labels).mean()
            loss.backward()
            finalize_model_grads([wrapped])
            for p in model.parameters():
                p.grad = p.main_grad
            return loss.detach()

        def split(p):
            return not getattr(p, "allreduce", True) if self.options.ep > 1 else getattr(p, "tensor_model_parallel",
                                                                                         False)

        def clip(parameters, norm):  # norms and embeddings that all ranks have are counted once, as Megatron does
            own, alike = [p.grad for p in parameters if split(p)], [p.grad for p in parameters if not split(p)]
            total = torch.stack(torch._foreach_norm(own)).float().square().sum()
            dist.all_reduce(total, group=self.group)
            total = (total + torch.stack(torch._foreach_norm(alike)).float().square().sum()).sqrt()
            torch._foreach_mul_([p.grad for p in parameters], (norm / (total + 1e-6)).clamp(max=1.0).to(torch.bfloat16))
        return Way(name, model, loss_of, self.device, clip)

    def loss(self, value):
        return mean_of_ranks(value)


def megatron_modules():
    """Megatron's local spec has no RMS norm that knows sequence parallelism (that is TransformerEngine's or Apex's),
    and its attention keeps all scores. Both ways get torch's."""
    class Norm(torch.nn.RMSNorm):
        def __init__(self, config, hidden_size, eps=1e-5):
            super().__init__(hidden_size, eps)
            for p in self.parameters():
                p.sequence_parallel = config.sequence_parallel

    class Attention(torch.nn.Module):
        def __init__(self, *arguments, **options):
            super().__init__()

        def forward(self, query, key, value, *arguments, **options):
            q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return y.permute(2, 0, 1, 3).flatten(2)
    return Norm, Attention


FRAMEWORKS = {"torchtitan": Torchtitan, "transformers": Transformers, "megatron": Megatron}
