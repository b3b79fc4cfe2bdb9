/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that every rank allocates and all map. */
#ifndef PERSEUS_FUSED_SYMMETRIC_H
#define PERSEUS_FUSED_SYMMETRIC_H

#include "fused/core/context.h"
#include "fused/core/far.h"

/* Which ranks write to the memory. If only ranks of the same node do, it needs no window. */
enum prs_symmetric_use {
    PRS_SYMMETRIC_NODE,   /* ranks of this node, by stores; no window */
    PRS_SYMMETRIC_DATA,   /* also other ranks, by puts; and it may be the source of puts */
    PRS_SYMMETRIC_SIGNALS /* signal words: never in a region with relaxed ordering */
};

/* One symmetric allocation. */
struct prs_symmetric {
    struct prs_symmetric *next;
    size_t bytes;
    uint8_t *at[PRS_MAX_LOCAL_RANKS]; /* [p]: the allocation of rank (local + p) % locals of this node; [0] own */
    bool opened[PRS_MAX_LOCAL_RANKS]; /* [p]: mapped from another process */
    struct prs_region *region;        /* between nodes; NULL otherwise */
    uint32_t window;                  /* of ctx->network->device, when has_window; the same on all ranks */
    bool has_window;
};

/* Collective. Zeroed on every rank before any of them gets it. */
int prs_symmetric_open(struct prs_fused *ctx, size_t bytes, enum prs_symmetric_use use, struct prs_symmetric **out);
void prs_symmetric_close(struct prs_fused *ctx, struct prs_symmetric *s);

/* Between nodes: signal words, and what kernels need to put to `data` and to signal. Collective. */
int prs_symmetric_open_signals(struct prs_fused *ctx, const struct prs_symmetric *data, uint64_t words,
                               struct prs_far *far, struct prs_symmetric **out);

/* The allocation that holds ptr .. ptr + bytes, or NULL. */
const struct prs_symmetric *prs_symmetric_find(const struct prs_fused *ctx, const void *ptr, size_t bytes);

#endif
