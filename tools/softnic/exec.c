/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/exec.h"

#include <stdlib.h>

#include "tools/softnic/lock.h"
#include "tools/softnic/object.h"
#include "tools/softnic/wake.h"

static bool is_send(uint32_t opcode)
{
    return opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM;
}

static bool takes_receive(uint32_t opcode)
{
    return is_send(opcode) || opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}

static bool is_atomic(uint32_t opcode)
{
    return opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

uint64_t sn_rnr_ns(uint32_t code)
{
    static const uint32_t us10[32] = {65536, 1,    2,    3,    4,    6,     8,     12,    16,    24,   32,
                                      48,    64,   96,   128,  192,  256,   384,   512,   768,   1024, 1536,
                                      2048,  3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152};

    return us10[code & 31] * 10000ull; /* IBTA table of RNR NAK timer values, in units of 10 us */
}

/* A span of one process's registered memory, or false: no such key, other owner or domain, out of bounds, right
 * missing. */
static bool span_resolve(uint32_t key, uint32_t proc, uint32_t pd, uint64_t addr, uint64_t length, uint32_t rights,
                         struct sn_span *span)
{
    const struct sn_mr_shm *mr = sn_mr_find(sn_self->world, key);

    if (!mr || mr->owner != proc + 1 || mr->pd != pd || (mr->access & rights) != rights)
        return false;
    if (addr < mr->iova || length > mr->length || addr - mr->iova > mr->length - length)
        return false;
    *span = (struct sn_span){.addr = mr->addr + (addr - mr->iova), .length = length, .mr = key >> 16, .kind = mr->kind};
    return true;
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
        } else if (!span_resolve(sge->key, sn_self->proc, qp->pd, sge->addr, sge->length, rights, &span[n++])) {
            sn_log("queue pair %u: local protection error: lkey 0x%x does not cover 0x%llx + %u%s", qp->qpn, sge->key,
                   (unsigned long long)sge->addr, sge->length, rights ? " for writing" : "");
            w->status = IBV_WC_LOC_PROT_ERR;
            return -1;
        }
    }
    return n;
}

static struct sn_cqe target_cqe(const struct sn_qp *qp, const struct sn_qp_shm *target, const struct sn_wqe *w,
                                uint32_t status)
{
    bool imm = w->opcode == IBV_WR_SEND_WITH_IMM || w->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;

    return (struct sn_cqe){.wr_id = w->recv_wr_id,
                           .status = status,
                           .opcode = w->opcode == IBV_WR_RDMA_WRITE_WITH_IMM ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV,
                           .byte_len = (uint32_t)w->length,
                           .imm = w->imm,
                           .qp_num = target->qpn,
                           .src_qp = qp->qpn,
                           .wc_flags = imm ? IBV_WC_WITH_IMM : 0,
                           .is_recv = 1,
                           .time_ns = sn_now_ns()};
}

/* Tell the target by completions in its receive queue. An overrun queue fails the target's queue pair. */
static void target_push(struct sn_qp_shm *target, const struct sn_cqe *cqes, uint32_t count, bool solicited)
{
    sn_count(&sn_self->world->devs[target->dev].counters.cqes_recv, count);
    if (sn_cq_push(sn_self->world, target->rcq, cqes, count, solicited) < 0)
        sn_qp_shm_fail(sn_self->world, target, IBV_EVENT_QP_FATAL);
}

static void target_complete(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w, uint32_t status)
{
    struct sn_cqe cqe = target_cqe(qp, target, w, status);

    if (status != IBV_WC_SUCCESS)
        sn_count(&sn_self->world->devs[target->dev].counters.errors, 1);
    target_push(target, &cqe, 1, w->flags & IBV_SEND_SOLICITED);
}

/* A fault the responder finds: it answers with a NAK and goes to the error state itself. */
static int target_fault(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w, uint32_t status, int event,
                        const char *what)
{
    sn_log("queue pair %u to %u: opcode %u, %llu bytes at 0x%llx, rkey 0x%x: %s", qp->qpn, qp->shm->dest_qpn, w->opcode,
           (unsigned long long)w->length, (unsigned long long)w->raddr, w->rkey, what);
    w->status = status;
    sn_qp_shm_fail(sn_self->world, target, event);
    return 0;
}

