/* SPDX-License-Identifier: Apache-2.0 */
/* Addresses, devices, and the sockets that stand for a port of a device.
 *
 * Port P of device D is an abstract Unix socket, named by the world, the port space, D and P. So ports are not TCP's,
 * the kernel frees them with their process, and a listener on every address has a socket for each device of its
 * node. */
#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "tools/softnic/cm/cm.h"
#include "tools/softnic/verbs/cm_world.h"
#include "tools/softnic/world/world.h"

enum { PORT_FIRST = 32768, PORT_LAST = 60999, PORT_TRIES = 2000 };

enum place {
    PLACE_ANY,     /* the wildcard */
    PLACE_DEVICE,  /* an address of a device of this world */
    PLACE_HOST,    /* an address of this host, and so of all nodes */
    PLACE_NOWHERE, /* not reachable by RDMA */
    PLACE_UNKNOWN, /* no IPv4 and no IPv6 */
};

/* The devices of this process's node, opened when they are first needed, and open as long as the process lives. */
static struct {
    bool known;
    struct sn_cm_world world;
    struct ibv_device *device[SN_CM_MAX_DEVS];
    uint32_t dev[SN_CM_MAX_DEVS]; /* their numbers in the world */
    uint32_t count;
    struct ibv_context *verbs[SN_CM_MAX_DEVS]; /* [number in the world] */
    struct ibv_pd *pd[SN_CM_MAX_DEVS];
} own;

/* A forked child has none of its parent's devices. */
static void child_forget(void)
{
    memset(&own, 0, sizeof(own));
    pthread_mutex_init(&cm_mutex, NULL);
}

static __attribute__((constructor)) void address_init(void)
{
    pthread_atfork(NULL, NULL, child_forget);
}

static bool is_efa(uint32_t dev)
{
    static const uint8_t none[16];

    return !memcmp(own.world.gid[dev][0], none, sizeof(none));
}

static int own_get(void)
{
    struct ibv_device **list;
    int n, r;

    if (own.known)
        return own.count ? 0 : ENODEV;
    r = sn_cm_world_get(&own.world);
    if (r)
        return -r;
    list = ibv_get_device_list(&n);
    if (!list)
        return errno;
    for (int i = 0; i < n; i++) {
        uint32_t dev = (uint32_t)ibv_get_device_index(list[i]);

        if (dev >= SN_CM_MAX_DEVS || is_efa(dev))
            continue;
        own.device[dev] = list[i];
        own.dev[own.count++] = dev;
    }
    ibv_free_device_list(list);
    own.known = true;
    return own.count ? 0 : ENODEV;
}

static int device_open(uint32_t dev)
{
    if (!own.verbs[dev])
        own.verbs[dev] = ibv_open_device(own.device[dev]);
    if (!own.verbs[dev])
        return errno;
    if (!own.pd[dev])
        own.pd[dev] = ibv_alloc_pd(own.verbs[dev]);
    return own.pd[dev] ? 0 : errno;
}

int cm_use_device_locked(struct cm_id *id, uint32_t dev)
{
    int r = own_get();

    if (!r)
        r = dev < SN_CM_MAX_DEVS && own.device[dev] ? device_open(dev) : ENODEV;
    if (r)
        return r;
    id->dev = dev;
    id->abi.verbs = own.verbs[dev];
    id->abi.pd = own.pd[dev];
    id->abi.port_num = 1;
    memcpy(id->abi.route.addr.ib.sgid.raw, own.world.gid[dev][1], 16);
    id->abi.route.addr.ib.pkey = 0xffff;
    return 0;
}

struct ibv_context **rdma_get_devices(int *count)
{
    struct ibv_context **list = NULL;
    uint32_t n = 0;
    int r;

    cm_lock();
    r = own_get();
    if (!r)
        list = calloc(own.count + 1, sizeof(*list));
    for (uint32_t i = 0; list && i < own.count; i++)
        if (!device_open(own.dev[i]))
            list[n++] = own.verbs[own.dev[i]];
    cm_unlock();
    if (count)
        *count = (int)n;
    if (!list)
        errno = r ? r : ENOMEM;
    return list;
}

