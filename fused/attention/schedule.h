/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention: which rank computes what, in which order, and which flag each piece raises. Plain C shared by the
 * kernel, the host and the CPU protocol test, as schedule.h is for the matrix products.
 *
 * The ranks divide the sequence evenly. A rank's slice is one segment of consecutive positions, or, causal with several
 * ranks, two (zigzag): chunks `rank` and 2 * world - 1 - rank of 2 * world, so that every rank has the same work. A
 * task is one tile of query rows of one head. It reads the keys and values of all ranks: this rank's slice first, then
 * that of the rank after this one, and so on. A CTA does a whole task with its state in registers. Only the last few
 * tasks are cut into pieces, so that all CTAs end together.
 *
 * In striped attention (stripes.h) a slice has many segments, causal or not, and they are dealt to the ranks
 * differently. A task walks by the rules of that header; groups, messages, slabs and staging memory are as here.
 *
 * A pair is one (batch, KV head). Keys and values travel in groups of pairs, in the order in which tasks need them:
 * group by group, and within a group first to the rank before this one, which needs this slice first. They are stored
 * in `depth` group buffers: one for each group (everything resident), or two. With two, a sender writes a buffer again
 * only when the receiver has given credit for the group that was in it. CTAs move the data as messages; on one node
 * with everything resident, copy engines can do it instead (see "by copy engines").
 *
 * Between nodes a slice crosses once: its rank copies it to a relay slot. From there it is put, slab by slab, to the
 * counterpart (the rank with the same number) on each other node. The counterpart forwards it to the other ranks there
 * like its own slice. Slices are numbered in the order in which a rank reads them: `order` 0 is its own, then come
 * those of its node, then, node by node, its counterpart's and those that other ranks of its node forward to it. */
#ifndef PERSEUS_FUSED_ATTENTION_SCHEDULE_H
#define PERSEUS_FUSED_ATTENTION_SCHEDULE_H

#include <assert.h>
#include <stdbool.h>

#include "fused/core/geometry.h"

/* What the flags of attention stand for (core/sync.h). */
enum prs_attention_awaited {
    PRS_AWAIT_KEYS = 8,      /* a slab of keys or values */
    PRS_AWAIT_CREDIT = 9,    /* room for a group at the receiver */
    PRS_AWAIT_QUERIES = 10,  /* backward pass: a slab of queries or of gradients of results */
    PRS_AWAIT_GRADIENTS = 11 /* backward pass: another rank's part of dq */
};

enum { PRS_KEYS = 0, PRS_VALUES = 1 };

struct prs_attention_schedule {
    struct prs_place place;
    uint32_t batch, heads_q, heads_kv;
    uint32_t causal;
    uint32_t segments;     /* segments of a rank's slice: 1 or 2, or more if striped */
    uint32_t segment_rows; /* positions in a segment */
    uint32_t tile_rows;    /* query rows of a task */
    uint32_t block_rows;   /* keys of one step of a task */
    uint32_t tiles;        /* of a segment */
    uint32_t pairs;        /* batch * heads_kv */
    uint32_t heads_per_kv; /* query heads that use one KV head */
    uint32_t group;        /* pairs in a group; the last group may be smaller */
    uint32_t groups;
    uint32_t depth;       /* group buffers, 1 .. groups */
    uint32_t chunk_rows;  /* positions of one pair that travel as one message */
    uint32_t slab_chunks; /* messages that one arrival counter counts */
    uint32_t slabs;       /* of a segment */
    uint32_t tasks;
    uint32_t backwards; /* 1, on one node only: a slice goes first to the rank after this one (backward/schedule.h) */
    /* segment_rows, slabs, pairs and groups of the plan, whose launches may be smaller: distances in memory that other
     * ranks write. Striped, launches have the plan's rows and slabs, and fewer segments */
    uint32_t room_rows, room_slabs, room_pairs, room_groups;
};

struct prs_attention_task {
    uint32_t group, batch, head, pair; /* head: of the queries */
    uint32_t segment, tile;
};

