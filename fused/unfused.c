/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/unfused.h"

#include <errno.h>

#include "fused/lt.h"
#include "util/error.h"

/* What other ranks read or write here: the whole partial product, or the gathered A. */
static uint64_t shared_bytes(const struct prs_fused_shape *s)
{
    return 2 * (uint64_t)s->m * (s->op == PRS_FUSED_ALLGATHER ? s->k : s->n);
}

int prs_unfused_open(struct prs_fused_plan *p)
{
    struct prs_kernel_args *a = &p->args;
    int r = prs_lt_open(&p->shape, &p->lt);
    if (a->schedule.world == 1)
        return r;
    if (prs_context_agree(p->ctx, r) != 0) /* no rank may be left waiting in what follows */
        return r != 0 ? r : -ENOTSUP;
    r = prs_symmetric_open(p->ctx, shared_bytes(&p->shape), PRS_SYMMETRIC_NODE, &p->staging);
    if (r == 0)
        r = prs_symmetric_open(p->ctx, PRS_MAX_WORLD * sizeof(uint32_t), PRS_SYMMETRIC_NODE, &p->flags);
    if (r != 0)
        return r;
    p->info.workspace_bytes += p->staging->bytes + p->flags->bytes;
    for (uint32_t peer = 0; peer < a->schedule.world; peer++) {
        a->staging[peer] = p->staging->at[peer];
        a->flags[peer] = (uint32_t *)p->flags->at[peer];
    }
    return 0;
}

static int gather(struct prs_fused_plan *p, const void *a, cudaStream_t stream)
{
    const struct prs_schedule *s = &p->args.schedule;
    uint64_t bytes = shared_bytes(&p->shape) / s->world;
    int r = 0;
    for (uint32_t peer = 0; peer < s->world && r == 0; peer++)
        r = prs_cuda_check(
            cudaMemcpyAsync(p->args.staging[peer] + s->rank * bytes, a, bytes, cudaMemcpyDeviceToDevice, stream),
            "copy of A to another rank");
    return r != 0 ? r : prs_unfused_meet(&p->args, stream);
}

/* Where the sum goes: c here, and for an all-reduce c of every rank. */
static int reduce(struct prs_fused_plan *p, void *c, cudaStream_t stream)
{
    const struct prs_schedule *s = &p->args.schedule;
    uint64_t all = (uint64_t)p->shape.m * p->shape.n, share = (all + s->world - 1) / s->world, first;
    void *to[PRS_MAX_WORLD] = {c};
    uint32_t copies = 1;
    if (p->shape.op == PRS_FUSED_ALLREDUCE) {
        const struct prs_symmetric *home = prs_symmetric_find(p->ctx, c, all * 2);
        if (home == NULL)
            return prs_fail(-EINVAL, "fused: the result of an all-reduce (%p) must lie in prs_fused_alloc() memory", c);
        share = (share + 7) / 8 * 8; /* 16 bytes: no rank starts in the middle of a vector */
        for (copies = 0; copies < s->world; copies++)
            to[copies] = home->at[copies] + ((uint8_t *)c - home->at[0]);
    }
    first = share * s->rank < all ? share * s->rank : all;
    share = first + share < all ? share : all - first;
    return prs_unfused_sum(&p->args, first, share, to, copies, p->shape.op == PRS_FUSED_ALLREDUCE, stream);
}

int prs_unfused_launch(struct prs_fused_plan *p, const void *a, const void *b, void *c, cudaStream_t stream)
{
    bool gathers = p->shape.op == PRS_FUSED_ALLGATHER, alone = p->args.schedule.world == 1;
    int r = 0;
    if (alone)
        return prs_lt_run(p->lt, a, b, c, stream);
    if (gathers)
        r = gather(p, a, stream);
    if (r == 0)
        r = prs_lt_run(p->lt, gathers ? p->args.staging[0] : a, b, gathers ? c : p->args.staging[0], stream);
    if (r == 0 && !gathers)
        r = prs_unfused_meet(&p->args, stream);
    if (r == 0 && !gathers)
        r = reduce(p, c, stream);
    /* Nobody overwrites what another still reads, and an all-reduce has arrived everywhere. */
    return r != 0 ? r : prs_unfused_meet(&p->args, stream);
}
