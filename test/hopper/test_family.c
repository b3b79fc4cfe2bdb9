/* SPDX-License-Identifier: Apache-2.0 */
/* A family of kernels that fused/core has never heard of: its plans are opened, launched and named by the skeleton. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <string.h>

#include "fused/core/memory.h"
#include "fused/core/plan.h"
#include "test/hopper/ranks.h"
#include "tools/hopper/hopper.h"

enum { AWAIT_SIXTH = 60, STAGING = 5, BYTES = 1 << 20 };

struct sixth {
    struct prs_plan base;
    struct prs_sync sync;
    uint64_t colour;     /* a term */
    uint32_t need, asks; /* asks for need so many times */
    uint64_t scratch;    /* bytes */
    char ran[8];         /* the steps of the launch */
};

static struct sixth *self(struct prs_plan *p)
{
    return (struct sixth *)p;
}

static int decide(struct prs_plan *p, const struct prs_hint *agreed)
{
    for (uint32_t i = 0; i < self(p)->asks; i++)
        prs_plan_need(p, self(p)->need, (struct prs_need){PRS_SYMMETRIC_DATA, true, "sixth: staging"}, BYTES);
    prs_plan_term(p, "colour", self(p)->colour);
    return self(p)->scratch == 0 ? 0 : prs_plan_scratch(p, self(p)->scratch);
}

static int place(struct prs_plan *p)
{
    return p->memory[STAGING] ? 0 : -EIO;
}

static const char *awaited(uint32_t what)
{
    return what == AWAIT_SIXTH ? "a sixth thing" : NULL;
}

static int first(struct prs_plan *p, cudaStream_t stream)
{
    strcat(self(p)->ran, "1");
    return 0;
}

static int second(struct prs_plan *p, cudaStream_t stream)
{
    strcat(self(p)->ran, "2");
    return 0;
}

static int refused(struct prs_plan *p, cudaStream_t stream)
{
    strcat(self(p)->ran, "r");
    return -EIO;
}

static int open_sixth(struct prs_fused *ctx, const struct sixth *wanted, struct sixth **out)
{
    static const struct prs_plan_steps steps = {
        .name = "a sixth kernel", .awaited = awaited, .decide = decide, .place = place};
    struct sixth *p = prs_plan_new(ctx, &steps, sizeof(*p) + 128 - sizeof(*p) % 128);
    p->base.sync = &p->sync;
    p->colour = wanted->colour, p->need = wanted->need, p->asks = wanted->asks, p->scratch = wanted->scratch;
    return prs_plan_open(&p->base, (void **)out);
}

static const struct sixth usual = {.colour = 7, .need = STAGING, .asks = 1};

Test(family, the_steps_of_a_launch_run_in_order_up_to_the_first_that_fails, .timeout = 300)
{
    static prs_launch_step_fn *const all[] = {first, second, first, NULL}, *const bad[] = {second, refused, first,
                                                                                           NULL};
    struct prs_fused *ctx = ranks_open_alone();
    struct sixth *p;
    cr_assert_eq(open_sixth(ctx, &usual, &p), 0);
    cr_assert_eq(prs_plan_launch(&p->base, all, NULL), 0);
    cr_assert_str_eq(p->ran, "121");
    p->ran[0] = '\0';
    cr_assert_eq(prs_plan_launch(&p->base, bad, NULL), -EIO);
    cr_assert_str_eq(p->ran, "2r");
    cr_assert_not_null(strstr(prs_fused_error_text(), "refused to launch a sixth kernel"), "%s",
                       prs_fused_error_text());
    prs_plan_close(&p->base);
    prs_fused_close(ctx);
}

Test(family, a_need_beyond_the_room_or_asked_for_twice_is_refused, .timeout = 300)
{
    static const struct sixth beyond = {.need = PRS_CALL_NEEDS, .asks = 1}, twice = {.need = STAGING, .asks = 2};
    struct prs_fused *ctx = ranks_open_alone();
    struct sixth *p;
    cr_assert_eq(open_sixth(ctx, &beyond, &p), -EINVAL);
    cr_assert_not_null(strstr(prs_fused_error_text(), "need 8 of a sixth kernel"), "%s", prs_fused_error_text());
    cr_assert_eq(open_sixth(ctx, &twice, &p), -EINVAL);
    cr_assert_not_null(strstr(prs_fused_error_text(), "need 5 of a sixth kernel"), "%s", prs_fused_error_text());
    prs_fused_close(ctx);
}

