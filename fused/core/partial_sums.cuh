/* SPDX-License-Identifier: Apache-2.0 */
/* Sums over ranks: a rank stores its partial sums of a tile at the rank that adds them up. There they come through the
 * pipeline of stages, as further steps after the K steps of the tile, and are added to its accumulators.
 *
 * Partial sums travel in fragment order: what one thread holds is contiguous. A quarter (64 columns of 16-bit sums) is
 * the slab of warpgroup 0, then that of warpgroup 1. */
#ifndef PERSEUS_FUSED_PARTIAL_SUMS_CUH
#define PERSEUS_FUSED_PARTIAL_SUMS_CUH

#include "fused/core/cta.cuh"
#include "fused/core/element.cuh"
#include "fused/core/partial_sums.h"

/* ---- at the sender ---- */
/* Writes a slab to shared memory in fragment order: vector v (16 bytes) of thread t at v * 2048 + t * 16. */
PRS_DEVICE void fill_partial_slab(const uint32_t (&x)[16], uint32_t slab)
{
    uint32_t to = slab + (threadIdx.x % 128) * 16;
#pragma unroll
    for (int v = 0; v < 4; v++)
        store_shared_v4(to + v * 2048, x[4 * v], x[4 * v + 1], x[4 * v + 2], x[4 * v + 3]);
}

/* Stores the slab of a warpgroup in a quarter, which lies in the memory of the rank that adds it up. */
PRS_DEVICE void store_partial_slab(uint8_t *quarter, const uint8_t *slab, uint32_t half)
{
    bulk_store(quarter + half * PRS_SLAB, slab, PRS_SLAB);
}

/* ---- at the rank that adds up ---- */
/* A whole warp calls it when the sums have arrived. find(slot, quarter): their address here. */
template <class E, class Find>
PRS_DEVICE void load_partials(const struct cta_memory &m, struct pipeline *r, uint32_t slots, Find find)
{
    uint32_t lane = threadIdx.x % 32;
    for (uint32_t first = 0; first < slots; first += PRS_PARTIALS_PER_STAGE) {
        uint32_t count = slots - first < PRS_PARTIALS_PER_STAGE ? slots - first : PRS_PARTIALS_PER_STAGE;
        for (uint32_t quarter = 0; quarter < E::slabs_per_tile; quarter++, pipeline_next<E::stages>(r)) {
            mbarrier_wait(&m.empty[r->stage], r->phase ^ 1);
            __syncwarp(); /* a late lane would mistake the phase of the next use for this one */
            if (lane == 0) {
                mbarrier_expect(&m.full[r->stage], count * PRS_PARTIAL_QUARTER);
                for (uint32_t i = 0; i < count; i++) {
                    /* Sums 1 and 2 fill the B part of the stage, sum 0 the A part. */
                    uint8_t *dst = i == 0
                                       ? m.base + PRS_SMEM_A + r->stage * PRS_STAGE_A
                                       : m.base + PRS_SMEM_B + r->stage * PRS_STAGE_B + (i - 1) * PRS_PARTIAL_QUARTER;
                    bulk_load(dst, find(first + i, quarter), PRS_PARTIAL_QUARTER, &m.full[r->stage]);
                }
            }
        }
    }
}

/* The consumers add the other ranks' partial sums to d, in slot order. */
template <class E>
PRS_DEVICE void add_partials(float (&d)[E::accumulators], const struct cta_memory &m, struct pipeline *r, uint32_t half,
                             uint32_t slots)
{
    typedef element<E::sum> sum;
    uint32_t mine = half * PRS_SLAB + (threadIdx.x % 128) * 16;
    uint32_t a_base = smem_address(m.base) + PRS_SMEM_A + mine, b_base = smem_address(m.base) + PRS_SMEM_B + mine;
    for (uint32_t first = 0; first < slots; first += PRS_PARTIALS_PER_STAGE) {
        uint32_t count = slots - first < PRS_PARTIALS_PER_STAGE ? slots - first : PRS_PARTIALS_PER_STAGE;
#pragma unroll
        for (int quarter = 0; quarter < E::slabs_per_tile; quarter++) {
            mbarrier_wait(&m.full[r->stage], r->phase);
#pragma unroll
            for (int i = 0; i < PRS_PARTIALS_PER_STAGE; i++) {
                uint32_t from = i == 0 ? a_base + r->stage * PRS_STAGE_A
                                       : b_base + r->stage * PRS_STAGE_B + (i - 1) * PRS_PARTIAL_QUARTER;
                if (i < (int)count) {
#pragma unroll
                    for (int v = 0; v < 4; v++) {
                        uint4 x = load_shared_v4(from + v * 2048);
                        float *to = &d[quarter * 32 + v * 8];
                        to[0] += sum::low(x.x), to[1] += sum::high(x.x);
                        to[2] += sum::low(x.y), to[3] += sum::high(x.y);
                        to[4] += sum::low(x.z), to[5] += sum::high(x.z);
                        to[6] += sum::low(x.w), to[7] += sum::high(x.w);
                    }
                }
            }
            /* MUTANT(emulator reduce_scatter_is_right) all lanes have read before one releases: delete */
            __syncwarp(); /* all lanes have read before one releases */
            release_stage<E>(m, r->stage);
            pipeline_next<E::stages>(r);
        }
    }
}

#endif
