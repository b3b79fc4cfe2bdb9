#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_summary.py report LOG: what failed (with the end of its output) and what was skipped (with its reason), from the
testlog.json of one Meson build; exit 1 if a test failed.
check_summary.py total N LOG...: the one line "N passed, N failed, N skipped" over all logs, where the first N is added to the
failed; exit 1 if that is not zero, or if nothing passed."""
import collections
import json
import sys

KIND = {"OK": "passed", "EXPECTEDFAIL": "passed", "SKIP": "skipped"}  # all else, a timeout too, has failed
TAIL_LINES = 60


def tests(log):
    with open(log, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            test = json.loads(line)
            yield test, KIND.get(test["result"], "failed")


def suite_and_name(test):
    """Meson 1.0 writes "project:suite / name", and "project:suite+suite / name" for several."""
    suite, slash, name = test["name"].partition(" / ")
    return (suite.split(":")[-1], name) if slash else ("", suite)


def output(test):
    return [line for key in ("stdout", "stderr") for line in (test.get(key) or "").splitlines() if line.strip()]


def report(log):
    suites = collections.defaultdict(collections.Counter)
    for test, kind in tests(log):
        suite, name = suite_and_name(test)
        suites[suite][kind] += 1
        if kind == "failed":
            print(f"   {test['result']} {name} ({test['duration']:.0f} s)")
            print("\n".join("      | " + line for line in output(test)[-TAIL_LINES:] or ["(it printed nothing)"]))
        if kind == "skipped":
            print(f"   skipped: {name}: {(output(test) or ['no reason given'])[-1].strip()}")
    for suite, kinds in sorted(suites.items()):
        print(f"   {suite}: " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
    return any(kinds["failed"] for kinds in suites.values())


def total(steps_failed, logs):
    kinds = collections.Counter(failed=int(steps_failed))
    for log in logs:
        kinds.update(kind for _, kind in tests(log))
    print(f"{kinds['passed']} passed, {kinds['failed']} failed, {kinds['skipped']} skipped")
    return kinds["failed"] > 0 or kinds["passed"] == 0


if __name__ == "__main__":
    sys.exit(report(sys.argv[2]) if sys.argv[1] == "report" else total(sys.argv[2], sys.argv[3:]))
