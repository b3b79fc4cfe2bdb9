/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/gemm/paths.h"

#include <errno.h>
#include <string.h>

#include "fused/gemm/tuning.h"

static enum prs_gemm_path faster_path(const struct prs_gemm_plan *p, uint32_t rows)
{
    if (rows == p->shape.m)
        return p->info.tuning.path;
    return prs_tuning_unfused_is_faster(&p->shape, rows, &p->args.schedule.place, p->info.tuning.clusters, p->times)
               ? PRS_GEMM_PATH_UNFUSED
               : PRS_GEMM_PATH_FUSED;
}

/* The most rows for which the other path is faster; 0: there are none. A fused launch takes as long for all rows of a
 * step, and an unfused one longer for more rows: so the fewest and the most rows of a step say what holds in it. */
static uint32_t most_of_other(const struct prs_gemm_plan *p)
{
    uint32_t world = p->args.schedule.place.world, step = world * PRS_PAIR_M;
    uint64_t fewest = p->shape.fewest_m > world ? p->shape.fewest_m : world;
    for (uint64_t end = prs_ceil_div(p->shape.m, step) * (uint64_t)step; end >= fewest; end -= step) {
        uint32_t most = (uint32_t)(end < p->shape.m ? end : p->shape.m);
        uint32_t least = (uint32_t)(end - step + world > fewest ? end - step + world : fewest);
        if (faster_path(p, most) != p->info.tuning.path ||
            (least <= most && faster_path(p, least) != p->info.tuning.path))
            return most;
    }
    return 0;
}

static bool may_have_both(const struct prs_gemm_plan *p)
{
    const struct prs_place *at = &p->args.schedule.place;
    return at->world > 1 && at->nodes == 1 && prs_tuning_can_unfuse(&p->shape) &&
           prs_tuning_can_fuse(&p->shape, at->world);
}

int prs_paths_open(struct prs_gemm_plan *p)
{
    struct prs_gemm_tuning tuning = {.path = p->info.tuning.path == PRS_GEMM_PATH_FUSED ? PRS_GEMM_PATH_UNFUSED
                                                                                        : PRS_GEMM_PATH_FUSED};
    struct prs_gemm_shape shape = p->shape;
    struct prs_table_found found;
    int r;
    if (!may_have_both(p))
        return 0;
    memcpy(&found, p->base.call.hint.first, sizeof(found)); /* what rank 0 found */
    prs_tuning_path_times(&shape, &p->args.schedule.place, p->info.tuning.clusters, &found, p->times);
    shape.m = most_of_other(p);
    if (shape.m == 0)
        return 0;
    r = prs_gemm_plan_open_as(p->base.ctx, &shape, &tuning, NULL, &p->other);
    return r == -ENOMEM || r == -ENOTSUP ? 0 : r;
}

struct prs_gemm_plan *prs_paths_plan(struct prs_gemm_plan *p, const struct prs_gemm_operands *x)
{
    struct prs_gemm_plan *other = p->other;
    enum prs_gemm_path path;
    if (!other)
        return p;
    if (x->m_on_device) /* of any number of rows, and only the fused path reads it */
        return p;
    if (x->m == 0 || x->m > other->shape.m)
        return p;
    path = faster_path(p, x->m);
    return path == p->info.tuning.path ? p : other;
}

int prs_gemm_plan_path(const struct prs_gemm_plan *p, uint32_t m)
{
    struct prs_gemm_operands x = {.m = m};
    return (int)prs_paths_plan((struct prs_gemm_plan *)p, &x)->info.tuning.path;
}
