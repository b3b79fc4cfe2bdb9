/* SPDX-License-Identifier: Apache-2.0 */
/* A reference in double precision for sampled rows of ring attention's gradients. It takes lse and out from the forward
 * pass, since these are the inputs of the backward pass. */
#include "tools/fused/attention_rows.cuh"
#include "tools/fused/launch.cuh"
#include "tools/fused/sums.cuh"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { SAMPLES = 64, THREADS = 128, MAX_HEAD_DIM = 128 };

static __global__ void make_terms(struct bench_attention p, const __nv_bfloat16 *out, const float *lse,
                                  struct bench_attention_term *terms)
{
    uint32_t rows = p.shape.seq / p.world, d = p.shape.head_dim;
    uint64_t count = (uint64_t)p.shape.batch * p.shape.heads_q * rows, stride = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
        uint32_t head = (uint32_t)(i / rows % p.shape.heads_q), batch = (uint32_t)(i / rows / p.shape.heads_q);
        uint64_t at = index_of(&p, p.shape.heads_q, batch, head, (uint32_t)(i % rows)) * d;
        double sum = 0;
        for (uint32_t c = 0; c < d; c++)
            sum += (double)__bfloat162float(out[at + c]) * input(&p, OF_RESULT, p.rank, at + c);
        terms[i] = {lse[i], (float)sum};
    }
}

/* A sampled row, and the rows that it meets: [from, to) of the sequence, of `heads` heads from `other` on. */
struct sample {
    bool of_keys;
    uint32_t batch, head, row, other, heads, from, to;
};

/* This rank's rows of a sample, q and dout or k and v; and for each row that it meets P and dS (times the scale). In
 * global memory, since the emulator has no static shared memory. */
struct own_rows {
    double x1[MAX_HEAD_DIM], x2[MAX_HEAD_DIM];
};

struct weight {
    double p, ds, rough; /* rough: the sizes of the numbers whose difference is dS */
};

static __device__ struct sample sample_of(const struct bench_attention *p, uint32_t index)
{
    uint32_t rows = p->shape.seq / p->world, shared = p->shape.heads_q / p->shape.heads_kv, i = index / 2, position;
    struct sample x;
    x.of_keys = index % 2 != 0;
    x.heads = x.of_keys ? shared : 1;
    x.row = (uint32_t)(bench_scatter(i) % rows);
    x.head = (uint32_t)(bench_scatter(i + 1000) % (x.of_keys ? p->shape.heads_kv : p->shape.heads_q));
    x.batch = (uint32_t)(bench_scatter(i + 2000) % p->shape.batch);
    x.other = x.of_keys ? x.head * shared : x.head / shared;
    position = position_of(p, x.row);
    x.from = p->shape.causal != 0 && x.of_keys ? position : 0;
    x.to = p->shape.causal != 0 && !x.of_keys ? position + 1 : p->shape.seq;
    return x;
}

/* Row number i of those that a sample meets. */
struct met {
    uint32_t rank, row, head;
    uint64_t at; /* its first element */
};

static __device__ struct met met_of(const struct bench_attention *p, const struct sample *x, uint32_t i)
{
    struct met m;
    m.head = x->other + i / (x->to - x->from);
    m.rank = holder_of(p, x->from + i % (x->to - x->from), &m.row);
    m.at = index_of(p, x->of_keys ? p->shape.heads_q : p->shape.heads_kv, x->batch, m.head, m.row) * p->shape.head_dim;
    return m;
}

/* terms: those of all ranks. The row belongs to a query. */
static __device__ struct bench_attention_term term_of(const struct bench_attention *p,
                                                      const struct bench_attention_term *terms, uint32_t rank,
                                                      uint32_t batch, uint32_t head, uint32_t row)
{
    uint64_t rows = p->shape.seq / p->world;
    return terms[(((uint64_t)rank * p->shape.batch + batch) * p->shape.heads_q + head) * rows + row];
}

static __device__ struct weight weigh(const struct bench_attention *p, const struct sample *x, const struct met *m,
                                      const struct own_rows *own, const struct bench_attention_term *terms)
{
    uint32_t d = p->shape.head_dim;
    double scale = p->shape.scale != 0 ? (double)p->shape.scale : 1 / sqrt((double)d);
    double score = 0, dp = 0, size = 0, weight;
    struct bench_attention_term t = x->of_keys ? term_of(p, terms, m->rank, x->batch, m->head, m->row)
                                               : term_of(p, terms, p->rank, x->batch, x->head, x->row);
    for (uint32_t c = 0; c < d; c++) {
        double y2 = input(p, x->of_keys ? OF_RESULT : VALUES, m->rank, m->at + c);
        score += own->x1[c] * input(p, x->of_keys ? QUERIES : KEYS, m->rank, m->at + c);
        dp += own->x2[c] * y2;
        size += fabs(own->x2[c] * y2);
    }
    weight = exp(score * scale - (double)t.lse);
    return {weight, scale * weight * (dp - (double)t.delta), scale * weight * (size + fabs((double)t.delta))};
}

