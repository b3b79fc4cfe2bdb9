/* SPDX-License-Identifier: Apache-2.0 */
/* Completion channels and asynchronous events: how a blocked reader is notified. */
#include <stdlib.h>
#include <unistd.h>

#include "tools/softnic/verbs/cq.h"
#include "tools/softnic/verbs/qp.h"
#include "tools/softnic/verbs/srq.h"
#include "tools/softnic/world/lock.h"
#include "tools/softnic/world/wake.h"

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

static struct sn_cq *event_find(const struct sn_channel *ch)
{
    struct sn_cq *cq = ch->list;

    while (cq && !__atomic_load_n(&cq->shm->events, __ATOMIC_ACQUIRE))
        cq = cq->next;
    return cq;
}

static bool cq_event_is_left(const void *channel)
{
    return event_find(channel) != NULL;
}

void sn_channel_settle_locked(struct sn_channel *ch)
{
    sn_wake_settle(sn_self->world, ch->ibv.fd, ch->wake_id, cq_event_is_left, ch);
}

/* Find a queue of this channel with an event, and take the event. */
static struct sn_cq *event_take(struct sn_channel *ch)
{
    struct sn_cq *found;

    pthread_mutex_lock(&ch->mutex);
    found = event_find(ch);
    if (found) {
        __atomic_fetch_sub(&found->shm->events, 1, __ATOMIC_ACQ_REL);
        pthread_mutex_lock(&found->ibv.cq.mutex);
        found->comp_events++;
        pthread_mutex_unlock(&found->ibv.cq.mutex);
    }
    sn_channel_settle_locked(ch);
    pthread_mutex_unlock(&ch->mutex);
    return found;
}

int ibv_get_cq_event(struct ibv_comp_channel *ibv, struct ibv_cq **cq, void **cq_context)
{
    struct sn_cq *found;
    int r;

    do {
        r = sn_wake_take(ibv->fd);
        if (r < 0) {
            errno = -r;
            return -1;
        }
        found = event_take((struct sn_channel *)ibv);
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

static bool async_is_left(const void *shm)
{
    const struct sn_ctx_shm *c = shm;

    return __atomic_load_n(&c->head, __ATOMIC_RELAXED) != __atomic_load_n(&c->tail, __ATOMIC_RELAXED);
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

static enum sn_event_of event_of(uint32_t type)
{
    switch (type) {
    case IBV_EVENT_PORT_ACTIVE:
    case IBV_EVENT_PORT_ERR:
    case IBV_EVENT_DEVICE_FATAL: /* of no object */
        return SN_EVENT_OF_PORT;
    case IBV_EVENT_CQ_ERR:
        return SN_EVENT_OF_CQ;
    case IBV_EVENT_SRQ_LIMIT_REACHED:
    case IBV_EVENT_SRQ_ERR:
        return SN_EVENT_OF_SRQ;
    default:
        return SN_EVENT_OF_QP;
    }
}

void sn_async_forget(struct ibv_context *context, enum sn_event_of of, uint32_t element)
{
    struct sn_ctx_shm *shm = sn_ctx_of(context)->shm;
    uint32_t keep;

    pthread_mutex_lock(&context->mutex);
    if (async_is_left(shm)) {
        sn_lock_take(&shm->lock);
        keep = shm->head;
        for (uint32_t i = shm->head; i != shm->tail; i++) {
            struct sn_async event = shm->events[i % SN_ASYNC_EVENTS];

            if (event_of(event.type) != of || event.element != element)
                shm->events[keep++ % SN_ASYNC_EVENTS] = event;
        }
        shm->tail = keep;
        sn_lock_drop(&shm->lock);
        sn_wake_settle(sn_self->world, context->async_fd, shm->wake_id, async_is_left, shm);
    }
    pthread_mutex_unlock(&context->mutex);
}

/* Translate numbers to the program's objects. Return false: the object is gone. */
static bool async_resolve(const struct sn_async *event, struct ibv_async_event *out)
{
    struct sn_qp *qp;
    struct sn_cq *cq;
    struct sn_srq *srq;

    out->event_type = event->type;
    switch (event_of(event->type)) {
    case SN_EVENT_OF_PORT:
        out->element.port_num = (int)event->element;
        return true;
    case SN_EVENT_OF_CQ:
        cq = event->element < SN_MAX_CQS ? __atomic_load_n(&sn_self->cqs[event->element], __ATOMIC_ACQUIRE) : NULL;
        if (!cq)
            return false;
        out->element.cq = &cq->ibv.cq;
        delivered(&cq->ibv.cq.mutex, &cq->async_events);
        return true;
    case SN_EVENT_OF_SRQ:
        srq = event->element < SN_MAX_SRQS ? __atomic_load_n(&sn_self->srqs[event->element], __ATOMIC_ACQUIRE) : NULL;
        if (!srq)
            return false;
        out->element.srq = &srq->ibv;
        delivered(&srq->ibv.mutex, &srq->async_events);
        return true;
    default:
        qp = sn_qp_local(event->element);
        if (!qp)
            return false;
        out->element.qp = &qp->ex.qp_base;
        delivered(&qp->ex.qp_base.mutex, &qp->async_events);
        return true;
    }
}

/* Hold the mutex, so that a queue pair that is found is not destroyed before its event counts as delivered. */
static bool async_take(struct ibv_context *context, struct ibv_async_event *event)
{
    struct sn_ctx *ctx = sn_ctx_of(context);
    struct sn_async raw;
    bool taken;

    pthread_mutex_lock(&context->mutex);
    taken = async_pop(ctx->shm, &raw) && async_resolve(&raw, event);
    sn_wake_settle(sn_self->world, context->async_fd, ctx->shm->wake_id, async_is_left, ctx->shm);
    pthread_mutex_unlock(&context->mutex);
    return taken;
}

int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
    int r;

    do {
        r = sn_wake_take(context->async_fd);
        if (r < 0) {
            errno = -r;
            return -1;
        }
    } while (!async_take(context, event));
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
    switch (event_of(event->event_type)) {
    case SN_EVENT_OF_CQ:
        acknowledged(&event->element.cq->mutex, &event->element.cq->cond, &event->element.cq->async_events_completed);
        break;
    case SN_EVENT_OF_SRQ:
        acknowledged(&event->element.srq->mutex, &event->element.srq->cond, &event->element.srq->events_completed);
        break;
    case SN_EVENT_OF_QP:
        acknowledged(&event->element.qp->mutex, &event->element.qp->cond, &event->element.qp->events_completed);
        break;
    default:
        break; /* a port event, which no object waits for when it is destroyed */
    }
}
