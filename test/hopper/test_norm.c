/* SPDX-License-Identifier: Apache-2.0 */
/* The norm of a sum's rows, and sums of rows without a product, on emulated GPUs, compared with double precision. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "test/hopper/ranks.h"
#include "tools/hopper/hopper.h"

enum { MOST_EPOCHS = 12, MARGIN = 64, CHECKED_ROWS = 8, KEY_B = 4000, KEY_BIAS, KEY_RESIDUAL, KEY_WEIGHT };

struct norm_case {
    struct prs_gemm_shape shape; /* m: the most rows */
    uint32_t world, nodes, path, sms, epochs, replays;
    const uint32_t *rows; /* of each launch; NULL: shape.m */
    bool bias, residual, in_place, no_weight, no_normed, on_device;
    bool rounded; /* the norm reads C */
    uint32_t scaling;
};

/* What one launch works on, or a copy of it in host memory. */
struct buffers {
    uint8_t *a, *c, *normed, *quantised;
    float *scale;
};

static const float STATIC_SCALE = 0.0123f;

static uint32_t sum_type(const struct norm_case *t)
{
    return t->shape.dtype == PRS_DTYPE_FP16 ? PRS_DTYPE_FP16 : PRS_DTYPE_BF16;
}

static uint32_t result_type(const struct norm_case *t)
{
    return t->shape.c_dtype == PRS_DTYPE_FP32 ? PRS_DTYPE_FP32 : sum_type(t);
}

static uint32_t key_a(uint32_t epoch, uint32_t rank)
{
    return epoch * 16 + rank;
}

static uint32_t launch_rows(const struct norm_case *t, uint32_t epoch)
{
    return t->rows ? t->rows[epoch] : t->shape.m;
}

/* Of C on a rank. */
static uint32_t result_rows(const struct norm_case *t, uint32_t rows)
{
    return t->shape.op == PRS_GEMM_REDUCE_SCATTER ? rows / t->world : rows;
}

/* How far rounding to a type moves x at most. */
static double rounding(uint32_t type, double x)
{
    int bits = type == PRS_DTYPE_FP32 ? 24 : type == PRS_DTYPE_FP16 ? 11 : 8;
    return ldexp(1.001, ilogb(fabs(x) * 1.0001 + 0x1p-14) - bits);
}

static double value_of(uint32_t type, const void *at, uint64_t i)
{
    return type == PRS_DTYPE_FP32 ? ((const float *)at)[i] : ranks_value(type, ((const uint16_t *)at)[i]);
}

/* One rank's part of an element, and how far it may be off. */
static double part_of(const struct norm_case *t, uint32_t epoch, uint32_t rank, uint32_t row, uint32_t column,
                      double *bound)
{
    const struct prs_gemm_shape *s = &t->shape;
    double sum = 0, size = 0;
    if (s->k == 0)
        return ranks_element_of(sum_type(t), key_a(epoch, rank), (uint64_t)row * s->n + column);
    for (uint32_t i = 0; i < s->k; i++) {
        double x = (double)ranks_element_of(sum_type(t), key_a(epoch, rank), (uint64_t)row * s->k + i) *
                   ranks_element_of(sum_type(t), KEY_B + 16 + rank, (uint64_t)column * s->k + i);
        sum += x, size += fabs(x);
    }
    *bound += size * 0x1p-21 + rounding(sum_type(t), sum);
    return sum;
}

/* Computes a row of the sum, before any norm. */
static void sum_row(const struct norm_case *t, uint32_t epoch, uint32_t rank, uint32_t row, double *s, double *bound)
{
    bool alone = t->shape.op == PRS_GEMM_ALONE;
    uint32_t n = t->shape.n, a_row = row;
    if (t->shape.op == PRS_GEMM_REDUCE_SCATTER)
        a_row += rank * result_rows(t, launch_rows(t, epoch));
    for (uint32_t j = 0; j < n; j++) {
        double size = 0;
        s[j] = bound[j] = 0;
        for (uint32_t r = alone ? rank : 0; r < (alone ? rank + 1 : t->world); r++) {
            double part = part_of(t, epoch, r, a_row, j, &bound[j]);
            s[j] += part, size += fabs(part);
        }
        if (t->nodes > 1) /* sums of a node are rounded to travel */
            bound[j] += 2 * rounding(sum_type(t), size);
        if (t->bias)
            s[j] += ranks_element_of(sum_type(t), KEY_BIAS, j);
        if (t->residual)
            s[j] += ranks_element_of(result_type(t), KEY_RESIDUAL, (uint64_t)row * n + j);
        bound[j] += (size + 2) * 0x1p-20;
    }
}

