/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that every rank has and all ranks of a node map. It is allocated in chunks, which the ranks map when the arena
 * grows; plans and allocations take pieces of chunks. All ranks take and release pieces in the same order, so a piece
 * has the same place on all ranks, and ranks need not tell it to each other.
 *
 * The pieces of one call are a *holding*. A rank closes a holding alone and at once. Its pieces are free when all ranks
 * have closed it, which they learn in the next collective call. */
#ifndef PERSEUS_FUSED_SYMMETRIC_H
#define PERSEUS_FUSED_SYMMETRIC_H

#include "fused/core/context.h"
#include "fused/core/far.h"
#include "fused/core/meeting.h"

/* The initial content of the memory, and who writes to it. Each use has chunks of its own. */
enum prs_symmetric_use {
    PRS_SYMMETRIC_DATA,    /* anything; written and read by ranks of this node and, through a window, of others */
    PRS_SYMMETRIC_CLEAN,   /* zeros; the same */
    PRS_SYMMETRIC_SIGNALS, /* zeros; signal words: never in a region with relaxed ordering */
    PRS_SYMMETRIC_USES
};

struct prs_block;
struct prs_chunk;

/* A piece of a chunk. */
struct prs_symmetric {
    struct prs_symmetric *next;
    size_t bytes;
    uint8_t *at[PRS_MAX_LOCAL_RANKS]; /* [p]: at rank (local + p) % locals of this node; [0] is this rank */
    struct prs_chunk *chunk;
    struct prs_block *block; /* NULL: the whole of an imported chunk */
    enum prs_symmetric_use use;
    const char *pool; /* NULL: not shared */
    uint32_t holders;
    uint32_t window; /* index in ctx->network->device, if has_window; the same on all ranks */
    bool has_window;
    bool lent; /* the caller has it */
};

/* What a call asks for. */
struct prs_need {
    enum prs_symmetric_use use;
    bool far; /* other nodes reach it, so it gets a window. Without other nodes this has no effect */
    /* Holdings with needs of a pool of the same name share a piece that is large enough: plans run one after the other.
     * NULL: not shared. */
    const char *pool;
};

int prs_symmetric_open(struct prs_fused *ctx);
/* Gives all memory of the context back, also that of the fault report and the board: at once when all ranks of the
 * node have left, and otherwise when a later context finds that they have. patience_ms: how long to wait for them
 * now; 0: nothing is freed now, because that waits for the kernels of the device. No proxy may be open. */
void prs_symmetric_close(struct prs_fused *ctx, uint32_t patience_ms);

/* For prs_meet(). The first says which holdings this rank has closed. The second releases those that all ranks have
 * closed. */
int prs_symmetric_report(struct prs_fused *ctx, uint8_t *closed);
void prs_symmetric_release(struct prs_fused *ctx, const uint8_t *closed);

/* After the all-gather of a call has succeeded: takes memory for its needs. Collective where an arena has to grow.
 * *holding names it, and is 0 on failure. */
int prs_symmetric_hold(struct prs_fused *ctx, const struct prs_need *needs, const uint64_t *bytes, uint32_t count,
                       struct prs_symmetric **pieces, uint32_t *holding);
/* The same for a piece that is not part of an arena. Its chunk has all keys. */
int prs_symmetric_adopt(struct prs_fused *ctx, struct prs_symmetric *s);
/* Local. 0 does nothing. */
void prs_symmetric_drop(struct prs_fused *ctx, uint32_t holding);

/* Between nodes: what kernels need to put to `data` and to signal. */
void prs_symmetric_far(const struct prs_fused *ctx, const struct prs_symmetric *data,
                       const struct prs_symmetric *signals, struct prs_far *far);

/* The piece that holds ptr .. ptr + bytes, or NULL. */
const struct prs_symmetric *prs_symmetric_find(const struct prs_fused *ctx, const void *ptr, size_t bytes);

#endif
