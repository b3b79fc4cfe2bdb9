/* SPDX-License-Identifier: Apache-2.0 */
/* Products of e4m3 on emulated GPUs: the scales of tensors, rows and blocks, the precision of sums, and what is
 * refused. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <string.h>

#include "tools/hopper/hopper.h"
#include "test/hopper/ranks.h"

static const enum prs_gemm_op operations[] = {PRS_GEMM_ALONE, PRS_GEMM_REDUCE_SCATTER, PRS_GEMM_ALLGATHER,
                                              PRS_GEMM_ALLREDUCE};

static struct ranks_product product_of(enum prs_gemm_op op, uint32_t scaling, uint32_t m, uint32_t n, uint32_t k)
{
    return (struct ranks_product){.shape = {op, m, n, k, 1, .dtype = PRS_DTYPE_E4M3, .scaling = scaling},
                                  .world = op == PRS_GEMM_ALONE ? 1 : 2};
}

/* Tails in m, n and k; sums promoted, and not; where they are, two launches, so both banks. */
Test(fp8, fp8_products_are_right, .timeout = 300)
{
    for (int i = 0; i < 4; i++)
        for (uint32_t scaling = PRS_SCALING_TENSOR; scaling <= PRS_SCALING_ROWS; scaling++)
            for (uint32_t fast = 0; fast < 2; fast++) {
                struct ranks_product p = product_of(operations[i], scaling, 280, 328, 208);
                p.shape.fast_accumulation = fast;
                p.epochs = fast ? 1 : 2;
                ranks_assert_right(&p);
            }
}

Test(fp8, fp8_blocks_are_scaled, .timeout = 300)
{
    for (int i = 0; i < 4; i++) {
        struct ranks_product p = product_of(operations[i], PRS_SCALING_BLOCKS, 280, 328, 384);
        p.epochs = 2;
        p.scale_a_pitch = i == 0 ? 288 : 0;
        ranks_assert_right(&p);
    }
}

/* More K steps than share a counter, several bands and segments, launches that are an epoch apart, and fewer rows than
 * the most. */
Test(fp8, fp8_scales_travel_with_their_rows, .timeout = 300)
{
    static const uint32_t ROWS[] = {1032, 24, 600};
    for (uint32_t mover = PRS_MOVED_BY_COPY_ENGINES; mover <= PRS_MOVED_BY_CTAS; mover++)
        for (uint32_t scaling = PRS_SCALING_ROWS; scaling <= PRS_SCALING_BLOCKS; scaling++) {
            struct ranks_product p = product_of(PRS_GEMM_ALLGATHER, scaling, 1032, 128, 640);
            p.tuning.mover = mover;
            p.world = 3, p.tuning.band = 1;
            if (mover == PRS_MOVED_BY_COPY_ENGINES)
                p.tuning.segments = 2;
            p.rows = ROWS, p.epochs = 3;
            ranks_assert_right(&p);
        }
}

/* The kernel finds the number of rows on the device. */
Test(fp8, fp8_scales_of_rows_on_the_device_are_found, .timeout = 300)
{
    static const uint32_t ROWS[] = {512, 128};
    for (int i = 0; i < 4; i++) {
        struct ranks_product p = product_of(operations[i], PRS_SCALING_ROWS, 512, 128, 128);
        p.rows = ROWS, p.epochs = 2, p.on_device = true;
        ranks_assert_right(&p);
    }
}

Test(fp8, fp8_epilogues_come_after_the_scales, .timeout = 300)
{
    for (int i = 0; i < 4; i++)
        for (uint32_t scaling = PRS_SCALING_ROWS; scaling <= PRS_SCALING_BLOCKS; scaling++) {
            struct ranks_product p = product_of(operations[i], scaling, 280, 512, 128);
            p.shape.activation = PRS_ACTIVATION_SILU;
            p.bias = true, p.residual = RANKS_RESIDUAL;
            p.shape.fast_accumulation = i % 2 == 0 && scaling == PRS_SCALING_ROWS;
            ranks_assert_right(&p);
            p.shape.gated = 1;
            ranks_assert_right(&p);
        }
}

