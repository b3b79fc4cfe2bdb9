/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/ofi/caller.h"

#include <dirent.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <rdma/fi_cm.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include "transport/nic/ofi/device.h"
#include "transport/nic/ofi/endpoint.h"

enum { ESTABLISHED = 1, LISTEN = 10 /* TCP_*, of a header that excludes linux/tcp.h */ };

/* An address and a port. */
union name {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
};

static bool is_same(const union name *a, const union name *b)
{
    if (a->any.sa_family != b->any.sa_family)
        return false;
    if (a->any.sa_family == AF_INET)
        return a->v4.sin_port == b->v4.sin_port && a->v4.sin_addr.s_addr == b->v4.sin_addr.s_addr;
    return a->any.sa_family == AF_INET6 && a->v6.sin6_port == b->v6.sin6_port &&
           !memcmp(&a->v6.sin6_addr, &b->v6.sin6_addr, sizeof(a->v6.sin6_addr));
}

/* A socket that was accepted has the name of the one that listens. */
static bool has_name(int fd, const union name *wanted)
{
    union name name = {0};
    socklen_t bytes = sizeof(name);

    return !getsockname(fd, &name.any, &bytes) && is_same(&name, wanted);
}

/* Return whether the provider must read again, to see that the connection has ended or what was requested on it. */
static bool hang_up(int fd, int *listening)
{
    struct tcp_info info = {0};
    socklen_t bytes = sizeof(info);
    int unread = 0;

    if (fd == *listening || getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes))
        return false;
    if (info.tcpi_state == LISTEN) { /* meanwhile another thread may have made the provider accept one more */
        *listening = fd;
        return !shutdown(fd, SHUT_RDWR);
    }
    if (info.tcpi_state == ESTABLISHED && !info.tcpi_bytes_received)
        return !shutdown(fd, SHUT_RDWR);
    return info.tcpi_state != ESTABLISHED || (!ioctl(fd, SIOCINQ, &unread) && unread > 0);
}

bool prs_ofi_hang_up(struct prs_ofi_endpoint *endpoint, int *listening)
{
    union name listens = {0};
    size_t bytes = sizeof(listens);
    const struct dirent *entry;
    bool any = false;
    DIR *fds;

    if (endpoint->device->info->ep_attr->protocol != PRS_OFI_PROTO_XNET ||
        fi_getname(&endpoint->ep->fid, &listens, &bytes))
        return false;
    fds = opendir("/proc/self/fd");
    while (fds && (entry = readdir(fds))) {
        int fd = atoi(entry->d_name); /* of "." and "..": 0 */

        any |= has_name(fd, &listens) && hang_up(fd, listening);
    }
    if (fds)
        closedir(fds);
    return any;
}
