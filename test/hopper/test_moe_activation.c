/* SPDX-License-Identifier: Apache-2.0 */
/* A MoE layer that keeps what gradients need, and the way back through its activation, on emulated GPUs. Every element
 * is compared with the definition in double precision. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "tools/hopper/hopper.h"
#include "test/hopper/ranks.h"

enum { LAUNCHES = 3, BLOCK = 128, ROUTER = 1000, GATE_UP = 2000, DOWN = 2100, GRADIENTS = 3000 };

struct row {
    uint32_t world, tokens, hidden, inner, experts, top_k, activation, gated, n_k;
    uint32_t capacity_of_last; /* 0: room for all rows */
    uint32_t nodes;
    bool own_maps; /* the plan's own, and activation back comes between the layers */
    struct prs_moe_tuning tuning;
};

struct run {
    const struct row *row;
    pthread_mutex_t lock;
    uint64_t rows, fill, wrong;
    int result[RANKS_MAX];
    struct prs_fused_error error[RANKS_MAX];
    char first[200];
};

/* The operands of one launch of each kind. */
struct launch {
    struct prs_moe_batch plain, kept;
    struct prs_moe_activation back;
    struct prs_moe_product again, of_rows;
};

static uint32_t columns_of(const struct row *w)
{
    return w->inner << w->gated;
}

static uint32_t key(uint32_t kind, uint32_t launch, uint32_t rank)
{
    return kind + launch * 16 + rank;
}

static uint32_t count_of(const struct row *w, uint32_t launch, uint32_t rank)
{
    return rank == 1 && launch == 1 ? 0 : w->tokens - rank * 3 - launch;
}

/* No token chooses the last expert; some slots have none. */
static int64_t choice_of(const struct row *w, uint32_t launch, uint32_t rank, uint32_t token, uint32_t slot)
{
    uint32_t x = token * 7 + slot * 3 + launch + rank * 5;
    return x % 11 == 0 ? -1 : (int64_t)(x % (w->experts - 1));
}

