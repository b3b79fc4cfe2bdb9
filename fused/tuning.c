/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/tuning.h"

#include <string.h>

/* Measured on 4 x H200, doc/fused-notes.md. */
static const double FLOPS_PER_US_PER_SM = 750e6 / 132; /* bf16, large shapes */
static const double LINK_BYTES_PER_US = 394e3;         /* peer copy, one direction */
static const double START_US = 8;                      /* launch, first stages, last tile's store */

static uint32_t default_band(const struct prs_fused_shape *shape, uint32_t world)
{
    uint32_t pairs = prs_ceil_div(shape->m / world, PRS_PAIR_M), columns = prs_ceil_div(shape->n, PRS_TILE_N);
    uint32_t band;
    if (shape->op == PRS_FUSED_GEMM || world == 1)
        return 8; /* 8 x 8 units at a time read least from the L2 cache */
    if (shape->op == PRS_FUSED_ALLGATHER) {
        /* What the clusters compute at one time should be what arrives at one time. */
        band = prs_ceil_div(66, (world - 1) * columns);
        return band < 2 ? 2 : band;
    }
    return pairs <= 16 ? 4 : 8;
}

static void predict(const struct prs_fused_shape *shape, uint32_t world, struct prs_fused_plan_info *info)
{
    double flops = 2.0 * shape->m * shape->n * shape->k;
    double compute = flops / (FLOPS_PER_US_PER_SM * 2 * info->tuning.clusters);
    double elements = shape->op == PRS_FUSED_ALLGATHER ? (double)shape->m * shape->k : (double)shape->m * shape->n;
    double shares = shape->op == PRS_FUSED_GEMM ? 0 : (double)(world - 1) / world;
    double sent = elements * 2 * shares * (shape->op == PRS_FUSED_ALLREDUCE ? 2 : 1);
    info->sent_bytes = (uint64_t)sent;
    info->predicted_us = START_US + (compute > sent / LINK_BYTES_PER_US ? compute : sent / LINK_BYTES_PER_US);
}

void prs_tuning_choose(const struct prs_fused *ctx, const struct prs_fused_shape *shape,
                       const struct prs_fused_tuning *wanted, uint32_t clusters, struct prs_fused_plan_info *info)
{
    uint32_t world = shape->op == PRS_FUSED_GEMM ? 1 : ctx->config.world;
    struct prs_fused_tuning *t = &info->tuning;
    if (wanted != NULL)
        *t = *wanted;
    t->path = PRS_PATH_FUSED;
    info->reason = "every tail fits the tensor maps";
    if (t->clusters == 0 || t->clusters > clusters)
        t->clusters = clusters;
    if (t->band == 0)
        t->band = default_band(shape, world);
    if (t->lag == 0)
        t->lag = 1;
    if (t->push_ctas == 0 || t->push_ctas > 2 * t->clusters)
        t->push_ctas = 2 * t->clusters;
    if (t->segments == 0)
        t->segments = 1;
    if (t->paced == 0)
        t->paced = shape->op == PRS_FUSED_ALLGATHER ? PRS_UNPACED : PRS_PACED;
    if (shape->op != PRS_FUSED_ALLGATHER || world == 1)
        t->copy_engine = 0;
    if (t->copy_engine != 0)
        t->push_ctas = 0;
    predict(shape, world, info);
}
