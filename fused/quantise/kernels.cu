/* SPDX-License-Identifier: Apache-2.0 */
/* Matrices to e4m3 and scales (core/quantise.cuh). Each number is read from memory once: the numbers that share a scale
 * stay in registers, or, if a row is too long for them, in the cache. */
#include "fused/quantise/kernels.h"

#include "fused/core/element.cuh"
#include "fused/core/launch.cuh"
#include "fused/core/load.h"
#include "fused/core/quantise.cuh"
#include "fused/core/scales.h"

enum { THREADS = 256, WARPS = THREADS / 32, CTAS = 4 /* on each SM */ };

struct quantise_args {
    const uint8_t *from;
    uint8_t *to;
    float *scales;
    uint64_t from_bytes, to_bytes; /* from one row to the next */
    uint64_t scale_row, scale_column;
    uint32_t rows, columns;
};

template <int TYPE>
PRS_DEVICE void load_eight(const struct quantise_args &a, uint32_t row, uint32_t column, float (&x)[8])
{
    constexpr uint32_t each = element<TYPE>::in_vector;
    const uint4 *from = (const uint4 *)(a.from + row * a.from_bytes + (uint64_t)column * element<TYPE>::bytes);
#pragma unroll
    for (uint32_t i = 0; i < 8 / each; i++)
        unpack_vector<TYPE>(from[i], x + i * each);
}

PRS_DEVICE void store_eight(const struct quantise_args &a, uint32_t row, uint32_t column, uint2 packed)
{
    *(uint2 *)(a.to + row * a.to_bytes + column) = packed;
}

PRS_DEVICE float *scale_at(const struct quantise_args &a, uint32_t row, uint32_t block)
{
    return a.scales + row * a.scale_row + block * a.scale_column;
}

PRS_DEVICE uint2 quantise_eight(const float (&x)[8], float inverse)
{
    uint32_t to[2];
    quantise(x, inverse, to);
    return make_uint2(to[0], to[1]);
}

/* Returns the largest value of all threads of the CTA to all of them. A further call waits until all have read the last
 * result. */
PRS_DEVICE float largest_of_cta(float most)
{
    volatile float *of_warp = (volatile float *)dynamic_shared();
    most = largest_of_lanes<32>(most);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        of_warp[threadIdx.x / 32] = most;
    /* MUTANT(emulator quantise/groups_are_right) all warps have written: delete */
    __syncthreads();
    return largest_of_lanes<WARPS>(of_warp[threadIdx.x % WARPS]);
}

/* ---- 1 x 128: a warp takes a part of a row ---- */
template <int TYPE>
static __global__ void __launch_bounds__(THREADS, CTAS) blocks_kernel(const __grid_constant__ struct quantise_args a)
{
    uint32_t parts = prs_ceil_div(a.columns, QUANTISE_PART);
    uint64_t end = (uint64_t)a.rows * parts;
    for (uint64_t i = blockIdx.x * WARPS + threadIdx.x / 32; i < end; i += gridDim.x * WARPS) {
        uint32_t row = (uint32_t)(i / parts);
        quantise_part(
            a.columns, (uint32_t)(i % parts) * QUANTISE_PART,
            [&](uint32_t column, float(&x)[8]) { load_eight<TYPE>(a, row, column, x); },
            [&](uint32_t column, uint2 packed) { store_eight(a, row, column, packed); },
            [&](uint32_t block, float scale) { *scale_at(a, row, block) = scale; });
    }
}

/* ---- 128 x 128: a CTA takes a square, which lies in its registers ---- */
template <int TYPE>
static __global__ void __launch_bounds__(THREADS, 2) squares_kernel(const __grid_constant__ struct quantise_args a)
{
    constexpr uint32_t across = PRS_SCALE_BLOCK / 8, down = THREADS / across, turns = PRS_SCALE_BLOCK / down;
    uint32_t columns = a.columns / PRS_SCALE_BLOCK, squares = prs_ceil_div(a.rows, PRS_SCALE_BLOCK) * columns;
    for (uint32_t i = blockIdx.x; i < squares; i += gridDim.x) {
        uint32_t row = i / columns * PRS_SCALE_BLOCK + threadIdx.x / across;
        uint32_t column = i % columns * PRS_SCALE_BLOCK + threadIdx.x % across * 8;
        float x[turns][8] = {}, most = 0;
#pragma unroll
        for (uint32_t j = 0; j < turns; j++)
            if (row + j * down < a.rows)
                load_eight<TYPE>(a, row + j * down, column, x[j]);
#pragma unroll
        for (uint32_t j = 0; j < turns; j++)
            most = fmaxf(most, largest_magnitude(x[j]));
        float scale = scale_of_largest(largest_of_cta(most));
#pragma unroll
        for (uint32_t j = 0; j < turns; j++)
            if (row + j * down < a.rows)
                store_eight(a, row + j * down, column, quantise_eight(x[j], 1.0f / scale));
        if (threadIdx.x == 0)
            *scale_at(a, i / columns, i % columns) = scale;
    }
}

