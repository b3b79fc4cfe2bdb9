/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/hwcheck/trial.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "transport/util/clock.h"

enum {
    LIMIT_MS = 30000,
    ALONE_MS = 2000, /* when the other side has ended */
    LISTEN_MS = 100, /* after this time a wait checks whether the other side has ended */
    /* Data that has not arrived after this time counts as wrong, not as late. LATE_MS is long, since another process
     * may use the core of a software NIC. After the first wrong data LATE_AGAIN_MS applies, since all further data may
     * be wrong too. */
    LATE_MS = 2000,
    LATE_AGAIN_MS = 100,
    CREDIT_EVERY = 8, /* pairs */
    BULK_IN_FLIGHT = 8,
    BULK_NS = 300000000, /* how long bandwidth is measured */
    LOOKS_PER_YIELD = 64,
    CPU_ADDS = 10000, /* adds between two polls: so many that they take most of the time */
};

static uint64_t load(const uint64_t *word)
{
    /* [hwcheck-signal] pairs with the NIC's write of the word: everything that the policy orders before it is visible
     * after it. */
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

void trial_prepare(struct link *link)
{
    memset(link->words, 0, WORDS * sizeof(*link->words));
    memset(link->data, 0, DATA_BYTES);
    memset(link->op, 0, sizeof(link->op));
    memset(link->notified, 0, sizeof(link->notified));
    link->odd = 0;
}

/* ---- waiting ---- */

struct wait {
    uint64_t start_ms, alone_ms;
    uint32_t looks;
};

/* Make progress once during a wait. Return 0 or -errno. */
static int step(struct link *link, struct wait *wait)
{
    int r = link_progress(link);
    uint64_t now;

    if (r)
        return r;
    if (++wait->looks % LOOKS_PER_YIELD)
        return 0;
    sched_yield(); /* both sides may share a core */
    now = prs_clock_ms();
    if (!wait->start_ms)
        wait->start_ms = now;
    if (!wait->alone_ms && now - wait->start_ms > LISTEN_MS && control_has_input(link->control))
        wait->alone_ms = now;
    return now - wait->start_ms > LIMIT_MS || (wait->alone_ms && now - wait->alone_ms > ALONE_MS) ? -ETIMEDOUT : 0;
}

static int wait_word(struct link *link, const uint64_t *word, uint64_t least)
{
    struct wait wait = {0};
    int r = 0;

    while (!r && load(word) < least)
        r = step(link, &wait);
    return r;
}

static int wait_op(struct link *link, const struct prs_op *op)
{
    struct wait wait = {0};
    int r = 0;

    while (!r && op->status == PRS_OP_PENDING)
        r = step(link, &wait);
    return r ? r : op->status;
}

/* ---- transfers ---- */

static int put(struct link *link, uint32_t queue, struct prs_op *op, size_t at, size_t bytes, uint32_t flags,
               uint32_t id)
{
    const struct prs_put put = {
        .src = link->data_region,
        .src_addr = link->data + at,
        .dst_addr = link->remote.data + at,
        .dst = &link->remote.data_keys,
        .len_bytes = bytes,
        .notify_id = id,
        .flags = flags,
    };
    struct wait wait = {0};
    int r;

    while ((r = prs_peer_put(link->peer[queue], op, &put)) == PRS_BUSY) {
        r = step(link, &wait);
        if (r)
            return r;
    }
    return r;
}

static int signal_word(struct link *link, uint32_t queue, struct prs_op *op, uint32_t word, uint64_t value,
                       enum prs_signal_kind kind)
{
    const struct prs_signal signal = {
        .dst_addr = link->remote.words + word * sizeof(uint64_t),
        .dst = &link->remote.words_keys,
        .value = value,
        .kind = kind,
    };
    struct wait wait = {0};
    int r;

    while ((r = prs_peer_signal(link->peer[queue], op, &signal)) == PRS_BUSY) {
        r = step(link, &wait);
        if (r)
            return r;
    }
    return r;
}

/* ---- pairs: data, then what announces it ---- */

/* Slots take turns over the queues. A slot's pairs are all of one queue, so what comes first there comes first. */
static uint32_t queue_of(const struct link *link, uint32_t slot)
{
    return slot % link->queues;
}

/* Pairs of which one at a time is in flight: notifications are handed over in their order, so while one is late, all
 * data of later pairs has time to arrive. The others show what happens under load, as all do over several queues. */
static uint32_t pairs_alone(const struct link *link, uint32_t count)
{
    return link->queues > 1 ? 0 : count / 4;
}

static void fill(uint8_t *data, size_t bytes, uint64_t value)
{
    uint64_t *word = (uint64_t *)(void *)data;

    for (size_t i = 0; i < bytes / sizeof(*word); i++)
        word[i] = value;
}

static bool is_whole(const uint8_t *data, size_t bytes, uint64_t value)
{
    const volatile uint64_t *word = (const volatile uint64_t *)(const volatile void *)data;

    for (size_t i = bytes / sizeof(*word); i-- > 0;) /* check the end first, because it is written last */
        if (word[i] != value)
            return false;
    return true;
}

static size_t small_at(uint32_t slot)
{
    return (size_t)SLOTS * SLOT_BYTES + (size_t)slot * SMALL_BYTES;
}

static int send_pair(struct link *link, enum trial_kind kind, uint32_t slot, uint64_t value, struct prs_op *ops)
{
    size_t at = (size_t)slot * SLOT_BYTES;
    uint32_t queue = queue_of(link, slot);
    int r;

    fill(link->data + at, SLOT_BYTES, value);
    r = put(link, queue, &ops[0], at, SLOT_BYTES, 0, 0);
    if (r)
        return r;
    if (kind == TRIAL_SET)
        return signal_word(link, queue, &ops[1], slot, value, PRS_SIGNAL_SET);
    if (kind == TRIAL_ADD)
        return signal_word(link, queue, &ops[1], WORD_ADDED + queue, 1, PRS_SIGNAL_ADD);
    if (kind == TRIAL_EMPTY)
        return put(link, queue, &ops[1], small_at(slot), 0, PRS_PUT_NOTIFY, slot);
    fill(link->data + small_at(slot), SMALL_BYTES, value);
    return put(link, queue, &ops[1], small_at(slot), SMALL_BYTES, PRS_PUT_NOTIFY, slot);
}

static int send_pairs(struct link *link, enum trial_kind kind, uint32_t count, struct outcome *outcome)
{
    uint64_t start = 0;
    uint32_t alone = pairs_alone(link, count);
    int r = 0;

    for (uint32_t i = 1; i <= count && !r; i++) {
        uint32_t slot = (i - 1) % SLOTS, in_flight = i <= alone + 1 ? 1 : SLOTS;

        if (i > in_flight)
            r = wait_word(link, &link->words[WORD_CREDIT], i - in_flight);
        if (i == alone + 1)
            start = prs_clock_ns();
        for (int k = 0; k < 2 && !r; k++)
            r = wait_op(link, &link->op[2 * slot + k]);
        if (!r)
            r = send_pair(link, kind, slot, i, &link->op[2 * slot]);
    }
    if (!r)
        r = wait_word(link, &link->words[WORD_CREDIT], count);
    outcome->value = (double)(prs_clock_ns() - start) / 1e3 / (count - alone);
    for (uint32_t i = 0; i < 2 * SLOTS && !r; i++)
        r = wait_op(link, &link->op[i]);
    return r;
}

/* How many of the first `pairs` pairs are of the queue of the last of them. */
static uint64_t adds_by(const struct link *link, uint64_t pairs)
{
    uint64_t last = pairs - 1, rounds = last / SLOTS, slot = last % SLOTS, queue = slot % link->queues;
    uint64_t slots = (SLOTS - queue + link->queues - 1) / link->queues; /* of the queue */

    return rounds * slots + slot / link->queues + 1;
}

/* Wait until the pair, which is the value-th of all, is announced: by its value, or by as many as its slot or its queue
 * has had by then. */
static int wait_announced(struct link *link, enum trial_kind kind, uint32_t slot, uint64_t value)
{
    if (kind == TRIAL_SET)
        return wait_word(link, &link->words[slot], value);
    if (kind == TRIAL_ADD)
        return wait_word(link, &link->words[WORD_ADDED + queue_of(link, slot)], adds_by(link, value));
    return wait_word(link, &link->notified[slot], (value - 1) / SLOTS + 1);
}

/* The claim under test: once the pair is announced, all of its data is here. */
static int check_pair(struct link *link, uint32_t slot, uint64_t value, struct outcome *outcome)
{
    const uint8_t *data = link->data + (size_t)slot * SLOT_BYTES;
    uint64_t start, limit_ms;

    if (is_whole(data, SLOT_BYTES, value))
        return 0;
    limit_ms = outcome->wrong ? LATE_AGAIN_MS : LATE_MS;
    start = prs_clock_ms();
    while (!is_whole(data, SLOT_BYTES, value)) {
        int r = link_progress(link);

        if (r)
            return r;
        if (prs_clock_ms() - start > limit_ms) {
            outcome->wrong++;
            return 0;
        }
    }
    outcome->late++;
    return 0;
}

static int receive_pairs(struct link *link, enum trial_kind kind, uint32_t count, struct outcome *outcome)
{
    struct prs_op *credit = &link->op[2 * SLOTS];
    int r = 0;

    link->announced_bytes = kind == TRIAL_EMPTY ? 0 : SMALL_BYTES;
    for (uint32_t i = 1; i <= count && !r; i++) {
        uint32_t slot = (i - 1) % SLOTS;

        r = wait_announced(link, kind, slot, i);
        if (!r)
            r = check_pair(link, slot, i, outcome);
        if (r || (i % CREDIT_EVERY && i > pairs_alone(link, count) && i < count))
            continue;
        r = wait_op(link, credit);
        if (!r)
            r = signal_word(link, 0, credit, WORD_CREDIT, i, PRS_SIGNAL_SET);
    }
    outcome->wrong += link->odd;
    return r ? r : wait_op(link, credit);
}

/* ---- latency ---- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static int ping_pong(struct link *link, uint32_t count, bool starts, double *usec)
{
    struct prs_op *op = &link->op[0];
    int r = 0;

    for (uint32_t i = 1; i <= count && !r; i++) {
        uint64_t start = prs_clock_ns();

        if (!starts)
            r = wait_word(link, &link->words[0], i);
        if (!r)
            r = wait_op(link, op);
        if (!r)
            r = signal_word(link, 0, op, 0, i, PRS_SIGNAL_SET);
        if (!r && starts)
            r = wait_word(link, &link->words[0], i);
        if (starts)
            usec[i - 1] = (double)(prs_clock_ns() - start) / 2e3;
    }
    return r ? r : wait_op(link, op);
}

static int send_latency(struct link *link, uint32_t count, struct outcome *outcome)
{
    double *usec = calloc(count, sizeof(*usec));
    int r = usec ? ping_pong(link, count, true, usec) : -ENOMEM;

    if (!r) {
        qsort(usec, count, sizeof(*usec), by_value);
        outcome->value = usec[count / 2];
    }
    free(usec);
    return r;
}

/* ---- bandwidth ---- */

static int send_bulk(struct link *link, struct outcome *outcome)
{
    struct prs_op *end = &link->op[BULK_IN_FLIGHT];
    uint64_t start = prs_clock_ns(), sent = 0;
    int r = 0;

    for (; !r && prs_clock_ns() - start < BULK_NS; sent++) {
        struct prs_op *op = &link->op[sent % BULK_IN_FLIGHT];

        r = wait_op(link, op);
        if (!r)
            r = put(link, (uint32_t)(sent % link->queues), op, 0, BULK_BYTES, 0, 0);
    }
    for (int i = 0; i < BULK_IN_FLIGHT && !r; i++)
        r = wait_op(link, &link->op[i]);
    outcome->value = (double)sent * BULK_BYTES / (double)(prs_clock_ns() - start);
    if (!r)
        r = signal_word(link, 0, end, WORD_END, 1, PRS_SIGNAL_SET);
    return r ? r : wait_op(link, end);
}

/* ---- adds to one word: of several queues, and beside those of the CPU ---- */

/* One at a time of each queue, since several may become one request. Where the CPU adds too, the other side must show
 * now and then that it does. */
static int send_adds(struct link *link, enum trial_kind kind, uint32_t count)
{
    struct prs_op *end = &link->op[QUEUES_MOST];
    int r = 0;

    for (uint32_t i = 0; i < count && !r; i++) {
        uint32_t queue = i % link->queues;

        if (kind == TRIAL_BESIDE && i % CREDIT_EVERY == 0)
            r = wait_word(link, &link->words[WORD_CREDIT], load(&link->words[WORD_CREDIT]) + 1);
        if (!r)
            r = wait_op(link, &link->op[queue]);
        if (!r)
            r = signal_word(link, queue, &link->op[queue], WORD_BESIDE, 1, PRS_SIGNAL_ADD);
    }
    for (uint32_t queue = 0; queue < link->queues && !r; queue++)
        r = wait_op(link, &link->op[queue]);
    if (!r)
        r = signal_word(link, 0, end, WORD_END, 1, PRS_SIGNAL_SET);
    if (!r)
        r = wait_op(link, end);
    return r ? r : wait_word(link, &link->words[WORD_END], 1); /* a credit must not come during the next trial */
}

/* What is missing in the end was lost: one side has written a sum without the other's add. */
static int count_adds(struct link *link, enum trial_kind kind, uint32_t count, struct outcome *outcome)
{
    uint64_t *word = &link->words[WORD_BESIDE], own = 0, credits = 0, start;
    struct prs_op *credit = &link->op[0];
    struct wait wait = {0};
    int r = 0;

    while (!r && !load(&link->words[WORD_END])) {
        for (int i = 0; i < CPU_ADDS && kind == TRIAL_BESIDE; i++, own++)
            __atomic_fetch_add(word, 1, __ATOMIC_RELAXED); /* nothing follows from it */
        if (kind == TRIAL_BESIDE && credit->status != PRS_OP_PENDING)
            r = signal_word(link, 0, credit, WORD_CREDIT, ++credits, PRS_SIGNAL_SET);
        if (!r)
            r = step(link, &wait);
    }
    if (!r)
        r = wait_op(link, credit);
    start = prs_clock_ms(); /* the word of the end may be written before the last sum */
    while (!r && load(word) < own + count && prs_clock_ms() - start < LATE_MS)
        r = step(link, &wait);
    outcome->wrong = own + count - load(word);
    if (!r)
        r = signal_word(link, 0, credit, WORD_END, 1, PRS_SIGNAL_SET);
    return r ? r : wait_op(link, credit);
}

/* ---- both sides ---- */

int trial_send(struct link *link, enum trial_kind kind, uint32_t count, struct outcome *outcome)
{
    *outcome = (struct outcome){0};
    if (kind == TRIAL_LATENCY)
        return send_latency(link, count, outcome);
    if (kind == TRIAL_BANDWIDTH)
        return send_bulk(link, outcome);
    if (kind == TRIAL_SHARED || kind == TRIAL_BESIDE)
        return send_adds(link, kind, count);
    return send_pairs(link, kind, count, outcome);
}

int trial_receive(struct link *link, enum trial_kind kind, uint32_t count, struct outcome *outcome)
{
    *outcome = (struct outcome){0};
    if (kind == TRIAL_LATENCY)
        return ping_pong(link, count, false, NULL);
    if (kind == TRIAL_BANDWIDTH)
        return wait_word(link, &link->words[WORD_END], 1);
    if (kind == TRIAL_SHARED || kind == TRIAL_BESIDE)
        return count_adds(link, kind, count, outcome);
    return receive_pairs(link, kind, count, outcome);
}
