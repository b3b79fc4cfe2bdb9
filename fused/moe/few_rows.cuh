/* SPDX-License-Identifier: Apache-2.0 */
/* The part of the kernel of few.cuh that loads rows for the tensor cores: tokens that were sent here, and results of
 * the first product. */
#ifndef PERSEUS_FUSED_MOE_FEW_ROWS_CUH
#define PERSEUS_FUSED_MOE_FEW_ROWS_CUH

#include "fused/core/epilogue.cuh"
#include "fused/moe/few_route.cuh"
#include "fused/moe/rows.cuh"

PRS_DEVICE uint32_t few_units(const struct prs_few_args &args, const struct few_memory &m)
{
    return *m.tiles * (args.few.units[0] + args.few.units[1]);
}

/* The order is tile by tile, so that an expert's weights are read once and the results of the first tiles are complete
 * first. */
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

/* ---- waits ---- */
/* Waits for a piece of a row. If its rank was left out, the piece may be missing: results of this row go only to that
 * rank. */
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

/* The consumer warps that store rows of a unit of the first product: the first ones. */
PRS_DEVICE uint32_t storing_warps(const struct prs_few_args &args, const struct few_tile &tile)
{
    uint32_t warps = prs_ceil_div(tile.rows * (args.few.unit[0] / 8), 32);
    return warps < PRS_FEW_CONSUMERS ? warps : PRS_FEW_CONSUMERS;
}

/* The value of a tile's `done` counter when it is complete: it counts the warps that have stored results of
 * the first product. e4m3: the warps that have quantised their rows of a block of 128 columns of these results. */
template <class E> PRS_DEVICE uint32_t inner_parts(const struct prs_few_args &args, const struct few_tile &tile)
{
    return (E::scaled ? args.few.columns[0] / PRS_SCALE_BLOCK : args.few.units[0]) * storing_warps(args, tile);
}

/* Waits until the rows of the tile have arrived: all pieces of its tokens, or all its inner rows. */
template <class E>
PRS_DEVICE void await_inputs(const struct prs_few_args &args, const struct few_memory &m, const struct few_launch &l,
                             const struct few_unit &u)
{
    const struct prs_route *r = &args.moe.route;
    uint32_t pieces = args.few.pieces, lane = threadIdx.x % 32;
    if (u.product != 0) {
        /* MUTANT(emulator moe_few/few_tokens_take_one_launch) wait for the first product: delete */
        wait_flag(&args.moe.sync, args.few.done[1] + u.index, inner_parts<E>(args, u.tile), PRS_AWAIT_BLOCK,
                  r->place.rank, u.index);
    } else if (E::packed) {
        /* MUTANT(emulator moe_few/wide_tiles_are_right) wait for packed rows: delete */
        wait_flag(&args.moe.sync, args.few.done[0] + u.index, prs_ceil_div(u.tile.rows, FEW_PACKED_ROWS) * pieces,
                  PRS_AWAIT_BLOCK, r->place.rank, u.index);
    } else {
        for (uint32_t i = lane; i < u.tile.rows * pieces; i += 32) {
            uint32_t slot = few_listed<E>(args, m, u.tile.first + i / pieces) / r->choices;
            uint32_t flag = (prs_few_slot(r, l.bank, 0, 0) + slot) * pieces + i % pieces;
            await_piece(args, l, args.few.row_flags[0] + flag, slot / r->tokens, flag);
        }
    }
    __syncwarp();         /* what one lane has waited for, all lanes read */
    fence_async_global(); /* flags and counts were read by ordinary loads; bulk copies read the rows */
}

/* The gatherers take turns from stage to stage. */
struct gather_turn {
    struct pipeline p;
    uint32_t others; /* how many stages of other warps come before this warp's next one */
};

template <class E> PRS_DEVICE bool is_my_turn(struct gather_turn *turn)
{
    if (turn->others-- != 0)
        return false;
    turn->others = E::gatherers - 1;
    return true;
}

/* ---- scales of weights ---- */
/* e4m3: scales of a unit's weights, for the two blocks of 128 columns of a stage. first: for a thread's first row.
 * second: for the row 8 further down. */
struct weight_scales {
    float first[2], second[2];
};

/* at: index of a lane's member of struct weight_scales among all scales of the product. count: how many blocks there
 * are along K. */
