/* SPDX-License-Identifier: Apache-2.0 */
/* Connects to a listener: one handshake, step by step. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "transport/connect/setup.h"
#include "transport/util/clock.h"
#include "transport/util/error.h"
#include "transport/util/log.h"

enum {
    /* Pause before the next TCP connection, after one was lost before the listener's answer. It doubles each time. */
    FIRST_PAUSE_MS = 50,
    LONGEST_PAUSE_MS = 1000,
};

/* Up to STAGE_REPLY no queues exist yet, so the connector can begin again. */
enum stage { STAGE_PAUSE, STAGE_TCP, STAGE_REPLY, STAGE_CONNECT, STAGE_READY };

struct prs_connector {
    struct prs_fabric *fabric;
    struct prs_rail_set rails;
    bool standby;                               /* the last rail of `rails` is a standby rail */
    struct prs_rail_address own[PRS_MAX_RAILS]; /* of rails, as HELLO says */
    struct prs_setup_options setup;
    enum stage stage;
    union prs_address address;
    uint64_t deadline_ns; /* UINT64_MAX: none */
    uint64_t began_ns, report_ns;
    uint64_t hello_ns; /* when HELLO was sent; 0: not yet */
    uint64_t lost_ns;  /* when a stream was first lost before the answer; 0: never */
    uint64_t again_ns; /* end of the pause */
    uint32_t pause_ms;
    struct prs_stream stream;
    struct prs_peer *peer;
    struct prs_setup_progress progress;
    struct prs_wire_reply reply;
};

static uint64_t limit_ns(const struct prs_connector *connector)
{
    return (uint64_t)connector->setup.timeout_ms * 1000000;
}

/* Return 0 or -errno. */
static int start_tcp(struct prs_connector *connector)
{
    uint8_t cookie[16];
    int fd = prs_socket_connect(&connector->address);

    if (fd < 0)
        return fd;
    memcpy(cookie, connector->stream.cookie, sizeof(cookie));
    prs_stream_init(&connector->stream, fd, &connector->address, cookie);
    connector->stage = STAGE_TCP;
    if (connector->setup.patient)
        connector->deadline_ns = prs_clock_ns() + limit_ns(connector);
    return 0;
}

int prs_connect(struct prs_fabric *fabric, const struct prs_rail_set *rails, const struct prs_handle *handle,
                const struct prs_peer_options *options, struct prs_connector **out)
{
    struct prs_connector *connector;
    union prs_address address;
    uint8_t cookie[16];
    int r;

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
    connector->fabric = fabric;
    connector->standby = prs_fabric_add_standby(fabric, rails, connector->setup.policy, &connector->rails);
    connector->address = address;
    connector->began_ns = prs_clock_ns();
    connector->deadline_ns = connector->began_ns + limit_ns(connector);
    connector->report_ns = connector->deadline_ns;
    connector->pause_ms = FIRST_PAUSE_MS;
    connector->stream.fd = -1;
    memcpy(connector->stream.cookie, cookie, sizeof(cookie));
    r = start_tcp(connector);
    if (r)
        goto free_connector;
    *out = connector;
    return 0;

free_connector:
    free(connector);
    return r;
}

void prs_connector_share(struct prs_connector *connector, struct prs_cq_group *cqs)
{
    connector->setup.cqs = cqs;
}

void prs_connector_close(struct prs_connector *connector)
{
    if (!connector)
        return;
    prs_peer_close(connector->peer);
    prs_stream_close(&connector->stream);
    free(connector);
}

static void say_hello(struct prs_connector *connector)
{
    struct prs_wire_hello hello = {.rail_count = (uint32_t)connector->rails.count,
                                   .queues_per_rail = connector->setup.queues_per_rail,
                                   .private_data = connector->setup.private_data};

    prs_wire_rails(connector->fabric, &connector->rails, connector->standby, connector->own, hello.rail);
    prs_stream_put(&connector->stream, PRS_FRAME_HELLO, &hello, sizeof(hello));
    connector->stage = STAGE_REPLY;
    connector->hello_ns = prs_clock_ns();
    /* MUTANT(connect callers/a_patient_caller_waits_for_a_late_listener)
     * a patient caller has no limit until the answer: delete */
    if (connector->setup.patient)
        connector->deadline_ns = UINT64_MAX;
}

