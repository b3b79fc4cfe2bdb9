/* SPDX-License-Identifier: Apache-2.0 */
/* The ways to keep a signal after the puts of its group, and the choice among them. */
#ifndef TRANSPORT_POLICY_H
#define TRANSPORT_POLICY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum prs_policy {
    /* Rely on queues that keep order. A signal whose group used several queues waits for all but one of them. */
    PRS_POLICY_IN_ORDER,
    /* Wait for every completion, and start nothing meanwhile: the baseline. */
    PRS_POLICY_DRAIN,
    /* Use one queue. The first signal after puts carries the fence flag. */
    PRS_POLICY_NIC_FENCE,
    /* Let every put say to which group it belongs. The receiver raises the signal. */
    PRS_POLICY_COUNTED,
    PRS_POLICY_AUTO,
    PRS_POLICY_COUNT,
};

extern const char *const prs_policy_names[PRS_POLICY_COUNT + 1]; /* NULL-terminated */

/* What the queues to a peer offer. */
struct prs_policy_facts {
    bool in_order;         /* a queue performs its requests in order (RC) */
    bool fence;            /* a request can wait for the earlier ones of its queue */
    bool adaptive_routing; /* packets of one queue may be placed out of order before the completion */
    bool relaxed_ordering; /* of data regions */
    uint32_t queues;
};

/* Turn auto into a policy. Refuse a forced policy that the queues cannot keep. why gets one phrase for logs.
 * Return 0 or -EINVAL. */
int prs_policy_choose(enum prs_policy wanted, const struct prs_policy_facts *facts, enum prs_policy *out, char *why,
                      size_t why_bytes);

/* Do signals travel as records, which the receiver raises? They do under `counted`, and where the NIC cannot add. */
static inline bool prs_policy_signals_are_records(enum prs_policy policy, bool nic_adds)
{
    return policy == PRS_POLICY_COUNTED || !nic_adds;
}

/* Find a policy by its name. NULL gives the fallback. Return 0 or -EINVAL. */
int prs_policy_parse(const char *name, enum prs_policy fallback, enum prs_policy *out);

#endif
