#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
r"""Run the simulations behind a page or a plot of doc/simulator.md, and print their rows.

    tools/sim/study.py paper | \
        tools/dev/record.py sim-paper --machine "any: a model" --command "tools/sim/study.py paper"
    tools/sim/study.py --list

Equal seeds give equal rows on any machine, except for times of the machine itself (statistics).
"""
import argparse
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
BANDS = ("--band", "fast,middle,slow")
EIGHT_TO_512 = ("--concurrency", "8,32,128,512")
SIZES = ("--bytes", "256,1K,4K,16K,64K,256K,1M")
QWEN = ("moe", "--model", "qwen3-30b")
SCALING = (*QWEN, "--relay", "--window", "32", "--group", "8", "--explain", "--statistics")
NODES = ("2,4,8,16,32,64", "128")
ONE = ("--iterations", "1", "--warmup", "1")
STUDIES = {
    "paper": [
        ("putsignal", "--cluster", "slingshot11", "--all", "--nodes", "2,8", "--bytes", "4K,1M", "--policy",
         "drain,nic_fence", *ONE, *BANDS),
        ("putsignal", "--cluster", "slingshot11", "--nodes", "8", "--peers", "4", "--concurrency", "112", "--policy",
         "drain,nic_fence"),
        (*QWEN, "--cluster", "slingshot11", "--nodes", "1,2,4,8,16", "--policy", "drain,nic_fence", *BANDS),
        *[(*QWEN, "--cluster", "slingshot11", "--nodes", "8", "--policy", "drain,nic_fence", "--zipf", zipf, *BANDS)
          for zipf in ("0.5", "1", "1.5")],
    ],
    "softnic": [("putsignal", "--cluster", "softnic-slow", "--nodes", "8", "--turn", "16", "--window", "1024", "--ring",
                 "4096", "--concurrency", "8,16,32,64,96,128")],
    # GPU memory over softnic: a CUDA call a request. 2.6 us is what NVSHMEM's ibrc takes for each of 96 puts alone.
    "nvshmem": [("putsignal", "--cluster", "softnic-fast", "--nodes", "2", "--policy", "in_order,nic_fence", "--set",
                 "wr_ns=2610", "--set", "software=0", "--concurrency", "8,32,96")],
    # What doc/results/fused-nodes-groups-4xH200.json measured; nothing was fitted to it.
    "fused-groups": [("fused", "--kernel", "reduce_scatter", "--cluster", "softnic-gpu", "--nodes", "2", "--band-pairs",
                      "4", "--tiles-per-signal", tiles, *BANDS) for tiles in ("1", "8", "64", "4096")],
    # To compare with doc/results/moe-nodes-policies-4xH200.json; nothing was fitted to it.
    "fused-moe": [("fused", "--kernel", "moe", "--model", "deepseek-v3", "--cluster", "softnic-gpu", "--set",
                   "fence_strict=1", "--nodes", "2", "--tokens", tokens, *rows, *BANDS)
                  for tokens in ("512", "2048", "8192")
                  for rows in ((), ("--rows-per-put", "8", "--rows-per-signal", "8"))],
    "fused": [("fused", "--kernel", kernel, "--cluster", "cx7", "--nodes", "2,4,8", "--size", "16384", "--explain")
              for kernel in ("reduce_scatter", "allgather", "allreduce", "attention")],
    "scaling-cx7": [(*SCALING, "--cluster", "cx7", "--policy", policy, "--nodes", nodes) for nodes in NODES
                    for policy in ("in_order", "drain", "counted", "nic_fence")],
    "scaling-efa": [(*SCALING, "--cluster", "efa-p5", "--policy", "drain,counted", "--nodes", nodes)
                    for nodes in NODES],
    # How long the simulator itself takes, and how much memory.
    "speed": [(*SCALING, "--cluster", "cx7", "--policy", policy, "--nodes", "16,32,64")
              for policy in ("in_order", "counted")],
    "scaling-cx7-bands": [(*QWEN, "--relay", "--window", "32", "--group", "8", "--nodes", "2,16", "--cluster",
                           "cx7", *BANDS)],
    "map-cx7": [("putsignal", "--all", "--cluster", "cx7", "--nodes", "4", "--iterations", "1", *SIZES, *EIGHT_TO_512)],
    "map-efa": [("putsignal", "--all", "--cluster", "efa-p5", "--nodes", "4", "--iterations", "1", *SIZES,
                 *EIGHT_TO_512)],
    "map-slingshot11": [("putsignal", "--all", "--cluster", "slingshot11", "--nodes", "4", "--iterations", "1", *SIZES,
                         *EIGHT_TO_512)],
    "thousand": [("alltoall", "--cluster", "cx7", "--nodes", "128", "--policy", "counted", "--group", "peer", "--bytes",
                  "4K", "--window", "16", "--outstanding", "8", "--statistics", "--explain")],
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=STUDIES)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--program", default=ROOT / "build/tools/perseus-sim")
    args = parser.parse_args()
    if not args.name and not args.list:
        parser.error("want a name, or --list")
    for name, runs in STUDIES.items():
        if args.list:
            print(name, *(f"\n    perseus-sim {' '.join(run)}" for run in runs))
        elif name == args.name:
            for run in runs:
                if subprocess.run([args.program, *run, "--json"]).returncode:
                    sys.exit(f"study: perseus-sim {' '.join(run)} failed")


if __name__ == "__main__":
    main()
