/* SPDX-License-Identifier: Apache-2.0 */
/* Warp 0: fills the stage pipeline, and waits there for data from other ranks. */
#ifndef PERSEUS_FUSED_LOAD_CUH
#define PERSEUS_FUSED_LOAD_CUH

#include "fused/core/partial_sums.cuh"
#include "fused/gemm/relay.cuh"
#include "fused/gemm/unit.cuh"

/* All-gather: waits, and returns how many strips have arrived, counted from `strip`; at least 1. Each lane reads one
 * counter, so a complete row costs one read per 32 strips. Returns a large number when the wait gave up. */
PRS_DEVICE uint32_t await_strips(const struct prs_kernel_args &args, const struct cta_position &at, uint32_t slot,
                                 uint32_t row_tile, uint32_t strip)
{
    const struct prs_schedule *s = &launch_here()->schedule;
    uint32_t lane = threadIdx.x % 32, mine = strip + lane, strips = prs_schedule_strips(s);
    uint32_t index = prs_schedule_arrival(s, slot, row_tile, mine);
    uint32_t want = mine < strips ? prs_schedule_arrivals(s, row_tile, mine) : 0;
    const uint32_t *counter = arrivals_at(args, at.epoch, 0, index);
    struct wait_clock clock = {0, 0};
    for (;;) {
        uint32_t seen = mine < strips ? load_acquire_sys(counter) : 0;
        uint32_t missing = __ballot_sync(~0u, !prs_flag_reached(seen, want));
        if (missing == 0)
            return 32;
        if ((missing & 1) == 0)
            return __ffs(missing) - 1;
        bool go =
            keep_waiting(&args.sync, &clock, PRS_AWAIT_CHUNK, prs_place_after(&s->place, 1 + slot), index, want, seen);
        if (!__shfl_sync(~0u, go, 0))
            return ~0u / PRS_STRIP_STEPS;
    }
}

/* Where a tile's rows of A come from. */
struct a_source {
    const CUtensorMap *map;
    const uint8_t *tiles; /* pushed by another rank: swizzled 16 KB tiles along K; NULL: load by the map */
    int32_t row;          /* in the map */
};

template <class E>
PRS_DEVICE void load_stage(const struct prs_kernel_args &args, const struct cta_memory &m,
                           const struct cta_position &at, uint32_t stage, const struct a_source &a, int32_t n,
                           uint32_t step)
{
    uint64_t *bar = &m.full[stage];
    constexpr int row = element<E::type>::in_row;
    uint8_t *b = m.base + PRS_SMEM_B + stage * PRS_STAGE_B + at.rank * (E::first_columns * PRS_STAGE_ROW);
    int32_t k = (int32_t)step * row;
    mbarrier_expect(bar, PRS_STAGE_A + E::stage_b);
    if (E::gathers && a.tiles)
        bulk_load(m.base + PRS_SMEM_A + stage * PRS_STAGE_A, a.tiles + (uint64_t)step * PRS_STAGE_A, PRS_STAGE_A, bar);
    else
        tma_load_2d(m.base + PRS_SMEM_A + stage * PRS_STAGE_A, a.map, bar, k, a.row);
    if (E::b_n_major) {
        static_assert(E::first_columns <= 2 * row && 2 * E::first_columns - E::columns <= row, "one box or two");
        tma_load_2d_multicast(b, &args.b, bar, n, k, 3);
        if (E::first_columns > row && (2 * E::first_columns == E::columns || at.rank == 0))
            tma_load_2d_multicast(b + row * PRS_STAGE_ROW, &args.b, bar, n + row, k, 3);
    } else {
        tma_load_2d_multicast(b, &args.b, bar, k, n, 3);
    }
}

/* The address of the sums that are added to a tile of `block`. */
template <class E> PRS_DEVICE uint32_t source_slot(const struct prs_schedule *s, uint32_t block, uint32_t i)
{
    return E::far ? prs_schedule_source(s, block, i).slot : i;
}

template <class E>
PRS_DEVICE void await_partials(const struct prs_kernel_args &args, const struct cta_position &at,
                               const struct prs_unit &u, uint32_t count)
{
    const struct prs_schedule *s = &launch_here()->schedule;
    uint32_t tile = prs_schedule_tile(s, &u, at.rank);
    for (uint32_t i = threadIdx.x % 32; i < 2 * count; i += 32) {
        struct prs_source from = prs_schedule_source(s, u.block, i / 2);
        uint32_t index = prs_schedule_partial_flag(s, from.slot, tile, i & 1);
        const uint32_t *flag = args.flags[0] + index;
        if (E::far && from.far) { /* both halves come together */
            uint32_t group = prs_schedule_group(s, u.pair * 2 + at.rank, u.column).index;
            index = prs_schedule_group_word(s, i / 2 - (s->place.local_ranks - 1), group);
            flag = far_flag(args, index);
        }
        /* MUTANT(emulator nodes/reduce_scatter_is_right) wait for other nodes' sums:
         * s/wait_flag/if (!from.far) wait_flag/ */
        /* MUTANT(emulator reduce_scatter_is_right) wait for partial sums: s/wait_flag/if (0) wait_flag/ */
        wait_flag(&args.sync, flag, at.epoch, PRS_AWAIT_PARTIAL, from.rank, index);
    }
    __syncwarp();
    /* MUTANT(emulator reduce_scatter_is_right) fence_async_global before partial sums are loaded: delete */
    fence_async_global(); /* the flags were read by ordinary loads, the sums are read by TMA */
}

