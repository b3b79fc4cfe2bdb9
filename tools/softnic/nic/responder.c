/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/nic/responder.h"

#include "tools/softnic/nic/datagram.h"
#include "tools/softnic/nic/execute.h"
#include "tools/softnic/nic/window.h"
#include "tools/softnic/world/lock.h"
#include "tools/softnic/world/object.h"
#include "tools/softnic/world/proc.h"
#include "tools/softnic/world/wake.h"

enum { LOOK_EVERY = 32 /* asking whether a process lives takes 10 us */ };

bool sn_responder_span(uint32_t key, uint32_t proc, uint32_t pd, uint64_t addr, uint64_t length, uint32_t rights,
                       uint32_t qpn, struct sn_span *span)
{
    const struct sn_mr_shm *mr = sn_mr_find(sn_self->world, key);

    if (!mr || mr->owner != proc + 1 || mr->pd != pd || (mr->access & rights) != rights)
        return false;
    if (mr->window && mr->window_qpn != qpn)
        return false;
    if (addr < mr->iova || length > mr->length || addr - mr->iova > mr->length - length)
        return false;
    *span = (struct sn_span){.addr = mr->addr + (addr - mr->iova), .length = length, .mr = key >> 16, .kind = mr->kind};
    return true;
}

struct sn_cqe sn_responder_cqe(const struct sn_qp *qp, const struct sn_qp_shm *target, const struct sn_wqe *w,
                               uint32_t status)
{
    bool imm = w->opcode == IBV_WR_SEND_WITH_IMM || w->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    uint32_t flags = (imm ? IBV_WC_WITH_IMM : 0) | (w->opcode == IBV_WR_SEND_WITH_INV ? IBV_WC_WITH_INV : 0) |
                     (sn_qp_is_ud(qp) ? IBV_WC_GRH : 0);

    return (struct sn_cqe){.wr_id = w->recv_wr_id,
                           .status = status,
                           .opcode = w->opcode == IBV_WR_RDMA_WRITE_WITH_IMM ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV,
                           .byte_len =
                               (uint32_t)sn_responder_bytes(qp, w) + (!w->length && sn_self->world->config.odd_empty),
                           .imm = w->imm,
                           .qp_num = target->qpn,
                           .src_qp = qp->qpn,
                           .src_dev = qp->ctx->dev,
                           .wc_flags = flags,
                           .sl = sn_qp_is_ud(qp) ? sn_ud_packet(w) : 0,
                           .is_recv = 1,
                           .time_ns = sn_now_ns()};
}

/* Push completions to the target's receive queue. An overrun queue fails the target's queue pair. */
void sn_responder_push(struct sn_qp_shm *target, const struct sn_cqe *cqes, uint32_t count, bool solicited)
{
    sn_count(&sn_self->world->devs[target->dev].counters.cqes_recv, count);
    if (sn_cq_push(sn_self->world, target->rcq, cqes, count, solicited) < 0)
        sn_qp_shm_fail(sn_self->world, target, IBV_EVENT_QP_FATAL);
}

static void complete(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w, uint32_t status)
{
    struct sn_cqe cqe = sn_responder_cqe(qp, target, w, status);

    if (status != IBV_WC_SUCCESS)
        sn_count(&sn_self->world->devs[target->dev].counters.errors, 1);
    sn_responder_push(target, &cqe, 1, w->flags & IBV_SEND_SOLICITED);
}

/* Report a fault that the responder finds: the initiator gets a NAK, and an RC responder goes to the error state. An
 * event of IBV_EVENT_QP_FATAL is a fault of the responder itself. */
static int fault(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w, uint32_t status, int event,
                 const char *what)
{
    sn_log("queue pair %u to %u: opcode %u, %llu bytes at 0x%llx, rkey 0x%x: %s", qp->qpn, w->dest_qpn, w->opcode,
           (unsigned long long)w->length, (unsigned long long)w->raddr, w->rkey, what);
    w->status = status;
    if (sn_qp_is_srd(qp)) /* no connection ends with it */
        return 0;
    if (sn_qp_is_unreliable(qp)) { /* there is no NAK either; a receiver whose own buffers are wrong fails alone */
        w->status = IBV_WC_SUCCESS;
        sn_count(&sn_ctx_dev(qp->ctx)->counters.dropped, 1);
        if (event == IBV_EVENT_QP_FATAL)
            sn_qp_shm_fail(sn_self->world, target, event);
        return 0;
    }
    if (target == qp->shm)
        sn_qp_fail(qp, event);
    else
        sn_qp_shm_fail(sn_self->world, target, event);
    return 0;
}

