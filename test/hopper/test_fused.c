/* SPDX-License-Identifier: Apache-2.0 */
/* The fused GEMM kernels and the unfused path on emulated GPUs. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/hopper/hopper.h"
#include "test/hopper/ranks.h"

struct row {
    enum prs_gemm_op op;
    uint32_t world, m, n, k, nk, epochs;
    struct prs_gemm_tuning tuning;
};

static void assert_rows_right(const struct row *rows, size_t count)
{
    for (size_t i = 0; i < count; i++)
        ranks_assert_right(&(struct ranks_product){.shape = {rows[i].op, rows[i].m, rows[i].n, rows[i].k, rows[i].nk},
                                                   .tuning = rows[i].tuning,
                                                   .world = rows[i].world,
                                                   .epochs = rows[i].epochs});
}

Test(hopper, a_product_alone_is_right, .timeout = 900)
{
    static const struct row rows[] = {
        {PRS_GEMM_ALONE, 1, 512, 1024, 512, 1}, {PRS_GEMM_ALONE, 1, 512, 1024, 512, 0},
        {PRS_GEMM_ALONE, 1, 200, 328, 136, 1}, /* tails in m, n and k */
        {PRS_GEMM_ALONE, 1, 200, 328, 136, 0},  {PRS_GEMM_ALONE, 1, 8, 8, 8, 1},
    };
    assert_rows_right(rows, sizeof(rows) / sizeof(*rows));
}

/* Each operand maps the memory of every peer, so without care peer access would be enabled again and again. */
Test(hopper, access_to_a_peer_is_asked_for_once, .timeout = 900)
{
    static const struct row rows[] = {{PRS_GEMM_ALLGATHER, 3, 768, 256, 128, 1},
                                      {PRS_GEMM_REDUCE_SCATTER, 3, 768, 256, 128, 1}};
    assert_rows_right(rows, sizeof(rows) / sizeof(*rows));
    cr_assert_eq(hopper_repeated_access(), 0, "%u times it was there already", hopper_repeated_access());
}

/* One rank alone, full tiles, tails in m, n and k, more epochs than buffers, both layouts of B. */
static void assert_collective_right(enum prs_gemm_op op, struct prs_gemm_tuning tuning)
{
    struct prs_gemm_tuning bursts = tuning;
    bursts.paced = PRS_GEMM_UNPACED, bursts.spread = 1;
    const struct row rows[] = {
        {op, 1, 256, 256, 128, 1, 0, tuning},  {op, 2, 512, 512, 128, 1, 3, tuning},
        {op, 2, 1040, 264, 72, 0, 2, tuning},  {op, 4, 1024, 512, 192, 1, 2, bursts},
        {op, 4, 1632, 328, 136, 0, 2, tuning},
    };
    assert_rows_right(rows, sizeof(rows) / sizeof(*rows));
}

Test(hopper, reduce_scatter_is_right, .timeout = 600)
{
    assert_collective_right(PRS_GEMM_REDUCE_SCATTER, (struct prs_gemm_tuning){0});
}

Test(hopper, allgather_is_right, .timeout = 600)
{
    assert_collective_right(PRS_GEMM_ALLGATHER, (struct prs_gemm_tuning){.mover = PRS_MOVED_BY_CTAS});
}

Test(hopper, allreduce_is_right, .timeout = 600)
{
    assert_collective_right(PRS_GEMM_ALLREDUCE, (struct prs_gemm_tuning){0});
}

Test(hopper, allgather_by_copy_engine_is_right, .timeout = 600)
{
    static const struct row rows[] = {
        {PRS_GEMM_ALLGATHER, 2, 1024, 264, 128, 1, 3, {.mover = PRS_MOVED_BY_COPY_ENGINES, .band = 1}},
        {PRS_GEMM_ALLGATHER, 4, 1632, 328, 264, 0, 2, {.mover = PRS_MOVED_BY_COPY_ENGINES, .segments = 2}},
        {PRS_GEMM_ALLGATHER, 3, 1536, 264, 328, 1, 3, {.mover = PRS_MOVED_BY_COPY_ENGINES, .band = 1, .segments = 2}},
        /* pieces as the plan chooses them */
        {PRS_GEMM_ALLGATHER, 4, 1632, 328, 136, 0, 2, {.mover = PRS_MOVED_BY_COPY_ENGINES}},
    };
    assert_rows_right(rows, sizeof(rows) / sizeof(*rows));
    /* one piece per K step */
    assert_collective_right(PRS_GEMM_ALLGATHER,
                            (struct prs_gemm_tuning){.mover = PRS_MOVED_BY_COPY_ENGINES, .segments = 4});
}

/* With CUDA_LAUNCH_BLOCKING a launch returns when its kernel has ended, and the kernel needs copies of other ranks. */
Test(hopper, launches_that_block_find_all_copies_enqueued, .timeout = 600)
{
    setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
    ranks_assert_right(&(struct ranks_product){.shape = {PRS_GEMM_ALLGATHER, 1024, 264, 128, 1},
                                               .tuning = {.mover = PRS_MOVED_BY_COPY_ENGINES},
                                               .world = 2,
                                               .epochs = 3,
                                               .timeout_ms = RANKS_PATIENCE_MS});
}

/* With one hardware queue, copies after a kernel would wait for all its CTAs to start, and those for the copies. */
Test(hopper, copies_pass_through_one_hardware_queue, .timeout = 600)
{
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
    hopper_limit_clusters(1);
    ranks_assert_right(&(struct ranks_product){.shape = {PRS_GEMM_ALLGATHER, 1024, 520, 128, 1},
                                               .tuning = {.mover = PRS_MOVED_BY_COPY_ENGINES},
                                               .world = 2,
                                               .sms = 16,
                                               .epochs = 3,
                                               .timeout_ms = RANKS_PATIENCE_MS});
}

/* More K steps than stages: a rank that held back a tile which another waits for would make them wait in a circle. */
Test(hopper, reduce_scatter_is_right_with_long_k, .timeout = 600)
{
    static const struct row rows[] = {
        {PRS_GEMM_REDUCE_SCATTER, 2, 1024, 512, 320, 1, 2, {.band = 1, .clusters = 1}},
        {PRS_GEMM_ALLREDUCE, 4, 2048, 256, 320, 1, 2, {.band = 1, .clusters = 1}},
    };
    assert_rows_right(rows, sizeof(rows) / sizeof(*rows));
}

/* Many small launches, so that a fast rank is an epoch ahead of a slow one. */
Test(hopper, epochs_run_into_each_other, .timeout = 600)
{
    static const struct row rows[] = {
        {PRS_GEMM_REDUCE_SCATTER, 4, 1024, 256, 64, 1, 10},
        {PRS_GEMM_ALLGATHER, 4, 1024, 256, 64, 1, 10, {.mover = PRS_MOVED_BY_CTAS}},
        {PRS_GEMM_ALLGATHER, 4, 1024, 256, 64, 1, 10, {.mover = PRS_MOVED_BY_COPY_ENGINES}},
        {PRS_GEMM_ALLREDUCE, 4, 1024, 256, 64, 1, 10},
    };
    assert_rows_right(rows, sizeof(rows) / sizeof(*rows));
}

/* An all-gather by copy engines forks to other streams inside the graph. */
Test(hopper, a_captured_graph_may_be_replayed, .timeout = 600)
{
    static const struct ranks_product products[] = {
        {.shape = {PRS_GEMM_ALLREDUCE, 512, 256, 64, 1}, .world = 2, .epochs = 2, .replays = 3},
        {.shape = {PRS_GEMM_ALLGATHER, 1024, 264, 128, 1},
         .tuning = {.mover = 1, .band = 1},
         .world = 2,
         .epochs = 2,
         .replays = 3},
    };
    ranks_assert_right(&products[0]);
    ranks_assert_right(&products[1]);
}

