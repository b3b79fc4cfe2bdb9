/* SPDX-License-Identifier: Apache-2.0 */
/* Launches of the bench's own kernels, by what test/hopper knows as well. */
#ifndef TOOLS_FUSED_LAUNCH_CUH
#define TOOLS_FUSED_LAUNCH_CUH

#include "tools/fused/bench.h"

#include <stdio.h>
#include <stdlib.h>

template <class... Want, class... Given>
static void bench_launch(void (*kernel)(Want...), uint64_t blocks, uint32_t threads, cudaStream_t stream,
                         Given... given)
{
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)blocks, 1, 1);
    config.blockDim = dim3(threads, 1, 1);
    config.stream = stream;
    BENCH_CUDA(cudaLaunchKernelEx(&config, kernel, (Want)given...));
}

#endif
