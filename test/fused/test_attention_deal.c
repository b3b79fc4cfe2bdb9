/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <stdlib.h>
#include <string.h>

#include "fused/attention/deal.h"

struct row {
    uint32_t world, batch, heads_q, heads_kv, rows, causal; /* rows: of a rank's slice */
    uint32_t block, group, ctas;
    uint32_t tile; /* 0: 128 */
};

static struct row shapes[] = {
    /* the shapes that are measured on H200 */
    {1, 4, 16, 16, 2048, 0, 176, 9, 132},
    {1, 4, 16, 16, 8192, 0, 176, 3, 132},
    {1, 4, 16, 16, 2048, 1, 128, 9, 132},
    {1, 4, 16, 16, 8192, 1, 176, 3, 132},
    {1, 1, 16, 16, 32768, 1, 176, 1, 132},
    {4, 4, 16, 16, 2048, 0, 176, 9, 132},
    {4, 4, 16, 16, 2048, 1, 128, 9, 132},
    {4, 4, 16, 16, 4096, 1, 176, 5, 132},
    {4, 4, 16, 16, 16384, 1, 176, 2, 132},
    {1, 4, 32, 8, 16384, 0, 128, 1, 132},
    /* few tasks, only one task, odd lengths */
    {1, 1, 5, 5, 4096, 0, 176, 1, 132},
    {1, 1, 1, 1, 4000, 1, 176, 1, 132},
    {4, 1, 3, 1, 1030, 1, 128, 1, 7},
    {4, 1, 3, 1, 1030, 1, 176, 1, 3, 256},
    {3, 2, 4, 2, 514, 1, 176, 3, 5},
    {2, 1, 2, 2, 100, 0, 128, 1, 8},
    {1, 1, 1, 1, 7, 1, 128, 1, 1},
};

static struct prs_attention_schedule schedule_of(const struct row *r, uint32_t rank)
{
    struct prs_attention_slice slice = {r->batch, r->heads_q, r->heads_kv, r->causal, r->rows, 1};
    struct prs_attention_schedule s = {.tile_rows = r->tile != 0 ? r->tile : 128,
                                       .block_rows = r->block,
                                       .group = r->group,
                                       .depth = 2,
                                       .chunk_rows = 32,
                                       .slab_chunks = 4};
    prs_attention_schedule_init(&s, rank, r->world, &slice);
    return s;
}

static struct prs_attention_deal deal_of(const struct prs_attention_schedule *s, uint32_t ctas)
{
    struct prs_attention_deal deal;
    cr_assert_eq(prs_attention_deal_init(&deal, s, ctas), 0);
    return deal;
}

/* Any number of its own. */
static uint32_t number_of(const struct prs_attention_schedule *s, const struct prs_attention_task *t)
{
    return ((t->batch * s->heads_q + t->head) * s->segments + t->segment) * s->tiles + t->tile;
}

/* How many steps of its task come before the piece. */
static uint32_t first_of(const struct prs_attention_schedule *s, const struct prs_attention_piece *p)
{
    struct prs_attention_walk w;
    uint32_t first = p->begin.block;
    for (uint32_t span = 0; span < p->begin.span; span++) {
        prs_attention_enter(s, &p->task, &w, span);
        first += w.blocks;
    }
    return first;
}

#define FOR_ALL_SHAPES(claim)                                                                                          \
    ParameterizedTestParameters(attention_deal, claim)                                                                 \
    {                                                                                                                  \
        return cr_make_param_array(struct row, shapes, sizeof(shapes) / sizeof(shapes[0]));                            \
    }                                                                                                                  \
    ParameterizedTest(struct row *row, attention_deal, claim)

FOR_ALL_SHAPES(every_step_of_every_task_is_in_one_piece)
{
    for (uint32_t rank = 0; rank < row->world; rank++) {
        struct prs_attention_schedule s = schedule_of(row, rank);
        struct prs_attention_deal deal = deal_of(&s, row->ctas);
        uint32_t *steps = calloc(s.tasks, sizeof(*steps)), *ends = calloc(s.tasks, sizeof(*ends));
        for (uint32_t i = 0; i < deal.pieces_count; i++) {
            const struct prs_attention_piece *p = &deal.pieces[i];
            uint32_t task = number_of(&s, &p->task), end = first_of(&s, p) + p->begin.left;
            cr_assert(task < s.tasks && p->begin.left > 0);
            steps[task] += p->begin.left;
            ends[task] = end > ends[task] ? end : ends[task];
        }
        for (uint32_t i = 0; i < s.tasks; i++) {
            struct prs_attention_task t;
            prs_attention_task_at(&s, i, &t);
            cr_assert_eq(steps[number_of(&s, &t)], prs_attention_blocks(&s, &t));
            cr_assert_eq(ends[number_of(&s, &t)], prs_attention_blocks(&s, &t));
        }
        free(steps);
        free(ends);
        prs_attention_deal_fini(&deal);
    }
}

