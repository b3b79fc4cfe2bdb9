/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of one rank that cannot succeed: each is refused by name, and the context goes on. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <string.h>

#include "test/hopper/ranks.h"
#include "tools/hopper/hopper.h"

static void refused(int r, int want, const char *telling)
{
    cr_expect_eq(r, want, "%s: %d", telling, r);
    cr_expect_not_null(strstr(prs_fused_error_text(), telling), "%s is not said: %s", telling, prs_fused_error_text());
}

Test(refused, a_context_needs_a_device_that_is_there_and_more_than_one_sm, .timeout = 300)
{
    struct prs_fused_config one_sm = {.world = 1, .max_sms = 1}, elsewhere = {.world = 1, .device = 3};
    struct prs_fused *ctx;
    hopper_setup(1, 4, 0);
    refused(prs_fused_open(&one_sm, &ctx), -EINVAL, "max_sms 1: kernels need at least 2 SMs");
    refused(prs_fused_open(&elsewhere, &ctx), -ENODEV, "CUDA device 3 cannot be queried");
}

Test(refused, memory_of_no_bytes_is_neither_given_nor_imported, .timeout = 300)
{
    struct prs_fused *ctx = ranks_open_alone();
    void *memory, *at;
    cr_assert_eq(cudaMalloc(&at, 4096), cudaSuccess);
    refused(prs_fused_alloc(ctx, 0, &memory), -EINVAL, "0 bytes of symmetric memory");
    refused(prs_fused_import(ctx, &at, 0), -EINVAL, "0 bytes of memory to import");
    cr_assert_eq(prs_fused_alloc(ctx, 64, &memory), 0, "the context goes on: %s", prs_fused_error_text());
    cr_assert_eq(prs_fused_import(ctx, &at, 4096), 0, "the context goes on: %s", prs_fused_error_text());
    prs_fused_close(ctx);
}

/* The number of perseus/fused.h. */
Test(refused, one_allocation_more_than_4095_is_refused_until_another_is_freed, .timeout = 300)
{
    enum { MOST = 4095 };
    static void *at[MOST];
    struct prs_fused *ctx = ranks_open_alone();
    void *more;
    for (int i = 0; i < MOST; i++)
        cr_assert_eq(prs_fused_alloc(ctx, 16, &at[i]), 0, "%d: %s", i, prs_fused_error_text());
    refused(prs_fused_alloc(ctx, 16, &more), -ENOMEM, "at most 4095 plans and allocations");
    cr_assert_eq(prs_fused_free(ctx, at[MOST / 2]), 0);
    cr_assert_eq(prs_fused_alloc(ctx, 16, &more), 0, "%s", prs_fused_error_text());
    prs_fused_close(ctx);
}

Test(refused, attention_needs_each_of_its_tensors, .timeout = 300)
{
    static const struct prs_attention_shape shape = {
        .batch = 1, .heads_q = 1, .heads_kv = 1, .head_dim = 64, .seq = 64};
    struct prs_fused *ctx = ranks_open_alone();
    struct prs_attention_plan *plan;
    void *x;
    cr_assert_eq(cudaMalloc(&x, 1 << 16), cudaSuccess);
    cr_assert_eq(prs_attention_plan_open(ctx, &shape, NULL, &plan), 0);
    for (int missing = 0; missing < 4; missing++) {
        struct prs_attention_operands tensors = {.q = missing == 0 ? NULL : x,
                                                 .k = missing == 1 ? NULL : x,
                                                 .v = missing == 2 ? NULL : x,
                                                 .out = missing == 3 ? NULL : x};
        refused(prs_attention_launch(plan, &tensors, NULL), -EINVAL, "must not be NULL");
    }
    prs_attention_plan_close(plan);
    prs_fused_close(ctx);
}

Test(refused, a_product_that_no_kernel_can_make, .timeout = 300)
{
    static const struct {
        struct prs_gemm_shape shape;
        const char *telling;
    } rows[] = {
        {{9, 64, 64, 64}, "operation 9 is not known"},
        {{PRS_GEMM_ALLREDUCE, 64, 64, 64, .c_anywhere = 1, .ldc = 128}, "the rows of C have no gaps, but ldc is 128"},
    };
    struct prs_fused *ctx = ranks_open_alone();
    struct prs_gemm_plan *plan;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        refused(prs_gemm_plan_open(ctx, &rows[i].shape, NULL, &plan), -EINVAL, rows[i].telling);
    prs_fused_close(ctx);
}

