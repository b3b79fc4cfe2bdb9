/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/verbs/cq.h"

#include <stdlib.h>
#include <time.h>

#include "tools/softnic/verbs/qp.h"
#include "tools/softnic/world/lock.h"
#include "tools/softnic/world/object.h"
#include "tools/softnic/world/queues.h"

enum { ACK_PATIENCE_S = 10 };

/* A polled completion frees entries of the queue: the program now knows that they are done. */
static void entries_free(const struct sn_cqe *cqe)
{
    struct sn_qp *qp = sn_qp_local(cqe->qp_num);

    if (!qp)
        return;
    if (cqe->is_recv)
        __atomic_fetch_add(&qp->recv_polled, 1, __ATOMIC_RELAXED);
    else
        __atomic_store_n(&qp->freed, cqe->queue_upto, __ATOMIC_RELEASE);
}

bool sn_cq_take_locked(struct sn_cq *cq, struct sn_cqe *cqe)
{
    struct sn_cq_shm *shm = cq->shm;
    uint32_t head = shm->head;
    const struct sn_cqe *ring;

    /* [cq-tail] acquire; pairs with sn_cq_push: the entry, and the memory it reports on, are visible. */
    if (__atomic_load_n(&shm->tail, __ATOMIC_ACQUIRE) == head)
        return false;
    ring = sn_ring_at(sn_self->world, shm->ring_off, (uint64_t)shm->capacity * sizeof(*ring));
    if (!ring || !shm->capacity)
        return false; /* the world is damaged */
    *cqe = ring[head & (shm->capacity - 1)];
    /* [cq-head] release; pairs with sn_cq_push: the entry was read. */
    __atomic_store_n(&shm->head, head + 1, __ATOMIC_RELEASE);
    entries_free(cqe);
    return true;
}

uint32_t sn_cqe_slid(const struct sn_cqe *cqe)
{
    const struct sn_world *world = sn_self->world;

    if (!cqe->is_recv || cqe->src_dev >= world->dev_count)
        return 0;
    return world->devs[cqe->src_dev].efa ? cqe->src_dev : world->devs[cqe->src_dev].lid;
}

static void wc_fill(struct ibv_wc *wc, const struct sn_cqe *cqe)
{
    *wc = (struct ibv_wc){.wr_id = cqe->wr_id,
                          .status = cqe->status,
                          .opcode = cqe->opcode,
                          .vendor_err = cqe->vendor_err,
                          .byte_len = cqe->byte_len,
                          .imm_data = cqe->imm,
                          .qp_num = cqe->qp_num,
                          .src_qp = cqe->src_qp,
                          .slid = (uint16_t)sn_cqe_slid(cqe),
                          .sl = (uint8_t)cqe->sl,
                          .wc_flags = cqe->wc_flags};
}

int sn_cq_poll(struct ibv_cq *ibv, int count, struct ibv_wc *wc)
{
    struct sn_cq *cq = sn_cq_of(ibv);
    struct sn_cqe cqe;
    int n = 0;

    if (__atomic_load_n(&cq->shm->tail, __ATOMIC_ACQUIRE) == __atomic_load_n(&cq->shm->head, __ATOMIC_RELAXED)) {
        sn_engine_help(&cq->ctx->engine);
        if (__atomic_load_n(&cq->shm->overrun, __ATOMIC_RELAXED))
            return -EIO; /* reported after the existing entries: completions are lost, which the program must learn */
    }
    pthread_mutex_lock(&cq->mutex);
    while (n < count && sn_cq_take_locked(cq, &cqe))
        wc_fill(&wc[n++], &cqe);
    pthread_mutex_unlock(&cq->mutex);
    return n;
}

int sn_cq_req_notify(struct ibv_cq *ibv, int solicited_only)
{
    struct sn_cq_shm *shm = sn_cq_of(ibv)->shm;
    uint32_t arm = solicited_only ? SN_CQ_ARM_SOLICITED : SN_CQ_ARM_ANY;

    /* Under the lock, so that a completion pushed after this is noticed, and one pushed before is found by polling. */
    sn_lock_take(&shm->lock);
    if (arm > shm->armed)
        shm->armed = arm;
    sn_lock_drop(&shm->lock);
    return 0;
}

