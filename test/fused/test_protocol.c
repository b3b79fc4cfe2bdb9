/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels' protocol on threads, through hundreds of launches: see model.h. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "test/fused/model.h"

/* A run begins with op, nodes, m, n and k. */
static void run_epochs(const struct model_run *shape, uint32_t epochs)
{
    struct model_run run = *shape;
    struct model *m;
    run.epochs = epochs;
    m = model_run(&run);
    cr_assert_eq(watch_load(&m->watch.failed), 0, "%s", m->watch.text);
    for (uint32_t r = 0; r < WORLD; r++)
        cr_assert_eq(m->ranks[r].epoch, FIRST_EPOCH + epochs, "rank %u stopped at epoch %u", r, m->ranks[r].epoch);
    if (run.nodes > 1)
        cr_assert(m->ranks[0].nic.puts > 0 && m->ranks[0].nic.signals > 0, "nothing went to other nodes");
    model_close(m);
}

static void run_soundly(const struct model_run *shape)
{
    run_epochs(shape, MODEL_LAUNCHES);
}

Test(protocol, reduce_scatter_adds_every_partial_of_its_own_epoch, .timeout = 600)
{
    run_soundly(&(struct model_run){PRS_GEMM_REDUCE_SCATTER, 1, WORLD * 768, 256, 64, .band = 1});
}

Test(protocol, reduce_scatter_with_a_short_last_band, .timeout = 600)
{
    run_soundly(&(struct model_run){PRS_GEMM_REDUCE_SCATTER, 1, WORLD * 700, 300, 64, .band = 2});
}

Test(protocol, allreduce_ends_only_when_all_blocks_have_come, .timeout = 600)
{
    run_soundly(&(struct model_run){PRS_GEMM_ALLREDUCE, 1, WORLD * 512, 256, 64, .band = 1});
}

Test(protocol, pushed_rows_are_read_in_their_own_epoch, .timeout = 600)
{
    run_soundly(&(struct model_run){PRS_GEMM_ALLGATHER, 1, WORLD * 300, 256, 320, .band = 1});
}

Test(protocol, copied_rows_are_not_overwritten_before_all_have_read_them, .timeout = 600)
{
    run_soundly(&(struct model_run){PRS_GEMM_ALLGATHER, 1, WORLD * 300, 256, 320, .band = 1, .segments = 2});
}

Test(protocol, nodes_reduce_scatter_relays_sums_of_its_own_epoch, .timeout = 600)
{
    run_soundly(&(struct model_run){PRS_GEMM_REDUCE_SCATTER, 2, WORLD * 768, 256, 64, .band = 1});
}

Test(protocol, nodes_reduce_scatter_with_a_signal_for_many_tiles, .timeout = 600)
{
    run_soundly(&(struct model_run){PRS_GEMM_REDUCE_SCATTER, 2, WORLD * 700, 700, 64, .band = 2, .group = 5});
}

Test(protocol, nodes_of_one_gpu_reduce_scatter, .timeout = 600)
{
    run_soundly(&(struct model_run){PRS_GEMM_REDUCE_SCATTER, 4, WORLD * 512, 256, 64, .band = 1, .group = 2});
}

Test(protocol, nodes_allreduce_ends_only_when_rows_of_all_nodes_have_come, .timeout = 600)
{
    /* The second tile of the last pair has no rows. */
    run_soundly(&(struct model_run){PRS_GEMM_ALLREDUCE, 2, WORLD * 384, 512, 64, .band = 1, .group = 2});
}

Test(protocol, nodes_forwarded_rows_are_read_in_their_own_epoch, .timeout = 600)
{
    run_soundly(&(struct model_run){PRS_GEMM_ALLGATHER, 2, WORLD * 300, 256, 640, .band = 1, .group = 2});
}

Test(protocol, nodes_of_one_gpu_gather, .timeout = 600)
{
    run_soundly(&(struct model_run){PRS_GEMM_ALLGATHER, 4, WORLD * 300, 256, 320, .band = 1, .group = 3});
}

/* ---- few resident clusters, any number of rows ---- */
/* Any number of clusters at a time completes all work, even one, since other kernels may hold the other SMs. */
static void run_with_few_clusters(const struct model_run *shape)
{
    for (uint32_t resident = 1; resident < CLUSTERS; resident++) {
        struct model_run run = *shape;
        run.resident = resident;
        run.any_rows = resident == 1;
        run_epochs(&run, MODEL_LAUNCHES / 10);
    }
}

Test(protocol, one_resident_cluster_reduces, .timeout = 600)
{
    run_with_few_clusters(&(struct model_run){PRS_GEMM_REDUCE_SCATTER, 1, WORLD * 768, 256, 64, .band = 1});
}

Test(protocol, one_resident_cluster_reduces_for_all, .timeout = 600)
{
    run_with_few_clusters(&(struct model_run){PRS_GEMM_ALLREDUCE, 1, WORLD * 512, 256, 64, .band = 1});
}

Test(protocol, one_resident_cluster_gathers, .timeout = 600)
{
    run_with_few_clusters(&(struct model_run){PRS_GEMM_ALLGATHER, 1, WORLD * 300, 256, 320, .band = 1});
}

Test(protocol, one_resident_cluster_gathers_what_is_copied, .timeout = 600)
{
    run_with_few_clusters(&(struct model_run){PRS_GEMM_ALLGATHER, 1, WORLD * 300, 256, 320, .band = 1, .segments = 2});
}

Test(protocol, nodes_one_resident_cluster_reduces, .timeout = 600)
{
    run_with_few_clusters(&(struct model_run){PRS_GEMM_REDUCE_SCATTER, 2, WORLD * 700, 700, 64, .band = 2, .group = 5});
}

Test(protocol, nodes_one_resident_cluster_reduces_for_all, .timeout = 600)
{
    run_with_few_clusters(&(struct model_run){PRS_GEMM_ALLREDUCE, 2, WORLD * 384, 512, 64, .band = 1, .group = 2});
}

Test(protocol, nodes_one_resident_cluster_gathers, .timeout = 600)
{
    run_with_few_clusters(&(struct model_run){PRS_GEMM_ALLGATHER, 2, WORLD * 300, 256, 640, .band = 1, .group = 2});
}

/* The ranks of one node stop between two launches: every waiting thread reports the flag and the rank that it waits
 * for, and all end. */
static void lose_a_node(uint32_t op)
{
    unsigned waits, awaited;
    struct model *m =
        model_run(&(struct model_run){op, 2, WORLD * 512, 256, 64, .band = 1, .epochs = 100, .lost_after = 20});
    cr_assert_eq(watch_load(&m->watch.failed), 2);
    cr_assert_eq(sscanf(m->watch.text, "rank %u: %*[^0-9] %*u of rank %u:", &waits, &awaited), 2, "%s", m->watch.text);
    /* The awaited rank is the lost one, or its neighbour, which waits for the lost node and so sends nothing. */
    cr_assert(waits < 2 && awaited != waits, "%s", m->watch.text);
    for (uint32_t r = 0; r < WORLD; r++)
        cr_assert_leq(m->ranks[r].epoch - FIRST_EPOCH, 21, "rank %u went on to epoch %u", r, m->ranks[r].epoch);
    model_close(m);
}

Test(protocol, a_lost_node_is_named_by_whoever_waits_for_its_sums, .timeout = 300)
{
    lose_a_node(PRS_GEMM_REDUCE_SCATTER);
}

Test(protocol, a_lost_node_is_named_by_whoever_waits_for_its_rows, .timeout = 300)
{
    lose_a_node(PRS_GEMM_ALLGATHER);
}
