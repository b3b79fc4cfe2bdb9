/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/peer/failover.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "transport/peer/fail.h"
#include "transport/peer/note.h"
#include "transport/peer/peer.h"
#include "transport/peer/recovery.h"
#include "transport/util/clock.h"
#include "transport/util/error.h"
#include "transport/util/log.h"

enum {
    KEPT_ROOM = 256,  /* events, at first */
    EXPECT_MS = 1000, /* for so long after a note was announced, look for it at each call; after that, rarely */
};

int prs_failover_open(struct prs_peer *peer)
{
    if (!prs_order_can_fail_over(&peer->order))
        return 0;
    peer->failover = prs_lines_calloc(sizeof(*peer->failover));
    if (!peer->failover)
        return prs_fail(-ENOMEM, "no memory to replace rails");
    return 0;
}

void prs_failover_close(struct prs_peer *peer)
{
    if (peer->failover)
        free(peer->failover->kept);
    prs_lines_free(peer->failover);
    peer->failover = NULL;
    free(peer->loss);
    peer->loss = NULL;
}

/* ---- fence ---- */

void prs_failover_fence(struct prs_peer *peer, uint32_t path, const char *why)
{
    struct prs_failover_path *lost = &peer->failover->path[path];

    snprintf(lost->why, sizeof(lost->why), "%s", why);
    peer->nic->stop(peer->link[path]);
    lost->since_ns = prs_clock_ns();
    if (lost->stage == PRS_PATH_UP)
        lost->lost_ns = lost->since_ns;
    prs_failover_set_stage(peer->failover, path, PRS_PATH_DRAINING);
}

/* Stop the paths that the thread has fenced. The owner may have posted requests there since. They are flushed, and are
 * sent again like all that the receiver has not taken. */
void prs_failover_catch_up(struct prs_peer *peer)
{
    for (uint32_t i = 0; i < peer->path_count; i++)
        if (prs_failover_is_agreeing(peer->failover, i))
            (void)prs_order_path_stop(&peer->order, i); /* cannot fail: the thread leaves one path */
    peer->failover->attended = false;
}

bool prs_failover_start(struct prs_peer *peer, uint32_t path, const char *why)
{
    struct prs_failover *failover = peer->failover;

    /* MUTANT(peer) a side that has closed agrees to nothing: s/|| peer->remote_closed// */
    if (!failover || peer->stream_fd < 0 || peer->remote_closed)
        return false;
    if (prs_peer_lost_path(peer, path))
        return true;
    /* MUTANT(peer) the last path is not given up: s/return false/(void)0/ */
    if (prs_order_path_stop(&peer->order, path))
        return false; /* the last one */
    prs_failover_fence(peer, path, why);
    return true;
}

bool prs_failover_is_active(const struct prs_peer *peer)
{
    bool any = false;

    for (uint32_t i = 0; i < peer->path_count; i++)
        any |= prs_failover_is_agreeing(peer->failover, i);
    return any;
}

void prs_failover_expect_note(struct prs_peer *peer)
{
    peer->failover->expect_until_ns = prs_clock_ns() + EXPECT_MS * 1000000ull;
}

/* ---- the stream ---- */

void prs_failover_told(struct prs_peer *peer, const struct prs_wire_note *note)
{
    struct prs_failover_path *lost = &peer->failover->path[note->path];

    memcpy(lost->taken, note->taken, sizeof(lost->taken));
    /* MUTANT(peer) what the other side took is known: delete */
    lost->told = true;
    peer->failover->expect_until_ns = 0;
}

bool prs_failover_expects(const struct prs_peer *peer, const struct prs_wire_note *note)
{
    const struct prs_failover_path *path;

    /* MUTANT(peer) a note is about a path that exists: s/|| note->path >= peer->path_count// */
    if (!peer->failover || note->path >= peer->path_count)
        return false;
    path = &peer->failover->path[note->path];
    /* The stream keeps order: what a side sends before it gives a path up arrives before its DOWN. */
    /* MUTANT(peer) a note is about the queues in use: s/note->epoch == path->epoch &&// */
    /* MUTANT(peer) a path is told of once: s/&& !path->told// */
    return (note->type == PRS_NOTE_DOWN && note->epoch == path->epoch && !path->told) ||
           prs_recovery_expects(peer, note);
}

