/* SPDX-License-Identifier: Apache-2.0 */
/* The whole layer in one kernel, for few tokens (few.h).
 *
 * First all warps of a CTA claim pieces of tokens and send them. Then they read the places of all ranks and find the
 * tiles of this rank's experts. Then all warps except warp 0 copy the rows of wide tiles. Then each warp has a role:
 *   warp 0        load_weights   loads weights into the stages, ahead of the rows: it waits for no token
 *   warps 1..7    gather_rows    load the rows of a tile into the stages (few_rows.cuh)
 *   warps 8..15   multiply_units multiply on the tensor cores: weights are A (64 rows), tokens are B (8 to 64 rows).
 *                 Two warpgroups take units by turns: one multiplies while the other ends its last unit
 *
 * Finally all warps claim parts of this rank's tokens, and add up the results that have arrived.
 *
 * No deadlock, with any number of resident CTAs. CTAs claim everything, in this order: pieces, units of the first
 * product, units of the second, parts of results. Sending waits for nothing. Everything else waits only for earlier
 * claims, on this rank or another one, and a claim is made by a CTA that runs. */
#ifndef PERSEUS_FUSED_MOE_FEW_CUH
#define PERSEUS_FUSED_MOE_FEW_CUH

#include "fused/core/epilogue.cuh"
#include "fused/core/inbox_word.cuh"
#include "fused/moe/few_rows.cuh"

/* ---- warp 0 ---- */
/* Claims the next unit for all roles. The consumers are told the stage with which it begins, since each warpgroup reads
 * every second unit only. */
template <class E>
PRS_DEVICE void claim_unit(const struct prs_few_args &args, const struct few_memory &m, uint32_t passed,
                           const struct pipeline &r)
{
    struct cta_position at = {blockIdx.x, gridDim.x, 0, 0};
    unit_pass<E>(m.units, at, passed, make_uint4(atomicAdd(&args.moe.claims->units, 1u), r.stage, r.phase, 0));
}

template <class E> PRS_DEVICE void load_weights(const struct prs_few_args &args, const struct few_memory &m)
{
    uint32_t lane = threadIdx.x % 32, units = few_units(args, m);
    struct unit_pipeline taken = {0};
    struct pipeline r = {0, 0};
    for (;;) {
        if (lane == 0)
            claim_unit<E>(args, m, taken.taken, r);
        __syncwarp();
        uint32_t unit = unit_take(m.units, &taken, true);
        if (unit >= units) {
            /* MUTANT(emulator moe_few/few_tokens_take_one_launch) the other warpgroup of consumers ends, too: delete */
            if (lane == 0)
                claim_unit<E>(args, m, taken.taken, r);
            return;
        }
        struct few_unit u = few_unit_at(args, m, unit);
        int32_t group = (int32_t)(u.block * (args.few.unit[u.product] / PRS_FEW_GROUP));
        for (uint32_t k = 0; k < args.few.inputs[u.product]; k += E::step) {
            mbarrier_wait(&m.empty[r.stage], r.phase ^ 1);
            __syncwarp(); /* as in load_blocks() */
            if (lane == 0) {
                uint8_t *to = m.base + r.stage * E::stage;
                mbarrier_expect(&m.full[r.stage], E::stage_weights);
                for (uint32_t half = 0; half < 2; half++)
                    tma_load_5d(to + half * (E::stage_weights / 2), &args.few.weights[u.product], &m.full[r.stage],
                                (int32_t)(k + half * (E::step / 2)), 0, 0, group, u.tile.expert);
            }
            pipeline_next<E::stages>(&r);
        }
    }
}

/* ---- warps 8 to 15 ---- */
/* The number of this thread's warpgroup of consumers. */
PRS_DEVICE uint32_t few_warpgroup(void)
{
    return threadIdx.x / 128 - (1 + PRS_FEW_GATHERERS) / 4;
}