/* ---- few resident clusters ---- */
/* Something else may hold SMs, and wait for other ranks: any number of resident clusters must make progress. */
static void assert_progress(enum prs_gemm_op op, enum prs_mover mover)
{
    static const uint32_t RESIDENT[] = {1, 3};
    for (uint32_t i = 0; i < 2; i++) {
        hopper_limit_clusters(RESIDENT[i]);
        ranks_assert_right(&(struct ranks_product){.shape = {op, 3072, 520, 72, 1},
                                                   .tuning = {.mover = mover, .band = 1},
                                                   .world = 3,
                                                   .sms = 16,
                                                   .epochs = 2,
                                                   .timeout_ms = RANKS_PATIENCE_MS});
    }
}

Test(hopper, a_product_alone_needs_one_resident_cluster, .timeout = 600)
{
    hopper_limit_clusters(1);
    ranks_assert_right(&(struct ranks_product){.shape = {PRS_GEMM_ALONE, 512, 1024, 72, 1}, .world = 1, .sms = 16});
}

Test(hopper, reduce_scatter_needs_one_resident_cluster, .timeout = 600)
{
    assert_progress(PRS_GEMM_REDUCE_SCATTER, 0);
}

Test(hopper, allgather_needs_one_resident_cluster, .timeout = 600)
{
    assert_progress(PRS_GEMM_ALLGATHER, PRS_MOVED_BY_CTAS);
}

Test(hopper, allgather_by_copy_engine_needs_one_resident_cluster, .timeout = 600)
{
    assert_progress(PRS_GEMM_ALLGATHER, PRS_MOVED_BY_COPY_ENGINES);
}

Test(hopper, allreduce_needs_one_resident_cluster, .timeout = 600)
{
    assert_progress(PRS_GEMM_ALLREDUCE, 0);
}

/* ---- a number of rows for each launch ---- */
enum { LAUNCHES = 100 };

/* step: what divides the rows. PRS_TEST_LAUNCHES: how many of the launches, as the quick form of the test runs them. */
static void assert_any_rows_right(const struct ranks_product *product, uint32_t step)
{
    struct ranks_product p = *product;
    uint32_t rows[LAUNCHES], random = (uint32_t)hopper_seed();
    const char *fewer = getenv("PRS_TEST_LAUNCHES");
    for (uint32_t i = 0; i < LAUNCHES; i++) {
        random = random * 1664525 + 1013904223;
        rows[i] = step * (1 + (random >> 8) % (p.shape.m / step));
    }
    p.rows = rows;
    p.epochs = fewer ? (uint32_t)atoi(fewer) : LAUNCHES;
    cr_assert(p.epochs >= 1 && p.epochs <= LAUNCHES, "PRS_TEST_LAUNCHES=%s", fewer);
    ranks_assert_right(&p);
}

Test(hopper, a_product_of_any_rows_is_right, .timeout = 900)
{
    struct ranks_product p = {.shape = {PRS_GEMM_ALONE, 400, 264, 72, 1}, .world = 1};
    assert_any_rows_right(&p, 1);
    p.on_device = true;
    assert_any_rows_right(&p, 1);
}

Test(hopper, reduce_scatter_of_any_rows_is_right, .timeout = 900)
{
    struct ranks_product p = {.shape = {PRS_GEMM_REDUCE_SCATTER, 780, 264, 72, 1}, .tuning = {.band = 1}, .world = 3};
    assert_any_rows_right(&p, 3);
    p.on_device = true;
    assert_any_rows_right(&p, 3);
}

Test(hopper, allgather_of_any_rows_is_right, .timeout = 900)
{
    struct ranks_product p = {
        .shape = {PRS_GEMM_ALLGATHER, 780, 264, 328, 1}, .tuning = {.band = 1, .mover = PRS_MOVED_BY_CTAS}, .world = 3};
    assert_any_rows_right(&p, 3);
    p.on_device = true;
    assert_any_rows_right(&p, 3 * 64);
}

Test(hopper, allgather_by_copy_engine_of_any_rows_is_right, .timeout = 900)
{
    struct ranks_product p = {.shape = {PRS_GEMM_ALLGATHER, 780, 264, 328, 1},
                              .tuning = {.band = 1, .segments = 2, .mover = PRS_MOVED_BY_COPY_ENGINES},
                              .world = 3};
    assert_any_rows_right(&p, 3);
    p.on_device = true;
    assert_any_rows_right(&p, 3 * 64);
}

Test(hopper, allreduce_of_any_rows_is_right, .timeout = 900)
{
    struct ranks_product p = {.shape = {PRS_GEMM_ALLREDUCE, 780, 264, 72, 1}, .tuning = {.band = 1}, .world = 3};
    assert_any_rows_right(&p, 1);
    p.on_device = true;
    assert_any_rows_right(&p, 1);
}

Test(hopper, unfused_products_of_any_rows_are_right, .timeout = 900)
{
    struct ranks_product p = {
        .shape = {PRS_GEMM_ALLREDUCE, 141, 37, 51, 1}, .tuning = {.path = PRS_GEMM_PATH_UNFUSED}, .world = 3};
    assert_any_rows_right(&p, 1);
    p.shape.op = PRS_GEMM_ALLGATHER;
    assert_any_rows_right(&p, 3);
    p.shape.op = PRS_GEMM_REDUCE_SCATTER;
    assert_any_rows_right(&p, 3);
}

/* Rank 1's number is on its device; a wrong one is the same on all ranks. */
static void launch_wrong_rows(uint32_t rank, struct ranks_self *self, void *user)
{
    static const uint32_t ROWS[] = {100, 513, 0};
    struct prs_gemm_shape shape = {PRS_GEMM_ALLGATHER, 512, 256, 64, 1};
    struct prs_gemm_tuning tuning = {.path = PRS_GEMM_PATH_FUSED};
    const uint32_t *wrong = &ROWS[*(const uint32_t *)user];
    struct prs_gemm_operands x = {.m = 513};
    struct prs_fused_error error;
    struct prs_fused *ctx;
    struct prs_gemm_plan *plan;
    uint32_t *m;
    cr_assert_eq(ranks_open(self, 0, RANKS_PATIENCE_MS, &ctx), 0);
    cr_assert_eq(prs_gemm_plan_open(ctx, &shape, &tuning, &plan), 0);
    x.a = ranks_upload(1, 256 * 64);
    x.b = ranks_upload(2, 256 * 64);
    cr_assert_eq(cudaMalloc(&x.c, 512 * 256 * 2), cudaSuccess);
    cr_assert_eq(prs_gemm_launch(plan, &x, NULL), -EINVAL);
    cr_assert_not_null(strstr(prs_fused_error_text(), "513 rows"), "%s", prs_fused_error_text());
    x.m = 511;
    cr_assert_eq(prs_gemm_launch(plan, &x, NULL), -EINVAL);
    cr_assert_not_null(strstr(prs_fused_error_text(), "do not divide among 2"), "%s", prs_fused_error_text());
    x.m = 0;
    cr_assert_eq(cudaMalloc((void **)&m, sizeof(*m)), cudaSuccess);
    cr_assert_eq(cudaMemcpy(m, wrong, sizeof(*m), cudaMemcpyHostToDevice), cudaSuccess);
    x.m_on_device = m;
    cr_assert_eq(prs_gemm_launch(plan, &x, NULL), 0);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    cr_assert_eq(prs_fused_poll_error(ctx, &error), -EINVAL, "rank %u: %s", rank, error.text);
    cr_assert_not_null(strstr(error.text, "multiple of 128"), "%s", error.text);
    prs_gemm_plan_close(plan);
    prs_fused_close(ctx);
}

