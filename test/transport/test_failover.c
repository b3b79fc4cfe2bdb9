/* SPDX-License-Identifier: Apache-2.0 */
/* One of two rails is lost while messages are under way: every message arrives once, and nothing is written late. */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "test/transport/pair.h"
#include "transport/peer.h"
#include "transport/util/clock.h"

enum { SLOTS = 16, SLOT_BYTES = 256 << 10, MESSAGES = 400, ACK = 512, EMPTY = 0xee };

enum fault {
    RAIL_ERROR = 3,  /* as QUEUE_ERROR, also with the queue to this side itself, by which it flushes */
    QUEUE_ERROR = 1, /* this side's queues of the path go to the error state */
    PORT_DOWN,       /* this side's NIC reports that its port is down. The queues work: what is under way still lands */
};

struct loss {
    int side; /* 0: the sender loses it, 1: the receiver */
    enum fault fault;
    uint32_t path, at; /* the number of the message */
};

static struct loss loss; /* of the row, in this process and its sides */

static void find_loss(void)
{
    int fault;

    must(sscanf(getenv("PERSEUS_TEST_LOSS"), "%d %d %u %u", &loss.side, &fault, &loss.path, &loss.at) == 4, "no row");
    loss.fault = (enum fault)fault;
}

static size_t length_of(uint32_t message)
{
    static const size_t lengths[] = {8, 64, 64, 64, 4000, 70000, SLOT_BYTES, 0, 64, 9000};

    return lengths[message % (sizeof(lengths) / sizeof(*lengths))];
}

static void lose_rail(struct pair *pair, uint32_t message)
{
    struct prs_domain *domain = pair->peer->link[loss.path]->rail->domain;

    if (pair->side != loss.side || message != loss.at)
        return;
    if (loss.fault == RAIL_ERROR)
        prs_nic_kill_link(pair->peer->link[loss.path]);
    else if (loss.fault == QUEUE_ERROR)
        prs_nic_stop_queues(pair->peer->link[loss.path]);
    else
        __atomic_store_n(&domain->down_since_ns[pair->peer->link[loss.path]->rail->port], prs_clock_ns(),
                         __ATOMIC_RELAXED);
}

static void progress(struct pair *pair)
{
    must(prs_peer_progress(pair->peer) >= 0, "%s", prs_error_text());
    must(prs_peer_check_remote(pair->peer) == 0, "%s", prs_error_text());
    sched_yield();
}

static bool is_down(const struct pair *pair)
{
    return pair->peer->failover && pair->peer->failover->path[loss.path].stage == PRS_PATH_DOWN;
}

/* A slot is written again when the receiver has emptied it and said so. */
static void send_messages(struct pair *pair)
{
    static struct prs_op op[SLOTS];
    uint64_t give_up = prs_clock_ms() + PAIR_TIMEOUT_MS / 2;

    find_loss();
    for (uint32_t m = 0; m < MESSAGES; m++) {
        uint32_t slot = m % SLOTS;
        struct prs_put put =
            pair_put_of(pair, slot * SLOT_BYTES, slot * SLOT_BYTES, length_of(m), slot, PRS_PUT_NOTIFY);

        while (m >= SLOTS && (pair->count[ACK + slot] < m / SLOTS || op[slot].status == PRS_OP_PENDING)) {
            progress(pair);
            must(prs_clock_ms() < give_up, "message %u does not arrive", m);
        }
        must(pair->count[ACK + slot] == m / SLOTS, "slot %u: %u acknowledged at message %u", slot,
             pair->count[ACK + slot], m);
        pair_fill(pair->buffer + slot * SLOT_BYTES, length_of(m), m);
        pair_put(pair, &op[slot], &put);
        lose_rail(pair, m);
    }
    for (uint32_t slot = 0; slot < SLOTS; slot++)
        while (op[slot].status == PRS_OP_PENDING || pair->count[ACK + slot] < MESSAGES / SLOTS || !is_down(pair)) {
            progress(pair);
            must(prs_clock_ms() < give_up, "op %u, %u acknowledged, path %s", slot, pair->count[ACK + slot],
                 is_down(pair) ? "down" : "up");
        }
    pair_barrier(pair);
    must(pair->notified == MESSAGES, "%u", pair->notified);
}

