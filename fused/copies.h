/* SPDX-License-Identifier: Apache-2.0 */
/* All-gather by copy engine: the own block goes to one rank after the other on a side stream, piece by piece, each
 * followed by its flag. */
#ifndef PERSEUS_FUSED_COPIES_H
#define PERSEUS_FUSED_COPIES_H

#include "fused/plan.h"

struct prs_copies;

int prs_copies_open(struct prs_fused_plan *plan, struct prs_copies **out);
void prs_copies_close(struct prs_copies *copies);

/* Before the fused kernel: what copies wait for. 0 or -EIO. */
int prs_copies_begin(struct prs_copies *copies, cudaStream_t stream);

/* After the fused kernel was launched, which works on the own block meanwhile: a call of the host takes some 2.5 us,
 * and there are two a piece. 0 or -EIO; the kernels of all ranks then give up waiting. */
int prs_copies_enqueue(struct prs_copies *copies, const void *a);

/* Or before it: where a launch returns only when the kernel has ended (CUDA_LAUNCH_BLOCKING=1), no rank would ever
 * enqueue what the others' kernels wait for. */
bool prs_copies_go_first(const struct prs_copies *copies);

/* Last: `stream` goes on when the copies are done, so that A may change and the epoch may move. */
int prs_copies_join(struct prs_copies *copies, cudaStream_t stream);

#endif
