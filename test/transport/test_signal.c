/* SPDX-License-Identifier: Apache-2.0 */
/* Signals between two processes, under each policy, are never seen before the puts of their group. */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "test/transport/pair.h"
#include "transport/peer/peer.h"

enum { ROUNDS = 300, PUTS = 6, SLICE = 3000, BIG = 200000 };

/* Each round: PUTS puts of one group, then a signal with the number of the round. The other side checks the bytes. */
static void signal_rounds(struct pair *pair)
{
    static struct prs_op put_op[PUTS], signal_op;

    for (uint32_t round = 1; round <= ROUNDS; round++) {
        struct prs_signal signal = {.dst_addr = pair->remote_words,
                                    .dst = &pair->remote_words_keys,
                                    .value = round,
                                    .group = round % 3,
                                    .flags = round % 5 == 0 ? PRS_SIGNAL_STRONG : 0};

        for (uint32_t i = 0; i < PUTS; i++) {
            size_t bytes = i == 2 && round % 16 == 0 ? BIG : SLICE, at = i * (size_t)BIG;
            struct prs_put put =
                pair_put_of(pair, at, at, bytes, (round * PUTS + i) % PRS_NOTIFY_IDS, i == 1 ? PRS_PUT_NOTIFY : 0);

            put.group = signal.flags & PRS_SIGNAL_STRONG ? i : signal.group;
            pair_fill(pair->buffer + at, bytes, round + i);
            pair_put(pair, &put_op[i], &put);
        }
        pair_signal(pair, &signal_op, &signal);
        for (uint32_t i = 0; i < PUTS; i++)
            pair_wait_op(pair, &put_op[i]);
        pair_wait_op(pair, &signal_op);
        pair_barrier(pair);
    }
}

static void wait_word(struct pair *pair, uint64_t *word, uint64_t value)
{
    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) != value) /* pairs with the NIC's store; alarm() limits the time */
        must(prs_peer_progress(pair->peer) >= 0, "%s", prs_error_text());
}

static void check_rounds(struct pair *pair)
{
    const struct prs_records *records = pair->peer->records;

    for (uint32_t round = 1; round <= ROUNDS; round++) {
        wait_word(pair, pair->words, round);
        if (pair->spec->words_on_device)
            must(records->flushed == records->unordered,
                 "round %u was raised before a read after %llu of %llu arrivals", round,
                 (unsigned long long)(records->unordered - records->flushed), (unsigned long long)records->unordered);
        for (uint32_t i = 0; i < PUTS; i++)
            pair_check(pair->buffer + i * (size_t)BIG, i == 2 && round % 16 == 0 ? BIG : SLICE, round + i, "put");
        pair_wait_notified(pair, round); /* the bytes have arrived; their notification may not be polled yet */
        pair_barrier(pair);
    }
}

#define RUN(name, ...)                                                                                                 \
    Test(signal, name)                                                                                                 \
    {                                                                                                                  \
        pair_run(&(struct pair_spec){.buffer_bytes = 2 << 20, __VA_ARGS__}, signal_rounds, check_rounds);              \
    }

RUN(follows_its_puts_in_order, .policy = "in_order")
RUN(follows_its_puts_in_order_over_many_queues, .policy = "in_order", .rails = {2, 2}, .queues_per_rail = 2)
RUN(follows_its_puts_drained, .policy = "drain", .rails = {2, 2}, .queues_per_rail = 2)
RUN(follows_its_puts_fenced, .policy = "nic_fence", .rails = {2, 2})

/* Data that arrived over another rail than the signal may still be on its way to a device when its completion is here.
 * So each round flushes it by one read. Host memory, or a single rail that keeps order, needs no such read. */
