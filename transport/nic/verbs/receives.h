/* SPDX-License-Identifier: Apache-2.0 */
/* The receive requests of a queue. Each write with immediate consumes one; its data does not go there. They are posted
 * and replaced in batches, one doorbell for each batch. */
#ifndef TRANSPORT_RECEIVES_H
#define TRANSPORT_RECEIVES_H

#include "transport/nic/nic.h"
#include "transport/nic/verbs/verbs.h"

enum { PRS_RECEIVES_BATCH = 64 /* largest batch */ };

/* Set in the wr_id of receives; the rest of the upper half is the name that prs_receives_open() got. */
#define PRS_ARRIVAL_BIT (1ull << 63)

/* Equal for all queues of a link. */
struct prs_receive_sizes {
    uint32_t batch; /* at most half the depth, so that receives remain while a batch is consumed */
    uint32_t depth; /* whole batches */
};

struct prs_receives {
    struct prs_queue *queue;
    struct ibv_qp *qp;
    uint32_t consumed; /* since the last batch was posted */
    uint32_t batch;
    uint32_t depth;
    uint32_t total;   /* posted since the queue was made */
    uint32_t flushed; /* completed without an arrival */
    struct ibv_recv_wr wr[PRS_RECEIVES_BATCH];
};

struct prs_receive_sizes prs_receives_sizes(uint32_t most);

/* Post the first receives; none when depth is 0. name: the name that their completions carry. sge: memory that each of
 * them names, which must live as long as they do; NULL: none. Return 0 or -errno, logged. */
int prs_receives_open(struct prs_receives *receives, struct prs_queue *queue, struct ibv_qp *qp, uint32_t name,
                      const struct prs_receive_sizes *sizes, struct ibv_sge *sge);

/* Post a batch in place of one that was consumed, unless the queue was stopped. Return 0 or -errno. */
int prs_receives_replace(struct prs_receives *receives);

/* How many arrivals have consumed one. */
static inline uint32_t prs_receives_taken(const struct prs_receives *receives)
{
    return receives->total - receives->depth + receives->consumed;
}

/* After the queue was stopped: has every one completed? */
static inline bool prs_receives_drained(const struct prs_receives *receives)
{
    return receives->flushed == receives->depth - receives->consumed;
}

/* An arrival has consumed one. Return 0 or -errno. */
static inline int prs_receives_consume(struct prs_receives *receives)
{
    return ++receives->consumed < receives->batch ? 0 : prs_receives_replace(receives);
}

#endif