/* Return 0 or -errno (the peer has failed). */
static int make_loss(struct prs_peer *peer)
{
    if (!peer->loss)
        peer->loss = calloc(1, sizeof(*peer->loss));
    return peer->loss ? 0 : prs_peer_fail(peer, -ENOMEM, "no memory for what the peer at %s says", peer->remote);
}

/* Keep the note; the owner fails the peer later (health.c). Return 0 or -errno (the peer has failed). */
static int take_loss(struct prs_peer *peer, const struct prs_wire_note *note)
{
    int r = make_loss(peer);

    /* MUTANT(peer) the first loss counts: s/|| peer->loss->since_ns// */
    if (r || peer->loss->since_ns)
        return r;
    peer->loss->rank = note->rank;
    /* MUTANT(peer) what a note says has an end: s/PRS_LOSS_TEXT - 1/PRS_LOSS_TEXT/ */
    memcpy(peer->loss->why, note->loss, PRS_LOSS_TEXT - 1); /* the last byte stays 0 */
    peer->loss->since_ns = prs_clock_ns();
    return 0;
}

static int take_note(struct prs_peer *peer, struct prs_wire_note *note)
{
    char why[sizeof(note->why) + 32];

    if (note->type == PRS_NOTE_LOST)
        return take_loss(peer, note);
    if (note->type == PRS_NOTE_FAILED) {
        note->why[sizeof(note->why) - 1] = 0;
        return prs_peer_fail(peer, -ECONNRESET, "the peer at %s has failed: %s", peer->remote, note->why);
    }
    if (!prs_failover_expects(peer, note))
        return prs_peer_fail(
            peer, -EPROTO,
            "the peer at %s sent a note of type %u about path %u, queues %u, that is unexpected here, or "
            "offers queues of a port that cannot be",
            peer->remote, note->type, note->path, note->epoch);
    if (prs_recovery_take(peer, note))
        return 0;
    note->why[sizeof(note->why) - 1] = 0;
    snprintf(why, sizeof(why), "the other side lost it: %s", note->why);
    if (!prs_failover_start(peer, note->path, why))
        return prs_peer_fail(peer, -ENETDOWN, "no rail is left: %s", why);
    prs_failover_told(peer, note);
    return 0;
}

int prs_failover_read(struct prs_peer *peer)
{
    struct prs_failover *failover = peer->failover;
    struct prs_wire_note begun = {0}; /* without failover, the first byte */

    for (;;) {
        uint32_t none = 0, *have = failover ? &failover->in_bytes : peer->loss ? &peer->loss->in_bytes : &none;
        struct prs_wire_note *in = failover ? &failover->in : peer->loss ? &peer->loss->in : &begun;
        ssize_t n = recv(peer->stream_fd, (char *)in + *have, *have ? sizeof(*in) - *have : 1, MSG_DONTWAIT);
        int r;

        if (n < 0)
            return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? PRS_AGAIN : -errno;
        if (n == 0)
            return -ECONNRESET;
        /* MUTANT(peer) a farewell closes: s/peer->remote_closed = true;// */
        if (in->type == PRS_NOTE_FAREWELL) {
            peer->remote_closed = true;
            return 0;
        }
        /* MUTANT(peer) without failover only a loss is told: s/in->type != PRS_NOTE_LOST/false/ */
        if (!failover && in->type != PRS_NOTE_LOST)
            return prs_peer_fail(peer, -EPROTO, "the peer at %s sent a byte %#x", peer->remote, in->type);
        if (in == &begun) {
            r = make_loss(peer);
            if (r)
                return r;
            peer->loss->in.type = begun.type;
            have = &peer->loss->in_bytes;
        }
        *have += (uint32_t)n;
        /* MUTANT(peer) a note is whole: delete */
        if (*have < sizeof(*in))
            continue;
        *have = 0;
        r = take_note(peer, in);
        if (r)
            return r;
    }
}

