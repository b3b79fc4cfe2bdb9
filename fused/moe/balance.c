/* SPDX-License-Identifier: Apache-2.0 */
/* Which expert gets how many replicas, and on which ranks they lie: prs_moe_balance() in moe.h. On the host, without a
 * GPU.
 *
 * Replicas: the next place goes to the expert with the largest load per replica. That is the divisor method of Adams,
 * which makes the largest load per replica as small as possible (M. Balinski, H. P. Young: Fair Representation, 1982).
 *
 * Packing: replicas, heaviest first, each to the rank with the least load so far that has room and does not hold the
 * expert (longest processing time first; R. L. Graham: Bounds on Multiprocessing Timing Anomalies, SIAM Journal on
 * Applied Mathematics 17, 1969). */
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

#include "transport/util/error.h"
#include <perseus/moe.h>

enum { MOST_EXPERTS = 1024, MOST_RANKS = 64, NO_RANK = MOST_RANKS };

struct heavy {
    double share; /* load of one replica */
    uint32_t expert;
};

struct packing {
    uint32_t world, room;         /* places of a rank */
    uint32_t count[MOST_EXPERTS]; /* replicas of each expert */
    struct heavy order[MOST_EXPERTS];
    int32_t held[MOST_EXPERTS]; /* [place]: an expert, or -1 */
    uint32_t used[MOST_RANKS];
    double load[MOST_RANKS];
};

static int check(const struct prs_moe_loads *b)
{
    uint32_t present = 0;
    int r = prs_check_reserved(b, "struct prs_moe_loads");
    if (r)
        return r;
    if (b->world == 0 || b->world > MOST_RANKS || b->experts == 0 || b->experts > MOST_EXPERTS ||
        b->experts % b->world != 0)
        return prs_fail(-EINVAL, "fused: balance: %u places on %u ranks: at most %d and %d, and as many on each rank",
                        b->experts, b->world, MOST_EXPERTS, MOST_RANKS);
    if (b->logical_experts == 0 || b->logical_experts > MOST_EXPERTS || b->replicas == 0 || b->replicas > MOST_RANKS)
        return prs_fail(-EINVAL,
                        "fused: balance: %u experts, at most %u replicas of each: at least 1, at most %d and %d",
                        b->logical_experts, b->replicas, MOST_EXPERTS, MOST_RANKS);
    if (!b->loads || !b->placement)
        return prs_fail(-EINVAL, "fused: balance: loads %p, placement %p: not NULL", (const void *)b->loads,
                        (void *)b->placement);
    for (uint32_t e = 0; e < b->logical_experts; e++) {
        if (!isfinite(b->loads[e]))
            return prs_fail(-EINVAL, "fused: balance: the load of expert %u is %g: it must be finite", e, b->loads[e]);
        present += b->loads[e] >= 0;
    }
    if (present > b->experts)
        return prs_fail(-EINVAL, "fused: balance: %u experts in %u places: give absent ones a negative load", present,
                        b->experts);
    return 0;
}

/* Each present expert gets one replica, and those with load the places that are left. */
/* MUTANT(model balance) no more replicas than entries: s/b->replicas < b->world/false/ */
/* MUTANT(model balance) no more replicas than ranks: s/b->replicas < b->world/true/ */
static void share_out(struct packing *p, const struct prs_moe_loads *b)
{
    uint32_t left = b->experts, most = b->replicas < b->world ? b->replicas : b->world, hot = 0;
    for (uint32_t e = 0; e < b->logical_experts; e++)
        left -= p->count[e] = b->loads[e] >= 0;
    while (left > 0 && hot < b->logical_experts) {
        hot = b->logical_experts;
        for (uint32_t e = 0; e < b->logical_experts; e++) {
            bool more = p->count[e] != 0 && p->count[e] < most && b->loads[e] > 0;
            /* MUTANT(model balance) the heaviest replica is relieved: s#b->loads[e] / p->count[e] >#b->loads[e] ># */
            if (more && (hot == b->logical_experts || b->loads[e] / p->count[e] > b->loads[hot] / p->count[hot]))
                hot = e;
        }
        if (hot < b->logical_experts)
            p->count[hot]++, left--;
    }
}

static int compare(const void *left, const void *right)
{
    const struct heavy *a = left, *b = right;
    if (a->share != b->share)
        return a->share < b->share ? 1 : -1;
    return a->expert < b->expert ? -1 : 1;
}

