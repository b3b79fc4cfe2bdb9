/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/host/fd_pass.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "transport/util/clock.h"
#include "transport/util/error.h"
#include "transport/util/log.h"

static socklen_t socket_name(const struct prs_fd_pass_address *address, struct sockaddr_un *out)
{
    int length;

    memset(out, 0, sizeof(*out));
    out->sun_family = AF_UNIX;
    /* A leading NUL makes the name abstract: no file to leave behind. */
    length = snprintf(out->sun_path + 1, sizeof(out->sun_path) - 1, "perseus-");
    for (size_t i = 0; i < sizeof(address->name); i++)
        length +=
            snprintf(out->sun_path + 1 + length, sizeof(out->sun_path) - 1 - (size_t)length, "%02x", address->name[i]);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

int prs_fd_pass_open(struct prs_fd_pass *pass)
{
    struct sockaddr_un name;
    socklen_t length;

    pass->listener = -1;
    if (getrandom(&pass->address, sizeof(pass->address), 0) != (ssize_t)sizeof(pass->address))
        return prs_fail(-errno, "passing descriptors: getrandom: %s", strerror(errno));
    pass->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (pass->listener < 0)
        return prs_fail(-errno, "passing descriptors: UNIX socket: %s", strerror(errno));
    length = socket_name(&pass->address, &name);
    if (bind(pass->listener, (struct sockaddr *)&name, length) < 0 || listen(pass->listener, SOMAXCONN) < 0) {
        int error = errno;

        prs_fd_pass_close(pass);
        return prs_fail(-error, "passing descriptors: cannot listen on UNIX socket @%s: %s", name.sun_path + 1,
                        strerror(error));
    }
    return 0;
}

void prs_fd_pass_close(struct prs_fd_pass *pass)
{
    if (pass->listener >= 0)
        close(pass->listener);
    pass->listener = -1;
}

enum { SILENT_CONNECTIONS = 64 }; /* connections that have not shown a cookie yet */

/* Wait until one of these sockets can be read; its revents says which. */
static int wait_readable(struct pollfd *sockets, uint32_t count, uint64_t deadline_ms)
{
    for (;;) {
        uint64_t now = prs_clock_ms();
        int r;

        if (now >= deadline_ms)
            return -ETIMEDOUT;
        r = poll(sockets, count, (int)(deadline_ms - now));
        if (r > 0)
            return 0;
        if (r < 0 && errno != EINTR)
            return -errno;
    }
}

/* Connect and show the cookie. Both fit the kernel's buffers, so the other side need not have accepted yet, as long as
 * its backlog has room. */
static int ask_for_files(const struct prs_fd_pass_address *address, uint64_t deadline_ms, int *out)
{
    struct sockaddr_un name;
    socklen_t length = socket_name(address, &name);
    int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    uint64_t now = prs_clock_ms(), left_ms = deadline_ms > now ? deadline_ms - now : 1; /* 0 would mean no limit */
    struct timeval left = {.tv_sec = (time_t)(left_ms / 1000), .tv_usec = (suseconds_t)(left_ms % 1000 * 1000)};

    if (s < 0)
        return prs_fail(-errno, "passing descriptors: UNIX socket: %s", strerror(errno));
    if (setsockopt(s, SOL_SOCKET, SO_SNDTIMEO, &left, sizeof(left)) < 0 ||
        connect(s, (struct sockaddr *)&name, length) < 0 ||
        send(s, address->cookie, sizeof(address->cookie), MSG_NOSIGNAL) != (ssize_t)sizeof(address->cookie)) {
        int error = errno == EAGAIN ? ETIMEDOUT : errno;

        close(s);
        return prs_fail(-error, "passing descriptors: cannot reach @%s: %s (did that rank die?)", name.sun_path + 1,
                        strerror(error));
    }
    *out = s;
    return 0;
}

static int send_files(int s, const int files[PRS_FD_PASS_FILES])
{
    char control[CMSG_SPACE(sizeof(int) * PRS_FD_PASS_FILES)] __attribute__((aligned(8))) = {0};
    char byte = 1;
    struct iovec data = {&byte, 1};
    struct msghdr message = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);

    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * PRS_FD_PASS_FILES);
    memcpy(CMSG_DATA(header), files, sizeof(int) * PRS_FD_PASS_FILES);
    return sendmsg(s, &message, MSG_NOSIGNAL) == 1 ? 0 : -errno;
}

static int receive_files(int s, int files[PRS_FD_PASS_FILES], uint64_t deadline_ms)
{
    char control[CMSG_SPACE(sizeof(int) * PRS_FD_PASS_FILES)] __attribute__((aligned(8))) = {0};
    char byte;
    struct iovec data = {&byte, 1};
    struct msghdr message = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
    struct pollfd poller = {.fd = s, .events = POLLIN};
    struct cmsghdr *header;
    size_t count = 0;
    int r = wait_readable(&poller, 1, deadline_ms);

    if (r < 0)
        return r;
    if (recvmsg(s, &message, MSG_CMSG_CLOEXEC) != 1)
        return -ECONNRESET;
    header = CMSG_FIRSTHDR(&message);
    if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS)
        count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    if (count > 0)
        memcpy(files, CMSG_DATA(header), sizeof(int) * count);
    if (count == PRS_FD_PASS_FILES)
        return 0;
    while (count > 0) /* the kernel passes as many as there are free descriptors */
        close(files[--count]);
    return message.msg_flags & MSG_CTRUNC ? -EMFILE : -EPROTO;
}