/* A warpgroup's turn begins when the other one has seen all stages of its unit full. Before that it must not wait for a
 * stage: a barrier only tells a phase from the next one. */
PRS_DEVICE void take_turn(void)
{
    barrier_sync(FEW_TURN_BARRIER + few_warpgroup(), 2 * PRS_FEW_CONSUMERS * 32);
}

PRS_DEVICE void give_turn(void)
{
    barrier_arrive(FEW_TURN_BARRIER + (few_warpgroup() ^ 1), 2 * PRS_FEW_CONSUMERS * 32);
}
static_assert(PRS_FEW_WARPGROUPS == 2, "the other one");

/* Applies the activation and stores the sums `d` in `out`. Thread t has two of every eight tokens, for row t / 32 * 16
 * + t % 32 / 4 of the weights and for the row 8 further down. If gated, the first of these rows belongs to the gate,
 * and the other is the same row of up. */
template <int TYPE, uint32_t ROWS>
PRS_DEVICE void finish_unit(const struct prs_few_args &args, const struct few_unit &u, const float (&d)[ROWS / 2],
                            uint8_t *out)
{
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    bool gated = u.product == 0 && args.moe.epilogue.gated != 0;
    float x[2][ROWS / 4];
#pragma unroll
    for (uint32_t i = 0; i < ROWS / 4; i++)
        x[0][i] = d[i / 2 * 4 + i % 2], x[1][i] = d[i / 2 * 4 + i % 2 + 2];
    if (u.product == 0) {
        activate(args.moe.epilogue.activation, x[0]);
        if (!gated)
            activate(args.moe.epilogue.activation, x[1]);
    }
#pragma unroll
    for (uint32_t i = 0; i < ROWS / 4; i++) {
        uint8_t *row = out + (i / 2 * 8 + lane % 4 * 2 + i % 2) * FEW_OUT_PITCH;
        if (gated) {
            store_element<TYPE>(row, warp * 8 + lane / 4, x[0][i] * x[1][i]);
        } else {
            store_element<TYPE>(row, warp * 16 + lane / 4, x[0][i]);
            store_element<TYPE>(row, warp * 16 + lane / 4 + 8, x[1][i]);
        }
    }
}

/* Stores a vector of a row of the first product's results: in the input of the second product, or, with e4m3, in memory
 * from which it is quantised later. */
template <class E>
PRS_DEVICE void keep_vector(const struct prs_few_args &args, const struct few_unit &u, uint32_t row, uint32_t vector,
                            uint4 x)
{
    if (E::scaled)
        ((uint4 *)args.few.unscaled)[(u.tile.first + row) * (args.few.columns[0] / 8) + vector] = x;
    else
        *tile_vector_at<E>(args, 1, u.index, row, vector) = x;
}

/* Sends a vector of the result of a choice to the inbox of the token's rank. */
PRS_DEVICE void send_vector(const struct prs_few_args &args, const struct few_launch &l, uint32_t choice,
                            uint32_t vector, uint4 x)
{
    const struct prs_route *r = &args.moe.route;
    uint32_t slot = choice / r->choices, q = prs_place_distance(&r->place, slot / r->tokens);
    uint8_t *to = args.few.results[q] + prs_few_results_at(r, args.few.result_bytes, l.bank, slot % r->tokens) +
                  (uint64_t)(choice % r->choices) * args.few.result_bytes;
    store_relaxed_sys_v4((uint4 *)to + vector, sent_vector(x));
}

