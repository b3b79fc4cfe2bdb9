/* SPDX-License-Identifier: Apache-2.0 */
/* One of two rails is lost while messages are in flight: every message arrives once, and nothing is written late. */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "test/transport/loss.h"
#include "test/transport/pair.h"
#include "transport/nic/verbs/device.h"
#include "transport/nic/verbs/verbs_nic.h"
#include "transport/peer/fail.h"
#include "transport/peer/peer.h"
#include "transport/util/clock.h"

/* ---- messages ---- */

ParameterizedTestParameters(failover, messages_go_on_over_the_other_rail)
{
    static struct loss rows[] = {
        {0, QUEUE_ERROR, 0, 5},   {0, QUEUE_ERROR, 1, 100}, {1, QUEUE_ERROR, 0, 60}, {1, QUEUE_ERROR, 1, 61},
        {0, PORT_DOWN, 0, 37},    {0, PORT_DOWN, 1, 222},   {1, PORT_DOWN, 0, 11},   {1, PORT_DOWN, 1, 350},
        {0, QUEUE_ERROR, 1, 399}, {1, QUEUE_ERROR, 0, 399}, {1, RAIL_ERROR, 0, 77},  {1, RAIL_ERROR, 1, 160},
        {0, DEVICE_DEAD, 0, 50},  {0, DEVICE_DEAD, 1, 200}, {1, DEVICE_DEAD, 0, 90}, {1, DEVICE_DEAD, 1, 301},
    };
    return cr_make_param_array(struct loss, rows, sizeof(rows) / sizeof(*rows));
}

ParameterizedTest(struct loss *row, failover, messages_go_on_over_the_other_rail)
{
    run_row(row, send_messages, receive_messages);
}

/* ---- a provider of libfabric that connects again ---- */

enum { BURST = 64 };

/* One write of these is lost, and later ones arrive: what the other side counts says nothing of which. */
static void send_burst(struct pair *pair)
{
    static struct prs_op op[BURST];
    int r;

    for (uint32_t m = 0; m < BURST; m++) {
        struct prs_put put = pair_put_of(pair, m * 64, m * 64, 64, m, PRS_PUT_NOTIFY);

        pair_put(pair, &op[m], &put);
    }
    r = pair_wait_error(pair);
    must(r == -EPROTO, "%d %s", r, prs_error_text());
}

static void receive_burst(struct pair *pair)
{
    int r = pair_wait_error(pair);

    must(r == -ECONNRESET, "%d %s", r, prs_error_text());
}

Test(failover, a_write_that_is_done_after_one_that_failed_ends_the_peer)
{
    static const struct loss none = {0, QUEUE_ERROR, 0, MESSAGES};

    if (!getenv("MOCK_CXI") || !strstr(getenv("MOCK_CXI"), "lose="))
        cr_skip_test("needs test/mock_cxi and MOCK_CXI=lose=NUMBER");
    run_row(&none, send_burst, receive_burst);
}

/* ---- a single rail, and another that stands by ---- */

static void assert_standby_rests(struct pair *pair)
{
    struct prs_stats stats;

    prs_peer_stats(pair->peer, &stats);
    must(pair->peer->path_count == 2, "%u paths", pair->peer->path_count);
    must(stats.rail_bytes[0] && !stats.rail_bytes[1], "%llu and %llu bytes", (unsigned long long)stats.rail_bytes[0],
         (unsigned long long)stats.rail_bytes[1]);
}

/* The standby rail carries nothing while the first lives, however long the messages are. */
static void send_over_single_rail(struct pair *pair)
{
    struct prs_op op;

    for (uint32_t m = 0; m < 2 * SLOTS; m++) {
        struct prs_put put = pair_put_of(pair, 0, 0, m < SLOTS ? 64 : SLOTS * SLOT_BYTES, m, PRS_PUT_NOTIFY);

        pair_put(pair, &op, &put);
        pair_wait_op(pair, &op);
    }
    assert_standby_rests(pair);
    pair_barrier(pair);
}

Test(failover, a_standby_rail_carries_nothing_while_the_first_lives)
{
    static const struct loss none = {0, QUEUE_ERROR, 0, MESSAGES};

    run_single_row(&none, send_over_single_rail, pair_barrier, false);
}

