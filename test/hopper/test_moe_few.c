/* SPDX-License-Identifier: Apache-2.0 */
/* The MoE layer as one kernel, for few tokens (fused/moe/few.h), on emulated GPUs. Every token's result is compared
 * with the layer in double precision. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "test/hopper/ranks_moe.h"
#include "tools/hopper/hopper.h"

static void assert_right(const struct ranks_moe *rows, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        struct ranks_moe one = rows[i];
        one.what = LAYER;
        one.tuning.path = PRS_MOE_PATH_ONE;
        ranks_moe_assert_right(&one, 1);
    }
}

Test(moe_few, few_tokens_take_one_launch, .timeout = 600)
{
    static const struct ranks_moe rows[] = {
        {1, 2, 136, 4, 2, 2, EVEN, .inner = 136, .activation = PRS_ACTIVATION_SILU, .gated = 1},
        {2, 1, 136, 8, 2, 6, ANY, .inner = 72, .activation = PRS_ACTIVATION_SILU, .gated = 1, .residual = true,
         .in_place = true},
        {2, 3, 264, 8, 3, 4, EVEN, .inner = 136, .activation = PRS_ACTIVATION_SILU, .gated = 1},
        {2, 16, 1224, 4, 2, 2, EVEN, .inner = 72, .activation = PRS_ACTIVATION_GELU, .residual = true},
    };
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

Test(moe_few, experts_with_many_rows_have_several_tiles, .timeout = 600)
{
    static const struct ranks_moe rows[] = {
        {2, 32, 136, 4, 2, 2, EVEN, .inner = 72, .activation = PRS_ACTIVATION_SILU, .gated = 1},
        {2, 32, 72, 4, 2, 2, ONE_EXPERT, .inner = 72, .activation = PRS_ACTIVATION_RELU, .residual = true},
        {2, 12, 72, 18, 9, 2, HALF_EMPTY, .inner = 40, .activation = PRS_ACTIVATION_SILU, .gated = 1},
    };
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* Where experts have more than 32 rows on average, tiles have up to 64: of up to 8, 16, 32 and 64 rows, several tiles
 * of an expert, tokens of two pieces, a last stage that is half empty, one CTA. */
