/* SPDX-License-Identifier: Apache-2.0 */
/* Symmetric memory. A chunk is one allocation on every rank. The ranks of a node map it: by pointer inside a process, by
 * CUDA IPC between processes. For ranks of other nodes its pieces become windows of the network. */
#include "fused/core/symmetric.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fused/core/arena.h"
#include "fused/core/board.h"
#include "fused/core/network.h"
#include "transport/util/clock.h"
#include "transport/util/error.h"

enum {
    DEVICES_MAX = 64, /* one bit each; access to devices beyond is enabled every time */
    POLL_NS = 100000,
};

struct prs_chunk {
    size_t bytes;
    uint8_t *at[PRS_MAX_LOCAL_RANKS];
    bool opened[PRS_MAX_LOCAL_RANKS];  /* [p]: mapped from another process */
    struct prs_region *region;         /* between nodes; NULL otherwise */
    struct prs_window_remote *remotes; /* between nodes: [world] */
};

struct holding {
    bool used, closed;
    struct prs_symmetric *piece[PRS_CALL_NEEDS];
};

struct prs_memory {
    struct prs_arena arena[PRS_SYMMETRIC_USES];
    struct prs_chunk **chunk[PRS_SYMMETRIC_USES]; /* [use]: one for each of the arena's */
    struct prs_symmetric *pieces;
    struct prs_symmetric *cleaning; /* released; zeros are being written. Free after the next collective call */
    struct prs_arena local;
    uint8_t **local_chunk;
    bool closes;                               /* something was closed since the last collective call */
    struct holding holding[PRS_MOST_HOLDINGS]; /* [0] is not used */
};

/* What a rank tells about its new chunks. Inside a node the process id identifies the process. */
struct offer {
    int32_t pid, device;
    uint64_t address, bytes;
    cudaIpcMemHandle_t handle;
    struct prs_keys keys; /* of its region, for other nodes */
    int32_t error;        /* this rank failed: all ranks fail together */
    int32_t pad;
};

struct offers {
    struct offer of[PRS_SYMMETRIC_USES];
};

/* Lets the current device (own) reach the memory of another, once for each pair and process: enabling access twice is
 * an error to CUDA, which tools report. Another library may have enabled it before. */
static int allow_access(int own, int device, uint32_t rank, uint32_t peer)
{
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* ranks may be threads of a process */
    static uint64_t allowed[DEVICES_MAX];                     /* [own]: a bit for each other device */
    bool known = own < DEVICES_MAX && device < DEVICES_MAX;
    cudaError_t e = cudaSuccess;
    pthread_mutex_lock(&mutex);
    if (!known || !(allowed[own] >> device & 1))
        e = cudaDeviceEnablePeerAccess(device, 0);
    if (e == cudaErrorPeerAccessAlreadyEnabled) {
        (void)cudaGetLastError();
        e = cudaSuccess;
    }
    if (known && e == cudaSuccess)
        allowed[own] |= 1ull << device;
    pthread_mutex_unlock(&mutex);
    if (e != cudaSuccess) {
        (void)cudaGetLastError();
        return prs_fail(-EXDEV, "fused: rank %u cannot map device %d of rank %u: %s (no NVLink or PCIe peer access?)",
                        rank, device, peer, cudaGetErrorString(e));
    }
    return 0;
}

/* ---- chunks ---- */
static int check_offer(const struct prs_fused *ctx, uint64_t bytes, const struct offer *o, uint32_t peer)
{
    if (o->error != 0)
        return prs_fail(o->error, "fused: rank %u could not allocate or register %llu bytes of symmetric memory", peer,
                        (unsigned long long)bytes);
    if (o->bytes != bytes)
        return prs_fail(-EINVAL, "fused: rank %u allocates %llu symmetric bytes, rank %u %llu: sizes must agree",
                        ctx->config.rank, (unsigned long long)bytes, peer, (unsigned long long)o->bytes);
    return 0;
}

