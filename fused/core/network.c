/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/core/network.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "fused/core/context.h"
#include "transport/util/env.h"
#include "transport/util/error.h"
#include "transport/util/log.h"
#include "transport/util/pci_path.h"

enum {
    RING_SLOTS = 4096, /* puts of a few milliseconds; an SM waits when the ring is full */
    CONTEXT = 0,
    SETTLE_MS = 5000 /* takes a round trip, if the peers' processes run */
};

static void gpu_path(int device, char *path)
{
    char id[32] = "", link[64];
    path[0] = '\0';
    if (cudaDeviceGetPCIBusId(id, sizeof(id), device) != cudaSuccess) {
        (void)cudaGetLastError();
        return;
    }
    for (char *c = id; *c != '\0'; c++)
        *c = (char)tolower((unsigned char)*c);
    (void)snprintf(link, sizeof(link), "/sys/bus/pci/devices/%s", id);
    if (!realpath(link, path))
        path[0] = '\0';
}

static int nearness(const struct prs_network *n, int rail, const char *path)
{
    struct prs_rail_info info;
    return prs_rail_query(n->fabric, rail, &info) == 0 ? prs_pci_path_common(path, info.pci_path) : -1;
}

/* Takes the rails nearest to the GPU. The ranks of the node divide them: with n ranks a rank takes every n-th rail.
 * Where there are fewer rails than ranks, several ranks take the same one. */
static int choose_rails(struct prs_fused *ctx, struct prs_network *n)
{
    int count = prs_fabric_rails(n->fabric), best = -1, ties = 0, turn = 0, sharers;
    char path[PATH_MAX];
    struct prs_rail_info info;
    if (count == 0)
        return prs_fail(
            -ENODEV,
            "fused: rank %u of %u is one of %u nodes, and this one has no RDMA device: is the driver loaded "
            "(ibv_devinfo), does NCCL_IB_HCA exclude it, is PERSEUS_NODE set by mistake?",
            ctx->config.rank, ctx->config.world, ctx->place.nodes);
    gpu_path(ctx->config.device, path);
    for (int i = 0; i < count; i++) {
        int near = nearness(n, i, path);
        ties = near > best ? 1 : ties + (near == best);
        best = near > best ? near : best;
    }
    sharers = ties < (int)ctx->place.local_ranks ? ties : (int)ctx->place.local_ranks;
    for (int i = 0; i < count && n->rails.count < PRS_MAX_RAILS; i++) {
        if (nearness(n, i, path) != best || turn++ % sharers != (int)ctx->place.local_rank % sharers ||
            prs_rail_query(n->fabric, i, &info) != 0)
            continue;
        n->rails.rail[n->rails.count++] = i;
        PRS_INFO("fused: rank %u (node %u of %u) reaches other nodes by %s port %d", ctx->config.rank, ctx->place.node,
                 ctx->place.nodes, info.name, info.port);
    }
    return 0;
}

/* Over several queues the policy `auto` counts arrivals, which costs the receiving CPU work for each signal. Here every
 * put is in a group with its signal and a group uses one queue, so that `in_order` is enough where queues keep order.
 * But only `counted` can replace a lost rail. NULL: as configured. */
static const char *choose_policy(const struct prs_network *n)
{
    const char *asked = prs_env_text("PERSEUS_ORDER");
    struct prs_rail_info info;
    long standby = prs_env_clamp("PERSEUS_STANDBY_RAIL", 0, 0, 1);
    if (prs_env_clamp("NCCL_IB_RESILIENCY_PORT_FAILOVER", standby, 0, 1))
        return NULL;
    for (int i = 0; i < n->rails.count; i++)
        if (prs_rail_query(n->fabric, n->rails.rail[i], &info) != 0 || !info.in_order || info.adaptive_routing)
            return NULL;
    return asked && strcasecmp(asked, "auto") != 0 ? NULL : "in_order";
}

/* An emulated GPU hands out ordinary memory as device memory. */
static bool is_device_memory(const void *at)
{
    struct cudaPointerAttributes attributes;
    if (cudaPointerGetAttributes(&attributes, at) == cudaSuccess)
        return attributes.type == cudaMemoryTypeDevice;
    (void)cudaGetLastError();
    return false;
}

