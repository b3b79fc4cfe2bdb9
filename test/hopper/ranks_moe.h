/* SPDX-License-Identifier: Apache-2.0 */
/* MoE there and back, by ranks on emulated GPUs, for any choices. */
#ifndef TEST_HOPPER_RANKS_MOE_H
#define TEST_HOPPER_RANKS_MOE_H

#include "test/hopper/ranks.h"

enum { RANKS_MOE_MOST_LAUNCHES = 40 };

/* How tokens choose experts. */
enum ranks_moe_mode { EVEN, ONE_EXPERT, HALF_EMPTY, SOME_NONE, ANY };

/* What the experts do. COPY: nothing, after prs_moe_dispatch(). PRODUCT: a product, by prs_moe_dispatch_gemm(). LAYER:
 * two products, by prs_moe_layer(). */
enum ranks_moe_experts { COPY, PRODUCT, LAYER };

struct ranks_moe {
    uint32_t world, tokens, hidden, experts, top_k, launches;
    enum ranks_moe_mode mode;
    enum ranks_moe_experts what;
    uint32_t combines;         /* after each dispatch; 0: one */
    uint32_t capacity_of_last; /* 0: room for all rows */
    uint32_t unweighted, nodes;
    bool residual, in_place, kept_maps; /* kept_maps: all dispatches come before all combines */
    struct prs_moe_tuning tuning;
    uint32_t inner, activation, gated, k_n; /* LAYER: I; k_n: weights are [H, N] */
};

/* Runs the launches of each row, and compares every token's result with the definition in double precision: all of it
 * for COPY, else some columns. The test fails if a call fails or an element is wrong. */
void ranks_moe_assert_right(const struct ranks_moe *rows, size_t count);

#endif
