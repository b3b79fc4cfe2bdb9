/* SPDX-License-Identifier: Apache-2.0 */
/* The order engine, without chance: every program of three puts and two signals in two groups on two queues, and for
 * each program every order of posting, delivery and completion that the network allows. No state is entered twice. */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <stdlib.h>
#include <string.h>

#include "test/support/order_net.h"

enum {
    STEPS = 5, /* of a program */
    SIGNALS = 2,
    GROUPS = 2,
    KEPT = 6, /* ring slots, group slots, words and so on: so few requests never use more */
    QUEUES = 2,
    SPACE_BYTES = 16 << 10,
    LANES = 4, /* words that are hashed at a time */
    MOST_DEPTH = 40,
    SEEN = 1 << 18, /* more than twice the states of any program: few cache misses, and never full */
};

/* The kinds of requests in a program. */
enum flavour {
    SMALL,    /* plain puts, signals that set */
    NOTIFIED, /* puts with notification, which may take any queue; signals that add to one word */
    LONG,     /* the first two puts are split over the queues */
    STRONG,   /* the last signal is a strong one */
    MIXED,    /* a long put, a notified and a small one; an add and a strong set */
};

struct program {
    char step[STEPS + 1]; /* a, b: a put of that group; A, B: a signal */
};

struct part {
    void *at;
    size_t bytes;
};

static struct net net;
static struct part parts[64];
static int part_count;
static size_t kept_bytes;
static uint8_t kept[MOST_DEPTH][SPACE_BYTES];
static struct {
    uint64_t hash;
    uint32_t program;
} seen[SEEN];
static uint32_t program_number;
static unsigned long states, ends;
static unsigned entered; /* states of this program */

static void keep_part(void *at, size_t bytes)
{
    parts[part_count++] = (struct part){at, bytes};
    kept_bytes += bytes;
    cr_assert_leq(kept_bytes, SPACE_BYTES - 2 * LANES * sizeof(uint64_t));
}

/* List all state that such a short program can change. */
static void choose_parts(void)
{
    struct prs_order *order = &net.order;

    part_count = 0;
    kept_bytes = 0;
    keep_part(order, offsetof(struct prs_order, stats)); /* no decision depends on these */
    keep_part(&order->stats + 1, sizeof(*order) - offsetof(struct prs_order, stats) - sizeof(order->stats));
    keep_part(order->path, order->path_count * sizeof(*order->path));
    keep_part(order->queue, QUEUES * sizeof(*order->queue));
    keep_part(order->signal_last, order->data_queues * sizeof(*order->signal_last));
    for (int i = 0; order->group && i < GROUPS; i++) {
        keep_part(&order->group[i], sizeof(order->group[i]));
        keep_part(order->group[i].last, order->data_queues * sizeof(*order->group[i].last));
    }
    for (int i = 0; order->held && i < SIGNALS + 1; i++) {
        keep_part(&order->held[i], sizeof(order->held[i]));
        keep_part(order->held[i].need_position, order->data_queues * sizeof(*order->held[i].need_position));
    }
    for (int q = 0; q < QUEUES; q++) {
        keep_part(order->queue[q].wr, KEPT * sizeof(*order->queue[q].wr));
        keep_part(net.copies[q], KEPT * PRS_INLINE_BYTES);
        keep_part(net.delivered[q], KEPT * sizeof(net.delivered[q][0]));
        keep_part(net.posted[q], KEPT * sizeof(net.posted[q][0]));
    }
    if (order->tally) {
        keep_part(order->tally, offsetof(struct prs_tally, closed_by) + KEPT * sizeof(order->tally->closed_by[0]));
    }
    keep_part(net.to_deliver, QUEUES * sizeof(net.to_deliver[0]));
    keep_part(net.posted_to, QUEUES * sizeof(net.posted_to[0]));
    for (int i = 0; i < STEPS - SIGNALS + 1; i++) {
        keep_part(&net.put[i], offsetof(struct net_put, offset) + KEPT * sizeof(net.put[i].offset[0]));
        keep_part(&net.put[i].offsets, sizeof(net.put[i].offsets));
    }
    keep_part(net.signal, (SIGNALS + 1) * sizeof(net.signal[0]));
    keep_part(&net.puts, sizeof(net.puts));
    keep_part(&net.signals, sizeof(net.signals));
    keep_part(net.arrivals.wanted, KEPT);
    keep_part(net.arrivals.missing, KEPT);
    keep_part(net.arrivals.bytes, KEPT * sizeof(net.arrivals.bytes[0]));
    keep_part(net.counts.arrived, KEPT * sizeof(net.counts.arrived[0]));
    keep_part(&net.counts, offsetof(struct prs_counts, state) + KEPT);
    keep_part(net.counts.record, KEPT * sizeof(net.counts.record[0]));
    keep_part(net.ring, KEPT * sizeof(net.ring[0]));
}

