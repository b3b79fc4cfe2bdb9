/* SPDX-License-Identifier: Apache-2.0 */
/* Posting: ibv_post_send, ibv_post_recv, ibv_post_srq_recv, and the send queue they share with ibv_wr_* (wr.c). */
#include <stdlib.h>
#include <string.h>

#include "tools/softnic/nic/datagram.h"
#include "tools/softnic/nic/model.h"
#include "tools/softnic/nic/pipeline.h"
#include "tools/softnic/nic/srd.h"
#include "tools/softnic/nic/window.h"
#include "tools/softnic/verbs/qp.h"
#include "tools/softnic/verbs/srq.h"
#include "tools/softnic/world/queues.h"

/* Up to this size the posting thread moves the bytes itself (about 2 us). Above it the engine does, and posting returns
 * at once. */
enum { INLINE_RUN_BYTES = 16384 };
#define MAX_MESSAGE (1ull << 31)

struct sn_wqe *sn_sq_slot_locked(struct sn_qp *qp, uint32_t position)
{
    /* [sq-freed] acquire; pairs with the release in entries_free (cq.c): the completion that freed the entry was
     * polled. */
    if (position - __atomic_load_n(&qp->freed, __ATOMIC_ACQUIRE) >= qp->cap.max_send_wr)
        return NULL;
    return sn_wqe_at(qp, position);
}

int sn_post_begin_locked(struct sn_qp *qp)
{
    /* When the queue is empty, begin again at its first entry, which may be in a cache. A runner may still read the
     * last entry. */
    if (!qp->running && qp->done == qp->tail && __atomic_load_n(&qp->freed, __ATOMIC_ACQUIRE) == qp->tail && !qp->turn)
        qp->sq_start = qp->tail;
    switch (sn_qp_state(qp)) {
    case IBV_QPS_RTS:
    case IBV_QPS_SQD:
        return 0;
    case IBV_QPS_SQE:
    case IBV_QPS_ERR: /* requests are flushed; but EFA's driver refuses them at once */
        return sn_qp_is_srd(qp) ? EINVAL : 0;
    default:
        return EINVAL;
    }
}

void sn_wqe_init(struct sn_qp *qp, struct sn_wqe *w, uint32_t opcode, uint32_t flags)
{
    w->opcode = opcode;
    w->flags = flags | (qp->sig_all ? IBV_SEND_SIGNALED : 0);
    w->dest_qpn = qp->shm->dest_qpn;
    w->dest_dev = qp->shm->dest_dev;
    w->status = IBV_WC_SUCCESS;
    w->rnr_left = UINT32_MAX;
    w->copying = w->copied = w->retrying = false;
    w->bounce = NULL;
}

static bool sends_are_flushed(const struct sn_qp *qp)
{
    uint32_t state = sn_qp_state(qp);

    return state == IBV_QPS_ERR || state == IBV_QPS_SQE;
}

/* Can a copy engine make all the copies? Then the poster only starts them. */
static bool suit_pipeline(struct sn_qp *qp, uint32_t first)
{
    if (sn_qp_is_unreliable(qp))
        return false;
    for (; first != qp->tail; first++)
        if (!sn_pipeline_suits(sn_wqe_at(qp, first)))
            return false;
    return true;
}

/* When to run next: for the posted requests, or at the time planned before. SRD does not wait for the first request. */
static uint64_t srd_due(struct sn_qp *qp, uint32_t first, uint64_t at)
{
    for (uint32_t i = first; i != qp->tail; i++)
        if (sn_wqe_at(qp, i)->due_exec < at)
            at = sn_wqe_at(qp, i)->due_exec;
    qp->seen = qp->tail;
    return at;
}

