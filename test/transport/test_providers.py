#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which provider of libfabric keeps which ordering policy: puts and signals of three ranks, whose data is checked; and
whether a lost rail can be replaced. The tables of doc/libfabric.md must say what is found here.

usage: test_providers.py PERSEUS_PERF PERSEUS_INFO DOC_LIBFABRIC
"""
import json
import os
import re
import subprocess
import sys

POLICIES = ("in_order", "nic_fence", "counted", "drain")
# Of libfabric 1.x, and of 2.x, which has net's code in tcp.
PROVIDERS = (("net", "tcp;ofi_rxm", "udp;ofi_rxd"), ("tcp", "tcp;ofi_rxm", "udp;ofi_rxd"))
# Providers like cxi (test/mock_cxi/mock.h): the words of MOCK_CXI. "" is cxi itself.
MOCKS = ("", "no-order", "no-fence", "no-order,no-fence", "no-endpoint,own-keys", "no-endpoint,no-order",
         "no-endpoint,virtual,prov-keys,no-order")
REFUSED = {  # value of PERSEUS_PROVIDER: what perseus-info says
    "sockets": "its writes are announced before their bytes are there",
    "mock_cxi no-data": "delivers no completion data of writes",
    "mock_cxi own-keys": "delivers no completion data of writes",
    "mock_cxi no-size": "reports 0 bytes and data",
    "nosuch": "libfabric offers no such provider",
    "x" * 64: "longer than any name of a provider",
}
LIMIT_S = 120


def run(provider, *command, policy="auto"):
    name, _, words = provider.partition(" ")
    env = {**os.environ, "PERSEUS_PROVIDER": name, "MOCK_CXI": words, "PERSEUS_ORDER": policy}
    if name == "mock_cxi":
        env.pop("NCCL_IB_HCA", None)
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=env)
    return done.returncode, done.stdout, done.stdout + done.stderr


def keeps(perf, provider, policy):
    """True, False (refused by name), or what went wrong."""
    status, out, said = run(provider, perf, "putsignal", "--policy", policy, "--peers", "2", "--iterations", "5",
                            "--warmup", "1", "--concurrency", "16", "--group", "coupled,peer", "--json", policy=policy)
    if status and f"ordering policy {policy} needs" in said:
        return False
    cells = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    cells = [cell for cell in cells if "errors" in cell]
    good = status == 0 and len(cells) >= 2 and not any(cell["errors"] for cell in cells)
    return True if good else f"status {status}: {said}"


def after_loss(info, provider):
    """What becomes of a peer that loses a rail."""
    os.environ["PERSEUS_LOG"] = "info"
    said = run(provider, info)[2]
    del os.environ["PERSEUS_LOG"]
    found = re.search("a lost rail (?:is )?(replaced|ends the peer)", said)
    return found.group(1) if found else said


def documented(path, name):
    """The policies that the document's row of this name has, and what becomes of a lost rail."""
    first = f"`{name}`" if name else "(empty)"
    for line in open(path, encoding="utf-8"):
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 4 and re.match(re.escape(first) + r"( |$)", cells[1]):
            return [word for word in re.split("[, ]+", cells[2]) if word in POLICIES], cells[3]
    return None


def check_policies(perf, info, document, provider):
    found = {policy: keeps(perf, provider, policy) for policy in POLICIES}
    wrong = {policy: what for policy, what in found.items() if isinstance(what, str)}
    kept = [policy for policy in POLICIES if found[policy] is True]
    name = provider.removeprefix("mock_cxi").strip()
    seen, says = (kept, after_loss(info, provider)), documented(document, name)
    good = not wrong and says == seen
    print("ok" if good else "FAIL", provider, ", ".join(kept), seen[1], wrong if wrong else "",
          "" if says == seen else f"{document} says of {name}: {says}")
    return good


def main():
    perf, info, document = sys.argv[1:4]
    here = [names for names in PROVIDERS if "rails: 1" in run(names[0], info)[2]]
    if not here:
        print("skipped: no libfabric with the provider net, or tcp of 2.x, here")
        return 77
    # The mock is found by FI_PROVIDER_PATH.
    mocks = MOCKS if "FI_PROVIDER_PATH" in os.environ else ()
    providers = [*here[0], *(f"mock_cxi {words}".strip() for words in mocks)]
    good = [check_policies(perf, info, document, provider) for provider in providers]
    os.environ.pop("NCCL_IB_HCA", None)
    for provider, words in REFUSED.items():
        if provider.startswith("mock_cxi") and not mocks:
            continue
        _, _, said = run(provider, info)
        good.append(words in said)
        print("ok" if good[-1] else "FAIL", provider, "is refused by name", "" if good[-1] else said)
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
