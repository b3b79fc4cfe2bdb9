#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The counters that the plugin writes to PERSEUS_METRICS, and perseus-info --job, while netbench's ranks run.

  test_metrics.py SOFTNIC-RUN NETBENCH PLUGIN PERSEUS-INFO
"""
import collections
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

SOFTNIC, NETBENCH, PLUGIN, INFO = sys.argv[1:]
COMMAND = [SOFTNIC, "--quiet", "--nics", "1", "--", NETBENCH, "--plugin", PLUGIN]


def last_texts(bench, folder):
    """{file: its last text while the ranks ran}; a file is gone when its rank has ended."""
    texts = {}
    while bench.poll() is None:
        for path in folder.glob("*.prom"):
            try:
                texts[path] = path.read_text()
            except FileNotFoundError:
                pass
        time.sleep(0.01)
    return texts


def read(text):
    """{metric: sum over its rows}; the format is checked."""
    sums, typed = collections.Counter(), set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            typed.add(line.split()[2])
        if line.startswith("#"):
            continue
        name, _, value = re.fullmatch(r'(perseus_\w+)\{(\w+="[^"]*",?)+\} (\d+)', line).groups()
        assert name in typed, line
        sums[name] += int(value)
    return sums


def standby_rail_is_counted():
    """A connection has one rail; its port fails, and the bytes go on over the rail that stands by."""
    world = f"metrics{os.getpid()}"
    command = [SOFTNIC, "--quiet", "--nodes", "2", "--nics", "2", "--retry-cap", "400ms", "--name", world, "--",
               NETBENCH, "--plugin", PLUGIN, "--nodes", "2", *OPTIONS]
    with tempfile.TemporaryDirectory() as name:
        env = {**os.environ, "PERSEUS_METRICS": name, "PERSEUS_STANDBY_RAIL": "1",
               "NCCL_IB_TIMEOUT": "10"}
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as bench:
            first = None
            while bench.poll() is None and not first:
                time.sleep(0.02)
                first = re.search(r'rails="(\w+):1\+',
                                  "".join(path.read_text() for path in pathlib.Path(name).glob("*.prom")))
            assert first, bench.communicate(timeout=200)[0]
            subprocess.run([pathlib.Path(SOFTNIC).with_name("softnicctl"), "--world", world, "link", first[1], "down"],
                           timeout=60, check=True)
            text = "".join(last_texts(bench, pathlib.Path(name)).values())
            output = bench.communicate(timeout=200)[0]
        assert bench.returncode == 0 and " is lost: " in output, output
    carried = collections.Counter()
    for rail, bytes_ in re.findall(r'perseus_bytes_total\{table="net",rail="(\w+):1"\} (\d+)', text):
        carried[rail] += int(bytes_)
    print(dict(carried))
    pairs = set(re.findall(r'perseus_puts_total\{table="net",rails="(\w+):1\+(\w+):1"\}', text))
    assert len(pairs) == 2 and all(carried[standby] for _, standby in pairs), text


def job(pid, **env):
    done = subprocess.run([INFO, "--job", str(pid)], capture_output=True, text=True, timeout=60,
                          env={**os.environ, **env}, check=False)
    return done.returncode, done.stdout, done.stderr


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        env = {**os.environ, "PERSEUS_METRICS": name}
        with subprocess.Popen([*COMMAND, *OPTIONS], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True) as bench:
            shown = []
            while bench.poll() is None and not shown:
                for path in folder.glob("perseus-*.prom"):
                    pid = re.fullmatch(r"perseus-(\d+)\.prom", path.name)[1]
                    status, text, _ = job(pid)
                    shown = [text] if status == 0 and "perseus_doorbells_total" in text else shown
                time.sleep(0.05)
            texts = last_texts(bench, folder)
            output = bench.communicate(timeout=200)[0]
        assert bench.returncode == 0, output
        assert shown, "perseus-info --job showed nothing while the ranks ran"
        assert len(texts) == 2 and not list(folder.iterdir()), (list(texts), list(folder.iterdir()))
        sums = sum((read(text) for text in texts.values()), collections.Counter())
        print(dict(sums))
        assert sums["perseus_puts_total"] > 0 and sums["perseus_bytes_total"] >= 1 << 20, sums
        assert 0 < sums["perseus_doorbells_total"] <= sums["perseus_work_requests_total"], sums
        assert sums["perseus_completions_total"] > 0 and sums["perseus_notifications_total"] > 0, sums
    status, _, said = job(os.getpid())
    assert status == 1 and "without PERSEUS_METRICS" in said, said
    status, _, said = job("me")
    assert status == 2 and "not the id of a process" in said, said
    missing = subprocess.run([*COMMAND, "--sizes", "1K:1K"], env={**os.environ, "PERSEUS_METRICS": "/nowhere"},
                             capture_output=True, text=True, timeout=200, check=False)
    assert (missing.returncode == 0
            and "PERSEUS_METRICS=/nowhere: cannot write" in missing.stdout + missing.stderr), missing.stderr


OPTIONS = ["--op", "sendrecv", "--sizes", "256K:256K", "--iters", "3000", "--check"]
main()
standby_rail_is_counted()