struct prs_attention_slice {
    uint32_t batch, heads_q, heads_kv, causal, rows; /* rows: positions of one rank's slice */
    uint32_t nodes;                                  /* 0: 1 */
    uint32_t stripe; /* rows of a segment; a slice may then have any number of segments (stripes.h). 0: not striped */
};

/* Call this after tile, block, group, depth, chunk and slab sizes, and `backwards`, have been set. */
PRS_SHARED void prs_attention_schedule_init(struct prs_attention_schedule *s, uint32_t rank, uint32_t world,
                                            const struct prs_attention_slice *slice)
{
    prs_place_init(&s->place, rank, world, slice->nodes == 0 ? 1 : slice->nodes);
    s->batch = slice->batch;
    s->heads_q = slice->heads_q;
    s->heads_kv = slice->heads_kv;
    s->causal = slice->causal;
    s->segments = slice->stripe != 0 ? slice->rows / slice->stripe : slice->causal && world > 1 ? 2 : 1;
    s->segment_rows = slice->rows / s->segments;
    s->tiles = prs_ceil_div(s->segment_rows, s->tile_rows);
    s->pairs = s->batch * s->heads_kv;
    s->heads_per_kv = s->heads_q / s->heads_kv;
    s->group = s->group < 1 ? 1 : s->group > s->pairs ? s->pairs : s->group;
    s->groups = prs_ceil_div(s->pairs, s->group);
    s->depth = s->depth < 1 ? 1 : s->depth > s->groups ? s->groups : s->depth;
    s->slabs = prs_ceil_div(s->segment_rows, s->slab_chunks * s->chunk_rows);
    s->tasks = s->pairs * s->heads_per_kv * s->segments * s->tiles;
    s->room_rows = s->segment_rows;
    s->room_slabs = s->slabs;
    s->room_pairs = s->pairs;
    s->room_groups = s->groups;
}

/* The schedule of a launch of this plan with `batch` sequences, of which a slice has `rows` rows: no more than the
 * plan's. It has the first groups of the plan; its last one may have fewer pairs. Each credit keeps its place and its
 * meaning; so does each stage, counter and signal, except in striped attention, where a barrier precedes each launch
 * (doc/fused-notes.md, "Launches smaller than their plan"). */
PRS_SHARED struct prs_attention_schedule prs_attention_smaller(const struct prs_attention_schedule *plan, bool striped,
                                                               uint32_t batch, uint32_t rows)
{
    struct prs_attention_schedule s = *plan;
    uint32_t chunks;
    s.batch = batch;
    s.pairs = batch * s.heads_kv;
    s.groups = prs_ceil_div(s.pairs, s.group);
    s.segments = striped ? rows / s.segment_rows : s.segments;
    s.segment_rows = rows / s.segments;
    chunks = prs_ceil_div(s.segment_rows, s.chunk_rows);
    s.tiles = prs_ceil_div(s.segment_rows, s.tile_rows);
    s.slab_chunks = s.slab_chunks < chunks ? s.slab_chunks : chunks;
    s.slabs = prs_ceil_div(chunks, s.slab_chunks);
    s.tasks = s.pairs * s.heads_per_kv * s.segments * s.tiles;
    return s;
}

/* ---- tasks ---- */
PRS_SHARED uint32_t prs_attention_group_pairs(const struct prs_attention_schedule *s, uint32_t group)
{
    return group + 1 < s->groups ? s->group : s->pairs - group * s->group;
}

/* Within a group, tasks go head by head, so that the CTAs that work at the same time read the same keys. Causal: the
 * heaviest tile of every head comes first. */
PRS_SHARED void prs_attention_task_at(const struct prs_attention_schedule *s, uint32_t at, struct prs_attention_task *t)
{
    uint32_t row_tiles = s->segments * s->tiles, per_pair = s->heads_per_kv * row_tiles, heads, head, tile;
    t->group = at / (s->group * per_pair);
    at -= t->group * s->group * per_pair;
    heads = prs_attention_group_pairs(s, t->group) * s->heads_per_kv;
    if (s->causal) {
        head = at % heads;
        tile = row_tiles - 1 - at / heads;
    } else {
        head = at / row_tiles;
        tile = at % row_tiles;
    }
    t->pair = t->group * s->group + head / s->heads_per_kv;
    t->batch = t->pair / s->heads_kv;
    t->head = t->pair % s->heads_kv * s->heads_per_kv + head % s->heads_per_kv;
    t->segment = tile / s->tiles;
    t->tile = tile % s->tiles;
}

