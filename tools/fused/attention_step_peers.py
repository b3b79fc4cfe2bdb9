#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
r"""A training step's attention, forward and backward, compared with torch's own context parallel and with one GPU.

  torchrun --nproc-per-node 4 tools/fused/attention_step_peers.py --library build/fused/libperseus-fused.so \
      --shape 4x16x16x16384x128 --shape 4x16x16x32768x128 --shape 4x16x16x65536x128

A shape is batch x query heads x KV heads x whole sequence x head_dim; causal unless --full is given. All ways take
turns in every round and start together; a time is the median over rounds of the slowest rank, by events:

  ours      prs_attention_launch(), then prs_attention_backward_launch(); also each alone
  torch_cp  torch.distributed.tensor.experimental.context_parallel with cuDNN: what its call takes, and .backward().
            It balances causal work, and is left out with --full
  cudnn, flash  scaled_dot_product_attention of the whole sequence on one GPU, forward and backward, divided by the
            ranks; also forward alone. Of a batch that is smaller by --parts, and times --parts: a round of the whole
            batch would take too long. Every rank runs it, on data of its own
  flash3    the same by FlashAttention-3, whose operators --flash3 FILE has (flash3.py)

Our results are poisoned before each run, those of timed launches must have the same bits each time, and sampled rows of
the last one are compared: out and dq with a softmax in double precision, dk and dv with sums in double precision over
all queries, from the lse and out that the launch was given (timed.py). JSON, one object a shape. Status 1 when anything
was wrong, 77 without torch or GPUs.
"""
import argparse
import ctypes
import functools
import json
import os
import sys

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast is never used
try:
    import torch
    import torch.distributed as dist
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn import functional as F
except ImportError:
    sys.exit(77)
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import flash3  # noqa: E402
from attention_peers import positions, worst  # noqa: E402
from fused_context import Context, bounded, pointer, structs  # noqa: E402
from timed import Way, time_all  # noqa: E402

SAMPLED_ROWS = 32
Shape, Info, Operands, Gradients = (structs[f"prs_attention_{name}"]
                                    for name in ("shape", "info", "operands", "gradients"))


class Ours:
    """Plans of both passes. Tensors are [batch, rows, heads, head_dim]."""

    def __init__(self, context, shape, tensors):
        self.context, self.forward, self.backward, self.info = context, pointer(), pointer(), Info()
        self.q, self.k, self.v, self.dout = tensors
        self.out, self.dq, self.dk, self.dv = (torch.empty_like(t) for t in (self.q, *tensors[:3]))
        self.lse = torch.empty(shape.batch, shape.heads_q, self.q.shape[1], dtype=torch.float32, device="cuda")
        self.given = None
        lib, no_tuning = context.lib, None
        for name in ("plan_close", "backward_plan_close", "backward_plan_query"):
            getattr(lib, f"prs_attention_{name}").restype = None
        for name, plan in (("plan_open", self.forward), ("backward_plan_open", self.backward)):
            context.check(getattr(lib, f"prs_attention_{name}")(context.handle, ctypes.byref(shape), no_tuning,
                                                                ctypes.byref(plan)), name)
        lib.prs_attention_backward_plan_query(self.backward, ctypes.byref(self.info))
        self.run_forward()
        torch.cuda.synchronize()
        self.given = self.out.clone(), self.lse.clone()

    def stream(self):
        return pointer(torch.cuda.current_stream().cuda_stream)

    def run_forward(self):
        x = Operands(*(t.data_ptr() for t in (self.q, self.k, self.v, self.out, self.lse)))
        self.context.check(self.context.lib.prs_attention_launch(self.forward, ctypes.byref(x), self.stream()),
                           "prs_attention_launch")

    def run_backward(self, out=None, lse=None):
        out, lse = self.given if out is None else (out, lse)
        x = Gradients(*(t.data_ptr() for t in (self.q, self.k, self.v, out, lse, self.dout)), None,
                      *(t.data_ptr() for t in (self.dq, self.dk, self.dv)))
        self.context.check(self.context.lib.prs_attention_backward_launch(self.backward, ctypes.byref(x),
                                                                          self.stream()),
                           "prs_attention_backward_launch")

    def run_both(self):
        self.run_forward()
        self.run_backward(self.out, self.lse)

    def wrote_forward(self):
        return self.out, self.lse

    def wrote_backward(self):
        return self.dq, self.dk, self.dv

    def wrote_both(self):
        return *self.wrote_forward(), *self.wrote_backward()

    def close(self):
        torch.cuda.synchronize()
        self.context.lib.prs_attention_plan_close(self.forward)
        self.context.lib.prs_attention_backward_plan_close(self.backward)


