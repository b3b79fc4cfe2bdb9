/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention: which kernels there are, and their launch; what runs in them is attention.cuh. */
#ifndef PERSEUS_FUSED_ATTENTION_KERNELS_H
#define PERSEUS_FUSED_ATTENTION_KERNELS_H

#include <cuda_runtime_api.h>

#include "fused/attention/layout.h"

struct prs_attention_kernel {
    uint32_t head_dim, block_rows, overlap; /* compile-time choices */
    uint32_t far;                           /* 1: for several nodes */
    uint32_t tile_rows;                     /* of a task */
};

#ifdef __cplusplus
extern "C" {
#endif

/* Completes the choices: 0 in block_rows or overlap takes the first kernel that fits, which is the best for that
 * head_dim. 0, or -ENOTSUP when there is none. */
int prs_attention_kernel_find(struct prs_attention_kernel *kernel);

/* Readies it on the current device; *ctas: how many can run at once. 0 or -ENOTSUP. */
int prs_attention_kernel_prepare(const struct prs_attention_kernel *kernel, uint32_t *ctas);

/* Enqueues one launch. All CTAs must be able to run at once. 0 or -EIO. */
int prs_attention_kernel_launch(const struct prs_attention_kernel *kernel, const struct prs_attention_args *args,
                                uint32_t ctas, cudaStream_t stream);

/* Before it, where copy engines move keys and values: what they wait for. 0 or -EIO. */
int prs_attention_kernel_begin_copies(const struct prs_attention_args *args, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
