/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention: plans and launches. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "fused/attention/copies.h"
#include "fused/attention/deal.h"
#include "fused/attention/kernels.h"
#include "fused/attention/tuning.h"
#include "fused/core/plan.h"
#include "fused/core/tensor_map.h"
#include "transport/util/error.h"

static const double LOG2_E = 1.4426950408889634;

enum { BF16_BYTES = 2, SWIZZLE_COLUMNS = 64, WARPGROUP_ROWS = 64 };

struct prs_attention_plan {
    struct prs_plan base;
    struct prs_attention_shape shape;
    struct prs_attention_info info;
    struct prs_attention_kernel kernel;
    struct prs_attention_args args; /* all but what each launch brings */
    const void *k, *v;              /* of the launch that is being enqueued */
    uint8_t *deal;                  /* pieces of work, memory for the parts of tasks, and counters */
    struct prs_symmetric *staging;  /* keys and values of the other ranks; NULL with one rank */
    struct prs_symmetric *flags;    /* arrival counters, credits */
};

static struct prs_attention_plan *self(struct prs_plan *p)
{
    return (struct prs_attention_plan *)p;
}

/* Strides of a tensor with so many heads. */
static struct prs_attention_strides strides_of(const struct prs_attention_plan *p, uint32_t heads)
{
    const struct prs_attention_schedule *s = &p->args.schedule;
    uint64_t d = p->shape.head_dim, rows = (uint64_t)s->segments * s->segment_rows;
    struct prs_attention_strides x = {.row = heads * d, .head = d, .batch = rows * heads * d};
    if (p->shape.heads_first != 0)
        x.row = d, x.head = rows * d;
    x.segment = s->segment_rows * x.row;
    return x;
}

/* Size of a tensor in the last coordinate (layout.h). */
static uint32_t planes_of(const struct prs_attention_plan *p, uint32_t heads)
{
    return p->shape.batch * (p->shape.heads_first != 0 ? heads : p->args.schedule.segments);
}

/* What is loaded or fetched at one time. */
struct box {
    uint32_t rows;
    bool swizzled;
};

static struct box box_of_block(const struct prs_attention_plan *p)
{
    return (struct box){p->args.schedule.block_rows, true};
}

/* A tensor of the caller, or `count` of them one after the other, in the five dimensions of layout.h. */
static int encode_tensors(const struct prs_attention_plan *p, const void *base, uint32_t count, uint32_t heads,
                          struct box box, CUtensorMap *map)
{
    const struct prs_attention_schedule *s = &p->args.schedule;
    struct prs_attention_strides x = strides_of(p, heads);
    uint32_t columns = box.swizzled ? SWIZZLE_COLUMNS : p->shape.head_dim, parts = p->shape.head_dim / columns;
    struct prs_tensor_view v = {
        .base = base,
        .size = {columns, s->segment_rows, parts, heads, (uint64_t)count * planes_of(p, heads)},
        .stride = {x.row * BF16_BYTES, (uint64_t)columns * BF16_BYTES, x.head * BF16_BYTES, x.segment * BF16_BYTES},
        .box = {columns, box.rows, parts, 1, 1},
        .swizzled = box.swizzled};
    if (p->shape.heads_first != 0) {
        v.size[3] = s->segments;
        v.stride[2] = x.segment * BF16_BYTES, v.stride[3] = x.head * BF16_BYTES;
    }
    return prs_tensor_view_encode(&v, map);
}

static int encode_tensor(const struct prs_attention_plan *p, const void *base, uint32_t heads, struct box box,
                         CUtensorMap *map)
{
    return encode_tensors(p, base, 1, heads, box, map);
}

/* Staging memory. Pushed: segments of one head of one rank, one after the other, each without gaps. Copied: the tensors
 * of all other ranks. */
static int encode_received(struct prs_attention_plan *p)
{
    const struct prs_attention_schedule *s = &p->args.schedule;
    struct box box = box_of_block(p);
    if (p->args.planes != 0)
        return encode_tensors(p, p->staging->at[0], prs_attention_tensor(s->place.world, 0), p->shape.heads_kv, box,
                              &p->args.received);
    uint64_t row = (uint64_t)p->shape.head_dim * BF16_BYTES, stage = s->segment_rows * row;
    uint32_t parts = p->shape.head_dim / SWIZZLE_COLUMNS;
    struct prs_tensor_view v = {.base = p->staging->at[0],
                                .size = {SWIZZLE_COLUMNS, s->segment_rows, parts, prs_attention_stages(s), 1},
                                .stride = {row, SWIZZLE_COLUMNS * BF16_BYTES, stage, stage},
                                .box = {SWIZZLE_COLUMNS, box.rows, parts, 1, 1},
                                .swizzled = true};
    return prs_tensor_view_encode(&v, &p->args.received);
}

