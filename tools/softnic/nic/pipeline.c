/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/nic/pipeline.h"

#include "tools/softnic/nic/atomic_batch.h"
#include "tools/softnic/nic/execute.h"
#include "tools/softnic/nic/responder.h"
#include "tools/softnic/nic/srd.h"
#include "tools/softnic/world/lock.h"
#include "tools/softnic/world/object.h"

enum {
    /* After so many, no request begins until the pipeline is empty: ibv_dereg_mr waits until each initiator has left
     * once. */
    BEGUN_MOST = 512,
    /* longer writes are pipelined from device memory only, since a CPU would have to copy the others */
    SHORT_BYTES = 16384,
    ROW_MOST = 64,     /* how far to look for atomics that can share a read */
    ROW_BYTES = 65536, /* longer writes do not pass while locks are held; */
    /* nor are locks taken while more than this, about 5 us between GPUs, is queued before the atomics */
    AHEAD_BYTES = 1 << 20,
};

bool sn_pipeline_suits(const struct sn_wqe *w)
{
    const struct sn_mr_shm *to, *from = NULL;

    if ((w->opcode != IBV_WR_RDMA_WRITE && w->opcode != IBV_WR_RDMA_WRITE_WITH_IMM && !sn_is_atomic(w->opcode)) ||
        !w->length || !sn_device_mem)
        return false;
    to = sn_mr_find(sn_self->world, w->rkey);
    if (!to || to->kind == SN_MEM_HOST || (to->owner != sn_self->proc + 1 && sn_device_mem->owner_only(to)))
        return false;
    if (w->length > SHORT_BYTES)
        from = sn_mr_find(sn_self->world, w->sge[0].key);
    return w->length <= SHORT_BYTES || (from && from->kind != SN_MEM_HOST);
}

/* May w start now? A fence waits for earlier requests, or by the specification only for reads and atomics. */
static bool may_start(const struct sn_qp *qp, const struct sn_wqe *w)
{
    bool fence = w->flags & IBV_SEND_FENCE, strict = sn_self->world->config.fence_meaning == SN_FENCE_STRICT;

    if (sn_qp_is_unreliable(qp) || !sn_pipeline_suits(w) || w->status != IBV_WC_SUCCESS || w->lost || w->copying)
        return false;
    if (fence && (qp->reads_open || (strict && (qp->in_pipeline || qp->exec != qp->done))))
        return false;
    if (sn_qp_state(qp) != IBV_QPS_RTS || __atomic_load_n(&qp->closing, __ATOMIC_RELAXED))
        return false;
    return w->due_exec == 0 || w->due_exec <= sn_now_ns();
}

/* Fill in the buffers of both sides, or return false: executing it alone logs what is wrong with them. */
static bool find_spans(struct sn_qp *qp, struct sn_qp_shm *target, const struct sn_wqe *w, struct sn_copy *c)
{
    c->world = sn_self->world;
    c->self = c->src_proc = sn_self->proc;
    c->dst_proc = target->owner - 1;
    c->length = w->length;
    c->src_count = 0;
    for (uint32_t i = 0; i < w->num_sge; i++) {
        const struct sn_sge *sge = &w->sge[i];

        if (sge->length == 0)
            continue;
        if (w->flags & IBV_SEND_INLINE)
            c->src[c->src_count++] = (struct sn_span){.addr = sge->addr, .length = sge->length, .mr = SN_NONE};
        else if (!sn_responder_span(sge->key, sn_self->proc, qp->pd, sge->addr, sge->length, 0, 0,
                                    &c->src[c->src_count++]))
            return false;
    }
    c->dst_count = 1;
    return (target->access & IBV_ACCESS_REMOTE_WRITE) &&
           sn_responder_span(w->rkey, c->dst_proc, target->pd, w->raddr, w->length, IBV_ACCESS_REMOTE_WRITE,
                             target->qpn, c->dst);
}

/* Receives that only this queue pair can take. Of SRD others may take them too, and the request then waits. */
static bool receive_is_left(const struct sn_qp *qp, const struct sn_qp_shm *target)
{
    return target->srq == SN_NONE &&
           __atomic_load_n(&target->rq.tail, __ATOMIC_RELAXED) - __atomic_load_n(&target->rq.head, __ATOMIC_RELAXED) >
               qp->receives_due;
}

/* Return whether w is in the pipeline. */
static bool start(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w)
{
    struct sn_copy c; /* large: only what a copy reads is filled in */
    bool tells = sn_takes_receive(w->opcode);

    if (!find_spans(qp, target, w, &c))
        return false;
    /* Without a receive nothing is written: the request is tried again when it is the first. */
    if (tells && !receive_is_left(qp, target))
        return false;
    if (sn_batch_covers(qp, c.dst_proc, c.dst))
        return false;
    w->queue_error = sn_device_mem->enqueue(&c, &qp->queue, &w->queued_copy);
    if (w->queue_error > 0)
        return false;
    qp->receives_due += tells;
    qp->pipeline_bytes += w->length;
    w->copying = true;
    return true;
}

/* Count the requests from `at` on that may start one after the other: atomics only, or writes as well. Return the
 * end. */
static uint32_t row_end(struct sn_qp *qp, uint32_t at, uint32_t tail, bool writes)
{
    uint32_t end = at + 1;

    for (; end != tail && end - at < ROW_MOST; end++) {
        const struct sn_wqe *w = sn_wqe_at(qp, end);

        if ((!writes && !sn_is_atomic(w->opcode)) || w->length > ROW_BYTES || (w->flags & IBV_SEND_FENCE) ||
            !may_start(qp, w))
            break;
    }
    return end;
}

