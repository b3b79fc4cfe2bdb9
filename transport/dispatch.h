/* SPDX-License-Identifier: Apache-2.0 */
/* From commands to transfers: takes from a ring, checks, queues by rank, posts, and retires in ring order. No thread
 * and no clock but for the time spent in fences; one caller at a time. */
#ifndef TRANSPORT_DISPATCH_H
#define TRANSPORT_DISPATCH_H

#include <perseus/proxy.h>

#include "transport/ring.h"
#include "transport/window.h"

/* The op is the dispatch's from take to retire. Once posted it is lent to the peer, whose order engine writes its
 * status last: entries may be freed only when nothing is lent, which prs_dispatch_cancel() sees to. */
struct prs_dispatch_entry {
    struct prs_op op;
    struct prs_cmd_fields cmd;
    uint32_t next; /* in its rank's queue */
};

/* Commands to one rank that wait for its peer: connecting, or its window is full. */
struct prs_dispatch_queue {
    struct prs_peer *peer; /* NULL until connected */
    uint32_t first, last, count;
    uint64_t *dirty; /* drain: groups with puts since their last fence, one bit each; NULL until used */
};

struct prs_dispatch {
    struct prs_ring *ring;
    const struct prs_windows *windows;
    struct prs_team *team;
    struct prs_dispatch_entry *entries; /* [entry_count], by position */
    struct prs_dispatch_queue *queues;  /* [world] */
    uint64_t entry_count;               /* power of two: commands that may be incomplete */
    uint64_t retired;                   /* positions below are complete */
    uint64_t queued;                    /* over all queues */
    uint64_t fence_began_ns;            /* 0: no fence is waited for */
    uint32_t context;
    uint32_t world;
    bool drain;
    struct prs_proxy_stats stats;
};

int prs_dispatch_init(struct prs_dispatch *dispatch, struct prs_ring *ring, const struct prs_windows *windows,
                      struct prs_team *team, uint32_t context);
/* Only when idle or cancelled, while the team is open. */
void prs_dispatch_fini(struct prs_dispatch *dispatch);
/* One round. Return how much was done, or the first error: of a command, or of a peer. */
int prs_dispatch_step(struct prs_dispatch *dispatch);
/* One round over what is taken already: no new command is. The same returns. */
int prs_dispatch_finish(struct prs_dispatch *dispatch);
/* Take back what is not complete: peers that still have some of it fail with -ECANCELED, and with that all their ops.
 * No peer knows of an op of this dispatch afterwards; the only call that may follow is fini. */
void prs_dispatch_cancel(struct prs_dispatch *dispatch);
/* No command is taken and not complete. */
bool prs_dispatch_idle(const struct prs_dispatch *dispatch);

#endif
