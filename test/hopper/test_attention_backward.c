/* SPDX-License-Identifier: Apache-2.0 */
/* The backward pass of ring attention on emulated GPUs, compared with gradients in double precision. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/hopper/hopper.h"
#include "test/hopper/ranks.h"

enum { MAX_EPOCHS = 4, SMS = 4 };

/* Tensors of a launch: what it reads, then what it writes. */
enum tensor { Q, K, V, OUT, DOUT, DQ, DK, DV, TENSORS };

struct row {
    uint32_t world;
    struct prs_attention_shape shape;
    uint32_t epochs;
    struct prs_attention_tuning tuning;
    bool of_lse;  /* lse has a gradient too */
    bool forward; /* a forward launch, of a plan of its own, stands before each backward one */
    bool again;   /* every launch gets the same inputs, and must give the same bits; those after the first by a graph */
    uint32_t nodes; /* 0: one node; else the ranks run on one node, then on so many, with the same bits */
};

/* Whole tensors [batch][head][position][head_dim] of an epoch, in double precision. size: of each gradient, the sum of
 * the absolute values that rounding acts on. */
struct problem {
    double *x[TENSORS], *size[TENSORS], *rough[TENSORS];
    float *lse, *dlse;
};

struct run {
    const struct row *row;
    struct problem problem[MAX_EPOCHS];
    uint32_t nodes;                             /* of this run */
    void *kept[RANKS_MAX][MAX_EPOCHS][TENSORS]; /* what a run on one node gave */
    pthread_mutex_t lock;
    uint64_t checked, wrong;
    double squares[TENSORS], errors[TENSORS]; /* sums of squares: of what is wanted, and of the differences from it */
    int result;
    char first[160];
};

static bool is_of_keys(enum tensor t)
{
    return t == K || t == V || t == DK || t == DV;
}

static uint32_t heads_of(const struct prs_attention_shape *s, enum tensor t)
{
    return is_of_keys(t) ? s->heads_kv : s->heads_q;
}

static uint64_t size_of(const struct prs_attention_shape *s, enum tensor t)
{
    return (uint64_t)s->batch * heads_of(s, t) * s->seq * s->head_dim;
}

static uint32_t slice_rows(const struct row *r)
{
    return r->shape.seq / r->world;
}

/* Returns the rank that holds a position of the sequence; *at: its row there. */
static uint32_t holder_of(const struct row *r, uint32_t position, uint32_t *at)
{
    uint32_t half = slice_rows(r) / 2, chunk;
    if (r->shape.causal == 0 || r->world == 1) {
        *at = position % slice_rows(r);
        return position / slice_rows(r);
    }
    chunk = position / half;
    *at = position % half + (chunk < r->world ? 0 : half);
    return chunk < r->world ? chunk : 2 * r->world - 1 - chunk;
}

/* Where a row of a whole tensor lies in the slice of its rank, in elements. */
static uint64_t place_of(const struct row *r, enum tensor t, uint64_t head, uint32_t position, uint32_t *rank)
{
    uint32_t at, heads = heads_of(&r->shape, t);
    uint64_t rows = slice_rows(r), batch = head / heads;
    *rank = holder_of(r, position, &at);
    return (r->shape.heads_first != 0 ? head * rows + at : (batch * rows + at) * heads + head % heads) *
           r->shape.head_dim;
}

/* ---- the reference ---- */
static double dot(const double *a, const double *b, uint32_t count)
{
    double sum = 0;
    for (uint32_t i = 0; i < count; i++)
        sum += a[i] * b[i];
    return sum;
}

static double dot_of_sizes(const double *a, const double *b, uint32_t count)
{
    double sum = 0;
    for (uint32_t i = 0; i < count; i++)
        sum += fabs(a[i] * b[i]);
    return sum;
}

