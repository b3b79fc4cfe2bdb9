/* SPDX-License-Identifier: Apache-2.0 */
/* Quantising to e4m3. Numbers that share a scale are divided by it: it is their largest magnitude / 448, and at least
 * 2^-126. So zeros stay zeros, with the scale 2^-126, and no number of a finite block saturates. The magnitudes of
 * not-a-numbers do not count: each stays one by itself. An infinity makes the scale infinite, and itself a
 * not-a-number: so all products with the block are not-a-numbers. In torch:
 *     scale = (x.float().abs().nan_to_num(0, float("inf")).amax(...) / 448).clamp(min=2**-126)
 *     (x.float() * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
 * bit by bit: both divisions round correctly, there and here. */
#ifndef PERSEUS_FUSED_QUANTISE_CUH
#define PERSEUS_FUSED_QUANTISE_CUH

#include "fused/core/ptx.cuh"

static constexpr float E4M3_MOST = 448, LEAST_SCALE = 0x1p-126f;

/* The larger magnitude. Not-a-numbers do not count. */
template <int N> PRS_DEVICE float largest_magnitude(const float (&x)[N])
{
    float most = 0;
#pragma unroll
    for (int i = 0; i < N; i++)
        most = fmaxf(most, fabsf(x[i]));
    return most;
}

/* The largest magnitude of LANES consecutive lanes of a warp. LANES is a power of two, and the first lane's number is a
 * multiple of it. All lanes of the warp call it. */
template <int LANES> PRS_DEVICE float largest_of_lanes(float most)
{
#pragma unroll
    for (int d = LANES / 2; d != 0; d /= 2)
        most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
    return most;
}

/* most: the largest magnitude of the numbers that share the scale. */
PRS_DEVICE float scale_of_largest(float most)
{
    /* MUTANT(emulator moe_fp8/rows_travel_with_their_scales) zeros have a scale: s/, LEAST_SCALE/, 0.0f/ */
    return fmaxf(most / E4M3_MOST, LEAST_SCALE);
}

/* Packs numbers, times the inverse of their scale, in order; N: a multiple of 4. */
template <int N> PRS_DEVICE void quantise(const float (&x)[N], float inverse, uint32_t (&to)[N / 4])
{
#pragma unroll
    for (int i = 0; i < N / 4; i++)
        to[i] = pack_e4m3x2(x[4 * i] * inverse, x[4 * i + 1] * inverse) |
                pack_e4m3x2(x[4 * i + 2] * inverse, x[4 * i + 3] * inverse) << 16;
}

/* A warp quantises 256 numbers, 8 of each lane, whose first and second 128 have a scale each, which all lanes of a half
 * get. */
PRS_DEVICE uint2 quantise_blocks(const float (&x)[8], float *scale)
{
    uint32_t to[2];
    /* MUTANT(emulator moe_fp8/rows_travel_with_their_scales) 128 numbers share a scale: s/<16>/<8>/ */
    *scale = scale_of_largest(largest_of_lanes<16>(largest_magnitude(x)));
    quantise(x, 1.0f / *scale, to);
    return make_uint2(to[0], to[1]);
}

/* A warp takes 1024 columns of a row, so that many warps share the work of few rows. */
enum { QUANTISE_STEP = 256, QUANTISE_STEPS = 4, QUANTISE_PART = QUANTISE_STEP * QUANTISE_STEPS };

/* A warp quantises a part of a row of `columns` columns, a multiple of 128, from `first` on. load(column, x) gives
 * eight numbers; store(column, packed) takes them back, and store_scale(block, scale) the scale of each 128. */
template <class Load, class Store, class StoreScale>
PRS_DEVICE void quantise_part(uint32_t columns, uint32_t first, Load load, Store store, StoreScale store_scale)
{
    float x[QUANTISE_STEPS][8] = {};
    uint32_t lane = threadIdx.x % 32, mine = first + lane * 8;
#pragma unroll
    for (int i = 0; i < QUANTISE_STEPS; i++)
        if (mine + i * QUANTISE_STEP < columns)
            load(mine + i * QUANTISE_STEP, x[i]);
#pragma unroll
    for (int i = 0; i < QUANTISE_STEPS; i++) {
        uint32_t column = mine + i * QUANTISE_STEP;
        float scale;
        uint2 packed = quantise_blocks(x[i], &scale);
        if (column < columns)
            store(column, packed);
        /* MUTANT(emulator moe_fp8/layers_are_right) each block of a row has its scale: s#column / 128#0# */
        if (column < columns && lane % 16 == 0)
            store_scale(column / 128, scale);
    }
}

#endif