static void must_be_empty(const struct pair *pair, uint32_t slot)
{
    const uint8_t *at = pair->buffer + slot * SLOT_BYTES;

    must(at[0] == EMPTY && !memcmp(at, at + 1, SLOT_BYTES - 1), "slot %u was written late", slot);
}

/* As NCCL does before a GPU reads what has arrived. */
static void flush(struct pair *pair, uint32_t slot)
{
    uint64_t give_up = prs_clock_ms() + PAIR_TIMEOUT_MS / 2;
    struct prs_op op;
    int r;

    do {
        r = prs_peer_flush(pair->peer, &op, pair->region, pair->buffer + slot * SLOT_BYTES);
        progress(pair);
        must(r >= 0 && prs_clock_ms() < give_up, "flush: %d %s", r, prs_error_text());
    } while (r == PRS_BUSY);
    while (op.status == PRS_OP_PENDING) {
        progress(pair);
        must(prs_clock_ms() < give_up, "no end of the flush");
    }
    must(op.status == 0, "flush: %d", op.status);
}

static void receive_messages(struct pair *pair)
{
    static struct prs_op op[SLOTS];
    uint64_t give_up = prs_clock_ms() + PAIR_TIMEOUT_MS / 2;

    find_loss();
    for (uint32_t m = 0; m < MESSAGES; m++) {
        uint32_t slot = m % SLOTS;
        struct prs_put ack = pair_put_of(pair, 0, 0, 0, ACK + slot, PRS_PUT_NOTIFY);

        while (pair->count[slot] <= m / SLOTS || op[slot].status == PRS_OP_PENDING) {
            progress(pair);
            must(prs_clock_ms() < give_up, "message %u has not come", m);
        }
        must(pair->count[slot] == m / SLOTS + 1, "slot %u: notified %u times at message %u", slot, pair->count[slot],
             m);
        flush(pair, slot);
        must(pair->bytes[slot] == length_of(m), "message %u has %llu bytes", m, (unsigned long long)pair->bytes[slot]);
        pair_check(pair->buffer + slot * SLOT_BYTES, length_of(m), m, "a message");
        memset(pair->buffer + slot * SLOT_BYTES, EMPTY, SLOT_BYTES);
        pair_put(pair, &op[slot], &ack);
        lose_rail(pair, m);
    }
    while (!is_down(pair) || pair->peer->order.ops) {
        progress(pair);
        must(prs_clock_ms() < give_up, "the path is not given up");
    }
    pair_barrier(pair);
    for (uint32_t slot = 0; slot < SLOTS; slot++)
        must_be_empty(pair, slot);
    must(pair->notified == MESSAGES, "%u", pair->notified);
}

ParameterizedTestParameters(failover, messages_go_on_over_the_other_rail)
{
    static struct loss rows[] = {
        {0, QUEUE_ERROR, 0, 5},   {0, QUEUE_ERROR, 1, 100}, {1, QUEUE_ERROR, 0, 60}, {1, QUEUE_ERROR, 1, 61},
        {0, PORT_DOWN, 0, 37},    {0, PORT_DOWN, 1, 222},   {1, PORT_DOWN, 0, 11},   {1, PORT_DOWN, 1, 350},
        {0, QUEUE_ERROR, 1, 399}, {1, QUEUE_ERROR, 0, 399}, {1, RAIL_ERROR, 0, 77},  {1, RAIL_ERROR, 1, 160},
    };
    return cr_make_param_array(struct loss, rows, sizeof(rows) / sizeof(*rows));
}

