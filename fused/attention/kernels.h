/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention: the compiled kernels and their launch. They run engine.cuh. */
#ifndef PERSEUS_FUSED_ATTENTION_KERNELS_H
#define PERSEUS_FUSED_ATTENTION_KERNELS_H

#include <cuda_runtime_api.h>

#include "fused/attention/layout.h"
#include "fused/core/plan_switch.h"

struct prs_attention_kernel {
    uint32_t type;                                     /* enum prs_dtype: of queries, keys, values and results */
    uint32_t head_dim, value_dim, block_rows, overlap; /* compile-time choices */
    uint32_t far;                                      /* 1: for several nodes */
    uint32_t striped;                                  /* 1: stripes.h */
    uint32_t tile_rows;                                /* query rows of a task */
};

#ifdef __cplusplus
extern "C" {
#endif

/* Fills in block_rows or overlap where they are 0, from the first kernel that fits, which is the best for its head_dim.
 * 0, or -ENOTSUP when there is none. */
int prs_attention_kernel_find(struct prs_attention_kernel *kernel);

/* Prepares the kernel on the current device; *ctas: how many can run at once. 0 or -ENOTSUP. */
int prs_attention_kernel_prepare(const struct prs_attention_kernel *kernel, uint32_t *ctas);

/* What a striped launch needs in addition (prepare.cuh): the sequence of each position of packed sequences, and tables
 * of the stripes of each rank. */
struct prs_prepare_args {
    struct prs_sync sync;
    const int32_t *bounds;    /* [sequences + 1], as operands.cu_seqlens; NULL: not packed */
    const uint32_t *assigned; /* [stripes], as operands.stripe_ranks; NULL: zigzag */
    struct prs_span *parts;
    uint32_t *stripe_of, *how_many; /* as in struct prs_attention_stripes */
    uint32_t sequences, positions, stripes, world, rank;
};

/* Striped attention, before a launch: enqueues that kernel, if there is something to prepare. It reports bounds that
 * decrease or are outside of the positions, and ranks with too many or too few stripes. 0 or -EIO. */
int prs_attention_kernel_prepare_stripes(const struct prs_prepare_args *args, cudaStream_t stream);

/* Before a launch that is smaller than its plan: enqueues the kernel that writes its pieces. 0 or -EIO. */
int prs_attention_kernel_lay(const struct prs_lay_args *args, cudaStream_t stream);

/* Enqueues one launch. 0 or -EIO. */
int prs_attention_kernel_launch(const struct prs_attention_kernel *kernel, const struct prs_attention_args *args,
                                uint32_t ctas, cudaStream_t stream);

/* Before a launch of several ranks: enqueues the step of plan_switch.h. 0 or -EIO. */
int prs_attention_kernel_switch_plan(const struct prs_switch_args *args, cudaStream_t stream);

/* Before a launch whose keys and values are moved by copy engines: enqueues the kernel that the copies wait for. 0 or
 * -EIO. */
int prs_attention_kernel_begin_copies(const struct prs_attention_args *args, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
