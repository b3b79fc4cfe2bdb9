/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/failover.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "transport/peer.h"
#include "transport/util/clock.h"
#include "transport/util/error.h"
#include "transport/util/log.h"

enum {
    DRAIN_MS = 10000, /* a NIC flushes a queue in far less */
    EXPECT_MS = 1000, /* look for a note that was announced so long; afterwards, now and then */
};

int prs_failover_open(struct prs_peer *peer)
{
    if (!prs_order_can_fail_over(&peer->order))
        return 0;
    peer->failover = calloc(1, sizeof(*peer->failover));
    return peer->failover ? 0 : prs_fail(-ENOMEM, "no memory to replace rails");
}

void prs_failover_close(struct prs_peer *peer)
{
    free(peer->failover);
    peer->failover = NULL;
}

bool prs_failover_is_down(const struct prs_peer *peer, uint32_t path)
{
    return peer->failover && peer->failover->path[path].stage != PRS_PATH_UP;
}

/* ---- fence ---- */

bool prs_failover_start(struct prs_peer *peer, uint32_t path, const char *why)
{
    struct prs_failover *failover = peer->failover;
    struct prs_failover_path *lost;

    if (!failover || peer->stream_fd < 0 || peer->remote_closed)
        return false;
    lost = &failover->path[path];
    if (lost->stage != PRS_PATH_UP)
        return true;
    if (prs_order_path_stop(&peer->order, path))
        return false; /* the last one */
    snprintf(lost->why, sizeof(lost->why), "%s", why);
    prs_nic_stop_queues(peer->link[path]);
    lost->stage = PRS_PATH_DRAINING;
    lost->since_ns = prs_clock_ns();
    failover->active |= 1u << path;
    peer->idle_start = peer->idle_polls = PRS_PEER_IDLE_POLLS; /* look after it at each poll that finds nothing */
    return true;
}

void prs_failover_expect_note(struct prs_peer *peer)
{
    peer->failover->expect_until_ns = prs_clock_ns() + EXPECT_MS * 1000000ull;
    peer->idle_start = peer->idle_polls = PRS_PEER_IDLE_POLLS;
}

/* ---- the stream ---- */

static void send_note(struct prs_peer *peer, const struct prs_wire_note *note)
{
    /* It fits the buffer of the socket: few are sent in the life of a peer. If the connection is broken, reading from it
     * tells why. */
    if (send(peer->stream_fd, note, sizeof(*note), MSG_DONTWAIT | MSG_NOSIGNAL) != (ssize_t)sizeof(*note))
        PRS_DEBUG("%s: cannot be told of a failure: %s", peer->remote, strerror(errno));
}

void prs_failover_tell_failure(struct prs_peer *peer, const char *why)
{
    struct prs_wire_note note = {.type = PRS_NOTE_FAILED};

    if (!peer->failover || peer->stream_fd < 0 || peer->remote_closed)
        return;
    snprintf(note.why, sizeof(note.why), "%s", why);
    send_note(peer, &note);
}

static int take_note(struct prs_peer *peer, struct prs_wire_note *note)
{
    struct prs_failover_path *lost;
    char why[sizeof(note->why) + 32];

    note->why[sizeof(note->why) - 1] = 0;
    if (note->type == PRS_NOTE_FAILED)
        return prs_peer_fail(peer, -ECONNRESET, "the peer at %s has failed: %s", peer->remote, note->why);
    if (note->type != PRS_NOTE_DOWN || !peer->failover || note->path >= peer->path_count)
        return prs_peer_fail(peer, -EPROTO, "the peer at %s sent a note of type %u about path %u", peer->remote,
                             note->type, note->path);
    lost = &peer->failover->path[note->path];
    if (lost->told)
        return prs_peer_fail(peer, -EPROTO, "the peer at %s lost path %u twice", peer->remote, note->path);
    snprintf(why, sizeof(why), "the other side lost it: %s", note->why);
    if (!prs_failover_start(peer, note->path, why))
        return prs_peer_fail(peer, -ENETDOWN, "no rail is left: %s", why);
    memcpy(lost->taken, note->taken, sizeof(lost->taken));
    lost->told = true;
    return 0;
}

int prs_failover_read(struct prs_peer *peer)
{
    struct prs_failover none = {0}, *at = peer->failover ? peer->failover : &none;

    for (;;) {
        ssize_t n = recv(peer->stream_fd, (char *)&at->in + at->in_bytes,
                         at->in_bytes ? sizeof(at->in) - at->in_bytes : 1, MSG_DONTWAIT);
        int r;

        if (n < 0)
            return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? PRS_AGAIN : -errno;
        if (n == 0)
            return -ECONNRESET;
        if (at->in.type == PRS_NOTE_FAREWELL) {
            peer->remote_closed = true;
            return 0;
        }
        at->in_bytes += (uint32_t)n;
        if (!peer->failover)
            return prs_peer_fail(peer, -EPROTO, "the peer at %s sent a byte %#x", peer->remote, at->in.type);
        if (at->in_bytes < sizeof(at->in))
            continue;
        at->in_bytes = 0;
        at->expect_until_ns = 0;
        r = take_note(peer, &at->in);
        if (r)
            return r;
    }
}

