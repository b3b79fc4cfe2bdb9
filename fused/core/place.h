/* SPDX-License-Identifier: Apache-2.0 */
/* Where a rank is: which node, and which GPU of it. Ranks of a node are consecutive, and every node has as many, so
 * that the ranks with the same `local` number on all nodes are counterparts: what crosses between nodes goes from a
 * rank to its counterparts only, once, and is spread inside the node from there. */
#ifndef PERSEUS_FUSED_PLACE_H
#define PERSEUS_FUSED_PLACE_H

#include <perseus/fused.h>
#include <stdint.h>

struct prs_place {
    uint32_t rank, world;
    uint32_t node, nodes;   /* nodes are numbered by their first rank */
    uint32_t local, locals; /* number within the node, and how many ranks each node has */
};

/* From the node id of every rank. 0, or -EINVAL when nodes differ in size, their ranks are scattered, or one has more
 * than PRS_MAX_LOCAL_RANKS. */
int prs_place_find(const uint64_t *ids, uint32_t rank, uint32_t world, struct prs_place *out);

/* The rank that is `local` on node `node`. */
static inline uint32_t prs_place_rank(const struct prs_place *p, uint32_t node, uint32_t local)
{
    return node * p->locals + local;
}

#endif
