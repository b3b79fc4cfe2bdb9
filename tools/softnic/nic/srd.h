/* SPDX-License-Identifier: Apache-2.0 */
/* Scalable reliable datagrams, as AWS's EFA has them: every request names its target and is delivered once, in no
 * order. This file has the differences from RC (run.c, execute.c). Real networks reorder sometimes. Here requests are
 * always reordered, deliberately, so that a program that relies on an order fails soon. */
#ifndef SOFTNIC_SRD_H
#define SOFTNIC_SRD_H

#include "tools/softnic/nic/queue_pair.h"

enum {
    SN_SRD_SCATTER_NS = 8000, /* each request starts late by up to this: about half of an EFA's latency */
    /* What an EFA reports to efadv_query_device and ibv_query_port. */
    SN_SRD_MAX_SQ_WR = 4096,
    SN_SRD_MAX_RQ_WR = 32768,
    SN_SRD_MAX_SQ_SGE = 2,
    SN_SRD_MAX_RQ_SGE = 3,
    SN_SRD_MAX_RDMA_SGE = 1,
    SN_SRD_MAX_INLINE = 32,
    SN_SRD_MAX_SEND = 8928, /* bytes: a send is one packet */
};
#define SN_SRD_MAX_RDMA (1u << 30)

/* Return 0, EINVAL or EOPNOTSUPP, logged. */
int sn_srd_caps_check(const struct ibv_qp_init_attr_ex *attr);

/* Set the attributes of a new or reset queue pair. */
void sn_srd_defaults(struct sn_qp *qp);

/* Does EFA take this request? Return 0 or EINVAL, logged; errors that only the device finds are set in w->status. The
 * caller holds the mutex. */
int sn_srd_check(const struct sn_qp *qp, struct sn_wqe *w);

/* Among the requests [at, end) that may change places, bring the one that is due first to position `at`. The caller is
 * the runner. */
void sn_srd_next_exec(struct sn_qp *qp, uint32_t at, uint32_t end);

/* Do the same for the completion of executed requests. */
void sn_srd_next_done(struct sn_qp *qp);

/* Are the cables of both ends up? */
bool sn_srd_cables_up(const struct sn_qp *qp, const struct sn_wqe *w);

/* Cut a copy of host memory into pieces, in random order. The caller is the runner. */
void sn_srd_scatter(const struct sn_qp *qp, struct sn_copy *copy);

/* Change a completion of the sender from what RC reports to what EFA reports. */
void sn_srd_cqe(const struct sn_wqe *w, struct sn_cqe *cqe);

#endif
