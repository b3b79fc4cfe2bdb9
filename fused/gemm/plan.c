/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/gemm/plan.h"

#include <errno.h>
#include <stdlib.h>

#include "fused/gemm/copies.h"
#include "fused/gemm/kernels.h"
#include "fused/gemm/unfused/lt.h"
#include "fused/core/tensor_map.h"
#include "fused/gemm/tuning.h"
#include "fused/gemm/unfused/unfused.h"
#include "transport/util/error.h"

enum { MOST_DIMENSION = INT32_MAX - PRS_PAIR_M + 1 }; /* a tile's place in a tensor is a signed number */

/* All-gather: a slot for each other rank's block, and one from where the own is put to other nodes. */
static uint32_t gathered_slots(const struct prs_schedule *s)
{
    return s->place.world - (s->place.nodes > 1 ? 0 : 1);
}

/* Bytes of one bank of what the other ranks write here. */
static uint64_t bank_bytes(const struct prs_fused_plan *p)
{
    const struct prs_schedule *s = &p->args.schedule;
    if (s->place.world == 1 || s->op == PRS_FUSED_GEMM)
        return 0;
    if (s->op == PRS_FUSED_ALLGATHER && s->segments != 0)
        return (uint64_t)(s->place.world - 1) * s->pairs * PRS_PAIR_M * p->shape.k * 2;
    if (s->op == PRS_FUSED_ALLGATHER)
        return prs_layout_gathered(s, gathered_slots(s), 0, 0);
    return prs_layout_partial(s, prs_schedule_slots(s), 0, 0);
}

static uint64_t flag_count(const struct prs_schedule *s)
{
    if (s->segments != 0)
        return prs_schedule_segment_flag(s, s->place.world - 1, 0, 0);
    if (s->op == PRS_FUSED_ALLGATHER)
        return prs_schedule_arrival(s, gathered_slots(s), 0, 0);
    return prs_schedule_partial_flag(s, s->place.nodes * (s->place.local_ranks - 1), 0, 0);
}

static int open_copies(struct prs_fused_plan *p)
{
    const struct prs_schedule *s = &p->args.schedule;
    struct prs_tensor t = {.base = p->staging->at[0],
                           .columns = p->shape.k,
                           .box_rows = PRS_TILE_M,
                           .swizzled = true,
                           .rows = (uint64_t)(s->place.world - 1) * s->pairs * PRS_PAIR_M};
    int r = prs_tensor_map_encode(&t, &p->args.gathered);
    return r != 0 ? r : prs_copy_stream_open(&p->copies);
}

/* Between nodes: signal words, and counters of who comes last, which are this rank's own but lie behind the flags. */
static int open_far(struct prs_fused_plan *p, uint64_t counters)
{
    const struct prs_schedule *s = &p->args.schedule;
    int r = prs_symmetric_open_signals(p->ctx, p->staging, prs_schedule_row_word(s, s->place.nodes - 1, 0),
                                       &p->args.far, &p->signals);
    if (r != 0)
        return r;
    p->info.workspace_bytes += p->signals->bytes;
    p->args.far.counters = (uint32_t *)p->flags->at[0] + counters;
    return 0;
}

static int open_workspace(struct prs_fused_plan *p)
{
    struct prs_kernel_args *a = &p->args;
    struct prs_schedule *s = &a->schedule;
    uint64_t flags, counters;
    int r;
    if (prs_tuning_copies(&p->info.tuning))
        s->segments = p->info.tuning.segments;
    a->paced = p->info.tuning.paced == PRS_PACED;
    a->push_ctas = p->info.tuning.push_ctas;
    prs_tuning_gaps(&p->shape, &p->info.tuning, s, &a->push_gap, &a->store_gap);
    s->group = p->info.tuning.tiles_per_signal;
    flags = flag_count(s);
    counters = s->place.nodes > 1 ? prs_schedule_row_counter(s, s->pairs * 2) : 0;
    a->staging_bank_bytes = bank_bytes(p);
    if (a->staging_bank_bytes == 0)
        return 0;
    /* Copy engines cannot choose a bank by the epoch, which the host does not know: they have one, and wait for credit.
     */
    r = prs_symmetric_open(p->ctx, (s->segments != 0 ? 1 : 2) * a->staging_bank_bytes, PRS_SYMMETRIC_DATA, &p->staging);
    if (r == 0)
        r = prs_symmetric_open(p->ctx, (flags + s->place.local_ranks + counters + 1) * sizeof(uint32_t),
                               PRS_SYMMETRIC_NODE, &p->flags);
    if (r != 0)
        return r;
    p->info.workspace_bytes += p->staging->bytes + p->flags->bytes;
    for (uint32_t peer = 0; peer < s->place.local_ranks; peer++) {
        a->staging[peer] = p->staging->at[peer];
        a->flags[peer] = (uint32_t *)p->flags->at[peer];
        a->done[peer] = a->flags[peer] + flags;
    }
    r = prs_sync_share(p->ctx, p->flags, &a->sync);
    if (r != 0)
        return r;
    if (s->place.nodes > 1)
        return open_far(p, flags + s->place.local_ranks);
    return s->segments != 0 ? open_copies(p) : 0;
}

