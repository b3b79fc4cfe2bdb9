/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of striped attention on emulated GPUs: what is refused or reported, and the tables of assigned stripes. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "fused/attention/kernels.h"
#include "test/hopper/ranks.h"
#include "tools/hopper/hopper.h"

enum { SMS = 4 };

static void open_between_nodes(uint32_t rank, struct ranks_self *self, void *user)
{
    struct prs_attention_shape shape = {1, 2, 2, 64, 512, 1, 0, 0, 128};
    struct prs_attention_backward_plan *back;
    struct prs_attention_plan *plan;
    struct prs_fused *ctx;
    (void)user;
    cr_assert_eq(ranks_open(self, 2, 60000, &ctx), 0, "rank %u", rank);
    cr_assert_eq(prs_attention_plan_open(ctx, &shape, NULL, &plan), -ENOTSUP);
    cr_assert(strstr(prs_fused_error_text(), "striped, it runs on one node"), "%s", prs_fused_error_text());
    cr_assert_eq(prs_attention_backward_plan_open(ctx, &shape, NULL, &back), -ENOTSUP);
    cr_assert(strstr(prs_fused_error_text(), "striped, the backward pass runs on one node"), "%s",
              prs_fused_error_text());
    prs_fused_close(ctx);
}

Test(attention_striped_nodes, several_are_refused, .timeout = 600)
{
    if (!getenv("SOFTNIC_WORLD"))
        cr_skip_test("not under softnic-run");
    hopper_setup(2, SMS, 0);
    ranks_run(2, open_between_nodes, NULL);
}

static void assert_refused(int have, const char *text)
{
    cr_assert_eq(have, -EINVAL, "%d", have);
    cr_assert(strstr(prs_fused_error_text(), text) != NULL, "%s", prs_fused_error_text());
}

/* One rank. The error of the context after a launch, forward or backward. */
static struct prs_fused_error launch_with_bounds(const int32_t *bounds, uint32_t sequences, bool backward)
{
    struct prs_attention_shape shape = {1, 1, 1, 64, 256, 1, 0, 0, 128, 0, 1};
    struct prs_fused_config config = {.world = 1};
    struct prs_attention_backward_plan *back;
    struct prs_attention_plan *plan;
    struct prs_fused_error error;
    struct prs_fused *ctx;
    char *at;
    hopper_setup(1, SMS, 0);
    cr_assert_eq(prs_fused_open(&config, &ctx), 0);
    at = ranks_device((size_t)256 * 64 * 2, 0);
    if (backward) {
        struct prs_attention_gradients g = {
            .q = at, .k = at, .v = at, .out = at, .lse = (float *)at, .dout = at, .sequences = sequences};
        g.dq = g.dk = g.dv = ranks_device((size_t)256 * 64 * 2, 0);
        g.cu_seqlens = ranks_copy(bounds, (sequences + 1) * sizeof(*bounds));
        cr_assert_eq(prs_attention_backward_plan_open(ctx, &shape, NULL, &back), 0, "%s", prs_fused_error_text());
        cr_assert_eq(prs_attention_backward_launch(back, &g, NULL), 0, "%s", prs_fused_error_text());
        cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
        prs_attention_backward_plan_close(back);
    } else {
        struct prs_attention_operands x = {at, at, at, ranks_device((size_t)256 * 64 * 2, 0), NULL};
        x.cu_seqlens = ranks_copy(bounds, (sequences + 1) * sizeof(*bounds)), x.sequences = sequences;
        cr_assert_eq(prs_attention_plan_open(ctx, &shape, NULL, &plan), 0, "%s", prs_fused_error_text());
        cr_assert_eq(prs_attention_launch(plan, &x, NULL), 0, "%s", prs_fused_error_text());
        cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
        prs_attention_plan_close(plan);
    }
    (void)prs_fused_poll_error(ctx, &error);
    prs_fused_close(ctx);
    return error;
}

Test(attention_striped, wrong_bounds_of_sequences_are_reported, .timeout = 300)
{
    static const struct {
        int32_t bounds[4];
        uint32_t sequences;
        const char *text;
    } rows[] = {
        {{0, 100, 50, 256}, 3, "cu_seqlens[2] is 50, after 100"},
        {{0, 100, 300}, 2, "cu_seqlens[2] is 300, after 100"},
        {{-1, 256}, 1, "cu_seqlens[0] is -1, after 0"},
        {{5, 5, 5, 200}, 3, NULL},
    };
    for (size_t i = 0; i < 2 * sizeof(rows) / sizeof(*rows); i++) {
        struct prs_fused_error error = launch_with_bounds(rows[i / 2].bounds, rows[i / 2].sequences, i % 2 != 0);
        cr_assert_eq(error.code, rows[i / 2].text ? -EINVAL : 0, "%d: %s", error.code, error.text);
        cr_assert(!rows[i / 2].text || strstr(error.text, rows[i / 2].text), "%s", error.text);
    }
}

