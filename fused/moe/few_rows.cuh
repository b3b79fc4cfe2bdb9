/* SPDX-License-Identifier: Apache-2.0 */
/* The part of the kernel of few.cuh that brings rows to the tensor cores: of the tokens that were sent here, and of the
 * first product's results. */
#ifndef PERSEUS_FUSED_MOE_FEW_ROWS_CUH
#define PERSEUS_FUSED_MOE_FEW_ROWS_CUH

#include "fused/core/epilogue.cuh"
#include "fused/moe/few_route.cuh"

PRS_DEVICE uint32_t few_units(const struct prs_few_args &args, const struct few_memory &m)
{
    return *m.tiles * (args.few.units[0] + args.few.units[1]);
}

/* Tile by tile, so that an expert's weights are read once and its first results are complete first. */
PRS_DEVICE struct few_unit few_unit_at(const struct prs_few_args &args, const struct few_memory &m, uint32_t unit)
{
    uint32_t first = *m.tiles * args.few.units[0];
    struct few_unit u;
    u.product = unit >= first;
    unit -= u.product != 0 ? first : 0;
    u.index = unit / args.few.units[u.product];
    u.block = unit % args.few.units[u.product];
    u.tile = m.tile[u.index];
    return u;
}

/* ---- what they wait for ---- */
/* A piece from a rank that was left out may be missing. Results of such a row go to that rank only. */
PRS_DEVICE void await_piece(const struct prs_few_args &args, const struct few_launch &l, const uint32_t *flag,
                            uint32_t source, uint32_t index)
{
    struct wait_clock clock = {0, 0};
    for (;;) {
        uint32_t seen = load_acquire_sys(flag);
        if (seen == l.number || (asks_for_absent(clock, l.absent, source) && is_left_out(&args.moe.sync, source)) ||
            !keep_waiting(&args.moe.sync, &clock, PRS_AWAIT_TOKEN, source, index, l.number, seen))
            return;
    }
}

/* The value of a tile's `done` counter when it is complete: it counts warps that have stored results of the first
 * product, or quantised blocks of them. */
template <class E> PRS_DEVICE uint32_t inner_parts(const struct prs_few_args &args)
{
    return E::scaled ? args.few.columns[0] / PRS_SCALE_BLOCK : args.few.units[0] * PRS_FEW_CONSUMERS;
}

/* Waits until the rows of the tile are there: all pieces of its tokens, or all its inner rows. */
template <class E>
PRS_DEVICE void await_inputs(const struct prs_few_args &args, const struct few_memory &m, const struct few_launch &l,
                             const struct few_unit &u)
{
    const struct prs_route *r = &args.moe.route;
    uint32_t pieces = args.few.pieces, lane = threadIdx.x % 32;
    if (u.product != 0) {
        /* MUTANT(emulator moe_few/few_tokens_take_one_launch) wait for the first product: delete */
        wait_flag(&args.moe.sync, args.few.done + u.index, inner_parts<E>(args), PRS_AWAIT_BLOCK, r->place.rank,
                  u.index);
    } else {
        for (uint32_t i = lane; i < u.tile.rows * pieces; i += 32) {
            uint32_t slot = m.list[u.tile.first + i / pieces] / r->choices;
            uint32_t flag = (prs_few_slot(r, l.bank, 0, 0) + slot) * pieces + i % pieces;
            await_piece(args, l, args.few.row_flags[0] + flag, slot / r->tokens, flag);
        }
    }
    __syncwarp();         /* what one lane has waited for, all lanes read */
    fence_async_global(); /* flags and counts were read by ordinary loads, the rows are read by the copy engine */
}

/* The gatherers take turns from stage to stage. */
struct gather_turn {
    struct pipeline p;
    uint32_t others; /* stages of other warps before the next one of this warp */
};

PRS_DEVICE bool is_my_turn(struct gather_turn *turn)
{
    if (turn->others-- != 0)
        return false;
    turn->others = PRS_FEW_GATHERERS - 1;
    return true;
}

/* ---- tokens ---- */
/* A lane copies a row: the swizzle depends only on where in shared memory its 128 bytes land. Rows of the stage beyond
 * the tile are not written; they only affect sums that nobody stores. */
