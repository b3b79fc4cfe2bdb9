/* SPDX-License-Identifier: Apache-2.0 */
/* The order engine, rule by rule. Its limits are in test_order_limits.c, networks in test_order_sim.c and
 * test_order_every.c, drain over several peers in test_order_drain.c. */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <errno.h>
#include <string.h>

#include "test/support/order_bench.h"
#include "transport/order/wire.h"

struct run_row {
    char ids[8];   /* notified puts, one chain */
    char sizes[8]; /* of each */
    char kinds[8]; /* w: plain write, i: write with immediate */
    uint32_t last_run;
};

ParameterizedTestParameters(order, consecutive_equal_messages_share_one_immediate)
{
    static struct run_row rows[] = {
        {"0", "8", "i", 1},          {"01", "88", "wi", 2},       {"0123", "8888", "wwwi", 4},
        {"02", "88", "ii", 1},       {"10", "88", "ii", 1},       {"01", "84", "ii", 1},
        {"0123", "8844", "wiwi", 2}, {"0124", "8888", "wwii", 1}, {"0012", "8888", "iwwi", 3},
    };
    return cr_make_param_array(struct run_row, rows, sizeof(rows) / sizeof(*rows));
}

ParameterizedTest(struct run_row *row, order, consecutive_equal_messages_share_one_immediate)
{
    struct bench *bench = bench_fresh(PRS_POLICY_IN_ORDER, 1, 1);
    size_t count = strlen(row->ids);
    struct prs_imm imm = {0};

    for (size_t i = 0; i < count; i++)
        bench_put(bench, (size_t)(row->sizes[i] - '0'), (uint32_t)(row->ids[i] - '0'), 0, PRS_PUT_NOTIFY);
    for (size_t i = 0; i < count; i++)
        cr_assert_eq(bench->order.queue[0].wr[i].opcode, row->kinds[i] == 'i' ? PRS_WR_WRITE_IMM : PRS_WR_WRITE,
                     "ids %s sizes %s: request %zu", row->ids, row->sizes, i);
    cr_assert_eq(prs_imm_parse(bench->order.queue[0].wr[count - 1].imm, &imm), 0);
    cr_assert(imm.run == row->last_run && imm.id == (uint32_t)(row->ids[count - 1] - '0'));
}

/* Otherwise the first of several long messages would be reported only when the last has arrived. */
Test(order, a_long_message_has_its_own_notification_and_completion)
{
    static const struct {
        size_t bytes;
        bool alone;
    } rows[] = {{8, false}, {PRS_ORDER_PROMPT_BYTES - 1, false}, {PRS_ORDER_PROMPT_BYTES, true}, {65536, true}};

    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct bench *bench = bench_fresh(PRS_POLICY_IN_ORDER, 1, 1);
        const struct prs_wr *wr = bench->order.queue[0].wr;

        for (uint32_t id = 0; id < 3; id++)
            bench_put(bench, rows[i].bytes, id, 0, PRS_PUT_NOTIFY);
        for (int k = 0; k < 2; k++) {
            cr_assert_eq(wr[k].opcode == PRS_WR_WRITE_IMM, rows[i].alone, "%zu bytes", rows[i].bytes);
            cr_assert_eq((wr[k].flags & PRS_WR_SIGNALED) != 0, rows[i].alone, "%zu bytes", rows[i].bytes);
        }
    }
}

/* Puts are posted one by one. How many completions do n lazy puts cost, and do these free all that the puts hold? */
Test(order, lazy_puts_share_completions_and_never_run_out_of_them)
{
    struct bench *bench = bench_fresh(PRS_POLICY_IN_ORDER, 1, 1);
    struct prs_chain chain;
    int signaled = 0;

    for (int i = 0; i < 4 * BENCH_DEPTH; i++) {
        const struct prs_order_queue *queue = &bench->order.queue[0];

        bench_put(bench, 8, 0, 0, PRS_PUT_LAZY);
        cr_assert(prs_order_take(&bench->order, 0, &chain));
        if (!(queue->wr[chain.first % BENCH_DEPTH].flags & PRS_WR_SIGNALED)) {
            cr_assert(prs_order_idle(&bench->order), "a lazy put does not keep others from being posted at once");
            continue;
        }
        signaled++;
        cr_assert_eq(prs_order_complete(&bench->order, 0, chain.first, 0), PRS_ORDER_LAZY);
    }
    cr_assert_eq(signaled, 4 * BENCH_DEPTH / PRS_ORDER_LAZY);
}