static int take_receive(struct sn_qp_shm *target, struct sn_recv *recv)
{
    struct sn_world *world = sn_self->world;
    struct sn_rq_shm *rq = target->srq == SN_NONE ? &target->rq : &world->srqs[target->srq].rq;
    int r = sn_rq_pop(world, rq, recv);

    if (r == SN_RQ_EMPTY)
        return SN_EXEC_RNR;
    if (r == SN_RQ_LIMIT)
        sn_async_raise(world, world->srqs[target->srq].ctx, IBV_EVENT_SRQ_LIMIT_REACHED, target->srq);
    return 0;
}

/* Where a send goes: the buffers of the receive it took. Return 0, or 1 after both sides got their error. */
static int recv_spans(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w, const struct sn_recv *recv,
                      struct sn_copy *copy)
{
    uint32_t proc = target->owner - 1, pd = target->srq == SN_NONE ? target->pd : sn_self->world->srqs[target->srq].pd;
    uint64_t left = w->length;

    copy->dst_count = 0;
    for (uint32_t i = 0; i < recv->num_sge && left; i++) {
        uint64_t n = recv->sge[i].length < left ? recv->sge[i].length : left;

        if (n == 0)
            continue;
        if (!span_resolve(recv->sge[i].key, proc, pd, recv->sge[i].addr, n, IBV_ACCESS_LOCAL_WRITE,
                          &copy->dst[copy->dst_count++])) {
            target_complete(qp, target, w, IBV_WC_LOC_PROT_ERR);
            target_fault(qp, target, w, IBV_WC_REM_OP_ERR, IBV_EVENT_QP_FATAL,
                         "the receive's lkey does not cover its buffer");
            return 1;
        }
        left -= n;
    }
    if (left) {
        target_complete(qp, target, w, IBV_WC_LOC_LEN_ERR);
        target_fault(qp, target, w, IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_FATAL, "longer than the receive's buffers");
        return 1;
    }
    return 0;
}

/* Rights that a request needs at the target: of the queue pair and of the memory. */
static uint32_t remote_rights(uint32_t opcode)
{
    if (opcode == IBV_WR_RDMA_READ)
        return IBV_ACCESS_REMOTE_READ;
    return is_atomic(opcode) ? IBV_ACCESS_REMOTE_ATOMIC : IBV_ACCESS_REMOTE_WRITE;
}

/* The memory that a write, read or atomic names. Return 0, or 1 after both sides got their error. */
static int remote_span(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w, struct sn_span *span)
{
    uint32_t rights = remote_rights(w->opcode);

    if (is_atomic(w->opcode) && (w->raddr & 7))
        return target_fault(qp, target, w, IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR,
                            "atomic at an unaligned address"),
               1;
    if ((w->opcode == IBV_WR_RDMA_READ || is_atomic(w->opcode)) && target->max_dest_rd_atomic == 0)
        return target_fault(qp, target, w, IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR,
                            "the target's max_dest_rd_atomic is 0"),
               1;
    if ((target->access & rights) != rights)
        return target_fault(qp, target, w, IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR,
                            "the target queue pair does not allow it"),
               1;
    if (w->length == 0) {
        *span = (struct sn_span){0};
        return 0;
    }
    if (span_resolve(w->rkey, target->owner - 1, target->pd, w->raddr, w->length, rights, span))
        return 0;
    target_fault(qp, target, w, IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR,
                 "remote access error: no such key, out of its bounds, or without the right");
    return 1;
}

/* What became of a copy: nothing to say (0), the target is gone, or an error status. */
static int place_result(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w, int r)
{
    if (r == 0)
        return 0;
    if (r == -ESRCH)
        return SN_EXEC_UNREACHABLE;
    if (r == -EINVAL) {
        sn_log("queue pair %u: wr_id %llu: local buffer is registered but not mapped", qp->qpn,
               (unsigned long long)w->wr_id);
        w->status = IBV_WC_LOC_PROT_ERR;
        return 0;
    }
    return target_fault(qp, target, w, IBV_WC_REM_OP_ERR, IBV_EVENT_QP_FATAL,
                        "the target's memory is registered but cannot be reached");
}

