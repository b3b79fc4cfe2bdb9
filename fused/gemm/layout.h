/* SPDX-License-Identifier: Apache-2.0 */
/* What host and kernels agree on: shared memory, staging memory, kernel arguments. */
#ifndef PERSEUS_FUSED_LAYOUT_H
#define PERSEUS_FUSED_LAYOUT_H

#include <assert.h>
#include <cuda.h>
#include <stddef.h>
#include <stdint.h>

#include "fused/core/far.h"
#include "fused/core/sync.h"
#include "fused/gemm/schedule.h"

enum {
    PRS_STAGES = 4,      /* 48 KB each; fewer cost ~2 % at large K, more leave no room for C */
    PRS_STAGE_A = 16384, /* bytes: 128 rows x 64 columns */
    PRS_STAGE_B = 32768, /* bytes: 64 x 256 */
    PRS_STAGE = PRS_STAGE_A + PRS_STAGE_B,
    PRS_SLAB = 8192,        /* bytes: 64 rows x 64 columns of C, what one bulk store moves */
    PRS_SLABS_PER_TILE = 4, /* per warpgroup: 256 columns */
    PRS_PUSH_SLOTS = 2,     /* all-gather: chunks in flight per CTA */
    PRS_PUSH_BYTES = 8192,
    PRS_THREADS = 384,        /* producer warpgroup, then two consumer warpgroups */
    PRS_PARTIAL_TILE = 65536, /* bytes of one bf16 tile of partial sums */
    /* One stage holds a quarter of a tile of partial sums from at most this many slots. */
    PRS_PARTIALS_PER_STAGE = 3,
    PRS_PARTIAL_QUARTER = PRS_PARTIAL_TILE / 4
};

/* Offsets in dynamic shared memory. The store buffers and the push buffers share 32 KB: all-gather gets one slab per
 * warpgroup and two push slots, the others two slabs per warpgroup. */
enum {
    PRS_SMEM_A = 0,
    PRS_SMEM_B = PRS_SMEM_A + PRS_STAGES * PRS_STAGE_A,
    PRS_SMEM_C = PRS_SMEM_B + PRS_STAGES * PRS_STAGE_B,
    PRS_SMEM_PUSH = PRS_SMEM_C + 2 * PRS_SLAB,
    PRS_SMEM_BARRIERS = PRS_SMEM_C + 4 * PRS_SLAB,
    PRS_SMEM_BYTES = PRS_SMEM_BARRIERS + 256
};

static_assert(PRS_SMEM_BYTES <= 232448, "a Hopper CTA has 227 KB of shared memory");
static_assert(PRS_PUSH_SLOTS * PRS_PUSH_BYTES == 2 * PRS_SLAB, "push slots take the place of the second slabs");
static_assert(PRS_PARTIALS_PER_STAGE * PRS_PARTIAL_QUARTER == PRS_STAGE,
              "quarters of three partial tiles fill a stage");
static_assert(PRS_PARTIAL_QUARTER == 2 * PRS_SLAB, "a quarter is one slab of each warpgroup");

/* One quarter (64 columns) of one partial tile lies contiguous: the slab of warpgroup 0, then that of warpgroup 1.
 * Tiles by their place, prs_schedule_tile_place(). */
PRS_SHARED uint64_t prs_layout_place(const struct prs_schedule *s, uint32_t slot, uint32_t place)
{
    return ((uint64_t)slot * prs_schedule_tiles(s) + place) * PRS_PARTIAL_TILE;
}

PRS_SHARED uint64_t prs_layout_partial(const struct prs_schedule *s, uint32_t slot, uint32_t tile, uint32_t quarter)
{
    return prs_layout_place(s, slot, prs_schedule_tile_place(s, tile)) + quarter * PRS_PARTIAL_QUARTER;
}

/* All-gather: one pushed tile of A, 128 rows x 64 columns, swizzled as the tensor cores read it; tiles of a row lie
 * along K, so that both ends move whole pages instead of 128-byte pieces of rows. */
PRS_SHARED uint64_t prs_layout_gathered(const struct prs_schedule *s, uint32_t slot, uint32_t row_tile, uint32_t step)
{
    return (((uint64_t)slot * s->pairs * 2 + row_tile) * s->k_steps + step) * PRS_STAGE_A;
}

struct prs_kernel_args {
    CUtensorMap a, b;
    CUtensorMap c[PRS_MAX_LOCAL_RANKS]; /* [0]: own result; all-reduce: [p]: that of neighbour p */
    CUtensorMap push_source;            /* all-gather: own A in chunks */
    CUtensorMap gathered;               /* all-gather by copy engine: received A, row-major, one bank */
    struct prs_schedule schedule;
    struct prs_sync sync;
    /* [p]: of neighbour p (geometry.h), 0 this rank. */
    uint8_t *staging[PRS_MAX_LOCAL_RANKS]; /* [p]: partial sums or gathered A at neighbour p, both banks */
    uint64_t staging_bank_bytes;
    uint32_t *flags[PRS_MAX_LOCAL_RANKS]; /* [p]: partial flags or arrival counters at neighbour p */
    uint32_t
        *done[PRS_MAX_LOCAL_RANKS]; /* [p]: all-reduce: broadcast counters at neighbour p, one per neighbour of it */
    struct prs_far far;             /* several nodes only */
    uint32_t n;                     /* columns of the result */
    uint32_t push_gap, store_gap;   /* SM clocks from one pushed chunk, or one sent slab, to the next: a link that is
                                       never   full does not hold up the SM's own loads */
    uint32_t paced;                 /* 1: a store is issued only when the one before it has landed */
    uint32_t push_ctas;             /* all-gather: CTAs whose fourth warp pushes; 0: the copy engine does */
};

#endif
