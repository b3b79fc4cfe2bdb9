/* SPDX-License-Identifier: Apache-2.0 */
/* Quantising sums while they are in the registers of the tensor cores (epilogue.cuh): four lanes have 128 columns of
 * a row, which share a scale. */
#ifndef PERSEUS_FUSED_QUANTISED_TILE_CUH
#define PERSEUS_FUSED_QUANTISED_TILE_CUH

#include "fused/core/quantise.cuh"

/* Each lane of a quad has two columns of every eight: pair[i] is its pair in group i of four consecutive groups of
 * eight columns. Gives each lane the eight columns of one group. */
PRS_DEVICE uint2 gather_eight(const uint32_t (&pair)[4])
{
    bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    uint32_t low = pair[0] | pair[1] << 16, high = pair[2] | pair[3] << 16;
    uint32_t mine = upper ? high : low, across = __shfl_xor_sync(~0u, upper ? low : high, 2);
    /* Exchanges columns with the lane two further; `across`: its columns. */
    uint32_t keep = odd ? __byte_perm(mine, across, 0x7632) : __byte_perm(mine, across, 0x5410);
    uint32_t give = odd ? __byte_perm(mine, across, 0x5410) : __byte_perm(mine, across, 0x7632);
    uint32_t got = __shfl_xor_sync(~0u, give, 1);
    uint32_t own = odd ? __byte_perm(got, keep, 0x5410) : __byte_perm(keep, got, 0x5410);
    uint32_t other = odd ? __byte_perm(got, keep, 0x7632) : __byte_perm(keep, got, 0x7632);
    return upper ? make_uint2(other, own) : make_uint2(own, other);
}

/* 128 columns of a warpgroup's 64 rows, 64 numbers for each thread. All threads call it. find(row) returns the row's
 * place, or NULL if the result has no such row; store_scale(row, scale) stores a scale. */
template <class Find, class StoreScale>
PRS_DEVICE void store_quantised_rows(const float (&x)[64], Find find, StoreScale store_scale)
{
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int second = 0; second < 2; second++) {
        uint32_t row = threadIdx.x % 128 / 32 * 16 + lane / 4 + second * 8;
        uint8_t *to = find(row);
        float most = 0;
#pragma unroll
        for (int i = second * 2; i < 64; i += 4)
            most = fmaxf(most, fmaxf(fabsf(x[i]), fabsf(x[i + 1])));
        /* MUTANT(emulator moe_fp8/layers_are_right) four lanes have a row: s/<4>/<2>/ */
        /* MUTANT(emulator fp8_results/quantised_results_are_right) four lanes have a row, of a product: s/<4>/<2>/ */
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
            if (to)
                *(uint2 *)(to + i * 32 + lane % 4 * 8) = eight;
        }
        if (to && lane % 4 == 0)
            store_scale(row, scale);
    }
}

#endif
