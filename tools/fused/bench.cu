/* SPDX-License-Identifier: Apache-2.0 */
/* perseus-fused-bench: each fused kernel beside cuBLASLt alone, NCCL alone and one after the other, interleaved in one
 * process group; results poisoned before and checked after. One JSON object per line on stdout, a table on stderr. */
#include "tools/fused/bench.h"

#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_SHAPES = 64, MAX_ITERATIONS = 200, METHODS = 4 };
enum method { OWN = 0, COMPUTE = 1, COMMUNICATE = 2, UNFUSED = 3 };

static const double LINK_BYTES_PER_US = 394e3; /* peer copy on the test host */
static const char *const KERNELS[] = {"gemm", "reduce_scatter", "allgather", "allreduce"};

struct options {
    uint32_t world, iterations, warmup, kernels, layouts, soak, replay;
    uint32_t loopback; /* world whose other ranks are all this one: the protocol and the traffic without NVLink, wrong
                          sums */
    bool one_device, baselines, autotune;
    struct prs_fused_tuning tuning;
    struct prs_fused_shape shapes[MAX_SHAPES];
    uint32_t shape_count, timeout_ms;
    const char *commit;
};

/* Everything one rank holds while it measures one shape. */
struct run {
    const struct options *options;
    struct bench_rank *rank;
    struct bench_problem problem;
    struct prs_fused *ctx;
    struct prs_fused_plan *plan;
    struct bench_lt *lt;
    struct bench_nccl *nccl;
    cudaStream_t stream;
    cudaEvent_t from, to;
    void *a, *b, *c;
    void *gathered, *partial; /* for the unfused way */
    uint32_t *meet[PRS_FUSED_MAX_WORLD];
    uint32_t meetings;
    double usec[METHODS];
};

/* ---- all GPUs start together
 * ---------------------------------------------------------------------------------------------- */
struct meet_args {
    uint32_t *flags[PRS_FUSED_MAX_WORLD]; /* [r]: the words of rank r */
    uint32_t rank, world, epoch;
};

static __global__ void meet_kernel(struct meet_args m)
{
    uint32_t p = threadIdx.x;
    if (p >= m.world)
        return;
    __threadfence_system();
    *(volatile uint32_t *)&m.flags[p][m.rank] = m.epoch;
    for (uint64_t spins = 0; (int32_t)(*(volatile uint32_t *)&m.flags[m.rank][p] - m.epoch) < 0; spins++)
        if (spins > 400000000ull) {
            printf("perseus-fused-bench: rank %u waited for rank %u at meeting %u\n", m.rank, p, m.epoch);
            __trap();
        }
}

static void meet_gpus(struct run *r)
{
    struct meet_args m;
    if (!r->rank->threads)
        return;
    memcpy(m.flags, r->meet, sizeof(m.flags));
    m.rank = r->rank->rank, m.world = r->rank->world, m.epoch = ++r->meetings;
    meet_kernel<<<1, 32, 0, r->stream>>>(m);
    BENCH_CUDA(cudaGetLastError());
}

static void exchange_meet(struct run *r)
{
    void *mine, *all[PRS_FUSED_MAX_WORLD];
    if (prs_fused_alloc(r->ctx, PRS_FUSED_MAX_WORLD * sizeof(uint32_t), &mine) != 0)
        exit(1);
    /* Symmetric memory of threads is reachable by its plain pointer; processes let only the library map it, so they
     * skip the GPU-side start line and meet on the host. */
    bench_allgather(r->rank, &mine, all, sizeof(mine));
    for (uint32_t p = 0; p < r->rank->world; p++)
        r->meet[p] = (uint32_t *)all[p];
}

/* ---- the four ways
 * ---------------------------------------------------------------------------------------------------------- */
static void check(int status, const char *what)
{
    if (status != 0) {
        fprintf(stderr, "perseus-fused-bench: %s: status %d\n", what, status);
        exit(1);
    }
}

