/* SPDX-License-Identifier: Apache-2.0 */
/* AWS EFA devices: known by their vendor, driven through libefa, which is opened at run time. Built as efa.c, or
 * without <infiniband/efadv.h> as efa_absent.c, which only says why such a device is passed over. */
#ifndef TRANSPORT_EFA_H
#define TRANSPORT_EFA_H

#include "transport/domain.h"

enum { PRS_EFA_VENDOR = 0x1d0f }; /* Amazon's PCI vendor id, which the driver reports as its own */

struct ibv_qp_init_attr_ex;

/* If the opened device is an EFA: it gets SRD queues and their limits, or the reason why it cannot be used. */
void prs_efa_claim(struct prs_domain *domain);

/* An SRD queue that is posted to by ibv_wr_*(). NULL with errno set: there is none. */
struct ibv_qp *prs_efa_create_srd(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr);

#endif
