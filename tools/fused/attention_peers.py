#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
r"""Ring attention compared with cuDNN, FA2 and the usual ring attention (NCCL point to point + FA2), in the same
process group.

  torchrun --nproc-per-node 4 tools/fused/attention_peers.py --library build/fused/libperseus-fused.so \
      --shape 4x16x16x8192x128 ... [--causal]
  tools/fused/attention_peers.py --alone --library ... --shape 4x16x16x8192x128 --variant 176:3 --variant 128:3
      (one GPU: the core)

A shape is batch x query heads x KV heads x whole sequence x head_dim; a variant is keys-a-step:overlap[:group[:slab
rows[:spread[:mode[:copy engine]]]]], as in struct prs_attention_tuning, 0 for the default. All methods take turns in
every round, start together, and are timed by events; a time is the median over rounds of the slowest rank. Results are
poisoned before each run; those of our timed launches must have the same bits each time, and sampled rows of the last
one are compared with a softmax in double precision (timed.py; `checked_launches` says how many). `error` is the largest
difference, `error_over_cudnn` that over cuDNN's own on the same rows, `rms_over_cudnn` the same of the root mean
squares. JSON, one object a variant. Status 1 when anything was wrong, 77 without torch or GPUs.
"""
import argparse
import ctypes
import json
import os
import sys

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast is never used
try:
    import torch
    import torch.distributed as dist
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    sys.exit(77)
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from fused_context import Context, bounded, pointer, structs  # noqa: E402
from timed import Way, time_all  # noqa: E402

SAMPLED_ROWS = 64
MODES = ("", "alone", "resident", "ring")
Shape, Tuning, Info, Operands = (structs[f"prs_attention_{name}"] for name in ("shape", "tuning", "info", "operands"))


class Ours:
    """A plan. Tensors are [batch, rows, heads, head_dim]."""

    def __init__(self, context, shape, tuning, q, k, v):
        self.context, self.plan, self.info = context, pointer(), Info()
        self.q, self.k, self.v, self.out = q, k, v, torch.empty_like(q)
        self.lse = torch.empty(shape.batch, shape.heads_q, q.shape[1], dtype=torch.float32, device="cuda")
        lib = context.lib
        lib.prs_attention_plan_query.restype = lib.prs_attention_plan_close.restype = None
        context.check(lib.prs_attention_plan_open(context.handle, ctypes.byref(shape), ctypes.byref(tuning),
                                                  ctypes.byref(self.plan)), "prs_attention_plan_open")
        lib.prs_attention_plan_query(self.plan, ctypes.byref(self.info))

    def __call__(self):
        operands = Operands(*(t.data_ptr() for t in (self.q, self.k, self.v, self.out, self.lse)))
        stream = pointer(torch.cuda.current_stream().cuda_stream)
        self.context.check(self.context.lib.prs_attention_launch(self.plan, ctypes.byref(operands), stream),
                           "prs_attention_launch")

    def poison(self):
        self.out.fill_(float("nan"))
        self.lse.fill_(float("nan"))

    def close(self):
        torch.cuda.synchronize()
        self.context.lib.prs_attention_plan_close(self.plan)


def fa2(q, k, v, causal):
    """One FA2 call on [batch, heads, rows, head_dim]: result and logarithm of the sum of exponentials."""
    if k.shape[1] != q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    return out, lse


class NcclRing:
    """Keys and values travel around the ring by isend/irecv while FA2 works on those received; partial results are
    merged in fp32."""

    def __init__(self, q, k, v, causal):
        self.q, self.kv, self.causal = (q.transpose(1, 2),
                                        torch.stack((k.transpose(1, 2), v.transpose(1, 2))).contiguous(), causal)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.buffers = [torch.empty_like(self.kv) for _ in range(2)]

    def merge(self, out, lse, more, more_lse, rows):
        if out is None:
            return more.float(), more_lse
        a, b = lse[:, :, rows], more_lse
        both = torch.logaddexp(a, b)
        out[:, :, rows] = (out[:, :, rows] * (a - both).exp().unsqueeze(-1) + more.float()
                           * (b - both).exp().unsqueeze(-1))
        lse[:, :, rows] = both
        return out, lse

    def __call__(self):
        out = lse = None
        half, now = self.q.shape[2] // 2, self.kv
        for step in range(self.world):
            waits = []
            if step + 1 < self.world:
                later = self.buffers[step % 2]
                ops = [dist.P2POp(dist.isend, now, (self.rank + 1) % self.world),
                       dist.P2POp(dist.irecv, later, (self.rank - 1) % self.world)]
                waits = dist.batch_isend_irecv(ops)
            source, rows, k, v = (self.rank - step) % self.world, slice(None), now[0], now[1]
            # zigzag: all queries see the first chunk of an earlier rank
            if self.causal and step > 0 and source < self.rank:
                k, v = k[:, :, :half], v[:, :, :half]
            # only the second chunk of queries sees the keys of a later rank, all of them
            elif self.causal and step > 0:
                rows = slice(half, None)
            out, lse = self.merge(out, lse, *fa2(self.q[:, :, rows], k, v, self.causal and step == 0), rows)
            for w in waits:
                w.wait()
            now = later if step + 1 < self.world else now
        self.out = out.to(torch.bfloat16).transpose(1, 2)


