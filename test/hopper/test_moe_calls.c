/* SPDX-License-Identifier: Apache-2.0 */
/* MoE's calls on emulated GPUs: what they refuse, graphs that hold them, and what they send under each policy of
 * order. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/hopper/hopper.h"
#include "test/hopper/ranks.h"

enum { TOKENS = 24, GROUP = 8, HIDDEN = 72, INNER = 64, TOP = 2, CHOICES = TOKENS * TOP, BLOCK = 128 };

static void copy(const void *to, const void *from, size_t bytes)
{
    cr_assert_eq(cudaMemcpy((void *)(uintptr_t)to, from, bytes, cudaMemcpyDefault), cudaSuccess);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
}

/* A plan on one rank, and operands of all calls. Two experts per rank. */
struct calls {
    struct prs_fused *ctx;
    struct prs_moe_plan *plan;
    struct prs_moe_batch dispatch, layer, kept;
    struct prs_moe_results combine;
    struct prs_moe_again again;
    struct prs_moe_values values;
    struct prs_moe_activation back;
    struct prs_moe_product multiply;
    uint32_t *count, capacity;
};

static void open_calls(struct calls *x, struct ranks_self *self, uint32_t rank, uint32_t world, uint32_t nodes)
{
    struct prs_moe_shape shape = {.tokens = TOKENS,
                                  .hidden = HIDDEN,
                                  .columns = 2 * INNER,
                                  .experts = 2 * world,
                                  .top_k = TOP,
                                  .activation = PRS_ACTIVATION_SILU,
                                  .gated = 1,
                                  .layer = 1};
    struct prs_moe_tuning tuning = {.rows_per_signal = GROUP, .rows_per_put = 4};
    struct prs_moe_info info;
    cr_assert_eq(ranks_open(self, nodes, 60000, &x->ctx), 0);
    cr_assert_eq(prs_moe_plan_open(x->ctx, &shape, &tuning, &x->plan), 0);
    prs_moe_plan_query(x->plan, &info);
    x->capacity = info.capacity;
    x->count = ranks_device(sizeof(*x->count), 0);
    x->dispatch = (struct prs_moe_batch){.tokens = ranks_device(TOKENS * HIDDEN * 2, 0),
                                         .chosen = ranks_device(CHOICES * sizeof(int64_t), 0),
                                         .router_weights = ranks_device(CHOICES * sizeof(float), 0),
                                         .out = ranks_device((size_t)x->capacity * HIDDEN * 2, 0),
                                         .rows = ranks_device(x->capacity * sizeof(struct prs_moe_row), 0),
                                         .expert_rows = ranks_device(2 * sizeof(struct prs_moe_expert_rows), 0),
                                         .count_on_device = x->count,
                                         .status = ranks_device(sizeof(struct prs_moe_status), 0),
                                         .maps = ranks_device(info.maps_bytes, 0),
                                         .clear_fill = 1};
    x->layer = x->dispatch;
    x->layer.weights = ranks_upload(500 + rank, 2 * HIDDEN * 2 * INNER);
    x->layer.down = ranks_upload(600 + rank, 2 * HIDDEN * INNER);
    x->layer.out = ranks_device(TOKENS * HIDDEN * 2, 0);
    x->layer.maps = NULL;
    x->combine = (struct prs_moe_results){
        .rows = x->dispatch.out, .out = ranks_device(TOKENS * HIDDEN * 2, 0), .maps = x->dispatch.maps};
    x->again = (struct prs_moe_again){.tokens = x->dispatch.tokens,
                                      .out = ranks_device((size_t)x->capacity * HIDDEN * 2, 0),
                                      .beside = x->dispatch.out,
                                      .products = ranks_device(x->capacity * sizeof(float), 0),
                                      .maps = x->dispatch.maps,
                                      .weighted = 1};
    x->values = (struct prs_moe_values){.values = x->again.products,
                                        .rows = x->dispatch.rows,
                                        .out = ranks_device(CHOICES * sizeof(float), 0),
                                        .maps = x->dispatch.maps};
    x->kept = x->layer;
    x->kept.out = ranks_device(TOKENS * HIDDEN * 2, 0);
    x->kept.kept_rows = ranks_device((size_t)x->capacity * HIDDEN * 2, 0);
    x->kept.kept_columns = ranks_device((size_t)x->capacity * 2 * INNER * 2, 0);
    x->back = (struct prs_moe_activation){.columns = x->kept.kept_columns,
                                          .gradients = ranks_upload(700 + rank, (uint64_t)x->capacity * INNER),
                                          .rows = x->kept.rows,
                                          .of_columns = ranks_device((size_t)x->capacity * 2 * INNER * 2, 0),
                                          .weighted = ranks_device((size_t)x->capacity * INNER * 2, 0),
                                          .products = ranks_device(x->capacity * sizeof(float), 0)};
    x->multiply = (struct prs_moe_product){.rows = x->back.of_columns,
                                           .weights = x->layer.weights,
                                           .out = ranks_device((size_t)x->capacity * HIDDEN * 2, 0),
                                           .k = 2 * INNER,
                                           .n = HIDDEN,
                                           .weights_transposed = 1};
}

