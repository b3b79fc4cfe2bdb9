/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/memory/owner_copy.h"

#include <errno.h>
#include <stdlib.h>

#include "tools/softnic/world/cores.h"
#include "tools/softnic/world/lock.h"
#include "tools/softnic/memory/agent_job.h"
#include "tools/softnic/memory/device_mem.h"
#include "tools/softnic/memory/local_copy.h"

enum {
    LANES = 4, /* pieces of a transfer under way: each is copied here, then there, or the other way round */
};

enum lane_state { LANE_IDLE, LANE_HERE, LANE_ASKING, LANE_THERE };

struct lane {
    enum lane_state state;
    uint64_t offset, bytes;
    void *bounce;
    bool pinned;         /* bounce is the device copier's; else it is of the heap */
    struct sn_copy *ask; /* what the owner is asked to copy */
    struct sn_request request;
    struct sn_copy copy;
};

struct handoff {
    struct sn_request_to owner;
    struct sn_request ask; /* as all requests of this transfer begin */
    bool bouncing;
    uint64_t given; /* bytes that lanes have taken on */
    int error;
    struct lane lanes[LANES];
};

/* What the owner calls local is remote here. */
static int result_here(int r)
{
    switch (r) {
    case -ENOENT: /* its registration */
    case -EINVAL: /* its memory */
        return -EFAULT;
    case -EFAULT: /* memory of this process */
        return -EINVAL;
    case -ESRCH: /* this process: it is there */
        return -EIO;
    default:
        return r;
    }
}

/* Return SN_PLACE_BUSY, or the owner's result, or -ESRCH. */
static int request_poll(struct handoff *h, struct lane *lane)
{
    int result, r = sn_request_poll(&h->owner, &lane->request, lane->ask->world, &result);

    if (r == 0)
        return result_here(result);
    if (r >= 0 || !lane->request.lost)
        return r;
    lane->bounce = NULL;                         /* lost as well, rather than written to when it is something else */
    return lane->request.found ? -ETIMEDOUT : r; /* an atomic that may still be made is not tried again */
}

/* One of a piece's two ways: between the bounce buffer and this process's memory, or the owner's. */
static int leg_start(struct handoff *h, const struct sn_copy *c, struct lane *lane, bool here)
{
    struct sn_copy *leg = &lane->copy;
    struct sn_span bounce = {.addr = (uintptr_t)lane->bounce, .length = lane->bytes, .mr = SN_NONE};
    bool into_bounce = here == (h->ask.op == SN_AGENT_WRITE);
    int r;

    leg->world = c->world;
    leg->self = c->self;
    leg->dst_proc = here ? c->self : c->dst_proc;
    leg->src_proc = here ? c->self : c->src_proc;
    leg->length = lane->bytes;
    leg->dst_count = into_bounce ? 1 : sn_spans_slice(leg->dst, c->dst, c->dst_count, lane->offset, lane->bytes);
    leg->src_count = into_bounce ? sn_spans_slice(leg->src, c->src, c->src_count, lane->offset, lane->bytes) : 1;
    *(into_bounce ? leg->dst : leg->src) = bounce;
    lane->ask = leg;
    lane->request = h->ask;
    lane->state = here ? LANE_HERE : LANE_ASKING;
    r = here ? sn_local_copy_start(leg) : sn_request_post(&h->owner, &lane->request, leg);
    if (!here && !r) {
        lane->state = LANE_THERE;
        r = SN_PLACE_BUSY;
    }
    return r;
}

/* The next piece of a transfer that neither side can make alone. */
static int piece_start(struct handoff *h, const struct sn_copy *c, struct lane *lane)
{
    if (!lane->bounce) {
        lane->bounce = sn_device_mem->bounce_take();
        lane->pinned = lane->bounce != NULL;
    }
    if (!lane->bounce)
        lane->bounce = malloc(SN_BOUNCE_BYTES);
    if (!lane->bounce)
        return -ENOMEM;
    lane->offset = h->given;
    lane->bytes = c->length - h->given < SN_BOUNCE_BYTES ? c->length - h->given : SN_BOUNCE_BYTES;
    h->given += lane->bytes;
    return leg_start(h, c, lane, h->ask.op == SN_AGENT_WRITE);
}

/* A step of whatever the lane is at. Return 0 (that way is done), SN_PLACE_BUSY, SN_PLACE_OWNER or -errno. */
static int lane_step(struct handoff *h, struct lane *lane)
{
    if (lane->state == LANE_HERE)
        return sn_device_mem->copy_poll(&lane->copy);
    if (lane->state == LANE_ASKING && !sn_request_post(&h->owner, &lane->request, lane->ask))
        lane->state = LANE_THERE;
    return request_poll(h, lane);
}

