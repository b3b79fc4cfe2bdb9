/* SPDX-License-Identifier: Apache-2.0 */
/* A lost rail comes back, and is used again. */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <stdlib.h>
#include <string.h>

#include "test/transport/loss.h"
#include "test/transport/pair.h"
#include "transport/nic/verbs/device.h"
#include "transport/peer/fail.h"
#include "transport/peer/peer.h"
#include "transport/util/clock.h"

enum { LAST = 900, FLAP_MS = 1500, GROW_BYTES = 1 << 20, DELAY_MS = 20 };

enum flap {
    FLAP_PORT = 8, /* the port goes down and up */
    FLAP_QUEUES,   /* queues that are used, or about to be used, fail */
    FLAP_BOTH,
};

static struct {
    uint64_t heal_ns, next_ns; /* heal_ns: end of the fault; next_ns: the next fault */
    bool port_is_down;
    uint32_t faults;
    unsigned random;
} flapping;

static void set_port(const struct pair *pair, bool down)
{
    const struct prs_rail *rail = pair->peer->link[loss->path]->rail;

    __atomic_store_n(&rail->domain->down_since_ns[rail->port], down ? prs_clock_ns() : 0, __ATOMIC_RELAXED);
    flapping.port_is_down = down;
}

static void begin_flapping(struct pair *pair)
{
    find_loss();
    flapping.random = loss->at + 17 * (unsigned)pair->side;
    flapping.heal_ns = prs_clock_ns() + FLAP_MS * 1000000ull;
}

/* side 2: both */
static void flap(struct pair *pair)
{
    struct prs_failover_path *at = &pair->peer->failover->path[loss->path];
    uint64_t now_ns = prs_clock_ns();
    bool port;

    if (loss->side != 2 && loss->side != pair->side)
        return;
    if (now_ns > flapping.heal_ns && flapping.faults) {
        if (flapping.port_is_down)
            set_port(pair, false);
        return;
    }
    if (now_ns < flapping.next_ns)
        return;
    flapping.next_ns = now_ns + (1 + (unsigned)rand_r(&flapping.random) % 150) * 1000000ull;
    port = (int)loss->fault == FLAP_PORT || ((int)loss->fault == FLAP_BOTH && rand_r(&flapping.random) % 2);
    if (port || flapping.port_is_down) {
        set_port(pair, !flapping.port_is_down);
    } else {
        prs_peer_lock(pair->peer);
        pair->peer->nic->kill(at->next && rand_r(&flapping.random) % 2 ? at->next : pair->peer->link[loss->path]);
        prs_peer_unlock(pair->peer);
    }
    flapping.faults++;
}

/* Is the path used again, and are no more faults to come? */
static bool is_back(struct pair *pair)
{
    const struct prs_failover_path *at = &pair->peer->failover->path[loss->path];
    bool back;

    prs_peer_lock(pair->peer);
    back = at->epoch && at->stage == PRS_PATH_UP && !pair->peer->link[loss->path]->stopped;
    prs_peer_unlock(pair->peer);
    return back && (prs_clock_ns() > flapping.heal_ns || loss->side == !pair->side);
}

static void progress_and_flap(struct pair *pair, uint64_t give_up, uint32_t m)
{
    progress(pair);
    flap(pair);
    must(prs_clock_ms() < give_up, "message %u, epoch %u, stage %d, attempt %d", m,
         pair->peer->failover->path[loss->path].epoch, (int)pair->peer->failover->path[loss->path].stage,
         (int)pair->peer->failover->path[loss->path].attempt);
}

