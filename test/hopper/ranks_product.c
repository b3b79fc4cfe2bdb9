/* SPDX-License-Identifier: Apache-2.0 */
/* A product of all ranks: its operands, its launches, and the check of its results. */
#include "test/hopper/ranks.h"

#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "tools/hopper/hopper.h"
#include "transport/util/clock.h"

enum { SAMPLES = 3000, FEW_SAMPLES = 200 }; /* few: of each of many launches */

struct multiply {
    const struct ranks_product *p;
    struct ranks_verdict *v;
    pthread_mutex_t lock; /* protects *v */
};

static uint32_t key_a(const struct ranks_product *p, uint32_t epoch, uint32_t rank)
{
    return (epoch * 64 + rank * 2) | (p->positive ? RANKS_POSITIVE : 0);
}

static uint32_t key_b(const struct ranks_product *p, uint32_t rank)
{
    return (4096 + rank) | (p->positive ? RANKS_POSITIVE : 0);
}

enum { KEY_SCALE_B = 30000 }; /* and the rank */

/* All ranks of an all-gather have the same scale of A, if it is only one. */
static uint32_t key_scale_a(const struct ranks_product *p, uint32_t epoch, uint32_t rank)
{
    bool same = p->shape.op == PRS_GEMM_ALLGATHER && p->shape.scaling == PRS_SCALING_TENSOR;
    return 20000 + epoch * 64 + (same ? 0 : rank);
}

/* All ranks of an all-reduce have the same bias and the same residual. */
static uint32_t key_bias(const struct ranks_product *p, uint32_t rank)
{
    return 5000 + (p->shape.op == PRS_GEMM_ALLREDUCE ? 0 : rank);
}

static uint32_t key_residual(const struct ranks_product *p, uint32_t rank)
{
    return 6000 + (p->shape.op == PRS_GEMM_ALLREDUCE ? 0 : rank);
}

/* Elements from one row to the next. */
static uint64_t pitch_of(uint32_t ld, uint32_t columns)
{
    return ld != 0 ? ld : columns;
}

/* Of C. */
static uint32_t columns_of(const struct ranks_product *p)
{
    return p->shape.gated ? p->shape.n / 2 : p->shape.n;
}

static uint64_t rows_of(const struct ranks_product *p, enum prs_gemm_op split)
{
    return p->shape.op == split ? p->shape.m / p->world : p->shape.m;
}

static bool is_scaled(const struct ranks_product *p)
{
    return p->shape.dtype == PRS_DTYPE_E4M3;
}

/* The type of sums, of the bias, and of C where that is not fp32. */
static uint32_t sum_type(const struct ranks_product *p)
{
    return is_scaled(p) ? PRS_DTYPE_BF16 : p->shape.dtype;
}

/* Relative error of one rounding to the type of sums. */
static double rounding(const struct ranks_product *p)
{
    return p->shape.dtype == PRS_DTYPE_FP16 ? 0x1.02p-11 : 0x1.02p-8;
}

static bool is_wide(const struct ranks_product *p)
{
    return p->shape.c_dtype == PRS_DTYPE_FP32;
}

/* The same of the last rounding. Unfused, a gated product is rounded before it is finished. */
static double last_rounding(const struct ranks_product *p)
{
    return is_wide(p) && !p->shape.gated ? 0x1.02p-24 : rounding(p);
}

/* An element of A or B. */
static float input(const struct ranks_product *p, uint32_t key, uint64_t at)
{
    return ranks_element_of(p->shape.dtype, key, at);
}

/* One of the residual, which has the type of C. */
static float residual_element(const struct ranks_product *p, uint32_t key, uint64_t at)
{
    return ranks_element_of(is_wide(p) ? PRS_DTYPE_FP32 : sum_type(p), key, at);
}

/* The node of the rank that adds up this element; every other node rounds its partial sum. The fused and the
 * unfused all-reduce assign elements to the same ranks wherever both can run. */
static uint32_t owner_node(const struct ranks_product *p, uint32_t rank, uint64_t element)
{
    uint64_t each = ((uint64_t)p->shape.m * columns_of(p) + p->world - 1) / p->world;
    uint32_t owner = p->shape.op == PRS_GEMM_ALLREDUCE ? (uint32_t)(element / ((each + 7) / 8 * 8)) : rank;
    return owner / (p->world / p->nodes);
}

