/* SPDX-License-Identifier: Apache-2.0 */
/* The limits of the order engine: each rule by which it holds a signal or lets an operation wait. */
#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>

#include "test/support/order_bench.h"
#include "test/support/order_start.h"
#include "transport/order/wire.h"

static int signal_one(struct bench *bench, struct prs_op *op, uint32_t group, uint32_t flags)
{
    struct prs_signal signal = {.dst = &bench_keys, .dst_addr = 64, .group = group, .flags = flags};

    return prs_order_signal(&bench->order, op, &signal);
}

static int get_one(struct bench *bench, struct prs_op *op, size_t bytes)
{
    struct prs_get get = {.src = &bench_keys, .len_bytes = bytes};

    return prs_order_get(&bench->order, op, &get, bench_local_keys);
}

static void post_and_complete_all(struct bench *bench)
{
    struct prs_chain chain;

    while (prs_order_take(&bench->order, 0, &chain))
        cr_assert_geq(prs_order_complete(&bench->order, chain.queue, chain.first + chain.count - 1, 0), 0);
}

Test(order_limits, the_window_bounds_puts_gets_and_signals)
{
    struct bench *bench = bench_fresh(PRS_POLICY_IN_ORDER, 4, 1); /* more slots than max_ops */
    struct prs_put put = {.dst = &bench_keys, .len_bytes = 8};
    struct prs_op op;

    for (uint32_t i = 0; i < BENCH_WINDOW; i++)
        bench_put(bench, 8, 0, i % 4, 0);
    cr_assert_eq(prs_order_put(&bench->order, &op, &put, bench_local_keys), PRS_BUSY);
    cr_assert_eq(get_one(bench, &op, 8), PRS_BUSY);
    cr_assert_eq(signal_one(bench, &op, 1, 0), PRS_BUSY);
    post_and_complete_all(bench);
    cr_assert_eq(signal_one(bench, &op, 1, 0), 0);
}

/* Under in_order all puts of a group without notification use one queue, so nothing is ever held. */
Test(order_limits, in_order_holds_no_signal_behind_plain_puts)
{
    struct bench *bench = bench_fresh(PRS_POLICY_IN_ORDER, 1, 4);
    struct prs_op op[8];

    for (uint32_t i = 0; i < 8; i++) {
        uint32_t group = i / 2;

        for (int k = 0; k < 3; k++)
            bench_put(bench, 4096, 0, group, 0);
        cr_assert_eq(signal_one(bench, &op[i], group, 0), 0);
        cr_assert_eq(bench->order.held_count, 0, "signal %u is held", i);
    }
}

Test(order_limits, a_signal_beyond_the_room_for_held_ones_is_busy)
{
    struct bench *bench = bench_fresh(PRS_POLICY_IN_ORDER, 2, 1);
    struct prs_op op[PRS_ORDER_HELD + 1];

    bench_put(bench, 300000, 0, 1, PRS_PUT_NOTIFY); /* over both queues */
    for (int i = 0; i < PRS_ORDER_HELD; i++)
        cr_assert_eq(signal_one(bench, &op[i], 1, 0), 0);
    cr_assert_eq(bench->order.held_count, PRS_ORDER_HELD);
    cr_assert_eq(signal_one(bench, &op[PRS_ORDER_HELD], 1, 0), PRS_BUSY);
    post_and_complete_all(bench); /* the put, then each signal */
    cr_assert_eq(bench->order.held_count, 0);
    for (int i = 0; i < PRS_ORDER_HELD; i++)
        cr_assert_eq(op[i].status, 0);
}

