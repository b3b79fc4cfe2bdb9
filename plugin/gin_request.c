/* SPDX-License-Identifier: Apache-2.0 */
/* Transfers of GIN and RMA. A request without room is not refused: it waits in its queue. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "plugin/gin.h"
#include "plugin/result.h"
#include "transport/util/clock.h"
#include "transport/util/error.h"

enum {
    BLOCK_REQUESTS = 256,
    MAX_IDLE_TESTS = 64, /* idle tests in a row, each of another request, without a call of progress */
    /* When a group number is used again, its first request has completed long ago. If it has not, both requests are
     * ordered more than needed. */
    WEAK_GROUPS = 1 << 15,
};

struct gin_block {
    struct gin_block *next;
    struct gin_request request[BLOCK_REQUESTS];
};

static struct gin_request *alloc_request(struct gin_set *set)
{
    struct gin_request *request = set->free;
    struct gin_block *block;

    if (request) {
        set->free = request->next;
        return request;
    }
    block = malloc(sizeof(*block));
    if (!block)
        return NULL;
    block->next = set->blocks;
    set->blocks = block;
    for (int i = 1; i < BLOCK_REQUESTS; i++) {
        block->request[i].next = set->free;
        set->free = &block->request[i];
    }
    return &block->request[0];
}

static void free_request(struct gin_request *request)
{
    request->next = request->set->free;
    request->set->free = request;
}

void gin_request_free_all(struct gin_set *set)
{
    while (set->blocks) {
        struct gin_block *block = set->blocks;

        set->blocks = block->next;
        free(block);
    }
    set->free = NULL;
}

/* ---- posting ---- */

static int post_data(struct gin_queue *queue, struct gin_request *request)
{
    const struct gin_remote *remote;

    switch (request->kind) {
    case GIN_REQUEST_GET: {
        remote = &request->src->remote[queue->rank];
        struct prs_get get = {.dst = request->dst->region,
                              .dst_addr = (void *)(uintptr_t)(request->dst->base + request->dst_offset),
                              .src_addr = remote->base + request->src_offset,
                              .src = &remote->keys,
                              .len_bytes = request->size};
        return prs_peer_get(queue->peer, &request->data, &get);
    }
    case GIN_REQUEST_FLUSH:
        return prs_peer_flush(queue->peer, &request->data, request->dst->region,
                              (const void *)(uintptr_t)request->dst->base);
    default: {
        struct prs_put put = {.len_bytes = request->size, .group = request->group};

        /* There is only a signal, or nothing. Requests are posted in order, so the data counts as done now. */
        if (!request->size) {
            request->data.status = 0;
            return 0;
        }
        remote = &request->dst->remote[queue->rank];
        put.src = request->src->region;
        put.src_addr = (const void *)(uintptr_t)(request->src->base + request->src_offset);
        put.dst_addr = remote->base + request->dst_offset;
        put.dst = &remote->keys;
        return prs_peer_put(queue->peer, &request->data, &put);
    }
    }
}

static int post_signal(struct gin_queue *queue, struct gin_request *request)
{
    const struct gin_remote *remote = &request->signal_memory->remote[queue->rank];
    struct prs_signal signal = {.dst_addr = remote->base + request->signal_offset,
                                .dst = &remote->signal_keys,
                                .value = request->value,
                                .kind = PRS_SIGNAL_ADD,
                                .group = request->group,
                                .flags = request->strong ? PRS_SIGNAL_STRONG : 0};

    return prs_peer_signal(queue->peer, &request->signal, &signal);
}

static int post_parts(struct gin_queue *queue, struct gin_request *request)
{
    int r;

    if (!request->data_posted) {
        r = post_data(queue, request);
        if (r)
            return r;
        request->data_posted = true;
    }
    return request->has_signal ? post_signal(queue, request) : 0;
}

/* Data and signal share a doorbell, also with the requests that follow at once. Return 0 (all of it is posted),
 * PRS_BUSY or PRS_AGAIN (later), or -errno. */
static int post_request(struct gin_queue *queue, struct gin_request *request)
{
    int r = 0, posted;

    if (!queue->peer)
        r = prs_team_peer(request->set->base.comm->team, queue->context, queue->rank, &queue->peer);
    if (r)
        return r;
    if (request->more || (request->has_signal && request->size))
        prs_peer_begin_batch(queue->peer);
    r = post_parts(queue, request);
    if (request->more)
        return r; /* if no request follows, progress posts it */
    posted = prs_peer_end_batch(queue->peer);
    return r ? r : posted;
}

/* Post the requests that wait in a queue, in order. Return whether all were posted. */
static bool post_queue(struct gin_queue *queue)
{
    while (queue->first) {
        struct gin_request *request = queue->first;
        int r = post_request(queue, request);

        if (r > 0)
            return false;
        if (r < 0) { /* this request fails, and so will later ones: each reports the error to its own caller */
            gin_fail(request->set->base.comm, r);
            if (!request->data_posted)
                request->data.status = r;
            request->signal.status = r;
        }
        queue->first = request->next;
    }
    return true;
}

