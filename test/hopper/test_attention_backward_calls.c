/* SPDX-License-Identifier: Apache-2.0 */
/* The calls of attention's backward pass: a lost rank is named, and what cannot run is refused. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tools/hopper/hopper.h"
#include "test/hopper/ranks.h"

enum { SMS = 4 };

/* Rank 1 opens everything and launches nothing. */
static void launch_unless_lost(uint32_t rank, struct ranks_self *self, void *user)
{
    struct prs_fused_error *error = user;
    struct prs_attention_shape shape = {1, 1, 1, 64, 128, 0, 0, 0};
    struct prs_attention_backward_plan *plan;
    struct prs_attention_gradients x = {.dlse = NULL};
    struct prs_fused *ctx;
    cr_assert_eq(ranks_open(self, 0, RANKS_LOST_MS, &ctx), 0);
    cr_assert_eq(prs_attention_backward_plan_open(ctx, &shape, NULL, &plan), 0);
    x.q = x.k = x.v = x.out = x.dout = ranks_upload(1, 64 * 64);
    x.lse = ranks_device(64 * sizeof(float), 0);
    x.dq = ranks_device(64 * 64 * 2, 0);
    x.dk = ranks_device(64 * 64 * 2, 0);
    x.dv = ranks_device(64 * 64 * 2, 0);
    if (rank == 0)
        cr_assert_eq(prs_attention_backward_launch(plan, &x, NULL), 0);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    (void)prs_fused_poll_error(ctx, &error[rank]);
    if (rank == 0)
        cr_assert_eq(prs_attention_backward_launch(plan, &x, NULL), -ETIMEDOUT, "the first error stays");
    prs_attention_backward_plan_close(plan);
    prs_fused_close(ctx);
}

Test(attention_backward, a_lost_rank_is_named_by_the_others, .timeout = 600)
{
    struct prs_fused_error error[2];
    hopper_setup(2, SMS, 0);
    hopper_forgive_late_writes();
    ranks_run(2, launch_unless_lost, error);
    cr_assert_eq(error[0].code, -ETIMEDOUT, "%d", error[0].code);
    cr_assert(strstr(error[0].text, "for queries or gradients of results of rank 1: flag ") != NULL, "%s",
              error[0].text);
    cr_assert_eq(error[1].code, 0);
}

/* ---- plans ---- */
static void assert_refused(int have, int want, const char *text)
{
    cr_assert_eq(have, want, "%d", have);
    cr_assert(strstr(prs_fused_error_text(), text) != NULL, "%s", prs_fused_error_text());
}

static void open_long(uint32_t rank, struct ranks_self *self, void *user)
{
    struct prs_attention_shape shape = {1, 3, 3, 64, 49152, 1, 0, 0};
    struct prs_attention_backward_plan *plan;
    struct prs_attention_info info;
    struct prs_fused *ctx;
    (void)user;
    cr_assert_eq(ranks_open(self, 0, 60000, &ctx), 0, "rank %u", rank);
    for (uint32_t want = 1; want <= 3; want++, shape.seq /= 2) {
        cr_assert_eq(prs_attention_backward_plan_open(ctx, &shape, NULL, &plan), 0);
        prs_attention_backward_plan_query(plan, &info);
        cr_assert_eq(info.tuning.heads_per_step, want, "%u positions: %u", shape.seq, info.tuning.heads_per_step);
        prs_attention_backward_plan_close(plan);
    }
    prs_fused_close(ctx);
}

Test(attention_backward, of_long_sequences_a_step_has_fewer_heads, .timeout = 600)
{
    hopper_setup(2, SMS, 0);
    ranks_run(2, open_long, NULL);
}

static void open_alone(struct prs_fused **ctx)
{
    struct prs_fused_config config = {.world = 1};
    hopper_setup(1, SMS, 0);
    cr_assert_eq(prs_fused_open(&config, ctx), 0);
}

Test(attention_backward, what_cannot_be_launched_is_refused, .timeout = 600)
{
    struct prs_attention_shape shape = {1, 2, 2, 128, 64, 0, 0, 0}, wide = {1, 2, 2, 256, 64, 0, 0, 0},
                               narrow = {1, 2, 2, 64, 64, 0, 0, 0};
    struct prs_attention_tuning blocks = {.block_rows = 128}, copied = {.mover = PRS_MOVED_BY_COPY_ENGINES};
    struct prs_attention_backward_plan *plan;
    struct prs_attention_info info;
    struct prs_attention_gradients x;
    struct prs_fused *ctx;
    char *at;
    open_alone(&ctx);
    assert_refused(prs_attention_backward_plan_open(ctx, &wide, NULL, &plan), -ENOTSUP, "head_dim 256");
    assert_refused(prs_attention_backward_plan_open(ctx, &shape, &blocks, &plan), -EINVAL, "block_rows 128");
    blocks.block_rows = 64;
    assert_refused(prs_attention_backward_plan_open(ctx, &narrow, &blocks, &plan), -EINVAL, "of 128 queries a step");
    assert_refused(prs_attention_backward_plan_open(ctx, &shape, &copied, &plan), -EINVAL, "only CTAs move data");
    cr_assert_eq(prs_attention_backward_plan_open(ctx, &shape, NULL, &plan), 0);
    prs_attention_backward_plan_query(plan, &info);
    cr_assert(info.tuning.mode == PRS_ATTENTION_ALONE && info.tuning.block_rows == 64 && info.workspace_bytes > 0 &&
              info.shared_bytes > 0 && info.sent_bytes == 0);
    at = ranks_device(64, 0);
    x = (struct prs_attention_gradients){at, at, at, at, (float *)at, at, NULL, at, at, at};
    x.dk = NULL;
    assert_refused(prs_attention_backward_launch(plan, &x, NULL), -EINVAL, "dk ");
    x.dk = at, x.dout = at + 8;
    assert_refused(prs_attention_backward_launch(plan, &x, NULL), -EINVAL, "dout ");
    x.dout = at, x.lse = (float *)(at + 2);
    assert_refused(prs_attention_backward_launch(plan, &x, NULL), -EINVAL, "lse ");
    x.lse = (float *)at, x.dlse = (float *)(at + 2);
    assert_refused(prs_attention_backward_launch(plan, &x, NULL), -EINVAL, "dlse ");
    x.dlse = NULL, x.scale = -0.125;
    assert_refused(prs_attention_backward_launch(plan, &x, NULL), -EINVAL, "negate the queries");
    prs_attention_backward_plan_close(plan);
    prs_fused_close(ctx);
}
