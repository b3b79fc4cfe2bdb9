/* SPDX-License-Identifier: Apache-2.0 */
#include "test/hopper/ranks_moe.h"

#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/hopper/hopper.h"

enum { SOME_COLUMNS = 9, MAX_INNER = 400 };

struct run {
    const struct ranks_moe *row;
    pthread_mutex_t lock;
    uint64_t checked, wrong;
    int result[RANKS_MAX];
    struct prs_fused_error error[RANKS_MAX];
    char first[200];
};

/* ---- inputs that any rank can recompute ---- */
static uint32_t count_of(const struct ranks_moe *w, uint32_t launch, uint32_t rank)
{
    if (w->mode == ANY)
        return ranks_mix(launch, rank, 21) % 4 == 0 ? 0 : ranks_mix(launch, rank, 22) % (w->tokens + 1);
    return (rank + launch) % 3 == 2 ? w->tokens / 4 : rank == 1 && launch == 1 ? 0 : w->tokens - rank;
}

static int64_t choice_of(const struct ranks_moe *w, uint32_t launch, uint32_t rank, uint32_t token, uint32_t slot)
{
    uint32_t x = ranks_mix(launch, rank * 5000 + token, 17) / 4, step = w->experts / w->top_k;
    uint32_t expert = (x + slot * step + ranks_mix(x, slot, 1) % step) % w->experts;
    switch (w->mode) {
    case ONE_EXPERT:
        return slot == 0 ? 1 : -1;
    case HALF_EMPTY:
        return expert / 2 * 2;
    case SOME_NONE:
        return ranks_mix(x, slot, 2) % 3 == 0 ? -1 : (int64_t)expert;
    case ANY: /* an expert may come several times */
        return (int64_t)(ranks_mix(x, slot, 3) % (w->experts + 1)) - 1;
    default:
        return expert;
    }
}

static float weight_of(const struct ranks_moe *w, uint32_t launch, uint32_t rank, uint32_t token, uint32_t slot)
{
    return w->unweighted ? 1.0f : ranks_element(7000 + launch * 16 + rank, token * 64 + slot);
}

static uint32_t key_of_tokens(uint32_t launch, uint32_t rank)
{
    return launch * 16 + rank;
}

static uint32_t key_of_residual(uint32_t launch, uint32_t rank)
{
    return 3000 + launch * 16 + rank;
}

static uint32_t key_of_weights(uint32_t rank)
{
    return 5000 + rank;
}

static uint32_t key_of_down(uint32_t rank)
{
    return 6000 + rank;
}

static uint32_t columns_of(const struct ranks_moe *w)
{
    return w->what == COPY ? 0 : w->what == PRODUCT ? w->hidden : w->inner << w->gated;
}

/* ---- checks ---- */
/* The expert's weight that takes column k of its input to column n of its result; `from` and `to` columns in all. */
static double weight_at(const struct ranks_moe *w, uint32_t key, uint64_t plane, uint32_t from, uint32_t to, uint32_t k,
                        uint32_t n)
{
    uint64_t at = plane * from * to + (w->k_n ? (uint64_t)k * to + n : (uint64_t)n * from + k);
    return ranks_element(key, at);
}

/* A column of the first product of a token; *size: the sum of the terms' sizes. */
static double product(const struct ranks_moe *w, uint32_t expert, uint32_t launch, uint32_t rank, uint32_t token,
                      uint32_t column, double *size)
{
    uint32_t local = w->experts / w->world;
    double sum = *size = 0;
    for (uint32_t h = 0; h < w->hidden; h++) {
        double x = ranks_element(key_of_tokens(launch, rank), (uint64_t)token * w->hidden + h) *
                   weight_at(w, key_of_weights(expert / local), expert % local, w->hidden, columns_of(w), h, column);
        sum += x, *size += fabs(x);
    }
    return sum;
}

