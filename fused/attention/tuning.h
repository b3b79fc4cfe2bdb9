/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention: which kernel, which grain, how much memory. */
#ifndef PERSEUS_FUSED_ATTENTION_TUNING_H
#define PERSEUS_FUSED_ATTENTION_TUNING_H

#include <perseus/fused.h>
#include "fused/attention/layout.h"
#include "fused/core/place.h"

/* 0, or -EINVAL for a shape that no kernel can run. */
int prs_attention_tuning_check(const struct prs_attention_shape *shape, uint32_t world);

/* Keys of one step where the caller has not said; 0: the only kernel there is. */
uint32_t prs_attention_tuning_block(const struct prs_attention_shape *shape, const struct prs_place *place);

/* The same of the overlap: prs_attention_tuning.overlap; 0: the first kernel there is. */
uint32_t prs_attention_tuning_overlap(const struct prs_attention_shape *shape, const struct prs_place *place);

/* Decides every field of info->tuning but workspace_limit, which is set, fills the schedule, and predicts. ctas: how
 * many can run at once; block_rows, overlap and tile_rows are those of the kernel that was found. 0, -EINVAL, or
 * -ENOMEM. */
int prs_attention_tuning_choose(const struct prs_attention_shape *shape, const struct prs_place *place, uint32_t ctas,
                                struct prs_attention_info *info, struct prs_attention_schedule *schedule);

/* Bytes of staging memory. */
uint64_t prs_attention_tuning_staging(const struct prs_attention_shape *shape, const struct prs_attention_schedule *s);

/* SM clocks between two messages of a CTA, by t->spread. */
uint32_t prs_attention_tuning_gap(const struct prs_attention_info *info);

#endif
