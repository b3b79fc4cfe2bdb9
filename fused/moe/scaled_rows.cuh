/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of e4m3 with a scale for each 128 columns (prs_moe_scaled_bytes()), made of a rank's tokens before
 * they travel, and of a layer's first product. */
#ifndef PERSEUS_FUSED_SCALED_ROWS_CUH
#define PERSEUS_FUSED_SCALED_ROWS_CUH

#include "fused/core/quantise.cuh"
#include "fused/moe/activation.cuh"
#include "fused/moe/route.cuh"

/* How many warps `rows` rows are work for. */
PRS_SHARED uint32_t scaled_parts(uint32_t rows, uint32_t columns)
{
    return rows * prs_ceil_div(columns, QUANTISE_PART);
}

/* A part of a row, and the scales after it. load: as in quantise_part(). */
template <class Load> PRS_DEVICE void make_scaled_part(uint32_t columns, uint32_t first, uint8_t *row, Load load)
{
    quantise_part(
        columns, first, load, [&](uint32_t column, uint2 packed) { *(uint2 *)(row + column) = packed; },
        [&](uint32_t block, float scale) { ((float *)(row + columns))[block] = scale; });
}

/* ---- tokens ---- */
/* A warp copies what the caller has quantised. */
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

/* TYPE: of the caller's tokens. */
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
/* Of a quad of lanes each has two columns of every eight (epilogue.cuh): pair[i] are those of eight number i, of four
 * that follow one another. Gives each lane one of the eights. */
PRS_DEVICE uint2 gather_eight(const uint32_t (&pair)[4])
{
    bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    uint32_t low = pair[0] | pair[1] << 16, high = pair[2] | pair[3] << 16;
    uint32_t mine = upper ? high : low, across = __shfl_xor_sync(~0u, upper ? low : high, 2);
    /* Now of two eights; `across`: the columns of the lane two further. */
    uint32_t keep = odd ? __byte_perm(mine, across, 0x7632) : __byte_perm(mine, across, 0x5410);
    uint32_t give = odd ? __byte_perm(mine, across, 0x5410) : __byte_perm(mine, across, 0x7632);
    uint32_t got = __shfl_xor_sync(~0u, give, 1);
    uint32_t own = odd ? __byte_perm(got, keep, 0x5410) : __byte_perm(keep, got, 0x5410);
    uint32_t other = odd ? __byte_perm(got, keep, 0x7632) : __byte_perm(keep, got, 0x7632);
    return upper ? make_uint2(other, own) : make_uint2(own, other);
}

/* Columns block * 128 ... of a warpgroup's 64 rows of a block of rows, 64 numbers a thread. */
PRS_DEVICE void store_scaled_rows(const struct prs_moe_args &args, const struct prs_route_unit &u, uint32_t block,
                                  uint32_t half, const float (&x)[64])
{
    uint32_t lane = threadIdx.x % 32, bytes = prs_moe_scaled_bytes(args.n);
#pragma unroll
    for (int second = 0; second < 2; second++) {
        uint32_t row = half * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4 + second * 8;
        uint8_t *to = args.activated + ((uint64_t)u.block * PRS_TILE_M + row) * bytes;
        float most = 0;
#pragma unroll
        for (int i = second * 2; i < 64; i += 4)
            most = fmaxf(most, fmaxf(fabsf(x[i]), fabsf(x[i + 1])));
        /* MUTANT(emulator moe_fp8/layers_are_right) four lanes have a row: s/<4>/<2>/ */
        float scale = scale_of_largest(largest_of_lanes<4>(most)), inverse = 1.0f / scale;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t pair[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int at = (i * 4 + j) * 4 + second * 2;
                pair[j] = pack_e4m3x2(x[at] * inverse, x[at + 1] * inverse);
            }
            uint2 eight = gather_eight(pair);
            if (row < u.rows)
                *(uint2 *)(to + block * PRS_SCALE_BLOCK + i * 32 + lane % 4 * 8) = eight;
        }
        if (row < u.rows && lane % 4 == 0)
            ((float *)(to + args.n))[block] = scale;
    }
}

#endif