/* One allocation of device memory: pieces, partial results of parts, claims, parts, the parts' counters, finished
 * groups, pieces of each group. */
static int upload_deal(struct prs_attention_plan *p, const struct prs_attention_deal *d)
{
    struct prs_attention_args *a = &p->args;
    const struct prs_attention_schedule *s = &a->schedule;
    size_t pieces = d->pieces_count * sizeof(*d->pieces), parts = d->parts_count * sizeof(*d->parts);
    size_t groups = s->groups * sizeof(uint32_t);
    size_t counters = d->parts_count * prs_attention_part_counters(s->tile_rows) * sizeof(uint32_t);
    size_t partial = (size_t)d->parts_count * prs_attention_partial(s->tile_rows, p->shape.head_dim) * sizeof(float);
    size_t at_partial = (pieces + 127) / 128 * 128, at_claims = at_partial + partial;
    size_t at_parts = at_claims + sizeof(*a->claims), at_counters = at_parts + parts;
    size_t at_finished = at_counters + counters, at_groups = at_finished + 2 * groups, all = at_groups + groups;
    int r = prs_cuda_check(cudaMalloc((void **)&p->deal, all), "cudaMalloc of the tasks of an attention plan");
    if (!r)
        r = prs_cuda_check(cudaMemset(p->deal, 0, all), "cudaMemset of the tasks of an attention plan");
    if (!r)
        r = prs_cuda_check(cudaMemcpy(p->deal, d->pieces, pieces, cudaMemcpyHostToDevice), "cudaMemcpy of pieces");
    if (r == 0 && parts != 0)
        r = prs_cuda_check(cudaMemcpy(p->deal + at_parts, d->parts, parts, cudaMemcpyHostToDevice),
                           "cudaMemcpy of parts");
    if (!r)
        r = prs_cuda_check(cudaMemcpy(p->deal + at_groups, d->pieces_of, groups, cudaMemcpyHostToDevice),
                           "cudaMemcpy of how many pieces a group has");
    if (!r)
        r = prs_cuda_check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); /* a launch may use any stream */
    a->pieces = (const struct prs_attention_piece *)p->deal;
    a->partial = (float *)(p->deal + at_partial);
    a->parts = (const struct prs_attention_part *)(p->deal + at_parts);
    a->parts_done = (uint32_t *)(p->deal + at_counters);
    a->claims = (struct prs_attention_claims *)(p->deal + at_claims);
    a->finished = (uint32_t *)(p->deal + at_finished);
    a->pieces_of = (const uint32_t *)(p->deal + at_groups);
    a->pieces_count = d->pieces_count;
    p->base.workspace_bytes += all;
    return r;
}

static int open_deal(struct prs_attention_plan *p)
{
    struct prs_attention_deal deal;
    int r = prs_attention_deal_init(&deal, &p->args.schedule, p->info.tuning.ctas);
    if (r)
        return r;
    r = upload_deal(p, &deal);
    prs_attention_deal_fini(&deal);
    return r;
}

static int open_workspace(struct prs_plan *base)
{
    struct prs_attention_plan *p = self(base);
    struct prs_attention_args *a = &p->args;
    const struct prs_attention_schedule *s = &a->schedule;
    uint32_t arrivals, credits;
    int r;
    if (s->place.world == 1)
        return 0;
    a->arrival_words = prs_attention_arrival(s, prs_attention_slots(s) + 1, 0, 0, 0, 0);
    arrivals = 2 * a->arrival_words;
    credits = prs_attention_credit(s, s->place.local_ranks, 0);
    r = prs_plan_memory(base, prs_attention_tuning_staging(&p->shape, s), PRS_SYMMETRIC_DATA, &p->staging);
    if (!r)
        r = prs_plan_flags(base, (size_t)arrivals + credits, &p->flags);
    if (r)
        return r;
    for (uint32_t peer = 0; peer < s->place.local_ranks; peer++) {
        a->staging[peer] = p->staging->at[peer];
        a->arrivals[peer] = (uint32_t *)p->flags->at[peer];
        a->credits[peer] = a->arrivals[peer] + arrivals;
    }
    if (s->place.nodes > 1)
        r = prs_plan_signals(base, p->staging, prs_attention_far_words(s), &a->far);
    if (!r && a->planes != 0)
        r = prs_copy_stream_open(&base->copies);
    return r ? r : encode_received(p);
}

