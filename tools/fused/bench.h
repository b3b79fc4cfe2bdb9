/* SPDX-License-Identifier: Apache-2.0 */
/* Types and functions that the parts of perseus-fused-bench use together. */
#ifndef TOOLS_FUSED_BENCH_H
#define TOOLS_FUSED_BENCH_H

#include <cuda_runtime.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

#include <perseus/attention.h>
#include <perseus/gemm.h>
#include <perseus/moe.h>

/* ---- command line (options.cu) ---- */
enum { BENCH_MAX_SHAPES = 64, BENCH_MAX_ITERATIONS = 200 };

enum { BENCH_MOE_PRESETS = 3, BENCH_MOE_LIST = 8 };

struct bench_moe_shape {
    const char *name;
    uint32_t hidden, columns, experts, top_k;
};

struct bench_moe_options {
    uint32_t on, ragged; /* ragged: ranks have different numbers of tokens */
    struct bench_moe_shape shapes[BENCH_MOE_LIST];
    uint32_t tokens[BENCH_MOE_LIST];
    double zipf[BENCH_MOE_LIST];
    uint32_t shape_count, token_count, zipf_count;
    struct prs_moe_tuning tuning;
};

struct bench_attention_options {
    uint32_t on, causal, heads_first, backward;
    struct prs_attention_shape shapes[BENCH_MAX_SHAPES];
    uint32_t shape_count;
    struct prs_attention_tuning tuning;
};

enum { BENCH_DTYPE_E4M3 = 2 };

struct bench_options {
    uint32_t world, nodes, iterations, kernels, layouts, soak, replay, timeout_ms;
    uint32_t samples;  /* elements that a check computes again; attention checks a fixed number of rows */
    uint32_t loopback; /* a single rank acts as this many: the same protocol and traffic without NVLink */
    uint32_t one_device, no_baselines, autotune, json;
    uint32_t corrupt;    /* change an element of this timed launch's result before the check; 0: never */
    uint32_t kill_after; /* ms until the last rank's process dies, which the others must report; 0: it does not die */
    struct prs_gemm_tuning tuning;
    struct prs_gemm_shape shapes[BENCH_MAX_SHAPES];
    uint32_t shape_count;
    /* for every product except all-gathers: its rows are normalised */
    uint32_t norm;
    uint32_t activation, gated, bias, residual, wide; /* for every product; wide: C is fp32 */
    uint32_t dtype, scaling, fast; /* dtype: 0 bf16, 1 fp16, BENCH_DTYPE_E4M3; scaling: enum prs_scaling, for e4m3 */
    uint32_t keep_gathered;        /* the all-gather also keeps the A of all ranks */
    struct bench_moe_options moe;
    struct bench_attention_options attention;
    const char *commit;
};

extern const char *const BENCH_KERNELS[4];     /* by enum prs_gemm_op */
extern const char *const BENCH_ACTIVATIONS[6]; /* by enum prs_activation, then NULL */
extern const char *const BENCH_DTYPES[6];      /* names by enum prs_dtype, then NULL */
extern const char *const BENCH_SCALINGS[5];    /* names by enum prs_scaling, then NULL */

/* Wrong options end the program. */
void bench_options_parse(int argc, char **argv, struct bench_options *o);

/* ---- ranks (ranks.cu): threads of this process, or processes started by torchrun or mpirun ---- */
struct bench_meeting;

struct bench_rank {
    uint32_t rank, world;
    uint32_t node, nodes; /* emulated: the ranks of this host are split */
    int device;
    bool threads; /* ranks share this process */
    struct bench_meeting *meeting;
};

typedef int bench_rank_fn(struct bench_rank *rank, void *user);

/* Run fn for every rank; return 0 when all returned 0. Ranks are threads; with several nodes, or when one is to be
 * killed, they are processes. The nodes are passed to NCCL and the software NIC in their own variables. */
int bench_ranks_run(const struct bench_options *o, bench_rank_fn *fn, void *user);
int bench_allgather(void *rank, const void *mine, void *all, size_t bytes);
struct prs_fused_config bench_config(struct bench_rank *rank, const struct bench_options *o);
double bench_max(struct bench_rank *rank, double mine);
void bench_meet(struct bench_rank *rank);

