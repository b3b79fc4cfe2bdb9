/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/gemm/unfused/lt.h"

#include <cublasLt.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "fused/core/context.h"
#include "transport/util/error.h"

enum { WORKSPACE_BYTES = 32 << 20 };

struct prs_lt {
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t algo;
    void *workspace;
};

static struct {
    __typeof__(&cublasLtCreate) create;
    __typeof__(&cublasLtDestroy) destroy;
    __typeof__(&cublasLtMatmul) matmul;
    __typeof__(&cublasLtMatmulDescCreate) desc;
    __typeof__(&cublasLtMatmulDescDestroy) desc_destroy;
    __typeof__(&cublasLtMatmulDescSetAttribute) desc_set;
    __typeof__(&cublasLtMatrixLayoutCreate) layout;
    __typeof__(&cublasLtMatrixLayoutDestroy) layout_destroy;
    __typeof__(&cublasLtMatmulPreferenceCreate) preference;
    __typeof__(&cublasLtMatmulPreferenceDestroy) preference_destroy;
    __typeof__(&cublasLtMatmulPreferenceSetAttribute) preference_set;
    __typeof__(&cublasLtMatmulAlgoGetHeuristic) heuristic;
    bool tried, complete;
    char why[256]; /* why it could not be loaded; dlerror() returns each failure only once */
} api;
static pthread_mutex_t api_lock =
    PTHREAD_MUTEX_INITIALIZER; /* protects api while it is filled; it is read only after that */

static bool find(void *library, const char *name, void **fn)
{
    *fn = dlsym(library, name);
    return *fn != NULL;
}

static void keep_reason_locked(void)
{
    const char *why = dlerror();
    (void)snprintf(api.why, sizeof(api.why), "%s", why ? why : "no reason was given");
}

static void load_api_locked(void)
{
    void *so = dlopen("libcublasLt.so.13", RTLD_NOW | RTLD_LOCAL);
    api.tried = true;
    if (!so)
        so = dlopen("libcublasLt.so", RTLD_NOW | RTLD_LOCAL);
    if (!so) {
        keep_reason_locked();
        return;
    }
    api.complete =
        find(so, "cublasLtCreate", (void **)&api.create) && find(so, "cublasLtDestroy", (void **)&api.destroy) &&
        find(so, "cublasLtMatmul", (void **)&api.matmul) && find(so, "cublasLtMatmulDescCreate", (void **)&api.desc) &&
        find(so, "cublasLtMatmulDescDestroy", (void **)&api.desc_destroy) &&
        find(so, "cublasLtMatmulDescSetAttribute", (void **)&api.desc_set) &&
        find(so, "cublasLtMatrixLayoutCreate", (void **)&api.layout) &&
        find(so, "cublasLtMatrixLayoutDestroy", (void **)&api.layout_destroy) &&
        find(so, "cublasLtMatmulPreferenceCreate", (void **)&api.preference) &&
        find(so, "cublasLtMatmulPreferenceDestroy", (void **)&api.preference_destroy) &&
        find(so, "cublasLtMatmulPreferenceSetAttribute", (void **)&api.preference_set) &&
        find(so, "cublasLtMatmulAlgoGetHeuristic", (void **)&api.heuristic);
    if (!api.complete)
        keep_reason_locked();
}

static int load_api(void)
{
    bool complete;
    pthread_mutex_lock(&api_lock);
    if (!api.tried)
        load_api_locked();
    complete = api.complete;
    pthread_mutex_unlock(&api_lock);
    return complete ? 0
                    : prs_fail(-ENOTSUP, "fused: this shape needs cuBLASLt, and libcublasLt.so.13 cannot be loaded: %s",
                               api.why);
}

