/* SPDX-License-Identifier: Apache-2.0 */
/* Who computes what, in which order, and which flag each piece raises. Plain C shared by the kernels, the host and the
 * CPU protocol test (test/fused): no CUDA, no memory, no clock.
 *
 * The rows of the product are cut into `world` equal blocks, one per rank: its rows of the result (reduce-scatter,
 * all-reduce) or its rows of A (all-gather). A block is cut into pairs of row tiles, because a cluster of two CTAs
 * computes two row tiles that share their columns of B. A unit is one pair by one column tile. Bands of pairs are the
 * grain of communication. */
#ifndef PERSEUS_FUSED_SCHEDULE_H
#define PERSEUS_FUSED_SCHEDULE_H

#include <stdint.h>

#ifdef __CUDACC__
#    define PRS_SHARED static __host__ __device__ __forceinline__
#else
#    define PRS_SHARED static inline
#endif

enum {
    PRS_TILE_M = 128,   /* rows of one CTA: two consumer warpgroups of 64 */
    PRS_TILE_N = 256,   /* the widest wgmma: fewest shared-memory bytes per product */
    PRS_TILE_K = 64,    /* 128 bytes of bf16: one swizzle row */
    PRS_PAIR_M = 256,   /* rows of one cluster */
    PRS_RASTER = 8,     /* 8 x 8 units at a time read least from the L2 cache */
    PRS_PUSH_ROWS = 64, /* all-gather: one pushed chunk is 64 rows x 64 columns, 8 KB */
    PRS_STRIP_STEPS = 4 /* all-gather: K steps that share one arrival counter */
};

enum prs_fused_kind { PRS_KIND_GEMM = 0, PRS_KIND_REDUCE_SCATTER = 1, PRS_KIND_ALLGATHER = 2, PRS_KIND_ALLREDUCE = 3 };

struct prs_schedule {
    uint32_t kind, rank, world;
    uint32_t block_rows; /* rows of one block */
    uint32_t pairs;      /* ceil(block_rows / PRS_PAIR_M) */
    uint32_t columns;    /* ceil(n / PRS_TILE_N) */
    uint32_t k_steps;    /* ceil(k / PRS_TILE_K) */
    uint32_t band;       /* pairs in a band, 1..pairs; the last band may be shorter */
    uint32_t bands;      /* ceil(pairs / band) */
    uint32_t lag;        /* rounds between sending partial sums of a band and adding them up, at least 1 */
    uint32_t segments;   /* all-gather by copy engine: pieces along K; 0: pushed by the CTAs */
    uint32_t in_turn;    /* all-gather: 1: one block after the other; 0: the same band of all other blocks together */
    uint32_t units;      /* what this rank computes */
};

struct prs_unit {
    uint32_t block;  /* whose rows */
    uint32_t pair;   /* within the block */
    uint32_t column; /* column tile */
};

/* Flags and counters only grow, modulo 2^32. */
PRS_SHARED int prs_flag_reached(uint32_t seen, uint32_t want)
{
    return (int32_t)(seen - want) >= 0;
}

PRS_SHARED uint32_t prs_ceil_div(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}

PRS_SHARED void prs_schedule_init(struct prs_schedule *s, uint32_t kind, uint32_t rank, uint32_t world, uint32_t m,
                                  uint32_t n, uint32_t k, uint32_t band, uint32_t lag)
{
    s->kind = kind;
    s->rank = rank;
    s->world = world;
    s->block_rows = m / world;
    s->pairs = prs_ceil_div(s->block_rows, PRS_PAIR_M);
    s->columns = prs_ceil_div(n, PRS_TILE_N);
    s->k_steps = prs_ceil_div(k, PRS_TILE_K);
    s->band = band < 1 ? 1 : band > s->pairs ? s->pairs : band;
    s->bands = prs_ceil_div(s->pairs, s->band);
    s->lag = lag < 1 ? 1 : lag > s->bands ? s->bands : lag;
    s->segments = 0;
    s->in_turn = 0;
    s->units = world * s->pairs * s->columns;
}

PRS_SHARED uint32_t prs_schedule_band_pairs(const struct prs_schedule *s, uint32_t band)
{
    return band + 1 < s->bands ? s->band : s->pairs - band * s->band;
}

/* Unit `at` of a raster of `rows` rows of units: rows run fastest, so that the clusters that work at the same time
 * share columns of B and rows of A in the L2 cache. Every column starts one row later, so that no cluster keeps meeting
 * the same row. */
PRS_SHARED uint32_t prs_schedule_raster(uint32_t rows, uint32_t at, uint32_t *column)
{
    *column = at / rows;
    return (at + *column) % rows;
}

/* The own block, which needs no message, in rasters of PRS_RASTER rows. */
PRS_SHARED void prs_schedule_own(const struct prs_schedule *s, uint32_t at, struct prs_unit *u)
{
    uint32_t size = PRS_RASTER * s->columns, first = at / size * PRS_RASTER, rows = s->pairs - first;
    u->block = s->rank;
    u->pair = first + prs_schedule_raster(rows < PRS_RASTER ? rows : PRS_RASTER, at % size, &u->column);
}

/* All-gather, every rank sending to the rank after it first, then to the one after that: block by block in the order of
 * arrival, each band by band. */
PRS_SHARED void prs_schedule_gather_in_turn(const struct prs_schedule *s, uint32_t at, struct prs_unit *u)
{
    uint32_t block = s->pairs * s->columns, size = s->band * s->columns, band;
    u->block = (s->rank + s->world - 1 - at / block) % s->world;
    at %= block;
    band = at / size;
    u->pair = band * s->band + prs_schedule_raster(prs_schedule_band_pairs(s, band), at - band * size, &u->column);
}

