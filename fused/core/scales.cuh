/* SPDX-License-Identifier: Apache-2.0 */
/* The device code of scales.h: the tile product of e4m3. The tensor cores keep about 14 bits of a sum, so its error
 * grows with K. An instance that promotes adds the sum of each stage, 128 of K, to a sum in fp32. It multiplies 128
 * columns at a time, because the registers have no room for a second sum of a whole tile. */
#ifndef PERSEUS_FUSED_SCALES_CUH
#define PERSEUS_FUSED_SCALES_CUH

#include "fused/core/multiply.cuh"
#include "fused/core/scales.h"

/* Where the scales of a warpgroup's 64 rows of a tile are. Rows and columns beyond the last ones use the scales of the
 * last ones. */
struct scaled_tile {
    const float *a; /* scales of this rank's rows, or of rows that another rank has sent */
    uint64_t pitch; /* like a_pitch */
    uint32_t next;  /* scales of blocks: floats from one row's scale to the next row's */
    uint32_t row, last_row;
    uint32_t column[2], last_column; /* column: the columns of B where the two halves of the tile begin */
};

PRS_DEVICE uint32_t at_most(uint32_t x, uint32_t most)
{
    return x < most ? x : most;
}

/* A thread has sums of two rows (epilogue.cuh). */
PRS_DEVICE uint32_t scaled_row(const struct scaled_tile &at, uint32_t second)
{
    return at_most(at.row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + second * 8, at.last_row);
}

/* Multiplies finished sums by the scales of their rows and columns. Several scales are loaded before the first is used:
 * loading them one by one took 2 us per tile. Instances that do not promote keep the rest of the previous tile in
 * registers, so they have registers for only two scales at a time. */
template <class E>
PRS_DEVICE void scale_tile(const struct prs_scales &s, const struct scaled_tile &at, float (&d)[E::accumulators])
{
    constexpr int half = E::accumulators / 2, at_once = E::promotes ? 32 : 2;
    float row[2];
    for (uint32_t i = 0; i < 2; i++)
        row[i] = at.a[(uint64_t)scaled_row(at, i) * s.a_step];
#pragma unroll
    for (int first = 0; first < E::accumulators; first += at_once * 2) {
        float factor[at_once];
#pragma unroll
        for (int j = 0; j < at_once; j++) {
            int i = first + j / 2 * 4;
            uint32_t column = at.column[i / half] + i % half * 2 + threadIdx.x % 4 * 2 + j % 2;
            /* MUTANT(emulator fp8/fp8_products_are_right) the scale of each column: s/column, at/0, at/ */
            factor[j] = s.b[(uint64_t)at_most(column, at.last_column) * s.b_step];
        }
        if (E::promotes)
            registers_pin(factor);
#pragma unroll
        for (int j = 0; j < at_once * 2; j++)
            /* MUTANT(emulator fp8/fp8_products_are_right) the scale of each row: s#row[j / 2 % 2]#row[0]# */
            d[first + j] = d[first + j] * row[j / 2 % 2] * factor[j / 4 * 2 + j % 2];
    }
}

/* Where the factors of a stage's sums are: one for each of a thread's two rows, and one for each 128 columns of the
 * tile. */
template <int PARTS> struct factor_places {
    const float *row[2], *columns[PARTS];
};

template <int PARTS>
PRS_DEVICE factor_places<PARTS> find_factors(const struct prs_scales &s, const struct scaled_tile &at)
{
    factor_places<PARTS> p;
    for (uint32_t i = 0; i < 2; i++)
        p.row[i] = at.a + (uint64_t)scaled_row(at, i) * at.next;
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++)
        /* MUTANT(emulator fp8/fp8_blocks_are_scaled) each block of columns has its scales: s/at.column[i]/0/ */
        p.columns[i] = s.b + (uint64_t)(at.column[i] / PRS_SCALE_BLOCK) * s.k_blocks;
    return p;
}

template <int PARTS> struct stage_factors {
    float row[2], columns[PARTS];
};

/* Loads the factors of a stage, and moves on to the next one. */
template <int PARTS>
PRS_DEVICE void load_factors(struct factor_places<PARTS> *p, uint64_t pitch, struct stage_factors<PARTS> *f)
{
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        f->row[i] = *p->row[i];
        /* MUTANT(emulator fp8/fp8_blocks_are_scaled) each block of K has its scales: delete */
        p->row[i] += pitch;
    }
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++)
        f->columns[i] = *p->columns[i]++;
}

/* Like multiply_tile(), but adds the sum of each stage, times its factors, to d. While one warpgroup adds, the other
 * one's products run. Factors that another rank has sent have arrived once the stage is full. They are loaded while the
 * first products run. Every instruction between two products is time in which this warpgroup multiplies nothing. So a
 * reduction shows the compiler which values are equal in all threads, and it computes descriptors in uniform registers.
 * Waiting for the next stage while products run costs more instructions than it hides, because descriptors are then not
 * uniform. */
template <class E>
PRS_DEVICE void multiply_tile_promoted(float (&d)[E::accumulators], const struct cta_memory &m, struct pipeline *r,
                                       uint32_t half, uint32_t steps, const struct prs_scales &s,
                                       const struct scaled_tile &at)
{
    static_assert(element<E::type>::in_row == PRS_SCALE_BLOCK, "a stage is a block of K");
    constexpr int parts = E::columns / PRS_SCALE_BLOCK, own = E::accumulators / parts;
    factor_places<parts> places = find_factors<parts>(s, at);
    struct stage_factors<parts> f = {
        {1, 1},
        {
            1, 1
        }
    }; /* used where finished sums are scaled */
    struct pipeline p = {__reduce_max_sync(~0u, r->stage), __reduce_max_sync(~0u, r->phase)};
    float held[own];
    half = __reduce_max_sync(~0u, half);
#pragma unroll
    for (int i = 0; i < E::accumulators; i++)
        d[i] = 0;
    for (uint32_t step = 0; step < steps; step++, pipeline_next<E::stages>(&p)) {
        /* MUTANT(emulator fp8/fp8_products_are_right) wait for a full stage: delete */
        mbarrier_wait(&m.full[p.stage], p.phase);
        if (s.k_blocks != 0)
            load_factors(&places, at.pitch, &f);
#pragma unroll
        for (int part = 0; part < parts; part++) {
            /* MUTANT(emulator fp8/fp8_sums_are_promoted) promotion to fp32: s/false/step != 0/ */
            multiply_columns<E>(held, m, p.stage, half, part * PRS_SCALE_BLOCK, false);
            wgmma_wait<0>();
            registers_pin(held);
            if (part == parts - 1)
                release_stage<E>(m, p.stage);
#pragma unroll
            for (int i = 0; i < own; i++)
                /* MUTANT(emulator fp8/fp8_sums_are_promoted) promotion to fp32: s/+=/=/ */
                d[part * own + i] += held[i] * (f.row[i / 2 % 2] * f.columns[part]);
        }
    }
    *r = p;
}

#endif
