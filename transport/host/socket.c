/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/host/socket.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "transport/util/error.h"
#include "transport/util/fork.h"
#include "transport/util/log.h"

enum {
    BACKLOG = 16384,       /* the kernel takes less (net.core.somaxconn); callers beyond it retry with growing pauses */
    KEEPALIVE_IDLE_S = 10, /* a host without power sends nothing; without probes a receiver would wait for ever */
    KEEPALIVE_EVERY_S = 5,
    KEEPALIVE_PROBES = 3,
};

static socklen_t address_bytes(const union prs_address *address)
{
    return address->any.sa_family == AF_INET6 ? sizeof(address->v6) : sizeof(address->v4);
}

void prs_address_text(const union prs_address *address, char text[PRS_ADDRESS_TEXT])
{
    char host[INET6_ADDRSTRLEN] = "?";

    if (address->any.sa_family == AF_INET6) {
        inet_ntop(AF_INET6, &address->v6.sin6_addr, host, sizeof(host));
        snprintf(text, PRS_ADDRESS_TEXT, "[%s]:%u", host, ntohs(address->v6.sin6_port));
    } else {
        inet_ntop(AF_INET, &address->v4.sin_addr, host, sizeof(host));
        snprintf(text, PRS_ADDRESS_TEXT, "%s:%u", host, ntohs(address->v4.sin_port));
    }
}

/* Addresses that a host gives itself, or that only reach a management controller. */
static bool is_link_local(const struct sockaddr *address)
{
    const union prs_address *any = (const union prs_address *)(const void *)address;

    return address->sa_family == AF_INET6 ? IN6_IS_ADDR_LINKLOCAL(&any->v6.sin6_addr)
                                          : ntohl(any->v4.sin_addr.s_addr) >> 16 == 0xa9fe;
}

static bool has_prefix(const char *name, const char *const prefixes[])
{
    for (; *prefixes; prefixes++)
        if (!strncmp(name, *prefixes, strlen(*prefixes)))
            return true;
    return false;
}

/* Is the address in NCCL_COMM_ID in the subnet of this interface? */
static bool reaches_comm_id(const struct prs_config *config, const struct ifaddrs *at)
{
    size_t offset, bytes = config->comm_id_family == AF_INET6 ? 16 : 4;
    const uint8_t *own = (const uint8_t *)at->ifa_addr, *mask = (const uint8_t *)at->ifa_netmask;

    if (!config->comm_id_family || at->ifa_addr->sa_family != config->comm_id_family || !mask)
        return false;
    offset = bytes == 16 ? offsetof(struct sockaddr_in6, sin6_addr) : offsetof(struct sockaddr_in, sin_addr);
    for (size_t i = 0; i < bytes; i++)
        if ((own[offset + i] ^ config->comm_id[i]) & mask[offset + i])
            return false;
    return true;
}

/* 0: unusable; higher is better. In NCCL's order: IP over InfiniBand first, then the subnet of NCCL_COMM_ID, then any
 * other. Virtual interfaces, and those that hardly ever reach another host, are last. */
static int interface_score(const struct prs_config *config, const struct ifaddrs *at)
{
    static const char *const infiniband[] = {"ib", NULL};
    static const char *const virtual_ones[] = {"docker", "veth", "virbr", "br-", "cni", "cali", "flannel", "usb", NULL};
    int family = at->ifa_addr ? at->ifa_addr->sa_family : AF_UNSPEC, score = 16;

    if ((family != AF_INET && family != AF_INET6) || !(at->ifa_flags & IFF_UP))
        return 0;
    if (config->socket_family != AF_UNSPEC && config->socket_family != family)
        return 0;
    if (!prs_hca_filter_admits(&config->ifname, at->ifa_name, -1))
        return 0;
    /* Without a cable, or as an empty bridge, an interface may have an address that others cannot reach. */
    if (at->ifa_flags & IFF_RUNNING)
        score += 64;
    score += family == AF_INET;
    if (is_link_local(at->ifa_addr))
        score -= family == AF_INET ? 9 : 1; /* the scope id of IPv6 differs between hosts */
    if (config->ifname.count && !config->ifname.exclude)
        return score; /* named by the user: no further preference */
    if (at->ifa_flags & IFF_LOOPBACK)
        score -= 12;
    else if (has_prefix(at->ifa_name, virtual_ones))
        score -= 6;
    else if (has_prefix(at->ifa_name, infiniband) && !is_link_local(at->ifa_addr))
        score += 16;
    else if (reaches_comm_id(config, at))
        score += 8;
    return score;
}

/* Is the word one of a list separated by spaces? */
static bool contains_word(const char *list, const char *word)
{
    size_t length = strlen(word);

    for (const char *at = list; (at = strstr(at, word)); at += length)
        if (at > list && at[-1] == ' ' && (at[length] == ' ' || !at[length]))
            return true;
    return false;
}

