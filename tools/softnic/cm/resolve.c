/* SPDX-License-Identifier: Apache-2.0 */
/* From names to addresses to devices: rdma_getaddrinfo, rdma_resolve_*, and the calls that combine them. */
#include <errno.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>

#include "tools/softnic/cm/cm.h"

int rdma_bind_addr(struct sn_rdma_id *abi, struct sockaddr *addr)
{
    int r;

    cm_lock();
    r = addr ? cm_bind_locked(cm_id_of(abi), addr) : EINVAL;
    cm_unlock();
    return r ? cm_fail(r) : 0;
}

/* The tables of the world are in this process's memory, so no message is sent, and the timeout does not matter. */
int rdma_resolve_addr(struct sn_rdma_id *abi, struct sockaddr *src, struct sockaddr *dst, int timeout_ms)
{
    struct cm_id *id = cm_id_of(abi);
    int r;

    (void)timeout_ms;
    cm_lock();
    r = dst ? cm_resolve_locked(id, src, dst) : EINVAL;
    if (!r)
        id->state = CM_ADDR_RESOLVED;
    if (!r || r == EHOSTUNREACH)
        cm_tell_locked(id, r ? SN_RDMA_ADDR_ERROR : SN_RDMA_ADDR_RESOLVED, -r, NULL);
    cm_unlock();
    return cm_done(id, !r || r == EHOSTUNREACH ? 0 : cm_fail(r));
}

/* Programs read the MTU of the path, and its ends. */
static struct ibv_sa_path_rec *path_new(const struct sn_rdma_addr *addr)
{
    struct ibv_sa_path_rec *path = calloc(1, sizeof(*path));

    if (!path)
        return NULL;
    path->dgid = addr->ib.dgid;
    path->sgid = addr->ib.sgid;
    path->hop_limit = 64;
    path->reversible = 1;
    path->numb_path = 1;
    path->pkey = addr->ib.pkey;
    path->mtu_selector = path->rate_selector = path->packet_life_time_selector = 2; /* exactly */
    path->mtu = IBV_MTU_4096;
    path->rate = IBV_RATE_400_GBPS;
    return path;
}

int rdma_resolve_route(struct sn_rdma_id *abi, int timeout_ms)
{
    struct cm_id *id = cm_id_of(abi);
    int r = 0;

    (void)timeout_ms;
    cm_lock();
    if (id->state != CM_ADDR_RESOLVED)
        r = EINVAL;
    if (!r) {
        abi->route.path_rec = path_new(&abi->route.addr);
        r = abi->route.path_rec ? 0 : ENOMEM;
    }
    if (!r) {
        abi->route.num_paths = 1;
        id->state = CM_ROUTE_RESOLVED;
        cm_tell_locked(id, SN_RDMA_ROUTE_RESOLVED, 0, NULL);
    }
    cm_unlock();
    return cm_done(id, r ? cm_fail(r) : 0);
}

/* ---- rdma_getaddrinfo ---- */

void rdma_freeaddrinfo(struct sn_rdma_addrinfo *res)
{
    while (res) {
        struct sn_rdma_addrinfo *next = res->ai_next;

        free(res->ai_src_addr);
        free(res->ai_dst_addr);
        free(res->ai_src_canonname);
        free(res->ai_dst_canonname);
        free(res->ai_route);
        free(res->ai_connect);
        free(res);
        res = next;
    }
}

static int copy_bytes(void **to, const void *from, size_t bytes)
{
    *to = malloc(bytes ? bytes : 1);
    if (!*to)
        return ENOMEM;
    memcpy(*to, from, bytes);
    return 0;
}

