/* SPDX-License-Identifier: Apache-2.0 */
/* Descriptors for TMA, the copy unit inside the SMs. */
#ifndef PERSEUS_FUSED_TENSOR_MAP_H
#define PERSEUS_FUSED_TENSOR_MAP_H

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

/* Describes a matrix of `planes` planes of rows x columns in boxes of box_rows rows of PRS_STAGE_ROW bytes. swizzled:
 * the order that the tensor cores and fill_result_slab() use. planes 0: a plain two-dimensional map. */
struct prs_tensor {
    const void *base;
    uint32_t type; /* enum prs_dtype */
    uint64_t columns, rows, planes;
    /* elements from one row to the next, also from the last row of a plane to the next plane; 0: rows without gaps */
    uint64_t pitch;
    uint32_t box_rows;
    bool swizzled;
};

/* 0, -EINVAL (alignment, size), -ENOTSUP (driver too old). */
int prs_tensor_map_encode(const struct prs_tensor *t, CUtensorMap *map);

/* Describes any tensor of five dimensions, the first without gaps; stride[i]: bytes from one element of dimension
 * i + 1 to the next, multiples of 16 in any order. The part of a box beyond the tensor reads as zero. */
struct prs_tensor_view {
    const void *base;
    uint32_t type; /* enum prs_dtype */
    uint64_t size[5], stride[4];
    uint32_t box[5];
    bool swizzled;
};

/* 0, -EINVAL or -ENOTSUP, as prs_tensor_map_encode(). */
int prs_tensor_view_encode(const struct prs_tensor_view *v, CUtensorMap *map);

#endif
