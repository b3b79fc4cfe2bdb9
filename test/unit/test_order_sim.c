/* SPDX-License-Identifier: Apache-2.0 */
/* The order engine, by random steps, against a network that does the worst its promise allows. */
#include "transport/arrival.h"
#include "transport/order.h"
#include "transport/wire.h"

#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { PUTS = 400, SIGNALS = 120, GROUPS = 4, DEPTH = 32, WINDOW = 48 };

/* How a queue may disorder its requests. */
enum network {
    NET_IN_ORDER, /* RC: not at all */
    NET_FENCED,   /* freely, but nothing passes a fence: what nic_fence relies on */
    NET_FREE,     /* freely: SRD */
};

struct sim_put {
    struct prs_op op;
    struct prs_put put;
    uint64_t missing; /* bytes not yet delivered */
    uint32_t parts_missing;
    uint32_t told; /* notifications */
};

struct sim_signal {
    struct prs_op op;
    struct prs_signal signal;
    int puts_before, signals_before; /* of any group */
    bool raised;
};

struct sim {
    struct prs_order order;
    enum network network;
    unsigned seed;
    uint8_t copies[PRS_ORDER_MAX_QUEUES][DEPTH * PRS_INLINE_BYTES];
    bool delivered[PRS_ORDER_MAX_QUEUES][DEPTH];
    struct prs_wr posted[PRS_ORDER_MAX_QUEUES][DEPTH]; /* as it was when posted */
    uint32_t to_deliver[PRS_ORDER_MAX_QUEUES];         /* positions below it were delivered */
    uint32_t posted_to[PRS_ORDER_MAX_QUEUES];
    struct sim_put put[PUTS];
    struct sim_signal signal[SIGNALS];
    int puts, signals;
    struct prs_arrivals arrivals;
    struct prs_counts counts;
    struct prs_record ring[PRS_RECORDS];
    uint64_t credit;
};

static const struct prs_keys keys;
static const uint32_t local_keys[PRS_MAX_RAILS];

static unsigned any(struct sim *sim, unsigned below)
{
    return (unsigned)rand_r(&sim->seed) % below;
}

static void sim_init(struct sim *sim, enum prs_policy policy, enum network network, uint32_t paths, uint32_t queues,
                     unsigned seed)
{
    static const uint32_t record_key[PRS_MAX_RAILS];
    struct prs_order_options options = {.policy = policy,
                                        .window_ops = WINDOW,
                                        .in_order = network == NET_IN_ORDER,
                                        .path_count = paths,
                                        .queues_per_path = queues,
                                        .depth = DEPTH,
                                        .split_queues = seed & 1,
                                        .max_part_bytes = 1 << 20};

    memset(sim, 0, sizeof *sim);
    sim->network = network;
    sim->seed = seed;
    for (uint32_t i = 0; i < paths; i++)
        options.path[i].rate = 1000.0f * (float)(i + 1);
    cr_assert_eq(prs_order_init(&sim->order, &options), 0);
    for (uint32_t q = 0; q < paths * queues + 1; q++)
        sim->order.queue[q].inline_bytes = sim->copies[q];
    if (policy == PRS_POLICY_COUNTED)
        cr_assert_eq(prs_order_set_records(&sim->order, (uintptr_t)sim->ring, record_key, &sim->credit), 0);
}

/* A signal becomes visible: everything it stands for must be there. */
static void raise_signal(struct sim *sim, int index)
{
    struct sim_signal *signal = &sim->signal[index];
    bool strong = signal->signal.flags & PRS_SIGNAL_STRONG;

    cr_assert(!signal->raised, "signal %d twice", index);
    for (int i = 0; i < signal->puts_before; i++) {
        const struct sim_put *put = &sim->put[i];

        if (strong || put->put.group == signal->signal.group)
            cr_assert(put->missing == 0 && put->parts_missing == 0, "signal %d was seen before put %d (seed %u)", index,
                      i, sim->seed);
    }
    for (int i = 0; i < signal->signals_before; i++)
        if (strong || (sim->network != NET_FENCED && sim->signal[i].signal.group == signal->signal.group))
            cr_assert(sim->signal[i].raised, "signal %d was seen before signal %d", index, i);
    signal->raised = true;
}