static int check_shape(const struct prs_fused *ctx, const struct prs_fused_shape *shape)
{
    if (shape->m == 0 || shape->n == 0 || shape->k == 0)
        return prs_fail(-EINVAL, "fused: empty product %u x %u x %u", shape->m, shape->n, shape->k);
    if (shape->m > MOST_DIMENSION || shape->n > MOST_DIMENSION || shape->k > MOST_DIMENSION)
        return prs_fail(-EINVAL, "fused: product %u x %u x %u: no dimension may exceed %u", shape->m, shape->n,
                        shape->k, MOST_DIMENSION);
    if (shape->op > PRS_FUSED_ALLREDUCE)
        return prs_fail(-EINVAL, "fused: operation %d is not known", (int)shape->op);
    if ((shape->op == PRS_FUSED_REDUCE_SCATTER || shape->op == PRS_FUSED_ALLGATHER) &&
        shape->m % ctx->config.world != 0)
        return prs_fail(-EINVAL, "fused: %u rows do not divide among %u ranks", shape->m, ctx->config.world);
    return 0;
}

/* Unfused was only preferred and has no cuBLASLt (on any rank: they agree): fused is slower than it would have been,
 * but right. */
static int open_path(struct prs_fused_plan *p, bool demanded)
{
    int r;
    if (p->info.tuning.path == PRS_PATH_FUSED)
        return open_workspace(p);
    r = prs_unfused_open(p);
    if (r != -ENOTSUP || demanded || !prs_tuning_can_fuse(&p->shape, p->args.schedule.place.world))
        return r;
    p->info.tuning.path = PRS_PATH_FUSED;
    p->info.reason = "unfused would be faster, but cuBLASLt cannot be loaded";
    return open_workspace(p);
}

/* What a rank finds in its tuning file. */
struct finding {
    struct prs_fused_tuning tuning;
    uint32_t found;
};

/* Rank 0's finding, for all: it alone writes to the file, may just have done so, and others may not see that file. */
static int share_finding(struct prs_fused_plan *p, struct finding *out)
{
    struct finding mine = {.found = 0}, *all;
    int r = 0;
    mine.found = prs_tuning_read(p->ctx, &p->shape, &mine.tuning);
    *out = mine;
    if (p->shape.op == PRS_FUSED_GEMM)
        return 0;
    all = calloc(p->ctx->config.world, sizeof(*all));
    if (all == NULL)
        return prs_fail(-ENOMEM, "fused: no memory for the tunings of %u ranks", p->ctx->config.world);
    r = prs_context_allgather(p->ctx, &mine, all, sizeof(mine));
    *out = all[0];
    free(all);
    return r;
}

static int open_plan(struct prs_fused_plan *p, const struct prs_fused_tuning *tuning)
{
    struct finding file;
    const struct prs_fused_shape *shape = &p->shape;
    struct prs_fused *ctx = p->ctx;
    bool alone = shape->op == PRS_FUSED_GEMM;
    uint32_t clusters, world = alone ? 1 : ctx->config.world, nodes = alone ? 1 : ctx->place.nodes;
    int r = share_finding(p, &file);
    if (r != 0)
        return r;
    r = prs_kernels_prepare(shape->op, !shape->b_is_n_k, nodes > 1, &clusters);
    if (r != 0)
        return prs_fail(r, "fused: the kernel does not fit device %d: built for another GPU?", ctx->config.device);
    if (tuning == NULL && file.found != 0)
        r = prs_tuning_choose(ctx, shape, &file.tuning, true, clusters, &p->info);
    else
        r = prs_tuning_choose(ctx, shape, tuning, false, clusters, &p->info);
    if (r != 0)
        return r;
    prs_schedule_init(&p->args.schedule, shape->op, ctx->config.rank % world, world, nodes, shape->m, shape->n,
                      shape->k, p->info.tuning.band);
    p->args.n = shape->n;
    p->info.workspace_bytes = sizeof(*p->args.sync.words);
    return prs_sync_open(ctx, &p->args.sync);
}