Test(refused, operands_that_contradict_each_other_or_are_not_aligned, .timeout = 300)
{
    static const struct prs_gemm_shape shape = {PRS_GEMM_ALONE, 64, 64, 64, .activation = PRS_ACTIVATION_SILU};
    static const struct prs_gemm_tuning tunings[] = {{.path = PRS_GEMM_PATH_FUSED}, {.path = PRS_GEMM_PATH_UNFUSED}};
    struct prs_fused *ctx = ranks_open_alone();
    struct prs_gemm_plan *plan[2];
    char *x;
    cr_assert_eq(cudaMalloc((void **)&x, 1 << 16), cudaSuccess);
    for (int i = 0; i < 2; i++)
        cr_assert_eq(prs_gemm_plan_open(ctx, &shape, &tunings[i], &plan[i]), 0, "%s", prs_fused_error_text());
    const struct {
        int plan;
        struct prs_gemm_operands operands;
        const char *telling;
    } rows[] = {
        {0, {.m = 64, .m_on_device = (uint32_t *)x}, "m is 64 and m_on_device is set: only one of them can hold"},
        {1, {.m_on_device = (uint32_t *)x}, "m_on_device needs the fused path"},
        {0, {.bias = x + 2}, "pointers must be 16-byte aligned"},
        {0, {.residual = x + 8}, "pointers must be 16-byte aligned"},
        {0, {.gathered = x + 4}, "the pointer must be 16-byte aligned"},
        {0, {.gathered = x}, "gathered is set, but operation 0 gathers nothing"},
        {0, {.residual = x}, "may be its own residual only without an activation"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct prs_gemm_operands operands = rows[i].operands;
        operands.a = operands.b = operands.c = x;
        refused(prs_gemm_launch(plan[rows[i].plan], &operands, NULL), -EINVAL, rows[i].telling);
    }
    for (int i = 0; i < 2; i++)
        prs_gemm_plan_close(plan[i]);
    prs_fused_close(ctx);
}

Test(refused, a_layer_of_experts_that_no_kernel_can_run, .timeout = 300)
{
    static const struct {
        struct prs_moe_shape shape;
        const char *telling;
    } rows[] = {
        {{.hidden = 64, .columns = 64, .experts = 2, .top_k = 1}, "MoE without tokens or experts: 0 tokens of 64"},
        {{.tokens = 4, .hidden = 64, .columns = 60, .experts = 2, .top_k = 1}, "both must be multiples of 8"},
        {{.tokens = 4, .hidden = 64, .columns = 72, .experts = 2, .top_k = 1, .gated = 1}, "must be a multiple of 16"},
        {{.tokens = 4, .hidden = 64, .experts = 2, .top_k = 1, .layer = 1}, "without columns of its first product"},
        {{.tokens = 4, .hidden = 64, .columns = 64, .experts = 2, .top_k = 999}, "top 999: experts must divide"},
        {{.tokens = 4, .hidden = 64, .columns = 64, .experts = 2, .top_k = 1, .capacity = 100}, "MoE capacity 100"},
        {{.tokens = 4, .hidden = 64, .columns = 64, .experts = 2, .top_k = 1, .logical_experts = 2},
         "a MoE map of 2 experts with 0 places each"},
        {{.tokens = 1u << 30, .hidden = 64, .columns = 64, .experts = 2, .top_k = 1}, "choices a rank"},
        {{.tokens = 4, .hidden = 64, .columns = 64, .experts = 2, .top_k = 1, .dtype = 77}, "MoE of dtype 77"},
        {{.tokens = 4, .hidden = 64, .columns = 64, .experts = 2, .top_k = 1, .scaling = PRS_SCALING_BLOCKS},
         "only e4m3 has scales"},
    };
    static const struct prs_moe_shape good = {.tokens = 4, .hidden = 64, .columns = 64, .experts = 2, .top_k = 1};
    struct prs_fused *ctx = ranks_open_alone();
    struct prs_moe_plan *plan;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        refused(prs_moe_plan_open(ctx, &rows[i].shape, NULL, &plan), -EINVAL, rows[i].telling);
    refused(prs_moe_plan_open(ctx, &good, &(struct prs_moe_tuning){.returns = 7}, &plan), -EINVAL,
            "returns 7 is not known");
    prs_fused_close(ctx);
}

static void open_of_65_rows(uint32_t rank, struct ranks_self *self, void *user)
{
    static const struct prs_gemm_shape shape = {PRS_GEMM_ALLGATHER, 65, 64, 64};
    struct prs_fused *ctx;
    struct prs_gemm_plan *plan;
    cr_assert_eq(ranks_open(self, 0, RANKS_PATIENCE_MS, &ctx), 0);
    refused(prs_gemm_plan_open(ctx, &shape, NULL, &plan), -EINVAL, "65 rows do not divide among 2 ranks");
    prs_fused_close(ctx);
}

Test(refused, rows_that_do_not_divide_among_the_ranks, .timeout = 300)
{
    hopper_setup(2, 4, 0);
    ranks_run(2, open_of_65_rows, NULL);
}
