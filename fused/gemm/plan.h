/* SPDX-License-Identifier: Apache-2.0 */
/* The plan of a matrix product: one shape on one context, with its workspace and its path. */
#ifndef PERSEUS_FUSED_GEMM_PLAN_H
#define PERSEUS_FUSED_GEMM_PLAN_H

#include "fused/core/plan.h"
#include "fused/gemm/layout.h"

/* Elements from one row to the next; ld: of the shape, 0 for rows without gaps. */
static inline uint64_t prs_pitch(uint32_t ld, uint32_t columns)
{
    return ld != 0 ? ld : columns;
}

/* Columns of C. */
static inline uint32_t prs_result_columns(const struct prs_gemm_shape *s)
{
    return s->gated ? s->n / 2 : s->n;
}

/* Bytes of an element of C. */
static inline uint32_t prs_result_element(const struct prs_gemm_shape *s)
{
    return s->c_dtype == PRS_DTYPE_FP32 ? 4 : 2;
}

/* Whether rows of A, B or C have gaps. */
static inline bool prs_has_gaps(const struct prs_gemm_shape *s)
{
    return (s->lda != 0 && s->lda != s->k) || (s->ldb != 0 && s->ldb != (s->b_transposed ? s->k : s->n)) ||
           (s->ldc != 0 && s->ldc != prs_result_columns(s));
}

struct prs_gemm_plan {
    struct prs_plan base;
    struct prs_gemm_shape shape; /* the caller's, no type of which is the default */
    struct prs_gemm_info info;
    const struct prs_gemm_tuning *wanted;   /* the caller's, while the plan is opened; or NULL */
    const struct prs_table_found *measured; /* for this plan, while it is opened; or NULL: look for an entry */
    uint32_t source;                        /* enum prs_table_source */
    struct prs_kernel_args args;            /* all but the maps of A, B and C, which each launch fills */
    struct prs_gemm_operands operands;      /* of the launch that is being enqueued */
    uint32_t rows;                /* of that launch; while the plan is opened, and with m_on_device, the most */
    struct prs_schedule schedule; /* of the launch that is being enqueued, as far as the host knows it */
    struct prs_lt *lt;            /* unfused path; else NULL */
    /* Unfused path: launches of up to so many rows are added up by inboxes, in the memory of this need. */
    uint32_t inbox_rows, inbox;
    /* 1 + number of the need for results that are copied to C; 0: the ranks store into C. */
    uint32_t result;
};

/* The symmetric memory that holds the first `bytes` bytes of an all-reduce's result; NULL: the caller's C is none. */
static inline const struct prs_symmetric *prs_result_home(const struct prs_gemm_plan *p, uint64_t bytes)
{
    return p->result != 0 ? p->base.memory[p->result - 1] : prs_symmetric_find(p->base.ctx, p->operands.c, bytes);
}

#endif