/* Adds factor * x to a row, its size to the row of sizes, and rough * size of x to that of roundings. */
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
static void solve_query(const struct prs_attention_shape *s, struct problem *p, uint64_t head, uint32_t position)
{
    uint32_t d = s->head_dim, keys = s->causal != 0 ? position + 1 : s->seq;
    uint64_t kv = head / (s->heads_q / s->heads_kv) * s->seq * d, row = (head * s->seq + position) * d;
    double scale = s->scale != 0 ? (double)s->scale : 1 / sqrt((double)d), top = -INFINITY, sum = 0, delta, rough;
    const double *q = p->x[Q] + row, *dout = p->x[DOUT] + row;
    double *out = p->x[OUT] + row, *score = malloc(keys * sizeof(*score));
    for (uint32_t j = 0; j < keys; j++) {
        score[j] = scale * dot(q, p->x[K] + kv + j * d, d);
        top = score[j] > top ? score[j] : top;
    }
    for (uint32_t j = 0; j < keys; j++)
        sum += exp(score[j] - top);
    p->lse[head * s->seq + position] = (float)(top + log(sum));
    for (uint32_t j = 0; j < keys; j++)
        for (uint32_t i = 0; i < d; i++)
            out[i] += exp(score[j] - top) / sum * p->x[V][kv + j * d + i];
    for (uint32_t i = 0; i < d; i++)
        out[i] = ranks_float(ranks_bf16((float)out[i]));
    delta = dot(dout, out, d);
    rough = dot_of_sizes(dout, out, d) + fabs((double)p->dlse[head * s->seq + position]);
    delta -= (double)p->dlse[head * s->seq + position];
    for (uint32_t j = 0; j < keys; j++) {
        double prob = exp(score[j] - (double)p->lse[head * s->seq + position]);
        const double *v = p->x[V] + kv + j * d;
        double ds = scale * prob * (dot(dout, v, d) - delta);
        double ds_rough = scale * prob * (dot_of_sizes(dout, v, d) + rough);
        add_row(p, DQ, row, p->x[K] + kv + j * d, ds, ds_rough, d);
        add_row(p, DK, kv + j * d, q, ds, ds_rough, d);
        add_row(p, DV, kv + j * d, dout, prob, prob, d);
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
        for (uint64_t i = 0; i < size_of(s, t) && t != OUT && t < DQ; i++)
            p->x[t][i] = ranks_element((r->again ? 0 : epoch) * 8 + (uint32_t)t + 1, i);
    }
    p->lse = calloc((size_t)s->batch * s->heads_q * s->seq, sizeof(float));
    p->dlse = calloc((size_t)s->batch * s->heads_q * s->seq, sizeof(float));
    for (uint64_t i = 0; i < (uint64_t)s->batch * s->heads_q * s->seq && r->of_lse; i++)
        p->dlse[i] = 4 * ranks_element(epoch * 8, i);
    for (uint64_t head = 0; head < (uint64_t)s->batch * s->heads_q; head++)
        for (uint32_t position = 0; position < s->seq; position++)
            solve_query(s, p, head, position);
}

static void close_problem(struct problem *p)
{
    for (int t = 0; t < TENSORS; t++) {
        free(p->x[t]);
        free(p->size[t]);
        free(p->rough[t]);
    }
    free(p->lse);
    free(p->dlse);
}

/* ---- a rank ---- */
struct tensors {
    void *x[TENSORS], *lse, *dlse, *out_again;
};

static uint64_t slice_size(const struct row *r, enum tensor t)
{
    return size_of(&r->shape, t) / r->world;
}

static void *upload_slice(const struct row *r, const struct problem *p, enum tensor t, uint32_t rank)
{
    uint64_t heads = (uint64_t)r->shape.batch * heads_of(&r->shape, t), d = r->shape.head_dim;
    uint16_t *slice = malloc(slice_size(r, t) * 2);
    void *to;
    for (uint64_t head = 0; head < heads; head++)
        for (uint32_t position = 0; position < r->shape.seq; position++) {
            uint32_t holder;
            uint64_t at = place_of(r, t, head, position, &holder);
            for (uint64_t i = 0; i < d && holder == rank; i++)
                slice[at + i] = ranks_bf16((float)p->x[t][(head * r->shape.seq + position) * d + i]);
        }
    to = ranks_copy(slice, slice_size(r, t) * 2);
    free(slice);
    return to;
}

