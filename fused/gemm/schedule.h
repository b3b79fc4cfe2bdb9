/* SPDX-License-Identifier: Apache-2.0 */
/* Which rank computes what, in which order, and which flag each piece raises. Plain C shared by the kernels, the host
 * and the CPU protocol test (test/fused): no CUDA, no memory, no clock.
 *
 * The rows of the product are cut into `world` equal blocks, one per rank: the rank's rows of the result
 * (reduce-scatter, all-reduce) or of A (all-gather). A block is cut into pairs of row tiles, because a cluster of two
 * CTAs computes two row tiles that share their columns of B. A unit is one pair by one column tile. Pairs are
 * communicated in bands.
 *
 * Ranks of one node store into each other's memory. Between nodes every rank puts only to its counterparts, the ranks
 * with the same local rank on other nodes, so that nothing crosses twice. Partial sums are added up inside the sending
 * node first; rows of A and of the result are spread inside the receiving node. */
#ifndef PERSEUS_FUSED_SCHEDULE_H
#define PERSEUS_FUSED_SCHEDULE_H

#include <stdbool.h>
#include <stdint.h>

#include <perseus/gemm.h>
#include "fused/core/tile.h"

/* What its flags stand for (core/sync.h). */
enum prs_gemm_awaited { PRS_AWAIT_PARTIAL = 1, PRS_AWAIT_CHUNK = 2, PRS_AWAIT_BROADCAST = 3 };

/* Kinds of work that CTAs claim. */
enum prs_gemm_claims {
    PRS_CLAIM_UNITS,
    PRS_CLAIM_CHUNKS,
    PRS_CLAIM_ROWS, /* all-reduce: rows of other nodes to forward; all-gather: chunks to keep */
    PRS_CLAIMS
};

enum {
    PRS_PAIR_M = 256,   /* rows of one cluster */
    PRS_PUSH_ROWS = 64, /* all-gather: one pushed chunk is 64 rows of one step of K, 8 KB */
    PRS_STRIP_STEPS = 4 /* all-gather: K steps that share one arrival counter */
};

struct prs_schedule {
    uint32_t op; /* enum prs_gemm_op */
    struct prs_place place;
    uint32_t block_rows; /* rows of one block */
    uint32_t pairs;      /* ceil(block_rows / PRS_PAIR_M) */
    uint32_t columns;    /* column tiles */
    uint32_t k_steps;    /* steps of K: PRS_STAGE_ROW bytes of a row of A each */
    uint32_t band;       /* pairs in a band, 1..pairs; the last band may be shorter */
    uint32_t bands;      /* ceil(pairs / band) */
    uint32_t segments;   /* all-gather by copy engine: pieces along K; 0: pushed by the CTAs */
    uint32_t group;      /* between nodes: pieces (tiles of sums, strips of A) that share one signal */
    uint32_t units;      /* what this rank computes */
    /* For the largest number of rows that a launch may have, because copies must find their destination without the
     * actual number. */
    uint32_t most_pairs, most_bands;
    uint32_t wide; /* columns of a tile; for the host, since a kernel knows its own */
};

struct prs_unit {
    uint32_t block;  /* whose rows */
    uint32_t pair;   /* within the block */
    uint32_t column; /* column tile */
};

/* For a launch of m rows, at most as many as the schedule was made for. whole: a block is a multiple of PRS_PUSH_ROWS
 * rows, so that the ranks need not divide m; the last blocks may then be short or empty. */
PRS_SHARED void prs_schedule_rows(struct prs_schedule *s, uint32_t m, bool whole)
{
    uint32_t rows = prs_ceil_div(m, s->place.world);
    s->block_rows = whole ? prs_ceil_div(rows, PRS_PUSH_ROWS) * PRS_PUSH_ROWS : rows;
    s->pairs = prs_ceil_div(s->block_rows, PRS_PAIR_M);
    s->band = s->band > s->pairs ? s->pairs : s->band;
    s->bands = prs_ceil_div(s->pairs, s->band);
    s->units = s->place.world * s->pairs * s->columns;
}

