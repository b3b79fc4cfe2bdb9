/* SPDX-License-Identifier: Apache-2.0 */
/* The unfused path, for shapes that the fused kernels cannot run or run slower: cuBLASLt, and after it (all-gather:
 * before it) copies and sums over mapped memory, with a barrier of the node's ranks before and after data moves between
 * ranks. On one node, sums of few rows take one kernel without a barrier (inbox.h). All of it can be captured
 * into a graph like the fused path.
 *
 * Between nodes each rank communicates only with its counterparts, as in the fused kernels. A rank's part of the whole
 * matrix is its *slice*. Partial sums of a counterpart's slice are first added up here, then put there. This is an
 * *exchange*: one put and one signal to each counterpart, and one of each from every counterpart. Rows of A, and for an
 * all-reduce the finished slices, are put to their final addresses at the counterparts, which copy them to their
 * neighbours. There is only one bank, because the host, which gives addresses to cuBLASLt and to copies, does not know
 * the epoch. So a rank puts only when its counterpart has read the data of the last launch. The counterpart says so by
 * a signal: that of an all-reduce's finished slice, or else one that is only credit. */
#ifndef PERSEUS_FUSED_UNFUSED_H
#define PERSEUS_FUSED_UNFUSED_H

#include "fused/gemm/unfused/exchange.h"
#include "fused/gemm/plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* For decide() of a plan whose args.schedule has rank and world: opens cuBLASLt, and says what memory is needed. */
int prs_unfused_open(struct prs_gemm_plan *plan);
int prs_unfused_launch(struct prs_gemm_plan *plan, cudaStream_t stream); /* of plan->operands */
/* Whether the launch that is being enqueued adds up by inboxes: each rank then stores into its own C alone. */
static inline bool prs_unfused_has_inbox(const struct prs_gemm_plan *plan)
{
    return plan->rows <= plan->inbox_rows;
}
/* Whether the kernel that adds up also computes the norm of its rows. It does so with one hop. With two hops the second
 * would carry fp32, and a separate kernel after it was faster. */
bool prs_unfused_norms(const struct prs_gemm_plan *plan);
/* Enqueues a copy inside this rank's memory, of an even number of bytes. 0 or -EIO (logged). */
int prs_unfused_copy_rows(const void *from, void *to, uint64_t bytes, cudaStream_t stream);

/* ---- unfused.cu ---- */
/* All ranks of this node wait for each other. 0 or -EIO. */
int prs_unfused_meet(const struct prs_kernel_args *args, cudaStream_t stream);

/* Scales of rows to copy: `lines` lines of `each` scales; lines are from_step and to_step floats apart. */
struct prs_copied_scales {
    const float *from;
    float *to[PRS_MAX_LOCAL_RANKS];
    uint64_t from_step, to_step;
    uint32_t lines, each;
    uint32_t copies;
};

/* Copies `bytes` bytes, an even number, to each of to[], and scales to theirs. */
struct prs_unfused_copy {
    const uint8_t *from;
    uint8_t *to[PRS_MAX_LOCAL_RANKS];
    uint64_t bytes;
    uint32_t copies;
    struct prs_copied_scales scales;
};
/* 0 or -EIO. */
int prs_unfused_copy(const struct prs_unfused_copy *copy, cudaStream_t stream);

/* The arrays that one rank adds up: those at `near` on this node, in this order, then `far_count` that came from other
 * nodes, the first at `far`, each far_step bytes after the previous one. */
struct prs_unfused_sum {
    const uint8_t *near[PRS_MAX_LOCAL_RANKS];
    const uint8_t *far;
    uint64_t far_step;
    uint8_t *to[PRS_MAX_LOCAL_RANKS];
    uint64_t elements;
    uint32_t near_count, far_count, copies;
    uint32_t type, result; /* enum prs_dtype: of the arrays, and of the sum */
    /* For the result: what is done to each sum, the first element here, and how many elements a row has. */
    struct prs_epilogue epilogue;
    uint64_t first;
    uint32_t columns;
};
/* 0 or -EIO. */
int prs_unfused_add(const struct prs_unfused_sum *sum, cudaStream_t stream);

