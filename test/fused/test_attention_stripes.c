/* SPDX-License-Identifier: Apache-2.0 */
/* Striped attention's deal of rows, its walks and what it sends, compared with every row and key one by one; and
 * stripes that are assigned to ranks. */
#include "fused/attention/assign.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 1 << 16, MOST_STRIPES = MOST / PRS_STRIPE_LEAST, MOST_RANKS = 8 };

struct problem {
    struct prs_attention_schedule s;
    struct prs_attention_stripes x;
    struct prs_span parts[MOST];
    uint32_t stripe_of[MOST_STRIPES], how_many[(MOST_STRIPES + 1) * MOST_RANKS];
    uint32_t world;
};

static uint32_t random_of(uint64_t *state, uint32_t below)
{
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)((*state >> 33) % below);
}

/* Sequences one after the other; the rest of the positions has none. Returns how many. */
static uint32_t pack(int32_t *bounds, uint32_t most, uint32_t positions, uint64_t *seed)
{
    uint32_t count = 0, at = random_of(seed, 2) * random_of(seed, 40);
    bounds[0] = (int32_t)at;
    while (count < most) {
        uint32_t kind = random_of(seed, 4), length = kind == 0 ? random_of(seed, 3) : random_of(seed, kind * 400);
        if (at + length > positions)
            break;
        at += length;
        bounds[++count] = (int32_t)at;
    }
    return count;
}

static void open_problem(struct problem *p, uint32_t world, uint32_t log_rows, uint32_t rounds, uint32_t block)
{
    struct prs_attention_slice slice = {.batch = 1, .heads_q = 2, .heads_kv = 1, .causal = 1};
    memset(p, 0, sizeof(*p));
    p->world = world;
    p->x.log_rows = log_rows;
    p->x.positions = rounds * 2 * world << log_rows;
    p->x.before = p->x.after = p->x.positions;
    slice.stripe = 1u << log_rows;
    slice.rows = p->x.positions / world;
    p->s.tile_rows = PRS_STRIPE_LEAST, p->s.block_rows = block;
    p->s.group = 1, p->s.depth = 1, p->s.chunk_rows = 128, p->s.slab_chunks = prs_ceil_div(slice.stripe, 128);
    prs_attention_schedule_init(&p->s, 0, world, &slice);
    cr_assert(p->s.slabs == 1 && p->s.segments == 2 * rounds);
}

/* The tables that prepare.cuh writes. */
static void write_tables(struct problem *p, const uint32_t *ranks)
{
    uint32_t stripes = p->x.positions >> p->x.log_rows, have[MOST_RANKS] = {0};
    for (uint32_t i = 0; i <= stripes; i++) {
        memcpy(p->how_many + (size_t)i * p->world, have, p->world * sizeof(*have));
        if (i < stripes)
            p->stripe_of[have[ranks[i]]++ * p->world + ranks[i]] = i;
    }
    p->x.stripe_of = p->stripe_of;
    p->x.how_many = p->how_many;
}

/* Equally many stripes for each rank, by chance. */
static void assign_at_random(struct problem *p, uint64_t *seed)
{
    uint32_t stripes = p->x.positions >> p->x.log_rows, ranks[MOST_STRIPES];
    for (uint32_t i = 0; i < stripes; i++) {
        uint32_t at = random_of(seed, i + 1);
        ranks[i] = ranks[at];
        ranks[at] = i % p->world;
    }
    write_tables(p, ranks);
}

static void set_rank(struct problem *p, uint32_t rank)
{
    prs_place_init(&p->s.place, rank, p->world, 1);
}

static bool meets(const struct problem *p, uint32_t query, uint32_t key)
{
    struct prs_span part = p->x.parts ? p->parts[query] : (struct prs_span){0, p->x.positions};
    uint32_t before = query > key ? query - key : 0, after = key > query ? key - query : 0;
    return key >= part.from && key < part.to && before <= p->x.before && after <= p->x.after;
}

Test(attention_stripes, every_position_is_one_row_of_one_rank)
{
    static struct problem p;
    static uint8_t seen[MOST];
    for (uint32_t at = 0; at < 16; at++) {
        uint32_t world = 1 + at / 2;
        uint64_t seed = at;
        open_problem(&p, world, 7, 3, 128);
        if (at % 2 != 0)
            assign_at_random(&p, &seed);
        memset(seen, 0, sizeof(seen));
        for (uint32_t rank = 0; rank < world; rank++)
            for (uint32_t row = 0; row < p.x.positions / world; row++) {
                uint32_t position = prs_stripe_position(&p.x, world, rank, row >> 7) + row % 128;
                cr_assert(position < p.x.positions && seen[position]++ == 0);
                cr_assert_eq(prs_stripe_rows_before(&p.x, world, rank, position), row);
                cr_assert_eq(prs_stripe_rows_before(&p.x, world, rank, position + 1), row + 1);
                cr_assert(at % 2 != 0 || prs_stripe_zigzag_rank(world, position / 128) == rank);
            }
        for (uint32_t rank = 0; rank < world; rank++)
            cr_assert_eq(prs_stripe_rows_before(&p.x, world, rank, p.x.positions), p.x.positions / world);
    }
}