static void send_over_flapping_rail(struct pair *pair)
{
    static struct prs_op op[SLOTS];
    const uint64_t *path_bytes = &pair->peer->order.stats.path_bytes[0];
    struct prs_put last = pair_put_of(pair, 0, 0, 0, LAST, PRS_PUT_NOTIFY);
    uint64_t give_up = prs_clock_ms() + PAIR_TIMEOUT_MS / 2, began_bytes = 0;
    bool back = false;
    uint32_t m = 0;

    begin_flapping(pair);
    while (!back || path_bytes[loss->path] - began_bytes < GROW_BYTES) {
        uint32_t slot = m % SLOTS;
        struct prs_put put =
            pair_put_of(pair, slot * SLOT_BYTES, slot * SLOT_BYTES, length_of(m), slot, PRS_PUT_NOTIFY);

        while (m >= SLOTS && (pair->count[ACK + slot] < m / SLOTS || op[slot].status == PRS_OP_PENDING))
            progress_and_flap(pair, give_up, m);
        must(pair->count[ACK + slot] == m / SLOTS, "slot %u", slot);
        pair_fill(pair->buffer + slot * SLOT_BYTES, length_of(m), m);
        pair_put(pair, &op[slot], &put);
        progress_and_flap(pair, give_up, ++m);
        if (!is_back(pair))
            back = false;
        else if (!back) {
            back = true;
            began_bytes = path_bytes[loss->path];
        }
    }
    for (uint32_t slot = 0; slot < SLOTS; slot++)
        while (op[slot].status == PRS_OP_PENDING || pair->count[ACK + slot] < (m + SLOTS - 1 - slot) / SLOTS)
            progress_and_flap(pair, give_up, m);
    pair_put(pair, &op[0], &last);
    while (op[0].status == PRS_OP_PENDING || !is_back(pair))
        progress_and_flap(pair, give_up, m);
    pair_barrier(pair);
}

static void receive_over_flapping_rail(struct pair *pair)
{
    static struct prs_op op[SLOTS];
    uint64_t give_up = prs_clock_ms() + PAIR_TIMEOUT_MS / 2;
    uint32_t m = 0;

    begin_flapping(pair);
    for (;; m++) {
        uint32_t slot = m % SLOTS;
        struct prs_put ack = pair_put_of(pair, 0, 0, 0, ACK + slot, PRS_PUT_NOTIFY);

        while (!pair->count[LAST] && (pair->count[slot] <= m / SLOTS || op[slot].status == PRS_OP_PENDING))
            progress_and_flap(pair, give_up, m);
        if (pair->count[LAST])
            break;
        must(pair->count[slot] == m / SLOTS + 1, "slot %u: notified %u times at message %u", slot, pair->count[slot],
             m);
        must(pair->bytes[slot] == length_of(m), "message %u has %llu bytes", m, (unsigned long long)pair->bytes[slot]);
        pair_check(pair->buffer + slot * SLOT_BYTES, length_of(m), m, "a message");
        memset(pair->buffer + slot * SLOT_BYTES, EMPTY, SLOT_BYTES);
        pair_put(pair, &op[slot], &ack);
    }
    must(pair->notified == m + 1, "%u of %u", pair->notified, m);
    while (!is_back(pair) || pair->peer->order.ops)
        progress_and_flap(pair, give_up, m);
    pair_barrier(pair);
    for (uint32_t slot = 0; slot < SLOTS; slot++)
        must_be_empty(pair, slot);
    must(pair->notified == m + 1, "%u of %u", pair->notified, m);
}

/* A row of every side that breaks it, of every way, and of both paths; `at` is the seed. */
ParameterizedTestParameters(recovery, a_rail_that_comes_back_is_used_again)
{
    static struct loss rows[36];
    size_t count = getenv("PERSEUS_TEST_LONG") ? sizeof(rows) / sizeof(*rows) : 4;

    for (unsigned i = 0; i < sizeof(rows) / sizeof(*rows); i++)
        rows[i] = (struct loss){(int)(i + i / 3 + 2) % 3, (enum fault)(FLAP_PORT + i % 3), i % 2, i + 1};
    return cr_make_param_array(struct loss, rows, count);
}

ParameterizedTest(struct loss *row, recovery, a_rail_that_comes_back_is_used_again)
{
    setenv("NCCL_IB_RESILIENCY_PORT_RECOVERY", "1", 1);
    setenv("NCCL_IB_RESILIENCY_PORT_RECOVERY_START_DELAY", "20", 1);
    setenv("NCCL_IB_TIMEOUT", "17", 1); /* 4 s in all: new queues may be tried while the other side's are gone */
    if (row->at / 3 % 2)                /* the side that connects offers the queues */
        run_row(row, send_over_flapping_rail, receive_over_flapping_rail);
    else
        run_row(row, receive_over_flapping_rail, send_over_flapping_rail);
}
