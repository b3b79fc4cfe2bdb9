/* SPDX-License-Identifier: Apache-2.0 */
/* perseus-fused-bench --kernel attention: ring attention; results poisoned before each launch, and those of the timed
 * launches checked (timed.h). --backward also times its backward pass, and both one after the other. The baselines
 * cuDNN, FA2, NCCL and torch's context parallel are in tools/fused/attention_peers.py and attention_step_peers.py,
 * which torch needs. */
#include "tools/fused/attention.h"
#include "tools/fused/timed.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/common/json.h"

static const double LINK_BYTES_PER_US = 394e3; /* peer copy on the test host */

/* What is timed. */
enum { FORWARD = 0, BACKWARD = 1, BOTH = 2, METHODS = 3 };
enum { GRADIENTS = 3 }; /* dq, dk, dv */

struct run {
    const struct bench_options *options;
    struct bench_start *start;
    struct bench_attention problem;
    struct prs_fused *ctx;
    struct prs_attention_plan *plan;
    cudaStream_t stream;
    struct bench_attention_tensors in;
    void *out, *kept_out, *kept_lse; /* kept: results of a warm-up launch, which the timed launches must repeat */
    float *lse;
    struct bench_timed timed;
    struct bench_verdict verdict;
    /* Used with --backward, else NULL. `given`: results of a forward launch, for backward launches that are timed
     * alone. */
    struct prs_attention_backward_plan *back;
    void *given_out, *gradient[GRADIENTS], *kept_gradient[GRADIENTS];
    float *given_lse;
    struct bench_attention_term *terms; /* of all ranks */
    uint32_t method;                    /* launched last */
};

static size_t out_bytes(const struct run *r)
{
    return bench_attention_elements(&r->problem, r->problem.shape.heads_q) * 2;
}

static size_t lse_bytes(const struct run *r)
{
    return out_bytes(r) / (r->problem.shape.head_dim * 2) * sizeof(float);
}

static size_t gradient_bytes(const struct run *r, int i)
{
    return bench_attention_elements(&r->problem, i == 0 ? r->problem.shape.heads_q : r->problem.shape.heads_kv) * 2;
}

static void poison(const struct run *r, uint32_t method)
{
    if (method != BACKWARD) {
        bench_poison(r->out, out_bytes(r), r->stream);
        bench_poison(r->lse, lse_bytes(r), r->stream);
    }
    for (int i = 0; i < GRADIENTS && method != FORWARD; i++)
        bench_poison(r->gradient[i], gradient_bytes(r, i), r->stream);
}

static void launch_forward(const struct run *r, const struct bench_attention_tensors *in, void *out, float *lse)
{
    struct prs_attention_operands x = {in->q, in->k, in->v, out, lse};
    BENCH_CALL(prs_attention_launch(r->plan, &x, r->stream));
}

static void launch_backward(const struct run *r, const void *out, const float *lse)
{
    struct prs_attention_gradients x = {};
    x.q = r->in.q, x.k = r->in.k, x.v = r->in.v, x.out = out, x.lse = lse, x.dout = r->in.dout;
    x.dq = r->gradient[0], x.dk = r->gradient[1], x.dv = r->gradient[2];
    BENCH_CALL(prs_attention_backward_launch(r->back, &x, r->stream));
}

static void open_inputs(const struct run *r, const struct bench_attention *p, struct bench_attention_tensors *in)
{
    size_t q = bench_attention_elements(p, p->shape.heads_q) * 2,
           kv = bench_attention_elements(p, p->shape.heads_kv) * 2;
    BENCH_CUDA(cudaMalloc(&in->q, q));
    BENCH_CUDA(cudaMalloc(&in->k, kv));
    BENCH_CUDA(cudaMalloc(&in->v, kv));
    in->dout = NULL;
    if (r->options->attention.backward != 0)
        BENCH_CUDA(cudaMalloc(&in->dout, q));
    bench_attention_fill(p, in, r->stream);
}

