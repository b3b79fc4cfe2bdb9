/* SPDX-License-Identifier: Apache-2.0 */
/* Small launches of each fused GEMM kernel with every access checked for its order. They reach every release, acquire
 * and proxy fence of these kernels on one node (memory_order.py). Launches follow each other without a wait. */
#include <criterion/criterion.h>

#include "test/hopper/ranks.h"

/* Two clusters a rank, and K of several strips, so that other lanes than the first wait for rows. */
static void assert_ordered(enum prs_gemm_op op, uint32_t world, struct prs_gemm_tuning tuning)
{
    ranks_assert_right(&(struct ranks_product){
        .shape = {op, 256 * world, 264, 584, 1}, .tuning = tuning, .world = world, .epochs = 3, .sms = 4});
}

Test(memory_order, of_reduce_scatter, .timeout = 600)
{
    assert_ordered(PRS_GEMM_REDUCE_SCATTER, 3, (struct prs_gemm_tuning){.paced = PRS_GEMM_UNPACED, .spread = 1});
}

Test(memory_order, of_allreduce, .timeout = 600)
{
    assert_ordered(PRS_GEMM_ALLREDUCE, 2, (struct prs_gemm_tuning){0});
}

Test(memory_order, of_allgather, .timeout = 600)
{
    assert_ordered(PRS_GEMM_ALLGATHER, 2, (struct prs_gemm_tuning){.mover = PRS_MOVED_BY_CTAS});
}

Test(memory_order, of_allgather_by_copy_engine, .timeout = 600)
{
    assert_ordered(PRS_GEMM_ALLGATHER, 2, (struct prs_gemm_tuning){.mover = PRS_MOVED_BY_COPY_ENGINES, .band = 1});
}

/* Rows and their scales, which are stored and read by ordinary accesses. */
Test(memory_order, of_scales_that_travel, .timeout = 600)
{
    ranks_assert_right(&(struct ranks_product){
        .shape = {PRS_GEMM_ALLGATHER, 512, 136, 640, 1, .dtype = PRS_DTYPE_E4M3, .scaling = PRS_SCALING_BLOCKS},
        .tuning = {.mover = PRS_MOVED_BY_CTAS},
        .world = 2,
        .epochs = 2,
        .sms = 4});
}

/* More units than the cluster's slots for them, so that each slot is used again. */
Test(memory_order, of_one_cluster, .timeout = 600)
{
    ranks_assert_right(&(struct ranks_product){.shape = {PRS_GEMM_ALONE, 1024, 520, 136, 1}, .world = 1, .sms = 2});
}

/* Words that are their own flags, without any order between them; more launches than banks. */
Test(memory_order, of_sums_in_one_hop, .timeout = 600)
{
    for (uint32_t op = PRS_GEMM_REDUCE_SCATTER; op <= PRS_GEMM_ALLREDUCE; op += 2)
        ranks_assert_right(&(struct ranks_product){
            .shape = {op, 6, 264, 8, 1}, .tuning = {.path = PRS_GEMM_PATH_UNFUSED}, .world = 3, .epochs = 5, .sms = 4});
}
