#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run NCCL over Perseus, over NCCL's own IB transport and over sockets, by turns, and compare.

Each transport is a set of environment variables; each run is a fresh set of processes, since NCCL reads them once. Runs
alternate (round 1: perseus, ib, socket; round 2: ib, socket, perseus ...) and medians over rounds are compared, so that
slow changes of the machine affect all alike. Variables that are already set stay as they are, except NCCL_NET and
NCCL_NET_PLUGIN, which are what is compared.

On several hosts, and wherever they are found, the programs of nccl-tests are what is run.
"""
import argparse
import collections
import json
import math
import os
import pathlib
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
# On one host NCCL must go over the network although all ranks share it; multicast stays off, since hosts may be shared.
ONE_HOST = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}
# 2.28.9 crashes without it on IB devices that are not mlx5. Only GID 1 of the software NIC is RoCE v2 with IPv4.
SOFTNIC = {"NCCL_GIN_TYPE": "2", "NCCL_IB_GID_INDEX": "1"}
COMPARED = ["NCCL_NET", "NCCL_NET_PLUGIN"]
FORWARDED = ("NCCL_", "PERSEUS_", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
OPS = ["all_reduce", "all_gather", "reduce_scatter", "alltoall", "sendrecv"]
MORE_OPS = ["broadcast", "reduce"]
TRANSPORTS = ["perseus", "ib", "socket"]
NAMES = {"ib": "NCCL IB", "socket": "sockets"}
SIZES = re.compile(r"(\d+[KMG]?)(?::(\d+[KMG]?)(?::x(\d+))?)?", re.I)
OWN_RANKS = 16
EXAMPLES = """examples:
  perseus-nccl --ranks 8 --rounds 5
  perseus-nccl --launcher "srun -N16 --ntasks-per-node=8" --ranks 128 --nccl-tests /opt/nccl-tests/build \\
               --transports perseus,ib
  perseus-nccl --hosts node1,node2 --ranks 16 --sizes 8:1G:x4
"""


def full(error):
    """Ends: what was to be printed is not all there."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that Python does not try again at exit
    sys.exit(f"perseus-nccl: cannot write all of the output: {error.strerror}")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help lists the options)\n")

    def _print_message(self, message, file=None):  # argparse's own says nothing of a full disk
        try:
            print(message, end="", file=file or sys.stderr, flush=True)
        except OSError as e:
            full(e)


class Stopped(Exception):
    """SIGTERM or SIGINT was received."""


def find(*candidates):
    """The first path that exists, as an absolute string; the last candidate, that of an installation, if none does (the
    error then names it)."""
    for path in candidates:
        if path.exists():
            return str(path.resolve())
    return str(candidates[-1])


def parse_arguments():
    parser = Parser(prog="perseus-nccl", description=__doc__, epilog=EXAMPLES,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version="%(prog)s @VERSION@")
    parser.add_argument("--ranks", default="2", metavar="N", help="processes of all hosts, one GPU each (%(default)s)")
    parser.add_argument("--ops", default=",".join(OPS), help="comma list; names of nccl-tests programs (%(default)s)")
    parser.add_argument("--sizes", default="8:64M:x4", metavar="A:B:xF", help="bytes; suffixes K M G (%(default)s)")
    parser.add_argument("--types", default="float", help="comma list; own program only, if several (%(default)s)")
    parser.add_argument("--place", choices=["in", "out", "both"], default="out",
                        help="in place or not, own program only (%(default)s)")
    parser.add_argument("--iters", default="20", metavar="N", help="timed iterations (%(default)s)")
    parser.add_argument("--warmup", default="5", metavar="N", help="iterations before them (%(default)s)")
    parser.add_argument("--rounds", default="1", metavar="N", help="runs of each transport, by turns (%(default)s)")
    parser.add_argument("--transports", default=",".join(TRANSPORTS), help="comma list (%(default)s)")
    parser.add_argument("--plugin", metavar="FILE", help="the Perseus plugin (that of this installation)",
                        default=find(HERE / "../plugin/libnccl-net-perseus.so",
                                     HERE / "@LIBDIR@/libnccl-net-perseus.so"))
    parser.add_argument("--nccl-tests", metavar="DIR",
                        help="folder of all_reduce_perf and so on (default: where PATH has them)")
    parser.add_argument("--own", action="store_true",
                        help="run perseus-nccl-ranks even where nccl-tests are found (one host)")
    parser.add_argument("--launcher", metavar="COMMAND",
                        help='starts a program on all ranks, e.g. "srun -N2 --ntasks-per-node=8"')
    parser.add_argument("--hosts", metavar="A,B,..", help="start the ranks on these hosts, by mpirun")
    parser.add_argument("--nccl", metavar="FILE", help="libnccl.so.2 to use")
    parser.add_argument("--softnic", metavar="OPTIONS",
                        help='carry perseus and ib over the software NIC; its options, e.g. "--nics 1"')
    parser.add_argument("--hostids", action="store_true",
                        help="a NCCL_HOSTID for each rank instead of P2P and SHM off (own program only)")
    parser.add_argument("--host-staged", action="store_true", help="no GPU memory at the NIC (NCCL_NET_GDR_LEVEL=LOC)")
    parser.add_argument("--register", action="store_true", help="register user buffers")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE",
                        help="for every transport; may be given several times")
    parser.add_argument("--timeout", default="300", metavar="SECONDS",
                        help="for one run of one operation (%(default)s)")
    parser.add_argument("--json", action="store_true",
                        help="one object a line instead of the table (perseus-plot draws them)")
    return parser, parser.parse_args()