void sn_cq_purge(struct sn_cq *cq, uint32_t qpn)
{
    struct sn_cq_shm *shm = cq->shm;
    struct sn_cqe *ring;
    uint32_t mask, to;

    pthread_mutex_lock(&cq->mutex);
    ring = sn_ring_at(sn_self->world, shm->ring_off, (uint64_t)shm->capacity * sizeof(*ring));
    mask = shm->capacity - 1;
    if (!ring || !shm->capacity) { /* the world is damaged */
        pthread_mutex_unlock(&cq->mutex);
        return;
    }
    sn_lock_take(&shm->lock);
    to = shm->tail;
    /* Walk from the newest entry to the oldest, and move up those to keep: the tail stays, so their positions stay
     * right. */
    for (uint32_t from = shm->tail; from != shm->head; from--)
        if (ring[(from - 1) & mask].qp_num != qpn)
            ring[--to & mask] = ring[(from - 1) & mask];
    __atomic_store_n(&shm->head, to, __ATOMIC_RELEASE);
    sn_lock_drop(&shm->lock);
    pthread_mutex_unlock(&cq->mutex);
}

static struct sn_cq *cq_create(struct ibv_context *context, uint32_t entries, void *cq_context,
                               struct ibv_comp_channel *channel, int comp_vector)
{
    struct sn_channel *ch = (struct sn_channel *)channel;
    struct sn_ctx *ctx = sn_ctx_of(context);
    struct sn_cq *cq;
    int r;

    if (entries == 0 || entries > SN_MAX_CQE || comp_vector < 0 || comp_vector >= context->num_comp_vectors) {
        sn_log("create_cq on %s: %u entries (1 to %u), completion vector %d (0 to %d)", sn_ctx_dev(ctx)->name, entries,
               (unsigned)SN_MAX_CQE, comp_vector, context->num_comp_vectors - 1);
        errno = EINVAL;
        return NULL;
    }
    cq = sn_lines_alloc(sizeof(*cq));
    if (!cq)
        return NULL;
    r = sn_cq_shm_take(sn_self->world, sn_self->proc, ctx->index, entries, &cq->index);
    if (r < 0) {
        sn_log("create_cq of %u entries on %s: no room in the world", entries, sn_ctx_dev(ctx)->name);
        free(cq);
        errno = -r;
        return NULL;
    }
    cq->shm = &sn_self->world->cqs[cq->index];
    cq->shm->wake_id = ch ? ch->wake_id : 0;
    cq->ctx = ctx;
    pthread_mutex_init(&cq->mutex, NULL);
    pthread_mutex_init(&cq->ibv.cq.mutex, NULL);
    pthread_cond_init(&cq->ibv.cq.cond, NULL);
    cq->ibv.cq.context = context;
    cq->ibv.cq.channel = channel;
    cq->ibv.cq.cq_context = cq_context;
    cq->ibv.cq.handle = cq->index;
    cq->ibv.cq.cqe = (int)cq->shm->capacity;
    __atomic_store_n(&sn_self->cqs[cq->index], cq, __ATOMIC_RELEASE);
    if (ch) {
        pthread_mutex_lock(&ch->mutex);
        cq->next = ch->list;
        ch->list = cq;
        ch->ibv.refcnt++;
        pthread_mutex_unlock(&ch->mutex);
    }
    return cq;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context, struct ibv_comp_channel *channel,
                             int comp_vector)
{
    struct sn_cq *cq = cq_create(context, cqe > 0 ? (uint32_t)cqe : 0, cq_context, channel, comp_vector);

    return cq ? &cq->ibv.cq : NULL;
}

struct ibv_cq_ex *sn_cq_create_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr)
{
    uint32_t flags = attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS ? attr->flags : 0;
    struct sn_cq *cq;

