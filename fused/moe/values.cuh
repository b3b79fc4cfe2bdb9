/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels around those that move rows: they clear rows that only fill a block, and prepare values, one for each row,
 * which combine brings back to their tokens.
 *
 * A value becomes a short row, with three bf16 columns for each slot of a token: those of its own slot are the value in
 * three parts of eight bits, all others are zero. Combine adds up the rows of a token, without weights. Each column has
 * one term that is not zero, so no sum is rounded, here or on the way between nodes. */
#ifndef PERSEUS_FUSED_VALUES_CUH
#define PERSEUS_FUSED_VALUES_CUH

#include "fused/moe/args.h"
#include "fused/core/cta.cuh"

enum { PRS_VALUE_THREADS = 256 };

/* The rows between an expert's last row and the end of its last block become zeros. A launch that gave up has no
 * blocks. */
static __global__ void __launch_bounds__(PRS_VALUE_THREADS)
    clear_fill_kernel(const __grid_constant__ struct prs_moe_args args)
{
    const struct prs_route *r = &args.route;
    uint32_t vectors = r->row_bytes / 16, blocks = args.totals->blocks;
    for (uint32_t e = blockIdx.x; e < r->experts_per_rank && blocks != 0; e += gridDim.x) {
        uint32_t first = args.table[e].first_row + args.table[e].rows, last = prs_ceil_div(first, PRS_TILE_M);
        uint4 *to = (uint4 *)(args.row_bytes + (uint64_t)first * r->row_bytes);
        for (uint32_t i = threadIdx.x; i < (last * PRS_TILE_M - first) * vectors; i += PRS_VALUE_THREADS)
            to[i] = make_uint4(0, 0, 0, 0);
    }
}

/* Part `part` of a value, the upper half of a word. Each part takes the leading eight bits of the rest. A value that is
 * not finite has one part. */
PRS_DEVICE uint32_t value_part(float value, uint32_t part)
{
    uint32_t upper = 0xffff0000u;
    if ((__float_as_uint(value) & 0x7f800000u) == 0x7f800000u)
        return part != 0 ? 0 : pack_bf16x2(0, value) & upper;
    for (uint32_t i = 0; i < part; i++)
        value -= __uint_as_float(__float_as_uint(value) & upper);
    return __float_as_uint(value) & upper;
}

static __global__ void __launch_bounds__(PRS_VALUE_THREADS)
    split_values_kernel(const __grid_constant__ struct prs_moe_args args)
{
    uint32_t bytes = prs_moe_value_bytes(&args.route), rows = args.totals->blocks * PRS_TILE_M;
    for (uint32_t row = blockIdx.x * PRS_VALUE_THREADS + threadIdx.x; row < rows;
         row += gridDim.x * PRS_VALUE_THREADS) {
        uint32_t slot = args.origins[row].slot, *to = (uint32_t *)(args.value_rows + (uint64_t)row * bytes);
        if (slot >= args.route.choices)
            continue;
        float value = args.values[row];
        for (uint32_t i = 0; i < bytes / 4; i++) {
            uint32_t low = 2 * i - slot * PRS_MOE_VALUE_PARTS, high = low + 1;
            to[i] = (low < PRS_MOE_VALUE_PARTS ? value_part(value, low) >> 16 : 0) |
                    (high < PRS_MOE_VALUE_PARTS ? value_part(value, high) : 0);
        }
    }
}

static __global__ void __launch_bounds__(PRS_VALUE_THREADS)
    join_values_kernel(const __grid_constant__ struct prs_moe_args args)
{
    uint32_t bytes = prs_moe_value_bytes(&args.route), choices = args.route.choices;
    for (uint32_t i = blockIdx.x * PRS_VALUE_THREADS + threadIdx.x; i < args.totals->tokens * choices;
         i += gridDim.x * PRS_VALUE_THREADS) {
        const uint16_t *part =
            (const uint16_t *)(args.value_sums + (uint64_t)(i / choices) * bytes) + i % choices * PRS_MOE_VALUE_PARTS;
        args.returned[i] = __uint_as_float((uint32_t)part[0] << 16) +
                           (__uint_as_float((uint32_t)part[1] << 16) + __uint_as_float((uint32_t)part[2] << 16));
    }
}

#endif
