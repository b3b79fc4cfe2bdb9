/* SPDX-License-Identifier: Apache-2.0 */
/* The backward pass of ring attention: which rank computes what, in which order. Plain C shared by the kernels, the
 * host and the tests.
 *
 * The kernel is a ring like the forward one. A task keeps one tile of this rank's keys and values. It reads the queries
 * and gradients of results of all ranks: these are the stream, which travels by the rules of
 * fused/attention/schedule.h. It sums dk and dv in registers, over all query heads that share the KV head. It adds its
 * part of dq to sums in memory, in turn with other tasks. The sums for queries of other ranks are sent to those ranks.
 * Each gradient is summed in fp32, in a fixed order.
 *
 * Causal: a query meets the keys before it, a key the queries after it. Without stripes the segments of every rank are
 * therefore numbered backwards ("mirrored"): chunk c of the 2 * world is then chunk 2 * world - 1 - c, a rank's slice
 * still has the chunks of prs_attention_chunk(), and "after" has become "before". So the forward's rules say which
 * segments travel to whom, and which spans a task skips. Rows within a segment keep their order. Stripes need no
 * mirror: `before` and `after` of stripes.h change places. */
#ifndef PERSEUS_FUSED_ATTENTION_BACKWARD_SCHEDULE_H
#define PERSEUS_FUSED_ATTENTION_BACKWARD_SCHEDULE_H

#include "fused/attention/stripes.h"

/* The schedule of the stream is that of a forward pass with as many KV heads as there are query heads. This is what the
 * backward pass needs in addition. */
struct prs_backward_shape {
    uint32_t heads;  /* KV heads */
    uint32_t shared; /* how many query heads share one; a group of the stream has all of them */
};

/* The segment of the tensors that has this number in the pass, and the reverse. Not for striped attention. */
PRS_SHARED uint32_t prs_backward_segment(const struct prs_attention_schedule *s, uint32_t segment)
{
    return s->segments - 1 - segment;
}

/* ---- tasks ---- */
PRS_SHARED uint32_t prs_backward_tasks(const struct prs_attention_schedule *s, const struct prs_backward_shape *b)
{
    return s->pairs / b->shared * s->segments * s->tiles;
}

/* One segment, causal: the first tiles have most queries, and come first. They begin with the last queries, which all
 * tiles meet: so none waits long for its turn to add (prs_backward_turn()). */
PRS_SHARED bool prs_backward_from_end(const struct prs_attention_schedule *s)
{
    return s->causal && s->segments == 1;
}

/* Heads of a group. */
PRS_SHARED uint32_t prs_backward_heads(const struct prs_attention_schedule *s, const struct prs_backward_shape *b,
                                       uint32_t group)
{
    return prs_attention_group_pairs(s, group) / b->shared;
}

/* Finds the group of task `at`; returns the task's number in the group. Tasks come group by group, with one exception:
 * with two segments, a group's tasks of the later segment (half of the group) come before the previous group's tasks of
 * the earlier segment. The latter are shorter. They add after the first tasks of their own group (prs_backward_turn()),
 * which have ended by then. */
PRS_SHARED uint32_t prs_backward_group_of(const struct prs_attention_schedule *s, const struct prs_backward_shape *b,
                                          uint32_t at, uint32_t *group)
{
    uint32_t all = s->group / b->shared * s->segments * s->tiles, half = all / 2, later, pair;
    *group = at / all;
    /* With one buffer a group would wait for a task that has not been claimed. So it would with two buffers between
     * nodes, where a group is forwarded after the message that needs the previous group's buffer. */
    /* MUTANT(model attention) two buffers are too few between nodes: s/1 + prs_attention_ahead(s)/1/ */
    if (!s->causal || s->segments != 2 || s->groups == 1 || s->depth <= 1 + prs_attention_ahead(s) || at < half)
        return at % all;
    at -= half;
    /* the earlier segment of group `pair`, with the later segment of the next group */
    pair = at / all < s->groups - 2 ? at / all : s->groups - 2;
    at -= pair * all;
    later = prs_backward_heads(s, b, pair + 1) * s->tiles;
    *group = pair + (at < later || at >= later + half ? 1 : 0);
    return at < later ? at : at < later + half ? at - later + half : at - half;
}

