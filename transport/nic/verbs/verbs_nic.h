/* SPDX-License-Identifier: Apache-2.0 */
/* The tables of this folder. */
#ifndef TRANSPORT_VERBS_NIC_H
#define TRANSPORT_VERBS_NIC_H

#include "transport/nic/nic.h"

extern const struct prs_nic_ops prs_nic_rc;  /* rc.c: reliable connected queues */
extern const struct prs_nic_ops prs_nic_srd; /* srd.c: AWS EFA's scalable reliable datagrams; not in all builds */

/* For tests: the queue pair of a queue of prs_nic_rc; NULL: it has ended. */
struct ibv_qp *prs_rc_queue_pair(struct prs_queue *queue);

#endif
