/* SPDX-License-Identifier: Apache-2.0 */
/* Errors inside a running job: a watchdog aborts, a rank is lost, the others continue without it. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tools/hopper/hopper.h"
#include "test/hopper/ranks.h"

enum { MOST_RANKS = 4, BEFORE_ABORT_US = 100000, LIMIT_MS = 0 /* the default, ten minutes: no test lasts that long */ };

struct job {
    struct prs_gemm_shape shape;
    struct prs_gemm_tuning tuning;
    uint32_t launching; /* ranks below it launch */
    uint32_t aborts_at; /* this rank aborts while its kernel waits */
    struct prs_fused_error error[MOST_RANKS];
    int next[MOST_RANKS]; /* what the next launch returned */
};

static void *abort_soon(void *ctx)
{
    (void)usleep(BEFORE_ABORT_US);
    prs_fused_abort(ctx);
    return NULL;
}

static void launch_and_abort(uint32_t rank, struct ranks_self *self, void *user)
{
    struct job *job = user;
    const struct prs_gemm_shape *shape = &job->shape;
    struct prs_fused *ctx;
    struct prs_gemm_plan *plan;
    pthread_t watchdog;
    void *a, *b, *c;
    cr_assert_eq(ranks_open(self, 0, LIMIT_MS, &ctx), 0);
    cr_assert_eq(prs_gemm_plan_open(ctx, shape, &job->tuning, &plan), 0, "%s", prs_fused_error_text());
    a = ranks_upload(1, (uint64_t)shape->m * shape->k);
    b = ranks_upload(2, (uint64_t)shape->n * shape->k);
    cr_assert_eq(cudaMalloc(&c, (size_t)shape->m * shape->n * 2), cudaSuccess);
    if (rank == job->aborts_at)
        (void)pthread_create(&watchdog, NULL, abort_soon, ctx);
    if (rank < job->launching)
        cr_assert_eq(prs_gemm_launch(plan, &(struct prs_gemm_operands){.a = a, .b = b, .c = c}, NULL), 0);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    if (rank == job->aborts_at)
        (void)pthread_join(watchdog, NULL);
    (void)prs_fused_poll_error(ctx, &job->error[rank]);
    job->next[rank] =
        rank < job->launching ? prs_gemm_launch(plan, &(struct prs_gemm_operands){.a = a, .b = b, .c = c}, NULL) : 0;
    prs_gemm_plan_close(plan);
    prs_fused_close(ctx);
}

/* Rank 0 aborts; rank 1 waits for rank 2 too, and ends with it. */
static void assert_abort_ends_launches(enum prs_gemm_path path)
{
    struct job job = {.shape = {PRS_GEMM_REDUCE_SCATTER, 768, 256, 64, 1}, .tuning = {.path = path}, .launching = 2};
    hopper_setup(3, 4, 0);
    hopper_forgive_late_writes();
    ranks_run(3, launch_and_abort, &job);
    for (int rank = 0; rank < 2; rank++) {
        cr_assert_eq(job.error[rank].code, -ECANCELED, "rank %d: %d", rank, job.error[rank].code);
        cr_assert_not_null(strstr(job.error[rank].text, "was told to abort"), "%s", job.error[rank].text);
        cr_assert_not_null(strstr(job.error[rank].text, "of waiting for"), "%s", job.error[rank].text);
        cr_assert_eq(job.next[rank], -ECANCELED, "rank %d launches again: %d", rank, job.next[rank]);
    }
    cr_assert_eq(job.error[2].code, 0, "%s", job.error[2].text);
}

Test(errors, an_abort_ends_launches_that_wait, .timeout = 600)
{
    assert_abort_ends_launches(PRS_GEMM_PATH_FUSED);
}

Test(errors, an_abort_ends_unfused_launches_that_wait, .timeout = 600)
{
    assert_abort_ends_launches(PRS_GEMM_PATH_UNFUSED);
}

Test(errors, an_abort_between_launches_refuses_the_next, .timeout = 600)
{
    struct job job = {
        .shape = {PRS_GEMM_ALONE, 64, 64, 64, 1}, .tuning = {.path = PRS_GEMM_PATH_FUSED}, .launching = 1};
    hopper_setup(1, 4, 0);
    ranks_run(1, launch_and_abort, &job);
    cr_assert_eq(job.error[0].code, -ECANCELED);
    cr_assert_not_null(strstr(job.error[0].text, "rank 0 was told to abort"), "%s", job.error[0].text);
    cr_assert_eq(job.next[0], -ECANCELED);
}

