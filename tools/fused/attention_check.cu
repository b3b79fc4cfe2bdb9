/* SPDX-License-Identifier: Apache-2.0 */
/* Inputs of ring attention that any rank can recompute, and a reference in double precision for sampled rows. */
#include "tools/fused/attention_rows.cuh"
#include "tools/fused/launch.cuh"
#include "tools/fused/sums.cuh"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { SAMPLES = 128, THREADS = 256, MAX_HEAD_DIM = 128 };

/* Where a block's threads exchange values: in global memory, since the emulator has no static shared memory. */
struct exchange {
    double all[THREADS], q[MAX_HEAD_DIM];
};

/* Combines one value of each thread of the block; op 0: sum, 1: maximum. */
static __device__ double reduce(double *all, double mine, int op)
{
    double result;
    __syncthreads();
    all[threadIdx.x] = mine;
    __syncthreads();
    result = all[0];
    for (int i = 1; i < THREADS; i++)
        result = op == 0 ? result + all[i] : fmax(result, all[i]);
    return result;
}

struct sample {
    uint32_t batch, head, row, keys;
};

/* Write the scores to `score`; return the largest. */
static __device__ double score_keys(const struct bench_attention *p, const struct sample *x, struct exchange *exchange,
                                    double *score)
{
    double *q = exchange->q;
    uint32_t d = p->shape.head_dim, head_kv = x->head / (p->shape.heads_q / p->shape.heads_kv);
    double scale = p->shape.scale != 0 ? (double)p->shape.scale : 1 / sqrt((double)d), top = -INFINITY;
    if (threadIdx.x < d)
        q[threadIdx.x] =
            input(p, QUERIES, p->rank, index_of(p, p->shape.heads_q, x->batch, x->head, x->row) * d + threadIdx.x);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < x->keys; i += THREADS) {
        uint32_t row, rank = holder_of(p, i, &row);
        uint64_t at = index_of(p, p->shape.heads_kv, x->batch, head_kv, row) * d;
        double sum = 0;
        for (uint32_t c = 0; c < d; c++)
            sum += q[c] * input(p, KEYS, rank, at + c);
        score[i] = sum * scale;
        top = fmax(top, score[i]);
    }
    return reduce(exchange->all, top, 1);
}

/* One block per sampled row. The bound allows one bf16 rounding of each probability and one of the result. */
static __global__ void check_rows(struct bench_attention p, const __nv_bfloat16 *out, const float *lse,
                                  struct exchange *exchanges, double *scores, struct bench_sums *to)
{
    uint32_t rows = p.shape.seq / p.world, d = p.shape.head_dim;
    double *score = scores + (uint64_t)blockIdx.x * p.shape.seq, top, sum = 0;
    struct sample x;
    x.row = bench_scatter(blockIdx.x) % rows;
    x.head = bench_scatter(blockIdx.x + 1000) % p.shape.heads_q;
    x.batch = bench_scatter(blockIdx.x + 2000) % p.shape.batch;
    x.keys = p.shape.causal != 0 ? position_of(&p, x.row) + 1 : p.shape.seq;
    top = score_keys(&p, &x, &exchanges[blockIdx.x], score);
    for (uint32_t i = threadIdx.x; i < x.keys; i += THREADS) {
        score[i] = exp(score[i] - top);
        sum += score[i];
    }
    sum = reduce(exchanges[blockIdx.x].all, sum, 0);
    if (threadIdx.x < d) {
        uint32_t head_kv = x.head / (p.shape.heads_q / p.shape.heads_kv);
        double want = 0, size = 0, have;
        for (uint32_t i = 0; i < x.keys; i++) {
            uint32_t row, rank = holder_of(&p, i, &row);
            double v = input(&p, VALUES, rank, index_of(&p, p.shape.heads_kv, x.batch, head_kv, row) * d + threadIdx.x);
            want += score[i] * v;
            size += score[i] * fabs(v);
        }
        want /= sum, size /= sum;
        have = (double)__bfloat162float(out[index_of(&p, p.shape.heads_q, x.batch, x.head, x.row) * d + threadIdx.x]);
        bench_sums_add(to, have, want, (fabs(want) + size) * 0x1.02p-8);
    }
    if (threadIdx.x == 0) {
        double want = top + log(sum), have = lse[((uint64_t)x.batch * p.shape.heads_q + x.head) * rows + x.row];
        if (!(fabs(have - want) <= 1e-4 * (1 + fabs(want))))
            atomicAdd(&to->beyond, 1ull);
    }
}

uint64_t bench_attention_elements(const struct bench_attention *p, uint32_t heads)
{
    return (uint64_t)p->shape.batch * (p->shape.seq / p->world) * heads * p->shape.head_dim;
}

void bench_attention_fill(const struct bench_attention *p, const struct bench_attention_tensors *t, cudaStream_t stream)
{
    uint64_t kv = bench_attention_elements(p, p->shape.heads_kv);
    uint64_t q = bench_attention_elements(p, p->shape.heads_q);
    uint32_t seed = p->seed * TENSORS;
    bench_fill(t->q, q, PRS_DTYPE_BF16, seed + QUERIES, p->rank, 0, stream);
    bench_fill(t->k, kv, PRS_DTYPE_BF16, seed + KEYS, p->rank, 0, stream);
    bench_fill(t->v, kv, PRS_DTYPE_BF16, seed + VALUES, p->rank, 0, stream);
    if (t->dout)
        bench_fill(t->dout, q, PRS_DTYPE_BF16, seed + OF_RESULT, p->rank, 0, stream);
}

uint64_t bench_attention_sampled(const struct bench_attention *p)
{
    const struct prs_attention_shape *s = &p->shape;
    return index_of(p, s->heads_q, bench_scatter(2000) % s->batch, bench_scatter(1000) % s->heads_q,
                    bench_scatter(0) % (s->seq / p->world)) *
           s->head_dim;
}

struct bench_verdict bench_attention_check(const struct bench_attention *p, const void *out, const float *lse,
                                           cudaStream_t stream)
{
    struct bench_sums *device = bench_sums_open(stream), sums;
    uint64_t elements = bench_attention_elements(p, p->shape.heads_q);
    double *scores;
    struct exchange *exchanges;
    BENCH_CUDA(cudaMalloc((void **)&exchanges, SAMPLES * sizeof(*exchanges)));
    BENCH_CUDA(cudaMalloc((void **)&scores, (size_t)SAMPLES * p->shape.seq * sizeof(*scores)));
    bench_launch(check_rows, SAMPLES, THREADS, stream, *p, (const __nv_bfloat16 *)out, lse, exchanges, scores, device);
    bench_sums_poisoned(device, out, elements, 1, stream);
    sums = bench_sums_close(device, stream);
    BENCH_CUDA(cudaFree(scores));
    BENCH_CUDA(cudaFree(exchanges));
    return bench_sums_verdict(&sums, (uint64_t)SAMPLES * p->shape.head_dim);
}
