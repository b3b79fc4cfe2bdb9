/* SPDX-License-Identifier: Apache-2.0 */
/* Launches of the bench's own kernels, by a call that the Hopper emulator has too. */
#ifndef TOOLS_FUSED_LAUNCH_CUH
#define TOOLS_FUSED_LAUNCH_CUH

#include "tools/fused/bench.h"

#include <stdio.h>
#include <stdlib.h>

enum { BENCH_THREADS = 256, BENCH_MOST_BLOCKS = 1024 };

/* The blocks of a kernel whose threads loop over `count` elements. */
static inline uint64_t bench_blocks(uint64_t count)
{
    uint64_t blocks = (count + BENCH_THREADS - 1) / BENCH_THREADS;
    return blocks < 1 ? 1 : blocks < BENCH_MOST_BLOCKS ? blocks : BENCH_MOST_BLOCKS;
}

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
