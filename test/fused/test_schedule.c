/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <stdlib.h>

#include "fused/gemm/schedule.h"

struct row {
    uint32_t op, world, nodes, m, n, k, band, segments;
};

static struct row shapes[] = {
    {PRS_GEMM_ALONE, 1, 1, 4096, 4096, 4096, 8},
    {PRS_GEMM_ALONE, 1, 1, 100, 40, 8, 8},
    {PRS_GEMM_REDUCE_SCATTER, 2, 1, 512, 256, 64, 1},
    {PRS_GEMM_REDUCE_SCATTER, 4, 1, 4000, 1384, 264, 3},
    {PRS_GEMM_REDUCE_SCATTER, 4, 1, 13312, 512, 64, 5},
    {PRS_GEMM_REDUCE_SCATTER, 8, 1, 16384, 264, 128, 4},
    {PRS_GEMM_REDUCE_SCATTER, 3, 1, 7680, 1024, 192, 2},
    {PRS_GEMM_ALLREDUCE, 4, 1, 8192, 8192, 2048, 1},
    {PRS_GEMM_ALLREDUCE, 5, 1, 5 * 3000, 520, 72, 4},
    {PRS_GEMM_ALLGATHER, 2, 1, 600, 512, 520, 1},
    {PRS_GEMM_ALLGATHER, 4, 1, 4000, 2752, 4104, 3},
    {PRS_GEMM_ALLGATHER, 8, 1, 8 * 2816, 264, 264, 4},
    {PRS_GEMM_ALLGATHER, 4, 1, 4000, 2752, 4104, 3, 1},
    {PRS_GEMM_ALLGATHER, 5, 1, 5 * 2816, 520, 264, 2, 3},
    /* several nodes */
    {PRS_GEMM_REDUCE_SCATTER, 4, 2, 4096, 1024, 64, 2},
    {PRS_GEMM_REDUCE_SCATTER, 4, 2, 4000, 1384, 264, 3},
    {PRS_GEMM_REDUCE_SCATTER, 3, 3, 3 * 1280, 512, 64, 1},
    {PRS_GEMM_REDUCE_SCATTER, 12, 3, 12 * 1536, 264, 64, 4},
    {PRS_GEMM_ALLREDUCE, 16, 2, 16 * 700, 520, 72, 1},
    {PRS_GEMM_ALLREDUCE, 6, 3, 6 * 256, 256, 64, 1},
    {PRS_GEMM_ALLGATHER, 4, 2, 4000, 2752, 4104, 3},
    {PRS_GEMM_ALLGATHER, 2, 2, 600, 512, 520, 1},
    {PRS_GEMM_ALLGATHER, 12, 3, 12 * 1100, 264, 264, 2},
};

