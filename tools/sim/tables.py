#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print the tables of doc/simulator.md from doc/results. usage: tables.py [NAME...]; without a name: all whose results
exist."""
import json
import pathlib
import statistics
import sys

RESULTS = pathlib.Path(__file__).resolve().parents[2] / "doc/results"
BANDS = ("fast", "middle", "slow")


def rows(name):
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def pick(table, **wanted):
    return [row for row in table if all(row.get(name) == value for name, value in wanted.items())]


def short(value):
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def band(table, value, **wanted):
    """Lowest to highest of the three bands, and the middle."""
    found = [value(*pick(table, band=end, **wanted)[:1]) for end in BANDS]
    return f"{short(found[1])} ({short(min(found))} to {short(max(found))})"


def calibration():
    """What was predicted for 4 and 8 ranks. Spread: of what was measured where policies differ in nothing (puts alone,
    no immediates)."""
    table = [row for row in rows("sim-calibration") if row["op"] == "calibration" and row["ranks"] > 2]
    print("median, worst error, within 25 %, spread of equal measurements")
    for link in ("softnic-slow", "softnic-fast"):
        for size in (4096, 65536):
            cells = pick(table, link=link, bytes=size)
            errors = sorted(abs(row["error"]) for row in cells)
            spread = 0.0
            for ranks in {row["ranks"] for row in cells}:
                same = [row["measured_us"] for row in pick(cells, ranks=ranks, what="put_only_us")
                        if row["policy"] != "counted"]
                spread = max([spread, *(abs(value / statistics.median(same) - 1) for value in same)])
            print(f"| {link} | {size} | {100 * statistics.median(errors):.1f} % | {100 * errors[-1]:.0f} % | "
                  f"{sum(error <= 0.25 for error in errors)} of {len(errors)} | {100 * spread:.0f} % |")
    errors = [abs(row["error"]) for row in table]
    print(f"| all | | {100 * statistics.median(errors):.1f} % | {100 * max(errors):.0f} % | "
          f"{sum(error <= 0.25 for error in errors)} of {len(errors)} | |")


def softnic():
    """Modelled without a fit, against perseus-perf over the software NIC with 8 ranks on an idle machine."""
    measured = {(row["policy"], row["group"], row["concurrency"]): row for row in rows("putsignal-softnic")
                if row["peers"] == 7}
    errors, counts = [], []
    for row in rows("sim-softnic"):
        other = measured[row["policy"], row["group"], row["concurrency"]]
        errors += [abs(row[name] / other[name] - 1) for name in ("put_only_us", "put_signal_us")]
        counts.append((row["fences"], row["signals"]) == (other["fences"], other["signals"]))
    print(f"times {len(errors)}, median error {100 * statistics.median(errors):.2f} %, worst {100 * max(errors):.1f} "
          f"%; fences and signals equal in {sum(counts)} of {len(counts)} cells")


def nvshmem():
    for count in (8, 32, 96):
        ibrc, = pick(rows("putsignal-nvshmem-2xH200"), library="nvshmem ibrc", concurrency=count)
        model, = pick(rows("sim-nvshmem"), policy="in_order", group="coupled", concurrency=count)
        print(f"| {count} | {ibrc['put_only_us']:.0f}, {ibrc['coupled_us']:.0f}, {ibrc['grouped_us']:.0f} | "
              f"{model['put_only_us']:.0f}, {model['put_signal_us']:.0f}, {model['put_signal_us']:.0f} |")


def fused_groups():
    table, measured = rows("sim-fused-groups"), rows("fused-nodes-groups-4xH200")
    for tiles, puts in ((1, 512), (8, 64), (64, 8), (4096, 2)):
        cells = []
        for policy in ("drain", "nic_fence", "in_order", "counted"):
            other, = [row for row in measured if row["order"] == policy and row["puts"] == puts]
            cells.append(f"{other['usec']:.0f}: "
                         f"{band(table, lambda row: row['us'], policy=policy, tiles_per_signal=tiles)}")
        print("|", tiles if tiles < 4096 else "all of a band", "|", " | ".join(cells), "|")


def fused_moe():
    measured = [row for row in rows("moe-nodes-policies-4xH200")]
    table = rows("sim-fused-moe")
    for put, asked in ((0, {"in_order": "nodes_put_32"}),
                       (8, {policy: f"nodes_{policy}" for policy in ("drain", "nic_fence", "in_order", "counted")})):
        for tokens in (512, 2048, 8192):
            line = [f"{found[0]['usec']:.0f}: "
                    + band(table, lambda row: row["us"], tokens=tokens, policy=policy, rows_per_put=put)
                    for policy, name in asked.items() if (found := pick(measured, asked=name, tokens=tokens))]
            if line:
                print("|", tokens, "|", put or "chosen", "|", " | ".join(line), "|")


def paper():
    table = rows("sim-paper")
    put = dict(op="putsignal", transfers=96)
    for nodes in (2, 8):
        for size in (4096, 1 << 20):
            print(f"fence time, {nodes} nodes, {size} B, ms:",
                  band(table, lambda row: row["stall_us"] / 1e3, policy="drain", group="coupled", nodes=nodes,
                   bytes=size, **put))
    for policy, group in (("drain", "coupled"), ("nic_fence", "peer")):
        print(f"share of put only at 8 nodes, 4 KB, {policy} {group}, %:",
              band(table, lambda row: 100 * row["efficiency"], policy=policy, group=group, nodes=8, bytes=4096, **put))
    for group in ("coupled", "peer"):
        found = pick(table, op="putsignal", transfers=112, policy="drain", group=group)[0]
        print(f"fences of 112 transfers to 4 destinations, {group}: {found['fences']}")
    moe = dict(op="moe")
    base = {tuple(row[name] for name in ("band", "nodes", "policy", "group", "zipf")): row["us"]
            for row in pick(table, op="moe")}
    for what, policy, group in (("coupled", "drain", "coupled"), ("decoupled", "drain", "peer"),
                                ("NIC ordering", "nic_fence", "coupled"), ("both", "nic_fence", "peer")):
        print(f"layer at 8 nodes, {what}, ms:",
              band(table, lambda row: row["us"] / 1e3, nodes=8, policy=policy, group=group, zipf=0.0, **moe))
        for nodes in (2, 8):
            gains = [base[end, nodes, "drain", "coupled", 0.0] / base[end, nodes, policy, group, 0.0] for end in BANDS]
            print(f"    times as fast as coupled at {nodes} nodes: {gains[1]:.2f} ({min(gains):.2f} to "
                  f"{max(gains):.2f})")
        slower = [base[end, 16, policy, group, 0.0] / base[end, 1, policy, group, 0.0] for end in BANDS]
        print(f"    16 nodes over one: {slower[1]:.1f} ({min(slower):.1f} to {max(slower):.1f})")
    for zipf in (0.0, 0.5, 1.0, 1.5):
        gains = [base[end, 8, "drain", "coupled", zipf] / base[end, 8, "nic_fence", "peer", zipf] for end in BANDS]
        print(f"Zipf {zipf}: both over coupled {gains[1]:.2f} ({min(gains):.2f} to {max(gains):.2f})")


def scaling(name):
    table = rows(f"sim-scaling-{name}")
    nodes = sorted({row["nodes"] for row in table})
    for policy in dict.fromkeys(row["policy"] for row in table):
        times = {row["nodes"]: row["us"] for row in pick(table, policy=policy)}
        print("|", policy, "|", " | ".join(f"{times[n]:.0f}" if n in times else "" for n in nodes), "|")


def best(name):
    table = rows(f"sim-map-{name}")
    for group in ("coupled", "peer"):
        for count in sorted({row["concurrency"] for row in table}):
            line = []
            for size in sorted({row["bytes"] for row in table}):
                cell = {row["policy"]: row["put_signal_us"]
                        for row in pick(table, group=group, concurrency=count, bytes=size)}
                first = min(cell, key=cell.get)
                line.append(f"{first} {cell['drain'] / cell[first]:.1f}")
            print("|", group, "|", count, "|", " | ".join(line), "|")


def speed():
    for row in [*rows("sim-speed"), *rows("sim-thousand")]:
        print(f"| {row['op']}, {row['ranks']} ranks, {row['policy']} | {row['events'] / 1e6:.1f} | {row['user_s']:.1f} "
              f"| {row['system_s']:.1f} | {row['events_per_s'] / 1e6:.1f} | {row['memory_bytes'] / 1e9:.2g} | "
              f"{row['side_bytes'] / 1e3:.0f} |")


TABLES = {"calibration": calibration, "softnic": softnic, "nvshmem": nvshmem, "fused-groups": fused_groups,
          "fused-moe": fused_moe, "paper": paper, "scaling-cx7": lambda: scaling("cx7"),
          "scaling-efa": lambda: scaling("efa"), "speed": speed, "map-cx7": lambda: best("cx7"),
          "map-efa": lambda: best("efa"), "map-slingshot11": lambda: best("slingshot11")}


def main():
    for name in sys.argv[1:] or TABLES:
        if (RESULTS / f"sim-{name}.json").exists():
            print(f"## {name}")
            TABLES[name]()


if __name__ == "__main__":
    main()