static void check_flushes(struct pair *pair)
{
    bool wanted = pair->spec->words_on_device && (pair->spec->rails[1] > 1 || !pair_in_order(pair));
    struct prs_stats stats;

    check_rounds(pair);
    prs_peer_stats(pair->peer, &stats);
    must(wanted ? stats.rail_bytes[1] == 0 && stats.signal_flushes > 0 && stats.signal_flushes <= 2 * ROUNDS
                : stats.signal_flushes == 0,
         "%llu reads for %d signals", (unsigned long long)stats.signal_flushes, ROUNDS);
}

#define FLUSH(name, ...)                                                                                               \
    Test(signal, name)                                                                                                 \
    {                                                                                                                  \
        pair_run(&(struct pair_spec){.buffer_bytes = 2 << 20, .policy = "counted", __VA_ARGS__}, signal_rounds,        \
                 check_flushes);                                                                                       \
    }

FLUSH(follows_its_puts_counted, .words_on_device = true)
FLUSH(follows_its_puts_counted_over_many_queues, .rails = {2, 2}, .queues_per_rail = 2)
FLUSH(in_device_memory_waits_for_what_other_rails_bring, .rails = {2, 2}, .words_on_device = true)

enum { ADDS = 2000 };

static void add_often(struct pair *pair)
{
    static struct prs_op op[ADDS];

    for (uint32_t i = 0; i < ADDS; i++) {
        struct prs_signal signal = {.dst_addr = pair->remote_words + 8 * (i / 3 % 4),
                                    .dst = &pair->remote_words_keys,
                                    .value = i,
                                    .kind = PRS_SIGNAL_ADD,
                                    .group = i / 3};

        pair_signal(pair, &op[i], &signal);
    }
    for (uint32_t i = 0; i < ADDS; i++)
        pair_wait_op(pair, &op[i]);
}

static void sum_up(struct pair *pair)
{
    uint64_t sum[4] = {0};

    for (uint32_t i = 0; i < ADDS; i++)
        sum[i / 3 % 4] += i;
    for (int i = 0; i < 4; i++)
        wait_word(pair, &pair->words[i], sum[i]);
}

Test(signal, adds_in_order_are_never_lost)
{
    pair_run(&(struct pair_spec){.policy = "in_order"}, add_often, sum_up);
}

Test(signal, adds_counted_are_never_lost) /* more adds than the ring of records has slots: needs credits */
{
    pair_run(&(struct pair_spec){.policy = "counted"}, add_often, sum_up);
    pair_run(&(struct pair_spec){.policy = "counted", .rails = {2, 2}}, add_often, sum_up);
}

Test(signal, adds_drained_are_never_lost) /* also by records, if the rails have no atomics */
{
    pair_run(&(struct pair_spec){.policy = "drain"}, add_often, sum_up);
}

enum { SENT = 40, WORDS = 4, LOOKS = 200, GO_ON = 1, SETTLED = 2 };

/* Write a byte that B sees without progress. */
static void tell(struct pair *pair, uint8_t what)
{
    struct prs_put put = pair_put_of(pair, 0, 0, 1, 0, 0);
    struct prs_op op;

    pair->buffer[0] = what;
    pair_put(pair, &op, &put);
    pair_wait_op(pair, &op);
}

static void settle_what_was_sent(struct pair *pair)
{
    static struct prs_op op[SENT];
    int r;

    for (uint32_t i = 0; i < SENT; i++) {
        struct prs_signal signal = {.dst_addr = pair->remote_words + 8 * (i % WORDS),
                                    .dst = &pair->remote_words_keys,
                                    .value = i,
                                    .kind = PRS_SIGNAL_ADD,
                                    .group = i % 3};

        pair_signal(pair, &op[i], &signal);
        must(prs_peer_progress(pair->peer) >= 0, "%s", prs_error_text());
    }
    for (uint32_t i = 0; i < SENT; i++)
        pair_wait_op(pair, &op[i]);
    for (int i = 0; i < LOOKS && pair->peer->order.tally; i++) { /* the records have arrived, but B does nothing yet */
        must(prs_peer_settle(pair->peer) == PRS_AGAIN, "settled before anything was raised");
        must(prs_peer_progress(pair->peer) >= 0, "%s", prs_error_text());
    }
    tell(pair, GO_ON);
    while ((r = prs_peer_settle(pair->peer)) == PRS_AGAIN) /* bounded by alarm() */
        must(prs_peer_progress(pair->peer) >= 0, "%s", prs_error_text());
    must(r == 0, "settle: %d %s", r, prs_error_text());
    tell(pair, SETTLED);
    must(prs_peer_settle(pair->peer) == 0, "nothing was sent since, so it is still settled");
}

