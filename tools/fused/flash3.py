# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3 with gradients, if its operators can be had.

torch has none. The wheels of xformers 0.0.33 and 0.0.34 contain them as xformers/flash_attn_3/_C.so, which uses
torch's stable ABI only, so other versions of torch load it too. It needs CUDA 12's libcudart.so.12.
"""
import torch


class Attention(torch.autograd.Function):
    """q, k and v: [batch, rows, heads, head_dim], or with bounds, int32 on the device, [rows, heads, head_dim]."""

    @staticmethod
    def forward(ctx, q, k, v, causal, bounds, longest):
        ctx.of = (causal, bounds, longest)
        out, lse = torch.ops.flash_attn_3.fwd(q, k, v, is_causal=causal, cu_seqlens_q=bounds, cu_seqlens_k=bounds,
                                              max_seqlen_q=longest, max_seqlen_k=longest)[:2]
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        causal, bounds, longest = ctx.of
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        torch.ops.flash_attn_3.bwd(dout, q, k, v, out, lse, dq, dk, dv, bounds, bounds, None, None, longest, longest,
                                   is_causal=causal)
        return dq, dk, dv, None, None, None


def load(path):
    """Loads the operators from that file."""
    torch.ops.load_library(path)


def attention(q, k, v, causal, bounds=None, longest=None):
    return Attention.apply(q, k, v, causal, bounds, longest)
