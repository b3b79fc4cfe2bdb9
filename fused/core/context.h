/* SPDX-License-Identifier: Apache-2.0 */
/* A rank's context: device, peers, symmetric memory, fault record. */
#ifndef PERSEUS_FUSED_CONTEXT_H
#define PERSEUS_FUSED_CONTEXT_H

#include <cuda_runtime_api.h>
#include <errno.h>
#include <perseus/fused.h>
#include <stdbool.h>

#include "fused/core/copy_stream.h"
#include "fused/core/cuda.h"
#include "fused/core/local.h"
#include "fused/core/place.h"
#include "fused/core/ranks.h"
#include "fused/core/sync.h"
#include "transport/util/error.h"

enum { PRS_MOST_FAMILIES = 8 }; /* families of kernels that name their flags */

struct prs_board;
struct prs_kept;
struct prs_memory;
struct prs_network;
struct prs_symmetric;

struct prs_fused {
    struct prs_fused_config config;
    struct prs_place place;
    struct prs_network *network; /* NULL on a single node */
    struct prs_memory *memory;   /* memory.h */
    struct prs_board *board;     /* NULL when this rank is alone on its node */
    struct prs_symmetric *alarm; /* struct prs_alarm; NULL when this rank is alone on its node */
    cudaStream_t stream;         /* fills memory; it never waits for another stream */
    struct prs_copy_stream copies;
    struct prs_fault *fault;        /* host memory that the device writes */
    struct prs_fault *fault_device; /* the same, as the device sees it */
    uint32_t sms;                   /* how many SMs kernels may use */
    uint32_t capability;
    uint32_t measure_ms; /* PERSEUS_FUSED_MEASURE_MS of rank 0 */
    char gpu[64];
    struct prs_kept *kept; /* data that families keep for all their plans */
    prs_awaited_fn *awaited[PRS_MOST_FAMILIES];
    uint32_t plans;        /* how many plans were opened so far */
    uint32_t common_plans; /* how many of those plans all ranks opened together */
    uint32_t scratch_of;   /* number of the plan that was the last to be launched with prs_plan.scratch; 0: none */
    bool parted;           /* an all-gather failed here, but other ranks may have continued */
    bool shared_device;    /* two ranks of one node, this one or another, use one GPU */
};

/* How many of `clusters` clusters of `ctas` CTAs may run by the context's max_sms; at least one. */
static inline uint32_t prs_context_clusters(const struct prs_fused *ctx, uint32_t clusters, uint32_t ctas)
{
    uint32_t most = ctx->sms / ctas;
    return most == 0 ? 1 : clusters < most ? clusters : most;
}

/* Returns what a family keeps for all its plans until the context is closed, by the address `key`. NULL: nothing is
 * kept yet. */
void *prs_context_kept(const struct prs_fused *ctx, const void *key);
/* close(data) runs when the context is closed. 0 or -ENOMEM. */
int prs_context_keep(struct prs_fused *ctx, const void *key, void *data, void (*close)(void *data));

/* Checks that copy engines, which the caller asked for, can move data between these ranks. 0 or -EINVAL. */
static inline int prs_context_check_copies(const struct prs_fused *ctx)
{
    if (!ctx->shared_device)
        return 0;
    return prs_fail(-EINVAL,
                    "fused: copy engines were asked for, but ranks share a GPU, whose copies to itself need SMs "
                    "that the kernel holds: leave it to the plan, or let the CTAs push");
}

#endif
