/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/netbench/link.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failed(const struct lane *lane, const char *call, net_result result)
{
    fprintf(stderr, "perseus-netbench: rank %d, comm %d: %s (to rank %d, from rank %d, device %d) returned %d (%s)\n",
            lane->share.rank, lane->share.comm, call, lane->share.to, lane->share.from, lane->device, result,
            net_result_text(result));
    return -EIO;
}

static int listen_all(struct world *world, struct lane *lanes, int count)
{
    for (int i = 0; i < count; i++) {
        struct lane *lane = &lanes[i];
        struct meeting *meeting = world_meeting(world, lane->share.rank, lane->share.from, lane->share.comm);
        net_result result = net_listen(lane->net, lane->device, meeting->handle, &lane->listen);

        if (result != NET_SUCCESS)
            return failed(lane, "listen", result);
        /* L1: the handle is written before it is called published. Pairs with L2. */
        __atomic_store_n(&meeting->is_published, 1, __ATOMIC_RELEASE);
    }
    return 0;
}

/** Return 1 when the lane got its comm to the peer, 0 when not yet. */
static int try_connect(struct world *world, struct lane *lane)
{
    struct meeting *meeting = world_meeting(world, lane->share.to, lane->share.rank, lane->share.comm);
    net_result result;

    if (lane->send)
        return 0;
    if (!lane->has_handle) {
        /* L2: pairs with L1 of the receiver. */
        if (!__atomic_load_n(&meeting->is_published, __ATOMIC_ACQUIRE))
            return 0;
        memcpy(lane->handle, meeting->handle, sizeof(lane->handle));
        lane->has_handle = true;
    }
    result = net_connect(lane->net, lane->device, lane->handle, &lane->send);
    if (result != NET_SUCCESS)
        return failed(lane, "connect", result);
    return lane->send != NULL;
}

static int try_accept(struct lane *lane)
{
    net_result result;

    if (lane->recv)
        return 0;
    result = net_accept(lane->net, lane->listen, &lane->recv);
    if (result != NET_SUCCESS)
        return failed(lane, "accept", result);
    if (!lane->recv)
        return 0;
    result = lane->net->table.v6->close_listen(lane->listen);
    lane->listen = NULL;
    return result == NET_SUCCESS ? 1 : failed(lane, "closeListen", result);
}

static void report_unconnected(const struct lane *lanes, int count)
{
    for (int i = 0; i < count; i++) {
        if (!lanes[i].send)
            fprintf(stderr, "perseus-netbench: rank %d, comm %d: still connecting to rank %d\n", lanes[i].share.rank,
                    lanes[i].share.comm, lanes[i].share.to);
        if (!lanes[i].recv)
            fprintf(stderr, "perseus-netbench: rank %d, comm %d: still accepting rank %d\n", lanes[i].share.rank,
                    lanes[i].share.comm, lanes[i].share.from);
    }
}

int link_open(struct world *world, struct lane *lanes, int count)
{
    struct rank_state *state = &world->rank[lanes[0].share.rank];
    double give_up = world_now() + lanes[0].options->setup_timeout_s * 1e6;
    int left = 2 * count, r;

    r = listen_all(world, lanes, count);
    while (r == 0 && left > 0) {
        for (int i = 0; i < count && r >= 0; i++) {
            r = try_connect(world, &lanes[i]);
            left -= r > 0;
            if (r >= 0)
                r = try_accept(&lanes[i]);
            left -= r > 0;
        }
        if (r < 0)
            break;
        r = 0;
        __atomic_add_fetch(&state->beats, 1, __ATOMIC_RELAXED);
        if (world_stopped(world))
            r = -ECANCELED;
        else if (world_now() > give_up)
            r = -ETIMEDOUT;
        sched_yield();
    }
    if (r == -ETIMEDOUT || r == -ECANCELED)
        report_unconnected(lanes, count);
    return r;
}

static int reg(struct lane *lane, void *comm, struct buffer *buffer, void **mhandle)
{
    net_result result;

    if (!buffer->bytes)
        return 0;
    result = net_reg(lane->net, comm, buffer->data, buffer->bytes, mhandle);
    return result == NET_SUCCESS ? 0 : failed(lane, "regMr", result);
}

static int dereg(struct lane *lane, void *comm, void **mhandle)
{
    net_result result;

    if (!*mhandle)
        return 0;
    result = lane->net->table.v6->dereg(comm, *mhandle);
    *mhandle = NULL;
    return result == NET_SUCCESS ? 0 : failed(lane, "deregMr", result);
}

int link_register(struct lane *lanes, int count)
{
    int r = 0;

    for (int i = 0; i < count && r == 0; i++) {
        r = reg(&lanes[i], lanes[i].send, &lanes[i].input, &lanes[i].input.send_mhandle);
        if (r == 0)
            r = reg(&lanes[i], lanes[i].send, &lanes[i].output, &lanes[i].output.send_mhandle);
        if (r == 0)
            r = reg(&lanes[i], lanes[i].recv, &lanes[i].output, &lanes[i].output.recv_mhandle);
        if (r == 0)
            r = reg(&lanes[i], lanes[i].recv, &lanes[i].scratch, &lanes[i].scratch.recv_mhandle);
    }
    return r;
}

int link_churn(struct lane *lane)
{
    enum { BYTES = 1 << 16 };
    struct buffer buffer = {.data = aligned_alloc(1 << 12, BYTES), .bytes = BYTES};
    int r;

    if (!buffer.data)
        return -ENOMEM;
    r = reg(lane, lane->send, &buffer, &buffer.send_mhandle);
    if (r == 0)
        r = reg(lane, lane->recv, &buffer, &buffer.recv_mhandle);
    r |= dereg(lane, lane->send, &buffer.send_mhandle);
    r |= dereg(lane, lane->recv, &buffer.recv_mhandle);
    free(buffer.data);
    return r ? -EIO : 0;
}

int link_deregister(struct lane *lanes, int count)
{
    int worst = 0;

    for (int i = 0; i < count; i++) {
        worst |= dereg(&lanes[i], lanes[i].send, &lanes[i].input.send_mhandle);
        worst |= dereg(&lanes[i], lanes[i].send, &lanes[i].output.send_mhandle);
        worst |= dereg(&lanes[i], lanes[i].recv, &lanes[i].output.recv_mhandle);
        worst |= dereg(&lanes[i], lanes[i].recv, &lanes[i].scratch.recv_mhandle);
    }
    return worst ? -EIO : 0;
}

int link_close(struct lane *lanes, int count)
{
    int worst = 0;

    for (int i = 0; i < count; i++) {
        const struct net_v6 *table = lanes[i].net->table.v6;

        if (lanes[i].send && table->close_send(lanes[i].send) != NET_SUCCESS)
            worst = failed(&lanes[i], "closeSend", NET_INTERNAL_ERROR);
        if (lanes[i].recv && table->close_recv(lanes[i].recv) != NET_SUCCESS)
            worst = failed(&lanes[i], "closeRecv", NET_INTERNAL_ERROR);
        if (lanes[i].listen && table->close_listen(lanes[i].listen) != NET_SUCCESS)
            worst = failed(&lanes[i], "closeListen", NET_INTERNAL_ERROR);
        lanes[i].send = lanes[i].recv = lanes[i].listen = NULL;
    }
    return worst;
}