/* Adds up, over the ranks of this node, the partial sums that each rank has for this one (inbox.h). */
struct prs_unfused_inbox_sum {
    struct prs_sync sync;
    struct prs_place place;
    const uint8_t *product; /* the partial sums of this rank */
    /* Elements of the product; of the part that a rank adds up, of which the last may have fewer; and from one part to
     * the next: 0 when all ranks add up the same. Where `all` and `part` are whole vectors of eight, so is
     * part_step. */
    uint32_t all, part, part_step;
    uint8_t *inbox[PRS_MAX_LOCAL_RANKS]; /* [p]: at neighbour p */
    uint64_t bank_step;                  /* prs_inbox_bank_step() */
    uint8_t *c;
    uint32_t c_first; /* element of c at which this rank's part begins */
    struct prs_epilogue epilogue;
    uint32_t columns;      /* of the result */
    uint32_t type, result; /* enum prs_dtype: of the partial sums, and of the result */
    uint32_t hops;         /* 2: c gets the parts of all ranks */
    uint32_t most_ctas;    /* the same on all ranks */
};
/* 0 or -EIO. */
int prs_unfused_sum_by_inbox(const struct prs_unfused_inbox_sum *a, cudaStream_t stream);

/* What is computed from finished rows of the result, and stored in addition to them (norm.cuh). Fields that are 0 have
 * no effect. */
struct prs_row_norm {
    const void *weight; /* of the type of sums */
    uint8_t *normed;    /* of the type of sums */
    uint8_t *quantised; /* e4m3 */
    float *scale;
    uint64_t scale_pitch;
    uint32_t scaling; /* enum prs_scaling, of `quantised` */
    float eps;
    uint32_t columns; /* a multiple of PRS_INBOX_ITEM */
    uint32_t ctas;    /* in a cluster, which normalises one row at a time; chosen by the launch */
};
/* The most columns whose rows fit the shared memory of a cluster. */
enum { PRS_NORM_MOST_COLUMNS = 1 << 18 };

/* A sum by inboxes in one hop, whose finished rows are then normalised. Each rank sums whole rows: `part` is a multiple
 * of the columns. */
struct prs_unfused_row_sum {
    struct prs_unfused_inbox_sum sum;
    struct prs_row_norm norm;
};
/* 0 or -EIO. */
int prs_unfused_sum_rows_by_inbox(struct prs_unfused_row_sum *a, cudaStream_t stream);

/* Normalises rows that another kernel has finished. */
struct prs_unfused_norm_rows {
    struct prs_row_norm norm;
    const uint8_t *from;
    uint8_t *copy; /* NULL, or where the rows are copied to */
    uint64_t pitch;
    uint32_t rows;
    const uint32_t *rows_on_device; /* NULL, or a number that, divided by rows_divisor, limits `rows` */
    uint32_t rows_divisor;
    uint32_t type, result; /* enum prs_dtype: of sums, and of the rows */
};
/* 0 or -EIO. */
int prs_unfused_norm_rows(struct prs_unfused_norm_rows *a, cudaStream_t stream);

/* Applies the epilogue to a matrix without gaps. `to` may be `from` unless the epilogue is gated. elements, columns: of
 * the result. quantised: used instead of `to` if the result is e4m3; `from` and the bias are then bf16. 0 or -EIO. */
struct prs_unfused_finish {
    struct prs_epilogue epilogue;
    const uint8_t *from;
    uint8_t *to;
    uint64_t elements;
    uint32_t columns;
    uint32_t type, from_type, result; /* enum prs_dtype: of the bias, of `from`, and of `to` */
    struct prs_quantised_result quantised;
};
int prs_unfused_finish_result(const struct prs_unfused_finish *finish, cudaStream_t stream);

/* One exchange. 0 or -EIO. */
int prs_unfused_cross(const struct prs_kernel_args *args, const struct prs_exchange *exchange, cudaStream_t stream);

/* The end of a launch between nodes: gives the counterparts credit (when `credit` is set), passes a barrier of the
 * node's ranks, waits until the network has read everything that was put here, and advances the epoch. 0 or -EIO. */
int prs_unfused_finish(const struct prs_kernel_args *args, int credit, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
