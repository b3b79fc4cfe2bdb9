/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/schedule.h"

#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <stdlib.h>

struct row {
    uint32_t kind, world, m, n, k, band, lag, in_turn;
};

static struct row shapes[] = {
    {PRS_KIND_GEMM, 1, 4096, 4096, 4096, 8, 1},          {PRS_KIND_GEMM, 1, 100, 40, 8, 8, 1},
    {PRS_KIND_REDUCE_SCATTER, 2, 512, 256, 64, 1, 1},    {PRS_KIND_REDUCE_SCATTER, 4, 4000, 1384, 264, 3, 1},
    {PRS_KIND_REDUCE_SCATTER, 4, 13312, 512, 64, 5, 2},  {PRS_KIND_REDUCE_SCATTER, 8, 16384, 264, 128, 4, 9},
    {PRS_KIND_REDUCE_SCATTER, 3, 7680, 1024, 192, 2, 3}, {PRS_KIND_ALLREDUCE, 4, 8192, 8192, 2048, 1, 1},
    {PRS_KIND_ALLREDUCE, 5, 5 * 3000, 520, 72, 4, 1},    {PRS_KIND_ALLGATHER, 2, 600, 512, 520, 1, 1},
    {PRS_KIND_ALLGATHER, 4, 4000, 2752, 4104, 3, 1},     {PRS_KIND_ALLGATHER, 8, 8 * 2816, 264, 264, 4, 1},
    {PRS_KIND_ALLGATHER, 4, 4000, 2752, 4104, 3, 1, 1},  {PRS_KIND_ALLGATHER, 5, 5 * 2816, 520, 264, 2, 1, 1},
};

static struct prs_schedule schedule_of(const struct row *r, uint32_t rank)
{
    struct prs_schedule s;
    prs_schedule_init(&s, r->kind, rank, r->world, r->m, r->n, r->k, r->band, r->lag);
    s.in_turn = r->in_turn;
    return s;
}

ParameterizedTestParameters(schedule, every_unit_comes_exactly_once)
{
    return cr_make_param_array(struct row, shapes, sizeof(shapes) / sizeof(shapes[0]));
}

ParameterizedTest(struct row *row, schedule, every_unit_comes_exactly_once)
{
    for (uint32_t rank = 0; rank < row->world; rank++) {
        struct prs_schedule s = schedule_of(row, rank);
        struct prs_cursor cursor = {0, 0};
        uint8_t *seen = calloc(s.units, 1);
        for (uint32_t i = 0; i < s.units; i++) {
            struct prs_unit u;
            uint32_t at;
            prs_schedule_unit(&s, &cursor, i, &u);
            cr_assert(u.block < s.world && u.pair < s.pairs && u.column < s.columns, "unit %u of rank %u is outside", i,
                      rank);
            at = (u.block * s.pairs + u.pair) * s.columns + u.column;
            cr_assert(seen[at]++ == 0, "rank %u meets block %u pair %u column %u twice", rank, u.block, u.pair,
                      u.column);
        }
        free(seen);
    }
}

ParameterizedTestParameters(schedule, a_cursor_that_skips_finds_the_same_units)
{
    return cr_make_param_array(struct row, shapes, sizeof(shapes) / sizeof(shapes[0]));
}

/* A cluster sees every 66th position, another role may see every one. */
ParameterizedTest(struct row *row, schedule, a_cursor_that_skips_finds_the_same_units)
{
    struct prs_schedule s = schedule_of(row, row->world - 1);
    for (uint32_t step = 2; step < 70; step += 17) {
        struct prs_cursor skipping = {0, 0};
        for (uint32_t i = step / 2; i < s.units; i += step) {
            struct prs_cursor fresh = {0, 0};
            struct prs_unit a, b;
            prs_schedule_unit(&s, &skipping, i, &a);
            prs_schedule_unit(&s, &fresh, i, &b);
            cr_assert(a.block == b.block && a.pair == b.pair && a.column == b.column, "position %u, step %u", i, step);
        }
    }
}

ParameterizedTestParameters(schedule, every_rank_sends_a_band_before_any_adds_it_up)
{
    return cr_make_param_array(struct row, shapes, sizeof(shapes) / sizeof(shapes[0]));
}

