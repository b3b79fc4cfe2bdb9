/* SPDX-License-Identifier: Apache-2.0 */
/* The grouped product of MoE: the tile product over row blocks. The device finds each block's expert and number of
 * rows. A CTA computes one 128 x 256 tile of one expert. With E::cluster = 2, two CTAs compute two column tiles of the
 * same rows; each loads half of the rows and multicasts it. The warps of a CTA:
 *   warp 0         load_blocks      fills the stages
 *   warp 1         store_blocks     stores finished slabs
 *   warp 2         place_rows       delivers received rows to the experts
 *   warp 3         send_rows        sends this rank's tokens
 *   warps 2 and 3  return_early     during the second product of a layer: return sums of its results (returns.cuh)
 *   warps 4..11    multiply_blocks  two consumer warpgroups, 64 rows each */
#ifndef PERSEUS_FUSED_MOE_ENGINE_CUH
#define PERSEUS_FUSED_MOE_ENGINE_CUH

#include "fused/core/epilogue.cuh"
#include "fused/core/multiply.cuh"
#include "fused/core/scales.cuh"
#include "fused/core/units.cuh"
#include "fused/moe/returns.cuh"
#include "fused/moe/scaled_rows.cuh"

/* QUANTISES: the result is not stored as it is, but becomes rows of e4m3 (quantise.cuh). */
template <int TYPE, int B_N_MAJOR, int CLUSTER, bool FAR, bool QUANTISES = false>
struct moe_engine : tile_columns<PRS_TILE_N, element<TYPE>::sum> {
    static constexpr int type = TYPE; /* enum prs_dtype of rows and weights */
    static constexpr int b_n_major = B_N_MAJOR;
    static constexpr bool scaled = TYPE == PRS_DTYPE_E4M3; /* operands have scales of blocks */
    static constexpr bool reduces = false;
    static constexpr int slabs = 1;
    static constexpr int cluster = CLUSTER;
    /* The loading and the storing warp; there is no storing warp if there are no results to store. */
    static constexpr int unit_readers = CONSUMER_WARPS + (QUANTISES ? 1 : 2);
    static constexpr bool far = FAR; /* several nodes */
    static constexpr bool quantises = QUANTISES;
};

/* The part of a unit that one CTA computes. */
struct moe_tile {
    struct prs_route_unit unit;
    uint32_t column; /* number of the column tile; prs_epilogue_columns() says how wide it is */
    bool empty;      /* there is no such tile: the CTA only loads its half of the rows for the other one */
};

template <class E> PRS_DEVICE bool returns_early(const struct prs_moe_args &args)
{
    return !E::far && !E::quantises && args.returns_early != 0;
}

template <class E>
PRS_DEVICE void find_tile(const struct prs_moe_args &args, const struct cta_position &at,
                          struct prs_route_cursor *cursor, uint32_t unit, struct moe_tile *t)
{
    /* Without dispatch the product waits for nothing. One pass is then enough, and reads each weight once. */
    const uint32_t *near = E::far && args.dispatches != 0 ? args.far.near : NULL;
    if (returns_early<E>(args)) /* the last expert first */
        unit = args.totals->blocks * args.route.columns - 1 - unit;
    prs_route_unit(&args.route, args.table, near, cursor, unit, &t->unit);
    t->column = t->unit.column * E::cluster + at.rank;
    t->empty = t->column * prs_epilogue_columns(&args.epilogue, E::columns) >= args.n;
}

/* A warpgroup without rows or columns has nothing to compute. */
PRS_DEVICE bool tile_has_half(const struct moe_tile &t, uint32_t half)
{
    return !t.empty && half * 64 < t.unit.rows;
}

/* ---- warp 0 ---- */
PRS_DEVICE void await_block(const struct prs_moe_args &args, const struct prs_route_unit &u)
{
    if (args.dispatches == 0)
        return;
    wait_flag(&args.sync, args.ready + u.block, u.rows, PRS_AWAIT_BLOCK, args.route.place.rank, u.block);
    fence_async_global(); /* the counter was read by an ordinary load, the rows are read by TMA */
}

