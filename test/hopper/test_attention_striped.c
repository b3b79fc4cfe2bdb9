/* SPDX-License-Identifier: Apache-2.0 */
/* Striped attention on emulated GPUs, both passes, compared with double precision: packed sequences, windows, soft caps
 * and sinks. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "test/hopper/ranks.h"
#include "tools/hopper/hopper.h"

enum { MAX_EPOCHS = 3, SMS = 4, MAX_BOUNDS = 300, MAX_STRIPES = 16 };

/* Tensors of a launch: what it reads, then what it writes. */
enum tensor { Q, K, V, DOUT, OUT, DQ, DK, DV, TENSORS };

/* Which rank has which stripe: as prs_attention_assign_stripes() says; or in turn, each round from another rank on. */
enum stripes { ZIGZAG, ASSIGNED, ROTATED };

struct row {
    uint32_t world;
    struct prs_attention_shape shape;
    uint32_t epochs;
    /* Ends of packed sequences in an epoch, up to `sequences`; those that are 0 repeat the last one. */
    uint32_t ends[MAX_EPOCHS][6];
    uint32_t sequences;
    uint32_t every; /* instead of ends: sequences of so many positions */
    bool sinks;
    bool backward;            /* only backward launches */
    uint32_t seq[MAX_EPOCHS]; /* of a launch; 0: the plan's */
    enum stripes stripes[MAX_EPOCHS];
    struct prs_attention_tuning tuning;
};

/* Whole tensors [batch][head][position][head_dim] in double precision. size, rough: what the bound is made of, as in
 * test_attention_backward.c. */
struct problem {
    double *x[TENSORS], *size[TENSORS], *rough[TENSORS];
    float *lse, sinks[8];
    double dsinks[8], dsinks_size[8];
    int32_t bounds[MAX_BOUNDS];
    uint32_t ranks[MAX_STRIPES]; /* of stripes */
};

struct run {
    const struct row *row;
    struct row at[MAX_EPOCHS]; /* the row, whose shape has the launch's length */
    struct problem problem[MAX_EPOCHS];
    pthread_mutex_t lock;
    uint64_t checked, wrong;
    double dsinks[MAX_EPOCHS][8]; /* sums over ranks */
    int result;
    char first[160];
};

static uint32_t heads_of(const struct prs_attention_shape *s, enum tensor t)
{
    return t == K || t == V || t == DK || t == DV ? s->heads_kv : s->heads_q;
}

static uint64_t size_of(const struct prs_attention_shape *s, enum tensor t)
{
    return (uint64_t)s->batch * heads_of(s, t) * s->seq * s->head_dim;
}

static double scale_of(const struct prs_attention_shape *s)
{
    return s->scale != 0 ? (double)s->scale : 1 / sqrt((double)s->head_dim);
}

/* ---- the reference ---- */
static bool meets(const struct row *r, const struct problem *p, uint32_t query, uint32_t key)
{
    const struct prs_attention_shape *s = &r->shape;
    uint32_t far = query > key ? query - key : key - query;
    bool same = r->sequences == 0 || query == key;
    for (uint32_t i = 0; i < r->sequences && !same; i++)
        same = (int32_t)query >= p->bounds[i] && (int32_t)query < p->bounds[i + 1] && (int32_t)key >= p->bounds[i] &&
               (int32_t)key < p->bounds[i + 1];
    return same && (s->causal == 0 || key <= query) && (s->window == 0 || far < s->window);
}

static double dot(const double *a, const double *b, uint32_t count, double *size)
{
    double sum = 0;
    *size = 0;
    for (uint32_t i = 0; i < count; i++) {
        sum += a[i] * b[i];
        *size += fabs(a[i] * b[i]);
    }
    return sum;
}

static void add_row(struct problem *p, enum tensor t, uint64_t to, const double *x, double factor, double rough,
                    uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        p->x[t][to + i] += factor * x[i];
        p->size[t][to + i] += fabs(factor * x[i]);
        p->rough[t][to + i] += fabs(rough * x[i]);
    }
}

