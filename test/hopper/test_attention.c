/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention on emulated GPUs, compared with a softmax in double precision. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/hopper/hopper.h"
#include "test/hopper/ranks.h"

enum { MAX_EPOCHS = 4, SMS = 4, SAMPLES = 400 };
enum tensor { QUERIES = 0, KEYS = 1, VALUES = 2 };

struct row {
    uint32_t world;
    struct prs_attention_shape shape;
    uint32_t epochs;
    struct prs_attention_tuning tuning;
    uint32_t nodes; /* 0: one */
};

struct run {
    const struct row *row;
    pthread_mutex_t lock;
    uint64_t checked, wrong;
    int result;
    char first[160];
};

static uint32_t key_of(enum tensor which, uint32_t rank, uint32_t epoch)
{
    return epoch * 64 + rank * 4 + (uint32_t)which + 1;
}

static uint32_t slice_rows(const struct row *r)
{
    return r->shape.seq / r->world;
}

static uint64_t index_of(const struct row *r, uint32_t heads, uint32_t batch, uint32_t head, uint32_t at)
{
    uint64_t rows = slice_rows(r);
    return r->shape.heads_first != 0 ? ((uint64_t)batch * heads + head) * rows + at
                                     : ((uint64_t)batch * rows + at) * heads + head;
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

static uint32_t values_of(const struct prs_attention_shape *s)
{
    return s->value_dim != 0 ? (uint32_t)s->value_dim : s->head_dim;
}

/* out[]: one row of the result; size[d]: the same sum of absolute values, for the bound of errors. Returns lse. */
static double reference(const struct row *r, uint32_t epoch, uint32_t batch, uint32_t head, uint32_t position,
                        double *out, double *size)
{
    const struct prs_attention_shape *s = &r->shape;
    uint32_t at, rank = holder_of(r, position, &at), d = s->head_dim, head_kv = head / (s->heads_q / s->heads_kv);
    uint32_t columns = values_of(s);
    uint64_t q = index_of(r, s->heads_q, batch, head, at) * d;
    double scale = s->scale != 0 ? (double)s->scale : 1 / sqrt((double)d), top = -INFINITY, sum = 0;
    uint32_t keys = s->causal != 0 ? position + 1 : s->seq;
    double *score = malloc(keys * sizeof(*score)), query[128];
    for (uint32_t x = 0; x < d; x++)
        query[x] = ranks_element(key_of(QUERIES, rank, epoch), q + x);
    for (uint32_t i = 0; i < keys; i++) {
        uint32_t there, from = holder_of(r, i, &there);
        uint64_t k = index_of(r, s->heads_kv, batch, head_kv, there) * d;
        score[i] = 0;
        for (uint32_t x = 0; x < d; x++)
            score[i] += query[x] * ranks_element(key_of(KEYS, from, epoch), k + x);
        score[i] *= scale;
        top = score[i] > top ? score[i] : top;
    }
    memset(out, 0, columns * sizeof(*out));
    memset(size, 0, columns * sizeof(*size));
    for (uint32_t i = 0; i < keys; i++) {
        uint32_t there, from = holder_of(r, i, &there);
        uint64_t v = index_of(r, s->heads_kv, batch, head_kv, there) * columns;
        double p = exp(score[i] - top);
        sum += p;
        for (uint32_t x = 0; x < columns; x++) {
            double value = ranks_element(key_of(VALUES, from, epoch), v + x);
            out[x] += p * value;
            size[x] += p * fabs(value);
        }
    }
    for (uint32_t x = 0; x < columns; x++) {
        out[x] /= sum;
        size[x] /= sum;
    }
    free(score);
    return top + log(sum);
}

static void complain(struct run *u, const char *what, uint32_t rank, uint32_t epoch, uint32_t head, uint32_t at,
                     double have, double want)
{
    pthread_mutex_lock(&u->lock);
    if (u->wrong++ == 0)
        (void)snprintf(u->first, sizeof(u->first), "%s: rank %u epoch %u head %u row %u: %g, want %g", what, rank,
                       epoch, head, at, have, want);
    pthread_mutex_unlock(&u->lock);
}

static void check_row(struct run *u, uint32_t rank, uint32_t epoch, uint32_t position, uint32_t batch, uint32_t head,
                      uint32_t at, const uint16_t *out, const float *lse)
{
    const struct prs_attention_shape *s = &u->row->shape;
    double want[256], size[256];
    double log_sum = reference(u->row, epoch, batch, head, position, want, size);
    uint64_t row = index_of(u->row, s->heads_q, batch, head, at) * values_of(s);
    double have_log = lse[((uint64_t)batch * s->heads_q + head) * slice_rows(u->row) + at];
    if (!(fabs(have_log - log_sum) <= 1e-4 * (1 + fabs(log_sum))))
        complain(u, "lse", rank, epoch, head, at, have_log, log_sum);
    /* The bound: one bf16 rounding of each probability, and one of the result. */
    for (uint32_t x = 0; x < values_of(s); x++) {
        double have = ranks_float(out[row + x]);
        if (!(fabs(have - want[x]) <= (fabs(want[x]) + size[x]) * 0x1.02p-8))
            complain(u, "out", rank, epoch, head, at, have, want[x]);
    }
}

static void check_share(struct run *u, uint32_t rank, uint32_t epoch, const uint16_t *out, const float *lse)
{
    const struct prs_attention_shape *s = &u->row->shape;
    uint32_t step = s->batch * s->heads_q * s->seq / SAMPLES + 1, count = 0, checked = 0;
    for (uint32_t position = 0; position < s->seq; position++) {
        uint32_t at;
        if (holder_of(u->row, position, &at) != rank)
            continue;
        for (uint32_t i = 0; i < s->batch * s->heads_q; i++)
            if (count++ % step == epoch % step || at == 0 || at + 1 == slice_rows(u->row)) {
                check_row(u, rank, epoch, position, i / s->heads_q, i % s->heads_q, at, out, lse);
                checked++;
            }
    }
    pthread_mutex_lock(&u->lock);
    u->checked += checked;
    pthread_mutex_unlock(&u->lock);
}

struct tensors {
    void *q, *k, *v, *out, *lse;
};

static void open_tensors(const struct row *r, uint32_t rank, uint32_t epoch, struct tensors *t)
{
    const struct prs_attention_shape *s = &r->shape;
    uint64_t rows = (uint64_t)s->batch * slice_rows(r), out = rows * s->heads_q * values_of(s);
    t->q = ranks_upload(key_of(QUERIES, rank, epoch), rows * s->heads_q * s->head_dim);
    t->k = ranks_upload(key_of(KEYS, rank, epoch), rows * s->heads_kv * s->head_dim);
    t->v = ranks_upload(key_of(VALUES, rank, epoch), rows * s->heads_kv * values_of(s));
    if (cudaMalloc(&t->out, out * 2) != cudaSuccess || cudaMalloc(&t->lse, rows * s->heads_q * 4) != cudaSuccess)
        abort();
    (void)cudaMemset(t->out, 0xff, out * 2);
    (void)cudaMemset(t->lse, 0xff, rows * s->heads_q * 4);
}

static void check_tensors(struct run *u, uint32_t rank, uint32_t epoch, const struct tensors *t)
{
    const struct prs_attention_shape *s = &u->row->shape;
    uint64_t rows = (uint64_t)s->batch * slice_rows(u->row) * s->heads_q;
    uint16_t *out = malloc(rows * values_of(s) * 2);
    float *lse = malloc(rows * 4);
    (void)cudaMemcpy(out, t->out, rows * values_of(s) * 2, cudaMemcpyDeviceToHost);
    (void)cudaMemcpy(lse, t->lse, rows * 4, cudaMemcpyDeviceToHost);
    check_share(u, rank, epoch, out, lse);
    free(out);
    free(lse);
}

/* Enqueues all epochs before it waits for any. Closes the plan as soon as this rank is done, even while others still
 * wait. */
static int run_epochs(struct run *u, uint32_t rank, struct prs_attention_plan *plan)
{
    struct tensors t[MAX_EPOCHS];
    cudaStream_t stream;
    int r = 0;
    (void)cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    for (uint32_t e = 0; e < u->row->epochs; e++)
        open_tensors(u->row, rank, e, &t[e]);
    (void)cudaDeviceSynchronize();
    for (uint32_t e = 0; e < u->row->epochs && r == 0; e++)
        r = prs_attention_launch(plan, &(struct prs_attention_operands){t[e].q, t[e].k, t[e].v, t[e].out, t[e].lse},
                                 stream);
    if (cudaStreamSynchronize(stream) != cudaSuccess && r == 0)
        r = -5;
    prs_attention_plan_close(plan);
    for (uint32_t e = 0; e < u->row->epochs && r == 0; e++)
        check_tensors(u, rank, e, &t[e]);
    for (uint32_t e = 0; e < u->row->epochs; e++) {
        void *all[] = {t[e].q, t[e].k, t[e].v, t[e].out, t[e].lse};
        for (int i = 0; i < 5; i++)
            (void)cudaFree(all[i]);
    }
    (void)cudaStreamDestroy(stream);
    return r;
}

/* A slice crosses to each other node once. */
static void check_traffic(struct run *u, uint32_t rank, const struct prs_fused *ctx)
{
    const struct prs_attention_shape *s = &u->row->shape;
    struct prs_fused_traffic traffic;
    uint64_t share = (uint64_t)s->batch * slice_rows(u->row) * s->heads_kv * s->head_dim * 2 * 2;
    prs_fused_traffic(ctx, &traffic);
    if (u->row->nodes == 0 || s->causal != 0)
        return;
    if (traffic.puts == 0 || traffic.bytes / (share * (u->row->nodes - 1) * u->row->epochs) != 1)
        complain(u, "bytes put to other nodes", rank, u->row->epochs, (uint32_t)traffic.puts, 0, (double)traffic.bytes,
                 (double)(share * (u->row->nodes - 1) * u->row->epochs));
}

static void run_rank(uint32_t rank, struct ranks_self *self, void *user)
{
    struct run *u = user;
    struct prs_fused *ctx = NULL;
    struct prs_attention_plan *plan = NULL;
    struct prs_fused_error error;
    int r = ranks_open(self, u->row->nodes, 60000, &ctx);
    if (!r)
        r = prs_attention_plan_open(ctx, &u->row->shape, &u->row->tuning, &plan);
    if (!r)
        r = run_epochs(u, rank, plan);
    if (!r)
        check_traffic(u, rank, ctx);
    if (!r)
        r = prs_fused_poll_error(ctx, &error);
    prs_fused_close(ctx);
    if (r)
        __atomic_store_n(&u->result, r, __ATOMIC_RELAXED);
}

static void assert_right(const struct row *rows, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        struct run u = {.row = &rows[i], .lock = PTHREAD_MUTEX_INITIALIZER};
        unsigned long long seed;
        hopper_setup(8, SMS, 0);
        seed = (unsigned long long)hopper_seed();
        ranks_run(rows[i].world, run_rank, &u);
        cr_assert_eq(u.result, 0, "row %zu: the calls returned %d (HOPPER_SEED=%llu)", i, u.result, seed);
        cr_assert_eq(u.wrong, 0, "row %zu: %llu values wrong in %llu rows, first %s (HOPPER_SEED=%llu)", i,
                     (unsigned long long)u.wrong, (unsigned long long)u.checked, u.first, seed);
        cr_assert_gt(u.checked, 0);
    }
}