/* In a group the last tiles come first; for each tile, the heads come one after the other. So there is a distance
 * between two tasks of one head. t->head is a KV head; t->pair is the first pair of the stream that it reads. */
PRS_SHARED void prs_backward_task_at(const struct prs_attention_schedule *s, const struct prs_backward_shape *b,
                                     uint32_t at, struct prs_attention_task *t)
{
    uint32_t tiles = s->segments * s->tiles, per_group = s->group / b->shared, heads, head, tile;
    at = prs_backward_group_of(s, b, at, &t->group);
    heads = prs_backward_heads(s, b, t->group);
    head = t->group * per_group + at % heads;
    tile = prs_backward_from_end(s) ? at / heads : tiles - 1 - at / heads;
    t->batch = head / b->heads;
    t->head = head % b->heads;
    t->pair = head * b->shared;
    t->segment = tile / s->tiles;
    t->tile = tile % s->tiles;
}

/* How many tasks a group has. */
PRS_SHARED uint32_t prs_backward_group_tasks(const struct prs_attention_schedule *s, const struct prs_backward_shape *b,
                                             uint32_t group)
{
    return prs_backward_heads(s, b, group) * s->segments * s->tiles;
}

/* ---- a task's walk through the stream; striped, it is that of stripes.h ----
 * Span by span, and in a span head by head: what comes first is read first. walk.span counts both. */
/* The position of a rank's slice in the order in which other ranks' slices lie: the reverse of prs_place_in_order(). */
PRS_SHARED uint32_t prs_backward_order(const struct prs_place *p, uint32_t rank)
{
    return prs_place_node_distance(p, rank) * p->local_ranks + prs_place_neighbour_index(p, rank);
}

/* Order of the slice * segments + segment. The ring turns backwards: after this rank's slice comes that of the rank
 * before this one, also where that is on another node: so dk and dv have the same bits however ranks are divided into
 * nodes. A tile of the later of two segments meets its own segment last. So tiles of both segments begin with the same
 * spans in the same order: those that tiles of the earlier segment meet. They add to them one after the other
 * (prs_backward_turn()). far: whether there are several nodes, which kernels know when they are compiled. */
PRS_SHARED uint32_t prs_backward_span(const struct prs_attention_schedule *s, const struct prs_backward_shape *b,
                                      const struct prs_attention_walk *w, bool far)
{
    uint32_t at = w->span / b->shared, last = s->place.world * s->segments - 1;
    if (s->segments == 2 && at != 0)
        at = at == last ? 1 : at + 1;
    /* MUTANT(model backward) between nodes the ring turns backwards: s/s->place.world - at/at/ */
    if (far && at >= s->segments)
        return prs_backward_order(&s->place, prs_place_after(&s->place, s->place.world - at / s->segments)) *
                   s->segments +
               at % s->segments;
    /* MUTANT(model turns) the ring turns backwards: s/s->place.world - at/at/ */
    return at < s->segments ? at : (s->place.world - at / s->segments) * s->segments + at % s->segments;
}

PRS_SHARED uint32_t prs_backward_pair(const struct prs_backward_shape *b, const struct prs_attention_task *t,
                                      const struct prs_attention_walk *w)
{
    return t->pair + w->span % b->shared;
}

/* In its own chunk a tile of keys begins with the block of its first query. */
PRS_SHARED void prs_backward_enter(const struct prs_attention_schedule *s, const struct prs_backward_shape *b,
                                   const struct prs_attention_task *t, struct prs_attention_walk *w, uint32_t span,
                                   bool far)
{
    w->span = span;
    prs_attention_enter(s, t, w, prs_backward_span(s, b, w, far));
    w->span = span;
    if (w->diagonal) {
        /* MUTANT(model backward) a tile of keys meets its first query: s/block_rows;/block_rows + 1;/ */
        w->block = t->tile * s->tile_rows / s->block_rows;
        w->blocks = prs_ceil_div(s->segment_rows, s->block_rows);
        if (prs_backward_from_end(s)) /* `blocks` are left, down to the block of the first query */
            w->blocks -= w->block, w->block += w->blocks - 1;
    }
}

