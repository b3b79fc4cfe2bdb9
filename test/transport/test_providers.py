#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which provider of libfabric keeps which ordering policy: puts and signals of three ranks, whose data is checked.

usage: test_providers.py PERSEUS_PERF PERSEUS_INFO
"""
import json
import os
import subprocess
import sys

POLICIES = ("in_order", "counted", "drain", "nic_fence")
KEPT = {  # provider: policies; the others are refused by name
    "net": {"in_order", "counted", "drain"},
    "tcp;ofi_rxm": {"in_order", "counted", "drain"},
    "udp;ofi_rxd": {"in_order", "counted", "drain"},
}
REFUSED = {  # value of PERSEUS_PROVIDER: what perseus-info says
    "sockets": "its writes are announced before their bytes are there",
    "nosuch": "libfabric offers no such provider",
    "x" * 64: "longer than any name of a provider",
}
LIMIT_S = 120


def run(provider, *command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S,
                          env={**os.environ, "PERSEUS_PROVIDER": provider})
    return done.returncode, done.stdout, done.stdout + done.stderr


def put_and_signal(perf, provider, policy):
    return run(provider, perf, "putsignal", "--policy", policy, "--peers", "2", "--iterations", "5", "--warmup", "1",
               "--concurrency", "16", "--group", "coupled,peer", "--json")


def is_right(status, out, said, kept):
    if not kept:
        return status != 0 and "ordering policy nic_fence needs" in said
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    cells = [row for row in rows if "errors" in row]
    return status == 0 and len(cells) >= 2 and not any(row["errors"] for row in cells)


def has_libfabric(info):
    _, _, said = run("net", info)
    return "cannot open libfabric" not in said and "rails: 0" not in said


def main():
    perf, info = sys.argv[1:3]
    failed = 0
    if not has_libfabric(info):
        print("skipped: no libfabric with the provider net here")
        return 77
    for provider, kept in KEPT.items():
        for policy in POLICIES:
            status, out, said = put_and_signal(perf, provider, policy)
            good = is_right(status, out, said, policy in kept)
            print("ok" if good else "FAIL", provider, policy, "kept" if policy in kept else "refused",
                  "" if good else f"status {status}: {said}")
            failed += not good
    for provider, words in REFUSED.items():
        os.environ.pop("NCCL_IB_HCA", None)
        _, _, said = run(provider, info)
        good = words in said
        print("ok" if good else "FAIL", provider, "is refused by name", "" if good else said)
        failed += not good
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
