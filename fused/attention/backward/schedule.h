/* SPDX-License-Identifier: Apache-2.0 */
/* The backward pass of ring attention: which rank computes what, in which order. Plain C shared by the kernels, the
 * host and the tests.
 *
 * A pass is a kernel, and a ring like the forward one: a task keeps one tile of two own tensors and reads two tensors
 * of all ranks, the stream, which travels by the rules of fused/attention/schedule.h.
 *
 *   pass       own tile          stream            what the task sums in registers
 *   queries    q, dout           keys, values      dq
 *   keys       keys, values      q, dout           dk, dv, over all query heads that share the KV head
 *
 * Striped attention has both, so no partial sum crosses between ranks or CTAs. Otherwise the pass for keys alone makes
 * all gradients: what a task computes of dq it adds to sums in memory, in turns, and a rank's sums of other ranks'
 * queries go to these. Each gradient is summed in fp32, in a fixed order.
 *
 * Causal: a query meets the keys before it, a key the queries after it. The pass for keys therefore numbers the
 * segments of every rank backwards ("mirrored"): chunk c of the 2 * world is then chunk 2 * world - 1 - c, a rank's
 * slice still has the chunks of prs_attention_chunk(), and "after" has become "before". So which segments travel to
 * whom, and which spans a task skips, is the same in both passes. Rows within a segment keep their order. */
#ifndef PERSEUS_FUSED_ATTENTION_BACKWARD_SCHEDULE_H
#define PERSEUS_FUSED_ATTENTION_BACKWARD_SCHEDULE_H

#include "fused/attention/schedule.h"

enum prs_backward_pass { PRS_PASS_QUERIES = 0, PRS_PASS_KEYS = 1, PRS_PASSES = 2 };

/* What a pass knows in addition to the schedule of its stream. That one's heads_kv are the heads of the stream. */
struct prs_backward_pass_shape {
    uint32_t pass;
    uint32_t heads;  /* of the own tensors */
    uint32_t shared; /* how many query heads share a KV head */
};

/* The schedule of the stream is that of a forward pass with as many KV heads as the stream has. Its groups have, in the
 * pass for keys, all the query heads of a KV head. */
PRS_SHARED uint32_t prs_backward_stream_heads(uint32_t pass, uint32_t heads_q, uint32_t heads_kv)
{
    return pass == PRS_PASS_KEYS ? heads_q : heads_kv;
}

PRS_SHARED struct prs_backward_pass_shape prs_backward_pass_shape_of(uint32_t pass, uint32_t heads_q, uint32_t heads_kv)
{
    struct prs_backward_pass_shape b = {pass, pass == PRS_PASS_KEYS ? heads_kv : heads_q, heads_q / heads_kv};
    return b;
}

/* The segment of the tensors that has this number in a pass, and the reverse. */
PRS_SHARED uint32_t prs_backward_segment(const struct prs_attention_schedule *s, uint32_t pass, uint32_t segment)
{
    return pass == PRS_PASS_KEYS ? s->segments - 1 - segment : segment;
}

/* ---- tasks ---- */
/* Own heads of `pairs` pairs of the stream, over batch and heads. */
PRS_SHARED uint32_t prs_backward_heads(const struct prs_backward_pass_shape *b, uint32_t pairs)
{
    return b->pass == PRS_PASS_KEYS ? pairs / b->shared : pairs * b->shared;
}

PRS_SHARED uint32_t prs_backward_tasks(const struct prs_attention_schedule *s, const struct prs_backward_pass_shape *b)
{
    return prs_backward_heads(b, s->pairs) * s->segments * s->tiles;
}

/* One segment of keys, causal: the first tiles have most queries, and come first. They begin with the last queries,
 * which all tiles meet: so none waits long for its turn to add (prs_backward_turn()). */
PRS_SHARED bool prs_backward_from_end(const struct prs_attention_schedule *s, const struct prs_backward_pass_shape *b)
{
    return b->pass == PRS_PASS_KEYS && s->causal && s->segments == 1;
}

