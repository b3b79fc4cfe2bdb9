#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_summary.py suites [WITHOUT]: the names of the suites in what "meson introspect --tests" prints, from stdin.
check_summary.py left_out: how many of these tests only the complete form runs.
check_summary.py report LOG: of Meson's testlog.json a line a suite, what failed (why, and the end of its output), what
was skipped (with its reason), and the slowest tests; exit 1 if a test failed, or none of a suite ran.
check_summary.py total FAILED SKIPPED LOG...: what failed, by name, then the one line "N passed, N failed, N skipped",
over all logs (BUILD.json), with that many more of each. Each suite of which no test ran is one more failed; exit 1 if
one failed, or if nothing passed."""
import collections
import json
import pathlib
import re
import sys

KIND = {"OK": "passed", "EXPECTEDFAIL": "passed", "SKIP": "skipped"}  # all else, a timeout too, has failed
TAIL_LINES, REASON_LINES, SLOWEST = 60, 12, 10
# Of Criterion, CHECK() of the tests, pytest and sanitizers. Readers of CI may see only the first lines of an output.
REASON = re.compile(r"^\[(FAIL|CRASH|ERR )|^\[----\] .|^\S+\.(c|h|cu|cuh|py):\d+: |^E  |^FAIL|: runtime error: |"
                    r"(ERROR|WARNING): \w+Sanitizer|[Tt]imed out|ended with status|killed")
COMPLETE_ONLY = ("long", "rxe")  # suites of the complete form; "long" is always the second suite of a test
MAY_BE_SKIPPED = ("gpu", "rxe")  # suites that need what a machine may lack; any other suite that runs no test is broken


def read(log):
    with open(log, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            test = json.loads(line)
            yield test, KIND.get(test["result"], "failed")


def suite_and_name(test):
    """Meson 1.0 writes "project:suite / name", and "project:suite+suite / name" for several."""
    suite, slash, name = test["name"].partition(" / ")
    return (suite.split(":")[-1], name) if slash else ("", suite)


def first_suite(test):
    return suite_and_name(test)[0].partition("+")[0]


def suites_of(test):
    return [name.split(":")[-1] for name in test["suite"]]


def output(test):
    return [line for key in ("stdout", "stderr") for line in (test.get(key) or "").splitlines() if line.strip()]


def suites(without=""):
    """In the order in which they are defined: the quick ones first."""
    names = [name for test in json.load(sys.stdin) for name in suites_of(test)]
    print(" ".join(name for name in dict.fromkeys(names) if name not in (without, "long", "part")))
    return 0


def left_out():
    print(sum(any(name in COMPLETE_ONLY for name in suites_of(test)) for test in json.load(sys.stdin)))
    return 0


def count(tests):
    """The kinds of each suite."""
    suites = collections.defaultdict(collections.Counter)
    for test, kind in tests:
        suites[first_suite(test)][kind] += 1
    return suites


def ran_nothing(name, kinds):
    return name not in MAY_BE_SKIPPED and not kinds["passed"] and not kinds["failed"]


def print_failure(lines):
    """The lines that say why come first, then the end of all."""
    if len(lines) > REASON_LINES:
        for line in [line for line in lines if REASON.search(line)][:REASON_LINES]:
            print("      > " + line)
    for line in lines[-TAIL_LINES:] or ["(it printed nothing)"]:
        print("      | " + line)


def report(log):
    tests = list(read(log))
    suites = count(tests)
    for name, kinds in suites.items():
        seconds = sum(test["duration"] for test, _ in tests if first_suite(test) == name)
        print(f"   {name}: {kinds['passed']} passed, {kinds['failed']} failed, {kinds['skipped']} skipped"
              f" ({seconds:.0f} s of tests)" + (": FAILED, no test ran" if ran_nothing(name, kinds) else ""))
    for test, kind in tests:
        _, title = suite_and_name(test)
        if kind == "failed":
            print(f"   {test['result']} {title} ({test['duration']:.0f} s)")
            print_failure(output(test))
        if kind == "skipped":
            print(f"   skipped: {title}: {(output(test) or ['no reason given'])[-1].strip()}")
    slowest = sorted(tests, key=lambda pair: -pair[0]["duration"])[:SLOWEST]
    print("   slowest: " + "; ".join(f"{suite_and_name(test)[1]} {test['duration']:.0f} s" for test, _ in slowest))
    return any(kinds["failed"] or ran_nothing(name, kinds) for name, kinds in suites.items())


def total(steps_failed, steps_skipped, *logs):
    kinds = collections.Counter(failed=int(steps_failed), skipped=int(steps_skipped))
    for log in logs:
        tests = list(read(log))
        for name, mine in count(tests).items():
            kinds.update(mine)
            kinds["failed"] += ran_nothing(name, mine)
        for test, kind in tests:
            if kind == "failed":
                print(f"failed in {pathlib.Path(log).stem}: {suite_and_name(test)[1]}")
    print(f"{kinds['passed']} passed, {kinds['failed']} failed, {kinds['skipped']} skipped")
    return kinds["failed"] > 0 or kinds["passed"] == 0


if __name__ == "__main__":
    sys.exit({"suites": suites, "left_out": left_out, "report": report, "total": total}[sys.argv[1]](*sys.argv[2:]))
