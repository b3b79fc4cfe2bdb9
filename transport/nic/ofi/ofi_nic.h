/* SPDX-License-Identifier: Apache-2.0 */
/* The back end for libfabric, as the list of all knows it. */
#ifndef TRANSPORT_OFI_NIC_H
#define TRANSPORT_OFI_NIC_H

#include "transport/nic/nic.h"

extern const struct prs_nic_ops prs_nic_ofi;

#endif