# ---- before anything runs ----

def check_words(parser, args):
    """Refuse values that cannot be used; turn numbers and lists into such."""
    def refuse(option, want):
        parser.error(f"--{option} '{getattr(args, option.replace('-', '_'))}': want {want}")

    for option, least, most in (("ranks", 1, 4096), ("iters", 1, 1000), ("warmup", 0, 1000), ("rounds", 1, 1000),
                                ("timeout", 1, 86400)):
        text = getattr(args, option)
        if not re.fullmatch(r"\d{1,6}", text) or not least <= int(text) <= most:
            refuse(option, f"a number from {least} to {most}")
        setattr(args, option, int(text))
    for option, known in (("ops", OPS + MORE_OPS), ("transports", TRANSPORTS)):
        words = getattr(args, option).split(",")
        if not set(words) <= set(known) or len(set(words)) != len(words):
            refuse(option, f"a list of {', '.join(known)}")
        setattr(args, option, words)
    args.range = SIZES.fullmatch(args.sizes)
    if not args.range or args.range.group(3) in ("0", "1"):
        refuse("sizes", "bytes A:B:xF, with suffixes K, M and G, such as 8:64M:x4")
    for item in args.env:
        if not re.match(r"[A-Za-z_]\w*=", item):
            parser.error(f"--env '{item}': want NAME=VALUE")
    for option in ("launcher", "softnic"):
        try:
            shlex.split(getattr(args, option) or "")
        except ValueError as error:
            refuse(option, f"words as a shell has them ({error})")
    if args.launcher is not None and not args.launcher.strip():
        refuse("launcher", "a command")
    if args.hosts is not None and not all(args.hosts.split(",")):
        refuse("hosts", "names of hosts: a,b")
    if args.launcher and args.hosts:
        parser.error("--launcher and --hosts: want one of them")
    if args.hosts and args.ranks % len(args.hosts.split(",")):
        refuse("ranks", f"a multiple of the hosts, {len(args.hosts.split(','))}")


def tests_program(args, op):
    """The nccl-tests program of an operation, or None."""
    folders = args.nccl_tests if args.nccl_tests else os.environ.get("PATH", "")
    return shutil.which(op + "_perf", path=folders) or shutil.which(op + "_perf_mpi", path=folders)


def choose_programs(parser, args):
    """Fill args.programs: {op: nccl-tests program}, or None to run our own."""
    several_hosts = args.launcher or args.hosts
    own_only = args.own or args.hostids or args.place != "out" or "," in args.types
    programs = {op: tests_program(args, op) for op in args.ops}
    missing = [op for op, program in programs.items() if not program]
    if args.nccl_tests and missing:
        parser.error(f"--nccl-tests '{args.nccl_tests}': no {missing[0]}_perf there")
    if (args.nccl_tests or several_hosts) and own_only:
        parser.error("--own, --hostids, --place and several --types: not with --nccl-tests, --launcher or --hosts")
    if several_hosts and missing:
        parser.error(f"--launcher and --hosts need nccl-tests built with MPI=1, and PATH has no {missing[0]}_perf: "
                     "give --nccl-tests DIR")
    args.programs = None if own_only or missing else programs
    if not args.programs and args.ranks > OWN_RANKS:
        parser.error(f"--ranks '{args.ranks}': want at most {OWN_RANKS} without nccl-tests")


