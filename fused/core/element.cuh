/* SPDX-License-Identifier: Apache-2.0 */
/* The types of elements, for kernels; element.h is for the host. TYPE: enum prs_dtype. Each type has its own instance
 * of a kernel. */
#ifndef PERSEUS_FUSED_ELEMENT_CUH
#define PERSEUS_FUSED_ELEMENT_CUH

#include <perseus/fused.h>

#include "fused/core/ptx.cuh"
#include "fused/core/tile.h"

template <uint32_t BYTES> struct element_size {
    static constexpr uint32_t bytes = BYTES;
    static constexpr uint32_t in_vector = 16 / BYTES;         /* elements in a vector of 16 bytes */
    static constexpr uint32_t in_row = PRS_STAGE_ROW / BYTES; /* elements in a row of a stage, or of a slab */
};

/* A type of elements. A type that products multiply has these members:
 *   sum         the type to which sums of products are rounded
 *   product_k   the K of one product instruction
 *   multiply()  that instruction; the number of accumulators chooses its size. N_MAJOR: how B lies in shared memory
 *               (ptx.cuh)
 * A type that sums are rounded to has pack(), low() and high() for two elements in a word, the first in the low half.
 */
template <int TYPE> struct element;

template <> struct element<PRS_DTYPE_BF16> : element_size<2> {
    typedef uint16_t bits;
    static constexpr int sum = PRS_DTYPE_BF16;
    static constexpr uint32_t product_k = 16;

    template <int N_MAJOR> PRS_DEVICE void multiply(float (&d)[128], uint64_t a, uint64_t b, uint32_t add)
    {
        wgmma_m64n256k16_bf16<N_MAJOR>(d, a, b, add);
    }
    template <int N_MAJOR> PRS_DEVICE void multiply(float (&d)[96], uint64_t a, uint64_t b, uint32_t add)
    {
        wgmma_m64n192k16_bf16<N_MAJOR>(d, a, b, add);
    }
    template <int N_MAJOR> PRS_DEVICE void multiply(float (&d)[88], uint64_t a, uint64_t b, uint32_t add)
    {
        wgmma_m64n176k16_bf16<N_MAJOR>(d, a, b, add);
    }
    template <int N_MAJOR> PRS_DEVICE void multiply(float (&d)[64], uint64_t a, uint64_t b, uint32_t add)
    {
        wgmma_m64n128k16_bf16<N_MAJOR>(d, a, b, add);
    }
    template <int N_MAJOR> PRS_DEVICE void multiply(float (&d)[32], uint64_t a, uint64_t b, uint32_t add)
    {
        wgmma_m64n64k16_bf16<N_MAJOR>(d, a, b, add);
    }
    template <int N_MAJOR> PRS_DEVICE void multiply(float (&d)[16], uint64_t a, uint64_t b, uint32_t add)
    {
        wgmma_m64n32k16_bf16<N_MAJOR>(d, a, b, add);
    }
    template <int N_MAJOR> PRS_DEVICE void multiply(float (&d)[8], uint64_t a, uint64_t b, uint32_t add)
    {
        wgmma_m64n16k16_bf16<N_MAJOR>(d, a, b, add);
    }
    template <int N_MAJOR> PRS_DEVICE void multiply(float (&d)[4], uint64_t a, uint64_t b, uint32_t add)
    {
        wgmma_m64n8k16_bf16<N_MAJOR>(d, a, b, add);
    }
    /* A is in registers, as pack() makes it from accumulators. */
    template <int N_MAJOR> PRS_DEVICE void multiply(float (&d)[128], const uint32_t *a, uint64_t b, uint32_t add)
    {
        wgmma_m64n256k16_bf16_registers<N_MAJOR>(d, a[0], a[1], a[2], a[3], b, add);
    }
    template <int N_MAJOR> PRS_DEVICE void multiply(float (&d)[48], const uint32_t *a, uint64_t b, uint32_t add)
    {
        wgmma_m64n96k16_bf16_registers<N_MAJOR>(d, a[0], a[1], a[2], a[3], b, add);
    }
    template <int N_MAJOR> PRS_DEVICE void multiply(float (&d)[64], const uint32_t *a, uint64_t b, uint32_t add)
    {
        wgmma_m64n128k16_bf16_registers<N_MAJOR>(d, a[0], a[1], a[2], a[3], b, add);
    }
    template <int N_MAJOR> PRS_DEVICE void multiply(float (&d)[32], const uint32_t *a, uint64_t b, uint32_t add)
    {
        wgmma_m64n64k16_bf16_registers<N_MAJOR>(d, a[0], a[1], a[2], a[3], b, add);
    }
    /* Both operands with K outermost. */
    PRS_DEVICE void multiply_outer(float (&d)[32], uint64_t a, uint64_t b, uint32_t add)
    {
        wgmma_m64n64k16_bf16_outer(d, a, b, add);
    }

    PRS_DEVICE uint32_t pack(float first, float second)
    {
        return pack_bf16x2(first, second);
    }
    PRS_DEVICE float low(uint32_t pair)
    {
        return bf16_low(pair);
    }
    PRS_DEVICE float high(uint32_t pair)
    {
        return bf16_high(pair);
    }
};