/* Which of the 2 * world (or world) chunks of the sequence a segment of a rank is. */
PRS_SHARED uint32_t prs_attention_chunk(const struct prs_attention_schedule *s, uint32_t rank, uint32_t segment)
{
    return segment == 0 ? rank : 2 * s->place.world - 1 - rank;
}

/* ---- a task's walk through the keys ---- */
struct prs_attention_walk {
    uint32_t span;     /* order of the slice * segments + segment */
    uint32_t block;    /* of the segment */
    uint32_t blocks;   /* that the task reads there */
    uint32_t left;     /* steps of the piece that are left, this one included */
    uint32_t diagonal; /* 1: the span is the task's own chunk, which the causal mask cuts */
};

/* One piece: consecutive steps of a task's walk through the keys, usually all of them (deal.h). The pieces of a task
 * that was cut are its parts; they have consecutive numbers among all parts. */
struct prs_attention_piece {
    struct prs_attention_task task;
    struct prs_attention_walk begin;
    uint32_t part; /* 0: the whole task; else 1 + number of the part */
};
static_assert(sizeof(struct prs_attention_piece) == 48, "host and kernel agree; whole vectors are loaded");

struct prs_attention_part {
    uint32_t first, parts; /* of its task */
};

/* Where a part of a task that is cut begins: at step `first` of task number `task`. The pieces of a launch follow from
 * its schedule and the list of these, in order (prs_attention_lay_task()). */
struct prs_attention_cut {
    uint32_t task, first;
};

/* Begins a span at its first block. blocks is 0 if the task reads nothing of it. */
PRS_SHARED void prs_attention_enter(const struct prs_attention_schedule *s, const struct prs_attention_task *t,
                                    struct prs_attention_walk *w, uint32_t span)
{
    uint32_t rows = s->segment_rows;
    w->span = span;
    w->block = 0;
    w->diagonal = 0;
    if (s->causal) {
        uint32_t own = prs_attention_chunk(s, s->place.rank, t->segment), end = (t->tile + 1) * s->tile_rows;
        uint32_t other = prs_attention_chunk(s, prs_place_in_order(&s->place, span / s->segments), span % s->segments);
        w->diagonal = other == own;
        if (other > own)
            rows = 0;
        else if (w->diagonal && end < rows)
            rows = end;
    }
    w->blocks = prs_ceil_div(rows, s->block_rows);
}

/* The number of steps of a task. */
PRS_SHARED uint32_t prs_attention_blocks(const struct prs_attention_schedule *s, const struct prs_attention_task *t)
{
    struct prs_attention_walk w;
    uint32_t blocks = 0;
    for (uint32_t span = 0; span < s->place.world * s->segments; span++) {
        prs_attention_enter(s, t, &w, span);
        blocks += w.blocks;
    }
    return blocks;
}

/* Goes to step `first` of the task, to take `blocks` steps. */
PRS_SHARED void prs_attention_begin(const struct prs_attention_schedule *s, const struct prs_attention_task *t,
                                    struct prs_attention_walk *w, uint32_t first, uint32_t blocks)
{
    prs_attention_enter(s, t, w, 0);
    while (first >= w->blocks) {
        first -= w->blocks;
        prs_attention_enter(s, t, w, w->span + 1);
    }
    w->block = first;
    w->left = blocks;
}

/* Goes to the next step; false when there is none. */
PRS_SHARED bool prs_attention_next(const struct prs_attention_schedule *s, const struct prs_attention_task *t,
                                   struct prs_attention_walk *w)
{
    if (--w->left == 0)
        return false;
    w->block++;
    while (w->block == w->blocks)
        prs_attention_enter(s, t, w, w->span + 1);
    return true;
}

