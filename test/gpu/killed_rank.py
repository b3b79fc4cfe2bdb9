#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""killed_rank.py [--gpus N] [--kills K] [--seconds S] [--out FILE.json]: ranks decode with a captured graph of MoE
layers (Qwen3-30B-A3B, 8 tokens a rank), and the last K of them are killed, one after the other. The others must go on
without their experts. Printed: for each rank the longest step after each kill, and the median before and after. Each
step's results are compared with torch in fp32, with the experts that are left at its end; a step in which a rank was
lost may lack a part of its experts' results, and such steps are counted. Exit status 1: a wait of 2 s or more, or wrong
results.
"""
import argparse
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "fused/python"))
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import perseus  # noqa: E402

EXPERTS, TOP_K, HIDDEN, INNER, TOKENS, LAYERS = 128, 8, 2048, 768, 8, 8
LIMIT_S, BOUND = 2.0, 0.01


def reference(x, chosen, weights, w13, w2, experts):
    """With the first `experts` alone."""
    out = torch.zeros(x.shape, device="cuda")
    for expert in chosen.unique().tolist():
        if expert >= experts:
            continue
        token, slot = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x[token].float() @ w13[expert].float().t()).chunk(2, 1)
        out.index_add_(0, token, weights[token, slot, None] * ((F.silu(gate) * up) @ w2[expert].float().t()))
    return out


def prepared(group):
    """The graph of a step, its result, and the results that are right with 1, 2, ... ranks."""
    generator = torch.Generator("cuda").manual_seed(5)
    w13, w2 = ((torch.randn(EXPERTS, n, k, generator=generator, device="cuda") / k**0.5).bfloat16()
               for n, k in ((2 * INNER, HIDDEN), (HIDDEN, INNER)))
    local = EXPERTS // group.world
    mine = slice(group.rank * local, (group.rank + 1) * local)
    gate_up, down = w13[mine].clone(), w2[mine].clone()
    generator.manual_seed(100 + group.rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator, device="cuda").bfloat16()
    weights, chosen = torch.rand(TOKENS, EXPERTS, generator=generator, device="cuda").topk(TOP_K)
    right = torch.stack([reference(x, chosen, weights, w13, w2, local * ranks) for ranks in range(1, group.world + 1)])
    plan = perseus.moe_plan(max_tokens=TOKENS, hidden=HIDDEN, experts=EXPERTS, top_k=TOP_K, inner=INNER,
                            activation="silu", gated=True, linear_layout=True, group=group)
    if plan.path != "one kernel":
        sys.exit(f"killed_rank: the plan takes {plan.path}")

    def step():
        return torch.stack([perseus.moe_layer(x, chosen, weights, gate_up, down, plan)[0] for _ in range(LAYERS)])
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        y = step()
    return graph, y, right, (x, weights, chosen, gate_up, down)


def rank_main(options):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    group = perseus.init((store, rank, world), device=rank, timeout_ms=20000, leave_out=True)
    graph, y, right, kept = prepared(group)
    size, errors, ends = right.square().sum((1, 2)).sqrt(), [], []
    print(json.dumps({"ready": rank}), flush=True)
    begin, stop = time.monotonic(), None
    while len(ends) != stop:  # all at the same step: no rank may wait for one that has stopped
        if rank == 0 and stop is None and time.monotonic() - begin > options.seconds:
            store.set("stop", str(len(ends) + 1000))
        if stop is None and len(ends) % 64 == 0 and store.check(["stop"]):
            stop = int(store.get("stop"))
        y.fill_(float("nan"))
        group.replay(graph)
        off = (y.float()[:, None] - right).square().sum((2, 3)).sqrt() / size  # of each layer, from each reference
        errors.append(off.amax(0))
        torch.cuda.synchronize()
        ends.append(time.monotonic())
    off = torch.stack(errors).cpu()
    matches = torch.where(off.min(1).values < BOUND, off.argmin(1) + 1, 0).tolist()  # ranks whose experts it had
    pathlib.Path(os.environ["FOLDER"], f"{rank}.json").write_text(json.dumps(
        {"rank": rank, "ends": ends, "matches": matches, "error": str(group.error() or "")}))
    os._exit(0)


def judged(found, kills, world):
    """A row for a rank that was left. kills: when."""
    ends, matches = found["ends"], found["matches"]
    spans = [(b - a, a, b) for a, b in zip(ends, ends[1:])]
    pauses = [max(s for s, a, b in spans if b > kill and a < kill + 3) for kill in kills]
    return {"rank": found["rank"], "steps": len(ends), "pauses_ms": [round(p * 1000, 1) for p in pauses],
            "us_before": round(1e6 * statistics.median(s for s, a, b in spans if b < kills[0])),
            "us_after": round(1e6 * statistics.median(s for s, a, b in spans if a > kills[-1] + 3)),
            "incomplete_steps": matches.count(0), "first": matches[0], "last": matches[-1], "error": found["error"],
            "right": descends(matches, world, len(kills))}


def descends(matches, world, kills):
    """Whether the steps had the experts of all ranks, and then of one rank less after each kill."""
    whole = [m for m in matches if m]
    return (whole[0] == world and whole[-1] == world - kills and whole == sorted(whole, reverse=True)
            and matches.count(0) <= kills)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=14)
    parser.add_argument("--out")
    options = parser.parse_args()
    if "RANK" in os.environ:
        return rank_main(options)
    world, folder = options.gpus, tempfile.mkdtemp()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = [subprocess.Popen([sys.executable, __file__, *sys.argv[1:]], stdout=subprocess.PIPE, text=True,
                                env=dict(os.environ, RANK=str(rank), WORLD_SIZE=str(world),
                                         MASTER_PORT=str(store.port), FOLDER=folder)) for rank in range(world)]
    for process in started:
        print(process.stdout.readline().strip(), flush=True)
    kills = []
    for victim in started[:world - options.kills - 1:-1]:
        time.sleep(3.3)
        kills.append(time.monotonic())
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
    rows = []
    for rank, process in enumerate(started[:world - options.kills]):
        if process.wait(timeout=options.seconds + 20) != 0:
            sys.exit(f"killed_rank: rank {rank} ended with {process.returncode}")
        rows.append(judged(json.loads(pathlib.Path(folder, f"{rank}.json").read_text()), kills, world))
    for row in rows:
        print(row, flush=True)
    good = all(row["right"] and not row["error"] and max(row["pauses_ms"]) < LIMIT_S * 1000 for row in rows)
    if options.out:
        pathlib.Path(options.out).write_text(json.dumps({"gpus": world, "kills": options.kills, "layers": LAYERS,
                                                         "rows": rows, "good": good}, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
