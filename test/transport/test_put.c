/* SPDX-License-Identifier: Apache-2.0 */
/* Puts, notifications and gets between two processes. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "test/transport/pair.h"

#define ROW(rails_a, rails_b, queues)                                                                                  \
    (&(struct pair_spec){.rails = {rails_a, rails_b}, .queues_per_rail = queues, .buffer_bytes = 8 << 20})

static const size_t sizes[] = {0, 1, 7, 8, 63, 64, 65, 4095, 4096, 4097, 65536, 65537, 131073, 1000003, 4194304};
enum { SIZES = sizeof(sizes) / sizeof(*sizes) };

static void send_sizes(struct pair *pair)
{
    struct prs_op op;

    for (uint32_t i = 0; i < SIZES; i++) {
        struct prs_put put = pair_put_of(pair, 0, 3, sizes[i], i, PRS_PUT_NOTIFY);

        pair_fill(pair->buffer, sizes[i], i);
        pair_put(pair, &op, &put);
        pair_wait_op(pair, &op);
        pair_barrier(pair); /* the other side has checked it */
    }
}

static void receive_sizes(struct pair *pair)
{
    for (uint32_t i = 0; i < SIZES; i++) {
        pair_wait_notified(pair, i + 1);
        must(pair->count[i] == 1 && pair->bytes[i] == sizes[i], "id %u: %u times, %llu bytes, expected %zu", i,
             pair->count[i], (unsigned long long)pair->bytes[i], sizes[i]);
        pair_check(pair->buffer + 3, sizes[i], i, "put");
        must(pair->buffer[3 + sizes[i]] == 0 || i > 0, "wrote too far");
        pair_barrier(pair);
    }
}

Test(put, arrives_whole_at_every_size)
{
    pair_run(ROW(1, 1, 1), send_sizes, receive_sizes);
}

Test(put, arrives_whole_over_two_queues)
{
    pair_run(ROW(1, 1, 2), send_sizes, receive_sizes);
}

Test(put, arrives_whole_over_two_rails_of_two_queues)
{
    pair_run(ROW(2, 2, 2), send_sizes, receive_sizes);
}

Test(put, arrives_whole_over_unequal_rails)
{
    pair_run(ROW(2, 1, 1), send_sizes, receive_sizes);
    pair_run(ROW(1, 2, 2), send_sizes, receive_sizes);
}

static void send_by_both_rails(struct pair *pair)
{
    struct prs_stats stats;

    send_sizes(pair);
    prs_peer_stats(pair->peer, &stats);
    /* The parts need not be equal: measured rates decide, and a rail is slow while its thread is kept off its core. */
    must(stats.rail_bytes[0] > 1 << 18 && stats.rail_bytes[1] > 1 << 18, "rail bytes %llu and %llu",
         (unsigned long long)stats.rail_bytes[0], (unsigned long long)stats.rail_bytes[1]);
}

Test(put, uses_both_rails_when_large)
{
    pair_run(ROW(2, 2, 1), send_by_both_rails, receive_sizes);
}

static void send_over_the_rail_of_that_number(struct pair *pair)
{
    struct prs_rail_info first;
    struct prs_stats stats;
    int carries;

    must(prs_rail_query(pair->fabric, 0, &first) == 0, "%s", prs_error_text());
    carries =
        strcmp(first.name, "softnic1") != 0; /* which of the two comes first depends on where they are plugged in */
    send_sizes(pair);
    prs_peer_stats(pair->peer, &stats);
    must(!stats.rail_bytes[!carries] && stats.rail_bytes[carries] == stats.bytes, "rail bytes %llu and %llu of %llu",
         (unsigned long long)stats.rail_bytes[0], (unsigned long long)stats.rail_bytes[1],
         (unsigned long long)stats.bytes);
}

/* The numbers of rails pair the sender's second one with the receiver's only one. */
Test(put, bytes_are_counted_for_the_rail_that_carries_them)
{
    static const struct pair_spec spec = {.rails = {2, 1},
                                          .queues_per_rail = 1,
                                          .buffer_bytes = 8 << 20,
                                          .hca = {"=softnic0:1:7,softnic1:1:8", "=softnic0:1:8"}};

    if (!getenv("SOFTNIC_NICS") && access("/sys/class/infiniband/softnic1", F_OK))
        cr_skip_test("it names devices of the software NIC");
    if (pair_rails() < 2)
        cr_skip_test("it needs two rails");
    pair_run(&spec, send_over_the_rail_of_that_number, receive_sizes);
}

