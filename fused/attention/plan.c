/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention: plans and launches. */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "fused/attention/copies.h"
#include "fused/attention/deal.h"
#include "fused/attention/kernels.h"
#include "fused/attention/tensors.h"
#include "fused/attention/tuning.h"
#include "fused/core/plan.h"
#include "transport/util/error.h"

enum {
    KEPT_SIZES = 64 /* smaller than the plan: how they are dealt is kept. 4 KB each */
};

/* Where the pieces of a launch lie on the device. */
struct pieces {
    struct prs_attention_piece *pieces;
    struct prs_attention_part *parts;
    uint32_t *pieces_of;
};

/* How a launch that is smaller than its plan is dealt. */
struct dealt {
    uint32_t batch, seq, pieces_count, cuts_count;
    struct prs_attention_cut cuts[];
};

struct prs_attention_plan {
    struct prs_plan base;
    struct prs_attention_shape shape;
    struct prs_attention_info info;
    struct prs_attention_kernel kernel;
    struct prs_attention_args args;  /* arguments of the kernel, except those that differ from launch to launch */
    const void *k, *v;               /* of the launch that is being enqueued */
    struct prs_prepare_args prepare; /* the same; striped attention */
    struct prs_attention_tuning wanted;
    /* Sizes: args and, of smaller launches, lay are those of launches of this shape. batch 0: of none. */
    struct prs_attention_shape now;
    struct prs_attention_schedule most; /* of launches of the plan's size */
    uint32_t most_pieces;
    struct pieces whole, smaller; /* of launches of the plan's size, which are uploaded; and of a smaller one */
    struct prs_lay_args lay;
    struct dealt *kept[KEPT_SIZES];
    uint32_t kept_next; /* replaces this one */
};

static struct prs_attention_plan *self(struct prs_plan *p)
{
    return (struct prs_attention_plan *)p;
}

static struct prs_attention_box box_of_block(const struct prs_attention_plan *p, bool values)
{
    return (struct prs_attention_box){p->args.schedule.block_rows, true, values};
}

static int encode_tensor(const struct prs_attention_plan *p, const void *base, uint32_t heads,
                         struct prs_attention_box box, CUtensorMap *map)
{
    return prs_attention_encode(&p->now, &p->args.schedule, base, 1, heads, box, map);
}

/* If copy engines move the data: encodes the tensors of all other ranks. */
static int encode_received(struct prs_attention_plan *p)
{
    const struct prs_attention_schedule *s = &p->args.schedule;
    struct prs_attention_box box = box_of_block(p, false);
    uint32_t heads = p->shape.heads_kv, slices;
    int r;
    if (p->args.planes == 0) {
        r = prs_attention_encode_stages(&p->now, s, p->args.staging[0], box, &p->args.received);
        return r ? r
                 : prs_attention_encode_stages(&p->now, s, p->args.staging[0], box_of_block(p, true),
                                               &p->args.received_values);
    }
    slices = s->place.world - 1;
    if (prs_attention_value_dim(&p->now) == p->now.head_dim)
        return prs_attention_encode(&p->now, s, p->args.staging[0], 2 * slices, heads, box, &p->args.received);
    r = prs_attention_encode(&p->now, s, p->args.staging[0], slices, heads, box, &p->args.received);
    return r ? r
             : prs_attention_encode(&p->now, s, p->args.staging[0] + prs_attention_copied_at(&p->now, s, 1, PRS_VALUES),
                                    slices, heads, box_of_block(p, true), &p->args.received_values);
}

/* The most parts of a launch, which may be smaller than the plan. A striped one has none. */
static uint32_t most_parts(const struct prs_attention_plan *p)
{
    return p->shape.stripe != 0 ? 0 : prs_attention_deal_most_parts(p->info.tuning.ctas);
}

/* Bytes of `struct pieces`. */
static size_t pieces_bytes(const struct prs_attention_plan *p)
{
    const struct prs_attention_schedule *s = &p->args.schedule;
    size_t pieces = ((size_t)s->tasks + most_parts(p)) * sizeof(struct prs_attention_piece);
    size_t parts = most_parts(p) * sizeof(struct prs_attention_part), groups = s->groups * sizeof(uint32_t);
    return (pieces + parts + groups + 127) / 128 * 128;
}