double bench_median(double *v, uint32_t count);

/* ---- the start line (start.cu): a barrier of all ranks and their GPUs ---- */
struct bench_start {
    struct bench_rank *rank;
    uint32_t *flags[PRS_MAX_LOCAL_RANKS];
    uint32_t meetings;
};

void bench_start_open(struct bench_start *s, struct prs_fused *ctx, struct bench_rank *rank);
void bench_start_cross(struct bench_start *s, cudaStream_t stream);

/* ---- inputs and checks (check.cu) ---- */
struct bench_problem {
    struct prs_gemm_shape shape;
    uint32_t rank, world, nodes, seed_a, seed_b, samples;
    uint32_t bias, residual;
};

/* The inputs that bench_fill() makes. A bias, a residual and scales have the seed of B. */
enum bench_input { BENCH_A = 0, BENCH_B = 1, BENCH_BIAS = 2, BENCH_RESIDUAL = 3, BENCH_SCALE_A = 4, BENCH_SCALE_B = 5 };

struct bench_verdict {
    double max_rel_error; /* worst error over the root mean square of the reference */
    uint64_t beyond;      /* sampled elements beyond the bound */
    uint64_t poisoned;    /* elements never written */
    uint64_t sampled;
};

size_t bench_rows_a(const struct bench_problem *p);
size_t bench_rows_c(const struct bench_problem *p);
size_t bench_columns_c(const struct bench_problem *p);
size_t bench_bytes(const struct bench_problem *p);     /* of an element of A or B */
uint32_t bench_words_c(const struct bench_problem *p); /* number of 16-bit words in an element of C */
/* Does the kernel do more than the product's sum: bias, activation, gate or residual? */
bool bench_finishes(const struct bench_problem *p);
/* dtype: enum prs_dtype. */
void bench_fill(void *to, uint64_t elements, uint32_t dtype, uint32_t seed, uint32_t rank, uint32_t which,
                cudaStream_t stream);
void bench_fill_inputs(const struct bench_problem *p, void *a, void *b, cudaStream_t stream);
void bench_fill_finish(const struct bench_problem *p, void *bias, void *residual, cudaStream_t stream);
/* Allocates the scales of A and B; NULL for products without scales. */
void bench_scales_open(const struct bench_problem *p, float **a, float **b, cudaStream_t stream);
/* Change the signs of elements of 1 or 2 bytes. */
void bench_negate(void *to, uint64_t elements, uint32_t bytes, cudaStream_t stream);
void bench_poison(void *c, size_t bytes, cudaStream_t stream);
uint64_t bench_sampled(const struct bench_problem *p); /* returns an element of C that bench_check() reads */
struct bench_verdict bench_check(const struct bench_problem *p, const void *c, cudaStream_t stream);
/* Return how many elements of a gathered A [m, k] differ from those that their rank sent. */
uint64_t bench_check_gathered(const struct bench_problem *p, const void *gathered, cudaStream_t stream);

/* ---- norms (norm.cu) ---- */
static const float BENCH_NORM_EPS = 1e-5f;
enum { BENCH_NORM_SCRATCH = 1056 * 16 };
/* A separate kernel: adds the residual to c, if there is one, and writes the normed rows. scratch: BENCH_NORM_SCRATCH
 * numbers. */
void bench_norm(const struct bench_problem *p, void *c, const void *residual, const void *weight, void *normed,
                float *scratch, cudaStream_t stream);
/* Return how many elements differ from the norm of C's rows by more than three roundings. */
uint64_t bench_check_norm(const struct bench_problem *p, const void *c, const void *weight, const void *normed,
                          cudaStream_t stream);

/* ---- baselines (baseline.cu) ---- */
struct bench_lt;
/* wide: C is fp32. scale_a, scale_b: scales of all rows of A and columns of B, or of the tensors; else NULL. */
struct bench_lt *bench_lt_open(const struct prs_gemm_shape *shape, bool wide, const void *a, const void *b, void *c,
                               const float *scale_a, const float *scale_b, cudaStream_t stream);
