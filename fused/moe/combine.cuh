/* SPDX-License-Identifier: Apache-2.0 */
/* Combine: the way back of dispatch. For each delivery, the owner adds up the rows of its experts, times the router's
 * weights, and stores the sum where the token came from. There the rank adds up what has come, its own rows, and the
 * residual. Sums are fp32, in the order of the choices; each sum that travels is rounded once.
 *
 * A warp adds up one row at a time: lane i knows where term i lies. All CTAs claim deliveries, then tokens. A delivery
 * waits for no delivery of another rank, so any number of running CTAs makes progress.
 *
 * Sums come back to memory that the last launch may have used, so the first step is to wait until its ranks have ended
 * that launch (leave_moe()). */
#ifndef PERSEUS_FUSED_COMBINE_CUH
#define PERSEUS_FUSED_COMBINE_CUH

#include "fused/moe/rows.cuh"

enum {
    PRS_COMBINE_WARPS = 16,
    VECTORS_IN_FLIGHT = 4 /* that a lane loads of each term */
};

/* Of this lane: a row, and what it is multiplied by. */
struct term {
    const uint4 *row;
    float weight;
};

/* Eight columns. */
PRS_DEVICE void add_vector(float *sum, uint4 x, float weight)
{
    uint32_t pair[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum[2 * i] += bf16_low(pair[i]) * weight;
        sum[2 * i + 1] += bf16_high(pair[i]) * weight;
    }
}

/* Adds up the rows of the lanes in `terms`, in the order of lanes, and `last`, which may be NULL or `to`; stores the
 * sum. */
PRS_DEVICE void add_up(const struct prs_moe_args &args, const struct term &mine, uint32_t terms, const uint4 *last,
                       uint4 *to)
{
    uint32_t lane = threadIdx.x % 32, vectors = args.route.row_bytes / 16;
    for (uint32_t first = lane; first < prs_ceil_div(vectors, 32) * 32; first += 32 * VECTORS_IN_FLIGHT) {
        float sum[VECTORS_IN_FLIGHT][8] = {};
        for (uint32_t left = terms; left != 0; left &= left - 1) {
            int from = __ffs((int)left) - 1;
            const uint4 *row = (const uint4 *)__shfl_sync(~0u, (unsigned long long)mine.row, from);
            float weight = __shfl_sync(~0u, mine.weight, from);
            uint4 x[VECTORS_IN_FLIGHT];
#pragma unroll
            for (int i = 0; i < VECTORS_IN_FLIGHT; i++)
                x[i] = first + i * 32 < vectors ? row[first + i * 32] : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int i = 0; i < VECTORS_IN_FLIGHT; i++)
                add_vector(sum[i], x[i], weight);
        }
#pragma unroll
        for (int i = 0; i < VECTORS_IN_FLIGHT; i++) {
            if (first + i * 32 >= vectors)
                break;
            if (last)
                add_vector(sum[i], last[first + i * 32], 1.0f);
            to[first + i * 32] = make_uint4(pack_bf16x2(sum[i][0], sum[i][1]), pack_bf16x2(sum[i][2], sum[i][3]),
                                            pack_bf16x2(sum[i][4], sum[i][5]), pack_bf16x2(sum[i][6], sum[i][7]));
        }
    }
}

/* All lanes get the same position of a list. */
PRS_DEVICE uint32_t claim_for_warp(uint32_t *counter)
{
    uint32_t at = threadIdx.x % 32 == 0 ? claim_row(counter) : 0;
    return __shfl_sync(~0u, at, 0);
}

PRS_DEVICE const uint4 *result_row(const struct prs_moe_args &args, uint32_t row)
{
    return (const uint4 *)(args.results + (uint64_t)row * args.route.row_bytes);
}

/* ---- at the owner of experts ---- */
/* Until every neighbour has read what it was sent in the launch before. */
PRS_DEVICE void await_room(const struct prs_moe_args &args, uint32_t epoch)
{
    const struct prs_route *r = &args.route;
    uint32_t q = threadIdx.x % 32;
    if (q != 0 && q < r->place.local_ranks) {
        uint32_t p = prs_place_distance(&r->place, prs_place_neighbour(&r->place, q));
        wait_flag(&args.sync, args.end_flags[0] + p, epoch - 1, PRS_AWAIT_END, prs_place_after(&r->place, p), p);
    }
    __syncwarp();
}

