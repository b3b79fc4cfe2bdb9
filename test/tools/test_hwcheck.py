#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""test_hwcheck.py SOFTNIC-RUN PERSEUS-HWCHECK CLAIM: two emulated nodes check each other; what the software NIC does
must be found."""
import json
import os
import re
import socket
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from ports import free_port  # noqa: E402
from quiet import Disturbed, best_of  # noqa: E402

LIMIT_S, SKIP = 200, 77


def check(*world, pairs=1000, queues=1, more=(), there=(), around="", json_wanted=True, on_softnic=True, **env):
    """The report, the exit status, and what was said, of a check between two nodes of such a world. there: variables of
    the other node; around: shell commands, in which `check` stands for the check."""
    words = [sys.argv[2], "--port", str(free_port()), *(["--json"] if json_wanted else []), "--pairs", str(pairs),
             "--queues", str(queues), *more, "--launch", " ".join(["env", "SOFTNIC_NODE=0", *there]), "127.0.0.1"]
    script = 'check() { SOFTNIC_NODE=1 "$0" "$@"; }\n' + (around or 'check "$@"')
    run = [sys.argv[1], "--quiet", "--nodes", "2", *world, "--"] if on_softnic else []
    done = subprocess.run([*run, "sh", "-c", script, *words], capture_output=True, text=True, timeout=LIMIT_S,
                          check=False, env={**os.environ, **env})
    if not json_wanted:
        return done.stdout, done.returncode, done.stderr
    return json.loads(done.stdout) if done.stdout.strip() else None, done.returncode, done.stderr


def policy(rail, name):
    return next(p for p in rail["policies"] if p["policy"] == name)


def rails_that_keep_order_are_found_good():
    told, status, said = check("--nics", "2")
    assert (status == 0 and told["good"]
            and told["rails_here"] == told["rails_there"] == len(told["rails"]) == 2), (told, said)
    for rail in told["rails"]:
        assert rail["latency_us"] > 0 and rail["bandwidth_GBps"] > 0 and rail["chosen"].startswith("in_order "), rail
        assert rail["here"]["device"] and rail["there"]["device"] and rail["here"]["gid"] != rail["there"]["gid"], rail
        for one in rail["policies"]:
            for kind in ("write", "atomic"):
                assert one[kind]["ran"] and one[kind]["late"] == one[kind]["wrong"] == 0, one


def each_rail_is_tried_with_several_queues_at_once():
    told, status, said = check("--nics", "2", pairs=300, queues=4)
    assert status == 0 and told["good"] and len(told["several_queues"]) == 2, (told, said)
    for alone, loaded in zip(told["rails"], told["several_queues"]):
        assert (alone["queues"], loaded["queues"]) == (1, 4) and loaded["chosen"] == alone["chosen"], loaded
        assert loaded["here"]["rail"] == alone["here"]["rail"], loaded
        assert not alone["adds_of_all_queues"]["ran"], alone
        tried = [loaded[name] for name in ("immediate_after_write", "empty_write", "adds_of_all_queues")]
        for one in tried + [one[kind] for one in loaded["policies"] for kind in ("write", "atomic")]:
            assert one["ran"] and one["late"] == one["wrong"] == 0, (one, loaded)
    text, status, said = check(pairs=300, queues=3, json_wanted=False)
    assert status == 0 and "rail 0 <-> rail 0, 3 queues at once:\n" in text, (text, said)
    assert re.search("adds of all queues to one word: +none of 300 was lost\n", text), (text, said)
    told, status, said = check(pairs=300)
    assert status == 0 and not told["several_queues"], (told, said)
    # What is wrong with several queues is a fault, also where nothing else is.
    told, status, said = check("--odd-empty", pairs=300, queues=2)
    assert status == 1 and told["several_queues"][0]["empty_write"]["wrong"] == 300, (told, said)


def empty_writes_are_tried():
    """They carry an immediate and no bytes. A NIC that says otherwise is found."""
    told, status, said = check("--nics", "2", pairs=300)
    assert status == 0 and all(told[key]["empty_write"]["ran"] for key in ("all_rails",)), (told, said)
    for rail in told["rails"]:
        assert rail["empty_write"]["ran"] and rail["empty_write"]["late"] == rail["empty_write"]["wrong"] == 0, rail
    told, status, said = check("--odd-empty", pairs=300)
    rail = told["rails"][0]
    assert status == 1 and not told["good"] and rail["empty_write"]["wrong"] == 300, (rail, said)
    assert rail["immediate_after_write"]["wrong"] == 0, "writes with bytes have their sizes"
    text, status, said = check("--odd-empty", pairs=300, json_wanted=False)
    assert status == 1 and re.search("empty write too.*BROKEN: 0 of 300 late, 300 wrong", text), (text, said)


def adds_that_the_cpu_loses_are_found():
    """The software NIC of another process reads a word and writes the sum, so it loses adds of the CPU. Where the
    receiver raises signals itself, none can be lost. It is no fault: IBV_ATOMIC_HCA promises no more."""
    def lost():
        told, status, said = check(pairs=5000)
        rail = told["rails"][0]
        assert status == 0 and told["good"] and rail["adds_beside_cpu"]["ran"], (rail, said)
        return rail["adds_beside_cpu"]["wrong"]
    best_of(6, lost, lambda seen: seen > 0)
    told, status, said = check(pairs=5000, there=("PERSEUS_ORDER=counted",), PERSEUS_ORDER="counted")
    rail = told["rails"][0]
    assert status == 0 and rail["chosen"].startswith("counted "), (rail, said)
    assert rail["adds_beside_cpu"]["ran"] and not rail["adds_beside_cpu"]["wrong"], rail
    text, status, said = check(pairs=5000, json_wanted=False)
    wanted = "adds of the NIC and of the CPU to one word: +(LOST: [0-9]+; only one of both|none was lost)"
    assert re.search(wanted, text), (text, said)


def what_nics_claim_of_their_atomics_is_told():
    """Beside what was measured: a claim that does not hold is a fault, and what holds without one is not promised. The
    NIC of the receiver counts."""
    heading = "adds of the NIC and of the CPU to one word: +"
    for words, claim, text_wanted, beside in (
            (("--atomic-cap", "glob"), "cpu", "also with the CPU (GLOB)", "none was lost, as .* claims .GLOB."),
            ((), "nic", "among the NIC's own requests (HCA)", "none was lost; not promised: .* HCA"),
            (("--atomic-cap", "none"), "none", "none", "none was lost; the NIC there has no atomics, so the CPU adds")):
        # Under `counted` the receiver's own NIC adds, in place, so nothing is lost.
        env = {"there": ("PERSEUS_ORDER=counted",), "PERSEUS_ORDER": "counted"}
        told, status, said = check(*words, pairs=200, **env)
        sides = [told["rails"][0][side]["atomics"] for side in ("here", "there")]
        assert status == 0 and told["good"] and sides == [claim, claim], (told, said)
        text, status, said = check(*words, pairs=200, json_wanted=False, **env)
        assert status == 0 and f"atomics claimed: {text_wanted}; there: {text_wanted}\n" in text, (text, said)
        assert re.search(heading + beside, text), (text, said)

    def broken():
        told, status, said = check("--atomic-cap", "glob", "--nics", "2", pairs=5000)
        lost = [rail["adds_beside_cpu"]["wrong"] > 0 for rail in (*told["rails"], told["all_rails"])]
        assert told["good"] == (status == 0) == (not any(lost)), (told, said)
        return lost
    best_of(6, broken, any)

    def said_broken():
        text, status, said = check("--atomic-cap", "glob", pairs=5000, json_wanted=False)
        found = re.search(heading + "BROKEN, LOST: [0-9]+; only one of both .* whatever the NIC there claims", text)
        assert bool(found) == (status == 1), (text, said)
        return found
    best_of(6, said_broken, bool)


def what_the_fence_waits_for_is_found():
    """It is told from times: unclear where others have the cores."""
    for fence, found in (("spec", "reads and atomics"), ("strict", "all earlier requests")):
        def measure():
            told, status, said = check("--latency", "500us", "--fence", fence, pairs=600)
            assert status == 0 and told["rails"][0]["latency_us"] >= 500, (told, said)
            return told["rails"][0]["fence_waits_for"]
        best_of(4, measure, lambda seen: seen == found)


def a_network_without_order_is_seen_and_counted_holds_on_it():
    told, status, said = check("--efa", "--jitter", "500us", pairs=500, queues=4)
    rail = told["rails"][0]
    assert rail["chosen"].startswith("counted ") and not policy(rail, "in_order")["write"]["ran"], rail
    assert rail["there"]["atomics"] == "none" and not rail["adds_beside_cpu"]["wrong"], rail
    assert "counted or drain" in policy(rail, "in_order")["write"]["error"], rail
    assert rail["immediate_after_write"]["ran"] and rail["immediate_after_write"]["late"] > 0, (rail, said)
    for name in ("counted", "drain"):
        assert policy(rail, name)["write"]["ran"] and policy(rail, name)["write"]["late"] == 0, rail
    assert status == 0 and told["good"], (status, said)
    loaded = told["several_queues"][0]
    assert all(policy(loaded, name)["atomic"]["ran"] for name in ("counted", "drain")), loaded
    assert loaded["adds_of_all_queues"]["ran"] and not loaded["adds_of_all_queues"]["wrong"], loaded


def hosts_with_unlike_rails_are_checked():
    """One rail there, two here: each rail has a partner, and all rails work together. Pairs that were not checked are
    looked at when asked for."""
    told, status, said = check("--nics", "2", pairs=100, there=("NCCL_IB_HCA==softnic1:1",))
    pairs = [(rail["here"]["rail"], rail["there"]["rail"]) for rail in told["rails"]]
    assert status == 0 and told["good"] and pairs == [(0, 0), (1, 0)], (told, said)
    assert {rail["there"]["device"] for rail in told["rails"]} == {"softnic1:1"}, told
    assert told["all_rails"]["immediate_after_write"]["ran"] and "to softnic1:1" in told["all_rails"]["path"], told
    told, status, said = check("--nics", "2", pairs=100, more=("--all-pairs",))
    others = [(pair["here"], pair["there"]) for pair in told["other_pairs"]]
    assert status == 0 and others == [(0, 1), (1, 0)], said
    assert all(pair["latency"]["ran"] for pair in told["other_pairs"]), told
    assert told["all_rails"]["chosen"].startswith("counted "), told["all_rails"]
    assert sum(one["write"]["ran"] for one in told["all_rails"]["policies"]) == 1, told["all_rails"]


def what_the_network_does_is_told():
    """Settings and counters as drivers show them below /sys/class/infiniband, which is writable in a world. The other
    node's is the same folder."""
    around = """set -e; port=/sys/class/infiniband/softnic1; rm $port/device
        mkdir -p $port/ports/1/hw_counters $port/tc/1 $port/device/net/eth7/ecn/roce_np/enable
        cd $port/device/net/eth7 && echo 4200 >mtu && echo 1 >ecn/roce_np/enable/3 && echo 0 >ecn/roce_np/enable/0
        echo "Global tclass=96" >$port/tc/1/traffic_class; cd "$OLDPWD"
        counters=$port/ports/1/hw_counters; echo 9 >$counters/packet_seq_err
        (n=0; while :; do n=$((n + 1)); echo $n >$port/next && mv $port/next $counters/np_cnp_sent; sleep 0.01; done) &
        loop=$!
        while ! [ -e $counters/np_cnp_sent ]; do sleep 0.01; done
        set +e; check "$@"; status=$?; kill $loop; exit $status"""
    told, status, said = check(pairs=1000, there=("NCCL_IB_TC=8",), around=around, NCCL_IB_TC="106")
    assert status == 0 and told["good"], (told, said)
    here, there = told["rails"][0]["here"], told["rails"][0]["there"]
    assert here["path_mtu"] == there["path_mtu"] == 4096, told
    assert (here["network_mtu"], there["network_mtu"]) == (4200, 0), told
    assert (here["traffic_class"], there["traffic_class"]) == (106, 8), told
    assert here["settings"] == ("the device sets the class of all packets: Global tclass=96; "
                                "ECN is notified on priorities 3") and not there["settings"], told
    assert here["counters"] == 2 and re.fullmatch(r"ECN: np_cnp_sent \+\d+", here["counters_grown"]), here
    assert there["counters"] == 0 and not there["counters_grown"], there
    text, status, said = check(pairs=300, there=("NCCL_IB_TC=8",), json_wanted=False, NCCL_IB_TC="106")
    wanted = "traffic class 106 (DSCP 26); there 8 (DSCP 2): NCCL_IB_TC must be the same"
    assert status == 0 and wanted in text, (text, said)


