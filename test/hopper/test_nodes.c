/* SPDX-License-Identifier: Apache-2.0 */
/* The fused kernels over several nodes: emulated GPUs, the real transport, and any verbs device (softnic in the suite).
 * A node here is a set of ranks that map each other's memory. */
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
#include "test/hopper/ranks.h"
#include "transport/util/clock.h"

struct row {
    uint32_t world, nodes, m, n, k, nk, epochs;
    struct prs_gemm_tuning tuning;
    uint32_t replays;
};

static void assert_rows_right(enum prs_gemm_op op, const struct row *rows, size_t count)
{
    for (size_t i = 0; i < count; i++)
        ranks_assert_right(&(struct ranks_product){.shape = {op, rows[i].m, rows[i].n, rows[i].k, rows[i].nk},
                                                   .tuning = rows[i].tuning,
                                                   .world = rows[i].world,
                                                   .nodes = rows[i].nodes,
                                                   .epochs = rows[i].epochs,
                                                   .replays = rows[i].replays});
}

/* 2 x 2 with tails, one GPU per node, three nodes; a signal for each piece, and one for a whole band. */
static const struct row rows[] = {
    {4, 2, 1024, 512, 192, 1, 3, {.band = 1}},
    {4, 2, 1632, 328, 136, 0, 2, {.tiles_per_signal = 1}},
    {2, 2, 1040, 264, 328, 1, 3, {.tiles_per_signal = 2}},
    {6, 3, 1536, 264, 72, 0, 2, {.tiles_per_signal = 1000}},
    {3, 3, 816, 520, 72, 1, 2},
};

Test(nodes, reduce_scatter_is_right, .timeout = 900)
{
    ranks_need_a_device();
    assert_rows_right(PRS_GEMM_REDUCE_SCATTER, rows, sizeof(rows) / sizeof(*rows));
}

/* As in test_fused.c: a rank that held back a tile which another waits for would make them wait in a circle. */
Test(nodes, reduce_scatter_is_right_with_long_k, .timeout = 900)
{
    static const struct row row = {4, 2, 2048, 512, 320, 1, 2, {.band = 1, .clusters = 1}};
    ranks_need_a_device();
    assert_rows_right(PRS_GEMM_REDUCE_SCATTER, &row, 1);
}

Test(nodes, allgather_is_right, .timeout = 900)
{
    ranks_need_a_device();
    assert_rows_right(PRS_GEMM_ALLGATHER, rows, sizeof(rows) / sizeof(*rows));
}

Test(nodes, allreduce_is_right, .timeout = 900)
{
    ranks_need_a_device();
    assert_rows_right(PRS_GEMM_ALLREDUCE, rows, sizeof(rows) / sizeof(*rows));
}

Test(nodes, rows_of_all_nodes_are_kept, .timeout = 900)
{
    struct ranks_product p = {.shape = {PRS_GEMM_ALLGATHER, 1632, 328, 136, 1},
                              .tuning = {.band = 1},
                              .world = 4,
                              .nodes = 2,
                              .keeps = true,
                              .epochs = 2};
    ranks_need_a_device();
    ranks_assert_right(&p);
    p.tuning.path = PRS_GEMM_PATH_UNFUSED;
    ranks_assert_right(&p);
}

/* The sums that travel have twice the columns of the result that travels back. */
Test(nodes, a_gated_allreduce_is_right, .timeout = 900)
{
    ranks_need_a_device();
    ranks_assert_right(
        &(struct ranks_product){.shape = {PRS_GEMM_ALLREDUCE, 1632, 656, 136, 1, PRS_ACTIVATION_SILU, .gated = 1},
                                .world = 4,
                                .nodes = 2,
                                .bias = true,
                                .epochs = 2});
}

