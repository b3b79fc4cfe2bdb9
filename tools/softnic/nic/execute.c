/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/nic/execute.h"

#include <stdlib.h>
#include <string.h>

#include "tools/softnic/memory/host_copy.h"
#include "tools/softnic/nic/datagram.h"
#include "tools/softnic/nic/responder.h"
#include "tools/softnic/nic/srd.h"
#include "tools/softnic/nic/window.h"
#include "tools/softnic/world/lock.h"
#include "tools/softnic/world/object.h"

enum {
    SPIN_BYTES = 16 << 10,
    SPIN_NS = 12000, /* about one small copy and its mark (test_cuda_rw.c prints the measured time) */
};

uint64_t sn_rnr_ns(uint32_t code)
{
    static const uint32_t us10[32] = {65536, 1,    2,    3,    4,    6,     8,     12,    16,    24,   32,
                                      48,    64,   96,   128,  192,  256,   384,   512,   768,   1024, 1536,
                                      2048,  3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152};

    return us10[code & 31] * 10000ull; /* IBTA table of RNR NAK timer values, in units of 10 us */
}

/* The request's own buffers. Return the number of spans, or -1 after setting the status. */
static int local_spans(struct sn_qp *qp, struct sn_wqe *w, uint32_t rights, struct sn_span *span)
{
    int n = 0;

    for (uint32_t i = 0; i < w->num_sge; i++) {
        const struct sn_sge *sge = &w->sge[i];

        if (sge->length == 0)
            continue;
        if (w->flags & IBV_SEND_INLINE) {
            span[n++] = (struct sn_span){.addr = sge->addr, .length = sge->length, .mr = SN_NONE};
        } else if (!sn_responder_span(sge->key, sn_self->proc, qp->pd, sge->addr, sge->length, rights, 0, &span[n++])) {
            sn_log("queue pair %u: local protection error: lkey 0x%x does not cover 0x%llx + %u%s", qp->qpn, sge->key,
                   (unsigned long long)sge->addr, sge->length, rights ? " for writing" : "");
            w->status = IBV_WC_LOC_PROT_ERR;
            return -1;
        }
    }
    return n;
}

static uint32_t spans_take(struct sn_span *to, const struct sn_span *from, uint32_t count)
{
    memcpy(to, from, count * sizeof(*to));
    return count;
}

static struct sn_copy *copy_move(struct sn_copy *place, const struct sn_copy *c)
{
    place->world = c->world;
    place->self = c->self;
    place->dst_proc = c->dst_proc;
    place->src_proc = c->src_proc;
    place->length = c->length;
    place->dst_count = spans_take(place->dst, c->dst, c->dst_count);
    place->src_count = spans_take(place->src, c->src, c->src_count);
    return place;
}

/* A copy of host memory is done when sn_copy_start() returns. One of device memory may go on, so its description must
 * stay: then it moves to `place`. Return where it is. */
static struct sn_copy *copy_keep(struct sn_copy *place, struct sn_copy *c)
{
    bool device = sn_spans_any_device(c->dst, c->dst_count) || sn_spans_any_device(c->src, c->src_count);

    return device ? copy_move(place, c) : c;
}

/* Copy result bytes that are in this process (bounce buffer, value of an atomic) into the request's buffers. */
static int result_copy(struct sn_qp *qp, struct sn_wqe *w, const void *from)
{
    struct sn_copy here, *c = &here; /* large, so only the members that are used are filled in */
    int n, r;

    if (w->copying) {
        r = sn_copy_poll(&qp->result);
        goto copied;
    }
    n = local_spans(qp, w, IBV_ACCESS_LOCAL_WRITE, c->dst);
    if (n < 0)
        return 0;
    c->dst_count = (uint32_t)n;
    c->dst_proc = c->src_proc = c->self = sn_self->proc;
    c->world = sn_self->world;
    c->src_count = 1;
    c->src[0] = (struct sn_span){.addr = (uintptr_t)from, .length = w->length, .mr = SN_NONE};
    c->length = w->length;
    r = sn_copy_start(copy_keep(&qp->result, c));
copied:
    w->copying = r == SN_COPY_BUSY;
    if (w->copying)
        return SN_EXEC_BUSY;
    if (r < 0)
        w->status = IBV_WC_LOC_PROT_ERR;
    return 0;
}

