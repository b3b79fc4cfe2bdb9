/* SPDX-License-Identifier: Apache-2.0 */
/* The backward pass of ring attention: the compiled kernels and their launch. */
#ifndef PERSEUS_FUSED_ATTENTION_BACKWARD_KERNELS_H
#define PERSEUS_FUSED_ATTENTION_BACKWARD_KERNELS_H

#include <cuda_runtime_api.h>

#include "fused/attention/backward/layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Prepares the kernels of a type and head_dim on the current device; *ctas: how many of each can run at once. 0 or
 * -ENOTSUP. */
int prs_backward_kernels_prepare(uint32_t type, uint32_t head_dim, uint32_t *ctas);

/* Each enqueues one kernel. 0 or -EIO. */
int prs_backward_kernel_terms(uint32_t type, uint32_t head_dim, const struct prs_terms_args *args, uint32_t ctas,
                              cudaStream_t stream);
int prs_backward_kernel_pass(uint32_t type, uint32_t head_dim, const struct prs_backward_args *args, uint32_t ctas,
                             cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
