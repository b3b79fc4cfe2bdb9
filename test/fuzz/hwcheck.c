/* SPDX-License-Identifier: Apache-2.0 */
/* Messages to perseus-hwcheck --listen, whose port is open to all: each is answered or ends the check. No client is
 * there to connect to, so no trial runs. Runs on any verbs device. */
#include <errno.h>
#include <sys/socket.h>
#include <unistd.h>

#include "test/fuzz/fuzz.h"
#include "tools/hwcheck/serve.h"

#define COOKIE "fuzz"

enum { MESSAGES = 8 };

static struct prs_fabric *fabric;

/* As the client makes them: the program itself puts in what control_send() does. */
size_t fuzz_seed(uint32_t n, uint8_t *out, size_t room)
{
    static const uint32_t kinds[][MESSAGES] = {{MESSAGE_HELLO, MESSAGE_BYE},
                                               {MESSAGE_HELLO, MESSAGE_OPEN, MESSAGE_CLOSE, MESSAGE_BYE},
                                               {MESSAGE_HELLO, MESSAGE_RAIL, MESSAGE_GROWN, MESSAGE_BYE},
                                               {MESSAGE_RUN, MESSAGE_CLOSE, 99, MESSAGE_BYE},
                                               {MESSAGE_OPEN, MESSAGE_OPEN, MESSAGE_OPEN}};
    struct message message;
    size_t bytes = 0;
    int fds[2];

    if (n >= sizeof(kinds) / sizeof(kinds[0]))
        return 0;
    fuzz_require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0, "socketpair: %s", strerror(errno));
    for (int i = 0; i < MESSAGES && kinds[n][i] && bytes + sizeof(message) <= room; i++, bytes += sizeof(message)) {
        message = (struct message){.kind = kinds[n][i],
                                   .trial = TRIAL_SET,
                                   .count = 100,
                                   .queues = 1,
                                   .policy = "drain",
                                   .cookie = COOKIE,
                                   .rails.count = 1};
        fuzz_require(control_send(fds[0], &message) == 0, "send");
        fuzz_require(recv(fds[1], out + bytes, sizeof(message), MSG_WAITALL) == sizeof(message), "recv");
    }
    close(fds[0]);
    close(fds[1]);
    return bytes;
}

static bool ends(const char *text, size_t bytes)
{
    return memchr(text, 0, bytes) != NULL;
}

/* The words of a message are text, also in one from an unknown sender. */
static void receive_all(int fd)
{
    struct message m;

    while (control_receive(fd, &m) == 0) {
        const struct side *side = &m.side;

        fuzz_require(ends(m.text, sizeof(m.text)) && ends(m.policy, sizeof(m.policy)) &&
                         ends(m.cookie, sizeof(m.cookie)) && ends(side->host, sizeof(side->host)) &&
                         ends(side->device, sizeof(side->device)) && ends(side->gid, sizeof(side->gid)) &&
                         ends(side->link, sizeof(side->link)) && ends(side->interface, sizeof(side->interface)) &&
                         ends(side->settings, sizeof(side->settings)) && ends(side->grown, sizeof(side->grown)),
                     "a text without an end");
        fuzz_accepted++;
    }
}

static void give(const uint8_t *data, size_t bytes, int fds[2])
{
    int room = 1 << 20;

    fuzz_require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0, "socketpair: %s", strerror(errno));
    setsockopt(fds[0], SOL_SOCKET, SO_SNDBUF, &room, sizeof(room));
    setsockopt(fds[1], SOL_SOCKET, SO_SNDBUF, &room, sizeof(room)); /* for answers that nobody reads */
    fuzz_require(send(fds[0], data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)bytes, "send: %s", strerror(errno));
    shutdown(fds[0], SHUT_WR);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    int fds[2];

    if (!fabric && (prs_fabric_open(NULL, &fabric) || prs_fabric_rails(fabric) < 1)) {
        printf("skipped: no RDMA device: %s\n", prs_error_text());
        exit(77);
    }
    give(data, bytes, fds);
    receive_all(fds[1]);
    close(fds[0]);
    close(fds[1]);
    give(data, bytes, fds);
    fuzz_require(welcome(fabric, fds[1], COOKIE) <= 0 && serve(fabric, fds[1]) <= 0, "no result of serve()");
    close(fds[0]);
    close(fds[1]);
    return 0;
}