/* Writes the pieces of task number `at`, and its parts if it has any. Not for striped attention. */
PRS_SHARED void prs_attention_lay_task(const struct prs_attention_schedule *s, const struct prs_attention_cut *cuts,
                                       uint32_t count, uint32_t at, struct prs_attention_piece *pieces,
                                       struct prs_attention_part *parts)
{
    struct prs_attention_piece piece;
    uint32_t cut = 0, more = 0, end, blocks;
    for (; cut < count && cuts[cut].task < at; cut++)
        more += cuts[cut].first != 0 ? 1 : 0;
    for (end = cut; end < count && cuts[end].task == at; end++)
        parts[end].first = cut;
    prs_attention_task_at(s, at, &piece.task);
    blocks = prs_attention_blocks(s, &piece.task);
    piece.part = 0;
    pieces += at + more;
    if (cut == end) {
        prs_attention_begin(s, &piece.task, &piece.begin, 0, blocks);
        *pieces = piece;
    }
    for (uint32_t i = cut; i < end; i++) {
        uint32_t stop = i + 1 < end ? cuts[i + 1].first : blocks;
        prs_attention_begin(s, &piece.task, &piece.begin, cuts[i].first, stop - cuts[i].first);
        piece.part = i + 1;
        parts[i].parts = end - cut;
        pieces[i - cut] = piece;
    }
}

/* Task number `at` of striped attention, which is one piece. Its walk begins in the kernel (stripes.h). */
PRS_SHARED struct prs_attention_piece prs_attention_whole(const struct prs_attention_schedule *s, uint32_t at)
{
    struct prs_attention_piece piece = {{0}, {0}, 0};
    prs_attention_task_at(s, at, &piece.task);
    return piece;
}

/* How many pieces a group has. */
PRS_SHARED uint32_t prs_attention_group_pieces(const struct prs_attention_schedule *s,
                                               const struct prs_attention_cut *cuts, uint32_t count, uint32_t group)
{
    uint32_t tasks = s->heads_per_kv * s->segments * s->tiles, pieces = prs_attention_group_pairs(s, group) * tasks;
    for (uint32_t i = 0; i < count; i++)
        pieces += cuts[i].first != 0 && cuts[i].task / (s->group * tasks) == group ? 1 : 0;
    return pieces;
}

/* The last step up to this one at which a piece may begin. At such a step every query row attends to the block's first
 * key, so that its maximum is finite. Step 0 is in this rank's first segment, and always qualifies. */
PRS_SHARED uint32_t prs_attention_cut(const struct prs_attention_schedule *s, const struct prs_attention_task *t,
                                      uint32_t step)
{
    struct prs_attention_walk w;
    uint32_t seen;
    prs_attention_begin(s, t, &w, step, 1);
    seen = t->tile * s->tile_rows / s->block_rows;
    return w.diagonal && w.block > seen ? step - (w.block - seen) : step;
}

/* How many keys of this block, from the first on, query row `row` of the task's segment attends to. Not clamped: it may
 * be negative, or more than the block has. */
PRS_SHARED int32_t prs_attention_limit(const struct prs_attention_schedule *s, const struct prs_attention_walk *w,
                                       uint32_t row)
{
    uint32_t end = w->diagonal && row + 1 < s->segment_rows ? row + 1 : s->segment_rows;
    return (int32_t)(end - w->block * s->block_rows);
}

/* ---- messages ---- */
/* One message: rows of one segment of the keys or values of one pair. */
struct prs_attention_message {
    /* the group whose rows this rank forwards at the time. `group` is the same, or the next one for rows that go ahead
     * (prs_attention_ahead()) */
    uint32_t turn;
    uint32_t group; /* of the message's rows */
    /* 0: this rank's slice; else the slice that the counterpart `way` nodes after this one has put here */
    uint32_t way;
    /* The receiver is the rank `distance` places before this one in its node. 0 is this rank itself: its own slice goes
     * to the relay slot; a slice of another node is already here, and is only counted. */
    uint32_t distance;
    uint32_t pair, kind, segment;
    uint32_t slab, row, rows;
};

