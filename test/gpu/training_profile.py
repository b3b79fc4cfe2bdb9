# SPDX-License-Identifier: Apache-2.0
"""Where the time of a training step goes, by torch.profiler: on the device by kind of kernel and by kernel, gaps in
which the device does nothing, and what the host needs for the step."""
import re
import time

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# The first that fits. Kernels of this package are those of fused/: products with their transfers, experts, attention.
KINDS = (("ours", r"prs_|[a-z]_args\b"),
         ("nccl", r"nccl"),
         ("attention", r"flash|fmha|sdpa|cudnn"),
         ("products", r"nvjet|gemm|cutlass|xmma|cublas|splitK"),
         ("compiled", r"triton"),
         ("optimizer", r"multi_tensor|adam|foreach|Norm.*Functor.*list"),
         ("softmax", r"[Ss]oft[Mm]ax|nll"),
         ("copies", r"[Mm]emcpy|[Mm]emset|copy|CatArray|cat_|chunk_cat|split_with_sizes"),
         ("elementwise", r"elementwise|reduce_kernel|index|layer_norm|fill"))


def kind_of(name):
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), "others")


def covered(spans):
    """Length of the union of (begin, end)."""
    total = end = 0
    for begin, until in sorted(spans):
        total += max(0, until - max(begin, end))
        end = max(end, until)
    return total


def recorded(steps, count):
    """What ran on the device (the host, where there is none) in `count` steps: (name, begin, end) in ns."""
    cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as found:
        steps(count)
        torch.cuda.synchronize() if cuda else None
    kind = DeviceType.CUDA if cuda else DeviceType.CPU
    return [(e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in found.profiler.kineto_results.events()
            if e.device_type() == kind and e.duration_ns() and not e.name().startswith(("nccl:", "## ", "gpu_user"))
            and not re.search(r"#|Activity Buffer", e.name())]


def host_ms(step):
    """What the host needs to enqueue a step while the device has nothing to do."""
    torch.cuda.synchronize() if torch.cuda.is_available() else None
    begin = time.perf_counter()
    step()
    return (time.perf_counter() - begin) * 1e3


def table(name, events, count, host):
    """Lines, and a row for the results. alone: the time in which only kernels of that kind run."""
    if not events:
        return [f"{name}: the profiler saw nothing"], {}
    span = (max(e[2] for e in events) - min(e[1] for e in events)) / count / 1e6
    busy = covered([e[1:] for e in events]) / count / 1e6
    kinds, kernels = {}, {}
    for kernel, begin, end in events:
        kinds.setdefault(kind_of(kernel), []).append((begin, end))
        kernels.setdefault(kernel, []).append(end - begin)
    lines = [f"{name}: {span:.1f} ms on the device, of them {span - busy:.1f} nothing; host {host:.1f} ms; "
             f"{len(events) / count:.0f} kernels"]
    row = {"device_ms": round(span, 2), "gaps_ms": round(span - busy, 2), "host_ms": round(host, 2)}
    for kind in sorted(kinds, key=lambda kind: -covered(kinds[kind])):
        sums = covered(kinds[kind]) / count / 1e6
        alone = busy - covered([s for other, spans in kinds.items() if other != kind for s in spans]) / count / 1e6
        lines.append(f"  {kind:12} {sums:7.2f} ms, alone {alone:7.2f}, {len(kinds[kind]) / count:5.0f} kernels")
        row[f"{kind}_ms"] = round(sums, 2)
    for kernel in sorted(kernels, key=lambda k: -sum(kernels[k]))[:24]:
        times = kernels[kernel]
        lines.append(f"    {sum(times) / count / 1e6:7.2f} ms {len(times) / count:5.0f} x "
                     f"{sum(times) / len(times) / 1e3:7.1f} us  {kind_of(kernel)}: {kernel[:100]}")
    return lines, row
