/* SPDX-License-Identifier: Apache-2.0 */
/* MoE dispatch with the grouped product on emulated GPUs. Every map entry and every row of every launch is checked
 * against the definition. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/hopper/hopper.h"
#include "test/hopper/ranks.h"

enum { MAX_EPOCHS = 64, COLUMNS_PER_ROW = 9, CONTEXT_KEY = 9000 };

/* How tokens choose experts. NO_EXPERT: a token of rank 0 chooses one that does not exist. NO_PLACE: rank 0's map names
 * places that do not exist. */
enum mode { EVEN, ONE_EXPERT, HALF_EMPTY, SOME_NONE, NO_EXPERT, NO_PLACE };

struct row {
    uint32_t world, tokens, hidden, columns, experts, top_k, n_h, epochs;
    enum mode mode;
    uint32_t capacity_of_last; /* 0: room for all rows */
    struct prs_moe_tuning tuning;
    uint32_t lost;              /* 1: the last rank skips the last launch */
    uint32_t nodes;             /* over which the ranks are split; 0: one */
    uint32_t logical, replicas; /* of the map, another one in each launch and on each rank; 0: none */
};

struct run {
    const struct row *row;
    pthread_mutex_t lock;
    uint64_t rows, wrong, dropped; /* rows checked; wrong: map entries and values */
    uint64_t absent, outside;      /* choices */
    int result[RANKS_MAX];
    struct prs_fused_error error[RANKS_MAX];
    char first[200];
};

/* ---- inputs that any rank can recompute ---- */
static uint32_t count_of(const struct row *w, uint32_t epoch, uint32_t rank)
{
    return (rank + epoch) % 3 == 2 ? w->tokens / 4 : rank == 1 && epoch == 1 ? 0 : w->tokens - rank;
}

static int64_t choice_of(const struct row *w, uint32_t epoch, uint32_t rank, uint32_t token, uint32_t slot)
{
    uint32_t experts = w->logical != 0 ? w->logical : w->experts;
    uint32_t x = ranks_mix(epoch, rank * 5000 + token, 17) / 4, step = experts / w->top_k;
    uint32_t expert = (x + slot * step + ranks_mix(x, slot, 1) % step) % experts;
    switch (w->mode) {
    case ONE_EXPERT:
        return slot == 0 ? 1 : -1;
    case HALF_EMPTY:
        return expert / 2 * 2;
    case SOME_NONE:
        return ranks_mix(x, slot, 2) % 3 == 0 ? -1 : (int64_t)expert;
    case NO_EXPERT:
        return token == 5 && slot == 0 && rank == 0 ? (int64_t)experts + 7 : (int64_t)expert;
    default:
        return expert;
    }
}

/* An entry of a rank's map. Some experts have no place, some have one several times. */
static int32_t entry_of(const struct row *w, uint32_t epoch, uint32_t rank, uint32_t expert, uint32_t replica)
{
    uint32_t x = ranks_mix(epoch * 16 + rank, expert, 50 + replica) / 4;
    if (w->mode == NO_PLACE && rank == 0 && replica == 1)
        return (int32_t)(w->experts + expert * 100000000);
    return x % 5 < 2 ? -1 - (int32_t)(x % 100) : (int32_t)(x / 5 % w->experts);
}

/* Where a choice goes; or ABSENT, OUTSIDE: it has no place, or one that does not exist; or another number that is no
 * place. */
enum { ABSENT = -10, OUTSIDE = -11 };

static int64_t place_of(const struct row *w, uint32_t epoch, uint32_t rank, uint32_t token, uint32_t slot)
{
    int64_t choice = choice_of(w, epoch, rank, token, slot);
    int32_t places[8];
    uint32_t count = 0;
    if (w->logical == 0)
        return choice;
    if (choice < 0 || choice >= (int64_t)w->logical)
        return -1;
    for (uint32_t i = 0; i < w->replicas; i++)
        if (entry_of(w, epoch, rank, (uint32_t)choice, i) >= 0)
            places[count++] = entry_of(w, epoch, rank, (uint32_t)choice, i);
    if (count == 0)
        return ABSENT;
    return places[(token + rank) % count] < (int32_t)w->experts ? places[(token + rank) % count] : OUTSIDE;
}

static float weight_of(uint32_t epoch, uint32_t rank, uint32_t token, uint32_t slot)
{
    return ranks_element(7000 + epoch * 16 + rank, token * 64 + slot);
}

static uint32_t key_of_tokens(uint32_t epoch, uint32_t rank)
{
    return epoch * 16 + rank;
}

