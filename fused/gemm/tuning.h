/* SPDX-License-Identifier: Apache-2.0 */
/* Which path, how many SMs, which grain: the analytic default, overridden by what the caller or the tuning file says.
 */
#ifndef PERSEUS_FUSED_TUNING_H
#define PERSEUS_FUSED_TUNING_H

#include "fused/core/context.h"
#include "fused/gemm/layout.h"

/* The entry of the file that PERSEUS_FUSED_TUNING names. False: none. */
bool prs_tuning_read(const struct prs_fused *ctx, const struct prs_fused_shape *shape, struct prs_fused_tuning *t);

/* Decides every field of info->tuning, and predicts. wanted: of the caller, or of the file (from_file), or NULL.
 * clusters: how many can run at once. 0, or -EINVAL when the fused path is demanded and cannot run the shape. */
int prs_tuning_choose(const struct prs_fused *ctx, const struct prs_fused_shape *shape,
                      const struct prs_fused_tuning *wanted, bool from_file, uint32_t clusters,
                      struct prs_fused_plan_info *info);

/* An all-gather's blocks are moved by copy engines. */
static inline bool prs_tuning_copies(const struct prs_fused_tuning *t)
{
    return t->mover == PRS_MOVED_BY_COPY_ENGINES;
}

/* The fused kernels can run the shape, whether or not they win. */
bool prs_tuning_can_fuse(const struct prs_fused_shape *shape, uint32_t world);

/* SM clocks between two sends, by t->spread. */
void prs_tuning_gaps(const struct prs_fused_shape *shape, const struct prs_fused_tuning *t,
                     const struct prs_schedule *s, uint32_t *push, uint32_t *store);

/* Appends to the file that PERSEUS_FUSED_TUNING names, if any. 0 or -errno. */
int prs_tuning_append(const struct prs_fused_shape *shape, const struct prs_place *at,
                      const struct prs_fused_tuning *t);

#endif
