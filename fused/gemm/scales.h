/* SPDX-License-Identifier: Apache-2.0 */
/* The host's part of an e4m3 product's scales (core/scales.h): checks them, and fills the kernel's arguments. */
#ifndef PERSEUS_FUSED_GEMM_SCALES_H
#define PERSEUS_FUSED_GEMM_SCALES_H

#include "fused/gemm/plan.h"

/* 0 or -EINVAL. The types in the shape are filled in, and have been checked. */
int prs_scales_check_shape(const struct prs_gemm_shape *shape);
/* 0 or -EINVAL. */
int prs_scales_check_operands(const struct prs_gemm_plan *p, const struct prs_gemm_operands *x);

/* For a plan whose C is e4m3: C has scales, and no operand is given that such a plan cannot use. 0 or -EINVAL. */
int prs_scales_check_result(const struct prs_gemm_plan *p, const struct prs_gemm_operands *x);

/* Rows of A on this rank, in a launch. */
uint64_t prs_scales_rows_of_a(const struct prs_gemm_plan *p, const struct prs_gemm_operands *x);

/* Fills the scales in the kernel's arguments, from the operands and the rows that the plan holds for this launch. */
void prs_scales_fill(struct prs_gemm_plan *p);

#endif
