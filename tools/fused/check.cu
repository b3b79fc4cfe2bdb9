/* SPDX-License-Identifier: Apache-2.0 */
/* Inputs that any rank can recompute, and a reference in double precision for sampled elements. */
#include "tools/fused/bench.h"
#include "tools/fused/element.cuh"
#include "tools/fused/launch.cuh"
#include "tools/fused/sums.cuh"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static __global__ void fill(void *to, uint64_t count, uint32_t dtype, uint32_t seed, uint32_t rank, uint32_t which)
{
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < count;
         i += (uint64_t)gridDim.x * blockDim.x) {
        float v = bench_element_of(dtype, seed, rank, which, i);
        if (dtype == PRS_DTYPE_FP32)
            ((float *)to)[i] = v;
        else if (dtype == PRS_DTYPE_E4M3)
            ((uint8_t *)to)[i] = (uint8_t)bench_bits(dtype, v);
        else
            ((uint16_t *)to)[i] = bench_bits(dtype, v);
    }
}

/* The relative error of one rounding: half a unit in the last of 8 bits (fp16: of 11 bits), and a little more. */
static __device__ double rounding(const struct bench_problem &p)
{
    return p.shape.dtype == PRS_DTYPE_FP16 ? 0x1.02p-11 : 0x1.02p-8;
}

/* Of sums and the bias. */
static __host__ __device__ uint32_t sum_dtype(const struct bench_problem &p)
{
    return p.shape.dtype == PRS_DTYPE_E4M3 ? PRS_DTYPE_BF16 : p.shape.dtype;
}

/* Of C and the residual. */
static __host__ __device__ uint32_t result_dtype(const struct bench_problem &p)
{
    return p.shape.c_dtype != 0 ? p.shape.c_dtype : sum_dtype(p);
}

static __device__ double element(const struct bench_problem &p, uint32_t seed, uint32_t rank, uint32_t which,
                                 uint64_t at)
{
    return bench_element_of(p.shape.dtype, seed, rank, which, at);
}

/* The node of the rank that adds up this element; each other node rounds its partial sum. The fused and the unfused
 * all-reduce assign elements to ranks in the same way wherever both can run. */
static __device__ uint32_t owner_node(const struct bench_problem &p, uint64_t element)
{
    uint64_t each = ((uint64_t)p.shape.m * (p.shape.n / (1 + p.shape.gated)) + p.world - 1) / p.world;
    uint32_t owner = p.shape.op == PRS_GEMM_ALLREDUCE ? (uint32_t)(element / ((each + 7) / 8 * 8)) : p.rank;
    return owner / (p.world / p.nodes);
}

/* A sum before it is finished, and by how much the kernel's sum may differ from it. */
struct sum {
    double value, error;
};

/* The scale of a row of a rank's A, or of a column of its B, at a place of K. */
static __device__ double scale_of(const struct bench_problem &p, uint32_t rank, uint32_t which, uint64_t at, uint64_t k)
{
    uint64_t rows = p.shape.op == PRS_GEMM_ALLGATHER ? p.shape.m / p.world : p.shape.m, i = at;
    if (p.shape.scaling == PRS_SCALING_BLOCKS)
        i = which == BENCH_SCALE_A ? k / 128 * rows + at : at / 128 * (p.shape.k / 128) + k / 128;
    if (p.shape.scaling == PRS_SCALING_TENSOR)
        i = 0;
    if (p.shape.scaling == PRS_SCALING_TENSOR && p.shape.op == PRS_GEMM_ALLGATHER && which == BENCH_SCALE_A)
        rank = 0; /* all ranks have the same */
    return bench_element_of(PRS_DTYPE_FP32, p.seed_b, rank, which, i);
}

/* The sum of a rank's scaled products, by a warp. A product instruction adds 32 products to the sum in the tensor
 * cores. It cuts each product off at the last of 14 bits of the largest, and then the sum, too
 * (tools/hopper/wgmma_math.cpp). */