/* world, {batch, heads_q, heads_kv, head_dim, seq, causal, heads_first, scale}, epochs, tuning */
Test(attention, one_rank_alone_is_right, .timeout = 600)
{
    ASSERT_RIGHT({1, {1, 1, 1, 128, 256, 0, 0, 0}, 1}, {1, {1, 2, 2, 64, 256, 0, 1, 0}, 1},
                 {1, {2, 3, 3, 128, 333, 0, 0, 0.4f}, 2}, /* tails, steep softmax */
                 {1, {1, 2, 2, 64, 521, 0, 0, 0.5f}, 1}, {1, {1, 2, 1, 128, 1, 0, 1, 0}, 1});
}

Test(attention, causal_alone_is_right, .timeout = 600)
{
    ASSERT_RIGHT({1, {1, 2, 2, 128, 512, 1, 0, 0}, 1}, {1, {1, 2, 2, 64, 400, 1, 1, 0.5f}, 2},
                 {1, {2, 3, 1, 128, 333, 1, 1, 0.4f}, 1}, {1, {1, 1, 1, 128, 130, 1, 0, 0}, 1});
}

/* Four CTAs and one head per step: some CTAs begin with a later step, whose credit needs the steps before it. */
Test(attention, a_cta_that_begins_with_a_later_group_gives_credit_for_those_before, .timeout = 900)
{
    ASSERT_RIGHT({2, {1, 5, 5, 128, 250, 0, 0, 0.3f}, 2, {.mode = PRS_ATTENTION_RING, .heads_per_step = 1}});
}

