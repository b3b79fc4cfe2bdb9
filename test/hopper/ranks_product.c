/* SPDX-License-Identifier: Apache-2.0 */
/* A product of all ranks: its operands, its launches, and the check of its results. */
#include "test/hopper/ranks_reference.h"

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
    return (rows_of(p, PRS_GEMM_REDUCE_SCATTER) * pitch_of(p->shape.ldc, columns_of(p)) * result_bytes(p) + 511) / 256 *
           256;
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
        want = ranks_reference(p, rank, epoch, i / columns, i % columns);
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

/* Floats from the scales of one block of columns of C to those of the next, in a launch as the host knows it. */
static uint64_t quantised_pitch(const struct ranks_product *p, uint32_t epoch)
{
    return p->c_scale_pitch != 0 ? p->c_scale_pitch : p->rows && !p->on_device ? p->rows[epoch] : p->shape.m;
}

/* Of the most rows, and a little more. */
static uint64_t quantised_scales(const struct ranks_product *p)
{
    uint64_t pitch = p->c_scale_pitch != 0 ? p->c_scale_pitch : p->shape.m;
    return columns_of(p) / 128 * pitch + 8;
}

/* A row's 128 numbers with their scale. The scale is the largest magnitude / 448; rounding to e4m3 moves a number by
 * 2^-4 of itself at most, or by 2^-10 of the scale where it is less than 2^-6 of it. */
static const char *check_block(const struct ranks_product *p, uint32_t rank, uint32_t epoch, uint64_t row,
                               uint32_t block, const uint8_t *c, double scale)
{
    double most = 0, bound = 0;
    for (uint32_t i = 0; i < 128; i++) {
        struct estimate want = ranks_reference(p, rank, epoch, row, block * 128 + i);
        double have = ranks_value(PRS_DTYPE_E4M3, c[i]) * scale, size = fabs(want.value) + want.bound;
        double moved = size * 0x1.01p-4 > scale * 0x1p-10 ? size * 0x1.01p-4 : scale * 0x1p-10;
        if (!(fabs(have - want.value) <= want.bound + moved))
            return "a number is wrong";
        most = size > most ? size : most;
        bound = want.bound > bound ? want.bound : bound;
    }
    return scale * 448 <= most * 0x1.00001p0 && scale * 448 >= (most - 2 * bound) * 0x1.ffffep-1
               ? NULL
               : "the scale is not the largest magnitude / 448";
}

/* C in e4m3. Nothing is written beyond the rows of the launch, even if only the device knows how many they are. */
static void check_quantised(struct multiply *m, uint32_t rank, uint32_t epoch, const uint8_t *c, const float *scales)
{
    enum { BLOCKS = 24 };
    struct ranks_product launch = *m->p;
    const struct ranks_product *p = &launch;
    uint64_t columns = columns_of(p), pitch = pitch_of(p->shape.ldc, (uint32_t)columns), scale_pitch, step;
    uint64_t checked = 0, beyond = 0, room = result_room(p), blocks = columns / 128;
    const char *what = NULL;
    uint64_t at = 0;
    launch.shape.m = p->rows ? p->rows[epoch] : p->shape.m;
    scale_pitch = quantised_pitch(m->p, epoch);
    step = launch.shape.m * blocks / BLOCKS + 1;
    for (uint64_t i = epoch % step; i < launch.shape.m * blocks; i += step, checked += 128) {
        uint64_t row = i / blocks, block = i % blocks;
        const char *wrong = check_block(p, rank, epoch, row, (uint32_t)block, c + row * pitch + block * 128,
                                        scales[block * scale_pitch + row]);
        if (wrong && beyond++ == 0)
            what = wrong, at = i;
    }
    for (uint64_t i = 0; i < room; i++)
        if ((i / pitch < launch.shape.m && i % pitch < columns) == ((c[i] & 0x7f) == 0x7f) && beyond++ == 0)
            what = "a number is not there, or one beyond the result is", at = i;
    for (uint64_t i = 0; i < quantised_scales(m->p); i++)
        if ((i / scale_pitch < blocks && i % scale_pitch < launch.shape.m) == isnan(scales[i]) && beyond++ == 0)
            what = "a scale is not there, or one beyond them is", at = i;
    pthread_mutex_lock(&m->lock);
    m->v->checked += checked;
    if (m->v->beyond == 0 && beyond != 0)
        (void)snprintf(m->v->first, sizeof(m->v->first), "rank %u epoch %u: %s, number %llu", rank, epoch, what,
                       (unsigned long long)at);
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
    uint8_t *copies; /* of all results, or NULL */
    float *scale_a[RANKS_EPOCHS_MAX], *scale_b, *c_scale[RANKS_EPOCHS_MAX];
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
                                        .quantised_scale = l->c_scale[e],
                                        .quantised_scale_pitch = p->c_scale_pitch,
                                        .quantised_scaling = is_quantised(p) ? PRS_SCALING_BLOCKS : 0,
                                        .m = p->rows && !p->on_device ? p->rows[e] : 0,
                                        .m_on_device = p->on_device ? l->rows + e : NULL},
            l->stream);
        if (r == 0 && l->copies &&
            cudaMemcpyAsync(l->copies + e * result_room(p), l->c[e], result_room(p), cudaMemcpyDeviceToDevice,
                            l->stream) != cudaSuccess)
            r = -EIO;
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
        l.residual =
            ranks_upload_of(is_wide(p) ? PRS_DTYPE_FP32 : sum_type(p), key_residual(p, rank), bytes / result_bytes(p));
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
    for (uint32_t e = 0; e < p->epochs && is_quantised(p); e++)
        l.c_scale[e] = ranks_device(quantised_scales(p) * sizeof(float), 0xff);
    upload_all_scales(p, rank, &l);
    l.copies = p->copied ? ranks_device(bytes * p->epochs, 0xff) : NULL;
    (void)cudaDeviceSynchronize();
    r = p->replays == 0 ? enqueue(p, &l) : enqueue_replays(p, &l);
    if (cudaStreamSynchronize(l.stream) != cudaSuccess && r == 0)
        r = -EIO;
    for (uint32_t e = 0; e < p->epochs && r == 0; e++) {
        (void)cudaMemcpy(host, l.copies ? l.copies + e * bytes : l.c[e], bytes, cudaMemcpyDeviceToHost);
        if (is_quantised(p))
            check_quantised(m, rank, e, (const uint8_t *)host, l.c_scale[e]);
        else
            check_result(m, rank, e, host);
        if (!p->keeps)
            continue;
        (void)cudaMemcpy(host, l.kept[e], kept, cudaMemcpyDeviceToHost);
        check_kept(m, rank, e, host);
    }
    ranks_reference_end();
    (void)cudaFree(l.copies);
    for (uint32_t e = 0; e < p->epochs; e++) {
        (void)cudaFree(l.a[e]);
        (void)cudaFree(l.kept[e]);
        (void)cudaFree(l.scale_a[e]);
        (void)cudaFree(l.c_scale[e]);
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
