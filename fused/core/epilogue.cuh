/* SPDX-License-Identifier: Apache-2.0 */
/* The device code of epilogue.h: for one element, and for a tile in the registers of the tensor cores. */
#ifndef PERSEUS_FUSED_EPILOGUE_CUH
#define PERSEUS_FUSED_EPILOGUE_CUH

#include "fused/core/element.cuh"
#include "fused/core/epilogue.h"

/* exp(-x) = 2^(-x * log2(e)). For x far below 0 it is infinite, and the result is then -0, as it should be. */
PRS_DEVICE float silu(float x)
{
    return x * divide_fast(1.0f, 1.0f + exp2_fast(x * -1.4426950408889634f));
}

/* tanh(y) = 2 / (1 + exp(-2 y)) - 1, so the approximation is x / (1 + exp(-2 y)): y = sqrt(2 / pi) (x + 0.044715
 * x^3). */
PRS_DEVICE float gelu_tanh(float x)
{
    float y = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return x * divide_fast(1.0f, 1.0f + exp2_fast(y * (-2 * 1.4426950408889634f)));
}

template <int N> PRS_DEVICE void activate(uint32_t activation, float (&x)[N])
{
    switch (activation) {
    case PRS_ACTIVATION_RELU:
#pragma unroll
        for (int i = 0; i < N; i++)
            x[i] = fmaxf(x[i], 0.0f);
        break;
    case PRS_ACTIVATION_GELU:
#pragma unroll
        for (int i = 0; i < N; i++)
            x[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.7071067811865476f));
        break;
    case PRS_ACTIVATION_GELU_TANH:
#pragma unroll
        for (int i = 0; i < N; i++)
            x[i] = gelu_tanh(x[i]);
        break;
    case PRS_ACTIVATION_SILU:
#pragma unroll
        for (int i = 0; i < N; i++)
            x[i] = silu(x[i]);
        break;
    default:
        break;
    }
}

/* One element of the result. SUM, RESULT: types of the bias and of C. up: used if gated. columns: how many the result
 * has. */
template <int SUM, int RESULT>
PRS_DEVICE float finish_element(const struct prs_epilogue &e, float sum, float up, uint64_t row, uint32_t column,
                                uint32_t columns)
{
    float x[1] = {sum + (e.bias ? load_element<SUM>(e.bias, column) : 0)};
    activate(e.activation, x);
    if (e.gated)
        x[0] *= up + (e.bias ? load_element<SUM>(e.bias, columns + column) : 0);
    return x[0] + (e.residual ? load_element<RESULT>(e.residual, row * e.residual_pitch + column) : 0);
}

/* Where a tile, or a quarter of it, lies in the rank's result, and the rows and columns of that result. columns: a
 * multiple of 8. */
struct tile_place {
    uint32_t row, column, rows, columns;
};

/* A quarter of the sums of a warpgroup, 64 rows x 64 columns: thread t holds two columns of every eight, in row t / 32
 * * 16 + t % 32 / 4 and in the row 8 further down. The quarter may be a gate, which is not the result yet, or it may be
 * multiplied by a gate. */
enum quarter_kind { QUARTER_ALONE, QUARTER_IS_GATE, QUARTER_HAS_GATE };

template <int SUM>
PRS_DEVICE void finish_quarter(const struct prs_epilogue &e, float (&x)[32], enum quarter_kind kind, const float *gate,
                               const struct tile_place &at)
{
    typedef element<SUM> sum;
    typedef typename sum::bits bits;
    uint32_t lane = threadIdx.x % 32, row = at.row + threadIdx.x % 128 / 32 * 16 + lane / 4;
    uint32_t column = at.column + lane % 4 * 2;
    if (e.bias) {
        const bits *bias = (const bits *)e.bias + (kind == QUARTER_HAS_GATE ? at.columns : 0);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            uint32_t pair = column + j * 8 < at.columns ? *(const uint32_t *)(bias + column + j * 8) : 0;
            x[j * 4] += sum::low(pair), x[j * 4 + 1] += sum::high(pair);
            x[j * 4 + 2] += sum::low(pair), x[j * 4 + 3] += sum::high(pair);
        }
    }
    if (kind == QUARTER_HAS_GATE)
#pragma unroll
        for (int i = 0; i < 32; i++)
            x[i] *= gate[i];
    else
        activate(e.activation, x);
    if (!e.residual || kind == QUARTER_IS_GATE)
        return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const bits *from = (const bits *)e.residual + (uint64_t)(row + h * 8) * e.residual_pitch + column;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            bool inside = row + h * 8 < at.rows && column + j * 8 < at.columns;
            uint32_t pair = inside ? *(const uint32_t *)(from + j * 8) : 0;
            x[j * 4 + h * 2] += sum::low(pair), x[j * 4 + h * 2 + 1] += sum::high(pair);
        }
    }
}

/* The sums of a warpgroup: 64 rows, and in the widest tile four quarters of 64 columns. Registers cannot be indexed at
 * run time: the tile turns by a quarter in each round, so that the code of a quarter exists once. The result of a gated
 * tile has half as many quarters, and each is there twice. */
template <int SUM, int N>
PRS_DEVICE void finish_tile(const struct prs_epilogue &e, float (&d)[N], const struct tile_place &tile)
{
    constexpr uint32_t quarters = N / 32, half = quarters / 2;
#pragma unroll 1
    for (uint32_t quarter = 0; quarter < quarters; quarter++) {
        enum quarter_kind kind = !e.gated ? QUARTER_ALONE : quarter < half ? QUARTER_IS_GATE : QUARTER_HAS_GATE;
        struct tile_place at = tile;
        float x[32];
        at.column += (e.gated ? quarter % half : quarter) * 64;
#pragma unroll
        for (int i = 0; i < 32; i++)
            x[i] = d[i];
        finish_quarter<SUM>(e, x, kind, &d[N / 2], at); /* half a turn ago the gate was computed */
#pragma unroll
        for (int i = 0; i < N - 32; i++)
            d[i] = d[i + 32];
#pragma unroll
        for (int i = 0; i < 32; i++)
            d[N - 32 + i] = x[i];
    }
    if (e.gated)
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            d[i] = d[N / 2 + i];
}

#endif
