/* SPDX-License-Identifier: Apache-2.0 */
/* A layer of MoE as one kernel goes on without a rank that was lost (doc/decisions/0020), on emulated GPUs. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "fused/core/inbox_word.h"
#include "fused/moe/plan.h"
#include "test/hopper/ranks.h"
#include "tools/hopper/hopper.h"

enum { WORLD = 2, TOKENS = 3, HIDDEN = 72, INNER = 40, EXPERTS = 4, TOP_K = 2, CHOICES = TOKENS * TOP_K };

/* Experts 2 and 3 are those of rank 1. */
static const int64_t everywhere[CHOICES] = {2, 0, 1, 3, 0, 1}, here[CHOICES] = {0, 1, 1, 0, 1, 0},
                     without[CHOICES] = {-1, 0, 1, -1, 0, 1};

struct layer {
    struct prs_fused *ctx;
    struct prs_moe_plan *plan;
    struct prs_gemm_plan *sum[2]; /* unfused, and fused */
    struct prs_moe_batch batch;
    cudaStream_t stream;
    cudaGraphExec_t graph;
    uint16_t out[TOKENS * HIDDEN];
};

static void open_sums(struct layer *l)
{
    static const struct prs_gemm_shape shape = {PRS_GEMM_ALLREDUCE, 8, 64, 64, 1, .c_anywhere = 1};
    for (int fused = 0; fused < 2; fused++) {
        struct prs_gemm_tuning path = {.path = fused ? PRS_GEMM_PATH_FUSED : PRS_GEMM_PATH_UNFUSED};
        cr_assert_eq(prs_gemm_plan_open(l->ctx, &shape, &path, &l->sum[fused]), 0, "%s", prs_fused_error_text());
    }
}

