/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/gemm/unfused/lt.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fused/core/context.h"
#include "fused/core/element.h"
#include "fused/gemm/unfused/lt_abi.h"
#include "transport/util/error.h"

enum {
    FEWEST_ROWS = 32, /* from here to shape.m an algorithm is chosen for each number of rows that next_rows() gives */
    /* cuBLASLt's tiles have many heights, so the best algorithm may change with a few rows: 1544 rows of depth 7168 and
     * 8192 columns take 278 us with the algorithm of 1568 rows, and 242 with their own
     * (doc/results/products-4xH200.json). */
    STEPS_OF_OCTAVE = 128,
    LEAST_STEP = 8,
    MOST_SIZES = 23 * STEPS_OF_OCTAVE /* to 1024 rows, and from there to 2^32 */
};

/* An algorithm for products of up to `rows` rows. */
struct size {
    uint32_t rows;
    struct lt_algo algo;
};

struct prs_lt {
    void *handle, *desc;
    void *a, *b, *c;               /* layouts */
    struct size sizes[MOST_SIZES]; /* the fewest rows first */
    uint32_t size_count;
    void *workspace;
    bool scaled;
};

static struct {
    struct lt_api fn;
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
    /* The version that belongs to the CUDA runtime comes first. The functions used here are the same in both. */
    static const char *const names[] = {CUDART_VERSION < 13000 ? "libcublasLt.so.12" : "libcublasLt.so.13",
                                        CUDART_VERSION < 13000 ? "libcublasLt.so.13" : "libcublasLt.so.12",
                                        "libcublasLt.so"};
    void *so = NULL;
    api.tried = true;
    for (size_t i = 0; i < sizeof(names) / sizeof(*names) && !so; i++)
        so = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (!so) {
        keep_reason_locked();
        return;
    }
    api.complete = find(so, "cublasLtCreate", (void **)&api.fn.create) &&
                   find(so, "cublasLtDestroy", (void **)&api.fn.destroy) &&
                   find(so, "cublasLtMatmul", (void **)&api.fn.matmul) &&
                   find(so, "cublasLtMatmulDescCreate", (void **)&api.fn.desc) &&
                   find(so, "cublasLtMatmulDescDestroy", (void **)&api.fn.desc_destroy) &&
                   find(so, "cublasLtMatmulDescSetAttribute", (void **)&api.fn.desc_set) &&
                   find(so, "cublasLtMatrixLayoutCreate", (void **)&api.fn.layout) &&
                   find(so, "cublasLtMatrixLayoutDestroy", (void **)&api.fn.layout_destroy) &&
                   find(so, "cublasLtMatrixLayoutSetAttribute", (void **)&api.fn.layout_set) &&
                   find(so, "cublasLtMatmulPreferenceCreate", (void **)&api.fn.preference) &&
                   find(so, "cublasLtMatmulPreferenceDestroy", (void **)&api.fn.preference_destroy) &&
                   find(so, "cublasLtMatmulPreferenceSetAttribute", (void **)&api.fn.preference_set) &&
                   find(so, "cublasLtMatmulAlgoGetHeuristic", (void **)&api.fn.heuristic);
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
                    : prs_fail(-ENOTSUP,
                               "fused: this shape needs cuBLASLt, and neither libcublasLt.so.13 nor "
                               "libcublasLt.so.12 can be loaded: %s",
                               api.why);
}

static int set(struct prs_lt *lt, int attribute, const void *value, size_t bytes)
{
    return api.fn.desc_set(lt->desc, attribute, value, bytes) == LT_SUCCESS ? 0 : -1;
}

static int set_scales(struct prs_lt *lt, const float *a, const float *b)
{
    int r = set(lt, LT_DESC_SCALE_A, &b, sizeof(b));
    return r ? r : set(lt, LT_DESC_SCALE_B, &a, sizeof(a));
}

/* Our B is cuBLASLt's A. The scale of a tensor is the default mode, which every version knows. Algorithms are chosen
 * before there are scales, but the pointers must not be NULL then. */
static int describe_scales(struct prs_lt *lt, const struct prs_gemm_shape *s)
{
    int32_t of_a = s->scaling == PRS_SCALING_ROWS ? LT_SCALE_ROWS : LT_SCALE_VECTORS;
    int32_t of_b = s->scaling == PRS_SCALING_ROWS ? LT_SCALE_ROWS : LT_SCALE_BLOCKS;
    int8_t fast = s->fast_accumulation != 0;
    int r = set(lt, LT_DESC_FAST, &fast, sizeof(fast));
    if (r == 0 && s->scaling != PRS_SCALING_TENSOR)
        r = set(lt, LT_DESC_SCALE_MODE_A, &of_b, sizeof(of_b));
    if (r == 0 && s->scaling != PRS_SCALING_TENSOR)
        r = set(lt, LT_DESC_SCALE_MODE_B, &of_a, sizeof(of_a));
    return r ? r : set_scales(lt, lt->workspace, lt->workspace);
}

