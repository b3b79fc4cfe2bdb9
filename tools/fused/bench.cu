/* SPDX-License-Identifier: Apache-2.0 */
/* perseus-fused-bench: compares each fused kernel with cuBLASLt alone, NCCL alone, and the two one after the other; the
 * methods alternate in one job. Results are poisoned before each run, and those of the timed launches are checked
 * (timed.h). */
#include "tools/fused/attention.h"
#include "tools/fused/timed.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* With a norm: APART is our sum with the residual, and then the norm as a separate kernel; UNFUSED ends with a kernel
 * that adds the residual and normalises. */
enum method { OWN = 0, COMPUTE = 1, COMMUNICATE = 2, UNFUSED = 3, APART = 4 };

static const double LINK_BYTES_PER_US = 394e3; /* peer copy on the test host */
static const double PORT_BYTES_PER_US = 50e3;  /* between nodes: 400 Gb/s */

/* Everything one rank holds while it measures one shape. */
struct run {
    const struct bench_options *options;
    struct bench_rank *rank;
    struct bench_problem problem;
    struct prs_fused *ctx;
    struct prs_gemm_plan *plan;
    struct bench_lt *lt;
    struct bench_nccl *nccl;
    cudaStream_t stream;
    void *a, *b, *c, *bias, *residual, *all_a; /* all_a: the gathered A as a second result; each may be NULL */
    /* or NULL; all_scales: scales of A of all ranks, for the unfused method */
    float *scale_a, *scale_b, *all_scales;
    struct prs_gemm_plan *plain;         /* or NULL: the same without a norm */
    void *weight, *normed, *kept_normed; /* of a norm, or NULL */
    float *scratch;                      /* scratch memory of the separate norm, or NULL */
    void *kept;                          /* C of a warm-up launch, which the timed launches must repeat */
    void *gathered, *partial;            /* for the unfused method */
    struct bench_start start;
    struct bench_timed timed;
    /* counters before the last of our own launches, and what that launch sent */
    struct prs_fused_traffic before, traffic;
    struct bench_verdict verdict;
};

/* ---- the four methods ---- */
static struct prs_gemm_operands operands_of(const struct run *r)
{
    struct prs_gemm_operands x = {r->a, r->b, r->c, r->bias, r->residual, r->all_a};
    x.scale_a = r->scale_a, x.scale_b = r->scale_b;
    x.norm_weight = r->weight, x.normed = r->normed, x.norm_eps = r->normed ? BENCH_NORM_EPS : 0;
    return x;
}

static void run_own(struct run *r)
{
    struct prs_gemm_operands operands = operands_of(r);
    BENCH_CALL(prs_gemm_launch(r->plan, &operands, r->stream));
}

static void run_apart(struct run *r)
{
    struct prs_gemm_operands operands = operands_of(r);
    operands.norm_weight = operands.normed = NULL, operands.norm_eps = 0;
    BENCH_CALL(prs_gemm_launch(r->plain, &operands, r->stream));
    bench_norm(&r->problem, r->c, NULL, r->weight, r->normed, r->scratch, r->stream);
}

/* For --kill-rank-after: after a launch has failed, later ones are refused. bench_lose_rank() checks for the error. */
static void launch_own(void *user)
{
    struct run *r = (struct run *)user;
    struct prs_gemm_operands operands = operands_of(r);
    (void)prs_gemm_launch(r->plan, &operands, r->stream);
}

static size_t slice_elements(const struct run *r)
{
    const struct prs_gemm_shape *s = &r->problem.shape;
    size_t rows = s->op == PRS_GEMM_ALLREDUCE ? s->m : s->m / r->rank->world;
    return rows * (s->op == PRS_GEMM_ALLGATHER ? s->k : s->n);
}

static void run_compute(struct run *r)
{
    bool gathers = r->problem.shape.op == PRS_GEMM_ALLGATHER;
    bench_lt_run(r->lt, gathers ? r->gathered : r->a, r->b, r->partial ? r->partial : r->c, r->stream);
}

