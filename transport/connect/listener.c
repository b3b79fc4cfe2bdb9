/* SPDX-License-Identifier: Apache-2.0 */
/* Accepts peers: several handshakes at a time, none of which can delay another. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "transport/connect/setup.h"
#include "transport/util/clock.h"
#include "transport/util/error.h"
#include "transport/util/fork.h"
#include "transport/util/log.h"

enum {
    HALF_OPEN = 64, /* handshakes at a time; further connections wait in the kernel's backlog */
    /* A connection that has not sent the cookie after this time is dropped. A busy peer may take longer; it connects
     * again. */
    SILENT_MS = 5000,
    REPORT_MS = 1000, /* at least, between two lines in the log about strangers */
};

enum stage { STAGE_FREE, STAGE_HELLO, STAGE_QUEUES, STAGE_CONNECT, STAGE_READY };

struct half_open {
    enum stage stage;
    bool report_to_caller; /* a failure now is returned by prs_accept(): it is on this side, or the peer reported it */
    uint64_t deadline_ns;
    struct prs_stream *stream;
    struct prs_peer *peer;
    struct prs_setup_progress progress;
    struct prs_wire_private private_data;
    struct prs_wire_queues queues;
};

struct prs_listener {
    struct prs_fabric *fabric;
    struct prs_rail_set rails;
    int fd;
    uint8_t cookie[16];
    prs_share_fn *share; /* NULL: each peer has its own completion queues */
    void *share_user;
    uint64_t report_ns;  /* when the next line about strangers may be written */
    uint32_t unreported; /* strangers since the last one */
    char stranger[256];  /* why the last one was refused */
    uint64_t until_ns;   /* prs_listener_hurry(); 0: no limit */
    int turn;            /* whose handshake is looked at first */
    struct half_open half[HALF_OPEN];
};

int prs_listen(struct prs_fabric *fabric, const struct prs_rail_set *rails, struct prs_handle *handle,
               struct prs_listener **out)
{
    union prs_address address;
    struct prs_listener *listener;
    char interface[64], text[PRS_ADDRESS_TEXT];
    int r = prs_fabric_check_set(fabric, rails, "prs_listen");

    if (r)
        return r;
    listener = calloc(1, sizeof(*listener));
    if (!listener)
        return prs_fail(-ENOMEM, "no memory for a listener");
    listener->fabric = fabric;
    listener->rails = *rails;
    if (getrandom(listener->cookie, sizeof(listener->cookie), 0) != sizeof(listener->cookie)) {
        r = prs_fail(-EIO, "getrandom: %s", strerror(errno));
        goto free_listener;
    }
    r = prs_socket_interface(&fabric->config, &address, interface, sizeof(interface));
    if (r)
        goto free_listener;
    listener->fd = prs_socket_listen(&address);
    if (listener->fd < 0) {
        r = listener->fd;
        goto free_listener;
    }
    prs_address_text(&address, text);
    PRS_DEBUG("listening on %s (%s)", text, interface);
    prs_handle_fill(listener->cookie, &address, handle);
    *out = listener;
    return 0;

free_listener:
    free(listener);
    return r;
}

void prs_listener_share(struct prs_listener *listener, prs_share_fn *share, void *user)
{
    listener->share = share;
    listener->share_user = user;
}

void prs_listener_hurry(struct prs_listener *listener, uint64_t until_ns)
{
    listener->until_ns = until_ns;
}

/* Must prs_accept() return to its caller now? Each handshake has had its turn, or has it at the next call. */
static bool is_late(const struct prs_listener *listener)
{
    return listener->until_ns && prs_clock_ns() >= listener->until_ns;
}

static void drop(struct half_open *half)
{
    prs_peer_close(half->peer);
    prs_stream_close(half->stream);
    free(half->stream);
    *half = (struct half_open){.stage = STAGE_FREE};
}

