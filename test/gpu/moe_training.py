# SPDX-License-Identifier: Apache-2.0
"""The claim moe_training of python.py: forward and backward of routed experts, in each way, compared with their six
grouped products alone."""
import torch
import torch.distributed as dist
import torch.nn.functional as F

import perseus

LIMIT = 0.02  # distance of a result or gradient from fp32, over its norm
CASES = (("deepseek-v3", 7168, 2048, 256, 8192, (512, 2048, 8192)), ("qwen3-30b", 2048, 768, 128, 4096, (4096,)))
TOP_K = 8
LEAVES = ("result", "tokens", "router_weights", "gate_up", "down")


def by_parts(x, chosen, weights, gate_up, down, plan):
    d = perseus.moe_dispatch(x, chosen, weights, plan)
    gate, up = torch._grouped_mm(d.rows, gate_up.transpose(1, 2), offs=d.ends).chunk(2, -1)
    return perseus.moe_combine(torch._grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=d.ends), d)


WAYS = {"moe_layer": lambda *a: perseus.moe_layer(*a)[0],
        "recompute": lambda *a: perseus.moe_layer(*a, recompute=True)[0], "by_parts": by_parts}


def forward_and_backward(way, leaves, chosen, plan, g):
    for leaf in leaves:
        leaf.grad = None
    x, weights, gate_up, down = leaves
    out = way(x, chosen, weights, gate_up, down, plan)
    out.backward(g)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def products_alone(leaves, chosen, plan):
    """Six calls of torch._grouped_mm with the rows and layouts of the layer: two forward, two for each of its matrices
    back."""
    x, weights, gate_up, down = (leaf.detach() for leaf in leaves)
    d = perseus.moe_dispatch(x, chosen, weights, plan)
    first = torch._grouped_mm(d.rows, gate_up.transpose(1, 2), offs=d.ends)
    gate, up = first.chunk(2, -1)
    h = F.silu(gate) * up
    of_sums = torch._grouped_mm(h, down.transpose(1, 2), offs=d.ends)
    del gate, up

    def call():
        for a, b in ((d.rows, gate_up.transpose(1, 2)), (h, down.transpose(1, 2)), (of_sums, down), (first, gate_up),
                     (of_sums.t(), h), (first.t(), d.rows)):
            torch._grouped_mm(a, b, offs=d.ends)
    return call, int(d.ends[-1]), int(d.expert_rows[:, 1].sum())


def gathered(t, world):
    out = t.new_empty(world * t.shape[0], *t.shape[1:])
    dist.all_gather_into_tensor(out, t.contiguous())
    return out


def distances(results, leaves, chosen, g, group):
    """Of a way's result and gradients from those of fp32 autograd over the tokens of all ranks, expert by expert. Of
    matrices, the furthest expert's."""
    x, weights, gate_up, down = (leaf.detach() for leaf in leaves)
    world, local, count = group.world, gate_up.shape[0], x.shape[0]
    all_x, all_weights, all_chosen, all_g = (gathered(t, world) for t in (x, weights, chosen, g))
    sums = {"result": torch.zeros(all_x.shape, device="cuda"), "tokens": torch.zeros(all_x.shape, device="cuda"),
            "router_weights": torch.zeros_like(all_weights)}
    found = {"gate_up": 0.0, "down": 0.0}
    for e in range(local):
        token, slot = (all_chosen == group.rank * local + e).nonzero(as_tuple=True)
        inputs = [t.float().requires_grad_() for t in (all_x[token], all_weights[token, slot], gate_up[e], down[e])]
        rows, weight, first, second = inputs
        gate, up = (rows @ first.t()).chunk(2, -1)
        y = weight[:, None] * ((F.silu(gate) * up) @ second.t())
        grads = torch.autograd.grad(y, inputs, all_g[token].float())
        sums["result"].index_add_(0, token, y.detach())
        sums["tokens"].index_add_(0, token, grads[0])
        sums["router_weights"][token, slot] = grads[1]
        for name, have, want in (("gate_up", results[3][e], grads[2]), ("down", results[4][e], grads[3])):
            found[name] = max(found[name], apart(have, want))
    for i, (name, want) in enumerate(sums.items()):
        dist.all_reduce(want)
        found[name] = apart(results[i], want[group.rank * count:(group.rank + 1) * count])
    worst = torch.tensor([found[name] for name in LEAVES], device="cuda")
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return dict(zip(LEAVES, worst.tolist()))


