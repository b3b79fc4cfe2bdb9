/* SPDX-License-Identifier: Apache-2.0 */
/* Striped attention: sequences of any lengths packed into one, and sliding windows. Plain C shared by the kernels, the
 * host and the tests.
 *
 * The sequence is cut into stripes of equal length, which are dealt to the ranks in zigzag: to ranks 0 ... W - 1, then
 * to W - 1 ... 0, and so on. This does not depend on where sequences begin, so it needs no table. Each sequence much
 * longer than 2 W stripes is divided evenly. Shorter ones are not, but each of them has little work. A launch may
 * instead say which rank has which stripe (assign.c chooses ranks so that little travels). Then these functions read
 * two tables, which a kernel before the launch writes (prepare.cuh). Each rank has equally many stripes.
 *
 * A query and a key meet if the query attends to the key. A query at position p meets the positions of one span: its
 * own sequence, cut by the causal mask and by the window. The span contains p, and of two queries the later one has a
 * span that begins no earlier and ends no earlier. So the rows of a tile together meet one span, too. The rows of a
 * slice lie in the order of their positions, so a tile meets consecutive rows of each slice. The same is true of a key
 * and the queries that meet it. */
#ifndef PERSEUS_FUSED_ATTENTION_STRIPES_H
#define PERSEUS_FUSED_ATTENTION_STRIPES_H

#include "fused/attention/schedule.h"

enum { PRS_STRIPE_LEAST = 128 /* rows: a tile, and a block of any kernel, lie in one stripe */ };

/* Positions from .. to - 1. */
struct prs_span {
    uint32_t from, to;
};

struct prs_attention_stripes {
    uint32_t log_rows;            /* log2 of the rows of a stripe; 0: not striped */
    uint32_t before, after;       /* a row meets at most so many positions before it, and after it */
    const struct prs_span *parts; /* [position]: its sequence; NULL: there is only one sequence */
    uint32_t positions;           /* of the launch */
    /* NULL: zigzag. Otherwise, with s stripes: */
    const uint32_t *stripe_of; /* [s / world][world]: a rank's stripes in ascending order */
    const uint32_t *how_many;  /* [s + 1][world]: how many stripes before this one the rank has */
};

/* Zigzag: which stripe of the sequence a rank's stripe `number` is, and the rank that has a stripe. */
PRS_SHARED uint32_t prs_stripe_zigzag(uint32_t world, uint32_t rank, uint32_t number)
{
    return number / 2 * 2 * world + (number % 2 != 0 ? 2 * world - 1 - rank : rank);
}

PRS_SHARED uint32_t prs_stripe_zigzag_rank(uint32_t world, uint32_t stripe)
{
    uint32_t at = stripe % (2 * world);
    return at < world ? at : 2 * world - 1 - at;
}

/* The first position of a rank's stripe `number`. */
PRS_SHARED uint32_t prs_stripe_position(const struct prs_attention_stripes *x, uint32_t world, uint32_t rank,
                                        uint32_t number)
{
    uint32_t stripe = x->stripe_of ? x->stripe_of[number * world + rank] : prs_stripe_zigzag(world, rank, number);
    return stripe << x->log_rows;
}

/* How many rows of a rank's slice have positions before `position`. */
PRS_SHARED uint32_t prs_stripe_rows_before(const struct prs_attention_stripes *x, uint32_t world, uint32_t rank,
                                           uint32_t position)
{
    uint32_t stripe = position >> x->log_rows, within = position & ((1u << x->log_rows) - 1);
    uint32_t at = stripe % (2 * world), back = 2 * world - 1 - rank, number;
    if (x->how_many) {
        const uint32_t *before = x->how_many + stripe * world + rank;
        number = before[0];
        /* MUTANT(model stripes) rows of a stripe that the rank has: s/before[world] == number/true/ */
        if (within != 0 && before[world] == number)
            within = 0;
    } else {
        number = stripe / (2 * world) * 2 + (at > rank ? 1 : 0) + (at > back ? 1 : 0);
        within = at == rank || at == back ? within : 0;
    }
    return (number << x->log_rows) + within;
}