int prs_network_register(struct prs_network *n, void *at, size_t bytes, bool signals, struct prs_region **out)
{
    struct prs_mem mem = {.addr = at, .len_bytes = bytes, .kind = PRS_MEM_HOST, .dmabuf_fd = -1};
    mem.flags = signals ? PRS_MEM_STRICT : 0;
    if (is_device_memory(at))
        return prs_region_register_cuda(n->fabric, &n->rails, at, bytes, mem.flags, out);
    return prs_region_register(n->fabric, &n->rails, &mem, out);
}

static int open_proxy(struct prs_fused *ctx, struct prs_network *n)
{
    struct prs_proxy_options options = {.team = n->team, .context_id = CONTEXT, .ring_slots = RING_SLOTS};
    struct prs_rail_info info;
    void *probe;
    int r = prs_cuda_check(cudaMalloc(&probe, sizeof(uint64_t)), "cudaMalloc");
    if (r)
        return r;
    options.cuda = is_device_memory(probe);
    (void)cudaFree(probe);
    options.timeout_ms = ctx->config.timeout_ms;
    options.failed = &ctx->fault->abort; /* data that other nodes have not sent will never arrive */
    options.numa_node = prs_rail_query(n->fabric, n->rails.rail[0], &info) == 0 ? info.numa_node : -1;
    r = prs_proxy_open(&options, &n->proxy);
    return r != 0 ? r : prs_proxy_start(n->proxy, &n->device);
}

static int open_parts(struct prs_fused *ctx, struct prs_network *n)
{
    struct prs_bootstrap bootstrap = {ctx->config.allgather, ctx->config.user, ctx->config.rank, ctx->config.world};
    struct prs_team_options team = {.traffic_class = -1};
    int r = prs_fabric_open(NULL, &n->fabric);
    if (!r)
        r = choose_rails(ctx, n);
    r = prs_bootstrap_agree(&bootstrap, r, "opening the network between nodes");
    if (r)
        return r;
    team.fabric = n->fabric;
    team.rails = &n->rails;
    team.policy = choose_policy(n);
    r = prs_bootstrap_team(&bootstrap, &team, &n->team);
    if (r)
        return r;
    /* Ranks of this node map each other's memory. */
    r = prs_team_connect_except(n->team, CONTEXT, ctx->config.rank - ctx->place.local_rank, ctx->place.local_ranks);
    r = prs_bootstrap_agree(&bootstrap, r, "connecting the ranks of all nodes");
    if (r)
        return r;
    return prs_bootstrap_agree(&bootstrap, open_proxy(ctx, n), "opening the proxy");
}

static void release(struct prs_network *n)
{
    prs_proxy_close(n->proxy);
    prs_team_close(n->team);
    if (n->fabric)
        prs_fabric_close(n->fabric);
    free(n);
}

int prs_network_open(struct prs_fused *ctx, struct prs_network **out)
{
    struct prs_network *n = calloc(1, sizeof(*n));
    int r;
    if (!n)
        return prs_fail(-ENOMEM, "fused: no memory for the network");
    r = open_parts(ctx, n);
    if (r) {
        release(n);
        return r;
    }
    *out = n;
    return 0;
}

void prs_network_settle(struct prs_network *n)
{
    (void)prs_proxy_settle(n->proxy, SETTLE_MS); /* this logs what has not settled */
}

void prs_network_stop(struct prs_network *n)
{
    prs_proxy_close(n->proxy);
    n->proxy = NULL;
}

void prs_network_close(struct prs_network *n)
{
    if (n)
        release(n);
}

void prs_fused_traffic(const struct prs_fused *ctx, struct prs_fused_traffic *traffic)
{
    struct prs_proxy_stats proxy;
    struct prs_stats team;
    memset(traffic, 0, sizeof(*traffic));
    traffic->nodes = ctx->place.nodes;
    if (!ctx->network)
        return;
    prs_proxy_stats(ctx->network->proxy, &proxy);
    prs_team_stats(ctx->network->team, CONTEXT, &team);
    traffic->rails = (uint32_t)ctx->network->rails.count;
    traffic->puts = proxy.puts;
    traffic->signals = proxy.signals;
    traffic->fences = team.fences + team.drains + proxy.fences;
    traffic->bytes = team.bytes;
}
