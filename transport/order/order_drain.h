/* SPDX-License-Identifier: Apache-2.0 */
/* The order engine, for commands of kernels under the policy drain: order across peers.
 *
 * The engine of one peer (order.h) drains that peer alone. A proxy sends to many peers and drains all of them: a signal
 * to a group with puts waits until every earlier command, to any rank, is complete, and nothing starts meanwhile. The
 * signals after it to the same group have no puts of their own to wait for, so they do not wait again.
 *
 *   admit     prs_order_drain_put / signal    a command of the next position: may it be posted now?
 *   complete  prs_order_drain_release         everything below a position is complete: may the waiting signal go?
 *
 * Positions count commands. Pure: no verbs, no clock, no thread. */
#ifndef TRANSPORT_ORDER_DRAIN_H
#define TRANSPORT_ORDER_DRAIN_H

#include <stdbool.h>
#include <stdint.h>

struct prs_order_drain {
    /* [rank], one bit for each group: set while the group has puts that no signal has waited for. A rank's entry is
     * NULL until its first put. The array is NULL under another policy, where nothing waits here. */
    uint64_t **unfenced;
    uint32_t rank_count;
    uint32_t group_count;
    bool waits;               /* for all commands below signal_position */
    uint64_t signal_position; /* of the signal that waits */
};

/* enabled: the policy is drain. Groups are numbered below group_count, a multiple of 64. Return 0 or -ENOMEM. */
int prs_order_drain_init(struct prs_order_drain *drain, bool enabled, uint32_t rank_count, uint32_t group_count);
void prs_order_drain_fini(struct prs_order_drain *drain);

int prs_order_drain_admit_put(struct prs_order_drain *drain, uint32_t rank, uint32_t group);
int prs_order_drain_admit_signal(struct prs_order_drain *drain, uint32_t rank, uint32_t group, uint64_t position);

/* Return 0 if the put may be posted now, or -ENOMEM: the first put to a rank needs memory for its groups. */
static inline int prs_order_drain_put(struct prs_order_drain *drain, uint32_t rank, uint32_t group)
{
    return drain->unfenced ? prs_order_drain_admit_put(drain, rank, group) : 0;
}

/* Return 0 if the signal may be posted now. Return PRS_BUSY if it must wait: admit nothing more until
 * prs_order_drain_release() returns true. */
static inline int prs_order_drain_signal(struct prs_order_drain *drain, uint32_t rank, uint32_t group,
                                         uint64_t position)
{
    return drain->unfenced ? prs_order_drain_admit_signal(drain, rank, group, position) : 0;
}

/* All commands below this position are complete. Return true if the waiting signal may be posted now. */
bool prs_order_drain_release(struct prs_order_drain *drain, uint64_t completed);

#endif