static void close_inputs(const struct bench_attention_tensors *in)
{
    BENCH_CUDA(cudaFree(in->q));
    BENCH_CUDA(cudaFree(in->k));
    BENCH_CUDA(cudaFree(in->v));
    BENCH_CUDA(cudaFree(in->dout));
}

/* ---- gradients ---- */
/* Gathers every rank's terms for the reference, through the barrier's memory, since ranks may be processes. */
static void gather_terms(struct run *r)
{
    enum { PIECE = 4096 };
    static __thread uint8_t all[PRS_MAX_LOCAL_RANKS * PIECE];
    size_t bytes = lse_bytes(r) / sizeof(float) * sizeof(struct bench_attention_term);
    uint8_t *mine = (uint8_t *)malloc(bytes), *whole = (uint8_t *)malloc(bytes * r->problem.world);
    bench_attention_terms(&r->problem, r->given_out, r->given_lse, r->terms, r->stream);
    BENCH_CUDA(cudaMemcpyAsync(mine, r->terms, bytes, cudaMemcpyDeviceToHost, r->stream));
    BENCH_CUDA(cudaStreamSynchronize(r->stream));
    for (size_t at = 0; at < bytes; at += PIECE) {
        size_t piece = bytes - at < PIECE ? bytes - at : PIECE;
        bench_allgather(r->start->rank, mine + at, all, piece);
        for (uint32_t p = 0; p < r->problem.world; p++)
            memcpy(whole + p * bytes + at, all + p * piece, piece);
    }
    BENCH_CUDA(cudaMemcpy(r->terms, whole, bytes * r->problem.world, cudaMemcpyHostToDevice));
    free(mine);
    free(whole);
}

static void open_backward(struct run *r)
{
    size_t terms = lse_bytes(r) / sizeof(float) * sizeof(*r->terms);
    struct prs_attention_tuning tuning = r->options->attention.tuning;
    if (r->options->attention.backward == 0)
        return;
    tuning.block_rows = tuning.overlap = tuning.mover = 0; /* of the forward pass */
    BENCH_CALL(prs_attention_backward_plan_open(r->ctx, &r->problem.shape, &tuning, &r->back));
    BENCH_CUDA(cudaMalloc(&r->given_out, out_bytes(r)));
    BENCH_CUDA(cudaMalloc((void **)&r->given_lse, lse_bytes(r)));
    BENCH_CUDA(cudaMalloc((void **)&r->terms, terms * r->problem.world));
    for (int i = 0; i < GRADIENTS; i++) {
        BENCH_CUDA(cudaMalloc(&r->gradient[i], gradient_bytes(r, i)));
        if (r->options->iterations > 0)
            BENCH_CUDA(cudaMalloc(&r->kept_gradient[i], gradient_bytes(r, i)));
    }
    BENCH_CUDA(cudaStreamSynchronize(r->stream));
    bench_meet(r->start->rank);
    launch_forward(r, &r->in, r->given_out, r->given_lse);
    gather_terms(r);
}

static void close_backward(struct run *r)
{
    prs_attention_backward_plan_close(r->back);
    for (int i = 0; i < GRADIENTS; i++) {
        BENCH_CUDA(cudaFree(r->gradient[i]));
        BENCH_CUDA(cudaFree(r->kept_gradient[i]));
    }
    for (void *p : {r->given_out, (void *)r->given_lse, (void *)r->terms})
        BENCH_CUDA(cudaFree(p));
}

/* ---- measuring ---- */
/* Negates keys, but not queries: if both changed their signs, or all inputs of a backward launch, probabilities and
 * terms would not change. */
static void negate(void *user)
{
    struct run *r = (struct run *)user;
    uint64_t elements = bench_attention_elements(&r->problem, r->problem.shape.heads_kv);
    bench_negate(r->in.k, elements, 2, r->stream);
    bench_negate(r->in.v, elements, 2, r->stream);
    if (r->in.dout)
        bench_negate(r->in.dout, out_bytes(r) / 2, 2, r->stream);
}

static void prepare(void *user, uint32_t method)
{
    poison((struct run *)user, method);
}

