/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <stdlib.h>
#include <string.h>

#include "fused/attention/schedule.h"

struct row {
    uint32_t world, batch, heads_q, heads_kv, rows, causal; /* rows: of a rank's slice */
    uint32_t tile, block, group, depth, chunk, slab_chunks;
    uint32_t nodes; /* 0: one */
};

static struct row shapes[] = {
    {1, 1, 1, 1, 128, 0, 128, 128, 1, 1, 32, 4},   {1, 2, 3, 3, 300, 0, 128, 176, 2, 9, 32, 4},
    {1, 1, 4, 2, 333, 1, 128, 128, 1, 9, 64, 2},   {2, 1, 2, 1, 200, 0, 192, 128, 1, 9, 64, 2},
    {2, 2, 4, 2, 260, 1, 128, 128, 3, 2, 32, 4},   {4, 1, 4, 4, 96, 0, 128, 176, 2, 2, 32, 1},
    {4, 2, 6, 2, 130, 1, 128, 128, 1, 2, 32, 2},   {4, 1, 2, 2, 514, 1, 192, 128, 2, 1, 64, 8},
    {3, 1, 3, 3, 70, 1, 128, 176, 2, 2, 32, 16},   {8, 1, 2, 1, 34, 1, 128, 128, 1, 1, 32, 1},
    {4, 1, 2, 2, 96, 0, 128, 176, 1, 2, 32, 1, 2}, {6, 1, 2, 1, 60, 1, 128, 128, 1, 2, 32, 2, 3},
    {5, 3, 2, 2, 177, 0, 128, 176, 4, 2, 32, 3},   {4, 1, 3, 1, 1030, 1, 256, 176, 1, 2, 64, 8},
};

static struct prs_attention_schedule schedule_of(const struct row *r, uint32_t rank)
{
    struct prs_attention_slice slice = {r->batch, r->heads_q, r->heads_kv, r->causal, r->rows, r->nodes};
    struct prs_attention_schedule s = {.tile_rows = r->tile,
                                       .block_rows = r->block,
                                       .group = r->group,
                                       .depth = r->depth,
                                       .chunk_rows = r->chunk,
                                       .slab_chunks = r->slab_chunks};
    prs_attention_schedule_init(&s, rank, r->world, &slice);
    return s;
}

/* Position in the whole sequence of the first row of a segment. */
static uint32_t begin_of(const struct prs_attention_schedule *s, uint32_t rank, uint32_t segment)
{
    return prs_attention_chunk(s, rank, segment) * s->segment_rows;
}

#define FOR_ALL_SHAPES(claim)                                                                                          \
    ParameterizedTestParameters(attention_schedule, claim)                                                             \
    {                                                                                                                  \
        return cr_make_param_array(struct row, shapes, sizeof(shapes) / sizeof(shapes[0]));                            \
    }                                                                                                                  \
    ParameterizedTest(struct row *row, attention_schedule, claim)

FOR_ALL_SHAPES(every_tile_of_every_head_is_one_task)
{
    struct prs_attention_schedule s = schedule_of(row, row->world - 1);
    uint8_t *seen = calloc(s.tasks, 1);
    uint32_t group = 0;
    for (uint32_t i = 0; i < s.tasks; i++) {
        struct prs_attention_task t;
        uint32_t at;
        prs_attention_task_at(&s, i, &t);
        cr_assert(t.group >= group, "group %u comes after %u", t.group, group);
        group = t.group;
        cr_assert_eq(t.pair / s.group, t.group);
        cr_assert_eq(t.pair, t.batch * s.heads_kv + t.head / s.heads_per_kv, "head %u reads pair %u", t.head, t.pair);
        at = ((t.batch * s.heads_q + t.head) * s.segments + t.segment) * s.tiles + t.tile;
        cr_assert(at < s.tasks && seen[at]++ == 0, "tile %u of segment %u of head %u comes twice", t.tile, t.segment,
                  t.head);
    }
    free(seen);
}