/* Sends a unit's results on, from the warpgroup's buffer. */
template <class E>
PRS_DEVICE void deliver_unit(const struct prs_few_args &args, const struct few_memory &m, const struct few_launch &l,
                             const struct few_unit &u, const uint8_t *out)
{
    uint32_t vectors = args.few.unit[u.product] / 8, first = u.block * vectors, all = u.tile.rows * vectors;
    barrier_sync(FEW_OUT_BARRIER + few_warpgroup(), PRS_FEW_CONSUMERS * 32);
    for (uint32_t i = threadIdx.x % 128; i < all; i += PRS_FEW_CONSUMERS * 32) {
        uint32_t row = i / vectors, vector = i % vectors; /* as stored_row() says */
        if (first + vector >= args.few.columns[u.product] / 8)
            continue;
        uint4 x = *(const uint4 *)(out + row * FEW_OUT_PITCH + vector * 16);
        if (u.product == 0)
            keep_vector<E>(args, u, row, first + vector, x);
        else
            send_vector(args, l, few_listed<E>(args, m, u.tile.first + row), first + vector, x);
    }
    if (u.product == 0)
        pass_on_inner<E>(args, u);
}

/* Issues the products of half a stage: PRS_STAGE_ROW bytes of each row of weights and of each row of tokens. */
template <class E, int N>
PRS_DEVICE void multiply_half(float (&d)[N], const struct few_memory &m, uint32_t stage, uint32_t half, bool add)
{
    typedef element<E::type> in;
    constexpr uint32_t across = in::product_k * in::bytes / 16;
    uint32_t base = smem_address(m.base) + stage * E::stage;
    uint64_t a = matrix_descriptor(base + half * (E::stage_weights / 2), 16);
    uint64_t b = matrix_descriptor(base + E::stage_weights + half * (E::stage_rows / 2), 16);
#pragma unroll
    for (uint32_t k = 0; k < in::in_row / in::product_k; k++)
        in::template multiply<0>(d, a + k * across, b + k * across, add || k != 0);
}

template <class E, uint32_t ROWS>
PRS_DEVICE void multiply_rows(const struct few_memory &m, struct pipeline *p, uint32_t steps, float (&d)[ROWS / 2])
{
    for (uint32_t step = 0; step < steps; step++, pipeline_next<E::stages>(p)) {
        mbarrier_wait(&m.full[p->stage], p->phase);
        if (step + 1 == steps)
            give_turn();
        wgmma_fence();
        multiply_half<E>(d, m, p->stage, 0, step != 0);
        multiply_half<E>(d, m, p->stage, 1, true);
        wgmma_commit();
        wgmma_wait<0>();
        if (threadIdx.x % 32 == 0)
            mbarrier_arrive(&m.empty[p->stage]);
    }
    registers_pin(d);
}

/* Multiplies the sum of 128 columns by the scales of weights and tokens, and adds it to d. */
template <uint32_t ROWS>
PRS_DEVICE void promote_sum(float (&d)[ROWS / 2], const float (&held)[ROWS / 2], const float *scales, float first,
                            float second)
{
#pragma unroll
    for (uint32_t i = 0; i < ROWS / 2; i += 4) {
        float2 s = *(const float2 *)(scales + i * 2 + threadIdx.x % 4 * 2);
        d[i] += held[i] * (first * s.x), d[i + 1] += held[i + 1] * (first * s.y);
        d[i + 2] += held[i + 2] * (second * s.x), d[i + 3] += held[i + 3] * (second * s.y);
    }
}

/* Like multiply_rows(), but for e4m3, whose sums are promoted to fp32 every 128 columns. */
template <class E, uint32_t ROWS>
PRS_DEVICE void multiply_scaled_rows(const struct few_memory &m, struct pipeline *p, uint32_t steps,
                                     float (&d)[ROWS / 2])
{
#pragma unroll
    for (uint32_t i = 0; i < ROWS / 2; i++)
        d[i] = 0;
    for (uint32_t step = 0; step < steps; step++, pipeline_next<E::stages>(p)) {
        const float *scales = m.scales + p->stage * E::stage_scales;
        float left[ROWS / 2], right[ROWS / 2];
        mbarrier_wait(&m.full[p->stage], p->phase);
        if (step + 1 == steps)
            give_turn();
        struct weight_scales s = *(const struct weight_scales *)(scales + E::row_scales);
        wgmma_fence();
        multiply_half<E>(left, m, p->stage, 0, false);
        wgmma_commit();
        multiply_half<E>(right, m, p->stage, 1, false);
        wgmma_commit();
        wgmma_wait<1>();
        registers_pin(left);
        promote_sum<ROWS>(d, left, scales, s.first[0], s.second[0]);
        wgmma_wait<0>();
        registers_pin(right);
        /* MUTANT(emulator moe_fp8/layers_of_few_tokens_are_right) each block of a row has its scale:
         * s/scales + E::tile/scales/ */
        promote_sum<ROWS>(d, right, scales + E::tile, s.first[1], s.second[1]);
        __syncwarp(); /* all lanes have read the scales */
        if (threadIdx.x % 32 == 0)
            mbarrier_arrive(&m.empty[p->stage]);
    }
}