static void find_it_raised(struct pair *pair)
{
    volatile uint8_t *told = pair->buffer;
    uint64_t sum[WORDS] = {0};

    for (uint32_t i = 0; i < SENT; i++)
        sum[i % WORDS] += i;
    while (*told < GO_ON) /* bounded by alarm() */
        usleep(100);
    while (*told < SETTLED)
        must(prs_peer_progress(pair->peer) >= 0, "%s", prs_error_text());
    for (int i = 0; i < WORDS; i++)
        must(pair->words[i] == sum[i], "word %d: %llu of %llu", i, (unsigned long long)pair->words[i],
             (unsigned long long)sum[i]);
}

#define SETTLE(name, ...)                                                                                              \
    Test(signal, name)                                                                                                 \
    {                                                                                                                  \
        pair_run(&(struct pair_spec){__VA_ARGS__}, settle_what_was_sent, find_it_raised);                              \
    }

SETTLE(is_raised_once_settled_counted, .policy = "counted")
SETTLE(is_raised_once_settled_counted_over_two_rails, .policy = "counted", .rails = {2, 2}, .queues_per_rail = 2)
SETTLE(is_raised_once_settled_in_order, .policy = "in_order")
SETTLE(is_raised_once_settled_drained, .policy = "drain")

static void learn_that_it_never_will(struct pair *pair)
{
    struct prs_signal signal = {.dst_addr = pair->remote_words, .dst = &pair->remote_words_keys, .value = 1};
    struct prs_op op;
    int r;

    must(prs_peer_signal(pair->peer, &op, &signal) == 0, "%s", prs_error_text());
    pair_wait_op(pair, &op);
    tell(pair, GO_ON);
    while ((r = prs_peer_settle(pair->peer)) == PRS_AGAIN && (r = prs_peer_progress(pair->peer)) >= 0)
        ; /* bounded by alarm() */
    must(r == -ECONNRESET && strstr(prs_peer_error(pair->peer), "closed"), "%d %s", r, prs_peer_error(pair->peer));
}

static void close_without_raising(struct pair *pair)
{
    volatile uint8_t *told = pair->buffer;

    while (*told < GO_ON) /* bounded by alarm() */
        usleep(100);
}

Test(signal, is_never_settled_by_one_that_closed)
{
    pair_run(&(struct pair_spec){.policy = "counted", .b_dies = true}, learn_that_it_never_will, close_without_raising);
}

Test(signal, policies_that_rails_cannot_keep_are_refused)
{
    static const char *const policies[] = {"in_order", "nic_fence", "counted", "drain"};
    struct prs_rail_set rails = {.count = 1};
    char text[256];

    for (int i = 0; i < 4; i++) {
        const struct prs_nic_ops *nic;
        struct prs_fabric *fabric;
        int r;

        setenv("PERSEUS_ORDER", policies[i], 1);
        cr_assert_eq(prs_fabric_open(NULL, &fabric), 0);
        r = prs_fabric_policy(fabric, &rails, text, sizeof(text));
        nic = fabric->rail[0].domain->nic;
        if ((i == 0 && !nic->in_order) || (i == 1 && !nic->fence))
            cr_assert(r == -EINVAL && strstr(prs_error_text(), policies[i]) &&
                          strstr(prs_error_text(), "use counted or drain"),
                      "%s: %d %s", policies[i], r, prs_error_text());
        else
            cr_assert(r == 0 && strstr(text, policies[i]) == text, "%s: %d %s", policies[i], r, text);
        /* under counted, and under every policy on a NIC without atomics */
        cr_assert_eq(prs_fabric_receiver_raises(fabric, &rails), r != 0 ? r : i == 2 || !nic->adds);
        prs_fabric_close(fabric);
    }
}