static void run_communicate(struct run *r)
{
    bool gathers = r->problem.shape.op == PRS_GEMM_ALLGATHER;
    if (r->nccl)
        BENCH_CALL(bench_nccl_run(r->nccl, &r->problem.shape, gathers ? r->a : r->partial, gathers ? r->gathered : r->c,
                                  slice_elements(r), r->stream));
    if (r->nccl && r->all_scales)
        BENCH_CALL(bench_nccl_gather_scales(r->nccl, r->scale_a, r->all_scales, bench_rows_a(&r->problem), r->stream));
}

static void run_method(void *user, uint32_t method)
{
    struct run *r = (struct run *)user;
    bool gathers = r->problem.shape.op == PRS_GEMM_ALLGATHER;
    if (method == OWN)
        run_own(r);
    if (method == COMMUNICATE || (method == UNFUSED && gathers))
        run_communicate(r);
    if (method == COMPUTE || method == UNFUSED)
        run_compute(r);
    if (method == UNFUSED && !gathers)
        run_communicate(r);
    if (method == UNFUSED && r->normed)
        bench_norm(&r->problem, r->c, r->residual, r->weight, r->normed, r->scratch, r->stream);
    if (method == APART)
        run_apart(r);
}

/* ---- measuring ---- */
static size_t c_bytes(const struct run *r)
{
    return bench_rows_c(&r->problem) * bench_columns_c(&r->problem) * bench_words_c(&r->problem) * 2;
}

static size_t all_a_bytes(const struct run *r)
{
    return (size_t)r->problem.shape.m * r->problem.shape.k * bench_bytes(&r->problem);
}

static void negate(void *user)
{
    struct run *r = (struct run *)user;
    bench_negate(r->a, bench_rows_a(&r->problem) * (uint64_t)r->problem.shape.k, (uint32_t)bench_bytes(&r->problem),
                 r->stream);
}

static void prepare(void *user, uint32_t method)
{
    struct run *r = (struct run *)user;
    bench_poison(r->c, c_bytes(r), r->stream);
    if (r->normed)
        bench_poison(r->normed, c_bytes(r), r->stream);
    if (r->all_a)
        bench_poison(r->all_a, all_a_bytes(r), r->stream);
    if (method == OWN)
        prs_fused_traffic(r->ctx, &r->before);
}

static void keep(void *user, uint32_t method)
{
    struct run *r = (struct run *)user;
    (void)method; /* there is only one kernel of our own */
    BENCH_CUDA(cudaMemcpyAsync(r->kept, r->c, c_bytes(r), cudaMemcpyDeviceToDevice, r->stream));
    if (r->normed)
        BENCH_CUDA(cudaMemcpyAsync(r->kept_normed, r->normed, c_bytes(r), cudaMemcpyDeviceToDevice, r->stream));
}

static void compare(void *user, uint32_t method, unsigned long long *differences)
{
    struct run *r = (struct run *)user;
    (void)method;
    bench_count_differences(r->c, r->kept, c_bytes(r), differences, r->stream);
    if (r->normed)
        bench_count_differences(r->normed, r->kept_normed, c_bytes(r), differences, r->stream);
}

static uint16_t *sampled(void *user)
{
    struct run *r = (struct run *)user;
    uint32_t words = bench_words_c(&r->problem);
    return (uint16_t *)r->c + (bench_sampled(&r->problem) + 1) * words - 1;
}

/* The traffic to other nodes that one launch causes. */
static struct prs_fused_traffic traffic_since(struct run *r, const struct prs_fused_traffic *before)
{
    struct prs_fused_traffic t;
    prs_fused_traffic(r->ctx, &t);
    t.puts = (uint64_t)bench_max(r->rank, (double)(t.puts - before->puts));
    t.signals = (uint64_t)bench_max(r->rank, (double)(t.signals - before->signals));
    t.fences = (uint64_t)bench_max(r->rank, (double)(t.fences - before->fences));
    t.bytes = (uint64_t)bench_max(r->rank, (double)(t.bytes - before->bytes));
    return t;
}