static double activated(uint32_t activation, double x)
{
    switch (activation) {
    case PRS_ACTIVATION_RELU:
        return x > 0 ? x : 0;
    case PRS_ACTIVATION_GELU:
        return x * (1 + erf(x / sqrt(2))) / 2;
    case PRS_ACTIVATION_GELU_TANH:
        return x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))) / 2;
    case PRS_ACTIVATION_SILU:
        return x / (1 + exp(-x));
    default:
        return x;
    }
}

/* A number, and how far a right result may be from it. */
struct estimate {
    double value, bound;
};

static double bias_of(const struct ranks_product *p, uint32_t rank, uint64_t column)
{
    return p->bias ? ranks_element_of(sum_type(p), key_bias(p, rank), column) : 0;
}

/* Applies the epilogue to a sum; up: of the same column, if gated. The steepest activation multiplies an error by 1.13.
 * The unfused path also rounds what it adds up in between. */
static struct estimate finished(const struct ranks_product *p, uint32_t rank, uint64_t row, uint64_t column,
                                struct estimate sum, struct estimate up)
{
    double bias = bias_of(p, rank, column), x = sum.value + bias, bound = sum.bound, size = fabs(bias);
    if (!p->bias && p->residual == RANKS_NO_RESIDUAL && p->shape.activation == PRS_ACTIVATION_NONE && !p->shape.gated)
        return sum;
    x = activated(p->shape.activation, x);
    if (p->shape.gated) {
        double factor = up.value + bias_of(p, rank, columns_of(p) + column);
        bound = bound * (fabs(factor) + up.bound) + fabs(x) * up.bound;
        x *= factor;
    }
    if (p->residual != RANKS_NO_RESIDUAL) {
        double residual =
            residual_element(p, key_residual(p, rank), row * pitch_of(p->shape.ldc, columns_of(p)) + column);
        x += residual, size += fabs(residual);
    }
    return (struct estimate){x, bound * 1.15 + (fabs(x) + size) * last_rounding(p) + 0x1p-18};
}

/* Where a sum over K finds its operands: number i of K at start + i * step. */
struct operand {
    uint32_t key;
    uint64_t start, step;
};

static struct estimate exact_sum(const struct ranks_product *p, const struct operand *a, const struct operand *b)
{
    double sum = 0, magnitude = 0;
    for (uint64_t i = 0; i < p->shape.k; i++) {
        double x = (double)input(p, a->key, a->start + i * a->step) * input(p, b->key, b->start + i * b->step);
        sum += x;
        magnitude += fabs(x);
    }
    return (struct estimate){sum, magnitude * 0x1p-21};
}

static double scale(uint32_t key, uint64_t at)
{
    return 1 + 0.75 * ranks_element_of(PRS_DTYPE_FP32, key, at);
}

/* Rows of A on a rank, of a launch as the host knows it. */
static uint64_t scaled_rows(const struct ranks_product *p)
{
    return p->scale_a_pitch != 0 ? p->scale_a_pitch : rows_of(p, PRS_GEMM_ALLGATHER);
}

/* The scales of one row of A and one column of B, at a place of K. */
static double scale_of(const struct ranks_product *p, uint32_t key_a, uint32_t key_b, uint64_t row, uint64_t column,
                       uint64_t k)
{
    uint64_t block = k / 128;
    if (p->shape.scaling == PRS_SCALING_BLOCKS)
        return scale(key_a, block * scaled_rows(p) + row) * scale(key_b, column / 128 * (p->shape.k / 128) + block);
    return p->shape.scaling == PRS_SCALING_TENSOR ? scale(key_a, 0) * scale(key_b, 0)
                                                  : scale(key_a, row) * scale(key_b, column);
}

/* The sum of e4m3, of this row of the rank's A, with what the tensor cores may lose. Scaling rounds a few times in
 * fp32. */
