/* SPDX-License-Identifier: Apache-2.0 */
/* Symmetric memory: pieces of chunks, and who holds them. */
#include "fused/core/symmetric.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fused/core/board.h"
#include "fused/core/chunk.h"
#include "fused/core/left.h"
#include "fused/core/memory.h"
#include "fused/core/network.h"
#include "fused/core/sleep.h"
#include "transport/util/clock.h"
#include "transport/util/error.h"

enum { POLL_NS = 100000 };

/* ---- pieces ---- */
/* The window is for ranks of other nodes: kernels reach those of this node through at[]. */
static int open_window(struct prs_fused *ctx, struct prs_symmetric *s)
{
    struct prs_window_options options = {.base = s->at[0], .bytes = s->bytes, .region = s->chunk->region};
    struct prs_window_remote *remotes = calloc(ctx->config.world, sizeof(*remotes));
    uint64_t offset = (uint64_t)(s->at[0] - s->chunk->at[0]);
    int r;
    if (!remotes)
        return prs_fail(-ENOMEM, "fused: no memory for %u ranks", ctx->config.world);
    for (uint32_t i = 0; i < ctx->config.world; i++) {
        remotes[i] = s->chunk->remotes[i];
        remotes[i].base += offset;
    }
    options.remotes = remotes;
    options.flags = s->use == PRS_SYMMETRIC_SIGNALS ? PRS_WINDOW_SIGNALS : 0;
    r = prs_proxy_window(ctx->network->proxy, &options);
    free(remotes);
    s->has_window = r >= 0;
    s->window = r < 0 ? 0 : (uint32_t)r;
    return r < 0 ? r : 0;
}

static void unlink_piece(struct prs_symmetric **list, struct prs_symmetric *s)
{
    while (*list != s)
        list = &(*list)->next;
    *list = s->next;
}

static void give_back(struct prs_fused *ctx, struct prs_symmetric *s)
{
    prs_arena_give_back(&ctx->memory->arena[s->use], s->block);
    free(s);
}

/* Called when the last holder is gone on all ranks. */
static void release_piece(struct prs_fused *ctx, struct prs_symmetric *s)
{
    struct prs_memory *m = ctx->memory;
    if (--s->holders > 0)
        return;
    unlink_piece(&m->pieces, s);
    if (s->has_window)
        (void)prs_proxy_window_drop(ctx->network->proxy, s->window);
    if (!s->block) {
        prs_chunk_unmap(ctx, s->chunk);
        free(s->chunk);
        free(s);
    } else if (s->use == PRS_SYMMETRIC_DATA) {
        give_back(ctx, s);
    } else {
        /* Other ranks may write to this memory as soon as it is taken again, so it must be zero on all ranks before
         * any rank can take it: all wait for the zeros before they make the next collective call. */
        (void)prs_cuda_check(cudaMemsetAsync(s->at[0], 0, s->bytes, ctx->stream), "cudaMemset of symmetric memory");
        s->next = m->cleaning;
        m->cleaning = s;
    }
}

/* 0, -ENOSPC (not logged) or -errno. */
static int take_piece(struct prs_fused *ctx, const struct prs_need *need, uint64_t bytes, struct prs_symmetric **out)
{
    struct prs_memory *m = ctx->memory;
    struct prs_symmetric *s;
    struct prs_block *block;
    int r = prs_arena_take(&m->arena[need->use], bytes, &block);
    if (r)
        return r;
    s = calloc(1, sizeof(*s));
    if (!s) {
        prs_arena_give_back(&m->arena[need->use], block);
        return prs_fail(-ENOMEM, "fused: no memory");
    }
    s->bytes = bytes, s->use = need->use, s->pool = need->pool, s->block = block, s->holders = 1;
    s->chunk = m->chunk[need->use][block->chunk];
    for (uint32_t p = 0; p < ctx->place.local_ranks; p++)
        s->at[p] = s->chunk->at[p] + block->at;
    s->next = m->pieces;
    m->pieces = s;
    *out = s;
    return need->far && ctx->network ? open_window(ctx, s) : 0;
}

/* The smallest piece of the pool that is large enough, or NULL. *largest: of the pool. */
static struct prs_symmetric *find_shared(const struct prs_memory *m, const struct prs_need *need, uint64_t bytes,
                                         uint64_t *largest)
{
    struct prs_symmetric *best = NULL;
    *largest = 0;
    for (struct prs_symmetric *s = m->pieces; s && need->pool; s = s->next) {
        if (!s->pool || strcmp(s->pool, need->pool) != 0)
            continue;
        *largest = s->bytes > *largest ? s->bytes : *largest;
        if (s->bytes >= bytes && (!best || s->bytes < best->bytes))
            best = s;
    }
    return best;
}

