/* SPDX-License-Identifier: Apache-2.0 */
/* The baselines of the fused kernels: the fastest of many cuBLASLt algorithms, and NCCL, both opened at run time. */
#include "tools/fused/bench.h"

#include <cublasLt.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CANDIDATES = 24, LT_WORKSPACE = 64 << 20, TRIES = 3 };
/* Numbers of cuBLASLt 12.9, which older headers lack: attributes of a product, and scales of rows. */
enum { SCALE_MODE_A = 31, SCALE_MODE_B = 32, SCALE_ROWS = 3 };

/* ---- cuBLASLt ---- */
struct lt_library {
    decltype(&cublasLtCreate) create;
    decltype(&cublasLtMatmul) matmul;
    decltype(&cublasLtMatmulDescCreate) desc;
    decltype(&cublasLtMatmulDescSetAttribute) desc_set;
    decltype(&cublasLtMatrixLayoutCreate) layout;
    decltype(&cublasLtMatmulPreferenceCreate) preference;
    decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
    decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
};

struct bench_lt {
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t algo;
    void *workspace;
};

static const struct lt_library *lt_library(void)
{
    static struct lt_library lib;
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    void *so;
    pthread_mutex_lock(&lock);
    if (!lib.create) {
        so = dlopen("libcublasLt.so.13", RTLD_NOW);
        if (!so)
            so = dlopen("libcublasLt.so", RTLD_NOW);
        if (!so) {
            fprintf(stderr, "perseus-fused-bench: %s\n", dlerror());
            bench_quit();
        }
        lib.matmul = (decltype(lib.matmul))dlsym(so, "cublasLtMatmul");
        lib.desc = (decltype(lib.desc))dlsym(so, "cublasLtMatmulDescCreate");
        lib.desc_set = (decltype(lib.desc_set))dlsym(so, "cublasLtMatmulDescSetAttribute");
        lib.layout = (decltype(lib.layout))dlsym(so, "cublasLtMatrixLayoutCreate");
        lib.preference = (decltype(lib.preference))dlsym(so, "cublasLtMatmulPreferenceCreate");
        lib.preference_set = (decltype(lib.preference_set))dlsym(so, "cublasLtMatmulPreferenceSetAttribute");
        lib.heuristic = (decltype(lib.heuristic))dlsym(so, "cublasLtMatmulAlgoGetHeuristic");
        lib.create = (decltype(lib.create))dlsym(so, "cublasLtCreate");
    }
    pthread_mutex_unlock(&lock);
    return &lib;
}

#define LT(call)                                                                                                       \
    do {                                                                                                               \
        int s_ = (int)(call);                                                                                          \
        if (s_ != 0) {                                                                                                 \
            fprintf(stderr, "perseus-fused-bench: %s:%d: cuBLASLt status %d\n", __FILE__, __LINE__, s_);               \
            bench_quit();                                                                                              \
        }                                                                                                              \
    } while (0)

/* cuBLASLt's matrices are column-major, so it computes the transpose of C as transpose(B) transpose(A). */
static int try_algo(struct bench_lt *lt, const void *a, const void *b, void *c, cudaStream_t stream)
{
    float one = 1, zero = 0;
    return (int)lt_library()->matmul(lt->handle, lt->desc, &one, b, lt->b, a, lt->a, &zero, c, lt->c, c, lt->c,
                                     &lt->algo, lt->workspace, LT_WORKSPACE, stream);
}

void bench_lt_run(struct bench_lt *lt, const void *a, const void *b, void *c, cudaStream_t stream)
{
    LT(try_algo(lt, a, b, c, stream));
}

