/* SPDX-License-Identifier: Apache-2.0 */
/* Checks the library's calls of cuBLASLt: dlopen() finds the test's fake, which keeps the arguments. */
#include <criterion/criterion.h>
#include <cublasLt.h>
#include <errno.h>
#include <string.h>

#include "fused/core/context.h"
#include "fused/gemm/unfused/lt.h"
#include "fused/gemm/unfused/lt_abi.h"
#include "transport/util/error.h"

enum { MOST_PREFERENCES = 16 };

/* ---- what the library declares of cuBLASLt is what its header says ---- */

#define SAME_NUMBER(ours, theirs) static_assert((int)(ours) == (int)(theirs), #theirs)
SAME_NUMBER(LT_SUCCESS, CUBLAS_STATUS_SUCCESS);
SAME_NUMBER(LT_TRANSPOSED, CUBLAS_OP_T);
SAME_NUMBER(LT_COMPUTE_32F, CUBLAS_COMPUTE_32F);
SAME_NUMBER(LT_ADD_IN_COMPUTE_TYPE, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
SAME_NUMBER(LT_LAYOUT_COLUMNS, CUBLASLT_MATRIX_LAYOUT_COLS);
SAME_NUMBER(LT_DESC_TRANSPOSE_A, CUBLASLT_MATMUL_DESC_TRANSA);
SAME_NUMBER(LT_DESC_SMS, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET);
SAME_NUMBER(LT_DESC_SCALE_A, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER);
SAME_NUMBER(LT_DESC_SCALE_B, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER);
SAME_NUMBER(LT_DESC_FAST, CUBLASLT_MATMUL_DESC_FAST_ACCUM);
#if CUBLAS_VERSION >= 120900
SAME_NUMBER(LT_DESC_SCALE_MODE_A, CUBLASLT_MATMUL_DESC_A_SCALE_MODE);
SAME_NUMBER(LT_DESC_SCALE_MODE_B, CUBLASLT_MATMUL_DESC_B_SCALE_MODE);
SAME_NUMBER(LT_SCALE_ROWS, CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F);
SAME_NUMBER(LT_SCALE_VECTORS, CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F);
SAME_NUMBER(LT_SCALE_BLOCKS, CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F);
#endif
SAME_NUMBER(LT_PREFER_WORKSPACE, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
SAME_NUMBER(LT_PREFER_ADDING, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
SAME_NUMBER(LT_PREFER_ALIGNMENT_A, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
SAME_NUMBER(LT_PREFER_ALIGNMENT_B, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
SAME_NUMBER(LT_PREFER_ALIGNMENT_C, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
SAME_NUMBER(LT_PREFER_ALIGNMENT_D, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
static_assert(sizeof(struct lt_algo) == sizeof(cublasLtMatmulAlgo_t), "an algorithm");
static_assert(sizeof(struct lt_found) == sizeof(cublasLtMatmulHeuristicResult_t), "what a search finds");
static_assert(offsetof(struct lt_found, workspace_bytes) == offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize) &&
                  offsetof(struct lt_found, status) == offsetof(cublasLtMatmulHeuristicResult_t, state) &&
                  offsetof(struct lt_found, waves) == offsetof(cublasLtMatmulHeuristicResult_t, wavesCount),
              "what a search finds");

/* Its handles are pointers to structures, which are void * here, and its enumerations are int. */
typedef cublasStatus_t multiplication(cublasLtHandle_t, cublasLtMatmulDesc_t, const void *, const void *,
                                      cublasLtMatrixLayout_t, const void *, cublasLtMatrixLayout_t, const void *,
                                      const void *, cublasLtMatrixLayout_t, void *, cublasLtMatrixLayout_t,
                                      const cublasLtMatmulAlgo_t *, void *, size_t, cudaStream_t);
typedef cublasStatus_t search(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
                              cublasLtMatmulHeuristicResult_t[], int *);
typedef cublasStatus_t matrix(cublasLtMatrixLayout_t *, cudaDataType, uint64_t, uint64_t, int64_t);
#define SAME_TYPE(type, function) static_assert(__builtin_types_compatible_p(type, __typeof__(function)), #function)
SAME_TYPE(multiplication, cublasLtMatmul);
SAME_TYPE(search, cublasLtMatmulAlgoGetHeuristic);
SAME_TYPE(matrix, cublasLtMatrixLayoutCreate);
static_assert(sizeof(cublasLtHandle_t) == sizeof(void *) && sizeof(cublasStatus_t) == sizeof(int), "a call's types");

/* ---- a library that keeps what it was asked for ---- */

static struct {
    uint32_t value[MOST_PREFERENCES]; /* values of the attributes that have 4 bytes */
    bool said[MOST_PREFERENCES];
    cublasComputeType_t compute;
    int found; /* algorithms */
    uint64_t rows, ran_with;
    cudaDataType type; /* of the last matrix */
    uint32_t matrices; /* matrices of this type, one after the other */
    bool capturing;
    int32_t mode[2]; /* modes of scales of cuBLASLt's A and B; -1: not set */
    int8_t fast;
    const void *scales[2];
    bool knows_no_modes;
    uint64_t alike; /* all rows up to this have the same algorithm */
} asked = {.found = 1, .mode = {-1, -1}};

int prs_cuda_check(cudaError_t e, const char *what)
{
    return e == cudaSuccess ? 0 : -EIO;
}

static cublasStatus_t create(cublasLtHandle_t *handle)
{
    *handle = (cublasLtHandle_t)&asked;
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t describe_product(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute, cudaDataType_t scale)
{
    *desc = (cublasLtMatmulDesc_t)&asked;
    asked.compute = compute;
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t set_desc(cublasLtMatmulDesc_t desc, int attribute, const void *value, size_t bytes)
{
    if (attribute == 31 || attribute == 32) { /* CUBLASLT_MATMUL_DESC_A_SCALE_MODE, B: of 12.9 */
        memcpy(&asked.mode[attribute - 31], value, sizeof(asked.mode[0]));
        return asked.knows_no_modes ? CUBLAS_STATUS_INVALID_VALUE : CUBLAS_STATUS_SUCCESS;
    }
    if (attribute == CUBLASLT_MATMUL_DESC_A_SCALE_POINTER || attribute == CUBLASLT_MATMUL_DESC_B_SCALE_POINTER)
        memcpy(&asked.scales[attribute == CUBLASLT_MATMUL_DESC_B_SCALE_POINTER], value, sizeof(asked.scales[0]));
    if (attribute == CUBLASLT_MATMUL_DESC_FAST_ACCUM)
        memcpy(&asked.fast, value, sizeof(asked.fast));
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t describe_matrix(cublasLtMatrixLayout_t *layout, cudaDataType type, uint64_t rows,
                                      uint64_t columns, int64_t pitch)
{
    *layout = (cublasLtMatrixLayout_t)&asked;
    asked.matrices = asked.type == type ? asked.matrices + 1 : 1;
    asked.type = type;
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t create_preference(cublasLtMatmulPreference_t *preference)
{
    *preference = (cublasLtMatmulPreference_t)&asked;
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t set_preference(cublasLtMatmulPreference_t preference,
                                     cublasLtMatmulPreferenceAttributes_t attribute, const void *value, size_t bytes)
{
    cr_assert_lt((int)attribute, (int)MOST_PREFERENCES);
    asked.said[attribute] = true;
    if (bytes == sizeof(uint32_t))
        memcpy(&asked.value[attribute], value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t find_algorithm(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                     cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                     cublasLtMatmulPreference_t preference, int most,
                                     cublasLtMatmulHeuristicResult_t *found, int *count)
{
    memset(found, 0, sizeof(*found));
    found->algo.data[0] = asked.rows > asked.alike ? asked.rows : asked.alike;
    *count = asked.found;
    return CUBLAS_STATUS_SUCCESS;
}

/* Loading is a capture that never runs. */
static uint32_t captured, instantiated;

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    *stream = NULL;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    asked.capturing = true;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    asked.capturing = false;
    *graph = (cudaGraph_t)&asked;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags)
{
    instantiated++;
    *exec = (cudaGraphExec_t)&asked;
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    return cudaSuccess;
}

/* The fake returns the requested number of rows as its algorithm, so the test sees which rows an algorithm was chosen
 * for. */
static cublasStatus_t set_layout(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute,
                                 const void *value, size_t bytes)
{
    cr_assert_eq((int)attribute, (int)CUBLASLT_MATRIX_LAYOUT_COLS);
    memcpy(&asked.rows, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t multiply(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha, const void *a,
                               cublasLtMatrixLayout_t a_layout, const void *b, cublasLtMatrixLayout_t b_layout,
                               const void *beta, const void *c, cublasLtMatrixLayout_t c_layout, void *d,
                               cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algo, void *workspace,
                               size_t workspace_bytes, cudaStream_t stream)
{
    captured += asked.capturing;
    asked.ran_with = algo->data[0];
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t succeed(void)
{
    return CUBLAS_STATUS_SUCCESS;
}

static const struct {
    const char *name;
    void *fn;
} functions[] = {
    {"cublasLtCreate", (void *)create},
    {"cublasLtMatmulDescCreate", (void *)describe_product},
    {"cublasLtMatmulDescSetAttribute", (void *)set_desc},
    {"cublasLtMatrixLayoutCreate", (void *)describe_matrix},
    {"cublasLtMatrixLayoutSetAttribute", (void *)set_layout},
    {"cublasLtMatmul", (void *)multiply},
    {"cublasLtMatmulPreferenceCreate", (void *)create_preference},
    {"cublasLtMatmulPreferenceSetAttribute", (void *)set_preference},
    {"cublasLtMatmulAlgoGetHeuristic", (void *)find_algorithm},
};

static const char *installed = "libcublasLt.so.13"; /* "": none */
static char opened[64];

void *__wrap_dlopen(const char *name, int flags);
void *__wrap_dlopen(const char *name, int flags)
{
    if (strcmp(name, installed) != 0)
        return NULL;
    snprintf(opened, sizeof(opened), "%s", name);
    return &asked;
}

void *__wrap_dlsym(void *library, const char *name);
void *__wrap_dlsym(void *library, const char *name)
{
    for (size_t i = 0; i < sizeof(functions) / sizeof(*functions); i++)
        if (strcmp(name, functions[i].name) == 0)
            return functions[i].fn;
    return (void *)succeed;
}

static void *handle; /* as a context keeps it */
static char workspace[256];

static void open_and_close(void)
{
    const struct prs_gemm_shape shape = {
        .op = PRS_GEMM_ALLGATHER, .m = 512, .n = 4096, .k = 4097, .dtype = PRS_DTYPE_BF16, .c_dtype = PRS_DTYPE_BF16};
    struct prs_lt *lt = NULL;
    cr_assert_eq(prs_lt_open(&handle, workspace, &shape, 0, &lt), 0);
    cr_assert_not_null(lt);
    prs_lt_close(lt);
}

/* With 4000 x 2752 x 4101, and with many odd numbers of rows, parts of K were added up as bf16: one element in five had
 * one rounding error more than is promised. */
Test(lt, all_of_k_is_added_up_as_fp32)
{
    open_and_close();
    cr_assert_eq((int)asked.compute, (int)CUBLAS_COMPUTE_32F);
    cr_assert(asked.said[CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK]);
    cr_assert_eq(asked.value[CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK],
                 (uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
}

Test(lt, no_operand_is_taken_for_aligned_to_more_than_16_bytes)
{
    static const cublasLtMatmulPreferenceAttributes_t operands[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    open_and_close();
    for (size_t i = 0; i < sizeof(operands) / sizeof(*operands); i++)
        cr_assert_eq(asked.value[operands[i]], 16u, "operand %zu", i);
}

/* A launch that loads a kernel may wait for kernels that wait for this rank. */
Test(lt, every_kernel_of_a_launch_is_loaded_when_it_is_opened)
{
    static const uint32_t ROWS[][2] = {{1, 32}, {32, 32}, {33, 40}, {257, 264}, {480, 480}, {500, 500}};
    const struct prs_gemm_shape shape = {
        .op = PRS_GEMM_ALLGATHER, .m = 500, .n = 4096, .k = 4097, .dtype = PRS_DTYPE_BF16, .c_dtype = PRS_DTYPE_BF16};
    struct prs_lt *lt = NULL;
    captured = instantiated = 0;
    cr_assert_eq(prs_lt_open(&handle, workspace, &shape, 0, &lt), 0);
    cr_assert_eq(captured, 60, "products of 32, 40 ... 496 and 500 rows: %u", captured);
    cr_assert_eq(instantiated, 60);
    for (size_t i = 0; i < sizeof(ROWS) / sizeof(*ROWS); i++) {
        cr_assert_eq(prs_lt_run(lt, ROWS[i][0], &(struct prs_lt_operands){.a = lt, .b = lt, .c = lt}, NULL), 0);
        cr_assert_eq(asked.rows, ROWS[i][0]);
        cr_assert_eq(asked.ran_with, ROWS[i][1], "%u rows ran as one of %u", ROWS[i][0], (uint32_t)asked.ran_with);
    }
    cr_assert_eq(captured, 60, "nothing was loaded later");
    prs_lt_close(lt);
}

/* The algorithm of 2048 rows is a bad one for 1544. */
Test(lt, each_octave_of_rows_has_128_algorithms_or_fewer)
{
    static const uint32_t ROWS[][2] = {{1000, 1024}, {1024, 1024}, {1025, 1032},
                                       {1544, 1544}, {2040, 2040}, {2041, 2048}};
    const struct prs_gemm_shape shape = {
        .op = PRS_GEMM_ALLGATHER, .m = 2048, .n = 4096, .k = 4097, .dtype = PRS_DTYPE_BF16, .c_dtype = PRS_DTYPE_BF16};
    struct prs_lt *lt = NULL;
    captured = 0, asked.alike = 1024;
    cr_assert_eq(prs_lt_open(&handle, workspace, &shape, 0, &lt), 0);
    cr_assert_eq(captured, 1 + 128, "one of up to 1024 rows, and those to 2048: %u", captured);
    for (size_t i = 0; i < sizeof(ROWS) / sizeof(*ROWS); i++) {
        cr_assert_eq(prs_lt_run(lt, ROWS[i][0], &(struct prs_lt_operands){.a = lt, .b = lt, .c = lt}, NULL), 0);
        cr_assert_eq(asked.ran_with, ROWS[i][1], "%u rows ran as one of %u", ROWS[i][0], (uint32_t)asked.ran_with);
    }
    prs_lt_close(lt);
}

Test(lt, algorithms_are_chosen_from_the_fewest_rows_on)
{
    static const uint32_t ROWS[][2] = {{1, 488}, {481, 488}, {489, 496}, {497, 500}};
    const struct prs_gemm_shape shape = {.op = PRS_GEMM_ALLGATHER,
                                         .m = 500,
                                         .n = 4096,
                                         .k = 4097,
                                         .dtype = PRS_DTYPE_BF16,
                                         .c_dtype = PRS_DTYPE_BF16,
                                         .fewest_m = 481};
    struct prs_lt *lt = NULL;
    captured = 0;
    cr_assert_eq(prs_lt_open(&handle, workspace, &shape, 0, &lt), 0);
    cr_assert_eq(captured, 3);
    for (size_t i = 0; i < sizeof(ROWS) / sizeof(*ROWS); i++) {
        cr_assert_eq(prs_lt_run(lt, ROWS[i][0], &(struct prs_lt_operands){.a = lt, .b = lt, .c = lt}, NULL), 0);
        cr_assert_eq(asked.ran_with, ROWS[i][1], "%u rows ran as one of %u", ROWS[i][0], (uint32_t)asked.ran_with);
    }
    prs_lt_close(lt);
}

Test(lt, all_matrices_have_the_type_of_the_shape)
{
    struct prs_gemm_shape shape = {
        .op = PRS_GEMM_ALONE, .m = 512, .n = 4096, .k = 4097, .dtype = PRS_DTYPE_BF16, .c_dtype = PRS_DTYPE_BF16};
    for (uint32_t dtype = PRS_DTYPE_BF16; dtype <= PRS_DTYPE_FP16; dtype++) {
        struct prs_lt *lt = NULL;
        shape.dtype = shape.c_dtype = dtype;
        asked.matrices = 0;
        cr_assert_eq(prs_lt_open(&handle, workspace, &shape, 0, &lt), 0);
        cr_assert_eq((int)asked.type, (int)(dtype == PRS_DTYPE_FP16 ? CUDA_R_16F : CUDA_R_16BF));
        cr_assert_eq(asked.matrices, 3, "A, B and C");
        prs_lt_close(lt);
    }
}

/* cuBLASLt's A is our B. All its versions know scales of tensors. */
Test(lt, each_kind_of_scale_has_its_mode_and_each_launch_its_scales)
{
    /* modes of cuBLASLt's A and B: none; outer vectors; blocks and vectors */
    static const int32_t MODES[][2] = {{-1, -1}, {3, 3}, {5, 4}};
    struct prs_gemm_shape shape = {.op = PRS_GEMM_ALONE,
                                   .m = 512,
                                   .n = 4096,
                                   .k = 4096,
                                   .b_transposed = 1,
                                   .dtype = PRS_DTYPE_E4M3,
                                   .sum_dtype = PRS_DTYPE_BF16,
                                   .c_dtype = PRS_DTYPE_BF16};
    static const float of_a[4], of_b[4];
    for (uint32_t scaling = PRS_SCALING_TENSOR; scaling <= PRS_SCALING_BLOCKS; scaling++) {
        struct prs_lt *lt = NULL;
        shape.scaling = scaling;
        shape.fast_accumulation = scaling == PRS_SCALING_ROWS;
        asked.mode[0] = asked.mode[1] = -1;
        asked.scales[0] = asked.scales[1] = NULL;
        cr_assert_eq(prs_lt_open(&handle, workspace, &shape, 0, &lt), 0);
        cr_assert(asked.mode[0] == MODES[scaling - 1][0] && asked.mode[1] == MODES[scaling - 1][1], "scaling %u: %d %d",
                  scaling, asked.mode[0], asked.mode[1]);
        cr_assert_eq(asked.fast, (int8_t)shape.fast_accumulation);
        cr_assert(asked.scales[0] && asked.scales[1], "algorithms are chosen with scales");
        cr_assert_eq(prs_lt_run(lt, 32, &(struct prs_lt_operands){lt, lt, NULL, lt, of_a, of_b}, NULL), 0);
        cr_assert(asked.scales[0] == of_b && asked.scales[1] == of_a);
        prs_lt_close(lt);
    }
    asked.knows_no_modes = true;
    cr_assert_eq(prs_lt_open(&handle, workspace, &shape, 0, &(struct prs_lt *){NULL}), -ENOTSUP);
}

Test(lt, the_library_of_either_cuda_is_opened)
{
    installed = "libcublasLt.so.12";
    open_and_close();
    cr_assert_str_eq(opened, installed);
}

Test(lt, without_a_library_the_error_names_both)
{
    const struct prs_gemm_shape shape = {
        .op = PRS_GEMM_ALONE, .m = 512, .n = 4096, .k = 4097, .dtype = PRS_DTYPE_BF16, .c_dtype = PRS_DTYPE_BF16};
    struct prs_lt *lt = NULL;
    installed = "";
    cr_assert_eq(prs_lt_open(&handle, workspace, &shape, 0, &lt), -ENOTSUP);
    cr_assert(strstr(prs_error_last(), "libcublasLt.so.13") && strstr(prs_error_last(), "libcublasLt.so.12"));
}

Test(lt, a_shape_for_which_it_has_nothing_is_refused)
{
    const struct prs_gemm_shape shape = {
        .op = PRS_GEMM_ALLGATHER, .m = 512, .n = 4096, .k = 4097, .dtype = PRS_DTYPE_BF16, .c_dtype = PRS_DTYPE_BF16};
    struct prs_lt *lt = NULL;
    asked.found = 0;
    cr_assert_eq(prs_lt_open(&handle, workspace, &shape, 0, &lt), -ENOTSUP);
    cr_assert_null(lt);
}
