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

ROOMS = ["util", "order", "host", "nic", "nic/verbs", "nic/ofi", "peer", "connect", "gpu"]
RENAMED = {"nic_rc": "rc", "nic_srd": "srd"}  # files that were renamed when they moved


def files_of(tree):
    """The sources of a tree's transport/, as ROOM/STEM."""
    transport = pathlib.Path(tree) / "transport"
    files = sorted(path.relative_to(transport).with_suffix("").as_posix() for path in transport.rglob("*.c"))
    if missing := {room_of(file) for file in files} - {*ROOMS}:
        raise SystemExit(f"rooms.py: ROOMS lacks {', '.join(sorted(missing))}")
    return files


def room_of(file):
    return file.rpartition("/")[0]


def file_of(name, files):
    """The source of an object, which Meson names by its path (nic_ofi_link), or link in a build of before the rooms."""
    stem = RENAMED.get(name, name)
    whole = [file for file in files if file.replace("/", "_") == name]
    return next(iter(whole + [file for file in files if file.rpartition("/")[2] == stem]), f"util/{name}")


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


def calls(build, files):
    """(room, room): {(file, file)}"""
    defined, used = {}, {}
    for library in ("transport/libperseus_transport.a", "transport/util/libperseus_util.a"):
        for name, (defines, uses) in symbols(pathlib.Path(build) / library).items():
            file = file_of(name, files)
            used[file] = uses
            defined.update(dict.fromkeys(defines, file))
    table = collections.defaultdict(set)
    for file, uses in used.items():
        for other in {defined[name] for name in uses if name in defined} - {file}:
            table[room_of(file), room_of(other)].add((file, other))
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("--rooms-of", default=pathlib.Path(__file__).resolve().parents[2])
    options = parser.parse_args()
    if not (pathlib.Path(options.build) / "transport/libperseus_transport.a").exists():
        parser.error(f"{options.build}: no build folder with transport/libperseus_transport.a (ninja -C BUILD)")
    if not (pathlib.Path(options.rooms_of) / "transport").is_dir():
        parser.error(f"--rooms-of {options.rooms_of}: no transport/ there")
    table = calls(options.build, files_of(options.rooms_of))
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
                print(f"upwards: {caller}.c calls {called}.c")


if __name__ == "__main__":
    sys.exit(main())
