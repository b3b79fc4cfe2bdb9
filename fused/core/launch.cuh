/* SPDX-License-Identifier: Apache-2.0 */
/* Launching a persistent kernel: one CTA on each SM that it may use, in clusters. Any number of them may run at a
 * time. */
#ifndef PERSEUS_FUSED_LAUNCH_CUH
#define PERSEUS_FUSED_LAUNCH_CUH

#include <cuda_runtime.h>
#include <errno.h>
#include <stdint.h>

struct launch_shape {
    uint32_t cluster; /* CTAs in a cluster */
    uint32_t threads;
    uint32_t shared_bytes;
};

static inline void launch_config(cudaLaunchConfig_t *config, cudaLaunchAttribute *cluster,
                                 const struct launch_shape *shape, uint32_t clusters, cudaStream_t stream)
{
    cluster->id = cudaLaunchAttributeClusterDimension;
    cluster->val.clusterDim.x = shape->cluster;
    cluster->val.clusterDim.y = 1;
    cluster->val.clusterDim.z = 1;
    *config = cudaLaunchConfig_t{};
    config->gridDim = dim3(clusters * shape->cluster);
    config->blockDim = dim3(shape->threads);
    config->dynamicSmemBytes = shape->shared_bytes;
    config->stream = stream;
    config->attrs = cluster;
    config->numAttrs = 1;
}

/* Loads `kernel` on the current device (load.h). 0 or -ENOTSUP. */
template <class... Args> static int launch_load(void (*kernel)(Args...))
{
    struct cudaFuncAttributes loaded;
    return cudaFuncGetAttributes(&loaded, (const void *)kernel) == cudaSuccess ? 0 : -ENOTSUP;
}

/* Prepares `kernel` on the current device; *clusters: how many can run at once. 0 or -ENOTSUP. */
template <class... Args>
static int launch_prepare(void (*kernel)(Args...), const struct launch_shape *shape, uint32_t *clusters)
{
    cudaLaunchConfig_t config;
    cudaLaunchAttribute cluster;
    int count = 0;
    cudaError_t e = cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         (int)shape->shared_bytes);
    if (e != cudaSuccess)
        return -ENOTSUP;
    launch_config(&config, &cluster, shape, 1, 0);
    e = cudaOccupancyMaxActiveClusters(&count, (const void *)kernel, &config);
    if (e != cudaSuccess || count < 1)
        return -ENOTSUP;
    *clusters = (uint32_t)count;
    return 0;
}

/* 0 or -EIO. */
template <class Args>
static int launch_kernel(void (*kernel)(const Args), const struct launch_shape *shape, uint32_t clusters,
                         cudaStream_t stream, const Args &args)
{
    cudaLaunchConfig_t config;
    cudaLaunchAttribute cluster;
    launch_config(&config, &cluster, shape, clusters, stream);
    return cudaLaunchKernelEx(&config, kernel, args) == cudaSuccess ? 0 : -EIO;
}

#endif