static void check(void *user, uint32_t method)
{
    struct run *r = (struct run *)user;
    (void)method;
    r->traffic = traffic_since(r, &r->before);
    r->verdict = bench_check(&r->problem, r->c, r->stream);
    if (r->normed)
        r->verdict.beyond += bench_check_norm(&r->problem, r->c, r->weight, r->normed, r->stream);
    if (r->all_a)
        r->verdict.beyond += bench_check_gathered(&r->problem, r->all_a, r->stream);
}

static const struct bench_timed_calls CALLS = {negate, prepare, run_method, keep, compare, check, sampled};

static void measure(struct run *r)
{
    /* Work other than product, communication and a norm has no baseline here. */
    bool compares =
        r->normed ? !r->bias && r->problem.shape.activation == PRS_ACTIVATION_NONE : !bench_finishes(&r->problem);
    uint32_t talks = r->problem.shape.op != PRS_GEMM_ALONE && r->nccl != NULL && compares;
    r->timed.options = r->options, r->timed.start = &r->start, r->timed.stream = r->stream;
    r->timed.calls = &CALLS, r->timed.user = r, r->timed.own = 1;
    r->timed.methods =
        1u << OWN | (r->lt != NULL) << COMPUTE | talks << COMMUNICATE | talks << UNFUSED | (r->plain != NULL) << APART;
    if (r->options->iterations > 0)
        BENCH_CUDA(cudaMalloc(&r->kept, c_bytes(r)));
    if (r->options->iterations > 0 && r->normed)
        BENCH_CUDA(cudaMalloc(&r->kept_normed, c_bytes(r)));
    bench_timed_run(&r->timed);
    BENCH_CUDA(cudaFree(r->kept));
    BENCH_CUDA(cudaFree(r->kept_normed));
    r->kept = r->kept_normed = NULL;
}

static bool report(struct run *r)
{
    const struct bench_verdict *v = &r->verdict;
    const double *usec = r->timed.usec;
    const struct prs_gemm_shape *s = &r->problem.shape;
    struct bench_row row;
    memset(&row, 0, sizeof(row));
    row.shape = *s, row.bias = r->problem.bias, row.residual = r->problem.residual, row.keeps = r->all_a != NULL;
    prs_gemm_plan_query(r->plan, &row.info);
    row.gpus = r->problem.world;
    row.own_us = usec[OWN], row.compute_us = usec[COMPUTE];
    row.comm_us = usec[COMMUNICATE], row.unfused_us = usec[UNFUSED], row.apart_us = usec[APART];
    row.traffic = r->traffic;
    row.floor_us = fmax((double)row.info.sent_bytes / LINK_BYTES_PER_US,
                        row.traffic.rails ? (double)row.info.far_bytes / (PORT_BYTES_PER_US * row.traffic.rails) : 0);
    if (row.compute_us > row.floor_us)
        row.floor_us = row.compute_us; /* NaN means not measured, and never compares as larger */
    row.speedup = bench_finishes(&r->problem) && !r->normed
                      ? NAN
                      : (s->op == PRS_GEMM_ALONE ? row.compute_us : row.unfused_us) / row.own_us;
    row.tflops = 2.0 * s->m * s->n * s->k / row.own_us * 1e-6;
    row.beyond = bench_max(r->rank, (double)(v->beyond + v->poisoned)) + r->timed.differing;
    row.max_rel_error = bench_max(r->rank, v->max_rel_error);
    row.sampled = v->sampled;
    row.checked = r->timed.checked, row.differing = r->timed.differing;
    row.commit = r->options->commit;
    if (r->rank->rank == 0)
        bench_report(&row, r->options->json != 0);
    return row.beyond == 0;
}

