/* SPDX-License-Identifier: Apache-2.0 */
/* Waiting for peers: several handshakes at a time, none of which can hold up another. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "transport/setup.h"
#include "transport/util/clock.h"
#include "transport/util/error.h"
#include "transport/util/log.h"

enum {
    HALF_OPEN = 64, /* handshakes at a time; further callers wait in the kernel's backlog */
    SILENT_MS =
        200, /* who has not said a word for so long gives way to them: a peer speaks as soon as it is connected */
};

enum stage { STAGE_FREE, STAGE_HELLO, STAGE_QUEUES, STAGE_CONNECT, STAGE_READY };

struct half_open {
    enum stage stage;
    bool tell_caller; /* who waits for this peer: something is wanting on this side, or the peer says so of its own */
    uint64_t since_ns, deadline_ns;
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

static void drop(struct half_open *half)
{
    prs_peer_close(half->peer);
    prs_stream_close(half->stream);
    free(half->stream);
    *half = (struct half_open){.stage = STAGE_FREE};
}

/* Tell the other side why, as far as it listens; then forget it. The text is that of the last failure, and stays.
 * Return the error when it is our caller's as well, else 0. */
static int refuse(struct half_open *half, int error)
{
    bool tell_caller = half->tell_caller;
    struct prs_wire_refusal refusal = {.error = error};

    snprintf(refusal.text, sizeof(refusal.text), "%s", prs_error_text());
    if (half->stage != STAGE_HELLO) { /* a stranger gets no answer */
        prs_stream_put(half->stream, PRS_FRAME_REFUSE, &refusal, sizeof(refusal));
        if (prs_stream_flush(half->stream))
            PRS_DEBUG("%s: the refusal did not get through", half->stream->remote);
    }
    drop(half);
    return tell_caller ? prs_error_repeat(error, refusal.text) : 0;
}

/* Where the next caller goes: a free place, else that of the stranger who has been silent longest; NULL: there is none.
 */
static struct half_open *find_place(struct prs_listener *listener, uint64_t now_ns)
{
    struct half_open *oldest = NULL;

