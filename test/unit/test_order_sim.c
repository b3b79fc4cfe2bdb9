/* SPDX-License-Identifier: Apache-2.0 */
/* The order engine in random steps, against a network that reorders as much as it may. */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <stdlib.h>

#include "test/support/order_net.h"

enum { GROUPS = 4 };

struct loss_totals {
    uint32_t completions, replayed, taken_late;
};

static unsigned any(struct net *net, unsigned below)
{
    return (unsigned)rand_r(&net->seed) % below;
}

static size_t some_size(struct net *net)
{
    static const size_t sizes[] = {8, 8, 8, 64, 1, 4096, 65536, 65537, 200000, 3 << 20};

    return sizes[any(net, sizeof(sizes) / sizeof(*sizes))];
}

static void try_put(struct net *net)
{
    struct prs_put put = {
        .len_bytes = some_size(net), .group = any(net, GROUPS), .flags = any(net, 2) ? PRS_PUT_NOTIFY : 0};

    if (put.flags && any(net, 8) == 0)
        put.len_bytes = 0;
    if (net->puts < NET_PUTS)
        net_put(net, put);
}

static void try_signal(struct net *net)
{
    struct prs_signal signal = {.kind = any(net, 2) ? PRS_SIGNAL_ADD : PRS_SIGNAL_SET,
                                .group = any(net, GROUPS),
                                .flags = any(net, 6) == 0 ? PRS_SIGNAL_STRONG : 0};

    if (net->signals < NET_SIGNALS)
        net_signal(net, signal);
}

static void deliver_some(struct net *net)
{
    uint32_t q = any(net, net->order.data_queues), in_flight = net->posted_to[q] - net->to_deliver[q];

    for (int tries = 0; in_flight && tries < 4; tries++) {
        uint32_t position = net->to_deliver[q] + any(net, in_flight);

        if (net_may_deliver(net, q, position)) {
            net_deliver(net, q, position);
            break;
        }
    }
    if (any(net, 4) == 0)
        net_raise(net);
    if (any(net, 4) == 0 && net->signals < NET_SIGNALS) /* at the end, credits come only when the sender asks */
        net->credit = net->counts.raised;
}

/* When a path is lost, and how long it stays away. */
struct loss {
    uint32_t at_completion; /* its number; 0: never */
    uint32_t away_for;      /* completions; 0: for good */
    bool lose_another;      /* lose another one soon afterwards, if one may be lost */
};

static void lose_and_regain(struct net *net, const struct loss *loss)
{
    uint32_t paths = net->order.path_count, first = loss->at_completion % paths, second = (first + 1) % paths;
    uint32_t stopped = 0;

    for (uint32_t i = 0; i < paths; i++)
        stopped |= (uint32_t)(net->order.path[i].use >= PRS_PATH_STOPPED) << i;
    if (!loss->at_completion || net->completions < loss->at_completion)
        return;
    if (!net->has_lost)
        net_lose(net, first);
    else if (loss->lose_another && paths > 2 && stopped == 1u << first && net->completions == loss->at_completion + 1)
        net_lose(net, second);
    else if (stopped && loss->away_for && net->completions >= loss->at_completion + loss->away_for)
        net_regain(net, (uint32_t)__builtin_ctz(stopped));
}

static void run_with_loss(enum prs_policy policy, enum network network, uint32_t paths, uint32_t queues, unsigned seed,
                          const struct loss *loss, struct loss_totals *totals)
{
    static struct net net;
    bool pause = false; /* start no requests until all have settled */
    int idle = 0;

    net_init(&net, policy, network, paths, queues, seed & 1);
    net.seed = seed;
    net.raises_later = true;
    if (seed % 3)
        net_start(&net, -(seed * 37 % 200)); /* the counters wrap in the course of the run */
    while (net.puts < NET_PUTS || net.signals < NET_SIGNALS || net.order.ops || !net_settle(&net)) {
        unsigned what = any(&net, 16);

        if (what < 3 && !pause)
            try_put(&net);
        else if (what < 4 && !pause)
            try_signal(&net);
        else if (what < 7)
            while (net_post(&net))
                ;
        else if (what < 13)
            deliver_some(&net);
        else
            net_complete(&net, any(&net, net.order.data_queues));
        if (any(&net, pause ? 4 : 500) == 0)
            pause = !net_settle(&net);
        lose_and_regain(&net, loss);
        cr_assert_lt(++idle, 1000000, "stuck: policy %s, %u paths of %u queues, seed %u", prs_policy_names[policy],
                     paths, queues, seed);
    }
    totals->completions = net.completions;
    totals->replayed += net.replayed;
    totals->taken_late += net.taken_late;
    net_finish(&net);
}

