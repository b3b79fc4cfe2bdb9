/* SPDX-License-Identifier: Apache-2.0 */
/* Queues and links of reliable connections. rc.c opens, connects and ends them; rc_transfer.c posts requests to them
 * and takes their completions. */
#ifndef TRANSPORT_RC_H
#define TRANSPORT_RC_H

#include "transport/nic/verbs/cqs.h"
#include "transport/nic/verbs/receives.h"
#include "transport/util/lines.h"

enum { PRS_RC_POST_MOST = 32 }; /* requests of one call of the driver, and so of one doorbell */

/* What a request uses is on the first cache line, what a receive uses on the second. */
struct rc_queue {
    struct prs_queue base;
    struct ibv_qp *qp;
    uint64_t wr_id_high;  /* name << 32 */
    uint8_t ibv_flags[8]; /* enum prs_wr_flags -> ibv_send_flags */
    uint32_t name;        /* among those that share its completion queue */
    uint32_t start;
    bool connected;
    struct prs_receives receives;
} __attribute__((aligned(PRS_LINE)));
static_assert(offsetof(struct rc_queue, receives) <= PRS_LINE, "one cache line");

struct rc_link {
    /* The members that each poll and each request use come first, on one cache line with base.rail. */
    struct ibv_cq *own_cq;           /* NULL: shared */
    struct prs_queue *const *queues; /* cqs->queue, which does not move while the link has its own completion queue */
    struct prs_link base;
    const struct prs_config *config;
    int traffic_class;
    int service_level;
    uint32_t loopback_depth;
    struct prs_receive_sizes receives;
    struct prs_cqs *cqs;
    struct prs_cq *cq;   /* one of them */
    uint32_t cq_entries; /* entries of the completion queue: room for all completions that may wait at once */
};

static inline struct rc_link *to_rc_link(struct prs_link *link)
{
    return (struct rc_link *)((char *)link - offsetof(struct rc_link, base));
}

static inline struct rc_queue *to_rc_queue(struct prs_queue *queue)
{
    return (struct rc_queue *)queue;
}

/* Entries of struct prs_nic_ops. */
int prs_rc_post(struct prs_queue *base, const struct prs_wr *ring, uint32_t mask, uint32_t first, uint32_t count);
int prs_rc_poll(struct prs_link *base, struct prs_event *events);
int prs_rc_poll_shared(struct prs_shared_cqs *base, struct prs_link **link, struct prs_event *events, bool *more);

#endif
