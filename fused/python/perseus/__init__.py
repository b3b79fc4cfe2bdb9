# SPDX-License-Identifier: Apache-2.0
"""Matrix products, MoE dispatch and attention, fused with their communication, for tensor- and sequence-parallel
PyTorch.

    torch.distributed.init_process_group("nccl")
    group = perseus.init()                                      # all ranks
    y = perseus.all_gather_matmul(x, linear.weight.t(), group)  # or torch.ops.perseus.all_gather_matmul()

perseus.ops and perseus.moe have the ops, perseus.nn layers made of them. `python -m perseus.info` says what is
installed, `python -m perseus.bench` measures, `python -m perseus.tuning` tunes plans of given shapes (perseus.tune()).
"""
import importlib.util
import sys

if importlib.util.find_spec("torch") is None:
    _TEXT = "perseus needs PyTorch 2.6 or newer, and this Python has no module torch: pip install torch"
    raise SystemExit(_TEXT) if sys.argv[:1] == ["-m"] else ModuleNotFoundError(_TEXT, name="torch")

from . import moe_gradients, nn, parallel  # noqa: F401: moe_gradients registers ops
from ._group import Group
from ._library import PerseusError, bundled, library
from ._registry import close_all, find, init
from ._tuning import tune
from ._version import __version__
from .fp8 import fp8_all_gather_matmul, fp8_matmul_all_reduce, fp8_matmul_reduce_scatter, fp8_replicated_matmul
from .inductor import enable_inductor, keep_order
from .moe import moe_balance, moe_combine, moe_dispatch, moe_layer, moe_plan, moe_survivors
from .moe_scaled import moe_scaled_dispatch, moe_scaled_layer
from .norm import (all_reduce, all_reduce_rms_norm, all_reduce_rms_norm_quant, matmul_all_reduce_rms_norm,
                   matmul_all_reduce_rms_norm_quant, matmul_reduce_scatter_rms_norm, reduce_scatter,
                   reduce_scatter_rms_norm)
from .ops import (all_gather_matmul, all_gather_matmuls, matmul_all_reduce, matmul_reduce_scatter, moe_capacity,
                  moe_dispatch_gemm, replicated_matmul, ring_attention)
from .quantisers import quantise, quantise_reference
from .scaled import (all_gather_scaled_matmul, all_gather_scaled_matmul_quantised, scaled_matmul_all_reduce,
                     scaled_matmul_quantised, scaled_matmul_reduce_scatter)
from .striped import (assign_stripes, join_sequence, sequence_positions, split_sequence, striped_attention,
                      varlen_attention)
from .watchdog import unwatch, watch

__all__ = ["Group", "PerseusError", "__version__", "all_gather_matmul", "all_gather_matmuls",
           "all_gather_scaled_matmul", "all_gather_scaled_matmul_quantised", "all_reduce", "all_reduce_rms_norm",
           "all_reduce_rms_norm_quant", "assign_stripes", "bundled", "close_all", "enable_inductor", "find",
           "fp8_all_gather_matmul", "fp8_matmul_all_reduce", "fp8_matmul_reduce_scatter", "fp8_replicated_matmul",
           "init", "join_sequence", "keep_order", "library", "matmul_all_reduce", "matmul_all_reduce_rms_norm",
           "matmul_all_reduce_rms_norm_quant", "matmul_reduce_scatter", "matmul_reduce_scatter_rms_norm",
           "moe_balance", "moe_capacity", "moe_combine", "moe_dispatch", "moe_dispatch_gemm", "moe_layer", "moe_plan",
           "moe_scaled_dispatch", "moe_scaled_layer", "moe_survivors", "nn", "parallel", "plugin_path", "quantise",
           "quantise_reference", "reduce_scatter", "reduce_scatter_rms_norm", "replicated_matmul", "ring_attention",
           "scaled_matmul_all_reduce", "scaled_matmul_quantised", "scaled_matmul_reduce_scatter", "sequence_positions",
           "split_sequence", "striped_attention", "tune", "unwatch", "varlen_attention", "watch"]


def plugin_path() -> str:
    """Path of the NCCL plugin in this installation, for NCCL_NET_PLUGIN."""
    return bundled("libnccl-net-perseus.so")