/* Four CTAs, and a number of tasks that is no multiple of four. test_attention_deal.c asserts that tasks are cut. */
Test(attention, tasks_that_are_cut_are_put_together, .timeout = 900)
{
    ASSERT_RIGHT(
        {1, {1, 1, 1, 128, 1100, 0, 0, 0.3f}, 3}, {2, {1, 1, 1, 128, 1000, 1, 0, 0.3f}, 3},
        {2, {1, 3, 3, 128, 900, 1, 1, 0.3f}, 2, {.mode = PRS_ATTENTION_RING, .heads_per_step = 1, .block_rows = 176}},
        {2, {1, 1, 1, 128, 1300, 0, 0, 0.3f}, 3}, {1, {1, 3, 3, 64, 1000, 0, 0, 0.3f}, 2});
}

Test(attention, every_kernel_that_is_compiled_is_right, .timeout = 900)
{
    ASSERT_RIGHT({1, {1, 2, 2, 128, 530, 1, 0, 0.3f}, 1, {.block_rows = 176, .overlap = 3}},
                 {1, {1, 2, 2, 128, 1030, 0, 0, 0.3f}, 1, {.block_rows = 176, .overlap = 7}},
                 {1, {1, 2, 2, 128, 530, 1, 0, 0.3f}, 1, {.block_rows = 128, .overlap = 3}},
                 {1, {1, 2, 2, 128, 530, 1, 0, 0.03f}, 1, {.block_rows = 128, .overlap = 7}},
                 {1, {1, 2, 2, 64, 530, 0, 0, 0.3f}, 1, {.block_rows = 128, .overlap = 3}},
                 {1, {1, 2, 2, 64, 530, 1, 0, 0.1f}, 1, {.block_rows = 128, .overlap = 7}});
}