def check_files(parser, args):
    for option, path in (("nccl", args.nccl), ("plugin", args.plugin if "perseus" in args.transports else None)):
        if path and not os.path.exists(path):
            parser.error(f"--{option} '{path}': No such file")
    command = shlex.split(args.launcher)[0] if args.launcher else "mpirun" if args.hosts else None
    if command and not shutil.which(command):
        parser.error(f"{'--launcher' if args.launcher else '--hosts'}: there is no program {command}")


def check_gpus(args):
    """Why our own program cannot run here, or None. Asked once, not by each run. (cuInit() in a child: this process
    stays without CUDA.)"""
    script = ("import ctypes, sys\n"
              "try:\n cuda = ctypes.CDLL('libcuda.so.1')\n"
              "except OSError: sys.exit('no NVIDIA driver (libcuda.so.1) on this host')\n"
              "n = ctypes.c_int(0)\n"
              "r = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(n))\n"
              "if r: sys.exit(f'CUDA cannot be used: error {r} of cuInit()')\n"
              "if n.value < int(sys.argv[1]): "
              "sys.exit(f'--ranks {sys.argv[1]} need as many GPUs, and this host has {n.value}')\n"
              "try:\n ctypes.CDLL(sys.argv[2])\n"
              "except OSError as error: sys.exit(f'NCCL cannot be opened: {error}: give --nccl FILE')\n")
    done = subprocess.run([sys.executable, "-c", script, str(args.ranks), args.nccl or "libnccl.so.2"],
                          capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["the GPUs cannot be asked"])[-1]


# ---- one run ----

def plugin_name(path):
    """NCCL before 2.21 takes only the NAME of libnccl-net-NAME.so, and looks in LD_LIBRARY_PATH; newer ones take
    both."""
    match = re.fullmatch(r"libnccl-net-(\w+)\.so", os.path.basename(path))
    return match.group(1) if match else os.path.abspath(path)


def environment(args, transport):
    """The variables of a run. Those of the user win over our defaults; --env wins over all."""
    env = dict(os.environ)
    defaults = {} if args.launcher or args.hosts else dict(ONE_HOST)
    if args.hostids:
        del defaults["NCCL_P2P_DISABLE"], defaults["NCCL_SHM_DISABLE"]
    if args.softnic is not None:
        defaults.update(SOFTNIC)
    folders = []
    if transport == "perseus":
        defaults["PERSEUS_REQUIRED"] = "1"
        env.update(NCCL_NET="Perseus", NCCL_NET_PLUGIN=plugin_name(args.plugin))
        folders.append(os.path.dirname(os.path.abspath(args.plugin)))
    else:
        env.update(NCCL_NET={"ib": "IB", "socket": "Socket"}[transport], NCCL_NET_PLUGIN="none")
    if transport == "socket" and not (args.launcher or args.hosts):
        defaults["NCCL_SOCKET_IFNAME"] = "lo"
    if args.host_staged:
        defaults["NCCL_NET_GDR_LEVEL"] = "LOC"
    if args.nccl:
        folders.append(os.path.dirname(os.path.abspath(args.nccl)))
    if folders:
        env["LD_LIBRARY_PATH"] = ":".join([*folders, *filter(None, [env.get("LD_LIBRARY_PATH")])])
    for name, value in defaults.items():
        env.setdefault(name, value)
    env.update(item.split("=", 1) for item in args.env)
    return env


def own_command(args, transport, op):
    ranks = find(HERE / "perseus-nccl-ranks", HERE / "@LIBEXECDIR@/perseus-nccl-ranks")
    command = [ranks, "--label", transport, "--ranks", str(args.ranks), "--ops", op, "--sizes", args.sizes,
               "--types", args.types, "--place", args.place, "--iters", str(args.iters), "--warmup", str(args.warmup),
               "--timeout", str(args.timeout)]
    command += ["--nccl", args.nccl] if args.nccl else []
    command += ["--hosts"] if args.hostids else []
    return command + (["--register"] if args.register else [])