/* Of a value for each query: lse or its gradient. */
static void *upload_values(const struct row *r, const float *whole, uint32_t rank)
{
    uint64_t heads = (uint64_t)r->shape.batch * r->shape.heads_q, rows = slice_rows(r);
    float *slice = malloc(heads * rows * sizeof(float));
    void *to;
    for (uint64_t head = 0; head < heads; head++)
        for (uint32_t position = 0; position < r->shape.seq; position++) {
            uint32_t at;
            if (holder_of(r, position, &at) == rank)
                slice[head * rows + at] = whole[head * r->shape.seq + position];
        }
    to = ranks_copy(slice, heads * rows * sizeof(float));
    free(slice);
    return to;
}

static void open_tensors(const struct row *r, const struct problem *p, uint32_t rank, struct tensors *x)
{
    for (int t = 0; t < TENSORS; t++)
        x->x[t] = t < DQ ? upload_slice(r, p, t, rank) : ranks_device(slice_size(r, t) * 2, 0xff);
    x->lse = upload_values(r, p->lse, rank);
    x->dlse = r->of_lse ? upload_values(r, p->dlse, rank) : NULL;
    x->out_again = ranks_device(slice_size(r, OUT) * 2, 0xff);
}

static void close_tensors(struct tensors *x)
{
    for (int t = 0; t < TENSORS; t++)
        (void)cudaFree(x->x[t]);
    (void)cudaFree(x->lse);
    (void)cudaFree(x->dlse);
    (void)cudaFree(x->out_again);
}

/* The bound, with u = 2^-8, the unit roundoff of bf16: P and dS are rounded once for the products, the gradient once;
 * and 2^-15 of everything that fp32 adds up or multiplies (sums of 128 terms, lse and exp2 among them). */
static bool within(double have, double want, double size, double rough)
{
    return fabs(have - want) <= (fabs(want) + size) * 0x1.02p-8 + rough * 0x1p-15;
}

static void check_tensor(struct run *u, uint32_t rank, uint32_t epoch, enum tensor t, const void *device)
{
    static const char *const names[TENSORS] = {[OUT] = "out", [DQ] = "dq", [DK] = "dk", [DV] = "dv"};
    const struct row *r = u->row;
    const struct problem *p = &u->problem[epoch];
    uint64_t heads = (uint64_t)r->shape.batch * heads_of(&r->shape, t), d = r->shape.head_dim, wrong = 0, checked = 0;
    uint16_t *slice = malloc(slice_size(r, t) * 2);
    double squares = 0, errors = 0;
    char first[160];
    (void)cudaMemcpy(slice, device, slice_size(r, t) * 2, cudaMemcpyDeviceToHost);
    for (uint64_t head = 0; head < heads; head++)
        for (uint32_t position = 0; position < r->shape.seq; position++) {
            uint32_t holder;
            uint64_t at = place_of(r, t, head, position, &holder), whole = (head * r->shape.seq + position) * d;
            for (uint64_t i = 0; i < d && holder == rank; i++, checked++) {
                double have = ranks_float(slice[at + i]), want = p->x[t][whole + i];
                squares += want * want, errors += (have - want) * (have - want);
                bool right = t == OUT ? fabs(have - want) <= 0x1p-6
                                      : within(have, want, p->size[t][whole + i], p->rough[t][whole + i]);
                if (!right && wrong++ == 0)
                    (void)snprintf(first, sizeof(first),
                                   "%s: rank %u epoch %u head %llu position %u column %llu: %g, "
                                   "want %g",
                                   names[t], rank, epoch, (unsigned long long)head, position, (unsigned long long)i,
                                   have, want);
            }
        }
    pthread_mutex_lock(&u->lock);
    if (wrong != 0 && u->wrong == 0)
        memcpy(u->first, first, sizeof(first));
    u->wrong += wrong;
    u->checked += checked;
    u->squares[t] += squares, u->errors[t] += errors;
    pthread_mutex_unlock(&u->lock);
    free(slice);
}

