/* SPDX-License-Identifier: Apache-2.0 */
/* A context gives its memory back, and goes on afterwards at the same addresses, on emulated GPUs. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "test/hopper/ranks.h"
#include "tools/hopper/hopper.h"

enum { WORLD = 2, TOKENS = 3, HIDDEN = 72, INNER = 40, EXPERTS = 4, TOP_K = 2, CHOICES = TOKENS * TOP_K };
enum { ROWS = 256, COLUMNS = 128, DEPTH = 64, LENT = 1000, LIMIT_MS = 60000, SHORT_MS = 300 };

/* A layer of MoE in a graph, whose words are their own flags, and a product with flags, buffers and memory that the
 * caller holds. */
struct work {
    struct prs_fused *ctx;
    struct prs_moe_plan *layer;
    struct prs_gemm_plan *product;
    struct prs_moe_batch batch;
    struct prs_gemm_operands operands;
    cudaStream_t stream;
    cudaGraphExec_t graph;
    uint8_t *lent;
};

struct results {
    uint16_t layer[TOKENS * HIDDEN], product[ROWS / WORLD * COLUMNS];
};

static int open_sleeper(struct ranks_self *self, uint32_t timeout_ms, struct prs_fused **out)
{
    struct prs_fused_config config = {.rank = self->rank,
                                      .world = self->team->world,
                                      .device = (int)self->rank,
                                      .timeout_ms = timeout_ms,
                                      .allgather = ranks_allgather,
                                      .user = self,
                                      .sleeps = 1};
    (void)cudaSetDevice((int)self->rank);
    return prs_fused_open(&config, out);
}

static void open_layer(struct work *w, uint32_t rank, enum prs_moe_path path)
{
    static const int64_t chosen[CHOICES] = {2, 0, 1, 3, 0, 1};
    static const float weights[CHOICES] = {0.5f, 1, 0.25f, 2, 1, -1.5f};
    const struct prs_moe_tuning tuning = {.path = path};
    static const struct prs_moe_shape shape = {.tokens = TOKENS,
                                               .hidden = HIDDEN,
                                               .columns = 2 * INNER,
                                               .experts = EXPERTS,
                                               .top_k = TOP_K,
                                               .weights_transposed = 1,
                                               .activation = PRS_ACTIVATION_SILU,
                                               .gated = 1,
                                               .layer = 1};
    void *choices = ranks_device(sizeof(chosen), 0), *router = ranks_device(sizeof(weights), 0);
    cr_assert_eq(prs_moe_plan_open(w->ctx, &shape, &tuning, &w->layer), 0, "%s", prs_fused_error_text());
    (void)cudaMemcpy(choices, chosen, sizeof(chosen), cudaMemcpyHostToDevice);
    (void)cudaMemcpy(router, weights, sizeof(weights), cudaMemcpyHostToDevice);
    w->batch = (struct prs_moe_batch){.tokens = ranks_upload(rank, TOKENS * HIDDEN),
                                      .count = TOKENS,
                                      .chosen = choices,
                                      .router_weights = router,
                                      .weights = ranks_upload(10 + rank, EXPERTS / WORLD * 2 * INNER * HIDDEN),
                                      .down = ranks_upload(20 + rank, EXPERTS / WORLD * HIDDEN * INNER),
                                      .out = ranks_device(TOKENS * HIDDEN * sizeof(uint16_t), 0)};
}

static void open_product(struct work *w, uint32_t rank)
{
    static const struct prs_gemm_shape shape = {
        .op = PRS_GEMM_REDUCE_SCATTER, .m = ROWS, .n = COLUMNS, .k = DEPTH, .b_transposed = 1};
    static const struct prs_gemm_tuning fused = {.path = PRS_GEMM_PATH_FUSED};
    cr_assert_eq(prs_gemm_plan_open(w->ctx, &shape, &fused, &w->product), 0, "%s", prs_fused_error_text());
    w->operands = (struct prs_gemm_operands){.a = ranks_upload(30 + rank, ROWS * DEPTH),
                                             .b = ranks_upload(40 + rank, COLUMNS * DEPTH),
                                             .c = ranks_device(ROWS / WORLD * COLUMNS * sizeof(uint16_t), 0)};
}