/* Such an error may pass: the network may be unreachable for a short time only. */
static bool is_passing(int error)
{
    return error == -ECONNRESET || error == -ETIMEDOUT || error == -EHOSTUNREACH || error == -ENETUNREACH;
}

/* The stream was lost before the answer. A listener with too many callers closes connections that have been silent for
 * long, and a host that was cut off forgets its connections. No queue exists yet, so connect again: if the listener has
 * ended, that is refused. If the cookie is wrong, the listener closes each connection until the limit has passed.
 * Return PRS_AGAIN, or the error: the limit has passed. */
static int call_again(struct prs_connector *connector, int error)
{
    uint64_t now_ns = prs_clock_ns();

    if (!connector->lost_ns || (connector->hello_ns && now_ns - connector->hello_ns > limit_ns(connector))) {
        connector->lost_ns = now_ns;
        connector->pause_ms = FIRST_PAUSE_MS;
    }
    if (now_ns - connector->lost_ns > limit_ns(connector) || now_ns > connector->deadline_ns)
        return error;
    PRS_INFO("%s: %s before it answered; calling again in %u ms", connector->stream.remote, strerror(-error),
             connector->pause_ms);
    prs_stream_close(&connector->stream);
    /* MUTANT(connect callers/a_caller_that_is_hung_up_on_pauses_between_its_calls)
     * it pauses before it calls again: delete */
    connector->again_ns = now_ns + connector->pause_ms * 1000000ull;
    connector->pause_ms = connector->pause_ms * 2 < LONGEST_PAUSE_MS ? connector->pause_ms * 2 : LONGEST_PAUSE_MS;
    connector->hello_ns = 0;
    connector->stage = STAGE_PAUSE;
    return PRS_AGAIN;
}

static const char *likely_cause(int error, const char *remote)
{
    if (error != -ECONNREFUSED)
        return "is NCCL_SOCKET_IFNAME an interface that the peer reaches?";
    return !strncmp(remote, "127.", 4) || !strncmp(remote, "[::1]", 5)
               ? "has the listening process ended? From another host no loopback address can be reached: see "
                 "NCCL_SOCKET_IFNAME there"
               : "has the listening process ended?";
}

/* Run the stages from the pause to the listener's reply. Return 0 (the reply is in stream.in), PRS_AGAIN or -errno. */
static int call_listener(struct prs_connector *connector)
{
    int r = 0, lost;

    if (connector->stage == STAGE_PAUSE) {
        r = prs_clock_ns() < connector->again_ns ? PRS_AGAIN : start_tcp(connector);
        if (is_passing(r))
            return call_again(connector, r);
    }
    if (!r && connector->stage == STAGE_TCP) {
        r = prs_socket_connected(connector->stream.fd);
        if (connector->lost_ns && is_passing(r) && call_again(connector, r) == PRS_AGAIN)
            return PRS_AGAIN;
        if (r < 0)
            return prs_fail(r, "cannot connect to %s: %s; %s", connector->stream.remote, strerror(-r),
                            likely_cause(r, connector->stream.remote));
        if (!r)
            say_hello(connector);
    }
    if (r)
        return r;
    lost = prs_stream_lost(&connector->stream);
    /* MUTANT(connect callers/a_caller_that_is_hung_up_on_before_the_answer_calls_again)
     * a caller that is hung up on calls again: delete */
    if (lost && call_again(connector, lost) == PRS_AGAIN)
        return PRS_AGAIN;
    r = prs_stream_flush(&connector->stream);
    return r ? r : prs_stream_get(&connector->stream, PRS_FRAME_REPLY);
}