struct norm_row {
    double *y, *bound;
    uint32_t rank, epoch, row, n;
};

static void check_scaled(const struct norm_case *t, const struct buffers *have, const struct norm_row *r)
{
    uint32_t rows = result_rows(t, launch_rows(t, r->epoch)), step = t->scaling == PRS_SCALING_BLOCKS ? 128 : r->n;
    for (uint32_t first = 0; first < r->n; first += step) {
        double largest = 0, off = 0, scale = STATIC_SCALE;
        bool full = false;
        for (uint32_t j = first; j < first + step; j++) {
            largest = fmax(largest, fabs(r->y[j]));
            off = fmax(off, r->bound[j]);
        }
        if (t->scaling != PRS_SCALING_TENSOR) {
            scale = have->scale[t->scaling == PRS_SCALING_ROWS ? r->row : first / 128 * rows + r->row];
            cr_assert(fabs(scale - largest / 448) <= off / 448 + largest * 0x1p-20,
                      "rank %u launch %u row %u: scale %g, %g", r->rank, r->epoch, r->row, scale, largest / 448);
        }
        for (uint32_t j = first; j < first + step; j++) {
            uint8_t bits = have->quantised[(uint64_t)r->row * r->n + j];
            double x = ranks_value(PRS_DTYPE_E4M3, bits) * scale, want = fmax(fmin(r->y[j], 448 * scale), -448 * scale);
            full = full || (bits & 0x7f) == 0x7e;
            cr_assert(fabs(x - want) <= fabs(want) * 0x1.01p-4 + scale * 0x1p-10 + r->bound[j],
                      "rank %u launch %u row %u column %u: quantised %g, %g", r->rank, r->epoch, r->row, j, x, want);
        }
        cr_assert(full || t->scaling == PRS_SCALING_TENSOR, "nothing of row %u from column %u has magnitude 448",
                  r->row, first);
    }
}

/* Some rows of a launch, all columns. */
static void check_rows(const struct norm_case *t, const struct buffers *have, uint32_t rank, uint32_t epoch)
{
    uint32_t n = t->shape.n, rows = result_rows(t, launch_rows(t, epoch)), step = rows / CHECKED_ROWS + 1;
    double *s = malloc(2 * n * sizeof(*s)), *bound = s + n;
    for (uint32_t row = epoch % step; row < rows; row += step) {
        double squares = 0, off = 0, factor;
        sum_row(t, epoch, rank, row, s, bound);
        for (uint32_t j = 0; j < n; j++) {
            double x = value_of(result_type(t), have->c, (uint64_t)row * n + j);
            double last = rounding(result_type(t), s[j]);
            cr_assert(fabs(x - s[j]) <= bound[j] + last, "rank %u launch %u row %u column %u: C %g, %g +- %g", rank,
                      epoch, row, j, x, s[j], bound[j] + last);
            bound[j] += t->rounded ? last : 0;
            squares += s[j] * s[j], off += fabs(s[j]) * bound[j];
        }
        factor = 1 / sqrt(squares / n + 1e-3);
        off /= squares;
        for (uint32_t j = 0; t->shape.norm && j < n; j++) {
            double weight = t->no_weight ? 1 : ranks_element_of(sum_type(t), KEY_WEIGHT, j);
            double x = t->no_normed ? 0 : value_of(sum_type(t), have->normed, (uint64_t)row * n + j), allowed;
            s[j] *= factor * weight;
            bound[j] = bound[j] * factor * fabs(weight) + fabs(s[j]) * (off + 0x1p-20);
            allowed = bound[j] + rounding(sum_type(t), s[j]);
            cr_assert(t->no_normed || fabs(x - s[j]) <= allowed,
                      "rank %u launch %u row %u column %u: normed %g, %g +- %g (HOPPER_SEED=%llu)", rank, epoch, row, j,
                      x, s[j], allowed, (unsigned long long)hopper_seed());
        }
        if (t->scaling)
            check_scaled(t, have, &(struct norm_row){s, bound, rank, epoch, row, n});
    }
    free(s);
}

