/* SPDX-License-Identifier: Apache-2.0 */
/* The order in which tasks of attention's backward pass add to dq, on a model of one rank: CTAs that claim tasks in
 * their order, compute blocks and add them in turns. It ends with any number of CTAs, and turns cost little time. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "fused/attention/backward/schedule.h"

/* Times as on H200, where 1 is that of a block's products: until an add has read its buffer; until it is done and
 * others see it; what a task takes in addition to its blocks; and how much blocks differ. */
static const double READ = 0.3, DONE = 1.1, TASK = 2, VARIES = 0.1;

struct block {
    uint32_t sum, turn; /* sum: which sum the block is added to; turn: how many adds come before */
};

/* Blocks of all tasks; those of task i begin at first[i]. */
struct work {
    struct block *blocks;
    uint32_t *first, tasks, sums;
};

/* A CTA has two buffers for what it adds, and adds of each one after the other. */
struct cta {
    uint32_t at, end, step; /* blocks of the task; step: buffer of the next one */
    double computed;        /* when the last block was */
    struct {
        struct block block;
        double ready, read, done;
        bool waits; /* computed, and not added yet */
    } buffer[2];
};

struct model {
    const struct work *work;
    struct cta *ctas;
    uint32_t count, claimed, *turn;
    double *added; /* when the last add to each sum was done */
    uint64_t random;
    bool turns;
};

static double draw(struct model *m)
{
    m->random = m->random * 6364136223846793005ull + 1442695040888963407ull;
    return (double)(m->random >> 33) / (double)(1u << 31);
}

/* Computes the next block, if its buffer has been read. */
static bool compute(struct model *m, struct cta *c)
{
    uint32_t b = c->step % 2;
    if (c->buffer[b].waits)
        return false;
    if (c->at == c->end) {
        if (m->claimed == m->work->tasks)
            return false;
        c->at = m->work->first[m->claimed];
        c->end = m->work->first[++m->claimed];
        c->computed += TASK;
    }
    c->computed += 1 + VARIES * (2 * draw(m) - 1);
    if (c->buffer[b].read > c->computed)
        c->computed = c->buffer[b].read;
    c->buffer[b].block = m->work->blocks[c->at++];
    c->buffer[b].ready = c->computed > c->buffer[b].done ? c->computed : c->buffer[b].done;
    c->buffer[b].waits = true;
    c->step++;
    return true;
}

/* The time from which a computed block can be added; < 0: not yet known. */
static double when(const struct model *m, const struct cta *c, uint32_t b)
{
    const struct block *x = &c->buffer[b].block;
    double after = m->turns ? m->added[x->sum] : 0;
    if (!c->buffer[b].waits || (m->turns && m->turn[x->sum] != x->turn))
        return -1;
    return c->buffer[b].ready > after ? c->buffer[b].ready : after;
}

/* Runs everything; the earliest add comes first. Returns the time, or -1 when nothing can go on. */
static double run(const struct work *work, uint32_t ctas, bool turns)
{
    struct model m = {.work = work, .count = ctas, .random = 1, .turns = turns};
    uint32_t left = work->first[work->tasks];
    double end = 0;
    m.ctas = calloc(ctas, sizeof(*m.ctas));
    m.turn = calloc(work->sums, sizeof(*m.turn));
    m.added = calloc(work->sums, sizeof(*m.added));
    for (uint32_t i = 0; i < ctas; i++)
        while (compute(&m, &m.ctas[i])) {
        }
    while (left-- != 0) {
        struct cta *next = NULL;
        uint32_t buffer = 0;
        double best = 0;
        for (uint32_t i = 0; i < 2 * ctas; i++) {
            double t = when(&m, &m.ctas[i / 2], i % 2);
            if (t >= 0 && (!next || t < best)) {
                next = &m.ctas[i / 2];
                buffer = i % 2;
                best = t;
            }
        }
        if (!next) {
            end = -1;
            break;
        }
        next->buffer[buffer].waits = false;
        next->buffer[buffer].read = best + READ;
        next->buffer[buffer].done = best + DONE;
        m.added[next->buffer[buffer].block.sum] = best + DONE;
        m.turn[next->buffer[buffer].block.sum]++;
        end = best + DONE > end ? best + DONE : end;
        while (compute(&m, next)) {
        }
    }
    free(m.ctas);
    free(m.turn);
    free(m.added);
    return end;
}

