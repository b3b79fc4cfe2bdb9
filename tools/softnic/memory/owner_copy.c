/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/memory/owner_copy.h"

#include <errno.h>
#include <stdlib.h>

#include "tools/softnic/memory/agent_job.h"
#include "tools/softnic/memory/device_mem.h"
#include "tools/softnic/memory/local_copy.h"
#include "tools/softnic/world/cores.h"
#include "tools/softnic/world/lock.h"

enum {
    PIECES = 4, /* pieces of a copy in flight: each is copied here, then by the owner, or the other way round */
};

enum piece_state { PIECE_IDLE, PIECE_HERE, PIECE_ASKING, PIECE_THERE };

struct piece {
    enum piece_state state;
    uint64_t offset, bytes;
    void *bounce;
    bool pinned;            /* bounce came from sn_device_mem; else from malloc */
    struct sn_copy *wanted; /* the copy that the owner is asked to make */
    struct sn_job job;
    struct sn_copy copy;
};

struct owner_copy {
    struct sn_agent_ref owner;
    struct sn_job wanted; /* the job that each request of this copy starts from */
    bool bouncing;
    uint64_t given; /* bytes handed out to pieces */
    int error;
    struct piece pieces[PIECES];
};

/* Translate the owner's result: memory that is local to the owner is remote here. */
static int result_here(int r)
{
    switch (r) {
    case -ENOENT: /* the owner's registration is gone */
    case -EINVAL: /* the owner's memory is not mapped */
        return -EFAULT;
    case -EFAULT: /* memory of this process is not mapped */
        return -EINVAL;
    case -ESRCH: /* the owner cannot reach this process, although it exists */
        return -EIO;
    default:
        return r;
    }
}

/* Return SN_COPY_BUSY, or the owner's result, or -ESRCH. */
static int piece_job_poll(struct owner_copy *h, struct piece *piece)
{
    int result, r = sn_job_poll(&h->owner, &piece->job, piece->wanted->world, &result);

    if (!r)
        return result_here(result);
    if (r >= 0 || !piece->job.lost)
        return r;
    piece->bounce = NULL;                     /* leak it: the agent may still write to it */
    return piece->job.found ? -ETIMEDOUT : r; /* the agent may still carry out an atomic: it must not be tried again */
}

/* Start one half of a piece's way: between the bounce buffer and this process's memory (here), or the owner's
 * memory. */
static int leg_start(struct owner_copy *h, const struct sn_copy *c, struct piece *piece, bool here)
{
    struct sn_copy *leg = &piece->copy;
    struct sn_span bounce = {.addr = (uintptr_t)piece->bounce, .length = piece->bytes, .mr = SN_NONE};
    bool into_bounce = here == (h->wanted.op == SN_AGENT_WRITE);
    int r;

    leg->world = c->world;
    leg->self = c->self;
    leg->dst_proc = here ? c->self : c->dst_proc;
    leg->src_proc = here ? c->self : c->src_proc;
    leg->length = piece->bytes;
    leg->dst_count = into_bounce ? 1 : sn_spans_slice(leg->dst, c->dst, c->dst_count, piece->offset, piece->bytes);
    leg->src_count = into_bounce ? sn_spans_slice(leg->src, c->src, c->src_count, piece->offset, piece->bytes) : 1;
    *(into_bounce ? leg->dst : leg->src) = bounce;
    piece->wanted = leg;
    piece->job = h->wanted;
    piece->state = here ? PIECE_HERE : PIECE_ASKING;
    r = here ? sn_local_copy_start(leg) : sn_job_post(&h->owner, &piece->job, leg);
    if (!here && !r) {
        piece->state = PIECE_THERE;
        r = SN_COPY_BUSY;
    }
    return r;
}

/* Start the next piece of a copy that neither side can make alone. */
static int piece_start(struct owner_copy *h, const struct sn_copy *c, struct piece *piece)
{
    if (!piece->bounce) {
        piece->bounce = sn_device_mem->bounce_take();
        piece->pinned = piece->bounce != NULL;
    }
    if (!piece->bounce)
        piece->bounce = malloc(SN_BOUNCE_BYTES);
    if (!piece->bounce)
        return -ENOMEM;
    piece->offset = h->given;
    piece->bytes = c->length - h->given < SN_BOUNCE_BYTES ? c->length - h->given : SN_BOUNCE_BYTES;
    h->given += piece->bytes;
    return leg_start(h, c, piece, h->wanted.op == SN_AGENT_WRITE);
}

/* Advance a piece. Return 0 (this half is done), SN_COPY_BUSY, SN_COPY_OWNER, or -errno. */
static int piece_step(struct owner_copy *h, struct piece *piece)
{
    if (piece->state == PIECE_HERE)
        return sn_device_mem->copy_poll(&piece->copy);
    if (piece->state == PIECE_ASKING && !sn_job_post(&h->owner, &piece->job, piece->wanted))
        piece->state = PIECE_THERE;
    return piece_job_poll(h, piece);
}

