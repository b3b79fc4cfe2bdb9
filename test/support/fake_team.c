/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "test/support/fake_team.h"
#include "transport/connect/team_loss.h"
#include "transport/order/op.h"
#include "transport/util/error.h"

struct fake_op {
    struct prs_op *op;
    uint64_t dst;
    const void *src;
    uint64_t bytes; /* put: length; signal: value */
    uint32_t group;
    bool is_signal, add, strong;
};

struct prs_peer {
    struct prs_team *team;
    struct fake_op *ops; /* [window], in order of posting */
    uint32_t count;
    int error;
};

/* Declared as in transport/peer/peer.h. */
int prs_peer_fail(struct prs_peer *peer, int code, const char *format, ...) __attribute__((format(printf, 3, 4), cold));

struct prs_team {
    struct fake_team_options options;
    struct prs_peer *peers;
    uint64_t random;
    uint32_t asks, most;
    uint32_t hold_looks, hold_ms;
    uint32_t tells; /* calls of prs_team_tell_loss() */
    bool told_now;
    int error;  /* atomic */
    int hold;   /* atomic */
    int asleep; /* atomic: in a slow call of progress */
};

const char *prs_error_text(void)
{
    return prs_error_last();
}

struct prs_team *fake_team_open(const struct fake_team_options *options)
{
    struct prs_team *team = calloc(1, sizeof(*team));

    team->options = *options;
    team->random = options->seed * 2654435761u + 1;
    team->peers = calloc(options->size, sizeof(*team->peers));
    for (uint32_t i = 0; i < options->size; i++) {
        team->peers[i].team = team;
        team->peers[i].ops = calloc(options->window, sizeof(struct fake_op));
    }
    return team;
}

/* Write the error to every op that is still pending, as the order engine does. */
static void fail_ops(struct prs_peer *peer, int code)
{
    for (; peer->count > 0; peer->count--)
        prs_op_fail(peer->ops[peer->count - 1].op, code);
}

void fake_team_close(struct prs_team *team)
{
    for (uint32_t i = 0; i < team->options.size; i++) {
        fail_ops(&team->peers[i], -ECANCELED);
        free(team->peers[i].ops);
    }
    free(team->peers);
    free(team);
}

void fake_team_kill(struct prs_team *team, int error)
{
    __atomic_store_n(&team->error, error, __ATOMIC_RELEASE);
}

void fake_team_hold(struct prs_team *team, bool hold)
{
    __atomic_store_n(&team->hold, hold, __ATOMIC_RELEASE);
}

void fake_team_hold_for(struct prs_team *team, uint32_t looks, uint32_t ms)
{
    team->hold_looks = looks;
    team->hold_ms = ms;
}

bool fake_team_is_asleep(const struct prs_team *team)
{
    return __atomic_load_n(&team->asleep, __ATOMIC_RELAXED);
}

/* Must this call of progress complete nothing? */
static bool held(struct prs_team *team)
{
    if (!__atomic_load_n(&team->hold, __ATOMIC_ACQUIRE))
        return false;
    if (!team->hold_looks)
        return true;
    __atomic_store_n(&team->asleep, team->hold_ms != 0, __ATOMIC_RELAXED);
    if (team->hold_ms)
        nanosleep(&(struct timespec){team->hold_ms / 1000, team->hold_ms % 1000 * 1000000l}, NULL);
    if (--team->hold_looks == 0)
        __atomic_store_n(&team->hold, 0, __ATOMIC_RELAXED);
    return true;
}

uint32_t fake_team_most_in_flight(const struct prs_team *team)
{
    return team->most;
}

uint32_t fake_team_in_flight(const struct prs_team *team)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < team->options.size; i++)
        count += team->peers[i].count;
    return count;
}

int fake_team_peer_error(const struct prs_team *team, uint32_t rank)
{
    return team->peers[rank].error;
}

static uint32_t draw(struct prs_team *team, uint32_t below)
{
    team->random = team->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(team->random >> 33) % below;
}

uint32_t prs_team_rank(const struct prs_team *team)
{
    return 0;
}

uint32_t prs_team_world(const struct prs_team *team)
{
    return team->options.size;
}

bool prs_team_drains(const struct prs_team *team)
{
    return team->options.drain;
}

int prs_team_peer(struct prs_team *team, uint32_t context, uint32_t rank, struct prs_peer **out)
{
    if (team->asks < team->options.connect_asks) {
        team->asks++;
        return PRS_AGAIN;
    }
    *out = &team->peers[rank];
    return 0;
}

