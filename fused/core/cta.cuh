/* SPDX-License-Identifier: Apache-2.0 */
/* What the roles of a CTA share: its shared memory, its position, the pipeline of stages. */
#ifndef PERSEUS_FUSED_CTA_CUH
#define PERSEUS_FUSED_CTA_CUH

#include "fused/core/ptx.cuh"
#include "fused/core/sync.cuh"
#include "fused/core/tile.h"

enum { CONSUMER_WARPS = 8, PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = 224 };

struct cta_memory {
    uint8_t *base;
    uint64_t *full, *empty;     /* [PRS_STAGES] */
    uint64_t *c_full, *c_empty; /* [2 warpgroups][slabs] */
    uint64_t *pushed;           /* [PRS_PUSH_SLOTS] */
};

struct cta_position {
    uint32_t cluster, clusters, rank; /* rank: number of the CTA in its cluster */
    uint32_t epoch;
};

/* A role's position in the pipeline of stages. It continues from unit to unit. */
struct pipeline {
    uint32_t stage, phase;
};

template <uint32_t STAGES = PRS_STAGES> PRS_DEVICE void pipeline_next(struct pipeline *r)
{
    if (++r->stage == STAGES) {
        r->stage = 0;
        r->phase ^= 1;
    }
}

/* One lane per CTA of the cluster tells that CTA that this warp has read the stage. */
template <class E> PRS_DEVICE void release_stage(const struct cta_memory &m, uint32_t stage)
{
    uint32_t lane = threadIdx.x % 32;
    if (lane < E::cluster)
        mbarrier_arrive_at(&m.empty[stage], lane);
}

PRS_DEVICE struct cta_memory cta_memory_map(uint8_t *base)
{
    struct cta_memory m;
    m.base = base;
    m.full = (uint64_t *)(base + PRS_SMEM_BARRIERS);
    m.empty = m.full + PRS_STAGES;
    m.c_full = m.empty + PRS_STAGES;
    m.c_empty = m.c_full + 4;
    m.pushed = m.c_empty + 4;
    return m;
}

/* Each role calls this for itself: the compiler would spill a value that lives across the roles. */
template <class E> PRS_DEVICE struct cta_position cta_position_here(const struct prs_sync *sync)
{
    return {blockIdx.x / E::cluster, gridDim.x / E::cluster, blockIdx.x % E::cluster, launch_epoch(sync)};
}

template <class E> PRS_DEVICE void cta_memory_init(const struct cta_memory *m)
{
    for (int i = 0; i < PRS_STAGES; i++) {
        mbarrier_init(&m->full[i], 1);
        mbarrier_init(&m->empty[i], E::cluster * CONSUMER_WARPS); /* each CTA reads the data that any CTA multicasts */
    }
    for (int i = 0; i < E::slab_barriers; i++) {
        mbarrier_init(&m->c_full[i], 4);
        mbarrier_init(&m->c_empty[i], 1);
    }
    for (int i = 0; i < PRS_PUSH_SLOTS; i++)
        mbarrier_init(&m->pushed[i], 1);
    mbarrier_init_fence();
}

/* All threads of both CTAs of the cluster call this before the roles begin. a, b, c: tensor maps to prefetch. */
template <class E>
PRS_DEVICE void begin_roles(const struct cta_memory &m, const CUtensorMap *a, const CUtensorMap *b,
                            const CUtensorMap *c)
{
    if (threadIdx.x == 0)
        cta_memory_init<E>(&m);
    if (threadIdx.x == 32) {
        tensor_map_prefetch(a);
        tensor_map_prefetch(b);
        tensor_map_prefetch(c);
    }
    cluster_arrive();
    cluster_wait(); /* the other CTA's barriers exist before anything is multicast to it */
}

/* All threads of both CTAs call this when their roles have ended. */
PRS_DEVICE void end_roles(void)
{
    __syncwarp();
    /* MUTANT(emulator reduce_scatter_is_right) cluster barrier before leaving: delete */
    cluster_arrive();
    /* MUTANT(emulator reduce_scatter_is_right) cluster barrier before leaving: delete */
    cluster_wait(); /* the other CTA may still arrive on this CTA's barriers until here */
}

#endif
