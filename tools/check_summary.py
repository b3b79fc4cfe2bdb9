#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_summary.py suites [WITHOUT]: the names of the suites in what "meson introspect --tests" prints, from stdin.
check_summary.py left_out: how many of these tests only the complete form runs.
check_summary.py suite NAME LOG: one line about a suite, from Meson's testlog.json.
check_summary.py report NAME LOG: what failed (with the end of its output) and what was skipped (with its reason); exit 1 if a test
failed.
check_summary.py total N LOG...: the one line "N passed, N failed, N skipped" over all logs, where the first N, and each suite of
which no test ran, are added to the failed; exit 1 if that is not zero, or if nothing passed."""
import collections
import json
import sys

KIND = {"OK": "passed", "EXPECTEDFAIL": "passed", "SKIP": "skipped"}  # all else, a timeout too, has failed
TAIL_LINES = 60
COMPLETE_ONLY = ("long", "rxe")  # suites of the complete form; "long" is always the second suite of a test
MAY_BE_SKIPPED = ("gpu", "rxe")  # suites that need what a machine may lack; any other suite that runs no test is broken


def tests(log):
    with open(log, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            test = json.loads(line)
            yield test, KIND.get(test["result"], "failed")


def suite_and_name(test):
    """Meson 1.0 writes "project:suite / name", and "project:suite+suite / name" for several."""
    suite, slash, name = test["name"].partition(" / ")
    return (suite.split(":")[-1], name) if slash else ("", suite)


def suites_of(test):
    return [name.split(":")[-1] for name in test["suite"]]


def output(test):
    return [line for key in ("stdout", "stderr") for line in (test.get(key) or "").splitlines() if line.strip()]


def suites(without=""):
    """In the order in which they are defined: the quick ones first."""
    names = [name for test in json.load(sys.stdin) for name in suites_of(test)]
    print(" ".join(name for name in dict.fromkeys(names) if name not in (without, "long")))
    return 0


def left_out():
    print(sum(any(name in COMPLETE_ONLY for name in suites_of(test)) for test in json.load(sys.stdin)))
    return 0


def count(log):
    return collections.Counter(kind for _, kind in tests(log))


def ran_nothing(name, kinds):
    return name not in MAY_BE_SKIPPED and not kinds["passed"] and not kinds["failed"]


def suite(name, log):
    kinds = count(log)
    print(f"{name}: {kinds['passed']} passed, {kinds['failed']} failed, {kinds['skipped']} skipped"
          + (": FAILED, no test ran" if ran_nothing(name, kinds) else ""))
    return 0


def report(name, log):
    for test, kind in tests(log):
        _, title = suite_and_name(test)
        if kind == "failed":
            print(f"   {test['result']} {title} ({test['duration']:.0f} s)")
            print("\n".join("      | " + line for line in output(test)[-TAIL_LINES:] or ["(it printed nothing)"]))
        if kind == "skipped":
            print(f"   skipped: {title}: {(output(test) or ['no reason given'])[-1].strip()}")
    return count(log)["failed"] > 0


def total(steps_failed, logs):
    kinds = collections.Counter(failed=int(steps_failed))
    for log in logs:
        mine = count(log)
        kinds.update(mine)
        kinds["failed"] += ran_nothing(log.removesuffix(".json").rpartition("-")[2], mine)
    print(f"{kinds['passed']} passed, {kinds['failed']} failed, {kinds['skipped']} skipped")
    return kinds["failed"] > 0 or kinds["passed"] == 0


if __name__ == "__main__":
    sys.exit(total(sys.argv[2], sys.argv[3:]) if sys.argv[1] == "total" else {"suites": suites, "left_out": left_out, "suite": suite, "report": report}[sys.argv[1]](*sys.argv[2:]))