int prs_peer_fail(struct prs_peer *peer, int code, const char *format, ...)
{
    if (peer->error == 0) {
        peer->error = code;
        fail_ops(peer, code);
    }
    return peer->error;
}

static int post(struct prs_peer *peer, struct prs_op *op, const struct fake_op *fake)
{
    if (peer->error != 0)
        return peer->error;
    if (peer->count == peer->team->options.window)
        return PRS_BUSY;
    op->status = PRS_OP_PENDING;
    peer->ops[peer->count] = *fake;
    peer->ops[peer->count++].op = op;
    if (peer->count > peer->team->most)
        peer->team->most = peer->count;
    return 0;
}

int prs_peer_put(struct prs_peer *peer, struct prs_op *op, const struct prs_put *put)
{
    struct fake_op fake = {.dst = put->dst_addr, .src = put->src_addr, .bytes = put->len_bytes, .group = put->group};

    return post(peer, op, &fake);
}

int prs_peer_signal(struct prs_peer *peer, struct prs_op *op, const struct prs_signal *signal)
{
    struct fake_op fake = {.dst = signal->dst_addr,
                           .bytes = signal->value,
                           .group = signal->group,
                           .is_signal = true,
                           .add = signal->kind == PRS_SIGNAL_ADD,
                           .strong = signal->flags & PRS_SIGNAL_STRONG};

    return post(peer, op, &fake);
}

static bool may_run(const struct prs_peer *peer, uint32_t index)
{
    const struct fake_op *fake = &peer->ops[index];

    if (!fake->is_signal || peer->team->options.ignore_groups)
        return true;
    for (uint32_t i = 0; i < index; i++)
        if (fake->strong || (!peer->ops[i].is_signal && peer->ops[i].group == fake->group))
            return false;
    return true;
}

static void run_op(struct prs_peer *peer, uint32_t index)
{
    struct fake_op fake = peer->ops[index];
    uint64_t *word = (uint64_t *)(uintptr_t)fake.dst;

    if (!fake.is_signal)
        memcpy(word, fake.src, fake.bytes);
    else if (fake.add)
        __atomic_fetch_add(word, fake.bytes, __ATOMIC_RELEASE);
    else
        __atomic_store_n(word, fake.bytes, __ATOMIC_RELEASE);
    fake.op->status = 0;
    memmove(&peer->ops[index], &peer->ops[index + 1], (peer->count - index - 1) * sizeof(fake));
    peer->count--;
}

/* Run the signals of one peer at once, before any put, as a NIC that ignores groups may do. */
static int run_signals_first(struct prs_peer *peer)
{
    int did = 0;

    for (uint32_t i = 0; i < peer->count;) {
        if (!peer->ops[i].is_signal) {
            i++;
            continue;
        }
        run_op(peer, i);
        did++;
    }
    return did;
}

int prs_team_settle(struct prs_team *team, uint32_t context)
{
    int error = __atomic_load_n(&team->error, __ATOMIC_ACQUIRE);

    (void)context;
    if (error)
        return prs_fail(error, "rank 0 to rank 1: the peer is dead");
    return fake_team_in_flight(team) ? PRS_AGAIN : 0; /* a signal that is done has been raised */
}

int prs_team_tell_loss(struct prs_team *team, uint32_t context_id, bool now)
{
    (void)context_id;
    team->tells++;
    team->told_now |= now;
    return now || team->tells > team->options.tells ? 0 : PRS_AGAIN;
}

uint32_t fake_team_tells(const struct prs_team *team, bool *now)
{
    *now = team->told_now;
    return team->tells;
}

int prs_team_progress(struct prs_team *team, uint32_t context)
{
    int error = __atomic_load_n(&team->error, __ATOMIC_ACQUIRE);
    int did = 0;

    if (error)
        return prs_fail(error, "rank 0 to rank 1: the peer is dead");
    if (held(team))
        return 0;
    for (uint32_t p = 0; p < team->options.size; p++) {
        struct prs_peer *peer = &team->peers[p];
        uint32_t tries = draw(team, 4);

        if (team->options.ignore_groups)
            did += run_signals_first(peer);
        while (tries-- > 0 && peer->count > 0) {
            uint32_t index = draw(team, peer->count);

            if (team->options.ignore_groups && draw(team, 512) != 0)
                continue;
            if (!may_run(peer, index))
                continue;
            run_op(peer, index);
            did++;
        }
    }
    return did;
}