/* A hint's queue pair type decides the port space, or the other way round. */
static void kind_choose(struct sn_rdma_addrinfo *info, const struct sn_rdma_addrinfo *hints)
{
    info->ai_qp_type = hints ? hints->ai_qp_type : 0;
    info->ai_port_space = hints ? hints->ai_port_space : 0;
    if (!info->ai_port_space)
        info->ai_port_space = info->ai_qp_type == IBV_QPT_UD ? SN_RDMA_PS_UDP : SN_RDMA_PS_TCP;
    if (!info->ai_qp_type)
        info->ai_qp_type =
            info->ai_port_space == SN_RDMA_PS_UDP || info->ai_port_space == SN_RDMA_PS_IPOIB ? IBV_QPT_UD : IBV_QPT_RC;
}

static int info_fill(struct sn_rdma_addrinfo *info, const struct sn_rdma_addrinfo *hints, const struct sockaddr *addr,
                     socklen_t len)
{
    bool passive = hints && hints->ai_flags & SN_RAI_PASSIVE;
    int r;

    info->ai_flags = hints ? hints->ai_flags : 0;
    info->ai_family = addr->sa_family;
    kind_choose(info, hints);
    r = copy_bytes((void **)(passive ? &info->ai_src_addr : &info->ai_dst_addr), addr, len);
    if (r)
        return r;
    *(passive ? &info->ai_src_len : &info->ai_dst_len) = len;
    if (passive || !hints || !hints->ai_src_len)
        return 0;
    r = copy_bytes((void **)&info->ai_src_addr, hints->ai_src_addr, hints->ai_src_len);
    info->ai_src_len = r ? 0 : hints->ai_src_len;
    return r;
}

static int ask_system(const char *node, const char *service, const struct sn_rdma_addrinfo *hints,
                      struct addrinfo **list)
{
    int flags = hints ? hints->ai_flags : 0, r;
    struct addrinfo system = {.ai_socktype = SOCK_STREAM};

    if (flags & SN_RAI_PASSIVE)
        system.ai_flags |= AI_PASSIVE;
    if (flags & SN_RAI_NUMERICHOST)
        system.ai_flags |= AI_NUMERICHOST;
    if (flags & SN_RAI_FAMILY)
        system.ai_family = hints->ai_family;
    r = getaddrinfo(node, service, &system, list);
    if (!r)
        return 0;
    errno = r == EAI_SYSTEM ? errno : r == EAI_MEMORY ? ENOMEM : ENODATA;
    return r;
}

/* Without a name or a service, the addresses of the hints are the answer. */
static int from_hints(const struct sn_rdma_addrinfo *hints, const struct sockaddr **addr, socklen_t *len)
{
    bool passive = hints && hints->ai_flags & SN_RAI_PASSIVE;

    if (!hints || !(passive ? hints->ai_src_len : hints->ai_dst_len))
        return EINVAL;
    *addr = passive ? hints->ai_src_addr : hints->ai_dst_addr;
    *len = passive ? hints->ai_src_len : hints->ai_dst_len;
    return 0;
}

int rdma_getaddrinfo(const char *node, const char *service, const struct sn_rdma_addrinfo *hints,
                     struct sn_rdma_addrinfo **res)
{
    const struct sockaddr *addr = NULL;
    struct sn_rdma_addrinfo *info;
    struct addrinfo *list = NULL;
    socklen_t len = 0;
    int r;

    if (node || service) {
        r = ask_system(node, service, hints, &list);
        if (r)
            return r; /* as getaddrinfo, for gai_strerror */
        addr = list->ai_addr;
        len = list->ai_addrlen;
    } else {
        r = from_hints(hints, &addr, &len);
        if (r)
            return cm_fail(r);
    }
    info = calloc(1, sizeof(*info));
    r = info ? info_fill(info, hints, addr, len) : ENOMEM;
    if (list)
        freeaddrinfo(list);
    if (r) {
        rdma_freeaddrinfo(info);
        return cm_fail(r);
    }
    *res = info;
    return 0;
}

/* ---- endpoints ---- */

