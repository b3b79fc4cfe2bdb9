/* SPDX-License-Identifier: Apache-2.0 */
/* Chooses the path, the number of SMs and the message sizes: what the caller gives, or what was measured (table.h), and
 * the rest by an analytic model. */
#ifndef PERSEUS_FUSED_GEMM_TUNING_H
#define PERSEUS_FUSED_GEMM_TUNING_H

#include "fused/core/context.h"
#include "fused/gemm/layout.h"

struct prs_table_found;

/* Decides every field of info->tuning, and predicts the time. wanted: the caller's values, or NULL. found: what was
 * measured, or NULL; the caller's values override it. clusters: how many can run at once. 0, or -EINVAL: a field of
 * wanted is wrong, or it forces a path that cannot run. */
int prs_tuning_choose(const struct prs_fused *ctx, const struct prs_gemm_shape *shape,
                      const struct prs_gemm_tuning *wanted, const struct prs_table_found *found, uint32_t clusters,
                      struct prs_gemm_info *info);

/* Whether copy engines move an all-gather's blocks. */
static inline bool prs_tuning_copies(const struct prs_gemm_tuning *t)
{
    return t->mover == PRS_MOVED_BY_COPY_ENGINES;
}

/* Whether the fused kernels, or the unfused path, can run the shape, even if they are slower. */
bool prs_tuning_can_fuse(const struct prs_gemm_shape *shape, uint32_t world);
bool prs_tuning_can_unfuse(const struct prs_gemm_shape *shape);

/* Whether a kernel with tiles of PRS_NARROW_N columns can run the shape. */
bool prs_tuning_can_be_narrow(const struct prs_gemm_shape *shape, const struct prs_place *at);

/* What was measured of both paths for a class of rows (table.h). */
struct prs_path_times {
    float fused_us, unfused_us; /* for the most rows of the class; 0: unknown */
    float unfused_more;         /* factor by which to multiply the model's time of the unfused path; 0: unknown */
};
/* Fills in times[PRS_TABLE_CLASSES], by class. */
void prs_tuning_path_times(const struct prs_gemm_shape *shape, const struct prs_place *at, uint32_t clusters,
                           const struct prs_table_found *found, struct prs_path_times *times);
/* Whether the unfused path should be faster for so many rows, at most shape->m, on one node. Both can run the shape.
 * Between two classes that were measured, times lie between theirs: the unfused path's by the rows, the fused one's by
 * the pairs of row tiles. Elsewhere the model says how they depend on the rows. */
bool prs_tuning_unfused_is_faster(const struct prs_gemm_shape *shape, uint32_t rows, const struct prs_place *at,
                                  uint32_t clusters, const struct prs_path_times *times);

/* Carries the times of both paths (us, by enum prs_gemm_path; 0: unknown), of which t->path's was measured with t, from
 * one shape to a near one: by the model. For one rank alone, and between nodes, there is no model: both times are then
 * scaled by the ratio of the products. clusters: used if t has no value. */
void prs_tuning_carry(const struct prs_gemm_shape *from, const struct prs_gemm_shape *to, const struct prs_place *at,
                      uint32_t clusters, const struct prs_gemm_tuning *t, double us[]);

/* Up to how many rows of the shape the unfused path adds up by inboxes (unfused/inbox.h), and up to how many of them in
 * one hop; 0: none. */
uint32_t prs_tuning_inbox_rows(const struct prs_gemm_shape *shape, const struct prs_place *at);
uint32_t prs_tuning_one_hop_rows(const struct prs_gemm_shape *shape, const struct prs_place *at);

/* SM clocks between two sends, by t->spread. */
void prs_tuning_gaps(const struct prs_gemm_shape *shape, const struct prs_gemm_tuning *t, const struct prs_schedule *s,
                     uint32_t *push, uint32_t *store);

#endif