static struct pieces pieces_at(const struct prs_attention_plan *p, uint8_t *at)
{
    struct pieces x = {.pieces = (struct prs_attention_piece *)at};
    x.parts = (struct prs_attention_part *)(x.pieces + p->args.schedule.tasks + most_parts(p));
    x.pieces_of = (uint32_t *)(x.parts + most_parts(p));
    return x;
}

/* Takes one piece of memory for the pieces of a launch of the plan's size and of a smaller one, claims, the parts'
 * counters, finished groups, and what is prepared before a striped launch; and memory that plans share, for partial
 * results of parts. */
static int open_own(struct prs_attention_plan *p)
{
    struct prs_attention_args *a = &p->args;
    const struct prs_attention_schedule *s = &a->schedule;
    size_t groups = s->groups * sizeof(uint32_t), pieces = pieces_bytes(p);
    size_t counters = most_parts(p) * prs_attention_part_counters(s->tile_rows) * sizeof(uint32_t);
    size_t partial =
        most_parts(p) * prs_attention_partial(s->tile_rows, prs_attention_value_dim(&p->shape)) * sizeof(float);
    size_t at_claims = 2 * pieces;
    size_t at_counters = at_claims + sizeof(*a->claims), at_finished = at_counters + counters;
    size_t at_prepared = (at_finished + 3 * groups + 127) / 128 * 128;
    size_t all = at_prepared + prs_attention_prepared_bytes(&p->shape, s->place.world);
    int r = prs_plan_local(&p->base, all, all);
    uint8_t *own = p->base.own.at;
    if (r == 0 && partial != 0)
        r = prs_plan_scratch(&p->base, partial);
    if (r)
        return r;
    p->whole = pieces_at(p, own);
    p->smaller = pieces_at(p, own + pieces);
    a->partial = (float *)p->base.scratch.at;
    a->parts_done = (uint32_t *)(own + at_counters);
    a->claims = (struct prs_attention_claims *)(own + at_claims);
    a->finished = (uint32_t *)(own + at_finished);
    prs_attention_place_prepared(&p->shape, s->place.world, own + at_prepared, &p->prepare);
    return 0;
}

static int upload_deal(struct prs_attention_plan *p, const struct prs_attention_deal *d)
{
    struct prs_fused *ctx = p->base.ctx;
    size_t parts = d->parts_count * sizeof(*d->parts);
    int r =
        prs_cuda_upload(ctx, p->whole.pieces, d->pieces, d->pieces_count * sizeof(*d->pieces), "cudaMemcpy of pieces");
    if (r == 0 && parts != 0)
        r = prs_cuda_upload(ctx, p->whole.parts, d->parts, parts, "cudaMemcpy of parts");
    if (!r)
        r = prs_cuda_upload(ctx, p->whole.pieces_of, d->pieces_of, p->args.schedule.groups * sizeof(uint32_t),
                            "cudaMemcpy of how many pieces a group has");
    p->most_pieces = d->pieces_count;
    return r;
}

static int open_deal(struct prs_attention_plan *p)
{
    struct prs_attention_deal deal;
    int r = p->shape.stripe != 0 ? prs_attention_deal_whole(&deal, &p->args.schedule)
                                 : prs_attention_deal_init(&deal, &p->args.schedule, p->info.tuning.ctas);
    if (r)
        return r;
    p->most = p->args.schedule;
    r = open_own(p);
    if (!r)
        r = upload_deal(p, &deal);
    prs_attention_deal_fini(&deal);
    return r;
}

/* ---- sizes ---- */
/* Deals a smaller launch, and keeps the result in place of the oldest one. NULL: -ENOMEM. */
static struct dealt *deal_smaller(struct prs_attention_plan *p, const struct prs_attention_schedule *s,
                                  const struct prs_attention_shape *launch)
{
    struct prs_attention_deal deal;
    struct dealt *x;
    size_t cuts;
    if (prs_attention_deal_init(&deal, s, p->info.tuning.ctas))
        return NULL;
    cuts = deal.parts_count * sizeof(*x->cuts);
    x = malloc(sizeof(*x) + cuts);
    if (x) {
        *x = (struct dealt){launch->batch, launch->seq, deal.pieces_count, deal.parts_count};
        memcpy(x->cuts, deal.cuts, cuts);
        free(p->kept[p->kept_next]);
        p->kept[p->kept_next] = x;
        p->kept_next = (p->kept_next + 1) % KEPT_SIZES;
    }
    prs_attention_deal_fini(&deal);
    return x;
}

