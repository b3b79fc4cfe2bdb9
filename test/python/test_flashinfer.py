# SPDX-License-Identifier: Apache-2.0
"""The mega kernel of flashinfer.moe_ep that is ours, under FlashInfer's own layer, on emulated GPUs, compared with
torch's products."""
import unittest
from unittest import mock

import moe_reference
import ranks
import torch
from ranks import random
from stand_ins import stand_in

stand_in("tvm_ffi", "requests", "pynvml", "flashinfer.api_logging")
from flashinfer import moe_ep  # noqa: E402
from flashinfer.moe_ep.core.validation import common  # noqa: E402
from flashinfer.moe_ep.modes.mega_layer import MoEEpMegaLayer  # noqa: E402

import perseus  # noqa: E402
import perseus.integrations.flashinfer as adaptor  # noqa: E402

WORLD, EXPERTS, TOP_K, HIDDEN, INNER, MOST = 2, 4, 2, 128, 128, 16
COUNTS = (9, 4)


def inputs(rank):
    weights, chosen = torch.rand(COUNTS[rank], EXPERTS, generator=torch.Generator().manual_seed(rank)).topk(TOP_K)
    return random(rank, COUNTS[rank], HIDDEN, seed=1), chosen.to(torch.int32), weights


def matrices(scaled):
    return moe_reference.matrices(EXPERTS, HIDDEN, INNER, scaled)


def made(group, scaled=False, **more):
    local = EXPERTS // WORLD
    pack = moe_ep.MoEWeightPack(*(t[group.rank * local:(group.rank + 1) * local].clone()
                                 for t in matrices(scaled)))
    return MoEEpMegaLayer(
        moe_ep.BootstrapConfig(WORLD, group.rank, auto_bootstrap=False, process_group=group.process_group),
        moe_ep.FleetParams(num_experts=EXPERTS, max_tokens_per_rank=MOST, token_hidden_size=HIDDEN), pack,
        moe_ep.MegaConfig(adaptor.MegaMoeConfig(INNER, TOP_K, **more)))


class FlashInfer(unittest.TestCase):
    def setUp(self):
        # torch's default group belongs to a process, and ranks are threads here
        self.enterContext(mock.patch.object(common, "validate_bootstrap_process_group_ready"))
        self.enterContext(mock.patch.object(adaptor.MegaKernelBackend, "_try_resolve_ep_comm_group",
                                            lambda self, b: setattr(self, "_ep_comm_group", b.process_group)))

    def test_the_layer_is_that_of_torch_in_the_plan_that_the_call_names(self):
        def body(group):
            x, chosen, weights = inputs(group.rank)
            t = moe_ep.MoEEpTensors(x, chosen, weights)
            for scaled in (False, True):
                layer = made(group, scaled, tokens=(10,))
                want, found = moe_reference.layer(x, chosen, weights, matrices(scaled)), [layer(t)]
                layer.stage_inputs(t, compile_tokens_per_rank=9)
                found.append(layer.compute_staged(output=torch.empty_like(x)))
                small = layer.create_workspace(12)
                found.append(layer(t, workspace=small))
                for y in found:
                    error = (y.float() - want).square().mean().sqrt() / want.square().mean().sqrt()
                    self.assertLess(float(error), 0.06 if scaled else 0.01)
                self.assertEqual([p.sizes[0] for p in layer._workspace.layer.plans], [10, MOST])
                self.assertEqual([p.sizes[0] for p in small._backend_workspace.layer.plans], [10, 12])
                layer.destroy()
            group.check()
            return True
        self.assertEqual(ranks.run(WORLD, body), [True] * WORLD)

    def test_the_program_of_the_page(self):
        def body(group):
            (x, chosen, router), local = inputs(group.rank), EXPERTS // WORLD
            w13, w2 = (t[group.rank * local:(group.rank + 1) * local].clone() for t in matrices(False))
            found = {"group": group.process_group, "rank": group.rank, "world": WORLD, "w13": w13, "w2": w2, "x": x,
                     "chosen": chosen, "router": router}
            exec(program, found)
            found["layer"].destroy()
            want = moe_reference.layer(x, chosen, router, matrices(False))
            return float((found["y"].float() - want).square().mean().sqrt() / want.square().mean().sqrt()) < 0.01
        program = ranks.page("FlashInfer", "python", [
            ("num_experts=128", "num_experts=4"), ("1024", "16"), ("2048", "128"), ("768, top_k=8", "128, top_k=2"),
            ("layer.warmup()", ""), ("process_group=group", "process_group=group, auto_bootstrap=False")], "serving")
        self.assertEqual(ranks.run(WORLD, body), [True] * WORLD)

    def test_what_the_kernels_do_not_take_is_an_error_that_says_why(self):
        weights = matrices(False)

        def body(group):
            for said, sizes, more in (("5 experts on 2 ranks", {"EXPERTS": 5}, {}),
                                      ("hidden size 124", {"HIDDEN": 124}, {}),
                                      ("inner size 44", {"INNER": 44}, {}),
                                      ("activation 'swish'", {}, {"activation": "swish"})):
                with mock.patch.dict(globals(), sizes), self.assertRaisesRegex(ValueError, said):
                    made(group, **more)
            with self.assertRaisesRegex(ValueError, "w13 is torch.float32 .*it must be torch.bfloat16"), \
                 mock.patch.dict(globals(), matrices=lambda scaled: [t.float() for t in weights]):
                made(group)
            return True
        self.assertEqual(ranks.run(1, body), [True])


if __name__ == "__main__":
    ranks.main()