Test(family, plans_share_the_memory_of_a_pool_by_its_name, .timeout = 300)
{
    struct prs_fused *ctx = ranks_open_alone();
    struct sixth *a, *b;
    cr_assert_eq(open_sixth(ctx, &usual, &a), 0);
    cr_assert_eq(open_sixth(ctx, &usual, &b), 0);
    cr_assert_eq(a->base.memory[STAGING]->at[0], b->base.memory[STAGING]->at[0]);
    cr_assert_eq(a->base.shared_bytes, BYTES);
    prs_plan_close(&a->base);
    prs_plan_close(&b->base);
    prs_fused_close(ctx);
}

Test(family, plans_share_scratch_memory_that_is_large_enough, .timeout = 300)
{
    static prs_launch_step_fn *const steps[] = {first, NULL};
    const struct sixth small = {.colour = 7, .need = STAGING, .asks = 1, .scratch = BYTES},
                       large = {.colour = 7, .need = STAGING, .asks = 1, .scratch = 3 * BYTES};
    struct prs_fused *ctx = ranks_open_alone();
    struct sixth *a, *b, *c, *d;
    cr_assert_eq(open_sixth(ctx, &small, &a), 0);
    cr_assert_eq(open_sixth(ctx, &small, &b), 0);
    cr_assert_eq(open_sixth(ctx, &large, &c), 0);
    cr_assert_eq(a->base.scratch.at, b->base.scratch.at);
    cr_assert_neq(a->base.scratch.at, c->base.scratch.at, "the first piece is too small");
    cr_assert_eq(a->base.shared_bytes, 2 * BYTES, "with the pool of symmetric memory");
    cr_assert_eq(prs_plan_launch(&a->base, steps, NULL), 0);
    cr_assert(prs_plan_has_scratch(&a->base) && !prs_plan_has_scratch(&b->base));
    cr_assert_eq(prs_plan_launch(&c->base, steps, NULL), 0);
    cr_assert_not(prs_plan_has_scratch(&a->base));
    prs_plan_close(&a->base);
    cr_assert_eq(open_sixth(ctx, &small, &d), 0);
    cr_assert_eq(d->base.scratch.at, b->base.scratch.at, "b has the piece still");
    prs_plan_close(&b->base);
    prs_plan_close(&c->base);
    prs_plan_close(&d->base);
    cr_assert_null(ctx->memory->scratch);
    prs_fused_close(ctx);
}

Test(family, a_flag_that_was_awaited_has_the_name_that_the_family_gives, .timeout = 300)
{
    struct prs_fused *ctx = ranks_open_alone();
    struct prs_fused_error error;
    struct sixth *p;
    cr_assert_eq(open_sixth(ctx, &usual, &p), 0);
    ctx->fault->what = AWAIT_SIXTH;
    ctx->fault->state = 2;
    cr_assert_eq(prs_fused_poll_error(ctx, &error), -ETIMEDOUT);
    cr_assert_not_null(strstr(error.text, "for a sixth thing of rank"), "%s", error.text);
    ctx->fault->what = AWAIT_SIXTH + 1;
    (void)prs_fused_poll_error(ctx, &error);
    cr_assert_not_null(strstr(error.text, "an unknown flag"), "%s", error.text);
    ctx->fault->state = 0;
    prs_plan_close(&p->base);
    prs_fused_close(ctx);
}

static int closed;

static void count(void *data)
{
    closed += *(const int *)data;
}

Test(family, what_it_keeps_for_its_plans_is_closed_once_with_the_context, .timeout = 300)
{
    static const char key, other;
    struct prs_fused *ctx = ranks_open_alone();
    int three = 3;
    cr_assert_null(prs_context_kept(ctx, &key));
    cr_assert_eq(prs_context_keep(ctx, &key, &three, count), 0);
    cr_assert_eq(prs_context_kept(ctx, &key), &three);
    cr_assert_null(prs_context_kept(ctx, &other));
    prs_fused_close(ctx);
    cr_assert_eq(closed, 3);
}

static void open_in_two_colours(uint32_t rank, struct ranks_self *ranks, void *user)
{
    const struct sixth wanted = {.colour = rank, .need = STAGING, .asks = 1};
    struct prs_fused *ctx;
    struct sixth *p;
    cr_assert_eq(ranks_open(ranks, 0, RANKS_PATIENCE_MS, &ctx), 0);
    cr_assert_eq(open_sixth(ctx, &wanted, &p), -EINVAL);
    cr_assert_not_null(strstr(prs_fused_error_text(), "opens a sixth kernel with colour"), "%s",
                       prs_fused_error_text());
    prs_fused_close(ctx);
}

Test(family, ranks_that_differ_in_a_term_are_told_its_name, .timeout = 300)
{
    hopper_setup(2, 4, 0);
    ranks_run(2, open_in_two_colours, NULL);
}
