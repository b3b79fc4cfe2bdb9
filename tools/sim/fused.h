/* SPDX-License-Identifier: Apache-2.0 */
/* What the workloads of the fused kernels share. */
#ifndef SIM_FUSED_H
#define SIM_FUSED_H

#include "tools/sim/work.h"

/* When each rank's kernel has ended. */
struct fused_end {
    double *us;                  /* [rank] */
    struct sim_explain *explain; /* [rank] */
    uint32_t ranks;
};

enum fused_kernel { FUSED_REDUCE_SCATTER, FUSED_ALLREDUCE, FUSED_ALLGATHER, FUSED_ATTENTION, FUSED_MOE };
extern const char *const fused_kernel_names[];
extern const char *const nccl_collective_names[];

void fused_rank_ends(struct sim *sim, struct fused_end *end, uint32_t rank);
/* Play a workload until all ranks have ended, and fill in the result. Return 0 or -errno, with a line on stderr. */
int fused_run(const struct work *work, const struct sim_workload *workload, void *state, struct fused_end *end,
              struct work_result *result);
/* A part of the all-gather's own rows is ready to be sent. */
void fused_gather_send(struct sim *sim, uint32_t rank, uint32_t index);

int fused_gemm_play(const struct work *work, struct work_result *result);
int fused_moe_play(const struct work *work, struct work_result *result);
int fused_attention_play(const struct work *work, struct work_result *result);

#endif