Test(hopper, a_number_of_rows_that_cannot_be_is_an_error, .timeout = 600)
{
    hopper_setup(2, 4, 0);
    for (uint32_t i = 0; i < 3; i++)
        ranks_run(2, launch_wrong_rows, &i);
}

/* The same graph serves any number of rows. */
Test(hopper, a_replayed_graph_finds_its_rows_on_the_device, .timeout = 600)
{
    static const uint32_t ROWS[] = {128, 512, 384};
    struct ranks_product p = {.shape = {PRS_GEMM_ALLGATHER, 512, 264, 72, 1},
                              .tuning = {.mover = PRS_MOVED_BY_CTAS},
                              .world = 2,
                              .epochs = 3,
                              .replays = 3,
                              .rows = ROWS,
                              .on_device = true};
    ranks_assert_right(&p);
    p.tuning.mover = PRS_MOVED_BY_COPY_ENGINES;
    ranks_assert_right(&p);
}

/* ---- the gathered A as a result ---- */
static void assert_kept(const struct ranks_product *product)
{
    static const uint32_t ROWS[] = {780, 3, 600, 192};
    struct ranks_product p = *product;
    p.keeps = true;
    p.rows = NULL, p.epochs = 3;
    ranks_assert_right(&p);
    p.rows = ROWS, p.epochs = 4;
    ranks_assert_right(&p);
}

Test(hopper, pushed_rows_are_kept, .timeout = 900)
{
    static const uint32_t ROWS[] = {384, 192, 768};
    struct ranks_product p = {.shape = {PRS_GEMM_ALLGATHER, 780, 264, 328, 1, .lda = 336},
                              .tuning = {.band = 1, .mover = PRS_MOVED_BY_CTAS},
                              .world = 3};
    assert_kept(&p);
    p.rows = ROWS, p.epochs = 3, p.on_device = p.keeps = true;
    ranks_assert_right(&p);
}

Test(hopper, copied_rows_are_kept, .timeout = 900)
{
    assert_kept(&(struct ranks_product){.shape = {PRS_GEMM_ALLGATHER, 780, 264, 328, 1},
                                        .tuning = {.band = 1, .segments = 2, .mover = PRS_MOVED_BY_COPY_ENGINES},
                                        .world = 3});
}

Test(hopper, rows_are_kept_by_one_resident_cluster, .timeout = 900)
{
    hopper_limit_clusters(1);
    for (uint32_t mover = PRS_MOVED_BY_COPY_ENGINES; mover <= PRS_MOVED_BY_CTAS; mover++)
        ranks_assert_right(&(struct ranks_product){.shape = {PRS_GEMM_ALLGATHER, 1536, 264, 136, 1},
                                                   .tuning = {.band = 1, .mover = mover},
                                                   .world = 3,
                                                   .keeps = true,
                                                   .sms = 16,
                                                   .epochs = 2,
                                                   .timeout_ms = RANKS_PATIENCE_MS});
}

Test(hopper, unfused_rows_are_kept, .timeout = 900)
{
    struct ranks_product p = {
        .shape = {PRS_GEMM_ALLGATHER, 780, 37, 51, 1}, .tuning = {.path = PRS_GEMM_PATH_UNFUSED}, .world = 3};
    assert_kept(&p);
    p.world = 1;
    assert_kept(&p);
    p.tuning.path = PRS_GEMM_PATH_FUSED;
    p.shape.n = p.shape.k = 72;
    assert_kept(&p);
}

/* ---- plans that share memory ---- */
enum { SHARING_PLANS = 5, SHARING_LAUNCHES = 60, SHARING_WORLD = 3 };

/* Ranks launch plans of several sizes and operations in the same order, without a wait. Each launch must find its own
 * sums and rows, whichever plan was launched before it, and however far another rank is ahead. */
static void launch_plans_in_turn(uint32_t rank, struct ranks_self *self, void *user)
{
    static const struct {
        struct prs_gemm_shape shape;
        struct prs_gemm_tuning tuning;
    } list[SHARING_PLANS] = {
        {{PRS_GEMM_REDUCE_SCATTER, 1536, 256, 64, 1}, {.path = PRS_GEMM_PATH_FUSED}},
        {{PRS_GEMM_ALLGATHER, 384, 256, 192, 1}, {.path = PRS_GEMM_PATH_FUSED, .mover = PRS_MOVED_BY_CTAS}},
        {{PRS_GEMM_ALLGATHER, 768, 256, 64, 1}, {.path = PRS_GEMM_PATH_FUSED, .mover = PRS_MOVED_BY_COPY_ENGINES}},
        {{PRS_GEMM_ALLGATHER, 384, 256, 128, 1}, {.path = PRS_GEMM_PATH_FUSED, .mover = PRS_MOVED_BY_COPY_ENGINES}},
        {{PRS_GEMM_ALLREDUCE, 192, 256, 64, 1}, {.path = PRS_GEMM_PATH_FUSED}},
    };
    static uint16_t want[SHARING_WORLD][SHARING_PLANS][2][1536 * 256], have[SHARING_WORLD][1536 * 256];
    struct prs_gemm_plan *plans[SHARING_PLANS];
    struct prs_gemm_operands x[SHARING_PLANS][2] = {0};
    struct prs_gemm_info info;
    struct prs_fused *ctx;
    uint8_t *results[SHARING_LAUNCHES];
    uint32_t random = (uint32_t)hopper_seed(), bytes[SHARING_PLANS], chosen[SHARING_LAUNCHES];
    uint64_t alone = 0;
    (void)user;
    cr_assert_eq(ranks_open(self, 0, 60000, &ctx), 0);
    for (uint32_t i = 0; i < SHARING_PLANS; i++) {
        const struct prs_gemm_shape *s = &list[i].shape;
        cr_assert_eq(prs_gemm_plan_open(ctx, s, &list[i].tuning, &plans[i]), 0, "%s", prs_fused_error_text());
        prs_gemm_plan_query(plans[i], &info);
        alone += info.workspace_bytes;
        bytes[i] = s->m / (s->op == PRS_GEMM_REDUCE_SCATTER ? SHARING_WORLD : 1) * s->n * 2;
        for (uint32_t kind = 0; kind < 2; kind++) {
            x[i][kind].a = ranks_upload(100 * i + 10 * kind + rank, (uint64_t)s->m * s->k);
            x[i][kind].b = ranks_upload(1000 + 10 * i + rank, (uint64_t)s->n * s->k);
            cr_assert_eq(prs_fused_alloc(ctx, bytes[i], &x[i][kind].c), 0);
            cr_assert_eq(prs_gemm_launch(plans[i], &x[i][kind], NULL), 0);
            cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
            cr_assert_eq(cudaMemcpy(want[rank][i][kind], x[i][kind].c, bytes[i], cudaMemcpyDeviceToHost), cudaSuccess);
        }
    }
    cr_assert_lt(alone, 1 << 20, "staging memory is not shared: %llu bytes of the plans alone",
                 (unsigned long long)alone);
    for (uint32_t i = 0; i < SHARING_LAUNCHES; i++) {
        random = random * 1664525 + 1013904223;
        chosen[i] = (random >> 8) % (SHARING_PLANS * 2);
        cr_assert_eq(prs_fused_alloc(ctx, bytes[chosen[i] / 2], (void **)&results[i]), 0);
    }
    for (uint32_t i = 0; i < SHARING_LAUNCHES; i++) {
        struct prs_gemm_operands y = x[chosen[i] / 2][chosen[i] % 2];
        y.c = results[i];
        cr_assert_eq(prs_gemm_launch(plans[chosen[i] / 2], &y, NULL), 0);
    }
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    for (uint32_t i = 0; i < SHARING_LAUNCHES; i++) {
        cr_assert_eq(cudaMemcpy(have[rank], results[i], bytes[chosen[i] / 2], cudaMemcpyDeviceToHost), cudaSuccess);
        cr_assert_eq(memcmp(have[rank], want[rank][chosen[i] / 2][chosen[i] % 2], bytes[chosen[i] / 2]), 0,
                     "rank %u, launch %u of plan %u (HOPPER_SEED=%llu)", rank, i, chosen[i] / 2,
                     (unsigned long long)hopper_seed());
        (void)prs_fused_free(ctx, results[i]);
    }
    for (uint32_t i = 0; i < SHARING_PLANS; i++) {
        (void)prs_fused_free(ctx, x[i][0].c);
        (void)prs_fused_free(ctx, x[i][1].c);
        prs_gemm_plan_close(plans[i]);
    }
    prs_fused_close(ctx);
}