template <class E>
PRS_DEVICE void load_tokens(const struct prs_few_args &args, const struct few_memory &m, const struct few_launch &l,
                            const struct few_unit &u, struct gather_turn *turn)
{
    const struct prs_route *r = &args.moe.route;
    uint32_t lane = threadIdx.x % 32, columns = args.few.inputs[0], steps = prs_ceil_div(columns, E::step);
    bool has = lane < u.tile.rows;
    uint32_t slot = prs_few_slot(r, l.bank, 0, 0) + (has ? m.list[u.tile.first + lane] / r->choices : 0);
    const float *scales = (const float *)(args.few.rows[0] + (uint64_t)slot * r->row_bytes + columns);
    for (uint32_t step = 0; step < steps; step++, pipeline_next<E::stages>(&turn->p)) {
        uint32_t stage = turn->p.stage;
        uint8_t *to = m.base + stage * PRS_FEW_STAGE + PRS_FEW_STAGE_WEIGHTS + lane * PRS_STAGE_ROW;
        float scale[2] = {0, 0};
        if (!is_my_turn(turn))
            continue;
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) /* in flight while the stage is awaited */
            if (E::scaled && has && step * 2 + half < columns / PRS_SCALE_BLOCK)
                scale[half] = scales[step * 2 + half];
        mbarrier_wait(&m.empty[stage], turn->p.phase ^ 1);
#pragma unroll
        for (uint32_t half = 0; half < 2; half++)
            if (E::scaled && has)
                m.scales[stage * PRS_FEW_STAGE_SCALES + half * PRS_FEW_TILE + lane] = scale[half];
        if (E::scaled)
            fence_async_shared(); /* the copy engine may be next to write there */
        __syncwarp();
        if (lane == 0)
            mbarrier_expect(&m.full[stage], u.tile.rows * PRS_FEW_STEP);
        __syncwarp(); /* no byte comes before it is expected */
        for (uint32_t half = 0; half < 2 && has; half++)
            tma_load_2d(to + half * (PRS_FEW_STAGE_ROWS / 2), &args.few.sent, &m.full[stage],
                        (int32_t)(step * E::step + half * (E::step / 2)), (int32_t)slot);
    }
}

/* ---- inner rows ---- */
/* Where inner rows and their scales lie (few.h). vector: index in a row. */
template <class E> PRS_DEVICE uint8_t *inner_step_at(const struct prs_few_args &args, uint32_t tile, uint32_t step)
{
    return args.few.inner + (uint64_t)tile * args.few.inner_tile + step * prs_few_inner_step(element<E::type>::bytes);
}

template <class E>
PRS_DEVICE uint4 *inner_at(const struct prs_few_args &args, uint32_t tile, uint32_t row, uint32_t vector)
{
    /* MUTANT(emulator moe_few/few_tokens_take_one_launch) inner rows are swizzled: s/^ row/^ 0/ */
    return (uint4 *)(inner_step_at<E>(args, tile, vector / FEW_ROW_VECTORS) +
                     vector / 8 % 2 * (PRS_FEW_STAGE_ROWS / 2) + row * PRS_STAGE_ROW + ((vector % 8 ^ row % 8) << 4));
}

template <class E>
PRS_DEVICE float *inner_scale_at(const struct prs_few_args &args, uint32_t tile, uint32_t row, uint32_t block)
{
    /* MUTANT(emulator moe_fp8/layers_of_few_tokens_are_right) each block of a row has its scale, in memory:
     * s/block % 2/0/ */
    return (float *)(inner_step_at<E>(args, tile, block / 2) + PRS_FEW_STAGE_ROWS) + block % 2 * PRS_FEW_TILE + row;
}

template <class E>
PRS_DEVICE void load_inner(const struct prs_few_args &args, const struct few_memory &m, const struct few_unit &u,
                           struct gather_turn *turn)
{
    constexpr uint32_t scales = E::scaled ? PRS_FEW_STAGE_SCALES * sizeof(float) : 0;
    uint32_t steps = prs_ceil_div(args.few.inputs[1], E::step), bytes = u.tile.rows * PRS_STAGE_ROW;
    for (uint32_t step = 0; step < steps; step++, pipeline_next<E::stages>(&turn->p)) {
        const uint8_t *from = inner_step_at<E>(args, u.index, step);
        uint32_t stage = turn->p.stage;
        uint8_t *to = m.base + stage * PRS_FEW_STAGE + PRS_FEW_STAGE_WEIGHTS;
        if (!is_my_turn(turn))
            continue;
        mbarrier_wait(&m.empty[stage], turn->p.phase ^ 1);
        __syncwarp(); /* as in load_blocks() */
        if (threadIdx.x % 32 != 0)
            continue;
        mbarrier_expect(&m.full[stage], 2 * bytes + scales);
        for (uint32_t half = 0; half < 2; half++)
            bulk_load(to + half * (PRS_FEW_STAGE_ROWS / 2), from + half * (PRS_FEW_STAGE_ROWS / 2), bytes,
                      &m.full[stage]);
        if (E::scaled)
            bulk_load(m.scales + stage * PRS_FEW_STAGE_SCALES, from + PRS_FEW_STAGE_ROWS, scales, &m.full[stage]);
    }
}