static void lane_run(struct handoff *h, const struct sn_copy *c, struct lane *lane)
{
    bool last_here = h->ask.op == SN_AGENT_READ;
    int r = 0;

    while (r != SN_PLACE_BUSY) {
        if (lane->state != LANE_IDLE)
            r = lane_step(h, lane);
        else if (h->bouncing && !h->error && h->given < c->length)
            r = piece_start(h, c, lane);
        else
            return;
        if (r == 0 && h->bouncing && !h->error && lane->state != LANE_IDLE && (lane->state == LANE_HERE) != last_here)
            r = leg_start(h, c, lane, last_here);
        if (r == 0) /* the second way, at once or after a while; or all there was */
            lane->state = LANE_IDLE;
        if (r == SN_PLACE_OWNER && !h->bouncing) {
            h->bouncing = true;
            lane->state = LANE_IDLE;
        } else if (r != 0 && r != SN_PLACE_BUSY) {
            h->error = r < 0 ? r : -EIO;
            if (lane->state == LANE_HERE && lane->pinned)
                lane->bounce = NULL; /* a copy engine may be at it: lost, rather than used for something else */
            lane->state = LANE_IDLE;
        }
    }
}

static void bounce_give(struct lane *lane)
{
    if (lane->bounce && lane->pinned)
        sn_device_mem->bounce_give(lane->bounce);
    else
        free(lane->bounce);
}

int sn_handoff_poll(struct sn_copy *c)
{
    struct handoff *h = c->async;
    int r;

    for (unsigned i = 0; i < LANES; i++)
        lane_run(h, c, &h->lanes[i]);
    for (unsigned i = 0; i < LANES; i++)
        if (h->lanes[i].state != LANE_IDLE) {
            sn_give_way();        /* the owner may need this core */
            return SN_PLACE_BUSY; /* after an error too: what is under way uses the request's memory */
        }
    r = h->error;
    for (unsigned i = 0; i < LANES; i++)
        bounce_give(&h->lanes[i]);
    free(h);
    c->async = NULL;
    return r;
}

static bool any_owner_only(const struct sn_copy *c, const struct sn_span *span, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (span[i].kind != SN_MEM_HOST && sn_device_mem->owner_only(&c->world->mrs[span[i].mr]))
            return true;
    return false;
}

static int handoff_new(struct sn_copy *c, enum sn_agent_op op, struct handoff **out)
{
    const struct sn_span *span = op == SN_AGENT_READ ? c->src : c->dst;
    struct handoff *h = calloc(1, sizeof(*h));

    if (!h)
        return -ENOMEM;
    while (span->kind == SN_MEM_HOST) /* the device copier found one that is not */
        span++;
    h->owner.shm = &c->world->agents[c->world->mrs[span->mr].ctx % SN_MAX_CTXS];
    h->owner.proc = op == SN_AGENT_READ ? c->src_proc : c->dst_proc;
    h->owner.proc_generation = c->world->procs[h->owner.proc].generation;
    h->owner.epoch = __atomic_load_n(&h->owner.shm->epoch, __ATOMIC_SEQ_CST);
    h->ask = (struct sn_request){.op = op, .peer = h->owner.proc};
    if (sn_request_unanswerable(&h->owner, c->world)) {
        free(h);
        return -ESRCH;
    }
    c->async = h;
    c->by = SN_BY_OWNER;
    *out = h;
    return 0;
}

int sn_handoff_start(struct sn_copy *c)
{
    bool read = c->dst_proc == c->self;
    struct handoff *h;
    int r = handoff_new(c, read ? SN_AGENT_READ : SN_AGENT_WRITE, &h);

    if (r)
        return r;
    h->bouncing = any_owner_only(c, read ? c->dst : c->src, read ? c->dst_count : c->src_count);
    if (!h->bouncing) {
        h->lanes[0].ask = c;
        h->lanes[0].request = h->ask;
        h->lanes[0].state = LANE_ASKING;
    }
    return sn_handoff_poll(c); /* not waited for here: those of several queue pairs overlap */
}

int sn_handoff_atomic(struct sn_copy *c, bool cas, uint64_t compare_add, uint64_t swap, uint64_t *found)
{
    struct handoff *h;
    int r = handoff_new(c, cas ? SN_AGENT_SWAP : SN_AGENT_ADD, &h);

    if (r)
        return r;
    h->ask.compare_add = compare_add;
    h->ask.swap = swap;
    h->ask.found = found;
    h->lanes[0].ask = c;
    h->lanes[0].request = h->ask;
    h->lanes[0].state = LANE_ASKING;
    c->src_count = 0;
    c->length = 8;
    return sn_handoff_poll(c);
}
