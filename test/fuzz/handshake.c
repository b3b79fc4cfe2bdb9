/* SPDX-License-Identifier: Apache-2.0 */
/* Frames of a handshake, as a stranger or a damaged peer may send them, and what is done with their values. */
#include <errno.h>
#include <sys/socket.h>
#include <unistd.h>

#include "test/fuzz/fuzz.h"
#include "transport/peer/handshake.h"
#include "transport/util/fork.h"

static const uint8_t cookie[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};

static void rail_fill(struct prs_wire_rail *rail, const char *name, int id)
{
    *rail = (struct prs_wire_rail){.speed_mbps = 100000,
                                   .rail_id = (int16_t)id,
                                   .plane_id = -1,
                                   .port = 1,
                                   .is_roce = 1,
                                   .queue_kind = "rc",
                                   .adds = 1};
    snprintf(rail->name, sizeof(rail->name), "%s", name);
}

static void queues_fill(struct prs_wire_queues *queues)
{
    queues->count = 2;
    queues->counted = 1;
    queues->credit.addr = queues->records.addr = queues->sizes.addr = 0x7f0000001000;
    queues->credit.key[0] = queues->records.key[0] = 7;
}

size_t fuzz_seed(uint32_t n, uint8_t *out, size_t room)
{
    static struct {
        uint8_t wanted;
        struct prs_stream stream;
    } s;
    union prs_wire_any body;
    uint32_t bytes[] = {
        0, sizeof(body.hello), sizeof(body.reply), sizeof(body.queues), sizeof(body.ready), sizeof(body.refusal)};
    enum prs_frame_type type = (enum prs_frame_type)(n + 1);

    if (type > PRS_FRAME_REFUSE)
        return 0;
    memset(&body, 0, sizeof(body));
    memcpy(s.stream.cookie, cookie, sizeof(cookie));
    if (type == PRS_FRAME_HELLO) {
        body.hello.rail_count = 2;
        body.hello.queues_per_rail = 1;
        rail_fill(&body.hello.rail[0], "mlx5_0", 0);
        rail_fill(&body.hello.rail[1], "mlx5_1", 1);
        body.hello.private_data.bytes = 32;
    } else if (type == PRS_FRAME_REPLY) {
        body.reply.rail_count = body.reply.pair_count = 2;
        body.reply.queues_per_pair = 1;
        rail_fill(&body.reply.rail[0], "mlx5_0", 0);
        rail_fill(&body.reply.rail[1], "mlx5_1", 1);
        body.reply.pair[1] = (struct prs_wire_pair){1, 1};
        queues_fill(&body.reply.queues);
    } else if (type == PRS_FRAME_QUEUES) {
        queues_fill(&body.queues);
    } else if (type == PRS_FRAME_REFUSE) {
        body.refusal = (struct prs_wire_refusal){.error = -EPROTO, .text = "no"};
    }
    prs_stream_put(&s.stream, type, &body, bytes[type]);
    fuzz_require(s.stream.out_bytes + 1 <= room, "a frame of %zu bytes", s.stream.out_bytes);
    out[0] = (uint8_t)type;
    memcpy(out + 1, &s.stream.out, s.stream.out_bytes);
    return s.stream.out_bytes + 1;
}

static void use_values(const struct prs_stream *stream)
{
    struct prs_wire_rail own[2];
    struct prs_wire_pair pair[PRS_MAX_RAILS];
    const union prs_wire_any *body = &stream->in.body;
    int pairs;

    if (stream->in.head.type == PRS_FRAME_REPLY)
        (void)prs_wire_check_reply(&body->reply, 2, stream->remote);
    if (stream->in.head.type != PRS_FRAME_HELLO || prs_wire_check_hello(&body->hello, stream->remote))
        return;
    rail_fill(&own[0], "mlx5_0", 0);
    rail_fill(&own[1], "mlx5_1", 1);
    pairs = prs_wire_pair_rails(body->hello.rail, body->hello.rail_count, own, 2, pair);
    for (int i = 0; i < pairs; i++)
        fuzz_require(pair[i].connector_rail < body->hello.rail_count && pair[i].listener_rail < 2, "pair %d: %u, %u", i,
                     pair[i].connector_rail, pair[i].listener_rail);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static struct prs_stream stream;
    union prs_address from = {.v4 = {.sin_family = AF_INET}};
    int fds[2], r;

    if (!bytes)
        return 0;
    fuzz_require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0, "socketpair: %s", strerror(errno));
    prs_fork_begin();
    prs_stream_init(&stream, prs_fork_end(fds[0]), &from, cookie);
    fuzz_require(send(fds[1], data + 1, bytes - 1, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)bytes - 1, "send");
    shutdown(fds[1], SHUT_WR);
    do {
        r = prs_stream_get(&stream, (enum prs_frame_type)(data[0] % 6));
        if (!r) {
            fuzz_require(!memcmp(stream.in.head.cookie, cookie, sizeof(cookie)), "accepted without the cookie");
            fuzz_accepted++;
            use_values(&stream);
        }
    } while (!r);
    fuzz_require(r < 0, "all bytes are there, so nothing can be waited for: %d", r);
    prs_stream_close(&stream);
    close(fds[1]);
    return 0;
}