Test(attention_stripes, smaller_launches_have_the_schedule_of_a_plan_of_their_length)
{
    for (uint32_t world = 1; world <= 8; world++)
        for (uint32_t rounds = 1; rounds <= 4; rounds++) {
            struct prs_attention_schedule s;
            struct problem plan, own;
            open_problem(&plan, world, 8, 4, 128);
            open_problem(&own, world, 8, rounds, 128);
            s = prs_attention_smaller(&plan.s, true, own.s.batch, own.x.positions / world);
            cr_assert_eq(memcmp(&s, &own.s, sizeof(s)), 0, "%u of 4 rounds on %u ranks", rounds, world);
        }
}

Test(attention_stripes, bounds_are_read_whatever_they_are)
{
    const int32_t bounds[] = {3, 3, 5, 5, 5, 9, 9}, wild[] = {7, -4, 100, 2, 1 << 30};
    const struct prs_span want[] = {{0, 1}, {1, 2}, {2, 3}, {3, 5}, {3, 5}, {5, 9}, {5, 9}, {5, 9}, {5, 9}, {9, 10}};
    for (uint32_t at = 0; at < 10; at++) {
        struct prs_span s = prs_stripe_part(bounds, 6, at, 10);
        cr_assert(s.from == want[at].from && s.to == want[at].to, "position %u: %u to %u", at, s.from, s.to);
        s = prs_stripe_part(wild, 4, at, 10);
        cr_assert(s.from <= at && s.to > at && s.to <= 10, "position %u: %u to %u", at, s.from, s.to);
    }
}

/* Walks a task of rank s->place.rank. read: [position of a block / block_rows], how often. */
static void walk_task(struct problem *p, uint32_t at, uint8_t *read)
{
    struct prs_attention_task t;
    struct prs_stripe_walk w;
    struct prs_place mine = p->s.place;
    uint32_t first, steps = 0;
    prs_attention_task_at(&p->s, at, &t);
    first = prs_stripe_tile(&p->x, &p->s, &t);
    prs_stripe_begin(&p->x, &p->s, &t, 1, &w);
    memset(read, 0, MOST / 64);
    do {
        uint32_t position = prs_stripe_look(&p->x, &p->s, &w), rank = prs_place_in_order(&mine, w.order);
        bool some = false, all = true;
        read[position / p->s.block_rows]++;
        for (uint32_t q = first; q < first + p->s.tile_rows; q++)
            for (uint32_t k = position; k < position + p->s.block_rows; k++)
                if (meets(p, q, k))
                    some = true;
                else
                    all = false;
        cr_assert(some, "a block that nobody looks at");
        cr_assert(all || w.at.diagonal, "a block that must be masked");
        cr_assert(w.at.span % p->s.segments < w.end);
        set_rank(p, rank);
        cr_assert(rank == mine.rank || prs_stripe_wanted(&p->x, &p->s.place, mine.rank, w.at.span % p->s.segments),
                  "rank %u never sends a stripe that rank %u reads", rank, mine.rank);
        set_rank(p, mine.rank);
        steps++;
        if (w.at.left == 1)
            cr_assert(!prs_stripe_next(&p->x, &p->s, &w));
    } while (w.at.left != 0 && prs_stripe_next(&p->x, &p->s, &w));
    for (uint32_t q = first; q < first + p->s.tile_rows; q++)
        for (uint32_t k = 0; k < p->x.positions; k++)
            cr_assert(read[k / p->s.block_rows] == 1 || (read[k / p->s.block_rows] == 0 && !meets(p, q, k)),
                      "key %u of query %u is read %u times", k, q, read[k / p->s.block_rows]);
}

