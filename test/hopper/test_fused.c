/* SPDX-License-Identifier: Apache-2.0 */
/* The fused GEMM kernels on emulated GPUs. The unfused path: test_fused_unfused.c; what is done with a sum before it is
 * stored, and its types: test_fused_results.c. All three are one program. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/hopper/hopper.h"
#include "test/hopper/ranks.h"

Test(hopper, a_product_alone_is_right, .timeout = 900)
{
    static const struct ranks_row rows[] = {
        {PRS_GEMM_ALONE, 1, 512, 1024, 512, 1}, {PRS_GEMM_ALONE, 1, 512, 1024, 512, 0},
        {PRS_GEMM_ALONE, 1, 200, 328, 136, 1}, /* tails in m, n and k */
        {PRS_GEMM_ALONE, 1, 200, 328, 136, 0},  {PRS_GEMM_ALONE, 1, 8, 8, 8, 1},
    };
    ranks_assert_rows_right(rows, sizeof(rows) / sizeof(*rows));
}

/* Each operand maps the memory of every peer, so without care peer access would be enabled again and again. */
Test(hopper, access_to_a_peer_is_asked_for_once, .timeout = 900)
{
    static const struct ranks_row rows[] = {{PRS_GEMM_ALLGATHER, 3, 768, 256, 128, 1},
                                            {PRS_GEMM_REDUCE_SCATTER, 3, 768, 256, 128, 1}};
    ranks_assert_rows_right(rows, sizeof(rows) / sizeof(*rows));
    cr_assert_eq(hopper_repeated_access(), 0, "%u times it was there already", hopper_repeated_access());
}

/* One rank alone, full tiles, tails in m, n and k, more epochs than buffers, both layouts of B. */
static void assert_collective_right(enum prs_gemm_op op, struct prs_gemm_tuning tuning)
{
    struct prs_gemm_tuning bursts = tuning;
    bursts.paced = PRS_GEMM_UNPACED, bursts.spread = 1;
    const struct ranks_row rows[] = {
        {op, 1, 256, 256, 128, 1, 0, tuning},  {op, 2, 512, 512, 128, 1, 3, tuning},
        {op, 2, 1040, 264, 72, 0, 2, tuning},  {op, 4, 1024, 512, 192, 1, 2, bursts},
        {op, 4, 1632, 328, 136, 0, 2, tuning},
    };
    ranks_assert_rows_right(rows, sizeof(rows) / sizeof(*rows));
}

Test(hopper, reduce_scatter_is_right, .timeout = 600)
{
    assert_collective_right(PRS_GEMM_REDUCE_SCATTER, (struct prs_gemm_tuning){0});
}

Test(hopper, allgather_is_right, .timeout = 600)
{
    assert_collective_right(PRS_GEMM_ALLGATHER, (struct prs_gemm_tuning){.mover = PRS_MOVED_BY_CTAS, .columns = 256});
}

/* Whole tiles and last ones of one, two and three slabs, in both layouts of B and both types. */
Test(hopper, allgather_of_narrow_tiles_is_right, .timeout = 600)
{
    enum { WIDTHS = 5 };
    static const uint32_t widths[WIDTHS] = {192, 200, 264, 352, 576};
    for (uint32_t i = 0; i < 2 * WIDTHS; i++)
        ranks_assert_right(&(struct ranks_product){
            .shape = {.op = PRS_GEMM_ALLGATHER,
                      .m = 520,
                      .n = widths[i / 2],
                      .k = 328,
                      .b_transposed = i & 1,
                      .dtype = i < 4 ? PRS_DTYPE_FP16 : PRS_DTYPE_BF16},
            .tuning = {.mover = i < WIDTHS ? PRS_MOVED_BY_CTAS : PRS_MOVED_BY_COPY_ENGINES, .columns = 192},
            .world = 2,
            .epochs = 2,
            .timeout_ms = RANKS_PATIENCE_MS});
}