void bench_lt_run(struct bench_lt *lt, const void *a, const void *b, void *c, cudaStream_t stream);
void bench_lt_close(struct bench_lt *lt);

struct bench_nccl;
struct bench_nccl *bench_nccl_open(struct bench_rank *rank); /* NULL: no libnccl, or ranks share a device */
int bench_nccl_run(struct bench_nccl *nccl, const struct prs_gemm_shape *shape, const void *send, void *receive,
                   size_t elements, cudaStream_t stream);
int bench_nccl_gather_scales(struct bench_nccl *nccl, const float *send, float *receive, size_t count,
                             cudaStream_t stream);
void bench_nccl_close(struct bench_nccl *nccl);

/* ---- rows of the GEMM kernels (gemm_row.cu) ---- */
struct bench_row {
    struct prs_gemm_shape shape;
    uint32_t bias, residual, keeps; /* keeps: the gathered A is a second result */
    struct prs_gemm_info info;
    struct prs_fused_traffic traffic; /* traffic of one launch, from the rank that sends most */
    uint32_t gpus;
    double own_us, compute_us, comm_us, unfused_us, floor_us; /* NaN: not measured */
    double apart_us; /* with a norm: our sum with the residual, then the norm as a kernel of its own */
    double speedup, tflops, max_rel_error, beyond;
    double differing; /* part of beyond */
    uint64_t sampled, checked;
    const char *commit;
};

void bench_report(const struct bench_row *row, bool json);

/* bad: elements of the first results beyond the bound; differences: vectors of later results with other bits. */
void bench_report_soak(const struct bench_problem *p, const struct bench_options *o, double bad, double differences);

/* ---- many launches (soak.cu) ---- */
enum { BENCH_SOAK_SETS = 3 };

/* Enqueues three things: poisoning the results of launch `set` (of BENCH_SOAK_SETS), the launch, and counting the
 * differences from its first result. */
typedef void bench_soak_turn(void *user, uint32_t set, unsigned long long *differences);

/* o->soak launches with random delays, then o->replay replays of a graph that launches each set once. Collective.
 * Return how many differences the worst rank found. */
double bench_soak(struct bench_rank *rank, const struct bench_options *o, bench_soak_turn *turn, void *user,
                  cudaStream_t stream);

/* Count the 16-byte vectors that differ; a rest after the last whole vector counts as one vector. */
void bench_count_differences(const void *x, const void *y, size_t bytes, unsigned long long *differences,
                             cudaStream_t stream);

/* ---- MoE (moe.cu, moe_check.cu) ---- */
int bench_moe_run(struct bench_rank *rank, void *options); /* a bench_rank_fn */

/* ---- a rank that dies (lost.cu) ---- */
/* Launch until this rank dies or another's death is reported. Does not return. */
void bench_lose_rank(struct bench_rank *rank, const struct bench_options *o, struct prs_fused *ctx,
                     void (*launch)(void *run), void *run, cudaStream_t stream);

/* Ranks are threads: exit() would run destructors of objects that the others still use. */
[[noreturn]] static inline void bench_quit(void)
{
    (void)fflush(NULL);
    _exit(1);
}

/* A call of the library; when it fails, the program ends with the library's error text. */
#define BENCH_CALL(call)                                                                                               \
    do {                                                                                                               \
        int status_ = (call);                                                                                          \
        if (status_ != 0) {                                                                                            \
            fprintf(stderr, "perseus-fused-bench: %s:%d: status %d: %s\n", __FILE__, __LINE__, status_,                \
                    prs_fused_error_text());                                                                           \
            bench_quit();                                                                                              \
        }                                                                                                              \
    } while (0)

#define BENCH_CUDA(call)                                                                                               \
    do {                                                                                                               \
        cudaError_t e_ = (call);                                                                                       \
        if (e_ != cudaSuccess) {                                                                                       \
            fprintf(stderr, "perseus-fused-bench: %s:%d: %s: %s\n", __FILE__, __LINE__, #call,                         \
                    cudaGetErrorString(e_));                                                                           \
            bench_quit();                                                                                              \
        }                                                                                                              \
    } while (0)

#endif
