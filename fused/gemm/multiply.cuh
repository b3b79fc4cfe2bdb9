/* SPDX-License-Identifier: Apache-2.0 */
/* Warps 4 to 11: multiply the units one after the other, and add the sums of other ranks. */
#ifndef PERSEUS_FUSED_GEMM_MULTIPLY_CUH
#define PERSEUS_FUSED_GEMM_MULTIPLY_CUH

#include "fused/core/epilogue.cuh"
#include "fused/core/multiply.cuh"
#include "fused/core/partial_sums.cuh"
#include "fused/core/quantised_tile.cuh"
#include "fused/core/scales.cuh"
#include "fused/gemm/unit.cuh"

/* Applies the epilogue to this warpgroup's half of a tile of the result. */
template <class E>
PRS_DEVICE void finish_half(const struct prs_kernel_args &args, float (&d)[E::accumulators], const struct prs_unit &u,
                            uint32_t cta, uint32_t half)
{
    const struct prs_launch *launch = launch_here();
    uint32_t first = prs_schedule_result_row(&launch->schedule, u.block), end = first + launch->schedule.block_rows;
    finish_tile<E::sum>(args.epilogue, d,
                        {first + u.pair * PRS_PAIR_M + cta * PRS_TILE_M + half * 64,
                         u.column * prs_epilogue_columns(&args.epilogue, E::columns), end < launch->m ? end : launch->m,
                         args.n});
}

/* Stores this warpgroup's half of a finished tile in e4m3. A gated tile has the 128 columns that share a scale, others
 * have twice as many. */
template <class E>
PRS_DEVICE void quantise_half(const struct prs_kernel_args &args, const float (&d)[E::accumulators],
                              const struct prs_unit &u, uint32_t cta, uint32_t half)
{
    constexpr int side = E::accumulators / 2;
    const struct prs_launch *launch = launch_here();
    const struct prs_quantised_result &q = args.quantised;
    uint32_t block = prs_schedule_result_row(&launch->schedule, u.block), end = block + launch->schedule.block_rows;
    uint32_t row = block + u.pair * PRS_PAIR_M + cta * PRS_TILE_M + half * 64;
    uint32_t first = u.column * prs_epilogue_columns(&args.epilogue, E::columns);
    end = end < launch->m ? end : launch->m;
    for (uint32_t part = 0; part < (args.epilogue.gated != 0 ? 1 : 2); part++) {
        uint32_t column = first + part * PRS_SCALE_BLOCK;
        float x[side];
#pragma unroll
        for (int i = 0; i < side; i++)
            x[i] = part == 0 ? d[i] : d[side + i];
        if (column >= args.n)
            break;
        store_quantised_rows(
            x,
            [&](uint32_t r) {
                /* MUTANT(emulator fp8_results/quantised_results_are_right) rows beyond the block's are not stored:
                 * s/row + r < end/true/ */
                return row + r < end ? q.to + (uint64_t)(row + r) * q.pitch + column : (uint8_t *)NULL;
            },
            [&](uint32_t r, float scale) {
                /* MUTANT(emulator fp8_results/quantised_results_are_right) each block of columns has its scale:
                 * s#column / PRS_SCALE_BLOCK#first / PRS_SCALE_BLOCK# */
                q.scales[column / PRS_SCALE_BLOCK * q.scales_pitch + row + r] = scale;
            });
    }
}

