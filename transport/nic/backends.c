/* SPDX-License-Identifier: Apache-2.0 */
/* The one file outside of their folders that knows back ends by name. A new one: its header, and its row. */
#include "transport/nic/backends.h"

#include "transport/nic/ofi/ofi_nic.h"
#include "transport/nic/verbs/verbs_nic.h"

const struct prs_nic_ops *const prs_backends[] = {
    &prs_nic_rc, /* lists all verbs devices; open_device() hands EFAs to prs_nic_srd */
    &prs_nic_ofi,
    NULL,
};