template <class E, uint32_t ROWS>
PRS_DEVICE void multiply_unit(const struct prs_few_args &args, const struct few_memory &m, const struct few_launch &l,
                              const struct few_unit &u, struct pipeline *p, uint8_t *out)
{
    uint32_t steps = __reduce_max_sync(~0u, prs_ceil_div(args.few.inputs[u.product], E::step));
    float d[ROWS / 2];
    if constexpr (E::scaled)
        multiply_scaled_rows<E, ROWS>(m, p, steps, d);
    else
        multiply_rows<E, ROWS>(m, p, steps, d);
    finish_unit<E::result, ROWS>(args, u, d, out);
    deliver_unit<E>(args, m, l, u, out);
}

template <class E>
PRS_DEVICE void multiply_units(const struct prs_few_args &args, const struct few_memory &m, const struct few_launch &l)
{
    uint32_t units = few_units(args, m), warpgroup = few_warpgroup();
    struct unit_pipeline taken = {warpgroup};
    /* MUTANT(emulator moe_few_order/of_a_layer_in_one_launch) each warpgroup has a room: s/warpgroup/0/ */
    uint8_t *out = m.out + warpgroup * E::out;
    if (warpgroup != 0)
        give_turn(); /* the first unit is the other one's */
    for (uint4 told; (told = unit_told(m.units, &taken, true)).x < units; taken.taken++) {
        struct few_unit u = few_unit_at(args, m, told.x);
        struct pipeline p = {told.y, told.z};
        /* All warps of this warpgroup come here, so they have read what they had left in `out`. */
        /* MUTANT(emulator moe_few_order/of_a_layer_in_one_launch) a warpgroup waits for its turn: delete */
        take_turn();
        if (u.tile.rows <= 8)
            multiply_unit<E, 8>(args, m, l, u, &p, out);
        else if (u.tile.rows <= 16)
            multiply_unit<E, 16>(args, m, l, u, &p, out);
        else if (u.tile.rows <= 32)
            multiply_unit<E, 32>(args, m, l, u, &p, out);
        else if constexpr (E::tile > 32)
            multiply_unit<E, E::tile>(args, m, l, u, &p, out);
    }
}

/* ---- results ---- */
/* Called in a wait for results of which some are missing. True: the rank was left out, and its result has not arrived.
 * So the result is 0. */
PRS_DEVICE_OUTLINED bool gives_nothing(const struct prs_few_args &args, const uint4 *at, uint32_t rank)
{
    return is_left_out(&args.moe.sync, rank) && !has_arrived(load_relaxed_sys_v4(at));
}

/* The expert of a token's choice. places: FEW_TERMS places of the token, read again. */
PRS_DEVICE uint32_t expert_of(const uint4 (&places)[FEW_TERMS / 4], uint32_t i)
{
    const uint4 &four = places[i / 4];
    return prs_few_expert(i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w);
}

/* Waits for a lane's vectors of the results of `terms` choices, of those that have an expert. It reads all of them once
 * before the first wait. choice: number of the first one. */