static void compare_bits(struct run *u, enum tensor t, const void *one, const void *two)
{
    size_t bytes = slice_size(u->row, t) * 2;
    char *a = malloc(bytes), *b = malloc(bytes);
    (void)cudaMemcpy(a, one, bytes, cudaMemcpyDeviceToHost);
    (void)cudaMemcpy(b, two, bytes, cudaMemcpyDeviceToHost);
    if (memcmp(a, b, bytes) != 0) {
        pthread_mutex_lock(&u->lock);
        (void)snprintf(u->first, sizeof(u->first), "tensor %d differs from launch to launch, or from that of one node",
                       t);
        u->wrong++;
        pthread_mutex_unlock(&u->lock);
    }
    free(a);
    free(b);
}

/* Of a row with nodes: keeps what one node gives, and compares what several give. */
static void keep_or_compare(struct run *u, uint32_t rank, uint32_t epoch, enum tensor t, const void *device)
{
    size_t bytes = slice_size(u->row, t) * 2;
    void **kept = &u->kept[rank][epoch][t];
    if (u->row->nodes == 0)
        return;
    if (u->nodes == 0) {
        *kept = ranks_device(bytes, 0);
        (void)cudaMemcpy(*kept, device, bytes, cudaMemcpyDeviceToDevice);
        return;
    }
    compare_bits(u, t, *kept, device);
    (void)cudaFree(*kept);
}

struct plans {
    struct prs_attention_plan *forward;
    struct prs_attention_backward_plan *backward;
};

static int launch(const struct plans *p, const struct tensors *t, cudaStream_t stream)
{
    struct prs_attention_gradients x = {.q = t->x[Q],
                                        .k = t->x[K],
                                        .v = t->x[V],
                                        .out = t->x[OUT],
                                        .lse = t->lse,
                                        .dout = t->x[DOUT],
                                        .dlse = t->dlse,
                                        .dq = t->x[DQ],
                                        .dk = t->x[DK],
                                        .dv = t->x[DV]};
    struct prs_attention_operands forward = {.q = t->x[Q], .k = t->x[K], .v = t->x[V], .out = t->out_again};
    int r = p->forward ? prs_attention_launch(p->forward, &forward, stream) : 0;
    return r ? r : prs_attention_backward_launch(p->backward, &x, stream);
}

/* The first launch by itself; the others are one graph, replayed for each. */
static int launch_again(const struct plans *p, const struct tensors *t, uint32_t epochs, cudaStream_t stream)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    int r = launch(p, &t[0], stream);
    (void)cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    if (!r)
        r = launch(p, &t[1], stream);
    (void)cudaStreamEndCapture(stream, &graph);
    (void)cudaGraphInstantiate(&exec, graph, 0);
    for (uint32_t e = 1; e < epochs && !r; e++)
        r = cudaGraphLaunch(exec, stream) == cudaSuccess ? 0 : -EIO;
    (void)cudaStreamSynchronize(stream);
    (void)cudaGraphExecDestroy(exec);
    (void)cudaGraphDestroy(graph);
    return r;
}

static int run_epochs(struct run *u, uint32_t rank, const struct plans *plans)
{
    const struct row *row = u->row;
    struct tensors t[MAX_EPOCHS];
    cudaStream_t stream;
    int r = 0;
    (void)cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    for (uint32_t e = 0; e < row->epochs; e++)
        open_tensors(row, &u->problem[e], rank, &t[e]);
    (void)cudaDeviceSynchronize();
    if (row->again)
        r = launch_again(plans, t, row->epochs, stream);
    for (uint32_t e = 0; e < row->epochs && r == 0 && !row->again; e++)
        r = launch(plans, &t[e], stream);
    if (cudaStreamSynchronize(stream) != cudaSuccess && r == 0)
        r = -EIO;
    for (uint32_t e = 0; e < (row->again ? 2 : row->epochs) && r == 0; e++)
        for (int x = DQ; x < TENSORS; x++)
            check_tensor(u, rank, e, x, t[e].x[x]), keep_or_compare(u, rank, e, x, t[e].x[x]);
    for (uint32_t e = 0; e < row->epochs && r == 0 && row->forward; e++)
        check_tensor(u, rank, e, OUT, t[e].out_again);
    for (int x = DQ; x < TENSORS && row->again && r == 0; x++)
        compare_bits(u, x, t[0].x[x], t[1].x[x]);
    for (uint32_t e = 0; e < row->epochs; e++)
        close_tensors(&t[e]);
    (void)cudaStreamDestroy(stream);
    return r;
}