static void atomic_fill(struct sn_atomic *a, struct sn_wqe *w)
{
    a->cas = w->opcode == IBV_WR_ATOMIC_CMP_AND_SWP;
    a->compare_add = w->compare_add;
    a->swap = w->swap;
    a->found = &w->result;
}

/* An atomic on host memory is done at once, unless its lock is taken; then nothing is done yet. */
static int atomic_start(struct sn_qp *qp, struct sn_wqe *w, struct sn_copy *c)
{
    struct sn_atomic here; /* large, as *c */
    int r = SN_COPY_BUSY;

    if (c->dst[0].kind == SN_MEM_HOST) {
        atomic_fill(&here, w);
        sn_atomic_begin(&here, c);
        r = sn_atomic_step(&here);
    }
    if (r != SN_COPY_BUSY)
        return r;
    atomic_fill(&qp->atomic, w);
    return sn_copy_atomic(copy_move(&qp->copy, c), &qp->atomic);
}

static int exec_atomic(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w, struct sn_copy *c)
{
    int r;

    if (sn_responder_request_span(qp, target, w, &c->dst[0]))
        return 0;
    c->dst_count = 1;
    c->src_count = 0;
    r = atomic_start(qp, w, c);
    w->copying = r == SN_COPY_BUSY;
    if (w->copying)
        return SN_EXEC_BUSY;
    r = sn_responder_result(qp, target, w, r);
    if (r || w->status != IBV_WC_SUCCESS)
        return r;
    sn_responder_arrived(qp, target, w);
    return 0;
}

/* Wait a little for short device copies: handing over to the engine costs more. Not for those of an owner, which may
 * have many at a time. */
static int start_and_wait(struct sn_copy *c)
{
    int r = sn_copy_start(c);

    if (r == SN_COPY_BUSY && c->by == SN_BY_DEVICE && c->length <= SPIN_BYTES)
        for (uint64_t until = sn_now_ns() + SPIN_NS; r == SN_COPY_BUSY && sn_now_ns() < until;)
            r = sn_copy_poll(c);
    return r;
}

/* Move the data of a write, send or read. Under the model a read is only sampled into a bounce buffer. */
static int exec_copy(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w, struct sn_copy *c)
{
    bool read = w->opcode == IBV_WR_RDMA_READ, header = sn_qp_is_ud(qp);
    struct sn_recv recv;
    int n, r;

    n = local_spans(qp, w, read ? IBV_ACCESS_LOCAL_WRITE : 0, read ? c->dst : c->src + header);
    if (n < 0)
        return 0;
    *(read ? &c->dst_count : &c->src_count) = (uint32_t)n + header;
    if (header) {
        sn_ud_header(qp, target, w);
        c->src[0] = (struct sn_span){.addr = (uintptr_t)qp->header, .length = SN_GRH_BYTES, .mr = SN_NONE};
    }
    if (!sn_is_send(w->opcode)) {
        if (sn_responder_request_span(qp, target, w, read ? &c->src[0] : &c->dst[0]))
            return 0;
        *(read ? &c->src_count : &c->dst_count) = 1;
    }
    if (w->opcode == IBV_WR_SEND_WITH_INV && sn_responder_invalidate_check(qp, target, w))
        return 0;
    if (sn_takes_receive(w->opcode)) {
        r = sn_responder_receive(target, &recv);
        if (r)
            return r;
        w->recv_wr_id = recv.wr_id;
        if (sn_is_send(w->opcode) && sn_responder_receive_spans(qp, target, w, &recv, c))
            return 0;
    }
    if (read && w->due_done && w->length) {
        w->bounce = malloc(w->length);
        if (w->bounce) { /* without it the data comes early, which does less harm than failing */
            c->dst_count = 1;
            c->dst[0] = (struct sn_span){.addr = (uintptr_t)w->bounce, .length = w->length, .mr = SN_NONE};
        }
    }
    if (sn_qp_is_srd(qp))
        sn_srd_scatter(qp, c);
    r = start_and_wait(copy_keep(&qp->copy, c));
    w->copying = r == SN_COPY_BUSY;
    if (w->copying)
        return SN_EXEC_BUSY;
    r = sn_responder_result(qp, target, w, r);
    if (r == 0 && w->status == IBV_WC_SUCCESS)
        sn_responder_arrived(qp, target, w);
    return r;
}

