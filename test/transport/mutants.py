#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Remove each rule of listener, connector and team in turn, and check that its test fails.

usage: mutants.py ROOT CC ARCHIVE[,ARCHIVE...] SOFTNIC_RUN [RULE]. The rules are MUTANT(connect TEST) markers.
TEST is one of Criterion's, SUITE/NAME: only that one runs, on the software NIC, with a changed file before the
archives, which have all of the transport.
"""
import os
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from mutants_lib import Linker, first_failure, rules, run_bounded, try_all  # noqa: E402

SOURCES = [f"transport/connect/{name}" for name in ("listener.c", "connector.c", "team.c", "team_connect.c",
                                                    "team_loss.c", "team_progress.c", "team_state.h")]
SUPPORT = [f"test/transport/{name}.c" for name in ("ends", "pair", "main")]
SUITES = ("connect", "callers", "refuse", "team", "ranks", "lost_rank", "rounds")
LIMIT_S = 120  # of one test


class Runner:
    def __init__(self, linker, softnic_run):
        self.linker, self.run_on_nic = linker, [softnic_run, "--quiet", "--nics", "2", "--"]
        self.support = [linker.object(source) for source in SUPPORT]
        self.tests = {suite: linker.object(f"test/transport/test_{suite}.c") for suite in SUITES}
        self.took_s = {}  # by test, with all rules

    def run(self, test, number, changed, limit_s):
        suite = test.partition("/")[0]
        program = self.linker.program(f"{suite}.{number}", [self.tests[suite], *changed, *self.support])
        text, status = run_bounded([*self.run_on_nic, program, "-j1", "--filter", test], limit_s)
        os.unlink(program)
        if status == 0 and "Tested: 1 " not in text:
            raise SystemExit(f"{test}: it did not run:\n{text}")
        return text, status

    def measure(self, test):
        began = time.monotonic()
        text, status = self.run(test, "whole", [], LIMIT_S)
        if status != 0:
            raise SystemExit(f"without a mutation: {test} fails:\n{text}")
        self.took_s[test] = time.monotonic() - began

    def try_rule(self, number, rule):
        # A mutant may hang. The limit follows the machine's load.
        limit_s = min(1 + 6 * self.took_s[rule.target], LIMIT_S)
        text, status = self.run(rule.target, number, self.linker.mutant(number, rule), limit_s)
        if status is None:
            return f"{rule.target} (does not end)"
        return first_failure(text) if status else None


def main():
    root, cc, archives, softnic_run = sys.argv[1], sys.argv[2], sys.argv[3].split(","), os.path.abspath(sys.argv[4])
    chosen = [rule for rule in rules(root, "connect", SOURCES) if len(sys.argv) < 6 or sys.argv[5] in rule.name]
    with tempfile.TemporaryDirectory() as work:
        runner = Runner(Linker(root, cc, archives, work), softnic_run)
        for test in sorted({rule.target for rule in chosen}):
            runner.measure(test)
        return try_all([rule.name for rule in chosen], lambda number: runner.try_rule(number, chosen[number]),
                       os.cpu_count() or 1)


if __name__ == "__main__":
    sys.exit(main())
