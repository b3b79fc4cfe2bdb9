/* SPDX-License-Identifier: Apache-2.0 */
/* The bench of MoE: the input of one launch, and the rows that must result. */
#ifndef TOOLS_FUSED_MOE_H
#define TOOLS_FUSED_MOE_H

#include "tools/fused/bench.h"

struct bench_moe_problem {
    struct bench_moe_shape shape;
    uint32_t tokens, rank, world, nodes, seed, weights_seed, ragged, n_h;
    double zipf;
    uint32_t samples;
};

/* One row that must result. */
struct bench_moe_row {
    uint32_t row, expert; /* expert: index among this rank's experts */
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

/* Fill host memory of the caller: [tokens of the rank][top_k]. The experts of a token differ; expert i of a shuffled
 * list is chosen in proportion to 1 / (i + 1)^zipf. */
void bench_moe_choose(const struct bench_moe_problem *p, uint32_t rank, int64_t *chosen, float *weights);

void bench_moe_want_open(const struct bench_moe_problem *p, struct bench_moe_want *want);
void bench_moe_want_close(struct bench_moe_want *want);

/* Check all maps, at least one column of every row, and that every element was written. */
struct bench_moe_verdict bench_moe_check(const struct bench_moe_problem *p, const struct bench_moe_want *want,
                                         const struct prs_moe_batch *batch, cudaStream_t stream);

/* An element of `out` that bench_moe_check() reads; there must be rows. */
uint64_t bench_moe_sampled(const struct bench_moe_problem *p, const struct bench_moe_want *want);

/* Count the elements of the rows of `want`, the words of their maps, and the experts' entries that differ. */
void bench_moe_compare(const struct bench_moe_problem *p, const struct bench_moe_want *want,
                       const struct prs_moe_batch *x, const struct prs_moe_batch *y, unsigned long long *differences,
                       cudaStream_t stream);

#endif
