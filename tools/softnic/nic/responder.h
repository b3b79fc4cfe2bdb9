/* SPDX-License-Identifier: Apache-2.0 */
/* The target's side of a request, done by its initiator: checks, receives, completions, and the promise that the memory
 * is left alone once its owner was told that it is free. */
#ifndef SOFTNIC_RESPONDER_H
#define SOFTNIC_RESPONDER_H

#include "tools/softnic/nic/queue_pair.h"
#include "tools/softnic/world/queues.h"

static inline bool sn_is_send(uint32_t opcode)
{
    return opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM;
}

static inline bool sn_takes_receive(uint32_t opcode)
{
    return sn_is_send(opcode) || opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}

static inline bool sn_is_atomic(uint32_t opcode)
{
    return opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

/** Come as a guest, and leave. Return what to leave with, or 0: too many are there. */
uint64_t sn_responder_enter(struct sn_qp_shm *target);
void sn_responder_leave(struct sn_qp_shm *target, uint64_t entry);

/** Is it whom w is for: connected back to this queue pair (SRD: with the right key), able to receive, with both links
 * up? */
bool sn_responder_answers(struct sn_qp *qp, struct sn_qp_shm *target, const struct sn_wqe *w);

/** A span of one process's registered memory, or false: no such key, other owner or domain, out of bounds, right
 * missing. */
bool sn_responder_span(uint32_t key, uint32_t proc, uint32_t pd, uint64_t addr, uint64_t length, uint32_t rights,
                       struct sn_span *span);

/** Would the next one grant it? Then *span is filled in. Nobody is told. */
bool sn_responder_grants(const struct sn_qp_shm *target, const struct sn_wqe *w, struct sn_span *span);

/** The memory that a write, read or atomic names. Return 0, or 1 after both sides got their error. */
int sn_responder_request_span(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w, struct sn_span *span);

/** Take a receive. Return 0 or SN_EXEC_RNR. */
int sn_responder_receive(struct sn_qp_shm *target, struct sn_recv *recv);

/** Where a send goes: the buffers of the receive it took. Return 0, or 1 after both sides got their error. */
int sn_responder_receive_spans(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w, const struct sn_recv *recv,
                               struct sn_copy *copy);

/** What became of a copy: nothing to say (0), the target is gone, or an error status. */
int sn_responder_result(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w, int r);

/** The target's completion for w, and telling it of such. An overrun queue fails the target's queue pair. */
struct sn_cqe sn_responder_cqe(const struct sn_qp *qp, const struct sn_qp_shm *target, const struct sn_wqe *w,
                               uint32_t status);
void sn_responder_push(struct sn_qp_shm *target, const struct sn_cqe *cqes, uint32_t count, bool solicited);

/** The target's side of a request that moved its data. */
void sn_responder_arrived(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w);
void sn_responder_count(const struct sn_qp *qp, const struct sn_qp_shm *target, bool read, uint64_t bytes);

#endif
