/* SPDX-License-Identifier: Apache-2.0 */
/* Replaces efa.c and srd.c in builds without EFA. */
#include <stdio.h>

#include "transport/nic/verbs/efa.h"

void prs_efa_claim(struct prs_verbs_device *device)
{
    struct prs_domain *domain = &device->base;

    if (device->attr.vendor_id != PRS_EFA_VENDOR)
        return;
    snprintf(domain->why_not, sizeof(domain->why_not),
             "an EFA, and this build has no SRD back end: configure with -Defa=enabled (needs <infiniband/efadv.h>)");
}