static void run_own(struct run *r)
{
    static int (*const launch[])(struct prs_fused_plan *, const void *, const void *, void *, struct CUstream_st *) = {
        prs_gemm, prs_gemm_reduce_scatter, prs_allgather_gemm, prs_gemm_allreduce};
    check(launch[r->problem.shape.op](r->plan, r->a, r->b, r->c, r->stream), "launch");
}

static size_t share_elements(const struct run *r)
{
    const struct prs_fused_shape *s = &r->problem.shape;
    size_t rows = s->op == PRS_FUSED_ALLREDUCE ? s->m : s->m / r->rank->world;
    return rows * (s->op == PRS_FUSED_ALLGATHER ? s->k : s->n);
}

static void run_compute(struct run *r)
{
    bool gathers = r->problem.shape.op == PRS_FUSED_ALLGATHER, alone = r->problem.shape.op == PRS_FUSED_GEMM;
    bench_lt_run(r->lt, gathers ? r->gathered : r->a, r->b, gathers || alone ? r->c : r->partial, r->stream);
}

static void run_communicate(struct run *r)
{
    bool gathers = r->problem.shape.op == PRS_FUSED_ALLGATHER;
    if (r->nccl != NULL)
        check(bench_nccl_run(r->nccl, r->problem.shape.op, gathers ? r->a : r->partial, gathers ? r->gathered : r->c,
                             share_elements(r), r->stream),
              "NCCL");
}

static void run_method(struct run *r, int method)
{
    bool gathers = r->problem.shape.op == PRS_FUSED_ALLGATHER;
    if (method == OWN)
        run_own(r);
    if (method == COMMUNICATE || (method == UNFUSED && gathers))
        run_communicate(r);
    if (method == COMPUTE || method == UNFUSED)
        run_compute(r);
    if (method == UNFUSED && !gathers)
        run_communicate(r);
}

/* ---- measuring
 * -------------------------------------------------------------------------------------------------------------- */
static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *v, uint32_t count)
{
    qsort(v, count, sizeof(*v), by_value);
    return v[count / 2];
}

static double time_once(struct run *r, int method)
{
    float ms;
    bench_meet(r->rank);
    meet_gpus(r);
    BENCH_CUDA(cudaEventRecord(r->from, r->stream));
    run_method(r, method);
    BENCH_CUDA(cudaEventRecord(r->to, r->stream));
    BENCH_CUDA(cudaEventSynchronize(r->to));
    BENCH_CUDA(cudaEventElapsedTime(&ms, r->from, r->to));
    return bench_max(r->rank, ms * 1e3);
}

static void time_methods(struct run *r)
{
    static __thread double times[METHODS][MAX_ITERATIONS];
    const struct options *o = r->options;
    bool talks = r->problem.shape.op != PRS_FUSED_GEMM && r->nccl != NULL;
    for (uint32_t i = 0; i < o->warmup + o->iterations; i++) {
        for (int method = 0; method < METHODS; method++) {
            if ((method == COMPUTE && !o->baselines) || (method >= COMMUNICATE && !talks))
                continue;
            double t = time_once(r, method);
            if (i >= o->warmup)
                times[method][i - o->warmup] = t;
        }
    }
    for (int method = 0; method < METHODS; method++) {
        bool ran = method == OWN || (method == COMPUTE ? o->baselines : talks);
        r->usec[method] = ran ? median(times[method], o->iterations) : NAN;
    }
}

static void number(char *to, size_t size, double v)
{
    if (isnan(v))
        snprintf(to, size, "null");
    else
        snprintf(to, size, "%.1f", v);
}

