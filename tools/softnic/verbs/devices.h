/* SPDX-License-Identifier: Apache-2.0 */
/* Devices and opened devices. */
#ifndef SOFTNIC_DEVICE_H
#define SOFTNIC_DEVICE_H

#include <infiniband/verbs.h>
#include <pthread.h>

#include "tools/softnic/nic/engine.h"
#include "tools/softnic/world/self.h"

#define SN_MAX_MR_BYTES (1ull << 46)

struct sn_device {
    struct ibv_device ibv;
    uint8_t tail_room[1024]; /* mlx5dv and efadv look behind struct ibv_device for their own: they must find zeroes */
    uint32_t index;          /* in the world */
};

struct sn_agent;

struct sn_pd {
    struct ibv_pd ibv; /* first: programs hold a pointer to it */
    uint32_t handles;  /* address handles; what else is in it the world knows */
};

static inline struct sn_pd *sn_pd_of(struct ibv_pd *pd)
{
    return (struct sn_pd *)pd;
}

struct sn_ctx {
    uint32_t index; /* in the world */
    uint32_t dev;
    struct sn_ctx_shm *shm;
    struct sn_engine engine;
    struct sn_agent *agent; /* NULL until device memory is registered; agent.c */
    uint32_t pd_next;
    pthread_mutex_t qp_mutex; /* protects qp_list */
    struct sn_qp *qp_list;
    struct verbs_context verbs; /* its last field is the struct ibv_context that programs hold */
};

static inline struct sn_ctx *sn_ctx_of(struct ibv_context *context)
{
    return (struct sn_ctx *)((uint8_t *)context - offsetof(struct sn_ctx, verbs.context));
}

static inline struct sn_dev *sn_ctx_dev(struct sn_ctx *ctx)
{
    return &sn_self->world->devs[ctx->dev];
}

static inline uint32_t sn_gid_count(const struct sn_dev *dev)
{
    return dev->efa ? 1 : SN_MAX_GIDS;
}

/** The device an address names: by GID, or by LID for programs that know no GIDs. SN_NONE: nobody's; requests will time
 * out. */
uint32_t sn_dev_find(const struct ibv_ah_attr *ah);

/** Fill in the function tables of a new context (ops.c). */
void sn_ops_fill(struct verbs_context *verbs);

int sn_device_query(struct ibv_context *context, struct ibv_device_attr *attr);
int sn_device_query_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
                       struct ibv_device_attr_ex *attr, size_t attr_size);
int sn_port_query(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, size_t attr_len);

#endif