Test(nodes, fp16_products_are_right, .timeout = 900)
{
    for (enum prs_gemm_op op = PRS_GEMM_REDUCE_SCATTER; op <= PRS_GEMM_ALLREDUCE; op++)
        for (uint32_t nk = 0; nk < 2; nk++) {
            struct ranks_product p = {
                .shape = {op, 816, 264, 72, nk, .dtype = PRS_DTYPE_FP16}, .world = 4, .nodes = 2, .epochs = 2};
            ranks_need_a_device();
            ranks_assert_right(&p);
            p.tuning.path = PRS_GEMM_PATH_UNFUSED;
            p.shape.n = 37;
            ranks_assert_right(&p);
        }
}

/* One resident cluster does all work, forwarding included, whatever the number of rows of each launch. */
static void assert_one_cluster_is_enough(enum prs_gemm_op op)
{
    static const uint32_t ROWS[] = {1024, 4, 516, 640, 256, 1024};
    ranks_need_a_device();
    hopper_limit_clusters(1);
    ranks_assert_right(&(struct ranks_product){.shape = {op, 1024, 520, 328, 1},
                                               .tuning = {.band = 1, .tiles_per_signal = 2},
                                               .world = 4,
                                               .nodes = 2,
                                               .sms = 16,
                                               .epochs = 6,
                                               .rows = ROWS});
}

Test(nodes, reduce_scatter_needs_one_resident_cluster, .timeout = 900)
{
    assert_one_cluster_is_enough(PRS_GEMM_REDUCE_SCATTER);
}

Test(nodes, allgather_needs_one_resident_cluster, .timeout = 900)
{
    assert_one_cluster_is_enough(PRS_GEMM_ALLGATHER);
}

Test(nodes, allreduce_needs_one_resident_cluster, .timeout = 900)
{
    assert_one_cluster_is_enough(PRS_GEMM_ALLREDUCE);
}

/* ---- the unfused path ---- */
/* Rows that are no multiple of 16 bytes; one GPU per node, three nodes, a captured graph. */
static const struct row odd_rows[] = {
    {4, 2, 148, 103, 51, 1, 4, {.path = PRS_GEMM_PATH_UNFUSED}},
    {4, 2, 64, 64, 36, 0, 3, {.path = PRS_GEMM_PATH_UNFUSED}},
    {2, 2, 70, 37, 40, 1, 3, {.path = PRS_GEMM_PATH_UNFUSED}},
    {6, 3, 66, 41, 24, 0, 3, {.path = PRS_GEMM_PATH_UNFUSED}},
    {4, 2, 60, 35, 24, 1, 2, {.path = PRS_GEMM_PATH_UNFUSED}, 4},
};

Test(nodes, unfused_reduce_scatter_is_right, .timeout = 900)
{
    ranks_need_a_device();
    assert_rows_right(PRS_GEMM_REDUCE_SCATTER, odd_rows, sizeof(odd_rows) / sizeof(*odd_rows));
}

Test(nodes, unfused_allgather_is_right, .timeout = 900)
{
    ranks_need_a_device();
    assert_rows_right(PRS_GEMM_ALLGATHER, odd_rows, sizeof(odd_rows) / sizeof(*odd_rows));
}

/* Also m that the number of ranks does not divide, and ranks with nothing to add up. */
Test(nodes, unfused_allreduce_is_right, .timeout = 900)
{
    static const struct row more[] = {
        {4, 2, 1003, 96, 24, 1, 3, {.path = PRS_GEMM_PATH_UNFUSED}},
        {4, 2, 1, 9, 8, 1, 3, {.path = PRS_GEMM_PATH_UNFUSED}},
        {6, 3, 65, 41, 24, 0, 3, {.path = PRS_GEMM_PATH_UNFUSED}},
    };
    ranks_need_a_device();
    assert_rows_right(PRS_GEMM_ALLREDUCE, more, sizeof(more) / sizeof(*more));
    assert_rows_right(PRS_GEMM_ALLREDUCE, odd_rows, sizeof(odd_rows) / sizeof(*odd_rows));
}

