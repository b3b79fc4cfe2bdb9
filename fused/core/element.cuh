/* SPDX-License-Identifier: Apache-2.0 */
/* The 16-bit elements of products. A kernel of each type is an instance of its own. DTYPE: enum prs_dtype. */
#ifndef PERSEUS_FUSED_ELEMENT_CUH
#define PERSEUS_FUSED_ELEMENT_CUH

#include <perseus/fused.h>

#include "fused/core/ptx.cuh"

/* Rounds two floats; lo lands in the low half. */
template <int DTYPE> PRS_DEVICE uint32_t pack_pair(float lo, float hi)
{
    return DTYPE == PRS_DTYPE_FP16 ? pack_f16x2(lo, hi) : pack_bf16x2(lo, hi);
}

template <int DTYPE> PRS_DEVICE float pair_low(uint32_t v)
{
    return DTYPE == PRS_DTYPE_FP16 ? f16_low(v) : bf16_low(v);
}

template <int DTYPE> PRS_DEVICE float pair_high(uint32_t v)
{
    return DTYPE == PRS_DTYPE_FP16 ? f16_high(v) : bf16_high(v);
}

/* Element i of an array; its type may be fp32, too. */
template <int DTYPE> PRS_DEVICE float load_element(const void *from, uint64_t i)
{
    return DTYPE == PRS_DTYPE_FP32 ? ((const float *)from)[i] : pair_low<DTYPE>(((const uint16_t *)from)[i]);
}

template <int DTYPE> PRS_DEVICE void store_element(void *to, uint64_t i, float x)
{
    if (DTYPE == PRS_DTYPE_FP32)
        ((float *)to)[i] = x;
    else
        ((uint16_t *)to)[i] = (uint16_t)pack_pair<DTYPE>(x, 0);
}

#endif