static void notice(struct sim *sim, const struct prs_imm *imm, uint32_t bytes)
{
    struct prs_notice out;
    int r = prs_arrivals_add(&sim->arrivals, imm, bytes, &out);

    cr_assert_geq(r, 0);
    for (uint32_t i = 0; r == 1 && i < out.count; i++) {
        struct sim_put *put = &sim->put[(out.first_id + i) % PRS_NOTIFY_IDS]; /* ids are indices here */

        cr_assert_eq(put->told++, 0u);
        cr_assert(put->put.flags & PRS_PUT_NOTIFY && put->put.len_bytes == out.bytes && put->missing == 0,
                  "notification of %llu bytes for a put of %zu, %llu missing", (unsigned long long)out.bytes,
                  put->put.len_bytes, (unsigned long long)put->missing);
    }
}

static void raise_records(struct sim *sim)
{
    const struct prs_record *record;

    for (;;) {
        cr_assert_eq(prs_counts_next(&sim->counts, &record), 0);
        if (!record)
            break;
        if (record->kind != PRS_RECORD_CLOSE)
            raise_signal(sim, (int)(record->addr / 8));
        prs_counts_raised(&sim->counts, record);
    }
    if (any(sim, 4) == 0)
        sim->credit = sim->counts.raised;
}

/* Let one request take effect at the other side. */
static void deliver(struct sim *sim, uint32_t q, uint32_t position)
{
    const struct prs_wr *wr = &sim->posted[q][position % DEPTH];
    uint32_t index = (uint32_t)(wr->remote_addr >> 32);
    struct prs_imm imm;

    sim->delivered[q][position % DEPTH] = true;
    if (wr->remote_addr >= (uintptr_t)sim->ring && wr->remote_addr < (uintptr_t)(sim->ring + PRS_RECORDS)) {
        memcpy((void *)(uintptr_t)wr->remote_addr, (void *)(uintptr_t)wr->local_addr, wr->len_bytes);
    } else if (index) {
        cr_assert_leq(wr->len_bytes, sim->put[index - 1].missing);
        sim->put[index - 1].missing -= wr->len_bytes;
        sim->put[index - 1].parts_missing--;
    } else {
        raise_signal(sim, (int)(wr->remote_addr / 8));
        cr_assert((wr->opcode == PRS_WR_ADD) || *(uint64_t *)(uintptr_t)wr->local_addr == wr->remote_addr / 8,
                  "the copy of the value lives until now");
    }
    if (wr->opcode != PRS_WR_WRITE_IMM)
        return;
    cr_assert_eq(prs_imm_parse(wr->imm, &imm), 0);
    if (imm.bare && imm.kind == PRS_BARE_RECORD)
        cr_assert_eq(prs_counts_record(&sim->counts, imm.tag, &sim->ring[imm.tag]), 0);
    else if (imm.tag)
        cr_assert_eq(prs_counts_arrive(&sim->counts, imm.tag, imm.bare ? 1 : imm.run), 0);
    if (!imm.bare)
        notice(sim, &imm, wr->len_bytes);
    raise_records(sim);
}

static bool may_deliver(const struct sim *sim, uint32_t q, uint32_t position)
{
    if (sim->delivered[q][position % DEPTH])
        return false;
    for (uint32_t p = sim->to_deliver[q]; p != position; p++) {
        bool there = sim->delivered[q][p % DEPTH];

        if (!there && (sim->network == NET_IN_ORDER || sim->posted[q][p % DEPTH].flags & PRS_WR_FENCE ||
                       sim->posted[q][position % DEPTH].flags & PRS_WR_FENCE))
            return sim->network == NET_FREE;
    }
    return true;
}

