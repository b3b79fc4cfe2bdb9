/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels for the activation between the two products of a layer: forward, for a layer that keeps the first product,
 * and backward. TYPE: of the elements of all these matrices. One pass over the rows that exist, however large the
 * capacity. A warp takes a row; sums and factors are fp32. */
#ifndef PERSEUS_FUSED_ACTIVATION_CUH
#define PERSEUS_FUSED_ACTIVATION_CUH

#include "fused/core/epilogue.cuh"
#include "fused/moe/args.h"

enum {
    PRS_ACTIVATION_THREADS = 256,
    PRS_ACTIVATION_CTAS = 4 /* on each SM */
};

/* The derivative of the activation at x. */
PRS_DEVICE float activation_slope(uint32_t activation, float x)
{
    const float log2_e = 1.4426950408889634f;
    float s, y;
    switch (activation) {
    case PRS_ACTIVATION_RELU:
        return x > 0 ? 1.0f : 0.0f;
    case PRS_ACTIVATION_GELU:
        return 0.5f * (1.0f + erff(x * 0.7071067811865476f)) +
               x * 0.3989422804014327f * exp2_fast(x * x * (-0.5f * log2_e));
    case PRS_ACTIVATION_GELU_TANH: /* x s, with s = 1 / (1 + exp(-2 y)), as in gelu_tanh() */
        y = 0.7978845608028654f * (x + 0.044715f * x * x * x);
        s = divide_fast(1.0f, 1.0f + exp2_fast(y * (-2 * log2_e)));
        return s + x * s * (1.0f - s) * 2 * 0.7978845608028654f * (1.0f + 3 * 0.044715f * x * x);
    case PRS_ACTIVATION_SILU:
        s = divide_fast(1.0f, 1.0f + exp2_fast(x * -log2_e));
        return s + x * s * (1.0f - s);
    default:
        return 1.0f;
    }
}

/* Where a row begins. vectors: vectors in a row of the result. A row of a gated first product has those of the gate
 * first, then as many of up. */
struct activation_row {
    uint64_t wide, narrow; /* bytes before the row, in [capacity, N] and in [capacity, I] */
    uint32_t vectors;
};

template <int TYPE> PRS_DEVICE struct activation_row activation_row_at(const struct prs_moe_args &args, uint32_t row)
{
    uint64_t narrow = (uint64_t)row * args.n * element<TYPE>::bytes;
    return {args.epilogue.gated ? 2 * narrow : narrow, narrow, args.n / element<TYPE>::in_vector};
}

PRS_DEVICE uint32_t activation_warp(void)
{
    return blockIdx.x * (PRS_ACTIVATION_THREADS / 32) + threadIdx.x / 32;
}

PRS_DEVICE uint32_t activation_warps(void)
{
    return gridDim.x * (PRS_ACTIVATION_THREADS / 32);
}

/* Also computes rows that only pad a block: nobody reads their results. */
template <int TYPE>
static __global__ void __launch_bounds__(PRS_ACTIVATION_THREADS, PRS_ACTIVATION_CTAS)
    activate_kernel(const __grid_constant__ struct prs_moe_args args)
{
    constexpr uint32_t each = element<TYPE>::in_vector;
    uint32_t rows = args.totals->blocks * PRS_TILE_M;
    for (uint32_t row = activation_warp(); row < rows; row += activation_warps()) {
        struct activation_row at = activation_row_at<TYPE>(args, row);
        const uint4 *columns = (const uint4 *)(args.columns + at.wide);
        uint4 *to = (uint4 *)(args.activated + at.narrow);
#pragma unroll 2
        for (uint32_t i = threadIdx.x % 32; i < at.vectors; i += 32) {
            float x[each], up[each];
            unpack_vector<TYPE>(columns[i], x);
            if (args.epilogue.gated)
                unpack_vector<TYPE>(columns[at.vectors + i], up);
            activate(args.epilogue.activation, x);
#pragma unroll
            for (uint32_t j = 0; j < each; j++)
                x[j] *= args.epilogue.gated ? up[j] : 1.0f;
            to[i] = pack_vector<TYPE>(x);
        }
    }
}

/* One vector of columns of the result. x: the gate, or the product; up: 1 if there is no gate; u: the gradients of the
 * result. On return x and up hold their gradients, and u the result times the weight. Adds the product of result and
 * gradients to *sum. */
template <uint32_t N>
PRS_DEVICE void activation_vector_back(uint32_t activation, float weight, float (&x)[N], float (&up)[N], float (&u)[N],
                                       float *sum)
{
    float active[N];
#pragma unroll
    for (uint32_t j = 0; j < N; j++)
        active[j] = x[j];
    activate(activation, active);
#pragma unroll
    for (uint32_t j = 0; j < N; j++) {
        float h = active[j] * up[j], of_h = u[j] * weight;
        *sum += u[j] * h;
        x[j] = of_h * up[j] * activation_slope(activation, x[j]);
        up[j] = of_h * active[j];
        u[j] = h * weight;
    }
}

template <int TYPE> PRS_DEVICE void activation_row_back(const struct prs_moe_args &args, uint32_t row, float weight)
{
    constexpr uint32_t each = element<TYPE>::in_vector;
    uint32_t lane = threadIdx.x % 32;
    struct activation_row at = activation_row_at<TYPE>(args, row);
    const uint4 *columns = (const uint4 *)(args.columns + at.wide);
    const uint4 *gradients = (const uint4 *)(args.of_activated + at.narrow);
    uint4 *of_columns = (uint4 *)(args.of_columns + at.wide), *weighted = (uint4 *)(args.activated + at.narrow);
    float sum = 0;
    for (uint32_t i = lane; i < at.vectors; i += 32) {
        float x[each], up[each], u[each];
#pragma unroll
        for (uint32_t j = 0; j < each; j++)
            up[j] = 1;
        unpack_vector<TYPE>(columns[i], x);
        if (args.epilogue.gated)
            unpack_vector<TYPE>(columns[at.vectors + i], up);
        unpack_vector<TYPE>(gradients[i], u);
        activation_vector_back(args.epilogue.activation, weight, x, up, u, &sum);
        of_columns[i] = pack_vector<TYPE>(x);
        if (args.epilogue.gated)
            of_columns[at.vectors + i] = pack_vector<TYPE>(up);
        weighted[i] = pack_vector<TYPE>(u);
    }
    for (uint32_t d = 16; d != 0; d /= 2)
        sum += __shfl_xor_sync(~0u, sum, d);
    if (lane == 0)
        args.products[row] = sum;
}

template <int TYPE>
static __global__ void __launch_bounds__(PRS_ACTIVATION_THREADS, PRS_ACTIVATION_CTAS)
    activation_back_kernel(const __grid_constant__ struct prs_moe_args args)
{
    uint32_t rows = args.totals->blocks * PRS_TILE_M;
    for (uint32_t row = activation_warp(); row < rows; row += activation_warps()) {
        if (args.origins[row].slot < args.route.choices) {
            activation_row_back<TYPE>(args, row, args.origins[row].weight);
            continue;
        }
        struct activation_row at = activation_row_at<TYPE>(args, row);
        uint32_t wide = args.epilogue.gated ? 2 * at.vectors : at.vectors;
        for (uint32_t i = threadIdx.x % 32; i < wide; i += 32)
            ((uint4 *)(args.of_columns + at.wide))[i] = make_uint4(0, 0, 0, 0);
        for (uint32_t i = threadIdx.x % 32; i < at.vectors; i += 32)
            ((uint4 *)(args.activated + at.narrow))[i] = make_uint4(0, 0, 0, 0);
    }
}

#endif
