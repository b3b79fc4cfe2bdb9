/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/world/queues.h"

#include <errno.h>
#include <infiniband/verbs.h>
#include <string.h>

#include "tools/softnic/world/lock.h"
#include "tools/softnic/world/object.h"
#include "tools/softnic/world/wake.h"

static bool arm_matches(uint32_t armed, const struct sn_cqe *cqe, bool solicited)
{
    if (armed == SN_CQ_ARM_ANY)
        return true;
    return armed == SN_CQ_ARM_SOLICITED && (solicited || cqe->status != IBV_WC_SUCCESS);
}

int sn_cq_push(struct sn_world *world, uint32_t index, const struct sn_cqe *cqes, uint32_t count, bool solicited)
{
    struct sn_cq_shm *cq = &world->cqs[index < SN_MAX_CQS ? index : 0];
    bool wake = false, first_overrun = false;
    struct sn_cqe *ring;
    int r = 0;

    sn_lock_take(&cq->lock);
    ring = sn_ring_at(world, cq->ring_off, (uint64_t)cq->capacity * sizeof(*ring));
    if (index >= SN_MAX_CQS || !ring) {
        sn_lock_drop(&cq->lock);
        sn_log("completion queue %u is damaged: completions are lost", index);
        return -EOVERFLOW;
    }
    for (uint32_t i = 0; i < count; i++) {
        /* [cq-head] acquire; pairs with the consumer (cq.c): an entry is overwritten only after it was read. */
        if (cq->tail - __atomic_load_n(&cq->head, __ATOMIC_ACQUIRE) >= cq->capacity) {
            first_overrun = !cq->overrun;
            cq->overrun = 1;
            r = -EOVERFLOW;
            break;
        }
        ring[cq->tail & (cq->capacity - 1)] = cqes[i];
        /* [cq-tail] release; pairs with the consumer: the entry, and the data it reports on, come before it. */
        __atomic_store_n(&cq->tail, cq->tail + 1, __ATOMIC_RELEASE);
        if (arm_matches(cq->armed, &cqes[i], solicited)) {
            wake = true;
            cq->armed = SN_CQ_IDLE;
            __atomic_fetch_add(&cq->events, 1, __ATOMIC_RELEASE);
        }
    }
    sn_lock_drop(&cq->lock);
    if (wake && cq->wake_id)
        sn_wake_send(world, cq->wake_id);
    if (first_overrun) {
        sn_log("completion queue %u (%u entries) overrun by queue pair %u: completions are lost; it is polled too "
               "rarely or is too small",
               index, cq->capacity, cqes->qp_num);
        sn_async_raise(world, cq->ctx, IBV_EVENT_CQ_ERR, index);
    }
    return r;
}

/* The lock is held; but initiators read the number of receives without it (execute.c, pipeline.c). */
static void step(uint32_t *position)
{
    __atomic_store_n(position, *position + 1, __ATOMIC_RELAXED);
}

/* NULL when the ring is damaged. The entry has room for rqe_room() buffers. */
static struct sn_rqe *rqe_at(struct sn_world *world, struct sn_rq_shm *rq, uint32_t position)
{
    uint64_t stride = rq->stride, ring = sizeof(struct sn_rqe) <= stride ? rq->capacity * stride : UINT64_MAX;
    uint8_t *at = sn_ring_at(world, rq->ring_off, ring);

    return at && stride % 8 == 0 ? (struct sn_rqe *)(at + (position & (rq->capacity - 1)) * stride) : NULL;
}

static uint32_t rqe_room(const struct sn_rq_shm *rq)
{
    uint32_t room = (uint32_t)((rq->stride - sizeof(struct sn_rqe)) / sizeof(struct sn_sge));

    return room < SN_MAX_SGE ? room : SN_MAX_SGE;
}

/* Receives in the ring. A damaged ring has none. */
static bool any_left(const struct sn_rq_shm *rq)
{
    return rq->tail != rq->head && rq->tail - rq->head <= rq->capacity;
}

int sn_rq_push(struct sn_world *world, struct sn_rq_shm *rq, uint64_t wr_id, const struct sn_sge *sge, uint32_t num_sge)
{
    int r = SN_RQ_FULL;

    sn_lock_take(&rq->lock);
    if (rq->tail - rq->head < rq->capacity) {
        struct sn_rqe *rqe = rqe_at(world, rq, rq->tail);

        if (rqe && num_sge <= rqe_room(rq)) {
            rqe->wr_id = wr_id;
            rqe->num_sge = num_sge;
            memcpy(rqe + 1, sge, num_sge * sizeof(*sge));
            step(&rq->tail);
            r = 0;
        }
    }
    sn_lock_drop(&rq->lock);
    return r;
}