static __device__ struct sum scaled_sum_of(const struct bench_problem &p, uint32_t a_rank, uint32_t b_rank,
                                           uint64_t row, uint64_t column)
{
    double held = 0, lost = 0, total = 0, error = 0;
    for (uint64_t i = 0; i < p.shape.k; i += 32) {
        uint64_t at = i + threadIdx.x % 32;
        double x = at < p.shape.k ? element(p, p.seed_a, a_rank, BENCH_A, row * p.shape.k + at) *
                                        element(p, p.seed_b, b_rank, BENCH_B, column * p.shape.k + at)
                                  : 0;
        double most = fabs(x);
        for (int o = 16; o > 0; o /= 2) {
            x += __shfl_xor_sync(~0u, x, o);
            most = fmax(most, __shfl_xor_sync(~0u, most, o));
        }
        lost += 33 * 0x1p-13 * fmax(most, fabs(held) + lost);
        held += x;
        lost += 0x1p-13 * (fabs(held) + lost);
        if ((p.shape.fast_accumulation == 0 && i % 128 == 96) || i + 32 >= p.shape.k) {
            double scale = scale_of(p, a_rank, BENCH_SCALE_A, row, i) * scale_of(p, b_rank, BENCH_SCALE_B, column, i);
            total += held * scale;
            error += (lost + fabs(held) * 0x1p-21) * fabs(scale);
            held = lost = 0;
        }
    }
    return {total, error};
}

/* Column `column` of the product, in C's row `row`, by a warp: the sum over ranks of dot products. The bound allows one
 * rounding of each partial sum, one of each other node's sum, and fp32 accumulation of |a b|. at: the element of C
 * that it belongs to. */
static __device__ struct sum sum_of(const struct bench_problem &p, uint64_t row, uint64_t rows, uint64_t column,
                                    uint64_t at)
{
    uint64_t lane = threadIdx.x % 32, k = p.shape.k, block = p.shape.m / p.world;
    bool reduces = p.shape.op == PRS_GEMM_REDUCE_SCATTER || p.shape.op == PRS_GEMM_ALLREDUCE;
    uint64_t a_row = p.shape.op == PRS_GEMM_REDUCE_SCATTER ? p.rank * rows + row : row;
    double total = 0, partials = 0, magnitude = 0, node = 0, lost = 0;
    uint32_t locals = p.world / p.nodes, owner = owner_node(p, at);
    for (uint32_t t = 0; t < (reduces ? p.world : 1); t++) {
        uint32_t a_rank = reduces ? t : p.rank, b_rank = reduces ? t : p.rank;
        uint64_t r = a_row;
        double sum = 0, size = 0;
        if (p.shape.op == PRS_GEMM_ALLGATHER) {
            a_rank = (uint32_t)(row / block);
            r = row % block;
        }
        if (p.shape.dtype == PRS_DTYPE_E4M3) {
            struct sum scaled = scaled_sum_of(p, a_rank, b_rank, r, column);
            sum = scaled.value;
            lost += scaled.error;
        }
        for (uint64_t i = lane; i < k && p.shape.dtype != PRS_DTYPE_E4M3; i += 32) {
            uint64_t where = p.shape.b_transposed ? column * k + i : i * p.shape.n + column;
            double x = element(p, p.seed_a, a_rank, BENCH_A, r * k + i) * element(p, p.seed_b, b_rank, BENCH_B, where);
            sum += x;
            size += fabs(x);
        }
        for (int o = 16; o > 0 && p.shape.dtype != PRS_DTYPE_E4M3; o /= 2) {
            sum += __shfl_xor_sync(~0u, sum, o);
            size += __shfl_xor_sync(~0u, size, o);
        }
        total += sum;
        partials += reduces ? fabs(sum) : 0;
        node = t % locals == 0 ? sum : node + sum;
        if (reduces && t % locals == locals - 1 && t / locals != owner)
            partials += fabs(node);
        magnitude += size;
    }
    return {total, partials * rounding(p) + magnitude * 0x1p-21 + lost};
}

