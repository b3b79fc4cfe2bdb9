/* SPDX-License-Identifier: Apache-2.0 */
/* The backward pass of ring attention: the compiled kernels and their launch. */
#ifndef PERSEUS_FUSED_ATTENTION_BACKWARD_KERNELS_H
#define PERSEUS_FUSED_ATTENTION_BACKWARD_KERNELS_H

#include <cuda_runtime_api.h>

#include "fused/attention/backward/layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Which kernels. */
struct prs_backward_kernel {
    uint32_t type, head_dim, striped, capped, far;
};

/* Prepares the kernels on the current device; *ctas: how many CTAs of the pass can run at once. 0 or -ENOTSUP. */
int prs_backward_kernels_prepare(const struct prs_backward_kernel *kernel, uint32_t *ctas);

/* Each enqueues one kernel. 0 or -EIO. */
int prs_backward_kernel_terms(const struct prs_backward_kernel *kernel, const struct prs_terms_args *args,
                              uint32_t ctas, cudaStream_t stream);
/* Before a launch that is smaller than its plan: writes its tasks. */
int prs_backward_kernel_lay(const struct prs_lay_tasks_args *args, cudaStream_t stream);
int prs_backward_kernel_sinks(const struct prs_sinks_args *args, cudaStream_t stream);
int prs_backward_kernel_finish(const struct prs_backward_kernel *kernel, const struct prs_finish_args *args,
                               uint32_t ctas, cudaStream_t stream);
int prs_backward_kernel_pass(const struct prs_backward_kernel *kernel, const struct prs_backward_args *args,
                             uint32_t ctas, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
