/* SPDX-License-Identifier: Apache-2.0 */
/* Launches of ring attention that are smaller than their plan, forward and backward, on emulated GPUs: shorter, or of
 * fewer sequences; and with another scale. Compared with plans of their size and scale, bit by bit. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/hopper/hopper.h"
#include "test/hopper/ranks.h"

enum { SMS = 4, LENGTHS = 5, GRAPHS = 2, LIMIT_MS = 60000 };

struct row {
    uint32_t world;
    struct prs_attention_shape shape; /* of the plans */
    uint32_t seq[LENGTHS];            /* of launches, in this order; 0: no more */
    struct prs_attention_tuning tuning;
    bool forward_only;
    uint32_t nodes;          /* 0: one */
    uint32_t end;            /* packed: of the only sequence; 0: there are several */
    uint32_t batch[LENGTHS]; /* of launches; 0: the plans' */
};

struct run {
    const struct row *row;
    pthread_mutex_t lock;
    uint32_t compared, wrong;
    int result;
    char first[160];
};

/* Those of sinks belong to launches of plans with stripes. */
enum tensor { Q, K, V, DOUT, SINKS, OUT, LSE, DQ, DK, DV, DSINKS, TENSORS };
enum { GIVEN = SINKS + 1 /* of the tensors, which are random */, SEQUENCES = 3 };

/* Of a launch on one rank. */
struct launch {
    void *x[TENSORS];
    int32_t *bounds;                  /* packed sequences */
    struct prs_attention_shape shape; /* with the launch's size */
};

struct plans {
    struct prs_attention_plan *forward;
    struct prs_attention_backward_plan *backward;
};

static uint64_t bytes_of(const struct prs_attention_shape *s, uint32_t world, enum tensor t)
{
    bool of_keys = t == K || t == V || t == DK || t == DV, of_values = t == V || t == OUT || t == DOUT || t == DV;
    uint64_t rows = (uint64_t)s->batch * (s->seq / world) * (of_keys ? s->heads_kv : s->heads_q);
    if (t == SINKS || t == DSINKS)
        return s->stripe != 0 ? s->heads_q * sizeof(float) : 0;
    if (t == LSE)
        return rows * sizeof(float);
    return rows * (of_values && s->value_dim != 0 ? s->value_dim : s->head_dim) * 2;
}

/* batch: 0: the plans'. */
static void open_launch(const struct row *r, uint32_t rank, uint32_t number, uint32_t batch, uint32_t seq,
                        struct launch *x)
{
    int32_t end = (int32_t)r->end, all = (int32_t)seq;
    int32_t bounds[SEQUENCES + 1] = {0, end ? end : all / 3, end ? end : all / 3 + 5, end ? end : all - 20};
    *x = (struct launch){.shape = r->shape};
    x->shape.seq = seq;
    x->shape.batch = batch != 0 ? batch : r->shape.batch;
    for (int t = 0; t < TENSORS; t++) {
        uint64_t bytes = bytes_of(&x->shape, r->world, t);
        if (bytes != 0)
            x->x[t] = t < GIVEN ? ranks_upload(1 + (number * 8 + rank) * 8 + (uint32_t)t, bytes / 2)
                                : ranks_device(bytes, 0xff);
    }
    if (r->shape.packed == 0)
        return;
    x->bounds = ranks_device(sizeof(bounds), 0);
    (void)cudaMemcpy(x->bounds, bounds, sizeof(bounds), cudaMemcpyHostToDevice);
}

static void close_launch(struct launch *x)
{
    for (int t = 0; t < TENSORS; t++)
        (void)cudaFree(x->x[t]);
    (void)cudaFree(x->bounds);
}

/* batch, seq: what the operands say. seq 0: they say no scale either; otherwise that of x, as a plan derives it. lse
 * and out of the backward launch are those of `from`. */
