/* SPDX-License-Identifier: Apache-2.0 */
/* The device code of scales.h: the tile product of e4m3. The tensor cores keep about 14 bits of a sum, so its error
 * grows with K. An instance that promotes adds the sum of each stage, 128 of K, to one in fp32. Registers hold both
 * sums, so its tiles have half of the columns. */
#ifndef PERSEUS_FUSED_SCALES_CUH
#define PERSEUS_FUSED_SCALES_CUH

#include "fused/core/multiply.cuh"
#include "fused/core/scales.h"

/* Where a warpgroup's 64 rows of a tile find their scales. Rows and columns beyond the last ones get theirs. */
struct scaled_tile {
    const float *a; /* of this rank's rows, or of rows that another rank has sent */
    uint64_t pitch; /* as a_pitch */
    uint32_t row, last_row;
    uint32_t column[2], last_column; /* column: of B, where the two halves of the tile begin */
};

PRS_DEVICE uint32_t at_most(uint32_t x, uint32_t most)
{
    return x < most ? x : most;
}

/* The two rows of which a thread holds sums (epilogue.cuh). */
PRS_DEVICE uint32_t scaled_row(const struct scaled_tile &at, uint32_t second)
{
    return at_most(at.row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + second * 8, at.last_row);
}

/* Multiplies finished sums by the scales of their rows and columns. */
template <class E>
PRS_DEVICE void scale_tile(const struct prs_scales &s, const struct scaled_tile &at, float (&d)[E::accumulators])
{
    constexpr int half = E::accumulators / 2;
    float row[2];
    for (uint32_t i = 0; i < 2; i++)
        row[i] = at.a[(uint64_t)scaled_row(at, i) * s.a_step];
#pragma unroll
    for (int i = 0; i < E::accumulators; i += 4) {
        uint32_t column = at.column[i / half] + i % half * 2 + threadIdx.x % 4 * 2;
        /* MUTANT(emulator fp8/fp8_products_are_right) the scale of each column: s/column, at/0, at/ */
        float left = s.b[(uint64_t)at_most(column, at.last_column) * s.b_step];
        float right = s.b[(uint64_t)at_most(column + 1, at.last_column) * s.b_step];
        d[i] = d[i] * row[0] * left, d[i + 1] = d[i + 1] * row[0] * right;
        /* MUTANT(emulator fp8/fp8_products_are_right) the scale of each row: s/row[1] * left/row[0] * left/ */
        d[i + 2] = d[i + 2] * row[1] * left, d[i + 3] = d[i + 3] * row[1] * right;
    }
}

/* The factors of a stage's sums: of a thread's two rows, and of the two halves of the tile. */
PRS_DEVICE void stage_factors(const struct prs_scales &s, const struct scaled_tile &at, uint32_t step, float (&row)[2],
                              float (&half)[2])
{
    for (uint32_t i = 0; i < 2; i++)
        row[i] = half[i] = 1;
    if (s.k_blocks == 0)
        return;
    for (uint32_t i = 0; i < 2; i++) {
        /* MUTANT(emulator fp8/fp8_blocks_are_scaled) each block of K has its scales: s/step/0/ */
        row[i] = at.a[step * at.pitch + scaled_row(at, i)];
        /* MUTANT(emulator fp8/fp8_blocks_are_scaled) each block of columns has its scales: s/at.column[i]/0/ */
        half[i] = s.b[(uint64_t)(at.column[i] / PRS_SCALE_BLOCK) * s.k_blocks + step];
    }
}

/* Like multiply_tile(), but adds the sum of each stage, times its factors, to d. The factors are loaded while the
 * tensor cores multiply: what another rank has sent is there once the stage is full. While one warpgroup adds, the
 * other one's products run. */
template <class E>
PRS_DEVICE void multiply_tile_promoted(float (&d)[E::accumulators], const struct cta_memory &m, struct pipeline *r,
                                       uint32_t half, uint32_t steps, struct left_over<E> *left,
                                       struct slab_pipeline *slabs, const struct prs_scales &s,
                                       const struct scaled_tile &at)
{
    static_assert(element<E::type>::in_row == PRS_SCALE_BLOCK, "a stage is a block of K");
    float held[E::accumulators];
#pragma unroll
    for (int i = 0; i < E::accumulators; i++)
        d[i] = 0;
    for (uint32_t step = 0; step < steps; step++, pipeline_next(r)) {
        float row[2], column[2];
        /* MUTANT(emulator fp8/fp8_sums_are_promoted) promotion to fp32: s/false/step != 0/ */
        multiply_stage<E>(held, m, *r, half, false);
        stage_factors(s, at, step, row, column);
        if (left->next < left_over<E>::count && slab_is_free<E>(m, *slabs, half))
            hand_over_next<E>(left, m, half, slabs);
        wgmma_wait<0>();
        registers_pin(held);
        release_stage<E>(m, r->stage);
#pragma unroll
        for (int i = 0; i < E::accumulators; i++)
            /* MUTANT(emulator fp8/fp8_sums_are_promoted) promotion to fp32: s/+=/=/ */
            d[i] += held[i] * (row[i / 2 % 2] * column[i / (E::accumulators / 2)]);
    }
}

#endif