static void count_bytes(const struct sn_qp *qp, const struct sn_qp_shm *target, bool read, uint64_t bytes)
{
    struct sn_world *world = sn_self->world;
    struct sn_counters *mine = &world->devs[qp->ctx->dev].counters, *theirs = &world->devs[target->dev].counters;

    sn_count(read ? &theirs->bytes_tx : &mine->bytes_tx, bytes);
    sn_count(read ? &mine->bytes_rx : &theirs->bytes_rx, bytes);
}

/* The target's side of a request that moved its data. */
static void exec_arrived(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w)
{
    count_bytes(qp, target, w->opcode == IBV_WR_RDMA_READ, w->length);
    if (takes_receive(w->opcode))
        target_complete(qp, target, w, IBV_WC_SUCCESS);
    w->status = IBV_WC_SUCCESS;
}

/* Bring result bytes that are in this process (bounce, atomic result) into the request's buffers. */
static int result_place(struct sn_qp *qp, struct sn_wqe *w, const void *from)
{
    struct sn_copy *c = &qp->copy;
    int n, r;

    if (w->placing) {
        r = sn_place_poll(c);
        goto placed;
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
    r = sn_place_start(c);
placed:
    w->placing = r == SN_PLACE_BUSY;
    if (w->placing)
        return SN_EXEC_BUSY;
    if (r < 0)
        w->status = IBV_WC_LOC_PROT_ERR;
    return 0;
}

static int exec_atomic(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w)
{
    struct sn_copy *c = &qp->copy;
    int r;

    if (remote_span(qp, target, w, &c->dst[0]))
        return 0;
    c->dst_count = 1;
    r = sn_place_atomic(c, w->opcode == IBV_WR_ATOMIC_CMP_AND_SWP, w->compare_add, w->swap, &w->result);
    w->placing = r == SN_PLACE_BUSY;
    if (w->placing)
        return SN_EXEC_BUSY;
    r = place_result(qp, target, w, r);
    if (r || w->status != IBV_WC_SUCCESS)
        return r;
    exec_arrived(qp, target, w);
    return 0;
}

/* The data of a write or send leaves, of a read comes; under the model a read is only sampled, into a bounce buffer. */
static int exec_move(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w)
{
    struct sn_copy *c = &qp->copy;
    bool read = w->opcode == IBV_WR_RDMA_READ;
    struct sn_recv recv;
    int n, r;

    n = local_spans(qp, w, read ? IBV_ACCESS_LOCAL_WRITE : 0, read ? c->dst : c->src);
    if (n < 0)
        return 0;
    *(read ? &c->dst_count : &c->src_count) = (uint32_t)n;
    if (!is_send(w->opcode)) {
        if (remote_span(qp, target, w, read ? &c->src[0] : &c->dst[0]))
            return 0;
        *(read ? &c->src_count : &c->dst_count) = 1;
    }
    if (takes_receive(w->opcode)) {
        r = take_receive(target, &recv);
        if (r)
            return r;
        w->recv_wr_id = recv.wr_id;
        if (is_send(w->opcode) && recv_spans(qp, target, w, &recv, c))
            return 0;
    }
    if (read && w->due_done && w->length) {
        w->bounce = malloc(w->length);
        if (w->bounce) { /* without it the data comes early, which is the lesser evil */
            c->dst_count = 1;
            c->dst[0] = (struct sn_span){.addr = (uintptr_t)w->bounce, .length = w->length, .mr = SN_NONE};
        }
    }
    r = sn_place_start(c);
    w->placing = r == SN_PLACE_BUSY;
    if (w->placing)
        return SN_EXEC_BUSY;
    r = place_result(qp, target, w, r);
    if (r == 0 && w->status == IBV_WC_SUCCESS)
        exec_arrived(qp, target, w);
    return r;
}

/* Its owner may be destroying the target meanwhile, and waits for this copy: then nobody is told of it. */
static int exec_resume(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w)
{
    int r = sn_place_poll(&qp->copy);

    if (r == SN_PLACE_BUSY)
        return SN_EXEC_BUSY;
    w->placing = false;
    if (__atomic_load_n(&target->qpn, __ATOMIC_SEQ_CST) != qp->shm->dest_qpn)
        return SN_EXEC_UNREACHABLE;
    r = place_result(qp, target, w, r);
    if (r == 0 && w->status == IBV_WC_SUCCESS)
        exec_arrived(qp, target, w);
    return r;
}

/* The other end, if it is one: connected back to this queue pair, able to receive, with both links up. */
static bool target_answers(struct sn_qp *qp, struct sn_qp_shm *target)
{
    struct sn_world *world = sn_self->world;
    uint32_t state = __atomic_load_n(&target->state, __ATOMIC_SEQ_CST);

    if (__atomic_load_n(&target->qpn, __ATOMIC_SEQ_CST) != qp->shm->dest_qpn || target->dest_qpn != qp->qpn)
        return false;
    if (state != IBV_QPS_RTR && state != IBV_QPS_RTS && state != IBV_QPS_SQD && state != IBV_QPS_SQE)
        return false;
    if (target->dev != qp->shm->dest_dev || target->transport != qp->shm->transport)
        return false;
    return __atomic_load_n(&world->devs[qp->ctx->dev].port_up, __ATOMIC_RELAXED) &&
           __atomic_load_n(&world->devs[target->dev].port_up, __ATOMIC_RELAXED);
}

/* G1: announce first, look second; pairs with G2 in sn_qp_guest_wait, whose callers invalidate first and look for
 * guests second. One of the two sees the other, so memory is never written after its owner was told that it is free. A
 * resumed copy keeps its number. */
static uint64_t guest_enter(struct sn_qp_shm *target, bool resumed)
{
    uint64_t number = (__atomic_load_n(&target->guest, __ATOMIC_RELAXED) >> 32) + !resumed;

    __atomic_store_n(&target->guest, number << 32 | sn_pid, __ATOMIC_SEQ_CST);
    return number;
}

static void guest_leave(struct sn_qp_shm *target, uint64_t number)
{
    __atomic_store_n(&target->guest, number << 32, __ATOMIC_RELEASE);
}

/* A write that may share a system call: short, one buffer, host memory, valid on both sides, and due. Anything else
 * goes the long way, which also says what is wrong. */
static bool write_spans(struct sn_qp *qp, struct sn_qp_shm *target, const struct sn_wqe *w, uint64_t now,
                        struct sn_span *dst, struct sn_span *src)
{
    if ((w->opcode != IBV_WR_RDMA_WRITE && w->opcode != IBV_WR_RDMA_WRITE_WITH_IMM) || w->num_sge != 1 ||
        w->length == 0 || w->length > SN_WRITE_BATCH_BYTES || w->due_exec > now || (w->flags & IBV_SEND_FENCE) ||
        w->placing || w->lost || w->status != IBV_WC_SUCCESS)
        return false;
    if (w->flags & IBV_SEND_INLINE)
        *src = (struct sn_span){.addr = w->sge[0].addr, .length = w->length, .mr = SN_NONE};
    else if (!span_resolve(w->sge[0].key, sn_self->proc, qp->pd, w->sge[0].addr, w->length, 0, src))
        return false;
    return (target->access & IBV_ACCESS_REMOTE_WRITE) &&
           span_resolve(w->rkey, target->owner - 1, target->pd, w->raddr, w->length, IBV_ACCESS_REMOTE_WRITE, dst) &&
           src->kind == SN_MEM_HOST && dst->kind == SN_MEM_HOST;
}

/* Receives that this queue pair may count on: nobody else takes them. */
static uint32_t receives_left(const struct sn_qp_shm *target)
{
    if (target->srq != SN_NONE)
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

        if (!write_spans(qp, target, w, now, &dst[count], &src[count]) || (takes_receive(w->opcode) && receives-- == 0))
            break;
    }
    return count;
}

