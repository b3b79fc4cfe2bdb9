/* SPDX-License-Identifier: Apache-2.0 */
/* Dispatch without a product: moves rows like the product's kernel (rows.cuh), but with more warps on each SM. It
 * follows routing. Or it sends other tokens along the maps of an earlier dispatch; then rows may be multiplied by
 * weights and by other rows (prs_moe_dispatch_again()). */
#ifndef PERSEUS_FUSED_DISPATCH_CUH
#define PERSEUS_FUSED_DISPATCH_CUH

#include "fused/core/element.cuh"
#include "fused/moe/rows.cuh"

/* Even warps send, odd warps place rows. Each has a buffer; the barriers come after all buffers. */
enum {
    PRS_DISPATCH_WARPS = 16,
    PRS_DISPATCH_BARRIERS = PRS_DISPATCH_WARPS * PRS_PUSH_BYTES,
    PRS_DISPATCH_SHARED = PRS_DISPATCH_BARRIERS + PRS_DISPATCH_WARPS * 8
};

/* TYPE, here and below: the type of rows. Returns a vector of columns, times the weight. Adds their product with y to
 * *sum. */
template <int TYPE> PRS_DEVICE uint4 weigh_vector(uint4 x, uint4 y, float weight, float *sum)
{
    typedef element<TYPE> e;
    uint32_t pair[4] = {x.x, x.y, x.z, x.w}, other[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float low = e::low(pair[i]), high = e::high(pair[i]);
        *sum += low * e::low(other[i]);
        *sum += high * e::high(other[i]);
        pair[i] = e::pack(low * weight, high * weight);
    }
    return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}

/* A warp copies a received row to a row of an expert. */
template <int TYPE>
PRS_DEVICE void weigh_row(const struct prs_moe_args &args, const uint4 *from, uint32_t row, float weight)
{
    uint32_t lane = threadIdx.x % 32, vectors = args.route.row_bytes / 16;
    uint64_t at = (uint64_t)row * args.route.row_bytes;
    const uint4 *beside = args.beside ? (const uint4 *)(args.beside + at) : NULL;
    uint4 *to = (uint4 *)(args.row_bytes + at);
    float sum = 0;
#pragma unroll 4
    for (uint32_t i = lane; i < vectors; i += 32)
        to[i] = weigh_vector<TYPE>(from[i], beside ? beside[i] : make_uint4(0, 0, 0, 0), weight, &sum);
    for (uint32_t d = 16; d != 0; d /= 2)
        sum += __shfl_xor_sync(~0u, sum, d);
    if (lane == 0 && beside)
        args.products[row] = sum;
}

/* Delivers received rows to their experts, as place_rows() does. */
template <int TYPE> PRS_DEVICE void weigh_rows(const struct prs_moe_args &args, uint32_t epoch)
{
    const struct prs_route *r = &args.route;
    uint32_t deliveries = args.totals->deliveries;
    for (uint32_t i; (i = claim_for_warp(&args.claims->deliveries)) < deliveries;) {
        const struct prs_route_delivery *delivery = delivery_at(args, i);
        uint32_t peer = delivery->peer, at = delivery->at, index = prs_route_row_flag(r, peer, at);
        const uint8_t *from = args.tokens + (uint64_t)at * r->row_bytes;
        if (peer != 0) {
            /* MUTANT(emulator moe_gradients/many_launches_of_any_choices_are_right) wait for the row: delete */
            await_word(args, args.staging_flags[0] + index, epoch, PRS_AWAIT_TOKEN, prs_place_after(&r->place, peer),
                       index);
            from = args.staging[0] + prs_route_staging_at(r, peer, at);
        }
        __syncwarp();
        for (uint32_t u = 0; u < delivery->targets; u++) {
            float weight = args.unweighted ? 1.0f : __uint_as_float(delivery->row[prs_route_weight_at(r) + u]);
            weigh_row<TYPE>(args, (const uint4 *)from, delivery->row[u], weight);
        }
    }
}

/* AGAIN: there is no routing, and so no barrier of all ranks. A row could arrive in memory that its receiver still
 * reads in the previous launch. So the kernel first waits until the receivers have ended that launch. */
template <int TYPE, bool FAR, bool AGAIN>
__global__ void __launch_bounds__(PRS_DISPATCH_WARPS * 32, 1)
    dispatch_kernel(const __grid_constant__ struct prs_moe_args args)
{
    uint8_t *base = dynamic_shared();
    uint32_t warp = threadIdx.x / 32, epoch = launch_epoch(&args.sync);
    struct row_buffer b = {base + warp * PRS_PUSH_BYTES, (uint64_t *)(base + PRS_DISPATCH_BARRIERS) + warp, 0};
    if (threadIdx.x % 32 == 0) {
        mbarrier_init(b.full, 1);
        mbarrier_init_fence();
    }
    __syncwarp();
    if (AGAIN && warp % 2 == 0) {
        /* MUTANT(emulator moe_gradients/many_launches_of_any_choices_are_right) wait for room: delete */
        await_room(args, epoch);
        fence_async_global(); /* the flags were read by ordinary loads, TMA writes */
    }
    if (warp % 2 != 0 && AGAIN && (args.unweighted == 0 || args.beside))
        weigh_rows<TYPE>(args, epoch);
    else if (warp % 2 != 0)
        place_rows<FAR>(args, b, epoch, gridDim.x * (PRS_DISPATCH_WARPS / 2));
    else if (threadIdx.x % 32 == 0)
        send_rows<FAR>(args, b, epoch);
    __syncthreads();
    if (threadIdx.x == 0)
        leave_moe(args);
}

#endif