static struct buffers bytes_end(const struct norm_case *t, uint32_t rows)
{
    uint64_t all = (uint64_t)result_rows(t, rows) * t->shape.n, scales = t->scaling ? result_rows(t, rows) : 0;
    uint64_t blocks = t->scaling == PRS_SCALING_BLOCKS ? t->shape.n / 128 : 1;
    return (struct buffers){.c = (uint8_t *)(all * (result_type(t) == PRS_DTYPE_FP32 ? 4 : 2)),
                            .normed = (uint8_t *)(t->shape.norm && !t->no_normed ? all * 2 : 0),
                            .quantised = (uint8_t *)(t->scaling ? all : 0),
                            .scale = (float *)(scales * blocks * 4)};
}

/* Replaces what a launch wrote by a copy in host memory, and returns a hash of it. Nothing may be written after the
 * result. */
static uint64_t fetch(void **host, uint64_t bytes, uint64_t most, uint64_t hash)
{
    uint64_t room = most + MARGIN;
    uint8_t *to = malloc(room);
    cr_assert_eq(cudaMemcpy(to, *host, room, cudaMemcpyDeviceToHost), cudaSuccess);
    for (uint64_t i = bytes; i < room; i++)
        cr_assert_eq(to[i], 0xff, "byte %llu after %llu was written", (unsigned long long)i, (unsigned long long)bytes);
    for (uint64_t i = 0; i < bytes; i++)
        hash = (hash ^ to[i]) * 0x100000001b3ull;
    *host = to;
    return hash;
}

/* Ranks of an all-reduce have the same bits. */
static void check_launch(const struct norm_case *t, struct ranks_self *self, const struct buffers *x, uint32_t epoch)
{
    uint32_t rows = launch_rows(t, epoch);
    struct buffers have = *x, end = bytes_end(t, rows), most = bytes_end(t, t->shape.m);
    uint64_t hash = 0xcbf29ce484222325ull, hashes[RANKS_MAX];
    if (t->on_device) /* further rows are undefined up to a multiple of 64 */
        end.c = most.c;
    hash = fetch((void **)&have.c, (uint64_t)end.c, (uint64_t)most.c, hash);
    if (end.normed)
        hash = fetch((void **)&have.normed, (uint64_t)end.normed, (uint64_t)most.normed, hash);
    if (end.quantised)
        hash = fetch((void **)&have.quantised, (uint64_t)end.quantised, (uint64_t)most.quantised, hash);
    if (t->scaling && t->scaling != PRS_SCALING_TENSOR)
        hash = fetch((void **)&have.scale, (uint64_t)end.scale, (uint64_t)most.scale, hash);
    cr_assert_eq(ranks_allgather(self, &hash, hashes, sizeof(hash)), 0);
    for (uint32_t r = 0; r < t->world && t->shape.op == PRS_GEMM_ALLREDUCE; r++)
        cr_assert_eq(hashes[r], hash, "launch %u: ranks %u and %u differ", epoch, r, self->rank);
    check_rows(t, &have, self->rank, epoch);
    free(have.c);
    if (end.normed)
        free(have.normed);
    if (end.quantised)
        free(have.quantised);
    if (t->scaling && t->scaling != PRS_SCALING_TENSOR)
        free(have.scale);
}

/* ---- launches ---- */
struct launches {
    const struct norm_case *t;
    struct prs_fused *ctx;
    struct prs_gemm_plan *plan;
    struct buffers x[MOST_EPOCHS];
    void *b, *bias, *residual, *weight;
    uint32_t *device_rows;
};

static void *symmetric(struct prs_fused *ctx, const struct norm_case *t, uint64_t bytes)
{
    void *at = NULL;
    if (t->shape.c_anywhere || t->shape.op != PRS_GEMM_ALLREDUCE)
        return ranks_device(bytes, 0xff);
    cr_assert_eq(prs_fused_alloc(ctx, bytes, &at), 0);
    ranks_fill(at, 0xff, bytes);
    return at;
}

