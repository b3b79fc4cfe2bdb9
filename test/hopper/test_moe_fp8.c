/* SPDX-License-Identifier: Apache-2.0 */
/* MoE in e4m3 on emulated GPUs: rows that travel with their scales, products with scales of blocks, the whole layer,
 * and what is refused. References are in double precision, of the quantised operands. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/hopper/hopper.h"
#include "test/hopper/ranks.h"

enum { LAUNCHES = 3, BLOCK = 128, MOST = 1152 };
enum { ROUTER = 1000, GATE_UP = 2000, DOWN = 2100, SCALES = 3000, RESIDUAL = 4000 };

struct row {
    uint32_t world, tokens, hidden, inner, experts, top_k, activation, gated, nodes, apart; /* see check_layer() */
    bool quantised; /* the caller's tokens have scales */
    bool parts;     /* dispatch, and dispatch with a product, in place of the layer */
    bool replayed;  /* from a graph, with the number of tokens on the device */
    bool odd;       /* among the caller's tokens are infinities and not-a-numbers */
    struct prs_moe_tuning tuning;
};

struct run {
    const struct row *row;
    pthread_mutex_t lock;
    uint64_t checked, wrong;
    int result[RANKS_MAX];
    struct prs_fused_error error[RANKS_MAX];
    char first[200];
};