static struct prs_schedule schedule_of(const struct row *r, uint32_t rank)
{
    struct prs_schedule s;
    prs_schedule_init(&s, r->op, rank, r->world, r->nodes, r->m, prs_ceil_div(r->n, PRS_TILE_N),
                      prs_ceil_div(r->k, PRS_STAGE_ROW / 2), r->band);
    s.segments = r->segments;
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
            cr_assert(u.block < s.place.world && u.pair < s.pairs && u.column < s.columns,
                      "unit %u of rank %u is outside", i, rank);
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

/* A cluster reads every 66th position; another role may read every one. */
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

ParameterizedTestParameters(schedule, whatever_is_added_up_was_sent_in_an_earlier_round)
{
    return cr_make_param_array(struct row, shapes, sizeof(shapes) / sizeof(shapes[0]));
}

/* [block][pair]: 1 plus the round in which this rank computes the pair; 0: it does not. */
static uint32_t *rounds_of(const struct prs_schedule *s)
{
    uint32_t *rounds = calloc((size_t)s->place.world * s->pairs, sizeof(*rounds));
    struct prs_cursor cursor = {0, 0};
    for (uint32_t i = 0; i < s->units; i++) {
        struct prs_unit u;
        prs_schedule_unit(s, &cursor, i, &u);
        rounds[u.block * s->pairs + u.pair] = cursor.round + 1;
    }
    return rounds;
}

/* Why ranks cannot wait in a circle: the unit that another unit waits for is in an earlier round of the sender's list.
 * In that round a rank of this node sends it, and a rank of another node relays it. */
ParameterizedTest(struct row *row, schedule, whatever_is_added_up_was_sent_in_an_earlier_round)
{
    uint32_t *rounds[16];
    if (row->op != PRS_GEMM_REDUCE_SCATTER && row->op != PRS_GEMM_ALLREDUCE)
        return;
    for (uint32_t rank = 0; rank < row->world; rank++) {
        struct prs_schedule s = schedule_of(row, rank);
        rounds[rank] = rounds_of(&s);
    }
    for (uint32_t rank = 0; rank < row->world; rank++) {
        struct prs_schedule s = schedule_of(row, rank);
        for (uint32_t at = 0; at < row->world * s.pairs; at++) {
            uint32_t block = at / s.pairs, part = prs_schedule_part(&s, block);
            for (uint32_t i = 0; part != PRS_PART_SEND && i < prs_schedule_sources(&s, block); i++) {
                struct prs_source from = prs_schedule_source(&s, block, i);
                struct prs_schedule sender = schedule_of(row, from.rank);
                cr_assert_eq(prs_schedule_part(&sender, block), from.far ? PRS_PART_RELAY : PRS_PART_SEND);
                cr_assert_eq(from.far, sender.place.node != s.place.node);
                cr_assert(rounds[from.rank][at] != 0 && rounds[from.rank][at] < rounds[rank][at],
                          "rank %u adds up block %u pair %u in round %u, rank %u sends it in %u", rank, block,
                          at % s.pairs, rounds[rank][at], from.rank, rounds[from.rank][at]);
            }
        }
    }
    for (uint32_t rank = 0; rank < row->world; rank++)
        free(rounds[rank]);
}

ParameterizedTestParameters(schedule, every_partial_sum_has_a_place_of_its_own)
{
    return cr_make_param_array(struct row, shapes, sizeof(shapes) / sizeof(shapes[0]));
}

/* Writers and readers agree where sums are, no two share a slot, and each rank's sum is in each result once. */
ParameterizedTest(struct row *row, schedule, every_partial_sum_has_a_place_of_its_own)
{
    if (row->op != PRS_GEMM_REDUCE_SCATTER && row->op != PRS_GEMM_ALLREDUCE)
        return;
    for (uint32_t rank = 0; rank < row->world; rank++) {
        struct prs_schedule s = schedule_of(row, rank);
        uint64_t taken = 0, added[16] = {0};
        for (uint32_t block = 0; block < row->world; block++) {
            uint32_t part = prs_schedule_part(&s, block), slots[16], count = 0;
            for (uint32_t i = 0; part != PRS_PART_SEND && i < prs_schedule_sources(&s, block); i++) {
                struct prs_source from = prs_schedule_source(&s, block, i);
                struct prs_schedule sender = schedule_of(row, from.rank);
                cr_assert_eq(from.slot, from.far ? prs_schedule_arrive_slot(&sender, sender.place.node, s.place.node)
                                                 : prs_schedule_send_slot(&sender, from.rank, block));
                slots[count++] = from.slot;
            }
            if (part == PRS_PART_RELAY)
                slots[count++] = prs_schedule_relay_slot(&s, block / s.place.local_ranks);
            for (uint32_t i = 0; i < count; i++) {
                cr_assert(slots[i] < prs_schedule_slots(&s) && !(taken >> slots[i] & 1), "slot %u of rank %u", slots[i],
                          rank);
                taken |= 1ull << slots[i];
            }
        }
        /* This rank's block: sums of this node's ranks come directly, those of every other node through its
         * counterpart. */
        for (uint32_t i = 0; i < prs_schedule_sources(&s, rank); i++) {
            struct prs_source from = prs_schedule_source(&s, rank, i);
            struct prs_schedule sender = schedule_of(row, from.rank);
            added[from.rank]++;
            for (uint32_t j = 0; from.far && j < prs_schedule_sources(&sender, rank); j++)
                added[prs_schedule_source(&sender, rank, j).rank]++;
        }
        for (uint32_t other = 0; other < row->world; other++)
            cr_assert_eq(added[other], other != rank, "rank %u's sums come %d times to rank %u", other,
                         (int)added[other], rank);
    }
}

ParameterizedTestParameters(schedule, signals_stand_for_every_piece_once_and_never_for_two_bands)
{
    return cr_make_param_array(struct row, shapes, sizeof(shapes) / sizeof(shapes[0]));
}

ParameterizedTest(struct row *row, schedule, signals_stand_for_every_piece_once_and_never_for_two_bands)
{
    struct prs_schedule s = schedule_of(row, 0);
    for (s.group = 1; s.group < 5000; s.group = s.group * 3 + 1) {
        uint32_t groups = prs_schedule_groups(&s), *pieces = calloc(groups, sizeof(*pieces));
        uint32_t *want = calloc(groups, sizeof(*want)), *band_of = calloc(groups, sizeof(*band_of));
        for (uint32_t tile = 0; tile < prs_schedule_piece_rows(&s); tile++)
            for (uint32_t lane = 0; lane < prs_schedule_lanes(&s); lane++) {
                struct prs_piece_group g = prs_schedule_group(&s, tile, lane);
                uint32_t band = tile / 2 / s.band + 1;
                cr_assert(g.index < groups && g.pieces >= 1 && g.pieces <= s.group, "tile %u lane %u", tile, lane);
                cr_assert(band_of[g.index] == 0 || band_of[g.index] == band, "group %u is of two bands", g.index);
                cr_assert(want[g.index] == 0 || want[g.index] == g.pieces, "group %u has two sizes", g.index);
                band_of[g.index] = band, want[g.index] = g.pieces;
                pieces[g.index]++;
            }
        for (uint32_t i = 0; i < groups; i++)
            cr_assert_eq(pieces[i], want[i], "group %u of %u pieces, %u in a group", i, want[i], s.group);
        free(pieces);
        free(want);
        free(band_of);
    }
}

ParameterizedTestParameters(schedule, tiles_of_a_group_lie_together_and_every_place_is_taken_once)
{
    return cr_make_param_array(struct row, shapes, sizeof(shapes) / sizeof(shapes[0]));
}

ParameterizedTest(struct row *row, schedule, tiles_of_a_group_lie_together_and_every_place_is_taken_once)
{
    struct prs_schedule s = schedule_of(row, 0);
    if (s.op == PRS_GEMM_ALLGATHER)
        return;
    for (s.group = 1; s.group < 5000; s.group = s.group * 3 + 1) {
        uint8_t *taken = calloc(prs_schedule_tiles(&s), 1);
        for (uint32_t tile = 0; tile < prs_schedule_tiles(&s); tile++) {
            struct prs_piece_group g = prs_schedule_group(&s, tile / s.columns, tile % s.columns);
            uint32_t place = prs_schedule_tile_place(&s, tile), first = prs_schedule_group_place(&s, &g);
            cr_assert(place < prs_schedule_tiles(&s) && !taken[place]++, "tile %u: place %u", tile, place);
            cr_assert(s.place.nodes == 1 || (place >= first && place < first + g.pieces),
                      "tile %u: %u, group of %u from %u", tile, place, g.pieces, first);
        }
        free(taken);
    }
}

ParameterizedTestParameters(schedule, every_chunk_of_every_counterpart_is_forwarded_once)
{
    return cr_make_param_array(struct row, shapes, sizeof(shapes) / sizeof(shapes[0]));
}

ParameterizedTest(struct row *row, schedule, every_chunk_of_every_counterpart_is_forwarded_once)
{
    struct prs_schedule s = schedule_of(row, row->world - 1);
    uint32_t chunks = prs_schedule_chunks(&s), rows = prs_ceil_div(s.block_rows, PRS_PUSH_ROWS);
    uint8_t *seen = calloc((size_t)s.place.world * rows, s.k_steps);
    for (uint32_t at = 0; at < (s.place.nodes - 1) * chunks; at++) {
        struct prs_chunk c;
        uint32_t block = prs_schedule_forward(&s, at, &c);
        cr_assert(block / s.place.local_ranks != s.place.node && block % s.place.local_ranks == s.place.local_rank,
                  "block %u is not a counterpart's", block);
        cr_assert(seen[((size_t)block * rows + c.row / PRS_PUSH_ROWS) * s.k_steps + c.step]++ == 0);
    }
    free(seen);
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

static struct row copied[] = {{PRS_GEMM_ALLGATHER, 4, 1, 4 * 1300, 300, 640, 1, 2},
                              {PRS_GEMM_ALLGATHER, 3, 1, 3 * 1300, 600, 640, 4, 3},
                              {PRS_GEMM_ALLGATHER, 8, 1, 8 * 256, 520, 64, 1, 1},
                              {PRS_GEMM_ALLGATHER, 2, 1, 2 * 700, 520, 640, 3, 10}};

ParameterizedTestParameters(schedule, copies_come_in_the_order_in_which_units_need_them)
{
    return cr_make_param_array(struct row, copied, sizeof(copied) / sizeof(copied[0]));
}

/* In another order a wave of units waits for its last rows, although more rows of other units have come than it can
 * use: 511 us instead of 411 (4 GPUs, 8192). All ranks send at the same time, so a piece arrives at its turn in the
 * sender's list. */
ParameterizedTest(struct row *row, schedule, copies_come_in_the_order_in_which_units_need_them)
{
    struct prs_schedule s = schedule_of(row, 1);
    struct prs_cursor cursor = {0, 0};
    uint32_t *turn = calloc(prs_schedule_segment_flag(&s, s.place.world, 0, 0), sizeof(*turn)), before = 0, units = 0;
    for (uint32_t rank = 0; rank < s.place.world; rank++) {
        struct prs_schedule sender = schedule_of(row, rank);
        for (uint32_t at = 0; at < prs_schedule_copies(&sender); at++) {
            struct prs_copy c;
            prs_schedule_copy(&sender, at, &c);
            cr_assert(c.distance > 0 && c.distance < s.place.world && c.band < s.bands && c.segment < s.segments);
            if ((rank + c.distance) % s.place.world != s.place.rank)
                continue;
            cr_assert_eq(
                turn[prs_schedule_segment_flag(&s, prs_schedule_slot(&s, rank, s.place.rank), c.band, c.segment)], 0,
                "a piece is copied twice");
            turn[prs_schedule_segment_flag(&s, prs_schedule_slot(&s, rank, s.place.rank), c.band, c.segment)] = at + 1;
        }
    }
    for (uint32_t i = 0; i < s.units; i++) {
        struct prs_unit u;
        prs_schedule_unit(&s, &cursor, i, &u);
        for (uint32_t segment = 0; u.block != s.place.rank && segment < s.segments; segment++) {
            uint32_t now = turn[prs_schedule_segment_flag(&s, prs_schedule_slot(&s, u.block, s.place.rank),
                                                          u.pair / s.band, segment)];
            cr_assert_gt(now, segment == 0 ? 0 : before, "unit %u: segments come in order", i);
            cr_assert(segment != 0 || now + s.segments > before, "unit %u needs copy %u, an earlier one %u", i, now,
                      before);
            before = now;
            units++;
        }
    }
    cr_assert_eq(units, (s.place.world - 1) * s.pairs * s.columns * s.segments);
    free(turn);
}

Test(schedule, slots_of_one_owner_are_all_different)
{
    for (uint32_t world = 2; world <= 8; world++) {
        for (uint32_t owner = 0; owner < world; owner++) {
            struct prs_schedule s;
            uint32_t seen = 0;
            prs_schedule_init(&s, PRS_GEMM_REDUCE_SCATTER, owner, world, 1, world * 256, 1, 1, 1);
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