/* Heads of other widths: one rank, cut tasks; several, whose keys and values have stages of the wider one. */
Test(attention, heads_of_every_width_are_right, .timeout = 900)
{
    ASSERT_RIGHT(
        {1, {1, 2, 1, 96, 333, 1, 0, 0.3f}, 1}, {1, {1, 1, 1, 256, 200, 0, 1, 0.3f}, 1},
        {1, {1, 2, 1, 192, 333, 1, 0, 0.3f, .value_dim = 128}, 1}, {1, {1, 1, 1, 96, 1100, 0, 1, 0.3f}, 1}, /* cut */
        {2, {1, 2, 2, 192, 4 * 70, 1, 0, 0.3f, .value_dim = 128}, 2},
        {2, {1, 3, 3, 192, 200, 0, 1, 0.3f, .value_dim = 128}, 2, {.mode = PRS_ATTENTION_RING, .heads_per_step = 1}},
        {3, {2, 3, 3, 192, 6 * 70, 1, 0, 0.3f, .value_dim = 128}, 2, {.mover = PRS_MOVED_BY_COPY_ENGINES}},
        {3, {2, 4, 2, 192, 300, 0, 1, 0.3f, .value_dim = 128}, 2, {.mover = PRS_MOVED_BY_COPY_ENGINES}},
        {2, {1, 2, 2, 192, 4 * 70, 1, 1, 0.3f, .value_dim = 128}, 2, {.mover = PRS_MOVED_BY_CTAS}},
        {2, {1, 2, 1, 96, 180, 0, 0, 0.3f}, 2, {.mover = PRS_MOVED_BY_CTAS}},
        {2, {1, 2, 2, 96, 4 * 40, 1, 1, 0.3f}, 2, {.mover = PRS_MOVED_BY_COPY_ENGINES}},
        {2, {1, 1, 1, 256, 4 * 40, 1, 0, 0.3f}, 2, {.mover = PRS_MOVED_BY_CTAS}});
}