class Sdpa:
    """One call of torch on this rank's queries and its own keys: the time of a step without communication."""

    def __init__(self, backend, q, k, v, causal):
        self.backend, self.causal = backend, causal
        self.q, self.k, self.v = (t.transpose(1, 2) for t in (q, k, v))

    def __call__(self):
        with sdpa_kernel(self.backend):
            gqa = self.q.shape[1] != self.k.shape[1]
            self.out = torch.nn.functional.scaled_dot_product_attention(self.q, self.k, self.v, is_causal=self.causal,
                                                                        enable_gqa=gqa).transpose(1, 2)


def positions(rank, world, rows, causal):
    """The positions of a rank's rows in the whole sequence."""
    if not causal or world == 1:
        return torch.arange(rank * rows, (rank + 1) * rows)
    half = rows // 2
    return torch.cat((torch.arange(half) + rank * half, torch.arange(half) + (2 * world - 1 - rank) * half))


def reference(q, k, v, causal, rank, world):
    """(batch, rows, head), the reference there and its logarithms of sums, in double precision, and the bound of the
    error: one bf16 rounding of each probability and one of the result."""
    rows, dim = q.shape[1], q.shape[3]
    batch, head = q.shape[0] - 1, q.shape[2] - 1
    kv = torch.stack((k[batch, :, -1], v[batch, :, -1])).contiguous()
    parts = [torch.empty_like(kv) for _ in range(world)]
    if world > 1:
        dist.all_gather(parts, kv)
    else:
        parts = [kv]
    where = torch.cat([positions(r, world, rows, causal) for r in range(world)]).cuda()
    keys, values = torch.cat(parts, 1).double()
    sample = torch.linspace(0, rows - 1, min(SAMPLED_ROWS, rows)).long().cuda()
    scores = q[batch, sample, head].double() @ keys.T / dim**0.5
    if causal:
        mine = positions(rank, world, rows, causal).cuda()[sample]
        scores.masked_fill_(where[None, :] > mine[:, None], float("-inf"))
    shares = torch.softmax(scores, -1)
    want = shares @ values
    return (batch, sample, head), want, torch.logsumexp(scores, -1), (want.abs() + shares @ values.abs()) * 2**-8 * 1.01


def error_of(out, at, want):
    """The largest difference, and the root mean square, since the largest of rounded results is a matter of chance."""
    difference = out[at].double() - want
    return difference.abs().max().item(), difference.square().mean().sqrt().item()


def check(run, at, want, want_lse, bound):
    """For our result: error_of(), the error of the logarithms, the number of wrong elements, and of those never
    written."""
    lse_error = (run.lse[at[0], at[2], at[1]].double() - want_lse).abs()
    poisoned = run.out.isnan().sum().item()
    beyond = (~((run.out[at].double() - want).abs() <= bound)).sum().item()  # a NaN is beyond any bound
    beyond += (~(lse_error <= 1e-4 * (1 + want_lse.abs()))).sum().item()
    return *error_of(run.out, at, want), lse_error.max().item(), beyond + poisoned, poisoned


def worst(x, world):
    t = torch.tensor([x], device="cuda", dtype=torch.float64)
    if world > 1:
        dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return t.item()


def tuning_of(text):
    block, overlap, group, slab, spread, mode, engine = ([int(x) for x in text.split(":")] + [0] * 7)[:7]
    return Tuning(mode=mode, heads_per_step=group, slab_rows=slab, spread=spread, block_rows=block, overlap=overlap,
                  mover=engine)