/* A port scan, or a job with an old handle, must not fill the log: one line reports all strangers of REPORT_MS. */
static void report_strangers(struct prs_listener *listener, uint64_t now_ns)
{
    /* MUTANT(connect connect/many_strangers_are_few_lines_in_the_log)
     * strangers of a while share one line: s/|| now_ns < listener->report_ns// */
    if (!listener->unreported || now_ns < listener->report_ns)
        return;
    if (listener->unreported > 1)
        PRS_WARN("%u connections were refused, the last: %s", listener->unreported, listener->stranger);
    else
        PRS_WARN("a connection was refused: %s", listener->stranger);
    listener->report_ns = now_ns + REPORT_MS * 1000000ull;
    listener->unreported = 0;
}

/* Send the other side the text of the last failure, if it listens, and drop the connection. Return the error if
 * prs_accept() must return it too, else 0. Keeps the error text. */
static int refuse(struct half_open *half, int error)
{
    bool report_to_caller = half->report_to_caller;
    struct prs_wire_refusal refusal = {.error = error};

    snprintf(refusal.text, sizeof(refusal.text), "%s", prs_error_text());
    /* MUTANT(connect connect/strangers_do_not_disturb_it)
     * strangers get no answer: s/half->stage != STAGE_HELLO/true/ */
    if (half->stage != STAGE_HELLO) {
        prs_stream_put(half->stream, PRS_FRAME_REFUSE, &refusal, sizeof(refusal));
        if (prs_stream_flush(half->stream))
            PRS_DEBUG("%s: the refusal could not be sent", half->stream->remote);
    }
    drop(half);
    return report_to_caller ? prs_error_repeat(error, refusal.text) : 0;
}

/* A slot for the next connection, or NULL: it waits until others are dropped. */
static struct half_open *find_slot(struct prs_listener *listener)
{
    for (int i = 0; i < HALF_OPEN; i++)
        if (listener->half[i].stage == STAGE_FREE)
            return &listener->half[i];
    return NULL;
}

/* Accept waiting connections. Return 0, or -errno: no descriptors or no memory for one. */
static int accept_connections(struct prs_listener *listener)
{
    uint32_t limit_ms =
        listener->fabric->config.timeout_ms < SILENT_MS ? listener->fabric->config.timeout_ms : SILENT_MS;
    uint64_t deadline_ns = prs_clock_ns() + limit_ms * 1000000ull;

    for (int i = 0; i < HALF_OPEN; i++) {
        struct half_open *half = find_slot(listener);
        struct prs_stream *stream;
        union prs_address from;
        int fd, r;

        if (!half)
            return 0;
        r = prs_socket_accept(listener->fd, &from, &fd);
        /* MUTANT(connect connect/a_listener_out_of_descriptors_says_so)
         * a lack of descriptors is an error: s/r < 0 ? r : 0/0/ */
        if (r)
            return r < 0 ? r : 0;
        stream = malloc(sizeof(*stream));
        if (!stream) {
            prs_fork_close(fd);
            return prs_fail(-ENOMEM, "no memory for the connection of a peer");
        }
        prs_stream_init(stream, fd, &from, listener->cookie);
        /* MUTANT(connect connect/many_strangers_are_few_lines_in_the_log)
         * a caller is a stranger until it shows the cookie: delete */
        stream->is_stranger = true;
        *half = (struct half_open){.stage = STAGE_HELLO, .stream = stream, .deadline_ns = deadline_ns};
    }
    return 0;
}