Test(fp8, fp8_gathered_rows_are_kept, .timeout = 300)
{
    for (uint32_t mover = PRS_MOVED_BY_COPY_ENGINES; mover <= PRS_MOVED_BY_CTAS; mover++) {
        struct ranks_product p = product_of(PRS_GEMM_ALLGATHER, PRS_SCALING_ROWS, 280, 128, 272);
        p.tuning.mover = mover, p.keeps = true, p.epochs = 2;
        ranks_assert_right(&p);
    }
}

/* Numbers of one sign, whose sum grows: not promoted, it loses more than the bound of a promoted one allows. The bound
 * of a sum that is not promoted allows that. */
Test(fp8, fp8_sums_are_promoted, .timeout = 300)
{
    struct ranks_product p = product_of(PRS_GEMM_ALONE, PRS_SCALING_ROWS, 64, 128, 4096);
    p.positive = true;
    ranks_assert_right(&p);
    p.shape.scaling = PRS_SCALING_BLOCKS;
    ranks_assert_right(&p);
    p.shape.scaling = PRS_SCALING_TENSOR, p.shape.fast_accumulation = 1;
    ranks_assert_right(&p);
}

/* ---- unfused ---- */
/* Scales of rows and blocks travel with the rows of an all-gather; those of blocks, of A and of B, are copied where
 * cuBLASLt does not take their distance. Fewer rows than the most, so the next launch finds the scales of the last one
 * elsewhere; results of 16 and 32 bits. */
Test(fp8, fp8_unfused_products_are_right, .timeout = 300)
{
    static const uint32_t ROWS[] = {44, 12, 40};
    for (int i = 0; i < 4; i++)
        for (uint32_t scaling = PRS_SCALING_TENSOR; scaling <= PRS_SCALING_BLOCKS; scaling++) {
            uint32_t odd = i % 2 * 128, k = scaling == PRS_SCALING_BLOCKS ? 512 + odd : 144;
            struct ranks_product p = product_of(operations[i], scaling, 44, 128 + odd, k);
            p.tuning.path = PRS_GEMM_PATH_UNFUSED;
            p.shape.c_dtype = i % 2 == 0 ? PRS_DTYPE_FP32 : PRS_DTYPE_BF16;
            p.scale_a_pitch = scaling == PRS_SCALING_BLOCKS && i < 3 ? 48 : 0;
            p.rows = ROWS, p.epochs = 3;
            p.bias = true, p.residual = RANKS_RESIDUAL;
            ranks_assert_right(&p);
        }
}

Test(fp8, fp8_unfused_gathered_rows_are_kept_and_gated, .timeout = 300)
{
    for (uint32_t scaling = PRS_SCALING_ROWS; scaling <= PRS_SCALING_BLOCKS; scaling++) {
        struct ranks_product p = product_of(PRS_GEMM_ALLGATHER, scaling, 44, 256, 512);
        p.tuning.path = PRS_GEMM_PATH_UNFUSED;
        p.keeps = true, p.epochs = 2;
        p.scale_a_pitch = scaling == PRS_SCALING_BLOCKS ? 24 : 0;
        p.shape.gated = 1, p.shape.activation = PRS_ACTIVATION_SILU;
        ranks_assert_right(&p);
    }
}

/* ---- between nodes ---- */
static const struct nodes {
    uint32_t world, nodes;
} splits[] = {{2, 2}, {4, 2}, {3, 3}};
enum { SPLITS = sizeof(splits) / sizeof(*splits) };

/* With scales of blocks, the pitch of A's scales is enough for the rows of any rank. */
static struct ranks_product between(const struct nodes *split, enum prs_gemm_op op, uint32_t scaling, uint32_t m,
                                    uint32_t n, uint32_t k)
{
    struct ranks_product p = product_of(op, scaling, m, n, k);
    p.world = split->world, p.nodes = split->nodes;
    p.scale_a_pitch = scaling == PRS_SCALING_BLOCKS ? (m + 3) / 4 * 4 : 0;
    return p;
}

/* Only an all-gather has scales that travel. The traffic of the other operations does not depend on scaling, so each
 * split of ranks has one kind of scaling for each of them. */
static bool differs(int split, enum prs_gemm_op op, uint32_t scaling)
{
    return op == PRS_GEMM_ALLGATHER || scaling == PRS_SCALING_TENSOR + ((uint32_t)split + op) % 3;
}

