/* SPDX-License-Identifier: Apache-2.0 */
/* The part that all plans have in common: opening together with the other ranks, releasing, launching. struct prs_plan
 * is the first member of each kernel's own plan. */
#ifndef PERSEUS_FUSED_PLAN_H
#define PERSEUS_FUSED_PLAN_H

#include "fused/core/context.h"
#include "fused/core/copy_stream.h"
#include "fused/core/plan_switch.h"
#include "fused/core/symmetric.h"

struct prs_plan;

/* The steps that differ from kernel to kernel; all but close() return 0 or -errno. The context's device is current. */
struct prs_plan_steps {
    const char *name;        /* in error texts: "a matrix product" */
    prs_awaited_fn *awaited; /* names the flags of its kernels */
    /* Opening. decide() needs no other rank: it checks the arguments, loads the kernels, decides everything, and says
     * what memory the plan needs and which terms must agree. agreed: NULL, or what all ranks know; then an earlier
     * decide() was undone by close(). */
    int (*decide)(struct prs_plan *p, const struct prs_hint *agreed);
    /* Runs when all ranks have decided the same, and memory[] is allocated. Local. */
    int (*place)(struct prs_plan *p);
    /* Releases what decide() and place() opened, except memory of prs_plan_need() and prs_plan_local(). Runs also after
     * they failed. Local. NULL: nothing. */
    void (*close)(struct prs_plan *p);
    /* Launching, for plans with `copies`. begin_copies() enqueues the kernel that the copies wait for; copies()
     * enqueues the copies on the copy stream, which run at the same time as the kernels of the launch. */
    int (*begin_copies)(struct prs_plan *p, cudaStream_t stream);
    int (*copies)(struct prs_plan *p);
    /* Launching, for plans that call prs_plan_shares(): enqueues the kernel of plan_switch.cuh. */
    int (*switch_plan)(const struct prs_switch_args *args, cudaStream_t stream);
};

/* A part of a launch: enqueues one kernel or more. 0 or -errno. */
typedef int prs_launch_step_fn(struct prs_plan *p, cudaStream_t stream);

struct prs_plan {
    struct prs_fused *ctx;
    const struct prs_plan_steps *steps;
    struct prs_sync *sync; /* part of the kernel's arguments */
    bool alone;            /* no other rank takes part: opening is not collective */
    /* While the plan is opened: */
    struct prs_call call;
    const char *term_name[PRS_CALL_TERMS];
    struct prs_need need[PRS_CALL_NEEDS];
    int refused; /* 0, or the error of prs_plan_need() */
    uint32_t holding;
    struct prs_symmetric *memory[PRS_CALL_NEEDS]; /* [number of the need]; NULL: no such need, or one of 0 bytes */
    struct prs_local words, own, scratch;
    uint32_t number; /* counts all plans that the context has had; from 1 on */
    /* counts the plans that all ranks opened, so it is the same on all ranks; 0: a plan of one rank alone */
    uint32_t common;
    struct prs_copy_stream *copies; /* the context's; NULL: no copies */
    uint32_t switch_need;           /* number of a need; PRS_CALL_NEEDS: no memory that other ranks write is shared */
    struct prs_switch_args switching;
    uint64_t workspace_bytes; /* device memory of this plan on this rank */
    uint64_t shared_bytes;    /* memory that it shares with other plans */
};

/* A zeroed plan of `bytes` bytes, aligned for the tensor maps in it. The kernel's own fields are filled before
 * prs_plan_open(). NULL (logged): out of memory. */
void *prs_plan_new(struct prs_fused *ctx, const struct prs_plan_steps *steps, size_t bytes);

/* Collective, unless the plan belongs to this rank alone. If one rank fails, all do. Takes ownership of the plan. On
 * success *out is the plan; on failure the plan is freed and *out is unchanged. */
int prs_plan_open(struct prs_plan *p, void **out);

/* Local. NULL does nothing. */
void prs_plan_close(struct prs_plan *p);

/* For decide(): symmetric memory, which will be memory[number]. The family numbers its needs; each at most once. */
void prs_plan_need(struct prs_plan *p, uint32_t number, struct prs_need need, uint64_t bytes);
/* For decide(): other ranks write to memory of pools that the plan needs. All plans with such needs of one pool name
 * the same pool here, for the words of plan_switch.h. Once. */
void prs_plan_shares(struct prs_plan *p, uint32_t number, const char *pool);
/* For decide(): a term that must be the same on all ranks; `name` is for error texts. */
void prs_plan_term(struct prs_plan *p, const char *name, uint64_t value);
/* For decide(), at most once: allocates p->own, memory of this rank; its first `clean` bytes are zero. */
int prs_plan_local(struct prs_plan *p, uint64_t bytes, uint64_t clean);
/* For decide(), at most once: p->scratch becomes memory of this rank that the plans of a context share. Its content
 * lasts until another plan with such memory is launched. */
int prs_plan_scratch(struct prs_plan *p, uint64_t bytes);
/* Whether p->scratch still has the data that a launch of this plan left there, judging by the order of calls. */
bool prs_plan_has_scratch(const struct prs_plan *p);
/* For decide(): the plan has copies. */
int prs_plan_copies(struct prs_plan *p);

/* Before a launch: 0 when nothing has failed on the context; its device is then current, and *before is the argument of
 * prs_cuda_leave(). */
int prs_plan_enter(struct prs_plan *p, int *before);

/* Before the first kernel of a launch that prs_plan_launch() does not enqueue: refuses a launch that needs ranks that
 * were left out, and notes which plan's data p->scratch holds. */
int prs_plan_begin(struct prs_plan *p);

/* Enqueues the steps of a launch, which end with NULL, and concurrently the copies if there are any. Later work of
 * `stream` waits for both. A launch of a plan that shares memory begins with the step of plan_switch.h. */
int prs_plan_launch(struct prs_plan *p, prs_launch_step_fn *const *steps, cudaStream_t stream);
/* The same for a launch that uses no other rank, so that other ranks need not make it. */
int prs_plan_launch_local(struct prs_plan *p, prs_launch_step_fn *const *steps, cudaStream_t stream);
/* The same for a launch that uses no memory of prs_plan_shares(), of a plan without copies. Later launches have no use
 * for what it leaves in p->scratch. */
int prs_plan_launch_own(struct prs_plan *p, prs_launch_step_fn *const *steps, cudaStream_t stream);

#endif
