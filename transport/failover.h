/* SPDX-License-Identifier: Apache-2.0 */
/* One of several rails to a peer is lost: its messages go on over the others (decisions/0014).
 *
 *   fence   the queues of the path go to the error state: nothing of the other side arrives on them any more
 *   drain   every receive has completed or was flushed: so it is known what has arrived
 *   agree   each side tells the other, over the TCP stream, how many immediates it has taken from each queue
 *   replay  the order engine retires what has arrived and sends the rest over another path (order_path.c)
 *
 * Each side fences before it tells, and replays only after it was told. So no write of the lost path can land after its
 * replay, or in memory that was reused. Messages that start meanwhile take the other paths at once. */
#ifndef TRANSPORT_FAILOVER_H
#define TRANSPORT_FAILOVER_H

#include "transport/order.h"

struct prs_event;
struct prs_peer;

enum prs_path_stage {
    PRS_PATH_UP,
    PRS_PATH_DRAINING,
    PRS_PATH_AGREEING, /* the other side was told */
    PRS_PATH_DOWN,
};

/* What travels on the TCP stream once the peers are connected. A farewell is its first byte alone. */
enum prs_note_type {
    PRS_NOTE_FAREWELL = 'C', /* the sender has closed: the end of the stream is deliberate */
    PRS_NOTE_FAILED = 'F',   /* the sender's peer has an error */
    PRS_NOTE_DOWN = 'D',     /* the sender has fenced the path */
};

struct prs_wire_note {
    uint8_t type;
    uint8_t path;
    uint8_t reserved[2];
    uint32_t taken[PRS_ORDER_MAX_QUEUES_PER_RAIL]; /* DOWN: immediates, by queue of the path */
    char why[188];
};
static_assert(sizeof(struct prs_wire_note) == 256, "part of the wire format");

struct prs_failover_path {
    enum prs_path_stage stage;
    bool told; /* the other side has sent its counts */
    uint32_t taken[PRS_ORDER_MAX_QUEUES_PER_RAIL];
    uint64_t since_ns;
    char why[320];
};

struct prs_failover {
    uint32_t active;          /* mask of the paths that are draining or agreeing */
    uint32_t loopbacks;       /* mask of the paths whose loopback queue has failed too */
    uint64_t expect_until_ns; /* a note is on its way; 0: none that we know of */
    struct prs_wire_note in;
    uint32_t in_bytes;
    struct prs_failover_path path[PRS_MAX_RAILS];
};

/* Make the state, if the peer's order engine can replace a path. Return 0 or -ENOMEM. */
int prs_failover_open(struct prs_peer *peer);
/* Undo it: the other side cannot fail over. */
void prs_failover_close(struct prs_peer *peer);

/* Give a path up. Return false, and change nothing, if no other can replace it. */
bool prs_failover_start(struct prs_peer *peer, uint32_t path, const char *why);
/* The other side has sent a note, which may arrive a little later: look for it at each poll that finds nothing. */
void prs_failover_expect_note(struct prs_peer *peer);
/* Go on with the paths that are given up, as far as possible now. Return 0 or -errno (the peer has failed). */
int prs_failover_step(struct prs_peer *peer);
/* Read what has come on the stream, up to a farewell. Return 0 (it has come), PRS_AGAIN, or -errno: the stream has ended
 * without it, or the peer has failed. */
int prs_failover_read(struct prs_peer *peer);
/* Tell the other side that this peer has failed, so that it need not wait. */
void prs_failover_tell_failure(struct prs_peer *peer, const char *why);

/* The loopback queue of a path that was given up has failed. Return 0 or -errno (the peer has failed). */
int prs_failover_lose_loopback(struct prs_peer *peer, uint32_t path);

/* Was the path given up, so that failures of its queues are no news? */
bool prs_failover_is_down(const struct prs_peer *peer, uint32_t path);

#endif