def strangers_are_refused_and_the_check_goes_on():
    port = str(free_port())
    run = [sys.argv[1], "--quiet", "--name", f"hwcheck{os.getpid()}", "--", sys.argv[2]]
    with subprocess.Popen([*run, "--listen", "--bind", "127.0.0.1", "--port", port],
                          stderr=subprocess.PIPE, text=True) as server:
        said = [server.stderr.readline(), server.stderr.readline()]
        command = said[1].split()
        assert command[0] == "perseus-hwcheck" and command[-1] == "127.0.0.1" and command[1:3] == ["--port", port], said
        ask = [*run, "--pairs", "100"]
        with socket.create_connection(("127.0.0.1", int(port))) as stranger:
            stranger.sendall(b"GET / ")
        wrong = subprocess.run([*ask, "--port", port, "--cookie", "0123", "127.0.0.1"], capture_output=True, text=True,
                               timeout=LIMIT_S, check=False)
        assert wrong.returncode == 1 and "wrong cookie" in wrong.stderr and not wrong.stdout, wrong
        right = subprocess.run([*ask, *command[1:]], capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert right.returncode == 0 and "all that Perseus relies on held" in right.stdout, right
        said = server.stderr.read()
        assert server.wait(LIMIT_S) == 0 and "another cookie" in said, said
        assert said.count("refused the client at 127.0.0.1: ") == 2, said


def a_provider_of_libfabric_is_checked_too():
    for provider in ("net", "tcp"):
        told, status, said = check(pairs=300, queues=2, on_softnic=False, PERSEUS_PROVIDER=provider, NCCL_IB_HCA="=lo",
                                   NCCL_SOCKET_IFNAME="lo")
        if told and told["rails"]:
            break
    if "libfabric.so.1" in said or not told or not told["rails"]:
        print(f"skipped: neither of libfabric's providers net and tcp is here: {said}")
        sys.exit(SKIP)
    rail = told["rails"][0]
    assert status == 0 and told["good"] and rail["here"]["device"] == "lo:1", (told, said)
    assert rail["here"]["network_mtu"] > 0 and rail["here"]["counters"] > 0, rail["here"]
    assert rail["here"]["atomics"] == rail["there"]["atomics"] == "nic", rail
    assert told["several_queues"][0]["adds_of_all_queues"]["ran"], told
    assert policy(rail, "counted")["atomic"]["ran"] and not policy(rail, "nic_fence")["write"]["ran"], rail


def a_host_that_does_not_listen_is_named():
    told, status, said = check_alone("127.0.0.1")
    assert status == 1 and told is None and "127.0.0.1 port" in said and "refused" in said and "--listen" in said, said
    told, status, said = check_alone("no.such.host.invalid")
    assert status == 1 and "no.such.host.invalid" in said, said
    alone = ("unshare", "-rn")
    if subprocess.run([*alone, "true"], stderr=subprocess.DEVNULL, check=False).returncode == 0:
        told, status, said = check_alone("192.0.2.1", *alone)
        assert status == 1 and "192.0.2.1 port" in said and "unreachable: is the address right, and is there a route" \
            in said, said


def rails_without_a_way_are_named_soon():
    """Each trial would wait for half a minute. One is enough, and the side that waits is told."""
    begin = time.monotonic()
    told, status, said = check("--loss", "100%", "--nics", "2", pairs=100, queues=4)
    took = time.monotonic() - begin
    assert status == 1 and not told["good"] and took < 100, (took, told, said)
    for rail in (*told["rails"], told["all_rails"]):
        assert "retry counter exceeded" in rail["error"] and not rail["latency_us"], rail
        assert not any(one["write"]["ran"] for one in rail["policies"]), rail
    assert not told["several_queues"], told
    text, status, said = check("--loss", "100%", pairs=100, json_wanted=False)
    assert status == 1 and "  not reachable: transport retry counter exceeded" in text, (text, said)


def check_alone(host, *around):
    done = subprocess.run([sys.argv[1], "--quiet", "--", *around, sys.argv[2], "--json", "--port", str(free_port()),
                           "--cookie", "1", host], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return json.loads(done.stdout) if done.stdout.strip() else None, done.returncode, done.stderr


def another_program_on_the_port_is_refused():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        with subprocess.Popen([sys.argv[1], "--quiet", "--", sys.argv[2], "--port", str(server.getsockname()[1]),
                               "--cookie", "1", "127.0.0.1"],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as client:
            one, _ = server.accept()
            with one:
                one.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 400)
                said = client.communicate(timeout=LIMIT_S)[1]
    assert client.returncode == 1 and "another program" in said, said


try:
    globals()[sys.argv[3]]()
except Disturbed as reason:
    print(f"skipped: {reason}")
    sys.exit(SKIP)