/* Accept one connection. *out is -1 when none waits, or when it is of another user. */
static int accept_connection(struct prs_fd_pass *pass, int *out)
{
    struct ucred caller;
    socklen_t length = sizeof(caller);

    *out = accept4(pass->listener, NULL, NULL, SOCK_CLOEXEC);
    if (*out < 0 && errno != EAGAIN && errno != EINTR && errno != ECONNABORTED)
        return prs_fail(-errno, "passing descriptors: cannot accept a connection: %s", strerror(errno));
    if (*out >= 0 && (getsockopt(*out, SOL_SOCKET, SO_PEERCRED, &caller, &length) < 0 || caller.uid != geteuid())) {
        PRS_WARN("passing descriptors: refused a process of another user");
        close(*out);
        *out = -1;
    }
    return 0;
}

/* A connection can be read: send the files if it shows our cookie. Return how many processes were served, 0 or 1, or an
 * error: a process that shows the cookie asks only once, so no other one comes in place of a process that has ended. */
static int answer(const struct prs_fd_pass *pass, int s, const int files[PRS_FD_PASS_FILES])
{
    uint8_t cookie[sizeof(pass->address.cookie)];
    int r = 1;

    if (recv(s, cookie, sizeof(cookie), MSG_WAITALL | MSG_DONTWAIT) != (ssize_t)sizeof(cookie) ||
        memcmp(cookie, pass->address.cookie, sizeof(cookie)) != 0) {
        PRS_WARN("passing descriptors: refused a process that does not know the cookie");
        r = 0;
    } else {
        int sent = send_files(s, files);

        if (sent < 0)
            r = prs_fail(
                sent, "passing descriptors: cannot send ours to a process that asked for them: %s (did that rank die?)",
                strerror(-sent));
    }
    close(s);
    return r;
}

static void forget(struct pollfd *connections, uint32_t index, uint32_t *count)
{
    memmove(&connections[index], &connections[index + 1], (--*count - index) * sizeof(*connections));
}

/* Serve `count` processes in the order in which they show the cookie, so that a silent connection delays nobody.
 * Strangers are refused and do not count. */
static int serve(struct prs_fd_pass *pass, const int files[PRS_FD_PASS_FILES], uint32_t count, uint64_t deadline_ms)
{
    struct pollfd poller[1 + SILENT_CONNECTIONS] = {{.fd = pass->listener, .events = POLLIN}},
                             *connections = &poller[1];
    uint32_t silent = 0, served = 0;
    int r = 0;

    while (served < count && !r) {
        int s = -1;

        r = wait_readable(poller, 1 + silent, deadline_ms);
        if (r < 0) {
            prs_fail(r, "passing descriptors: %u of %u processes of this node did not ask for ours in time",
                     count - served, count);
            break;
        }
        for (uint32_t i = silent; i-- > 0 && r >= 0;)
            if (connections[i].revents) {
                r = answer(pass, connections[i].fd, files);
                served += r > 0;
                forget(connections, i, &silent);
            }
        if (r < 0)
            break;
        r = 0;
        if (poller[0].revents)
            r = accept_connection(pass, &s);
        if (s >= 0 && silent == SILENT_CONNECTIONS) {
            PRS_WARN("passing descriptors: dropped a silent connection, because %d others wait", SILENT_CONNECTIONS);
            close(connections[0].fd);
            forget(connections, 0, &silent);
        }
        if (s >= 0)
            connections[silent++] = (struct pollfd){.fd = s, .events = POLLIN};
    }
    while (silent > 0)
        close(connections[--silent].fd);
    return r;
}

int prs_fd_pass_exchange(struct prs_fd_pass *pass, const int files[PRS_FD_PASS_FILES],
                         const struct prs_fd_pass_address *addresses, uint32_t count, int (*got)[PRS_FD_PASS_FILES],
                         uint32_t timeout_ms)
{
    uint64_t deadline_ms = prs_clock_ms() + timeout_ms;
    int *sockets = calloc(count ? count : 1, sizeof(*sockets));
    uint32_t asked = 0, received = 0;
    int r = 0;

    if (!sockets)
        return prs_fail(-ENOMEM, "passing descriptors: no memory for %u sockets", count);
    while (asked < count && !r) {
        r = ask_for_files(&addresses[asked], deadline_ms, &sockets[asked]);
        if (!r)
            asked++;
    }
    /* Everyone first asks, then serves, then receives, so that no two processes wait for each other. */
    if (!r)
        r = serve(pass, files, count, deadline_ms);
    while (received < count && !r) {
        r = receive_files(sockets[received], got[received], deadline_ms);
        if (r < 0)
            r = prs_fail(r, "passing descriptors: process %u of %u of this node sent no files: %s", received, count,
                         strerror(-r));
        else
            received++;
    }
    for (uint32_t i = 0; i < asked; i++)
        close(sockets[i]);
    for (uint32_t i = 0; r < 0 && i < received; i++)
        for (int k = 0; k < PRS_FD_PASS_FILES; k++)
            close(got[i][k]);
    free(sockets);
    return r;
}
