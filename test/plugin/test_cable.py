#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A cable is pulled while a job runs. If it comes back in time, the job goes on; if not, the job fails with an error
that names the rail.

usage: test_cable.py SOFTNIC_RUN SOFTNICCTL NETBENCH PLUGIN CLAIM
"""
import json
import os
import subprocess
import sys
import time

from world import World

LIMIT_S = 120
# 2^13 * 4.096 us = 33.6 ms for a try: eight tries last 268 ms. With 2^20 they last 34 s, longer than pulls of 0.3 s
# even on a slow machine.
SHORT, LONG = {"NCCL_IB_TIMEOUT": "13"}, {"NCCL_IB_TIMEOUT": "20"}
# At the slow rate the transfer takes longer than the pulls; the fast rate then ends it soon.
SLOW, FAST = "20M", "100G"


def broken_run(name, env, pulls, iterations):
    """Status, rows and stderr of a run during which node 0's link goes away: pulls are (seconds down, seconds up)."""
    world = World(softnicctl, f"link-{name}-{os.getpid()}")
    bench = subprocess.Popen(
        [softnic_run, "--quiet", "--no-sysfs", "--name", world.name, "--nodes", "2", "--rate", SLOW, "--retry-cap",
         "60s", "--", netbench, "--plugin", plugin, "--op", "sendrecv", "--ranks", "2", "--nodes", "2", "--sizes", "1M",
         "--warmup", "0", "--iters", str(iterations), "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "NCCL_DEBUG": "INFO", **env})
    try:
        world.wait_for_traffic(bench, 128 << 10)
        for down, up in pulls:
            world.control("link", "softnic0", "down")
            time.sleep(down)
            if up is not None:
                world.control("link", "softnic0", "up")
                time.sleep(up)
        for device in ("softnic0", "softnic1") if pulls[-1][1] is not None else ():
            world.control("set", device, "rate", FAST)
        out, err = bench.communicate(timeout=LIMIT_S)
        return bench.returncode, [json.loads(line) for line in out.splitlines() if line.startswith("{")], err
    finally:
        bench.kill()
        bench.wait()


def a_link_that_comes_back_in_time_loses_nothing():
    status, rows, err = broken_run("flap", LONG, [(0.3, 0.1), (0.2, 0.1)], 100)
    assert status == 0 and rows and rows[0]["errors"] == 0, err[-3000:]
    assert "softnic0 port 1" in err and "retries go on" in err, "the link is not reported: " + err[-3000:]


# The tries last 0.3 s. LIMIT_S allows for a busy machine.
def a_link_that_stays_down_is_an_error_that_names_it():
    status, _, err = broken_run("down", SHORT, [(0, None)], 1000)
    assert status != 0, err[-3000:]
    assert "softnic0" in err and ("port error" in err or "no answer" in err), err[-3000:]
    assert "PERSEUS_STANDBY_RAIL=1" in err, f"what to set: {err[-3000:]}"


def events_that_are_not_to_be_returned_are_left_to_the_completions():
    status, _, err = broken_run("ignored", {**SHORT, "NCCL_IB_RETURN_ASYNC_EVENTS": "0"}, [(0, None)], 1000)
    assert status != 0, err[-3000:]
    assert "no answer" in err, err[-3000:]


CLAIMS = [a_link_that_comes_back_in_time_loses_nothing, a_link_that_stays_down_is_an_error_that_names_it,
          events_that_are_not_to_be_returned_are_left_to_the_completions]

softnic_run, softnicctl, netbench, plugin = sys.argv[1:5]
{c.__name__: c for c in CLAIMS}[sys.argv[5]]()
