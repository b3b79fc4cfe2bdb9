/* SPDX-License-Identifier: Apache-2.0 */
/* The bench of MoE: what one launch gets, and what must come out. */
#ifndef TOOLS_FUSED_MOE_H
#define TOOLS_FUSED_MOE_H

#include "tools/fused/bench.h"

struct bench_moe_problem {
    struct bench_moe_shape shape;
    uint32_t tokens, rank, world, nodes, seed, weights_seed, ragged, n_h;
    double zipf;
    uint32_t samples;
};

/* One row that must come out, on the host and on the device. */
struct bench_moe_row {
    uint32_t row, expert; /* of this rank's own */
    struct prs_moe_row from;
};

struct bench_moe_want {
    struct bench_moe_row *rows, *device;
    struct prs_moe_expert_rows *expert_rows;
    uint32_t count;
};

struct bench_moe_verdict {
    double max_rel_error;
    uint64_t beyond, poisoned, sampled, map_errors;
};

uint32_t bench_moe_tokens_of(const struct bench_moe_problem *p, uint32_t rank);

/* Host memory of the caller: [tokens of the rank][top_k]. Different experts for one token; expert i of a shuffled list
 * is liked as 1 / (i + 1)^zipf. */
void bench_moe_choose(const struct bench_moe_problem *p, uint32_t rank, int64_t *chosen, float *weights);

void bench_moe_want_open(const struct bench_moe_problem *p, struct bench_moe_want *want);
void bench_moe_want_close(struct bench_moe_want *want);

/* All maps, every row in one column at least, and that nothing was left out. */
struct bench_moe_verdict bench_moe_check(const struct bench_moe_problem *p, const struct bench_moe_want *want,
                                         const struct prs_moe_batch *batch, cudaStream_t stream);

/* An element of `out` that bench_moe_check() looks at, where there are rows at all. */
uint64_t bench_moe_sampled(const struct bench_moe_problem *p, const struct bench_moe_want *want);

/* Elements of the rows of `want`, words of their maps, and experts' ranges that are not the same bits in both. */
void bench_moe_compare(const struct bench_moe_problem *p, const struct bench_moe_want *want,
                       const struct prs_moe_batch *x, const struct prs_moe_batch *y, unsigned long long *differences,
                       cudaStream_t stream);

#endif
