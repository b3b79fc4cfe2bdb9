/* SPDX-License-Identifier: Apache-2.0 */
/* Inputs that any rank can recompute. */
#ifndef TOOLS_FUSED_ELEMENT_CUH
#define TOOLS_FUSED_ELEMENT_CUH

#include <cuda_bf16.h>
#include <stdint.h>

/* Element `at` of matrix `which` (0 A, 1 B) of a rank: uniform in [-1, 1), rounded to bf16. */
static __device__ __forceinline__ float bench_element(uint32_t seed, uint32_t rank, uint32_t which, uint64_t at)
{
    uint64_t x = at + ((uint64_t)(seed * 64 + rank * 2 + which) << 40);
    x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ull, x ^= x >> 33;
    return __bfloat162float(__float2bfloat16((float)(int32_t)(uint32_t)x * 0x1p-31f));
}

/* Spread sample numbers over what is sampled. */
static __host__ __device__ __forceinline__ uint64_t bench_scatter(uint64_t i)
{
    i = (i + 1) * 0x9e3779b97f4a7c15ull;
    return i ^ (i >> 29);
}

#endif
