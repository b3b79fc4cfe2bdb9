/* SPDX-License-Identifier: Apache-2.0 */
/* The part of cuBLASLt 12 and 13 that is used, declared here: the library is opened at run time, and where CUDA is
 * installed from wheels, its header comes with libraries of 500 MB. test/fused/test_lt.c compares all of it with the
 * header. */
#ifndef PERSEUS_FUSED_LT_ABI_H
#define PERSEUS_FUSED_LT_ABI_H

#include <cuda_runtime_api.h>
#include <library_types.h>
#include <stddef.h>
#include <stdint.h>

enum { LT_SUCCESS = 0, LT_TRANSPOSED = 1, LT_COMPUTE_32F = 68, LT_ADD_IN_COMPUTE_TYPE = 2, LT_LAYOUT_COLUMNS = 3 };

/* Attributes of a product. The attributes of scale modes came with 12.9; an older library refuses them. */
enum {
    LT_DESC_TRANSPOSE_A = 3,
    LT_DESC_SMS = 15,
    LT_DESC_SCALE_A = 17,
    LT_DESC_SCALE_B = 18,
    LT_DESC_FAST = 25,
    LT_DESC_SCALE_MODE_A = 31,
    LT_DESC_SCALE_MODE_B = 32
};
enum { LT_SCALE_ROWS = 3, LT_SCALE_VECTORS = 4, LT_SCALE_BLOCKS = 5 };

/* Limits of the algorithms that may be chosen. */
enum {
    LT_PREFER_WORKSPACE = 1,
    LT_PREFER_ADDING = 3,
    LT_PREFER_ALIGNMENT_A = 5,
    LT_PREFER_ALIGNMENT_B = 6,
    LT_PREFER_ALIGNMENT_C = 7,
    LT_PREFER_ALIGNMENT_D = 8
};

struct lt_algo {
    uint64_t data[8];
};

struct lt_found {
    struct lt_algo algo;
    size_t workspace_bytes;
    int status;
    float waves;
    int reserved[4];
};

/* Its handles are pointers to structures of its own. Each function returns LT_SUCCESS or another status. */
struct lt_api {
    int (*create)(void **handle);
    int (*destroy)(void *handle);
    int (*matmul)(void *handle, void *desc, const void *alpha, const void *a, void *layout_a, const void *b,
                  void *layout_b, const void *beta, const void *c, void *layout_c, void *d, void *layout_d,
                  const struct lt_algo *algo, void *workspace, size_t workspace_bytes, cudaStream_t stream);
    int (*desc)(void **desc, int compute, cudaDataType_t scale);
    int (*desc_destroy)(void *desc);
    int (*desc_set)(void *desc, int attribute, const void *value, size_t bytes);
    int (*layout)(void **layout, cudaDataType_t type, uint64_t rows, uint64_t columns, int64_t pitch);
    int (*layout_destroy)(void *layout);
    int (*layout_set)(void *layout, int attribute, const void *value, size_t bytes);
    int (*preference)(void **preference);
    int (*preference_destroy)(void *preference);
    int (*preference_set)(void *preference, int attribute, const void *value, size_t bytes);
    int (*heuristic)(void *handle, void *desc, void *layout_a, void *layout_b, void *layout_c, void *layout_d,
                     void *preference, int wanted, struct lt_found *found, int *count);
};

#endif