/* A stripe travels only to ranks that have a row for it. */
static void check_sent(struct problem *p)
{
    for (uint32_t to = 0; to < p->world; to++)
        for (uint32_t number = 0; number < p->s.segments; number++) {
            uint32_t first = prs_stripe_position(&p->x, p->world, p->s.place.rank, number);
            bool some = false;
            for (uint32_t row = 0; row < p->x.positions / p->world && !some; row++) {
                uint32_t q =
                    prs_stripe_position(&p->x, p->world, to, row >> p->x.log_rows) + row % (1u << p->x.log_rows);
                for (uint32_t k = first; k < first + (1u << p->x.log_rows) && !some; k++)
                    some = meets(p, q, k);
            }
            cr_assert_eq(prs_stripe_wanted(&p->x, &p->s.place, to, number), some, "rank %u stripe %u to %u",
                         p->s.place.rank, number, to);
        }
}

/* Each rank that wants a stripe gets each of its messages once, those of later stripes before those of earlier ones. */
Test(attention_stripes, are_sent_once_and_the_last_first)
{
    static struct problem p;
    for (uint32_t world = 2; world <= 5; world++) {
        uint32_t receivers = world - 1, lot, sent = 0, wanted = 0, last = 0, group = 0;
        uint8_t *seen;
        open_problem(&p, world, 8, 2, 64);
        p.s.pairs = 5, p.s.group = 2, p.s.groups = 3, p.s.slab_chunks = 2;
        p.x.before = 300, p.x.after = 0;
        lot = p.s.pairs * 2 * p.s.slab_chunks;
        seen = calloc(world * p.s.segments * lot, 1);
        for (uint32_t at = 0; at < prs_attention_messages(&p.s); at++) {
            struct prs_attention_message m;
            uint32_t number;
            if (!prs_stripe_message_at(&p.x, &p.s, at, &m))
                continue;
            cr_assert(m.group > group || (m.group == group && (sent == 0 || m.segment <= last)));
            group = m.group, last = m.segment;
            number = (m.pair * 2 + m.kind) * p.s.slab_chunks + m.row / p.s.chunk_rows;
            cr_assert(m.distance >= 1 && m.distance <= receivers && number < lot);
            cr_assert_eq(seen[(m.distance * p.s.segments + m.segment) * lot + number]++, 0);
            sent++;
        }
        for (uint32_t distance = 1; distance <= receivers; distance++)
            for (uint32_t number = 0; number < p.s.segments; number++)
                if (prs_stripe_wanted(&p.x, &p.s.place, prs_place_neighbour(&p.s.place, world - distance), number))
                    wanted += lot;
        cr_assert_eq(sent, wanted, "%u ranks", world);
        free(seen);
    }
}

Test(attention_stripes, walks_read_what_rows_meet_and_nothing_else, .timeout = 300)
{
    static struct problem p;
    static uint8_t read[MOST / 64];
    static int32_t bounds[1001];
    for (uint64_t seed = 1; seed <= 40; seed++) {
        uint64_t state = seed;
        uint32_t world = 1 + random_of(&state, 5), kind = (uint32_t)seed % 4, tasks;
        open_problem(&p, world, 7 + random_of(&state, 2), world > 2 ? 1 : 2, random_of(&state, 2) != 0 ? 128 : 64);
        if (random_of(&state, 3) != 0)
            p.x.after = 0;
        if (kind % 2 != 0)
            p.x.before = seed % 3 == 0 ? 1 : random_of(&state, 400); /* 1: the next stripe has one row of this
                                                                      * sequence */
        if (kind % 2 != 0 && p.x.after != 0)
            p.x.after = random_of(&state, 400);
        if (random_of(&state, 2) != 0) { /* the pass for keys */
            uint32_t before = p.x.before;
            p.x.before = p.x.after, p.x.after = before;
        }
        if (kind >= 2) {
            uint32_t count = pack(bounds, 1000, p.x.positions, &state);
            for (uint32_t at = 0; at < p.x.positions; at++)
                p.parts[at] = prs_stripe_part(bounds, count, at, p.x.positions);
            p.x.parts = p.parts;
        }
        if (seed > 20)
            assign_at_random(&p, &state);
        tasks = p.s.segments * p.s.tiles;
        for (uint32_t rank = 0; rank < world; rank++) {
            set_rank(&p, rank);
            check_sent(&p);
            for (uint32_t i = 0; i < 4; i++)
                walk_task(&p, random_of(&state, tasks), read);
        }
    }
}