/* Counts in `met` how often one query row meets each position of the sequence. */
static void walk_row(const struct prs_attention_schedule *s, const struct prs_attention_task *t, uint32_t row,
                     uint8_t *met)
{
    struct prs_attention_walk w;
    bool first = true;
    prs_attention_begin(s, t, &w, 0, prs_attention_blocks(s, t));
    do {
        uint32_t source = prs_place_in_order(&s->place, w.span / s->segments);
        int32_t limit = prs_attention_limit(s, &w, row);
        uint32_t from = begin_of(s, source, w.span % s->segments) + w.block * s->block_rows;
        cr_assert(!first || limit > 0, "row %u sees nothing in its first block", row);
        for (int32_t i = 0; i < limit && i < (int32_t)s->block_rows; i++)
            met[from + (uint32_t)i]++;
        first = false;
    } while (prs_attention_next(s, t, &w));
}

FOR_ALL_SHAPES(a_query_meets_every_key_that_it_may_look_at_once)
{
    for (uint32_t rank = 0; rank < row->world; rank++) {
        struct prs_attention_schedule s = schedule_of(row, rank);
        uint32_t all = row->rows * row->world, last = s.tasks < 40 ? s.tasks : 40;
        uint8_t *met = malloc(all);
        for (uint32_t i = 0; i < last; i++) {
            struct prs_attention_task t;
            prs_attention_task_at(&s, i, &t);
            for (uint32_t r = t.tile * s.tile_rows; r < (t.tile + 1) * s.tile_rows && r < s.segment_rows; r += 13) {
                uint32_t me = begin_of(&s, rank, t.segment) + r;
                memset(met, 0, all);
                walk_row(&s, &t, r, met);
                for (uint32_t key = 0; key < all; key++)
                    cr_assert_eq(met[key], s.causal == 0 || key <= me, "rank %u: position %u meets %u %u times", rank,
                                 me, key, met[key]);
            }
        }
        free(met);
    }
}

/* Rows of one (order of the receiver `distance` before this rank, pair, kind, segment) that this rank sends. */
static uint32_t *count_messages(const struct prs_attention_schedule *s, uint32_t distance, uint32_t *arrived)
{
    uint32_t *sent = calloc((size_t)(s->place.world + 1) * s->pairs * 2 * s->segments, sizeof(*sent)), turn = 0;
    for (uint32_t i = 0; i < prs_attention_messages(s); i++) {
        struct prs_attention_message m;
        uint32_t order;
        if (!prs_attention_message_at(s, i, &m))
            continue;
        cr_assert(m.turn >= turn && m.pair / s->group == m.group, "groups travel in order");
        cr_assert(m.turn == m.group ||
                      (m.way == 0 && m.distance == 0 && m.group <= m.turn + s->depth - 1 && m.group <= m.turn + 1),
                  "the own slice goes one group ahead, where there is room");
        turn = m.turn;
        cr_assert(m.rows > 0 && m.rows <= s->chunk_rows && m.row + m.rows <= s->segment_rows);
        if (m.distance != distance)
            continue;
        order = prs_attention_order(s, m.way, m.distance);
        sent[((order * s->pairs + m.pair) * 2 + m.kind) * s->segments + m.segment] += m.rows;
        arrived[prs_attention_arrival(s, order, m.pair, m.kind, m.segment, m.slab)]++;
    }
    return sent;
}

static bool any_task_looks(const struct prs_attention_schedule *s, uint32_t span)
{
    bool needed = false;
    for (uint32_t i = 0; i < s->tasks; i++) {
        struct prs_attention_task t;
        struct prs_attention_walk w;
        prs_attention_task_at(s, i, &t);
        prs_attention_enter(s, &t, &w, span);
        needed = needed || w.blocks != 0;
    }
    return needed;
}