static void run_row(const struct loss *row, pair_fn *a, pair_fn *b)
{
    struct pair_spec spec = {.rails = {2, 2}, .buffer_bytes = SLOTS * SLOT_BYTES};
    char text[64];

    if (!pair_rails_in_order())
        cr_skip_test("queues that keep no order: a lost rail ends the peer");
    snprintf(text, sizeof(text), "%d %d %u %u", row->side, (int)row->fault, row->path, row->at);
    setenv("PERSEUS_TEST_LOSS", text, 1); /* for the sides, which are processes of their own */
    setenv("NCCL_IB_RESILIENCY_PORT_FAILOVER", "1", 1);
    pair_run(&spec, a, b);
}

ParameterizedTest(struct loss *row, failover, messages_go_on_over_the_other_rail)
{
    run_row(row, send_messages, receive_messages);
}

/* ---- signals ---- */

enum { SIGNALS = 200, BLOCK_BYTES = 4096 };

/* Each signal adds one to a word, after two puts of its group. */
static void send_signals(struct pair *pair)
{
    static struct prs_op put_op[SIGNALS][2], signal_op[SIGNALS];
    uint64_t give_up = prs_clock_ms() + PAIR_TIMEOUT_MS / 2;

    find_loss();
    for (uint32_t i = 0; i < SIGNALS; i++) {
        struct prs_signal signal = {.dst = &pair->remote_words_keys,
                                    .dst_addr = pair->remote_words,
                                    .value = 1,
                                    .kind = PRS_SIGNAL_ADD,
                                    .group = 3};

        for (uint32_t k = 0; k < 2; k++) {
            size_t at = (2 * i + k) * BLOCK_BYTES, bytes = k ? 64 : BLOCK_BYTES;
            struct prs_put put = pair_put_of(pair, at, at, bytes, 0, 0);

            put.group = 3;
            pair_fill(pair->buffer + at, bytes, i);
            pair_put(pair, &put_op[i][k], &put);
        }
        pair_signal(pair, &signal_op[i], &signal);
        lose_rail(pair, i);
    }
    for (uint32_t i = 0; i < SIGNALS; i++)
        pair_wait_op(pair, &signal_op[i]);
    while (prs_peer_settle(pair->peer) || !is_down(pair)) {
        progress(pair);
        must(prs_clock_ms() < give_up, "path %s", is_down(pair) ? "down" : "up");
    }
    pair_barrier(pair);
}

static void see_signals(struct pair *pair)
{
    uint64_t give_up = prs_clock_ms() + PAIR_TIMEOUT_MS / 2;
    uint32_t seen = 0;

    while (seen < SIGNALS || !is_down(pair)) {
        uint64_t word = __atomic_load_n(&pair->words[0], __ATOMIC_ACQUIRE);

        must(word <= SIGNALS, "%llu signals of %d", (unsigned long long)word, SIGNALS);
        for (; seen < word; seen++) {
            pair_check(pair->buffer + 2 * seen * BLOCK_BYTES, BLOCK_BYTES, seen, "a signal came before its data");
            pair_check(pair->buffer + (2 * seen + 1) * BLOCK_BYTES, 64, seen, "a signal came before its data");
            if (loss.side == 1)
                lose_rail(pair, seen);
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
    see_signals(pair);
}

ParameterizedTestParameters(failover, signals_are_raised_once_and_after_their_data)
{
    static struct loss rows[] = {
        {0, QUEUE_ERROR, 0, 20}, {0, QUEUE_ERROR, 1, 120}, {1, QUEUE_ERROR, 0, 90},
        {1, QUEUE_ERROR, 1, 30}, {0, PORT_DOWN, 0, 77},    {1, PORT_DOWN, 1, 150},
    };
    return cr_make_param_array(struct loss, rows, sizeof(rows) / sizeof(*rows));
}

ParameterizedTest(struct loss *row, failover, signals_are_raised_once_and_after_their_data)
{
    run_row(row, send_signals, see_signals_of_row);
}