static __device__ double activated(uint32_t activation, double x)
{
    switch (activation) {
    case PRS_ACTIVATION_RELU:
        return x > 0 ? x : 0;
    case PRS_ACTIVATION_GELU:
        return x * (1 + erf(x * 0.7071067811865476)) / 2;
    case PRS_ACTIVATION_GELU_TANH:
        return x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))) / 2;
    case PRS_ACTIVATION_SILU:
        return x / (1 + exp(-x));
    default:
        return x;
    }
}

/* The steepest slope of an activation is 1.13, that of GELU. The unfused path rounds a sum before it finishes it. */
static __device__ struct sum finished(const struct bench_problem &p, struct sum s, struct sum up, uint64_t row,
                                      uint64_t column)
{
    /* Ranks of an all-reduce finish the same sum, so they have the same bias and residual. */
    uint32_t rank = p.shape.op == PRS_GEMM_ALLREDUCE ? 0 : p.rank, columns = p.shape.n / (1 + p.shape.gated);
    double x = s.value, y = up.value, error = s.error + fabs(s.value) * rounding(p);
    if (p.bias) {
        x += bench_element_of(sum_dtype(p), p.seed_b, rank, BENCH_BIAS, column);
        y += bench_element_of(sum_dtype(p), p.seed_b, rank, BENCH_BIAS, columns + column);
    }
    x = activated(p.shape.activation, x);
    error = p.shape.activation == PRS_ACTIVATION_NONE ? error : 1.14 * error + fabs(x) * 0x1p-18;
    if (p.shape.gated) {
        double error_y = up.error + fabs(up.value) * rounding(p);
        error = error * (fabs(y) + error_y) + fabs(x) * error_y;
        x *= y;
    }
    if (p.residual)
        x += bench_element_of(result_dtype(p), p.seed_b, rank, BENCH_RESIDUAL, row * columns + column);
    return {x, error};
}

/* One warp per sample. The bound allows one more rounding, that of the result. */
static __global__ void check_samples(struct bench_problem p, const void *c, uint64_t rows, struct bench_sums *out)
{
    uint64_t sample = (blockIdx.x * (uint64_t)blockDim.x + threadIdx.x) / 32, columns = p.shape.n / (1 + p.shape.gated);
    uint64_t row = bench_scatter(sample) % rows, column = bench_scatter(sample + 7777777) % columns;
    uint64_t at = row * columns + column;
    struct sum s = sum_of(p, row, rows, column, at), up = {0, 0};
    if (p.shape.gated)
        up = sum_of(p, row, rows, columns + column, at);
    if (p.shape.gated || p.shape.activation != PRS_ACTIVATION_NONE || p.bias || p.residual)
        s = finished(p, s, up, row, column);
    if (threadIdx.x % 32 != 0)
        return;
    if (result_dtype(p) == PRS_DTYPE_FP32)
        bench_sums_add(out, ((const float *)c)[at], s.value, fabs(s.value) * 0x1.02p-24 + s.error);
    else
        bench_sums_add(out, bench_value(result_dtype(p), ((const uint16_t *)c)[at]), s.value,
                       fabs(s.value) * rounding(p) + s.error);
}

static __global__ void check_gathered(struct bench_problem p, const void *gathered, unsigned long long *wrong)
{
    uint64_t block = (uint64_t)p.shape.m / p.world * p.shape.k;
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < block * p.world;
         i += (uint64_t)gridDim.x * blockDim.x) {
        uint16_t bits =
            p.shape.dtype == PRS_DTYPE_E4M3 ? ((const uint8_t *)gathered)[i] : ((const uint16_t *)gathered)[i];
        if (bench_value(p.shape.dtype, bits) != element(p, p.seed_a, (uint32_t)(i / block), BENCH_A, i % block))
            atomicAdd(wrong, 1ull);
    }
}