/* The first step of the task. */
PRS_SHARED void prs_backward_begin(const struct prs_attention_schedule *s, const struct prs_backward_shape *b,
                                   const struct prs_attention_task *t, struct prs_attention_walk *w)
{
    uint32_t steps = 0;
    bool far = s->place.nodes > 1;
    for (uint32_t span = 0; span < s->place.world * s->segments * b->shared; span++) {
        prs_backward_enter(s, b, t, w, span, far);
        steps += prs_backward_from_end(s) ? w->blocks : w->blocks - w->block;
    }
    prs_backward_enter(s, b, t, w, 0, far); /* the first step is in this rank's slice, so it is never empty */
    w->left = steps;
}

/* Task number `at`, which is one piece. Striped, its walk begins in the kernel. */
PRS_SHARED struct prs_attention_piece prs_backward_whole(const struct prs_attention_schedule *s,
                                                         const struct prs_backward_shape *b, bool striped, uint32_t at)
{
    struct prs_attention_piece piece = {{0}, {0}, 0};
    prs_backward_task_at(s, b, at, &piece.task);
    if (!striped)
        prs_backward_begin(s, b, &piece.task, &piece.begin);
    return piece;
}

/* Goes to the next step; false when there is none. */
PRS_SHARED bool prs_backward_next(const struct prs_attention_schedule *s, const struct prs_backward_shape *b,
                                  const struct prs_attention_task *t, struct prs_attention_walk *w, bool far)
{
    bool down = prs_backward_from_end(s);
    if (--w->left == 0)
        return false;
    w->block += down ? -1u : 1;
    w->blocks -= down ? 1 : 0;
    while (down ? w->blocks == 0 : w->block == w->blocks)
        prs_backward_enter(s, b, t, w, w->span + 1, far);
    return true;
}

/* The rows of this block of the stream, from .. to - 1, that row `row` of the task's segment meets. Not clamped to the
 * block. */
struct prs_backward_range {
    int32_t from, to;
};

PRS_SHARED struct prs_backward_range prs_backward_range(const struct prs_attention_schedule *s,
                                                        const struct prs_attention_walk *w, uint32_t row)
{
    uint32_t first = w->block * s->block_rows;
    struct prs_backward_range r = {0, (int32_t)(s->segment_rows - first)};
    /* MUTANT(model backward) a key meets no earlier query: s/w->diagonal/0/ */
    if (w->diagonal)
        r.from = (int32_t)(row - first);
    return r;
}

/* ---- dq: sums in memory ----
 * The tasks of a KV head add to a block of queries in the order in which they are claimed. So a task waits only for
 * tasks that were claimed before it. */
/* How many tasks add to the walk's block before this one. */
PRS_SHARED uint32_t prs_backward_turn(const struct prs_attention_schedule *s, const struct prs_attention_task *t,
                                      const struct prs_attention_walk *w)
{
    uint32_t tiles = s->tiles, meet = prs_ceil_div((w->block + 1) * s->block_rows, s->tile_rows);
    if (prs_backward_from_end(s))
        return t->tile;
    /* MUTANT(model backward) only tiles that meet the block add: s/w->diagonal/0/ */
    if (w->diagonal && meet < tiles)
        tiles = meet;
    /* MUTANT(model backward) later segments add before: s/+ (s->segments - 1 - t->segment) * s->tiles// */
    return tiles - 1 - t->tile + (s->segments - 1 - t->segment) * s->tiles;
}

/* The same in striped attention, of the block at `position`: the tiles that meet it are consecutive, and the last tile
 * comes first. So no task waits for long: the tasks before this one began in the block's slice at a later block. */
