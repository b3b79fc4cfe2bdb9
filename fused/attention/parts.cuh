/* SPDX-License-Identifier: Apache-2.0 */
/* Striped attention of packed sequences: the kernel before a launch. It finds the sequence of each position once, and
 * not for each tile, head and block again. */
#ifndef PERSEUS_FUSED_ATTENTION_PARTS_CUH
#define PERSEUS_FUSED_ATTENTION_PARTS_CUH

#include "fused/attention/kernels.h"
#include "fused/attention/stripes.h"
#include "fused/core/launch.cuh"
#include "fused/core/sync.cuh"

enum { FIND_PARTS_THREADS = 256 };

/* Reports a bound that is below the one before it, or outside of the positions: sequences would be wrong, and nothing
 * else would notice it. */
PRS_DEVICE void check_bound(const struct prs_find_parts_args &args, uint32_t i)
{
    int32_t before = i == 0 ? 0 : args.bounds[i - 1];
    if (args.bounds[i] < before || args.bounds[i] > (int32_t)args.positions)
        record_fault(&args.sync, PRS_FAULT_BOUNDS, args.rank, i, (uint32_t)before, (uint32_t)args.bounds[i], 0);
}

static __global__ void find_parts(const __grid_constant__ struct prs_find_parts_args args)
{
    uint32_t position = blockIdx.x * FIND_PARTS_THREADS + threadIdx.x;
    if (position < args.positions)
        args.parts[position] = prs_stripe_part(args.bounds, args.sequences, position, args.positions);
    for (uint32_t i = position; i <= args.sequences; i += gridDim.x * FIND_PARTS_THREADS)
        check_bound(args, i);
}

static const struct launch_shape find_parts_shape = {1, FIND_PARTS_THREADS, 0};

#endif