static struct estimate scaled_sum(const struct ranks_product *p, const struct operand *a, const struct operand *b,
                                  uint32_t scale_a, uint32_t scale_b, uint64_t row, uint64_t column)
{
    bool promotes = !p->shape.fast_accumulation, blocks = p->shape.scaling == PRS_SCALING_BLOCKS;
    double products[32], factor = blocks ? 1 : scale_of(p, scale_a, scale_b, row, column, 0), magnitude = 0;
    struct ranks_fp8_sum s = {0};
    for (uint64_t i = 0; i < p->shape.k; i += 32) {
        uint32_t count = p->shape.k - i < 32 ? (uint32_t)(p->shape.k - i) : 32;
        for (uint32_t j = 0; j < count; j++)
            products[j] = (double)input(p, a->key, a->start + i + j) * input(p, b->key, b->start + i + j);
        ranks_fp8_add(&s, products, count);
        if ((promotes && i % 128 == 96) || i + 32 >= p->shape.k) {
            double held = blocks ? scale_of(p, scale_a, scale_b, row, column, i) : 1;
            magnitude += fabs(s.held * held);
            ranks_fp8_promote(&s, held);
        }
    }
    return (struct estimate){s.sum * factor, (s.lost + magnitude * 0x1p-21) * factor};
}

/* Returns one element of the product, which the owner of the element of C `result` adds up. The error that is allowed:
 * one rounding of each partial sum, of the sum of each other node and of the result, and fp32 accumulation. */
static struct estimate product(const struct ranks_product *p, uint32_t rank, uint32_t epoch, uint64_t row,
                               uint64_t column, uint64_t result)
{
    const struct prs_gemm_shape *s = &p->shape;
    bool reduces = s->op == PRS_GEMM_REDUCE_SCATTER || s->op == PRS_GEMM_ALLREDUCE;
    uint64_t a_row = row;
    double total = 0, partials = 0, lost = 0, node = 0;
    uint32_t locals = p->world / p->nodes, owner = owner_node(p, rank, result);
    if (s->op == PRS_GEMM_REDUCE_SCATTER)
        a_row += rank * rows_of(p, PRS_GEMM_REDUCE_SCATTER);
    for (uint32_t t = 0; t < (reduces ? p->world : 1); t++) {
        uint32_t a_rank = reduces ? t : rank, b_rank = reduces ? t : rank;
        uint64_t r = a_row;
        struct operand a, b;
        struct estimate sum;
        if (s->op == PRS_GEMM_ALLGATHER) {
            a_rank = (uint32_t)(row / (s->m / p->world));
            r = row % (s->m / p->world);
        }
        a = (struct operand){key_a(p, epoch, a_rank), r * pitch_of(s->lda, s->k), 1};
        b = s->b_transposed ? (struct operand){key_b(p, b_rank), column * pitch_of(s->ldb, s->k), 1}
                            : (struct operand){key_b(p, b_rank), column, pitch_of(s->ldb, s->n)};
        sum = is_scaled(p) ? scaled_sum(p, &a, &b, key_scale_a(p, epoch, a_rank), KEY_SCALE_B + b_rank, r, column)
                           : exact_sum(p, &a, &b);
        lost += sum.bound;
        total += sum.value;
        partials += reduces ? fabs(sum.value) : 0;
        node = t % locals == 0 ? sum.value : node + sum.value;
        if (reduces && t % locals == locals - 1 && t / locals != owner)
            partials += fabs(node);
    }
    return (struct estimate){total, fabs(total) * last_rounding(p) + partials * rounding(p) + lost};
}

/* Returns one element of C. */
static struct estimate reference(const struct ranks_product *p, uint32_t rank, uint32_t epoch, uint64_t row,
                                 uint64_t column)
{
    uint64_t columns = columns_of(p), result = row * columns + column;
    struct estimate sum = product(p, rank, epoch, row, column, result), up = {0, 0};
    if (p->shape.gated)
        up = product(p, rank, epoch, row, columns + column, result);
    return finished(p, rank, row, column, sum, up);
}

/* Element i of C, whatever its type. */
static double result_element(const struct ranks_product *p, const void *c, uint64_t i)
{
    return is_wide(p) ? ((const float *)c)[i] : ranks_value(sum_type(p), ((const uint16_t *)c)[i]);
}