/* Credit for a group waits for its pieces only: all of them are claimed before those of later groups. */
FOR_ALL_SHAPES(pieces_are_claimed_in_the_order_in_which_groups_arrive)
{
    struct prs_attention_schedule s = schedule_of(row, 0);
    struct prs_attention_deal deal = deal_of(&s, row->ctas);
    uint32_t at = 0;
    for (uint32_t group = 0; group < s.groups; group++) {
        cr_assert_gt(deal.pieces_of[group], 0);
        for (uint32_t end = at + deal.pieces_of[group]; at < end; at++)
            cr_assert_eq(deal.pieces[at].task.group, group);
    }
    cr_assert_eq(at, deal.pieces_count);
    prs_attention_deal_fini(&deal);
}

/* A launch that is smaller than its plan is dealt as a plan of its size, from the cuts alone. */
FOR_ALL_SHAPES(smaller_launches_are_dealt_as_plans_of_their_size)
{
    static const uint32_t eighths[] = {1, 3, 8};
    for (uint32_t i = 0; i < 3; i++) {
        struct row smaller = *row;
        struct prs_attention_schedule plan = schedule_of(row, 0), own, s;
        struct prs_attention_deal deal;
        struct prs_attention_piece *pieces;
        struct prs_attention_part parts[300];
        smaller.rows = row->rows * eighths[i] / 16 * 2 + 2; /* divided by two chunks */
        smaller.rows = smaller.rows < row->rows ? smaller.rows : row->rows;
        smaller.batch = row->batch - (row->batch - 1) * i / 2;
        own = schedule_of(&smaller, 0);
        s = prs_attention_smaller(&plan, false, smaller.batch, smaller.rows);
        deal = deal_of(&own, row->ctas);
        cr_assert(s.tasks == own.tasks && s.slabs == own.slabs && s.tasks <= plan.tasks && s.slabs <= plan.slabs);
        cr_assert_leq(deal.parts_count, prs_attention_deal_most_parts(row->ctas));
        pieces = calloc(deal.pieces_count, sizeof(*pieces));
        for (uint32_t task = 0; task < s.tasks; task++)
            prs_attention_lay_task(&s, deal.cuts, deal.parts_count, task, pieces, parts);
        cr_assert_arr_eq(pieces, deal.pieces, deal.pieces_count * sizeof(*pieces));
        cr_assert(deal.parts_count == 0 || memcmp(parts, deal.parts, deal.parts_count * sizeof(*parts)) == 0);
        for (uint32_t group = 0; group < s.groups; group++)
            cr_assert_eq(prs_attention_group_pieces(&s, deal.cuts, deal.parts_count, group), deal.pieces_of[group]);
        free(pieces);
        prs_attention_deal_fini(&deal);
    }
}

/* The time, in steps, when each CTA claims its next piece when it has finished one. */
static uint64_t time_of(const struct prs_attention_deal *deal, uint32_t ctas, uint32_t *idle)
{
    uint64_t *load = calloc(ctas, sizeof(*load)), most = 0;
    for (uint32_t i = 0; i < deal->pieces_count; i++) {
        uint32_t free = 0;
        for (uint32_t cta = 1; cta < ctas; cta++)
            free = load[cta] < load[free] ? cta : free;
        load[free] += deal->pieces[i].begin.left + 2;
        most = load[free] > most ? load[free] : most;
    }
    for (uint32_t cta = 0; cta < ctas && idle; cta++)
        *idle += load[cta] == 0;
    free(load);
    return most;
}

FOR_ALL_SHAPES(ctas_that_claim_end_when_the_deal_says)
{
    struct prs_attention_schedule s = schedule_of(row, 0);
    struct prs_attention_deal deal = deal_of(&s, row->ctas);
    cr_assert_eq(time_of(&deal, row->ctas, NULL), deal.most);
    prs_attention_deal_fini(&deal);
}

/* A foreign kernel holds 16 of 132 SMs: the other SMs take over its part, except for the unevenness of the last
 * tasks. */
Test(attention_deal, fewer_ctas_take_over_the_work)
{
    for (uint32_t i = 0; i < 10; i++) {
        struct prs_attention_schedule s = schedule_of(&shapes[i], 0);
        struct prs_attention_deal deal = deal_of(&s, 132);
        double even = (double)deal.mean * 132 / 116, took = (double)time_of(&deal, 116, NULL);
        cr_log_info("shape %u: %.3f of an even share\n", i, took / even);
        cr_assert(took < 1.06 * even, "shape %u: %.3f", i, took / even);
        prs_attention_deal_fini(&deal);
    }
}

