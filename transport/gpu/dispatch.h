/* SPDX-License-Identifier: Apache-2.0 */
/* Turns the commands of a ring into transfers: takes and checks them, hands them to the order engine in the order of
 * the ring, queues them by rank, and posts them. They retire in the order of the ring. No thread; one caller at a
 * time. */
#ifndef TRANSPORT_DISPATCH_H
#define TRANSPORT_DISPATCH_H

#include <perseus/proxy.h>
#include "transport/order/order_drain.h"
#include "transport/gpu/ring.h"
#include "transport/gpu/window.h"

/* A command that was taken and is not retired. Once its op is posted, the op belongs to the peer, whose order engine
 * writes the status last. Entries may be freed only when no peer has an op: prs_dispatch_cancel() ensures that. */
struct prs_dispatch_entry {
    struct prs_op op;
    struct prs_cmd_fields cmd;
    uint32_t next; /* index of the next entry in the queue of its rank */
};

/* Commands to one rank that wait for its peer, which is still connecting or whose window is full. */
struct prs_dispatch_queue {
    struct prs_peer *peer; /* NULL until connected */
    uint32_t first, last;  /* indices of entries */
    uint32_t count;
};

struct prs_dispatch {
    struct prs_ring *ring;
    const struct prs_windows *windows;
    struct prs_team *team;
    struct prs_dispatch_entry *entries; /* [entry_count], by position */
    struct prs_dispatch_queue *queues;  /* [world] */
    struct prs_order_drain drain;
    uint64_t entry_count;    /* power of two: commands that may be incomplete */
    uint64_t retired;        /* positions below it are complete */
    uint64_t queued;         /* over all queues */
    uint64_t stall_began_ns; /* when the signal that drain holds began to wait */
    uint32_t context;        /* of the team */
    uint32_t world;
    struct prs_proxy_stats stats;
};

/* Return 0 or -ENOMEM. */
int prs_dispatch_init(struct prs_dispatch *d, struct prs_ring *ring, const struct prs_windows *windows,
                      struct prs_team *team, uint32_t context);
/* Only when idle or cancelled, while the team is open. */
void prs_dispatch_fini(struct prs_dispatch *d);
/* One round. Return how much was done, or the first error of a command or a peer. */
int prs_dispatch_step(struct prs_dispatch *d);
/* One round that takes no new command. Return as prs_dispatch_step(). */
int prs_dispatch_finish(struct prs_dispatch *d);
/* Take back what is not complete: peers that still have some of it fail with -ECANCELED, and so do all their ops.
 * Afterwards no peer knows of an op of this dispatch, and only fini may be called. */
void prs_dispatch_cancel(struct prs_dispatch *d);
/* Return true when every command that was taken is complete. */
bool prs_dispatch_idle(const struct prs_dispatch *d);

#endif
