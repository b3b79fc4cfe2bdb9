/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/order/policy.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "transport/util/error.h"

const char *const prs_policy_names[PRS_POLICY_COUNT + 1] = {"in_order", "drain", "nic_fence", "counted", "auto", NULL};

int prs_policy_parse(const char *name, enum prs_policy fallback, enum prs_policy *out)
{
    *out = fallback;
    if (!name)
        return 0;
    for (int i = 0; i < PRS_POLICY_COUNT; i++) {
        if (!strcmp(name, prs_policy_names[i])) {
            *out = (enum prs_policy)i;
            return 0;
        }
    }
    return prs_fail(-EINVAL, "ordering policy \"%s\" is unknown: drain, nic_fence, in_order, counted or auto", name);
}

static enum prs_policy choose_auto(const struct prs_policy_facts *facts, const char **why)
{
    if (!facts->in_order) {
        *why = "the queues do not keep order";
        return PRS_POLICY_COUNTED;
    }
    if (facts->adaptive_routing) {
        *why = "adaptive routing may place packets of one queue out of order";
        return PRS_POLICY_COUNTED;
    }
    if (facts->queues > 1) {
        *why = "several queues to one peer";
        return PRS_POLICY_COUNTED;
    }
    *why = facts->relaxed_ordering ? "one queue keeps order; signals are in strict memory" : "one queue keeps order";
    return PRS_POLICY_IN_ORDER;
}

int prs_policy_choose(enum prs_policy wanted, const struct prs_policy_facts *facts, enum prs_policy *out, char *why,
                      size_t why_bytes)
{
    const char *reason = "asked for";

    *out = wanted == PRS_POLICY_AUTO ? choose_auto(facts, &reason) : wanted;
    if (!facts->in_order && wanted == PRS_POLICY_IN_ORDER)
        return prs_fail(-EINVAL, "ordering policy in_order needs queues that keep order: use counted or drain");
    if (!facts->fence && wanted == PRS_POLICY_NIC_FENCE)
        return prs_fail(-EINVAL,
                        "ordering policy nic_fence needs queues with a fence, which these do not promise: use "
                        "counted or drain%s",
                        facts->in_order ? ", or in_order" : "");
    if ((wanted == PRS_POLICY_IN_ORDER || wanted == PRS_POLICY_NIC_FENCE) && facts->adaptive_routing)
        reason = "asked for; under adaptive routing a set waits until its data has arrived";
    snprintf(why, why_bytes, "%s", reason);
    return 0;
}
