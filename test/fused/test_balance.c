/* SPDX-License-Identifier: Apache-2.0 */
/* Maps of experts to places: what prs_moe_balance() makes, and how evenly they spread the rows over the ranks. */
#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fused/moe/route.h"
#include "transport/util/error.h"

enum { MOST_EXPERTS = 256, MOST_PLACES = 512, MOST_RANKS = 64, MOST_REPLICAS = 8 };

struct map {
    struct prs_moe_loads b;
    double loads[MOST_EXPERTS], rank_loads[MOST_RANKS];
    int32_t placement[MOST_EXPERTS * MOST_REPLICAS], held[MOST_PLACES];
};

static void init_map(struct map *m, uint32_t world, uint32_t places, uint32_t experts, uint32_t replicas)
{
    memset(m, 0xee, sizeof(*m));
    m->b = (struct prs_moe_loads){.world = world,
                                  .experts = places,
                                  .logical_experts = experts,
                                  .replicas = replicas,
                                  .loads = m->loads,
                                  .placement = m->placement,
                                  .held = m->held,
                                  .rank_loads = m->rank_loads};
    for (uint32_t e = 0; e < experts; e++)
        m->loads[e] = 1;
}

static uint32_t replicas_of(const struct map *m, uint32_t expert)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < m->b.replicas; i++)
        count += m->placement[expert * m->b.replicas + i] >= 0;
    return count;
}

/* Each present expert has a place, no place has two, and no rank has an expert twice. */
static void assert_whole(const struct map *m)
{
    const struct prs_moe_loads *b = &m->b;
    uint32_t room = b->experts / b->world, seen[MOST_PLACES] = {0};
    double loads[MOST_RANKS] = {0};
    for (uint32_t e = 0; e < b->logical_experts; e++) {
        uint32_t count = replicas_of(m, e);
        uint64_t ranks = 0;
        cr_assert_eq(count == 0, m->loads[e] < 0, "expert %u has %u places", e, count);
        for (uint32_t i = 0; i < count; i++) {
            uint32_t place = (uint32_t)m->placement[e * b->replicas + i];
            cr_assert(place < b->experts && seen[place]++ == 0, "expert %u, place %u", e, place);
            cr_assert_eq(m->held[place], (int32_t)e);
            cr_assert((ranks >> place / room & 1) == 0, "expert %u is twice on rank %u", e, place / room);
            ranks |= 1ull << place / room;
            loads[place / room] += m->loads[e] / count;
        }
    }
    for (uint32_t i = 0; i < b->experts; i++) {
        cr_assert_eq(seen[i] == 0, m->held[i] == -1, "place %u holds %d", i, m->held[i]);
    }
    for (uint32_t r = 0; r < b->world; r++)
        cr_assert(fabs(loads[r] - m->rank_loads[r]) <= 1e-9 * (1 + loads[r]));
}

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

Test(balance, every_expert_has_a_place_and_replicas_lie_on_different_ranks)
{
    static struct map m;
    uint32_t random = 3;
    for (int round = 0; round < 2000; round++) {
        uint32_t world = 1 + next_random(&random) % 8, room = 1 + next_random(&random) % 12, places = world * room;
        uint32_t experts = 1 + next_random(&random) % places;
        init_map(&m, world, places, experts, 1 + next_random(&random) % MOST_REPLICAS);
        for (uint32_t e = 0; e < experts; e++)
            m.loads[e] = round % 5 == 0 && e % 3 == 1 ? -1 : pow(next_random(&random) % 1000 * 1e-3, round % 7);
        cr_assert_eq(prs_moe_balance(&m.b), 0, "%s", prs_error_last());
        assert_whole(&m);
    }
}

/* Loads of 6, 3 and 1 in 6 places: 2, 2, 2 - 3 - 1 would leave one of 3; so 6 gets three, 3 gets two. */
Test(balance, the_next_place_goes_to_the_heaviest_replica)
{
    static struct map m;
    init_map(&m, 3, 6, 3, 3);
    m.loads[0] = 6, m.loads[1] = 3, m.loads[2] = 1;
    cr_assert_eq(prs_moe_balance(&m.b), 0);
    assert_whole(&m);
    cr_assert(replicas_of(&m, 0) == 3 && replicas_of(&m, 1) == 2 && replicas_of(&m, 2) == 1);
}

/* 7 + 2, 5 + 4, 4 + 4 ... in any other order of dealing a rank gets more. */
Test(balance, heavy_experts_are_dealt_first)
{
    static const double loads[6] = {2, 4, 4, 5, 7, 4};
    static struct map m;
    init_map(&m, 3, 6, 6, 1);
    memcpy(m.loads, loads, sizeof(loads));
    cr_assert_eq(prs_moe_balance(&m.b), 0);
    assert_whole(&m);
    for (uint32_t r = 0; r < 3; r++)
        cr_assert_leq(m.rank_loads[r], 9);
}

Test(balance, bad_input_is_refused_by_name)
{
    static const struct bad {
        uint32_t world, experts, logical, replicas;
        double load;
        const char *text;
    } rows[] = {
        {0, 8, 4, 1, 1, "8 places on 0 ranks"},
        {3, 8, 4, 1, 1, "8 places on 3 ranks"},
        {65, 65, 4, 1, 1, "65 places on 65 ranks"},
        {1, 1025, 4, 1, 1, "1025 places"},
        {2, 8, 0, 1, 1, "0 experts"},
        {2, 8, 4, 0, 1, "at most 0 replicas"},
        {2, 8, 4, 65, 1, "at most 65 replicas"},
        {2, 8, 9, 1, 1, "9 experts in 8 places"},
        {2, 8, 4, 1, NAN, "the load of expert 3 is nan"},
        {2, 8, 4, 1, INFINITY, "the load of expert 3 is inf"},
    };
    static struct map m;
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        init_map(&m, rows[i].world, rows[i].experts, rows[i].logical, rows[i].replicas);
        m.loads[3] = rows[i].load;
        cr_assert_eq(prs_moe_balance(&m.b), -EINVAL);
        cr_assert_not_null(strstr(prs_error_last(), rows[i].text), "%s: %s", rows[i].text, prs_error_last());
    }
    init_map(&m, 2, 8, 4, 1);
    m.b.loads = NULL;
    cr_assert_eq(prs_moe_balance(&m.b), -EINVAL);
}