/* The backlog of lazy puts makes later puts take another queue. Then nothing may complete the lazy ones. */
Test(order, no_queue_is_left_with_lazy_puts_at_its_end)
{
    struct bench *bench = bench_fresh(PRS_POLICY_IN_ORDER, 1, 2);
    int changes = 0;

    for (int i = 0; i < 20 * PRS_ORDER_LAZY; i++) {
        uint32_t before = bench->order.small_queue;
        struct prs_order_queue *left = &bench->order.queue[before];
        struct prs_chain chain;

        bench_put(bench, PRS_ORDER_PROMPT_BYTES - 1, 0, PRS_GROUP_NONE, PRS_PUT_LAZY);
        while (prs_order_take(&bench->order, 0, &chain))
            ;
        if (bench->order.small_queue == before)
            continue;
        changes++;
        cr_assert_eq(left->signaled, left->head, "put %d went elsewhere", i);
        if (left->tail != left->head)
            cr_assert_gt(prs_order_complete(&bench->order, before, left->head - 1, 0), 0);
    }
    cr_assert_gt(changes, 3, "a test of two queues");
}

Test(order, a_put_that_is_waited_for_is_signaled_among_lazy_ones)
{
    struct bench *bench = bench_fresh(PRS_POLICY_IN_ORDER, 1, 1);
    struct prs_chain chain;

    bench_put(bench, 8, 0, 0, PRS_PUT_LAZY);
    bench_put(bench, 8, 0, 0, 0);
    bench_put(bench, 8, 0, 0, PRS_PUT_LAZY);
    cr_assert(prs_order_take(&bench->order, 0, &chain));
    cr_assert_eq(chain.count, 3);
    cr_assert(bench->order.queue[0].wr[2].flags & PRS_WR_SIGNALED);
    cr_assert_not(prs_order_idle(&bench->order));
}

Test(order, what_is_posted_is_not_changed_any_more)
{
    struct bench *bench = bench_fresh(PRS_POLICY_IN_ORDER, 1, 1);
    struct prs_chain chain;

    bench_put(bench, 8, 0, 0, PRS_PUT_NOTIFY);
    cr_assert(prs_order_take(&bench->order, 0, &chain));
    bench_put(bench, 8, 1, 0, PRS_PUT_NOTIFY);
    cr_assert_eq(bench->order.queue[0].wr[0].opcode, PRS_WR_WRITE_IMM);
    cr_assert_eq(bench->order.queue[0].wr[1].opcode, PRS_WR_WRITE_IMM);
}

Test(order, a_run_ends_where_the_wire_format_does)
{
    struct bench *bench = bench_fresh(PRS_POLICY_IN_ORDER, 1, 1);
    struct prs_imm imm = {0};

    bench->order.queue[0].mask = BENCH_DEPTH - 1;
    for (uint32_t i = 0; i < BENCH_DEPTH; i++)
        bench_put(bench, 8, (PRS_NOTIFY_IDS - 3 + i) % PRS_NOTIFY_IDS, 0, PRS_PUT_NOTIFY);
    cr_assert_eq(prs_imm_parse(bench->order.queue[0].wr[BENCH_DEPTH - 1].imm, &imm), 0);
    cr_assert_eq(imm.run, PRS_IMM_MAX_RUN, "over the end of the ids");
}