/* The caller may change its keys after the call. */
Test(order_limits, a_held_signal_leaves_with_the_keys_it_came_with)
{
    struct bench *bench = bench_fresh(PRS_POLICY_IN_ORDER, 2, 1);
    struct prs_keys keys = {.rkey = {BENCH_HIGH + 7, BENCH_HIGH + 7}};
    struct prs_signal signal = {.dst = &keys, .dst_addr = 64, .group = 1};
    const struct prs_order_queue *signaled;
    struct prs_chain chain;
    struct prs_op op;

    bench_put(bench, 300000, 0, 1, PRS_PUT_NOTIFY); /* over both queues */
    cr_assert_eq(prs_order_signal(&bench->order, &op, &signal), 0);
    cr_assert_eq(bench->order.held_count, 1);
    keys = (struct prs_keys){.rkey = {9, 9}};
    post_and_complete_all(bench);
    cr_assert_not(prs_order_take(&bench->order, 0, &chain));
    cr_assert_eq(op.status, 0);
    /* The other queue has only its part of the put. */
    signaled = &bench->order.queue[bench->order.queue[1].wr[1].remote_addr == signal.dst_addr];
    cr_assert(signaled->wr[1].remote_addr == signal.dst_addr && signaled->wr[1].remote_key == BENCH_HIGH + 7);
}

/* Such a signal was once held forever: no request asked for the completion that it waits for. */
Test(order_limits, a_signal_is_held_behind_lazy_puts_no_longer_than_they_take)
{
    static const struct {
        enum prs_policy policy;
        uint32_t paths, flags;
    } rows[] = {{PRS_POLICY_DRAIN, 1, 0},
                {PRS_POLICY_DRAIN, 1, PRS_SIGNAL_STRONG},
                {PRS_POLICY_DRAIN, 2, 0},
                {PRS_POLICY_IN_ORDER, 2, PRS_SIGNAL_STRONG}};

    for (size_t row = 0; row < sizeof(rows) / sizeof(*rows); row++) {
        struct bench *bench = bench_fresh(rows[row].policy, rows[row].paths, 1);
        struct prs_chain chain[4];
        struct prs_op op;
        int posted = 0;

        for (uint32_t group = 0; group < 2; group++)
            bench_put(bench, 8, 0, group, PRS_PUT_LAZY);
        while (prs_order_take(&bench->order, 0, &chain[posted]))
            posted++;
        cr_assert_eq(signal_one(bench, &op, 1, rows[row].flags), 0);
        cr_assert_eq(bench->order.held_count, 1, "row %zu", row);
        for (int i = 0; i < posted; i++) { /* as the NIC does: only signaled requests */
            uint32_t last = chain[i].first + chain[i].count - 1;

            if (bench->order.queue[chain[i].queue].wr[last].flags & PRS_WR_SIGNALED)
                cr_assert_geq(prs_order_complete(&bench->order, chain[i].queue, last, 0), 0);
        }
        cr_assert_eq(bench->order.held_count, 0, "row %zu: still held", row);
    }
}

/* A signal also does not make such puts ask for completions, which would cost time. */
Test(order_limits, no_signal_waits_for_puts_of_no_group)
{
    static const uint32_t flags[] = {0, PRS_SIGNAL_STRONG};

    for (size_t row = 0; row < 2; row++) {
        struct bench *bench = bench_fresh(PRS_POLICY_DRAIN, 1, 1);
        const struct prs_wr *wr = bench->order.queue[0].wr;
        struct prs_chain chain;
        struct prs_op op;

        bench_put(bench, 8, 0, PRS_GROUP_NONE, PRS_PUT_LAZY);
        cr_assert(prs_order_take(&bench->order, 0, &chain));
        cr_assert_not(wr[0].flags & PRS_WR_SIGNALED);
        cr_assert_eq(signal_one(bench, &op, 1, flags[row]), 0);
        cr_assert_eq(bench->order.held_count, 0, "flags %u", flags[row]);
        cr_assert_eq(signal_one(bench, &op, 1, PRS_SIGNAL_STRONG), 0);
        cr_assert_eq(bench->order.held_count, 1, "a strong one drains behind the signal");
    }
}