/* m: rows; columns: column tiles. How n and k become tiles and steps depends on the type of the elements and the tile
 * of the kernel. */
PRS_SHARED void prs_schedule_init(struct prs_schedule *s, uint32_t op, uint32_t rank, uint32_t world, uint32_t nodes,
                                  uint32_t m, uint32_t columns, uint32_t k_steps, uint32_t band)
{
    s->op = op;
    prs_place_init(&s->place, rank, world, nodes);
    s->columns = columns;
    s->wide = PRS_TILE_N;
    s->k_steps = k_steps;
    s->band = band < 1 ? 1 : band;
    s->segments = 0;
    s->group = 1;
    prs_schedule_rows(s, m, false);
    s->most_pairs = s->pairs;
    s->most_bands = s->bands;
}

PRS_SHARED uint32_t prs_schedule_band_pairs(const struct prs_schedule *s, uint32_t band)
{
    return band + 1 < s->bands ? s->band : s->pairs - band * s->band;
}

/* Orders this rank's block, which needs no message, in rasters of PRS_RASTER rows. */
PRS_SHARED void prs_schedule_own(const struct prs_schedule *s, uint32_t at, struct prs_unit *u)
{
    uint32_t size = PRS_RASTER * s->columns, first = at / size * PRS_RASTER, rows = s->pairs - first;
    u->block = s->place.rank;
    u->pair = first + prs_tile_raster(rows < PRS_RASTER ? rows : PRS_RASTER, at % size, &u->column);
}

/* All-gather by copy engine, on a single node: every rank sends its whole block first to the rank after it, then to the
 * next. So units come block by block in the order of arrival, and in each block band by band. */
PRS_SHARED void prs_schedule_gather_copied(const struct prs_schedule *s, uint32_t at, struct prs_unit *u)
{
    uint32_t block = s->pairs * s->columns, size = s->band * s->columns, band;
    /* MUTANT(model schedule) copies, the block of the rank before comes first: s/s->place.world - 1 -/1 +/ */
    u->block = prs_place_after(&s->place, s->place.world - 1 - at / block);
    at %= block;
    band = at / size;
    u->pair = band * s->band + prs_tile_raster(prs_schedule_band_pairs(s, band), at - band * size, &u->column);
}

/* Position `at` in `blocks` blocks that are computed together, band by band: gives the block's number and the position
 * in it. */
PRS_SHARED uint32_t prs_schedule_banded(const struct prs_schedule *s, uint32_t blocks, uint32_t at, struct prs_unit *u)
{
    uint32_t size = blocks * s->band * s->columns, band = at / size, tall = prs_schedule_band_pairs(s, band);
    uint32_t row = prs_tile_raster(blocks * tall, at - band * size, &u->column);
    u->pair = band * s->band + row % tall;
    return row / tall;
}

/* All-gather: the whole own block comes first. Copied blocks follow in the order of their arrival. Pushed rows arrive
 * from all ranks at once, so the blocks of this node follow together, band by band, and then those of other nodes. */
PRS_SHARED void prs_schedule_gather(const struct prs_schedule *s, uint32_t at, struct prs_unit *u)
{
    uint32_t own = s->pairs * s->columns, near = (s->place.local_ranks - 1) * own, i;
    /* MUTANT(model schedule) copies, units come block by block: s/!= 0/> 100/ */
    if (at < own) {
        prs_schedule_own(s, at, u);
    } else if (s->segments != 0) {
        prs_schedule_gather_copied(s, at - own, u);
    } else if (at - own < near) {
        i = prs_schedule_banded(s, s->place.local_ranks - 1, at - own, u);
        u->block = prs_place_neighbour(&s->place, 1 + i);
    } else {
        i = prs_schedule_banded(s, s->place.world - s->place.local_ranks, at - own - near, u);
        u->block = prs_place_rank(&s->place, (s->place.node + 1 + i / s->place.local_ranks) % s->place.nodes,
                                  (s->place.local_rank + i) % s->place.local_ranks);
    }
}