ParameterizedTestParameters(failover, messages_of_a_single_rail_go_on_over_the_standby_rail)
{
    static struct loss rows[] = {
        {0, DEVICE_DEAD, 0, 70},  {1, DEVICE_DEAD, 0, 71}, {0, QUEUE_ERROR, 0, 5},
        {1, QUEUE_ERROR, 0, 160}, {0, PORT_DOWN, 0, 37},   {1, PORT_DOWN, 0, 350},
        {1, RAIL_ERROR, 0, 77},   {0, QUEUE_ERROR, 1, 60}, {1, PORT_DOWN, 1, 90},
    };
    return cr_make_param_array(struct loss, rows, sizeof(rows) / sizeof(*rows));
}

ParameterizedTest(struct loss *row, failover, messages_of_a_single_rail_go_on_over_the_standby_rail)
{
    run_single_row(row, send_messages, receive_messages, false);
}

/* ---- an idle side ---- */

enum { IDLE_MESSAGES = 100, IDLE_BYTES = 4096, BOTH_AT = 1 << 20, BOTH_BYTES = 1 << 20 };

/* Each message has its own place. The last one, without a notification, says that all others are done. */
static void send_to_idle_side(struct pair *pair)
{
    static struct prs_op op[IDLE_MESSAGES + 1];
    struct prs_put last = pair_put_of(pair, 0, IDLE_MESSAGES * IDLE_BYTES, 1, 0, 0);
    struct prs_put both = pair_put_of(pair, BOTH_AT, BOTH_AT, BOTH_BYTES, 0, 0);
    uint64_t give_up = prs_clock_ms() + PAIR_TIMEOUT_MS / 2;

    find_loss();
    for (uint32_t m = 0; m < IDLE_MESSAGES; m++) {
        struct prs_put put = pair_put_of(pair, m * IDLE_BYTES, m * IDLE_BYTES, IDLE_BYTES, m, PRS_PUT_NOTIFY);

        pair_fill(pair->buffer + m * IDLE_BYTES, IDLE_BYTES, m);
        pair_put(pair, &op[m], &put);
        lose_rails(pair, m);
    }
    for (uint32_t m = 0; m < IDLE_MESSAGES; m++)
        pair_wait_op(pair, &op[m]);
    /* The other side loses it at some time: find that out by writes over all rails. None before that: each takes a
     * receive, and a side that does not poll makes no new ones. */
    while (!are_down(pair)) {
        if (pair_has_said(pair)) {
            pair_put(pair, &op[0], &both);
            pair_wait_op(pair, &op[0]);
        }
        progress(pair);
        must(prs_clock_ms() < give_up, "path %u is not given up", loss->path);
    }
    pair_put(pair, &op[IDLE_MESSAGES], &last);
    pair_wait_op(pair, &op[IDLE_MESSAGES]);
    pair_barrier(pair);
}

static bool has_come(const struct pair *pair, uint32_t m, size_t at)
{
    return __atomic_load_n(pair->buffer + m * IDLE_BYTES + at, __ATOMIC_ACQUIRE) != EMPTY;
}

/* Behave as an NCCL rank that waits for its sends and polls no receiving comm. */
static void stay_idle(struct pair *pair)
{
    uint64_t give_up = prs_clock_ms() + PAIR_TIMEOUT_MS / 2;
    uint32_t before;
    bool lost = false;

    find_loss();
    memset(pair->buffer, EMPTY, (IDLE_MESSAGES + 1) * IDLE_BYTES);
    pair_barrier(pair); /* which polls, and may take the first messages of the other side */
    before = pair->notified;
    while (!has_come(pair, IDLE_MESSAGES, 0)) {
        if (!lost && has_come(pair, loss->at, IDLE_BYTES - 1)) {
            lost = true;
            lose_rails(pair, loss->at);
            pair_say(pair);
        }
        must(prs_clock_ms() < give_up, "the other side has not sent all");
        sched_yield();
    }
    must(pair->notified == before, "%u, and %u before", pair->notified, before);
    while (pair->notified < IDLE_MESSAGES || !are_down(pair)) {
        progress(pair);
        must(prs_clock_ms() < give_up, "%u have arrived", pair->notified);
    }
    for (uint32_t m = 0; m < IDLE_MESSAGES; m++) {
        must(pair->count[m] == 1 && pair->bytes[m] == IDLE_BYTES, "message %u: %u times", m, pair->count[m]);
        pair_check(pair->buffer + m * IDLE_BYTES, IDLE_BYTES, m, "a message");
    }
    pair_barrier(pair);
    must(pair->notified == IDLE_MESSAGES, "%u", pair->notified);
}

static void send_after_barrier(struct pair *pair)
{
    pair_barrier(pair);
    send_to_idle_side(pair);
}

static void lose_early(void)
{
    setenv("NCCL_IB_TIMEOUT", "19", 1); /* 16 s in all: without a connection, nothing else says that it is lost */
}

