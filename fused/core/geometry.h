/* SPDX-License-Identifier: Apache-2.0 */
/* Where the ranks are, seen from one of them. Plain C: the kernels, the host and the CPU protocol tests use it.
 *
 * Ranks of a node are consecutive, and every node has the same number of ranks. The ranks with the same local rank on
 * all nodes are counterparts: data crosses between nodes only from a rank to its counterparts, once, and each
 * counterpart spreads it inside its node. Symmetric memory names the ranks of a node as neighbours: neighbour p has the
 * local rank that comes p after this rank's, so neighbour 0 is the rank itself. */
#ifndef PERSEUS_FUSED_GEOMETRY_H
#define PERSEUS_FUSED_GEOMETRY_H

#include <stdint.h>

#ifdef __CUDACC__
#    define PRS_SHARED static __host__ __device__ __forceinline__
#else
#    define PRS_SHARED static inline
#endif

/* Flags and counters only grow, modulo 2^32. */
PRS_SHARED int prs_flag_reached(uint32_t seen, uint32_t want)
{
    return (int32_t)(seen - want) >= 0;
}

PRS_SHARED uint32_t prs_ceil_div(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}

/* ---- circles: after the last rank, node or local rank comes 0 again ---- */
/* How far `to` comes after `from`, 0 .. count - 1. */
PRS_SHARED uint32_t prs_distance(uint32_t from, uint32_t to, uint32_t count)
{
    return (to + count - from) % count;
}

/* The distance in the other direction. */
PRS_SHARED uint32_t prs_distance_back(uint32_t distance, uint32_t count)
{
    return (count - distance) % count;
}

/* Numbers the others as `owner` sees them: 0 is the next one. The owner itself comes last. */
PRS_SHARED uint32_t prs_index_after(uint32_t other, uint32_t owner, uint32_t count)
{
    return (other + count - owner - 1) % count;
}

/* ---- the place of a rank ---- */
struct prs_place {
    uint32_t rank, world;
    uint32_t node, nodes;             /* nodes are numbered by their first rank */
    uint32_t local_rank, local_ranks; /* number within the node, and how many ranks each node has */
};

PRS_SHARED void prs_place_init(struct prs_place *p, uint32_t rank, uint32_t world, uint32_t nodes)
{
    p->rank = rank;
    p->world = world;
    p->nodes = nodes;
    p->local_ranks = world / nodes;
    p->node = rank / p->local_ranks;
    p->local_rank = rank % p->local_ranks;
}

PRS_SHARED uint32_t prs_place_rank(const struct prs_place *p, uint32_t node, uint32_t local_rank)
{
    return node * p->local_ranks + local_rank;
}

PRS_SHARED uint32_t prs_place_after(const struct prs_place *p, uint32_t distance)
{
    return (p->rank + distance) % p->world;
}

PRS_SHARED uint32_t prs_place_distance(const struct prs_place *p, uint32_t rank)
{
    return prs_distance(p->rank, rank, p->world);
}

/* The rank that is neighbour `index`. */
PRS_SHARED uint32_t prs_place_neighbour(const struct prs_place *p, uint32_t index)
{
    return prs_place_rank(p, p->node, (p->local_rank + index) % p->local_ranks);
}

/* Index of the neighbour with the local rank of `rank`, which may be on any node. */
PRS_SHARED uint32_t prs_place_neighbour_index(const struct prs_place *p, uint32_t rank)
{
    return prs_distance(p->local_rank, rank % p->local_ranks, p->local_ranks);
}

/* The counterpart on the node that comes `distance` after this rank's node. */
PRS_SHARED uint32_t prs_place_counterpart(const struct prs_place *p, uint32_t distance)
{
    return prs_place_rank(p, (p->node + distance) % p->nodes, p->local_rank);
}

/* How far the node of `rank` comes after this rank's node. */
PRS_SHARED uint32_t prs_place_node_distance(const struct prs_place *p, uint32_t rank)
{
    return prs_distance(p->node, rank / p->local_ranks, p->nodes);
}

/* The rank at position `order` (0 .. world - 1) of an order in which this rank's node comes first: this rank and those
 * after it on its node, then, node by node, the counterpart and those after it. */
PRS_SHARED uint32_t prs_place_in_order(const struct prs_place *p, uint32_t order)
{
    uint32_t node = p->node + order / p->local_ranks, local_rank = p->local_rank + order % p->local_ranks;
    node -= node < p->nodes ? 0 : p->nodes;
    local_rank -= local_rank < p->local_ranks ? 0 : p->local_ranks;
    return prs_place_rank(p, node, local_rank);
}

#endif