int prs_socket_interface(const struct prs_config *config, union prs_address *out, char *name, size_t name_bytes)
{
    struct ifaddrs *list, *best = NULL;
    char seen[256] = "";
    int best_score = 0;

    if (getifaddrs(&list))
        return prs_fail(-errno, "getifaddrs: %s", strerror(errno));
    for (struct ifaddrs *at = list; at; at = at->ifa_next) {
        int score = interface_score(config, at);

        if (at->ifa_addr && at->ifa_addr->sa_family != AF_PACKET && !contains_word(seen, at->ifa_name))
            snprintf(seen + strlen(seen), sizeof(seen) - strlen(seen), " %s", at->ifa_name);
        if (score > best_score) {
            best = at;
            best_score = score;
        }
    }
    if (best) {
        memset(out, 0, sizeof(*out));
        memcpy(out, best->ifa_addr,
               best->ifa_addr->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in));
        snprintf(name, name_bytes, "%s", best->ifa_name);
    }
    freeifaddrs(list);
    if (best)
        return 0;
    return prs_fail(
        -ENODEV, "no network interface to listen on: NCCL_SOCKET_IFNAME and NCCL_SOCKET_FAMILY admit none of:%s", seen);
}

int prs_socket_scope(const struct prs_config *config, union prs_address *address)
{
    struct prs_config v6 = *config;
    union prs_address own;
    char name[64];
    int r;

    if (address->any.sa_family != AF_INET6 || !IN6_IS_ADDR_LINKLOCAL(&address->v6.sin6_addr))
        return 0;
    v6.socket_family = AF_INET6;
    r = prs_socket_interface(&v6, &own, name, sizeof(name));
    if (!r)
        address->v6.sin6_scope_id = if_nametoindex(name);
    return r;
}

static void set_options(int fd)
{
    static const int one = 1, idle = KEEPALIVE_IDLE_S, every = KEEPALIVE_EVERY_S, probes = KEEPALIVE_PROBES;

    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)); /* only an optimisation: ignore a failure */
    if (setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof(one)) ||
        setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof(idle)) ||
        setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every, sizeof(every)) ||
        setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes)))
        PRS_WARN("no TCP keepalive: %s; if the host of a peer disappears, it will be noticed late", strerror(errno));
}

static int make_socket(int family)
{
    prs_fork_begin();
    return prs_fork_end(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

int prs_socket_listen(union prs_address *address)
{
    socklen_t bytes = address_bytes(address);
    int fd = make_socket(address->any.sa_family);
    char text[PRS_ADDRESS_TEXT];
    int r;

    if (fd < 0)
        return prs_fail(-errno, "socket: %s", strerror(errno));
    if (address->any.sa_family == AF_INET6)
        address->v6.sin6_port = 0;
    else
        address->v4.sin_port = 0;
    if (bind(fd, &address->any, bytes) || listen(fd, BACKLOG) || getsockname(fd, &address->any, &bytes)) {
        r = -errno;
        prs_address_text(address, text);
        prs_fork_close(fd);
        return prs_fail(r, "cannot listen on %s: %s", text, strerror(-r));
    }
    return fd;
}

int prs_socket_accept(int listen_fd, union prs_address *from, int *fd)
{
    socklen_t bytes = sizeof(*from);

    prs_fork_begin();
    *fd = prs_fork_end(accept4(listen_fd, &from->any, &bytes, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (*fd >= 0) {
        set_options(*fd);
        return 0;
    }
    /* If the other side gave up before the accept, that is no error here. */
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || errno == ECONNABORTED || errno == EPROTO)
        return PRS_AGAIN;
    return prs_fail(-errno, "accept: %s", strerror(errno));
}

int prs_socket_connect(const union prs_address *address)
{
    int fd = make_socket(address->any.sa_family);
    char text[PRS_ADDRESS_TEXT];
    int r;

    if (fd < 0)
        return prs_fail(-errno, "socket: %s", strerror(errno));
    set_options(fd);
    if (connect(fd, &address->any, address_bytes(address)) == 0 || errno == EINPROGRESS)
        return fd;
    r = -errno;
    prs_fork_close(fd);
    prs_address_text(address, text);
    return prs_fail(r, "cannot connect to %s: %s", text, strerror(-r));
}

int prs_socket_connected(int fd)
{
    struct pollfd poll_fd = {.fd = fd, .events = POLLOUT};
    socklen_t bytes = sizeof(int);
    int error = 0;

    if (poll(&poll_fd, 1, 0) == 0)
        return PRS_AGAIN;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &bytes))
        return -errno;
    return -error;
}
