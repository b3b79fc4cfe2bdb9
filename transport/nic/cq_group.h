/* SPDX-License-Identifier: Apache-2.0 */
/* The completion queues that the peers of a team context share, by rail (decisions/0017). */
#ifndef TRANSPORT_CQ_GROUP_H
#define TRANSPORT_CQ_GROUP_H

#include "transport/nic/nic.h"

struct prs_cq_group {
    struct prs_shared_cqs *rail[PRS_MAX_RAILS];
    uint32_t count; /* atomic: rail[] is filled in first */
};

/* Find or make those of the rail, whose back end shares them. One thread at a time. Return 0 or -ENOMEM. */
int prs_cq_group_get(struct prs_cq_group *group, const struct prs_rail *rail, struct prs_shared_cqs **out);
bool prs_cq_group_has(const struct prs_cq_group *group, const struct prs_shared_cqs *cqs);
/* Links may still use them. */
void prs_cq_group_drop(struct prs_cq_group *group);

#endif