/* cuBLASLt has column-major matrices, so it computes the transpose of C as transpose(B) transpose(A). */
static int describe(struct prs_lt *lt, const struct prs_gemm_shape *s, int32_t sms)
{
    int32_t transpose = LT_TRANSPOSED;
    cudaDataType_t type = prs_element_find(s->dtype)->library;
    cudaDataType_t result = prs_element_find(prs_lt_result(s))->library;
    uint64_t b_rows = s->b_transposed ? s->k : s->n, b_columns = s->b_transposed ? s->n : s->k;
    if (api.fn.desc(&lt->desc, LT_COMPUTE_32F, CUDA_R_32F) != LT_SUCCESS)
        return -1;
    if (sms != 0 && set(lt, LT_DESC_SMS, &sms, sizeof(sms)) != 0)
        return -1;
    if (s->b_transposed && set(lt, LT_DESC_TRANSPOSE_A, &transpose, sizeof(transpose)) != 0)
        return -1;
    if (lt->scaled && describe_scales(lt, s) != 0)
        return -1;
    if (api.fn.layout(&lt->b, type, b_rows, b_columns, (int64_t)b_rows) != LT_SUCCESS ||
        api.fn.layout(&lt->a, type, s->k, s->m, s->k) != LT_SUCCESS ||
        api.fn.layout(&lt->c, result, s->n, s->m, s->n) != LT_SUCCESS)
        return -1;
    return 0;
}

/* Limits for every algorithm that may be chosen. By default cuBLASLt assumes that pointers are aligned to 256 bytes. It
 * may also add parts of K in the type of C, which rounds more than once (seen with odd numbers of rows). */
static int limit(void *preference)
{
    static const int operands[] = {LT_PREFER_ALIGNMENT_A, LT_PREFER_ALIGNMENT_B, LT_PREFER_ALIGNMENT_C,
                                   LT_PREFER_ALIGNMENT_D};
    size_t workspace = PRS_LT_WORKSPACE;
    uint32_t alignment = 16; /* prs_gemm_launch() requires it */
    uint32_t parts = LT_ADD_IN_COMPUTE_TYPE;
    if (api.fn.preference_set(preference, LT_PREFER_WORKSPACE, &workspace, sizeof(workspace)) != LT_SUCCESS ||
        api.fn.preference_set(preference, LT_PREFER_ADDING, &parts, sizeof(parts)) != LT_SUCCESS)
        return -1;
    for (size_t i = 0; i < sizeof(operands) / sizeof(*operands); i++)
        if (api.fn.preference_set(preference, operands[i], &alignment, sizeof(alignment)) != LT_SUCCESS)
            return -1;
    return 0;
}

static int set_rows(struct prs_lt *lt, uint32_t rows)
{
    uint64_t columns = rows; /* of the transposes */
    return api.fn.layout_set(lt->a, LT_LAYOUT_COLUMNS, &columns, sizeof(columns)) == LT_SUCCESS &&
                   api.fn.layout_set(lt->c, LT_LAYOUT_COLUMNS, &columns, sizeof(columns)) == LT_SUCCESS
               ? 0
               : -1;
}

static int choose(struct prs_lt *lt, void *preference, uint32_t rows)
{
    struct lt_found found;
    int count = 0;
    if (set_rows(lt, rows) != 0 ||
        api.fn.heuristic(lt->handle, lt->desc, lt->b, lt->a, lt->c, lt->c, preference, 1, &found, &count) != LT_SUCCESS)
        return -1;
    if (count != 1)
        return -1;
    if (lt->size_count != 0 && memcmp(&lt->sizes[lt->size_count - 1].algo, &found.algo, sizeof(found.algo)) == 0)
        lt->size_count--; /* serves these rows, too */
    lt->sizes[lt->size_count++] = (struct size){rows, found.algo};
    return 0;
}

static uint64_t next_rows(uint64_t rows)
{
    uint64_t octave = LEAST_STEP * STEPS_OF_OCTAVE;
    while (octave * 2 <= rows)
        octave *= 2;
    return rows + octave / STEPS_OF_OCTAVE;
}