/* A fast product and slow sums: without credit, a fast rank would put the next launch's sums over the last launch's. */
Test(nodes, unfused_epochs_run_into_each_other, .timeout = 900)
{
    static const struct row many[] = {
        {4, 2, 400, 103, 1, 1, 12, {.path = PRS_GEMM_PATH_UNFUSED}},
        {2, 2, 400, 103, 1, 1, 12, {.path = PRS_GEMM_PATH_UNFUSED}},
    };
    ranks_need_a_device();
    assert_rows_right(PRS_GEMM_REDUCE_SCATTER, many, sizeof(many) / sizeof(*many));
    assert_rows_right(PRS_GEMM_ALLGATHER, many, sizeof(many) / sizeof(*many));
    assert_rows_right(PRS_GEMM_ALLREDUCE, many, sizeof(many) / sizeof(*many));
}

/* With fewer rows slices lie elsewhere: where in the last launch there was what a neighbour still adds up, or what the
 * network still reads. */
Test(nodes, unfused_launches_of_other_rows_run_into_each_other, .timeout = 900)
{
    static const uint32_t count[] = {1600, 16, 1600, 800, 16, 1600, 16, 1200, 8, 1600, 400, 16};
    static const uint32_t nodes[] = {2, 4};
    ranks_need_a_device();
    for (int i = 0; i < 2; i++)
        for (uint32_t op = PRS_GEMM_REDUCE_SCATTER; op <= PRS_GEMM_ALLREDUCE; op++)
            ranks_assert_right(&(struct ranks_product){.shape = {op, 1600, 104, 8, 1},
                                                       .tuning = {.path = PRS_GEMM_PATH_UNFUSED},
                                                       .world = 2 * nodes[i],
                                                       .nodes = nodes[i],
                                                       .epochs = sizeof(count) / sizeof(*count),
                                                       .rows = count});
}

/* Both kinds of kernels wait for one proxy, and hand on to each other when they last looked at its state. */
static void launch_both_paths(uint32_t rank, struct ranks_self *self, void *user)
{
    static const struct prs_gemm_shape shapes[] = {{PRS_GEMM_REDUCE_SCATTER, 1024, 256, 64, 1},
                                                   {PRS_GEMM_REDUCE_SCATTER, 1024, 255, 64, 1}}; /* unfused */
    struct prs_gemm_plan *plans[2];
    struct prs_fused_error error;
    struct prs_fused *ctx;
    void *a, *b, *c;

    cr_assert_eq(ranks_open(self, 2, RANKS_PATIENCE_MS, &ctx), 0);
    a = ranks_upload(1, 1024 * 64);
    b = ranks_upload(2, 256 * 64);
    cr_assert_eq(cudaMalloc(&c, 512 * 256 * 2), cudaSuccess);
    for (int i = 0; i < 2; i++)
        cr_assert_eq(prs_gemm_plan_open(ctx, &shapes[i], NULL, &plans[i]), 0);
    for (int i = 0; i < 4; i++)
        cr_assert_eq(prs_gemm_launch(plans[i % 2], &(struct prs_gemm_operands){a, b, c}, NULL), 0);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    ((int *)user)[rank] = prs_fused_poll_error(ctx, &error);
    for (int i = 0; i < 2; i++)
        prs_gemm_plan_close(plans[i]);
    prs_fused_close(ctx);
}

Test(nodes, fused_and_unfused_plans_share_a_proxy, .timeout = 300)
{
    int results[2] = {-1, -1};
    ranks_need_a_device();
    hopper_setup(2, 4, 0);
    ranks_run(2, launch_both_paths, results);
    cr_assert(results[0] == 0 && results[1] == 0, "%d %d", results[0], results[1]);
}

/* ---- a rail is lost ---- */
/* tools/dev/faults takes a rail away during the launches, and sets their number. */
static void assert_launches_go_on(enum prs_gemm_op op, enum prs_gemm_path path, uint32_t world, bool apart)
{
    const char *launches = getenv("PRS_TEST_LAUNCHES");
    if (apart)
        ranks_need_nodes(2);
    else
        ranks_need_a_device();
    ranks_assert_right(&(struct ranks_product){.shape = {op, 512, 264, 72, 1},
                                               .tuning = {.tiles_per_signal = 1, .path = path},
                                               .world = world,
                                               .nodes = 2,
                                               .apart = apart,
                                               .timeout_ms = 60000,
                                               .epochs = launches ? (uint32_t)atoi(launches) : 2});
}