/* Finds the cuts of a smaller launch for lay_pieces(). */
static int prepare_cuts(struct prs_attention_plan *p, const struct prs_attention_schedule *s,
                        const struct prs_attention_shape *launch)
{
    struct dealt *x = NULL;
    if (most_parts(p) > PRS_ATTENTION_MOST_CUTS)
        return prs_fail(-ENOTSUP,
                        "attention: a launch of %u sequences of %u positions, of a plan for %u of %u and %u CTAs: a "
                        "launch may be smaller than its plan with %d CTAs at most: `ctas` of the tuning",
                        launch->batch, launch->seq, p->shape.batch, p->shape.seq, p->info.tuning.ctas,
                        PRS_ATTENTION_MOST_CUTS / 2);
    for (uint32_t i = 0; i < KEPT_SIZES && !x; i++)
        x = p->kept[i] && p->kept[i]->batch == launch->batch && p->kept[i]->seq == launch->seq ? p->kept[i] : NULL;
    if (!x)
        x = deal_smaller(p, s, launch);
    if (!x)
        return prs_fail(-ENOMEM, "attention: no memory for a launch of %u sequences of %u positions", launch->batch,
                        launch->seq);
    p->lay.cuts_count = x->cuts_count;
    memcpy(p->lay.cuts, x->cuts, x->cuts_count * sizeof(*x->cuts));
    p->args.pieces_count = x->pieces_count;
    return 0;
}

/* Fills in the arguments of lay_pieces(). */
static int prepare_smaller(struct prs_attention_plan *p, const struct prs_attention_schedule *s,
                           const struct prs_attention_shape *launch)
{
    p->lay.schedule = *s;
    p->lay.pieces = p->smaller.pieces, p->lay.parts = p->smaller.parts, p->lay.pieces_of = p->smaller.pieces_of;
    p->lay.striped = p->shape.stripe != 0;
    p->args.pieces_count = s->tasks;
    return p->lay.striped != 0 ? 0 : prepare_cuts(p, s, launch);
}

/* Makes the arguments those of launches of this size. */
static int take_size(struct prs_attention_plan *p, const struct prs_attention_shape *launch)
{
    struct prs_attention_args *a = &p->args;
    bool whole = prs_attention_same_size(launch, &p->shape);
    const struct pieces *pieces = whole ? &p->whole : &p->smaller;
    uint32_t rows = launch->seq / p->most.place.world;
    struct prs_attention_info info = p->info;
    int r = 0;
    if (prs_attention_same_size(launch, &p->now))
        return 0;
    p->now = *launch;
    a->schedule = whole ? p->most : prs_attention_smaller(&p->most, launch->stripe != 0, launch->batch, rows);
    a->pieces_count = p->most_pieces;
    if (!whole)
        r = prepare_smaller(p, &a->schedule, launch);
    a->pieces = pieces->pieces, a->parts = pieces->parts, a->pieces_of = pieces->pieces_of;
    a->out_strides = prs_attention_strides_of(launch, &a->schedule, launch->heads_q, prs_attention_value_dim(launch));
    if (a->planes != 0)
        a->planes = prs_attention_planes(launch, &a->schedule, launch->heads_kv);
    prs_attention_tuning_predict(launch, &a->schedule, &info);
    a->push_gap = prs_attention_tuning_gap(&info);
    if (r == 0 && a->schedule.place.world > 1)
        r = encode_received(p);
    p->now.batch = r ? 0 : launch->batch;
    return r;
}

static void take_scale(struct prs_attention_plan *p, const struct prs_attention_shape *launch, double scale)
{
    struct prs_attention_args *a = &p->args;
    prs_attention_set_scale(launch, scale, a);
    p->base.switching.size = prs_said_attention(a->scale, launch->batch, launch->seq / p->most.place.world);
    if (a->cap != 0)
        a->scale = 0.69314718f; /* lse is computed from capped scores, which are in log2 */
}

/* The needs of the plan (core/plan.h), by number. Staging: keys and values of the other ranks. Flags: arrival counters
 * in two banks, credits. */
enum { STAGING, FLAGS, SIGNALS, SWITCH };

