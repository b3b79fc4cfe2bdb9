/* SPDX-License-Identifier: Apache-2.0 */
/* The types of elements, for the host: one row for each type. element.cuh is for kernels. */
#ifndef PERSEUS_FUSED_ELEMENT_H
#define PERSEUS_FUSED_ELEMENT_H

#include <cuda.h>
#include <library_types.h>
#include <stdbool.h>
#include <stdint.h>

#include <perseus/fused.h>

#include "fused/core/tile.h"

struct prs_element {
    const char *name;
    uint32_t bytes;
    bool multiplies; /* A and B of a product may be of this type; the next field is only for such types */
    uint32_t sum;    /* enum prs_dtype: the type in which partial sums are sent */
    CUtensorMapDataType tensor;
    cudaDataType_t library; /* its name in cuBLASLt */
};

#ifdef __cplusplus
extern "C" {
#endif

/* type: enum prs_dtype. NULL: there is no such type, or it is PRS_DTYPE_DEFAULT. */
const struct prs_element *prs_element_find(uint32_t type);

#ifdef __cplusplus
}
#endif

/* The type must exist. */
static inline uint32_t prs_element_bytes(uint32_t type)
{
    return prs_element_find(type)->bytes;
}

/* The elements of a vector of 16 bytes. Rows of a tensor map have so many elements, or a multiple. */
static inline uint32_t prs_element_vector(uint32_t type)
{
    return 16 / prs_element_bytes(type);
}

/* The elements of K in a stage: one step of the tile product. */
static inline uint32_t prs_element_step(uint32_t type)
{
    return PRS_STAGE_ROW / prs_element_bytes(type);
}

#endif