/* Tails in m, n and k; promoted sums also where the caller can do without. */
Test(fp8_nodes, fp8_products_are_right, .timeout = 600)
{
    ranks_need_a_device();
    for (int split = 0; split < SPLITS; split++)
        for (int i = 1; i < 4; i++)
            for (uint32_t scaling = PRS_SCALING_TENSOR; scaling <= PRS_SCALING_BLOCKS; scaling++) {
                if (!differs(split, operations[i], scaling))
                    continue;
                struct ranks_product p = between(&splits[split], operations[i], scaling, 276, 328,
                                                 scaling == PRS_SCALING_BLOCKS ? 384 : 208);
                p.shape.fast_accumulation = scaling == PRS_SCALING_TENSOR && i != 1;
                p.epochs = 2;
                ranks_assert_right(&p);
            }
}

/* Signals for less than the strips of a row tile, for strips of two, and for whole bands; blocks with a row tile that
 * has no rows; launches of more rows and fewer. */
Test(fp8_nodes, fp8_scales_cross_with_their_rows, .timeout = 600)
{
    static const uint32_t ROWS[] = {1056, 24, 600}, GROUPS[] = {1, 3, 1000};
    ranks_need_a_device();
    for (int split = 0; split < SPLITS; split++)
        for (uint32_t scaling = PRS_SCALING_ROWS; scaling <= PRS_SCALING_BLOCKS; scaling++) {
            struct ranks_product p = between(&splits[split], PRS_GEMM_ALLGATHER, scaling, 1056, 128, 1152);
            p.tuning.band = 1, p.tuning.tiles_per_signal = GROUPS[(split + scaling) % 3];
            p.rows = ROWS, p.epochs = 3, p.keeps = true;
            ranks_assert_right(&p);
        }
}

/* The kernel finds the number of rows on the device, in each replay of a graph. */
Test(fp8_nodes, fp8_rows_on_the_device_are_found, .timeout = 600)
{
    static const uint32_t ROWS[] = {512, 256};
    ranks_need_a_device();
    for (int split = 0; split < 2; split++)
        for (int i = 1; i < 4; i++) {
            uint32_t scaling = i % 2 == 0 ? PRS_SCALING_BLOCKS : PRS_SCALING_ROWS;
            struct ranks_product p = between(&splits[split], operations[i], scaling, 512, 128, 256);
            p.rows = ROWS, p.epochs = 2, p.on_device = true, p.replays = 2;
            ranks_assert_right(&p);
        }
}

Test(fp8_nodes, fp8_epilogues_and_results_are_right, .timeout = 600)
{
    ranks_need_a_device();
    for (int i = 1; i < 4; i++) {
        struct ranks_product p = between(&splits[1], operations[i], PRS_SCALING_BLOCKS, 280, 512, 128);
        p.shape.activation = PRS_ACTIVATION_SILU, p.shape.gated = i != 1;
        p.bias = true, p.residual = RANKS_RESIDUAL;
        ranks_assert_right(&p);
        p.residual = RANKS_NO_RESIDUAL, p.shape.c_dtype = PRS_DTYPE_E4M3, p.epochs = 2;
        if (operations[i] == PRS_GEMM_ALLGATHER)
            ranks_assert_right(&p);
    }
}

/* Bands of sums that wait for those of other nodes, added up by one cluster. */
Test(fp8_nodes, fp8_products_need_one_resident_cluster, .timeout = 600)
{
    static const uint32_t ROWS[] = {1024, 8, 516};
    ranks_need_a_device();
    hopper_limit_clusters(1);
    for (int i = 1; i < 4; i++) {
        struct ranks_product p = between(&splits[1], operations[i], PRS_SCALING_BLOCKS, 1024, 264, 640);
        p.tuning = (struct prs_gemm_tuning){.band = 1, .tiles_per_signal = 2};
        p.sms = 16, p.epochs = 3, p.rows = ROWS;
        ranks_assert_right(&p);
    }
}