    /* IBV_CREATE_CQ_ATTR_SINGLE_THREADED needs nothing. IGNORE_OVERRUN is accepted, but an overrun is never ignored. */
    if (attr->comp_mask & ~(uint32_t)(IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD) ||
        flags & ~(uint32_t)IBV_CREATE_CQ_ATTR_SINGLE_THREADED ||
        attr->wc_flags & ~(uint64_t)(IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP |
                                     IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK)) {
        sn_log("create_cq_ex on %s: comp_mask 0x%x, flags 0x%x, wc_flags 0x%llx: not supported", context->device->name,
               attr->comp_mask, flags, (unsigned long long)attr->wc_flags);
        errno = EOPNOTSUPP;
        return NULL;
    }
    cq = cq_create(context, attr->cqe, attr->cq_context, attr->channel, (int)attr->comp_vector);
    if (!cq)
        return NULL;
    sn_cq_ex_fill(cq);
    return &cq->ibv.ex;
}

int sn_ack_wait(pthread_mutex_t *mutex, pthread_cond_t *cond, const uint32_t *acknowledged, const uint32_t *delivered,
                const char *what)
{
    struct timespec until;
    int r = 0;

    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += ACK_PATIENCE_S;
    pthread_mutex_lock(mutex);
    while (*acknowledged != *delivered && r == 0)
        r = pthread_cond_clockwait(cond, mutex, CLOCK_MONOTONIC, &until);
    if (r)
        sn_log("%s: %u of %u events were acknowledged within %d s; not destroyed", what, *acknowledged, *delivered,
               ACK_PATIENCE_S);
    pthread_mutex_unlock(mutex);
    return r ? EBUSY : 0;
}

int ibv_destroy_cq(struct ibv_cq *ibv)
{
    struct sn_cq *cq = sn_cq_of(ibv), **link;
    struct sn_channel *ch = (struct sn_channel *)ibv->channel;

    if (__atomic_load_n(&cq->refs, __ATOMIC_ACQUIRE))
        return EBUSY;
    if (ch) { /* first, so that no more events are delivered */
        pthread_mutex_lock(&ch->mutex);
        for (link = &ch->list; *link && *link != cq; link = &(*link)->next)
            ;
        if (*link) {
            *link = cq->next;
            ch->ibv.refcnt--;
            sn_channel_settle_locked(ch);
        }
        pthread_mutex_unlock(&ch->mutex);
    }
    sn_async_forget(ibv->context, SN_EVENT_OF_CQ, cq->index);
    if (sn_ack_wait(&ibv->mutex, &ibv->cond, &ibv->comp_events_completed, &cq->comp_events,
                    "destroy_cq: completion events") ||
        sn_ack_wait(&ibv->mutex, &ibv->cond, &ibv->async_events_completed, &cq->async_events,
                    "destroy_cq: asynchronous events"))
        return EBUSY;
    __atomic_store_n(&sn_self->cqs[cq->index], NULL, __ATOMIC_RELEASE);
    sn_cq_shm_give(sn_self->world, cq->index);
    pthread_mutex_destroy(&cq->mutex);
    free(cq);
    return 0;
}

int ibv_resize_cq(struct ibv_cq *ibv, int cqe)
{
    struct sn_cq *cq = sn_cq_of(ibv);
    int r;

    if (cqe < 1 || cqe > SN_MAX_CQE)
        return EINVAL;
    pthread_mutex_lock(&cq->mutex);
    r = sn_cq_shm_resize(sn_self->world, cq->index, (uint32_t)cqe);
    if (!r)
        ibv->cqe = (int)cq->shm->capacity;
    pthread_mutex_unlock(&cq->mutex);
    return -r;
}

int sn_cq_modify(struct ibv_cq *cq, struct ibv_modify_cq_attr *attr)
{
    return attr->attr_mask & ~(uint32_t)IBV_CQ_ATTR_MODERATE ? EOPNOTSUPP
                                                             : 0; /* moderation is a hint, and not needed here */
}