static bool report(struct run *r, const struct bench_verdict *v)
{
    const struct prs_fused_shape *s = &r->problem.shape;
    struct prs_fused_plan_info info;
    char text[METHODS][32];
    double beyond = bench_max(r->rank, (double)(v->beyond + v->poisoned)), error = bench_max(r->rank, v->max_rel_error),
           floor, ratio;
    prs_fused_plan_query(r->plan, &info);
    floor = (double)info.sent_bytes / LINK_BYTES_PER_US;
    floor = r->usec[COMPUTE] > floor ? r->usec[COMPUTE] : floor; /* not timed: NaN is never larger */
    for (int i = 0; i < METHODS; i++)
        number(text[i], sizeof(text[i]), r->usec[i]);
    ratio = s->op == PRS_FUSED_GEMM ? r->usec[COMPUTE] / r->usec[OWN] : r->usec[UNFUSED] / r->usec[OWN];
    if (r->rank->rank == 0) {
        char speedup[32], to_floor[32], rate[32];
        number(rate, sizeof(rate), 2.0 * s->m * s->n * s->k / r->usec[OWN] * 1e-6);
        snprintf(speedup, sizeof(speedup), isnan(ratio) ? "null" : "%.3f", ratio);
        snprintf(to_floor, sizeof(to_floor), isnan(r->usec[OWN] / floor) || floor == 0 ? "null" : "%.3f",
                 r->usec[OWN] / floor);
        printf(
            "{\"kernel\":\"%s\",\"layout\":\"%s\",\"M\":%u,\"N\":%u,\"K\":%u,\"gpus\":%u,\"nodes\":1,\"usec\":%s,"
            "\"compute_usec\":%s,"
            "\"comm_usec\":%s,\"unfused_usec\":%s,\"ratio_to_floor\":%s,\"speedup\":%s,\"tflops\":%s,"
            "\"sm_split\":{\"path\":%u,\"clusters\":%u,\"band\":%u,\"lag\":%u,\"push_ctas\":%u,\"copy_engine\":%u,"
            "\"segments\":%u,\"paced\":%u,\"spread\":%u},"
            "\"predicted_usec\":%.1f,\"max_rel_err\":%.2e,\"beyond_bound\":%.0f,\"sampled\":%llu,\"commit\":\"%s\"}\n",
            KERNELS[s->op], s->b_is_n_k ? "nk" : "kn", s->m, s->n, s->k, r->rank->world, text[OWN], text[COMPUTE],
            text[COMMUNICATE], text[UNFUSED], to_floor, speedup, rate, info.tuning.path, info.tuning.clusters,
            info.tuning.band, info.tuning.lag, info.tuning.push_ctas, info.tuning.copy_engine, info.tuning.segments,
            info.tuning.paced, info.tuning.spread, info.predicted_us, error, beyond, (unsigned long long)v->sampled,
            r->options->commit);
        fflush(stdout);
    }
    return beyond == 0;
}

static void launch_on(void *user, const void *a)
{
    struct run *r = (struct run *)user;
    void *own = r->a;
    r->a = (void *)(uintptr_t)a;
    run_own(r);
    r->a = own;
}

/* Gives bench_soak its sets: inputs by seed, results by one checked launch each. Returns elements beyond the bound. */
static uint64_t prepare_soak(struct run *r, struct bench_soak *s, size_t a_bytes)
{
    uint64_t bad = 0;
    BENCH_CUDA(cudaMalloc((void **)&s->differences, sizeof(*s->differences)));
    BENCH_CUDA(cudaMemsetAsync(s->differences, 0, sizeof(*s->differences), r->stream));
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
    const struct options *o = r->options;
    const struct prs_fused_shape *shape = &r->problem.shape;
    struct bench_soak s;
    double bad, differences;
    memset(&s, 0, sizeof(s));
    s.c = r->c, s.stream = r->stream, s.launch = launch_on, s.run = r;
    s.c_bytes = bench_rows_c(&r->problem) * (size_t)shape->n * 2;
    bad = bench_max(r->rank, (double)prepare_soak(r, &s, bench_rows_a(&r->problem) * (size_t)shape->k * 2));
    if (o->soak != 0)
        bench_soak_run(&s, o->soak, r->rank->rank + 1);
    bench_meet(r->rank);
    differences = bench_max(r->rank, (double)bench_soak_replay(&s, o->replay));
    if (r->rank->rank == 0)
        printf("{\"kernel\":\"%s\",\"soak\":true,\"M\":%u,\"N\":%u,\"K\":%u,\"gpus\":%u,\"launches\":%u,\"graph_"
               "replays\":%u,"
               "\"copy_engine\":%u,\"beyond_bound\":%.0f,\"differing_vectors\":%.0f,\"commit\":\"%s\"}\n",
               KERNELS[shape->op], shape->m, shape->n, shape->k, r->problem.world, o->soak, o->replay,
               o->tuning.copy_engine, bad, differences, o->commit);
    BENCH_CUDA(cudaFree(s.differences));
    for (uint32_t set = 0; set < BENCH_SOAK_SETS; set++) {
        BENCH_CUDA(cudaFree(s.a[set]));
        BENCH_CUDA(cudaFree(s.golden[set]));
    }
    return bad == 0 && differences == 0;
}