/* ---- ranks whose launches differ ---- */
enum { ROWS = 512 };

/* Every rank opens the same two plans of one shape, and makes `launches` launches as all others do. Then it launches
 * the plan and the number of rows that its row says. */
struct differing {
    enum prs_gemm_op op;
    uint32_t world, launches;
    uint32_t rows[MOST_RANKS], plan[MOST_RANKS]; /* plan: 0 or 1 */
    bool on_device;
    bool opens_alone; /* rank 0 has another plan, which needs no other rank */
    struct prs_fused_error error[MOST_RANKS];
};

static void launch_differently(uint32_t rank, struct ranks_self *self, void *user)
{
    struct differing *d = user;
    struct prs_gemm_shape shape = {d->op, ROWS, 256, 64, 1, .c_anywhere = 1};
    struct prs_gemm_tuning tuning = {.path = PRS_GEMM_PATH_FUSED};
    struct prs_gemm_shape alone = {PRS_GEMM_ALONE, 64, 64, 64, 1};
    struct prs_gemm_plan *plan[2], *own = NULL;
    struct prs_gemm_operands x = {.m = ROWS};
    struct prs_fused *ctx;
    uint32_t *rows;
    cr_assert_eq(ranks_open(self, 0, LIMIT_MS, &ctx), 0);
    if (d->opens_alone && rank == 0)
        cr_assert_eq(prs_gemm_plan_open(ctx, &alone, NULL, &own), 0, "%s", prs_fused_error_text());
    for (int i = 0; i < 2; i++)
        cr_assert_eq(prs_gemm_plan_open(ctx, &shape, &tuning, &plan[i]), 0, "%s", prs_fused_error_text());
    x.a = ranks_upload(1, (uint64_t)ROWS * shape.k);
    x.b = ranks_upload(2, (uint64_t)shape.n * shape.k);
    x.c = ranks_device((size_t)ROWS * shape.n * 2, 0);
    for (uint32_t i = 0; i < d->launches; i++)
        cr_assert_eq(prs_gemm_launch(plan[0], &x, NULL), 0);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    cr_assert_eq(prs_fused_poll_error(ctx, &d->error[rank]), 0, "%s", d->error[rank].text);
    x.m = d->rows[rank];
    if (d->on_device) {
        rows = ranks_device(sizeof(*rows), 0);
        cr_assert_eq(cudaMemcpy(rows, &x.m, sizeof(*rows), cudaMemcpyHostToDevice), cudaSuccess);
        x.m_on_device = rows, x.m = 0;
    }
    cr_assert_eq(prs_gemm_launch(plan[d->plan[rank]], &x, NULL), 0, "%s", prs_fused_error_text());
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    (void)prs_fused_poll_error(ctx, &d->error[rank]);
    for (int i = 0; i < 2; i++)
        prs_gemm_plan_close(plan[i]);
    prs_gemm_plan_close(own);
    prs_fused_close(ctx);
}

/* Every rank reports the difference, long before the limit. */
static void assert_all_refuse(struct differing *d, const char *text)
{
    hopper_setup(d->world, 4, 0);
    hopper_forgive_late_writes();
    ranks_run(d->world, launch_differently, d);
    for (uint32_t rank = 0; rank < d->world; rank++) {
        cr_assert_eq(d->error[rank].code, -EINVAL, "op %d, rank %u: %d, %s", d->op, rank, d->error[rank].code,
                     d->error[rank].text);
        cr_assert_not_null(strstr(d->error[rank].text, text), "%s", d->error[rank].text);
    }
}

Test(errors, ranks_that_launch_other_numbers_of_rows_are_told, .timeout = 600)
{
    static const enum prs_gemm_op ops[] = {PRS_GEMM_ALLGATHER, PRS_GEMM_REDUCE_SCATTER, PRS_GEMM_ALLREDUCE};
    for (uint32_t i = 0; i < 3; i++)
        for (uint32_t launches = 0; launches < 2; launches++) {
            struct differing d = {.op = ops[i], .world = 2, .launches = launches, .rows = {256, 384}};
            assert_all_refuse(&d, "with 384");
        }
}

