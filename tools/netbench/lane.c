/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/netbench/lane.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "tools/netbench/pattern.h"

/* NCCL leaves what an earlier request left there: a plugin must write it whatever it decides. */
#define UNWRITTEN ((void *)0xdeadbeefdead0000)

size_t lane_scratch_bytes(const struct options *options)
{
    return options->chunk_bytes * (size_t)(options->group * options->outstanding);
}

void lane_begin(struct lane *lane, size_t slot_offset)
{
    memset(&lane->next_recv, 0, sizeof(lane->next_recv));
    memset(&lane->next_send, 0, sizeof(lane->next_send));
    lane->posted = lane->received = 0;
    lane->sent = lane->acknowledged = 0;
    lane->slot_offset = slot_offset;
}

bool lane_is_done(const struct lane *lane)
{
    return lane->received == lane->plan.recv_groups && lane->next_send.step == lane->plan.steps &&
           lane->acknowledged == lane->sent;
}

void lane_describe(const struct lane *lane, char *text, size_t bytes)
{
    const char *what = lane->received < lane->plan.recv_groups   ? "data"
                       : lane->next_send.step < lane->plan.steps ? "a clear to send"
                                                                 : "completion of sends";

    snprintf(text, bytes,
             "comm %d waits for %s: from rank %d received %d of %d (posted %d), to rank %d at step %d of %d group %d, "
             "%u messages sent, %u completed",
             lane->share.comm, what, lane->share.from, lane->received, lane->plan.recv_groups, lane->posted,
             lane->share.to, lane->next_send.step, lane->plan.steps, lane->next_send.group, lane->sent,
             lane->acknowledged);
}

static int failed(const struct lane *lane, const char *call, net_result result)
{
    fprintf(stderr, "perseus-netbench: rank %d, comm %d (to %d, from %d): %s returned %d (%s)\n", lane->share.rank,
            lane->share.comm, lane->share.to, lane->share.from, call, result, net_result_text(result));
    return -EIO;
}

static int unwritten(const struct lane *lane, const char *call)
{
    fprintf(stderr, "perseus-netbench: rank %d, comm %d: %s succeeded without writing *request\n", lane->share.rank,
            lane->share.comm, call);
    return -EIO;
}

/** Chunk i of a group has tag i on top of its sender's: as when several ranks share a comm. */
static int tag_of(int sender, int chunk)
{
    return sender * GROUP_MAX + chunk;
}

static void next_group(const struct plan *plan, const struct range *range, struct cursor *cursor)
{
    cursor->chunk = 0;
    cursor->group++;
    if (!plan_chunks(plan, range, cursor->group)) {
        cursor->group = 0;
        cursor->step++;
    }
}

/* ------------------------------------------------------------------------------------------------------------------
 * receiving */

/** Where a chunk lands: in place, or in scratch when it is to be added. */
static uint8_t *landing(const struct lane *lane, const struct step *step, int slot, int i, const struct range *chunk)
{
    if (step->is_added)
        return lane->scratch.data + ((size_t)slot * lane->plan.group + i) * lane->plan.chunk_bytes;
    return lane->output.data + lane->slot_offset + chunk->offset;
}

static int post_receive(struct lane *lane)
{
    int slot = lane->posted % lane->options->outstanding;
    struct receive *receive = &lane->receive[slot];
    const struct step *step;
    size_t sizes[GROUP_MAX];
    void *data[GROUP_MAX], *mhandles[GROUP_MAX];
    int tags[GROUP_MAX], n;
    net_result result;

    if (lane->next_recv.step == lane->plan.steps || lane->posted - lane->received == lane->options->outstanding)
        return 0;
    step = &lane->plan.step[lane->next_recv.step];
    n = plan_chunks(&lane->plan, &step->recv, lane->next_recv.group);
    for (int i = 0; i < n; i++) {
        struct range chunk = plan_chunk(&lane->plan, &step->recv, lane->next_recv.group, i);

        data[i] = landing(lane, step, slot, i, &chunk);
        sizes[i] = chunk.len;
        tags[i] = tag_of(lane->share.from, i);
        mhandles[i] = step->is_added ? lane->scratch.recv_mhandle : lane->output.recv_mhandle;
    }
    receive->request = UNWRITTEN;
    result = net_irecv(lane->net, lane->recv, n, data, sizes, tags, mhandles, &receive->request);
    if (result != NET_SUCCESS)
        return failed(lane, "irecv", result);
    if (receive->request == UNWRITTEN)
        return unwritten(lane, "irecv");
    if (!receive->request)
        return 0;
    receive->at = lane->next_recv;
    receive->chunks = n;
    receive->flush = NULL;
    lane->posted++;
    next_group(&lane->plan, &step->recv, &lane->next_recv);
    return 1;
}

static int start_flush(struct lane *lane, struct receive *receive, int *sizes)
{
    const struct step *step = &lane->plan.step[receive->at.step];
    void *data[GROUP_MAX], *mhandles[GROUP_MAX];
    net_result result;

    for (int i = 0; i < receive->chunks; i++) {
        struct range chunk = plan_chunk(&lane->plan, &step->recv, receive->at.group, i);

        data[i] = landing(lane, step, lane->received % lane->options->outstanding, i, &chunk);
        mhandles[i] = step->is_added ? lane->scratch.recv_mhandle : lane->output.recv_mhandle;
    }
    receive->flush = UNWRITTEN;
    result = lane->net->table.v6->iflush(lane->recv, receive->chunks, data, sizes, mhandles, &receive->flush);
    if (result != NET_SUCCESS)
        return failed(lane, "iflush", result);
    return receive->flush == UNWRITTEN ? unwritten(lane, "iflush") : 0;
}