static void *download(const void *from, size_t bytes)
{
    void *p = calloc(1, bytes + 16);
    cr_assert_eq(cudaMemcpy(p, from, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
    return p;
}

static void make_launch(const struct row *w, uint32_t rank, uint32_t l, const struct prs_moe_info *info,
                        struct launch *x)
{
    uint32_t count = count_of(w, l, rank), choices = count * w->top_k, local = w->experts / w->world;
    size_t rows = info->capacity, wide = rows * columns_of(w) * 2, narrow = rows * w->inner * 2;
    int64_t *chosen = ranks_device((size_t)choices * sizeof(*chosen), 0xff);
    float *router = ranks_device((size_t)choices * sizeof(*router), 0xff);
    struct prs_moe_row *origins = ranks_device(rows * sizeof(*origins), 0xff);
    for (uint32_t i = 0; i < choices; i++) {
        int64_t choice = choice_of(w, l, rank, i / w->top_k, i % w->top_k);
        float weight = i % 5 == 0 ? 0 : ranks_element(key(ROUTER, l, rank), i);
        (void)cudaMemcpy(&chosen[i], &choice, sizeof(choice), cudaMemcpyHostToDevice);
        (void)cudaMemcpy(&router[i], &weight, sizeof(weight), cudaMemcpyHostToDevice);
    }
    x->plain = (struct prs_moe_batch){
        .tokens = ranks_upload(key(0, l, rank), (uint64_t)count * w->hidden + 8),
        .count = count,
        .chosen = chosen,
        .router_weights = router,
        .weights = ranks_upload(key(GATE_UP, 0, rank), (uint64_t)local * w->hidden * columns_of(w)),
        .down = ranks_upload(key(DOWN, 0, rank), (uint64_t)local * w->hidden * w->inner),
        .out = ranks_device((size_t)count * w->hidden * 2, 0xff)};
    x->kept = x->plain;
    x->kept.out = ranks_device((size_t)count * w->hidden * 2, 0xff);
    x->kept.rows = origins;
    x->kept.expert_rows = ranks_device(local * sizeof(*x->kept.expert_rows), 0xff);
    x->kept.maps = w->own_maps ? NULL : ranks_device(info->maps_bytes, 0xff);
    x->kept.kept_rows = ranks_device(rows * w->hidden * 2, 0xff);
    x->kept.kept_columns = ranks_device(wide, 0xff);
    x->back = (struct prs_moe_activation){.columns = x->kept.kept_columns,
                                          .gradients = ranks_upload(key(GRADIENTS, l, rank), rows * w->inner),
                                          .rows = origins,
                                          .of_columns = ranks_device(wide, 0xff),
                                          .weighted = ranks_device(narrow, 0xff),
                                          .products = ranks_device(rows * sizeof(float), 0xff),
                                          .maps = x->kept.maps};
    x->again = (struct prs_moe_product){.rows = x->kept.kept_rows,
                                        .weights = x->kept.weights,
                                        .out = ranks_device(wide, 0xff),
                                        .k = w->hidden,
                                        .n = columns_of(w),
                                        .weights_transposed = w->n_k,
                                        .maps = x->kept.maps};
    x->of_rows = (struct prs_moe_product){.rows = x->back.of_columns,
                                          .weights = x->kept.weights,
                                          .out = ranks_device(rows * w->hidden * 2, 0xff),
                                          .k = columns_of(w),
                                          .n = w->hidden,
                                          .weights_transposed = !w->n_k,
                                          .maps = x->kept.maps};
}

/* ---- checks ---- */
static void expect(struct run *run, const char *what, uint32_t rank, uint32_t row, uint32_t column, double have,
                   double want, double slack)
{
    if (fabs(have - want) <= slack)
        return;
    pthread_mutex_lock(&run->lock);
    if (run->wrong++ == 0)
        snprintf(run->first, sizeof(run->first), "%s: rank %u row %u column %u: have %g, want %g +- %g", what, rank,
                 row, column, have, want, slack);
    pthread_mutex_unlock(&run->lock);
}

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

/* The activation, and its derivative. */
static double activation(uint32_t kind, double x, double *slope)
{
    double c = sqrt(2 / M_PI), s = sigmoid(x), t = sigmoid(2 * c * (x + 0.044715 * x * x * x));
    switch (kind) {
    case PRS_ACTIVATION_RELU:
        *slope = x > 0;
        return x > 0 ? x : 0;
    case PRS_ACTIVATION_GELU:
        *slope = (1 + erf(x / sqrt(2))) / 2 + x * exp(-x * x / 2) / sqrt(2 * M_PI);
        return x * (1 + erf(x / sqrt(2))) / 2;
    case PRS_ACTIVATION_GELU_TANH:
        *slope = t + x * t * (1 - t) * 2 * c * (1 + 3 * 0.044715 * x * x);
        return x * t;
    case PRS_ACTIVATION_SILU:
        *slope = s + x * s * (1 - s);
        return x * s;
    default:
        *slope = 1;
        return x;
    }
}

/* What a rank's launch has written. */
struct written {
    struct prs_moe_row *origins;
    struct prs_moe_expert_rows *experts;
    uint16_t *rows, *columns, *of_columns, *weighted, *again, *of_rows;
    float *products;
};

/* A row of an expert that has come from a token: as it was sent, and times a column of the expert's first weights. */
static void check_forward(struct run *run, uint32_t rank, uint32_t l, uint32_t expert, uint32_t row,
                          const struct written *x)
{
    const struct row *w = run->row;
    const struct prs_moe_row *o = &x->origins[row];
    uint32_t columns = columns_of(w);
    cr_assert(o->rank < w->world && o->token < count_of(w, l, o->rank) && o->slot < w->top_k);
    for (uint32_t h = 0; h < w->hidden; h++)
        expect(run, "kept row", rank, row, h, ranks_float(x->rows[(uint64_t)row * w->hidden + h]),
               ranks_element(key(0, l, o->rank), (uint64_t)o->token * w->hidden + h), 0);
    for (uint32_t n = row % 5; n < columns; n += 5) {
        double sum = 0, size = 0;
        for (uint32_t h = 0; h < w->hidden; h++) {
            uint64_t at = (uint64_t)expert * w->hidden * columns +
                          (w->n_k ? (uint64_t)n * w->hidden + h : (uint64_t)h * columns + n);
            double term = ranks_element(key(0, l, o->rank), (uint64_t)o->token * w->hidden + h) *
                          ranks_element(key(GATE_UP, 0, rank), at);
            sum += term, size += fabs(term);
        }
        expect(run, "kept column", rank, row, n, ranks_float(x->columns[(uint64_t)row * columns + n]), sum,
               fabs(sum) * 0x1p-8 + size * 0x1p-18);
    }
}

static void check_back(struct run *run, uint32_t rank, uint32_t l, uint32_t row, const struct written *x)
{
    const struct row *w = run->row;
    uint64_t wide = (uint64_t)row * columns_of(w), narrow = (uint64_t)row * w->inner;
    double weight = x->origins[row].weight, sum = 0, size = 0;
    for (uint32_t i = 0; i < w->inner; i++) {
        double u = ranks_element(key(GRADIENTS, l, rank), narrow + i), slope;
        double up = w->gated ? ranks_float(x->columns[wide + w->inner + i]) : 1;
        double active = activation(w->activation, ranks_float(x->columns[wide + i]), &slope);
        double of_gate = weight * u * up * slope, of_up = weight * u * active, h = active * up;
        expect(run, "of gate", rank, row, i, ranks_float(x->of_columns[wide + i]), of_gate,
               fabs(of_gate) * 0x1p-8 + fabs(weight * u * up) * 1e-5);
        if (w->gated)
            expect(run, "of up", rank, row, i, ranks_float(x->of_columns[wide + w->inner + i]), of_up,
                   fabs(of_up) * 0x1p-8 + fabs(weight * u) * 1e-5);
        expect(run, "weighted", rank, row, i, ranks_float(x->weighted[narrow + i]), weight * h,
               fabs(weight * h) * 0x1p-8 + fabs(weight * up) * 1e-5);
        sum += u * h, size += fabs(u * h) + 0.1 * fabs(u * up);
    }
    expect(run, "product", rank, row, 0, x->products[row], sum, size * 1e-5);
}

/* The first product once more, by the same kernel; and the gradients of its result, times its weights transposed. */
static void check_products(struct run *run, uint32_t rank, uint32_t expert, uint32_t row, const struct written *x)
{
    const struct row *w = run->row;
    uint32_t columns = columns_of(w);
    uint64_t wide = (uint64_t)row * columns;
    for (uint32_t n = 0; n < columns; n++)
        expect(run, "once more", rank, row, n, x->again[wide + n], x->columns[wide + n], 0);
    for (uint32_t h = row % 7; h < w->hidden; h += 7) {
        double sum = 0, size = 0;
        for (uint32_t n = 0; n < columns; n++) {
            uint64_t at = (uint64_t)expert * w->hidden * columns +
                          (w->n_k ? (uint64_t)n * w->hidden + h : (uint64_t)h * columns + n);
            double term = ranks_float(x->of_columns[wide + n]) * ranks_element(key(GATE_UP, 0, rank), at);
            sum += term, size += fabs(term);
        }
        expect(run, "of row", rank, row, h, ranks_float(x->of_rows[(uint64_t)row * w->hidden + h]), sum,
               fabs(sum) * 0x1p-8 + size * 0x1p-18);
    }
}

static void check_fill(struct run *run, uint32_t rank, uint32_t row, const struct written *x)
{
    const struct row *w = run->row;
    const uint16_t *zeros[] = {x->rows, x->of_columns, x->weighted};
    const uint32_t columns[] = {w->hidden, columns_of(w), w->inner};
    for (int i = 0; i < 3; i++)
        for (uint32_t c = 0; c < columns[i]; c++)
            expect(run, "fill", rank, row, c, zeros[i][(uint64_t)row * columns[i] + c], 0, 0);
}

/* The layer that keeps rounds once more, before the activation. */
static void check_results(struct run *run, uint32_t rank, uint32_t l, const struct launch *x)
{
    uint64_t elements = (uint64_t)count_of(run->row, l, rank) * run->row->hidden;
    uint16_t *plain = download(x->plain.out, elements * 2), *kept = download(x->kept.out, elements * 2);
    double square = 0;
    for (uint64_t i = 0; i < elements; i++)
        square += ranks_float(plain[i]) * ranks_float(plain[i]);
    for (uint64_t i = 0; i < elements; i++)
        expect(run, "result", rank, (uint32_t)(i / run->row->hidden), (uint32_t)(i % run->row->hidden),
               ranks_float(kept[i]), ranks_float(plain[i]),
               0.05 * sqrt(square / elements) + fabs(ranks_float(plain[i])) * 0x1p-6);
    cr_assert(elements == 0 || square > 0);
    free(plain);
    free(kept);
}

static void check_launch(struct run *run, uint32_t rank, uint32_t l, const struct prs_moe_info *info,
                         const struct launch *x)
{
    const struct row *w = run->row;
    size_t rows = info->capacity, wide = rows * columns_of(w) * 2;
    uint32_t local = w->experts / w->world;
    struct written found = {download(x->kept.rows, rows * sizeof(*found.origins)),
                            download(x->kept.expert_rows, local * sizeof(*found.experts)),
                            download(x->kept.kept_rows, rows * w->hidden * 2),
                            download(x->kept.kept_columns, wide),
                            download(x->back.of_columns, wide),
                            download(x->back.weighted, rows * w->inner * 2),
                            download(x->again.out, wide),
                            download(x->of_rows.out, rows * w->hidden * 2),
                            download(x->back.products, rows * sizeof(float))};
    uint64_t real = 0, fill = 0;
    for (uint32_t e = 0; e < local; e++)
        for (uint32_t i = 0; i < (found.experts[e].rows + BLOCK - 1) / BLOCK * BLOCK; i++) {
            uint32_t row = found.experts[e].first_row + i;
            if (i >= found.experts[e].rows) {
                check_fill(run, rank, row, &found);
                fill++;
                continue;
            }
            check_forward(run, rank, l, e, row, &found);
            check_back(run, rank, l, row, &found);
            check_products(run, rank, e, row, &found);
            real++;
        }
    check_results(run, rank, l, x);
    pthread_mutex_lock(&run->lock);
    run->rows += real, run->fill += fill;
    pthread_mutex_unlock(&run->lock);
    free(found.origins);
    free(found.experts);
    free(found.rows);
    free(found.columns);
    free(found.of_columns);
    free(found.weighted);
    free(found.again);
    free(found.of_rows);
    free(found.products);
}

/* ---- ranks ---- */
static int go_back(struct prs_moe_plan *plan, const struct launch *x, cudaStream_t stream)
{
    int r = prs_moe_multiply(plan, &x->again, stream);
    if (!r)
        r = prs_moe_activation_back(plan, &x->back, stream);
    return r != 0 ? r : prs_moe_multiply(plan, &x->of_rows, stream);
}

/* Layers that keep and layers that do not take turns; all is enqueued before anything is waited for. */
static int launch_all(struct run *run, uint32_t rank, struct prs_moe_plan *plan, struct prs_fused *ctx)
{
    const struct row *w = run->row;
    struct launch x[LAUNCHES];
    struct prs_moe_info info;
    cudaStream_t stream;
    int r = 0;
    prs_moe_plan_query(plan, &info);
    (void)cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    for (uint32_t l = 0; l < LAUNCHES; l++)
        make_launch(w, rank, l, &info, &x[l]);
    (void)cudaDeviceSynchronize();
    for (uint32_t l = 0; l < LAUNCHES && r == 0; l++) {
        r = prs_moe_layer(plan, &x[l].kept, stream);
        if (r == 0 && w->own_maps)
            r = go_back(plan, &x[l], stream);
        if (r == 0)
            r = prs_moe_layer(plan, &x[l].plain, stream);
    }
    for (uint32_t l = LAUNCHES; !w->own_maps && l-- > 0 && r == 0;)
        r = go_back(plan, &x[l], stream);
    (void)cudaStreamSynchronize(stream);
    (void)prs_fused_poll_error(ctx, &run->error[rank]);
    for (uint32_t l = 0; l < LAUNCHES && r == 0 && run->error[rank].code == 0; l++)
        check_launch(run, rank, l, &info, &x[l]);
    return r;
}

static void rank_body(uint32_t rank, struct ranks_self *self, void *user)
{
    struct run *run = user;
    const struct row *w = run->row;
    struct prs_moe_shape shape = {.tokens = w->tokens,
                                  .hidden = w->hidden,
                                  .columns = columns_of(w),
                                  .experts = w->experts,
                                  .top_k = w->top_k,
                                  .capacity = rank == w->world - 1 ? w->capacity_of_last : 0,
                                  .weights_transposed = w->n_k,
                                  .activation = w->activation,
                                  .gated = w->gated,
                                  .layer = 1};
    struct prs_fused *ctx = NULL;
    struct prs_moe_plan *plan = NULL;
    int r = ranks_open(self, w->nodes == 0 ? 1 : w->nodes, 60000, &ctx);
    if (!r)
        r = prs_moe_plan_open(ctx, &shape, &w->tuning, &plan);
    if (!r)
        r = launch_all(run, rank, plan, ctx);
    prs_moe_plan_close(plan);
    prs_fused_close(ctx);
    run->result[rank] = r;
}

static void assert_right(const struct row *rows, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        struct run run = {.row = &rows[i]};
        pthread_mutex_init(&run.lock, NULL);
        hopper_setup(RANKS_MAX, 4, 0);
        ranks_run(rows[i].world, rank_body, &run);
        for (uint32_t r = 0; r < rows[i].world; r++)
            cr_assert(run.result[r] == 0 && run.error[r].code == 0, "row %zu: rank %u: %d, %s (HOPPER_SEED=%llu)", i, r,
                      run.result[r], run.error[r].text, (unsigned long long)hopper_seed());
        cr_assert_eq(run.wrong, 0, "row %zu: %llu wrong in %llu rows, first: %s (HOPPER_SEED=%llu)", i,
                     (unsigned long long)run.wrong, (unsigned long long)run.rows, run.first,
                     (unsigned long long)hopper_seed());
        cr_assert(run.rows > 0 && run.fill > 0);
    }
}

Test(moe_activation, a_layer_keeps_what_gradients_need_and_goes_back, .timeout = 600)
{
    static const struct row rows[] = {
        {1, 60, 72, 40, 4, 3, PRS_ACTIVATION_SILU, .gated = 1, .n_k = 1},
        {2, 60, 136, 264, 8, 3, PRS_ACTIVATION_SILU, .gated = 1},
        {4, 40, 72, 64, 8, 2, PRS_ACTIVATION_GELU, .gated = 1, .n_k = 1, .own_maps = true},
        {2, 150, 72, 80, 4, 2, PRS_ACTIVATION_GELU_TANH, .own_maps = true},
        {3, 24, 72, 24, 6, 2, PRS_ACTIVATION_RELU, .n_k = 1, .tuning = {.ctas = 1, .cluster = 1, .route_ctas = 1}},
        {2, 24, 72, 48, 4, 2, PRS_ACTIVATION_NONE, .gated = 1},
    };
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* Every access checked for its order (memory_order.py). */
Test(moe_activation_order, of_a_layer_and_its_gradients, .timeout = 600)
{
    static const struct row rows[] = {{2, 20, 72, 40, 4, 3, PRS_ACTIVATION_SILU, .gated = 1}};
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* What was dropped has no row, there or back. */
Test(moe_activation, rows_without_room_are_left_out, .timeout = 600)
{
    static const struct row rows[] = {{2, 150, 72, 64, 4, 2, PRS_ACTIVATION_SILU, .gated = 1, .capacity_of_last = 128}};
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* ---- several nodes: the real transport, over any verbs device (softnic in the suite) ---- */
Test(moe_activation_nodes, a_layer_keeps_rows_of_other_nodes, .timeout = 900)
{
    static const struct row rows[] = {
        {4, 40, 72, 64, 8, 3, PRS_ACTIVATION_SILU, .gated = 1, .nodes = 2},
        {2, 60, 136, 48, 4, 2, PRS_ACTIVATION_SILU, .gated = 1, .n_k = 1, .nodes = 2,
         .tuning = {.rows_per_signal = 8, .rows_per_put = 4, .passes = 2}},
    };
    ranks_need_a_device();
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}
