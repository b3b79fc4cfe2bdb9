/* SPDX-License-Identifier: Apache-2.0 */
/* Block floating point: four fp32 numbers in 8 bytes. They share the exponent of the largest, and each has a sign and
 * 13 bits, so a number is off by at most 2^-13 of the largest: 16 times less than in bf16 for that one, with the same
 * number of bytes. Any exponent of fp32 fits; below 2^-114 numbers lose bits. If one is infinite or not a number, all
 * four become not-a-numbers.
 *
 * Each word holds two numbers of 14 bits, the first in the low bits, and four bits of the exponent above them. */
#ifndef PERSEUS_FUSED_BLOCK_FLOAT_CUH
#define PERSEUS_FUSED_BLOCK_FLOAT_CUH

#include "fused/core/ptx.cuh"

#define BLOCK_FLOAT_NUMBER 0x3fffu /* the bits of a number in a word */
#define BLOCK_FLOAT_LEAST  13u     /* the smallest exponent: with it, the unit of the numbers is the smallest normal */

/* The exponent that fp32 stores for the largest of four numbers. */
PRS_DEVICE uint32_t block_exponent(const float (&v)[4])
{
    uint32_t most = BLOCK_FLOAT_LEAST << 23;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t size = __float_as_uint(v[i]) & 0x7fffffffu; /* as integers, not-a-numbers are the largest */
        most = size > most ? size : most;
    }
    return most >> 23;
}

PRS_DEVICE uint2 pack_block(const float (&v)[4])
{
    uint32_t exponent = block_exponent(v), bits[4];
    float scale = __uint_as_float((266u - exponent) << 23); /* the largest becomes 4096 to 8192 */
#pragma unroll
    for (int i = 0; i < 4; i++) /* 1.5 * 2^23 makes the sum round to a whole number, which its low bits hold */
        bits[i] = __float_as_uint(fmaxf(fminf(v[i] * scale, 8191.0f), -8191.0f) + 12582912.0f) & BLOCK_FLOAT_NUMBER;
    return make_uint2(bits[0] | bits[1] << 14 | exponent << 28, bits[2] | bits[3] << 14 | exponent >> 4 << 28);
}

PRS_DEVICE float unpack_number(uint32_t bits, float unit)
{
    /* 2^23 + 8192 + the number, as fp32; then without the first two */
    return (__uint_as_float((bits & BLOCK_FLOAT_NUMBER) ^ 0x4b002000u) - 8396800.0f) * unit;
}

/* Adds the four numbers to sum[0] to sum[3]. */
PRS_DEVICE void add_block_float(float *sum, uint2 v)
{
    uint32_t exponent = v.x >> 28 | v.y >> 28 << 4;
    float unit = __uint_as_float(exponent == 255 ? 0x7fc00000u : (exponent - 12) << 23);
    sum[0] += unpack_number(v.x, unit), sum[1] += unpack_number(v.x >> 14, unit);
    sum[2] += unpack_number(v.y, unit), sum[3] += unpack_number(v.y >> 14, unit);
}

#endif