/* The gaps between and after rows of C hold what they held before a launch: the residual, or not-a-numbers. */
static bool is_untouched(const struct ranks_product *p, uint32_t rank, const void *c, uint64_t i)
{
    double have = result_element(p, c, i);
    return p->residual == RANKS_RESIDUAL_IS_C ? have == residual_element(p, key_residual(p, rank), i) : isnan(have);
}

/* A result has a gap after it. */
static uint64_t result_room(const struct ranks_product *p)
{
    return (rows_of(p, PRS_GEMM_REDUCE_SCATTER) * pitch_of(p->shape.ldc, columns_of(p)) * (is_wide(p) ? 4 : 2) + 511) /
           256 * 256;
}

/* Beyond the launch's rows nothing may be written, if the host has given their number; else beyond the most rows. */
static void check_result(struct multiply *m, uint32_t rank, uint32_t epoch, const void *c)
{
    struct ranks_product launch = *m->p;
    const struct ranks_product *p = &launch;
    uint64_t columns = columns_of(p), pitch = pitch_of(p->shape.ldc, (uint32_t)columns);
    uint64_t most = rows_of(p, PRS_GEMM_REDUCE_SCATTER) * pitch;
    uint64_t room = result_room(p) / (is_wide(p) ? 4 : 2), rows, count, step, checked = 0, beyond = 0;
    launch.shape.m = p->rows ? p->rows[epoch] : p->shape.m;
    rows = rows_of(p, PRS_GEMM_REDUCE_SCATTER), count = rows * columns;
    step = count / (p->epochs > 16 ? FEW_SAMPLES : SAMPLES) + 1;
    char first[160] = "";
    for (uint64_t i = 0; i < count; i++) {
        struct estimate want;
        double have = result_element(p, c, i / columns * pitch + i % columns);
        if (!isnan(have) && (i + epoch * 7 + i / columns) % step != 0)
            continue;
        checked++;
        want = reference(p, rank, epoch, i / columns, i % columns);
        if (fabs(have - want.value) <= want.bound)
            continue;
        if (beyond++ == 0)
            (void)snprintf(first, sizeof(first), "rank %u epoch %u row %llu column %llu: %g, want %g +- %g", rank,
                           epoch, (unsigned long long)(i / columns), (unsigned long long)(i % columns), have,
                           want.value, want.bound);
        if (beyond > SAMPLES)
            break;
    }
    for (uint64_t i = 0; i < rows * pitch; i++)
        if (i % pitch >= columns && !is_untouched(p, rank, c, i) && beyond++ == 0)
            (void)snprintf(first, sizeof(first), "rank %u epoch %u row %llu: the gap after column %u was written", rank,
                           epoch, (unsigned long long)(i / pitch), (uint32_t)columns);
    for (uint64_t i = p->on_device ? most : rows * pitch; i < room; i++)
        if (!is_untouched(p, rank, c, i) && beyond++ == 0)
            (void)snprintf(first, sizeof(first), "rank %u epoch %u: element %llu after %llu is written", rank, epoch,
                           (unsigned long long)i, (unsigned long long)count);
    pthread_mutex_lock(&m->lock);
    m->v->checked += checked;
    if (m->v->beyond == 0 && beyond != 0)
        memcpy(m->v->first, first, sizeof(first));
    m->v->beyond += beyond;
    pthread_mutex_unlock(&m->lock);
}

/* The gathered A must be that of the ranks, and nothing after the launch's rows may be written if the host has given
 * their number. */
static void check_kept(struct multiply *m, uint32_t rank, uint32_t epoch, const void *have)
{
    const struct ranks_product *p = m->p;
    uint64_t k = p->shape.k, pitch = pitch_of(p->shape.lda, p->shape.k), beyond = 0, first = 0;
    uint64_t rows = p->rows ? p->rows[epoch] : p->shape.m, all = p->on_device ? rows : p->shape.m + 1;
    for (uint64_t i = 0; i < all * k; i++) {
        uint64_t row = i / k, each = rows / p->world;
        uint16_t want = row < rows ? ranks_bits(p->shape.dtype, input(p, key_a(p, epoch, (uint32_t)(row / each)),
                                                                      row % each * pitch + i % k))
                                   : 0xffff;
        bool right = is_scaled(p) ? ((const uint8_t *)have)[i] == (uint8_t)want : ((const uint16_t *)have)[i] == want;
        if (!right && beyond++ == 0)
            first = i;
    }
    pthread_mutex_lock(&m->lock);
    if (m->v->beyond == 0 && beyond != 0)
        (void)snprintf(m->v->first, sizeof(m->v->first), "rank %u epoch %u: row %llu column %llu of the gathered A",
                       rank, epoch, (unsigned long long)(first / k), (unsigned long long)(first % k));
    m->v->beyond += beyond;
    pthread_mutex_unlock(&m->lock);
}

