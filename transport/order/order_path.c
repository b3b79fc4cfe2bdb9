/* SPDX-License-Identifier: Apache-2.0 */
/* The order engine: a path is lost, and another carries its requests.
 *
 * A request of a lost path is done if the receiver must have it, and else leaves again. The receiver says how many
 * immediates it has taken from each queue. Since the queue kept order, it has everything before the last of them:
 *   - the receiver knows nothing of a write with immediate that was not taken. So neither side has reused its memory,
 *     and it may be written again. So may the plain writes before it.
 *   - if no immediate follows a plain write, its op is still pending: its caller has told nobody of it.
 *   - words (credits) are replayed in their order.
 *   - a read is done only when its data is here. A later request that was taken does not show that, unless it was
 *     fenced.
 *
 * All requests of a queue go to one other queue, its carrier, in their order, as there is room. */
#include <errno.h>

#include "transport/order/order_cut.h"
#include "transport/order/order_queue.h"
#include "transport/order/stripe.h"
#include "transport/order/wire.h"

/* The backlog of a stopped path: so large that no request is ever given to it. A float can represent it exactly. */
#define STOPPED_BACKLOG (1ull << 60)

/* The backlog of a standby path: more than a working path ever has, and less than a stopped path's. */
#define STANDBY_BACKLOG (1ull << 44)

static uint32_t queue_on_path(const struct prs_order *order, uint32_t path, uint32_t k)
{
    return k * order->path_count + path;
}

static uint32_t queues_per_path(const struct prs_order *order)
{
    return order->data_queues / order->path_count;
}

void prs_order_rest(struct prs_order *order)
{
    bool rests = false;

    for (uint32_t i = 0; i < order->path_count; i++)
        /* MUTANT(order) a standby path rests while another works: s/rests |=/rests = false &&/ */
        rests |= order->path[i].use < PRS_PATH_STOPPED && !order->path[i].standby;
    for (uint32_t i = 0; i < order->path_count; i++) {
        struct prs_order_path *path = &order->path[i];

        if (!path->standby || path->use >= PRS_PATH_STOPPED || rests == (path->use == PRS_PATH_RESTING))
            continue;
        path->use = rests ? PRS_PATH_RESTING : PRS_PATH_USED;
        path->inflight_bytes += rests ? STANDBY_BACKLOG : -STANDBY_BACKLOG;
        path->since_ns = path->done_bytes = 0; /* what it carried while on standby says nothing about its rate */
        for (uint32_t k = 0; k < queues_per_path(order); k++)
            order->queue[queue_on_path(order, i, k)].backlog_bytes += rests ? STANDBY_BACKLOG : -STANDBY_BACKLOG;
    }
}

int prs_order_path_stop(struct prs_order *order, uint32_t path)
{
    struct prs_stripe stripes[PRS_ORDER_MAX_DATA_QUEUES];
    uint32_t others = 0;

    if (order->path[path].use >= PRS_PATH_STOPPED)
        return 0;
    for (uint32_t i = 0; i < order->path_count; i++)
        others += i != path && order->path[i].use < PRS_PATH_STOPPED;
    /* MUTANT(order) the last path is not stopped: s/|| !others// */
    if (!prs_order_can_fail_over(order) || !others)
        return -ENETDOWN;
    order->path[path].use = PRS_PATH_STOPPED;
    order->path[path].inflight_bytes += STOPPED_BACKLOG;
    for (uint32_t k = 0; k < queues_per_path(order); k++) {
        uint32_t index = queue_on_path(order, path, k);

        /* MUTANT(order) nothing is posted on a stopped path: delete */
        order->dirty &= ~(1ull << index);
        /* MUTANT(order) nothing new goes to a stopped path: delete */
        order->queue[index].backlog_bytes += STOPPED_BACKLOG;
        /* MUTANT(order) a stopped path extends no run: delete */
        end_run(&order->queue[index]);
    }
    prs_order_rest(order);
    prs_order_backlogs(order, stripes);
    order->small_queue = prs_stripe_fastest(stripes, order->data_queues, 0);
    return 0;
}