Test(hopper, plans_that_share_memory_may_be_launched_in_any_order, .timeout = 900)
{
    hopper_setup(SHARING_WORLD, 4, 0);
    ranks_run(SHARING_WORLD, launch_plans_in_turn, NULL);
}

/* ---- many ranks of a node ---- */
/* With more than three sums of other ranks, the stages through which they are loaded are used again. */
Test(hopper, five_to_eight_ranks_of_a_node_are_right, .timeout = 1200)
{
    static const struct row rows[] = {
        {PRS_GEMM_REDUCE_SCATTER, 5, 1280, 264, 72, 1, 3},
        {PRS_GEMM_REDUCE_SCATTER, 8, 1664, 264, 72, 0, 3, {.band = 1}},
        {PRS_GEMM_ALLREDUCE, 7, 1799, 264, 72, 1, 3},
        {PRS_GEMM_ALLREDUCE, 8, 1024, 264, 72, 0, 3},
        {PRS_GEMM_ALLGATHER, 6, 1200, 264, 136, 1, 3, {.mover = PRS_MOVED_BY_CTAS}},
        {PRS_GEMM_ALLGATHER, 8, 1024, 264, 136, 0, 3, {.mover = PRS_MOVED_BY_COPY_ENGINES}},
    };
    assert_rows_right(rows, sizeof(rows) / sizeof(*rows));
}

/* ---- the unfused path ---- */
Test(hopper, unfused_shapes_are_right, .timeout = 600)
{
    static const struct row rows[] = {
        {PRS_GEMM_ALONE, 1, 100, 37, 51, 1, 1, {.path = PRS_GEMM_PATH_UNFUSED}},
        {PRS_GEMM_REDUCE_SCATTER, 4, 140, 37, 51, 1, 3, {.path = PRS_GEMM_PATH_UNFUSED}},
        {PRS_GEMM_ALLGATHER, 4, 140, 37, 51, 0, 3, {.path = PRS_GEMM_PATH_UNFUSED}},
        {PRS_GEMM_ALLGATHER, 4, 64, 40, 64, 1, 3, {.path = PRS_GEMM_PATH_UNFUSED}}, /* vectors of 16 bytes */
        {PRS_GEMM_ALLREDUCE, 4, 141, 37, 51, 1, 3, {.path = PRS_GEMM_PATH_UNFUSED}},
        {PRS_GEMM_ALLREDUCE, 3, 64, 64, 64, 0, 3, {.path = PRS_GEMM_PATH_UNFUSED}},
        {PRS_GEMM_ALLREDUCE, 4, 1, 9, 8, 1, 2, {.path = PRS_GEMM_PATH_UNFUSED}}, /* some ranks have nothing to add up */
    };
    assert_rows_right(rows, sizeof(rows) / sizeof(*rows));
}

/* ---- few rows: sums in one hop ---- */
/* Short products and many launches, so that a fast rank is a launch ahead of a slow one: a word that was left behind,
 * or taken before it arrived, is found. One row, columns in vectors of 16 bytes and not, fewer items than CTAs. */
Test(hopper, few_rows_are_summed_in_one_hop, .timeout = 600)
{
    static const struct row rows[] = {
        {PRS_GEMM_ALLREDUCE, 2, 1, 264, 8, 1, 12, {.path = PRS_GEMM_PATH_UNFUSED}},
        {PRS_GEMM_ALLREDUCE, 3, 5, 37, 8, 0, 12, {.path = PRS_GEMM_PATH_UNFUSED}},
        {PRS_GEMM_ALLREDUCE, 2, 128, 96, 8, 1, 4, {.path = PRS_GEMM_PATH_UNFUSED}},
        {PRS_GEMM_REDUCE_SCATTER, 2, 2, 264, 8, 1, 12, {.path = PRS_GEMM_PATH_UNFUSED}},
        {PRS_GEMM_REDUCE_SCATTER, 3, 6, 37, 8, 0, 12, {.path = PRS_GEMM_PATH_UNFUSED}},
        {PRS_GEMM_REDUCE_SCATTER, 4, 128, 96, 8, 1, 4, {.path = PRS_GEMM_PATH_UNFUSED}},
    };
    assert_rows_right(rows, sizeof(rows) / sizeof(*rows));
}

Test(hopper, five_to_eight_ranks_sum_few_rows, .timeout = 600)
{
    static const struct row rows[] = {
        {PRS_GEMM_ALLREDUCE, 5, 7, 264, 8, 1, 6, {.path = PRS_GEMM_PATH_UNFUSED}},
        {PRS_GEMM_ALLREDUCE, 8, 32, 64, 8, 0, 6, {.path = PRS_GEMM_PATH_UNFUSED}},
        {PRS_GEMM_REDUCE_SCATTER, 6, 12, 37, 8, 1, 6, {.path = PRS_GEMM_PATH_UNFUSED}},
        {PRS_GEMM_REDUCE_SCATTER, 8, 128, 64, 8, 0, 6, {.path = PRS_GEMM_PATH_UNFUSED}},
    };
    assert_rows_right(rows, sizeof(rows) / sizeof(*rows));
}

/* On more than 2 ranks an all-reduce of more rows takes two hops. Parts that are whole vectors of 16 bytes and not, the
 * last shorter than the others; results of 16 and 32 bits; each epilogue goes to its own row and column. */
Test(hopper, five_to_eight_ranks_sum_rows_in_two_hops, .timeout = 600)
{
    struct ranks_product p = {.shape = {PRS_GEMM_ALLREDUCE, 84, 1024, 4, 1},
                              .tuning = {.path = PRS_GEMM_PATH_UNFUSED},
                              .world = 8,
                              .bias = true,
                              .residual = RANKS_RESIDUAL,
                              .epochs = 3};
    ranks_assert_right(&p);
    p.shape.m = 105, p.shape.n = 1021, p.shape.c_dtype = PRS_DTYPE_FP32;
    p.world = 7;
    ranks_assert_right(&p);
}

/* The launches of 8 ranks take one hop for few rows and two for more, in turn; the same graph is replayed. */
Test(hopper, five_to_eight_ranks_take_one_hop_and_two_in_turn, .timeout = 600)
{
    static const uint32_t ROWS[] = {84, 8, 1, 84, 7};
    ranks_assert_right(&(struct ranks_product){.shape = {PRS_GEMM_ALLREDUCE, 84, 1024, 4, 1, .c_anywhere = 1},
                                               .tuning = {.path = PRS_GEMM_PATH_UNFUSED},
                                               .world = 8,
                                               .rows = ROWS,
                                               .epochs = 5,
                                               .replays = 2});
}