/* One query: its result and lse, rounded as the forward pass does, then what it adds to the gradients. */
static void solve_query(const struct row *r, struct problem *p, uint64_t head, uint32_t position)
{
    const struct prs_attention_shape *s = &r->shape;
    uint32_t d = s->head_dim, h = (uint32_t)(head % s->heads_q);
    uint64_t kv = head / (s->heads_q / s->heads_kv) * s->seq * d, row = (head * s->seq + position) * d;
    double cap = (double)s->soft_cap, sink = r->sinks ? (double)p->sinks[h] : -INFINITY, top = sink, sum, delta, rough;
    double *score = calloc(s->seq, sizeof(*score)), ignored, *out = p->x[OUT] + row;
    const double *dout = p->x[DOUT] + row;
    for (uint32_t j = 0; j < s->seq; j++) {
        if (!meets(r, p, position, j))
            continue;
        score[j] = scale_of(s) * dot(p->x[Q] + row, p->x[K] + kv + j * d, d, &ignored);
        score[j] = cap != 0 ? cap * tanh(score[j] / cap) : score[j];
        top = fmax(top, score[j]);
    }
    sum = r->sinks ? exp(sink - top) : 0;
    for (uint32_t j = 0; j < s->seq; j++)
        sum += meets(r, p, position, j) ? exp(score[j] - top) : 0;
    p->lse[head * s->seq + position] = (float)(top + log(sum));
    for (uint32_t j = 0; j < s->seq; j++)
        if (meets(r, p, position, j))
            add_row(p, OUT, row, p->x[V] + kv + j * d, exp(score[j] - top) / sum, 0, d);
    for (uint32_t i = 0; i < d; i++)
        out[i] = ranks_float(ranks_bf16((float)out[i]));
    delta = dot(dout, out, d, &rough);
    for (uint32_t j = 0; j < s->seq; j++) {
        double prob, ds, size, through = cap != 0 ? 1 - pow(score[j] / cap, 2) : 1;
        if (!meets(r, p, position, j))
            continue;
        prob = exp(score[j] - (double)p->lse[head * s->seq + position]) * scale_of(s);
        ds = prob * through * (dot(dout, p->x[V] + kv + j * d, d, &size) - delta);
        add_row(p, DQ, row, p->x[K] + kv + j * d, ds, prob * (size + rough), d);
        add_row(p, DK, kv + j * d, p->x[Q] + row, ds, prob * (size + rough), d);
        add_row(p, DV, kv + j * d, dout, prob / scale_of(s), prob / scale_of(s), d);
    }
    if (r->sinks) {
        double prob = exp(sink - (double)p->lse[head * s->seq + position]);
        p->dsinks[h] -= prob * delta;
        p->dsinks_size[h] += prob * rough;
    }
    free(score);
}

static void open_problem(const struct row *r, uint32_t epoch, struct problem *p)
{
    const struct prs_attention_shape *s = &r->shape;
    for (int t = 0; t < TENSORS; t++) {
        p->x[t] = calloc(size_of(s, t), sizeof(double));
        p->size[t] = calloc(size_of(s, t), sizeof(double));
        p->rough[t] = calloc(size_of(s, t), sizeof(double));
        for (uint64_t i = 0; i < size_of(s, t) && t < OUT; i++)
            p->x[t][i] = (t == Q && s->soft_cap != 0 ? 8 : 1) * ranks_element(epoch * 8 + (uint32_t)t + 1, i);
    }
    for (uint32_t i = 1; i <= r->sequences; i++) {
        uint32_t end = r->every != 0 ? i * r->every : i <= 6 ? r->ends[epoch][i - 1] : 0;
        p->bounds[i] = end != 0 ? (int32_t)(end < s->seq ? end : s->seq) : p->bounds[i - 1];
    }
    for (uint32_t i = 0; i < s->seq / s->stripe && r->stripes[epoch] == ROTATED; i++)
        p->ranks[i] = (i + i / r->world) % r->world;
    if (r->stripes[epoch] == ASSIGNED)
        cr_assert_eq(
            prs_attention_assign_stripes(s, r->world, r->sequences != 0 ? p->bounds : NULL, r->sequences, p->ranks), 0,
            "%s", prs_fused_error_text());
    for (uint32_t h = 0; h < s->heads_q; h++)
        p->sinks[h] = 2 * ranks_element(100, h);
    p->lse = calloc((size_t)s->batch * s->heads_q * s->seq, sizeof(float));
    for (uint64_t head = 0; head < (uint64_t)s->batch * s->heads_q; head++)
        for (uint32_t position = 0; position < s->seq; position++)
            solve_query(r, p, head, position);
}

