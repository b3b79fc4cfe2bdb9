/* SPDX-License-Identifier: Apache-2.0 */
/* A chunk is one allocation on every rank. The ranks of a node map it: by pointer inside a process, by CUDA IPC between
 * processes. For ranks of other nodes its pieces become windows of the network. */
#include "fused/core/chunk.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fused/core/memory.h"
#include "fused/core/network.h"
#include "transport/util/error.h"

enum {
    DEVICES_MAX = 64 /* one bit each; access to devices beyond is enabled every time */
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
    return r ? r : prs_chunk_register(ctx, c, use, &o->keys);
}

void prs_chunk_unmap(const struct prs_fused *ctx, struct prs_chunk *c)
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

/* The number of a failed chunk must not stay on any rank, so that chunks count only when all ranks have them. */
int prs_chunk_grow(struct prs_fused *ctx, const uint64_t *more)
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
        int gathered = prs_ranks_allgather(ctx, &mine, all, sizeof(mine));
        r = r ? r : gathered;
    }
    for (uint32_t u = 0; u < PRS_SYMMETRIC_USES && !r; u++)
        if (chunk[u])
            r = map_chunk(ctx, chunk[u], u, all);
    free(all);
    r = prs_ranks_agree(ctx, r); /* if one rank cannot map the memory, none may use it */
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
            (void)cudaFree(chunk[u]->at[0]);
        free(chunk[u]);
    }
    return r;
}