static void post_waiting(struct gin_set *set)
{
    struct gin_queue **link = &set->waiting;

    while (*link) {
        struct gin_queue *queue = *link;

        if (post_queue(queue)) {
            queue->waiting = false;
            *link = queue->next_waiting;
        } else {
            link = &queue->next_waiting;
        }
    }
}

static void enqueue(struct gin_queue *queue, struct gin_request *request)
{
    struct gin_set *set = request->set;

    request->next = NULL;
    if (queue->first)
        queue->last->next = request;
    else
        queue->first = request;
    queue->last = request;
    if (!queue->waiting) {
        queue->waiting = true;
        queue->next_waiting = set->waiting;
        set->waiting = queue;
    }
}

static net_result start(struct gin_queue *queue, struct gin_request *request, bool more, void **out)
{
    int r = PRS_BUSY;

    request->queue = queue;
    request->more = more && request->size < GIN_PROMPT_BYTES;
    request->data_posted = false;
    request->data.status = PRS_OP_PENDING;
    request->signal.status = request->has_signal ? PRS_OP_PENDING : 0;
    if (!queue->first) /* else it must wait for earlier ones */
        r = post_request(queue, request);
    if (r < 0) {
        /* If its data is in flight, keep the request: its test returns the error. */
        if (!request->data_posted) {
            free_request(request);
            return gin_fail(request->set->base.comm, r);
        }
        gin_fail(request->set->base.comm, r);
        request->signal.status = r;
    }
    if (r > 0)
        enqueue(queue, request);
    request->set->new_requests++;
    *out = request;
    return NET_SUCCESS;
}

/* Whether new requests wait a moment (hold_ns) for more, to share a doorbell. NCCL up to 2.30 brings one request of a
 * rank at a time and calls progress after each; later versions say when more follow, and then hold_ns is 0. If each
 * signal of a burst had a doorbell of its own, the NIC would begin with the first before it knew of the others. A
 * request to a rank with nothing in flight was posted at once (prs_peer_put(), prs_peer_signal()), so a single request
 * never waits. Others wait for GIN_MAX_HELD times hold_ns at most. */
static bool hold_back(struct gin_set *set)
{
    uint32_t hold_ns = set->hold_ns;
    uint64_t now;

    if ((set->new_requests == 0 && set->held == 0) || hold_ns == 0)
        return false;
    now = prs_clock_ns();
    if (set->new_requests > 0) {
        set->held_since = set->held > 0 ? set->held_since : now;
        set->newest_at = now;
        set->held += set->new_requests;
        set->new_requests = 0;
    }
    if (set->held < GIN_MAX_HELD && now - set->newest_at < hold_ns &&
        now - set->held_since < (uint64_t)GIN_MAX_HELD * hold_ns)
        return true;
    set->held = 0;
    return false;
}

/* ---- what NCCL calls ---- */

static int check_span(const struct gin_memory *memory, uint32_t rank, bool remote, uint64_t offset, uint64_t bytes,
                      const char *what)
{
    uint64_t limit;

    if (!memory)
        return prs_fail(-EINVAL, "GIN: %s of %" PRIu64 " bytes without a window", what, bytes);
    limit = remote ? memory->remote[rank].bytes : memory->bytes;
    if (offset > limit || bytes > limit - offset)
        return prs_fail(-EINVAL,
                        "GIN: %s: offset %" PRIu64 " + %" PRIu64 " bytes is outside the window of %" PRIu64
                        " bytes, rank %u",
                        what, offset, bytes, limit, rank);
    return 0;
}

static int find_queue(struct gin_set *set, int context, uint32_t rank, struct gin_queue **out)
{
    if (!set || context < 0 || (uint32_t)context >= set->contexts || rank >= set->base.comm->ranks)
        return prs_fail(-EINVAL, "GIN: transfer to rank %u in context %d: there is no such rank or context", rank,
                        context);
    *out = &set->queues[(uint32_t)context * set->base.comm->ranks + rank];
    return 0;
}

static int check_transfer(const struct gin_transfer *t)
{
    int r = 0;

    if (t->size > 0) {
        r = check_span(t->src, t->rank, false, t->src_offset, t->size, "source");
        if (!r)
            r = check_span(t->dst, t->rank, true, t->dst_offset, t->size, "destination");
    }
    if (r < 0 || t->operation == 0)
        return r;
    if (t->operation != GIN_SIGNAL_INC && t->operation != GIN_SIGNAL_ADD)
        return prs_fail(-EINVAL, "GIN: signal operation %u is neither increment (1) nor add (2)", t->operation);
    if (t->signal_offset % 8 != 0)
        return prs_fail(-EINVAL, "GIN: signal at offset %" PRIu64 ", not a multiple of 8", t->signal_offset);
    return check_span(t->signal, t->rank, true, t->signal_offset, 8, "signal");
}