Test(attention, several_ranks_look_at_all_keys, .timeout = 900)
{
    ASSERT_RIGHT({2, {1, 2, 2, 128, 512, 0, 0, 0}, 3}, {4, {1, 4, 2, 128, 800, 0, 1, 0.3f}, 2},
                 {2, {2, 2, 1, 64, 402, 0, 0, 0.4f}, 4}, {4, {1, 3, 1, 64, 1028, 0, 1, 0}, 2},
                 {3, {1, 2, 2, 128, 99, 0, 0, 0}, 3});
}

Test(attention, several_causal_ranks_look_at_what_came_before, .timeout = 900)
{
    ASSERT_RIGHT({2, {1, 2, 2, 128, 512, 1, 0, 0}, 3}, {4, {1, 4, 2, 128, 1048, 1, 1, 0.3f}, 2},
                 {2, {2, 2, 1, 64, 404, 1, 0, 0.4f}, 4}, {4, {1, 3, 3, 64, 1032, 1, 0, 0}, 2},
                 {3, {1, 2, 2, 128, 102, 1, 1, 0}, 3});
}

/* Every count of ranks that a node may have, in each way of moving keys. */
Test(attention, up_to_eight_ranks_of_a_node_look_at_all_keys, .timeout = 900)
{
    ASSERT_RIGHT({5, {1, 2, 1, 64, 5 * 66, 0, 0, 0.3f}, 3}, {6, {1, 2, 2, 128, 12 * 40, 1, 1, 0.3f}, 2},
                 {7, {1, 3, 3, 64, 14 * 40, 1, 0, 0.3f}, 3, {.mode = PRS_ATTENTION_RING, .heads_per_step = 1}},
                 {8, {1, 2, 2, 64, 8 * 70, 0, 0, 0.3f}, 3, {.mover = PRS_MOVED_BY_COPY_ENGINES, .heads_per_step = 1}},
                 {8, {1, 3, 3, 64, 16 * 40, 1, 0, 0.3f}, 4, {.mode = PRS_ATTENTION_RING, .heads_per_step = 1}});
}

Test(attention, a_ring_of_two_buffers_is_right, .timeout = 900)
{
    ASSERT_RIGHT(
        {2, {1, 5, 5, 128, 400, 0, 0, 0.3f}, 3, {.mode = PRS_ATTENTION_RING, .heads_per_step = 1}},
        {4, {2, 6, 3, 64, 528, 1, 0, 0.3f}, 2, {.mode = PRS_ATTENTION_RING, .heads_per_step = 1, .slab_rows = 64}},
        {4, {1, 5, 5, 128, 400, 0, 1, 0}, 2, {.workspace_limit = 1000000, .heads_per_step = 2}});
}