template <class E>
PRS_DEVICE void load_moe_stage(const struct prs_moe_args &args, const struct cta_memory &m,
                               const struct cta_position &at, uint32_t stage, const struct moe_tile &t, uint32_t step)
{
    constexpr uint32_t in_row = element<E::type>::in_row, boxes = E::columns / in_row; /* boxes of an N-major B */
    uint64_t *bar = &m.full[stage];
    uint8_t *a = m.base + PRS_SMEM_A + stage * PRS_STAGE_A, *b = m.base + PRS_SMEM_B + stage * PRS_STAGE_B;
    int32_t k = (int32_t)(step * in_row), expert = (int32_t)t.unit.expert;
    int32_t row = (int32_t)t.unit.block * PRS_TILE_M;
    mbarrier_expect(bar, t.empty ? PRS_STAGE_A : PRS_STAGE_A + E::stage_b);
    if (E::cluster == 1)
        tma_load_2d(a, &args.rows, bar, k, row);
    else
        tma_load_2d_multicast(a + at.rank * (PRS_STAGE_A / 2), &args.rows, bar, k, row + (int32_t)at.rank * 64, 3);
    if (t.empty)
        return;
    /* The columns of a gated tile lie in two places. */
    uint32_t loads = E::b_n_major ? boxes : args.epilogue.gated ? 2 : 1;
    for (uint32_t i = 0; i < loads; i++) {
        uint32_t half = i * 2 / loads, box = E::b_n_major ? i % (boxes / 2) : 0;
        int32_t n = (int32_t)(prs_epilogue_half(&args.epilogue, E::columns, args.n, t.column, half) + box * in_row);
        if (E::b_n_major)
            tma_load_3d(b + i * (in_row * PRS_STAGE_ROW), &args.experts, bar, n, k, expert);
        else
            tma_load_3d(b + half * (E::stage_b / 2), &args.experts, bar, k, n, expert);
    }
}

template <class E>
PRS_DEVICE void load_blocks(const struct prs_moe_args &args, const struct cta_memory &m, const struct cta_position &at)
{
    uint32_t lane = threadIdx.x % 32, units = args.totals->blocks * args.route.columns;
    struct unit_memory queue = unit_memory_map(m);
    struct unit_pipeline taken = {0};
    struct pipeline r = {0, 0};
    struct prs_route_cursor cursor = {0};
    for (;;) {
        struct moe_tile t;
        uint32_t unit;
        if (lane == 0)
            unit_fetch<E>(&args.claims->units, queue, at, taken.taken);
        __syncwarp();
        unit = unit_take(queue, &taken, true);
        if (unit >= units)
            break;
        find_tile<E>(args, at, &cursor, unit, &t);
        await_block(args, t.unit);
        for (uint32_t step = 0; step < args.k_steps; step++, pipeline_next(&r)) {
            mbarrier_wait(&m.empty[r.stage], r.phase ^ 1);
            __syncwarp(); /* as in load_tiles(): no lane may test the barrier a phase late */
            if (lane == 0)
                load_moe_stage<E>(args, m, at, r.stage, t, step);
        }
    }
}

/* ---- warps 4 to 11 ---- */
/* Experts have neither bias nor residual. Both are constants here, so that the compiler keeps no registers for them;
 * otherwise it would spill some. */
template <class E> PRS_DEVICE void finish_moe_tile(const struct prs_moe_args &args, float (&d)[E::accumulators])
{
    struct prs_epilogue e = {NULL, NULL, 0, args.epilogue.activation, args.epilogue.gated, 1};
    finish_tile<E::sum>(e, d, {0, 0, 0, 0});
}

/* Multiplies a tile of e4m3. Rows that only fill the block have the scales of its last row. */
template <class E>
PRS_DEVICE void multiply_scaled_tile(const struct prs_moe_args &args, const struct moe_tile &t,
                                     float (&d)[E::accumulators], const struct cta_memory &m, struct pipeline *r,
                                     uint32_t half)
{
    struct prs_scales s = args.scales;
    uint32_t columns = args.epilogue.gated ? 2 * args.n : args.n, first = t.unit.block * PRS_TILE_M;
    /* MUTANT(emulator moe_fp8/rows_travel_with_their_scales) a half has the scales of its rows: s/half * 64/0/ */
    struct scaled_tile at = {s.a, s.a_pitch, s.a_step, first + half * 64, first + t.unit.rows - 1, {0, 0}, columns - 1};
    for (uint32_t i = 0; i < 2; i++)
        at.column[i] = prs_epilogue_half(&args.epilogue, E::columns, args.n, t.column, i);
    /* MUTANT(emulator moe_fp8/layers_are_right) each expert has its scales: delete */
    s.b += (uint64_t)t.unit.expert * prs_ceil_div(columns, PRS_SCALE_BLOCK) * s.k_blocks;
    multiply_tile_promoted<E>(d, m, r, half, args.k_steps, s, at);
}