/* The position of the message's slice in the order in which the receiver reads slices. The relay slot comes after all
 * slices. */
PRS_SHARED uint32_t prs_attention_order(const struct prs_attention_schedule *s, uint32_t way, uint32_t distance)
{
    return way == 0 && distance == 0 ? s->place.world : way * s->place.local_ranks + distance;
}

PRS_SHARED uint32_t prs_attention_slots(const struct prs_attention_schedule *s)
{
    /* MUTANT(model attention) the relay slot is its own: s/(s->place.nodes > 1 ? 0 : 1)/1/ */
    return s->place.world - (s->place.nodes > 1 ? 0 : 1);
}

/* How many segments of rank `source` rank `to` reads. Causal: ranks after `source` have no query after its second
 * segment, and read only the first. */
PRS_SHARED uint32_t prs_attention_interest(const struct prs_attention_schedule *s, uint32_t source, uint32_t to)
{
    /* MUTANT(model attention) a slice goes only to ranks that look at it: s/</+ s->place.local_ranks </ */
    return s->segments == 2 && source < to ? 1 : s->segments;
}

/* How many segments of the slice from `way` go to the receiver at `distance`. */
PRS_SHARED uint32_t prs_attention_wanted(const struct prs_attention_schedule *s, uint32_t way, uint32_t distance)
{
    uint32_t to = prs_place_neighbour(&s->place, s->place.local_ranks - distance);
    if (way == 0 && distance == 0) /* to any other node: node 0 comes before all others */
        return prs_attention_interest(s, s->place.rank, s->place.node == 0 ? s->place.world : s->place.local_rank);
    return prs_attention_interest(s, prs_place_in_order(&s->place, way * s->place.local_ranks), to);
}

/* How many ranks of this rank's node receive messages, including this rank when there are several nodes. */
PRS_SHARED uint32_t prs_attention_receivers(const struct prs_attention_schedule *s)
{
    return s->place.local_ranks - (s->place.nodes > 1 ? 0 : 1);
}

/* How many message numbers a lot has. A lot: one group from one source to one receiver. Some of these numbers have no
 * message. */
PRS_SHARED uint32_t prs_attention_lot(const struct prs_attention_schedule *s)
{
    return s->segments * s->slabs * s->group * 2 * s->slab_chunks;
}

/* 1 between nodes with more than one buffer: a group is sent to other nodes before this rank waits for the previous
 * group of those nodes and forwards it. With one buffer that would be a deadlock: the credit for the group needs the
 * previous group to be forwarded. */
PRS_SHARED uint32_t prs_attention_ahead(const struct prs_attention_schedule *s)
{
    /* MUTANT(model attention) nothing goes ahead with one buffer: s/&& s->depth > 1// */
    return s->place.nodes > 1 && s->depth > 1 ? 1 : 0;
}

PRS_SHARED uint32_t prs_attention_messages(const struct prs_attention_schedule *s)
{
    uint32_t lots = s->groups * s->place.nodes * prs_attention_receivers(s) + prs_attention_ahead(s);
    return lots * prs_attention_lot(s);
}

/* How many messages of a group this rank forwards from other nodes to the ranks of its own. */
PRS_SHARED uint32_t prs_attention_forwards(const struct prs_attention_schedule *s, uint32_t group)
{
    uint32_t segments = 0;
    for (uint32_t way = 1; way < s->place.nodes; way++)
        for (uint32_t distance = 1; distance < s->place.local_ranks; distance++)
            segments += prs_attention_wanted(s, way, distance);
    return segments * prs_attention_group_pairs(s, group) * 2 * prs_ceil_div(s->segment_rows, s->chunk_rows);
}

/* Describes lot number `lot`. False: it is empty. This rank's slice goes first to the relay slot, because the way to
 * other nodes is the longest. If it is sent ahead, it goes just before the previous group's slices of other nodes. */