int prs_order_knock(struct prs_order *order)
{
    uint32_t index = order->small_queue;
    struct prs_order_queue *queue = &order->queue[index];

    if (queue_full(queue))
        return PRS_BUSY;
    *admit_request(order, index, &order->no_op) =
        (struct prs_wr){.opcode = PRS_WR_WRITE_IMM, .imm = prs_imm_make_bare(PRS_BARE_NOTE, 0), .owner = &order->no_op};
    queue->immediates++;
    set_aim(queue, NULL, NULL, NULL);
    end_run(queue);
    return 0;
}

/* ---- down ---- */

static uint32_t count_immediates(const struct prs_order_queue *queue, uint32_t from, uint32_t to)
{
    uint32_t count = 0;

    for (; from != to; from++)
        count += queue->wr[from & queue->mask].opcode == PRS_WR_WRITE_IMM;
    return count;
}

/* How many of the immediates in flight on the queue has the receiver taken? */
static uint32_t taken_in_flight(const struct prs_order_queue *queue, uint32_t taken)
{
    return taken - (queue->immediates - count_immediates(queue, queue->tail, queue->head));
}

/* The position after the request that carries the last of this many immediates, counted from the oldest in flight. */
static uint32_t end_of_taken(const struct prs_order_queue *queue, uint32_t immediates)
{
    uint32_t end = queue->tail;

    for (uint32_t at = queue->tail; immediates; at++) {
        if (queue->wr[at & queue->mask].opcode == PRS_WR_WRITE_IMM) {
            end = at + 1;
            immediates--;
        }
    }
    return end;
}

/* The position before which reads have their data: a fenced request that was taken has waited for them. */
static uint32_t end_of_read(const struct prs_order_queue *queue, uint32_t end)
{
    for (uint32_t at = end; at != queue->tail; at--)
        if (queue->wr[(at - 1) & queue->mask].flags & PRS_WR_FENCE)
            return at;
    return queue->tail;
}

/* Retire the requests before that position, except for reads without data. Their owner becomes NULL. Return how many
 * ops are done with that. */
static uint32_t retire_taken(struct prs_order *order, struct prs_order_queue *queue, uint32_t end)
{
    uint32_t read_end = end_of_read(queue, end), done = 0;

    for (uint32_t at = queue->tail; at != end; at++) {
        uint32_t slot = at & queue->mask;

        /* MUTANT(order) a read before what was taken is replayed: s/queue->wr[slot].opcode == PRS_WR_READ &&/0 &&/ */
        /* MUTANT(order) a read before a fence that was taken is done:
         * s/&& at - queue->tail >= read_end - queue->tail// */
        if (queue->wr[slot].opcode == PRS_WR_READ && at - queue->tail >= read_end - queue->tail)
            continue;
        done += retire(queue->wr[slot].owner);
        queue->wr[slot].owner = NULL;
    }
    order->no_op.parts = 1u << 31;
    return done;
}

/* No completion of this queue comes any more. */
static void forget_signaled(struct prs_order *order, struct prs_order_queue *queue)
{
    for (uint32_t at = queue->tail; at != queue->head; at++)
        /* MUTANT(order) lost requests complete no more: delete */
        order->signaled -= (queue->wr[at & queue->mask].flags & PRS_WR_SIGNALED) != 0;
    queue->posted = queue->signaled = queue->head;
    queue->eager = false;
}

static uint32_t choose_carrier(const struct prs_order *order, uint32_t path, uint32_t k)
{
    uint32_t other = path;

    do
        other = (other + 1) % order->path_count;
    while (order->path[other].use >= PRS_PATH_STOPPED); /* ends: one path is not stopped */
    return queue_on_path(order, other, k);
}