/* Where this warpgroup's half of a tile finds its scales. */
template <class E>
PRS_DEVICE struct scaled_tile find_scales(const struct prs_kernel_args &args, const struct prs_unit &u, uint32_t cta,
                                          uint32_t half)
{
    const struct prs_launch *launch = launch_here();
    const struct prs_schedule *s = &launch->schedule;
    const struct prs_epilogue &e = args.epilogue;
    struct scaled_tile at;
    at.a = args.scales.a;
    at.pitch = args.scales.a_pitch;
    at.next = 1;
    at.row = u.pair * PRS_PAIR_M + cta * PRS_TILE_M + half * 64;
    at.last_row = (E::reduces ? launch->m : s->block_rows) - 1;
    /* MUTANT(emulator fp8/fp8_products_are_right) scales of the block's rows: delete */
    if (E::reduces)
        at.row += u.block * s->block_rows;
    if (E::gathers && u.block != s->place.rank && args.scales.sent != 0) {
        uint32_t slot = prs_schedule_slot(s, u.block, s->place.rank);
        uint32_t first = E::far ? u.pair * PRS_PAIR_M + cta * PRS_TILE_M : 0;
        const uint8_t *bank = args.staging[0] + (s->segments != 0 ? 0 : staging_bank(args)); /* copies have one */
        at.a = (const float *)(bank + prs_layout_scales(s, args.scales.sent, slot, 0, first));
        at.pitch = prs_scales_pitch(s);
        at.row -= first;
        at.last_row = first < s->block_rows ? at.last_row - first : 0;
    }
    for (uint32_t i = 0; i < 2; i++)
        at.column[i] = prs_epilogue_half(&e, E::columns, args.n, u.column, i);
    at.last_column = (e.gated ? 2 * args.n : args.n) - 1;
    return at;
}

template <class E> PRS_DEVICE void multiply_tiles(const struct prs_kernel_args &args, const struct cta_memory &m)
{
    const struct prs_schedule *s = &launch_here()->schedule;
    uint32_t half = threadIdx.x / 128 - 1;
    struct slab_pipeline slabs = {0};
    struct left_over<E> left;
    struct pipeline r = {0, 0};
    struct prs_cursor cursor = {0, 0};
    struct unit_memory queue = unit_memory_map(m);
    struct unit_pipeline taken = {0};
    float d[E::accumulators];
    left.next = left_over<E>::count;
    for (typename unit_taken<E::told>::unit unit; number_of(unit = take_unit<E>(queue, &taken, true)) < s->units;) {
        struct prs_unit u;
        bool partial = false;
        if constexpr (E::promotes) {
            find_unit(s, &cursor, unit, &u);
            multiply_tile_promoted<E>(d, m, &r, half, args.schedule.k_steps, args.scales,
                                      find_scales<E>(args, u, blockIdx.x % E::cluster, half));
        } else {
            multiply_tile<E>(d, m, &r, half, args.schedule.k_steps, &left, &slabs);
        }
        if constexpr (E::scaled) {
            /* A sum that travels, or to which other ranks' are added, has been scaled. */
            /* MUTANT(emulator fp8/fp8_blocks_are_scaled) scales are applied once: s/== 0/>= 0/ */
            if (args.scales.k_blocks == 0) {
                find_unit(s, &cursor, unit, &u);
                hand_over_rest<E>(&left, m, half, &slabs); /* frees registers */
                scale_tile<E>(args.scales, find_scales<E>(args, u, blockIdx.x % E::cluster, half), d);
            }
        }
        if (E::reduces) {
            find_unit(s, &cursor, unit, &u);
            partial = u.block != args.schedule.place.rank;
            if (prs_schedule_part(s, u.block) != PRS_PART_SEND) {
                /* The other ranks may need the quarters left here before they can send the sums that this rank now
                 * waits for. */
                /* MUTANT(emulator nodes/reduce_scatter_is_right_with_long_k)
                 * rest handed over before a relayed tile's sums are awaited: delete */
                /* MUTANT(emulator epochs_run_into_each_other) rest handed over before partial sums are awaited:
                 * delete */
                hand_over_rest<E>(&left, m, half, &slabs);
                add_partials<E>(d, m, &r, half, prs_schedule_sources(s, u.block));
            }
        }
        if (args.epilogue.any != 0 && !partial) {
            if (!E::reduces)
                find_unit(s, &cursor, unit, &u);
            hand_over_rest<E>(&left, m, half, &slabs); /* frees registers */
            finish_half<E>(args, d, u, blockIdx.x % E::cluster, half);
        }
        if constexpr (E::quantises) {
            if (args.quantised.to) {
                find_unit(s, &cursor, unit, &u);
                quantise_half<E>(args, d, u, blockIdx.x % E::cluster, half);
                continue;
            }
        }
        bool gated = args.epilogue.gated != 0 && !partial;
        if constexpr (E::promotes)
            hand_over_whole_tile<E>(d, m, half, &slabs, partial, gated);
        else
            hand_over_tile<E>(d, m, half, &slabs, partial, &left, gated);
    }
    hand_over_rest<E>(&left, m, half, &slabs);
}

#endif
