/* SPDX-License-Identifier: Apache-2.0 */
/* What gradients need of MoE, on emulated GPUs: dispatch along earlier maps, and values of rows that come back to their
 * tokens. Every row and every value is compared with the definition. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/hopper/hopper.h"
#include "test/hopper/ranks.h"

enum { MAX_LAUNCHES = 24, TOKENS = 1000, GRADIENTS = 2000, RESULTS = 3000 };

/* How tokens choose experts. */
enum mode { EVEN, ONE_EXPERT, ANY };

struct row {
    uint32_t world, tokens, hidden, experts, top_k, launches;
    enum mode mode;
    uint32_t capacity_of_last; /* 0: room for all rows */
    uint32_t nodes;
    bool kept_maps, layer; /* kept_maps: all dispatches come first */
    struct prs_moe_tuning tuning;
};

struct run {
    const struct row *row;
    pthread_mutex_t lock;
    uint64_t rows, values, wrong;
    int result[RANKS_MAX];
    struct prs_fused_error error[RANKS_MAX];
    float *expected[RANKS_MAX][MAX_LAUNCHES]; /* [token][slot]: written by the owners of the rows */
    char first[200];
};

static uint32_t count_of(const struct row *w, uint32_t launch, uint32_t rank)
{
    return rank == launch % w->world ? 0 : ranks_mix(launch, rank, 22) % w->tokens + 1;
}

static int64_t choice_of(const struct row *w, uint32_t launch, uint32_t rank, uint32_t token, uint32_t slot)
{
    uint32_t x = ranks_mix(launch, rank * 5000 + token, 17) / 4;
    if (w->mode == ONE_EXPERT)
        return slot == 0 ? 1 : -1;
    if (w->mode == ANY) /* an expert may come several times */
        return (int64_t)(ranks_mix(x, slot, 3) % (w->experts + 1)) - 1;
    return (x + slot * (w->experts / w->top_k)) % w->experts;
}

static uint32_t key(uint32_t kind, uint32_t launch, uint32_t rank)
{
    return kind + launch * 16 + rank;
}

