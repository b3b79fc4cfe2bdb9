/* SPDX-License-Identifier: Apache-2.0 */
/* The fused kernels over several nodes, where ranks do not launch, the network fails, or a command never ends. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fused/core/context.h"
#include "fused/core/network.h"
#include "tools/hopper/hopper.h"
#include "test/hopper/lose_queues.h"
#include "test/hopper/ranks.h"

static const struct prs_gemm_shape sums[] = {{PRS_GEMM_REDUCE_SCATTER, 1024, 256, 64, 1},
                                             {PRS_GEMM_REDUCE_SCATTER, 1024, 255, 64, 1}}; /* unfused */

struct lost {
    struct prs_gemm_shape shape;
    uint32_t first;      /* this rank and all after it do not launch */
    bool zero_later;     /* rank 0 launches after the launches of the others have ended */
    uint32_t no_network; /* rank 0 loses its queues to this rank; 0: to none */
    bool unfinished;     /* rank 0 has claimed a command that it never writes */
    uint32_t timeout_ms;
    int result[4];
    struct prs_fused_error error[4];
};

/* Ranks from lost->first on open everything and launch nothing. */
static void launch_unless_lost(uint32_t rank, struct ranks_self *self, void *user)
{
    struct lost *lost = user;
    struct prs_fused *ctx;
    struct prs_gemm_plan *plan;
    uint32_t ranks[4];
    uint64_t claimed;
    void *a, *b, *c;
    cr_assert_eq(ranks_open(self, 2, lost->timeout_ms ? lost->timeout_ms : RANKS_PATIENCE_MS, &ctx), 0);
    cr_assert_eq(prs_gemm_plan_open(ctx, &lost->shape, NULL, &plan), 0);
    a = ranks_upload(1, (uint64_t)lost->shape.m * lost->shape.k);
    b = ranks_upload(2, (uint64_t)lost->shape.n * lost->shape.k);
    cr_assert_eq(cudaMalloc(&c, lost->shape.m / 4 * lost->shape.n * 2), cudaSuccess);
    if (rank == 0 && lost->zero_later)
        (void)ranks_allgather(self, &rank, ranks, sizeof(rank));
    if (rank == 0 && lost->unfinished)
        cr_assert_eq(prs_ring_claim(&ctx->network->device, 1, &claimed), 0);
    if (rank < lost->first)
        cr_assert_eq(prs_gemm_launch(plan, &(struct prs_gemm_operands){a, b, c}, NULL), 0);
    if (lost->no_network)
        (void)ranks_allgather(self, &rank, ranks, sizeof(rank)); /* later launches would be refused */
    if (rank == 0 && lost->no_network)
        lose_queues(ctx, lost->no_network);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    if (rank != 0 && lost->zero_later)
        (void)ranks_allgather(self, &rank, ranks, sizeof(rank));
    lost->result[rank] = prs_fused_poll_error(ctx, &lost->error[rank]);
    (void)ranks_allgather(self, &rank, ranks, sizeof(rank)); /* until then the lost ranks keep their connections */
    prs_fused_abort(ctx); /* ranks that have seen no error would wait for the others to close */
    prs_gemm_plan_close(plan);
    prs_fused_close(ctx);
}

Test(nodes, a_lost_node_is_named_by_its_counterparts, .timeout = 600)
{
    char want[64];
    ranks_need_a_device();
    hopper_setup(4, 4, 0);
    hopper_forgive_late_writes();
    for (size_t i = 0; i < 2; i++) {
        struct lost lost = {.shape = sums[i], .first = 2};
        ranks_run(4, launch_unless_lost, &lost);
        for (int rank = 0; rank < 2; rank++) {
            (void)snprintf(want, sizeof(want), "for partial sums of rank %d: flag ", rank + 2);
            cr_assert_eq(lost.result[rank], -ETIMEDOUT, "rank %d: %d", rank, lost.result[rank]);
            cr_assert_not_null(strstr(lost.error[rank].text, want), "%s", lost.error[rank].text);
        }
        cr_assert_eq(lost.result[2], 0);
    }
}

/* The neighbour of the lost rank gives up first. Its sums would be wrong, so it does not send them, and its counterpart
 * fails too instead of using them. */
Test(nodes, sums_without_a_lost_rank_are_not_sent, .timeout = 600)
{
    ranks_need_a_device();
    hopper_setup(4, 4, 0);
    hopper_forgive_late_writes();
    for (size_t i = 0; i < 2; i++) {
        struct lost lost = {.shape = sums[i], .first = 3, .zero_later = true};
        ranks_run(4, launch_unless_lost, &lost);
        for (int rank = 0; rank < 3; rank++)
            cr_assert_eq(lost.result[rank], -ETIMEDOUT, "rank %d: %d", rank, lost.result[rank]);
        cr_assert_not_null(strstr(lost.error[0].text, "for partial sums of rank 2: flag "), "%s", lost.error[0].text);
        if (i == 0)
            continue; /* ranks 1 and 2 wait for two ranks, and may name either */
        cr_assert_not_null(strstr(lost.error[1].text, "for its arrival of rank 0: flag "), "%s", lost.error[1].text);
        cr_assert_not_null(strstr(lost.error[2].text, "for its arrival of rank 3: flag "), "%s", lost.error[2].text);
    }
}