static int launch(const struct plans *p, const struct launch *x, uint32_t batch, uint32_t seq,
                  const struct launch *from, cudaStream_t stream)
{
    double own = x->shape.scale != 0 ? (double)x->shape.scale : 1 / sqrt(x->shape.head_dim);
    double scale = seq != 0 ? own : 0;
    uint32_t sequences = x->bounds ? SEQUENCES : 0;
    struct prs_attention_operands forward = {x->x[Q],    x->x[K],        x->x[V],       x->x[OUT],
                                             x->x[LSE],  x->bounds,      sequences,     x->x[SINKS],
                                             .seq = seq, .batch = batch, .scale = scale};
    struct prs_attention_gradients backward = {.q = x->x[Q],
                                               .k = x->x[K],
                                               .v = x->x[V],
                                               .out = from->x[OUT],
                                               .lse = from->x[LSE],
                                               .dout = x->x[DOUT],
                                               .dq = x->x[DQ],
                                               .dk = x->x[DK],
                                               .dv = x->x[DV],
                                               .cu_seqlens = x->bounds,
                                               .sequences = sequences,
                                               .sinks = x->x[SINKS],
                                               .dsinks = x->x[DSINKS],
                                               .seq = seq,
                                               .batch = batch,
                                               .scale = scale};
    int r = prs_attention_launch(p->forward, &forward, stream);
    return r != 0 || !p->backward ? r : prs_attention_backward_launch(p->backward, &backward, stream);
}

static void close_plans(const struct plans *p)
{
    prs_attention_plan_close(p->forward);
    prs_attention_backward_plan_close(p->backward);
}

static int open_plans(struct prs_fused *ctx, const struct prs_attention_shape *shape,
                      const struct prs_attention_tuning *forward, const struct prs_attention_tuning *backward,
                      struct plans *p)
{
    int r = prs_attention_plan_open(ctx, shape, forward, &p->forward);
    return r != 0 || !backward ? r : prs_attention_backward_plan_open(ctx, shape, backward, &p->backward);
}

/* What a plan of this size gives that has the tuning of the plans. */
static int solve_alone(struct prs_fused *ctx, const struct plans *as, const struct launch *x, cudaStream_t stream)
{
    struct prs_attention_info forward, backward;
    struct plans own = {NULL, NULL};
    int status;
    prs_attention_plan_query(as->forward, &forward);
    if (x->shape.stripe != 0)
        forward.tuning.slab_rows = 0; /* follows from the stripes */
    if (as->backward) {
        prs_attention_backward_plan_query(as->backward, &backward);
        backward.tuning.overlap = 0;
        backward.tuning.slab_rows = x->shape.stripe != 0 ? 0 : backward.tuning.slab_rows;
    }
    status = open_plans(ctx, &x->shape, &forward.tuning, as->backward ? &backward.tuning : NULL, &own);
    if (!status)
        status = launch(&own, x, 0, 0, x, stream);
    (void)cudaStreamSynchronize(stream);
    close_plans(&own);
    return status;
}

static void compare(struct run *u, uint32_t rank, const char *when, const struct launch *have,
                    const struct launch *want)
{
    static const char *const names[TENSORS] = {
        [OUT] = "out", [LSE] = "lse", [DQ] = "dq", [DK] = "dk", [DV] = "dv", [DSINKS] = "dsinks"};
    for (int t = GIVEN; t < (u->row->forward_only ? DQ : TENSORS); t++) {
        uint64_t bytes = bytes_of(&have->shape, u->row->world, t);
        char *a = malloc(bytes), *b = malloc(bytes);
        (void)cudaMemcpy(a, have->x[t], bytes, cudaMemcpyDeviceToHost);
        (void)cudaMemcpy(b, want->x[t], bytes, cudaMemcpyDeviceToHost);
        pthread_mutex_lock(&u->lock);
        if (memcmp(a, b, bytes) != 0 && u->wrong++ == 0)
            (void)snprintf(u->first, sizeof(u->first), "%s of rank %u, %u of %u positions, %s", names[t], rank,
                           have->shape.batch, have->shape.seq, when);
        u->compared++;
        pthread_mutex_unlock(&u->lock);
        ranks_fill(have->x[t], 0xff, bytes);
        free(a);
        free(b);
    }
}

/* Launches of the plans' length whose inputs are NaN: these are then all over the memory that ranks send to. */
static int poison(const struct row *r, uint32_t rank, const struct plans *p, cudaStream_t stream)
{
    struct launch x;
    int status;
    open_launch(r, rank, 0, 0, r->shape.seq, &x);
    for (int t = 0; t < GIVEN; t++)
        ranks_fill(x.x[t], 0xff, bytes_of(&x.shape, r->world, t));
    status = launch(p, &x, 0, 0, &x, stream);
    (void)cudaStreamSynchronize(stream);
    close_launch(&x);
    return status;
}