/* Copy engines, in both layouts; steps hold whole batches, some heads of one batch, or heads of two batches. */
Test(attention, keys_that_are_copied_are_right, .timeout = 900)
{
    ASSERT_RIGHT({2, {1, 2, 2, 128, 512, 0, 0, 0}, 3, {.mover = PRS_MOVED_BY_COPY_ENGINES}},
                 {4, {3, 4, 2, 64, 400, 0, 0, 0.3f}, 3, {.mover = PRS_MOVED_BY_COPY_ENGINES, .heads_per_step = 1}},
                 {3, {2, 3, 3, 64, 390, 1, 0, 0.3f}, 3, {.mover = PRS_MOVED_BY_COPY_ENGINES, .heads_per_step = 2}},
                 {4, {2, 2, 2, 128, 1048, 1, 1, 0.3f}, 2, {.mover = PRS_MOVED_BY_COPY_ENGINES, .heads_per_step = 1}},
                 {2, {2, 4, 2, 128, 404, 0, 1, 0.4f}, 2, {.mover = PRS_MOVED_BY_COPY_ENGINES, .heads_per_step = 3}});
}

/* With CUDA_LAUNCH_BLOCKING a launch returns when its kernel has ended, and the kernel needs copies of other ranks. */
Test(attention, launches_that_block_find_all_copies_enqueued, .timeout = 900)
{
    setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
    ASSERT_RIGHT({2, {1, 2, 2, 128, 512, 1, 0, 0}, 3, {.mover = PRS_MOVED_BY_COPY_ENGINES}});
}

/* ---- several nodes: the real transport, over the software NIC ---- */
/* ---- every access checked for its order: small launches that together reach every line of the kernels that makes
 * order on one node (memory_order.py) ---- */
Test(attention_order, of_pushed_keys, .timeout = 600)
{
    ASSERT_RIGHT({2, {1, 2, 2, 64, 200, 0, 0, 0}, 3});
}

Test(attention_order, of_a_ring_of_two_buffers, .timeout = 600)
{
    ASSERT_RIGHT({3, {1, 3, 3, 64, 150, 1, 0, 0}, 3, {.mode = PRS_ATTENTION_RING, .heads_per_step = 1}});
}

Test(attention_order, of_copied_keys, .timeout = 600)
{
    ASSERT_RIGHT({2, {1, 2, 2, 64, 200, 0, 0, 0}, 3, {.mover = PRS_MOVED_BY_COPY_ENGINES, .heads_per_step = 1}});
}

Test(attention_order, of_tasks_that_are_cut, .timeout = 600)
{
    ASSERT_RIGHT({1, {1, 1, 1, 128, 1100, 0, 0, 0.3f}, 2});
}

static void need_software_nic(void)
{
    if (!getenv("SOFTNIC_WORLD"))
        cr_skip_test("not under softnic-run");
}

Test(attention_nodes, ranks_of_two_nodes_look_at_all_keys, .timeout = 900)
{
    need_software_nic();
    ASSERT_RIGHT({4, {1, 2, 2, 128, 800, 0, 0, 0.3f}, 3, {.slab_rows = 64}, 2},
                 {4, {1, 4, 2, 64, 404, 0, 1, 0.3f}, 2, {.heads_per_step = 1}, 2},
                 {2, {1, 2, 1, 128, 402, 0, 0, 0}, 2, {0}, 2}, {3, {1, 2, 2, 64, 333, 0, 0, 0}, 2, {0}, 3});
}

Test(attention_nodes, causal_ranks_of_two_nodes_look_at_what_came_before, .timeout = 900)
{
    need_software_nic();
    ASSERT_RIGHT({4, {1, 2, 2, 128, 1048, 1, 0, 0.3f}, 2, {.slab_rows = 64}, 2},
                 {4, {2, 2, 1, 64, 400, 1, 1, 0}, 3, {0}, 2}, {3, {1, 1, 1, 128, 360, 1, 0, 0}, 2, {0}, 3});
}

