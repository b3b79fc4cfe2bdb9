#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Take one line of synchronisation at a time out of the fused kernels, and see how many seeds find it (doc/hopper-emulation.md).

    test/hopper/mutate.py BUILD [--seeds N] [--only TEXT]

Needs a build with test/hopper. A run finds a mutation when the test fails, is killed, or takes longer than 40 s.
"""
import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
REDUCE, GATHER, ALL = "reduce_scatter_is_right", "allgather_is_right", "allreduce_is_right"
COPY = "allgather_by_copy_engine_is_right"
NODES = "nodes/"  # before a test's name: the one of test_nodes.c, over the software NIC
MOE = "moe/"      # of test_moe.c, also over the software NIC
TOKENS = MOE + "tokens_cross_between_nodes_and_are_given_to_all_who_want_them"
ATTENTION = "attention/"  # of test_attention.c
KEYS = ATTENTION + "keys_that_are_copied_are_right"
SHARED = ATTENTION + "ranks_whose_ctas_share_keys_are_right"
SHARED_PARTS = ATTENTION + "tasks_that_are_cut_are_put_together_by_two_ctas"
MUTATIONS = [  # what is taken away, file, text, in its place, test
    ("fence_async_shared before a slab is handed over", "core/multiply.cuh", "    fence_async_shared();\n", "", REDUCE),
    ("bulk_wait_done before signal_tile", "gemm/store.cuh", "            bulk_wait_done<0>();\n            signal_tile", "            signal_tile", REDUCE),
    ("wait for partial sums", "gemm/load.cuh", "        wait_flag(&args.sync, flag, at.epoch, PRS_AWAIT_PARTIAL", "        if (0) wait_flag(&args.sync, flag, at.epoch, PRS_AWAIT_PARTIAL", REDUCE),
    ("fence_async_global before partial sums are loaded", "gemm/load.cuh", "    fence_async_global(); /* the flags", "    /* the flags", REDUCE),
    ("release of a stage after the last K step", "core/multiply.cuh", "    wgmma_wait<0>();\n    release_stage<E>(m, before);\n", "    wgmma_wait<0>();\n", REDUCE),
    ("wgmma_wait before a stage is released", "core/multiply.cuh", "            wgmma_wait<1>();\n", "", REDUCE),
    ("wait for an empty stage", "gemm/load.cuh", "            mbarrier_wait(&m.empty[r.stage], r.phase ^ 1);\n            __syncwarp()", "            __syncwarp()", REDUCE),
    ("wait for a full stage", "core/multiply.cuh", "    mbarrier_wait(&m.full[r.stage], r.phase);\n    wgmma_fence();", "    wgmma_fence();", REDUCE),
    ("wait for a free slab", "core/multiply.cuh", "    mbarrier_wait(&m.c_empty[slab], phase ^ 1);\n", "", REDUCE),
    ("bulk_wait_read before a slab is given back", "gemm/store.cuh", "                bulk_wait_read<E::slabs - 1>();", "                ;", GATHER),
    ("rest handed over before partial sums are awaited", "core/multiply.cuh", "                hand_over_rest<E>(&left, m, half, &slabs);\n", "", "epochs_run_into_each_other"),
    ("cluster barrier before leaving", "gemm/engine.cuh", "    cluster_arrive();\n    cluster_wait(); /* the other CTA may still", "    /* the other CTA may still", REDUCE),
    ("the other bank in odd epochs", "gemm/load.cuh", "args.staging[0] + (at.epoch & 1) * args.staging_bank_bytes;\n    await_partials", "args.staging[0];\n    await_partials", REDUCE),
    ("one bank for all epochs", None, "(at.epoch & 1)", "(at.epoch & 0)", "epochs_run_into_each_other"),
    ("bulk_wait_done before signal_chunk", "gemm/push.cuh", "        bulk_wait_done<PRS_PUSH_SLOTS - 1>();\n", "", GATHER),
    ("wait before a push buffer is loaded again", "gemm/push.cuh", "bulk_wait_read<PRS_PUSH_SLOTS - 1>", "bulk_wait_read<PRS_PUSH_SLOTS>", GATHER),
    ("wait for the pushed rows", "gemm/load.cuh", "PRS_STRIP_STEPS * await_strips(", "1 ? 1 : await_strips(", GATHER),
    ("wait for the copied rows", "gemm/load.cuh", "at.epoch, PRS_AWAIT_CHUNK, u.block, index);\n            *ready", "at.epoch - 1, PRS_AWAIT_CHUNK, u.block, index);\n            *ready", COPY),
    ("a wait for each piece that is copied", "gemm/load.cuh", "*ready = steps;", "*ready = steps + 1;", COPY),
    ("credit before rows are copied over those of the last epoch", "gemm/kernels.cu", "        wait_flag(&args.sync, args.done[0] + slot, epoch - 1", "        if (0) wait_flag(&args.sync, args.done[0] + slot, epoch - 1", COPY),
    ("bulk_wait_done before the broadcast is signalled", "gemm/store.cuh", "            bulk_wait_done<0>();\n            signal_tile", "            signal_tile", ALL),
    ("wait for the others' results", "gemm/engine.cuh", "            await_broadcast(args, at);", "            ;", ALL),
    ("all lanes have read before one releases", "core/multiply.cuh", "            __syncwarp(); /* all lanes have read", "            /* all lanes have read", REDUCE),
    ("wait for other nodes' sums", "gemm/load.cuh", "        wait_flag(&args.sync, flag, at.epoch, PRS_AWAIT_PARTIAL", "        if (!from.far) wait_flag(&args.sync, flag, at.epoch, PRS_AWAIT_PARTIAL", NODES + REDUCE),
    ("only the second half of a tile puts it", "gemm/far.cuh", "prs_schedule_tile_counter(s, to, tile), 2)", "prs_schedule_tile_counter(s, to, tile), 1)", NODES + REDUCE),
    ("a signal only behind all tiles of its group", "gemm/far.cuh", "prs_schedule_group_counter(s, to, g.index), g.pieces)", "prs_schedule_group_counter(s, to, g.index), 1)", NODES + REDUCE),
    ("rest handed over before a relayed tile's sums are awaited", "core/multiply.cuh", "                hand_over_rest<E>(&left, m, half, &slabs);\n", "", NODES + "reduce_scatter_is_right_with_long_k"),
    ("everything signalled before another node is waited for", "gemm/push.cuh", "        push_drain<E>(args, at, p);\n        wait_flag", "        wait_flag", NODES + GATHER),
    ("wait for other nodes' rows", "gemm/push.cuh", "        wait_flag(&args.sync, far_flag(args, word), at.epoch, PRS_AWAIT_CHUNK, k.block, word);\n", "", NODES + GATHER),
    ("credit before another node's memory is written again (sums)", "gemm/unfused/unfused.cu", "        if (a.x.credit)", "        if (0)", NODES + "unfused_epochs_run_into_each_other"),
    ("credit before another node's memory is written again (rows)", "gemm/unfused/unfused.cu", "        if (a.x.credit)", "        if (0)", NODES + "unfused_" + GATHER),
    ("wait for what crosses, sums", "gemm/unfused/unfused.cu", "        wait_flag(sync, far_flag(a.args, p.awaited)", "        if (0) wait_flag(sync, far_flag(a.args, p.awaited)", NODES + "unfused_" + REDUCE),
    ("wait for what crosses, rows", "gemm/unfused/unfused.cu", "        wait_flag(sync, far_flag(a.args, p.awaited)", "        if (0) wait_flag(sync, far_flag(a.args, p.awaited)", NODES + "unfused_" + GATHER),
    ("wait for what crosses, results", "gemm/unfused/unfused.cu", "        wait_flag(sync, far_flag(a.args, p.awaited)", "        if (0) wait_flag(sync, far_flag(a.args, p.awaited)", NODES + "unfused_" + ALL),
    ("what is put has been read before it is written again", "gemm/unfused/unfused.cu", "        network_quiet(", "        if (0) network_quiet(", NODES + "unfused_" + GATHER),
    ("a rank that gave up sends nothing", "core/sync.cuh", "    if (words->network != NULL)\n        *(volatile uint64_t *)words->network = PRS_DEVICE_ABORTED;\n", "",
     NODES + "sums_without_a_lost_rank_are_not_sent"),
    ("the node's ranks meet", "gemm/unfused/unfused.cu", "        wait_flag(&args.sync, args.flags[0] + slot", "        if (0) wait_flag(&args.sync, args.flags[0] + slot", NODES + "unfused_" + ALL),
    ("a row for another node is counted when it has landed", "moe/rows.cuh", "    bulk_wait_done<0>();\n    if (add_acq_rel_gpu(far->counters", "    if (add_acq_rel_gpu(far->counters", TOKENS),
    ("a put only behind all its rows", "moe/rows.cuh", "prs_route_put_counter(r, n, row), 1) + 1 != rows)", "prs_route_put_counter(r, n, row), 1) + 1 != 1)", TOKENS),
    ("a signal only behind all puts of its group", "moe/rows.cuh", "prs_route_group_counter(r, n, row), 1) + 1 == puts)", "prs_route_group_counter(r, n, row), 1) + 1 == 1)", TOKENS),
    ("wait for other nodes' rows that are handed on", "moe/rows.cuh", "    await_token(args, flag, epoch, prs_route_counterpart(r, in->n), word);\n", "", TOKENS),
    ("bulk_wait_done before a row that was handed on is told of", "moe/rows.cuh", "    bulk_wait_done<0>(); /* the row has landed. Pairs with the acquire in await_items(). */\n    each_seat", "    each_seat", TOKENS),
    ("the last row that was handed on is told of", "moe/rows.cuh", "        tell_incoming(args, epoch, in);\n        if (!waits", "        if (!waits", TOKENS),
    ("the rows of all nodes are handed on", "moe/rows.cuh", "    in.end *= args.route.nodes - 1;\n", "", TOKENS),
    ("items of other nodes have places of their own", "moe/route.cuh", "prs_route_node_of(r, p) == 0 ? 0 : r->local;", "0;", TOKENS),
    ("an item that was told of is not told of again", "moe/rows.cuh", "                    last.uses = 0;\n", "", TOKENS),
    ("wait for copied keys", "attention/load.cuh", "        want = 1;", "        want = 0;", KEYS),
    ("a flag for each group of copied keys", "attention/load.cuh", "prs_attention_copied(s, order, t.group)", "prs_attention_copied(s, order, 0)", KEYS),
    ("credit before copied keys of the last epoch are copied over", "attention/kernels.cu", "        wait_flag(&args.sync, args.credits[0] + i, epoch - 1,",
     "        if (0) wait_flag(&args.sync, args.credits[0] + i, epoch - 1,", KEYS),
    ("credit for all groups of copied keys", "attention/kernels.cu", "i < prs_attention_credit(s, s->world, 0)", "i < s->world - 1", KEYS),
    ("a block of keys is released at the other CTA", "attention/core.cuh", "        mbarrier_arrive_at(empty, lane);", "        mbarrier_arrive(empty);", SHARED),
    ("both CTAs have read a block", "attention/cta.cuh", "E::cluster * 4 * E::warpgroups); /* all CTAs", "4 * E::warpgroups); /* all CTAs", SHARED),
    ("cluster barrier before the first multicast", "attention/engine.cuh", "    meet<E>(); /* the barriers", "    __syncthreads(); /* the barriers", SHARED),
    ("cluster barrier before leaving, attention", "attention/engine.cuh", "    meet<E>(); /* another CTA", "    __syncwarp(); __syncthreads(); /* another CTA", SHARED),
    ("both CTAs wait for what they load", "attention/load.cuh", "    if (order != 0)\n        await_block", "    if (order != 0 && cluster_rank<E>() == 0)\n        await_block", SHARED),
    ("each CTA loads its half of the columns", "attention/load.cuh", "full, 0, row, (int32_t)part,", "full, 0, row, 0,", SHARED),
    ("each CTA has rows of its own", "attention/cta.cuh", " + cluster_rank<E>() * E::tile_rows", "", SHARED),
    ("each CTA has a place of its own in a part", "attention/merge.cuh", "cluster_rank<E>() * (E::tile_rows / 16) + ", "", SHARED_PARTS),
    ("wait for other nodes' results", "gemm/far.cuh", "            wait_flag(&args.sync, far_flag(args, word), epoch, PRS_AWAIT_BROADCAST, block, word);\n", "            ;\n", NODES + ALL),
]


def link_command(build, test, kernels):
    program = "test/hopper/test_hopper_" + ("nodes" if test.startswith(NODES) else "moe" if test.startswith(MOE) else "attention" if test.startswith(ATTENTION) else "fused")
    lines = subprocess.run(["ninja", "-C", build, "-t", "commands", program], capture_output=True, text=True, check=True).stdout.splitlines()
    compile_line = next(line for line in lines if f"-c test/hopper/{kernels}.cpp" in line)
    return compile_line, lines[-1]


def make(build, folder, mutation):
    name, file, old, new, test = mutation
    room = pathlib.PurePath(file or "gemm").parts[-2 if file else 0]  # the folder names the object that has its kernels
    kernels = "gemm" if room == "core" else room
    shutil.copytree(ROOT / "fused", folder / "fused")
    os.remove(folder / "fused/core/ptx.cuh")
    files = [folder / "fused" / file] if file else sorted((folder / "fused").rglob("*.cuh"))
    changed = 0
    for path in files:
        text = path.read_text()
        changed += text.count(old)
        path.write_text(text.replace(old, new))
    if changed == 0:
        sys.exit(f"{name}: the text to replace is not in {file}")
    compile_line, link_line = link_command(build, test, kernels)
    shadow = ROOT / "test/hopper/include"
    compile_line = re.sub(r"^(\S+) ", rf"\1 -I{shadow} -I{folder} ", compile_line, count=1)
    compile_line = compile_line.replace(" -Werror ", " ")  # what is left over may be unused
    compile_line = re.sub(r"-MD.*?-o \S+", f"-o {folder}/kernels.o", compile_line)
    subprocess.run(compile_line, shell=True, cwd=build, check=True, capture_output=True)
    objects = [str(p) for p in (build / "test/hopper/libhopper_fused.a.p").glob("*.o") if not p.name.endswith(f".._{kernels}.cpp.o")]
    subprocess.run(["ar", "rcs", f"{folder}/fused.a", f"{folder}/kernels.o", *objects], check=True)
    link_line = link_line.replace("test/hopper/libhopper_fused.a", f"{folder}/fused.a")
    link_line = re.sub(r"-o \S+", f"-o {folder}/test", link_line, count=1)
    subprocess.run(link_line, shell=True, cwd=build, check=True, capture_output=True)
    return folder / "test"


def runs(build, program, test, seeds):
    found, first, why = 0, None, ""
    under = []
    if test.startswith((NODES, MOE)):
        under = [build / "tools/softnic/softnic-run", "--quiet", "--jitter", "100us", "--"]
    test = test.rpartition("/")[2]
    for seed in range(1, seeds + 1):
        try:
            r = subprocess.run([*under, program, "--filter", f"*/{test}", "-j1"], env={**os.environ, "HOPPER_SEED": str(seed)}, capture_output=True,
                               text=True, timeout=40)
            bad, output = r.returncode != 0, r.stderr + r.stdout
        except subprocess.TimeoutExpired:
            bad, output = True, "hopper: did not end"
        if bad:
            found += 1
            first = first or seed
            why = why or next((l.strip() for l in output.splitlines() if l.startswith("hopper:") or "elements are wrong" in l or "returned" in l), "")
    return found, first, why


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    for mutation in MUTATIONS:
        if options.only not in mutation[0]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            program = make(options.build.resolve(), pathlib.Path(folder), mutation)
            found, first, why = runs(options.build.resolve(), program, mutation[4], options.seeds)
        print(f"{mutation[0]} | {found} of {options.seeds} seeds, first {first} | {why[:240]}", flush=True)


if __name__ == "__main__":
    main()
