/* SPDX-License-Identifier: Apache-2.0 */
/* Connects to a listener: one handshake, step by step. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "transport/setup.h"
#include "transport/util/clock.h"
#include "transport/util/error.h"
#include "transport/util/log.h"

enum stage { STAGE_TCP, STAGE_REPLY, STAGE_CONNECT, STAGE_READY };

struct prs_connector {
    struct prs_fabric *fabric;
    struct prs_rail_set rails;
    struct prs_setup_options setup;
    enum stage stage;
    uint64_t deadline_ns;
    struct prs_stream stream;
    struct prs_peer *peer;
    struct prs_setup_progress progress;
    struct prs_wire_reply reply;
};

int prs_connect(struct prs_fabric *fabric, const struct prs_rail_set *rails, const struct prs_handle *handle,
                const struct prs_peer_options *options, struct prs_connector **out)
{
    struct prs_connector *connector;
    union prs_address address;
    uint8_t cookie[16];
    int r, fd;

    r = prs_fabric_check_set(fabric, rails, "prs_connect");
    if (r)
        return r;
    r = prs_handle_parse(handle, cookie, &address);
    if (!r)
        r = prs_socket_scope(&fabric->config, &address);
    if (r)
        return r;
    connector = calloc(1, sizeof(*connector));
    if (!connector)
        return prs_fail(-ENOMEM, "no memory for a connector");
    r = prs_setup_options(fabric, options, &connector->setup);
    if (r)
        goto free_connector;
    fd = prs_socket_connect(&address);
    if (fd < 0) {
        r = fd;
        goto free_connector;
    }
    connector->fabric = fabric;
    connector->rails = *rails;
    connector->deadline_ns = prs_clock_ns() + (uint64_t)connector->setup.timeout_ms * 1000000;
    prs_stream_init(&connector->stream, fd, &address, cookie);
    *out = connector;
    return 0;

free_connector:
    free(connector);
    return r;
}

void prs_connector_close(struct prs_connector *connector)
{
    if (!connector)
        return;
    prs_peer_close(connector->peer);
    prs_stream_close(&connector->stream);
    free(connector);
}

static int say_hello(struct prs_connector *connector)
{
    struct prs_wire_hello hello = {.rail_count = (uint32_t)connector->rails.count,
                                   .queues_per_rail = connector->setup.queues_per_rail,
                                   .private_data = connector->setup.private_data};
    int r = prs_socket_connected(connector->stream.fd);

    if (r < 0)
        return prs_fail(r, "cannot connect to %s: %s; %s", connector->stream.remote, strerror(-r),
                        r == -ECONNREFUSED ? "has the listening process ended?"
                                           : "is NCCL_SOCKET_IFNAME an interface that the peer reaches?");
    if (r)
        return r;
    prs_wire_rails(connector->fabric, &connector->rails, hello.rail);
    prs_stream_put(&connector->stream, PRS_FRAME_HELLO, &hello, sizeof(hello));
    connector->stage = STAGE_REPLY;
    return 0;
}

static int take_reply(struct prs_connector *connector)
{
    struct prs_wire_reply *reply = &connector->reply;
    uint32_t remote_position[PRS_MAX_RAILS];
    struct prs_path path[PRS_MAX_RAILS];
    int r = prs_stream_get(&connector->stream, PRS_FRAME_REPLY);

    if (r)
        return r;
    *reply = connector->stream.in.body.reply;
    r = prs_wire_check_reply(reply, (uint32_t)connector->rails.count, connector->stream.remote);
    if (r)
        return r;
    for (uint32_t i = 0; i < reply->pair_count; i++) {
        path[i].local_rail = connector->rails.rail[reply->pair[i].connector_rail];
        path[i].peer = reply->rail[reply->pair[i].listener_rail];
        remote_position[i] = reply->pair[i].listener_rail;
    }
    r = prs_setup_open(connector->fabric, &connector->setup, path, remote_position, reply->pair_count,
                       reply->queues_per_pair, &connector->peer);
    if (!r)
        r = prs_setup_accept_records(connector->peer, &reply->queues);
    connector->stage = STAGE_CONNECT;
    return r;
}

static int connect_queues(struct prs_connector *connector)
{
    struct prs_wire_queues own;
    int r = prs_setup_connect(connector->peer, &connector->reply.queues, &connector->progress);

    if (r)
        return r;
    prs_setup_addresses(connector->peer, &own);
    prs_stream_put(&connector->stream, PRS_FRAME_QUEUES, &own, sizeof(own)); /* also says that we are ready */
    connector->stage = STAGE_READY;
    return 0;
}

/* Return 0 (connected), PRS_AGAIN or -errno. */
static int step(struct prs_connector *connector)
{
    int r = connector->stage == STAGE_TCP ? say_hello(connector) : 0;

    if (!r)
        r = prs_stream_flush(&connector->stream);
    if (!r && connector->stage == STAGE_REPLY)
        r = take_reply(connector);
    if (!r && connector->stage == STAGE_CONNECT)
        r = connect_queues(connector);
    if (!r)
        r = prs_stream_flush(&connector->stream);
    if (!r && connector->stage == STAGE_READY)
        r = prs_stream_get(&connector->stream, PRS_FRAME_READY);
    if (!r)
        r = prs_setup_send_records(connector->peer, &connector->stream.in.body.ready.records);
    return r;
}

static const char *stage_text(enum stage stage)
{
    return stage == STAGE_TCP ? "a TCP connection: is NCCL_SOCKET_IFNAME an interface that the peer reaches, and does "
                                "a firewall let it through?"
           : stage == STAGE_REPLY ? "its reply: does the peer call accept?"
           : stage == STAGE_READY ? "its readiness: can its rails reach ours?"
                                  : "the network between the rails";
}

/* The listener has replied and waits for our queues: tell it why they do not come. Keeps the error text. */
static void send_refusal(struct prs_connector *connector, int error)
{
    struct prs_wire_refusal refusal = {.error = error};

    snprintf(refusal.text, sizeof(refusal.text), "%s", prs_error_text());
    prs_stream_put(&connector->stream, PRS_FRAME_REFUSE, &refusal, sizeof(refusal));
    if (prs_stream_flush(&connector->stream))
        prs_error_repeat(error, refusal.text);
}

int prs_connector_step(struct prs_connector *connector, struct prs_peer **out)
{
    int r = step(connector);

    if (r == PRS_AGAIN && prs_clock_ns() > connector->deadline_ns)
        r = prs_fail(-ETIMEDOUT, "%s: not connected within %u ms; waited for %s", connector->stream.remote,
                     connector->setup.timeout_ms, stage_text(connector->stage));
    if (r == PRS_AGAIN)
        return r;
    if (!r) {
        prs_setup_finish(connector->peer, &connector->stream, &connector->reply.private_data);
        *out = connector->peer;
        connector->peer = NULL;
    } else if (connector->stage == STAGE_CONNECT) {
        send_refusal(connector, r);
    }
    prs_connector_close(connector);
    return r;
}
