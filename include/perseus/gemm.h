/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Matrix products fused with their communication. m, n, k are the dimensions of the product that a rank takes part in:
 *
 *     operation        A (this rank)    B (this rank)    C (this rank)    meaning
 *     ALONE            [m, k]           [k, n]           [m, n]           C = A B, no communication
 *     REDUCE_SCATTER   [m, k]           [k, n]           [m / W, n]       C = rows rank * m/W ... of the sum of all A B
 *     ALLGATHER        [m / W, k]       [k, n]           [m, n]           C = (the A of all ranks, stacked) B
 *     ALLREDUCE        [m, k]           [k, n]           [m, n]           C = the sum of all A B
 *
 * B may instead be given as [n, k], its transpose, which is how torch.nn.Linear keeps weights.
 *
 * Sums. A rank rounds its partial product to shape.sum_dtype once, and sends it. The owner adds its own fp32 sum and
 * those of the others in a fixed order, and rounds once more. The same inputs, shape and tuning always give the same
 * bits.
 *
 * FP8. A and B of type e4m3 have scales (enum prs_scaling); B is [n, k], and bias and sums that travel are bf16. A rank
 * multiplies its own sum by its own scales, in fp32 and before any other rounding, so the ranks of a sum may have
 * different scales. The unfused path needs n and k that are multiples of 16; with PRS_SCALING_BLOCKS n must be a
 * multiple of 128. With c_dtype e4m3 the launch quantises C: the fused path from fp32 sums, the unfused path from sums
 * rounded to bf16. C and its scales can then be A and scale_a of a product with PRS_SCALING_BLOCKS.
 *
 * Epilogue, in fp32: C = activation(sum + bias) + residual; for a gated product see struct prs_gemm_shape.
 *
 * Norm. With shape.norm a launch also writes the rows of C divided by their root mean square, which the next layer of a
 * transformer reads, and C is its residual stream. On one node, for few rows, the kernel that adds up the sums of the
 * ranks also computes the norm, before the sum is rounded.
 *
 * No product. With k = 0 a REDUCE_SCATTER or ALLREDUCE adds up existing rows: A is [m, n], and there is no B.
 */
#ifndef PERSEUS_GEMM_H
#define PERSEUS_GEMM_H

#include <perseus/fused.h>

