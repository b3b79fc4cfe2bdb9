/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/hopper/wgmma.h"

namespace hopper
{

typedef float vec8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t ivec8 __attribute__((vector_size(32), aligned(4), may_alias));
enum : uint32_t { ROWS_AT_ONCE = 8 };

/* Computes eight rows by eight columns at a time, which fit in registers. Features are named and not an architecture,
 * which gcc knows since 12. Products are exact, so both clones round alike. */
__attribute__((target_clones("fma", "default"))) void wgmma_multiply(float *d, const float *a, const float *b,
                                                                     uint32_t n)
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

static float plain_sum(const vec8 *term, uint32_t lane)
{
    float sum = 0;
    for (uint32_t k = 0; k <= WGMMA_MOST_K; k++)
        sum += term[k][lane];
    return sum;
}

/* How Hopper adds up products of FP8, after the DeepSeek-V3 report (arXiv 2412.19437, 3.3.2 and 3.5.2, measured on
 * H800): the 32 exact products of an instruction and the accumulator are shifted to the largest exponent among them,
 * and 14 bits of each mantissa are added; the rest is cut off. The sum keeps 14 bits too: 13 after the leading one.
 *
 * What the report leaves open is decided here, and a GPU may differ by as much as the last of the 14 bits: bits are cut
 * off towards zero, and the exponent is that of the product, not the sum of its factors' exponents. A not-a-number
 * stays one. */
__attribute__((target_clones("avx2", "default"))) void wgmma_multiply_e4m3(float *d, const float *a, const float *b,
                                                                           uint32_t n)
{
    const int32_t fraction = 13, bias = 127, mantissa = 23, least = fraction + 1; /* least: no unit is subnormal */
    const int32_t infinite = 255 << mantissa;
    for (uint32_t m = 0; m < WGMMA_M; m++)
        for (uint32_t column = 0; column < n; column += 8) {
            vec8 term[WGMMA_MOST_K + 1], out;
            ivec8 most = {}, exponent, sum = {};
            term[WGMMA_MOST_K] = *(const vec8 *)(d + m * n + column);
            for (uint32_t k = 0; k < WGMMA_MOST_K; k++)
                term[k] = a[m * WGMMA_MOST_K + k] * *(const vec8 *)(b + k * n + column);
            for (uint32_t k = 0; k <= WGMMA_MOST_K; k++) { /* magnitudes of floats are ordered like their bits */
                ivec8 size = (ivec8)term[k] & 0x7fffffff;
                most = size > most ? size : most;
            }
            exponent = most >> mantissa;
            exponent = exponent > least ? exponent : least;
            for (uint32_t k = 0; k <= WGMMA_MOST_K; k++)
                sum += __builtin_convertvector(term[k] * (vec8)((2 * bias + fraction - exponent) << mantissa), ivec8);
            out = (vec8)((ivec8) __builtin_convertvector(sum, vec8) & ~((1 << (mantissa - fraction)) - 1));
            out *= (vec8)((exponent - fraction) << mantissa);
            *(vec8 *)(d + m * n + column) = out;
            for (uint32_t i = 0; i < 8; i++)
                if (most[i] >= infinite)
                    d[m * n + column + i] = plain_sum(term, i);
        }
}

} // namespace hopper
