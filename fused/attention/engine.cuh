/* SPDX-License-Identifier: Apache-2.0 */
/* The attention engine. A CTA computes one task at a time (schedule.h): 128 or 192 query rows of one head against the
 * keys and values of all ranks. In a CTA:
 *   warp 0         load_tasks       fills the stages of keys and values, waits for other ranks' data
 *   warp 1         push_slice       sends this rank's keys and values to the other ranks
 *   warp 2         count_pieces     gives credit for groups that have been read
 *   warps 4 and up attend_tasks     consumer warpgroups, 64 query rows each
 * Consumers never wait for another GPU, except through the stages. */
#ifndef PERSEUS_FUSED_ATTENTION_CUH
#define PERSEUS_FUSED_ATTENTION_CUH

#include "fused/attention/core.cuh"
#include "fused/attention/credit.cuh"
#include "fused/attention/end.cuh"
#include "fused/attention/load.cuh"
#include "fused/attention/push.cuh"

template <class E>
__global__ void __launch_bounds__(E::threads, 1)
    attention_kernel(const __grid_constant__ struct prs_attention_args args)
{
    struct attention_memory m = attention_memory_map<E>(dynamic_shared());
    if (threadIdx.x == 0)
        attention_memory_init<E>(&m);
    if (threadIdx.x == 32) {
        tensor_map_prefetch(&args.q);
        tensor_map_prefetch(&args.k);
        tensor_map_prefetch(&args.v);
    }
    __syncthreads();

    if (threadIdx.x < 128) {
        registers_give<E::producer_registers>();
        if (threadIdx.x < 32)
            load_tasks<E>(args, m);
        else if (threadIdx.x == 32 && args.schedule.place.world > 1 && args.planes == 0)
            push_slice<E>(args, m);
        else if (threadIdx.x == 64)
            count_pieces<E>(args, m);
    } else {
        registers_take<E::consumer_registers>();
        attend_tasks<E>(args, m);
    }
    __syncwarp();
    end_launch<E>(args);
}

#endif
