/* SPDX-License-Identifier: Apache-2.0 */
/* Combine: the way back of dispatch. For each delivery, the owner adds up the rows of its experts, times the router's
 * weights, and stores the sum where the token came from. There the rank adds up what has come, its own rows, and the
 * residual. Sums are fp32, in the order of the choices; each sum that travels is rounded once.
 *
 * Between nodes, owners store their sums at the counterpart of the token's rank on their node, which adds them up and
 * puts the result: one row per node crosses.
 *
 * A warp adds up one row at a time: lane i knows where term i lies. All CTAs claim deliveries, then relayed rows, then
 * tokens. A delivery waits for no delivery of another rank, a relayed row only for deliveries, so any number of running
 * CTAs makes progress.
 *
 * Sums come back to memory that the last launch may have used, so the first step is to wait until its ranks have ended
 * that launch (leave_moe()). */
#ifndef PERSEUS_FUSED_COMBINE_CUH
#define PERSEUS_FUSED_COMBINE_CUH

#include "fused/core/element.cuh"
#include "fused/moe/rows.cuh"

enum {
    PRS_COMBINE_WARPS = 16,
    VECTORS_IN_FLIGHT = 4, /* that a lane loads of each term */
    TERMS_IN_FLIGHT = 2
};

/* Of this lane: a row, and what it is multiplied by. */
struct term {
    const uint4 *row;
    float weight;
};

/* TYPE, here and below: of rows and of sums. */
template <int TYPE> PRS_DEVICE void add_vector(float *sum, uint4 x, float weight)
{
    float columns[element<TYPE>::in_vector];
    unpack_vector<TYPE>(x, columns);
#pragma unroll
    for (uint32_t i = 0; i < element<TYPE>::in_vector; i++)
        sum[i] += columns[i] * weight;
}

/* Adds up the rows of the lanes in `terms`, in the order of lanes, and `last`, which may be NULL or `to`; stores the
 * sum. */
template <int TYPE>
PRS_DEVICE void add_up(const struct prs_moe_args &args, const struct term &mine, uint32_t terms, const uint4 *last,
                       uint4 *to)
{
    uint32_t lane = threadIdx.x % 32, vectors = args.route.row_bytes / 16;
    for (uint32_t first = lane; first < prs_ceil_div(vectors, 32) * 32; first += 32 * VECTORS_IN_FLIGHT) {
        float sum[VECTORS_IN_FLIGHT][element<TYPE>::in_vector] = {};
        for (uint32_t left = terms; left != 0;) {
            uint4 x[TERMS_IN_FLIGHT][VECTORS_IN_FLIGHT];
            float weight[TERMS_IN_FLIGHT];
#pragma unroll
            for (int t = 0; t < TERMS_IN_FLIGHT; t++, left &= left - 1) {
                bool there = left != 0; /* else zeros: no sum is -0, so they change none */
                int from = there ? __ffs((int)left) - 1 : 0;
                const uint4 *row = (const uint4 *)__shfl_sync(~0u, (unsigned long long)mine.row, from);
                weight[t] = __shfl_sync(~0u, mine.weight, from);
                weight[t] = there ? weight[t] : 0;
#pragma unroll
                for (int i = 0; i < VECTORS_IN_FLIGHT; i++)
                    x[t][i] = there && first + i * 32 < vectors ? row[first + i * 32] : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (int t = 0; t < TERMS_IN_FLIGHT; t++)
#pragma unroll
                for (int i = 0; i < VECTORS_IN_FLIGHT; i++)
                    add_vector<TYPE>(sum[i], x[t][i], weight[t]);
        }
#pragma unroll
        for (int i = 0; i < VECTORS_IN_FLIGHT; i++) {
            if (first + i * 32 >= vectors)
                break;
            if (last)
                add_vector<TYPE>(sum[i], last[first + i * 32], 1.0f);
            to[first + i * 32] = pack_vector<TYPE>(sum[i]);
        }
    }
}

PRS_DEVICE const uint4 *result_row(const struct prs_moe_args &args, uint32_t row)
{
    return (const uint4 *)(args.results + (uint64_t)row * args.route.row_bytes);
}

/* ---- at the owner of experts ---- */
/* Where a sum for the peer at distance p goes: to the peer's memory, or, for another node, to that of the peer's
 * counterpart here, which adds up this node's sums. There the places are those of what it gets from the rank of the
 * peer's node with this rank's local number. from: the distance of that rank, or of this one, from the neighbour. */
PRS_DEVICE uint32_t return_to(const struct prs_route *r, uint32_t p, uint32_t *from)
{
    uint32_t q = prs_route_neighbour(r, p), b = prs_route_node_of(r, p);
    *from = prs_distance(prs_place_neighbour(&r->place, q), prs_place_counterpart(&r->place, b), r->place.world);
    return q;
}

template <int TYPE>
PRS_DEVICE void return_sum(const struct prs_moe_args &args, uint32_t epoch, const struct prs_route_delivery *delivery)
{
    const struct prs_route *r = &args.route;
    uint32_t lane = threadIdx.x % 32, targets = delivery->targets, at = delivery->at, from;
    uint32_t q = return_to(r, delivery->peer, &from);
    struct term mine = {NULL, 1.0f};
    if (lane < targets) {
        mine.row = result_row(args, delivery->row[lane]);
        if (args.unweighted == 0)
            mine.weight = __uint_as_float(delivery->row[prs_route_weight_at(r) + lane]);
    }
    add_up<TYPE>(args, mine, targets == 0 ? 0 : ~0u >> (32 - targets), NULL,
                 (uint4 *)(args.returns[q] + prs_route_staging_at(r, from, at)));
    /* MUTANT(emulator moe_combine/many_launches_of_any_choices_are_right) a sum is flagged when all lanes have stored:
     * delete */
    __syncwarp();
    if (lane == 0)
        store_release_sys(args.return_flags[q] + prs_route_row_flag(r, from, at), epoch);
}

/* Own tokens' rows are not added up here: combine_token() reads them. The last deliveries are those of other nodes,
 * whose sums have the longest way: they come first. */
template <int TYPE> PRS_DEVICE void return_sums(const struct prs_moe_args &args, uint32_t epoch)
{
    uint32_t deliveries = args.totals->deliveries;
    /* MUTANT(emulator moe_combine/a_dispatch_is_combined_any_number_of_times) sums wait until the last ones were read:
     * delete */
    await_room(args, epoch);
    for (uint32_t i; (i = claim_for_warp(&args.claims->returned)) < deliveries;) {
        const struct prs_route_delivery *delivery = delivery_at(args, deliveries - 1 - i);
        if (delivery->peer != 0)
            return_sum<TYPE>(args, epoch, delivery);
    }
}

/* Waits for the sum at place `at` among those from the peer at distance p. `neighbour`: index of the rank that sends
 * it. */
PRS_DEVICE const uint4 *await_sum(const struct prs_moe_args &args, uint32_t epoch, uint32_t p, uint32_t at,
                                  uint32_t neighbour)
{
    const struct prs_route *r = &args.route;
    uint32_t index = prs_route_row_flag(r, p, at);
    /* MUTANT(emulator moe_combine/many_launches_of_any_choices_are_right) wait for the sums of others: delete */
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
/* A sum that comes from another node. */
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

/* The terms are those of the choices, then the residual. */
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
    return_sums<TYPE>(args, epoch);
    if (FAR)
        relay_sums<TYPE>(args, epoch);
    combine_tokens<TYPE>(args, epoch);
    __syncthreads();
    if (threadIdx.x == 0)
        leave_moe(args);
}

#endif
