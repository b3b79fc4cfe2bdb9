#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""perseus-perf putsignal over the modelled software NIC must show what each policy costs (the paper's figures).

usage: efficiency.py SOFTNIC_RUN PERSEUS_PERF. On a busy machine the model is late, so a cell may take
several tries; the fence counts must be right in each. Where every try was disturbed, the efficiency is skipped (77).
"""
import json
import os
import statistics
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from quiet import cores_are_free  # noqa: E402

MODEL = ["--quiet", "--latency", "50us", "--rate", "10G", "--fence", "strict"]
# An idle machine gives 0.96 to 1.0 (doc/results/putsignal-softnic.json), but a virtual one can give less for half a
# minute; the cause is unknown (doc/open.md).
LEAST = 0.85
# policy, group, concurrency, peers: efficiency at least, at most; fences an iteration
CELLS = [
    ("drain", "coupled", 96, 7, 0.0, 0.10, 96),
    ("drain", "peer", 96, 7, 0.0, 0.60, 7),
    ("nic_fence", "coupled", 96, 7, 0.0, 0.60, 96),
    ("nic_fence", "peer", 96, 7, 0.74, 1.2, 7),
    ("in_order", "coupled", 96, 7, LEAST, 1.2, 0),
    ("counted", "coupled", 96, 7, LEAST, 1.2, 0),
    ("in_order", "peer", 96, 7, LEAST, 1.2, 0),
    ("counted", "peer", 96, 7, LEAST, 1.2, 0),
    # The paper's dispatch: 112 transfers to 4 nodes, a fence each or one a destination.
    ("nic_fence", "coupled", 112, 4, 0.0, 0.60, 112),
    ("nic_fence", "peer", 112, 4, 0.0, 1.2, 4),
    ("drain", "coupled", 112, 4, 0.0, 0.10, 112),
    ("drain", "peer", 112, 4, 0.0, 1.2, 4),
]
TRIES = 12
TRIES_S = 400  # for all cells; each cell has at least one


def run(softnic_run, perf, cell):
    policy, group, concurrency, peers = cell[:4]
    done = subprocess.run([softnic_run, *MODEL, "--", perf, "putsignal", "--json", "--policy", policy, "--group", group,
                           "--concurrency", str(concurrency), "--peers", str(peers), "--iterations", "20",
                           "--timeout", "250"],
                          capture_output=True, text=True)
    if done.returncode == 77:
        print(done.stderr, end="")
        sys.exit(77)
    if done.returncode != 0:
        raise SystemExit(f"{policy} {group}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[0])


def main():
    failed = skipped = 0
    give_up = time.monotonic() + TRIES_S
    for cell in CELLS:
        policy, group, concurrency, peers, least, most, fences = cell
        quiet, tries = False, []
        for attempt in range(TRIES):
            free_before = cores_are_free()
            got = run(sys.argv[1], sys.argv[2], cell)
            if got["errors"] or got["fences"] != fences or got["signals"] != concurrency:
                raise SystemExit(f"want {fences} fences, {concurrency} signals, 0 errors: {got}")
            tries.append(got["efficiency"])
            good = least <= got["efficiency"] <= most
            quiet |= not good and free_before and cores_are_free()
            if good or time.monotonic() > give_up:
                break
            time.sleep(0.25 * attempt)  # a disturbance may last for seconds
        failed += quiet and not good
        skipped += not quiet and not good
        print(f"{'ok' if good else 'FAILED' if quiet else 'noise':6} {policy:10} {group:8} {concurrency} x {peers}: "
              f"{100 * got['efficiency']:.1f} % (want {100 * least:.0f} to {100 * most:.0f}), {fences} fences, tries "
              f"{attempt + 1}, median of them {100 * statistics.median(tries):.1f} %")
    if skipped and not failed:
        print(f"skipped: {skipped} of {len(CELLS)} efficiencies, since the cores of this machine are busy")
        return 77
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