/* `position`'s sequence, cut to at most `before` positions before it and `after` positions after it. */
PRS_SHARED struct prs_span prs_stripe_cut_part(struct prs_span s, uint32_t position, uint32_t before, uint32_t after)
{
    /* MUTANT(model stripes) a window ends: s/position - s.from > before/0/ */
    if (position - s.from > before)
        s.from = position - before;
    /* MUTANT(model stripes) the causal mask: s/s.to - 1 - position > after/0/ */
    if (s.to - 1 - position > after)
        s.to = position + 1 + after;
    return s;
}

PRS_SHARED struct prs_span prs_stripe_cut(const struct prs_attention_stripes *x, uint32_t position, uint32_t before,
                                          uint32_t after)
{
    struct prs_span all = {0, x->positions};
    return prs_stripe_cut_part(x->parts ? x->parts[position] : all, position, before, after);
}

PRS_SHARED struct prs_span prs_stripe_meets(const struct prs_attention_stripes *x, uint32_t position)
{
    return prs_stripe_cut(x, position, x->before, x->after);
}

/* The reverse: the rows that meet this key, or backward this query. */
PRS_SHARED struct prs_span prs_stripe_met_by(const struct prs_attention_stripes *x, uint32_t position)
{
    return prs_stripe_cut(x, position, x->after, x->before);
}

/* The sequence of a position: the first one that ends after it, since empty sequences may begin and end there. A
 * position outside of all sequences is a sequence of its own, so every row meets a key. bounds: [sequences + 1],
 * ascending. */
PRS_SHARED struct prs_span prs_stripe_part(const int32_t *bounds, uint32_t sequences, uint32_t position,
                                           uint32_t positions)
{
    uint32_t low = 0, high = sequences; /* the first bound after the position is in low .. high, if there is one */
    struct prs_span s;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        /* MUTANT(model stripes) a sequence begins at its bound: s/<= (int32_t)position/< (int32_t)position/ */
        if (bounds[middle] <= (int32_t)position)
            low = middle + 1;
        else
            high = middle;
    }
    s.from = low == 0 ? position : (uint32_t)bounds[low - 1];
    s.to = (uint32_t)bounds[low];
    /* Even with wrong bounds, a span contains its position, and ends within the packed sequence. */
    if (low == 0 || s.from > position || s.to <= position || s.to > positions) {
        s.from = position;
        s.to = position + 1;
    }
    return s;
}

/* ---- what travels ---- */
/* Whether rank `to` has a row that meets stripe `number` of this rank's slice. Only then is the stripe sent there, and
 * only for such stripes does a rank wait. */
PRS_SHARED bool prs_stripe_wanted(const struct prs_attention_stripes *x, const struct prs_place *place, uint32_t to,
                                  uint32_t number)
{
    uint32_t first = prs_stripe_position(x, place->world, place->rank, number);
    uint32_t from = prs_stripe_met_by(x, first).from;
    uint32_t end = prs_stripe_met_by(x, first + (1u << x->log_rows) - 1).to;
    /* MUTANT(model stripes) a stripe goes to all that have a row for it: s/, end)/, end - 1)/ */
    return prs_stripe_rows_before(x, place->world, to, from) < prs_stripe_rows_before(x, place->world, to, end);
}

/* As prs_attention_message_at(), but in another order: stripe by stripe, the last stripe first, and each stripe to one
 * rank after the other. So data arrives in the order in which the tasks that read it are claimed. */
PRS_SHARED bool prs_stripe_message_at(const struct prs_attention_stripes *x, const struct prs_attention_schedule *s,
                                      uint32_t at, struct prs_attention_message *m)
{
    uint32_t receivers = prs_attention_receivers(s), lot = prs_attention_lot(s), of_stripe = lot / s->segments;
    uint32_t within = at % (receivers * lot), stripe = within / of_stripe / receivers;
    uint32_t to = within / of_stripe % receivers, group = at / (receivers * lot);
    at = (group * receivers + to) * lot + (s->segments - 1 - stripe) * of_stripe + within % of_stripe;
    return prs_attention_any_message(s, at, m) &&
           prs_stripe_wanted(x, &s->place, prs_place_neighbour(&s->place, s->place.local_ranks - m->distance),
                             m->segment);
}

