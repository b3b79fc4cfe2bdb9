#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Take each rule of the order engine away and see that a test fails.

usage: mutants.py ROOT CC [RULE]. Prints rule -> the test that caught it; with a word, only the rules whose name has it.
"""
import os
import re
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from mutants_lib import compile_or_exit, mutated, run_bounded, try_all  # noqa: E402

# The quick tests first; a mutant meets the next only when it survives.
TESTS = {"test_order": "order_bench", "test_order_limits": "order_bench", "test_tally": "order_bench", "test_order_sim": "order_net", "test_order_every": "order_net"}
ENVIRONMENT = {"PRS_TEST_STRIDE": "13"}  # of test_order_every: a mutant that one in 13 programs does not show is looked into
SOURCES = ["transport/order.c", "transport/order_signal.c", "transport/tally.c", "transport/order_cut.c", "transport/stripe.c", "transport/policy.c",
           "transport/util/error.c", "transport/util/log.c", "transport/util/env.c"]
LIMIT_S = 120  # of one test: a mutant may hang
ORDER, SIGNAL, TALLY, CUT = SOURCES[:4]

RULES = [  # name, file, text (must be there once), what stands there instead
    # Admission of puts.
    ("a put needs a free slot", ORDER, "    if (queue_full(queue))\n        return PRS_BUSY;\n    tag = plain", "    tag = plain"),
    ("the window bounds puts", ORDER, "    if (order->ops >= order->window_ops || order->stalled)\n        return PRS_BUSY;\n    if (put->len_bytes",
     "    if (order->stalled)\n        return PRS_BUSY;\n    if (put->len_bytes"),
    ("drain starts no put while a signal is held", ORDER,
     "    if (order->ops >= order->window_ops || order->stalled)\n        return PRS_BUSY;\n    if (put->len_bytes",
     "    if (order->ops >= order->window_ops)\n        return PRS_BUSY;\n    if (put->len_bytes"),
    ("a group remembers where its puts went", ORDER, "    group_note(group, index, queue->head - 1);\n    group->unfenced", "    group->unfenced"),
    ("a put makes its group need a fence", ORDER, "    group->unfenced = true;\n", ""),
    ("in_order keeps a group's puts on one queue", ORDER,
     "        return put->group % order->data_queues;\n    return choose_small_queue(order, put->len_bytes);",
     "        return (put->group + order->queue[0].head) % order->data_queues;\n    return choose_small_queue(order, put->len_bytes);"),
    ("nic_fence keeps a peer on one queue", ORDER, "    if (order->data_queues == 1 || order->policy == PRS_POLICY_NIC_FENCE)\n        return 0;",
     "    if (order->data_queues == 1)\n        return 0;"),
    ("a put counts all its parts for its tag", ORDER, "prs_tally_count(order->tally, put->group % PRS_ORDER_GROUPS, parts)",
     "prs_tally_count(order->tally, put->group % PRS_ORDER_GROUPS, 1)"),
    ("each part names its tag", ORDER, "        } else if (tag) {\n            wr->opcode", "        } else if (tag && !part.offset) {\n            wr->opcode"),
    ("a small put names its tag", ORDER, "        if (tag) {\n            wr->opcode", "        if (tag && order->ops) {\n            wr->opcode"),
    ("a put without a free tag waits", ORDER, "    return tag ? tag : -1;", "    return tag;"),
    ("a cut put needs room on each queue", CUT, "        if (here > queue->mask + 1 - (queue->head - queue->tail))\n            return 0;", ""),
    ("a queue is left behind a signaled request", ORDER, "    if (ends_lazily(&order->queue[now])) {", "    if (0 && ends_lazily(&order->queue[now])) {"),
    # Runs of notifications.
    ("only the last of a run has the immediate", ORDER, "        queue->wr[(queue->head - 2) & queue->mask].opcode = PRS_WR_WRITE;\n", ""),
    ("a run is as long as the format allows at most", ORDER, "run < max_run && bytes", "bytes"),
    ("a long message ends a run", ORDER, "run < max_run && bytes < PRS_ORDER_PROMPT_BYTES", "run < max_run"),
    ("a posted request is in no run any more", ORDER, "    end_run(queue); /* what is posted", "    /* what is posted"),
    ("a plain put ends a run", ORDER, "    } else {\n        end_run(queue);\n        if (tag)", "    } else {\n        if (tag)"),
    ("a signal ends a run", SIGNAL, "    group->unfenced = false;\n    end_run(queue);", "    group->unfenced = false;"),
    # Posting and completion.
    ("a chain that is waited for ends signaled", ORDER, "    if (queue->eager || queue->head", "    if (queue->head"),
    ("lazy requests are signaled now and then", ORDER, "queue->head - queue->signaled >= PRS_ORDER_LAZY || ", ""),
    ("a long request is signaled itself", ORDER, "    if (put->len_bytes >= PRS_ORDER_PROMPT_BYTES)\n        signal_request(order, queue, queue->head - 1);\n    else if", "    if"),
    ("a completion retires all before it", ORDER, "    do\n        done += retire(owner[tail++ & mask]);\n    while (tail != end);", "    done += retire(owner[tail & mask]);\n    tail = end;"),
    ("an impossible completion is refused", ORDER, "    if (end == tail || end - tail > queue->posted - tail)\n        return -EPROTO;\n", ""),
    ("a completion looks after held signals", ORDER, "    if (order->held_count)\n        prs_order_release(order);\n", ""),
    ("merged signals are all done", ORDER, "    while (owner)\n        done += prs_op_part_done(owner_pop(&owner));", "    done += prs_op_part_done(owner_pop(&owner));"),
    ("failing ends held signals too", ORDER, "        prs_op_fail(order->held[order->held_first].op, status);\n", ""),
    ("a finished path is measured", ORDER, "        path->rate = (path->rate * MEASURE_OLD + sample) / (MEASURE_OLD + 1);\n", ""),
    # Gets.
    ("a get is remembered for strong signals", ORDER, "queue->last_read = queue->last_work = queue->last_kept = queue->head;", "queue->last_work = queue->last_kept = queue->head;"),
    ("drain remembers where gets went", ORDER, "queue->last_read = queue->last_work = queue->last_kept = queue->head;", "queue->last_read = queue->last_kept = queue->head;"),
    ("the parts of a message do not overlap", CUT, "    part->offset += part->bytes;\n", ""),
    ("no part is longer than the NIC takes", CUT, "(part->left < order->max_part_bytes ? part->left : order->max_part_bytes);", "part->left;"),
    ("a get is cut over the queues", ORDER, "    if (get->len_bytes <= order->split_bytes || order->policy", "    if (get->len_bytes || order->policy"),
    # Signals.
    ("a signal waits while two queues have its puts", SIGNAL, "order->policy == PRS_POLICY_DRAIN ? need != 0 : !at_most_one(need))) {", "order->policy == PRS_POLICY_DRAIN && need != 0)) {"),
    ("a drained signal waits for everything", SIGNAL, "order->policy == PRS_POLICY_DRAIN ? need != 0 : !at_most_one(need))) {", "!at_most_one(need))) {"),
    ("a signal goes to the queue of its puts", SIGNAL, "        index = need ? lowest(need) : signal->group % order->data_queues;\n        if",
     "        index = signal->group % order->data_queues;\n        if"),
    ("no signal overtakes one that is held", SIGNAL, "    if (order->held_count || (order->policy", "    if ((order->policy"),
    ("no signal is held beyond the room for it", SIGNAL, " || order->stalled || order->held_count == PRS_ORDER_HELD)", " || order->stalled)"),
    ("the window bounds signals", SIGNAL, "    if (order->ops >= order->window_ops || order->stalled ||", "    if (order->stalled ||"),
    ("a second signal waits while drain stalls", SIGNAL, "order->window_ops || order->stalled || order->held_count", "order->window_ops || order->held_count"),
    ("a held drained signal stalls the rest", SIGNAL, "        order->stalled = true;\n", ""),
    ("the stall ends with its signal", SIGNAL, "        order->stalled = false;\n", ""),
    ("a strong signal waits for all groups", SIGNAL, "strong = signal->flags & PRS_SIGNAL_STRONG;\n    bool work", "strong = false;\n    bool work"),
    ("a drained signal waits for work of all groups", SIGNAL, "if ((drain || strong ||", "if ((strong ||"),
    ("signals in a row drain once", SIGNAL, "bool work = drain && order->in_order && !strong;", "bool work = false;"),
    ("where queues keep no order each signal drains", SIGNAL, "bool work = drain && order->in_order && !strong;", "bool work = drain && !strong;"),
    ("a strong signal drains behind signals too", SIGNAL, "bool work = drain && order->in_order && !strong;", "bool work = drain && order->in_order;"),
    ("drain remembers where puts went", ORDER, "    queue->last_work = queue->last_kept = queue->head;\n    if", "    queue->last_kept = queue->head;\n    if"),
    ("a strong signal knows where puts went", ORDER, "    queue->last_work = queue->last_kept = queue->head;\n    if", "    queue->last_work = queue->head;\n    if"),
    ("a strong signal knows where gets went", ORDER, "queue->last_read = queue->last_work = queue->last_kept = queue->head;", "queue->last_read = queue->last_work = queue->head;"),
    ("a strong signal knows where signals went", SIGNAL, "    order->signal_last[index] = queue->head - 1;\n    queue->last_kept = queue->head;\n", "    order->signal_last[index] = queue->head - 1;\n"),
    ("a drained signal knows where records went", SIGNAL, "    queue->last_kept = queue->head;\n    end_run(queue);", "    end_run(queue);"),
    ("no signal waits for puts of no group", ORDER, "    if (put->group == PRS_GROUP_NONE)\n        return;\n    queue->last_work", "    queue->last_work"),
    ("what a held signal waits for is signaled", ORDER, "|| (!plain && order->holds && put->group != PRS_GROUP_NONE))", ")"),
    ("a put of no group stays lazy", ORDER, "order->holds && put->group != PRS_GROUP_NONE))", "order->holds))"),
    ("a held signal waits for all that it needs", SIGNAL, "        need = held->need | unfinished_signals(order);", "        need = unfinished_signals(order);"),
    ("a released signal stays behind those that left", SIGNAL, "        need = held->need | unfinished_signals(order);", "        need = held->need;"),
    ("a released signal goes to the queue that is left", SIGNAL, "        index = need ? lowest(need) : held->signal.group", "        index = held->signal.group"),
    ("a drained signal leaves when all is done", SIGNAL, "        if (order->policy == PRS_POLICY_DRAIN ? need != 0 : !at_most_one(need))\n            return;", "        if (!at_most_one(need))\n            return;"),
    ("held signals leave oldest first", SIGNAL, "        order->held_first = (order->held_first + 1) % PRS_ORDER_HELD;\n        order->held_count--;\n        order->stalled",
     "        order->held_count--;\n        order->stalled"),
    ("a held signal has its own copy of the keys", SIGNAL, "    held->keys = *signal->dst;", "    held->keys = (struct prs_keys){{0}};"),
    ("later signals of a group know of the earlier", SIGNAL, "    end_run(queue);\n    account(order, index, sizeof signal->value);\n    group_note(group, index, queue->head - 1);",
     "    end_run(queue);\n    account(order, index, sizeof signal->value);"),
    ("a signal carries its value with it", SIGNAL, "    if (signal->kind == PRS_SIGNAL_SET)\n        copy_inline(queue, wr, &signal->value, sizeof signal->value);\n", ""),
    # Fences.
    ("nic_fence fences behind puts", SIGNAL, "(order->policy == PRS_POLICY_NIC_FENCE && (group->unfenced || strong))", "(order->policy == PRS_POLICY_NIC_FENCE && strong)"),
    ("nic_fence fences strong signals", SIGNAL, "(group->unfenced || strong))", "group->unfenced)"),
    ("a group has one fence, not one a signal", SIGNAL, "    if (fenced)\n        fence(order, wr);\n    group->unfenced = false;\n    end_run", "    if (fenced)\n        fence(order, wr);\n    end_run"),
    ("a strong signal fences behind reads", SIGNAL, "(strong && queue->last_read && queue_has(queue, queue->last_read - 1))", "false"),
    ("nic_fence posts signals where the puts are", SIGNAL, "            index = 0;\n        if (admit", "            index = 1 % order->data_queues;\n        if (admit"),
    # Merging.
    ("a posted add is not joined", SIGNAL, "queue->head != queue->posted ?", "queue->head != queue->tail ?"),
    ("only adds are joined", SIGNAL, "signal->kind == PRS_SIGNAL_ADD && queue->head", "queue->head"),
    ("only adds to the same word are joined", SIGNAL, "wr->opcode == PRS_WR_ADD && wr->remote_addr == signal->dst_addr &&", "wr->opcode == PRS_WR_ADD &&"),
    ("a join adds", SIGNAL, "        wr->value += signal->value;\n", ""),
    ("only adds to the same word share a record", SIGNAL, "record.addr != signal->dst_addr || ", ""),
    ("a record is joined only while its group is closed", SIGNAL, " || order->tally->interval[slot].tag)\n        return false;", ")\n        return false;"),
    ("a record is joined only by its own group", SIGNAL, "record.slot != slot ||", ""),
    # Counted.
    ("a strong record closes all other groups", SIGNAL, "    uint32_t others = strong ? open_intervals(order->tally, slot) : 0;", "    uint32_t others = 0;"),
    ("a strong record is a barrier", SIGNAL, "                                 .barrier = strong};", "                                 .barrier = 0};"),
    ("a strong record follows reads", SIGNAL, "        fence(order, &queue->wr[(queue->head - 1) & queue->mask]);\n", "        ;\n"),
    ("a strong record waits while two queues read", SIGNAL, "    if (!(order->fence ? at_most_one(reads) : reads == 0) || !prs_tally_room", "    if (!(order->fence || reads == 0) || !prs_tally_room"),
    ("without a fence a strong record waits for reads", SIGNAL, "(order->fence ? at_most_one(reads) : reads == 0)", "at_most_one(reads)"),
    # Neither order nor adds.
    ("without adds a drained signal is a record", SIGNAL, "    if (order->tally)\n        return admit_as_record(order, index, op, signal, keys);\n", ""),
    ("a record has its own copy of the keys", SIGNAL, "                                .key = keys->rkey[order->path[0].remote_rail],\n                                .kind", "                                .key = signal->dst->rkey[order->path[0].remote_rail],\n                                .kind"),
    ("a drained record needs room before it is held", SIGNAL, "    if (order->tally && !prs_tally_room(order->tally, 1))\n        return PRS_BUSY;\n", ""),
    ("only counted counts puts", ORDER, "    if (order->policy != PRS_POLICY_COUNTED || put->group", "    if (!order->tally || put->group"),
    ("a word waits for the one before", ORDER, "    if (queue_full(queue) || (!order->in_order && order->last_word && queue_has(queue, order->last_word - 1)))", "    if (queue_full(queue))"),
    ("records that have no room together leave one by one", SIGNAL, "        (void)close_intervals(order, index, others);\n        return PRS_BUSY;", "        return PRS_BUSY;"),
    ("closing needs slots of the queue", SIGNAL, "    for (; open && !queue_full(queue) && prs_tally_room", "    for (; open && prs_tally_room"),
    ("records need slots of the queue", SIGNAL, "    if (queue->head - queue->tail + records > queue->mask + 1)\n        return PRS_BUSY;\n", ""),
    ("records need room at the receiver", TALLY, "    return tally->next_number - tally->credited + records <= PRS_RECORDS;", "    return true;"),
    ("credits free tags", TALLY, "        if (tag)\n            tally->free_tag[tally->free_count++] = tag;\n", ""),
    ("credits for what was never sent are ignored", TALLY, "    if (raised - tally->credited > tally->next_number - tally->credited)\n        return;", ""),
    ("a signal closes its interval", TALLY, "    interval->tag = 0;\n    interval->count = 0;\n    if", "    interval->count = 0;\n    if"),
    # Settling.
    ("settling waits for what is in flight", SIGNAL, "    if (order->ops)\n        return PRS_AGAIN;\n    if (!order->tally", "    if (!order->tally"),
    ("an ask is behind all that was sent", SIGNAL, "{.kind = PRS_RECORD_ASK, .barrier = true}", "{.kind = PRS_RECORD_ASK}"),
    ("an answer is of what was sent before the ask", TALLY, "    return prs_tally_asked(tally) && tally->credited == tally->asked;", "    return tally->credited - tally->asked < PRS_RECORDS;"),
    ("one ask is enough", SIGNAL, "    if (!prs_tally_asked(order->tally) && prs_tally_room", "    if (prs_tally_room"),
    ("a record waits for its arrivals", TALLY, "(!record->tag || arrived == record->expected) &&", "(!record->tag || arrived || true) &&"),
    ("a record waits for earlier ones of its group", TALLY, "            !(record->barrier ? blocked : blocked >> record->slot & 1)) {", "            !(record->barrier ? blocked : 0)) {"),
    ("a barrier waits for all earlier records", TALLY, "            !(record->barrier ? blocked : blocked >> record->slot & 1)) {", "            !(blocked >> record->slot & 1)) {"),
    ("records are taken without gaps", TALLY, "    while (counts->upto - counts->raised < PRS_RECORDS && counts->here[counts->upto % PRS_RECORDS])\n        counts->upto++;",
     "    while (record->number >= counts->upto)\n        counts->upto++;"),
    ("a record comes once", TALLY, "        counts->here[slot] || record->tag", "        record->tag"),
    ("a count is never exceeded", TALLY, "        if (record->tag && arrived > record->expected)\n            return -EPROTO;\n", ""),
    ("a raised tag counts from nothing", TALLY, "    counts->arrived[record->tag] = 0;", "    if (record->number % 2)\n        counts->arrived[record->tag] = 0;"),
    ("a record is raised once", TALLY, "    counts->done[record->number % PRS_RECORDS] = true;\n", "    counts->done[record->number % PRS_RECORDS] = record->kind != PRS_RECORD_SET;\n"),
]


class Builder:
    def __init__(self, root, cc, work):
        self.root, self.work = root, work
        self.compile = [*cc.split(), "-std=gnu11", "-O2", "-D_GNU_SOURCE", "-DPRS_VERSION=\"test\"", "-I", root, "-I", os.path.join(root, "include"), "-c"]
        self.link = [*cc.split(), "-o"]
        self.libraries = ["-lcriterion", "-lpthread"]

    def object(self, source, out):
        compile_or_exit([*self.compile, source, "-o", out], source)
        return out

    def common(self):
        self.sources = {s: self.object(os.path.join(self.root, s), os.path.join(self.work, os.path.basename(s) + ".o")) for s in SOURCES}
        self.tests = {t: self.object(os.path.join(self.root, "test/unit", t + ".c"), os.path.join(self.work, t + ".o")) for t in TESTS}
        self.support = {s: self.object(os.path.join(self.root, "test/support", s + ".c"), os.path.join(self.work, s + ".o"))
                        for s in set(TESTS.values())}

    def program(self, test, number, mutant):
        path = os.path.join(self.work, f"{test}.{number}")
        objects = [self.tests[test], self.support[TESTS[test]], *{**self.sources, **mutant}.values()]
        compile_or_exit([*self.link, path, *objects, *self.libraries], f"linking {test}")
        return path


def first_failure(text):
    found = re.search(r"\[(?:FAIL|ERR |CRASH)[^\]]*\] ([a-z_]+::[A-Za-z0-9_]+)", text) or re.search(r"\[----\].*?([a-z_]+::[a-z0-9_]+)", text)
    return found.group(1) if found else "a test"


def catch(builder, number, mutant):
    """The test that fails, or None."""
    for test in TESTS:
        program = builder.program(test, number, mutant)
        try:
            text, status = run_bounded([program, "--fail-fast", "-j1", "--timeout", str(LIMIT_S // 2)], LIMIT_S, **ENVIRONMENT)
        finally:
            os.unlink(program)
        if status is None:
            return f"{test} (does not end)"
        if status:
            return first_failure(text)
    return None


def try_rule(builder, number, rule):
    _, source, old, new = rule
    changed = os.path.join(builder.work, f"mutant{number}.c")
    text = mutated(builder.root, source, old, new)
    with open(changed, "w") as out:
        out.write(text)
    return catch(builder, number, {source: builder.object(changed, changed + ".o")})


def main():
    root, cc = sys.argv[1], sys.argv[2]
    rules = [rule for rule in RULES if len(sys.argv) < 4 or sys.argv[3] in rule[0]]
    with tempfile.TemporaryDirectory() as work:
        builder = Builder(root, cc, work)
        builder.common()
        whole = catch(builder, "whole", {})
        if whole:
            raise SystemExit(f"without a mutation: {whole} fails")
        return try_all([rule[0] for rule in rules], lambda number: try_rule(builder, number, rules[number]), os.cpu_count() or 1)


if __name__ == "__main__":
    sys.exit(main())