int prs_order_path_down(struct prs_order *order, uint32_t path, const uint32_t *taken, struct prs_order_replay *out)
{
    uint32_t each = queues_per_path(order), done = 0;

    *out = (struct prs_order_replay){0};
    for (uint32_t k = 0; k < each; k++) {
        const struct prs_order_queue *queue = &order->queue[queue_on_path(order, path, k)];

        /* MUTANT(order) the receiver has taken only what was posted: delete */
        if (taken_in_flight(queue, taken[k]) > count_immediates(queue, queue->tail, queue->posted))
            return -EPROTO;
    }
    for (uint32_t k = 0; k < each; k++) {
        uint32_t index = queue_on_path(order, path, k);
        struct prs_order_queue *queue = &order->queue[index];

        forget_signaled(order, queue);
        /* MUTANT(order) what was taken is not replayed: delete */
        done += retire_taken(order, queue, end_of_taken(queue, taken_in_flight(queue, taken[k])));
        for (uint32_t at = queue->tail; at != queue->head; at++) {
            bool again = queue->wr[at & queue->mask].owner;

            out->taken += !again;
            out->replayed += again;
            out->bytes += again ? queue->wr[at & queue->mask].len_bytes : 0;
        }
        queue->carrier = choose_carrier(order, path, k);
        order->replaying |= 1ull << index;
        if (order->word_queue == index) {
            order->word_queue = queue->carrier;
            order->last_word = order->last_touch = order->queue[queue->carrier].tail; /* none is in flight */
        }
    }
    order->path[path].use = PRS_PATH_LOST;
    order->ops -= done;
    prs_order_replay(order);
    return (int)done;
}

int prs_order_probe_lost(struct prs_order *order, uint32_t path, uint64_t *word)
{
    uint32_t index = order->data_queues + path, done = 0;
    struct prs_order_queue *queue = &order->queue[index];

    if (order->path[path].probe == PRS_PROBE_LOST)
        return 0;
    for (uint32_t at = queue->tail; at != queue->posted; at++) {
        *word = queue->wr[at & queue->mask].remote_addr;
        /* MUTANT(order) a lost probe queue has added nothing: delete */
        if (queue->wr[at & queue->mask].opcode == PRS_WR_ADD)
            return -ENETDOWN;
    }
    forget_signaled(order, queue);
    order->dirty &= ~(1ull << index);
    for (uint32_t at = queue->tail; at != queue->head; at++) {
        uint32_t slot = at & queue->mask;

        if (queue->wr[slot].opcode != PRS_WR_READ)
            continue;
        done += retire(queue->wr[slot].owner);
        queue->wr[slot].owner = NULL;
    }
    while (queue->tail != queue->head && !queue->wr[queue->tail & queue->mask].owner)
        queue->tail++;
    order->ops -= done;
    order->path[path].probe = PRS_PROBE_LOST;
    return (int)done;
}

void prs_order_probe_up(struct prs_order *order, uint32_t path)
{
    order->path[path].probe = PRS_PROBE_WORKS;
}

struct prs_wr *prs_order_self_left(struct prs_order *order, uint32_t *at)
{
    struct prs_order_queue *queue = &order->queue[order->data_queues + order->self_path];

    if (order->path[order->self_path].probe != PRS_PROBE_LOST)
        return NULL;
    while (*at < queue->head - queue->tail) {
        uint32_t slot = (queue->tail + (*at)++) & queue->mask;

        if (queue->wr[slot].owner)
            return &queue->wr[slot];
    }
    return NULL;
}

int prs_order_self_over(struct prs_order *order, uint32_t path)
{
    struct prs_order_queue *from = &order->queue[order->data_queues + order->self_path];
    struct prs_order_queue *to = &order->queue[order->data_queues + path];

    /* MUTANT(order) signals are not overtaken where another rail raises them: delete */
    if (!prs_order_self_idle(order) && order->path[order->self_path].probe != PRS_PROBE_LOST)
        return PRS_BUSY;
    /* MUTANT(order) what waits needs room on the other path: delete */
    if (to->head - to->tail + (from->head - from->tail) > to->mask + 1)
        return PRS_BUSY;
    for (; from->tail != from->head; from->tail++) {
        uint32_t slot = from->tail & from->mask;
        const struct prs_wr *old = &from->wr[slot];
        struct prs_wr *wr;

        if (!from->wr[slot].owner)
            continue;
        wr = admit_request(order, order->data_queues + path, from->wr[slot].owner);
        *wr = *old;
        wr->flags = 0;
        if (old->opcode == PRS_WR_WRITE)
            copy_inline(to, wr, &old->value, sizeof(old->value));
    }
    from->posted = from->signaled = from->head;
    order->self_path = path;
    return 0;
}

/* ---- replay ---- */