/* This half has nothing to compute: it releases the stages of the tile unread. Meanwhile it hands over the rest of the
 * previous tile, but only into slabs that are free. It waits for a slab only after it has released all stages of this
 * tile: the store warp may be waiting for a slab of the other half, which needs those stages. It does so before the
 * next tile, because the store warp may also be waiting for a slab of this half. */
template <class E>
PRS_DEVICE void skip_tile(const struct cta_memory &m, struct pipeline *r, uint32_t half, uint32_t steps,
                          struct left_over<E> *left, struct slab_pipeline *slabs)
{
    for (uint32_t step = 0; step < steps; step++, pipeline_next(r)) {
        mbarrier_wait(&m.full[r->stage], r->phase);
        __syncwarp();
        release_stage<E>(m, r->stage);
        if (left->next < left_over<E>::count && slab_is_free<E>(m, *slabs, half))
            hand_over_next<E>(left, m, half, slabs);
    }
    hand_over_rest<E>(left, m, half, slabs);
}

/* Turns a finished sum into rows of e4m3: a gated tile gives 128 columns of them, others twice as many. */
template <class E>
PRS_DEVICE void quantise_tile(const struct prs_moe_args &args, const struct moe_tile &t, uint32_t half,
                              const float (&d)[E::accumulators])
{
    constexpr int side = E::accumulators / 2;
    bool gated = args.epilogue.gated != 0;
    for (uint32_t part = 0; part < (gated ? 1 : 2); part++) {
        uint32_t block = gated ? t.column : t.column * 2 + part;
        float x[side];
#pragma unroll
        for (int i = 0; i < side; i++)
            x[i] = part == 0 ? d[i] : d[side + i];
        activate(args.epilogue.activation, x);
#pragma unroll
        for (int i = 0; i < side; i++)
            /* MUTANT(emulator moe_fp8/layers_are_right) the gate's other half: s/gated ? d[side + i] :// */
            x[i] *= gated ? d[side + i] : 1.0f;
        if (block * PRS_SCALE_BLOCK < args.n)
            store_scaled_rows(args, t.unit, block, half, x);
    }
}

template <class E>
PRS_DEVICE void multiply_blocks(const struct prs_moe_args &args, const struct cta_memory &m,
                                const struct cta_position &at)
{
    uint32_t half = threadIdx.x / 128 - 1, units = args.totals->blocks * args.route.columns;
    struct slab_pipeline slabs = {0};
    struct left_over<E> left;
    struct pipeline r = {0, 0};
    struct prs_route_cursor cursor = {0};
    struct unit_memory queue = unit_memory_map(m);
    struct unit_pipeline taken = {0};
    float d[E::accumulators];
    left.next = left_over<E>::count;
    for (uint32_t unit; (unit = unit_take(queue, &taken, true)) < units;) {
        struct moe_tile t;
        find_tile<E>(args, at, &cursor, unit, &t);
        if (tile_has_half(t, half)) {
            if constexpr (E::scaled)
                multiply_scaled_tile<E>(args, t, d, m, &r, half);
            else
                multiply_tile<E>(d, m, &r, half, args.k_steps, &left, &slabs);
            if constexpr (E::quantises) {
                quantise_tile<E>(args, t, half, d);
                continue;
            }
            if (args.epilogue.any) {
                hand_over_rest<E>(&left, m, half, &slabs); /* frees registers */
                finish_moe_tile<E>(args, d);
            }
            if constexpr (E::scaled)
                hand_over_whole_tile<E>(d, m, half, &slabs, false, args.epilogue.gated != 0);
            else
                hand_over_tile<E>(d, m, half, &slabs, false, &left, args.epilogue.gated != 0);
        } else {
            skip_tile<E>(m, &r, half, args.k_steps, &left, &slabs);
        }
    }
    hand_over_rest<E>(&left, m, half, &slabs);
}

/* ---- warp 1 ---- */
enum { NOTHING_STORED = ~0u };

