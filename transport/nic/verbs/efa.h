/* SPDX-License-Identifier: Apache-2.0 */
/* AWS EFA devices: recognised by their vendor id, used through libefa, which is opened at run time. Without
 * <infiniband/efadv.h>, efa_absent.c is built instead of efa.c; it only says why such a device is skipped. */
#ifndef TRANSPORT_EFA_H
#define TRANSPORT_EFA_H

#include "transport/nic/verbs/device.h"

enum { PRS_EFA_VENDOR = 0x1d0f }; /* Amazon's PCI vendor id, which the driver reports as vendor_id */

struct ibv_ah;
struct ibv_qp_init_attr_ex;

/* If the device is an EFA, set its back end to SRD, with its limits, or set the reason why it cannot be used. */
void prs_efa_claim(struct prs_verbs_device *device);

/* Create an SRD queue for posting by ibv_wr_*(). On failure NULL, with errno set. */
struct ibv_qp *prs_efa_create_srd(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr);

/* The number by which arrivals name the rail of an address handle. Return 0 or -errno, not logged. */
int prs_efa_handle_number(struct ibv_ah *ah, uint32_t *number);

#endif
