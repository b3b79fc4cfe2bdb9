/* SPDX-License-Identifier: Apache-2.0 */
/* How a signal is kept behind the puts of its group, and which way suits a path. */
#ifndef TRANSPORT_POLICY_H
#define TRANSPORT_POLICY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum prs_policy {
    PRS_POLICY_IN_ORDER, /* one queue, whose NIC keeps the order; a group that ran over several queues: wait for all but
                            one of them */
    PRS_POLICY_DRAIN,    /* wait for every completion and start nothing meanwhile: the baseline */
    PRS_POLICY_NIC_FENCE, /* all on one queue; the first signal after puts carries the fence flag */
    PRS_POLICY_COUNTED,   /* every put says which group it belongs to; the receiver raises the signal */
    PRS_POLICY_AUTO,
    PRS_POLICY_COUNT,
};

extern const char *const prs_policy_names[PRS_POLICY_COUNT + 1]; /* NULL-terminated */

/* What the path really offers. */
struct prs_policy_facts {
    bool in_order;         /* a queue performs its requests in order (RC) */
    bool adaptive_routing; /* packets of one queue may be placed out of order before the completion */
    bool relaxed_ordering; /* data regions */
    uint32_t queues;
};

/* auto becomes a policy; a forced one that the path cannot keep is refused. why: one phrase for logs.
 * Return 0 or -EINVAL. */
int prs_policy_choose(enum prs_policy wanted, const struct prs_policy_facts *facts, enum prs_policy *out, char *why,
                      size_t why_bytes);

/* Signals travel as records, which the receiver raises: to keep them behind what it counts, or because no NIC can add.
 */
static inline bool prs_policy_signals_are_records(enum prs_policy policy, bool nic_adds)
{
    return policy == PRS_POLICY_COUNTED || !nic_adds;
}

/* By name; NULL: fallback. Return 0 or -EINVAL. */
int prs_policy_parse(const char *name, enum prs_policy fallback, enum prs_policy *out);

#endif