int prs_fused_plan_open(struct prs_fused *ctx, const struct prs_fused_shape *shape,
                        const struct prs_fused_tuning *tuning, struct prs_fused_plan **out)
{
    struct prs_fused_plan *p;
    int before, r = check_shape(ctx, shape);
    if (r == 0)
        r = prs_context_begin_plan(ctx, _Alignof(struct prs_fused_plan), sizeof(*p), (void **)&p, &before);
    if (r != 0)
        return r;
    p->ctx = ctx;
    p->shape = *shape;
    r = open_plan(p, tuning);
    if (shape->op != PRS_FUSED_GEMM)
        r = prs_context_agree(ctx, r); /* others wait in open_path() */
    if (r == 0) {
        r = open_path(p, tuning != NULL && tuning->path == PRS_PATH_UNFUSED);
        if (shape->op != PRS_FUSED_GEMM)
            r = prs_context_agree(ctx, r); /* what was not met about may have failed too */
    }
    if (r == 0)
        *out = p;
    else
        prs_fused_plan_close(p);
    prs_context_leave(before);
    return r;
}

void prs_fused_plan_close(struct prs_fused_plan *p)
{
    int before;
    if (p == NULL || prs_context_enter(p->ctx, &before) != 0)
        return;
    prs_copy_stream_close(&p->copies);
    prs_lt_close(p->lt);
    prs_symmetric_close(p->ctx, p->signals);
    prs_symmetric_close(p->ctx, p->flags);
    prs_symmetric_close(p->ctx, p->staging);
    prs_sync_close(&p->args.sync);
    free(p);
    prs_context_leave(before);
}

void prs_fused_plan_query(const struct prs_fused_plan *p, struct prs_fused_plan_info *info)
{
    *info = p->info;
}

static int encode_inputs(struct prs_fused_plan *p, const void *a, const void *b)
{
    const struct prs_fused_shape *sh = &p->shape;
    bool gathers = sh->op == PRS_FUSED_ALLGATHER;
    uint64_t rows = gathers ? p->args.schedule.block_rows : sh->m;
    struct prs_tensor ta = {.base = a, .columns = sh->k, .rows = rows, .box_rows = PRS_TILE_M, .swizzled = true};
    struct prs_tensor tb = {.base = b, .swizzled = true};
    int r = prs_tensor_map_encode(&ta, &p->args.a);
    if (sh->b_is_n_k) { /* half of the columns of B per CTA */
        tb.columns = sh->k, tb.rows = sh->n, tb.box_rows = PRS_TILE_N / 2;
    } else {
        tb.columns = sh->n, tb.rows = sh->k, tb.box_rows = PRS_TILE_K;
    }
    if (r == 0)
        r = prs_tensor_map_encode(&tb, &p->args.b);
    if (r == 0 && gathers) {
        ta.box_rows = PRS_PUSH_ROWS;
        r = prs_tensor_map_encode(&ta, &p->args.push_source);
    }
    return r;
}

static int encode_results(struct prs_fused_plan *p, void *c)
{
    const struct prs_schedule *s = &p->args.schedule;
    struct prs_tensor t = {.base = c,
                           .columns = p->shape.n,
                           .rows = s->block_rows,
                           .planes = s->place.world,
                           .box_rows = 64,
                           .swizzled = true};
    uint64_t bytes = (uint64_t)p->shape.m * p->shape.n * 2;
    const struct prs_symmetric *home = NULL;
    int r = 0;
    if (p->shape.op == PRS_FUSED_REDUCE_SCATTER)
        t.planes = 1;
    if (p->shape.op == PRS_FUSED_ALLREDUCE && s->place.world > 1) {
        home = prs_symmetric_find(p->ctx, c, bytes);
        if (home == NULL)
            return prs_fail(-EINVAL,
                            "fused: the result of an all-reduce (%p, %llu bytes) must lie in prs_fused_alloc() memory",
                            c, (unsigned long long)bytes);
    }
    if (home != NULL && s->place.nodes > 1) {
        p->args.far.result_window = home->window;
        p->args.far.result_offset = (uint64_t)((uint8_t *)c - home->at[0]);
    }
    for (uint32_t peer = 0; peer < (home == NULL ? 1 : s->place.local_ranks) && r == 0; peer++) {
        if (home != NULL)
            t.base = home->at[peer] + ((uint8_t *)c - home->at[0]);
        p->args.far.result[peer] = (uint8_t *)(uintptr_t)t.base;
        r = prs_tensor_map_encode(&t, &p->args.c[peer]);
    }
    return r;
}

