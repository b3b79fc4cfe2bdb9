/* SPDX-License-Identifier: Apache-2.0 */
/* Transfers of GIN and RMA. A request is never refused for want of room: it waits in its lane. */
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
    FRUITLESS_TESTS = 64,  /* in a row, each of another request, and no progress called */
    WEAK_GROUPS = 1 << 15, /* by then the first has long completed; sharing one only orders more than asked */
};

struct gin_block {
    struct gin_block *next;
    struct gin_request request[BLOCK_REQUESTS];
};

static struct gin_request *take_request(struct gin_set *set)
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

static void give_request(struct gin_request *request)
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

static int post_data(struct gin_lane *lane, struct gin_request *request)
{
    const struct gin_remote *remote;

    switch (request->kind) {
    case GIN_REQUEST_GET: {
        remote = &request->src->remote[lane->rank];
        struct prs_get get = {.dst = request->dst->region,
                              .dst_addr = (void *)(uintptr_t)(request->dst->base + request->dst_offset),
                              .src_addr = remote->base + request->src_offset,
                              .src = &remote->keys,
                              .len_bytes = request->size};
        return prs_peer_get(lane->peer, &request->data, &get);
    }
    case GIN_REQUEST_FLUSH:
        return prs_peer_flush(lane->peer, &request->data, request->dst->region,
                              (const void *)(uintptr_t)request->dst->base);
    default: {
        struct prs_put put = {.len_bytes = request->size, .group = request->group};

        if (request->size == 0 && request->has_signal) { /* a signal by itself */
            request->data.status = 0;
            return 0;
        }
        if (request->size) {
            remote = &request->dst->remote[lane->rank];
            put.src = request->src->region;
            put.src_addr = (const void *)(uintptr_t)(request->src->base + request->src_offset);
            put.dst_addr = remote->base + request->dst_offset;
            put.dst = &remote->keys;
        }
        if (request->size == 0) { /* nothing to write, but the request has to be in order: done when posted */
            request->data.status = 0;
            return 0;
        }
        return prs_peer_put(lane->peer, &request->data, &put);
    }
    }
}

static int post_signal(struct gin_lane *lane, struct gin_request *request)
{
    const struct gin_remote *remote = &request->signal_memory->remote[lane->rank];
    struct prs_signal signal = {.dst_addr = remote->base + request->signal_offset,
                                .dst = &remote->signal_keys,
                                .value = request->value,
                                .kind = PRS_SIGNAL_ADD,
                                .group = request->group,
                                .flags = request->strong ? PRS_SIGNAL_STRONG : 0};

    return prs_peer_signal(lane->peer, &request->signal, &signal);
}

/* Return 0 (all of it is posted), PRS_BUSY or PRS_AGAIN (later), or -errno. */
static int post_request(struct gin_lane *lane, struct gin_request *request)
{
    int r = 0;

    if (!lane->peer)
        r = prs_team_peer(request->set->base.comm->team, lane->context, lane->rank, &lane->peer);
    if (r)
        return r;
    if (!request->data_posted) {
        r = post_data(lane, request);
        if (r)
            return r;
        request->data_posted = true;
    }
    return request->has_signal ? post_signal(lane, request) : 0;
}

/* Post what waits in a lane, in order. Return true when nothing waits any more. */
static bool post_lane(struct gin_lane *lane)
{
    while (lane->first) {
        struct gin_request *request = lane->first;
        int r = post_request(lane, request);

        if (r > 0)
            return false;
        if (r < 0) { /* it fails, and so will those behind it: each tells its own caller */
            gin_fail(request->set->base.comm, r);
            if (!request->data_posted)
                request->data.status = r;
            request->signal.status = r;
        }
        lane->first = request->next;
    }
    return true;
}

static void post_waiting(struct gin_set *set)
{
    struct gin_lane **link = &set->waiting;

    while (*link) {
        struct gin_lane *lane = *link;

        if (post_lane(lane)) {
            lane->waiting = false;
            *link = lane->next_waiting;
        } else {
            link = &lane->next_waiting;
        }
    }
}

static void wait_in_lane(struct gin_lane *lane, struct gin_request *request)
{
    struct gin_set *set = request->set;

    request->next = NULL;
    if (lane->first)
        lane->last->next = request;
    else
        lane->first = request;
    lane->last = request;
    if (!lane->waiting) {
        lane->waiting = true;
        lane->next_waiting = set->waiting;
        set->waiting = lane;
    }
}

static net_result start(struct gin_lane *lane, struct gin_request *request, void **out)
{
    int r = PRS_BUSY;

    request->lane = lane;
    request->data_posted = false;
    request->data.status = PRS_OP_PENDING;
    request->signal.status = request->has_signal ? PRS_OP_PENDING : 0;
    if (!lane->first) /* else behind those that wait */
        r = post_request(lane, request);
    if (r < 0) {
        /* Half of it may be in flight: then the request stays, and tells the error when it is tested. */
        if (!request->data_posted) {
            give_request(request);
            return gin_fail(request->set->base.comm, r);
        }
        gin_fail(request->set->base.comm, r);
        request->signal.status = r;
    }
    if (r > 0)
        wait_in_lane(lane, request);
    request->set->fresh++;
    *out = request;
    return NET_SUCCESS;
}

