#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Training steps of models of torchtitan, transformers and Megatron-core with random weights: the framework's own
tensor or expert parallelism, compiled and with torch's asynchronous tensor parallelism, and that of Perseus.

    torchrun --nproc-per-node 4 test/gpu/training.py --framework torchtitan --tp 4 [--way NAME ...] [--budget-s 70]
    FOLDER/training-FRAMEWORK-MODEL-NxGPU.json: a row a way

The ways are models of one process that begin with the same weights and get the same tokens. They take turns of
--block steps; a step is forward, loss, backward, clipping and AdamW, and its time is that between two events on the
stream, of the slowest rank. The first step after each change of ways is left out. The host runs ahead of the GPU as in
a training loop. Garbage is collected between turns, by no rank on its own, as in torchtitan's trainer. Losses of each
step are compared with those of the framework's own way. Peak memory is that of torch's allocator: what the way keeps,
and what its steps need. Exit status 1: a way failed, or its losses were others.

Adaptors exchange parts of a framework, so models of the framework alone are built first, whatever the order of --way.
--profile writes tables of the time on the device to FOLDER/profile-....txt.
"""
import argparse
import datetime
import faulthandler
import gc
import json
import os
import pathlib
import sys
import time
import traceback

BEGAN = time.monotonic()
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "fused/python"), str(ROOT / "test/gpu")]
# NVLink multicast is never used on these hosts.
os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")
os.environ.setdefault("PERSEUS_LOG", "error")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import training_models  # noqa: E402
import training_profile  # noqa: E402

WARMUP = 3  # steps of a way before its first timed one
APART = 0.02  # of two losses of one step, over the loss
TOKENS = 1000  # so many of the vocabulary occur, so the loss falls soon


class Gpu:
    def __init__(self):
        index = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(index)
        self.device = torch.device("cuda", index)
        dist.init_process_group("nccl")

    def mark(self):
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, begin, end):
        return begin.elapsed_time(end)

    def together(self):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()

    def allocated(self):
        return torch.cuda.memory_allocated()

    def peak(self):
        found = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return found

    def name(self):
        return torch.cuda.get_device_name().replace("NVIDIA ", "").split()[0]

    def machine(self):
        return (f"{dist.get_world_size()} x {torch.cuda.get_device_name()}, {os.cpu_count()} cores, CUDA "
                f"{torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}; NVLink multicast off")


class Emulated:
    """For tests of this script: the times mean nothing."""

    def __init__(self):
        self.device = torch.device("cpu")
        dist.init_process_group("gloo")

    def mark(self):
        return time.perf_counter()

    def between(self, begin, end):
        return (end - begin) * 1e3

    def together(self):
        dist.barrier()

    def allocated(self):
        return 0

    peak = allocated

    def name(self):
        return "emulated"

    machine = name


class Turns:
    def __init__(self, device, framework, options):
        self.device, self.framework, self.options = device, framework, options
        self.longest = 0.0
        self.ways, self.waiting, self.failed = [], [], {}
        self.losses, self.marks, self.kept, self.peaks = {}, {}, {}, {}
        self.profiles, self.tables = {}, []

    def agreed(self, bad):
        """Whether any rank says so."""
        value = torch.tensor([float(bool(bad))], device=self.device.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value.item())

    def attempt(self, name, call):
        """What a way raises costs that way alone, as far as all ranks raise it."""
        said = ""
        try:
            result = call()
            torch.cuda.synchronize() if self.device.device.type == "cuda" else None
        except Exception as e:
            result, said = None, f"{type(e).__name__}: {e}"
            if dist.get_rank() == 0:
                traceback.print_exc()
        if self.agreed(said):
            self.failed[name] = said.splitlines()[0][:300] if said else "another rank failed"
            return None
        return result

    def build(self, names):
        """In the order of framework.ways: those of the framework alone come first there."""
        for name in sorted(names, key=self.framework.ways.index):
            before = self.device.allocated()
            way = self.attempt(name, lambda: self.framework.build(name))
            if way is None:
                continue
            if self.ways:
                way.like(self.ways[0])
            self.kept[name] = self.device.allocated() - before
            self.ways.append(way)
            self.losses[name], self.marks[name], self.peaks[name] = [], [], 0
            self.say(f"{name} is built")
        self.waiting, self.ways = sorted(self.ways, key=lambda way: names.index(way.name)), []

    def warm_up(self):
        """The next way makes its first steps. Ways for which no time is left are named."""
        way = self.waiting.pop(0)
        if self.ways and self.agreed(time.monotonic() - BEGAN > self.options.begin_part * self.options.budget_s):
            self.failed[way.name] = "left out, by the budget"
            return
        before = self.device.allocated()
        if self.attempt(way.name, lambda: self.steps(way, WARMUP)) is not None:
            if self.options.profile:
                self.attempt(way.name, lambda: self.profile(way))
            self.ways.append(way)
        self.kept[way.name] += self.device.allocated() - before
        self.say(f"{way.name} has made its first steps")

    def say(self, text):
        if dist.get_rank() == 0:
            print(f"{time.monotonic() - BEGAN:5.0f} s  {text}", flush=True)

    def batch(self, number):
        """Fresh tokens, the same for all ways and for all ranks of a tensor-parallel group: about every second one
        follows from the one before."""
        generator = torch.Generator().manual_seed(1000 * number + self.framework.data_rank)
        most = min(TOKENS, training_models.MODELS[self.options.model][self.device.device.type != "cuda"]["vocabulary"])
        drawn = torch.randint(0, most, (self.options.batch, self.options.sequence + 1), generator=generator)
        follows = torch.rand(drawn.shape, generator=generator) < 0.5
        drawn[:, 1:] = torch.where(follows[:, 1:], (7 * drawn[:, :-1] + 1) % most, drawn[:, 1:])
        drawn = drawn.to(self.device.device)
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    def steps(self, way, count):
        done = len(self.losses[way.name])
        given = [self.batch(number) for number in range(done, done + count)]
        gc.collect(1)
        self.device.together()
        self.device.peak()
        before = self.device.allocated()
        marks = [self.device.mark()]
        for tokens, labels in given:
            self.losses[way.name].append(way.step(tokens, labels))
            marks.append(self.device.mark())
        self.device.together()
        self.peaks[way.name] = self.device.peak() - before
        return marks

    def turn(self, way):
        marks = self.attempt(way.name, lambda: self.steps(way, self.options.block))
        if marks is None:
            self.ways.remove(way)
        else:
            self.marks[way.name] += list(zip(marks[1:], marks[2:]))

    def rounds(self, most):
        """False: the budget is used up."""
        for number in range(most):
            begin = time.monotonic()
            if self.agreed(begin - BEGAN + 1.3 * self.longest > self.options.budget_s):
                return False
            turn = number % len(self.ways)
            for way in self.ways[turn:] + self.ways[:turn]:
                if way.name not in self.options.few or len(self.losses[way.name]) < self.options.few_steps:
                    self.turn(way)
            self.longest = max(self.longest, time.monotonic() - begin)
        return True

    def profile(self, way):
        """All ways make these steps, and none is compared. Where the device's time goes in some of them."""
        count = self.options.profile

        def steps(number):
            for tokens, labels in [self.batch(i) for i in range(number)]:
                way.step(tokens, labels)
        steps(1)
        tokens, labels = self.batch(0)
        host = training_profile.host_ms(lambda: way.step(tokens, labels))
        lines, self.profiles[way.name] = training_profile.table(way.name, training_profile.recorded(steps, count),
                                                                count, host)
        self.tables += lines

    def all(self, written):
        """Each way has a turn when it comes, so that there are rows whatever the next one does. They count only where
        there is no time for rounds of all."""
        while self.waiting:
            self.warm_up()
            begin = time.monotonic()
            if self.ways and not self.marks[self.ways[-1].name]:
                self.turn(self.ways[-1])
            self.longest += time.monotonic() - begin
            written(self.rows())
        early = {name: list(marks) for name, marks in self.marks.items()}
        for marks in self.marks.values():
            marks.clear()
        while min((len(self.losses[way.name]) for way in self.ways if way.name not in self.options.few),
                  default=self.options.steps) < self.options.steps:
            more = self.rounds(4)
            for name in early if not all(self.marks[way.name] for way in self.ways) else ():
                self.marks[name] = early[name]
            written(self.rows())
            if not more:
                break

    def rows(self):
        names, found = [way.name for way in self.ways], {}
        for name in names:
            msec = torch.tensor([self.device.between(*pair) for pair in self.marks[name]], dtype=torch.float64,
                                device=self.device.device)
            dist.all_reduce(msec, op=dist.ReduceOp.MAX)
            losses = torch.stack([loss.float().reshape(()) for loss in self.losses[name]])
            memory = torch.tensor([self.kept[name], self.peaks[name]], dtype=torch.float64, device=self.device.device)
            dist.all_reduce(memory, op=dist.ReduceOp.MAX)
            found[name] = msec.sort().values.tolist(), self.framework.loss(losses).tolist(), memory.tolist()
        base = found[names[0]][1] if names else []
        return [self.row(name, *found[name], base) for name in names]

    def row(self, name, msec, losses, memory, base):
        tokens = self.options.batch * self.options.sequence * dist.get_world_size() // self.options.tp
        apart = [abs(a - b) / b for a, b in zip(losses, base)]
        median = msec[len(msec) // 2] if msec else float("nan")
        good = max(apart) < APART and losses[-1] < 0.9 * losses[0] if len(losses) > 20 else max(apart) < APART
        return {"framework": self.options.framework, "model": self.options.model, "way": name,
                "gpus": dist.get_world_size(), "tp": self.options.tp, "ep": self.options.ep,
                "fsdp": dist.get_world_size() // self.options.tp, "layers": self.options.layers,
                "sequence": self.options.sequence, "batch": self.options.batch, "dtype": self.options.dtype,
                "checkpoint": self.options.checkpoint, "step_ms": round(median, 3),
                "step_p99_ms": round(msec[min(int(0.99 * len(msec)), len(msec) - 1)], 3) if msec else None,
                "timed_steps": len(msec), "tokens_per_s": round(tokens / median * 1e3),
                "kept_gb": round(memory[0] / 2**30, 2), "step_gb": round(memory[1] / 2**30, 2),
                "steps": len(losses), "first_loss": round(losses[0], 4), "last_loss": round(losses[-1], 4),
                "loss_apart_most": round(max(apart), 5), "loss_apart_mean": round(sum(apart) / len(apart), 6),
                "checked": good, **self.profiles.get(name, {})}


def written(path, rows, failed, device, options):
    head = {"date": datetime.date.today().isoformat(), "commit": options.commit, "machine": device.machine(),
            "gpus": dist.get_world_size(), "torch": torch.__version__,
            "command": "test/gpu/training.py " + " ".join(sys.argv[1:]), "failed": failed,
            "note": __doc__.split("\n\n")[2].replace("\n", " ")}
    body = ",\n".join("    " + json.dumps(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(head, indent=2)[:-2] + ',\n  "rows": [\n' + body + "\n  ]\n}\n")


def parsed():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=training_models.FRAMEWORKS, default="torchtitan")
    parser.add_argument("--model", choices=training_models.MODELS, default="llama3-8b")
    parser.add_argument("--way", action="append", help="default: all of the framework; the first one is the base")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1, help="sequences of a data-parallel rank")
    parser.add_argument("--dtype", default="bfloat16", help="of parameters, where FSDP does not cast them")
    parser.add_argument("--checkpoint", default="none", help="torchtitan's activation_checkpoint.mode")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--few", action="append", default=[], help="a way that leaves after --few-steps")
    parser.add_argument("--few-steps", type=int, default=40)
    parser.add_argument("--block", type=int, default=6, help="steps of a way before the next one's turn")
    parser.add_argument("--profile", type=int, default=0, help="so many steps of each way, before it is timed")
    parser.add_argument("--budget-s", type=float, default=600, help="of the whole run; steps are left out")
    parser.add_argument("--begin-part", type=float, default=0.75, help="of the budget; ways that have not begun then "
                        "are left out")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "doc/results")
    parser.add_argument("--commit", default=os.environ.get("COMMIT", "unknown"))
    return parser.parse_args()