PRS_SHARED uint32_t prs_backward_stripe_turn(const struct prs_attention_stripes *x,
                                             const struct prs_attention_schedule *s, const struct prs_attention_task *t,
                                             uint32_t position)
{
    uint32_t end = prs_stripe_met_by(x, position + s->block_rows - 1).to;
    uint32_t rows = prs_stripe_rows_before(x, s->place.world, s->place.rank, end);
    /* MUTANT(model turns) only tiles that meet the block add:
     * s/prs_ceil_div(rows, s->tile_rows)/s->segments * s->tiles/ */
    return prs_ceil_div(rows, s->tile_rows) - 1 - (t->segment * s->tiles + t->tile);
}

/* Blocks of a segment. */
PRS_SHARED uint32_t prs_backward_blocks(const struct prs_attention_schedule *s)
{
    return prs_ceil_div(s->segment_rows, s->block_rows);
}

/* The number of the sum of a block of queries. order: position of the slice; pair: the query head, one of `pairs`. */
PRS_SHARED uint64_t prs_backward_sum(const struct prs_attention_schedule *s, uint32_t pairs, uint32_t order,
                                     uint32_t pair, uint32_t segment, uint32_t block)
{
    return (((uint64_t)order * pairs + pair) * s->segments + segment) * prs_backward_blocks(s) + block;
}

/* ---- parts of dq: what a rank adds to the queries of another one ---- */
/* The position of rank `from`'s parts among those that rank `owner` gets from all ranks, in the order of the ring. */
PRS_SHARED uint32_t prs_backward_slot(const struct prs_place *place, uint32_t owner, uint32_t from)
{
    return prs_index_after(from, owner, place->world);
}

/* The owner's signal word for the parts of one query head from a rank of another node. */
PRS_SHARED uint32_t prs_backward_far_part(const struct prs_attention_schedule *s, uint32_t slot, uint32_t pair)
{
    return prs_attention_far_words(s) + slot * s->room_pairs + pair;
}

PRS_SHARED uint32_t prs_backward_far_words(const struct prs_attention_schedule *s)
{
    return prs_backward_far_part(s, s->place.world - 1, 0);
}

/* Whether rank `rank` has keys that meet the queries of this segment of rank `source`. */
PRS_SHARED bool prs_backward_meets(const struct prs_attention_schedule *s, uint32_t rank, uint32_t source,
                                   uint32_t segment)
{
    return segment < prs_attention_interest(s, source, rank);
}

/* The same in striped attention, of a block of queries. */
PRS_SHARED bool prs_backward_stripe_meets(const struct prs_attention_stripes *x, const struct prs_attention_schedule *s,
                                          uint32_t rank, uint32_t source, uint32_t segment, uint32_t block)
{
    uint32_t position = prs_stripe_position(x, s->place.world, source, segment) + block * s->block_rows;
    uint32_t from = prs_stripe_met_by(x, position).from, end = prs_stripe_met_by(x, position + s->block_rows - 1).to;
    /* MUTANT(model turns) all keys that meet the block: s/rank, end)/rank, position)/ */
    return prs_stripe_rows_before(x, s->place.world, rank, from) < prs_stripe_rows_before(x, s->place.world, rank, end);
}

/* ---- what is known of each query row ---- */
/* Rows of a segment, with those that only fill the last tile and block. */
PRS_SHARED uint32_t prs_backward_term_rows(const struct prs_attention_schedule *s)
{
    return s->tiles * s->tile_rows;
}

/* The number of the first row of a segment of query head `pair` (over batch and heads) of rank `rank`; segments as the
 * pass numbers them. bank: 0 or 1. */
PRS_SHARED uint64_t prs_backward_term(const struct prs_attention_schedule *s, uint32_t bank, uint32_t rank,
                                      uint32_t pair, uint32_t segment)
{
    /* MUTANT(model backward) terms keep their places: s/room_pairs/pairs/ */
    return ((((uint64_t)bank * s->place.world + rank) * s->room_pairs + pair) * s->segments + segment) *
           (prs_ceil_div(s->room_rows, s->tile_rows) * s->tile_rows);
}

#endif
