/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of this rank alone, from an arena of its own. */
#include "fused/core/local.h"

#include <errno.h>
#include <stdlib.h>

#include "fused/core/memory.h"
#include "transport/util/error.h"

static int grow_local(struct prs_fused *ctx, uint64_t bytes)
{
    struct prs_memory *m = ctx->memory;
    struct prs_span *more = realloc(m->local_chunk, (m->local.chunks + 1) * sizeof(*more)), span;
    uint64_t whole = prs_arena_growth(&m->local, bytes);
    int r;
    if (!more)
        return prs_fail(-ENOMEM, "fused: no memory for the description of a chunk");
    m->local_chunk = more;
    r = prs_span_take(&span, whole, ctx->config.sleeps);
    if (r)
        return r;
    r = prs_arena_add(&m->local, whole);
    if (r)
        prs_span_drop(&span);
    else
        m->local_chunk[m->local.chunks - 1] = span;
    return r;
}

static int take_block(struct prs_fused *ctx, uint64_t bytes, struct prs_block **out)
{
    int r = prs_arena_take(&ctx->memory->local, bytes, out);
    if (r != -ENOSPC)
        return r;
    r = grow_local(ctx, bytes);
    return r ? r : prs_arena_take(&ctx->memory->local, bytes, out);
}

static uint8_t *address_of(const struct prs_fused *ctx, const struct prs_block *block)
{
    return ctx->memory->local_chunk[block->chunk].at + block->at;
}

int prs_local_take(struct prs_fused *ctx, uint64_t bytes, uint64_t clean, struct prs_local *out)
{
    int r = take_block(ctx, bytes, &out->block);
    if (r)
        return r;
    out->at = address_of(ctx, out->block);
    if (clean == 0)
        return 0;
    /* A launch may use any stream, so the zeros must be there when this returns. */
    r = prs_cuda_check(cudaMemsetAsync(out->at, 0, clean, ctx->stream), "cudaMemset of workspace");
    return r ? r : prs_cuda_check(cudaStreamSynchronize(ctx->stream), "cudaMemset of workspace");
}

/* The smallest piece that is large enough, or NULL. *largest: the size of the largest piece. */
static struct prs_scratch *find_scratch(const struct prs_memory *m, uint64_t bytes, uint64_t *largest)
{
    struct prs_scratch *best = NULL;
    *largest = 0;
    for (struct prs_scratch *s = m->scratch; s; s = s->next) {
        *largest = s->bytes > *largest ? s->bytes : *largest;
        if (s->bytes >= bytes && (!best || s->bytes < best->bytes))
            best = s;
    }
    return best;
}

static int add_scratch(struct prs_fused *ctx, uint64_t bytes, struct prs_scratch **out)
{
    struct prs_scratch *s = calloc(1, sizeof(*s));
    int r = s ? take_block(ctx, bytes, &s->block) : prs_fail(-ENOMEM, "fused: no memory");
    if (r) {
        free(s);
        return r;
    }
    s->bytes = bytes;
    s->next = ctx->memory->scratch;
    ctx->memory->scratch = s;
    *out = s;
    return 0;
}

int prs_local_share(struct prs_fused *ctx, uint64_t bytes, struct prs_local *out, uint64_t *whole)
{
    uint64_t largest;
    struct prs_scratch *s = find_scratch(ctx->memory, bytes, &largest);
    int r = s ? 0 : add_scratch(ctx, prs_arena_shared(bytes, largest), &s);
    if (r)
        return r;
    s->holders++;
    *out = (struct prs_local){.scratch = s, .at = address_of(ctx, s->block)};
    *whole = s->bytes;
    return 0;
}

static void release_scratch(struct prs_fused *ctx, struct prs_scratch *s)
{
    struct prs_scratch **link = &ctx->memory->scratch;
    if (--s->holders > 0)
        return;
    while (*link != s)
        link = &(*link)->next;
    *link = s->next;
    prs_arena_give_back(&ctx->memory->local, s->block);
    free(s);
}

void prs_local_give_back(struct prs_fused *ctx, struct prs_local *l)
{
    if (l->scratch)
        release_scratch(ctx, l->scratch);
    prs_arena_give_back(&ctx->memory->local, l->block);
    *l = (struct prs_local){.block = NULL};
}