/* A warp quantises 128 columns of a tile's rows, which it has acquired: 16 by each lane, four rows at a time. Loads
 * wait for the L2 cache, so the loads of 16 rows are issued before the first row is quantised. */
template <class E>
PRS_DEVICE void quantise_inner(const struct prs_few_args &args, const struct few_unit &u, uint32_t block)
{
    constexpr uint32_t each = element<E::result>::in_vector, all = element<E::type>::in_vector, vectors = all / each;
    constexpr uint32_t batch = 4;
    uint32_t lane = threadIdx.x % 32, pitch = args.few.columns[0] / each, rows = u.tile.rows;
    const uint4 *from = (const uint4 *)args.few.unscaled + (uint64_t)u.tile.first * pitch +
                        block * (PRS_SCALE_BLOCK / each) + lane % 8 * vectors;
    for (uint32_t first = 0; first < rows; first += 4 * batch) {
        uint4 loaded[batch * vectors];
#pragma unroll
        for (uint32_t i = 0; i < batch * vectors; i++) {
            uint32_t row = first + i / vectors * 4 + lane / 8;
            loaded[i] = row < rows ? from[row * pitch + i % vectors] : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (uint32_t i = 0; i < batch; i++) {
            uint32_t row = first + i * 4 + lane / 8, to[all / 4];
            float x[all];
#pragma unroll
            for (uint32_t v = 0; v < vectors; v++)
                unpack_vector<E::result>(loaded[i * vectors + v], x + v * each);
            /* MUTANT(emulator moe_fp8/layers_of_few_tokens_are_right) eight lanes have a block: s/<8>/<4>/ */
            float scale = scale_of_largest(largest_of_lanes<8>(largest_magnitude(x)));
            quantise(x, 1.0f / scale, to);
            if (row >= rows)
                continue;
            *inner_at<E>(args, u.index, row, block * (PRS_SCALE_BLOCK / all) + lane % 8) =
                make_uint4(to[0], to[1], to[2], to[3]);
            if (lane % 8 == 0)
                *inner_scale_at<E>(args, u.index, row, block) = scale;
        }
    }
}

/* A warp has stored its part of a unit of the first product. e4m3: true for the last warp that has stored a part of the
 * 128 columns. */
template <class E> PRS_DEVICE bool completes_block(const struct prs_few_args &args, const struct few_unit &u)
{
    uint32_t units = PRS_SCALE_BLOCK / args.few.unit[0], blocks = args.few.columns[0] / PRS_SCALE_BLOCK, last = 0;
    uint32_t *stored = args.few.stored + u.index * blocks + u.block / units;
    /* MUTANT(emulator moe_fp8/layers_of_few_tokens_are_right) the last warp quantises:
     * s/units * PRS_FEW_CONSUMERS/PRS_FEW_CONSUMERS/ */
    if (threadIdx.x % 32 == 0)
        last = arrives_last(stored, units * PRS_FEW_CONSUMERS) ? 1 : 0;
    /* MUTANT(emulator moe_fp8/layers_of_few_tokens_are_right) counts of warps begin at zero:
     * s/stored = 0/stored = 1/ */
    if (last != 0)
        *stored = 0;
    __syncwarp(); /* what lane 0 has acquired, all lanes read */
    return __shfl_sync(~0u, last, 0) != 0;
}

/* All lanes of a consumer warp call it when they have stored their part of a unit of the first product. */
template <class E> PRS_DEVICE void pass_on_inner(const struct prs_few_args &args, const struct few_unit &u)
{
    __syncwarp();
    if constexpr (E::scaled) {
        if (!completes_block<E>(args, u))
            return;
        quantise_inner<E>(args, u, u.block * args.few.unit[0] / PRS_SCALE_BLOCK);
        __syncwarp();
    }
    if (threadIdx.x % 32 == 0) {
        fence_release_gpu(); /* [few-inner]: inner rows, before the count that await_inputs() waits for */
        add_relaxed_gpu(args.few.done + u.index, 1);
    }
}

/* ---- the gatherers ---- */
template <class E>
PRS_DEVICE void gather_rows(const struct prs_few_args &args, const struct few_memory &m, const struct few_launch &l)
{
    uint32_t units = few_units(args, m);
    struct unit_pipeline taken = {0};
    struct gather_turn turn = {{0, 0}, threadIdx.x / 32 - 1};
    for (uint32_t unit; (unit = unit_take(m.units, &taken, true)) < units;) {
        struct few_unit u = few_unit_at(args, m, unit);
        await_inputs<E>(args, m, l, u);
        if (u.product != 0)
            load_inner<E>(args, m, u, &turn);
        else
            load_tokens<E>(args, m, l, u, &turn);
    }
}

#endif