static double activation(const struct ranks_moe *w, double x)
{
    return w->activation == PRS_ACTIVATION_SILU   ? x / (1 + exp(-x))
           : w->activation == PRS_ACTIVATION_RELU ? fmax(x, 0)
           : w->activation == PRS_ACTIVATION_GELU ? x * (1 + erf(x / sqrt(2))) / 2
                                                  : x;
}

/* What an expert makes of a token; slack: how far rounded values may be off. */
struct output {
    double value[SOME_COLUMNS], slack[SOME_COLUMNS];
};

static void layer_output(const struct ranks_moe *w, uint32_t expert, uint32_t launch, uint32_t rank, uint32_t token,
                         const uint32_t *columns, struct output *o)
{
    uint32_t local = w->experts / w->world;
    double inner[MAX_INNER], off[MAX_INNER], size, up_size;
    for (uint32_t i = 0; i < w->inner; i++) {
        double gate = product(w, expert, launch, rank, token, i, &size), up = 1, a = activation(w, gate);
        off[i] = size * 0x1p-20 * 1.2;
        if (w->gated) {
            up = product(w, expert, launch, rank, token, w->inner + i, &up_size);
            off[i] = off[i] * fabs(up) + fabs(a) * up_size * 0x1p-20;
        }
        inner[i] = a * up;
        off[i] += fabs(inner[i]) * 0x1.02p-8;
    }
    for (uint32_t c = 0; c < SOME_COLUMNS; c++) {
        o->value[c] = o->slack[c] = size = 0;
        for (uint32_t i = 0; i < w->inner; i++) {
            double x = weight_at(w, key_of_down(expert / local), expert % local, w->inner, w->hidden, i, columns[c]);
            o->value[c] += inner[i] * x, o->slack[c] += off[i] * fabs(x), size += fabs(inner[i] * x);
        }
        o->slack[c] += fabs(o->value[c]) * 0x1.02p-8 + size * 0x1p-21;
    }
}

static void expert_output(const struct ranks_moe *w, uint32_t expert, uint32_t launch, uint32_t rank, uint32_t token,
                          const uint32_t *columns, struct output *o)
{
    if (w->what == LAYER) {
        layer_output(w, expert, launch, rank, token, columns, o);
        return;
    }
    for (uint32_t c = 0; c < SOME_COLUMNS; c++) {
        double size = 0;
        o->value[c] = w->what == PRODUCT
                          ? product(w, expert, launch, rank, token, columns[c], &size)
                          : ranks_element(key_of_tokens(launch, rank), (uint64_t)token * w->hidden + columns[c]);
        o->slack[c] = w->what == PRODUCT ? fabs(o->value[c]) * 0x1.02p-8 + size * 0x1p-21 : 0;
    }
}

/* Does the row have room, after all earlier ones of the same rank? */
static bool has_room(const struct ranks_moe *w, uint32_t launch, uint32_t rank, uint32_t token, uint32_t slot)
{
    uint32_t local = w->experts / w->world;
    uint32_t expert = (uint32_t)choice_of(w, launch, rank, token, slot), owner = expert / local;
    uint64_t row = 0;
    if (w->capacity_of_last == 0 || owner != w->world - 1)
        return true;
    for (uint32_t e = owner * local; e <= expert; e++) {
        row = (row + 127) / 128 * 128;
        for (uint32_t i = 0; i < w->world; i++) {
            uint32_t from = (owner + i) % w->world;
            for (uint32_t c = 0; c < count_of(w, launch, from) * w->top_k; c++) {
                if (e == expert && from == rank && c == token * w->top_k + slot)
                    return row < w->capacity_of_last;
                row += choice_of(w, launch, from, c / w->top_k, c % w->top_k) == (int64_t)e;
            }
        }
    }
    return false;
}

