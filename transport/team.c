/* SPDX-License-Identifier: Apache-2.0 */
#include <perseus/team.h>

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "transport/fabric.h"
#include "transport/policy.h"
#include "transport/records.h"
#include "transport/util/clock.h"
#include "transport/util/error.h"
#include "transport/util/log.h"

enum {
    DEFAULT_TIMEOUT_MS = 30000,
    ACCEPT_EVERY = 64,        /* rounds between looks at the listener: a look is a system call, connecting is rare */
    HELLO_MAGIC = 0x4d544550, /* "PETM" */
};

/* What one side says when connecting: which rank, in which context. */
struct hello {
    uint32_t magic, rank, size, context;
    uint8_t card[PRS_TEAM_CARD_BYTES];
};
static_assert(sizeof(struct hello) <= PRS_PRIVATE_DATA_BYTES, "travels as private data");

/* One rank in one context. */
struct link {
    struct prs_peer *made;            /* we connected */
    struct prs_peer *accepted;        /* the other side connected */
    struct prs_connector *connecting; /* not yet made */
    struct prs_peer *chosen;          /* the one our transfers use: never changes once set */
};

struct context {
    uint64_t key;       /* atomic: its number plus 1, from when the rest is whole; 0: free */
    struct link *links; /* [size] */
    uint32_t *active;   /* ranks with a peer or a connector, in no order */
    uint32_t active_count;
    unsigned rounds;
};

struct prs_team {
    struct prs_team_options options;
    struct prs_rail_set rails;
    struct prs_handle *handles;
    char policy[24];
    uint8_t card[PRS_TEAM_CARD_BYTES];
    /* Guards the listener, every link's making, and which context is where. Transfers on chosen peers need no lock: one
     * thread at a time per context. */
    pthread_mutex_t lock;
    struct context contexts[PRS_TEAM_CONTEXTS]; /* a number's is at that modulo the size, or the next that was free */
    pthread_mutex_t text_lock; /* contexts of several threads may fail at once: the first one's text stays */
    char text[512];
};

uint32_t prs_team_rank(const struct prs_team *team)
{
    return team->options.rank;
}

uint32_t prs_team_size(const struct prs_team *team)
{
    return team->options.size;
}

const char *prs_team_error(const struct prs_team *team)
{
    return team->text;
}

/* The team's error is its first one's text. */
static void keep_text(struct prs_team *team, const char *text)
{
    pthread_mutex_lock(&team->text_lock);
    if (!team->text[0])
        snprintf(team->text, sizeof(team->text), "%s", text);
    pthread_mutex_unlock(&team->text_lock);
}

/* Say with whom it failed; the peer or connector has logged why. */
static int fail_rank(struct prs_team *team, uint32_t context, uint32_t rank, int error)
{
    char text[sizeof(team->text)];

    snprintf(text, sizeof(text), "rank %u to rank %u, context %u: %s", team->options.rank, rank, context,
             prs_error_text());
    keep_text(team, text);
    return prs_error_repeat(error, text);
}

/* ---- life ---- */

int prs_team_open(const struct prs_team_options *options, struct prs_team **out)
{
    struct prs_team *team;

    if (options->card_bytes > PRS_TEAM_CARD_BYTES)
        return prs_fail(-EINVAL, "team: a card of %u bytes, at most %d are possible", options->card_bytes,
                        PRS_TEAM_CARD_BYTES);
    if (options->size == 0 || options->rank >= options->size || !options->listener || !options->handles)
        return prs_fail(-EINVAL, "team: rank %u of %u, or no listener or handles", options->rank, options->size);
    team = calloc(1, sizeof(*team));
    if (!team)
        return prs_fail(-ENOMEM, "team: no memory");
    team->handles = calloc(options->size, sizeof(*team->handles));
    if (!team->handles) {
        free(team);
        return prs_fail(-ENOMEM, "team: no memory for %u handles", options->size);
    }
    memcpy(team->handles, options->handles, options->size * sizeof(*team->handles));
    team->options = *options;
    team->rails = *options->rails;
    team->options.rails = &team->rails;
    if (options->card_bytes)
        memcpy(team->card, options->card, options->card_bytes);
    if (options->policy) {
        snprintf(team->policy, sizeof(team->policy), "%s", options->policy);
        team->options.policy = team->policy;
    }
    if (team->options.timeout_ms == 0)
        team->options.timeout_ms = DEFAULT_TIMEOUT_MS;
    pthread_mutex_init(&team->lock, NULL);
    pthread_mutex_init(&team->text_lock, NULL);
    *out = team;
    return 0;
}