/* Captures launches of several sizes, and replays them in another order. */
static int replay(const struct plans *p, const struct launch *x, const struct launch *from, cudaStream_t stream)
{
    cudaGraph_t graph[GRAPHS];
    cudaGraphExec_t exec[GRAPHS];
    int r = 0;
    for (uint32_t i = 0; i < GRAPHS; i++) {
        (void)cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
        r = r ? r : launch(p, &x[i], x[i].shape.batch, x[i].shape.seq, &from[i], stream);
        (void)cudaStreamEndCapture(stream, &graph[i]);
        (void)cudaGraphInstantiate(&exec[i], graph[i], 0);
    }
    for (uint32_t i = 0; i <= GRAPHS && r == 0; i++)
        r = cudaGraphLaunch(exec[(i + 1) % GRAPHS], stream) == cudaSuccess ? 0 : -EIO;
    (void)cudaStreamSynchronize(stream);
    for (uint32_t i = 0; i < GRAPHS; i++) {
        (void)cudaGraphExecDestroy(exec[i]);
        (void)cudaGraphDestroy(graph[i]);
    }
    return r;
}

/* All sizes one after the other, without a wait between them; then two of them from graphs. */
static int run_lengths(struct run *u, uint32_t rank, struct prs_fused *ctx, const struct plans *p, uint32_t count,
                       cudaStream_t stream)
{
    const struct row *row = u->row;
    struct launch have[LENGTHS], want[LENGTHS];
    int r = 0;
    for (uint32_t i = 0; i < count; i++) {
        open_launch(row, rank, i, row->batch[i], row->seq[i], &have[i]);
        open_launch(row, rank, i, row->batch[i], row->seq[i], &want[i]);
    }
    (void)cudaDeviceSynchronize();
    for (uint32_t i = 0; i < count && !r; i++)
        r = solve_alone(ctx, p, &want[i], stream);
    if (!r)
        r = poison(row, rank, p, stream);
    for (uint32_t i = 0; i < count && !r; i++)
        r = launch(p, &have[i], row->batch[i], row->seq[i], &want[i], stream);
    (void)cudaStreamSynchronize(stream);
    for (uint32_t i = 0; i < count && !r; i++)
        compare(u, rank, "launched", &have[i], &want[i]);
    if (!r)
        r = poison(row, rank, p, stream);
    if (!r)
        r = replay(p, have, want, stream);
    for (uint32_t i = 0; i < GRAPHS && !r; i++)
        compare(u, rank, "replayed", &have[i], &want[i]);
    for (uint32_t i = 0; i < count; i++) {
        close_launch(&have[i]);
        close_launch(&want[i]);
    }
    return r;
}

static void run_rank(uint32_t rank, struct ranks_self *self, void *user)
{
    struct run *u = user;
    struct plans p = {NULL, NULL};
    struct prs_fused *ctx = NULL;
    struct prs_fused_error error;
    struct prs_attention_shape shape = u->row->shape;
    cudaStream_t stream;
    uint32_t count = 0;
    int r = ranks_open(self, u->row->nodes, LIMIT_MS, &ctx);
    while (count < LENGTHS && u->row->seq[count] != 0)
        count++;
    (void)cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    shape.scale = 0.7f; /* of no launch that is compared */
    if (!r)
        r = open_plans(ctx, &shape, &u->row->tuning,
                       u->row->forward_only
                           ? NULL
                           : &(struct prs_attention_tuning){.mode = u->row->tuning.mode,
                                                            .heads_per_step = u->row->tuning.heads_per_step,
                                                            .slab_rows = u->row->tuning.slab_rows},
                       &p);
    if (!r)
        r = run_lengths(u, rank, ctx, &p, count, stream);
    if (!r)
        r = prs_fused_poll_error(ctx, &error);
    close_plans(&p);
    (void)cudaStreamDestroy(stream);
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
        cr_assert_eq(u.result, 0, "row %zu: the calls returned %d, %s (HOPPER_SEED=%llu)", i, u.result,
                     prs_fused_error_text(), seed);
        cr_assert_eq(u.wrong, 0, "row %zu: %u of %u tensors differ, first %s (HOPPER_SEED=%llu)", i, u.wrong,
                     u.compared, u.first, seed);
        cr_assert_gt(u.compared, 0);
    }
}

