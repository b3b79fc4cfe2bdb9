/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/gemm/paths.h"

#include <errno.h>
#include <string.h>

#include "fused/gemm/tuning.h"

static enum prs_gemm_path faster_path(const struct prs_gemm_plan *p, uint32_t rows)
{
    if (rows == p->shape.m || !p->both)
        return p->info.tuning.path;
    return prs_tuning_unfused_is_faster(&p->shape, rows, &p->args.schedule.place, p->info.tuning.clusters, p->times)
               ? PRS_GEMM_PATH_UNFUSED
               : PRS_GEMM_PATH_FUSED;
}

/* The most rows up to `limit` for which the path is faster; 0: there are none. A fused launch takes the same time for
 * all numbers of rows in a step; an unfused one takes longer for more rows. So it is enough to look at the fewest and
 * the most rows of a step, and at numbers of rows in it that were measured. */
static uint32_t most_rows(const struct prs_gemm_plan *p, enum prs_gemm_path path, uint32_t limit)
{
    uint32_t world = p->args.schedule.place.world, step = world * PRS_PAIR_M;
    uint64_t fewest = p->shape.fewest_m > world ? p->shape.fewest_m : world;
    uint32_t measured = 0;
    for (uint32_t i = PRS_TABLE_CLASSES; i-- > 0;) {
        uint32_t rows = p->shape.m >> i;
        if (rows % world == 0 && rows >= fewest && rows <= limit && faster_path(p, rows) == path)
            measured = rows;
    }
    for (uint64_t end = prs_ceil_div(limit, step) * (uint64_t)step; end >= fewest; end -= step) {
        uint32_t most = (uint32_t)(end < limit ? end : limit);
        uint32_t least = (uint32_t)(end - step + world > fewest ? end - step + world : fewest);
        if (most <= measured)
            break;
        if (most >= least && (faster_path(p, most) == path || faster_path(p, least) == path))
            return most;
    }
    return measured;
}

/* The most rows of a class (table.h). A number of rows belongs to the class whose m >> i is nearest, by their ratio. */
static uint32_t class_rows(const struct prs_gemm_plan *p, uint32_t class)
{
    static const double HALF_WAY = 1.41421356;
    uint32_t world = p->args.schedule.place.world;
    return class == 0 ? p->shape.m : (uint32_t)(HALF_WAY * (p->shape.m >> class)) / world * world;
}

/* Appends a plan of so many rows. If some rank lacks memory or cuBLASLt, no rank has the plan, and that is no error. */
static int add(struct prs_gemm_plan *p, uint32_t rows, const struct prs_gemm_tuning *tuning,
               const struct prs_table_found *found)
{
    struct prs_gemm_shape shape = p->shape;
    struct prs_gemm_plan **end = &p->next;
    int r;
    while (*end)
        end = &(*end)->next;
    shape.m = rows;
    r = prs_gemm_plan_open_as(p->base.ctx, &shape, tuning, found, end);
    return r == -ENOMEM || r == -ENOTSUP ? 0 : r;
}

/* Whether two tunings of the same path, on one node, are the same for blocks of so many pairs of row tiles. */
static bool same_tuning(const struct prs_gemm_tuning *x, const struct prs_gemm_tuning *y, uint32_t pairs)
{
    bool same_band = x->band == y->band || (x->band >= pairs && y->band >= pairs);
    return same_band && x->clusters == y->clusters && x->mover == y->mover && x->segments == y->segments &&
           x->spread == y->spread && x->paced == y->paced && x->columns == y->columns;
}

/* The fused path's plans for the classes of fewer rows that have another tuning. A class without a tuning of its own
 * has that of the class before; the first class then has the model's. */
static int add_fused(struct prs_gemm_plan *p, const struct prs_table_found *found)
{
    static const struct prs_gemm_tuning any = {.path = PRS_GEMM_PATH_FUSED};
    bool first = p->info.tuning.path != PRS_GEMM_PATH_FUSED;
    struct prs_gemm_tuning last = found->tuning[0];
    int r = 0;
    for (uint32_t i = first ? 0 : 1; i < PRS_TABLE_CLASSES && p->shape.m >> i != 0 && !r; i++) {
        struct prs_table_found own = {.source = PRS_TABLE_SHIPPED, .tuning = {found->tuning[i]}};
        bool known = own.tuning[0].path == PRS_GEMM_PATH_FUSED;
        uint32_t rows = most_rows(p, PRS_GEMM_PATH_FUSED, class_rows(p, i));
        uint32_t pairs = prs_ceil_div(prs_ceil_div(rows, p->args.schedule.place.world), PRS_PAIR_M);
        if (rows == 0)
            break;
        if (i + 1 < PRS_TABLE_CLASSES && rows <= class_rows(p, i + 1))
            continue;
        if (!first && (!known || same_tuning(&own.tuning[0], &last, pairs)))
            continue;
        if (own.tuning[0].band > pairs)
            own.tuning[0].band = pairs;
        r = add(p, rows, known ? NULL : &any, known ? &own : NULL);
        last = known ? own.tuning[0] : any;
        first = false;
    }
    return r;
}

int prs_paths_open(struct prs_gemm_plan *p)
{
    static const struct prs_gemm_tuning unfused = {.path = PRS_GEMM_PATH_UNFUSED},
                                        fused = {.path = PRS_GEMM_PATH_FUSED};
    const struct prs_place *at = &p->args.schedule.place;
    struct prs_table_found found;
    uint32_t rows;
    int r = 0;
    if (at->nodes > 1 || !prs_tuning_can_fuse(&p->shape, at->world))
        return 0;
    found = prs_gemm_plan_found(p);
    prs_tuning_path_times(&p->shape, at, p->info.tuning.clusters, &found, p->times);
    p->both = prs_tuning_can_unfuse(&p->shape);
    if (p->info.tuning.path == PRS_GEMM_PATH_FUSED) {
        rows = most_rows(p, PRS_GEMM_PATH_UNFUSED, p->shape.m);
        if (rows != 0)
            r = add(p, rows, &unfused, NULL);
        p->both = p->next != NULL;
    }
    if (at->world == 1 && p->info.tuning.path == PRS_GEMM_PATH_UNFUSED)
        r = add(p, p->shape.m, &fused, NULL);
    else if (!r)
        r = add_fused(p, &found);
    if (p->info.tuning.path == PRS_GEMM_PATH_UNFUSED)
        p->both = p->next != NULL;
    return r;
}

struct prs_gemm_plan *prs_paths_plan(struct prs_gemm_plan *p, const struct prs_gemm_operands *x)
{
    struct prs_gemm_plan *found = p;
    enum prs_gemm_path path;
    uint32_t rows;
    if (!p->next)
        return p;
    /* It may be any number of rows, and only the fused path reads it. */
    if (x->m_on_device && p->info.tuning.path == PRS_GEMM_PATH_FUSED)
        return p;
    if (!x->m_on_device && (x->m == 0 || x->m >= p->shape.m))
        return p;
    rows = x->m_on_device ? p->shape.m : x->m;
    path = x->m_on_device ? PRS_GEMM_PATH_FUSED : faster_path(p, rows);
    for (struct prs_gemm_plan *q = p->next; q; q = q->next)
        if (q->info.tuning.path == path && rows <= q->shape.m)
            found = q;
    return found;
}

int prs_gemm_plan_path(const struct prs_gemm_plan *p, uint32_t m)
{
    struct prs_gemm_operands x = {.m = m};
    return (int)prs_paths_plan((struct prs_gemm_plan *)p, &x)->info.tuning.path;
}
