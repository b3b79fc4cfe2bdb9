/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/peer/fail.h"

#include <stdarg.h>
#include <stdio.h>

#include "transport/peer/note.h"
#include "transport/peer/peer.h"
#include "transport/util/error.h"

void prs_peer_lock(const struct prs_peer *peer)
{
    if (peer->failover)
        prs_light_lock_take(&peer->failover->lock);
}

void prs_peer_unlock(const struct prs_peer *peer)
{
    if (peer->failover)
        prs_light_lock_give(&peer->failover->lock);
}

int prs_peer_fail(struct prs_peer *peer, int code, const char *format, ...)
{
    char text[512];
    va_list args;

    if (peer->error)
        return peer->error;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    prs_peer_lock(peer);
    peer->error = code;
    snprintf(peer->error_text, sizeof(peer->error_text), "%s; %s", text, peer->description);
    prs_fail(code, "%s", peer->error_text);
    /* Before the ops are failed: their memory may be reused at once, so no NIC may still read or write it. */
    for (uint32_t i = 0; i < peer->path_count; i++)
        peer->nic->kill(peer->link[i]);
    prs_note_tell_failure(peer, text);
    if (peer->records)
        prs_claim_drop(&peer->records->raise.claim);
    prs_order_fail(&peer->order, code);
    prs_peer_unlock(peer);
    prs_peer_want_progress(peer); /* which returns the error */
    return code;
}

int prs_peer_error_again(const struct prs_peer *peer)
{
    return prs_error_repeat(peer->error, peer->error_text);
}