/* The launches of one rank. */
struct launches {
    struct prs_gemm_plan *plan;
    void *a[RANKS_EPOCHS_MAX], *b, *c[RANKS_EPOCHS_MAX], *kept[RANKS_EPOCHS_MAX], *bias, *residual;
    float *scale_a[RANKS_EPOCHS_MAX], *scale_b;
    uint32_t *rows; /* on the device */
    cudaStream_t stream;
};

/* For pauses.py. */
static int await_and_print(const struct launches *l, uint32_t epoch, uint64_t begin_ns)
{
    if (cudaStreamSynchronize(l->stream) != cudaSuccess)
        return -EIO;
    printf("launch %u took %.1f ms\n", epoch, (double)(prs_clock_ns() - begin_ns) / 1e6);
    (void)fflush(stdout);
    return 0;
}

/* All epochs are enqueued before any is waited for. */
static int enqueue(const struct ranks_product *p, const struct launches *l)
{
    bool timed = getenv("PRS_TEST_LAUNCH_TIMES");
    int r = 0;
    for (uint32_t e = 0; e < p->epochs && r == 0; e++) {
        uint64_t begin_ns = prs_clock_ns();
        r = prs_gemm_launch(
            l->plan,
            &(struct prs_gemm_operands){.a = l->a[e],
                                        .b = l->b,
                                        .c = l->c[e],
                                        .bias = l->bias,
                                        .residual = p->residual == RANKS_RESIDUAL_IS_C ? l->c[e] : l->residual,
                                        .gathered = l->kept[e],
                                        .scale_a = l->scale_a[e],
                                        .scale_b = l->scale_b,
                                        .scale_a_pitch = p->scale_a_pitch,
                                        .m = p->rows && !p->on_device ? p->rows[e] : 0,
                                        .m_on_device = p->on_device ? l->rows + e : NULL},
            l->stream);
        if (r == 0 && timed)
            r = await_and_print(l, e, begin_ns);
    }
    return r;
}

static int enqueue_replays(const struct ranks_product *p, const struct launches *l)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    int r;
    if (cudaStreamBeginCapture(l->stream, cudaStreamCaptureModeThreadLocal) != cudaSuccess)
        return -EIO;
    r = enqueue(p, l);
    if (cudaStreamEndCapture(l->stream, &graph) != cudaSuccess || cudaGraphInstantiate(&exec, graph, 0) != cudaSuccess)
        return -EIO;
    for (uint32_t i = 0; i < p->replays && r == 0; i++)
        r = cudaGraphLaunch(exec, l->stream) == cudaSuccess ? 0 : -EIO;
    if (cudaStreamSynchronize(l->stream) != cudaSuccess && r == 0)
        r = -EIO;
    (void)cudaGraphExecDestroy(exec);
    (void)cudaGraphDestroy(graph);
    return r;
}

/* Rows of blocks: as many as K has blocks; else the scales are one row. */
static float *upload_scales(uint32_t key, uint64_t rows, uint64_t columns)
{
    uint64_t count = rows * columns;
    float *host = malloc(count * sizeof(*host)), *device = NULL;
    for (uint64_t i = 0; i < count; i++)
        host[i] = (float)scale(key, i);
    if (cudaMalloc((void **)&device, count * sizeof(*host)) != cudaSuccess ||
        cudaMemcpy(device, host, count * sizeof(*host), cudaMemcpyHostToDevice) != cudaSuccess)
        abort();
    free(host);
    return device;
}

