/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/verbs/qp.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/softnic/nic/srd.h"
#include "tools/softnic/verbs/cq.h"
#include "tools/softnic/verbs/qp_state.h"
#include "tools/softnic/verbs/srq.h"
#include "tools/softnic/world/lock.h"
#include "tools/softnic/world/object.h"
#include "tools/softnic/world/proc.h"

enum { WAIT_NAP_US = 20, WAIT_DEATH_CHECK_NAPS = 500 };
#define QUIESCE_PATIENCE_NS 10000000000ull

/* EFA also has UD, and has never had RC. */
static int type_check(const struct sn_ctx *ctx, enum ibv_qp_type type)
{
    bool efa = sn_self->world->devs[ctx->dev].efa;

    if (efa ? type == IBV_QPT_DRIVER : type == IBV_QPT_RC || type == IBV_QPT_UC || type == IBV_QPT_UD)
        return 0;
    sn_log("create_qp on %s: type %d: there is %s", sn_self->world->devs[ctx->dev].name, type,
           efa ? "SRD, by efadv_create_qp_ex or efadv_create_driver_qp," : "RC, UC or UD");
    return EOPNOTSUPP;
}

static int caps_check(const struct ibv_qp_init_attr_ex *attr)
{
    const struct ibv_qp_cap *cap = &attr->cap;

    if (!attr->send_cq || !attr->recv_cq || !attr->pd)
        return EINVAL;
    if (cap->max_send_wr > SN_MAX_QP_WR || cap->max_recv_wr > SN_MAX_QP_WR || cap->max_send_sge > SN_MAX_SGE ||
        cap->max_recv_sge > SN_MAX_SGE || cap->max_inline_data > SN_MAX_INLINE) {
        sn_log("create_qp: asks for %u/%u requests, %u/%u buffers, %u bytes inline; the limits are %d, %d and %d",
               cap->max_send_wr, cap->max_recv_wr, cap->max_send_sge, cap->max_recv_sge, cap->max_inline_data,
               SN_MAX_QP_WR, SN_MAX_SGE, SN_MAX_INLINE);
        return EINVAL;
    }
    return 0;
}

/* A kernel looks up handles by context, and does not find those of another context. */
static int owner_check(const struct ibv_context *context, const struct ibv_qp_init_attr_ex *attr)
{
    if (attr->pd->context == context && attr->send_cq->context == context && attr->recv_cq->context == context &&
        (!attr->srq || attr->srq->context == context))
        return 0;
    sn_log("create_qp on %s: its domain or one of its queues is another context's", context->device->name);
    return EINVAL;
}

/* Allocate the send queue, in this process. It has one entry more than asked for, so that a posted request never shares
 * its entry with the one that is just being completed. */
static int sq_init(struct sn_qp *qp)
{
    if (qp->cap.max_send_sge == 0)
        qp->cap.max_send_sge = 1;
    qp->sq_size = 1;
    while (qp->sq_size <= qp->cap.max_send_wr)
        qp->sq_size <<= 1;
    qp->sq_stride = (uint32_t)(sizeof(struct sn_wqe) + qp->cap.max_send_sge * sizeof(struct sn_sge) +
                               qp->cap.max_inline_data + SN_LINE - 1) /
                    SN_LINE * SN_LINE;
    qp->sq = aligned_alloc(SN_LINE, (size_t)qp->sq_size * qp->sq_stride);
    if (!qp->sq)
        return -ENOMEM;
    if (!sn_qp_is_srd(qp))
        return 0;
    qp->turn = malloc(qp->sq_size * sizeof(*qp->turn));
    if (!qp->turn) {
        free(qp->sq);
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < qp->sq_size; i++)
        qp->turn[i] = (uint16_t)i;
    return 0;
}

