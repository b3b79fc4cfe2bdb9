/* SPDX-License-Identifier: Apache-2.0 */
/* Several choices under one plan. A plan has the path and the tuning that are best for its most rows. Other plans,
 * which are opened and closed with it, serve launches of fewer rows:
 *
 * - one of the other path, where that is faster for some fewer rows;
 * - of the fused path one for each class of fewer rows (table.h) that was measured with another tuning. It has room for
 *   the most rows that are nearer to its class than to the next larger one;
 * - with one rank, where the fused path takes no memory for data, one of it for all rows, so that a launch may have its
 *   rows on the device.
 *
 * A launch goes to the path that is faster for its rows, and on the fused path to the plan of its class.
 *
 * All ranks choose alike, since the choice follows from the rows, the shape, and what all ranks have agreed on: the
 * clusters, and what rank 0 found in its tables.
 *
 * The way of one launch: the host picks the plan, encodes maps for the rows, and launches that plan's kernel with that
 * plan's schedule, flags and epoch. No flag and no counter means one thing in one tiling and another in the next, since
 * each plan has its own. The plans share the staging memory and the words that count its turns with all plans of the
 * context: a bank is of the parity of all launches, whichever plan they are of, and copied rows wait for the credit of
 * the last launch that read them. So launches of different tilings follow each other as those of any two plans do, also
 * in graphs. A rank that picked another plan would be named: ranks compare the number of the plan, and the rows. */
#ifndef PERSEUS_FUSED_PATHS_H
#define PERSEUS_FUSED_PATHS_H

#include "fused/gemm/plan.h"

/* Opens the other plans of one that is open, if there are rows for them. Collective. If some rank lacks memory or
 * cuBLASLt, no rank has them, and that is no error. 0 or -errno. */
int prs_paths_open(struct prs_gemm_plan *p);

/* The plan of a launch. */
struct prs_gemm_plan *prs_paths_plan(struct prs_gemm_plan *p, const struct prs_gemm_operands *x);

#endif
