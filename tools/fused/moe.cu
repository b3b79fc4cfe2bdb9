/* SPDX-License-Identifier: Apache-2.0 */
/* perseus-fused-bench --kernel moe: dispatch with the grouped product, and the product of the same rows alone. Results
 * are poisoned before each launch, and those of the timed launches are checked, with their maps (timed.h). The
 * baselines are in tools/fused/moe_peers.py, which needs torch. */
#include "tools/fused/moe.h"
#include "tools/fused/timed.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/common/json.h"

enum { METHODS = 2 };
enum method { OWN = 0, PRODUCT = 1 };

struct run {
    const struct bench_options *options;
    struct bench_rank *rank;
    struct bench_moe_problem problem;
    struct prs_fused *ctx;
    struct prs_moe_plan *plan;
    struct prs_moe_info info;
    struct bench_start start;
    cudaStream_t stream;
    void *weights;
    struct prs_moe_batch batch;
    struct prs_moe_batch kept[METHODS]; /* results of warm-up launches, which the timed launches must repeat */
    struct bench_moe_want want;
    struct bench_timed timed;
    struct bench_moe_verdict verdict[METHODS];
};

/* ---- one batch ---- */
static void *device(size_t bytes)
{
    void *p;
    BENCH_CUDA(cudaMalloc(&p, bytes));
    return p;
}

static size_t out_bytes(const struct run *r)
{
    return (size_t)r->info.capacity * r->problem.shape.columns * 2;
}

static size_t expert_rows_bytes(const struct run *r)
{
    return r->problem.shape.experts / r->problem.world * sizeof(struct prs_moe_expert_rows);
}

static void poison(const struct run *r, const struct prs_moe_batch *b)
{
    bench_poison(b->out, out_bytes(r), r->stream);
    bench_poison(b->rows, r->info.capacity * sizeof(*b->rows), r->stream);
    bench_poison(b->expert_rows, expert_rows_bytes(r), r->stream);
}

static void open_inputs(struct run *r, const struct bench_moe_problem *p, struct prs_moe_batch *b)
{
    uint32_t count = bench_moe_tokens_of(p, p->rank);
    size_t choices = (size_t)count * p->shape.top_k;
    int64_t *chosen = (int64_t *)malloc(choices * sizeof(*chosen));
    float *weights = (float *)malloc(choices * sizeof(*weights));
    bench_moe_choose(p, p->rank, chosen, weights);
    b->count = count;
    b->tokens = device((size_t)count * p->shape.hidden * 2);
    b->chosen = (const int64_t *)device(choices * sizeof(*chosen));
    b->router_weights = (const float *)device(choices * sizeof(*weights));
    b->weights = r->weights;
    bench_fill((void *)b->tokens, (uint64_t)count * p->shape.hidden, PRS_DTYPE_BF16, p->seed, p->rank, 0, r->stream);
    BENCH_CUDA(cudaMemcpy((void *)b->chosen, chosen, choices * sizeof(*chosen), cudaMemcpyHostToDevice));
    BENCH_CUDA(cudaMemcpy((void *)b->router_weights, weights, choices * sizeof(*weights), cudaMemcpyHostToDevice));
    free(chosen);
    free(weights);
}

static void open_results(struct run *r, struct prs_moe_batch *b)
{
    b->out = device(out_bytes(r));
    b->rows = (struct prs_moe_row *)device(r->info.capacity * sizeof(*b->rows));
    b->expert_rows = (struct prs_moe_expert_rows *)device(expert_rows_bytes(r));
}

static void close_inputs(struct prs_moe_batch *b)
{
    BENCH_CUDA(cudaFree((void *)b->tokens));
    BENCH_CUDA(cudaFree((void *)b->chosen));
    BENCH_CUDA(cudaFree((void *)b->router_weights));
}

static void close_results(struct prs_moe_batch *b)
{
    BENCH_CUDA(cudaFree(b->out));
    BENCH_CUDA(cudaFree(b->rows));
    BENCH_CUDA(cudaFree(b->expert_rows));
}

