/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/core/context.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "fused/core/board.h"
#include "fused/core/left.h"
#include "fused/core/load.h"
#include "fused/core/memory.h"
#include "fused/core/network.h"
#include "fused/core/symmetric.h"
#include "transport/util/clock.h"
#include "transport/util/env.h"
#include "transport/util/error.h"
#include "transport/util/node.h"

enum {
    LEAVING_MS = 5000, /* how long a rank that closes waits for the others of its node */
};

static int check_config(const struct prs_fused_config *c)
{
    int r = prs_check_reserved(c, "struct prs_fused_config");
    if (r)
        return r;
    if (c->world < 1 || c->world > PRS_CMD_PEERS || c->rank >= c->world)
        return prs_fail(-EINVAL, "fused: rank %u of world %u is not possible (at most %u ranks)", c->rank, c->world,
                        PRS_CMD_PEERS);
    if (c->world > 1 && !c->allgather)
        return prs_fail(-EINVAL, "fused: world %u needs an allgather callback", c->world);
    if (c->sleeps > 1)
        return prs_fail(-EINVAL, "fused: sleeps is %" PRIu64 ": it is 0 or 1", c->sleeps);
    if (c->max_sms == 1)
        return prs_fail(-EINVAL, "fused: max_sms 1: kernels need at least 2 SMs");
    return 0;
}