/* Read again under the lock: there may be fewer. */
static bool limit_reached(struct sn_rq_shm *rq)
{
    if (!rq->limit || rq->tail - rq->head >= rq->limit)
        return false;
    rq->limit = 0; /* raised once; the owner arms it again */
    return true;
}

int sn_rq_pop(struct sn_world *world, struct sn_rq_shm *rq, struct sn_recv *recv)
{
    int r = SN_RQ_EMPTY;

    sn_lock_take(&rq->lock);
    const struct sn_rqe *rqe = any_left(rq) ? rqe_at(world, rq, rq->head) : NULL;

    if (rqe) {
        recv->wr_id = rqe->wr_id;
        recv->num_sge = rqe->num_sge <= rqe_room(rq) ? rqe->num_sge : rqe_room(rq);
        memcpy(recv->sge, rqe + 1, recv->num_sge * sizeof(recv->sge[0]));
        step(&rq->head);
        r = limit_reached(rq) ? SN_RQ_LIMIT : 0;
    }
    sn_lock_drop(&rq->lock);
    return r;
}

uint32_t sn_rq_pop_ids(struct sn_world *world, struct sn_rq_shm *rq, uint64_t *wr_ids, uint32_t most)
{
    uint32_t count = 0;

    sn_lock_take(&rq->lock);
    for (const struct sn_rqe *rqe; count < most && any_left(rq) && (rqe = rqe_at(world, rq, rq->head)); step(&rq->head))
        wr_ids[count++] = rqe->wr_id;
    sn_lock_drop(&rq->lock);
    return count;
}

static void flush_recv(struct sn_world *world, struct sn_qp_shm *qp, uint32_t qpn)
{
    struct sn_recv recv;

    if (qp->srq != SN_NONE || !qp->rq.capacity || !sn_qp_is_sound(world, qp) || sn_device_is_dead(world, qp->dev))
        return;
    while (sn_rq_pop(world, &qp->rq, &recv) != SN_RQ_EMPTY) {
        struct sn_cqe cqe = {.wr_id = recv.wr_id,
                             .status = IBV_WC_WR_FLUSH_ERR,
                             .opcode = IBV_WC_RECV,
                             .qp_num = qpn,
                             .src_qp = qp->dest_qpn,
                             .is_recv = 1};

        sn_count(&world->devs[qp->dev].counters.flushed, 1);
        sn_count(&world->devs[qp->dev].counters.cqes_recv, 1);
        if (sn_cq_push(world, qp->rcq, &cqe, 1, true) < 0)
            return; /* overrun: the other entries are lost as well */
    }
}

/* 0 once the owner destroys the queue pair. The owner does not take the lock, since it must not wait for a peer that
 * holds it. */
static uint32_t qpn_of(const struct sn_qp_shm *qp)
{
    return __atomic_load_n(&qp->qpn, __ATOMIC_ACQUIRE);
}

void sn_qp_shm_flush_recv(struct sn_world *world, struct sn_qp_shm *qp)
{
    uint32_t qpn = qpn_of(qp);

    if (qpn)
        flush_recv(world, qp, qpn);
}

bool sn_qp_shm_stop(struct sn_world *world, struct sn_qp_shm *qp, int event)
{
    uint32_t was, qpn;

    sn_lock_take(&qp->lock);
    was = qp->state;
    qpn = qpn_of(qp);
    if (was != IBV_QPS_RESET)
        __atomic_store_n(&qp->state, IBV_QPS_ERR, __ATOMIC_SEQ_CST);
    sn_lock_drop(&qp->lock);
    if (was == IBV_QPS_RESET || was == IBV_QPS_ERR || qpn == 0)
        return false;
    if (event >= 0)
        sn_async_raise(world, qp->ctx, (uint32_t)event, qpn);
    if (qp->srq != SN_NONE)
        sn_async_raise(world, qp->ctx, IBV_EVENT_QP_LAST_WQE_REACHED, qpn);
    return true;
}

void sn_qp_shm_fail(struct sn_world *world, struct sn_qp_shm *qp, int event)
{
    if (sn_qp_shm_stop(world, qp, event))
        sn_qp_shm_flush_recv(world, qp);
}

int sn_qp_error(struct sn_world *world, uint32_t qpn)
{
    struct sn_qp_shm *qp = sn_qp_find(world, qpn);

    if (!qp)
        return -ENOENT;
    sn_qp_shm_fail(world, qp, IBV_EVENT_QP_FATAL);
    return 0;
}
