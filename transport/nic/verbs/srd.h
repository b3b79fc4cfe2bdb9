/* SPDX-License-Identifier: Apache-2.0 */
/* A connection's links and queues over shared SRD queue pairs. srd.c opens, connects and ends them; srd_transfer.c
 * posts requests to them and takes their completions. */
#ifndef TRANSPORT_SRD_H
#define TRANSPORT_SRD_H

#include "transport/nic/verbs/srd_pool.h"

enum { PRS_SRD_LOOPBACK = 63 }; /* bit of the loopback queue in srd_use.mail, above those of all data queues */
static_assert((int)PRS_ORDER_MAX_QUEUES_PER_RAIL <= (int)PRS_SRD_LOOPBACK, "each queue of a link has its own bit");

/* A queue pair that a link uses. */
struct srd_use {
    struct prs_srd_qp *qp;
    uint64_t mail; /* a bit for each queue of the link for which events wait. Changed under the queue pair's lock */
};

struct srd_link {
    struct prs_link base;
    struct prs_srd_pool *pool;
    uint32_t loopback_depth;
    bool overrun;             /* one of its completion queues has lost completions */
    uint32_t use_count, turn; /* turn: the use that was polled first last time */
    struct srd_use use[PRS_ORDER_MAX_QUEUES_PER_RAIL];
};

static inline struct srd_link *to_srd_link(struct prs_link *link)
{
    return (struct srd_link *)link; /* base is its first member */
}

static inline struct prs_srd_end *prs_srd_end_of(struct prs_queue *queue)
{
    return (struct prs_srd_end *)queue;
}

/* For the owner: something waits at the end. */
static inline void prs_srd_leave_mail(struct prs_srd_end *end)
{
    if (!(*end->mail & end->bit)) /* relaxed: only a hint for those without the lock */
        __atomic_store_n(end->mail, *end->mail | end->bit, __ATOMIC_RELAXED);
}

/* From now on the end takes no requests, and nothing of it is reported. The caller holds the queue pair's lock. */
void prs_srd_stop_locked(struct prs_srd_end *end);
/* Handle completions. Arrivals for `own` become events; all else waits at its end. Return the event count or -errno. */
int prs_srd_take_completions(struct prs_srd_qp *qp, int taken, const struct prs_link *own, struct prs_event *events,
                             int count);

/* Entries of struct prs_nic_ops. */
int prs_srd_post(struct prs_queue *base, const struct prs_wr *ring, uint32_t mask, uint32_t first, uint32_t count);
int prs_srd_poll(struct prs_link *base, struct prs_event *events);

#endif
