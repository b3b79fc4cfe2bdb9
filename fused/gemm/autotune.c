/* SPDX-License-Identifier: Apache-2.0 */
/* Timing the candidates of a shape on the caller's own buffers. */
#include <errno.h>
#include <float.h>
#include <stdlib.h>
#include <string.h>

#include "fused/core/context.h"
#include "fused/gemm/tuning.h"
#include "transport/util/error.h"
#include "transport/util/log.h"

enum { MAX_CANDIDATES = 20 };

/* The default first, so that a tie keeps it. */
static uint32_t list_candidates(const struct prs_fused *ctx, const struct prs_gemm_shape *shape,
                                struct prs_gemm_tuning *list)
{
    uint32_t count = 1, world = shape->op == PRS_GEMM_ALONE ? 1 : ctx->config.world;
    uint32_t pairs = prs_ceil_div(shape->m / world, PRS_PAIR_M);
    uint32_t ctas = shape->op == PRS_GEMM_ALLGATHER ? PRS_MOVED_BY_CTAS : 0;
    bool copies = ctas != 0 && ctx->place.nodes == 1 && !ctx->shared_device;
    memset(list, 0, MAX_CANDIDATES * sizeof(*list));
    if (world == 1)
        return count;
    for (uint32_t band = 1; band <= pairs && band <= 8; band *= 2) {
        list[count++] = (struct prs_gemm_tuning){.band = band, .mover = ctas};
        if (copies) /* the plan chooses the pieces along k */
            list[count++] = (struct prs_gemm_tuning){.band = band, .mover = PRS_MOVED_BY_COPY_ENGINES};
    }
    for (uint32_t segments = 1; copies && segments <= 4; segments++)
        list[count++] =
            (struct prs_gemm_tuning){.band = pairs, .mover = PRS_MOVED_BY_COPY_ENGINES, .segments = segments};
    for (uint32_t tiles = 1; ctx->place.nodes > 1 && tiles <= 64; tiles *= 8)
        list[count++].tiles_per_signal = tiles;
    list[count++] = (struct prs_gemm_tuning){.spread = 1, .mover = ctas};
    list[count++] = (struct prs_gemm_tuning){.spread = 85, .paced = PRS_GEMM_UNPACED, .mover = ctas};
    list[count++] = (struct prs_gemm_tuning){.spread = 85, .paced = PRS_GEMM_PACED, .mover = ctas};
    list[count++] = (struct prs_gemm_tuning){.spread = 1, .paced = PRS_GEMM_UNPACED, .mover = ctas};
    return count;
}

/* Milliseconds per launch of the slowest rank. */
static int time_candidate(struct prs_fused *ctx, const struct prs_gemm_shape *shape,
                          const struct prs_gemm_tuning *tuning, const struct prs_gemm_operands *operands,
                          uint32_t rounds, cudaStream_t stream, cudaEvent_t *events, float *slowest)
{
    struct prs_gemm_plan *plan;
    float mine = 0, *all;
    int r = prs_gemm_plan_open(ctx, shape, tuning, &plan);
    if (r)
        return r;
    all = calloc(ctx->config.world, sizeof(*all));
    if (!all)
        r = prs_fail(-ENOMEM, "fused: no memory for the times of %u ranks", ctx->config.world);
    for (uint32_t i = 0; i < rounds + 1 && r == 0; i++) {
        if (i == 1) /* the first launch warms up */
            r = prs_cuda_check(cudaEventRecord(events[0], stream), "cudaEventRecord");
        if (!r)
            r = prs_gemm_launch(plan, operands, stream);
    }
    if (!r)
        r = prs_cuda_check(cudaEventRecord(events[1], stream), "cudaEventRecord");
    if (!r)
        r = prs_cuda_check(cudaEventSynchronize(events[1]), "autotune launches");
    if (!r)
        r = prs_cuda_check(cudaEventElapsedTime(&mine, events[0], events[1]), "cudaEventElapsedTime");
    r = prs_ranks_agree(ctx, r); /* a rank that failed has no time to give */
    if (!r)
        r = prs_ranks_allgather(ctx, &mine, all, sizeof(mine));
    *slowest = 0;
    for (uint32_t i = 0; i < ctx->config.world && r == 0; i++)
        *slowest = all[i] / (float)rounds > *slowest ? all[i] / (float)rounds : *slowest;
    free(all);
    prs_gemm_plan_close(plan);
    return r;
}

int prs_gemm_autotune(struct prs_fused *ctx, const struct prs_gemm_shape *shape,
                      const struct prs_gemm_operands *operands, uint32_t rounds, cudaStream_t stream,
                      struct prs_gemm_tuning *best)
{
    struct prs_gemm_tuning list[MAX_CANDIDATES];
    cudaEvent_t events[2];
    uint32_t count = list_candidates(ctx, shape, list);
    float least = FLT_MAX;
    int before, r;
    if (rounds == 0)
        return prs_fail(-EINVAL, "fused: autotune needs at least one round");
    r = prs_cuda_enter(ctx, &before);
    if (r)
        return r;
    r = prs_cuda_check(cudaEventCreate(&events[0]), "cudaEventCreate");
    if (r)
        goto leave;
    r = prs_cuda_check(cudaEventCreate(&events[1]), "cudaEventCreate");
    if (r)
        goto destroy_first;
    for (uint32_t i = 0; i < count && r == 0; i++) {
        float slowest;
        r = time_candidate(ctx, shape, &list[i], operands, rounds, stream, events, &slowest);
        if (!r)
            PRS_INFO("fused: operation %d, %u x %u x %u: band %u, spread %u, mover %u with %u segments, pace %u, "
                     "tiles per signal %u: "
                     "%.1f us",
                     (int)shape->op, shape->m, shape->n, shape->k, list[i].band, list[i].spread, list[i].mover,
                     list[i].segments, list[i].paced, list[i].tiles_per_signal, slowest * 1e3);
        if (r == 0 && slowest < least) { /* every rank has the same times and takes the same candidate */
            least = slowest;
            *best = list[i];
        }
    }
    if (r == 0 && ctx->config.rank == 0)
        r = prs_tuning_append(ctx, shape, best);
    (void)cudaEventDestroy(events[1]);
destroy_first:
    (void)cudaEventDestroy(events[0]);
leave:
    prs_cuda_leave(before);
    return r;
}
