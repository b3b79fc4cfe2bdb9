# SPDX-License-Identifier: Apache-2.0
"""Claims of python.py. scaled_products: products in e4m3 with each kind of scale, compared with bf16, torch._scaled_mm
alone, NCCL + torch._scaled_mm and torch's symmetric memory. scaled_paths: each kind of scale on each path.
paths_of_one_rank: what a plan of one rank chooses, and both paths, with and without scales.
quantised_results: results in e4m3 for the next product, compared with fp32, and with a quantising kernel after it."""
import ctypes
import json
import sys

import torch
import torch.distributed as dist
from perseus.bench import captured, once

import perseus

E4M3 = torch.float8_e4m3fn
CALLS = 4  # of one graph
# Largest error over the root mean square: results, and sums on their way, are rounded to bf16. "_fast" sums keep 14
# bits or so, ours and torch's alike.
LIMIT, FAST_LIMIT = 0.05, 0.1


def quantised(x, rows, columns):
    """x in blocks of rows x columns, and the scale of each block."""
    m, k = x.shape
    blocks = x.view(m // rows, rows, k // columns, columns)
    scale = blocks.abs().amax((1, 3)).float() / 448
    return (blocks / scale[:, None, :, None]).to(E4M3).view(m, k), scale


def wide(x, scale):
    """In fp32, without what was quantised."""
    (m, k), (rows, columns) = x.shape, scale.shape
    return (x.float().view(rows, m // rows, columns, k // columns) * scale[:, None, :, None]).view(m, k)


def operands(kind, a, w):
    """(a, its scales, weight, its scales), scales as perseus takes them; and both matrices in fp32."""
    (m, k), n = a.shape, w.shape[0]
    if kind == "bf16":
        return (a, w.t(), None, None), a.float(), w.float()
    size_a, size_w = {"tensor": ((m, k), (n, k)), "rows": ((1, k), (1, k)), "blocks": ((1, 128), (128, 128))}[kind]
    (a8, of_a), (w8, of_w) = quantised(a, *size_a), quantised(w, *size_w)
    laid_a = of_a.t().contiguous().t() if kind == "blocks" else of_a
    return (a8, w8.t(), laid_a, of_w.t()), wide(a8, of_a), wide(w8, of_w)


def gathered(a, world):
    whole = a.new_empty(a.shape[0] * world, a.shape[1])
    dist.all_gather_into_tensor(whole.view(torch.uint8) if a.dtype == E4M3 else whole,
                                a.view(torch.uint8) if a.dtype == E4M3 else a)
    return whole


def scattered(c, world):
    out = c.new_empty(c.shape[0] // world, c.shape[1])
    dist.reduce_scatter_tensor(out, c)
    return out


def ways(op, a, w, group):
    """By name: a call, and the fp32 product that it must give."""
    world, name = group.world, group.process_group.group_name
    gather = op == "all_gather"
    found = {}

    def reference(wide_a, wide_w):
        return gathered(wide_a, world) @ wide_w.t() if gather else scattered(wide_a @ wide_w.t(), world)
    want = reference(a.float(), w.float())
    bf16 = perseus.all_gather_matmul if gather else perseus.matmul_reduce_scatter
    found["perseus_bf16"] = (lambda: bf16(a, w.t(), group)), want
    found["nccl_bf16"] = ((lambda: gathered(a, world) @ w.t()) if gather else
                          (lambda: scattered(a @ w.t(), world))), want
    fp8 = perseus.all_gather_scaled_matmul if gather else perseus.scaled_matmul_reduce_scatter
    for kind in ("tensor", "rows", "blocks"):
        (a8, b8, of_a, of_b), *both = operands(kind, a, w)
        want = reference(*both)
        for fast in ((False, True) if kind != "blocks" else (False,)):
            end = f"_{kind}{'_fast' if fast else ''}"
            found["perseus" + end] = (lambda x=(a8, b8, of_a, of_b), f=fast: fp8(*x, group, use_fast_accum=f)), want
            if kind == "blocks":
                continue
            whole, of_whole = (gathered(a8, world), gathered(of_a, world) if kind == "rows" else of_a) if gather else (
                a8, of_a)

            def alone(x=whole, b=b8, p=of_whole, q=of_b, f=fast):
                return torch._scaled_mm(x, b, p, q, out_dtype=torch.bfloat16, use_fast_accum=f)
            found["product" + end] = alone, None

            def nccl(x=a8, b=b8, p=of_a, q=of_b, f=fast, rows=kind == "rows"):
                if gather:
                    return torch._scaled_mm(gathered(x, world), b, gathered(p, world) if rows else p, q,
                                            out_dtype=torch.bfloat16, use_fast_accum=f)
                return scattered(torch._scaled_mm(x, b, p, q, out_dtype=torch.bfloat16, use_fast_accum=f), world)
            found["nccl" + end] = nccl, want

            def symm(x=a8, b=b8, p=of_a, q=of_b, f=fast):
                if gather:
                    return torch.ops.symm_mem.fused_all_gather_scaled_matmul(
                        x, [b], p, [q], 0, name, [None], [None], [torch.bfloat16], [f])[1][0]
                return torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
                    x, b, p, q, "sum", 0, 0, name, [x.shape[0], b.shape[1]], None, None, torch.bfloat16, f)
            found["symm" + end] = symm, want
    return found


def error(have, want):
    return float(torch.nan_to_num((have.float() - want).abs(), nan=1e9).max() / want.square().mean().sqrt())


def scaled_products(group, rounds=9, shapes=((8192, 8192, 8192), (2048, 8192, 8192), (512, 8192, 8192))):
    """m x n x k over all ranks. Each way is captured into a graph of CALLS calls; ways take turns. A tensor's scale of
    all_gather must be that of all ranks, so a's values are made to have one largest value."""
    import torch.distributed._symmetric_memory as symm_mem
    symm_mem.get_symm_mem_workspace(group.process_group.group_name, 1 << 29)  # growing, it would move under a graph
    found, fine, world = {}, True, group.world
    for op in ("all_gather", "reduce_scatter"):
        for m, n, k in shapes:
            rows, columns, depth = (m // world, n // world, k) if op == "all_gather" else (m, n, k // world)
            a, w = (torch.rand(*size, device="cuda").mul_(2).sub_(1).bfloat16() for size in
                    ((rows, depth), (columns, depth)))
            a[0, 0] = 1
            row, calls, wants, taken = {}, {}, {}, {}
            # symm_mem last: where it cannot be captured, the others already are
            for way, (call, want) in sorted(ways(op, a, w, group).items(), key=lambda way: "symm" in way[0]):
                try:
                    calls[way] = captured(lambda call=call: [call() for _ in range(CALLS)])
                    wants[way], taken[way] = want, []
                except (RuntimeError, ValueError, TypeError) as failure:
                    row[f"{way}_failed"] = str(failure).splitlines()[0][:160]
                    fine = fine and not way.startswith("perseus")
                    torch.cuda.synchronize()
            for i in range(2 + rounds):
                for way, call in calls.items():
                    usec, results = once(call, group)
                    if i >= 2:
                        taken[way].append(usec / CALLS)
                    if wants[way] is not None and i in (0, 1 + rounds):
                        wrong = max(error(result, wants[way]) for result in results)
                        row[f"{way}_error"] = round(max(wrong, row.get(f"{way}_error", 0)), 4)
                        limit = FAST_LIMIT if way.endswith("_fast") else LIMIT
                        fine = fine and (wrong <= limit or not way.startswith("perseus"))
                    for result in results:
                        result.fill_(torch.nan)
            row.update({f"{way}_us": round(sorted(values)[len(values) // 2], 1) for way, values in taken.items()})
            found[f"{op} {m}x{n}x{k}"] = row
            del calls, wants
            torch.cuda.empty_cache()
    return found, fine


# ---- both paths ----

PATHS = {"chosen": 0, "fused": 1, "unfused": 2}  # enum prs_gemm_path
SCALINGS = {"tensor": 1, "rows": 2, "blocks": 3}  # enum prs_scaling
DTYPES = {torch.bfloat16: 0, torch.float32: 3}  # enum prs_dtype, 0 its default


class Planned:
    """A plan of a path, and a call of it. "chosen": the plan has no tuning. Raises perseus.PerseusError where there is
    none."""

    def __init__(self, group, op, path, kind, a, b, of_a, of_b, c):
        lib, rows = group.library, a.shape[0] * (group.world if op == "all_gather" else 1)
        scales = [t.t().contiguous() if kind == "blocks" else t for t in (of_a, of_b)]
        self.group, self.c = group, c
        self.inputs = {"a": a, "b": b} if kind == "bf16" else {"a": a, "b": b, "scale_a": scales[0],
                                                               "scale_b": scales[1]}
        shape = lib.prs_gemm_shape(op={"all_gather": 2, "reduce_scatter": 1, "all_reduce": 3}[op], m=rows, n=b.shape[1],
                                   k=b.shape[0], b_transposed=1, dtype=0 if kind == "bf16" else 4,
                                   c_dtype=DTYPES[c.dtype], c_anywhere=1, scaling=SCALINGS.get(kind, 0))
        tuning = ctypes.byref(lib.prs_gemm_tuning(path=PATHS[path])) if PATHS[path] else None
        self.plan = group._open(f"plan of {op}", "prs_gemm_plan_open", group.handle, ctypes.byref(shape), tuning)

    def __call__(self):
        lib, place = self.group.library, self.group.place
        operands = lib.prs_gemm_operands(c=place.write(self.c), **{k: place.read(t) for k, t in self.inputs.items()})
        self.group.launch(lib.prs_gemm_launch, self.plan, ctypes.byref(operands))
        return self.c

    def close(self):
        self.group.library.prs_gemm_plan_close(self.plan)


def scaled_paths(group, rounds=9, shapes=((128, 2560, 8192), (512, 2560, 8192), (128, 8192, 2048), (512, 8192, 2048),
                                          (32, 384, 1024))):
    """Rows over all ranks; n and k of this rank. Graphs of CALLS calls. A path that a shape cannot take is named."""
    found, fine, world = {}, True, group.world
    for m, n, k in shapes:
        for op in ("all_gather", "reduce_scatter", "all_reduce"):
            row = found[f"{op} {m}x{n}x{k}"] = {}
            a, w = (torch.rand(*size, device="cuda").mul_(2).sub_(1).bfloat16() for size in
                    ((m // world if op == "all_gather" else m, k), (n, k)))
            a[0, 0] = 1
            for kind in SCALINGS:
                x, wide_a, wide_w = operands(kind, a, w)
                want = (gathered(wide_a, world) if op == "all_gather" else wide_a) @ wide_w.t()
                if op != "all_gather":
                    dist.all_reduce(want)
                if op == "reduce_scatter":
                    want = want.chunk(world)[group.rank]
                for path, dtype in (("fused", torch.bfloat16), ("unfused", torch.bfloat16), ("unfused", torch.float32)):
                    name = f"{kind}_{path}{'_fp32' if dtype is torch.float32 else ''}"
                    c = torch.full(want.shape, torch.nan, dtype=dtype, device="cuda")
                    try:
                        way = Planned(group, op, path, kind, *x, c)
                    except perseus.PerseusError as e:
                        row[f"{name}_failed"] = str(e)[-160:]
                        continue
                    way()
                    call, taken = captured(lambda way=way: [way() for _ in range(CALLS)]), []
                    for _ in range(rounds):
                        c.fill_(torch.nan)
                        taken.append(once(call, group)[0] / CALLS)
                    wrong = error(c, want)
                    fine = fine and wrong <= LIMIT
                    row[f"{name}_us"], row[f"{name}_error"] = round(sorted(taken)[rounds // 2], 1), round(wrong, 4)
                    torch.cuda.synchronize()
                    way.close()
            if group.rank == 0:
                print(op, m, n, k, json.dumps(row), file=sys.stderr, flush=True)
    return found, fine


def paths_of_one_rank(group, rounds=9):
    """With GPUS=1. The chosen path takes at most 1.08 of the faster one's time."""
    found, fine = {}, True
    for m, n, k in ((32, 3584, 4096), (512, 3584, 4096), (1024, 3584, 4096), (2048, 2048, 8192), (4096, 1024, 4096),
                    (4096, 4608, 4096), (8192, 2048, 8192), (8192, 8192, 2048)) if group.world == 1 else ():
        a, w = (torch.rand(*size, device="cuda").mul_(2).sub_(1).bfloat16() for size in ((m, k), (n, k)))
        row = found[f"{m}x{n}x{k}"] = {}
        for kind in ("bf16", *SCALINGS):
            x, wide_a, wide_w = operands(kind, a, w)
            c, us, ways, want = a.new_empty(m, n), {}, {}, wide_a @ wide_w.t()
            for path in PATHS:
                way = ways[path] = Planned(group, "all_gather", path, kind, *x, c)
                c.fill_(torch.nan)
                way()
                fine = fine and error(c, want) <= LIMIT
                us[path] = captured(lambda way=way: [way() for _ in range(CALLS)]), []
            for _ in range(rounds):  # by turns, so that all have the same clock
                for call, taken in us.values():
                    taken.append(once(call, group)[0] / CALLS)
            us = {path: round(sorted(taken)[rounds // 2], 1) for path, (_, taken) in us.items()}
            row[kind] = us
            fine = fine and us["chosen"] <= 1.08 * min(us.values())
            torch.cuda.synchronize()
            for way in ways.values():
                way.close()
        print(m, n, k, json.dumps(row), file=sys.stderr, flush=True)
    return found, fine


# ---- results in e4m3 ----
def off_by(c, scale, want):
    """The largest error over what explains it: rounding to e4m3, to bf16 of gate and up before it, which the unfused
    path does, and some for the sums. Above 1 is wrong. Also of scales, each the largest number of its 128 over 448."""
    wide, sums = scale.float().repeat_interleave(128, 1), want.abs() * 2**-7 + 0.03 * want.square().mean().sqrt()
    rounding = torch.maximum(want.abs() * 2**-4, wide * 2**-10)
    largest = want.abs().unflatten(1, (-1, 128)).amax(2)
    of_largest = sums.unflatten(1, (-1, 128)).amax(2)
    return max(float(torch.nan_to_num((c.float() * wide - want).abs() / (rounding + sums), nan=1e9).max()),
               float(torch.nan_to_num((scale * 448 - largest).abs() / of_largest, nan=1e9).max()))


def quantised_results(group, rounds=9, shapes=((8192, 8192, 4096), (2048, 8192, 8192), (512, 4096, 1024))):
    """m x n x k: a gated MLP's first product, m over all ranks and n of this rank. two: a product with a bf16 result,
    then activation, gate and quantising by one compiled kernel of torch; the tensors are laid as ours."""
    found, fine, world = {}, True, group.world

    @torch.compile
    def finished(c):
        gate, up = c.float().chunk(2, 1)
        h = (torch.nn.functional.silu(gate) * up).unflatten(1, (-1, 128))
        scale = h.abs().amax(2) / 448
        return (h / scale[:, :, None].clamp(min=1e-30)).to(E4M3).flatten(1), scale.t().contiguous().t()

    for kind in ("rows", "blocks"):
        for m, n, k in shapes:
            a, w = (torch.rand(*size, device="cuda").mul_(2).sub_(1).div_(8).bfloat16() for size in
                    ((m // world, k), (n, k)))
            x, wide_a, wide_w = operands(kind, a, w)
            gate, up = (gathered(wide_a, world) @ wide_w.t()).chunk(2, 1)
            want = torch.nn.functional.silu(gate) * up
            calls = {"one": lambda x=x: perseus.all_gather_scaled_matmul_quantised(*x, group, activation="silu",
                                                                                   gated=True),
                     "two": lambda x=x: finished(perseus.all_gather_scaled_matmul(*x, group))}
            for call in calls.values():
                call()
            graphs = {name: captured(lambda call=call: [call() for _ in range(CALLS)]) for name, call in calls.items()}
            taken, worst, results = {name: [] for name in calls}, {}, {}
            for i in range(2 + rounds):
                for name, graph in graphs.items():
                    for c, scale in results.get(name, ()):
                        c.view(torch.uint8).fill_(0x7f)  # NaN
                        scale.fill_(torch.nan)
                    usec, results[name] = once(graph, group)
                    if i >= 2:
                        taken[name].append(usec / CALLS)
            for name in calls:
                worst[name] = max(off_by(c, scale, want) for c, scale in results[name])
            fine = fine and worst["one"] <= 1
            found[f"{kind}_{m}x{n}x{k}"] = {
                **{f"{name}_us": round(sorted(values)[rounds // 2], 1) for name, values in taken.items()},
                **{f"{name}_error": round(value, 3) for name, value in worst.items()}}
            del graphs, results
            torch.cuda.empty_cache()
    return found, fine