/* Takes the pieces that there is room for; adds the missing bytes to more[]. */
static int take_pieces(struct prs_fused *ctx, const struct prs_need *needs, const uint64_t *bytes, uint32_t count,
                       struct prs_symmetric **pieces, uint64_t *more)
{
    uint64_t largest;
    for (uint32_t i = 0; i < count; i++) {
        struct prs_symmetric *shared = find_shared(ctx->memory, &needs[i], bytes[i], &largest);
        uint64_t take = needs[i].pool ? prs_arena_shared(bytes[i], largest) : bytes[i];
        int r;
        if (bytes[i] == 0 || pieces[i])
            continue;
        if (shared) {
            shared->holders++;
            pieces[i] = shared;
            continue;
        }
        r = take_piece(ctx, &needs[i], take, &pieces[i]);
        if (r == -ENOSPC)
            more[needs[i].use] += (take + PRS_ARENA_ALIGNMENT - 1) / PRS_ARENA_ALIGNMENT * PRS_ARENA_ALIGNMENT;
        else if (r)
            return r;
    }
    return 0;
}

/* The lowest number of a holding that is free: the same on all ranks. */
static int find_slot(const struct prs_memory *m, uint32_t *slot)
{
    for (*slot = 1; *slot < PRS_MOST_HOLDINGS; ++*slot)
        if (!m->holding[*slot].used)
            return 0;
    return prs_fail(-ENOMEM, "fused: a context holds at most %d plans and allocations", PRS_MOST_HOLDINGS - 1);
}

int prs_symmetric_hold(struct prs_fused *ctx, const struct prs_need *needs, const uint64_t *bytes, uint32_t count,
                       struct prs_symmetric **pieces, uint32_t *holding)
{
    struct prs_memory *m = ctx->memory;
    uint64_t more[PRS_SYMMETRIC_USES] = {0};
    uint32_t slot;
    int r = find_slot(m, &slot);
    *holding = 0;
    if (r)
        return r;
    r = take_pieces(ctx, needs, bytes, count, pieces, more);
    for (uint32_t u = 0; u < PRS_SYMMETRIC_USES && !r; u++)
        if (more[u] != 0) {
            for (; u < PRS_SYMMETRIC_USES; u++)
                more[u] = more[u] == 0 ? 0 : prs_arena_growth(&m->arena[u], more[u]);
            r = prs_chunk_grow(ctx, more);
        }
    memset(more, 0, sizeof(more));
    if (!r)
        r = take_pieces(ctx, needs, bytes, count, pieces, more);
    for (uint32_t u = 0; u < PRS_SYMMETRIC_USES && !r; u++)
        if (more[u] != 0)
            r = prs_fail(-ENOMEM, "fused: %llu bytes of symmetric memory do not fit the chunk that was made for them",
                         (unsigned long long)more[u]);
    if (r) {
        for (uint32_t i = 0; i < count; i++)
            if (pieces[i])
                release_piece(ctx, pieces[i]);
        return r;
    }
    m->holding[slot] = (struct prs_holding){.used = true};
    memcpy(m->holding[slot].piece, pieces, count * sizeof(struct prs_symmetric *));
    *holding = slot;
    return 0;
}

int prs_symmetric_adopt(struct prs_fused *ctx, struct prs_symmetric *s)
{
    struct prs_memory *m = ctx->memory;
    uint32_t slot;
    int r = find_slot(m, &slot);
    if (!r && ctx->network)
        r = open_window(ctx, s);
    if (r)
        return r;
    m->holding[slot] = (struct prs_holding){.used = true, .piece = {s}};
    s->next = m->pieces;
    m->pieces = s;
    return 0;
}

void prs_symmetric_drop(struct prs_fused *ctx, uint32_t holding)
{
    if (holding == 0)
        return;
    ctx->memory->holding[holding].closed = true;
    ctx->memory->closes = true;
}

int prs_symmetric_report(struct prs_fused *ctx, uint8_t *closed)
{
    struct prs_memory *m = ctx->memory;
    memset(closed, 0, PRS_MOST_HOLDINGS / 8);
    for (uint32_t i = 1; i < PRS_MOST_HOLDINGS; i++)
        if (m->holding[i].closed)
            closed[i / 8] |= (uint8_t)(1u << i % 8);
    if (m->closes && ctx->network) /* signals that no kernel waited for may still be in flight */
        prs_network_settle(ctx->network);
    m->closes = false;
    return !m->cleaning ? 0 : prs_cuda_check(cudaStreamSynchronize(ctx->stream), "cudaMemset of symmetric memory");
}

void prs_symmetric_release(struct prs_fused *ctx, const uint8_t *closed)
{
    struct prs_memory *m = ctx->memory;
    while (m->cleaning) {
        struct prs_symmetric *s = m->cleaning;
        m->cleaning = s->next;
        give_back(ctx, s);
    }
    for (uint32_t i = 1; i < PRS_MOST_HOLDINGS; i++) {
        if (!(closed[i / 8] >> i % 8 & 1))
            continue;
        for (uint32_t k = 0; k < PRS_CALL_NEEDS; k++)
            if (m->holding[i].piece[k])
                release_piece(ctx, m->holding[i].piece[k]);
        m->holding[i] = (struct prs_holding){.used = false};
    }
}

