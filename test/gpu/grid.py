#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The products of tensor-parallel layers at all sizes that models have, compared with NCCL + torch.mm and torch's
symmetric memory, on this host's GPUs.

    test/gpu/grid.py [--gpus N] [--out FOLDER] [--budget-s 450]     FOLDER/grid-NxGPU.json: a row a cell
    test/gpu/grid.py --dtype e4m3                                   FOLDER/grid-fp8-NxGPU.json: with torch._scaled_mm
    test/gpu/grid.py --sweep [--from FOLDER/grid-NxGPU.json]        FOLDER/sweep-NxGPU.json: the fastest tunings of each
    test/gpu/grid.py --table FOLDER/sweep-NxGPU.json                lines for fused/gemm/table.txt; also from a grid

A cell is a product of a model, a number of tokens, a pass (forward, or both: forward and gradients), eager or a CUDA
graph, and a layout of the weight. The ways take turns in one process, in a random order; a time is the median over the
rounds of the slowest rank, for one product. Gradients are torch's autograd of each way; the products alone are called
directly. All weights of a call are different and together larger than L2. Every timed result is compared with sums in
fp32; what the round before left is poisoned. With --from a sweep begins where the plan's choice loses most. Cells that
the budget leaves out are named. Exit status 1: a result was wrong.
"""
import argparse
import collections
import datetime
import faulthandler
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import time

BEGAN = time.monotonic()
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "fused/python"), str(ROOT / "test/gpu")]
# NVLink multicast is never used on these hosts. Kernels are loaded at once, since none can be loaded while a persistent
# one runs.
os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1",
                  CUDA_MODULE_LOADING="EAGER")
os.environ.setdefault("PERSEUS_LOG", "error")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import grid_ways  # noqa: E402
import perseus  # noqa: E402
from grid_ways import FUSED, UNFUSED, Chosen, Nccl, Operands, Planned, Product, SymmMem  # noqa: E402

LINK_BYTES_PER_US = 394e3  # NVLink of a GPU, one direction, as a peer copy reaches it
GATHER, SCATTER = "all_gather", "reduce_scatter"
# Columns and depth over all ranks. DeepSeek-V3: what a rank multiplies of its latent vectors, and the dense layers.
MODELS = {
    "llama3-8b": (("qkv", GATHER, 6144, 4096), ("o", SCATTER, 4096, 4096), ("gate_up", GATHER, 28672, 4096),
                  ("down", SCATTER, 4096, 14336)),
    "llama3-70b": (("qkv", GATHER, 10240, 8192), ("o", SCATTER, 8192, 8192), ("gate_up", GATHER, 57344, 8192),
                   ("down", SCATTER, 8192, 28672)),
    "qwen3-32b": (("qkv", GATHER, 10240, 5120), ("o", SCATTER, 5120, 8192), ("gate_up", GATHER, 51200, 5120),
                  ("down", SCATTER, 5120, 25600)),
    "deepseek-v3": (("q_b", GATHER, 24576, 1536), ("kv_b", GATHER, 32768, 512), ("o", SCATTER, 7168, 16384),
                    ("gate_up", GATHER, 36864, 7168), ("down", SCATTER, 7168, 18432)),
}
POWERS, ODD = (128, 256, 512, 1024, 2048, 4096, 8192, 16384), (200, 1000, 1544, 3000, 6000, 11000)
# Which cells, the most telling first: what a budget leaves out comes from the end.
TIERS = ((POWERS, "forward", True, "nk"), ((2048, 8192), "both", True, "nk"), (ODD, "forward", True, "nk"),
         ((512, 2048, 8192), "forward", True, "kn"), ((512, 2048, 8192), "forward", False, "nk"),
         ((8192, 1024), "both", False, "nk"), ((4096, 1024, 512), "both", True, "nk"), ((2048,), "both", True, "kn"))
WARMUP, ROUNDS = 2, 9
TABLE = ("path", "clusters", "band", "mover", "segments", "paced", "spread", "tiles_per_signal")  # as in a table's line
NAMES = ("product", "perseus", "unfused", "fused", "nccl", "symm")

Cell = collections.namedtuple("Cell", "model op kind n k tokens pass_ graph layout")


def cells_of(models, tiers=TIERS):
    """The cells of a tier are sorted by product, so that weights are made once."""
    return [Cell(model, op, kind, n, k, m, pass_, graph, layout) for tokens, pass_, graph, layout in tiers
            for model in models for op, kind, n, k in MODELS[model] for m in tokens]


# ---- devices ----

class Gpu:
    def __init__(self, group):
        self.group, self.pool, self.keeper, self.stream = group, None, None, None

    def together(self, graph):
        """What is enqueued next starts at the same time on all GPUs, and after all of it was enqueued."""
        torch.cuda._sleep(900_000 if graph else 4_000_000)  # 0.5 ms, 2 ms
        self.group.process_group.allreduce([torch.zeros(1, device=self.group.device)]).wait()

    def span(self, call):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = call()
        end.record()
        return lambda: begin.elapsed_time(end) * 1e3, result

    def _capture(self, call):
        """torch.cuda.graph() would also collect garbage and give back memory, which takes longer than a cell."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool)
            try:
                out = call()
            finally:
                graph.capture_end()
        return graph, out

    def captured(self, call):
        """All graphs share one pool of memory: a result holds until another graph runs."""
        if self.keeper is None:
            self.stream, self.pool = self.stream or torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            square = torch.zeros(64, 64, dtype=grid_ways.TYPE, device=self.group.device)
            with torch.cuda.stream(self.stream):
                torch.mm(square, square)  # the workspace of cuBLAS is none of the pool
            self.keeper = self._capture(lambda: square + 1)
        graph, out = self._capture(call)

        def replay():
            graph.replay()
            return out
        replay.results = out
        return replay

    def synchronize(self):
        torch.cuda.synchronize()

    def tidy(self):
        if torch.cuda.memory_reserved() > torch.cuda.get_device_properties(0).total_memory // 2:
            self.keeper = None  # the last graph of the pool
            torch.cuda.empty_cache()

    def name(self):
        return torch.cuda.get_device_name().replace("NVIDIA ", "").split()[0]


