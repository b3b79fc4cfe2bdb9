# SPDX-License-Identifier: Apache-2.0
"""Attention over packed sequences and with sliding windows, on one node, and what cuts inputs for it. Importing this
module registers its ops.

The sequence is cut into stripes, which are dealt to the ranks in zigzag: to ranks 0 ... W - 1, then to W - 1 ... 0, and
so on. Every rank has the same number of rows, and much the same work, whatever sequences are packed:

    tokens, labels = (perseus.split_sequence(t) for t in (tokens, labels))     # [positions] -> [rows]
    positions = perseus.sequence_positions(total, cu_seqlens)                  # for RoPE, of these rows
    out = perseus.varlen_attention(q, k, v, cu_seqlens, causal=True)           # [rows, heads, head_dim]
    whole = perseus.join_sequence(out)                                         # [positions, ...]

How long stripes are follows from the length of the whole sequence (stripe_of()), unless all calls say another one.
Lengths with the same stripe share plans, as those of ring_attention() do.

If the lengths are known when inputs are cut, or there is a window, the stripes can be assigned to ranks so that most
sequences stay on one rank, and little travels:

    stripe_ranks = perseus.assign_stripes(cu_seqlens)                          # which rank has which stripe
    tokens = perseus.split_sequence(tokens, stripe_ranks=stripe_ranks)
    out = perseus.varlen_attention(q, k, v, cu_seqlens, causal=True, stripe_ranks=stripe_ranks)
"""
from __future__ import annotations

import ctypes
from typing import Any, Sequence

import torch

from ._checks import _bf16, _check_tensor
from ._dispatch import _autocast, _call, _define, _differentiate
from ._group import Group
from ._registry import GroupLike, find, name_of

STRIPES = 512, 256, 128  # rows
MOST_POSITIONS = 1 << 31
LEAST_STRIPES = 32  # of a rank: then work is within 11 % of even (means of 64k tokens of documents)


def stripe_of(positions: int, world: int) -> int:
    """The rows of a stripe of a sequence of so many positions, where no call says them. Long stripes travel better, and
    many divide work more evenly: the longest of which each rank has 32, and which divide the sequence; else 128."""
    return next((stripe for stripe in STRIPES if positions >= LEAST_STRIPES * world * stripe
                 and positions % (2 * world * stripe) == 0), STRIPES[-1])


def _stripe_of(positions: int, world: int, stripe: int, stripe_ranks: torch.Tensor | None) -> int:
    """The rows of a stripe where a call says `stripe`. Stripes that are assigned to ranks are short, since work is then
    more even, and little travels."""
    return stripe or (stripe_of(positions, world) if stripe_ranks is None else STRIPES[-1])


def _check_stripe(stripe: Any) -> None:
    if type(stripe) is not int or stripe and (stripe < STRIPES[-1] or stripe & stripe - 1):
        raise ValueError(f"perseus: stripe is {stripe!r}; it must be 0 or a power of two, {STRIPES[-1]} rows at least")


def _check_window(op: str, window: Any) -> None:
    if type(window) is not int or not 0 <= window < MOST_POSITIONS:
        raise ValueError(f"perseus.{op}: window is {window!r}: want a number of positions, 0 for no window")


# ---- the ops ----