Test(attention_nodes, two_buffers_are_enough_between_nodes, .timeout = 900)
{
    need_software_nic();
    ASSERT_RIGHT({4, {1, 5, 5, 64, 400, 0, 0, 0.3f}, 3, {.mode = PRS_ATTENTION_RING, .heads_per_step = 1}, 2},
                 {4, {1, 5, 5, 128, 400, 1, 0, 0.3f}, 2, {.mode = PRS_ATTENTION_RING, .heads_per_step = 2}, 2});
}

/* ---- plans ---- */
static void open_alone(struct prs_fused **ctx)
{
    struct prs_fused_config config = {.world = 1};
    hopper_setup(1, SMS, 0);
    cr_assert_eq(prs_fused_open(&config, ctx), 0);
}

Test(attention, a_plan_says_what_it_chose, .timeout = 900)
{
    struct prs_attention_shape shape = {1, 2, 2, 128, 512, 0, 0, 0};
    struct prs_attention_plan *plan;
    struct prs_attention_info info;
    struct prs_fused *ctx;
    open_alone(&ctx);
    cr_assert_eq(prs_attention_plan_open(ctx, &shape, NULL, &plan), 0);
    prs_attention_plan_query(plan, &info);
    cr_assert_eq(info.tuning.mode, PRS_ATTENTION_ALONE);
    cr_assert_eq(info.tuning.block_rows, 176);
    cr_assert_eq(info.tuning.overlap, 3);
    cr_assert_eq(info.sent_bytes, 0);
    prs_attention_plan_close(plan);
    shape.causal = 1;
    cr_assert_eq(prs_attention_plan_open(ctx, &shape, NULL, &plan), 0);
    prs_attention_plan_query(plan, &info);
    cr_assert_eq(info.tuning.block_rows, 128);
    prs_attention_plan_close(plan);
    prs_fused_close(ctx);
}

Test(attention, what_cannot_be_launched_is_refused, .timeout = 900)
{
    struct prs_attention_shape shape = {1, 2, 2, 128, 512, 0, 0, 0};
    struct prs_attention_shape narrow = {1, 2, 2, 64, 512, 0, 0, 0}, odd_values = {1, 2, 2, 192, 512, 0, 0, 0};
    struct prs_attention_shape striped = {1, 2, 2, 96, 512, 1, 0, 0, .stripe = 128};
    struct prs_attention_tuning unknown = {.block_rows = 100}, narrow_blocks = {.block_rows = 176};
    static const double scales[] = {-0.125, 1e-21, 1e21, (double)INFINITY, (double)NAN};
    struct prs_attention_plan *plan, *other;
    struct prs_fused *ctx;
    struct prs_attention_operands near, odd;
    char *x;
    open_alone(&ctx);
    cr_assert_eq(prs_attention_plan_open(ctx, &shape, &unknown, &plan), -EINVAL);
    cr_assert_eq(prs_attention_plan_open(ctx, &narrow, &narrow_blocks, &plan), -EINVAL);
    cr_assert_eq(prs_attention_plan_open(ctx, &odd_values, NULL, &plan), -EINVAL);
    cr_assert(strstr(prs_fused_error_text(), "head_dim 192 with values of 192") != NULL, "%s", prs_fused_error_text());
    cr_assert_eq(prs_attention_plan_open(ctx, &striped, NULL, &plan), -EINVAL);
    cr_assert(strstr(prs_fused_error_text(), "head_dim 96 and values of 96") != NULL, "%s", prs_fused_error_text());
    cr_assert_eq(prs_attention_plan_open(ctx, &shape, NULL, &plan), 0);
    cr_assert_eq(cudaMalloc((void **)&x, 512 * 256 * 2 + 16), cudaSuccess);
    near = (struct prs_attention_operands){.q = x, .k = x + 8, .v = x, .out = x};
    odd = (struct prs_attention_operands){.q = x, .k = x, .v = x, .out = x, .lse = (float *)(x + 2)};
    cr_assert_eq(prs_attention_launch(plan, &near, NULL), -EINVAL);
    cr_assert_eq(prs_attention_launch(plan, &odd, NULL), -EINVAL);
    for (size_t i = 0; i < sizeof(scales) / sizeof(*scales); i++) {
        struct prs_attention_operands scaled = {.q = x, .k = x, .v = x, .out = x, .scale = scales[i]};
        char text[64];
        (void)snprintf(text, sizeof(text), "scale %g of a launch is not in 1e-20 ... 1e+20", scales[i]);
        cr_assert_eq(prs_attention_launch(plan, &scaled, NULL), -EINVAL);
        cr_assert(strstr(prs_fused_error_text(), text) != NULL, "%s", prs_fused_error_text());
        shape.scale = (float)scales[i];
        cr_assert_eq(prs_attention_plan_open(ctx, &shape, NULL, &other), -EINVAL);
        cr_assert(strstr(prs_fused_error_text(), " of a plan is not in 1e-20 ") != NULL, "%s", prs_fused_error_text());
    }
    prs_attention_plan_close(plan);
    prs_fused_close(ctx);
}

