/* SPDX-License-Identifier: Apache-2.0 */
/* Completion queues of one rail, for the links of one thread (decisions/0017).
 *
 * All peers of a team context share the completion queues of each rail. There is one, which grows with the number of
 * queue pairs; another is added only where the device allows no more entries. A link that belongs to no team context
 * has a completion queue of its own.
 *
 * The upper half of wr_id, without PRS_ARRIVAL_BIT, is a name that these queues give to each queue pair. Whoever polls
 * takes the completions of all of them. Completions for others stay in wc[], in order, until the thread that polls all
 * handles them. A queue pair gives up its name only when none of its completions is left.
 *
 * One thread polls, but others make and close queue pairs: those of connections that are not made yet. */
#ifndef TRANSPORT_CQS_H
#define TRANSPORT_CQS_H

#include <pthread.h>

#include "transport/nic/nic.h"
#include "transport/util/compiler.h"
#include "transport/util/spin.h"
#include "transport/nic/verbs/verbs.h"

struct prs_cq {
    struct prs_cq *next;
    struct ibv_cq *cq;
    uint32_t room; /* entries */
    uint32_t used; /* entries that its queue pairs may need at the same time */
    bool overrun;  /* it has lost completions. The event thread sets it */
};

struct prs_cqs {
    struct prs_shared_cqs base; /* first */
    bool shared;                /* else there is one link, and neither lock is needed */
    bool fixed;                 /* the device does not change the size of a completion queue */
    pthread_mutex_t life;       /* protects refs, the choice of the completion queue and its free entries */
    uint32_t refs;
    uint32_t locked; /* prs_spin_lock(); protects what follows */
    struct prs_cq *first;
    struct prs_queue **queue; /* by name; NULL: free */
    uint32_t names;
    struct ibv_wc *wc; /* polled; [at, count) is not taken yet */
    uint32_t at, count, room;
    struct ibv_wc *held; /* completions of links that nobody has adopted yet */
    uint32_t held_count, held_room;
};

/* Return 0 or -ENOMEM. The caller has a reference; each link takes another. */
int prs_cqs_open(const struct prs_rail *rail, bool shared, struct prs_cqs **out);
void prs_cqs_hold(struct prs_cqs *cqs);
/* Drop a reference; the last drop frees the completion queues. NULL is allowed. */
void prs_cqs_drop(struct prs_cqs *cqs);

/* Find or create a completion queue with this many free entries, and reserve them. Return 0 or -errno, logged. */
int prs_cqs_reserve(struct prs_cqs *cqs, uint32_t entries, struct prs_cq **out);
void prs_cqs_release(struct prs_cqs *cqs, struct prs_cq *cq, uint32_t entries);

/* Return 0 or -ENOMEM. */
int prs_cqs_name(struct prs_cqs *cqs, struct prs_queue *queue, uint32_t *name);
/* Report nothing more of the queue. Then destroy the queue pair, then give the name back. */
void prs_cqs_silence(struct prs_cqs *cqs, uint32_t name);
void prs_cqs_unname(struct prs_cqs *cqs, uint32_t name);

/* Poll each completion queue once, into wc[]. Return how many were added, or -errno. The caller holds the lock. */
int prs_cqs_poll_locked(struct prs_cqs *cqs);
/* Keep the completion at the front for when its link is adopted. Return 0 or -ENOMEM. The caller holds the lock. */
int prs_cqs_hold_back_locked(struct prs_cqs *cqs);
/* user takes the completions of this link from now on: also those that are held back. Return 0 or -ENOMEM. */
int prs_cqs_adopt(struct prs_cqs *cqs, struct prs_link *link, void *user);

static inline struct prs_cqs *prs_cqs_of(struct prs_shared_cqs *base)
{
    return (struct prs_cqs *)base;
}

/* The queue of which nothing is reported any more. */
extern struct prs_queue prs_cqs_silent;

static inline uint32_t prs_cqs_name_of(const struct ibv_wc *wc)
{
    return (uint32_t)(wc->wr_id >> 32) & INT32_MAX;
}

/* The queue that a completion is of. */
static inline struct prs_queue *prs_cqs_find(const struct prs_cqs *cqs, const struct ibv_wc *wc)
{
    return cqs->queue[prs_cqs_name_of(wc)];
}

#endif
