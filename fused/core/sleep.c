/* SPDX-License-Identifier: Apache-2.0 */
/* All ranks of the node call prs_fused_sleep() before any rank gives memory back, because until then others may write
 * to it. All call prs_fused_wake() before any rank continues, because until then the content is not restored.
 *
 * What survives is the content of blocks of memory that must be clean, of signals, and of this rank alone. Memory of
 * data and scratch need not survive: each launch writes there what it reads. */
#include "fused/core/sleep.h"

#include <errno.h>
#include <stdlib.h>

#include "fused/core/board.h"
#include "fused/core/chunk.h"
#include "fused/core/memory.h"

/* A block and its content. */
struct prs_saved {
    struct prs_saved *next;
    uint8_t *at;
    uint64_t bytes;
    uint8_t content[];
};

int prs_sleep_check(const struct prs_fused *ctx, const char *name)
{
    return !ctx->memory->asleep
               ? 0
               : prs_fail(-EBUSY,
                          "fused: %s: rank %u is asleep (prs_fused_sleep()), so its memory is not there: call "
                          "prs_fused_wake() on all ranks first",
                          name, ctx->config.rank);
}

uint64_t prs_sleep_saved(const struct prs_memory *m)
{
    uint64_t bytes = 0;
    for (const struct prs_saved *s = m->saved; s; s = s->next)
        bytes += s->bytes;
    return bytes;
}

void prs_sleep_forget(struct prs_memory *m)
{
    while (m->saved) {
        struct prs_saved *s = m->saved;
        m->saved = s->next;
        free(s);
    }
}

/* ---- what survives ---- */
static int save(struct prs_fused *ctx, uint8_t *at, uint64_t bytes)
{
    struct prs_saved *s = malloc(sizeof(*s) + bytes);
    if (!s)
        return prs_fail(-ENOMEM, "fused: rank %u has no host memory for %llu bytes that survive its sleep",
                        ctx->config.rank, (unsigned long long)bytes);
    s->next = ctx->memory->saved, s->at = at, s->bytes = bytes;
    ctx->memory->saved = s;
    return prs_cuda_check(cudaMemcpyAsync(s->content, at, bytes, cudaMemcpyDeviceToHost, ctx->stream),
                          "cudaMemcpy of memory to the host");
}

static bool is_scratch(const struct prs_memory *m, const struct prs_block *block)
{
    for (const struct prs_scratch *s = m->scratch; s; s = s->next)
        if (s->block == block)
            return true;
    return false;
}

static int save_all(struct prs_fused *ctx)
{
    struct prs_memory *m = ctx->memory;
    int r = 0, copied;
    for (uint32_t u = PRS_SYMMETRIC_CLEAN; u < PRS_SYMMETRIC_USES; u++)
        for (const struct prs_block *b = m->arena[u].used; b && !r; b = b->next)
            r = save(ctx, m->chunk[u][b->chunk]->at[0] + b->at, b->bytes);
    for (const struct prs_block *b = m->local.used; b && !r; b = b->next)
        if (!is_scratch(m, b))
            r = save(ctx, m->local_chunk[b->chunk].at + b->at, b->bytes);
    copied = prs_cuda_check(cudaStreamSynchronize(ctx->stream), "cudaMemcpy of memory to the host");
    return r ? r : copied;
}

static int restore_all(struct prs_fused *ctx)
{
    int r = 0, copied;
    for (const struct prs_saved *s = ctx->memory->saved; s && !r; s = s->next)
        r = prs_cuda_check(cudaMemcpyAsync(s->at, s->content, s->bytes, cudaMemcpyHostToDevice, ctx->stream),
                           "cudaMemcpy of memory from the host");
    copied = prs_cuda_check(cudaStreamSynchronize(ctx->stream), "cudaMemcpy of memory from the host");
    return r ? r : copied;
}

/* ---- memory ---- */
static int give_back_all(struct prs_fused *ctx)
{
    struct prs_memory *m = ctx->memory;
    int r = 0, given;
    for (uint32_t u = 0; u < PRS_SYMMETRIC_USES; u++)
        for (uint32_t i = 0; i < m->arena[u].chunks; i++) {
            given = prs_chunk_sleep(ctx, m->chunk[u][i]);
            r = r ? r : given;
        }
    for (uint32_t i = 0; i < m->local.chunks; i++) {
        given = prs_span_sleep(&m->local_chunk[i]);
        r = r ? r : given;
    }
    m->asleep = true;
    return r;
}