bool prs_team_drains(const struct prs_team *team)
{
    enum prs_policy policy;

    return prs_policy_parse(team->options.policy, (enum prs_policy)team->options.fabric->config.policy, &policy) == 0 &&
           policy == PRS_POLICY_DRAIN;
}

/* Of that key, from where its number has its place. Without the lock as well: it is gone only when nobody uses it. */
static struct context *find_key(struct prs_team *team, uint32_t number, uint64_t key)
{
    for (uint32_t i = 0; i < PRS_TEAM_CONTEXTS; i++) {
        struct context *context = &team->contexts[(number + i) % PRS_TEAM_CONTEXTS];

        /* Pairs with the release in make_context_locked(): it is seen whole. */
        if (__atomic_load_n(&context->key, __ATOMIC_ACQUIRE) == key)
            return context;
    }
    return NULL;
}

static struct context *find_context(struct prs_team *team, uint32_t number)
{
    return find_key(team, number, number + 1ull);
}

static void close_context(struct prs_team *team, struct context *context)
{
    for (uint32_t rank = 0; rank < team->options.size; rank++) {
        struct link *link = &context->links[rank];

        prs_connector_close(link->connecting);
        prs_peer_close(link->made);
        prs_peer_close(link->accepted);
    }
    free(context->active);
    free(context->links);
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

/* Found, or made. NULL, told, when there are too many or there is no memory. */
static struct context *make_context_locked(struct prs_team *team, uint32_t number)
{
    struct context *context = find_context(team, number);

    if (context)
        return context;
    context = find_key(team, number, 0);
    if (!context) {
        prs_fail(-ENOSPC, "team: context %u would be one more than %d at a time", number, PRS_TEAM_CONTEXTS);
        return NULL;
    }
    context->links = calloc(team->options.size, sizeof(*context->links));
    context->active = calloc(team->options.size, sizeof(*context->active));
    if (!context->links || !context->active) {
        prs_fail(-ENOMEM, "team: no memory for context %u", number);
        free(context->links);
        free(context->active);
        return NULL;
    }
    context->active_count = 0;
    context->rounds = 0;
    /* Pairs with the acquire in find_key(). */
    __atomic_store_n(&context->key, number + 1ull, __ATOMIC_RELEASE);
    return context;
}

static void activate_locked(struct context *context, uint32_t rank)
{
    for (uint32_t i = 0; i < context->active_count; i++)
        if (context->active[i] == rank)
            return;
    context->active[context->active_count] = rank;
    /* Pairs with the acquire in prs_team_progress(), which runs beside other contexts' accepts. */
    __atomic_store_n(&context->active_count, context->active_count + 1, __ATOMIC_RELEASE);
}

/* ---- connecting ---- */

static void peer_options(const struct prs_team *team, uint32_t context, struct hello *hello,
                         struct prs_peer_options *out)
{
    *hello = (struct hello){HELLO_MAGIC, team->options.rank, team->options.size, context, {0}};
    memcpy(hello->card, team->card, sizeof(hello->card));
    memset(out, 0, sizeof(*out));
    out->private_data = hello;
    out->private_bytes = sizeof(*hello);
    out->window_ops = team->options.window_ops;
    out->queues_per_rail = team->options.queues_per_rail;
    out->traffic_class = team->options.traffic_class;
    out->policy = team->options.policy;
    out->adds_alone = team->options.adds_alone;
    out->timeout_ms = team->options.timeout_ms > team->options.fabric->config.timeout_ms ? team->options.timeout_ms : 0;
}

/* A peer came in: whose is it? It is from the wire, so check it. */
static int file_accepted_locked(struct prs_team *team, struct prs_peer *peer)
{
    struct context *context;
    struct hello hello;
    uint32_t bytes = 0;
    const void *data = prs_peer_private(peer, &bytes);

    if (bytes != sizeof(hello)) {
        PRS_WARN("team rank %u: a peer with %u bytes of private data came, want %zu: not of this team, closed",
                 team->options.rank, bytes, sizeof(hello));
        goto close;
    }
    memcpy(&hello, data, sizeof(hello));
    if (hello.magic != HELLO_MAGIC || hello.rank >= team->options.size || hello.size != team->options.size) {
        PRS_WARN("team rank %u of %u: a peer says magic %#x, rank %u of %u, context %u: not of this team, closed",
                 team->options.rank, team->options.size, hello.magic, hello.rank, hello.size, hello.context);
        goto close;
    }
    context = make_context_locked(team, hello.context);
    if (!context) {
        prs_peer_close(peer);
        return -ENOMEM;
    }
    if (context->links[hello.rank].accepted) {
        PRS_WARN("team rank %u: rank %u connected a second time in context %u: closed", team->options.rank, hello.rank,
                 hello.context);
        goto close;
    }
    __atomic_store_n(&context->links[hello.rank].accepted, peer, __ATOMIC_RELEASE);
    activate_locked(context, hello.rank);
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

static int start_connecting_locked(struct prs_team *team, struct context *context, uint32_t index, uint32_t rank)
{
    struct link *link = &context->links[rank];
    struct prs_peer_options options;
    struct hello hello;
    int r;

    peer_options(team, index, &hello, &options);
    r = prs_connect(team->options.fabric, &team->rails, &team->handles[rank], &options, &link->connecting);
    if (r < 0)
        return fail_rank(team, index, rank, r);
    activate_locked(context, rank);
    return 0;
}

static int step_connector_locked(struct prs_team *team, uint32_t index, uint32_t rank, struct link *link)
{
    struct prs_connector *connector = link->connecting;
    int r = prs_connector_step(connector, &link->made);

    if (r == PRS_AGAIN)
        return 0;
    link->connecting = NULL; /* freed by the step, whether it succeeded or failed */
    if (r < 0)
        return fail_rank(team, index, rank, r);
    link->chosen = link->made;
    return 1;
}

int prs_team_peer(struct prs_team *team, uint32_t index, uint32_t rank, struct prs_peer **out)
{
    struct context *context;
    struct link *link;
    int r = 0;

    if (rank >= team->options.size)
        return prs_fail(-EINVAL, "team of %u: no rank %u (context %u)", team->options.size, rank, index);
    context = find_context(team, index);
    if (context && context->links[rank].chosen) {
        *out = context->links[rank].chosen;
        return 0;
    }
    pthread_mutex_lock(&team->lock);
    context = make_context_locked(team, index);
    if (!context) {
        r = -ENOMEM;
        goto unlock;
    }
    link = &context->links[rank];
    if (!link->chosen && !link->connecting) {
        if (link->accepted)
            link->chosen = link->accepted; /* one connection serves both ways */
        else
            r = start_connecting_locked(team, context, index, rank);
    }
    *out = link->chosen;
    if (r == 0 && !link->chosen)
        r = PRS_AGAIN;
unlock:
    pthread_mutex_unlock(&team->lock);
    return r;
}

const void *prs_team_card(struct prs_team *team, uint32_t index, uint32_t rank)
{
    struct context *context = rank < team->options.size ? find_context(team, index) : NULL;
    const struct prs_peer *peer;
    uint32_t bytes;

    if (!context)
        return NULL;
    peer = context->links[rank].made;
    if (!peer)
        peer = __atomic_load_n(&context->links[rank].accepted, __ATOMIC_ACQUIRE);
    if (!peer)
        return NULL;
    const struct hello *hello = prs_peer_private(peer, &bytes);

    return bytes == sizeof(*hello) ? hello->card : NULL;
}

void prs_team_drop(struct prs_team *team, uint32_t index)
{
    struct context *context, gone;

    pthread_mutex_lock(&team->lock);
    context = find_context(team, index);
    if (context) {
        gone = *context; /* its place may be taken as soon as the lock is free */
        __atomic_store_n(&context->key, 0, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&team->lock);
    if (context)
        close_context(team, &gone);
}

/* ---- progress ---- */

static int progress_link(struct prs_team *team, uint32_t index, uint32_t rank, struct link *link)
{
    struct prs_peer *accepted = __atomic_load_n(&link->accepted, __ATOMIC_ACQUIRE);
    int did = 0;
    int r;

    if (link->connecting) {
        pthread_mutex_lock(&team->lock);
        r = step_connector_locked(team, index, rank, link);
        pthread_mutex_unlock(&team->lock);
        if (r < 0)
            return r;
        did += r;
    }
    if (link->made) {
        r = prs_peer_progress(link->made);
        if (r < 0)
            return fail_rank(team, index, rank, r);
        did += r;
    }
    if (accepted) {
        r = prs_peer_progress(accepted);
        if (r < 0)
            return fail_rank(team, index, rank, r);
        did += r;
    }
    return did;
}

int prs_team_progress(struct prs_team *team, uint32_t index)
{
    struct context *context = find_context(team, index);
    uint32_t active = 0;
    int did = 0;
    int r = 0;

    if (!context || context->rounds++ % ACCEPT_EVERY == 0) {
        /* Another thread that holds the lock accepts for us. */
        if (pthread_mutex_trylock(&team->lock) == 0) {
            r = accept_locked(team);
            if (!context)
                context = make_context_locked(team, index);
            pthread_mutex_unlock(&team->lock);
        }
        if (r < 0)
            return r;
    }
    if (context)
        active = __atomic_load_n(&context->active_count, __ATOMIC_ACQUIRE);
    for (uint32_t i = 0; i < active; i++) {
        uint32_t rank = context->active[i];

        r = progress_link(team, index, rank, &context->links[rank]);
        if (r < 0)
            return r;
        did += r;
    }
    return did;
}

int prs_team_settle(struct prs_team *team, uint32_t index)
{
    struct context *context = find_context(team, index);
    uint32_t active = context ? __atomic_load_n(&context->active_count, __ATOMIC_ACQUIRE) : 0;
    int all = 0;

    for (uint32_t i = 0; i < active; i++) {
        struct link *link = &context->links[context->active[i]];
        struct prs_peer *peers[2] = {link->made, __atomic_load_n(&link->accepted, __ATOMIC_ACQUIRE)};

        for (int side = 0; side < 2; side++) {
            int r = peers[side] ? prs_peer_settle(peers[side]) : 0;

            if (r < 0)
                return fail_rank(team, index, context->active[i], r);
            all = r ? r : all; /* ask them all: they answer side by side */
        }
    }
    return all;
}

bool prs_team_raises(struct prs_team *team, uint32_t index)
{
    struct context *context = find_context(team, index);
    uint32_t active = context ? __atomic_load_n(&context->active_count, __ATOMIC_ACQUIRE) : 0;

    for (uint32_t i = 0; i < active; i++) {
        const struct link *link = &context->links[context->active[i]];
        const struct prs_peer *accepted = __atomic_load_n(&link->accepted, __ATOMIC_ACQUIRE);

        if ((link->made && prs_records_busy(link->made)) || (accepted && prs_records_busy(accepted)))
            return true;
    }
    return false;
}

/* Is rank the one of the pair that connects? The lower one; oneself too. */
static bool we_connect(const struct prs_team *team, uint32_t rank)
{
    return team->options.rank <= rank;
}

/* Have a peer to each of the ranks; wait for those who connect to us. */
static int connect_ranks(struct prs_team *team, uint32_t index, const uint32_t *ranks, uint32_t count)
{
    uint64_t give_up = prs_clock_ms() + team->options.timeout_ms;
    uint32_t have = 0, missing = 0;
    struct prs_peer *peer;
    int r;

    while (have < count) {
        struct context *context = find_context(team, index);

        if (context)
            context->rounds = 0; /* accept each time: here it is what we wait for */
        r = prs_team_progress(team, index);
        if (r < 0)
            return r;
        have = 0;
        context = find_context(team, index);
        for (uint32_t i = 0; i < count; i++) {
            if (!we_connect(team, ranks[i]) &&
                (!context || !__atomic_load_n(&context->links[ranks[i]].accepted, __ATOMIC_ACQUIRE)))
                r = PRS_AGAIN;
            else
                r = prs_team_peer(team, index, ranks[i], &peer);
            if (r < 0)
                return r;
            if (!r)
                have++;
            else
                missing = ranks[i];
        }
        if (have < count && prs_clock_ms() > give_up) {
            r = prs_fail(-ETIMEDOUT,
                         "rank %u: %u of %u peers of context %u did not connect within %u ms, rank %u among them",
                         team->options.rank, count - have, count, index, team->options.timeout_ms, missing);
            keep_text(team, prs_error_text());
            return r;
        }
        if (have < count)
            nanosleep(&(struct timespec){0, 200000}, NULL);
    }
    return 0;
}

int prs_team_connect(struct prs_team *team, uint32_t context)
{
    uint32_t size = team->options.size, count = 0;
    uint32_t *ranks = calloc(size, sizeof(*ranks));
    int r;

    if (!ranks)
        return prs_fail(-ENOMEM, "team: no memory to connect %u ranks", size);
    for (uint32_t rank = 0; rank < size; rank++)
        if (rank != team->options.rank)
            ranks[count++] = rank;
    r = connect_ranks(team, context, ranks, count);
    free(ranks);
    return r;
}

int prs_team_connect_ring(struct prs_team *team, uint32_t context)
{
    uint32_t size = team->options.size, rank = team->options.rank;
    uint32_t ranks[2] = {(rank + 1) % size, (rank + size - 1) % size};

    if (size == 1)
        return 0;
    return connect_ranks(team, context, ranks, size == 2 ? 1 : 2);
}

void prs_team_stats(struct prs_team *team, uint32_t index, struct prs_stats *out)
{
    struct context *context = find_context(team, index);

    memset(out, 0, sizeof(*out));
    for (uint32_t rank = 0; context && rank < team->options.size; rank++) {
        struct prs_peer *peers[2] = {context->links[rank].made, context->links[rank].accepted};

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
