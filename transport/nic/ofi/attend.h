/* SPDX-License-Identifier: Apache-2.0 */
/* Most providers move data only while somebody reads a completion queue (FI_PROGRESS_MANUAL), also for writes and reads
 * of the other side. The owner of a link does that when it polls. While nobody does, a thread of the device does, once
 * in a millisecond, and keeps what it has read for the owner. */
#ifndef TRANSPORT_OFI_ATTEND_H
#define TRANSPORT_OFI_ATTEND_H

struct prs_ofi_device;
struct prs_ofi_endpoint;

/* Return 0 or -errno, logged. */
int prs_ofi_attend_start(struct prs_ofi_device *device);
/* Call it after the last endpoint was removed. */
void prs_ofi_attend_stop(struct prs_ofi_device *device);

void prs_ofi_attend_add(struct prs_ofi_endpoint *endpoint);
/* When it returns, the thread does not touch the endpoint any more. */
void prs_ofi_attend_remove(struct prs_ofi_endpoint *endpoint);
/* When it returns, every endpoint's lock has been free once. */
void prs_ofi_attend_settle(struct prs_ofi_device *device);

#endif
