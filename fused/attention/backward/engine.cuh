/* SPDX-License-Identifier: Apache-2.0 */
/* The backward engine. A CTA computes one task at a time: 128 rows of this rank, of one head, against the stream. In
 * a CTA:
 *   warp 0         load_backward    fills the stages, waits for other ranks' data
 *   warp 1         push_and_send    sends this rank's slice of the stream to the other ranks (push_slice(), as in the
 *                                   forward pass), then their parts of dq
 *   warps 2 and 3  add_queries      add to dq in memory, in turns; warp 2 also gives credit for groups that have been
 *                                   read (count_piece(), as in the forward pass)
 *   warps 4 and up sum_tasks        consumer warpgroups, 64 rows of the task each
 * Consumers never wait for another GPU, except through the stages. */
#ifndef PERSEUS_FUSED_ATTENTION_BACKWARD_ENGINE_CUH
#define PERSEUS_FUSED_ATTENTION_BACKWARD_ENGINE_CUH

#include "fused/attention/backward/add.cuh"
#include "fused/attention/backward/core.cuh"
#include "fused/attention/backward/load.cuh"
#include "fused/attention/credit.cuh"
#include "fused/attention/end.cuh"
#include "fused/attention/backward/sums.cuh"
#include "fused/attention/push.cuh"

/* Warp 1. */
template <class E> PRS_DEVICE void push_and_send(const struct prs_backward_args &args, const struct attention_memory &m)
{
    if (threadIdx.x == 32)
        push_slice<E>(args.stream, m);
    __syncwarp();
    send_sums<E>(args);
}

template <class E>
__global__ void __launch_bounds__(E::threads, 1) backward_kernel(const __grid_constant__ struct prs_backward_args args)
{
    struct attention_memory m = attention_memory_map<E>(dynamic_shared());
    if (threadIdx.x == 0)
        attention_memory_init<E>(&m);
    if (threadIdx.x == 32) {
        tensor_map_prefetch(&args.stream.q);
        tensor_map_prefetch(&args.second);
        tensor_map_prefetch(&args.stream.k);
        tensor_map_prefetch(&args.stream.v);
    }
    __syncthreads();

    if (threadIdx.x < 128) {
        registers_give<E::producer_registers>();
        if (threadIdx.x < 32)
            load_backward<E>(args, m);
        else if (threadIdx.x < 64 && args.stream.schedule.place.world > 1)
            push_and_send<E>(args, m);
        else if (threadIdx.x >= 64 && threadIdx.x % 32 == 0)
            add_queries<E>(args, m, threadIdx.x / 32 - 2);
    } else {
        registers_take<E::consumer_registers>();
        sum_tasks<E>(args, m);
    }
    __syncwarp();
    end_launch<E>(args.stream);
}

#endif
