/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Quantising matrices to FP8 (e4m3) and scales, for products (gemm.h) and MoE (moe.h). Numbers that share a scale are
 * divided by it: it is their largest magnitude / 448, and at least 2^-126. So zeros stay zeros, and nothing saturates.
 * A number that is not one stays so, alone: its magnitude does not count. An infinity makes its scale infinite and
 * itself not a number, so all products with its group are not numbers. With a given scale, what is larger than 448
 * times the scale becomes 448, as in torch after clamp(-448, 448). The numbers are multiplied by 1 / scale, and both
 * divisions round correctly: fused/core/quantise.cuh has the same in torch, bit by bit.
 */
#ifndef PERSEUS_QUANTISE_H
#define PERSEUS_QUANTISE_H

#include <perseus/fused.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Which numbers share a scale. */
enum prs_quantise_group {
    PRS_QUANTISE_TENSOR = 1, /**< all of the matrix; two kernels, but for a given scale */
    PRS_QUANTISE_ROWS = 2,   /**< each row */
    PRS_QUANTISE_BLOCKS = 3, /**< each 128 columns of a row: tokens, and A of products */
    PRS_QUANTISE_SQUARES = 4 /**< each 128 x 128, at the last rows fewer: weights */
};

/** A matrix: device memory, 16-byte aligned, scales 4-byte. */
struct prs_quantise {
    const void *from; /**< [rows, columns] */
    void *to;         /**< e4m3 [rows, columns] */
    /** Of group (i, j) at i * scale_row + j * scale_column. */
    float *scales;
    uint32_t dtype; /**< enum prs_dtype, of `from`: bf16 (default), fp16 or fp32 */
    uint32_t group; /**< enum prs_quantise_group */
    uint32_t rows;
    uint32_t columns; /**< a multiple of 16; of BLOCKS and SQUARES, of 128 */
    /** Elements from one row to the next, multiples of 16. 0: rows without gaps. */
    uint64_t from_pitch, to_pitch;
    /** Of scales, both 0: one after the other, those of a row of groups together. 1 and a pitch: as the scale_a of
     * products with PRS_SCALING_BLOCKS lie. */
    uint64_t scale_row, scale_column;
    uint32_t given;                        /**< TENSOR: 1: *scales is given, and not written */
    uint32_t sms;                          /**< that work at most; 0: all of the device */
    uint64_t reserved[PRS_RESERVED_WORDS]; /**< 0 */
};

/** Enqueues it on the current device. Local, without a context; in graphs too. 0, -EINVAL, or -EIO. */
PRS_API int prs_fused_quantise(const struct prs_quantise *x, struct CUstream_st *stream);

#ifdef __cplusplus
}
#endif

#endif