/* ---- rows: a CTA takes a row, and reads it again from the cache ---- */
template <int TYPE> PRS_DEVICE float largest_of_row(const struct quantise_args &a, uint32_t row)
{
    float most = 0;
#pragma unroll 4
    for (uint32_t column = threadIdx.x * 8; column < a.columns; column += THREADS * 8) {
        float x[8];
        load_eight<TYPE>(a, row, column, x);
        most = fmaxf(most, largest_magnitude(x));
    }
    return most;
}

template <int TYPE> PRS_DEVICE void quantise_row(const struct quantise_args &a, uint32_t row, float inverse)
{
#pragma unroll 4
    for (uint32_t column = threadIdx.x * 8; column < a.columns; column += THREADS * 8) {
        float x[8];
        load_eight<TYPE>(a, row, column, x);
        store_eight(a, row, column, quantise_eight(x, inverse));
    }
}

template <int TYPE>
static __global__ void __launch_bounds__(THREADS, CTAS) rows_kernel(const __grid_constant__ struct quantise_args a)
{
    for (uint32_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
        float scale = scale_of_largest(largest_of_cta(largest_of_row<TYPE>(a, row)));
        quantise_row<TYPE>(a, row, 1.0f / scale);
        if (threadIdx.x == 0)
            *scale_at(a, row, 0) = scale;
    }
}

/* ---- a tensor: its scale, which is 0 before, then its numbers ---- */
/* Scales are not negative, so their bit patterns are ordered like their values. */
template <int TYPE>
static __global__ void __launch_bounds__(THREADS, CTAS) largest_kernel(const __grid_constant__ struct quantise_args a)
{
    float most = 0;
    for (uint32_t row = blockIdx.x; row < a.rows; row += gridDim.x)
        most = fmaxf(most, largest_of_row<TYPE>(a, row));
    most = largest_of_cta(most);
    if (threadIdx.x == 0)
        atomicMax((uint32_t *)a.scales, __float_as_uint(scale_of_largest(most)));
}

template <int TYPE>
static __global__ void __launch_bounds__(THREADS, CTAS) given_kernel(const __grid_constant__ struct quantise_args a)
{
    float inverse = 1.0f / *a.scales;
    for (uint32_t row = blockIdx.x; row < a.rows; row += gridDim.x)
        quantise_row<TYPE>(a, row, inverse);
}

/* ---- launches ---- */
typedef void (*kernel_fn)(const struct quantise_args);

static const struct instances {
    uint32_t type;
    kernel_fn blocks, squares, rows, largest, given;
} instances[] = {
#define INSTANCES(type)                                                                                                \
    {                                                                                                                  \
        type, blocks_kernel<type>, squares_kernel<type>, rows_kernel<type>, largest_kernel<type>, given_kernel<type>   \
    }
    INSTANCES(PRS_DTYPE_BF16),
    INSTANCES(PRS_DTYPE_FP16),
    INSTANCES(PRS_DTYPE_FP32),
};

static int load(void)
{
    int r = 0;
    for (const struct instances &k : instances)
        for (kernel_fn kernel : {k.blocks, k.squares, k.rows, k.largest, k.given})
            r = r ? r : launch_load(kernel);
    return r;
}
static const bool added = prs_load_add(load);

static int launch(kernel_fn kernel, const struct prs_quantise *x, uint64_t ctas, cudaStream_t stream)
{
    static const struct launch_shape shape = {1, THREADS, WARPS * sizeof(float)};
    uint64_t most = (uint64_t)x->sms * CTAS;
    uint32_t bytes = x->dtype == PRS_DTYPE_FP32 ? 4 : 2;
    struct quantise_args a = {(const uint8_t *)x->from, (uint8_t *)x->to, x->scales,
                              x->from_pitch * bytes,    x->to_pitch,      x->scale_row,
                              x->scale_column,          x->rows,          x->columns};
    return launch_kernel(kernel, &shape, (uint32_t)(ctas < most ? ctas : most), stream, a);
}

extern "C" int prs_quantise_kernels_launch(const struct prs_quantise *x, cudaStream_t stream)
{
    const struct instances *k = instances;
    uint64_t parts = (uint64_t)x->rows * prs_ceil_div(x->columns, QUANTISE_PART);
    int r = 0;
    while (k->type != x->dtype) /* which has been checked */
        k++;
    switch (x->group) {
    case PRS_QUANTISE_BLOCKS:
        return launch(k->blocks, x, (parts + WARPS - 1) / WARPS, stream);
    case PRS_QUANTISE_SQUARES:
        return launch(k->squares, x, (uint64_t)prs_ceil_div(x->rows, PRS_SCALE_BLOCK) * (x->columns / PRS_SCALE_BLOCK),
                      stream);
    case PRS_QUANTISE_ROWS:
        return launch(k->rows, x, x->rows, stream);
    default:
        if (!x->given)
            r = cudaMemsetAsync(x->scales, 0, sizeof(float), stream) == cudaSuccess ? 0 : -EIO;
        if (!r && !x->given)
            r = launch(k->largest, x, x->rows, stream);
        return r ? r : launch(k->given, x, x->rows, stream);
    }
}