def tests_command(args, op, env):
    program = args.programs[op]
    least, most, factor = args.range.groups()
    options = ["-b", least, "-e", most or least, "-f", factor or "4", "-n", str(args.iters), "-w", str(args.warmup),
               "-c", "1", "-d", args.types]
    options += ["-R", "1"] if args.register else []
    if args.launcher or args.hosts:
        # Not every launcher hands on the environment, so the variables are words of the command.
        own = {item.split("=", 1)[0] for item in args.env}
        words = [f"{name}={value}" for name, value in sorted(env.items()) if name.startswith(FORWARDED) or name in own]
        start = shlex.split(args.launcher or "")
        if args.hosts:
            hosts = args.hosts.split(",")
            places = ",".join(f"{host}:{args.ranks // len(hosts)}" for host in hosts)
            start = ["mpirun", "--bind-to", "none", "--host", places, "-np", str(args.ranks)]
        return [*start, "env", *words, program, *options, "-g", "1"]
    linked = (subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
              if shutil.which("ldd") else "")
    if "libmpi" in linked:
        return ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(args.ranks),
                program, *options, "-g", "1"]
    return [program, *options, "-g", str(args.ranks)]


def parse_tests(text, transport, op, ranks):
    """Rows of an nccl-tests table: size, count, type, redop, root, then time, algbw, busbw, #wrong out of place and in
    place."""
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 13 or not fields[0].isdigit():
            continue
        for place, (usec, algbw, busbw, wrong) in (("out", fields[5:9]), ("in", fields[9:13])):
            try:
                times = {"usec_p50": float(usec), "algbw_GBps": float(algbw), "busbw_GBps": float(busbw)}
            except ValueError:
                continue  # N/A: the operation has no such placement
            yield {"transport": transport, "program": "nccl-tests", "op": op, "type": fields[2], "ranks": ranks,
                   "bytes": int(fields[0]), "in_place": place == "in", **times,
                   "wrong": int(float(wrong)) if re.fullmatch(r"[\d.e+]+", wrong) else 0}


def parse_own(text):
    for line in text.splitlines():
        try:
            row = json.loads(line) if line.startswith("{") else None
        except ValueError:
            row = None  # a line that another message cut in two
        if row:
            yield row


def run_command(command, env, limit_s):
    """Exit status (None: it ran past the limit) and output. Whatever ends this ends all that the command started."""
    with subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, errors="replace", start_new_session=True) as process:
        try:
            out, said = process.communicate(timeout=limit_s)
            return process.returncode, out, said
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, said = process.communicate()
            return None, out, said
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def run_once(args, transport, op):
    """One op over one transport: its rows, or None after printing why it failed."""
    env = environment(args, transport)
    command = tests_command(args, op, env) if args.programs else own_command(args, transport, op)
    if args.softnic is not None and transport != "socket":
        softnic = find(HERE / "softnic/softnic-run", HERE / "softnic-run",
                       pathlib.Path(shutil.which("softnic-run") or "softnic-run"))
        command = [softnic, *shlex.split(args.softnic), "--", *command]
    try:
        status, out, said = run_command(command, env, args.timeout)
    except OSError as error:
        status, out, said = 127, "", f"{command[0]}: {error.strerror}"
    rows = list(parse_tests(out, transport, op, args.ranks) if args.programs else parse_own(out))
    if status != 0 or not rows:
        clear_progress()
        why = f"not done within {args.timeout} s" if status is None else f"exit {status}, {len(rows)} rows"
        tail = "\n".join((out + said).splitlines()[-25:])
        print(f"perseus-nccl: {transport} {op}: {why}: {shlex.join(command)}\n{tail}", file=sys.stderr)
        return None
    return rows


# ---- all runs ----

def clear_progress():
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def show_progress(done, total, what, start):
    if not sys.stderr.isatty():
        return
    left = f", about {(time.monotonic() - start) / done * (total - done) / 60:.1f} min left" if done else ""
    print(f"\r\033[Kperseus-nccl: run {done + 1} of {total}: {what}{left}", end="", file=sys.stderr, flush=True)


def measure(args, samples):
    """Run everything by turns, adding rows to samples: {(key, transport): {round: row}}. Return whether all runs
    succeeded with right data."""
    sound, done, start = True, 0, time.monotonic()
    total = args.rounds * len(args.ops) * len(args.transports)
    for turn in range(args.rounds):
        first = turn % len(args.transports)
        for op in args.ops:
            failures = 0
            for transport in args.transports[first:] + args.transports[:first]:
                show_progress(done, total, f"{op} over {transport}, round {turn + 1}", start)
                rows = run_once(args, transport, op)
                done += 1
                failures += rows is None
                sound = sound and rows is not None and all(row.get("wrong", 0) == 0 for row in rows)
                for row in rows or []:
                    samples[(row["op"], row["type"], row["in_place"], row["bytes"]), transport][turn] = row
            if done == failures == len(args.transports):
                print("perseus-nccl: nothing runs here: the other operations are left out", file=sys.stderr)
                return False
    return sound


