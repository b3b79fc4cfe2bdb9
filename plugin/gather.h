/* SPDX-License-Identifier: Apache-2.0 */
/* An allgather among the ranks of a team, over a ring of peers in a context of its own: what regMrSym needs to tell
 * the others. Only two peers a rank, so that a mesh is not made for its sake. */
#ifndef PERSEUS_PLUGIN_GATHER_H
#define PERSEUS_PLUGIN_GATHER_H

#include <pthread.h>

#include <perseus/team.h>

#define GATHER_CONTEXT UINT32_MAX /* far above those of sets, which are counted up */

enum {
    GATHER_BYTES = 128, /* a rank gives at most this much */
    GATHER_BANKS = 2,   /* a rank may be one round ahead of its neighbour */
};

/* Where a rank's left neighbour writes: travels as the team's card. */
struct gather_card {
    uint32_t magic, version;
    uint64_t base;
    struct prs_keys keys;
};

struct gather {
    struct prs_team *team;
    struct prs_region *region;
    uint8_t *memory; /* [GATHER_BANKS][ranks] slots, then as many 64-bit flags */
    uint32_t rank, ranks;
    uint64_t round;
    uint64_t right_base;
    struct prs_keys right_keys;
    struct prs_op data,
        flag;  /* of the step under way: after one that failed a peer writes to them until it is closed */
    int error; /* sticky: after a round that failed the ranks are no longer in step */
    uint32_t timeout_ms;
    uint32_t tell_ms;     /* how often a wait that goes on is told of */
    pthread_mutex_t lock; /* regMrSym comes from any thread */
};

/* Memory and card, before the team is opened. Return 0 or -errno. */
int gather_init(struct gather *gather, struct prs_fabric *fabric, const struct prs_rail_set *rails, uint32_t rank,
                uint32_t ranks, uint32_t timeout_ms, struct gather_card *card);
/* Collective: connect the ring. Blocks, bounded. */
int gather_connect(struct gather *gather, struct prs_team *team);
/* Collective, in the same order on every rank: all[] gets ranks times GATHER_BYTES. Blocks: a rank may be late by
 * timeout_ms, but one whose neighbour has died or closed ends at once. After one that failed all fail. */
int gather_run(struct gather *gather, const void *mine, uint32_t bytes, uint8_t *all);
/* After the team was closed. */
void gather_fini(struct gather *gather);

#endif