static void upload_all_scales(const struct ranks_product *p, uint32_t rank, struct launches *l)
{
    const struct prs_gemm_shape *s = &p->shape;
    bool blocks = s->scaling == PRS_SCALING_BLOCKS, one = s->scaling == PRS_SCALING_TENSOR;
    if (!is_scaled(p))
        return;
    for (uint32_t e = 0; e < p->epochs; e++)
        l->scale_a[e] = upload_scales(key_scale_a(p, e, rank), blocks ? s->k / 128 : 1, one ? 1 : scaled_rows(p));
    l->scale_b = upload_scales(KEY_SCALE_B + rank, blocks ? (s->n + 127) / 128 : 1,
                               one      ? 1
                               : blocks ? s->k / 128
                                        : s->n);
}

static int run_epochs(struct multiply *m, uint32_t rank, struct prs_fused *ctx, struct prs_gemm_plan *plan)
{
    const struct ranks_product *p = m->p;
    const struct prs_gemm_shape *s = &p->shape;
    uint64_t a_count = rows_of(p, PRS_GEMM_ALLGATHER) * pitch_of(s->lda, s->k);
    uint64_t b_count = s->b_transposed ? s->n * pitch_of(s->ldb, s->k) : s->k * pitch_of(s->ldb, s->n);
    uint64_t bytes = result_room(p),
             kept = ((uint64_t)s->m + 1) * s->k * (is_scaled(p) ? 1 : 2); /* and a row after it */
    struct launches l = {.plan = plan, .b = ranks_upload_of(s->dtype, key_b(p, rank), b_count)};
    uint16_t *host = malloc(bytes > kept ? bytes : kept);
    uint8_t *results;
    int r = 0;
    (void)cudaStreamCreateWithFlags(&l.stream, cudaStreamNonBlocking);
    if (p->bias)
        l.bias = ranks_upload_of(sum_type(p), key_bias(p, rank), s->n);
    if (p->residual != RANKS_NO_RESIDUAL)
        l.residual = ranks_upload_of(is_wide(p) ? PRS_DTYPE_FP32 : sum_type(p), key_residual(p, rank),
                                     bytes / (is_wide(p) ? 4 : 2));
    if ((s->c_anywhere ? cudaMalloc((void **)&results, bytes * p->epochs) != cudaSuccess
                       : prs_fused_alloc(ctx, bytes * p->epochs, (void **)&results) != 0) ||
        cudaMemset(results, 0xff, bytes * p->epochs) != cudaSuccess ||
        (p->rows && (cudaMalloc((void **)&l.rows, p->epochs * sizeof(*p->rows)) != cudaSuccess ||
                     cudaMemcpy(l.rows, p->rows, p->epochs * sizeof(*p->rows), cudaMemcpyHostToDevice) != cudaSuccess)))
        abort();
    for (uint32_t e = 0; e < p->epochs; e++) {
        l.a[e] = ranks_upload_of(s->dtype, key_a(p, e, rank), a_count);
        l.c[e] = results + e * bytes;
        if (p->residual == RANKS_RESIDUAL_IS_C)
            (void)cudaMemcpy(l.c[e], l.residual, bytes, cudaMemcpyDeviceToDevice);
    }
    for (uint32_t e = 0; e < p->epochs && p->keeps; e++)
        if (cudaMalloc(&l.kept[e], kept) != cudaSuccess || cudaMemset(l.kept[e], 0xff, kept) != cudaSuccess)
            abort();
    upload_all_scales(p, rank, &l);
    (void)cudaDeviceSynchronize();
    r = p->replays == 0 ? enqueue(p, &l) : enqueue_replays(p, &l);
    if (cudaStreamSynchronize(l.stream) != cudaSuccess && r == 0)
        r = -EIO;
    for (uint32_t e = 0; e < p->epochs && r == 0; e++) {
        (void)cudaMemcpy(host, l.c[e], bytes, cudaMemcpyDeviceToHost);
        check_result(m, rank, e, host);
        if (!p->keeps)
            continue;
        (void)cudaMemcpy(host, l.kept[e], kept, cudaMemcpyDeviceToHost);
        check_kept(m, rank, e, host);
    }
    for (uint32_t e = 0; e < p->epochs; e++) {
        (void)cudaFree(l.a[e]);
        (void)cudaFree(l.kept[e]);
        (void)cudaFree(l.scale_a[e]);
    }
    (void)(s->c_anywhere ? (int)cudaFree(results) : prs_fused_free(ctx, results));
    (void)cudaFree(l.rows);
    (void)cudaFree(l.b);
    (void)cudaFree(l.bias);
    (void)cudaFree(l.scale_b);
    (void)cudaFree(l.residual);
    (void)cudaStreamDestroy(l.stream);
    free(host);
    return r;
}