net_result gin_request_put(struct gin_set *set, int context, const struct gin_transfer *t, void **out)
{
    struct gin_request *request;
    struct gin_queue *queue = NULL;
    int r;

    *out = NULL;
    r = find_queue(set, context, t->rank, &queue);
    if (!r)
        r = check_transfer(t);
    if (r < 0)
        return result_from_errno(r);
    request = alloc_request(set);
    if (!request)
        return gin_fail(set->base.comm, prs_fail(-ENOMEM, "GIN: no memory for a request"));
    request->set = set;
    request->kind = GIN_REQUEST_PUT;
    request->src = t->src;
    request->dst = t->dst;
    request->src_offset = t->src_offset;
    request->dst_offset = t->dst_offset;
    request->size = t->size;
    request->has_signal = t->operation != 0;
    request->signal_memory = t->signal;
    request->signal_offset = t->signal_offset;
    request->value = t->operation == GIN_SIGNAL_INC ? 1 : t->value;
    request->strong = t->strong;
    /* A weak signal and its put are a group of their own, so that the signal waits for no other put. */
    request->group = request->has_signal && !t->strong ? 1 + queue->groups++ % WEAK_GROUPS : 0;
    return start(queue, request, t->more, out);
}

net_result gin_request_get(void *handle, int context, GIN_GET, uint32_t flags, void **out)
{
    struct gin_set *set = gin_set_of(handle);
    struct gin_request *request;
    struct gin_queue *queue = NULL;
    int r;

    *out = NULL;
    r = find_queue(set, context, rank, &queue);
    if (!r && size > 0) {
        r = check_span(remote, rank, true, remote_offset, size, "remote source");
        if (!r)
            r = check_span(local, rank, false, local_offset, size, "local destination");
    }
    if (r < 0)
        return result_from_errno(r);
    request = alloc_request(set);
    if (!request)
        return gin_fail(set->base.comm, prs_fail(-ENOMEM, "GIN: no memory for a request"));
    *request =
        (struct gin_request){.set = set,
                             .kind = size ? GIN_REQUEST_GET : GIN_REQUEST_PUT, /* a put of 0 bytes does nothing */
                             .src = remote,
                             .dst = local,
                             .src_offset = remote_offset,
                             .dst_offset = local_offset,
                             .size = size};
    return start(queue, request, flags & RMA_TRANSFER_MORE, out);
}

net_result gin_request_flush(void *handle, int context, void *mhandle, uint32_t rank, void **out)
{
    struct gin_set *set = gin_set_of(handle);
    struct gin_memory *memory = mhandle;
    struct gin_request *request;
    struct gin_queue *queue = NULL;
    int r;

    *out = NULL;
    r = find_queue(set, context, rank, &queue);
    if (!r)
        r = check_span(memory, rank, false, 0, 0, "flush");
    if (r < 0)
        return result_from_errno(r);
    if (!memory->is_device || memory->bytes == 0)
        return NET_SUCCESS; /* the CPU sees what a NIC has written, so nothing is to be done */
    request = alloc_request(set);
    if (!request)
        return gin_fail(set->base.comm, prs_fail(-ENOMEM, "GIN: no memory for a request"));
    *request = (struct gin_request){.set = set, .kind = GIN_REQUEST_FLUSH, .dst = memory, .size = 1};
    return start(queue, request, false, out);
}

net_result gin_request_progress(void *handle)
{
    struct gin_comm *comm = gin_comm_of(handle);
    struct gin_set *set = gin_set_of(handle);
    uint32_t asked;
    int handled = 0;

    if (!set)
        return NET_SUCCESS;
    asked = gin_raise_asked(set);
    set->idle_tests = 0;
    if (hold_back(set))
        return NET_SUCCESS;
    for (uint32_t c = 0; c < set->contexts; c++) {
        int r = prs_team_progress(comm->team, set->first_context + c);

        if (r < 0)
            return gin_fail(comm, r);
        handled += r;
    }
    set->tested = NULL; /* progress was made now, so the next test need not make any */
    if (set->waiting)
        post_waiting(set);
    if (comm->raises)
        gin_raise_answer(set, asked, handled);
    return NET_SUCCESS;
}

static bool is_done(const struct gin_request *request)
{
    return request->data.status != PRS_OP_PENDING && request->signal.status != PRS_OP_PENDING;
}

net_result gin_request_test(void *coll_comm, void *handle, int *done)
{
    struct gin_request *request = handle;
    struct gin_set *set;
    int r = 0;

    (void)coll_comm;
    *done = 0;
    if (!request) { /* NULL: a flush of host memory */
        *done = 1;
        return NET_SUCCESS;
    }
    set = request->set;
    if (!is_done(request)) {
        /* NCCL tests all requests in flight, then calls progress, which serves them all. But NCCL's flush only tests
         * one request again and again, and then nobody else may call progress. */
        if (set->tested == request || ++set->idle_tests >= MAX_IDLE_TESTS) {
            set->idle_tests = 0;
            r = prs_team_progress(set->base.comm->team, request->queue->context);
            if (set->waiting)
                post_waiting(set);
        }
        set->tested = request;
    }
    if (!is_done(request))
        return r < 0 ? gin_fail(set->base.comm, r) : NET_SUCCESS;
    *done = 1;
    r = request->data.status < 0 ? request->data.status : request->signal.status;
    free_request(request);
    return r < 0 ? gin_fail(set->base.comm, r) : NET_SUCCESS;
}
