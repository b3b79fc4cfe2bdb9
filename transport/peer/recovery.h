/* SPDX-License-Identifier: Apache-2.0 */
/* A lost rail comes back: the path gets new queues (NCCL_IB_RESILIENCY_PORT_RECOVERY; decisions/0014).
 *
 *   connector                                     listener
 *   its port is up: makes queues, OFFER ->
 *                                                 its port is up: makes queues, connects them, receives on them
 *                                              <- ACCEPT
 *   connects its queues, writes no bytes over each
 *   the writes are done: uses the path, READY ->
 *                                                 uses the path
 *
 * Until ACCEPT either side may take as long as it likes: nobody waits. After ACCEPT a side that sees a failure gives
 * the new queues up as in failover.h: it sends a DOWN that names their epoch, and the other side answers with its own.
 * So a side that has sent over them learns what was taken, and no side makes queues again before it knows that both
 * have given up the last ones. The old queues are destroyed before the new ones take their place.
 *
 * The owner does the work, while it makes progress. The thread of watch.c only keeps notes for it, and answers a
 * DOWN. */
#ifndef TRANSPORT_RECOVERY_H
#define TRANSPORT_RECOVERY_H

#include "transport/peer/failover.h"

/* Both sides have given the path up: allow it to come back. */
void prs_recovery_allow(struct prs_peer *peer, uint32_t path);

/* May the other side send this note now? Its path exists. */
bool prs_recovery_expects(const struct prs_peer *peer, const struct prs_wire_note *note);
/* Keep an expected note. Return false: it is a DOWN about queues that are or were used. */
bool prs_recovery_take(struct prs_peer *peer, const struct prs_wire_note *note);

/* For the owner, while paths may come back: is it time to look at them? If so, read the stream and call
 * prs_recovery_step(). */
bool prs_recovery_is_due(struct prs_peer *peer);
/* Continue with the paths that may come back. Return 0 or -errno (the peer has failed). */
int prs_recovery_step(struct prs_peer *peer);

/* Close the queues that are not used yet. */
void prs_recovery_close(struct prs_peer *peer);

#endif