void prs_symmetric_far(const struct prs_fused *ctx, const struct prs_symmetric *data,
                       const struct prs_symmetric *signals, struct prs_far *far)
{
    far->device = ctx->network->device;
    far->signals = (uint64_t *)signals->at[0];
    far->staging_window = data->window;
    far->signal_window = signals->window;
}

const struct prs_symmetric *prs_symmetric_find(const struct prs_fused *ctx, const void *ptr, size_t bytes)
{
    const uint8_t *p = ptr;
    for (const struct prs_symmetric *s = ctx->memory->pieces; s != NULL; s = s->next)
        if (s->lent && p >= s->at[0] && p + bytes <= s->at[0] + s->bytes)
            return s;
    return NULL;
}

void prs_fused_memory(const struct prs_fused *ctx, struct prs_fused_memory *memory)
{
    const struct prs_memory *m = ctx->memory;
    *memory = (struct prs_fused_memory){.held = prs_arena_held(&m->local), .used = prs_arena_used(&m->local)};
    memory->saved = prs_sleep_saved(m);
    for (uint32_t u = 0; u < PRS_SYMMETRIC_USES; u++) {
        memory->held += prs_arena_held(&m->arena[u]);
        memory->used += prs_arena_used(&m->arena[u]);
    }
    if (m->asleep)
        memory->held = 0;
}

/* ---- the memory of a context that is closed ---- */
static struct prs_left *collect(struct prs_fused *ctx)
{
    struct prs_memory *m = ctx->memory;
    uint32_t count = m->local.chunks;
    struct prs_left *l;
    for (uint32_t u = 0; u < PRS_SYMMETRIC_USES; u++)
        count += m->arena[u].chunks;
    l = calloc(1, sizeof(*l) + count * sizeof(l->memory[0]));
    if (!l)
        return NULL;
    for (uint32_t u = 0; u < PRS_SYMMETRIC_USES; u++)
        for (uint32_t i = 0; i < m->arena[u].chunks; i++)
            l->memory[l->count++] = m->chunk[u][i]->own;
    for (uint32_t i = 0; i < m->local.chunks; i++)
        l->memory[l->count++] = m->local_chunk[i];
    l->device = ctx->config.device;
    l->host = ctx->fault;
    l->board = ctx->board;
    return l;
}

static void free_lists(struct prs_fused *ctx)
{
    struct prs_memory *m = ctx->memory;
    while (m->pieces) {
        struct prs_symmetric *s = m->pieces;
        m->pieces = s->next;
        if (!s->block) {
            prs_chunk_unmap(ctx, s->chunk);
            free(s->chunk);
        }
        free(s);
    }
    while (m->cleaning) {
        struct prs_symmetric *s = m->cleaning;
        m->cleaning = s->next;
        free(s);
    }
    for (uint32_t u = 0; u < PRS_SYMMETRIC_USES; u++) {
        for (uint32_t i = 0; i < m->arena[u].chunks; i++) {
            prs_chunk_unmap(ctx, m->chunk[u][i]);
            free(m->chunk[u][i]);
        }
        free(m->chunk[u]);
        prs_arena_fini(&m->arena[u]);
    }
    while (m->scratch) {
        struct prs_scratch *s = m->scratch;
        m->scratch = s->next;
        free(s);
    }
    prs_sleep_forget(m);
    free(m->local_chunk);
    prs_arena_fini(&m->local);
    free(m);
    ctx->memory = NULL;
}

static bool wait_for_others(const struct prs_board *board, uint32_t patience_ms)
{
    static const struct timespec pause = {.tv_nsec = POLL_NS};
    uint64_t end = prs_clock_ns() + (uint64_t)patience_ms * 1000000;
    bool left;
    while (!(left = prs_board_all_left(board)) && prs_clock_ns() < end)
        (void)nanosleep(&pause, NULL);
    return left;
}

int prs_symmetric_open(struct prs_fused *ctx)
{
    ctx->memory = calloc(1, sizeof(*ctx->memory));
    return ctx->memory ? 0 : prs_fail(-ENOMEM, "fused: no memory for the arenas of a context");
}

void prs_symmetric_close(struct prs_fused *ctx, uint32_t patience_ms)
{
    struct prs_left *left = collect(ctx);
    free_lists(ctx);
    if (ctx->board)
        prs_board_leave(ctx->board);
    if (!left)
        return; /* no host memory: memory that other ranks may still write to is never freed */
    if (patience_ms != 0 && (!ctx->board || wait_for_others(ctx->board, patience_ms))) {
        prs_left_free(left);
        return;
    }
    prs_left_keep(left);
}
