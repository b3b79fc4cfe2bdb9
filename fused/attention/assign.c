/* SPDX-License-Identifier: Apache-2.0 */
/* Striped attention: chooses which rank has which stripe, from the lengths of the sequences.
 *
 * The stripes are put in a circle, those of a sequence together. A causal sequence lies there in pairs: its first and
 * last stripe, then the two beside these, and so on. All its pairs have the same work, forward, where work grows with
 * the position of the queries, and backward, where it falls with the position of the keys.
 *
 * One rank after the other takes an arc: as many stripes as each rank has, with its share of the forward and of the
 * backward work. Among such arcs it takes the one that cuts the shortest sequences, since the stripes of a sequence
 * that is cut travel. What is left closes to a circle again. There is such an arc, up to the work of a few stripes:
 * arcs that follow each other around the circle have the right work on average, and from one place to the next an arc's
 * work changes by that of two stripes. */
#include "fused/attention/assign.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "transport/util/error.h"

enum {
    TILE = PRS_STRIPE_LEAST,
    TASK_STEPS = 2 /* cost of a tile beyond its steps, as that of a piece in deal.c */
};

static const double EVEN = 0.01; /* arcs whose work is so close to the mean are equally good */

struct stripe {
    uint32_t number, sequence; /* sequence: counted from 0 */
    uint64_t forward, backward;
};

struct circle {
    struct stripe *stripes, *rest;
    uint32_t count, most_cut;     /* most_cut: no cut makes more stripes travel */
    uint64_t *forward, *backward; /* [2 * count + 1]: work of the stripes before this one, twice around */
    uint32_t *of_sequence;        /* how many stripes */
};

static struct prs_span sequence_of(const struct prs_packing *x, uint32_t position)
{
    return x->bounds ? prs_stripe_part(x->bounds, x->sequences, position, x->positions)
                     : (struct prs_span){0, x->positions};
}

/* How many blocks of keys a tile of queries meets; with `before` and `after` exchanged, the reverse. */
static uint64_t steps_of(const struct prs_packing *x, uint32_t tile, uint32_t before, uint32_t after)
{
    uint32_t last = tile + TILE - 1;
    uint32_t from = prs_stripe_cut_part(sequence_of(x, tile), tile, before, after).from;
    uint32_t to = prs_stripe_cut_part(sequence_of(x, last), last, before, after).to;
    return (to - 1) / TILE - from / TILE + 1 + TASK_STEPS;
}

static struct stripe stripe_of(const struct prs_packing *x, uint32_t number, uint32_t rows, uint32_t sequence)
{
    struct stripe s = {.number = number, .sequence = sequence};
    for (uint32_t tile = number * rows; tile < (number + 1) * rows; tile += TILE) {
        s.forward += steps_of(x, tile, x->before, x->after);
        s.backward += steps_of(x, tile, x->after, x->before);
    }
    return s;
}

/* A stripe belongs to the sequence at its middle. */
static void fill(struct circle *c, const struct prs_packing *x, uint32_t rows)
{
    for (uint32_t first = 0, end, sequence = 0; first < c->count; first = end, sequence++) {
        uint32_t from = sequence_of(x, first * rows + rows / 2).from;
        bool pairs;
        for (end = first + 1; end < c->count && sequence_of(x, end * rows + rows / 2).from == from;)
            end++;
        /* With a short window all of a sequence has the same work, and neighbours belong together. */
        pairs = x->after == 0 && (end - first) / 2 <= x->before / rows;
        for (uint32_t i = 0; i < end - first; i++) {
            uint32_t number = !pairs ? first + i : i % 2 == 0 ? first + i / 2 : end - 1 - i / 2;
            c->stripes[first + i] = stripe_of(x, number, rows, sequence);
        }
    }
}

static void add_up(struct circle *c)
{
    for (uint32_t i = 0; i < c->count; i++)
        c->of_sequence[c->stripes[i].sequence] = 0;
    for (uint32_t i = 0; i < 2 * c->count; i++) {
        const struct stripe *s = &c->stripes[i % c->count];
        c->forward[i + 1] = c->forward[i] + s->forward;
        c->backward[i + 1] = c->backward[i] + s->backward;
        c->of_sequence[s->sequence] += i < c->count ? 1 : 0;
    }
}

/* How far the work of the arc of `share` stripes from `at` is from its share, as a part of it. */
static double off(const uint64_t *work, uint32_t count, uint32_t at, uint32_t share)
{
    double want = (double)work[count] * share / count;
    return fabs((double)(work[at + share] - work[at]) - want) / want;
}

static double uneven(const struct circle *c, uint32_t at, uint32_t share)
{
    return fmax(off(c->forward, c->count, at, share), off(c->backward, c->count, at, share));
}

/* How many stripes may travel because of a cut before this one. */
static uint32_t cut(const struct circle *c, uint32_t at)
{
    const struct stripe *s = &c->stripes[at % c->count], *before = &c->stripes[(at + c->count - 1) % c->count];
    uint32_t stripes = s->sequence == before->sequence ? c->of_sequence[s->sequence] : 0;
    return stripes < c->most_cut ? stripes : c->most_cut;
}

/* Where the best arc of `share` stripes begins. */
static uint32_t best_arc(const struct circle *c, uint32_t share)
{
    uint32_t best = 0, least_cut = UINT32_MAX;
    double limit = uneven(c, 0, share), least = 0;
    for (uint32_t at = 1; at < c->count; at++)
        limit = fmin(limit, uneven(c, at, share));
    limit = fmax(limit, EVEN);
    for (uint32_t at = 0; at < c->count; at++) {
        double here = uneven(c, at, share);
        uint32_t stripes = cut(c, at) + cut(c, at + share);
        if (here > limit || stripes > least_cut || (stripes == least_cut && here >= least))
            continue;
        best = at, least_cut = stripes, least = here;
    }
    return best;
}

/* Gives the rank the stripes of the arc, and closes the circle. */
static void take_arc(struct circle *c, uint32_t at, uint32_t share, uint32_t rank, uint32_t *ranks)
{
    struct stripe *taken = c->stripes;
    for (uint32_t i = 0; i < share; i++)
        ranks[taken[(at + i) % c->count].number] = rank;
    for (uint32_t i = share; i < c->count; i++)
        c->rest[i - share] = taken[(at + i) % c->count];
    c->stripes = c->rest, c->rest = taken;
    c->count -= share;
}

int prs_stripe_assign(const struct prs_packing *x, uint32_t rows, uint32_t world, uint32_t *ranks)
{
    size_t stripes = x->positions / rows, sums = 2 * stripes + 1;
    uint32_t share = (uint32_t)stripes / world;
    struct stripe *memory = malloc(2 * stripes * sizeof(*memory) + 2 * sums * sizeof(uint64_t) + stripes * 4);
    struct circle c = {.stripes = memory, .rest = memory + stripes, .count = (uint32_t)stripes};
    if (!memory)
        return prs_fail(-ENOMEM, "attention: no memory to assign %zu stripes", stripes);
    c.forward = (uint64_t *)(memory + 2 * stripes);
    c.backward = c.forward + sums;
    c.of_sequence = (uint32_t *)(c.backward + sums);
    c.forward[0] = c.backward[0] = 0;
    c.most_cut = x->before / rows + 1;
    fill(&c, x, rows);
    for (uint32_t rank = 0; rank < world; rank++) {
        add_up(&c);
        take_arc(&c, best_arc(&c, share), share, rank, ranks);
    }
    free(memory);
    return 0;
}
