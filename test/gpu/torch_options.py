#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The options and calls of torch.distributed that jobs use to start, split, abort and shrink communicators, over
Perseus and NCCL's own transport.

    test/gpu/torch_options.py [--ranks 2] [--cases eager,abort,...] [--transports perseus,ib] [--nccl libnccl.so.2]

Runs on a host without a NIC: each rank is a node of its own on the software NIC. A case says how each rank must end;
what a collective brings is compared. Prints a JSON line a case and transport, and a table last. The exit status is the
number of cases that failed over Perseus.
"""
import argparse
import concurrent.futures
import datetime
import faulthandler
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
FIXED = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
         "NCCL_NET_GDR_LEVEL": "SYS", "NCCL_SOCKET_IFNAME": "lo", "PERSEUS_LOG": "warn", "NCCL_DEBUG": "INFO",
         # without it, NCCL 2.28 crashes on NICs that are not mlx5: doc/softnic.md
         "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "NCCL_GIN_TYPE": "2",
         # 2.28 forgets the plugin's name with its last communicator: doc/troubleshooting.md
         "NCCL_NET_PLUGIN_REF_COUNT": "1"}
TRANSPORTS = {"perseus": {"NCCL_NET_PLUGIN": str(BUILD / "plugin/libnccl-net-perseus.so"), "NCCL_NET": "Perseus"},
              "ib": {"NCCL_NET_PLUGIN": "none", "NCCL_IB_HCA": "softnic", "NCCL_IB_GID_INDEX": "1"}}
LATE_S, SHORT_S = 5, 6  # how long a rank is late; the time limit of a group whose peer never comes
ENDED, DIES, KILLED = "ends", "dies", "is killed"


class Rank:
    """What a case does with the library, in one rank."""

    def __init__(self, rank, ranks, folder):
        import torch
        import torch.distributed as dist
        self.torch, self.dist, self.rank, self.ranks, self.folder, self.groups = (
            torch, dist, rank, ranks, pathlib.Path(folder), 0)
        self.began = time.monotonic()
        torch.cuda.set_device(rank)
        self.load()

    def load(self):
        """Launches every kernel of the cases once: a first launch waits in the CUDA driver for a collective that is
        under way, and keeps a lock there that the software NIC needs."""
        x, out = self.torch.full((8,), 1.0, device="cuda"), self.torch.empty((2, 4), device="cuda")
        self.same(x, 1.0), self.same(x + 1, 2.0), self.same(self.torch.zeros_like(x), 0.0)
        out.copy_(x.view(2, 4))
        self.same(out, self.torch.ones(2, device="cuda")[:, None])

    def drain(self, limit_s=60):
        """Waits until the GPU has done what was asked of it, outside the CUDA driver. After that, copies to pageable
        memory wait for nothing."""
        event = self.torch.cuda.Event()
        event.record()
        end = time.monotonic() + limit_s
        while not event.query():
            assert time.monotonic() < end, f"the GPU has not ended its work within {limit_s} s"
            time.sleep(0.0005)

    def same(self, data, want):
        self.drain()
        return bool((data == want).all())

    def say(self, what):
        print(json.dumps({"rank": self.rank, "at_s": round(time.monotonic() - self.began, 2), "event": what}),
              flush=True)

    def init(self, eager=True, limit_s=120, ranks=None):
        """A default group, through a file of its own, since a store in a rank would die with that rank."""
        self.groups += 1
        self.dist.init_process_group("nccl", init_method=f"file://{self.folder}/store.{self.groups}", rank=self.rank,
                                     world_size=ranks or self.ranks, timeout=datetime.timedelta(seconds=limit_s),
                                     device_id=self.torch.device("cuda", self.rank) if eager else None)

    def ones(self, words=1 << 20):
        return self.torch.full((words,), float(self.dist.get_rank() + 1), device="cuda")

    def right(self, group=None):
        """Collectives and messages of the group have the right result."""
        torch, dist = self.torch, self.dist
        size, mine = dist.get_world_size(group), dist.get_rank(group)
        x = torch.full((1 << 20,), float(mine + 1), device="cuda")
        dist.all_reduce(x, group=group)
        assert self.same(x, size * (size + 1) / 2), f"all-reduce of {size} ranks gave {x[0].item()}"
        parts, each = (torch.empty(size << 16, device="cuda"),
                       torch.tensor([float(r) for r in range(size)], device="cuda"))
        part = torch.full((1 << 16,), float(mine), device="cuda")
        dist.all_gather_into_tensor(parts, part, group=group)
        assert self.same(parts.view(size, -1), each[:, None]), "all-gather"
        if size > 1:
            got, to, at = torch.zeros_like(x), (mine + 1) % size, (mine + size - 1) % size
            ops = [dist.P2POp(dist.isend, x + mine, group=group, group_peer=to),
                   dist.P2POp(dist.irecv, got, group=group, group_peer=at)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            assert self.same(got, size * (size + 1) / 2 + at), f"message from {at}: {got[0].item()}"

    def flag(self, name):
        (self.folder / name).touch()

    def await_flag(self, name, limit_s=40):
        end = time.monotonic() + limit_s
        while not (self.folder / name).exists():
            assert time.monotonic() < end, f"no file {name} within {limit_s} s"
            time.sleep(0.02)

    def last(self):
        return self.rank == self.ranks - 1

    def abort(self):
        began = time.monotonic()
        self.dist.distributed_c10d._abort_process_group()
        self.say(f"aborted in {time.monotonic() - began:.2f} s")

    def end(self):
        self.dist.destroy_process_group()
        self.say("right")

    # ---- the cases ----

    def lazy(self):
        self.init(eager=False)
        self.right()
        self.end()

    def eager(self):
        self.init()
        self.right()
        self.end()

    def split(self):
        """new_group splits the default communicator when that was made at once; split_group does so always."""
        self.init()
        groups = [self.dist.new_group(list(range(self.ranks))) for _ in range(3)]
        groups.append(self.dist.split_group(split_ranks=[list(range(self.ranks))]))
        for group in groups:
            self.right(group)
        for group in groups[1:]:
            self.dist.destroy_process_group(group)
        self.right(groups[0])
        self.right()
        self.end()

    def many(self):
        """Groups whose collectives are under way together."""
        self.init()
        groups = [self.dist.new_group(list(range(self.ranks))) for _ in range(6)]
        for group in groups:
            self.right(group)
        for _ in range(5):
            data = [self.ones() for _ in groups]
            work = [self.dist.all_reduce(x, group=group, async_op=True) for x, group in zip(data, groups)]
            for one in work:
                one.wait()
            assert all(self.same(x, self.ranks * (self.ranks + 1) / 2) for x in data), "all-reduce of several groups"
        self.end()

    def again(self):
        for _ in range(3):
            self.init()
            self.right()
            self.dist.destroy_process_group()
        self.say("right")

    def abort_late_peer(self):
        """The last rank comes late to a collective, and the others give up."""
        self.init()
        self.right()
        if not self.last():
            data = self.ones()
            self.dist.all_reduce(data, async_op=True)
            time.sleep(LATE_S)
            self.abort()
            self.flag(f"aborted.{self.rank}")
        else:
            for rank in range(self.ranks - 1):
                self.await_flag(f"aborted.{rank}")
            self.abort()
        self.init()
        self.right()
        self.end()

    def abort_under_way(self):
        """Every rank aborts while data moves."""
        self.init()
        self.right()
        data = self.ones(64 << 20)
        for _ in range(200):
            self.dist.all_reduce(data, async_op=True)
        time.sleep(0.2)
        self.abort()
        self.init()
        self.right()
        self.end()

    def watchdog(self):
        """The last rank never comes: the time limit ends the others."""
        self.init(limit_s=SHORT_S)
        self.right()
        if self.last():
            time.sleep(4 * SHORT_S)
            os._exit(0)
        self.dist.all_reduce(self.ones())
        self.must_be_ended()

    def must_be_ended(self):
        """By the watchdog."""
        time.sleep(80)
        self.say("was not ended")
        os._exit(0)

    def blocking_wait(self):
        """The same with TORCH_NCCL_BLOCKING_WAIT: the call raises, and the process goes on."""
        self.init(limit_s=SHORT_S)
        self.right()
        if self.last():
            time.sleep(3 * SHORT_S)
            os._exit(0)
        try:
            self.dist.all_reduce(self.ones(), async_op=True).wait()  # without async_op PyTorch 2.11 does not wait
        except RuntimeError as error:
            self.say(f"raised {type(error).__name__}: {str(error)[:80]}")
            self.flag("raised")
            os._exit(0)
        raise AssertionError("a collective came back without the last rank")

    def stream_of_collectives_then_kill(self):
        self.init()
        self.right()
        data = self.ones()
        for _ in range(20):
            self.dist.all_reduce(data, async_op=True)
        if self.last():
            self.drain()
            self.say("kills itself")
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(10):
            self.dist.all_reduce(data, async_op=True)

    def killed(self):
        """The last rank is killed. The others' watchdog learns of it from NCCL, long before the group's time limit, and
        ends them."""
        self.stream_of_collectives_then_kill()
        self.must_be_ended()

    def killed_shrink(self):
        """The same, but the others go on without it: by a shrink, which NCCL refuses when it knows of the death
        (doc/nccl.md); then anew."""
        self.stream_of_collectives_then_kill()
        time.sleep(LATE_S)
        began, group = time.monotonic(), None
        try:
            group = self.dist.shrink_group([self.ranks - 1], shrink_flags=self.dist.distributed_c10d.SHRINK_ABORT)
            self.say(f"shrunk in {time.monotonic() - began:.2f} s")
        except self.dist.DistBackendError as error:
            self.say(f"refused to shrink: {str(error)[-160:]}")
            self.abort()
            self.init(ranks=self.ranks - 1)
        assert self.dist.get_world_size(group) == self.ranks - 1
        self.right(group)
        self.say("right")
        os._exit(0)

    def shrink(self):
        """A rank that is alive is left out."""
        self.init()
        self.right()
        if self.last():
            for rank in range(self.ranks - 1):
                self.await_flag(f"shrunk.{rank}")
            self.say("right")
            os._exit(0)
        group = self.dist.shrink_group([self.ranks - 1])
        assert self.dist.get_world_size(group) == self.ranks - 1
        self.right(group)
        self.say("right")
        self.flag(f"shrunk.{self.rank}")
        os._exit(0)


NONBLOCKING = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}
BY_HAND = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
# name: what a rank does, more variables, how the last rank ends, how the others do
CASES = {
    "lazy": ("lazy", {}, ENDED, ENDED),
    "eager": ("eager", {}, ENDED, ENDED),
    "nonblocking": ("eager", NONBLOCKING, ENDED, ENDED),
    "split": ("split", {}, ENDED, ENDED),
    "nonblocking_split": ("split", NONBLOCKING, ENDED, ENDED),
    "many": ("many", {}, ENDED, ENDED),
    "again": ("again", {}, ENDED, ENDED),
    "abort_late_peer": ("abort_late_peer", BY_HAND, ENDED, ENDED),
    "nonblocking_abort": ("abort_late_peer", {**BY_HAND, **NONBLOCKING}, ENDED, ENDED),
    "abort_under_way": ("abort_under_way", BY_HAND, ENDED, ENDED),
    "watchdog": ("watchdog", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, None, DIES),
    "blocking_wait": ("blocking_wait", {"TORCH_NCCL_BLOCKING_WAIT": "1"}, None, ENDED),
    "killed": ("killed", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, KILLED, DIES),
    "killed_shrink": ("killed_shrink", BY_HAND, KILLED, ENDED),
    "shrink": ("shrink", {}, ENDED, ENDED),
}


def ended_so(status, want):
    """Whether a rank ended as it must. Want None: it does not matter, since the test ends that rank. Status None: it
    had to be stopped."""
    if want is None or status is None:
        return want is None
    return {ENDED: status == 0, KILLED: status == -signal.SIGKILL, DIES: status not in (0, -signal.SIGKILL)}[want]


def launch(args):
    """Inside softnic-run: all ranks of one case. None is left when this ends. Writes the exit statuses; None where one
    had to be stopped."""
    end = time.monotonic() + args.timeout
    folder = pathlib.Path(args.folder)
    ranks, at = [], time.monotonic()
    for r in range(args.ranks):
        env = dict(os.environ, NCCL_HOSTID=f"torch-options-{r}", SOFTNIC_NODE=str(r),
                   NCCL_DEBUG_FILE=str(folder / f"nccl.{r}"))
        with open(folder / f"rank.{r}", "wb") as out:
            ranks.append(subprocess.Popen([sys.executable, __file__, "--rank", str(r), "--ranks", str(args.ranks),
                                           "--cases", args.cases, "--folder", args.folder], env=env, stdout=out,
                                          stderr=subprocess.STDOUT))
    statuses, seconds = [None] * args.ranks, [None] * args.ranks
    try:
        while None in statuses and time.monotonic() < end:
            for r, p in enumerate(ranks):
                if statuses[r] is None and p.poll() is not None:
                    statuses[r], seconds[r] = p.returncode, round(time.monotonic() - at, 1)
            time.sleep(0.05)
    finally:
        for p in ranks:
            p.kill()
    (folder / "ended").write_text(json.dumps({"statuses": statuses, "seconds": seconds}))
    return 0


def run_case(name, transport, args):
    action, more, last, others = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        env = dict(os.environ, **FIXED, **TRANSPORTS[transport], **more)
        if args.nccl:
            env["LD_PRELOAD"] = args.nccl
        command = [str(BUILD / "tools/softnic/softnic-run"), "--quiet", "--nodes", str(args.ranks), "--nics", "1",
                   *args.softnic.split(), "--", sys.executable, __file__, "--launch", "--ranks", str(args.ranks),
                   "--cases", action, "--folder", folder, "--timeout", str(args.timeout)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=args.timeout + 60, check=False)
        path = pathlib.Path(folder)
        if done.returncode or not (path / "ended").exists():
            return {"case": name, "transport": transport, "right": False,
                    "why": f"softnic-run: status {done.returncode}: {done.stderr[-300:]}"}
        ended = json.loads((path / "ended").read_text())
        texts = [(path / f"rank.{r}").read_text(errors="replace") for r in range(args.ranks)]
        events = [json.loads(line) for text in texts for line in re.findall(r'^\{"rank".*\}$', text, re.M)]
        log = "".join(p.read_text(errors="replace") for p in path.glob("nccl.*"))
        network = sorted(set(re.findall(r"Using network (\S+)", log)))
        warned = sorted(set(re.findall(r"NCCL WARN (.{0,140})", log)))
        version = re.search(r"NCCL version (\S+)", log)
        if args.logs:
            keep = pathlib.Path(args.logs) / f"{name}.{transport}"
            keep.mkdir(parents=True, exist_ok=True)
            for p in [*path.glob("rank.*"), *path.glob("nccl.*")]:
                (keep / p.name).write_bytes(p.read_bytes()[-200000:])
    wants = [others] * (args.ranks - 1) + [last]
    why = [f"rank {r}: status {s} after {t} s, but it {w}"
           for r, (s, t, w) in enumerate(zip(ended["statuses"], ended["seconds"], wants)) if not ended_so(s, w)]
    expected = [r for r, w in enumerate(wants) if w == ENDED and action != "blocking_wait"]
    why += [f"rank {r} did not say that its data was right"
            for r in expected if not any(e["rank"] == r and e["event"] == "right" for e in events)]
    if network != ["Perseus" if transport == "perseus" else "IB"]:
        why.append(f"NCCL used the network {network}")
    said = [e["event"] for e in events if e["rank"] == 0 and e["event"] != "right"]
    row = {"case": name, "transport": transport, "right": not why, "seconds": ended["seconds"],
           "statuses": ended["statuses"], "said": said, "nccl": version and version[1]}
    if why:
        row.update(why=why, warned=warned[:4], tail=[t[-600:] for t in texts])
    elif warned:
        row["warned"] = warned[:2]
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cases", default=",".join(CASES), help="comma list (%(default)s)")
    parser.add_argument("--transports", default="perseus,ib",
                        help="comma list of perseus, ib; they run side by side (%(default)s)")
    parser.add_argument("--nccl", metavar="FILE", help="another libnccl.so.2 than PyTorch's")
    parser.add_argument("--timeout", type=int, default=100, help="seconds for a case (%(default)s)")
    parser.add_argument("--softnic", default="", help='more options of softnic-run, e.g. "--copier"')
    parser.add_argument("--logs", metavar="FOLDER", help="keep the ranks' output and NCCL's there")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank >= 0:
        faulthandler.enable()
        getattr(Rank(args.rank, args.ranks, args.folder), args.cases)()
        return 0
    if args.launch:
        return launch(args)
    unknown = set(args.cases.split(",")) - set(CASES) or set(args.transports.split(",")) - set(TRANSPORTS)
    if unknown:
        parser.error(f"no such case or transport: {', '.join(sorted(unknown))}")
    try:
        import torch
        gpus = torch.cuda.device_count()
    except ImportError:
        gpus = 0
    if gpus < args.ranks:
        print(f"skipped: needs PyTorch and {args.ranks} GPUs, found {gpus}")
        return 77
    rows, names = {}, args.transports.split(",")
    for case in args.cases.split(","):
        with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
            for row in pool.map(lambda name, case=case: run_case(case, name, args), names):
                rows[case, row["transport"]] = row
                print(json.dumps(row), flush=True)
    print(f"{'case':20}" + "".join(f"{name:34}" for name in names) + "what rank 0 said")
    for case in args.cases.split(","):
        cells = [rows[case, name] for name in names]
        found = (f"{'right' if c['right'] else 'WRONG':6}{str(c.get('statuses')) + ' ' + str(c.get('seconds')):28}"
                 for c in cells)
        print(f"{case:20}" + "".join(found) + " | ".join("; ".join(c.get("said", [])) for c in cells))
    return sum(not row["right"] for (_, name), row in rows.items() if name == "perseus")


if __name__ == "__main__":
    sys.exit(main())
