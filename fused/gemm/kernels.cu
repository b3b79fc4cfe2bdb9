/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel instances, one per operation and layout of B, and their launch. */
#include "fused/gemm/kernels.h"

#include "fused/gemm/engine.cuh"
#include "fused/core/begin_copies.cuh"
#include "fused/core/load.h"

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

static int load(void)
{
    int r = launch_load(begin_copies);
    for (uint32_t op = PRS_FUSED_GEMM; op <= PRS_FUSED_ALLREDUCE; op++)
        for (int variant = 0; variant < 4 && r == 0; variant++) {
            kernel_fn kernel = kernel_of(op, variant & 1, variant > 1);
            r = kernel ? launch_load(kernel) : 0;
        }
    return r;
}
static const bool added = prs_load_add(load);

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

extern "C" int prs_kernels_begin_copies(const struct prs_kernel_args *args, cudaStream_t stream)
{
    const struct prs_place *at = &args->schedule.place;
    const struct prs_turns *turns = args->turns[0];
    return launch_begin_copies({args->sync, *at, turns->credit, &turns->copied, at->world - 1, 1, 1, PRS_AWAIT_PEERS},
                               stream);
}