void rdma_free_devices(struct ibv_context **list)
{
    free(list);
}

/* ---- addresses ---- */

static const struct in6_addr *in6_of(const struct sockaddr_storage *addr)
{
    return &((const struct sockaddr_in6 *)addr)->sin6_addr;
}

static void gid_of(const struct sockaddr_storage *addr, uint8_t *gid)
{
    memset(gid, 0, 16);
    if (addr->ss_family == AF_INET6) {
        memcpy(gid, in6_of(addr), 16);
        return;
    }
    gid[10] = gid[11] = 0xff;
    memcpy(gid + 12, &((const struct sockaddr_in *)addr)->sin_addr, 4);
}

static bool find_gid(const uint8_t *gid, uint32_t *dev, uint32_t *index)
{
    for (*dev = 0; *dev < own.world.dev_count; ++*dev)
        for (*index = 0; *index < 2 && !is_efa(*dev); ++*index)
            if (!memcmp(own.world.gid[*dev][*index], gid, 16))
                return true;
    return false;
}

bool cm_gid_known(const uint8_t *gid)
{
    uint32_t dev, index;

    return find_gid(gid, &dev, &index);
}

void cm_gid_of(uint32_t dev, uint8_t *gid)
{
    memcpy(gid, own.world.gid[dev][1], 16);
}

static bool same_ip(const struct sockaddr_storage *a, const struct sockaddr *b)
{
    uint8_t mine[16], theirs[16];
    struct sockaddr_storage other = {0};

    if (!b || (b->sa_family != AF_INET && b->sa_family != AF_INET6))
        return false;
    memcpy(&other, b, b->sa_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6));
    gid_of(a, mine);
    gid_of(&other, theirs);
    return !memcmp(mine, theirs, 16);
}

static bool of_this_host(const struct sockaddr_storage *addr)
{
    struct ifaddrs *list;
    bool found = false;
    uint8_t gid[16];

    gid_of(addr, gid);
    if (addr->ss_family == AF_INET6 ? IN6_IS_ADDR_LOOPBACK(in6_of(addr)) : gid[12] == 127)
        return true;
    if (getifaddrs(&list))
        return false;
    for (struct ifaddrs *a = list; a && !found; a = a->ifa_next)
        found = same_ip(addr, a->ifa_addr);
    freeifaddrs(list);
    return found;
}

/* PLACE_DEVICE and PLACE_HOST also set the device; that of the host's addresses is the first of this node. */
static enum place place_of(const struct sockaddr_storage *addr, uint32_t *dev)
{
    static const uint8_t none[16];
    uint8_t gid[16];
    uint32_t index;

    if (addr->ss_family != AF_INET && addr->ss_family != AF_INET6)
        return PLACE_UNKNOWN;
    gid_of(addr, gid);
    if (!memcmp(addr->ss_family == AF_INET ? gid + 12 : gid, none, addr->ss_family == AF_INET ? 4 : 16))
        return PLACE_ANY;
    if (find_gid(gid, dev, &index))
        return PLACE_DEVICE;
    *dev = own.dev[0];
    return of_this_host(addr) ? PLACE_HOST : PLACE_NOWHERE;
}

/* A copy, since programs pass shorter structures. */
static struct sockaddr_storage stored(const struct sockaddr *addr)
{
    struct sockaddr_storage to = {0};

    if (addr && addr->sa_family == AF_INET)
        memcpy(&to, addr, sizeof(struct sockaddr_in));
    else if (addr && addr->sa_family == AF_INET6)
        memcpy(&to, addr, sizeof(struct sockaddr_in6));
    else if (addr)
        to.ss_family = addr->sa_family;
    return to;
}

static void set_port(struct sockaddr_storage *addr, uint16_t port)
{
    if (addr->ss_family == AF_INET6)
        ((struct sockaddr_in6 *)addr)->sin6_port = htons(port);
    else
        ((struct sockaddr_in *)addr)->sin_port = htons(port);
}

void cm_address_write(struct cm_address *to, const struct sockaddr_storage *from)
{
    to->family = from->ss_family;
    gid_of(from, to->ip);
    to->port = from->ss_family == AF_INET6 ? ((const struct sockaddr_in6 *)from)->sin6_port
                                           : ((const struct sockaddr_in *)from)->sin_port;
}