static void set_up(const struct ranks_product *p)
{
    hopper_setup(8, p->sms == 0 ? 4 : p->sms, 0);
}

static void multiply_rank(uint32_t rank, struct ranks_self *self, void *user)
{
    struct multiply *m = user;
    struct prs_fused *ctx = NULL;
    struct prs_gemm_plan *plan = NULL;
    int r;
    set_up(m->p);
    r = ranks_open(self, m->p->nodes, m->p->timeout_ms, &ctx);
    if (!r)
        r = prs_gemm_plan_open(ctx, &m->p->shape, m->p->chosen ? NULL : &m->p->tuning, &plan);
    if (!r)
        r = run_epochs(m, rank, ctx, plan);
    prs_gemm_plan_close(plan);
    prs_fused_close(ctx);
    if (r)
        __atomic_store_n(&m->v->result, r, __ATOMIC_RELAXED);
}

void ranks_multiply(const struct ranks_product *p, struct ranks_verdict *v)
{
    struct ranks_product filled = *p;
    struct {
        struct multiply m;
        struct ranks_verdict v;
    } *shared = ranks_map_shared(sizeof(*shared));
    pthread_mutexattr_t attr;
    shared->m.p = &filled;
    shared->m.v = &shared->v;
    pthread_mutexattr_init(&attr);
    pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
    pthread_mutex_init(&shared->m.lock, &attr);
    pthread_mutexattr_destroy(&attr);
    if (filled.epochs == 0)
        filled.epochs = 1;
    if (filled.nodes == 0)
        filled.nodes = 1;
    if (filled.timeout_ms == 0)
        filled.timeout_ms = 60000; /* a busy host is slow */
    if (filled.tuning.path == PRS_GEMM_PATH_AUTO)
        filled.tuning.path = PRS_GEMM_PATH_FUSED;
    if (filled.apart)
        ranks_run_apart(p->world, filled.nodes, multiply_rank, &shared->m);
    else
        ranks_run(p->world, multiply_rank, &shared->m);
    *v = shared->v;
    munmap(shared, sizeof(*shared));
}

void ranks_assert_right(const struct ranks_product *p)
{
    const struct prs_gemm_shape *s = &p->shape;
    unsigned long long seed = 0; /* processes of their own print theirs */
    struct ranks_verdict v;
    if (!p->apart) {
        set_up(p);
        seed = hopper_seed();
    }
    ranks_multiply(p, &v);
    cr_assert_eq(v.result, 0, "%u x %u x %u on %u nodes: the calls returned %d (HOPPER_SEED=%llu)", s->m, s->n, s->k,
                 p->nodes, v.result, seed);
    cr_assert_eq(v.beyond, 0, "%u x %u x %u on %u nodes: %llu of %llu elements are wrong, first %s (HOPPER_SEED=%llu)",
                 s->m, s->n, s->k, p->nodes, (unsigned long long)v.beyond, (unsigned long long)v.checked, v.first,
                 seed);
    cr_assert_gt(v.checked, 0);
    cr_assert(p->apart || hopper_late_loads() == 0, "%u kernels were loaded by a launch", hopper_late_loads());
}

void ranks_assert_rows_right(const struct ranks_row *rows, size_t count)
{
    for (size_t i = 0; i < count; i++)
        ranks_assert_right(&(struct ranks_product){.shape = {rows[i].op, rows[i].m, rows[i].n, rows[i].k, rows[i].nk},
                                                   .tuning = rows[i].tuning,
                                                   .world = rows[i].world,
                                                   .epochs = rows[i].epochs});
}