Test(nodes, launches_of_allreduce_go_on, .timeout = 300)
{
    assert_launches_go_on(PRS_GEMM_ALLREDUCE, PRS_GEMM_PATH_AUTO, 2, false);
}

Test(nodes, launches_of_reduce_scatter_go_on, .timeout = 300)
{
    assert_launches_go_on(PRS_GEMM_REDUCE_SCATTER, PRS_GEMM_PATH_AUTO, 2, false);
}

Test(nodes, launches_of_unfused_allgather_go_on, .timeout = 300)
{
    assert_launches_go_on(PRS_GEMM_ALLGATHER, PRS_GEMM_PATH_UNFUSED, 2, false);
}

/* Two ranks of a node share its two rails. Each node has NICs of its own, so that a rail that stands by is always
 * there. */
Test(nodes, launches_over_a_rail_each_go_on, .timeout = 300)
{
    assert_launches_go_on(PRS_GEMM_ALLREDUCE, PRS_GEMM_PATH_AUTO, 4, true);
}

/* ---- closing ---- */
static void launch_and_close(uint32_t rank, struct ranks_self *self, void *user)
{
    static const struct prs_gemm_shape shape = {PRS_GEMM_REDUCE_SCATTER, 1024, 256, 64, 1};
    struct prs_gemm_plan *plan;
    struct prs_fused *ctx;
    uint64_t before_ns;
    void *a, *b, *c;

    cr_assert_eq(ranks_open(self, 2, RANKS_PATIENCE_MS, &ctx), 0);
    cr_assert_eq(prs_gemm_plan_open(ctx, &shape, NULL, &plan), 0);
    a = ranks_upload(1, 1024 * 64);
    b = ranks_upload(2, 256 * 64);
    cr_assert_eq(cudaMalloc(&c, 256 * 256 * 2), cudaSuccess);
    cr_assert_eq(prs_gemm_launch(plan, &(struct prs_gemm_operands){a, b, c}, NULL), 0);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    prs_gemm_plan_close(plan);
    before_ns = prs_clock_ns();
    prs_fused_close(ctx);
    ((uint64_t *)user)[rank] = prs_clock_ns() - before_ns;
}

/* The proxy of a rank that has settled must still confirm what others have sent. If it stopped, they would wait for the
 * limit of settling, 5 s. The best of three, since a busy machine may take long itself. */
Test(nodes, every_rank_settles_before_a_proxy_stops, .timeout = 300)
{
    uint64_t best_ms = UINT64_MAX;

    ranks_need_a_device();
    cr_assert_eq(setenv("PERSEUS_ORDER", "counted", 1), 0); /* whose signals the peer's process raises */
    for (int i = 0; i < 3; i++) {
        uint64_t took_ns[4], worst_ms = 0;

        hopper_setup(4, 4, 0);
        ranks_run(4, launch_and_close, took_ns);
        for (int rank = 0; rank < 4; rank++)
            worst_ms = took_ns[rank] / 1000000 > worst_ms ? took_ns[rank] / 1000000 : worst_ms;
        best_ms = worst_ms < best_ms ? worst_ms : best_ms;
    }
    cr_assert_lt(best_ms, 3000, "closing took %llu ms", (unsigned long long)best_ms);
}

/* ---- a rank that fails while a plan is opened ---- */
static __thread int copies_until_failure; /* counted per thread; 0: none fails */

cudaError_t __real_cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t s);
cudaError_t __wrap_cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t s);

/* The linker redirects every call of cudaMemcpyAsync() here. */
cudaError_t __wrap_cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t s)
{
    if (copies_until_failure > 0 && --copies_until_failure == 0)
        return cudaErrorIllegalAddress;
    return __real_cudaMemcpyAsync(to, from, bytes, kind, s);
}

