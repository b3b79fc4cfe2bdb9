#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
r"""MoE dispatch + grouped product: ours, through the C API, compared with NCCL and torch._grouped_mm, in the
same process group.

  torchrun --nproc-per-node 4 tools/fused/moe_peers.py --library build/fused/libperseus-fused.so \
      --preset deepseek-v3 --tokens 512 2048 8192

The peer is what is usual: sort (token, slot) pairs by expert, exchange counts, all-to-all of one row a pair (its sizes
must come to the host), sort what was received by expert, torch._grouped_mm. Both start from the router's choices on the
GPU. They alternate; a figure is the median over rounds of the slowest rank. What our timed launches wrote over poison,
with and without dispatch, must have the same bits each time; of the last one the maps are checked in full and rows on
samples in double precision (timed.py; `checked_launches` says how many). JSON, one row each. Exit status 77 without
GPUs or torch.
"""
import argparse
import ctypes
import json
import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from fused_context import Context, bounded, pointer, structs  # noqa: E402

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast is never used
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
try:
    import torch
    import torch.distributed as dist
except ImportError:
    sys.exit(77)
from timed import Way, time_all  # noqa: E402

PRESETS = {"deepseek-v3": (7168, 2048, 256, 8), "qwen3-30b": (2048, 768, 128, 8), "gpt-oss-120b": (2880, 2880, 128, 4)}
SAMPLED_ROWS = 192
Shape, Tuning, Info, Batch, Traffic = (
    structs[f"prs_{name}"] for name in ("moe_shape", "moe_tuning", "moe_info", "moe_batch", "fused_traffic"))
# of the command line, for the fields of Tuning
OPTIONS = ("ctas", "share", "route_ctas", "spread", "group", "put", "passes", "path", "returns")


def node_of(args):
    """The node of a rank: the ranks of this host are split over emulated nodes."""
    return int(os.environ.get("RANK", "0")) * args.nodes // int(os.environ.get("WORLD_SIZE", "1"))


class Ours:
    """A context and a plan of libperseus-fused."""

    def __init__(self, args, shape, hosts):
        self.ctx = Context(args.library, torch.cuda.current_device(), hosts, args.timeout_ms, node_of(args) + 1)
        self.lib, self.plan, self.info = self.ctx.lib, pointer(), Info()
        for function in (self.lib.prs_moe_plan_close, self.lib.prs_moe_plan_query, self.lib.prs_fused_traffic):
            function.restype = None
        tuning = Tuning(*(getattr(args, name) for name in OPTIONS))
        self.ctx.check(self.lib.prs_moe_plan_open(self.ctx.handle, ctypes.byref(shape), ctypes.byref(tuning),
                                                  ctypes.byref(self.plan)), "prs_moe_plan_open")
        self.lib.prs_moe_plan_query(self.plan, ctypes.byref(self.info))

    def batch(self, tokens, chosen, router_weights, weights, columns, groups):
        rows = self.info.capacity
        self.out = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
        self.rows = torch.empty(rows, 4, dtype=torch.int32, device="cuda")
        self.groups = torch.empty(groups, 2, dtype=torch.int32, device="cuda")
        self.keep = (tokens, chosen, router_weights, weights)
        at = [t.data_ptr() for t in self.keep + (self.out, self.rows, self.groups)]
        self.given = Batch(at[0], tokens.shape[0], *at[1:])

    def poison_out(self):
        self.out.fill_(float("nan"))

    def poison(self):
        self.poison_out()
        self.rows.fill_(-2)
        self.groups.fill_(-2)

    def run(self, call, name):
        self.ctx.check(call(self.plan, ctypes.byref(self.given), pointer(torch.cuda.current_stream().cuda_stream)),
                       name)

    def dispatch_gemm(self):
        self.run(self.lib.prs_moe_dispatch_gemm, "prs_moe_dispatch_gemm")

    def gemm(self):
        self.run(self.lib.prs_moe_gemm, "prs_moe_gemm")

    def traffic(self, run, launches=4):
        """What a launch of this rank sends to other nodes. The signal that says that a launch has ended may be counted
        a little later."""
        counts = []
        for repeats in (0, launches):
            for _ in range(repeats):
                run()
            torch.cuda.synchronize()
            dist.barrier()
            time.sleep(0.2)
            counts.append(Traffic())
            self.lib.prs_fused_traffic(self.ctx.handle, ctypes.byref(counts[-1]))
        return {name: (getattr(counts[1], name) - getattr(counts[0], name)) / launches
                for name in ("puts", "signals", "fences", "bytes")}

    def close(self):
        torch.cuda.synchronize()
        self.lib.prs_moe_plan_close(self.plan)
        self.ctx.close()


