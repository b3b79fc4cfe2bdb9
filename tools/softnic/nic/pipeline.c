/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/nic/pipeline.h"

#include <stdlib.h>

#include "tools/softnic/nic/atomic_batch.h"
#include "tools/softnic/nic/execute.h"
#include "tools/softnic/nic/responder.h"
#include "tools/softnic/nic/srd.h"
#include "tools/softnic/world/lock.h"
#include "tools/softnic/world/object.h"

enum {
    /* After this many, no request begins until the pipeline is empty: ibv_dereg_mr waits until each initiator has left
     * once. */
    BEGUN_MOST = 512,
    /* longer writes are pipelined from device memory only, since a CPU would have to copy the others */
    SHORT_BYTES = 16384,
    ROW_MOST = 64,     /* how far to look for atomics that can share a read */
    PUT_LEAST = 1024,  /* shorter writes may be flags, which must not overtake earlier requests */
    ROW_BYTES = 65536, /* longer writes do not overtake while locks are held */
    /* no lock is taken while more bytes than this are queued before the atomics: about 5 us between GPUs */
    AHEAD_BYTES = 1 << 20,
    WORD = 8,
    GROUP_MOST = 32, /* runs or words that share a call of the driver */
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
                             w->dest_qpn, c->dst);
}

/* Receives that only this queue pair can take, and that neither its pipeline nor `taken` other requests will. With SRD
 * other queue pairs may take them, too; the request then waits. */
static bool receive_is_left(const struct sn_qp *qp, const struct sn_qp_shm *target, unsigned taken)
{
    return target->srq == SN_NONE &&
           __atomic_load_n(&target->rq.tail, __ATOMIC_RELAXED) - __atomic_load_n(&target->rq.head, __ATOMIC_RELAXED) >
               qp->receives_due + taken;
}

/* Fill in the buffers of a write, and tell whether it may be queued now, after others that take so many receives. */
static bool may_write(struct sn_qp *qp, struct sn_qp_shm *target, const struct sn_wqe *w, unsigned taken,
                      struct sn_copy *c)
{
    /* Without a receive nothing is written: the request is tried again when it is the first. */
    if (!find_spans(qp, target, w, c) || (sn_takes_receive(w->opcode) && !receive_is_left(qp, target, taken)) ||
        sn_batch_covers(qp, c->dst_proc, c->dst))
        return false;
    for (uint32_t i = 0; i < c->src_count; i++)
        if (sn_batch_covers(qp, c->src_proc, &c->src[i]))
            return false;
    return true;
}

/* Count a request into the pipeline. */
static void count_in(struct sn_qp *qp, struct sn_wqe *w)
{
    bool atomic = sn_is_atomic(w->opcode);

    qp->reads_open += atomic;
    qp->receives_due += sn_takes_receive(w->opcode);
    qp->pipeline_bytes += atomic ? 0 : w->length;
    w->copying = true;
}

/* May the request at this position start together with those before it? */
static bool follows(struct sn_qp *qp, uint32_t at)
{
    const struct sn_wqe *w = sn_wqe_at(qp, at);

    return w->length <= ROW_BYTES && !(w->flags & IBV_SEND_FENCE) && may_start(qp, w);
}

static bool overlap(const struct sn_span *a, const struct sn_span *b)
{
    return a->addr < b->addr + b->length && b->addr < a->addr + a->length;
}

/* A write in a row. A put is a write that may overtake others: it joins the copy of an earlier put. A word, from host
 * memory (a flag), joins a word before it unless another write is between them. */
struct write {
    uint32_t at; /* position of the request */
    bool is_put, is_word;
    struct sn_span dst, src; /* src: set for puts and words, and for any write within one process */
    struct write *run;       /* contiguous puts form a run: its write with the lowest address */
    uint64_t run_bytes;      /* first write of a run: bytes of all writes of the run */
    bool run_is_queued;      /* first write of a run: the run is queued */
};

/* Requests that begin together: first writes, in their order except for puts that overtake; then atomics. */
struct row {
    struct sn_copy c; /* large, so only members that a copy reads are filled in */
    struct write writes[ROW_MOST];
    unsigned write_count, atomics, receives;
};