static void launch_timed(void *user, uint32_t method)
{
    struct run *r = (struct run *)user;
    r->method = method;
    if (method != BACKWARD)
        launch_forward(r, &r->in, r->out, r->lse);
    if (method != FORWARD)
        launch_backward(r, method == BOTH ? r->out : r->given_out, method == BOTH ? r->lse : r->given_lse);
}

/* The method that runs both passes writes the same as the passes alone. */
static void keep(void *user, uint32_t method)
{
    struct run *r = (struct run *)user;
    if (method == FORWARD) {
        BENCH_CUDA(cudaMemcpyAsync(r->kept_out, r->out, out_bytes(r), cudaMemcpyDeviceToDevice, r->stream));
        BENCH_CUDA(cudaMemcpyAsync(r->kept_lse, r->lse, lse_bytes(r), cudaMemcpyDeviceToDevice, r->stream));
    }
    for (int i = 0; i < GRADIENTS && method == BACKWARD; i++)
        BENCH_CUDA(cudaMemcpyAsync(r->kept_gradient[i], r->gradient[i], gradient_bytes(r, i), cudaMemcpyDeviceToDevice,
                                   r->stream));
}

static void compare(void *user, uint32_t method, unsigned long long *differences)
{
    struct run *r = (struct run *)user;
    if (method != BACKWARD) {
        bench_count_differences(r->out, r->kept_out, out_bytes(r), differences, r->stream);
        bench_count_differences(r->lse, r->kept_lse, lse_bytes(r), differences, r->stream);
    }
    for (int i = 0; i < GRADIENTS && method != FORWARD; i++)
        bench_count_differences(r->gradient[i], r->kept_gradient[i], gradient_bytes(r, i), differences, r->stream);
}

static void add_verdict(struct bench_verdict *to, const struct bench_verdict *v)
{
    to->max_rel_error = fmax(to->max_rel_error, v->max_rel_error);
    to->beyond += v->beyond;
    to->poisoned += v->poisoned;
    to->sampled += v->sampled;
}

static void check(void *user, uint32_t method)
{
    struct run *r = (struct run *)user;
    struct bench_verdict v;
    if (method != BACKWARD) {
        v = bench_attention_check(&r->problem, r->out, r->lse, r->stream);
        add_verdict(&r->verdict, &v);
    }
    if (method != FORWARD) {
        v = bench_attention_check_gradients(&r->problem, r->gradient, r->terms, r->stream);
        add_verdict(&r->verdict, &v);
    }
}

static uint16_t *sampled(void *user)
{
    struct run *r = (struct run *)user;
    return (uint16_t *)(r->method == FORWARD ? r->out : r->gradient[0]) + bench_attention_sampled(&r->problem);
}

static const struct bench_timed_calls CALLS = {negate, prepare, launch_timed, keep, compare, check, sampled};

static void measure(struct run *r)
{
    uint32_t methods = r->back ? METHODS : 1;
    r->timed = {r->options, r->start, r->stream, &CALLS, r, methods, (1u << methods) - 1};
    if (r->options->iterations > 0) {
        BENCH_CUDA(cudaMalloc(&r->kept_out, out_bytes(r)));
        BENCH_CUDA(cudaMalloc(&r->kept_lse, lse_bytes(r)));
    }
    bench_timed_run(&r->timed);
    BENCH_CUDA(cudaFree(r->kept_out));
    BENCH_CUDA(cudaFree(r->kept_lse));
}

/* Rate of the products: two for the forward pass, and five for the backward pass, as is usual. */
static double tflops_of(const struct run *r, uint32_t method)
{
    static const double PRODUCTS[METHODS] = {2, 5, 7};
    const struct prs_attention_shape *s = &r->problem.shape;
    double each = 2.0 * s->batch * s->heads_q * s->head_dim * s->seq * s->seq / r->problem.world;
    return PRODUCTS[method] * each / r->timed.usec[method] * 1e-6 * (s->causal != 0 ? 0.5 : 1);
}

