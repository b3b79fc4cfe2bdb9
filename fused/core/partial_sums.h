/* SPDX-License-Identifier: Apache-2.0 */
/* Partial sums on their way to the rank that adds them up: a tile of them in memory. partial_sums.cuh has the device
 * code. */
#ifndef PERSEUS_FUSED_PARTIAL_SUMS_H
#define PERSEUS_FUSED_PARTIAL_SUMS_H

#include "fused/core/tile.h"

enum {
    PRS_PARTIAL_TILE = 65536, /* bytes of one tile of partial sums of two bytes each; room for the widest tile */
    /* One stage holds a quarter of a tile of partial sums from at most this many slots. */
    PRS_PARTIALS_PER_STAGE = 3,
    PRS_PARTIAL_QUARTER = PRS_PARTIAL_TILE / 4
};

static_assert(PRS_PARTIALS_PER_STAGE * PRS_PARTIAL_QUARTER == PRS_STAGE,
              "quarters of three partial tiles fill a stage");
static_assert(PRS_PARTIAL_QUARTER == 2 * PRS_SLAB, "a quarter is one slab of each warpgroup");

#endif