/* HELLO has arrived: create our queues and reply. */
static int answer_hello(struct prs_listener *listener, struct half_open *half, const struct prs_peer_options *options)
{
    const struct prs_wire_hello *hello = &half->stream->in.body.hello;
    struct prs_wire_reply reply = {0};
    uint32_t remote_position[PRS_MAX_RAILS], per_path;
    struct prs_rail_address own[PRS_MAX_RAILS];
    struct prs_path path[PRS_MAX_RAILS];
    struct prs_setup_options setup;
    struct prs_rail_set rails;
    bool standby;
    int pairs, r;

    /* MUTANT(connect connect/strangers_do_not_disturb_it)
     * the numbers of a hello are checked: s/prs_wire_check_hello(hello, half->stream->remote)/0/ */
    r = prs_wire_check_hello(hello, half->stream->remote);
    if (r)
        return r;
    half->stage = STAGE_QUEUES; /* it holds the cookie: no stranger */
    half->deadline_ns = prs_clock_ns() + (uint64_t)listener->fabric->config.timeout_ms * 1000000;
    /* MUTANT(connect refuse/both_sides_learn_what_the_listener_cannot_do)
     * accept returns what keeps this side from answering: delete */
    half->report_to_caller = true; /* until the reply is complete */
    r = prs_setup_options(listener->fabric, options, &setup);
    if (r)
        return r;
    if (listener->share)
        setup.cqs = listener->share(listener->share_user, &hello->private_data);
    standby = prs_fabric_add_standby(listener->fabric, &listener->rails, setup.policy, &rails);
    reply.rail_count = (uint32_t)rails.count;
    prs_wire_rails(listener->fabric, &rails, standby, own, reply.rail);
    pairs = prs_wire_pair_rails(hello->rail, hello->rail_count, reply.rail, reply.rail_count, reply.pair);
    if (pairs < 0)
        return pairs;
    for (int i = 0; i < pairs; i++) {
        path[i].local_rail = rails.rail[reply.pair[i].listener_rail];
        path[i].position = reply.pair[i].listener_rail;
        path[i].own = own[reply.pair[i].listener_rail];
        path[i].peer = hello->rail[reply.pair[i].connector_rail];
        remote_position[i] = reply.pair[i].connector_rail;
    }
    /* MUTANT(connect callers/both_sides_have_as_many_queues_as_the_one_that_wants_fewer)
     * the side that wants fewer queues decides: s/hello->queues_per_rail < setup.queues_per_rail/false/ */
    per_path = hello->queues_per_rail < setup.queues_per_rail ? hello->queues_per_rail : setup.queues_per_rail;
    if (per_path * (uint32_t)pairs > PRS_ORDER_MAX_DATA_QUEUES)
        per_path = PRS_ORDER_MAX_DATA_QUEUES / (uint32_t)pairs;
    r = prs_setup_open(listener->fabric, &setup, path, remote_position, (uint32_t)pairs, per_path, NULL, &half->peer);
    if (r)
        return r;
    half->private_data = hello->private_data;
    reply.pair_count = (uint32_t)pairs;
    reply.queues_per_pair = per_path;
    reply.private_data = setup.private_data;
    prs_setup_addresses(half->peer, &reply.queues);
    prs_stream_put(half->stream, PRS_FRAME_REPLY, &reply, sizeof(reply));
    half->report_to_caller = false;
    return 0;
}

/* Return 0, PRS_AGAIN or -errno. */
static int take_queues(struct half_open *half)
{
    int r = prs_stream_get(half->stream, PRS_FRAME_QUEUES);

    /* MUTANT(connect refuse/both_sides_learn_what_the_connector_cannot_do)
     * accept returns why the other side refused: delete */
    half->report_to_caller = r < 0 && half->stream->in.head.type == PRS_FRAME_REFUSE;
    if (r)
        return r;
    half->queues = half->stream->in.body.queues;
    r = prs_setup_accept_records(half->peer, &half->queues);
    half->report_to_caller = r < 0;
    prs_setup_send_sizes(half->peer, &half->queues.sizes);
    return r ? r : prs_setup_send_records(half->peer, &half->queues.records);
}

/* Return 0, PRS_AGAIN or -errno. */
static int connect_queues(struct half_open *half)
{
    int r = prs_setup_connect(half->peer, &half->queues, &half->progress);

    half->report_to_caller = r < 0;
    return r;
}