Test(order_limits, a_set_joins_no_add)
{
    struct bench *bench = bench_fresh(PRS_POLICY_IN_ORDER, 1, 1);
    struct prs_signal signal = {.dst = &bench_keys, .dst_addr = 64, .value = 1, .kind = PRS_SIGNAL_ADD, .group = 1};
    struct prs_op op[2];

    cr_assert_eq(prs_order_signal(&bench->order, &op[0], &signal), 0);
    signal.kind = PRS_SIGNAL_SET;
    cr_assert_eq(prs_order_signal(&bench->order, &op[1], &signal), 0);
    cr_assert_eq(bench->order.queue[0].head, 2);
}

Test(order_limits, a_second_signal_waits_while_the_first_drains)
{
    struct bench *bench = bench_fresh(PRS_POLICY_DRAIN, 1, 1);
    struct prs_op op[2];

    bench_put(bench, 8, 0, 1, 0);
    cr_assert_eq(signal_one(bench, &op[0], 1, 0), 0);
    cr_assert_eq(signal_one(bench, &op[1], 2, 0), PRS_BUSY);
}

/* Two messages of one size share no immediate if another put is between them. */
Test(order_limits, a_plain_put_ends_a_run)
{
    struct bench *bench = bench_fresh(PRS_POLICY_IN_ORDER, 1, 1);
    const struct prs_wr *wr = bench->order.queue[0].wr;
    struct prs_imm imm = {0};

    bench_put(bench, 8, 0, 0, PRS_PUT_NOTIFY);
    bench_put(bench, 8, 0, 0, 0);
    bench_put(bench, 8, 1, 0, PRS_PUT_NOTIFY);
    cr_assert(wr[0].opcode == PRS_WR_WRITE_IMM && wr[1].opcode == PRS_WR_WRITE && wr[2].opcode == PRS_WR_WRITE_IMM);
    cr_assert(prs_imm_parse(wr[2].imm, &imm) == 0 && imm.id == 1 && imm.run == 1);
}

/* Such a transfer would be PRS_BUSY for ever. Without a notification the wire format sets no limit. */
Test(order_limits, a_transfer_of_more_parts_than_slots_is_refused)
{
    struct bench *bench = bench_fresh(PRS_POLICY_COUNTED, 4, 1);
    struct prs_put put = {.dst = &bench_keys, .len_bytes = 70 * bench->order.max_part_bytes};
    struct prs_op op;

    cr_assert_eq(prs_order_put(&bench->order, &op, &put, bench_local_keys), 0, "70 parts over four queues");
    bench = bench_fresh(PRS_POLICY_IN_ORDER, 1, 1);
    put.len_bytes = (BENCH_DEPTH - 1) * bench->order.max_part_bytes;
    cr_assert_eq(prs_order_put(&bench->order, &op, &put, bench_local_keys), 0);
    post_and_complete_all(bench);
    put.len_bytes = (BENCH_DEPTH + 1) * bench->order.max_part_bytes;
    cr_assert_eq(prs_order_put(&bench->order, &op, &put, bench_local_keys), -EINVAL);
    cr_assert_eq(get_one(bench, &op, put.len_bytes), -EINVAL);
}

/* ---- counted ---- */

Test(order_limits, a_put_waits_for_a_free_tag_and_a_signal_for_room)
{
    struct bench *bench = bench_fresh(PRS_POLICY_COUNTED, 1, 1);
    struct prs_put put = {.dst = &bench_keys, .len_bytes = 8, .group = 1};
    struct prs_op op[2];

    for (int i = 1; i < PRS_TAGS; i++) { /* every tag is closed by a record, and none is credited */
        bench_put(bench, 8, 0, 1, 0);
        cr_assert_eq(signal_one(bench, &op[0], 1, 0), 0);
        post_and_complete_all(bench);
    }
    cr_assert_eq(prs_order_put(&bench->order, &op[0], &put, bench_local_keys), PRS_BUSY, "no tag is free");
    cr_assert_eq(signal_one(bench, &op[0], 2, 0), 0, "one record has room");
    post_and_complete_all(bench);
    cr_assert_eq(signal_one(bench, &op[0], 2, 0), PRS_BUSY, "none has");
    bench->credit = PRS_RECORDS + 1;
    cr_assert_eq(signal_one(bench, &op[0], 2, 0), PRS_BUSY, "credits for more than was sent are worth nothing");
    bench->credit = 2;
    cr_assert_eq(signal_one(bench, &op[0], 2, 0), 0);
    cr_assert_eq(prs_order_put(&bench->order, &op[1], &put, bench_local_keys), 0);
}