/* A role's position in its list of units. Positions only grow, so finding the round is cheap. */
struct prs_cursor {
    uint32_t round, first; /* first: position of the first unit of the round */
};

/* What happens to a tile of partial sums. */
enum prs_part {
    PRS_PART_OWN,   /* part of the result: sums of other ranks of this node and of counterparts are added here */
    PRS_PART_RELAY, /* a counterpart's: this node's sums are added here, and put there */
    PRS_PART_SEND   /* added up by another rank of this node */
};

PRS_SHARED uint32_t prs_schedule_part(const struct prs_schedule *s, uint32_t block)
{
    if (block == s->place.rank)
        return PRS_PART_OWN;
    return block % s->place.local_ranks == s->place.local_rank ? PRS_PART_RELAY : PRS_PART_SEND;
}

/* Rounds between sending the partial sums of a band inside the node and relaying it, or adding it up. */
PRS_SHARED uint32_t prs_schedule_relay_delay(const struct prs_schedule *s)
{
    return s->place.local_ranks > 1 ? 1 : 0;
}

PRS_SHARED uint32_t prs_schedule_own_delay(const struct prs_schedule *s)
{
    return prs_schedule_relay_delay(s) + (s->place.nodes > 1 ? 1 : 0);
}

/* Pairs of this round's band: the one that was sent `delay` rounds ago. */
PRS_SHARED uint32_t prs_schedule_turn(const struct prs_schedule *s, uint32_t round, uint32_t delay)
{
    return round >= delay && round - delay < s->bands ? prs_schedule_band_pairs(s, round - delay) : 0;
}

/* Reduce-scatter and all-reduce go round by round. Round r computes: band r of all blocks that other ranks of this node
 * add up; band r - 1 of the counterparts' blocks, because this node's partial sums for it have arrived; band r - 2 of
 * this rank's block (r - 1 on a single node), because the counterparts' sums have too. The mix keeps the links evenly
 * busy. The first rounds have no band of this rank's block, the last rounds have only such a band. Ranks cannot wait in
 * a circle: a unit of round r waits only for units of earlier rounds. */
PRS_SHARED void prs_schedule_reduce(const struct prs_schedule *s, struct prs_cursor *c, uint32_t at, struct prs_unit *u)
{
    uint32_t others = s->place.nodes * (s->place.local_ranks - 1), relays = s->place.nodes - 1, tall, relay, own, row,
             i;
    uint32_t relay_delay = prs_schedule_relay_delay(s), own_delay = prs_schedule_own_delay(s);
    for (;;) {
        tall = prs_schedule_turn(s, c->round, 0);
        relay = prs_schedule_turn(s, c->round, relay_delay);
        own = prs_schedule_turn(s, c->round, own_delay);
        row = others * tall + relays * relay + own;
        if (at - c->first < row * s->columns)
            break;
        c->first += row * s->columns;
        c->round++;
    }
    row = prs_tile_raster(row, at - c->first, &u->column);
    if (row < own) {
        u->block = s->place.rank;
        u->pair = (c->round - own_delay) * s->band + row;
    } else if (row - own < relays * relay) {
        row -= own;
        u->block = prs_place_counterpart(&s->place, 1 + row / relay);
        u->pair = (c->round - relay_delay) * s->band + row % relay;
    } else {
        row -= own + relays * relay;
        i = row / tall;
        u->block = prs_place_rank(&s->place, (s->place.node + 1 + i / (s->place.local_ranks - 1)) % s->place.nodes,
                                  (s->place.local_rank + 1 + i % (s->place.local_ranks - 1)) % s->place.local_ranks);
        u->pair = c->round * s->band + row % tall;
    }
}