/* Above 16 MB of sums the ranks pass a barrier and read each other's memory. */
Test(hopper, many_rows_and_few_are_summed_in_turn, .timeout = 600)
{
    static const uint32_t ROWS[] = {4100, 8, 4100};
    ranks_assert_right(&(struct ranks_product){.shape = {PRS_GEMM_ALLREDUCE, 4100, 2048, 1, 1, .c_anywhere = 1},
                                               .tuning = {.path = PRS_GEMM_PATH_UNFUSED},
                                               .world = 2,
                                               .rows = ROWS,
                                               .epochs = 3});
}

/* Each rank has one CTA at a time: those that run must be the first, and wait for none that comes later. */
Test(hopper, few_rows_need_one_resident_cta, .timeout = 600)
{
    for (uint32_t op = PRS_GEMM_REDUCE_SCATTER; op <= PRS_GEMM_ALLREDUCE; op += 2) {
        hopper_limit_clusters(1);
        ranks_assert_right(&(struct ranks_product){.shape = {op, 30, 264, 8, 1},
                                                   .tuning = {.path = PRS_GEMM_PATH_UNFUSED},
                                                   .world = 3,
                                                   .sms = 16,
                                                   .epochs = 4,
                                                   .timeout_ms = RANKS_PATIENCE_MS});
    }
}

/* Plans of several sizes and operations share their inbox and the memory of their products. A rank that has its sum may
 * begin the next launch, and gather rows at a rank that is still adding up. */
static void launch_unfused_in_turn(uint32_t rank, struct ranks_self *self, void *user)
{
    enum { PLANS = 4, TURNS = 60, WORLD = 3, MOST = 960 * 72 };
    static const struct prs_gemm_shape list[PLANS] = {{PRS_GEMM_ALLREDUCE, 960, 72, 8, 1, .c_anywhere = 1},
                                                      {PRS_GEMM_REDUCE_SCATTER, 60, 72, 8, 1},
                                                      {PRS_GEMM_ALLREDUCE, 3, 37, 8, 1, .c_anywhere = 1},
                                                      {PRS_GEMM_ALLGATHER, 960, 24, 72, 1}};
    static uint16_t want[WORLD][PLANS][2][MOST], have[WORLD][MOST];
    struct prs_gemm_tuning tuning = {.path = PRS_GEMM_PATH_UNFUSED, .clusters = 1}; /* a CTA adds up for long */
    struct prs_gemm_plan *plans[PLANS];
    struct prs_gemm_operands x[PLANS][2] = {0};
    struct prs_fused *ctx;
    void *results[TURNS];
    uint32_t random = (uint32_t)hopper_seed(), bytes[PLANS], chosen[TURNS];
    (void)user;
    cr_assert_eq(ranks_open(self, 0, 60000, &ctx), 0);
    for (uint32_t i = 0; i < PLANS; i++) {
        const struct prs_gemm_shape *s = &list[i];
        cr_assert_eq(prs_gemm_plan_open(ctx, s, &tuning, &plans[i]), 0, "%s", prs_fused_error_text());
        bytes[i] = s->m / (s->op == PRS_GEMM_REDUCE_SCATTER ? WORLD : 1) * s->n * 2;
        for (uint32_t kind = 0; kind < 2; kind++) {
            x[i][kind].a = ranks_upload(100 * i + 10 * kind + rank, (uint64_t)s->m * s->k);
            x[i][kind].b = ranks_upload(1000 + 10 * i + rank, (uint64_t)s->n * s->k);
            cr_assert_eq(cudaMalloc(&x[i][kind].c, bytes[i]), cudaSuccess);
            cr_assert_eq(prs_gemm_launch(plans[i], &x[i][kind], NULL), 0, "%s", prs_fused_error_text());
            cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
            cr_assert_eq(cudaMemcpy(want[rank][i][kind], x[i][kind].c, bytes[i], cudaMemcpyDeviceToHost), cudaSuccess);
        }
    }
    for (uint32_t i = 0; i < TURNS; i++) {
        random = random * 1664525 + 1013904223;
        chosen[i] = (random >> 8) % (PLANS * 2);
        cr_assert_eq(cudaMalloc(&results[i], bytes[chosen[i] / 2]), cudaSuccess);
    }
    for (uint32_t i = 0; i < TURNS; i++) {
        struct prs_gemm_operands y = x[chosen[i] / 2][chosen[i] % 2];
        y.c = results[i];
        cr_assert_eq(prs_gemm_launch(plans[chosen[i] / 2], &y, NULL), 0);
    }
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    for (uint32_t i = 0; i < TURNS; i++) {
        cr_assert_eq(cudaMemcpy(have[rank], results[i], bytes[chosen[i] / 2], cudaMemcpyDeviceToHost), cudaSuccess);
        cr_assert_eq(memcmp(have[rank], want[rank][chosen[i] / 2][chosen[i] % 2], bytes[chosen[i] / 2]), 0,
                     "rank %u, launch %u of plan %u (HOPPER_SEED=%llu)", rank, i, chosen[i] / 2,
                     (unsigned long long)hopper_seed());
    }
    for (uint32_t i = 0; i < PLANS; i++)
        prs_gemm_plan_close(plans[i]);
    prs_fused_close(ctx);
}

Test(hopper, unfused_plans_may_be_launched_in_any_order, .timeout = 600)
{
    hopper_setup(3, 4, 0);
    ranks_run(3, launch_unfused_in_turn, NULL);
}

/* A not-a-number makes one row of the result, and is not mistaken for a word that has not arrived. */
static void add_a_nan(uint32_t rank, struct ranks_self *self, void *user)
{
    enum { ROWS = 4, COLUMNS = 40, K = 8, NAN_ROW = 2 };
    static const struct prs_gemm_shape shape = {PRS_GEMM_ALLREDUCE, ROWS, COLUMNS, K, 1, .c_anywhere = 1};
    const uint16_t nan = 0xffff;
    struct prs_gemm_tuning tuning = {.path = PRS_GEMM_PATH_UNFUSED};
    struct prs_gemm_operands x = {.a = ranks_upload(rank, ROWS * K), .b = ranks_upload(10 + rank, COLUMNS * K)};
    uint16_t have[ROWS * COLUMNS];
    struct prs_fused *ctx;
    struct prs_gemm_plan *plan;
    (void)user;
    cr_assert_eq(ranks_open(self, 0, 60000, &ctx), 0);
    cr_assert_eq(prs_gemm_plan_open(ctx, &shape, &tuning, &plan), 0, "%s", prs_fused_error_text());
    cr_assert_eq(cudaMalloc(&x.c, sizeof(have)), cudaSuccess);
    if (rank == 1)
        cr_assert_eq(cudaMemcpy((uint16_t *)x.a + NAN_ROW * K, &nan, sizeof(nan), cudaMemcpyHostToDevice), cudaSuccess);
    cr_assert_eq(prs_gemm_launch(plan, &x, NULL), 0);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    cr_assert_eq(cudaMemcpy(have, x.c, sizeof(have), cudaMemcpyDeviceToHost), cudaSuccess);
    for (uint32_t i = 0; i < ROWS * COLUMNS; i++)
        cr_assert_eq(isnan(ranks_float(have[i])) != 0, i / COLUMNS == NAN_ROW, "row %u: %#x", i / COLUMNS, have[i]);
    prs_gemm_plan_close(plan);
    prs_fused_close(ctx);
}

Test(hopper, a_nan_is_summed_in_one_hop, .timeout = 600)
{
    hopper_setup(2, 4, 0);
    ranks_run(2, add_a_nan, NULL);
}

