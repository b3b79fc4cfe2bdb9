#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
r"""The fused kernels compared with PyTorch's symmetric memory, and with NCCL + cuBLAS, in one process group.

    torchrun --nproc-per-node 4 tools/fused/symm_mem_peers.py --library build/fused/libperseus-fused.so \
        --sizes 4096,8192

One JSON row for each kernel and size. The three methods take turns in every round, start together, and are timed by
events; a time is the median over rounds of the slowest rank. Our results are poisoned before each run; those of the
timed launches must have the same bits each time, and the last one's are compared with sums in double precision
(timed.py; `checked_launches` says how many), as are the others' last.
"""
import argparse
import ctypes
import json
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from fused_context import Context, bounded, pointer, structs  # noqa: E402

# NVLink multicast may be in use by others on the host, so it is off
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
os.environ["NCCL_NVLS_ENABLE"] = "0"
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from timed import Way, time_all  # noqa: E402

SAMPLED_ROWS = 64
OPS = {"reduce_scatter": 1, "allgather": 2, "allreduce": 3}
Shape, Operands = structs["prs_gemm_shape"], structs["prs_gemm_operands"]


class Mapped:
    """Describes device memory that is not torch's to torch."""

    def __init__(self, address, count):
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "<i2", "data": (address, False), "version": 3}


class Perseus(Context):
    def alloc(self, rows, columns):
        address = pointer()
        self.check(self.lib.prs_fused_alloc(self.handle, ctypes.c_size_t(rows * columns * 2), ctypes.byref(address)),
                   "prs_fused_alloc")
        return torch.as_tensor(Mapped(address.value, rows * columns),
                               device="cuda").view(torch.bfloat16).view(rows, columns)

    def free(self, tensor):
        self.check(self.lib.prs_fused_free(self.handle, pointer(tensor.data_ptr())), "prs_fused_free")

    def plan(self, op, m, n, k):
        plan, shape = pointer(), Shape(OPS[op], m, n, k, 0)
        self.check(self.lib.prs_gemm_plan_open(self.handle, ctypes.byref(shape), None, ctypes.byref(plan)),
                   "prs_gemm_plan_open")
        return plan

    def launch(self, op, plan, a, b, c):
        operands = Operands(*(t.data_ptr() for t in (a, b, c)))
        self.check(self.lib.prs_gemm_launch(plan, ctypes.byref(operands),
                                            pointer(torch.cuda.current_stream().cuda_stream)), op)


def ways(op, perseus, plan, a, b, c, world, group):
    """Callables by name; each returns the tensor that holds its result."""
    name = group.group_name
    rows, n = a.shape[0], b.shape[1]

    def own():
        perseus.launch(op, plan, a, b, c)
        return c

    if op == "allgather":
        gathered = torch.empty(rows * world, a.shape[1], dtype=a.dtype, device="cuda")
        out = torch.empty(rows * world, n, dtype=a.dtype, device="cuda")

        def unfused():
            dist.all_gather_into_tensor(gathered, a, group=group)
            return torch.matmul(gathered, b, out=out)

        return {"own": own, "unfused": unfused,
                "symm_mem": lambda: torch.ops.symm_mem.fused_all_gather_matmul(a, [b], 0, name)[1][0]}
    partial = torch.empty(rows, n, dtype=a.dtype, device="cuda")
    if op == "reduce_scatter":
        part = torch.empty(rows // world, n, dtype=a.dtype, device="cuda")

        def unfused():
            dist.reduce_scatter_tensor(part, torch.matmul(a, b, out=partial), group=group)
            return part

        return {"own": own, "unfused": unfused,
                "symm_mem": lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, name)}
    import torch.distributed._symmetric_memory as symm_mem
    shared = symm_mem.empty((rows, n), dtype=a.dtype, device="cuda")
    symm_mem.rendezvous(shared, name)

    def unfused():
        torch.matmul(a, b, out=partial)
        dist.all_reduce(partial, group=group)
        return partial

    def two_shot():
        torch.matmul(a, b, out=shared)
        return torch.ops.symm_mem.two_shot_all_reduce_(shared.view(-1), "sum", name).view(rows, n)

    return {"own": own, "unfused": unfused, "symm_mem": two_shot}


def reference(op, a, b, rows, rank, world):
    """Some rows of the result in double precision, and the bound of the error by bf16 partial sums."""
    if op == "allgather":
        block = a.shape[0]
        mine = torch.zeros(len(rows), a.shape[1], dtype=torch.float64, device="cuda")
        for at, row in enumerate(rows):
            if row // block == rank:
                mine[at] = a[row % block].double()
        dist.all_reduce(mine)
        total, magnitude = mine @ b.double(), mine.abs() @ b.double().abs()
        return total, total.abs() * 2**-8 * 1.01 + magnitude * 2**-21
    picked, wide = a[rows].double(), b.double()
    total = picked @ wide
    partials, magnitude = total.abs(), picked.abs() @ wide.abs()
    for tensor in (total, partials, magnitude):
        dist.all_reduce(tensor)
    return total, (total.abs() + partials) * 2**-8 * 1.01 + magnitude * 2**-21


