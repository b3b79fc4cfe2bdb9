/* SPDX-License-Identifier: Apache-2.0 */
/* The end of a peer by an error, and the lock that it takes. */
#ifndef TRANSPORT_FAIL_H
#define TRANSPORT_FAIL_H

struct prs_peer;

/* Fail the peer: log the error, stop the queues, fail all ops. Only the first error counts. Return its code. */
int prs_peer_fail(struct prs_peer *peer, int code, const char *format, ...) __attribute__((format(printf, 3, 4), cold));
/* It has failed: return the sticky -errno, with the text of its first error. */
int prs_peer_error_again(const struct prs_peer *peer) __attribute__((cold));

/* The lock of struct prs_failover. Nothing happens where rails cannot be replaced. */
void prs_peer_lock(const struct prs_peer *peer);
void prs_peer_unlock(const struct prs_peer *peer);

#endif
