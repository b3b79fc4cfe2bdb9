/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention: how the tensors of a launch, and staging memory, lie for TMA (core/tensor_map.h). */
#ifndef PERSEUS_FUSED_ATTENTION_TENSORS_H
#define PERSEUS_FUSED_ATTENTION_TENSORS_H

#include <perseus/attention.h>

#include "fused/attention/kernels.h"
#include "fused/attention/layout.h"
#include "fused/core/plan.h"

/* The part of a tensor that one tensor copy moves. */
struct prs_attention_box {
    uint32_t rows;
    bool swizzled;
    bool values; /* rows are as wide as those of values */
};

/* What a flag of attention stands for, for the text of an error (core/sync.h). NULL: no flag of attention. */
const char *prs_attention_awaited(uint32_t what);

/* Sets the scale of a launch, and the cap. */
void prs_attention_set_scale(const struct prs_attention_shape *shape, double scale, struct prs_attention_args *a);

/* Sets stripes and window; each launch adds sequences, ranks of stripes and sinks. Does nothing if the shape is not
 * striped. */
void prs_attention_set_stripes(const struct prs_attention_shape *shape, struct prs_attention_args *a);

/* Adds the scale and the fields of striped attention to the terms of the plan, which must be the same on all ranks. */
void prs_attention_score_terms(struct prs_plan *p, const struct prs_attention_shape *shape);

/* Memory for what is prepared before a striped launch (struct prs_prepare_args): bytes, 0 if not striped; and how it is
 * divided. */
uint64_t prs_attention_prepared_bytes(const struct prs_attention_shape *shape, uint32_t world);
void prs_attention_place_prepared(const struct prs_attention_shape *shape, uint32_t world, uint8_t *memory,
                                  struct prs_prepare_args *x);

/* What a striped launch has in addition to others. */
struct prs_striped_operands {
    const int32_t *cu_seqlens;
    uint32_t sequences;
    const uint32_t *stripe_ranks;
    const float *sinks;
};

/* Checks them. 0 or -EINVAL. */
int prs_attention_check_striped(const struct prs_attention_shape *shape, const struct prs_striped_operands *x);
/* Sets what is prepared before a launch of this shape, and the tables that the launch reads. */
void prs_attention_take_striped(const struct prs_attention_shape *launch, const struct prs_plan *p,
                                const struct prs_striped_operands *x, struct prs_prepare_args *prepare,
                                struct prs_attention_stripes *stripes);

/* Strides of a tensor with `heads` heads of `columns` columns. s: any schedule of the shape. */
struct prs_attention_strides prs_attention_strides_of(const struct prs_attention_shape *shape,
                                                      const struct prs_attention_schedule *s, uint32_t heads,
                                                      uint32_t columns);

/* Size of a tensor in TMA's last dimension (struct prs_attention_strides). */
uint32_t prs_attention_planes(const struct prs_attention_shape *shape, const struct prs_attention_schedule *s,
                              uint32_t heads);

/* Bytes of one position of one head of the keys or values. */
uint32_t prs_attention_kind_bytes(const struct prs_attention_shape *shape, uint32_t kind);

/* The offset in staging memory of the keys or values that copy engines bring from the slice at position `order`. */
uint64_t prs_attention_copied_at(const struct prs_attention_shape *shape, const struct prs_attention_schedule *s,
                                 uint32_t order, uint32_t kind);

/* Encodes a tensor in the caller's layout, or `count` of them one after the other, for TMA (struct
 * prs_attention_strides). 0, -EINVAL or -ENOTSUP, as prs_tensor_view_encode(). */
int prs_attention_encode(const struct prs_attention_shape *shape, const struct prs_attention_schedule *s,
                         const void *base, uint32_t count, uint32_t heads, struct prs_attention_box box,
                         CUtensorMap *map);

/* Encodes staging memory for pushed data: stages one after the other, each with the rows of one segment of one head,
 * without gaps between them. */
int prs_attention_encode_stages(const struct prs_attention_shape *shape, const struct prs_attention_schedule *s,
                                const void *base, struct prs_attention_box box, CUtensorMap *map);

#endif
