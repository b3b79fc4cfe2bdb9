/* SPDX-License-Identifier: Apache-2.0 */
/* The tile product, by two consumer warpgroups of 64 rows each: multiplies stages as they are filled, and hands
 * finished quarters of a tile to the warps that store them. */
#ifndef PERSEUS_FUSED_MULTIPLY_CUH
#define PERSEUS_FUSED_MULTIPLY_CUH

#include "fused/core/cta.cuh"
#include "fused/core/element.cuh"
#include "fused/core/partial_sums.cuh"

/* What follows from the columns of an instance's tile. SUM: the type of C and of partial sums. */
template <int COLUMNS, int SUM> struct tile_columns {
    static constexpr int columns = COLUMNS;
    static constexpr int sum = SUM;
    static constexpr int accumulators = COLUMNS / 2;              /* per thread: 128 threads share 64 rows */
    static constexpr int stage_b = COLUMNS * PRS_STAGE_ROW;       /* bytes */
    static constexpr int slab_columns = element<SUM>::in_row;     /* columns of C */
    static constexpr int slabs_per_tile = COLUMNS / slab_columns; /* slabs of a warpgroup */
    static_assert(COLUMNS <= PRS_TILE_N && COLUMNS % slab_columns == 0, "slabs are whole");
    /* Members that an instance may redefine. */
    static constexpr int stages = PRS_STAGES;
    static constexpr int slab_barriers = 4;            /* barriers of each kind */
    static constexpr uint32_t slab_place = PRS_SMEM_C; /* offset of the store buffers */
};

/* Issues the products of a full stage, of N accumulators' columns from `first` on, and returns while they run. */
template <class E, int N>
PRS_DEVICE void multiply_columns(float (&d)[N], const struct cta_memory &m, uint32_t stage, uint32_t half,
                                 uint32_t first, bool add)
{
    typedef element<E::type> in;
    constexpr int across = in::product_k * in::bytes / 16, down = in::product_k * PRS_STAGE_ROW / 16;
    uint32_t base = smem_address(m.base);
    uint64_t a = matrix_descriptor(base + PRS_SMEM_A + half * (PRS_STAGE_A / 2) + stage * PRS_STAGE_A, 16);
    uint64_t b = matrix_descriptor(base + PRS_SMEM_B + stage * PRS_STAGE_B + first * PRS_STAGE_ROW,
                                   E::b_n_major ? in::in_row * PRS_STAGE_ROW : 16);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < (int)(in::in_row / in::product_k); k++)
        in::template multiply<E::b_n_major>(d, a + k * across, b + k * (E::b_n_major ? down : across), add || k != 0);
    wgmma_commit();
}

/* The same for the whole tile, when the stage is full. */
template <class E>
PRS_DEVICE void multiply_stage(float (&d)[E::accumulators], const struct cta_memory &m, const struct pipeline &r,
                               uint32_t half, bool add)
{
    /* MUTANT(emulator reduce_scatter_is_right) wait for a full stage: delete */
    mbarrier_wait(&m.full[r.stage], r.phase);
    multiply_columns<E>(d, m, r.stage, half, 0, add);
}

/* Packs the content of one slab, a quarter of the widest tile, into pairs of elements: 16 registers. */
template <class E> PRS_DEVICE void pack_quarter(uint32_t (&to)[16], const float *d)
{
#pragma unroll
    for (int i = 0; i < 16; i++)
        to[i] = element<E::sum>::pack(d[2 * i], d[2 * i + 1]);
}

/* Writes a slab as 64 rows of 128 bytes, swizzled as TMA expects. */
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
    uint32_t to = smem_address(m.base) + E::slab_place + slab * PRS_SLAB;
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
    static constexpr int count = E::slabs_per_tile - E::slabs;
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

/* gated: only half of the tile, which finish_tile() has doubled, is handed over. Of four quarters these are 0 and 1,
 * which is equal to quarter 3. */
template <class E>
PRS_DEVICE void hand_over_tile(const float (&d)[E::accumulators], const struct cta_memory &m, uint32_t half,
                               struct slab_pipeline *ring, bool partial, struct left_over<E> *left, bool gated)
{
    constexpr int half_tile = E::slabs_per_tile / 2;
    static_assert(E::slabs <= half_tile, "all that is left of a gated tile are its last quarters, or nothing");
    hand_over_rest<E>(left, m, half, ring);
#pragma unroll
    for (int i = 0; i < left_over<E>::count; i++)
        pack_quarter<E>(left->quarter[i], &d[(E::slabs + i) * 32]);
    left->next = gated ? half_tile : 0;
    left->partial = partial;
#pragma unroll
    for (int i = 0; i < E::slabs; i++) {
        uint32_t x[16];
        pack_quarter<E>(x, &d[i * 32]);
        hand_over_quarter<E>(x, m, half, ring, partial);
    }
}

/* Leaves nothing over: for an instance whose products need the registers. */
template <class E>
PRS_DEVICE void hand_over_whole_tile(const float (&d)[E::accumulators], const struct cta_memory &m, uint32_t half,
                                     struct slab_pipeline *ring, bool partial, bool gated)
{
    if constexpr (E::slabs == E::slabs_per_tile) { /* gated: as in hand_over_tile() */
#pragma unroll
        for (int i = 0; i < E::slabs; i++) {
            uint32_t x[16];
            if (i >= E::slabs / 2 && gated)
                break;
            pack_quarter<E>(x, &d[i * 32]);
            hand_over_quarter<E>(x, m, half, ring, partial);
        }
    } else {
        struct left_over<E> left;
        left.next = left_over<E>::count;
        hand_over_tile<E>(d, m, half, ring, partial, &left, gated);
        hand_over_rest<E>(&left, m, half, ring);
    }
}

/* The K loop of one tile. One group of tensor-core work stays in flight while the previous stage is released. */
template <class E>
PRS_DEVICE void multiply_tile(float (&d)[E::accumulators], const struct cta_memory &m, struct pipeline *r,
                              uint32_t half, uint32_t steps, struct left_over<E> *left, struct slab_pipeline *slabs)
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
        pipeline_next<E::stages>(r);
    }
    wgmma_wait<0>();
    /* MUTANT(emulator reduce_scatter_is_right) release of a stage after the last K step: delete */
    release_stage<E>(m, before);
}

#endif
