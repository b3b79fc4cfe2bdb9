/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/hwcheck/control.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

enum { MAGIC = 0x50687731, BACKLOG = 4 };

static void set_limits(int fd)
{
    const struct timeval limit = {.tv_sec = CONTROL_LIMIT_MS / 1000};
    const int one = 1;

    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
}

static int try_addresses(const struct addrinfo *list, bool to_listen)
{
    int error = EADDRNOTAVAIL;

    for (const struct addrinfo *at = list; at; at = at->ai_next) {
        const int one = 1;
        int fd = socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, 0);

        if (fd < 0) {
            error = errno;
            continue;
        }
        set_limits(fd); /* also the limit of connect() */
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
        if (to_listen ? !bind(fd, at->ai_addr, at->ai_addrlen) && !listen(fd, BACKLOG)
                      : !connect(fd, at->ai_addr, at->ai_addrlen))
            return fd;
        error = errno == EINPROGRESS ? ETIMEDOUT : errno;
        close(fd);
    }
    return -error;
}

static int open_socket(const char *host, const char *port, bool to_listen)
{
    const struct addrinfo wanted = {
        .ai_socktype = SOCK_STREAM, .ai_family = host ? AF_UNSPEC : AF_INET, .ai_flags = to_listen ? AI_PASSIVE : 0};
    struct addrinfo *list;
    int r = getaddrinfo(host, port, &wanted, &list);

    if (r) {
        fprintf(stderr, "perseus-hwcheck: %s port %s: %s\n", host ? host : "any address", port, gai_strerror(r));
        return -EINVAL;
    }
    r = try_addresses(list, to_listen);
    freeaddrinfo(list);
    if (r < 0 && !to_listen)
        fprintf(stderr, "perseus-hwcheck: %s port %s: %s: does 'perseus-hwcheck --listen' run there?\n", host, port,
                strerror(-r));
    else if (r < 0)
        fprintf(stderr, "perseus-hwcheck: cannot listen on %s port %s: %s\n", host ? host : "any address", port,
                strerror(-r));
    return r;
}

int control_connect(const char *host, const char *port)
{
    return open_socket(host, port, false);
}

int control_listen(const char *host, const char *port)
{
    return open_socket(host, port, true);
}

int control_accept(int listener)
{
    struct pollfd ready = {.fd = listener, .events = POLLIN};
    int fd;

    do {
        poll(&ready, 1, -1);
        fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    } while (fd < 0 && (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED));
    if (fd < 0) {
        int error = errno;

        fprintf(stderr, "perseus-hwcheck: accept: %s\n", strerror(error));
        return -error;
    }
    set_limits(fd);
    return fd;
}

int control_send(int fd, struct message *message)
{
    const char *at = (const char *)message;
    size_t left = sizeof(*message);

    message->magic = MAGIC;
    message->bytes = sizeof(*message);
    while (left > 0) {
        ssize_t n = send(fd, at, left, MSG_NOSIGNAL);

        if (n < 0 && errno != EINTR)
            return errno == EAGAIN ? -ETIMEDOUT : -errno;
        at += n > 0 ? n : 0;
        left -= n > 0 ? (size_t)n : 0;
    }
    return 0;
}

int control_receive(int fd, struct message *message)
{
    char *at = (char *)message;
    size_t left = sizeof(*message);

    while (left > 0) {
        ssize_t n = recv(fd, at, left, 0);

        if (n == 0)
            return -ECONNRESET;
        if (n < 0 && errno != EINTR)
            return errno == EAGAIN ? -ETIMEDOUT : -errno;
        at += n > 0 ? n : 0;
        left -= n > 0 ? (size_t)n : 0;
    }
    if (message->magic != MAGIC || message->bytes != sizeof(*message))
        return -EPROTO;
    /* The texts end, whatever came. */
    message->text[sizeof(message->text) - 1] = message->policy[sizeof(message->policy) - 1] = '\0';
    message->host[sizeof(message->host) - 1] = message->device[sizeof(message->device) - 1] = '\0';
    message->gid[sizeof(message->gid) - 1] = message->link[sizeof(message->link) - 1] = '\0';
    message->interface[sizeof(message->interface) - 1] = '\0';
    return 0;
}

bool control_has_input(int fd)
{
    struct pollfd ready = {.fd = fd, .events = POLLIN};

    return poll(&ready, 1, 0) > 0;
}
