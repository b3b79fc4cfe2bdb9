/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/core/plan.h"

#include <cuda.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "transport/util/error.h"

void *prs_plan_new(struct prs_fused *ctx, const struct prs_plan_steps *steps, size_t bytes)
{
    struct prs_plan *p = aligned_alloc(_Alignof(CUtensorMap), bytes); /* malloc aligns to 16 only */
    if (!p) {
        (void)prs_fail(-ENOMEM, "fused: no memory for a plan");
        return NULL;
    }
    memset(p, 0, bytes);
    p->ctx = ctx;
    p->steps = steps;
    return p;
}

static int open_own(struct prs_plan *p)
{
    int r = p->steps->own(p);
    if (!r)
        r = prs_sync_open(p->ctx, p->sync);
    p->workspace_bytes += sizeof(*p->sync->words);
    return r;
}

int prs_plan_open(struct prs_plan *p, void **out)
{
    int before, r = prs_context_enter(p->ctx, &before);
    if (r) {
        free(p);
        return r;
    }
    r = open_own(p);
    if (!p->alone)
        r = prs_context_agree(p->ctx, r); /* in shared() ranks wait for each other */
    if (!r) {
        r = p->steps->shared(p);
        if (!p->alone)
            r = prs_context_agree(p->ctx, r); /* what needed no other rank may have failed on one */
    }
    if (r)
        prs_plan_close(p);
    else
        *out = p;
    prs_context_leave(before);
    return r;
}

void prs_plan_close(struct prs_plan *p)
{
    int before;
    if (!p || prs_context_enter(p->ctx, &before))
        return;
    prs_copy_stream_close(&p->copies);
    p->steps->close(p);
    while (p->memories > 0)
        prs_symmetric_close(p->ctx, p->memory[--p->memories]);
    prs_sync_close(p->sync);
    free(p);
    prs_context_leave(before);
}

static void keep(struct prs_plan *p, struct prs_symmetric *memory)
{
    p->memory[p->memories++] = memory;
    p->workspace_bytes += memory->bytes;
}

int prs_plan_memory(struct prs_plan *p, size_t bytes, enum prs_symmetric_use use, struct prs_symmetric **out)
{
    int r = prs_symmetric_open(p->ctx, bytes, use, out);
    if (!r)
        keep(p, *out);
    return r;
}

int prs_plan_flags(struct prs_plan *p, size_t words, struct prs_symmetric **out)
{
    int r = prs_plan_memory(p, (words + 1) * sizeof(uint32_t), PRS_SYMMETRIC_NODE, out);
    return r ? r : prs_sync_share(p->ctx, *out, p->sync);
}

int prs_plan_signals(struct prs_plan *p, const struct prs_symmetric *data, uint64_t words, struct prs_far *far)
{
    struct prs_symmetric *signals;
    int r = prs_symmetric_open_signals(p->ctx, data, words, far, &signals);
    if (!r)
        keep(p, signals);
    return r;
}

int prs_plan_enter(struct prs_plan *p, int *before)
{
    int r = prs_sync_check(p->ctx);
    return r ? r : prs_context_enter(p->ctx, before);
}

static int launched(const struct prs_plan *p, int r)
{
    if (!r)
        return 0;
    return prs_fail(r, "fused: CUDA refused to launch %s: %s", p->steps->name, cudaGetErrorString(cudaGetLastError()));
}

/* A call of the host takes some 3 us and the kernel has data of its own to begin with, so the kernel goes first. But
 * under CUDA_LAUNCH_BLOCKING=1 a launch returns only when the kernel has ended: no rank would then enqueue the copies
 * that the other ranks' kernels wait for, so the copies go first. */
static int launch_both(struct prs_plan *p, cudaStream_t stream)
{
    int r = p->copies.go_first ? p->steps->copies(p) : 0;
    if (!r)
        r = launched(p, p->steps->kernel(p, stream));
    if (!r && !p->copies.go_first)
        r = p->steps->copies(p);
    return r;
}

int prs_plan_launch(struct prs_plan *p, cudaStream_t stream)
{
    int r;
    if (!p->copies.stream)
        return launched(p, p->steps->kernel(p, stream));
    r = launched(p, p->steps->begin_copies(p, stream));
    if (!r)
        r = prs_copy_stream_fork(&p->copies, stream);
    if (!r)
        r = launch_both(p, stream);
    return r ? r : prs_copy_stream_join(&p->copies, stream);
}