static void open_run(struct run *r)
{
    const struct options *o = r->options;
    const struct bench_problem *p = &r->problem;
    size_t a = bench_rows_a(p) * (size_t)p->shape.k * 2, b = (size_t)p->shape.n * p->shape.k * 2,
           c = bench_rows_c(p) * (size_t)p->shape.n * 2;
    BENCH_CUDA(cudaMalloc(&r->a, a));
    BENCH_CUDA(cudaMalloc(&r->b, b));
    check(prs_fused_alloc(r->ctx, c, &r->c), "prs_fused_alloc");
    bench_fill_inputs(p, r->a, r->b, r->stream);
    bench_poison(r->c, c, r->stream);
    if (o->baselines) {
        if (p->shape.op == PRS_FUSED_ALLGATHER) {
            BENCH_CUDA(cudaMalloc(&r->gathered, a * p->world));
            BENCH_CUDA(cudaMemsetAsync(r->gathered, 0x3c, a * p->world, r->stream));
        } else if (p->shape.op != PRS_FUSED_GEMM) {
            BENCH_CUDA(cudaMalloc(&r->partial, (size_t)p->shape.m * p->shape.n * 2));
        }
        r->lt = bench_lt_open(p->shape.m, p->shape.n, p->shape.k, p->shape.b_is_n_k,
                              r->gathered != NULL ? r->gathered : r->a, r->b, r->partial != NULL ? r->partial : r->c,
                              r->stream);
    }
    BENCH_CUDA(cudaStreamSynchronize(r->stream));
}

static void close_run(struct run *r)
{
    BENCH_CUDA(cudaDeviceSynchronize());
    prs_fused_plan_close(r->plan);
    prs_fused_free(r->ctx, r->c);
    bench_lt_close(r->lt);
    BENCH_CUDA(cudaFree(r->a));
    BENCH_CUDA(cudaFree(r->b));
    BENCH_CUDA(cudaFree(r->gathered));
    BENCH_CUDA(cudaFree(r->partial));
    r->lt = NULL;
    r->gathered = r->partial = NULL;
}

