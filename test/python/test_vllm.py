# SPDX-License-Identifier: Apache-2.0
"""MoE layers of vLLM's own classes whose experts are ours, on emulated GPUs, compared with torch's products. vLLM's
Python is the real one; what it imports for HTTP, images and the like are stand-ins."""
import os
import threading
import time
import types
import unittest
from unittest import mock

import moe_reference
import ranks
import torch
from ranks import random
from stand_ins import installed, stand_in

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
stand_in("zmq", "vllm.distributed.kv_transfer", "urllib3", "cbor2", "aiohttp", "requests", "openai_harmony", "openai",
         "uvloop", "cpuinfo", "PIL", "pybase64", "cachetools", "einops", "prometheus_client",
         "compressed_tensors")
from vllm import forward_context, plugins  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from vllm.config import ParallelConfig, SchedulerConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.device_allocator import sleep_mode_backend  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.distributed.device_communicators.base_device_communicator import All2AllManagerBase  # noqa: E402
from vllm.model_executor.custom_op import op_registry_oot  # noqa: E402
from vllm.model_executor.layers.fused_moe import layer as vllm_layer  # noqa: E402
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method  # noqa: E402
from vllm.model_executor.layers.quantization import get_quantization_config  # noqa: E402

import perseus  # noqa: E402
import vllm.ir  # noqa: E402
from vllm.config.utils import Range  # noqa: E402
from vllm.utils.import_utils import resolve_obj_by_qualname  # noqa: E402

EXPERTS, TOP_K, HIDDEN, INNER, MOST = 4, 2, 128, 128, 16

with installed():
    plugins.load_general_plugins()
import perseus.integrations.vllm as adaptor  # noqa: E402
from perseus.integrations import deep_ep  # noqa: E402

deep_ep.install()
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig  # noqa: E402
from vllm.model_executor.layers.fused_moe.prepare_finalize import deepep_ht, deepep_ll  # noqa: E402
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate  # noqa: E402


class Mine:
    """Groups of vLLM's, of which each thread has a rank of its own: expert-, data- and tensor-parallel ones."""

    def __init__(self, name, of_thread):
        self.name, self.of_thread = name, of_thread

    def __getattr__(self, name):
        return getattr(self.of_thread.groups[self.name], name)