static void run_rank(uint32_t rank, struct ranks_self *self, void *user)
{
    struct run *u = user;
    struct prs_fused *ctx = NULL;
    struct plans plans = {NULL, NULL};
    struct prs_fused_error error;
    int r = ranks_open(self, u->nodes, 60000, &ctx);
    if (!r && u->row->forward)
        r = prs_attention_plan_open(ctx, &u->row->shape, NULL, &plans.forward);
    if (!r)
        r = prs_attention_backward_plan_open(ctx, &u->row->shape, &u->row->tuning, &plans.backward);
    if (!r)
        r = run_epochs(u, rank, &plans);
    if (!r)
        r = prs_fused_poll_error(ctx, &error);
    prs_attention_plan_close(plans.forward);
    prs_attention_backward_plan_close(plans.backward);
    prs_fused_close(ctx);
    if (r)
        __atomic_store_n(&u->result, r, __ATOMIC_RELAXED);
}

/* number: of the row, for the message. */
static void solve(const struct row *row, size_t number, struct run *u)
{
    unsigned long long seed;
    *u = (struct run){.row = row, .lock = PTHREAD_MUTEX_INITIALIZER};
    for (uint32_t e = 0; e < row->epochs; e++)
        open_problem(row, e, &u->problem[e]);
    hopper_setup(8, SMS, 0);
    seed = (unsigned long long)hopper_seed();
    ranks_run(row->world, run_rank, u);
    if (row->nodes != 0) {
        u->nodes = row->nodes;
        ranks_run(row->world, run_rank, u);
    }
    for (uint32_t e = 0; e < row->epochs; e++)
        close_problem(&u->problem[e]);
    cr_assert_eq(u->result, 0, "row %zu: the calls returned %d (HOPPER_SEED=%llu)", number, u->result, seed);
    cr_assert_eq(u->wrong, 0, "row %zu: %llu of %llu values wrong, first %s (HOPPER_SEED=%llu)", number,
                 (unsigned long long)u->wrong, (unsigned long long)u->checked, u->first, seed);
    cr_assert_gt(u->checked, 0);
}

static void assert_right(const struct row *rows, size_t count)
{
    struct run u;
    for (size_t i = 0; i < count; i++)
        solve(&rows[i], i, &u);
}

/* world, {batch, heads_q, heads_kv, head_dim, seq, causal, heads_first, scale}, epochs, tuning */
Test(attention_backward, one_rank_alone_is_right, .timeout = 600)
{
    ASSERT_RIGHT({1, {1, 1, 1, 128, 200, 0, 0, 0.3f}, 2}, {1, {2, 2, 1, 64, 130, 0, 1, 0}, 1, .of_lse = true},
                 {1, {1, 1, 1, 128, 1, 0, 0, 0}, 1});
}

/* Each slot of claimed tasks is used many times. */
Test(attention_backward, many_tasks_of_one_sm_are_right, .timeout = 600)
{
    ASSERT_RIGHT({1, {1, 30, 30, 64, 64, 0, 0, 0.3f}, 1, {.ctas = 1}});
}

Test(attention_backward, causal_alone_is_right, .timeout = 600)
{
    ASSERT_RIGHT({1, {1, 1, 1, 128, 300, 1, 1, 0.3f}, 1}, {1, {1, 2, 1, 64, 200, 1, 0, 0.4f}, 2});
}

Test(attention_backward, several_ranks_are_right, .timeout = 600)
{
    ASSERT_RIGHT({2, {1, 2, 1, 128, 320, 0, 0, 0.3f}, 3}, {4, {1, 2, 2, 64, 4 * 70, 0, 1, 0}, 2});
}