PRS_SHARED bool prs_attention_lot_at(const struct prs_attention_schedule *s, uint32_t lot,
                                     struct prs_attention_message *m)
{
    uint32_t receivers = prs_attention_receivers(s), ahead = prs_attention_ahead(s);
    m->turn = m->group = m->way = m->distance = 0;
    if (ahead != 0 && lot == 0)
        return true;
    lot -= ahead;
    m->turn = m->group = lot / (s->place.nodes * receivers);
    lot %= s->place.nodes * receivers;
    if (ahead != 0 && lot < s->place.local_ranks)
        lot = lot + 1 == s->place.local_ranks ? 0 : lot + 1;
    /* MUTANT(model attention) the relay comes first: s/lot/s->place.nodes - 1 - lot/ */
    m->way = lot / receivers;
    m->distance =
        s->backwards != 0 ? receivers - lot % receivers : lot % receivers + (s->place.local_ranks - receivers);
    m->group += m->way == 0 && m->distance == 0 ? ahead : 0;
    return m->group < s->groups;
}

/* Describes message number `at`, as if every receiver read all segments; false: this number has no message. Messages
 * come lot by lot, segment by segment, slab by slab and pair by pair, the chunks of keys before those of values. */
PRS_SHARED bool prs_attention_any_message(const struct prs_attention_schedule *s, uint32_t at,
                                          struct prs_attention_message *m)
{
    uint32_t chunk = at % s->slab_chunks, left;
    bool any = prs_attention_lot_at(s, at / prs_attention_lot(s), m);
    at = at % prs_attention_lot(s) / s->slab_chunks;
    m->kind = at % 2;
    at /= 2;
    m->pair = at % s->group + m->group * s->group;
    at /= s->group;
    m->slab = at % s->slabs;
    m->segment = at / s->slabs;
    m->row = (m->slab * s->slab_chunks + chunk) * s->chunk_rows;
    left = s->segment_rows - m->row;
    m->rows = left < s->chunk_rows ? left : s->chunk_rows;
    return any && m->pair < s->pairs && m->row < s->segment_rows;
}

/* The same; also false if the receiver does not read the segment. Not for striped attention. */
PRS_SHARED bool prs_attention_message_at(const struct prs_attention_schedule *s, uint32_t at,
                                         struct prs_attention_message *m)
{
    return prs_attention_any_message(s, at, m) && m->segment < prs_attention_wanted(s, m->way, m->distance);
}

/* Number of the arrival counter of a slab of the slice at position `order`. Keys and values have counters of their
 * own. */
PRS_SHARED uint32_t prs_attention_arrival(const struct prs_attention_schedule *s, uint32_t order, uint32_t pair,
                                          uint32_t kind, uint32_t segment, uint32_t slab)
{
    /* MUTANT(model batch) counters keep their places: s/room_pairs/pairs/ */
    return ((((order - 1) * s->room_pairs + pair) * 2 + kind) * s->segments + segment) * s->room_slabs + slab;
}

/* How many there are. */
PRS_SHARED uint32_t prs_attention_arrival_words(const struct prs_attention_schedule *s)
{
    return prs_attention_arrival(s, prs_attention_slots(s) + 1, 0, 0, 0, 0);
}

/* The counter's value when all messages of the slab have arrived. */
PRS_SHARED uint32_t prs_attention_arrivals(const struct prs_attention_schedule *s, uint32_t slab)
{
    uint32_t left = prs_ceil_div(s->segment_rows, s->chunk_rows) - slab * s->slab_chunks;
    return left < s->slab_chunks ? left : s->slab_chunks;
}

/* Where the keys or values of one segment lie in staging memory, in units of room_rows rows of the wider tensor. */
PRS_SHARED uint32_t prs_attention_stage(const struct prs_attention_schedule *s, uint32_t order, uint32_t pair,
                                        uint32_t kind, uint32_t segment)
{
    uint32_t group = pair / s->group;
    uint32_t buffer = group % s->depth * prs_attention_slots(s) + order - 1;
    return ((buffer * s->group + pair % s->group) * 2 + kind) * s->segments + segment;
}

PRS_SHARED uint32_t prs_attention_stages(const struct prs_attention_schedule *s)
{
    return s->depth * prs_attention_slots(s) * s->group * 2 * s->segments;
}