Test(errors, rows_on_the_device_are_compared_too, .timeout = 600)
{
    struct differing d = {.op = PRS_GEMM_REDUCE_SCATTER, .world = 4, .rows = {512, 512, 256, 512}, .on_device = true};
    assert_all_refuse(&d, "with 256");
}

Test(errors, ranks_that_launch_other_plans_are_told, .timeout = 600)
{
    struct differing d = {.op = PRS_GEMM_ALLGATHER, .world = 2, .launches = 1, .rows = {ROWS, ROWS}, .plan = {0, 1}};
    assert_all_refuse(&d, "instead");
}

Test(errors, a_plan_that_one_rank_has_alone_makes_no_difference, .timeout = 600)
{
    struct differing d = {
        .op = PRS_GEMM_REDUCE_SCATTER, .world = 2, .launches = 3, .rows = {ROWS, ROWS}, .opens_alone = true};
    hopper_setup(d.world, 4, 0);
    ranks_run(d.world, launch_differently, &d);
    for (uint32_t rank = 0; rank < d.world; rank++)
        cr_assert_eq(d.error[rank].code, 0, "rank %u: %s", rank, d.error[rank].text);
}

/* Memory that plans share is initialised again when no plan is open; words of earlier launches are still there. */
static void open_again_and_again(uint32_t rank, struct ranks_self *self, void *user)
{
    struct prs_gemm_tuning tuning = {.path = PRS_GEMM_PATH_FUSED};
    struct prs_gemm_operands x = {0};
    struct prs_gemm_plan *plan;
    struct prs_fused *ctx;
    (void)user;
    cr_assert_eq(ranks_open(self, 0, 60000, &ctx), 0);
    x.a = ranks_upload(1, (uint64_t)ROWS * 64);
    x.b = ranks_upload(2, (uint64_t)256 * 64);
    x.c = ranks_device((size_t)ROWS * 256 * 2, 0);
    for (uint32_t i = 0; i < 6; i++) {
        struct prs_gemm_shape shape = {PRS_GEMM_REDUCE_SCATTER, i % 2 ? ROWS : ROWS / 2, 256, 64, 1};
        struct prs_fused_error error;
        cr_assert_eq(prs_gemm_plan_open(ctx, &shape, &tuning, &plan), 0, "%s", prs_fused_error_text());
        if (rank == i % 2)
            usleep(20000); /* the other rank finds no word of this launch */
        cr_assert_eq(prs_gemm_launch(plan, &x, NULL), 0, "%s", prs_fused_error_text());
        cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
        cr_assert_eq(prs_fused_poll_error(ctx, &error), 0, "rank %u, plan %u: %s", rank, i, error.text);
        prs_gemm_plan_close(plan);
    }
    prs_fused_close(ctx);
}

Test(errors, plans_that_come_and_go_make_no_difference, .timeout = 600)
{
    hopper_setup(2, 4, 0);
    ranks_run(2, open_again_and_again, NULL);
}

/* ---- going on after a rank was lost ---- */
static __thread uint32_t freed; /* calls of cudaFree(). The linker redirects them here */
static __thread bool may_meet;

cudaError_t __real_cudaFree(void *memory);
cudaError_t __wrap_cudaFree(void *memory);
cudaError_t __wrap_cudaFree(void *memory)
{
    freed++;
    return __real_cudaFree(memory);
}

static int meet_if_allowed(void *user, const void *mine, void *all, size_t bytes)
{
    cr_assert(may_meet, "an all-gather that the lost rank would have to join");
    return ranks_allgather(user, mine, all, bytes);
}

/* One launch of all ranks but the last, which keeps its context open as a rank does that hangs. */
struct round {
    struct prs_fused *hanging;
    bool loses_one;
    uint32_t freed[MOST_RANKS]; /* while the context was opened, and while it was closed */
    int result[MOST_RANKS];
};