void cm_address_read(struct sockaddr_storage *to, const struct cm_address *from)
{
    memset(to, 0, sizeof(*to));
    to->ss_family = from->family;
    if (from->family == AF_INET6)
        memcpy(&((struct sockaddr_in6 *)to)->sin6_addr, from->ip, 16);
    else
        memcpy(&((struct sockaddr_in *)to)->sin_addr, from->ip + 12, 4);
    set_port(to, ntohs(from->port));
}

/* ---- sockets ---- */

/* A forked process may hold copies of the sockets, so they are first taken out of the epoll set and shut down. */
void cm_sockets_close_locked(struct cm_id *id)
{
    cm_unwatch_locked(id);
    for (uint32_t i = 0; i < id->socket_count; i++) {
        shutdown(id->sockets[i].fd, SHUT_RDWR);
        close(id->sockets[i].fd);
    }
    free(id->sockets);
    id->sockets = NULL;
    id->socket_count = 0;
}

/* All or none. */
static int sockets_open(struct cm_id *id, const uint32_t *devs, uint32_t count, uint16_t port)
{
    int r = 0;

    id->sockets = calloc(count, sizeof(*id->sockets));
    if (!id->sockets)
        return ENOMEM;
    for (uint32_t i = 0; i < count && !r; i++) {
        struct sockaddr_un name;
        socklen_t bytes = cm_socket_name(&name, own.world.id, id->abi.ps, devs[i], port);
        int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

        if (fd < 0) {
            r = errno;
            break;
        }
        id->sockets[id->socket_count++] = (struct cm_socket){id, fd, devs[i], false};
        if (bind(fd, (struct sockaddr *)&name, bytes))
            r = errno;
    }
    if (r)
        cm_sockets_close_locked(id);
    return r;
}

int cm_socket_adopt_locked(struct cm_id *id, int fd, uint32_t dev)
{
    id->sockets = calloc(1, sizeof(*id->sockets));
    if (!id->sockets)
        return ENOMEM;
    id->sockets[id->socket_count++] = (struct cm_socket){id, fd, dev, false};
    return 0;
}

static int sockets_bind(struct cm_id *id, const uint32_t *devs, uint32_t count, struct sockaddr_storage *addr)
{
    uint16_t port = ntohs(addr->ss_family == AF_INET6 ? ((struct sockaddr_in6 *)addr)->sin6_port
                                                      : ((struct sockaddr_in *)addr)->sin_port);
    int r = EADDRINUSE;

    if (port)
        return sockets_open(id, devs, count, port);
    for (int i = 0; i < PORT_TRIES && r == EADDRINUSE; i++) {
        uint32_t random;

        if (getrandom(&random, sizeof(random), 0) != sizeof(random))
            random = (uint32_t)sn_now_ns();
        port = (uint16_t)(PORT_FIRST + random % (PORT_LAST + 1 - PORT_FIRST));
        r = sockets_open(id, devs, count, port);
    }
    set_port(addr, port);
    return r;
}

int cm_bind_locked(struct cm_id *id, const struct sockaddr *want)
{
    struct sockaddr_storage addr = stored(want);
    uint32_t dev = 0;
    int r = own_get();

    if (r)
        return r;
    if (id->state != CM_IDLE)
        return EINVAL;
    switch (place_of(&addr, &dev)) {
    case PLACE_ANY:
        r = sockets_bind(id, own.dev, own.count, &addr);
        break;
    case PLACE_DEVICE:
    case PLACE_HOST:
        r = own.device[dev] ? cm_use_device_locked(id, dev) : EADDRNOTAVAIL;
        if (!r)
            r = sockets_bind(id, &dev, 1, &addr);
        break;
    case PLACE_NOWHERE:
        return EADDRNOTAVAIL;
    case PLACE_UNKNOWN:
        return EAFNOSUPPORT;
    }
    if (r)
        return r;
    id->abi.route.addr.src_storage = addr;
    id->state = CM_BOUND;
    return 0;
}