class TorchContextParallel:
    """Slices of the whole sequence, dealt and sent by torch, which replaces functional.scaled_dot_product_attention."""

    def __init__(self, mesh, tensors, world):
        from torch.distributed.tensor.experimental import context_parallel
        self.mesh, self.context_parallel = mesh, context_parallel
        # The whole sequence, the same one, is made on each rank, cut by torch, and only the slices are kept.
        tensors = [t.clone() for t in tensors]
        for t in tensors:
            dist.broadcast(t, 0)
        self.q, self.k, self.v, self.dout = (torch.cat([t] * world, 1).transpose(1, 2).contiguous() for t in tensors)
        # Of one head, what its first call must give: rows of chunks r and 2 W - 1 - r.
        first = (t[:1, :1].float() for t in (self.q, self.k, self.v))
        chunks = F.scaled_dot_product_attention(*first, is_causal=True).chunk(2 * world, 2)
        self.want = torch.cat([chunks[dist.get_rank()], chunks[2 * world - 1 - dist.get_rank()]], 2)

    def __enter__(self):
        buffers = [self.q, self.k, self.v, self.dout]
        self.inside = self.context_parallel(self.mesh, buffers=buffers, buffer_seq_dims=[2] * 4,
                                            no_restore_buffers=set(buffers))
        self.inside.__enter__()
        for t in (self.q, self.k, self.v):
            t.requires_grad_()
        return self

    def __exit__(self, *exc):
        return self.inside.__exit__(*exc)

    def __call__(self):
        self.q.grad = self.k.grad = self.v.grad = None
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(self.q, self.k, self.v, is_causal=True)
        if self.want is not None:
            off = float((out[:1, :1].float() - self.want).norm() / self.want.norm())
            if not off < 0.02:
                raise RuntimeError(f"torch's context parallel is {off} from attention over the whole sequence: it "
                                   "attends to its own slice only, or deals the sequence in another way")
            self.want = None
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out.backward(self.dout)


def by_torch(backend, q, k, v, causal):
    """Of [batch, rows, heads, head_dim]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal,
                                              enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


class OneGpu:
    """The whole sequence on each GPU."""

    def __init__(self, attention, tensors, world, parts, causal):
        self.attention, self.causal = attention, causal
        batch = tensors[0].shape[0] // parts
        *self.inputs, self.dout = (torch.cat([t[:batch]] * world, 1) for t in tensors)
        for t in self.inputs:
            t.requires_grad_()

    def forward(self):
        with torch.no_grad():
            return self.attention(*self.inputs, self.causal)

    def both(self):
        out = self.attention(*self.inputs, self.causal)
        return out, *torch.autograd.grad(out, self.inputs, self.dout)


def one_gpu_ways(flash3_file, tensors, world, parts, causal):
    """By name. What FlashAttention-3 gives is compared with cuDNN's."""
    calls = {"cudnn": functools.partial(by_torch, SDPBackend.CUDNN_ATTENTION),
             "flash": functools.partial(by_torch, SDPBackend.FLASH_ATTENTION)}
    if flash3_file:
        flash3.load(flash3_file)
        calls["flash3"] = flash3.attention
    ways = {name: OneGpu(call, tensors, world, parts, causal) for name, call in calls.items()}
    if flash3_file:
        for have, want in zip(ways["flash3"].both(), ways["cudnn"].both()):
            have, want = have.detach().float(), want.detach().float()
            off = float((have - want).norm() / want.norm())
            if not off < 0.02:
                raise RuntimeError(f"FlashAttention-3 is {off} from cuDNN")
    return ways


