#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Remove each rule of what two peers say to each other in turn, and check that a unit test fails: MUTANT(peer) markers.

usage: mutants_peer.py ROOT CC ARCHIVE[,ARCHIVE...] [RULE]. The archives have all of the transport; a changed file
stands before them.
"""
import os
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from mutants_lib import Linker, first_failure, rules, run_bounded, try_all  # noqa: E402

# The tests of a source, and what they are linked with.
SUPPORT = ["test/support/fake_sides.c", "test/support/fake_verbs.c"]
TESTS = {"transport/peer/handshake.c": ["handshake"], "transport/peer/failover.c": ["failover", "recovery"],
         "transport/peer/recovery.c": ["recovery", "failover"]}
LIMIT_S = 60  # of one test: a mutant may hang


class Runner:
    def __init__(self, linker):
        self.linker = linker
        self.support = [linker.object(source) for source in SUPPORT]
        self.tests = {name: linker.object(f"test/unit/test_{name}.c") for names in TESTS.values() for name in names}

    def fails(self, source, number, changed):
        """The test that fails with these objects before the archives, or None."""
        for name in TESTS[source]:
            program = self.linker.program(f"{name}.{number}", [self.tests[name], *changed, *self.support])
            text, status = run_bounded([program, "--fail-fast", "-j1", "--timeout", str(LIMIT_S // 2)], LIMIT_S)
            os.unlink(program)
            if status is None:
                return f"{name} (does not end)"
            if status:
                return first_failure(text)
        return None

    def try_rule(self, number, rule):
        return self.fails(rule.edits[0].file, number, self.linker.mutant(number, rule))


def main():
    root, cc, archives = sys.argv[1], sys.argv[2], sys.argv[3].split(",")
    chosen = [rule for rule in rules(root, "peer", TESTS) if len(sys.argv) < 5 or sys.argv[4] in rule.name]
    with tempfile.TemporaryDirectory() as work:
        runner = Runner(Linker(root, cc, archives, work))
        for source in TESTS:
            if whole := runner.fails(source, "whole", []):
                raise SystemExit(f"without a mutation: {whole} fails")
        return try_all([rule.name for rule in chosen], lambda number: runner.try_rule(number, chosen[number]),
                       os.cpu_count() or 1)


if __name__ == "__main__":
    sys.exit(main())
