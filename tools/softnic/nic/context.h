/* SPDX-License-Identifier: Apache-2.0 */
/* An opened device: the data of the threads that execute requests, and the ibv_context that programs hold. */
#ifndef SOFTNIC_CONTEXT_H
#define SOFTNIC_CONTEXT_H

#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "tools/softnic/nic/engine.h"
#include "tools/softnic/world/self.h"

struct sn_agent;

enum { SN_LINE = 64 /* bytes of a cache line */ };

struct sn_ctx {
    uint32_t index; /* index in the world */
    uint32_t dev;
    struct sn_world *world; /* stays mapped in a forked child, which may still query the device */
    struct sn_ctx_shm *shm;
    struct sn_engine engine;
    struct sn_agent *agent;   /* NULL until device memory is registered */
    uint32_t opened;          /* how often it was opened or imported, minus how often it was closed */
    pthread_mutex_t qp_mutex; /* protects qp_list */
    struct sn_qp *qp_list;
    struct verbs_context verbs; /* its last field is the struct ibv_context that programs hold */
};

static inline struct sn_ctx *sn_ctx_of(struct ibv_context *context)
{
    return (struct sn_ctx *)((uint8_t *)context - offsetof(struct sn_ctx, verbs.context));
}

/* Zeroed memory that begins with a cache line, for free(). NULL: there is none. */
static inline void *sn_lines_alloc(size_t bytes)
{
    size_t whole = (bytes + SN_LINE - 1) / SN_LINE * SN_LINE;
    void *memory = aligned_alloc(SN_LINE, whole);

    return memory ? memset(memory, 0, whole) : NULL;
}

static inline struct sn_dev *sn_ctx_dev(struct sn_ctx *ctx)
{
    return &ctx->world->devs[ctx->dev];
}

#endif