static uint32_t key_of_weights(uint32_t rank)
{
    return 5000 + rank;
}

/* ---- checks ---- */
struct result {
    struct prs_moe_row *rows;
    struct prs_moe_expert_rows *experts;
    uint16_t *out;
    struct prs_moe_status status;
};

static double reference(const struct row *w, uint32_t rank, uint32_t expert, uint32_t epoch, uint32_t from,
                        uint32_t token, uint32_t column, double *bound)
{
    double sum = 0, size = 0;
    for (uint64_t h = 0; h < w->hidden; h++) {
        uint64_t plane = (uint64_t)expert * w->hidden * w->columns;
        uint64_t at = plane + (w->n_h ? column * w->hidden + h : h * w->columns + column);
        double x = (double)ranks_element(key_of_tokens(epoch, from), (uint64_t)token * w->hidden + h) *
                   ranks_element(key_of_weights(rank), at);
        sum += x, size += fabs(x);
    }
    *bound = fabs(sum) * 0x1.02p-8 + size * 0x1p-21;
    return sum;
}

static void note(struct run *run, const char *what, uint32_t rank, uint32_t epoch, uint64_t row, double want,
                 double have)
{
    pthread_mutex_lock(&run->lock);
    if (run->wrong++ == 0)
        snprintf(run->first, sizeof(run->first), "rank %u launch %u row %llu: %s: want %g, have %g", rank, epoch,
                 (unsigned long long)row, what, want, have);
    pthread_mutex_unlock(&run->lock);
}

static void check_row(struct run *run, const struct result *res, uint32_t rank, uint32_t epoch, uint64_t row,
                      uint32_t expert, const struct prs_moe_row *want)
{
    const struct row *w = run->row;
    if (memcmp(&res->rows[row], want, sizeof(*want)) != 0)
        note(run, "map, token", rank, epoch, row, want->token, res->rows[row].token);
    for (uint32_t i = 0; i < COLUMNS_PER_ROW; i++) {
        uint32_t column = i == 0 ? w->columns - 1 : ranks_mix((uint32_t)row, i, epoch) % w->columns;
        double bound, have = ranks_float(res->out[row * w->columns + column]);
        double sum = reference(w, rank, expert, epoch, want->rank, want->token, column, &bound);
        if (!(fabs(have - sum) <= bound))
            note(run, "value", rank, epoch, row, sum, have);
    }
}

/* The i-th sender of an expert's rows: node by node, beginning with this rank's node; within a node, beginning with the
 * rank that has the local rank of this one. */
static uint32_t sender(const struct row *w, uint32_t rank, uint32_t i)
{
    uint32_t nodes = w->nodes == 0 ? 1 : w->nodes, locals = w->world / nodes,
             node = (rank / locals + i / locals) % nodes;
    return node * locals + (rank + i) % locals;
}

static void check_status(struct run *run, const struct prs_moe_status *s, uint32_t rank, uint32_t epoch,
                         uint64_t needed, uint64_t dropped)
{
    const struct row *w = run->row;
    uint32_t wrong = 0, outside = 0, absent = 0, first = UINT32_MAX;
    for (uint32_t i = count_of(w, epoch, rank) * w->top_k; i-- > 0;) {
        int64_t place = place_of(w, epoch, rank, i / w->top_k, i % w->top_k);
        if (choice_of(w, epoch, rank, i / w->top_k, i % w->top_k) >= (int64_t)(w->logical ? w->logical : w->experts))
            wrong++, first = i / w->top_k;
        if (place == OUTSIDE)
            outside++, first = i / w->top_k;
        absent += place == ABSENT;
    }
    if (s->rows_needed != needed)
        note(run, "rows needed", rank, epoch, 0, (double)needed, s->rows_needed);
    if (s->rows_dropped != dropped)
        note(run, "rows dropped", rank, epoch, 0, (double)dropped, s->rows_dropped);
    if (s->wrong_choices != wrong || s->wrong_token != first)
        note(run, "wrong choices", rank, epoch, first, wrong, s->wrong_choices);
    if (s->wrong_places != outside)
        note(run, "wrong places", rank, epoch, first, outside, s->wrong_places);
    if (s->absent_choices != absent)
        note(run, "absent choices", rank, epoch, 0, absent, s->absent_choices);
    pthread_mutex_lock(&run->lock);
    run->outside += outside, run->absent += absent;
    pthread_mutex_unlock(&run->lock);
    if (s->tokens_dropped != 0)
        note(run, "tokens dropped", rank, epoch, 0, 0, s->tokens_dropped);
}

