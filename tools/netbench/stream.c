/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/netbench/stream.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "tools/netbench/pattern.h"

/* NCCL does not clear *request before a call, so a plugin must write it whatever it decides. */
#define UNWRITTEN ((void *)0xdeadbeefdead0000)

size_t stream_scratch_bytes(const struct options *options)
{
    return options->chunk_bytes * (size_t)(options->per_receive * options->outstanding);
}

void stream_begin(struct stream *stream, size_t slot_offset)
{
    memset(&stream->next_recv, 0, sizeof(stream->next_recv));
    memset(&stream->next_send, 0, sizeof(stream->next_send));
    stream->posted = stream->received = 0;
    stream->sent = stream->acknowledged = 0;
    stream->slot_offset = slot_offset;
}

bool stream_is_done(const struct stream *stream)
{
    return stream->received == stream->plan.receives && stream->next_send.step == stream->plan.steps &&
           stream->acknowledged == stream->sent;
}

void stream_describe(const struct stream *stream, char *text, size_t bytes)
{
    const char *what = stream->received < stream->plan.receives      ? "data"
                       : stream->next_send.step < stream->plan.steps ? "a clear to send"
                                                                     : "completion of sends";

    snprintf(
        text, bytes,
        "comm %d waits for %s: from rank %d received %d of %d (posted %d), to rank %d at step %d of %d receive %d, "
        "%u messages sent, %u completed",
        stream->route.comm, what, stream->route.from, stream->received, stream->plan.receives, stream->posted,
        stream->route.to, stream->next_send.step, stream->plan.steps, stream->next_send.multi, stream->sent,
        stream->acknowledged);
}

static int failed(const struct stream *stream, const char *call, net_result result)
{
    fprintf(stderr, "perseus-netbench: rank %d, comm %d (to %d, from %d): %s returned %d (%s)\n", stream->route.rank,
            stream->route.comm, stream->route.to, stream->route.from, call, result, net_result_text(result));
    return -EIO;
}

static int unwritten(const struct stream *stream, const char *call)
{
    fprintf(stderr, "perseus-netbench: rank %d, comm %d: %s succeeded without writing *request\n", stream->route.rank,
            stream->route.comm, call);
    return -EIO;
}

/* The tag of chunk i of a multi-receive; different for each sender, as when several ranks share a comm. */
static int tag_of(int sender, int chunk)
{
    return sender * MULTI_MAX + chunk;
}

static void next_multi(const struct plan *plan, const struct range *range, struct cursor *cursor)
{
    cursor->chunk = 0;
    cursor->multi++;
    if (!plan_chunks(plan, range, cursor->multi)) {
        cursor->multi = 0;
        cursor->step++;
    }
}

/* ---- receiving ---- */

/* Where a chunk is received: at its final address, or in scratch when it is to be added. */
static uint8_t *landing_address(const struct stream *stream, const struct step *step, int slot, int i,
                                const struct range *chunk)
{
    if (step->is_added)
        return stream->scratch.data + ((size_t)slot * stream->plan.per_receive + i) * stream->plan.chunk_bytes;
    return stream->output.data + stream->slot_offset + chunk->offset;
}

static int post_receive(struct stream *stream)
{
    int slot = stream->posted % stream->options->outstanding;
    struct receive *receive = &stream->receive[slot];
    const struct step *step;
    size_t sizes[MULTI_MAX];
    void *data[MULTI_MAX], *mhandles[MULTI_MAX];
    int tags[MULTI_MAX], n;
    net_result result;

    if (stream->next_recv.step == stream->plan.steps ||
        stream->posted - stream->received == stream->options->outstanding)
        return 0;
    step = &stream->plan.step[stream->next_recv.step];
    n = plan_chunks(&stream->plan, &step->recv, stream->next_recv.multi);
    for (int i = 0; i < n; i++) {
        struct range chunk = plan_chunk(&stream->plan, &step->recv, stream->next_recv.multi, i);

        data[i] = landing_address(stream, step, slot, i, &chunk);
        sizes[i] = chunk.len;
        tags[i] = tag_of(stream->route.from, i);
        mhandles[i] = step->is_added ? stream->scratch.recv_mhandle : stream->output.recv_mhandle;
    }
    receive->request = UNWRITTEN;
    result = net_irecv(stream->net, stream->recv, n, data, sizes, tags, mhandles, &receive->request);
    if (result != NET_SUCCESS)
        return failed(stream, "irecv", result);
    if (receive->request == UNWRITTEN)
        return unwritten(stream, "irecv");
    if (!receive->request)
        return 0;
    receive->at = stream->next_recv;
    receive->chunks = n;
    receive->flush = NULL;
    stream->posted++;
    next_multi(&stream->plan, &step->recv, &stream->next_recv);
    return 1;
}

static int start_flush(struct stream *stream, struct receive *receive, int *sizes)
{
    const struct step *step = &stream->plan.step[receive->at.step];
    void *data[MULTI_MAX], *mhandles[MULTI_MAX];
    net_result result;

    for (int i = 0; i < receive->chunks; i++) {
        struct range chunk = plan_chunk(&stream->plan, &step->recv, receive->at.multi, i);

        data[i] = landing_address(stream, step, stream->received % stream->options->outstanding, i, &chunk);
        mhandles[i] = step->is_added ? stream->scratch.recv_mhandle : stream->output.recv_mhandle;
    }
    receive->flush = UNWRITTEN;
    result = stream->net->table.v6->iflush(stream->recv, receive->chunks, data, sizes, mhandles, &receive->flush);
    if (result != NET_SUCCESS)
        return failed(stream, "iflush", result);
    return receive->flush == UNWRITTEN ? unwritten(stream, "iflush") : 0;
}

