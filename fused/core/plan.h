/* SPDX-License-Identifier: Apache-2.0 */
/* What all plans have in common: how one is opened together with the other ranks, what it releases, how it is launched.
 * struct prs_plan is the first member of each kernel's own plan. */
#ifndef PERSEUS_FUSED_PLAN_H
#define PERSEUS_FUSED_PLAN_H

#include "fused/core/context.h"
#include "fused/core/copy_stream.h"
#include "fused/core/symmetric.h"

struct prs_plan;

/* What one kernel does in each step; all but close() return 0 or -errno. The context's device is current. */
struct prs_plan_steps {
    const char *name; /* for error texts */
    /* Opening. own() needs no other rank. shared() is collective and runs when own() has succeeded on all ranks. */
    int (*own)(struct prs_plan *p);
    int (*shared)(struct prs_plan *p);
    /* Releases what the two opened beside memory of prs_plan_memory() and the copy stream, also after they failed. */
    void (*close)(struct prs_plan *p);
    /* Launching. The last two are for plans whose `copies` shared() has opened: begin_copies() enqueues what copies
     * wait for, and copies() enqueues them on the copy stream, which runs beside the kernel. */
    int (*kernel)(struct prs_plan *p, cudaStream_t stream);
    int (*begin_copies)(struct prs_plan *p, cudaStream_t stream);
    int (*copies)(struct prs_plan *p);
};

enum { PRS_PLAN_MEMORIES = 5 };

struct prs_plan {
    struct prs_fused *ctx;
    const struct prs_plan_steps *steps;
    struct prs_sync *sync; /* part of the kernel's arguments */
    bool alone;            /* no other rank takes part: opening is not collective */
    struct prs_symmetric *memory[PRS_PLAN_MEMORIES];
    uint32_t memories;
    struct prs_copy_stream copies;
    uint64_t workspace_bytes; /* device memory on this rank */
};

/* A zeroed plan of `bytes` bytes, aligned for the tensor maps in it. The kernel's own fields are filled before
 * prs_plan_open(). NULL (logged): out of memory. */
void *prs_plan_new(struct prs_fused *ctx, const struct prs_plan_steps *steps, size_t bytes);

/* Collective, unless the plan is alone: where one rank fails, all do. Takes the plan: *out is the plan, or, after a
 * failure, is left as it was and the plan is gone. */
int prs_plan_open(struct prs_plan *p, void **out);

/* Collective. NULL does nothing. */
void prs_plan_close(struct prs_plan *p);

/* Collective, for shared(): symmetric memory that the plan releases, the last opened first, and counts. */
int prs_plan_memory(struct prs_plan *p, size_t bytes, enum prs_symmetric_use use, struct prs_symmetric **out);
/* The same for `words` flags, by whose last word the node's ranks also tell each other that they gave up. */
int prs_plan_flags(struct prs_plan *p, size_t words, struct prs_symmetric **out);
/* The same for the signal words between nodes; fills `far`. */
int prs_plan_signals(struct prs_plan *p, const struct prs_symmetric *data, uint64_t words, struct prs_far *far);

/* Before a launch: 0 when nothing has failed on the context; its device is then current, and *before is for
 * prs_context_leave(). */
int prs_plan_enter(struct prs_plan *p, int *before);

/* Enqueues the kernel and, beside it, the copies if there are any. `stream` goes on when both are done. */
int prs_plan_launch(struct prs_plan *p, cudaStream_t stream);

#endif