enum { BURST = 400, BURST_BYTES = 24 };

static void send_burst(struct pair *pair)
{
    static struct prs_op op[BURST];

    pair_fill(pair->buffer, BURST * BURST_BYTES, 5);
    for (uint32_t i = 0; i < BURST; i++) {
        struct prs_put put = pair_put_of(pair, i * BURST_BYTES, i * BURST_BYTES, BURST_BYTES, i, PRS_PUT_NOTIFY);

        pair_put(pair, &op[i], &put);
    }
    for (uint32_t i = 0; i < BURST; i++)
        pair_wait_op(pair, &op[i]);
}

static void check_burst(struct pair *pair)
{
    pair_wait_notified(pair, BURST);
    for (uint32_t i = 0; i < BURST; i++)
        must(pair->count[i] == 1 && pair->bytes[i] == BURST_BYTES, "id %u: %u times, %llu bytes", i, pair->count[i],
             (unsigned long long)pair->bytes[i]);
    pair_check(pair->buffer, BURST * BURST_BYTES, 5, "burst");
}

static void send_burst_cheaply(struct pair *pair)
{
    struct prs_stats stats;

    send_burst(pair);
    prs_peer_stats(pair->peer, &stats);
    must(stats.work_requests == BURST, "%llu requests", (unsigned long long)stats.work_requests);
    must(stats.doorbells < BURST / 4, "%llu doorbells for %d puts", (unsigned long long)stats.doorbells, BURST);
    must(stats.completions <= stats.doorbells, "%llu completions", (unsigned long long)stats.completions);
}

static void receive_burst_cheaply(struct pair *pair)
{
    struct prs_stats stats;

    check_burst(pair);
    prs_peer_stats(pair->peer, &stats);
    if (!pair_in_order(pair)) { /* in this case each message has its own completion */
        must(stats.arrivals == BURST, "%llu arrivals", (unsigned long long)stats.arrivals);
        return;
    }
    must(stats.arrivals < BURST / 4, "%llu arrivals for %d notifications", (unsigned long long)stats.arrivals, BURST);
    for (uint32_t i = 0; i < BURST; i++)
        must(pair->order[i] == i, "notification %u was id %u", i, pair->order[i]);
}

Test(put, of_a_burst_shares_doorbells_and_completions)
{
    pair_run(ROW(1, 1, 1), send_burst_cheaply, receive_burst_cheaply);
}

static uint64_t doorbells_of(struct pair *pair)
{
    struct prs_stats stats;

    prs_peer_stats(pair->peer, &stats);
    return stats.doorbells;
}

/* Two puts and a signal to an idle peer, one of the puts long. Return how many doorbells they took. */
static uint64_t doorbells_of_three(struct pair *pair, bool batch)
{
    struct prs_signal signal = {.dst_addr = pair->remote_words, .dst = &pair->remote_words_keys, .value = 1};
    struct prs_put small = pair_put_of(pair, 0, 0, 64, 0, 0), large = pair_put_of(pair, 64, 64, 65536, 0, 0);
    uint64_t before = doorbells_of(pair), started;
    struct prs_op op[3];

    if (batch)
        prs_peer_begin_batch(pair->peer);
    pair_put(pair, &op[0], &small);
    pair_put(pair, &op[1], &large);
    pair_signal(pair, &op[2], &signal);
    started = doorbells_of(pair);
    must(!batch || started == before, "%llu doorbells inside a batch", (unsigned long long)(started - before));
    must(!batch || prs_peer_end_batch(pair->peer) == 0, "the end of a batch");
    for (int i = 0; i < 3; i++)
        pair_wait_op(pair, &op[i]);
    return doorbells_of(pair) - before;
}

static void send_batches(struct pair *pair)
{
    uint64_t together = doorbells_of_three(pair, true), alone = doorbells_of_three(pair, false);
    struct prs_put put = pair_put_of(pair, 0, 0, 64, 0, 0);
    struct prs_op op;

    /* Under adaptive routing the signal must wait for the bytes before it. */
    must(together == (getenv("NCCL_IB_ADAPTIVE_ROUTING") ? 2 : 1), "%llu doorbells for a batch",
         (unsigned long long)together);
    must(alone > 1, "%llu doorbells without a batch", (unsigned long long)alone);
    prs_peer_begin_batch(pair->peer);
    pair_put(pair, &op, &put);
    pair_wait_op(pair, &op); /* prs_peer_progress() posts what a batch without an end has left */
    must(prs_peer_end_batch(pair->peer) == 0, "the end of a batch without requests");
    pair_swap(pair, 1);
}

