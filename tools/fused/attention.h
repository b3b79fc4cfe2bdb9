/* SPDX-License-Identifier: Apache-2.0 */
/* The bench of ring attention: its inputs, and the check of its results. */
#ifndef TOOLS_FUSED_ATTENTION_H
#define TOOLS_FUSED_ATTENTION_H

#include "tools/fused/bench.h"

struct bench_attention {
    struct prs_attention_shape shape;
    uint32_t rank, world, seed;
    uint32_t loopback; /* all ranks have this rank's tensors */
};

struct bench_attention_tensors {
    void *q, *k, *v;
    void *dout; /* gradient of the result; NULL: not wanted */
};

/* What the backward pass knows of a query row: the logarithm of its sum of exponentials, and sum(out * dout). */
struct bench_attention_term {
    float lse, delta;
};

/* Elements of a rank's tensor with this many heads. */
uint64_t bench_attention_elements(const struct bench_attention *p, uint32_t heads);
void bench_attention_fill(const struct bench_attention *p, const struct bench_attention_tensors *t,
                          cudaStream_t stream);

/* Checks sampled rows against a softmax in double precision; `beyond` counts elements and sums of exponentials. */
struct bench_verdict bench_attention_check(const struct bench_attention *p, const void *out, const float *lse,
                                           cudaStream_t stream);

/* An element of `out`, and of dq, that is in a sampled row. */
uint64_t bench_attention_sampled(const struct bench_attention *p);

/* ---- gradients (attention_gradients.cu) ---- */
/* The terms of this rank's rows, [batch, query heads, rows], from what the forward pass wrote. */
void bench_attention_terms(const struct bench_attention *p, const void *out, const float *lse,
                           struct bench_attention_term *terms, cudaStream_t stream);

/* Checks sampled rows of the gradients against sums in double precision that start from the terms of all ranks. */
struct bench_verdict bench_attention_check_gradients(const struct bench_attention *p, const void *const gradients[3],
                                                     const struct bench_attention_term *terms, cudaStream_t stream);

/* ---- measuring (attention.cu) ---- */
/* Measure and check one shape; true: no error. */
bool bench_attention_run(const struct bench_options *o, struct bench_start *start, struct prs_fused *ctx,
                         const struct bench_attention *problem, cudaStream_t stream);

#endif