/* ---- measuring ---- */
/* This changes the rows, but not the ranks that they are sent to. */
static void negate(void *user)
{
    struct run *r = (struct run *)user;
    bench_negate((void *)r->batch.tokens, (uint64_t)r->batch.count * r->problem.shape.hidden, 2, r->stream);
}

static void prepare(void *user, uint32_t method)
{
    struct run *r = (struct run *)user;
    if (method == OWN)
        poison(r, &r->batch);
    else /* the product alone reads the maps and does not write them */
        bench_poison(r->batch.out, out_bytes(r), r->stream);
}

static void launch(void *user, uint32_t method)
{
    struct run *r = (struct run *)user;
    if (method == OWN)
        BENCH_CALL(prs_moe_dispatch_gemm(r->plan, &r->batch, r->stream));
    else
        BENCH_CALL(prs_moe_gemm(r->plan, &r->batch, r->stream));
}

static void keep(void *user, uint32_t method)
{
    struct run *r = (struct run *)user;
    const struct prs_moe_batch *from = &r->batch, *to = &r->kept[method];
    cudaMemcpyKind within = cudaMemcpyDeviceToDevice;
    BENCH_CUDA(cudaMemcpyAsync(to->out, from->out, out_bytes(r), within, r->stream));
    BENCH_CUDA(cudaMemcpyAsync(to->rows, from->rows, r->info.capacity * sizeof(*to->rows), within, r->stream));
    BENCH_CUDA(cudaMemcpyAsync(to->expert_rows, from->expert_rows, expert_rows_bytes(r), within, r->stream));
}

static void compare(void *user, uint32_t method, unsigned long long *differences)
{
    struct run *r = (struct run *)user;
    bench_moe_compare(&r->problem, &r->want, &r->batch, &r->kept[method], differences, r->stream);
}

static void check(void *user, uint32_t method)
{
    struct run *r = (struct run *)user;
    r->verdict[method] = bench_moe_check(&r->problem, &r->want, &r->batch, r->stream);
}

static uint16_t *sampled(void *user)
{
    struct run *r = (struct run *)user;
    return r->want.count == 0 ? NULL : (uint16_t *)r->batch.out + bench_moe_sampled(&r->problem, &r->want);
}

static const struct bench_timed_calls CALLS = {negate, prepare, launch, keep, compare, check, sampled};

static void measure(struct run *r)
{
    bool keeps = r->options->iterations > 0;
    r->timed = {r->options, &r->start, r->stream, &CALLS, r, METHODS, (1u << METHODS) - 1};
    for (int method = 0; keeps && method < METHODS; method++)
        open_results(r, &r->kept[method]);
    bench_timed_run(&r->timed);
    for (int method = 0; keeps && method < METHODS; method++)
        close_results(&r->kept[method]);
}