/* The data of count requests from first on is placed: tell of it, under one lock of each queue. Return how many are
 * done: fewer when the target failed meanwhile, and its receives are gone; the rest goes the long way, which says so.
 */
static unsigned writes_arrived(struct sn_qp *qp, struct sn_qp_shm *target, uint32_t first, unsigned count)
{
    struct sn_cqe cqes[SN_WRITE_BATCH];
    uint64_t wr_ids[SN_WRITE_BATCH], bytes = 0;
    uint32_t want = 0, have, told = 0, solicited = 0;
    unsigned done;

    for (unsigned i = 0; i < count; i++)
        want += takes_receive(sn_wqe_at(qp, first + i)->opcode);
    have = want ? sn_rq_pop_ids(sn_self->world, &target->rq, wr_ids, want) : 0;
    for (done = 0; done < count; done++) {
        struct sn_wqe *w = sn_wqe_at(qp, first + done);

        if (takes_receive(w->opcode)) {
            if (told == have)
                break;
            w->recv_wr_id = wr_ids[told];
            cqes[told++] = target_cqe(qp, target, w, IBV_WC_SUCCESS);
            solicited |= w->flags & IBV_SEND_SOLICITED;
        }
        bytes += w->length;
        w->status = IBV_WC_SUCCESS;
    }
    count_bytes(qp, target, false, bytes);
    if (told)
        target_push(target, cqes, told, solicited);
    return done;
}

