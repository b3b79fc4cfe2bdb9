/* SPDX-License-Identifier: Apache-2.0 */
/* The schedule of the backward pass, over all worlds, nodes and ranks. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "fused/attention/backward/schedule.h"

enum { MOST_WORLD = 8 };

struct shape {
    uint32_t batch, heads_q, heads_kv, rows; /* rows: of a rank's slice */
    uint32_t tile, block, group;             /* group: KV heads */
};

static const struct shape shapes[] = {{1, 1, 1, 16, 16, 8, 1}, {2, 4, 2, 34, 16, 8, 1}, {1, 6, 2, 20, 8, 4, 2},
                                      {1, 3, 3, 50, 16, 8, 2}, {2, 2, 2, 2, 16, 8, 3},  {1, 4, 1, 48, 8, 16, 1}};

struct pass {
    struct prs_attention_schedule s;
    struct prs_backward_shape b;
};

static struct pass pass_of(const struct shape *x, uint32_t causal, uint32_t rank, uint32_t world, uint32_t nodes)
{
    struct prs_attention_slice slice = {x->batch, x->heads_q, x->heads_q, causal, x->rows, nodes};
    struct pass p = {.s = {.tile_rows = x->tile,
                           .block_rows = x->block,
                           .depth = 2,
                           .chunk_rows = 8,
                           .slab_chunks = 2,
                           .backwards = 1},
                     .b = {x->heads_kv, x->heads_q / x->heads_kv}};
    p.s.group = x->group * p.b.shared;
    prs_attention_schedule_init(&p.s, rank, world, &slice);
    return p;
}

static bool far_of(const struct pass *p)
{
    return p->s.place.nodes > 1;
}

typedef void claim_fn(const struct shape *x, const struct pass *p);

/* Every shape, causal or not, on every rank of every world, on as many nodes as divide it. */
static void for_all(claim_fn *claim)
{
    for (size_t i = 0; i < sizeof(shapes) / sizeof(*shapes); i++)
        for (uint32_t world = 1; world <= MOST_WORLD; world++)
            for (uint32_t at = 0; at < world * 2 * world; at++) {
                struct pass p;
                uint32_t nodes = at / (2 * world) + 1;
                if (world % nodes != 0)
                    continue;
                p = pass_of(&shapes[i], at & 1, at / 2 % world, world, nodes);
                claim(&shapes[i], &p);
            }
}

/* Position in the whole sequence of the first row of a segment, as the pass numbers it. */
static uint32_t begin_of(const struct pass *p, uint32_t rank, uint32_t segment)
{
    return prs_attention_chunk(&p->s, rank, prs_backward_segment(&p->s, segment)) * p->s.segment_rows;
}

static void every_own_tile_is_one_task(const struct shape *x, const struct pass *p)
{
    uint32_t tasks = prs_backward_tasks(&p->s, &p->b), group = 0;
    uint32_t ahead = p->s.causal && p->s.segments == 2 && !far_of(p) ? 1 : 0; /* far: two buffers are too few */
    uint8_t *seen = calloc(tasks, 1);
    cr_assert_eq(tasks, x->batch * p->b.heads * p->s.segments * p->s.tiles);
    for (uint32_t i = 0; i < tasks; i++) {
        struct prs_attention_task t;
        uint32_t at;
        prs_backward_task_at(&p->s, &p->b, i, &t);
        /* Two buffers: those of a group come before those of the group after the next. */
        cr_assert(t.group + ahead >= group, "group %u comes after %u", t.group, group);
        group = t.group > group ? t.group : group;
        cr_assert(t.pair / p->s.group == t.group && (t.pair + p->b.shared - 1) / p->s.group == t.group,
                  "a task reads another group's pairs");
        cr_assert_eq(t.pair / p->s.heads_kv, t.batch);
        cr_assert_eq(t.pair % p->s.heads_kv, t.head * p->b.shared);
        at = ((t.batch * p->b.heads + t.head) * p->s.segments + t.segment) * p->s.tiles + t.tile;
        cr_assert(at < tasks && seen[at]++ == 0, "tile %u of segment %u of head %u comes twice", t.tile, t.segment,
                  t.head);
    }
    free(seen);
}

Test(attention_backward, every_own_tile_is_one_task)
{
    for_all(every_own_tile_is_one_task);
}

