/* SPDX-License-Identifier: Apache-2.0 */
#include <perseus/team.h>

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "transport/nic/verbs/cqs.h"
#include "transport/nic/domain.h"
#include "transport/nic/fabric.h"
#include "transport/order/policy.h"
#include "transport/connect/setup.h"
#include "transport/util/clock.h"
#include "transport/util/compiler.h"
#include "transport/util/error.h"
#include "transport/util/log.h"

enum {
    ACCEPT_EVERY = 64, /* progress calls between two polls of the listener, which cost a system call */
    /* Rounds of progress between two looks at a silent peer, of which the peers of a context take turns. */
    LOOK_EVERY = 256,
    HELLO_MAGIC = 0x4d544550, /* "PETM" */
};

/* What each side sends while connecting. */
struct hello {
    uint32_t magic, rank, size, context;
    uint8_t rank_info[PRS_TEAM_RANK_INFO_BYTES];
};
static_assert(sizeof(struct hello) <= PRS_PRIVATE_DATA_BYTES, "sent as private data");

/* One rank in one context, with up to two connections, since both ranks may connect at once. */
struct member {
    struct prs_peer *made;            /* this rank connected */
    struct prs_peer *accepted;        /* the other side connected */
    struct prs_connector *connecting; /* in progress */
    struct prs_peer *chosen;          /* the one that this rank sends on: never changes once set */
};

struct team_context {
    uint64_t key;           /* atomic: context id plus 1, stored after all other members; 0: free */
    struct member *members; /* [size] */
    uint32_t *active;       /* ranks with a peer or a connector, in any order */
    uint32_t active_count;
    uint32_t connecting;       /* how many of them have a connector */
    struct prs_peer **peers;   /* [2 * size] those that are connected, in the order in which they came */
    uint32_t peer_count;       /* atomic: any thread may accept */
    uint32_t adopted;          /* how many of them the thread of the context knows */
    struct prs_peer_list list; /* of those that it knows */
    struct prs_cq_group cqs;
    uint32_t look_in, look_at; /* rounds until the next look, and at whom */
    unsigned rounds;
};

struct prs_team {
    struct prs_team_options options;
    struct prs_rail_set rails;
    struct prs_handle *handles;
    char policy[24];
    uint8_t rank_info[PRS_TEAM_RANK_INFO_BYTES];
    /* Protects the listener, all connecting, and the table of contexts. Transfers on chosen peers need no lock, since
     * one thread at a time uses a context. */
    pthread_mutex_t lock;
    struct team_context contexts[PRS_TEAM_CONTEXTS]; /* hash table with linear probing, by context id */
    pthread_mutex_t text_lock;                       /* contexts of several threads may fail at once */
    char text[512];                                  /* of the first error; written once */
    const char *error;                               /* [team-error] the text, once it is complete; "" before */
};

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

