/* SPDX-License-Identifier: Apache-2.0 */
/* What is applied to a finished sum before it is rounded: C = activation(sum + bias) + residual. A gated product has
 * twice the columns of its result, first those of the gate: C = activation(gate + bias) * (up + bias) + residual. A
 * tile then has half as many columns of the result: its left half are columns of the gate, its right half the same
 * columns of up, so that one thread holds both factors. Plain C. */
#ifndef PERSEUS_FUSED_EPILOGUE_H
#define PERSEUS_FUSED_EPILOGUE_H

#include <stdint.h>

#include "fused/core/tile.h"

/* A rank's rows of the result. Fields that are 0 have no effect. */
struct prs_epilogue {
    const void *bias;        /* one element per column of the product, in the type in which sums are sent */
    const void *residual;    /* in the type of C */
    uint64_t residual_pitch; /* elements from one row of the residual to the next */
    uint32_t activation;     /* enum prs_activation */
    uint32_t gated;
    uint32_t any; /* 0: the result is the sum itself */
};

/* Columns of the result in a tile of `tile_columns`. */
PRS_SHARED uint32_t prs_epilogue_columns(const struct prs_epilogue *e, uint32_t tile_columns)
{
    return e->gated ? tile_columns / 2 : tile_columns;
}

/* The column of B at which half `half` of column tile `tile` begins. columns: how many the result has. */
PRS_SHARED uint32_t prs_epilogue_half(const struct prs_epilogue *e, uint32_t tile_columns, uint32_t columns,
                                      uint32_t tile, uint32_t half)
{
    return tile * prs_epilogue_columns(e, tile_columns) + half * (e->gated ? columns : tile_columns / 2);
}

#endif
