/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel before a launch of ring attention that is smaller than its plan: it writes what the host uploads once for
 * launches of the plan's size. */
#ifndef PERSEUS_FUSED_ATTENTION_LAY_CUH
#define PERSEUS_FUSED_ATTENTION_LAY_CUH

#include "fused/attention/layout.h"
#include "fused/core/launch.cuh"

enum { LAY_THREADS = 128 };

static __global__ void lay_pieces(const __grid_constant__ struct prs_lay_args args)
{
    uint32_t at = blockIdx.x * LAY_THREADS + threadIdx.x;
    if (at < args.schedule.tasks && args.striped != 0)
        args.pieces[at] = prs_attention_whole(&args.schedule, at);
    else if (at < args.schedule.tasks)
        prs_attention_lay_task(&args.schedule, args.cuts, args.cuts_count, at, args.pieces, args.parts);
    if (at < args.schedule.groups)
        args.pieces_of[at] = prs_attention_group_pieces(&args.schedule, args.cuts, args.cuts_count, at);
}

static const struct launch_shape lay_shape = {1, LAY_THREADS, 0};

#endif
