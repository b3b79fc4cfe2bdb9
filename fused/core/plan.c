/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/core/plan.h"

#include <cuda.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fused/core/sleep.h"
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
    p->number = ++ctx->plans;
    p->switch_need = PRS_CALL_NEEDS;
    return p;
}

enum { MOST_DECISIONS = 3 };

/* Undoes what decide() and place() did. */
static void undo(struct prs_plan *p)
{
    if (p->steps->close)
        p->steps->close(p);
    prs_local_give_back(p->ctx, &p->own);
    prs_local_give_back(p->ctx, &p->scratch);
    prs_local_give_back(p->ctx, &p->words);
    p->copies = NULL;
    p->refused = 0;
    p->switch_need = PRS_CALL_NEEDS;
    p->workspace_bytes = p->shared_bytes = 0;
    p->call = (struct prs_call){.terms = 0};
    memset(p->need, 0, sizeof(p->need));
}

static int decide(struct prs_plan *p, const struct prs_hint *agreed)
{
    int r;
    (void)snprintf(p->call.kind, sizeof(p->call.kind), "opens %s", p->steps->name);
    r = p->steps->decide(p, agreed);
    if (!r)
        r = p->refused;
    if (!r)
        r = prs_sync_name(p->ctx, p->steps->awaited);
    if (!r)
        r = prs_sync_open(p->ctx, p->sync, &p->words);
    p->workspace_bytes += sizeof(*p->sync->words);
    if (agreed) {
        uint32_t flags = p->call.hint.flags;
        p->call.hint = *agreed;
        p->call.hint.flags |= flags;
    }
    return r;
}

/* Collective, unless the plan is alone. */
static int agree(struct prs_plan *p)
{
    struct prs_hint agreed;
    int r = PRS_DECIDE_AGAIN;
    for (uint32_t i = 0; i < MOST_DECISIONS && r == PRS_DECIDE_AGAIN; i++) {
        r = decide(p, i == 0 ? NULL : &agreed);
        if (p->alone)
            return r;
        p->call.error = r;
        r = prs_meet(p->ctx, &p->call, p->term_name);
        agreed = p->call.hint;
        if (r == PRS_DECIDE_AGAIN)
            undo(p);
    }
    return r == PRS_DECIDE_AGAIN
               ? prs_fail(-EINVAL, "fused: the ranks decide differently about %s, whatever they know", p->steps->name)
               : r;
}

static int hold(struct prs_plan *p)
{
    int r = prs_symmetric_hold(p->ctx, p->need, p->call.need, PRS_CALL_NEEDS, p->memory, &p->holding);
    for (uint32_t i = 0; i < PRS_CALL_NEEDS && !r; i++)
        if (p->memory[i])
            *(p->memory[i]->pool ? &p->shared_bytes : &p->workspace_bytes) += p->memory[i]->bytes;
    return r;
}

static void place_switching(struct prs_plan *p)
{
    struct prs_switch_args *a = &p->switching;
    const struct prs_symmetric *words = p->memory[p->switch_need];
    a->sync = *p->sync;
    a->place = p->ctx->place;
    a->plan = p->number;
    for (uint32_t i = 0; i < a->place.local_ranks; i++)
        a->words[i] = (uint64_t *)words->at[i];
    a->common = p->common;
    for (uint32_t i = 0; i < a->place.local_ranks; i++)
        a->alarms[i] = p->ctx->alarm ? (struct prs_alarm *)p->ctx->alarm->at[i] : NULL;
    if (a->place.nodes > 1)
        prs_symmetric_far(p->ctx, words, words, &a->far);
}

int prs_plan_open(struct prs_plan *p, void **out)
{
    int before, r = prs_sleep_check(p->ctx, p->steps->name);
    if (!r)
        r = prs_cuda_enter(p->ctx, &before);
    if (r) {
        free(p);
        return r;
    }
    r = agree(p);
    if (!r && !p->alone) {
        p->common = ++p->ctx->common_plans;
        r = hold(p);
    }
    if (!r && p->switch_need < PRS_CALL_NEEDS)
        place_switching(p);
    if (!r)
        r = p->steps->place(p);
    if (r)
        prs_plan_close(p);
    else
        *out = p;
    prs_cuda_leave(before);
    return r;
}

void prs_plan_close(struct prs_plan *p)
{
    int before;
    if (!p || prs_cuda_enter(p->ctx, &before))
        return;
    undo(p);
    prs_symmetric_drop(p->ctx, p->holding);
    free(p);
    prs_cuda_leave(before);
}