/* words: 16-bit words in an element. In an fp32 element only the upper word shows whether it was written. */
static __global__ void count_poison(const uint16_t *c, uint64_t count, uint32_t words, struct bench_sums *out)
{
    unsigned long long mine = 0;
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < count; i += (uint64_t)gridDim.x * blockDim.x)
        mine += c[(i + 1) * words - 1] == 0xffff;
    if (mine != 0)
        atomicAdd(&out->poisoned, mine);
}

struct bench_sums *bench_sums_open(cudaStream_t stream)
{
    struct bench_sums *device;
    BENCH_CUDA(cudaMalloc((void **)&device, sizeof(*device)));
    BENCH_CUDA(cudaMemsetAsync(device, 0, sizeof(*device), stream));
    return device;
}

void bench_sums_poisoned(struct bench_sums *device, const void *c, uint64_t count, uint32_t words, cudaStream_t stream)
{
    bench_launch(count_poison, bench_blocks(count), BENCH_THREADS, stream, (const uint16_t *)c, count, words, device);
}

struct bench_sums bench_sums_close(struct bench_sums *device, cudaStream_t stream)
{
    struct bench_sums host;
    BENCH_CUDA(cudaMemcpyAsync(&host, device, sizeof(host), cudaMemcpyDeviceToHost, stream));
    BENCH_CUDA(cudaStreamSynchronize(stream));
    BENCH_CUDA(cudaFree(device));
    return host;
}

struct bench_verdict bench_sums_verdict(const struct bench_sums *sums, uint64_t sampled)
{
    struct bench_verdict v;
    v.max_rel_error = sums->worst / sqrt(sums->square / (double)sampled);
    v.beyond = sums->beyond;
    v.poisoned = sums->poisoned;
    v.sampled = sampled;
    return v;
}

size_t bench_rows_a(const struct bench_problem *p)
{
    return p->shape.op == PRS_GEMM_ALLGATHER ? p->shape.m / p->world : p->shape.m;
}

size_t bench_rows_c(const struct bench_problem *p)
{
    return p->shape.op == PRS_GEMM_REDUCE_SCATTER ? p->shape.m / p->world : p->shape.m;
}

size_t bench_columns_c(const struct bench_problem *p)
{
    return p->shape.n / (1 + p->shape.gated);
}

size_t bench_bytes(const struct bench_problem *p)
{
    return p->shape.dtype == PRS_DTYPE_E4M3 ? 1 : 2;
}

uint32_t bench_words_c(const struct bench_problem *p)
{
    return result_dtype(*p) == PRS_DTYPE_FP32 ? 2 : 1;
}

bool bench_finishes(const struct bench_problem *p)
{
    return p->shape.gated || p->shape.activation != PRS_ACTIVATION_NONE || p->bias || p->residual;
}

void bench_fill(void *to, uint64_t elements, uint32_t dtype, uint32_t seed, uint32_t rank, uint32_t which,
                cudaStream_t stream)
{
    bench_launch(fill, bench_blocks(elements), BENCH_THREADS, stream, to, elements, dtype, seed, rank, which);
}

void bench_fill_inputs(const struct bench_problem *p, void *a, void *b, cudaStream_t stream)
{
    bench_fill(a, bench_rows_a(p) * p->shape.k, p->shape.dtype, p->seed_a, p->rank, BENCH_A, stream);
    bench_fill(b, (uint64_t)p->shape.n * p->shape.k, p->shape.dtype, p->seed_b, p->rank, BENCH_B, stream);
}

void bench_fill_finish(const struct bench_problem *p, void *bias, void *residual, cudaStream_t stream)
{
    uint32_t rank = p->shape.op == PRS_GEMM_ALLREDUCE ? 0 : p->rank;
    if (bias)
        bench_fill(bias, p->shape.n, sum_dtype(*p), p->seed_b, rank, BENCH_BIAS, stream);
    if (residual)
        bench_fill(residual, bench_rows_c(p) * bench_columns_c(p), result_dtype(*p), p->seed_b, rank, BENCH_RESIDUAL,
                   stream);
}