/* world, {batch, heads_q, heads_kv, head_dim, seq, causal, heads_first, scale}, lengths, tuning */
Test(attention_lengths, of_one_rank_have_the_bits_of_their_own_plan, .timeout = 600)
{
    ASSERT_RIGHT({1, {1, 1, 1, 128, 1100, 0, 0, 0.3f}, {1000, 333, 1100, 130, 1000}, .forward_only = true}, /* cut */
                 {1, {1, 3, 1, 64, 700, 1, 1, 0.3f}, {200, 700, 1, 513}});
}

Test(attention_lengths, that_are_pushed_have_the_bits_of_their_own_plan, .timeout = 600)
{
    ASSERT_RIGHT(
        {2, {1, 2, 1, 128, 320, 0, 1, 0.3f}, {160, 320, 2, 282}, {.mover = PRS_MOVED_BY_CTAS, .slab_rows = 64}},
        {3, {2, 1, 1, 64, 402, 1, 0, 0.3f}, {72, 402, 330, 6}, {.mover = PRS_MOVED_BY_CTAS}},
        {2,
         {1, 2, 2, 192, 300, 1, 0, 0.3f, .value_dim = 128},
         {160, 300, 4},
         {.mover = PRS_MOVED_BY_CTAS},
         .forward_only = true});
}

Test(attention_lengths, through_two_buffers_have_the_bits_of_their_own_plan, .timeout = 600)
{
    ASSERT_RIGHT({2,
                  {1, 3, 3, 128, 360, 1, 0, 0.3f},
                  {340, 204, 360, 204},
                  {.mode = PRS_ATTENTION_RING, .heads_per_step = 1, .slab_rows = 64}},
                 {3,
                  {1, 6, 3, 64, 210, 0, 0, 0.3f},
                  {90, 210, 3, 168},
                  {.mode = PRS_ATTENTION_RING, .heads_per_step = 1, .slab_rows = 64}});
}

Test(attention_lengths, that_are_copied_have_the_bits_of_their_own_plan, .timeout = 600)
{
    ASSERT_RIGHT({2,
                  {2, 4, 2, 128, 404, 1, 0, 0.3f},
                  {200, 404, 4, 300},
                  {.mover = PRS_MOVED_BY_COPY_ENGINES, .heads_per_step = 1},
                  .forward_only = true},
                 {3,
                  {1, 2, 2, 192, 420, 0, 1, 0.3f, .value_dim = 128},
                  {180, 3, 420, 282},
                  {.mover = PRS_MOVED_BY_COPY_ENGINES},
                  .forward_only = true});
}

Test(attention_lengths, of_fewer_sequences_have_the_bits_of_their_own_plan, .timeout = 600)
{
    ASSERT_RIGHT({1, {3, 2, 1, 64, 160, 1, 0, 0.3f}, {160, 100, 160}, .batch = {1, 2, 3}},
                 {2,
                  {3, 2, 2, 64, 132, 1, 0, 0.3f},
                  {132, 132, 68, 132},
                  {.mover = PRS_MOVED_BY_CTAS, .heads_per_step = 1},
                  .batch = {1, 3, 2, 3}},
                 {3,
                  {4, 2, 1, 64, 90, 0, 1, 0.3f},
                  {90, 90, 60, 90},
                  {.mode = PRS_ATTENTION_RING, .heads_per_step = 1},
                  .batch = {1, 4, 2, 3}},
                 {2,
                  {3, 3, 3, 64, 132, 1, 1, 0.3f},
                  {132, 132, 132},
                  {.mode = PRS_ATTENTION_RING, .heads_per_step = 2},
                  .batch = {1, 3, 2}});
}

Test(attention_lengths, of_fewer_sequences_that_are_copied_have_the_bits_of_their_own_plan, .timeout = 600)
{
    ASSERT_RIGHT({3,
                  {4, 2, 2, 128, 240, 1, 0, 0.3f},
                  {240, 240, 120, 240},
                  {.mover = PRS_MOVED_BY_COPY_ENGINES, .heads_per_step = 1},
                  .forward_only = true,
                  .batch = {1, 4, 3, 2}},
                 {2,
                  {3, 2, 2, 192, 200, 0, 1, 0.3f, .value_dim = 128},
                  {200, 100, 200},
                  {.mover = PRS_MOVED_BY_COPY_ENGINES, .heads_per_step = 4},
                  .forward_only = true,
                  .batch = {1, 2, 3}});
}