Test(attention_backward, several_causal_ranks_are_right, .timeout = 600)
{
    ASSERT_RIGHT({2, {1, 2, 1, 128, 4 * 90, 1, 0, 0.3f}, 3}, {3, {1, 4, 2, 64, 6 * 40, 1, 1, 0.3f}, 2, .of_lse = true},
                 {4, {1, 1, 1, 128, 8 * 20, 1, 0, 0}, 2});
}

/* Root of the mean square error of a gradient, over that of the gradient. */
static double error_of(const struct row *row, enum tensor t)
{
    struct run u;
    solve(row, row->world, &u);
    return sqrt(u.errors[t] / u.squares[t]);
}

/* With parts of dq in bf16 the quotient was 1.17. */
Test(attention_backward, dq_of_several_ranks_is_as_exact_as_of_one, .timeout = 600)
{
    const struct row one = {1, {1, 2, 2, 64, 256, 0, 0, 0.3f}, 1}, four = {4, {1, 2, 2, 64, 256, 0, 0, 0.3f}, 1};
    double alone = error_of(&one, DQ), together = error_of(&four, DQ);
    cr_assert_lt(together, 1.02 * alone, "%g with four ranks, %g with one", together, alone);
}

/* The test of schedules has every count of ranks. */
Test(attention_backward, up_to_eight_ranks_are_right, .timeout = 600)
{
    ASSERT_RIGHT({5, {1, 2, 1, 64, 5 * 30, 0, 1, 0.3f}, 2}, {8, {1, 2, 1, 64, 16 * 9, 1, 0, 0.3f}, 2});
}

/* Three steps through two buffers, whose senders wait for credit, and tasks of several query heads. */
Test(attention_backward, a_ring_of_two_buffers_is_right, .timeout = 600)
{
    ASSERT_RIGHT(
        {2, {1, 6, 3, 64, 4 * 66, 1, 0, 0.3f}, 3, {.mode = PRS_ATTENTION_RING, .heads_per_step = 1, .slab_rows = 64}});
}

Test(attention_backward, forward_and_backward_plans_share_memory, .timeout = 600)
{
    ASSERT_RIGHT({2, {1, 2, 1, 64, 4 * 64, 1, 0, 0.3f}, 3, .forward = true});
}

Test(attention_backward, launches_and_graphs_repeat_bit_by_bit, .timeout = 600)
{
    ASSERT_RIGHT({2, {1, 2, 1, 64, 4 * 70, 1, 0, 0.3f}, 4, .again = true});
}

/* ---- every access checked for its order (memory_order.py) ---- */
Test(attention_backward_order, of_all_that_travels, .timeout = 600)
{
    ASSERT_RIGHT({2, {1, 2, 1, 64, 200, 1, 0, 0}, 3});
}

static void need_software_nic(void)
{
    if (!getenv("SOFTNIC_WORLD"))
        cr_skip_test("not under softnic-run");
}

/* Tails of tiles and slabs; heads that share keys. */
Test(attention_backward_nodes, two_nodes_give_what_one_does, .timeout = 600)
{
    need_software_nic();
    ASSERT_RIGHT({4, {1, 2, 1, 128, 8 * 45, 1, 0, 0.3f}, 3, {.slab_rows = 64}, .nodes = 2},
                 {4, {1, 2, 2, 64, 4 * 70, 0, 1, 0}, 2, .of_lse = true, .nodes = 2});
}

Test(attention_backward_nodes, of_one_rank_repeat_bit_by_bit, .timeout = 600)
{
    need_software_nic();
    ASSERT_RIGHT({2, {1, 2, 1, 64, 4 * 70, 1, 0, 0.3f}, 4, .again = true, .nodes = 2});
}

/* Two buffers, between plans of both passes that share memory. */
Test(attention_backward_nodes, two_buffers_are_enough, .timeout = 600)
{
    need_software_nic();
    ASSERT_RIGHT({4,
                  {1, 5, 5, 64, 8 * 40, 1, 0, 0.3f},
                  3,
                  {.mode = PRS_ATTENTION_RING, .heads_per_step = 1, .slab_rows = 64},
                  .forward = true,
                  .nodes = 2});
}