/* cuBLASLt has column-major matrices, so it computes the transpose of C as transpose(B) transpose(A). */
static int describe(struct prs_lt *lt, const struct prs_fused_shape *s)
{
    cublasOperation_t transpose = CUBLAS_OP_T;
    uint64_t b_rows = s->b_is_n_k ? s->k : s->n, b_columns = s->b_is_n_k ? s->n : s->k;
    if (api.create(&lt->handle) != CUBLAS_STATUS_SUCCESS ||
        api.desc(&lt->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F) != CUBLAS_STATUS_SUCCESS)
        return -1;
    if (s->b_is_n_k &&
        api.desc_set(lt->desc, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof(transpose)) != CUBLAS_STATUS_SUCCESS)
        return -1;
    if (api.layout(&lt->b, CUDA_R_16BF, b_rows, b_columns, (int64_t)b_rows) != CUBLAS_STATUS_SUCCESS ||
        api.layout(&lt->a, CUDA_R_16BF, s->k, s->m, s->k) != CUBLAS_STATUS_SUCCESS ||
        api.layout(&lt->c, CUDA_R_16BF, s->n, s->m, s->n) != CUBLAS_STATUS_SUCCESS)
        return -1;
    return 0;
}

/* Limits for every algorithm that may be chosen. By default cuBLASLt assumes that pointers are aligned to 256 bytes,
 * and may add parts of K as bf16, which rounds more than once (seen with odd numbers of rows). */
static int limit(cublasLtMatmulPreference_t preference)
{
    static const cublasLtMatmulPreferenceAttributes_t operands[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    size_t workspace = WORKSPACE_BYTES;
    uint32_t alignment = 16; /* prs_fused_launch() requires it */
    uint32_t parts = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    if (api.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof(workspace)) !=
            CUBLAS_STATUS_SUCCESS ||
        api.preference_set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &parts, sizeof(parts)) !=
            CUBLAS_STATUS_SUCCESS)
        return -1;
    for (size_t i = 0; i < sizeof(operands) / sizeof(*operands); i++)
        if (api.preference_set(preference, operands[i], &alignment, sizeof(alignment)) != CUBLAS_STATUS_SUCCESS)
            return -1;
    return 0;
}

static int choose(struct prs_lt *lt)
{
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t found;
    int count = 0;
    if (api.preference(&preference) != CUBLAS_STATUS_SUCCESS)
        return -1;
    if (limit(preference) != 0 || api.heuristic(lt->handle, lt->desc, lt->b, lt->a, lt->c, lt->c, preference, 1, &found,
                                                &count) != CUBLAS_STATUS_SUCCESS)
        count = 0;
    (void)api.preference_destroy(preference);
    lt->algo = found.algo;
    return count == 1 ? 0 : -1;
}

int prs_lt_open(const struct prs_fused_shape *shape, struct prs_lt **out)
{
    struct prs_lt *lt;
    int r = load_api();
    if (r)
        return r;
    lt = calloc(1, sizeof(*lt));
    if (!lt)
        return prs_fail(-ENOMEM, "fused: no memory for cuBLASLt");
    r = prs_cuda_check(cudaMalloc(&lt->workspace, WORKSPACE_BYTES), "cudaMalloc of cuBLASLt's workspace");
    if (r == 0 && (describe(lt, shape) != 0 || choose(lt) != 0))
        r = prs_fail(-ENOTSUP, "fused: cuBLASLt has nothing for %u x %u x %u", shape->m, shape->n, shape->k);
    if (r)
        prs_lt_close(lt);
    else
        *out = lt;
    return r;
}

void prs_lt_close(struct prs_lt *lt)
{
    if (!lt)
        return;
    if (lt->a)
        (void)api.layout_destroy(lt->a);
    if (lt->b)
        (void)api.layout_destroy(lt->b);
    if (lt->c)
        (void)api.layout_destroy(lt->c);
    if (lt->desc)
        (void)api.desc_destroy(lt->desc);
    if (lt->handle)
        (void)api.destroy(lt->handle);
    (void)cudaFree(lt->workspace);
    free(lt);
}

int prs_lt_run(struct prs_lt *lt, const void *a, const void *b, const void *add, void *c, cudaStream_t stream)
{
    const float one = 1, beta = add ? 1 : 0;
    cublasStatus_t e = api.matmul(lt->handle, lt->desc, &one, b, lt->b, a, lt->a, &beta, add ? add : c, lt->c, c, lt->c,
                                  &lt->algo, lt->workspace, WORKSPACE_BYTES, stream);
    return e == CUBLAS_STATUS_SUCCESS ? 0 : prs_fail(-EIO, "fused: cublasLtMatmul failed with status %d", (int)e);
}
