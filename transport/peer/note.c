/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/peer/note.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "transport/peer/peer.h"
#include "transport/util/log.h"

void prs_note_send(struct prs_peer *peer, const struct prs_wire_note *note)
{
    /* The note fits the buffer of the socket, since a peer sends few notes. If the connection is broken, reading from
     * it tells why. */
    if (send(peer->stream_fd, note, sizeof(*note), MSG_DONTWAIT | MSG_NOSIGNAL) != (ssize_t)sizeof(*note))
        PRS_DEBUG("%s: cannot be told of a failure: %s", peer->remote, strerror(errno));
}

void prs_note_tell_failure(struct prs_peer *peer, const char *why)
{
    struct prs_wire_note note = {.type = PRS_NOTE_FAILED};

    if (!peer->failover || peer->stream_fd < 0 || peer->remote_closed)
        return;
    snprintf(note.why, sizeof(note.why), "%s", why);
    prs_note_send(peer, &note);
}

void prs_note_tell_loss(struct prs_peer *peer, uint32_t rank, const struct prs_peer *failed)
{
    struct prs_wire_note note = {.type = PRS_NOTE_LOST, .rank = rank};
    const char *rest = strstr(failed->error_text, failed->description);

    if (peer->told_of_loss || peer->stream_fd < 0 || peer->remote_closed)
        return;
    peer->told_of_loss = true;
    /* Leave out the description of the failed connection: its rails mean nothing to the other side. */
    snprintf(note.loss, sizeof(note.loss), "%.*s",
             rest > failed->error_text + 2 ? (int)(rest - failed->error_text - 2) : (int)sizeof(note.loss),
             failed->error_text);
    prs_note_send(peer, &note);
}