Test(order_limits, a_strong_signal_needs_slots_for_the_records_of_all_groups)
{
    struct bench *bench = bench_fresh(PRS_POLICY_COUNTED, 1, 1);
    struct prs_op op;

    for (uint32_t group = 0; group < 4; group++)
        for (int i = 0; i < BENCH_DEPTH / 4 - (group == 0 ? 3 : 0); i++)
            bench_put(bench, 8, 0, group, 0);
    cr_assert_eq(signal_one(bench, &op, 0, PRS_SIGNAL_STRONG), PRS_BUSY, "4 records, 3 slots");
    cr_assert_eq(signal_one(bench, &op, 0, 0), 0);
}

/* Such a signal once stayed PRS_BUSY forever: its records never have room at the same time. */
Test(order_limits, a_strong_signal_behind_more_groups_than_slots_leaves_bit_by_bit)
{
    struct bench *bench = bench_fresh(PRS_POLICY_COUNTED, 1, 1);
    const struct prs_order_queue *queue = &bench->order.queue[0];
    struct prs_record record;
    struct prs_op op;
    int tries = 0;

    bench->order.queue[0].mask = 7; /* as for max_ops = 8 */
    for (uint32_t group = 0; group < 20; group++) {
        bench_put(bench, 8, 0, group, 0);
        post_and_complete_all(bench);
    }
    while (signal_one(bench, &op, 3, PRS_SIGNAL_STRONG) == PRS_BUSY) {
        cr_assert_leq(queue->head - queue->tail, 8);
        cr_assert_lt(++tries, 10, "still busy");
        post_and_complete_all(bench);
    }
    memcpy(&record, queue->inline_bytes + ((queue->head - 1) & 7) * PRS_INLINE_BYTES, sizeof(record));
    cr_assert(record.barrier && record.slot == 3 && record.expected == 1 && record.number == 19,
              "19 other groups, each closed once: number %u", record.number);
    post_and_complete_all(bench);
    cr_assert_eq(op.status, 0);
}

/* A record announces the arrivals of its own group only, so the add of another group cannot join it. */
Test(order_limits, an_add_joins_no_record_of_another_group_or_of_an_open_interval)
{
    struct bench *bench = bench_fresh(PRS_POLICY_COUNTED, 1, 1);
    struct prs_signal add = {.dst = &bench_keys, .dst_addr = 64, .value = 1, .kind = PRS_SIGNAL_ADD, .group = 1};
    struct prs_op op[4];

    bench_put(bench, 8, 0, 1, 0);
    cr_assert_eq(prs_order_signal(&bench->order, &op[0], &add), 0);
    cr_assert_eq(prs_order_signal(&bench->order, &op[1], &add), 0);
    cr_assert_eq(bench->order.stats.merged, 1);
    add.group = 2;
    cr_assert_eq(prs_order_signal(&bench->order, &op[2], &add), 0);
    cr_assert_eq(bench->order.stats.merged, 1, "another group's record");
}

/* The put that opens an interval may use another queue, so that the record is still the last request of its queue. */
Test(order_limits, an_add_behind_a_put_on_another_queue_joins_no_earlier_record)
{
    struct bench *bench = bench_fresh(PRS_POLICY_COUNTED, 2, 1);
    struct prs_signal add = {.dst = &bench_keys, .dst_addr = 64, .value = 1, .kind = PRS_SIGNAL_ADD, .group = 1};
    struct prs_op op[2];

    cr_assert_eq(prs_order_signal(&bench->order, &op[0], &add), 0);
    cr_assert_not_null(prs_tally_count(bench->order.tally, 1, 1) ? &op[0] : NULL); /* as such a put does */
    cr_assert_eq(prs_order_signal(&bench->order, &op[1], &add), 0);
    cr_assert_eq(bench->order.stats.merged, 0);
}