/* One of two ranks' launches with these ranks of stripes. */
struct wrong_ranks {
    const uint32_t *ranks;
    struct prs_fused_error error;
};

static void launch_wrong_ranks(uint32_t rank, struct ranks_self *self, void *user)
{
    struct prs_attention_shape shape = {1, 1, 1, 64, 512, 1, 0, 0, 128};
    struct wrong_ranks *x = user;
    struct prs_attention_plan *plan;
    struct prs_fused *ctx;
    struct prs_fused_error error;
    uint32_t *ranks = ranks_copy(x->ranks, 4 * sizeof(*ranks));
    char *at = ranks_device((size_t)256 * 64 * 2, 0), *out = ranks_device((size_t)256 * 64 * 2, 0);
    cr_assert_eq(ranks_open(self, 0, 60000, &ctx), 0);
    cr_assert_eq(prs_attention_plan_open(ctx, &shape, NULL, &plan), 0, "%s", prs_fused_error_text());
    cr_assert_eq(
        prs_attention_launch(plan, &(struct prs_attention_operands){at, at, at, out, .stripe_ranks = ranks}, NULL), 0,
        "%s", prs_fused_error_text());
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    (void)prs_fused_poll_error(ctx, &error);
    if (rank == 1)
        x->error = error;
    prs_attention_plan_close(plan);
    prs_fused_close(ctx);
}

Test(attention_striped, wrong_ranks_of_stripes_are_reported, .timeout = 300)
{
    static const struct {
        uint32_t ranks[4];
        const char *text;
    } rows[] = {{{0, 1, 1, 1}, "gives rank "}, {{0, 1, 7, 0}, "gives rank 1 1 stripes"}, {{1, 0, 1, 0}, NULL}};
    hopper_setup(2, SMS, 0);
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct wrong_ranks x = {.ranks = rows[i].ranks};
        ranks_run(2, launch_wrong_ranks, &x);
        cr_assert_eq(x.error.code, rows[i].text ? -EINVAL : 0, "%d: %s", x.error.code, x.error.text);
        cr_assert(!rows[i].text || strstr(x.error.text, rows[i].text), "%s", x.error.text);
    }
}

/* More stripes than the kernel has threads. */
Test(attention_striped, tables_of_many_stripes_are_right, .timeout = 300)
{
    enum { WORLD = 7, STRIPES = 90 * WORLD };
    uint32_t ranks[STRIPES], stripe_of[STRIPES], how_many[STRIPES + 1][WORLD], have[WORLD] = {0};
    struct prs_prepare_args args = {.stripes = STRIPES, .world = WORLD};
    hopper_setup(1, SMS, 0);
    for (uint32_t i = 0; i < STRIPES; i++)
        ranks[i] = (i + i / WORLD * 3) % WORLD;
    args.assigned = ranks_copy(ranks, sizeof(ranks));
    args.stripe_of = ranks_device(sizeof(stripe_of), 0xff);
    args.how_many = ranks_device(sizeof(how_many), 0xff);
    cr_assert_eq(prs_attention_kernel_prepare_stripes(&args, NULL), 0);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    (void)cudaMemcpy(stripe_of, args.stripe_of, sizeof(stripe_of), cudaMemcpyDeviceToHost);
    (void)cudaMemcpy(how_many, args.how_many, sizeof(how_many), cudaMemcpyDeviceToHost);
    for (uint32_t i = 0; i <= STRIPES; i++) {
        cr_assert_eq(memcmp(how_many[i], have, sizeof(have)), 0, "stripe %u", i);
        if (i < STRIPES)
            cr_assert_eq(stripe_of[have[ranks[i]]++ * WORLD + ranks[i]], i);
    }
}

static void assert_not_assigned(const struct prs_attention_shape *shape, uint32_t world, const int32_t *bounds,
                                uint32_t sequences, const char *text)
{
    uint32_t ranks[8];
    assert_refused(prs_attention_assign_stripes(shape, world, bounds, sequences, ranks), text);
}

Test(attention_striped, stripes_that_cannot_be_assigned_are_refused_by_name)
{
    const struct prs_attention_shape window = {1, 1, 1, 64, 1024, 1, 0, 0, 128, 100}, plain = {1, 1, 1, 64, 1024, 1};
    const struct prs_attention_shape packed = {1, 1, 1, 64, 1024, 1, 0, 0, 128, 0, 1};
    const int32_t falling[] = {0, 300, 200}, long_ones[] = {0, 2000}, negative[] = {-1, 5};
    const uint32_t few[] = {0, 1, 1, 1, 1, 1, 1, 1}, right[] = {0, 0, 1, 1, 0, 1, 0, 1};
    uint32_t positions[512];
    assert_not_assigned(&plain, 2, NULL, 0, "stripe 0");
    assert_not_assigned(&window, 0, NULL, 0, "0 ranks");
    assert_not_assigned(&window, 3, NULL, 0, "a sequence of 1024");
    assert_not_assigned(&window, 2, falling, 2, "cu_seqlens");
    assert_not_assigned(&packed, 2, NULL, 0, "cu_seqlens");
    assert_not_assigned(&packed, 2, falling, 2, "cu_seqlens[2] is 200");
    assert_not_assigned(&packed, 2, long_ones, 1, "cu_seqlens[1] is 2000");
    assert_not_assigned(&packed, 2, negative, 1, "cu_seqlens[0] is -1");
    assert_refused(prs_attention_assign_stripes(&window, 2, NULL, 0, NULL), "stripe_ranks");
    assert_refused(prs_attention_assigned_positions(&window, few, 0, 2, positions), "less than 4 stripes");
    assert_refused(prs_attention_assigned_positions(&window, few, 1, 2, positions), "more than 4 stripes");
    assert_refused(prs_attention_assigned_positions(&window, right, 2, 2, positions), "rank 2 of 2");
    cr_assert_eq(prs_attention_assigned_positions(&window, right, 1, 2, positions), 0);
    cr_assert(positions[0] == 256 && positions[128] == 384 && positions[256] == 640 && positions[511] == 1023);
}

