/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/connect/team_state.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "transport/nic/domain.h"
#include "transport/order/policy.h"
#include "transport/util/clock.h"
#include "transport/util/compiler.h"
#include "transport/util/error.h"

uint32_t prs_team_rank(const struct prs_team *team)
{
    return team->options.rank;
}

void prs_team_set_traffic_class(struct prs_team *team, int traffic_class)
{
    pthread_mutex_lock(&team->lock);
    team->options.traffic_class = traffic_class;
    pthread_mutex_unlock(&team->lock);
}

uint32_t prs_team_world(const struct prs_team *team)
{
    return team->options.world;
}

const char *prs_team_error(const struct prs_team *team)
{
    return __atomic_load_n(&team->error, __ATOMIC_ACQUIRE);
}

int prs_team_failed_rank(const struct prs_team *team, uint32_t *rank)
{
    /* The rank is written before the text is seen: [team-error]. */
    if (!prs_team_error(team)[0] || team->failed == 0)
        return -ENOENT;
    *rank = team->failed - 1;
    return 0;
}

/* failed: the rank that the text is about, plus one; 0: no single one */
static void keep_text(struct prs_team *team, const char *text, uint32_t failed)
{
    pthread_mutex_lock(&team->text_lock);
    /* MUTANT(connect ranks/the_first_error_of_a_team_stays) the first error of a team stays: s/!team->text[0]/true/ */
    if (!team->text[0]) {
        snprintf(team->text, sizeof(team->text), "%s", text);
        team->failed = failed;
        /* [team-error] pairs with the load in prs_team_error() */
        __atomic_store_n(&team->error, team->text, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&team->text_lock);
}

void prs_team_keep_text(struct prs_team *team, const char *text)
{
    keep_text(team, text, 0);
}

int prs_team_fail_rank(struct prs_team *team, uint32_t context, uint32_t rank, int error)
{
    char text[sizeof(team->text)];

    snprintf(text, sizeof(text), "rank %u to rank %u, context %u: %s", team->options.rank, rank, context,
             prs_error_text());
    keep_text(team, text, rank + 1);
    return prs_error_repeat(error, text);
}

bool prs_team_is_hello(const struct prs_team *team, const struct prs_team_hello *hello)
{
    /* MUTANT(connect team/peers_that_are_not_of_the_team_are_closed_and_the_others_stay)
     * a member has a rank below the size: s/hello->rank < team->options.world &&// */
    /* MUTANT(connect team/peers_that_are_not_of_the_team_are_closed_and_the_others_stay)
     * the team of a member has the same size: s/&& hello->size == team->options.world// */
    return hello->magic == PRS_TEAM_HELLO_MAGIC && hello->rank < team->options.world &&
           hello->size == team->options.world;
}

/* ---- life ---- */

static prs_share_fn share_with_context;

int prs_team_open(const struct prs_team_options *options, struct prs_team **out)
{
    struct prs_team *team;

    if (prs_check_reserved(options, "struct prs_team_options"))
        return -EINVAL;
    if (options->rank_info_bytes > PRS_TEAM_RANK_INFO_BYTES)
        return prs_fail(-EINVAL, "team: rank_info of %u bytes: at most %d", options->rank_info_bytes,
                        PRS_TEAM_RANK_INFO_BYTES);
    if (options->world == 0 || options->rank >= options->world || !options->listener || !options->handles)
        return prs_fail(-EINVAL, "team: rank %u of %u, or no listener or handles", options->rank, options->world);
    team = calloc(1, sizeof(*team));
    if (!team)
        return prs_fail(-ENOMEM, "team: no memory");
    team->handles = calloc(options->world, sizeof(*team->handles));
    if (!team->handles) {
        free(team);
        return prs_fail(-ENOMEM, "team: no memory for %u handles", options->world);
    }
    memcpy(team->handles, options->handles, options->world * sizeof(*team->handles));
    team->options = *options;
    team->rails = *options->rails;
    team->options.rails = &team->rails;
    if (options->rank_info_bytes)
        memcpy(team->rank_info, options->rank_info, options->rank_info_bytes);
    if (options->policy) {
        snprintf(team->policy, sizeof(team->policy), "%s", options->policy);
        team->options.policy = team->policy;
    }
    if (team->options.timeout_ms == 0)
        team->options.timeout_ms = options->fabric->config.timeout_ms;
    team->error = "";
    pthread_mutex_init(&team->lock, NULL);
    pthread_mutex_init(&team->text_lock, NULL);
    prs_listener_share(options->listener, share_with_context, team);
    *out = team;
    return 0;
}

bool prs_team_drains(const struct prs_team *team)
{
    enum prs_policy policy;

    return prs_policy_parse(team->options.policy, (enum prs_policy)team->options.fabric->config.policy, &policy) == 0 &&
           policy == PRS_POLICY_DRAIN;
}

static void close_context(struct prs_team *team, struct prs_team_context *context)
{
    for (uint32_t rank = 0; rank < team->options.world; rank++) {
        struct prs_team_member *member = &context->members[rank];

        prs_connector_close(member->connecting);
        prs_peer_close(member->made);
        prs_peer_close(member->accepted);
    }
    prs_cq_group_drop(&context->cqs);
    free(context->peers);
    free(context->active);
    free(context->members);
}

void prs_team_close(struct prs_team *team)
{
    if (!team)
        return;
    for (uint32_t i = 0; i < PRS_TEAM_CONTEXTS; i++)
        if (team->contexts[i].key)
            close_context(team, &team->contexts[i]);
    prs_listener_close(team->options.listener);
    pthread_mutex_destroy(&team->lock);
    pthread_mutex_destroy(&team->text_lock);
    free(team->handles);
    free(team);
}

int prs_team_make_context_locked(struct prs_team *team, uint32_t context_id, struct prs_team_context **out)
{
    struct prs_team_context *context = prs_team_find(team, context_id);

    *out = context;
    if (context)
        return 0;
    context = prs_team_find_key(team, context_id, 0);
    if (!context)
        return prs_fail(-ENOSPC, "team: context %u would be one more than %d at a time", context_id, PRS_TEAM_CONTEXTS);
    context->members = calloc(team->options.world, sizeof(*context->members));
    context->active = calloc(team->options.world, sizeof(*context->active));
    context->peers = calloc(2 * (size_t)team->options.world, sizeof(*context->peers));
    if (!context->members || !context->active || !context->peers) {
        free(context->members);
        free(context->active);
        free(context->peers);
        return prs_fail(-ENOMEM, "team: no memory for context %u", context_id);
    }
    context->active_count = context->connecting = context->peer_count = context->adopted = 0;
    context->look_in = context->look_at = context->look_rounds = 0;
    context->looked_ns = prs_clock_ns(); /* not all peers are due at once */
    context->list.first = NULL;
    context->cqs.count = 0;
    context->rounds = 0;
    /* [context-key] pairs with the acquire in prs_team_find_key(). */
    __atomic_store_n(&context->key, context_id + 1ull, __ATOMIC_RELEASE);
    *out = context;
    return 0;
}

void prs_team_activate_locked(struct prs_team_context *context, uint32_t rank)
{
    for (uint32_t i = 0; i < context->active_count; i++)
        if (context->active[i] == rank)
            return;
    context->active[context->active_count] = rank;
    /* [active-count] pairs with the acquires in prs_team_step_connectors(), prs_team_settle() and
     * prs_team_is_raising(): another thread may be accepting for this context. */
    __atomic_store_n(&context->active_count, context->active_count + 1, __ATOMIC_RELEASE);
}

void prs_team_file_locked(struct prs_team_context *context, uint32_t rank, struct prs_peer *peer)
{
    prs_team_activate_locked(context, rank);
    context->peers[context->peer_count] = peer;
    /* [team-peers] pairs with the acquire in adopt_peers(): another thread may be accepting for this context. */
    __atomic_store_n(&context->peer_count, context->peer_count + 1, __ATOMIC_RELEASE);
}

/* prs_share_fn: a peer is being accepted, for a context that may be another thread's. */
static struct prs_cq_group *share_with_context(void *user, const struct prs_wire_private *private_data)
{
    struct prs_team *team = user; /* its lock is held */
    struct prs_team_context *context = NULL;
    struct prs_team_hello hello;

    if (private_data->bytes != sizeof(hello))
        return NULL;
    memcpy(&hello, private_data->data, sizeof(hello));
    if (prs_team_is_hello(team, &hello))
        (void)prs_team_make_context_locked(team, hello.context, &context); /* again when the peer is filed */
    /* MUTANT(connect ranks/peers_that_called_share_the_completion_queue_of_their_context)
     * an accepted peer shares the queues of its context: s/context ? &context->cqs : NULL/NULL/ */
    return context ? &context->cqs : NULL;
}

const void *prs_team_rank_info(struct prs_team *team, uint32_t context_id, uint32_t rank)
{
    struct prs_team_context *context = rank < team->options.world ? prs_team_find(team, context_id) : NULL;
    const struct prs_peer *peer;
    uint32_t bytes;

    if (!context)
        return NULL;
    peer = context->members[rank].made;
    if (!peer)
        peer = __atomic_load_n(&context->members[rank].accepted, __ATOMIC_ACQUIRE);
    if (!peer)
        return NULL;
    const struct prs_team_hello *hello = prs_peer_private(peer, &bytes);

    return bytes == sizeof(*hello) ? hello->rank_info : NULL;
}

void prs_team_close_context(struct prs_team *team, uint32_t context_id)
{
    struct prs_team_context *context, gone;

    pthread_mutex_lock(&team->lock);
    context = prs_team_find(team, context_id);
    if (context) {
        gone = *context; /* its slot may be taken as soon as the lock is released */
        __atomic_store_n(&context->key, 0, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&team->lock);
    if (context)
        close_context(team, &gone);
}

/* ---- all peers of a context ---- */

int prs_team_settle(struct prs_team *team, uint32_t context_id)
{
    struct prs_team_context *context = prs_team_find(team, context_id);
    uint32_t active = context ? __atomic_load_n(&context->active_count, __ATOMIC_ACQUIRE) : 0;
    int all = 0;

    for (uint32_t i = 0; i < active; i++) {
        struct prs_team_member *member = &context->members[context->active[i]];
        struct prs_peer *peers[2] = {member->made, __atomic_load_n(&member->accepted, __ATOMIC_ACQUIRE)};

        for (int side = 0; side < 2; side++) {
            int r = peers[side] ? prs_peer_settle(peers[side]) : 0;

            if (r < 0)
                return prs_team_fail_rank(team, context_id, context->active[i], r);
            all = r ? r : all; /* ask all peers, so that they answer at the same time */
        }
    }
    return all;
}

bool prs_team_is_raising(struct prs_team *team, uint32_t context_id)
{
    struct prs_team_context *context = prs_team_find(team, context_id);
    uint32_t active = context ? __atomic_load_n(&context->active_count, __ATOMIC_ACQUIRE) : 0;

    for (uint32_t i = 0; i < active; i++) {
        const struct prs_team_member *member = &context->members[context->active[i]];
        const struct prs_peer *accepted = __atomic_load_n(&member->accepted, __ATOMIC_ACQUIRE);

        if ((member->made && prs_records_busy(member->made)) || (accepted && prs_records_busy(accepted)))
            return true;
    }
    return false;
}

PRS_READS_COUNTERS void prs_team_stats(struct prs_team *team, uint32_t context_id, struct prs_stats *out)
{
    struct prs_team_context *context = prs_team_find(team, context_id);

    memset(out, 0, sizeof(*out));
    for (uint32_t rank = 0; context && rank < team->options.world; rank++) {
        const struct prs_team_member *member = &context->members[rank];
        const struct prs_peer *peers[2] = {__atomic_load_n(&member->made, __ATOMIC_ACQUIRE), /* [team-member] */
                                           __atomic_load_n(&member->accepted, __ATOMIC_ACQUIRE)};

        for (int i = 0; i < 2; i++) {
            struct prs_stats one;
            uint64_t *sum = (uint64_t *)out;

            if (!peers[i])
                continue;
            prs_peer_stats(peers[i], &one);
            /* Every field is a 64-bit counter. */
            for (size_t word = 0; word < sizeof(one) / sizeof(uint64_t); word++)
                sum[word] += ((const uint64_t *)&one)[word];
        }
    }
}