static int map_peer(struct prs_fused *ctx, struct prs_chunk *c, uint32_t p, const struct offer *o, uint32_t peer)
{
    cudaError_t e;
    if (o->pid == (int32_t)getpid()) {
        c->at[p] = (uint8_t *)(uintptr_t)o->address;
        return o->device == ctx->config.device ? 0
                                               : allow_access(ctx->config.device, o->device, ctx->config.rank, peer);
    }
    e = cudaIpcOpenMemHandle((void **)&c->at[p], o->handle, cudaIpcMemLazyEnablePeerAccess);
    if (e != cudaSuccess) {
        (void)cudaGetLastError();
        return prs_fail(-EXDEV, "fused: rank %u cannot open the memory of rank %u (process %d): %s", ctx->config.rank,
                        peer, o->pid, cudaGetErrorString(e));
    }
    c->opened[p] = true;
    return 0;
}

static int register_chunk(struct prs_fused *ctx, struct prs_chunk *c, enum prs_symmetric_use use, struct offer *o)
{
    int r;
    if (!ctx->network)
        return 0;
    c->remotes = calloc(ctx->config.world, sizeof(*c->remotes));
    if (!c->remotes)
        return prs_fail(-ENOMEM, "fused: no memory for %u ranks", ctx->config.world);
    r = prs_network_register(ctx->network, c->at[0], c->bytes, use == PRS_SYMMETRIC_SIGNALS, &c->region);
    if (!r)
        prs_region_keys(c->region, &o->keys);
    return r;
}

/* Chunks are whole CUDA blocks: small allocations share one, and an IPC handle opens the block, not the allocation. */
static int allocate_chunk(struct prs_fused *ctx, struct prs_chunk *c, enum prs_symmetric_use use, struct offer *o)
{
    int r = prs_cuda_check(cudaMalloc((void **)&c->at[0], c->bytes), "cudaMalloc of symmetric memory");
    if (r)
        c->at[0] = NULL;
    /* Zero the memory before any other rank learns the address. */
    if (!r && use != PRS_SYMMETRIC_DATA)
        r = prs_cuda_check(cudaMemsetAsync(c->at[0], 0, c->bytes, ctx->stream), "cudaMemset of symmetric memory");
    if (!r && use != PRS_SYMMETRIC_DATA)
        r = prs_cuda_check(cudaStreamSynchronize(ctx->stream), "cudaMemset of symmetric memory");
    if (r == 0 && ctx->place.local_ranks > 1)
        r = prs_cuda_check(cudaIpcGetMemHandle(&o->handle, c->at[0]), "cudaIpcGetMemHandle");
    return r ? r : register_chunk(ctx, c, use, o);
}

static void unmap_chunk(const struct prs_fused *ctx, struct prs_chunk *c)
{
    for (uint32_t p = 1; p < ctx->place.local_ranks; p++)
        if (c->opened[p])
            (void)cudaIpcCloseMemHandle(c->at[p]);
    prs_region_release(c->region);
    free(c->remotes);
    c->region = NULL;
    c->remotes = NULL;
}

/* Maps the chunk of every rank of this node, and keeps what windows need. all: [world]. */
static int map_chunk(struct prs_fused *ctx, struct prs_chunk *c, enum prs_symmetric_use use, const struct offers *all)
{
    const struct prs_place *at = &ctx->place;
    int r = 0;
    for (uint32_t i = 0; i < ctx->config.world && r == 0; i++) {
        if (i != at->rank)
            r = check_offer(ctx, c->bytes, &all[i].of[use], i);
        if (c->remotes)
            c->remotes[i] = (struct prs_window_remote){.base = all[i].of[use].address, .keys = all[i].of[use].keys};
    }
    for (uint32_t p = 1; p < at->local_ranks && r == 0; p++) {
        uint32_t peer = prs_place_neighbour(at, p);
        r = map_peer(ctx, c, p, &all[peer].of[use], peer);
    }
    return r;
}

