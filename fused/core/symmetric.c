/* SPDX-License-Identifier: Apache-2.0 */
/* Symmetric memory. Every rank allocates, tells the others its address, and maps the memory of the ranks of its node:
 * by pointer inside a process, by CUDA IPC between processes. For ranks of other nodes it becomes a window of the
 * network. */
#include "fused/core/symmetric.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fused/core/network.h"
#include "transport/util/error.h"

enum {
    SETTLE_MS = 5000, /* a round trip, if the peers' processes run */
    CUDA_BLOCK_BYTES = 2 << 20,
    DEVICES_MAX = 64, /* one bit each; access to devices beyond is enabled every time */
};

/* What a rank tells about its allocation. Inside a node the process id identifies the process. */
struct offer {
    int32_t pid, device;
    uint64_t address, bytes;
    cudaIpcMemHandle_t handle;
    struct prs_keys keys; /* of its region, for other nodes */
    int32_t error;        /* this rank failed: all ranks fail together */
    int32_t pad;
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

static int check_offer(const struct prs_fused *ctx, const struct prs_symmetric *s, const struct offer *o, uint32_t peer)
{
    if (o->error != 0)
        return prs_fail(o->error, "fused: rank %u could not allocate or register %zu bytes of symmetric memory", peer,
                        s->bytes);
    if (o->bytes != s->bytes)
        return prs_fail(-EINVAL, "fused: rank %u allocates %zu symmetric bytes, rank %u %llu: sizes must agree",
                        ctx->config.rank, s->bytes, peer, (unsigned long long)o->bytes);
    return 0;
}

static int map_peer(struct prs_fused *ctx, struct prs_symmetric *s, uint32_t p, const struct offer *o, uint32_t peer)
{
    cudaError_t e;
    if (o->pid == (int32_t)getpid()) {
        s->at[p] = (uint8_t *)(uintptr_t)o->address;
        return o->device == ctx->config.device ? 0
                                               : allow_access(ctx->config.device, o->device, ctx->config.rank, peer);
    }
    e = cudaIpcOpenMemHandle((void **)&s->at[p], o->handle, cudaIpcMemLazyEnablePeerAccess);
    if (e != cudaSuccess) {
        (void)cudaGetLastError();
        return prs_fail(-EXDEV, "fused: rank %u cannot open the memory of rank %u (process %d): %s", ctx->config.rank,
                        peer, o->pid, cudaGetErrorString(e));
    }
    s->opened[p] = true;
    return 0;
}

static int allocate(struct prs_fused *ctx, struct prs_symmetric *s, struct offer *o)
{
    /* Whole CUDA blocks: small allocations share one, and an IPC handle opens the block, not the allocation. */
    size_t whole = (s->bytes + CUDA_BLOCK_BYTES - 1) / CUDA_BLOCK_BYTES * CUDA_BLOCK_BYTES;
    int r = prs_cuda_check(cudaMalloc((void **)&s->at[0], whole), "cudaMalloc of symmetric memory");
    if (r)
        return r;
    /* Zero the memory before any other rank learns the address: flags must start at 0. */
    r = prs_cuda_check(cudaMemset(s->at[0], 0, s->bytes), "cudaMemset of symmetric memory");
    if (!r)
        r = prs_cuda_check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    if (r == 0 && ctx->place.local_ranks > 1)
        r = prs_cuda_check(cudaIpcGetMemHandle(&o->handle, s->at[0]), "cudaIpcGetMemHandle");
    if (r) {
        (void)cudaFree(s->at[0]);
        s->at[0] = NULL;
    }
    return r;
}

static int register_memory(struct prs_fused *ctx, struct prs_symmetric *s, enum prs_symmetric_use use, struct offer *o)
{
    int r;
    if (!ctx->network || use == PRS_SYMMETRIC_NODE)
        return 0;
    r = prs_network_register(ctx->network, s->at[0], s->bytes, use == PRS_SYMMETRIC_SIGNALS, &s->region);
    if (!r)
        prs_region_keys(s->region, &o->keys);
    return r;
}

/* The window is for ranks of other nodes: kernels reach those of this node through at[]. */
static int open_window(struct prs_fused *ctx, struct prs_symmetric *s, enum prs_symmetric_use use,
                       const struct offer *all)
{
    struct prs_window_options options = {.base = s->at[0], .bytes = s->bytes, .region = s->region};
    struct prs_window_remote *remotes = calloc(ctx->config.world, sizeof(*remotes));
    int r;
    if (!remotes)
        return prs_fail(-ENOMEM, "fused: no memory for %u ranks", ctx->config.world);
    for (uint32_t i = 0; i < ctx->config.world; i++) {
        remotes[i].base = all[i].address;
        remotes[i].keys = all[i].keys;
    }
    options.remotes = remotes;
    options.flags = use == PRS_SYMMETRIC_SIGNALS ? PRS_WINDOW_SIGNALS : 0;
    r = prs_proxy_window(ctx->network->proxy, &options);
    free(remotes);
    s->has_window = r >= 0;
    s->window = r < 0 ? 0 : (uint32_t)r;
    return r < 0 ? r : 0;
}

static int meet_peers(struct prs_fused *ctx, struct prs_symmetric *s, enum prs_symmetric_use use, struct offer *mine)
{
    const struct prs_place *at = &ctx->place;
    struct offer *all = calloc(ctx->config.world, sizeof(*all));
    int r = all ? 0 : prs_fail(-ENOMEM, "fused: no memory for the offers of %u ranks", ctx->config.world);
    mine->pid = (int32_t)getpid();
    mine->device = ctx->config.device;
    mine->address = (uint64_t)(uintptr_t)s->at[0];
    mine->bytes = s->bytes;
    if (!r)
        r = prs_context_allgather(ctx, mine, all, sizeof(*mine));
    if (!r)
        r = mine->error;
    for (uint32_t i = 0; i < ctx->config.world && r == 0; i++)
        if (i != at->rank)
            r = check_offer(ctx, s, &all[i], i);
    for (uint32_t p = 1; p < at->local_ranks && r == 0; p++) {
        uint32_t peer = prs_place_rank(at, at->node, (at->local_rank + p) % at->local_ranks);
        r = map_peer(ctx, s, p, &all[peer], peer);
    }
    if (r == 0 && s->region)
        r = open_window(ctx, s, use, all);
    free(all);
    return prs_context_agree(ctx, r); /* if one rank cannot map the memory, none may use it */
}

/* Collective: no rank frees memory that another still maps or puts to. */
static void release(struct prs_fused *ctx, struct prs_symmetric *s)
{
    for (uint32_t p = 1; p < ctx->place.local_ranks; p++)
        if (s->opened[p])
            (void)cudaIpcCloseMemHandle(s->at[p]);
    if (s->has_window) { /* settle first: signals that no kernel waited for may still be on their way */
        (void)prs_proxy_settle(ctx->network->proxy, SETTLE_MS);
        (void)prs_proxy_window_drop(ctx->network->proxy, s->window);
    }
    (void)prs_context_barrier(ctx);
    prs_region_release(s->region);
    (void)cudaFree(s->at[0]);
    free(s);
}

int prs_symmetric_open(struct prs_fused *ctx, size_t bytes, enum prs_symmetric_use use, struct prs_symmetric **out)
{
    struct offer mine = {0};
    struct prs_symmetric *s = calloc(1, sizeof(*s));
    int r;
    if (!s)
        return prs_fail(-ENOMEM, "fused: no memory");
    s->bytes = bytes;
    mine.error = allocate(ctx, s, &mine);
    if (mine.error == 0)
        mine.error = register_memory(ctx, s, use, &mine);
    r = meet_peers(ctx, s, use, &mine);
    if (r) {
        release(ctx, s);
        return r;
    }
    s->next = ctx->symmetric;
    ctx->symmetric = s;
    *out = s;
    return 0;
}

int prs_symmetric_open_signals(struct prs_fused *ctx, const struct prs_symmetric *data, uint64_t words,
                               struct prs_far *far, struct prs_symmetric **out)
{
    int r = prs_symmetric_open(ctx, words * sizeof(uint64_t), PRS_SYMMETRIC_SIGNALS, out);
    if (r)
        return r;
    far->device = ctx->network->device;
    far->signals = (uint64_t *)(*out)->at[0];
    far->staging_window = data->window;
    far->signal_window = (*out)->window;
    return 0;
}

void prs_symmetric_close(struct prs_fused *ctx, struct prs_symmetric *s)
{
    struct prs_symmetric **link = &ctx->symmetric;
    if (!s)
        return;
    while (*link != s)
        link = &(*link)->next;
    *link = s->next;
    release(ctx, s);
}

const struct prs_symmetric *prs_symmetric_find(const struct prs_fused *ctx, const void *ptr, size_t bytes)
{
    const uint8_t *p = ptr;
    for (const struct prs_symmetric *s = ctx->symmetric; s != NULL; s = s->next)
        if (p >= s->at[0] && p + bytes <= s->at[0] + s->bytes)
            return s;
    return NULL;
}

int prs_fused_alloc(struct prs_fused *ctx, size_t bytes, void **out)
{
    struct prs_symmetric *s;
    int before, r = prs_context_enter(ctx, &before);
    if (r)
        return r;
    r = prs_symmetric_open(ctx, bytes, PRS_SYMMETRIC_DATA, &s);
    prs_context_leave(before);
    if (!r)
        *out = s->at[0];
    return r;
}

int prs_fused_free(struct prs_fused *ctx, void *ptr)
{
    struct prs_symmetric *s = ctx->symmetric;
    int before, r;
    if (!ptr)
        return 0;
    while (s && s->at[0] != ptr)
        s = s->next;
    if (!s)
        return prs_fail(-EINVAL, "fused: %p is not the start of symmetric memory of rank %u", ptr, ctx->config.rank);
    r = prs_context_enter(ctx, &before);
    if (r)
        return r;
    prs_symmetric_close(ctx, s);
    prs_context_leave(before);
    return 0;
}
