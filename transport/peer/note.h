/* SPDX-License-Identifier: Apache-2.0 */
/* Sending of what travels on the TCP stream once two peers are connected: struct prs_wire_note. */
#ifndef TRANSPORT_NOTE_H
#define TRANSPORT_NOTE_H

#include <stdint.h>

struct prs_peer;
struct prs_wire_note;

/* Send a note. If that fails, reading from the stream tells why. */
void prs_note_send(struct prs_peer *peer, const struct prs_wire_note *note);
/* Tell the other side that this peer has failed, so that it need not wait. */
void prs_note_tell_failure(struct prs_peer *peer, const char *why);
/* Tell the other side, once, that this side has lost `rank` (`failed` is the peer to that rank) and sends nothing more.
 * The caller holds the lock of `peer`. */
void prs_note_tell_loss(struct prs_peer *peer, uint32_t rank, const struct prs_peer *failed);

#endif