static void close_calls(struct calls *x)
{
    prs_moe_plan_close(x->plan);
    prs_fused_close(x->ctx);
}

/* ---- inputs ---- */
static uint32_t count_of(uint32_t round, uint32_t rank)
{
    return round % 3 == rank % 3 ? 0 : TOKENS - (round * 7 + rank * 3) % 11;
}

static void set_inputs(const struct calls *x, uint32_t round, uint32_t rank, uint32_t experts)
{
    uint32_t count = count_of(round, rank);
    uint16_t tokens[TOKENS * HIDDEN];
    int64_t chosen[CHOICES];
    float weights[CHOICES];
    for (uint32_t i = 0; i < TOKENS * HIDDEN; i++)
        tokens[i] = ranks_bf16(ranks_element(round * 16 + rank, i));
    for (uint32_t i = 0; i < CHOICES; i++) {
        chosen[i] = (i / TOP * 5 + i % TOP * 3 + round + rank) % experts;
        weights[i] = ranks_element(1000 + round * 16 + rank, i);
    }
    copy(x->dispatch.tokens, tokens, sizeof(tokens));
    copy(x->dispatch.chosen, chosen, sizeof(chosen));
    copy(x->dispatch.router_weights, weights, sizeof(weights));
    copy(x->count, &count, sizeof(count));
}

/* Experts that change nothing: a token's sum is the token times the sum of its weights; and each choice's value is the
 * product of the token with itself. */
static uint32_t wrong_sums(const struct calls *x, uint32_t round, uint32_t rank)
{
    uint16_t sums[TOKENS * HIDDEN] = {0};
    float values[CHOICES] = {0};
    uint32_t wrong = 0;
    copy(sums, x->combine.out, sizeof(sums));
    copy(values, x->values.out, sizeof(values));
    for (uint32_t token = 0; token < count_of(round, rank); token++) {
        double size = 0, weight = 0, own = 0;
        for (uint32_t slot = 0; slot < TOP; slot++) {
            float w = ranks_element(1000 + round * 16 + rank, token * TOP + slot);
            weight += w, size += fabsf(w);
        }
        for (uint32_t c = 0; c < HIDDEN; c++) {
            double v = ranks_element(round * 16 + rank, token * HIDDEN + c);
            wrong += !(fabs(ranks_float(sums[token * HIDDEN + c]) - weight * v) <= size * fabs(v) * 0x1p-6 + 1e-30);
            own += v * v;
        }
        for (uint32_t slot = 0; slot < TOP; slot++)
            wrong += !(fabs(values[token * TOP + slot] - own) <= own * 0x1p-20);
    }
    return wrong;
}