static bool report(struct run *r)
{
    const struct bench_moe_verdict *v = &r->verdict[OWN], *product = &r->verdict[PRODUCT];
    const double *usec = r->timed.usec;
    const struct bench_moe_problem *p = &r->problem;
    const struct prs_moe_tuning *t = &r->info.tuning;
    double bad = bench_max(r->rank, (double)(v->beyond + v->poisoned + product->beyond + product->poisoned)) +
                 r->timed.differing,
           maps = bench_max(r->rank, (double)(v->map_errors + product->map_errors));
    double error = bench_max(r->rank, fmax(v->max_rel_error, product->max_rel_error)),
           most = bench_max(r->rank, r->want.count);
    double tflops = 2.0 * most * p->shape.hidden * p->shape.columns / usec[OWN] * 1e-6;
    if (r->rank->rank != 0)
        return bad == 0 && maps == 0;
    if (r->options->json == 0) {
        printf(
            "moe %-14s %-2s tokens %-6u zipf %-4g %10.1f us, product alone %10.1f us, most rows %6.0f, %6.1f TFLOP/s; "
            "share %u ctas %u route %u; wrong: %.0f of %llu, %.0f in maps; %llu launches checked\n",
            p->shape.name, p->n_h != 0 ? "nk" : "kn", p->tokens, p->zipf, usec[OWN], usec[PRODUCT], most, tflops,
            t->cluster, t->ctas, t->route_ctas, bad, (unsigned long long)v->sampled, maps,
            (unsigned long long)r->timed.checked);
    } else {
        json_print(stdout, "{kernel:moe,preset:%s,layout:%s,H:%u,N:%u,E:%u,top_k:%u,tokens:%u,ragged:%u,zipf:%g,",
                   p->shape.name, p->n_h ? "nk" : "kn", p->shape.hidden, p->shape.columns, p->shape.experts,
                   p->shape.top_k, p->tokens, p->ragged, p->zipf);
        json_print(stdout, "gpus:%u,nodes:%u,usec:%.1f,product_usec:%.1f,tflops:%.1f,most_rows:%.0f,", p->world,
                   r->rank->nodes, usec[OWN], usec[PRODUCT], tflops, most);
        json_print(stdout,
                   "sm_split:{share:%u,ctas:%u,route_ctas:%u,spread:%u,group:%u,put:%u,passes:%u},"
                   "predicted_usec:%.1f,",
                   t->cluster, t->ctas, t->route_ctas, t->spread, t->rows_per_signal, t->rows_per_put, t->passes,
                   r->info.predicted_us);
        json_print(stdout,
                   "max_rel_err:%.2e,beyond_bound:%.0f,map_errors:%.0f,sampled:%llu,checked_launches:%llu,"
                   "differing_elements:%.0f,commit:%s}\n",
                   error, bad, maps, (unsigned long long)v->sampled, (unsigned long long)r->timed.checked,
                   r->timed.differing, r->options->commit);
    }
    fflush(stdout);
    return bad == 0 && maps == 0;
}

/* ---- many launches, each with other tokens and other choices ---- */
struct sets {
    struct run *run;
    struct bench_moe_problem problem[BENCH_SOAK_SETS];
    struct bench_moe_want want[BENCH_SOAK_SETS];
    struct prs_moe_batch golden[BENCH_SOAK_SETS];
};

static void soak_turn(void *user, uint32_t set, unsigned long long *differences)
{
    struct sets *s = (struct sets *)user;
    struct run *r = s->run;
    struct prs_moe_batch b = s->golden[set];
    b.out = r->batch.out, b.rows = r->batch.rows, b.expert_rows = r->batch.expert_rows;
    poison(r, &b);
    BENCH_CALL(prs_moe_dispatch_gemm(r->plan, &b, r->stream));
    bench_moe_compare(&s->problem[set], &s->want[set], &b, &s->golden[set], differences, r->stream);
}

static double open_sets(struct run *r, struct sets *s)
{
    uint64_t bad = 0;
    for (uint32_t i = 0; i < BENCH_SOAK_SETS; i++) {
        struct bench_moe_verdict v;
        s->problem[i] = r->problem;
        s->problem[i].ragged = 1;
        s->problem[i].seed = r->problem.seed + i;
        bench_moe_want_open(&s->problem[i], &s->want[i]);
        open_inputs(r, &s->problem[i], &s->golden[i]);
        open_results(r, &s->golden[i]);
        poison(r, &s->golden[i]);
        BENCH_CUDA(cudaStreamSynchronize(r->stream));
        bench_meet(r->rank);
        BENCH_CALL(prs_moe_dispatch_gemm(r->plan, &s->golden[i], r->stream));
        v = bench_moe_check(&s->problem[i], &s->want[i], &s->golden[i], r->stream);
        bad += v.map_errors + v.poisoned + v.beyond;
    }
    return bench_max(r->rank, (double)bad);
}