static void shm_fill(struct sn_qp *qp, const struct ibv_qp_init_attr_ex *attr)
{
    struct sn_qp_shm *shm = qp->shm;

    shm->ctx = qp->ctx->index;
    shm->dev = qp->ctx->dev;
    shm->pd = attr->pd->handle;
    shm->transport = qp->transport;
    if (sn_qp_is_srd(qp))
        sn_srd_defaults(qp);
    shm->state = IBV_QPS_RESET;
    shm->scq = sn_cq_of(attr->send_cq)->index;
    shm->rcq = sn_cq_of(attr->recv_cq)->index;
    shm->srq = attr->srq ? ((struct sn_srq *)attr->srq)->index : SN_NONE;
    qp->qpn = shm->generation << 14 | qp->index;
    qp->queue.id = qp->index;
    __atomic_store_n(&sn_self->qps[qp->index], qp, __ATOMIC_RELEASE);
    __atomic_store_n(&shm->qpn, qp->qpn, __ATOMIC_RELEASE); /* peers can find it from here on */
}

static void ibv_fill(struct sn_qp *qp, const struct ibv_qp_init_attr_ex *attr)
{
    struct ibv_qp *ibv = &qp->ex.qp_base;

    ibv->context = attr->pd->context;
    ibv->qp_context = attr->qp_context;
    ibv->pd = attr->pd;
    ibv->send_cq = attr->send_cq;
    ibv->recv_cq = attr->recv_cq;
    ibv->srq = attr->srq;
    ibv->handle = qp->index;
    ibv->qp_num = qp->qpn;
    ibv->state = IBV_QPS_RESET;
    ibv->qp_type = attr->qp_type;
    pthread_mutex_init(&ibv->mutex, NULL);
    pthread_cond_init(&ibv->cond, NULL);
    sn_pd_hold(attr->pd);
    __atomic_fetch_add(&sn_cq_of(attr->send_cq)->refs, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&sn_cq_of(attr->recv_cq)->refs, 1, __ATOMIC_RELAXED);
    if (attr->srq)
        __atomic_fetch_add(&((struct sn_srq *)attr->srq)->refs, 1, __ATOMIC_RELAXED);
}

static void list_add(struct sn_qp *qp)
{
    struct sn_ctx *ctx = qp->ctx;

    pthread_mutex_lock(&ctx->qp_mutex);
    qp->next = ctx->qp_list;
    qp->prev = &ctx->qp_list;
    if (qp->next)
        qp->next->prev = &qp->next;
    ctx->qp_list = qp;
    pthread_mutex_unlock(&ctx->qp_mutex);
}

static void list_remove(struct sn_qp *qp)
{
    pthread_mutex_lock(&qp->ctx->qp_mutex);
    *qp->prev = qp->next;
    if (qp->next)
        qp->next->prev = qp->prev;
    pthread_mutex_unlock(&qp->ctx->qp_mutex);
}

static enum sn_transport transport_of(enum ibv_qp_type type)
{
    switch (type) {
    case IBV_QPT_DRIVER:
        return SN_TRANSPORT_SRD;
    case IBV_QPT_UC:
        return SN_TRANSPORT_UC;
    case IBV_QPT_UD:
        return SN_TRANSPORT_UD;
    default:
        return SN_TRANSPORT_RC;
    }
}

static uint64_t send_ops(enum sn_transport transport)
{
    static const uint64_t ops[] = {[SN_TRANSPORT_RC] = SN_WR_OPS,
                                   [SN_TRANSPORT_SRD] = SN_WR_OPS_SRD,
                                   [SN_TRANSPORT_UC] = SN_WR_OPS_UC,
                                   [SN_TRANSPORT_UD] = SN_WR_OPS_UD};

    return ops[transport];
}

static struct sn_qp *qp_open(const struct ibv_qp_init_attr_ex *attr)
{
    struct sn_world *world = sn_self->world;
    struct sn_qp *qp = sn_lines_alloc(sizeof(*qp));
    int r = -ENOMEM;

