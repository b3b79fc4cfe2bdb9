/* SPDX-License-Identifier: Apache-2.0 */
/* Norms together with other launches, and calls that are refused. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "test/hopper/ranks.h"
#include "tools/hopper/hopper.h"

#define SUM(most_rows, columns)                                                                                        \
    {                                                                                                                  \
        .op = PRS_GEMM_ALLREDUCE, .m = most_rows, .n = columns, .b_transposed = 1, .c_anywhere = 1,                    \
        .norm = PRS_NORM_RMS                                                                                           \
    }

/* Plans with a norm and without share an inbox: the number of draws differs, but each launch is one. In two hops and in
 * one. */
static void launch_in_turn(uint32_t rank, struct ranks_self *self, void *user)
{
    enum { PLANS = 4, TURNS = 40, MOST = 130 * 1024 };
    static const struct prs_gemm_shape list[PLANS] = {SUM(120, 1024),
                                                      SUM(3, 264),
                                                      {PRS_GEMM_ALLREDUCE, 130, 1024, 0, 1, .c_anywhere = 1},
                                                      {PRS_GEMM_ALLREDUCE, 3, 37, 0, 1, .c_anywhere = 1}};
    struct prs_gemm_tuning tuning = {.path = PRS_GEMM_PATH_UNFUSED};
    struct prs_gemm_plan *plans[PLANS];
    struct prs_gemm_operands x[PLANS] = {0};
    struct prs_fused *ctx;
    uint8_t *results[TURNS], *want[PLANS], *have = malloc(MOST * 4);
    uint32_t random = (uint32_t)hopper_seed(), bytes[PLANS], chosen[TURNS];
    (void)user;
    cr_assert_eq(ranks_open(self, 0, 60000, &ctx), 0);
    for (uint32_t i = 0; i < PLANS; i++) {
        bytes[i] = list[i].m * list[i].n * 2;
        cr_assert_eq(prs_gemm_plan_open(ctx, &list[i], &tuning, &plans[i]), 0, "%s", prs_fused_error_text());
        x[i].a = ranks_upload(10 * i + rank, (uint64_t)list[i].m * list[i].n);
        x[i].c = ranks_device(2 * (uint64_t)bytes[i], 0xff);
        x[i].normed = list[i].norm ? (uint8_t *)x[i].c + bytes[i] : NULL;
        cr_assert_eq(prs_gemm_launch(plans[i], &x[i], NULL), 0, "%s", prs_fused_error_text());
        cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
        want[i] = malloc(2 * (size_t)bytes[i]);
        cr_assert_eq(cudaMemcpy(want[i], x[i].c, 2 * (size_t)bytes[i], cudaMemcpyDeviceToHost), cudaSuccess);
    }
    for (uint32_t i = 0; i < TURNS; i++) {
        struct prs_gemm_operands y;
        random = random * 1664525 + 1013904223;
        chosen[i] = (random >> 8) % 16 == 0 ? 0 : (random >> 12) % 16 == 0 ? 2 : 1 + (random >> 16) % 2 * 2;
        y = x[chosen[i]];
        y.c = results[i] = ranks_device(2 * (uint64_t)bytes[chosen[i]], 0xff);
        y.normed = y.normed ? results[i] + bytes[chosen[i]] : NULL;
        cr_assert_eq(prs_gemm_launch(plans[chosen[i]], &y, NULL), 0);
    }
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    for (uint32_t i = 0; i < TURNS; i++) {
        cr_assert_eq(cudaMemcpy(have, results[i], 2 * (size_t)bytes[chosen[i]], cudaMemcpyDeviceToHost), cudaSuccess);
        cr_assert_eq(memcmp(have, want[chosen[i]], 2 * (size_t)bytes[chosen[i]]), 0,
                     "rank %u, launch %u of plan %u (HOPPER_SEED=%llu)", rank, i, chosen[i],
                     (unsigned long long)hopper_seed());
    }
    for (uint32_t i = 0; i < PLANS; i++) {
        prs_gemm_plan_close(plans[i]);
        free(want[i]);
    }
    free(have);
    prs_fused_close(ctx);
}

Test(norm, plans_with_a_norm_and_without_share_an_inbox, .timeout = 600)
{
    hopper_setup(5, 8, 0);
    ranks_run(5, launch_in_turn, NULL);
}

