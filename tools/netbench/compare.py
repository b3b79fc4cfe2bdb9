#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare two NCCL net plugins on the software NIC: time, requests to the NIC, and instructions.

usage: perseus-compare --peer FILE [--plugin FILE] [--api v8] [--rounds 7] [--json]

Runs alternate (plugin, peer, plugin, peer ...), so that slow changes of the machine affect both alike, and medians over rounds are
compared. The NIC's own counters (work requests, doorbells, completions) are read after many 8-byte messages with 8 outstanding, for two
numbers of messages: their difference leaves out connecting and closing. Instructions (--callgrind) are those of the plugin's own file, by
Valgrind's callgrind.
"""
import argparse
import collections
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

TOOLS = pathlib.Path(__file__).resolve().parent
MESSAGE = 8  # bytes of a message where messages are counted
RUNS = 2     # netbench runs one iteration before the timed ones, so with one timed iteration everything is sent twice
COUNTERS = ["send_wrs", "recv_wrs", "doorbells", "cqes_send", "cqes_recv"]


def netbench(plugin, args, *options, prefix=()):
    """Rows of one run in a world of its own, and the NIC's counters at its end."""
    run = [str(TOOLS / "softnic/softnic-run"), "--quiet", "--nics", "1", "--"]
    command = [*prefix, str(TOOLS / "perseus-netbench"), "--plugin", plugin, "--api", args.api, "--op", "sendrecv", "--ranks", "2",
               "--check", "--json", "--yield", str(args.idle_passes), *options]
    script = '"$@" && exec "$0" counters --json'
    done = subprocess.run([*run, "sh", "-c", script, str(TOOLS / "softnic/softnicctl"), *command], capture_output=True, text=True,
                          timeout=args.timeout, env=dict(os.environ, NCCL_IB_GID_INDEX="1"), check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    rows = [line for line in lines if "usec_p50" in line]
    if done.returncode != 0 or not rows or any(row["errors"] for row in rows):
        sys.exit(f"perseus-compare: {plugin}: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return rows, [line for line in lines if "usec_p50" not in line]


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
    for group in args.sizes or ["8:8K:x4@20000", "64K:16M:x4@100"]:
        sizes, _, iterations = group.partition("@")
        yield sizes, iterations or "200"


def times(args, plugins):
    samples = collections.defaultdict(list)
    for _ in range(args.rounds):
        for name, plugin in plugins.items():
            for sizes, iterations in sizes_and_iterations(args):
                # A quarter of untimed iterations first: after them, rings of a thousand entries are in the caches for both.
                for row in netbench(plugin, args, "--sizes", sizes, "--iters", iterations, "--warmup", str(int(iterations) // 4))[0]:
                    samples[row["bytes"], name].append(row)
    for size in sorted({size for size, _ in samples}):
        row = {"measure": "time", "bytes": size, "rounds": args.rounds, "yield": args.idle_passes,
               "iterations": samples[size, "plugin"][0]["iterations"]}
        for name in plugins:
            row[name + "_usec_p50"] = round(statistics.median(s["usec_p50"] for s in samples[size, name]), 2)
            row[name + "_GBps"] = round(statistics.median(s["algbw_GBps"] for s in samples[size, name]), 4)
        row["time_ratio"] = round(row["plugin_usec_p50"] / row["peer_usec_p50"], 3)
        row["bandwidth_ratio"] = round(row["plugin_GBps"] / max(row["peer_GBps"], 1e-9), 3)
        yield row


def burst(messages):
    """Options for one iteration in which each of two ranks sends this many messages to the other."""
    return ["--sizes", str(messages * MESSAGE), "--chunk", str(MESSAGE), "--iters", "1", "--warmup", "0", "--outstanding", "8"]


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
                valgrind = ["valgrind", "-q", "--tool=callgrind", "--trace-children=yes", f"--callgrind-out-file={folder}/out.%p"]
                netbench(plugin, args, *burst(messages), "--timeout", "600", prefix=valgrind)
                cost.append(sum(own_instructions(p, plugin) for p in pathlib.Path(folder).iterdir()))
        counted = 2 * RUNS * (args.messages - args.messages // 10)
        yield {"measure": "instructions", "who": name, "messages": counted, "per_message": round((cost[1] - cost[0]) / counted, 1)}


def main():
    parser = argparse.ArgumentParser(prog="perseus-compare", description=__doc__.split("\n")[0])
    parser.add_argument("--plugin", default=str(TOOLS / "../plugin/libnccl-net-perseus.so"))
    parser.add_argument("--peer", required=True, help="the other plugin's shared library")
    parser.add_argument("--api", default="v8", help="table both have (%(default)s)")
    parser.add_argument("--sizes", action="append", metavar="A:B:xF[@ITERATIONS]",
                        help="may be given several times (8:8K:x4@20000 and 64K:16M:x4@100)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--yield", dest="idle_passes", type=int, default=1, metavar="N",
                        help="idle passes of a progress thread between two yields; NCCL yields after each (%(default)s)")
    parser.add_argument("--messages", type=int, default=50000, help="of each rank, where messages are counted (%(default)s)")
    parser.add_argument("--callgrind", action="store_true", help="count instructions as well (minutes; needs valgrind)")
    parser.add_argument("--timeout", type=int, default=600)
    parser.add_argument("--json", action="store_true", help="one object a line")
    args = parser.parse_args()
    plugins = {"plugin": str(pathlib.Path(args.plugin).resolve()), "peer": str(pathlib.Path(args.peer).resolve())}
    measures = [times, requests] + ([instructions] if args.callgrind else [])
    for measure in measures:
        for row in measure(args, plugins):
            print(json.dumps(row) if args.json else "  ".join(f"{k} {v}" for k, v in row.items() if k != "measure"), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
