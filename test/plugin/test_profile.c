/* SPDX-License-Identifier: Apache-2.0 */
/* What NCCL's profiler is told about the transfers of the network tables. */
#include <criterion/criterion.h>
#include <string.h>

#include "test/plugin/pair.h"

enum { MOST = 64 };

/* What NCCL's callback was called with. An event's handle is its index plus 1. */
static struct told {
    void *parent;
    int64_t plugin;
    struct net_profile_ib_v1 data;
    int stops;
} told[MOST];
static int starts;
static bool listens = true;

static net_result profile(void **event, int type, void *parent, int64_t plugin, void *extra)
{
    if (type == NET_PROFILE_START) {
        struct told *one = &told[starts++];

        one->parent = parent;
        one->plugin = plugin;
        memcpy(&one->data, extra, sizeof(one->data));
        if (listens)
            *event = (void *)(uintptr_t)starts;
    } else {
        cr_assert_eq(type, NET_PROFILE_STOP);
        cr_assert_not_null(*event, "NCCL hands the event to the profiler, which must have made it");
        told[(uintptr_t)*event - 1].stops++;
    }
    return NET_SUCCESS;
}

static struct plugin open_profiled(void **first_context)
{
    struct net_config config = {.traffic_class = NET_UNDEFINED};
    struct plugin plugin = plugin_open();

    *first_context = plugin.context;
    cr_assert_eq(plugin.net->init(&plugin.context, 2, &config, keep_warning, profile), NET_SUCCESS);
    return plugin;
}

/* Send 1000 bytes, with a handle of the profiler for each side. */
static void transfer(const struct plugin *plugin, struct pair *pair, void *sender, void *receiver)
{
    void *send = NULL, *recv = NULL, *data = pair->target, *mhandle = pair->target_mhandle;
    void **receivers = receiver ? &receiver : NULL;
    size_t size = PAIR_BYTES;
    int tag = 7, sizes[8];

    while (!recv)
        cr_assert_eq(plugin->net->irecv(pair->recv, 1, &data, &size, &tag, &mhandle, receivers, &recv), NET_SUCCESS);
    while (!send)
        cr_assert_eq(plugin->net->isend(pair->send, pair->source, 1000, 7, pair->source_mhandle, sender, &send),
                     NET_SUCCESS);
    cr_assert_eq(finish(plugin, send, sizes), NET_SUCCESS);
    cr_assert_eq(finish(plugin, recv, sizes), NET_SUCCESS);
    cr_assert_eq(sizes[0], 1000);
}

static void close_profiled(struct plugin *plugin, struct pair *pair, void *first_context)
{
    pair_close(plugin, pair);
    cr_assert_eq(plugin->net->finalize(plugin->context), NET_SUCCESS);
    plugin->context = first_context;
    plugin_close(plugin);
}

Test(profile, each_transfer_starts_and_ends_once_in_the_layout_of_ib, .timeout = 120)
{
    int sender, receiver;
    void *first;
    struct plugin plugin = open_profiled(&first);
    struct pair pair = pair_open(&plugin, 0);

    for (int i = 0; i < 5; i++)
        transfer(&plugin, &pair, &sender, &receiver);
    cr_assert_eq(starts, 10);
    for (int i = 0; i < starts; i++) {
        bool is_send = told[i].parent == &sender;

        cr_assert(is_send || told[i].parent == &receiver);
        cr_assert_eq(told[i].stops, 1, "event %d ended %d times", i, told[i].stops);
        cr_assert_eq(told[i].plugin, 1 << 16 | 1);
        cr_assert_eq(told[i].data.type, 1);
        cr_assert_eq(told[i].data.transfer.device, 0);
        cr_assert_eq(told[i].data.transfer.opcode, is_send ? 1 : 0);
        cr_assert_eq(told[i].data.transfer.length_bytes, is_send ? 1000 : PAIR_BYTES);
        cr_assert_neq(told[i].data.transfer.queue, 0);
    }
    close_profiled(&plugin, &pair, first);
}

Test(profile, a_profiler_that_does_not_listen_is_told_no_end, .timeout = 120)
{
    int parent;
    void *first;
    struct plugin plugin = open_profiled(&first);
    struct pair pair = pair_open(&plugin, 0);

    listens = false;
    transfer(&plugin, &pair, &parent, &parent);
    cr_assert_eq(starts, 2);
    transfer(&plugin, &pair, NULL, NULL);
    cr_assert_eq(starts, 2, "without a handle there is nothing to tell");
    close_profiled(&plugin, &pair, first);
}