PRS_DEVICE void await_results(const struct prs_few_args &args, const struct few_launch &l, const uint4 *at,
                              const uint4 (&places)[FEW_TERMS / 4], uint32_t terms, uint32_t choice,
                              uint4 (&x)[FEW_TERMS])
{
    struct wait_clock clock = {0, 0};
    for (uint32_t left_out = 0;;) {
        uint32_t missing = FEW_TERMS, expert = 0;
#pragma unroll
        for (uint32_t i = 0; i < FEW_TERMS; i++)
            if (i < terms)
                x[i] = (left_out >> i & 1) != 0 ? sent_vector(make_uint4(0, 0, 0, 0))
                                                : load_relaxed_sys_v4(at + (uint64_t)i * (args.few.result_bytes / 16));
#pragma unroll
        for (uint32_t i = 0; i < FEW_TERMS; i++)
            if (i < terms && expert_of(places, i) != PRS_ROUTE_NONE && !has_arrived(x[i]))
                missing = i, expert = expert_of(places, i);
        /* MUTANT(emulator moe_few/few_tokens_take_one_launch) results are awaited: s/missing == FEW_TERMS/true/ */
        if (missing == FEW_TERMS)
            return;
        uint32_t rank = expert / args.moe.route.experts_per_rank;
        if (asks_for_absent(clock, l.absent, rank) &&
            gives_nothing(args, at + (uint64_t)missing * (args.few.result_bytes / 16), rank))
            /* MUTANT(emulator absent/a_rank_that_is_lost_in_a_launch_leaves_nothing_behind) a result that does not come
             * is 0: delete */
            left_out |= 1u << missing;
        if (!keep_waiting(&args.moe.sync, &clock, PRS_AWAIT_SUM, rank, choice + missing, 1, 0))
            return;
    }
}

/* Adds up a part of a token's result: one vector per lane, in fp32 and in the order of the choices. */
template <int TYPE>
PRS_DEVICE void add_results(const struct prs_few_args &args, const struct few_launch &l, uint32_t token,
                            uint32_t vector)
{
    constexpr uint32_t each = element<TYPE>::in_vector;
    const struct prs_route *r = &args.moe.route;
    uint32_t vectors = args.few.result_bytes / 16, of_token = token * r->choices;
    uint32_t slot = prs_few_slot(r, l.bank, r->place.rank, token);
    uint32_t choice = prs_few_slot(r, 0, r->place.rank, token) * r->choices;
    const uint4 *told = (const uint4 *)(args.few.places[0] + (uint64_t)slot * prs_few_place_words(r));
    uint4 *at = (uint4 *)(args.few.results[0] + prs_few_results_at(r, args.few.result_bytes, l.bank, token)) + vector;
    float sum[each] = {}, y[each];
    if (vector >= vectors)
        return;
    for (uint32_t first = 0; first < r->choices; first += FEW_TERMS, at += (uint64_t)FEW_TERMS * vectors) {
        uint32_t terms = r->choices - first < FEW_TERMS ? r->choices - first : FEW_TERMS;
        uint4 x[FEW_TERMS] = {}, places[FEW_TERMS / 4] = {};
#pragma unroll
        for (uint32_t i = 0; i < FEW_TERMS / 4; i++)
            if (i * 4 < terms)
                places[i] = load_relaxed_sys_v4(told + first / 4 + i);
        await_results(args, l, at, places, terms, choice + first, x);
#pragma unroll
        for (uint32_t i = 0; i < FEW_TERMS; i++) {
            if (i >= terms || expert_of(places, i) == PRS_ROUTE_NONE)
                continue;
            float weight = args.moe.weights[of_token + first + i];
            /* MUTANT(emulator moe_few/few_tokens_take_one_launch) what is read is cleared:
             * s/make_uint4(0, 0, 0, 0)/x[i]/ */
            store_relaxed_sys_v4(at + (uint64_t)i * vectors, make_uint4(0, 0, 0, 0));
            unpack_vector<TYPE>(received_vector(x[i]), y);
#pragma unroll
            for (uint32_t j = 0; j < each; j++)
                sum[j] += y[j] * weight;
        }
    }
    uint64_t of_row = (uint64_t)token * vectors + vector;
    if (args.moe.residual) {
        unpack_vector<TYPE>(((const uint4 *)args.moe.residual)[of_row], y);
#pragma unroll
        for (uint32_t j = 0; j < each; j++)
            sum[j] += y[j];
    }
    ((uint4 *)args.moe.combined)[of_row] = pack_vector<TYPE>(sum);
}

