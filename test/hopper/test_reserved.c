/* SPDX-License-Identifier: Apache-2.0 */
/* A program that was written for a newer version and sets one of its fields is told so, in every call of
 * libperseus-fused that takes a structure (test/unit/test_reserved.c has those of the transport). */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "test/hopper/ranks.h"
#include "tools/hopper/hopper.h"

enum { LAST = PRS_RESERVED_WORDS - 5, /* of the structure that has the fewest left */ BYTES = 4096 };

static const struct prs_gemm_shape product = {PRS_GEMM_ALONE, 64, 64, 64};
static const struct prs_moe_shape experts = {.tokens = 4, .hidden = 64, .columns = 64, .experts = 2, .top_k = 1};
static const struct prs_attention_shape attention = {
    .batch = 1, .heads_q = 1, .heads_kv = 1, .head_dim = 64, .seq = 64};

static void refused(int r, const char *name)
{
    char word[32];
    (void)snprintf(word, sizeof(word), "reserved[%d] is 0x5", LAST);
    cr_expect_eq(r, -EINVAL, "%s: %d", name, r);
    cr_expect_not_null(strstr(prs_fused_error_text(), name), "%s is not named: %s", name, prs_fused_error_text());
    cr_expect_not_null(strstr(prs_fused_error_text(), word), "%s", prs_fused_error_text());
}

Test(reserved, a_context_a_shape_or_a_tuning_of_a_newer_version_is_refused, .timeout = 300)
{
    struct prs_fused_config config = {.world = 1, .reserved[LAST] = 5};
    struct prs_gemm_shape gemm = product;
    struct prs_gemm_tuning gemm_tuning = {.reserved[LAST] = 5};
    struct prs_moe_shape moe = experts;
    struct prs_moe_tuning moe_tuning = {.reserved[LAST] = 5};
    struct prs_attention_shape ring = attention;
    struct prs_attention_tuning ring_tuning = {.reserved[LAST] = 5};
    struct prs_moe_loads loads = {.reserved[LAST] = 5};
    struct prs_gemm_plan *gemm_plan;
    struct prs_moe_plan *moe_plan;
    struct prs_attention_plan *ring_plan;
    struct prs_attention_backward_plan *back;
    struct prs_fused *ctx = ranks_open_alone(), *other;
    gemm.reserved[LAST] = moe.reserved[LAST] = ring.reserved[LAST] = 5;
    refused(prs_fused_open(&config, &other), "struct prs_fused_config");
    refused(prs_gemm_plan_open(ctx, &gemm, NULL, &gemm_plan), "struct prs_gemm_shape");
    refused(prs_gemm_plan_open(ctx, &product, &gemm_tuning, &gemm_plan), "struct prs_gemm_tuning");
    refused(prs_moe_plan_open(ctx, &moe, NULL, &moe_plan), "struct prs_moe_shape");
    refused(prs_moe_plan_open(ctx, &experts, &moe_tuning, &moe_plan), "struct prs_moe_tuning");
    refused(prs_attention_plan_open(ctx, &ring, NULL, &ring_plan), "struct prs_attention_shape");
    refused(prs_attention_plan_open(ctx, &attention, &ring_tuning, &ring_plan), "struct prs_attention_tuning");
    refused(prs_attention_backward_plan_open(ctx, &ring, NULL, &back), "struct prs_attention_shape");
    refused(prs_attention_backward_plan_open(ctx, &attention, &ring_tuning, &back), "struct prs_attention_tuning");
    refused(prs_moe_balance(&loads), "struct prs_moe_loads");
    prs_fused_close(ctx);
}

/* The structures are right but for the reserved word. */
static void refuse_operands_of_moe(struct prs_fused *ctx, void *x)
{
    struct prs_moe_batch batch = {.out = x, .weights = x, .rows = x, .expert_rows = x, .down = x, .reserved[LAST] = 5};
    struct prs_moe_results results = {.rows = x, .out = x, .reserved[LAST] = 5};
    struct prs_moe_again again = {.out = x, .reserved[LAST] = 5};
    struct prs_moe_values values = {.values = x, .rows = x, .reserved[LAST] = 5};
    struct prs_moe_product multiply = {.rows = x, .weights = x, .out = x, .k = 8, .n = 8, .reserved[LAST] = 5};
    struct prs_moe_activation back = {
        .columns = x, .gradients = x, .rows = x, .of_columns = x, .weighted = x, .products = x, .reserved[LAST] = 5};
    struct prs_moe_shape shape = experts;
    struct prs_moe_plan *plan;
    shape.layer = 1;
    cr_assert_eq(prs_moe_plan_open(ctx, &shape, NULL, &plan), 0);
    refused(prs_moe_dispatch_gemm(plan, &batch, NULL), "struct prs_moe_batch");
    refused(prs_moe_gemm(plan, &batch, NULL), "struct prs_moe_batch");
    refused(prs_moe_dispatch(plan, &batch, NULL), "struct prs_moe_batch");
    refused(prs_moe_layer(plan, &batch, NULL), "struct prs_moe_batch");
    refused(prs_moe_combine(plan, &results, NULL), "struct prs_moe_results");
    refused(prs_moe_dispatch_again(plan, &again, NULL), "struct prs_moe_again");
    refused(prs_moe_return_values(plan, &values, NULL), "struct prs_moe_values");
    refused(prs_moe_multiply(plan, &multiply, NULL), "struct prs_moe_product");
    refused(prs_moe_activation_back(plan, &back, NULL), "struct prs_moe_activation");
    prs_moe_plan_close(plan);
}

Test(reserved, operands_of_a_newer_version_are_refused, .timeout = 300)
{
    struct prs_fused *ctx = ranks_open_alone();
    struct prs_gemm_plan *gemm;
    struct prs_attention_plan *ring;
    struct prs_attention_backward_plan *back;
    void *x;
    cr_assert_eq(cudaMalloc(&x, BYTES), cudaSuccess);
    struct prs_gemm_operands operands = {.a = x, .b = x, .c = x, .reserved[LAST] = 5};
    struct prs_attention_operands tensors = {.q = x, .k = x, .v = x, .out = x, .reserved[LAST] = 5};
    struct prs_attention_gradients gradients = {x, x, x, x, x, x, NULL, x, x, x, .reserved[LAST] = 5};
    cr_assert_eq(prs_gemm_plan_open(ctx, &product, NULL, &gemm), 0);
    cr_assert_eq(prs_attention_plan_open(ctx, &attention, NULL, &ring), 0);
    cr_assert_eq(prs_attention_backward_plan_open(ctx, &attention, NULL, &back), 0);
    refused(prs_gemm_launch(gemm, &operands, NULL), "struct prs_gemm_operands");
    refused(prs_attention_launch(ring, &tensors, NULL), "struct prs_attention_operands");
    refused(prs_attention_backward_launch(back, &gradients, NULL), "struct prs_attention_gradients");
    prs_gemm_plan_close(gemm);
    prs_attention_plan_close(ring);
    prs_attention_backward_plan_close(back);
    refuse_operands_of_moe(ctx, x);
    prs_fused_close(ctx);
}
