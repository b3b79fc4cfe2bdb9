/* SPDX-License-Identifier: Apache-2.0 */
/* A team: the rounds of a context, and calls that wait until its ranks are connected. */
#include "transport/connect/team_state.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "transport/nic/domain.h"
#include "transport/util/clock.h"
#include "transport/util/compiler.h"
#include "transport/util/error.h"

enum {
    ACCEPT_EVERY = 64,     /* progress calls between two polls of the listener, which cost a system call */
    LOOK_EVERY = 256,      /* rounds of progress between two times at which silent peers may be due for a look */
    LOOK_ROUNDS = 1 << 14, /* each peer is looked at once in so many rounds, ... */
    LOOK_NS = 100000000,   /* ... and at least once in this time, where rounds are slow */
    CONNECT_NS = 1000000,  /* a round makes no more connections after this time */
};

/* Keep the error: the round goes on with the other peers. */
static PRS_COLD void fail_peer(struct prs_team *team, struct prs_team_context *context, uint32_t context_id,
                               const struct prs_peer *peer, int error)
{
    for (uint32_t i = 0; i < context->active_count; i++) {
        const struct prs_team_member *member = &context->members[context->active[i]];

        /* MUTANT(connect team/a_peer_that_fails_does_not_disturb_the_others)
         * an error names the rank: s/member->made == peer || // */
        if (member->made == peer || member->accepted == peer) {
            error = prs_team_fail_rank(team, context_id, context->active[i], error);
            break;
        }
    }
    prs_error_keep(&context->error, error);
}

static int adopt_peers(struct prs_team_context *context)
{
    uint32_t count = __atomic_load_n(&context->peer_count, __ATOMIC_ACQUIRE); /* [team-peers] */

    for (; context->adopted < count; context->adopted++) {
        int r = prs_peer_adopt(context->peers[context->adopted], &context->cqs, &context->list);

        if (r)
            return r;
    }
    return 0;
}

/* Attend to the peers in the list: they have something to post, or wait for more than events. */
static void attend_listed(struct prs_team *team, struct prs_team_context *context, uint32_t context_id, int *did)
{
    struct prs_peer *peer = context->list.first, *next;

    context->list.first = NULL;
    for (; peer; peer = next) {
        int r;

        next = peer->next_listed; /* it may join again */
        r = prs_peer_attend(peer);
        if (r < 0)
            fail_peer(team, context, context_id, peer, r);
        else
            *did += r;
    }
}

/* The queues themselves do not work any more. */
static PRS_COLD void fail_sharers(struct prs_team *team, struct prs_team_context *context, uint32_t context_id,
                                  const struct prs_shared_cqs *cqs, int error)
{
    /* MUTANT(connect ranks/all_peers_fail_when_the_queue_that_they_share_does)
     * all peers fail with the queue that they share: delete */
    for (uint32_t i = 0; i < context->adopted; i++) {
        struct prs_peer *peer = context->peers[i];

        for (uint32_t path = 0; path < peer->path_count; path++)
            if (peer->link[path]->cqs == cqs && prs_peer_handle(peer, peer->link[path], NULL, error) < 0)
                fail_peer(team, context, context_id, peer, error);
    }
    if (!context->error.code) /* no peer has set it: none of them is in use yet */
        prs_error_keep(&context->error,
                       prs_fail(error, "%s: completions cannot be taken: %s", cqs->rail->info.name, strerror(-error)));
}

/* Take the completions that the NIC of one rail has for any peer. */
static void take_completions(struct prs_team *team, struct prs_team_context *context, uint32_t context_id,
                             struct prs_shared_cqs *cqs, int *did)
{
    struct prs_event events[PRS_POLL_MOST];
    bool more;

    do {
        struct prs_link *link;
        int count = cqs->rail->domain->nic->poll_shared(cqs, &link, events, &more), r;

        if (likely(!link)) {
            if (unlikely(count < 0))
                fail_sharers(team, context, context_id, cqs, count);
            return;
        }
        r = prs_peer_handle(link->user, link, events, count);
        if (unlikely(r))
            fail_peer(team, context, context_id, link->user, r);
        else
            *did += count;
    } while (more);
}

/* How many silent peers are due? */
static uint32_t count_due(struct prs_team_context *context)
{
    uint64_t now_ns = prs_clock_ns(), late = (now_ns - context->looked_ns) / (LOOK_NS / context->adopted);

    context->look_rounds += LOOK_EVERY;
    if (!late && (uint64_t)context->look_rounds * context->adopted < LOOK_ROUNDS)
        return 0;
    context->look_rounds = 0;
    context->looked_ns = now_ns;
    return !late ? 1 : late < context->adopted ? (uint32_t)late : context->adopted;
}

static void look_in_turn(struct prs_team *team, struct prs_team_context *context, uint32_t context_id)
{
    uint32_t due;

    context->look_in = LOOK_EVERY;
    if (!context->adopted)
        return;
    due = count_due(context);
    while (due-- > 0) {
        struct prs_peer *peer = context->peers[context->look_at++ % context->adopted];
        int r = prs_peer_look(peer);

        if (r < 0)
            fail_peer(team, context, context_id, peer, r);
    }
}