template <> struct element<PRS_DTYPE_FP16> : element_size<2> {
    typedef uint16_t bits;
    static constexpr int sum = PRS_DTYPE_FP16;
    static constexpr uint32_t product_k = 16;

    template <int N_MAJOR> PRS_DEVICE void multiply(float (&d)[128], uint64_t a, uint64_t b, uint32_t add)
    {
        wgmma_m64n256k16_f16<N_MAJOR>(d, a, b, add);
    }
    template <int N_MAJOR> PRS_DEVICE void multiply(float (&d)[96], uint64_t a, uint64_t b, uint32_t add)
    {
        wgmma_m64n192k16_f16<N_MAJOR>(d, a, b, add);
    }

    PRS_DEVICE uint32_t pack(float first, float second)
    {
        return pack_f16x2(first, second);
    }
    PRS_DEVICE float low(uint32_t pair)
    {
        return f16_low(pair);
    }
    PRS_DEVICE float high(uint32_t pair)
    {
        return f16_high(pair);
    }
};

/* Only for A and B, which are K-major. */
template <> struct element<PRS_DTYPE_E4M3> : element_size<1> {
    typedef uint8_t bits;
    static constexpr int sum = PRS_DTYPE_BF16;
    static constexpr uint32_t product_k = 32;

    template <int N_MAJOR> PRS_DEVICE void multiply(float (&d)[128], uint64_t a, uint64_t b, uint32_t add)
    {
        static_assert(N_MAJOR == 0, "wgmma has no transposed operands of one byte");
        wgmma_m64n256k32_e4m3(d, a, b, add);
    }
    template <int N_MAJOR> PRS_DEVICE void multiply(float (&d)[64], uint64_t a, uint64_t b, uint32_t add)
    {
        static_assert(N_MAJOR == 0, "wgmma has no transposed operands of one byte");
        wgmma_m64n128k32_e4m3(d, a, b, add);
    }
    template <int N_MAJOR> PRS_DEVICE void multiply(float (&d)[32], uint64_t a, uint64_t b, uint32_t add)
    {
        static_assert(N_MAJOR == 0, "wgmma has no transposed operands of one byte");
        wgmma_m64n64k32_e4m3(d, a, b, add);
    }
    template <int N_MAJOR> PRS_DEVICE void multiply(float (&d)[16], uint64_t a, uint64_t b, uint32_t add)
    {
        static_assert(N_MAJOR == 0, "wgmma has no transposed operands of one byte");
        wgmma_m64n32k32_e4m3(d, a, b, add);
    }
    template <int N_MAJOR> PRS_DEVICE void multiply(float (&d)[8], uint64_t a, uint64_t b, uint32_t add)
    {
        static_assert(N_MAJOR == 0, "wgmma has no transposed operands of one byte");
        wgmma_m64n16k32_e4m3(d, a, b, add);
    }
    template <int N_MAJOR> PRS_DEVICE void multiply(float (&d)[4], uint64_t a, uint64_t b, uint32_t add)
    {
        static_assert(N_MAJOR == 0, "wgmma has no transposed operands of one byte");
        wgmma_m64n8k32_e4m3(d, a, b, add);
    }
};

/* Only results have this type. */
template <> struct element<PRS_DTYPE_FP32> : element_size<4> {
    typedef float bits;
};

/* Element i of an array. */
template <int TYPE> PRS_DEVICE float load_element(const void *from, uint64_t i)
{
    typename element<TYPE>::bits x = ((const typename element<TYPE>::bits *)from)[i];
    if constexpr (TYPE == PRS_DTYPE_FP32)
        return x;
    else
        return element<TYPE>::low(x);
}

template <int TYPE> PRS_DEVICE void store_element(void *to, uint64_t i, float x)
{
    if constexpr (TYPE == PRS_DTYPE_FP32)
        ((float *)to)[i] = x;
    else
        ((uint16_t *)to)[i] = (uint16_t)element<TYPE>::pack(x, 0);
}

/* Unpacks the in_vector elements of a vector of 16 bytes. */
template <int TYPE> PRS_DEVICE void unpack_vector(uint4 v, float *to)
{
    uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
        if constexpr (TYPE == PRS_DTYPE_FP32)
            to[i] = __uint_as_float(word[i]);
        else
            to[2 * i] = element<TYPE>::low(word[i]), to[2 * i + 1] = element<TYPE>::high(word[i]);
}

template <int TYPE> PRS_DEVICE uint4 pack_vector(const float *x)
{
    if constexpr (TYPE == PRS_DTYPE_FP32)
        return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
    else
        return make_uint4(element<TYPE>::pack(x[0], x[1]), element<TYPE>::pack(x[2], x[3]),
                          element<TYPE>::pack(x[4], x[5]), element<TYPE>::pack(x[6], x[7]));
}

#endif