def main():
    options = parsed()
    faulthandler.dump_traceback_later(options.budget_s + 30, exit=True)
    device = Emulated() if os.environ.get("PERSEUS_FUSED_LIBRARY", "").endswith("emulated.so") else Gpu()
    gc.disable()  # a full collection stops a rank for 0.3 s, and the others wait for it
    framework = training_models.FRAMEWORKS[options.framework](options, device.device)
    turns = Turns(device, framework, options)
    turns.build(options.way or framework.ways)
    path = options.out / (f"training-{options.framework}-{options.model}-tp{options.tp}-"
                          f"{dist.get_world_size()}x{device.name()}.json")
    rows = []

    def keep(found):
        rows[:] = found
        if dist.get_rank() == 0:
            written(path, rows, turns.failed, device, options)
            if turns.tables:
                path.with_name(path.stem.replace("training", "profile") + ".txt").write_text("\n".join(turns.tables))
    turns.all(keep)
    if dist.get_rank() == 0:
        for row in rows:
            print(f"{row['way']}: {row['step_ms']:.2f} ms, p99 {row['step_p99_ms']}, {row['tokens_per_s']} tokens/s, "
                  f"{row['kept_gb']} + {row['step_gb']} GB, losses {row['first_loss']} to {row['last_loss']} "
                  f"({row['steps']} steps), apart {row['loss_apart_most']}, {row['loss_apart_mean']}"
                  f"{'' if row['checked'] else '  WRONG'}")
        for name, said in turns.failed.items():
            print(f"{name}: {said}")
        sys.stdout.flush()
    dist.barrier()
    os._exit(0 if rows and not turns.failed and all(row["checked"] for row in rows) else 1)


if __name__ == "__main__":
    main()
