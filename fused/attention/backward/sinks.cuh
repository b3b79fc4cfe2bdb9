/* SPDX-License-Identifier: Apache-2.0 */
/* The gradients of sinks: a sink has the probability exp(sink - lse) in each row, and a value of zero. So its gradient
 * is the sum of -exp(sink - lse) * delta over the rows of its head, computed from this rank's terms. */
#ifndef PERSEUS_FUSED_ATTENTION_BACKWARD_SINKS_CUH
#define PERSEUS_FUSED_ATTENTION_BACKWARD_SINKS_CUH

#include "fused/attention/backward/layout.h"
#include "fused/core/launch.cuh"
#include "fused/core/sync.cuh"

enum { SINK_THREADS = 256 };

/* A CTA for each query head. The order of additions is the same in every run. */
static __global__ void sum_sinks(const __grid_constant__ struct prs_sinks_args args)
{
    const struct prs_attention_schedule *s = &args.terms.schedule;
    uint32_t head = blockIdx.x, bank = prs_backward_bank(launch_epoch(&args.terms.sync));
    uint32_t rows = s->segments * s->segment_rows, lane = threadIdx.x % 32;
    float *sums = (float *)dynamic_shared(), sum = 0, sink = args.sinks[head] * 1.44269504f;
    for (uint32_t batch = 0; batch < s->batch; batch++) {
        const struct prs_backward_term *from =
            args.terms.terms[0] + prs_backward_term(s, bank, s->place.rank, batch * s->heads_q + head, 0);
        for (uint32_t row = threadIdx.x; row < rows; row += SINK_THREADS)
            sum -= exp2_fast(sink - from[row].lse) * from[row].delta;
    }
#pragma unroll
    for (uint32_t step = 16; step > 0; step /= 2)
        sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0)
        sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    for (uint32_t i = 1; i < SINK_THREADS / 32; i++)
        sum += sums[i];
    args.dsinks[head] = sum;
}

static const struct launch_shape sum_sinks_shape = {1, SINK_THREADS, SINK_THREADS / 32 * sizeof(float)};

#endif