static int keep_chunk(struct prs_memory *m, enum prs_symmetric_use use, struct prs_chunk *c)
{
    struct prs_chunk **more = realloc(m->chunk[use], (m->arena[use].chunks + 1) * sizeof(struct prs_chunk *));
    if (!more)
        return prs_fail(-ENOMEM, "fused: no memory for the description of a chunk");
    m->chunk[use] = more;
    m->chunk[use][m->arena[use].chunks] = c;
    return prs_arena_add(&m->arena[use], c->bytes);
}

/* Collective: adds a chunk to each arena whose more[] is not 0. The number of a failed chunk must not stay on any rank,
 * so that chunks count only when all ranks have them. */
static int grow(struct prs_fused *ctx, const uint64_t *more)
{
    struct prs_chunk *chunk[PRS_SYMMETRIC_USES] = {NULL};
    struct offers mine, *all = calloc(ctx->config.world, sizeof(*all));
    int r = all ? 0 : prs_fail(-ENOMEM, "fused: no memory for the offers of %u ranks", ctx->config.world);
    memset(&mine, 0, sizeof(mine));
    for (uint32_t u = 0; u < PRS_SYMMETRIC_USES && all; u++) {
        struct offer *o = &mine.of[u];
        if (more[u] == 0)
            continue;
        chunk[u] = calloc(1, sizeof(*chunk[u]));
        if (!chunk[u])
            r = prs_fail(-ENOMEM, "fused: no memory for the description of a chunk");
        else
            chunk[u]->bytes = more[u];
        if (!r)
            r = allocate_chunk(ctx, chunk[u], u, o);
        *o = (struct offer){(int32_t)getpid(),
                            ctx->config.device,
                            chunk[u] ? (uint64_t)(uintptr_t)chunk[u]->at[0] : 0,
                            more[u],
                            o->handle,
                            o->keys,
                            r,
                            0};
    }
    if (all) {
        int gathered = prs_context_allgather(ctx, &mine, all, sizeof(mine));
        r = r ? r : gathered;
    }
    for (uint32_t u = 0; u < PRS_SYMMETRIC_USES && !r; u++)
        if (chunk[u])
            r = map_chunk(ctx, chunk[u], u, all);
    free(all);
    r = prs_context_agree(ctx, r); /* if one rank cannot map the memory, none may use it */
    for (uint32_t u = 0; u < PRS_SYMMETRIC_USES && !r; u++)
        if (chunk[u])
            r = keep_chunk(ctx->memory, u, chunk[u]);
    if (!r)
        return 0;
    for (uint32_t u = 0; u < PRS_SYMMETRIC_USES; u++)
        if (chunk[u])
            unmap_chunk(ctx, chunk[u]);
    (void)prs_context_barrier(ctx); /* no rank frees memory that another still maps */
    for (uint32_t u = 0; u < PRS_SYMMETRIC_USES; u++) {
        if (chunk[u])
            (void)cudaFree(chunk[u]->at[0]);
        free(chunk[u]);
    }
    return r;
}

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