class Emulated:
    """For tests of this script: the times mean nothing."""

    def __init__(self, group):
        self.group = group

    def together(self, graph):
        self.group.process_group.barrier().wait()

    def span(self, call):
        begin = time.perf_counter()
        result = call()
        usec = (time.perf_counter() - begin) * 1e6
        return lambda: usec, result

    def captured(self, call):
        return call

    def synchronize(self):
        pass

    tidy = synchronize

    def name(self):
        return "emulated"


def most(values, group):
    """The largest of each over the ranks; a NaN of any rank stays one."""
    tensor = torch.tensor(values, dtype=torch.float64, device=group.device)
    tensor = torch.nan_to_num(tensor, nan=1e30, posinf=1e30)
    group.process_group.allreduce([tensor], op=dist.ReduceOp.MAX).wait()
    return tensor.tolist()


# ---- one cell ----

class Runner:
    """Times ways of one cell by turns. Each result of each timed round is compared with the references."""

    def __init__(self, device, operands, graph):
        self.device, self.x, self.graph = device, operands, graph
        self.group, self.references, self.bounds = operands.group, operands.references(), operands.bounds()
        self.first_signs = [operands.sign_of(i) for i in range(3)]
        self.calls, self.taken, self.worst, self.last, self.failed = {}, {}, {}, {}, {}
        self.step = 0

    def add(self, name, way, checked=True):
        """False: this way cannot be captured here."""
        way()  # plans are opened, and libraries choose their kernels, before a capture
        self.device.synchronize()
        try:
            self.calls[name] = self.device.captured(way) if self.graph else way
        except (RuntimeError, perseus.PerseusError) as e:
            self.failed[name] = str(e).splitlines()[0]
            return False
        self.taken[name] = []
        if checked:
            self.worst[name] = torch.zeros((), dtype=torch.float32, device=self.group.device)
        return True

    def drop(self, name):
        for of in (self.calls, self.worst, self.last):
            of.pop(name, None)

    def poison(self, name):
        for results in getattr(self.calls[name], "results", self.last.pop(name, ())):
            for result in results:
                result.fill_(float("nan"))

    def compare(self, name, found):
        for results, wanted in zip(found, self.references):
            for i, (have, want) in enumerate(zip(results, wanted)):
                same = self.x.sign_of(i) == self.first_signs[i]
                error = torch.sub(have, want, alpha=1 if same else -1).abs_().amax().float() / self.bounds[i]
                self.worst[name] = torch.maximum(self.worst[name], error)  # a NaN stays

    def rounds(self, count, warmup=0):
        names, spans = list(self.calls), []
        for i in range(warmup + count):
            self.x.turn(self.step)
            self.step += 1
            random.Random(i).shuffle(names)  # a GPU is slower after work that heats it: none follows always the same
            for name in names:
                self.poison(name)
                self.device.together(self.graph)
                span, found = self.device.span(self.calls[name])
                if name in self.worst:
                    self.compare(name, found)
                if not self.graph:
                    self.last[name] = found
                if i >= warmup:
                    spans.append((name, span))
            self.device.synchronize()
        usec = most([span() for _, span in spans], self.group)
        for (name, _), value in zip(spans, usec):
            self.taken[name].append(value / len(self.x.weights))

    def medians(self):
        return {name: round(statistics.median(values), 2) for name, values in self.taken.items() if values}

    def errors(self):
        """Largest error over its bound by name; above 1 is wrong."""
        values = most([float(value) for value in self.worst.values()], self.group)
        return dict(zip(self.worst, values))