/* Scales of blocks are brought to the distance that cuBLASLt takes where they arrive. */
Test(fp8_nodes, fp8_unfused_products_are_right, .timeout = 600)
{
    static const uint32_t ROWS[] = {60, 12, 36};
    ranks_need_a_device();
    for (int split = 0; split < SPLITS; split++)
        for (int i = 1; i < 4; i++)
            for (uint32_t scaling = PRS_SCALING_TENSOR; scaling <= PRS_SCALING_BLOCKS; scaling++) {
                if (!differs(split, operations[i], scaling))
                    continue;
                struct ranks_product p =
                    between(&splits[split], operations[i], scaling, 60, 256, scaling == PRS_SCALING_BLOCKS ? 640 : 144);
                p.tuning.path = PRS_GEMM_PATH_UNFUSED;
                p.shape.c_dtype = i == 2 ? PRS_DTYPE_FP32 : PRS_DTYPE_BF16;
                p.rows = ROWS, p.epochs = 3, p.replays = split == 1 ? 2 : 0;
                p.bias = true, p.residual = RANKS_RESIDUAL, p.keeps = i == 2;
                ranks_assert_right(&p);
            }
}

Test(fp8_nodes, fp8_unfused_results_are_quantised, .timeout = 600)
{
    struct ranks_product p = between(&splits[1], PRS_GEMM_ALLGATHER, PRS_SCALING_BLOCKS, 44, 512, 512);
    ranks_need_a_device();
    p.tuning.path = PRS_GEMM_PATH_UNFUSED;
    p.shape.gated = 1, p.shape.c_dtype = PRS_DTYPE_E4M3, p.epochs = 2;
    ranks_assert_right(&p);
}

/* ---- what is refused ---- */
struct refused {
    struct prs_gemm_shape shape;
    struct prs_gemm_tuning tuning;
    const char *why;
};

static void open_refused(uint32_t rank, struct ranks_self *self, void *user)
{
    const struct refused *x = user;
    struct prs_fused *ctx;
    struct prs_gemm_plan *plan;
    (void)rank;
    cr_assert_eq(ranks_open(self, 0, RANKS_PATIENCE_MS, &ctx), 0);
    cr_expect_eq(prs_gemm_plan_open(ctx, &x->shape, &x->tuning, &plan), -EINVAL, "%s", x->why);
    cr_expect(strstr(prs_fused_error_text(), x->why), "%s\nis not: %s", prs_fused_error_text(), x->why);
    prs_fused_close(ctx);
}

#define E4M3(n, k, n_k, ...)                                                                                           \
    {                                                                                                                  \
        PRS_GEMM_ALLGATHER, 64, n, k, n_k, .dtype = PRS_DTYPE_E4M3, __VA_ARGS__                                        \
    }

Test(fp8, a_scaled_product_that_cannot_be_is_refused_by_name, .timeout = 300)
{
    static struct refused list[] = {
        {E4M3(128, 128, 1, .scaling = 0), {0}, "scaling 0: a product of e4m3 needs PRS_SCALING_TENSOR"},
        {E4M3(128, 128, 1, .scaling = 4), {0}, "scaling 4: a product of e4m3 needs PRS_SCALING_TENSOR"},
        {E4M3(128, 128, 0, .scaling = 1), {0}, "B of a product of e4m3 must be [n, k] (b_transposed)"},
        {E4M3(120, 128, 1, .scaling = 1, .c_dtype = PRS_DTYPE_FP32),
         {0},
         "of e4m3, with an n or k that is no multiple of 16, needs the fused path, which cannot take it: C"},
        {E4M3(128, 128, 1, .scaling = 1, .c_dtype = PRS_DTYPE_FP16),
         {0},
         "c_dtype 2 (fp16): C has the type of sums, bf16"},
        {E4M3(128, 128, 1, .scaling = 1, .sum_dtype = PRS_DTYPE_E4M3),
         {0},
         "sum_dtype 4 (e4m3): partial sums travel in bf16"},
        {E4M3(128, 128, 1, .scaling = 1, .lda = 136),
         {0},
         "rows of A are 136 elements apart: that must be a multiple of 16"},
        {E4M3(128, 120, 1, .scaling = 1),
         {0},
         "no multiple of 16, needs the fused path, which cannot take it: rows of A"},
        {E4M3(120, 128, 1, .scaling = 1), {.path = PRS_GEMM_PATH_UNFUSED}, "no multiple of 16, needs the fused path"},
        {E4M3(144, 512, 1, .scaling = 3), {.path = PRS_GEMM_PATH_UNFUSED}, "an n that is no multiple of 128"},
        {E4M3(128, 192, 1, .scaling = 3), {0}, "a multiple of 128, and k is 192"},
        {E4M3(384, 128, 1, .scaling = 3, .gated = 1), {0}, "a gated product of 384 columns with scales of blocks"},
        {E4M3(128, 128, 1, .scaling = 3, .fast_accumulation = 1),
         {0},
         "fast_accumulation is set, but scales of blocks"},
        {{PRS_GEMM_ALONE, 64, 64, 64, .scaling = 1}, {0}, "scaling 1, fast_accumulation 0: only products of e4m3"},
        {{PRS_GEMM_ALONE, 64, 64, 64, .fast_accumulation = 1}, {0}, "scaling 0, fast_accumulation 1: only products"},
    };
    hopper_setup(2, 4, 0);
    for (size_t i = 0; i < sizeof(list) / sizeof(*list); i++)
        ranks_run(2, open_refused, &list[i]);
}