/* A product of 128 bits, folded: one multiplication for 16 bytes. A state is hashed at every step. */
static uint64_t mix(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;

    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Copy the state out and return its hash. */
static uint64_t save(uint8_t *to)
{
    uint64_t hash[LANES] = {1, 2, 3, 4}, word[2 * LANES];
    size_t at = 0;

    for (int i = 0; i < part_count; i++) {
        memcpy(to + at, parts[i].at, parts[i].bytes);
        at += parts[i].bytes;
    }
    memset(to + at, 0, sizeof(word));
    for (size_t i = 0; i < at; i += sizeof(word)) {
        memcpy(word, to + i, sizeof(word));
#pragma GCC unroll 4
        for (int k = 0; k < LANES; k++)
            hash[k] = mix(word[2 * k] ^ hash[k] ^ 0x9e3779b97f4a7c15u, word[2 * k + 1] ^ 0xff51afd7ed558ccdu) + hash[k];
    }
    return hash[0] ^ hash[1] * 3 ^ hash[2] * 5 ^ hash[3] * 7;
}

static void restore(const uint8_t *from)
{
    for (int i = 0; i < part_count; from += parts[i++].bytes)
        memcpy(parts[i].at, from, parts[i].bytes);
}

/* Return true the first time that this program comes to a state. */
static bool enter(uint64_t hash)
{
    for (uint64_t i = hash;; i++) {
        uint64_t slot = i % SEEN;

        if (seen[slot].program != program_number) {
            seen[slot].hash = hash;
            seen[slot].program = program_number;
            return true;
        }
        if (seen[slot].hash == hash)
            return false;
    }
}

static bool admit(const struct program *program, enum flavour flavour, int done)
{
    char step = program->step[done];
    bool last_signal = net.signals + 1 == SIGNALS;

    if (step >= 'a') {
        struct prs_put put = {.len_bytes = 64, .group = (uint32_t)(step - 'a')};

        if ((flavour == LONG && net.puts < 2) || (flavour == MIXED && net.puts == 0))
            put.len_bytes = 3 * 65536;
        if (flavour == NOTIFIED || (flavour == MIXED && net.puts == 1))
            put.flags = PRS_PUT_NOTIFY;
        return net_put(&net, put);
    }
    return net_signal(
        &net, (struct prs_signal){
                  .group = (uint32_t)(step - 'A'),
                  .kind = flavour == NOTIFIED || (flavour == MIXED && !last_signal) ? PRS_SIGNAL_ADD : PRS_SIGNAL_SET,
                  .flags = (flavour == STRONG || flavour == MIXED) && last_signal ? PRS_SIGNAL_STRONG : 0});
}

static bool all_done(void)
{
    bool done = true;

    for (int i = 0; i < net.puts; i++)
        done = done && net.put[i].op.status == 0 && net.put[i].missing == 0 &&
               net.put[i].notified == (net.put[i].put.flags & PRS_PUT_NOTIFY);
    for (int i = 0; i < net.signals; i++)
        done = done && net.signal[i].op.status == 0 && net.signal[i].raised;
    return done;
}

static void explore(const struct program *program, enum flavour flavour, int depth);

static void go_on(const struct program *program, enum flavour flavour, int depth, int *ways)
{
    ++*ways;
    explore(program, flavour, depth + 1);
    restore(kept[depth]);
}

static void explore(const struct program *program, enum flavour flavour, int depth)
{
    int done = net.puts + net.signals, ways = 0;

    cr_assert_lt(depth, (int)MOST_DEPTH);
    for (int q = 0; q < QUEUES; q++)
        cr_assert_leq(net.order.queue[q].head % NET_DEPTH, (uint32_t)KEPT);
    if (!enter(save(kept[depth])))
        return;
    states++;
    cr_assert_lt(++entered, (unsigned)SEEN / 2);
    if (done < STEPS && admit(program, flavour, done))
        go_on(program, flavour, depth, &ways);
    else
        restore(kept[depth]); /* a refused request may have changed some of it */
    if (net.order.dirty && net_post(&net))
        go_on(program, flavour, depth, &ways);
    for (uint32_t q = 0; q < net.order.data_queues; q++) {
        for (uint32_t p = net.to_deliver[q]; p != net.posted_to[q]; p++) {
            if (net_may_deliver(&net, q, p)) {
                net_deliver(&net, q, p);
                go_on(program, flavour, depth, &ways);
            }
        }
        if (net_complete(&net, q))
            go_on(program, flavour, depth, &ways);
    }
    if (ways)
        return;
    ends++;
    cr_assert(done == STEPS && all_done(), "program %s ends with %d steps taken, and something is never done",
              program->step, done);
}

/* Make all programs: three puts and two signals in any order, each in group a or b. The first step is in group a. */
static int make_programs(struct program *programs)
{
    int count = 0;

    for (unsigned signals = 0; signals < 1u << STEPS; signals++) {
        if (__builtin_popcount(signals) != SIGNALS)
            continue;
        for (unsigned groups = 0; groups < 1u << STEPS; groups++) {
            struct program *program = &programs[count];

            if (groups & 1)
                continue; /* the other half is the same with the groups exchanged */
            for (int i = 0; i < STEPS; i++)
                program->step[i] = (char)((signals >> i & 1 ? 'A' : 'a') + (groups >> i & 1));
            program->step[STEPS] = 0;
            count++;
        }
    }
    return count;
}

struct row {
    int policy, network;
    uint32_t paths, queues;
    int flavour;
};

ParameterizedTestParameters(order_every, no_program_of_five_requests_shows_a_signal_before_its_puts)
{
    static const struct row shapes[] = {
        {PRS_POLICY_IN_ORDER, NET_IN_ORDER, 2, 1, 0}, {PRS_POLICY_NIC_FENCE, NET_FENCED, 2, 1, 0},
        {PRS_POLICY_DRAIN, NET_FREE, 2, 1, 0},        {PRS_POLICY_DRAIN, NET_IN_ORDER, 2, 1, 0},
        {PRS_POLICY_COUNTED, NET_FREE, 2, 1, 0},      {PRS_POLICY_NIC_FENCE, NET_CXI, 1, 1, 0},
    };
    static struct row rows[sizeof(shapes) / sizeof(*shapes) * (MIXED + 1)];
    size_t count = 0;

    for (size_t i = 0; i < sizeof(shapes) / sizeof(*shapes); i++)
        for (int flavour = SMALL; flavour <= MIXED; flavour++) {
            rows[count] = shapes[i];
            rows[count++].flavour = flavour;
        }
    return cr_make_param_array(struct row, rows, count);
}

ParameterizedTest(struct row *row, order_every, no_program_of_five_requests_shows_a_signal_before_its_puts)
{
    static struct program programs[1 << (2 * STEPS)];
    int count = make_programs(programs);

    for (int i = 0; i < count; i += net_stride()) {
        net_init(&net, (enum prs_policy)row->policy, (enum network)row->network, row->paths, row->queues, true);
        program_number++;
        entered = 0;
        choose_parts();
        explore(&programs[i], (enum flavour)row->flavour, 0);
        prs_order_fini(&net.order);
    }
    if (getenv("PRS_TEST_VERBOSE"))
        cr_log_warn("%s, flavour %d: %d programs, %lu states, %lu ends", prs_policy_names[row->policy], row->flavour,
                    count, states, ends);
    cr_assert_gt(ends, 0ul);
}