static void choose_algo(struct bench_lt *lt, const cublasLtMatmulHeuristicResult_t *found, int count, const void *a,
                        const void *b, void *c, cudaStream_t stream)
{
    cudaEvent_t from, to;
    cublasLtMatmulAlgo_t best = found[0].algo;
    float least = 1e30f;
    BENCH_CUDA(cudaEventCreate(&from));
    BENCH_CUDA(cudaEventCreate(&to));
    for (int i = 0; i < count; i++) {
        float ms;
        lt->algo = found[i].algo;
        if (try_algo(lt, a, b, c, stream) != 0)
            continue;
        BENCH_CUDA(cudaEventRecord(from, stream));
        for (int t = 0; t < TRIES; t++)
            LT(try_algo(lt, a, b, c, stream));
        BENCH_CUDA(cudaEventRecord(to, stream));
        BENCH_CUDA(cudaEventSynchronize(to));
        BENCH_CUDA(cudaEventElapsedTime(&ms, from, to));
        if (ms < least) {
            least = ms;
            best = found[i].algo;
        }
    }
    lt->algo = best;
    BENCH_CUDA(cudaEventDestroy(from));
    BENCH_CUDA(cudaEventDestroy(to));
}

static cudaDataType type_of(uint32_t dtype)
{
    return dtype == PRS_DTYPE_E4M3 ? CUDA_R_8F_E4M3 : dtype == PRS_DTYPE_FP16 ? CUDA_R_16F : CUDA_R_16BF;
}

/* Its A is our B. */
static void describe_scales(struct bench_lt *lt, const struct prs_gemm_shape *s, const float *a, const float *b)
{
    const struct lt_library *lib = lt_library();
    int32_t rows = SCALE_ROWS;
    int8_t fast = s->fast_accumulation != 0;
    LT(lib->desc_set(lt->desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &b, sizeof(b)));
    LT(lib->desc_set(lt->desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &a, sizeof(a)));
    LT(lib->desc_set(lt->desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof(fast)));
    if (s->scaling != PRS_SCALING_ROWS)
        return;
    LT(lib->desc_set(lt->desc, (cublasLtMatmulDescAttributes_t)SCALE_MODE_A, &rows, sizeof(rows)));
    LT(lib->desc_set(lt->desc, (cublasLtMatmulDescAttributes_t)SCALE_MODE_B, &rows, sizeof(rows)));
}

