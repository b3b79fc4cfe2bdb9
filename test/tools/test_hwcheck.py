#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""test_hwcheck.py SOFTNIC-RUN PERSEUS-HWCHECK CLAIM: two emulated nodes check each other; what the software NIC does
must be found."""
import json
import os
import socket
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from ports import free_port  # noqa: E402
from quiet import Disturbed, best_of  # noqa: E402

LIMIT_S, SKIP = 200, 77


def check(*world, pairs=1000, more=(), **env):
    """The report, the exit status, and what was said, of a check between two nodes of such a world."""
    script = ('SOFTNIC_NODE=0 "$0" --listen --port "$1" & child=$!; port=$1; shift\n'
              'for i in $(seq 100); do SOFTNIC_NODE=1 "$0" --port "$port" "$@" >"$REPORT" 2>"$REPORT.said"; status=$?\n'
              'grep -q refused "$REPORT.said" || break; sleep 0.1; done\n'
              'cat "$REPORT.said" >&2; cat "$REPORT"; kill $child 2>/dev/null; wait $child; exit $status')
    command = [sys.argv[1], "--quiet", "--nodes", "2", *world, "--", "sh", "-c", script, sys.argv[2],
               str(free_port()), "--json", "--pairs", str(pairs), *more, "127.0.0.1"]
    with tempfile.TemporaryDirectory(prefix="hwcheck-") as folder:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False,
                              env={**os.environ, "REPORT": os.path.join(folder, "report"), **env})
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


def what_the_fence_waits_for_is_found():
    """It is told from times: unclear where others have the cores."""
    for fence, found in (("spec", "reads and atomics"), ("strict", "all earlier requests")):
        def measure():
            told, status, said = check("--latency", "500us", "--fence", fence, pairs=600)
            assert status == 0 and told["rails"][0]["latency_us"] >= 500, (told, said)
            return told["rails"][0]["fence_waits_for"]
        best_of(4, measure, lambda seen: seen == found)


def a_network_without_order_is_seen_and_counted_holds_on_it():
    told, status, said = check("--efa", "--jitter", "100us", pairs=2000)
    rail = told["rails"][0]
    assert rail["chosen"].startswith("counted ") and not policy(rail, "in_order")["write"]["ran"], rail
    assert "counted or drain" in policy(rail, "in_order")["write"]["error"], rail
    assert rail["immediate_after_write"]["ran"] and rail["immediate_after_write"]["late"] > 0, (rail, said)
    for name in ("counted", "drain"):
        assert policy(rail, name)["write"]["ran"] and policy(rail, name)["write"]["late"] == 0, rail
    assert status == 0 and told["good"], (status, said)


def a_host_that_does_not_listen_is_named():
    told, status, said = check_alone("127.0.0.1")
    assert status == 1 and told is None and "127.0.0.1 port" in said and "refused" in said and "--listen" in said, said
    told, status, said = check_alone("no.such.host.invalid")
    assert status == 1 and "no.such.host.invalid" in said, said


def check_alone(host):
    done = subprocess.run([sys.argv[1], "--quiet", "--", sys.argv[2], "--json", "--port", str(free_port()), host],
                          capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return json.loads(done.stdout) if done.stdout.strip() else None, done.returncode, done.stderr


def another_program_on_the_port_is_refused():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        with subprocess.Popen([sys.argv[1], "--quiet", "--", sys.argv[2], "--port", str(server.getsockname()[1]),
                               "127.0.0.1"],
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