static void open_with_a_failing_copy(uint32_t rank, struct ranks_self *self, void *user)
{
    static const struct prs_gemm_shape shape = {PRS_GEMM_ALLREDUCE, 1024, 256, 64, 1};
    struct prs_fused_config config = {rank, 2, (int)rank, RANKS_PATIENCE_MS, ranks_allgather, self, rank + 1};
    struct prs_gemm_plan *plan = NULL;
    struct prs_fused *ctx;
    int *result = user;
    (void)cudaSetDevice((int)rank);
    cr_assert_eq(prs_fused_open(&config, &ctx), 0);
    copies_until_failure = rank == 1;
    result[rank] = prs_gemm_plan_open(ctx, &shape, NULL, &plan);
    cr_assert_eq(copies_until_failure, 0, "nothing was copied: the test tests nothing");
    cr_assert_eq(prs_gemm_plan_open(ctx, &shape, NULL, &plan), 0, "rank %u, the second time: %s", rank,
                 prs_fused_error_text());
    prs_gemm_plan_close(plan);
    prs_fused_close(ctx);
}

/* The failing rank once left at this point, and the others waited for it in the next all-gather. */
Test(nodes, a_rank_that_cannot_tell_its_neighbours_of_its_alarm_tells_all, .timeout = 600)
{
    int result[2] = {0};
    ranks_need_a_device();
    hopper_setup(2, 4, 0);
    ranks_run(2, open_with_a_failing_copy, result);
    cr_assert(result[0] == -EIO && result[1] == -EIO, "%d and %d", result[0], result[1]);
}

/* A launch puts what the plan says, once. */
struct counted {
    struct prs_gemm_shape shape;
    struct prs_gemm_info info[4];
    struct prs_fused_traffic traffic[4];
};

static void count_traffic(uint32_t rank, struct ranks_self *self, void *user)
{
    struct counted *counted = user;
    const struct prs_gemm_shape *shape = &counted->shape;
    struct prs_gemm_tuning tuning = {.tiles_per_signal = 4, .band = 2};
    struct prs_fused *ctx;
    struct prs_gemm_plan *plan;
    void *a, *b, *c;
    cr_assert_eq(ranks_open(self, 2, 60000, &ctx), 0);
    cr_assert_eq(prs_gemm_plan_open(ctx, shape, &tuning, &plan), 0);
    prs_gemm_plan_query(plan, &counted->info[rank]);
    a = ranks_upload(1, (uint64_t)shape->m * shape->k);
    b = ranks_upload(2, (uint64_t)shape->n * shape->k);
    cr_assert_eq(prs_fused_alloc(ctx, (size_t)shape->m * shape->n * 2, &c), 0);
    if (shape->op == PRS_GEMM_REDUCE_SCATTER)
        cr_assert_eq(prs_gemm_launch(plan, &(struct prs_gemm_operands){a, b, c}, NULL), 0);
    else if (shape->op == PRS_GEMM_ALLGATHER)
        cr_assert_eq(prs_gemm_launch(plan, &(struct prs_gemm_operands){a, b, c}, NULL), 0);
    else
        cr_assert_eq(prs_gemm_launch(plan, &(struct prs_gemm_operands){a, b, c}, NULL), 0);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    prs_network_settle(ctx->network); /* the last signals of an unfused launch */
    prs_fused_traffic(ctx, &counted->traffic[rank]);
    cr_assert_eq(prs_fused_free(ctx, c), 0);
    prs_gemm_plan_close(plan);
    prs_fused_close(ctx);
}

Test(nodes, partial_sums_cross_once_with_a_put_and_a_signal_a_group, .timeout = 600)
{
    struct counted counted = {.shape = {PRS_GEMM_REDUCE_SCATTER, 4096, 512, 64, 1}};
    ranks_need_a_device();
    hopper_setup(4, 4, 0);
    ranks_run(4, count_traffic, &counted);
    for (int rank = 0; rank < 4; rank++) { /* 1024 x 512: 8 x 2 tiles, in bands of 4 x 2 */
        cr_assert_eq(counted.traffic[rank].nodes, 2);
        cr_assert_eq(counted.traffic[rank].puts, 4);
        cr_assert_eq(counted.traffic[rank].signals, 4);
        cr_assert_eq(counted.info[rank].far_bytes, 1024 * 512 * 2);
    }
}

