/* SPDX-License-Identifier: Apache-2.0 */
#include "test/transport/loss.h"

#include <criterion/criterion.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "test/transport/dead_nic.h"
#include "transport/nic/verbs/device.h"
#include "transport/peer/fail.h"
#include "transport/peer/peer.h"
#include "transport/util/clock.h"

struct loss loss[MOST_LOSSES];
uint32_t losses;

/* ---- the row ---- */

void find_loss(void)
{
    const char *text = getenv("PERSEUS_TEST_LOSS");
    int side, fault, after, bytes;

    for (losses = 0; losses < MOST_LOSSES; losses++, text += bytes) {
        struct loss *lost = &loss[losses];

        if (sscanf(text, "%d %d %u %u %d;%n", &side, &fault, &lost->path, &lost->at, &after, &bytes) != 5)
            break;
        lost->side = side;
        lost->fault = (enum fault)fault;
        lost->after = after;
    }
    must(losses > 0, "no row");
}

/* For the sides, which are processes of their own. */
static void tell_losses(const struct loss *row, uint32_t count)
{
    char text[MOST_LOSSES * 64] = "";
    size_t at = 0;

    for (uint32_t i = 0; i < count; i++) {
        if (row[i].fault == DEVICE_DEAD && getenv("PERSEUS_PROVIDER"))
            cr_skip_test("a NIC that takes no command: libfabric closes endpoints of such");
        at += (size_t)snprintf(text + at, sizeof(text) - at, "%d %d %u %u %d;", row[i].side, (int)row[i].fault,
                               row[i].path, row[i].at, row[i].after);
    }
    setenv("PERSEUS_TEST_LOSS", text, 1);
    setenv("NCCL_IB_RESILIENCY_PORT_RECOVERY", "0", 0); /* a row may have set it */
}

size_t length_of(uint32_t message)
{
    static const size_t lengths[] = {8, 64, 64, 64, 4000, 70000, SLOT_BYTES, 0, 64, 9000};

    return lengths[message % (sizeof(lengths) / sizeof(*lengths))];
}

void progress(struct pair *pair)
{
    must(prs_peer_progress(pair->peer) >= 0, "%s", prs_error_text());
    must(prs_peer_check_remote(pair->peer) == 0, "%s", prs_error_text());
    sched_yield();
}

/* ---- losing rails ---- */

static void lose_rail(struct pair *pair, const struct loss *lost)
{
    struct prs_link *link = pair->peer->link[lost->path];
    struct prs_domain *domain = link->rail->domain;

    prs_peer_lock(pair->peer); /* the thread of watch.c may hold the peer */
    if (lost->fault == RAIL_ERROR)
        pair->peer->nic->kill(link);
    else if (lost->fault == QUEUE_ERROR)
        pair->peer->nic->stop(link);
    else if (lost->fault == DEVICE_DEAD)
        dead_nic_kill(link);
    else
        __atomic_store_n(&domain->down_since_ns[link->rail->port], prs_clock_ns(), __ATOMIC_RELAXED);
    prs_peer_unlock(pair->peer);
}

bool is_down(const struct pair *pair, uint32_t i)
{
    bool down;

    prs_peer_lock(pair->peer);
    down = pair->peer->failover && pair->peer->failover->path[loss[i].path].stage == PRS_PATH_DOWN;
    prs_peer_unlock(pair->peer);
    return down;
}

void lose_rails(struct pair *pair, uint32_t message)
{
    uint64_t give_up = prs_clock_ms() + PAIR_TIMEOUT_MS / 2;

    for (uint32_t i = 0; i < losses; i++) {
        if (pair->side != loss[i].side || message != loss[i].at)
            continue;
        while (loss[i].after && !is_down(pair, i - 1)) {
            progress(pair);
            must(prs_clock_ms() < give_up, "path %u is not given up", loss[i - 1].path);
        }
        lose_rail(pair, &loss[i]);
    }
}

bool are_down(const struct pair *pair)
{
    bool down = true;

    for (uint32_t i = 0; i < losses; i++)
        down &= is_down(pair, i);
    return down;
}

/* ---- messages ---- */

void must_be_empty(const struct pair *pair, uint32_t slot)
{
    const uint8_t *at = pair->buffer + slot * SLOT_BYTES;

    must(at[0] == EMPTY && !memcmp(at, at + 1, SLOT_BYTES - 1), "slot %u was written late", slot);
}

/* A slot is written again when the receiver has emptied it and said so. */
void send_messages(struct pair *pair)
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
        lose_rails(pair, m);
    }
    for (uint32_t slot = 0; slot < SLOTS; slot++)
        while (op[slot].status == PRS_OP_PENDING || pair->count[ACK + slot] < MESSAGES / SLOTS || !are_down(pair)) {
            progress(pair);
            must(prs_clock_ms() < give_up, "op %u, %u acknowledged, paths %s", slot, pair->count[ACK + slot],
                 are_down(pair) ? "down" : "up");
        }
    pair_barrier(pair);
    must(pair->notified == MESSAGES, "%u", pair->notified);
}

/* Flush as NCCL does before a GPU reads arrived data. */
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

void receive_messages(struct pair *pair)
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
        lose_rails(pair, m);
    }
    while (!are_down(pair) || pair->peer->order.ops) {
        progress(pair);
        must(prs_clock_ms() < give_up, "the path is not given up");
    }
    pair_barrier(pair);
    for (uint32_t slot = 0; slot < SLOTS; slot++)
        must_be_empty(pair, slot);
    must(pair->notified == MESSAGES, "%u", pair->notified);
}

/* ---- running ---- */

static void run_spec(const struct pair_spec *spec, const struct loss *row, uint32_t count, pair_fn *a, pair_fn *b)
{
    if (!pair_rails_fail_over())
        cr_skip_test("these queues cannot replace a lost rail");
    tell_losses(row, count);
    setenv("NCCL_IB_RESILIENCY_PORT_FAILOVER", "1", 1);
    pair_run(spec, a, b);
}

void run_row_of(const struct loss *row, pair_fn *a, pair_fn *b, bool words_on_device)
{
    struct pair_spec spec = {.rails = {2, 2}, .buffer_bytes = SLOTS * SLOT_BYTES, .words_on_device = words_on_device};

    if (words_on_device && !pair_rails_add())
        cr_skip_test("without atomics, only the first rail raises signals in device memory");
    run_spec(&spec, row, 1, a, b);
}

void run_row(const struct loss *row, pair_fn *a, pair_fn *b)
{
    run_row_of(row, a, b, false);
}

void run_losses(const struct loss *row, uint32_t count, int rails, pair_fn *a, pair_fn *b)
{
    struct pair_spec spec = {.rails = {rails, rails}, .buffer_bytes = SLOTS * SLOT_BYTES};

    run_spec(&spec, row, count, a, b);
}

void run_single_row(const struct loss *row, pair_fn *a, pair_fn *b, bool words_on_device)
{
    struct pair_spec spec = {.buffer_bytes = SLOTS * SLOT_BYTES, .words_on_device = words_on_device};

    if (!pair_rails_fail_over() || pair_rails() < 2)
        cr_skip_test("needs two rails, of which one can replace the other");
    tell_losses(row, 1);
    setenv("PERSEUS_STANDBY_RAIL", "1", 1); /* and so NCCL_IB_RESILIENCY_PORT_FAILOVER */
    pair_run(&spec, a, b);
}
