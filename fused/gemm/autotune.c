/* SPDX-License-Identifier: Apache-2.0 */
/* Times the candidates of a shape: on the caller's buffers, or when a plan opens for whose shape nothing was
 * measured. */
#include <errno.h>
#include <float.h>
#include <stdlib.h>
#include <string.h>

#include "fused/core/cuda.h"
#include "fused/core/ranks.h"
#include "fused/gemm/kernels.h"
#include "fused/gemm/paths.h"
#include "fused/gemm/plan.h"
#include "fused/gemm/table.h"
#include "fused/gemm/tuning.h"
#include "transport/util/clock.h"
#include "transport/util/error.h"
#include "transport/util/log.h"

enum { MAX_CANDIDATES = 24, OPENING_ROUNDS = 3 };

struct trial {
    struct prs_fused *ctx;
    const struct prs_gemm_shape *shape;
    const struct prs_gemm_operands *operands;
    uint32_t rounds;
    uint64_t until_ns; /* no candidate begins later on any rank; UINT64_MAX: all are timed */
    cudaStream_t stream;
    cudaEvent_t events[2];
};

/* What a rank tells the others about a candidate. */
struct heard {
    float ms; /* of one launch */
    uint32_t late;
};

static uint32_t list_fused(const struct prs_fused *ctx, const struct prs_gemm_shape *shape,
                           struct prs_gemm_tuning *list)
{
    uint32_t count = 0, pairs = prs_ceil_div(shape->m / ctx->config.world, PRS_PAIR_M);
    uint32_t ctas = shape->op == PRS_GEMM_ALLGATHER ? PRS_MOVED_BY_CTAS : 0;
    bool copies = ctas != 0 && ctx->place.nodes == 1 && !ctx->shared_device;
    for (uint32_t band = 1; band <= pairs && band <= 8; band *= 2) {
        list[count++] = (struct prs_gemm_tuning){.band = band, .mover = ctas};
        if (copies) /* the plan chooses the pieces along k */
            list[count++] = (struct prs_gemm_tuning){.band = band, .mover = PRS_MOVED_BY_COPY_ENGINES};
    }
    for (uint32_t segments = 1; copies && segments <= 4; segments++)
        list[count++] =
            (struct prs_gemm_tuning){.band = pairs, .mover = PRS_MOVED_BY_COPY_ENGINES, .segments = segments};
    for (uint32_t tiles = 1; ctx->place.nodes > 1 && tiles <= 64; tiles *= 8)
        list[count++].tiles_per_signal = tiles;
    for (uint32_t columns = PRS_TILE_N;; columns = PRS_NARROW_N) {
        list[count++] = (struct prs_gemm_tuning){.spread = 1, .mover = ctas, .columns = columns};
        for (uint32_t pace = PRS_GEMM_UNPACED; pace <= PRS_GEMM_PACED; pace++)
            list[count++] = (struct prs_gemm_tuning){.spread = 85, .paced = pace, .mover = ctas, .columns = columns};
        list[count++] =
            (struct prs_gemm_tuning){.spread = 1, .paced = PRS_GEMM_UNPACED, .mover = ctas, .columns = columns};
        if (columns == PRS_NARROW_N || !prs_tuning_can_be_narrow(shape, &ctx->place))
            break;
    }
    for (uint32_t i = 0; i < count; i++)
        list[i].path = PRS_GEMM_PATH_FUSED;
    return count;
}

/* The model's choice first, so that a tie keeps it; then the unfused path, which the model often misjudges. */
static uint32_t list_candidates(const struct prs_fused *ctx, const struct prs_gemm_shape *shape,
                                struct prs_gemm_tuning *list)
{
    uint32_t count = 1;
    memset(list, 0, MAX_CANDIDATES * sizeof(*list));
    if (prs_table_place(ctx, shape)->world == 1) { /* the two paths, if it has both */
        if (!prs_tuning_can_unfuse(shape) || !prs_tuning_can_fuse(shape, 1))
            return count;
        list[0].path = PRS_GEMM_PATH_FUSED;
        list[count++].path = PRS_GEMM_PATH_UNFUSED;
        return count;
    }
    if (prs_tuning_can_unfuse(shape))
        list[count++].path = PRS_GEMM_PATH_UNFUSED;
    if (prs_tuning_can_fuse(shape, ctx->config.world))
        count += list_fused(ctx, shape, list + count);
    return count;
}