/* Two adds to a word share a record only if no record came between: it could stand for puts that the second follows. */
Test(order_limits, an_add_joins_no_record_older_than_one_of_another_queue)
{
    struct bench *bench = bench_fresh(PRS_POLICY_COUNTED, 2, 1);
    struct prs_signal add = {.dst = &bench_keys, .dst_addr = 64, .value = 1, .kind = PRS_SIGNAL_ADD, .group = 3};
    struct prs_put put = {.dst = &bench_keys, .len_bytes = 8, .group = 3};
    struct prs_op op[5];

    bench->order.small_queue = 0;
    cr_assert_eq(prs_order_signal(&bench->order, &op[0], &add), 0);
    cr_assert_eq(prs_order_signal(&bench->order, &op[1], &add), 0);
    cr_assert_eq(bench->order.queue[0].head, 1u, "joined");
    bench->order.small_queue = 1;
    cr_assert_eq(prs_order_put(&bench->order, &op[2], &put, bench_local_keys), 0);
    cr_assert_eq(signal_one(bench, &op[3], 3, 0), 0);
    bench->order.small_queue = 0;
    cr_assert_eq(prs_order_signal(&bench->order, &op[4], &add), 0);
    cr_assert_eq(bench->order.queue[0].head, 2u, "a record of its own, after that of the put");
}

/* ---- gets ---- */

Test(order_limits, a_strong_signal_fences_behind_a_read_on_its_queue)
{
    static const enum prs_policy policies[] = {PRS_POLICY_IN_ORDER, PRS_POLICY_COUNTED};

    for (size_t row = 0; row < 2; row++) {
        struct bench *bench = bench_fresh(policies[row], 1, 1);
        const struct prs_wr *wr = bench->order.queue[0].wr;
        struct prs_op op[3];

        cr_assert_eq(get_one(bench, &op[0], 8), 0);
        cr_assert_eq(signal_one(bench, &op[1], 1, 0), 0);
        cr_assert_not(wr[1].flags & PRS_WR_FENCE, "%s: a weak one may pass", prs_policy_names[policies[row]]);
        cr_assert_eq(signal_one(bench, &op[2], 1, PRS_SIGNAL_STRONG), 0);
        cr_assert(wr[2].flags & PRS_WR_FENCE, "%s", prs_policy_names[policies[row]]);
        cr_assert_eq(bench->order.stats.fences, 1);
    }
}

Test(order_limits, a_read_that_is_done_needs_no_fence)
{
    struct bench *bench = bench_fresh(PRS_POLICY_IN_ORDER, 1, 1);
    struct prs_op op[2];

    cr_assert_eq(get_one(bench, &op[0], 8), 0);
    post_and_complete_all(bench);
    cr_assert_eq(signal_one(bench, &op[1], 1, PRS_SIGNAL_STRONG), 0);
    cr_assert_eq(bench->order.stats.fences, 0);
}

Test(order_limits, a_drained_signal_waits_for_a_read_too)
{
    static const uint32_t flags[] = {0, PRS_SIGNAL_STRONG};

    for (size_t row = 0; row < 2; row++) {
        struct bench *bench = bench_fresh(PRS_POLICY_DRAIN, 1, 1);
        struct prs_op op[2];

        cr_assert_eq(get_one(bench, &op[0], 8), 0);
        cr_assert_eq(signal_one(bench, &op[1], 1, flags[row]), 0);
        cr_assert_eq(bench->order.held_count, 1, "flags %u", flags[row]);
        post_and_complete_all(bench);
        cr_assert_eq(op[1].status, 0);
    }
}

