#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Remove each rule of the order engine in turn and check that a test fails. The rules are MUTANT(order) markers in the
sources.

usage: mutants.py ROOT CC [RULE]. Prints each rule and the test that caught it; with a word, only the rules whose name
has it. mutants.json has the test that caught a rule last time: it is tried first, alone, which saves most of the time.
mutants.py ROOT CC --record writes that file anew.
"""
import json
import os
import pathlib
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from mutants_lib import (CRITERION, WITH_CRITERION, compile_mutants, compile_or_exit, first_failure,  # noqa: E402
                         rules, run_bounded, try_all)

# The quick tests first; a mutant meets the next only when it survives.
TESTS = {"test_order": "order_bench", "test_order_limits": "order_bench", "test_order_parts": "order_bench",
         "test_tally": "order_bench", "test_order_drain": "order_bench", "test_order_path": "order_bench",
         "test_order_sim": "order_net", "test_order_every": "order_net"}
# one in 13 of a test's programs, seeds or losses: enough to find each mutant
ENVIRONMENT = {"PRS_TEST_STRIDE": "13"}
SOURCES = ["transport/order/order.c", "transport/order/order_admit.c", "transport/order/order_signal.c",
           "transport/order/tally.c", "transport/order/order_cut.c", "transport/order/order_drain.c",
           "transport/order/order_path.c", "transport/order/stripe.c", "transport/order/policy.c",
           "transport/util/error.c", "transport/util/log.c", "transport/util/env.c"]
LIMIT_CPU_S = 60  # of one test: a mutant may compute for ever. Not of the clock: other tests run meanwhile
LIMIT_S = 900
RECORD = "test/unit/mutants.json"


class Builder:
    def __init__(self, root, cc, work):
        root = os.path.abspath(root)  # the compiler runs in other folders
        self.root, self.work = root, work
        # -O0: a mutant is compiled once and runs for milliseconds.
        self.compile = [*cc.split(), "-std=gnu11", "-O0", "-D_GNU_SOURCE", "-DPRS_VERSION=\"test\"", "-I", root, "-I",
                        os.path.join(root, "include"), "-c"]
        self.link = [*cc.split(), "-o"]

    def object(self, source, out):
        compile_or_exit([*self.compile, source, "-o", out], source)
        return out

    def common(self):
        self.start = self.object(os.path.join(self.root, CRITERION), os.path.join(self.work, "start.o"))
        self.sources = {s: self.object(os.path.join(self.root, s), os.path.join(self.work, os.path.basename(s) + ".o"))
                        for s in SOURCES}
        self.tests = {t: self.object(os.path.join(self.root, "test/unit", t + ".c"), os.path.join(self.work, t + ".o"))
                      for t in TESTS}
        self.support = {s: self.object(os.path.join(self.root, "test/support", s + ".c"),
                                       os.path.join(self.work, s + ".o"))
                        for s in set(TESTS.values())}

    def program(self, test, number, mutant):
        path = os.path.join(self.work, f"{test}.{number}")
        objects = [self.start, self.tests[test], self.support[TESTS[test]], *{**self.sources, **mutant}.values()]
        compile_or_exit([*self.link, path, *objects, *WITH_CRITERION], f"linking {test}")
        return path


def run(builder, program, number, mutant, test=None):
    """The test of a program that fails, or None. test: SUITE::NAME, only that one, or those of a pattern."""
    path = builder.program(program, number, mutant)
    only = ["--filter", test.replace("::", "/")] if test else []
    try:
        limited = ["sh", "-c", f'ulimit -t {LIMIT_CPU_S} && exec "$@"', "sh", path, "-j1", "--fail-fast", *only]
        text, status = run_bounded(limited, LIMIT_S, **ENVIRONMENT)
    finally:
        os.unlink(path)
    if status is None:
        return f"{program} (does not end)"
    return first_failure(text) if status else None


def catch(builder, number, mutant, test=None):
    """The test that fails, or None. test: the one that caught the mutant last time."""
    program = test and "test_" + test.partition("::")[0]
    if program in TESTS and (caught := run(builder, program, number, mutant, test)):
        return caught
    return next((caught for program in TESTS if (caught := run(builder, program, number, mutant))), None)


def first_that_fails_anyway(builder, tests):
    """Of these tests, without a mutation."""
    if any("::" not in test for test in tests):  # the whole program
        return catch(builder, "whole", {})
    for program in TESTS:
        suite = program.removeprefix("test_")
        names = [name for its, _, name in (test.partition("::") for test in tests) if its == suite]
        if names and (failed := run(builder, program, "whole", {}, f"{suite}::@({'|'.join(sorted(names))})")):
            return failed
    return None


def try_rule(builder, number, rule, test):
    objects = compile_mutants(builder.compile, builder.root, rule, os.path.join(builder.work, str(number)))
    return catch(builder, number, objects, test)


def main():
    root, cc, word = sys.argv[1], sys.argv[2], (sys.argv + [""])[3]
    record = pathlib.Path(root, RECORD)
    known = {} if word == "--record" else json.loads(record.read_text())
    chosen = [rule for rule in rules(root, "order", SOURCES) if word == "--record" or word in rule.name]
    caught = {}

    def attempt(number):
        name = chosen[number].name
        caught[name] = try_rule(builder, number, chosen[number], known.get(name))
        return caught[name]

    with tempfile.TemporaryDirectory() as work:
        builder = Builder(root, cc, work)
        builder.common()
        # Other tests run meanwhile, so half of the cores.
        status = try_all([rule.name for rule in chosen], attempt, max(1, (os.cpu_count() or 1) // 2))
        if failed := first_that_fails_anyway(builder, set(filter(None, caught.values()))):
            raise SystemExit(f"without a mutation: {failed} fails")
    if word == "--record":
        tests = {name: test for name, test in caught.items() if test and "::" in test}
        record.write_text(json.dumps(tests, indent=1, sort_keys=True) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