/* Remember the text of the team's first error. */
static void keep_text(struct prs_team *team, const char *text)
{
    pthread_mutex_lock(&team->text_lock);
    if (!team->text[0]) {
        snprintf(team->text, sizeof(team->text), "%s", text);
        /* [team-error] pairs with the load in prs_team_error() */
        __atomic_store_n(&team->error, team->text, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&team->text_lock);
}

/* Add the rank to the text of an error. The peer or connector has logged the cause. */
static int fail_rank(struct prs_team *team, uint32_t context, uint32_t rank, int error)
{
    char text[sizeof(team->text)];

    snprintf(text, sizeof(text), "rank %u to rank %u, context %u: %s", team->options.rank, rank, context,
             prs_error_text());
    keep_text(team, text);
    return prs_error_repeat(error, text);
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

/* The slot with this key. Works without the lock too, since a context is closed only while no thread uses it. */
static struct team_context *find_key(struct prs_team *team, uint32_t context_id, uint64_t key)
{
    for (uint32_t i = 0; i < PRS_TEAM_CONTEXTS; i++) {
        struct team_context *context = &team->contexts[(context_id + i) % PRS_TEAM_CONTEXTS];

        /* [context-key] pairs with the release in make_context_locked(): the other members are complete. */
        if (__atomic_load_n(&context->key, __ATOMIC_ACQUIRE) == key)
            return context;
    }
    return NULL;
}

static struct team_context *find_context(struct prs_team *team, uint32_t context_id)
{
    return find_key(team, context_id, context_id + 1ull);
}

static void close_context(struct prs_team *team, struct team_context *context)
{
    for (uint32_t rank = 0; rank < team->options.world; rank++) {
        struct member *member = &context->members[rank];

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

/* Find or create the context. NULL, logged: too many contexts, or no memory. */
static struct team_context *make_context_locked(struct prs_team *team, uint32_t context_id)
{
    struct team_context *context = find_context(team, context_id);

    if (context)
        return context;
    context = find_key(team, context_id, 0);
    if (!context) {
        prs_fail(-ENOSPC, "team: context %u would be one more than %d at a time", context_id, PRS_TEAM_CONTEXTS);
        return NULL;
    }
    context->members = calloc(team->options.world, sizeof(*context->members));
    context->active = calloc(team->options.world, sizeof(*context->active));
    context->peers = calloc(2 * (size_t)team->options.world, sizeof(*context->peers));
    if (!context->members || !context->active || !context->peers) {
        prs_fail(-ENOMEM, "team: no memory for context %u", context_id);
        free(context->members);
        free(context->active);
        free(context->peers);
        return NULL;
    }
    context->active_count = context->connecting = context->peer_count = context->adopted = 0;
    context->look_in = context->look_at = 0;
    context->list.first = NULL;
    context->cqs.count = 0;
    context->rounds = 0;
    /* [context-key] pairs with the acquire in find_key(). */
    __atomic_store_n(&context->key, context_id + 1ull, __ATOMIC_RELEASE);
    return context;
}

static void activate_locked(struct team_context *context, uint32_t rank)
{
    for (uint32_t i = 0; i < context->active_count; i++)
        if (context->active[i] == rank)
            return;
    context->active[context->active_count] = rank;
    /* [active-count] pairs with the acquires in step_connectors(), prs_team_settle() and prs_team_is_raising():
     * another thread may be accepting for this context. */
    __atomic_store_n(&context->active_count, context->active_count + 1, __ATOMIC_RELEASE);
}

/* Let the thread of the context use the peer. */
static void file_locked(struct team_context *context, uint32_t rank, struct prs_peer *peer)
{
    activate_locked(context, rank);
    context->peers[context->peer_count] = peer;
    /* [team-peers] pairs with the acquire in adopt_peers(): another thread may be accepting for this context. */
    __atomic_store_n(&context->peer_count, context->peer_count + 1, __ATOMIC_RELEASE);
}

/* ---- connecting ---- */

static void peer_options(const struct prs_team *team, uint32_t context, struct hello *hello,
                         struct prs_peer_options *out)
{
    *hello = (struct hello){HELLO_MAGIC, team->options.rank, team->options.world, context, {0}};
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

static bool is_of_team(const struct prs_team *team, const struct hello *hello)
{
    return hello->magic == HELLO_MAGIC && hello->rank < team->options.world && hello->size == team->options.world;
}

/* prs_share_fn: a peer is being accepted, for a context that may be another thread's. */
static struct prs_cq_group *share_with_context(void *user, const struct prs_wire_private *private_data)
{
    struct prs_team *team = user; /* its lock is held */
    struct team_context *context;
    struct hello hello;

    if (private_data->bytes != sizeof(hello))
        return NULL;
    memcpy(&hello, private_data->data, sizeof(hello));
    context = is_of_team(team, &hello) ? make_context_locked(team, hello.context) : NULL;
    return context ? &context->cqs : NULL;
}

/* A peer was accepted: find out which rank and context it belongs to. Its hello comes over the network, so check it. */
static int file_accepted_locked(struct prs_team *team, struct prs_peer *peer)
{
    struct team_context *context;
    struct hello hello;
    uint32_t bytes = 0;
    const void *data = prs_peer_private(peer, &bytes);

    if (bytes != sizeof(hello)) {
        PRS_WARN("team rank %u: closed a peer with %u bytes of private data, expected %zu: not of this team",
                 team->options.rank, bytes, sizeof(hello));
        goto close;
    }
    memcpy(&hello, data, sizeof(hello));
    if (!is_of_team(team, &hello)) {
        PRS_WARN("team rank %u of %u: closed a peer with magic %#x, rank %u of %u, context %u: not of this team",
                 team->options.rank, team->options.world, hello.magic, hello.rank, hello.size, hello.context);
        goto close;
    }
    context = make_context_locked(team, hello.context);
    if (!context) {
        prs_peer_close(peer);
        return -ENOMEM;
    }
    if (context->members[hello.rank].accepted) {
        PRS_WARN("team rank %u: closed a second connection of rank %u in context %u", team->options.rank, hello.rank,
                 hello.context);
        goto close;
    }
    __atomic_store_n(&context->members[hello.rank].accepted, peer, __ATOMIC_RELEASE);
    file_locked(context, hello.rank, peer);
    return 0;

close:
    prs_peer_close(peer);
    return 0;
}

static int accept_locked(struct prs_team *team)
{
    struct prs_peer_options options;
    struct prs_peer *peer;
    struct hello hello;
    int r;

    peer_options(team, 0, &hello, &options);
    for (;;) {
        r = prs_accept(team->options.listener, &options, &peer);
        if (r)
            return r < 0 ? r : 0;
        r = file_accepted_locked(team, peer);
        if (r < 0)
            return r;
    }
}

static int start_connecting_locked(struct prs_team *team, struct team_context *context, uint32_t context_id,
                                   uint32_t rank)
{
    struct member *member = &context->members[rank];
    struct prs_peer_options options;
    struct hello hello;
    int r;

    peer_options(team, context_id, &hello, &options);
    r = prs_connect(team->options.fabric, &team->rails, &team->handles[rank], &options, &member->connecting);
    if (r < 0)
        return fail_rank(team, context_id, rank, r);
    prs_connector_share(member->connecting, &context->cqs);
    context->connecting++;
    activate_locked(context, rank);
    return 0;
}

static int step_connector_locked(struct prs_team *team, struct team_context *context, uint32_t context_id,
                                 uint32_t rank)
{
    struct member *member = &context->members[rank];
    struct prs_peer *made;
    int r = prs_connector_step(member->connecting, &made);

    if (r == PRS_AGAIN)
        return 0;
    member->connecting = NULL; /* the step has freed it */
    context->connecting--;
    if (r < 0)
        return fail_rank(team, context_id, rank, r);
    /* [team-member] complete, for prs_team_stats() of another thread */
    __atomic_store_n(&member->made, made, __ATOMIC_RELEASE);
    member->chosen = made;
    file_locked(context, rank, made);
    return 1;
}

int prs_team_peer(struct prs_team *team, uint32_t context_id, uint32_t rank, struct prs_peer **out)
{
    struct team_context *context;
    struct member *member;
    int r = 0;

    if (rank >= team->options.world)
        return prs_fail(-EINVAL, "team of %u: no rank %u (context %u)", team->options.world, rank, context_id);
    context = find_context(team, context_id);
    if (context && context->members[rank].chosen) {
        *out = context->members[rank].chosen;
        return 0;
    }
    pthread_mutex_lock(&team->lock);
    context = make_context_locked(team, context_id);
    if (!context) {
        r = -ENOMEM;
        goto unlock;
    }
    member = &context->members[rank];
    if (!member->chosen && !member->connecting) {
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

const void *prs_team_rank_info(struct prs_team *team, uint32_t context_id, uint32_t rank)
{
    struct team_context *context = rank < team->options.world ? find_context(team, context_id) : NULL;
    const struct prs_peer *peer;
    uint32_t bytes;

    if (!context)
        return NULL;
    peer = context->members[rank].made;
    if (!peer)
        peer = __atomic_load_n(&context->members[rank].accepted, __ATOMIC_ACQUIRE);
    if (!peer)
        return NULL;
    const struct hello *hello = prs_peer_private(peer, &bytes);

    return bytes == sizeof(*hello) ? hello->rank_info : NULL;
}

void prs_team_close_context(struct prs_team *team, uint32_t context_id)
{
    struct team_context *context, gone;

    pthread_mutex_lock(&team->lock);
    context = find_context(team, context_id);
    if (context) {
        gone = *context; /* its slot may be taken as soon as the lock is released */
        __atomic_store_n(&context->key, 0, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&team->lock);
    if (context)
        close_context(team, &gone);
}

/* ---- progress ---- */

/* The first error of a round is returned, but ends it for no other rank. */
static int first_error(int error, int r)
{
    return error ? error : r;
}

static int fail_peer(struct prs_team *team, const struct team_context *context, uint32_t context_id,
                     const struct prs_peer *peer, int error)
{
    for (uint32_t i = 0; i < context->active_count; i++) {
        const struct member *member = &context->members[context->active[i]];

        if (member->made == peer || member->accepted == peer)
            return fail_rank(team, context_id, context->active[i], error);
    }
    return error;
}

static int step_connectors(struct prs_team *team, struct team_context *context, uint32_t context_id, int *did)
{
    uint32_t active = __atomic_load_n(&context->active_count, __ATOMIC_ACQUIRE);
    int error = 0;

    for (uint32_t i = 0; i < active; i++) {
        int r;

        if (!context->members[context->active[i]].connecting)
            continue;
        pthread_mutex_lock(&team->lock);
        r = step_connector_locked(team, context, context_id, context->active[i]);
        pthread_mutex_unlock(&team->lock);
        error = first_error(error, r < 0 ? r : 0);
        *did += r > 0;
    }
    return error;
}

static int adopt_peers(struct team_context *context)
{
    uint32_t count = __atomic_load_n(&context->peer_count, __ATOMIC_ACQUIRE); /* [team-peers] */

    for (; context->adopted < count; context->adopted++) {
        int r = prs_peer_adopt(context->peers[context->adopted], &context->cqs, &context->list);

        if (r)
            return r;
    }
    return 0;
}

/* Peers that have something to post, or that wait for more than events. */
static int attend_listed(struct prs_team *team, struct team_context *context, uint32_t context_id, int *did)
{
    struct prs_peer *peer = context->list.first, *next;
    int error = 0;

    context->list.first = NULL;
    for (; peer; peer = next) {
        int r;

        next = peer->next_listed; /* it may join again */
        r = prs_peer_attend(peer);
        if (r < 0)
            error = first_error(error, fail_peer(team, context, context_id, peer, r));
        else
            *did += r;
    }
    return error;
}

/* The queues themselves do not work any more. */
static PRS_COLD int fail_sharers(const struct team_context *context, const struct prs_cqs *cqs, int error)
{
    for (uint32_t i = 0; i < context->adopted; i++) {
        struct prs_peer *peer = context->peers[i];

        for (uint32_t path = 0; path < peer->path_count; path++)
            if (peer->link[path]->cqs == cqs)
                (void)prs_peer_handle(peer, peer->link[path], NULL, error);
    }
    return error;
}

/* Completions that the NIC of one rail has for any peer. */
static int take_completions(struct prs_team *team, struct team_context *context, uint32_t context_id,
                            struct prs_cqs *cqs, int *did)
{
    struct prs_event events[PRS_POLL_MOST];
    int error = 0;
    bool more;

    do {
        struct prs_link *link;
        int count = cqs->rail->domain->nic->poll_shared(cqs, &link, events, &more), r;

        if (likely(!link))
            return count < 0 ? fail_sharers(context, cqs, count) : error;
        r = prs_peer_handle(link->user, link, events, count);
        if (unlikely(r))
            error = first_error(error, fail_peer(team, context, context_id, link->user, r));
        else
            *did += count;
    } while (more);
    return error;
}

static int look_in_turn(struct prs_team *team, struct team_context *context, uint32_t context_id)
{
    uint32_t each = context->adopted ? PRS_PEER_IDLE_POLLS / context->adopted : PRS_PEER_IDLE_POLLS;
    struct prs_peer *peer;
    int r;

    context->look_in = each > LOOK_EVERY ? each : LOOK_EVERY;
    if (!context->adopted)
        return 0;
    peer = context->peers[context->look_at++ % context->adopted];
    r = prs_peer_look(peer);
    return r < 0 ? fail_peer(team, context, context_id, peer, r) : 0;
}

/* Without news this costs the same for any number of peers that share completion queues. */
static int progress_context(struct prs_team *team, struct team_context *context, uint32_t context_id, int *did)
{
    int r = 0;

    if (unlikely(context->connecting))
        r = step_connectors(team, context, context_id, did);
    r = first_error(r, adopt_peers(context));
    if (context->list.first)
        r = first_error(r, attend_listed(team, context, context_id, did));
    for (uint32_t i = 0; i < __atomic_load_n(&context->cqs.count, __ATOMIC_ACQUIRE); i++) /* [cq-group] */
        r = first_error(r, take_completions(team, context, context_id, context->cqs.rail[i], did));
    if (unlikely(context->look_in-- == 0))
        r = first_error(r, look_in_turn(team, context, context_id));
    return r;
}

int prs_team_progress(struct prs_team *team, uint32_t context_id)
{
    struct team_context *context = find_context(team, context_id);
    int did = 0;
    int r = 0;

    if (!context || context->rounds++ % ACCEPT_EVERY == 0) {
        /* If another thread holds the lock, it accepts on behalf of this one. */
        if (pthread_mutex_trylock(&team->lock) == 0) {
            r = accept_locked(team);
            if (!context)
                context = make_context_locked(team, context_id);
            pthread_mutex_unlock(&team->lock);
        }
        if (r < 0)
            return r;
    }
    r = context ? progress_context(team, context, context_id, &did) : 0;
    return r < 0 ? r : did;
}

int prs_team_settle(struct prs_team *team, uint32_t context_id)
{
    struct team_context *context = find_context(team, context_id);
    uint32_t active = context ? __atomic_load_n(&context->active_count, __ATOMIC_ACQUIRE) : 0;
    int all = 0;

    for (uint32_t i = 0; i < active; i++) {
        struct member *member = &context->members[context->active[i]];
        struct prs_peer *peers[2] = {member->made, __atomic_load_n(&member->accepted, __ATOMIC_ACQUIRE)};

        for (int side = 0; side < 2; side++) {
            int r = peers[side] ? prs_peer_settle(peers[side]) : 0;

            if (r < 0)
                return fail_rank(team, context_id, context->active[i], r);
            all = r ? r : all; /* ask all peers, so that they answer at the same time */
        }
    }
    return all;
}

bool prs_team_is_raising(struct prs_team *team, uint32_t context_id)
{
    struct team_context *context = find_context(team, context_id);
    uint32_t active = context ? __atomic_load_n(&context->active_count, __ATOMIC_ACQUIRE) : 0;

    for (uint32_t i = 0; i < active; i++) {
        const struct member *member = &context->members[context->active[i]];
        const struct prs_peer *accepted = __atomic_load_n(&member->accepted, __ATOMIC_ACQUIRE);

        if ((member->made && prs_records_busy(member->made)) || (accepted && prs_records_busy(accepted)))
            return true;
    }
    return false;
}

/* Of a pair, the lower rank connects. A rank connects to itself too. */
static bool we_connect(const struct prs_team *team, uint32_t rank)
{
    return team->options.rank <= rank;
}

/* Connect to these ranks, or wait until they have connected. */
static int connect_ranks(struct prs_team *team, uint32_t context_id, const uint32_t *ranks, uint32_t count)
{
    uint64_t deadline_ms = prs_clock_ms() + team->options.timeout_ms;
    uint32_t have = 0, missing = 0;
    struct prs_peer *peer;
    int r;

    while (have < count) {
        struct team_context *context = find_context(team, context_id);

        if (context)
            context->rounds = 0; /* accept in each round: this is what we wait for */
        r = prs_team_progress(team, context_id);
        if (r < 0)
            return r;
        have = 0;
        context = find_context(team, context_id);
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
        if (have < count && prs_clock_ms() > deadline_ms) {
            r = prs_fail(-ETIMEDOUT,
                         "rank %u: %u of %u peers of context %u did not connect within %u ms, rank %u among them",
                         team->options.rank, count - have, count, context_id, team->options.timeout_ms, missing);
            keep_text(team, prs_error_text());
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

PRS_READS_COUNTERS void prs_team_stats(struct prs_team *team, uint32_t context_id, struct prs_stats *out)
{
    struct team_context *context = find_context(team, context_id);

    memset(out, 0, sizeof(*out));
    for (uint32_t rank = 0; context && rank < team->options.world; rank++) {
        const struct member *member = &context->members[rank];
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
