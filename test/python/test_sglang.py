# SPDX-License-Identifier: Apache-2.0
"""MoE layers of SGLang's own classes whose experts are ours, on emulated GPUs, compared with torch's products. SGLang's
Python is the real one; what it imports for HTTP, images, kernels and schedulers are stand-ins."""
import threading
import types
import unittest
from unittest import mock

import moe_reference
import ranks
import torch
from ranks import random
from stand_ins import installed, stand_in

stand_in("zmq", "orjson", "pybase64", "requests", "triton", "PIL", "starlette", "IPython", "torchvision", "tvm_ffi",
         "einops", "compressed_tensors", "gguf", "aiohttp", "sglang.srt.configs", "sglang.kernels.jit",
         "sglang.srt.managers", "sglang.srt.entrypoints", "sglang.srt.model_executor.forward_batch_info")
import triton  # noqa: E402

triton.__version__ = "3.6.0"  # which torch's compiler asks for
from sglang.srt import plugins, runtime_context  # noqa: E402
from sglang.srt.arg_groups.choices import MOE_RUNNER_BACKEND_CHOICES  # noqa: E402
from sglang.srt.layers import dp_attention  # noqa: E402
from sglang.srt.layers.moe import utils  # noqa: E402
from sglang.srt.layers.moe.ep_moe import layer as ep_moe  # noqa: E402
from sglang.srt.layers.moe.fused_moe_triton import layer as fused_moe  # noqa: E402
from sglang.srt.layers.moe.topk import StandardTopKOutput  # noqa: E402
from sglang.srt.layers.quantization.fp8 import Fp8Config  # noqa: E402

BEFORE = [ep_moe.get_moe_impl_class]  # in a list, which the hooks do not look into
with installed():
    plugins.load_plugins()
from perseus.integrations import sglang as adaptor, sglang_moe  # noqa: E402

EXPERTS, TOP_K, HIDDEN, INNER, MOST = 4, 2, 128, 128, 16


class Mine:
    """SGLang's parallel context, of which each thread has a rank of its own."""

    def __init__(self, of_thread, whole):
        self.of_thread, self.whole = of_thread, whole

    def __getattr__(self, name):
        mine = getattr(self.of_thread, "values", {})
        return mine[name] if name in mine else getattr(self.whole, name)