/* Counts a tile of an expert when its results have landed. expert: NOTHING_STORED before the first tile. */
PRS_DEVICE void count_stored(const struct prs_moe_args &args, uint32_t expert)
{
    if (expert == NOTHING_STORED)
        return;
    /* MUTANT(emulator moe_combine/a_layer_returns_its_sums_early) a tile is counted when it has landed: delete */
    bulk_wait_done<0>();
    fence_release_gpu(); /* [moe-stored]: the tile, before the count that await_experts() waits for */
    add_relaxed_gpu(args.stored + expert, 1);
}

template <class E>
PRS_DEVICE void store_blocks(const struct prs_moe_args &args, const struct cta_memory &m, const struct cta_position &at)
{
    uint32_t units = args.totals->blocks * args.route.columns, phase[2] = {0, 0}, stored = NOTHING_STORED;
    struct prs_route_cursor cursor = {0};
    struct unit_memory queue = unit_memory_map(m);
    struct unit_pipeline taken = {0};
    for (uint32_t unit; (unit = unit_take(queue, &taken, false)) < units;) {
        struct moe_tile t;
        find_tile<E>(args, at, &cursor, unit, &t);
        uint32_t columns = prs_epilogue_columns(&args.epilogue, E::columns);
        for (uint32_t quarter = 0; quarter < columns / E::slab_columns; quarter++) {
            int32_t x = (int32_t)(t.column * columns + quarter * E::slab_columns);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (!tile_has_half(t, half))
                    continue;
                mbarrier_wait(&m.c_full[half], phase[half]);
                phase[half] ^= 1;
                if (quarter == 0 && half == 0 && returns_early<E>(args))
                    count_stored(args, stored); /* the tile before, which has landed meanwhile */
                if (x < (int32_t)args.n)
                    tma_store_2d(&args.out, m.base + PRS_SMEM_C + half * PRS_SLAB, x,
                                 (int32_t)t.unit.block * PRS_TILE_M + half * 64);
                bulk_commit();
                bulk_wait_read<0>();
                mbarrier_arrive(&m.c_empty[half]);
            }
        }
        if (returns_early<E>(args) && t.empty)
            add_relaxed_gpu(args.stored + t.unit.expert, 1);
        else
            stored = t.unit.expert;
    }
    if (returns_early<E>(args))
        count_stored(args, stored);
    bulk_wait_done<0>();
}

/* ---- the kernel ---- */
template <class E>
PRS_DEVICE void produce_blocks(const struct prs_moe_args &args, const struct cta_memory &m,
                               const struct cta_position &at)
{
    bool first = threadIdx.x % 32 == 0;
    switch (threadIdx.x / 32) {
    case 0:
        load_blocks<E>(args, m, at);
        break;
    case 1:
        if (first && !E::quantises)
            store_blocks<E>(args, m, at);
        break;
    case 2:
        if (returns_early<E>(args))
            return_early<E::sum>(args, m.base + PRS_SMEM_PUSH + PRS_PUSH_BYTES, at.epoch, E::cluster);
        if (args.dispatches != 0)
            place_rows<E::far>(args, {m.base + PRS_SMEM_PUSH + PRS_PUSH_BYTES, &m.pushed[1], 0}, at.epoch, gridDim.x);
        break;
    default:
        if (returns_early<E>(args))
            return_early<E::sum>(args, m.base + PRS_SMEM_PUSH, at.epoch, E::cluster);
        if (first && args.dispatches != 0)
            send_rows<E::far>(args, {m.base + PRS_SMEM_PUSH, &m.pushed[0], 0}, at.epoch);
    }
}

template <class E>
__global__ void __launch_bounds__(PRS_THREADS, 1) moe_kernel(const __grid_constant__ struct prs_moe_args args)
{
    struct cta_memory m = cta_memory_map(dynamic_shared());
    if (threadIdx.x == 0)
        unit_memory_init<E>(unit_memory_map(m));
    begin_roles<E>(m, &args.rows, &args.experts, &args.out);
    if (threadIdx.x < 128) {
        registers_give<PRODUCER_REGISTERS>();
        produce_blocks<E>(args, m, cta_position_here<E>(&args.sync));
    } else {
        registers_take<CONSUMER_REGISTERS>();
        multiply_blocks<E>(args, m, cta_position_here<E>(&args.sync));
    }
    end_roles();
    if (threadIdx.x == 0)
        leave_moe(args);
}

#endif
