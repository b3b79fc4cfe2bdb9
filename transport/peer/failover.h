/* SPDX-License-Identifier: Apache-2.0 */
/* One of several rails to a peer is lost: its messages continue over the others (decisions/0014).
 *
 *   fence   the queues of the path go to the error state: nothing of the other side arrives on them any more
 *   drain   every receive has completed or was flushed: so it is known what has arrived. A NIC that has died flushes
 *           nothing: then its queue pairs are destroyed, and what was not polled until then counts as not arrived
 *   agree   each side tells the other, over the TCP stream, how many immediates it has taken from each queue
 *   replay  the order engine retires what has arrived and sends the rest over another path (order_path.c)
 *
 * Where the rail comes back, both sides connect new queues (recovery.h).
 *
 * Each side fences before it tells, and replays only after it was told. So no write of the lost path can land after its
 * replay, or in memory that was reused. Messages that start meanwhile take the other paths at once.
 *
 * The owner of a peer may have no reason to poll it: it has nothing to send or to receive there. So a thread of the
 * process (watch.c) answers for it: it fences, drains and tells. What it polls meanwhile it keeps for the owner, who
 * alone takes arrivals and completions, uses the order engine, and replays.
 *
 * The stream also carries notes of another kind, LOST: the other side has lost some other rank, so it sends nothing
 * more (connect/team_loss.h). Data that it sent before may not have been taken yet. So the note is only kept, and the
 * peer fails when nothing has arrived for some time (health.c). */
#ifndef TRANSPORT_FAILOVER_H
#define TRANSPORT_FAILOVER_H

#include "transport/nic/nic.h"
#include "transport/util/light_lock.h"

struct prs_peer;

enum {
    PRS_FAILOVER_DRAIN_MS = 10000, /* a NIC flushes a queue in far less */
    PRS_LOSS_TEXT = 384,
};

/* The state of the agreement about a path, on this side. The order engine's enum prs_path_use says what the path
 * carries: it is stopped from DRAINING on (if the thread has fenced the path: as soon as the owner knows), lost from
 * DOWN on, and used again from UP on. New queues may be lost too: then a path drains and agrees although it is already
 * lost. */
enum prs_path_stage {
    PRS_PATH_UP,
    PRS_PATH_DRAINING,
    PRS_PATH_AGREEING, /* the other side was told */
    PRS_PATH_DOWN,
    /* it has new queues, which receive. They send when the other side has said that its queues work, too */
    PRS_PATH_JOINED,
};

/* The state of an attempt, on the side that offers new queues. */
enum prs_attempt {
    PRS_ATTEMPT_NONE,
    PRS_ATTEMPT_OFFERED,
    PRS_ATTEMPT_CONNECTING, /* the other side has accepted */
    PRS_ATTEMPT_TRYING,     /* a write of no bytes is in flight on each queue */
    PRS_ATTEMPT_GIVEN_UP,   /* the other side was told; wait for its answer */
    PRS_ATTEMPT_ENDED,      /* the owner must close the new queues */
};

/* What travels on the TCP stream once the peers are connected. A farewell is its first byte alone. */
enum prs_note_type {
    PRS_NOTE_FAREWELL = 'C', /* the sender has closed: the end of the stream is deliberate */
    PRS_NOTE_FAILED = 'F',   /* the sender's peer has an error */
    PRS_NOTE_DOWN = 'D',     /* the sender has fenced the path */
    PRS_NOTE_OFFER = 'O',    /* the sender has new queues for it */
    PRS_NOTE_ACCEPT = 'A',   /* the sender has new queues too, and has connected them to those offered */
    PRS_NOTE_READY = 'R',    /* the sender's queues are connected and work: the path may be used */
    PRS_NOTE_LOST = 'L',     /* the sender has lost another rank, and sends nothing more; with or without failover */
};

struct prs_wire_note {
    uint8_t type;
    uint8_t path;
    uint8_t epoch; /* how often the path has had new queues: those of which the note speaks */
    uint8_t reserved;
    union {
        struct {
            uint32_t taken[PRS_ORDER_MAX_QUEUES_PER_RAIL]; /* DOWN: immediates, by queue of the path */
            char why[188];                                 /* DOWN, FAILED */
        };
        struct { /* OFFER, ACCEPT */
            struct prs_nic_address where;
            struct prs_nic_address queue[PRS_ORDER_MAX_QUEUES_PER_RAIL];
        };
        struct { /* LOST */
            uint32_t rank;
            char loss[PRS_LOSS_TEXT];
        };
    };
};
static_assert(sizeof(struct prs_wire_note) == 4 + 64 + 16 * 64, "part of the wire format");

/* A member of watch.c's list, under its lock. */
struct prs_watched {
    struct prs_watched *next;
    struct prs_peer *peer; /* NULL: not in the list */
    bool due;              /* to be looked at */
};