/* Return 0 (connected), PRS_AGAIN or -errno. */
static int step(struct prs_listener *listener, struct half_open *half, const struct prs_peer_options *options)
{
    struct prs_wire_ready ready;
    struct prs_wire_queues own;
    int r;

    if (half->stage == STAGE_HELLO) {
        r = prs_stream_get(half->stream, PRS_FRAME_HELLO);
        if (!r)
            r = answer_hello(listener, half, options);
        if (r)
            return r;
    }
    r = prs_stream_flush(half->stream);
    if (r)
        return r;
    if (half->stage == STAGE_QUEUES) {
        r = take_queues(half);
        if (r)
            return r;
        half->stage = STAGE_CONNECT;
    }
    if (half->stage == STAGE_CONNECT) {
        r = connect_queues(half);
        if (r)
            return r;
        prs_setup_addresses(half->peer, &own);
        ready.records = own.records;
        prs_stream_put(half->stream, PRS_FRAME_READY, &ready, sizeof(ready));
        half->stage = STAGE_READY;
    }
    return prs_stream_flush(half->stream);
}

static const char *stage_text(enum stage stage)
{
    return stage == STAGE_HELLO    ? "its hello"
           : stage == STAGE_QUEUES ? "its queues"
           : stage == STAGE_READY  ? "space to send"
                                   : "the network";
}

static int give_up(const struct prs_listener *listener, const struct half_open *half)
{
    uint32_t limit_ms = listener->fabric->config.timeout_ms;
    char text[256];

    if (!half->stream->is_stranger)
        return prs_fail(-ETIMEDOUT, "%s: dropped, because it did not connect within %u ms (waited for %s)",
                        half->stream->remote, limit_ms, stage_text(half->stage));
    snprintf(text, sizeof(text), "%s: did not say within %u ms what it wants", half->stream->remote,
             limit_ms < SILENT_MS ? limit_ms : SILENT_MS);
    return prs_error_repeat(-ETIMEDOUT, text);
}

int prs_accept(struct prs_listener *listener, const struct prs_peer_options *options, struct prs_peer **out)
{
    bool stepped = false;
    uint64_t now_ns;
    int failed = accept_connections(listener);

    if (failed)
        return failed;
    now_ns = prs_clock_ns();
    for (int i = 0; i < HALF_OPEN; i++) {
        struct half_open *half = &listener->half[listener->turn];
        int r;

        /* MUTANT(connect rounds/one_makes_few_queues_for_those_who_call)
         * making queues has a limit: s/stepped && is_late(listener)/false/ */
        if (stepped && is_late(listener))
            return PRS_AGAIN;
        listener->turn = (listener->turn + 1) % HALF_OPEN;
        if (half->stage == STAGE_FREE)
            continue;
        stepped = true;
        r = step(listener, half, options);
        if (!r) {
            prs_setup_finish(half->peer, half->stream, &half->private_data);
            *out = half->peer;
            half->peer = NULL;
            drop(half);
            return 0;
        }
        if (r == PRS_AGAIN && now_ns > half->deadline_ns)
            r = give_up(listener, half);
        if (r < 0 && half->stream->is_stranger) {
            listener->unreported++;
            snprintf(listener->stranger, sizeof(listener->stranger), "%s", prs_error_text());
        }
        if (r < 0)
            r = refuse(half, r);
        if (r < 0)
            return r;
    }
    report_strangers(listener, now_ns);
    return PRS_AGAIN;
}

void prs_listener_close(struct prs_listener *listener)
{
    if (!listener)
        return;
    report_strangers(listener, UINT64_MAX);
    /* MUTANT(connect callers/a_listener_that_closes_hangs_up_on_its_callers)
     * a listener that closes hangs up on its callers: delete */
    for (int i = 0; i < HALF_OPEN; i++)
        if (listener->half[i].stage != STAGE_FREE)
            drop(&listener->half[i]);
    prs_fork_close(listener->fd);
    free(listener);
}