static void piece_run(struct owner_copy *h, const struct sn_copy *c, struct piece *piece)
{
    bool last_here = h->wanted.op == SN_AGENT_READ;
    int r = 0;

    while (r != SN_COPY_BUSY) {
        if (piece->state != PIECE_IDLE)
            r = piece_step(h, piece);
        else if (h->bouncing && !h->error && h->given < c->length)
            r = piece_start(h, c, piece);
        else
            return;
        if (r == 0 && h->bouncing && !h->error && piece->state != PIECE_IDLE &&
            (piece->state == PIECE_HERE) != last_here)
            r = leg_start(h, c, piece, last_here);
        if (!r) /* the second half is done, or all of a copy without a bounce buffer */
            piece->state = PIECE_IDLE;
        if (r == SN_COPY_OWNER && !h->bouncing) {
            h->bouncing = true;
            piece->state = PIECE_IDLE;
        } else if (r != 0 && r != SN_COPY_BUSY) {
            h->error = r < 0 ? r : -EIO;
            if (piece->state == PIECE_HERE && piece->pinned)
                piece->bounce = NULL; /* leak it: a copy engine may still use it */
            piece->state = PIECE_IDLE;
        }
    }
}

static void bounce_give(struct piece *piece)
{
    if (piece->bounce && piece->pinned)
        sn_device_mem->bounce_give(piece->bounce);
    else
        free(piece->bounce);
}

int sn_owner_copy_poll(struct sn_copy *c)
{
    struct owner_copy *h = c->async;
    int r;

    for (unsigned i = 0; i < PIECES; i++)
        piece_run(h, c, &h->pieces[i]);
    for (unsigned i = 0; i < PIECES; i++)
        if (h->pieces[i].state != PIECE_IDLE) {
            sn_give_way();       /* the owner may need this core */
            return SN_COPY_BUSY; /* even after an error, because pieces in flight use the request's memory */
        }
    r = h->error;
    for (unsigned i = 0; i < PIECES; i++)
        bounce_give(&h->pieces[i]);
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

static int owner_copy_new(struct sn_copy *c, enum sn_agent_op op, struct owner_copy **out)
{
    const struct sn_span *span = op == SN_AGENT_READ ? c->src : c->dst;
    struct owner_copy *h = calloc(1, sizeof(*h));

    if (!h)
        return -ENOMEM;
    while (span->kind == SN_MEM_HOST) /* at least one span is device memory */
        span++;
    h->owner.shm = &c->world->agents[c->world->mrs[span->mr].ctx % SN_MAX_CTXS];
    h->owner.proc = op == SN_AGENT_READ ? c->src_proc : c->dst_proc;
    h->owner.proc_generation = c->world->procs[h->owner.proc].generation;
    h->owner.epoch = __atomic_load_n(&h->owner.shm->epoch, __ATOMIC_SEQ_CST);
    h->wanted = (struct sn_job){.op = op, .peer = h->owner.proc};
    if (sn_job_unanswerable(&h->owner, c->world)) {
        free(h);
        return -ESRCH;
    }
    c->async = h;
    c->by = SN_BY_OWNER;
    *out = h;
    return 0;
}

int sn_owner_copy_start(struct sn_copy *c)
{
    bool read = c->dst_proc == c->self;
    struct owner_copy *h;
    int r = owner_copy_new(c, read ? SN_AGENT_READ : SN_AGENT_WRITE, &h);

    if (r)
        return r;
    h->bouncing = any_owner_only(c, read ? c->dst : c->src, read ? c->dst_count : c->src_count);
    if (!h->bouncing) {
        h->pieces[0].wanted = c;
        h->pieces[0].job = h->wanted;
        h->pieces[0].state = PIECE_ASKING;
    }
    return sn_owner_copy_poll(c); /* not waited for here, so that those of several queue pairs overlap */
}

int sn_owner_copy_atomic(struct sn_copy *c, bool cas, uint64_t compare_add, uint64_t swap, uint64_t *found)
{
    struct owner_copy *h;
    int r = owner_copy_new(c, cas ? SN_AGENT_SWAP : SN_AGENT_ADD, &h);

    if (r)
        return r;
    h->wanted.compare_add = compare_add;
    h->wanted.swap = swap;
    h->wanted.found = found;
    h->pieces[0].wanted = c;
    h->pieces[0].job = h->wanted;
    h->pieces[0].state = PIECE_ASKING;
    c->src_count = 0;
    c->length = 8;
    return sn_owner_copy_poll(c);
}