static void take_group(struct lane *lane, const struct receive *receive)
{
    const struct step *step = &lane->plan.step[receive->at.step];

    for (int i = 0; step->is_added && i < receive->chunks; i++) {
        struct range chunk = plan_chunk(&lane->plan, &step->recv, receive->at.group, i);

        pattern_add(lane->output.data + lane->slot_offset + chunk.offset,
                    landing(lane, step, lane->received % lane->options->outstanding, i, &chunk), chunk.len);
    }
    lane->received++;
}

static void check_sizes(struct lane *lane, const struct receive *receive, const int *sizes)
{
    const struct step *step = &lane->plan.step[receive->at.step];

    for (int i = 0; i < receive->chunks; i++) {
        struct range chunk = plan_chunk(&lane->plan, &step->recv, receive->at.group, i);

        if (sizes[i] >= 0 && (size_t)sizes[i] == chunk.len)
            continue;
        if (lane->errors++ == 0)
            fprintf(stderr, "perseus-netbench: rank %d, comm %d, step %d: a message of %zu bytes was said to have %d\n",
                    lane->share.rank, lane->share.comm, receive->at.step, chunk.len, sizes[i]);
    }
}

static int test_receive(struct lane *lane)
{
    struct receive *receive = &lane->receive[lane->received % lane->options->outstanding];
    int sizes[GROUP_MAX] = {-1, -1, -1, -1, -1, -1, -1, -1}, done = 0, r;
    net_result result;

    if (lane->received == lane->posted)
        return 0;
    if (!receive->flush) {
        result = lane->net->table.v6->test(receive->request, &done, sizes);
        if (result != NET_SUCCESS)
            return failed(lane, "test of a receive", result);
        if (!done)
            return 0;
        check_sizes(lane, receive, sizes);
        if (lane->options->flush) {
            r = start_flush(lane, receive, sizes);
            if (r < 0)
                return r;
        }
    }
    if (receive->flush) {
        result = lane->net->table.v6->test(receive->flush, &done, NULL);
        if (result != NET_SUCCESS)
            return failed(lane, "test of a flush", result);
        if (!done)
            return 0;
    }
    take_group(lane, receive);
    return 1;
}

/* ------------------------------------------------------------------------------------------------------------------
 * sending */

/** Whether what a group carries is here: the ring passes on what it received in the step before. */
static bool is_ready(const struct lane *lane, const struct cursor *at)
{
    if (!lane->plan.is_chained || at->step == 0)
        return true;
    return lane->received > lane->plan.step[at->step - 1].recv_before + at->group;
}

static int post_send(struct lane *lane)
{
    struct cursor *at = &lane->next_send;
    uint32_t window = (uint32_t)(lane->options->outstanding * lane->options->group);
    const struct buffer *buffer = lane->plan.is_own_input ? &lane->input : &lane->output;
    const struct step *step = &lane->plan.step[at->step];
    uint32_t slot = lane->sent % window;
    struct range chunk;
    net_result result;
    int n, i;

    if (at->step == lane->plan.steps || lane->sent - lane->acknowledged == window || !is_ready(lane, at))
        return 0;
    n = plan_chunks(&lane->plan, &step->send, at->group);
    i = (at->chunk + lane->share.rank) % n; /* not in the order of the receive, which matches by tag */
    chunk = plan_chunk(&lane->plan, &step->send, at->group, i);
    lane->request[slot] = UNWRITTEN;
    result = net_isend(lane->net, lane->send, buffer->data + lane->slot_offset + chunk.offset, chunk.len,
                       tag_of(lane->share.rank, i), buffer->send_mhandle, &lane->request[slot]);
    if (result != NET_SUCCESS)
        return failed(lane, "isend", result);
    if (lane->request[slot] == UNWRITTEN)
        return unwritten(lane, "isend");
    if (!lane->request[slot])
        return 0;
    lane->sent++;
    if (++at->chunk == n)
        next_group(&lane->plan, &step->send, at);
    return 1;
}

static int test_send(struct lane *lane)
{
    uint32_t window = (uint32_t)(lane->options->outstanding * lane->options->group);
    uint32_t slot = lane->acknowledged % window;
    int size = -1, done = 0;
    net_result result;

    if (lane->acknowledged == lane->sent)
        return 0;
    result = lane->net->table.v6->test(lane->request[slot], &done, &size);
    if (result != NET_SUCCESS)
        return failed(lane, "test of a send", result);
    if (!done)
        return 0;
    lane->acknowledged++;
    return 1;
}

int lane_step(struct lane *lane)
{
    static int (*const work[])(struct lane *) = {post_receive, test_receive, post_send, test_send};
    int happened = 0;

    for (size_t i = 0; i < sizeof(work) / sizeof(work[0]); i++) {
        int r;

        /* Each kind of work as long as it goes on, but no kind starves the others. */
        for (int n = 0; n < OUTSTANDING_MAX && (r = work[i](lane)) != 0; n++) {
            if (r < 0)
                return r;
            happened = 1;
        }
    }
    return happened;
}
