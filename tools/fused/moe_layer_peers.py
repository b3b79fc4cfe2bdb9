#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
r"""A whole MoE layer, [gate | up] with SiLU, down, weighted by the router: ours, through the C API, compared with
what is usual, in the same process group.

  torchrun --nproc-per-node 2 tools/fused/moe_layer_peers.py --library build/fused/libperseus-fused.so \
      --tokens 128 512 2048 8192

The peers: "nccl" is NCCL's all-to-all both ways (its sizes come to the host), torch._grouped_mm twice, SiLU * up, an
fp32 index_add. "symm_mem" is the same with torch.ops.symm_mem.all_to_all_vdev_2d, whose sizes stay on the GPU; a
machine where it cannot run says why in `symm_mem_error`. "products" are the two torch._grouped_mm alone, on rows that
are there. They alternate; a figure is the median over rounds of the slowest rank. Our timed launches must write the
same bits over poison each time. With --nodes, under softnic-run, ranks are on emulated nodes, NCCL's way may use the
same NICs, and a row says what our launch puts, signals, fences and sends under PERSEUS_ORDER. On sampled tokens, ours
and NCCL's way are compared with the layer in double precision: `error` is the root of the mean square error over that
of the result, `error_ratio` ours over theirs. Where our plan takes one kernel, for few tokens, "kernels" is our other
path, --path 1; where it takes several, "one" is --path 2, if one kernel can take so many tokens. Where sums return
during the second product, "late" is --returns 1. They are checked like ours. JSON, one row each. Exit status 77 without
GPUs or torch.

With --dtype e4m3 our weights are quantised in blocks of 128 x 128 beforehand, and our launch quantises the tokens. The
peers stay in bf16, and so does "bf16", our own layer. `error` is then that from the layer in double precision of the
quantised operands, and `whole_error` that from the layer without quantising. `weights_usec`: reading the weights once,
at 4.3 TB/s. With --deep-gemm, "deep_gemm" is DeepGEMM's MegaMoE of the same quantised weights (the package
sgl-deep-gemm 0.1.5, which compiles its kernels with nvcc when they first run), quantising included, in place of
"symm_mem". With --beside LIBRARY, "beside" is our layer of another build, also in place of "symm_mem".
"""
import argparse
import json
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from moe_peers import (OPTIONS, PRESETS, Batch, Ours, Peer, Shape, choices, dist, join,  # noqa: E402
                       random_rows, slowest, torch)
from timed import Way, time_all  # noqa: E402

SAMPLED_TOKENS = 16
SILU, E4M3 = 4, 4  # enum prs_activation, enum prs_dtype
KERNELS, ONE = 1, 2  # enum prs_moe_path
MOST_CHOICES = 32768  # of all ranks, in one kernel (perseus/moe.h)
LATE, EARLY = 1, 2  # enum prs_moe_returns
MOST_ERROR = 1.2  # of NCCL's way
# Of e4m3: an activation between two of its numbers may become either, because sums before it were rounded. Some in a
# hundred do, by a tenth: 0.017 to 0.024 of the whole, the more the fewer columns an expert has.
MOST_SCALED_ERROR = 0.03
MEMORY_BYTES_PER_US = 4.3e6


def expert_weights(expert, hidden, inner):
    """The same on every rank: [2 I, H] and [H, I]."""
    generator = torch.Generator("cuda").manual_seed(7000 + expert)
    gate_up = torch.randn(2 * inner, hidden, generator=generator, device="cuda", dtype=torch.bfloat16) * hidden ** -0.5
    return gate_up, torch.randn(hidden, inner, generator=generator, device="cuda", dtype=torch.bfloat16) * inner ** -0.5