static void open_work(struct work *w, struct ranks_self *self, uint32_t timeout_ms)
{
    cudaGraph_t graph;
    cr_assert_eq(open_sleeper(self, timeout_ms, &w->ctx), 0, "%s", prs_fused_error_text());
    (void)cudaStreamCreateWithFlags(&w->stream, cudaStreamNonBlocking);
    open_layer(w, self->rank, PRS_MOE_PATH_ONE);
    open_product(w, self->rank);
    cr_assert_eq(prs_fused_alloc(w->ctx, LENT, (void **)&w->lent), 0, "%s", prs_fused_error_text());
    cr_assert_eq(cudaStreamBeginCapture(w->stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    cr_assert_eq(prs_moe_layer(w->layer, &w->batch, w->stream), 0, "%s", prs_fused_error_text());
    cr_assert_eq(prs_gemm_launch(w->product, &w->operands, w->stream), 0, "%s", prs_fused_error_text());
    cr_assert_eq(cudaStreamEndCapture(w->stream, &graph), cudaSuccess);
    cr_assert_eq(cudaGraphInstantiate(&w->graph, graph, 0), cudaSuccess);
}

static void close_work(struct work *w)
{
    (void)cudaStreamSynchronize(w->stream);
    prs_moe_plan_close(w->layer);
    prs_gemm_plan_close(w->product);
    cr_assert_eq(prs_fused_free(w->ctx, w->lent), 0);
    prs_fused_close(w->ctx);
}

static void replay(struct work *w, struct results *out)
{
    struct prs_fused_error error;
    (void)cudaMemset(w->batch.out, 0xff, sizeof(out->layer));
    (void)cudaMemset(w->operands.c, 0xff, sizeof(out->product));
    (void)cudaDeviceSynchronize();
    cr_assert_eq(cudaGraphLaunch(w->graph, w->stream), cudaSuccess);
    cr_assert_eq(cudaStreamSynchronize(w->stream), cudaSuccess);
    cr_assert_eq(prs_fused_poll_error(w->ctx, &error), 0, "%s", error.text);
    (void)cudaMemcpy(out->layer, w->batch.out, sizeof(out->layer), cudaMemcpyDeviceToHost);
    (void)cudaMemcpy(out->product, w->operands.c, sizeof(out->product), cudaMemcpyDeviceToHost);
}

static void expect_text(const char *part)
{
    cr_assert_not_null(strstr(prs_fused_error_text(), part), "%s", prs_fused_error_text());
}

static struct prs_fused_memory memory_of(const struct prs_fused *ctx)
{
    struct prs_fused_memory memory;
    prs_fused_memory(ctx, &memory);
    return memory;
}

static void refuse_while_asleep(struct work *w)
{
    struct prs_gemm_plan *plan = NULL;
    const struct prs_gemm_shape shape = {.op = PRS_GEMM_ALLREDUCE, .m = 8, .n = 64, .k = 64, .c_anywhere = 1};
    void *memory = NULL;
    cr_assert_eq(prs_gemm_launch(w->product, &w->operands, w->stream), -EBUSY);
    expect_text("is asleep");
    cr_assert_eq(prs_moe_layer(w->layer, &w->batch, w->stream), -EBUSY);
    cr_assert_eq(prs_gemm_plan_open(w->ctx, &shape, NULL, &plan), -EBUSY);
    cr_assert_eq(prs_fused_alloc(w->ctx, 64, &memory), -EBUSY);
    cr_assert_eq(prs_fused_sleep(w->ctx), -EALREADY);
    expect_text("is asleep already");
}

/* Launches of an odd and of an even number, because launches alternate between two buffers. */
static void sleep_and_go_on(uint32_t rank, struct ranks_self *self, void *user)
{
    struct work w;
    struct results before, after;
    struct prs_fused_memory awake, asleep;
    uint8_t content[LENT], kept[LENT];
    uint32_t round = 0;
    (void)user;
    hopper_setup(WORLD, 4, 0);
    open_work(&w, self, LIMIT_MS);
    memset(content, (int)(0x51 + rank), sizeof(content));
    (void)cudaMemcpy(w.lent, content, sizeof(content), cudaMemcpyHostToDevice);
    replay(&w, &before);
    for (; round < 2; round++) {
        cr_assert_eq(prs_fused_wake(w.ctx), -EINVAL);
        expect_text("is not asleep");
        awake = memory_of(w.ctx);
        cr_assert_eq(hopper_virtual_bytes((int)rank), awake.held);
        cr_assert_eq(prs_fused_sleep(w.ctx), 0, "%s", prs_fused_error_text());
        asleep = memory_of(w.ctx);
        cr_assert(asleep.held == 0 && asleep.used == awake.used && asleep.saved > LENT && awake.saved == 0);
        cr_assert_eq(hopper_virtual_bytes((int)rank), 0, "memory of rank %u was not given back", rank);
        refuse_while_asleep(&w);
        cr_assert_eq(prs_fused_wake(w.ctx), 0, "%s", prs_fused_error_text());
        cr_assert_eq(memory_of(w.ctx).held, awake.held);
        replay(&w, &after);
        cr_assert_eq(memcmp(&before, &after, sizeof(before)), 0, "results of rank %u differ", rank);
        (void)cudaMemcpy(kept, w.lent, sizeof(kept), cudaMemcpyDeviceToHost);
        cr_assert_eq(memcmp(kept, content, sizeof(kept)), 0);
    }
    close_work(&w);
    cr_assert_eq(hopper_virtual_bytes((int)rank), 0);
}

Test(sleep, ranks_of_one_process_go_on_after_they_slept, .timeout = 300)
{
    ranks_run(WORLD, sleep_and_go_on, NULL);
}

Test(sleep, ranks_of_two_processes_go_on_after_they_slept, .timeout = 300)
{
    ranks_run_apart(WORLD, 2, sleep_and_go_on, NULL);
}

/* ---- what launches find when they come after a sleep: memory that does not survive holds not-a-numbers ---- */
enum { KINDS = 6, MODES = 2, SEQUENCE = 256, HEAD = 64, HEADS = 2, RESULT = ROWS * COLUMNS * sizeof(uint16_t) };

static const struct {
    enum prs_gemm_op op;
    uint32_t rows;
    struct prs_gemm_tuning tuning;
} kinds[KINDS] = {{PRS_GEMM_ALLREDUCE, 8, {.path = PRS_GEMM_PATH_UNFUSED}}, /* inboxes */
                  {PRS_GEMM_ALLREDUCE, ROWS, {.path = PRS_GEMM_PATH_FUSED}},
                  {PRS_GEMM_REDUCE_SCATTER, ROWS, {.path = PRS_GEMM_PATH_UNFUSED}},
                  {PRS_GEMM_ALLGATHER, ROWS, {.path = PRS_GEMM_PATH_UNFUSED}},
                  {PRS_GEMM_ALLGATHER, ROWS, {.path = PRS_GEMM_PATH_FUSED, .mover = PRS_MOVED_BY_COPY_ENGINES}},
                  {PRS_GEMM_ALLGATHER, ROWS, {.path = PRS_GEMM_PATH_FUSED, .mover = PRS_MOVED_BY_CTAS}}};

struct plans {
    struct work layer; /* of several kernels; its context and stream are those of all */
    struct prs_gemm_plan *product[KINDS];
    struct prs_attention_plan *attention[MODES];
    uint16_t *a, *b, *kv, *result[KINDS + MODES];
};

static void open_plans(struct plans *p, struct ranks_self *self)
{
    static const struct prs_attention_shape shape = {
        .batch = 1, .heads_q = HEADS, .heads_kv = HEADS, .head_dim = HEAD, .seq = SEQUENCE};
    struct prs_fused *ctx;
    cr_assert_eq(open_sleeper(self, LIMIT_MS, &ctx), 0, "%s", prs_fused_error_text());
    p->layer.ctx = ctx;
    (void)cudaStreamCreateWithFlags(&p->layer.stream, cudaStreamNonBlocking);
    open_layer(&p->layer, self->rank, PRS_MOE_PATH_KERNELS);
    for (uint32_t i = 0; i < KINDS; i++) {
        const struct prs_gemm_shape s = {.op = kinds[i].op,
                                         .m = kinds[i].rows,
                                         .n = COLUMNS,
                                         .k = DEPTH,
                                         .b_transposed = 1,
                                         .c_anywhere = kinds[i].op == PRS_GEMM_ALLREDUCE};
        cr_assert_eq(prs_gemm_plan_open(ctx, &s, &kinds[i].tuning, &p->product[i]), 0, "product %u: %s", i,
                     prs_fused_error_text());
    }
    for (uint32_t i = 0; i < MODES; i++) {
        const struct prs_attention_tuning tuning = {.mode = i == 0 ? PRS_ATTENTION_RESIDENT : PRS_ATTENTION_RING};
        cr_assert_eq(prs_attention_plan_open(ctx, &shape, &tuning, &p->attention[i]), 0, "%s", prs_fused_error_text());
    }
    for (uint32_t i = 0; i < KINDS + MODES; i++)
        p->result[i] = ranks_device(RESULT, 0);
    p->a = ranks_upload(30 + self->rank, ROWS * DEPTH), p->b = ranks_upload(40, COLUMNS * DEPTH);
    p->kv = ranks_upload(50 + self->rank, SEQUENCE / WORLD * HEADS * HEAD);
}

static void launch_all(struct plans *p, uint8_t (*out)[RESULT])
{
    struct prs_fused_error error;
    cudaStream_t stream = p->layer.stream;
    for (uint32_t i = 0; i < KINDS + MODES; i++)
        (void)cudaMemset(p->result[i], 0x11, RESULT);
    (void)cudaMemset(p->layer.batch.out, 0x11, TOKENS * HIDDEN * sizeof(uint16_t));
    (void)cudaDeviceSynchronize();
    for (uint32_t i = 0; i < KINDS; i++) {
        const struct prs_gemm_operands o = {.a = p->a, .b = p->b, .c = p->result[i]};
        cr_assert_eq(prs_gemm_launch(p->product[i], &o, stream), 0, "product %u: %s", i, prs_fused_error_text());
    }
    for (uint32_t i = 0; i < MODES; i++) {
        const struct prs_attention_operands o = {
            .q = p->kv, .k = p->kv, .v = p->kv, .out = p->result[KINDS + i], .lse = NULL};
        cr_assert_eq(prs_attention_launch(p->attention[i], &o, stream), 0, "%s", prs_fused_error_text());
    }
    cr_assert_eq(prs_moe_layer(p->layer.layer, &p->layer.batch, stream), 0, "%s", prs_fused_error_text());
    cr_assert_eq(cudaStreamSynchronize(stream), cudaSuccess);
    cr_assert_eq(prs_fused_poll_error(p->layer.ctx, &error), 0, "%s", error.text);
    memset(out, 0, (KINDS + MODES + 1) * sizeof(*out));
    for (uint32_t i = 0; i < KINDS + MODES; i++)
        (void)cudaMemcpy(out[i], p->result[i], RESULT, cudaMemcpyDeviceToHost);
    (void)cudaMemcpy(out[KINDS + MODES], p->layer.batch.out, TOKENS * HIDDEN * sizeof(uint16_t),
                     cudaMemcpyDeviceToHost);
}

static void close_plans(struct plans *p)
{
    for (uint32_t i = 0; i < KINDS; i++)
        prs_gemm_plan_close(p->product[i]);
    for (uint32_t i = 0; i < MODES; i++)
        prs_attention_plan_close(p->attention[i]);
    prs_moe_plan_close(p->layer.layer);
    prs_fused_close(p->layer.ctx);
}

/* The second sleep comes after an even number of launches. */
static void sleep_between_launches(uint32_t rank, struct ranks_self *self, void *user)
{
    uint8_t(*before)[RESULT] = malloc((KINDS + MODES + 1) * sizeof(*before));
    uint8_t(*after)[RESULT] = malloc((KINDS + MODES + 1) * sizeof(*after));
    struct plans p = {.a = NULL};
    (void)user;
    cr_assert(before && after);
    open_plans(&p, self);
    launch_all(&p, before);
    for (uint32_t round = 0; round < 2; round++) {
        cr_assert_eq(prs_fused_sleep(p.layer.ctx), 0, "%s", prs_fused_error_text());
        cr_assert_eq(prs_fused_wake(p.layer.ctx), 0, "%s", prs_fused_error_text());
        launch_all(&p, after);
        for (uint32_t i = 0; i < KINDS + MODES + 1; i++)
            cr_assert_eq(memcmp(before[i], after[i], RESULT), 0, "rank %u: result %u differs", rank, i);
    }
    close_plans(&p);
    free(before);
    free(after);
}

Test(sleep, every_kind_of_launch_goes_on_after_a_sleep, .timeout = 300)
{
    hopper_setup(WORLD, 4, 0);
    ranks_run(WORLD, sleep_between_launches, NULL);
}

/* A plan that is closed meanwhile leaves its memory clean, and a new one gets it. */
static void change_while_asleep(uint32_t rank, struct ranks_self *self, void *user)
{
    struct work w;
    struct results before, after;
    (void)user;
    open_work(&w, self, LIMIT_MS);
    replay(&w, &before);
    cr_assert_eq(prs_fused_sleep(w.ctx), 0, "%s", prs_fused_error_text());
    prs_moe_plan_close(w.layer);
    cr_assert_eq(prs_fused_wake(w.ctx), 0, "%s", prs_fused_error_text());
    open_layer(&w, rank, PRS_MOE_PATH_ONE);
    (void)cudaMemset(w.batch.out, 0xff, sizeof(after.layer));
    (void)cudaDeviceSynchronize();
    cr_assert_eq(prs_moe_layer(w.layer, &w.batch, w.stream), 0, "%s", prs_fused_error_text());
    (void)cudaStreamSynchronize(w.stream);
    (void)cudaMemcpy(after.layer, w.batch.out, sizeof(after.layer), cudaMemcpyDeviceToHost);
    cr_assert_eq(memcmp(before.layer, after.layer, sizeof(before.layer)), 0);
    cr_assert_eq(prs_fused_sleep(w.ctx), 0, "%s", prs_fused_error_text());
    close_work(&w); /* asleep */
    cr_assert_eq(hopper_virtual_bytes((int)rank), 0);
}

Test(sleep, plans_and_the_context_close_while_asleep, .timeout = 300)
{
    hopper_setup(WORLD, 4, 0);
    ranks_run(WORLD, change_while_asleep, NULL);
}

static void wake_without_memory(uint32_t rank, struct ranks_self *self, void *user)
{
    struct work w;
    struct results before, after;
    (void)user;
    open_work(&w, self, LIMIT_MS);
    replay(&w, &before);
    cr_assert_eq(prs_fused_sleep(w.ctx), 0, "%s", prs_fused_error_text());
    if (rank == 1)
        hopper_limit_virtual_bytes(1, 4 << 20); /* enough for some, not for all */
    cr_assert_eq(prs_fused_wake(w.ctx), -ENOMEM);
    expect_text(rank == 1 ? "out of memory" : "rank 1 could not allocate");
    cr_assert_eq(hopper_virtual_bytes((int)rank), 0);
    refuse_while_asleep(&w);
    hopper_limit_virtual_bytes(1, 1ull << 40);
    cr_assert_eq(prs_fused_wake(w.ctx), 0, "%s", prs_fused_error_text());
    replay(&w, &after);
    cr_assert_eq(memcmp(&before, &after, sizeof(before)), 0);
    close_work(&w);
}

Test(sleep, all_ranks_stay_asleep_when_one_gets_no_memory, .timeout = 300)
{
    hopper_setup(WORLD, 4, 0);
    ranks_run(WORLD, wake_without_memory, NULL);
}

/* Rank 1 comes after rank 0 has given up. */
static void come_late(uint32_t rank, struct ranks_self *self, void *user)
{
    struct prs_fused *ctx = NULL;
    (void)user;
    cr_assert_eq(open_sleeper(self, SHORT_MS, &ctx), 0, "%s", prs_fused_error_text());
    if (rank == 0) {
        cr_assert_eq(prs_fused_sleep(ctx), -ETIMEDOUT);
        expect_text("rank 1 did not call it within 300 ms");
    }
    (void)ranks_allgather(self, &rank, (uint32_t[WORLD]){0}, sizeof(rank));
    if (rank == 1) {
        cr_assert_eq(prs_fused_sleep(ctx), -ETIMEDOUT);
        expect_text("rank 1 called prs_fused_sleep() too late");
    }
    cr_assert_neq(memory_of(ctx).held, 0);
    prs_fused_close(ctx);
}

Test(sleep, a_rank_that_does_not_come_is_named, .timeout = 300)
{
    hopper_setup(WORLD, 4, 0);
    ranks_run(WORLD, come_late, NULL);
}

static void ask_for_what_cannot_be(uint32_t rank, struct ranks_self *self, void *user)
{
    struct prs_fused_config config = {.rank = rank,
                                      .world = WORLD,
                                      .device = (int)rank,
                                      .timeout_ms = LIMIT_MS,
                                      .allgather = ranks_allgather,
                                      .user = self};
    struct prs_fused *ctx = NULL;
    (void)user;
    cr_assert_eq(prs_fused_open(&config, &ctx), 0, "%s", prs_fused_error_text());
    cr_assert_eq(prs_fused_sleep(ctx), -EOPNOTSUPP);
    expect_text("without `sleeps`");
    cr_assert_eq(prs_fused_wake(ctx), -EOPNOTSUPP);
    cr_assert_eq(hopper_virtual_bytes((int)rank), 0);
    prs_fused_close(ctx);
    config.sleeps = 2;
    cr_assert_eq(prs_fused_open(&config, &ctx), -EINVAL);
    expect_text("sleeps is 2");
    config.sleeps = rank;
    cr_assert_eq(prs_fused_open(&config, &ctx), -EINVAL);
    expect_text(rank == 0 ? "rank 1 opens with sleeps 1" : "rank 0 opens with sleeps 0");
    config.sleeps = 1, config.node = rank + 1;
    cr_assert_eq(prs_fused_open(&config, &ctx), -EOPNOTSUPP);
    expect_text("the job has 2 nodes");
}

Test(sleep, only_a_context_of_one_node_that_asked_for_it_sleeps, .timeout = 60)
{
    hopper_setup(WORLD, 4, 0);
    ranks_run(WORLD, ask_for_what_cannot_be, NULL);
}
