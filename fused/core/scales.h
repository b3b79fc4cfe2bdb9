/* SPDX-License-Identifier: Apache-2.0 */
/* The scales of a product of e4m3: the value of an element of A or B is its number times its scale. A rank multiplies
 * its own sums by its own scales, in fp32, before it rounds and sends them, or adds those of other ranks. The scales of
 * ranks may differ. Scales of blocks differ along K, so the sum of each block is multiplied when it is promoted to
 * fp32. Plain C. */
#ifndef PERSEUS_FUSED_SCALES_H
#define PERSEUS_FUSED_SCALES_H

#include <stdint.h>

enum { PRS_SCALE_BLOCK = 128 }; /* rows and columns of a block of B, columns of one of A: as many as a stage has of K */

struct prs_scales {
    const float *a, *b;
    uint64_t a_pitch; /* scales of blocks: floats from the scales of one block of K to those of the next */
    /* floats from one row of A, or column of B, to the next; 0: one scale for all. With scales of blocks, only MoE uses
     * it, for A */
    uint32_t a_step, b_step;
    uint32_t k_blocks; /* how many blocks along K; 0: the finished sum is scaled */
    uint32_t sent;     /* all-gather: how many scales travel with each row of A */
};

/* A result in e4m3 for the next product: a scale for each row and 128 columns. */
struct prs_quantised_result {
    uint8_t *to; /* NULL: the result has another type */
    float *scales;
    uint64_t pitch, scales_pitch; /* bytes from row to row; floats from one block of columns to the next */
};

#endif
