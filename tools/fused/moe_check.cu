/* SPDX-License-Identifier: Apache-2.0 */
/* Choices of a router that any rank can recompute, the rows that must result, and a reference in double precision. */
#include "tools/fused/element.cuh"
#include "tools/fused/launch.cuh"
#include "tools/fused/sums.cuh"
#include "tools/fused/moe.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_CHOICES = 32 };

static uint64_t hash(uint64_t x)
{
    x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ull, x ^= x >> 33;
    return x;
}

static double uniform(uint64_t key) /* (0, 1) */
{
    return ((double)(hash(key) >> 11) + 0.5) * 0x1p-53;
}

uint32_t bench_moe_tokens_of(const struct bench_moe_problem *p, uint32_t rank)
{
    return p->ragged == 0 ? p->tokens : p->tokens - p->tokens * (rank + p->seed % 3) / (p->world + 2);
}

/* ---- choices ---- */
static double *popularity(const struct bench_moe_problem *p)
{
    uint32_t n = p->shape.experts, *order = (uint32_t *)malloc(n * sizeof(*order));
    double *log_popularity = (double *)malloc(n * sizeof(*log_popularity));
    for (uint32_t i = 0; i < n; i++)
        order[i] = i;
    for (uint32_t i = n - 1; i > 0; i--) { /* the same shuffle on all ranks */
        uint32_t j = (uint32_t)(hash(p->seed * 7919ull + i) % (i + 1)), keep = order[i];
        order[i] = order[j], order[j] = keep;
    }
    for (uint32_t i = 0; i < n; i++)
        log_popularity[order[i]] = -p->zipf * log(i + 1.0);
    free(order);
    return log_popularity;
}

/* Chooses the k experts with the highest sum of log popularity and Gumbel noise, which draws k different ones in
 * proportion to popularity. */
void bench_moe_choose(const struct bench_moe_problem *p, uint32_t rank, int64_t *chosen, float *weights)
{
    uint32_t count = bench_moe_tokens_of(p, rank), k = p->shape.top_k;
    double *log_popularity = popularity(p);
    for (uint32_t t = 0; t < count; t++) {
        double best[MAX_CHOICES];
        for (uint32_t j = 0; j < k; j++)
            best[j] = -INFINITY;
        for (uint32_t e = 0; e < p->shape.experts; e++) {
            uint64_t key = (((uint64_t)p->seed * 64 + rank) << 40) + (uint64_t)t * p->shape.experts + e;
            double score = log_popularity[e] - log(-log(uniform(key)));
            uint32_t j = k;
            if (score <= best[k - 1])
                continue;
            for (; j > 0 && best[j - 1] < score; j--)
                if (j < k) {
                    best[j] = best[j - 1];
                    chosen[(size_t)t * k + j] = chosen[(size_t)t * k + j - 1];
                }
            best[j] = score;
            chosen[(size_t)t * k + j] = e;
        }
        for (uint32_t j = 0; j < k; j++)
            weights[(size_t)t * k + j] = (float)(1.0 / (j + 2.0) + t * 1e-6);
    }
    free(log_popularity);
}

/* ---- the rows that must result ---- */
/* The i-th sender of an expert's rows: node by node from this rank's node on, and on each from this rank's local rank
 * on. */
static uint32_t sender(const struct bench_moe_problem *p, uint32_t i)
{
    uint32_t locals = p->world / p->nodes, node = (p->rank / locals + i / locals) % p->nodes;
    return node * locals + (p->rank + i) % locals;
}

