/* SPDX-License-Identifier: Apache-2.0 */
/* ibv_modify_qp and ibv_query_qp: the attributes, and the effects of a change of state. */
#include <stdlib.h>
#include <string.h>

#include "tools/softnic/nic/srd.h"
#include "tools/softnic/verbs/cq.h"
#include "tools/softnic/verbs/qp.h"
#include "tools/softnic/verbs/qp_state.h"
#include "tools/softnic/world/lock.h"
#include "tools/softnic/world/object.h"
#include "tools/softnic/world/queues.h"

static int values_check(const struct sn_qp *qp, const struct ibv_qp_attr *attr, int mask)
{
    const char *what = NULL;

    if ((mask & IBV_QP_PORT) && attr->port_num != 1)
        what = "port_num is not 1";
    else if ((mask & IBV_QP_PKEY_INDEX) && attr->pkey_index != 0)
        what = "pkey_index is not 0";
    else if ((mask & IBV_QP_AV) && attr->ah_attr.is_global && attr->ah_attr.grh.sgid_index >= SN_MAX_GIDS)
        what = "sgid_index is not in the GID table";
    else if ((mask & IBV_QP_PATH_MTU) && (attr->path_mtu < IBV_MTU_256 || attr->path_mtu > IBV_MTU_4096))
        what = "path_mtu is not an MTU";
    else if ((mask & IBV_QP_MAX_QP_RD_ATOMIC) && attr->max_rd_atomic > SN_MAX_RD_ATOMIC)
        what = "max_rd_atomic is over the limit";
    else if ((mask & IBV_QP_MAX_DEST_RD_ATOMIC) && attr->max_dest_rd_atomic > SN_MAX_RD_ATOMIC)
        what = "max_dest_rd_atomic is over the limit";
    else if ((mask & IBV_QP_RETRY_CNT) && attr->retry_cnt > 7)
        what = "retry_cnt is over 7";
    else if ((mask & IBV_QP_RNR_RETRY) && attr->rnr_retry > 7)
        what = "rnr_retry is over 7";
    else if ((mask & IBV_QP_TIMEOUT) && attr->timeout > 31)
        what = "timeout is over 31";
    else if ((mask & IBV_QP_MIN_RNR_TIMER) && attr->min_rnr_timer > 31)
        what = "min_rnr_timer is over 31";
    if (!what)
        return 0;
    sn_log("modify_qp %u: %s", qp->qpn, what);
    return EINVAL;
}

/* Keep the given attributes, and put those that the other side needs into the world. */
static void values_take(struct sn_qp *qp, const struct ibv_qp_attr *attr, int mask)
{
    struct sn_qp_shm *shm = qp->shm;
    struct ibv_qp_attr *to = &qp->attr;
    uint8_t gid;

    if (mask & IBV_QP_ACCESS_FLAGS)
        shm->access = to->qp_access_flags = attr->qp_access_flags;
    if (mask & IBV_QP_PORT)
        to->port_num = attr->port_num;
    if (mask & IBV_QP_AV) {
        to->ah_attr = attr->ah_attr;
        shm->dest_dev = sn_dev_find(&attr->ah_attr, &gid);
        if (shm->dest_dev == SN_NONE)
            sn_log("modify_qp %u: no device of this world has that %s; requests will time out", qp->qpn,
                   attr->ah_attr.is_global ? "GID" : "LID");
    }
    if (mask & IBV_QP_QKEY)
        shm->qkey = to->qkey = attr->qkey;
    if (mask & IBV_QP_DEST_QPN)
        shm->dest_qpn = to->dest_qp_num = attr->dest_qp_num;
    if (mask & IBV_QP_PATH_MTU)
        to->path_mtu = attr->path_mtu;
    if (mask & IBV_QP_RQ_PSN)
        to->rq_psn = attr->rq_psn & 0xffffff;
    if (mask & IBV_QP_SQ_PSN)
        to->sq_psn = attr->sq_psn & 0xffffff;
    if (mask & IBV_QP_MAX_QP_RD_ATOMIC)
        to->max_rd_atomic = attr->max_rd_atomic;
    if (mask & IBV_QP_MAX_DEST_RD_ATOMIC)
        shm->max_dest_rd_atomic = to->max_dest_rd_atomic = attr->max_dest_rd_atomic;
    if (mask & IBV_QP_MIN_RNR_TIMER)
        shm->min_rnr_timer = to->min_rnr_timer = attr->min_rnr_timer;
    if (mask & IBV_QP_TIMEOUT)
        to->timeout = attr->timeout;
    if (mask & IBV_QP_RETRY_CNT)
        to->retry_cnt = attr->retry_cnt;
    if (mask & IBV_QP_RNR_RETRY)
        to->rnr_retry = attr->rnr_retry;
}

