/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/core/ranks.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "fused/core/context.h"
#include "transport/util/error.h"

int prs_ranks_allgather(struct prs_fused *ctx, const void *mine, void *all, size_t bytes)
{
    int r;
    if (ctx->config.world == 1) {
        memcpy(all, mine, bytes);
        return 0;
    }
    r = ctx->config.allgather(ctx->config.user, mine, all, bytes);
    ctx->parted |= r != 0;
    if (r > 0) /* MPI and others return positive error codes */
        return prs_fail(-EIO, "rank %u: the caller's allgather of %zu bytes failed: it returned %d", ctx->config.rank,
                        bytes, r);
    return r == 0 ? 0 : prs_fail(r, "rank %u: the caller's allgather of %zu bytes failed", ctx->config.rank, bytes);
}

int prs_ranks_agree(struct prs_fused *ctx, int mine)
{
    int32_t given = mine, *all = calloc(ctx->config.world, sizeof(*all));
    int r;
    if (!all)
        return prs_fail(-ENOMEM, "fused: no memory for the results of %u ranks", ctx->config.world);
    r = prs_ranks_allgather(ctx, &given, all, sizeof(given));
    for (uint32_t i = 0; i < ctx->config.world && r == 0; i++)
        if (all[i] != 0)
            r = mine != 0 ? all[i] : prs_fail(all[i], "fused: rank %u failed (%d): its own error says why", i, all[i]);
    free(all);
    return r;
}

int prs_ranks_barrier(struct prs_fused *ctx)
{
    return prs_ranks_agree(ctx, 0);
}