#ifdef __cplusplus
extern "C" {
#endif

enum prs_gemm_op { PRS_GEMM_ALONE = 0, PRS_GEMM_REDUCE_SCATTER = 1, PRS_GEMM_ALLGATHER = 2, PRS_GEMM_ALLREDUCE = 3 };

/** What a launch computes from finished rows of C, in addition to C. RMS: row / sqrt(mean(row^2) + eps), times a weight
 * for each column. */
enum prs_norm { PRS_NORM_NONE = 0, PRS_NORM_RMS = 1 };

/** A product that a rank takes part in; see the table at the top. The same on all ranks. */
struct prs_gemm_shape {
    enum prs_gemm_op op;
    /** For REDUCE_SCATTER and ALLGATHER, m is a multiple of W. k may be 0 for REDUCE_SCATTER and ALLREDUCE that are
     * neither e4m3 nor gated: A is then [m, n], of sum_dtype, without gaps, and the rank adds A itself to the sum. */
    uint32_t m, n, k;
    uint32_t b_transposed; /**< B is [n, k] */
    uint32_t activation;   /**< enum prs_activation */
    /** Elements from one row of A, B, C to the next: multiples of 8, at least a row. 0: rows without gaps. With gaps
     * the plan takes the fused path. Between nodes the C of an ALLREDUCE has no gaps. */
    uint32_t lda, ldb, ldc;
    /** 1: a gated product, of weights gate | up as torch.cat makes them. The first n / 2 columns of B (rows, when B is
     * [n, k]) are the gate, and C has n / 2 columns: C = activation(gate + bias) * (up + bias of its columns) +
     * residual. n is even. REDUCE_SCATTER and ALLREDUCE take the fused path. */
    uint32_t gated;
    /** 1: the C of an ALLREDUCE may lie in any device memory, without gaps. Except for few rows on one node, the ranks
     * then store the result into memory that all plans of the context share, and a copy from there ends the launch. */
    uint32_t c_anywhere;
    /** Each is an enum prs_dtype. No combinations but these exist. dtype: of A, B, bias and gathered: bf16 (default),
     * fp16, or e4m3 (with a bias of bf16). sum_dtype: of partial sums that travel between ranks: as dtype (default),
     * and bf16 for e4m3. c_dtype: of C and residual: as sum_dtype (default), fp32 or e4m3. fp32 is for weight gradients
     * and logits; with residual = C a launch adds to C; the plan takes the unfused path; not for an ALLREDUCE between
     * nodes. e4m3 is for ALONE and ALLGATHER of dtype e4m3, without a norm or residual; the columns of C are a multiple
     * of 128. */
    uint32_t dtype, sum_dtype, c_dtype;
    uint32_t scaling; /**< enum prs_scaling; of e4m3 only, which needs it */
    /** e4m3: 1: sums stay in the tensor cores, which keep about 14 bits of them, so errors grow with k. 0: they are
     * promoted to fp32 every 128 of k. Between nodes the fused path promotes them anyway. Not with
     * PRS_SCALING_BLOCKS. */
    uint32_t fast_accumulation;
    /** enum prs_norm. Not for ALLGATHER. The columns of C are a multiple of 8, at most 262144. Roundings. If one kernel
     * adds up and normalises (unfused path, one node: REDUCE_SCATTER of up to 16 MB of sums, ALLREDUCE of so few rows
     * that every rank adds up all of them), the norm is computed from fp32 sums: C, `normed` and `quantised` are
     * rounded once each. Otherwise another kernel reads C, so `normed` and `quantised` are computed from rounded
     * numbers. All ranks of an ALLREDUCE get the same bits. */
    uint32_t norm;
    /** A hint: launches have at least so many rows. Launches with fewer rows give right results, but may be slower. The
     * same on all ranks. */
    uint64_t fewest_m;
    uint64_t reserved[PRS_RESERVED_WORDS - 1]; /**< 0 */
};

enum prs_gemm_path { PRS_GEMM_PATH_AUTO = 0, PRS_GEMM_PATH_FUSED = 1, PRS_GEMM_PATH_UNFUSED = 2 };

/** How an SM sends. PRS_GEMM_PACED: the next slab only after the previous one has landed; ALLGATHER: to one rank after
 * the other. PRS_GEMM_UNPACED: as many slabs as its buffers hold; ALLGATHER: to all ranks at once. */
enum prs_gemm_pace { PRS_GEMM_UNPACED = 1, PRS_GEMM_PACED = 2 };

/** The plan chooses each field that is 0. All ranks pass the same values. */
struct prs_gemm_tuning {
    uint32_t path;     /**< enum prs_gemm_path */
    uint32_t clusters; /**< pairs of SMs that work, at most half the SMs */
    uint32_t band;     /**< row pairs (256 rows) that are communicated together */
    uint32_t mover;    /**< ALLGATHER: enum prs_mover; 0 in a plan of another operation */
    uint32_t segments; /**< ALLGATHER by copy engines: number of pieces along k in which a band is sent */
    uint32_t spread;   /**< percent of the compute time over which an SM spreads what it sends; 1: no pauses */
    uint32_t paced;    /**< enum prs_gemm_pace */
    /** Between nodes: tiles of 64 KB, of one band, that travel in one put with one signal. */
    uint32_t tiles_per_signal;
    /** Columns of C in an SM's tile: 256 or 192. With 192, more SMs may have work at the end of a launch; only for an
     * ALLGATHER of bf16 or fp16 on one node that is not gated. */
    uint32_t columns;
    uint64_t reserved[PRS_RESERVED_WORDS - 1]; /**< 0 */
};

/** What a plan of a product has decided. */
struct prs_gemm_info {
    struct prs_gemm_tuning tuning; /**< all fields decided */
    uint64_t workspace_bytes;      /**< device memory on this rank in addition to A, B and C, of this plan alone */
    uint64_t sent_bytes;           /**< per launch over NVLink, from this rank */
    uint64_t far_bytes;            /**< per launch to other nodes, from this rank */
    /** The time that a model predicts. Fused: the start of the pipeline, plus the longer of compute time and
     * communication time. Unfused: their sum. ALLGATHER on one node: a simulation of the schedule, or an estimate if
     * CTAs push. If a near shape was measured: its measured time, scaled by the ratio of m n k. */
    double predicted_us;
    const char *reason;    /**< where the tuning comes from, or why the path was chosen; static text */
    uint64_t shared_bytes; /**< device memory that it shares with other plans of the context, counted in each of them */
    uint64_t reserved[PRS_RESERVED_WORDS];
};

struct prs_gemm_plan;

/** *Collective.* tuning NULL: what was measured for the nearest shape, in the file that PERSEUS_FUSED_TUNING names for
 * rank 0 or in the library's table, if one is near (doc/fused.md); else what opening measures now, for as long as
 * PERSEUS_FUSED_MEASURE_MS of rank 0 says (it then waits for all work of the device, and allocates A, B and C for that
 * time); else the model's choice. A shape takes the unfused path (cuBLASLt, then separate communication) where the
 * fused kernel would be slower, or cannot run it because n or k is not a multiple of 8. prs_gemm_plan_query() says what
 * was chosen, and why. With tuning NULL, on one node, a plan has both paths if the second one is faster for some
 * numbers of rows, and each launch takes the path that is faster for its rows. The decision uses the measurements of
 * the nearest shapes with shape.m rows, half as many, and so on: between two of these numbers both measurements, and
 * below all of them the model. On the fused path a launch takes the tuning that was measured for the nearest of these
 * numbers of rows. -EINVAL: no path can run the shape, or the path in the tuning cannot. -ENOMEM, -EIO. */
PRS_API int prs_gemm_plan_open(struct prs_fused *ctx, const struct prs_gemm_shape *shape,
                               const struct prs_gemm_tuning *tuning, struct prs_gemm_plan **out);
/** Local. No launch of the plan may be in flight on this rank, and no graph with one may run later. NULL does
 * nothing. */
PRS_API void prs_gemm_plan_close(struct prs_gemm_plan *plan);
/** Local; from any thread until the plan is closed. */
PRS_API void prs_gemm_plan_query(const struct prs_gemm_plan *plan, struct prs_gemm_info *info);
/** Local; as prs_gemm_plan_query(). The path, enum prs_gemm_path, of launches of m rows; 0: of shape.m rows. */
PRS_API int prs_gemm_plan_path(const struct prs_gemm_plan *plan, uint32_t m);

/** What one launch works on: device memory, 16-byte aligned, not NULL. */
struct prs_gemm_operands {
    const void *a, *b; /**< k = 0: b is NULL */
    void *c;           /**< not A */
    /** [n], added once to every row of the product; or NULL. ALLREDUCE: the same on all ranks. */
    const void *bias;
    /** As many rows and columns as C on this rank, with the row stride of C; or NULL. Without an activation it may be C
     * itself, so that the launch adds to C. ALLREDUCE: the same on all ranks. */
    const void *residual;
    /** ALLGATHER: [m, k] without gaps, to which the launch also writes the A of all ranks, stacked, for the gradient
     * of B for example; or NULL. */
    void *gathered;
    /** Rows of this launch, the same on all ranks, at most shape.m: A, C and the transfers are then as for a shape of m
     * rows. The rules for shape.m and W hold for m too. 0: shape.m, or the number at m_on_device. On the fused path the
     * kernels of a node compare the number and the plan: if ranks differ, prs_fused_poll_error() returns -EINVAL, and
     * nothing more is launched. On the unfused path, and if ranks take different paths because their numbers of rows
     * differ, differences are not found. */
    uint32_t m;
    /** NULL, or device memory from which the kernel reads the number of rows M when it starts, so that a captured graph
     * serves any M. The field m is then 0, and the plan takes the fused path. A and C have the size for shape.m rows,
     * of which the kernel uses the first ones. It reads the first M rows of A (ALLGATHER: M / W of each rank) and
     * writes the first M rows of C (REDUCE_SCATTER: M / W). The following rows of C, up to the next multiple of 64 in
     * each block, are undefined. M is a multiple of W for REDUCE_SCATTER, and of 64 W for ALLGATHER and for ALLREDUCE
     * between nodes. Otherwise nothing is computed, and prs_fused_poll_error() returns -EINVAL. */
    const uint32_t *m_on_device;
    /** e4m3 only, else NULL. Device memory, 16-byte aligned (PRS_SCALING_TENSOR: 4-byte). Zero, infinite and
     * not-a-number scales have the effect that IEEE 754 defines. PRS_SCALING_TENSOR: one each. PRS_SCALING_ROWS:
     * scale_a [rows of A on this rank], scale_b [n]. PRS_SCALING_BLOCKS: scale_a [k / 128][rows of A], rows contiguous,
     * scale_a_pitch floats from one block of k to the next; scale_b [ceil(n / 128)][k / 128], as checkpoints have it.
     * ALLGATHER: the scales of A travel with its rows, but are not part of `gathered`. */
    const float *scale_a, *scale_b;
    /** A multiple of 4. 0: the rows of A in this launch, with m_on_device those of shape.m. */
    uint64_t scale_a_pitch;
    /** The fields of the norm: 0 without shape.norm, except as quantised_scale says. At least one of `normed` and
     * `quantised` is set. Both have as many rows and columns as C on this rank, without gaps. */
    const void *norm_weight; /**< [columns of C], of sum_dtype; or NULL: ones. ALLREDUCE: the same on all ranks */
    /** The normed rows, of sum_dtype; or NULL. With k = 0 it may be A. */
    void *normed;
    /** The normed rows as e4m3, or NULL: each normed number, not yet rounded, is divided by its scale. A product takes
     * them and their scales as a and scale_a. */
    void *quantised;
    /** fp32. PRS_SCALING_TENSOR: one, which the launch reads. PRS_SCALING_ROWS: one for each row, PRS_SCALING_BLOCKS:
     * [columns / 128][rows], rows contiguous, quantised_scale_pitch floats from one block to the next; the launch
     * writes these: the largest magnitude / 448, at least 2^-126. Where c_dtype is e4m3 these are the scales of C,
     * which need quantised_scaling PRS_SCALING_BLOCKS; `quantised` is NULL. */
    float *quantised_scale;
    uint64_t quantised_scale_pitch; /**< 0: the rows of C on this rank in this launch; with m_on_device, the largest
                                     * number of rows */
    uint32_t quantised_scaling;     /**< enum prs_scaling; with `quantised` */
    float norm_eps;                 /**< added to the mean; finite, not negative */
    uint64_t reserved[PRS_RESERVED_WORDS]; /**< 0 */
};

/** Enqueues one launch, by the rules of launches (fused.h). */
PRS_API int prs_gemm_launch(struct prs_gemm_plan *plan, const struct prs_gemm_operands *operands,
                            struct CUstream_st *stream);

/** *Collective.* Times the candidates for this shape, the unfused path too, on the given operands (C is overwritten),
 * `rounds` launches each, and returns the candidate whose slowest rank is fastest. Its path is set; fields that are 0
 * are left to the plan. With PERSEUS_FUSED_TUNING set, rank 0 also appends it to that file. Waits for the launches.
 * Errors: those of prs_gemm_plan_open() and prs_gemm_launch(). */
PRS_API int prs_gemm_autotune(struct prs_fused *ctx, const struct prs_gemm_shape *shape,
                              const struct prs_gemm_operands *operands, uint32_t rounds, struct CUstream_st *stream,
                              struct prs_gemm_tuning *best);

#ifdef __cplusplus
}
#endif

#endif
