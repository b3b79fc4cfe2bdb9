/* SPDX-License-Identifier: Apache-2.0 */
/* Devices and protection domains as programs see them. */
#ifndef SOFTNIC_DEVICES_H
#define SOFTNIC_DEVICES_H

#include <infiniband/verbs.h>

#include "tools/softnic/nic/context.h"

#define SN_MAX_MR_BYTES (1ull << 46)
#define SN_MAX_DM_BYTES (1ull << 18) /* bytes of device memory of a device, as a ConnectX has */

struct sn_device {
    struct ibv_device ibv;
    /* mlx5dv and efadv look for their own data after struct ibv_device: they must find zeroes */
    uint8_t tail_room[1024];
    uint32_t index; /* index in the world */
};

struct sn_td {
    struct ibv_td ibv; /* first: programs hold a pointer to it */
    uint32_t users;
};

struct sn_pd {
    struct ibv_pd ibv;    /* first: programs hold a pointer to it */
    uint32_t users;       /* objects that were made with it */
    struct sn_pd *parent; /* a parent domain has the protection domain that it stands for */
    struct sn_td *td;
};

static inline struct sn_pd *sn_pd_of(struct ibv_pd *pd)
{
    return (struct sn_pd *)pd;
}

static inline void sn_pd_hold(struct ibv_pd *pd)
{
    __atomic_fetch_add(&sn_pd_of(pd)->users, 1, __ATOMIC_RELAXED);
}

static inline void sn_pd_release(struct ibv_pd *pd)
{
    __atomic_fetch_sub(&sn_pd_of(pd)->users, 1, __ATOMIC_RELEASE);
}

static inline uint32_t sn_gid_count(const struct sn_dev *dev)
{
    return dev->efa ? 1 : SN_MAX_GIDS;
}

/* The device that an address names: by GID, or by LID for programs that use no GIDs. *gid: which of its GIDs that
 * is. SN_NONE: no device has it; requests will time out. */
uint32_t sn_dev_find(const struct ibv_ah_attr *ah, uint8_t *gid);

/* Fill in the function tables of a new context (ops.c). */
void sn_ops_fill(struct verbs_context *verbs, bool efa);

/* Wait until no initiator that saw the key as valid is still at work. */
void sn_mr_users_wait(struct sn_ctx *ctx, uint32_t key);

/* Is a window bound to the registration? */
bool sn_mr_has_windows(const struct ibv_mr *mr);

/* pd.c, dm.c, mr.c, mw.c: entries of the function tables */
struct ibv_td *sn_td_alloc(struct ibv_context *context, struct ibv_td_init_attr *attr);
int sn_td_dealloc(struct ibv_td *td);
struct ibv_pd *sn_parent_domain_alloc(struct ibv_context *context, struct ibv_parent_domain_init_attr *attr);
struct ibv_dm *sn_dm_alloc(struct ibv_context *context, struct ibv_alloc_dm_attr *attr);
int sn_dm_free(struct ibv_dm *dm);
struct ibv_mr *sn_dm_reg(struct ibv_pd *pd, struct ibv_dm *dm, uint64_t offset, size_t length, unsigned int access);
struct ibv_mw *sn_mw_alloc(struct ibv_pd *pd, enum ibv_mw_type type);
int sn_mw_dealloc(struct ibv_mw *mw);
int sn_mr_advise(struct ibv_pd *pd, enum ibv_advise_mr_advice advice, uint32_t flags, struct ibv_sge *sge,
                 uint32_t count);

int sn_device_query(struct ibv_context *context, struct ibv_device_attr *attr);
int sn_device_query_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
                       struct ibv_device_attr_ex *attr, size_t attr_size);
int sn_port_query(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, size_t attr_len);

#endif