/* A rank's sum for a token is rounded when it travels. */
static void reference(const struct ranks_moe *w, uint32_t launch, uint32_t rank, uint32_t token,
                      const uint32_t *columns, struct output *all)
{
    double by_rank[RANKS_MAX][SOME_COLUMNS] = {{0}};
    *all = (struct output){{0}, {0}};
    for (uint32_t j = 0; j < w->top_k; j++) {
        int64_t e = choice_of(w, launch, rank, token, j);
        double weight = weight_of(w, launch, rank, token, j);
        struct output o;
        if (e < 0 || !has_room(w, launch, rank, token, j))
            continue;
        expert_output(w, (uint32_t)e, launch, rank, token, columns, &o);
        for (uint32_t c = 0; c < SOME_COLUMNS; c++) {
            by_rank[e / (w->experts / w->world)][c] += weight * o.value[c];
            all->slack[c] += fabs(weight) * o.slack[c] + fabs(weight * o.value[c]) * 0x1p-20;
        }
    }
    for (uint32_t c = 0; c < SOME_COLUMNS; c++) {
        for (uint32_t r = 0; r < w->world; r++) {
            all->value[c] += by_rank[r][c];
            all->slack[c] += r == rank ? 0 : fabs(by_rank[r][c]) * (w->nodes > 1 ? 0x1.02p-7 : 0x1.02p-8);
        }
        if (w->residual)
            all->value[c] += ranks_element(key_of_residual(launch, rank), (uint64_t)token * w->hidden + columns[c]);
        all->slack[c] += fabs(all->value[c]) * 0x1.02p-8 + 1e-30;
    }
}

/* Copies are compared in full, products in some columns. */
static void check_result(struct run *run, const uint16_t *have, uint32_t rank, uint32_t launch)
{
    const struct ranks_moe *w = run->row;
    uint32_t turns = w->what == COPY ? (w->hidden + SOME_COLUMNS - 1) / SOME_COLUMNS : 1;
    uint64_t wrong = 0, checked = 0;
    char first[sizeof(run->first)] = "";
    for (uint32_t i = 0; i < count_of(w, launch, rank) * turns; i++) {
        uint32_t token = i / turns, columns[SOME_COLUMNS];
        struct output want;
        for (uint32_t c = 0; c < SOME_COLUMNS; c++)
            columns[c] = w->what == COPY ? (i % turns * SOME_COLUMNS + c) % w->hidden
                         : c == 0        ? w->hidden - 1
                                         : ranks_mix(i, c, launch) % w->hidden;
        reference(w, launch, rank, token, columns, &want);
        for (uint32_t c = 0; c < SOME_COLUMNS; c++) {
            double got = ranks_float(have[(uint64_t)token * w->hidden + columns[c]]);
            checked++;
            if (!(fabs(got - want.value[c]) <= want.slack[c]) && wrong++ == 0)
                snprintf(first, sizeof(first), "rank %u launch %u token %u column %u: want %g +- %g, have %g", rank,
                         launch, token, columns[c], want.value[c], want.slack[c], got);
        }
    }
    pthread_mutex_lock(&run->lock);
    if (run->wrong == 0 && wrong != 0)
        memcpy(run->first, first, sizeof(first));
    run->wrong += wrong;
    run->checked += checked;
    pthread_mutex_unlock(&run->lock);
}

/* ---- ranks ---- */
struct weights {
    void *first, *second;
};

struct launch {
    struct prs_moe_batch batch;
    struct prs_moe_results results;
    uint16_t *first; /* what the first of several combines gave */
    size_t bytes;    /* of the result */
};

