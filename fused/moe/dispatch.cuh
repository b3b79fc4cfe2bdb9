/* SPDX-License-Identifier: Apache-2.0 */
/* Dispatch without a product: moves rows as the product's kernel does (rows.cuh), with more warps on each SM. */
#ifndef PERSEUS_FUSED_DISPATCH_CUH
#define PERSEUS_FUSED_DISPATCH_CUH

#include "fused/moe/rows.cuh"

/* Even warps send, odd warps place. Each has a buffer; the barriers come after all buffers. */
enum {
    PRS_DISPATCH_WARPS = 16,
    PRS_DISPATCH_BARRIERS = PRS_DISPATCH_WARPS * PRS_PUSH_BYTES,
    PRS_DISPATCH_SHARED = PRS_DISPATCH_BARRIERS + PRS_DISPATCH_WARPS * 8
};

template <bool FAR>
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
    if (warp % 2 != 0)
        place_rows<FAR>(args, b, epoch, gridDim.x * (PRS_DISPATCH_WARPS / 2));
    else if (threadIdx.x % 32 == 0)
        send_rows<FAR>(args, b, epoch);
    __syncthreads();
    if (threadIdx.x == 0)
        leave_moe(args);
}

#endif
