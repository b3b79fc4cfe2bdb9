/* SPDX-License-Identifier: Apache-2.0 */
/* Symmetric memory: every rank allocates, tells the others where, and maps theirs: by pointer inside a process, by CUDA
 * IPC between processes. */
#include "fused/symmetric.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "util/error.h"

enum { CUDA_BLOCK_BYTES = 2 << 20 };

/* What a rank tells about its allocation. Ranks are of one host, so a process id is a name. */
struct offer {
    int32_t pid, device;
    uint64_t address, bytes;
    cudaIpcMemHandle_t handle;
    int32_t error; /* this rank failed: all give up together instead of one being left waiting */
    int32_t pad;
};

static int allow_access(int device, uint32_t rank, uint32_t peer)
{
    cudaError_t e = cudaDeviceEnablePeerAccess(device, 0);
    if (e == cudaErrorPeerAccessAlreadyEnabled) {
        (void)cudaGetLastError();
        return 0;
    }
    if (e != cudaSuccess) {
        (void)cudaGetLastError();
        return prs_fail(-EXDEV, "fused: rank %u cannot map device %d of rank %u: %s (no NVLink or PCIe peer access?)",
                        rank, device, peer, cudaGetErrorString(e));
    }
    return 0;
}

static int map_peer(struct prs_fused *ctx, struct prs_symmetric *s, uint32_t p, const struct offer *o, uint32_t peer)
{
    cudaError_t e;
    if (o->error != 0)
        return prs_fail(o->error, "fused: rank %u could not allocate %zu bytes of symmetric memory", peer, s->bytes);
    if (o->bytes != s->bytes)
        return prs_fail(-EINVAL, "fused: rank %u allocates %zu symmetric bytes, rank %u %llu: sizes must agree",
                        ctx->config.rank, s->bytes, peer, (unsigned long long)o->bytes);
    if (o->pid == (int32_t)getpid()) {
        s->at[p] = (uint8_t *)(uintptr_t)o->address;
        return o->device == ctx->config.device ? 0 : allow_access(o->device, ctx->config.rank, peer);
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
    /* Whole blocks of CUDA's own: small allocations share one, and an IPC handle opens the block, not the allocation.
     */
    size_t whole = (s->bytes + CUDA_BLOCK_BYTES - 1) / CUDA_BLOCK_BYTES * CUDA_BLOCK_BYTES;
    int r = prs_cuda_check(cudaMalloc((void **)&s->at[0], whole), "cudaMalloc of symmetric memory");
    if (r != 0)
        return r;
    /* Zero before anyone learns the address: flags must not start with what the memory last held. */
    r = prs_cuda_check(cudaMemset(s->at[0], 0, s->bytes), "cudaMemset of symmetric memory");
    if (r == 0)
        r = prs_cuda_check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    if (r == 0 && ctx->config.world > 1)
        r = prs_cuda_check(cudaIpcGetMemHandle(&o->handle, s->at[0]), "cudaIpcGetMemHandle");
    if (r != 0) {
        (void)cudaFree(s->at[0]);
        s->at[0] = NULL;
    }
    return r;
}

static void unmap(struct prs_fused *ctx, struct prs_symmetric *s)
{
    for (uint32_t p = 1; p < ctx->config.world; p++)
        if (s->opened[p])
            (void)cudaIpcCloseMemHandle(s->at[p]);
}

int prs_symmetric_open(struct prs_fused *ctx, size_t bytes, struct prs_symmetric **out)
{
    struct offer mine = {0}, all[PRS_MAX_WORLD];
    struct prs_symmetric *s = calloc(1, sizeof(*s));
    int r = 0;
    uint32_t p = 1;
    if (s == NULL)
        return prs_fail(-ENOMEM, "fused: no memory");
    s->bytes = bytes;
    mine.error = allocate(ctx, s, &mine);
    mine.pid = (int32_t)getpid();
    mine.device = ctx->config.device;
    mine.address = (uint64_t)(uintptr_t)s->at[0];
    mine.bytes = bytes;
    r = prs_context_allgather(ctx, &mine, all, sizeof(mine));
    if (r == 0)
        r = mine.error;
    for (; r == 0 && p < ctx->config.world; p++) {
        uint32_t peer = (ctx->config.rank + p) % ctx->config.world;
        r = map_peer(ctx, s, p, &all[peer], peer);
    }
    if (r != 0)
        goto release;
    s->next = ctx->symmetric;
    ctx->symmetric = s;
    *out = s;
    return 0;

release:
    unmap(ctx, s);
    (void)cudaFree(s->at[0]);
    free(s);
    return r;
}

void prs_symmetric_close(struct prs_fused *ctx, struct prs_symmetric *s)
{
    struct prs_symmetric **link = &ctx->symmetric;
    if (s == NULL)
        return;
    while (*link != s)
        link = &(*link)->next;
    *link = s->next;
    unmap(ctx, s);
    (void)prs_context_barrier(ctx); /* nobody frees what another still maps */
    (void)cudaFree(s->at[0]);
    free(s);
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
    if (r != 0)
        return r;
    r = prs_symmetric_open(ctx, bytes, &s);
    prs_context_leave(before);
    if (r == 0)
        *out = s->at[0];
    return r;
}

int prs_fused_free(struct prs_fused *ctx, void *ptr)
{
    struct prs_symmetric *s = ctx->symmetric;
    int before, r;
    if (ptr == NULL)
        return 0;
    while (s != NULL && s->at[0] != ptr)
        s = s->next;
    if (s == NULL)
        return prs_fail(-EINVAL, "fused: %p is not the start of symmetric memory of rank %u", ptr, ctx->config.rank);
    r = prs_context_enter(ctx, &before);
    if (r != 0)
        return r;
    prs_symmetric_close(ctx, s);
    prs_context_leave(before);
    return 0;
}