static int need_workspace(struct prs_attention_plan *p)
{
    const struct prs_attention_schedule *s = &p->args.schedule;
    if (s->place.world == 1)
        return 0;
    prs_plan_need(&p->base, STAGING, (struct prs_need){PRS_SYMMETRIC_DATA, true, PRS_ATTENTION_POOL_STAGING},
                  prs_attention_tuning_staging(&p->shape, s));
    prs_plan_shares(&p->base, SWITCH, PRS_ATTENTION_POOL_SWITCH);
    p->base.switching.always = p->shape.stripe != 0;
    prs_plan_need(&p->base, FLAGS, (struct prs_need){PRS_SYMMETRIC_CLEAN, false, NULL},
                  (2ull * prs_attention_arrival_words(s) + prs_attention_credit(s, s->place.local_ranks, 0)) *
                      sizeof(uint32_t));
    if (s->place.nodes > 1)
        prs_plan_need(&p->base, SIGNALS, (struct prs_need){PRS_SYMMETRIC_SIGNALS, true, NULL},
                      prs_attention_far_words(s) * sizeof(uint64_t));
    return p->args.planes != 0 ? prs_plan_copies(&p->base) : 0;
}

static int place(struct prs_plan *base)
{
    struct prs_attention_plan *p = self(base);
    struct prs_attention_args *a = &p->args;
    const struct prs_attention_schedule *s = &a->schedule;
    if (s->place.world == 1)
        return take_size(p, &p->shape);
    a->arrival_words = prs_attention_arrival_words(s);
    for (uint32_t peer = 0; peer < s->place.local_ranks; peer++) {
        a->staging[peer] = base->memory[STAGING]->at[peer];
        a->arrivals[peer] = (uint32_t *)base->memory[FLAGS]->at[peer];
        a->credits[peer] = a->arrivals[peer] + 2 * a->arrival_words;
    }
    if (s->place.nodes > 1)
        prs_symmetric_far(base->ctx, base->memory[STAGING], base->memory[SIGNALS], &a->far);
    return take_size(p, &p->shape);
}

static void close_plan(struct prs_plan *base)
{
    struct prs_attention_plan *p = self(base);
    for (uint32_t i = 0; i < KEPT_SIZES; i++) {
        free(p->kept[i]);
        p->kept[i] = NULL;
    }
}

static int choose_kernel(struct prs_attention_plan *p, uint32_t *ctas)
{
    struct prs_attention_tuning *t = &p->info.tuning;
    struct prs_attention_schedule *s = &p->args.schedule;
    int r;
    if (p->shape.stripe != 0 && p->base.ctx->place.nodes > 1)
        return prs_fail(-ENOTSUP, "attention: striped, it runs on one node, and the ranks are on %u",
                        p->base.ctx->place.nodes);
    if (p->shape.stripe != 0 && t->mover == PRS_MOVED_BY_COPY_ENGINES)
        return prs_fail(-EINVAL, "attention: mover %u of the tuning: striped, only CTAs move data", t->mover);
    if (p->shape.stripe == 0 && t->block_rows == 0 && t->overlap == 0)
        t->overlap = prs_attention_tuning_overlap(&p->shape, &p->base.ctx->place);
    if (p->shape.stripe == 0 && t->block_rows == 0)
        t->block_rows = prs_attention_tuning_block(&p->shape, &p->base.ctx->place);
    p->kernel = (struct prs_attention_kernel){.type = PRS_ATTENTION_TYPE,
                                              .head_dim = p->shape.head_dim,
                                              .value_dim = prs_attention_value_dim(&p->shape),
                                              .block_rows = t->block_rows,
                                              .overlap = t->overlap,
                                              .far = p->base.ctx->place.nodes > 1,
                                              .striped = p->shape.stripe != 0};
    r = prs_attention_kernel_find(&p->kernel);
    if (r)
        return prs_fail(
            -EINVAL,
            "attention: no kernel for head_dim %u and values of %u with %u keys a step and overlap %u on %u "
            "nodes%s",
            p->shape.head_dim, prs_attention_value_dim(&p->shape), t->block_rows, t->overlap, p->base.ctx->place.nodes,
            p->kernel.striped ? ", striped" : "");
    r = prs_attention_kernel_prepare(&p->kernel, ctas);
    if (r)
        return prs_fail(r, "attention: the kernel does not fit device %d: built for another GPU?",
                        p->base.ctx->config.device);
    *ctas = prs_context_clusters(p->base.ctx, *ctas, 1);
    t->block_rows = s->block_rows = p->kernel.block_rows;
    t->overlap = p->kernel.overlap;
    s->tile_rows = p->kernel.tile_rows;
    return 0;
}

