/* SPDX-License-Identifier: Apache-2.0 */
/* The extended posting interface: ibv_wr_start takes the queue pair's mutex, each request is built in its send queue
 * entry, and ibv_wr_complete publishes all at once. The first error is kept and cancels all of them. */
#include <errno.h>
#include <string.h>

#include "tools/softnic/nic/datagram.h"
#include "tools/softnic/nic/window.h"
#include "tools/softnic/verbs/qp.h"

static struct sn_qp *of(struct ibv_qp_ex *ex)
{
    return sn_qp_of(&ex->qp_base);
}

static void fail(struct sn_qp *qp, int error)
{
    if (!qp->wr_error)
        qp->wr_error = error;
}

static void wr_start(struct ibv_qp_ex *ex)
{
    struct sn_qp *qp = of(ex);

    pthread_mutex_lock(&qp->mutex);
    qp->wr_at = qp->tail;
    qp->wr_error = sn_post_begin_locked(qp);
}

static int wr_complete(struct ibv_qp_ex *ex)
{
    struct sn_qp *qp = of(ex);
    int r = qp->wr_error;

    for (uint32_t i = qp->tail; i != qp->wr_at && r == 0; i++)
        r = sn_wqe_check(qp, sn_wqe_at(qp, i));
    if (!r)
        sn_sq_commit_locked(qp, qp->wr_at);
    pthread_mutex_unlock(&qp->mutex);
    return r;
}

static void wr_abort(struct ibv_qp_ex *ex)
{
    pthread_mutex_unlock(&of(ex)->mutex);
}

/* Open the next request; NULL, and the error noted, if there is none. */
static struct sn_wqe *wr_open(struct ibv_qp_ex *ex, uint32_t opcode, uint32_t rkey, uint64_t raddr)
{
    struct sn_qp *qp = of(ex);
    struct sn_wqe *w = qp->wr_error ? NULL : sn_sq_slot_locked(qp, qp->wr_at);

    if (!w) {
        fail(qp, ENOMEM);
        return NULL;
    }
    qp->wr_at++;
    sn_wqe_init(qp, w, opcode, ex->wr_flags & ~(unsigned int)IBV_SEND_INLINE);
    w->wr_id = ex->wr_id;
    w->rkey = rkey;
    w->raddr = raddr;
    w->imm = 0;
    w->length = 0;
    w->num_sge = 0;
    return w;
}

static void wr_rdma_write(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t raddr)
{
    wr_open(ex, IBV_WR_RDMA_WRITE, rkey, raddr);
}

static void wr_rdma_write_imm(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t raddr, __be32 imm)
{
    struct sn_wqe *w = wr_open(ex, IBV_WR_RDMA_WRITE_WITH_IMM, rkey, raddr);

    if (w)
        w->imm = imm;
}

static void wr_rdma_read(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t raddr)
{
    wr_open(ex, IBV_WR_RDMA_READ, rkey, raddr);
}

static void wr_send(struct ibv_qp_ex *ex)
{
    wr_open(ex, IBV_WR_SEND, 0, 0);
}

static void wr_send_imm(struct ibv_qp_ex *ex, __be32 imm)
{
    struct sn_wqe *w = wr_open(ex, IBV_WR_SEND_WITH_IMM, 0, 0);

    if (w)
        w->imm = imm;
}

static void wr_send_inv(struct ibv_qp_ex *ex, uint32_t rkey)
{
    struct sn_wqe *w = wr_open(ex, IBV_WR_SEND_WITH_INV, 0, 0);

    if (w)
        w->imm = rkey;
}

static void wr_local_inv(struct ibv_qp_ex *ex, uint32_t rkey)
{
    wr_open(ex, IBV_WR_LOCAL_INV, rkey, 0);
}

static void wr_bind_mw(struct ibv_qp_ex *ex, struct ibv_mw *mw, uint32_t rkey, const struct ibv_mw_bind_info *info)
{
    struct sn_wqe *w = wr_open(ex, IBV_WR_BIND_MW, rkey, 0);
    int r = w ? sn_window_bind_fill(of(ex), w, mw, rkey, info) : 0;

    if (r)
        fail(of(ex), r);
}

static void wr_atomic_cmp_swp(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t raddr, uint64_t compare, uint64_t swap)
{
    struct sn_wqe *w = wr_open(ex, IBV_WR_ATOMIC_CMP_AND_SWP, rkey, raddr);

    if (w) {
        w->compare_add = compare;
        w->swap = swap;
    }
}

static void wr_atomic_fetch_add(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t raddr, uint64_t add)
{
    struct sn_wqe *w = wr_open(ex, IBV_WR_ATOMIC_FETCH_AND_ADD, rkey, raddr);

    if (w)
        w->compare_add = add;
}