/* ---- a task's walk through keys and values, or backward through queries and gradients of results ----
 * Slice by slice in the order of the ring, in a slice head by head, and in a head block by block. Forward, a task reads
 * one head; backward, all query heads that share its KV head. */
struct prs_stripe_walk {
    /* at.left: steps of the task that are left; at.blocks: blocks of this slice and head that are left; at.diagonal:
     * not every row of the tile meets every row of the block */
    struct prs_attention_walk at;
    /* positions that some row of the tile meets, and those that every row meets; each.to may be less than each.from */
    struct prs_span all, each;
    uint32_t order, head, heads;
    uint32_t end; /* of the slice's segments: the task reads only those before it */
};

/* Goes to the first block of a slice and head, if there is one. */
PRS_SHARED void prs_stripe_enter(const struct prs_attention_stripes *x, const struct prs_attention_schedule *s,
                                 struct prs_stripe_walk *w, uint32_t order)
{
    uint32_t rank = prs_place_in_order(&s->place, order), mask = (1u << x->log_rows) - 1;
    uint32_t row = prs_stripe_rows_before(x, s->place.world, rank, w->all.from) / s->block_rows * s->block_rows;
    uint32_t end = prs_stripe_rows_before(x, s->place.world, rank, w->all.to);
    w->order = order;
    w->at.span = order * s->segments + (row >> x->log_rows);
    w->at.block = (row & mask) / s->block_rows;
    w->at.blocks = end > row ? prs_ceil_div(end - row, s->block_rows) : 0;
    w->end = (end + mask) >> x->log_rows;
}

/* The position of the walk's block. Sets at.diagonal. */
PRS_SHARED uint32_t prs_stripe_look(const struct prs_attention_stripes *x, const struct prs_attention_schedule *s,
                                    struct prs_stripe_walk *w)
{
    uint32_t rank = prs_place_in_order(&s->place, w->order);
    uint32_t position =
        prs_stripe_position(x, s->place.world, rank, w->at.span % s->segments) + w->at.block * s->block_rows;
    /* MUTANT(model stripes) a block that not all rows meet is masked: s/position < w->each.from ||// */
    w->at.diagonal = position < w->each.from || position + s->block_rows > w->each.to;
    return position;
}

/* The position of the task's first row. */
PRS_SHARED uint32_t prs_stripe_tile(const struct prs_attention_stripes *x, const struct prs_attention_schedule *s,
                                    const struct prs_attention_task *t)
{
    return prs_stripe_position(x, s->place.world, s->place.rank, t->segment) + t->tile * s->tile_rows;
}

/* Goes to the first step of a task. There is at least one, because every row meets itself. heads: how many heads the
 * task reads. */
PRS_SHARED void prs_stripe_begin(const struct prs_attention_stripes *x, const struct prs_attention_schedule *s,
                                 const struct prs_attention_task *t, uint32_t heads, struct prs_stripe_walk *w)
{
    uint32_t tile = prs_stripe_tile(x, s, t), steps = 0;
    struct prs_span first = prs_stripe_meets(x, tile), last = prs_stripe_meets(x, tile + s->tile_rows - 1);
    w->all.from = first.from, w->all.to = last.to;
    w->each.from = last.from, w->each.to = first.to;
    w->head = 0;
    w->heads = heads;
    for (uint32_t order = s->place.world; order-- > 0;) {
        prs_stripe_enter(x, s, w, order);
        steps += w->at.blocks * heads;
    }
    w->at.left = steps; /* the walk is now in this rank's slice, which has the tile's own rows */
}

/* Goes to the next step; false when there is none. */
PRS_SHARED bool prs_stripe_next(const struct prs_attention_stripes *x, const struct prs_attention_schedule *s,
                                struct prs_stripe_walk *w)
{
    if (--w->at.left == 0)
        return false;
    if (--w->at.blocks == 0) {
        w->head = w->head + 1 == w->heads ? 0 : w->head + 1;
        do
            prs_stripe_enter(x, s, w, w->order + (w->head == 0 ? 1 : 0));
        while (w->at.blocks == 0);
        return true;
    }
    if ((++w->at.block * s->block_rows) >> x->log_rows != 0) {
        w->at.block = 0;
        w->at.span++;
    }
    return true;
}

#endif
