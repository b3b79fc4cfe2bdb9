/* SPDX-License-Identifier: Apache-2.0 */
/* Completion and receive rings in shared memory, and the error state of a queue pair. An initiator updates these for
 * its target. */
#ifndef SOFTNIC_QUEUES_H
#define SOFTNIC_QUEUES_H

#include "tools/softnic/world/world.h"

/* Append count completions, and raise an event if the queue is armed. Return 0, or -EOVERFLOW: the queue is overrun,
 * its owner has been notified, and the caller's queue pair must fail. */
int sn_cq_push(struct sn_world *world, uint32_t cq, const struct sn_cqe *cqes, uint32_t count, bool solicited);

struct sn_recv {
    uint64_t wr_id;
    uint32_t num_sge;
    struct sn_sge sge[SN_MAX_SGE];
};

enum { SN_RQ_FULL = 1, SN_RQ_EMPTY = 1, SN_RQ_LIMIT = 2 };

/* Append a receive. Return 0 or SN_RQ_FULL. */
int sn_rq_push(struct sn_world *world, struct sn_rq_shm *rq, uint64_t wr_id, const struct sn_sge *sge,
               uint32_t num_sge);

/* Take the oldest receive. Return 0, SN_RQ_EMPTY, or SN_RQ_LIMIT: taken, and the limit is reached, which the caller
 * must report to the owner. */
int sn_rq_pop(struct sn_world *world, struct sn_rq_shm *rq, struct sn_recv *recv);

/* Take up to `most` of the oldest receives of a ring that is not shared, for requests that write nothing to their
 * buffers. Return how many. */
uint32_t sn_rq_pop_ids(struct sn_world *world, struct sn_rq_shm *rq, uint64_t *wr_ids, uint32_t most);

/* Move a queue pair to the error state and raise the event (enum ibv_event_type, or -1 for none). Return whether it
 * was in another state. Any process may call it. */
bool sn_qp_shm_stop(struct sn_world *world, struct sn_qp_shm *qp, int event);

/* The same, and also flush the receives. */
void sn_qp_shm_fail(struct sn_world *world, struct sn_qp_shm *qp, int event);

/* Flush the receive ring of a queue pair in the error state. */
void sn_qp_shm_flush_recv(struct sn_world *world, struct sn_qp_shm *qp);

/* Move a queue pair to the error state from outside (softnicctl). Return 0 or -ENOENT. */
int sn_qp_error(struct sn_world *world, uint32_t qpn);

/* Add to a counter of a device; relaxed, for display only. */
static inline void sn_count(uint64_t *counter, uint64_t n)
{
    __atomic_fetch_add(counter, n, __ATOMIC_RELAXED);
}

#endif
