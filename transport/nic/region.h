/* SPDX-License-Identifier: Apache-2.0 */
/* Memory registered on every rail of a set. */
#ifndef TRANSPORT_REGION_H
#define TRANSPORT_REGION_H

#include "transport/nic/fabric.h"

struct prs_region {
    uint64_t rail_mask;                   /* rails of the fabric that it is registered on */
    uint32_t local_key[PRS_FABRIC_RAILS]; /* by rail of the fabric */
    struct prs_keys keys;                 /* by position in the set */
    int count;
    struct prs_domain *domain[PRS_MAX_RAILS];
    struct prs_mr *mr[PRS_MAX_RAILS]; /* NULL: zero bytes */
    pid_t owner;
};

#endif