/* By the definition in perseus/fused.h: expert by expert, sender by sender, token by token. */
void bench_moe_want_open(const struct bench_moe_problem *p, struct bench_moe_want *want)
{
    uint32_t k = p->shape.top_k, local = p->shape.experts / p->world, row = 0;
    size_t all = (size_t)p->tokens * k;
    int64_t *chosen = (int64_t *)malloc(p->world * all * sizeof(*chosen));
    float *weights = (float *)malloc(p->world * all * sizeof(*weights));
    size_t room = 0;
    memset(want, 0, sizeof(*want));
    want->expert_rows = (struct prs_moe_expert_rows *)calloc(local, sizeof(*want->expert_rows));
    for (uint32_t r = 0; r < p->world; r++) {
        bench_moe_choose(p, r, chosen + r * all, weights + r * all);
        for (size_t i = 0; i < (size_t)bench_moe_tokens_of(p, r) * k; i++)
            if (chosen[r * all + i] / local == p->rank)
                room++, want->expert_rows[chosen[r * all + i] % local].rows++;
    }
    want->rows = (struct bench_moe_row *)malloc((room + 1) * sizeof(*want->rows));
    for (uint32_t e = 0, first = 0; e < local; e++) {
        want->expert_rows[e].first_row = first;
        first += (want->expert_rows[e].rows + 127) / 128 * 128;
        row = want->expert_rows[e].first_row;
        for (uint32_t i = 0; want->expert_rows[e].rows != 0 && i < p->world; i++) {
            uint32_t r = sender(p, i), count = bench_moe_tokens_of(p, r);
            for (size_t c = 0; c < (size_t)count * k; c++)
                if (chosen[r * all + c] == (int64_t)(p->rank * local + e))
                    want->rows[want->count++] = {
                        row++, e, {r, (uint32_t)(c / k), (uint32_t)(c % k), weights[r * all + c]}};
        }
    }
    BENCH_CUDA(cudaMalloc(&want->device, (want->count + 1) * sizeof(*want->rows)));
    BENCH_CUDA(cudaMemcpy(want->device, want->rows, want->count * sizeof(*want->rows), cudaMemcpyHostToDevice));
    free(chosen);
    free(weights);
}

void bench_moe_want_close(struct bench_moe_want *want)
{
    BENCH_CUDA(cudaFree(want->device));
    free(want->rows);
    free(want->expert_rows);
}