/* Counts in met[stream head][position] how often one own row of a task meets each row of the stream. */
static void walk_row(const struct pass *p, const struct prs_attention_task *t, uint32_t row, uint32_t positions,
                     uint8_t *met)
{
    struct prs_attention_walk w;
    uint32_t steps = 0, left;
    prs_backward_begin(&p->s, &p->b, t, &w);
    left = w.left;
    do {
        uint32_t span = prs_backward_span(&p->s, &p->b, &w, far_of(p)), order = span / p->s.segments,
                 segment = span % p->s.segments;
        uint32_t source = prs_place_in_order(&p->s.place, order), head = prs_backward_pair(&p->b, t, &w) - t->pair;
        uint32_t first = w.block * p->s.block_rows, at = begin_of(p, source, segment) + first;
        struct prs_backward_range r = prs_backward_range(&p->s, &w, row);
        cr_assert(first < p->s.segment_rows, "a block beyond the segment");
        cr_assert(order == 0 || segment < prs_attention_interest(&p->s, source, p->s.place.rank),
                  "rank %u reads segment %u of rank %u, which does not travel", p->s.place.rank, segment, source);
        for (int32_t i = r.from < 0 ? 0 : r.from; i < r.to && i < (int32_t)p->s.block_rows; i++)
            met[head * positions + at + (uint32_t)i]++;
        steps++;
    } while (prs_backward_next(&p->s, &p->b, t, &w, far_of(p)));
    cr_assert_eq(steps, left);
}

/* A key meets the queries from its own position on. */
static void every_row_meets_what_it_may_once(const struct shape *x, const struct pass *p)
{
    uint32_t positions = x->rows * p->s.place.world, streams = p->b.shared;
    uint32_t tasks = prs_backward_tasks(&p->s, &p->b);
    uint8_t *met = malloc((size_t)positions * streams);
    for (uint32_t i = 0; i < tasks; i += tasks / 9 + 1) {
        struct prs_attention_task t;
        prs_backward_task_at(&p->s, &p->b, i, &t);
        for (uint32_t r = t.tile * x->tile; r < (t.tile + 1) * x->tile && r < p->s.segment_rows; r += 5) {
            uint32_t me = begin_of(p, p->s.place.rank, t.segment) + r;
            memset(met, 0, (size_t)positions * streams);
            walk_row(p, &t, r, positions, met);
            for (uint32_t at = 0; at < positions * streams; at++) {
                uint32_t other = at % positions;
                bool may = p->s.causal == 0 || other >= me;
                cr_assert_eq(met[at], may, "rank %u of %u: position %u meets %u of head %u %u times", p->s.place.rank,
                             p->s.place.world, me, other, at / positions, met[at]);
            }
        }
    }
    free(met);
}

Test(attention_backward, every_row_meets_what_it_may_once)
{
    for_all(every_row_meets_what_it_may_once);
}

static uint64_t steps_of(const struct pass *p)
{
    uint64_t steps = 0;
    for (uint32_t i = 0; i < prs_backward_tasks(&p->s, &p->b); i++) {
        struct prs_attention_task t;
        struct prs_attention_walk w;
        prs_backward_task_at(&p->s, &p->b, i, &t);
        prs_backward_begin(&p->s, &p->b, &t, &w);
        steps += w.left;
    }
    return steps;
}

Test(attention_backward, all_ranks_have_the_same_work)
{
    static const struct shape even = {2, 4, 2, 64, 16, 8, 1};
    for (uint32_t world = 2; world <= MOST_WORLD; world++)
        for (uint32_t causal = 0; causal < 2; causal++)
            for (uint32_t rank = 1; rank < world; rank++) {
                struct pass p = pass_of(&even, causal, rank, world, 1), first = pass_of(&even, causal, 0, world, 1);
                cr_assert_eq(steps_of(&p), steps_of(&first), "rank %u of %u", rank, world);
            }
}

static void terms_have_places_of_their_own(const struct shape *x, const struct pass *p)
{
    uint32_t pairs = x->batch * x->heads_q, rows = prs_backward_term_rows(&p->s);
    struct prs_attention_schedule of_one = prs_attention_smaller(&p->s, false, 1, p->s.segments * p->s.segment_rows);
    uint64_t next = 0;
    cr_assert(rows >= p->s.segment_rows && rows % x->tile == 0);
    for (uint32_t bank = 0; bank < 2; bank++)
        for (uint32_t rank = 0; rank < p->s.place.world; rank++)
            for (uint32_t pair = 0; pair < pairs; pair++)
                for (uint32_t segment = 0; segment < p->s.segments; segment++, next += rows) {
                    cr_assert_eq(prs_backward_term(&p->s, bank, rank, pair, segment), next);
                    cr_assert_eq(prs_backward_term(&of_one, bank, rank, pair, segment), next, "also of one sequence");
                }
    cr_assert_eq(prs_backward_term(&p->s, 2, 0, 0, 0), next, "what the plan allocates");
}

Test(attention_backward, terms_have_places_of_their_own)
{
    for_all(terms_have_places_of_their_own);
}

/* The tasks, in the order in which they are claimed, add to each block of queries one after the other. A rank's sums of
 * a segment go to its owner where the rank has keys that meet it. */
