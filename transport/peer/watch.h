/* SPDX-License-Identifier: Apache-2.0 */
/* A thread of the process that answers for peers whose owners do not poll, when the other side has lost a rail. It
 * sleeps until a note comes on the TCP stream of one of them. It runs while there is such a peer (failover.h). */
#ifndef TRANSPORT_WATCH_H
#define TRANSPORT_WATCH_H

struct prs_peer;

/* Begin to watch the stream of a peer that can replace rails. Failures are logged: then only its owner answers. */
void prs_watch_add(struct prs_peer *peer);
/* The stream is about to be closed, but the peer lives. For its owner. */
void prs_watch_lose_stream(struct prs_peer *peer);
/* Stop it. When this returns, the thread does not use the peer. Without prs_watch_add() before, do nothing. */
void prs_watch_remove(struct prs_peer *peer);

#endif