/* The device that a connection request leaves by: the one that the id is bound to, or else the one of this node that
 * has the destination's number on its node, so that the call stays on one rail. */
static uint32_t source_device(const struct cm_id *id, uint32_t to)
{
    if (id->abi.verbs)
        return id->dev;
    return own.device[to] ? to : own.dev[to % own.count];
}

/* For a destination on this host, the source has the same address, as with the kernel. */
static void source_address(struct sockaddr_storage *src, const struct sockaddr_storage *dst, enum place place,
                           uint32_t dev)
{
    struct cm_address from = {.family = dst->ss_family};
    uint8_t gid[16];
    uint32_t to, index = 1;

    gid_of(dst, gid);
    if (place == PLACE_DEVICE && find_gid(gid, &to, &index))
        memcpy(gid, own.world.gid[dev][index], 16);
    memcpy(from.ip, gid, 16);
    cm_address_read(src, &from);
}

int cm_resolve_locked(struct cm_id *id, const struct sockaddr *want_src, const struct sockaddr *want_dst)
{
    struct sockaddr_storage src = stored(want_src), dst = stored(want_dst), *bound = &id->abi.route.addr.src_storage;
    uint32_t to = 0, unused, from;
    enum place place;
    uint16_t port;
    int r = own_get();

    if (r)
        return r;
    if (id->state != CM_IDLE && id->state != CM_BOUND)
        return EINVAL;
    place = place_of(&dst, &to);
    if (place == PLACE_UNKNOWN)
        return EAFNOSUPPORT;
    if (want_src && id->state == CM_IDLE && place_of(&src, &unused) != PLACE_ANY) {
        r = cm_bind_locked(id, want_src);
        if (r)
            return r;
    }
    if (place == PLACE_ANY || place == PLACE_NOWHERE)
        return EHOSTUNREACH; /* the wildcard names nobody */
    from = source_device(id, to);
    port = ntohs(rdma_get_src_port(&id->abi));
    if (!id->abi.verbs || id->socket_count != 1) {
        cm_sockets_close_locked(id);
        id->state = CM_IDLE;
        source_address(bound, &dst, place, from);
        set_port(bound, port);
        r = cm_use_device_locked(id, from);
        if (!r)
            r = sockets_bind(id, &from, 1, bound);
        if (r)
            return r;
    }
    id->abi.route.addr.dst_storage = dst;
    memcpy(id->abi.route.addr.ib.dgid.raw, own.world.gid[to][1], 16);
    return 0;
}

bool cm_peer_is_ours(int fd)
{
    struct ucred peer;
    socklen_t bytes = sizeof(peer);

    return !getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) && peer.uid == geteuid();
}

static bool port_is_up(uint32_t dev)
{
    return __atomic_load_n(own.world.port_up[dev], __ATOMIC_ACQUIRE);
}

static int dial(struct cm_id *id, uint32_t dev, uint16_t port)
{
    struct sockaddr_un name;
    socklen_t bytes = cm_socket_name(&name, own.world.id, id->abi.ps, dev, port);

    if (!port_is_up(id->dev) || !port_is_up(dev))
        return ENETDOWN;
    if (connect(id->sockets[0].fd, (struct sockaddr *)&name, bytes))
        return errno;
    if (cm_peer_is_ours(id->sockets[0].fd))
        return 0;
    sn_log("rdma_connect: the listener on port %u of device %u belongs to another user", port, dev);
    return EACCES;
}

/* An address of the host names the listener that is nearest: this node's, in the order of its devices, then others. */
int cm_dial_locked(struct cm_id *id)
{
    uint16_t port = ntohs(rdma_get_dst_port(&id->abi));
    uint32_t to;
    int failed = ECONNREFUSED;

    if (place_of(&id->abi.route.addr.dst_storage, &to) == PLACE_DEVICE)
        return dial(id, to, port);
    for (uint32_t i = 0; i < own.count + own.world.dev_count; i++) {
        int r = dial(id, i < own.count ? own.dev[i] : i - own.count, port);

        if (r != ECONNREFUSED && r != ENETDOWN)
            return r;
        failed = r == ENETDOWN ? r : failed;
    }
    return failed;
}