static int launch(const struct calls *x, cudaStream_t stream)
{
    int r = prs_moe_dispatch(x->plan, &x->dispatch, stream);
    if (!r)
        r = prs_moe_combine(x->plan, &x->combine, stream);
    if (!r)
        r = prs_moe_dispatch_again(x->plan, &x->again, stream);
    if (!r)
        r = prs_moe_return_values(x->plan, &x->values, stream);
    if (!r)
        r = prs_moe_layer(x->plan, &x->layer, stream);
    if (!r)
        r = prs_moe_layer(x->plan, &x->kept, stream);
    if (!r)
        r = prs_moe_activation_back(x->plan, &x->back, stream);
    return r != 0 ? r : prs_moe_multiply(x->plan, &x->multiply, stream);
}

/* ---- bad input ---- */
#define REFUSES(call, text)                                                                                            \
    do {                                                                                                               \
        cr_expect_eq(call, -EINVAL, "%s", #call);                                                                      \
        cr_expect_not_null(strstr(prs_fused_error_text(), text), "%s: %s", text, prs_fused_error_text());              \
    } while (0)

static void refuse_batches(const struct calls *x)
{
    struct prs_moe_batch b = x->dispatch;
    b.count_on_device = NULL;
    b.count = TOKENS + 1;
    REFUSES(prs_moe_dispatch(x->plan, &b, NULL), "25 tokens in a MoE plan for at most 24");
    b.count = 1, b.tokens = NULL;
    REFUSES(prs_moe_dispatch(x->plan, &b, NULL), "MoE batch of 1 tokens: tokens (nil)");
    b = x->dispatch, b.out = NULL;
    REFUSES(prs_moe_dispatch(x->plan, &b, NULL), "out (nil): 16-byte aligned, not NULL");
    b = x->dispatch, b.out = (uint8_t *)b.out + 8;
    REFUSES(prs_moe_dispatch(x->plan, &b, NULL), "16-byte aligned, not NULL");
    b = x->dispatch, b.expert_rows = NULL;
    REFUSES(prs_moe_dispatch(x->plan, &b, NULL), "expert_rows NULL: nothing would say where the rows are");
    b = x->dispatch, b.chosen++;
    REFUSES(prs_moe_dispatch(x->plan, &b, NULL), "chosen");
    b = x->dispatch, b.maps = (uint8_t *)b.maps + 16;
    REFUSES(prs_moe_dispatch(x->plan, &b, NULL), "256-byte");
    b = x->dispatch, b.placement = b.maps;
    REFUSES(prs_moe_dispatch(x->plan, &b, NULL), "in a plan with shape.logical_experts 0");
    b = x->layer, b.down = NULL;
    REFUSES(prs_moe_layer(x->plan, &b, NULL), "MoE layer: down (nil)");
    b = x->layer, b.weights = NULL;
    REFUSES(prs_moe_layer(x->plan, &b, NULL), "weights (nil)");
    b = x->layer, b.out = NULL;
    REFUSES(prs_moe_layer(x->plan, &b, NULL), "out (nil)");
    b = x->layer, b.residual = (uint8_t *)b.out + 2;
    REFUSES(prs_moe_layer(x->plan, &b, NULL), "residual");
    b = x->kept, b.kept_rows = NULL;
    REFUSES(prs_moe_layer(x->plan, &b, NULL), "kept_rows (nil)");
    b = x->kept, b.kept_columns = (uint8_t *)b.kept_columns + 8;
    REFUSES(prs_moe_layer(x->plan, &b, NULL), "16-byte aligned, both or neither");
}

static void refuse_results(const struct calls *x)
{
    struct prs_moe_results c = x->combine;
    struct prs_moe_again a = x->again;
    struct prs_moe_values v = x->values;
    struct prs_moe_activation t = x->back;
    struct prs_moe_product m = x->multiply;
    c.rows = NULL;
    REFUSES(prs_moe_combine(x->plan, &c, NULL), "MoE results: rows (nil)");
    c = x->combine, c.out = NULL;
    REFUSES(prs_moe_combine(x->plan, &c, NULL), "out (nil)");
    c = x->combine, c.residual = (uint8_t *)c.out + 2;
    REFUSES(prs_moe_combine(x->plan, &c, NULL), "residual");
    c = x->combine, c.maps = (uint8_t *)(uintptr_t)c.maps + 128;
    REFUSES(prs_moe_combine(x->plan, &c, NULL), "256-byte");
    a.out = NULL;
    REFUSES(prs_moe_dispatch_again(x->plan, &a, NULL), "out (nil)");
    a = x->again, a.products = NULL;
    REFUSES(prs_moe_dispatch_again(x->plan, &a, NULL), "products (nil): both or neither");
    a = x->again, a.maps = (uint8_t *)(uintptr_t)a.maps + 16;
    REFUSES(prs_moe_dispatch_again(x->plan, &a, NULL), "256-byte");
    v.values = NULL;
    REFUSES(prs_moe_return_values(x->plan, &v, NULL), "values (nil)");
    v = x->values, v.rows = NULL;
    REFUSES(prs_moe_return_values(x->plan, &v, NULL), "rows (nil)");
    v = x->values, v.maps = (uint8_t *)(uintptr_t)v.maps + 16;
    REFUSES(prs_moe_return_values(x->plan, &v, NULL), "256-byte");
    t.products = NULL;
    REFUSES(prs_moe_activation_back(x->plan, &t, NULL), "products (nil)");
    t = x->back, t.columns = (uint8_t *)(uintptr_t)t.columns + 2;
    REFUSES(prs_moe_activation_back(x->plan, &t, NULL), "MoE activation: columns");
    t = x->back, t.maps = (uint8_t *)(uintptr_t)x->dispatch.maps + 16;
    REFUSES(prs_moe_activation_back(x->plan, &t, NULL), "256-byte");
    m.weights = NULL;
    REFUSES(prs_moe_multiply(x->plan, &m, NULL), "weights (nil)");
    m = x->multiply, m.n = 12;
    REFUSES(prs_moe_multiply(x->plan, &m, NULL), "columns: both must be multiples of 8");
    m = x->multiply, m.maps = (uint8_t *)(uintptr_t)x->dispatch.maps + 16;
    REFUSES(prs_moe_multiply(x->plan, &m, NULL), "256-byte");
}

static void refuse_plans(const struct calls *x)
{
    struct prs_moe_shape rows = {.tokens = 8, .hidden = 16, .experts = 4, .top_k = 3}, bad = rows;
    struct prs_moe_plan *plan = NULL;
    cr_assert_eq(prs_moe_plan_open(x->ctx, &rows, NULL, &plan), 0);
    REFUSES(prs_moe_layer(plan, &x->layer, NULL), "opened without shape.layer");
    REFUSES(prs_moe_dispatch_gemm(plan, &x->layer, NULL), "a MoE plan without columns");
    REFUSES(prs_moe_activation_back(plan, &x->back, NULL), "an activation in a MoE plan without columns");
    prs_moe_plan_close(plan);
    rows.hidden = 8;
    cr_assert_eq(prs_moe_plan_open(x->ctx, &rows, NULL, &plan), 0);
    REFUSES(prs_moe_return_values(plan, &x->values, NULL), "hidden 8, top 3: hidden must be at least 3 times top");
    prs_moe_plan_close(plan);
    rows.logical_experts = 6, rows.replicas = 2;
    cr_assert_eq(prs_moe_plan_open(x->ctx, &rows, NULL, &plan), 0);
    REFUSES(prs_moe_dispatch(plan, &x->dispatch, NULL), "placement (nil) in a plan with shape.logical_experts 6");
    prs_moe_plan_close(plan);
    rows.replicas = 65;
    REFUSES(prs_moe_plan_open(x->ctx, &rows, NULL, &plan), "a MoE map of 6 experts with 65 places each");
    rows.replicas = 0;
    REFUSES(prs_moe_plan_open(x->ctx, &rows, NULL, &plan), "a MoE map of 6 experts with 0 places each");
    bad.layer = 1;
    REFUSES(prs_moe_plan_open(x->ctx, &bad, NULL, &plan), "a MoE layer without columns");
    bad.columns = 24, bad.gated = 1;
    REFUSES(prs_moe_plan_open(x->ctx, &bad, NULL, &plan), "gated MoE product of 24 columns");
    bad.columns = 32, bad.activation = 9;
    REFUSES(prs_moe_plan_open(x->ctx, &bad, NULL, &plan), "activation 9 is not known");
}

static void refuse_on_rank(uint32_t rank, struct ranks_self *self, void *user)
{
    struct calls x;
    uint32_t *wrong = user;
    open_calls(&x, self, rank, 1, 1);
    refuse_batches(&x);
    refuse_results(&x);
    refuse_plans(&x);
    set_inputs(&x, 1, rank, 2);
    cr_assert_eq(launch(&x, NULL), 0, "%s", prs_fused_error_text());
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    *wrong = wrong_sums(&x, 1, rank);
    close_calls(&x);
}

/* What is refused launches nothing: the next calls are right. */
Test(moe_calls, bad_input_is_refused_by_name, .timeout = 300)
{
    uint32_t wrong = 1;
    hopper_setup(1, 4, 0);
    ranks_run(1, refuse_on_rank, &wrong);
    cr_assert_eq(wrong, 0);
}

static void open_a_smaller_plan(uint32_t rank, struct ranks_self *self, void *user)
{
    struct prs_moe_shape small = {.tokens = 8, .hidden = 16, .experts = 2, .top_k = 1};
    struct prs_moe_plan *plan;
    struct calls x;
    uint32_t *wrong = user;
    open_calls(&x, self, rank, 1, 1);
    cr_assert_eq(prs_moe_plan_open(x.ctx, &small, NULL, &plan), 0);
    set_inputs(&x, 1, rank, 2);
    cr_assert_eq(launch(&x, NULL), 0, "%s", prs_fused_error_text());
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    *wrong = wrong_sums(&x, 1, rank);
    prs_moe_plan_close(plan);
    close_calls(&x);
}

/* Its routing needs less shared memory, whose limit belongs to the kernel. */
Test(moe_calls, a_smaller_plan_leaves_a_larger_one_alone, .timeout = 300)
{
    uint32_t wrong = 1;
    hopper_setup(1, 4, 0);
    ranks_run(1, open_a_smaller_plan, &wrong);
    cr_assert_eq(wrong, 0);
}

/* ---- graphs ---- */
enum { REPLAYS = 6, WORLD = 4 };

static void replay_on_rank(uint32_t rank, struct ranks_self *self, void *user)
{
    uint8_t layer[2][TOKENS * HIDDEN * 2] = {{0}}, kept[2][TOKENS * HIDDEN * 2] = {{0}};
    float products[2][BLOCK] = {{0}};
    uint32_t *wrong = user, all[WORLD];
    struct prs_fused_error error;
    cudaGraphExec_t exec;
    cudaStream_t stream;
    cudaGraph_t graph;
    struct calls x;
    open_calls(&x, self, rank, WORLD, 1);
    (void)cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cr_assert_eq(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    cr_assert_eq(launch(&x, stream), 0);
    cr_assert_eq(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    cr_assert_eq(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    for (uint32_t i = 0; i < REPLAYS; i++) {
        set_inputs(&x, i, rank, 2 * WORLD);
        for (int again = 0; again < 2; again++) { /* the second time without the graph */
            cr_assert_eq(again == 0 ? (int)cudaGraphLaunch(exec, stream) : launch(&x, stream), 0);
            cr_assert_eq(cudaStreamSynchronize(stream), cudaSuccess);
            wrong[rank] += wrong_sums(&x, i, rank);
            copy(layer[again], x.layer.out, sizeof(layer[again]));
            copy(kept[again], x.kept.out, sizeof(kept[again]));
            copy(products[again], x.back.products, sizeof(products[again]));
        }
        wrong[rank] += memcmp(layer[0], layer[1], (size_t)count_of(i, rank) * HIDDEN * 2) != 0;
        wrong[rank] += memcmp(kept[0], kept[1], (size_t)count_of(i, rank) * HIDDEN * 2) != 0;
        wrong[rank] += memcmp(products[0], products[1], sizeof(products[0])) != 0;
        (void)ranks_allgather(self, &rank, all, sizeof(rank));
    }
    cr_assert_eq(prs_fused_poll_error(x.ctx, &error), 0, "%s", error.text);
    close_calls(&x);
}

/* With other tokens, choices and counts in each replay. */
Test(moe_calls, a_graph_of_all_calls_serves_any_inputs, .timeout = 600)
{
    uint32_t wrong[WORLD] = {0};
    hopper_setup(WORLD, 4, 0);
    ranks_run(WORLD, replay_on_rank, wrong);
    for (uint32_t rank = 0; rank < WORLD; rank++)
        cr_assert_eq(wrong[rank], 0, "rank %u: %u wrong (HOPPER_SEED=%llu)", rank, wrong[rank],
                     (unsigned long long)hopper_seed());
}

/* ---- several nodes: the real transport, over any verbs device (softnic in the suite) ---- */
enum { CALLS = 6, ROUND = 3 };

struct counted {
    struct prs_fused_traffic sent[CALLS]; /* of all ranks: dispatch, combine, again, values, layer, kept */
    pthread_mutex_t lock;
    uint32_t wrong;
};

static int call(const struct calls *x, int number)
{
    switch (number) {
    case 0:
        return prs_moe_dispatch(x->plan, &x->dispatch, NULL);
    case 1:
        return prs_moe_combine(x->plan, &x->combine, NULL);
    case 2:
        return prs_moe_dispatch_again(x->plan, &x->again, NULL);
    case 3:
        return prs_moe_return_values(x->plan, &x->values, NULL);
    case 4:
        return prs_moe_layer(x->plan, &x->layer, NULL);
    default:
        return prs_moe_layer(x->plan, &x->kept, NULL);
    }
}

/* The rows of a rank that cross to the other node: one for each token with a choice there. Two ranks of two experts are
 * a node. */
static uint32_t rows_that_cross(uint32_t rank)
{
    uint32_t rows = 0;
    for (uint32_t token = 0; token < count_of(ROUND, rank); token++) {
        bool crosses = false;
        for (uint32_t slot = 0; slot < TOP; slot++)
            crosses = crosses || (token * 5 + slot * 3 + ROUND + rank) % (2 * WORLD) / 4 != rank / 2;
        rows += crosses;
    }
    return rows;
}

/* A signal for each group of rows, there or back, for the routes of each rank of the other node, and for the end. */
static uint64_t signals_of(int number, uint32_t rank)
{
    uint32_t there = (rows_that_cross(rank) + GROUP - 1) / GROUP;
    uint32_t back = (rows_that_cross((rank + WORLD / 2) % WORLD) + GROUP - 1) / GROUP;
    const uint32_t signals[CALLS] = {2 + there + 1,       back + 1, there + 1, back + 1, 2 + there + back + 1,
                                     2 + there + back + 1};
    return signals[number];
}

/* The signal of a launch's end may be counted after the launch has ended. */
static struct prs_fused_traffic traffic_of_call(const struct calls *x, int number, uint32_t rank)
{
    struct prs_fused_traffic before, after;
    prs_fused_traffic(x->ctx, &before);
    cr_assert_eq(call(x, number), 0);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    for (int ms = 0; ms < 10000; ms++) {
        prs_fused_traffic(x->ctx, &after);
        if (after.signals - before.signals >= signals_of(number, rank))
            break;
        usleep(1000);
    }
    cr_expect_eq(after.signals - before.signals, signals_of(number, rank), "call %d, rank %u: %llu", number, rank,
                 (unsigned long long)(after.signals - before.signals));
    return (struct prs_fused_traffic){.puts = after.puts - before.puts,
                                      .signals = after.signals - before.signals,
                                      .fences = after.fences - before.fences,
                                      .bytes = after.bytes - before.bytes};
}

static void count_on_rank(uint32_t rank, struct ranks_self *self, void *user)
{
    struct counted *counted = user;
    struct prs_fused_error error;
    uint32_t all[WORLD];
    struct calls x;
    open_calls(&x, self, rank, WORLD, 2);
    set_inputs(&x, ROUND, rank, 2 * WORLD);
    for (int i = 0; i < CALLS; i++) {
        struct prs_fused_traffic sent = traffic_of_call(&x, i, rank);
        pthread_mutex_lock(&counted->lock);
        counted->sent[i].puts += sent.puts;
        counted->sent[i].signals += sent.signals;
        counted->sent[i].fences += sent.fences;
        counted->sent[i].bytes += sent.bytes;
        pthread_mutex_unlock(&counted->lock);
        (void)ranks_allgather(self, &rank, all, sizeof(rank));
    }
    cr_assert_eq(prs_fused_poll_error(x.ctx, &error), 0, "%s", error.text);
    pthread_mutex_lock(&counted->lock);
    counted->wrong += wrong_sums(&x, ROUND, rank);
    pthread_mutex_unlock(&counted->lock);
    close_calls(&x);
}

/* Under each policy the same puts, signals and bytes. Rows cross once each way, and values as rows of 16 bytes. */
Test(moe_calls_nodes, every_policy_sends_the_same, .timeout = 900)
{
    static const char *const policies[] = {"in_order", "counted", "nic_fence", "drain"};
    struct counted counted[4] = {0};
    uint64_t row_bytes = HIDDEN * 2, rows = 0;
    for (uint32_t rank = 0; rank < WORLD; rank++)
        rows += rows_that_cross(rank);
    ranks_need_a_device();
    hopper_setup(WORLD, 4, 0);
    for (int p = 0; p < 4; p++) {
        pthread_mutex_init(&counted[p].lock, NULL);
        cr_assert_eq(setenv("PERSEUS_ORDER", policies[p], 1), 0);
        ranks_run(WORLD, count_on_rank, &counted[p]);
        cr_assert_eq(counted[p].wrong, 0, "%s: %u wrong", policies[p], counted[p].wrong);
        for (int i = 0; i < CALLS; i++) {
            const struct prs_fused_traffic *s = &counted[p].sent[i], *first = &counted[0].sent[i];
            printf("%s, call %d: %llu rows cross; %llu puts, %llu signals, %llu fences, %llu bytes\n", policies[p], i,
                   (unsigned long long)rows, (unsigned long long)s->puts, (unsigned long long)s->signals,
                   (unsigned long long)s->fences, (unsigned long long)s->bytes);
            cr_expect(s->puts == first->puts && s->signals == first->signals && s->bytes == first->bytes, "%s, call %d",
                      policies[p], i);
            cr_expect_eq(s->fences == 0, p < 2, "%s, call %d: %llu fences", policies[p], i,
                         (unsigned long long)s->fences);
        }
    }
    cr_expect_eq(counted[0].sent[1].bytes, rows * row_bytes);
    cr_expect_eq(counted[0].sent[2].bytes, rows * row_bytes);
    cr_expect_eq(counted[0].sent[3].bytes, rows * 16);
    cr_expect_eq(counted[0].sent[4].bytes, counted[0].sent[0].bytes + rows * row_bytes);
    cr_expect_eq(counted[0].sent[5].bytes, counted[0].sent[4].bytes);
}