struct prs_failover_path {
    enum prs_path_stage stage;
    bool told; /* the other side has sent its counts */
    uint32_t taken[PRS_ORDER_MAX_QUEUES_PER_RAIL];
    uint64_t since_ns;
    char why[320];
    /* Recovery. */
    uint8_t epoch; /* epoch of the queues in link[], or of the last queues that were given up */
    uint64_t lost_ns;
    uint64_t again_ns; /* no new attempt before this time; while an attempt connects or tries: its limit */
    uint8_t failures;  /* failed attempts in a row, up to a maximum */
    enum prs_attempt attempt;
    bool asked;     /* the other side has offered its queues: `theirs` is its OFFER */
    bool accepted;  /* the other side has accepted our queues: `theirs` is its ACCEPT */
    bool confirmed; /* READY has arrived */
    struct prs_wire_note theirs;
    struct prs_link *next; /* new queues that are not used yet */
    uint32_t done;         /* how many of them are connected or, later, tried */
};

struct prs_failover {
    /* Protects this struct, the stream, and the completion queues and receives of the links. The owner holds
     * it while it makes progress or fails the peer. What is not protected belongs to the owner. */
    struct prs_light_lock lock; /* each progress uses this and the next three, which are on one cache line */
    bool attended;              /* the thread has done something since the owner's last progress */
    uint32_t away;              /* paths that are not UP */
    uint64_t expect_until_ns;   /* until then, look for a note that was announced; 0: none was */
    struct prs_event *kept;     /* what the thread has polled, for the owner */
    uint32_t kept_count, kept_room;
    struct prs_watched watched; /* for watch.c */
    uint32_t looks;             /* progress calls since the last look at the paths */
    uint64_t look_ns;           /* when the next is due */
    struct prs_wire_note in;
    uint32_t in_bytes;
    struct prs_failover_path path[PRS_MAX_RAILS];
};

/* A note LOST that has arrived, or a part of it. */
struct prs_loss {
    uint64_t since_ns; /* 0: the note has not come completely */
    uint32_t rank;
    char why[PRS_LOSS_TEXT];
    struct prs_wire_note in; /* the part that has arrived; used only without failover */
    uint32_t in_bytes;
};

static inline void prs_failover_set_stage(struct prs_failover *failover, uint32_t path, enum prs_path_stage stage)
{
    failover->away += (stage != PRS_PATH_UP) - (failover->path[path].stage != PRS_PATH_UP);
    failover->path[path].stage = stage;
}

/* Is the path being given up? */
static inline bool prs_failover_is_agreeing(const struct prs_failover *failover, uint32_t path)
{
    return failover->path[path].stage == PRS_PATH_DRAINING || failover->path[path].stage == PRS_PATH_AGREEING;
}

/* Make the state, if the peer's order engine can replace a path. Return 0 or -ENOMEM. */
int prs_failover_open(struct prs_peer *peer);
/* Undo prs_failover_open(), for a connection whose other side cannot fail over, and forget all notes. */
void prs_failover_close(struct prs_peer *peer);

/* Move the queues of a path to the error state, so that nothing of the other side arrives there any more. */
void prs_failover_fence(struct prs_peer *peer, uint32_t path, const char *why);
/* Note what the other side has taken of a path that is fenced here. */
void prs_failover_told(struct prs_peer *peer, const struct prs_wire_note *note);
/* May the other side send this note now? Only for DOWN, OFFER, ACCEPT and READY. Whether another path is left after a
 * DOWN is not checked. */
bool prs_failover_expects(const struct prs_peer *peer, const struct prs_wire_note *note);
/* Poll a path that is given up, and keep the events for the owner. The owner need not know of flushed requests. Return
 * true if there are new ones. */
bool prs_failover_keep_events(struct prs_peer *peer, uint32_t path);
/* Is it known what has arrived over the path? If the NIC flushes nothing, this takes what has arrived, and destroys the
 * queues. */
bool prs_failover_is_drained(struct prs_peer *peer, uint32_t path);
/* Tell the other side what this one has taken of a path that is drained. */
void prs_failover_tell(struct prs_peer *peer, uint32_t path);
/* For the owner: give up the paths that the thread has fenced. */
void prs_failover_catch_up(struct prs_peer *peer);

/* Give a path up. Return false, and change nothing, if no other can replace it. */
bool prs_failover_start(struct prs_peer *peer, uint32_t path, const char *why);
/* Is any path being given up? */
bool prs_failover_is_active(const struct prs_peer *peer);
/* The other side has sent a note, which may arrive a little later: look for it at each progress. */
void prs_failover_expect_note(struct prs_peer *peer);
/* Read notes, and continue with the paths that are given up as far as possible now. Return 0 or -errno (the peer has
 * failed). */
int prs_failover_step(struct prs_peer *peer);
/* To be called now and then: look after lost paths that may come back. Return 0 or -errno (the peer has failed). */
int prs_failover_recover(struct prs_peer *peer);
/* Continue with paths that are given up or come back. Call it also while something arrives, since a busy peer may never
 * be idle. Return 0 or -errno (the peer has failed). */
int prs_failover_attend(struct prs_peer *peer);
/* Read what has come on the stream, up to a farewell. Return 0 (it has come), PRS_AGAIN, or -errno: the stream has
 * ended without it, or the peer has failed. */
int prs_failover_read(struct prs_peer *peer);
/* The loopback queue of a path has failed. Return 0, PRS_AGAIN (the path is not given up) or -errno (the peer has
 * failed). */
int prs_failover_lose_loopback(struct prs_peer *peer, uint32_t path);

#endif