/* world, {batch, heads_q, heads_kv, head_dim, seq, causal, heads_first, scale, stripe, window, packed, soft_cap} */
Test(attention_lengths, of_fewer_sequences_of_stripes_have_the_bits_of_their_own_plan, .timeout = 600)
{
    ASSERT_RIGHT({2,
                  {3, 1, 1, 64, 1024, 1, 0, 0, 128, 200, 0},
                  {1024, 1024, 512, 1024},
                  {.heads_per_step = 1},
                  .batch = {1, 3, 2, 3}},
                 {2,
                  {4, 2, 1, 64, 512, 0, 1, 0, 128, 100, 0, 20},
                  {512, 512, 512},
                  {.mode = PRS_ATTENTION_RING, .heads_per_step = 1},
                  .batch = {1, 4, 3}});
}

Test(attention_lengths, of_stripes_have_the_bits_of_their_own_plan, .timeout = 600)
{
    ASSERT_RIGHT({1, {1, 1, 1, 64, 512, 1, 0, 0, 128, 0, 1}, {256, 512, 256}},
                 {2, {2, 1, 1, 128, 1024, 0, 1, 0, 128, 100, 0, 20}, {512, 1024, 512}},
                 {3, {1, 2, 1, 64, 1536, 1, 0, 0, 128, 200, 1}, {768, 1536}});
}

Test(attention_lengths, of_stripes_through_two_buffers_have_the_bits_of_their_own_plan, .timeout = 600)
{
    ASSERT_RIGHT({2,
                  {1, 3, 3, 64, 1024, 1, 0, 0, 128, 100, 1},
                  {512, 1024, 512, 512},
                  {.mode = PRS_ATTENTION_RING, .heads_per_step = 1}});
}

/* A longer launch has other places for the keys of a head: those of the launch before must have been read. Rank 1 has
 * most of the work, of which rank 0 needs nothing. */
Test(attention_lengths, of_stripes_wait_for_the_launch_before, .timeout = 600)
{
    ASSERT_RIGHT({2,
                  {1, 8, 8, 64, 1024, 1, 0, 0, 128, 0, 1},
                  {512, 1024, 512, 1024, 512},
                  {.heads_per_step = 1},
                  .forward_only = true,
                  .end = 384});
}

/* Relay slots, signals of slabs, and credit between nodes. */
Test(attention_lengths_nodes, have_the_bits_of_their_own_plan, .timeout = 600)
{
    if (!getenv("SOFTNIC_WORLD"))
        cr_skip_test("not under softnic-run");
    ASSERT_RIGHT({4, {1, 2, 1, 64, 520, 0, 0, 0.3f}, {260, 520, 4, 400}, {.slab_rows = 64}, .nodes = 2},
                 {4,
                  {1, 3, 3, 64, 400, 1, 0, 0.3f},
                  {160, 400, 8, 320, 160},
                  {.mode = PRS_ATTENTION_RING, .heads_per_step = 1, .slab_rows = 64},
                  .nodes = 2});
}

Test(attention_lengths_nodes, of_fewer_sequences_have_the_bits_of_their_own_plan, .timeout = 600)
{
    if (!getenv("SOFTNIC_WORLD"))
        cr_skip_test("not under softnic-run");
    ASSERT_RIGHT({4,
                  {3, 2, 1, 64, 240, 0, 0, 0.3f},
                  {240, 240, 120, 240},
                  {.slab_rows = 64, .heads_per_step = 1},
                  .nodes = 2,
                  .batch = {1, 3, 2, 3}},
                 {4,
                  {4, 1, 1, 64, 240, 1, 0, 0.3f},
                  {240, 240, 240, 80, 240},
                  {.mode = PRS_ATTENTION_RING, .heads_per_step = 1, .slab_rows = 64},
                  .nodes = 2,
                  .batch = {1, 4, 3, 2, 4}});
}

