/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention: how the tensors of a launch, and staging memory, lie for the copy engine inside the SMs. */
#ifndef PERSEUS_FUSED_ATTENTION_TENSORS_H
#define PERSEUS_FUSED_ATTENTION_TENSORS_H

#include <perseus/attention.h>

#include "fused/attention/layout.h"

/* What is loaded or fetched at one time. */
struct prs_attention_box {
    uint32_t rows;
    bool swizzled;
};

/* Names the flags of the family (core/sync.h). */
const char *prs_attention_awaited(uint32_t what);

/* Of the scores. */
void prs_attention_set_scale(const struct prs_attention_shape *shape, struct prs_attention_args *a);

/* Strides of a tensor with `heads` heads. s: any schedule of the shape. */
struct prs_attention_strides prs_attention_strides_of(const struct prs_attention_shape *shape,
                                                      const struct prs_attention_schedule *s, uint32_t heads);

/* Size of a tensor in the last coordinate (layout.h). */
uint32_t prs_attention_planes(const struct prs_attention_shape *shape, const struct prs_attention_schedule *s,
                              uint32_t heads);

/* A tensor of the caller, or `count` of them one after the other, in the five dimensions of layout.h. 0, -EINVAL or
 * -ENOTSUP, as prs_tensor_view_encode(). */
int prs_attention_encode(const struct prs_attention_shape *shape, const struct prs_attention_schedule *s,
                         const void *base, uint32_t count, uint32_t heads, struct prs_attention_box box,
                         CUtensorMap *map);

/* Staging memory of what is pushed: segments of one head of one rank, one after the other, each without gaps. */
int prs_attention_encode_stages(const struct prs_attention_shape *shape, const struct prs_attention_schedule *s,
                                const void *base, struct prs_attention_box box, CUtensorMap *map);

#endif