/* The default limit is half of what is free on the fullest GPU. */
static int choose(struct prs_attention_plan *p, const struct prs_hint *agreed)
{
    struct prs_attention_tuning *t = &p->info.tuning;
    size_t free_bytes, total;
    uint32_t ctas;
    int r = choose_kernel(p, &ctas);
    if (r == 0 && t->mover == PRS_MOVED_BY_COPY_ENGINES)
        r = prs_context_check_copies(p->base.ctx);
    if (!r)
        r = prs_cuda_check(cudaMemGetInfo(&free_bytes, &total), "cudaMemGetInfo");
    if (r)
        return r;
    p->base.call.hint.least = agreed ? agreed->least : free_bytes / 2;
    if (t->workspace_limit == 0)
        t->workspace_limit = p->base.call.hint.least;
    if (p->base.ctx->shared_device)
        t->mover = PRS_MOVED_BY_CTAS;
    return prs_attention_tuning_choose(&p->shape, &p->base.ctx->place, ctas, &p->info, &p->args.schedule);
}

static void fill_args(struct prs_attention_plan *p)
{
    struct prs_attention_args *a = &p->args;
    prs_attention_set_stripes(&p->shape, a);
    a->heads_first = p->shape.heads_first != 0;
    a->row_bytes = prs_attention_row_bytes(&p->shape);
    a->planes = p->info.tuning.mover == PRS_MOVED_BY_COPY_ENGINES
                    ? prs_attention_planes(&p->shape, &a->schedule, p->shape.heads_kv)
                    : 0;
}

static void add_terms(struct prs_plan *p, const struct prs_attention_shape *sh, const struct prs_attention_tuning *t)
{
    prs_plan_term(p, "batch", sh->batch);
    prs_plan_term(p, "heads_q", sh->heads_q);
    prs_plan_term(p, "heads_kv", sh->heads_kv);
    prs_plan_term(p, "head_dim", sh->head_dim);
    prs_plan_term(p, "value_dim", prs_attention_value_dim(sh));
    prs_plan_term(p, "seq", sh->seq);
    prs_plan_term(p, "causal", sh->causal != 0);
    prs_plan_term(p, "heads_first", sh->heads_first != 0);
    prs_attention_score_terms(p, sh);
    prs_plan_term(p, "mode", t->mode);
    prs_plan_term(p, "ctas", t->ctas);
    prs_plan_term(p, "heads_per_step", t->heads_per_step);
    prs_plan_term(p, "slab_rows", t->slab_rows);
    prs_plan_term(p, "block_rows", t->block_rows);
    prs_plan_term(p, "overlap", t->overlap);
    prs_plan_term(p, "mover", t->mover);
    prs_plan_term(p, "bytes of arguments", sizeof(struct prs_attention_args));
}

static int decide(struct prs_plan *base, const struct prs_hint *agreed)
{
    struct prs_attention_plan *p = self(base);
    int r = prs_check_reserved(&p->shape, "struct prs_attention_shape");
    if (!r)
        r = prs_check_reserved(&p->wanted, "struct prs_attention_tuning");
    if (!r)
        r = prs_attention_tuning_check(&p->shape, base->ctx->config.world);
    if (r)
        return r;
    p->info.tuning = p->wanted;
    r = choose(p, agreed);
    if (r)
        return r;
    fill_args(p);
    add_terms(base, &p->shape, &p->info.tuning);
    r = need_workspace(p);
    return r ? r : open_deal(p);
}

static int launch_kernel(struct prs_plan *base, cudaStream_t stream)
{
    struct prs_attention_plan *p = self(base);
    return prs_attention_kernel_launch(&p->kernel, &p->args, p->info.tuning.ctas, stream);
}

static int prepare_stripes(struct prs_plan *base, cudaStream_t stream)
{
    return prs_attention_kernel_prepare_stripes(&self(base)->prepare, stream);
}

static int lay_pieces(struct prs_plan *base, cudaStream_t stream)
{
    struct prs_attention_plan *p = self(base);
    return !prs_attention_same_size(&p->now, &p->shape) ? prs_attention_kernel_lay(&p->lay, stream) : 0;
}

static prs_launch_step_fn *const forward_steps[] = {prepare_stripes, lay_pieces, launch_kernel, NULL};

static int begin_copies(struct prs_plan *base, cudaStream_t stream)
{
    return prs_attention_kernel_begin_copies(&self(base)->args, stream);
}

