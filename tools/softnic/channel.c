/* SPDX-License-Identifier: Apache-2.0 */
/* Completion channels and asynchronous events: what a blocked reader is told. */
#include <stdlib.h>
#include <unistd.h>

#include "tools/softnic/cq.h"
#include "tools/softnic/lock.h"
#include "tools/softnic/qp.h"
#include "tools/softnic/srq.h"
#include "tools/softnic/wake.h"

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
    struct sn_channel *ch = calloc(1, sizeof(*ch));
    int fd;

    if (!ch)
        return NULL;
    fd = sn_wake_open(sn_self->world, &ch->wake_id);
    if (fd < 0) {
        free(ch);
        errno = -fd;
        return NULL;
    }
    ch->ibv.context = context;
    ch->ibv.fd = fd;
    pthread_mutex_init(&ch->mutex, NULL);
    return &ch->ibv;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *ibv)
{
    struct sn_channel *ch = (struct sn_channel *)ibv;
    bool busy;

    pthread_mutex_lock(&ch->mutex);
    busy = ch->list != NULL;
    pthread_mutex_unlock(&ch->mutex);
    if (busy)
        return EBUSY;
    close(ibv->fd);
    pthread_mutex_destroy(&ch->mutex);
    free(ch);
    return 0;
}

/* A queue of this channel with an event, which is taken; *more: there are others. */
static struct sn_cq *event_take(struct sn_channel *ch, bool *more)
{
    struct sn_cq *found = NULL;

    *more = false;
    pthread_mutex_lock(&ch->mutex);
    for (struct sn_cq *cq = ch->list; cq; cq = cq->next) {
        if (!__atomic_load_n(&cq->shm->events, __ATOMIC_ACQUIRE))
            continue;
        if (found) {
            *more = true;
            break;
        }
        found = cq;
        *more = __atomic_fetch_sub(&cq->shm->events, 1, __ATOMIC_ACQ_REL) > 1;
        if (*more)
            break;
    }
    if (found) {
        pthread_mutex_lock(&found->ibv.cq.mutex);
        found->comp_events++;
        pthread_mutex_unlock(&found->ibv.cq.mutex);
    }
    pthread_mutex_unlock(&ch->mutex);
    return found;
}

int ibv_get_cq_event(struct ibv_comp_channel *ibv, struct ibv_cq **cq, void **cq_context)
{
    struct sn_channel *ch = (struct sn_channel *)ibv;
    struct sn_cq *found;
    bool more;
    int r;

    do {
        r = sn_wake_take(ibv->fd);
        if (r < 0) {
            errno = -r;
            return -1;
        }
        found = event_take(ch, &more);
        /* A token that found the socket full was dropped: replace it. One too many only makes the loop go round. */
        if (more)
            sn_wake_send(sn_self->world, ch->wake_id);
    } while (!found);
    *cq = &found->ibv.cq;
    *cq_context = found->ibv.cq.cq_context;
    return 0;
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int count)
{
    pthread_mutex_lock(&cq->mutex);
    cq->comp_events_completed += count;
    pthread_cond_signal(&cq->cond);
    pthread_mutex_unlock(&cq->mutex);
}

static bool async_pop(struct sn_ctx_shm *shm, struct sn_async *event)
{
    bool found;

    sn_lock_take(&shm->lock);
    found = shm->head != shm->tail;
    if (found)
        *event = shm->events[shm->head++ % SN_ASYNC_EVENTS];
    sn_lock_drop(&shm->lock);
    return found;
}

static void delivered(pthread_mutex_t *mutex, uint32_t *count)
{
    pthread_mutex_lock(mutex);
    ++*count;
    pthread_mutex_unlock(mutex);
}

/* From numbers to the program's objects; false: the object is gone, nobody to tell. */
static bool async_resolve(const struct sn_async *event, struct ibv_async_event *out)
{
    struct sn_qp *qp;
    struct sn_cq *cq;
    struct sn_srq *srq;

    out->event_type = event->type;
    switch (event->type) {
    case IBV_EVENT_PORT_ACTIVE:
    case IBV_EVENT_PORT_ERR:
        out->element.port_num = (int)event->element;
        return true;
    case IBV_EVENT_CQ_ERR:
        cq = event->element < SN_MAX_CQS ? __atomic_load_n(&sn_self->cqs[event->element], __ATOMIC_ACQUIRE) : NULL;
        if (!cq)
            return false;
        out->element.cq = &cq->ibv.cq;
        delivered(&cq->ibv.cq.mutex, &cq->async_events);
        return true;
    case IBV_EVENT_SRQ_LIMIT_REACHED:
    case IBV_EVENT_SRQ_ERR:
        srq = event->element < SN_MAX_SRQS ? __atomic_load_n(&sn_self->srqs[event->element], __ATOMIC_ACQUIRE) : NULL;
        if (!srq)
            return false;
        out->element.srq = &srq->ibv;
        delivered(&srq->ibv.mutex, &srq->async_events);
        return true;
    default:
        qp = sn_self_qp(event->element);
        if (!qp)
            return false;
        out->element.qp = &qp->ex.qp_base;
        delivered(&qp->ex.qp_base.mutex, &qp->async_events);
        return true;
    }
}

int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
    struct sn_ctx *ctx = sn_ctx_of(context);
    struct sn_async raw;
    bool again;
    int r;

    do {
        r = sn_wake_take(context->async_fd);
        if (r < 0) {
            errno = -r;
            return -1;
        }
        again = !async_pop(ctx->shm, &raw);
        if (__atomic_load_n(&ctx->shm->head, __ATOMIC_RELAXED) != __atomic_load_n(&ctx->shm->tail, __ATOMIC_RELAXED))
            sn_wake_send(sn_self->world, ctx->shm->wake_id);
    } while (again || !async_resolve(&raw, event));
    return 0;
}

static void acknowledged(pthread_mutex_t *mutex, pthread_cond_t *cond, uint32_t *count)
{
    pthread_mutex_lock(mutex);
    ++*count;
    pthread_cond_signal(cond);
    pthread_mutex_unlock(mutex);
}

void ibv_ack_async_event(struct ibv_async_event *event)
{
    switch (event->event_type) {
    case IBV_EVENT_CQ_ERR:
        acknowledged(&event->element.cq->mutex, &event->element.cq->cond, &event->element.cq->async_events_completed);
        break;
    case IBV_EVENT_SRQ_ERR:
    case IBV_EVENT_SRQ_LIMIT_REACHED:
        acknowledged(&event->element.srq->mutex, &event->element.srq->cond, &event->element.srq->events_completed);
        break;
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_QP_LAST_WQE_REACHED:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_COMM_EST:
        acknowledged(&event->element.qp->mutex, &event->element.qp->cond, &event->element.qp->events_completed);
        break;
    default:
        break; /* of the port: nothing is waiting */
    }
}
