/* SPDX-License-Identifier: Apache-2.0 */
/* What the host checks and fills of the scales of a product of e4m3 (core/scales.h). */
#ifndef PERSEUS_FUSED_GEMM_SCALES_H
#define PERSEUS_FUSED_GEMM_SCALES_H

#include "fused/gemm/plan.h"

/* 0 or -EINVAL. shape: with all types, which are right. */
int prs_scales_check_shape(const struct prs_gemm_shape *shape);
/* 0 or -EINVAL. */
int prs_scales_check_operands(const struct prs_gemm_plan *p, const struct prs_gemm_operands *x);

/* Of a plan whose C is e4m3: the scales of C, and what it does not have. 0 or -EINVAL. */
int prs_scales_check_result(const struct prs_gemm_plan *p, const struct prs_gemm_operands *x);

/* Rows of A on this rank, in a launch. */
uint64_t prs_scales_rows_of_a(const struct prs_gemm_plan *p, const struct prs_gemm_operands *x);

/* The arguments of the launch whose operands and rows the plan has. */
void prs_scales_fill(struct prs_gemm_plan *p);

#endif
