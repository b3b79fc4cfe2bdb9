/* SPDX-License-Identifier: Apache-2.0 */
/* Inputs that any rank can recompute, and a reference in double precision for sampled elements. */
#include "tools/fused/bench.h"
#include "tools/fused/element.cuh"
#include "tools/fused/launch.cuh"
#include "tools/fused/sums.cuh"

#include <cuda_bf16.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static __global__ void fill(__nv_bfloat16 *to, uint64_t count, uint32_t seed, uint32_t rank, uint32_t which)
{
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < count; i += (uint64_t)gridDim.x * blockDim.x)
        to[i] = __float2bfloat16(bench_element(seed, rank, which, i));
}

/* The node of the rank that adds up this element; each other node rounds its partial sum. The fused and the unfused
 * all-reduce assign elements to ranks in the same way wherever both can run. */
static __device__ uint32_t owner_node(const struct bench_problem &p, uint64_t element)
{
    uint64_t each = ((uint64_t)p.shape.m * p.shape.n + p.world - 1) / p.world;
    uint32_t owner = p.shape.op == PRS_FUSED_ALLREDUCE ? (uint32_t)(element / ((each + 7) / 8 * 8)) : p.rank;
    return owner / (p.world / p.nodes);
}

/* One warp per sample. reference = sum over `terms` ranks of the dot product; the bound allows one bf16 rounding of
 * each partial sum, one of each other node's sum, one of the result, and fp32 accumulation of |a b|. */
static __global__ void check_samples(struct bench_problem p, const __nv_bfloat16 *c, uint64_t rows,
                                     struct bench_sums *out)
{
    uint64_t sample = (blockIdx.x * (uint64_t)blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    uint64_t row = bench_scatter(sample) % rows, column = bench_scatter(sample + 7777777) % p.shape.n, k = p.shape.k;
    bool reduces = p.shape.op == PRS_FUSED_REDUCE_SCATTER || p.shape.op == PRS_FUSED_ALLREDUCE;
    uint64_t a_row = p.shape.op == PRS_FUSED_REDUCE_SCATTER ? p.rank * rows + row : row, block = p.shape.m / p.world;
    double total = 0, partials = 0, magnitude = 0, node = 0;
    uint32_t locals = p.world / p.nodes, owner = owner_node(p, row * p.shape.n + column);
    for (uint32_t t = 0; t < (reduces ? p.world : 1); t++) {
        uint32_t a_rank = reduces ? t : p.rank, b_rank = reduces ? t : p.rank;
        uint64_t r = a_row;
        double sum = 0, size = 0;
        if (p.shape.op == PRS_FUSED_ALLGATHER) {
            a_rank = (uint32_t)(row / block);
            r = row % block;
        }
        for (uint64_t i = lane; i < k; i += 32) {
            uint64_t where = p.shape.b_is_n_k ? column * k + i : i * p.shape.n + column;
            double x =
                (double)bench_element(p.seed_a, a_rank, 0, r * k + i) * bench_element(p.seed_b, b_rank, 1, where);
            sum += x;
            size += fabs(x);
        }
        for (int o = 16; o > 0; o /= 2) {
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
    if (lane == 0) {
        double have = (double)__bfloat162float(c[row * p.shape.n + column]);
        bench_sums_add(out, have, total, (fabs(total) + partials) * 0x1.02p-8 + magnitude * 0x1p-21);
    }
}

static __global__ void count_poison(const uint16_t *c, uint64_t count, struct bench_sums *out)
{
    unsigned long long mine = 0;
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < count; i += (uint64_t)gridDim.x * blockDim.x)
        mine += c[i] == 0xffff;
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

void bench_sums_poisoned(struct bench_sums *device, const void *c, uint64_t count, cudaStream_t stream)
{
    bench_launch(count_poison, bench_blocks(count), BENCH_THREADS, stream, (const uint16_t *)c, count, device);
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
    return p->shape.op == PRS_FUSED_ALLGATHER ? p->shape.m / p->world : p->shape.m;
}

size_t bench_rows_c(const struct bench_problem *p)
{
    return p->shape.op == PRS_FUSED_REDUCE_SCATTER ? p->shape.m / p->world : p->shape.m;
}

void bench_fill(void *to, uint64_t elements, uint32_t seed, uint32_t rank, uint32_t which, cudaStream_t stream)
{
    bench_launch(fill, bench_blocks(elements), BENCH_THREADS, stream, (__nv_bfloat16 *)to, elements, seed, rank, which);
}

void bench_fill_inputs(const struct bench_problem *p, void *a, void *b, cudaStream_t stream)
{
    bench_fill(a, bench_rows_a(p) * p->shape.k, p->seed_a, p->rank, 0, stream);
    bench_fill(b, (uint64_t)p->shape.n * p->shape.k, p->seed_b, p->rank, 1, stream);
}

static __global__ void negate(uint16_t *to, uint64_t elements)
{
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < elements;
         i += (uint64_t)gridDim.x * blockDim.x)
        to[i] ^= 0x8000;
}

void bench_negate(void *to, uint64_t elements, cudaStream_t stream)
{
    bench_launch(negate, bench_blocks(elements), BENCH_THREADS, stream, (uint16_t *)to, elements);
}

void bench_poison(void *c, size_t bytes, cudaStream_t stream)
{
    BENCH_CUDA(cudaMemsetAsync(c, 0xff, bytes, stream)); /* a NaN that is never the result of a sum */
}

uint64_t bench_sampled(const struct bench_problem *p)
{
    return bench_scatter(0) % bench_rows_c(p) * p->shape.n + bench_scatter(7777777) % p->shape.n;
}

struct bench_verdict bench_check(const struct bench_problem *p, const void *c, cudaStream_t stream)
{
    uint64_t rows = bench_rows_c(p), count = rows * p->shape.n, samples = count < p->samples ? count : p->samples;
    struct bench_sums *device = bench_sums_open(stream), sums;
    samples = (samples + 7) / 8 * 8;
    bench_launch(check_samples, (unsigned)(samples / 8), 256, stream, *p, (const __nv_bfloat16 *)c, rows, device);
    bench_sums_poisoned(device, c, count, stream);
    sums = bench_sums_close(device, stream);
    return bench_sums_verdict(&sums, samples);
}
