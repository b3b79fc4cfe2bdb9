/* SPDX-License-Identifier: Apache-2.0 */
/* The unfused path of the GEMM operations on emulated GPUs: cuBLASLt's product, and sums in one hop or two. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/hopper/hopper.h"
#include "test/hopper/ranks.h"

Test(hopper, unfused_shapes_are_right, .timeout = 600)
{
    static const struct ranks_row rows[] = {
        {PRS_GEMM_ALONE, 1, 100, 37, 51, 1, 1, {.path = PRS_GEMM_PATH_UNFUSED}},
        {PRS_GEMM_REDUCE_SCATTER, 4, 140, 37, 51, 1, 3, {.path = PRS_GEMM_PATH_UNFUSED}},
        {PRS_GEMM_ALLGATHER, 4, 140, 37, 51, 0, 3, {.path = PRS_GEMM_PATH_UNFUSED}},
        {PRS_GEMM_ALLGATHER, 4, 64, 40, 64, 1, 3, {.path = PRS_GEMM_PATH_UNFUSED}}, /* vectors of 16 bytes */
        {PRS_GEMM_ALLREDUCE, 4, 141, 37, 51, 1, 3, {.path = PRS_GEMM_PATH_UNFUSED}},
        {PRS_GEMM_ALLREDUCE, 3, 64, 64, 64, 0, 3, {.path = PRS_GEMM_PATH_UNFUSED}},
        {PRS_GEMM_ALLREDUCE, 4, 1, 9, 8, 1, 2, {.path = PRS_GEMM_PATH_UNFUSED}}, /* some ranks have nothing to add up */
    };
    ranks_assert_rows_right(rows, sizeof(rows) / sizeof(*rows));
}

/* ---- few rows: sums in one hop ---- */
/* Short products and many launches, so that a fast rank is a launch ahead of a slow one: a word that was left behind,
 * or taken before it arrived, is found. One row, columns in vectors of 16 bytes and not, fewer items than CTAs. */
Test(hopper, few_rows_are_summed_in_one_hop, .timeout = 600)
{
    static const struct ranks_row rows[] = {
        {PRS_GEMM_ALLREDUCE, 2, 1, 264, 8, 1, 12, {.path = PRS_GEMM_PATH_UNFUSED}},
        {PRS_GEMM_ALLREDUCE, 3, 5, 37, 8, 0, 12, {.path = PRS_GEMM_PATH_UNFUSED}},
        {PRS_GEMM_ALLREDUCE, 2, 128, 96, 8, 1, 4, {.path = PRS_GEMM_PATH_UNFUSED}},
        {PRS_GEMM_REDUCE_SCATTER, 2, 2, 264, 8, 1, 12, {.path = PRS_GEMM_PATH_UNFUSED}},
        {PRS_GEMM_REDUCE_SCATTER, 3, 6, 37, 8, 0, 12, {.path = PRS_GEMM_PATH_UNFUSED}},
        {PRS_GEMM_REDUCE_SCATTER, 4, 128, 96, 8, 1, 4, {.path = PRS_GEMM_PATH_UNFUSED}},
    };
    ranks_assert_rows_right(rows, sizeof(rows) / sizeof(*rows));
}

Test(hopper, five_to_eight_ranks_sum_few_rows, .timeout = 600)
{
    static const struct ranks_row rows[] = {
        {PRS_GEMM_ALLREDUCE, 5, 7, 264, 8, 1, 6, {.path = PRS_GEMM_PATH_UNFUSED}},
        {PRS_GEMM_ALLREDUCE, 8, 32, 64, 8, 0, 6, {.path = PRS_GEMM_PATH_UNFUSED}},
        {PRS_GEMM_REDUCE_SCATTER, 6, 12, 37, 8, 1, 6, {.path = PRS_GEMM_PATH_UNFUSED}},
        {PRS_GEMM_REDUCE_SCATTER, 8, 128, 64, 8, 0, 6, {.path = PRS_GEMM_PATH_UNFUSED}},
    };
    ranks_assert_rows_right(rows, sizeof(rows) / sizeof(*rows));
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
                              .sms = 2,
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
                                               .sms = 2,
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