/* Complete the puts, so that the first signal leaves, and post that. It stays in flight. */
static void drain(struct bench *bench)
{
    struct prs_chain chain;

    cr_assert(prs_order_take(&bench->order, 0, &chain));
    cr_assert_geq(prs_order_complete(&bench->order, 0, chain.first + chain.count - 1, 0), 0);
    cr_assert(prs_order_take(&bench->order, 0, &chain));
}

/* What does each policy spend on 28 puts to one destination and 4 signals after them? */
Test(order, a_group_costs_one_fence_or_one_drain_or_nothing)
{
    static const struct {
        enum prs_policy policy;
        uint64_t fences;
        uint64_t drains;
    } rows[] = {{PRS_POLICY_NIC_FENCE, 1, 0},
                {PRS_POLICY_IN_ORDER, 0, 0},
                {PRS_POLICY_COUNTED, 0, 0},
                {PRS_POLICY_DRAIN, 0, 1}};

    for (size_t row = 0; row < sizeof(rows) / sizeof(*rows); row++) {
        struct bench *bench = bench_fresh(rows[row].policy, 1, 1);
        struct prs_op op[4];

        for (int i = 0; i < 28; i++)
            bench_put(bench, 4096, 0, 7, 0);
        for (int i = 0; i < 4; i++) {
            struct prs_signal signal = {.dst = &bench_keys, .dst_addr = 8 * (uint64_t)i, .group = 7};

            if (i == 1 && rows[row].drains)
                drain(bench);
            cr_assert_eq(prs_order_signal(&bench->order, &op[i], &signal), 0, "nothing waits");
        }
        cr_assert_eq(bench->order.stats.drains, rows[row].drains, "%s", prs_policy_names[rows[row].policy]);
        cr_assert_eq(bench->order.stats.fences, rows[row].fences, "%s", prs_policy_names[rows[row].policy]);
        cr_assert_eq(bench->order.held_count, 0);
    }
}

Test(order, drain_starts_nothing_until_its_signal_has_left)
{
    struct bench *bench = bench_fresh(PRS_POLICY_DRAIN, 1, 1);
    struct prs_signal signal = {.dst = &bench_keys};
    struct prs_put put = {.dst = &bench_keys, .len_bytes = 8};
    struct prs_chain chain;
    struct prs_op op[3];

    bench_put(bench, 8, 0, 0, 0);
    cr_assert_eq(prs_order_signal(&bench->order, &op[0], &signal), 0);
    cr_assert_eq(prs_order_put(&bench->order, &op[1], &put, bench_local_keys), PRS_BUSY);
    cr_assert(prs_order_take(&bench->order, 0, &chain) && chain.count == 1, "the put goes, the signal waits");
    cr_assert(!prs_order_take(&bench->order, 0, &chain));
    cr_assert_eq(prs_order_complete(&bench->order, 0, 0, 0), 1);
    cr_assert(prs_order_take(&bench->order, 0, &chain) && chain.count == 1, "now the signal");
    cr_assert_eq(prs_order_put(&bench->order, &op[1], &put, bench_local_keys), 0);
    cr_assert_eq(bench->order.stats.drains, 1);
}

Test(order, a_large_put_is_cut_by_speed)
{
    struct bench *bench = bench_fresh(PRS_POLICY_IN_ORDER, 2, 1);

    bench_put(bench, 900000, 0, 0, PRS_PUT_NOTIFY); /* rates are 1 and 2 */
    cr_assert_float_eq((double)bench->order.queue[0].backlog_bytes, 300000, 8192);
    cr_assert_eq(bench->order.queue[0].backlog_bytes + bench->order.queue[1].backlog_bytes, 900000);
}

struct split_row {
    uint32_t paths, queues;
    bool split;
    uint32_t parts; /* of each of three long messages */
    uint32_t used;  /* queues that carried any of the three */
};

ParameterizedTestParameters(order, a_long_message_takes_one_queue_of_each_rail_unless_it_may_split)
{
    static struct split_row rows[] = {
        {1, 1, false, 1, 1}, {1, 4, false, 1, 3}, {1, 4, true, 4, 4}, {2, 3, false, 2, 6}, {2, 2, true, 4, 4},
    };
    return cr_make_param_array(struct split_row, rows, sizeof(rows) / sizeof(*rows));
}

