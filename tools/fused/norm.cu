/* SPDX-License-Identifier: Apache-2.0 */
/* The RMS norm of rows: as a kernel of its own, for the baselines, and as a check of what ours wrote. */
#include "tools/fused/element.cuh"
#include "tools/fused/launch.cuh"
#include "tools/fused/sums.cuh"

enum { THREADS = 512, WARPS = THREADS / 32, MOST_BLOCKS = BENCH_NORM_SCRATCH / WARPS };

struct norm_args {
    uint32_t type; /* enum prs_dtype, of all */
    uint32_t columns;
    uint64_t rows;
    uint16_t *c;
    const uint16_t *residual, *weight; /* residual: NULL, or what is added to c first */
    uint16_t *normed;
    float *scratch; /* where a block's warps exchange sums, since the emulator has no static shared memory */
};

/* Adds up the values of all threads of a block. */
static __device__ float total_of(float *scratch, float x)
{
    volatile float *sums = scratch + blockIdx.x * WARPS;
    float total = 0;
    for (int d = 16; d != 0; d /= 2)
        x += __shfl_xor_sync(~0u, x, d);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        sums[threadIdx.x / 32] = x;
    __syncthreads();
    for (int i = 0; i < WARPS; i++)
        total += sums[i];
    return total;
}

/* A block has a row; columns are a multiple of 8. It reads and writes 16 bytes at a time, as such kernels do. */
static __global__ void norm_apart(const struct norm_args a)
{
    for (uint64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
        uint16_t *c = a.c + row * a.columns;
        float squares = 0, factor;
        for (uint32_t i = threadIdx.x * 8; i < a.columns; i += THREADS * 8) {
            uint4 x = *(const uint4 *)(c + i), y = {};
            uint16_t *parts = (uint16_t *)&x;
            if (a.residual)
                y = *(const uint4 *)(a.residual + row * a.columns + i);
            for (int j = 0; j < 8; j++) {
                float v = bench_value(a.type, parts[j]) + bench_value(a.type, ((const uint16_t *)&y)[j]);
                parts[j] = bench_bits(a.type, v);
                squares += v * v;
            }
            if (a.residual)
                *(uint4 *)(c + i) = x;
        }
        factor = rsqrtf(total_of(a.scratch, squares) / (float)a.columns + BENCH_NORM_EPS);
        for (uint32_t i = threadIdx.x * 8; i < a.columns; i += THREADS * 8) {
            uint4 x = *(const uint4 *)(c + i), w = *(const uint4 *)(a.weight + i);
            uint16_t *parts = (uint16_t *)&x;
            for (int j = 0; j < 8; j++)
                parts[j] = bench_bits(a.type, bench_value(a.type, parts[j]) * factor *
                                                  bench_value(a.type, ((const uint16_t *)&w)[j]));
            *(uint4 *)(a.normed + row * a.columns + i) = x;
        }
    }
}

/* Computes the norm from the rounded C. C may differ from the sum by one rounding, and so may the normed rows. */
static __global__ void check_norm(const struct norm_args a, struct bench_sums *sums)
{
    double step = a.type == PRS_DTYPE_FP16 ? 0x1p-11 : 0x1p-8;
    for (uint64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
        const uint16_t *c = a.c + row * a.columns;
        double squares = 0, factor;
        /* each thread adds up all of them, so that double sums need no exchange */
        for (uint32_t i = 0; i < a.columns; i++)
            squares += (double)bench_value(a.type, c[i]) * bench_value(a.type, c[i]);
        factor = 1 / sqrt(squares / a.columns + BENCH_NORM_EPS);
        for (uint32_t i = threadIdx.x; i < a.columns; i += blockDim.x) {
            double want = bench_value(a.type, c[i]) * factor * bench_value(a.type, a.weight[i]);
            bench_sums_add(sums, bench_value(a.type, a.normed[row * a.columns + i]), want,
                           fabs(want) * 3.1 * step + 0x1p-20);
        }
    }
}

static struct norm_args args_of(const struct bench_problem *p, void *c, const void *weight, void *normed)
{
    return {p->shape.dtype == PRS_DTYPE_FP16 ? (uint32_t)PRS_DTYPE_FP16 : (uint32_t)PRS_DTYPE_BF16,
            (uint32_t)bench_columns_c(p),
            bench_rows_c(p),
            (uint16_t *)c,
            NULL,
            (const uint16_t *)weight,
            (uint16_t *)normed,
            NULL};
}

void bench_norm(const struct bench_problem *p, void *c, const void *residual, const void *weight, void *normed,
                float *scratch, cudaStream_t stream)
{
    struct norm_args a = args_of(p, c, weight, normed);
    a.scratch = scratch;
    a.residual = (const uint16_t *)residual;
    bench_launch(norm_apart, a.rows < MOST_BLOCKS ? a.rows : MOST_BLOCKS, THREADS, stream, a);
}

uint64_t bench_check_norm(const struct bench_problem *p, const void *c, const void *weight, const void *normed,
                          cudaStream_t stream)
{
    struct norm_args a = args_of(p, (void *)c, weight, (void *)normed);
    struct bench_sums *device = bench_sums_open(stream), sums;
    bench_launch(check_norm, a.rows < MOST_BLOCKS ? a.rows : MOST_BLOCKS, BENCH_THREADS, stream, a, device);
    sums = bench_sums_close(device, stream);
    return sums.beyond;
}