/* Group by group, in the order of the forward's tasks. t->head is an own head; t->pair is the pair of the stream that
 * it reads, or the first of them. */
PRS_SHARED void prs_backward_task_at(const struct prs_attention_schedule *s, const struct prs_backward_pass_shape *b,
                                     uint32_t at, struct prs_attention_task *t)
{
    uint32_t tiles = s->segments * s->tiles, per_group = prs_backward_heads(b, s->group), heads, head, tile;
    t->group = at / (per_group * tiles);
    at -= t->group * per_group * tiles;
    heads = prs_backward_heads(b, prs_attention_group_pairs(s, t->group));
    if (s->causal) { /* the heaviest segments come first */
        head = at % heads;
        tile = prs_backward_from_end(s, b) ? at / heads : tiles - 1 - at / heads;
    } else {
        head = at / tiles;
        tile = at % tiles;
    }
    head += t->group * per_group;
    t->batch = head / b->heads;
    t->head = head % b->heads;
    t->pair = b->pass == PRS_PASS_KEYS ? head * b->shared : head / b->shared;
    t->segment = tile / s->tiles;
    t->tile = tile % s->tiles;
}

/* ---- a task's walk through the stream ----
 * Span by span, and in a span head by head: what comes first is read first. walk.span counts both. */
PRS_SHARED uint32_t prs_backward_streams(const struct prs_backward_pass_shape *b)
{
    return b->pass == PRS_PASS_KEYS ? b->shared : 1;
}

/* Order of the slice * segments + segment. A task of the later of two segments meets its own one last: so it is ahead
 * of those of the earlier segment, which add to the other spans after it (prs_backward_turn()). */
PRS_SHARED uint32_t prs_backward_span(const struct prs_attention_schedule *s, const struct prs_backward_pass_shape *b,
                                      const struct prs_attention_walk *w)
{
    uint32_t at = w->span / prs_backward_streams(b), last = s->place.world * 2 - 1;
    if (b->pass != PRS_PASS_KEYS || !s->causal || s->segments != 2 || at == 0)
        return at;
    return at == last ? 1 : at + 1;
}

PRS_SHARED uint32_t prs_backward_pair(const struct prs_backward_pass_shape *b, const struct prs_attention_task *t,
                                      const struct prs_attention_walk *w)
{
    return t->pair + w->span % prs_backward_streams(b);
}

/* In its own chunk a tile of keys begins with the block of its first query. */
PRS_SHARED void prs_backward_enter(const struct prs_attention_schedule *s, const struct prs_backward_pass_shape *b,
                                   const struct prs_attention_task *t, struct prs_attention_walk *w, uint32_t span)
{
    w->span = span;
    prs_attention_enter(s, t, w, prs_backward_span(s, b, w));
    w->span = span;
    if (b->pass == PRS_PASS_KEYS && w->diagonal) {
        /* MUTANT(model backward) a tile of keys meets its first query: s/block_rows;/block_rows + 1;/ */
        w->block = t->tile * s->tile_rows / s->block_rows;
        w->blocks = prs_ceil_div(s->segment_rows, s->block_rows);
        if (prs_backward_from_end(s, b)) /* `blocks` are left, down to the first query's */
            w->blocks -= w->block, w->block += w->blocks - 1;
    }
}

/* The first step of the whole task. */
PRS_SHARED void prs_backward_begin(const struct prs_attention_schedule *s, const struct prs_backward_pass_shape *b,
                                   const struct prs_attention_task *t, struct prs_attention_walk *w)
{
    uint32_t steps = 0;
    for (uint32_t span = 0; span < s->place.world * s->segments * prs_backward_streams(b); span++) {
        prs_backward_enter(s, b, t, w, span);
        steps += prs_backward_from_end(s, b) ? w->blocks : w->blocks - w->block;
    }
    prs_backward_enter(s, b, t, w, 0); /* of the own slice: never empty */
    w->left = steps;
}

