/* SPDX-License-Identifier: Apache-2.0 */
/* All-gather by copy engine: the own block goes to the other ranks on side streams, piece by piece, each followed by
 * its flag. */
#ifndef PERSEUS_FUSED_COPIES_H
#define PERSEUS_FUSED_COPIES_H

#include "fused/plan.h"

struct prs_copies;

int prs_copies_open(struct prs_fused_plan *plan, struct prs_copies **out);
void prs_copies_close(struct prs_copies *copies);

/* Before the fused kernel: forks from `stream` and enqueues all copies of block a. 0 or -EIO. */
int prs_copies_fork(struct prs_copies *copies, const void *a, cudaStream_t stream);

/* After the fused kernel: `stream` goes on when the copies are done, so that A may change and the epoch may move. */
int prs_copies_join(struct prs_copies *copies, cudaStream_t stream);

#endif