void sn_sq_commit_locked(struct sn_qp *qp, uint32_t position)
{
    struct sn_counters *count = &sn_ctx_dev(qp->ctx)->counters;
    uint32_t first = qp->tail, fences = 0;
    uint64_t bytes = 0;
    uint64_t due, now, wake_at = UINT64_MAX;

    if (position == first)
        return;
    now = sn_now_ns();
    for (uint32_t i = first; i != position; i++) {
        struct sn_wqe *w = sn_wqe_at(qp, i);

        bytes += w->length;
        fences += !!(w->flags & IBV_SEND_FENCE);
        sn_model_stamp(qp, w, i, i == first, now);
    }
    sn_count(&count->doorbells, 1);
    sn_count(&count->send_wrs, position - first);
    if (fences)
        sn_count(&count->fences, fences);
    /* [sq-tail] release; pairs with sn_qp_run (run.c). */
    __atomic_store_n(&qp->tail, position, __ATOMIC_RELEASE);
    /* Take back a queue pair that only waits for a copy engine, since the new requests may follow that; on SRD also
     * because they may overtake. */
    if (!qp->running && qp->queued && (qp->in_pipeline || sn_qp_is_srd(qp)) && sn_engine_remove(&qp->ctx->engine, qp)) {
        qp->queued = false;
        wake_at = qp->wake_at;
    }
    if (qp->running || qp->queued || qp->closing)
        return; /* the runner looks again before it stops */
    qp->running = true;
    if (sn_qp_is_srd(qp)) {
        sn_qp_hand_over_locked(qp, srd_due(qp, first, wake_at));
        return;
    }
    due = sends_are_flushed(qp) ? 0 : sn_wqe_at(qp, first)->due_exec; /* 0: no delay of the model */
    /* Before it is due, nothing can be done for it, and the engine need not wake; but the pipeline must be checked
     * before that. */
    if (due == 0 && (bytes <= INLINE_RUN_BYTES || suit_pipeline(qp, first)))
        due = sn_qp_run(qp);
    else if (wake_at < due)
        due = wake_at;
    sn_qp_hand_over_locked(qp, due);
}

/* Copy the buffers, or inline data, into the request. Return 0 or EINVAL. */
static int wqe_buffers(struct sn_qp *qp, struct sn_wqe *w, const struct ibv_sge *sge, int num_sge)
{
    uint8_t *at = (uint8_t *)(w->sge + qp->cap.max_send_sge);

    w->length = 0;
    for (int i = 0; i < num_sge; i++) {
        w->sge[i] = (struct sn_sge){sge[i].addr, sge[i].length, sge[i].lkey};
        w->length += sge[i].length;
    }
    w->num_sge = (uint32_t)num_sge;
    if (!(w->flags & IBV_SEND_INLINE))
        return 0;
    if (w->length > qp->cap.max_inline_data)
        return EINVAL;
    for (int i = 0; i < num_sge; i++) {
        memcpy(at, (const void *)(uintptr_t)sge[i].addr, sge[i].length);
        at += sge[i].length;
    }
    w->sge[0] = (struct sn_sge){(uintptr_t)(at - w->length), (uint32_t)w->length, 0};
    w->num_sge = 1;
    return 0;
}

int sn_wqe_check(const struct sn_qp *qp, struct sn_wqe *w)
{
    bool atomic = w->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || w->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;

    if (sn_qp_is_srd(qp))
        return sn_srd_check(qp, w);
    if (sn_qp_is_ud(qp))
        return sn_ud_check(qp, w);
    if (qp->transport == SN_TRANSPORT_UC && (atomic || w->opcode == IBV_WR_RDMA_READ))
        return EINVAL;
    if ((w->flags & IBV_SEND_INLINE) && (atomic || w->opcode == IBV_WR_RDMA_READ))
        return EINVAL;
    return w->length > MAX_MESSAGE || (atomic && w->length != 8) ? EINVAL : 0;
}

/* Turn an ibv_send_wr into a send queue entry. Return 0, EINVAL or EOPNOTSUPP. */
static int wqe_fill(struct sn_qp *qp, struct sn_wqe *w, const struct ibv_send_wr *wr)
{
    bool atomic = wr->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || wr->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
    int r;

    if (wr->opcode > (qp->transport == SN_TRANSPORT_RC ? IBV_WR_SEND_WITH_INV : IBV_WR_ATOMIC_FETCH_AND_ADD))
        return EOPNOTSUPP;
    if (sn_qp_is_srd(qp) && wr->opcode != IBV_WR_SEND && wr->opcode != IBV_WR_SEND_WITH_IMM) {
        sn_log("queue pair %u: SRD: ibv_post_send is for sends only; opcode %u goes through ibv_wr_*", qp->qpn,
               wr->opcode);
        return EINVAL;
    }
    if (wr->num_sge < 0 || (uint32_t)wr->num_sge > qp->cap.max_send_sge)
        return EINVAL;
    sn_wqe_init(qp, w, wr->opcode, wr->send_flags);
    w->wr_id = wr->wr_id;
    w->imm = wr->imm_data;
    if (sn_qp_is_datagram(qp)) {
        if (wr->wr.ud.ah)
            sn_wqe_to(qp, w, wr->wr.ud.ah, wr->wr.ud.remote_qpn, wr->wr.ud.remote_qkey);
    } else if (wr->opcode == IBV_WR_BIND_MW) {
        r = sn_window_bind_fill(qp, w, wr->bind_mw.mw, wr->bind_mw.rkey, &wr->bind_mw.bind_info);
        if (r)
            return r;
    } else if (wr->opcode == IBV_WR_LOCAL_INV) {
        w->rkey = wr->invalidate_rkey;
    } else if (atomic) {
        w->raddr = wr->wr.atomic.remote_addr;
        w->rkey = wr->wr.atomic.rkey;
        w->compare_add = wr->wr.atomic.compare_add;
        w->swap = wr->wr.atomic.swap;
    } else {
        w->raddr = wr->wr.rdma.remote_addr;
        w->rkey = wr->wr.rdma.rkey;
    }
    r = wqe_buffers(qp, w, wr->sg_list, sn_is_local(wr->opcode) ? 0 : wr->num_sge);
    return r ? r : sn_wqe_check(qp, w);
}