/* ---- drain, agree, replay ---- */

static bool has_room(struct prs_failover *failover)
{
    uint32_t room = failover->kept_room ? 2 * failover->kept_room : KEPT_ROOM;
    struct prs_event *kept;

    if (failover->kept_count + PRS_POLL_MOST <= failover->kept_room)
        return true;
    kept = realloc(failover->kept, room * sizeof(*kept));
    if (!kept)
        return false;
    failover->kept = kept;
    failover->kept_room = room;
    return true;
}

bool prs_failover_keep_events(struct prs_peer *peer, uint32_t path)
{
    struct prs_failover *failover = peer->failover;
    uint32_t before = failover->kept_count;
    int count;

    while (has_room(failover)) {
        struct prs_event *events = &failover->kept[failover->kept_count];

        count = peer->nic->poll(peer->link[path], events);
        if (count <= 0)
            return failover->kept_count != before; /* the owner's poll will return the error again */
        for (int i = 0; i < count; i++)
            if (events[i].kind != PRS_EVENT_ERROR || events[i].queue >= peer->queues)
                failover->kept[failover->kept_count++] = events[i];
        failover->attended = true;
    }
    return true; /* no memory: later */
}

bool prs_failover_is_drained(struct prs_peer *peer, uint32_t path)
{
    struct prs_link *link = peer->link[path];

    if (!link->unflushed)
        return peer->nic->drained(link);
    if (prs_failover_keep_events(peer, path))
        return false; /* the owner must first take these events */
    peer->nic->end(link);
    return true;
}

void prs_failover_tell(struct prs_peer *peer, uint32_t path)
{
    struct prs_wire_note note = {
        .type = PRS_NOTE_DOWN, .path = (uint8_t)path, .epoch = peer->failover->path[path].epoch};

    for (uint32_t k = 0; k < peer->queues_per_path; k++)
        note.taken[k] = peer->nic->taken(peer->link[path]->queue[k]);
    snprintf(note.why, sizeof(note.why), "%s", peer->failover->path[path].why);
    prs_note_send(peer, &note);
    /* MUTANT(peer) a path that was told of is agreed on: delete */
    prs_failover_set_stage(peer->failover, path, PRS_PATH_AGREEING);
}

/* The loopback queue of a lost path has failed too. Sets in device memory that were in flight are raised again by
 * another rail. An add cannot be: it could be done twice. */
static int end_loopback(struct prs_peer *peer, uint32_t path)
{
    uint64_t word;

    if (prs_order_probe_lost(&peer->order, path, &word) >= 0)
        return 0;
    return prs_peer_fail(peer, -ENETDOWN,
                         "%s is lost while it added to the word %#llx in device memory here, and nothing tells whether "
                         "that was done: %s",
                         peer->link[path]->rail->info.name, (unsigned long long)word, peer->failover->path[path].why);
}

int prs_failover_lose_loopback(struct prs_peer *peer, uint32_t path)
{
    struct prs_order_path *lost = &peer->order.path[path];

    if (lost->probe == PRS_PROBE_WORKS) /* noted also if the path is given up for another error */
        lost->probe = PRS_PROBE_FAILED;
    if (!prs_peer_lost_path(peer, path))
        return PRS_AGAIN;
    if (peer->failover->path[path].stage != PRS_PATH_DOWN)
        return 0; /* replay() ends the loopback queue later */
    return end_loopback(peer, path);
}

static int finish_replay(struct prs_peer *peer, uint32_t path)
{
    /* A NIC that flushes nothing does not report that its loopback queue has failed. */
    int r =
        peer->order.path[path].probe == PRS_PROBE_FAILED || peer->link[path]->unflushed ? end_loopback(peer, path) : 0;

    if (r)
        return r;
    /* Credits and flushes have waited for the end of the replay. Start them here, since perhaps no completion comes
     * that would. */
    return peer->records ? prs_records_raise(peer) : 0;
}

