#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""test_info.py SOFTNIC-RUN PERSEUS-INFO [efa]: what perseus-info prints with rails, without rails, and with a wrong
setting."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile

failed = 0


def report(good, claim, detail):
    global failed
    failed += not good
    print("ok" if good else "FAIL", claim, "" if good else detail, flush=True)


def run(command, **env):
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, **env})
    return done.returncode, done.stdout, done.stderr


def main():
    softnic, info = sys.argv[1:3]
    world = [softnic, "--quiet", "--nics", "2", "--", info]
    status, text, said = run([*world, "--json"])
    told = json.loads(text)
    report(status == 0 and [rail["port"] for rail in told["rails"]] == [1, 1] and told["error"] == "", "two rails",
           text + said)
    report(all(rail["speed_mbps"] > 0 and rail["gid"] and "host" in rail["memory"] for rail in told["rails"]),
           "each rail has a speed, a GID and its kinds of memory", text)
    report(told["policy"].startswith("counted (several queues"), "a peer over two rails is counted, and why",
           told["policy"])
    status, text, _ = run([softnic, "--quiet", "--nics", "1", "--", info, "--json"])
    report(json.loads(text)["policy"].startswith("in_order ("),
           "a peer over one rail keeps the NIC's order, and why", text)
    status, text, _ = run([*world, "--json"], PERSEUS_ORDER="drain")
    report(json.loads(text)["policy"].startswith("drain"), "a forced policy is the policy", text)
    status, text, _ = run(world)
    report(status == 0 and all(rail["name"] in text for rail in told["rails"]), "the text names the rails too", text)
    efa = [softnic, "--quiet", "--efa", "--", info]
    if sys.argv[3:] == ["efa"]:
        status, text, _ = run([*efa, "--json"])
        told = json.loads(text)
        report(status == 0 and told["rails"][0]["queues"] == "srd" and told["rails"][0]["link"] == "EFA",
               "an EFA has SRD queues", text)
        report(told["policy"].startswith("counted (the queues do not keep order"), "its signals are counted, and why",
               told["policy"])
        status, text, _ = run([*efa, "--json"], PERSEUS_ORDER="nic_fence")
        report("counted or drain" in json.loads(text)["policy"], "what it cannot keep is refused", text)
        status, text, _ = run([*efa, "--json"], NCCL_IB_GID_INDEX="3", NCCL_IB_ADDR_RANGE="10.0.0.0/8")
        report(status == 0 and json.loads(text)["rails"][0]["gid_index"] == 0,
               "its only GID is used, whatever the settings for RoCE are", text)
    else:
        status, text, _ = run(efa)
        report(status == 1 and "passed over: an EFA" in text and "-Defa" in text,
               "an EFA is passed over, and why", text)
    status, text, _ = run(world, NCCL_IB_GID_INDEX="77")
    report(status == 1 and "GID 77" in text, "a GID that is not there is named", text)
    status, text, _ = run([*world, "--json"], NCCL_IB_HCA="nosuch")
    told = json.loads(text)
    report(status == 1 and not told["rails"] and any("fix" in p and p["fix"] for p in told["problems"]),
           "without a rail it fails, and says what to do", text)
    status, text, _ = run([*world, "--json"], PERSEUS_ORDER="soon")
    report(status == 1 and "PERSEUS_ORDER=soon" in json.loads(text)["error"], "an impossible value is named", text)
    status, _, said = run([*world, "--nonsense"])
    report(status == 2 and "'--nonsense' is not an option" in said, "an unknown option is refused", said)
    status, text, _ = run([*world, "--json"])
    report(status == 0 and " (first by preference" in json.loads(text)["interface"],
           "the interface of handshakes is named, with the reason", text)
    status, text, _ = run([*world, "--json"], NCCL_SOCKET_IFNAME="=lo")
    report(json.loads(text)["interface"].startswith("lo 127.0.0.1 (admitted"), "a named interface is taken", text)
    status, text, _ = run([*world, "--json"], PERSEUS_ORDER="nonsense")
    report([p["class"] for p in json.loads(text)["problems"]] == ["setting"],
           "a wrong setting is a problem of that class, and the only one", text)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("libnccl-net.so", "libnccl-net-perseus.so", "libnccl-netless.so"):
            pathlib.Path(folder, name).touch()
        # The launcher puts its own folders before this one.
        command = [softnic, "--quiet", "--", "sh", "-c",
                   f'LD_LIBRARY_PATH="$LD_LIBRARY_PATH:{folder}" exec "$0" --json', info]
        status, text, _ = run(command)
        told = json.loads(text)
        here = {p["path"]: p["perseus"] for p in told["plugins"] if folder in p["path"]}
        report(status == 0 and here == {f"{folder}/libnccl-net-perseus.so": True, f"{folder}/libnccl-net.so": False},
               "net plugins on the linker's path are named", text)
        report(any(p["class"] == "plugin" and f"{folder}/libnccl-net.so" in p["what"] for p in told["problems"]),
               "one that NCCL would load by itself is a problem", text)
        report("absolute path" in text, "the fix is an absolute path", text)
        pathlib.Path(folder, "libnccl-net.so").write_bytes(b"\x7fELF" + 5000 * b"x" + b"libnccl-net-perseus.so\0")
        told = json.loads(run(command)[1])
        report(not any(p["class"] == "plugin" for p in told["problems"]),
               "a copy of Perseus under that name is none", told)
        status, text, _ = run(command, NCCL_NET_PLUGIN="perseus")
        report(not any(p["class"] == "plugin" for p in json.loads(text)["problems"]),
               "not where NCCL is told which one to load", text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