PRS_DEVICE void return_sum(const struct prs_moe_args &args, uint32_t epoch, const struct prs_route_delivery *delivery)
{
    const struct prs_route *r = &args.route;
    uint32_t lane = threadIdx.x % 32, targets = delivery->targets, p = delivery->peer, at = delivery->at;
    uint32_t q = prs_route_neighbour(r, p), me = prs_distance_back(p, r->place.world);
    struct term mine = {NULL, 1.0f};
    if (lane < targets) {
        mine.row = result_row(args, delivery->row[lane]);
        if (args.unweighted == 0)
            mine.weight = __uint_as_float(delivery->row[prs_route_weight_at(r) + lane]);
    }
    add_up(args, mine, targets == 0 ? 0 : ~0u >> (32 - targets), NULL,
           (uint4 *)(args.returns[q] + prs_route_staging_at(r, me, at)));
    /* MUTANT(emulator moe_combine/many_launches_of_any_choices_are_right) a sum is flagged when all lanes have stored:
     * delete */
    __syncwarp();
    if (lane == 0)
        store_release_sys(args.return_flags[q] + prs_route_row_flag(r, me, at), epoch);
}

/* Own tokens' rows are not added up here: combine_token() reads them. */
PRS_DEVICE void return_sums(const struct prs_moe_args &args, uint32_t epoch)
{
    uint32_t deliveries = args.totals->deliveries;
    /* MUTANT(emulator moe_combine/a_dispatch_is_combined_any_number_of_times) sums wait until the last ones were read:
     * delete */
    await_room(args, epoch);
    for (uint32_t i; (i = claim_for_warp(&args.claims->returned)) < deliveries;) {
        const struct prs_route_delivery *delivery = delivery_at(args, i);
        if (delivery->peer != 0)
            return_sum(args, epoch, delivery);
    }
}

/* ---- at the token's rank ---- */
PRS_DEVICE void await_sum(const struct prs_moe_args &args, uint32_t epoch, const struct prs_route_source &source)
{
    uint32_t index = prs_route_row_flag(&args.route, source.peer, source.at);
    await_word(args, args.return_flags[0] + index, epoch, PRS_AWAIT_SUM,
               prs_place_after(&args.route.place, source.peer), index);
}

/* The terms are those of the choices, then the residual. */
PRS_DEVICE void combine_token(const struct prs_moe_args &args, uint32_t epoch, uint32_t token)
{
    const struct prs_route *r = &args.route;
    uint32_t lane = threadIdx.x % 32;
    struct prs_route_source source = {PRS_ROUTE_NO_SOURCE, 0, 1.0f, 0};
    struct term mine = {NULL, 1.0f};
    if (lane < r->choices)
        source = args.sources[(uint64_t)token * r->choices + lane];
    if (source.peer == 0) {
        mine.row = result_row(args, source.at);
        if (args.unweighted == 0)
            mine.weight = source.weight;
    } else if (source.peer != PRS_ROUTE_NO_SOURCE) {
        /* MUTANT(emulator moe_combine/many_launches_of_any_choices_are_right) a token waits for the sums of others:
         * delete */
        await_sum(args, epoch, source);
        mine.row = (const uint4 *)(args.returns[0] + prs_route_staging_at(r, source.peer, source.at));
    }
    __syncwarp(); /* what one lane has waited for, all lanes read */
    uint64_t at = (uint64_t)token * r->row_bytes;
    add_up(args, mine, __ballot_sync(~0u, mine.row != NULL), args.residual ? (const uint4 *)(args.residual + at) : NULL,
           (uint4 *)(args.combined + at));
}

PRS_DEVICE void combine_tokens(const struct prs_moe_args &args, uint32_t epoch)
{
    uint32_t tokens = args.totals->tokens;
    for (uint32_t token; (token = claim_for_warp(&args.claims->combined)) < tokens;)
        combine_token(args, epoch, token);
}

template <bool FAR>
__global__ void __launch_bounds__(PRS_COMBINE_WARPS * 32)
    combine_kernel(const __grid_constant__ struct prs_moe_args args)
{
    uint32_t epoch = launch_epoch(&args.sync);
    return_sums(args, epoch);
    combine_tokens(args, epoch);
    __syncthreads();
    if (threadIdx.x == 0)
        leave_moe(args);
}

#endif
