# SPDX-License-Identifier: Apache-2.0
"""Weights of experts as servers' checkpoints have them, and what torch makes of them."""
import torch
import torch.nn.functional as F
from ranks import random

import perseus


def matrices(experts, hidden, inner, scaled):
    """Of all experts: w13 and w2; scaled: in e4m3, followed by their scales of blocks of 128 x 128."""
    found = [random(0, experts, n, k, seed=n).mul_(0.3) for n, k in ((2 * inner, hidden), (hidden, inner))]
    if not scaled:
        return found
    (w13, s13), (w2, s2) = (perseus.quantise_reference(w, (128, 128)) for w in found)
    return w13, w2, s13, s2


def layer(x, chosen, router_weights, weights):
    """What a layer with these matrices() gives, in fp32."""
    w13, w2, *scales = weights
    w13, w2 = (w.float() if s is None else w.float() * s.repeat_interleave(128, 1).repeat_interleave(128, 2)
               for w, s in zip((w13, w2), scales or (None, None)))
    out = torch.zeros(x.shape)
    for token in range(len(x)):
        for slot in range(chosen.shape[1]):
            gate, up = (w13[chosen[token, slot]] @ x[token].float()).chunk(2)
            out[token] += router_weights[token, slot] * (w2[chosen[token, slot]] @ (F.silu(gate) * up))
    return out