template <int TYPE> PRS_DEVICE void combine_results(const struct prs_few_args &args, const struct few_launch &l)
{
    uint32_t parts = prs_ceil_div(args.few.result_bytes / 16, 32), all = token_count(args.moe) * parts;
    for (uint32_t part; (part = claim_for_warp(&args.moe.claims->combined)) < all;)
        add_results<TYPE>(args, l, part / parts, part % parts * 32 + threadIdx.x % 32);
}

/* ---- the end ---- */
/* The launch has ended on this rank: prepares the next one. */
PRS_DEVICE void end_few(const struct prs_few_args &args, const struct few_memory &m, const struct few_launch &l)
{
    for (uint32_t tile = 0; tile < *m.tiles; tile++)
        args.few.done[0][tile] = args.few.done[1][tile] = 0;
    *(volatile uint32_t *)&args.few.state->launches = l.number;
    if (args.moe.status) {
        write_send_status(args.moe);
        args.moe.status->rows_needed = *m.blocks * PRS_TILE_M;
        args.moe.status->rows_dropped = 0;
    }
    *args.moe.claims = {};
}

/* One thread of each CTA calls it when its CTA has finished. It does what leave_moe() does in a launch without
 * routing. */
PRS_DEVICE void leave_few(const struct prs_few_args &args, const struct few_memory &m, const struct few_launch &l)
{
    uint32_t epoch = launch_epoch(&args.moe.sync) + 1;
    /* [few-results]: what this CTA has read, before it looks for an alarm of the ranks that sent it */
    fence_release_sys();
    if (!leave_epoch(&args.moe.sync, epoch, gridDim.x))
        return;
    end_few(args, m, l);
    tell_end(args.moe, epoch);
}

/* ---- the kernel ---- */
template <class E>
__global__ void __launch_bounds__(FEW_THREADS, 1) few_kernel(const __grid_constant__ struct prs_few_args args)
{
    struct few_memory m = few_memory_map<E>(dynamic_shared());
    uint32_t number = *(volatile uint32_t *)&args.few.state->launches + 1;
    struct few_launch l = {number, number & 1, absent_ranks(&args.moe.sync)};
    few_memory_init<E>(args, m);
    send_tokens<E>(args, m, l); /* the first barrier in it makes the initialised memory visible to all threads */
    take_places(args, m, l);
    __syncthreads();
    if (threadIdx.x < 32)
        make_tiles<E>(args, m);
    count_rows(args, m);
    __syncthreads();
    place_rows(args, m);
    __syncthreads();
    list_rows<E>(args, m);
    fence_async_shared(); /* bulk copies write where counts and codes were */
    __syncthreads();
    if (E::packed && threadIdx.x >= 32)
        pack_rows<E>(args, m, l);
    if (threadIdx.x < (1 + PRS_FEW_GATHERERS) * 32) {
        if constexpr (E::moves_registers)
            registers_give<FEW_PRODUCER_REGISTERS>();
        if (threadIdx.x < 32)
            load_weights<E>(args, m);
        else
            gather_rows<E>(args, m, l);
    } else {
        if constexpr (E::moves_registers)
            registers_take<FEW_CONSUMER_REGISTERS>();
        multiply_units<E>(args, m, l);
    }
    __syncthreads();
    combine_results<E::result>(args, l);
    __syncthreads();
    if (threadIdx.x == 0)
        leave_few(args, m, l);
}

#endif
