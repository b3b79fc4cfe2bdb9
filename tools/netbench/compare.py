#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare two NCCL net plugins on the software NIC: time, requests to the NIC, and instructions.

Times are of one run of perseus-netbench, in which both plugins have turns of some 10 ms: the ratio is the median over
pairs of turns that followed each other, so a machine that changes its speed changes both. The NIC's own counters (work
requests, doorbells, completions) are read after many 8-byte messages with 8 outstanding, for two numbers of messages:
their difference leaves out connecting and closing. Instructions (--callgrind) are those of the plugin's own file, by
Valgrind's callgrind.
"""
import argparse
import collections
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
EXAMPLES = """example:
  perseus-compare --peer /opt/hpcx/nccl_rdma_sharp_plugin/lib/libnccl-net.so --sizes 8:8K:x4@40000
"""
MESSAGE = 8  # bytes of a message where messages are counted
RUNS = 2  # netbench runs one iteration before the timed ones, so with one timed iteration everything is sent twice
COUNTERS = ["send_wrs", "recv_wrs", "doorbells", "cqes_send", "cqes_recv"]


def full(error):
    """Ends: what was to be printed is not all there."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that Python does not try again at exit
    sys.exit(f"perseus-compare: cannot write all of the output: {error.strerror}")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help lists the options)\n")

    def _print_message(self, message, file=None):  # argparse's own says nothing of a full disk
        try:
            print(message, end="", file=file or sys.stderr, flush=True)
        except OSError as e:
            full(e)


def tool(name):
    """A program of the build or of the installation."""
    for path in (HERE / name, HERE / "softnic" / name):
        if path.exists():
            return str(path)
    found = shutil.which(name)
    return found if found else sys.exit(f"perseus-compare: no program {name} beside this one or in PATH")


def netbench(plugin, args, *options, prefix=()):
    """Rows of one run in a world of its own, and the NIC's counters at its end."""
    run = [tool("softnic-run"), "--quiet", "--nics", "1", "--"]
    command = [*prefix, tool("perseus-netbench"), "--plugin", plugin, "--api", args.api, "--op", "sendrecv",
               "--ranks", "2", "--check", "--json", "--yield", str(args.idle_passes), *options]
    script = '"$@" && exec "$0" counters --json'
    try:
        done = subprocess.run([*run, "sh", "-c", script, tool("softnicctl"), *command], capture_output=True, text=True,
                              timeout=args.timeout, env=dict(os.environ, NCCL_IB_GID_INDEX="1"), check=False)
    except subprocess.TimeoutExpired:
        sys.exit(f"perseus-compare: {plugin}: not done within {args.timeout} s (--timeout)")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    rows = [line for line in lines if "bytes" in line]
    if done.returncode != 0 or not rows or any(row.get("errors") for row in rows):
        sys.exit(f"perseus-compare: perseus-netbench ended with status {done.returncode}:\n"
                 + (done.stdout[-2000:] + done.stderr[-2000:]).rstrip())
    return rows, [line for line in lines if "bytes" not in line]


def device_counters(objects):
    """The sum over devices of each counter, wherever it is in softnicctl's objects."""
    total = collections.Counter()

    def visit(node):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
            if key in COUNTERS and isinstance(value, int):
                total[key] += value
            else:
                visit(value)

    visit(objects)
    return total


def sizes_and_iterations(args):
    for group in args.sizes or ["8:8K:x4@40000", "64K:16M:x4@400"]:
        sizes, _, iterations = group.partition("@")
        yield sizes, iterations or "200"