Test(hopper, allreduce_is_right, .timeout = 600)
{
    assert_collective_right(PRS_GEMM_ALLREDUCE, (struct prs_gemm_tuning){0});
}

Test(hopper, allgather_by_copy_engine_is_right, .timeout = 600)
{
    static const struct ranks_row rows[] = {
        {PRS_GEMM_ALLGATHER, 2, 1024, 264, 128, 1, 3, {.mover = PRS_MOVED_BY_COPY_ENGINES, .band = 1}},
        {PRS_GEMM_ALLGATHER, 4, 1632, 328, 264, 0, 2, {.mover = PRS_MOVED_BY_COPY_ENGINES, .segments = 2}},
        {PRS_GEMM_ALLGATHER, 3, 1536, 264, 328, 1, 3, {.mover = PRS_MOVED_BY_COPY_ENGINES, .band = 1, .segments = 2}},
        /* pieces as the plan chooses them */
        {PRS_GEMM_ALLGATHER, 4, 1632, 328, 136, 0, 2, {.mover = PRS_MOVED_BY_COPY_ENGINES}},
    };
    ranks_assert_rows_right(rows, sizeof(rows) / sizeof(*rows));
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
    static const struct ranks_row rows[] = {
        {PRS_GEMM_REDUCE_SCATTER, 2, 1024, 512, 320, 1, 2, {.band = 1, .clusters = 1}},
        {PRS_GEMM_ALLREDUCE, 4, 2048, 256, 320, 1, 2, {.band = 1, .clusters = 1}},
    };
    ranks_assert_rows_right(rows, sizeof(rows) / sizeof(*rows));
}

/* Many small launches, so that a fast rank is an epoch ahead of a slow one. */
Test(hopper, epochs_run_into_each_other, .timeout = 600)
{
    static const struct ranks_row rows[] = {
        {PRS_GEMM_REDUCE_SCATTER, 4, 1024, 256, 64, 1, 10},
        {PRS_GEMM_ALLGATHER, 4, 1024, 256, 64, 1, 10, {.mover = PRS_MOVED_BY_CTAS}},
        {PRS_GEMM_ALLGATHER, 4, 1024, 256, 64, 1, 10, {.mover = PRS_MOVED_BY_COPY_ENGINES}},
        {PRS_GEMM_ALLREDUCE, 4, 1024, 256, 64, 1, 10},
    };
    ranks_assert_rows_right(rows, sizeof(rows) / sizeof(*rows));
}

/* A rank waits for the results of the others in each launch, also where a launch before it had as many. */
Test(hopper, a_launch_ends_when_its_results_are_there, .timeout = 600)
{
    ranks_assert_right(&(struct ranks_product){
        .shape = {PRS_GEMM_ALLREDUCE, 1024, 256, 64, 1}, .world = 2, .epochs = 6, .copied = true});
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
    static const struct ranks_row rows[] = {
        {PRS_GEMM_REDUCE_SCATTER, 5, 1280, 264, 72, 1, 3},
        {PRS_GEMM_REDUCE_SCATTER, 8, 1664, 264, 72, 0, 3, {.band = 1}},
        {PRS_GEMM_ALLREDUCE, 7, 1799, 264, 72, 1, 3},
        {PRS_GEMM_ALLREDUCE, 8, 1024, 264, 72, 0, 3},
        {PRS_GEMM_ALLGATHER, 6, 1200, 264, 136, 1, 3, {.mover = PRS_MOVED_BY_CTAS}},
        {PRS_GEMM_ALLGATHER, 8, 1024, 264, 136, 0, 3, {.mover = PRS_MOVED_BY_COPY_ENGINES}},
    };
    ranks_assert_rows_right(rows, sizeof(rows) / sizeof(*rows));
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
    assert_late_rank_knows(PRS_GEMM_PATH_FUSED, RANKS_LOST_MS);
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
    cr_assert_eq(ranks_open(self, 0, RANKS_LOST_MS, &ctx), 0);
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