static void deliver_some(struct sim *sim)
{
    uint32_t q = any(sim, sim->order.data_queues), in_flight = sim->posted_to[q] - sim->to_deliver[q];

    if (in_flight == 0)
        return;
    for (int tries = 0; tries < 4; tries++) {
        uint32_t position = sim->to_deliver[q] + any(sim, in_flight);

        if (may_deliver(sim, q, position)) {
            deliver(sim, q, position);
            break;
        }
    }
    while (sim->to_deliver[q] != sim->posted_to[q] && sim->delivered[q][sim->to_deliver[q] % DEPTH])
        sim->to_deliver[q]++;
}

static void post_some(struct sim *sim)
{
    struct prs_chain chain;
    bool is_long;

    while (prs_order_take(&sim->order, 0, &chain)) {
        const struct prs_order_queue *queue = &sim->order.queue[chain.queue];

        cr_assert_eq(chain.first, sim->posted_to[chain.queue]);
        cr_assert_leq(chain.first + chain.count - queue->tail, (uint32_t)DEPTH, "more than the send queue holds");
        for (uint32_t p = chain.first; p != chain.first + chain.count; p++) {
            sim->posted[chain.queue][p % DEPTH] = queue->wr[p % DEPTH];
            sim->delivered[chain.queue][p % DEPTH] = false;
            is_long =
                queue->wr[p % DEPTH].len_bytes >= PRS_ORDER_PROMPT_BYTES && queue->wr[p % DEPTH].opcode != PRS_WR_READ;
            cr_assert_eq((queue->wr[p % DEPTH].flags & PRS_WR_SIGNALED) != 0,
                         p + 1 == chain.first + chain.count || is_long,
                         "the last of a chain is signaled, and what is long; nothing else");
        }
        sim->posted_to[chain.queue] = chain.first + chain.count;
    }
}

/* A signaled request completes once it and all earlier ones of its queue are delivered. */
static void complete_some(struct sim *sim)
{
    uint32_t q = any(sim, sim->order.data_queues);
    const struct prs_order_queue *queue = &sim->order.queue[q];

    for (uint32_t p = queue->tail; p != sim->to_deliver[q]; p++) {
        if (sim->posted[q][p % DEPTH].flags & PRS_WR_SIGNALED) {
            cr_assert_geq(prs_order_complete(&sim->order, q, p, 0), 0);
            break;
        }
    }
    for (int i = 0; i < sim->puts; i++)
        cr_assert(sim->put[i].op.status == PRS_OP_PENDING || (sim->put[i].missing == 0 && !sim->put[i].parts_missing),
                  "put %d is done but not delivered", i);
}

static size_t some_size(struct sim *sim)
{
    static const size_t sizes[] = {8, 8, 8, 64, 1, 4096, 65536, 65537, 200000, 3 << 20};

    return sizes[any(sim, sizeof sizes / sizeof *sizes)];
}

static void try_put(struct sim *sim)
{
    struct sim_put *put = &sim->put[sim->puts];
    uint32_t head[PRS_ORDER_MAX_QUEUES], parts = 0;

    if (sim->puts == PUTS)
        return;
    put->put = (struct prs_put){.dst_addr = (uint64_t)(sim->puts + 1) << 32,
                                .dst = &keys,
                                .len_bytes = some_size(sim),
                                .notify_id = (uint32_t)sim->puts,
                                .group = any(sim, GROUPS),
                                .flags = any(sim, 2) ? PRS_PUT_NOTIFY : 0};
    if (put->put.flags && any(sim, 8) == 0)
        put->put.len_bytes = 0;
    put->missing = put->put.len_bytes;
    for (uint32_t q = 0; q < sim->order.data_queues; q++)
        head[q] = sim->order.queue[q].head;
    if (prs_order_put(&sim->order, &put->op, &put->put, local_keys) == PRS_BUSY)
        return;
    for (uint32_t q = 0; q < sim->order.data_queues; q++)
        parts += sim->order.queue[q].head - head[q];
    cr_assert_eq(parts, put->op.parts);
    put->parts_missing = parts;
    sim->puts++;
}

