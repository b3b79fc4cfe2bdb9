/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention: how the tensors of a launch, and staging memory, lie for TMA (core/tensor_map.h). */
#ifndef PERSEUS_FUSED_ATTENTION_TENSORS_H
#define PERSEUS_FUSED_ATTENTION_TENSORS_H

#include <perseus/attention.h>

#include "fused/attention/layout.h"
#include "fused/core/plan.h"

/* The part of a tensor that is loaded or fetched at a time. */
struct prs_attention_box {
    uint32_t rows;
    bool swizzled;
    bool values; /* the tensor has the columns of values */
};

/* Names the flags of the family (core/sync.h). */
const char *prs_attention_awaited(uint32_t what);

/* Sets what the scores are multiplied by. */
void prs_attention_set_scale(const struct prs_attention_shape *shape, struct prs_attention_args *a);

/* Sets what the kernels of striped attention need to know of the shape; each launch adds sequences and sinks. Does
 * nothing for other shapes. Call it after prs_attention_set_scale(). */
void prs_attention_set_stripes(const struct prs_attention_shape *shape, struct prs_attention_args *a);

/* Adds the fields of striped attention to those in which the ranks' plans must agree. */
void prs_attention_striped_terms(struct prs_plan *p, const struct prs_attention_shape *shape);

/* Bytes of prs_span for each position of packed sequences; 0: not packed. */
uint64_t prs_attention_parts_bytes(const struct prs_attention_shape *shape);

/* Checks the sequences and sinks of a launch. 0 or -EINVAL. */
int prs_attention_check_striped(const struct prs_attention_shape *shape, const int32_t *cu_seqlens, uint32_t sequences,
                                const float *sinks);

/* Strides of a tensor with `heads` heads of `columns` columns. s: any schedule of the shape. */
struct prs_attention_strides prs_attention_strides_of(const struct prs_attention_shape *shape,
                                                      const struct prs_attention_schedule *s, uint32_t heads,
                                                      uint32_t columns);

/* Size of a tensor in the last coordinate (layout.h). */
uint32_t prs_attention_planes(const struct prs_attention_shape *shape, const struct prs_attention_schedule *s,
                              uint32_t heads);

/* Bytes of a row of a head: of keys or values. */
uint32_t prs_attention_kind_bytes(const struct prs_attention_shape *shape, uint32_t kind);

/* Where copy engines put a tensor of the slice at position `order` in staging memory, in bytes. */
uint64_t prs_attention_copied_at(const struct prs_attention_shape *shape, const struct prs_attention_schedule *s,
                                 uint32_t order, uint32_t kind);

/* Encodes a tensor of the caller, or `count` of them one after the other, in the five dimensions of layout.h. 0,
 * -EINVAL or -ENOTSUP, as prs_tensor_view_encode(). */
int prs_attention_encode(const struct prs_attention_shape *shape, const struct prs_attention_schedule *s,
                         const void *base, uint32_t count, uint32_t heads, struct prs_attention_box box,
                         CUtensorMap *map);

/* Encodes the staging memory of pushed data: segments of one head of one rank, one after the other, each without
 * gaps. */
int prs_attention_encode_stages(const struct prs_attention_shape *shape, const struct prs_attention_schedule *s,
                                const void *base, struct prs_attention_box box, CUtensorMap *map);

#endif
