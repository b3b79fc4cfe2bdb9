/* SPDX-License-Identifier: Apache-2.0 */
/* Results of the GEMM operations on emulated GPUs: epilogues, row strides, fp16 and fp32. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/hopper/hopper.h"
#include "test/hopper/ranks.h"

/* ---- epilogues and row strides ---- */
static const enum prs_gemm_op operations[] = {PRS_GEMM_ALONE, PRS_GEMM_REDUCE_SCATTER, PRS_GEMM_ALLGATHER,
                                              PRS_GEMM_ALLREDUCE};

/* Each activation on one rank alone, and another one with each operation: what it computes does not depend on where. */
static void assert_epilogues_right(enum prs_gemm_path path)
{
    for (uint32_t i = 0; i < 4; i++) {
        struct ranks_product p = {.world = operations[i] == PRS_GEMM_ALONE ? 1 : 3, .bias = true, .epochs = 2};
        uint32_t first = i == 0 ? PRS_ACTIVATION_NONE : PRS_ACTIVATION_RELU + i;
        uint32_t last = i == 0 ? PRS_ACTIVATION_SILU : first;
        p.tuning.path = path;
        for (uint32_t activation = first; activation <= last; activation++) {
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
            p.shape = (struct prs_gemm_shape){op, 408, 656, 72, nk, PRS_ACTIVATION_SILU, .gated = 1};
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
