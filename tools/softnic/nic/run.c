/* SPDX-License-Identifier: Apache-2.0 */
/* Running a send queue: execute, complete and fail requests in order. On SRD another request may come to the front
 * (srd.h), and one that cannot be executed now lets others pass. */
#include "tools/softnic/nic/atomic_batch.h"
#include "tools/softnic/nic/execute.h"
#include "tools/softnic/nic/pipeline.h"
#include "tools/softnic/nic/queue_pair.h"
#include "tools/softnic/nic/srd.h"
#include "tools/softnic/world/lock.h"
#include "tools/softnic/world/queues.h"
#include "tools/softnic/world/wake.h"

enum {
    RUN_BATCH_BYTES = 4 << 20, /* after this many, other queue pairs of the engine get a turn */
    LIGHT_BYTES = 16384,       /* some 2 us of copying */
    BUSY_POLL_NS = 2000,       /* device copies take some 10 us */
    PIPELINE_POLL_NS = 1000,   /* time between two checks whether a copy is done; a check takes a tenth of that */
    RETRY_FIRST_NS = 50000,
    RETRY_MAX_NS = 2000000,
    RNR_FOREVER = 7,
};

static uint32_t wc_opcode(uint32_t wr_opcode)
{
    switch (wr_opcode) {
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        return IBV_WC_RDMA_WRITE;
    case IBV_WR_RDMA_READ:
        return IBV_WC_RDMA_READ;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
        return IBV_WC_COMP_SWAP;
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        return IBV_WC_FETCH_ADD;
    case IBV_WR_BIND_MW:
        return IBV_WC_BIND_MW;
    case IBV_WR_LOCAL_INV:
        return IBV_WC_LOCAL_INV;
    default:
        return IBV_WC_SEND;
    }
}