int sn_responder_receive(struct sn_qp_shm *target, struct sn_recv *recv)
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

int sn_responder_receive_spans(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w, const struct sn_recv *recv,
                               struct sn_copy *copy)
{
    uint32_t proc = target->owner - 1, pd = target->srq == SN_NONE ? target->pd : sn_self->world->srqs[target->srq].pd;
    uint64_t left = copy->length;

    copy->dst_count = 0;
    for (uint32_t i = 0; i < recv->num_sge && left; i++) {
        uint64_t n = recv->sge[i].length < left ? recv->sge[i].length : left;

        if (n == 0)
            continue;
        if (!sn_responder_span(recv->sge[i].key, proc, pd, recv->sge[i].addr, n, IBV_ACCESS_LOCAL_WRITE, 0,
                               &copy->dst[copy->dst_count++])) {
            complete(qp, target, w, IBV_WC_LOC_PROT_ERR);
            fault(qp, target, w, IBV_WC_REM_OP_ERR, IBV_EVENT_QP_FATAL, "the receive's lkey does not cover its buffer");
            return 1;
        }
        left -= n;
    }
    if (left) {
        complete(qp, target, w, IBV_WC_LOC_LEN_ERR);
        fault(qp, target, w, IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_FATAL, "longer than the receive's buffers");
        return 1;
    }
    return 0;
}

int sn_responder_invalidate_check(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w)
{
    if (sn_window_find(target, w->imm))
        return 0;
    fault(qp, target, w, IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR,
          "the target has no bound window of the key to invalidate");
    return 1;
}

/* Rights that a request needs at the target: of the queue pair and of the memory. */
static uint32_t remote_rights(uint32_t opcode)
{
    if (opcode == IBV_WR_RDMA_READ)
        return IBV_ACCESS_REMOTE_READ;
    return sn_is_atomic(opcode) ? IBV_ACCESS_REMOTE_ATOMIC : IBV_ACCESS_REMOTE_WRITE;
}

struct refusal {
    uint32_t status;
    int event;
    const char *what; /* NULL: granted */
};

/* Look up the memory that a write, read or atomic names, and check the rights. */
static struct refusal request_check(const struct sn_qp_shm *target, const struct sn_wqe *w, struct sn_span *span)
{
    uint32_t rights = remote_rights(w->opcode);

    if (sn_is_atomic(w->opcode) && (w->raddr & 7))
        return (struct refusal){IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR, "atomic at an unaligned address"};
    if ((w->opcode == IBV_WR_RDMA_READ || sn_is_atomic(w->opcode)) && target->max_dest_rd_atomic == 0 &&
        target->transport == SN_TRANSPORT_RC)
        return (struct refusal){IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR, "the target's max_dest_rd_atomic is 0"};
    if ((target->access & rights) != rights)
        return (struct refusal){IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR,
                                "the target queue pair does not allow it"};
    *span = (struct sn_span){0};
    /* An EFA wants a registered address even for no bytes. */
    if ((w->length || target->transport == SN_TRANSPORT_SRD) &&
        !sn_responder_span(w->rkey, target->owner - 1, target->pd, w->raddr, w->length, rights, w->dest_qpn, span))
        return (struct refusal){IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR,
                                "remote access error: no such key, out of its bounds, or without the right"};
    return (struct refusal){0};
}

bool sn_responder_grants(const struct sn_qp_shm *target, const struct sn_wqe *w, struct sn_span *span)
{
    return !request_check(target, w, span).what;
}

int sn_responder_request_span(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w, struct sn_span *span)
{
    struct refusal why = request_check(target, w, span);

    if (!why.what)
        return 0;
    fault(qp, target, w, why.status, why.event, why.what);
    return 1;
}

