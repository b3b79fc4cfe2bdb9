/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/attention/deal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "transport/util/error.h"

enum {
    /* cost of a piece in addition to its steps, because nothing overlaps its first and last product (H200) */
    PIECE_STEPS = 2,
    LEAST_STEPS = 2, /* smaller pieces are not worth it */
    MOST_PARTS = 8,  /* of a task: merging reads 64 KB for each part */
    TRIES = 5
};

/* The state of dealing. When CTAs claim pieces in this order, the CTA with the least work claims the next one. */
struct dealer {
    const struct prs_attention_schedule *s;
    struct prs_attention_deal *deal;
    uint32_t ctas, most_cuts, cuts_left;
    uint64_t limit; /* of a CTA's load */
    uint64_t *load; /* of each CTA */
};

static uint32_t least_loaded(const struct dealer *d)
{
    uint32_t least = 0;
    for (uint32_t cta = 1; cta < d->ctas; cta++)
        least = d->load[cta] < d->load[least] ? cta : least;
    return least;
}

static void give(struct dealer *d, uint32_t cta, const struct prs_attention_piece *piece)
{
    struct prs_attention_deal *deal = d->deal;
    deal->pieces[deal->pieces_count++] = *piece;
    d->load[cta] += piece->begin.left + PIECE_STEPS;
    deal->most = d->load[cta] > deal->most ? d->load[cta] : deal->most;
}

/* How many of the `rest` steps, counted from `first`, a CTA takes that has `room` steps left. */
static uint32_t steps_for(const struct dealer *d, const struct prs_attention_task *t, uint32_t first, uint32_t rest,
                          uint64_t room)
{
    uint32_t least = (first + rest) / MOST_PARTS + LEAST_STEPS, take = room < least ? least : (uint32_t)room, cut;
    if (room >= rest || rest < 2 * least || take + least / 2 > rest || d->cuts_left == 0)
        return rest;
    take = take + least > rest ? rest - least : take;
    cut = prs_attention_cut(d->s, t, first + take);
    return cut > first ? cut - first : rest;
}

/* The CTA with the least work takes as much of the task as it has room for; what is left goes to the next one. No CTA
 * gets more than the limit, unless a piece is too small to cut. */
static void deal_task(struct dealer *d, uint32_t task)
{
    struct prs_attention_deal *deal = d->deal;
    struct prs_attention_piece piece = {.part = 0};
    uint32_t blocks, first = 0, part = deal->parts_count;
    prs_attention_task_at(d->s, task, &piece.task);
    blocks = prs_attention_blocks(d->s, &piece.task);
    while (first < blocks) {
        uint32_t cta = least_loaded(d);
        uint64_t used = d->load[cta] + PIECE_STEPS, room = used < d->limit ? d->limit - used : 0;
        uint32_t steps = steps_for(d, &piece.task, first, blocks - first, room);
        if (steps != blocks) {
            deal->cuts[deal->parts_count] = (struct prs_attention_cut){task, first};
            piece.part = ++deal->parts_count;
            d->cuts_left -= d->cuts_left != 0;
        }
        prs_attention_begin(d->s, &piece.task, &piece.begin, first, steps);
        give(d, cta, &piece);
        first += steps;
    }
    for (uint32_t i = part; i < deal->parts_count; i++)
        deal->parts[i] = (struct prs_attention_part){part, deal->parts_count - part};
}

static uint64_t all_steps(const struct prs_attention_schedule *s)
{
    uint64_t steps = 0;
    for (uint32_t task = 0; task < s->tasks; task++) {
        struct prs_attention_task t;
        prs_attention_task_at(s, task, &t);
        steps += prs_attention_blocks(s, &t) + PIECE_STEPS;
    }
    return steps;
}

/* Deals all tasks, to each CTA no more than `limit` where possible. */
static void deal_all(struct dealer *d, uint64_t limit)
{
    d->limit = limit;
    d->cuts_left = d->most_cuts;
    d->deal->pieces_count = d->deal->parts_count = 0;
    d->deal->most = 0;
    memset(d->load, 0, d->ctas * sizeof(*d->load));
    for (uint32_t task = 0; task < d->s->tasks; task++)
        deal_task(d, task);
}

/* Cuts nothing if that is as good. Otherwise takes the limit with which the last CTA ends first; it must deal to find
 * that. */
static void deal_best(struct dealer *d)
{
    uint64_t best = UINT64_MAX, least;
    deal_all(d, UINT64_MAX);
    least = d->deal->most - d->deal->most / 128;
    for (uint64_t limit = d->deal->mean; limit < d->deal->mean + TRIES * PIECE_STEPS; limit += PIECE_STEPS) {
        deal_all(d, limit);
        if (d->deal->most >= least)
            continue;
        best = limit;
        least = d->deal->most;
    }
    deal_all(d, best);
}

uint32_t prs_attention_deal_most_parts(uint32_t ctas)
{
    return 2 * ctas + 1; /* `most_cuts`, and the rest of the last task that is cut */
}

int prs_attention_deal_init(struct prs_attention_deal *deal, const struct prs_attention_schedule *s, uint32_t ctas)
{
    /* Each cut fills a CTA, except for pieces that are too small. */
    struct dealer d = {.s = s, .deal = deal, .ctas = ctas, .most_cuts = 2 * ctas};
    uint32_t parts = prs_attention_deal_most_parts(ctas);
    int r = 0;
    memset(deal, 0, sizeof(*deal));
    deal->pieces_of = calloc(s->groups, sizeof(*deal->pieces_of));
    deal->pieces = malloc(((size_t)s->tasks + parts) * sizeof(*deal->pieces));
    deal->parts = malloc(parts * sizeof(*deal->parts));
    deal->cuts = malloc(parts * sizeof(*deal->cuts));
    d.load = calloc(ctas, sizeof(*d.load));
    if (!deal->pieces_of || !deal->pieces || !deal->parts || !deal->cuts || !d.load)
        r = -ENOMEM;
    if (!r) {
        deal->mean = (all_steps(s) + ctas - 1) / ctas;
        deal_best(&d);
        for (uint32_t i = 0; i < deal->pieces_count; i++)
            deal->pieces_of[deal->pieces[i].task.group]++;
    }
    free(d.load);
    if (!r)
        return 0;
    prs_attention_deal_fini(deal);
    return prs_fail(r, "attention: no memory to deal %u tasks to %u CTAs", s->tasks, ctas);
}

int prs_attention_deal_whole(struct prs_attention_deal *deal, const struct prs_attention_schedule *s)
{
    memset(deal, 0, sizeof(*deal));
    deal->pieces_of = calloc(s->groups, sizeof(*deal->pieces_of));
    deal->pieces = malloc(s->tasks * sizeof(*deal->pieces));
    if (!deal->pieces_of || !deal->pieces) {
        prs_attention_deal_fini(deal);
        return prs_fail(-ENOMEM, "attention: no memory for %u tasks", s->tasks);
    }
    deal->pieces_count = s->tasks;
    for (uint32_t i = 0; i < s->tasks; i++) {
        deal->pieces[i] = prs_attention_whole(s, i);
        deal->pieces_of[deal->pieces[i].task.group]++;
    }
    return 0;
}

void prs_attention_deal_fini(struct prs_attention_deal *deal)
{
    free(deal->pieces_of);
    free(deal->pieces);
    free(deal->parts);
    free(deal->cuts);
    memset(deal, 0, sizeof(*deal));
}