static bool holds(const struct packing *p, uint32_t rank, uint32_t expert)
{
    for (uint32_t i = rank * p->room; i < rank * p->room + p->used[rank]; i++)
        if (p->held[i] == (int32_t)expert)
            return true;
    return false;
}

/* The rank with the least load that has room, and (without != NULL) does not hold that expert; or NO_RANK. */
static uint32_t lightest(const struct packing *p, const uint32_t *without)
{
    uint32_t best = NO_RANK;
    for (uint32_t r = 0; r < p->world; r++)
        if (p->used[r] < p->room && (!without || !holds(p, r, *without)) &&
            (best == NO_RANK || p->load[r] < p->load[best]))
            best = r;
    return best;
}

static void put(struct packing *p, uint32_t rank, uint32_t expert, double share)
{
    p->held[rank * p->room + p->used[rank]++] = (int32_t)expert;
    p->load[rank] += share;
}

static double share_of(const struct packing *p, const struct prs_moe_loads *b, int32_t expert)
{
    return b->loads[expert] / p->count[expert];
}

/* All ranks with room hold the expert. Another replica moves to one of them, from a full rank that does not hold the
 * expert: the replica nearest in weight. Such a replica exists, because the full rank holds more experts than the rank
 * with room, and does not hold this one. */
static void exchange(struct packing *p, const struct prs_moe_loads *b, const struct heavy *x)
{
    uint32_t to = lightest(p, NULL), best = 0, from;
    bool found = false;
    double share;
    for (uint32_t i = 0; i < p->world * p->room; i++) {
        from = i / p->room;
        if (p->used[from] < p->room || holds(p, from, x->expert) || holds(p, to, (uint32_t)p->held[i]))
            continue;
        if (!found || fabs(share_of(p, b, p->held[i]) - x->share) < fabs(share_of(p, b, p->held[best]) - x->share))
            best = i;
        found = true;
    }
    share = share_of(p, b, p->held[best]);
    put(p, to, (uint32_t)p->held[best], share);
    p->held[best] = (int32_t)x->expert;
    p->load[best / p->room] += x->share - share;
}

static void deal(struct packing *p, const struct prs_moe_loads *b)
{
    uint32_t experts = 0;
    for (uint32_t e = 0; e < b->logical_experts; e++)
        if (p->count[e] != 0)
            p->order[experts++] = (struct heavy){share_of(p, b, (int32_t)e), e};
    /* MUTANT(model balance) the heaviest comes first: delete */
    qsort(p->order, experts, sizeof(*p->order), compare);
    for (uint32_t i = 0; i < experts; i++)
        for (uint32_t n = 0; n < p->count[p->order[i].expert]; n++) {
            /* MUTANT(model balance) replicas of one expert lie on different ranks: s/&p->order[i].expert/NULL/ */
            uint32_t rank = lightest(p, &p->order[i].expert);
            if (rank == NO_RANK)
                exchange(p, b, &p->order[i]);
            else
                put(p, rank, p->order[i].expert, p->order[i].share);
        }
}

static void write_results(const struct packing *p, const struct prs_moe_loads *b)
{
    uint32_t entries[MOST_EXPERTS] = {0};
    for (uint32_t i = 0; i < b->logical_experts * b->replicas; i++)
        b->placement[i] = -1;
    for (uint32_t i = 0; i < b->experts; i++) {
        int32_t e = p->held[i];
        if (e >= 0)
            b->placement[(uint32_t)e * b->replicas + entries[e]++] = (int32_t)i;
        if (b->held)
            b->held[i] = e;
    }
    for (uint32_t r = 0; r < b->world && b->rank_loads; r++)
        b->rank_loads[r] = p->load[r];
}

int prs_moe_balance(const struct prs_moe_loads *b)
{
    struct packing *p;
    int r = check(b);
    if (r)
        return r;
    p = calloc(1, sizeof(*p));
    if (!p)
        return prs_fail(-ENOMEM, "fused: balance: no memory");
    p->world = b->world, p->room = b->experts / b->world;
    for (uint32_t i = 0; i < b->experts; i++)
        p->held[i] = -1;
    share_out(p, b);
    deal(p, b);
    write_results(p, b);
    free(p);
    return 0;
}
