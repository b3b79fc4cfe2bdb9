/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/handoff.h"

#include <errno.h>
#include <stdlib.h>

#include "tools/softnic/agent.h"
#include "tools/softnic/lock.h"
#include "tools/softnic/proc.h"

enum {
    LANES = 4,         /* pieces of a transfer under way: each is copied here, then there, or the other way round */
    LOOK_NS = 1000000, /* is the owner still there? a system call, so not at every poll */
    PATIENCE_NS = 2000000000, /* of an owner that runs but whose agent stands still, twice: TAKEN and RUNNING */
};

/* A slot of the owner's. */
struct request {
    uint64_t word; /* without the state; 0: no slot yet */
    uint32_t slot;
    uint32_t beat;
    uint64_t look_at, give_up;
};

enum lane_state { LANE_IDLE, LANE_HERE, LANE_ASKING, LANE_THERE };

struct lane {
    enum lane_state state;
    uint64_t offset, bytes;
    void *bounce;
    bool pinned;         /* bounce is the device copier's; else it is of the heap */
    struct sn_copy *ask; /* what the owner is asked to copy */
    struct request request;
    struct sn_copy copy;
};

struct handoff {
    struct sn_agent_shm *shm;
    uint32_t epoch, owner, owner_generation;
    enum sn_agent_op op;
    uint64_t compare_add, swap, *found;
    bool bouncing;
    uint64_t given; /* bytes that lanes have taken on */
    int error;
    struct lane lanes[LANES];
};

static bool owner_gone(const struct handoff *h, struct sn_world *world)
{
    return __atomic_load_n(&h->shm->epoch, __ATOMIC_SEQ_CST) != h->epoch || !(h->epoch & 1) ||
           world->procs[h->owner].generation != h->owner_generation || !sn_place_reachable(world, h->owner);
}

/* Slots of initiators that died before they gave them back. What runs, the agent brings to its end. */
static void sweep_slots(struct sn_agent_shm *shm)
{
    for (uint32_t i = 0; i < SN_AGENT_SLOTS; i++) {
        uint64_t word = __atomic_load_n(&shm->words[i], __ATOMIC_ACQUIRE);
        uint32_t state = sn_agent_state(word);

        if ((state == SN_AGENT_TAKEN || state == SN_AGENT_DONE) && !sn_pid_runs((uint32_t)(word >> 32)))
            sn_agent_turn(&shm->words[i], word & ~(uint64_t)SN_AGENT_STATE_MASK, state, SN_AGENT_FREE);
    }
}

/* Return 0 or SN_PLACE_BUSY: all slots are in use. */
static int slot_take(struct sn_agent_shm *shm, struct request *q)
{
    static uint32_t serials;
    uint32_t serial = __atomic_add_fetch(&serials, 1, __ATOMIC_RELAXED);
    uint64_t request = (uint64_t)sn_pid << 32 | (uint64_t)(serial & 0xffffff) << 8;

    for (uint32_t n = 0; n < SN_AGENT_SLOTS; n++) {
        uint64_t idle = SN_AGENT_FREE;
        uint32_t i = (serial + n) % SN_AGENT_SLOTS;

        if (__atomic_compare_exchange_n(&shm->words[i], &idle, request | SN_AGENT_TAKEN, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_RELAXED)) {
            q->word = request;
            q->slot = i;
            return 0;
        }
    }
    return SN_PLACE_BUSY;
}

static void spans_put(const struct sn_world *world, struct sn_agent_span *to, const struct sn_span *from,
                      uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        to[i] = (struct sn_agent_span){
            from[i].addr, from[i].length,
            from[i].mr == SN_NONE ? 0 : __atomic_load_n(&world->mrs[from[i].mr].key, __ATOMIC_ACQUIRE), from[i].kind};
}

/* Return 0 or SN_PLACE_BUSY. */
static int request_post(struct handoff *h, struct request *q, const struct sn_copy *c)
{
    struct sn_agent_shm *shm = h->shm;

    if (slot_take(shm, q))
        return SN_PLACE_BUSY;
    struct sn_agent_slot *slot = &shm->slots[q->slot];
    slot->op = h->op;
    slot->proc = c->self;
    slot->proc_generation = c->world->procs[c->self].generation;
    slot->length = c->length;
    slot->compare_add = h->compare_add;
    slot->swap = h->swap;
    slot->dst_count = c->dst_count;
    slot->src_count = c->src_count;
    spans_put(c->world, slot->dst, c->dst, c->dst_count);
    spans_put(c->world, slot->src, c->src, c->src_count);
    sn_agent_turn(&shm->words[q->slot], q->word, SN_AGENT_TAKEN, SN_AGENT_POSTED);
    /* B2: the bell first, the sleeper second; pairs with B1 in agent_rest. */
    __atomic_fetch_add(&shm->bell, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&shm->asleep, __ATOMIC_SEQ_CST))
        sn_futex_wake(&shm->bell);
    return 0;
}