/* in_place: C initially holds the residual. Without a product, the normalised rows replace A. */
static void make_buffers(struct launches *l, uint32_t rank)
{
    const struct norm_case *t = l->t;
    struct buffers most = bytes_end(t, t->shape.m);
    uint64_t n = t->shape.n, elements = (uint64_t)result_rows(t, t->shape.m) * n;
    uint64_t a_elements = (uint64_t)t->shape.m * (t->shape.k ? t->shape.k : n);
    l->b = t->shape.k ? ranks_upload_of(sum_type(t), KEY_B + 16 + rank, n * t->shape.k) : NULL;
    l->bias = t->bias ? ranks_upload_of(sum_type(t), KEY_BIAS, n) : NULL;
    l->residual = t->residual ? ranks_upload_of(result_type(t), KEY_RESIDUAL, elements) : NULL;
    l->weight = t->no_weight || !t->shape.norm ? NULL : ranks_upload_of(sum_type(t), KEY_WEIGHT, n);
    l->device_rows = ranks_device(MOST_EPOCHS * 4, 0);
    for (uint32_t e = 0; e < t->epochs; e++) {
        struct buffers *x = &l->x[e];
        uint32_t rows = launch_rows(t, e);
        void *a = ranks_upload_of(sum_type(t), key_a(e, rank), a_elements);
        x->a = a;
        x->c = symmetric(l->ctx, t, (uint64_t)most.c + MARGIN);
        x->normed = most.normed ? ranks_device((uint64_t)most.normed + MARGIN, 0xff) : NULL;
        x->quantised = most.quantised ? ranks_device((uint64_t)most.quantised + MARGIN, 0xff) : NULL;
        x->scale = t->scaling ? ranks_device((uint64_t)most.scale + MARGIN, 0xff) : NULL;
        if (t->scaling == PRS_SCALING_TENSOR)
            (void)cudaMemcpy(x->scale, &STATIC_SCALE, 4, cudaMemcpyHostToDevice);
        (void)cudaMemcpy(l->device_rows + e, &rows, 4, cudaMemcpyHostToDevice);
        if (!t->in_place)
            continue;
        (void)cudaMemcpy(x->c, l->residual, (uint64_t)bytes_end(t, rows).c, cudaMemcpyDeviceToDevice);
        if (t->shape.k == 0) {
            (void)cudaMemcpy(x->normed, a, (uint64_t)rows * n * 2, cudaMemcpyDeviceToDevice);
            x->a = x->normed;
        }
    }
    (void)cudaDeviceSynchronize();
}

static void enqueue(const struct launches *l, cudaStream_t stream)
{
    const struct norm_case *t = l->t;
    for (uint32_t e = 0; e < t->epochs; e++) {
        const struct buffers *x = &l->x[e];
        struct prs_gemm_operands o = {.a = x->a,
                                      .b = l->b,
                                      .c = x->c,
                                      .bias = l->bias,
                                      .residual = t->in_place ? x->c : l->residual,
                                      .m = t->rows && !t->on_device ? t->rows[e] : 0,
                                      .m_on_device = t->on_device ? l->device_rows + e : NULL,
                                      .norm_weight = l->weight,
                                      .norm_eps = t->shape.norm ? 1e-3f : 0,
                                      .normed = x->normed,
                                      .quantised = x->quantised,
                                      .quantised_scale = x->scale,
                                      .quantised_scaling = t->scaling};
        cr_assert_eq(prs_gemm_launch(l->plan, &o, stream), 0, "%s", prs_fused_error_text());
    }
}