/* The last holder is gone on all ranks. */
static void release_piece(struct prs_fused *ctx, struct prs_symmetric *s)
{
    struct prs_memory *m = ctx->memory;
    if (--s->holders > 0)
        return;
    unlink_piece(&m->pieces, s);
    if (s->has_window)
        (void)prs_proxy_window_drop(ctx->network->proxy, s->window);
    if (!s->block) {
        unmap_chunk(ctx, s->chunk);
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
    for (struct prs_symmetric *s = m->pieces; s && need->pool != 0; s = s->next) {
        if (s->pool != need->pool)
            continue;
        *largest = s->bytes > *largest ? s->bytes : *largest;
        if (s->bytes >= bytes && (!best || s->bytes < best->bytes))
            best = s;
    }
    return best;
}

/* A piece of a pool is twice as large as the one before, so that plans that come in order of size need few. */
static uint64_t shared_bytes(uint64_t bytes, uint64_t largest)
{
    return bytes > 2 * largest ? bytes : 2 * largest;
}

/* Takes what is there; adds to more[] what is missing. */
static int take_pieces(struct prs_fused *ctx, const struct prs_need *needs, const uint64_t *bytes, uint32_t count,
                       struct prs_symmetric **pieces, uint64_t *more)
{
    uint64_t largest;
    for (uint32_t i = 0; i < count; i++) {
        struct prs_symmetric *shared = find_shared(ctx->memory, &needs[i], bytes[i], &largest);
        uint64_t take = needs[i].pool != 0 ? shared_bytes(bytes[i], largest) : bytes[i];
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
            r = grow(ctx, more);
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
    m->holding[slot] = (struct holding){.used = true};
    memcpy(m->holding[slot].piece, pieces, count * sizeof(struct prs_symmetric *));
    *holding = slot;
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
    if (m->closes && ctx->network) /* signals that no kernel waited for may still be on their way */
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
        m->holding[i] = (struct holding){.used = false};
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

/* ---- memory of this rank alone ---- */
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

/* ---- the memory of a context that is closed ---- */
struct left_behind {
    struct left_behind *next;
    struct prs_board *board; /* NULL: no other rank could reach the memory */
    int device;
    void *host;
    uint32_t count;
    void *memory[];
};
static pthread_mutex_t left_lock = PTHREAD_MUTEX_INITIALIZER; /* protects left_list */
static struct left_behind *left_list;

static void free_left(struct left_behind *l)
{
    for (uint32_t i = 0; i < l->count; i++)
        (void)cudaFree(l->memory[i]);
    (void)cudaFreeHost(l->host);
    prs_board_close(l->board);
    free(l);
}

/* Only of this device: freeing waits for the kernels of a device, and those of another rank may wait for this one. */
void prs_symmetric_sweep(int device)
{
    struct left_behind *done = NULL;
    pthread_mutex_lock(&left_lock);
    for (struct left_behind **link = &left_list; *link;) {
        struct left_behind *l = *link;
        if (l->device != device || (l->board && !prs_board_all_left(l->board))) {
            link = &l->next;
            continue;
        }
        *link = l->next;
        l->next = done;
        done = l;
    }
    pthread_mutex_unlock(&left_lock);
    while (done) {
        struct left_behind *l = done;
        done = l->next;
        free_left(l);
    }
}

static struct left_behind *collect(struct prs_fused *ctx)
{
    struct prs_memory *m = ctx->memory;
    uint32_t count = m->local.chunks;
    struct left_behind *l;
    for (uint32_t u = 0; u < PRS_SYMMETRIC_USES; u++)
        count += m->arena[u].chunks;
    l = calloc(1, sizeof(*l) + count * sizeof(l->memory[0]));
    if (!l)
        return NULL;
    for (uint32_t u = 0; u < PRS_SYMMETRIC_USES; u++)
        for (uint32_t i = 0; i < m->arena[u].chunks; i++)
            l->memory[l->count++] = m->chunk[u][i]->at[0];
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
            unmap_chunk(ctx, s->chunk);
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
            unmap_chunk(ctx, m->chunk[u][i]);
            free(m->chunk[u][i]);
        }
        free(m->chunk[u]);
        prs_arena_fini(&m->arena[u]);
    }
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
    struct left_behind *left = collect(ctx);
    free_lists(ctx);
    if (ctx->board)
        prs_board_leave(ctx->board);
    if (!left)
        return; /* no host memory: what the others may still write to stays for ever */
    if (patience_ms != 0 && (!ctx->board || wait_for_others(ctx->board, patience_ms))) {
        free_left(left);
        return;
    }
    pthread_mutex_lock(&left_lock);
    left->next = left_list;
    left_list = left;
    pthread_mutex_unlock(&left_lock);
}

/* ---- the caller's allocations ---- */
int prs_fused_alloc(struct prs_fused *ctx, size_t bytes, void **out)
{
    static const struct prs_need need = {PRS_SYMMETRIC_CLEAN, true, 0};
    static const char *const names[] = {"bytes"};
    struct prs_symmetric *s = NULL;
    struct prs_call call = {.kind = PRS_CALL_ALLOC, .need = {bytes}};
    uint32_t holding;
    int before, r = prs_context_enter(ctx, &before);
    if (r)
        return r;
    if (bytes == 0)
        call.error = prs_fail(-EINVAL, "fused: 0 bytes of symmetric memory");
    prs_call_term(&call, bytes);
    r = prs_meet(ctx, &call, names);
    if (!r)
        r = prs_symmetric_hold(ctx, &need, call.need, 1, &s, &holding);
    prs_context_leave(before);
    if (!r) {
        s->lent = true;
        *out = s->at[0];
    }
    return r;
}

/* ---- memory of the caller ---- */
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

/* Collective, between nodes: what windows of the memory need. */
static int exchange_keys(struct prs_fused *ctx, struct prs_chunk *c, const struct offer *mine)
{
    struct offer *all = calloc(ctx->config.world, sizeof(*all));
    int r = all ? prs_context_allgather(ctx, mine, all, sizeof(*mine))
                : prs_fail(-ENOMEM, "fused: no memory for the offers of %u ranks", ctx->config.world);
    for (uint32_t i = 0; i < ctx->config.world && r == 0; i++)
        c->remotes[i] = (struct prs_window_remote){.base = all[i].address, .keys = all[i].keys};
    free(all);
    return r;
}

/* Collective, for memory that is mapped and registered. */
static int hold_import(struct prs_fused *ctx, struct prs_symmetric *s, const struct offer *mine)
{
    struct prs_memory *m = ctx->memory;
    static const char *const names[] = {"bytes"};
    struct prs_call call = {.kind = PRS_CALL_IMPORT, .error = mine->error};
    uint32_t slot;
    int r;
    prs_call_term(&call, s->bytes);
    r = prs_meet(ctx, &call, names);
    if (!r)
        r = find_slot(m, &slot);
    if (!r && ctx->network)
        r = exchange_keys(ctx, s->chunk, mine);
    if (!r && ctx->network)
        r = open_window(ctx, s);
    if (r)
        return r;
    m->holding[slot] = (struct holding){.used = true, .piece = {s}};
    s->next = m->pieces;
    m->pieces = s;
    return 0;
}

int prs_fused_import(struct prs_fused *ctx, void *const *at, size_t bytes)
{
    const struct prs_place *place = &ctx->place;
    struct prs_chunk *c = calloc(1, sizeof(*c));
    struct prs_symmetric *s = calloc(1, sizeof(*s));
    struct offer mine;
    int before, r = prs_context_enter(ctx, &before);
    memset(&mine, 0, sizeof(mine));
    if (!r && (!c || !s))
        r = prs_fail(-ENOMEM, "fused: no memory");
    if (r) {
        free(c);
        free(s);
        return r;
    }
    mine.error = check_import(ctx, at, bytes);
    for (uint32_t p = 0; p < place->local_ranks; p++)
        s->at[p] = c->at[p] = at[(place->local_rank + p) % place->local_ranks];
    s->bytes = c->bytes = bytes;
    s->chunk = c, s->use = PRS_SYMMETRIC_CLEAN, s->holders = 1, s->lent = true;
    mine.address = (uint64_t)(uintptr_t)s->at[0];
    if (!mine.error)
        mine.error = register_chunk(ctx, c, s->use, &mine);
    r = hold_import(ctx, s, &mine);
    if (r) {
        unmap_chunk(ctx, c);
        free(c);
        free(s);
    }
    prs_context_leave(before);
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
            m->holding[i].piece[0]->lent = false; /* no launch may name it any more */
            prs_symmetric_drop(ctx, i);
            return 0;
        }
    }
    return prs_fail(-EINVAL, "fused: %p is not the start of symmetric memory of rank %u", ptr, ctx->config.rank);
}
