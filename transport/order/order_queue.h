/* SPDX-License-Identifier: Apache-2.0 */
/* Private to the order engine: what order.c and order_signal.c both do with a queue. */
#ifndef TRANSPORT_ORDER_QUEUE_H
#define TRANSPORT_ORDER_QUEUE_H

#include <string.h>

#include "transport/order/op.h"
#include "transport/order/order.h"

static inline bool queue_full(const struct prs_order_queue *queue)
{
    return queue->head - queue->tail > queue->mask;
}

/* Is the request at that position in flight or waiting to be posted? */
static inline bool queue_has(const struct prs_order_queue *queue, uint32_t position)
{
    return position - queue->tail < queue->head - queue->tail;
}

/* Admit a request. No caller waits for its completion, so its queue need not ask for one soon. */
static inline struct prs_wr *admit_lazily(struct prs_order *order, uint32_t index, struct prs_op *op)
{
    struct prs_order_queue *queue = &order->queue[index];
    struct prs_wr *wr = &queue->wr[queue->head++ & queue->mask];

    order->dirty |= 1ull << index;
    wr->owner = op;
    return wr;
}

/* Admit a request that a caller waits for. */
static inline struct prs_wr *admit_request(struct prs_order *order, uint32_t index, struct prs_op *op)
{
    order->queue[index].eager = true;
    return admit_lazily(order, index, op);
}

/* The last request shall not share its notification with a later one. */
static inline void end_run(struct prs_order_queue *queue)
{
    queue->run_next = 0;
}

/* Ask for a completion of a request that is not posted yet. */
static inline void signal_request(struct prs_order *order, struct prs_order_queue *queue, uint32_t position)
{
    struct prs_wr *wr = &queue->wr[position & queue->mask];

    if (wr->flags & PRS_WR_SIGNALED)
        return;
    wr->flags |= PRS_WR_SIGNALED;
    queue->signaled = position + 1;
    order->signaled++;
}

static inline struct prs_order_group *group_of(struct prs_order *order, uint32_t group)
{
    return &order->group[group % PRS_ORDER_GROUPS];
}

static inline void group_note(struct prs_order_group *group, uint32_t index, uint32_t position)
{
    group->used |= 1ull << index;
    group->last[index] = position;
}

/* Add to the backlog by which queues are chosen. With a single queue there is no choice. */
static inline void add_backlog(struct prs_order *order, uint32_t index, uint64_t bytes)
{
    struct prs_order_queue *queue = &order->queue[index];

    if (order->data_queues == 1)
        return;
    order->stats.path_bytes[queue->path] += bytes;
    order->path[queue->path].inflight_bytes += bytes;
    queue->backlog_bytes += bytes;
}

/* Keep a copy of the payload until the request completes, and let the request send the copy. */
static inline void copy_inline(const struct prs_order_queue *queue, struct prs_wr *wr, const void *bytes, size_t count)
{
    uint8_t *copy = queue->inline_bytes + (size_t)(wr - queue->wr) * PRS_INLINE_BYTES;

    memcpy(copy, bytes, count);
    wr->flags |= PRS_WR_INLINE;
    wr->local_addr = (uintptr_t)copy;
    wr->local_key = queue->inline_key;
}

/* Adds to one word may be merged into one request. The request's owner is then the last of these ops, with bit 0 set.
 * mark[0] of each op holds the previous owner: a list. */
enum { OWNER_MERGED = 1 };

static inline void owner_merge(struct prs_op **owner, struct prs_op *op)
{
    op->mark[0] = (uintptr_t)*owner;
    *owner = (struct prs_op *)((uintptr_t)op | OWNER_MERGED);
}

/* Take one op off a merged owner. *owner becomes the rest, NULL after the last. */
static inline struct prs_op *owner_pop(struct prs_op **owner)
{
    struct prs_op *op = (struct prs_op *)((uintptr_t)*owner & ~(uintptr_t)OWNER_MERGED);

    *owner = (uintptr_t)*owner & OWNER_MERGED ? (struct prs_op *)(uintptr_t)op->mark[0] : NULL;
    return op;
}

static inline uint32_t lowest(uint64_t mask)
{
    return (uint32_t)__builtin_ctzll(mask);
}

static inline bool path_is_stopped(const struct prs_order *order, uint32_t index)
{
    return order->path[order->queue[index].path].use >= PRS_PATH_STOPPED;
}

static inline size_t aim_bytes(uint32_t keys)
{
    return sizeof(struct prs_order_aim) + keys * sizeof(uint64_t);
}

static inline struct prs_order_aim *order_aim(const struct prs_order_queue *queue, uint32_t slot)
{
    return (struct prs_order_aim *)(void *)(queue->aim + slot * aim_bytes(queue->aim_keys));
}

/* Keep what the request before head needs to leave over another path. path_keys: its remote keys by path; else
 * remote_keys: the keys of the caller's op (NULL: the request names no remote memory). */
static inline void set_aim(const struct prs_order_queue *queue, const uint32_t *local_keys, const uint64_t *path_keys,
                           const struct prs_keys *remote_keys)
{
    struct prs_order_aim *aim;

    if (!queue->aim)
        return;
    aim = order_aim(queue, (queue->head - 1) & queue->mask);
    aim->local_keys = local_keys;
    aim->path_keys = path_keys;
    for (uint32_t i = 0; remote_keys && i < queue->aim_keys; i++)
        aim->key[i] = remote_keys->rkey[i];
}

/* A request of no bytes needs no memory. Some NICs (EFA) look at the key all the same, so it names the peer's ring. */
static inline void name_records(const struct prs_order *order, const struct prs_order_queue *queue, struct prs_wr *wr)
{
    wr->remote_addr = order->record_addr;
    wr->remote_key = order->record_key[queue->path];
}

/* Complete a part of each op that shares a request. Return how many ops are done with that. */
uint32_t prs_order_retire_merged(struct prs_op *owner);

/* Complete a part of the op or ops of one request. Return how many ops are done with that. */
static inline uint32_t retire(struct prs_op *owner)
{
    return (uintptr_t)owner & OWNER_MERGED ? prs_order_retire_merged(owner) : prs_op_part_done(owner);
}

/* Replay requests of lost paths as far as their carriers have room. */
void prs_order_replay(struct prs_order *order);

/* Let standby paths rest while another path works, and else carry requests. */
void prs_order_rest(struct prs_order *order);

/* Let held signals leave, oldest first, as far as what they wait for is complete. */
void prs_order_release(struct prs_order *order);

#endif