struct launch {
    struct prs_moe_batch batch, rows; /* rows: of the dispatch alone */
    uint32_t *count;
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

static float router_of(const struct row *w, uint32_t launch, uint32_t rank, uint32_t token, uint32_t slot)
{
    return ranks_element(key(ROUTER, launch, rank), (uint64_t)token * w->top_k + slot);
}

/* Of 128 x 128 weights, or of 128 columns of a token. */
static float scale_of(uint32_t kind, uint64_t at)
{
    return 1 + 0.75f * ranks_element_of(PRS_DTYPE_FP32, SCALES + kind, at);
}

static double weight_of(uint32_t kind, uint32_t rank, uint64_t at)
{
    return ranks_element_of(PRS_DTYPE_E4M3, key(kind, 0, rank), at);
}

/* ---- numbers that are quantised: as fused/core/quantise.cuh defines it ---- */
static float scale_of_largest(float most)
{
    return fmaxf(most / 448, 0x1p-126f);
}

/* The bf16 tokens have blocks of zeros, and blocks of any size. */
static float token_of(const struct row *w, uint32_t launch, uint32_t rank, uint32_t token, uint32_t h)
{
    float x = ranks_element(key(0, launch, rank), (uint64_t)token * w->hidden + h);
    uint32_t block = token + h / BLOCK;
    if (w->odd && (token * w->hidden + h) % 391 == 0)
        return h % 2 == 0 ? -INFINITY : NAN;
    return block % 7 == 0 ? 0 : ranks_float(ranks_bf16(ldexpf(x, (int)(block % 5) - 2)));
}

/* A token as it travels: numbers and scales. */
struct scaled_row {
    uint8_t bits[MOST];
    float scale[MOST / BLOCK];
};

static void scaled_token(const struct row *w, uint32_t launch, uint32_t rank, uint32_t token, struct scaled_row *to)
{
    for (uint32_t b = 0; b < w->hidden / BLOCK; b++) {
        float most = 0;
        uint64_t at = (uint64_t)token * w->hidden + b * BLOCK;
        for (uint32_t i = 0; i < BLOCK && !w->quantised; i++)
            most = fmaxf(most, fabsf(token_of(w, launch, rank, token, b * BLOCK + i)));
        to->scale[b] = w->quantised ? scale_of(key(0, launch, rank), at / BLOCK) : scale_of_largest(most);
        for (uint32_t i = 0; i < BLOCK; i++)
            to->bits[b * BLOCK + i] = (uint8_t)ranks_bits(
                PRS_DTYPE_E4M3, w->quantised ? ranks_element_of(PRS_DTYPE_E4M3, key(0, launch, rank), at + i)
                                             : token_of(w, launch, rank, token, b * BLOCK + i) * (1 / to->scale[b]));
    }
}

/* ---- operands ---- */
static void *scales_on_device(uint32_t kind, uint64_t count)
{
    float *p = ranks_device(count * sizeof(float), 0xff);
    for (uint64_t i = 0; i < count; i++) {
        float x = scale_of(kind, i);
        (void)cudaMemcpy(p + i, &x, sizeof(x), cudaMemcpyHostToDevice);
    }
    return p;
}

static void *tokens_on_device(const struct row *w, uint32_t launch, uint32_t rank)
{
    uint32_t count = count_of(w, launch, rank);
    uint16_t *p = ranks_device((size_t)count * w->hidden * 2 + 16, 0xff);
    if (w->quantised)
        return ranks_upload_of(PRS_DTYPE_E4M3, key(0, launch, rank), (uint64_t)count * w->hidden + 16);
    for (uint32_t i = 0; i < count * w->hidden; i++) {
        uint16_t x = ranks_bf16(token_of(w, launch, rank, i / w->hidden, i % w->hidden));
        (void)cudaMemcpy(p + i, &x, sizeof(x), cudaMemcpyHostToDevice);
    }
    return p;
}

static void make_launch(const struct row *w, uint32_t rank, uint32_t l, const struct prs_moe_info *info,
                        struct launch *x)
{
    uint32_t count = count_of(w, l, rank), choices = count * w->top_k, local = w->experts / w->world;
    uint64_t elements = (uint64_t)local * w->hidden * w->inner;
    int64_t *chosen = ranks_device((size_t)choices * sizeof(*chosen) + 16, 0xff);
    float *router = ranks_device((size_t)choices * sizeof(*router) + 16, 0xff);
    for (uint32_t i = 0; i < choices; i++) {
        int64_t choice = choice_of(w, l, rank, i / w->top_k, i % w->top_k);
        float weight = router_of(w, l, rank, i / w->top_k, i % w->top_k);
        (void)cudaMemcpy(&chosen[i], &choice, sizeof(choice), cudaMemcpyHostToDevice);
        (void)cudaMemcpy(&router[i], &weight, sizeof(weight), cudaMemcpyHostToDevice);
    }
    x->count = ranks_device(sizeof(count), 0);
    (void)cudaMemcpy(x->count, &count, sizeof(count), cudaMemcpyHostToDevice);
    x->batch = (struct prs_moe_batch){
        .tokens = tokens_on_device(w, l, rank),
        .count = w->replayed ? 0 : count,
        .count_on_device = w->replayed ? x->count : NULL,
        .chosen = chosen,
        .router_weights = router,
        .token_scales =
            w->quantised ? scales_on_device(key(0, l, rank), (uint64_t)count * w->hidden / BLOCK + 1) : NULL,
        .weights = ranks_upload_of(PRS_DTYPE_E4M3, key(GATE_UP, 0, rank), elements << w->gated),
        .weight_scales = scales_on_device(key(GATE_UP, 0, rank), (elements << w->gated) / BLOCK / BLOCK),
        .residual = w->parts ? NULL : ranks_upload(key(RESIDUAL, l, rank), (uint64_t)count * w->hidden + 8),
        .out =
            ranks_device(w->parts ? (size_t)info->capacity * w->inner * 2 : (size_t)count * w->hidden * 2 + 16, 0xff)};
    if (w->tuning.path != PRS_MOE_PATH_ONE) { /* with them the layer is several kernels */
        x->batch.rows = ranks_device(info->capacity * sizeof(struct prs_moe_row), 0xff);
        x->batch.expert_rows = ranks_device(local * sizeof(struct prs_moe_expert_rows), 0xff);
    }
    if (!w->parts) {
        x->batch.down = ranks_upload_of(PRS_DTYPE_E4M3, key(DOWN, 0, rank), elements);
        x->batch.down_scales = scales_on_device(key(DOWN, 0, rank), elements / BLOCK / BLOCK);
    }
    x->rows = x->batch;
    x->rows.out = ranks_device((size_t)info->capacity * info->row_bytes, 0xff);
    x->rows.clear_fill = l == 0;
}

/* ---- references ---- */
struct estimate {
    double value, bound;
};

static void expect(struct run *run, const char *what, uint32_t rank, uint32_t row, uint32_t column, double have,
                   struct estimate want)
{
    bool good = have == want.value || fabs(have - want.value) <= want.bound; /* equal: also infinities */
    pthread_mutex_lock(&run->lock);
    run->checked++;
    if (!good && run->wrong++ == 0)
        (void)snprintf(run->first, sizeof(run->first), "%s: rank %u row %u column %u: have %g, want %g +- %g", what,
                       rank, row, column, have, want.value, want.bound);
    pthread_mutex_unlock(&run->lock);
}

/* The sum of a row and a row of weights [n, k], promoted every 128 of k: x are the numbers, slack what each may differ
 * by, in the same unit. at, scale_at: where the weights and their scales begin. */
static struct estimate product(const double *x, const double *slack, const float *scale, uint32_t k, uint32_t kind,
                               uint32_t rank, uint64_t at, uint64_t scale_at)
{
    struct ranks_fp8_sum s = {0};
    double magnitude = 0, off = 0;
    for (uint32_t i = 0; i < k; i += 32) {
        double factor = (double)scale[i / BLOCK] * scale_of(key(kind, 0, rank), scale_at + i / BLOCK), products[32];
        for (uint32_t j = 0; j < 32; j++) {
            double weight = weight_of(kind, rank, at + i + j);
            products[j] = x[i + j] * weight;
            off += slack ? slack[i + j] * fabs(weight) * factor : 0;
        }
        ranks_fp8_add(&s, products, 32);
        if (i % BLOCK == 96) {
            magnitude += fabs(s.held * factor);
            ranks_fp8_promote(&s, factor);
        }
    }
    return (struct estimate){s.sum, s.lost + magnitude * 0x1p-21 + off};
}

static struct estimate rounded(struct estimate x)
{
    return (struct estimate){x.value, x.bound + (fabs(x.value) + x.bound) * 0x1p-8};
}

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

/* Column n of the first product of a token at an expert. expert: its number among the rank's. */
static struct estimate first_product(const struct row *w, uint32_t rank, uint32_t expert, uint32_t n,
                                     const struct scaled_row *token)
{
    double x[MOST];
    uint64_t row = (uint64_t)expert * columns_of(w) + n;
    for (uint32_t h = 0; h < w->hidden; h++)
        x[h] = ranks_value(PRS_DTYPE_E4M3, token->bits[h]);
    return product(x, NULL, token->scale, w->hidden, GATE_UP, rank, row * w->hidden,
                   (expert * (columns_of(w) / BLOCK) + n / BLOCK) * (uint64_t)(w->hidden / BLOCK));
}

static struct estimate activated(const struct row *w, struct estimate gate, struct estimate up)
{
    double x = gate.value, slope = 1.1, y = w->activation == PRS_ACTIVATION_SILU ? x * sigmoid(x) : x;
    if (!w->gated)
        return (struct estimate){y, slope * gate.bound + fabs(y) * 1e-5};
    return (struct estimate){y * up.value, slope * gate.bound * (fabs(up.value) + up.bound) + fabs(y) * up.bound +
                                               (fabs(y * up.value) + fabs(x * up.value)) * 1e-5};
}

static struct estimate first_result(const struct row *w, uint32_t rank, uint32_t expert, uint32_t n,
                                    const struct scaled_row *token)
{
    struct estimate gate = first_product(w, rank, expert, n, token), up = {1, 0};
    if (w->gated)
        up = first_product(w, rank, expert, w->inner + n, token);
    gate = activated(w, gate, up);
    return w->tuning.path == PRS_MOE_PATH_ONE ? rounded(gate) : gate;
}

static double nearest(double x)
{
    return ranks_value(PRS_DTYPE_E4M3, ranks_bits(PRS_DTYPE_E4M3, (float)x));
}

/* 128 activated columns that are only known to lie in intervals, quantised: the middle and half the width of what may
 * become of each, in units of the scale. */
static float quantised(const struct estimate *h, double *x, double *slack)
{
    double most = 0, off = 0;
    for (uint32_t i = 0; i < BLOCK; i++)
        most = fmax(most, fabs(h[i].value));
    for (uint32_t i = 0; i < BLOCK; i++)
        off = fmax(off, fabs(h[i].value) + h[i].bound >= most ? h[i].bound : 0);
    double scale = most / 448, few = 1 - off / most - 1e-6, many = 1 + off / most + 1e-6;
    for (uint32_t i = 0; i < BLOCK; i++) {
        double low = INFINITY, high = -INFINITY;
        for (int side = -1; side <= 1; side += 2)
            for (int wide = 0; wide < 2; wide++) {
                double s = wide ? many : few, q = nearest((h[i].value + side * h[i].bound) / scale / s);
                low = fmin(low, fmin(q * few, q * many)), high = fmax(high, fmax(q * few, q * many));
            }
        x[i] = (low + high) / 2, slack[i] = (high - low) / 2;
    }
    return (float)scale;
}

/* The result of one choice of a token, as its expert's rank rounds it. */
static void second_product(const struct row *w, uint32_t launch, uint32_t from, uint32_t token, int64_t choice,
                           struct estimate *to)
{
    uint32_t local = w->experts / w->world, rank = (uint32_t)choice / local, expert = (uint32_t)choice % local;
    struct scaled_row row;
    double x[MOST], slack[MOST];
    float scale[MOST / BLOCK];
    scaled_token(w, launch, from, token, &row);
    for (uint32_t b = 0; b < w->inner / BLOCK; b++) {
        struct estimate h[BLOCK];
        for (uint32_t i = 0; i < BLOCK; i++)
            h[i] = first_result(w, rank, expert, b * BLOCK + i, &row);
        scale[b] = quantised(h, x + b * BLOCK, slack + b * BLOCK);
    }
    for (uint32_t n = 0; n < w->hidden; n += 3)
        to[n] = rounded(product(x, slack, scale, w->inner, DOWN, rank, ((uint64_t)expert * w->hidden + n) * w->inner,
                                (expert * (w->hidden / BLOCK) + n / BLOCK) * (uint64_t)(w->inner / BLOCK)));
}

/* ---- checks ---- */
static void *download(const void *from, size_t bytes)
{
    void *p = calloc(1, bytes + 16);
    cr_assert_eq(cudaMemcpy(p, from, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
    return p;
}

static void check_layer(struct run *run, uint32_t rank, uint32_t l, const struct launch *x)
{
    const struct row *w = run->row;
    uint32_t count = count_of(w, l, rank);
    double last = w->nodes > 1 ? 0x1p-7 : 0x1p-8; /* each node rounds its sum; 0: one node */
    uint16_t *out = download(x->batch.out, (size_t)count * w->hidden * 2);
    for (uint32_t t = rank + l; t < count; t += w->apart != 0 ? w->apart : 3) { /* checked tokens */
        struct estimate sum[MOST] = {0}, one[MOST];
        for (uint32_t slot = 0; slot < w->top_k; slot++) {
            int64_t choice = choice_of(w, l, rank, t, slot);
            double weight = router_of(w, l, rank, t, slot);
            if (choice < 0)
                continue;
            second_product(w, l, rank, t, choice, one);
            for (uint32_t n = 0; n < w->hidden; n += 3)
                sum[n].value += one[n].value * weight,
                    sum[n].bound += one[n].bound * fabs(weight) + fabs(one[n].value * weight) * last;
        }
        for (uint32_t n = 0; n < w->hidden; n += 3) {
            sum[n].value += ranks_element(key(RESIDUAL, l, rank), (uint64_t)t * w->hidden + n);
            expect(run, "result", rank, t, n, ranks_float(out[(uint64_t)t * w->hidden + n]), rounded(sum[n]));
        }
    }
    free(out);
}

/* A row of a dispatch alone: bit by bit what its token was quantised to. */
static void check_row(struct run *run, uint32_t rank, uint32_t row, const uint8_t *have, const struct scaled_row *want)
{
    uint32_t hidden = run->row->hidden;
    const float *scales = (const float *)(have + hidden);
    for (uint32_t h = 0; h < hidden; h++)
        expect(run, "number", rank, row, h, have[h], (struct estimate){want->bits[h], 0});
    for (uint32_t b = 0; b < hidden / BLOCK; b++)
        expect(run, "scale", rank, row, b, scales[b], (struct estimate){want->scale[b], 0});
}

static void check_parts(struct run *run, uint32_t rank, uint32_t l, const struct prs_moe_info *info,
                        const struct launch *x)
{
    const struct row *w = run->row;
    uint32_t local = w->experts / w->world;
    struct prs_moe_row *origins = download(x->batch.rows, info->capacity * sizeof(*origins));
    struct prs_moe_expert_rows *experts = download(x->batch.expert_rows, local * sizeof(*experts));
    uint16_t *out = download(x->batch.out, (size_t)info->capacity * w->inner * 2);
    uint8_t *rows = download(x->rows.out, (size_t)info->capacity * info->row_bytes);
    for (uint32_t e = 0; e < local; e++)
        for (uint32_t i = 0; i < (experts[e].rows + BLOCK - 1) / BLOCK * BLOCK; i++) {
            uint32_t row = experts[e].first_row + i;
            const struct prs_moe_row *o = &origins[row];
            const uint8_t *have = rows + (uint64_t)row * info->row_bytes;
            struct scaled_row token = {0};
            if (i < experts[e].rows)
                scaled_token(w, l, o->rank, o->token, &token);
            if (i < experts[e].rows || x->rows.clear_fill)
                check_row(run, rank, row, have, &token);
            for (uint32_t n = row % 5; i < experts[e].rows && n < w->inner && !w->odd; n += 5)
                expect(run, "column", rank, row, n, ranks_float(out[(uint64_t)row * w->inner + n]),
                       rounded(first_result(w, rank, e, n, &token)));
        }
    free(origins);
    free(experts);
    free(out);
    free(rows);
}

/* ---- ranks ---- */
static int launch_one(const struct row *w, struct prs_moe_plan *plan, const struct launch *x, cudaStream_t stream)
{
    int r;
    if (!w->parts)
        return prs_moe_layer(plan, &x->batch, stream);
    r = prs_moe_dispatch(plan, &x->rows, stream);
    return r != 0 ? r : prs_moe_dispatch_gemm(plan, &x->batch, stream);
}

static int launch_all(struct run *run, uint32_t rank, struct prs_moe_plan *plan, struct prs_fused *ctx)
{
    const struct row *w = run->row;
    struct launch x[LAUNCHES];
    struct prs_moe_info info;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    int r = 0;
    prs_moe_plan_query(plan, &info);
    (void)cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    for (uint32_t l = 0; l < LAUNCHES; l++)
        make_launch(w, rank, l, &info, &x[l]);
    (void)cudaDeviceSynchronize();
    if (w->replayed)
        cr_assert_eq(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    for (uint32_t l = 0; l < LAUNCHES && r == 0; l++)
        r = launch_one(w, plan, &x[l], stream);
    if (w->replayed) {
        cr_assert_eq(cudaStreamEndCapture(stream, &graph), cudaSuccess);
        cr_assert_eq(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
        for (int i = 0; i < 2 && r == 0; i++)
            (void)cudaGraphLaunch(exec, stream);
    }
    (void)cudaStreamSynchronize(stream);
    (void)prs_fused_poll_error(ctx, &run->error[rank]);
    for (uint32_t l = 0; l < LAUNCHES && r == 0 && run->error[rank].code == 0; l++)
        if (w->parts)
            check_parts(run, rank, l, &info, &x[l]);
        else
            check_layer(run, rank, l, &x[l]);
    return r;
}

static struct prs_moe_shape shape_of(const struct row *w)
{
    return (struct prs_moe_shape){.tokens = w->tokens,
                                  .hidden = w->hidden,
                                  .columns = columns_of(w),
                                  .experts = w->experts,
                                  .top_k = w->top_k,
                                  .weights_transposed = 1,
                                  .activation = w->activation,
                                  .gated = w->gated,
                                  .layer = !w->parts,
                                  .dtype = PRS_DTYPE_E4M3,
                                  .scaling = w->parts ? 0 : PRS_SCALING_BLOCKS};
}

static void rank_body(uint32_t rank, struct ranks_self *self, void *user)
{
    struct run *run = user;
    struct prs_moe_shape shape = shape_of(run->row);
    struct prs_fused *ctx = NULL;
    struct prs_moe_plan *plan = NULL;
    int r = ranks_open(self, run->row->nodes != 0 ? run->row->nodes : 1, 60000, &ctx);
    if (!r)
        r = prs_moe_plan_open(ctx, &shape, &run->row->tuning, &plan);
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
            cr_assert(run.result[r] == 0 && run.error[r].code == 0, "row %zu: rank %u: %d, %s %s (HOPPER_SEED=%llu)", i,
                      r, run.result[r], run.error[r].text, prs_fused_error_text(), (unsigned long long)hopper_seed());
        cr_assert(run.wrong == 0, "row %zu: %s (HOPPER_SEED=%llu)", i, run.first, (unsigned long long)hopper_seed());
        cr_assert(run.checked > 0);
    }
}

/* Rows of a dispatch, bit by bit, and the product of rows that are dispatched; both cluster sizes, blocks with a second
 * half and without. */
Test(moe_fp8, rows_travel_with_their_scales, .timeout = 300)
{
    static const struct row rows[] = {
        {2, 24, 256, 128, 4, 2, PRS_ACTIVATION_SILU, .gated = 1, .parts = true},
        {2, 90, 128, 384, 4, 3, PRS_ACTIVATION_NONE, .parts = true, .quantised = true},
        {1, 20, 384, 256, 2, 1, PRS_ACTIVATION_SILU, .gated = 1, .parts = true, .tuning = {.cluster = 1, .ctas = 1}},
        {2, 24, 256, 128, 4, 2, PRS_ACTIVATION_NONE, .parts = true, .odd = true},
    };
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

Test(moe_fp8, layers_are_right, .timeout = 300)
{
    static const struct row rows[] = {
        {2, 12, 640, 256, 4, 2, PRS_ACTIVATION_SILU, .gated = 1, .tuning = {.returns = PRS_MOE_RETURNS_EARLY}},
        {3, 8, 128, 256, 6, 2, PRS_ACTIVATION_SILU, .gated = 1, .quantised = true, .replayed = true},
        {1, 9, 384, 128, 3, 2, PRS_ACTIVATION_NONE},
    };
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* As one kernel: tiles of up to 8, 16, 32 and 64 rows, several of an expert, tokens of two pieces, a last stage that
 * is half empty, more than 4096 choices. */
Test(moe_fp8, layers_of_few_tokens_are_right, .timeout = 300)
{
    static const struct row rows[] = {
        {2, 12, 256, 256, 4, 2, PRS_ACTIVATION_SILU, .gated = 1, .tuning = {.path = PRS_MOE_PATH_ONE}},
        {2, 72, 128, 128, 4, 2, PRS_ACTIVATION_SILU, .gated = 1, .quantised = 1, .tuning = {.path = PRS_MOE_PATH_ONE}},
        {2, 257, 128, 128, 16, 8, .quantised = 1, .apart = 67, .tuning = {.path = PRS_MOE_PATH_ONE}},
        {2, 5, 1152, 128, 4, 2, PRS_ACTIVATION_SILU, .gated = 1, .tuning = {.path = PRS_MOE_PATH_ONE}},
        {3, 8, 384, 256, 6, 2, PRS_ACTIVATION_NONE, .replayed = true, .tuning = {.path = PRS_MOE_PATH_ONE}},
    };
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* Between nodes rows travel as bytes too: sums of two ranks of another node. */
Test(moe_fp8_nodes, rows_and_layers_cross_between_nodes, .timeout = 300)
{
    static const struct row rows[] = {
        {2, 24, 256, 128, 4, 2, PRS_ACTIVATION_SILU, .gated = 1, .parts = true, .nodes = 2},
        {4, 12, 256, 256, 8, 3, PRS_ACTIVATION_SILU, .gated = 1, .nodes = 2, .tuning = {.rows_per_signal = 8}},
    };
    ranks_need_a_device();
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* Every access checked for its order (memory_order.py). At last all stages are used again, tokens have two pieces. */
Test(moe_fp8_order, of_a_layer, .timeout = 300)
{
    static const struct row rows[] = {
        {2, 12, 256, 128, 4, 2, PRS_ACTIVATION_SILU, .gated = 1},
        {2, 6, 256, 128, 4, 2, PRS_ACTIVATION_SILU, .gated = 1, .tuning = {.path = PRS_MOE_PATH_ONE}},
        {2, 6, 1152, 128, 4, 2, PRS_ACTIVATION_SILU, .gated = 1, .tuning = {.path = PRS_MOE_PATH_ONE, .ctas = 1}},
    };
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* ---- what is refused ---- */
static void say_refused(int r, const char *why)
{
    cr_expect_eq(r, -EINVAL, "%s", why);
    cr_expect(strstr(prs_fused_error_text(), why), "%s\nis not: %s", prs_fused_error_text(), why);
}

Test(moe_fp8, what_e4m3_cannot_do_is_refused_by_name, .timeout = 60)
{
    static const struct {
        struct prs_moe_shape shape;
        const char *why;
    } shapes[] = {
        {{8, 128, 128, 2, 1, .weights_transposed = 1, .dtype = PRS_DTYPE_FP16}, "MoE of dtype 2 (fp16)"},
        {{8, 128, 128, 2, 1, .weights_transposed = 1, .dtype = 9}, "MoE of dtype 9 (not known)"},
        {{8, 128, 128, 2, 1, .scaling = 3}, "MoE of dtype 0 with scaling 3"},
        {{8, 128, 128, 2, 1, .weights_transposed = 1, .dtype = PRS_DTYPE_E4M3, .scaling = 2},
         "MoE of dtype 4 with scaling 2: only e4m3 has scales, those of PRS_SCALING_BLOCKS"},
        {{8, 128, 128, 2, 1, .dtype = PRS_DTYPE_E4M3}, "must be [E / W, N, H] (weights_transposed)"},
        {{8, 192, 128, 2, 1, .weights_transposed = 1, .dtype = PRS_DTYPE_E4M3}, "rows of 192 and 128 columns"},
        {{8, 128, 128, 2, 1, .weights_transposed = 1, .gated = 1, .dtype = PRS_DTYPE_E4M3}, "multiples of 128 and 256"},
    };
    struct prs_fused_config config = {.world = 1};
    struct prs_fused *ctx;
    struct prs_moe_plan *plan, *plain;
    struct prs_moe_shape shape = {8, 128, 128, 2, 1, .weights_transposed = 1, .layer = 1};
    float *p = ranks_device(1 << 16, 0);
    struct prs_moe_batch good = {.tokens = p,
                                 .chosen = (int64_t *)p,
                                 .router_weights = p,
                                 .weights = p,
                                 .down = p,
                                 .out = p,
                                 .rows = (void *)p,
                                 .expert_rows = (void *)p,
                                 .weight_scales = p,
                                 .down_scales = p},
                         b;
    struct prs_moe_product product = {.rows = p, .weights = p, .out = p, .k = 128, .n = 128};
    struct prs_moe_again again = {.tokens = p, .out = p};
    struct prs_moe_values returned = {.values = p, .rows = (void *)p, .out = p};
    struct prs_moe_activation back = {p, p, (void *)p, p, p, p};
    hopper_setup(1, 4, 0);
    cr_assert_eq(prs_fused_open(&config, &ctx), 0);
    for (size_t i = 0; i < sizeof(shapes) / sizeof(*shapes); i++)
        say_refused(prs_moe_plan_open(ctx, &shapes[i].shape, NULL, &plan), shapes[i].why);
    cr_assert_eq(prs_moe_plan_open(ctx, &shape, NULL, &plain), 0);
    shape.dtype = PRS_DTYPE_E4M3;
    cr_assert_eq(prs_moe_plan_open(ctx, &shape, NULL, &plan), 0, "%s", prs_fused_error_text());
    say_refused(prs_moe_layer(plain, &good, NULL), "down_scales 0x");
    b = good, b.down_scales = NULL;
    say_refused(prs_moe_layer(plan, &b, NULL), "MoE batch of e4m3: down_scales (nil): 4-byte aligned, not NULL");
    say_refused(prs_moe_layer(plain, &b, NULL), "weight_scales 0x");
    b.weight_scales = NULL, b.token_scales = p;
    say_refused(prs_moe_layer(plain, &b, NULL), "token_scales 0x");
    say_refused(prs_moe_dispatch_gemm(plan, &b, NULL), "MoE batch of e4m3: weight_scales (nil)");
    b = good, b.weight_scales = (const float *)((const char *)p + 2);
    say_refused(prs_moe_gemm(plan, &b, NULL), "MoE batch of e4m3: weight_scales 0x");
    b = good, b.token_scales = (const float *)((const char *)p + 1);
    say_refused(prs_moe_dispatch(plan, &b, NULL), "token_scales 0x");
    b = good, b.kept_rows = b.kept_columns = p;
    say_refused(prs_moe_layer(plan, &b, NULL), "kept_rows and kept_columns of a MoE plan of e4m3");
    say_refused(prs_moe_multiply(plan, &product, NULL), "prs_moe_multiply() of a MoE plan of e4m3");
    say_refused(prs_moe_dispatch_again(plan, &again, NULL), "prs_moe_dispatch_again() of a MoE plan of e4m3");
    say_refused(prs_moe_return_values(plan, &returned, NULL), "prs_moe_return_values() of a MoE plan of e4m3");
    say_refused(prs_moe_activation_back(plan, &back, NULL), "prs_moe_activation_back() of a MoE plan of e4m3");
    prs_moe_plan_close(plan), prs_moe_plan_close(plain);
    prs_fused_close(ctx);
}
