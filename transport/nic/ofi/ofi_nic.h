/* SPDX-License-Identifier: Apache-2.0 */
/* The table of the libfabric back end, for the list of back ends. */
#ifndef TRANSPORT_OFI_NIC_H
#define TRANSPORT_OFI_NIC_H

#include "transport/nic/nic.h"

extern const struct prs_nic_ops prs_nic_ofi;

#endif