static bool run_shape(struct run *r)
{
    struct bench_verdict v;
    struct prs_fused_error error;
    struct prs_fused_tuning tuning = r->options->tuning;
    size_t bytes = bench_rows_c(&r->problem) * (size_t)r->problem.shape.n * 2;
    bool good;
    for (int i = 0; i < METHODS; i++)
        r->usec[i] = NAN;
    open_run(r);
    if (r->options->autotune)
        check(prs_autotune(r->ctx, &r->problem.shape, r->a, r->b, r->c, 10, r->stream, &tuning), "prs_autotune");
    check(prs_fused_plan_open(r->ctx, &r->problem.shape, &tuning, &r->plan), "prs_fused_plan_open");
    if (r->options->iterations > 0)
        time_methods(r);
    bench_poison(r->c, bytes, r->stream);
    BENCH_CUDA(cudaStreamSynchronize(r->stream));
    bench_meet(r->rank); /* all-reduce: nobody may store into a C that is still being poisoned */
    run_own(r);
    BENCH_CUDA(cudaStreamSynchronize(r->stream));
    if (prs_fused_poll_error(r->ctx, &error) != 0)
        fprintf(stderr, "perseus-fused-bench: %s\n", error.text);
    v = bench_check(&r->problem, r->c, r->stream);
    good = report(r, &v);
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
    const struct options *o = (const struct options *)user;
    struct prs_fused_config config = {rank->rank, rank->world, rank->device, o->timeout_ms, bench_allgather, rank};
    struct run r;
    int bad = 0;
    memset(&r, 0, sizeof(r));
    r.options = o;
    r.rank = rank;
    if (o->loopback != 0) {
        config.world = o->loopback;
        config.allgather = answer_for_all;
        config.user = (void *)&o->loopback;
    }
    check(prs_fused_open(&config, &r.ctx), "prs_fused_open");
    BENCH_CUDA(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
    BENCH_CUDA(cudaEventCreate(&r.from));
    BENCH_CUDA(cudaEventCreate(&r.to));
    exchange_meet(&r);
    if (o->baselines && !o->one_device && rank->world > 1)
        r.nccl = bench_nccl_open(rank);
    for (uint32_t i = 0; i < o->shape_count; i++)
        for (uint32_t op = 0; op < 4; op++)
            for (uint32_t layout = 0; layout < 2; layout++)
                if ((o->kernels >> op & 1) != 0 && (o->layouts >> layout & 1) != 0) {
                    r.problem.shape = o->shapes[i];
                    r.problem.shape.op = (enum prs_fused_op)op;
                    r.problem.shape.b_is_n_k = layout;
                    r.problem.rank = rank->rank, r.problem.world = config.world,
                    r.problem.seed_a = r.problem.seed_b = i * 8 + op * 2 + layout + 1;
                    bad += !run_shape(&r);
                }
    bench_nccl_close(r.nccl);
    return bad;
}

static uint32_t kernel_mask(const char *name)
{
    for (uint32_t i = 0; i < 4; i++)
        if (strcmp(name, KERNELS[i]) == 0)
            return 1u << i;
    return strcmp(name, "all") == 0 ? 15 : 0;
}

static void usage(void)
{
    fprintf(
        stderr,
        "usage: perseus-fused-bench --kernel gemm|reduce_scatter|allgather|allreduce|all --shape MxNxK [--shape ...]\n"
        "  --gpus W        ranks, one thread and GPU each (torchrun and mpirun bring their own)\n"
        "  --layout kn|nk|both   B as [K,N] (default) or [N,K]\n"
        "  --iterations N  timed rounds (default 20; 0: check only)   --soak N  more launches, unevenly late, each "
        "compared\n"
        "  --replay N      replays of a CUDA graph of three launches, each compared\n"
        "  --path fused|unfused --band N --lag N --clusters N --push-ctas N --copy-engine --segments N --paced "
        "--unpaced --spread PERCENT   "
        "tuning; "
        "--autotune\n"
        "  --one-device    all ranks on device 0, to check without several GPUs\n"
        "  --loopback W    one rank plays all: times the protocol without NVLink (results are not sums)\n"
        "  --no-baselines  own kernels only   --timeout-ms N   --commit TEXT\n");
    exit(2);
}

static void parse(int argc, char **argv, struct options *o)
{
    static const struct option names[] = {{"kernel", 1, 0, 'k'},
                                          {"shape", 1, 0, 's'},
                                          {"gpus", 1, 0, 'g'},
                                          {"nodes", 1, 0, 'd'},
                                          {"layout", 1, 0, 'l'},
                                          {"iterations", 1, 0, 'i'},
                                          {"soak", 1, 0, 'S'},
                                          {"band", 1, 0, 'b'},
                                          {"clusters", 1, 0, 'c'},
                                          {"push-ctas", 1, 0, 'p'},
                                          {"one-device", 0, 0, '1'},
                                          {"commit", 1, 0, 'C'},
                                          {"no-baselines", 0, 0, 'n'},
                                          {"timeout-ms", 1, 0, 't'},
                                          {"copy-engine", 0, 0, 'e'},
                                          {"segments", 1, 0, 'm'},
                                          {"autotune", 0, 0, 'A'},
                                          {"loopback", 1, 0, 'L'},
                                          {"lag", 1, 0, 'a'},
                                          {"spread", 1, 0, 'D'},
                                          {"unpaced", 0, 0, 'U'},
                                          {"path", 1, 0, 'q'},
                                          {"paced", 0, 0, 'P'},
                                          {"replay", 1, 0, 'R'},
                                          {0, 0, 0, 0}};
    struct prs_fused_shape *s;
    for (int c; (c = getopt_long(argc, argv, "", names, NULL)) != -1;) {
        switch (c) {
        case 'k':
            o->kernels |= kernel_mask(optarg);
            break;
        case 's':
            s = &o->shapes[o->shape_count < MAX_SHAPES ? o->shape_count++ : 0];
            if (sscanf(optarg, "%ux%ux%u", &s->m, &s->n, &s->k) != 3)
                usage();
            break;
        case 'g':
            o->world = (uint32_t)atoi(optarg);
            break;
        case 'd':
            break;
        case 'l':
            o->layouts = strcmp(optarg, "both") == 0 ? 3 : strcmp(optarg, "nk") == 0 ? 2 : 1;
            break;
        case 'i':
            o->iterations = (uint32_t)atoi(optarg);
            break;
        case 'S':
            o->soak = (uint32_t)atoi(optarg);
            break;
        case 'b':
            o->tuning.band = (uint32_t)atoi(optarg);
            break;
        case 'c':
            o->tuning.clusters = (uint32_t)atoi(optarg);
            break;
        case 'p':
            o->tuning.push_ctas = (uint32_t)atoi(optarg);
            break;
        case 'q':
            o->tuning.path = strcmp(optarg, "unfused") == 0 ? PRS_PATH_UNFUSED : PRS_PATH_FUSED;
            break;
        case 'e':
            o->tuning.copy_engine = 1;
            break;
        case 'm':
            o->tuning.segments = (uint32_t)atoi(optarg);
            break;
        case '1':
            o->one_device = true;
            break;
        case 'C':
            o->commit = optarg;
            break;
        case 'n':
            o->baselines = false;
            break;
        case 't':
            o->timeout_ms = (uint32_t)atoi(optarg);
            break;
        case 'R':
            o->replay = (uint32_t)atoi(optarg);
            break;
        case 'U':
            o->tuning.paced = PRS_UNPACED;
            break;
        case 'D':
            o->tuning.spread = (uint32_t)atoi(optarg);
            break;
        case 'P':
            o->tuning.paced = PRS_PACED;
            break;
        case 'a':
            o->tuning.lag = (uint32_t)atoi(optarg);
            break;
        case 'L':
            o->loopback = (uint32_t)atoi(optarg);
            break;
        case 'A':
            o->autotune = true;
            break;
        default:
            usage();
        }
    }
    if (o->kernels == 0 || o->shape_count == 0 || o->world < 1 || o->world > PRS_FUSED_MAX_WORLD ||
        o->iterations > MAX_ITERATIONS)
        usage();
}

int main(int argc, char **argv)
{
    struct options o;
    memset(&o, 0, sizeof(o));
    o.world = 1, o.iterations = 20, o.warmup = 3, o.layouts = 1, o.baselines = true, o.commit = "unknown",
    o.timeout_ms = 5000;
    parse(argc, argv, &o);
    setenv("NCCL_NVLS_ENABLE", "0", 1); /* before any thread: NVLink multicast is never used */
    return bench_ranks_run(o.world, o.one_device, run_rank, &o) == 0 ? 0 : 1;
}