static int check_device(struct prs_fused *ctx)
{
    int major = 0, minor = 0, sms = 0, device = ctx->config.device;
    struct cudaDeviceProp properties;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
        return prs_fail(-ENODEV, "fused: CUDA device %d cannot be queried: %s", device,
                        cudaGetErrorString(cudaGetLastError()));
    if (cudaGetDeviceProperties(&properties, device) != cudaSuccess)
        return prs_fail(-ENODEV, "fused: CUDA device %d cannot be queried: %s", device,
                        cudaGetErrorString(cudaGetLastError()));
    if (major != 9 || minor != 0)
        return prs_fail(-ENODEV, "fused: device %d has compute capability %d.%d; the kernels need 9.0 (Hopper)", device,
                        major, minor);
    ctx->sms = (uint32_t)sms;
    if (ctx->config.max_sms != 0 && ctx->config.max_sms < ctx->sms)
        ctx->sms = ctx->config.max_sms;
    ctx->capability = (uint32_t)(major * 10 + minor);
    (void)snprintf(ctx->gpu, sizeof(ctx->gpu), "%s", properties.name);
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
    uint64_t name;         /* name of the boards; rank 0's name is used */
    int32_t error;         /* this rank failed: all ranks fail together */
    uint32_t sms, capability;
    char gpu[64], version[32];
    uint32_t measure_ms; /* rank 0's value is used */
    uint32_t sleeps;
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

/* Plans decide by these properties, so ranks with different ones would decide differently. */
static int check_machine(const struct prs_fused *ctx, const struct hello *mine, const struct hello *all)
{
    for (uint32_t i = 0; i < ctx->config.world; i++) {
        const struct hello *other = &all[i];
        if (strcmp(other->version, mine->version) != 0)
            return prs_fail(-EINVAL, "fused: rank %u has version %s of the library, rank %u %s: all need the same", i,
                            other->version, ctx->config.rank, mine->version);
        if (strcmp(other->gpu, mine->gpu) != 0 || other->capability != mine->capability)
            return prs_fail(-EINVAL, "fused: rank %u has a GPU %s, rank %u %s: all need the same", i, other->gpu,
                            ctx->config.rank, mine->gpu);
        if (other->sms != mine->sms)
            return prs_fail(-EINVAL, "fused: rank %u may use %u SMs, rank %u %u: all need the same (max_sms, MIG, MPS)",
                            i, other->sms, ctx->config.rank, mine->sms);
        if (other->sleeps != mine->sleeps)
            return prs_fail(-EINVAL, "fused: rank %u opens with sleeps %u, rank %u with %u: all need the same", i,
                            other->sleeps, ctx->config.rank, mine->sleeps);
    }
    return 0;
}

static void fill_hello(struct prs_fused *ctx, int mine, struct hello *h)
{
    memset(h, 0, sizeof(*h));
    h->node = ctx->config.node != 0 ? ctx->config.node : prs_node_id();
    h->device = pci_slot(ctx->config.device);
    h->error = mine;
    h->sms = ctx->sms;
    h->capability = ctx->capability;
    (void)snprintf(h->gpu, sizeof(h->gpu), "%s", ctx->gpu);
    (void)snprintf(h->version, sizeof(h->version), "%s", PRS_VERSION);
    h->measure_ms = ctx->measure_ms;
    h->sleeps = (uint32_t)ctx->config.sleeps;
    if (getrandom(&h->name, sizeof(h->name), 0) != sizeof(h->name))
        h->name = prs_clock_ns() ^ (uint64_t)getpid() << 40;
}

/* Collective: finds out which ranks share a node. mine: the result of this rank's opening so far. */
static int find_place(struct prs_fused *ctx, int mine, uint64_t *name)
{
    uint32_t world = ctx->config.world;
    struct hello hello, *all = calloc(world, sizeof(*all));
    uint64_t *ids = calloc(world, sizeof(*ids));
    int r = all && ids ? 0 : prs_fail(-ENOMEM, "fused: no memory for the nodes of %u ranks", world);
    fill_hello(ctx, mine, &hello);
    if (!r)
        r = prs_ranks_allgather(ctx, &hello, all, sizeof(hello));
    for (uint32_t i = 0; i < world && r == 0; i++) {
        ids[i] = all[i].node;
        if (all[i].error != 0)
            r = mine ? mine : prs_fail(all[i].error, "fused: rank %u could not open its device", i);
    }
    if (!r)
        r = check_machine(ctx, &hello, all);
    if (!r)
        r = prs_place_find(ids, ctx->config.rank, world, &ctx->place);
    if (r == 0 && hello.sleeps && ctx->place.nodes > 1)
        r = prs_fail(-EOPNOTSUPP,
                     "fused: sleeps was asked for, and the job has %u nodes: their NICs have registered the memory, "
                     "so it cannot be given back",
                     ctx->place.nodes);
    if (!r) {
        ctx->shared_device = share_device(all, world);
        ctx->measure_ms = all[0].measure_ms;
        *name = all[0].name;
    }
    free(ids);
    free(all);
    return r;
}

static int open_own(struct prs_fused *ctx)
{
    int r = prs_load_all(ctx->config.device);
    if (!r)
        r = open_fault(ctx);
    if (!r)
        r = prs_symmetric_open(ctx);
    if (!r)
        r = prs_cuda_check(cudaStreamCreateWithFlags(&ctx->stream, cudaStreamNonBlocking), "cudaStreamCreate");
    return r;
}

/* Collective. */
static int open_node(struct prs_fused *ctx, uint64_t name)
{
    bool alone = ctx->place.local_ranks == 1;
    int r = prs_ranks_agree(ctx, alone ? 0 : prs_board_open(name, &ctx->place, &ctx->board));
    if (ctx->board && ctx->place.local_rank == 0)
        prs_board_hide(ctx->board);
    return r;
}

/* Collective. */
static int open_alarm(struct prs_fused *ctx)
{
    static const struct prs_need need = {PRS_SYMMETRIC_CLEAN, false, NULL};
    static const uint64_t bytes = sizeof(struct prs_alarm);
    uint32_t holding; /* it stays until the context is closed */
    return prs_symmetric_hold(ctx, &need, &bytes, 1, &ctx->alarm, &holding);
}

/* Whether a launch has failed in such a way that other ranks may have ended, or may write at any time. The launch may
 * be this rank's or, as far as this rank knows, of another rank of the node. An abort by the caller counts too. Closing
 * then waits for no rank. */
static bool is_lost(struct prs_fused *ctx)
{
    uint32_t alarm = 0;
    int r = 0;
    if (ctx->parted || prs_sync_lost(ctx) || __atomic_load_n(&ctx->fault->absent, __ATOMIC_RELAXED) != 0)
        return true;
    if (ctx->memory->asleep) /* the alarm was off */
        return false;
    if (ctx->alarm)
        r = prs_cuda_check(
            cudaMemcpyAsync(&alarm, ctx->alarm->at[0], sizeof(alarm), cudaMemcpyDeviceToHost, ctx->stream),
            "cudaMemcpy of the alarm");
    return (ctx->alarm && r != 0) || cudaStreamSynchronize(ctx->stream) != cudaSuccess || alarm != 0;
}

struct prs_kept {
    struct prs_kept *next;
    const void *key;
    void *data;
    void (*close)(void *data);
};

void *prs_context_kept(const struct prs_fused *ctx, const void *key)
{
    for (const struct prs_kept *k = ctx->kept; k; k = k->next)
        if (k->key == key)
            return k->data;
    return NULL;
}

int prs_context_keep(struct prs_fused *ctx, const void *key, void *data, void (*close)(void *data))
{
    struct prs_kept *k = calloc(1, sizeof(*k));
    if (!k)
        return prs_fail(-ENOMEM, "fused: no memory for what plans share");
    *k = (struct prs_kept){ctx->kept, key, data, close};
    ctx->kept = k;
    return 0;
}

static void release_kept(struct prs_fused *ctx)
{
    while (ctx->kept) {
        struct prs_kept *k = ctx->kept;
        ctx->kept = k->next;
        k->close(k->data);
        free(k);
    }
}

/* healthy: the other ranks close too, so wait for them. The context's device is current. */
static void release(struct prs_fused *ctx, bool healthy)
{
    if (ctx->network) {
        if (healthy) { /* the proxies of all ranks must run until the last rank has settled */
            prs_network_settle(ctx->network);
            healthy = prs_ranks_barrier(ctx) == 0;
        }
        prs_network_stop(ctx->network);
        if (healthy) /* closing a team while a peer still polls would be an error at the peer */
            healthy = prs_ranks_barrier(ctx) == 0;
    }
    prs_copy_stream_close(&ctx->copies);
    release_kept(ctx);
    if (ctx->memory) {
        prs_symmetric_close(ctx, healthy ? LEAVING_MS : 0);
    } else {
        (void)cudaFreeHost(ctx->fault);
        prs_board_close(ctx->board);
    }
    prs_network_close(ctx->network);
    if (ctx->stream)
        (void)cudaStreamDestroy(ctx->stream);
}

/* On failure nothing stays open. */
static int open_parts(struct prs_fused *ctx)
{
    uint64_t name = 0;
    int before, r = check_device(ctx);
    if (!r)
        r = prs_cuda_enter(ctx, &before);
    if (r)
        return find_place(ctx, r, &name);
    r = find_place(ctx, open_own(ctx), &name);
    if (!r)
        r = open_node(ctx, name);
    if (!r)
        prs_left_sweep(ctx->config.device);
    if (r == 0 && ctx->place.nodes > 1)
        r = prs_network_open(ctx, &ctx->network);
    if (r == 0 && ctx->place.local_ranks > 1)
        r = open_alarm(ctx);
    if (r)
        release(ctx, false);
    prs_cuda_leave(before);
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
    ctx->measure_ms = (uint32_t)prs_env_clamp("PERSEUS_FUSED_MEASURE_MS", 0, 0, 60000);
    if (ctx->config.timeout_ms == 0)
        ctx->config.timeout_ms = PRS_KERNEL_TIMEOUT_MS;
    r = open_parts(ctx);
    if (!r) {
        *out = ctx;
        return 0;
    }
    free(ctx);
    return r;
}

void prs_fused_close(struct prs_fused *ctx)
{
    int before;
    if (!ctx)
        return;
    if (prs_cuda_enter(ctx, &before) == 0) {
        release(ctx, !is_lost(ctx));
        prs_cuda_leave(before);
    }
    free(ctx);
}
