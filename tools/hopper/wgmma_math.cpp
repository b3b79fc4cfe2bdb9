/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/hopper/wgmma.h"

namespace hopper
{

typedef float vec8 __attribute__((vector_size(32), aligned(4), may_alias));
enum : uint32_t { ROWS_AT_ONCE = 8 };

/* Computes eight rows by eight columns at a time, which fit in registers. */
__attribute__((target_clones("arch=x86-64-v3", "default"))) void wgmma_multiply(float *d, const float *a,
                                                                                const float *b, uint32_t n)
{
    for (uint32_t m = 0; m < WGMMA_M; m += ROWS_AT_ONCE)
        for (uint32_t column = 0; column < n; column += 8) {
            vec8 sum[ROWS_AT_ONCE];
            for (uint32_t i = 0; i < ROWS_AT_ONCE; i++)
                sum[i] = *(const vec8 *)(d + (m + i) * n + column);
            for (uint32_t k = 0; k < WGMMA_K; k++) {
                vec8 row = *(const vec8 *)(b + k * n + column);
                for (uint32_t i = 0; i < ROWS_AT_ONCE; i++)
                    sum[i] += a[(m + i) * WGMMA_K + k] * row;
            }
            for (uint32_t i = 0; i < ROWS_AT_ONCE; i++)
                *(vec8 *)(d + (m + i) * n + column) = sum[i];
        }
}

} // namespace hopper