/* Shall those that came wait a moment for more? NCCL brings one request of a rank at a time and calls progress behind
 * it; a doorbell each would have the NIC, or what plays one, begin with the first signal of a burst and do the others
 * by and by. A request to a rank with nothing in flight went when it came (prs_peer_put(), prs_peer_signal()), so that
 * one alone never waits; those behind it wait for GIN_HOLD_MOST moments at most. */
static bool hold_back(struct gin_set *set)
{
    uint32_t hold_ns = set->base.comm->hold_ns;
    uint64_t now;

    if ((set->fresh == 0 && set->held == 0) || hold_ns == 0)
        return false;
    now = prs_clock_ns();
    if (set->fresh > 0) {
        set->held_at = set->held > 0 ? set->held_at : now;
        set->fresh_at = now;
        set->held += set->fresh;
        set->fresh = 0;
    }
    if (set->held < GIN_HOLD_MOST && now - set->fresh_at < hold_ns &&
        now - set->held_at < (uint64_t)GIN_HOLD_MOST * hold_ns)
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

static int find_lane(struct gin_set *set, int context, uint32_t rank, struct gin_lane **out)
{
    if (!set || context < 0 || (uint32_t)context >= set->contexts || rank >= set->base.comm->ranks)
        return prs_fail(-EINVAL, "GIN: transfer to rank %u in context %d: there is no such", rank, context);
    *out = &set->lanes[(uint32_t)context * set->base.comm->ranks + rank];
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
    struct gin_lane *lane;
    int r;

    *out = NULL;
    r = find_lane(set, context, t->rank, &lane);
    if (!r)
        r = check_transfer(t);
    if (r < 0)
        return result_from_errno(r);
    request = take_request(set);
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
    /* A weak signal has a group of its own with its put: it need not wait for others. */
    request->group = request->has_signal && !t->strong ? 1 + lane->groups++ % WEAK_GROUPS : 0;
    return start(lane, request, out);
}

net_result gin_request_get(void *handle, int context, uint64_t remote_offset, void *remote, size_t size,
                           uint64_t local_offset, void *local, uint32_t rank, void **out)
{
    struct gin_set *set = gin_set_of(handle);
    struct gin_request *request;
    struct gin_lane *lane;
    int r;

    *out = NULL;
    r = find_lane(set, context, rank, &lane);
    if (!r && size > 0) {
        r = check_span(remote, rank, true, remote_offset, size, "remote source");
        if (!r)
            r = check_span(local, rank, false, local_offset, size, "local destination");
    }
    if (r < 0)
        return result_from_errno(r);
    request = take_request(set);
    if (!request)
        return gin_fail(set->base.comm, prs_fail(-ENOMEM, "GIN: no memory for a request"));
    *request =
        (struct gin_request){.set = set,
                             .kind = size ? GIN_REQUEST_GET : GIN_REQUEST_PUT, /* nothing to read: done at once */
                             .src = remote,
                             .dst = local,
                             .src_offset = remote_offset,
                             .dst_offset = local_offset,
                             .size = size};
    return start(lane, request, out);
}

net_result gin_request_flush(void *handle, int context, void *mhandle, uint32_t rank, void **out)
{
    struct gin_set *set = gin_set_of(handle);
    struct gin_memory *memory = mhandle;
    struct gin_request *request;
    struct gin_lane *lane;
    int r;

    *out = NULL;
    r = find_lane(set, context, rank, &lane);
    if (!r)
        r = check_span(memory, rank, false, 0, 0, "flush");
    if (r < 0)
        return result_from_errno(r);
    if (!memory->is_device || memory->bytes == 0)
        return NET_SUCCESS; /* the CPU sees what a NIC has written; no request means done */
    request = take_request(set);
    if (!request)
        return gin_fail(set->base.comm, prs_fail(-ENOMEM, "GIN: no memory for a request"));
    *request = (struct gin_request){.set = set, .kind = GIN_REQUEST_FLUSH, .dst = memory, .size = 1};
    return start(lane, request, out);
}

net_result gin_request_progress(void *handle)
{
    struct gin_comm *comm = gin_comm_of(handle);
    struct gin_set *set = gin_set_of(handle);
    uint32_t asked;
    int handled = 0;

    if (!set)
        return NET_SUCCESS;
    asked = gin_settle_asked(set);
    set->fruitless = 0;
    if (hold_back(set))
        return NET_SUCCESS;
    for (uint32_t c = 0; c < set->contexts; c++) {
        int r = prs_team_progress(comm->team, set->first_context + c);

        if (r < 0)
            return gin_fail(comm, r);
        handled += r;
    }
    if (set->waiting)
        post_waiting(set);
    if (comm->raises)
        gin_settle_answer(set, asked, handled);
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
    if (!request) { /* what a flush of host memory gave */
        *done = 1;
        return NET_SUCCESS;
    }
    set = request->set;
    if (!is_done(request)) {
        /* NCCL tests all it has in flight, then calls progress: one look at the queues serves them all. But its flush
         * spins on the test of one request, and nobody else may be driving. */
        if (set->tested == request || ++set->fruitless >= FRUITLESS_TESTS) {
            set->fruitless = 0;
            r = prs_team_progress(set->base.comm->team, request->lane->context);
            if (set->waiting)
                post_waiting(set);
        }
        set->tested = request;
    }
    if (!is_done(request))
        return r < 0 ? gin_fail(set->base.comm, r) : NET_SUCCESS;
    *done = 1;
    r = request->data.status < 0 ? request->data.status : request->signal.status;
    give_request(request);
    return r < 0 ? gin_fail(set->base.comm, r) : NET_SUCCESS;
}