/* The unit that comes at position `at` (0 .. units - 1) on this rank; `at` must not be smaller than in the cursor's
 * last call. */
PRS_SHARED void prs_schedule_unit(const struct prs_schedule *s, struct prs_cursor *c, uint32_t at, struct prs_unit *u)
{
    if (s->op == PRS_GEMM_ALONE || s->place.world == 1)
        prs_schedule_own(s, at, u);
    else if (s->op == PRS_GEMM_ALLGATHER)
        prs_schedule_gather(s, at, u);
    else
        prs_schedule_reduce(s, c, at, u);
}

/* The first row of a block in this rank's result. */
PRS_SHARED uint32_t prs_schedule_result_row(const struct prs_schedule *s, uint32_t block)
{
    return s->op == PRS_GEMM_REDUCE_SCATTER ? 0 : block * s->block_rows;
}

/* ---- partial sums: reduce-scatter, all-reduce ---- */
PRS_SHARED uint32_t prs_schedule_tiles(const struct prs_schedule *s)
{
    return s->pairs * 2 * s->columns; /* tiles of one block */
}

PRS_SHARED uint32_t prs_schedule_tile(const struct prs_schedule *s, const struct prs_unit *u, uint32_t cta)
{
    return (u->pair * 2 + cta) * s->columns + u->column;
}

/* All-gather: the slot in which `owner` keeps the block of `sender`. */
PRS_SHARED uint32_t prs_schedule_slot(const struct prs_schedule *s, uint32_t sender, uint32_t owner)
{
    return prs_index_after(sender, owner, s->place.world);
}

/* All-gather: one slot for the block of each other rank, and one from which this rank's block is put to other nodes. */
PRS_SHARED uint32_t prs_schedule_gathered_slots(const struct prs_schedule *s)
{
    return s->place.world - (s->place.nodes > 1 ? 0 : 1);
}

/* Slots of a bank of partial sums, each for one block: first those that ranks of this node write, (locals - 1) for each
 * node whose block it is; then the counterparts' sums for this rank's block; then this node's sums for the
 * counterparts' blocks, which are put from there. */
PRS_SHARED uint32_t prs_schedule_slots(const struct prs_schedule *s)
{
    return s->place.nodes * (s->place.local_ranks - 1) + 2 * (s->place.nodes - 1);
}

/* The slot, at the rank that adds up `block` in this node, for the sums of `sender`, another rank of this node. */
PRS_SHARED uint32_t prs_schedule_send_slot(const struct prs_schedule *s, uint32_t sender, uint32_t block)
{
    return block / s->place.local_ranks * (s->place.local_ranks - 1) +
           prs_index_after(sender % s->place.local_ranks, block % s->place.local_ranks, s->place.local_ranks);
}

/* The slot at the owner for the sums of node `from`. */
PRS_SHARED uint32_t prs_schedule_arrive_slot(const struct prs_schedule *s, uint32_t from, uint32_t owner_node)
{
    return s->place.nodes * (s->place.local_ranks - 1) + prs_index_after(from, owner_node, s->place.nodes);
}

/* The slot here for sums that go to node `to`. */
PRS_SHARED uint32_t prs_schedule_relay_slot(const struct prs_schedule *s, uint32_t to)
{
    return s->place.nodes * (s->place.local_ranks - 1) + s->place.nodes - 1 +
           prs_index_after(to, s->place.node, s->place.nodes);
}

/* How many sums of others are added to a tile of this block, which is this rank's block or a relayed one: first those
 * of this node, then those of other nodes. The slot order makes the sum repeatable bit by bit. */
PRS_SHARED uint32_t prs_schedule_sources(const struct prs_schedule *s, uint32_t block)
{
    return s->place.local_ranks - 1 + (block == s->place.rank ? s->place.nodes - 1 : 0);
}