/* The sets that bench_soak() runs: inputs from different seeds, each with the checked result of one launch. */
struct sets {
    struct run *run;
    void *a[BENCH_SOAK_SETS], *golden[BENCH_SOAK_SETS];
    size_t c_bytes;
};

static void launch_on(struct run *r, void *a)
{
    void *own = r->a;
    r->a = a;
    run_own(r);
    r->a = own;
}

static void soak_turn(void *user, uint32_t set, unsigned long long *differences)
{
    struct sets *s = (struct sets *)user;
    struct run *r = s->run;
    bench_poison(r->c, s->c_bytes, r->stream);
    launch_on(r, s->a[set]);
    bench_count_differences(r->c, s->golden[set], s->c_bytes, differences, r->stream);
}

/* Return the number of elements beyond the bound. */
static uint64_t prepare_soak(struct run *r, struct sets *s, size_t a_bytes)
{
    uint64_t bad = 0;
    for (uint32_t set = 0; set < BENCH_SOAK_SETS; set++) {
        struct bench_problem p = r->problem;
        struct bench_verdict v;
        p.seed_a += 100 * set;
        BENCH_CUDA(cudaMalloc(&s->a[set], a_bytes));
        BENCH_CUDA(cudaMalloc(&s->golden[set], s->c_bytes));
        bench_fill_inputs(&p, s->a[set], r->b, r->stream);
        bench_poison(r->c, s->c_bytes, r->stream);
        BENCH_CUDA(cudaStreamSynchronize(r->stream));
        bench_meet(r->rank);
        launch_on(r, s->a[set]);
        v = bench_check(&p, r->c, r->stream);
        bad += v.beyond + v.poisoned;
        BENCH_CUDA(cudaMemcpyAsync(s->golden[set], r->c, s->c_bytes, cudaMemcpyDeviceToDevice, r->stream));
        BENCH_CUDA(cudaStreamSynchronize(r->stream));
        bench_meet(r->rank);
    }
    return bad;
}

static bool soak(struct run *r)
{
    const struct bench_options *o = r->options;
    const struct prs_gemm_shape *shape = &r->problem.shape;
    struct sets s;
    double bad, differences;
    memset(&s, 0, sizeof(s));
    s.run = r;
    s.c_bytes = c_bytes(r);
    bad = bench_max(
        r->rank, (double)prepare_soak(r, &s, bench_rows_a(&r->problem) * (size_t)shape->k * bench_bytes(&r->problem)));
    differences = bench_soak(r->rank, o, soak_turn, &s, r->stream);
    if (r->rank->rank == 0)
        bench_report_soak(&r->problem, o, bad, differences);
    for (uint32_t set = 0; set < BENCH_SOAK_SETS; set++) {
        BENCH_CUDA(cudaFree(s.a[set]));
        BENCH_CUDA(cudaFree(s.golden[set]));
    }
    return bad == 0 && differences == 0;
}