/* ---- rows that ranks get, by the routing's own choice of places ---- */
enum { EXPERTS = 256, TOP = 8, TOKENS = 2048 };

/* Different experts for each token, drawn by a Zipf law over experts in a random order. */
static void draw(int64_t *chosen, uint32_t count, double exponent, uint32_t seed)
{
    static double upto[EXPERTS];
    uint32_t order[EXPERTS], random = 17;
    for (uint32_t e = 0; e < EXPERTS; e++)
        order[e] = e;
    for (uint32_t e = EXPERTS; e-- > 1;) {
        uint32_t other = next_random(&random) % (e + 1), kept = order[e];
        order[e] = order[other], order[other] = kept;
    }
    for (uint32_t i = 0; i < EXPERTS; i++)
        upto[i] = (i == 0 ? 0 : upto[i - 1]) + pow(i + 1, -exponent);
    for (uint32_t i = 0; i < count * TOP; i++) {
        double x = next_random(&seed) / 16777216.0 * upto[EXPERTS - 1];
        uint32_t at = 0, before = i / TOP * TOP;
        while (at < EXPERTS - 1 && upto[at] <= x)
            at++;
        chosen[i] = order[at];
        while (before < i && chosen[before] != chosen[i])
            before++;
        i -= before < i; /* all different */
    }
}

/* The rows of the busiest rank, divided by an even share. */
static double busiest(uint32_t world, uint32_t places, const struct map *m)
{
    struct prs_route r = {.experts = places, .experts_per_rank = places / world, .choices = TOP, .tokens = TOKENS};
    uint32_t rows[MOST_RANKS] = {0}, most = 0;
    int64_t *chosen = malloc(TOKENS * TOP * sizeof(*chosen));
    for (uint32_t rank = 0; rank < world; rank++) {
        prs_place_init(&r.place, rank, world, 1);
        r.logical = m ? EXPERTS : 0, r.replicas = m ? m->b.replicas : 0;
        draw(chosen, TOKENS, 1.5, 100 + rank);
        for (uint32_t i = 0; i < TOKENS * TOP; i++) {
            int32_t place = prs_route_place(&r, m ? m->placement : NULL, chosen[i], i / TOP);
            cr_assert_geq(place, 0);
            rows[(uint32_t)place / r.experts_per_rank]++;
        }
    }
    for (uint32_t rank = 0; rank < world; rank++)
        most = rows[rank] > most ? rows[rank] : most;
    free(chosen);
    return most / (double)(TOKENS * TOP);
}

/* Makes a map from the loads of another batch. */
static void balance_zipf(struct map *m, uint32_t world, uint32_t extra)
{
    int64_t *seen = malloc(TOKENS * TOP * sizeof(*seen));
    init_map(m, world, EXPERTS + extra, EXPERTS, MOST_REPLICAS);
    draw(seen, TOKENS, 1.5, 7);
    for (uint32_t e = 0; e < EXPERTS; e++)
        m->loads[e] = 0;
    for (uint32_t i = 0; i < TOKENS * TOP; i++)
        m->loads[seen[i]]++;
    cr_assert_eq(prs_moe_balance(&m->b), 0, "%s", prs_error_last());
    assert_whole(m);
    free(seen);
}

struct share {
    uint32_t world;
    double alone, packed, replicated; /* without a map; without replicas; with one extra place per rank */
};

static struct share shares_of(uint32_t world)
{
    static struct map m;
    struct share s = {.world = world, .alone = busiest(world, EXPERTS, NULL)};
    balance_zipf(&m, world, 0);
    s.packed = busiest(world, EXPERTS, &m);
    balance_zipf(&m, world, world);
    s.replicated = busiest(world, EXPERTS + world, &m);
    printf("%2u ranks, busiest over even: no map %.3f, no replicas %.3f, one extra place a rank %.3f\n", world, s.alone,
           s.packed, s.replicated);
    return s;
}

/* One expert gets at most an eighth of all rows (top 8), which on 8 ranks is a rank's even share: so packing alone is
 * enough there. */
Test(balance, on_8_ranks_zipf_1_5_is_within_a_quarter_of_even_with_a_map_and_not_without)
{
    for (uint32_t world = 2; world <= 8; world *= 2) {
        struct share s = shares_of(world);
        cr_assert(s.alone > 1.25 || world == 2, "%u ranks without a map: %g", world, s.alone);
        cr_assert_leq(s.packed, 1.25, "%u ranks without replicas: %g", world, s.packed);
        cr_assert_leq(s.replicated, 1.25, "%u ranks with replicas: %g", world, s.replicated);
    }
}

Test(balance, on_more_ranks_zipf_1_5_is_within_a_quarter_of_even_with_replicas_and_not_without)
{
    for (uint32_t world = 16; world <= 64; world *= 2) {
        struct share s = shares_of(world);
        cr_assert_gt(s.packed, 1.25, "%u ranks without replicas: %g", world, s.packed);
        cr_assert_leq(s.replicated, 1.25, "%u ranks with replicas: %g", world, s.replicated);
    }
}
