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

#include "transport/util/clock.h"

enum { MAGIC = 0x50687736, BACKLOG = 4, START_MS = 30000 };

void control_set_limit(int fd, uint32_t limit_ms)
{
    const struct timeval limit = {.tv_sec = limit_ms / 1000};

    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
}

static void set_limits(int fd)
{
    const int one = 1;

    control_set_limit(fd, CONTROL_LIMIT_MS);
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

/* Does a process read the pipe after a short while? */
static bool still_runs(int pipe)
{
    struct pollfd reader = {.fd = pipe};

    poll(&reader, 1, 50);
    return !(reader.revents & POLLERR);
}

static const char *likely_cause(int error, bool launched)
{
    return error == -EHOSTUNREACH || error == -ENETUNREACH ? "is the address right, and is there a route to it?"
           : error == -ETIMEDOUT                           ? "is the host up, and does no firewall drop the packets?"
           : launched                                      ? "what --launch started does not listen"
                                                           : "does 'perseus-hwcheck --listen' run there?";
}

static int open_socket(const char *host, const char *port, bool to_listen, int launched)
{
    const struct addrinfo wanted = {
        .ai_socktype = SOCK_STREAM, .ai_family = host ? AF_UNSPEC : AF_INET, .ai_flags = to_listen ? AI_PASSIVE : 0};
    struct addrinfo *list;
    uint64_t start = prs_clock_ms();
    int r = getaddrinfo(host, port, &wanted, &list);

    if (r) {
        fprintf(stderr, "perseus-hwcheck: %s port %s: %s\n", host ? host : "any address", port, gai_strerror(r));
        return -EINVAL;
    }
    do {
        r = try_addresses(list, to_listen);
    } while (r == -ECONNREFUSED && launched >= 0 && prs_clock_ms() - start < START_MS && still_runs(launched));
    freeaddrinfo(list);
    if (r < 0 && !to_listen)
        fprintf(stderr, "perseus-hwcheck: %s port %s: %s: %s\n", host, port, strerror(-r),
                likely_cause(r, launched >= 0));
    else if (r < 0)
        fprintf(stderr, "perseus-hwcheck: cannot listen on %s port %s: %s\n", host ? host : "any address", port,
                strerror(-r));
    return r;
}

int control_connect(const char *host, const char *port, int launched)
{
    return open_socket(host, port, false, launched);
}

int control_listen(const char *host, const char *port)
{
    return open_socket(host, port, true, -1);
}

int control_accept(int listener, int owner)
{
    struct pollfd ready[] = {{.fd = listener, .events = POLLIN}, {.fd = owner, .events = POLLIN}};
    int fd;

    do {
        poll(ready, 2, -1);
        if (ready[1].revents)
            return -ECANCELED;
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

void control_peer(int fd, char *text, size_t bytes)
{
    struct sockaddr_storage address;
    socklen_t length = sizeof(address);

    if (getpeername(fd, (struct sockaddr *)&address, &length) ||
        getnameinfo((struct sockaddr *)&address, length, text, (socklen_t)bytes, NULL, 0, NI_NUMERICHOST))
        snprintf(text, bytes, "an unknown address");
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

/* They end, whatever came. */
static void end_texts(struct message *message)
{
    struct side *side = &message->side;

    message->text[sizeof(message->text) - 1] = message->policy[sizeof(message->policy) - 1] = '\0';
    message->cookie[sizeof(message->cookie) - 1] = '\0';
    side->host[sizeof(side->host) - 1] = side->interface[sizeof(side->interface) - 1] = '\0';
    side->device[sizeof(side->device) - 1] = side->gid[sizeof(side->gid) - 1] = '\0';
    side->link[sizeof(side->link) - 1] = side->settings[sizeof(side->settings) - 1] = '\0';
    side->grown[sizeof(side->grown) - 1] = '\0';
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
    end_texts(message);
    return 0;
}

bool control_has_input(int fd)
{
    struct pollfd ready = {.fd = fd, .events = POLLIN};

    return poll(&ready, 1, 0) > 0;
}