static void open_work(struct work *w, uint32_t tasks, uint32_t most, uint32_t sums)
{
    w->blocks = malloc((size_t)tasks * most * sizeof(*w->blocks));
    w->first = calloc(tasks + 1, sizeof(*w->first));
    w->tasks = tasks;
    w->sums = sums;
}

static void close_work(struct work *w)
{
    free(w->blocks);
    free(w->first);
}

/* ---- one slice of consecutive positions, or two ---- */
static void open_ring(struct work *w, uint32_t keys, uint32_t heads, uint32_t step, uint32_t causal, uint32_t rank,
                      uint32_t world)
{
    struct prs_attention_slice slice = {
        .batch = 1, .heads_q = heads, .heads_kv = heads, .causal = causal, .rows = keys / world};
    struct prs_attention_schedule s = {
        .tile_rows = 128, .block_rows = 64, .depth = 2, .chunk_rows = 128, .slab_chunks = 2, .group = step};
    struct prs_backward_shape b = {heads, 1};
    prs_attention_schedule_init(&s, rank, world, &slice);
    open_work(w, prs_backward_tasks(&s, &b), keys / 64 + 1, (uint32_t)prs_backward_sum(&s, heads, world, 0, 0, 0));
    for (uint32_t i = 0; i < w->tasks; i++) {
        struct prs_attention_task t;
        struct prs_attention_walk x;
        uint32_t at = w->first[i];
        prs_backward_task_at(&s, &b, i, &t);
        prs_backward_begin(&s, &b, &t, &x);
        do {
            uint32_t span = prs_backward_span(&s, &b, &x, false);
            w->blocks[at].sum = (uint32_t)prs_backward_sum(&s, heads, span / s.segments, prs_backward_pair(&b, &t, &x),
                                                           span % s.segments, x.block);
            w->blocks[at++].turn = prs_backward_turn(&s, &t, &x);
        } while (prs_backward_next(&s, &b, &t, &x, false));
        w->first[i + 1] = at;
    }
}

/* A task waits only for tasks that were claimed before it. */
Test(attention_turns, any_number_of_ctas_comes_to_an_end)
{
    for (uint32_t world = 1; world <= 8; world++)
        for (uint32_t at = 0; at < 2 * world; at++)
            for (uint32_t ctas = 1; ctas <= 9; ctas += 2) {
                struct work w;
                open_ring(&w, world * 512, 3, 2, at & 1, at >> 1, world);
                cr_assert_geq(run(&w, ctas, true), 0, "rank %u of %u, %u CTAs", at >> 1, world, ctas);
                close_work(&w);
            }
}

/* The most that turns add to the time of the slowest rank, in percent of the time without them. */
static double cost(uint32_t keys, uint32_t heads, uint32_t step, uint32_t causal, uint32_t world)
{
    double with = 0, without = 0;
    for (uint32_t rank = 0; rank < world; rank++) {
        struct work w;
        double a, b;
        open_ring(&w, keys, heads, step, causal, rank, world);
        a = run(&w, 33, true), b = run(&w, 33, false);
        with = a > with ? a : with;
        without = b > without ? b : without;
        close_work(&w);
    }
    return 100 * (with / without - 1);
}

/* A quarter of an H200, with a quarter of the heads of a step. */
Test(attention_turns, cost_little, .timeout = 60)
{
    static const struct {
        uint32_t keys, heads, step, causal, world;
        double percent;
    } rows[] = {{8192, 6, 2, 1, 4, 5},  {4096, 16, 1, 1, 4, 5}, {8192, 8, 1, 1, 8, 5}, {4096, 6, 2, 1, 2, 5},
                {16384, 4, 2, 1, 8, 5}, {4096, 4, 4, 1, 1, 7},  {4096, 4, 4, 0, 2, 8}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        double percent = cost(rows[i].keys, rows[i].heads, rows[i].step, rows[i].causal, rows[i].world);
        cr_log_info("%u keys, %u ranks: turns take %.1f %%", rows[i].keys, rows[i].world, percent);
        cr_expect_leq(percent, rows[i].percent, "%u keys, %u ranks: turns take %.1f %%", rows[i].keys, rows[i].world,
                      percent);
    }
}

/* ---- striped ---- */
enum { POSITIONS = 4096, STRIPES = POSITIONS / 128 };