/* Go back to RESET: empty both queues and drop their completions. */
static int qp_reset(struct sn_qp *qp)
{
    struct ibv_qp *ibv = &qp->ex.qp_base;
    struct sn_recv recv;

    __atomic_store_n(&qp->shm->state, IBV_QPS_RESET, __ATOMIC_SEQ_CST);
    if (sn_qp_quiesce(qp) < 0)
        return EBUSY;
    while (qp->shm->rq.capacity && sn_rq_pop(sn_self->world, &qp->shm->rq, &recv) != SN_RQ_EMPTY)
        ;
    sn_cq_purge(sn_cq_of(ibv->send_cq), qp->qpn);
    if (ibv->recv_cq != ibv->send_cq)
        sn_cq_purge(sn_cq_of(ibv->recv_cq), qp->qpn);
    pthread_mutex_lock(&qp->mutex);
    for (uint32_t i = qp->done; i != qp->exec; i++)
        free(sn_wqe_at(qp, i)->bounce);
    qp->exec = qp->done = qp->freed = qp->tail;
    qp->reads_open = 0;
    qp->recv_posted = qp->recv_polled = 0;
    qp->last_exec_due = qp->last_done_due = qp->last_read_due = 0;
    qp->shm->dest_qpn = 0;
    qp->shm->access = 0;
    if (sn_qp_is_srd(qp))
        sn_srd_defaults(qp);
    qp->closing = qp->flush_due = qp->window_waits = false;
    pthread_mutex_unlock(&qp->mutex);
    return 0;
}

static bool drained(struct sn_qp *qp)
{
    bool idle;

    pthread_mutex_lock(&qp->mutex);
    idle = !qp->running && sn_qp_drained(qp);
    pthread_mutex_unlock(&qp->mutex);
    return idle;
}

static int state_enter(struct sn_qp *qp, enum ibv_qp_state to, const struct ibv_qp_attr *attr, int mask)
{
    if (to == IBV_QPS_RESET)
        return qp_reset(qp);
    if (to == IBV_QPS_ERR && sn_qp_state(qp) != IBV_QPS_RESET) {
        sn_qp_shm_fail(sn_self->world, qp->shm, -1);
    } else {
        sn_lock_take(&qp->shm->lock); /* a peer may be moving it to the error state now; this must not undo that */
        if (__atomic_load_n(&qp->shm->state, __ATOMIC_SEQ_CST) != IBV_QPS_ERR)
            __atomic_store_n(&qp->shm->state, to, __ATOMIC_SEQ_CST);
        sn_lock_drop(&qp->shm->lock);
    }
    if (to == IBV_QPS_SQD && (mask & IBV_QP_EN_SQD_ASYNC_NOTIFY)) {
        pthread_mutex_lock(&qp->mutex);
        qp->drain_due = attr->en_sqd_async_notify;
        pthread_mutex_unlock(&qp->mutex);
    }
    sn_qp_kick(qp); /* flush, or continue after SQD, or report that there is nothing to drain */
    return 0;
}

int ibv_modify_qp(struct ibv_qp *ibv, struct ibv_qp_attr *attr, int mask)
{
    struct sn_qp *qp = sn_qp_of(ibv);
    enum ibv_qp_state from = sn_qp_state(qp), to = mask & IBV_QP_STATE ? attr->qp_state : from;
    int r;

    if (sn_device_is_dead(sn_self->world, qp->ctx->dev))
        return EIO;
    if ((mask & IBV_QP_CUR_STATE) && attr->cur_qp_state != from) {
        sn_log("modify_qp %u: cur_qp_state %d, but it is in %d", qp->qpn, attr->cur_qp_state, from);
        return EINVAL;
    }
    r = sn_qp_state_check(qp->qpn, qp->shm->transport, from, to, mask);
    if (!r)
        r = values_check(qp, attr, mask);
    if (r)
        return r;
    values_take(qp, attr, mask);
    if (mask & IBV_QP_STATE)
        r = state_enter(qp, to, attr, mask);
    ibv->state = sn_qp_state(qp);
    return r;
}

int ibv_query_qp(struct ibv_qp *ibv, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init)
{
    struct sn_qp *qp = sn_qp_of(ibv);

    *attr = qp->attr;
    attr->qp_state = attr->cur_qp_state = ibv->state = sn_qp_state(qp);
    attr->sq_draining = attr->qp_state == IBV_QPS_SQD && !drained(qp);
    attr->path_mig_state = IBV_MIG_MIGRATED;
    attr->cap = qp->cap;
    *init = (struct ibv_qp_init_attr){.qp_context = ibv->qp_context,
                                      .send_cq = ibv->send_cq,
                                      .recv_cq = ibv->recv_cq,
                                      .srq = ibv->srq,
                                      .cap = qp->cap,
                                      .qp_type = ibv->qp_type,
                                      .sq_sig_all = qp->sig_all};
    return 0;
}

int ibv_query_qp_data_in_order(struct ibv_qp *qp, enum ibv_wr_opcode op, uint32_t flags)
{
    return 0; /* the last bytes come last, but the rest in any order: host_copy.c */
}

/* Enhanced connection establishment depends on the vendor. */
int ibv_query_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
    return EOPNOTSUPP;
}

int ibv_set_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
    return EOPNOTSUPP;
}
