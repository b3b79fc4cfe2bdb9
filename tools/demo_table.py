#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""demo_table.py FIRST LAST FACTOR: perseus-netbench's JSON lines, from stdin, as a table. Exit 1 if a row has errors,
or if one of the sizes from FIRST to LAST bytes, each FACTOR times the one before, is missing."""
import json
import sys


def number(text):
    if not text.isdecimal():
        sys.exit(f"demo_table.py: {text!r} is no number")
    return int(text)


def main(first, last, factor):
    wrong, want = 0, first
    if factor < 2:
        sys.exit(f"demo_table.py: FACTOR {factor}: want 2 or more")
    print(f"{'bytes':>12} {'time (us)':>12} {'p99 (us)':>12} {'busbw (GB/s)':>13} {'errors':>7}", flush=True)
    for at, line in enumerate(sys.stdin, 1):
        if not line.startswith("{"):
            continue
        try:
            row = json.loads(line)
            print(f"{row['bytes']:12d} {row['usec_p50']:12.1f} {row['usec_p99']:12.1f} {row['busbw_GBps']:13.3f} "
                  f"{row['errors']:7d}", flush=True)
        except KeyError as e:
            sys.exit(f"demo_table.py: <stdin>, line {at}: no {e}")
        except (ValueError, TypeError) as e:
            sys.exit(f"demo_table.py: <stdin>, line {at}: {e}")
        wrong += row["errors"]
        if row["bytes"] == want:
            want *= factor
    if want <= last:
        print(f"no result for {want} bytes")
    return 1 if wrong or want <= last else 0


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] == "--help":
        sys.exit(__doc__)
    sys.exit(main(*map(number, sys.argv[1:])))