static int take_reply(struct prs_connector *connector)
{
    struct prs_wire_reply *reply = &connector->reply;
    uint32_t remote_position[PRS_MAX_RAILS];
    struct prs_path path[PRS_MAX_RAILS];
    int r;

    /* MUTANT(connect callers/a_patient_caller_waits_for_a_late_listener)
     * the limit holds again after the answer: delete */
    if (connector->setup.patient)
        connector->deadline_ns = prs_clock_ns() + limit_ns(connector);
    *reply = connector->stream.in.body.reply;
    /* MUTANT(connect callers/an_answer_with_impossible_numbers_is_refused)
     * the numbers of a reply are checked:
     * s/prs_wire_check_reply(reply, (uint32_t)connector->rails.count, connector->stream.remote)/0/ */
    r = prs_wire_check_reply(reply, (uint32_t)connector->rails.count, connector->stream.remote);
    if (r)
        return r;
    for (uint32_t i = 0; i < reply->pair_count; i++) {
        path[i].local_rail = connector->rails.rail[reply->pair[i].connector_rail];
        path[i].position = reply->pair[i].connector_rail;
        path[i].own = connector->own[reply->pair[i].connector_rail];
        path[i].peer = reply->rail[reply->pair[i].listener_rail];
        remote_position[i] = reply->pair[i].listener_rail;
    }
    r = prs_setup_open(connector->fabric, &connector->setup, path, remote_position, reply->pair_count,
                       reply->queues_per_pair, &reply->queues, &connector->peer);
    if (!r)
        connector->peer->offers = true;
    if (!r)
        r = prs_setup_accept_records(connector->peer, &reply->queues);
    if (!r)
        prs_setup_send_sizes(connector->peer, &reply->queues.sizes);
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
    int r = 0;

    if (connector->stage <= STAGE_REPLY) {
        r = call_listener(connector);
        if (!r)
            r = take_reply(connector);
    }
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
    return stage <= STAGE_TCP ? "a TCP connection: is NCCL_SOCKET_IFNAME an interface that the peer reaches, and does "
                                "a firewall let it through?"
           : stage == STAGE_REPLY ? "its reply: does the peer call accept?"
           : stage == STAGE_READY ? "its readiness: can its rails reach ours?"
                                  : "the network between the rails";
}

/* The listener has replied and waits for our queues: tell it why we send none. Keeps the error text. */
static void send_refusal(struct prs_connector *connector, int error)
{
    struct prs_wire_refusal refusal = {.error = error};

    snprintf(refusal.text, sizeof(refusal.text), "%s", prs_error_text());
    prs_stream_put(&connector->stream, PRS_FRAME_REFUSE, &refusal, sizeof(refusal));
    if (prs_stream_flush(&connector->stream))
        prs_error_repeat(error, refusal.text);
}

/* Nothing has arrived. Return PRS_AGAIN, or -ETIMEDOUT. */
static int wait_more(struct prs_connector *connector)
{
    uint64_t now_ns = prs_clock_ns();

    /* MUTANT(connect connect/a_wrong_cookie_is_refused_and_the_next_one_served)
     * the error says that the other side hangs up: delete */
    if (now_ns > connector->deadline_ns && connector->stage <= STAGE_REPLY && connector->lost_ns)
        return prs_fail(-ECONNRESET,
                        "%s: the other side hangs up before it answers, for %u ms; does it refuse our handle (see its "
                        "log), or has it too many callers?",
                        connector->stream.remote, connector->setup.timeout_ms);
    if (now_ns > connector->deadline_ns)
        return prs_fail(-ETIMEDOUT, "%s: not connected within %u ms; waited for %s", connector->stream.remote,
                        connector->setup.timeout_ms, stage_text(connector->stage));
    if (now_ns > connector->report_ns) {
        PRS_WARN("%s: has waited %llu s for %s It may be late: this goes on until the caller gives up",
                 connector->stream.remote, (unsigned long long)((now_ns - connector->began_ns) / 1000000000),
                 stage_text(connector->stage));
        connector->report_ns = now_ns + limit_ns(connector);
    }
    return PRS_AGAIN;
}

int prs_connector_step(struct prs_connector *connector, struct prs_peer **out)
{
    int r = step(connector);

    if (r == PRS_AGAIN)
        r = wait_more(connector);
    if (r == PRS_AGAIN)
        return r;
    if (!r) {
        prs_setup_finish(connector->peer, &connector->stream, &connector->reply.private_data);
        *out = connector->peer;
        connector->peer = NULL;
    }
    if (r && connector->stage == STAGE_CONNECT)
        send_refusal(connector, r);
    prs_connector_close(connector);
    return r;
}