class Reference:
    """One batch and the last head, gathered; sampled rows in double precision."""

    def __init__(self, ours, causal, rank, world):
        rows, self.dim = ours.q.shape[1], ours.q.shape[3]
        self.batch, self.causal = ours.q.shape[0] - 1, causal
        self.shared = ours.q.shape[2] // ours.k.shape[2]
        heads = slice(ours.q.shape[2] - self.shared, None)  # the query heads of the last KV head
        out, lse = ours.given
        mine = {"q": ours.q[self.batch, :, heads], "dout": ours.dout[self.batch, :, heads],
                "out": out[self.batch, :, heads], "lse": lse[self.batch, heads].T,
                "k": ours.k[self.batch, :, -1:], "v": ours.v[self.batch, :, -1:]}
        whole = {}
        for name, t in mine.items():
            parts = [torch.empty_like(t.contiguous()) for _ in range(world)]
            dist.all_gather(parts, t.contiguous())
            whole[name] = torch.cat(parts).double()  # [positions, heads, ...]
        self.whole = whole
        self.where = torch.cat([positions(r, world, rows, causal) for r in range(world)]).cuda()
        self.sample = torch.linspace(0, rows - 1, min(SAMPLED_ROWS, rows)).long().cuda()
        self.mine = self.sample + rank * rows

    def weights(self, q, dout, out, lse, k, v, queries, keys):
        """P and dS of queries x keys, and the sizes that dS is a difference of."""
        scores = q @ k.T * self.dim**-0.5
        if self.causal:
            scores.masked_fill_(self.where[keys][None, :] > self.where[queries][:, None], float("-inf"))
        p = (scores - lse[:, None]).exp()
        ds = p * (dout @ v.T - (dout * out).sum(-1, keepdim=True)) * self.dim**-0.5
        rough = p * (dout.abs() @ v.abs().T + (dout * out).abs().sum(-1, keepdim=True)) * self.dim**-0.5
        return p, ds, rough

    def gradients(self):
        """Sums, and the bounds of their errors: one bf16 rounding of each weight and one of the result, and fp32's."""
        w, every = self.whole, slice(None)
        k, v = w["k"][:, 0], w["v"][:, 0]
        last = [w[name][:, -1] for name in ("q", "dout", "out", "lse")]
        _, ds, rough = self.weights(*(t[self.mine] for t in last), k, v, self.mine, every)
        found = {"dq": [ds @ k, ds.abs() @ k.abs(), rough @ k.abs()]}
        found["dk"], found["dv"] = ([0.0, 0.0, 0.0] for _ in range(2))
        for head in range(self.shared):
            q, dout, out, lse = (w[name][:, head] for name in ("q", "dout", "out", "lse"))
            p, ds, rough = self.weights(q, dout, out, lse, k[self.mine], v[self.mine], every, self.mine)
            for name, weight, of, size in (("dk", ds, q, rough), ("dv", p, dout, p)):
                terms = weight.T @ of, weight.abs().T @ of.abs(), size.T @ of.abs()
                found[name] = [a + b for a, b in zip(found[name], terms)]
        return {name: (want, (want.abs() + size) * 2**-8 * 1.01 + rough * 2**-15)
                for name, (want, size, rough) in found.items()}

    def check(self, ours):
        """The largest error of a gradient over its root mean square, and how many elements are wrong or unwritten."""
        error = beyond = 0
        for name, (want, bound) in self.gradients().items():
            have = getattr(ours, name)
            difference = (have[self.batch, self.sample, -1].double() - want).abs()
            error = max(error, (difference.max() / want.square().mean().sqrt()).item())
            beyond += (~(difference <= bound)).sum().item() + have.isnan().sum().item()
        return error, beyond


def ways_of(ours, reference):
    """Our ways. The forward pass is checked by its bits here, and by attention_peers.py against its own reference."""
    def poison(wrote):
        for t in wrote():
            t.fill_(float("nan"))

    def checked(_):
        return reference.check(ours)

    def unwritten(_):
        return 0.0, ours.out.isnan().sum().item()
    travels = ours.k, ours.v, ours.dout
    made = {}
    for name, run, wrote, check in (("ours_forward", ours.run_forward, ours.wrote_forward, unwritten),
                                    ("ours_backward", ours.run_backward, ours.wrote_backward, checked),
                                    ("ours", ours.run_both, ours.wrote_both, checked)):
        sampled = ours.out if name == "ours_forward" else ours.dq
        made[name] = Way(run, lambda wrote=wrote: poison(wrote), wrote, check,
                         lambda t=sampled: t[reference.batch, int(reference.sample[0]), -1, :1], travels)
    return made


