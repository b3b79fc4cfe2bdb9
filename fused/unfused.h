/* SPDX-License-Identifier: Apache-2.0 */
/* The way without fusion, for shapes that the fused kernels cannot run or cannot win: cuBLASLt, then (or before) copies
 * and sums over mapped memory, with a meeting of all ranks on both sides of what crosses ranks. Graph-capturable like
 * the fused path. */
#ifndef PERSEUS_FUSED_UNFUSED_H
#define PERSEUS_FUSED_UNFUSED_H

#include "fused/plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Workspace and cuBLASLt for a plan whose args.schedule has rank and world. Collective. */
int prs_unfused_open(struct prs_fused_plan *plan);
int prs_unfused_launch(struct prs_fused_plan *plan, const void *a, const void *b, void *c, cudaStream_t stream);

/* ---- unfused.cu ---- */
/* All ranks wait for each other. 0 or -EIO. */
int prs_unfused_meet(const struct prs_kernel_args *args, cudaStream_t stream);

/* Adds elements first .. first + elements of all ranks' staging; writes `copies` results, at the same
 * offset when offset_result is set, else at the start of each `to`. 0 or -EIO. */
int prs_unfused_sum(const struct prs_kernel_args *args, uint64_t first, uint64_t elements, void *const *to,
                    uint32_t copies, int offset_result, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