/* The time that the model predicts for a candidate; FLT_MAX: it cannot run. */
static double predicted(const struct trial *t, const struct prs_gemm_tuning *tuning, uint32_t clusters)
{
    struct prs_gemm_info info = {.reason = NULL};
    return prs_tuning_choose(t->ctx, t->shape, tuning, NULL, clusters, &info) ? FLT_MAX : info.predicted_us;
}

/* Sorts the fused candidates by predicted time, the fastest first, because there may not be time for all. */
static int order(const struct trial *t, struct prs_gemm_tuning *list, uint32_t count)
{
    double us[MAX_CANDIDATES];
    uint32_t clusters, first = count > 1 && list[1].path == PRS_GEMM_PATH_UNFUSED ? 2 : 1;
    int r = prs_kernels_prepare(t->shape, prs_table_place(t->ctx, t->shape)->nodes > 1, &clusters);
    if (r)
        return prs_fail(r, "fused: the kernel does not fit device %d: built for another GPU?", t->ctx->config.device);
    clusters = prs_context_clusters(t->ctx, clusters, 2);
    for (uint32_t i = first; i < count; i++) {
        struct prs_gemm_tuning tuning = list[i];
        double mine = predicted(t, &tuning, clusters);
        uint32_t at = i;
        for (; at > first && us[at - 1] > mine; at--) {
            us[at] = us[at - 1];
            list[at] = list[at - 1];
        }
        us[at] = mine;
        list[at] = tuning;
    }
    return 0;
}

/* Collective. *heard gets the slowest rank's time, and whether any rank is late. */
static int hear(const struct trial *t, float ms, struct heard *heard)
{
    struct heard mine = {ms / (float)t->rounds, prs_clock_ns() >= t->until_ns};
    struct heard *all = calloc(t->ctx->config.world, sizeof(*all));
    int r = all ? 0 : prs_fail(-ENOMEM, "fused: no memory for the times of %u ranks", t->ctx->config.world);
    r = prs_ranks_agree(t->ctx, r);
    if (!r)
        r = prs_ranks_allgather(t->ctx, &mine, all, sizeof(mine));
    *heard = (struct heard){0};
    for (uint32_t i = 0; i < t->ctx->config.world && r == 0; i++) {
        heard->ms = all[i].ms > heard->ms ? all[i].ms : heard->ms;
        heard->late |= all[i].late;
    }
    free(all);
    return r;
}

static int time_plan(const struct trial *t, struct prs_gemm_plan *plan, float *ms)
{
    int r = 0;
    for (uint32_t i = 0; i < t->rounds + 1 && r == 0; i++) {
        if (i == 1) /* the first launch warms up */
            r = prs_cuda_check(cudaEventRecord(t->events[0], t->stream), "cudaEventRecord");
        if (!r)
            r = prs_gemm_launch(plan, t->operands, t->stream);
    }
    if (!r)
        r = prs_cuda_check(cudaEventRecord(t->events[1], t->stream), "cudaEventRecord");
    if (!r)
        r = prs_cuda_check(cudaEventSynchronize(t->events[1]), "autotune launches");
    if (!r)
        r = prs_cuda_check(cudaEventElapsedTime(ms, t->events[0], t->events[1]), "cudaEventElapsedTime");
    return r;
}

/* tuning->path and columns become what the plan has decided. -ENOTSUP: the unfused path needs cuBLASLt, which some rank
 * lacks. */
static int time_candidate(const struct trial *t, struct prs_gemm_tuning *tuning, struct heard *heard)
{
    struct prs_gemm_plan *plan;
    float ms = 0;
    int r = prs_gemm_plan_open_as(t->ctx, t->shape, tuning, NULL, &plan);
    if (r)
        return r;
    tuning->path = plan->info.tuning.path;
    tuning->columns = plan->info.tuning.columns;
    r = prs_ranks_agree(t->ctx, time_plan(t, plan, &ms)); /* a rank that failed has no time to report */
    if (!r)
        r = hear(t, ms, heard);
    prs_gemm_plan_close(plan);
    return r;
}