ParameterizedTest(struct split_row *row, order, a_long_message_takes_one_queue_of_each_rail_unless_it_may_split)
{
    struct bench *bench = bench_fresh(PRS_POLICY_IN_ORDER, row->paths, row->queues);
    uint32_t used = 0, parts = 0;
    uint64_t bytes = 0;

    bench->order.split_queues = row->split;
    for (uint32_t id = 0; id < 3; id++)
        bench_put(bench, 900000, id, 0, PRS_PUT_NOTIFY);
    for (uint32_t q = 0; q < row->paths * row->queues; q++) {
        const struct prs_order_queue *queue = &bench->order.queue[q];

        used += queue->head > 0;
        for (uint32_t i = 0; i < queue->head; i++) {
            parts++;
            bytes += queue->wr[i].len_bytes;
        }
    }
    cr_assert_eq(bytes, 2700000);
    cr_assert_eq(parts, 3 * row->parts, "%u requests for 3 messages, want %u each", parts, row->parts);
    cr_assert_eq(used, row->used, "%u queues are used, want %u", used, row->used);
}

Test(order, measured_completions_move_the_shares)
{
    struct bench *bench = bench_fresh(PRS_POLICY_IN_ORDER, 2, 1);
    uint64_t now = 1000;

    for (int i = 0; i < 60; i++) { /* path 1 has twice the nominal speed of path 0, but takes four times as long */
        struct prs_chain chain[2];
        uint64_t ns[2];

        bench_put(bench, 1000000, 0, 0, PRS_PUT_NOTIFY);
        cr_assert(prs_order_take(&bench->order, now, &chain[0]) && prs_order_take(&bench->order, now, &chain[1]));
        for (int p = 0; p < 2; p++)
            ns[p] = now + bench->order.queue[p].backlog_bytes * (p ? 4 : 1);
        for (int p = 0; p < 2; p++)
            cr_assert_geq(prs_order_complete(&bench->order, (uint32_t)p, chain[p].first, ns[p]), 0);
        now = ns[0] > ns[1] ? ns[0] : ns[1];
    }
    bench_put(bench, 1000000, 0, 0, PRS_PUT_NOTIFY);
    cr_assert_float_eq((double)bench->order.queue[0].backlog_bytes, 800000, 40000);
}

Test(order, a_completion_that_cannot_be_is_refused)
{
    struct bench *bench = bench_fresh(PRS_POLICY_IN_ORDER, 1, 1);
    struct prs_chain chain;

    bench_put(bench, 8, 0, 0, 0);
    cr_assert_eq(prs_order_complete(&bench->order, 0, 0, 0), -EPROTO, "not posted yet");
    cr_assert(prs_order_take(&bench->order, 0, &chain));
    cr_assert_eq(prs_order_complete(&bench->order, 0, 1, 0), -EPROTO);
    cr_assert_eq(prs_order_complete(&bench->order, 0, 0xffffffff, 0), -EPROTO);
    cr_assert_eq(prs_order_complete(&bench->order, 0, 0, 0), 1);
    cr_assert_eq(prs_order_complete(&bench->order, 0, 0, 0), -EPROTO, "twice");
}

Test(order, failing_gives_every_op_back)
{
    struct bench *bench = bench_fresh(PRS_POLICY_IN_ORDER, 2, 2);
    struct prs_put put = {.dst = &bench_keys, .len_bytes = 300000, .flags = PRS_PUT_NOTIFY};
    struct prs_signal signal = {.dst = &bench_keys, .flags = PRS_SIGNAL_STRONG};
    struct prs_op op[3];
    struct prs_chain chain;

    cr_assert_eq(prs_order_put(&bench->order, &op[0], &put, bench_local_keys), 0);
    cr_assert(prs_order_take(&bench->order, 0, &chain));
    cr_assert_eq(prs_order_put(&bench->order, &op[1], &put, bench_local_keys), 0);
    cr_assert_eq(prs_order_signal(&bench->order, &op[2], &signal), 0);
    cr_assert_eq(bench->order.held_count, 1);
    prs_order_fail(&bench->order, -EIO);
    for (int i = 0; i < 3; i++)
        cr_assert_eq(op[i].status, -EIO);
    cr_assert_eq(bench->order.ops, 0);
}