/* ---- drain, agree, replay ---- */

static void tell_taken(struct prs_peer *peer, uint32_t path)
{
    struct prs_wire_note note = {.type = PRS_NOTE_DOWN, .path = (uint8_t)path};

    for (uint32_t k = 0; k < peer->queues_per_path; k++)
        note.taken[k] = peer->nic->taken(peer->link[path]->queue[k]);
    snprintf(note.why, sizeof(note.why), "%s", peer->failover->path[path].why);
    send_note(peer, &note);
    (void)prs_order_knock(&peer->order); /* without room for it, the other side looks a little later */
}

/* Requests of a loopback queue cannot be sent again: an add could be done twice. */
static int fail_loopback(struct prs_peer *peer, uint32_t path)
{
    return prs_peer_fail(peer, -ENETDOWN, "%s, which raises the signals that arrive here, is lost: %s",
                         peer->link[path]->rail->info.name, peer->failover->path[path].why);
}

int prs_failover_lose_loopback(struct prs_peer *peer, uint32_t path)
{
    peer->failover->loopbacks |= 1u << path;
    if (peer->failover->path[path].stage != PRS_PATH_DOWN)
        return 0; /* replay() does it */
    return prs_order_probe_lost(&peer->order, path) < 0 ? fail_loopback(peer, path) : 0;
}

static int replay(struct prs_peer *peer, uint32_t path)
{
    struct prs_failover_path *lost = &peer->failover->path[path];
    const struct prs_rail_info *own = &peer->link[path]->rail->info;
    struct prs_order_replay replay;
    int r = prs_order_path_down(&peer->order, path, lost->taken, &replay);

    if (r < 0)
        return prs_peer_fail(peer, r, "the peer at %s has taken more from %s:%d than was sent", peer->remote, own->name,
                             own->port);
    lost->stage = PRS_PATH_DOWN;
    peer->failover->active &= ~(1u << path);
    PRS_WARN("%s:%d to %s:%u at %s is lost: %s. The other rails go on: %u requests (%llu bytes) are sent again, %u had "
             "arrived; agreed after %.1f ms",
             own->name, own->port, peer->path[path].peer.name, peer->path[path].peer.port, peer->remote, lost->why,
             replay.replayed, (unsigned long long)replay.bytes, replay.taken,
             (double)(prs_clock_ns() - lost->since_ns) / 1e6);
    if (peer->failover->loopbacks >> path & 1 && prs_order_probe_lost(&peer->order, path) < 0)
        return fail_loopback(peer, path);
    /* Credits and flushes have waited for this: no completion may come that would start them. */
    return peer->records ? prs_records_raise(peer) : 0;
}

/* Return 0 or -errno (the peer has failed). */
static int step_path(struct prs_peer *peer, uint32_t path)
{
    struct prs_failover_path *lost = &peer->failover->path[path];
    uint64_t now_ns = prs_clock_ns();

    if (lost->stage == PRS_PATH_DRAINING) {
        if (!peer->nic->drained(peer->link[path]))
            return now_ns - lost->since_ns < DRAIN_MS * 1000000ull
                       ? 0
                       : prs_peer_fail(peer, -EIO, "%s did not flush its queues within %d ms after: %s",
                                       peer->link[path]->rail->info.name, DRAIN_MS, lost->why);
        tell_taken(peer, path);
        lost->stage = PRS_PATH_AGREEING;
    }
    if (lost->told)
        return replay(peer, path);
    if (now_ns - lost->since_ns >= peer->fabric->config.timeout_ms * 1000000ull)
        return prs_peer_fail(
            peer, -ETIMEDOUT,
            "%s:%d is lost (%s), and %s has not said within %u ms what it has taken: it makes no progress",
            peer->link[path]->rail->info.name, peer->link[path]->rail->info.port, lost->why, peer->remote,
            peer->fabric->config.timeout_ms);
    return 0;
}

int prs_failover_step(struct prs_peer *peer)
{
    int r = 0;

    for (uint32_t left = peer->failover->active; left && !r; left &= left - 1)
        r = step_path(peer, (uint32_t)__builtin_ctz(left));
    if (peer->failover->expect_until_ns && prs_clock_ns() > peer->failover->expect_until_ns)
        peer->failover->expect_until_ns = 0;
    if (!r && !peer->failover->active && !peer->failover->expect_until_ns && !peer->farewell_ns)
        peer->idle_start = 0;
    return r;
}