static void close_problem(struct problem *p)
{
    for (int t = 0; t < TENSORS; t++) {
        free(p->x[t]);
        free(p->size[t]);
        free(p->rough[t]);
    }
    free(p->lse);
}

/* ---- a rank ---- */
struct tensors {
    void *x[TENSORS], *given_out; /* OUT is written by the forward launch; given_out: the reference's OUT */
    float *lse, *given_lse, *sinks, *dsinks;
    int32_t *bounds;
    uint32_t sequences, *ranks;
};

/* Element of a slice [batch, rows, heads, head_dim], or with heads_first [batch, heads, rows, head_dim]. */
static uint64_t place_of(const struct row *r, enum tensor t, uint64_t head, uint32_t at)
{
    uint64_t heads = heads_of(&r->shape, t), rows = r->shape.seq / r->world;
    return (r->shape.heads_first != 0 ? head * rows + at : (head / heads * rows + at) * heads + head % heads) *
           r->shape.head_dim;
}

static void *upload_slice(const struct row *r, const struct problem *p, enum tensor t, const uint32_t *positions)
{
    const struct prs_attention_shape *s = &r->shape;
    uint64_t count = size_of(s, t) / r->world;
    uint16_t *slice = malloc(count * 2);
    void *to;
    for (uint64_t head = 0; head < (uint64_t)s->batch * heads_of(s, t); head++)
        for (uint32_t at = 0; at < s->seq / r->world; at++)
            for (uint32_t i = 0; i < s->head_dim; i++)
                slice[place_of(r, t, head, at) + i] =
                    ranks_bf16((float)p->x[t][(head * s->seq + positions[at]) * s->head_dim + i]);
    to = ranks_copy(slice, count * 2);
    free(slice);
    return to;
}

static void open_tensors(const struct row *r, const struct problem *p, bool zigzag, const uint32_t *positions,
                         struct tensors *x)
{
    const struct prs_attention_shape *s = &r->shape;
    uint32_t rows = s->seq / r->world, heads = s->batch * s->heads_q;
    float *lse = malloc(heads * rows * sizeof(float));
    for (uint32_t i = 0; i < heads * rows; i++)
        lse[i] = p->lse[i / rows * s->seq + positions[i % rows]];
    for (int t = 0; t < TENSORS; t++)
        x->x[t] = t < OUT ? upload_slice(r, p, t, positions) : ranks_device(size_of(s, t) / r->world * 2, 0xff);
    x->given_out = upload_slice(r, p, OUT, positions);
    x->given_lse = ranks_copy(lse, heads * rows * sizeof(float));
    x->lse = ranks_device(heads * rows * sizeof(float), 0xff);
    x->sinks = r->sinks ? ranks_copy(p->sinks, sizeof(p->sinks)) : NULL;
    x->dsinks = r->sinks ? ranks_device(sizeof(p->sinks), 0xff) : NULL;
    x->bounds = r->sequences != 0 ? ranks_copy(p->bounds, sizeof(p->bounds)) : NULL;
    x->sequences = r->sequences;
    x->ranks = zigzag ? NULL : ranks_copy(p->ranks, sizeof(p->ranks));
    free(lse);
}

static void close_tensors(struct tensors *x)
{
    void *const all[] = {x->given_out, x->given_lse, x->lse, x->sinks, x->dsinks, x->bounds, x->ranks};
    for (int t = 0; t < TENSORS; t++)
        (void)cudaFree(x->x[t]);
    for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++)
        (void)cudaFree(all[i]);
}

static void count(struct run *u, bool right, const char *what, uint32_t rank, uint32_t epoch, uint64_t at, double have,
                  double want)
{
    u->checked++;
    if (!right && u->wrong++ == 0)
        (void)snprintf(u->first, sizeof(u->first), "%s: rank %u epoch %u at %llu: %g, want %g", what, rank, epoch,
                       (unsigned long long)at, have, want);
}