static void launch_all(const struct launches *l)
{
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cr_assert_eq(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    if (l->t->replays == 0) {
        enqueue(l, stream);
    } else {
        cr_assert_eq(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
        enqueue(l, stream);
        cr_assert_eq(cudaStreamEndCapture(stream, &graph), cudaSuccess);
        cr_assert_eq(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
        for (uint32_t i = 0; i < l->t->replays; i++)
            cr_assert_eq(cudaGraphLaunch(exec, stream), cudaSuccess);
    }
    cr_assert_eq(cudaStreamSynchronize(stream), cudaSuccess);
}

/* All launches are enqueued before one is waited for. */
static void run_rank(uint32_t rank, struct ranks_self *self, void *user)
{
    const struct norm_case *t = user;
    struct prs_gemm_tuning tuning = {.path = t->path};
    struct prs_fused_error error = {0};
    struct launches l = {.t = t};
    hopper_setup(8, t->sms, 0);
    cr_assert_eq(ranks_open(self, t->nodes, 60000, &l.ctx), 0);
    cr_assert_eq(prs_gemm_plan_open(l.ctx, &t->shape, &tuning, &l.plan), 0, "%s", prs_fused_error_text());
    make_buffers(&l, rank);
    launch_all(&l);
    cr_assert_eq(prs_fused_poll_error(l.ctx, &error), 0, "%s", error.text);
    for (uint32_t e = 0; e < t->epochs; e++)
        check_launch(t, self, &l.x[e], e);
    prs_gemm_plan_close(l.plan);
    for (uint32_t e = 0; e < t->epochs && !t->shape.c_anywhere && t->shape.op == PRS_GEMM_ALLREDUCE; e++)
        prs_fused_free(l.ctx, l.x[e].c);
    prs_fused_close(l.ctx);
}

static void assert_right(struct norm_case t)
{
    t.sms = t.sms ? t.sms : 4;
    t.epochs = t.epochs ? t.epochs : 1;
    t.path = t.path ? t.path : PRS_GEMM_PATH_UNFUSED;
    t.nodes = t.nodes ? t.nodes : 1;
    hopper_setup(8, t.sms, 0);
    ranks_run(t.world, run_rank, &t);
    cr_assert_eq(hopper_late_loads(), 0);
}

#define SUM(most_rows, columns)                                                                                        \
    {                                                                                                                  \
        .op = PRS_GEMM_ALLREDUCE, .m = most_rows, .n = columns, .b_transposed = 1, .c_anywhere = 1,                    \
        .norm = PRS_NORM_RMS                                                                                           \
    }

/* Many short launches, so that a fast rank is a launch ahead of a slow one. */
Test(norm, rows_are_normalised, .timeout = 600)
{
    static const uint32_t ROWS[] = {130, 5, 1, 16, 1, 2, 130, 3, 16, 1};
    assert_right((struct norm_case){
        .shape = SUM(130, 264), .world = 2, .rows = ROWS, .epochs = 10, .residual = true, .replays = 2});
    /* a row is shared by the CTAs of a cluster, not all of which have as many columns */
    assert_right((struct norm_case){
        .shape = SUM(16, 2696), .world = 2, .sms = 16, .rows = ROWS + 3, .epochs = 3, .residual = true, .bias = true});
    /* a thread has several items */
    assert_right((struct norm_case){.shape = SUM(3, 4232), .world = 2, .residual = true});
}

/* C may be the residual's memory, and the normalised rows may be written over the rank's part of the sum. */
Test(norm, rows_are_normalised_in_place, .timeout = 600)
{
    static const uint32_t ROWS[] = {7, 1, 7};
    struct norm_case t = {
        .shape = SUM(7, 1160), .world = 2, .sms = 16, .rows = ROWS, .epochs = 3, .residual = true, .in_place = true};
    assert_right(t);
    t.shape.dtype = PRS_DTYPE_FP16, t.no_weight = true;
    assert_right(t);
}

Test(norm, rows_are_quantised, .timeout = 600)
{
    static const uint32_t ROWS[] = {5, 1, 16};
    struct norm_case t = {.shape = SUM(16, 2176), .world = 2, .sms = 16, .rows = ROWS, .epochs = 3, .residual = true};
    for (t.scaling = PRS_SCALING_TENSOR; t.scaling <= PRS_SCALING_BLOCKS; t.scaling++, t.no_normed = !t.no_normed)
        assert_right(t);
}

/* 21 rows take two hops, after which C is normalised; fewer than 20 take one. C and residual in fp32. */
Test(norm, eight_ranks_normalise_after_two_hops, .timeout = 600)
{
    static const uint32_t ROWS[] = {16, 1, 21, 9};
    struct norm_case t = {
        .shape = SUM(21, 2048), .world = 8, .sms = 16, .rows = ROWS, .epochs = 4, .residual = true, .rounded = true};
    assert_right(t);
    t.shape.c_dtype = PRS_DTYPE_FP32, t.scaling = PRS_SCALING_ROWS, t.epochs = 1, t.sms = 4;
    assert_right(t);
}

Test(norm, what_follows_a_product_is_normalised, .timeout = 600)
{
    struct prs_gemm_shape s = SUM(12, 264);
    s.k = 40;
    assert_right((struct norm_case){.shape = s, .world = 3, .epochs = 3, .residual = true, .bias = true});
    s.c_anywhere = 0;
    assert_right((struct norm_case){.shape = s, .world = 2, .epochs = 2, .residual = true});
    s.op = PRS_GEMM_REDUCE_SCATTER;
    assert_right((struct norm_case){.shape = s, .world = 2, .epochs = 3, .residual = true});
    s.op = PRS_GEMM_ALONE;
    assert_right((struct norm_case){.shape = s, .world = 2, .rounded = true, .residual = true});
}

Test(norm, a_fused_product_is_normalised_after_it, .timeout = 600)
{
    static const uint32_t ROWS[] = {300, 512};
    struct norm_case t = {.shape = SUM(512, 264),
                          .world = 2,
                          .path = PRS_GEMM_PATH_FUSED,
                          .rounded = true,
                          .residual = true,
                          .rows = ROWS,
                          .epochs = 2};
    t.shape.k = 24;
    assert_right(t); /* of memory that all plans share, and with a copy from there */
    t.shape.c_anywhere = 0, t.on_device = true;
    assert_right(t);
    t.shape.op = PRS_GEMM_REDUCE_SCATTER, t.on_device = false;
    assert_right(t);
}

/* Above 16 MB of sums the ranks read each other's memory. */
Test(norm, many_rows_and_few_are_normalised_in_turn, .timeout = 600)
{
    static const uint32_t ROWS[] = {1040, 3};
    assert_right((struct norm_case){
        .shape = SUM(1040, 8192), .world = 2, .rows = ROWS, .epochs = 2, .residual = true, .rounded = true});
}

Test(norm, a_rank_alone_normalises, .timeout = 600)
{
    assert_right((struct norm_case){.shape = SUM(5, 264), .world = 1, .epochs = 2, .residual = true, .rounded = true});
}

/* Each rank has one cluster at a time: those that run must be the first, and wait for none that comes later. */
Test(norm, a_norm_needs_one_resident_cluster, .timeout = 600)
{
    hopper_limit_clusters(1);
    assert_right((struct norm_case){.shape = SUM(30, 264), .world = 3, .sms = 16, .epochs = 4, .residual = true});
    assert_right((struct norm_case){.shape = SUM(16, 2048), .world = 8, .sms = 16, .epochs = 2, .residual = true});
}

/* ---- sums without a product or a norm ---- */
Test(norm, rows_that_are_there_are_summed, .timeout = 600)
{
    static const uint32_t ROWS[] = {130, 2, 16, 130};
    struct norm_case t = {
        .shape = SUM(130, 264), .world = 2, .rows = ROWS, .epochs = 4, .residual = true, .replays = 2};
    t.shape.norm = PRS_NORM_NONE;
    assert_right(t);
    t.shape.n = 37, t.bias = true, t.residual = false;
    assert_right(t);
    t.shape.op = PRS_GEMM_REDUCE_SCATTER;
    assert_right(t);
}

/* ---- with every access checked for its order ---- */
Test(norm_order, of_rows, .timeout = 600)
{
    static const uint32_t ROWS[] = {5, 1, 5};
    assert_right((struct norm_case){.shape = SUM(5, 1160),
                                    .world = 2,
                                    .sms = 16,
                                    .rows = ROWS,
                                    .epochs = 3,
                                    .residual = true,
                                    .in_place = true,
                                    .scaling = PRS_SCALING_ROWS});
    assert_right(
        (struct norm_case){.shape = SUM(41, 1024), .world = 8, .residual = true, .rounded = true}); /* two hops */
}

/* ---- several nodes: the real transport, over any verbs device (softnic in the suite) ---- */
Test(norm_nodes, rows_are_summed_and_normalised, .timeout = 600)
{
    static const uint32_t ROWS[] = {130, 4};
    struct norm_case t = {
        .shape = SUM(130, 264), .world = 4, .nodes = 2, .rows = ROWS, .epochs = 2, .residual = true, .rounded = true};
    ranks_need_a_device();
    assert_right(t);
    t.shape.norm = PRS_NORM_NONE, t.rounded = false;
    assert_right(t);
}
