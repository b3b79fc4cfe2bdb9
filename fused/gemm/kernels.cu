/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels, one instance per operation and layout of B, and their launch. */
#include "fused/gemm/kernels.h"

#include "fused/gemm/engine.cuh"
#include "fused/core/launch.cuh"

typedef void (*kernel_fn)(const struct prs_kernel_args);

static kernel_fn kernel_of(uint32_t op, int b_n_major, bool far)
{
    static const kernel_fn near_table[4][2] = {
        {fused_kernel<engine<PRS_FUSED_GEMM, 0>>, fused_kernel<engine<PRS_FUSED_GEMM, 1>>},
        {fused_kernel<engine<PRS_FUSED_REDUCE_SCATTER, 0>>, fused_kernel<engine<PRS_FUSED_REDUCE_SCATTER, 1>>},
        {fused_kernel<engine<PRS_FUSED_ALLGATHER, 0>>, fused_kernel<engine<PRS_FUSED_ALLGATHER, 1>>},
        {fused_kernel<engine<PRS_FUSED_ALLREDUCE, 0>>, fused_kernel<engine<PRS_FUSED_ALLREDUCE, 1>>},
    };
    static const kernel_fn far_table[4][2] = {
        {NULL, NULL}, /* nothing is communicated */
        {fused_kernel<engine<PRS_FUSED_REDUCE_SCATTER, 0, true>>,
         fused_kernel<engine<PRS_FUSED_REDUCE_SCATTER, 1, true>>},
        {fused_kernel<engine<PRS_FUSED_ALLGATHER, 0, true>>, fused_kernel<engine<PRS_FUSED_ALLGATHER, 1, true>>},
        {fused_kernel<engine<PRS_FUSED_ALLREDUCE, 0, true>>, fused_kernel<engine<PRS_FUSED_ALLREDUCE, 1, true>>},
    };
    return far ? far_table[op][b_n_major] : near_table[op][b_n_major];
}

static const struct launch_shape shape = {2, PRS_THREADS, PRS_SMEM_BYTES};

extern "C" int prs_kernels_prepare(uint32_t op, int b_n_major, bool far, uint32_t *clusters)
{
    return launch_prepare(kernel_of(op, b_n_major, far), &shape, clusters);
}

extern "C" int prs_kernels_launch(const struct prs_kernel_args *args, int b_n_major, uint32_t clusters,
                                  cudaStream_t stream)
{
    return launch_kernel(kernel_of(args->schedule.op, b_n_major, args->schedule.place.nodes > 1), &shape, clusters,
                         stream, *args);
}

/* Before the copy engines start: every other rank has finished the launch before this one, so that its copy of this
 * rank's block may be overwritten; then the epoch that they copy as their flag. One warp, and on the same stream before
 * the fused kernel, which leaves no room for it. */
static __global__ void begin_copies(const __grid_constant__ struct prs_kernel_args args)
{
    const struct prs_schedule *s = &args.schedule;
    uint32_t slot = threadIdx.x, epoch = launch_epoch(&args.sync);
    /* MUTANT(emulator allgather_by_copy_engine_is_right) credit before rows are copied over those of the last epoch:
     * s/wait_flag/if (0) wait_flag/ */
    if (slot + 1 < s->place.world)
        wait_flag(&args.sync, args.done[0] + slot, epoch - 1, PRS_AWAIT_PEERS, prs_place_after(&s->place, 1 + slot),
                  slot);
    __syncwarp();
    if (slot == 0)
        args.sync.words->copying = epoch;
}

extern "C" int prs_kernels_begin_copies(const struct prs_kernel_args *args, cudaStream_t stream)
{
    static const struct launch_shape one_warp = {1, 32, 0};
    return launch_kernel(begin_copies, &one_warp, 1, stream, *args);
}