static void *download(const void *from, size_t bytes)
{
    void *p = calloc(1, bytes + 16);
    cr_assert_eq(cudaMemcpy(p, from, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
    return p;
}

/* One dispatch, and what follows it. */
struct launch {
    struct prs_moe_batch batch;
    struct prs_moe_again weighted, plain;
    struct prs_moe_values values;
};

static void make_launch(const struct row *w, uint32_t rank, uint32_t l, const struct prs_moe_info *info,
                        struct launch *x)
{
    uint32_t count = count_of(w, l, rank), choices = count * w->top_k;
    uint64_t row_bytes = (uint64_t)info->capacity * w->hidden * 2;
    int64_t *chosen = ranks_device((size_t)choices * sizeof(*chosen), 0);
    float *router = ranks_device((size_t)choices * sizeof(*router), 0);
    void *maps = w->kept_maps ? ranks_device(info->maps_bytes, 0xee) : NULL;
    struct prs_moe_row *rows = ranks_device(info->capacity * sizeof(*rows), 0xee);
    for (uint32_t i = 0; i < choices; i++) {
        int64_t choice = choice_of(w, l, rank, i / w->top_k, i % w->top_k);
        float weight = ranks_element(key(7000, l, rank), i);
        (void)cudaMemcpy(&chosen[i], &choice, sizeof(choice), cudaMemcpyHostToDevice);
        (void)cudaMemcpy(&router[i], &weight, sizeof(weight), cudaMemcpyHostToDevice);
    }
    x->batch =
        (struct prs_moe_batch){.tokens = ranks_upload(key(TOKENS, l, rank), (uint64_t)count * w->hidden + 8),
                               .count = count,
                               .chosen = chosen,
                               .router_weights = router,
                               .out = ranks_device(row_bytes, 0xff),
                               .rows = rows,
                               .expert_rows = ranks_device(w->experts / w->world * sizeof(*x->batch.expert_rows), 0),
                               .status = ranks_device(sizeof(*x->batch.status), 0),
                               .maps = maps,
                               .clear_fill = 1};
    x->weighted =
        (struct prs_moe_again){.tokens = ranks_upload(key(GRADIENTS, l, rank), (uint64_t)count * w->hidden + 8),
                               .out = ranks_device(row_bytes, 0xff),
                               .beside = ranks_upload(key(RESULTS, l, rank), (uint64_t)info->capacity * w->hidden),
                               .products = ranks_device(info->capacity * sizeof(float), 0xff),
                               .maps = maps,
                               .weighted = 1,
                               .clear_fill = 1};
    x->plain = (struct prs_moe_again){
        .tokens = count == 0 ? NULL : x->weighted.tokens, .out = ranks_device(row_bytes, 0xff), .maps = maps};
    x->values = (struct prs_moe_values){.values = x->weighted.products,
                                        .rows = rows,
                                        .out = count == 0 ? NULL : ranks_device((size_t)choices * sizeof(float), 0xff),
                                        .maps = maps};
}

static int gradients(struct prs_moe_plan *plan, const struct launch *x, cudaStream_t stream)
{
    int r = prs_moe_dispatch_again(plan, &x->weighted, stream);
    if (!r)
        r = prs_moe_return_values(plan, &x->values, stream);
    return r != 0 ? r : prs_moe_dispatch_again(plan, &x->plain, stream);
}

/* ---- checks ---- */
static void note(struct run *run, uint64_t *wrong, const char *what, uint32_t rank, uint32_t l, uint32_t row,
                 double have, double want)
{
    pthread_mutex_lock(&run->lock);
    if (run->wrong + *wrong == 0)
        snprintf(run->first, sizeof(run->first), "%s: rank %u launch %u row %u: have %g, want %g", what, rank, l, row,
                 have, want);
    pthread_mutex_unlock(&run->lock);
    ++*wrong;
}

/* Compares a row of all three results with its token; returns the product of its token's gradient with `beside`. */
static void check_row(struct run *run, uint64_t *wrong, uint32_t rank, uint32_t l, uint32_t row,
                      const struct prs_moe_row *o, uint16_t *const *have, float product)
{
    const struct row *w = run->row;
    double sum = 0, size = 0;
    for (uint32_t c = 0; c < w->hidden; c++) {
        uint64_t in = (uint64_t)o->token * w->hidden + c, at = (uint64_t)row * w->hidden + c;
        float token = ranks_element(key(TOKENS, l, o->rank), in), g = ranks_element(key(GRADIENTS, l, o->rank), in);
        double term = (double)g * ranks_element(key(RESULTS, l, rank), at);
        if (ranks_float(have[0][at]) != token)
            note(run, wrong, "dispatched", rank, l, row, ranks_float(have[0][at]), token);
        if (have[1][at] != ranks_bf16(g * o->weight))
            note(run, wrong, "weighted", rank, l, row, ranks_float(have[1][at]), g * o->weight);
        if (ranks_float(have[2][at]) != g)
            note(run, wrong, "plain", rank, l, row, ranks_float(have[2][at]), g);
        sum += term, size += fabs(term);
    }
    if (!(fabs(product - sum) <= size * 0x1p-20 + 1e-30))
        note(run, wrong, "product", rank, l, row, product, sum);
}

/* Rows that only fill up are zeros where that was asked for. */
static void check_fill(struct run *run, uint64_t *wrong, uint32_t rank, uint32_t l, uint32_t row, uint16_t *const *have)
{
    const struct row *w = run->row;
    for (uint64_t at = (uint64_t)row * w->hidden; at < (uint64_t)(row + 1) * w->hidden; at++)
        if (have[0][at] != 0 || have[1][at] != 0)
            note(run, wrong, "fill", rank, l, row, ranks_float(have[0][at]), 0);
}

static void check_rows(struct run *run, uint32_t rank, uint32_t l, const struct prs_moe_info *info,
                       const struct launch *x)
{
    const struct row *w = run->row;
    size_t bytes = (size_t)info->capacity * w->hidden * 2;
    uint32_t local = w->experts / w->world;
    struct prs_moe_row *origins = download(x->batch.rows, info->capacity * sizeof(*origins));
    struct prs_moe_expert_rows *experts = download(x->batch.expert_rows, local * sizeof(*experts));
    float *products = download(x->weighted.products, info->capacity * sizeof(*products));
    uint16_t *have[3] = {download(x->batch.out, bytes), download(x->weighted.out, bytes),
                         download(x->plain.out, bytes)};
    uint64_t rows = 0, wrong = 0;
    for (uint32_t e = 0; e < local; e++)
        for (uint32_t i = 0; i < (experts[e].rows + 127) / 128 * 128; i++) {
            uint32_t row = experts[e].first_row + i;
            const struct prs_moe_row *o = &origins[row];
            if (i >= experts[e].rows) {
                check_fill(run, &wrong, rank, l, row, have);
                continue;
            }
            cr_assert(o->rank < w->world && o->token < count_of(w, l, o->rank) && o->slot < w->top_k);
            cr_assert_eq(choice_of(w, l, o->rank, o->token, o->slot), rank * local + e);
            check_row(run, &wrong, rank, l, row, o, have, products[row]);
            run->expected[o->rank][l][o->token * w->top_k + o->slot] = products[row];
            rows++;
        }
    pthread_mutex_lock(&run->lock);
    run->rows += rows, run->wrong += wrong;
    pthread_mutex_unlock(&run->lock);
    free(origins);
    free(experts);
    free(products);
    for (int i = 0; i < 3; i++)
        free(have[i]);
}

/* Bit by bit what the owners of the rows had. */
static void check_values(struct run *run, uint32_t rank, uint32_t l, const struct launch *x)
{
    uint32_t choices = count_of(run->row, l, rank) * run->row->top_k;
    float *have = choices == 0 ? NULL : download(x->values.out, choices * sizeof(*have));
    uint64_t wrong = 0;
    for (uint32_t i = 0; i < choices; i++)
        if (memcmp(&have[i], &run->expected[rank][l][i], sizeof(*have)) != 0)
            note(run, &wrong, "value", rank, l, i, have[i], run->expected[rank][l][i]);
    pthread_mutex_lock(&run->lock);
    run->values += choices, run->wrong += wrong;
    pthread_mutex_unlock(&run->lock);
    free(have);
}

/* ---- ranks ---- */
/* Enqueues all launches before it waits for any. */
static int launch_all(struct run *run, uint32_t rank, struct ranks_self *self, struct prs_moe_plan *plan,
                      struct prs_fused *ctx)
{
    const struct row *w = run->row;
    struct launch x[MAX_LAUNCHES];
    struct prs_moe_info info;
    uint32_t all[RANKS_MAX];
    cudaStream_t stream;
    int r = 0;
    prs_moe_plan_query(plan, &info);
    (void)cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    for (uint32_t l = 0; l < w->launches; l++)
        make_launch(w, rank, l, &info, &x[l]);
    (void)cudaDeviceSynchronize();
    for (uint32_t l = 0; l < w->launches && r == 0; l++) {
        r = prs_moe_dispatch(plan, &x[l].batch, stream);
        if (r == 0 && !w->kept_maps)
            r = gradients(plan, &x[l], stream);
    }
    for (uint32_t l = w->launches; w->kept_maps && l-- > 0 && r == 0;)
        r = gradients(plan, &x[l], stream);
    (void)cudaStreamSynchronize(stream);
    (void)prs_fused_poll_error(ctx, &run->error[rank]);
    for (uint32_t l = 0; l < w->launches && r == 0 && run->error[rank].code == 0; l++)
        check_rows(run, rank, l, &info, &x[l]);
    (void)ranks_allgather(self, &rank, all, sizeof(rank));
    for (uint32_t l = 0; l < w->launches && r == 0 && run->error[rank].code == 0; l++)
        check_values(run, rank, l, &x[l]);
    return r;
}

static void rank_body(uint32_t rank, struct ranks_self *self, void *user)
{
    struct run *run = user;
    const struct row *w = run->row;
    struct prs_moe_shape shape = {.tokens = w->tokens,
                                  .hidden = w->hidden,
                                  .columns = w->layer ? 64 : 0,
                                  .experts = w->experts,
                                  .top_k = w->top_k,
                                  .layer = w->layer};
    struct prs_fused *ctx = NULL;
    struct prs_moe_plan *plan = NULL;
    int r;
    if (rank == w->world - 1)
        shape.capacity = w->capacity_of_last;
    r = ranks_open(self, w->nodes == 0 ? 1 : w->nodes, 60000, &ctx);
    if (!r)
        r = prs_moe_plan_open(ctx, &shape, &w->tuning, &plan);
    if (!r)
        r = launch_all(run, rank, self, plan, ctx);
    prs_moe_plan_close(plan);
    prs_fused_close(ctx);
    run->result[rank] = r;
}

static void assert_right(const struct row *rows, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        struct run run = {.row = &rows[i]};
        pthread_mutex_init(&run.lock, NULL);
        for (uint32_t r = 0; r < rows[i].world; r++)
            for (uint32_t l = 0; l < rows[i].launches; l++)
                run.expected[r][l] = calloc((size_t)rows[i].tokens * rows[i].top_k, sizeof(float));
        hopper_setup(RANKS_MAX, 4, 0);
        ranks_run(rows[i].world, rank_body, &run);
        for (uint32_t r = 0; r < rows[i].world; r++) {
            cr_assert(run.result[r] == 0 && run.error[r].code == 0, "row %zu: rank %u: %d, %s (HOPPER_SEED=%llu)", i, r,
                      run.result[r], run.error[r].text, (unsigned long long)hopper_seed());
            for (uint32_t l = 0; l < rows[i].launches; l++)
                free(run.expected[r][l]);
        }
        cr_assert_eq(run.wrong, 0, "row %zu: %llu wrong of %llu rows and %llu values, first: %s (HOPPER_SEED=%llu)", i,
                     (unsigned long long)run.wrong, (unsigned long long)run.rows, (unsigned long long)run.values,
                     run.first, (unsigned long long)hopper_seed());
        cr_assert(run.rows > 0 && run.values >= run.rows);
        cr_assert(rows[i].capacity_of_last == 0 || run.values > run.rows);
    }
}

Test(moe_gradients, rows_are_weighted_and_their_products_come_back, .timeout = 600)
{
    static const struct row rows[] = {
        {2, 60, 136, 8, 3, 3, EVEN},
        {4, 40, 72, 8, 4, 4, ANY},
        {3, 20, 264, 6, 2, 2, EVEN, .layer = true},
        {8, 12, 72, 16, 8, 2, EVEN},
    };
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* Every access checked for its order (memory_order.py). */
Test(moe_gradients_order, of_rows_and_values_that_come_back, .timeout = 600)
{
    static const struct row rows[] = {{2, 20, 72, 4, 2, 3, EVEN}};
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* As layers of a model do in training: all forward, then all back. */
Test(moe_gradients, maps_that_are_kept_serve_gradients, .timeout = 600)
{
    static const struct row rows[] = {
        {2, 40, 72, 8, 3, 6, ANY, .kept_maps = true},
        {4, 30, 136, 8, 4, 4, EVEN, .kept_maps = true, .layer = true},
    };
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* An expert that a token has chosen twice, experts without rows; one SM works for each rank. */
Test(moe_gradients, many_launches_of_any_choices_are_right, .timeout = 600)
{
    static const struct row rows[] = {
        {2, 24, 72, 4, 3, MAX_LAUNCHES, ANY},
        {4, 16, 72, 8, 2, MAX_LAUNCHES, ANY, .kept_maps = true},
        {3, 20, 72, 6, 2, 8, ANY, .tuning = {.ctas = 1, .cluster = 1, .route_ctas = 1}},
        {4, 60, 72, 8, 2, 3, ONE_EXPERT},
    };
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

Test(moe_gradients, a_choice_without_room_gets_no_value, .timeout = 600)
{
    static const struct row rows[] = {{2, 150, 72, 4, 2, 3, EVEN, .capacity_of_last = 128}};
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* ---- several nodes: the real transport, over any verbs device (softnic in the suite) ---- */
Test(moe_gradients_nodes, rows_and_values_cross_between_nodes, .timeout = 900)
{
    static const struct row rows[] = {
        {2, 60, 72, 4, 2, 4, ANY, .nodes = 2},
        {4, 40, 136, 8, 4, 4, ANY, .nodes = 2, .tuning = {.rows_per_signal = 8, .rows_per_put = 4}},
        {6, 20, 72, 12, 4, 3, EVEN, .nodes = 3, .kept_maps = true,
         .tuning = {.rows_per_signal = 16, .rows_per_put = 4}},
        {4, 24, 72, 8, 3, 4, ANY, .nodes = 2, .layer = true, .kept_maps = true},
    };
    ranks_need_a_device();
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}
