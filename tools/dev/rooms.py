#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print the calls between the rooms of transport/ as a table.

usage: rooms.py BUILD [--rooms-of TREE]. BUILD is a build folder with transport/libperseus_transport.a. A cell is the
number of pairs (calling file, called file) of which at least one symbol is used. Rooms are in the order in which they
may use each other, so a number above the diagonal is a call upwards; each is listed after the table.
--rooms-of takes the room of each file from another tree's transport/, for a build of before the rooms.
"""
import argparse
import collections
import pathlib
import re
import subprocess
import sys

ROOMS = ["util", "order", "host", "nic", "nic/verbs", "peer", "connect", "gpu"]
RENAMED = {"nic_rc": "rc", "nic_srd": "srd"}  # files that were renamed when they moved


def rooms_of_files(tree):
    """stem of a source: its room"""
    transport = pathlib.Path(tree) / "transport"
    return {path.stem: path.parent.relative_to(transport).as_posix() for path in transport.rglob("*.c")}


def symbols(archive):
    """For each object of an archive: (the symbols that it defines, those that it uses)."""
    text = subprocess.run(["nm", archive], check=True, capture_output=True, text=True).stdout
    objects, current = {}, None
    for line in text.splitlines():
        if line.endswith(".o:"):
            current = objects.setdefault(line.split("/")[-1].removesuffix(".c.o:"), (set(), set()))
        elif match := re.match(r"\s*[0-9a-f]*\s+([A-Za-z])\s+(\S+)$", line):
            kind, name = match.groups()
            if kind == "U":
                current[1].add(name)
            elif kind.isupper():
                current[0].add(name)
    return objects


def calls(build, rooms):
    """(room, room): {(file, file)}"""
    defined, used = {}, {}
    for library in ("transport/libperseus_transport.a", "transport/util/libperseus_util.a"):
        for name, (defines, uses) in symbols(pathlib.Path(build) / library).items():
            # Meson names an object by its path: order_order_cut.c.o, order.c.o before the rooms.
            stem = next((s for s in sorted(rooms, key=len, reverse=True)
                         if name in (s, f"{rooms[s].replace('/', '_')}_{s}") or RENAMED.get(name) == s), name)
            used[stem] = uses
            defined.update(dict.fromkeys(defines, stem))
    table = collections.defaultdict(set)
    for stem, uses in used.items():
        for other in {defined[name] for name in uses if name in defined} - {stem}:
            table[rooms.get(stem, "util"), rooms.get(other, "util")].add((stem, other))
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("--rooms-of", default=pathlib.Path(__file__).resolve().parents[2])
    options = parser.parse_args()
    table = calls(options.build, rooms_of_files(options.rooms_of))
    print("| calls | " + " | ".join(ROOMS) + " |")
    print("|---" * (len(ROOMS) + 1) + "|")
    for room in ROOMS:
        print(f"| {room} | " + " | ".join(str(len(table[room, other]) or "") for other in ROOMS) + " |")
    between = [(a, b) for a, b in table if a != b]
    print(f"\nwithin rooms {sum(len(table[room, room]) for room in ROOMS)}, "
          f"between rooms {sum(len(table[edge]) for edge in between)} in {len([e for e in between if table[e]])} "
          "directions")
    for a, b in sorted(between):
        if ROOMS.index(b) > ROOMS.index(a):
            for caller, called in sorted(table[a, b]):
                print(f"upwards: {a}/{caller}.c calls {b}/{called}.c")


if __name__ == "__main__":
    sys.exit(main())
