#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run NCCL over Perseus, over NCCL's own IB transport and over sockets, in turn on one host, and compare.

Each transport is a set of environment variables; each run is a fresh set of processes, since NCCL reads them once. Runs alternate
(round 1: perseus, ib, socket; round 2: the same ...) and the table shows medians over rounds, so that slow changes of the machine affect all alike.
"""
import argparse
import collections
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
# NCCL must go over the network although all ranks share a host; multicast stays off where hosts are shared.
COMMON = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_IB_GID_INDEX": "1",
          "NCCL_GIN_TYPE": "2"}  # 2.28.9 crashes on IB devices that are not mlx5 without it
OPS = ["all_reduce", "all_gather", "reduce_scatter", "alltoall", "sendrecv"]
TRANSPORTS = ["perseus", "ib", "socket"]


def find(*candidates):
    """The first path that exists, as an absolute string; the first candidate if none does (the error then names it)."""
    for path in candidates:
        if path.exists():
            return str(path.resolve())
    return str(candidates[0])


class Stopped(Exception):
    """SIGTERM was received."""


def parse_arguments():
    parser = argparse.ArgumentParser(prog="perseus-nccl", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes, one GPU each (2)")
    parser.add_argument("--ops", default=",".join(OPS), help="comma list; names of nccl-tests binaries (%(default)s)")
    parser.add_argument("--sizes", default="8:64M:x4", help="bytes A:B:xF (%(default)s)")
    parser.add_argument("--types", default="float", help="comma list, own program only (%(default)s)")
    parser.add_argument("--place", choices=["in", "out", "both"], default="out", help="in place or not, own program only")
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1, help="alternating runs of each transport (%(default)s)")
    parser.add_argument("--transports", default=",".join(TRANSPORTS), help="comma list (%(default)s)")
    parser.add_argument("--plugin", default=find(HERE / "../plugin/libnccl-net-perseus.so", HERE / "../lib/libnccl-net-perseus.so"),
                        help="the Perseus plugin (%(default)s)")
    parser.add_argument("--nccl-tests", metavar="DIR", help="run these binaries instead of the own program (MPI builds through mpirun)")
    parser.add_argument("--nccl", metavar="FILE", help="libnccl.so.2 to use")
    parser.add_argument("--softnic", metavar="OPTIONS", help='carry perseus and ib over the software NIC; its options, e.g. "--nics 1"')
    parser.add_argument("--hosts", action="store_true", help="a NCCL_HOSTID for each rank instead of P2P and SHM off (own program only)")
    parser.add_argument("--host-staged", action="store_true", help="no GPU memory at the NIC (NCCL_NET_GDR_LEVEL=LOC)")
    parser.add_argument("--register", action="store_true", help="register user buffers")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for every transport")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one run of one op (%(default)s)")
    parser.add_argument("--json", action="store_true", help="one object a line instead of the table (perseus-plot draws them)")
    return parser.parse_args()


def environment(args, transport):
    env = dict(os.environ, **COMMON)
    if args.hosts:
        del env["NCCL_P2P_DISABLE"], env["NCCL_SHM_DISABLE"]
    if transport == "perseus":
        env.update(NCCL_NET_PLUGIN=args.plugin, NCCL_NET="Perseus", PERSEUS_REQUIRED="1")
    else:
        env.update(NCCL_NET_PLUGIN="none", NCCL_NET={"ib": "IB", "socket": "Socket"}[transport])
    if transport == "socket":
        env.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if args.host_staged:
        env["NCCL_NET_GDR_LEVEL"] = "LOC"
    if args.nccl:
        env["LD_LIBRARY_PATH"] = os.path.dirname(os.path.abspath(args.nccl)) + ":" + env.get("LD_LIBRARY_PATH", "")
    env.update(item.split("=", 1) for item in args.env)
    return env


def own_command(args, transport, op):
    ranks = find(HERE / "perseus-nccl-ranks", HERE / "../libexec/perseus/perseus-nccl-ranks")
    command = [ranks, "--label", transport, "--ranks", str(args.ranks), "--ops", op, "--sizes", args.sizes, "--types", args.types,
               "--place", args.place, "--iters", str(args.iters), "--warmup", str(args.warmup), "--timeout", str(args.timeout)]
    command += ["--nccl", args.nccl] if args.nccl else []
    command += ["--hosts"] if args.hosts else []
    return command + (["--register"] if args.register else [])


def tests_command(args, op):
    binary = os.path.join(args.nccl_tests, op + "_perf")
    least, most, factor = re.fullmatch(r"(\w+):(\w+)(?::x(\d+))?", args.sizes).groups()
    options = [binary, "-b", least, "-e", most, "-f", factor or "4", "-n", str(args.iters), "-w", str(args.warmup), "-c", "1"]
    options += ["-R", "1"] if args.register else []
    linked = subprocess.run(["ldd", binary], capture_output=True, text=True, check=False).stdout
    if "libmpi" in linked:
        return ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(args.ranks)] + options + ["-g", "1"]
    return options + ["-g", str(args.ranks)]


def parse_tests(text, transport, op, ranks):
    """Rows of an nccl-tests table: size, count, type, redop, root, then time, algbw, busbw, #wrong out of place and in place."""
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 13 or not fields[0].isdigit():
            continue
        for place, (usec, algbw, busbw, wrong) in (("out", fields[5:9]), ("in", fields[9:13])):
            yield {"transport": transport, "program": "nccl-tests", "op": op, "type": fields[2], "ranks": ranks, "bytes": int(fields[0]),
                   "in_place": place == "in", "usec_p50": float(usec), "algbw_GBps": float(algbw), "busbw_GBps": float(busbw),
                   "wrong": int(wrong) if wrong.isdigit() else 0}