def scaled(x, rows):
    """x in e4m3, with a scale for each rows x 128: fused/core/quantise.cuh says how."""
    blocks = x.float().unflatten(-2, (-1, rows)).unflatten(-1, (-1, 128))
    scale = (blocks.abs().amax((-3, -1), keepdim=True) / 448).clamp(min=2 ** -126)
    numbers = (blocks * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return numbers.flatten(-2).flatten(-3, -2), scale.squeeze(-1).squeeze(-2)


def values(numbers, scale, rows):
    blocks = numbers.double().unflatten(-2, (-1, rows)).unflatten(-1, (-1, 128))
    return (blocks * scale.double().unsqueeze(-2).unsqueeze(-1)).flatten(-2).flatten(-3, -2)


def quantised(x, rows):
    """What x stands for once it is in e4m3."""
    return values(*scaled(x, rows), rows)


class OurLayer(Ours):
    def layer_batch(self, tokens, chosen, router_weights, gate_up, down, gate_up_scales=None, down_scales=None):
        self.out = torch.empty_like(tokens)
        self.status = torch.zeros(8, dtype=torch.int32, device="cuda")
        self.keep = (tokens, chosen, router_weights, gate_up, down, gate_up_scales, down_scales)
        at = [t.data_ptr() for t in (tokens, chosen, router_weights, gate_up, self.out)]
        self.given = Batch(at[0], tokens.shape[0], *at[1:], down=down.data_ptr(), status=self.status.data_ptr())
        if gate_up_scales is not None:
            self.given.weight_scales, self.given.down_scales = gate_up_scales.data_ptr(), down_scales.data_ptr()

    def layer(self):
        self.run(self.lib.prs_moe_layer, "prs_moe_layer")


class NcclLayer(Peer):
    """moe_peers' dispatch, then the way back."""

    def __init__(self, tokens, chosen, router_weights, gate_up, down, experts):
        super().__init__(tokens, chosen, gate_up, experts)
        self.router_weights, self.down = router_weights, down.transpose(1, 2)

    def products(self):
        gate, up = torch._grouped_mm(self.x, self.weights, offs=self.offsets).chunk(2, 1)
        self.y = torch._grouped_mm(torch.nn.functional.silu(gate) * up, self.down, offs=self.offsets)

    def both(self):
        self.dispatch()
        self.products()
        self.combine()

    def dispatch(self):
        """As Peer.dispatch(), but it keeps what the way back needs."""
        k, local = self.chosen.shape[1], self.experts // self.world
        self.order = torch.argsort(self.chosen.view(-1), stable=True)
        counts = torch.bincount(self.chosen.view(-1), minlength=self.experts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        # waits for the GPU
        self.sizes = torch.stack((theirs.view(self.world, local).sum(1),
                                  counts.view(self.world, local).sum(1))).tolist()
        rows = self.tokens[self.order // k]
        came = torch.empty(sum(self.sizes[0]), rows.shape[1], dtype=rows.dtype, device="cuda")
        dist.all_to_all_single(came, rows, *self.sizes)
        expert = torch.arange(self.experts, device="cuda").remainder(local).repeat_interleave(
            theirs, output_size=came.shape[0])
        self.sorted = torch.argsort(expert, stable=True)
        self.x = came[self.sorted]
        self.offsets = theirs.view(self.world, local).sum(0).cumsum(0).to(torch.int32)

    def combine(self):
        back = torch.empty_like(self.y)
        back[self.sorted] = self.y
        rows = torch.empty(self.order.numel(), self.y.shape[1], dtype=self.y.dtype, device="cuda")
        dist.all_to_all_single(rows, back, self.sizes[1], self.sizes[0])
        out = torch.zeros(self.tokens.shape, dtype=torch.float32, device="cuda")
        out.index_add_(0, self.order // self.chosen.shape[1],
                       rows.float() * self.router_weights.view(-1)[self.order, None])
        self.out = out.bfloat16()


class SymmMemLayer:
    """torch's all-to-all with splits on the GPU. Its memory has room for twice what even choices bring."""

    def __init__(self, tokens, chosen, router_weights, gate_up, down, experts):
        import torch.distributed._symmetric_memory as symm_mem

        symm_mem.set_backend("NVSHMEM")
        self.group, self.world = dist.group.WORLD.group_name, dist.get_world_size()
        self.tokens, self.chosen, self.router_weights, self.experts = tokens, chosen, router_weights, experts
        self.weights, self.down = gate_up.transpose(1, 2), down.transpose(1, 2)
        pairs, hidden = chosen.numel(), tokens.shape[1]
        room = 2 * pairs + experts * 8

        def empty(*shape, dtype=torch.bfloat16):
            t = symm_mem.empty(*shape, dtype=dtype, device="cuda")
            symm_mem.rendezvous(t, self.group)
            return t
        self.rows, self.came, self.y, self.back = (empty(pairs, hidden), empty(room, hidden), empty(room, hidden),
                                                   empty(pairs, hidden))
        self.splits, self.placed, self.returned = (empty(*shape, dtype=torch.int64)
                                                   for shape in ((experts,), (2, experts), (2, experts)))

    def both(self):
        k, ops = self.chosen.shape[1], torch.ops.symm_mem
        order = torch.argsort(self.chosen.view(-1), stable=True)
        self.splits.copy_(torch.bincount(self.chosen.view(-1), minlength=self.experts))
        self.rows.copy_(self.tokens[order // k])
        ops.all_to_all_vdev_2d(self.rows, self.came, self.splits, self.placed, self.group, 8)
        local = self.experts // self.world
        sizes, starts = self.placed.view(2, local, self.world)  # expert by expert, each from every rank
        offsets = (starts[:, -1] + sizes[:, -1]).to(torch.int32)
        gate, up = torch._grouped_mm(self.came, self.weights, offs=offsets).chunk(2, 1)
        self.y.copy_(torch._grouped_mm(torch.nn.functional.silu(gate) * up, self.down, offs=offsets))
        ops.all_to_all_vdev_2d_offset(self.y, self.back, self.placed, self.returned, self.group)
        out = torch.zeros(self.tokens.shape, dtype=torch.float32, device="cuda")
        out.index_add_(0, order // k, self.back.float() * self.router_weights.view(-1)[order, None])
        self.out = out.bfloat16()


class DeepGemmLayer:
    """DeepGEMM's layer for Hopper: a kernel that quantises tokens into symmetric memory, then all the rest in one."""

    def __init__(self, tokens, chosen, router_weights, gate_up, down, gate_up_scales, down_scales, experts):
        import deep_gemm

        (count, hidden), inner = tokens.shape, down.shape[2]
        self.run, self.tokens, self.router_weights = deep_gemm, tokens, router_weights
        self.chosen, self.out = chosen.to(torch.int32), torch.empty_like(tokens)
        self.buffer = deep_gemm.get_symm_buffer_for_sm90_mega_moe(dist.group.WORLD, experts, count, chosen.shape[1],
                                                                  hidden, inner)
        self.weights = deep_gemm.transform_weights_for_mega_moe_sm90((gate_up, gate_up_scales), (down, down_scales))

    def both(self):
        b = self.buffer
        self.run.mega_moe_pre_dispatch_sm90(self.tokens, self.chosen, self.router_weights, b.x, b.x_sf, b.topk_idx,
                                            b.topk_weights, len(self.tokens))
        self.run.fp8_mega_moe(self.out, *self.weights, b)


def exact_results(tokens, chosen, router_weights, picked, hidden, inner, dtype="bf16"):
    """e4m3: with tokens, weights and activated columns quantised."""
    out = torch.zeros(len(picked), hidden, dtype=torch.float64, device="cuda")
    for i, t in enumerate(picked):
        for slot in range(chosen.shape[1]):
            gate_up, down = expert_weights(int(chosen[t, slot]), hidden, inner)
            x = tokens[t]
            if dtype == "e4m3":
                gate_up, down, x = quantised(gate_up, 128), quantised(down, 128), quantised(x[None], 1)[0]
            gate, up = (gate_up.double() @ x.double()).chunk(2)
            active = torch.nn.functional.silu(gate) * up
            if dtype == "e4m3":
                active = quantised(active[None], 1)[0]
            out[i] += float(router_weights[t, slot]) * (down.double() @ active)
    return out


def relative_error(have, exact):
    return float(((have.double() - exact).square().mean() / exact.square().mean()).sqrt())


def between_nodes(args, ours):
    """Of a launch of the rank that sends most."""
    if args.nodes == 1:
        return {}
    return {"nodes": args.nodes, "order": os.environ.get("PERSEUS_ORDER", "auto"),
            **{name: slowest(n) for name, n in ours.traffic(ours.layer).items()}}


def open_ours(args, hosts, sizes, dtype, tensors):
    """Our layer. For e4m3 the weights are quantised first."""
    count, hidden, inner, experts, top_k = sizes
    shape = Shape(count, hidden, 2 * inner, experts, top_k, args.capacity, 1, SILU, 1, 1)
    if dtype == "e4m3":
        shape.dtype = E4M3
        tokens, chosen, router_weights, *weights = tensors
        made = [[torch.stack(parts) for parts in zip(*(scaled(expert, 128) for expert in w))] for w in weights]
        tensors = (tokens, chosen, router_weights, made[0][0], made[1][0], made[0][1], made[1][1])
    ours = OurLayer(args, shape, hosts)
    ours.layer_batch(*tensors)
    return ours


def measure(args, preset, count, zipf, hosts):
    hidden, inner, experts, top_k = PRESETS[preset]
    experts = args.experts or experts
    rank, world = dist.get_rank(), dist.get_world_size()
    local = experts // world
    tokens = random_rows(count, hidden, rank)
    chosen, router_weights = choices(count, experts, top_k, zipf, rank, 1)
    gate_up, down = (torch.empty(local, 2 * inner, hidden, dtype=torch.bfloat16, device="cuda"),
                     torch.empty(local, hidden, inner, dtype=torch.bfloat16, device="cuda"))
    for e in range(local):
        gate_up[e], down[e] = expert_weights(rank * local + e, hidden, inner)
    sizes, tensors = (count, hidden, inner, experts, top_k), (tokens, chosen, router_weights, gate_up, down)
    ours = open_ours(args, hosts, sizes, args.dtype, tensors)
    nccl = NcclLayer(tokens, chosen, router_weights, gate_up, down, experts)
    picked = torch.randint(count, (min(SAMPLED_TOKENS, count),), generator=torch.Generator().manual_seed(5)).tolist()
    whole = exact_results(tokens, chosen, router_weights, picked, hidden, inner)
    exact = exact_results(tokens, chosen, router_weights, picked, hidden, inner, args.dtype)
    others = {}  # our layer otherwise: by another path, at another time, of another build

    def checked(layer):
        return Way(layer.layer, lambda: layer.out.fill_(float("nan")), lambda: (layer.out,),
                   lambda _: relative_error(layer.out[picked], exact), lambda: layer.out[picked[0], :1], (tokens,))

    own = checked(ours)
    ways, symm_mem_error = {"own": own, "nccl": Way(nccl.both), "products": Way(nccl.products)}, None
    if ours.info.tuning.path == ONE:
        others["kernels"] = {"path": KERNELS}
    elif ours.info.tuning.returns == EARLY:
        others["late"] = {"returns": LATE}
    if not args.path and ours.info.tuning.path == KERNELS and args.nodes == 1 and args.capacity == 0 \
            and world * count * top_k <= MOST_CHOICES:
        others["one"] = {"path": ONE}
    if args.beside:
        others["beside"] = {"library": args.beside}
    layers = {}
    for name, changed in others.items():
        layers[name] = open_ours(argparse.Namespace(**{**vars(args), **changed}), hosts, sizes, args.dtype, tensors)
        ways[name] = checked(layers[name])
    plain = open_ours(args, hosts, sizes, "bf16", tensors) if args.dtype != "bf16" else None
    if plain:
        ways["bf16"] = Way(plain.layer)
    deep_gemm = None
    if args.deep_gemm:
        _, _, _, *made = ours.keep
        deep_gemm = DeepGemmLayer(tokens, chosen, router_weights, *made, experts)
        ways["deep_gemm"] = Way(deep_gemm.both)
    try:
        if args.nodes > 1 or args.deep_gemm or args.beside:
            raise NotImplementedError("not between emulated nodes, nor with --deep-gemm or --beside")
        symm_mem = SymmMemLayer(tokens, chosen, router_weights, gate_up, down, experts)
        symm_mem.both()
        torch.cuda.synchronize()
        ways["symm_mem"] = Way(symm_mem.both)
    except Exception as e:  # torch without NVSHMEM, or another version of its ops
        symm_mem_error = str(e).splitlines()[0]
    usec = time_all(ways, args.rounds, world, slowest, args.corrupt if rank == world - 1 else 0)
    text = ours.ctx.error()
    if text:
        print(f"moe_layer_peers: rank {rank}: {text}", file=sys.stderr)
    nccl.both()
    error, theirs = slowest(own.found), slowest(relative_error(nccl.out[picked], whole))
    limit = MOST_ERROR * theirs if args.dtype == "bf16" else MOST_SCALED_ERROR
    differing, dropped = int(slowest(own.differing)), int(slowest(int(ours.status[1])))
    row = {"kernel": "moe_layer", "preset": preset, "H": hidden, "I": inner, "E": experts, "top_k": top_k,
           "tokens": count, "zipf": zipf, "gpus": world, "usec": round(usec["own"], 1),
           "nccl_usec": round(usec["nccl"], 1), "products_usec": round(usec["products"], 1),
           "symm_mem_usec": round(usec["symm_mem"], 1) if "symm_mem" in usec else None,
           "symm_mem_error": symm_mem_error, **between_nodes(args, ours),
           "speedup": round(usec["nccl"] / usec["own"], 3), "of_products": round(usec["own"] / usec["products"], 3),
           "predicted_usec": round(ours.info.predicted_us, 1), "ctas": ours.info.tuning.ctas, "error": error,
           "nccl_error": theirs, "error_ratio": round(error / theirs, 3), "checked_launches": own.checked,
           "differing_elements": differing, "rows_dropped": dropped, "commit": args.commit}
    right = differing == 0 and dropped == 0 and error <= limit
    for name, layer in layers.items():
        found, changing = slowest(ways[name].found), int(slowest(ways[name].differing))
        row |= {f"{name}_usec": round(usec[name], 1), f"{name}_error": found, f"{name}_differing": changing}
        if "path" in others[name]:
            row |= {"path": ours.info.tuning.path, f"{name}_predicted_usec": round(layer.info.predicted_us, 1)}
        right = right and changing == 0 and found <= limit
        layer.close()
    if deep_gemm:
        deep_gemm.out.fill_(float("nan"))
        deep_gemm.both()
        row |= {"deep_gemm_usec": round(usec["deep_gemm"], 1),
                "deep_gemm_error": slowest(relative_error(deep_gemm.out[picked], exact))}
        deep_gemm.buffer.destroy()
    if plain:
        ours.layer()
        weights = local * 3 * hidden * inner / MEMORY_BYTES_PER_US
        row |= {"dtype": args.dtype, "bf16_usec": round(usec["bf16"], 1), "weights_usec": round(weights, 1),
                "whole_error": slowest(relative_error(ours.out[picked], whole))}
        plain.close()
    ours.close()
    if rank == 0:
        print(json.dumps(row), flush=True)
    return right


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", default="build/fused/libperseus-fused.so")
    parser.add_argument("--preset", nargs="+", choices=PRESETS, default=["deepseek-v3"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[128, 512, 2048, 8192])
    parser.add_argument("--experts", type=int, default=0,
                        help="instead of the preset's: a quarter of them on one GPU is one rank's load of four")
    parser.add_argument("--dtype", choices=("bf16", "e4m3"), default="bf16", help="of our tokens and weights")
    parser.add_argument("--deep-gemm", action="store_true", help="compare with DeepGEMM; with --dtype e4m3")
    parser.add_argument("--beside", metavar="LIBRARY", help="another build of ours, by turns")
    parser.add_argument("--zipf", nargs="+", type=float, default=[0.0])
    parser.add_argument("--capacity", type=int, default=0, help="rows of each rank; 0: as many as can ever come")
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
    if args.deep_gemm and (args.dtype != "e4m3" or args.nodes > 1):
        parser.error("--deep-gemm: only with --dtype e4m3, on one node")
    hosts = join(args)
    with torch.cuda.stream(torch.cuda.Stream()):
        good = [measure(args, p, t, z, hosts) for p in args.preset for t in args.tokens for z in args.zipf]
    dist.destroy_process_group()
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
