#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""test_perseus_nccl.py PERSEUS-NCCL CLAIM: perseus-nccl runs nccl-tests programs. Here scripts replace them, so no GPU is needed."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

LIMIT_S = 100
ROW = "{bytes} {count} float sum -1 {usec} 1.5 2.5 {wrong} 7.0 1.0 2.0 0"


def program(folder, op, script):
    path = pathlib.Path(folder) / f"{op}_perf"
    path.write_text("#!/bin/sh\n" + script + "\n")
    path.chmod(0o755)


def table(*rows):
    """A script that prints rows (bytes, usec, wrong) as nccl-tests do, among its other lines."""
    lines = ["# nThread 1", *(ROW.format(bytes=b, count=b // 4, usec=u, wrong=w) for b, u, w in rows), "# Out of bounds values : 0 OK"]
    return "cat <<END\n" + "\n".join(lines) + "\nEND"


def command(folder, ops):
    return [sys.executable, sys.argv[1], "--nccl-tests", folder, "--transports", "socket", "--ops", ops, "--sizes", "8:1K:x4", "--json"]


def rows_of(text):
    return [json.loads(line) for line in text.splitlines()]


def tables_are_read(folder):
    program(folder, "all_reduce", table((8, 12.5, 0), (1024, 14.0, 0)))
    done = subprocess.run(command(folder, "all_reduce"), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    rows = {(row["bytes"], row["in_place"]): row for row in rows_of(done.stdout)}
    assert done.returncode == 0 and len(rows) == 4, done
    assert rows[8, False]["usec_p50"] == 12.5 and rows[1024, False]["usec_p50"] == 14.0 and rows[8, True]["usec_p50"] == 7.0, rows
    assert rows[8, False]["busbw_GBps"] == 2.5 and rows[8, True]["busbw_GBps"] == 2.0, rows


def rounds_become_medians(folder):
    program(folder, "all_reduce", 'n=$(cat "$0.n" 2>/dev/null || echo 0); echo $((n + 1)) > "$0.n"\n' +
            f'case $n in 0) u=90.0 ;; 1) u=10.0 ;; *) u=20.0 ;; esac\necho "{ROW.format(bytes=8, count=2, usec="$u", wrong=0)}"')
    done = subprocess.run([*command(folder, "all_reduce"), "--rounds", "3"], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    row = next(row for row in rows_of(done.stdout) if not row["in_place"])
    assert row["usec_p50"] == 20.0 and row["rounds"] == 3, row


def wrong_data_is_a_failure(folder):
    program(folder, "all_reduce", table((8, 12.5, 3)))
    done = subprocess.run(command(folder, "all_reduce"), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 1 and max(row["wrong"] for row in rows_of(done.stdout)) == 3, done


def finished_rows_are_printed_when_it_is_stopped(folder):
    program(folder, "all_reduce", table((8, 12.5, 0)))
    started = pathlib.Path(folder) / "started"
    program(folder, "all_gather", f'echo > "{started}.fifo"; exec sleep {LIMIT_S}')
    os.mkfifo(f"{started}.fifo")
    with subprocess.Popen(command(folder, "all_reduce,all_gather"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        pathlib.Path(f"{started}.fifo").read_text()  # until the second op runs
        process.send_signal(signal.SIGTERM)
        text, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1 and "stopped" in said, (process.returncode, said)
    assert [row["op"] for row in rows_of(text)] == ["all_reduce"] * 2, text


with tempfile.TemporaryDirectory() as temporary:
    globals()[sys.argv[2]](temporary)
