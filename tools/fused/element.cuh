/* SPDX-License-Identifier: Apache-2.0 */
/* Inputs that any rank can recompute. */
#ifndef TOOLS_FUSED_ELEMENT_CUH
#define TOOLS_FUSED_ELEMENT_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

#include <perseus/fused.h>

/* Rounds to a type of 16 or 8 bits, enum prs_dtype, and back. */
static __device__ __forceinline__ uint16_t bench_bits(uint32_t dtype, float x)
{
    if (dtype == PRS_DTYPE_E4M3)
        return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
    return dtype == PRS_DTYPE_FP16 ? __half_as_ushort(__float2half(x)) : __bfloat16_as_ushort(__float2bfloat16(x));
}

static __device__ __forceinline__ float bench_value(uint32_t dtype, uint16_t bits)
{
    if (dtype == PRS_DTYPE_E4M3)
        return __half2float(__ushort_as_half(__nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)bits, __NV_E4M3).x));
    return dtype == PRS_DTYPE_FP16 ? __half2float(__ushort_as_half(bits))
                                   : __bfloat162float(__ushort_as_bfloat16(bits));
}

/* Element `at` of an input of a rank: uniform in [-1, 1), rounded to its type, which may be fp32. which: enum
 * bench_input. */
static __device__ __forceinline__ float bench_element_of(uint32_t dtype, uint32_t seed, uint32_t rank, uint32_t which,
                                                         uint64_t at)
{
    uint64_t x = at + ((uint64_t)(seed * 64 + rank * 2 + which % 2 + which / 2 * 0x400000) << 40);
    x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ull, x ^= x >> 33;
    float v = (float)(int32_t)(uint32_t)x * 0x1p-31f;
    return dtype == PRS_DTYPE_FP32 ? v : bench_value(dtype, bench_bits(dtype, v));
}

static __device__ __forceinline__ float bench_element(uint32_t seed, uint32_t rank, uint32_t which, uint64_t at)
{
    return bench_element_of(PRS_DTYPE_BF16, seed, rank, which, at);
}

/* Spread sample numbers over what is sampled. */
static __host__ __device__ __forceinline__ uint64_t bench_scatter(uint64_t i)
{
    i = (i + 1) * 0x9e3779b97f4a7c15ull;
    return i ^ (i >> 29);
}

#endif