/* ---- checks ---- */
/* One warp per sample: one column of one row. */
static __global__ void check_samples(struct bench_moe_problem p, const struct bench_moe_row *rows, uint32_t count,
                                     const __nv_bfloat16 *out, struct bench_sums *to)
{
    uint64_t sample = (blockIdx.x * (uint64_t)blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    uint64_t h = p.shape.hidden, n = p.shape.columns, column = bench_scatter(sample) % n;
    struct bench_moe_row r = rows[sample % count];
    double sum = 0, size = 0;
    for (uint64_t i = lane; i < h; i += 32) {
        uint64_t at = r.expert * h * n + (p.n_h != 0 ? column * h + i : i * n + column);
        double x = (double)bench_element(p.seed, r.from.rank, 0, r.from.token * h + i) *
                   bench_element(p.weights_seed, p.rank, 1, at);
        sum += x;
        size += fabs(x);
    }
    for (int o = 16; o > 0; o /= 2) {
        sum += __shfl_xor_sync(~0u, sum, o);
        size += __shfl_xor_sync(~0u, size, o);
    }
    if (lane == 0)
        bench_sums_add(to, (double)__bfloat162float(out[r.row * n + column]), sum,
                       fabs(sum) * 0x1.02p-8 + size * 0x1p-21);
}

/* One warp per row. */
static __global__ void check_rows(const struct bench_moe_row *rows, uint32_t count, uint32_t n, const uint16_t *out,
                                  const struct prs_moe_row *map, struct bench_sums *to)
{
    uint32_t warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    unsigned long long poisoned = 0;
    struct bench_moe_row r;
    if (warp >= count)
        return;
    r = rows[warp];
    for (uint32_t i = lane; i < n; i += 32)
        poisoned += out[(uint64_t)r.row * n + i] == 0xffff;
    if (poisoned != 0)
        atomicAdd(&to->poisoned, poisoned);
    if (lane == 0) {
        struct prs_moe_row have = map[r.row];
        if (have.rank != r.from.rank || have.token != r.from.token || have.slot != r.from.slot ||
            have.weight != r.from.weight)
            atomicAdd(&to->maps, 1ull);
    }
}

static uint64_t check_expert_rows(const struct bench_moe_problem *p, const struct bench_moe_want *want,
                                  const struct prs_moe_expert_rows *expert_rows)
{
    uint32_t local = p->shape.experts / p->world;
    struct prs_moe_expert_rows *have = (struct prs_moe_expert_rows *)malloc(local * sizeof(*have));
    uint64_t wrong = 0;
    BENCH_CUDA(cudaMemcpy(have, expert_rows, local * sizeof(*have), cudaMemcpyDeviceToHost));
    for (uint32_t e = 0; e < local; e++)
        wrong += have[e].rows != want->expert_rows[e].rows || have[e].first_row != want->expert_rows[e].first_row;
    free(have);
    return wrong;
}

struct bench_moe_verdict bench_moe_check(const struct bench_moe_problem *p, const struct bench_moe_want *want,
                                         const struct prs_moe_batch *batch, cudaStream_t stream)
{
    struct bench_sums *device, sums;
    struct bench_verdict elements;
    struct bench_moe_verdict v = {0, 0, 0, 0, 0};
    uint64_t samples = ((want->count > p->samples ? want->count : p->samples) + 7) / 8 * 8;
    BENCH_CUDA(cudaStreamSynchronize(stream));
    v.map_errors = check_expert_rows(p, want, batch->expert_rows);
    if (want->count == 0)
        return v;
    device = bench_sums_open(stream);
    bench_launch(check_samples, (unsigned)(samples / 8), 256, stream, *p, want->device, want->count,
                 (const __nv_bfloat16 *)batch->out, device);
    bench_launch(check_rows, (want->count + 7) / 8, 256, stream, want->device, want->count, p->shape.columns,
                 (const uint16_t *)batch->out, batch->rows, device);
    sums = bench_sums_close(device, stream);
    elements = bench_sums_verdict(&sums, samples);
    v.max_rel_error = elements.max_rel_error;
    v.beyond = elements.beyond, v.poisoned = elements.poisoned, v.sampled = samples;
    v.map_errors += sums.maps;
    return v;
}

uint64_t bench_moe_sampled(const struct bench_moe_problem *p, const struct bench_moe_want *want)
{
    return (uint64_t)want->rows[0].row * p->shape.columns + bench_scatter(0) % p->shape.columns;
}

struct batch_pair {
    const uint16_t *out[2];
    const struct prs_moe_row *rows[2];
    const struct prs_moe_expert_rows *expert_rows[2];
};

static __global__ void compare_rows(const struct bench_moe_row *rows, uint32_t count, uint32_t n, uint32_t experts,
                                    struct batch_pair t, unsigned long long *differences)
{
    unsigned long long mine = 0;
    for (uint32_t i = blockIdx.x; i < count; i += gridDim.x) {
        uint64_t row = rows[i].row;
        for (uint32_t c = threadIdx.x; c < n; c += blockDim.x)
            mine += t.out[0][row * n + c] != t.out[1][row * n + c];
        if (threadIdx.x < 4)
            mine +=
                ((const uint32_t *)&t.rows[0][row])[threadIdx.x] != ((const uint32_t *)&t.rows[1][row])[threadIdx.x];
    }
    for (uint32_t e = threadIdx.x; blockIdx.x == 0 && e < experts; e += blockDim.x)
        mine += t.expert_rows[0][e].rows != t.expert_rows[1][e].rows ||
                t.expert_rows[0][e].first_row != t.expert_rows[1][e].first_row;
    if (mine != 0)
        atomicAdd(differences, mine);
}

void bench_moe_compare(const struct bench_moe_problem *p, const struct bench_moe_want *want,
                       const struct prs_moe_batch *x, const struct prs_moe_batch *y, unsigned long long *differences,
                       cudaStream_t stream)
{
    struct batch_pair t = {
        {(const uint16_t *)x->out, (const uint16_t *)y->out}, {x->rows, y->rows}, {x->expert_rows, y->expert_rows}};
    bench_launch(compare_rows, 128, 256, stream, want->device, want->count, p->shape.columns,
                 p->shape.experts / p->world, t, differences);
}