Test(attention_striped, what_cannot_run_is_refused_by_name, .timeout = 600)
{
    static const struct {
        struct prs_attention_shape shape;
        struct prs_attention_tuning tuning;
        const char *text;
    } rows[] = {
        {{1, 2, 2, 64, 256, 1, 0, 0, 0, 100}, {0}, "window 100"},
        {{1, 2, 2, 64, 256, 1, 0, 0, 0, 0, 1}, {0}, "packed 1"},
        {{1, 2, 2, 64, 256, 1, 0, 0, 0, 0, 0, 30}, {0}, "soft_cap 30"},
        {{1, 2, 2, 64, 384, 1, 0, 0, 192}, {0}, "stripes of 192 rows"},
        {{1, 2, 2, 64, 256, 1, 0, 0, 64}, {0}, "stripes of 64 rows"},
        {{1, 2, 2, 64, 300, 1, 0, 0, 128}, {0}, "a sequence of 300"},
        {{2, 2, 2, 64, 256, 1, 0, 0, 128, 0, 1}, {0}, "a batch of 2"},
        {{1, 2, 2, 64, 256, 1, 0, 0, 128, 0, 0, -1}, {0}, "soft_cap -1"},
        {{1, 2, 2, 64, 256, 1, 0, 0, 128}, {.slab_rows = 128}, "slab_rows 128"},
        {{1, 2, 2, 64, 256, 1, 0, 0, 128}, {.mover = PRS_MOVED_BY_COPY_ENGINES}, ""},
        {{1, 2, 2, 128, 256, 1, 0, 0, 128}, {.block_rows = 176}, ""},
    };
    struct prs_fused_config config = {.world = 1};
    struct prs_attention_shape packed = {1, 2, 2, 64, 256, 1, 0, 0, 128, 0, 1}, plain = {1, 2, 2, 64, 256};
    struct prs_attention_operands x = {0};
    struct prs_attention_gradients g = {0};
    struct prs_attention_plan *plan;
    struct prs_attention_backward_plan *back;
    struct prs_fused *ctx;
    char *at;
    hopper_setup(1, SMS, 0);
    cr_assert_eq(prs_fused_open(&config, &ctx), 0);
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        assert_refused(prs_attention_plan_open(ctx, &rows[i].shape, &rows[i].tuning, &plan), rows[i].text);
        assert_refused(prs_attention_backward_plan_open(ctx, &rows[i].shape, &rows[i].tuning, &back), rows[i].text);
    }
    at = ranks_device(64, 0);
    x = (struct prs_attention_operands){at, at, at, at, NULL};
    cr_assert_eq(prs_attention_plan_open(ctx, &packed, NULL, &plan), 0);
    assert_refused(prs_attention_launch(plan, &x, NULL), "cu_seqlens");
    prs_attention_plan_close(plan);
    cr_assert_eq(prs_attention_plan_open(ctx, &plain, NULL, &plan), 0);
    x.cu_seqlens = (int32_t *)at, x.sequences = 1;
    assert_refused(prs_attention_launch(plan, &x, NULL), "cu_seqlens");
    x.cu_seqlens = NULL, x.sequences = 0, x.sinks = (float *)at;
    assert_refused(prs_attention_launch(plan, &x, NULL), "sinks");
    x.sinks = NULL, x.stripe_ranks = (uint32_t *)at;
    assert_refused(prs_attention_launch(plan, &x, NULL), "stripe_ranks");
    prs_attention_plan_close(plan);
    packed.packed = 0;
    cr_assert_eq(prs_attention_backward_plan_open(ctx, &packed, NULL, &back), 0);
    g = (struct prs_attention_gradients){
        .q = at, .k = at, .v = at, .out = at, .lse = (float *)at, .dout = at, .dq = at};
    g.dk = g.dv = at, g.sinks = (float *)at;
    assert_refused(prs_attention_backward_launch(back, &g, NULL), "dsinks");
    prs_attention_backward_plan_close(back);
    prs_fused_close(ctx);
}
