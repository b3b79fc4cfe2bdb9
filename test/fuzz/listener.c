/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes on a listener's port, in two pieces, then the end of the connection. Nobody is accepted without the cookie,
 * and the listener continues. Runs on any verbs device. */
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "test/fuzz/fuzz.h"
#include "transport/nic/verbs/address.h"
#include "transport/peer/handshake.h"
#include "transport/util/clock.h"

static struct prs_fabric *fabric;
static struct prs_listener *listener;
static union prs_address address;
static uint8_t cookie[16];

static void open_listener(void)
{
    struct prs_rail_set rails = {1, {0}};
    struct prs_fabric_options options = {.timeout_ms = 10000};
    struct prs_handle handle;

    if (prs_fabric_open(&options, &fabric) || prs_fabric_rails(fabric) < 1) {
        printf("skipped: no RDMA device: %s\n", prs_error_text());
        exit(77);
    }
    fuzz_require(prs_listen(fabric, &rails, &handle, &listener) == 0, "%s", prs_error_text());
    fuzz_require(prs_handle_parse(&handle, cookie, &address) == 0, "%s", prs_error_text());
}

/* The first byte says whether the real cookie is put in. */
size_t fuzz_seed(uint32_t n, uint8_t *out, size_t room)
{
    struct prs_frame_head head = {.magic = PRS_FRAME_MAGIC, .version = PRS_WIRE_VERSION};
    struct prs_wire_hello hello = {.rail_count = 1, .queues_per_rail = 1};
    struct prs_wire_queues queues = {.count = 1, .counted = 1, .credit = {.addr = 4096}, .records = {.addr = 8192}};
    struct prs_rail_address port;
    size_t at = 1;

    if (n > 2)
        return 0;
    hello.rail[0] = (struct prs_wire_rail){.name = "softnic0",
                                           .speed_mbps = 100000,
                                           .rail_id = -1,
                                           .plane_id = -1,
                                           .port = 1,
                                           .is_roce = 1,
                                           .queue_kind = "rc",
                                           .adds = 1};
    prs_verbs_tell_port(&(struct prs_verbs_own_port){.port = {.mtu = 5, .reads = 16}}, &port);
    hello.rail[0].address = port.told;
    out[0] = n != 0;
    head.type = PRS_FRAME_HELLO;
    head.length = sizeof(hello);
    memcpy(out + at, &head, sizeof(head));
    memcpy(out + at + sizeof(head), &hello, sizeof(hello));
    at += sizeof(head) + sizeof(hello);
    if (n < 2)
        return at;
    head.type = PRS_FRAME_QUEUES;
    head.length = sizeof(queues);
    prs_verbs_tell_queue(&(struct prs_verbs_queue){.number = 0xffffff}, &queues.queue[0]);
    memcpy(out + at, &head, sizeof(head));
    memcpy(out + at + sizeof(head), &queues, sizeof(queues));
    return at + sizeof(head) + sizeof(queues);
}

static void put_cookie(uint8_t *data, size_t bytes)
{
    size_t at = 0;

    while (at + sizeof(struct prs_frame_head) <= bytes) {
        struct prs_frame_head *head = (struct prs_frame_head *)(data + at), copy;

        memcpy(&copy, head, sizeof(copy));
        memcpy(data + at + offsetof(struct prs_frame_head, cookie), cookie, sizeof(cookie));
        at += sizeof(copy) + (copy.length < bytes ? copy.length : bytes);
    }
}

/* Step the listener until it has closed the connection, or wants more. */
static void step(int fd, bool has_cookie, uint64_t limit_ms)
{
    uint64_t deadline_ms = prs_clock_ms() + limit_ms;
    struct prs_peer *peer = NULL;
    struct pollfd closed = {fd, POLLRDHUP, 0};

    do {
        int r = prs_accept(listener, NULL, &peer);

        fuzz_require(r || has_cookie, "accepted without the cookie");
        if (!r) {
            fuzz_accepted++;
            prs_peer_close(peer);
        }
    } while (prs_clock_ms() < deadline_ms && poll(&closed, 1, 0) == 0);
    fuzz_require(limit_ms < 1000 || closed.revents, "the connection had ended, and the listener kept it for %llu ms",
                 (unsigned long long)limit_ms);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    size_t half = bytes / 2;
    uint8_t *copy;
    char drop[256];
    int fd;

    if (!listener)
        open_listener();
    if (bytes < 2)
        return 0;
    copy = malloc(bytes);
    fuzz_require(copy, "no memory");
    memcpy(copy, data, bytes);
    if (copy[0] & 1)
        put_cookie(copy + 1, bytes - 1);
    fd = socket(address.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    fuzz_require(fd >= 0 && connect(fd, &address.any,
                                    address.any.sa_family == AF_INET6 ? sizeof(address.v6) : sizeof(address.v4)) == 0,
                 "connect: %s", strerror(errno));
    (void)!send(fd, copy + 1, half, MSG_NOSIGNAL);
    step(fd, copy[0] & 1, 0);
    (void)!send(fd, copy + 1 + half, bytes - 1 - half, MSG_NOSIGNAL);
    step(fd, copy[0] & 1, 0);
    shutdown(fd, SHUT_WR);
    step(fd, copy[0] & 1, 5000);
    while (recv(fd, drop, sizeof(drop), MSG_DONTWAIT) > 0)
        ;
    close(fd);
    free(copy);
    return 0;
}