/* The pass for keys: before and after change places, and a key's walk has the query heads one after the other. */
Test(attention_stripes, a_key_meets_the_queries_that_meet_it, .timeout = 60)
{
    static struct problem p;
    struct prs_stripe_walk w;
    struct prs_attention_task t;
    uint32_t steps = 0, last_order = 0, last_head = 0;
    open_problem(&p, 2, 7, 2, 64);
    p.x.before = 200, p.x.after = 0;
    for (uint32_t q = 0; q < p.x.positions; q += 7)
        for (uint32_t k = 0; k < p.x.positions; k += 3) {
            struct prs_span span = prs_stripe_met_by(&p.x, k);
            cr_assert_eq(q >= span.from && q < span.to, meets(&p, q, k));
        }
    p.x.before = 0, p.x.after = 200;
    prs_attention_task_at(&p.s, 0, &t);
    prs_stripe_begin(&p.x, &p.s, &t, 3, &w);
    do {
        cr_assert(w.order > last_order || (w.order == last_order && w.head >= last_head));
        last_order = w.order, last_head = w.head;
        steps++;
    } while (prs_stripe_next(&p.x, &p.s, &w));
    cr_assert(last_head == 2 && steps % 3 == 0);
}

/* ---- even work ---- */
/* Lengths in tokens. `web`: log-normal, as documents of the web are (median 700, a few of tens of thousands); `long`:
 * the same with a sequence that has half of all tokens; `chat`: short ones of much the same length. */
static uint32_t draw(const char *kind, uint64_t *state, uint32_t at, uint32_t positions)
{
    double a = (random_of(state, 1 << 20) + 1) / (double)(1 << 20), b = random_of(state, 1 << 20) / (double)(1 << 20);
    double normal = sqrt(-2 * log(a)) * cos(6.283185307179586 * b);
    if (!strcmp(kind, "long") && at == 0)
        return positions / 2;
    return 1 + (uint32_t)(!strcmp(kind, "chat") ? 300 * exp(0.4 * normal) : 700 * exp(1.4 * normal));
}

enum { TASK_STEPS = 2 /* cost of a task beyond its steps, as that of a piece in deal.c */ };

/* The most steps of any rank, divided by the mean. p->x is that of the pass. */
static double unevenness(struct problem *p)
{
    uint64_t most = 0, all = 0;
    for (uint32_t rank = 0; rank < p->world; rank++) {
        uint64_t steps = 0;
        set_rank(p, rank);
        for (uint32_t at = 0; at < p->s.segments * p->s.tiles; at++) {
            struct prs_attention_task t = {.segment = at / p->s.tiles, .tile = at % p->s.tiles};
            struct prs_stripe_walk w;
            prs_stripe_begin(&p->x, &p->s, &t, 1, &w);
            steps += w.at.left + TASK_STEPS;
        }
        most = steps > most ? steps : most;
        all += steps;
    }
    return (double)most * p->world / (double)all;
}

static const char *const kinds[] = {"web", "long", "chat"};
static int32_t drawn[MOST + 1]; /* bounds */

/* 64k tokens in causal sequences, and stripes of 128 rows. Returns how many sequences. */
static uint32_t open_drawn(struct problem *p, const char *kind, uint32_t world, uint64_t seed)
{
    uint32_t count = 0, at = 0;
    open_problem(p, world, 7, MOST / (2 * world) >> 7, 128);
    while (at < MOST) {
        uint32_t length = draw(kind, &seed, at, MOST);
        at = at + length < MOST ? at + length : MOST;
        drawn[++count] = (int32_t)at;
    }
    for (uint32_t i = 0; i < MOST; i++)
        p->parts[i] = prs_stripe_part(drawn, count, i, MOST);
    p->x.parts = p->parts;
    p->x.after = 0;
    return count;
}

/* On 8 ranks a rank has 64 stripes, and chance is larger. */
Test(attention_stripes, ranks_have_the_same_work_within_5_percent, .timeout = 60)
{
    static struct problem p;
    for (uint32_t kind = 0; kind < 3; kind++)
        for (uint32_t world = 2; world <= 8; world *= 2) {
            double worst = 0;
            for (uint64_t seed = 1; seed <= 5; seed++) {
                open_drawn(&p, kinds[kind], world, seed);
                worst = fmax(worst, unevenness(&p));
            }
            cr_log_info("%s, %u ranks: %.3f", kinds[kind], world, worst);
            cr_expect(worst < (world == 8 ? 1.08 : 1.05), "%s, %u ranks: the most steps are %.3f of the mean",
                      kinds[kind], world, worst);
        }
}

/* ---- stripes that are assigned ---- */
static void assign(struct problem *p, uint32_t sequences)
{
    struct prs_packing x = {p->x.parts ? drawn : NULL, sequences, p->x.positions, p->x.before, p->x.after};
    uint32_t ranks[MOST_STRIPES], have[MOST_RANKS] = {0}, stripes = p->x.positions >> p->x.log_rows;
    cr_assert_eq(prs_stripe_assign(&x, 1u << p->x.log_rows, p->world, ranks), 0);
    for (uint32_t i = 0; i < stripes; i++) {
        cr_assert_lt(ranks[i], p->world);
        have[ranks[i]]++;
    }
    for (uint32_t rank = 0; rank < p->world; rank++)
        cr_assert_eq(have[rank], stripes / p->world, "rank %u has %u of %u stripes", rank, have[rank], stripes);
    write_tables(p, ranks);
}

