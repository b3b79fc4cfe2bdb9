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


def last_texts(bench, folder, end, are_enough):
    """{file: its last text while the ranks ran}, which end once the texts are enough; a file is gone when its rank has
    ended."""
    texts = {}
    while bench.poll() is None:
        if are_enough(texts):
            end.touch()
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


def carried_by_rail(text):
    carried = collections.Counter()
    for rail, bytes_ in re.findall(r'perseus_bytes_total\{table="net",rail="(\w+):1"\} (\d+)', text):
        carried[rail] += int(bytes_)
    return carried


def standby_has_carried(text):
    """On both sides."""
    pairs = set(re.findall(r'perseus_puts_total\{table="net",rails="(\w+):1\+(\w+):1"\}', text))
    return len(pairs) == 2 and all(carried_by_rail(text)[standby] for _, standby in pairs)


def standby_rail_is_counted():
    """A connection has one rail; its port fails, and the bytes go on over the rail that stands by."""
    world = f"metrics{os.getpid()}"
    command = [SOFTNIC, "--quiet", "--nodes", "2", "--nics", "2", "--retry-cap", "400ms", "--name", world, "--",
               NETBENCH, "--plugin", PLUGIN, "--nodes", "2", *OPTIONS]
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as elsewhere:
        end = pathlib.Path(elsewhere, "end")
        command += ["--until", end]
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
            text = "".join(last_texts(bench, pathlib.Path(name), end,
                                      lambda texts: standby_has_carried("".join(texts.values()))).values())
            output = bench.communicate(timeout=200)[0]
        assert bench.returncode == 0 and " is lost: " in output, output
    print(dict(carried_by_rail(text)))
    assert standby_has_carried(text), text


def job(pid, **env):
    done = subprocess.run([INFO, "--job", str(pid)], capture_output=True, text=True, timeout=60,
                          env={**os.environ, **env}, check=False)
    return done.returncode, done.stdout, done.stderr


def total(texts):
    return sum((read(text) for text in texts.values()), collections.Counter())


def are_busy(texts):
    sums = total(texts)
    return (len(texts) == 2 and sums["perseus_puts_total"] > 0 and sums["perseus_bytes_total"] >= 1 << 20
            and sums["perseus_completions_total"] > 0 and sums["perseus_notifications_total"] > 0)


def main():
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as elsewhere:
        folder, end = pathlib.Path(name), pathlib.Path(elsewhere, "end")
        env = {**os.environ, "PERSEUS_METRICS": name}
        with subprocess.Popen([*COMMAND, *OPTIONS, "--until", end], env=env, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True) as bench:
            shown = []
            while bench.poll() is None and not shown:
                for path in folder.glob("perseus-*.prom"):
                    pid = re.fullmatch(r"perseus-(\d+)\.prom", path.name)[1]
                    status, text, _ = job(pid)
                    shown = [text] if status == 0 and "perseus_doorbells_total" in text else shown
                time.sleep(0.05)
            texts = last_texts(bench, folder, end, are_busy)
            output = bench.communicate(timeout=200)[0]
        assert bench.returncode == 0, output
        assert shown, "perseus-info --job showed nothing while the ranks ran"
        assert len(texts) == 2 and not list(folder.iterdir()), (list(texts), list(folder.iterdir()))
        sums = total(texts)
        print(dict(sums))
        assert are_busy(texts), sums
        assert 0 < sums["perseus_doorbells_total"] <= sums["perseus_work_requests_total"], sums
    status, _, said = job(os.getpid())
    assert status == 1 and "without PERSEUS_METRICS" in said, said
    status, _, said = job("me")
    assert status == 2 and "not the id of a process" in said, said
    missing = subprocess.run([*COMMAND, "--sizes", "1K:1K"], env={**os.environ, "PERSEUS_METRICS": "/nowhere"},
                             capture_output=True, text=True, timeout=200, check=False)
    assert (missing.returncode == 0
            and "PERSEUS_METRICS=/nowhere: cannot write" in missing.stdout + missing.stderr), missing.stderr


OPTIONS = ["--op", "sendrecv", "--sizes", "256K:256K", "--iters", "30000", "--check"]  # ended earlier
main()
standby_rail_is_counted()