Test(moe_few, wide_tiles_are_right, .timeout = 600)
{
    static const struct ranks_moe rows[] = {
        {2, 40, 136, 4, 2, 2, EVEN, .inner = 72, .activation = PRS_ACTIVATION_SILU, .gated = 1},
        {2, 40, 72, 4, 3, 3, ANY, .inner = 72, .activation = PRS_ACTIVATION_RELU, .residual = true},
        {2, 50, 72, 4, 2, 2, ONE_EXPERT, .inner = 40, .activation = PRS_ACTIVATION_SILU, .gated = 1,
         .tuning = {.ctas = 1}},
        {2, 34, 1224, 4, 2, 2, HALF_EMPTY, .inner = 136, .activation = PRS_ACTIVATION_GELU},
    };
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* Also choices that are skewed: experts without rows, and one that has all of them. The last row's one rank has more
 * rows than shared memory has room for in its list. */
Test(moe_few, more_than_4096_choices_are_right, .timeout = 600)
{
    static const struct ranks_moe rows[] = {
        {4, 160, 40, 16, 7, 3, HALF_EMPTY, .combines = 2, .inner = 24, .activation = PRS_ACTIVATION_SILU, .gated = 1},
        {2, 720, 40, 8, 3, 3, ONE_EXPERT, .inner = 24, .activation = PRS_ACTIVATION_RELU, .residual = true},
        {1, 900, 40, 512, 8, 2, EVEN, .inner = 24, .activation = PRS_ACTIVATION_SILU, .gated = 1},
    };
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* Ranks without tokens, experts without rows, an expert chosen twice by a token; the second time the same bits. */
Test(moe_few, any_choices_are_right_in_many_launches, .timeout = 600)
{
    static const struct ranks_moe rows[] = {
        {2, 6, 72, 4, 3, 24, ANY, .combines = 2, .inner = 72, .activation = PRS_ACTIVATION_SILU, .gated = 1},
        {4, 3, 72, 8, 2, 8, ANY, .inner = 72, .activation = PRS_ACTIVATION_SILU, .gated = 1, .residual = true},
        {2, 3, 72, 8, 2, 4, SOME_NONE, .inner = 72, .activation = PRS_ACTIVATION_SILU, .gated = 1,
         .tuning = {.ctas = 1}},
    };
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* ---- a plan whose layer is one kernel, beside its other calls ---- */
enum { WORLD = 2, TOKENS = 3, HIDDEN = 72, INNER = 40, EXPERTS = 4, TOP_K = 2, LAYERS = 2, MAPPED = 5, REPLICAS = 2 };

struct calls {
    struct prs_fused *ctx;
    struct prs_moe_plan *plan;
    struct prs_moe_info info;
    struct prs_moe_batch one, kernels; /* the same layer; the second keeps its maps, and so takes the other path */
    struct prs_moe_status *status[LAYERS];
    uint32_t *count;
    uint16_t out[LAYERS][TOKENS * HIDDEN];
};

static void open_layer(struct calls *c)
{
    static const struct prs_moe_shape shape = {.tokens = TOKENS,
                                               .hidden = HIDDEN,
                                               .columns = 2 * INNER,
                                               .experts = EXPERTS,
                                               .top_k = TOP_K,
                                               .weights_transposed = 1,
                                               .activation = PRS_ACTIVATION_SILU,
                                               .gated = 1,
                                               .layer = 1,
                                               .logical_experts = MAPPED,
                                               .replicas = REPLICAS};
    cr_assert_eq(prs_moe_plan_open(c->ctx, &shape, NULL, &c->plan), 0, "%s", prs_fused_error_text());
    prs_moe_plan_query(c->plan, &c->info);
}

static void open_calls(struct calls *c, struct ranks_self *self, uint32_t rank, uint32_t timeout_ms)
{
    /* Expert 0 has two places, expert 2 the same one twice; expert 3 is absent, and that of expert 4 does not exist. */
    static const int32_t map[MAPPED * REPLICAS] = {0, 2, 1, -1, 3, 3, -1, -1, EXPERTS, -1};
    /* Rank 1 chooses an expert that does not exist, and one twice. */
    int64_t chosen[TOKENS * TOP_K] = {0, 3, 1, rank == 1 ? MAPPED : 0, rank == 1 ? 2 : 4, 2};
    float weights[TOKENS * TOP_K] = {0.5f, 1, 0.25f, 2, 1, -1.5f};
    void *device[3] = {ranks_device(sizeof(chosen), 0), ranks_device(sizeof(weights), 0), ranks_device(sizeof(map), 0)};
    cr_assert_eq(ranks_open(self, 0, timeout_ms, &c->ctx), 0);
    open_layer(c);
    cr_assert_eq(c->info.tuning.path, PRS_MOE_PATH_ONE, "%s", c->info.reason);
    (void)cudaMemcpy(device[0], chosen, sizeof(chosen), cudaMemcpyHostToDevice);
    (void)cudaMemcpy(device[1], weights, sizeof(weights), cudaMemcpyHostToDevice);
    (void)cudaMemcpy(device[2], map, sizeof(map), cudaMemcpyHostToDevice);
    for (int i = 0; i < LAYERS; i++)
        c->status[i] = ranks_device(sizeof(*c->status[i]), 0xff);
    c->count = ranks_device(sizeof(*c->count), 0);
    c->one = (struct prs_moe_batch){.tokens = ranks_upload(rank, TOKENS * HIDDEN),
                                    .chosen = device[0],
                                    .router_weights = device[1],
                                    .weights = ranks_upload(10 + rank, EXPERTS / WORLD * 2 * INNER * HIDDEN),
                                    .down = ranks_upload(20 + rank, EXPERTS / WORLD * HIDDEN * INNER),
                                    .out = ranks_device(sizeof(c->out[0]), 0xff),
                                    .count_on_device = c->count,
                                    .placement = device[2],
                                    .status = c->status[0]};
    c->kernels = c->one;
    c->kernels.out = ranks_device(sizeof(c->out[0]), 0xff);
    c->kernels.maps = ranks_device(c->info.maps_bytes, 0);
    c->kernels.status = c->status[1];
}

static void close_calls(struct calls *c)
{
    prs_moe_plan_close(c->plan);
    prs_fused_close(c->ctx);
}

static void set_count(const struct calls *c, uint32_t count)
{
    (void)cudaMemcpy(c->count, &count, sizeof(count), cudaMemcpyHostToDevice);
}

/* Both layers' results and status must agree; results are rounded at other places. */
static void check_both(struct calls *c, uint32_t count)
{
    struct prs_moe_status status[LAYERS];
    const struct prs_moe_batch *layer[LAYERS] = {&c->one, &c->kernels};
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    for (int i = 0; i < LAYERS; i++) {
        (void)cudaMemcpy(c->out[i], layer[i]->out, sizeof(c->out[i]), cudaMemcpyDeviceToHost);
        (void)cudaMemcpy(&status[i], c->status[i], sizeof(status[i]), cudaMemcpyDeviceToHost);
    }
    for (uint32_t i = 0; i < count * HIDDEN; i++) {
        float a = ranks_float(c->out[0][i]), b = ranks_float(c->out[1][i]);
        cr_assert(fabsf(a - b) <= 0x1p-6f * fmaxf(fabsf(a), 1), "element %u of %u tokens: %g, %g", i, count, (double)a,
                  (double)b);
    }
    cr_assert_eq(
        memcmp(&status[0], &status[1], offsetof(struct prs_moe_status, unused)), 0,
        "rows needed %u %u, absent %u %u, places %u %u, wrong choices %u %u, token %u %u, tokens dropped %u %u",
        status[0].rows_needed, status[1].rows_needed, status[0].absent_choices, status[1].absent_choices,
        status[0].wrong_places, status[1].wrong_places, status[0].wrong_choices, status[1].wrong_choices,
        status[0].wrong_token, status[1].wrong_token, status[0].tokens_dropped, status[1].tokens_dropped);
}

static void take_turns(uint32_t rank, struct ranks_self *self, void *user)
{
    static const uint32_t counts[] = {TOKENS, 0, 1, TOKENS + 2, 2};
    struct prs_fused_error error;
    struct calls c;
    cudaGraphExec_t exec;
    cudaStream_t stream;
    cudaGraph_t graph;
    (void)user;
    open_calls(&c, self, rank, 60000);
    struct prs_moe_batch rows = c.kernels;
    rows.out = ranks_device((size_t)c.info.capacity * HIDDEN * 2, 0);
    rows.expert_rows = ranks_device(EXPERTS / WORLD * sizeof(*rows.expert_rows), 0);
    struct prs_moe_results back = {.rows = rows.out, .out = ranks_device(sizeof(c.out[0]), 0), .maps = rows.maps};
    (void)cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cr_assert_eq(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    cr_assert_eq(prs_moe_layer(c.plan, &c.one, stream), 0, "%s", prs_fused_error_text());
    cr_assert_eq(prs_moe_dispatch(c.plan, &rows, stream), 0, "%s", prs_fused_error_text());
    cr_assert_eq(prs_moe_combine(c.plan, &back, stream), 0, "%s", prs_fused_error_text());
    cr_assert_eq(prs_moe_layer(c.plan, &c.kernels, stream), 0, "%s", prs_fused_error_text());
    cr_assert_eq(prs_moe_layer(c.plan, &c.one, stream), 0, "%s", prs_fused_error_text());
    cr_assert_eq(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    cr_assert_eq(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    for (uint32_t i = 0; i < sizeof(counts) / sizeof(*counts); i++) {
        uint32_t count = counts[(i + rank) % (sizeof(counts) / sizeof(*counts))];
        set_count(&c, count);
        cr_assert_eq(cudaGraphLaunch(exec, stream), cudaSuccess);
        check_both(&c, count < TOKENS ? count : TOKENS);
    }
    rows.rows = ranks_device(c.info.capacity * sizeof(*rows.rows), 0);
    cr_assert_eq(prs_moe_dispatch_gemm(c.plan, &rows, stream), 0, "%s", prs_fused_error_text());
    cr_assert_eq(prs_moe_gemm(c.plan, &rows, stream), 0, "%s", prs_fused_error_text());
    cr_assert_eq(prs_moe_layer(c.plan, &c.one, stream), 0, "%s", prs_fused_error_text());
    cr_assert_eq(prs_moe_gemm(c.plan, &rows, stream), -EINVAL, "its tokens lie where the rows were");
    cr_assert_not_null(strstr(prs_fused_error_text(), "no longer there"), "%s", prs_fused_error_text());
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    cr_assert_eq(prs_fused_poll_error(c.ctx, &error), 0, "%s", error.text);
    close_calls(&c);
}

Test(moe_few, a_graph_of_both_paths_serves_any_count, .timeout = 300)
{
    hopper_setup(WORLD, 4, 0);
    ranks_run(WORLD, take_turns, NULL);
}

static void launch_alone(uint32_t rank, struct ranks_self *self, void *user)
{
    struct prs_fused_error *error = user;
    struct calls c;
    open_calls(&c, self, rank, RANKS_LOST_MS);
    set_count(&c, TOKENS);
    if (rank == 0) {
        cr_assert_eq(prs_moe_layer(c.plan, &c.one, NULL), 0);
        cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
        (void)prs_fused_poll_error(c.ctx, error);
    }
    (void)ranks_allgather(self, &rank, (uint32_t[WORLD]){0}, sizeof(rank));
    close_calls(&c);
}

Test(moe_few, a_rank_that_does_not_come_is_named, .timeout = 120)
{
    struct prs_fused_error error = {0};
    hopper_setup(WORLD, 4, 0);
    hopper_forgive_late_writes();
    ranks_run(WORLD, launch_alone, &error);
    cr_assert_eq(error.code, -ETIMEDOUT, "%d", error.code);
    cr_assert_not_null(strstr(error.text, "counts and routes of rank 1"), "%s", error.text);
}

static void open_wrong_plans(uint32_t rank, struct ranks_self *self, void *user)
{
    static const struct {
        struct prs_moe_shape shape;
        uint32_t path;
        const char *why;
    } rows[] = {
        {{4, 64, 64, 4, 2, .layer = 1}, PRS_MOE_PATH_ONE, "weights_transposed 0"},
        {{4, 64, 64, 4, 2, .weights_transposed = 1}, PRS_MOE_PATH_ONE, "the plan is not of a layer"},
        {{4, 64, 64, 4, 2, 128, 1, .layer = 1}, PRS_MOE_PATH_ONE, "capacity 128"},
        {{8193, 64, 64, 4, 4, .weights_transposed = 1, .layer = 1}, PRS_MOE_PATH_ONE, "at most 32768 choices"},
        {{4, 64, 64, 4, 2, .weights_transposed = 1, .layer = 1}, PRS_MOE_PATH_ONE + 1, "path 3 is not known"},
    };
    struct prs_moe_plan *plan = NULL;
    struct prs_fused *ctx;
    (void)rank;
    (void)user;
    cr_assert_eq(ranks_open(self, 0, 60000, &ctx), 0);
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct prs_moe_tuning tuning = {.path = rows[i].path};
        cr_assert_eq(prs_moe_plan_open(ctx, &rows[i].shape, &tuning, &plan), -EINVAL, "row %zu", i);
        cr_assert_not_null(strstr(prs_fused_error_text(), rows[i].why), "%s", prs_fused_error_text());
    }
    prs_fused_close(ctx);
}

Test(moe_few, what_one_kernel_cannot_do_is_refused_by_name, .timeout = 60)
{
    hopper_setup(1, 4, 0);
    ranks_run(1, open_wrong_plans, NULL);
}

/* ---- which path a plan takes ---- */
static void open_plans(uint32_t rank, struct ranks_self *self, void *user)
{
    static const struct {
        struct prs_moe_shape shape;
        uint32_t wanted, path, capacity_of_last; /* wanted: by tuning */
        const char *why;                         /* of rank 0 */
    } rows[] = {
        {{32, 64, 128, 64, 4, .weights_transposed = 1, .gated = 1, .layer = 1}, 0, PRS_MOE_PATH_ONE, 0, "few tokens"},
        {{4096, 64, 64, 512, 4, .weights_transposed = 1, .layer = 1},
         PRS_MOE_PATH_ONE,
         PRS_MOE_PATH_ONE,
         0,
         "as tuning.path says"},
        {{4097, 64, 64, 512, 4, .weights_transposed = 1, .layer = 1}, 0, PRS_MOE_PATH_KERNELS, 0, "32768 choices"},
        {{32, 64, 64, 64, 4, .layer = 1}, 0, PRS_MOE_PATH_KERNELS, 0, "weights_transposed"},
        {{32, 64, 64, 64, 4, .weights_transposed = 1}, 0, PRS_MOE_PATH_KERNELS, 0, "not of a layer"},
        {{32, 64, 64, 64, 4, .weights_transposed = 1, .layer = 1}, 0, PRS_MOE_PATH_KERNELS, 128, "on another rank"},
        {{32, 64, 64, 64, 4, 128, 1, .layer = 1}, 0, PRS_MOE_PATH_KERNELS, 0, "capacity 0"},
        {{32, 64, 64, 64, 4, .weights_transposed = 1, .layer = 1},
         PRS_MOE_PATH_KERNELS,
         PRS_MOE_PATH_KERNELS,
         0,
         "as tuning.path says"},
        {{32, 64, 64, 64, 4, .weights_transposed = 1, .layer = 1},
         PRS_MOE_PATH_ONE,
         PRS_MOE_PATH_ONE,
         0,
         "as tuning.path says"},
        /* Each of eight experts has 256 rows of a wide product. */
        {{512, 4096, 16384, 8, 2, .weights_transposed = 1, .gated = 1, .layer = 1},
         0,
         PRS_MOE_PATH_KERNELS,
         0,
         "slower"},
    };
    double us[2] = {0};
    struct prs_fused *ctx;
    (void)user;
    cr_assert_eq(ranks_open(self, 0, 60000, &ctx), 0);
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct prs_moe_tuning tuning = {.path = rows[i].wanted};
        struct prs_moe_shape shape = rows[i].shape;
        struct prs_moe_plan *plan = NULL;
        struct prs_moe_info info;
        if (rank == WORLD - 1 && rows[i].capacity_of_last != 0)
            shape.capacity = rows[i].capacity_of_last;
        cr_assert_eq(prs_moe_plan_open(ctx, &shape, &tuning, &plan), 0, "row %zu: %s", i, prs_fused_error_text());
        prs_moe_plan_query(plan, &info);
        cr_assert_eq(info.tuning.path, rows[i].path, "row %zu: %s", i, info.reason);
        cr_assert(rank != 0 || strstr(info.reason, rows[i].why), "row %zu: %s", i, info.reason);
        us[info.tuning.path == PRS_MOE_PATH_ONE] = info.predicted_us;
        prs_moe_plan_close(plan);
        cr_assert(i != 8 || us[1] < us[0], "one kernel %g us, several %g", us[1], us[0]); /* of the same shape */
    }
    prs_fused_close(ctx);
}

Test(moe_few, a_plan_takes_the_path_that_all_ranks_can_take, .timeout = 120)
{
    hopper_setup(WORLD, 4, 0);
    ranks_run(WORLD, open_plans, NULL);
}

struct differing {
    bool switches; /* the rank with maps has to wait at a switch of plans */
    struct prs_fused_error error[WORLD];
};

/* Rank 1 passes maps, and so launches several kernels. */
static void launch_differently(uint32_t rank, struct ranks_self *self, void *user)
{
    struct differing *x = user;
    struct calls c, other;
    open_calls(&c, self, rank, 60000);
    set_count(&c, TOKENS);
    cr_assert_eq(prs_moe_layer(c.plan, &c.one, NULL), 0);
    cr_assert_eq(prs_moe_layer(c.plan, &c.kernels, NULL), 0);
    if (x->switches) {
        other = c;
        open_layer(&other);
        cr_assert_eq(prs_moe_layer(other.plan, &c.kernels, NULL), 0);
    }
    cr_assert_eq(prs_moe_layer(c.plan, rank == 1 ? &c.kernels : &c.one, NULL), 0);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    (void)prs_fused_poll_error(c.ctx, &x->error[rank]);
    (void)ranks_allgather(self, &rank, (uint32_t[WORLD]){0}, sizeof(rank));
    if (x->switches)
        prs_moe_plan_close(other.plan);
    close_calls(&c);
}

Test(moe_few, ranks_that_take_different_paths_are_named, .timeout = 120)
{
    hopper_setup(WORLD, 4, 0);
    hopper_forgive_late_writes();
    for (int switches = 0; switches < 2; switches++) {
        struct differing x = {.switches = switches != 0};
        ranks_run(WORLD, launch_differently, &x);
        cr_assert_eq(x.error[0].code, -EINVAL, "%s", x.error[0].text);
        cr_assert_not_null(strstr(x.error[0].text, "rank 0 runs a layer of MoE as one kernel, and rank 1 launched"),
                           "%s", x.error[0].text);
        cr_assert_eq(x.error[1].code, -ECANCELED, "%s", x.error[1].text);
    }
}

/* Every access checked for its order (memory_order.py). */
Test(moe_few_order, of_a_layer_in_one_launch, .timeout = 600)
{
    static const struct ranks_moe rows[] = {
        {2, 4, 136, 4, 2, 3, EVEN, .inner = 72, .activation = PRS_ACTIVATION_SILU, .gated = 1},
        {2, 34, 136, 2, 1, 3, EVEN, .inner = 72, .activation = PRS_ACTIVATION_SILU, .gated = 1},
        /* a warp lists more than 32 choices */
        {2, 130, 24, 4, 2, 1, EVEN, .inner = 16, .activation = PRS_ACTIVATION_SILU, .gated = 1},
    };
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}