/* How many stripes the rank that receives most gets, over those that it has. */
static double received(struct problem *p)
{
    uint32_t got[MOST_RANKS] = {0}, most = 0;
    for (uint32_t rank = 0; rank < p->world; rank++) {
        set_rank(p, rank);
        for (uint32_t to = 0; to < p->world; to++)
            for (uint32_t number = 0; number < p->s.segments; number++)
                got[to] += to != rank && prs_stripe_wanted(&p->x, &p->s.place, to, number);
    }
    for (uint32_t rank = 0; rank < p->world; rank++)
        most = got[rank] > most ? got[rank] : most;
    return (double)most / p->s.segments;
}

static void exchange_passes(struct problem *p)
{
    uint32_t before = p->x.before;
    p->x.before = p->x.after, p->x.after = before;
}

/* causal: 0 if not; window: UINT32_MAX if none. Work is even forward and backward, and little travels. */
static void check_assigned(const char *kind, uint32_t world, uint32_t causal, uint32_t window, double most_received)
{
    static struct problem p;
    double forward = 0, backward = 0, arrive = 0, zigzag = 0;
    for (uint64_t seed = 1; seed <= 5; seed++) {
        uint32_t sequences = open_drawn(&p, kind, world, seed);
        p.x.before = window < p.x.before ? window : p.x.before;
        p.x.after = causal != 0 ? 0 : p.x.before;
        zigzag += received(&p) / 5;
        assign(&p, sequences);
        forward = fmax(forward, unevenness(&p));
        arrive += received(&p) / 5;
        exchange_passes(&p);
        backward = fmax(backward, unevenness(&p));
    }
    cr_log_info("%s, %u ranks, causal %u, window %d: forward %.3f, backward %.3f, received %.2f (zigzag %.2f)", kind,
                world, causal, (int)window, forward, backward, arrive, zigzag);
    cr_expect(forward < 1.05 && backward < 1.05, "%s, %u ranks: the most steps are %.3f and %.3f of the mean", kind,
              world, forward, backward);
    cr_expect_leq(arrive, most_received * zigzag, "%s, %u ranks: %.2f times its own stripes, in zigzag %.2f", kind,
                  world, arrive, zigzag);
}

Test(attention_stripes, assigned_to_ranks_give_even_work_both_ways_and_travel_less, .timeout = 120)
{
    static const double causal[] = {0.5, 0.75, 0.1}, full[] = {0.55, 0.8, 0.1};
    for (uint32_t kind = 0; kind < 3; kind++)
        for (uint32_t world = 2; world <= 8; world *= 2) {
            check_assigned(kinds[kind], world, 1, UINT32_MAX, causal[kind]);
            check_assigned(kinds[kind], world, 0, UINT32_MAX, full[kind]);
            check_assigned(kinds[kind], world, 1, 1023, 0.1);
        }
}

/* One sequence with a window: a rank gets neighbouring stripes. */
Test(attention_stripes, assigned_in_a_window_are_neighbours)
{
    static struct problem p;
    for (uint32_t world = 2; world <= 8; world *= 2) {
        open_problem(&p, world, 7, MOST / (2 * world) >> 7, 128);
        p.x.before = 1023, p.x.after = 0;
        assign(&p, 0);
        cr_expect_leq(received(&p) * p.s.segments, 2 * 8, "%u ranks: %.2f", world, received(&p));
    }
}

/* Stripes with many sequences, empty ones, positions without one, and as few stripes as there may be. */
Test(attention_stripes, assigned_are_equally_many_whatever_is_packed)
{
    static struct problem p;
    for (uint64_t seed = 1; seed <= 200; seed++) {
        uint64_t state = seed;
        uint32_t world = 1 + random_of(&state, 8), sequences;
        open_problem(&p, world, 7 + random_of(&state, 3), 1 + random_of(&state, 3), 128);
        p.x.parts = p.parts;
        p.x.before = random_of(&state, 2) != 0 ? random_of(&state, 500) : p.x.positions;
        p.x.after = random_of(&state, 2) != 0 ? 0 : p.x.before;
        sequences = pack(drawn, 1 + random_of(&state, 300), p.x.positions, &state);
        assign(&p, sequences);
    }
}
