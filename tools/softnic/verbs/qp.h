/* SPDX-License-Identifier: Apache-2.0 */
/* Queue pairs as programs see them: creating and destroying them, and posting to them. */
#ifndef SOFTNIC_QP_H
#define SOFTNIC_QP_H

#include "tools/softnic/nic/queue_pair.h"

/* The queue pair of this process with that number, or NULL when it is gone. */
struct sn_qp *sn_qp_local(uint32_t qpn);

/* The attributes of the old call, with the domain, as those of the extended one. */
struct ibv_qp_init_attr_ex sn_qp_init_extend(struct ibv_pd *pd, const struct ibv_qp_init_attr *init);

struct ibv_qp *sn_qp_create_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr);

/* The same for SRD, which only EFA devices have. */
struct ibv_qp *sn_qp_create_srd(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr);

/* Wait until the initiators, and the runner, that are at work now have left. Return 0 or -ETIMEDOUT. */
int sn_qp_initiators_wait(struct sn_qp *qp, uint64_t give_up);

/* Wait, for a limited time, until no thread executes this queue pair and it is in no heap. The caller holds no lock. */
int sn_qp_quiesce(struct sn_qp *qp);

/* post.c */
int sn_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int sn_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
int sn_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);

/* A free request at position, or NULL when the send queue is full. The caller holds the mutex. */
struct sn_wqe *sn_sq_slot_locked(struct sn_qp *qp, uint32_t position);

/* Fill in what is common to all requests. */
void sn_wqe_init(struct sn_qp *qp, struct sn_wqe *w, uint32_t opcode, uint32_t flags);

/* Check a request once its buffers are set. Return 0 or EINVAL. */
int sn_wqe_check(const struct sn_qp *qp, struct sn_wqe *w);

/* Call it before the first of some requests. Return 0, or EINVAL: none can be posted in this state. The caller holds
 * the mutex. */
int sn_post_begin_locked(struct sn_qp *qp);

/* Publish the requests up to position and run them, here or in the engine. The caller holds the mutex. */
void sn_sq_commit_locked(struct sn_qp *qp, uint32_t position);

/* wr.c */
#define SN_WR_OPS                                                                                                      \
    (IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_SEND |                            \
     IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP |                     \
     IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD | IBV_QP_EX_WITH_SEND_WITH_INV | IBV_QP_EX_WITH_LOCAL_INV |                   \
     IBV_QP_EX_WITH_BIND_MW)
#define SN_WR_OPS_UD  (IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM)
#define SN_WR_OPS_UC  (SN_WR_OPS_UD | IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM)
#define SN_WR_OPS_SRD (SN_WR_OPS_UC | IBV_QP_EX_WITH_RDMA_READ)
void sn_wr_fill(struct sn_qp *qp, uint64_t send_ops);

#endif