static void open_run(struct run *r)
{
    const struct bench_options *o = r->options;
    const struct bench_problem *p = &r->problem;
    size_t a = bench_rows_a(p) * (size_t)p->shape.k * bench_bytes(p), c = c_bytes(r);
    size_t b = (size_t)p->shape.n * p->shape.k * bench_bytes(p);
    BENCH_CUDA(cudaMalloc(&r->a, a));
    BENCH_CUDA(cudaMalloc(&r->b, b));
    BENCH_CALL(prs_fused_alloc(r->ctx, c, &r->c));
    if (p->bias)
        BENCH_CUDA(cudaMalloc(&r->bias, (size_t)p->shape.n * 2));
    if (p->residual)
        BENCH_CUDA(cudaMalloc(&r->residual, c));
    if (p->shape.norm) {
        BENCH_CUDA(cudaMalloc(&r->normed, c));
        BENCH_CUDA(cudaMalloc(&r->weight, (size_t)p->shape.n * 2));
        BENCH_CUDA(cudaMalloc((void **)&r->scratch, BENCH_NORM_SCRATCH * sizeof(*r->scratch)));
        bench_fill(r->weight, p->shape.n, p->shape.dtype == PRS_DTYPE_FP16 ? PRS_DTYPE_FP16 : PRS_DTYPE_BF16, p->seed_b,
                   0, BENCH_BIAS, r->stream);
    }
    if (o->keep_gathered && p->shape.op == PRS_GEMM_ALLGATHER)
        BENCH_CUDA(cudaMalloc(&r->all_a, all_a_bytes(r)));
    bench_fill_inputs(p, r->a, r->b, r->stream);
    bench_fill_finish(p, r->bias, r->residual, r->stream);
    bench_scales_open(p, &r->scale_a, &r->scale_b, r->stream);
    bench_poison(r->c, c, r->stream);
    if (o->no_baselines == 0) {
        if (p->shape.op == PRS_GEMM_ALLGATHER) {
            BENCH_CUDA(cudaMalloc(&r->gathered, a * p->world));
            BENCH_CUDA(cudaMemsetAsync(r->gathered, 0x3c, a * p->world, r->stream));
        }
        if (p->shape.op == PRS_GEMM_ALLGATHER && p->shape.scaling == PRS_SCALING_ROWS) {
            BENCH_CUDA(cudaMalloc((void **)&r->all_scales, p->shape.m * sizeof(float)));
            BENCH_CUDA(cudaMemsetAsync(r->all_scales, 0x3c, p->shape.m * sizeof(float), r->stream));
        }
        if ((p->shape.op != PRS_GEMM_ALLGATHER && p->shape.op != PRS_GEMM_ALONE) || bench_finishes(p)) {
            BENCH_CUDA(cudaMalloc(&r->partial, (size_t)p->shape.m * p->shape.n * 2));
        }
        r->lt = bench_lt_open(&p->shape, !r->partial && bench_words_c(p) == 2, r->gathered ? r->gathered : r->a, r->b,
                              r->partial ? r->partial : r->c, r->all_scales ? r->all_scales : r->scale_a, r->scale_b,
                              r->stream);
    }
    BENCH_CUDA(cudaStreamSynchronize(r->stream));
}

static void close_run(struct run *r)
{
    BENCH_CUDA(cudaDeviceSynchronize());
    prs_gemm_plan_close(r->plan);
    prs_gemm_plan_close(r->plain);
    prs_fused_free(r->ctx, r->c);
    bench_lt_close(r->lt);
    BENCH_CUDA(cudaFree(r->a));
    BENCH_CUDA(cudaFree(r->b));
    for (void *p : {r->gathered, r->partial, r->bias, r->residual, r->all_a, r->weight, r->normed, (void *)r->scratch,
                    (void *)r->scale_a, (void *)r->scale_b, (void *)r->all_scales})
        BENCH_CUDA(cudaFree(p));
    r->lt = NULL;
    r->plain = NULL, r->scratch = r->all_scales = NULL;
    r->gathered = r->partial = r->bias = r->residual = r->all_a = r->weight = r->normed = NULL;
}

static bool run_shape(struct run *r)
{
    struct prs_fused_error error;
    struct prs_gemm_tuning tuning = r->options->tuning;
    struct prs_gemm_operands operands;
    bool good;
    open_run(r);
    operands = operands_of(r);
    if (r->options->autotune)
        BENCH_CALL(prs_gemm_autotune(r->ctx, &r->problem.shape, &operands, 10, r->stream, &tuning));
    BENCH_CALL(prs_gemm_plan_open(r->ctx, &r->problem.shape, &tuning, &r->plan));
    if (r->normed) {
        struct prs_gemm_shape plain = r->problem.shape;
        plain.norm = PRS_NORM_NONE;
        BENCH_CALL(prs_gemm_plan_open(r->ctx, &plain, &tuning, &r->plain));
    }
    if (r->options->kill_after != 0)
        bench_lose_rank(r->rank, r->options, r->ctx, launch_own, r, r->stream);
    measure(r);
    if (prs_fused_poll_error(r->ctx, &error) != 0)
        fprintf(stderr, "perseus-fused-bench: %s\n", error.text);
    good = report(r);
    if (r->options->soak + r->options->replay != 0)
        good = soak(r) && good;
    close_run(r);
    return good;
}

