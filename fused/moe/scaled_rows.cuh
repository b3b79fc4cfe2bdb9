/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of e4m3 with a scale for each 128 columns (prs_moe_scaled_bytes()), made in one pass: of a rank's tokens before
 * they travel, and of the activated columns between a layer's products. A warp takes 1024 columns of a row, so that few
 * rows are many warps' work. */
#ifndef PERSEUS_FUSED_SCALED_ROWS_CUH
#define PERSEUS_FUSED_SCALED_ROWS_CUH

#include "fused/core/quantise.cuh"
#include "fused/moe/activation.cuh"
#include "fused/moe/route.cuh"

enum { PRS_SCALED_STEP = 256, PRS_SCALED_STEPS = 4, PRS_SCALED_PART = PRS_SCALED_STEP * PRS_SCALED_STEPS };

/* How many warps `rows` rows are work for. */
PRS_SHARED uint32_t scaled_parts(uint32_t rows, uint32_t columns)
{
    return rows * prs_ceil_div(columns, PRS_SCALED_PART);
}

/* A warp quantises the columns of a row from `first` on. load(column, x): gives eight numbers. */
template <class Load> PRS_DEVICE void quantise_part(uint32_t columns, uint32_t first, uint8_t *row, Load load)
{
    float x[PRS_SCALED_STEPS][8] = {};
    uint32_t lane = threadIdx.x % 32, mine = first + lane * 8;
#pragma unroll
    for (int i = 0; i < PRS_SCALED_STEPS; i++)
        if (mine + i * PRS_SCALED_STEP < columns)
            load(mine + i * PRS_SCALED_STEP, x[i]);
#pragma unroll
    for (int i = 0; i < PRS_SCALED_STEPS; i++) {
        uint32_t column = mine + i * PRS_SCALED_STEP;
        float scale;
        uint2 packed = quantise_blocks(x[i], &scale);
        if (column < columns)
            *(uint2 *)(row + column) = packed;
        /* MUTANT(emulator moe_fp8/layers_are_right) each block of a row has its scale: s#column / PRS_SCALE_BLOCK#0# */
        if (column < columns && lane % 16 == 0)
            ((float *)(row + columns))[column / PRS_SCALE_BLOCK] = scale;
    }
}

/* ---- tokens ---- */
/* A warp copies what the caller has quantised. */
PRS_DEVICE void copy_part(const struct prs_moe_args &args, uint32_t token, uint32_t first, uint8_t *row)
{
    uint32_t lane = threadIdx.x % 32, columns = args.hidden, blocks = columns / PRS_SCALE_BLOCK;
    const uint8_t *from = (const uint8_t *)args.unscaled + (uint64_t)token * columns;
    uint32_t block = first / PRS_SCALE_BLOCK + lane;
#pragma unroll
    for (uint32_t at = first + lane * 16; at < first + PRS_SCALED_PART; at += 512)
        if (at < columns)
            *(uint4 *)(row + at) = *(const uint4 *)(from + at);
    if (lane < PRS_SCALED_PART / PRS_SCALE_BLOCK && block < blocks)
        ((float *)(row + columns))[block] = args.token_scales[(uint64_t)token * blocks + block];
}

/* TYPE: of the caller's tokens. */
template <int TYPE>
static __global__ void __launch_bounds__(PRS_ACTIVATION_THREADS, PRS_ACTIVATION_CTAS)
    scale_tokens_kernel(const __grid_constant__ struct prs_moe_args args)
{
    uint32_t columns = args.hidden, parts = prs_ceil_div(columns, PRS_SCALED_PART), end = token_count(args) * parts;
    for (uint32_t i = activation_warp(); i < end; i += activation_warps()) {
        uint32_t token = i / parts, first = i % parts * PRS_SCALED_PART;
        uint8_t *row = args.scaled_tokens + (uint64_t)token * args.route.row_bytes;
        if constexpr (TYPE == PRS_DTYPE_E4M3) {
            copy_part(args, token, first, row);
        } else {
            const uint8_t *from = (const uint8_t *)args.unscaled + (uint64_t)token * columns * element<TYPE>::bytes;
            quantise_part(columns, first, row, [&](uint32_t column, float(&x)[8]) {
                unpack_vector<TYPE>(*(const uint4 *)(from + column * element<TYPE>::bytes), x);
            });
        }
    }
}

/* ---- activation ---- */
/* As activate_kernel(), to rows of e4m3. TYPE: of the first product's columns. */
template <int TYPE>
static __global__ void __launch_bounds__(PRS_ACTIVATION_THREADS, PRS_ACTIVATION_CTAS)
    activate_scaled_kernel(const __grid_constant__ struct prs_moe_args args)
{
    uint32_t parts = prs_ceil_div(args.n, PRS_SCALED_PART), end = args.totals->blocks * PRS_TILE_M * parts;
    for (uint32_t i = activation_warp(); i < end; i += activation_warps()) {
        uint32_t row = i / parts;
        const uint4 *columns = (const uint4 *)(args.columns + activation_row_at<TYPE>(args, row).wide);
        quantise_part(args.n, i % parts * PRS_SCALED_PART,
                      args.activated + (uint64_t)row * prs_moe_scaled_bytes(args.n),
                      [&](uint32_t column, float(&x)[8]) {
                          float up[8];
                          unpack_vector<TYPE>(columns[column / 8], x);
                          if (args.epilogue.gated)
                              unpack_vector<TYPE>(columns[(args.n + column) / 8], up);
                          activate(args.epilogue.activation, x);
#pragma unroll
                          for (int j = 0; j < 8; j++)
                              x[j] *= args.epilogue.gated ? up[j] : 1.0f;
                      });
    }
}

#endif
