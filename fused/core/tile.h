/* SPDX-License-Identifier: Apache-2.0 */
/* The tile product that the GEMM and MoE share: sizes, and the shared memory of its CTA. */
#ifndef PERSEUS_FUSED_TILE_H
#define PERSEUS_FUSED_TILE_H

#include <assert.h>

#include "fused/core/geometry.h"

enum {
    PRS_TILE_M = 128,   /* rows of one CTA: two consumer warpgroups of 64 */
    PRS_TILE_N = 256,   /* columns, at most: the widest wgmma has the fewest shared-memory bytes per product */
    PRS_NARROW_N = 192, /* three slabs, so not for gated tiles, which have two halves */
    PRS_RASTER = 8,     /* units are taken in squares of 8 x 8, which read least from L2 */
    PRS_THREADS = 384   /* producer warpgroup, then two consumer warpgroups */
};

/* Sizes in bytes. A row of a stage holds one step of K: how many elements that is depends on their type. */
enum {
    PRS_STAGES = 4,      /* 48 KB each; fewer stages take ~2 % longer at large K, more leave no room for C */
    PRS_STAGE_ROW = 128, /* bytes of a row of A, of B and of a slab: one swizzle row */
    PRS_STAGE_A = PRS_TILE_M * PRS_STAGE_ROW,
    PRS_STAGE_B = PRS_TILE_N * PRS_STAGE_ROW, /* room for the widest tile */
    PRS_STAGE = PRS_STAGE_A + PRS_STAGE_B,
    PRS_SLAB = 64 * PRS_STAGE_ROW, /* 64 rows of C, what one bulk store moves */
    PRS_PUSH_SLOTS = 2,            /* buffers of the warps that send rows */
    PRS_PUSH_BYTES = 8192
};

/* Offsets in dynamic shared memory. The store buffers and the push buffers share 32 KB: a kernel that pushes rows has
 * one slab per warpgroup and two push buffers, the others have two slabs per warpgroup. */
enum {
    PRS_SMEM_A = 0,
    PRS_SMEM_B = PRS_SMEM_A + PRS_STAGES * PRS_STAGE_A,
    PRS_SMEM_C = PRS_SMEM_B + PRS_STAGES * PRS_STAGE_B,
    PRS_SMEM_PUSH = PRS_SMEM_C + 2 * PRS_SLAB,
    PRS_SMEM_BARRIERS = PRS_SMEM_C + 4 * PRS_SLAB,
    PRS_SMEM_LAUNCH = PRS_SMEM_BARRIERS + 256, /* GEMM: struct prs_launch */
    PRS_SMEM_BYTES = PRS_SMEM_LAUNCH + 128
};

static_assert(PRS_SMEM_BYTES <= 232448, "a Hopper CTA has 227 KB of shared memory");
static_assert(PRS_PUSH_SLOTS * PRS_PUSH_BYTES == 2 * PRS_SLAB, "push buffers take the place of the second slabs");

/* Unit `at` of a raster of `rows` rows of units: rows run fastest, so that the clusters that work at the same time
 * share columns of B and rows of A in the L2 cache. Every column starts one row later, so that no cluster gets the same
 * row again and again. */
PRS_SHARED uint32_t prs_tile_raster(uint32_t rows, uint32_t at, uint32_t *column)
{
    *column = at / rows;
    return (at + *column) % rows;
}

#endif
