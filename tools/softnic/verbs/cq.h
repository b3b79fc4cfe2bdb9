/* SPDX-License-Identifier: Apache-2.0 */
/* Completion queues and their channels in the process that polls them. */
#ifndef SOFTNIC_CQ_H
#define SOFTNIC_CQ_H

#include "tools/softnic/verbs/devices.h"
#include "tools/softnic/verbs/efa_abi.h"

struct sn_channel {
    struct ibv_comp_channel ibv;
    uint32_t wake_id;
    pthread_mutex_t mutex; /* protects list */
    struct sn_cq *list;
};

/* What every poll uses comes first, on one cache line; ibv_poll_cq() reads ibv.cq.context. */
struct sn_cq {
    struct sn_ctx *ctx;
    struct sn_cq_shm *shm;
    pthread_mutex_t mutex; /* consumers */
    union {
        struct ibv_cq cq;
        struct ibv_cq_ex ex;
    } ibv; /* programs hold a pointer to it */
    uint32_t index;
    uint32_t refs;
    struct sn_cqe current; /* between start_poll and end_poll */
    struct sn_efa_cq efa;  /* if made by efadv_create_cq (efadv.c) */
    uint32_t async_events;
    uint32_t comp_events;
    struct sn_cq *next; /* channel list */
};

/* With the mutex of x86-64; that of 64-bit Arm is 8 bytes longer. */
static_assert(sizeof(pthread_mutex_t) > 40 || offsetof(struct sn_cq, ibv.cq.context) + sizeof(void *) <= SN_LINE,
              "one cache line");

static inline struct sn_cq *sn_cq_of(struct ibv_cq *cq)
{
    return (struct sn_cq *)((uint8_t *)cq - offsetof(struct sn_cq, ibv.cq));
}

static inline struct sn_cq *sn_cq_of_ex(struct ibv_cq_ex *ex)
{
    return sn_cq_of(ibv_cq_ex_to_cq(ex));
}

int sn_cq_poll(struct ibv_cq *cq, int count, struct ibv_wc *wc);
int sn_cq_req_notify(struct ibv_cq *cq, int solicited_only);
struct ibv_cq_ex *sn_cq_create_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr);
int sn_cq_modify(struct ibv_cq *cq, struct ibv_modify_cq_attr *attr);

/* Take one completion out. True when there was one. The caller holds the mutex. */
bool sn_cq_take_locked(struct sn_cq *cq, struct sn_cqe *cqe);

/* The sender of a receive: its LID, or the number of EFA's address handle. 0 for a send. */
uint32_t sn_cqe_slid(const struct sn_cqe *cqe);

/* Remove the completions of a queue pair that is being destroyed. */
void sn_cq_purge(struct sn_cq *cq, uint32_t qpn);

/* Fill in the ibv_start_poll family (cq_ex.c). */
void sn_cq_ex_fill(struct sn_cq *cq);

/* channel.c */
/* Call after queues were added or removed, or an event was taken: see sn_wake_settle. The caller holds ch->mutex. */
void sn_channel_settle_locked(struct sn_channel *ch);

/* The object of an asynchronous event. */
enum sn_event_of { SN_EVENT_OF_PORT, SN_EVENT_OF_QP, SN_EVENT_OF_CQ, SN_EVENT_OF_SRQ };

/* Drop the unread events of an object that is being destroyed; those that were read count as delivered when this
 * returns. */
void sn_async_forget(struct ibv_context *context, enum sn_event_of of, uint32_t element);

/* Wait, for a limited time, until *acknowledged reaches delivered. Return 0 or EBUSY. */
int sn_ack_wait(pthread_mutex_t *mutex, pthread_cond_t *cond, const uint32_t *acknowledged, const uint32_t *delivered,
                const char *what);

#endif
