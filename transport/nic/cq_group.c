/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/cq_group.h"

int prs_cq_group_get(struct prs_cq_group *group, const struct prs_rail *rail, struct prs_shared_cqs **out)
{
    int r;

    for (uint32_t i = 0; i < group->count; i++)
        if (group->rail[i]->rail == rail) {
            *out = group->rail[i];
            return 0;
        }
    r = rail->domain->nic->open_cqs(rail, &group->rail[group->count]);
    if (r)
        return r;
    *out = group->rail[group->count];
    /* [cq-group] pairs with the acquire of a thread that polls: the queues are complete. */
    __atomic_store_n(&group->count, group->count + 1, __ATOMIC_RELEASE);
    return 0;
}

bool prs_cq_group_has(const struct prs_cq_group *group, const struct prs_shared_cqs *cqs)
{
    uint32_t count = __atomic_load_n(&group->count, __ATOMIC_ACQUIRE), i = 0; /* [cq-group] */

    while (i < count && group->rail[i] != cqs)
        i++;
    return i < count;
}

void prs_cq_group_drop(struct prs_cq_group *group)
{
    for (uint32_t i = 0; i < group->count; i++)
        group->rail[i]->rail->domain->nic->drop_cqs(group->rail[i]);
    group->count = 0;
}