static bool is_put(const struct sn_wqe *w, const struct sn_copy *c)
{
    return w->length >= PUT_LEAST && w->length <= ROW_BYTES && c->src_count == 1 && c->src[0].kind != SN_MEM_HOST;
}

static bool is_word(const struct sn_copy *c)
{
    return c->length == WORD && c->dst[0].addr % WORD == 0 && c->src_count == 1 && c->src[0].kind == SN_MEM_HOST;
}

/* Does the order between the write in row->c and an earlier write in the row matter? */
static bool meets_another(const struct row *row)
{
    const struct sn_copy *c = &row->c;
    bool loop = c->src_proc == c->dst_proc;

    if (loop && c->src_count != 1 && row->write_count)
        return true;
    for (unsigned i = 0; i < row->write_count; i++) {
        const struct write *other = &row->writes[i];

        if (overlap(&other->dst, c->dst) || (loop && (overlap(&other->dst, c->src) || overlap(&other->src, c->dst))))
            return true;
    }
    return false;
}

static int by_target(const void *a, const void *b)
{
    const struct write *x = *(struct write *const *)a, *y = *(struct write *const *)b;

    return x->dst.addr < y->dst.addr ? -1 : x->dst.addr > y->dst.addr;
}

/* Does the memory of b continue that of a on both sides? */
static bool continues(const struct write *a, const struct write *b)
{
    return a->is_put && b->is_put && a->dst.mr == b->dst.mr && a->src.mr == b->src.mr &&
           a->dst.addr + a->dst.length == b->dst.addr && a->src.addr + a->src.length == b->src.addr;
}

static void find_runs(struct row *row)
{
    struct write *sorted[ROW_MOST];

    for (unsigned i = 0; i < row->write_count; i++)
        sorted[i] = &row->writes[i];
    qsort(sorted, row->write_count, sizeof(sorted[0]), by_target);
    for (unsigned i = 0; i < row->write_count; i++) {
        struct write *write = sorted[i];

        write->run = i && continues(sorted[i - 1], write) ? sorted[i - 1]->run : write;
        write->run_bytes = 0;
        write->run_is_queued = false;
        write->run->run_bytes += write->dst.length;
    }
}

/* Queue a write; if it is a put, its whole run. Return as enqueue in device_mem.h. */
static int enqueue(struct sn_qp *qp, struct sn_qp_shm *target, struct row *row, const struct write *write)
{
    struct sn_wqe *w = sn_wqe_at(qp, write->at);
    struct sn_copy *c = &row->c;

    find_spans(qp, target, w, c); /* this succeeded when the row was made */
    if (write->is_put) {
        c->dst[0] = write->run->dst;
        c->src[0] = write->run->src;
        c->length = c->dst[0].length = c->src[0].length = write->run->run_bytes;
    }
    return sn_device_mem->enqueue(c, &qp->queue, &w->queued_copy);
}

/* May this write join the group of a put or word before it? */
static bool joins(const struct write *lead, const struct write *write)
{
    return lead->is_put == write->is_put && lead->is_word == write->is_word && lead->dst.mr == write->dst.mr &&
           (lead->is_word || lead->src.mr == write->src.mr);
}

/* Queue one copy of several runs. To a put join all other runs of puts between the same two regions; to a word join the
 * words after it, up to the next write of another kind. Return as enqueue in device_mem.h; SN_COPY_BUSY also if nothing
 * joins. */
static int enqueue_group(struct sn_qp *qp, struct sn_qp_shm *target, struct row *row, unsigned first)
{
    struct write *lead = &row->writes[first], *group[GROUP_MOST];
    struct sn_copy *c = &row->c;
    uint32_t n = 0;
    int r;

    if (!lead->is_put && !lead->is_word)
        return SN_COPY_BUSY;
    c->length = 0;
    for (unsigned i = first; i < row->write_count && n < GROUP_MOST; i++) {
        struct write *run = row->writes[i].run;

        if (run->run_is_queued)
            continue;
        if (!joins(lead, run) && lead->is_put)
            continue;
        if (!joins(lead, run))
            break;
        c->dst[n] = run->dst;
        c->src[n] = run->src;
        c->dst[n].length = c->src[n].length = run->run_bytes;
        c->length += run->run_bytes;
        run->run_is_queued = true;
        group[n++] = run;
    }
    c->world = sn_self->world;
    c->self = c->src_proc = sn_self->proc;
    c->dst_proc = target->owner - 1;
    c->dst_count = c->src_count = n;
    r = n > 1 ? sn_device_mem->enqueue(c, &qp->queue, &sn_wqe_at(qp, lead->at)->queued_copy) : SN_COPY_BUSY;
    while (r == SN_COPY_BUSY && n)
        group[--n]->run_is_queued = false;
    return r;
}

