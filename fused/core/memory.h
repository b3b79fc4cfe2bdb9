/* SPDX-License-Identifier: Apache-2.0 */
/* The structures of a context's memory, for the files that divide it: chunk.c, symmetric.c, local.c, lent.c. */
#ifndef PERSEUS_FUSED_MEMORY_H
#define PERSEUS_FUSED_MEMORY_H

#include "fused/core/arena.h"
#include "fused/core/span.h"
#include "fused/core/symmetric.h"

/* One allocation on every rank, which the ranks of a node map. */
struct prs_chunk {
    size_t bytes;
    uint8_t *at[PRS_MAX_LOCAL_RANKS];
    struct prs_span own;                         /* at[0]; empty: imported */
    struct prs_span mapped[PRS_MAX_LOCAL_RANKS]; /* [p]: memory of another process, if the context sleeps */
    /* [p]: opened by CUDA IPC from another process, if the context does not sleep */
    bool opened[PRS_MAX_LOCAL_RANKS];
    struct prs_region *region;         /* between nodes; NULL otherwise */
    struct prs_window_remote *remotes; /* between nodes: [world] */
};

/* What a plan or an allocation holds. */
struct prs_holding {
    bool used, closed;
    struct prs_symmetric *piece[PRS_CALL_NEEDS];
};

/* Local memory that plans share. */
struct prs_scratch {
    struct prs_scratch *next;
    struct prs_block *block;
    uint64_t bytes;
    uint32_t holders;
};

struct prs_memory {
    struct prs_arena arena[PRS_SYMMETRIC_USES];
    struct prs_chunk **chunk[PRS_SYMMETRIC_USES]; /* [use]: one for each chunk of the arena */
    struct prs_symmetric *pieces;
    struct prs_symmetric *cleaning; /* released; zeros are being written. Free after the next collective call */
    struct prs_arena local;
    struct prs_span *local_chunk;
    struct prs_saved *saved; /* used by sleep.c while the context is asleep */
    bool asleep;
    struct prs_scratch *scratch;
    bool closes;                                   /* something was closed since the last collective call */
    struct prs_holding holding[PRS_MOST_HOLDINGS]; /* [0] is not used */
};

#endif
