#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""perseus-plot draws results files and JSON lines as well-formed SVG, a line for each series.
usage: plot.py SOURCE_ROOT"""
import json
import pathlib
import subprocess
import sys
import xml.dom.minidom

ROOT = pathlib.Path(sys.argv[1])


def lines_drawn(arguments, text=""):
    done = subprocess.run([sys.executable, ROOT / "tools/plot.py", *arguments], input=text, capture_output=True,
                          text=True, timeout=280)
    if done.returncode != 0:
        raise SystemExit(f"{arguments}: status {done.returncode}: {done.stderr}")
    return len(xml.dom.minidom.parseString(done.stdout).getElementsByTagName("polyline"))


def main():
    results = ROOT / "doc/results"
    assert lines_drawn([results / "putsignal-softnic.json"]) == 8, "four policies, two groups"
    assert lines_drawn([results / "nccl-2gpu-gpu-memory.json"]) == 10, "five operations, two transports"
    rows = [{"op": "allreduce", "name": "<&>", "bytes": size, "busbw_GBps": size / 1e3} for size in (8, 1024)]
    assert lines_drawn([], "\n".join(map(json.dumps, rows))) == 1
    model = {"model": True, "cluster": "cx7", "band": "middle"}
    causes = {f"{cause}_us": 1.0 for cause in ("compute", "fence", "proxy", "incast", "link", "latency")}
    rows = [{**model, **causes, "op": "moe", "policy": policy, "nodes": nodes, "us": 6.0 * nodes}
            for policy in ("drain", "counted") for nodes in (2, 4)]
    assert lines_drawn([], "\n".join(map(json.dumps, rows))) == 2
    rows = [{**model, "op": "putsignal", "policy": policy, "group": "peer", "bytes": size, "concurrency": count,
             "put_signal_us": 1.0}
            for policy in ("drain", "counted") for size in (256, 4096) for count in (8, 32)]
    assert lines_drawn([], "\n".join(map(json.dumps, rows))) == 0, "a map has cells, no lines"
    assert subprocess.run([sys.executable, ROOT / "tools/plot.py"], input="{}", capture_output=True,
                          text=True).returncode != 0, "nothing to draw"


if __name__ == "__main__":
    main()
