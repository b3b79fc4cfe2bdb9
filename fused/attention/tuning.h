/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention: chooses the kernel, the message sizes, and how much memory to use. */
#ifndef PERSEUS_FUSED_ATTENTION_TUNING_H
#define PERSEUS_FUSED_ATTENTION_TUNING_H

#include <perseus/attention.h>

#include "fused/attention/layout.h"
#include "fused/core/element.h"
#include "fused/core/place.h"

/* The type of queries, keys, values and results. */
enum { PRS_ATTENTION_TYPE = PRS_DTYPE_BF16 };

/* Columns of values and results. */
static inline uint32_t prs_attention_value_dim(const struct prs_attention_shape *shape)
{
    return shape->value_dim != 0 ? (uint32_t)shape->value_dim : shape->head_dim;
}

/* Bytes of one position of one head, of the wider tensor. */
static inline uint32_t prs_attention_row_bytes(const struct prs_attention_shape *shape)
{
    uint32_t values = prs_attention_value_dim(shape);
    return (shape->head_dim > values ? shape->head_dim : values) * prs_element_bytes(PRS_ATTENTION_TYPE);
}

/* 0, or -EINVAL for a shape that no kernel can run. */
int prs_attention_tuning_check(const struct prs_attention_shape *shape, uint32_t world);

/* Whether the shape's head_dims have kernels of every kind: several blocks, striped, between nodes, backward. */
bool prs_attention_tuning_plain(const struct prs_attention_shape *shape);

/* The default block_rows; 0: only one kernel is compiled. */
uint32_t prs_attention_tuning_block(const struct prs_attention_shape *shape, const struct prs_place *place);

/* The default overlap; 0: that of the first kernel. */
uint32_t prs_attention_tuning_overlap(const struct prs_attention_shape *shape, const struct prs_place *place);

/* Decides every field of info->tuning except workspace_limit, fills the schedule, and predicts the time. ctas: how many
 * can run at once; block_rows, overlap and tile_rows: those of the chosen kernel. 0, -EINVAL, or -ENOMEM. */
int prs_attention_tuning_choose(const struct prs_attention_shape *shape, const struct prs_place *place, uint32_t ctas,
                                struct prs_attention_info *info, struct prs_attention_schedule *schedule);

/* Bytes of staging memory. */
uint64_t prs_attention_tuning_staging(const struct prs_attention_shape *shape, const struct prs_attention_schedule *s);

/* Fills in the bytes that a launch sends, and how long it takes: of a launch with the schedule, whose shape has the
 * launch's size. The tuning is decided. */
void prs_attention_tuning_predict(const struct prs_attention_shape *shape, const struct prs_attention_schedule *s,
                                  struct prs_attention_info *info);

/* Finds the size of a launch: *launch is the plan's shape with the launch's batch and seq, which are the numbers of its
 * operands. 0 or -EINVAL. */
int prs_attention_tuning_launch(const struct prs_attention_shape *plan, const struct prs_place *place, uint64_t batch,
                                uint64_t seq, struct prs_attention_shape *launch);

/* Finds the scale of a launch, whose operands say `launch`. 0 or -EINVAL. */
int prs_attention_tuning_scale(const struct prs_attention_shape *plan, double launch, double *scale);

/* Whether two launches of a plan have the same size. */
static inline bool prs_attention_same_size(const struct prs_attention_shape *a, const struct prs_attention_shape *b)
{
    return a->batch == b->batch && a->seq == b->seq;
}

/* SM clocks between two pieces of messages that a CTA sends, by tuning.spread. */
uint32_t prs_attention_tuning_gap(const struct prs_attention_info *info);

#endif
