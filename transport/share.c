/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/share.h"

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

static socklen_t socket_name(const struct prs_share_address *address, struct sockaddr_un *out)
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

int prs_share_open(struct prs_share *share)
{
    struct sockaddr_un name;
    socklen_t length;

    share->listener = -1;
    if (getrandom(&share->address, sizeof(share->address), 0) != (ssize_t)sizeof(share->address))
        return prs_fail(-errno, "sharing memory: getrandom: %s", strerror(errno));
    share->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (share->listener < 0)
        return prs_fail(-errno, "sharing memory: UNIX socket: %s", strerror(errno));
    length = socket_name(&share->address, &name);
    if (bind(share->listener, (struct sockaddr *)&name, length) < 0 || listen(share->listener, SOMAXCONN) < 0) {
        int error = errno;

        prs_share_close(share);
        return prs_fail(-error, "sharing memory: cannot listen on UNIX socket @%s: %s", name.sun_path + 1,
                        strerror(error));
    }
    return 0;
}

void prs_share_close(struct prs_share *share)
{
    if (share->listener >= 0)
        close(share->listener);
    share->listener = -1;
}

enum {
    ASKERS = 64, /* that have come and not shown a cookie yet */
};

/* Wait until one of these sockets can be read: revents says which. */
static int wait_readable(struct pollfd *sockets, uint32_t count, uint64_t give_up_ms)
{
    for (;;) {
        uint64_t now = prs_clock_ms();
        int r;

        if (now >= give_up_ms)
            return -ETIMEDOUT;
        r = poll(sockets, count, (int)(give_up_ms - now));
        if (r > 0)
            return 0;
        if (r < 0 && errno != EINTR)
            return -errno;
    }
}

/* Connect and show the cookie: both fit the kernel's buffers, so the other side need not have accepted yet, as long as
 * its backlog has room. */
static int ask(const struct prs_share_address *address, uint64_t give_up_ms, int *out)
{
    struct sockaddr_un name;
    socklen_t length = socket_name(address, &name);
    int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    uint64_t now = prs_clock_ms(), left_ms = give_up_ms > now ? give_up_ms - now : 1; /* 0 would be no limit */
    struct timeval left = {.tv_sec = (time_t)(left_ms / 1000), .tv_usec = (suseconds_t)(left_ms % 1000 * 1000)};

    if (s < 0)
        return prs_fail(-errno, "sharing memory: UNIX socket: %s", strerror(errno));
    if (setsockopt(s, SOL_SOCKET, SO_SNDTIMEO, &left, sizeof(left)) < 0 ||
        connect(s, (struct sockaddr *)&name, length) < 0 ||
        send(s, address->cookie, sizeof(address->cookie), MSG_NOSIGNAL) != (ssize_t)sizeof(address->cookie)) {
        int error = errno == EAGAIN ? ETIMEDOUT : errno;

        close(s);
        return prs_fail(-error, "sharing memory: cannot reach @%s: %s (did that rank die?)", name.sun_path + 1,
                        strerror(error));
    }
    *out = s;
    return 0;
}

static int send_files(int s, const int files[PRS_SHARE_FILES])
{
    char control[CMSG_SPACE(sizeof(int) * PRS_SHARE_FILES)] __attribute__((aligned(8))) = {0};
    char byte = 1;
    struct iovec data = {&byte, 1};
    struct msghdr message = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);

    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * PRS_SHARE_FILES);
    memcpy(CMSG_DATA(header), files, sizeof(int) * PRS_SHARE_FILES);
    return sendmsg(s, &message, MSG_NOSIGNAL) == 1 ? 0 : -errno;
}

static int receive_files(int s, int files[PRS_SHARE_FILES], uint64_t give_up_ms)
{
    char control[CMSG_SPACE(sizeof(int) * PRS_SHARE_FILES)] __attribute__((aligned(8))) = {0};
    char byte;
    struct iovec data = {&byte, 1};
    struct msghdr message = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
    struct pollfd poller = {.fd = s, .events = POLLIN};
    struct cmsghdr *header;
    size_t count = 0;
    int r = wait_readable(&poller, 1, give_up_ms);

    if (r < 0)
        return r;
    if (recvmsg(s, &message, MSG_CMSG_CLOEXEC) != 1)
        return -ECONNRESET;
    header = CMSG_FIRSTHDR(&message);
    if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS)
        count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    if (count > 0)
        memcpy(files, CMSG_DATA(header), sizeof(int) * count);
    if (count == PRS_SHARE_FILES)
        return 0;
    while (count > 0) /* the kernel hands over as many as there are descriptors for */
        close(files[--count]);
    return message.msg_flags & MSG_CTRUNC ? -EMFILE : -EPROTO;
}

