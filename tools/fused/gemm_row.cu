/* SPDX-License-Identifier: Apache-2.0 */
/* One row per GEMM kernel and shape: JSON for programs, a line of a table for people. */
#include "tools/fused/bench.h"

#include <math.h>
#include <stdio.h>

#include "tools/common/json.h"

/* A number as text; "null" when it was not measured. */
struct text {
    char t[32];
};

static struct text number(double v, int digits)
{
    struct text x = {"null"};
    if (isfinite(v))
        snprintf(x.t, sizeof(x.t), "%.*f", digits, v);
    return x;
}

static void print_json(const struct bench_row *r)
{
    const struct prs_gemm_shape *s = &r->shape;
    const struct prs_gemm_tuning *t = &r->info.tuning;
    json_print(stdout, "{kernel:%s,dtype:%s,c_dtype:%s,layout:%s,M:%u,N:%u,K:%u,gpus:%u,nodes:%u,rails:%u,",
               BENCH_KERNELS[s->op], BENCH_DTYPES[s->dtype],
               BENCH_DTYPES[s->c_dtype                   ? s->c_dtype
                            : s->dtype == PRS_DTYPE_E4M3 ? PRS_DTYPE_BF16
                                                         : s->dtype],
               s->b_transposed ? "nk" : "kn", s->m, s->n, s->k, r->gpus, r->traffic.nodes, r->traffic.rails);
    if (s->scaling)
        json_print(stdout, "scaling:%s,fast_accumulation:%u,", BENCH_SCALINGS[s->scaling], s->fast_accumulation);
    if (s->norm)
        json_print(stdout, "norm:rms,norm_apart_usec:%.1f,", r->apart_us);
    json_print(stdout, "activation:%s,gated:%u,bias:%u,residual:%u,gathered:%u,", BENCH_ACTIVATIONS[s->activation],
               s->gated, r->bias, r->residual, r->keeps);
    json_print(stdout, "puts:%llu,signals:%llu,fences:%llu,far_bytes:%llu,", (unsigned long long)r->traffic.puts,
               (unsigned long long)r->traffic.signals, (unsigned long long)r->traffic.fences,
               (unsigned long long)r->traffic.bytes);
    json_print(stdout, "usec:%.1f,compute_usec:%.1f,comm_usec:%.1f,unfused_usec:%.1f,", r->own_us, r->compute_us,
               r->comm_us, r->unfused_us);
    json_print(stdout, "ratio_to_floor:%.3f,speedup:%.3f,tflops:%.1f,", r->own_us / r->floor_us, r->speedup, r->tflops);
    json_print(stdout,
               "sm_split:{path:%s,clusters:%u,band:%u,copy_engine:%u,segments:%u,paced:%u,"
               "spread:%u,group:%u,columns:%u,reason:%s},",
               t->path == PRS_GEMM_PATH_FUSED ? "fused" : "unfused", t->clusters, t->band, t->mover, t->segments,
               t->paced, t->spread, t->tiles_per_signal, t->columns, r->info.reason);
    json_print(stdout, "predicted_usec:%.1f,max_rel_err:%.2e,beyond_bound:%.0f,sampled:%llu,checked_launches:%llu,",
               r->info.predicted_us, r->max_rel_error, r->beyond, (unsigned long long)r->sampled,
               (unsigned long long)r->checked);
    json_print(stdout, "differing_vectors:%.0f,commit:%s}\n", r->differing, r->commit);
}

static void print_line(const struct bench_row *r)
{
    static bool headed; /* only rank 0 prints */
    const struct prs_gemm_shape *s = &r->shape;
    const struct prs_gemm_tuning *t = &r->info.tuning;
    char shape[48];
    if (!headed)
        printf("%-14s %-3s %-20s %10s %10s %10s %10s %8s  %s\n", "kernel", "B", "shape", "us", "GEMM", "NCCL", "both",
               "speedup", "choices; wrong elements of those sampled; launches checked");
    headed = true;
    snprintf(shape, sizeof(shape), "%ux%ux%u", s->m, s->n, s->k);
    printf("%-14s %-3s %-20s %10s %10s %10s %10s %8s  %s band %u pace %u spread %u%s; %.0f of %llu; %llu\n",
           BENCH_KERNELS[s->op], s->b_transposed ? "nk" : "kn", shape, number(r->own_us, 1).t,
           number(r->compute_us, 1).t, number(r->comm_us, 1).t, number(r->unfused_us, 1).t, number(r->speedup, 2).t,
           t->path == PRS_GEMM_PATH_FUSED ? "fused" : "unfused", t->band, t->paced, t->spread,
           t->mover == PRS_MOVED_BY_COPY_ENGINES ? " copy engine" : "", r->beyond, (unsigned long long)r->sampled,
           (unsigned long long)r->checked);
    if (s->norm)
        printf("%-14s     with the norm as a kernel of its own: %s us\n", "", number(r->apart_us, 1).t);
}

void bench_report(const struct bench_row *r, bool json)
{
    if (json)
        print_json(r);
    else
        print_line(r);
    fflush(stdout);
}

void bench_report_soak(const struct bench_problem *p, const struct bench_options *o, double bad, double differences)
{
    const struct prs_gemm_shape *s = &p->shape;
    if (o->json)
        json_print(stdout,
                   "{kernel:%s,soak:true,M:%u,N:%u,K:%u,gpus:%u,launches:%u,graph_replays:%u,copy_engine:%u,"
                   "beyond_bound:%.0f,differing_vectors:%.0f,commit:%s}\n",
                   BENCH_KERNELS[s->op], s->m, s->n, s->k, p->world, o->soak, o->replay, o->tuning.mover, bad,
                   differences, o->commit);
    else
        printf("%-14s soak of %u launches and %u replays: %.0f elements wrong at first, %.0f vectors differing later\n",
               BENCH_KERNELS[s->op], o->soak, o->replay, bad, differences);
    fflush(stdout);
}