/* Why no rank can wait in a circle: what a unit waits for lies in an earlier round of the other rank's list. */
ParameterizedTest(struct row *row, schedule, every_rank_sends_a_band_before_any_adds_it_up)
{
    struct prs_schedule s = schedule_of(row, 0);
    struct prs_cursor cursor = {0, 0};
    uint32_t *sent_in;
    if (row->kind != PRS_KIND_REDUCE_SCATTER && row->kind != PRS_KIND_ALLREDUCE)
        return;
    sent_in = calloc(s.pairs, sizeof(*sent_in));
    for (uint32_t i = 0; i < s.units; i++) {
        struct prs_unit u;
        prs_schedule_unit(&s, &cursor, i, &u);
        if (u.block != s.rank)
            sent_in[u.pair] = cursor.round + 1;
        else
            cr_assert(sent_in[u.pair] != 0 && sent_in[u.pair] <= cursor.round,
                      "pair %u is added up in round %u, sent in %u", u.pair, cursor.round, sent_in[u.pair]);
    }
    free(sent_in);
}

ParameterizedTestParameters(schedule, chunks_cover_the_block_and_fill_their_counters)
{
    return cr_make_param_array(struct row, shapes, sizeof(shapes) / sizeof(shapes[0]));
}

ParameterizedTest(struct row *row, schedule, chunks_cover_the_block_and_fill_their_counters)
{
    struct prs_schedule s = schedule_of(row, 0);
    uint32_t strips = prs_schedule_strips(&s), chunks = prs_schedule_chunks(&s);
    uint32_t rows = prs_ceil_div(s.block_rows, PRS_PUSH_ROWS), *counters;
    uint8_t *seen = calloc((size_t)rows * s.k_steps, 1);
    counters = calloc((size_t)s.pairs * 2 * strips, sizeof(*counters));
    cr_assert_eq(chunks, rows * s.k_steps);
    for (uint32_t i = 0; i < chunks; i++) {
        struct prs_chunk c;
        prs_schedule_chunk(&s, i, &c);
        cr_assert(c.row < s.block_rows && c.step < s.k_steps, "chunk %u is outside", i);
        cr_assert(seen[c.row / PRS_PUSH_ROWS * s.k_steps + c.step]++ == 0, "chunk %u comes twice", i);
        counters[prs_schedule_arrival(&s, 0, c.row / PRS_TILE_M, c.step / PRS_STRIP_STEPS)]++;
    }
    for (uint32_t tile = 0; tile < s.pairs * 2; tile++)
        for (uint32_t strip = 0; strip < strips; strip++)
            cr_assert_eq(counters[prs_schedule_arrival(&s, 0, tile, strip)], prs_schedule_arrivals(&s, tile, strip),
                         "row tile %u, strip %u", tile, strip);
    free(counters);
    free(seen);
}

/* When every rank sends to the rank after it first, blocks arrive in the order of distance. */
Test(schedule, in_turn_the_nearest_rank_before_comes_first)
{
    struct row row = {PRS_KIND_ALLGATHER, 4, 4 * 700, 300, 64, 1, 1, 1};
    struct prs_schedule s = schedule_of(&row, 1);
    struct prs_cursor cursor = {0, 0};
    uint32_t block = s.pairs * s.columns;
    for (uint32_t i = 0; i < s.units; i++) {
        static const uint32_t order[] = {1, 0, 3, 2};
        struct prs_unit u;
        prs_schedule_unit(&s, &cursor, i, &u);
        cr_assert_eq(u.block, order[i / block], "unit %u is of block %u", i, u.block);
        cr_assert(u.block == s.rank || u.pair == i % block / s.columns, "unit %u is of pair %u: bands of one", i,
                  u.pair);
    }
}

Test(schedule, slots_of_one_owner_are_all_different)
{
    for (uint32_t world = 2; world <= 8; world++) {
        for (uint32_t owner = 0; owner < world; owner++) {
            struct prs_schedule s;
            uint32_t seen = 0;
            prs_schedule_init(&s, PRS_KIND_REDUCE_SCATTER, owner, world, world * 256, 256, 64, 1, 1);
            for (uint32_t sender = 0; sender < world; sender++)
                if (sender != owner)
                    seen |= 1u << prs_schedule_slot(&s, sender, owner);
            cr_assert_eq(seen, (1u << (world - 1)) - 1);
        }
    }
}

Test(schedule, flags_are_compared_across_the_wrap)
{
    cr_assert(prs_flag_reached(5, 5));
    cr_assert(prs_flag_reached(6, 5));
    cr_assert(!prs_flag_reached(4, 5));
    cr_assert(prs_flag_reached(3, 0xfffffff0u), "3 comes 19 after 0xfffffff0");
    cr_assert(!prs_flag_reached(0xfffffff0u, 3));
}