static void check_tensor(struct run *u, uint32_t rank, uint32_t epoch, enum tensor t, const uint32_t *positions,
                         const void *device)
{
    static const char *const names[TENSORS] = {[OUT] = "out", [DQ] = "dq", [DK] = "dk", [DV] = "dv"};
    const struct row *r = &u->at[epoch];
    const struct prs_attention_shape *s = &r->shape;
    const struct problem *p = &u->problem[epoch];
    uint64_t bytes = size_of(s, t) / r->world * 2;
    uint16_t *slice = malloc(bytes);
    (void)cudaMemcpy(slice, device, bytes, cudaMemcpyDeviceToHost);
    pthread_mutex_lock(&u->lock);
    for (uint64_t head = 0; head < (uint64_t)s->batch * heads_of(s, t); head++)
        for (uint32_t at = 0; at < s->seq / r->world; at++)
            for (uint32_t i = 0; i < s->head_dim; i++) {
                uint64_t whole = (head * s->seq + positions[at]) * s->head_dim + i;
                double have = ranks_float(slice[place_of(r, t, head, at) + i]), want = p->x[t][whole];
                double bound = (fabs(want) + p->size[t][whole]) * 0x1.02p-8 + p->rough[t][whole] * 0x1p-15;
                count(u, fabs(have - want) <= (t == OUT ? bound + fabs(want) * 0x1p-8 : bound), names[t], rank, epoch,
                      whole, have, want);
            }
    pthread_mutex_unlock(&u->lock);
    free(slice);
}

static void check_values(struct run *u, uint32_t rank, uint32_t epoch, const uint32_t *positions,
                         const struct tensors *t)
{
    const struct prs_attention_shape *s = &u->at[epoch].shape;
    uint32_t rows = s->seq / u->row->world, heads = s->batch * s->heads_q;
    float *lse = malloc(heads * rows * sizeof(float)), dsinks[8] = {0};
    (void)cudaMemcpy(lse, t->lse, heads * rows * sizeof(float), cudaMemcpyDeviceToHost);
    if (t->dsinks)
        (void)cudaMemcpy(dsinks, t->dsinks, s->heads_q * sizeof(float), cudaMemcpyDeviceToHost);
    pthread_mutex_lock(&u->lock);
    for (uint32_t i = 0; i < heads * rows; i++) {
        float want = u->problem[epoch].lse[i / rows * s->seq + positions[i % rows]];
        count(u, fabsf(lse[i] - want) <= 1e-4f * (1 + fabsf(want)), "lse", rank, epoch, i, (double)lse[i],
              (double)want);
    }
    for (uint32_t h = 0; h < s->heads_q && t->dsinks; h++)
        u->dsinks[epoch][h] += (double)dsinks[h];
    pthread_mutex_unlock(&u->lock);
    free(lse);
}

static int launch(struct prs_attention_plan *forward, struct prs_attention_backward_plan *backward,
                  const struct tensors *t, uint32_t seq, cudaStream_t stream)
{
    struct prs_attention_operands x = {t->x[Q],   t->x[K],      t->x[V],  t->x[OUT],  t->lse,
                                       t->bounds, t->sequences, t->sinks, .seq = seq, .stripe_ranks = t->ranks};
    struct prs_attention_gradients g = {
        t->x[Q],  t->x[K],  t->x[V],   t->given_out, t->given_lse, t->x[DOUT], NULL,       t->x[DQ],
        t->x[DK], t->x[DV], t->bounds, t->sequences, t->sinks,     t->dsinks,  .seq = seq, .stripe_ranks = t->ranks};
    int r = forward ? prs_attention_launch(forward, &x, stream) : 0;
    return r ? r : prs_attention_backward_launch(backward, &g, stream);
}

