/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels, one instance per operation and layout of B, and their launch. */
#include "fused/kernels.h"

#include <errno.h>

#include "fused/engine.cuh"

typedef void (*kernel_fn)(const struct prs_kernel_args);

static kernel_fn kernel_of(uint32_t kind, int b_n_major)
{
    static const kernel_fn table[4][2] = {
        {fused_kernel<engine<PRS_KIND_GEMM, 0>>, fused_kernel<engine<PRS_KIND_GEMM, 1>>},
        {fused_kernel<engine<PRS_KIND_REDUCE_SCATTER, 0>>, fused_kernel<engine<PRS_KIND_REDUCE_SCATTER, 1>>},
        {fused_kernel<engine<PRS_KIND_ALLGATHER, 0>>, fused_kernel<engine<PRS_KIND_ALLGATHER, 1>>},
        {fused_kernel<engine<PRS_KIND_ALLREDUCE, 0>>, fused_kernel<engine<PRS_KIND_ALLREDUCE, 1>>},
    };
    return table[kind][b_n_major];
}

static void launch_config(cudaLaunchConfig_t *config, cudaLaunchAttribute *cluster, uint32_t ctas, cudaStream_t stream)
{
    cluster->id = cudaLaunchAttributeClusterDimension;
    cluster->val.clusterDim.x = 2;
    cluster->val.clusterDim.y = 1;
    cluster->val.clusterDim.z = 1;
    *config = cudaLaunchConfig_t{};
    config->gridDim = dim3(ctas);
    config->blockDim = dim3(PRS_THREADS);
    config->dynamicSmemBytes = PRS_SMEM_BYTES;
    config->stream = stream;
    config->attrs = cluster;
    config->numAttrs = 1;
}

extern "C" int prs_kernels_prepare(uint32_t kind, int b_n_major, uint32_t *clusters)
{
    cudaLaunchConfig_t config;
    cudaLaunchAttribute cluster;
    int count = 0;
    cudaError_t e =
        cudaFuncSetAttribute(kernel_of(kind, b_n_major), cudaFuncAttributeMaxDynamicSharedMemorySize, PRS_SMEM_BYTES);
    if (e != cudaSuccess)
        return -ENOTSUP;
    launch_config(&config, &cluster, 2, 0);
    e = cudaOccupancyMaxActiveClusters(&count, kernel_of(kind, b_n_major), &config);
    if (e != cudaSuccess || count < 1)
        return -ENOTSUP;
    *clusters = (uint32_t)count;
    return 0;
}

extern "C" int prs_kernels_launch(const struct prs_kernel_args *args, int b_n_major, uint32_t clusters,
                                  cudaStream_t stream)
{
    cudaLaunchConfig_t config;
    cudaLaunchAttribute cluster;
    launch_config(&config, &cluster, clusters * 2, stream);
    return cudaLaunchKernelEx(&config, kernel_of(args->schedule.kind, b_n_major), *args) == cudaSuccess ? 0 : -EIO;
}

/* Before the copy engines start: every other rank has finished the launch before this one, so that its copy of this
 * rank's block may be overwritten; then the epoch that they copy as their flag. One warp, and on the same stream before
 * the fused kernel, which leaves no room for it. */
static __global__ void begin_copies(const __grid_constant__ struct prs_kernel_args args)
{
    const struct prs_schedule *s = &args.schedule;
    uint32_t slot = threadIdx.x, epoch = launch_epoch(&args);
    if (slot + 1 < s->world)
        wait_flag(&args, args.done[0] + slot, epoch - 1, PRS_AWAIT_PEERS, (s->rank + 1 + slot) % s->world, slot);
    __syncwarp();
    if (slot == 0)
        args.words->copying = epoch;
}

extern "C" int prs_kernels_begin_copies(const struct prs_kernel_args *args, cudaStream_t stream)
{
    begin_copies<<<1, 32, 0, stream>>>(*args);
    return cudaGetLastError() == cudaSuccess ? 0 : -EIO;
}