Test(order_limits, a_strong_counted_signal_waits_while_two_queues_read)
{
    struct bench *bench = bench_fresh(PRS_POLICY_COUNTED, 2, 1);
    struct prs_chain chain;
    struct prs_op op[2];

    cr_assert_eq(get_one(bench, &op[0], 300000), 0);
    cr_assert(bench->order.queue[0].head == 1 && bench->order.queue[1].head == 1, "a long get is cut over the queues");
    cr_assert_eq(signal_one(bench, &op[1], 1, PRS_SIGNAL_STRONG), PRS_BUSY);
    cr_assert(prs_order_take(&bench->order, 0, &chain) && chain.queue == 0);
    cr_assert_geq(prs_order_complete(&bench->order, 0, 0, 0), 0);
    cr_assert_eq(signal_one(bench, &op[1], 1, PRS_SIGNAL_STRONG), 0);
    cr_assert_eq(bench->order.queue[1].head, 2, "to the queue that still reads");
    cr_assert(bench->order.queue[1].wr[1].flags & PRS_WR_FENCE);
}

/* ---- neither order, fence nor adds ---- */

static struct bench *bench_srd(enum prs_policy policy)
{
    static const uint64_t record_key[PRS_MAX_RAILS];
    struct bench *bench = bench_fresh(policy, 1, 1);

    bench->order.in_order = bench->order.ordered_writes = bench->order.fence = false;
    if (policy != PRS_POLICY_COUNTED)
        cr_assert_eq(prs_order_set_records(&bench->order, 4096, record_key, &bench->credit), 0);
    return bench;
}

/* Adds alone are missing. */
Test(order_limits, a_record_has_the_fence_that_a_word_has)
{
    static const enum prs_policy policies[] = {PRS_POLICY_IN_ORDER, PRS_POLICY_NIC_FENCE};
    static const uint64_t record_key[PRS_MAX_RAILS];

    for (int row = 0; row < 2; row++) {
        struct bench *bench = bench_fresh(policies[row], 1, 1);
        const struct prs_wr *wr = bench->order.queue[0].wr;
        struct prs_op op[4];

        cr_assert_eq(prs_order_set_records(&bench->order, 4096, record_key, &bench->credit), 0);
        cr_assert_eq(get_one(bench, &op[0], 8), 0);
        cr_assert_eq(signal_one(bench, &op[1], 1, PRS_SIGNAL_STRONG), 0);
        cr_assert(wr[1].flags & PRS_WR_FENCE, "%s: after the read", prs_policy_names[policies[row]]);
        bench_put(bench, 8, 0, 2, 0);
        cr_assert_eq(signal_one(bench, &op[2], 2, 0), 0);
        cr_assert_eq(!!(wr[3].flags & PRS_WR_FENCE), policies[row] == PRS_POLICY_NIC_FENCE, "after the put");
        bench_put(bench, 8, 0, PRS_GROUP_NONE, 0); /* else the next is merged */
        cr_assert_eq(signal_one(bench, &op[3], 2, 0), 0);
        cr_assert_not(wr[5].flags & PRS_WR_FENCE, "%s: a fence a group", prs_policy_names[policies[row]]);
    }
}

Test(order_limits, without_a_fence_a_strong_counted_signal_waits_for_the_read)
{
    struct bench *bench = bench_srd(PRS_POLICY_COUNTED);
    struct prs_op op[2];

    cr_assert_eq(get_one(bench, &op[0], 8), 0);
    cr_assert_eq(signal_one(bench, &op[1], 1, PRS_SIGNAL_STRONG), PRS_BUSY);
    cr_assert_eq(signal_one(bench, &op[1], 1, 0), 0, "a weak one may pass");
    post_and_complete_all(bench);
    cr_assert_eq(signal_one(bench, &op[1], 1, PRS_SIGNAL_STRONG), 0);
    cr_assert_eq(bench->order.stats.fences, 0);
}

