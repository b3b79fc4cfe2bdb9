#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Steps of a server: decoding and chunks of prefill of models with random weights, with Perseus, with NCCL, and with
torch's symmetric memory (one-shot, two-shot), on this host's GPUs.

    test/gpu/serving.py [--gpus N] [--out FOLDER] [--budget-s 450]     FOLDER/serving-NxGPU.json: a row a cell

A cell is a model, a phase and a number of tokens: of decoding, one of each sequence, which all have --context tokens
before it; of prefill, the first ones of a sequence. Each way is a captured graph of one step of --layers layers. The
ways take turns in one process; p50 and p99 are of the slowest rank's times. Weights of a step are larger than L2. Two
inputs take turns, and what a way returned is poisoned before it runs again. Every timed result is compared with that of
sums in fp32. Llama-3-70B is tensor parallel, and tokens are those of all ranks together; Qwen3-30B-A3B has attention on
each rank and experts on all, and tokens are those of a rank. Cells that the budget leaves out are named. Exit status 1:
a result was wrong.
"""
import argparse
import collections
import datetime
import faulthandler
import json
import os
import pathlib
import subprocess
import sys
import time

BEGAN = time.monotonic()
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "fused/python"), str(ROOT / "test/gpu")]
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of processes starts and ends slowly
import grid  # noqa: E402  sets the environment: NVLink multicast is never used on these hosts
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import perseus  # noqa: E402
import serving_ways  # noqa: E402
from serving_ways import MODELS, Model, Norms  # noqa: E402

Cell = collections.namedtuple("Cell", "model phase tokens")
# The most telling first: what a budget leaves out comes from the end.
CELLS = [Cell(model, "decode", tokens) for tokens in (1, 16, 128, 8, 64, 256, 32, 4, 2) for model in MODELS]
CELLS += [Cell(model, "prefill", tokens) for tokens in (2048, 4096, 8192) for model in MODELS]
WARMUP = 3
MOST_ERROR, MOST_RMS = 0.5, 0.05  # of normed values, whose root mean square is about 1


class Runner:
    """Times ways of one cell by turns. Each result of each timed round is compared with the reference."""

    def __init__(self, device, model, cell, ways):
        self.device, self.model, self.group = device, model, model.group
        torch.manual_seed(3 + (model.group.rank if model.sizes.experts else 0))
        self.x = torch.randn(cell.tokens, model.sizes.hidden, device=self.group.device).to(serving_ways.TYPE)
        self.inputs = [self.x.clone(), torch.flip(self.x, (1,)).contiguous()]
        self.calls, self.last, self.worst, self.failed, self.spans = {}, {}, {}, {}, {}
        reference = ways.pop("reference")
        self.ways = ways  # a graph does not keep the buffers of its way
        self.references = []
        for given in self.inputs:
            self.x.copy_(given)
            self.references.append(model.step(self.x, reference).float())
        for name, way in ways.items():
            self.add(name, lambda way=way: model.step(self.x, way))

    def add(self, name, call):
        """A way that cannot run here, or not be captured, is named."""
        try:
            call()  # plans are opened, and libraries choose their kernels, before a capture
            self.device.synchronize()
            self.calls[name] = self.device.captured(call)
        except (RuntimeError, NotImplementedError, perseus.PerseusError) as e:
            self.failed[name] = str(e).splitlines()[0]
            return
        self.worst[name], self.spans[name] = [torch.zeros((), device=self.group.device) for _ in range(2)], []

    def compare(self, name, found, want):
        off = found.float() - want
        for i, value in enumerate((off.abs().amax() / MOST_ERROR, off.square().mean().sqrt() / MOST_RMS)):
            self.worst[name][i] = torch.maximum(self.worst[name][i], value)  # a NaN stays

    def rounds(self, count):
        names = list(self.calls)
        for i in range(WARMUP + count):
            self.x.copy_(self.inputs[i % 2])
            for name in names[i % len(names):] + names[:i % len(names)]:
                last = getattr(self.calls[name], "results", self.last.pop(name, None))
                if last is not None:
                    last.fill_(float("nan"))
                self.device.together(True)
                span, found = self.device.span(self.calls[name])
                self.compare(name, found, self.references[i % 2])
                self.last[name] = found
                if i >= WARMUP:
                    self.spans[name].append(span)
            self.device.synchronize()

    def times(self):
        """Microseconds of the slowest rank by name, sorted."""
        return {name: sorted(grid.most([span() for span in spans], self.group)) for name, spans in self.spans.items()}

    def errors(self):
        """The largest error over its bound by name; above 1 is wrong."""
        names = list(self.worst)
        values = grid.most([float(torch.stack(self.worst[name]).amax()) for name in names], self.group)
        return dict(zip(names, values))


def percentile(times, part):
    return round(times[min(int(part * len(times)), len(times) - 1)], 1)


def row_of(cell, model, device, options):
    model.prepare(cell.tokens, options.context if cell.phase == "decode" else None)
    runner = Runner(device, model, cell, model.ways(cell.tokens, options.symm))
    runner.rounds(options.rounds)
    times, errors = runner.times(), runner.errors()
    runner.calls.clear()
    model.group.check()
    row = {"model": cell.model, "phase": cell.phase, "tokens": cell.tokens, "gpus": model.group.world,
           "layers": len(model.layers), "context": options.context if cell.phase == "decode" else 0,
           **{f"{name}_us": percentile(of, 0.5) for name, of in times.items()},
           **{f"{name}_p99_us": percentile(of, 0.99) for name, of in times.items()}, "ways": list(times),
           "rounds": options.rounds, "norm_compiled": Norms.compiled,
           "error": {name: round(value, 3) for name, value in errors.items()},
           "checked": all(value <= 1 for value in errors.values()) and "perseus" in errors}
    if runner.failed:
        row["failed"] = runner.failed
    return row


def line_of(row):
    times = ", ".join(f"{name} {row[name + '_us']:.0f} ({row[name + '_p99_us']:.0f})" for name in row["ways"])
    wrong = "" if row["checked"] else f"  WRONG: {row['error']} {row.get('failed', '')}"
    return f"{row['model']} {row['phase']} {row['tokens']}: {times} us{wrong}"


def written(path, rows, left, device, world, options):
    head = {"date": datetime.date.today().isoformat(), "commit": options.commit, "gpu": device.name(), "gpus": world,
            "torch": torch.__version__, "command": "test/gpu/serving.py " + " ".join(options.command),
            "note": __doc__.split("\n\n")[2].replace("\n", " "), "left_out": left}
    body = ",\n".join("    " + json.dumps(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(head, indent=2)[:-2] + ',\n  "rows": [\n' + body + "\n  ]\n}\n")


@torch.inference_mode()
def measure(group, device, options):
    """All cells within the budget. Returns the rows and the cells that were left out."""
    cells = [cell for cell in options.cells if cell.model in options.model]
    cells = [cell for cell in cells if not options.tokens or cell.tokens in options.tokens]
    cells = [cell for cell in cells if not options.phase or cell.phase == options.phase]
    path = options.out / f"serving-{group.world}x{device.name()}.json"
    models, rows, left, longest = {}, [], [], 0.0
    for number, cell in enumerate(cells):
        begin = time.monotonic()
        if grid.most([begin - BEGAN + 1.5 * longest + 5 > options.budget_s], group)[0]:  # no rank may go on alone
            left = [f"{rest.model} {rest.phase} {rest.tokens}" for rest in cells[number:]]
            break
        if cell.model not in models:
            models[cell.model] = Model(cell.model, MODELS[cell.model], options.layers, group)
        rows.append(row_of(cell, models[cell.model], device, options))
        device.tidy()
        longest = max(longest, time.monotonic() - begin)
        if group.rank == 0:
            print(f"{time.monotonic() - BEGAN:5.0f} s  {line_of(rows[-1])}", flush=True)
            written(path, rows, [], device, group.world, options)
    if group.rank == 0:
        written(path, rows, left, device, group.world, options)
        print(f"left out, by the budget of {options.budget_s} s: {'; '.join(left) if left else 'nothing'}")
    return rows, left


def parsed(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, help="default: all of this host, at most 8")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "doc/results")
    parser.add_argument("--budget-s", type=float, default=450, help="of the whole run; other cells are left out")
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--phase", choices=("decode", "prefill"))
    parser.add_argument("--tokens", action="append", type=int, help="default: all")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024, help="tokens before those that are decoded")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--no-symm", dest="symm", action="store_false", help="without torch's symmetric memory")
    parser.add_argument("--commit", default=os.environ.get("COMMIT", "unknown"))
    options = parser.parse_args(arguments)
    options.model, options.command, options.cells = options.model or list(MODELS), list(arguments), CELLS
    return options


def rank_main(options):
    faulthandler.dump_traceback_later(options.budget_s + 90, exit=True)
    index = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(index)
    dist.init_process_group("nccl", device_id=torch.device("cuda", index))
    if options.symm:
        import torch.distributed._symmetric_memory as symm_mem
        symm_mem.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    Norms.compile()
    group = perseus.init(timeout_ms=60000)
    rows, _ = measure(group, grid.Gpu(group), options)
    group.close()
    dist.destroy_process_group()
    return 0 if rows and all(row["checked"] for row in rows) else 1


def main():
    options = parsed(sys.argv[1:])
    if "RANK" in os.environ:
        return rank_main(options)
    gpus = options.gpus or min(torch.cuda.device_count(), 8)
    if gpus < 2:
        sys.exit(f"serving: {gpus} GPUs: a run needs at least 2")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(gpus), __file__, *sys.argv[1:]]
    return subprocess.run(command, env=dict(os.environ, COMMIT=options.commit)).returncode


if __name__ == "__main__":
    sys.exit(main())
