/* SPDX-License-Identifier: Apache-2.0 */
/* The tile product, by two consumer warpgroups of 64 rows each: multiplies stages as they are filled, and hands
 * finished quarters of a tile to the warps that store them. */
#ifndef PERSEUS_FUSED_MULTIPLY_CUH
#define PERSEUS_FUSED_MULTIPLY_CUH

#include "fused/core/cta.cuh"
#include "fused/core/element.cuh"

/* One lane per CTA of the cluster tells that CTA that this warp has read the stage. */
template <class E> PRS_DEVICE void release_stage(const struct cta_memory &m, uint32_t stage)
{
    uint32_t lane = threadIdx.x % 32;
    if (lane < E::cluster)
        mbarrier_arrive_at(&m.empty[stage], lane);
}

/* Issues one stage's products and returns while they run. */
template <class E>
PRS_DEVICE void multiply_stage(float (&d)[128], const struct cta_memory &m, const struct pipeline &r, uint32_t half,
                               bool add)
{
    uint32_t base = smem_address(m.base);
    uint64_t a = matrix_descriptor(base + PRS_SMEM_A + half * (PRS_STAGE_A / 2) + r.stage * PRS_STAGE_A, 16);
    uint64_t b = matrix_descriptor(base + PRS_SMEM_B + r.stage * PRS_STAGE_B, E::b_n_major ? 8192 : 16);
    /* MUTANT(emulator reduce_scatter_is_right) wait for a full stage: delete */
    mbarrier_wait(&m.full[r.stage], r.phase);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma_m64n256k16<E::b_n_major, E::dtype == PRS_DTYPE_FP16>(d, a + k * 2, b + k * (E::b_n_major ? 128 : 2),
                                                                   add || k != 0);
    wgmma_commit();
}

/* Packs one quarter of a tile, the content of one slab, into pairs of elements: 16 registers. */
template <class E> PRS_DEVICE void pack_quarter(uint32_t (&to)[16], const float *d)
{
#pragma unroll
    for (int i = 0; i < 16; i++)
        to[i] = pack_pair<E::dtype>(d[2 * i], d[2 * i + 1]);
}

/* Writes a slab in fragment order, for add_partials on another rank: vector v (16 bytes) of thread t at v * 2048 + t *
 * 16. */
PRS_DEVICE void fill_partial_slab(const uint32_t (&x)[16], uint32_t slab)
{
    uint32_t to = slab + (threadIdx.x % 128) * 16;
#pragma unroll
    for (int v = 0; v < 4; v++)
        store_shared_v4(to + v * 2048, x[4 * v], x[4 * v + 1], x[4 * v + 2], x[4 * v + 3]);
}

/* Writes a slab as 64 rows of 128 bytes, swizzled as the copy engine expects. */
PRS_DEVICE void fill_result_slab(const uint32_t (&x)[16], uint32_t slab)
{
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    uint32_t row = warp * 16 + (lane / 8 & 1) * 8 + lane % 8;
    uint32_t line = slab + row * 128, right = lane / 16;
#pragma unroll
    for (int v = 0; v < 4; v++)
        store_matrix_x4(line + (((2 * v + right) ^ (row & 7)) << 4), x[4 * v], x[4 * v + 1], x[4 * v + 2],
                        x[4 * v + 3]);
}

/* The consumers' position in the ring of store buffers of their warpgroup. */
struct slab_pipeline {
    uint32_t filled; /* slabs handed over so far */
};

template <class E> PRS_DEVICE uint32_t next_slab(const struct slab_pipeline &ring, uint32_t half)
{
    return half * E::slabs + ring.filled % E::slabs;
}

/* All lanes of a warp get the same answer. */
template <class E>
PRS_DEVICE bool slab_is_free(const struct cta_memory &m, const struct slab_pipeline &ring, uint32_t half)
{
    uint32_t phase = ring.filled / E::slabs & 1;
    return __all_sync(~0u, mbarrier_test(&m.c_empty[next_slab<E>(ring, half)], phase ^ 1));
}