    if (!qp)
        goto fail;
    qp->ctx = sn_ctx_of(attr->pd->context);
    qp->pd = attr->pd->handle;
    qp->transport = transport_of(attr->qp_type);
    qp->cap = attr->cap;
    if (attr->srq)
        qp->cap.max_recv_wr = qp->cap.max_recv_sge = 0;
    else if (qp->cap.max_recv_sge == 0)
        qp->cap.max_recv_sge = 1;
    qp->sig_all = attr->sq_sig_all;
    qp->heap_at = UINT32_MAX;
    pthread_mutex_init(&qp->mutex, NULL);
    r = sq_init(qp);
    if (r < 0)
        goto free_qp;
    r = sn_qp_shm_take(world, sn_self->proc, &qp->index);
    if (r < 0)
        goto free_sq;
    qp->shm = &world->qps[qp->index];
    r = sn_rq_shm_init(world, &qp->shm->rq, qp->cap.max_recv_wr, qp->cap.max_recv_sge);
    if (r < 0)
        goto give_shm;
    return qp;
give_shm:
    sn_qp_shm_give(world, qp->index);
free_sq:
    free(qp->turn);
    free(qp->sq);
free_qp:
    free(qp);
fail:
    sn_log("create_qp with %u + %u requests: no room: %s", attr->cap.max_send_wr, attr->cap.max_recv_wr, strerror(-r));
    errno = -r;
    return NULL;
}

static struct ibv_qp *qp_create(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr)
{
    uint64_t ops = send_ops(transport_of(attr->qp_type));
    bool extended = attr->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    struct sn_qp *qp;

    if (sn_device_is_dead(sn_self->world, sn_ctx_of(context)->dev)) {
        errno = EIO;
        return NULL;
    }
    if (attr->comp_mask &
            ~(uint32_t)(IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS | IBV_QP_INIT_ATTR_CREATE_FLAGS) ||
        ((attr->comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS) && attr->create_flags) ||
        (extended && (attr->send_ops_flags & ~ops))) {
        sn_log("create_qp_ex: comp_mask 0x%x, send_ops_flags 0x%llx: not supported", attr->comp_mask,
               (unsigned long long)(extended ? attr->send_ops_flags : 0));
        errno = EOPNOTSUPP;
        return NULL;
    }
    errno = attr->qp_type == IBV_QPT_DRIVER ? sn_srd_caps_check(attr) : caps_check(attr);
    if (!errno)
        errno = owner_check(context, attr);
    if (errno)
        return NULL;
    qp = qp_open(attr);
    if (!qp)
        return NULL;
    shm_fill(qp, attr);
    ibv_fill(qp, attr);
    qp->extended = extended;
    if (extended)
        sn_wr_fill(qp, attr->send_ops_flags);
    list_add(qp);
    attr->cap = qp->cap;
    return &qp->ex.qp_base;
}

struct ibv_qp *sn_qp_create_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr)
{
    errno = type_check(sn_ctx_of(context), attr->qp_type);
    if (!errno && attr->qp_type == IBV_QPT_DRIVER) {
        sn_log("create_qp on %s: SRD comes from efadv_create_qp_ex or efadv_create_driver_qp", context->device->name);
        errno = EOPNOTSUPP;
    }
    return errno ? NULL : qp_create(context, attr);
}

struct ibv_qp *sn_qp_create_srd(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr)
{
    errno = type_check(sn_ctx_of(context), attr->qp_type);
    return errno ? NULL : qp_create(context, attr);
}

struct ibv_qp_init_attr_ex sn_qp_init_extend(struct ibv_pd *pd, const struct ibv_qp_init_attr *init)
{
    struct ibv_qp_init_attr_ex attr = {0};

    memcpy(&attr, init, sizeof(*init)); /* both begin alike, but one has its mask where the other has padding */
    attr.comp_mask = IBV_QP_INIT_ATTR_PD;
    attr.pd = pd;
    return attr;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *init)
{
    struct ibv_qp_init_attr_ex attr = sn_qp_init_extend(pd, init);
    struct ibv_qp *qp = sn_qp_create_ex(pd->context, &attr);

    if (qp)
        init->cap = attr.cap;
    return qp;
}

struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp)
{
    return sn_qp_of(qp)->extended ? &sn_qp_of(qp)->ex : NULL;
}

struct sn_qp *sn_qp_local(uint32_t qpn)
{
    struct sn_qp *qp = __atomic_load_n(&sn_self->qps[sn_qpn_index(qpn)], __ATOMIC_ACQUIRE);

    return qp && qp->qpn == qpn ? qp : NULL;
}

static bool initiator_gone(const uint64_t *word, uint64_t first, bool ask)
{
    uint64_t entry = __atomic_load_n(word, __ATOMIC_SEQ_CST);

    return (uint32_t)entry == 0 || entry != first || (ask && !sn_pid_runs((uint32_t)entry));
}