/* Collective. All ranks have the same number of chunks of each use. */
static int take_all(struct prs_fused *ctx)
{
    struct prs_memory *m = ctx->memory;
    uint32_t most = 0;
    int r = 0;
    for (uint32_t i = 0; i < m->local.chunks && !r; i++)
        r = prs_span_wake(&m->local_chunk[i], ctx->config.device);
    for (uint32_t u = 0; u < PRS_SYMMETRIC_USES; u++)
        most = m->arena[u].chunks > most ? m->arena[u].chunks : most;
    if (most == 0)
        return prs_ranks_agree(ctx, r);
    for (uint32_t i = 0; i < most; i++) {
        struct prs_chunk *chunk[PRS_SYMMETRIC_USES];
        for (uint32_t u = 0; u < PRS_SYMMETRIC_USES; u++)
            chunk[u] = i < m->arena[u].chunks ? m->chunk[u][i] : NULL;
        r = prs_chunk_make(ctx, chunk, r);
        if (r)
            return r;
    }
    return 0;
}

/* ---- the calls ---- */
static int check_can_sleep(const struct prs_fused *ctx, const char *call)
{
    return ctx->config.sleeps ? prs_sync_check_absent(ctx, call)
                              : prs_fail(-EOPNOTSUPP,
                                         "fused: %s: the context was opened without `sleeps`, so its memory cannot be "
                                         "given back",
                                         call);
}

/* Waits for the other ranks of the node. */
static int gather(struct prs_fused *ctx, const char *call)
{
    uint32_t missing, rank, first = ctx->config.rank - ctx->place.local_rank, limit_ms = ctx->config.timeout_ms;
    int r = ctx->board ? prs_board_gather(ctx->board, limit_ms, &missing) : 0;
    if (!r)
        return 0;
    rank = first + missing;
    if (rank == ctx->config.rank)
        return prs_fail(r, "fused: rank %u called %s too late: after %u ms another rank had given up", rank, call,
                        limit_ms);
    if (prs_board_has_left(ctx->board, missing))
        return prs_fail(r, "fused: %s: rank %u cannot come: its process has ended, or it has closed its context", call,
                        rank);
    return prs_fail(r, "fused: %s: rank %u did not call it within %u ms (timeout_ms)", call, rank, limit_ms);
}

/* Waits until everything that this rank has enqueued has ended, and checks that no launch has failed. */
static int finish(struct prs_fused *ctx)
{
    int r = prs_cuda_check(cudaDeviceSynchronize(), "cudaDeviceSynchronize before prs_fused_sleep()");
    int failed = prs_sync_check(ctx);
    return failed ? failed : r;
}

/* All ranks have come. */
static int go_to_sleep(struct prs_fused *ctx, int error)
{
    struct prs_call call = {.kind = "goes to sleep", .error = error};
    int r = prs_meet(ctx, &call, NULL);
    if (!r)
        r = prs_ranks_agree(ctx, save_all(ctx));
    if (r) {
        prs_sleep_forget(ctx->memory);
        return r;
    }
    ctx->scratch_of = 0; /* the content is lost */
    return prs_ranks_agree(ctx, give_back_all(ctx));
}

int prs_fused_sleep(struct prs_fused *ctx)
{
    int before, error, r = check_can_sleep(ctx, "prs_fused_sleep()");
    if (!r && ctx->memory->asleep)
        r = prs_fail(-EALREADY, "fused: prs_fused_sleep(): rank %u is asleep already", ctx->config.rank);
    if (!r)
        r = prs_cuda_enter(ctx, &before);
    if (r)
        return r;
    error = finish(ctx);
    r = gather(ctx, "prs_fused_sleep()");
    if (!r)
        r = go_to_sleep(ctx, error);
    prs_cuda_leave(before);
    return r;
}

/* All ranks have come. */
static int wake(struct prs_fused *ctx)
{
    int r = take_all(ctx);
    if (!r)
        r = prs_ranks_agree(ctx, restore_all(ctx));
    if (r) {
        (void)give_back_all(ctx);
        return r;
    }
    prs_sleep_forget(ctx->memory);
    ctx->memory->asleep = false;
    return 0;
}

int prs_fused_wake(struct prs_fused *ctx)
{
    int before, r = check_can_sleep(ctx, "prs_fused_wake()");
    if (!r && !ctx->memory->asleep)
        r = prs_fail(-EINVAL, "fused: prs_fused_wake(): rank %u is not asleep", ctx->config.rank);
    if (!r)
        r = prs_cuda_enter(ctx, &before);
    if (r)
        return r;
    r = gather(ctx, "prs_fused_wake()");
    if (!r)
        r = wake(ctx);
    prs_cuda_leave(before);
    return r;
}
