/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/verbs/srq.h"

#include <stdlib.h>

#include "tools/softnic/verbs/cq.h"
#include "tools/softnic/world/lock.h"
#include "tools/softnic/world/object.h"
#include "tools/softnic/world/queues.h"

static struct sn_srq *srq_open(struct ibv_pd *pd, const struct ibv_srq_attr *attr)
{
    struct sn_world *world = sn_self->world;
    struct sn_srq *srq;
    int r;

    if (attr->max_wr == 0 || attr->max_wr > SN_MAX_SRQ_WR || attr->max_sge > SN_MAX_SGE) {
        errno = EINVAL;
        return NULL;
    }
    srq = calloc(1, sizeof(*srq));
    if (!srq)
        return NULL;
    r = sn_srq_shm_take(world, sn_self->proc, &srq->index);
    if (r < 0)
        goto free_srq;
    srq->shm = &world->srqs[srq->index];
    srq->max_sge = attr->max_sge ? attr->max_sge : 1;
    r = sn_rq_shm_init(world, &srq->shm->rq, attr->max_wr, srq->max_sge);
    if (r < 0)
        goto give_shm;
    srq->max_wr = srq->shm->rq.capacity;
    srq->shm->pd = pd->handle;
    srq->shm->ctx = sn_ctx_of(pd->context)->index;
    __atomic_store_n(&sn_self->srqs[srq->index], srq, __ATOMIC_RELEASE);
    return srq;
give_shm:
    sn_srq_shm_give(world, srq->index);
free_srq:
    sn_log("create_srq of %u entries: no room in the world", attr->max_wr);
    free(srq);
    errno = -r;
    return NULL;
}

struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *init)
{
    struct sn_srq *srq = srq_open(pd, &init->attr);

    if (!srq)
        return NULL;
    srq->ibv.context = pd->context;
    srq->ibv.srq_context = init->srq_context;
    srq->ibv.pd = pd;
    sn_pd_hold(pd);
    srq->ibv.handle = srq->index;
    pthread_mutex_init(&srq->ibv.mutex, NULL);
    pthread_cond_init(&srq->ibv.cond, NULL);
    init->attr.max_wr = srq->max_wr;
    init->attr.max_sge = srq->max_sge;
    return &srq->ibv;
}

int ibv_modify_srq(struct ibv_srq *ibv, struct ibv_srq_attr *attr, int mask)
{
    struct sn_rq_shm *rq = &((struct sn_srq *)ibv)->shm->rq;

    if (mask & IBV_SRQ_MAX_WR)
        return EOPNOTSUPP;
    if (!(mask & IBV_SRQ_LIMIT))
        return 0;
    if (attr->srq_limit > rq->capacity)
        return EINVAL;
    sn_lock_take(&rq->lock);
    rq->limit = attr->srq_limit;
    sn_lock_drop(&rq->lock);
    return 0;
}

int ibv_query_srq(struct ibv_srq *ibv, struct ibv_srq_attr *attr)
{
    struct sn_srq *srq = (struct sn_srq *)ibv;

    *attr = (struct ibv_srq_attr){srq->max_wr, srq->max_sge, srq->shm->rq.limit};
    return 0;
}

int ibv_destroy_srq(struct ibv_srq *ibv)
{
    struct sn_srq *srq = (struct sn_srq *)ibv;

    if (__atomic_load_n(&srq->refs, __ATOMIC_ACQUIRE))
        return EBUSY;
    sn_async_forget(ibv->context, SN_EVENT_OF_SRQ, srq->index);
    if (sn_ack_wait(&ibv->mutex, &ibv->cond, &ibv->events_completed, &srq->async_events,
                    "destroy_srq: asynchronous events"))
        return EBUSY;
    __atomic_store_n(&sn_self->srqs[srq->index], NULL, __ATOMIC_RELEASE);
    sn_srq_shm_give(sn_self->world, srq->index);
    sn_pd_release(ibv->pd);
    free(srq);
    return 0;
}