def times(args, plugins):
    for sizes, iterations in sizes_and_iterations(args):
        # A quarter of untimed iterations first: after them, rings of a thousand entries are in the caches for both.
        rows = netbench(plugins["plugin"], args, "--peer", plugins["peer"], "--sizes", sizes, "--iters",
                        iterations, "--warmup", str(int(iterations) // 4))[0]
        for size in dict.fromkeys(row["bytes"] for row in rows):
            of = {row["plugin"]: row for row in rows if row["bytes"] == size and "plugin" in row}
            ratio = next((row for row in rows if row["bytes"] == size and "time_ratio" in row), {})
            row = {"measure": "time", "bytes": size, "slices": ratio.get("slices", 0), "yield": args.idle_passes,
                   "iterations": int(iterations)}
            for name, plugin in plugins.items():
                row[name + "_usec_p50"], row[name + "_GBps"] = of[plugin]["usec_p50"], of[plugin]["algbw_GBps"]
            yield row | {key: ratio.get(key) for key in ("time_ratio", "time_ratio_p25", "time_ratio_p75")}


def burst(messages):
    """Options for one iteration in which each of two ranks sends this many messages to the other."""
    return ["--sizes", str(messages * MESSAGE), "--chunk", str(MESSAGE), "--iters", "1", "--warmup", "0",
            "--outstanding", "8"]


def requests(args, plugins):
    """Per message, sender and receiver together."""
    short, long = 1000, args.messages
    for name, plugin in plugins.items():
        spent = [device_counters(netbench(plugin, args, *burst(n))[1]) for n in (short, long)]
        row = {"measure": "requests", "who": name, "messages": 2 * RUNS * (long - short)}
        for counter in COUNTERS:
            row[counter] = round((spent[1][counter] - spent[0][counter]) / row["messages"], 3)
        row["sum"] = round(sum(row[counter] for counter in COUNTERS), 3)
        yield row


def own_instructions(path, library):
    """Instructions executed in the library itself: callgrind's self costs of functions whose object it is."""
    names, total, counted, inside = {}, 0, False, False
    for line in open(path, encoding="utf-8", errors="replace"):
        match = re.match(r"ob=\((\d+)\)(?: (.*))?", line)
        if match:
            if match.group(2):
                names[match.group(1)] = match.group(2).strip()
            inside = os.path.realpath(names[match.group(1)]) == os.path.realpath(library)
        elif line.startswith("cob="):
            match = re.match(r"cob=\((\d+)\)(?: (.*))?", line)
            if match.group(2):
                names[match.group(1)] = match.group(2).strip()
        elif line.startswith("calls="):
            counted = True  # the next line is the cost inside the called function
        elif line[:1].isdigit() or line[:1] in "+-*":
            if inside and not counted:
                total += int(line.split()[1])
            counted = False
    return total


def instructions(args, plugins):
    for name, plugin in plugins.items():
        cost = []
        for messages in (args.messages // 10, args.messages):
            with tempfile.TemporaryDirectory() as folder:
                valgrind = ["valgrind", "-q", "--tool=callgrind", "--trace-children=yes",
                            f"--callgrind-out-file={folder}/out.%p"]
                netbench(plugin, args, *burst(messages), "--timeout", "600", prefix=valgrind)
                cost.append(sum(own_instructions(p, plugin) for p in pathlib.Path(folder).iterdir()))
        counted = 2 * RUNS * (args.messages - args.messages // 10)
        yield {"measure": "instructions", "who": name, "messages": counted,
               "per_message": round((cost[1] - cost[0]) / counted, 1)}


def parse_arguments():
    parser = Parser(prog="perseus-compare", description=__doc__, epilog=EXAMPLES,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version="%(prog)s @VERSION@")
    parser.add_argument("--plugin", metavar="FILE", help="the Perseus plugin (that of this installation)", default=next(
        (str(path) for path in [HERE / "../plugin/libnccl-net-perseus.so"] if path.exists()),
        str(HERE / "@LIBDIR@/libnccl-net-perseus.so")))
    parser.add_argument("--peer", metavar="FILE", help="the other plugin's shared library (must be given)")
    parser.add_argument("--api", default="v8", help="table both have (%(default)s)")
    parser.add_argument("--sizes", action="append", metavar="A:B:xF[@ITERATIONS]",
                        help="may be given several times (8:8K:x4@40000 and 64K:16M:x4@400)")
    parser.add_argument("--yield", dest="idle_passes", type=int, default=1, metavar="N",
                        help="idle passes of a progress thread between two yields; NCCL yields after each "
                             "(%(default)s)")
    parser.add_argument("--messages", type=int, default=50000, metavar="N",
                        help="of each rank, where messages are counted (%(default)s)")
    parser.add_argument("--callgrind", action="store_true", help="count instructions as well (minutes; needs valgrind)")
    parser.add_argument("--timeout", type=int, default=600, metavar="SECONDS", help="for one run (%(default)s)")
    parser.add_argument("--json", action="store_true", help="one object a line")
    args = parser.parse_args()
    if not args.peer:
        parser.error("--peer FILE is missing")
    for option, path in (("plugin", args.plugin), ("peer", args.peer)):
        if not os.path.exists(path):
            parser.error(f"--{option} '{path}': No such file")
    if os.path.samefile(args.plugin, args.peer):
        parser.error(f"--peer '{args.peer}': is the plugin itself: copy it to compare it with itself")
    for group in args.sizes or []:
        if not re.fullmatch(r"[0-9KMG:x+]+(@[1-9]\d{0,6})?", group):
            parser.error(f"--sizes '{group}': want A:B:xF@ITERATIONS, such as 8:8K:x4@40000")
    if args.messages < 2000 or args.timeout < 1 or args.idle_passes < 1:
        parser.error("want --messages of at least 2000, and --timeout and --yield of at least 1")
    if args.callgrind and not shutil.which("valgrind"):
        parser.error("--callgrind: there is no program valgrind")
    return args


def main():
    args = parse_arguments()
    plugins = {"plugin": str(pathlib.Path(args.plugin).resolve()), "peer": str(pathlib.Path(args.peer).resolve())}
    measures = [times, requests] + ([instructions] if args.callgrind else [])
    for measure in measures:
        if sys.stderr.isatty():
            print(f"perseus-compare: {measure.__name__} ...", file=sys.stderr)
        for row in measure(args, plugins):
            text = json.dumps(row) if args.json else "  ".join(f"{k} {v}" for k, v in row.items() if k != "measure")
            try:
                print(text, flush=True)
            except OSError as e:
                full(e)
    return 0


if __name__ == "__main__":
    sys.exit(main())