def _sizes(group: Group, op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None,
           sinks: torch.Tensor | None, stripe_ranks: torch.Tensor | None, causal: bool, stripe: int, window: int,
           soft_cap: float, heads_first: bool) -> dict[str, Any]:
    """The fields of struct prs_attention_shape, of tensors that are checked. The scale is of a launch."""
    _check_window(op, window)
    _check_tensor(group, op, "q", q, _bf16, (-1, -1, -1, -1))
    batch, dim = q.shape[0], q.shape[3]
    rows, heads = (q.shape[2], q.shape[1]) if heads_first else (q.shape[1], q.shape[2])
    _check_tensor(group, op, "k", k, _bf16, (batch, -1, rows, dim) if heads_first else (batch, rows, -1, dim))
    _check_tensor(group, op, "v", v, _bf16, tuple(k.shape))
    if cu_seqlens is not None:
        _check_tensor(group, op, "cu_seqlens", cu_seqlens, torch.int32, (-1,))
        if cu_seqlens.numel() < 2:
            raise ValueError(f"perseus.{op}: cu_seqlens has {cu_seqlens.numel()} elements: it has the beginning of "
                             "each sequence, and the end of the last one")
    if sinks is not None:
        _check_tensor(group, op, "sinks", sinks, torch.float32, (heads,))
    stripe = _stripe_of(rows * group.world, group.world, stripe, stripe_ranks)
    if stripe_ranks is not None:
        _check_tensor(group, op, "stripe_ranks", stripe_ranks, torch.int32, (rows * group.world // stripe,))
    return {"batch": batch, "heads_q": heads, "heads_kv": k.shape[1 if heads_first else 2], "head_dim": dim,
            "seq": rows * group.world, "causal": int(causal), "heads_first": int(heads_first),
            "stripe": stripe, "window": window,
            "packed": int(cu_seqlens is not None), "soft_cap": soft_cap}


def _give(group: Group, x: Any, sizes: dict[str, Any], scale: float, tensors: dict[str, torch.Tensor],
          cu_seqlens: torch.Tensor | None, sinks: torch.Tensor | None, stripe_ranks: torch.Tensor | None) -> None:
    """What a launch reads."""
    place = group.place
    x.seq, x.batch, x.scale = sizes["seq"], sizes["batch"], scale
    for field, tensor in tensors.items():
        setattr(x, field, place.read(tensor))
    x.cu_seqlens = None if cu_seqlens is None else place.read(cu_seqlens)
    x.sequences = 0 if cu_seqlens is None else cu_seqlens.numel() - 1
    x.sinks = None if sinks is None else place.read(sinks)
    x.stripe_ranks = None if stripe_ranks is None else place.read(stripe_ranks)


def _striped_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None,
                       sinks: torch.Tensor | None, stripe_ranks: torch.Tensor | None, group_name: str,
                       *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    group = find(group_name)
    *masks, scale, heads_first = rest
    sizes = _sizes(group, "striped_attention", q, k, v, cu_seqlens, sinks, stripe_ranks, *masks, heads_first)
    plan = group.attention(**sizes)
    out, lse = _striped_attention_fake(q, k, v, cu_seqlens, sinks, stripe_ranks, group_name, *rest)
    x = plan.operands
    _give(group, x, sizes, scale, {"q": q, "k": k, "v": v}, cu_seqlens, sinks, stripe_ranks)
    x.out, x.lse = group.place.write(out), group.place.write(lse)
    group.launch(group.library.prs_attention_launch, plan.handle, plan.reference)
    return out, lse


def _striped_attention_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None,
                            sinks: torch.Tensor | None, stripe_ranks: torch.Tensor | None, group_name: str,
                            *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads = (q.shape[2], q.shape[1]) if rest[-1] else (q.shape[1], q.shape[2])
    return torch.empty_like(q), q.new_empty(q.shape[0], heads, rows, dtype=torch.float32)


def _striped_attention_backward(dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor,
                                v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
                                cu_seqlens: torch.Tensor | None, sinks: torch.Tensor | None,
                                stripe_ranks: torch.Tensor | None, group_name: str,
                                *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    group, op = find(group_name), "striped_attention_backward"
    *masks, scale, heads_first = rest
    sizes = _sizes(group, op, q, k, v, cu_seqlens, sinks, stripe_ranks, *masks, heads_first)
    values = sizes["batch"], sizes["heads_q"], sizes["seq"] // group.world
    for name, t in (("out", out), ("dout", dout)):
        _check_tensor(group, op, name, t, _bf16, tuple(q.shape))
    for name, t in (("lse", lse), ("dlse", dlse)):
        if t is not None:
            _check_tensor(group, op, name, t, torch.float32, values)
    plan = group.attention_backward(**sizes)
    results = _striped_attention_backward_fake(dout, dlse, q, k, v, out, lse, cu_seqlens, sinks, stripe_ranks,
                                               group_name, *rest)
    x, write = plan.operands, group.place.write
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout}
    _give(group, x, sizes, scale, tensors, cu_seqlens, sinks, stripe_ranks)
    x.dlse = None if dlse is None else group.place.read(dlse)
    x.dq, x.dk, x.dv = (write(t) for t in results[:3])
    x.dsinks = None if sinks is None else write(results[3])
    group.launch(group.library.prs_attention_backward_launch, plan.handle, plan.reference)
    return results


def _striped_attention_backward_fake(dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor,
                                     v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
                                     cu_seqlens: torch.Tensor | None, sinks: torch.Tensor | None,
                                     stripe_ranks: torch.Tensor | None, group_name: str,
                                     *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dsinks = q.new_empty(0, dtype=torch.float32) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dsinks


_REST = ("Tensor? cu_seqlens, Tensor? sinks, Tensor? stripe_ranks, str group_name, bool causal, int stripe, "
         "int window, float soft_cap, float scale, bool heads_first")
_define(f"striped_attention(Tensor q, Tensor k, Tensor v, {_REST}) -> (Tensor, Tensor)", _striped_attention,
        _striped_attention_fake)
_define(f"striped_attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        f"{_REST}) -> (Tensor, Tensor, Tensor, Tensor)", _striped_attention_backward, _striped_attention_backward_fake)


def _save(ctx: Any, inputs: tuple, output: tuple) -> tuple:
    q, k, v, cu_seqlens, sinks, stripe_ranks, *ctx.rest = inputs
    return q, k, v, *output, cu_seqlens, sinks, stripe_ranks


def _gradients(ctx: Any, saved: Any, needed: tuple, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple:
    """One launch for all, also where not all are needed: every rank takes part in it."""
    q, k, v, out, lse, cu_seqlens, sinks, stripe_ranks = saved
    dout = torch.zeros_like(out) if dout is None else dout.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    dq, dk, dv, dsinks = _call.striped_attention_backward(dout, dlse, q, k, v, out, lse, cu_seqlens, sinks,
                                                          stripe_ranks, *ctx.rest)
    return dq, dk, dv, None, None if sinks is None else dsinks, None, *(None for _ in ctx.rest)


_differentiate("striped_attention", _gradients, _save, several=True)
_autocast("striped_attention", (0, 1, 2), (_bf16,))


# ---- functions of a group ----

def striped_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: GroupLike = None, *,
                      causal: bool = True, window: int = 0, soft_cap: float = 0.0, sinks: torch.Tensor | None = None,
                      cu_seqlens: torch.Tensor | None = None, stripe: int = 0, scale: float = 0.0,
                      heads_first: bool = False,
                      stripe_ranks: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """ring_attention() of rows that are dealt in stripes (split_sequence()), with masks.

    window: a query meets only keys that are nearer than so many positions (causal: and not after it); 0: all. soft_cap:
    a score x counts as soft_cap * tanh(x / soft_cap). sinks: fp32 [heads_q], one more score for each head, without a
    value, as GPT-OSS has them; their gradient is that of the rank's own queries: add up those of all ranks, as of every
    parameter that the ranks have alike. cu_seqlens: int32 [sequences + 1] on the device, the same on all ranks:
    sequences packed into the positions of a batch of 1. Rows after the last one attend to themselves. stripe: rows, a
    power of two, 128 at least; rows of a rank are a multiple of 2 of them; 0: as long as stripe_of() says, with
    stripe_ranks 128. stripe_ranks: int32 on the device, the same on all ranks: the rank of each stripe, if they are not
    in zigzag (assign_stripes()). scale: as of ring_attention().

    Returns (out, lse), both with gradients. cu_seqlens and stripe_ranks may have other values in each replay of a CUDA
    graph.
    """
    return _call.striped_attention(q, k, v, cu_seqlens, sinks, stripe_ranks, name_of(group), causal, stripe, window,
                                  soft_cap, scale, heads_first)


def varlen_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, *,
                     softmax_scale: float | None = None, causal: bool = False,
                     window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                     sinks: torch.Tensor | None = None, return_lse: bool = False, group: GroupLike = None,
                     stripe: int = 0, stripe_ranks: torch.Tensor | None = None) -> Any:
    """striped_attention() with the names of flash_attn_varlen_func().

    q: [rows, heads_q, head_dim], k, v: [rows, heads_kv, head_dim]: the stripes of this rank. cu_seqlens: of the whole
    sequence, for queries and keys alike. softmax_scale: None: 1 / sqrt(head_dim). window_size: (left, right), -1: no
    limit; causal, right is 0 in any case, and otherwise both are equal. Returns out, with return_lse (out, lse
    [heads_q, rows]).
    """
    left, right = window_size
    if not causal and left != right:
        raise ValueError(f"perseus.varlen_attention: window_size {window_size} without causal: left and right must be "
                         "equal")
    if softmax_scale is not None and softmax_scale == 0:
        raise ValueError("perseus.varlen_attention: softmax_scale is 0: it must be positive; None: 1 / sqrt(head_dim)")
    out, lse = striped_attention(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), group, causal=causal,
                                 window=0 if left < 0 else left + 1, soft_cap=softcap, sinks=sinks,
                                 cu_seqlens=cu_seqlens, stripe=stripe, scale=softmax_scale or 0.0,
                                 stripe_ranks=stripe_ranks)
    return (out[0], lse[0]) if return_lse else out[0]


# ---- cutting ----

def assign_stripes(cu_seqlens: torch.Tensor | Sequence[int] | None, group: GroupLike = None, *, positions: int = 0,
                   causal: bool = True, window: int = 0, stripe: int = 0) -> torch.Tensor:
    """Which rank has which stripe, so that all ranks have nearly the same work, forward and backward, and little
    travels: int32 [stripes] on the group's device, for split_sequence(), sequence_positions(), join_sequence() and the
    attention of these rows. Without communication: the same arguments give the same result on all ranks.

    cu_seqlens: as of striped_attention(), best on the host, since this reads it; None: one sequence, with a window.
    positions: of the whole sequence with its padding; 0: the end of the last sequence, padded as split_sequence() does.
    causal, window: as of striped_attention(). stripe: rows; 0: 128.
    """
    _check_stripe(stripe)
    _check_window("assign_stripes", window)
    g, stripe, bounds = find(name_of(group)), stripe or STRIPES[-1], None
    if cu_seqlens is not None:
        numbers = torch.atleast_1d(cu_seqlens).tolist() if isinstance(cu_seqlens, torch.Tensor) else list(cu_seqlens)
        wrong = [n for n in numbers if type(n) is not int or not -MOST_POSITIONS < n < MOST_POSITIONS]
        if wrong:
            raise ValueError(f"perseus.assign_stripes: cu_seqlens has {wrong[0]!r}: want whole numbers below 2^31")
        if len(numbers) < 2:
            raise ValueError(f"perseus.assign_stripes: cu_seqlens has {len(numbers)} elements: it has the beginning of "
                             "each sequence, and the end of the last one")
        bounds = (ctypes.c_int32 * len(numbers))(*numbers)
        positions = positions or -(-max(numbers[-1], 1) // (2 * g.world * stripe)) * 2 * g.world * stripe
    if type(positions) is not int or not 0 <= positions < MOST_POSITIONS:
        raise ValueError(f"perseus.assign_stripes: positions is {positions!r}: want a whole number, 0 to 2^31 - 1")
    lib = g.library
    shape = lib.prs_attention_shape(batch=1, heads_q=1, heads_kv=1, head_dim=64, seq=positions, causal=int(causal),
                                    stripe=stripe, window=window, packed=int(bounds is not None))
    ranks = (ctypes.c_uint32 * (positions // stripe))()
    lib.check(lib.prs_attention_assign_stripes(ctypes.byref(shape), g.world, bounds, len(bounds or (0,)) - 1, ranks),
              "perseus.assign_stripes")
    return torch.tensor(list(ranks), dtype=torch.int32, device=g.device)


def _rows_of(rank: int, world: int, positions: int, stripe: int, stripe_ranks: torch.Tensor | None,
             device: Any) -> torch.Tensor:
    """The positions of a rank's rows, as prs_attention_positions() has them."""
    _check_stripe(stripe)
    stripe = _stripe_of(positions, world, stripe, stripe_ranks)
    if positions % (2 * world * stripe):
        raise ValueError(f"perseus: {positions} positions are not a multiple of {2 * world * stripe}, 2 stripes of "
                         f"{stripe} rows for each of {world} ranks: split_sequence() pads with `fill`")
    if stripe_ranks is None:
        rounds = torch.arange(positions // (2 * world * stripe), device=device)[:, None]
        stripes = (rounds * 2 * world + torch.tensor([rank, 2 * world - 1 - rank], device=device)).flatten()
    elif tuple(stripe_ranks.shape) == (positions // stripe,):
        stripes = stripe_ranks.to(device).argsort(stable=True).view(world, -1)[rank]
    else:
        raise ValueError(f"perseus: stripe_ranks has shape {tuple(stripe_ranks.shape)}: {positions} positions are "
                         f"{positions // stripe} stripes of {stripe} rows")
    return (stripes[:, None] * stripe + torch.arange(stripe, device=device)).flatten()


def _check_dim(op: str, x: torch.Tensor, dim: int) -> None:
    if not -x.dim() <= dim < x.dim():
        raise IndexError(f"perseus.{op}: x with shape {tuple(x.shape)} has no dimension {dim}: dim must be that of the "
                         "sequence")


def split_sequence(x: torch.Tensor, group: GroupLike = None, *, dim: int = 0, stripe: int = 0,
                   fill: float | None = None, stripe_ranks: torch.Tensor | None = None) -> torch.Tensor:
    """This rank's rows of a tensor that all ranks have whole: tokens, labels, position ids, masks. dim: that of the
    sequence. fill: what pads it to the next multiple of 2 W stripes (without `stripe`: of 128 rows); None: it must be
    one. stripe_ranks: of assign_stripes(); None: zigzag."""
    _check_stripe(stripe)
    _check_dim("split_sequence", x, dim)
    g = find(name_of(group))
    missing = -x.shape[dim] % (2 * g.world * (stripe or STRIPES[-1]))
    if missing and fill is not None:
        x = torch.cat((x, x.new_full((*x.shape[:dim], missing, *x.shape[dim:][1:]), fill)), dim)
    return x.index_select(dim, _rows_of(g.rank, g.world, x.shape[dim], stripe, stripe_ranks, x.device))


def join_sequence(x: torch.Tensor, group: GroupLike = None, *, dim: int = 0, stripe: int = 0,
                  length: int | None = None, stripe_ranks: torch.Tensor | None = None) -> torch.Tensor:
    """The whole tensor, from the rows of all ranks: the reverse of split_sequence(), without gradients. length: without
    what padded it."""
    _check_dim("join_sequence", x, dim)
    g = find(name_of(group))
    rows = x.detach().movedim(dim, 0).contiguous()
    whole = g.gather_rows(rows)
    order = torch.cat([_rows_of(rank, g.world, whole.shape[0], stripe, stripe_ranks, x.device)
                       for rank in range(g.world)])
    return torch.empty_like(whole).index_copy_(0, order, whole)[:length].movedim(0, dim)


def sequence_positions(positions: int, cu_seqlens: torch.Tensor | None = None, group: GroupLike = None, *,
                       stripe: int = 0, stripe_ranks: torch.Tensor | None = None) -> torch.Tensor:
    """int64: of each of this rank's rows its position in its own sequence, for RoPE; without cu_seqlens that in the
    whole one. Rows that no sequence has get 0. positions: of the whole sequence, with its padding."""
    g = find(name_of(group))
    rows = _rows_of(g.rank, g.world, positions, stripe, stripe_ranks,
                    g.device if cu_seqlens is None else cu_seqlens.device)
    if cu_seqlens is None:
        return rows
    at = torch.searchsorted(cu_seqlens.long(), rows, right=True)  # of the first bound after the row
    begin = cu_seqlens.long()[(at - 1).clamp(min=0)]
    return torch.where((at > 0) & (at < cu_seqlens.numel()), rows - begin, 0)
