/* SPDX-License-Identifier: Apache-2.0 */
/* An allgather among the ranks of a team: regMrSym needs it to tell the other ranks about a window. It runs over a ring
 * of peers in a team context of its own, so that a rank connects to two others only. */
#ifndef PERSEUS_PLUGIN_GATHER_H
#define PERSEUS_PLUGIN_GATHER_H

#include <pthread.h>

#include <perseus/team.h>

#define GATHER_CONTEXT UINT32_MAX /* sets number their team contexts from 0 */

enum {
    GATHER_BYTES = 160, /* at most, from each rank */
    GATHER_BANKS = 2,   /* a rank may be one round ahead of its neighbour */
};

/* Where a rank's left neighbour writes. Every rank that connects gets it (struct prs_team_options). */
struct gather_info {
    uint32_t magic, version;
    uint64_t base;
    struct prs_keys keys;
};

struct gather {
    struct prs_team *team;
    struct prs_region *region;
    uint8_t *memory; /* [GATHER_BANKS][ranks] slots, then as many 64-bit flags */
    size_t bytes;
    uint32_t rank, ranks;
    uint64_t round;
    uint64_t right_base;
    struct prs_keys right_keys;
    /* ops of the current step; after a failed step they stay in use until the peer is closed */
    struct prs_op data, flag;
    int error; /* sticky, because ranks are no longer in the same round after a failed one */
    uint32_t timeout_ms;
    uint32_t report_ms;   /* time between two warnings of a rank that waits */
    pthread_mutex_t lock; /* any thread may call regMrSym */
};

/* Allocate memory and fill in info, before the team is opened. Return 0 or -errno. */
int gather_init(struct gather *gather, struct prs_fabric *fabric, const struct prs_rail_set *rails, uint32_t rank,
                uint32_t ranks, uint32_t timeout_ms, struct gather_info *info);
/* Collective: connect the ring. Blocks for a limited time. */
int gather_connect(struct gather *gather, struct prs_team *team);
/* Collective, in the same order on every rank. all[] gets GATHER_BYTES from each rank. mine NULL: the caller has
 * failed, and only tells the others. Blocks until all ranks have called it, for timeout_ms at most. Fails at once if a
 * neighbour has died or closed, and always after one failure. */
int gather_run(struct gather *gather, const void *mine, uint32_t bytes, uint8_t *all);
/* Call it after the team was closed. */
void gather_fini(struct gather *gather);

#endif
