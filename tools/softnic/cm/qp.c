/* SPDX-License-Identifier: Apache-2.0 */
/* Queue pairs that belong to an identifier, with the completion queues that the library makes for them. */
#include <errno.h>
#include <string.h>

#include "tools/softnic/cm/cm.h"

enum { RNR_TIMER = 0 /* 655 ms, as Linux's rdma_cm sets it */, ACK_TIMEOUT = 14 /* 67 ms */ };

int cm_depth_check(struct cm_id *id, uint8_t *depth)
{
    struct ibv_device_attr attr;
    int max;

    if (!id->abi.verbs || ibv_query_device(id->abi.verbs, &attr))
        return EINVAL;
    max = attr.max_qp_rd_atom < SN_RDMA_MAX_DEPTH ? attr.max_qp_rd_atom : SN_RDMA_MAX_DEPTH - 1;
    if (*depth == SN_RDMA_MAX_DEPTH)
        *depth = (uint8_t)max;
    return *depth > max ? EINVAL : 0;
}

static struct ibv_ah_attr way_to(const uint8_t *gid)
{
    struct ibv_ah_attr ah = {.is_global = 1, .port_num = 1, .grh = {.sgid_index = 1, .hop_limit = 64}};

    memcpy(ah.grh.dgid.raw, gid, sizeof(ah.grh.dgid.raw));
    return ah;
}

/* The peer's reads and atomics are allowed if it may have any in flight. */
static void init_attr(const struct cm_id *id, struct ibv_qp_attr *attr, int *mask)
{
    attr->pkey_index = 0;
    attr->port_num = 1;
    *mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
    if (cm_is_datagram(id)) {
        attr->qkey = SN_RDMA_UDP_QKEY;
        *mask |= IBV_QP_QKEY;
        return;
    }
    attr->qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
    if (id->local.responder_resources)
        attr->qp_access_flags |= IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    *mask |= IBV_QP_ACCESS_FLAGS;
}

static void rtr_attr(const struct cm_id *id, struct ibv_qp_attr *attr, int *mask)
{
    *mask = IBV_QP_STATE;
    if (cm_is_datagram(id))
        return;
    attr->ah_attr = way_to(id->remote.gid);
    attr->path_mtu = IBV_MTU_4096;
    attr->dest_qp_num = id->remote.qpn;
    attr->rq_psn = id->remote.psn;
    attr->max_dest_rd_atomic = id->local.responder_resources;
    attr->min_rnr_timer = RNR_TIMER;
    *mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
             IBV_QP_MIN_RNR_TIMER;
}

static void rts_attr(const struct cm_id *id, struct ibv_qp_attr *attr, int *mask)
{
    attr->sq_psn = id->local.psn;
    *mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
    if (cm_is_datagram(id))
        return;
    attr->timeout = id->has_ack_timeout ? id->ack_timeout : ACK_TIMEOUT;
    attr->retry_cnt = id->local.retry_count;
    attr->rnr_retry = id->local.rnr_retry_count;
    attr->max_rd_atomic = id->local.initiator_depth;
    *mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
}

static bool knows_peer(const struct cm_id *id)
{
    return cm_is_datagram(id) || id->remote.magic;
}

int rdma_init_qp_attr(struct sn_rdma_id *abi, struct ibv_qp_attr *attr, int *mask)
{
    const struct cm_id *id = cm_id_of(abi);
    enum ibv_qp_state state = attr->qp_state;

    if (!abi->verbs || (state != IBV_QPS_INIT && !knows_peer(id)))
        return cm_fail(EINVAL);
    memset(attr, 0, sizeof(*attr));
    attr->qp_state = state;
    if (state == IBV_QPS_INIT)
        init_attr(id, attr, mask);
    else if (state == IBV_QPS_RTR)
        rtr_attr(id, attr, mask);
    else if (state == IBV_QPS_RTS)
        rts_attr(id, attr, mask);
    else
        return cm_fail(EINVAL);
    return 0;
}

static int to_state(struct cm_id *id, struct ibv_qp *qp, enum ibv_qp_state state)
{
    struct ibv_qp_attr attr = {.qp_state = state};
    int mask;

    return rdma_init_qp_attr(&id->abi, &attr, &mask) ? errno : ibv_modify_qp(qp, &attr, mask);
}

int cm_qp_connect(struct cm_id *id)
{
    /* INIT once more: only now are the access rights known */
    static const enum ibv_qp_state states[] = {IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS};
    int r = 0;

    for (unsigned i = 0; i < 3 && !r && id->abi.qp && !cm_is_datagram(id); i++)
        r = to_state(id, id->abi.qp, states[i]);
    return r;
}

int cm_qp_fail(struct cm_id *id)
{
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};

    return id->abi.qp && !cm_is_datagram(id) ? ibv_modify_qp(id->abi.qp, &attr, IBV_QP_STATE) : 0;
}

/* ---- completion queues ---- */

static int cq_make(struct sn_rdma_id *id, struct ibv_comp_channel **channel, struct ibv_cq **cq, uint32_t entries)
{
    *channel = ibv_create_comp_channel(id->verbs);
    if (!*channel)
        return -1;
    *cq = ibv_create_cq(id->verbs, entries ? (int)entries : 1, id, *channel, 0);
    return *cq ? 0 : -1;
}

static void cq_drop(struct ibv_comp_channel **channel, struct ibv_cq **cq)
{
    if (*cq)
        ibv_destroy_cq(*cq);
    if (*channel)
        ibv_destroy_comp_channel(*channel);
    *cq = NULL;
    *channel = NULL;
}