struct bench_lt *bench_lt_open(const struct prs_gemm_shape *s, bool wide, const void *a, const void *b, void *c,
                               const float *scale_a, const float *scale_b, cudaStream_t stream)
{
    const struct lt_library *lib = lt_library();
    struct bench_lt *lt = (struct bench_lt *)calloc(1, sizeof(*lt));
    cublasLtMatmulHeuristicResult_t found[CANDIDATES];
    cublasLtMatmulPreference_t preference;
    cublasOperation_t transpose = CUBLAS_OP_T;
    cudaDataType_t type = type_of(s->dtype), result = s->dtype == PRS_DTYPE_E4M3 ? CUDA_R_16BF : type;
    size_t workspace = LT_WORKSPACE;
    int count = 0;
    LT(lib->create(&lt->handle));
    LT(lib->desc(&lt->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    if (s->b_transposed)
        LT(lib->desc_set(lt->desc, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof(transpose)));
    if (s->scaling)
        describe_scales(lt, s, scale_a, scale_b);
    LT(lib->layout(&lt->b, type, s->b_transposed ? s->k : s->n, s->b_transposed ? s->n : s->k,
                   s->b_transposed ? s->k : s->n));
    LT(lib->layout(&lt->a, type, s->k, s->m, s->k));
    LT(lib->layout(&lt->c, wide ? CUDA_R_32F : result, s->n, s->m, s->n));
    LT(lib->preference(&preference));
    LT(lib->preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof(workspace)));
    LT(lib->heuristic(lt->handle, lt->desc, lt->b, lt->a, lt->c, lt->c, preference, CANDIDATES, found, &count));
    BENCH_CUDA(cudaMalloc(&lt->workspace, LT_WORKSPACE));
    choose_algo(lt, found, count, a, b, c, stream);
    return lt;
}

void bench_lt_close(struct bench_lt *lt)
{
    if (lt)
        BENCH_CUDA(cudaFree(lt->workspace));
    free(lt);
}

/* ---- NCCL: the calls that are needed, declared from its documentation ---- */
struct nccl_id {
    char bytes[128];
};
enum { NCCL_UINT8 = 1, NCCL_FLOAT16 = 6, NCCL_FLOAT32 = 7, NCCL_BFLOAT16 = 9, NCCL_SUM = 0 };

struct bench_nccl {
    void *comm;
    uint32_t world;
    int (*all_gather)(const void *, void *, size_t, int, void *, cudaStream_t);
    int (*reduce_scatter)(const void *, void *, size_t, int, int, void *, cudaStream_t);
    int (*all_reduce)(const void *, void *, size_t, int, int, void *, cudaStream_t);
    int (*destroy)(void *);
};

struct bench_nccl *bench_nccl_open(struct bench_rank *rank)
{
    void *so = dlopen("libnccl.so.2", RTLD_NOW);
    int (*get_id)(struct nccl_id *) = !so ? NULL : (int (*)(struct nccl_id *))dlsym(so, "ncclGetUniqueId");
    int (*init)(void **, int, struct nccl_id, int);
    struct nccl_id mine, all[PRS_MAX_LOCAL_RANKS];
    struct bench_nccl *n;
    if (!get_id)
        return NULL;
    /* Others on this host may be using NVLink multicast, so it stays off, whatever the environment says. */
    setenv("NCCL_NVLS_ENABLE", "0", 1);
    n = (struct bench_nccl *)calloc(1, sizeof(*n));
    init = (int (*)(void **, int, struct nccl_id, int))dlsym(so, "ncclCommInitRank");
    n->all_gather = (decltype(n->all_gather))dlsym(so, "ncclAllGather");
    n->reduce_scatter = (decltype(n->reduce_scatter))dlsym(so, "ncclReduceScatter");
    n->all_reduce = (decltype(n->all_reduce))dlsym(so, "ncclAllReduce");
    n->destroy = (decltype(n->destroy))dlsym(so, "ncclCommDestroy");
    n->world = rank->world;
    memset(&mine, 0, sizeof(mine));
    if (rank->rank == 0)
        get_id(&mine);
    bench_allgather(rank, &mine, all, sizeof(mine));
    if (init(&n->comm, (int)rank->world, all[0], (int)rank->rank) != 0) {
        fprintf(stderr, "perseus-fused-bench: rank %u: ncclCommInitRank failed\n", rank->rank);
        bench_quit();
    }
    return n;
}

/* elements: how many one rank contributes (all-gather) or receives (reduce-scatter). */
int bench_nccl_run(struct bench_nccl *n, const struct prs_gemm_shape *s, const void *send, void *receive,
                   size_t elements, cudaStream_t stream)
{
    int type = s->dtype == PRS_DTYPE_FP16 ? NCCL_FLOAT16 : NCCL_BFLOAT16;
    if (s->op == PRS_GEMM_ALLGATHER)
        return n->all_gather(send, receive, elements, s->dtype == PRS_DTYPE_E4M3 ? NCCL_UINT8 : type, n->comm, stream);
    if (s->op == PRS_GEMM_REDUCE_SCATTER)
        return n->reduce_scatter(send, receive, elements, type, NCCL_SUM, n->comm, stream);
    return n->all_reduce(send, receive, elements, type, NCCL_SUM, n->comm, stream);
}

int bench_nccl_gather_scales(struct bench_nccl *n, const float *send, float *receive, size_t count, cudaStream_t stream)
{
    return n->all_gather(send, receive, count, NCCL_FLOAT32, n->comm, stream);
}

void bench_nccl_close(struct bench_nccl *n)
{
    if (n)
        n->destroy(n->comm);
    free(n);
}