Test(order, adds_to_one_word_share_a_request_until_it_is_posted)
{
    static const enum prs_policy policies[] = {PRS_POLICY_IN_ORDER, PRS_POLICY_NIC_FENCE, PRS_POLICY_COUNTED};

    for (size_t row = 0; row < sizeof(policies) / sizeof(*policies); row++) {
        struct bench *bench = bench_fresh(policies[row], 1, 1);
        struct prs_signal add = {.dst = &bench_keys, .dst_addr = 64, .value = 5, .kind = PRS_SIGNAL_ADD};
        const struct prs_order_queue *queue = &bench->order.queue[0];
        struct prs_chain chain;
        struct prs_op op[6];
        uint64_t value;

        bench_put(bench, 8, 0, 0, 0);
        for (int i = 0; i < 3; i++)
            cr_assert_eq(prs_order_signal(&bench->order, &op[i], &add), 0);
        cr_assert_eq(queue->head, 2, "%s: a put and one add", prs_policy_names[policies[row]]);
        value = policies[row] == PRS_POLICY_COUNTED
                    ? ((const struct prs_record *)(const void *)(queue->inline_bytes + PRS_INLINE_BYTES))->value
                    : queue->wr[1].value;
        cr_assert_eq(value, 15);
        add.dst_addr = 72;
        cr_assert_eq(prs_order_signal(&bench->order, &op[3], &add), 0, "another word");
        bench_put(bench, 8, 0, 0, 0);
        cr_assert_eq(prs_order_signal(&bench->order, &op[4], &add), 0, "a put lies between");
        cr_assert_eq(queue->head, 5);
        cr_assert(prs_order_take(&bench->order, 0, &chain));
        cr_assert_eq(prs_order_signal(&bench->order, &op[5], &add), 0, "posted");
        cr_assert_eq(queue->head, 6);
        cr_assert_eq(bench->order.stats.merged, 2);
        cr_assert_eq(prs_order_complete(&bench->order, 0, 4, 0), 7, "2 puts and 5 signals");
        for (int i = 0; i < 5; i++)
            cr_assert_eq(op[i].status, 0);
        cr_assert_eq(op[5].status, PRS_OP_PENDING);
        prs_order_fail(&bench->order, -EIO);
        cr_assert_eq(op[5].status, -EIO);
    }
}

static uint32_t path_of_add(struct bench *bench, uint32_t group, struct prs_op *op)
{
    struct prs_signal signal = {
        .dst_addr = 4096, .dst = &bench_keys, .value = 1, .kind = PRS_SIGNAL_ADD, .group = group};
    struct prs_chain chain;

    cr_assert_eq(prs_order_signal(&bench->order, op, &signal), 0);
    while (prs_order_take(&bench->order, 0, &chain)) {
        const struct prs_order_queue *queue = &bench->order.queue[chain.queue];

        if (queue->wr[(chain.first + chain.count - 1) & queue->mask].opcode == PRS_WR_ADD)
            return queue->path;
    }
    return UINT32_MAX;
}

/* The atomics of a NIC exclude only each other, so adds of two NICs to one word may be lost. */
Test(order, adds_reach_a_word_over_one_nic)
{
    static const enum prs_policy policies[] = {PRS_POLICY_IN_ORDER, PRS_POLICY_DRAIN, PRS_POLICY_NIC_FENCE};
    static struct prs_op op[8];

    for (size_t p = 0; p < sizeof(policies) / sizeof(*policies); p++)
        for (uint32_t queues = 1; queues <= 2; queues++) {
            struct bench *bench = bench_fresh(policies[p], 2, queues);

            for (uint32_t group = 0; group < 8; group++)
                cr_assert_eq(path_of_add(bench, group, &op[group]), 0, "%s, group %u", prs_policy_names[policies[p]],
                             group);
        }
}

