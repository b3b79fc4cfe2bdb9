/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TEST_FUSED_PRODUCT_H
#define TEST_FUSED_PRODUCT_H

#include "fused/gemm/plan.h"

enum { CLUSTERS = 66, STEP = PRS_STAGE_ROW / 2 /* of K, of bf16 */ };

static inline struct prs_gemm_shape product(enum prs_gemm_op op, uint32_t m, uint32_t n, uint32_t k,
                                            uint32_t b_transposed)
{
    struct prs_gemm_shape shape = {op, m, n, k, b_transposed};
    prs_gemm_shape_fill(&shape);
    return shape;
}

#endif