struct weight_blocks {
    uint64_t at;
    uint32_t count;
};

PRS_DEVICE struct weight_blocks find_weight_scales(const struct prs_few_args &args, const struct few_unit &u)
{
    bool gated = u.product == 0 && args.moe.epilogue.gated != 0, second = (threadIdx.x & 2) != 0;
    uint32_t columns = args.few.columns[u.product], row = u.block * args.few.unit[u.product] / PRS_SCALE_BLOCK;
    uint32_t rows = columns / PRS_SCALE_BLOCK, count = args.few.inputs[u.product] / PRS_SCALE_BLOCK;
    /* MUTANT(emulator moe_fp8/layers_of_few_tokens_are_right) each expert has its scales: s/u.tile.expert/0/ */
    uint64_t first = (uint64_t)u.tile.expert * (gated ? 2 : 1) * rows + row;
    /* MUTANT(emulator moe_fp8/layers_of_few_tokens_are_right) up has its scales: s/gated && second/false/ */
    return {(first + (gated && second ? rows : 0)) * count, count};
}

/* A gatherer warp loads the scales of weights, because it is ahead of the consumers. Each of its first four lanes loads
 * one. */
PRS_DEVICE float load_weight_scale(const struct prs_few_args &args, const struct few_unit &u,
                                   const struct weight_blocks &w, uint32_t step)
{
    uint32_t block = step * 2 + threadIdx.x % 2;
    return threadIdx.x % 32 < 4 && block < w.count ? args.few.scales[u.product][w.at + block] : 0;
}

template <class E> PRS_DEVICE void store_weight_scale(const struct few_memory &m, uint32_t stage, float scale)
{
    if (threadIdx.x % 32 < 4)
        m.scales[stage * E::stage_scales + E::row_scales + threadIdx.x % 32] = scale;
}

/* ---- tokens ---- */
/* Each lane starts the copies of one row. That is possible because the swizzle of 128 bytes depends only on their
 * address in shared memory. Rows of the stage beyond the tile are not written; they only affect sums that nobody
 * stores. */
template <class E>
PRS_DEVICE void load_tokens(const struct prs_few_args &args, const struct few_memory &m, const struct few_launch &l,
                            const struct few_unit &u, struct gather_turn *turn)
{
    static_assert(E::tile == 32, "a row for each lane");
    const struct prs_route *r = &args.moe.route;
    uint32_t lane = threadIdx.x % 32, columns = args.few.inputs[0], steps = prs_ceil_div(columns, E::step);
    bool has = lane < u.tile.rows;
    uint32_t slot =
        prs_few_slot(r, l.bank, 0, 0) + (has ? few_listed<E>(args, m, u.tile.first + lane) / r->choices : 0);
    const float *scales = (const float *)(args.few.rows[0] + (uint64_t)slot * r->row_bytes + columns);
    struct weight_blocks blocks = find_weight_scales(args, u);
    for (uint32_t step = 0; step < steps; step++, pipeline_next<E::stages>(&turn->p)) {
        uint32_t stage = turn->p.stage;
        uint8_t *to = m.base + stage * E::stage + E::stage_weights + lane * PRS_STAGE_ROW;
        float scale[2] = {0, 0}, of_weights = 0;
        if (!is_my_turn<E>(turn))
            continue;
        if constexpr (E::scaled) /* loaded before the wait for the stage, which hides the latency */
            of_weights = load_weight_scale(args, u, blocks, step);
#pragma unroll
        for (uint32_t half = 0; half < 2; half++)
            if (E::scaled && has && step * 2 + half < columns / PRS_SCALE_BLOCK)
                scale[half] = scales[step * 2 + half];
        mbarrier_wait(&m.empty[stage], turn->p.phase ^ 1);
#pragma unroll
        for (uint32_t half = 0; half < 2; half++)
            if (E::scaled && has)
                m.scales[stage * E::stage_scales + half * E::tile + lane] = scale[half];
        if constexpr (E::scaled) {
            store_weight_scale<E>(m, stage, of_weights);
            fence_async_shared(); /* a bulk copy may write there next */
        }
        __syncwarp();
        if (lane == 0)
            mbarrier_expect(&m.full[stage], u.tile.rows * PRS_FEW_STEP);
        __syncwarp(); /* no byte comes before it is expected */
        for (uint32_t half = 0; half < 2 && has; half++)
            tma_load_2d(to + half * (E::stage_rows / 2), &args.few.sent, &m.full[stage],
                        (int32_t)(step * E::step + half * (E::step / 2)), (int32_t)slot);
    }
}

