/* SPDX-License-Identifier: Apache-2.0 */
/* Both paths under one plan. A plan has the path that is faster for its most rows. Where the other path is faster for
 * some fewer rows, it is a second plan, which is opened and closed with the first. A launch goes to the one that is
 * faster for its rows.
 *
 * All ranks choose alike, since the choice follows from the rows, the shape, and what all ranks have agreed on: the
 * clusters, and what rank 0 found in its tables. The two plans follow each other as any plans of a context do, also in
 * graphs: each has flags of its own, and what they share other plans share too. */
#ifndef PERSEUS_FUSED_PATHS_H
#define PERSEUS_FUSED_PATHS_H

#include "fused/gemm/plan.h"

/* Opens the second plan of one that is open, if there are rows for it. Collective. Where memory or cuBLASLt lacks on
 * some rank, no rank has it, which is no error. 0 or -errno. */
int prs_paths_open(struct prs_gemm_plan *p);

/* The plan of a launch. */
struct prs_gemm_plan *prs_paths_plan(struct prs_gemm_plan *p, const struct prs_gemm_operands *x);

#endif