static struct prs_gemm_plan *open_alone(struct prs_fused *ctx, const struct prs_gemm_shape *shape)
{
    struct prs_gemm_plan *plan = NULL;
    cr_assert_eq(prs_gemm_plan_open(ctx, shape, NULL, &plan), 0, "%s", prs_fused_error_text());
    return plan;
}

static void refuse(struct prs_gemm_plan *plan, struct prs_gemm_operands x, const char *why)
{
    cr_expect_eq(prs_gemm_launch(plan, &x, NULL), -EINVAL, "%s", why);
    cr_expect(strstr(prs_fused_error_text(), why), "%s\nis not: %s", prs_fused_error_text(), why);
}

Test(fp8, scales_that_cannot_be_are_refused_before_the_launch, .timeout = 300)
{
    struct prs_fused_config config = {.world = 1};
    struct prs_gemm_shape shape = {PRS_GEMM_ALLGATHER, 66, 128, 128, 1, .dtype = PRS_DTYPE_E4M3, .scaling = 1};
    struct prs_gemm_plan *tensor, *rows, *blocks, *plain;
    struct prs_gemm_operands x = {0}, y;
    struct prs_fused *ctx;
    float *scales;
    hopper_setup(1, 4, 0);
    cr_assert_eq(prs_fused_open(&config, &ctx), 0);
    tensor = open_alone(ctx, &shape);
    shape.scaling = PRS_SCALING_ROWS;
    rows = open_alone(ctx, &shape);
    shape.scaling = PRS_SCALING_BLOCKS;
    blocks = open_alone(ctx, &shape);
    plain = open_alone(ctx, &(struct prs_gemm_shape){PRS_GEMM_ALONE, 66, 128, 128, 1});
    x.a = x.b = x.c = scales = ranks_device(1 << 16, 0);
    refuse(tensor, x, "scale_a (nil), scale_b (nil): pointers must be 4-byte aligned, and not NULL");
    x.scale_a = scales;
    refuse(tensor, x, "scale_b (nil): pointers must be");
    x.scale_b = scales;
    refuse(plain, x, "this plan is of bf16, which has no scales");
    y = x, y.scale_a_pitch = 128;
    refuse(rows, y, "scale_a_pitch is 128, but only scales of blocks have one");
    y = x, y.scale_a = scales + 1;
    refuse(rows, y, "pointers must be 16-byte aligned");
    refuse(blocks, x, "scale_a has 66 floats from one block of k to the next, for 66 rows of A");
    y = x, y.scale_a_pitch = 64;
    refuse(blocks, y, "scale_a has 64 floats");
    y = x, y.scale_a = scales + 1;
    cr_expect_eq(prs_gemm_launch(tensor, &y, NULL), 0, "%s", prs_fused_error_text());
    cr_expect_eq(cudaDeviceSynchronize(), cudaSuccess);
    prs_gemm_plan_close(tensor), prs_gemm_plan_close(rows), prs_gemm_plan_close(blocks), prs_gemm_plan_close(plain);
    prs_fused_close(ctx);
}
