/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Quantising matrices to FP8 (e4m3) and scales, for products (gemm.h) and MoE (moe.h). Each number is divided by the
 * scale of its group. The scale is the largest magnitude in the group / 448, and at least 2^-126. So zeros stay zeros,
 * and nothing saturates. A not-a-number stays one, and its magnitude does not count. An infinity makes its scale
 * infinite and becomes a not-a-number, so all products with its group are not-a-numbers. With a given scale, numbers
 * larger than 448 times the scale become 448, as in torch after clamp(-448, 448). The numbers are multiplied by 1 /
 * scale, and both divisions round correctly: fused/core/quantise.cuh has torch code that gives the same bits.
 */
#ifndef PERSEUS_QUANTISE_H
#define PERSEUS_QUANTISE_H

#include <perseus/fused.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Which numbers share a scale. */
enum prs_quantise_group {
    PRS_QUANTISE_TENSOR = 1, /**< one scale for the whole matrix; two kernels, or one for a given scale */
    PRS_QUANTISE_ROWS = 2,   /**< each row */
    PRS_QUANTISE_BLOCKS = 3, /**< one for each 128 columns of a row: for tokens, and A of products */
    PRS_QUANTISE_SQUARES = 4 /**< one for each 128 x 128, with fewer rows at the end: for weights */
};

/** A matrix: device memory, 16-byte aligned, scales 4-byte. */
struct prs_quantise {
    const void *from; /**< [rows, columns] */
    void *to;         /**< e4m3 [rows, columns] */
    /** The scale of group (i, j) is at i * scale_row + j * scale_column. */
    float *scales;
    uint32_t dtype; /**< enum prs_dtype, of `from`: bf16 (default), fp16 or fp32 */
    uint32_t group; /**< enum prs_quantise_group */
    uint32_t rows;
    uint32_t columns; /**< a multiple of 16; for BLOCKS and SQUARES, of 128 */
    /** Elements from one row to the next, multiples of 16. 0: rows without gaps. */
    uint64_t from_pitch, to_pitch;
    /** Strides of the scales. Both 0: the scales of a row of groups are contiguous, and rows of groups follow each
     * other. scale_row 1 and scale_column a pitch: the layout of scale_a of products with PRS_SCALING_BLOCKS. */
    uint64_t scale_row, scale_column;
    uint32_t given;                        /**< TENSOR: 1: *scales is given, and not written */
    uint32_t sms;                          /**< SMs to use at most; 0: all of the device */
    uint64_t reserved[PRS_RESERVED_WORDS]; /**< 0 */
};

/** Enqueues it on the current device. Local, without a context; in graphs too. 0, -EINVAL, or -EIO. */
PRS_API int prs_fused_quantise(const struct prs_quantise *x, struct CUstream_st *stream);

#ifdef __cplusplus
}
#endif

#endif