static void check(struct run *run, const struct result *res, uint32_t rank, uint32_t epoch)
{
    const struct row *w = run->row;
    uint32_t local = w->experts / w->world;
    uint64_t row = 0, all = 0, dropped = 0;
    uint64_t capacity = rank == w->world - 1 && w->capacity_of_last != 0 ? w->capacity_of_last : UINT32_MAX;
    for (uint32_t e = 0; e < local; e++) {
        uint64_t first = row = (row + 127) / 128 * 128, kept;
        for (uint32_t p = 0; p < w->world; p++) {
            uint32_t from = sender(w, rank, p);
            for (uint32_t t = 0; t < count_of(w, epoch, from); t++)
                for (uint32_t j = 0; j < w->top_k; j++) {
                    struct prs_moe_row want = {from, t, j, weight_of(epoch, from, t, j)};
                    if (place_of(w, epoch, from, t, j) == (int64_t)(rank * local + e) && row++ < capacity)
                        check_row(run, res, rank, epoch, row - 1, e, &want);
                }
        }
        kept = first >= capacity ? 0 : (row < capacity ? row : capacity) - first;
        dropped += row - first - kept;
        if (res->experts[e].rows != kept || res->experts[e].first_row != (first < capacity ? first : capacity))
            note(run, "rows of expert", rank, epoch, e, (double)kept, res->experts[e].rows);
        for (uint64_t pad = first + kept; pad % 128 != 0; pad++)
            if (res->rows[pad].rank != UINT32_MAX)
                note(run, "filling row's rank", rank, epoch, pad, -1, res->rows[pad].rank);
        all += kept;
    }
    check_status(run, &res->status, rank, epoch, (row + 127) / 128 * 128, dropped);
    pthread_mutex_lock(&run->lock);
    run->rows += all;
    run->dropped += dropped;
    pthread_mutex_unlock(&run->lock);
}

/* ---- ranks ---- */
static void *device(size_t bytes, int fill)
{
    void *p = NULL;
    cr_assert_eq(cudaMalloc(&p, bytes), cudaSuccess);
    cr_assert_eq(cudaMemset(p, fill, bytes), cudaSuccess);
    return p;
}

static int32_t *upload_map(const struct row *w, uint32_t rank, uint32_t epoch)
{
    uint32_t entries = w->logical * w->replicas;
    int32_t *map = malloc(entries * sizeof(*map)), *at = device(entries * sizeof(*map), 0);
    for (uint32_t i = 0; i < entries; i++)
        map[i] = entry_of(w, epoch, rank, i / w->replicas, i % w->replicas);
    cudaMemcpy(at, map, entries * sizeof(*map), cudaMemcpyHostToDevice);
    free(map);
    return at;
}

static void make_batch(const struct row *w, uint32_t rank, uint32_t epoch, uint32_t capacity, const void *weights,
                       struct prs_moe_batch *b)
{
    uint32_t count = count_of(w, epoch, rank), choices = count * w->top_k, local = w->experts / w->world;
    int64_t *chosen = malloc((choices + 1) * sizeof(*chosen));
    float *router = malloc((choices + 1) * sizeof(*router));
    for (uint32_t i = 0; i < choices; i++) {
        chosen[i] = choice_of(w, epoch, rank, i / w->top_k, i % w->top_k);
        router[i] = weight_of(epoch, rank, i / w->top_k, i % w->top_k);
    }
    *b = (struct prs_moe_batch){.count = count};
    if (ranks_mix(epoch, rank, 3) % 2) { /* read by the kernel, in place of the other one */
        b->count = 12345;
        b->count_on_device = device(sizeof(uint32_t), 0);
        cudaMemcpy((void *)b->count_on_device, &count, sizeof(count), cudaMemcpyHostToDevice);
    }
    if (w->logical != 0)
        b->placement = upload_map(w, rank, epoch);
    b->status = device(sizeof(*b->status), 0xee);
    b->tokens = ranks_upload(key_of_tokens(epoch, rank), (uint64_t)(count + 1) * w->hidden);
    b->chosen = device((choices + 1) * sizeof(*chosen), 0);
    b->router_weights = device((choices + 1) * sizeof(*router), 0);
    b->weights = weights;
    b->out = device((size_t)capacity * w->columns * 2, 0xff);
    b->rows = device((size_t)capacity * sizeof(*b->rows), 0xee);
    b->expert_rows = device(local * sizeof(*b->expert_rows), 0xee);
    cudaMemcpy((void *)b->chosen, chosen, choices * sizeof(*chosen), cudaMemcpyHostToDevice);
    cudaMemcpy((void *)b->router_weights, router, choices * sizeof(*router), cudaMemcpyHostToDevice);
    free(chosen);
    free(router);
}

