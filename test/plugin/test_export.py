#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The plugin as NCCL uses it: every table and every operation over the software NIC, with all data checked."""
import json
import os
import subprocess
import sys

from world import World

OPS = ("sendrecv", "allreduce", "allgather", "reducescatter", "alltoall")
APIS = range(7, 13)
SMALL = ("--sizes", "0:32K:x32", "--odd", "--iters", "4", "--warmup", "1")
NIC = []  # options of softnic-run: which kind
failed = 0


def report(good, claim, detail):
    global failed
    failed += not good
    print("ok" if good else "FAIL", claim, "" if good else detail, flush=True)


def run(run_softnic, netbench, plugin, *options, nodes=1, nics=2, env=None):
    command = [run_softnic, "--quiet", *NIC, "--nics", str(nics), "--nodes", str(nodes), "--", netbench, "--plugin",
               plugin, "--check", "--json", "--timeout", "60", "--nodes", str(nodes), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env={**os.environ, **(env or {})})
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")], done.stderr


def expect_data(tools, claim, *options, **more):
    status, rows, said = run(*tools, *options, **more)
    report(status == 0 and rows and not any(row["errors"] for row in rows), claim,
           f"{options} status {status}: {said[-2000:]}")


def expect_refusal(tools, claim, words, env, *options, **more):
    status, _, said = run(*tools, "--sizes", "8", *options, env=env, **more)
    report(status != 0 and all(word in said for word in words), claim, f"status {status}: {said[-2000:]}")


def expect_link_down(tools, ctl):
    """Take the link down while data moves: each rank must soon report which port, and not hang."""
    world = World(ctl, f"linkdown{os.getpid()}")
    bench = [tools[1], "--plugin", tools[2], "--op", "allreduce", "--sizes", "256K", "--iters", "200000",
             "--timeout", "60"]
    with subprocess.Popen([tools[0], "--quiet", "--nics", "1", "--name", world.name, "--", *bench],
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                          env={**os.environ, "NCCL_IB_TIMEOUT": "10"}) as process:
        try:
            world.wait_for_traffic(process, 4 << 20)
            world.control("link", "softnic0", "down")
            said = process.communicate(timeout=200)[1]
        finally:
            process.terminate()
    good = process.returncode != 0 and "softnic0" in said and "returned" in said
    report(good, "calls return an error that names the port that went down",
           f"status {process.returncode}: {said[-2000:]}")