def measure(args, context, mesh, text, rank, world):
    batch, heads_q, heads_kv, seq, dim = (int(x) for x in text.split("x"))
    rows, causal = seq // world, not args.full
    parts = args.parts if batch % args.parts == 0 else 1
    torch.manual_seed(rank + 1)
    tensors = [torch.randn(batch, rows, h, dim, device="cuda", dtype=torch.bfloat16)
               for h in (heads_q, heads_kv, heads_kv, heads_q)]
    ours = Ours(context, Shape(batch, heads_q, heads_kv, dim, seq, int(causal), 0, 0.0), tensors)
    reference = Reference(ours, causal, rank, world)
    mine = ways_of(ours, reference)
    theirs = {}
    for name, way in one_gpu_ways(args.flash3, tensors, world, parts, causal).items():
        theirs[name], theirs[f"{name}_forward"] = Way(way.both), Way(way.forward)
    took = time_all({**mine, **theirs}, args.rounds, world, lambda usec: worst(usec, world),
                    args.corrupt if rank == world - 1 else 0)
    one = {name: took[name] * parts / world for name in theirs}
    del theirs
    cp = None
    if causal and heads_q == heads_kv and not args.no_torch_cp:
        # Its dispatcher stays on for all calls of scaled_dot_product_attention, so it takes turns with ours only.
        with TorchContextParallel(mesh, tensors, world) as call:
            again = {name: Way(w.run, w.poison, w.wrote, w.check, w.sampled, w.travels) for name, w in mine.items()
                     if name == "ours"}
            times = time_all({**again, "torch_cp": Way(call)}, args.rounds, world, lambda usec: worst(usec, world))
            cp, took["ours_beside_cp"] = times["torch_cp"], times["ours"]
            mine["ours_beside_cp"] = again["ours"]
    bad = sum(worst(w.found[1], world) + worst(w.differing, world) for w in mine.values())
    best, best_forward = (min(usec for name, usec in one.items() if name.endswith("_forward") is forward)
                          for forward in (False, True))
    row = {"kernel": "attention_step", "shape": text, "causal": causal, "gpus": world, "usec": took["ours"],
           "forward_usec": took["ours_forward"], "backward_usec": took["ours_backward"],
           "torch_cp_usec": cp, "ours_beside_cp_usec": took.get("ours_beside_cp"),
           **{f"one_gpu_{name}_divided_usec": round(usec, 1) for name, usec in one.items()},
           "share_of_one_gpu": round(best / took["ours"], 3),
           "share_of_one_gpu_forward": round(best_forward / took["ours_forward"], 3),
           "speedup_over_torch_cp": round(cp / took["ours_beside_cp"], 3) if cp else None,
           "one_gpu_parts": parts, "error_over_rms": max(worst(w.found[0], world) for w in mine.values()),
           "beyond_bound": int(bad), "checked_launches": sum(w.checked for w in mine.values()),
           "differing_elements": int(sum(worst(w.differing, world) for w in mine.values())),
           "predicted_backward_usec": round(ours.info.predicted_us, 1),
           "workspace_bytes": ours.info.workspace_bytes + ours.info.shared_bytes,
           "device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": args.commit}
    if rank == 0:
        print(json.dumps(row), flush=True)
    ours.close()
    return bad == 0


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--library", required=True)
    p.add_argument("--shape", action="append", required=True)
    p.add_argument("--full", action="store_true", help="not causal")
    p.add_argument("--parts", type=int, default=4, help="one GPU computes so small a part of the batch")
    p.add_argument("--flash3", metavar="FILE", help="FlashAttention-3's operators")
    p.add_argument("--no-torch-cp", action="store_true")
    p.add_argument("--rounds", type=int, default=6)
    p.add_argument("--corrupt", type=int, default=0,
                   help="change an element of what the Nth timed launch wrote: the check must find it")
    p.add_argument("--limit-s", type=int, default=300, help="of the whole script")
    p.add_argument("--commit", default="unknown")
    args = p.parse_args()
    bounded(args.limit_s)
    if not torch.cuda.is_available():
        sys.exit(77)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh("cuda", (world,), mesh_dim_names=("cp",))
    context = Context(args.library, torch.cuda.current_device(), dist.new_group(backend="gloo"))
    good = [measure(args, context, mesh, text, rank, world) for text in args.shape]
    context.close()
    dist.destroy_process_group()
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