struct prs_source {
    uint32_t slot, rank; /* the slot with the sums, the rank that sends them */
    uint32_t far;        /* 1: they come by put and signal; 0: by stores and flags */
};

PRS_SHARED struct prs_source prs_schedule_source(const struct prs_schedule *s, uint32_t block, uint32_t i)
{
    struct prs_source from;
    from.far = i >= s->place.local_ranks - 1;
    if (from.far) {
        from.slot = s->place.nodes * (s->place.local_ranks - 1) + i - (s->place.local_ranks - 1);
        from.rank = prs_place_counterpart(&s->place, 1 + i - (s->place.local_ranks - 1));
    } else {
        from.slot = block / s->place.local_ranks * (s->place.local_ranks - 1) + i;
        from.rank = prs_place_neighbour(&s->place, 1 + i);
    }
    return from;
}

/* The flag that says that this slot has warpgroup `half`'s half of this tile. The flags of a slot are placed as for the
 * largest number of rows. So each flag has the same writer in all launches, which raises it to an epoch only after it
 * has finished the previous launch. */
PRS_SHARED uint32_t prs_schedule_partial_flag(const struct prs_schedule *s, uint32_t slot, uint32_t tile, uint32_t half)
{
    return (slot * s->most_pairs * 2 * s->columns + tile) * 2 + half;
}

/* ---- pushed chunks: all-gather ---- */
struct prs_chunk {
    uint32_t row;  /* first row within this rank's block, a multiple of PRS_PUSH_ROWS */
    uint32_t step; /* of K */
};

PRS_SHARED uint32_t prs_schedule_strips(const struct prs_schedule *s)
{
    return prs_ceil_div(s->k_steps, PRS_STRIP_STEPS);
}

PRS_SHARED uint32_t prs_schedule_chunks(const struct prs_schedule *s)
{
    return prs_ceil_div(s->block_rows, PRS_PUSH_ROWS) * s->k_steps;
}

/* Chunks go band by band. Within a band all rows of one K step go before the next step, because every waiting tile
 * needs step 0 first. */
PRS_SHARED void prs_schedule_chunk(const struct prs_schedule *s, uint32_t at, struct prs_chunk *c)
{
    uint32_t rows = s->band * (PRS_PAIR_M / PRS_PUSH_ROWS), all = prs_ceil_div(s->block_rows, PRS_PUSH_ROWS);
    uint32_t band = at / (rows * s->k_steps), left = all - band * rows;
    at -= band * rows * s->k_steps;
    left = left < rows ? left : rows;
    c->row = (band * rows + at % left) * PRS_PUSH_ROWS;
    c->step = at / left;
}

/* Arrival counter of (sender's slot, row tile of its block, strip of K steps). */
PRS_SHARED uint32_t prs_schedule_arrival(const struct prs_schedule *s, uint32_t slot, uint32_t row_tile, uint32_t strip)
{
    return (slot * s->pairs * 2 + row_tile) * prs_schedule_strips(s) + strip;
}

/* By copy engine: a band of a block travels in `segments` pieces along K. Flag of (sender's slot, band, piece). */
PRS_SHARED uint32_t prs_schedule_segment_steps(const struct prs_schedule *s)
{
    return prs_ceil_div(s->k_steps, s->segments);
}

PRS_SHARED uint32_t prs_schedule_segment_flag(const struct prs_schedule *s, uint32_t slot, uint32_t band,
                                              uint32_t segment)
{
    return (slot * s->most_bands + band) * s->segments + segment;
}

struct prs_copy {
    uint32_t distance;      /* the copy goes to the rank `distance` places after this one */
    uint32_t band, segment; /* of this rank's block */
};

PRS_SHARED uint32_t prs_schedule_copies(const struct prs_schedule *s)
{
    return (s->place.world - 1) * s->bands * s->segments;
}