def entered(of_thread, group, tensor=None):
    """This thread is `group`'s rank in all groups; or, with `tensor` ranks in each tensor-parallel one, in _EP only."""
    def all_reduce(x):
        group.process_group.allreduce([x]).wait()
        return x
    whole = group.rank, group.world
    of_tensor, of_data = ((group.rank % tensor, tensor), (group.rank // tensor, group.world // tensor)) if tensor else (
        whole, whole)
    of_thread.groups = {
        name: types.SimpleNamespace(world_size=world, rank_in_group=rank, rank=rank, device_group=group.process_group,
                                    cpu_group=group.process_group,
                                    all_reduce=all_reduce, unique_name="tp:0")
        for name, (rank, world) in {"_EP": whole, "_DP": of_data, "_TP": of_tensor, "_PCP": whole}.items()}


def weights(scaled):
    return moe_reference.matrices(EXPERTS, HIDDEN, INNER, scaled)


def route(hidden_states, gating_output, topk, renormalize):
    values, chosen = gating_output.float().softmax(-1).topk(topk)
    return values, chosen.to(torch.int32)


class Vllm(unittest.TestCase):
    def setUp(self):
        self.of_thread = threading.local()
        for name in ("_EP", "_DP", "_TP", "_PCP"):
            self.enterContext(mock.patch.object(parallel_state, name, Mine(name, self.of_thread)))

    def config(self, asked):
        scheduler = SchedulerConfig(max_model_len=MOST, is_encoder_decoder=False, max_num_batched_tokens=MOST,
                                    max_num_seqs=MOST)
        config = VllmConfig(parallel_config=ParallelConfig(enable_expert_parallel=True),
                            scheduler_config=scheduler, additional_config={} if asked is None else {"perseus": asked})
        self.enterContext(set_current_vllm_config(config))
        return config

    def made(self, rank=0, world=2, scaled=False, load=True, **options):
        """A MoE layer of vLLM's with its weights."""
        parallel = {"tp_size": 1, "dp_size": 2, **options}
        quant = get_quantization_config("fp8")(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic",
                                               weight_block_size=[128, 128]) if scaled else None
        runner = vllm_layer.FusedMoEFactory(
            num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN, intermediate_size=INNER, params_dtype=torch.bfloat16,
            prefix=f"layer{rank}", pcp_size=1, custom_routing_function=route, quant_config=quant, **parallel)
        if not load:
            return runner
        local, experts = EXPERTS // world, runner.routed_experts
        names = ["w13_weight", "w2_weight", "w13_weight_scale_inv", "w2_weight_scale_inv"]
        for name, whole in zip(names, weights(scaled)):
            getattr(experts, name).data.copy_(whole[rank * local:(rank + 1) * local])
        experts.quant_method.process_weights_after_loading(experts)
        return runner

    def check(self, counts, plans, scaled=False, replicated=False, asked={"tokens": [4]}, split=False):
        """Each of `counts` is a step: the tokens of each data-parallel rank. plans: the max_tokens of those that are
        taken. split: two tensor-parallel ranks share the tokens of each data-parallel one."""
        config, seen, world = self.config(asked), [], 4 if split else 2
        sizes = ({"tp_size": 2, "dp_size": 1} if replicated else
                 {"tp_size": 2, "is_sequence_parallel": True} if split else {})
        steps = [forward_context.ForwardContext(
            no_compile_layers=config.compilation_config.static_forward_context, attn_metadata={}, slot_mapping={},
            dp_metadata=None if replicated else forward_context.DPMetadata(torch.tensor(step))) for step in counts]

        def body(group):
            entered(self.of_thread, group, 2 if split else None)
            runner, errors = self.made(group.rank, world, scaled, **sizes), []
            experts = runner.routed_experts.quant_method.moe_kernel.fused_experts
            self.assertIsInstance(experts, adaptor.PerseusExperts)
            plan = experts.layer.plan
            with mock.patch.object(experts.layer, "plan", lambda most: seen.append(plan(most)) or seen[-1]):
                for number, step in enumerate(counts):
                    count = -(-step[group.rank // 2] // 2) if split else step[group.rank]
                    x = random(0 if replicated else group.rank, count, HIDDEN, seed=number)
                    logits = random(0 if replicated else group.rank, count, EXPERTS, seed=50 + number)
                    arrived.wait()
                    if group.rank == 0:
                        forward_context._forward_context = steps[number]
                    arrived.wait()
                    y = runner(x.clone(), logits)
                    want = moe_reference.layer(x, *reversed(route(x, logits, TOP_K, False)), weights(scaled))
                    errors.append(float((y.float() - want).square().mean().sqrt() / want.square().mean().sqrt()))
            group.check()
            return errors
        arrived = threading.Barrier(world)
        self.addCleanup(setattr, forward_context, "_forward_context", None)
        for errors in ranks.run(world, body):
            for error in errors:
                self.assertLess(error, 0.06 if scaled else 0.01)
        self.assertEqual(sorted({p.sizes[0] for p in seen}), plans)
        return seen

    def test_ranks_with_tokens_of_their_own_take_the_plan_of_the_longest_batch(self):
        seen = self.check([(3, 4), (9, 1)], [4, 16])
        self.assertEqual({plan.path for plan in seen}, {"one kernel"})

    def test_tokens_that_all_ranks_have_are_added_up_by_vllms_all_reduce(self):
        self.check([(5, 5), (1, 1)], [4], replicated=True)

    def test_tokens_that_tensor_parallel_ranks_have_split_go_from_each(self):
        self.check([(9, 3)], [8], split=True, asked=True)

    def test_fp8_checkpoints_keep_their_blocks(self):
        self.check([(3, 7)], [8], scaled=True, asked=True)

    def test_vllms_dispatch_and_combine_of_deepep_run_over_ours(self):
        """Its high-throughput and low-latency classes, with experts in torch between them."""
        factors = torch.tensor([1., -2., 3., 0.5])  # what each expert multiplies by
        self.enterContext(mock.patch.object(deepep_ll.DeepEPLLPrepareAndFinalize, "SUPPORTED_HIDDEN_SIZES", [HIDDEN]))

        def body(group):
            buffer, first = deep_ep.Buffer(group, max_tokens=MOST), group.rank * EXPERTS // 2
            x = random(group.rank, 7 - 3 * group.rank, HIDDEN, seed=3)
            logits = random(group.rank, len(x), EXPERTS, seed=4)
            router, chosen = route(x, logits, TOP_K, False)
            given = x, router, chosen.long(), EXPERTS, None, False, FusedMoEQuantConfig.make()
            want, found = x.float() * (router * factors[chosen]).sum(1, keepdim=True), []
            whole = deepep_ht.DeepEPHTPrepareAndFinalize(buffer, 2, 2, first)
            rows, _, meta, ids, weights = whole.prepare(*given)
            mine = torch.where((ids >= first) & (ids < first + EXPERTS // 2), weights * factors[ids], 0)
            self.assertEqual(int(meta.expert_num_tokens.sum()), int((mine != 0).sum()))
            out = (rows.float() * mine.sum(1, keepdim=True)).bfloat16()
            found.append(torch.empty_like(x))
            whole.finalize(found[-1], out, *given[1:3], False, adaptor.TopKWeightAndReduceNoOP())
            batched = deepep_ll.DeepEPLLPrepareAndFinalize(buffer, MOST, 2)
            rows, _, meta, _, _ = batched.prepare(*given)
            within = torch.arange(rows.shape[1]) < meta.expert_num_tokens[:, None]
            out = torch.where(within[:, :, None], rows.float() * factors[first:first + EXPERTS // 2, None, None], 0)
            found.append(torch.empty_like(x))
            batched.finalize(found[-1], out.bfloat16(), *given[1:3], False, TopKWeightAndReduceDelegate())
            return [float((y.float() - want).abs().max()) for y in found]
        for errors in ranks.run(2, body):
            self.assertLess(max(errors), 0.05)

    def test_sums_with_norms_become_one_op_in_the_graphs_that_vllm_compiles(self):
        manager = resolve_obj_by_qualname(adaptor.current_platform.get_pass_manager_cls())()
        config = self.config({"norm": 64, "moe": False})
        entered(self.of_thread, types.SimpleNamespace(world=2, rank=0, process_group=None))
        config.parallel_config.tensor_parallel_size = 2
        manager.configure(config)
        ours, = (p for p in manager.passes if type(p).__name__ == "AllReduceNorm")
        self.assertTrue(ours.is_applicable_for_range(Range(1, 64)))
        self.assertFalse(ours.is_applicable_for_range(Range(1, 65)))
        self.assertNotEqual(ours.uuid(), type(ours)(32).uuid())

        def model(x, residual, weight):
            def normed(x, residual):
                return vllm.ir.ops.fused_add_rms_norm(torch.ops.vllm.all_reduce(x, group_name="tp:0"), residual, weight,
                                                      1e-5)
            h, residual = normed(x, residual)
            y = torch.ops.vllm.all_reduce(h, group_name="tp:0")  # which is used twice
            other, _ = vllm.ir.ops.fused_add_rms_norm(y, residual, weight, 1e-5)
            return h, residual, y + other

        def inputs_of(rank):
            return random(rank, 5, 64, seed=1), random(0, 5, 64, seed=2), random(0, 64, seed=3)

        def body(group):
            entered(self.of_thread, group)
            inputs, traced = inputs_of(group.rank), graphs[group.rank]
            ours(traced.graph)
            traced.graph.lint()
            traced.recompile()
            found = [str(n.target) for n in traced.graph.nodes if n.op == "call_function"]
            return found, traced(*inputs), inputs
        graphs = [make_fx(model, tracing_mode="fake")(*inputs_of(rank)) for rank in range(2)]  # not for threads
        vllm_all_reduce = torch.library.Library("vllm", "IMPL", "CPU")
        self.addCleanup(vllm_all_reduce._destroy)
        vllm_all_reduce.impl("all_reduce", lambda x, group_name: parallel_state._TP.all_reduce(x.clone()),
                             allow_override=True)
        got = ranks.run(2, body)
        total = sum(inputs[0].double() for _, _, inputs in got)
        for found, (h, residual, _), inputs in got:
            self.assertEqual([found.count(f"{name}.default") for name in (
                "perseus.all_reduce_rms_norm", "vllm.all_reduce", "vllm_ir.fused_add_rms_norm")], [1, 1, 1])
            want = total + inputs[1].double()
            self.assertLess(float((residual - want).abs().max()), 0.02)
            want = want * (want.square().mean(1, keepdim=True) + 1e-5).rsqrt() * inputs[2].double()
            self.assertLess(float((h - want).abs().max()), 0.03)

    def test_vllm_is_told_of_ranks_that_were_left_out(self):
        """Its own manager asks; what the device does without a rank is tested in C."""
        manager = All2AllManagerBase.__new__(All2AllManagerBase)

        def body(group):
            if group.rank == 0:
                adaptor.answer_for(manager, group)
                self.assertTrue(group.leaves_out and manager.support_fault_tolerance)
                self.assertFalse(manager.query_fault().item())
                arrived.wait()
                while group.lost() != [1]:
                    time.sleep(0.01)
                self.assertEqual(group.leave_out(), [1])
                self.assertTrue(manager.query_fault().item())
                self.assertEqual(manager.query_active_mask().tolist(), [0, 1])
                manager.clean_buffers()
                self.assertFalse(manager.query_fault().item())
                with self.assertRaisesRegex(perseus.PerseusError, "ranks 0x2 were left out"):
                    perseus.moe_plan(max_tokens=8, hidden=64, experts=2, top_k=1, group=group)
            else:
                arrived.wait()
                group.abort()  # so that it waits for no rank when it closes
        arrived = threading.Barrier(2)
        ranks.run(2, body)

    def test_memory_goes_while_vllms_engine_sleeps(self):
        """Its own backend, which moves weights and KV cache, needs a GPU."""
        config = self.config(True)
        config.model_config = types.SimpleNamespace(dtype=torch.bfloat16, enable_sleep_mode=True,
                                                    sleep_mode_backend="cumem", sleep_mode_offload_cudagraph=False)
        context = forward_context.ForwardContext(
            no_compile_layers=config.compilation_config.static_forward_context, attn_metadata={}, slot_mapping={},
            dp_metadata=forward_context.DPMetadata(torch.tensor([3, 3])))
        self.enterContext(mock.patch.object(forward_context, "_forward_context", context))
        self.enterContext(mock.patch.object(adaptor, "in_the_same_node_as", return_value=[True, True]))
        theirs = [self.enterContext(mock.patch.object(sleep_mode_backend.CuMemBackend, name))
                  for name in ("suspend", "resume")]

        sleepers = perseus._registry.sleepers

        def mine():  # a process of vLLM's has one rank, and so only its own groups
            return [group for group in sleepers() if group.thread == threading.get_ident()]
        self.enterContext(mock.patch.object(adaptor.vllm_sleep, "sleepers", mine))

        def body(group):
            entered(self.of_thread, group)
            runner, x = self.made(group.rank), random(group.rank, 3, HIDDEN)
            logits = random(group.rank, 3, EXPERTS, seed=50)
            backend = sleep_mode_backend.SleepModeBackendFactory.create_backend(config.model_config)
            before, held = runner(x.clone(), logits), group.memory()[0]
            backend.suspend(1)
            self.assertEqual(group.memory()[0], 0)
            backend.resume(["weights"])
            self.assertTrue(group.asleep)
            backend.resume(["kv_cache"])
            self.assertEqual(group.memory()[0], held)
            self.assertTrue(torch.equal(runner(x.clone(), logits), before))
        ranks.run(2, body, sleeps=True)
        self.assertEqual([call.call_count for call in theirs], [2, 4])
        config.model_config = types.SimpleNamespace(dtype=torch.bfloat16, enable_sleep_mode=True,
                                                    sleep_mode_backend="cumem", sleep_mode_offload_cudagraph=True)
        self.assertFalse(adaptor.vllm_sleep.choose(config))
        self.assertEqual(config.model_config.sleep_mode_backend, "cumem")

    def test_where_nobody_asks_vllm_stays_as_it_is(self):
        entered(self.of_thread, types.SimpleNamespace(world=2, rank=0, process_group=None))
        for asked, scaled in ((None, False), (False, False), (None, True)):
            self.config(asked)
            method = self.made(scaled=scaled, load=False).routed_experts.quant_method
            self.assertIs(type(method), adaptor.Fp8MoEMethod if scaled else adaptor.PerseusMoEMethod)
            self.assertNotEqual(method.experts_cls, adaptor.PerseusExperts)

    def test_a_layer_that_the_kernels_cannot_take_is_an_error_that_says_why(self):
        entered(self.of_thread, types.SimpleNamespace(world=2, rank=0, process_group=None))
        self.enterContext(mock.patch.object(unquantized_fused_moe_method, "select_unquantized_moe_backend",
                                            return_value=(None, None)))  # on a CPU vLLM itself refuses some of them
        for said, asked, parallel, layer in (
                ("--enable-expert-parallel", True, {"enable_expert_parallel": False}, {}),
                ("biases of experts", True, {}, {"has_bias": True}),
                ("--enable-dbo", True, {"enable_dbo": True}, {}),
                ("hidden size 252", True, {}, {"hidden": 252}),
                ("SwiGLU", True, {}, {"swiglu_limit": 7.0}),
                ("perseus is 'yes'; it must be", "yes", {}, {}),
                ("tokns", {"tokns": [1]}, {}, {})):
            config = self.config(asked)
            for name, value in parallel.items():
                setattr(config.parallel_config, name, value)
            with self.subTest(said), mock.patch(f"{__name__}.HIDDEN", layer.pop("hidden", HIDDEN)), \
                 self.assertRaisesRegex(ValueError, said):
                self.made(load=False, **layer)

    def test_vllm_has_loaded_the_entry_point(self):
        self.assertIs(op_registry_oot["UnquantizedFusedMoEMethod"], adaptor.PerseusMoEMethod)
        self.assertIs(get_quantization_config("fp8"), adaptor.PerseusFp8Config)

    def test_another_plugin_in_the_same_place_is_named(self):
        adaptor.register()  # a second time
        with mock.patch.dict(op_registry_oot, {"UnquantizedFusedMoEMethod": unittest.TestCase}):
            with self.assertRaisesRegex(RuntimeError, "unittest.case.TestCase.*VLLM_PLUGINS"):
                adaptor.register()


if __name__ == "__main__":
    ranks.main()