static void cqs_drop(struct sn_rdma_id *id)
{
    cq_drop(&id->send_cq_channel, &id->send_cq);
    if (!id->srq)
        cq_drop(&id->recv_cq_channel, &id->recv_cq);
}

/* Make completion queues if the program has given none. An SRQ of this id has already made the one for receives. */
static int cqs_make(struct sn_rdma_id *id, struct ibv_qp_init_attr_ex *attr)
{
    if (!attr->send_cq && cq_make(id, &id->send_cq_channel, &id->send_cq, attr->cap.max_send_wr))
        return -1;
    if (!attr->recv_cq && !id->recv_cq && cq_make(id, &id->recv_cq_channel, &id->recv_cq, attr->cap.max_recv_wr))
        return -1;
    if (!attr->send_cq)
        attr->send_cq = id->send_cq;
    if (!attr->recv_cq)
        attr->recv_cq = id->recv_cq;
    return 0;
}

static int qp_ready(struct cm_id *id, struct ibv_qp *qp)
{
    static const enum ibv_qp_state states[] = {IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS};
    unsigned count = cm_is_datagram(id) ? 3 : 1;
    int r = 0;

    for (unsigned i = 0; i < count && !r; i++)
        r = to_state(id, qp, states[i]);
    return r;
}

int rdma_create_qp_ex(struct sn_rdma_id *abi, struct ibv_qp_init_attr_ex *attr)
{
    struct cm_id *id = cm_id_of(abi);
    struct ibv_qp *qp;
    int error;

    if (abi->qp || !abi->verbs || attr->qp_type != abi->qp_type)
        return cm_fail(EINVAL);
    if (!(attr->comp_mask & IBV_QP_INIT_ATTR_PD) || !attr->pd) {
        attr->comp_mask |= IBV_QP_INIT_ATTR_PD;
        attr->pd = abi->pd;
    }
    if (attr->pd->context != abi->verbs)
        return cm_fail(EINVAL);
    if (!attr->srq)
        attr->srq = abi->srq;
    if (cqs_make(abi, attr))
        goto drop_cqs;
    qp = ibv_create_qp_ex(abi->verbs, attr);
    if (!qp)
        goto drop_cqs;
    error = qp_ready(id, qp);
    if (error) {
        ibv_destroy_qp(qp);
        errno = error;
        goto drop_cqs;
    }
    abi->pd = qp->pd;
    abi->qp = qp;
    return 0;
drop_cqs:
    error = errno;
    cqs_drop(abi);
    return cm_fail(error);
}

int rdma_create_qp(struct sn_rdma_id *id, struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
    struct ibv_qp_init_attr_ex ex = {.qp_context = attr->qp_context,
                                     .send_cq = attr->send_cq,
                                     .recv_cq = attr->recv_cq,
                                     .srq = attr->srq,
                                     .cap = attr->cap,
                                     .qp_type = attr->qp_type,
                                     .sq_sig_all = attr->sq_sig_all,
                                     .comp_mask = pd ? IBV_QP_INIT_ATTR_PD : 0,
                                     .pd = pd};
    int r = rdma_create_qp_ex(id, &ex);

    if (r)
        return r;
    attr->send_cq = ex.send_cq;
    attr->recv_cq = ex.recv_cq;
    attr->srq = ex.srq;
    attr->cap = ex.cap;
    return 0;
}

void rdma_destroy_qp(struct sn_rdma_id *id)
{
    if (id->qp)
        ibv_destroy_qp(id->qp);
    id->qp = NULL;
    cqs_drop(id);
}

/* ---- shared receive queues ---- */

int rdma_create_srq_ex(struct sn_rdma_id *id, struct ibv_srq_init_attr_ex *attr)
{
    bool basic = !(attr->comp_mask & IBV_SRQ_INIT_ATTR_TYPE) || attr->srq_type == IBV_SRQT_BASIC;
    struct ibv_srq_init_attr plain = {.srq_context = attr->srq_context, .attr = attr->attr};
    struct ibv_pd *pd = attr->comp_mask & IBV_SRQ_INIT_ATTR_PD && attr->pd ? attr->pd : id->pd;
    int error;

    if (id->srq || !id->verbs || pd->context != id->verbs)
        return cm_fail(EINVAL);
    if (!basic)
        return cm_fail(EOPNOTSUPP); /* XRC, tag matching */
    if (cq_make(id, &id->recv_cq_channel, &id->recv_cq, attr->attr.max_wr))
        goto drop_cq;
    id->srq = ibv_create_srq(pd, &plain);
    if (!id->srq)
        goto drop_cq;
    attr->attr = plain.attr;
    id->pd = pd;
    return 0;
drop_cq:
    error = errno;
    cq_drop(&id->recv_cq_channel, &id->recv_cq);
    return cm_fail(error);
}

int rdma_create_srq(struct sn_rdma_id *id, struct ibv_pd *pd, struct ibv_srq_init_attr *attr)
{
    struct ibv_srq_init_attr_ex ex = {
        .srq_context = attr->srq_context, .attr = attr->attr, .comp_mask = pd ? IBV_SRQ_INIT_ATTR_PD : 0, .pd = pd};
    int r = rdma_create_srq_ex(id, &ex);

    if (!r)
        attr->attr = ex.attr;
    return r;
}

void rdma_destroy_srq(struct sn_rdma_id *id)
{
    if (id->srq)
        ibv_destroy_srq(id->srq);
    id->srq = NULL;
    cq_drop(&id->recv_cq_channel, &id->recv_cq);
}