unsigned sn_exec_writes(struct sn_qp *qp, uint32_t first, uint32_t end)
{
    struct sn_qp_shm *target = sn_qp_find(sn_self->world, qp->shm->dest_qpn);
    struct sn_span dst[SN_WRITE_BATCH], src[SN_WRITE_BATCH];
    unsigned count = 0;
    uint64_t guest;

    if (!target)
        return 0;
    guest = guest_enter(target, false);
    if (target_answers(qp, target) && target->owner - 1 != sn_self->proc)
        count = gather_writes(qp, target, first, end, dst, src);
    if (count < 2 || sn_place_writes(sn_self->world, target->owner - 1, dst, src, count) < 0)
        count = 0;
    if (count)
        count = writes_arrived(qp, target, first, count);
    guest_leave(target, guest);
    return count;
}

int sn_exec(struct sn_qp *qp, struct sn_wqe *w)
{
    struct sn_qp_shm *target = sn_qp_find(sn_self->world, qp->shm->dest_qpn);
    struct sn_copy *c = &qp->copy;
    int r = SN_EXEC_UNREACHABLE;
    uint64_t guest;

    if (w->placing) /* a guest there, so that the place in the table is still the target's */
        target = &sn_self->world->qps[qp->shm->dest_qpn % SN_MAX_QPS];
    if (!target)
        return SN_EXEC_UNREACHABLE;
    guest = guest_enter(target, w->placing);
    if (w->placing) {
        r = exec_resume(qp, target, w);
        goto leave;
    }
    if (!target_answers(qp, target))
        goto leave;
    c->world = sn_self->world;
    c->self = sn_self->proc;
    c->length = w->length;
    c->dst_proc = w->opcode == IBV_WR_RDMA_READ ? sn_self->proc : target->owner - 1;
    c->src_proc = w->opcode == IBV_WR_RDMA_READ ? target->owner - 1 : sn_self->proc;
    /* Without data nothing would notice that the target is dead. */
    if (w->length == 0 && !sn_place_reachable(c->world, target->owner - 1))
        goto leave;
    r = is_atomic(w->opcode) ? exec_atomic(qp, target, w) : exec_move(qp, target, w);
leave:
    if (r != SN_EXEC_BUSY)
        guest_leave(target, guest);
    return r;
}

int sn_exec_finish(struct sn_qp *qp, struct sn_wqe *w)
{
    int r = 0;

    if (w->status == IBV_WC_SUCCESS && is_atomic(w->opcode))
        r = result_place(qp, w, &w->result);
    else if (w->status == IBV_WC_SUCCESS && w->bounce)
        r = result_place(qp, w, w->bounce);
    if (r == SN_EXEC_BUSY)
        return r;
    free(w->bounce);
    w->bounce = NULL;
    return 0;
}
