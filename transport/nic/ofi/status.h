/* SPDX-License-Identifier: Apache-2.0 */
/* libfabric's errors. */
#ifndef TRANSPORT_OFI_STATUS_H
#define TRANSPORT_OFI_STATUS_H

#include "transport/nic/nic.h"

/* The -errno of a positive libfabric error. libfabric has the system's errors and a few more. 0 stays 0. */
int prs_ofi_errno(int error);

/* Fill in an error event. error: positive, of libfabric; provider_error: the provider's own number. */
void prs_ofi_error_event(int error, int provider_error, uint32_t queue, struct prs_event *out);

#endif