static int run_epochs(struct run *u, uint32_t rank, struct prs_attention_plan *forward,
                      struct prs_attention_backward_plan *backward)
{
    const struct row *row = u->row;
    uint32_t *positions[MAX_EPOCHS];
    struct tensors t[MAX_EPOCHS];
    cudaStream_t stream;
    int r = 0;
    (void)cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    for (uint32_t e = 0; e < row->epochs; e++) {
        positions[e] = malloc(u->at[e].shape.seq / row->world * sizeof(*positions[e]));
        if (!r)
            r = row->stripes[e] == ZIGZAG ? prs_attention_positions(&u->at[e].shape, rank, row->world, positions[e])
                                          : prs_attention_assigned_positions(&u->at[e].shape, u->problem[e].ranks, rank,
                                                                             row->world, positions[e]);
        open_tensors(&u->at[e], &u->problem[e], row->stripes[e] == ZIGZAG, positions[e], &t[e]);
    }
    (void)cudaDeviceSynchronize();
    for (uint32_t e = 0; e < row->epochs && !r; e++)
        r = launch(forward, backward, &t[e], row->seq[e], stream);
    if (cudaStreamSynchronize(stream) != cudaSuccess && r == 0)
        r = -EIO;
    for (uint32_t e = 0; e < row->epochs && !r; e++) {
        if (forward)
            check_values(u, rank, e, positions[e], &t[e]);
        for (int x = forward ? OUT : DQ; x < TENSORS; x++)
            check_tensor(u, rank, e, x, positions[e], t[e].x[x]);
    }
    for (uint32_t e = 0; e < row->epochs; e++) {
        close_tensors(&t[e]);
        free(positions[e]);
    }
    (void)cudaStreamDestroy(stream);
    return r;
}

static void run_rank(uint32_t rank, struct ranks_self *self, void *user)
{
    struct run *u = user;
    struct prs_fused *ctx = NULL;
    struct prs_attention_plan *forward = NULL;
    struct prs_attention_backward_plan *backward = NULL;
    struct prs_fused_error error;
    int r = ranks_open(self, 0, 60000, &ctx);
    if (!r && !u->row->backward)
        r = prs_attention_plan_open(ctx, &u->row->shape, &u->row->tuning, &forward);
    if (!r)
        r = prs_attention_backward_plan_open(ctx, &u->row->shape, &u->row->tuning, &backward);
    if (!r)
        r = run_epochs(u, rank, forward, backward);
    if (!r)
        r = prs_fused_poll_error(ctx, &error);
    prs_attention_plan_close(forward);
    prs_attention_backward_plan_close(backward);
    prs_fused_close(ctx);
    if (r)
        __atomic_store_n(&u->result, r, __ATOMIC_RELAXED);
}

static void assert_right(const struct row *rows, size_t number)
{
    hopper_setup(8, SMS, 0);
    for (size_t i = 0; i < number; i++) {
        struct run u = {.row = &rows[i]};
        pthread_mutex_init(&u.lock, NULL);
        for (uint32_t e = 0; e < rows[i].epochs; e++) {
            u.at[e] = rows[i];
            u.at[e].shape.seq = rows[i].seq[e] != 0 ? rows[i].seq[e] : rows[i].shape.seq;
            open_problem(&u.at[e], e, &u.problem[e]);
        }
        ranks_run(rows[i].world, run_rank, &u);
        for (uint32_t e = 0; e < rows[i].epochs; e++) {
            const struct problem *p = &u.problem[e];
            for (uint32_t h = 0; h < rows[i].shape.heads_q && rows[i].sinks; h++)
                count(&u, fabs(u.dsinks[e][h] - p->dsinks[h]) <= 1e-5 * p->dsinks_size[h], "dsinks", 0, e, h,
                      u.dsinks[e][h], p->dsinks[h]);
            close_problem(&u.problem[e]);
        }
        cr_assert_eq(u.result, 0, "row %zu: %d: %s", i, u.result, prs_fused_error_text());
        cr_expect(u.wrong == 0 && u.checked > 0, "row %zu: %llu of %llu wrong; %s", i, (unsigned long long)u.wrong,
                  (unsigned long long)u.checked, u.first);
    }
}

/* batch, heads_q, heads_kv, head_dim, seq, causal, heads_first, scale, stripe, window, packed, soft_cap */
Test(attention_striped, several_ranks_are_right, .timeout = 600)
{
    /* Of other lengths in each launch, which may also be shorter than the plan: what a rank needs of which other one
     * changes. */
    ASSERT_RIGHT({2,
                  {1, 2, 1, 64, 1024, 1, 0, 0, 128, 0, 6, 0},
                  3,
                  {{100, 100, 101, 230, 500}, {512, 1000}, {128, 256, 384, 512}},
                  6,
                  .seq = {512, 1024, 512}},
                 {2, {2, 1, 1, 128, 512, 1, 1, 0, 128, 100}, 2});
}