Test(order_limits, without_adds_a_drained_signal_is_a_record_that_waits_for_nothing)
{
    struct bench *bench = bench_srd(PRS_POLICY_DRAIN);
    const struct prs_order_queue *queue = &bench->order.queue[0];
    struct prs_keys keys = {{BENCH_HIGH + 7}};
    struct prs_signal signal = {.dst = &keys, .dst_addr = 64, .value = 5, .kind = PRS_SIGNAL_ADD, .group = 1};
    struct prs_record record;
    struct prs_op op;

    bench_put(bench, 8, 0, 1, 0);
    cr_assert_eq(prs_order_signal(&bench->order, &op, &signal), 0);
    cr_assert_eq(queue->head, 1, "it is held");
    cr_assert_eq(queue->wr[0].opcode, PRS_WR_WRITE, "a put is not counted");
    memset(&keys, 0, sizeof(keys)); /* the caller may change them after the call */
    post_and_complete_all(bench);
    cr_assert_eq(op.status, 0);
    cr_assert_eq(queue->wr[0].opcode, PRS_WR_WRITE_IMM);
    memcpy(&record, queue->inline_bytes, sizeof(record));
    cr_assert(record.kind == PRS_RECORD_ADD && record.addr == 64 && record.value == 5 &&
              record.key == prs_record_key(BENCH_HIGH + 7) && record.tag == 0 && record.expected == 0);
}

Test(order_limits, without_order_a_drained_signal_waits_for_the_record_before)
{
    struct bench *bench = bench_srd(PRS_POLICY_DRAIN);
    struct prs_op op[2];

    cr_assert_eq(signal_one(bench, &op[0], 1, 0), 0);
    cr_assert_eq(signal_one(bench, &op[1], 2, 0), 0);
    cr_assert_eq(bench->order.queue[0].head, 1);
    cr_assert_eq(bench->order.held_count, 1);
    post_and_complete_all(bench);
    cr_assert_eq(op[1].status, 0);
}

Test(order_limits, without_adds_a_drained_signal_is_not_held_without_room_for_its_record)
{
    struct bench *bench = bench_srd(PRS_POLICY_DRAIN);
    struct prs_op op;

    for (int i = 0; i < PRS_RECORDS; i++) {
        cr_assert_eq(signal_one(bench, &op, 1, 0), 0);
        post_and_complete_all(bench);
    }
    bench_put(bench, 8, 0, 1, 0);
    cr_assert_eq(signal_one(bench, &op, 1, 0), PRS_BUSY, "nothing would ever release it");
    cr_assert_eq(bench->order.held_count, 0);
    bench->credit = 1;
    cr_assert_eq(signal_one(bench, &op, 1, 0), 0);
}

/* Without a barrier, the receiver might answer before requests over another rail have arrived. */
Test(order_limits, settling_asks_behind_all_that_was_sent)
{
    struct bench *bench = bench_fresh(PRS_POLICY_COUNTED, 1, 1);
    const struct prs_order_queue *queue = &bench->order.queue[0];
    struct prs_record record;
    struct prs_op op;

    cr_assert_eq(prs_order_settle(&bench->order), 0, "nothing was sent");
    cr_assert_eq(signal_one(bench, &op, 3, 0), 0);
    post_and_complete_all(bench);
    cr_assert_eq(prs_order_settle(&bench->order), PRS_AGAIN);
    memcpy(&record, queue->inline_bytes, sizeof(record));
    cr_assert(record.kind == PRS_RECORD_ASK && record.barrier && record.number == 1);
    post_and_complete_all(bench);
    cr_assert_eq(prs_order_settle(&bench->order), PRS_AGAIN);
    cr_assert_eq(queue->head, 2 * BENCH_DEPTH, "one ask is enough");
    bench->credit = 2;
    cr_assert_eq(prs_order_settle(&bench->order), 0);
}

Test(order_limits, where_nothing_keeps_order_a_word_waits_for_the_one_before)
{
    struct bench *bench = bench_srd(PRS_POLICY_COUNTED);

    cr_assert_eq(prs_order_word(&bench->order, 64, bench_path_keys, 256), 0);
    cr_assert_eq(prs_order_word(&bench->order, 64, bench_path_keys, 512), PRS_BUSY, "256 could land on it, and stay");
    post_and_complete_all(bench);
    cr_assert_eq(prs_order_word(&bench->order, 64, bench_path_keys, 512), 0);
    bench = bench_fresh(PRS_POLICY_COUNTED, 1, 1);
    cr_assert_eq(prs_order_word(&bench->order, 64, bench_path_keys, 256), 0);
    cr_assert_eq(prs_order_word(&bench->order, 64, bench_path_keys, 512), 0, "RC keeps them apart");
}

