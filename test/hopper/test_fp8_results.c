/* SPDX-License-Identifier: Apache-2.0 */
/* Results in e4m3 with a scale for each row and 128 columns, on emulated GPUs. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <string.h>

#include "tools/hopper/hopper.h"
#include "test/hopper/ranks.h"

static struct ranks_product product_of(enum prs_gemm_op op, uint32_t scaling, uint32_t m, uint32_t n, uint32_t k)
{
    return (struct ranks_product){
        .shape = {op, m, n, k, 1, .dtype = PRS_DTYPE_E4M3, .c_dtype = PRS_DTYPE_E4M3, .scaling = scaling},
        .world = op == PRS_GEMM_ALONE ? 1 : 2};
}

/* Tails in rows, and in columns: one block of the last tile. Both kernels of each operation; gaps after rows and after
 * the scales of a block. */
Test(fp8_results, quantised_results_are_right, .timeout = 300)
{
    for (uint32_t i = 0; i < 4; i++) {
        enum prs_gemm_op op = i % 2 == 0 ? PRS_GEMM_ALONE : PRS_GEMM_ALLGATHER;
        struct ranks_product p = product_of(op, i < 2 ? PRS_SCALING_BLOCKS : PRS_SCALING_ROWS, 280, 384, 256);
        p.shape.fast_accumulation = i >= 2;
        p.epochs = 2;
        p.shape.ldc = i == 0 ? 400 : 0;
        p.c_scale_pitch = i == 0 ? 283 : 0;
        ranks_assert_right(&p);
    }
}

/* A tile of a gated product has one block of columns. */
Test(fp8_results, gated_results_are_quantised_when_they_are_finished, .timeout = 300)
{
    for (uint32_t i = 0; i < 2; i++) {
        struct ranks_product p =
            product_of(PRS_GEMM_ALLGATHER, i ? PRS_SCALING_BLOCKS : PRS_SCALING_TENSOR, 136, 768, 128);
        p.shape.gated = 1, p.shape.activation = PRS_ACTIVATION_SILU;
        p.shape.fast_accumulation = i == 0;
        p.bias = true, p.keeps = true, p.tuning.mover = i ? PRS_MOVED_BY_CTAS : PRS_MOVED_BY_COPY_ENGINES;
        ranks_assert_right(&p);
    }
}

/* Fewer rows than the most, whose number the host gives, or the kernel finds. */
Test(fp8_results, quantised_results_have_the_rows_of_the_launch, .timeout = 300)
{
    static const uint32_t ROWS[] = {512, 128};
    for (uint32_t i = 0; i < 4; i++) {
        struct ranks_product p =
            product_of(i % 2 ? PRS_GEMM_ALLGATHER : PRS_GEMM_ALONE, PRS_SCALING_ROWS, 512, 256, 128);
        p.rows = ROWS, p.epochs = 2, p.on_device = i < 2;
        ranks_assert_right(&p);
    }
}

Test(fp8_results, unfused_results_are_quantised, .timeout = 300)
{
    static const uint32_t ROWS[] = {44, 12};
    for (uint32_t i = 0; i < 4; i++) {
        struct ranks_product p = product_of(i % 2 ? PRS_GEMM_ALLGATHER : PRS_GEMM_ALONE,
                                            i < 2 ? PRS_SCALING_BLOCKS : PRS_SCALING_ROWS, 44, 2304, 512);
        p.tuning.path = PRS_GEMM_PATH_UNFUSED;
        p.shape.gated = i < 2, p.shape.activation = PRS_ACTIVATION_SILU;
        p.scale_a_pitch = i < 2 ? 48 : 0, p.c_scale_pitch = i == 0 ? 52 : 0;
        p.rows = ROWS, p.epochs = 2, p.bias = true;
        ranks_assert_right(&p);
    }
}