def main():
    tools, ctl, wide_plugin, size = sys.argv[1:4], *sys.argv[4:7]
    if size == "small":
        for op in OPS:
            expect_data(tools, f"{op} over 3 ranks, 2 comms, multi-receives", "--op", op, "--ranks", "3", "--comms",
                        "2", "--group", "3", "--chunk", "777", "--flush", *SMALL)
        expect_data(tools, "a virtual device of 2 rails", "--fuse", "--op", "sendrecv", "--sizes", "0:1M:x32", "--odd",
                    "--iters", "4", "--group", "2", "--chunk", "200001")
        expect_data(tools, "registrations come and go while data moves", "--op", "alltoall", "--ranks", "3", "--churn",
                    "--sizes", "1:1M:x32", "--iters", "20")
        expect_data(tools, "several queues a rail", "--op", "sendrecv", "--sizes", "1:1M:x32", "--iters", "4",
                    env={"NCCL_IB_QPS_PER_CONNECTION": "3"})
        expect_link_down(tools, ctl)
        expect_refusal(tools, "an impossible variable is named", ["PERSEUS_ORDER", "gossip"],
                       {"PERSEUS_ORDER": "gossip"})
        expect_refusal(tools, "an unknown policy is named", ["PERSEUS_ORDER", "gossip"], {"PERSEUS_ORDER": "gossip"})
        expect_refusal(tools, "without a device init fails", ["init returned"], {"NCCL_IB_HCA": "nosuch"})
        expect_refusal(tools, "PERSEUS_REQUIRED makes a missing device an error", ["PERSEUS_REQUIRED=1", "listen"],
                       {"NCCL_IB_HCA": "nosuch", "PERSEUS_REQUIRED": "1"})
    elif size == "tables":  # every table with every operation; each of them also with every number of ranks
        for a, api in enumerate(APIS):
            for o, op in enumerate(OPS):
                ranks = 2 + (a + 3 * o) % 5
                expect_data(tools, f"v{api} {op} over {ranks} ranks, multi-receives with tags", "--api",
                            f"v{api}", "--op", op, "--ranks", str(ranks), "--group", str(1 + (a + o) % 8), "--chunk",
                            "1001", "--sizes", "0:32K:x32", "--odd", "--iters", "2", "--warmup", "1")
    elif size == "merged":  # wide_plugin: its NICs have keys of 64 bits
        wide, merge = [*tools[:2], wide_plugin], ("--fuse", "--api", "v12", "--op", "sendrecv")
        move = (*merge, "--sizes", "0:256K:x32", "--odd", "--iters", "4")
        expect_data(tools, "8 rails: the keys of two share a word", *move, nics=8)
        expect_data(wide, "4 rails with keys of 64 bits", *move, nics=4)
        expect_refusal(wide, "5 rails with keys of 64 bits are refused by name",
                       ["merged 5 NICs", "the key 0x", "at most 4"], {}, *merge, nics=5)
    elif size in ("efa", "efa_newest_table"):  # queues that keep no order; a different order each time
        NIC.append("--efa")
        for o, op in enumerate(OPS):
            for api in (8, 12) if size == "efa" else (12,):
                for ranks in (2, 4):
                    NIC[1:] = ["--seed", str(100 * o + api + ranks)]
                    expect_data(tools, f"v{api} {op} over {ranks} ranks", "--api", f"v{api}", "--op", op, "--ranks",
                                str(ranks), "--sizes", "0:4M:x8" if size == "efa" else "0:1M:x16", "--odd",
                                "--iters", "4", "--warmup", "1")
            expect_data(tools, f"{op} over 3 ranks, 2 comms, multi-receives", "--op", op, "--ranks", "3", "--comms",
                        "2", "--group", "3", "--chunk", "777", "--flush", *SMALL)
        expect_data(tools, "a virtual device of 2 rails", "--fuse", "--op", "sendrecv", "--sizes", "0:4M:x32", "--odd",
                    "--iters", "4", "--group", "2", "--chunk", "200001")
        expect_data(tools, "registrations come and go while data moves", "--op", "alltoall", "--ranks", "3", "--churn",
                    "--sizes", "1:1M:x32", "--iters", "20")
        expect_data(tools, "several queues a rail", "--op", "sendrecv", "--sizes", "1:1M:x32", "--iters", "4",
                    env={"NCCL_IB_QPS_PER_CONNECTION": "3", "NCCL_IB_SPLIT_DATA_ON_QPS": "1"})
        expect_data(tools, "8 ranks on 2 nodes", "--op", "alltoall", "--ranks", "8", "--sizes", "8:64K:x64", "--odd",
                    "--iters", "3", nodes=2)
        expect_refusal(tools, "a policy that needs order is refused by name", ["in_order", "counted or drain"],
                       {"PERSEUS_ORDER": "in_order"})
    else:
        for a, api in enumerate(APIS):
            op = OPS[a % len(OPS)]
            expect_data(tools, f"v{api} {op} of 64 MB less one", "--api", f"v{api}", "--op", op, "--sizes", "67108863",
                        "--iters", "1", "--warmup", "0")
        for op in OPS:
            expect_data(tools, f"{op} over 7 ranks", "--op", op, "--ranks", "7", "--sizes", "1:32K:x32",
                        "--odd", "--iters", "2", "--warmup", "0")
            expect_data(tools, f"{op} over 8 ranks on 2 nodes", "--op", op, "--ranks", "8", "--sizes",
                        "8:64K:x64", "--odd", "--iters", "3", "--comms", "2", nodes=2)
            expect_data(tools, f"{op} of 64 MB", "--op", op, "--sizes", "67108863:64M:+1", "--iters", "2",
                        "--warmup", "0")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