static void print_backward(const struct run *r)
{
    struct prs_attention_info info;
    if (!r->back)
        return;
    prs_attention_backward_plan_query(r->back, &info);
    if (r->options->json == 0)
        printf("  backward %.1f us, %.1f TFLOP/s a GPU, predicted %.1f; both %.1f us, %.1f TFLOP/s\n",
               r->timed.usec[BACKWARD], tflops_of(r, BACKWARD), info.predicted_us, r->timed.usec[BOTH],
               tflops_of(r, BOTH));
    else
        json_print(stdout,
                   "backward_usec:%.1f,backward_tflops:%.1f,both_usec:%.1f,both_tflops:%.1f,"
                   "backward_predicted_usec:%.1f,backward_workspace_bytes:%llu,backward_sent_bytes:%llu,",
                   r->timed.usec[BACKWARD], tflops_of(r, BACKWARD), r->timed.usec[BOTH], tflops_of(r, BOTH),
                   info.predicted_us, (unsigned long long)(info.workspace_bytes + info.shared_bytes),
                   (unsigned long long)info.sent_bytes);
}

static void print_row(const struct run *r, double error, double bad, uint64_t sampled)
{
    static const char *const MODES[] = {"", "alone", "resident", "ring"};
    const struct prs_attention_shape *s = &r->problem.shape;
    struct prs_attention_info info;
    double tflops, floor_us, took_us = r->timed.usec[0];
    const struct prs_attention_tuning *t = &info.tuning;
    prs_attention_plan_query(r->plan, &info);
    tflops = tflops_of(r, FORWARD);
    floor_us = (double)info.sent_bytes / LINK_BYTES_PER_US;
    if (r->options->json == 0) {
        printf("attention %ux%ux%ux%ux%u%s %.1f us, %.1f TFLOP/s a GPU, %s, group %u slab %u block %u overlap %u "
               "spread %u, predicted %.1f; %.0f wrong of %llu; %llu launches checked\n",
               s->batch, s->heads_q, s->heads_kv, s->seq, s->head_dim, s->causal ? " causal" : "", took_us, tflops,
               MODES[t->mode], t->heads_per_step, t->slab_rows, t->block_rows, t->overlap, t->spread, info.predicted_us,
               bad, (unsigned long long)sampled, (unsigned long long)r->timed.checked);
        print_backward(r);
    } else {
        json_print(stdout, "{kernel:attention,layout:%s,B:%u,Hq:%u,Hkv:%u,S:%u,D:%u,causal:%u,gpus:%u,nodes:%u,",
                   s->heads_first ? "bhsd" : "bshd", s->batch, s->heads_q, s->heads_kv, s->seq, s->head_dim, s->causal,
                   r->problem.world, r->options->nodes);
        json_print(stdout, "usec:%.1f,comm_floor_usec:%.1f,ratio_to_comm_floor:%.3f,tflops:%.1f,", took_us, floor_us,
                   took_us / floor_us, tflops);
        json_print(stdout,
                   "sm_split:{mode:%s,ctas:%u,group:%u,slab_rows:%u,spread:%u,block_rows:%u,overlap:%u,"
                   "copy_engine:%u,reason:%s},workspace_bytes:%llu,",
                   MODES[t->mode], t->ctas, t->heads_per_step, t->slab_rows, t->spread, t->block_rows, t->overlap,
                   t->mover, info.reason, (unsigned long long)(info.workspace_bytes + info.shared_bytes));
        print_backward(r);
        json_print(stdout,
                   "predicted_usec:%.1f,max_rel_err:%.2e,beyond_bound:%.0f,sampled:%llu,checked_launches:%llu,"
                   "differing_vectors:%.0f,commit:%s}\n",
                   info.predicted_us, error, bad, (unsigned long long)sampled, (unsigned long long)r->timed.checked,
                   r->timed.differing, r->options->commit);
    }
    fflush(stdout);
}

/* ---- many launches, each with other tensors ---- */
struct sets {
    struct run *run;
    struct bench_attention_tensors in[BENCH_SOAK_SETS];
    void *golden[BENCH_SOAK_SETS];
};