/* Let the request in that slot leave over the carrier, which has room. */
static void move_request(struct prs_order *order, struct prs_order_queue *from, uint32_t slot)
{
    uint32_t index = from->carrier;
    struct prs_order_queue *to = &order->queue[index];
    const struct prs_order_aim *aim = order_aim(from, slot);
    const struct prs_wr *old = &from->wr[slot];
    struct prs_wr *wr = admit_request(order, index, from->wr[slot].owner);

    *wr = *old;
    /* MUTANT(order) a replayed record still follows its reads: s/old->flags & PRS_WR_FENCE/0/ */
    wr->flags = old->flags & PRS_WR_FENCE;
    memcpy(order_aim(to, (uint32_t)(wr - to->wr)), aim, aim_bytes(from->aim_keys));
    /* MUTANT(order) a replayed immediate counts: delete */
    to->immediates += wr->opcode == PRS_WR_WRITE_IMM;
    /* MUTANT(order) a replay has its own copy of the payload: s/old->flags & PRS_WR_INLINE/0/ */
    if (old->flags & PRS_WR_INLINE)
        copy_inline(to, wr, (const void *)(uintptr_t)old->local_addr, old->len_bytes);
    else if (aim->local_keys)
        /* MUTANT(order) a replay shows the local key of its rail: delete */
        wr->local_key = aim->local_keys[to->local_rail];
    /* MUTANT(order) a replay shows the remote key of its rail: s/if (wr->len_bytes)/if (0)/ */
    if (wr->len_bytes)
        wr->remote_key = aim->path_keys ? aim->path_keys[to->path] : aim->key[to->remote_rail];
    else if (wr->remote_addr == order->record_addr)
        name_records(order, to, wr);
    end_run(to);
    if (wr->opcode == PRS_WR_READ)
        /* MUTANT(order) a strong signal knows where reads are replayed: delete */
        to->last_read = to->head;
    add_backlog(order, index, wr->len_bytes);
    if (!path_is_stopped(order, index))
        return;
    /* The carrier is stopped, too: post nothing there. When it is lost, its own carrier gets the request. */
    order->dirty &= ~(1ull << index);
    if (prs_order_path_is_lost(order, to->path))
        order->replaying |= 1ull << index;
}

/* Replay a queue as far as its carrier has room. Return true if anything moved. */
static bool replay_queue(struct prs_order *order, uint32_t index)
{
    struct prs_order_queue *queue = &order->queue[index];
    bool moved = false;

    for (; queue->tail != queue->head; queue->tail++) {
        uint32_t slot = queue->tail & queue->mask;

        if (queue->wr[slot].owner) {
            /* MUTANT(order) a replay needs a slot: delete */
            if (queue_full(&order->queue[queue->carrier]))
                return moved;
            move_request(order, queue, slot);
            moved = true;
        }
        queue->backlog_bytes -= queue->wr[slot].len_bytes;
        order->path[queue->path].inflight_bytes -= queue->wr[slot].len_bytes;
    }
    queue->posted = queue->signaled = queue->head;
    order->replaying &= ~(1ull << index);
    return moved;
}

void prs_order_replay(struct prs_order *order)
{
    bool moved;

    do {
        moved = false;
        for (uint64_t left = order->replaying; left; left &= left - 1)
            moved |= replay_queue(order, lowest(left));
    } while (moved && order->replaying);
}

/* ---- up ---- */

bool prs_order_path_is_empty(const struct prs_order *order, uint32_t path)
{
    for (uint32_t k = 0; k < queues_per_path(order); k++)
        if (order->queue[queue_on_path(order, path, k)].tail != order->queue[queue_on_path(order, path, k)].head)
            return false;
    return true;
}

int prs_order_path_up(struct prs_order *order, uint32_t path)
{
    /* MUTANT(order) a path comes back empty: delete */
    if (!prs_order_path_is_empty(order, path))
        return PRS_BUSY;
    for (uint32_t k = 0; k < queues_per_path(order); k++) {
        struct prs_order_queue *queue = &order->queue[queue_on_path(order, path, k)];

        queue->backlog_bytes = 0;
        /* MUTANT(order) new queues count from nothing: delete */
        queue->immediates = 0;
    }
    order->path[path].inflight_bytes = 0;
    order->path[path].since_ns = 0;
    order->path[path].done_bytes = 0;
    order->path[path].use = PRS_PATH_USED;
    prs_order_rest(order);
    return 0;
}