static void await_batches(struct pair *pair)
{
    pair_swap(pair, 1);
}

Test(put, of_a_batch_leaves_with_one_doorbell)
{
    pair_run(&(struct pair_spec){.policy = "in_order"}, send_batches, await_batches);
}

Test(put, of_a_burst_arrives_once_over_many_queues)
{
    pair_run(ROW(2, 2, 2), send_burst, check_burst);
}

static void send_inline(struct pair *pair)
{
    for (uint32_t i = 0; i < 200; i++) {
        uint8_t bytes[PRS_INLINE_BYTES];
        struct prs_put put = pair_put_of(pair, 0, i * 64, 1 + i % 64, i, PRS_PUT_NOTIFY | PRS_PUT_INLINE);
        static struct prs_op op[200];

        put.src = NULL;
        put.src_addr = bytes;
        pair_fill(bytes, sizeof(bytes), i);
        pair_put(pair, &op[i], &put);
        memset(bytes, 0xee, sizeof(bytes)); /* the put has copied the bytes already */
        if (i == 199)
            for (uint32_t k = 0; k < 200; k++)
                pair_wait_op(pair, &op[k]);
    }
}

static void receive_inline(struct pair *pair)
{
    pair_wait_notified(pair, 200);
    for (uint32_t i = 0; i < 200; i++)
        pair_check(pair->buffer + i * 64, 1 + i % 64, i, "inline put");
}

Test(put, inline_copies_its_source)
{
    pair_run(ROW(1, 1, 1), send_inline, receive_inline);
}

static void get_sizes(struct pair *pair)
{
    pair_barrier(pair);
    for (uint32_t i = 0; i < SIZES; i++) {
        struct prs_get get = {.dst = pair->region,
                              .dst_addr = pair->buffer + 1,
                              .src_addr = pair->remote_buffer,
                              .src = &pair->remote_keys,
                              .len_bytes = sizes[i]};
        struct prs_op op;

        memset(pair->buffer, 0, sizes[i] + 2);
        must(prs_peer_get(pair->peer, &op, &get) == 0, "%s", prs_error_text());
        pair_wait_op(pair, &op);
        pair_check(pair->buffer + 1, sizes[i], 9, "get");
        must(pair->buffer[1 + sizes[i]] == 0, "read too far");
    }
}

static void offer_bytes(struct pair *pair)
{
    pair_fill(pair->buffer, 4194304, 9);
    pair_barrier(pair);
}

Test(get, brings_every_size)
{
    pair_run(ROW(1, 1, 1), get_sizes, offer_bytes);
    pair_run(ROW(2, 2, 2), get_sizes, offer_bytes);
}

static void flush_own(struct pair *pair)
{
    struct prs_op op;

    for (int i = 0; i < 3; i++) {
        must(prs_peer_flush(pair->peer, &op, pair->region, pair->buffer + 4095) == 0, "%s", prs_error_text());
        pair_wait_op(pair, &op);
    }
}

Test(flush, completes_on_every_rail)
{
    pair_run(ROW(1, 1, 1), flush_own, flush_own);
    pair_run(ROW(2, 2, 1), flush_own, flush_own);
}

static void send_more_than_max_ops(struct pair *pair)
{
    static struct prs_op op[40];
    struct prs_put put = pair_put_of(pair, 0, 0, 8, 0, 0);
    int busy = 0;

    for (int i = 0; i < 40; i++) {
        int r = prs_peer_put(pair->peer, &op[i], &put);

        busy += r == PRS_BUSY;
        must(r == 0 || r == PRS_BUSY, "%d", r);
        must((r == 0) == (i < 8), "put %d returned %d", i, r);
    }
    must(busy == 32, "%d", busy);
    for (int i = 0; i < 8; i++)
        pair_wait_op(pair, &op[i]);
    pair_put(pair, &op[0], &put);
    pair_wait_op(pair, &op[0]);
}

static void do_nothing(struct pair *pair)
{
    (void)pair;
}

Test(put, beyond_max_ops_is_refused_and_later_accepted)
{
    pair_run(&(struct pair_spec){.max_ops = 8}, send_more_than_max_ops, do_nothing);
}