Test(order, an_add_waits_for_puts_that_went_to_another_nic)
{
    struct bench *bench = bench_fresh(PRS_POLICY_IN_ORDER, 2, 1);
    struct prs_chain chain;
    struct prs_op op;

    bench_put(bench, 64, 0, 1, 0); /* group 1 uses queue 1, on path 1 */
    cr_assert_eq(path_of_add(bench, 1, &op), UINT32_MAX, "it is held");
    cr_assert_eq(bench->order.queue[1].posted, 1);
    cr_assert_eq(prs_order_complete(&bench->order, 1, 0, 0), 1);
    cr_assert(prs_order_take(&bench->order, 0, &chain));
    cr_assert_eq(chain.queue, 0);
    bench_put(bench, 64, 0, 2, 0);
    cr_assert_eq(path_of_add(bench, 2, &op), 0, "group 2 uses queue 0, which keeps the order");
}

/* Networks route writes with immediate one way only. So under adaptive routing the bytes go without it. */
Test(order, under_adaptive_routing_long_bytes_go_without_an_immediate)
{
    static const struct {
        enum prs_policy policy;
        size_t bytes;
        uint32_t group, flags;
        bool apart;
    } rows[] = {{PRS_POLICY_IN_ORDER, 8192, PRS_GROUP_NONE, PRS_PUT_NOTIFY, false},
                {PRS_POLICY_IN_ORDER, 8193, PRS_GROUP_NONE, PRS_PUT_NOTIFY, true},
                {PRS_POLICY_COUNTED, 300000, 1, PRS_PUT_NOTIFY, true},
                {PRS_POLICY_COUNTED, 300000, 1, 0, true},
                {PRS_POLICY_IN_ORDER, 300000, 1, 0, false}}; /* it has no immediate anyway */

    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct bench *bench = bench_fresh(rows[i].policy, 1, 1);
        const struct prs_order_queue *queue = &bench->order.queue[0];
        static const uint64_t key[PRS_MAX_RAILS] = {BENCH_HIGH + 99};
        struct prs_imm imm = {0};
        uint64_t size = 0;

        bench->order.plain_bytes = bench->order.whole_bytes = 8192;
        prs_order_set_sizes(&bench->order, 1 << 20, key);
        bench_put(bench, rows[i].bytes, 7, rows[i].group, rows[i].flags);
        cr_assert_eq(queue->head, rows[i].apart ? 2u : 1u, "row %zu", i);
        if (!rows[i].apart)
            continue;
        cr_assert(queue->wr[0].opcode == PRS_WR_WRITE && queue->wr[0].len_bytes == rows[i].bytes);
        cr_assert(queue->wr[1].opcode == PRS_WR_WRITE_IMM && queue->wr[1].flags & PRS_WR_SIGNALED);
        cr_assert_eq(prs_imm_parse(queue->wr[1].imm, &imm), 0);
        cr_assert_eq(imm.tag != 0, rows[i].policy == PRS_POLICY_COUNTED);
        if (!rows[i].flags) {
            cr_assert(imm.bare && imm.kind == PRS_BARE_COUNT && !queue->wr[1].len_bytes);
            continue;
        }
        memcpy(&size, queue->inline_bytes + PRS_INLINE_BYTES, sizeof(size));
        cr_assert(imm.sized && imm.id == 7 && size == rows[i].bytes);
        cr_assert(queue->wr[1].remote_addr == (1 << 20) + 7 * 8 && queue->wr[1].remote_key == BENCH_HIGH + 99);
    }
}

