/* SPDX-License-Identifier: Apache-2.0 */
/* Launching the fused kernels, which engine.cuh defines. */
#ifndef PERSEUS_FUSED_KERNELS_H
#define PERSEUS_FUSED_KERNELS_H

#include <cuda_runtime_api.h>
#include <stdbool.h>

#include <perseus/gemm.h>

#include "fused/gemm/layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Loads on the current device what prs_kernels_launch() and prs_kernels_begin_copies() launch for a shape; far: for
 * several nodes; *clusters: how many clusters of two CTAs can run at once. 0 or -ENOTSUP. */
int prs_kernels_prepare(const struct prs_gemm_shape *shape, bool far, uint32_t *clusters);

/* Enqueues one launch. Any number of the clusters may run at a time. 0 or -EIO. */
int prs_kernels_launch(const struct prs_gemm_shape *shape, const struct prs_kernel_args *args, uint32_t clusters,
                       cudaStream_t stream);

/* All-gather by copy engine: enqueues the kernel that must run before the copies. 0 or -EIO. */
int prs_kernels_begin_copies(const struct prs_kernel_args *args, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