def compare(op, result, want, bound, rows, rank):
    """Worst error over the root mean square, and the elements beyond the bound, of the sampled rows that this rank
    has."""
    here, at = list(range(len(rows))), rows
    if op == "reduce_scatter":
        block = result.shape[0]
        here = [i for i, row in enumerate(rows) if row // block == rank]
        at = [rows[i] % block for i in here]
    if not here:
        return 0.0, 0
    error = (result[at].double() - want[here]).abs()
    beyond = int((~(error <= bound[here])).sum())  # a NaN is beyond any bound
    return float(torch.nan_to_num(error, nan=float("inf")).max() / want.square().mean().sqrt()), beyond


def most(value, cpu_group):
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=cpu_group)
    return float(tensor[0])


def sampled(op, result, rows, rank):
    """An element that compare() reads; the last rank has one of 64 rows."""
    block = result.shape[0]
    at = next(row % block for row in rows if op != "reduce_scatter" or row // block == rank)
    return result[at, :1]


def one_row(op, size, options, perseus, rank, world, cpu_group):
    slice_size = size // world
    m, n, k = (size, slice_size, size) if op == "allgather" else (size, size, slice_size)
    torch.manual_seed(size * 8 + OPS[op] + rank * 1000003)
    a = torch.rand(slice_size if op == "allgather" else m, k, device="cuda").mul_(2).sub_(1).bfloat16()
    b = torch.rand(k, n, device="cuda").mul_(2).sub_(1).bfloat16()
    c = perseus.alloc(slice_size if op == "reduce_scatter" else m, n)
    plan = perseus.plan(op, m, n, k)
    methods = ways(op, perseus, plan, a, b, c, world, dist.group.WORLD)
    generator = torch.Generator().manual_seed(size)  # the same rows on every rank
    rows = torch.randint(0, m, (SAMPLED_ROWS,), generator=generator).tolist()
    want, bound = reference(op, a, b, rows, rank, world)
    checked = {name: Way(run, lambda: c.fill_(float("nan")), None,
                         lambda result: compare(op, result, want, bound, rows, rank))
               for name, run in methods.items()}
    own = checked["own"]
    own.wrote, own.sampled, own.travels = lambda: (c,), lambda: sampled(op, c, rows, rank), (a,)
    usec = time_all(checked, options.iterations, world, lambda t: most(t, cpu_group),
                    options.corrupt if rank == world - 1 else 0)
    differing = int(most(own.differing, cpu_group))
    row = {"kernel": op, "M": m, "N": n, "K": k, "gpus": world, "nodes": 1}
    for name, way in checked.items():
        error, _ = way.found  # the others round every partial sum more than once: reported, but no failure
        prefix = "" if name == "own" else name + "_"
        row[prefix + "usec"] = round(usec[name], 1)
        row[prefix + "max_rel_err"] = float(f"{most(error, cpu_group):.2e}")
    row.update(speedup=round(usec["unfused"] / usec["own"], 3),
               speedup_over_symm_mem=round(usec["symm_mem"] / usec["own"], 3),
               beyond_bound=int(most(own.found[1], cpu_group)) + differing, checked_launches=own.checked,
               differing_elements=differing, torch=torch.__version__, commit=options.commit)
    dist.barrier(group=cpu_group)
    perseus.lib.prs_gemm_plan_close(plan)
    perseus.free(c)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default="build/fused/libperseus-fused.so")
    parser.add_argument("--sizes", default="4096,8192,16384")
    parser.add_argument("--kernels", default=",".join(OPS))
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--corrupt", type=int, default=0,
                        help="change an element of what the Nth timed launch wrote: the check must find it")
    parser.add_argument("--limit-s", type=int, default=200, help="of the whole script")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    bounded(options.limit_s)
    rank, world, device = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=torch.device("cuda", device))
    cpu_group = dist.new_group(backend="gloo")
    import torch.distributed._symmetric_memory as symm_mem
    symm_mem.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    perseus = Perseus(options.library, device, cpu_group)
    bad = 0
    for size in (int(text) for text in options.sizes.split(",")):
        for op in options.kernels.split(","):
            row = one_row(op, size, options, perseus, rank, world, cpu_group)
            bad += row["beyond_bound"]
            if rank == 0:
                print(json.dumps(row), flush=True)
    perseus.close()
    dist.destroy_process_group()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
