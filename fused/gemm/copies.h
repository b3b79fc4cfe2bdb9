/* SPDX-License-Identifier: Apache-2.0 */
/* All-gather by copy engine: this rank's block goes to one rank after the other, piece by piece. A flag follows each
 * piece. */
#ifndef PERSEUS_FUSED_GEMM_COPIES_H
#define PERSEUS_FUSED_GEMM_COPIES_H

#include "fused/gemm/plan.h"

/* Enqueues all copies of a launch on the plan's copy stream. 0 or -EIO. */
int prs_copies_enqueue(struct prs_gemm_plan *p);

#endif