def operands_of(cell, group, kept, options):
    """kept: the weights of the last cell, by what they depend on."""
    gathers = cell.kind == GATHER
    n, k = (cell.n // group.world, cell.k) if gathers else (cell.n, cell.k // group.world)
    key, numbers = (n, k, cell.layout), options.numbers
    if kept.get("key") != key:
        kept.clear()
        torch.manual_seed(1 + group.rank + 64 * n + k)
        shape = (n, k) if cell.layout == "nk" else (k, n)
        made = (torch.rand(*shape, device=group.device)
                for _ in range(grid_ways.weights_of(n, k, numbers, options.rotate)))
        kept.update(key=key, weights=[numbers.made(w.mul_(2).sub_(1)) for w in made])
    return Operands(group, numbers, gathers, cell.tokens, n, k, cell.layout, kept["weights"], cell.pass_ == "both")


def title(cell):
    return f"{cell.model} {cell.op} {cell.tokens} {cell.pass_} {'graph' if cell.graph else 'eager'} {cell.layout}"


def base_row(cell, x, world):
    typed = {"scaling": x.numbers.scaling} if x.numbers.scaling else {}
    return {**typed, "model": cell.model, "op": cell.op, "kind": cell.kind, "gpus": world, "tokens": cell.tokens,
            "n": x.n, "k": x.k, "pass": cell.pass_, "graph": cell.graph, "layout": cell.layout,
            "weights": len(x.weights)}


def grid_row(cell, device, group, kept, options):
    x = operands_of(cell, group, kept, options)
    runner, planned = Runner(device, x, cell.graph), []
    for name, way in (("product", Product), ("perseus", Chosen), ("nccl", Nccl)):
        runner.add(name, way(x), name != "product")
    for name, path in (("fused", FUSED), ("unfused", UNFUSED)):
        try:
            planned.append(Planned(x, path=path))
            runner.add(name, planned[-1])
        except perseus.PerseusError as e:
            runner.failed[name] = str(e)
    if options.symm:
        runner.add("symm", SymmMem(x))
    runner.rounds(options.rounds, options.warmup)
    usec, errors = runner.medians(), runner.errors()
    tuning, predicted, reason, path = grid_ways.chosen_plan(x)
    runner.calls.clear()
    for way in planned:
        way.close()
    group.check()
    row = {**base_row(cell, x, group.world), **{f"{name}_us": usec.get(name) for name in NAMES},
           "limit_us": round(max(usec["product"], x.link_bytes() / LINK_BYTES_PER_US), 2),
           "predicted_us": round(predicted, 1), "tuning": tuning, "reason": reason, "path": path,
           "error": round(max(errors.values()), 3), "checked": max(errors.values()) <= 1}
    if runner.failed:
        row["failed"] = runner.failed
    if not row["checked"]:
        row["errors"] = {name: round(value, 3) for name, value in errors.items()}
    return row


# ---- the sweep ----

def candidates(kind, pairs):
    """Tunings of struct prs_gemm_tuning to try on one node, the likely ones first. pairs: of rows of a block."""
    bands = sorted({min(band, pairs) for band in (1, 2, 4, 8, 16)})

    def each(paces, **fields):
        return [{"path": FUSED, "band": band, "spread": spread, "paced": paced, **fields} for spread, paced in paces
                for band in bands]
    if kind == SCATTER:
        return each(((85, 2), (1, 1), (1, 2), (40, 2)))
    # Narrow tiles are refused where no kernel has them.
    return [tuning for columns, parts, paces in ((256, (1, 2, 4), ((85, 2), (1, 1), (40, 1))),
                                                 (192, (1, 2), ((85, 2), (1, 1))))
            for tuning in [{"path": FUSED, "mover": 1, "band": band, "segments": part, "columns": columns}
                           for part in parts for band in bands] + each(paces, mover=2, columns=columns)]


def sweep_row(cell, device, group, kept, options):
    """All candidates for a few rounds, then the fastest and the plan's own choice for more."""
    x = operands_of(cell, group, kept, options)
    runner, planned = Runner(device, x, cell.graph), {}
    runner.add("product", Product(x), False)
    runner.add("chosen", Chosen(x))
    pairs, seen = max(1, -(-group.rows(cell.tokens) // group.world // 256)), []
    for number, tuning in enumerate([{"path": UNFUSED}, *candidates(cell.kind, pairs)]):
        try:
            way = Planned(x, **tuning)
        except perseus.PerseusError as e:
            runner.failed[number] = str(e)
            continue
        if way.decided() not in seen and runner.add(number, way):
            seen.append(way.decided())
            planned[number] = way
        else:
            way.close()
    runner.rounds(2, 1)
    first = runner.medians()
    for name in sorted((name for name in first if name in planned), key=first.get)[options.finalists:]:
        runner.drop(name)
    runner.taken = {name: [] for name in runner.calls}
    runner.rounds(options.rounds, 1)
    usec, errors = runner.medians(), runner.errors()
    tuning, predicted, reason, path = grid_ways.chosen_plan(x)
    best = sorted((name for name in usec if name in planned), key=usec.get)
    paths = {name: way.decided()["path"] for name, way in planned.items()}
    others = [usec.get(name, first[name]) for name in planned if best and paths[name] != paths[best[0]]]
    row = {**base_row(cell, x, group.world), "rows": group.rows(cell.tokens), "product_us": usec["product"],
           "perseus_us": usec["chosen"], "chosen": tuning, "predicted_us": round(predicted, 1), "reason": reason,
           "path": path, "other_us": min(others, default=0),
           "candidates": len(planned), "checked": max(errors.values()) <= 1,
           "best": [{**planned[name].decided(), "us": usec[name], "first_us": first[name]} for name in best]}
    runner.calls.clear()
    for way in planned.values():
        way.close()
    group.check()
    return row


def sweep_cells(options, world):
    """Forward graphs at the rows that plans have; with --from, where the plan's choice loses most first."""
    cells = cells_of(options.model, (TIERS[0], (POWERS, "forward", True, "kn")))
    if options.from_:
        rows = json.loads(options.from_.read_text())["rows"]
        rows = [row for row in rows if row["op"] != "layer" and row["pass"] == "forward" and row["graph"]
                and row["gpus"] == world]
        lost = {(row["model"], row["op"], row["tokens"], row["layout"]): row["perseus_us"] / best_of(row)[1]
                for row in rows}
        cells.sort(key=lambda cell: -lost.get((cell.model, cell.op, cell.tokens, cell.layout), 1.0))
    return cells


def faster_path(row):
    """Of a grid's row, as an entry of a sweep's, and the other path's time; the rest is the plan's."""
    (usec, path), (other, _) = sorted(((row["fused_us"], FUSED), (row["unfused_us"], UNFUSED)))
    return {**dict.fromkeys((*TABLE, "columns"), 0), "path": path, "us": usec}, other


def table_lines(path):
    """A sweep's best tunings, or a grid's faster paths, as lines of fused/gemm/table.txt."""
    found = json.loads(path.read_text())
    gpu = found["machine"].split(" x ", 1)[1].split(" (")[0].replace(" ", "_")
    rows = [row for row in found["rows"] if row["checked"] and row["op"] != "layer" and row["pass"] == "forward"
            and row["graph"] and row["tokens"] in POWERS]
    sms = 2 * max(row.get("chosen", row.get("tuning"))["clusters"] for row in rows)
    for row in rows:
        best, other = (row["best"][0], row["other_us"]) if "best" in row else faster_path(row)
        op = perseus.ops.ALLGATHER if row["kind"] == GATHER else perseus.ops.REDUCE_SCATTER
        yield (f"v8 {gpu} {sms} {op} {row['tokens']} {row['n']} {row['k']} {int(row['layout'] == 'nk')} {row['gpus']} "
               f"1 : {' '.join(str(best[name]) for name in TABLE)} {best['us']} {row.get('scaling', 0)} {other} "
               f"{best['columns']}")


# ---- what is said about rows ----

def best_of(row):
    """The fastest way and its time; the product alone is no way."""
    ways = {name: row[f"{name}_us"] for name in NAMES[1:] if row.get(f"{name}_us")}
    name = min(ways, key=ways.get)
    return ("perseus" if ways["perseus"] <= 1.0001 * ways[name] else name), ways[name]


def told(tuning, path=None):
    """path: of the launch, where that may be another than the plan's for its most rows."""
    if (path or tuning["path"]) == UNFUSED:
        return "unfused"
    mover = {0: "", 1: " copies", 2: " ctas"}[tuning["mover"]]
    return (f"fused{mover} band {tuning['band']} segments {tuning['segments']} spread {tuning['spread']} pace "
            f"{tuning['paced']} columns {tuning['columns']}")


def grid_line(cell, row):
    name, usec = best_of(row)
    times = "  ".join(f"{way} {row[f'{way}_us'] or '-'}" for way in NAMES)
    verdict = f"{name} wins" + ("" if name == "perseus" else f", perseus takes {row['perseus_us'] / usec:.2f} of it")
    return (f"{title(cell)}: {times}  limit {row['limit_us']} ({row['perseus_us'] / row['limit_us']:.2f})  {verdict}  "
            f"[{told(row['tuning'], row['path'])}; predicted {row['predicted_us']}]"
            f"{'' if row['checked'] else ' WRONG ' + str(row['errors'])}")


def sweep_line(cell, row):
    best = f"{row['best'][0]['us']} [{told(row['best'][0])}]" if row["best"] else "none"
    return (f"{title(cell)}: product {row['product_us']}  chosen {row['perseus_us']} "
            f"[{told(row['chosen'], row['path'])}; predicted {row['predicted_us']}]  best {best}"
            f"{'' if row['checked'] else ' WRONG'}")


def form(row):
    return f"{row['pass']} {'graph' if row['graph'] else 'eager'} {row['layout']}"


def layer_rows(rows):
    """The sum of a model's products, where all of them were timed."""
    groups = collections.defaultdict(list)
    for row in rows:
        groups[row["model"], row["gpus"], row["tokens"], row["pass"], row["graph"], row["layout"]].append(row)
    found = []
    for (model, gpus, tokens, pass_, graph, layout), parts in groups.items():
        if len(parts) != len(MODELS[model]):
            continue
        sums = {name: [row[name] for row in parts] for name in (*(f"{name}_us" for name in NAMES), "limit_us")}
        found.append({"model": model, "op": "layer", "gpus": gpus, "tokens": tokens, "pass": pass_, "graph": graph,
                      "layout": layout, "checked": all(row["checked"] for row in parts),
                      **{name: None if None in values else round(sum(values), 2) for name, values in sums.items()}})
    return found


def predictions(rows):
    """A line on how far the plans' predictions are off."""
    rows = [row for row in rows if row["pass"] == "forward" and row["graph"]]
    off = sorted((row["predicted_us"] / row["perseus_us"], f"{row['model']} {row['op']} {row['tokens']}")
                 for row in rows)
    errors = sorted(abs(ratio - 1) for ratio, _ in off)
    return (f"predicted over measured: median error {100 * statistics.median(errors):.0f} %, 90th percentile "
            f"{100 * errors[len(errors) * 9 // 10]:.0f} %, from {off[0][0]:.2f} ({off[0][1]}) to {off[-1][0]:.2f} "
            f"({off[-1][1]})") if off else "predicted over measured: nothing was measured"


def summary(rows):
    """Lines: layers over the products alone, how far predictions are off, and the cells that are near the best."""
    ways = ("limit", "perseus", "fused", "unfused", "nccl", "symm")
    lines = [f"over the products alone:  tokens  {'  '.join(ways)}"]
    for row in sorted(layer_rows(rows), key=lambda row: (row["model"], form(row), row["tokens"])):
        ratios = (f"{row[f'{way}_us'] / row['product_us']:.2f}" if row[f"{way}_us"] else "-" for way in ways)
        lines.append(f"{row['model']} {form(row)}:  {row['tokens']:6}  " + "  ".join(ratios))
    lines.append(predictions(rows))
    ratios = [(row["perseus_us"] / best_of(row)[1], row) for row in rows]
    if ratios:
        worst, row = max(ratios, key=lambda pair: pair[0])
        lines.append(f"{sum(ratio <= 1.02 for ratio, _ in ratios)} of {len(ratios)} cells within 2 % of the best; "
                     f"worst {worst:.2f}: {row['model']} {row['op']} {row['tokens']} {form(row)}, where "
                     f"{best_of(row)[0]} wins")
    return lines


# ---- all cells ----

def machine_of(device, world):
    if device.name() == "emulated":
        return f"{world} x emulated GPU (without times)"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return (f"{world} x {torch.cuda.get_device_name()} (NVLink), {os.cpu_count()} cores, driver {driver}, CUDA "
            f"{torch.version.cuda}, torch {torch.__version__}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}; "
            "NVLink multicast off")


def written(path, rows, left, device, world, options, script, text):
    """As tools/dev/record.py writes results, so that a run that is ended early leaves what it has. text: of the script;
    its third paragraph is the note."""
    head = {"date": datetime.date.today().isoformat(), "commit": options.commit, "machine": machine_of(device, world),
            "command": " ".join([f"test/gpu/{script}", *options.command]),
            "note": text.split("\n\n")[2].replace("\n", " "), "left_out": left}
    body = ",\n".join("    " + json.dumps(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(head, indent=2)[:-2] + ',\n  "rows": [\n' + body + "\n  ]\n}\n")


# What is measured of which cells, as run_of() has it. more: rows that follow from others.
Run = collections.namedtuple("Run", "script text name cells row line summary more")


def run_of(options):
    if options.sweep:
        return Run("grid.py", __doc__, "sweep", sweep_cells, sweep_row, sweep_line, lambda rows: [], lambda rows: [])
    return Run("grid.py", __doc__, "grid", lambda options, world: cells_of(options.model), grid_row, grid_line, summary,
               layer_rows)


def measure(group, device, options, run=None):
    """All cells within the budget. Returns the rows and the titles of the cells that were left out."""
    run = run or run_of(options)
    cells = run.cells(options, group.world)
    cells = [cell for cell in cells if not options.tokens or cell.tokens in options.tokens]
    cells = [cell for cell in cells if not options.op or cell.op in options.op]
    cells = [cell for cell in cells if not options.cell or re.search(options.cell, title(cell))]
    if options.numbers.scaling:  # e4m3 has no gradients, and no [k, n]
        cells = [cell for cell in cells if cell.pass_ == "forward" and cell.layout == "nk"]
    name = run.name + ("-fp8" if options.numbers.scaling else "")
    path = options.out / f"{name}-{group.world}x{device.name()}.json"
    rows, left, kept, longest, last_written = [], [], {}, 0.0, time.monotonic()
    for number, cell in enumerate(cells):
        begin = time.monotonic()
        if most([begin - BEGAN + 1.5 * longest + 5 > options.budget_s], group)[0]:  # no rank may go on alone
            left = [title(rest) for rest in cells[number:]]
            break
        row = run.row(cell, device, group, kept, options)
        rows.append(row)
        device.tidy()
        longest = max(longest, time.monotonic() - begin)
        if group.rank == 0:
            print(f"{time.monotonic() - BEGAN:5.0f} s  {run.line(cell, row)}", flush=True)
            if time.monotonic() - last_written > 15:
                written(path, rows, [], device, group.world, options, run.script, run.text)
                last_written = time.monotonic()
    if group.rank == 0:
        written(path, rows + run.more(rows), left, device, group.world, options, run.script, run.text)
        print(f"left out, by the budget of {options.budget_s} s: {'; '.join(left) if left else 'nothing'}")
        for line in run.summary(rows):
            print(line)
    return rows, left


def parsed(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, help="default: all of this host, at most 8")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "doc/results")
    parser.add_argument("--budget-s", type=float, default=450, help="of the whole run; other cells are left out")
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--op", action="append", help="qkv, o, gate_up, down, q_b, kv_b; default: all")
    parser.add_argument("--tokens", action="append", type=int, help="default: all of the grid's")
    parser.add_argument("--cell", metavar="REGEX", help="of the title, as 'both eager' or 'llama3-8b o 1024 forward'")
    parser.add_argument("--dtype", choices=("bf16", "e4m3"), default="bf16", help="of A and B; sums travel as bf16")
    parser.add_argument("--scaling", choices=grid_ways.SCALINGS, default="rows", help="of e4m3")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--sweep", action="store_true", help="time the tunings that a plan can have, not the libraries")
    parser.add_argument("--from", dest="from_", type=pathlib.Path, metavar="FILE",
                        help="rows of a grid: sweep the cells that lose most first")
    parser.add_argument("--table", type=pathlib.Path, metavar="FILE", help="print a sweep as lines of a table")
    parser.add_argument("--finalists", type=int, default=6, help="tunings of a sweep that are timed for all rounds")
    parser.add_argument("--no-symm", dest="symm", action="store_false", help="without torch's symmetric memory")
    parser.add_argument("--commit", default=os.environ.get("COMMIT", "unknown"))
    options = parser.parse_args(arguments)
    options.model, options.command = options.model or list(MODELS), list(arguments)
    options.warmup, options.rotate = WARMUP, grid_ways.ROTATE_BYTES
    options.numbers = grid_ways.numbers_of(options.dtype, options.scaling)
    return options


def rank_main(options, run):
    faulthandler.dump_traceback_later(options.budget_s + 90, exit=True)
    index = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(index)
    dist.init_process_group("nccl", device_id=torch.device("cuda", index))
    if options.symm:
        import torch.distributed._symmetric_memory as symm_mem
        symm_mem.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    group = perseus.init(timeout_ms=60000)
    rows, _ = measure(group, Gpu(group), options, run)
    group.close()
    dist.destroy_process_group()
    return 0 if rows and all(row["checked"] for row in rows) else 1


def main(run=None):
    """run: of another script, which torchrun then starts."""
    options = parsed(sys.argv[1:])
    if options.table:
        print("\n".join(sorted(set(table_lines(options.table)))))
        return 0
    if "RANK" in os.environ:
        return rank_main(options, run)
    gpus = options.gpus or min(torch.cuda.device_count(), 8)
    if gpus < 2:
        sys.exit(f"grid: {gpus} GPUs: a grid needs at least 2")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(gpus), sys.argv[0], *sys.argv[1:]]
    return subprocess.run(command, env=dict(os.environ, COMMIT=options.commit)).returncode


if __name__ == "__main__":
    sys.exit(main())