Test(attention_striped, not_causal_is_right, .timeout = 600)
{
    ASSERT_RIGHT({2, {1, 2, 2, 64, 512, 0, 0, 0.2f, 128, 0, 1, 0}, 1, {{200, 505}}, 3},
                 {2, {1, 1, 1, 64, 512, 0, 0, 0, 128, 70}, 1});
}

Test(attention_striped, one_rank_alone_is_right, .timeout = 600)
{
    ASSERT_RIGHT({1, {1, 1, 1, 64, 512, 1, 0, 0, 256, 140, 1}, 1, {{0, 300, 420}}, 3});
}

Test(attention_striped, thousands_of_parts_are_right, .timeout = 600)
{
    ASSERT_RIGHT({2, {1, 1, 1, 64, 512, 1, 0, 0, 128, 0, 1}, 1, .sequences = 256, .every = 2});
}

Test(attention_striped, sinks_are_right, .timeout = 600)
{
    ASSERT_RIGHT({2, {1, 2, 1, 64, 512, 1, 0, 0, 128, 130}, 1, .sinks = true});
}

Test(attention_striped, soft_caps_are_right, .timeout = 600)
{
    ASSERT_RIGHT({2, {1, 2, 1, 64, 512, 1, 0, 0, 128, 0, 0, 2.0f}, 1, .sinks = true});
}

/* Two buffers: a group waits for the credit of one that another rank may not have needed. */
Test(attention_striped, a_ring_of_two_buffers_is_right, .timeout = 600)
{
    ASSERT_RIGHT(
        {2, {3, 1, 1, 64, 512, 1, 0, 0, 128, 60}, 2, .tuning = {.mode = PRS_ATTENTION_RING, .heads_per_step = 1}});
}

/* Launches of one plan in a row. In the second one no rank needs the other, and rank 0 has less to do. */
Test(attention_striped, gradients_of_ranks_that_need_nothing_are_right, .timeout = 600)
{
    ASSERT_RIGHT({2,
                  {1, 4, 4, 64, 1024, 1, 0, 0, 128, 0, 1},
                  3,
                  {{128, 256, 512, 640, 896}, {128, 256, 384, 640, 896}, {128, 256, 512, 640, 896}},
                  6,
                  .backward = true,
                  .tuning = {.heads_per_step = 1}});
}

Test(attention_striped, up_to_eight_ranks_are_right, .timeout = 600)
{
    ASSERT_RIGHT({3, {1, 1, 1, 64, 768, 1, 0, 0, 128, 0, 1}, 2, {{700, 768}, {60, 61, 500}}, 4},
                 {8, {1, 1, 1, 64, 2048, 1, 0, 0, 128, 300}, 1});
}

/* Each launch says which rank has which stripe. */
Test(attention_striped, stripes_that_are_assigned_to_ranks_are_right, .timeout = 600)
{
    ASSERT_RIGHT({2,
                  {1, 2, 1, 64, 1024, 1, 0, 0, 128, 0, 1},
                  3,
                  {{100, 101, 230, 600}, {512, 1000}, {300}},
                  4,
                  .sinks = true,
                  .seq = {1024, 1024, 512},
                  .stripes = {ASSIGNED, ZIGZAG, ROTATED}},
                 {2, {2, 1, 1, 128, 512, 1, 1, 0, 128, 100}, 2, .stripes = {ROTATED, ASSIGNED}},
                 {3, {1, 1, 1, 64, 768, 0, 0, 0, 128, 0, 1}, 1, {{250, 700}}, 2, .stripes = {ROTATED}},
                 {2,
                  {3, 1, 1, 64, 512, 1, 0, 0, 128, 60},
                  2,
                  .stripes = {ROTATED, ASSIGNED},
                  .tuning = {.mode = PRS_ATTENTION_RING, .heads_per_step = 1}},
                 {1, {1, 1, 1, 64, 512, 1, 0, 0, 256, 140}, 1, .stripes = {ASSIGNED}});
}

/* Every access of a launch is checked for its order (memory_order.py). */
Test(attention_striped_order, of_all_that_travels, .timeout = 600)
{
    ASSERT_RIGHT({2,
                  {1, 1, 1, 64, 1024, 1, 0, 0, 128, 0, 1},
                  2,
                  {{300}, {500}},
                  2,
                  .sinks = true,
                  .seq = {1024, 512},
                  .stripes = {ROTATED}});
}
