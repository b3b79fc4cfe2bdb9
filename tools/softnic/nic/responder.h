/* SPDX-License-Identifier: Apache-2.0 */
/* The target's side of a request, carried out by its initiator: checks, receives, completions, and the guarantee that
 * memory is not touched after its owner was told that it is free. */
#ifndef SOFTNIC_RESPONDER_H
#define SOFTNIC_RESPONDER_H

#include "tools/softnic/nic/queue_pair.h"
#include "tools/softnic/world/queues.h"

static inline bool sn_is_send(uint32_t opcode)
{
    return opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM || opcode == IBV_WR_SEND_WITH_INV;
}

static inline bool sn_takes_receive(uint32_t opcode)
{
    return sn_is_send(opcode) || opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}

static inline bool sn_is_atomic(uint32_t opcode)
{
    return opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

/* Announce that this initiator uses the target. Return a token for sn_responder_leave(), or 0: the target has too many
 * initiators. */
uint64_t sn_responder_enter(struct sn_qp_shm *target);
void sn_responder_leave(struct sn_qp_shm *target, uint64_t entry);

/* Does this queue pair answer w: connected back to qp (UD, SRD: with the right qkey), able to receive, both cables
 * up? */
bool sn_responder_answers(struct sn_qp *qp, struct sn_qp_shm *target, const struct sn_wqe *w);

/* Look up a span of one process's registered memory. qpn: number of the target queue pair, which may have memory
 * windows; 0: for the process itself. Return false: no such key, wrong owner or domain, out of bounds, or a missing
 * right. */
bool sn_responder_span(uint32_t key, uint32_t proc, uint32_t pd, uint64_t addr, uint64_t length, uint32_t rights,
                       uint32_t qpn, struct sn_span *span);

/* Would sn_responder_request_span succeed? Then fill in *span. No error is reported. */
bool sn_responder_grants(const struct sn_qp_shm *target, const struct sn_wqe *w, struct sn_span *span);

/* Look up the memory that a write, read or atomic names. Return 0, or 1 after both sides got their error. */
int sn_responder_request_span(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w, struct sn_span *span);

/* Take a receive. Return 0 or SN_EXEC_RNR. */
int sn_responder_receive(struct sn_qp_shm *target, struct sn_recv *recv);

/* Can the send invalidate the window that it names? Return 0, or 1 after both sides got their error. */
int sn_responder_invalidate_check(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w);

/* Fill in the destination of a send: the buffers of the receive it took. Return 0, or 1 after both sides got their
 * error. */
int sn_responder_receive_spans(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w, const struct sn_recv *recv,
                               struct sn_copy *copy);

/* Turn r, the result of a copy, into the result of the request. Return 0 (w->status may be an error),
 * SN_EXEC_UNREACHABLE (the target is gone) or SN_EXEC_DROPPED. */
int sn_responder_result(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w, int r);

/* How many bytes a request moves. A datagram brings its header. */
static inline uint64_t sn_responder_bytes(const struct sn_qp *qp, const struct sn_wqe *w)
{
    return w->length + (sn_qp_is_ud(qp) ? SN_GRH_BYTES : 0);
}

/* Make the target's completion for w; push completions to the target's queue. If the queue overruns, the target's queue
 * pair fails. */
struct sn_cqe sn_responder_cqe(const struct sn_qp *qp, const struct sn_qp_shm *target, const struct sn_wqe *w,
                               uint32_t status);
void sn_responder_push(struct sn_qp_shm *target, const struct sn_cqe *cqes, uint32_t count, bool solicited);

/* Complete the target's side of a request whose data was moved. */
void sn_responder_arrived(struct sn_qp *qp, struct sn_qp_shm *target, struct sn_wqe *w);
void sn_responder_count(const struct sn_qp *qp, const struct sn_qp_shm *target, bool read, uint64_t bytes);

#endif
