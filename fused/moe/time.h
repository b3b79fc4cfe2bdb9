/* SPDX-License-Identifier: Apache-2.0 */
/* Predicts the time of a launch in which all ranks have shape.tokens tokens and the choices are spread evenly over
 * experts. Pure functions. */
#ifndef PERSEUS_FUSED_MOE_TIME_H
#define PERSEUS_FUSED_MOE_TIME_H

#include <stdint.h>

#include <perseus/moe.h>

struct prs_moe_time {
    uint64_t sent_bytes; /* over NVLink, from a rank */
    /* us; of the first product, or the only one, if no SM waits for another one and sums in e4m3 take no longer:
     * plans pace the sending of rows by it */
    double product;
    double all; /* us */
};

/* The time of a dispatch with its product, or of a layer, as several kernels. row_bytes: bytes of a token;
 * element_bytes: of a number. */
struct prs_moe_time prs_moe_time_of_kernels(const struct prs_moe_shape *s, uint32_t world, uint32_t row_bytes,
                                            uint32_t element_bytes);
/* The time of a layer as one kernel (few.h), us. *tile: the rows of a tile that are then fastest; may be NULL. */
double prs_moe_time_of_one(const struct prs_moe_shape *s, uint32_t world, uint32_t element_bytes, uint32_t *tile);

#endif