/* Goes to the next step; false when there is none. */
PRS_SHARED bool prs_backward_next(const struct prs_attention_schedule *s, const struct prs_backward_pass_shape *b,
                                  const struct prs_attention_task *t, struct prs_attention_walk *w)
{
    bool down = prs_backward_from_end(s, b);
    if (--w->left == 0)
        return false;
    w->block += down ? -1u : 1;
    w->blocks -= down ? 1 : 0;
    while (down ? w->blocks == 0 : w->block == w->blocks)
        prs_backward_enter(s, b, t, w, w->span + 1);
    return true;
}

/* The rows of this block of the stream, from .. to - 1, that row `row` of the task's segment meets. Not clamped to the
 * block. */
struct prs_backward_range {
    int32_t from, to;
};

PRS_SHARED struct prs_backward_range prs_backward_range(const struct prs_attention_schedule *s,
                                                        const struct prs_backward_pass_shape *b,
                                                        const struct prs_attention_walk *w, uint32_t row)
{
    uint32_t first = w->block * s->block_rows;
    struct prs_backward_range r = {0, (int32_t)(s->segment_rows - first)};
    /* MUTANT(model backward) a query meets no later key: s/w->diagonal/0/ */
    if (b->pass == PRS_PASS_QUERIES && w->diagonal && row + 1 < s->segment_rows)
        r.to = (int32_t)(row + 1 - first);
    /* MUTANT(model backward) a key meets no earlier query: s/w->diagonal/0/ */
    if (b->pass == PRS_PASS_KEYS && w->diagonal)
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
    if (!s->causal || s->segments == 1)
        return t->segment * tiles + t->tile;
    /* MUTANT(model backward) only tiles that meet the block add: s/w->diagonal/0/ */
    if (w->diagonal && meet < tiles)
        tiles = meet;
    /* MUTANT(model backward) later segments add before: s/+ (s->segments - 1 - t->segment) * s->tiles// */
    return tiles - 1 - t->tile + (s->segments - 1 - t->segment) * s->tiles;
}

/* Blocks of a segment. */
PRS_SHARED uint32_t prs_backward_blocks(const struct prs_attention_schedule *s)
{
    return prs_ceil_div(s->segment_rows, s->block_rows);
}

/* The number of the sum of a block of queries. order: of the slice; pair: query head; of `pairs`. */
PRS_SHARED uint64_t prs_backward_sum(const struct prs_attention_schedule *s, uint32_t pairs, uint32_t order,
                                     uint32_t pair, uint32_t segment, uint32_t block)
{
    return (((uint64_t)order * pairs + pair) * s->segments + segment) * prs_backward_blocks(s) + block;
}

/* Whether rank `rank` has keys that meet the queries of this segment of rank `source`. */
PRS_SHARED bool prs_backward_meets(const struct prs_attention_schedule *s, uint32_t rank, uint32_t source,
                                   uint32_t segment)
{
    return segment < prs_attention_interest(s, source, rank);
}

/* ---- what is known of each query row ---- */
/* Rows of a segment, with those that only fill the last tile and block. */
PRS_SHARED uint32_t prs_backward_term_rows(const struct prs_attention_schedule *s)
{
    return s->tiles * s->tile_rows;
}

/* The number of the first row of a segment of query head `pair` (over batch and heads, of `pairs`) of rank `rank`;
 * segments as the pass for keys numbers them. bank: 0 or 1. */
PRS_SHARED uint64_t prs_backward_term(const struct prs_attention_schedule *s, uint32_t pairs, uint32_t bank,
                                      uint32_t rank, uint32_t pair, uint32_t segment)
{
    return ((((uint64_t)bank * s->place.world + rank) * pairs + pair) * s->segments + segment) *
           prs_backward_term_rows(s);
}

#endif