static void make_launch(const struct ranks_moe *w, uint32_t rank, uint32_t l, const struct prs_moe_info *info,
                        const struct weights *weights, struct launch *x)
{
    uint32_t count = count_of(w, l, rank), choices = count * w->top_k;
    uint64_t elements = (uint64_t)(count + 1) * w->hidden;
    int64_t *chosen = calloc(choices + 1, sizeof(*chosen));
    float *router = calloc(choices + 1, sizeof(*router));
    for (uint32_t i = 0; i < choices; i++) {
        chosen[i] = choice_of(w, l, rank, i / w->top_k, i % w->top_k);
        router[i] = w->unweighted ? 77.0f : weight_of(w, l, rank, i / w->top_k, i % w->top_k);
    }
    *x = (struct launch){.bytes = (size_t)count * w->hidden * 2};
    x->batch.count = count;
    x->batch.tokens = ranks_upload(key_of_tokens(l, rank), elements);
    x->batch.chosen = ranks_copy(chosen, (choices + 1) * sizeof(*chosen));
    x->batch.router_weights = ranks_copy(router, (choices + 1) * sizeof(*router));
    x->batch.weights = weights->first;
    x->batch.maps = w->kept_maps ? ranks_device(info->maps_bytes, 0xee) : NULL;
    x->results.out = ranks_device(x->bytes, 0xff);
    x->results.residual = w->residual ? ranks_upload(key_of_residual(l, rank), elements) : NULL;
    if (w->in_place)
        x->results.out = (void *)(uintptr_t)x->results.residual;
    x->results.maps = x->batch.maps;
    x->results.unweighted = w->unweighted;
    if (w->what == LAYER) {
        x->batch.down = weights->second;
        x->batch.out = x->results.out;
        x->batch.residual = x->results.residual;
    } else {
        x->batch.out = ranks_device((size_t)info->capacity * w->hidden * 2, 0xff);
        x->batch.rows = ranks_device(info->capacity * sizeof(*x->batch.rows), 0xee);
        x->batch.expert_rows = ranks_device(w->experts / w->world * sizeof(*x->batch.expert_rows), 0xee);
        x->results.rows = w->what == COPY ? ranks_device((size_t)info->capacity * w->hidden * 2, 0xff) : x->batch.out;
    }
    x->first = calloc(1, x->bytes + 2);
    free(chosen);
    free(router);
}

/* Experts that copy read what is not defined, between two experts: no not-a-number may come from there. */
static int dispatch(const struct ranks_moe *w, struct prs_moe_plan *plan, struct launch *x, size_t rows,
                    cudaStream_t stream)
{
    int r;
    if (w->what == PRODUCT)
        return prs_moe_dispatch_gemm(plan, &x->batch, stream);
    r = prs_moe_dispatch(plan, &x->batch, stream);
    (void)cudaMemcpyAsync((void *)(uintptr_t)x->results.rows, x->batch.out, rows, cudaMemcpyDeviceToDevice, stream);
    return r;
}

static int combine(const struct ranks_moe *w, struct prs_moe_plan *plan, struct launch *x, cudaStream_t stream)
{
    int r = prs_moe_combine(plan, &x->results, stream);
    for (uint32_t i = 1; i < w->combines && r == 0; i++) {
        if (i == 1)
            (void)cudaMemcpyAsync(x->first, x->results.out, x->bytes, cudaMemcpyDeviceToHost, stream);
        (void)cudaMemsetAsync(x->results.out, 0xff, x->bytes, stream);
        r = prs_moe_combine(plan, &x->results, stream);
    }
    return r;
}

static int layer(const struct ranks_moe *w, struct prs_moe_plan *plan, struct launch *x, cudaStream_t stream)
{
    int r = prs_moe_layer(plan, &x->batch, stream);
    for (uint32_t i = 1; i < w->combines && r == 0; i++) {
        if (i == 1)
            (void)cudaMemcpyAsync(x->first, x->batch.out, x->bytes, cudaMemcpyDeviceToHost, stream);
        (void)cudaMemsetAsync(x->batch.out, 0xff, x->bytes, stream);
        r = prs_moe_layer(plan, &x->batch, stream);
    }
    return r;
}

