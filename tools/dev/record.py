#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Keep the JSON lines of a measurement as doc/results/NAME.json, with what is needed to repeat it.

usage: some-command --json | tools/dev/record.py NAME --machine "2 x H200" --command "some-command --json" [--commit C]
       [--note TEXT]
Lines that are not JSON objects are left out; nothing on standard input is an error.
"""
import argparse
import datetime
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name")
    parser.add_argument("--machine", required=True)
    parser.add_argument("--command", required=True)
    parser.add_argument("--commit", help="of what was measured (default: HEAD)")
    parser.add_argument("--note", default="")
    args = parser.parse_args()
    if not re.fullmatch(r"[\w.-]+", args.name):
        parser.error(f"NAME {args.name!r}: want letters, digits, '-', '_' and '.'")
    found = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short=12", f"{args.commit or 'HEAD'}^{{commit}}"],
                           capture_output=True, text=True, check=False)
    if found.returncode != 0:
        parser.error(f"--commit {args.commit}: {found.stderr.strip()}")
    commit = args.commit or found.stdout.strip()
    rows = []
    for number, line in enumerate(sys.stdin, 1):
        try:
            rows += [json.loads(line)] if line.lstrip().startswith("{") else []
        except ValueError as e:
            sys.exit(f"record: <stdin>, line {number}: not JSON: {e}")
    if not rows:
        sys.exit("record: no JSON object on standard input")
    head = {"date": datetime.date.today().isoformat(), "commit": commit, "machine": args.machine,
            "command": args.command}
    if args.note:
        head["note"] = args.note
    body = ",\n".join("    " + json.dumps(row) for row in rows)
    text = json.dumps(head, indent=2)[:-2] + ',\n  "rows": [\n' + body + "\n  ]\n}\n"
    json.loads(text)
    path = ROOT / "doc/results" / (args.name + ".json")
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    print(f"{path.relative_to(ROOT)}: {len(rows)} rows")


if __name__ == "__main__":
    main()
