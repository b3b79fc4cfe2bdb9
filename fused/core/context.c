/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/core/context.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "fused/core/network.h"
#include "transport/util/error.h"
#include "transport/util/node.h"

enum { DEFAULT_TIMEOUT_MS = 600000 }; /* as long as NCCL's watchdog in torch waits */

int prs_cuda_check(cudaError_t e, const char *what)
{
    if (e == cudaSuccess)
        return 0;
    (void)cudaGetLastError(); /* the caller's next call must not report this failure again */
    return prs_fail(e == cudaErrorMemoryAllocation ? -ENOMEM : -EIO, "%s failed: %s", what, cudaGetErrorString(e));
}

int prs_context_enter(struct prs_fused *ctx, int *before)
{
    int r = prs_cuda_check(cudaGetDevice(before), "cudaGetDevice");
    if (r == 0 && *before != ctx->config.device)
        r = prs_cuda_check(cudaSetDevice(ctx->config.device), "cudaSetDevice");
    return r;
}

void prs_context_leave(int before)
{
    (void)cudaSetDevice(before);
}

int prs_context_allgather(struct prs_fused *ctx, const void *mine, void *all, size_t bytes)
{
    int r;
    if (ctx->config.world == 1) {
        memcpy(all, mine, bytes);
        return 0;
    }
    r = ctx->config.allgather(ctx->config.user, mine, all, bytes);
    if (r > 0) /* MPI and others return positive error codes */
        return prs_fail(-EIO, "rank %u: the caller's allgather of %zu bytes failed: it returned %d", ctx->config.rank,
                        bytes, r);
    return r == 0 ? 0 : prs_fail(r, "rank %u: the caller's allgather of %zu bytes failed", ctx->config.rank, bytes);
}

int prs_context_barrier(struct prs_fused *ctx)
{
    return prs_context_agree(ctx, 0);
}

int prs_context_agree(struct prs_fused *ctx, int mine)
{
    int32_t given = mine, *all = calloc(ctx->config.world, sizeof(*all));
    int r;
    if (!all)
        return prs_fail(-ENOMEM, "fused: no memory for the results of %u ranks", ctx->config.world);
    r = prs_context_allgather(ctx, &given, all, sizeof(given));
    for (uint32_t i = 0; i < ctx->config.world && r == 0; i++)
        if (all[i] != 0)
            r = mine != 0 ? all[i] : prs_fail(all[i], "fused: rank %u failed (%d): its own error says why", i, all[i]);
    free(all);
    return r;
}

static int check_config(const struct prs_fused_config *c)
{
    if (c->world < 1 || c->world > PRS_CMD_PEERS || c->rank >= c->world)
        return prs_fail(-EINVAL, "fused: rank %u of world %u is not possible (at most %u ranks)", c->rank, c->world,
                        PRS_CMD_PEERS);
    if (c->world > 1 && !c->allgather)
        return prs_fail(-EINVAL, "fused: world %u needs an allgather callback", c->world);
    return 0;
}

static int check_device(struct prs_fused *ctx)
{
    int major = 0, minor = 0, sms = 0, device = ctx->config.device;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
        return prs_fail(-ENODEV, "fused: CUDA device %d cannot be queried: %s", device,
                        cudaGetErrorString(cudaGetLastError()));
    if (major != 9 || minor != 0)
        return prs_fail(-ENODEV, "fused: device %d has compute capability %d.%d; the kernels need 9.0 (Hopper)", device,
                        major, minor);
    ctx->sms = (uint32_t)sms;
    return 0;
}

static int open_fault(struct prs_fused *ctx)
{
    int r = prs_cuda_check(cudaHostAlloc((void **)&ctx->fault, sizeof(*ctx->fault), cudaHostAllocMapped),
                           "cudaHostAlloc of the fault record");
    if (r)
        return r;
    memset(ctx->fault, 0, sizeof(*ctx->fault));
    r = prs_cuda_check(cudaHostGetDevicePointer((void **)&ctx->fault_device, ctx->fault, 0),
                       "cudaHostGetDevicePointer");
    return r;
}

