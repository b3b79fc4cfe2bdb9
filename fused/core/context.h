/* SPDX-License-Identifier: Apache-2.0 */
/* A rank's context: device, peers, symmetric memory, fault record. */
#ifndef PERSEUS_FUSED_CONTEXT_H
#define PERSEUS_FUSED_CONTEXT_H

#include <cuda_runtime_api.h>
#include <errno.h>
#include <perseus/fused.h>
#include <stdbool.h>

#include "fused/core/copy_stream.h"
#include "fused/core/place.h"
#include "fused/core/sync.h"
#include "transport/util/error.h"

struct prs_block;
struct prs_board;
struct prs_memory;
struct prs_network;
struct prs_symmetric;

/* Device memory of this rank, from the context's arena (symmetric.h). */
struct prs_local {
    struct prs_block *block;
    uint8_t *at;
};

struct prs_fused {
    struct prs_fused_config config;
    struct prs_place place;
    struct prs_network *network; /* NULL on a single node */
    struct prs_memory *memory;   /* of symmetric.c */
    struct prs_board *board;     /* NULL when this rank is alone on its node */
    struct prs_symmetric *alarm; /* its first word (struct prs_sync); NULL when this rank is alone on its node */
    cudaStream_t stream;         /* for filling memory; it never waits for another stream */
    struct prs_copy_stream copies;
    struct prs_fault *fault;        /* host memory that the device writes */
    struct prs_fault *fault_device; /* the same, as the device sees it */
    uint32_t sms;                   /* that kernels may use */
    uint32_t capability;
    char gpu[64];
    /* What a kernel family keeps for all its plans: cuBLASLt. */
    struct {
        void *data;
        void (*close)(void *data);
        struct prs_local workspace;
    } lt;
    bool parted;        /* an all-gather failed here: other ranks may have gone on */
    bool shared_device; /* two ranks of one node, this one or another, use one GPU */
};

/* How many of `clusters` clusters of `ctas` CTAs may run by the context's max_sms; at least one. */
static inline uint32_t prs_context_clusters(const struct prs_fused *ctx, uint32_t clusters, uint32_t ctas)
{
    uint32_t most = ctx->sms / ctas;
    return most == 0 ? 1 : clusters < most ? clusters : most;
}

/* Checks that copy engines, which the caller asked for, can move data between these ranks. 0 or -EINVAL. */
static inline int prs_context_check_copies(const struct prs_fused *ctx)
{
    if (!ctx->shared_device)
        return 0;
    return prs_fail(-EINVAL,
                    "fused: copy engines were asked for, but ranks share a GPU, whose copies to itself need SMs "
                    "that the kernel holds: leave it to the plan, or let the CTAs push");
}

/* The caller's allgather; with one rank, a copy. 0, or -errno (logged). */
int prs_context_allgather(struct prs_fused *ctx, const void *mine, void *all, size_t bytes);

/* Copies from the host to device memory of this rank. Waits for no other work of the device. 0 or -EIO. */
int prs_context_upload(struct prs_fused *ctx, void *to, const void *from, size_t bytes, const char *what);

/* Whether a launch failed in a way after which other ranks may be gone or may write at any time, here or, as far as is
 * known, on a rank of this node; or the caller aborted. Then closing waits for nobody. */
bool prs_context_lost(struct prs_fused *ctx);

/* Collective: returns when all ranks have called it. Device memory that they wrote and synchronised before is
 * visible. */
int prs_context_barrier(struct prs_fused *ctx);

/* Collective: 0 when r is 0 on every rank, else the first rank's error. */
int prs_context_agree(struct prs_fused *ctx, int r);

/* Makes the context's device current; *before gets the device that prs_context_leave() restores. */
int prs_context_enter(struct prs_fused *ctx, int *before);
void prs_context_leave(int before);

/* Logs a CUDA error (positive) and turns it into -EIO or -ENOMEM. */
int prs_cuda_check(cudaError_t e, const char *what);

#endif