/* Half of what is free on the fullest GPU, the same on all ranks. Collective, also for a rank that failed with r. */
static int default_limit(struct prs_fused *ctx, int r, uint64_t *limit)
{
    size_t free_bytes = 0, total;
    uint64_t mine, *all = calloc(ctx->config.world, sizeof(*all));
    if (!r)
        r = !all ? prs_fail(-ENOMEM, "attention: no memory for the limits of %u ranks", ctx->config.world)
                 : prs_cuda_check(cudaMemGetInfo(&free_bytes, &total), "cudaMemGetInfo");
    mine = r == 0 ? free_bytes / 2 : 0;
    r = prs_context_agree(ctx, r);
    if (!r)
        r = prs_context_allgather(ctx, &mine, all, sizeof(mine));
    *limit = UINT64_MAX;
    for (uint32_t i = 0; i < ctx->config.world && r == 0; i++)
        *limit = all[i] < *limit ? all[i] : *limit;
    free(all);
    return r;
}

static int choose_kernel(struct prs_attention_plan *p, uint32_t *ctas)
{
    struct prs_attention_tuning *t = &p->info.tuning;
    struct prs_attention_schedule *s = &p->args.schedule;
    int r;
    if (t->block_rows == 0 && t->overlap == 0)
        t->overlap = prs_attention_tuning_overlap(&p->shape, &p->base.ctx->place);
    if (t->block_rows == 0)
        t->block_rows = prs_attention_tuning_block(&p->shape, &p->base.ctx->place);
    p->kernel = (struct prs_attention_kernel){.head_dim = p->shape.head_dim,
                                              .block_rows = t->block_rows,
                                              .overlap = t->overlap,
                                              .far = p->base.ctx->place.nodes > 1};
    r = prs_attention_kernel_find(&p->kernel);
    if (r)
        return prs_fail(-EINVAL, "attention: no kernel for head_dim %u with %u keys a step and overlap %u on %u nodes",
                        p->shape.head_dim, t->block_rows, t->overlap, p->base.ctx->place.nodes);
    r = prs_attention_kernel_prepare(&p->kernel, ctas);
    if (r)
        return prs_fail(r, "attention: the kernel does not fit device %d: built for another GPU?",
                        p->base.ctx->config.device);
    t->block_rows = s->block_rows = p->kernel.block_rows;
    t->overlap = p->kernel.overlap;
    s->tile_rows = p->kernel.tile_rows;
    return 0;
}

static int choose(struct prs_attention_plan *p)
{
    struct prs_attention_tuning *t = &p->info.tuning;
    uint64_t limit;
    uint32_t ctas;
    int r = default_limit(p->base.ctx, choose_kernel(p, &ctas), &limit);
    if (r == 0 && t->mover == PRS_MOVED_BY_COPY_ENGINES)
        r = prs_context_check_copies(p->base.ctx);
    if (r)
        return r;
    if (t->workspace_limit == 0)
        t->workspace_limit = limit;
    if (p->base.ctx->shared_device)
        t->mover = PRS_MOVED_BY_CTAS;
    return prs_attention_tuning_choose(&p->shape, &p->base.ctx->place, ctas, &p->info, &p->args.schedule);
}

static void fill_args(struct prs_attention_plan *p)
{
    struct prs_attention_args *a = &p->args;
    double scale = p->shape.scale != 0 ? (double)p->shape.scale : 1 / sqrt((double)p->shape.head_dim);
    a->scale = (float)scale;
    a->scale_log2 = (float)(scale * LOG2_E);
    a->heads_first = p->shape.heads_first != 0;
    a->out_strides = strides_of(p, p->shape.heads_q);
    a->row_bytes = p->shape.head_dim * BF16_BYTES;
    a->planes = p->info.tuning.mover == PRS_MOVED_BY_COPY_ENGINES ? planes_of(p, p->shape.heads_kv) : 0;
    a->push_gap = prs_attention_tuning_gap(&p->info);
}