/* What one rank of a node sends, or between nodes counts, for the rank `distance` before it. */
static void check_messages(const struct row *row, uint32_t rank, uint32_t distance)
{
    struct prs_attention_schedule s = schedule_of(row, rank), to;
    uint32_t *arrived = calloc(prs_attention_arrival(&s, row->world + 1, 0, 0, 0, 0), sizeof(*arrived));
    uint32_t *sent = count_messages(&s, distance, arrived);
    to = schedule_of(row, s.place.node * s.place.local_ranks +
                              (s.place.local_rank + s.place.local_ranks - distance) % s.place.local_ranks);
    for (uint32_t way = distance == 0 ? 1 : 0; way < s.place.nodes; way++) {
        for (uint32_t segment = 0; segment < s.segments; segment++) {
            uint32_t order = way * s.place.local_ranks + distance;
            bool needed = any_task_looks(&to, order * s.segments + segment);
            for (uint32_t x = 0; x < s.pairs * 2; x++)
                cr_assert_eq(sent[(order * s.pairs * 2 + x) * s.segments + segment], needed ? s.segment_rows : 0,
                             "rank %u sends segment %u of way %u to rank %u", rank, segment, way, to.place.rank);
            for (uint32_t x = 0; x < s.pairs * 2 * s.slabs && needed; x++) {
                uint32_t slab = x % s.slabs;
                uint32_t at = prs_attention_arrival(&s, order, x / s.slabs / 2, x / s.slabs % 2, segment, slab);
                cr_assert_eq(arrived[at], prs_attention_arrivals(&s, slab), "slab %u", slab);
            }
        }
    }
    free(sent);
    free(arrived);
}

FOR_ALL_SHAPES(what_travels_is_what_is_needed_and_fills_its_counters)
{
    uint32_t locals = row->world / (row->nodes == 0 ? 1 : row->nodes);
    for (uint32_t rank = 0; rank < row->world; rank++)
        for (uint32_t distance = row->nodes == 0 ? 1 : 0; distance < locals; distance++)
            check_messages(row, rank, distance);
}

FOR_ALL_SHAPES(what_is_held_at_the_same_time_lies_in_different_places)
{
    struct prs_attention_schedule s = schedule_of(row, 0);
    uint32_t stages = prs_attention_stages(&s);
    for (uint32_t first = 0; first + s.depth <= s.groups && s.place.world > 1; first++) {
        uint8_t *used = calloc(stages, 1);
        for (uint32_t pair = first * s.group; pair < (first + s.depth) * s.group && pair < s.pairs; pair++)
            for (uint32_t d = 1; d <= prs_attention_slots(&s); d++)
                for (uint32_t x = 0; x < 2 * s.segments; x++) {
                    uint32_t at = prs_attention_stage(&s, d, pair, x % 2, x / 2);
                    cr_assert(at < stages && used[at]++ == 0, "place %u of %u twice", at, stages);
                }
        free(used);
    }
}

FOR_ALL_SHAPES(a_buffer_is_evicted_of_the_group_that_was_in_it_before)
{
    struct prs_attention_schedule s = schedule_of(row, 0);
    uint32_t *holds = malloc(s.depth * sizeof(*holds)), before = 0;
    memset(holds, 0xff, s.depth * sizeof(*holds)); /* nothing */
    for (uint32_t launch = 1; launch < 40; launch++) {
        uint32_t groups =
            1 + (launch * 7 + launch / 5) % s.groups; /* of a launch, which may be smaller than its plan */
        for (uint32_t group = 0; group < groups; group++) {
            bool earlier;
            uint32_t evicted, *in = &holds[group % s.depth];
            if (prs_attention_evicted(&s, group, before, &evicted, &earlier))
                cr_assert_eq((earlier ? launch - 1 : launch) * s.groups + evicted, *in, "group %u", group);
            else
                cr_assert(*in == UINT32_MAX || *in < (launch - 1) * s.groups, "group %u is of the launch before", *in);
            *in = launch * s.groups + group;
        }
        before = groups;
    }
    free(holds);
}

FOR_ALL_SHAPES(all_ranks_have_the_same_work)
{
    uint64_t least = UINT64_MAX, most = 0;
    for (uint32_t rank = 0; rank < row->world; rank++) {
        struct prs_attention_schedule s = schedule_of(row, rank);
        uint64_t rows = 0;
        for (uint32_t segment = 0; segment < s.segments; segment++)
            rows += s.causal != 0 ? prs_attention_chunk(&s, rank, segment) : 0;
        least = rows < least ? rows : least;
        most = rows > most ? rows : most;
    }
    cr_assert_eq(least, most);
}