/* All copies to one rank go before those to the next, because units also come block by block. */
/* MUTANT(model schedule) copies, all of one rank before the next:
 * s#/ s->bands; c->band = band % s->bands#% (s->place.world - 1); c->band = band / (s->place.world - 1)# */
PRS_SHARED void prs_schedule_copy(const struct prs_schedule *s, uint32_t at, struct prs_copy *c)
{
    /* MUTANT(model schedule) copies, a band's pieces one after the other:
     * s#/ s->segments#% (prs_schedule_copies(s) / s->segments)# */
    uint32_t band = at / s->segments;
    c->distance = 1 + band / s->bands;
    c->band = band % s->bands;
    c->segment = at % s->segments;
}

/* How many rows of a row tile exist. */
PRS_SHARED uint32_t prs_schedule_tile_rows(const struct prs_schedule *s, uint32_t row_tile)
{
    uint32_t row = row_tile * PRS_TILE_M, left = row < s->block_rows ? s->block_rows - row : 0;
    return left < PRS_TILE_M ? left : PRS_TILE_M;
}

/* How many chunks an arrival counter gains per launch. */
PRS_SHARED uint32_t prs_schedule_arrivals(const struct prs_schedule *s, uint32_t row_tile, uint32_t strip)
{
    uint32_t rows = prs_ceil_div(prs_schedule_tile_rows(s, row_tile), PRS_PUSH_ROWS);
    uint32_t steps = s->k_steps - strip * PRS_STRIP_STEPS;
    return rows * (steps < PRS_STRIP_STEPS ? steps : PRS_STRIP_STEPS);
}

/* ---- between nodes: pieces and their signals -----------------------------------------------------------------------
 * A piece is a tile of partial sums, or a strip of PRS_STRIP_STEPS K steps of a row tile of A. A put and a signal move
 * a group of pieces of one band (more would make a rank wait for a later round). The pieces of a group are contiguous:
 * tiles column by column, each with all row tiles of the band; strips as in A. */
PRS_SHARED uint32_t prs_schedule_lanes(const struct prs_schedule *s)
{
    return s->op == PRS_GEMM_ALLGATHER ? prs_schedule_strips(s) : s->columns;
}

/* How many row tiles have pieces: the second of a pair may have no rows, and then no chunk of A. */
PRS_SHARED uint32_t prs_schedule_piece_rows(const struct prs_schedule *s)
{
    return s->op == PRS_GEMM_ALLGATHER ? prs_ceil_div(s->block_rows, PRS_TILE_M) : s->pairs * 2;
}

PRS_SHARED uint32_t prs_schedule_band_groups(const struct prs_schedule *s)
{
    return prs_ceil_div(s->band * 2 * prs_schedule_lanes(s), s->group);
}

PRS_SHARED uint32_t prs_schedule_groups(const struct prs_schedule *s)
{
    return s->bands * prs_schedule_band_groups(s);
}

struct prs_piece_group {
    uint32_t index, pieces; /* number of the group, and how many pieces it has */
    uint32_t band, first;   /* its first piece among those of the band */
};

/* Row tiles of a band that have pieces. */
PRS_SHARED uint32_t prs_schedule_band_rows(const struct prs_schedule *s, uint32_t band)
{
    uint32_t tall = s->band * 2, rows = prs_schedule_piece_rows(s) - band * tall;
    return rows < tall ? rows : tall;
}

/* The group of the piece with this row tile and this column, or strip. */
PRS_SHARED struct prs_piece_group prs_schedule_group(const struct prs_schedule *s, uint32_t row_tile, uint32_t lane)
{
    uint32_t tall = s->band * 2, band = row_tile / tall, rows = prs_schedule_band_rows(s, band);
    uint32_t lanes = prs_schedule_lanes(s), row = row_tile % tall, left;
    uint32_t at = s->op == PRS_GEMM_ALLGATHER ? row * lanes + lane : lane * rows + row;
    struct prs_piece_group g;
    g.band = band;
    g.first = at / s->group * s->group;
    left = rows * lanes - g.first;
    g.index = band * prs_schedule_band_groups(s) + at / s->group;
    g.pieces = left < s->group ? left : s->group;
    return g;
}