/* What the network has lost never comes, so nobody waits for it until the limit: neither the rank whose network failed
 * nor those of its node. */
Test(nodes, a_failed_network_ends_waits_long_before_their_limit, .timeout = 600)
{
    ranks_need_a_device();
    hopper_setup(4, 4, 0);
    hopper_forgive_late_writes();
    for (size_t i = 0; i < 2; i++) {
        struct lost lost = {.shape = sums[i], .first = 2, .no_network = 2, .timeout_ms = 3600000};

        ranks_run(4, launch_unless_lost, &lost);
        cr_assert(lost.result[0] < 0 && lost.result[0] != -ETIMEDOUT && lost.result[0] != -ECANCELED, "%d: %s",
                  lost.result[0], lost.error[0].text);
        cr_assert(strstr(lost.error[0].text, "rank 0 gave up waiting for ") &&
                      /* that to rank 2 was ended; over SRD, the one to rank 3 may share its queue pair */
                      (strstr(lost.error[0].text, "the network between nodes failed: rank 0 to rank ") ||
                       /* a request that could not be posted: it says where to */
                       strstr(lost.error[0].text, "the network between nodes failed: posting 1 request")),
                  "%s", lost.error[0].text);
        /* told by its neighbour, or, on a slow machine, by another rank */
        cr_assert(lost.result[1] == -ECANCELED || strstr(lost.error[1].text, " has lost rank "), "%d: %s",
                  lost.result[1], lost.error[1].text);
    }
}

/* Rank 2 waits for its neighbour and has nothing in flight, so its own queues cannot tell. */
Test(nodes, a_failed_network_ends_waits_on_the_other_node, .timeout = 600)
{
    ranks_need_a_device();
    hopper_setup(4, 4, 0);
    hopper_forgive_late_writes();
    for (size_t i = 0; i < 2; i++) {
        struct lost lost = {.shape = sums[i], .first = 3, .no_network = 2, .timeout_ms = 3600000};

        ranks_run(4, launch_unless_lost, &lost);
        cr_assert(lost.result[2] < 0 && lost.result[2] != -ETIMEDOUT && lost.result[2] != -ECANCELED, "%d: %s",
                  lost.result[2], lost.error[2].text);
        cr_assert(strstr(lost.error[2].text, "rank 2 gave up waiting for ") &&
                      strstr(lost.error[2].text, "the network between nodes failed: rank 2 to rank 0, context 0: ") &&
                      strstr(lost.error[2].text, " has lost rank "), /* 2; over SRD, perhaps 3 */
                  "%s", lost.error[2].text);
    }
}

/* The error says what the proxy did not finish: the position of the command, and how far it has come. */
Test(nodes, a_command_that_never_ends_is_named, .timeout = 600)
{
    ranks_need_a_device();
    hopper_setup(4, 4, 0);
    hopper_forgive_late_writes();
    for (size_t i = 0; i < 2; i++) {
        struct lost lost = {.shape = sums[i], .first = 4, .unfinished = true, .timeout_ms = 2000};
        ranks_run(4, launch_unless_lost, &lost);
        cr_assert_eq(lost.result[0], -ETIMEDOUT, "%d: %s", lost.result[0], lost.error[0].text);
        cr_assert_not_null(strstr(lost.error[0].text, "the proxy of rank 0 did not take or finish"), "%s",
                           lost.error[0].text);
        cr_assert_not_null(strstr(lost.error[0].text, "within 2000 ms: the device timed out; block "), "%s",
                           lost.error[0].text);
        cr_assert_not_null(strstr(lost.error[0].text, "waited for completion of position 0x"), "%s",
                           lost.error[0].text);
        cr_assert_not_null(strstr(lost.error[0].text, "of its commands 0 were taken and 0 finished"), "%s",
                           lost.error[0].text);
    }
}

/* A rank that is alone on its node, where no NIC can be used. */
static void open_without_a_device(uint32_t rank, struct ranks_self *self, void *user)
{
    struct prs_fused *ctx;
    ((int *)user)[rank] = ranks_open(self, 2, RANKS_PATIENCE_MS, &ctx);
}

Test(nodes, without_an_rdma_device_opening_says_no_device, .timeout = 600)
{
    int result[2] = {0};
    setenv("NCCL_IB_HCA", "=no_such_device", 1);
    hopper_setup(2, 4, 0);
    ranks_run(2, open_without_a_device, result);
    cr_assert(result[0] == -ENODEV && result[1] == -ENODEV, "%d and %d", result[0], result[1]);
}