def measure(args, context, text, rank, world):
    batch, heads_q, heads_kv, seq, dim = (int(x) for x in text.split("x"))
    rows = seq // world
    torch.manual_seed(rank + 1)
    q, k, v = (torch.randn(batch, rows, h, dim, device="cuda", dtype=torch.bfloat16)
               for h in (heads_q, heads_kv, heads_kv))
    shape = Shape(batch, heads_q, heads_kv, dim, seq, int(args.causal), 0, 0.0)
    ours = {variant: Ours(context, shape, tuning_of(variant), q, k, v) for variant in args.variant}
    peers = {"cudnn": Sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, args.causal),
             "fa2": Sdpa(SDPBackend.FLASH_ATTENTION, q, k, v, args.causal)}
    if world > 1:
        peers["nccl_ring"] = NcclRing(q, k, v, args.causal)
    at, want, want_lse, bound = reference(q, k, v, args.causal, rank, world)
    ways = {name: Way(run, run.poison, lambda run=run: (run.out, run.lse),
                      lambda _, run=run: check(run, at, want, want_lse, bound),
                      lambda run=run: run.out[at[0], int(at[1][0]), at[2], :1], (k, v)) for name, run in ours.items()}
    times = time_all({**ways, **{name: Way(run) for name, run in peers.items()}}, args.rounds, world,
                     lambda usec: worst(usec, world), args.corrupt if rank == world - 1 else 0)
    peer_error, peer_rms = (worst(x, world)
                            for x in error_of(peers["nccl_ring" if world > 1 else "cudnn"].out, at, want))
    beside, bad = "nccl_ring" if world > 1 else "cudnn", 0
    for variant, run in ours.items():
        error, rms, lse_error, beyond, poisoned = (worst(x, world) for x in ways[variant].found)
        differing = worst(ways[variant].differing, world)
        bad += beyond + differing
        flops = 4 * batch * heads_q * dim * seq * seq / world * (0.5 if args.causal else 1)
        usec, info = times[variant], run.info
        row = {"kernel": "attention", "shape": text, "causal": args.causal, "gpus": world, "variant": variant,
               "usec": usec, "tflops": round(flops / usec / 1e6, 1),
               "cudnn_step_usec": times["cudnn"], "fa2_step_usec": times["fa2"],
               "nccl_ring_usec": times.get("nccl_ring"),
               "cudnn_over_ours": round(times["cudnn"] / usec, 3) if world == 1 else None,
               "speedup_over_nccl_ring": round(times["nccl_ring"] / usec, 3) if world > 1 else None,
               "error": error, f"error_over_{beside}": round(error / peer_error, 3),
               f"rms_over_{beside}": round(rms / peer_rms, 3), "lse_error": lse_error, "poisoned": poisoned,
               "beyond_bound": int(beyond + differing), "checked_launches": ways[variant].checked,
               "differing_elements": int(differing), "predicted_usec": round(info.predicted_us, 1),
               "mode": MODES[info.tuning.mode], "group": info.tuning.heads_per_step, "slab_rows": info.tuning.slab_rows,
               "block_rows": info.tuning.block_rows, "overlap": info.tuning.overlap,
               "spread": info.tuning.spread, "copy_engine": info.tuning.mover, "torch": torch.__version__,
               "commit": args.commit}
        if rank == 0:
            print(json.dumps(row), flush=True)
        run.close()
    return bad == 0


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--library", required=True)
    p.add_argument("--shape", action="append", required=True)
    p.add_argument("--variant", action="append")
    p.add_argument("--causal", action="store_true")
    p.add_argument("--alone", action="store_true")
    p.add_argument("--rounds", type=int, default=10)
    p.add_argument("--corrupt", type=int, default=0,
                   help="change an element of what the Nth timed launch wrote: the check must find it")
    p.add_argument("--limit-s", type=int, default=200, help="of the whole script")
    p.add_argument("--commit", default="unknown")
    args = p.parse_args()
    bounded(args.limit_s)
    args.variant = args.variant or ["0"]
    if not torch.cuda.is_available():
        sys.exit(77)
    if args.alone:
        context, rank, world = Context(args.library, 0), 0, 1
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
        rank, world = dist.get_rank(), dist.get_world_size()
        context = Context(args.library, torch.cuda.current_device(), dist.new_group(backend="gloo"))
    good = [measure(args, context, text, rank, world) for text in args.shape]
    context.close()
    if not args.alone:
        dist.destroy_process_group()
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
