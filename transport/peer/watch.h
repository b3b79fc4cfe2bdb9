/* SPDX-License-Identifier: Apache-2.0 */
/* A thread of the process that answers for peers whose owners do not poll, when the other side has lost a rail. It
 * sleeps until a note comes on the TCP stream of one of them. It runs while there is such a peer (failover.h). */
#ifndef TRANSPORT_WATCH_H
#define TRANSPORT_WATCH_H

struct prs_peer;

/* Begin to watch the stream of a peer that can replace rails. If that is not possible, the reason is logged, and nobody
 * answers for the peer while its owner does not poll. */
void prs_watch_add(struct prs_peer *peer);
/* The owner is about to close the stream; the peer lives on. */
void prs_watch_lose_stream(struct prs_peer *peer);
/* Stop watching. When this returns, the thread does not use the peer. A peer that is not watched is left alone. */
void prs_watch_remove(struct prs_peer *peer);

#endif