/* ---- epilogues and row strides ---- */
static const enum prs_gemm_op operations[] = {PRS_GEMM_ALONE, PRS_GEMM_REDUCE_SCATTER, PRS_GEMM_ALLGATHER,
                                              PRS_GEMM_ALLREDUCE};

static void assert_epilogues_right(enum prs_gemm_path path)
{
    for (int i = 0; i < 4; i++) {
        struct ranks_product p = {.world = operations[i] == PRS_GEMM_ALONE ? 1 : 3, .bias = true, .epochs = 2};
        p.tuning.path = path;
        for (uint32_t activation = PRS_ACTIVATION_NONE; activation <= PRS_ACTIVATION_SILU; activation++) {
            p.shape = (struct prs_gemm_shape){operations[i], 408, 328, 72, activation % 2, activation};
            p.residual = RANKS_RESIDUAL;
            ranks_assert_right(&p);
        }
        p.shape.activation = PRS_ACTIVATION_NONE;
        p.residual = RANKS_NO_RESIDUAL;
        ranks_assert_right(&p);
        p.residual = RANKS_RESIDUAL_IS_C;
        ranks_assert_right(&p);
    }
}

Test(hopper, bias_activation_and_residual_are_applied_to_the_sum, .timeout = 900)
{
    assert_epilogues_right(PRS_GEMM_PATH_FUSED);
}

Test(hopper, unfused_bias_activation_and_residual_are_applied_to_the_sum, .timeout = 900)
{
    assert_epilogues_right(PRS_GEMM_PATH_UNFUSED);
}

/* Tails in the columns of C, of which a tile has 128; both layouts of B, and both counts of store buffers. */
static void assert_gated_right(enum prs_gemm_path path, int operation_count)
{
    static const int gated_first[] = {0, 2, 1, 3};
    for (int i = 0; i < operation_count; i++) {
        enum prs_gemm_op op = operations[gated_first[i]];
        struct ranks_product p = {.world = op == PRS_GEMM_ALONE ? 1 : 3, .tuning = {.path = path}, .epochs = 3};
        for (uint32_t nk = 0; nk < 2; nk++) {
            p.shape = (struct prs_gemm_shape){op, 816, 656, 72, nk, PRS_ACTIVATION_SILU, .gated = 1};
            p.bias = nk == 0;
            p.residual = nk == 0 ? RANKS_RESIDUAL : RANKS_NO_RESIDUAL;
            ranks_assert_right(&p);
        }
        p.shape = (struct prs_gemm_shape){op, 408, 512, 72, 1, PRS_ACTIVATION_NONE, .gated = 1};
        ranks_assert_right(&p);
    }
}

Test(hopper, a_gated_product_is_right, .timeout = 900)
{
    assert_gated_right(PRS_GEMM_PATH_FUSED, 4);
    ranks_assert_right(&(struct ranks_product){
        .shape = {PRS_GEMM_ALLREDUCE, 408, 272, 136, 1, PRS_ACTIVATION_GELU, .ldc = 152, .gated = 1},
        .residual = RANKS_RESIDUAL,
        .world = 3});
}

Test(hopper, an_unfused_gated_product_is_right, .timeout = 900)
{
    assert_gated_right(PRS_GEMM_PATH_UNFUSED, 2);
    ranks_assert_right(
        &(struct ranks_product){.shape = {PRS_GEMM_ALLGATHER, 99, 38, 51, 1, PRS_ACTIVATION_SILU, .gated = 1},
                                .tuning = {.path = PRS_GEMM_PATH_UNFUSED},
                                .world = 3,
                                .epochs = 2});
}

/* Also: what lies between the rows of C stays as it was. */
Test(hopper, rows_with_gaps_are_right, .timeout = 900)
{
    for (int i = 0; i < 4; i++)
        for (uint32_t nk = 0; nk < 2; nk++)
            for (uint32_t mover = PRS_MOVED_BY_COPY_ENGINES; mover <= PRS_MOVED_BY_CTAS; mover++)
                ranks_assert_right(&(struct ranks_product){
                    .shape = {operations[i], 408, 264, 136, nk, .lda = 144, .ldb = nk ? 160 : 272, .ldc = 280},
                    .tuning = {.mover = mover, .band = 1},
                    .residual = RANKS_RESIDUAL,
                    .world = operations[i] == PRS_GEMM_ALONE ? 1 : 3,
                    .epochs = 2});
}

Test(hopper, an_allreduce_to_any_memory_is_right, .timeout = 900)
{
    static const uint32_t ROWS[] = {408, 1, 300};
    for (uint32_t path = PRS_GEMM_PATH_FUSED; path <= PRS_GEMM_PATH_UNFUSED; path++)
        for (enum ranks_residual residual = RANKS_NO_RESIDUAL; residual <= RANKS_RESIDUAL_IS_C; residual++)
            ranks_assert_right(&(struct ranks_product){.shape = {PRS_GEMM_ALLREDUCE, 408, 328, 72, 1, .c_anywhere = 1},
                                                       .tuning = {.path = path},
                                                       .residual = residual,
                                                       .world = 3,
                                                       .rows = ROWS,
                                                       .epochs = 3,
                                                       .replays = residual == RANKS_RESIDUAL ? 2 : 0});
}

/* ---- fp16 ---- */
static void assert_fp16_right(enum prs_gemm_path path, struct prs_gemm_shape shape)
{
    for (int i = 0; i < 4; i++)
        for (uint32_t nk = 0; nk < 2; nk++) {
            struct ranks_product p = {.shape = shape, .tuning = {.path = path}, .epochs = 2};
            p.world = operations[i] == PRS_GEMM_ALONE ? 1 : 3;
            p.shape.op = operations[i], p.shape.b_transposed = nk, p.shape.dtype = PRS_DTYPE_FP16;
            ranks_assert_right(&p);
            p.bias = true, p.residual = RANKS_RESIDUAL;
            p.shape.activation = PRS_ACTIVATION_SILU;
            p.shape.gated = path == PRS_GEMM_PATH_FUSED || i % 2 == 0;
            p.keeps = p.shape.op == PRS_GEMM_ALLGATHER;
            ranks_assert_right(&p);
        }
}

Test(hopper, fp16_products_are_right, .timeout = 900)
{
    assert_fp16_right(PRS_GEMM_PATH_FUSED, (struct prs_gemm_shape){.m = 408, .n = 272, .k = 136});
    ranks_assert_right(
        &(struct ranks_product){.shape = {PRS_GEMM_ALLGATHER, 1024, 264, 136, 1, .dtype = PRS_DTYPE_FP16},
                                .tuning = {.mover = PRS_MOVED_BY_CTAS},
                                .world = 2,
                                .keeps = true,
                                .epochs = 3});
}

Test(hopper, unfused_fp16_products_are_right, .timeout = 900)
{
    assert_fp16_right(PRS_GEMM_PATH_UNFUSED, (struct prs_gemm_shape){.m = 99, .n = 38, .k = 51});
    /* vectors of 16 bytes */
    assert_fp16_right(PRS_GEMM_PATH_UNFUSED, (struct prs_gemm_shape){.m = 48, .n = 64, .k = 64});
}

/* A has every finite fp16 number; rank 0's B is a diagonal, that of others is 0. So an element of C is a product of two
 * numbers, rounded once, whether or not it travels between ranks. */
enum { EVERY_ROWS = 1024, EVERY_COLUMNS = 64 };
static const float DIAGONAL[] = {1, 0x1p-3f, -0x3p-12f, 0x1p-10f, 0x1p5f, -7, 0x1p-24f, 0x1.004p0f};

static uint16_t every_element(uint64_t at)
{
    uint16_t bits = (uint16_t)at;
    return (bits & 0x7c00) == 0x7c00 ? 0 : bits;
}

