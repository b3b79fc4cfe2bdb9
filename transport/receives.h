/* SPDX-License-Identifier: Apache-2.0 */
/* The receives of a queue: writes with immediate use them up, and bring no data of their own. They are posted and
 * replaced in batches, each behind one doorbell. */
#ifndef TRANSPORT_RECEIVES_H
#define TRANSPORT_RECEIVES_H

#include "transport/nic.h"
#include "transport/verbs.h"

enum { PRS_RECEIVES_BATCH = 64 /* at most */ };

/* Of a completion's wr_id: an arrival, on the queue with the id in the low half. */
#define PRS_ARRIVAL_BIT (1ull << 63)

/* The same for all queues of a link. */
struct prs_receive_sizes {
    uint32_t batch; /* half of what a small device takes, so that some are left while a batch is used up */
    uint32_t depth; /* whole batches */
};

struct prs_receives {
    struct ibv_qp *qp;
    uint64_t *posted;  /* the link's counter */
    uint32_t consumed; /* since the last batch */
    uint32_t batch;
    struct ibv_recv_wr wr[PRS_RECEIVES_BATCH];
};

struct prs_receive_sizes prs_receives_sizes(uint32_t most);

/* Post the first ones, none when depth is 0. sge: memory that each of them names, which must live as long; NULL: none.
 * Return 0 or -errno, logged. */
int prs_receives_open(struct prs_receives *receives, struct prs_queue *queue, const struct prs_receive_sizes *sizes,
                      struct ibv_sge *sge);

/* One more batch. Return 0 or -errno. */
int prs_receives_post(struct prs_receives *receives);

/* An arrival has taken one. Return 0 or -errno. */
static inline int prs_receives_consume(struct prs_receives *receives)
{
    if (++receives->consumed < receives->batch)
        return 0;
    receives->consumed = 0;
    return prs_receives_post(receives);
}

#endif