static float *scales(const struct bench_problem *p, uint64_t count, uint32_t rank, uint32_t which, cudaStream_t stream)
{
    float *to;
    BENCH_CUDA(cudaMalloc((void **)&to, count * sizeof(*to)));
    bench_fill(to, count, PRS_DTYPE_FP32, p->seed_b, rank, which, stream);
    return to;
}

void bench_scales_open(const struct bench_problem *p, float **a, float **b, cudaStream_t stream)
{
    const struct prs_gemm_shape *s = &p->shape;
    uint64_t k_blocks = s->k / 128, of_a = 1, of_b = 1;
    bool same = s->op == PRS_GEMM_ALLGATHER && s->scaling == PRS_SCALING_TENSOR;
    *a = *b = NULL;
    if (s->dtype != PRS_DTYPE_E4M3)
        return;
    if (s->scaling == PRS_SCALING_ROWS)
        of_a = bench_rows_a(p), of_b = s->n;
    if (s->scaling == PRS_SCALING_BLOCKS)
        of_a = bench_rows_a(p) * k_blocks, of_b = (s->n + 127) / 128 * k_blocks;
    *a = scales(p, of_a, same ? 0 : p->rank, BENCH_SCALE_A, stream);
    *b = scales(p, of_b, p->rank, BENCH_SCALE_B, stream);
}

static __global__ void negate(uint16_t *to, uint64_t words, uint16_t signs)
{
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += (uint64_t)gridDim.x * blockDim.x)
        to[i] ^= signs;
}

void bench_negate(void *to, uint64_t elements, uint32_t bytes, cudaStream_t stream)
{
    uint64_t words = elements * bytes / 2;
    uint16_t signs = bytes == 1 ? 0x8080 : 0x8000;
    bench_launch(negate, bench_blocks(words), BENCH_THREADS, stream, (uint16_t *)to, words, signs);
}

void bench_poison(void *c, size_t bytes, cudaStream_t stream)
{
    BENCH_CUDA(cudaMemsetAsync(c, 0xff, bytes, stream)); /* a NaN that is never the result of a sum */
}

uint64_t bench_sampled(const struct bench_problem *p)
{
    return bench_scatter(0) % bench_rows_c(p) * bench_columns_c(p) + bench_scatter(7777777) % bench_columns_c(p);
}

struct bench_verdict bench_check(const struct bench_problem *p, const void *c, cudaStream_t stream)
{
    uint64_t rows = bench_rows_c(p), count = rows * bench_columns_c(p);
    uint64_t samples = count < p->samples ? count : p->samples;
    struct bench_sums *device = bench_sums_open(stream), sums;
    samples = (samples + 7) / 8 * 8;
    bench_launch(check_samples, (unsigned)(samples / 8), 256, stream, *p, c, rows, device);
    bench_sums_poisoned(device, c, count, bench_words_c(p), stream);
    sums = bench_sums_close(device, stream);
    return bench_sums_verdict(&sums, samples);
}

uint64_t bench_check_gathered(const struct bench_problem *p, const void *gathered, cudaStream_t stream)
{
    unsigned long long *device, wrong;
    BENCH_CUDA(cudaMalloc((void **)&device, sizeof(*device)));
    BENCH_CUDA(cudaMemsetAsync(device, 0, sizeof(*device), stream));
    bench_launch(check_gathered, bench_blocks((uint64_t)p->shape.m * p->shape.k), BENCH_THREADS, stream, *p, gathered,
                 device);
    BENCH_CUDA(cudaMemcpyAsync(&wrong, device, sizeof(wrong), cudaMemcpyDeviceToHost, stream));
    BENCH_CUDA(cudaStreamSynchronize(stream));
    BENCH_CUDA(cudaFree(device));
    return wrong;
}
