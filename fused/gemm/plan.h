/* SPDX-License-Identifier: Apache-2.0 */
/* The plan of a matrix product: one shape on one context, with its workspace and its path. */
#ifndef PERSEUS_FUSED_GEMM_PLAN_H
#define PERSEUS_FUSED_GEMM_PLAN_H

#include <string.h>

#include "fused/core/element.h"
#include "fused/core/plan.h"
#include "fused/gemm/layout.h"
#include "fused/gemm/table.h"
#include "fused/gemm/tuning.h"

/* Elements from one row to the next; ld: the shape's value, 0 for rows without gaps. */
static inline uint64_t prs_pitch(uint32_t ld, uint32_t columns)
{
    return ld != 0 ? ld : columns;
}

/* Columns of C. */
static inline uint32_t prs_result_columns(const struct prs_gemm_shape *s)
{
    return s->gated ? s->n / 2 : s->n;
}

/* Gives a caller's shape the types that it leaves open. All functions below take such filled shapes. */
static inline void prs_gemm_shape_fill(struct prs_gemm_shape *s)
{
    const struct prs_element *type;
    if (s->dtype == PRS_DTYPE_DEFAULT)
        s->dtype = PRS_DTYPE_BF16;
    type = prs_element_find(s->dtype);
    if (s->sum_dtype == PRS_DTYPE_DEFAULT)
        s->sum_dtype = type && type->multiplies ? type->sum : s->dtype;
    if (s->c_dtype == PRS_DTYPE_DEFAULT)
        s->c_dtype = type && type->multiplies ? type->sum : s->dtype;
}

/* Bytes of an element of A and B, of sums that travel, and of C. */
static inline uint32_t prs_operand_bytes(const struct prs_gemm_shape *s)
{
    return prs_element_bytes(s->dtype);
}

static inline uint32_t prs_sum_bytes(const struct prs_gemm_shape *s)
{
    return prs_element_bytes(s->sum_dtype);
}

static inline uint32_t prs_result_bytes(const struct prs_gemm_shape *s)
{
    return prs_element_bytes(s->c_dtype);
}

/* Tiles of the result, side by side, of so many columns, and the steps of K that a whole product takes. */
static inline uint32_t prs_column_tiles(const struct prs_gemm_shape *s, uint32_t columns)
{
    return prs_ceil_div(s->n, columns);
}

static inline uint32_t prs_k_steps(const struct prs_gemm_shape *s)
{
    return prs_ceil_div(s->k, prs_element_step(s->dtype));
}

/* How many scales travel with each row of A. */
static inline uint32_t prs_scales_sent(const struct prs_gemm_shape *s)
{
    if (s->op != PRS_GEMM_ALLGATHER || s->scaling < PRS_SCALING_ROWS)
        return 0;
    return s->scaling == PRS_SCALING_ROWS ? 1 : s->k / PRS_SCALE_BLOCK;
}

/* Whether rows of A, B or C have gaps. */
static inline bool prs_has_gaps(const struct prs_gemm_shape *s)
{
    return (s->lda != 0 && s->lda != s->k) || (s->ldb != 0 && s->ldb != (s->b_transposed ? s->k : s->n)) ||
           (s->ldc != 0 && s->ldc != prs_result_columns(s));
}

/* Whether k may be 0: the rank then adds A itself to the sum. */
static inline bool prs_may_lack_product(const struct prs_gemm_shape *s)
{
    return (s->op == PRS_GEMM_REDUCE_SCATTER || s->op == PRS_GEMM_ALLREDUCE) && !s->gated &&
           s->dtype != PRS_DTYPE_E4M3 && !s->lda && !s->ldb && !s->ldc;
}

/* The needs of a plan (core/plan.h), by number. */
enum prs_gemm_need {
    PRS_GEMM_STAGING,
    PRS_GEMM_FLAGS,
    PRS_GEMM_SIGNALS, /* between nodes */
    PRS_GEMM_TURNS,   /* fused path */
    PRS_GEMM_INBOX,   /* unfused path */
    PRS_GEMM_RESULT   /* what is copied to C */
};

/* Memory that the plans of a context share. */
#define PRS_POOL_GATHERED "gemm: rows of A that ranks gather, unfused"
#define PRS_POOL_PRODUCTS "gemm: products that ranks then add up; no other rank writes to them"
#define PRS_POOL_INBOX    "gemm: unfused/inbox.h"
#define PRS_POOL_BANKS    "gemm: two banks of what CTAs of other ranks write"
#define PRS_POOL_COPIED   "gemm: rows that copy engines of other ranks write"
#define PRS_POOL_TURNS    "gemm: struct prs_turns"
#define PRS_POOL_RESULTS  "gemm: results of all-reduces that are copied to C"

/* 0, or -EINVAL for a filled shape that no plan can have. */
int prs_gemm_shape_check(const struct prs_fused *ctx, const struct prs_gemm_shape *shape);

struct prs_gemm_plan {
    struct prs_plan base;
    struct prs_gemm_shape shape; /* the caller's, no type of which is the default */
    struct prs_gemm_info info;
    const struct prs_gemm_tuning *wanted;   /* the caller's, while the plan is opened; or NULL */
    const struct prs_table_found *measured; /* for this plan, while it is opened; or NULL: look for an entry */
    /* the arguments of the kernel; each launch fills in the maps of A, B and C */
    struct prs_kernel_args args;
    struct prs_gemm_operands operands; /* of the launch that is being enqueued */
    /* rows of that launch; while the plan is opened, and with m_on_device, the largest number */
    uint32_t rows;
    struct prs_schedule schedule; /* of the launch that is being enqueued, as far as the host knows it */
    struct prs_lt *lt;            /* unfused path; else NULL */
    uint32_t inbox_rows;          /* unfused path: inboxes add up launches of at most this many rows */
    /* paths.h: the next of the plans that share this plan's launches, or NULL; whether they have both paths; and what
     * was measured for both. */
    struct prs_gemm_plan *next;
    bool both;
    struct prs_path_times times[PRS_TABLE_CLASSES];
};

/* prs_gemm_plan_open(), but measures nothing. tuning, measured: as in struct prs_gemm_plan. */
int prs_gemm_plan_open_as(struct prs_fused *ctx, const struct prs_gemm_shape *shape,
                          const struct prs_gemm_tuning *tuning, const struct prs_table_found *measured,
                          struct prs_gemm_plan **out);

/* What rank 0 found when the plan was opened. Other ranks may see another tuning file, but have agreed to use this. */
static inline struct prs_table_found prs_gemm_plan_found(const struct prs_gemm_plan *p)
{
    struct prs_table_found found;
    memcpy(&found, p->base.call.hint.first, sizeof(found));
    return found;
}

/* The symmetric memory that holds the first `bytes` bytes of an all-reduce's result; NULL: the caller's C is not
 * symmetric memory. */
static inline const struct prs_symmetric *prs_result_home(const struct prs_gemm_plan *p, uint64_t bytes)
{
    const struct prs_symmetric *result = p->base.memory[PRS_GEMM_RESULT];
    return result ? result : prs_symmetric_find(p->base.ctx, p->operands.c, bytes);
}

#endif
