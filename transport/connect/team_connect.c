/* SPDX-License-Identifier: Apache-2.0 */
/* A team: one connection after the other, made and accepted. */
#include "transport/connect/team_state.h"

#include <errno.h>
#include <string.h>

#include "transport/util/clock.h"
#include "transport/util/error.h"
#include "transport/util/log.h"

static void peer_options(const struct prs_team *team, uint32_t context, struct prs_team_hello *hello,
                         struct prs_peer_options *out)
{
    *hello = (struct prs_team_hello){PRS_TEAM_HELLO_MAGIC, team->options.rank, team->options.world, context, {0}};
    /* MUTANT(connect ranks/each_learns_what_the_other_tells_of_itself) ranks tell each other their info: delete */
    memcpy(hello->rank_info, team->rank_info, sizeof(hello->rank_info));
    memset(out, 0, sizeof(*out));
    out->private_data = hello;
    out->private_bytes = sizeof(*hello);
    out->max_ops = team->options.max_ops;
    out->queues_per_rail = team->options.queues_per_rail;
    out->traffic_class = team->options.traffic_class;
    out->policy = team->options.policy;
    out->exclusive_adds = team->options.exclusive_adds;
    out->timeout_ms = team->options.timeout_ms > team->options.fabric->config.timeout_ms ? team->options.timeout_ms : 0;
}

void prs_team_file_accepted_locked(struct prs_team *team, struct prs_peer *peer)
{
    struct prs_team_context *context;
    struct prs_team_hello hello;
    uint32_t bytes = 0;
    const void *data = prs_peer_private(peer, &bytes);

    /* MUTANT(connect team/peers_that_are_not_of_the_team_are_closed_and_the_others_stay)
     * what a member says has one size: s/!=/</ */
    if (bytes != sizeof(hello)) {
        PRS_WARN("team rank %u: closed a peer with %u bytes of private data, expected %zu: not of this team",
                 team->options.rank, bytes, sizeof(hello));
        goto close;
    }
    memcpy(&hello, data, sizeof(hello));
    if (!prs_team_is_hello(team, &hello)) {
        PRS_WARN("team rank %u of %u: closed a peer with magic %#x, rank %u of %u, context %u: not of this team",
                 team->options.rank, team->options.world, hello.magic, hello.rank, hello.size, hello.context);
        goto close;
    }
    if (prs_team_make_context_locked(team, hello.context, &context) < 0) {
        PRS_WARN("team rank %u: closed a connection of rank %u: %s", team->options.rank, hello.rank, prs_error_text());
        goto close; /* this failure does not concern the other connections */
    }
    /* MUTANT(connect team/peers_that_are_not_of_the_team_are_closed_and_the_others_stay)
     * a rank connects once in a context: delete */
    if (context->members[hello.rank].accepted) {
        PRS_WARN("team rank %u: closed a second connection of rank %u in context %u", team->options.rank, hello.rank,
                 hello.context);
        goto close;
    }
    __atomic_store_n(&context->members[hello.rank].accepted, peer, __ATOMIC_RELEASE);
    prs_team_file_locked(context, hello.rank, peer);
    return;

close:
    prs_peer_close(peer);
}

static bool is_late(uint64_t until_ns)
{
    return until_ns && prs_clock_ns() >= until_ns;
}

int prs_team_accept_locked(struct prs_team *team, uint64_t until_ns)
{
    struct prs_peer_options options;
    struct prs_peer *peer;
    struct prs_team_hello hello;
    int r;

    peer_options(team, 0, &hello, &options);
    prs_listener_hurry(team->options.listener, until_ns);
    do {
        r = prs_accept(team->options.listener, &options, &peer);
        if (r)
            return r < 0 ? r : 0;
        prs_team_file_accepted_locked(team, peer);
    } while (!is_late(until_ns));
    return 0;
}

static int start_connecting_locked(struct prs_team *team, struct prs_team_context *context, uint32_t context_id,
                                   uint32_t rank)
{
    struct prs_team_member *member = &context->members[rank];
    struct prs_peer_options options;
    struct prs_team_hello hello;
    int r;

    peer_options(team, context_id, &hello, &options);
    r = prs_connect(team->options.fabric, &team->rails, &team->handles[rank], &options, &member->connecting);
    if (r < 0)
        return prs_team_fail_rank(team, context_id, rank, r);
    prs_connector_share(member->connecting, &context->cqs);
    context->connecting++;
    prs_team_activate_locked(context, rank);
    return 0;
}

static int step_connector_locked(struct prs_team *team, struct prs_team_context *context, uint32_t context_id,
                                 uint32_t rank)
{
    struct prs_team_member *member = &context->members[rank];
    struct prs_peer *made;
    int r = prs_connector_step(member->connecting, &made);

    if (r == PRS_AGAIN)
        return 0;
    member->connecting = NULL; /* the step has freed it */
    context->connecting--;
    if (r < 0)
        return prs_team_fail_rank(team, context_id, rank, r);
    /* [team-member] complete, for prs_team_stats() of another thread */
    __atomic_store_n(&member->made, made, __ATOMIC_RELEASE);
    member->chosen = made;
    prs_team_file_locked(context, rank, made);
    return 1;
}

int prs_team_peer(struct prs_team *team, uint32_t context_id, uint32_t rank, struct prs_peer **out)
{
    struct prs_team_context *context;
    struct prs_team_member *member;
    int r = 0;

    if (rank >= team->options.world)
        return prs_fail(-EINVAL, "team of %u: no rank %u (context %u)", team->options.world, rank, context_id);
    context = prs_team_find(team, context_id);
    if (context && context->members[rank].chosen) {
        *out = context->members[rank].chosen;
        return 0;
    }
    pthread_mutex_lock(&team->lock);
    r = prs_team_make_context_locked(team, context_id, &context);
    if (r < 0)
        goto unlock;
    member = &context->members[rank];
    if (!member->chosen && !member->connecting) {
        /* MUTANT(connect ranks/a_pair_of_ranks_shares_one_connection)
         * a rank that has connected is not called: s/if (member->accepted)/if (false)/ */
        if (member->accepted)
            member->chosen = member->accepted; /* one connection serves both directions */
        else
            r = start_connecting_locked(team, context, context_id, rank);
    }
    *out = member->chosen;
    if (!r && !member->chosen)
        r = PRS_AGAIN;
unlock:
    pthread_mutex_unlock(&team->lock);
    return r;
}

void prs_team_step_connectors(struct prs_team *team, struct prs_team_context *context, uint32_t context_id,
                              uint64_t until_ns, int *did)
{
    uint32_t active = __atomic_load_n(&context->active_count, __ATOMIC_ACQUIRE);

    for (uint32_t i = 0; i < active; i++) {
        uint32_t rank = context->active[context->connect_at++ % active];
        int r;

        if (!context->members[rank].connecting)
            continue;
        pthread_mutex_lock(&team->lock);
        r = step_connector_locked(team, context, context_id, rank);
        pthread_mutex_unlock(&team->lock);
        prs_error_keep(&context->error, r);
        *did += r > 0;
        /* MUTANT(connect rounds/one_makes_few_queues_for_those_whom_it_calls)
         * making queues has a limit: s/is_late(until_ns)/false/ */
        if (is_late(until_ns))
            break;
    }
}
