#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A pulled cable, as a running job meets it: what comes back in time is survived, what does not is an error that names the rail.

usage: link.py SOFTNIC_RUN SOFTNICCTL NETBENCH PLUGIN CLAIM
"""
import json
import os
import subprocess
import sys
import time

LIMIT_S = 60
# 2^13 * 4.096 us = 33.6 ms a try: eight tries last 268 ms, thirty 2^17 ones 4.3 s.
SHORT, LONG = {"NCCL_IB_TIMEOUT": "13"}, {"NCCL_IB_TIMEOUT": "17"}


def control(world, *words):
    return subprocess.run([softnicctl, "--world", world, "--json", *words], capture_output=True, text=True, timeout=LIMIT_S,
                          check=True).stdout


def wait_for_traffic(world, bench):
    """More has been sent than setting up takes."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        assert time.monotonic() < deadline, "no traffic"
        assert bench.poll() is None, "the transfer ended before it could be broken: " + bench.communicate()[1][-2000:]
        done = subprocess.run([softnicctl, "--world", world, "--json", "counters"], capture_output=True, text=True, check=False)
        if done.returncode == 0 and json.loads(done.stdout)["devices"][0]["bytes_tx"] > 1 << 20:
            return
        time.sleep(0.02)


def broken_run(name, env, pulls, iterations):
    """Status and stderr of a run during which node 0's link goes away: pulls are (seconds down, seconds up)."""
    world = f"link-{name}-{os.getpid()}"
    bench = subprocess.Popen(
        [softnic_run, "--quiet", "--no-sysfs", "--name", world, "--nodes", "2", "--rate", "400M", "--", netbench, "--plugin", plugin,
         "--op", "sendrecv", "--ranks", "2", "--nodes", "2", "--sizes", "1M", "--warmup", "0", "--iters", str(iterations), "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "NCCL_DEBUG": "INFO", **env})
    try:
        wait_for_traffic(world, bench)
        began = time.monotonic()
        for down, up in pulls:
            control(world, "link", "softnic0", "down")
            time.sleep(down)
            if up is not None:
                control(world, "link", "softnic0", "up")
                time.sleep(up)
        out, err = bench.communicate(timeout=LIMIT_S)
        return bench.returncode, [json.loads(line) for line in out.splitlines() if line.startswith("{")], err, time.monotonic() - began
    finally:
        bench.kill()
        bench.wait()


def a_link_that_comes_back_in_time_loses_nothing():
    status, rows, err, _ = broken_run("flap", LONG, [(0.3, 0.1), (0.2, 0.1)], 100)
    assert status == 0 and rows and rows[0]["errors"] == 0, err[-3000:]
    assert "softnic0 port 1" in err and "retries go on" in err, "nobody was told of the link: " + err[-3000:]


def a_link_that_stays_down_is_an_error_that_names_it():
    status, _, err, took = broken_run("down", SHORT, [(0, None)], 1000)
    assert status != 0, err[-3000:]
    assert took < 20, f"{took:.1f} s: the tries last 0.3 s"
    assert "softnic0" in err and ("port error" in err or "no answer" in err), err[-3000:]


def events_that_are_not_to_be_returned_are_left_to_the_completions():
    status, _, err, took = broken_run("ignored", {**SHORT, "NCCL_IB_RETURN_ASYNC_EVENTS": "0"}, [(0, None)], 1000)
    assert status != 0 and took < 20, err[-3000:]
    assert "no answer" in err, err[-3000:]


CLAIMS = [a_link_that_comes_back_in_time_loses_nothing, a_link_that_stays_down_is_an_error_that_names_it,
          events_that_are_not_to_be_returned_are_left_to_the_completions]

softnic_run, softnicctl, netbench, plugin = sys.argv[1:5]
{c.__name__: c for c in CLAIMS}[sys.argv[5]]()