static void play_round(uint32_t rank, struct ranks_self *self, void *user)
{
    struct round *round = user;
    uint32_t world = self->team->world;
    struct prs_gemm_shape shape = {PRS_GEMM_REDUCE_SCATTER, 768, 256, 64, 1};
    struct prs_gemm_tuning tuning = {.path = PRS_GEMM_PATH_FUSED};
    struct prs_fused_config config = {rank, world, (int)rank, 0, meet_if_allowed, self};
    struct prs_fused_error error;
    struct prs_gemm_plan *plan;
    struct prs_fused *ctx;
    void *a, *b, *c;
    (void)cudaSetDevice((int)rank);
    may_meet = true;
    cr_assert_eq(prs_fused_open(&config, &ctx), 0, "%s", prs_fused_error_text());
    round->freed[rank] = freed;
    cr_assert_eq(prs_gemm_plan_open(ctx, &shape, &tuning, &plan), 0, "%s", prs_fused_error_text());
    may_meet = !round->loses_one;
    if (round->loses_one && rank == world - 1) {
        round->hanging = ctx;
        return;
    }
    a = ranks_upload(1, (uint64_t)shape.m * shape.k);
    b = ranks_upload(2, (uint64_t)shape.n * shape.k);
    cr_assert_eq(cudaMalloc(&c, (size_t)shape.m * shape.n * 2), cudaSuccess);
    cr_assert_eq(prs_gemm_launch(plan, &(struct prs_gemm_operands){.a = a, .b = b, .c = c}, NULL), 0);
    if (round->loses_one)
        (void)abort_soon(ctx);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    round->result[rank] = prs_fused_poll_error(ctx, &error);
    freed = 0;
    prs_gemm_plan_close(plan);
    prs_fused_close(ctx);
    cr_assert(!round->loses_one || freed == 0, "memory was freed that the lost rank may write to");
}

Test(errors, survivors_of_a_lost_rank_open_a_smaller_world, .timeout = 600)
{
    struct round lost = {.loses_one = true}, smaller = {.hanging = NULL}, later = {.hanging = NULL};
    hopper_setup(3, 4, 0);
    hopper_forgive_late_writes();
    ranks_run(3, play_round, &lost);
    cr_assert(lost.result[0] == -ECANCELED && lost.result[1] == -ECANCELED, "%d and %d", lost.result[0],
              lost.result[1]);
    ranks_run(2, play_round, &smaller);
    cr_assert(smaller.result[0] == 0 && smaller.result[1] == 0, "%d and %d", smaller.result[0], smaller.result[1]);
    cr_assert(smaller.freed[0] == 0 && smaller.freed[1] == 0, "freed while the lost rank was there");
    prs_fused_abort(lost.hanging);
    prs_fused_close(lost.hanging);
    ranks_run(2, play_round, &later);
    cr_assert(later.freed[0] != 0 && later.freed[1] != 0, "what the lost context had stays for ever");
}

/* ---- a thread that has not used CUDA ---- */

struct elsewhere {
    struct prs_gemm_plan *plan;
    struct prs_gemm_operands operands;
    int result;
    char text[256];
};

static void *launch_elsewhere(void *user)
{
    struct elsewhere *e = user;
    e->result = prs_gemm_launch(e->plan, &e->operands, NULL);
    (void)snprintf(e->text, sizeof(e->text), "%s", prs_fused_error_text());
    return NULL;
}

/* As PyTorch's threads for backward passes are, on the first GPU. */
Test(errors, a_thread_without_a_context_of_cuda_may_launch, .timeout = 300)
{
    struct prs_fused_config config = {.world = 1};
    struct prs_gemm_shape shape = {PRS_GEMM_ALONE, 128, 256, 64, 1};
    struct prs_gemm_tuning fused = {.path = PRS_GEMM_PATH_FUSED};
    struct elsewhere e = {.result = -1};
    struct prs_fused *ctx;
    pthread_t thread;
    hopper_setup(1, 4, 0);
    cr_assert_eq(prs_fused_open(&config, &ctx), 0);
    cr_assert_eq(prs_gemm_plan_open(ctx, &shape, &fused, &e.plan), 0);
    e.operands = (struct prs_gemm_operands){ranks_upload(1, 128 * 64), ranks_upload(2, 256 * 64),
                                            ranks_device((size_t)128 * 256 * 2, 0xff)};
    cr_assert_eq(pthread_create(&thread, NULL, launch_elsewhere, &e), 0);
    cr_assert_eq(pthread_join(thread, NULL), 0);
    cr_assert_eq(e.result, 0, "%s", e.text);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    prs_gemm_plan_close(e.plan);
    prs_fused_close(ctx);
}