/* The owner may be destroying the target meanwhile, and waits for this copy to end: then it gets no completion. */
static int exec_resume(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w)
{
    int r = sn_copy_poll(&qp->copy);

    if (r == SN_COPY_BUSY)
        return SN_EXEC_BUSY;
    w->copying = false;
    if (__atomic_load_n(&target->qpn, __ATOMIC_SEQ_CST) != w->dest_qpn)
        return SN_EXEC_UNREACHABLE;
    r = sn_responder_result(qp, target, w, r);
    if (r == 0 && w->status == IBV_WC_SUCCESS)
        sn_responder_arrived(qp, target, w);
    return r;
}

/* Fill in the spans of a write that may share a system call: short, one buffer, host memory, valid on both sides, and
 * due. Any other write is executed alone, which also logs what is wrong. */
static bool write_spans(struct sn_qp *qp, struct sn_qp_shm *target, const struct sn_wqe *w, uint64_t now,
                        struct sn_span *dst, struct sn_span *src)
{
    if ((w->opcode != IBV_WR_RDMA_WRITE && w->opcode != IBV_WR_RDMA_WRITE_WITH_IMM) || w->num_sge != 1 ||
        w->length == 0 || w->length > SN_WRITE_BATCH_BYTES || w->due_exec > now || (w->flags & IBV_SEND_FENCE) ||
        w->copying || w->lost || w->status != IBV_WC_SUCCESS)
        return false;
    if (w->flags & IBV_SEND_INLINE)
        *src = (struct sn_span){.addr = w->sge[0].addr, .length = w->length, .mr = SN_NONE};
    else if (!sn_responder_span(w->sge[0].key, sn_self->proc, qp->pd, w->sge[0].addr, w->length, 0, 0, src))
        return false;
    return (target->access & IBV_ACCESS_REMOTE_WRITE) &&
           sn_responder_span(w->rkey, target->owner - 1, target->pd, w->raddr, w->length, IBV_ACCESS_REMOTE_WRITE,
                             w->dest_qpn, dst) &&
           src->kind == SN_MEM_HOST && dst->kind == SN_MEM_HOST;
}

/* Receives that only this queue pair can take. */
static uint32_t receives_left(const struct sn_qp_shm *target)
{
    if (target->srq != SN_NONE || (target->transport != SN_TRANSPORT_RC && target->transport != SN_TRANSPORT_UC))
        return 0;
    return __atomic_load_n(&target->rq.tail, __ATOMIC_RELAXED) - __atomic_load_n(&target->rq.head, __ATOMIC_RELAXED);
}

/* How many of [first, end) may share a system call, and what they copy. */
static unsigned gather_writes(struct sn_qp *qp, struct sn_qp_shm *target, uint32_t first, uint32_t end,
                              struct sn_span *dst, struct sn_span *src)
{
    uint64_t now = sn_wqe_at(qp, first)->due_exec ? sn_now_ns() : 0;
    uint32_t receives = receives_left(target);
    unsigned count = 0;

    for (; count < SN_WRITE_BATCH && first + count != end; count++) {
        const struct sn_wqe *w = sn_wqe_at(qp, first + count);

        if (!sn_wqe_same_target(qp, w, sn_wqe_at(qp, first)) ||
            !write_spans(qp, target, w, now, &dst[count], &src[count]) ||
            (sn_takes_receive(w->opcode) && receives-- == 0))
            break;
    }
    return count;
}

/* The data of count requests from first on is written: push their completions under one lock of each queue. Return how
 * many are done: fewer when the target failed meanwhile and its receives are gone. The rest is executed one by one,
 * which reports the failure. */
static unsigned writes_arrived(struct sn_qp *qp, struct sn_qp_shm *target, uint32_t first, unsigned count)
{
    struct sn_cqe cqes[SN_WRITE_BATCH];
    uint64_t wr_ids[SN_WRITE_BATCH], bytes = 0;
    uint32_t want = 0, have, reported = 0, solicited = 0;
    unsigned done;

    for (unsigned i = 0; i < count; i++)
        want += sn_takes_receive(sn_wqe_at(qp, first + i)->opcode);
    have = want ? sn_rq_pop_ids(sn_self->world, &target->rq, wr_ids, want) : 0;
    for (done = 0; done < count; done++) {
        struct sn_wqe *w = sn_wqe_at(qp, first + done);

        if (sn_takes_receive(w->opcode)) {
            if (reported == have)
                break;
            w->recv_wr_id = wr_ids[reported];
            cqes[reported++] = sn_responder_cqe(qp, target, w, IBV_WC_SUCCESS);
            solicited |= w->flags & IBV_SEND_SOLICITED;
        }
        bytes += w->length;
        w->status = IBV_WC_SUCCESS;
    }
    sn_responder_count(qp, target, false, bytes);
    if (reported)
        sn_responder_push(target, cqes, reported, solicited);
    return done;
}