/* The request that setters work on. NULL after an error, or when there is none yet. */
static struct sn_wqe *wr_current(struct sn_qp *qp)
{
    if (qp->wr_at == qp->tail)
        fail(qp, EINVAL);
    return qp->wr_error ? NULL : sn_wqe_at(qp, qp->wr_at - 1);
}

static void wr_set_sge_list(struct ibv_qp_ex *ex, size_t count, const struct ibv_sge *sge)
{
    struct sn_qp *qp = of(ex);
    struct sn_wqe *w = wr_current(qp);

    if (!w)
        return;
    if (count > qp->cap.max_send_sge) {
        fail(qp, EINVAL);
        return;
    }
    w->num_sge = (uint32_t)count;
    w->length = 0;
    for (size_t i = 0; i < count; i++) {
        w->sge[i] = (struct sn_sge){sge[i].addr, sge[i].length, sge[i].lkey};
        w->length += sge[i].length;
    }
}

static void wr_set_sge(struct ibv_qp_ex *ex, uint32_t lkey, uint64_t addr, uint32_t length)
{
    struct ibv_sge sge = {addr, length, lkey};

    wr_set_sge_list(ex, 1, &sge);
}

static void wr_set_inline_data_list(struct ibv_qp_ex *ex, size_t count, const struct ibv_data_buf *buf)
{
    struct sn_qp *qp = of(ex);
    struct sn_wqe *w = wr_current(qp);
    uint8_t *start, *at;
    size_t length = 0;

    if (!w)
        return;
    for (size_t i = 0; i < count; i++)
        length += buf[i].length;
    if (length > qp->cap.max_inline_data) {
        fail(qp, EINVAL);
        return;
    }
    start = at = (uint8_t *)(w->sge + qp->cap.max_send_sge);
    for (size_t i = 0; i < count; i++) {
        memcpy(at, buf[i].addr, buf[i].length);
        at += buf[i].length;
    }
    w->sge[0] = (struct sn_sge){(uintptr_t)start, (uint32_t)length, 0};
    w->num_sge = 1;
    w->length = length;
    w->flags |= IBV_SEND_INLINE;
}

static void wr_set_inline_data(struct ibv_qp_ex *ex, void *addr, size_t length)
{
    struct ibv_data_buf buf = {addr, length};

    wr_set_inline_data_list(ex, 1, &buf);
}

static void wr_set_ud_addr(struct ibv_qp_ex *ex, struct ibv_ah *ah, uint32_t remote_qpn, uint32_t remote_qkey)
{
    struct sn_wqe *w = wr_current(of(ex));

    if (w)
        sn_wqe_to(of(ex), w, ah, remote_qpn, remote_qkey);
}

void sn_wr_fill(struct sn_qp *qp, uint64_t send_ops)
{
    struct ibv_qp_ex *ex = &qp->ex;

    ex->wr_start = wr_start;
    ex->wr_complete = wr_complete;
    ex->wr_abort = wr_abort;
    ex->wr_set_sge = wr_set_sge;
    ex->wr_set_sge_list = wr_set_sge_list;
    ex->wr_set_inline_data = wr_set_inline_data;
    ex->wr_set_inline_data_list = wr_set_inline_data_list;
    if (sn_qp_is_datagram(qp))
        ex->wr_set_ud_addr = wr_set_ud_addr;
    if (send_ops & IBV_QP_EX_WITH_RDMA_WRITE)
        ex->wr_rdma_write = wr_rdma_write;
    if (send_ops & IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM)
        ex->wr_rdma_write_imm = wr_rdma_write_imm;
    if (send_ops & IBV_QP_EX_WITH_SEND)
        ex->wr_send = wr_send;
    if (send_ops & IBV_QP_EX_WITH_SEND_WITH_IMM)
        ex->wr_send_imm = wr_send_imm;
    if (send_ops & IBV_QP_EX_WITH_SEND_WITH_INV)
        ex->wr_send_inv = wr_send_inv;
    if (send_ops & IBV_QP_EX_WITH_LOCAL_INV)
        ex->wr_local_inv = wr_local_inv;
    if (send_ops & IBV_QP_EX_WITH_BIND_MW)
        ex->wr_bind_mw = wr_bind_mw;
    if (send_ops & IBV_QP_EX_WITH_RDMA_READ)
        ex->wr_rdma_read = wr_rdma_read;
    if (send_ops & IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP)
        ex->wr_atomic_cmp_swp = wr_atomic_cmp_swp;
    if (send_ops & IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD)
        ex->wr_atomic_fetch_add = wr_atomic_fetch_add;
}
