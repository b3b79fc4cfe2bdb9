/* SPDX-License-Identifier: Apache-2.0 */
/* Striped attention of packed sequences: the kernel before a launch. It finds the sequence of each position once, and
 * not for each tile, head and block again. */
#ifndef PERSEUS_FUSED_ATTENTION_PARTS_CUH
#define PERSEUS_FUSED_ATTENTION_PARTS_CUH

#include "fused/attention/stripes.h"
#include "fused/core/launch.cuh"

enum { FIND_PARTS_THREADS = 256 };

struct find_parts_args {
    const int32_t *bounds; /* [sequences + 1] */
    struct prs_span *parts;
    uint32_t sequences, positions;
};

static __global__ void find_parts(const __grid_constant__ struct find_parts_args args)
{
    uint32_t position = blockIdx.x * FIND_PARTS_THREADS + threadIdx.x;
    if (position < args.positions)
        args.parts[position] = prs_stripe_part(args.bounds, args.sequences, position, args.positions);
}

static const struct launch_shape find_parts_shape = {1, FIND_PARTS_THREADS, 0};

#endif