/* ---- what is refused ---- */
static void assert_refused(struct prs_fused *ctx, struct prs_attention_shape shape, uint64_t batch, uint64_t seq,
                           const char *text)
{
    struct prs_attention_operands forward = {.seq = seq, .batch = batch};
    struct prs_attention_gradients backward = {.seq = seq, .batch = batch};
    struct plans p = {NULL, NULL};
    void *x = ranks_device(1 << 20, 0);
    cr_assert_eq(open_plans(ctx, &shape, NULL, &(struct prs_attention_tuning){.mode = 0}, &p), 0, "%s",
                 prs_fused_error_text());
    forward.q = forward.k = forward.v = forward.out = x;
    backward.q = backward.k = backward.v = backward.out = backward.dout = x;
    backward.lse = backward.dq = backward.dk = backward.dv = x;
    cr_assert_eq(prs_attention_launch(p.forward, &forward, NULL), -EINVAL);
    cr_assert(strstr(prs_fused_error_text(), text) != NULL, "%s", prs_fused_error_text());
    cr_assert_eq(prs_attention_backward_launch(p.backward, &backward, NULL), -EINVAL);
    cr_assert(strstr(prs_fused_error_text(), text) != NULL, "%s", prs_fused_error_text());
    close_plans(&p);
    (void)cudaFree(x);
}

Test(attention_lengths, that_cannot_be_launched_are_refused, .timeout = 600)
{
    struct prs_fused *ctx = ranks_open_alone();
    assert_refused(ctx, (struct prs_attention_shape){1, 2, 2, 64, 512, 0, 0, 0}, 0, 513,
                   "seq 513 of a launch is more than 512");
    assert_refused(ctx, (struct prs_attention_shape){1, 2, 2, 64, 512, 1, 0, 0, .stripe = 128}, 0, 300,
                   "a sequence of 300 is not a multiple of 256");
    assert_refused(ctx, (struct prs_attention_shape){1, 2, 2, 64, 512, 1, 0, 0, .stripe = 128}, 0, 768,
                   "seq 768 of a launch is more than 512");
    assert_refused(ctx, (struct prs_attention_shape){2, 2, 2, 64, 512, 0, 0, 0}, 3, 512,
                   "batch 3 of a launch is more than 2");
    assert_refused(ctx, (struct prs_attention_shape){2, 2, 2, 64, 512, 1, 0, 0, .stripe = 128}, UINT64_MAX, 0,
                   "batch 18446744073709551615 of a launch is more than 2");
    prs_fused_close(ctx);
}

/* ---- ranks that launch one plan with different sizes ---- */
struct unequal {
    struct prs_attention_tuning tuning;
    bool backward; /* the backward pass */
    uint64_t odd;  /* positions of rank 1; the others launch the plan's length, twice this one */
    bool batch;    /* instead, rank 1 launches one sequence, and the others two */
    bool scale;    /* instead, rank 1 launches another scale */
    uint32_t stripe;
    struct prs_fused_error error[3];
};

static void launch_unequal(uint32_t rank, struct ranks_self *self, void *user)
{
    struct unequal *u = user;
    struct row row = {.world = 3, .shape = {2, 2, 2, 64, 2 * (uint32_t)u->odd, 0, 0, 0, u->stripe}};
    uint32_t seq = rank == 1 && !u->batch ? (uint32_t)u->odd : 0, batch = rank == 1 && u->batch ? 1 : 0, all[3];
    seq *= u->scale ? 2 : 1;
    struct plans p = {NULL, NULL}, none = {NULL, NULL};
    struct prs_fused *ctx;
    struct launch x;
    cr_assert_eq(ranks_open(self, 0, LIMIT_MS, &ctx), 0);
    cr_assert_eq(
        open_plans(ctx, &row.shape, &u->tuning, u->backward ? &(struct prs_attention_tuning){.mode = 0} : NULL, &p), 0);
    open_launch(&row, rank, 0, 0, row.shape.seq, &x);
    x.shape.scale = u->scale ? 0.5f : 0;
    if (u->scale) {
        row.shape.scale = rank == 1 ? 0.5f : 0.25f;
        cr_assert_eq(prs_attention_plan_open(ctx, &row.shape, &u->tuning, &none.forward), -EINVAL);
        cr_assert(strstr(prs_fused_error_text(), "scale") != NULL, "%s", prs_fused_error_text());
    }
    none.forward = p.forward;
    cr_assert_eq(launch(&none, &x, 0, 0, &x, NULL), 0);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    cr_assert_eq(prs_fused_poll_error(ctx, &u->error[rank]), 0, "%s", u->error[rank].text);
    cr_assert_eq(ranks_allgather(self, &rank, all, sizeof(rank)), 0); /* none refuses while another ends its first */
    if (u->backward) {
        struct prs_attention_gradients g = {x.x[Q], x.x[K],  x.x[V],  x.x[OUT], x.x[LSE],   x.x[DOUT],
                                            NULL,   x.x[DQ], x.x[DK], x.x[DV],  .seq = seq, .batch = batch};
        g.scale = seq != 0 ? (double)x.shape.scale : 0;
        cr_assert_eq(prs_attention_backward_launch(p.backward, &g, NULL), 0);
    } else {
        cr_assert_eq(launch(&none, &x, batch, seq, &x, NULL), 0);
    }
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    (void)prs_fused_poll_error(ctx, &u->error[rank]);
    cr_assert_eq(launch(&none, &x, batch, seq, &x, NULL), -EINVAL, "the error stays");
    close_launch(&x);
    close_plans(&p);
    prs_fused_close(ctx);
}