Test(order_limits, one_touch_at_a_time_writes_nothing)
{
    struct bench *bench = bench_fresh(PRS_POLICY_IN_ORDER, 1, 1);
    const struct prs_wr *wr = bench->order.queue[0].wr;

    cr_assert_eq(prs_order_touch(&bench->order), 0);
    cr_assert(wr->opcode == PRS_WR_WRITE && !wr->len_bytes);
    cr_assert_eq(prs_order_touch(&bench->order), PRS_BUSY);
    post_and_complete_all(bench);
    cr_assert_eq(bench->order.ops, 0, "it is no op");
    cr_assert_eq(prs_order_touch(&bench->order), 0, "the one before is complete");
}

/* ---- positions wrap ---- */

/* The request after which something waits has each of these positions. */
static const uint32_t near_wrap[] = {-3u, -2u, -1u, 0, 1};

Test(order_limits, a_strong_signal_fences_behind_a_read_at_any_position)
{
    static const enum prs_policy policies[] = {PRS_POLICY_IN_ORDER, PRS_POLICY_NIC_FENCE, PRS_POLICY_COUNTED};

    for (size_t row = 0; row < 3; row++) {
        for (size_t i = 0; i < sizeof(near_wrap) / sizeof(*near_wrap); i++) {
            struct bench *bench = bench_fresh(policies[row], 1, 1);
            const struct prs_order_queue *queue = &bench->order.queue[0];
            struct prs_op op[2];

            order_start(&bench->order, near_wrap[i]);
            cr_assert_eq(get_one(bench, &op[0], 8), 0);
            cr_assert_eq(signal_one(bench, &op[1], 1, PRS_SIGNAL_STRONG), 0);
            cr_assert(queue->wr[(near_wrap[i] + 1) & queue->mask].flags & PRS_WR_FENCE, "%s, read at %#x",
                      prs_policy_names[policies[row]], near_wrap[i]);
        }
    }
}

Test(order_limits, a_strong_signal_without_a_fence_waits_for_a_read_at_any_position)
{
    for (size_t i = 0; i < sizeof(near_wrap) / sizeof(*near_wrap); i++) {
        struct bench *bench = bench_srd(PRS_POLICY_COUNTED);
        struct prs_op op[2];

        order_start(&bench->order, near_wrap[i]);
        cr_assert_eq(get_one(bench, &op[0], 8), 0);
        cr_assert_eq(signal_one(bench, &op[1], 1, PRS_SIGNAL_STRONG), PRS_BUSY, "read at %#x", near_wrap[i]);
        post_and_complete_all(bench);
        cr_assert_eq(signal_one(bench, &op[1], 1, PRS_SIGNAL_STRONG), 0);
    }
}

Test(order_limits, one_word_and_one_touch_at_a_time_at_any_position)
{
    for (size_t i = 0; i < sizeof(near_wrap) / sizeof(*near_wrap); i++) {
        struct bench *bench = bench_srd(PRS_POLICY_COUNTED);

        order_start(&bench->order, near_wrap[i]);
        cr_assert_eq(prs_order_word(&bench->order, 64, bench_path_keys, 256), 0);
        cr_assert_eq(prs_order_word(&bench->order, 64, bench_path_keys, 512), PRS_BUSY, "word at %#x", near_wrap[i]);
        post_and_complete_all(bench);
        order_start(&bench->order, near_wrap[i]);
        cr_assert_eq(prs_order_touch(&bench->order), 0);
        cr_assert_eq(prs_order_touch(&bench->order), PRS_BUSY, "touch at %#x", near_wrap[i]);
        post_and_complete_all(bench);
        cr_assert_eq(prs_order_word(&bench->order, 64, bench_path_keys, 512), 0);
        cr_assert_eq(prs_order_touch(&bench->order), 0);
    }
}