/* The fastest candidate and its time (DBL_MAX: none yet). other_us: the time of the other path's fastest candidate; 0:
 * none was timed. */
struct fastest {
    struct prs_gemm_tuning tuning;
    double us, other_us;
};

static void consider(struct fastest *f, const struct prs_gemm_tuning *tuning, double us)
{
    bool other = f->us < DBL_MAX && tuning->path != f->tuning.path;
    if (us < f->us)
        *f = (struct fastest){*tuning, us, other ? f->us : f->other_us};
    else if (other && (f->other_us <= 0 || us < f->other_us))
        f->other_us = us;
}

/* Every rank has the same times and takes the same candidate. */
static int time_candidates(const struct trial *t, struct fastest *best)
{
    const struct prs_gemm_shape *s = t->shape;
    struct prs_gemm_tuning list[MAX_CANDIDATES];
    uint32_t count = 0;
    struct heard heard = {0};
    int r = prs_gemm_shape_check(t->ctx, s);
    if (!r) {
        count = list_candidates(t->ctx, s, list);
        r = order(t, list, count);
    }
    r = prs_ranks_agree(t->ctx, r);
    for (uint32_t i = 0; i < count && r == 0 && !heard.late; i++) {
        struct prs_gemm_tuning *c = &list[i];
        if (i == 1 && c->path == PRS_GEMM_PATH_UNFUSED && list[0].path == PRS_GEMM_PATH_UNFUSED)
            continue; /* the model chose it */
        r = time_candidate(t, c, &heard);
        if (r == -ENOTSUP && c->path == PRS_GEMM_PATH_UNFUSED) {
            r = 0;
            continue;
        }
        if (r)
            break;
        PRS_INFO("fused: operation %d, %u x %u x %u: path %u, band %u, spread %u, mover %u with %u segments, pace %u, "
                 "tiles per signal %u, %u columns: %.1f us",
                 (int)s->op, s->m, s->n, s->k, c->path, c->band, c->spread, c->mover, c->segments, c->paced,
                 c->tiles_per_signal, c->columns, heard.ms * 1e3);
        consider(best, c, heard.ms * 1e3);
    }
    return r;
}

/* Writes the result to the tuning file, where each rank finds it when it opens its next plan. */
static int keep(const struct trial *t, const struct fastest *best)
{
    int r = t->ctx->config.rank == 0 ? prs_table_append(t->ctx, t->shape, &best->tuning, best->us, best->other_us) : 0;
    return prs_ranks_agree(t->ctx, r);
}

/* Collective: times the candidates, and keeps the best in the tuning file. */
static int run(struct trial *t, struct fastest *best)
{
    int r = 0;
    for (uint32_t i = 0; i < 2 && r == 0; i++)
        r = prs_cuda_check(cudaEventCreate(&t->events[i]), "cudaEventCreate");
    r = prs_ranks_agree(t->ctx, r); /* a rank without events would leave the others waiting */
    if (!r)
        r = time_candidates(t, best);
    if (!r)
        r = keep(t, best);
    for (uint32_t i = 0; i < 2; i++)
        if (t->events[i])
            (void)cudaEventDestroy(t->events[i]);
    return r;
}

int prs_gemm_autotune(struct prs_fused *ctx, const struct prs_gemm_shape *shape,
                      const struct prs_gemm_operands *operands, uint32_t rounds, cudaStream_t stream,
                      struct prs_gemm_tuning *best)
{
    struct prs_gemm_shape own = *shape;
    struct trial t = {.ctx = ctx, .shape = &own, .operands = operands, .rounds = rounds, .stream = stream};
    struct fastest found = {.us = DBL_MAX};
    int before, r;
    if (rounds == 0)
        return prs_fail(-EINVAL, "fused: autotune needs at least one round");
    if (shape->k == 0)
        return prs_fail(-EINVAL, "fused: autotune: k is 0: there is no product that could be tuned");
    prs_gemm_shape_fill(&own);
    t.until_ns = UINT64_MAX;
    r = prs_cuda_enter(ctx, &before);
    if (r)
        return r;
    r = run(&t, &found);
    if (!r)
        *best = found.tuning;
    prs_cuda_leave(before);
    return r;
}

/* ---- when a plan opens ---- */

