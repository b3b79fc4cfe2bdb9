/* SPDX-License-Identifier: Apache-2.0 */
/* One connection to one remote rank. setup.c makes and ends it, peer.c and progress.c move data, health.c looks
 * after it. */
#ifndef TRANSPORT_PEER_H
#define TRANSPORT_PEER_H

#include "transport/order/arrival.h"
#include "transport/peer/failover.h"
#include "transport/peer/handshake.h"
#include "transport/nic/nic.h"
#include "transport/order/order.h"
#include "transport/peer/records.h"
#include "transport/nic/region.h"

/* A check of the TCP stream is a system call, so it comes after many empty polls, unless these take long: a busy
 * machine gives a caller that yields the processor back after milliseconds. */
enum {
    PRS_PEER_IDLE_POLLS = 1 << 8, /* empty polls between two looks at the clock */
    PRS_PEER_IDLE_LOOKS = 1 << 6, /* looks at the clock, after which the stream is checked anyway */
    PRS_PEER_IDLE_NS = 100000000, /* the stream is checked if so much time has passed */
};

/* A pair of rails. */
struct prs_path {
    int local_rail;    /* index in the fabric */
    uint32_t position; /* index of this rail in the caller's set; a standby rail comes after all of that set */
    struct prs_rail_address own;
    struct prs_wire_rail peer; /* the remote rail, as the other side described it */
};

/* Peers of one thread that want to make progress though nothing has arrived for them. */
struct prs_peer_list {
    struct prs_peer *first;
};

struct prs_peer {
    /* Every call uses this cache line. A poll of an idle peer reads only this line and the first one of the order
     * engine. */
    int error; /* 0 or the sticky -errno */
    uint16_t unposted;
    uint16_t path_count;
    bool measured;                   /* several paths: completions are timed */
    bool offers;                     /* this side was the connector: it offers new queues when a path comes back */
    bool exclusive_adds;             /* as in struct prs_peer_options */
    bool no_signals;                 /* likewise */
    bool unlisted;                   /* the thread has a list, and the peer is not in it */
    bool shares;                     /* its thread polls shared completion queues instead of this peer's */
    bool batching, batch_began_idle; /* between prs_peer_begin_batch() and prs_peer_end_batch() */
    uint32_t idle_polls;             /* set it to PRS_PEER_IDLE_POLLS to have a check at the next poll */
    /* value of idle_polls after a poll that found something; high while the TCP stream must be watched */
    uint32_t idle_start;
    struct prs_failover *failover; /* NULL: a lost rail ends the peer */
    const struct prs_nic_ops *nic;
    struct prs_records *records; /* NULL: neither side sends its signals as records */
    uint64_t rail_mask;          /* rails of the fabric that the paths use: a region must be on all of them */
    struct prs_link *link[PRS_MAX_RAILS];
    struct prs_queue *queue[PRS_ORDER_MAX_QUEUES]; /* the first queue is on the second cache line */
    struct prs_order order;
    /* Notifications. */
    prs_notify_fn *on_notify;
    void *user;
    struct prs_arrivals *arriving; /* NULL: the caller takes no notifications */
    uint64_t doorbells, work_requests, completions, arrivals, notifications;
    uint32_t idle_looks; /* at the clock */
    uint64_t checked_ns; /* when the stream was last checked */
    /* The list of the peer's thread. */
    struct prs_peer_list *list;
    struct prs_peer *next_listed;
    /* Set once. */
    const struct prs_fabric *fabric;
    struct prs_cq_group
        /* while the peer is opened: the completion queues that its links shall use; NULL: each link has its own */
        *cqs;
    int traffic_class;
    int service_level; /* on InfiniBand */
    uint32_t queues;   /* data queues of all paths */
    uint32_t queues_per_path;
    struct prs_path path[PRS_MAX_RAILS];
    /* Copies of inline payloads, for all data queues and the probe queues that raise signals. Registered where the NIC
     * has no inline data. */
    struct prs_own_memory inline_bytes;
    struct prs_own_memory sizes; /* uint64_t [PRS_NOTIFY_IDS], if the peer may write them */
    int stream_fd;               /* TCP, open as long as the peer: it ends when the other process dies */
    /* the network of the TCP stream failed: RDMA writes show whether the other side is alive */
    bool stream_lost;
    bool remote_closed;    /* its farewell has arrived */
    bool remote_gone;      /* the other side has closed, and nothing more has arrived for long */
    bool told_of_loss;     /* this side has sent a note LOST */
    struct prs_loss *loss; /* what has arrived of the other side's note LOST; NULL: nothing */
    uint64_t touch_ns;     /* when the next such write is due */
    /* A request has failed, but no caller waits for it, or the other side's farewell may still arrive. Wait for the
     * farewell until this time. */
    uint64_t farewell_ns;
    struct prs_event failure[PRS_MAX_RAILS]; /* by path: the failure kept until then, if of kind PRS_EVENT_ERROR */
    char remote[PRS_ADDRESS_TEXT];
    uint32_t private_bytes;
    uint8_t private_data[PRS_PRIVATE_DATA_BYTES];
    char error_text[1024];
    char description[1024];
};
static_assert(offsetof(struct prs_peer, link[1]) == PRS_LINE && offsetof(struct prs_peer, queue[1]) == 2 * PRS_LINE &&
                  offsetof(struct prs_peer, on_notify) % PRS_LINE == 0,
              "what a message uses of a peer is on three cache lines, without the order engine");

/* Put the peer on the list, so that its thread calls prs_peer_attend() in its next round. */
static inline void prs_peer_want_progress(struct prs_peer *peer)
{
    if (!peer->unlisted)
        return;
    peer->unlisted = false;
    peer->next_listed = peer->list->first;
    peer->list->first = peer;
}

/* Is the path given up? Failures of its queues then need no handling. */
static inline bool prs_peer_lost_path(const struct prs_peer *peer, uint32_t path)
{
    return peer->failover && peer->failover->path[path].stage != PRS_PATH_UP &&
           peer->failover->path[path].stage != PRS_PATH_JOINED;
}

/* Post what was admitted. Return 0 or -errno (the peer has failed). */
int prs_peer_post(struct prs_peer *peer);

/* Where peers of one thread share completion queues (decisions/0017), the thread polls those and calls these functions
 * instead of prs_peer_progress(). */

/* The thread polls this group. From now on events of the peer reach it, and it joins the list when it wants to make
 * progress: always, if not all of its completion queues are of the group. Return 0 or -ENOMEM. */
int prs_peer_adopt(struct prs_peer *peer, const struct prs_cq_group *cqs, struct prs_peer_list *list);
/* Handle events of this link of the peer; count may be the -errno of polling. Return 0 or -errno: the peer has failed
 * now. */
int prs_peer_handle(struct prs_peer *peer, struct prs_link *link, const struct prs_event *events, int count);
/* Make progress on a peer that was taken from the list of peers that want progress. The peer joins the list again if it
 * still wants progress. Return how much was done, or the sticky -errno. */
int prs_peer_attend(struct prs_peer *peer);
/* To be called now and then. If nothing has arrived since the last call, check that the other process and the rails are
 * alive. Return 0 or -errno. */
int prs_peer_look(struct prs_peer *peer);

#endif