/* Two nodes, each of which has two rails. */
static void assert_rails(uint32_t ranks, uint32_t each)
{
    struct counted counted = {.shape = {PRS_GEMM_REDUCE_SCATTER, 1024, 512, 64, 1}};
    ranks_need_a_device();
    hopper_setup(ranks, 4, 0);
    ranks_run(ranks, count_traffic, &counted);
    for (uint32_t rank = 0; rank < ranks; rank++)
        cr_assert_eq(counted.traffic[rank].rails, each, "rank %u: %u", rank, counted.traffic[rank].rails);
}

Test(nodes, a_rank_alone_on_its_node_has_all_its_rails, .timeout = 600)
{
    assert_rails(2, 2);
}

Test(nodes, ranks_of_a_node_share_its_rails, .timeout = 600)
{
    assert_rails(4, 1);
}

static void open_and_look_for_connections(uint32_t rank, struct ranks_self *self, void *user)
{
    uint32_t *connected = user;
    struct prs_fused *ctx;

    cr_assert_eq(ranks_open(self, 2, RANKS_PATIENCE_MS, &ctx), 0);
    for (uint32_t other = 0; other < 4; other++)
        if (other != rank && prs_team_rank_info(ctx->network->team, 0, other))
            connected[rank] |= 1u << other;
    prs_fused_close(ctx);
}

/* Ranks of a node map each other's memory. A connection between them would be one more cause of failure: it fails when
 * both its ends lose the NIC by which they reach each other. */
Test(nodes, ranks_of_a_node_have_no_connection, .timeout = 600)
{
    uint32_t connected[4] = {0};

    ranks_need_a_device();
    hopper_setup(4, 4, 0);
    ranks_run(4, open_and_look_for_connections, connected);
    for (int rank = 0; rank < 4; rank++)
        cr_assert_eq(connected[rank], rank < 2 ? 0xcu : 0x3u, "rank %d: %#x", rank, connected[rank]);
}

/* To each counterpart go one put of sums, one put of rows, and a signal for each; or a credit if there are no rows to
 * put. */
Test(nodes, unfused_a_share_crosses_once_with_a_put_and_a_signal_each_way, .timeout = 600)
{
    static const struct {
        struct prs_gemm_shape shape;
        uint64_t puts, bytes;
    } odd[] = {
        {{PRS_GEMM_REDUCE_SCATTER, 400, 33, 24, 1}, 1, 100 * 33 * 2},
        {{PRS_GEMM_ALLGATHER, 400, 33, 24, 1}, 1, 100 * 24 * 2},
        {{PRS_GEMM_ALLREDUCE, 402, 32, 24, 1}, 2, 2 * 402 * 32 * 2 / 4},
    };
    ranks_need_a_device();
    hopper_setup(4, 4, 0);
    for (size_t i = 0; i < sizeof(odd) / sizeof(*odd); i++) {
        struct counted counted = {.shape = odd[i].shape};
        ranks_run(4, count_traffic, &counted);
        for (int rank = 0; rank < 4; rank++) {
            const struct prs_gemm_info *info = &counted.info[rank];
            cr_assert_eq(info->tuning.path, PRS_GEMM_PATH_UNFUSED);
            cr_assert(strstr(info->reason, "multiple of 16 bytes") || strstr(info->reason, "divide m"), "%s",
                      info->reason);
            cr_assert_eq(counted.traffic[rank].puts, odd[i].puts);
            cr_assert_eq(counted.traffic[rank].signals, 2);
            cr_assert_eq(info->far_bytes, odd[i].bytes);
            cr_assert_eq(counted.traffic[rank].bytes, odd[i].bytes, "%llu",
                         (unsigned long long)counted.traffic[rank].bytes);
        }
    }
}