static int enqueue_copies(struct prs_plan *base)
{
    struct prs_attention_plan *p = self(base);
    return prs_attention_copies_enqueue(base->copies, &p->now, &p->args, p->k, p->v);
}

int prs_attention_plan_open(struct prs_fused *ctx, const struct prs_attention_shape *shape,
                            const struct prs_attention_tuning *tuning, struct prs_attention_plan **out)
{
    static const struct prs_plan_steps steps = {.name = "ring attention",
                                                .awaited = prs_attention_awaited,
                                                .decide = decide,
                                                .place = place,
                                                .close = close_plan,
                                                .begin_copies = begin_copies,
                                                .copies = enqueue_copies,
                                                .switch_plan = prs_attention_kernel_switch_plan};
    struct prs_attention_plan *p = prs_plan_new(ctx, &steps, sizeof(*p));
    if (!p)
        return -ENOMEM;
    p->base.sync = &p->args.sync;
    p->shape = *shape;
    if (tuning)
        p->wanted = *tuning;
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
    info->shared_bytes = p->base.shared_bytes;
}

static int encode_inputs(struct prs_attention_plan *p, const struct prs_attention_operands *x)
{
    struct prs_attention_args *a = &p->args;
    uint32_t heads_kv = p->shape.heads_kv;
    struct prs_attention_box queries = {PRS_ATTENTION_WARPGROUP_ROWS, true, false};
    uint32_t piece_rows = prs_attention_piece_rows(p->args.row_bytes);
    struct prs_attention_box piece = {piece_rows, false, false}, values_piece = {piece_rows, false, true};
    bool pushes = a->schedule.place.world > 1 && a->planes == 0;
    int r = encode_tensor(p, x->q, p->shape.heads_q, queries, &a->q);
    if (!r)
        r = encode_tensor(p, x->k, heads_kv, box_of_block(p, false), &a->k);
    if (!r)
        r = encode_tensor(p, x->v, heads_kv, box_of_block(p, true), &a->v);
    if (r == 0 && pushes)
        r = encode_tensor(p, x->k, heads_kv, piece, &a->push_k);
    if (r == 0 && pushes)
        r = encode_tensor(p, x->v, heads_kv, values_piece, &a->push_v);
    return r;
}

static int check_operands(const struct prs_attention_operands *x)
{
    uintptr_t all = (uintptr_t)x->q | (uintptr_t)x->k | (uintptr_t)x->v | (uintptr_t)x->out;
    if (!x->q || !x->k || !x->v || !x->out)
        return prs_fail(-EINVAL, "attention: q %p, k %p, v %p, out %p: must not be NULL", x->q, x->k, x->v, x->out);
    if (all % 16 != 0 || (uintptr_t)x->lse % 4 != 0)
        return prs_fail(-EINVAL, "attention: q %p, k %p, v %p, out %p: must be 16-byte aligned, lse %p 4-byte", x->q,
                        x->k, x->v, x->out, (void *)x->lse);
    return prs_check_reserved(x, "struct prs_attention_operands");
}

int prs_attention_launch(struct prs_attention_plan *p, const struct prs_attention_operands *x,
                         struct CUstream_st *stream)
{
    struct prs_striped_operands striped = {x->cu_seqlens, x->sequences, x->stripe_ranks, x->sinks};
    struct prs_attention_shape launch;
    double scale;
    int before, r = check_operands(x);
    if (!r)
        r = prs_attention_check_striped(&p->shape, &striped);
    if (!r)
        r = prs_attention_tuning_launch(&p->shape, &p->base.ctx->place, x->batch, x->seq, &launch);
    if (!r)
        r = prs_attention_tuning_scale(&p->shape, x->scale, &scale);
    if (!r)
        r = prs_plan_enter(&p->base, &before);
    if (r)
        return r;
    p->args.out = x->out;
    p->args.lse = x->lse;
    p->args.sinks = x->sinks;
    prs_attention_take_striped(&launch, &p->base, &striped, &p->prepare, &p->args.stripes);
    p->k = x->k, p->v = x->v;
    take_scale(p, &launch, scale);
    r = take_size(p, &launch);
    if (!r)
        r = encode_inputs(p, x);
    if (!r)
        r = prs_plan_launch(&p->base, forward_steps, stream);
    prs_cuda_leave(before);
    return r;
}