int sn_responder_result(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w, int r)
{
    if (!r)
        return 0;
    if (r == -ESRCH)
        return SN_EXEC_UNREACHABLE;
    if (r == -EINVAL) {
        sn_log("queue pair %u: wr_id %llu: local buffer is registered but not mapped", qp->qpn,
               (unsigned long long)w->wr_id);
        w->status = IBV_WC_LOC_PROT_ERR;
        return 0;
    }
    fault(qp, target, w, IBV_WC_REM_OP_ERR, IBV_EVENT_QP_FATAL,
          "the target's memory is registered but cannot be reached");
    return sn_qp_is_unreliable(qp) ? SN_EXEC_DROPPED : 0;
}

void sn_responder_count(const struct sn_qp *qp, const struct sn_qp_shm *target, bool read, uint64_t bytes)
{
    struct sn_world *world = sn_self->world;
    struct sn_counters *mine = &world->devs[qp->ctx->dev].counters, *theirs = &world->devs[target->dev].counters;

    sn_count(read ? &theirs->bytes_tx : &mine->bytes_tx, bytes);
    sn_count(read ? &mine->bytes_rx : &theirs->bytes_rx, bytes);
}

void sn_responder_arrived(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w)
{
    struct sn_mr_shm *window = w->opcode == IBV_WR_SEND_WITH_INV ? sn_window_find(target, w->imm) : NULL;

    if (window) /* this initiator is the only one that could use the window */
        __atomic_store_n(&window->key, 0, __ATOMIC_SEQ_CST);
    sn_responder_count(qp, target, w->opcode == IBV_WR_RDMA_READ, w->length);
    if (sn_takes_receive(w->opcode))
        complete(qp, target, w, IBV_WC_SUCCESS);
    w->status = IBV_WC_SUCCESS;
}

bool sn_responder_answers(struct sn_qp *qp, struct sn_qp_shm *target, const struct sn_wqe *w)
{
    struct sn_world *world = sn_self->world;
    uint32_t state = __atomic_load_n(&target->state, __ATOMIC_SEQ_CST);

    if (__atomic_load_n(&target->qpn, __ATOMIC_SEQ_CST) != w->dest_qpn)
        return false;
    if (sn_qp_is_datagram(qp) ? target->qkey != w->qkey : target->dest_qpn != qp->qpn)
        return false;
    if (state != IBV_QPS_RTR && state != IBV_QPS_RTS && state != IBV_QPS_SQD && state != IBV_QPS_SQE)
        return false;
    if (!sn_qp_is_sound(world, target) || target->dev != w->dest_dev || target->transport != qp->shm->transport)
        return false;
    return __atomic_load_n(&world->devs[qp->ctx->dev].port_up, __ATOMIC_RELAXED) &&
           __atomic_load_n(&world->devs[target->dev].port_up, __ATOMIC_RELAXED);
}

static uint64_t entry_take(struct sn_qp_shm *target, bool relieve)
{
    for (uint32_t i = 0; i < SN_MAX_INITIATORS; i++) {
        uint64_t old = __atomic_load_n(&target->initiators[i], __ATOMIC_RELAXED),
                 number = ((old >> 32) + 1) & UINT32_MAX;

        if ((uint32_t)old && (!relieve || sn_pid_runs((uint32_t)old)))
            continue;
        if (__atomic_compare_exchange_n(&target->initiators[i], &old, number << 32 | sn_pid, false, __ATOMIC_SEQ_CST,
                                        __ATOMIC_RELAXED))
            return number << 8 | (i + 1);
    }
    return 0;
}

/* [in-use] announce first, look at the key second; pairs with sn_qp_initiators_wait, whose callers invalidate the key
 * first and look for initiators second. One of the two sees the other, so memory is never written after its owner was
 * told that it is free. */
uint64_t sn_responder_enter(struct sn_qp_shm *target)
{
    static uint32_t crowded;
    uint64_t entry = entry_take(target, false);

    if (entry || __atomic_add_fetch(&crowded, 1, __ATOMIC_RELAXED) % LOOK_EVERY)
        return entry;
    return entry_take(target, true); /* some initiators may have died there */
}

void sn_responder_leave(struct sn_qp_shm *target, uint64_t entry)
{
    __atomic_store_n(&target->initiators[(entry & 0xff) - 1], entry >> 8 << 32, __ATOMIC_RELEASE);
}
