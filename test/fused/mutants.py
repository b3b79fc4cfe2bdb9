#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Remove each rule of the kernels' protocols between nodes, of their schedules and of the all-gather's plan in turn,
and check that a model fails: by a wrong value, by a wait that ends, or by a race that ThreadSanitizer sees. The rules
are MUTANT(model PROGRAM) markers in fused/ and test/fused. Run by hand: it takes minutes.

usage: mutants.py ROOT [WORD]. With a word, only the rules whose name has it.
"""
import os
import pathlib
import re
import shutil
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from mutants_lib import CRITERION, compile_or_exit, mutated, rules, run_bounded, try_all  # noqa: E402

LIMIT_S = 150
PROGRAMS = {"attention": (["test_attention_protocol.c", "attention_model.c", "watch.c", "nic.c",
                           "../../fused/attention/deal.c"], "attention_protocol/nodes_*"),
            "batch": (["test_attention_protocol.c", "attention_model.c", "watch.c", "nic.c",
                       "../../fused/attention/deal.c"], "attention_protocol/batches_*"),
            "copied": (["test_attention_protocol.c", "attention_model.c", "watch.c", "nic.c",
                        "../../fused/attention/deal.c"], "attention_protocol/copied_*"),
            "stripes": (["test_attention_stripes.c", "../../fused/attention/assign.c"], "attention_stripes/*"),
            "backward": (["test_attention_backward.c"], "attention_backward/*"),
            "turns": (["test_attention_turns.c"], "attention_turns/*"),
            "unfused": (["test_unfused.c", "watch.c", "nic.c"], "unfused/*"),
            "route": (["test_route.c"], "route/*"),
            "balance": (["test_balance.c", "../../fused/moe/balance.c"], "balance/*"),
            "schedule": (["test_schedule.c"], "schedule/*"),
            "gather": (["test_gather_time.c", "../../fused/gemm/gather_time.c"], "gather_time/*"),
            "moe": (["test_moe.c", "moe_model.c", "moe_check.c", "moe_route.c", "moe_rows.c", "watch.c", "nic.c"],
                    "moe/nodes_*")}
PLAIN, RACES = ["-O2"], ["-O1", "-g", "-fsanitize=thread"]


def build(tree, program, flags):
    out = os.path.join(tree, "program")
    sources = ([os.path.join(tree, "test/fused", s) for s in PROGRAMS[program][0]]
               + [os.path.join(tree, "transport/util", s) for s in ("error.c", "log.c", "env.c")])
    sources += [os.path.join(tree, "test/support/criterion_arena.c"), os.path.join(tree, CRITERION)]
    compile_or_exit(["cc", "-std=gnu11", *flags, "-D_GNU_SOURCE", '-DPRS_VERSION="test"', "-I", tree, "-I",
                     os.path.join(tree, "include"), *sources, "-o", out, "-lcriterion", "-lpthread", "-lm"], program)
    return out


def what_failed(text):
    found = re.search(r"(rank \d+: .*: want \d+, have \d+)|(WARNING: ThreadSanitizer: [a-z ]*)|(does not "
                      r"end)|(Expression .*)|(Unexpected signal.*)", text)
    return found.group(0) if found else "a test failed"


def catch(tree, program):
    for flags in (PLAIN, RACES):
        text, status = run_bounded([build(tree, program, flags), "--filter", PROGRAMS[program][1], "--fail-fast", "-j1",
                                    "--timeout", str(LIMIT_S)], LIMIT_S,
                                   TSAN_OPTIONS="halt_on_error=1")
        if status != 0:
            return what_failed(text)
    return None


def try_rule(root, program, texts):
    with tempfile.TemporaryDirectory() as tree:
        for folder in ("fused", "test/fused", "test/support", "transport/util", "include"):
            shutil.copytree(os.path.join(root, folder), os.path.join(tree, folder))
        watch = pathlib.Path(tree) / "test/fused/watch.h"
        watch.write_text(watch.read_text().replace("WAIT_SECONDS = 60", "WAIT_SECONDS = 5"))
        for file, text in texts.items():
            (pathlib.Path(tree) / file).write_text(text)
        return catch(tree, program)


def files(root):
    """Where the rules of models stand."""
    return [path.relative_to(root).as_posix() for folder in ("fused", "test/fused")
            for path in sorted(pathlib.Path(root, folder).rglob("*.[ch]"))]


def main():
    root, word = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    chosen = [rule for rule in rules(root, "model", files(root)) if word in f"{rule.target}: {rule.name}"]
    for program in sorted({rule.target for rule in chosen}):
        failed = try_rule(root, program, {})
        if failed:
            raise SystemExit(f"{program}, without a mutation: {failed}")
    return try_all([f"{rule.target}: {rule.name}" for rule in chosen],
                   lambda number: try_rule(root, chosen[number].target, mutated(root, chosen[number])))


if __name__ == "__main__":
    sys.exit(main())