/* Is it worth waiting on? A look at the owner from time to time: it must be there, and its agent must move. */
static int owner_watch(struct handoff *h, struct request *q, struct sn_world *world)
{
    uint64_t now = sn_now_ns();
    uint32_t beat;

    if (now < q->look_at)
        return 0;
    q->look_at = now + LOOK_NS;
    if (owner_gone(h, world))
        return -ESRCH;
    beat = __atomic_load_n(&h->shm->beat, __ATOMIC_RELAXED);
    if (beat != q->beat || !q->give_up) {
        q->beat = beat;
        q->give_up = now + 2ull * PATIENCE_NS;
    }
    if (!q->word)
        sweep_slots(h->shm);
    if (now < q->give_up)
        return 0;
    sn_log("device memory that only pid %u can reach: its agent has not moved for 4 s (is the process stopped?)",
           world->procs[h->owner].pid);
    return -ETIMEDOUT;
}

/* Give a slot up. Return true when the owner may still read or write what the request names. */
static bool request_leave(struct handoff *h, struct request *q, bool gone)
{
    uint64_t *word = &h->shm->words[q->slot];

    if (!q->word || sn_agent_turn(word, q->word, SN_AGENT_POSTED, SN_AGENT_FREE))
        return false;
    if (sn_agent_turn(word, q->word, SN_AGENT_RUNNING, gone ? SN_AGENT_FREE : SN_AGENT_LEFT))
        return !gone;
    sn_agent_turn(word, q->word, SN_AGENT_DONE, SN_AGENT_FREE);
    return false;
}

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
    struct request *q = &lane->request;
    /* Looked at before the word is: an agent that ends has finished what it had begun. */
    int r = owner_watch(h, q, lane->ask->world);

    if (q->word && __atomic_load_n(&h->shm->words[q->slot], __ATOMIC_ACQUIRE) == (q->word | SN_AGENT_DONE)) {
        r = result_here(h->shm->slots[q->slot].result);
        if (h->found)
            *h->found = h->shm->slots[q->slot].found;
        sn_agent_turn(&h->shm->words[q->slot], q->word, SN_AGENT_DONE, SN_AGENT_FREE);
        return r;
    }
    if (!r)
        return SN_PLACE_BUSY;
    if (!request_leave(h, q, r == -ESRCH))
        return -ESRCH;
    lane->bounce = NULL;                   /* lost, rather than written to when it is something else */
    return h->found ? -ETIMEDOUT : -ESRCH; /* an atomic that may still be made is not tried again */
}

/* The part [offset, offset + bytes) of a list. Return the number of spans. */
static uint32_t slice(struct sn_span *to, const struct sn_span *from, uint32_t count, uint64_t offset, uint64_t bytes)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < count && bytes; i++) {
        if (offset >= from[i].length) {
            offset -= from[i].length;
            continue;
        }
        to[n] = from[i];
        to[n].addr += offset;
        to[n].length -= offset;
        if (to[n].length > bytes)
            to[n].length = bytes;
        bytes -= to[n++].length;
        offset = 0;
    }
    return n;
}

/* One of a piece's two ways: between the bounce buffer and this process's memory, or the owner's. */
static int leg_start(struct handoff *h, const struct sn_copy *c, struct lane *lane, bool here)
{
    struct sn_copy *leg = &lane->copy;
    struct sn_span bounce = {.addr = (uintptr_t)lane->bounce, .length = lane->bytes, .mr = SN_NONE};
    bool into_bounce = here == (h->op == SN_AGENT_WRITE);
    int r;

    leg->world = c->world;
    leg->self = c->self;
    leg->dst_proc = here ? c->self : c->dst_proc;
    leg->src_proc = here ? c->self : c->src_proc;
    leg->length = lane->bytes;
    leg->dst_count = into_bounce ? 1 : slice(leg->dst, c->dst, c->dst_count, lane->offset, lane->bytes);
    leg->src_count = into_bounce ? slice(leg->src, c->src, c->src_count, lane->offset, lane->bytes) : 1;
    *(into_bounce ? leg->dst : leg->src) = bounce;
    lane->ask = leg;
    lane->request = (struct request){0};
    lane->state = here ? LANE_HERE : LANE_ASKING;
    r = here ? sn_place_start(leg) : request_post(h, &lane->request, leg);
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
    return leg_start(h, c, lane, h->op == SN_AGENT_WRITE);
}

/* A step of whatever the lane is at. Return 0 (that way is done), SN_PLACE_BUSY, SN_PLACE_OWNER or -errno. */
static int lane_step(struct handoff *h, struct lane *lane)
{
    if (lane->state == LANE_HERE)
        return sn_place_poll(&lane->copy);
    if (lane->state == LANE_ASKING && !request_post(h, &lane->request, lane->ask))
        lane->state = LANE_THERE;
    return request_poll(h, lane);
}

static void lane_run(struct handoff *h, const struct sn_copy *c, struct lane *lane)
{
    bool last_here = h->op == SN_AGENT_READ;
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
    h->shm = &c->world->agents[c->world->mrs[span->mr].ctx % SN_MAX_CTXS];
    h->op = op;
    h->owner = op == SN_AGENT_READ ? c->src_proc : c->dst_proc;
    h->owner_generation = c->world->procs[h->owner].generation;
    h->epoch = __atomic_load_n(&h->shm->epoch, __ATOMIC_SEQ_CST);
    if (owner_gone(h, c->world)) {
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
    h->compare_add = compare_add;
    h->swap = swap;
    h->found = found;
    h->lanes[0].ask = c;
    h->lanes[0].state = LANE_ASKING;
    c->src_count = 0;
    c->length = 8;
    return sn_handoff_poll(c);
}
