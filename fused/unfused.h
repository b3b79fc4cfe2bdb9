/* SPDX-License-Identifier: Apache-2.0 */
/* The way without fusion, for shapes that the fused kernels cannot run or cannot win: cuBLASLt, then (or before) copies
 * and sums over mapped memory, with a meeting of all ranks on both sides of what crosses ranks. Graph-capturable like
 * the fused path. */
#ifndef PERSEUS_FUSED_UNFUSED_H
#define PERSEUS_FUSED_UNFUSED_H

#include "fused/plan.h"

/* Workspace and cuBLASLt for a plan whose args.schedule has rank and world. Collective. */
int prs_unfused_open(struct prs_fused_plan *plan);
int prs_unfused_launch(struct prs_fused_plan *plan, const void *a, const void *b, void *c, cudaStream_t stream);

#endif