int sn_post_send(struct ibv_qp *ibv, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    struct sn_qp *qp = sn_qp_of(ibv);
    uint32_t position;
    int r;

    pthread_mutex_lock(&qp->mutex);
    r = sn_post_begin_locked(qp);
    position = qp->tail;
    for (; wr && r == 0; wr = wr->next) {
        struct sn_wqe *w = sn_sq_slot_locked(qp, position);

        r = w ? wqe_fill(qp, w, wr) : ENOMEM;
        if (r)
            break;
        position++;
    }
    if (r)
        *bad = wr;
    sn_sq_commit_locked(qp, position);
    pthread_mutex_unlock(&qp->mutex);
    return r;
}

static int sge_copy(struct sn_sge *to, const struct ibv_recv_wr *wr, uint32_t max_sge)
{
    if (wr->num_sge < 0 || (uint32_t)wr->num_sge > max_sge)
        return EINVAL;
    for (int i = 0; i < wr->num_sge; i++)
        to[i] = (struct sn_sge){wr->sg_list[i].addr, wr->sg_list[i].length, wr->sg_list[i].lkey};
    return 0;
}

int sn_post_recv(struct ibv_qp *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    struct sn_qp *qp = sn_qp_of(ibv);
    struct sn_counters *count = &sn_ctx_dev(qp->ctx)->counters;
    struct sn_sge sge[SN_MAX_SGE];
    uint32_t posted = 0;
    int r = ibv->srq || sn_qp_state(qp) == IBV_QPS_RESET ? EINVAL : 0;

    pthread_mutex_lock(&qp->mutex);
    for (; wr && r == 0; wr = wr->next) {
        if (qp->recv_posted - __atomic_load_n(&qp->recv_polled, __ATOMIC_RELAXED) >= qp->cap.max_recv_wr)
            r = ENOMEM;
        else
            r = sge_copy(sge, wr, qp->cap.max_recv_sge);
        if (r)
            break;
        if (sn_rq_push(sn_self->world, &qp->shm->rq, wr->wr_id, sge, (uint32_t)wr->num_sge)) {
            r = ENOMEM;
            break;
        }
        qp->recv_posted++;
        posted++;
    }
    if (r)
        *bad = wr;
    pthread_mutex_unlock(&qp->mutex);
    sn_count(&count->recv_wrs, posted);
    sn_count(&count->doorbells, posted != 0);
    /* In the error state posting stays allowed, and the receive is flushed. [flush-due] read the state first, then
     * whether the runner will flush; pairs with sn_qp_fail and flush_if_due in run.c. */
    if (sn_qp_state(qp) == IBV_QPS_ERR && !__atomic_load_n(&qp->flush_due, __ATOMIC_SEQ_CST))
        sn_qp_shm_flush_recv(sn_self->world, qp->shm);
    return r;
}

int sn_post_srq_recv(struct ibv_srq *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    struct sn_srq *srq = (struct sn_srq *)ibv;
    struct sn_counters *count = &sn_ctx_dev(sn_ctx_of(ibv->context))->counters;
    struct sn_sge sge[SN_MAX_SGE];
    uint32_t posted = 0;
    int r = 0;

    for (; wr && r == 0; wr = wr->next) {
        r = sge_copy(sge, wr, srq->max_sge);
        if (r == 0 && sn_rq_push(sn_self->world, &srq->shm->rq, wr->wr_id, sge, (uint32_t)wr->num_sge))
            r = ENOMEM;
        if (r)
            break;
        posted++;
    }
    if (r)
        *bad = wr;
    sn_count(&count->recv_wrs, posted);
    sn_count(&count->doorbells, posted != 0);
    return r;
}
