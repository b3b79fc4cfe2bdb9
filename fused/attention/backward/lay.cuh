/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel before a backward launch that is smaller than its plan: it writes what the host uploads once for launches
 * of the plan's size. */
#ifndef PERSEUS_FUSED_ATTENTION_BACKWARD_LAY_CUH
#define PERSEUS_FUSED_ATTENTION_BACKWARD_LAY_CUH

#include "fused/attention/backward/layout.h"
#include "fused/core/launch.cuh"

enum { LAY_TASKS_THREADS = 128 };

static __global__ void lay_tasks(const __grid_constant__ struct prs_lay_tasks_args args)
{
    uint32_t at = blockIdx.x * LAY_TASKS_THREADS + threadIdx.x;
    if (at < prs_backward_tasks(&args.schedule, &args.shape))
        args.tasks[at] = prs_backward_whole(&args.schedule, &args.shape, args.striped != 0, at);
    if (at < args.schedule.groups)
        args.tasks_of[at] = prs_backward_group_tasks(&args.schedule, &args.shape, at);
}

static const struct launch_shape lay_tasks_shape = {1, LAY_TASKS_THREADS, 0};

#endif