static int replay(struct prs_peer *peer, uint32_t path)
{
    struct prs_failover_path *lost = &peer->failover->path[path];
    const struct prs_rail_info *own = &peer->link[path]->rail->info;
    struct prs_order_replay replay;
    int r;

    prs_failover_set_stage(peer->failover, path, PRS_PATH_DOWN);
    prs_recovery_allow(peer, path);
    if (prs_order_path_is_lost(&peer->order, path)) /* new queues over which nothing has been sent yet */
        return finish_replay(peer, path);
    r = prs_order_path_down(&peer->order, path, lost->taken, &replay);
    /* MUTANT(peer) nobody takes more than was sent: delete */
    if (r < 0)
        return prs_peer_fail(peer, r,
                             "the peer at %s says that it has taken more from %s:%d than was sent, or less than "
                             "its NIC has confirmed",
                             peer->remote, own->name, own->port);
    PRS_WARN("%s:%d to %s:%u at %s is lost: %s. The other rails go on: %u requests (%llu bytes) are sent again, %u had "
             "arrived; agreed after %.1f ms",
             own->name, own->port, peer->path[path].peer.name, peer->path[path].peer.port, peer->remote, lost->why,
             replay.replayed, (unsigned long long)replay.bytes, replay.taken,
             (double)(prs_clock_ns() - lost->since_ns) / 1e6);
    return finish_replay(peer, path);
}

/* Return 0 or -errno (the peer has failed). */
static int step_path(struct prs_peer *peer, uint32_t path)
{
    struct prs_failover_path *lost = &peer->failover->path[path];
    uint64_t now_ns = prs_clock_ns();

    if (lost->stage == PRS_PATH_DRAINING) {
        /* MUTANT(peer) what has arrived is known first: delete */
        /* MUTANT(peer) a NIC flushes in time: s/now_ns - lost->since_ns < PRS_FAILOVER_DRAIN_MS * 1000000ull/true/ */
        if (!prs_failover_is_drained(peer, path))
            return now_ns - lost->since_ns < PRS_FAILOVER_DRAIN_MS * 1000000ull
                       ? 0
                       : prs_peer_fail(peer, -EIO, "%s did not flush its queues within %d ms after: %s",
                                       peer->link[path]->rail->info.name, PRS_FAILOVER_DRAIN_MS, lost->why);
        prs_failover_tell(peer, path);
        (void)prs_order_knock(&peer->order); /* if there is no room for it, the other side looks a little later */
    }
    if (lost->told)
        return replay(peer, path);
    if (prs_order_path_is_lost(&peer->order, path))
        return 0; /* no time limit: nothing was sent over these queues */
    /* MUTANT(peer) the other side answers in time: delete */
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

    if (!peer->remote_closed)
        (void)prs_failover_read(peer); /* the end of the stream is noticed by prs_health_check() */
    if (peer->error)
        return peer->error;
    for (uint32_t i = 0; i < peer->path_count && !r; i++)
        r = prs_failover_is_agreeing(peer->failover, i) ? step_path(peer, i) : 0;
    if (peer->failover->expect_until_ns && prs_clock_ns() > peer->failover->expect_until_ns)
        peer->failover->expect_until_ns = 0;
    return r;
}

int prs_failover_recover(struct prs_peer *peer)
{
    if (!prs_recovery_is_due(peer))
        return 0;
    (void)prs_failover_read(peer); /* the end of the stream is noticed by prs_health_check() */
    return peer->error ? peer->error : prs_recovery_step(peer);
}

int prs_failover_attend(struct prs_peer *peer)
{
    bool agreeing = prs_failover_is_active(peer);
    int r = agreeing || peer->failover->expect_until_ns ? prs_failover_step(peer) : 0;

    return r ? r : prs_failover_recover(peer);
}