static void try_signal(struct sim *sim)
{
    struct sim_signal *signal = &sim->signal[sim->signals];

    if (sim->signals == SIGNALS)
        return;
    signal->signal = (struct prs_signal){.dst_addr = (uint64_t)sim->signals * 8,
                                         .dst = &keys,
                                         .value = (uint64_t)sim->signals,
                                         .kind = any(sim, 2) ? PRS_SIGNAL_ADD : PRS_SIGNAL_SET,
                                         .group = any(sim, GROUPS),
                                         .flags = any(sim, 6) == 0 ? PRS_SIGNAL_STRONG : 0};
    signal->puts_before = sim->puts;
    signal->signals_before = sim->signals;
    if (prs_order_signal(&sim->order, &signal->op, &signal->signal) == 0)
        sim->signals++;
}

static void run(enum prs_policy policy, enum network network, uint32_t paths, uint32_t queues, unsigned seed)
{
    static struct sim sim;
    int idle = 0;

    sim_init(&sim, policy, network, paths, queues, seed);
    while (sim.puts < PUTS || sim.signals < SIGNALS || sim.order.ops) {
        unsigned what = any(&sim, 16);

        if (what < 3)
            try_put(&sim);
        else if (what < 4)
            try_signal(&sim);
        else if (what < 7)
            post_some(&sim);
        else if (what < 13)
            deliver_some(&sim);
        else
            complete_some(&sim);
        cr_assert_lt(++idle, 1000000, "stuck: policy %s, %u paths of %u queues, seed %u", prs_policy_names[policy],
                     paths, queues, seed);
    }
    for (int i = 0; i < sim.puts; i++)
        cr_assert(sim.put[i].op.status == 0 && sim.put[i].told == (sim.put[i].put.flags & PRS_PUT_NOTIFY));
    for (int i = 0; i < sim.signals; i++)
        cr_assert(sim.signal[i].op.status == 0 && sim.signal[i].raised, "signal %d was lost", i);
    prs_order_fini(&sim.order);
}

struct row {
    int policy, network;
    uint32_t paths, queues;
};

ParameterizedTestParameters(order_sim, a_signal_is_never_seen_before_its_puts)
{
    static struct row rows[] = {
        {PRS_POLICY_IN_ORDER, NET_IN_ORDER, 1, 1},  {PRS_POLICY_IN_ORDER, NET_IN_ORDER, 1, 4},
        {PRS_POLICY_IN_ORDER, NET_IN_ORDER, 2, 1},  {PRS_POLICY_IN_ORDER, NET_IN_ORDER, 3, 2},
        {PRS_POLICY_NIC_FENCE, NET_IN_ORDER, 2, 2}, {PRS_POLICY_NIC_FENCE, NET_FENCED, 2, 1},
        {PRS_POLICY_DRAIN, NET_FREE, 1, 1},         {PRS_POLICY_DRAIN, NET_FREE, 2, 2},
        {PRS_POLICY_COUNTED, NET_FREE, 1, 1},       {PRS_POLICY_COUNTED, NET_FREE, 2, 2},
        {PRS_POLICY_COUNTED, NET_IN_ORDER, 4, 1},
    };
    return cr_make_param_array(struct row, rows, sizeof rows / sizeof *rows);
}

ParameterizedTest(struct row *row, order_sim, a_signal_is_never_seen_before_its_puts)
{
    for (unsigned seed = 1; seed <= 60; seed++)
        run((enum prs_policy)row->policy, (enum network)row->network, row->paths, row->queues, seed);
}