/* Where the first piece of a group of tiles lies in a slot, counted in tiles. */
PRS_SHARED uint32_t prs_schedule_group_place(const struct prs_schedule *s, const struct prs_piece_group *g)
{
    return g->band * s->band * 2 * s->columns + g->first;
}

/* Where a tile of partial sums lies in a slot. On one node tiles travel alone. */
PRS_SHARED uint32_t prs_schedule_tile_place(const struct prs_schedule *s, uint32_t tile)
{
    uint32_t tall = s->band * 2, row_tile = tile / s->columns, band = row_tile / tall;
    if (s->place.nodes == 1)
        return tile;
    return band * tall * s->columns + tile % s->columns * prs_schedule_band_rows(s, band) + row_tile % tall;
}

/* This rank's signal words, by counterpart (prs_index_after() of its node): one for each group; for an all-reduce then
 * one for each row tile of the counterpart's block of the result. As with flags, only one rank ever writes a word. */
PRS_SHARED uint32_t prs_schedule_group_word(const struct prs_schedule *s, uint32_t from, uint32_t group)
{
    return group * (s->place.nodes - 1) + from;
}

PRS_SHARED uint32_t prs_schedule_row_word(const struct prs_schedule *s, uint32_t from, uint32_t row_tile)
{
    return prs_schedule_group_word(s, from, prs_schedule_groups(s) + row_tile);
}

/* This rank's own counters, which tell which arrival is the last. They count halves of each relayed tile and pieces
 * of each group, both by destination node; for an all-reduce also halves of tiles in each row tile of this rank's
 * block. */
PRS_SHARED uint32_t prs_schedule_tile_counter(const struct prs_schedule *s, uint32_t to, uint32_t tile)
{
    return to * prs_schedule_tiles(s) + tile;
}

PRS_SHARED uint32_t prs_schedule_group_counter(const struct prs_schedule *s, uint32_t to, uint32_t group)
{
    uint32_t tiles = s->op == PRS_GEMM_ALLGATHER ? 0 : prs_schedule_tile_counter(s, s->place.nodes - 1, 0);
    return tiles + to * prs_schedule_groups(s) + group;
}

PRS_SHARED uint32_t prs_schedule_row_counter(const struct prs_schedule *s, uint32_t row_tile)
{
    return prs_schedule_group_counter(s, s->place.nodes - 1, 0) + row_tile;
}

/* Additions to a counter of finished broadcasts in a launch: halves of tiles of the sender's own block, and single rows
 * that it forwards for its counterparts. */
PRS_SHARED uint32_t prs_schedule_broadcasts(const struct prs_schedule *s)
{
    return prs_schedule_tiles(s) * 2 + (s->place.nodes - 1) * s->block_rows;
}

/* All-reduce: gives a row of a counterpart's block that came here, all nodes in turn. Returns the block. */
PRS_SHARED uint32_t prs_schedule_forward_row(const struct prs_schedule *s, uint32_t at, uint32_t *row)
{
    uint32_t nodes = s->place.nodes - 1;
    *row = at / nodes;
    return prs_place_counterpart(&s->place, 1 + at % nodes);
}

/* All-gather: gives a chunk that a rank of another node put here for this rank's node, all nodes in turn. Returns the
 * block of the chunk. */
PRS_SHARED uint32_t prs_schedule_forward(const struct prs_schedule *s, uint32_t at, struct prs_chunk *c)
{
    uint32_t nodes = s->place.nodes - 1;
    prs_schedule_chunk(s, at / nodes, c);
    return prs_place_counterpart(&s->place, 1 + at % nodes);
}

#endif
