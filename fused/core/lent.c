/* SPDX-License-Identifier: Apache-2.0 */
/* Symmetric memory that the caller holds: allocated for the caller, or the caller's own memory, imported. */
#include <errno.h>
#include <stdlib.h>

#include "fused/core/chunk.h"
#include "fused/core/meeting.h"
#include "fused/core/memory.h"
#include "fused/core/network.h"
#include "transport/util/error.h"

int prs_fused_alloc(struct prs_fused *ctx, size_t bytes, void **out)
{
    static const struct prs_need need = {PRS_SYMMETRIC_CLEAN, true, NULL};
    static const char *const names[] = {"bytes"};
    struct prs_symmetric *s = NULL;
    struct prs_call call = {.kind = "allocates symmetric memory", .need = {bytes}};
    uint32_t holding;
    int before, r = prs_cuda_enter(ctx, &before);
    if (r)
        return r;
    if (bytes == 0)
        call.error = prs_fail(-EINVAL, "fused: 0 bytes of symmetric memory");
    prs_call_term(&call, bytes);
    r = prs_meet(ctx, &call, names);
    if (!r)
        r = prs_symmetric_hold(ctx, &need, call.need, 1, &s, &holding);
    prs_cuda_leave(before);
    if (!r) {
        s->lent = true;
        *out = s->at[0];
    }
    return r;
}

static int check_import(const struct prs_fused *ctx, void *const *at, size_t bytes)
{
    if (bytes == 0)
        return prs_fail(-EINVAL, "fused: 0 bytes of memory to import");
    for (uint32_t i = 0; i < ctx->place.local_ranks; i++)
        if (!at[i] || (uintptr_t)at[i] % 16 != 0)
            return prs_fail(-EINVAL, "fused: memory to import of local rank %u is at %p: 16-byte aligned, not NULL", i,
                            at[i]);
    return 0;
}

/* Collective, between nodes: exchanges the keys that windows of the memory need. */
static int exchange_keys(struct prs_fused *ctx, struct prs_chunk *c, const struct prs_keys *keys)
{
    struct prs_window_remote mine = {.base = (uint64_t)(uintptr_t)c->at[0], .keys = *keys};
    return prs_ranks_allgather(ctx, &mine, c->remotes, sizeof(mine));
}

/* Collective. Holds memory that is mapped and registered; error: this rank failed to do that. */
static int hold_import(struct prs_fused *ctx, struct prs_symmetric *s, const struct prs_keys *keys, int error)
{
    static const char *const names[] = {"bytes"};
    struct prs_call call = {.kind = "imports memory", .error = error};
    int r;
    prs_call_term(&call, s->bytes);
    r = prs_meet(ctx, &call, names);
    if (!r && ctx->network)
        r = exchange_keys(ctx, s->chunk, keys);
    return r ? r : prs_symmetric_adopt(ctx, s);
}

int prs_fused_import(struct prs_fused *ctx, void *const *at, size_t bytes)
{
    const struct prs_place *place = &ctx->place;
    struct prs_chunk *c = calloc(1, sizeof(*c));
    struct prs_symmetric *s = calloc(1, sizeof(*s));
    struct prs_keys keys = {0};
    int before, error, r = prs_cuda_enter(ctx, &before);
    if (!r && (!c || !s))
        r = prs_fail(-ENOMEM, "fused: no memory");
    if (r) {
        free(c);
        free(s);
        return r;
    }
    error = check_import(ctx, at, bytes);
    for (uint32_t p = 0; p < place->local_ranks; p++)
        s->at[p] = c->at[p] = at[(place->local_rank + p) % place->local_ranks];
    s->bytes = c->bytes = bytes;
    s->chunk = c, s->use = PRS_SYMMETRIC_CLEAN, s->holders = 1, s->lent = true;
    if (!error)
        error = prs_chunk_register(ctx, c, s->use, &keys);
    r = hold_import(ctx, s, &keys, error);
    if (r) {
        prs_chunk_unmap(ctx, c);
        free(c);
        free(s);
    }
    prs_cuda_leave(before);
    return r;
}

int prs_fused_free(struct prs_fused *ctx, void *ptr)
{
    struct prs_memory *m = ctx->memory;
    if (!ptr)
        return 0;
    for (uint32_t i = 1; i < PRS_MOST_HOLDINGS; i++) {
        const struct prs_symmetric *s = m->holding[i].piece[0];
        if (m->holding[i].used && !m->holding[i].closed && s && s->at[0] == ptr && s->lent) {
            m->holding[i].piece[0]->lent = false; /* no launch may use the memory any more */
            prs_symmetric_drop(ctx, i);
            return 0;
        }
    }
    return prs_fail(-EINVAL, "fused: %p is not the start of symmetric memory of rank %u", ptr, ctx->config.rank);
}