static void refuse_bad_signals(struct pair *pair)
{
    struct prs_signal signal = {.dst_addr = pair->remote_words + 4, .dst = &pair->remote_words_keys};
    struct prs_op op;

    must(prs_peer_signal(pair->peer, &op, &signal) < 0, "not aligned");
    must(prs_peer_error(pair->peer)[0] == 0, "a refused argument leaves the peer sound");
}

static void do_nothing(struct pair *pair)
{
    (void)pair;
}

Test(signal, that_is_not_aligned_is_refused)
{
    pair_run(&(struct pair_spec){.buffer_bytes = 4096}, refuse_bad_signals, do_nothing);
}

/* ---- a side that sends none ---- */

/* A sends no signals, B does. Puts without a group go on, and both may read what has landed. */
static void send_no_signals(struct pair *pair)
{
    struct prs_put put = pair_put_of(pair, 0, 0, SLICE, 1, PRS_PUT_NOTIFY);
    struct prs_signal signal = {.dst_addr = pair->remote_words, .dst = &pair->remote_words_keys, .value = 1};
    struct prs_op op;

    must(pair->peer->records, "the other side's signals have no memory here");
    must(prs_peer_signal(pair->peer, &op, &signal) == -EINVAL && strstr(prs_error_text(), "no_signals"), "%s",
         prs_error_text());
    put.group = 3;
    must(prs_peer_put(pair->peer, &op, &put) == -EINVAL && strstr(prs_error_text(), "no_signals"), "%s",
         prs_error_text());
    put.group = PRS_GROUP_NONE;
    pair_put(pair, &op, &put);
    pair_wait_op(pair, &op);
    wait_word(pair, pair->words, 7);
    must(prs_peer_settle(pair->peer) == 0, "%s", prs_error_text());
    pair_barrier(pair);
}

static void receive_no_signals(struct pair *pair)
{
    struct prs_signal signal = {.dst_addr = pair->remote_words, .dst = &pair->remote_words_keys, .value = 7};
    struct prs_op op;

    pair_wait_notified(pair, 1);
    must(pair->peer->records && !pair->peer->records->credit.addr, "it has memory for signals that never come");
    for (uint32_t i = 0; i < pair->peer->path_count; i++)
        must(!pair->peer->link[i]->loopback, "it has a queue to raise signals that never come");
    must(prs_peer_flush(pair->peer, &op, pair->region, pair->buffer) == 0, "%s", prs_error_text());
    pair_wait_op(pair, &op);
    must(pair->peer->link[0]->loopback, "the flush went elsewhere");
    pair_signal(pair, &op, &signal);
    pair_wait_op(pair, &op);
    pair_barrier(pair);
}

Test(signal, a_side_that_sends_none_costs_the_other_no_queue)
{
    pair_run(&(struct pair_spec){.policy = "counted", .no_signals = {true, false}}, send_no_signals,
             receive_no_signals);
    pair_run(&(struct pair_spec){.policy = "counted", .rails = {2, 2}, .no_signals = {true, false}}, send_no_signals,
             receive_no_signals);
}

static void have_neither(struct pair *pair)
{
    must(!pair->peer->records, "memory for signals that nobody sends");
    for (uint32_t i = 0; i < pair->peer->path_count; i++)
        must(!pair->peer->link[i]->loopback, "a queue for signals that nobody sends");
    pair_barrier(pair);
}

Test(signal, two_sides_that_send_none_have_one_queue_pair)
{
    pair_run(&(struct pair_spec){.policy = "counted", .no_signals = {true, true}}, have_neither, have_neither);
}