/* All-gather: everything of the own block, then band by band of all other blocks together, or block by block. */
PRS_SHARED void prs_schedule_gather(const struct prs_schedule *s, uint32_t at, struct prs_unit *u)
{
    uint32_t own = s->pairs * s->columns, size = (s->world - 1) * s->band * s->columns, band, tall, row;
    if (at < own) {
        prs_schedule_own(s, at, u);
        return;
    }
    at -= own;
    if (s->in_turn) {
        prs_schedule_gather_in_turn(s, at, u);
        return;
    }
    band = at / size;
    tall = prs_schedule_band_pairs(s, band);
    row = prs_schedule_raster((s->world - 1) * tall, at - band * size, &u->column);
    u->block = (s->rank + 1 + row / tall) % s->world;
    u->pair = band * s->band + row % tall;
}

/* Where a role is in its list of units; positions only grow, so that finding the round costs nothing. */
struct prs_cursor {
    uint32_t round, first; /* first: position of the first unit of the round */
};

/* Reduce-scatter and all-reduce, round by round: band j of all other blocks together with band j - lag of the own
 * block, whose partial sums from the other ranks travelled in the meantime. Mixing them keeps the links evenly busy.
 * The first rounds have no own band, the last rounds nothing else. No rank can wait in a circle: a unit of round j
 * waits for units of earlier rounds only. */
PRS_SHARED void prs_schedule_reduce(const struct prs_schedule *s, struct prs_cursor *c, uint32_t at, struct prs_unit *u)
{
    uint32_t others = s->world - 1, tall, own, row;
    for (;;) {
        tall = c->round < s->bands ? prs_schedule_band_pairs(s, c->round) : 0;
        own = c->round >= s->lag ? prs_schedule_band_pairs(s, c->round - s->lag) : 0;
        if (at - c->first < (others * tall + own) * s->columns)
            break;
        c->first += (others * tall + own) * s->columns;
        c->round++;
    }
    row = prs_schedule_raster(others * tall + own, at - c->first, &u->column);
    if (row < own) {
        u->block = s->rank;
        u->pair = (c->round - s->lag) * s->band + row;
    } else {
        row -= own;
        u->block = (s->rank + 1 + row / tall) % s->world;
        u->pair = c->round * s->band + row % tall;
    }
}

/* The unit that comes at position `at` (0 .. units - 1) on this rank; `at` must not be smaller than in the cursor's
 * last call. */
PRS_SHARED void prs_schedule_unit(const struct prs_schedule *s, struct prs_cursor *c, uint32_t at, struct prs_unit *u)
{
    if (s->kind == PRS_KIND_GEMM || s->world == 1)
        prs_schedule_own(s, at, u);
    else if (s->kind == PRS_KIND_ALLGATHER)
        prs_schedule_gather(s, at, u);
    else
        prs_schedule_reduce(s, c, at, u);
}

/* ---- partial sums: reduce-scatter, all-reduce ---------------------------------------------------------------------
 */
PRS_SHARED uint32_t prs_schedule_tiles(const struct prs_schedule *s)
{
    return s->pairs * 2 * s->columns; /* tiles of one block */
}

PRS_SHARED uint32_t prs_schedule_tile(const struct prs_schedule *s, const struct prs_unit *u, uint32_t cta)
{
    return (u->pair * 2 + cta) * s->columns + u->column;
}

/* Where `sender` puts its partial sums at `owner`: slot 0 belongs to the rank after the owner, and so on. The owner
 * adds them in slot order, which makes the sum repeatable bit by bit. */
PRS_SHARED uint32_t prs_schedule_slot(const struct prs_schedule *s, uint32_t sender, uint32_t owner)
{
    return (sender + s->world - owner - 1) % s->world;
}

/* The flag that says: the half of warpgroup `half` of this tile is in this slot. */
PRS_SHARED uint32_t prs_schedule_partial_flag(const struct prs_schedule *s, uint32_t slot, uint32_t tile, uint32_t half)
{
    return (slot * prs_schedule_tiles(s) + tile) * 2 + half;
}

/* ---- pushed chunks: all-gather ------------------------------------------------------------------------------------
 */
struct prs_chunk {
    uint32_t row;  /* first row within the own block, a multiple of PRS_PUSH_ROWS */
    uint32_t step; /* K step: columns step * PRS_TILE_K ... */
};

PRS_SHARED uint32_t prs_schedule_strips(const struct prs_schedule *s)
{
    return prs_ceil_div(s->k_steps, PRS_STRIP_STEPS);
}

PRS_SHARED uint32_t prs_schedule_chunks(const struct prs_schedule *s)
{
    return prs_ceil_div(s->block_rows, PRS_PUSH_ROWS) * s->k_steps;
}

/* Bands in order; within a band all rows of one K step before the next step, since every waiting tile needs step 0
 * first. */
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
    return (slot * s->bands + band) * s->segments + segment;
}

/* How many chunks an arrival counter gains per launch. */
PRS_SHARED uint32_t prs_schedule_arrivals(const struct prs_schedule *s, uint32_t row_tile, uint32_t strip)
{
    uint32_t row = row_tile * PRS_TILE_M, steps = s->k_steps - strip * PRS_STRIP_STEPS;
    uint32_t rows = row < s->block_rows ? s->block_rows - row : 0;
    rows = prs_ceil_div(rows < PRS_TILE_M ? rows : PRS_TILE_M, PRS_PUSH_ROWS);
    return rows * (steps < PRS_STRIP_STEPS ? steps : PRS_STRIP_STEPS);
}

#endif