def stop(_signal, _frame):
    raise Stopped


def collect(args, samples):
    """Fill samples. Return whether every run succeeded with right data. After SIGTERM (timeout(1)) or SIGINT they are
    of the runs that were done."""
    sound = False
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        sound = measure(args, samples)
        clear_progress()
    except Stopped:
        clear_progress()
        print("perseus-nccl: stopped: the table is of what was done until then", file=sys.stderr)
    return sound


def medians(samples):
    """{(op, type, in_place, bytes): {transport: row}}"""
    table = collections.defaultdict(dict)
    for (key, transport), rows in samples.items():
        rows = list(rows.values())
        row = dict(rows[0], rounds=len(rows), wrong=sum(row.get("wrong", 0) for row in rows))
        for name in ("usec_p50", "algbw_GBps", "busbw_GBps"):
            row[name] = round(statistics.median(row[name] for row in rows), 4)
        table[key][transport] = row
    return table


def ratios(samples, op, other):
    """For each round: the geometric mean over sizes of the other's time by that of Perseus, and how many sizes there
    are."""
    logs = collections.defaultdict(list)
    for (key, transport), rows in samples.items():
        if key[0] != op or transport != other:
            continue
        for turn, row in rows.items():
            mine = samples.get((key, "perseus"), {}).get(turn)
            if mine and mine["usec_p50"] > 0 and row["usec_p50"] > 0:
                logs[turn].append(math.log(row["usec_p50"] / mine["usec_p50"]))
    return ([math.exp(statistics.fmean(values)) for values in logs.values()],
            max((len(values) for values in logs.values()), default=0))


def verdicts(args, samples):
    """One line an operation and other transport."""
    for op in args.ops:
        for other in args.transports:
            values, sizes = ratios(samples, op, other)
            if other == "perseus" or not values:
                continue
            middle = statistics.median(values)
            spread = (f"spread {100 * (max(values) - min(values)) / middle:.1f} %" if len(values) > 1
                      else "spread unknown: give --rounds 5")
            yield (f"{op}: Perseus is {middle:.2f}x as fast as {NAMES[other]} (geometric mean of {sizes} sizes, median "
                   f"of {len(values)} rounds, {spread})")


def print_table(table, transports):
    columns = "".join(f"{t + ' us':>14}{'GB/s':>8}{'wrong':>6}" for t in transports)
    others = [t for t in transports if t != "perseus"] if "perseus" in transports else []
    print(f"{'op':<15}{'type':<9}{'place':<6}{'bytes':>12}{columns}" + "".join(f"{'x ' + t:>10}" for t in others))
    for (op, kind, in_place, size), row in sorted(table.items()):
        line = f"{op:<15}{kind:<9}{'in' if in_place else 'out':<6}{size:>12}"
        for t in transports:
            line += (f"{row[t]['usec_p50']:>14.1f}{row[t]['busbw_GBps']:>8.2f}{row[t]['wrong']:>6}" if t in row
                     else f"{'failed':>14}{'':>14}")
        for t in others:
            both = t in row and "perseus" in row and row["perseus"]["usec_p50"] > 0
            line += f"{row[t]['usec_p50'] / row['perseus']['usec_p50']:>10.2f}" if both else f"{'':>10}"
        print(line)


def print_all(args, samples, table):
    if args.json:
        for _, per in sorted(table.items()):
            for row in per.values():
                print(json.dumps(row))
    elif table:
        print_table(table, args.transports)
    for line in verdicts(args, samples):
        print(line, file=sys.stderr if args.json else sys.stdout)


def main():
    parser, args = parse_arguments()
    check_words(parser, args)
    check_files(parser, args)
    choose_programs(parser, args)
    why = None if args.programs else check_gpus(args)
    if why:
        sys.exit(f"perseus-nccl: {why}")
    replaced = [name for name in COMPARED if os.environ.get(name)]
    if replaced:
        print(f"perseus-nccl: {' and '.join(replaced)} of the environment not used: they are what is compared",
              file=sys.stderr)
    samples = collections.defaultdict(dict)
    sound = collect(args, samples)
    table = medians(samples)
    try:
        print_all(args, samples, table)
        sys.stdout.flush()
    except OSError as e:
        full(e)
    return 0 if sound and table else 1


if __name__ == "__main__":
    sys.exit(main())
