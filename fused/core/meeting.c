/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/core/meeting.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "fused/core/context.h"
#include "fused/core/sleep.h"
#include "fused/core/symmetric.h"
#include "transport/util/error.h"

/* Returns an error when a rank failed or makes another call. This rank's own error comes first, because its text is
 * more precise. */
static int check_calls(const struct prs_fused *ctx, const struct prs_call *mine, const struct prs_call *all)
{
    for (uint32_t i = 0; i < ctx->config.world; i++)
        if (strcmp(all[i].kind, mine->kind) != 0)
            return prs_fail(-EINVAL, "fused: rank %u %s, rank %u %s: all ranks make the same calls in the same order",
                            ctx->config.rank, mine->kind, i, all[i].kind);
    if (mine->error)
        return mine->error;
    for (uint32_t i = 0; i < ctx->config.world; i++)
        if (all[i].error)
            return prs_fail(all[i].error, "fused: rank %u failed (%d) when it %s: its own error says why", i,
                            all[i].error, mine->kind);
    return 0;
}

/* Return the first rank whose call differs, or `world` if there is none. *term: the term that differs. */
static uint32_t find_difference(const struct prs_fused *ctx, const struct prs_call *mine, const struct prs_call *all,
                                uint32_t *term)
{
    for (uint32_t i = 0; i < ctx->config.world; i++)
        for (*term = 0; *term < mine->terms; ++*term)
            if (all[i].term[*term] != mine->term[*term])
                return i;
    return ctx->config.world;
}

static bool hints_differ(const struct prs_fused *ctx, const struct prs_call *all)
{
    for (uint32_t i = 1; i < ctx->config.world; i++)
        if (memcmp(&all[i].hint, &all[0].hint, sizeof(all[0].hint)) != 0)
            return true;
    return false;
}

static void take_common(const struct prs_fused *ctx, struct prs_call *c, const struct prs_call *all)
{
    c->hint = all[0].hint;
    for (uint32_t i = 0; i < ctx->config.world; i++) {
        c->hint.flags |= all[i].hint.flags;
        c->hint.least = all[i].hint.least < c->hint.least ? all[i].hint.least : c->hint.least;
        for (uint32_t n = 0; n < PRS_CALL_NEEDS; n++)
            c->need[n] = all[i].need[n] > c->need[n] ? all[i].need[n] : c->need[n];
        for (uint32_t b = 0; b < sizeof(c->closed); b++)
            c->closed[b] &= all[i].closed[b];
    }
}

int prs_meet(struct prs_fused *ctx, struct prs_call *c, const char *const *names)
{
    struct prs_call *all = calloc(ctx->config.world, sizeof(*all));
    struct prs_call mine;
    uint32_t other, term;
    int r = all ? 0 : prs_fail(-ENOMEM, "fused: no memory for what %u ranks tell", ctx->config.world);
    if (!r)
        r = prs_sync_check_absent(ctx, c->kind);
    if (!r)
        r = prs_sleep_check(ctx, c->kind);
    if (!r && c->terms > PRS_CALL_TERMS)
        c->error = prs_fail(-EINVAL, "fused: %u terms to agree on, room for %d", c->terms, PRS_CALL_TERMS);
    if (!r && prs_symmetric_report(ctx, c->closed) != 0 && c->error == 0)
        c->error = -EIO;
    mine = *c;
    if (!r)
        r = prs_ranks_allgather(ctx, &mine, all, sizeof(mine));
    if (!r) {
        take_common(ctx, c, all);
        prs_symmetric_release(ctx, c->closed);
        r = check_calls(ctx, &mine, all);
    }
    if (!r) {
        other = find_difference(ctx, &mine, all, &term);
        /* All ranks see the same differences and the same hints, so that all decide again or none does. */
        for (uint32_t i = 0; i < ctx->config.world && other == ctx->config.world; i++)
            other = find_difference(ctx, &all[i], all, &term);
        if (other < ctx->config.world && hints_differ(ctx, all))
            r = PRS_DECIDE_AGAIN;
        else if (other < ctx->config.world)
            r = prs_fail(-EINVAL,
                         "fused: rank %u %s with %s %" PRIu64 ", rank %u with %" PRIu64
                         ": it must be the same on all ranks",
                         other, c->kind, names[term], all[other].term[term], ctx->config.rank, mine.term[term]);
    }
    free(all);
    return r;
}
