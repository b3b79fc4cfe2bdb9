/* SPDX-License-Identifier: Apache-2.0 */
/* The part that all plans have in common: opening together with the other ranks, releasing, launching. struct prs_plan
 * is the first member of each kernel's own plan. */
#ifndef PERSEUS_FUSED_PLAN_H
#define PERSEUS_FUSED_PLAN_H

#include "fused/core/context.h"
#include "fused/core/copy_stream.h"
#include "fused/core/symmetric.h"

struct prs_plan;

/* The steps that differ from kernel to kernel; all but close() return 0 or -errno. The context's device is current. */
struct prs_plan_steps {
    const char *name; /* for error texts */
    /* Opening. own() needs no other rank. shared() is collective and runs when own() has succeeded on all ranks. */
    int (*own)(struct prs_plan *p);
    int (*shared)(struct prs_plan *p);
    /* Releases what own() and shared() opened, except memory of prs_plan_memory() and the copy stream. Runs also after
     * they failed. */
    void (*close)(struct prs_plan *p);
    /* Launching. The last two are for plans whose `copies` shared() has opened. begin_copies() enqueues the kernel that
     * the copies wait for; copies() enqueues the copies on the copy stream, which runs beside the fused kernel. */
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

/* Collective, unless the plan is alone: where one rank fails, all do. Takes ownership of the plan. On success *out is
 * the plan; on failure the plan is freed and *out is unchanged. */
int prs_plan_open(struct prs_plan *p, void **out);

/* Collective. NULL does nothing. */
void prs_plan_close(struct prs_plan *p);

/* Collective, for shared(): opens symmetric memory. The plan counts it, and releases it in reverse order of opening. */
int prs_plan_memory(struct prs_plan *p, size_t bytes, enum prs_symmetric_use use, struct prs_symmetric **out);
/* The same for `words` flags. With their last word the node's ranks also tell each other that they gave up. */
int prs_plan_flags(struct prs_plan *p, size_t words, struct prs_symmetric **out);
/* The same for the signal words between nodes; also fills `far`. */
int prs_plan_signals(struct prs_plan *p, const struct prs_symmetric *data, uint64_t words, struct prs_far *far);

/* Before a launch: 0 when nothing has failed on the context; its device is then current, and *before is the argument of
 * prs_context_leave(). */
int prs_plan_enter(struct prs_plan *p, int *before);

/* Enqueues the kernel and, beside it, the copies if there are any. Later work of `stream` waits for both. */
int prs_plan_launch(struct prs_plan *p, cudaStream_t stream);

#endif