/* Numbers of both signs, finite in every type: the time of a product depends on the values that it multiplies. */
static int fill(void *to, uint64_t bytes)
{
    enum { BLOCK = 1 << 16 };
    uint16_t *values = malloc(BLOCK);
    uint32_t state = 1;
    int r = values ? 0 : prs_fail(-ENOMEM, "fused: no memory for values to multiply");
    for (uint32_t i = 0; i < BLOCK / 2 && r == 0; i++) {
        state = state * 1664525u + 1013904223u;
        /* bf16: 0.008 ... 2; fp16: 1 ... 2; e4m3: finite; both signs. fp32: as bf16. */
        values[i] = (uint16_t)(0x3c00u + (state >> 16 & 0x83bfu));
    }
    if (!r)
        r = prs_cuda_check(cudaMemcpy(to, values, bytes < BLOCK ? bytes : BLOCK, cudaMemcpyHostToDevice), "cudaMemcpy");
    for (uint64_t at = BLOCK; at < bytes && r == 0; at *= 2)
        r = prs_cuda_check(
            cudaMemcpy((uint8_t *)to + at, to, bytes - at < at ? bytes - at : at, cudaMemcpyDeviceToDevice),
            "cudaMemcpy");
    if (!r)
        r = prs_cuda_check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    free(values);
    return r;
}

struct matrices {
    uint64_t a, b, scale_a, scale_b, c; /* bytes */
    uint8_t *at;
};

