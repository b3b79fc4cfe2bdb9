/* SPDX-License-Identifier: Apache-2.0 */
/* Identifiers: rdma_cm's counterparts of TCP sockets. */
#include "tools/softnic/cm/cm.h"

#include <errno.h>
#include <stdlib.h>

#include "tools/softnic/world/world.h"

pthread_mutex_t cm_mutex = PTHREAD_MUTEX_INITIALIZER;

int cm_fail(int error)
{
    errno = error;
    return -1;
}

struct cm_id *cm_id_new_locked(struct cm_channel *channel, void *context, enum sn_rdma_port_space ps,
                               enum ibv_qp_type type)
{
    struct cm_id *id = calloc(1, sizeof(*id));

    if (!id)
        return NULL;
    id->abi.context = context;
    id->abi.ps = ps;
    id->abi.qp_type = type;
    cm_channel_join_locked(channel, id);
    return id;
}

/* Connections to a listener end with it if their request has not arrived. */
static void arriving_free_locked(const struct cm_id *listener)
{
    struct cm_channel *channel = (struct cm_channel *)listener->abi.channel;

    for (struct cm_id *id = channel ? channel->ids : NULL, *next; id; id = next) {
        next = id->next;
        if (id->listener == listener)
            cm_id_free_locked(id);
    }
}

void cm_id_free_locked(struct cm_id *id)
{
    arriving_free_locked(id);
    cm_sockets_close_locked(id);
    cm_channel_leave_locked(id);
    free(id->abi.route.path_rec);
    free(id->ep_attr);
    free(id->ep_data);
    free(id);
}

int rdma_create_id(struct sn_rdma_channel *channel, struct sn_rdma_id **out, void *context, enum sn_rdma_port_space ps)
{
    bool datagram = ps == SN_RDMA_PS_UDP || ps == SN_RDMA_PS_IPOIB;
    struct sn_rdma_channel *own = NULL;
    struct cm_id *id;

    if (!datagram && ps != SN_RDMA_PS_TCP && ps != SN_RDMA_PS_IB)
        return cm_fail(EINVAL);
    if (!channel)
        channel = own = rdma_create_event_channel();
    if (!channel)
        return -1;
    cm_lock();
    id = cm_id_new_locked((struct cm_channel *)channel, context, ps, datagram ? IBV_QPT_UD : IBV_QPT_RC);
    if (id)
        id->sync = own;
    cm_unlock();
    if (!id) {
        rdma_destroy_event_channel(own);
        return cm_fail(ENOMEM);
    }
    *out = &id->abi;
    return 0;
}

int rdma_destroy_id(struct sn_rdma_id *abi)
{
    struct cm_id *id = cm_id_of(abi);
    struct sn_rdma_channel *own = id->sync ? abi->channel : NULL;

    if (abi->event)
        rdma_ack_cm_event(abi->event);
    abi->event = NULL;
    cm_lock();
    cm_wait_acked_locked(id);
    cm_id_free_locked(id);
    cm_unlock();
    rdma_destroy_event_channel(own);
    return 0;
}

int rdma_migrate_id(struct sn_rdma_id *abi, struct sn_rdma_channel *channel)
{
    struct cm_id *id = cm_id_of(abi);
    struct sn_rdma_channel *old = id->sync ? abi->channel : NULL;
    bool sync = !channel;

    if (sync)
        channel = rdma_create_event_channel();
    if (!channel)
        return -1;
    if (id->sync && abi->event) {
        rdma_ack_cm_event(abi->event);
        abi->event = NULL;
    }
    cm_lock();
    cm_channel_move_locked(id, (struct cm_channel *)channel);
    id->sync = sync;
    cm_unlock();
    rdma_destroy_event_channel(old);
    return 0;
}

int rdma_set_option(struct sn_rdma_id *abi, int level, int name, void *value, size_t bytes)
{
    struct cm_id *id = cm_id_of(abi);

    if (level != SN_RDMA_OPTION_ID)
        return cm_fail(ENOSYS); /* InfiniBand's path records; these devices are RoCE */
    switch (name) {
    case SN_RDMA_ID_TOS:
        return bytes == sizeof(uint8_t) ? 0 : cm_fail(EINVAL);
    case SN_RDMA_ID_REUSEADDR: /* a port is free as soon as its id is destroyed */
    case SN_RDMA_ID_AFONLY:
        if (bytes != sizeof(int))
            return cm_fail(EINVAL);
        return id->state == CM_IDLE || name == SN_RDMA_ID_REUSEADDR ? 0 : cm_fail(EINVAL);
    case SN_RDMA_ID_ACK_TIMEOUT:
        if (bytes != sizeof(uint8_t) || *(uint8_t *)value > 31)
            return cm_fail(EINVAL);
        id->ack_timeout = *(uint8_t *)value;
        id->has_ack_timeout = true;
        return 0;
    default:
        sn_log("rdma_set_option: no option %d", name);
        return cm_fail(ENOSYS);
    }
}

static __be16 port_of(const struct sockaddr_storage *addr)
{
    if (addr->ss_family == AF_INET)
        return ((const struct sockaddr_in *)addr)->sin_port;
    return addr->ss_family == AF_INET6 ? ((const struct sockaddr_in6 *)addr)->sin6_port : 0;
}

__be16 rdma_get_src_port(struct sn_rdma_id *id)
{
    return port_of(&id->route.addr.src_storage);
}

__be16 rdma_get_dst_port(struct sn_rdma_id *id)
{
    return port_of(&id->route.addr.dst_storage);
}