/* What ranks tell each other first. */
struct hello {
    uint64_t node, device; /* device: its PCI slot; CUDA's numbers differ between processes */
    int32_t error;         /* this rank failed: all ranks fail together */
    int32_t pad;
};

static uint64_t pci_slot(int device)
{
    static const enum cudaDeviceAttr parts[] = {cudaDevAttrPciDomainId, cudaDevAttrPciBusId, cudaDevAttrPciDeviceId};
    uint64_t slot = 0;
    for (int i = 0; i < 3; i++) {
        int part = 0;
        if (cudaDeviceGetAttribute(&part, parts[i], device) != cudaSuccess)
            (void)cudaGetLastError(); /* no device: check_device() has reported it */
        slot = slot << 16 | ((uint64_t)part & 0xffff);
    }
    return slot;
}

static bool share_device(const struct hello *all, uint32_t world)
{
    for (uint32_t i = 0; i < world; i++)
        for (uint32_t j = 0; j < i; j++)
            if (all[i].node == all[j].node && all[i].device == all[j].device)
                return true;
    return false;
}

/* Collective: finds out which ranks share a node. mine: what this rank's opening returned so far. */
static int find_place(struct prs_fused *ctx, int mine)
{
    uint32_t world = ctx->config.world;
    struct hello hello = {ctx->config.node != 0 ? ctx->config.node : prs_node_id(), pci_slot(ctx->config.device), mine,
                          0};
    struct hello *all = calloc(world, sizeof(*all));
    uint64_t *ids = calloc(world, sizeof(*ids));
    int r = all && ids ? 0 : prs_fail(-ENOMEM, "fused: no memory for the nodes of %u ranks", world);
    if (!r)
        r = prs_context_allgather(ctx, &hello, all, sizeof(hello));
    for (uint32_t i = 0; i < world && r == 0; i++) {
        ids[i] = all[i].node;
        if (all[i].error != 0)
            r = i == ctx->config.rank ? mine : prs_fail(all[i].error, "fused: rank %u could not open its device", i);
    }
    if (!r)
        r = prs_place_find(ids, ctx->config.rank, world, &ctx->place);
    if (!r)
        ctx->shared_device = share_device(all, world);
    free(ids);
    free(all);
    return r;
}

static int open_parts(struct prs_fused *ctx)
{
    int before, r = check_device(ctx);
    if (!r)
        r = prs_context_enter(ctx, &before);
    if (r)
        return find_place(ctx, r);
    r = find_place(ctx, open_fault(ctx));
    if (r == 0 && ctx->place.nodes > 1)
        r = prs_network_open(ctx, &ctx->network);
    prs_context_leave(before);
    return r;
}

int prs_fused_open(const struct prs_fused_config *config, struct prs_fused **out)
{
    struct prs_fused *ctx;
    int r = check_config(config);
    if (r)
        return r;
    ctx = calloc(1, sizeof(*ctx));
    if (!ctx)
        return prs_fail(-ENOMEM, "fused: no memory for a context");
    ctx->config = *config;
    if (ctx->config.timeout_ms == 0)
        ctx->config.timeout_ms = DEFAULT_TIMEOUT_MS;
    r = open_parts(ctx);
    if (!r) {
        *out = ctx;
    } else {
        (void)cudaFreeHost(ctx->fault);
        free(ctx);
    }
    return r;
}

void prs_fused_close(struct prs_fused *ctx)
{
    int before;
    if (!ctx)
        return;
    if (ctx->network && prs_context_enter(ctx, &before) == 0) {
        prs_network_close(ctx, ctx->network);
        prs_context_leave(before);
    }
    (void)cudaFreeHost(ctx->fault);
    free(ctx);
}