/* Queue the writes of the row, which ends at `end`. Return the first position that is not in the queue, or `end`. Puts
 * after that position may be queued already, as part of the copy of an earlier put (`copied`). */
static uint32_t enqueue_writes(struct sn_qp *qp, struct sn_qp_shm *target, struct row *row, uint32_t end)
{
    bool full = false;

    find_runs(row);
    for (unsigned i = 0; i < row->write_count; i++) {
        struct write *write = &row->writes[i];
        struct sn_wqe *w = sn_wqe_at(qp, write->at);

        w->copied = write->run->run_is_queued;
        w->queue_error = 0;
        if (full || w->copied)
            continue;
        w->queue_error = enqueue_group(qp, target, row, i);
        if (w->queue_error == SN_COPY_BUSY)
            w->queue_error = enqueue(qp, target, row, write);
        full = w->queue_error > 0;
        if (full)
            end = write->at;
        write->run->run_is_queued = !full;
    }
    return end;
}

/* Take the request at this position into the row, if it may be there: a write, or an atomic whose word is known. */
static bool take(struct sn_qp *qp, struct sn_qp_shm *target, struct row *row, uint32_t at)
{
    const struct sn_wqe *w = sn_wqe_at(qp, at);
    bool put;

    if (sn_is_atomic(w->opcode)) {
        bool known = sn_batch_knows(qp, target, at, row->atomics);

        row->atomics += known;
        return known;
    }
    if (!may_write(qp, target, w, row->receives, &row->c) || meets_another(row))
        return false;
    put = is_put(w, &row->c);
    if (row->atomics && !put)
        return false;
    if (!w->copied)
        row->writes[row->write_count++] = (struct write){
            .at = at, .is_put = put, .is_word = is_word(&row->c), .dst = row->c.dst[0], .src = row->c.src[0]};
    row->receives += sn_takes_receive(w->opcode);
    return true;
}

/* Start the requests from `at` on that need not wait for those before them. Return how many are in the pipeline now. */
static unsigned start_row(struct sn_qp *qp, struct sn_qp_shm *target, uint32_t at, uint32_t tail)
{
    uint32_t most = sn_qp_is_srd(qp) ? 1 : ROW_MOST, end = at;
    struct row row; /* large */

    row.write_count = row.atomics = row.receives = 0;
    while (end != tail && end - at < most && (end == at || follows(qp, end)) && take(qp, target, &row, end))
        end++;
    end = enqueue_writes(qp, target, &row, end);
    sn_batch_change(qp, target, at, end);
    for (uint32_t i = at; i != end; i++)
        count_in(qp, sn_wqe_at(qp, i));
    return end - at;
}

/* Return whether the words of some atomics are being read. The first one is in the pipeline then. */
static bool start_reading(struct sn_qp *qp, struct sn_qp_shm *target, uint32_t at, uint32_t tail)
{
    uint32_t end = at + 1;

    while (end != tail && end - at < ROW_MOST && follows(qp, end))
        end++;
    if (qp->pipeline_bytes > AHEAD_BYTES || !sn_batch_read(qp, target, at, end))
        return false;
    count_in(qp, sn_wqe_at(qp, at));
    return true;
}

/* Start the request at this position, and others after it. Return how many. */
static unsigned start(struct sn_qp *qp, struct sn_qp_shm *target, uint32_t at, uint32_t tail)
{
    unsigned n = start_row(qp, target, at, tail);

    return n || !sn_is_atomic(sn_wqe_at(qp, at)->opcode) ? n : start_reading(qp, target, at, tail);
}

/* [in-use] for both sides' buffers, from the first request in the pipeline to the last; see exec_counted in run.c
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
            n = start(qp, target, at, tail);
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
    else if (w->copied || w->queue_error)
        r = w->queue_error;
    else
        r = sn_device_mem->queued_done(&qp->queue, &w->queued_copy, ask);
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
