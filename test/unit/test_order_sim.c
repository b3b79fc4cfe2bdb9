/* SPDX-License-Identifier: Apache-2.0 */
/* The order engine in random steps, against a network that reorders as much as it may. */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <stdlib.h>

#include "test/support/order_net.h"

enum { GROUPS = 4 };

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

static void run(enum prs_policy policy, enum network network, uint32_t paths, uint32_t queues, unsigned seed)
{
    static struct net net;
    bool pause = false; /* start no requests until all have settled */
    int idle = 0;

    net_init(&net, policy, network, paths, queues, seed & 1);
    net.seed = seed;
    net.raises_later = true;
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
        cr_assert_lt(++idle, 1000000, "stuck: policy %s, %u paths of %u queues, seed %u", prs_policy_names[policy],
                     paths, queues, seed);
    }
    net_finish(&net);
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
    };
    return cr_make_param_array(struct row, rows, sizeof(rows) / sizeof(*rows));
}

ParameterizedTest(struct row *row, order_sim, a_signal_is_never_seen_before_its_puts)
{
    for (unsigned seed = 1; seed <= 60; seed++)
        run((enum prs_policy)row->policy, (enum network)row->network, row->paths, row->queues, seed);
}