struct lost {
    struct prs_attention_tuning tuning;
    struct prs_fused_error error[3];
};

/* Rank 2 opens everything and launches nothing. */
static void launch_unless_lost(uint32_t rank, struct ranks_self *self, void *user)
{
    struct lost *lost = user;
    struct prs_attention_shape shape = {1, 2, 2, 128, 300, 0, 0, 0};
    struct prs_attention_plan *plan;
    struct prs_fused *ctx;
    struct prs_attention_operands x = {.lse = NULL};
    cr_assert_eq(ranks_open(self, 0, RANKS_LOST_MS, &ctx), 0);
    cr_assert_eq(prs_attention_plan_open(ctx, &shape, &lost->tuning, &plan), 0);
    x.q = x.k = x.v = ranks_upload(1, 100 * 256);
    cr_assert_eq(cudaMalloc(&x.out, 100 * 256 * 2), cudaSuccess);
    if (rank != 2)
        cr_assert_eq(prs_attention_launch(plan, &x, NULL), 0);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    (void)prs_fused_poll_error(ctx, &lost->error[rank]);
    if (rank != 2)
        cr_assert_eq(prs_attention_launch(plan, &x, NULL), -ETIMEDOUT, "the first error stays");
    prs_attention_plan_close(plan);
    prs_fused_close(ctx);
}

static void assert_lost_rank_is_named(struct prs_attention_tuning tuning)
{
    struct lost lost = {.tuning = tuning};
    hopper_setup(3, SMS, 0);
    hopper_forgive_late_writes();
    ranks_run(3, launch_unless_lost, &lost);
    for (int rank = 0; rank < 2; rank++) {
        const struct prs_fused_error *e = &lost.error[rank];
        cr_assert_eq(e->code, -ETIMEDOUT, "rank %d: %d", rank, e->code);
        cr_assert(strstr(e->text, "for keys or values of rank 2: flag ") != NULL, "%s", e->text);
    }
    cr_assert_eq(lost.error[2].code, 0);
}

Test(attention, a_lost_rank_is_named_by_the_others, .timeout = 900)
{
    assert_lost_rank_is_named((struct prs_attention_tuning){.mover = PRS_MOVED_BY_CTAS});
}

Test(attention, a_lost_rank_that_was_to_copy_is_named_by_the_others, .timeout = 900)
{
    assert_lost_rank_is_named((struct prs_attention_tuning){.mover = PRS_MOVED_BY_COPY_ENGINES});
}
