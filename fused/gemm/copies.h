/* SPDX-License-Identifier: Apache-2.0 */
/* All-gather by copy engine: the own block goes to one rank after the other, piece by piece, each followed by its flag.
 */
#ifndef PERSEUS_FUSED_COPIES_H
#define PERSEUS_FUSED_COPIES_H

#include "fused/gemm/plan.h"

/* Enqueues all copies of a launch of A. 0 or -EIO. */
int prs_copies_enqueue(const struct prs_fused_plan *p, struct prs_copy_stream *c, const void *a);

#endif