/* Wait only for those at work now. Later ones find that the caller has invalidated the object. */
int sn_qp_initiators_wait(struct sn_qp *qp, uint64_t give_up)
{
    uint32_t first_runs = __atomic_load_n(&qp->runs, __ATOMIC_SEQ_CST);
    uint64_t first[SN_MAX_INITIATORS];

    for (uint32_t i = 0; i < SN_MAX_INITIATORS; i++)
        first[i] = __atomic_load_n(&qp->shm->initiators[i], __ATOMIC_SEQ_CST);
    for (uint32_t naps = 1;; naps++) {
        bool gone = !(first_runs & 1) || __atomic_load_n(&qp->runs, __ATOMIC_SEQ_CST) != first_runs;

        for (uint32_t i = 0; i < SN_MAX_INITIATORS && gone; i++)
            gone = initiator_gone(&qp->shm->initiators[i], first[i], naps % WAIT_DEATH_CHECK_NAPS == 0);
        if (gone)
            return 0;
        if (sn_now_ns() > give_up)
            return -ETIMEDOUT;
        usleep(WAIT_NAP_US);
    }
}

int sn_qp_quiesce(struct sn_qp *qp)
{
    uint64_t give_up = sn_now_ns() + QUIESCE_PATIENCE_NS;
    bool idle = false;

    pthread_mutex_lock(&qp->mutex);
    __atomic_store_n(&qp->closing, true, __ATOMIC_RELAXED);
    /* A copy under way must end first, since its memory is freed after this. */
    if (qp->queued && !(!qp->running && sn_qp_copying(qp)) && sn_engine_remove(&qp->ctx->engine, qp))
        qp->queued = false;
    pthread_mutex_unlock(&qp->mutex);
    while (!idle && sn_now_ns() < give_up) {
        pthread_mutex_lock(&qp->mutex);
        idle = !qp->queued && !qp->running;
        pthread_mutex_unlock(&qp->mutex);
        if (!idle)
            usleep(WAIT_NAP_US);
    }
    if (!idle || sn_qp_initiators_wait(qp, give_up) < 0) {
        sn_log("queue pair %u: a transfer did not end within 10 s", qp->qpn);
        return -ETIMEDOUT;
    }
    return 0;
}

int ibv_destroy_qp(struct ibv_qp *ibv)
{
    struct sn_qp *qp = sn_qp_of(ibv);

    /* From here on no initiator finds it. Wait for those that have found it. */
    __atomic_store_n(&qp->shm->qpn, 0, __ATOMIC_SEQ_CST);
    if (sn_qp_quiesce(qp) < 0)
        return EBUSY;
    sn_async_forget(ibv->context, SN_EVENT_OF_QP, qp->qpn);
    if (sn_ack_wait(&ibv->mutex, &ibv->cond, &ibv->events_completed, &qp->async_events,
                    "destroy_qp: asynchronous events"))
        return EBUSY;
    list_remove(qp);
    __atomic_store_n(&sn_self->qps[qp->index], NULL, __ATOMIC_RELEASE);
    sn_cq_purge(sn_cq_of(ibv->send_cq), qp->qpn);
    if (ibv->recv_cq != ibv->send_cq)
        sn_cq_purge(sn_cq_of(ibv->recv_cq), qp->qpn);
    sn_pd_release(ibv->pd);
    __atomic_fetch_sub(&sn_cq_of(ibv->send_cq)->refs, 1, __ATOMIC_RELEASE);
    __atomic_fetch_sub(&sn_cq_of(ibv->recv_cq)->refs, 1, __ATOMIC_RELEASE);
    if (ibv->srq)
        __atomic_fetch_sub(&((struct sn_srq *)ibv->srq)->refs, 1, __ATOMIC_RELEASE);
    for (uint32_t i = qp->done; i != qp->exec; i++)
        free(sn_wqe_at(qp, i)->bounce);
    sn_qp_shm_give(sn_self->world, qp->index);
    pthread_mutex_destroy(&qp->mutex);
    free(qp->batch);
    free(qp->turn);
    free(qp->sq);
    free(qp);
    return 0;
}