/* Return how many are in the pipeline now. */
static unsigned start_atomics(struct sn_qp *qp, struct sn_qp_shm *target, uint32_t at, uint32_t tail)
{
    unsigned n;

    if (sn_batch_knows(qp, target, at))
        n = sn_batch_change(qp, target, at, row_end(qp, at, tail, false));
    else
        n = qp->pipeline_bytes <= AHEAD_BYTES && sn_batch_read(qp, target, at, row_end(qp, at, tail, true));
    for (unsigned i = 0; i < n; i++)
        sn_wqe_at(qp, at + i)->copying = true;
    qp->reads_open += n;
    return n;
}

/* [in-use] for both sides' buffers, from the first request in the pipeline to the last; see execute_counted in run.c
 * and responder.c. */
static bool enter_target(struct sn_qp *qp, struct sn_qp_shm *target)
{
    __atomic_store_n(&qp->runs, qp->runs + 1, __ATOMIC_SEQ_CST);
    qp->entry = sn_responder_enter(target);
    qp->pipeline_begun = 0;
    if (!qp->entry)
        __atomic_store_n(&qp->runs, qp->runs + 1, __ATOMIC_RELEASE);
    return qp->entry != 0;
}

static void leave_target(struct sn_qp *qp, struct sn_qp_shm *target)
{
    sn_responder_leave(target, qp->entry);
    __atomic_store_n(&qp->runs, qp->runs + 1, __ATOMIC_RELEASE);
}

/* The next request, if it may follow those in the pipeline, to the same target. */
static struct sn_wqe *next(struct sn_qp *qp, uint32_t at, uint32_t tail)
{
    struct sn_wqe *w;

    if (at == tail || sn_batch_waits(qp))
        return NULL;
    if (sn_qp_is_srd(qp))
        sn_srd_next_exec(qp, at, tail);
    w = sn_wqe_at(qp, at);
    return may_start(qp, w) && sn_wqe_same_target(qp, w, sn_wqe_at(qp, qp->exec)) ? w : NULL;
}

bool sn_pipeline_start(struct sn_qp *qp, uint32_t tail)
{
    uint32_t before = qp->in_pipeline, at = qp->exec + before;
    struct sn_qp_shm *target;
    struct sn_wqe *w = next(qp, at, tail);
    unsigned n = 1;

    if (!w || (before && qp->pipeline_begun >= BEGUN_MOST))
        return false;
    target = sn_qp_find(sn_self->world, w->dest_qpn);
    if (!target || (!before && !enter_target(qp, target)))
        return false;
    if (sn_responder_answers(qp, target, w))
        while (n && qp->pipeline_begun < BEGUN_MOST && (w = next(qp, at, tail))) {
            n = sn_is_atomic(w->opcode) ? start_atomics(qp, target, at, tail) : start(qp, target, w);
            qp->in_pipeline += n;
            qp->pipeline_begun += n;
            at += n;
        }
    if (!qp->in_pipeline)
        leave_target(qp, target);
    return qp->in_pipeline != before;
}

/* Set the outcome of a finished copy. After a failed request all others are flushed, whatever their copies did, and a
 * queue pair that is gone gets no completion. Return 0, or SN_EXEC_RNR: another initiator has taken the receive that
 * was there. */
static int finish(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w, int r)
{
    bool there = __atomic_load_n(&target->qpn, __ATOMIC_SEQ_CST) == w->dest_qpn, none;
    struct sn_recv recv;

    if (w->status != IBV_WC_SUCCESS) /* it has failed already, see run_pipeline in run.c */
        return 0;
    if (sn_qp_state(qp) == IBV_QPS_ERR) {
        w->status = IBV_WC_WR_FLUSH_ERR;
        return 0;
    }
    none = there && !r && sn_takes_receive(w->opcode) && sn_responder_receive(target, &recv);
    if (none && sn_qp_is_srd(qp)) {
        w->copied = true;
        return SN_EXEC_RNR;
    }
    if (!there || none) {
        sn_log("queue pair %u: queue pair %u went away while a write to it was under way", qp->qpn, w->dest_qpn);
        w->status = sn_qp_unanswered(qp);
        return 0;
    }
    if (sn_takes_receive(w->opcode))
        w->recv_wr_id = recv.wr_id;
    if (sn_responder_result(qp, target, w, r)) {
        sn_log("queue pair %u: the process of queue pair %u went away while a write to it was under way", qp->qpn,
               w->dest_qpn);
        w->status = sn_qp_unanswered(qp);
    }
    if (w->status == IBV_WC_SUCCESS)
        sn_responder_arrived(qp, target, w);
    return 0;
}

int sn_pipeline_retire(struct sn_qp *qp, struct sn_wqe *w, bool ask)
{
    /* entered, so the slot in the table still belongs to the target */
    struct sn_qp_shm *target = &sn_self->world->qps[w->dest_qpn % SN_MAX_QPS];
    bool atomic = sn_is_atomic(w->opcode);
    int r;

    if (atomic)
        r = sn_batch_done(qp, w, ask);
    else if (w->copied)
        r = 0;
    else
        r = w->queue_error ? w->queue_error : sn_device_mem->queued_done(&qp->queue, &w->queued_copy, ask);
    if (r == SN_COPY_BUSY)
        return SN_EXEC_BUSY;
    if (r == SN_EXEC_WORD_KNOWN)
        qp->reads_open--;
    else if (finish(qp, target, w, r))
        return SN_EXEC_RNR;
    if (atomic)
        sn_batch_leave(qp, r == SN_EXEC_WORD_KNOWN);
    else
        qp->pipeline_bytes -= w->length;
    qp->receives_due -= sn_takes_receive(w->opcode);
    w->copying = false;
    if (--qp->in_pipeline == 0)
        leave_target(qp, target);
    return r == SN_EXEC_WORD_KNOWN ? r : 0;
}
