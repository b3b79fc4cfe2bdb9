/* SPDX-License-Identifier: Apache-2.0 */
/* Operands of a product of all ranks, and its expected results in double precision. */
#ifndef TEST_HOPPER_RANKS_REFERENCE_H
#define TEST_HOPPER_RANKS_REFERENCE_H

#include "test/hopper/ranks.h"

static inline uint32_t key_a(const struct ranks_product *p, uint32_t epoch, uint32_t rank)
{
    return (epoch * 64 + rank * 2) | (p->positive ? RANKS_POSITIVE : 0);
}

static inline uint32_t key_b(const struct ranks_product *p, uint32_t rank)
{
    return (4096 + rank) | (p->positive ? RANKS_POSITIVE : 0);
}

enum { KEY_SCALE_B = 30000 }; /* and the rank */

/* All ranks of an all-gather have the same scale of A, if it is only one. */
static inline uint32_t key_scale_a(const struct ranks_product *p, uint32_t epoch, uint32_t rank)
{
    bool same = p->shape.op == PRS_GEMM_ALLGATHER && p->shape.scaling == PRS_SCALING_TENSOR;
    return 20000 + epoch * 64 + (same ? 0 : rank);
}

/* All ranks of an all-reduce have the same bias and the same residual. */
static inline uint32_t key_bias(const struct ranks_product *p, uint32_t rank)
{
    return 5000 + (p->shape.op == PRS_GEMM_ALLREDUCE ? 0 : rank);
}

static inline uint32_t key_residual(const struct ranks_product *p, uint32_t rank)
{
    return 6000 + (p->shape.op == PRS_GEMM_ALLREDUCE ? 0 : rank);
}

/* Elements from one row to the next. */
static inline uint64_t pitch_of(uint32_t ld, uint32_t columns)
{
    return ld != 0 ? ld : columns;
}

/* Of C. */
static inline uint32_t columns_of(const struct ranks_product *p)
{
    return p->shape.gated ? p->shape.n / 2 : p->shape.n;
}

static inline uint64_t rows_of(const struct ranks_product *p, enum prs_gemm_op split)
{
    return p->shape.op == split ? p->shape.m / p->world : p->shape.m;
}

static inline bool is_scaled(const struct ranks_product *p)
{
    return p->shape.dtype == PRS_DTYPE_E4M3;
}

/* The type of sums, of the bias, and of C where that is not fp32. */
static inline uint32_t sum_type(const struct ranks_product *p)
{
    return is_scaled(p) ? PRS_DTYPE_BF16 : p->shape.dtype;
}

static inline bool is_wide(const struct ranks_product *p)
{
    return p->shape.c_dtype == PRS_DTYPE_FP32;
}

static inline bool is_quantised(const struct ranks_product *p)
{
    return p->shape.c_dtype == PRS_DTYPE_E4M3;
}

static inline uint32_t result_bytes(const struct ranks_product *p)
{
    return is_wide(p) ? 4 : is_quantised(p) ? 1 : 2;
}

/* An element of A or B. */
static inline float input(const struct ranks_product *p, uint32_t key, uint64_t at)
{
    return ranks_element_of(p->shape.dtype, key, at);
}

/* One of the residual, which has the type of C. */
static inline float residual_element(const struct ranks_product *p, uint32_t key, uint64_t at)
{
    return ranks_element_of(is_wide(p) ? PRS_DTYPE_FP32 : sum_type(p), key, at);
}

static inline double scale(uint32_t key, uint64_t at)
{
    return 1 + 0.75 * ranks_element_of(PRS_DTYPE_FP32, key, at);
}

/* Rows of A on a rank, of a launch as the host knows it. */
static inline uint64_t scaled_rows(const struct ranks_product *p)
{
    return p->scale_a_pitch != 0 ? p->scale_a_pitch : rows_of(p, PRS_GEMM_ALLGATHER);
}

/* A number, and how far a right result may be from it. */
struct estimate {
    double value, bound;
};

/* One element of C. */
struct estimate ranks_reference(const struct ranks_product *p, uint32_t rank, uint32_t epoch, uint64_t row,
                                uint64_t column);
/* Frees what the calling thread has kept for its next elements. */
void ranks_reference_end(void);

#endif