static void check_batch(struct run *run, uint32_t rank, uint32_t epoch, uint32_t capacity,
                        const struct prs_moe_batch *b)
{
    const struct row *w = run->row;
    size_t out = (size_t)capacity * w->columns * 2, rows = capacity * sizeof(*b->rows),
           experts = w->experts / w->world * sizeof(*b->expert_rows);
    struct result r = {malloc(rows), malloc(experts), malloc(out), {0}};
    cudaMemcpy(&r.status, b->status, sizeof(r.status), cudaMemcpyDeviceToHost);
    cudaMemcpy(r.rows, b->rows, rows, cudaMemcpyDeviceToHost);
    cudaMemcpy(r.experts, b->expert_rows, experts, cudaMemcpyDeviceToHost);
    cudaMemcpy(r.out, b->out, out, cudaMemcpyDeviceToHost);
    check(run, &r, rank, epoch);
    free(r.rows);
    free(r.experts);
    free(r.out);
}

/* Enqueues all launches before it waits for any. Then computes the product of the last one again, alone. */
static int launch_all(struct run *run, uint32_t rank, struct prs_moe_plan *plan, struct prs_fused *ctx)
{
    const struct row *w = run->row;
    struct prs_moe_batch b[MAX_EPOCHS];
    struct prs_moe_info info;
    void *weights = ranks_upload(key_of_weights(rank), (uint64_t)w->experts / w->world * w->hidden * w->columns);
    cudaStream_t stream;
    int r = 0;
    prs_moe_plan_query(plan, &info);
    (void)cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    for (uint32_t e = 0; e < w->epochs; e++)
        make_batch(w, rank, e, info.capacity, weights, &b[e]);
    (void)cudaDeviceSynchronize();
    for (uint32_t e = 0; e < w->epochs - (rank == w->world - 1 ? w->lost : 0) && r == 0; e++)
        r = prs_moe_dispatch_gemm(plan, &b[e], stream);
    (void)cudaStreamSynchronize(stream);
    (void)prs_fused_poll_error(ctx, &run->error[rank]);
    for (uint32_t e = 0; e < w->epochs && r == 0 && w->lost == 0 && run->error[rank].code == 0; e++)
        check_batch(run, rank, e, info.capacity, &b[e]);
    if (r == 0 && w->lost == 0 && run->error[rank].code == 0) {
        struct prs_moe_batch *last = &b[w->epochs - 1];
        (void)cudaMemset(last->out, 0xff, (size_t)info.capacity * w->columns * 2);
        (void)cudaDeviceSynchronize();
        r = prs_moe_gemm(plan, last, stream);
        (void)cudaStreamSynchronize(stream);
        check_batch(run, rank, w->epochs - 1, info.capacity, last);
    }
    return r;
}

static void rank_body(uint32_t rank, struct ranks_self *self, void *user)
{
    struct run *run = user;
    const struct row *w = run->row;
    struct prs_moe_shape shape = {w->tokens, w->hidden, w->columns, w->experts, w->top_k, 0, w->n_h};
    struct prs_fused *ctx = NULL;
    struct prs_moe_plan *plan = NULL;
    int r;
    if (rank == w->world - 1)
        shape.capacity = w->capacity_of_last;
    shape.logical_experts = w->logical, shape.replicas = w->replicas;
    /* A busy host is slow. */
    r = ranks_open(self, w->nodes == 0 ? 1 : w->nodes, w->lost ? RANKS_PATIENCE_MS : 60000, &ctx);
    if (!r)
        r = prs_moe_plan_open(ctx, &shape, &w->tuning, &plan);
    if (!r)
        r = launch_all(run, rank, plan, ctx);
    if (w->lost != 0)
        pthread_barrier_wait(&self->team->barrier); /* one that closed early would be a failed network */
    if (ctx && w->lost != 0)
        prs_fused_abort(ctx); /* a rank that has seen no error would wait for the others to close */
    prs_moe_plan_close(plan);
    prs_fused_close(ctx);
    run->result[rank] = r;
}

static void run_row(const struct row *w, struct run *run)
{
    memset(run, 0, sizeof(*run));
    pthread_mutex_init(&run->lock, NULL);
    run->row = w;
    hopper_setup(RANKS_MAX, 4, 0);
    if (w->lost != 0)
        hopper_forgive_late_writes();
    ranks_run(w->world, rank_body, run);
}

