/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes from the peer of an rdma_cm connection, as a listener and as a caller get them, cut into messages, then its
 * end. The program is told of well-formed messages only, gets one last event at most, and the next connection works.
 * Runs in a world of the software NIC. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <unistd.h>

#include "test/fuzz/fuzz.h"
#include "tools/softnic/cm/message.h"
#include "tools/softnic/cm/rdma_calls.h"
#include "tools/softnic/verbs/cm_world.h"

enum { PORT_OURS = 1000, PORT_THEIRS = 1001, PIECES = 3 };

static struct sn_cm_world world;
static struct sn_rdma_channel *channel;
static struct sn_rdma_id *listener;
static int raw_listener;
static struct sn_rdma_conn_param param = {.qp_num = 1};

static struct sockaddr *device_at(uint16_t port)
{
    static struct sockaddr_in addr;

    addr = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons(port)};
    memcpy(&addr.sin_addr, world.gid[0][1] + 12, 4);
    return (struct sockaddr *)&addr;
}

static int raw_socket(uint16_t port, bool listens)
{
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    struct sockaddr_un name;
    socklen_t len = cm_socket_name(&name, world.id, SN_RDMA_PS_TCP, 0, port);

    fuzz_require(fd >= 0 && !(listens ? bind(fd, (struct sockaddr *)&name, len) || listen(fd, 8)
                                      : connect(fd, (struct sockaddr *)&name, len)),
                 "port %u: %s", port, strerror(errno));
    return fd;
}

static void open_all(void)
{
    int r;

    setenv("SOFTNIC_LOG", "none", 0); /* a line for each input */
    r = sn_cm_world_get(&world);
    if (r || !world.dev_count) {
        printf("skipped: no world of the software NIC: %s\n", strerror(-r));
        exit(77);
    }
    channel = rdma_create_event_channel();
    fuzz_require(channel && !fcntl(channel->fd, F_SETFL, O_NONBLOCK), "%s", strerror(errno));
    fuzz_require(!rdma_create_id(channel, &listener, NULL, SN_RDMA_PS_TCP) &&
                     !rdma_bind_addr(listener, device_at(PORT_OURS)) && !rdma_listen(listener, 8),
                 "%s", strerror(errno));
    raw_listener = raw_socket(PORT_THEIRS, true);
}

/* The first byte is the role and what the program answers; then come PIECES messages. */
enum { ROLE_CALLER = 1, ANSWER_REJECT = 2 };

size_t fuzz_seed(uint32_t n, uint8_t *out, size_t room)
{
    static const struct {
        uint8_t role, type[PIECES];
    } seeds[] = {{0, {CM_REQUEST, CM_READY, 0}},         {0, {CM_REQUEST, CM_REJECT, 0}},
                 {ANSWER_REJECT, {CM_REQUEST, 0, 0}},    {ROLE_CALLER, {CM_REPLY, 0, 0}},
                 {ROLE_CALLER, {CM_REPLY, CM_READY, 0}}, {ROLE_CALLER, {CM_REJECT, 0, 0}}};
    size_t at = 1;

    if (n >= sizeof(seeds) / sizeof(seeds[0]) || room < 1 + PIECES * sizeof(struct cm_message))
        return 0;
    out[0] = seeds[n].role;
    for (int i = 0; i < PIECES && seeds[n].type[i]; i++, at += sizeof(struct cm_message)) {
        struct cm_message m = {.magic = CM_MAGIC,
                               .version = CM_VERSION,
                               .type = seeds[n].type[i],
                               .qpn = 77,
                               .from = {.family = AF_INET},
                               .to = {.family = AF_INET6},
                               .gid = {[10] = 0xff, [11] = 0xff, [12] = 10, [13] = 1, [15] = 1}};

        memcpy(out + at, &m, sizeof(m));
    }
    return at;
}

/* The message that the event came from. */
static void check_event(const struct sn_rdma_event *event, const uint8_t *said, size_t bytes)
{
    struct cm_message m;

    if (event->event != SN_RDMA_CONNECT_REQUEST && event->event != SN_RDMA_CONNECT_RESPONSE)
        return;
    fuzz_require(said && !cm_message_wrong(said, bytes), "event %d for bytes that are no message", event->event);
    memcpy(&m, said, sizeof(m));
    fuzz_require(m.qpn == event->param.conn.qp_num, "another queue pair");
    fuzz_require(m.type == (event->event == SN_RDMA_CONNECT_REQUEST ? CM_REQUEST : CM_REPLY), "type %u", m.type);
    fuzz_accepted++;
}

/* Take all waiting events, and answer as the program would. */
static void step(struct sn_rdma_id **id, bool reject, const uint8_t *said, size_t bytes, int *last)
{
    struct pollfd fd = {.fd = channel->fd, .events = POLLIN};
    struct sn_rdma_event *event;

    while (poll(&fd, 1, 0) > 0 && !rdma_get_cm_event(channel, &event)) {
        enum sn_rdma_event_type type = event->event;

        check_event(event, said, bytes);
        if (type == SN_RDMA_CONNECT_REQUEST)
            *id = event->id;
        fuzz_require(event->id == *id, "an event of an unknown id");
        rdma_ack_cm_event(event);
        *last += type == SN_RDMA_REJECTED || type == SN_RDMA_DISCONNECTED || type == SN_RDMA_UNREACHABLE;
        if (type == SN_RDMA_CONNECT_REQUEST)
            fuzz_require((reject ? rdma_reject(*id, "no", 3) : rdma_accept(*id, &param)) == 0 || errno == EPIPE ||
                             errno == ECONNRESET,
                         "answer: %s", strerror(errno));
        else if (type == SN_RDMA_CONNECT_RESPONSE)
            (void)!rdma_establish(*id);
    }
}

static int call_out(struct sn_rdma_id **id)
{
    int fd, unused = 0;

    fuzz_require(!rdma_create_id(channel, id, NULL, SN_RDMA_PS_TCP) &&
                     !rdma_resolve_addr(*id, NULL, device_at(PORT_THEIRS), 1000) && !rdma_resolve_route(*id, 1000) &&
                     !rdma_connect(*id, &param),
                 "%s", strerror(errno));
    step(id, false, NULL, 0, &unused);
    fd = accept(raw_listener, NULL, NULL);
    fuzz_require(fd >= 0, "accept: %s", strerror(errno));
    return fd;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    bool caller, reject;
    struct sn_rdma_id *id = NULL;
    int fd, last = 0;

    if (!channel)
        open_all();
    if (!bytes)
        return 0;
    caller = data[0] & ROLE_CALLER;
    reject = data[0] & ANSWER_REJECT;
    fd = caller ? call_out(&id) : raw_socket(PORT_OURS, false);
    data++;
    bytes--;
    for (int i = 0; i < PIECES && bytes; i++) {
        size_t n = i < PIECES - 1 && bytes > sizeof(struct cm_message) ? sizeof(struct cm_message) : bytes;

        (void)!send(fd, data, n, MSG_NOSIGNAL);
        step(&id, reject, data, n, &last);
        data += n;
        bytes -= n;
    }
    close(fd);
    step(&id, reject, NULL, 0, &last);
    fuzz_require(last <= 1, "%d last events of one connection", last);
    fuzz_require(!caller || last == 1, "the caller was not told of the end");
    if (id)
        rdma_destroy_id(id);
    return 0;
}
