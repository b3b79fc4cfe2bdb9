/* SPDX-License-Identifier: Apache-2.0 */
/* Eight elements at a time. WIDE: they are one vector of 16 bytes (32 of fp32); else they may lie anywhere, and be
 * fewer than eight. */
#ifndef PERSEUS_FUSED_VECTOR_CUH
#define PERSEUS_FUSED_VECTOR_CUH

#include "fused/core/epilogue.cuh"

/* Elements at .. at + count of an array. Missing ones are 0. */
template <int TYPE, bool WIDE> PRS_DEVICE uint4 load_eight(const void *from, uint64_t at, uint32_t count)
{
    static_assert(element<TYPE>::in_vector == 8, "sums travel as elements of two bytes");
    const uint16_t *first = (const uint16_t *)from + at;
    uint32_t pair[4] = {};
    if constexpr (WIDE)
        return *(const uint4 *)first;
    else
#pragma unroll
        for (uint32_t j = 0; j < 8; j++)
            if (j < count)
                pair[j / 2] |= (uint32_t)first[j] << j % 2 * 16;
    return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}

template <int TYPE> PRS_DEVICE void add_eight(float (&s)[8], uint4 x)
{
    typedef element<TYPE> e;
    s[0] += e::low(x.x), s[1] += e::high(x.x);
    s[2] += e::low(x.y), s[3] += e::high(x.y);
    s[4] += e::low(x.z), s[5] += e::high(x.z);
    s[6] += e::low(x.w), s[7] += e::high(x.w);
}

/* Applies the epilogue to the `count` sums of the result's elements from `at` on; columns: of the result. */
template <int TYPE, int RESULT, int N>
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
            s[j] = finish_element<TYPE, RESULT>(e, s[j], 0, row, column, columns);
        column++;
        row += column == columns, column = column == columns ? 0 : column;
    }
}

template <int RESULT, bool WIDE> PRS_DEVICE void store_eight(void *to, uint64_t at, const float (&s)[8], uint32_t count)
{
    typedef element<RESULT> result;
    if (!WIDE) {
#pragma unroll
        for (uint32_t j = 0; j < 8; j++)
            if (j < count)
                store_element<RESULT>(to, at + j, s[j]);
    } else {
#pragma unroll
        for (uint32_t j = 0; j < 8; j += result::in_vector)
            *(uint4 *)((typename result::bits *)to + at + j) = pack_vector<RESULT>(&s[j]);
    }
}

#endif