/* Every rank reports the difference, long before the limit. */
static void assert_all_are_told(struct unequal u)
{
    char rows[2][32];
    (void)snprintf(rows[0], sizeof(rows[0]), "with %u", u.batch ? 1 : (unsigned)u.odd / 3);
    (void)snprintf(rows[1], sizeof(rows[1]), "with %u", u.batch ? 2 : (unsigned)u.odd / 3 * 2);
    hopper_setup(3, SMS, 0);
    hopper_forgive_late_writes();
    ranks_run(3, launch_unequal, &u);
    for (int rank = 0; rank < 3; rank++) {
        const struct prs_fused_error *e = &u.error[rank];
        cr_assert_eq(e->code, -EINVAL, "rank %d: %d %s", rank, e->code, e->text);
        cr_assert_eq(strstr(e->text, " with another scale than rank ") != NULL, u.scale, "%s", e->text);
        if (u.scale)
            continue;
        cr_assert(strstr(e->text, rows[0]) != NULL && strstr(e->text, rows[1]) != NULL, "%s", e->text);
        cr_assert(strstr(e->text, u.batch ? " sequences, and" : " rows, and") != NULL, "%s", e->text);
    }
}

Test(attention_lengths, that_differ_are_told, .timeout = 600)
{
    assert_all_are_told((struct unequal){.tuning = {.mover = PRS_MOVED_BY_CTAS}, .odd = 300});
}

Test(attention_lengths, that_differ_are_told_where_copies_move_keys, .timeout = 600)
{
    assert_all_are_told((struct unequal){.tuning = {.mover = PRS_MOVED_BY_COPY_ENGINES}, .odd = 300});
}

Test(attention_lengths, that_differ_are_told_in_the_backward_pass, .timeout = 600)
{
    assert_all_are_told((struct unequal){.backward = true, .odd = 300});
}

Test(attention_lengths, that_differ_are_told_where_plans_have_stripes, .timeout = 600)
{
    assert_all_are_told((struct unequal){.odd = 768, .stripe = 128});
    assert_all_are_told((struct unequal){.backward = true, .odd = 768, .stripe = 128});
}

Test(attention_lengths, that_differ_in_their_sequences_are_told, .timeout = 600)
{
    assert_all_are_told((struct unequal){.tuning = {.mover = PRS_MOVED_BY_CTAS}, .odd = 150, .batch = true});
    assert_all_are_told((struct unequal){.tuning = {.mover = PRS_MOVED_BY_COPY_ENGINES}, .odd = 150, .batch = true});
    assert_all_are_told((struct unequal){.backward = true, .odd = 150, .batch = true});
    assert_all_are_told((struct unequal){.odd = 768, .stripe = 128, .batch = true});
}

Test(attention_lengths, and_scales_that_differ_are_told, .timeout = 600)
{
    assert_all_are_told((struct unequal){.tuning = {.mover = PRS_MOVED_BY_CTAS}, .odd = 30, .scale = true});
    assert_all_are_told((struct unequal){.backward = true, .odd = 30, .scale = true});
}