/* A row whose first step has only masked keys would have no maximum. */
FOR_ALL_SHAPES(every_row_sees_the_first_key_of_its_piece)
{
    for (uint32_t rank = 0; rank < row->world; rank++) {
        struct prs_attention_schedule s = schedule_of(row, rank);
        struct prs_attention_deal deal = deal_of(&s, row->ctas);
        for (uint32_t i = 0; i < deal.pieces_count; i++) {
            const struct prs_attention_piece *p = &deal.pieces[i];
            cr_assert_gt(prs_attention_limit(&s, &p->begin, p->task.tile * s.tile_rows), 0, "span %u, block %u",
                         p->begin.span, p->begin.block);
        }
        prs_attention_deal_fini(&deal);
    }
}

FOR_ALL_SHAPES(parts_of_a_task_know_each_other)
{
    struct prs_attention_schedule s = schedule_of(row, 0);
    struct prs_attention_deal deal = deal_of(&s, row->ctas);
    uint32_t *task = calloc(deal.parts_count + 1, sizeof(*task)), *count = calloc(s.tasks, sizeof(*count));
    for (uint32_t i = 0; i < deal.pieces_count; i++) {
        const struct prs_attention_piece *p = &deal.pieces[i];
        count[number_of(&s, &p->task)]++;
        if (p->part == 0)
            continue;
        cr_assert_leq(p->part, deal.parts_count);
        cr_assert_eq(task[p->part - 1], 0, "part %u twice", p->part);
        task[p->part - 1] = number_of(&s, &p->task) + 1;
    }
    for (uint32_t i = 0; i < deal.pieces_count; i++) {
        const struct prs_attention_piece *p = &deal.pieces[i];
        uint32_t number = number_of(&s, &p->task);
        cr_assert_eq(p->part == 0, count[number] == 1);
        if (p->part == 0)
            continue;
        cr_assert_eq(deal.parts[p->part - 1].parts, count[number]);
        for (uint32_t x = 0; x < count[number]; x++)
            cr_assert_eq(task[deal.parts[p->part - 1].first + x], number + 1);
    }
    free(task);
    free(count);
    prs_attention_deal_fini(&deal);
}

Test(attention_deal, all_ctas_get_the_same_work_within_a_few_percent)
{
    static const double allowed[] = {1.03, 1.01, 1.04, 1.01, 1.01, 1.02, 1.025, 1.01, 1.01, 1.01};
    for (uint32_t i = 0; i < sizeof(allowed) / sizeof(allowed[0]); i++)
        for (uint32_t rank = 0; rank < shapes[i].world; rank++) {
            struct prs_attention_schedule s = schedule_of(&shapes[i], rank);
            struct prs_attention_deal deal = deal_of(&s, shapes[i].ctas);
            cr_log_info("shape %u rank %u: mean %llu most %llu (%.3f), %u pieces of %u tasks, %u parts\n", i, rank,
                        (unsigned long long)deal.mean, (unsigned long long)deal.most,
                        (double)deal.most / (double)deal.mean, deal.pieces_count, s.tasks, deal.parts_count);
            cr_assert((double)deal.most <= allowed[i] * (double)deal.mean, "shape %u rank %u: %llu of %llu", i, rank,
                      (unsigned long long)deal.most, (unsigned long long)deal.mean);
            prs_attention_deal_fini(&deal);
        }
}

/* The shapes with which the emulator's test checks merging (test/hopper/test_attention.c). */
Test(attention_deal, what_does_not_go_round_is_cut)
{
    static struct row cut[] = {{1, 1, 1, 1, 1100, 0, 176, 1, 4},      {2, 1, 1, 1, 500, 1, 128, 1, 4},
                               {2, 1, 3, 3, 450, 1, 176, 1, 4},       {2, 1, 1, 1, 650, 0, 176, 1, 4},
                               {1, 1, 1, 1, 1100, 0, 176, 1, 2, 256}, {2, 1, 1, 1, 500, 1, 128, 1, 2, 256},
                               {2, 1, 3, 3, 450, 1, 176, 1, 2, 256},  {2, 1, 1, 1, 650, 0, 176, 1, 2, 256}};
    for (uint32_t i = 0; i < sizeof(cut) / sizeof(cut[0]); i++) {
        struct prs_attention_schedule s = schedule_of(&cut[i], 0);
        struct prs_attention_deal deal = deal_of(&s, cut[i].ctas);
        cr_expect_gt(deal.parts_count, 1, "shape %u", i);
        prs_attention_deal_fini(&deal);
    }
}

Test(attention_deal, few_tasks_are_spread_over_many_ctas)
{
    struct row one = {1, 1, 1, 1, 128 * 16, 0, 128, 1, 64};
    struct prs_attention_schedule s = schedule_of(&one, 0);
    struct prs_attention_deal deal = deal_of(&s, one.ctas);
    uint32_t idle = 0;
    (void)time_of(&deal, one.ctas, &idle);
    cr_assert_eq(s.tasks, 16);
    cr_assert_eq(idle, 0, "16 tasks of 16 steps feed 64 CTAs");
    prs_attention_deal_fini(&deal);
}