ParameterizedTestParameters(failover, a_side_that_does_not_poll_takes_part)
{
    static struct loss rows[] = {
        {0, DEVICE_DEAD, 0, 20}, {1, DEVICE_DEAD, 1, 21}, {0, QUEUE_ERROR, 0, 5},
        {0, QUEUE_ERROR, 1, 30}, {0, PORT_DOWN, 0, 60},   {0, PORT_DOWN, 1, 61},
        {1, QUEUE_ERROR, 0, 9},  {1, QUEUE_ERROR, 1, 40}, {1, RAIL_ERROR, 1, 3},
    };
    return cr_make_param_array(struct loss, rows, sizeof(rows) / sizeof(*rows));
}

ParameterizedTest(struct loss *row, failover, a_side_that_does_not_poll_takes_part)
{
    lose_early();
    run_row(row, send_after_barrier, stay_idle);
}

ParameterizedTestParameters(losses, a_side_that_does_not_poll_takes_part)
{
    static struct loss rows[][2] = {{{0, QUEUE_ERROR, 0, 5}, {0, QUEUE_ERROR, 1, 5}},
                                    {{1, QUEUE_ERROR, 1, 20}, {1, RAIL_ERROR, 2, 20}},
                                    {{0, RAIL_ERROR, 0, 30}, {1, QUEUE_ERROR, 2, 30}},
                                    {{0, PORT_DOWN, 2, 60}, {0, QUEUE_ERROR, 0, 70}}};

    return cr_make_param_array(struct loss[2], rows, sizeof(rows) / sizeof(*rows));
}

ParameterizedTest(struct loss (*row)[2], losses, a_side_that_does_not_poll_takes_part)
{
    lose_early();
    run_losses(*row, 2, 3, send_after_barrier, stay_idle);
}

/* ---- a busy side ---- */

/* The agreement is not left to polls that find nothing: here a write has completed before each. */
static void stay_busy(struct pair *pair)
{
    struct prs_put put = pair_put_of(pair, 0, 0, 64, 0, 0);
    uint64_t give_up = prs_clock_ms() + PAIR_TIMEOUT_MS / 2;
    struct prs_op op;

    find_loss();
    prs_peer_lock(pair->peer);
    must(prs_failover_start(pair->peer, loss->path, "the test gives it up"), "path %u is the last one", loss->path);
    prs_peer_unlock(pair->peer);
    while (!is_down(pair, 0)) {
        pair_put(pair, &op, &put);
        usleep(200);
        pair_wait_op(pair, &op);
        must(prs_clock_ms() < give_up, "path %u is not given up", loss->path);
    }
    pair_barrier(pair);
}

ParameterizedTestParameters(failover, a_busy_side_gives_a_rail_up)
{
    static struct loss rows[] = {{0, RAIL_ERROR, 0, 0}, {0, RAIL_ERROR, 1, 0}};

    return cr_make_param_array(struct loss, rows, sizeof(rows) / sizeof(*rows));
}

ParameterizedTest(struct loss *row, failover, a_busy_side_gives_a_rail_up)
{
    run_row(row, stay_busy, pair_barrier);
}

/* ---- signals ---- */

enum { SIGNALS = 200, BLOCK_BYTES = 4096 };

/* No signal of either side is in flight after this: an add in device memory could not be raised again. */
static void settle(struct pair *pair)
{
    uint64_t give_up = prs_clock_ms() + PAIR_TIMEOUT_MS / 2;

    while (pair->side == 0 && prs_peer_settle(pair->peer)) {
        progress(pair);
        must(prs_clock_ms() < give_up, "not settled");
    }
    pair_barrier(pair);
}

/* Each signal adds one to a word, or sets it to one more, after two puts of its group. */
static void send_signals_of(struct pair *pair, enum prs_signal_kind kind)
{
    static struct prs_op put_op[SIGNALS][2], signal_op[SIGNALS];
    uint64_t give_up = prs_clock_ms() + PAIR_TIMEOUT_MS / 2;

    find_loss();
    for (uint32_t i = 0; i < SIGNALS; i++) {
        struct prs_signal signal = {.dst = &pair->remote_words_keys,
                                    .dst_addr = pair->remote_words,
                                    .value = kind == PRS_SIGNAL_ADD ? 1 : i + 1,
                                    .kind = kind,
                                    .group = 3};

        for (uint32_t k = 0; k < 2; k++) {
            size_t at = (2 * i + k) * BLOCK_BYTES, bytes = k ? 64 : BLOCK_BYTES;
            struct prs_put put = pair_put_of(pair, at, at, bytes, 0, 0);

            put.group = 3;
            pair_fill(pair->buffer + at, bytes, i);
            pair_put(pair, &put_op[i][k], &put);
        }
        pair_signal(pair, &signal_op[i], &signal);
        if (pair->spec->words_on_device && kind == PRS_SIGNAL_ADD && i == loss->at)
            settle(pair);
        lose_rails(pair, i);
    }
    for (uint32_t i = 0; i < SIGNALS; i++)
        pair_wait_op(pair, &signal_op[i]);
    while (prs_peer_settle(pair->peer) || !is_down(pair, 0)) {
        progress(pair);
        must(prs_clock_ms() < give_up, "path %s", is_down(pair, 0) ? "down" : "up");
    }
    pair_barrier(pair);
}

