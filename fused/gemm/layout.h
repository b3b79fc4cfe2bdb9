/* SPDX-License-Identifier: Apache-2.0 */
/* What host and kernels agree on: staging memory and kernel arguments. */
#ifndef PERSEUS_FUSED_GEMM_LAYOUT_H
#define PERSEUS_FUSED_GEMM_LAYOUT_H

#include <assert.h>
#include <cuda.h>
#include <stddef.h>
#include <stdint.h>

#include "fused/core/epilogue.h"
#include "fused/core/far.h"
#include "fused/core/partial_sums.h"
#include "fused/core/scales.h"
#include "fused/core/sync.h"
#include "fused/core/tile.h"
#include "fused/gemm/schedule.h"

static_assert((int)PRS_CLAIMS <= (int)PRS_MOST_CLAIMS, "each kind of work has a counter");

/* The offset of one quarter of a partial tile (partial_sums.cuh). prs_schedule_tile_place() orders the tiles. */
PRS_SHARED uint64_t prs_layout_place(const struct prs_schedule *s, uint32_t slot, uint32_t place)
{
    return ((uint64_t)slot * prs_schedule_tiles(s) + place) * PRS_PARTIAL_TILE;
}

PRS_SHARED uint64_t prs_layout_partial(const struct prs_schedule *s, uint32_t slot, uint32_t tile, uint32_t quarter)
{
    return prs_layout_place(s, slot, prs_schedule_tile_place(s, tile)) + quarter * PRS_PARTIAL_QUARTER;
}

/* All-gather: one pushed tile of A, 128 rows of 128 bytes, swizzled as the tensor cores read it. Tiles of a row are
 * contiguous along K, so that both ends move whole pages instead of 128-byte pieces of rows. */
PRS_SHARED uint64_t prs_layout_gathered(const struct prs_schedule *s, uint32_t slot, uint32_t row_tile, uint32_t step)
{
    return (((uint64_t)slot * s->pairs * 2 + row_tile) * s->k_steps + step) * PRS_STAGE_A;
}

/* Of scales that came with rows of A: how many floats lie between one step of K and the next. Between nodes the scales
 * of each row tile lie together, so that those of strips that travel in one put are contiguous, as the strips are. */
PRS_SHARED uint64_t prs_scales_pitch(const struct prs_schedule *s)
{
    return s->place.nodes > 1 ? PRS_TILE_M : (uint64_t)s->most_pairs * PRS_PAIR_M;
}

/* Where these scales lie: after all slots of A. step: of K, less than `sent` (scales.h), or `sent`: where they end. For
 * one step the scales of all rows are contiguous; between nodes, those of one row tile. */
PRS_SHARED uint64_t prs_layout_scales(const struct prs_schedule *s, uint32_t sent, uint32_t slot, uint32_t step,
                                      uint32_t row)
{
    uint64_t most = (uint64_t)s->most_pairs * PRS_PAIR_M, rows = prs_schedule_gathered_slots(s) * most;
    uint32_t first = s->place.nodes > 1 ? row / PRS_TILE_M * PRS_TILE_M : 0;
    return rows / PRS_TILE_M * s->k_steps * PRS_STAGE_A +
           ((slot * most + first) * sent + step * prs_scales_pitch(s) + row - first) * sizeof(float);
}

/* Products of e4m3 have two instances: one promotes sums to fp32 every 128 of K (scales.cuh). */
PRS_SHARED bool prs_promotes(const struct prs_gemm_shape *s)
{
    return s->dtype == PRS_DTYPE_E4M3 && !s->fast_accumulation;
}

/* All plans of a context share staging memory, because their launches run one after the other, on all ranks in the same
 * order. These words say when it may be written again, so they count the launches of all fused products of the context.
 * They are symmetric memory; only the rank that owns them changes the first two. */
struct prs_turns {
    uint32_t launches; /* finished; the next launch uses the bank of its parity */
    uint32_t copied;   /* of those, by copy engines */
    /* [world - 1], by the distance to the receiver: how many of the copied launches that rank has finished */
    uint32_t credit[];
};

PRS_SHARED uint64_t prs_turns_bytes(uint32_t world)
{
    return sizeof(struct prs_turns) + (world - 1) * sizeof(uint32_t);
}

/* What all roles of a CTA know of the launch, in its shared memory. */
struct prs_launch {
    struct prs_schedule schedule; /* of this launch's rows */
    uint32_t epoch;
    uint32_t m;    /* its rows */
    uint64_t bank; /* where its bank begins in the staging memory of every rank */
};
static_assert(sizeof(struct prs_launch) <= PRS_SMEM_BYTES - PRS_SMEM_LAUNCH, "it fits after the barriers");

struct prs_kernel_args {
    CUtensorMap a, b;
    CUtensorMap c[PRS_MAX_LOCAL_RANKS]; /* [0]: this rank's result; all-reduce: [p]: the result of neighbour p */
    CUtensorMap push_source;            /* all-gather: this rank's A in chunks */
    CUtensorMap gathered;               /* all-gather by copy engine: received A, row-major, one bank */
    CUtensorMap keep_from;              /* the same, in chunks */
    CUtensorMap keep_to;                /* all-gather: the caller's memory for the gathered A, in chunks */
    struct prs_schedule schedule;       /* for the largest number of rows; kernels use launch_here()->schedule */
    struct prs_sync sync;
    /* [p]: at neighbour p (geometry.h); 0 is this rank. */
    uint8_t *staging[PRS_MAX_LOCAL_RANKS];        /* partial sums or gathered A, both banks */
    uint64_t staging_bank_bytes;                  /* half of the staging memory; the plan may need less */
    struct prs_turns *turns[PRS_MAX_LOCAL_RANKS]; /* NULL: nothing is communicated */
    struct prs_alarm *alarms[PRS_MAX_LOCAL_RANKS];
    uint32_t plan; /* its number among those that all ranks opened */
    /* Partial flags, or two banks of arrival counters, of this plan alone; their bank is that of the epoch. A counter
     * that other ranks raise is zero when its bank is used: the last CTA of a launch zeroes the bank of that launch. A
     * rank is in epoch e + 2, and raises counters of that bank again, only when all others have finished e: its epoch e
     * + 1 needed what they sent after that. */
    uint32_t *flags[PRS_MAX_LOCAL_RANKS];
    uint32_t flag_bank;                  /* words */
    uint32_t *done[PRS_MAX_LOCAL_RANKS]; /* all-reduce: two banks of broadcast counters, one for each neighbour of p */
    struct prs_far far;                  /* several nodes only */
    struct prs_epilogue epilogue;
    uint32_t n; /* columns of the result */
    /* SM clocks from one pushed chunk, or one sent slab, to the next: a link that is never full does not delay the SM's
     * own loads. */
    uint32_t push_gap, store_gap;
    uint32_t claim_step; /* K step of a unit at which the next unit is claimed */
    uint32_t paced;      /* 1: a store is issued only when the one before it has landed */
    /* Rows of this launch, or where the device has that number, which must then be a multiple of row_step and at most
     * most_rows. */
    uint32_t m;
    const uint32_t *m_on_device;
    uint32_t most_rows, row_step;
    /* 1: blocks are multiples of 64 rows, and c describes all rows as one plane: a slab never crosses into the next
     * block, and numbers of rows that the ranks do not divide, or that only the device knows, need no map of their
     * own. */
    uint32_t whole;
    uint32_t keeps;           /* 1: the gathered A is written to keep_to */
    struct prs_scales scales; /* used for e4m3 only, like the members that follow */
    struct prs_quantised_result quantised;
};

#endif