static void soak_turn(void *user, uint32_t set, unsigned long long *differences)
{
    struct sets *s = (struct sets *)user;
    poison(s->run, FORWARD);
    launch_forward(s->run, &s->in[set], s->run->out, s->run->lse);
    bench_count_differences(s->run->out, s->golden[set], out_bytes(s->run), differences, s->run->stream);
}

static double open_sets(struct run *r, struct sets *s)
{
    double bad = 0;
    for (uint32_t i = 0; i < BENCH_SOAK_SETS; i++) {
        struct bench_attention p = r->problem;
        struct bench_verdict v;
        p.seed += 100 * (i + 1);
        open_inputs(r, &p, &s->in[i]);
        BENCH_CUDA(cudaMalloc(&s->golden[i], out_bytes(r)));
        poison(r, FORWARD);
        BENCH_CUDA(cudaStreamSynchronize(r->stream));
        bench_meet(r->start->rank);
        launch_forward(r, &s->in[i], r->out, r->lse);
        v = bench_attention_check(&p, r->out, r->lse, r->stream);
        bad += (double)(v.beyond + v.poisoned);
        BENCH_CUDA(cudaMemcpyAsync(s->golden[i], r->out, out_bytes(r), cudaMemcpyDeviceToDevice, r->stream));
    }
    return bench_max(r->start->rank, bad);
}

static bool soak(struct run *r)
{
    const struct bench_options *o = r->options;
    const struct prs_attention_shape *s = &r->problem.shape;
    struct sets sets;
    double bad, differences;
    sets.run = r;
    bad = open_sets(r, &sets);
    differences = bench_soak(r->start->rank, o, soak_turn, &sets, r->stream);
    if (r->start->rank->rank == 0)
        json_print(stdout,
                   "{kernel:attention,soak:true,B:%u,Hq:%u,Hkv:%u,S:%u,D:%u,causal:%u,gpus:%u,launches:%u,"
                   "graph_replays:%u,beyond_bound:%.0f,differing_vectors:%.0f,commit:%s}\n",
                   s->batch, s->heads_q, s->heads_kv, s->seq, s->head_dim, s->causal, r->problem.world, o->soak,
                   o->replay, bad, differences, o->commit);
    fflush(stdout);
    for (uint32_t i = 0; i < BENCH_SOAK_SETS; i++) {
        close_inputs(&sets.in[i]);
        BENCH_CUDA(cudaFree(sets.golden[i]));
    }
    return bad == 0 && differences == 0;
}

bool bench_attention_run(const struct bench_options *o, struct bench_start *start, struct prs_fused *ctx,
                         const struct bench_attention *problem, cudaStream_t stream)
{
    struct run r = {o, start, *problem, ctx};
    struct prs_fused_error error;
    const struct bench_verdict *v = &r.verdict;
    double bad, worst;
    r.stream = stream;
    open_inputs(&r, problem, &r.in);
    BENCH_CUDA(cudaMalloc(&r.out, out_bytes(&r)));
    BENCH_CUDA(cudaMalloc((void **)&r.lse, lse_bytes(&r)));
    BENCH_CALL(prs_attention_plan_open(ctx, &problem->shape, &o->attention.tuning, &r.plan));
    open_backward(&r);
    BENCH_CUDA(cudaStreamSynchronize(stream));
    measure(&r);
    if (prs_fused_poll_error(ctx, &error) != 0)
        fprintf(stderr, "perseus-fused-bench: %s\n", error.text);
    bad = bench_max(start->rank, (double)(v->beyond + v->poisoned)) + r.timed.differing;
    worst = bench_max(start->rank, v->max_rel_error);
    if (start->rank->rank == 0)
        print_row(&r, worst, bad, v->sampled);
    if (o->soak + o->replay != 0 && !soak(&r))
        bad++;
    BENCH_CUDA(cudaDeviceSynchronize());
    prs_attention_plan_close(r.plan);
    close_backward(&r);
    close_inputs(&r.in);
    BENCH_CUDA(cudaFree(r.out));
    BENCH_CUDA(cudaFree(r.lse));
    return bad == 0;
}