static void run_right(const struct row *row, size_t i, struct run *found)
{
    struct run run;
    run_row(row, &run);
    for (uint32_t r = 0; r < row->world; r++)
        cr_assert(run.result[r] == 0 && run.error[r].code == 0, "row %zu: rank %u: %d, %s (HOPPER_SEED=%llu)", i, r,
                  run.result[r], run.error[r].text, (unsigned long long)hopper_seed());
    cr_assert_eq(run.wrong, 0, "row %zu: %llu wrong, first: %s (HOPPER_SEED=%llu)", i, (unsigned long long)run.wrong,
                 run.first, (unsigned long long)hopper_seed());
    cr_assert_gt(run.rows, 0);
    *found = run;
}

static void assert_right(const struct row *rows, size_t count)
{
    struct run run;
    for (size_t i = 0; i < count; i++)
        run_right(&rows[i], i, &run);
}

Test(moe, rows_of_one_rank_are_sorted_and_multiplied, .timeout = 600)
{
    static const struct row rows[] = {
        {1, 150, 128, 512, 4, 2, 1, 2, EVEN, 0, {0}},
        {1, 150, 136, 264, 4, 2, 0, 2, EVEN, 0, {0}}, /* H and N are no multiples of a tile */
        {1, 40, 72, 8, 8, 3, 1, 1, SOME_NONE, 0, {0}},
    };
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

Test(moe, tokens_of_all_ranks_come_to_their_experts, .timeout = 900)
{
    static const struct row rows[] = {
        {2, 90, 128, 256, 8, 3, 1, 3, EVEN, 0, {0}},
        /* one tile in the last pair */
        {2, 100, 200, 776, 6, 2, 0, 3, SOME_NONE, 0, {.cluster = 2}},
        {4, 60, 128, 264, 8, 3, 1, 4, EVEN, 0, {.cluster = 2, .route_ctas = 3}},
        {4, 50, 72, 256, 16, 4, 0, 3, SOME_NONE, 0, {.cluster = 1, .route_ctas = 1}},
    };
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* Every access checked for its order (memory_order.py). */
Test(moe_order, of_rows_that_come_to_their_experts, .timeout = 600)
{
    static const struct row rows[] = {{2, 24, 72, 256, 4, 2, 1, 3, EVEN, 0, {.cluster = 2, .route_ctas = 2}}};
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* Every count of ranks that a node may have; with room for all rows, and without. */
Test(moe, up_to_eight_ranks_of_a_node_get_their_rows, .timeout = 900)
{
    static const struct row rows[] = {
        {5, 40, 72, 264, 10, 3, 1, 3, EVEN, 0, {.cluster = 2}},
        {6, 30, 136, 64, 12, 4, 0, 3, SOME_NONE, 0, {.route_ctas = 5}},
        {7, 40, 72, 64, 14, 2, 1, 3, HALF_EMPTY, 0, {0}},
        {8, 40, 72, 264, 16, 4, 1, 6, SOME_NONE, 128, {0}},
        {8, 60, 72, 64, 8, 3, 0, 6, EVEN, 0, {0}},
    };
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* ---- graphs ---- */
enum { MOST_TOKENS = 48 }; /* fewer than the inputs have */

struct replays {
    uint32_t counts[4], mapped;
    int32_t maps[4][4];  /* of a launch: the place of each expert */
    uint64_t rows[4][2]; /* of the experts of each rank */
    struct prs_moe_status status[4][2];
};

static void replay_on_rank(uint32_t rank, struct ranks_self *self, void *user)
{
    static const struct row w = {2, 50, 72, 64, 4, 2, 1, 1, EVEN, 0, {0}};
    struct prs_moe_shape shape = {MOST_TOKENS, w.hidden, w.columns, w.experts, w.top_k, 0, w.n_h};
    struct replays *x = user;
    struct prs_moe_expert_rows experts[2];
    struct prs_fused_error error;
    struct prs_moe_plan *plan;
    struct prs_moe_batch b;
    struct prs_moe_info info;
    struct prs_fused *ctx;
    uint32_t *count = device(sizeof(*count), 0), all[2];
    int32_t *map = device(sizeof(x->maps[0]), 0);
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    shape.logical_experts = x->mapped ? w.experts : 0, shape.replicas = x->mapped;
    cr_assert_eq(ranks_open(self, 0, 60000, &ctx), 0);
    cr_assert_eq(prs_moe_plan_open(ctx, &shape, NULL, &plan), 0);
    prs_moe_plan_query(plan, &info);
    make_batch(&w, rank, 0, info.capacity, ranks_upload(key_of_weights(rank), 2ull * w.hidden * w.columns), &b);
    b.count_on_device = count;
    b.placement = x->mapped ? map : NULL;
    (void)cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cr_assert_eq(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    cr_assert_eq(prs_moe_dispatch_gemm(plan, &b, stream), 0);
    cr_assert_eq(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    cr_assert_eq(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    for (uint32_t i = 0; i < 4; i++) {
        cr_assert_eq(cudaMemcpy(count, &x->counts[i], sizeof(*count), cudaMemcpyHostToDevice), cudaSuccess);
        cr_assert_eq(cudaMemcpy(map, x->maps[i], sizeof(x->maps[i]), cudaMemcpyHostToDevice), cudaSuccess);
        cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
        cr_assert_eq(cudaGraphLaunch(exec, stream), cudaSuccess);
        cr_assert_eq(cudaStreamSynchronize(stream), cudaSuccess);
        (void)cudaMemcpy(experts, b.expert_rows, sizeof(experts), cudaMemcpyDeviceToHost);
        (void)cudaMemcpy(&x->status[i][rank], b.status, sizeof(*b.status), cudaMemcpyDeviceToHost);
        x->rows[i][rank] = experts[0].rows + experts[1].rows;
        (void)ranks_allgather(self, &rank, all, sizeof(rank));
    }
    cr_assert_eq(prs_fused_poll_error(ctx, &error), 0, "%s", error.text);
    prs_moe_plan_close(plan);
    prs_fused_close(ctx);
}

/* More than the plan's most are not dispatched. */
Test(moe, a_graph_serves_any_count, .timeout = 600)
{
    struct replays x = {.counts = {MOST_TOKENS, 0, 7, 60}};
    hopper_setup(2, 4, 0);
    ranks_run(2, replay_on_rank, &x);
    for (uint32_t i = 0; i < 4; i++) {
        uint64_t dispatched = x.counts[i] < MOST_TOKENS ? x.counts[i] : MOST_TOKENS;
        cr_assert_eq(x.rows[i][0] + x.rows[i][1], dispatched * 2 * 2, "launch %u: %llu and %llu rows", i,
                     (unsigned long long)x.rows[i][0], (unsigned long long)x.rows[i][1]);
        for (uint32_t rank = 0; rank < 2; rank++)
            cr_assert_eq(x.status[i][rank].tokens_dropped, x.counts[i] - dispatched);
    }
}

/* Experts move from rank to rank, and are lost, between launches of one graph. */
Test(moe, a_graph_reads_its_map_anew, .timeout = 600)
{
    struct replays x = {
        .counts = {30, 30, 30, 30}, .mapped = 1, .maps = {{0, 0, 1, 1}, {3, 2, 2, 3}, {-1, -1, -1, -1}, {1, 1, 1, 0}}};
    static const uint32_t rows[4][2] = {{120, 0}, {0, 120}, {0, 0}, {120, 0}};
    hopper_setup(2, 4, 0);
    ranks_run(2, replay_on_rank, &x);
    for (uint32_t i = 0; i < 4; i++)
        for (uint32_t rank = 0; rank < 2; rank++) {
            cr_assert_eq(x.rows[i][rank], rows[i][rank], "launch %u: rank %u has %llu rows", i, rank,
                         (unsigned long long)x.rows[i][rank]);
            cr_assert_eq(x.status[i][rank].absent_choices, i == 2 ? 60 : 0);
        }
}

Test(moe, skewed_choices_are_right, .timeout = 900)
{
    static const struct row rows[] = {
        {4, 120, 72, 264, 8, 2, 1, 3, ONE_EXPERT, 0, {0}},
        {4, 90, 72, 264, 8, 4, 0, 3, HALF_EMPTY, 0, {0}},
    };
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* More K steps than stages, and after each full block one whose second half has no rows. The warpgroup of that half
 * must not hold back stages while the other warpgroup waits for a store. */
Test(moe, blocks_of_few_rows_follow_full_ones, .timeout = 900)
{
    static const struct row rows[] = {
        {1, 330, 1024, 512, 2, 1, 1, 2, EVEN, 0, {.ctas = 1, .cluster = 1}},
        {1, 700, 640, 512, 4, 1, 0, 2, EVEN, 0, {.ctas = 2, .cluster = 2}},
    };
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* The buffer of a row holds 8 KB. */
Test(moe, rows_longer_than_a_buffer_travel_in_pieces, .timeout = 900)
{
    static const struct row rows[] = {{2, 20, 7168, 64, 4, 2, 1, 2, EVEN, 0, {0}},
                                      {2, 12, 4104, 64, 4, 2, 0, 2, EVEN, 0, {0}}};
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* Launches that need more rows than others, in which some experts lose all rows, some rows, or none. */
Test(moe, rows_beyond_capacity_are_dropped_and_the_next_launch_is_right, .timeout = 600)
{
    static const struct row rows[] = {
        {2, 100, 72, 64, 4, 2, 1, 4, EVEN, 128, {0}},
        {2, 300, 72, 264, 8, 2, 0, 4, EVEN, 384, {.cluster = 2}},
        {3, 120, 72, 64, 6, 3, 1, 4, SOME_NONE, 256, {0}},
        {2, 200, 72, 64, 4, 2, 1, 2, ONE_EXPERT, 128, {0}}, /* of rank 0 */
    };
    uint64_t dropped = 0;
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct run run;
        run_right(&rows[i], i, &run);
        dropped += run.dropped;
    }
    cr_assert_gt(dropped, 0);
}

/* The launch continues without it: check_status() looks for it in every launch. */
Test(moe, an_expert_that_does_not_exist_is_counted_and_its_token_named, .timeout = 600)
{
    static const struct row row = {2, 40, 72, 64, 4, 2, 1, 3, NO_EXPERT, 0, {0}};
    assert_right(&row, 1);
}

/* Each launch and each rank has its own map; more experts than places, and fewer. */
Test(moe, tokens_go_where_the_map_of_their_rank_says, .timeout = 900)
{
    static const struct row rows[] = {
        {1, 150, 72, 64, 4, 2, 1, 2, EVEN, 0, {0}, 0, 0, 6, 1},
        {2, 90, 128, 256, 8, 3, 1, 3, EVEN, 0, {0}, 0, 0, 5, 3},
        {4, 60, 72, 64, 8, 3, 0, 4, SOME_NONE, 0, {.route_ctas = 3}, 0, 0, 20, 2},
        {3, 120, 72, 64, 6, 2, 1, 3, NO_EXPERT, 256, {0}, 0, 0, 4, 8},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct run run;
        run_right(&rows[i], i, &run);
        cr_assert(run.outside == 0 && (run.absent != 0 || rows[i].replicas == 8));
    }
}

/* check_status() looks for the count and the token. Other choices of the tokens continue. */
Test(moe, a_place_that_does_not_exist_is_counted_and_its_token_named, .timeout = 600)
{
    static const struct row row = {2, 40, 72, 64, 4, 2, 1, 3, NO_PLACE, 0, {0}, 0, 0, 6, 2};
    struct run run;
    run_right(&row, 0, &run);
    cr_assert_gt(run.outside, 0);
}

Test(moe, a_rank_that_does_not_come_is_named, .timeout = 600)
{
    static const struct row row = {3, 40, 72, 64, 6, 2, 1, 2, EVEN, 0, {0}, 1};
    struct run run;
    run_row(&row, &run);
    for (uint32_t r = 0; r < 2; r++) {
        cr_assert_eq(run.error[r].code, -ETIMEDOUT, "%s", run.error[r].text);
        cr_assert(run.error[r].from_rank == 2 && run.error[r].want == 2, "%s", run.error[r].text);
        cr_assert_not_null(strstr(run.error[r].text, "counts and routes of rank 2"), "%s", run.error[r].text);
    }
    cr_assert_eq(run.error[2].code, 0, "%s", run.error[2].text);
}

/* A put moves half a megabyte, or one row if that is longer; a signal stands for whole puts. */
Test(moe, puts_are_as_long_as_a_link_needs, .timeout = 300)
{
    static const struct choice {
        uint32_t tokens, hidden, group, put, want_group, want_put;
    } rows[] = {
        {8192, 7168, 0, 0, 256, 32},   {2048, 7168, 0, 0, 128, 32},  {100, 7168, 0, 0, 128, 32},
        {20, 7168, 0, 0, 20, 20},      {2048, 16384, 0, 0, 128, 16}, {8192, 7168, 8, 0, 8, 8},
        {512, 7168, 100, 48, 144, 48},
    };
    struct prs_fused_config config = {.world = 1};
    struct prs_fused *ctx = NULL;
    hopper_setup(1, 4, 0);
    cr_assert_eq(prs_fused_open(&config, &ctx), 0);
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        const struct choice *c = &rows[i];
        struct prs_moe_shape shape = {c->tokens, c->hidden, 64, 4, 1, 128, 1};
        struct prs_moe_tuning tuning = {.rows_per_signal = c->group, .rows_per_put = c->put};
        struct prs_moe_plan *plan = NULL;
        struct prs_moe_info info;
        cr_assert_eq(prs_moe_plan_open(ctx, &shape, &tuning, &plan), 0);
        prs_moe_plan_query(plan, &info);
        cr_assert(info.tuning.rows_per_signal == c->want_group && info.tuning.rows_per_put == c->want_put,
                  "row %zu: groups of %u, puts of %u", i, info.tuning.rows_per_signal, info.tuning.rows_per_put);
        prs_moe_plan_close(plan);
    }
    prs_fused_close(ctx);
}

/* ---- several nodes: the real transport, over any verbs device (softnic in the suite) ---- */
Test(moe_nodes, tokens_cross_between_nodes_and_are_given_to_all_who_want_them, .timeout = 900)
{
    static const struct row rows[] = {
        {4, 60, 128, 264, 8, 3, 1, 3, EVEN, 0, {.rows_per_signal = 8}, 0, 2},
        {4, 60, 72, 512, 16, 4, 0, 3, SOME_NONE, 0, {.rows_per_signal = 24, .rows_per_put = 8, .route_ctas = 3}, 0, 2},
        {2, 90, 72, 64, 4, 2, 1, 3, EVEN, 0, {0}, 0, 2},
        {6, 40, 72, 64, 12, 4, 0, 2, EVEN, 0, {.rows_per_signal = 16, .rows_per_put = 4}, 0, 3},
        {3, 40, 72, 64, 6, 2, 1, 2, SOME_NONE, 0, {0}, 0, 3},
    };
    ranks_need_a_device();
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

Test(moe_nodes, tokens_cross_to_where_the_map_of_their_rank_says, .timeout = 900)
{
    static const struct row rows[] = {
        {4, 60, 72, 64, 8, 3, 1, 3, EVEN, 0, {.rows_per_signal = 8}, 0, 2, 6, 3},
        {2, 90, 72, 64, 4, 2, 0, 3, SOME_NONE, 0, {0}, 0, 2, 7, 2},
    };
    ranks_need_a_device();
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

Test(moe_nodes, skew_and_long_rows_cross_too, .timeout = 900)
{
    static const struct row rows[] = {
        {4, 100, 72, 64, 8, 2, 1, 3, ONE_EXPERT, 0, {0}, 0, 2},
        {4, 60, 72, 64, 8, 4, 0, 3, HALF_EMPTY, 0, {.rows_per_signal = 8}, 0, 2},
        {4, 12, 7168, 64, 4, 2, 1, 2, EVEN, 0, {0}, 0, 2},
    };
    ranks_need_a_device();
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* tools/dev/faults takes a rail meanwhile, and sets how many launches there are. */
Test(moe_nodes, launches_go_on, .timeout = 300)
{
    const char *launches = getenv("PRS_TEST_LAUNCHES");
    struct row row = {2, 40, 128, 64, 4, 2, 1, 2, EVEN, 0, {.rows_per_signal = 8}, 0, 2};
    ranks_need_a_device();
    if (launches)
        row.epochs = (uint32_t)atoi(launches);
    assert_right(&row, 1);
}

/* Blocks of this node's rows, of other nodes' rows, and of both; in two passes and in one. */
Test(moe_nodes, experts_with_many_rows_of_all_nodes_are_right, .timeout = 900)
{
    static const struct row rows[] = {
        {2, 500, 72, 520, 4, 2, 1, 3, EVEN, 0, {.rows_per_signal = 64, .rows_per_put = 16, .passes = 2}, 0, 2},
        {2, 400, 72, 64, 4, 2, 0, 2, SOME_NONE, 0, {.passes = 1}, 0, 2},
        {4, 300, 72, 264, 8, 2, 1, 2, HALF_EMPTY, 0, {.cluster = 2, .passes = 2}, 0, 2},
        {3, 400, 72, 64, 6, 2, 0, 2, EVEN, 0, {.passes = 2}, 0, 3},
    };
    ranks_need_a_device();
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

Test(moe_nodes, a_rank_of_another_node_that_does_not_come_is_named, .timeout = 600)
{
    static const struct row row = {2, 40, 72, 64, 4, 2, 1, 2, EVEN, 0, {0}, 1, 2};
    struct run run;
    ranks_need_a_device();
    run_row(&row, &run);
    cr_assert_eq(run.error[0].code, -ETIMEDOUT, "%s", run.error[0].text);
    cr_assert_not_null(strstr(run.error[0].text, "counts and routes of rank 1"), "%s", run.error[0].text);
}