/* ---- rows in the layout of stages ---- */
/* Addresses of a tile's rows of a product and of their scales (few.h). vector, block: index in a row. */
template <class E>
PRS_DEVICE uint8_t *tile_step_at(const struct prs_few_args &args, uint32_t product, uint32_t tile, uint32_t step)
{
    return args.few.tiles[product] + (uint64_t)tile * args.few.tile_bytes[product] +
           step * prs_few_tile_step(E::tile, element<E::type>::bytes);
}

template <class E>
PRS_DEVICE uint4 *tile_vector_at(const struct prs_few_args &args, uint32_t product, uint32_t tile, uint32_t row,
                                 uint32_t vector)
{
    /* MUTANT(emulator moe_few/few_tokens_take_one_launch) rows are swizzled: s/^ row/^ 0/ */
    return (uint4 *)(tile_step_at<E>(args, product, tile, vector / FEW_ROW_VECTORS) +
                     vector / 8 % 2 * (E::stage_rows / 2) + row * PRS_STAGE_ROW + ((vector % 8 ^ row % 8) << 4));
}

template <class E>
PRS_DEVICE float *tile_scale_at(const struct prs_few_args &args, uint32_t product, uint32_t tile, uint32_t row,
                                uint32_t block)
{
    /* MUTANT(emulator moe_fp8/layers_of_few_tokens_are_right) each block of a row has its scale, in memory:
     * s/block % 2/0/ */
    return (float *)(tile_step_at<E>(args, product, tile, block / 2) + E::stage_rows) + block % 2 * E::tile + row;
}

template <class E>
PRS_DEVICE void load_tile(const struct prs_few_args &args, const struct few_memory &m, const struct few_unit &u,
                          struct gather_turn *turn)
{
    constexpr uint32_t scales = E::row_scales * sizeof(float);
    struct weight_blocks blocks = find_weight_scales(args, u);
    uint32_t steps = prs_ceil_div(args.few.inputs[u.product], E::step), bytes = u.tile.rows * PRS_STAGE_ROW;
    for (uint32_t step = 0; step < steps; step++, pipeline_next<E::stages>(&turn->p)) {
        const uint8_t *from = tile_step_at<E>(args, u.product, u.index, step);
        uint32_t stage = turn->p.stage;
        uint8_t *to = m.base + stage * E::stage + E::stage_weights;
        float of_weights = 0;
        if (!is_my_turn<E>(turn))
            continue;
        if constexpr (E::scaled)
            of_weights = load_weight_scale(args, u, blocks, step);
        mbarrier_wait(&m.empty[stage], turn->p.phase ^ 1);
        if constexpr (E::scaled)
            store_weight_scale<E>(m, stage, of_weights);
        __syncwarp(); /* as in load_blocks() */
        if (threadIdx.x % 32 != 0)
            continue;
        mbarrier_expect(&m.full[stage], 2 * bytes + scales);
        for (uint32_t half = 0; half < 2; half++)
            bulk_load(to + half * (E::stage_rows / 2), from + half * (E::stage_rows / 2), bytes, &m.full[stage]);
        if (E::scaled)
            bulk_load(m.scales + stage * E::stage_scales, from + E::stage_rows, scales, &m.full[stage]);
    }
}

/* The nth row of a unit's results that this consumer warp stores. vectors: how many vectors of a row are in the unit. A
 * warp stores the same rows in all units of a product. */
PRS_DEVICE uint32_t stored_row(uint32_t vectors, uint32_t n)
{
    uint32_t together = 32 / vectors, warp = threadIdx.x % 128 / 32;
    return (n / together * PRS_FEW_CONSUMERS + warp) * together + n % together;
}

