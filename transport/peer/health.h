/* SPDX-License-Identifier: Apache-2.0 */
/* Is the other process alive, and do the rails work? */
#ifndef TRANSPORT_HEALTH_H
#define TRANSPORT_HEALTH_H

struct prs_event;
struct prs_peer;

/* A request has failed, and the completions after it have been taken. Let another rail replace the path, wait for a
 * farewell, or fail the peer. Return 0 or -errno (it has failed). */
int prs_health_judge(struct prs_peer *peer, const struct prs_event *failure) __attribute__((cold));

/* Nothing has arrived for many polls: check the other process and the rails. This may admit requests: look at dirty.
 * Return 0 or -errno (the peer has failed). */
int prs_health_check(struct prs_peer *peer) __attribute__((cold));

#endif