/* ---- by copy engines ----
 * Only on one node with everything resident. The data is not cut into messages, and has the layout of the sender's
 * tensors. A group goes to one rank after the other: keys, then values, then a flag. */
/* The receiver's flag for a group of the slice at position `order`. */
PRS_SHARED uint32_t prs_attention_copied(const struct prs_attention_schedule *s, uint32_t order, uint32_t group)
{
    /* MUTANT(model copied) a group has a flag of its own: s/(order - 1) * s->room_groups + group/order - 1/ */
    /* MUTANT(model copied) a slice has flags of its own: s/(order - 1) * s->room_groups +// */
    return (order - 1) * s->room_groups + group;
}

/* Number of a tensor in staging memory, where the keys of all slices lie one after the other, and then the values,
 * whose rows may have another width. kind: 0 keys, 1 values. */
PRS_SHARED uint32_t prs_attention_tensor(const struct prs_attention_schedule *s, uint32_t order, uint32_t kind)
{
    /* MUTANT(model copied) keys and values have places of their own: s/kind * (s->place.world - 1) +// */
    return kind * (s->place.world - 1) + order - 1;
}

/* ---- parts of a task ---- */
/* How many floats a part leaves: the columns of each row, and the row's maximum and sum from each of the four threads
 * that share the row. */
PRS_SHARED uint32_t prs_attention_partial(uint32_t tile_rows, uint32_t value_dim)
{
    return tile_rows * (value_dim + 2 * 4);
}

/* How many counters a part has: one for each warp's 16 rows. */
PRS_SHARED uint32_t prs_attention_part_counters(uint32_t tile_rows)
{
    return tile_rows / 16;
}

/* ---- between nodes ---- */
/* Signal word of a slab that the counterpart `way` nodes after this one puts here. */
PRS_SHARED uint32_t prs_attention_far_slab(const struct prs_attention_schedule *s, uint32_t way, uint32_t pair,
                                           uint32_t kind, uint32_t segment, uint32_t slab)
{
    return prs_attention_arrival(s, way, pair, kind, segment, slab);
}

/* Signal word of a credit from the counterpart `back` nodes before this one. */
PRS_SHARED uint32_t prs_attention_far_credit(const struct prs_attention_schedule *s, uint32_t back, uint32_t group)
{
    return prs_attention_arrival(s, s->place.nodes, 0, 0, 0, 0) + (back - 1) * s->room_groups + group;
}

PRS_SHARED uint32_t prs_attention_far_words(const struct prs_attention_schedule *s)
{
    return prs_attention_far_credit(s, s->place.nodes, 0);
}

/* ---- credits: a receiver says "all pieces of this group have been read" ---- */
/* Index of the sender's word that takes credit from the rank `distance` places before it in its node. */
PRS_SHARED uint32_t prs_attention_credit(const struct prs_attention_schedule *s, uint32_t distance, uint32_t group)
{
    /* MUTANT(model batch) credits keep their places: s/room_groups/groups/ */
    return (distance - 1) * s->room_groups + group;
}

/* Finds the group whose buffer this group takes over; *earlier: it was in the previous launch, which had `before`
 * groups, and not in this one. False: the previous launch left the buffer unused. Then all ranks have read what was in
 * it, because they had ended the launch before that one when this rank got their data in the previous launch. */
PRS_SHARED bool prs_attention_evicted(const struct prs_attention_schedule *s, uint32_t group, uint32_t before,
                                      uint32_t *evicted, bool *earlier)
{
    /* MUTANT(model attention) credit of the launch before: s/</<=/ */
    *earlier = group < s->depth;
    /* MUTANT(model attention) the group that was in the buffer: s/depth;/depth > 0 ? group - s->depth - 1 : 0;/ */
    *evicted = group - s->depth;
    if (!*earlier)
        return true;
    /* MUTANT(model batch) no credit of a group that the launch before lacked: delete */
    if (group >= before)
        return false;
    /* MUTANT(model batch) the last group that was in the buffer: s/(before - 1/(s->groups - 1/ */
    *evicted = group + (before - 1 - group) / s->depth * s->depth;
    return true;
}

#endif