static bool soak(struct run *r)
{
    const struct bench_options *o = r->options;
    struct sets s;
    double bad, differences;
    memset(&s, 0, sizeof(s));
    s.run = r;
    bad = open_sets(r, &s);
    differences = bench_soak(r->rank, o, soak_turn, &s, r->stream);
    if (r->rank->rank == 0)
        json_print(stdout,
                   "{kernel:moe,soak:true,preset:%s,tokens:%u,zipf:%g,gpus:%u,launches:%u,graph_replays:%u,"
                   "beyond_bound:%.0f,differing_elements:%.0f,commit:%s}\n",
                   r->problem.shape.name, r->problem.tokens, r->problem.zipf, r->problem.world, o->soak, o->replay, bad,
                   differences, o->commit);
    fflush(stdout);
    for (uint32_t i = 0; i < BENCH_SOAK_SETS; i++) {
        bench_moe_want_close(&s.want[i]);
        close_inputs(&s.golden[i]);
        close_results(&s.golden[i]);
    }
    return bad == 0 && differences == 0;
}

/* ---- one problem ---- */
static bool run_problem(struct run *r)
{
    const struct bench_moe_problem *p = &r->problem;
    const struct bench_moe_shape *s = &p->shape;
    struct prs_moe_shape shape = {p->tokens, s->hidden, s->columns, s->experts, s->top_k, 0, p->n_h};
    uint64_t elements = (uint64_t)s->experts / p->world * s->hidden * s->columns;
    struct prs_moe_tuning tuning = r->options->moe.tuning;
    struct prs_fused_error error;
    bool good;
    tuning.rows_per_signal = r->options->tuning.tiles_per_signal;
    BENCH_CALL(prs_moe_plan_open(r->ctx, &shape, &tuning, &r->plan));
    prs_moe_plan_query(r->plan, &r->info);
    r->weights = device(elements * 2);
    bench_fill(r->weights, elements, PRS_DTYPE_BF16, p->weights_seed, p->rank, 1, r->stream);
    open_inputs(r, p, &r->batch);
    open_results(r, &r->batch);
    bench_moe_want_open(p, &r->want);
    BENCH_CUDA(cudaStreamSynchronize(r->stream));
    measure(r);
    if (prs_fused_poll_error(r->ctx, &error) != 0)
        fprintf(stderr, "perseus-fused-bench: %s\n", error.text);
    good = report(r);
    if (r->options->soak + r->options->replay != 0)
        good = soak(r) && good;
    BENCH_CUDA(cudaDeviceSynchronize());
    prs_moe_plan_close(r->plan);
    bench_moe_want_close(&r->want);
    close_inputs(&r->batch);
    close_results(&r->batch);
    BENCH_CUDA(cudaFree(r->weights));
    return good;
}

static int run_shape(struct run *r, const struct bench_moe_shape *shape, uint32_t layout)
{
    const struct bench_moe_options *o = &r->options->moe;
    int bad = 0;
    for (uint32_t t = 0; t < o->token_count; t++)
        for (uint32_t z = 0; z < o->zipf_count; z++) {
            r->problem = {*shape, o->tokens[t], r->rank->rank, r->rank->world, r->rank->nodes,     1 + z + 8 * t,
                          1,      o->ragged,    layout,        o->zipf[z],     r->options->samples};
            bad += !run_problem(r);
        }
    return bad;
}

int bench_moe_run(struct bench_rank *rank, void *options)
{
    const struct bench_options *o = (const struct bench_options *)options;
    struct prs_fused_config config = bench_config(rank, o);
    struct run r;
    int bad = 0;
    memset(&r, 0, sizeof(r));
    r.options = o, r.rank = rank;
    BENCH_CALL(prs_fused_open(&config, &r.ctx));
    BENCH_CUDA(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
    bench_start_open(&r.start, r.ctx, rank);
    for (uint32_t i = 0; i < o->moe.shape_count; i++)
        for (uint32_t layout = 0; layout < 2; layout++)
            if ((o->layouts >> layout & 1) != 0)
                bad += run_shape(&r, &o->moe.shapes[i], layout);
    return bad;
}
