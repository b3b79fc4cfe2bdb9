/* SPDX-License-Identifier: Apache-2.0 */
/* Combine: rows return to their tokens. For each delivery, the owner adds up the rows of its experts, times the
 * router's weights, and stores the sum at the token's rank. That rank adds up the sums that have arrived, its own rows,
 * and the residual. Sums are fp32, in the order of the choices; each sum that travels is rounded once.
 *
 * Between nodes, owners store their sums at the counterpart of the token's rank on their node, which adds them up and
 * puts the result: one row per node crosses.
 *
 * A warp adds up one row at a time: lane i knows where term i lies. All CTAs claim deliveries, then relayed rows, then
 * tokens. A delivery waits for no delivery of another rank, a relayed row only for deliveries, so any number of running
 * CTAs makes progress.
 *
 * Sums return to memory that the last launch may have used. So the first step is to wait until the ranks have ended
 * that launch (leave_moe()). */
#ifndef PERSEUS_FUSED_COMBINE_CUH
#define PERSEUS_FUSED_COMBINE_CUH

#include "fused/moe/returns.cuh"

/* Waits for the sum at place `at` among the sums from the peer at distance p. `neighbour`: index of the rank that sends
 * it. */
PRS_DEVICE const uint4 *await_sum(const struct prs_moe_args &args, uint32_t epoch, uint32_t p, uint32_t at,
                                  uint32_t neighbour)
{
    const struct prs_route *r = &args.route;
    uint32_t index = prs_route_row_flag(r, p, at);
    if (args.returns_early == 0) /* else exchange_returned() has waited for all of them */
        /* MUTANT(emulator moe_combine/many_launches_of_any_choices_are_right) wait for the sums of others:
         * s/await_word/(void)/ */
        await_word(args, args.return_flags[0] + index, epoch, PRS_AWAIT_SUM, neighbour, index);
    return (const uint4 *)(args.returns[0] + prs_route_staging_at(r, p, at));
}

/* ---- between nodes: at the token's counterpart ---- */
/* Adds up the sums of this node's ranks for a row from the node at distance n, in the order of local ranks. */
template <int TYPE> PRS_DEVICE void relay_sum(const struct prs_moe_args &args, uint32_t epoch, uint32_t n, uint32_t row)
{
    const struct prs_route *r = &args.route;
    uint32_t lane = threadIdx.x % 32;
    const uint32_t *table = forwarding_of(args, n);
    int32_t place = PRS_ROUTE_NOWHERE;
    struct term mine = {NULL, 1.0f};
    if (lane < r->place.local_ranks)
        place = (int32_t)table[4 + row * r->place.local_ranks + lane];
    if (place != PRS_ROUTE_NOWHERE) {
        uint32_t node = (r->place.node + n) % r->place.nodes;
        uint32_t p = prs_place_distance(&r->place, prs_place_rank(&r->place, node, lane));
        mine.row = await_sum(args, epoch, p, (uint32_t)place, prs_place_rank(&r->place, r->place.node, lane));
    }
    __syncwarp(); /* what one lane has waited for, all lanes read */
    add_up<TYPE>(args, mine, __ballot_sync(~0u, mine.row != NULL), NULL,
                 (uint4 *)(args.far.relay + prs_route_relay_at(r, args.far.back + 1, n, row)));
    /* MUTANT(emulator moe_combine_nodes/sums_come_back_from_other_nodes) a relayed sum is counted when all lanes have
     * stored: delete */
    __syncwarp();
    if (lane == 0)
        relay_row_out(args, epoch, n, row, table[0], true);
}

template <int TYPE> PRS_DEVICE_OUTLINED void relay_sums(const struct prs_moe_args &args, uint32_t epoch)
{
    struct incoming in = {0, 0, 0, 0, 0, NULL};
    if (threadIdx.x % 32 == 0)
        in = first_incoming(args);
    for (;;) {
        uint32_t n = __shfl_sync(~0u, in.at < in.end ? in.n : 0, 0), row = __shfl_sync(~0u, in.row, 0);
        if (n == 0)
            break;
        relay_sum<TYPE>(args, epoch, n, row);
        if (threadIdx.x % 32 != 0)
            continue;
        in.at = claim_row(&args.claims->forwarded);
        find_incoming(args, &in);
    }
}

/* ---- at the token's rank ---- */
/* Waits for a sum from another node. */
PRS_DEVICE const uint4 *await_relayed(const struct prs_moe_args &args, uint32_t epoch, uint32_t b, uint32_t row)
{
    const struct prs_route *r = &args.route;
    uint32_t word = prs_route_back_word(r, b, row / r->group);
    /* MUTANT(emulator moe_combine_nodes/sums_come_back_from_other_nodes) wait for sums of other nodes: delete */
    await_word(args, far_flag(args, word), epoch, PRS_AWAIT_SUM, prs_place_counterpart(&r->place, b), word);
    return (const uint4 *)(args.far.relay + prs_route_relay_at(r, args.far.back, b, row));
}

PRS_DEVICE const uint4 *await_source(const struct prs_moe_args &args, uint32_t epoch, uint32_t p, uint32_t at)
{
    const struct prs_route *r = &args.route;
    uint32_t b = prs_route_node_of(r, p);
    return b == 0 ? await_sum(args, epoch, p, at, prs_place_after(&r->place, p)) : await_relayed(args, epoch, b, at);
}

/* The terms are the results of the choices, then the residual. */
template <int TYPE> PRS_DEVICE void combine_token(const struct prs_moe_args &args, uint32_t epoch, uint32_t token)
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
        mine.row = await_source(args, epoch, source.peer, source.at);
    }
    __syncwarp(); /* what one lane has waited for, all lanes read */
    uint64_t at = (uint64_t)token * r->row_bytes;
    add_up<TYPE>(args, mine, __ballot_sync(~0u, mine.row != NULL),
                 args.residual ? (const uint4 *)(args.residual + at) : NULL, (uint4 *)(args.combined + at));
}

template <int TYPE> PRS_DEVICE void combine_tokens(const struct prs_moe_args &args, uint32_t epoch)
{
    uint32_t tokens = args.totals->tokens;
    for (uint32_t token; (token = claim_for_warp(&args.claims->combined)) < tokens;)
        combine_token<TYPE>(args, epoch, token);
}

template <int TYPE, bool FAR>
__global__ void __launch_bounds__(PRS_COMBINE_WARPS * 32, 1)
    combine_kernel(const __grid_constant__ struct prs_moe_args args)
{
    uint32_t epoch = launch_epoch(&args.sync);
    if (args.returns_early != 0)
        exchange_returned(args, epoch);
    else
        return_sums<TYPE>(args, epoch);
    if (FAR)
        relay_sums<TYPE>(args, epoch);
    combine_tokens<TYPE>(args, epoch);
    __syncthreads();
    if (threadIdx.x == 0)
        leave_moe(args);
}

#endif
