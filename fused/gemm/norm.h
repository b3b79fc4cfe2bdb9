/* SPDX-License-Identifier: Apache-2.0 */
/* The norm of a product's rows (gemm.h, shape.norm): checks, and the kernel for rows that are there already. */
#ifndef PERSEUS_FUSED_GEMM_NORM_H
#define PERSEUS_FUSED_GEMM_NORM_H

#include "fused/gemm/unfused/unfused.h"

/* 0 or -EINVAL. shape: filled. */
int prs_norm_check_shape(const struct prs_gemm_shape *shape);
int prs_norm_check_operands(const struct prs_gemm_plan *plan, const struct prs_gemm_operands *operands);

/* The norm that the operands of the launch that is being enqueued ask for. */
struct prs_row_norm prs_norm_of(const struct prs_gemm_plan *plan);

/* Enqueues the norm of the rows in the launch's C. copy: NULL, or a second place for the rows. 0 or -EIO. */
int prs_norm_launch(struct prs_gemm_plan *plan, void *copy, cudaStream_t stream);

#endif
