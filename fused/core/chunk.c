/* SPDX-License-Identifier: Apache-2.0 */
/* A chunk is one allocation on every rank. The ranks of a node map it: by pointer inside a process, by CUDA IPC between
 * processes, or by files where the memory can be given back. For ranks of other nodes its pieces become windows of the
 * network. */
#include "fused/core/chunk.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fused/core/memory.h"
#include "fused/core/network.h"
#include "transport/host/fd_pass.h"
#include "transport/util/error.h"

enum {
    DEVICES_MAX = 64 /* one bit each; access to devices with higher numbers is enabled every time */
};

/* What a rank tells the others about its new chunks. Inside a node the process id identifies the process. */
struct offer {
    int32_t pid, device;
    uint64_t address, bytes;
    cudaIpcMemHandle_t handle;
    struct prs_fd_pass_address files; /* where to ask for its file, if the context sleeps */
    struct prs_keys keys;             /* keys of its region, for other nodes */
    int32_t error;                    /* this rank failed: all ranks fail together */
    int32_t pad;
};

struct offers {
    struct offer of[PRS_SYMMETRIC_USES];
};

/* Files of a chunk in a context that sleeps, kept while ranks in other processes map them. -1: none. */
struct gift {
    struct prs_fd_pass pass;
    int file;                     /* that of this rank's memory */
    int got[PRS_MAX_LOCAL_RANKS]; /* [p] */
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

/* file: the file of the memory, if the context sleeps and the rank is in another process. */
static int map_peer(struct prs_fused *ctx, struct prs_chunk *c, uint32_t p, const struct offer *o, uint32_t peer,
                    int file)
{
    int own = ctx->config.device;
    cudaError_t e;
    if (o->pid == (int32_t)getpid()) {
        c->at[p] = (uint8_t *)(uintptr_t)o->address;
        if (o->device == own)
            return 0;
        return c->own.sleeps ? prs_span_allow(c->at[p], c->own.reserved, own)
                             : allow_access(own, o->device, ctx->config.rank, peer);
    }
    if (c->own.sleeps) {
        int r = prs_span_import(&c->mapped[p], file, c->bytes, own);
        c->at[p] = c->mapped[p].at;
        return r;
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

int prs_chunk_register(struct prs_fused *ctx, struct prs_chunk *c, enum prs_symmetric_use use, struct prs_keys *keys)
{
    int r;
    if (!ctx->network)
        return 0;
    c->remotes = calloc(ctx->config.world, sizeof(*c->remotes));
    if (!c->remotes)
        return prs_fail(-ENOMEM, "fused: no memory for %u ranks", ctx->config.world);
    r = prs_network_register(ctx->network, c->at[0], c->bytes, use == PRS_SYMMETRIC_SIGNALS, &c->region);
    if (!r)
        prs_region_keys(c->region, keys);
    return r;
}

/* Opens the file or handle by which other ranks can map this rank's memory. */
static int offer_file(const struct prs_chunk *c, struct gift *g, struct offer *o)
{
    int r = prs_span_export(&c->own, &g->file);
    if (!r)
        r = prs_fd_pass_open(&g->pass);
    o->files = g->pass.address;
    return r;
}

/* Chunks are whole CUDA blocks, because small allocations share a block, and an IPC handle opens the block, not the
 * allocation. */
static int allocate_chunk(struct prs_fused *ctx, struct prs_chunk *c, enum prs_symmetric_use use, struct gift *g,
                          struct offer *o)
{
    int r = c->own.at ? prs_span_wake(&c->own, ctx->config.device)
                      : prs_span_take(&c->own, c->bytes, ctx->config.sleeps != 0);
    c->at[0] = c->own.at;
    /* Zero the memory before any other rank learns the address. */
    if (!r && use != PRS_SYMMETRIC_DATA)
        r = prs_cuda_check(cudaMemsetAsync(c->at[0], 0, c->bytes, ctx->stream), "cudaMemset of symmetric memory");
    if (!r && use != PRS_SYMMETRIC_DATA)
        r = prs_cuda_check(cudaStreamSynchronize(ctx->stream), "cudaMemset of symmetric memory");
    if (r == 0 && ctx->place.local_ranks > 1 && c->own.sleeps)
        r = offer_file(c, g, o);
    else if (r == 0 && ctx->place.local_ranks > 1)
        r = prs_cuda_check(cudaIpcGetMemHandle(&o->handle, c->at[0]), "cudaIpcGetMemHandle");
    return r ? r : prs_chunk_register(ctx, c, use, &o->keys);
}

void prs_chunk_unmap(const struct prs_fused *ctx, struct prs_chunk *c)
{
    for (uint32_t p = 1; p < ctx->place.local_ranks; p++) {
        if (c->opened[p])
            (void)cudaIpcCloseMemHandle(c->at[p]);
        prs_span_drop(&c->mapped[p]);
    }
    prs_region_release(c->region);
    free(c->remotes);
    c->region = NULL;
    c->remotes = NULL;
}

/* Finds the ranks of this node in other processes, as indices p of prs_chunk.at[]. Returns how many. */
static uint32_t find_apart(const struct prs_fused *ctx, const struct offers *all, enum prs_symmetric_use use,
                           uint32_t *apart)
{
    uint32_t count = 0;
    for (uint32_t p = 1; p < ctx->place.local_ranks; p++)
        if (all[prs_place_neighbour(&ctx->place, p)].of[use].pid != (int32_t)getpid())
            apart[count++] = p;
    return count;
}

/* Collective: gets the files of a chunk from the other processes. All of them take part, because all have seen the same
 * offers. */
static int exchange_files(const struct prs_fused *ctx, struct gift *g, enum prs_symmetric_use use,
                          const struct offers *all)
{
    struct prs_fd_pass_address addresses[PRS_MAX_LOCAL_RANKS];
    const int mine[PRS_FD_PASS_FILES] = {g->file, g->file};
    uint32_t apart[PRS_MAX_LOCAL_RANKS], count = find_apart(ctx, all, use, apart);
    int got[PRS_MAX_LOCAL_RANKS][PRS_FD_PASS_FILES], r;
    for (uint32_t i = 0; i < count; i++)
        addresses[i] = all[prs_place_neighbour(&ctx->place, apart[i])].of[use].files;
    r = prs_fd_pass_exchange(&g->pass, mine, addresses, count, got, ctx->config.timeout_ms);
    for (uint32_t i = 0; i < count && !r; i++) {
        g->got[apart[i]] = got[i][0];
        (void)close(got[i][1]);
    }
    return r;
}

static int check_offers(struct prs_fused *ctx, const struct prs_chunk *c, enum prs_symmetric_use use,
                        const struct offers *all)
{
    int r = 0;
    for (uint32_t i = 0; i < ctx->config.world && r == 0; i++)
        if (i != ctx->place.rank)
            r = check_offer(ctx, c->bytes, &all[i].of[use], i);
    return r;
}

/* Maps the chunk of every rank of this node, and keeps what windows need. all: [world]. */
static int map_chunk(struct prs_fused *ctx, struct prs_chunk *c, enum prs_symmetric_use use, const struct gift *g,
                     const struct offers *all)
{
    const struct prs_place *at = &ctx->place;
    int r = 0;
    for (uint32_t i = 0; i < ctx->config.world && c->remotes; i++)
        c->remotes[i] = (struct prs_window_remote){.base = all[i].of[use].address, .keys = all[i].of[use].keys};
    for (uint32_t p = 1; p < at->local_ranks && r == 0; p++) {
        uint32_t peer = prs_place_neighbour(at, p);
        r = map_peer(ctx, c, p, &all[peer].of[use], peer, g->got[p]);
    }
    return r;
}

static void close_gift(struct gift *g)
{
    prs_fd_pass_close(&g->pass);
    if (g->file >= 0)
        (void)close(g->file);
    for (uint32_t p = 0; p < PRS_MAX_LOCAL_RANKS; p++)
        if (g->got[p] >= 0)
            (void)close(g->got[p]);
}

/* Allocates this rank's part of the chunks, unless it has failed already. */
static int offer_chunks(struct prs_fused *ctx, struct prs_chunk *const *chunk, int r, struct gift *gift,
                        struct offers *mine)
{
    memset(mine, 0, sizeof(*mine));
    for (uint32_t u = 0; u < PRS_SYMMETRIC_USES; u++) {
        struct offer *o = &mine->of[u];
        o->error = r;
        if (!chunk[u])
            continue;
        if (!r)
            r = allocate_chunk(ctx, chunk[u], u, &gift[u], o);
        o->pid = (int32_t)getpid();
        o->device = ctx->config.device;
        o->address = (uint64_t)(uintptr_t)chunk[u]->at[0];
        o->bytes = chunk[u]->bytes;
        o->error = r;
    }
    return r;
}

int prs_chunk_make(struct prs_fused *ctx, struct prs_chunk *const *chunk, int error)
{
    struct offers mine, *all = calloc(ctx->config.world, sizeof(*all));
    struct gift gift[PRS_SYMMETRIC_USES];
    bool files = ctx->config.sleeps != 0 && ctx->place.local_ranks > 1;
    int r = all ? 0 : prs_fail(-ENOMEM, "fused: no memory for the offers of %u ranks", ctx->config.world);
    for (uint32_t u = 0; u < PRS_SYMMETRIC_USES; u++) {
        gift[u] = (struct gift){.pass.listener = -1, .file = -1};
        memset(gift[u].got, 0xff, sizeof(gift[u].got));
    }
    if (all) {
        int gathered;
        r = offer_chunks(ctx, chunk, error, gift, &mine);
        gathered = prs_ranks_allgather(ctx, &mine, all, sizeof(mine));
        r = r ? r : gathered;
    }
    for (uint32_t u = 0; u < PRS_SYMMETRIC_USES && !r; u++)
        r = chunk[u] ? check_offers(ctx, chunk[u], u, all) : 0;
    for (uint32_t u = 0; u < PRS_SYMMETRIC_USES && !r && files; u++)
        r = chunk[u] ? exchange_files(ctx, &gift[u], u, all) : 0;
    for (uint32_t u = 0; u < PRS_SYMMETRIC_USES && !r; u++)
        r = chunk[u] ? map_chunk(ctx, chunk[u], u, &gift[u], all) : 0;
    for (uint32_t u = 0; u < PRS_SYMMETRIC_USES; u++)
        close_gift(&gift[u]);
    free(all);
    return prs_ranks_agree(ctx, r); /* if one rank cannot map the memory, none may use it */
}

int prs_chunk_sleep(const struct prs_fused *ctx, struct prs_chunk *c)
{
    int r = prs_span_sleep(&c->own);
    for (uint32_t p = 1; p < ctx->place.local_ranks; p++) {
        int mapped = prs_span_sleep(&c->mapped[p]);
        r = r ? r : mapped;
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

/* The number of a failed chunk must not stay on any rank, so that chunks count only when all ranks have them. */
int prs_chunk_grow(struct prs_fused *ctx, const uint64_t *more)
{
    struct prs_chunk *chunk[PRS_SYMMETRIC_USES] = {NULL};
    int r = 0;
    for (uint32_t u = 0; u < PRS_SYMMETRIC_USES; u++) {
        if (more[u] == 0)
            continue;
        chunk[u] = calloc(1, sizeof(*chunk[u]));
        if (chunk[u])
            chunk[u]->bytes = more[u];
        else
            r = prs_fail(-ENOMEM, "fused: no memory for the description of a chunk");
    }
    r = prs_chunk_make(ctx, chunk, r);
    for (uint32_t u = 0; u < PRS_SYMMETRIC_USES && !r; u++)
        if (chunk[u])
            r = keep_chunk(ctx->memory, u, chunk[u]);
    if (!r)
        return 0;
    for (uint32_t u = 0; u < PRS_SYMMETRIC_USES; u++)
        if (chunk[u])
            prs_chunk_unmap(ctx, chunk[u]);
    (void)prs_ranks_barrier(ctx); /* no rank frees memory that another still maps */
    for (uint32_t u = 0; u < PRS_SYMMETRIC_USES; u++) {
        if (chunk[u])
            prs_span_drop(&chunk[u]->own);
        free(chunk[u]);
    }
    return r;
}