static void open_layer_of(struct layer *l, struct ranks_self *self, uint32_t rank)
{
    static const struct prs_moe_shape shape = {.tokens = TOKENS,
                                               .hidden = HIDDEN,
                                               .columns = 2 * INNER,
                                               .experts = EXPERTS,
                                               .top_k = TOP_K,
                                               .weights_transposed = 1,
                                               .activation = PRS_ACTIVATION_SILU,
                                               .gated = 1,
                                               .layer = 1};
    static const float weights[CHOICES] = {0.5f, 1, 0.25f, 2, 1, -1.5f};
    static const struct prs_moe_tuning one = {.path = PRS_MOE_PATH_ONE};
    void *router = ranks_device(sizeof(weights), 0);
    cudaGraph_t graph;
    cr_assert_eq(ranks_open(self, 0, 60000, &l->ctx), 0);
    cr_assert_eq(prs_moe_plan_open(l->ctx, &shape, &one, &l->plan), 0, "%s", prs_fused_error_text());
    open_sums(l);
    (void)cudaMemcpy(router, weights, sizeof(weights), cudaMemcpyHostToDevice);
    l->batch = (struct prs_moe_batch){.tokens = ranks_upload(rank, TOKENS * HIDDEN),
                                      .count = TOKENS,
                                      .chosen = ranks_device(sizeof(everywhere), 0),
                                      .router_weights = router,
                                      .weights = ranks_upload(10 + rank, EXPERTS / WORLD * 2 * INNER * HIDDEN),
                                      .down = ranks_upload(20 + rank, EXPERTS / WORLD * HIDDEN * INNER),
                                      .out = ranks_device(sizeof(l->out), 0xff),
                                      .status = ranks_device(sizeof(struct prs_moe_status), 0)};
    (void)cudaStreamCreateWithFlags(&l->stream, cudaStreamNonBlocking);
    cr_assert_eq(cudaStreamBeginCapture(l->stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    cr_assert_eq(prs_moe_layer(l->plan, &l->batch, l->stream), 0, "%s", prs_fused_error_text());
    cr_assert_eq(cudaStreamEndCapture(l->stream, &graph), cudaSuccess);
    cr_assert_eq(cudaGraphInstantiate(&l->graph, graph, 0), cudaSuccess);
}

static void begin(struct layer *l, const int64_t *chosen)
{
    (void)cudaMemcpy((void *)(uintptr_t)l->batch.chosen, chosen, sizeof(everywhere), cudaMemcpyHostToDevice);
    ranks_fill(l->batch.out, 0xff, sizeof(l->out));
    cr_assert_eq(cudaGraphLaunch(l->graph, l->stream), cudaSuccess);
}

static void end(struct layer *l, uint16_t *out)
{
    cr_assert_eq(cudaStreamSynchronize(l->stream), cudaSuccess);
    (void)cudaMemcpy(out, l->batch.out, sizeof(l->out), cudaMemcpyDeviceToHost);
}

/* As if rank 1 had sent its places of this launch, one of them for expert 0 here, and a word of its first result, and
 * then nothing: neither the row of that place nor the rest of the result. */
static void send_a_part(const struct layer *l, uint32_t launch)
{
    const struct prs_few *few = &l->plan->few;
    const struct prs_route *r = &l->plan->args.route;
    uint32_t words[TOKENS * 4], bank = launch & 1, word = prs_inbox_sent(0x40404040);
    cr_assert_eq(prs_few_place_words(r), 4);
    for (uint32_t i = 0; i < TOKENS * 4; i++)
        words[i] = prs_few_word(launch, i == 0 ? 0 : PRS_ROUTE_NONE);
    (void)cudaMemcpy(few->places[0] + prs_few_slot(r, bank, 1, 0) * 4, words, sizeof(words), cudaMemcpyHostToDevice);
    (void)cudaMemcpy(few->results[0] + prs_few_results_at(r, few->result_bytes, bank, 0), &word, sizeof(word),
                     cudaMemcpyHostToDevice);
}

static void refuse(const struct layer *l, uint64_t ranks, int r, const char *why)
{
    cr_assert_eq(prs_fused_leave_out(l->ctx, ranks), r);
    cr_assert_not_null(strstr(prs_fused_error_text(), why), "%s", prs_fused_error_text());
}

/* Rank 0 is in a launch that rank 1 does not end, and is told during the launch that rank 1 is lost. */
static void lose(struct layer *l, uint16_t *out)
{
    while (prs_fused_lost(l->ctx) == 0)
        (void)usleep(1000);
    cr_assert_eq(prs_fused_lost(l->ctx), 2);
    refuse(l, 3, -EINVAL, "rank 0 cannot be left out");
    begin(l, everywhere);
    (void)usleep(20000);
    cr_assert_eq(cudaStreamQuery(l->stream), cudaErrorNotReady);
    cr_assert_eq(prs_fused_leave_out(l->ctx, 2), 0, "%s", prs_fused_error_text());
    end(l, out);
}

/* Calls that need rank 1 fail at once with an error that says so. */
static void refuse_the_rest(struct layer *l)
{
    struct prs_moe_batch kernels = l->batch;
    struct prs_moe_info info;
    void *matrix = ranks_device(64 * 64 * sizeof(uint16_t), 0);
    struct prs_gemm_operands sum = {.a = matrix, .b = matrix, .c = ranks_device(8 * 64 * sizeof(uint16_t), 0)};
    struct prs_moe_plan *plan;
    void *memory;
    prs_moe_plan_query(l->plan, &info);
    kernels.maps = ranks_device(info.maps_bytes, 0);
    cr_assert_eq(prs_moe_layer(l->plan, &kernels, l->stream), -ECANCELED);
    cr_assert_not_null(strstr(prs_fused_error_text(), "ranks 0x2 were left out"), "%s", prs_fused_error_text());
    for (int fused = 0; fused < 2; fused++) {
        cr_assert_eq(prs_gemm_launch(l->sum[fused], &sum, l->stream), -ECANCELED, "%d", fused);
        cr_assert_not_null(strstr(prs_fused_error_text(), "ranks 0x2 were left out"), "%s", prs_fused_error_text());
    }
    cr_assert_eq(prs_moe_plan_open(l->ctx, &l->plan->shape, NULL, &plan), -ECANCELED);
    cr_assert_eq(prs_fused_alloc(l->ctx, 64, &memory), -ECANCELED);
}

static void lose_and_go_on(uint32_t rank, struct ranks_self *self, void *user)
{
    bool in_a_launch = *(bool *)user;
    uint16_t whole[TOKENS * HIDDEN], local[TOKENS * HIDDEN], lost[TOKENS * HIDDEN], out[TOKENS * HIDDEN];
    struct prs_moe_status status;
    struct prs_fused_error error;
    struct layer l;
    open_layer_of(&l, self, rank);
    begin(&l, everywhere), end(&l, whole);
    begin(&l, here), end(&l, local);
    if (rank == 0)
        refuse(&l, 2, -EINVAL, "rank 1 cannot be left out");
    (void)ranks_allgather(self, &rank, (uint32_t[WORLD]){0}, sizeof(rank));
    if (rank == 0) {
        if (in_a_launch)
            send_a_part(&l, 3);
        lose(&l, lost);
        cr_assert_neq(memcmp(lost, whole, sizeof(lost)), 0, "experts of the lost rank were there");
        begin(&l, everywhere), end(&l, out);
        cr_assert_eq(memcmp(lost, out, sizeof(lost)), 0, "the next launch differs");
        (void)cudaMemcpy(&status, l.batch.status, sizeof(status), cudaMemcpyDeviceToHost);
        cr_assert_eq(status.absent_choices, 2, "%u", status.absent_choices);
        begin(&l, here), end(&l, out); /* this launch has the bank of that in which the rank was lost */
        cr_assert_eq(memcmp(local, out, sizeof(lost)), 0, "what a lost rank sent is still there");
        begin(&l, without), end(&l, out);
        cr_assert_eq(memcmp(lost, out, sizeof(lost)), 0, "a choice of a lost expert counts");
        cr_assert_eq(prs_fused_poll_error(l.ctx, &error), 0, "%s", error.text);
        refuse_the_rest(&l);
    } else {
        prs_fused_abort(l.ctx); /* so that it waits for no rank when it closes */
    }
    prs_gemm_plan_close(l.sum[0]);
    prs_gemm_plan_close(l.sum[1]);
    prs_moe_plan_close(l.plan);
    prs_fused_close(l.ctx);
}

Test(absent, a_layer_goes_on_without_a_lost_rank, .timeout = 120)
{
    bool in_a_launch = false;
    hopper_setup(WORLD, 4, 0);
    ranks_run(WORLD, lose_and_go_on, &in_a_launch);
}

Test(absent, a_rank_that_is_lost_in_a_launch_leaves_nothing_behind, .timeout = 120)
{
    bool in_a_launch = true;
    hopper_setup(WORLD, 4, 0);
    ranks_run(WORLD, lose_and_go_on, &in_a_launch);
}
