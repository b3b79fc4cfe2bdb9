#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A message must not cost more instructions than instructions.json says, for the compiler and options that it names.

usage: instructions.py SOFTNIC_RUN PEERS LIBPERSEUS ISENDS PLUGIN BUILD_NAME [--save]. Counted are those of the library
itself, by callgrind, both ends of a connection in one thread: the same in each run, also on a busy machine. Connecting
drops out, since two numbers of messages are compared. --save writes what was counted. Without valgrind, or with another
compiler or other options (BUILD_NAME), it is skipped (77).
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools/netbench"))
from compare import own_instructions  # noqa: E402

NUMBERS = pathlib.Path(__file__).with_name("instructions.json")
MORE = 0.03  # than the number of the file: a change that costs this much is to be seen in a review
FEW, MANY = 104, 1000  # messages of a run; at most SIGNALS of peers.c
TRIES = 3  # of a message that costs too many


def skip(why):
    print(f"skipped: {why}")
    sys.exit(77)


def counted(softnic_run, library, command):
    """Instructions of one run in the library, within use()."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "out")
        done = subprocess.run([softnic_run, "--quiet", "--nics", "2", "--", "valgrind", "-q", "--tool=callgrind",
                               "--toggle-collect=use", f"--callgrind-out-file={out}", *command],
                              capture_output=True, text=True, check=False)
        if done.returncode == 77:
            skip("no device is usable")
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return own_instructions(out, library)


def messages(peers, libperseus, isends, plugin):
    """{what: library, connections that send, command for so many messages}."""
    rows = {f"put of 64 bytes and signal, {policy}": (libperseus, 2, lambda n, policy=policy:
                                                      [peers, "2", policy, "1000", str(n)])
            for policy in ("counted", "in_order", "drain")}
    # Longer ones are copied by a thread of the software NIC, and the number of polls until then is chance.
    return {**rows, "isend of 64 bytes": (plugin, 1, lambda n: [isends, plugin, str(n), "64"]),
            "isend of 64 bytes, two rails": (plugin, 1, lambda n: [isends, plugin, str(n), "64", "2"])}


def measure(softnic_run, library, connections, command):
    """Instructions of one message at both ends."""
    few, many = (counted(softnic_run, library, command(number)) for number in (FEW, MANY))
    return round((many - few) / (connections * (MANY - FEW)), 1)


def main():
    *programs, build = sys.argv[1:7]
    known = json.loads(NUMBERS.read_text())
    wanted = known.get(build)
    if not shutil.which("valgrind"):
        skip("no program valgrind")
    if not wanted and "--save" not in sys.argv:
        skip(f"no numbers for {build}: there are those of {', '.join(known)}")
    softnic_run, *programs = programs
    found, failed = {}, False
    for what, row in messages(*programs).items():
        found[what] = measure(softnic_run, *row)
        if "--save" in sys.argv:
            continue
        limit = wanted[what] * (1 + MORE)
        for _ in range(TRIES - 1):  # a thread of the NIC may have been late
            if found[what] > limit:
                found[what] = min(found[what], measure(softnic_run, *row))
        failed |= found[what] > limit
        print(f"{'FAILED' if found[what] > limit else 'ok':6} {what}: {found[what]} instructions, "
              f"{100 * (found[what] / wanted[what] - 1):+.1f} % (at most {100 * MORE:+.0f} %)")
    if "--save" in sys.argv:
        NUMBERS.write_text(json.dumps({**known, build: found}, indent=2) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
