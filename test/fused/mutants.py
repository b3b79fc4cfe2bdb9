#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Take one rule at a time out of the models of the kernels' protocols between nodes, out of the schedules that they share with the kernels, or
out of what an all-gather's plan is chosen by, and see that the model fails: by a wrong value or a wait that gave up, else by a race that ThreadSanitizer sees. Run by hand: it takes minutes.

usage: mutants.py ROOT [WORD]. With a word, only the rules whose name has it.
"""
import os
import re
import shutil
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from mutants_lib import compile_or_exit, mutated, run_bounded, try_all  # noqa: E402

LIMIT_S = 150
ATTENTION, SCHEDULE = "test/fused/attention_model.c", "fused/attention/schedule.h"
ROUTE, MOE_ROUTE, MOE_ROWS, MOE_MODEL = "fused/moe/route.h", "test/fused/moe_route.c", "test/fused/moe_rows.c", "test/fused/moe_model.c"
ROWS, TIME = "fused/gemm/schedule.h", "fused/gemm/gather_time.c"
UNFUSED, EXCHANGE = "test/fused/test_unfused.c", "fused/gemm/unfused/exchange.h"
PROGRAMS = {"attention": (["test_attention_protocol.c", "attention_model.c", "watch.c", "nic.c", "../../fused/attention/deal.c"], "attention_protocol/nodes_*"),
            "copied": (["test_attention_protocol.c", "attention_model.c", "watch.c", "nic.c", "../../fused/attention/deal.c"], "attention_protocol/copied_*"),
            "unfused": (["test_unfused.c", "watch.c", "nic.c"], "unfused/*"),
            "route": (["test_route.c"], "route/*"),
            "schedule": (["test_schedule.c"], "schedule/*"),
            "gather": (["test_gather_time.c", "../../fused/gemm/gather_time.c"], "gather_time/*"),
            "moe": (["test_moe.c", "moe_model.c", "moe_check.c", "moe_route.c", "moe_rows.c", "watch.c", "nic.c"], "moe/nodes_*")}
PLAIN, RACES = ["-O2"], ["-O1", "-g", "-fsanitize=thread"]

RULES = [  # name, program, file, text (must be there once), what stands there instead
    ("attention: another node's slab is awaited", "attention", ATTENTION, "    if (x->way != 0) {\n        uint32_t word", "    if (x->way > s->nodes) {\n        uint32_t word"),
    ("attention: a relay slot is written with credit", "attention", ATTENTION, "        for (uint32_t back = 1; back < s->nodes; back++) {\n            uint32_t word",
     "        for (uint32_t back = 1; back < 1; back++) {\n            uint32_t word"),
    ("attention: the credit of all nodes", "attention", ATTENTION, "        for (uint32_t back = 1; back < s->nodes; back++) {\n            uint32_t word",
     "        for (uint32_t back = 1; back < 2; back++) {\n            uint32_t word"),
    ("attention: credit when all CTAs have read", "attention", ATTENTION, "&me->finished[group], CTAS * epoch,", "&me->finished[group], CTAS * (epoch - 1) + 1,"),
    ("attention: credit when all CTAs have sent on", "attention", ATTENTION, "&me->finished[s->groups + group], c->model->push_ctas * epoch,",
     "&me->finished[s->groups + group], c->model->push_ctas * (epoch - 1),"),
    ("attention: a slab is put with its last message", "attention", ATTENTION, "!= epoch * messages)", "!= epoch * messages - (messages - 1))"),
    ("attention: a message is counted when it has landed", "attention", ATTENTION, "    struct sent *x = &q->sent[0];\n    land(x);", "    struct sent *x = &q->sent[0];"),
    ("attention: a signal stays behind its put", "attention", ATTENTION, ".value = epoch,\n                               .peer = peer,\n                               .group = index}",
     ".value = epoch,\n                               .peer = peer,\n                               .group = index + 1}"),
    ("attention: nothing is held back while waiting", "attention", ATTENTION, "        return true;\n    count_all(c, epoch, q);\n    return watch_wait", "        return true;\n    return watch_wait"),
    ("attention: the relay comes first", "attention", SCHEDULE, "    m->way = lot / receivers;", "    m->way = s->nodes - 1 - lot / receivers;"),
    ("attention: nothing goes ahead with one buffer", "attention", SCHEDULE, "return s->nodes > 1 && s->depth > 1 ? 1 : 0;", "return s->nodes > 1 ? 1 : 0;"),
    ("attention: the group that was in the buffer", "attention", SCHEDULE, ": group - s->depth;", ": group - s->depth > 0 ? group - s->depth - 1 : 0;"),
    ("attention: credit of the launch before", "attention", SCHEDULE, "    *earlier = group < s->depth;", "    *earlier = group <= s->depth;"),
    ("attention: the relay slot is its own", "attention", SCHEDULE, "    return s->world - (s->nodes > 1 ? 0 : 1);", "    return s->world - 1;"),
    ("attention: a slab's signal names the way to its sender", "attention", ATTENTION, "prs_attention_far_slab(s, back, pair", "prs_attention_far_slab(s, s->nodes - back, pair"),
    ("attention: a slab's place is that of its sender", "attention", ATTENTION, "prs_attention_stage(s, back * s->locals, pair", "prs_attention_stage(s, (s->nodes - back) * s->locals, pair"),
    ("attention: each node's credit has a word", "attention", ATTENTION, "prs_attention_far_credit(s, way, group)", "prs_attention_far_credit(s, 1, group)"),
    ("attention: a share goes only to who looks at it", "attention", SCHEDULE, "source < to ? 1 : s->segments", "source + s->locals < to ? 1 : s->segments"),
    ("attention: a neighbour's place needs its credit", "attention", ATTENTION, "(x->way == 0 || x->distance != 0) &&", "x->distance == 0 &&"),
    ("attention: groups are passed in order", "attention", ATTENTION, "pass_groups(c, epoch, &q, &passed, x.turn);", "pass_groups(c, epoch, &q, &passed, x.turn + 1);"),
    ("copied: credit for all groups", "copied", ATTENTION, "i < prs_attention_credit(s, s->world, 0); i++)\n        if (!watch", "i < s->groups; i++)\n        if (!watch"),
    ("copied: credit of the launch before", "copied", ATTENTION, "&me->credits[i], epoch - 1,", "&me->credits[i], epoch - 2,"),
    ("copied: a flag stays behind its rows", "copied", ATTENTION, "            copy_group(c, epoch, group, distance);",
     "            watch_raise(&c->model->ranks[neighbour(s, s->world - distance)].arrivals[prs_attention_copied(s, distance, group)], epoch), copy_group(c, epoch, group, distance);"),
    ("copied: a share has flags of its own", "copied", SCHEDULE, "return (order - 1) * s->groups + group;", "return group;"),
    ("copied: a group has a flag of its own", "copied", SCHEDULE, "return (order - 1) * s->groups + group;", "return order - 1;"),
    ("copied: keys and values have places of their own", "copied", SCHEDULE, "return (order - 1) * 2 + kind;", "return order - 1 + kind;"),

    ("moe: a group's word holds the epoch", "moe", MOE_ROWS, "watch_wait_exactly(&c->model->watch, &me->signal[word]", "watch_wait(&c->model->watch, &me->signal[word]"),
    ("moe: another node's rows are awaited", "moe", MOE_ROWS, "if (!watch_wait_exactly(&c->model->watch, &me->signal[word]", "if (0 && !watch_wait_exactly(&c->model->watch, &me->signal[word]"),
    ("moe: a row's flag holds the epoch", "moe", MOE_ROWS, "watch_wait_exactly(&c->model->watch, &me->staging_flags[at]", "watch_wait(&c->model->watch, &me->staging_flags[at]"),
    ("moe: other nodes' routes are awaited", "moe", MOE_ROUTE, "    for (uint32_t p = 0; p < WORLD; p++) {\n        const uint32_t *flag", "    for (uint32_t p = 0; p < 2; p++) {\n        const uint32_t *flag"),
    ("moe: a put waits for all its rows", "moe", MOE_ROWS, "prs_route_put_counter(r, n, row)]) != rows)", "prs_route_put_counter(r, n, row)]) != 1)"),
    ("moe: a signal waits for all puts of its group", "moe", MOE_ROWS, "prs_route_group_counter(r, n, row)]) == puts)", "prs_route_group_counter(r, n, row)]) == 1)"),
    ("moe: a row is counted when it has landed", "moe", MOE_ROWS, "    land(&c->model->ranks[c->rank], last);\n    relay_row_out", "    relay_row_out"),
    ("moe: a signal stays behind its puts", "moe", MOE_ROWS, "                                                 .value = epoch,\n                                                 .peer = peer,\n                                                 .group = group}",
     "                                                 .value = epoch,\n                                                 .peer = peer,\n                                                 .group = group + 1000}"),
    ("moe: a launch ends when its puts are complete", "moe", MOE_MODEL, "if (me->r.nodes > 1 && !nic_quiet(&me->nic))", "if (0)"),
    ("moe: mail has two banks", "moe", ROUTE, "return ((uint64_t)bank * r->world + p) *", "return ((uint64_t)(bank / 2 * 2) * r->world + p) *"),
    ("moe: notes have two banks", "moe", ROUTE, "((uint64_t)bank * r->nodes + b) * prs_route_note_bytes(r)", "((uint64_t)(bank / 2 * 2) * r->nodes + b) * prs_route_note_bytes(r)"),
    ("moe: counters begin anew", "moe", MOE_ROUTE, "        __atomic_store_n(&me->counters[i], 0, __ATOMIC_RELAXED);", "        (void)i;"),
    ("moe: notes name every seat", "moe", MOE_ROUTE, "seat < r->seats; seat++)\n        note[seat]", "seat < r->seats - 1; seat++)\n        note[seat]"),
    ("moe: a refused rank still gives rows on", "moe", MOE_ROWS, "    while (hand_on(c, epoch, &in, true))\n        ;\n    return in.at >= in.end;",
     "    while (!me->refused && hand_on(c, epoch, &in, true))\n        ;\n    return true;"),
    ("moe: own rows go before others' are awaited", "moe", MOE_ROWS, "    if (me->r.nodes > 1)\n        relay_out(c, epoch);\n    for (uint32_t n = 1; n < me->r.nodes; n++)\n        in.end = rows_from(me, epoch, n) > in.end ? rows_from(me, epoch, n) : in.end;\n    in.end *= me->r.nodes - 1;\n    find_incoming(me, epoch, &in);\n",
     "    for (uint32_t n = 1; n < me->r.nodes; n++)\n        in.end = rows_from(me, epoch, n) > in.end ? rows_from(me, epoch, n) : in.end;\n    in.end *= me->r.nodes - 1;\n    find_incoming(me, epoch, &in);\n    while (hand_on(c, epoch, &in, true))\n        ;\n    if (me->r.nodes > 1)\n        relay_out(c, epoch);\n"),
    ("moe: nobody waits for a row while the next one is awaited", "moe", MOE_ROWS, "        tell_incoming(c, epoch, in);\n        if (!waits", "        if (!waits"),
    ("moe: no block waits for a row while the next one is awaited", "moe", MOE_ROWS, "                tell_item(me, &last);\n", ""),
    ("moe: rows are handed on between own ones", "moe", MOE_ROWS, "        while (hand_on(c, epoch, in, false) &&", "        while (0 && hand_on(c, epoch, in, false) &&"),
    ("moe: each row that is handed on is told of", "moe", MOE_ROWS, "    tell_incoming(c, epoch, in);\n    give_row(", "    give_row("),
    ("moe: the rows of all nodes are handed on", "moe", MOE_ROWS, "    in.end *= me->r.nodes - 1;\n", ""),
    ("moe: a row is told of when it has been handed on", "moe", MOE_ROWS, "    give_row(c, epoch, in->n, in->row, false);\n    in->last_n", "    in->last_n"),
    ("moe: rows in and rows out are apart", "moe", ROUTE, "((uint64_t)out * (r->nodes - 1) + b - 1)", "((uint64_t)0 * out + b - 1)"),
    ("moe: the sender is far from each seat as it says", "moe", MOE_ROWS, "(prs_route_counterpart(r, n) + r->world - prs_route_peer(r, p)) % r->world;", "(prs_route_counterpart(r, n) + r->world - r->rank) % r->world;"),
    ("moe: groups of all sizes have a word each", "moe", ROUTE, "(b - 1) * prs_route_groups(r) + group;", "(b - 1) * (prs_route_groups(r) - 1) + group;"),

    ("moe: items of other nodes come last", "moe", MOE_ROUTE, "first_item[prs_route_node_of(&me->r, p) != 0][lead]", "first_item[0][lead]"),
    ("moe: rows of the own node come first", "moe", ROUTE, "node = (r->node + i / r->seats) % r->nodes,", "node = (r->node + r->nodes - i / r->seats) % r->nodes,"),
    ("moe: the own node's rows end with the first of another's", "moe", MOE_ROUTE, "prs_route_sender(&me->r, me->r.seats)][e];", "prs_route_sender(&me->r, me->r.seats - 1)][e];"),
    ("moe: a block with a row of another node waits for it", "route", ROUTE, ": near / PRS_TILE_M;", ": prs_ceil_div(near, PRS_TILE_M);"),
    ("moe: the first half of the experts is met once", "route", ROUTE, " || expert < r->local / 2)", ")"),
    ("moe: a last block without a row of another node does not wait", "route", ROUTE, "return near == e->rows ?", "return 0 ?"),
    ("moe: what waits for no other node is multiplied first", "route", ROUTE, "    *first = c->far ? near[c->expert] : 0;\n    return c->far ?", "    *first = 0;\n    return c->far == 0 ?"),
    ("moe: the second pass begins where the first ended", "route", ROUTE, "    *first = c->far ? near[c->expert] : 0;", "    *first = 0;"),
    ("moe: the second pass has all experts", "route", ROUTE, "c->expert = 0, c->far = 1;", "c->expert = 1, c->far = 1;"),
    ("moe: one pass tells no blocks apart", "route", ROUTE, "if (r->passes == 1 || expert", "if (expert"),

    ("copies: all of one rank before the next", "schedule", ROWS, "    c->distance = 1 + band / s->bands;\n    c->band = band % s->bands;",
     "    c->distance = 1 + band % (s->world - 1);\n    c->band = band / (s->world - 1);"),
    ("copies: a band's pieces one after the other", "schedule", ROWS, "    uint32_t band = at / s->segments;", "    uint32_t band = at % (prs_schedule_copies(s) / s->segments);"),
    ("copies: units come block by block", "schedule", ROWS, "    } else if (s->segments != 0) {\n        prs_schedule_gather_copied", "    } else if (s->segments > 100) {\n        prs_schedule_gather_copied"),
    ("copies: the block of the rank before comes first", "schedule", ROWS, "(s->rank + s->world - 1 - at / block) % s->world", "(s->rank + 1 + at / block) % s->world"),
    ("gather: a piece costs more than its bytes", "gather", TIME, " + PIECE_US * (piece - 1)", ""),
    ("gather: the host may be what is late", "gather", TIME, "fmax(2 * CALL_US * piece, 2 * CALL_US + before + PIECE_US * (piece - 1))", "2 * CALL_US + before + PIECE_US * (piece - 1)"),
    ("gather: blocks come one after the other", "gather", TIME, "turn = prs_schedule_after(s->rank, u->block, s->world);", "turn = 0;"),
    ("gather: a unit waits for each piece", "gather", TIME, "piece_comes(s, u, i))", "piece_comes(s, u, 0))"),
    ("gather: a unit begins with its first piece", "gather", TIME, "piece_comes(s, u, i))", "piece_comes(s, u, pieces - 1))"),
    ("gather: the last band may be short", "gather", TIME, "    if (rows > s->block_rows - first)\n        rows = s->block_rows - first;\n", ""),
    ("gather: long products are slower", "gather", TIME, "(cool > 1 ? pow(cool, HEAT) : 1)", "1"),
    ("gather: tall bands read more", "gather", TIME, "READ = 0.002;", "READ = 0;"),
    ("gather: the fewest of what is as fast", "gather", TIME, "if (NEARLY * us >= best)", "if (us >= best)"),
    ("gather: a band that is given stays", "gather", TIME, "try_band = i == count ? given_band : 0;", "try_band = i == count ? band_of(&s, i) : 0;"),
    ("gather: segments that are given stay", "gather", TIME, "try_band, given_segments != 0 ? given_segments : i);", "try_band, i);"),
    ("gather: huge products wait for the links", "gather", TIME, "return fmax(begins, piece_comes(s, &last, pieces_of(s) - 1))", "return begins"),
    ("gather: huge products take their time", "gather", TIME, "return fmax(begins, piece_comes(s, &last, pieces_of(s) - 1))", "return piece_comes(s, &last, pieces_of(s) - 1)"),
    ("gather: what is pushed holds loads up", "gather", TIME, "PUSH_STALL = 0.4;", "PUSH_STALL = 0;"),
    ("gather: a chunk takes its time with one peer", "gather", TIME, "CHUNK_US = 4.7;", "CHUNK_US = 0;"),
    ("gather: what is spread takes longer", "gather", TIME, "fmax(spread_us, ceil((double)prs_schedule_chunks(s) / ctas) * chunk);", "ceil((double)prs_schedule_chunks(s) / ctas) * chunk;"),
    ("gather: the last chunk is waited for", "gather", TIME, " + PUSH_WAVE * unit", ""),

    ("unfused: sums and rows wait for credit", "unfused", UNFUSED, "        if (x->credit &&\n", "        if (0 && x->credit &&\n"),
    ("unfused: the credit of the launch before", "unfused", UNFUSED, "&me->signals[p.credit], me->epoch, \"credit\"", "&me->signals[p.credit], me->epoch - 1, \"credit\""),
    ("unfused: a launch ends when its puts are complete", "unfused", UNFUSED, "if (!meet(me) || !nic_quiet(&me->nic))", "if (!meet(me))"),
    ("unfused: a launch ends when the neighbours have read", "unfused", UNFUSED, "if (!meet(me) || !nic_quiet(&me->nic))", "if (!nic_quiet(&me->nic))"),
    ("unfused: sums are added up when all are there", "unfused", UNFUSED, "    if (!meet(me))\n        return false;\n    for", "    for"),
    ("unfused: the product waits for the neighbours' rows", "unfused", UNFUSED, "if (!spread(me, &x, false) || !meet(me))", "if (!spread(me, &x, false))"),
    ("unfused: what crosses is awaited", "unfused", UNFUSED, "&me->signals[p.awaited], me->epoch + 1,", "&me->signals[p.awaited], me->epoch,"),
    ("unfused: a signal stays behind its put", "unfused", UNFUSED, ".value = me->epoch + 1, .peer = p.peer, .group = x->word}", ".value = me->epoch + 1, .peer = p.peer, .group = x->word + 2}"),
    ("unfused: each sender has a slot of its own there", "unfused", EXCHANGE, "x->target + mine * x->slot_bytes", "x->target + mine / 2 * x->slot_bytes"),
    ("unfused: a slot here is that of its receiver", "unfused", EXCHANGE, "x->slot_bytes != 0 ? i * x->slot_bytes", "x->slot_bytes != 0 ? mine * x->slot_bytes"),
    ("unfused: sums are as long as the receiver's share", "unfused", EXCHANGE, "x->slot_bytes != 0 ? p.peer : s->rank", "s->rank"),
    ("unfused: a signal names its sender", "unfused", EXCHANGE, "prs_exchange_word(s, x->word, mine)", "prs_exchange_word(s, x->word, i)"),
    ("unfused: shares and credit have words of their own", "unfused", EXCHANGE, "kind * (s->nodes - 1) + from", "kind * 0 + from"),
    ("unfused: the last share is what is left", "unfused", EXCHANGE, "s->each * rank < s->all ? s->each * rank : s->all", "s->each * rank"),
]


def build(tree, program, flags):
    out = os.path.join(tree, "program")
    sources = [os.path.join(tree, "test/fused", s) for s in PROGRAMS[program][0]] + [os.path.join(tree, "transport/util", s) for s in ("error.c", "log.c", "env.c")]
    sources += [os.path.join(tree, "test/support/criterion_arena.c")]
    compile_or_exit(["cc", "-std=gnu11", *flags, "-D_GNU_SOURCE", '-DPRS_VERSION="test"', "-I", tree, "-I", os.path.join(tree, "include"), *sources, "-o", out,
                     "-lcriterion", "-lpthread", "-lm"], program)
    return out


def what_failed(text):
    found = re.search(r"(rank \d+: .*: want \d+, have \d+)|(WARNING: ThreadSanitizer: [a-z ]*)|(does not end)|(Expression .*)|(Unexpected signal.*)", text)
    return found.group(0) if found else "a test failed"


def catch(tree, program):
    for flags in (PLAIN, RACES):
        text, status = run_bounded([build(tree, program, flags), "--filter", PROGRAMS[program][1], "--fail-fast", "-j1", "--timeout", str(LIMIT_S)], LIMIT_S,
                                   TSAN_OPTIONS="halt_on_error=1")
        if status != 0:
            return what_failed(text)
    return None


def replace(tree, file, old, new):
    text = mutated(tree, file, old, new)
    with open(os.path.join(tree, file), "w") as out:
        out.write(text)


def try_rule(root, rule):
    _, program, file, old, new = rule
    with tempfile.TemporaryDirectory() as tree:
        for folder in ("fused", "test/fused", "test/support", "transport/util", "include"):
            shutil.copytree(os.path.join(root, folder), os.path.join(tree, folder))
        replace(tree, "test/fused/watch.h", "WAIT_SECONDS = 60", "WAIT_SECONDS = 5")
        if file:
            replace(tree, file, old, new)
        return catch(tree, program)


def main():
    root, word = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    rules = [r for r in RULES if word in r[0]]
    for program in sorted({r[1] for r in rules}):
        failed = try_rule(root, ("", program, None, "", ""))
        if failed:
            raise SystemExit(f"{program}, without a mutation: {failed}")
    return try_all([r[0] for r in rules], lambda number: try_rule(root, rules[number]))


if __name__ == "__main__":
    sys.exit(main())