static void multiply_every_number(uint32_t rank, struct ranks_self *self, void *user)
{
    const struct prs_gemm_tuning *tuning = &((const struct ranks_product *)user)->tuning;
    const struct prs_gemm_shape *shape = &((const struct ranks_product *)user)->shape;
    static uint16_t inputs[RANKS_MAX][EVERY_ROWS * EVERY_COLUMNS], results[RANKS_MAX][EVERY_ROWS * EVERY_COLUMNS];
    uint16_t *host = inputs[rank], *have = results[rank];
    uint32_t world = self->team->world, mine = EVERY_ROWS / world;
    uint32_t a_rows = shape->op == PRS_GEMM_ALLGATHER ? mine : EVERY_ROWS,
             a_first = EVERY_ROWS - a_rows ? rank * mine : 0;
    uint32_t c_rows = shape->op == PRS_GEMM_REDUCE_SCATTER ? mine : EVERY_ROWS;
    uint32_t c_first = EVERY_ROWS - c_rows ? rank * mine : 0;
    struct prs_gemm_operands x = {0};
    struct prs_fused *ctx;
    struct prs_gemm_plan *plan;
    void *a, *b;
    cr_assert_eq(ranks_open(self, 0, 60000, &ctx), 0);
    cr_assert_eq(prs_gemm_plan_open(ctx, shape, tuning, &plan), 0, "%s", prs_fused_error_text());
    cr_assert_eq(cudaMalloc(&a, sizeof(inputs[0])), cudaSuccess);
    cr_assert_eq(cudaMalloc(&b, sizeof(inputs[0])), cudaSuccess);
    cr_assert_eq(prs_fused_alloc(ctx, sizeof(inputs[0]), &x.c), 0);
    for (uint32_t i = 0; i < a_rows * EVERY_COLUMNS; i++)
        host[i] = every_element(a_first * EVERY_COLUMNS + i);
    cr_assert_eq(cudaMemcpy(a, host, sizeof(inputs[0]), cudaMemcpyHostToDevice), cudaSuccess);
    memset(host, 0, sizeof(inputs[0]));
    for (uint32_t i = 0; i < EVERY_COLUMNS && (rank == 0 || shape->op == PRS_GEMM_ALLGATHER); i++)
        host[i * EVERY_COLUMNS + i] = ranks_bits(PRS_DTYPE_FP16, DIAGONAL[i % 8]);
    cr_assert_eq(cudaMemcpy(b, host, sizeof(inputs[0]), cudaMemcpyHostToDevice), cudaSuccess);
    x.a = a, x.b = b;
    cr_assert_eq(prs_gemm_launch(plan, &x, NULL), 0);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    cr_assert_eq(cudaMemcpy(have, x.c, c_rows * EVERY_COLUMNS * 2, cudaMemcpyDeviceToHost), cudaSuccess);
    for (uint32_t i = 0; i < c_rows * EVERY_COLUMNS; i++) {
        float one = ranks_value(PRS_DTYPE_FP16, every_element(c_first * EVERY_COLUMNS + i)), factor = DIAGONAL[i % 8];
        float want = ranks_value(PRS_DTYPE_FP16, ranks_bits(PRS_DTYPE_FP16, one * factor));
        cr_assert_eq(ranks_value(PRS_DTYPE_FP16, have[i]), want, "operation %d, path %u, rank %u: %a times %a is %#x",
                     (int)shape->op, tuning->path, rank, one, factor, have[i]);
    }
    (void)prs_fused_free(ctx, x.c);
    prs_gemm_plan_close(plan);
    prs_fused_close(ctx);
}

Test(hopper, subnormal_and_infinite_fp16_results_are_right, .timeout = 900)
{
    for (uint32_t path = PRS_GEMM_PATH_FUSED; path <= PRS_GEMM_PATH_UNFUSED; path++)
        for (int i = 0; i < 4; i++)
            for (uint32_t nk = 0; nk < 2; nk++) {
                struct ranks_product p = {
                    .shape = {operations[i], EVERY_ROWS, EVERY_COLUMNS, EVERY_COLUMNS, nk, .dtype = PRS_DTYPE_FP16},
                    .tuning = {.path = path}};
                hopper_setup(2, 4, 0);
                ranks_run(operations[i] == PRS_GEMM_ALONE ? 1 : 2, multiply_every_number, &p);
            }
}

/* ---- results in fp32 ---- */
Test(hopper, fp32_results_are_right, .timeout = 900)
{
    static const enum ranks_residual residuals[] = {RANKS_NO_RESIDUAL, RANKS_RESIDUAL, RANKS_RESIDUAL_IS_C};
    for (uint32_t i = 0; i < 4 * 2 * 3; i++) {
        enum prs_gemm_op op = operations[i % 4];
        struct ranks_product p = {
            .shape = {op, 99, 38, 51, i / 12, .dtype = PRS_DTYPE_BF16 + i / 4 % 2, .c_dtype = PRS_DTYPE_FP32},
            .tuning = {.path = PRS_GEMM_PATH_UNFUSED},
            .residual = residuals[i / 8],
            .world = op == PRS_GEMM_ALONE ? 1 : 3,
            .epochs = 2};
        p.bias = i / 8 == 1;
        ranks_assert_right(&p);
        p.shape.m = 96, p.shape.n = 64; /* vectors of 16 bytes */
        p.shape.c_anywhere = op == PRS_GEMM_ALLREDUCE;
        p.shape.gated = op == PRS_GEMM_ALONE || op == PRS_GEMM_ALLGATHER;
        ranks_assert_right(&p);
        p.shape.gated = 0;
        p.world = 1; /* nothing is added up, whatever the operation */
        ranks_assert_right(&p);
    }
}

struct refused {
    struct prs_gemm_shape shape;
    const char *why;
};

static void open_refused(uint32_t rank, struct ranks_self *self, void *user)
{
    const struct refused *x = user;
    struct prs_fused *ctx;
    struct prs_gemm_plan *plan;
    (void)rank;
    cr_assert_eq(ranks_open(self, 0, RANKS_PATIENCE_MS, &ctx), 0);
    cr_assert_eq(prs_gemm_plan_open(ctx, &x->shape, NULL, &plan), -EINVAL);
    cr_assert(strstr(prs_fused_error_text(), x->why), "%s", prs_fused_error_text());
    prs_fused_close(ctx);
}

Test(hopper, a_wrong_stride_activation_or_type_is_refused_by_name, .timeout = 900)
{
    static struct refused list[] = {
        {{PRS_GEMM_ALONE, 64, 64, 64, .lda = 56}, "rows of A are 56 elements apart"},
        {{PRS_GEMM_ALONE, 64, 64, 64, .ldb = 68}, "rows of B are 68 elements apart"},
        {{PRS_GEMM_ALONE, 64, 64, 64, .ldc = 63}, "rows of C are 63 elements apart"},
        {{PRS_GEMM_ALONE, 64, 64, 60, .lda = 64}, "with gaps between rows needs the fused path"},
        {{PRS_GEMM_ALONE, 64, 64, 64, .activation = 77}, "activation 77 is not known"},
        {{PRS_GEMM_ALONE, 64, 64, 64, .dtype = PRS_DTYPE_FP32}, "dtype 3 (fp32): the A and B of a product are bf16"},
        {{PRS_GEMM_ALONE, 64, 64, 64, .dtype = 77}, "dtype 77 (not a type that is known)"},
        {{PRS_GEMM_ALONE, 64, 64, 64, .sum_dtype = PRS_DTYPE_FP32}, "sum_dtype 3 (fp32): partial sums travel in"},
        {{PRS_GEMM_ALONE, 64, 64, 64, .dtype = PRS_DTYPE_FP16, .c_dtype = PRS_DTYPE_BF16}, "c_dtype 1 (bf16): C has"},
        {{PRS_GEMM_ALONE, 64, 64, 64, .c_dtype = PRS_DTYPE_FP16}, "c_dtype 2 (fp16): C has the type of A and B, bf16"},
        {{PRS_GEMM_ALONE, 64, 64, 64, .ldc = 72, .c_dtype = PRS_DTYPE_FP32},
         "with gaps between rows needs the fused path"},
        {{PRS_GEMM_ALONE, 64, 63, 64, .gated = 1}, "a gated product of 63 columns"},
        {{PRS_GEMM_ALLREDUCE, 64, 40, 64, .gated = 1}, "gated, with a sum over ranks, needs the fused path"},
    };
    hopper_setup(1, 4, 0);
    for (size_t i = 0; i < sizeof(list) / sizeof(*list); i++)
        ranks_run(1, open_refused, &list[i]);
}