/* Enqueues all launches before it waits for any. */
static int launch_all(struct run *run, uint32_t rank, struct prs_moe_plan *plan, struct prs_fused *ctx)
{
    const struct ranks_moe *w = run->row;
    struct launch x[RANKS_MOE_MOST_LAUNCHES];
    struct prs_moe_info info;
    struct weights weights = {NULL, NULL};
    cudaStream_t stream;
    size_t rows;
    int r = 0;
    prs_moe_plan_query(plan, &info);
    rows = (size_t)info.capacity * w->hidden * 2;
    if (w->what != COPY)
        weights.first = ranks_upload(key_of_weights(rank), (uint64_t)w->experts / w->world * w->hidden * columns_of(w));
    if (w->what == LAYER)
        weights.second = ranks_upload(key_of_down(rank), (uint64_t)w->experts / w->world * w->hidden * w->inner);
    (void)cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    for (uint32_t l = 0; l < w->launches; l++)
        make_launch(w, rank, l, &info, &weights, &x[l]);
    (void)cudaDeviceSynchronize();
    for (uint32_t l = 0; l < w->launches && r == 0; l++) {
        r = w->what == LAYER ? layer(w, plan, &x[l], stream) : dispatch(w, plan, &x[l], rows, stream);
        if (r == 0 && !w->kept_maps && w->what != LAYER)
            r = combine(w, plan, &x[l], stream);
    }
    for (uint32_t l = w->launches; w->kept_maps && w->what != LAYER && l-- > 0 && r == 0;)
        r = combine(w, plan, &x[l], stream);
    (void)cudaStreamSynchronize(stream);
    (void)prs_fused_poll_error(ctx, &run->error[rank]);
    for (uint32_t l = 0; l < w->launches && r == 0 && run->error[rank].code == 0; l++) {
        uint16_t *out = calloc(1, x[l].bytes + 2);
        (void)cudaMemcpy(out, x[l].results.out, x[l].bytes, cudaMemcpyDeviceToHost);
        check_result(run, out, rank, l);
        cr_assert(w->combines < 2 || memcmp(out, x[l].first, x[l].bytes) == 0, "rank %u launch %u", rank, l);
        free(out);
    }
    return r;
}

static void rank_body(uint32_t rank, struct ranks_self *self, void *user)
{
    struct run *run = user;
    const struct ranks_moe *w = run->row;
    struct prs_moe_shape shape = {.tokens = w->tokens,
                                  .hidden = w->hidden,
                                  .columns = columns_of(w),
                                  .experts = w->experts,
                                  .top_k = w->top_k,
                                  .weights_transposed = !w->k_n,
                                  .activation = w->activation,
                                  .gated = w->gated,
                                  .layer = w->what == LAYER};
    struct prs_fused *ctx = NULL;
    struct prs_moe_plan *plan = NULL;
    int r;
    struct prs_moe_tuning tuning = w->tuning;
    if (rank == w->world - 1)
        shape.capacity = w->capacity_of_last;
    if (tuning.path == PRS_MOE_PATH_AUTO)
        tuning.path = PRS_MOE_PATH_KERNELS; /* rows are few here; test_moe_few.c asks for the other path */
    r = ranks_open(self, w->nodes == 0 ? 1 : w->nodes, 60000, &ctx);
    if (!r)
        r = prs_moe_plan_open(ctx, &shape, &tuning, &plan);
    if (!r)
        r = launch_all(run, rank, plan, ctx);
    prs_moe_plan_close(plan);
    prs_fused_close(ctx);
    run->result[rank] = r;
}

void ranks_moe_assert_right(const struct ranks_moe *rows, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        struct run run = {.row = &rows[i]};
        pthread_mutex_init(&run.lock, NULL);
        hopper_setup(RANKS_MAX, 4, 0);
        ranks_run(rows[i].world, rank_body, &run);
        for (uint32_t r = 0; r < rows[i].world; r++)
            cr_assert(run.result[r] == 0 && run.error[r].code == 0, "row %zu: rank %u: %d, %s (HOPPER_SEED=%llu)", i, r,
                      run.result[r], run.error[r].text, (unsigned long long)hopper_seed());
        cr_assert_eq(run.wrong, 0, "row %zu: %llu of %llu wrong, first: %s (HOPPER_SEED=%llu)", i,
                     (unsigned long long)run.wrong, (unsigned long long)run.checked, run.first,
                     (unsigned long long)hopper_seed());
        cr_assert_gt(run.checked, 0);
    }
}