static void send_signals(struct pair *pair)
{
    send_signals_of(pair, PRS_SIGNAL_ADD);
}

static void send_sets(struct pair *pair)
{
    send_signals_of(pair, PRS_SIGNAL_SET);
}

static void see_signals(struct pair *pair, bool settles)
{
    uint64_t give_up = prs_clock_ms() + PAIR_TIMEOUT_MS / 2;
    uint32_t seen = 0;

    while (seen < SIGNALS || !is_down(pair, 0)) {
        uint64_t word = __atomic_load_n(&pair->words[0], __ATOMIC_ACQUIRE);

        must(word <= SIGNALS, "%llu signals of %d", (unsigned long long)word, SIGNALS);
        for (; seen < word; seen++) {
            pair_check(pair->buffer + 2 * seen * BLOCK_BYTES, BLOCK_BYTES, seen, "a signal came before its data");
            pair_check(pair->buffer + (2 * seen + 1) * BLOCK_BYTES, 64, seen, "a signal came before its data");
            if (settles && seen == loss->at)
                settle(pair);
            if (loss->side == 1)
                lose_rails(pair, seen);
        }
        progress(pair);
        must(prs_clock_ms() < give_up, "%u signals have come", seen);
    }
    pair_barrier(pair);
    must(pair->words[0] == SIGNALS, "%llu", (unsigned long long)pair->words[0]);
}

static void see_signals_of_row(struct pair *pair)
{
    find_loss();
    see_signals(pair, pair->spec->words_on_device);
}

static void see_sets_of_row(struct pair *pair)
{
    find_loss();
    see_signals(pair, false);
}

ParameterizedTestParameters(failover, signals_are_raised_once_and_after_their_data)
{
    static struct loss rows[] = {
        {0, QUEUE_ERROR, 0, 20}, {0, QUEUE_ERROR, 1, 120}, {1, QUEUE_ERROR, 0, 90}, {1, QUEUE_ERROR, 1, 30},
        {0, PORT_DOWN, 0, 77},   {1, PORT_DOWN, 1, 150},   {1, RAIL_ERROR, 0, 55},  {1, RAIL_ERROR, 1, 110},
    };
    return cr_make_param_array(struct loss, rows, sizeof(rows) / sizeof(*rows));
}

ParameterizedTest(struct loss *row, failover, signals_are_raised_once_and_after_their_data)
{
    run_row(row, send_signals, see_signals_of_row);
}

ParameterizedTestParameters(failover, signals_in_device_memory_are_raised_by_a_living_rail)
{
    static struct loss rows[] = {{1, RAIL_ERROR, 0, 40}, {1, QUEUE_ERROR, 0, 120}, {0, QUEUE_ERROR, 0, 3}};

    return cr_make_param_array(struct loss, rows, sizeof(rows) / sizeof(*rows));
}

ParameterizedTest(struct loss *row, failover, signals_in_device_memory_are_raised_by_a_living_rail)
{
    run_row_of(row, send_signals, see_signals_of_row, true);
}

/* Those in flight are raised again, by the other rail. */
ParameterizedTestParameters(failover, sets_in_device_memory_that_were_in_flight_are_raised_again)
{
    static struct loss rows[] = {{1, DEVICE_DEAD, 0, 20}, {1, DEVICE_DEAD, 0, 99}, {1, RAIL_ERROR, 0, 5},
                                 {1, RAIL_ERROR, 0, 40},  {1, RAIL_ERROR, 0, 150}, {1, QUEUE_ERROR, 0, 9}};

    return cr_make_param_array(struct loss, rows, sizeof(rows) / sizeof(*rows));
}

ParameterizedTest(struct loss *row, failover, sets_in_device_memory_that_were_in_flight_are_raised_again)
{
    run_row_of(row, send_sets, see_sets_of_row, true);
}
