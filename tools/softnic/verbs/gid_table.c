/* SPDX-License-Identifier: Apache-2.0 */
/* GID and P_Key tables, and address handles. */
#include <stdlib.h>
#include <string.h>

#include "tools/softnic/nic/datagram.h"
#include "tools/softnic/verbs/devices.h"
#include "tools/softnic/verbs/symbols.h"

int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
    if (port != 1 || index < 0 || (uint32_t)index >= sn_gid_count(sn_ctx_dev(sn_ctx_of(context)))) {
        errno = EINVAL;
        return -1;
    }
    memcpy(gid->raw, sn_ctx_dev(sn_ctx_of(context))->gid[index], sizeof(gid->raw));
    return 0;
}

static void entry_fill(struct ibv_context *context, uint32_t index, struct ibv_gid_entry *entry, size_t entry_size)
{
    struct ibv_gid_entry mine = {
        .gid_index = index, .port_num = 1, .gid_type = index ? IBV_GID_TYPE_ROCE_V2 : IBV_GID_TYPE_ROCE_V1};

    memcpy(mine.gid.raw, sn_ctx_dev(sn_ctx_of(context))->gid[index], sizeof(mine.gid.raw));
    memset(entry, 0, entry_size);
    memcpy(entry, &mine, entry_size < sizeof(mine) ? entry_size : sizeof(mine));
}

int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *entry,
                      uint32_t flags, size_t entry_size)
{
    if (flags)
        return EOPNOTSUPP;
    if (port != 1 || index >= sn_gid_count(sn_ctx_dev(sn_ctx_of(context))))
        return EINVAL;
    entry_fill(context, index, entry, entry_size);
    return 0;
}

ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries, size_t max, uint32_t flags,
                             size_t entry_size)
{
    uint32_t count = sn_gid_count(sn_ctx_dev(sn_ctx_of(context)));

    if (flags)
        return -EOPNOTSUPP;
    for (uint32_t i = 0; i < count && i < max; i++)
        entry_fill(context, i, (struct ibv_gid_entry *)((uint8_t *)entries + i * entry_size), entry_size);
    return max < count ? -EINVAL : (ssize_t)count;
}

/* Private to rdma-core, and used by its tools. */
int ibv_query_gid_type(struct ibv_context *context, uint8_t port, unsigned int index, unsigned int *type)
{
    if (port != 1 || index >= sn_gid_count(sn_ctx_dev(sn_ctx_of(context))))
        return -1;
    *type = index ? 1 : 0; /* RoCE v2, else IB or RoCE v1 */
    return 0;
}

int ibv_query_pkey(struct ibv_context *context, uint8_t port, int index, __be16 *pkey)
{
    if (port != 1 || index != 0)
        return -1;
    *pkey = 0xffff;
    return 0;
}

int ibv_get_pkey_index(struct ibv_context *context, uint8_t port, __be16 pkey)
{
    return port == 1 && pkey == 0xffff ? 0 : -1;
}

uint32_t sn_dev_find(const struct ibv_ah_attr *ah, uint8_t *gid)
{
    const struct sn_world *world = sn_self->world;

    *gid = 0;
    for (uint32_t i = 0; i < world->dev_count; i++) {
        if (!ah->is_global && world->devs[i].lid == ah->dlid)
            return i;
        for (uint32_t g = 0; ah->is_global && g < sn_gid_count(&world->devs[i]); g++)
            if (!memcmp(world->devs[i].gid[g], ah->grh.dgid.raw, 16)) {
                *gid = (uint8_t)g;
                return i;
            }
    }
    return SN_NONE;
}

/* Address handles name a destination for datagrams. NVSHMEM makes them even if it uses only RC. */
struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
    const struct sn_dev *dev = sn_ctx_dev(sn_ctx_of(pd->context));
    struct sn_ah *ah;

    /* Both RoCE and EFA address by GID alone. */
    if (attr->port_num != 1 || !attr->is_global || attr->grh.sgid_index >= sn_gid_count(dev)) {
        sn_log("create_ah on %s: port_num %u, is_global %u, sgid_index %u: port 1, and addresses by GID, of %u entries",
               dev->name, attr->port_num, attr->is_global, attr->grh.sgid_index, sn_gid_count(dev));
        errno = EINVAL;
        return NULL;
    }
    ah = calloc(1, sizeof(*ah));
    if (!ah)
        return NULL;
    ah->route =
        (struct sn_route){.sgid = attr->grh.sgid_index,
                          .hop_limit = attr->grh.hop_limit,
                          .class_label = (uint32_t)attr->grh.traffic_class << 20 | (attr->grh.flow_label & 0xfffff)};
    ah->dev = sn_dev_find(attr, &ah->route.dgid);
    if (ah->dev == SN_NONE)
        sn_log("create_ah: no device of this world has that GID; %s",
               dev->efa ? "requests will time out" : "datagrams will be lost");
    ah->ibv = (struct ibv_ah){pd->context, pd, ah->dev};
    sn_pd_hold(pd);
    return &ah->ibv;
}

int ibv_destroy_ah(struct ibv_ah *ah)
{
    sn_pd_release(ah->pd);
    free(ah);
    return 0;
}

int ibv_init_ah_from_wc(struct ibv_context *context, uint8_t port, struct ibv_wc *wc, struct ibv_grh *grh,
                        struct ibv_ah_attr *attr)
{
    uint32_t count = sn_gid_count(sn_ctx_dev(sn_ctx_of(context)));
    uint8_t receiver[16];

    if (!(wc->wc_flags & IBV_WC_GRH)) {
        errno = EINVAL; /* RoCE addresses by GID, and this completion's receive has none */
        return -1;
    }
    *attr = (struct ibv_ah_attr){.dlid = wc->slid, .sl = wc->sl, .is_global = 1, .port_num = port};
    sn_ud_header_read((const uint8_t *)grh, &attr->grh, receiver);
    for (uint32_t i = 0; i < count; i++)
        if (!memcmp(sn_ctx_dev(sn_ctx_of(context))->gid[i], receiver, 16)) {
            attr->grh.sgid_index = (uint8_t)i;
            return 0;
        }
    errno = ENOENT; /* another device has received it */
    return -1;
}

struct ibv_ah *ibv_create_ah_from_wc(struct ibv_pd *pd, struct ibv_wc *wc, struct ibv_grh *grh, uint8_t port)
{
    struct ibv_ah_attr attr;

    return ibv_init_ah_from_wc(pd->context, port, wc, grh, &attr) ? NULL : ibv_create_ah(pd, &attr);
}

int ibv_resolve_eth_l2_from_gid(struct ibv_context *context, struct ibv_ah_attr *attr, uint8_t mac[ETHERNET_LL_SIZE],
                                uint16_t *vid)
{
    return -EOPNOTSUPP;
}