static int ep_remember(struct cm_id *id, struct ibv_pd *pd, const struct ibv_qp_init_attr *attr,
                       const struct sn_rdma_addrinfo *res)
{
    int r = 0;

    if (attr && res->ai_flags & SN_RAI_PASSIVE) {
        r = copy_bytes((void **)&id->ep_attr, attr, sizeof(*attr));
        id->ep_pd = pd;
    }
    if (!r && res->ai_connect_len) {
        r = copy_bytes(&id->ep_data, res->ai_connect, res->ai_connect_len);
        id->ep_data_len = r ? 0 : res->ai_connect_len;
    }
    return r ? cm_fail(r) : 0;
}

static int ep_reach(struct sn_rdma_id *id, struct sn_rdma_addrinfo *res, struct ibv_pd *pd,
                    struct ibv_qp_init_attr *attr)
{
    if (res->ai_flags & SN_RAI_PASSIVE)
        return rdma_bind_addr(id, res->ai_src_addr);
    if (rdma_resolve_addr(id, res->ai_src_addr, res->ai_dst_addr, 2000) || rdma_resolve_route(id, 2000))
        return -1;
    if (!attr)
        return 0;
    attr->qp_type = (enum ibv_qp_type)res->ai_qp_type;
    return rdma_create_qp(id, pd, attr);
}

int rdma_create_ep(struct sn_rdma_id **out, struct sn_rdma_addrinfo *res, struct ibv_pd *pd,
                   struct ibv_qp_init_attr *attr)
{
    struct sn_rdma_id *id;
    int error;

    if (rdma_create_id(NULL, &id, NULL, (enum sn_rdma_port_space)res->ai_port_space))
        return -1;
    if (ep_remember(cm_id_of(id), pd, attr, res) || ep_reach(id, res, pd, attr)) {
        error = errno;
        rdma_destroy_ep(id);
        return cm_fail(error);
    }
    *out = id;
    return 0;
}

void rdma_destroy_ep(struct sn_rdma_id *id)
{
    if (id->qp)
        rdma_destroy_qp(id);
    if (id->srq)
        rdma_destroy_srq(id);
    rdma_destroy_id(id);
}

int rdma_get_request(struct sn_rdma_id *listen, struct sn_rdma_id **out)
{
    struct cm_id *id = cm_id_of(listen);
    struct sn_rdma_event *event;
    struct ibv_qp_init_attr attr;

    if (!id->sync || id->state != CM_LISTENING)
        return cm_fail(EINVAL);
    if (listen->event)
        rdma_ack_cm_event(listen->event);
    listen->event = NULL;
    if (rdma_get_cm_event(listen->channel, &event))
        return -1;
    if (event->event != SN_RDMA_CONNECT_REQUEST || event->status) {
        rdma_ack_cm_event(event);
        return cm_fail(EINVAL);
    }
    event->id->event = event;
    if (id->ep_attr) {
        attr = *id->ep_attr;
        attr.qp_type = event->id->qp_type;
        if (rdma_create_qp(event->id, id->ep_pd, &attr)) {
            int error = errno;

            rdma_destroy_id(event->id); /* which refuses the request */
            return cm_fail(error);
        }
    }
    *out = event->id;
    return 0;
}

/* ---- what the software NIC does not have ---- */

int rdma_join_multicast(struct sn_rdma_id *id, struct sockaddr *addr, void *context)
{
    (void)id, (void)addr, (void)context;
    return cm_fail(EOPNOTSUPP);
}

int rdma_join_multicast_ex(struct sn_rdma_id *id, void *attr, void *context)
{
    (void)id, (void)attr, (void)context;
    return cm_fail(EOPNOTSUPP);
}

int rdma_leave_multicast(struct sn_rdma_id *id, struct sockaddr *addr)
{
    (void)id, (void)addr;
    return cm_fail(EOPNOTSUPP);
}

/* Options of a vendor's hardware. */
int rdma_set_local_ece(struct sn_rdma_id *id, struct ibv_ece *ece)
{
    (void)id, (void)ece;
    return cm_fail(EOPNOTSUPP);
}

int rdma_get_remote_ece(struct sn_rdma_id *id, struct ibv_ece *ece)
{
    (void)id, (void)ece;
    return cm_fail(EOPNOTSUPP);
}