static void run(enum prs_policy policy, enum network network, uint32_t paths, uint32_t queues, unsigned seed)
{
    struct loss_totals totals = {0};

    run_with_loss(policy, network, paths, queues, seed, &(struct loss){0}, &totals);
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
        {PRS_POLICY_DRAIN, NET_IN_ORDER, 2, 1},     {PRS_POLICY_DRAIN, NET_FREE, 1, 1},
        {PRS_POLICY_DRAIN, NET_FREE, 2, 2},         {PRS_POLICY_COUNTED, NET_FREE, 1, 1},
        {PRS_POLICY_COUNTED, NET_FREE, 2, 2},       {PRS_POLICY_COUNTED, NET_IN_ORDER, 4, 1},
        {PRS_POLICY_DRAIN, NET_SRD, 1, 1},          {PRS_POLICY_DRAIN, NET_SRD, 2, 2},
        {PRS_POLICY_COUNTED, NET_ADAPTIVE, 1, 1},   {PRS_POLICY_COUNTED, NET_ADAPTIVE, 2, 2},
        {PRS_POLICY_DRAIN, NET_ADAPTIVE, 2, 1},     {PRS_POLICY_IN_ORDER, NET_ADAPTIVE, 1, 1},
        {PRS_POLICY_IN_ORDER, NET_ADAPTIVE, 2, 2},  {PRS_POLICY_NIC_FENCE, NET_ADAPTIVE, 1, 1},
        {PRS_POLICY_NIC_FENCE, NET_CXI, 1, 1},      {PRS_POLICY_NIC_FENCE, NET_CXI, 2, 1},
        {PRS_POLICY_DRAIN, NET_CXI, 1, 1},          {PRS_POLICY_COUNTED, NET_CXI, 2, 1},
        {PRS_POLICY_IN_ORDER, NET_PLAIN, 1, 1},     {PRS_POLICY_IN_ORDER, NET_PLAIN, 2, 2},
        {PRS_POLICY_DRAIN, NET_PLAIN, 2, 1},        {PRS_POLICY_COUNTED, NET_PLAIN, 2, 2},
    };
    return cr_make_param_array(struct row, rows, sizeof(rows) / sizeof(*rows));
}

ParameterizedTest(struct row *row, order_sim, a_signal_is_never_seen_before_its_puts)
{
    for (unsigned seed = 1; seed <= 60; seed += (unsigned)net_stride())
        run((enum prs_policy)row->policy, (enum network)row->network, row->paths, row->queues, seed);
}

/* ---- a path is lost ---- */

struct lossy_row {
    int network;
    uint32_t paths, queues;
    uint32_t away_for;
    bool lose_another;
};

ParameterizedTestParameters(order_sim, a_path_may_be_lost_at_every_completion)
{
    static struct lossy_row rows[] = {
        {NET_IN_ORDER, 2, 1, 0, false}, {NET_IN_ORDER, 2, 2, 0, false}, {NET_IN_ORDER, 2, 1, 3, false},
        {NET_IN_ORDER, 3, 1, 0, true},  {NET_IN_ORDER, 4, 2, 20, true}, {NET_ADAPTIVE, 2, 1, 0, false},
        {NET_ADAPTIVE, 2, 2, 5, false}, {NET_ADAPTIVE, 3, 2, 0, true},  {NET_PLAIN, 2, 1, 0, false},
        {NET_PLAIN, 3, 2, 5, true},
    };
    return cr_make_param_array(struct lossy_row, rows, sizeof(rows) / sizeof(*rows));
}

/* Nothing is lost, notified twice, raised twice or written late: support/order_net.c checks it at each step. */
ParameterizedTest(struct lossy_row *row, order_sim, a_path_may_be_lost_at_every_completion)
{
    struct loss loss = {.away_for = row->away_for, .lose_another = row->lose_another};
    struct loss_totals totals = {.completions = 1};
    unsigned stride = (unsigned)net_stride();

    for (unsigned at = 1; at <= totals.completions; at += stride) {
        loss.at_completion = at;
        run_with_loss(PRS_POLICY_COUNTED, (enum network)row->network, row->paths, row->queues, at, &loss, &totals);
    }
    cr_assert_gt(totals.completions, 50);
    cr_assert(totals.replayed > 100 / stride && totals.taken_late > 100 / stride, "%u replayed, %u had arrived",
              totals.replayed, totals.taken_late);
}
