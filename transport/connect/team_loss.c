/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/connect/team_loss.h"

#include <string.h>

#include "transport/connect/team_state.h"
#include "transport/peer/fail.h"
#include "transport/peer/note.h"

/* The first peer of the context that has failed, or NULL. */
static const struct prs_peer *find_failed(const struct prs_team_context *context)
{
    for (uint32_t i = 0; i < context->adopted; i++)
        if (context->peers[i]->error)
            return context->peers[i];
    return NULL;
}

/* The rank at the other end, from its hello. */
static uint32_t rank_of(const struct prs_peer *peer)
{
    struct prs_team_hello hello = {0};
    uint32_t bytes;
    const void *data = prs_peer_private(peer, &bytes);

    memcpy(&hello, data, bytes < sizeof(hello) ? bytes : sizeof(hello));
    return hello.rank;
}

int prs_team_tell_loss(struct prs_team *team, uint32_t context_id, bool now)
{
    struct prs_team_context *context = prs_team_find(team, context_id);
    const struct prs_peer *failed = context ? find_failed(context) : NULL;
    int r = 0;

    if (!failed)
        return 0;
    if (!now)
        (void)prs_team_progress(team, context_id); /* the error of the failed peer comes again */
    for (uint32_t i = 0; i < context->adopted; i++) {
        struct prs_peer *peer = context->peers[i];

        if (now || peer->error || prs_order_idle(&peer->order)) {
            prs_peer_lock(peer); /* its thread (watch.c) may send, too */
            /* MUTANT(connect lost_rank/ranks_that_wait_for_one_that_has_lost_another_are_told)
             * ranks are told of a loss: delete */
            prs_note_tell_loss(peer, rank_of(failed), failed);
            prs_peer_unlock(peer);
        } else {
            r = PRS_AGAIN;
        }
    }
    return r;
}