/* ---- what is refused ---- */
static void refuse_shape(struct prs_fused *ctx, struct prs_gemm_shape shape, const char *why)
{
    struct prs_gemm_plan *plan;
    cr_expect_eq(prs_gemm_plan_open(ctx, &shape, NULL, &plan), -EINVAL, "%s", why);
    cr_expect(strstr(prs_fused_error_text(), why), "%s\nis not: %s", prs_fused_error_text(), why);
}

static void refuse(struct prs_gemm_plan *plan, struct prs_gemm_operands x, const char *why)
{
    cr_expect_eq(prs_gemm_launch(plan, &x, NULL), -EINVAL, "%s", why);
    cr_expect(strstr(prs_fused_error_text(), why), "%s\nis not: %s", prs_fused_error_text(), why);
}

#define E4M3(op, n, ...)                                                                                               \
    (struct prs_gemm_shape)                                                                                            \
    {                                                                                                                  \
        op, 64, n, 128, 1, .dtype = PRS_DTYPE_E4M3, .c_dtype = PRS_DTYPE_E4M3, .scaling = 1, __VA_ARGS__               \
    }

Test(fp8_results, results_that_cannot_be_quantised_are_refused_by_name, .timeout = 60)
{
    struct prs_fused_config config = {.world = 1};
    struct prs_gemm_plan *plan = NULL;
    struct prs_gemm_operands x = {0}, y;
    struct prs_fused *ctx;
    float *memory;
    hopper_setup(1, 4, 0);
    cr_assert_eq(prs_fused_open(&config, &ctx), 0);
    refuse_shape(ctx, (struct prs_gemm_shape){PRS_GEMM_ALONE, 64, 128, 128, 1, .c_dtype = PRS_DTYPE_E4M3},
                 "c_dtype 4 (e4m3): C has the type of A and B, bf16, or is fp32");
    refuse_shape(ctx, E4M3(PRS_GEMM_REDUCE_SCATTER, 128), "c_dtype 4 (e4m3) of operation 1: a sum over ranks is bf16");
    refuse_shape(ctx, E4M3(PRS_GEMM_ALLREDUCE, 128), "c_dtype 4 (e4m3) of operation 3");
    refuse_shape(ctx, E4M3(PRS_GEMM_ALONE, 192), "C in e4m3 has a scale for each 128 columns, which do not divide 192");
    refuse_shape(ctx, E4M3(PRS_GEMM_ALONE, 128, .gated = 1), "which do not divide 64");
    refuse_shape(ctx, E4M3(PRS_GEMM_ALONE, 128, .norm = PRS_NORM_RMS), "C has scales, and a norm takes rows without");
    refuse_shape(ctx, E4M3(PRS_GEMM_ALONE, 128, .ldc = 136), "rows of C are 136 elements apart");
    cr_assert_eq(prs_gemm_plan_open(ctx, &E4M3(PRS_GEMM_ALONE, 128), NULL, &plan), 0, "%s", prs_fused_error_text());
    memory = ranks_device(1 << 16, 0);
    x.a = x.b = x.c = memory, x.scale_a = x.scale_b = memory;
    x.quantised_scale = memory, x.quantised_scaling = PRS_SCALING_BLOCKS;
    y = x, y.quantised_scaling = 0;
    refuse(plan, y, "quantised_scaling 0: C in e4m3 has a scale for each row and 128 columns (PRS_SCALING_BLOCKS)");
    y = x, y.quantised_scale = NULL;
    refuse(plan, y, "quantised_scale (nil): the pointer must be 4-byte aligned, and not NULL");
    y = x, y.quantised_scale_pitch = 63;
    refuse(plan, y, "quantised_scale_pitch 63: it must be at least the 64 rows of C");
    y = x, y.residual = memory;
    refuse(plan, y, "C is e4m3, and nothing is added to it");
    y = x, y.quantised = memory;
    refuse(plan, y, "the plan's shape has no norm");
    prs_gemm_plan_close(plan);
    prs_fused_close(ctx);
}