def run_once(args, transport, op):
    """One op over one transport: its rows, or None after printing why it failed."""
    command = tests_command(args, op) if args.nccl_tests else own_command(args, transport, op)
    if args.softnic is not None and transport != "socket":
        softnic = find(HERE / "softnic/softnic-run", pathlib.Path(shutil.which("softnic-run") or "softnic-run"))
        command = [softnic, *shlex.split(args.softnic), "--", *command]
    try:
        done = subprocess.run(command, env=environment(args, transport), capture_output=True, text=True, timeout=args.timeout, check=False)
    except subprocess.TimeoutExpired as error:
        print(f"perseus-nccl: {transport} {op}: not done within {args.timeout} s: {shlex.join(command)}\n{error.stdout or ''}", file=sys.stderr)
        return None
    if args.nccl_tests:
        rows = list(parse_tests(done.stdout, transport, op, args.ranks))
    else:
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not rows:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-25:])
        print(f"perseus-nccl: {transport} {op}: exit {done.returncode}, {len(rows)} rows: {shlex.join(command)}\n{tail}", file=sys.stderr)
        return None
    return rows


def key_of(row):
    return row["op"], row["type"], row["in_place"], row["bytes"]


def measure(args, transports, samples):
    """Run everything in turn, adding rows to samples: {(key, transport): [row]}. Return whether every run succeeded with right data."""
    sound = True
    for _ in range(args.rounds):
        for op in args.ops.split(","):
            for transport in transports:
                rows = run_once(args, transport, op)
                sound = sound and rows is not None and all(row["wrong"] == 0 for row in rows)
                for row in rows or []:
                    samples[key_of(row), transport].append(row)
    return sound


def stop(_signal, _frame):
    raise Stopped


def collect(args, transports):
    """Medians over rounds: {(op, type, in_place, bytes): {transport: row}}, and whether every run succeeded with right data. After SIGTERM
    (timeout(1)) they are of the runs that were done."""
    samples, sound = collections.defaultdict(list), False
    signal.signal(signal.SIGTERM, stop)
    try:
        sound = measure(args, transports, samples)
    except Stopped:
        print("perseus-nccl: stopped: the table is of what was done until then", file=sys.stderr)
    table = collections.defaultdict(dict)
    for (key, transport), rows in samples.items():
        best = dict(rows[0], rounds=len(rows), wrong=sum(row["wrong"] for row in rows))
        for name in ("usec_p50", "algbw_GBps", "busbw_GBps"):
            best[name] = round(statistics.median(row[name] for row in rows), 4)
        table[key][transport] = best
    return table, sound


def print_table(table, transports):
    columns = "".join(f"{t + ' us':>14}{'GB/s':>8}{'wrong':>6}" for t in transports)
    others = [t for t in transports if t != "perseus"] if "perseus" in transports else []
    print(f"{'op':<15}{'type':<9}{'place':<6}{'bytes':>12}{columns}" + "".join(f"{'x ' + t:>10}" for t in others))
    for (op, kind, in_place, size), row in sorted(table.items()):
        line = f"{op:<15}{kind:<9}{'in' if in_place else 'out':<6}{size:>12}"
        for t in transports:
            line += f"{row[t]['usec_p50']:>14.1f}{row[t]['busbw_GBps']:>8.2f}{row[t]['wrong']:>6}" if t in row else f"{'failed':>14}{'':>14}"
        for t in others:
            line += f"{row[t]['usec_p50'] / row['perseus']['usec_p50']:>10.2f}" if t in row and "perseus" in row else f"{'':>10}"
        print(line)


def main():
    args = parse_arguments()
    transports = args.transports.split(",")
    unknown = [t for t in transports if t not in TRANSPORTS]
    if unknown:
        sys.exit(f"perseus-nccl: --transports: unknown: {', '.join(unknown)} (known: {', '.join(TRANSPORTS)})")
    table, sound = collect(args, transports)
    if args.json:
        for _, per in sorted(table.items()):
            for row in per.values():
                print(json.dumps(row))
    else:
        print_table(table, transports)
    return 0 if sound and table else 1


if __name__ == "__main__":
    sys.exit(main())