/* Hands one packed quarter to this warpgroup's store warp; waits until a slab is free. */
template <class E>
PRS_DEVICE void hand_over_quarter(const uint32_t (&x)[16], const struct cta_memory &m, uint32_t half,
                                  struct slab_pipeline *ring, bool partial)
{
    uint32_t slab = next_slab<E>(*ring, half), phase = ring->filled / E::slabs & 1;
    uint32_t to = smem_address(m.base) + PRS_SMEM_C + slab * PRS_SLAB;
    /* MUTANT(emulator reduce_scatter_is_right) wait for a free slab: delete */
    mbarrier_wait(&m.c_empty[slab], phase ^ 1);
    if (E::reduces && partial)
        fill_partial_slab(x, to);
    else
        fill_result_slab(x, to);
    /* MUTANT(emulator reduce_scatter_is_right) fence_async_shared before a slab is handed over: delete */
    fence_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        mbarrier_arrive(&m.c_full[slab]);
    ring->filled++;
}

/* The quarters of the last tile for which no slab was free. They stay in registers, and are handed over during the next
 * tile's products, as slabs become free. So a whole tile can wait for the network while the tensor cores continue. Each
 * warp decides for itself. */
template <class E> struct left_over {
    static constexpr int count = PRS_SLABS_PER_TILE - E::slabs;
    uint32_t quarter[count][16];
    uint32_t next; /* equal to count: nothing is left */
    bool partial;
};

/* Registers cannot be indexed at run time, so these loops are unrolled over constants. */
template <class E>
PRS_DEVICE void hand_over_next(struct left_over<E> *left, const struct cta_memory &m, uint32_t half,
                               struct slab_pipeline *ring)
{
    uint32_t now = left->next;
#pragma unroll
    for (int i = 0; i < left_over<E>::count; i++)
        if (now == i)
            hand_over_quarter<E>(left->quarter[i], m, half, ring, left->partial);
    left->next = now + 1;
}

template <class E>
PRS_DEVICE void hand_over_rest(struct left_over<E> *left, const struct cta_memory &m, uint32_t half,
                               struct slab_pipeline *ring)
{
    uint32_t now = left->next;
#pragma unroll
    for (int i = 0; i < left_over<E>::count; i++)
        if (now <= i)
            hand_over_quarter<E>(left->quarter[i], m, half, ring, left->partial);
    left->next = left_over<E>::count;
}

/* gated: only half of the tile, which finish_tile() has doubled, is handed over: quarters 0 and 1, which is equal to
 * quarter 3. */
template <class E>
PRS_DEVICE void hand_over_tile(const float (&d)[128], const struct cta_memory &m, uint32_t half,
                               struct slab_pipeline *ring, bool partial, struct left_over<E> *left, bool gated)
{
    static_assert(left_over<E>::count >= 2, "all that is left of a gated tile is its last quarter, or nothing");
    hand_over_rest<E>(left, m, half, ring);
#pragma unroll
    for (int i = 0; i < left_over<E>::count; i++)
        pack_quarter<E>(left->quarter[i], &d[(E::slabs + i) * 32]);
    left->next = gated ? 2 : 0;
    left->partial = partial;
#pragma unroll
    for (int i = 0; i < E::slabs; i++) {
        uint32_t x[16];
        pack_quarter<E>(x, &d[i * 32]);
        hand_over_quarter<E>(x, m, half, ring, partial);
    }
}

/* The K loop of one tile. One group of tensor-core work stays in flight while the previous stage is released. */
template <class E>
PRS_DEVICE void multiply_tile(float (&d)[128], const struct cta_memory &m, struct pipeline *r, uint32_t half,
                              uint32_t steps, struct left_over<E> *left, struct slab_pipeline *slabs)
{
    uint32_t before = 0;
    for (uint32_t step = 0; step < steps; step++) {
        multiply_stage<E>(d, m, *r, half, step != 0);
        if (step != 0) {
            /* MUTANT(emulator reduce_scatter_is_right) wgmma_wait before a stage is released: delete */
            wgmma_wait<1>();
            release_stage<E>(m, before);
        }
        if (left->next < left_over<E>::count && slab_is_free<E>(m, *slabs, half))
            hand_over_next<E>(left, m, half, slabs);
        before = r->stage;
        pipeline_next(r);
    }
    wgmma_wait<0>();
    /* MUTANT(emulator reduce_scatter_is_right) release of a stage after the last K step: delete */
    release_stage<E>(m, before);
}

#endif
