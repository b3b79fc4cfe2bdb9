#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""perseus-sim: counts that are known, order that is kept, equal seeds, errors that say what is wrong.
usage: model.py PROGRAM SOURCE_ROOT"""
import json
import pathlib
import subprocess
import sys
import tempfile

SIM, ROOT = sys.argv[1], pathlib.Path(sys.argv[2])
CLUSTERS = sorted(path.stem for path in (ROOT / "tools/sim/clusters").glob("*.cluster"))


def sim(*arguments, status=0):
    done = subprocess.run([SIM, *arguments], capture_output=True, text=True, timeout=300)
    if done.returncode != status:
        raise SystemExit(f"{arguments}: status {done.returncode}, expected {status}: {done.stderr}")
    return done


def rows(*arguments):
    return [json.loads(line) for line in sim(*arguments, "--json").stdout.splitlines()]


def a_drain_waits_once_a_put_or_once_a_group():
    """The paper's 112 and 4 fences: 28 puts to each of four destinations, a signal for each put or a group a
    destination."""
    common = ("putsignal", "--cluster", "softnic-slow", "--nodes", "8", "--peers", "4", "--concurrency", "112")
    for policy in ("drain", "nic_fence"):
        coupled, grouped = rows(*common, "--policy", policy)
        assert (coupled["fences"], grouped["fences"]) == (112, 4), (policy, coupled["fences"], grouped["fences"])
    for policy in ("in_order", "counted"):
        assert [row["fences"] for row in rows(*common, "--policy", policy)] == [0, 0]


def a_sender_has_a_request_for_each_put_and_signal():
    for row in rows("putsignal", "--cluster", "softnic-slow", "--nodes", "4", "--concurrency", "96"):
        # Credits of the receiver's records are its requests, so the sender has its own only.
        assert (row["puts"], row["signals"], row["work_requests"]) == (96, 96, 192), row


def every_policy_keeps_order_on_every_cluster():
    for cluster in CLUSTERS:
        for workload in (("putsignal", "--all", "--concurrency", "48", "--iterations", "1"), ("moe", "--tokens", "64"),
                         ("alltoall",)):
            out = rows(*workload, "--cluster", cluster, "--nodes", "3", "--band", "fast,slow", "--queues", "2")
            assert out and all(row["errors"] == 0 for row in out), (cluster, workload)


LOSABLE = ("alltoall", "--nodes", "4", "--policy", "counted", "--group", "peer", "--set", "nics_per_gpu=2",
           "--outstanding", "16", "--bytes", "64K")


def a_lost_rail_is_replaced_by_the_transport():
    """Rail 0 of node 2 goes while requests are in flight: all arrives, once, over rail 1, after the NICs' wait for an
    answer."""
    for wait_us in (300, 1000):
        whole, = rows(*LOSABLE)
        lost, = rows(*LOSABLE, "--lose-rail", "0:2:30", "--set", f"lost_ns={wait_us}000")
        assert (lost["errors"], lost["puts"], lost["signals"]) == (0, whole["puts"], whole["signals"]), lost
        assert lost["replayed"] > 0 and lost["had_arrived"] > 0, lost
        # Where rails can be replaced, the CPU raises the signals that arrive: else each is a request of the receiver's
        # NIC.
        assert lost["work_requests"] >= whole["work_requests"] - whole["signals"], lost
        # Both sides of a connection of any of the node's 8 ranks with any of 24 others.
        assert 0 < lost["replaced_sides"] <= 2 * 8 * 24 and lost["replaced_sides"] % 2 == 0, lost
        assert 30 + wait_us <= lost["us"] <= 30 + wait_us + 10 * whole["us"], (whole["us"], lost["us"])


def a_lost_rail_costs_the_same_again():
    assert rows(*LOSABLE, "--lose-rail", "0:2:30") == rows(*LOSABLE, "--lose-rail", "0:2:30")


def a_rail_that_is_back_serves_new_connections():
    """At 0.1 us the rail is lost, and nobody is connected. Back at 0.2 us, it is as if nothing had been."""
    assert rows(*LOSABLE, "--lose-rail", "0:2:0.1")[0]["replaced_sides"] > 0
    back, = rows(*LOSABLE, "--lose-rail", "0:2:0.1:0.2")
    never, = rows(*LOSABLE, "--lose-rail", "0:2:1000000")  # long after the end
    assert back["replaced_sides"] == never["replaced_sides"] == 0 and back["us"] == never["us"], (back, never)


def a_rail_is_lost_only_where_it_can_be_replaced():
    moe = ("moe", "--nodes", "2", "--tokens", "64")
    two = ("--set", "nics_per_gpu=2")
    for arguments, text in (
            ((*two, "--policy", "drain", "--lose-rail", "0:0:10"), "only under the policy counted (this run: drain)"),
            (("--policy", "counted", "--lose-rail", "0:0:10"), "two NICs a GPU or more (cx7: 1"),
            ((*two, "--policy", "counted", "--lose-rail", "2:0:10"), "rail 2 of node 0; there are rails 0 to 1"),
            ((*two, "--policy", "counted", "--lose-rail", "1:2:10"), "nodes 0 to 1")):
        assert text in sim(*moe, *arguments, status=1).stderr, arguments
    for wrong in ("1:1", "1:1:x", "1:1:5:4", "1:1:5:"):
        assert "R:N:US" in sim(*moe, "--lose-rail", wrong, status=2).stderr, wrong


def a_side_of_a_connection_takes_at_most_64_kb():
    """With the windows of the large runs. A wider window has more slots."""
    for window in ("16", "32"):
        for row in rows("moe", "--cluster", "cx7", "--nodes", "3", "--tokens", "64", "--window", window,
                        "--statistics"):
            assert 0 < row["side_bytes"] <= 64 << 10, (window, row["policy"], row["side_bytes"])


def in_order_over_ways_that_reorder_is_found():
    """What `auto` avoids: a signal overtakes data where adaptive routing shows messages out of order."""
    bad = ("putsignal", "--all", "--cluster", "cx7", "--nodes", "3", "--bytes", "64K", "--set", "jitter_ns=5000",
           "--set", "routing=2", "--set", "adaptive_unordered=1",
           "--set", "gpus_per_node=4", "--concurrency", "48", "--iterations", "1", "--group", "coupled")
    done = sim(*bad, "--policy", "in_order", status=1)
    assert "order broken" in done.stderr, done.stderr
    for row in rows(*bad, "--policy", "auto,drain,counted"):
        assert row["errors"] == 0


def equal_seeds_give_equal_runs():
    common = ("moe", "--cluster", "efa-p5", "--nodes", "3", "--tokens", "128", "--zipf", "1.2", "--explain")
    first, again, other = (rows(*common, "--seed", seed) for seed in ("7", "7", "8"))
    assert first == again and first != other


def the_causes_add_up_to_the_time():
    causes = ("compute", "fence", "proxy", "incast", "link", "latency")
    for row in rows("moe", "--cluster", "cx7", "--nodes", "2", "--tokens", "256", "--explain"):
        assert abs(sum(row[f"{cause}_us"] for cause in causes) - row["us"]) < 0.1, row


def closing_connections_changes_no_count():
    common = ("alltoall", "--cluster", "cx7", "--nodes", "4", "--policy", "in_order", "--group", "peer",
              "--outstanding", "4", "--statistics")
    few, many = (rows(*common, "--connections", most)[0] for most in ("40", "8192"))
    assert few["connections"] < many["connections"], (few["connections"], many["connections"])
    for name in ("puts", "signals", "all_work_requests", "us", "events"):
        assert few[name] == many[name], name


def a_fence_costs_what_the_network_says():
    """One put and its signal: a strict fence waits one round trip longer than none."""
    common = ("putsignal", "--cluster", "softnic-slow", "--nodes", "2", "--concurrency", "1", "--group", "coupled")
    fenced, free = (rows(*common, "--policy", policy)[0]["put_signal_us"] for policy in ("nic_fence", "in_order"))
    assert 99 < fenced - free < 101, (fenced, free)  # twice 50 us of latency


def threads_of_a_software_nic_run_one_queue_each():
    """64 KB: one queue takes as long as all its copies, three share two threads. 4 KB: the polling thread copies alone,
    and 500 ns more for a request that does not follow in memory on the one before."""
    common = ("putsignal", "--cluster", "softnic-fast", "--nodes", "4", "--peers", "1,3", "--policy", "in_order",
              "--group", "peer", "--turn", "16", "--window", "1024", "--set", "copy_gbps=50")
    long_us, short_us = (96 * size * 8 / 50e3 for size in (65536, 4096))
    one, three = (row["put_only_us"] for row in rows(*common, "--bytes", "64K"))
    assert long_us < one < 1.1 * long_us and long_us / 2 < three < 0.75 * long_us, (one, three, long_us)
    one, three = (row["put_only_us"] for row in rows(*common, "--bytes", "4K"))
    assert short_us < one < short_us + 24 and short_us + 48 < three, (one, three, short_us)


def fused_kernels_end_with_the_puts_of_their_schedule():
    """The puts that doc/results/fused-nodes-groups-4xH200.json counted on GPUs: 512, 64, 8 and 2."""
    for tiles, puts in (("1", 512), ("8", 64), ("64", 8), ("4096", 2)):
        for row in rows("fused", "--kernel", "reduce_scatter", "--cluster", "softnic-gpu", "--nodes", "2",
                        "--band-pairs", "4", "--tiles-per-signal", tiles):
            assert (row["puts"], row["signals"], row["errors"]) == (puts, puts, 0), row
    for kernel in ("allreduce", "allgather", "attention"):
        for row in rows("fused", "--kernel", kernel, "--cluster", "softnic-gpu", "--nodes", "3", "--size", "6144"):
            assert row["us"] > 0 and row["errors"] == 0


def a_signal_that_the_own_nic_raises_waits_for_no_long_message():
    """Under counted the receiver's NIC raises signals; what it sends itself meanwhile, 460 KB a put, does not hold them
    up."""
    counted, in_order = (row["us"] for row in rows("fused", "--kernel", "moe", "--cluster", "softnic-gpu", "--model",
                                                   "deepseek-v3", "--tokens", "2048", "--nodes", "2", "--band", "fast",
                                                   "--policy", "counted,in_order"))
    assert in_order <= counted < 1.1 * in_order, (counted, in_order)


def the_moe_kernel_puts_each_token_once_to_another_node():
    """2 nodes of 2 GPUs, 2048 tokens, of which some 8 go to no expert of the other node: a message to each of its 2
    ranks, a forwarding table, and 64 puts of 32 rows; a signal for each message and for each 128 rows."""
    common = ("fused", "--kernel", "moe", "--cluster", "softnic-gpu", "--model", "deepseek-v3")
    for row in rows(*common, "--nodes", "2", "--tokens", "2048"):
        assert (row["puts"], row["signals"], row["errors"]) == (2 + 1 + 64, 2 + 16, 0), row
    for row in rows(*common, "--nodes", "1,4", "--tokens", "96", "--zipf", "1.5", "--rows-per-put", "8",
                    "--rows-per-signal", "24"):
        assert row["us"] > 0 and row["errors"] == 0 and (row["puts"] == 0) == (row["nodes"] == 1), row


def relayed_rows_take_connections_between_equal_numbers_only():
    common = ("moe", "--cluster", "cx7", "--nodes", "3", "--tokens", "64", "--policy", "counted", "--group", "peer",
              "--statistics")
    direct, = rows(*common)
    relayed, = rows(*common, "--relay")
    assert (direct["connections"], relayed["connections"]) == (3 * 64, 3 * 8), (direct["connections"],
                                                                                relayed["connections"])


def a_ring_sends_each_message_once():
    """Twice (ranks - 1) steps; only the last rank of a node sends over the network, and only the first writes
    records."""
    row, = rows("nccl", "--cluster", "cx7", "--nodes", "2", "--bytes", "16M", "--slice", "256K", "--policy", "auto")
    steps = 2 * 15 * 4  # 1 MB of each of 16 ranks in slices of 256 KB
    assert row["all_work_requests"] == 2 * 2 * steps, (row["all_work_requests"], steps)
    row, = rows("nccl", "--collective", "alltoall", "--cluster", "cx7", "--nodes", "2", "--policy", "auto")
    assert row["all_work_requests"] == 2 * 16 * 8, "a put and a record for each pair on different nodes"


def a_trace_is_played_and_checked():
    with tempfile.NamedTemporaryFile("w", suffix=".trace") as file:
        file.write("# a comment\n0 0 put 8 4096 1\n0.5 0 put 8 4096 1\n1 0 signal 8 1\n"
                   "2 8 put 0 1000000 3\n2 8 signal 0 3\n")
        file.flush()
        for row in rows("trace", "--trace", file.name, "--cluster", "cx7", "--nodes", "2"):
            assert (row["puts"], row["signals"], row["errors"]) == (2, 1, 0), row
        file.write("1 0 put 8 4096 1\n")
        file.flush()
        assert "earlier than the line before" in sim("trace", "--trace", file.name, status=1).stderr
    assert "--trace FILE" in sim("trace", status=2).stderr


def a_table_has_no_column_that_its_workload_does_not_set():
    for words, bytes_column, share in ((("putsignal",), True, True), (("moe", "--tokens", "64"), False, False),
                                       (("alltoall",), True, False), (("fused", "--size", "2048"), False, False)):
        group = () if words[0] == "fused" else ("--group", "peer")
        head, *lines = sim(*words, "--policy", "in_order", *group).stdout.splitlines()[1:]
        assert [name in head.split() for name in ("bytes", "conc", "share")] == [bytes_column, share, share], head
        assert lines and all(len(line.split()) == len(head.split()) for line in lines), (head, lines)


def wrong_input_is_named():
    for arguments, text in (
            (("putsignal", "--cluster", "nowhere"), "cannot open the cluster file"),
            (("putsignal", "--set", "lunk_gbps=3"), "no parameter is called 'lunk_gbps'"),
            (("putsignal", "--set", "link_gbps=fast"), "want a number, or low..high"),
            (("putsignal", "--set", "link_gbps=5..3"), "want a number, or low..high"),
            (("putsignal", "--set", "nics_per_gpu=9"), "want 1 to 8"),
            (("putsignal", "--set", "in_order=0"), "adds without keeping order"),
            (("nothing",), "want putsignal"),
            (("fused", "--kernel", "gemm"), "gemm"),
            (("putsignal", "--ring", "100"), "a power of two")):
        assert text in sim(*arguments, status=2).stderr, arguments
    assert "keep order" in sim("putsignal", "--cluster", "efa-p5", "--policy", "in_order", status=1).stderr
    assert "want a multiple" in sim("fused", "--size", "1002", "--cluster", "softnic-gpu", status=1).stderr
    assert "want as many for each" in sim("fused", "--kernel", "moe", "--nodes", "3", "--cluster", "softnic-gpu",
                                          status=1).stderr
    assert "two nodes" in sim("putsignal", "--nodes", "1", status=1).stderr
    with tempfile.NamedTemporaryFile("w", suffix=".cluster") as file:
        file.write("# a comment\nlink_gbps\n")
        file.flush()
        assert f"{file.name}:2" in sim("moe", "--cluster", file.name, status=2).stderr


def main():
    for claim in [value for name, value in globals().items() if callable(value) and value.__doc__ is not main
                  and name.islower() and name not in ("sim", "rows", "main")]:
        claim()
        print(f"ok {claim.__name__}", flush=True)


if __name__ == "__main__":
    main()