/* Take one that asks, if it is of the same user: *out is -1 for others. */
static int take_asker(struct prs_share *share, int *out)
{
    struct ucred who;
    socklen_t length = sizeof(who);

    *out = accept4(share->listener, NULL, NULL, SOCK_CLOEXEC);
    if (*out < 0 && errno != EAGAIN && errno != EINTR && errno != ECONNABORTED)
        return prs_fail(-errno, "sharing memory: cannot take the connection of a process that asks: %s",
                        strerror(errno));
    if (*out >= 0 && (getsockopt(*out, SOL_SOCKET, SO_PEERCRED, &who, &length) < 0 || who.uid != geteuid())) {
        PRS_WARN("sharing memory: turned a process of another user away");
        close(*out);
        *out = -1;
    }
    return 0;
}

/* One that has said something: our cookie? Return how many were served. */
static uint32_t answer(const struct prs_share *share, int s, const int files[PRS_SHARE_FILES])
{
    uint8_t cookie[sizeof(share->address.cookie)];
    int r = -EPROTO;

    if (recv(s, cookie, sizeof(cookie), MSG_WAITALL | MSG_DONTWAIT) == (ssize_t)sizeof(cookie))
        r = memcmp(cookie, share->address.cookie, sizeof(cookie)) == 0 ? send_files(s, files) : -EPERM;
    if (r < 0)
        PRS_WARN("sharing memory: turned a process away: %s", strerror(-r));
    close(s);
    return r == 0;
}

static void forget(struct pollfd *askers, uint32_t index, uint32_t *count)
{
    memmove(&askers[index], &askers[index + 1], (--*count - index) * sizeof(*askers));
}

/* Serve `count` askers, in the order in which they speak: one that says nothing holds up nobody. Strangers are turned
 * away and do not count. */
static int serve(struct prs_share *share, const int files[PRS_SHARE_FILES], uint32_t count, uint64_t give_up_ms)
{
    struct pollfd poller[1 + ASKERS] = {{.fd = share->listener, .events = POLLIN}}, *askers = &poller[1];
    uint32_t silent = 0, served = 0;
    int r = 0;

    while (served < count && r == 0) {
        int s = -1;

        r = wait_readable(poller, 1 + silent, give_up_ms);
        if (r < 0) {
            prs_fail(r, "sharing memory: %u of %u processes of this node did not ask for ours in time", count - served,
                     count);
            break;
        }
        for (uint32_t i = silent; i-- > 0;)
            if (askers[i].revents) {
                served += answer(share, askers[i].fd, files);
                forget(askers, i, &silent);
            }
        if (poller[0].revents)
            r = take_asker(share, &s);
        if (s >= 0 && silent == ASKERS) {
            PRS_WARN("sharing memory: turned a process away, since it said nothing and %d others wait too", ASKERS);
            close(askers[0].fd);
            forget(askers, 0, &silent);
        }
        if (s >= 0)
            askers[silent++] = (struct pollfd){.fd = s, .events = POLLIN};
    }
    while (silent > 0)
        close(askers[--silent].fd);
    return r;
}

int prs_share_exchange(struct prs_share *share, const int files[PRS_SHARE_FILES],
                       const struct prs_share_address *addresses, uint32_t count, int (*got)[PRS_SHARE_FILES],
                       uint32_t timeout_ms)
{
    uint64_t give_up = prs_clock_ms() + timeout_ms;
    int *sockets = calloc(count ? count : 1, sizeof(*sockets));
    uint32_t asked = 0, received = 0;
    int r = 0;

    if (!sockets)
        return prs_fail(-ENOMEM, "sharing memory: no memory for %u sockets", count);
    while (asked < count && r == 0) {
        r = ask(&addresses[asked], give_up, &sockets[asked]);
        if (!r)
            asked++;
    }
    /* Everyone asks, then serves, then takes what comes: nobody waits for somebody who waits for him. */
    if (!r)
        r = serve(share, files, count, give_up);
    while (received < count && r == 0) {
        r = receive_files(sockets[received], got[received], give_up);
        if (r < 0)
            r = prs_fail(r, "sharing memory: no files came from process %u of %u of this node: %s", received, count,
                         strerror(-r));
        else
            received++;
    }
    for (uint32_t i = 0; i < asked; i++)
        close(sockets[i]);
    for (uint32_t i = 0; r < 0 && i < received; i++)
        for (int k = 0; k < PRS_SHARE_FILES; k++)
            close(got[i][k]);
    free(sockets);
    return r;
}