class Sglang(unittest.TestCase):
    def setUp(self):
        self.of_thread = threading.local()

    def server(self, tensor=1, world=2, **options):
        """SGLang's state in a server with these options. tensor: ranks that share the tokens of a batch."""
        asked = {"moe_a2a_backend": "deepep", "moe_runner_backend": "perseus", "chunked_prefill_size": MOST * tensor,
                 "tp_size": world, "ep_size": world, "attn_dp_size": world // tensor, **options}
        self.enterContext(runtime_context.get_context().override_server_args(**asked))
        utils.initialize_moe_config()
        whole = runtime_context._PARALLEL
        self.enterContext(mock.patch.object(runtime_context, "_PARALLEL", Mine(self.of_thread, whole)))
        self.entered(types.SimpleNamespace(rank=0, world=world, process_group=None), tensor)

    def entered(self, group, tensor=1):
        """This thread is `group`'s rank."""
        same = types.SimpleNamespace(device_group=group.process_group)
        self.of_thread.values = {"moe_ep_group": same, "tp_group": same, "moe_ep_size": group.world,
                                 "moe_ep_rank": group.rank, "moe_tp_size": 1, "moe_tp_rank": 0,
                                 "attn_tp_size": tensor}

    def made(self, scaled=False, **more):
        quant = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic",
                          weight_block_size=[128, 128]) if scaled else None
        sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "intermediate_size": INNER, **more}
        return ep_moe.get_moe_impl_class(quant)(layer_id=0, params_dtype=torch.bfloat16, quant_config=quant, **sizes)

    def check(self, counts, plans, scaled=False, tensor=1):
        """Each of `counts` is a step: what SGLang says of the tokens of data-parallel ranks. plans: the max_tokens of
        those that are taken."""
        self.server(tensor)
        weights, seen = moe_reference.matrices(EXPERTS, HIDDEN, INNER, scaled), []

        def body(group):
            self.entered(group, tensor)
            layer, errors, local = self.made(scaled), [], EXPERTS // 2
            self.assertIsInstance(layer, sglang_moe.PerseusMoE)
            for name, whole in zip(("w13_weight", "w2_weight", "w13_weight_scale_inv", "w2_weight_scale_inv"), weights):
                getattr(layer, name).data.copy_(whole[group.rank * local:(group.rank + 1) * local])
            layer.quant_method.process_weights_after_loading(layer)
            plan = layer.perseus.plan
            with mock.patch.object(layer.perseus, "plan", lambda most: seen.append(plan(most)) or seen[-1]):
                for number, step in enumerate(counts):
                    arrived.wait()
                    dp_attention.set_dp_buffer_len(0, 0, False, list(step))
                    count = step[group.rank] if tensor == 1 else step[0] // tensor
                    x = random(group.rank, count, HIDDEN, seed=number)
                    logits = random(group.rank, count, EXPERTS, seed=50 + number).float()
                    router, chosen = logits.softmax(-1).topk(TOP_K)
                    if count:
                        chosen[-1, 1] = -1  # as of rows that only fill a batch up
                    y = layer(x.clone(), StandardTopKOutput(router, chosen.to(torch.int32), logits))
                    want = moe_reference.layer(x, chosen.clamp(min=0), router * (chosen >= 0), weights)
                    errors.append(float((y.float() - want).norm() / want.norm().clamp(min=1e-6)))
                    arrived.wait()
            group.check()
            return errors
        arrived = threading.Barrier(2)
        self.addCleanup(dp_attention.set_dp_buffer_len, None, None, False)
        for errors in ranks.run(2, body):
            self.assertLess(max(errors), 0.06 if scaled else 0.01)
        self.assertEqual(sorted({p.sizes[0] for p in seen}), plans)

    def test_ranks_with_tokens_of_their_own_take_the_plan_of_the_longest_batch(self):
        self.check([(3, 0), (9, 1)], [8, 16])

    def test_fp8_checkpoints_keep_their_blocks(self):
        self.check([(3, 7)], [8], scaled=True)

    def test_tokens_that_tensor_parallel_ranks_have_split_go_from_each(self):
        self.check([(18,)], [16], tensor=2)

    def test_without_the_name_of_the_runner_sglang_stays_as_it_is(self):
        self.server(moe_runner_backend="triton")
        self.assertIs(ep_moe.get_moe_impl_class(None), ep_moe.DeepEPMoE)
        with mock.patch.object(fused_moe, "MaybeTboDeepEPDispatcher") as theirs:
            made = fused_moe.create_moe_dispatcher(mock.Mock(), quant_method=None)
        self.assertIs(made, theirs.return_value)

    def test_a_layer_that_the_kernels_cannot_take_is_an_error_that_says_why(self):
        for said, options, layer in (
                ("--moe-a2a-backend deepep; it is none", {"moe_a2a_backend": "none"}, {}),
                ("biases of experts", {}, {"with_bias": True}),
                ("SwiGLU", {}, {"swiglu_limit": 7.0}),
                ("hidden size 252", {}, {"hidden_size": 252}),
                ("activation 'situ'", {}, {"activation": "situ"}),
                ("--enable-eplb", {"enable_eplb": True}, {}),
                ("--enable-two-batch-overlap", {"enable_two_batch_overlap": True}, {}),
                ("--chunked-prefill-size is -1", {"chunked_prefill_size": -1}, {})):
            with self.subTest(said), self.assertRaisesRegex(ValueError, said):
                self.server(**options)
                self.made(**layer)

    def test_sglang_has_loaded_the_entry_point(self):
        self.assertIn("perseus", MOE_RUNNER_BACKEND_CHOICES)
        self.assertIsNot(ep_moe.get_moe_impl_class, BEFORE[0])
        adaptor.register()  # a second time
        self.assertEqual(MOE_RUNNER_BACKEND_CHOICES.count("perseus"), 1)


if __name__ == "__main__":
    ranks.main()