static int answer_for_all(void *user, const void *mine, void *all, size_t bytes)
{
    for (uint32_t r = 0; r < *(const uint32_t *)user; r++)
        memcpy((uint8_t *)all + r * bytes, mine, bytes);
    return 0;
}

static int run_rank(struct bench_rank *rank, void *user)
{
    static const uint32_t DTYPES[] = {PRS_DTYPE_BF16, PRS_DTYPE_FP16, PRS_DTYPE_E4M3};
    const struct bench_options *o = (const struct bench_options *)user;
    struct prs_fused_config config = bench_config(rank, o);
    struct run r;
    int bad = 0;
    memset(&r, 0, sizeof(r));
    r.options = o;
    r.problem.samples = o->samples;
    r.rank = rank;
    if (o->loopback != 0) {
        config.world = o->loopback;
        config.allgather = answer_for_all;
        config.user = (void *)&o->loopback;
    }
    BENCH_CALL(prs_fused_open(&config, &r.ctx));
    BENCH_CUDA(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
    bench_start_open(&r.start, r.ctx, rank);
    if (o->no_baselines == 0 && !o->one_device && rank->world > 1 && o->kill_after == 0)
        r.nccl = bench_nccl_open(rank);
    for (uint32_t i = 0; i < o->shape_count; i++)
        for (uint32_t op = 0; op < 4; op++)
            for (uint32_t layout = 0; layout < 2; layout++)
                if ((o->kernels >> op & 1) != 0 && (o->layouts >> layout & 1) != 0) {
                    r.problem.shape = o->shapes[i];
                    r.problem.shape.op = (enum prs_gemm_op)op;
                    r.problem.shape.b_transposed = layout, r.problem.shape.dtype = DTYPES[o->dtype];
                    r.problem.shape.scaling = o->dtype == BENCH_DTYPE_E4M3 ? o->scaling : 0;
                    r.problem.shape.fast_accumulation = o->fast, r.problem.shape.norm = o->norm ? PRS_NORM_RMS : 0;
                    r.problem.shape.c_dtype = o->wide ? PRS_DTYPE_FP32 : 0;
                    r.problem.shape.activation = o->activation, r.problem.shape.gated = o->gated;
                    r.problem.bias = o->bias, r.problem.residual = o->residual;
                    r.problem.rank = rank->rank, r.problem.world = config.world, r.problem.nodes = rank->nodes,
                    r.problem.seed_a = r.problem.seed_b = i * 8 + op * 2 + layout + 1;
                    bad += !run_shape(&r);
                }
    for (uint32_t i = 0; i < o->attention.shape_count; i++) {
        struct bench_attention p = {o->attention.shapes[i], rank->rank, config.world, i + 1, o->loopback};
        bad += !bench_attention_run(o, &r.start, r.ctx, &p, r.stream);
    }
    bench_nccl_close(r.nccl);
    return bad;
}

int main(int argc, char **argv)
{
    struct bench_options o;
    bench_options_parse(argc, argv, &o);
    setenv("NCCL_NVLS_ENABLE", "0", 1); /* before any thread starts; NVLink multicast is never used */
    /* Loading a kernel at its first launch would wait for the device, on which a kernel of another rank may be waiting
     * for this rank. */
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    return bench_ranks_run(&o, o.moe.on ? bench_moe_run : run_rank, &o) == 0 ? 0 : 1;
}