class Peer:
    """NCCL and torch._grouped_mm."""

    def __init__(self, tokens, chosen, weights_nh, experts):
        self.tokens, self.chosen, self.experts = tokens, chosen, experts
        self.weights = weights_nh.transpose(1, 2)  # [G, H, N], H contiguous
        self.world = dist.get_world_size()

    def dispatch(self):
        k, local = self.chosen.shape[1], self.experts // self.world
        order = torch.argsort(self.chosen.view(-1), stable=True)
        counts = torch.bincount(self.chosen.view(-1), minlength=self.experts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        # waits for the GPU
        sizes = torch.stack((theirs.view(self.world, local).sum(1), counts.view(self.world, local).sum(1))).tolist()
        rows = self.tokens[order // k]
        came = torch.empty(sum(sizes[0]), rows.shape[1], dtype=rows.dtype, device="cuda")
        dist.all_to_all_single(came, rows, sizes[0], sizes[1])
        expert = torch.arange(self.experts, device="cuda").remainder(local).repeat_interleave(
            theirs, output_size=came.shape[0])
        self.x = came[torch.argsort(expert, stable=True)]
        self.offsets = theirs.view(self.world, local).sum(0).cumsum(0).to(torch.int32)

    def multiply(self):
        self.out = torch._grouped_mm(self.x, self.weights, offs=self.offsets)

    def both(self):
        self.dispatch()
        self.multiply()


def choices(tokens, experts, top_k, zipf, rank, seed):
    """What a router would choose: different experts for each token, the i-th of a shuffled list in proportion to 1 / (i
    + 1)^zipf."""
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(seed))
    liked = torch.empty(experts)
    liked[order] = -zipf * torch.log(torch.arange(experts) + 1.0)
    noise = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed * 1000 + rank))
    weights, chosen = torch.topk(liked - torch.log(-torch.log(noise.clamp(1e-12, 1 - 1e-7))), top_k)
    return chosen.cuda(), torch.softmax(weights, 1).float().cuda()


def random_rows(tokens, hidden, rank):
    return torch.randn(tokens, hidden, generator=torch.Generator("cuda").manual_seed(77 + rank), device="cuda",
                       dtype=torch.float32).bfloat16()