static void tasks_add_in_the_order_of_claims(const struct shape *x, const struct pass *p)
{
    uint32_t pairs = x->batch * x->heads_q, tasks = prs_backward_tasks(&p->s, &p->b);
    uint64_t sums = prs_backward_sum(&p->s, pairs, p->s.place.world, 0, 0, 0), next = 0;
    uint32_t *added = calloc(sums, sizeof(*added));
    for (uint32_t i = 0; i < tasks; i++) {
        struct prs_attention_task t;
        struct prs_attention_walk w;
        prs_backward_task_at(&p->s, &p->b, i, &t);
        prs_backward_begin(&p->s, &p->b, &t, &w);
        do {
            uint32_t span = prs_backward_span(&p->s, &p->b, &w, far_of(p)), pair = prs_backward_pair(&p->b, &t, &w);
            uint64_t at = prs_backward_sum(&p->s, pairs, span / p->s.segments, pair, span % p->s.segments, w.block);
            cr_assert(at < sums);
            cr_assert_eq(prs_backward_turn(&p->s, &t, &w), added[at]++,
                         "rank %u of %u: segment %u, tile %u, span %u, "
                         "block %u",
                         p->s.place.rank, p->s.place.world, t.segment, t.tile, span, w.block);
        } while (prs_backward_next(&p->s, &p->b, &t, &w, far_of(p)));
    }
    for (uint32_t order = 0; order < p->s.place.world; order++)
        for (uint32_t pair = 0; pair < pairs; pair++)
            for (uint32_t segment = 0; segment < p->s.segments; segment++)
                for (uint32_t block = 0; block < prs_backward_blocks(&p->s); block++, next++) {
                    uint32_t source = prs_place_in_order(&p->s.place, order);
                    cr_assert_eq(prs_backward_sum(&p->s, pairs, order, pair, segment, block), next);
                    cr_assert_eq(added[next] != 0, prs_backward_meets(&p->s, p->s.place.rank, source, segment));
                }
    free(added);
}

Test(attention_backward, tasks_add_in_the_order_of_claims)
{
    for_all(tasks_add_in_the_order_of_claims);
}

/* What a rank reads of the other slices, it reads in the order in which all ranks send: first that of the rank before
 * it, which sends to it first. */
static void slices_are_read_as_they_come(const struct shape *x, const struct pass *p)
{
    uint32_t world = p->s.place.world, last = 0, tasks = prs_backward_tasks(&p->s, &p->b);
    struct prs_attention_task t;
    struct prs_attention_walk w;
    (void)x;
    prs_backward_task_at(&p->s, &p->b, tasks - 1, &t);
    prs_backward_begin(&p->s, &p->b, &t, &w);
    do {
        uint32_t order = prs_backward_span(&p->s, &p->b, &w, far_of(p)) / p->s.segments, lot;
        struct prs_attention_message m;
        /* between nodes, slices of near ranks come first, and dk keeps the order of the ring */
        if (order == 0 || far_of(p))
            continue;
        for (lot = 0; lot + 1 < world; lot++) { /* the number of the lot in which that rank sends to this one */
            cr_assert(prs_attention_lot_at(&p->s, lot, &m));
            if (m.distance == order)
                break;
        }
        cr_assert_lt(lot + 1, world, "rank %u of %u never sends", prs_place_in_order(&p->s.place, order), world);
        cr_assert_geq(lot, last, "rank %u of %u reads slice %u too early", p->s.place.rank, world, order);
        last = lot;
    } while (prs_backward_next(&p->s, &p->b, &t, &w, far_of(p)));
}

/* However the ranks are divided into nodes, a task meets the slices in the same order, so that dk and dv have the same
 * bits. */
static void nodes_change_no_order(const struct shape *x, const struct pass *p)
{
    struct pass one = pass_of(x, p->s.causal, p->s.place.rank, p->s.place.world, 1);
    uint32_t tasks = prs_backward_tasks(&p->s, &p->b);
    for (uint32_t i = 0; i < tasks; i += tasks / 9 + 1) {
        struct prs_attention_walk w, v;
        struct prs_attention_task t;
        bool more;
        prs_backward_task_at(&p->s, &p->b, i, &t);
        prs_backward_begin(&p->s, &p->b, &t, &w);
        prs_backward_begin(&one.s, &p->b, &t, &v);
        do {
            uint32_t a = prs_backward_span(&p->s, &p->b, &w, far_of(p)),
                     b = prs_backward_span(&one.s, &p->b, &v, false);
            cr_assert(prs_place_in_order(&p->s.place, a / p->s.segments) ==
                              prs_place_in_order(&one.s.place, b / p->s.segments) &&
                          a % p->s.segments == b % p->s.segments && w.block == v.block && w.diagonal == v.diagonal &&
                          prs_backward_turn(&p->s, &t, &w) == prs_backward_turn(&one.s, &t, &v),
                      "rank %u of %u on %u nodes", p->s.place.rank, p->s.place.world, p->s.place.nodes);
            more = prs_backward_next(&p->s, &p->b, &t, &w, far_of(p));
            cr_assert_eq(prs_backward_next(&one.s, &p->b, &t, &v, false), more);
        } while (more);
    }
}

Test(attention_backward, nodes_change_no_order)
{
    for_all(nodes_change_no_order);
}

Test(attention_backward, slices_are_read_as_they_come)
{
    for_all(slices_are_read_as_they_come);
}