/* The sum of a column, compared with what the launch wrote. The bound allows one bf16 rounding of each weight and one
 * of the gradient, and errors of fp32 in the parts of a weight. */
static __device__ void check_column(const struct bench_attention *p, const struct sample *x,
                                    const struct weight *weights, uint32_t count, bool of_values,
                                    const __nv_bfloat16 *gradient, struct bench_sums *to)
{
    uint32_t d = p->shape.head_dim, c = threadIdx.x;
    enum tensor other = of_values ? OF_RESULT : x->of_keys ? QUERIES : KEYS;
    uint64_t at = index_of(p, x->of_keys ? p->shape.heads_kv : p->shape.heads_q, x->batch, x->head, x->row) * d + c;
    double want = 0, size = 0, rough = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct met m = met_of(p, x, i);
        double y = input(p, other, m.rank, m.at + c), w = of_values ? weights[i].p : weights[i].ds;
        want += w * y;
        size += fabs(w * y);
        rough += fabs((of_values ? w : weights[i].rough) * y);
    }
    bench_sums_add(to, (double)__bfloat162float(gradient[at]), want, (fabs(want) + size) * 0x1.02p-8 + rough * 0x1p-15);
}

struct gradients {
    const __nv_bfloat16 *dq, *dk, *dv;
};

/* One block per sample: even ones are rows of dq, odd ones of dk and dv. */
static __global__ void check_rows(struct bench_attention p, struct gradients g,
                                  const struct bench_attention_term *terms, struct own_rows *all_own,
                                  struct weight *all_weights, struct bench_sums *to)
{
    struct sample x = sample_of(&p, blockIdx.x);
    struct own_rows *own = &all_own[blockIdx.x];
    uint32_t d = p.shape.head_dim, count = x.heads * (x.to - x.from);
    struct weight *weights = all_weights + (uint64_t)blockIdx.x * p.shape.seq * (p.shape.heads_q / p.shape.heads_kv);
    if (threadIdx.x < d) {
        uint32_t heads = x.of_keys ? p.shape.heads_kv : p.shape.heads_q;
        uint64_t at = index_of(&p, heads, x.batch, x.head, x.row) * d + threadIdx.x;
        own->x1[threadIdx.x] = input(&p, x.of_keys ? KEYS : QUERIES, p.rank, at);
        own->x2[threadIdx.x] = input(&p, x.of_keys ? VALUES : OF_RESULT, p.rank, at);
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < count; i += THREADS) {
        struct met m = met_of(&p, &x, i);
        weights[i] = weigh(&p, &x, &m, own, terms);
    }
    __syncthreads();
    if (threadIdx.x >= d)
        return;
    check_column(&p, &x, weights, count, false, x.of_keys ? g.dk : g.dq, to);
    if (x.of_keys)
        check_column(&p, &x, weights, count, true, g.dv, to);
}

void bench_attention_terms(const struct bench_attention *p, const void *out, const float *lse,
                           struct bench_attention_term *terms, cudaStream_t stream)
{
    uint64_t count = (uint64_t)p->shape.batch * p->shape.heads_q * (p->shape.seq / p->world);
    bench_launch(make_terms, bench_blocks(count), BENCH_THREADS, stream, *p, (const __nv_bfloat16 *)out, lse, terms);
}

struct bench_verdict bench_attention_check_gradients(const struct bench_attention *p, const void *const gradients[3],
                                                     const struct bench_attention_term *terms, cudaStream_t stream)
{
    struct bench_sums *device = bench_sums_open(stream), sums;
    struct gradients g = {(const __nv_bfloat16 *)gradients[0], (const __nv_bfloat16 *)gradients[1],
                          (const __nv_bfloat16 *)gradients[2]};
    uint64_t weights = (uint64_t)SAMPLES * p->shape.seq * (p->shape.heads_q / p->shape.heads_kv);
    struct own_rows *own;
    struct weight *weight;
    static_assert(THREADS >= MAX_HEAD_DIM, "a thread has a column");
    BENCH_CUDA(cudaMalloc((void **)&own, SAMPLES * sizeof(*own)));
    BENCH_CUDA(cudaMalloc((void **)&weight, weights * sizeof(*weight)));
    bench_launch(check_rows, SAMPLES, THREADS, stream, *p, g, terms, own, weight, device);
    for (int i = 0; i < 3; i++)
        bench_sums_poisoned(device, gradients[i],
                            bench_attention_elements(p, i == 0 ? p->shape.heads_q : p->shape.heads_kv), 1, stream);
    sums = bench_sums_close(device, stream);
    BENCH_CUDA(cudaFree(weight));
    BENCH_CUDA(cudaFree(own));
    return bench_sums_verdict(&sums, (uint64_t)SAMPLES / 2 * 3 * p->shape.head_dim);
}
