/* SPDX-License-Identifier: Apache-2.0 */
#include "test/hopper/moe_rows.h"

#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/hopper/hopper.h"

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

/* The place of a choice. ABSENT: its expert has none. OUTSIDE: the map names a place that does not exist. A choice that
 * names no expert gets another number that is no place. */
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

uint32_t key_of_weights(uint32_t rank)
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
static int32_t *upload_map(const struct row *w, uint32_t rank, uint32_t epoch)
{
    uint32_t entries = w->logical * w->replicas;
    int32_t *map = malloc(entries * sizeof(*map)), *at = ranks_device(entries * sizeof(*map), 0);
    for (uint32_t i = 0; i < entries; i++)
        map[i] = entry_of(w, epoch, rank, i / w->replicas, i % w->replicas);
    cudaMemcpy(at, map, entries * sizeof(*map), cudaMemcpyHostToDevice);
    free(map);
    return at;
}

void make_batch(const struct row *w, uint32_t rank, uint32_t epoch, uint32_t capacity, const void *weights,
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
    if (ranks_mix(epoch, rank, 3) % 2) { /* the kernel reads this one, instead of the other one */
        b->count = 12345;
        b->count_on_device = ranks_device(sizeof(uint32_t), 0);
        cudaMemcpy((void *)b->count_on_device, &count, sizeof(count), cudaMemcpyHostToDevice);
    }
    if (w->logical != 0)
        b->placement = upload_map(w, rank, epoch);
    b->status = ranks_device(sizeof(*b->status), 0xee);
    b->tokens = ranks_upload(key_of_tokens(epoch, rank), (uint64_t)(count + 1) * w->hidden);
    b->chosen = ranks_device((choices + 1) * sizeof(*chosen), 0);
    b->router_weights = ranks_device((choices + 1) * sizeof(*router), 0);
    b->weights = weights;
    b->out = ranks_device((size_t)capacity * w->columns * 2, 0xff);
    b->rows = ranks_device((size_t)capacity * sizeof(*b->rows), 0xee);
    b->expert_rows = ranks_device(local * sizeof(*b->expert_rows), 0xee);
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

void run_row(const struct row *w, struct run *run)
{
    memset(run, 0, sizeof(*run));
    pthread_mutex_init(&run->lock, NULL);
    run->row = w;
    hopper_setup(RANKS_MAX, 4, 0);
    if (w->lost != 0)
        hopper_forgive_late_writes();
    ranks_run(w->world, rank_body, run);
}

void run_right(const struct row *row, size_t i, struct run *found)
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

void assert_right(const struct row *rows, size_t count)
{
    struct run run;
    for (size_t i = 0; i < count; i++)
        run_right(&rows[i], i, &run);
}