void prs_plan_need(struct prs_plan *p, uint32_t number, struct prs_need need, uint64_t bytes)
{
    if (number >= PRS_CALL_NEEDS || p->call.need[number] != 0) {
        p->refused = prs_fail(-EINVAL, "fused: need %u of %s: asked for twice, or not below %d", number, p->steps->name,
                              PRS_CALL_NEEDS);
        return;
    }
    p->need[number] = need;
    p->call.need[number] = bytes;
}

void prs_plan_shares(struct prs_plan *p, uint32_t number, const char *pool)
{
    enum prs_symmetric_use use = p->ctx->place.nodes > 1 ? PRS_SYMMETRIC_SIGNALS : PRS_SYMMETRIC_CLEAN;
    prs_plan_need(p, number, (struct prs_need){use, true, pool}, prs_switch_words(&p->ctx->place) * sizeof(uint64_t));
    p->switch_need = number;
}

void prs_plan_term(struct prs_plan *p, const char *name, uint64_t value)
{
    if (p->call.terms < PRS_CALL_TERMS)
        p->term_name[p->call.terms] = name;
    prs_call_term(&p->call, value);
}

int prs_plan_local(struct prs_plan *p, uint64_t bytes, uint64_t clean)
{
    p->workspace_bytes += bytes;
    return prs_local_take(p->ctx, bytes, clean, &p->own);
}

int prs_plan_scratch(struct prs_plan *p, uint64_t bytes)
{
    uint64_t whole;
    int r = prs_local_share(p->ctx, bytes, &p->scratch, &whole);
    if (!r)
        p->shared_bytes += whole;
    return r;
}

bool prs_plan_has_scratch(const struct prs_plan *p)
{
    return p->ctx->scratch_of == p->number;
}

int prs_plan_copies(struct prs_plan *p)
{
    struct prs_copy_stream *copies = &p->ctx->copies;
    int r = copies->stream ? 0 : prs_copy_stream_open(copies);
    if (r)
        prs_copy_stream_close(copies);
    else
        p->copies = copies;
    return r;
}

int prs_plan_enter(struct prs_plan *p, int *before)
{
    int r = prs_sync_check(p->ctx);
    if (!r)
        r = prs_sleep_check(p->ctx, p->steps->name);
    return r ? r : prs_cuda_enter(p->ctx, before);
}

static int launched(const struct prs_plan *p, int r)
{
    if (!r)
        return 0;
    return prs_fail(r, "fused: CUDA refused to launch %s: %s", p->steps->name, cudaGetErrorString(cudaGetLastError()));
}

static int enqueue(struct prs_plan *p, prs_launch_step_fn *const *steps, cudaStream_t stream)
{
    int r = 0;
    while (*steps && !r)
        r = (*steps++)(p, stream);
    return launched(p, r);
}

/* A call of the host takes some 3 us and the kernel has data of its own to begin with, so the kernel goes first. But
 * under CUDA_LAUNCH_BLOCKING=1 a launch returns only when the kernel has ended: no rank would then enqueue the copies
 * that the other ranks' kernels wait for, so the copies go first. */
static int launch_both(struct prs_plan *p, prs_launch_step_fn *const *steps, cudaStream_t stream)
{
    int r = p->copies->go_first ? p->steps->copies(p) : 0;
    if (!r)
        r = enqueue(p, steps, stream);
    if (!r && !p->copies->go_first)
        r = p->steps->copies(p);
    return r;
}

int prs_plan_begin(struct prs_plan *p)
{
    int r = p->alone ? 0 : prs_sync_check_absent(p->ctx, p->steps->name);
    if (!r && p->scratch.at)
        p->ctx->scratch_of = p->number;
    return r;
}

int prs_plan_launch_own(struct prs_plan *p, prs_launch_step_fn *const *steps, cudaStream_t stream)
{
    if (p->scratch.at)
        p->ctx->scratch_of = 0;
    return enqueue(p, steps, stream);
}

int prs_plan_launch_local(struct prs_plan *p, prs_launch_step_fn *const *steps, cudaStream_t stream)
{
    if (p->scratch.at)
        p->ctx->scratch_of = p->number;
    return enqueue(p, steps, stream);
}

int prs_plan_launch(struct prs_plan *p, prs_launch_step_fn *const *steps, cudaStream_t stream)
{
    int r = prs_plan_begin(p);
    if (!r && p->switch_need != PRS_CALL_NEEDS)
        r = launched(p, p->steps->switch_plan(&p->switching, stream));
    if (r || !p->copies)
        return r ? r : enqueue(p, steps, stream);
    r = launched(p, p->steps->begin_copies(p, stream));
    if (!r)
        r = prs_copy_stream_fork(p->copies, stream);
    if (!r)
        r = launch_both(p, steps, stream);
    return r ? r : prs_copy_stream_join(p->copies, stream);
}
