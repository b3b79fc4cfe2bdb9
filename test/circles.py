#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fail when sources of the transport call each other in a circle: then none of them can be read, or tested, without the
others.

usage: circles.py ARCHIVE. Reads the symbols of the objects (nm). tools/dev/rooms.py prints which room uses which.
"""
import collections
import re
import subprocess
import sys

# The tables of back ends. To choose one is no call: opening a device, which the table itself offers, decides which
# table drives it.
TABLES = {"prs_nic_rc", "prs_nic_srd", "prs_nic_ofi", "prs_ofi_tables"}


def uses(archive):
    """{source: {source that it uses: symbols}}"""
    text = subprocess.run(["nm", archive], capture_output=True, text=True, check=True).stdout
    defined, wanted, source = {}, collections.defaultdict(set), ""
    for line in text.splitlines():
        member = re.match(r"(?:.*/)?([\w.-]+)\.c(?:\.\w+)?\.o:$", line)
        fields = line.split()
        if member:
            source = member.group(1)
        elif len(fields) >= 2 and fields[-2] == "U":
            wanted[source].add(fields[-1])
        elif len(fields) >= 2 and fields[-2] in "TDBRVC":
            defined[fields[-1]] = source
    found = {name: collections.defaultdict(set) for name in set(defined.values()) | set(wanted)}
    for name, symbols in wanted.items():
        for symbol in (symbols & defined.keys()) - TABLES:
            if defined[symbol] != name:
                found[name][defined[symbol]].add(symbol)
    return found


def reached(found, start):
    seen, left = set(), [start]
    while left:
        for name in found[left.pop()]:
            if name not in seen:
                seen.add(name)
                left.append(name)
    return seen


def circles(found):
    after = {name: reached(found, name) for name in found}
    return {frozenset(other for other in after[name] if name in after[other]) for name in found if name in after[name]}


def main():
    found = uses(sys.argv[1])
    if len(found) < 40:
        print(f"{sys.argv[1]}: the symbols of {len(found)} sources only: are these the objects of the transport?")
        return 1
    closed = circles(found)
    for circle in closed:
        print("a circle of calls:", ", ".join(sorted(circle)))
        for a in sorted(circle):
            for b in sorted(circle & found[a].keys()):
                print(f"  {a} uses {', '.join(sorted(found[a][b]))} of {b}")
    return 1 if closed else 0


if __name__ == "__main__":
    sys.exit(main())