/* ends: of the sequences; the last one is POSITIONS. assigned: a launch says which rank has which stripe. */
static void open_stripes(struct work *w, const uint32_t *ends, uint32_t window, uint32_t causal, bool assigned,
                         uint32_t rank, uint32_t world)
{
    static struct prs_span parts[POSITIONS];
    static uint32_t stripe_of[STRIPES], how_many[(STRIPES + 1) * 8];
    struct prs_attention_slice slice = {
        .batch = 1, .heads_q = 4, .heads_kv = 4, .causal = causal, .rows = POSITIONS / world, .stripe = 128};
    struct prs_attention_schedule s = {
        .tile_rows = 128, .block_rows = 64, .depth = 2, .chunk_rows = 128, .slab_chunks = 1, .group = 4};
    struct prs_attention_stripes x = {
        .log_rows = 7, .before = causal ? 0 : window - 1, .after = window - 1, .parts = parts, .positions = POSITIONS};
    struct prs_backward_shape b = {2, 2};
    uint32_t *added, have[8] = {0};
    for (uint32_t i = 0; assigned && i <= STRIPES; i++) {
        uint32_t to = (i + i / world) % world;
        memcpy(how_many + (size_t)i * world, have, world * sizeof(*have));
        if (i < STRIPES)
            stripe_of[have[to]++ * world + to] = i;
        x.stripe_of = stripe_of, x.how_many = how_many;
    }
    for (uint32_t from = 0, part = 0, at = 0; at < POSITIONS; at++) {
        if (at == ends[part])
            from = ends[part++];
        parts[at] = (struct prs_span){from, ends[part]};
    }
    prs_attention_schedule_init(&s, rank, world, &slice);
    open_work(w, prs_backward_tasks(&s, &b), 2 * (POSITIONS / 64 + 2 * world),
              (uint32_t)prs_backward_sum(&s, 4, world, 0, 0, 0));
    added = calloc(w->sums, sizeof(*added));
    for (uint32_t i = 0; i < w->tasks; i++) {
        struct prs_attention_task t;
        struct prs_stripe_walk walk = {.order = 0};
        uint32_t at = w->first[i];
        prs_backward_task_at(&s, &b, i, &t);
        prs_stripe_begin(&x, &s, &t, b.shared, &walk);
        do {
            uint32_t position = prs_stripe_look(&x, &s, &walk);
            w->blocks[at].sum = (uint32_t)prs_backward_sum(&s, 4, walk.order, t.pair + walk.head,
                                                           walk.at.span % s.segments, walk.at.block);
            w->blocks[at].turn = prs_backward_stripe_turn(&x, &s, &t, position);
            cr_assert_eq(w->blocks[at].turn, added[w->blocks[at].sum]++, "rank %u of %u, tile %u, position %u", rank,
                         world, t.segment, position);
            at++;
        } while (prs_stripe_next(&x, &s, &walk));
        w->first[i + 1] = at;
    }
    for (uint32_t i = 0; i < w->sums; i++) { /* sums that are sent to the owner, and sums that it adds up */
        uint32_t blocks = prs_backward_blocks(&s), source = prs_place_in_order(&s.place, i / (w->sums / world));
        cr_assert_eq(added[i] != 0,
                     prs_backward_stripe_meets(&x, &s, rank, source, i / blocks % s.segments, i % blocks),
                     "rank %u of %u, sum %u", rank, world, i);
    }
    free(added);
}

/* The tasks, in the order in which they are claimed, add to each block of queries one after the other. */
Test(attention_turns, stripes_cost_nothing, .timeout = 60)
{
    static const uint32_t ends[][6] = {{POSITIONS}, {100, 1000, 1001, 1900, 3777, POSITIONS}, {2048, 2100, POSITIONS}};
    for (uint32_t world = 1; world <= 8; world *= 2)
        for (uint32_t at = 0; at < 24 * world; at++) {
            uint32_t window = at / world % 2 != 0 ? 300 : POSITIONS, causal = at / world / 2 % 2;
            struct work w;
            open_stripes(&w, ends[at / world / 4 % 3], window, causal, at / world >= 12, at % world, world);
            cr_assert_geq(run(&w, 1, true), 0);
            if (causal) {
                double with = run(&w, 17, true), without = run(&w, 17, false);
                cr_expect_leq(with, without + 4, "rank %u of %u, window %u: %.1f, without turns %.1f", at % world,
                              world, window, with, without);
            }
            close_work(&w);
        }
}
