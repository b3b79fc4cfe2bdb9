/* SPDX-License-Identifier: Apache-2.0 */
/* Staging memory that plans share and other ranks write. A plan's own flags say when a rank may write there again: when
 * the receiver has read the data of the plan's last launch. They do not cover launches of other plans. So a launch
 * begins with a step. If the last launch that used the memory belonged to another plan, the rank waits until all ranks
 * that write to each other have reached this step, and so have finished that launch.
 *
 * Ranks launch the plans of a context in the same order, so all see the same changes. The device compares, and not the
 * host: so the step holds for graphs, which may be replayed in any order.
 *
 * A plan may ask for the step before each launch. It must where a launch may need no data of some rank: the plan's
 * flags alone would let this rank start its next launch while that rank still reads the memory.
 *
 * plan_switch.cuh has the kernel. */
#ifndef PERSEUS_FUSED_PLAN_SWITCH_H
#define PERSEUS_FUSED_PLAN_SWITCH_H

#include <assert.h>
#include <stdint.h>

#include "fused/core/far.h"
#include "fused/core/geometry.h"
#include "fused/core/sync.h"

/* Symmetric memory: 64-bit words, so that other nodes can signal them. Word 0 is this structure, which only its own
 * rank uses. Then comes a word for each rank that writes here, whose low half says how many switches that rank has come
 * to: neighbours 1, 2, ..., then the counterparts of the nodes 1, 2, ... after this one. */
struct prs_switch_state {
    uint32_t plan;     /* number of the plan that was launched last; 0: none yet */
    uint32_t switches; /* how often that changed */
};
static_assert(sizeof(struct prs_switch_state) == 8, "it is one word");

PRS_SHARED uint32_t prs_switch_neighbour_word(uint32_t neighbour)
{
    return neighbour;
}

PRS_SHARED uint32_t prs_switch_node_word(const struct prs_place *p, uint32_t distance)
{
    return p->local_ranks + distance - 1;
}

PRS_SHARED uint32_t prs_switch_words(const struct prs_place *p)
{
    return prs_switch_node_word(p, p->nodes);
}

/* The kernel's arguments. */
struct prs_switch_args {
    struct prs_sync sync;
    struct prs_place place;
    uint32_t plan;                        /* its number in the context */
    uint32_t always;                      /* 1: wait also when this plan was launched last */
    uint64_t *words[PRS_MAX_LOCAL_RANKS]; /* [p]: at neighbour p */
    struct prs_far far;                   /* several nodes only */
    /* What this launch says to the node's ranks (say_launch()); size 0: nothing. */
    uint32_t common;
    uint64_t size;
    struct prs_alarm *alarms[PRS_MAX_LOCAL_RANKS]; /* [p]: at neighbour p; [0] NULL: no neighbours */
};

#endif