/* Rank 1 demands the fused path for a shape that it cannot run. */
static void open_what_one_cannot(uint32_t rank, struct ranks_self *self, void *user)
{
    struct prs_gemm_shape shape = {PRS_GEMM_ALLREDUCE, 64, 63, 64, 1};
    struct prs_gemm_tuning tuning = {.path = rank == 1 ? PRS_GEMM_PATH_FUSED : PRS_GEMM_PATH_AUTO};
    struct prs_fused *ctx;
    struct prs_gemm_plan *plan;
    cr_assert_eq(ranks_open(self, 0, RANKS_PATIENCE_MS, &ctx), 0);
    ((int *)user)[rank] = prs_gemm_plan_open(ctx, &shape, &tuning, &plan);
    prs_fused_close(ctx);
}

Test(hopper, a_plan_that_one_rank_refuses_is_refused_by_all, .timeout = 900)
{
    int result[2] = {0};
    hopper_setup(2, 4, 0);
    ranks_run(2, open_what_one_cannot, result);
    cr_assert(result[0] == -EINVAL && result[1] == -EINVAL, "%d and %d", result[0], result[1]);
}

/* ---- a rank that does not launch ---- */
struct lost {
    enum prs_gemm_path path;
    uint32_t patience_ms;
    int result[4];
    char text[4][sizeof(((struct prs_fused_error *)NULL)->text)];
};

/* Rank 1 launches after rank 0 has given up. Rank 0 went on without the sums of rank 1, so that all its CTAs ended, and
 * sent the wrong results. */
static void launch_late(uint32_t rank, struct ranks_self *self, void *user)
{
    struct lost *lost = user;
    struct prs_gemm_shape shape = {PRS_GEMM_ALLREDUCE, 512, 256, 64, 1};
    struct prs_gemm_tuning tuning = {.path = lost->path};
    struct prs_fused_error error;
    struct prs_fused *ctx;
    struct prs_gemm_plan *plan;
    uint32_t ranks[2];
    void *a, *b, *c;
    cr_assert_eq(ranks_open(self, 0, lost->patience_ms, &ctx), 0);
    cr_assert_eq(prs_gemm_plan_open(ctx, &shape, &tuning, &plan), 0);
    a = ranks_upload(1, 512 * 64);
    b = ranks_upload(2, 256 * 64);
    cr_assert_eq(prs_fused_alloc(ctx, 512 * 256 * 2, &c), 0);
    if (rank == 1)
        (void)ranks_allgather(self, &rank, ranks, sizeof(rank));
    cr_assert_eq(prs_gemm_launch(plan, &(struct prs_gemm_operands){a, b, c}, NULL), 0);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    lost->result[rank] = prs_fused_poll_error(ctx, &error);
    memcpy(lost->text[rank], error.text, sizeof(error.text));
    if (rank == 0)
        (void)ranks_allgather(self, &rank, ranks, sizeof(rank));
    cr_assert_eq(prs_gemm_launch(plan, &(struct prs_gemm_operands){a, b, c}, NULL), lost->result[rank],
                 "the error is sticky");
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    (void)prs_fused_free(ctx, c);
    prs_gemm_plan_close(plan);
    prs_fused_close(ctx);
}

static void assert_late_rank_knows(enum prs_gemm_path path, uint32_t patience_ms)
{
    struct lost lost = {.path = path, .patience_ms = patience_ms};
    hopper_setup(2, 4, 0);
    hopper_forgive_late_writes();
    ranks_run(2, launch_late, &lost);
    cr_assert_eq(lost.result[0], -ETIMEDOUT, "%d", lost.result[0]);
    cr_assert_eq(lost.result[1], -ECANCELED, "%d", lost.result[1]);
    cr_assert_not_null(strstr(lost.text[1], "rank 0 gave up"), "%s", lost.text[1]);
}

Test(hopper, what_a_rank_that_gave_up_sent_is_an_error_where_it_came, .timeout = 900)
{
    assert_late_rank_knows(PRS_GEMM_PATH_FUSED, RANKS_PATIENCE_MS);
}

/* Here the late rank need not wait: the rank that gave up has set all flags that it waits for. */
Test(hopper, unfused_what_a_rank_that_gave_up_sent_is_an_error_where_it_came, .timeout = 900)
{
    assert_late_rank_knows(PRS_GEMM_PATH_UNFUSED, 300);
}

/* Rank 3 opens everything and launches nothing. */
static void launch_unless_lost(uint32_t rank, struct ranks_self *self, void *user)
{
    struct lost *lost = user;
    struct prs_gemm_shape shape = {PRS_GEMM_REDUCE_SCATTER, 1024, 256, 64, 1};
    struct prs_gemm_tuning tuning = {.path = lost->path};
    struct prs_fused_error error;
    struct prs_fused *ctx;
    struct prs_gemm_plan *plan;
    void *a, *b, *c;
    cr_assert_eq(ranks_open(self, 0, RANKS_PATIENCE_MS, &ctx), 0);
    cr_assert_eq(prs_gemm_plan_open(ctx, &shape, &tuning, &plan), 0);
    a = ranks_upload(1, 1024 * 64);
    b = ranks_upload(2, 256 * 64);
    cr_assert_eq(cudaMalloc(&c, 256 * 256 * 2), cudaSuccess);
    if (rank != 3)
        cr_assert_eq(prs_gemm_launch(plan, &(struct prs_gemm_operands){a, b, c}, NULL), 0);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    lost->result[rank] = prs_fused_poll_error(ctx, &error);
    memcpy(lost->text[rank], error.text, sizeof(error.text));
    prs_gemm_plan_close(plan);
    prs_fused_close(ctx);
}

static void assert_lost_rank_is_named(enum prs_gemm_path path)
{
    struct lost lost = {.path = path};
    hopper_setup(4, 4, 0);
    hopper_forgive_late_writes();
    ranks_run(4, launch_unless_lost, &lost);
    for (int rank = 0; rank < 3; rank++) {
        cr_assert_eq(lost.result[rank], -ETIMEDOUT, "rank %d: %d", rank, lost.result[rank]);
        cr_assert_not_null(strstr(lost.text[rank], "for partial sums of rank 3: flag "), "%s", lost.text[rank]);
    }
    cr_assert_eq(lost.result[3], 0);
}

Test(hopper, a_lost_rank_is_named_by_the_others, .timeout = 900)
{
    assert_lost_rank_is_named(PRS_GEMM_PATH_FUSED);
}

Test(hopper, unfused_a_lost_rank_is_named_by_the_others, .timeout = 900)
{
    assert_lost_rank_is_named(PRS_GEMM_PATH_UNFUSED);
}