def apart(have, want):
    return float(torch.nan_to_num((have.float() - want).norm() / want.norm().clamp_min(1e-20), nan=1e9))


def kernel_times(call):
    """Microseconds of this rank's GPU in kernels of a name, with their number, the largest; {} where CUPTI is
    missing."""
    from torch.profiler import ProfilerActivity, profile
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            call()
            torch.cuda.synchronize()
        found = {}
        for e in recorded.key_averages():
            count, usec = found.get(e.key[:60], (0, 0))
            found[e.key[:60]] = [count + e.count, usec + round(e.self_device_time_total)]
        return dict(sorted(found.items(), key=lambda item: -item[1][1])[:14])
    except Exception as e:  # the times do not depend on it
        return {"none": str(e)[:200]}


def moe_training(group, rounds=8):
    """us: median of `rounds` of the slowest rank. of_products: over the six products alone, timed in turn with it."""
    from perseus.bench import once
    cases, fine = [], True
    for model, hidden, inner, experts, most, several in CASES:
        local = experts // group.world
        plan = perseus.moe_plan(max_tokens=most, hidden=hidden, experts=experts, top_k=TOP_K, inner=inner,
                                linear_layout=True, group=group)
        gate_up, down = (torch.randn(*shape, device="cuda",
                                     dtype=torch.bfloat16).mul_(shape[-1] ** -0.5).requires_grad_()
                         for shape in ((local, 2 * inner, hidden), (local, hidden, inner)))
        for tokens in several:
            x, g = (torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            chosen = torch.rand(tokens, experts, device="cuda").topk(TOP_K).indices
            leaves = (x.requires_grad_(), torch.rand(tokens, TOP_K, device="cuda").requires_grad_(), gate_up, down)
            products, rows, real_rows = products_alone(leaves, chosen, plan)
            calls = {name: lambda way=way: forward_and_backward(way, leaves, chosen, plan, g)
                     for name, way in WAYS.items()}
            calls["products"] = products
            taken, found, results = {name: [] for name in calls}, {}, None
            for i in range(2 + rounds):
                for name, call in calls.items():
                    usec, results = once(call, group)
                    if i >= 2:
                        taken[name].append(usec)
                    if i == 1 + rounds and name in WAYS:  # the last timed run is the one that is checked
                        found[name] = distances(results, leaves, chosen, g, group)
                        worst = max(found[name].values())
                        fine = fine and worst < LIMIT
                        if name == "moe_layer":  # a wrong gradient of one expert must be found
                            results[4][local // 2].mul_(1.05)
                            fine = fine and distances(results, leaves, chosen, g, group)["down"] > LIMIT
                    results = None
            usec = {name: sorted(values)[len(values) // 2] for name, values in taken.items()}
            group.check()
            row = {"preset": model, "tokens": tokens, "max_tokens": most, "rows": real_rows, "rows_in_blocks": rows,
                   "capacity": plan.capacity, **{f"{name}_us": round(value, 1) for name, value in usec.items()},
                   **{f"{name}_of_products": round(usec[name] / usec["products"], 3) for name in WAYS},
                   "apart": {name: {leaf: round(value, 5) for leaf, value in values.items()}
                             for name, values in found.items()}}
            if tokens in (512, 8192):
                row["kernels"] = {name: kernel_times(calls[name]) for name in ("moe_layer", "products")}
            cases.append(row)
            del calls, products, leaves
            torch.cuda.empty_cache()
        del gate_up, down
    return {"cases": cases}, fine