/* ---- what is refused ---- */
static void refused(int r, const char *text)
{
    cr_expect_eq(r, -EINVAL, "%s: %d", text, r);
    cr_expect_not_null(strstr(prs_fused_error_text(), text), "%s is not in: %s", text, prs_fused_error_text());
}

static void refuse_launches(struct prs_fused *ctx)
{
    struct prs_gemm_shape shape = SUM(4, 264);
    struct prs_gemm_operands good = {.a = ranks_device(4 * 264 * 2, 0),
                                     .c = ranks_device(4 * 264 * 2, 0),
                                     .normed = ranks_device(4 * 264 * 2, 0)},
                             x = good;
    struct prs_gemm_plan *plan;
    cr_assert_eq(prs_gemm_plan_open(ctx, &shape, NULL, &plan), 0, "%s", prs_fused_error_text());
    cr_assert_eq(prs_gemm_launch(plan, &good, NULL), 0, "%s", prs_fused_error_text());
    x.normed = NULL;
    refused(prs_gemm_launch(plan, &x, NULL), "neither normed nor quantised is set");
    x = good, x.b = good.normed;
    refused(prs_gemm_launch(plan, &x, NULL), "not NULL but for B where k is 0");
    x = good, x.c = (void *)good.a;
    refused(prs_gemm_launch(plan, &x, NULL), "is A, which other threads");
    x = good, x.normed = good.c;
    refused(prs_gemm_launch(plan, &x, NULL), "neither may be C");
    x = good, x.norm_eps = NAN;
    refused(prs_gemm_launch(plan, &x, NULL), "norm_eps nan");
    x = good, x.norm_weight = (char *)good.a + 2;
    refused(prs_gemm_launch(plan, &x, NULL), "norm_weight");
    x = good, x.quantised = good.c;
    refused(prs_gemm_launch(plan, &x, NULL), "neither may be C");
    x = good, x.quantised = good.normed, x.quantised_scale = (float *)good.c;
    refused(prs_gemm_launch(plan, &x, NULL), "all are set, or none");
    x.quantised_scaling = PRS_SCALING_BLOCKS;
    refused(prs_gemm_launch(plan, &x, NULL), "blocks of 128 columns, which do not divide 264");
    x.quantised_scaling = 4;
    refused(prs_gemm_launch(plan, &x, NULL), "quantised_scaling 4 is not known");
    x.quantised_scaling = PRS_SCALING_ROWS, x.quantised_scale_pitch = 4;
    refused(prs_gemm_launch(plan, &x, NULL), "quantised_scale_pitch 4");
    prs_gemm_plan_close(plan);
    shape.norm = PRS_NORM_NONE;
    cr_assert_eq(prs_gemm_plan_open(ctx, &shape, NULL, &plan), 0, "%s", prs_fused_error_text());
    refused(prs_gemm_launch(plan, &good, NULL), "the plan's shape has no norm");
    prs_gemm_plan_close(plan);
}

Test(norm, what_has_no_norm_is_refused_by_name, .timeout = 60)
{
    struct prs_fused_config config = {.world = 1};
    struct prs_gemm_tuning best;
    struct prs_gemm_operands none = {0};
    struct prs_gemm_plan *plan;
    struct prs_fused *ctx;
    struct prs_gemm_shape s = SUM(4, 264);
    hopper_setup(1, 4, 0);
    cr_assert_eq(prs_fused_open(&config, &ctx), 0);
    refuse_launches(ctx);
    refused(prs_gemm_autotune(ctx, &s, &none, 1, NULL, &best), "k is 0");
    s.norm = 2;
    refused(prs_gemm_plan_open(ctx, &s, NULL, &plan), "norm 2 is not known");
    s.norm = PRS_NORM_RMS, s.n = 260;
    refused(prs_gemm_plan_open(ctx, &s, NULL, &plan), "a norm of 260 columns");
    s.n = 264, s.op = PRS_GEMM_ALONE;
    refused(prs_gemm_plan_open(ctx, &s, NULL, &plan), "only k may be 0");
    s.k = 64, s.op = PRS_GEMM_ALLGATHER;
    refused(prs_gemm_plan_open(ctx, &s, NULL, &plan), "an ALLGATHER has no norm");
    s.k = 0, s.op = PRS_GEMM_ALLREDUCE;
    refused(prs_gemm_plan_open(ctx, &s, &(struct prs_gemm_tuning){.path = PRS_GEMM_PATH_FUSED}, &plan),
            "there is no product");
    prs_fused_close(ctx);
}