/* Without news this costs the same for any number of peers that share completion queues. */
static int progress_context(struct prs_team *team, struct prs_team_context *context, uint32_t context_id, bool hurries,
                            int *did)
{
    context->error.code = 0;
    if (unlikely(context->connecting))
        prs_team_step_connectors(team, context, context_id, hurries ? prs_clock_ns() + CONNECT_NS : 0, did);
    prs_error_keep(&context->error, adopt_peers(context));
    if (context->list.first)
        attend_listed(team, context, context_id, did);
    for (uint32_t i = 0; i < __atomic_load_n(&context->cqs.count, __ATOMIC_ACQUIRE); i++) /* [cq-group] */
        take_completions(team, context, context_id, context->cqs.rail[i], did);
    /* MUTANT(connect team/a_dead_process_is_noticed_by_its_stream) silent peers are looked at: delete */
    if (unlikely(context->look_in-- == 0))
        look_in_turn(team, context, context_id);
    return prs_error_kept(&context->error);
}

/* hurries: make few connections in one call, because traffic on established peers must not wait for the queues of new
 * ones. */
static int progress(struct prs_team *team, uint32_t context_id, bool hurries)
{
    struct prs_team_context *context = prs_team_find(team, context_id);
    int did = 0;
    int r = 0;

    if (!context || context->rounds++ % ACCEPT_EVERY == 0) {
        /* If another thread holds the lock, it accepts on behalf of this one. */
        if (pthread_mutex_trylock(&team->lock) == 0) {
            r = prs_team_accept_locked(team, hurries ? prs_clock_ns() + CONNECT_NS : 0);
            if (r >= 0 && !context)
                r = prs_team_make_context_locked(team, context_id, &context);
            pthread_mutex_unlock(&team->lock);
        }
        if (r < 0)
            return r;
    }
    r = context ? progress_context(team, context, context_id, hurries, &did) : 0;
    return r < 0 ? r : did;
}

int prs_team_progress(struct prs_team *team, uint32_t context_id)
{
    return progress(team, context_id, true);
}

/* ---- connect and wait ---- */

/* Of two ranks, the lower one connects. */
static bool we_connect(const struct prs_team *team, uint32_t rank)
{
    return team->options.rank < rank;
}

/* Connect to these ranks, or wait until they have connected. */
static int connect_ranks(struct prs_team *team, uint32_t context_id, const uint32_t *ranks, uint32_t count)
{
    uint64_t deadline_ms = prs_clock_ms() + team->options.timeout_ms;
    uint32_t have = 0, missing = 0;
    struct prs_peer *peer;
    int r;

    while (have < count) {
        struct prs_team_context *context = prs_team_find(team, context_id);

        if (context)
            context->rounds = 0; /* accept in each round: this is what we wait for */
        r = progress(team, context_id, false);
        if (r < 0)
            return r;
        have = 0;
        context = prs_team_find(team, context_id);
        for (uint32_t i = 0; i < count; i++) {
            if (!we_connect(team, ranks[i]) &&
                (!context || !__atomic_load_n(&context->members[ranks[i]].accepted, __ATOMIC_ACQUIRE)))
                r = PRS_AGAIN;
            else
                r = prs_team_peer(team, context_id, ranks[i], &peer);
            if (r < 0)
                return r;
            if (!r)
                have++;
            else
                missing = ranks[i];
        }
        /* MUTANT(connect ranks/a_rank_that_does_not_come_is_named_at_the_limit)
         * waiting for ranks has a limit: s/prs_clock_ms() > deadline_ms/false/ */
        if (have < count && prs_clock_ms() > deadline_ms) {
            r = prs_fail(-ETIMEDOUT,
                         "rank %u: %u of %u peers of context %u did not connect within %u ms, rank %u among them",
                         team->options.rank, count - have, count, context_id, team->options.timeout_ms, missing);
            prs_team_keep_text(team, prs_error_text());
            return r;
        }
        if (have < count)
            nanosleep(&(struct timespec){0, 200000}, NULL);
    }
    return 0;
}

int prs_team_connect_except(struct prs_team *team, uint32_t context, uint32_t first, uint32_t count)
{
    uint32_t size = team->options.world, wanted = 0;
    uint32_t *ranks = calloc(size, sizeof(*ranks));
    int r;

    if (!ranks)
        return prs_fail(-ENOMEM, "team: no memory to connect %u ranks", size);
    for (uint32_t rank = 0; rank < size; rank++)
        if (rank != team->options.rank && rank - first >= count)
            ranks[wanted++] = rank;
    r = connect_ranks(team, context, ranks, wanted);
    free(ranks);
    return r;
}

int prs_team_connect(struct prs_team *team, uint32_t context)
{
    return prs_team_connect_except(team, context, 0, 0);
}

int prs_team_connect_ring(struct prs_team *team, uint32_t context)
{
    uint32_t size = team->options.world, rank = team->options.rank;
    uint32_t ranks[2] = {(rank + 1) % size, (rank + size - 1) % size};

    if (size == 1)
        return 0;
    return connect_ranks(team, context, ranks, size == 2 ? 1 : 2);
}
