/* SPDX-License-Identifier: Apache-2.0 */
/* What the ranks of a context do together, over the caller's all-gather. Each call is collective. */
#ifndef PERSEUS_FUSED_RANKS_H
#define PERSEUS_FUSED_RANKS_H

#include <stddef.h>

struct prs_fused;

/* The caller's all-gather; with one rank, a copy. 0, or -errno (logged). */
int prs_ranks_allgather(struct prs_fused *ctx, const void *mine, void *all, size_t bytes);

/* 0 when r is 0 on every rank, else the first rank's error. */
int prs_ranks_agree(struct prs_fused *ctx, int r);

/* Returns when all ranks have called it. Device memory that they wrote and synchronised before is visible. */
int prs_ranks_barrier(struct prs_fused *ctx);

#endif