static int open_own(struct prs_plan *base)
{
    struct prs_attention_plan *p = self(base);
    int r = choose(p);
    if (r)
        return r;
    fill_args(p);
    return open_deal(p);
}

static void close_deal(struct prs_plan *base)
{
    (void)cudaFree(self(base)->deal);
}

static int launch_kernel(struct prs_plan *base, cudaStream_t stream)
{
    struct prs_attention_plan *p = self(base);
    return prs_attention_kernel_launch(&p->kernel, &p->args, p->info.tuning.ctas, stream);
}

static int begin_copies(struct prs_plan *base, cudaStream_t stream)
{
    return prs_attention_kernel_begin_copies(&self(base)->args, stream);
}

static int enqueue_copies(struct prs_plan *base)
{
    struct prs_attention_plan *p = self(base);
    return prs_attention_copies_enqueue(&base->copies, &p->args, p->k, p->v);
}

int prs_attention_plan_open(struct prs_fused *ctx, const struct prs_attention_shape *shape,
                            const struct prs_attention_tuning *tuning, struct prs_attention_plan **out)
{
    static const struct prs_plan_steps steps = {"ring attention", open_own,     open_workspace, close_deal,
                                                launch_kernel,    begin_copies, enqueue_copies};
    struct prs_attention_plan *p;
    int r = prs_attention_tuning_check(shape, ctx->config.world);
    if (r)
        return r;
    p = prs_plan_new(ctx, &steps, sizeof(*p));
    if (!p)
        return -ENOMEM;
    p->base.sync = &p->args.sync;
    p->shape = *shape;
    if (tuning)
        p->info.tuning = *tuning;
    return prs_plan_open(&p->base, (void **)out);
}

void prs_attention_plan_close(struct prs_attention_plan *p)
{
    prs_plan_close(p ? &p->base : NULL);
}

void prs_attention_plan_query(const struct prs_attention_plan *p, struct prs_attention_info *info)
{
    *info = p->info;
    info->workspace_bytes = p->base.workspace_bytes;
}

static int encode_inputs(struct prs_attention_plan *p, const void *q, const void *k, const void *v)
{
    struct prs_attention_args *a = &p->args;
    uint32_t heads_kv = p->shape.heads_kv;
    struct box queries = {WARPGROUP_ROWS, true}, block = box_of_block(p);
    struct box piece = {prs_attention_piece_rows(p->shape.head_dim), false};
    bool pushes = a->schedule.place.world > 1 && a->planes == 0;
    int r = encode_tensor(p, q, p->shape.heads_q, queries, &a->q);
    if (!r)
        r = encode_tensor(p, k, heads_kv, block, &a->k);
    if (!r)
        r = encode_tensor(p, v, heads_kv, block, &a->v);
    if (r == 0 && pushes)
        r = encode_tensor(p, k, heads_kv, piece, &a->push_k);
    if (r == 0 && pushes)
        r = encode_tensor(p, v, heads_kv, piece, &a->push_v);
    return r;
}

int prs_ring_attention(struct prs_attention_plan *p, const void *q, const void *k, const void *v, void *out, float *lse,
                       struct CUstream_st *stream)
{
    int before, r;
    if (!q || !k || !v || !out)
        return prs_fail(-EINVAL, "attention: q %p, k %p, v %p, out %p: must not be NULL", q, k, v, out);
    if (((uintptr_t)q | (uintptr_t)k | (uintptr_t)v | (uintptr_t)out) % 16 != 0 || (uintptr_t)lse % 4 != 0)
        return prs_fail(-EINVAL, "attention: q %p, k %p, v %p, out %p: must be 16-byte aligned, lse %p 4-byte", q, k, v,
                        out, (void *)lse);
    r = prs_plan_enter(&p->base, &before);
    if (r)
        return r;
    p->args.out = out;
    p->args.lse = lse;
    p->k = k, p->v = v;
    r = encode_inputs(p, q, k, v);
    if (!r)
        r = prs_plan_launch(&p->base, stream);
    prs_context_leave(before);
    return r;
}