unsigned sn_execute_writes(struct sn_qp *qp, uint32_t first, uint32_t end)
{
    struct sn_qp_shm *target = sn_qp_find(sn_self->world, sn_wqe_at(qp, first)->dest_qpn);
    struct sn_span dst[SN_WRITE_BATCH], src[SN_WRITE_BATCH];
    unsigned count = 0;
    uint64_t entry;

    if (!target)
        return 0;
    entry = sn_responder_enter(target);
    if (!entry)
        return 0;
    if (sn_responder_answers(qp, target, sn_wqe_at(qp, first)) && target->owner - 1 != sn_self->proc)
        count = gather_writes(qp, target, first, end, dst, src);
    if (count < 2 || sn_host_writes(sn_self->world, target->owner - 1, dst, src, count) < 0)
        count = 0;
    if (count)
        count = writes_arrived(qp, target, first, count);
    sn_responder_leave(target, entry);
    return count;
}

/* Execute w between sn_responder_enter and sn_responder_leave. */
static int exec_at_target(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w)
{
    struct sn_copy here, *c = &here; /* large, so only the members that are used are filled in */

    if (!sn_responder_answers(qp, target, w))
        return SN_EXEC_UNREACHABLE;
    c->world = sn_self->world;
    c->self = sn_self->proc;
    c->length = sn_responder_bytes(qp, w);
    c->dst_proc = w->opcode == IBV_WR_RDMA_READ ? sn_self->proc : target->owner - 1;
    c->src_proc = w->opcode == IBV_WR_RDMA_READ ? target->owner - 1 : sn_self->proc;
    /* A request without data copies nothing that would fail, so check that the target lives. */
    if (w->length == 0 && !sn_process_reachable(c->world, target->owner - 1))
        return SN_EXEC_UNREACHABLE;
    return sn_is_atomic(w->opcode) ? exec_atomic(qp, target, w, c) : exec_copy(qp, target, w, c);
}

/* Nobody answers an unreliable message, but errors of the sender itself are still found. */
static int drop(struct sn_qp *qp, struct sn_wqe *w)
{
    struct sn_span span[SN_MAX_SPANS];

    if (local_spans(qp, w, 0, span) >= 0)
        sn_count(&sn_ctx_dev(qp->ctx)->counters.dropped, 1);
    return 0;
}

static int execute(struct sn_qp *qp, struct sn_wqe *w)
{
    struct sn_qp_shm *target = sn_qp_find(sn_self->world, w->dest_qpn);
    int r;

    if (w->copying) { /* entered, so the slot in the table still belongs to the target */
        target = &sn_self->world->qps[w->dest_qpn % SN_MAX_QPS];
        r = exec_resume(qp, target, w);
    } else if (target) {
        qp->entry = sn_responder_enter(target);
        if (!qp->entry)
            return SN_EXEC_CROWDED;
        r = exec_at_target(qp, target, w);
    } else {
        return sn_qp_is_srd(qp) && sn_srd_cables_up(qp, w) ? SN_EXEC_UNKNOWN : SN_EXEC_UNREACHABLE;
    }
    if (r != SN_EXEC_BUSY)
        sn_responder_leave(target, qp->entry);
    return r;
}

int sn_execute(struct sn_qp *qp, struct sn_wqe *w)
{
    int r = sn_is_local(w->opcode) ? sn_window_execute(qp, w) : w->lost ? SN_EXEC_UNREACHABLE : execute(qp, w);

    if ((r == SN_EXEC_UNREACHABLE || r == SN_EXEC_RNR) && sn_qp_is_unreliable(qp))
        return drop(qp, w);
    return r == SN_EXEC_DROPPED ? 0 : r;
}

int sn_execute_finish(struct sn_qp *qp, struct sn_wqe *w)
{
    int r = 0;

    if (w->status == IBV_WC_SUCCESS && sn_is_atomic(w->opcode))
        r = result_copy(qp, w, &w->result);
    else if (w->status == IBV_WC_SUCCESS && w->bounce)
        r = result_copy(qp, w, w->bounce);
    if (r == SN_EXEC_BUSY)
        return r;
    free(w->bounce);
    w->bounce = NULL;
    return 0;
}