/* Loads the other ranks' partial sums of a tile that is added up here. */
template <class E>
PRS_DEVICE void take_partials(const struct prs_kernel_args &args, const struct cta_memory &m,
                              const struct cta_position &at, struct pipeline *r, const struct prs_unit &u)
{
    const struct prs_schedule *s = &launch_here()->schedule;
    uint32_t slots = prs_schedule_sources(s, u.block), tile = prs_schedule_tile(s, &u, at.rank);
    /* MUTANT(emulator reduce_scatter_is_right) the other bank in odd epochs:
     * s/+ staging_bank(args)// */
    const uint8_t *bank = args.staging[0] + staging_bank(args);
    await_partials<E>(args, at, u, slots);
    load_partials<E>(m, r, slots, [&](uint32_t i, uint32_t quarter) {
        return bank + prs_layout_partial(s, source_slot<E>(s, u.block, i), tile, quarter);
    });
}

/* All-gather: waits until K step `step` of another rank's row tile may be loaded. *ready: how many steps from this one
 * on are known to have arrived, so that most calls read no flag. */
PRS_DEVICE void await_step(const struct prs_kernel_args &args, const struct cta_position &at, const struct prs_unit &u,
                           uint32_t step, uint32_t *ready)
{
    const struct prs_schedule *s = &launch_here()->schedule;
    if (*ready == 0) {
        uint32_t slot = prs_schedule_slot(s, u.block, s->place.rank);
        if (args.schedule.segments != 0) {
            uint32_t steps = prs_schedule_segment_steps(s);
            uint32_t index = prs_schedule_segment_flag(s, slot, u.pair / s->band, step / steps);
            /* MUTANT(emulator allgather_by_copy_engine_is_right) wait for the copied rows: s/epoch/epoch - 1/ */
            wait_flag(&args.sync, args.flags[0] + index, at.epoch, PRS_AWAIT_CHUNK, u.block, index);
            /* MUTANT(emulator allgather_by_copy_engine_is_right) a wait for each piece that is copied:
             * s/steps/steps + 1/ */
            *ready = steps;
        } else {
            /* MUTANT(emulator allgather_is_right) wait for the pushed rows: s#PRS_STRIP_STEPS *#1 ? 1 :# */
            *ready = PRS_STRIP_STEPS * await_strips(args, at, slot, u.pair * 2 + at.rank, step / PRS_STRIP_STEPS);
        }
        fence_async_global(); /* arrivals were read by ordinary loads, A is read by TMA */
    }
    --*ready;
}

template <class E>
PRS_DEVICE struct a_source find_rows(const struct prs_kernel_args &args, const struct cta_position &at,
                                     const struct prs_unit &u)
{
    const struct prs_schedule *s = &launch_here()->schedule;
    uint32_t row = u.pair * PRS_PAIR_M + at.rank * PRS_TILE_M, slot = prs_schedule_slot(s, u.block, s->place.rank);
    struct a_source a = {&args.a, NULL, (int32_t)row};
    if (E::reduces)
        a.row += (int32_t)(u.block * s->block_rows);
    if (E::gathers && u.block != s->place.rank) {
        a.map = &args.gathered;
        a.row += (int32_t)(slot * s->most_pairs * PRS_PAIR_M);
        if (s->segments == 0)
            a.tiles = args.staging[0] + staging_bank(args) + prs_layout_gathered(s, slot, u.pair * 2 + at.rank, 0);
    }
    return a;
}

/* first: the unit that the first thread of the first CTA has claimed. The next unit is claimed some steps before the
 * end of one: it is then there in time, and a cluster that is slow does not hold it back for long. */
template <class E>
PRS_DEVICE void load_tiles(const struct prs_kernel_args &args, const struct cta_memory &m,
                           const struct cta_position &at, uint32_t first)
{
    const struct prs_schedule *s = &launch_here()->schedule;
    uint32_t lane = threadIdx.x % 32;
    struct pipeline r = {0, 0};
    struct prs_cursor cursor = {0, 0};
    struct unit_memory queue = unit_memory_map(m);
    struct unit_pipeline taken = {0};
    if (lane == 0)
        pass_unit<E>(queue, at, &cursor, 0, first);
    for (;;) {
        struct prs_unit u;
        struct a_source a;
        typename unit_taken<E::told>::unit unit;
        uint32_t ready = 0;
        int32_t n;
        __syncwarp();
        unit = take_unit<E>(queue, &taken, true);
        if (number_of(unit) >= s->units)
            break;
        find_unit(s, &cursor, unit, &u);
        a = find_rows<E>(args, at, u);
        /* MUTANT(emulator allgather_of_narrow_tiles_is_right) where the second CTA's boxes of B begin:
         * s#at.rank * E::first_columns#at.rank * E::columns / 2# */
        n = (int32_t)(2 * E::first_columns == E::columns
                          ? prs_epilogue_half(&args.epilogue, E::columns, args.n, u.column, at.rank)
                          : u.column * E::columns + at.rank * E::first_columns);
        for (uint32_t step = 0; step < args.schedule.k_steps; step++, pipeline_next<E::stages>(&r)) {
            if (E::gathers && u.block != args.schedule.place.rank)
                await_step(args, at, u, step, &ready);
            /* MUTANT(emulator reduce_scatter_is_right) wait for an empty stage: delete */
            mbarrier_wait(&m.empty[r.stage], r.phase ^ 1);
            __syncwarp(); /* a late lane would mistake the phase of the next use for this one */
            if (lane == 0) {
                load_stage<E>(args, m, at, r.stage, a, n, step);
                if (step == args.claim_step)
                    pass_unit<E>(queue, at, &cursor, taken.taken,
                                 at.rank == 0 ? atomicAdd(claim_counter(args, PRS_CLAIM_UNITS), 1u) : 0);
            }
        }
        if (E::reduces && prs_schedule_part(s, u.block) != PRS_PART_SEND)
            take_partials<E>(args, m, at, &r, u);
    }
}

#endif