static void take_receive(struct stream *stream, const struct receive *receive)
{
    const struct step *step = &stream->plan.step[receive->at.step];

    for (int i = 0; step->is_added && i < receive->chunks; i++) {
        struct range chunk = plan_chunk(&stream->plan, &step->recv, receive->at.multi, i);

        pattern_add(stream->output.data + stream->slot_offset + chunk.offset,
                    landing_address(stream, step, stream->received % stream->options->outstanding, i, &chunk),
                    chunk.len);
    }
    stream->received++;
}

static void check_sizes(struct stream *stream, const struct receive *receive, const int *sizes)
{
    const struct step *step = &stream->plan.step[receive->at.step];

    for (int i = 0; i < receive->chunks; i++) {
        struct range chunk = plan_chunk(&stream->plan, &step->recv, receive->at.multi, i);

        if (sizes[i] >= 0 && (size_t)sizes[i] == chunk.len)
            continue;
        if (stream->errors++ == 0)
            fprintf(stderr, "perseus-netbench: rank %d, comm %d, step %d: a message of %zu bytes was said to have %d\n",
                    stream->route.rank, stream->route.comm, receive->at.step, chunk.len, sizes[i]);
    }
}

static int test_receive(struct stream *stream)
{
    struct receive *receive = &stream->receive[stream->received % stream->options->outstanding];
    int sizes[MULTI_MAX] = {-1, -1, -1, -1, -1, -1, -1, -1}, done = 0, r;
    net_result result;

    if (stream->received == stream->posted)
        return 0;
    if (!receive->flush) {
        result = stream->net->table.v6->test(receive->request, &done, sizes);
        if (result != NET_SUCCESS)
            return failed(stream, "test of a receive", result);
        if (!done)
            return 0;
        check_sizes(stream, receive, sizes);
        if (stream->options->flush) {
            r = start_flush(stream, receive, sizes);
            if (r < 0)
                return r;
        }
    }
    if (receive->flush) {
        result = stream->net->table.v6->test(receive->flush, &done, NULL);
        if (result != NET_SUCCESS)
            return failed(stream, "test of a flush", result);
        if (!done)
            return 0;
    }
    take_receive(stream, receive);
    return 1;
}

/* ---- sending ---- */

/* Whether the data to send is here: the ring of ranks passes on what it received in the previous step. */
static bool is_ready(const struct stream *stream, const struct cursor *at)
{
    if (!stream->plan.is_chained || at->step == 0)
        return true;
    return stream->received > stream->plan.step[at->step - 1].receives_before + at->multi;
}

static int post_send(struct stream *stream)
{
    struct cursor *at = &stream->next_send;
    uint32_t most = (uint32_t)(stream->options->outstanding * stream->options->per_receive);
    const struct buffer *buffer = stream->plan.is_own_input ? &stream->input : &stream->output;
    const struct step *step = &stream->plan.step[at->step];
    uint32_t slot = stream->sent % most;
    struct range chunk;
    net_result result;
    int n, i;

    if (at->step == stream->plan.steps || stream->sent - stream->acknowledged == most || !is_ready(stream, at))
        return 0;
    n = plan_chunks(&stream->plan, &step->send, at->multi);
    i = (at->chunk + stream->route.rank) % n; /* not in the order of the receive: it must match by tag */
    chunk = plan_chunk(&stream->plan, &step->send, at->multi, i);
    stream->request[slot] = UNWRITTEN;
    result = net_isend(stream->net, stream->send, buffer->data + stream->slot_offset + chunk.offset, chunk.len,
                       tag_of(stream->route.rank, i), buffer->send_mhandle, &stream->request[slot]);
    if (result != NET_SUCCESS)
        return failed(stream, "isend", result);
    if (stream->request[slot] == UNWRITTEN)
        return unwritten(stream, "isend");
    if (!stream->request[slot])
        return 0;
    stream->sent++;
    if (++at->chunk == n)
        next_multi(&stream->plan, &step->send, at);
    return 1;
}

static int test_send(struct stream *stream)
{
    uint32_t most = (uint32_t)(stream->options->outstanding * stream->options->per_receive);
    uint32_t slot = stream->acknowledged % most;
    int size = -1, done = 0;
    net_result result;

    if (stream->acknowledged == stream->sent)
        return 0;
    result = stream->net->table.v6->test(stream->request[slot], &done, &size);
    if (result != NET_SUCCESS)
        return failed(stream, "test of a send", result);
    if (!done)
        return 0;
    stream->acknowledged++;
    return 1;
}

int stream_step(struct stream *stream)
{
    static int (*const work[])(struct stream *) = {post_receive, test_receive, post_send, test_send};
    int happened = 0;

    for (size_t i = 0; i < sizeof(work) / sizeof(work[0]); i++) {
        int r;

        /* Do each kind of work as long as it succeeds, but with a limit, so that it does not starve the others. */
        for (int n = 0; n < OUTSTANDING_MAX && (r = work[i](stream)) != 0; n++) {
            if (r < 0)
                return r;
            happened = 1;
        }
    }
    return happened;
}
