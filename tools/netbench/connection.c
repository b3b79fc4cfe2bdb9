/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/netbench/connection.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failed(const struct stream *stream, const char *call, net_result result)
{
    fprintf(stderr, "perseus-netbench: rank %d, comm %d: %s (to rank %d, from rank %d, device %d) returned %d (%s)\n",
            stream->route.rank, stream->route.comm, call, stream->route.to, stream->route.from, stream->device, result,
            net_result_text(result));
    return -EIO;
}

static int listen_all(struct job *job, struct stream *streams, int count)
{
    for (int i = 0; i < count; i++) {
        struct stream *stream = &streams[i];
        struct meeting *meeting = job_meeting(job, stream->route.rank, stream->route.from, stream->route.comm);
        net_result result = net_listen(stream->net, stream->device, meeting->handle, &stream->listen);

        if (result != NET_SUCCESS)
            return failed(stream, "listen", result);
        /* [netbench-handle]: the handle is written before it counts as published; pairs with try_connect(). */
        __atomic_store_n(&meeting->is_published, 1, __ATOMIC_RELEASE);
    }
    return 0;
}

/* Return 1 if the stream is now connected to its peer, 0 if not yet. */
static int try_connect(struct job *job, struct stream *stream)
{
    struct meeting *meeting = job_meeting(job, stream->route.to, stream->route.rank, stream->route.comm);
    net_result result;

    if (stream->send)
        return 0;
    if (!stream->has_handle) {
        /* [netbench-handle]: pairs with listen_all() of the receiver. */
        if (!__atomic_load_n(&meeting->is_published, __ATOMIC_ACQUIRE))
            return 0;
        memcpy(stream->handle, meeting->handle, sizeof(stream->handle));
        stream->has_handle = true;
    }
    result = net_connect(stream->net, stream->device, stream->handle, &stream->send);
    if (result != NET_SUCCESS)
        return failed(stream, "connect", result);
    return stream->send != NULL;
}

static int try_accept(struct job *job, struct stream *stream)
{
    struct meeting *meeting = job_meeting(job, stream->route.rank, stream->route.from, stream->route.comm);
    net_result result;

    if (stream->recv)
        return 0;
    result = net_accept(stream->net, stream->listen, &stream->recv);
    if (result != NET_SUCCESS)
        return failed(stream, "accept", result);
    if (!stream->recv)
        return 0;
    result = stream->net->table.v6->close_listen(stream->listen);
    stream->listen = NULL;
    meeting->is_published = 0; /* the sender has read the handle; the next round publishes another */
    return result == NET_SUCCESS ? 1 : failed(stream, "closeListen", result);
}

static void report_unconnected(const struct stream *streams, int count)
{
    for (int i = 0; i < count; i++) {
        if (!streams[i].send)
            fprintf(stderr, "perseus-netbench: rank %d, comm %d: still connecting to rank %d\n", streams[i].route.rank,
                    streams[i].route.comm, streams[i].route.to);
        if (!streams[i].recv)
            fprintf(stderr, "perseus-netbench: rank %d, comm %d: still accepting rank %d\n", streams[i].route.rank,
                    streams[i].route.comm, streams[i].route.from);
    }
}

int connection_open(struct job *job, struct stream *streams, int count)
{
    struct rank_state *state = &job->rank[streams[0].route.rank];
    double give_up = job_now() + streams[0].options->setup_timeout_s * 1e6;
    int left = 2 * count, r;

    r = listen_all(job, streams, count);
    while (r == 0 && left > 0) {
        for (int i = 0; i < count && r >= 0; i++) {
            r = try_connect(job, &streams[i]);
            left -= r > 0;
            if (r >= 0)
                r = try_accept(job, &streams[i]);
            left -= r > 0;
        }
        if (r < 0)
            break;
        r = 0;
        __atomic_add_fetch(&state->beats, 1, __ATOMIC_RELAXED);
        if (job_stopped(job))
            r = -ECANCELED;
        else if (job_now() > give_up)
            r = -ETIMEDOUT;
        sched_yield();
    }
    if (r == -ETIMEDOUT || r == -ECANCELED)
        report_unconnected(streams, count);
    return r;
}

static int reg(struct stream *stream, void *comm, struct buffer *buffer, void **mhandle)
{
    net_result result;

    if (!buffer->bytes)
        return 0;
    result = net_reg(stream->net, comm, buffer->data, buffer->bytes, mhandle);
    return result == NET_SUCCESS ? 0 : failed(stream, "regMr", result);
}

static int dereg(struct stream *stream, void *comm, void **mhandle)
{
    net_result result;

    if (!*mhandle)
        return 0;
    result = stream->net->table.v6->dereg(comm, *mhandle);
    *mhandle = NULL;
    return result == NET_SUCCESS ? 0 : failed(stream, "deregMr", result);
}

int connection_register(struct stream *streams, int count)
{
    int r = 0;

    for (int i = 0; i < count && r == 0; i++) {
        r = reg(&streams[i], streams[i].send, &streams[i].input, &streams[i].input.send_mhandle);
        if (!r)
            r = reg(&streams[i], streams[i].send, &streams[i].output, &streams[i].output.send_mhandle);
        if (!r)
            r = reg(&streams[i], streams[i].recv, &streams[i].output, &streams[i].output.recv_mhandle);
        if (!r)
            r = reg(&streams[i], streams[i].recv, &streams[i].scratch, &streams[i].scratch.recv_mhandle);
    }
    return r;
}

int connection_churn(struct stream *stream)
{
    enum { BYTES = 1 << 16 };
    struct buffer buffer = {.data = aligned_alloc(1 << 12, BYTES), .bytes = BYTES};
    int r;

    if (!buffer.data)
        return -ENOMEM;
    r = reg(stream, stream->send, &buffer, &buffer.send_mhandle);
    if (!r)
        r = reg(stream, stream->recv, &buffer, &buffer.recv_mhandle);
    r |= dereg(stream, stream->send, &buffer.send_mhandle);
    r |= dereg(stream, stream->recv, &buffer.recv_mhandle);
    free(buffer.data);
    return r ? -EIO : 0;
}

int connection_deregister(struct stream *streams, int count)
{
    int worst = 0;

    for (int i = 0; i < count; i++) {
        worst |= dereg(&streams[i], streams[i].send, &streams[i].input.send_mhandle);
        worst |= dereg(&streams[i], streams[i].send, &streams[i].output.send_mhandle);
        worst |= dereg(&streams[i], streams[i].recv, &streams[i].output.recv_mhandle);
        worst |= dereg(&streams[i], streams[i].recv, &streams[i].scratch.recv_mhandle);
    }
    return worst ? -EIO : 0;
}

int connection_close(struct stream *streams, int count)
{
    int worst = 0;

    for (int i = 0; i < count; i++) {
        const struct net_v6 *table = streams[i].net->table.v6;

        if (streams[i].send && table->close_send(streams[i].send) != NET_SUCCESS)
            worst = failed(&streams[i], "closeSend", NET_INTERNAL_ERROR);
        if (streams[i].recv && table->close_recv(streams[i].recv) != NET_SUCCESS)
            worst = failed(&streams[i], "closeRecv", NET_INTERNAL_ERROR);
        if (streams[i].listen && table->close_listen(streams[i].listen) != NET_SUCCESS)
            worst = failed(&streams[i], "closeListen", NET_INTERNAL_ERROR);
        streams[i].send = streams[i].recv = streams[i].listen = NULL;
    }
    return worst;
}