static uint64_t aligned(uint64_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

/* Bytes of the scales of a matrix of `rows` rows, with `block` rows to a block. */
static uint64_t scales_of(const struct prs_gemm_shape *s, uint64_t rows, uint32_t block)
{
    switch (s->scaling) {
    case PRS_SCALING_NONE:
        return 0;
    case PRS_SCALING_TENSOR:
        return aligned(sizeof(float));
    case PRS_SCALING_ROWS:
        return aligned(rows * sizeof(float));
    default:
        return aligned((rows + block - 1) / block * (s->k / PRS_SCALE_BLOCK) * sizeof(float));
    }
}

/* Floats from the scales of one block of K to those of the next: for any operation, and a multiple of 4. */
static uint64_t scale_pitch(const struct prs_gemm_shape *s)
{
    return ((uint64_t)s->m + 3) / 4 * 4;
}

/* Bytes of the operands without gaps. */
static struct matrices matrices_of(const struct prs_fused *ctx, const struct prs_gemm_shape *s)
{
    uint32_t world = ctx->config.world;
    uint64_t columns = prs_result_columns(s);
    uint64_t rows_a = s->op == PRS_GEMM_ALLGATHER ? s->m / world : s->m;
    uint64_t rows_c = s->op == PRS_GEMM_REDUCE_SCATTER ? s->m / world : s->m;
    return (struct matrices){.a = aligned(rows_a * s->k * prs_operand_bytes(s)),
                             .b = aligned((uint64_t)s->n * s->k * prs_operand_bytes(s)),
                             .scale_a = scales_of(s, scale_pitch(s), 1),
                             .scale_b = scales_of(s, s->n, PRS_SCALE_BLOCK),
                             .c = aligned(rows_c * columns * prs_result_bytes(s))};
}

static void place_operands(const struct prs_gemm_shape *s, const struct matrices *x, struct prs_gemm_operands *operands)
{
    uint8_t *scales = x->at + x->a + x->b;
    operands->a = x->at;
    operands->b = x->at + x->a;
    operands->c = scales + x->scale_a + x->scale_b;
    if (s->scaling == PRS_SCALING_NONE)
        return;
    operands->scale_a = (const float *)(const void *)scales;
    operands->scale_b = (const float *)(const void *)(scales + x->scale_a);
    if (s->scaling == PRS_SCALING_BLOCKS)
        operands->scale_a_pitch = scale_pitch(s);
}

/* Collective. *there: all ranks have memory and values. If one lacks them, no rank measures, and that is no error. */
static int take_matrices(struct prs_fused *ctx, struct matrices *x, bool *there)
{
    uint64_t filled = x->a + x->b + x->scale_a + x->scale_b;
    uint32_t mine = cudaMalloc((void **)&x->at, filled + x->c) == cudaSuccess, *all;
    int r = 0;
    if (!mine) {
        (void)cudaGetLastError();
        x->at = NULL;
    }
    mine = mine && !fill(x->at, filled);
    all = calloc(ctx->config.world, sizeof(*all));
    if (!all)
        r = prs_fail(-ENOMEM, "fused: no memory for the answers of %u ranks", ctx->config.world);
    r = prs_ranks_agree(ctx, r);
    if (!r)
        r = prs_ranks_allgather(ctx, &mine, all, sizeof(mine));
    *there = r == 0;
    for (uint32_t i = 0; i < ctx->config.world && *there; i++)
        *there = all[i] != 0;
    free(all);
    return r;
}

/* Whether candidates are timed where no entry of a table is near. The same on all ranks. */
static bool measures(const struct prs_fused *ctx, const struct prs_gemm_shape *shape)
{
    return ctx->measure_ms != 0 && shape->op != PRS_GEMM_ALONE && ctx->config.world > 1 && !prs_has_gaps(shape) &&
           shape->k != 0;
}

/* Collective: times candidates on memory of its own. It begins no candidate after ctx->measure_ms. Waits for all work
 * of the device. found->source is PRS_TABLE_NONE where memory is too short on some rank. 0 or -errno. */
static int measure(struct prs_fused *ctx, const struct prs_gemm_shape *shape, struct prs_table_found *found)
{
    struct prs_gemm_shape own = *shape;
    struct matrices x;
    struct prs_gemm_operands operands = {0};
    struct trial t = {.ctx = ctx, .shape = &own, .operands = &operands, .rounds = OPENING_ROUNDS};
    struct fastest fastest = {.us = DBL_MAX};
    bool there = false;
    int before, r;
    prs_gemm_shape_fill(&own);
    own.c_anywhere = shape->op == PRS_GEMM_ALLREDUCE;
    own.norm = PRS_NORM_NONE; /* the same after each candidate */
    x = matrices_of(ctx, &own);
    *found = (struct prs_table_found){.source = PRS_TABLE_NONE};
    r = prs_cuda_enter(ctx, &before);
    if (r)
        return r;
    r = prs_cuda_check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); /* launches of a context do not overlap */
    if (!r)
        r = prs_cuda_check(cudaStreamCreateWithFlags(&t.stream, cudaStreamNonBlocking), "cudaStreamCreate");
    r = prs_ranks_agree(ctx, r);
    if (!r)
        r = take_matrices(ctx, &x, &there);
    place_operands(&own, &x, &operands);
    t.until_ns = prs_clock_ns() + (uint64_t)ctx->measure_ms * 1000000u;
    if (there)
        r = run(&t, &fastest);
    if (there && r == 0) {
        *found = (struct prs_table_found){PRS_TABLE_MEASURED, {(float)fastest.us}, {fastest.tuning}, {0}};
        found->ratio[0] = prs_table_ratio(&fastest.tuning, fastest.us, fastest.other_us);
    }
    (void)cudaFree(x.at);
    if (t.stream)
        (void)cudaStreamDestroy(t.stream);
    prs_cuda_leave(before);
    return r;
}

/* The plan is opened again with the measured tuning, because only the first opening shows that no rank has a measured
 * one. */
int prs_gemm_plan_open(struct prs_fused *ctx, const struct prs_gemm_shape *shape, const struct prs_gemm_tuning *tuning,
                       struct prs_gemm_plan **out)
{
    struct prs_gemm_plan *p = NULL;
    struct prs_table_found measured;
    int r = prs_gemm_plan_open_as(ctx, shape, tuning, NULL, &p);
    if (r == 0 && !tuning && prs_gemm_plan_found(p).source == PRS_TABLE_NONE && measures(ctx, shape)) {
        r = measure(ctx, shape, &measured);
        if (r || measured.source != PRS_TABLE_NONE) {
            prs_gemm_plan_close(p);
            p = NULL;
        }
        if (r == 0 && !p)
            r = prs_gemm_plan_open_as(ctx, shape, NULL, &measured, &p);
    }
    if (r == 0 && !tuning)
        r = prs_paths_open(p);
    if (!r)
        *out = p;
    else
        prs_gemm_plan_close(p);
    return r;
}