static bool is_read(const struct sn_wqe *w)
{
    return w->opcode == IBV_WR_RDMA_READ || w->opcode == IBV_WR_ATOMIC_CMP_AND_SWP ||
           w->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

/* Report a completion to the initiator. Its position frees this and all earlier requests once it is polled. */
static void complete(struct sn_qp *qp, struct sn_wqe *w, uint32_t position)
{
    struct sn_counters *count = &sn_ctx_dev(qp->ctx)->counters;
    struct sn_cqe cqe = {.wr_id = w->wr_id,
                         .status = w->status,
                         .opcode = wc_opcode(w->opcode),
                         .byte_len = (uint32_t)w->length,
                         .qp_num = qp->qpn,
                         .src_qp = w->dest_qpn,
                         .vendor_err = w->status ? w->opcode : 0,
                         .queue_upto = position + 1};

    if ((w->status == IBV_WC_SUCCESS && !(w->flags & IBV_SEND_SIGNALED)) ||
        sn_device_is_dead(sn_self->world, qp->ctx->dev))
        return;
    if (sn_qp_is_srd(qp))
        sn_srd_cqe(w, &cqe);
    cqe.time_ns = sn_now_ns();
    sn_count(&count->cqes_send, 1);
    if (w->status != IBV_WC_SUCCESS)
        sn_count(w->status == IBV_WC_WR_FLUSH_ERR ? &count->flushed : &count->errors, 1);
    if (sn_cq_push(sn_self->world, qp->shm->scq, &cqe, 1, false) < 0)
        sn_qp_shm_fail(sn_self->world, qp->shm, IBV_EVENT_QP_FATAL);
}

void sn_qp_fail(struct sn_qp *qp, int event)
{
    /* [flush-due] set before the error state; pairs with sn_post_recv (post.c), which finds the error state and then
     * looks here. */
    __atomic_store_n(&qp->flush_due, true, __ATOMIC_SEQ_CST);
    sn_qp_shm_stop(sn_self->world, qp->shm, event);
}

/* Stop the send queue alone; ibv_modify_qp starts it again. */
static void send_queue_stop(struct sn_qp_shm *shm)
{
    uint32_t state;

    sn_lock_take(&shm->lock);
    state = __atomic_load_n(&shm->state, __ATOMIC_SEQ_CST);
    if (state == IBV_QPS_RTS || state == IBV_QPS_SQD)
        __atomic_store_n(&shm->state, IBV_QPS_SQE, __ATOMIC_SEQ_CST);
    sn_lock_drop(&shm->lock);
}

/* After a failed request an RC connection fails too. Without acknowledgements the receiving half continues, and SRD
 * goes on as a whole. */
static void fail_after(struct sn_qp *qp, const struct sn_wqe *w)
{
    if (w->status == IBV_WC_SUCCESS || sn_qp_is_srd(qp))
        return;
    if (sn_qp_is_unreliable(qp))
        send_queue_stop(qp->shm);
    else
        sn_qp_fail(qp, -1);
}

/* [flush-due] clear first, then empty the ring; pairs with sn_post_recv, which puts a receive into the ring first. One
 * of the two flushes it. */
static void flush_if_due(struct sn_qp *qp)
{
    if (!qp->flush_due)
        return;
    __atomic_store_n(&qp->flush_due, false, __ATOMIC_SEQ_CST);
    sn_qp_shm_flush_recv(sn_self->world, qp->shm);
}

/* A fence waits for the completion of earlier reads and atomics, or of everything earlier. */
static bool fence_holds(const struct sn_qp *qp, const struct sn_wqe *w)
{
    if (!(w->flags & IBV_SEND_FENCE))
        return false;
    return sn_self->world->config.fence_meaning == SN_FENCE_STRICT ? qp->exec != qp->done : qp->reads_open > 0;
}

/* The target does not answer: try again at growing intervals until the transport timeout. Return when; 0: give up. */
static uint64_t retry_at(struct sn_qp *qp, struct sn_wqe *w, uint64_t now)
{
    uint64_t cap = sn_self->world->config.retry_cap_ns, step;
    uint64_t patience = (4096ull << (qp->attr.timeout & 31)) * (qp->attr.retry_cnt + 1u);

    if (qp->attr.timeout == 0 || sn_qp_is_srd(qp) || patience > cap)
        patience = cap;
    if (!w->retrying) {
        w->retrying = true;
        w->retry_until = now + patience;
        sn_count(&sn_ctx_dev(qp->ctx)->counters.retries, 1);
    }
    if (now >= w->retry_until)
        return 0;
    step = RETRY_FIRST_NS + (patience - (w->retry_until - now)) / 8;
    if (step > RETRY_MAX_NS)
        step = RETRY_MAX_NS;
    return now + step < w->retry_until ? now + step : w->retry_until;
}

static uint64_t rnr_at(struct sn_qp *qp, struct sn_wqe *w, uint64_t now)
{
    const struct sn_qp_shm *target = &sn_self->world->qps[w->dest_qpn % SN_MAX_QPS];

    sn_count(&sn_ctx_dev(qp->ctx)->counters.rnr_naks, 1);
    if (w->rnr_left == UINT32_MAX)
        w->rnr_left = qp->attr.rnr_retry;
    if (qp->attr.rnr_retry != RNR_FOREVER && w->rnr_left-- == 0)
        return 0;
    return now + sn_rnr_ns(target->min_rnr_timer);
}

/* Without the model nothing is stamped and the clock is not read. With it, one reading serves for all requests due by
 * then. */
static bool is_early(uint64_t due, uint64_t *now)
{
    if (due > *now)
        *now = sn_now_ns();
    return due > *now;
}

/* [in-use] for the request's own buffers: odd before the keys are looked up, even after the copy; pairs with
 * sn_qp_initiators_wait. An asynchronous copy keeps it odd. */
static int exec_counted(struct sn_qp *qp, struct sn_wqe *w)
{
    int r;

    if (!w->copying)
        __atomic_store_n(&qp->runs, qp->runs + 1, __ATOMIC_SEQ_CST);
    r = sn_execute(qp, w);
    if (!w->copying)
        __atomic_store_n(&qp->runs, qp->runs + 1, __ATOMIC_RELEASE);
    return r;
}

static uint32_t writes_counted(struct sn_qp *qp, uint32_t tail)
{
    uint32_t n;

    __atomic_store_n(&qp->runs, qp->runs + 1, __ATOMIC_SEQ_CST);
    n = sn_execute_writes(qp, qp->exec, tail);
    __atomic_store_n(&qp->runs, qp->runs + 1, __ATOMIC_RELEASE);
    return n;
}

/* The target has not executed it. Return when to try again, or 0: it has failed for good. */
static uint64_t retry(struct sn_qp *qp, struct sn_wqe *w, int r)
{
    uint64_t at = r == SN_EXEC_UNKNOWN ? 0 : (r == SN_EXEC_RNR ? rnr_at : retry_at)(qp, w, sn_now_ns());
    const char *name = sn_ctx_dev(qp->ctx)->name;

    if (at)
        return at;
    if (r == SN_EXEC_UNKNOWN) {
        sn_log("queue pair %u on %s: there is no queue pair %u at the other end (destroyed, or its process died)",
               qp->qpn, name, w->dest_qpn);
        w->status = IBV_WC_REM_INV_RD_REQ_ERR;
    } else if (r == SN_EXEC_UNREACHABLE) {
        sn_log("queue pair %u on %s: retry exceeded: queue pair %u does not answer (process dead, link down, or not "
               "%s)",
               qp->qpn, name, w->dest_qpn, sn_qp_is_srd(qp) ? "ready to receive, or another qkey" : "connected back");
        w->status = sn_qp_unanswered(qp);
    } else {
        sn_log("queue pair %u: receiver not ready: queue pair %u has no receive posted after %u retries", qp->qpn,
               w->dest_qpn, qp->attr.rnr_retry);
        w->status = IBV_WC_RNR_RETRY_EXC_ERR;
    }
    return 0;
}

/* Execute the request at qp->exec. Return 0 when it has ended (with any status), else when to try again. */
static uint64_t execute(struct sn_qp *qp, struct sn_wqe *w)
{
    uint64_t at;
    int r;

    if (w->lost && w->status == IBV_WC_SUCCESS && !sn_qp_is_unreliable(qp)) {
        sn_log("queue pair %u on %s: retry exceeded: lost %u times in a row (the loss that was asked for)", qp->qpn,
               sn_ctx_dev(qp->ctx)->name, qp->attr.retry_cnt + 1u);
        w->status = sn_qp_unanswered(qp);
    }
    if (w->status != IBV_WC_SUCCESS) /* lost, or refused by sn_wqe_check */
        r = 0;
    else
        r = exec_counted(qp, w);
    if (r == SN_EXEC_BUSY || r == SN_EXEC_CROWDED)
        return sn_now_ns() + BUSY_POLL_NS;
    at = r ? retry(qp, w, r) : 0;
    if (at)
        return at;
    fail_after(qp, w);
    return 0;
}

/* Stage two: complete executed requests. */
static uint64_t run_complete(struct sn_qp *qp)
{
    uint64_t now = 0;

    while (qp->done != qp->exec) {
        struct sn_wqe *w;

        if (sn_qp_is_srd(qp))
            sn_srd_next_done(qp);
        w = sn_wqe_at(qp, qp->done);
        if (is_early(w->due_done, &now))
            return w->due_done;
        if (sn_execute_finish(qp, w) == SN_EXEC_BUSY)
            return sn_now_ns() + BUSY_POLL_NS;
        if (w->status != IBV_WC_WR_FLUSH_ERR)
            fail_after(qp, w);
        qp->reads_open -= is_read(w);
        complete(qp, w, qp->done);
        if (w->status != IBV_WC_SUCCESS)
            flush_if_due(qp);
        __atomic_store_n(&qp->done, qp->done + 1, __ATOMIC_RELEASE);
    }
    return UINT64_MAX;
}

static bool result_is_copying(struct sn_qp *qp)
{
    return qp->done != qp->exec && sn_wqe_at(qp, qp->done)->copying;
}

bool sn_qp_copying(struct sn_qp *qp)
{
    return qp->in_pipeline || result_is_copying(qp) || (qp->exec != qp->tail && sn_wqe_at(qp, qp->exec)->copying);
}

bool sn_qp_drained(struct sn_qp *qp)
{
    return qp->exec == qp->done && !sn_qp_copying(qp);
}

/* Start more asynchronous copies and retire those that finished. Return when to look again, or 0: the pipeline is
 * empty. */
static uint64_t run_pipeline(struct sn_qp *qp, uint32_t tail)
{
    uint64_t now = 0;

    for (;;) {
        bool started = sn_pipeline_start(qp, tail);

        if (!qp->in_pipeline)
            return 0;
        while (qp->in_pipeline) {
            struct sn_wqe *w = sn_wqe_at(qp, qp->exec);
            int r;

            if (w->copied && is_early(w->due_exec, &now))
                return w->due_exec;
            r = sn_pipeline_retire(qp, w, !started);
            if (r == SN_EXEC_RNR) {
                w->due_exec = retry(qp, w, r);
                if (w->due_exec)
                    continue;
                r = sn_pipeline_retire(qp, w, !started); /* no retries are left: the request has failed, so retire it */
            }
            if (r == SN_EXEC_BUSY)
                return sn_now_ns() + PIPELINE_POLL_NS;
            if (r == SN_EXEC_WORD_KNOWN)
                break; /* now it can begin, and others after it */
            fail_after(qp, w);
            if (w->status != IBV_WC_SUCCESS)
                w->due_done = 0;
            qp->exec++;
        }
    }
}

/* Stage one: execute. Return when to come back; UINT64_MAX when everything posted is executed. */
static uint64_t run_execute(struct sn_qp *qp, uint32_t tail)
{
    uint64_t bytes = 0, now = 0, at;
    uint32_t n;

    while (qp->exec != tail) {
        struct sn_wqe *w;
        uint32_t state;

        at = run_pipeline(qp, tail);
        if (at || qp->exec == tail)
            return at ? at : UINT64_MAX;
        if (sn_qp_is_srd(qp))
            sn_srd_next_exec(qp, qp->exec, tail);
        w = sn_wqe_at(qp, qp->exec);
        state = sn_qp_state(qp);
        /* Wait while stage two copies a result. While the queue pair is closing, nothing new begins. */
        if (result_is_copying(qp) || (__atomic_load_n(&qp->closing, __ATOMIC_RELAXED) && !w->copying))
            return UINT64_MAX;
        if ((state == IBV_QPS_ERR || state == IBV_QPS_SQE) && !w->copying) {
            if (w->status == IBV_WC_SUCCESS)
                w->status = IBV_WC_WR_FLUSH_ERR;
            w->due_done = 0;
        } else {
            if (state == IBV_QPS_SQD && !w->copying)
                return UINT64_MAX; /* modify_qp kicks it again */
            if (is_early(w->due_exec, &now))
                return w->due_exec;
            if (fence_holds(qp, w)) {
                at = run_complete(qp);
                if (fence_holds(qp, w))
                    return at;
                continue; /* now it may be pipelined */
            }
            if (qp->exec + 1 != tail && (n = writes_counted(qp, tail)) > 0) {
                qp->exec += n;
                continue;
            }
            at = execute(qp, w);
            if (at && sn_qp_is_srd(qp) && !w->copying) {
                w->due_exec = at; /* others need not wait for it */
                continue;
            }
            if (at)
                return at;
            if (w->status != IBV_WC_SUCCESS)
                w->due_done = 0;
        }
        bytes += w->length;
        qp->reads_open += is_read(w);
        qp->exec++;
        if (bytes >= RUN_BATCH_BYTES)
            return 0;
    }
    return UINT64_MAX;
}

uint64_t sn_qp_run(struct sn_qp *qp)
{
    /* [sq-tail] acquire; pairs with sn_sq_commit_locked (post.c): the requests are complete. */
    uint32_t tail = __atomic_load_n(&qp->tail, __ATOMIC_ACQUIRE);
    uint64_t exec_at = run_execute(qp, tail);
    uint64_t done_at = run_complete(qp);

    qp->seen = tail;

    return exec_at < done_at ? exec_at : done_at;
}

/* Was work posted after the runner looked for it? */
static bool work_left_locked(const struct sn_qp *qp)
{
    return qp->exec != qp->tail && sn_qp_state(qp) != IBV_QPS_SQD;
}

/* Is the next piece of work short enough for a thread that polls for something else? */
static bool next_is_light(const struct sn_qp *qp)
{
    /* only a check is needed; but requests that wait for an empty pipeline must not wait for a poller, too */
    if (qp->in_pipeline)
        return qp->exec + qp->in_pipeline == qp->tail && !sn_batch_waits(qp);
    const struct sn_wqe *w = sn_wqe_at((struct sn_qp *)qp, qp->exec != qp->tail ? qp->exec : qp->done);

    return w->length <= LIGHT_BYTES && !w->copying;
}

/* Report this once. A queue pair that has left the SQD state meanwhile does not report it. */
static void report_drained_locked(struct sn_qp *qp)
{
    if (!sn_qp_drained(qp))
        return;
    qp->drain_due = false;
    if (sn_qp_state(qp) == IBV_QPS_SQD)
        sn_async_raise(sn_self->world, qp->ctx->index, IBV_EVENT_SQ_DRAINED, qp->qpn);
}

void sn_qp_hand_over_locked(struct sn_qp *qp, uint64_t at)
{
    qp->running = false;
    if (qp->drain_due)
        report_drained_locked(qp);
    if ((at == UINT64_MAX || (sn_qp_is_srd(qp) && qp->seen != qp->tail)) && work_left_locked(qp))
        at = 0;
    if (at == UINT64_MAX || (qp->closing && !sn_qp_copying(qp)))
        return; /* closing waits for a copy, whose memory is freed afterwards */
    qp->queued = true;
    qp->light = at != 0 && next_is_light(qp);
    if (sn_engine_push(&qp->ctx->engine, qp, at) < 0) {
        sn_log("queue pair %u: its engine cannot take it over (out of memory or threads)", qp->qpn);
        qp->queued = false;
    }
}

void sn_qp_run_taken(struct sn_qp *qp)
{
    uint64_t at;

    pthread_mutex_lock(&qp->mutex);
    qp->queued = false;
    if (qp->closing && !sn_qp_copying(qp)) {
        pthread_mutex_unlock(&qp->mutex);
        return;
    }
    qp->running = true;
    pthread_mutex_unlock(&qp->mutex);
    at = sn_qp_run(qp);
    pthread_mutex_lock(&qp->mutex);
    sn_qp_hand_over_locked(qp, at);
    pthread_mutex_unlock(&qp->mutex);
}

void sn_qp_kick(struct sn_qp *qp)
{
    pthread_mutex_lock(&qp->mutex);
    if (qp->queued && sn_engine_remove(&qp->ctx->engine, qp))
        qp->queued = false;
    if (!qp->running && !qp->queued && !qp->closing) {
        qp->running = true;
        sn_qp_hand_over_locked(qp, sn_qp_run(qp));
    }
    pthread_mutex_unlock(&qp->mutex);
}