/* Copies a piece of up to FEW_PACKED_ROWS rows of a tile. */
template <class E>
PRS_DEVICE void pack_piece(const struct prs_few_args &args, const struct few_memory &m, const struct few_launch &l,
                           uint32_t index, uint32_t first, uint32_t piece)
{
    constexpr uint32_t each = E::piece_vectors, batch = 8; /* vectors of a lane in flight */
    const struct prs_route *r = &args.moe.route;
    struct few_tile tile = m.tile[index];
    uint32_t columns = args.few.inputs[0], vectors = columns * element<E::type>::bytes / 16, slot = 0;
    uint32_t steps = prs_ceil_div(columns, E::step);
    uint32_t lane = threadIdx.x % 32, begin = piece * each * 32 + lane, rows = tile.rows - first;
    if (lane < FEW_PACKED_ROWS && lane < rows) {
        slot = few_listed<E>(args, m, tile.first + first + lane) / r->choices;
        uint32_t source = slot / r->tokens;
        slot += prs_few_slot(r, l.bank, 0, 0);
        uint32_t flag = slot * args.few.pieces + piece;
        await_piece(args, l, args.few.row_flags[0] + flag, source, flag);
    }
    __syncwarp(); /* what one lane has waited for, all lanes read */
#pragma unroll
    for (uint32_t i = 0; i < FEW_PACKED_ROWS * each; i += batch) {
        uint4 x[batch];
#pragma unroll
        for (uint32_t j = 0; j < batch; j++) {
            uint32_t row = (i + j) / each, vector = begin + (i + j) % each * 32;
            const uint8_t *from = args.few.rows[0] + (uint64_t)__shfl_sync(~0u, slot, row) * r->row_bytes;
            x[j] = row < rows && vector < vectors ? ((const uint4 *)from)[vector] : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (uint32_t j = 0; j < batch; j++) {
            uint32_t row = (i + j) / each, vector = begin + (i + j) % each * 32;
            /* MUTANT(emulator moe_few/wide_tiles_are_right) zeros fill the last step:
             * s/vector < steps * FEW_ROW_VECTORS/vector < vectors/ */
            if (row < rows && vector < steps * FEW_ROW_VECTORS)
                *tile_vector_at<E>(args, 0, index, first + row, vector) = x[j];
        }
    }
    constexpr uint32_t blocks = PRS_FEW_PIECE / PRS_SCALE_BLOCK;
#pragma unroll
    for (uint32_t i = 0; E::scaled && i < FEW_PACKED_ROWS * blocks; i += 32) {
        uint32_t row = (i + lane) / blocks, block = piece * blocks + lane % blocks;
        const uint8_t *from = args.few.rows[0] + (uint64_t)__shfl_sync(~0u, slot, row) * r->row_bytes + columns;
        if (row < rows && block < steps * 2)
            *tile_scale_at<E>(args, 0, index, first + row, block) =
                block < columns / PRS_SCALE_BLOCK ? ((const float *)from)[block] : 0;
    }
    __syncwarp();
    if (lane == 0) {
        fence_release_gpu(); /* [few-packed]: rows, before the count that await_inputs() waits for */
        add_relaxed_gpu(args.few.done[0] + index, 1);
    }
}

/* Copies the tokens of wide tiles once into the layout of stages, because many units read them. Loading them row by row
 * would take the TMA unit about 15 ns for 128 bytes of each row (doc/fused-notes.md). */
template <class E>
PRS_DEVICE void pack_rows(const struct prs_few_args &args, const struct few_memory &m, const struct few_launch &l)
{
    uint32_t of_tile = E::tile / FEW_PACKED_ROWS * args.few.pieces, all = *m.tiles * of_tile;
    for (uint32_t i; (i = claim_for_warp(&args.moe.claims->deliveries)) < all;) {
        uint32_t index = i / of_tile, first = i % of_tile / args.few.pieces * FEW_PACKED_ROWS;
        if (first < m.tile[index].rows)
            pack_piece<E>(args, m, l, index, first, i % args.few.pieces);
    }
}

/* A warp quantises 128 columns of its rows of a tile, after it has acquired them. Each lane does 16 columns, and the
 * warp four rows at a time. Loads wait for the L2 cache, so those of up to 16 rows are issued before the first row is
 * quantised. */
template <class E>
PRS_DEVICE void quantise_inner(const struct prs_few_args &args, const struct few_unit &u, uint32_t block)
{
    constexpr uint32_t each = element<E::result>::in_vector, all = element<E::type>::in_vector, vectors = all / each;
    constexpr uint32_t most = E::tile / PRS_FEW_CONSUMERS / 4, batch = most < 4 ? most : 4;
    uint32_t lane = threadIdx.x % 32, pitch = args.few.columns[0] / each, rows = u.tile.rows;
    uint32_t of_unit = args.few.unit[0] / 8;
    const uint4 *from = (const uint4 *)args.few.unscaled + (uint64_t)u.tile.first * pitch +
                        block * (PRS_SCALE_BLOCK / each) + lane % 8 * vectors;
    for (uint32_t first = 0; stored_row(of_unit, first) < rows; first += 4 * batch) {
        uint4 loaded[batch * vectors];
#pragma unroll
        for (uint32_t i = 0; i < batch * vectors; i++) {
            uint32_t row = stored_row(of_unit, first + i / vectors * 4 + lane / 8);
            loaded[i] = row < rows ? from[row * pitch + i % vectors] : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (uint32_t i = 0; i < batch; i++) {
            uint32_t row = stored_row(of_unit, first + i * 4 + lane / 8), to[all / 4];
            float x[all];
#pragma unroll
            for (uint32_t v = 0; v < vectors; v++)
                unpack_vector<E::result>(loaded[i * vectors + v], x + v * each);
            /* MUTANT(emulator moe_fp8/layers_of_few_tokens_are_right) eight lanes have a block: s/<8>/<4>/ */
            float scale = scale_of_largest(largest_of_lanes<8>(largest_magnitude(x)));
            quantise(x, 1.0f / scale, to);
            if (row >= rows)
                continue;
            *tile_vector_at<E>(args, 1, u.index, row, block * (PRS_SCALE_BLOCK / all) + lane % 8) =
                make_uint4(to[0], to[1], to[2], to[3]);
            if (lane % 8 == 0)
                *tile_scale_at<E>(args, 1, u.index, row, block) = scale;
        }
    }
}

/* e4m3 only. Call it when a warp has stored its rows of a unit of the first product. Returns true if all parts of the
 * rows' block of 128 columns are stored now. */
template <class E> PRS_DEVICE bool completes_block(const struct prs_few_args &args, const struct few_unit &u)
{
    uint32_t units = PRS_SCALE_BLOCK / args.few.unit[0], blocks = args.few.columns[0] / PRS_SCALE_BLOCK, last = 0;
    uint32_t *stored =
        args.few.stored + (u.index * blocks + u.block / units) * PRS_FEW_CONSUMERS + threadIdx.x % 128 / 32;
    /* MUTANT(emulator moe_fp8/layers_of_few_tokens_are_right) the last warp quantises: s/, units)/, 1)/ */
    if (threadIdx.x % 32 == 0)
        last = arrives_last(stored, units) ? 1 : 0;
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
    if (threadIdx.x % 128 / 32 >= storing_warps(args, u.tile))
        return;
    __syncwarp();
    if constexpr (E::scaled) {
        if (!completes_block<E>(args, u))
            return;
        quantise_inner<E>(args, u, u.block * args.few.unit[0] / PRS_SCALE_BLOCK);
        __syncwarp();
    }
    if (threadIdx.x % 32 == 0) {
        fence_release_gpu(); /* [few-inner]: inner rows, before the count that await_inputs() waits for */
        add_relaxed_gpu(args.few.done[1] + u.index, 1);
    }
}

/* ---- the gatherers ---- */
template <class E>
PRS_DEVICE void gather_rows(const struct prs_few_args &args, const struct few_memory &m, const struct few_launch &l)
{
    uint32_t units = few_units(args, m);
    struct unit_pipeline taken = {0};
    struct gather_turn turn = {{0, 0}, threadIdx.x / 32 - 1};
    if (turn.others >= E::gatherers)
        return;
    for (uint32_t unit; (unit = unit_take(m.units, &taken, true)) < units;) {
        struct few_unit u = few_unit_at(args, m, unit);
        await_inputs<E>(args, m, l, u);
        if (E::packed || u.product != 0)
            load_tile<E>(args, m, u, &turn);
        else if constexpr (!E::packed)
            load_tokens<E>(args, m, l, u, &turn);
    }
}

#endif
