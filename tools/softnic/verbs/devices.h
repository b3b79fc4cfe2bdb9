/* SPDX-License-Identifier: Apache-2.0 */
/* Devices and protection domains as programs see them. */
#ifndef SOFTNIC_DEVICES_H
#define SOFTNIC_DEVICES_H

#include <infiniband/verbs.h>

#include "tools/softnic/nic/context.h"

#define SN_MAX_MR_BYTES (1ull << 46)

struct sn_device {
    struct ibv_device ibv;
    /* mlx5dv and efadv look for their own data after struct ibv_device: they must find zeroes */
    uint8_t tail_room[1024];
    uint32_t index; /* in the world */
};

struct sn_pd {
    struct ibv_pd ibv; /* first: programs hold a pointer to it */
    uint32_t handles;  /* address handles; the world counts the other objects of the domain */
};

static inline struct sn_pd *sn_pd_of(struct ibv_pd *pd)
{
    return (struct sn_pd *)pd;
}

static inline uint32_t sn_gid_count(const struct sn_dev *dev)
{
    return dev->efa ? 1 : SN_MAX_GIDS;
}

/* The device that an address names: by GID, or by LID for programs that use no GIDs. SN_NONE: no device has it;
 * requests will time out. */
uint32_t sn_dev_find(const struct ibv_ah_attr *ah);

/* Fill in the function tables of a new context (ops.c). */
void sn_ops_fill(struct verbs_context *verbs);

int sn_device_query(struct ibv_context *context, struct ibv_device_attr *attr);
int sn_device_query_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
                       struct ibv_device_attr_ex *attr, size_t attr_size);
int sn_port_query(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, size_t attr_len);

#endif