    for (int i = 0; i < HALF_OPEN; i++) {
        struct half_open *half = &listener->half[i];

        if (half->stage == STAGE_FREE)
            return half;
        if (half->stage == STAGE_HELLO && now_ns - half->since_ns > SILENT_MS * 1000000ull &&
            (!oldest || half->since_ns < oldest->since_ns))
            oldest = half;
    }
    return oldest;
}

/* Return 0, also when nobody calls, or -errno: no descriptors or no memory for one who does. */
static int take_callers(struct prs_listener *listener)
{
    uint64_t now_ns = prs_clock_ns();

    for (int i = 0; i < HALF_OPEN; i++) {
        struct half_open *half = find_place(listener, now_ns);
        struct prs_stream *stream;
        union prs_address from;
        int fd, r;

        if (!half)
            return 0;
        r = prs_socket_accept(listener->fd, &from, &fd);
        if (r)
            return r < 0 ? r : 0;
        stream = malloc(sizeof(*stream));
        if (!stream) {
            close(fd);
            return prs_fail(-ENOMEM, "no memory for a connection that a peer wants");
        }
        if (half->stage != STAGE_FREE) {
            PRS_INFO("%s: dropped, since it said nothing and %d others wait too", half->stream->remote, HALF_OPEN);
            drop(half);
        }
        prs_stream_init(stream, fd, &from, listener->cookie);
        *half = (struct half_open){.stage = STAGE_HELLO,
                                   .stream = stream,
                                   .since_ns = now_ns,
                                   .deadline_ns = now_ns + (uint64_t)listener->fabric->config.timeout_ms * 1000000};
    }
    return 0;
}

/* HELLO is here: make our half and reply. */
static int answer_hello(struct prs_listener *listener, struct half_open *half, const struct prs_peer_options *options)
{
    const struct prs_wire_hello *hello = &half->stream->in.body.hello;
    struct prs_wire_reply reply = {.rail_count = (uint32_t)listener->rails.count};
    uint32_t remote_position[PRS_MAX_RAILS], per_path;
    struct prs_path path[PRS_MAX_RAILS];
    struct prs_setup_options setup;
    int pairs, r;

    r = prs_wire_check_hello(hello, half->stream->remote);
    if (r)
        return r;
    half->stage = STAGE_QUEUES; /* no stranger: it holds the cookie */
    half->tell_caller = true;   /* until the reply is made */
    r = prs_setup_options(listener->fabric, options, &setup);
    if (r)
        return r;
    prs_wire_rails(listener->fabric, &listener->rails, reply.rail);
    pairs = prs_wire_pair_rails(hello->rail, hello->rail_count, reply.rail, reply.rail_count, reply.pair);
    if (pairs < 0)
        return pairs;
    for (int i = 0; i < pairs; i++) {
        path[i].local_rail = listener->rails.rail[reply.pair[i].listener_rail];
        path[i].peer = hello->rail[reply.pair[i].connector_rail];
        remote_position[i] = reply.pair[i].connector_rail;
    }
    per_path = hello->queues_per_rail < setup.queues_per_rail ? hello->queues_per_rail : setup.queues_per_rail;
    if (per_path * (uint32_t)pairs > PRS_ORDER_MAX_DATA_QUEUES)
        per_path = PRS_ORDER_MAX_DATA_QUEUES / (uint32_t)pairs;
    r = prs_setup_open(listener->fabric, &setup, path, remote_position, (uint32_t)pairs, per_path, &half->peer);
    if (r)
        return r;
    half->private_data = hello->private_data;
    reply.pair_count = (uint32_t)pairs;
    reply.queues_per_pair = per_path;
    reply.private_data = setup.private_data;
    prs_setup_addresses(half->peer, &reply.queues);
    prs_stream_put(half->stream, PRS_FRAME_REPLY, &reply, sizeof(reply));
    half->tell_caller = false;
    return 0;
}

/* Return 0, PRS_AGAIN or -errno. */
static int take_queues(struct half_open *half)
{
    int r = prs_stream_get(half->stream, PRS_FRAME_QUEUES);

    half->tell_caller = r < 0 && half->stream->in.head.type == PRS_FRAME_REFUSE;
    if (r)
        return r;
    half->queues = half->stream->in.body.queues;
    r = prs_setup_accept_records(half->peer, &half->queues);
    half->tell_caller = r < 0;
    return r ? r : prs_setup_send_records(half->peer, &half->queues.records);
}

/* Return 0, PRS_AGAIN or -errno. */
static int connect_queues(struct half_open *half)
{
    int r = prs_setup_connect(half->peer, &half->queues, &half->progress);

    half->tell_caller = r < 0;
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
    return stage == STAGE_HELLO    ? "its first words"
           : stage == STAGE_QUEUES ? "its queues"
           : stage == STAGE_READY  ? "room to send"
                                   : "the network";
}

int prs_accept(struct prs_listener *listener, const struct prs_peer_options *options, struct prs_peer **out)
{
    uint64_t now_ns;
    int failed = take_callers(listener);

    if (failed)
        return failed;
    now_ns = prs_clock_ns();
    for (int i = 0; i < HALF_OPEN; i++) {
        struct half_open *half = &listener->half[i];
        int r;

        if (half->stage == STAGE_FREE)
            continue;
        r = step(listener, half, options);
        if (!r) {
            prs_setup_finish(half->peer, half->stream, &half->private_data);
            *out = half->peer;
            half->peer = NULL;
            drop(half);
            return 0;
        }
        if (r == PRS_AGAIN && now_ns > half->deadline_ns)
            r = prs_fail(-ETIMEDOUT, "%s: dropped, since it did not connect within %u ms (waited for %s)",
                         half->stream->remote, listener->fabric->config.timeout_ms, stage_text(half->stage));
        if (r < 0)
            r = refuse(half, r);
        if (r < 0)
            return r;
    }
    return PRS_AGAIN;
}

void prs_listener_close(struct prs_listener *listener)
{
    if (!listener)
        return;
    for (int i = 0; i < HALF_OPEN; i++)
        if (listener->half[i].stage != STAGE_FREE)
            drop(&listener->half[i]);
    close(listener->fd);
    free(listener);
}
