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
    uint8_t **more = realloc(m->local_chunk, (m->local.chunks + 1) * sizeof(*more)), *at;
    uint64_t whole = prs_arena_growth(&m->local, bytes);
    int r;
    if (!more)
        return prs_fail(-ENOMEM, "fused: no memory for the description of a chunk");
    m->local_chunk = more;
    r = prs_cuda_check(cudaMalloc((void **)&at, whole), "cudaMalloc of workspace");
    if (r)
        return r;
    r = prs_arena_add(&m->local, whole);
    if (r)
        (void)cudaFree(at);
    else
        m->local_chunk[m->local.chunks - 1] = at;
    return r;
}

int prs_local_take(struct prs_fused *ctx, uint64_t bytes, uint64_t clean, struct prs_local *out)
{
    struct prs_memory *m = ctx->memory;
    int r = prs_arena_take(&m->local, bytes, &out->block);
    if (r == -ENOSPC) {
        r = grow_local(ctx, bytes);
        if (!r)
            r = prs_arena_take(&m->local, bytes, &out->block);
    }
    if (r)
        return r;
    out->at = m->local_chunk[out->block->chunk] + out->block->at;
    if (clean == 0)
        return 0;
    /* A launch may use any stream, so the zeros must be there when this returns. */
    r = prs_cuda_check(cudaMemsetAsync(out->at, 0, clean, ctx->stream), "cudaMemset of workspace");
    return r ? r : prs_cuda_check(cudaStreamSynchronize(ctx->stream), "cudaMemset of workspace");
}

void prs_local_give_back(struct prs_fused *ctx, struct prs_local *l)
{
    prs_arena_give_back(&ctx->memory->local, l->block);
    *l = (struct prs_local){NULL, NULL};
}