/* One launch of the fused kernel, and what copies need beside its arguments. */
struct fused_launch {
    const struct prs_fused_plan *plan;
    const void *a;
};

static int launch_kernel(void *launch, cudaStream_t stream)
{
    const struct prs_fused_plan *p = ((struct fused_launch *)launch)->plan;
    int r = prs_kernels_launch(&p->args, !p->shape.b_is_n_k, p->info.tuning.clusters, stream);
    return r == 0 ? 0 : prs_fail(r, "fused: CUDA refused the launch: %s", cudaGetErrorString(cudaGetLastError()));
}

static int launch_copies(void *launch, struct prs_copy_stream *c)
{
    const struct fused_launch *l = launch;
    return prs_copies_enqueue(l->plan, c, l->a);
}

static int launch_fused(struct prs_fused_plan *p, const void *a, const void *b, void *c, cudaStream_t stream)
{
    static const struct prs_copied_launch does = {launch_kernel, launch_copies};
    struct fused_launch one = {p, a};
    int r = encode_inputs(p, a, b);
    if (r == 0)
        r = encode_results(p, c);
    if (r == 0 && p->args.schedule.segments == 0)
        return launch_kernel(&one, stream);
    if (r == 0) {
        r = prs_kernels_begin_copies(&p->args, stream);
        if (r != 0)
            r = prs_fail(r, "fused: CUDA refused the launch: %s", cudaGetErrorString(cudaGetLastError()));
    }
    return r != 0 ? r : prs_copy_stream_launch(&p->copies, stream, &does, &one);
}

static int launch(struct prs_fused_plan *p, enum prs_fused_op op, const void *a, const void *b, void *c,
                  cudaStream_t stream)
{
    int before, r;
    if (p->shape.op != op)
        return prs_fail(-EINVAL, "fused: a plan for operation %d was launched as %d", (int)p->shape.op, (int)op);
    if (a == NULL || b == NULL || c == NULL || ((uintptr_t)a | (uintptr_t)b | (uintptr_t)c) % 16 != 0)
        return prs_fail(-EINVAL, "fused: A %p, B %p, C %p: pointers must be 16-byte aligned, and not NULL", a, b, c);
    r = prs_sync_check(p->ctx);
    if (r != 0)
        return r;
    r = prs_context_enter(p->ctx, &before);
    if (r != 0)
        return r;
    if (p->info.tuning.path == PRS_PATH_UNFUSED)
        r = prs_unfused_launch(p, a, b, c, stream);
    else
        r = launch_fused(p, a, b, c, stream);
    prs_context_leave(before);
    return r;
}

int prs_gemm(struct prs_fused_plan *plan, const void *a, const void *b, void *c, struct CUstream_st *stream)
{
    return launch(plan, PRS_FUSED_GEMM, a, b, c, stream);
}

int prs_gemm_reduce_scatter(struct prs_fused_plan *plan, const void *a, const void *b, void *c,
                            struct CUstream_st *stream)
{
    return launch(plan, PRS_FUSED_REDUCE_SCATTER, a, b, c, stream);
}

int prs_allgather_gemm(struct prs_fused_plan *plan, const void *a, const void *b, void *c, struct CUstream_st *stream)
{
    return launch(plan, PRS_FUSED_ALLGATHER, a, b, c, stream);
}

int prs_gemm_allreduce(struct prs_fused_plan *plan, const void *a, const void *b, void *c, struct CUstream_st *stream)
{
    return launch(plan, PRS_FUSED_ALLREDUCE, a, b, c, stream);
}
