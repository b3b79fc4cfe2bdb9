#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Take the order away that each line of the fused kernels makes, one at a time, and check that a test fails
(tools/hopper/README.md).

    test/hopper/memory_order.py BUILD [--only TEXT] [--jobs N] [--table]

The lines are those that the tests reach: releases, acquires, fences, proxy fences, waits for bulk stores, and
__syncwarp. A release or a fence of the system is also narrowed to one GPU, one of a GPU to one CTA. Nothing is
compiled: the emulator leaves out what the instruction orders, and every access still happens. Lines that no test needs
are in UNSEEN, with the reason.
"""
import argparse
import concurrent.futures
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Program and tests: short ones that together reach every such line of the kernels on one node.
TESTS = {
    "test_hopper_memory_order": ["memory_order/*"],
    "test_hopper_order_attention": ["attention_order/*"],
    "test_hopper_order_attention_backward": ["attention_backward_order/*"],
    "test_hopper_order_moe": ["moe_order/*"],
    "test_hopper_order_moe_combine": ["moe_combine_order/*"],
    "test_hopper_order_moe_few": ["moe_few_order/*"],
    "test_hopper_order_moe_gradients": ["moe_gradients_order/*"],
    "test_hopper_order_moe_activation": ["moe_activation_order/*"],
    "test_hopper_order_moe_fp8": ["moe_fp8_order/*"],
    "test_hopper_order_sharing": ["sharing_order/*"],
}
WIDEST = {"sys": "gpu", "gpu": "cta"}
# (folder/file, the line): how many such lines nothing is found without, and why.
UNSEEN = {
    ("core/begin_copies.cuh", "__syncwarp();"): (1, "the copies come after the launch, and so after all its lanes"),
    ("core/cta.cuh", "__syncwarp();"): (1, "it brings the lanes together for the cluster's barrier, which orders them "
                                           "itself"),
    ("core/plan_switch.cuh", "__syncwarp(); /* all lanes have read */"):
        (1, "the words are volatile, so nothing races; it keeps a late lane from reading what lane 0 then writes"),
    ("core/plan_switch.cuh", "__syncwarp();"):
        (1, "it comes between what a launch says and the look at others; no test of these has launches that differ"),
    ("core/plan_switch.cuh", "__threadfence_system(); /* [both-say] */"): (2, "the same"),
    ("gemm/load.cuh", "__syncwarp();"): (2, "the __syncwarp before the load orders the lanes too"),
    ("core/partial_sums.cuh", "__syncwarp(); /* a late lane would mistake the phase of the next use for this one */"):
        (1, "the __syncwarp after the wait for the sums orders the lanes; this one keeps their phases apart"),
    ("gemm/store.cuh", "bulk_wait_done<0>();"): (1, "the one at the end of a role: the launch ends after its stores"),
    ("unfused/inbox.cuh", "(void)load_acquire_sys((const uint32_t *)word);"):
        (1, "it orders the look at the alarm, which no test of these has"),
    ("attention/credit.cuh", "fence_release_sys(); /* [slab-credit]: all pieces are read, before the credit that "
                             "await_credit() waits for */"):
        (2, "those credits are releases themselves"),
    ("attention/credit.cuh", "store_release_sys(args.credits[p] + prs_attention_credit(s, p, group), epoch);"):
        (1, "the fence before it makes a relaxed store a release"),
    ("attention/cta.cuh", "__syncwarp(); /* all lanes have read it before the slot is released */"):
        (1, "a gap: these tests have fewer pieces than slots, so none is used again"),
    ("attention/engine.cuh", "__syncwarp();"): (1, "it brings the lanes together for the end of the launch, which "
                                                   "waits for the whole CTA"),
    ("attention/load.cuh", "__syncwarp(); /* as in load_tiles(): no lane may look a phase late */"):
        (2, "lane 0, which loads, has waited itself; this one keeps the lanes' phases apart"),
    ("backward/engine.cuh", "__syncwarp();"): (1, "as in the forward engine"),
    ("backward/load.cuh", "__syncwarp(); /* as in load_tiles(): no lane may look a phase late */"):
        (2, "lane 0, which loads, has waited itself; this one keeps the lanes' phases apart"),
    ("attention/push.cuh", "fence_async_global(); /* the credit was read by an ordinary load, and lets TMA write */"):
        (1, "that a copy writes over what others have read is not checked"),
    ("moe/dispatch.cuh", "__syncwarp();"): (2, "each lane waits for the row itself; a later __syncwarp comes before "
                                               "other lanes use the barrier"),
    ("moe/dispatch.cuh", "fence_async_global(); /* the flags were read by ordinary loads, TMA writes */"):
        (1, "that a copy writes over what others have read is not checked"),
    ("moe/engine.cuh", "__syncwarp();"): (2, "each lane waits for its unit itself; nothing of a skipped stage is read"),
    ("moe/engine.cuh", "__syncwarp(); /* as in load_tiles(): no lane may test the barrier a phase late */"):
        (1, "lane 0, which loads, has waited itself; this one keeps the lanes' phases apart"),
    ("moe/engine.cuh", "bulk_wait_done<0>();"): (1, "the one at the end of a role: the launch ends after its stores"),
    ("moe/few.cuh", "__syncwarp();"): (1, "the barrier of the unit, for which all lanes wait next, orders them"),
    ("moe/few.cuh", "__syncwarp(); /* as in load_blocks() */"):
        (1, "lane 0, which loads, has waited itself; this one keeps the lanes' phases apart"),
    ("moe/few.cuh", "fence_release_sys();"): (2, "it orders the look at the alarm, which no test of these raises"),
    ("moe/few_rows.cuh", "__syncwarp(); /* as in load_blocks() */"):
        (1, "lane 0, which loads, has waited itself; this one keeps the lanes' phases apart"),
    ("moe/few_rows.cuh", "__syncwarp(); /* no byte comes before it is expected */"):
        (1, "the copies need no order with the barrier's count; it keeps the count from falling below zero"),
    ("moe/few_route.cuh", "uint32_t its = load_acquire_sys(word); /* [plan-switch]: before the places are read once "
                          "more */"):
        (2, "no test of these has a rank that waits at a switch of plans while another one waits for its places"),
    ("moe/route.cuh", "fence_release_sys(); /* [routing-chunk]: this chunk's messages, before its arrival in "
                      "arrives_last() below */"):
        (2, "the arrival is a release, too, and causality passes through it to the flags, which are released for the "
            "system"),
    ("moe/route.cuh", "fence_release_sys(); /* [routes]: all chunks' messages, before the flags that receive_counts() "
                      "waits for */"):
        (2, "those flags are releases themselves; the puts to other nodes need it"),
    ("moe/route.cuh", "store_release_sys(args.message_flags[prs_route_neighbour(r, p)] + prs_distance_back(p, "
                      "r->place.world),"):
        (1, "the fence before it makes a relaxed store a release"),
    ("moe/count.cuh", "__syncwarp();"): (1, "other lanes read the table only after a barrier of the CTA"),
    ("moe/rows.cuh", "__syncwarp(); /* else a late lane could mistake the phase of the next use for this one */"):
        (1, "each lane has waited itself; this one keeps the lanes' phases apart"),
    ("moe/rows.cuh", "__syncwarp();"): (1, "the one before a row's targets are stored orders the lanes, too"),
    ("moe/rows.cuh", "fence_release_sys(); /* [moe-ended]: all CTAs' reads, before the flags that await_room() waits "
                     "for */"):
        (2, "those flags are releases themselves; the signals to other nodes need it"),
    ("moe/rows.cuh", "store_release_sys(args.end_flags[q] + prs_distance_back(p, r->place.world), epoch);"):
        (1, "the fence before it makes a relaxed store a release"),
}


def scope_of(instruction):
    return ("sys" if instruction.endswith("_sys")
            or instruction == "__threadfence_system" else "gpu" if "_gpu" in instruction else None)


def run(build, program, test, seed="1", **environment):
    command = [build / "test/hopper" / program, "--filter", test, "-j1"]
    try:
        done = subprocess.run(command, env={**os.environ, "HOPPER_SEED": seed, **environment}, capture_output=True,
                              text=True, errors="replace", timeout=600)
    except subprocess.TimeoutExpired:
        return "does not end"
    output = done.stdout + done.stderr
    if "Synthesis: Tested: 0 " in output:
        raise SystemExit(f"{program} has no test {test}")
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in output.splitlines()]
    found = (next((line for line in lines if line.startswith("hopper: ")), None)
             or next((line for line in lines if "wrong" in line or "returned" in line), "failed"))
    return found.removeprefix("hopper: ")


def tests_of(build):
    """(program, test): every test that the patterns of TESTS name."""
    for program, patterns in TESTS.items():
        listed = subprocess.run([build / "test/hopper" / program, "--list"], capture_output=True, text=True, check=True)
        suite, names = "", []
        for line in (listed.stdout + listed.stderr).splitlines():
            word = line.split(":")[0].strip(" \u2500\u251c\u2514|`-")
            if line and line[0].isalnum():
                suite = word
            elif word:
                names.append(f"{suite}/{word}")
        for name in names:
            if any(pathlib.PurePath(name).match(pattern) for pattern in patterns):
                yield program, name


def places(build, pool):
    """{(place, instruction): the tests that reach it}; every test must pass."""
    def reach(of):
        with tempfile.NamedTemporaryFile("r") as file:
            failure = run(build, *of, HOPPER_PLACES=file.name)
            return of, failure, sorted(set(file.read().splitlines()))
    reached = {}
    for of, failure, lines in pool.map(reach, list(tests_of(build))):
        if failure:
            raise SystemExit(f"{of[1]} fails as it is: {failure}")
        for line in lines:
            reached.setdefault(tuple(line.rsplit(" ", 1)), []).append(of)
    return reached


def source_line(place):
    file, number = place.rsplit(":", 1)
    path = next(p for folder in ("fused", "include") for p in sorted((ROOT / folder).rglob(pathlib.PurePath(file).name))
                if p.as_posix().endswith(file))
    return path.read_text().splitlines()[int(number) - 1].strip()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--table", action="store_true", help="print rows of a Markdown table")
    options = parser.parse_args()
    build, failed = options.build.resolve(), 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        mutations = []
        for (place, instruction), tests in sorted(places(build, pool).items()):
            scope = scope_of(instruction)
            mutations.append((place, instruction, "", tests))
            if scope:
                mutations.append((place, instruction, "=" + WIDEST[scope], tests))
        mutations = [m for m in mutations if options.only in m[0] + " " + m[1]]

        def attempt(mutation):
            place, _, scope, tests = mutation
            for of in tests:
                failure = run(build, *of, HOPPER_WITHOUT=place + scope)
                if failure:
                    return of[1], failure
            return None

        left = dict(UNSEEN)
        for (place, instruction, scope, _), found in zip(mutations, pool.map(attempt, mutations)):
            text, file = source_line(place), place.rsplit(":", 1)[0]
            count, reason = left.get((file, text), (0, None))
            if not found and count > 0:
                left[file, text] = (count - 1, reason)
            elif not found:
                reason = None
            what = f"{instruction} at {place}" + (f", for the {scope[1:]} only" if scope else "")
            if options.table:
                print(f"| `{text.split('/*')[0].strip()[:60]}` | {place} | {scope[1:] or 'removed'} | "
                      + (f"`{found[0]}`: {found[1][:150]} |" if found else f"nothing: {reason} |"), flush=True)
            elif found:
                print(f"ok     {what} | {found[0]} | {found[1][:200]}", flush=True)
            else:
                print(f"{'unseen' if reason else 'FAILED'} {what} | {reason or text}", flush=True)
            failed += not found and not reason
    print(f"{len(mutations)} mutations, {failed} without a test that fails and without a reason")
    return 1 if failed or not mutations else 0


if __name__ == "__main__":
    sys.exit(main())