static int choose_all(struct prs_lt *lt, uint64_t fewest, uint32_t most)
{
    void *preference;
    int r;
    if (api.fn.preference(&preference) != LT_SUCCESS)
        return -1;
    r = limit(preference);
    for (uint64_t rows = FEWEST_ROWS; rows < most && !r; rows = next_rows(rows))
        if (rows >= fewest)
            r = choose(lt, preference, (uint32_t)rows);
    if (!r)
        r = choose(lt, preference, most);
    (void)api.fn.preference_destroy(preference);
    return r;
}

/* Whether a later size has the same algorithm. */
static bool comes_again(const struct prs_lt *lt, uint32_t i)
{
    for (uint32_t j = i + 1; j < lt->size_count; j++)
        if (memcmp(&lt->sizes[j].algo, &lt->sizes[i].algo, sizeof(lt->sizes[i].algo)) == 0)
            return true;
    return false;
}

/* Captures a product of each algorithm into a graph that never runs: that loads its kernels. */
static int load_kernels(struct prs_lt *lt)
{
    void *at = lt->workspace;
    const struct prs_lt_operands any = {.a = at, .b = at, .c = at, .scale_a = at, .scale_b = at};
    cudaStream_t stream;
    int r = prs_cuda_check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    if (r)
        return r;
    for (uint32_t i = 0; i < lt->size_count && !r; i++) {
        cudaGraph_t graph = NULL;
        cudaGraphExec_t exec;
        if (comes_again(lt, i))
            continue;
        r = prs_cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
        if (r)
            break;
        r = prs_lt_run(lt, lt->sizes[i].rows, &any, stream);
        if (cudaStreamEndCapture(stream, &graph) != cudaSuccess && !r)
            r = prs_fail(-EIO, "fused: a product of cuBLASLt cannot be captured");
        if (!r)
            r = prs_cuda_check(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
        if (!r)
            (void)cudaGraphExecDestroy(exec);
        if (graph)
            (void)cudaGraphDestroy(graph);
    }
    (void)cudaStreamDestroy(stream);
    return r;
}

int prs_lt_open(void **handle, void *workspace, const struct prs_gemm_shape *shape, uint32_t sms, struct prs_lt **out)
{
    struct prs_lt *lt;
    int r = load_api();
    if (r)
        return r;
    lt = calloc(1, sizeof(*lt));
    if (!lt)
        return prs_fail(-ENOMEM, "fused: no memory for cuBLASLt");
    if (!*handle && api.fn.create(handle) != LT_SUCCESS)
        r = prs_fail(-ENOTSUP, "fused: cuBLASLt gives no handle");
    lt->handle = *handle;
    lt->workspace = workspace;
    lt->scaled = shape->scaling != PRS_SCALING_NONE;
    if (r == 0 && (describe(lt, shape, (int32_t)sms) != 0 || choose_all(lt, shape->fewest_m, shape->m) != 0))
        r = prs_fail(-ENOTSUP, "fused: cuBLASLt has nothing for %u x %u x %u", shape->m, shape->n, shape->k);
    if (!r)
        r = load_kernels(lt);
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
        (void)api.fn.layout_destroy(lt->a);
    if (lt->b)
        (void)api.fn.layout_destroy(lt->b);
    if (lt->c)
        (void)api.fn.layout_destroy(lt->c);
    if (lt->desc)
        (void)api.fn.desc_destroy(lt->desc);
    free(lt);
}

void prs_lt_release(void *handle)
{
    (void)api.fn.destroy(handle);
}

int prs_lt_run(struct prs_lt *lt, uint32_t m, const struct prs_lt_operands *x, cudaStream_t stream)
{
    const float one = 1, beta = x->add ? 1 : 0;
    int e;
    uint32_t first = 0, last = lt->size_count - 1;
    while (first < last) {
        uint32_t middle = (first + last) / 2;
        if (lt->sizes[middle].rows < m)
            first = middle + 1;
        else
            last = middle;
    }
    if (set_rows(lt, m) != 0 || (lt->scaled && set_scales(lt, x->scale_a, x->scale_b) != 0))
        return prs_fail(-EIO, "fused: cuBLASLt refused a matrix of %u rows", m);
    e = api.fn.matmul(lt->handle, lt->desc, &one, x->b, lt->b, x->a, lt->a, &beta, x->add ? x->add : x->c, lt->c, x->c,
                      lt->c, &lt->sizes[first].algo, lt->workspace, PRS_LT_WORKSPACE, stream);
    return e == LT_SUCCESS ? 0 : prs_fail(-EIO, "fused: cublasLtMatmul failed with status %d", e);
}