class Expected:
    """The rows of this rank by definition: expert, sender (node by node from this rank's node on, each from this rank's
    local rank on), token, slot."""

    def __init__(self, every_chosen, every_weight, local, nodes):
        world, rank, (count, k) = dist.get_world_size(), dist.get_rank(), every_chosen[0].shape
        seats = world // nodes
        senders = [(rank // seats + i // seats) % nodes * seats + (rank + i) % seats for i in range(world)]
        turn = torch.cat([torch.full((count * k,), senders.index(r), device="cuda") for r in range(world)])
        pair = torch.arange(count * k, device="cuda").repeat(world)
        expert, weight = (torch.cat([c.view(-1) for c in every_chosen]) - rank * local,
                          torch.cat([w.view(-1) for w in every_weight]))
        mine = (expert >= 0) & (expert < local)
        expert, turn, pair, weight = expert[mine], turn[mine], pair[mine], weight[mine]
        order = torch.argsort((expert * world + turn) * count * k + pair)
        self.expert, turn, pair, self.weight = expert[order], turn[order], pair[order], weight[order]
        rows = torch.bincount(self.expert, minlength=local)
        whole = (rows + 127) // 128 * 128
        first, before = whole.cumsum(0) - whole, rows.cumsum(0) - rows
        self.place = first[self.expert] + torch.arange(self.expert.numel(), device="cuda") - before[self.expert]
        self.source = torch.stack((torch.tensor(senders, device="cuda")[turn], pair // k, pair % k), 1).to(torch.int32)
        self.groups = torch.stack((first, rows), 1).to(torch.int32)
        self.pick = torch.randint(max(self.place.numel(), 1), (min(SAMPLED_ROWS, self.place.numel()),),
                                  generator=torch.Generator().manual_seed(5)).cuda()

    def wrong_maps(self, ours):
        """The number of wrong entries of rows and of experts."""
        have = ours.rows[self.place]
        wrong = (have[:, :3] != self.source).any(1) | (have[:, 3].contiguous().view(torch.float32) != self.weight)
        return int(wrong.sum() + (ours.groups != self.groups).any(1).sum())

    def wrote(self, ours):
        """What a launch must write; between the rows of two experts there may be anything."""
        return ours.out[self.place], ours.rows[self.place], ours.groups

    def sampled(self, ours):
        return ours.out[int(self.place[self.pick[0]]), :1]


def wrong_values(ours, expected, hidden, tokens, weights_nh):
    """In sampled rows, the number of elements beyond one bf16 rounding and fp32 accumulation; and of rows never
    written."""
    wrong, worst = 0, 0.0
    place, expert, want, pick = expected.place, expected.expert, expected.source, expected.pick
    for r in range(dist.get_world_size()):
        at = pick[want[pick, 0] == r]
        source = random_rows(tokens, hidden, r)
        for i in at.tolist():
            x, w, have = source[want[i, 1].long()].double(), weights_nh[expert[i]].double(), ours.out[place[i]].double()
            exact, size = w @ x, w.abs() @ x.abs()
            error = (have - exact).abs()
            wrong += int((~(error <= exact.abs() * 2 ** -8 * 1.01 + size * 2 ** -21)).sum())
            worst = max(worst, float((error / exact.square().mean().sqrt()).max()))
    wrong += int(ours.out[place].isnan().any(1).sum())
    return wrong, worst


def slowest(value):
    t = torch.tensor([float(value)], device="cuda", dtype=torch.float64)
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return t.item()


def measure(args, preset, count, zipf, hosts):
    hidden, columns, experts, top_k = PRESETS[preset]
    rank, world = dist.get_rank(), dist.get_world_size()
    local = experts // world
    tokens = random_rows(count, hidden, rank)
    chosen, router_weights = choices(count, experts, top_k, zipf, rank, 1)
    weights = torch.randn(local, columns, hidden, generator=torch.Generator("cuda").manual_seed(7000 + rank),
                          device="cuda", dtype=torch.bfloat16)
    given = weights if args.layout == "nk" else weights.transpose(1, 2).contiguous()
    ours = Ours(args, Shape(count, hidden, columns, experts, top_k, 0, args.layout == "nk"), hosts)
    ours.batch(tokens, chosen, router_weights, given, columns, local)
    peer = Peer(tokens, chosen, weights, experts)
    every_chosen = [torch.empty_like(chosen) for _ in range(world)]
    every_weight = [torch.empty_like(router_weights) for _ in range(world)]
    dist.all_gather(every_chosen, chosen)
    dist.all_gather(every_weight, router_weights)
    expected = Expected(every_chosen, every_weight, local, args.nodes)

    def way(run, poison):
        return Way(run, poison, lambda: expected.wrote(ours),
                   lambda _: (expected.wrong_maps(ours), *wrong_values(ours, expected, hidden, count, weights)),
                   lambda: expected.sampled(ours), (tokens,))

    # The product alone reads the maps, and does not write them.
    own = {"own": way(ours.dispatch_gemm, ours.poison), "product": way(ours.gemm, ours.poison_out)}
    usec = time_all({**own, "peer": Way(peer.both), "dispatch": Way(peer.dispatch), "grouped_mm": Way(peer.multiply)},
                    args.rounds, world, slowest, args.corrupt if rank == world - 1 else 0)
    maps, values = (sum(w.found[i] for w in own.values()) for i in range(2))
    worst, differing = max(w.found[2] for w in own.values()), int(slowest(sum(w.differing for w in own.values())))
    text = ours.ctx.error()
    if text:
        print(f"moe_peers: rank {rank}: {text}", file=sys.stderr)
    peer.both()
    ours.dispatch_gemm()  # what is left there came from other tokens (timed.leave_other_data)
    # the peer sorts senders by rank
    theirs = expected.place[torch.argsort(expected.expert * world + expected.source[:, 0], stable=True)]
    same = peer.out.shape[0] == theirs.numel() and theirs.numel() > 0
    differs = (peer.out - ours.out[theirs]).abs().max() if same else torch.tensor(float("nan"))
    row = {"kernel": "moe", "peer": "nccl+torch._grouped_mm", "preset": preset, "layout": args.layout, "H": hidden,
           "N": columns, "E": experts, "top_k": top_k, "tokens": count, "zipf": zipf, "gpus": world,
           "nodes": args.nodes, "usec": round(usec["own"], 1), "product_usec": round(usec["product"], 1),
           "unfused_usec": round(usec["peer"], 1), "comm_usec": round(usec["dispatch"], 1),
           "compute_usec": round(usec["grouped_mm"], 1), "speedup": round(usec["peer"] / usec["own"], 3),
           "product_ratio": round(usec["grouped_mm"] / usec["product"], 3),
           "sm_split": {"share": ours.info.tuning.cluster, "ctas": ours.info.tuning.ctas,
                        "route_ctas": ours.info.tuning.route_ctas, "spread": ours.info.tuning.spread,
                        "group": ours.info.tuning.rows_per_signal, "put": ours.info.tuning.rows_per_put,
                        "passes": ours.info.tuning.passes},
           "predicted_usec": round(ours.info.predicted_us, 1), "most_rows": int(slowest(theirs.numel())),
           "map_errors": int(slowest(maps)), "beyond_bound": int(slowest(values)) + differing,
           "checked_launches": sum(w.checked for w in own.values()), "differing_elements": differing,
           "max_rel_err": slowest(worst), "max_difference_from_peer": slowest(differs), "commit": args.commit}
    ours.close()
    if rank == 0:
        print(json.dumps(row), flush=True)
    return row["map_errors"] == 0 and row["beyond_bound"] == 0


def join(args):
    """The process groups: NCCL's, and one of the hosts, which is returned."""
    bounded(args.limit_s)
    if not torch.cuda.is_available():
        sys.exit(77)
    if args.nodes > 1:  # NCCL and the software NIC read the node from their own variables
        os.environ["NCCL_HOSTID"], os.environ["SOFTNIC_NODE"] = str(node_of(args) + 1), str(node_of(args))
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl")
    return dist.new_group(backend="gloo")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", default="build/fused/libperseus-fused.so")
    parser.add_argument("--preset", nargs="+", choices=PRESETS, default=["deepseek-v3"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 2048, 8192])
    parser.add_argument("--zipf", nargs="+", type=float, default=[0.0])
    parser.add_argument("--layout", choices=["nk", "kn"], default="nk")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--corrupt", type=int, default=0,
                        help="change an element of what the Nth timed launch wrote: the check must find it")
    parser.add_argument("--timeout-ms", type=int, default=5000)
    parser.add_argument("--nodes", type=int, default=1, help="emulated; start torchrun under softnic-run")
    parser.add_argument("--limit-s", type=int, default=200, help="of the whole script")
    parser.add_argument("--commit", default="unknown")
    for name in OPTIONS:
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=0)
    args = parser.parse_args()
    hosts = join(args)
    # A copy to pageable memory on the default stream holds a lock of the CUDA driver until it runs, and the software
    # NIC needs the driver for what NCCL's kernel waits for there (doc/softnic.md): so work is not on the default
    # stream.
    with torch.cuda.stream(torch.cuda.Stream()):
        good = [measure(args, p, t, z, hosts) for p in args.preset for t in args.tokens for z in args.zipf]
    dist.destroy_process_group()
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
