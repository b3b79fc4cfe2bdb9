/* SPDX-License-Identifier: Apache-2.0 */
/* Eight elements at a time. WIDE: they are one vector of 16 bytes (32 of fp32); else they may lie anywhere, and be
 * fewer than eight. */
#ifndef PERSEUS_FUSED_VECTOR_CUH
#define PERSEUS_FUSED_VECTOR_CUH

#include "fused/core/epilogue.cuh"

/* Elements at .. at + count of an array of 16-bit elements. Those that are missing are 0. */
template <bool WIDE> PRS_DEVICE uint4 load_eight(const void *from, uint64_t at, uint32_t count)
{
    const uint16_t *element = (const uint16_t *)from + at;
    uint32_t pair[4] = {};
    if constexpr (WIDE)
        return *(const uint4 *)element;
    else
#pragma unroll
        for (uint32_t j = 0; j < 8; j++)
            if (j < count)
                pair[j / 2] |= (uint32_t)element[j] << j % 2 * 16;
    return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}

template <int DTYPE> PRS_DEVICE void add_eight(float (&s)[8], uint4 x)
{
    s[0] += pair_low<DTYPE>(x.x), s[1] += pair_high<DTYPE>(x.x);
    s[2] += pair_low<DTYPE>(x.y), s[3] += pair_high<DTYPE>(x.y);
    s[4] += pair_low<DTYPE>(x.z), s[5] += pair_high<DTYPE>(x.z);
    s[6] += pair_low<DTYPE>(x.w), s[7] += pair_high<DTYPE>(x.w);
}

/* Applies the epilogue to the `count` sums of the result's elements from `at` on; columns: of the result. */
template <int DTYPE, int C_DTYPE, int N>
PRS_DEVICE void finish_elements(const struct prs_epilogue &e, float (&s)[N], uint64_t at, uint32_t count,
                                uint32_t columns)
{
    uint64_t row = e.any != 0 ? at / columns : 0;
    uint32_t column = (uint32_t)(at - row * columns);
    if (e.any == 0)
        return;
#pragma unroll
    for (uint32_t j = 0; j < N; j++) {
        if (j < count)
            s[j] = finish_element<DTYPE, C_DTYPE>(e, s[j], 0, row, column, columns);
        column++;
        row += column == columns, column = column == columns ? 0 : column;
    }
}

template <int C_DTYPE, bool WIDE>
PRS_DEVICE void store_eight(void *to, uint64_t at, const float (&s)[8], uint32_t count)
{
    float4 *wide = (float4 *)((float *)to + at);
    if (!WIDE) {
#pragma unroll
        for (uint32_t j = 0; j < 8; j++)
            if (j < count)
                store_element<C_DTYPE>(to, at + j, s[j]);
    } else if (C_DTYPE != PRS_DTYPE_FP32) {
        *(uint4 *)((uint16_t *)to + at) = make_uint4(pack_pair<C_DTYPE>(s[0], s[1]), pack_pair<C_DTYPE>(s[2], s[3]),
                                                     pack_pair<C_DTYPE>(s[4], s[5]), pack_pair<C_DTYPE>(s[6], s[7]));
    } else {
        wide[0] = make_float4(s[0], s[1], s[2], s[3]);
        wide[1] = make_float4(s[4], s[5], s[6], s[7]);
    }
}

#endif
