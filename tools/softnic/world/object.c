/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/world/object.h"

#include <errno.h>
#include <string.h>

#include "tools/softnic/world/lock.h"

static uint32_t power_of_two(uint32_t n)
{
    uint32_t p = 1;

    while (p < n)
        p <<= 1;
    return p;
}

/* Publish an object: a process that finds the owner set (sweep, status tools) sees everything filled in before. */
static void owner_set(uint32_t *owner, uint32_t proc)
{
    __atomic_store_n(owner, proc + 1, __ATOMIC_RELEASE);
}

#define SLOT_TAKE(world, object, most, index)                                                                          \
    sn_slot_take(&(world)->object##_slots, (world)->object##_free, most, (world)->object##s,                           \
                 sizeof(*(world)->object##s), index)

int sn_ctx_shm_take(struct sn_world *world, uint32_t proc, uint32_t dev, uint32_t *index)
{
    struct sn_ctx_shm *ctx;
    int r = SLOT_TAKE(world, ctx, SN_MAX_CTXS, index);

    if (r < 0)
        return r;
    ctx = &world->ctxs[*index];
    memset(ctx, 0, sizeof(*ctx));
    ctx->dev = dev;
    owner_set(&ctx->owner, proc);
    return 0;
}

void sn_ctx_shm_give(struct sn_world *world, uint32_t index)
{
    __atomic_store_n(&world->ctxs[index].owner, 0, __ATOMIC_RELEASE);
    sn_slot_give(&world->ctx_slots, world->ctx_free, SN_MAX_CTXS, index);
}

int sn_cq_shm_take(struct sn_world *world, uint32_t proc, uint32_t ctx, uint32_t entries, uint32_t *index)
{
    struct sn_cq_shm *cq;
    uint64_t off;
    int r = SLOT_TAKE(world, cq, SN_MAX_CQS, index);

    if (r < 0)
        return r;
    entries = power_of_two(entries);
    r = sn_arena_alloc(world, (uint64_t)entries * sizeof(struct sn_cqe), &off);
    if (r < 0) {
        sn_slot_give(&world->cq_slots, world->cq_free, SN_MAX_CQS, *index);
        return r;
    }
    cq = &world->cqs[*index];
    memset(cq, 0, sizeof(*cq));
    cq->ctx = ctx;
    cq->ring_off = off;
    cq->capacity = entries;
    owner_set(&cq->owner, proc);
    return 0;
}

/* Move the unread entries into the new ring, at the positions that they have. */
static int entries_move_locked(struct sn_world *world, struct sn_cq_shm *cq, struct sn_cqe *to, uint32_t most,
                               uint32_t capacity)
{
    const struct sn_cqe *from = sn_ring_at(world, cq->ring_off, (uint64_t)cq->capacity * sizeof(*from));

    if (!from || cq->tail - cq->head > most)
        return -EINVAL;
    for (uint32_t i = cq->head; i != cq->tail; i++)
        to[i & (capacity - 1)] = from[i & (cq->capacity - 1)];
    return 0;
}

int sn_cq_shm_resize(struct sn_world *world, uint32_t index, uint32_t entries)
{
    struct sn_cq_shm *cq = &world->cqs[index];
    uint64_t off, old_off = cq->ring_off;
    uint32_t old = cq->capacity, capacity = power_of_two(entries);
    int r = sn_arena_alloc(world, (uint64_t)capacity * sizeof(struct sn_cqe), &off);

    if (r < 0)
        return r;
    sn_lock_take(&cq->lock);
    r = entries_move_locked(world, cq, sn_ring_at(world, off, (uint64_t)capacity * sizeof(struct sn_cqe)), entries,
                            capacity);
    if (!r) {
        cq->ring_off = off;
        cq->capacity = capacity;
    }
    sn_lock_drop(&cq->lock);
    sn_arena_free(world, r ? off : old_off, (uint64_t)(r ? capacity : old) * sizeof(struct sn_cqe));
    return r;
}

void sn_cq_shm_give(struct sn_world *world, uint32_t index)
{
    struct sn_cq_shm *cq = &world->cqs[index];

    __atomic_store_n(&cq->owner, 0, __ATOMIC_RELEASE);
    sn_arena_free(world, cq->ring_off, (uint64_t)cq->capacity * sizeof(struct sn_cqe));
    sn_slot_give(&world->cq_slots, world->cq_free, SN_MAX_CQS, index);
}

int sn_rq_shm_init(struct sn_world *world, struct sn_rq_shm *rq, uint32_t entries, uint32_t max_sge)
{
    *rq = (struct sn_rq_shm){.max_sge = max_sge,
                             .stride = (uint32_t)(sizeof(struct sn_rqe) + max_sge * sizeof(struct sn_sge))};
    if (entries == 0)
        return 0;
    rq->capacity = power_of_two(entries);
    return sn_arena_alloc(world, (uint64_t)rq->capacity * rq->stride, &rq->ring_off);
}

void sn_rq_shm_fini(struct sn_world *world, struct sn_rq_shm *rq)
{
    sn_arena_free(world, rq->ring_off, (uint64_t)rq->capacity * rq->stride);
    rq->ring_off = 0;
}

int sn_qp_shm_take(struct sn_world *world, uint32_t proc, uint32_t *index)
{
    struct sn_qp_shm *qp;
    uint32_t generation;
    int r = SLOT_TAKE(world, qp, SN_MAX_QPS, index);

    if (r < 0)
        return r;
    qp = &world->qps[*index];
    /* Never 0, so that no number is below SN_MAX_QPS: 0 and 1 are special on real NICs. */
    generation = qp->generation % 1023 + 1;
    memset(qp, 0, sizeof(*qp));
    qp->generation = generation;
    qp->srq = SN_NONE;
    owner_set(&qp->owner, proc);
    return 0;
}

void sn_qp_shm_give(struct sn_world *world, uint32_t index)
{
    struct sn_qp_shm *qp = &world->qps[index];

    __atomic_store_n(&qp->qpn, 0, __ATOMIC_RELEASE);
    __atomic_store_n(&qp->owner, 0, __ATOMIC_RELEASE);
    sn_rq_shm_fini(world, &qp->rq);
    sn_slot_give(&world->qp_slots, world->qp_free, SN_MAX_QPS, index);
}

int sn_srq_shm_take(struct sn_world *world, uint32_t proc, uint32_t *index)
{
    int r = SLOT_TAKE(world, srq, SN_MAX_SRQS, index);

    if (r < 0)
        return r;
    memset(&world->srqs[*index], 0, sizeof(world->srqs[*index]));
    owner_set(&world->srqs[*index].owner, proc);
    return 0;
}

void sn_srq_shm_give(struct sn_world *world, uint32_t index)
{
    __atomic_store_n(&world->srqs[index].owner, 0, __ATOMIC_RELEASE);
    sn_rq_shm_fini(world, &world->srqs[index].rq);
    sn_slot_give(&world->srq_slots, world->srq_free, SN_MAX_SRQS, index);
}

int sn_mr_shm_take(struct sn_world *world, uint32_t proc, uint32_t *index)
{
    struct sn_mr_shm *mr;
    uint32_t generation;
    int r = SLOT_TAKE(world, mr, SN_MAX_MRS, index);

    if (r < 0)
        return r;
    mr = &world->mrs[*index];
    generation = mr->generation % 0xffff + 1; /* never 0: a key of 0 is no key */
    memset(mr, 0, sizeof(*mr));
    mr->generation = generation;
    owner_set(&mr->owner, proc);
    return 0;
}

void sn_mr_shm_give(struct sn_world *world, uint32_t index)
{
    struct sn_mr_shm *mr = &world->mrs[index];

    __atomic_store_n(&mr->key, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&mr->owner, 0, __ATOMIC_RELEASE);
    sn_slot_give(&world->mr_slots, world->mr_free, SN_MAX_MRS, index);
}

void sn_objects_hide(struct sn_world *world, uint32_t proc)
{
    uint32_t owner = proc + 1;

    for (uint32_t i = 0; i < world->qp_slots.fresh; i++)
        if (__atomic_load_n(&world->qps[i].owner, __ATOMIC_ACQUIRE) == owner)
            __atomic_store_n(&world->qps[i].qpn, 0, __ATOMIC_SEQ_CST);
    for (uint32_t i = 0; i < world->mr_slots.fresh; i++)
        if (__atomic_load_n(&world->mrs[i].owner, __ATOMIC_ACQUIRE) == owner)
            __atomic_store_n(&world->mrs[i].key, 0, __ATOMIC_SEQ_CST);
}

/* Queue pairs first: they name the others. */
void sn_objects_free(struct sn_world *world, uint32_t proc)
{
    uint32_t owner = proc + 1;

    for (uint32_t i = 0; i < world->qp_slots.fresh; i++)
        if (__atomic_load_n(&world->qps[i].owner, __ATOMIC_ACQUIRE) == owner)
            sn_qp_shm_give(world, i);
    for (uint32_t i = 0; i < world->mr_slots.fresh; i++)
        if (__atomic_load_n(&world->mrs[i].owner, __ATOMIC_ACQUIRE) == owner)
            sn_mr_shm_give(world, i);
    for (uint32_t i = 0; i < world->srq_slots.fresh; i++)
        if (__atomic_load_n(&world->srqs[i].owner, __ATOMIC_ACQUIRE) == owner)
            sn_srq_shm_give(world, i);
    for (uint32_t i = 0; i < world->cq_slots.fresh; i++)
        if (__atomic_load_n(&world->cqs[i].owner, __ATOMIC_ACQUIRE) == owner)
            sn_cq_shm_give(world, i);
    for (uint32_t i = 0; i < world->ctx_slots.fresh; i++)
        if (__atomic_load_n(&world->ctxs[i].owner, __ATOMIC_ACQUIRE) == owner)
            sn_ctx_shm_give(world, i);
}
