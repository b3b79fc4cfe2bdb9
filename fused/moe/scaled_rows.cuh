/* SPDX-License-Identifier: Apache-2.0 */
/* Makes rows of e4m3 with a scale for each 128 columns (prs_moe_scaled_bytes()): from a rank's tokens before they
 * travel, and from a layer's first product. */
#ifndef PERSEUS_FUSED_SCALED_ROWS_CUH
#define PERSEUS_FUSED_SCALED_ROWS_CUH

#include "fused/core/quantised_tile.cuh"
#include "fused/moe/activation.cuh"
#include "fused/moe/route.cuh"

/* How many warps share the work of `rows` rows. */
PRS_SHARED uint32_t scaled_parts(uint32_t rows, uint32_t columns)
{
    return rows * prs_ceil_div(columns, QUANTISE_PART);
}

/* Quantises a part of a row, and stores its scales after the row. load: as in quantise_part(). */
template <class Load> PRS_DEVICE void make_scaled_part(uint32_t columns, uint32_t first, uint8_t *row, Load load)
{
    quantise_part(
        columns, first, load, [&](uint32_t column, uint2 packed) { *(uint2 *)(row + column) = packed; },
        [&](uint32_t block, float scale) { ((float *)(row + columns))[block] = scale; });
}

/* ---- tokens ---- */
/* A warp copies tokens that the caller has quantised. */
PRS_DEVICE void copy_part(const struct prs_moe_args &args, uint32_t token, uint32_t first, uint8_t *row)
{
    uint32_t lane = threadIdx.x % 32, columns = args.hidden, blocks = columns / PRS_SCALE_BLOCK;
    const uint8_t *from = (const uint8_t *)args.unscaled + (uint64_t)token * columns;
    uint32_t block = first / PRS_SCALE_BLOCK + lane;
#pragma unroll
    for (uint32_t at = first + lane * 16; at < first + QUANTISE_PART; at += 512)
        if (at < columns)
            *(uint4 *)(row + at) = *(const uint4 *)(from + at);
    if (lane < QUANTISE_PART / PRS_SCALE_BLOCK && block < blocks)
        ((float *)(row + columns))[block] = args.token_scales[(uint64_t)token * blocks + block];
}

/* TYPE: the type of the caller's tokens. */
template <int TYPE>
static __global__ void __launch_bounds__(PRS_ACTIVATION_THREADS, PRS_ACTIVATION_CTAS)
    scale_tokens_kernel(const __grid_constant__ struct prs_moe_args args)
{
    uint32_t columns = args.hidden, parts = prs_ceil_div(columns, QUANTISE_PART), end = token_count(args) * parts;
    for (uint32_t i = activation_warp(); i < end; i += activation_warps()) {
        uint32_t token = i / parts, first = i % parts * QUANTISE_PART;
        uint8_t *row = args.scaled_tokens + (uint64_t)token * args.route.row_bytes;
        if constexpr (TYPE == PRS_DTYPE_E4M3) {
            copy_part(args, token, first, row);
        } else {
            const uint8_t *from = (const uint8_t *)args.unscaled + (uint64_t)token * columns * element<TYPE>::bytes;
            make_scaled_part(columns, first, row, [&](uint32_t column, float(&x)[8]) {
                unpack_vector<TYPE>(*(const uint4 *)(from + column * element<TYPE>::bytes), x);
            });
        }
    }
}

/* ---- sums of the tensor cores ---- */
/* Stores 128 columns, from block * 128 on, of a warpgroup's 64 rows; each thread has 64 numbers. */
PRS_DEVICE void store_scaled_rows(const struct prs_moe_args &args, const struct prs_route_unit &u, uint32_t block,
                                  uint32_t half, const float (&x)[64])
{
    uint32_t bytes = prs_moe_scaled_bytes(args.n), rows = u.rows > half * 64 ? u.rows - half * 64 : 0;
    uint8_t *first = args.activated + ((uint64_t)u.block * PRS_TILE_M + half * 64) * bytes;
    store_quantised_rows(
        x, [&](uint32_t row) { return row < rows ? first + row * bytes + block * PRS_SCALE_BLOCK : (uint8_t *)NULL; },
        [&](uint32_t row, float scale) { ((float *)(first + row * bytes + args.n))[block] = scale; });
}

#endif