/* It takes two requests a part, so a short queue could never hold it. */
Test(order, a_message_that_fills_its_queue_keeps_its_immediates)
{
    static const uint64_t key[PRS_MAX_RAILS];
    struct bench *bench = bench_fresh(PRS_POLICY_IN_ORDER, 1, 1);
    struct prs_put put = {.dst = &bench_keys, .len_bytes = 10 << 20, .notify_id = 1, .flags = PRS_PUT_NOTIFY};
    struct prs_op op[3];

    bench->order.plain_bytes = bench->order.whole_bytes = 8192;
    prs_order_set_sizes(&bench->order, 1 << 20, key);
    cr_assert_eq(prs_order_put(&bench->order, &op[0], &put, bench_local_keys), 0);
    cr_assert_eq(bench->order.queue[0].head, 20, "10 parts, each notified apart");
    cr_assert_eq(prs_order_put(&bench->order, &op[1], &put, bench_local_keys), PRS_BUSY, "12 of 20 slots are free");
    bench = bench_fresh(PRS_POLICY_IN_ORDER, 1, 1);
    bench->order.plain_bytes = bench->order.whole_bytes = 8192;
    prs_order_set_sizes(&bench->order, 1 << 20, key);
    put.len_bytes = 20 << 20;
    cr_assert_eq(prs_order_put(&bench->order, &op[2], &put, bench_local_keys), 0, "it would never fit with 40");
    cr_assert_eq(bench->order.queue[0].head, 20);
}

/* EFA wants a registered address even where no byte is written. */
Test(order, what_writes_nothing_names_memory_of_the_peer)
{
    struct bench *bench = bench_fresh(PRS_POLICY_COUNTED, 2, 1);
    struct prs_put put = {.notify_id = 1, .flags = PRS_PUT_NOTIFY};
    struct prs_op op;

    cr_assert_eq(prs_order_touch(&bench->order), 0);
    cr_assert_eq(prs_order_put(&bench->order, &op, &put, NULL), 0);
    for (uint32_t q = 0; q < 2; q++)
        for (uint32_t at = 0; at != bench->order.queue[q].head; at++) {
            const struct prs_wr *wr = &bench->order.queue[q].wr[at];

            cr_assert(!wr->len_bytes && bench->order.record_addr && wr->remote_addr == bench->order.record_addr);
            cr_assert_eq(wr->remote_key, bench->order.record_key[bench->order.queue[q].path], "queue %u", q);
        }
    cr_assert_eq(bench->order.queue[0].head + bench->order.queue[1].head, 2u);
}

/* ---- the ring ---- */

/* So that with many peers, of which each sends a message now and then, a cache may have the slot of the next one. */
Test(order, an_empty_ring_goes_on_at_its_first_slot_and_no_other_does)
{
    struct bench *bench = bench_fresh(PRS_POLICY_IN_ORDER, 1, 1);
    const struct prs_order_queue *queue = &bench->order.queue[0];
    struct prs_chain chain;

    for (uint32_t round = 0; round < 3 * BENCH_DEPTH; round++) {
        uint32_t first = queue->head;

        cr_assert_eq(first & queue->mask, 0, "round %u begins with slot %u", round, first & queue->mask);
        for (uint32_t i = 0; i < 3; i++) {
            bench_put(bench, 8, 0, 0, 0);
            cr_assert(prs_order_take(&bench->order, 0, &chain));
            cr_assert(chain.first == first + i && chain.count == 1);
        }
        cr_assert_eq(prs_order_complete(&bench->order, 0, first, 0), 1);
        bench_put(bench, 8, 0, 0, 0);
        cr_assert_eq(queue->head, first + 4, "two are in flight, so the next one follows them");
        cr_assert(prs_order_take(&bench->order, 0, &chain));
        for (uint32_t i = 1; i < 4; i++)
            cr_assert_eq(prs_order_complete(&bench->order, 0, first + i, 0), 1);
        cr_assert(prs_order_idle(&bench->order));
        cr_assert_eq(prs_order_complete(&bench->order, 0, first + 3, 0), -EPROTO, "it has completed before");
    }
}
