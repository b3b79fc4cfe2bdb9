/* SPDX-License-Identifier: Apache-2.0 */
/* The backward pass of ring attention: plans and launches. */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#include "fused/attention/backward/kernels.h"
#include "fused/attention/kernels.h"
#include "fused/attention/tensors.h"
#include "fused/attention/tuning.h"
#include "fused/core/plan.h"
#include "transport/util/error.h"

enum {
    TILES_TOGETHER = 8, /* with one rank: how many tasks of a head run at a time */
    LEAST_HEADS = 3,
    LEAST_STRIPED = 2,
    TASKS_OF_TWO = 96,  /* from so many tasks of a head on, two heads at a time are enough */
    TASKS_OF_ONE = 192, /* from so many on, one head is enough */
};

/* Offsets in the memory of this rank alone: of tasks, claims, finished groups, the number of tasks of each group,
 * turns, counts of sums for other nodes, tasks of a launch that is smaller than the plan and how many each group has,
 * and the sequence of each position. */
struct own {
    uint64_t claims, finished, tasks_of, turns, converted, smaller, smaller_of, prepared, all;
};

struct prs_attention_backward_plan {
    struct prs_plan base;
    struct prs_attention_shape shape;
    struct prs_attention_tuning wanted;
    struct prs_attention_info info; /* as of a forward plan with the stream as keys and values */
    struct prs_backward_kernel kernel;
    struct prs_backward_args args; /* arguments of the kernels, except those that differ from launch to launch */
    uint64_t staging_bytes;
    struct prs_terms_args terms;
    struct prs_sinks_args sinks;
    struct prs_finish_args finish;
    struct prs_prepare_args prepare; /* of the launch that is being enqueued; striped attention */
    struct own own;
    /* The arguments of all kernels are at present those of launches of this shape. batch 0: of none. */
    struct prs_attention_shape now;
    struct prs_attention_schedule most; /* of launches of the plan's size */
    struct prs_lay_tasks_args lay;      /* of smaller ones */
};

static struct prs_attention_backward_plan *self(struct prs_plan *p)
{
    return (struct prs_attention_backward_plan *)p;
}

/* ---- deciding ---- */
static int check(const struct prs_attention_backward_plan *p)
{
    const struct prs_attention_tuning *t = &p->wanted;
    uint32_t rows;
    int r = prs_check_reserved(&p->shape, "struct prs_attention_shape");
    if (!r)
        r = prs_check_reserved(t, "struct prs_attention_tuning");
    if (!r)
        r = prs_attention_tuning_check(&p->shape, p->base.ctx->config.world);
    if (r)
        return r;
    if (!prs_attention_tuning_plain(&p->shape))
        return prs_fail(-ENOTSUP,
                        "attention: head_dim %u with values of %u has no backward pass: built are 64 and 128 for both",
                        p->shape.head_dim, prs_attention_value_dim(&p->shape));
    if (p->base.ctx->place.nodes > 1 && p->shape.stripe != 0)
        return prs_fail(-ENOTSUP, "attention: striped, the backward pass runs on one node, and the ranks are on %u",
                        p->base.ctx->place.nodes);
    if (p->shape.stripe != 0 && t->slab_rows != 0)
        return prs_fail(-EINVAL, "attention: slab_rows %u of the tuning: a slab of striped attention is a stripe",
                        t->slab_rows);
    rows = prs_backward_block_rows(p->shape.head_dim);
    if ((t->block_rows != 0 && t->block_rows != rows) || t->overlap != 0)
        return prs_fail(-EINVAL,
                        "attention: the backward pass of head_dim %u has one kernel, of %u queries a step: "
                        "block_rows %u or overlap %u is not built",
                        p->shape.head_dim, rows, t->block_rows, t->overlap);
    if (t->mover != 0 && t->mover != PRS_MOVED_BY_CTAS)
        return prs_fail(-EINVAL, "attention: mover %u of the tuning: in the backward pass only CTAs move data",
                        t->mover);
    return 0;
}

/* Bytes of the terms: two banks. */
static uint64_t terms_bytes(const struct prs_attention_backward_plan *p)
{
    const struct prs_attention_schedule *s = &p->args.stream.schedule;
    return prs_backward_term(s, 2, 0, 0, 0) * sizeof(struct prs_backward_term);
}

/* How many KV heads are worked on together. Their tasks alternate between the heads, so the more heads there are, the
 * longer the pause between two tasks of one head. But when fewer tasks of one head run together, its sums come from
 * memory more often; and sums for other ranks leave only when the step has ended. One rank: about 8 tasks of a head run
 * together. Several ranks: as few heads as keep the tasks of the next step's later segment from overtaking (times by
 * heads a step: doc/results/attention-turns-4xH200.json). Long sequences: fewer, because the data of a head alone
 * exceeds L2 (attention-long-2xH200.json). Striped, with one rank too: tasks of different length come to a block at
 * different times, and then sums come from memory (attention-striped-heads-1xH200.json). No step is much smaller than
 * the others. */
static uint32_t step_of(const struct prs_attention_backward_plan *p, uint32_t ctas)
{
    uint32_t world = p->base.ctx->config.world, pairs = p->shape.batch * p->shape.heads_kv;
    uint32_t tasks = prs_ceil_div(p->shape.seq / world, PRS_BACKWARD_TILE);
    bool alone = world == 1 && p->shape.stripe == 0;
    uint32_t most = alone ? prs_ceil_div(ctas, TILES_TOGETHER) : 3 * ctas / (4 * tasks);
    uint32_t least = tasks >= TASKS_OF_ONE ? 1 : tasks >= TASKS_OF_TWO ? 2 : LEAST_HEADS;
    if (p->shape.stripe != 0)
        least = LEAST_STRIPED;
    if (most < least)
        most = least;
    return p->wanted.heads_per_step != 0 ? p->wanted.heads_per_step : prs_ceil_div(pairs, prs_ceil_div(pairs, most));
}

/* shape: that of the stream. */
static void predict(const struct prs_attention_shape *shape, const struct prs_attention_schedule *s,
                    struct prs_attention_info *info)
{
    prs_attention_tuning_predict(shape, s, info);
    info->predicted_us *= 2.5; /* five products for each pair of rows; the forward pass has two */
}

/* Chooses as for a forward plan whose keys and values are the stream: its heads are all query heads. */
static int choose_stream(struct prs_attention_backward_plan *p, uint32_t ctas)
{
    struct prs_attention_schedule *s = &p->args.stream.schedule;
    struct prs_attention_shape shape = p->shape;
    struct prs_attention_info *info = &p->info;
    uint32_t shared = shape.heads_q / shape.heads_kv;
    int r;
    shape.heads_kv = shape.heads_q;
    p->args.shape = (struct prs_backward_shape){p->shape.heads_kv, shared};
    info->tuning.heads_per_step = shared * step_of(p, ctas);
    s->tile_rows = PRS_BACKWARD_TILE;
    s->block_rows = prs_backward_block_rows(shape.head_dim);
    s->backwards = shape.stripe == 0 && p->base.ctx->place.nodes == 1;
    r = prs_attention_tuning_choose(&shape, &p->base.ctx->place, ctas, info, s);
    if (r)
        return r;
    p->staging_bytes = prs_attention_staged_bytes(s, prs_attention_row_bytes(&shape));
    predict(&shape, s, info);
    info->tuning.heads_per_step /= shared;
    info->tuning.block_rows = s->block_rows;
    return 0;
}

static int choose(struct prs_attention_backward_plan *p, const struct prs_hint *agreed)
{
    struct prs_attention_tuning *t = &p->info.tuning;
    size_t free_bytes, total;
    uint32_t ctas;
    int r;
    p->kernel = (struct prs_backward_kernel){PRS_ATTENTION_TYPE, p->shape.head_dim, p->shape.stripe != 0,
                                             p->shape.soft_cap != 0, p->base.ctx->place.nodes > 1};
    r = prs_backward_kernels_prepare(&p->kernel, &ctas);
    if (r)
        return prs_fail(r, "attention: the backward kernels do not fit device %d: built for another GPU?",
                        p->base.ctx->config.device);
    r = prs_cuda_check(cudaMemGetInfo(&free_bytes, &total), "cudaMemGetInfo");
    if (r)
        return r;
    p->base.call.hint.least = agreed ? agreed->least : free_bytes / 2;
    *t = p->wanted;
    t->mover = PRS_MOVED_BY_CTAS;
    if (t->workspace_limit == 0)
        t->workspace_limit = p->base.call.hint.least;
    return choose_stream(p, prs_context_clusters(p->base.ctx, ctas, 1));
}

static void fill_args(struct prs_attention_backward_plan *p)
{
    struct prs_backward_args *a = &p->args;
    struct prs_attention_args *x = &a->stream;
    uint32_t before;
    prs_attention_set_stripes(&p->shape, x);
    before = x->stripes.before; /* a key meets the queries that attend to it */
    x->stripes.before = x->stripes.after, x->stripes.after = before;
    x->heads_first = p->shape.heads_first != 0;
    x->row_bytes = prs_attention_row_bytes(&p->shape);
    a->pairs_q = p->shape.batch * p->shape.heads_q;
    p->terms.mirrored = p->shape.stripe == 0;
    p->most = x->schedule;
}

static void add_terms(struct prs_plan *p, const struct prs_attention_shape *sh, const struct prs_attention_tuning *t)
{
    prs_plan_term(p, "batch", sh->batch);
    prs_plan_term(p, "heads_q", sh->heads_q);
    prs_plan_term(p, "heads_kv", sh->heads_kv);
    prs_plan_term(p, "head_dim", sh->head_dim);
    prs_plan_term(p, "seq", sh->seq);
    prs_plan_term(p, "causal", sh->causal != 0);
    prs_plan_term(p, "heads_first", sh->heads_first != 0);
    prs_attention_score_terms(p, sh);
    prs_plan_term(p, "mode", t->mode);
    prs_plan_term(p, "ctas", t->ctas);
    prs_plan_term(p, "heads_per_step", t->heads_per_step);
    prs_plan_term(p, "slab_rows", t->slab_rows);
    prs_plan_term(p, "bytes of arguments", sizeof(struct prs_backward_args));
}

/* ---- memory ---- */
/* Blocks of queries of all ranks. */
static uint64_t sums_of(const struct prs_attention_backward_plan *p)
{
    const struct prs_attention_schedule *s = &p->args.stream.schedule;
    return prs_backward_sum(s, p->args.pairs_q, s->place.world, 0, 0, 0);
}

static uint64_t sums_bytes(const struct prs_attention_backward_plan *p)
{
    return sums_of(p) * PRS_BACKWARD_BLOCK * sizeof(float);
}

/* Bytes of the sums for the queries of `ranks` ranks, in the type in which they are sent. */
static uint64_t part_bytes(const struct prs_attention_backward_plan *p, uint32_t ranks)
{
    uint64_t world = p->base.ctx->config.world;
    return sums_of(p) / world * ranks * PRS_BACKWARD_BLOCK * sizeof(uint16_t);
}

/* Ranks of other nodes. */
static uint32_t far_ranks(const struct prs_attention_backward_plan *p)
{
    const struct prs_place *place = &p->base.ctx->place;
    return place->world - place->local_ranks;
}

static struct own own_of(const struct prs_attention_backward_plan *p)
{
    const struct prs_attention_args *x = &p->args.stream;
    uint64_t tasks = (uint64_t)x->pieces_count * sizeof(struct prs_attention_piece), groups = x->schedule.groups * 4ull;
    struct own o = {.claims = (tasks + 127) / 128 * 128};
    o.finished = o.claims + sizeof(struct prs_attention_claims);
    o.tasks_of = o.finished + 3 * groups;
    o.turns = (o.tasks_of + groups + 127) / 128 * 128;
    o.converted = o.turns + sums_of(p) * sizeof(uint64_t);
    o.smaller = o.converted + (uint64_t)far_ranks(p) * p->args.pairs_q * sizeof(uint32_t);
    o.smaller = (o.smaller + 127) / 128 * 128;
    o.smaller_of = o.smaller + tasks;
    o.prepared = (o.smaller_of + groups + 7) / 8 * 8;
    o.all = o.prepared + prs_attention_prepared_bytes(&p->shape, x->schedule.place.world);
    return o;
}

/* No task is cut: each is one piece. */
static int upload_tasks(struct prs_attention_backward_plan *p)
{
    struct prs_attention_args *x = &p->args.stream;
    const struct prs_attention_schedule *s = &x->schedule;
    uint32_t count = x->pieces_count;
    struct prs_attention_piece *tasks = malloc(count * sizeof(*tasks));
    uint32_t *tasks_of = calloc(s->groups, sizeof(*tasks_of));
    struct own own = p->own;
    uint8_t *at = p->base.own.at;
    int r = !tasks || !tasks_of ? prs_fail(-ENOMEM, "attention: no memory for %u backward tasks", count) : 0;
    for (uint32_t i = 0; i < count && !r; i++) {
        tasks[i] = prs_backward_whole(s, &p->args.shape, p->shape.stripe != 0, i);
        tasks_of[tasks[i].task.group]++;
    }
    if (!r)
        r = prs_cuda_upload(p->base.ctx, at, tasks, count * sizeof(*tasks), "cudaMemcpy of backward tasks");
    if (!r)
        r = prs_cuda_upload(p->base.ctx, at + own.tasks_of, tasks_of, s->groups * sizeof(*tasks_of),
                            "cudaMemcpy of how many tasks a group has");
    free(tasks);
    free(tasks_of);
    x->claims = (struct prs_attention_claims *)(at + own.claims);
    x->finished = (uint32_t *)(at + own.finished);
    return r;
}

/* ---- sizes ---- */
static void take_pieces(struct prs_attention_backward_plan *p, bool smaller)
{
    struct prs_attention_args *x = &p->args.stream;
    uint8_t *at = p->base.own.at;
    x->pieces_count = prs_backward_tasks(&x->schedule, &p->args.shape);
    p->lay.schedule = x->schedule;
    p->lay.shape = p->args.shape;
    p->lay.striped = p->shape.stripe != 0;
    p->lay.tasks = (struct prs_attention_piece *)(at + (smaller ? p->own.smaller : 0));
    p->lay.tasks_of = (uint32_t *)(at + (smaller ? p->own.smaller_of : p->own.tasks_of));
    x->pieces = p->lay.tasks;
    x->pieces_of = p->lay.tasks_of;
}

/* Makes the arguments those of launches of this size. */
static int take_size(struct prs_attention_backward_plan *p, const struct prs_attention_shape *launch)
{
    struct prs_attention_args *x = &p->args.stream;
    struct prs_attention_box block = {prs_backward_block_rows(launch->head_dim), true, false};
    struct prs_attention_shape stream = *launch;
    struct prs_attention_info info = p->info;
    uint32_t world = p->most.place.world, rows = launch->seq / world;
    bool whole = prs_attention_same_size(launch, &p->shape);
    int r = 0;
    if (prs_attention_same_size(launch, &p->now))
        return 0;
    p->now = *launch;
    x->schedule = whole ? p->most : prs_attention_smaller(&p->most, launch->stripe != 0, launch->batch, rows);
    take_pieces(p, !whole);
    p->args.pairs_q = p->finish.pairs_q = x->schedule.pairs;
    x->out_strides = prs_attention_strides_of(launch, &x->schedule, launch->heads_kv, launch->head_dim);
    p->terms.strides = prs_attention_strides_of(launch, &x->schedule, launch->heads_q, launch->head_dim);
    p->finish.strides = p->terms.strides;
    p->terms.schedule = p->finish.schedule = x->schedule;
    stream.heads_kv = stream.heads_q;
    predict(&stream, &x->schedule, &info);
    x->push_gap = prs_attention_tuning_gap(&info);
    if (world > 1)
        r = prs_attention_encode_stages(launch, &x->schedule, x->staging[0], block, &x->received);
    p->now.batch = r ? 0 : launch->batch;
    return r;
}

static void take_scale(struct prs_attention_backward_plan *p, const struct prs_attention_shape *launch, double scale)
{
    struct prs_attention_args *x = &p->args.stream;
    prs_attention_set_scale(launch, scale, x);
    p->finish.scale = x->scale;
    p->base.switching.size = prs_said_attention(x->scale, launch->batch, launch->seq / p->most.place.world);
}

static int open_own(struct prs_attention_backward_plan *p)
{
    struct own own;
    int r;
    p->args.stream.pieces_count = prs_backward_tasks(&p->args.stream.schedule, &p->args.shape);
    own = p->own = own_of(p);
    r = prs_plan_local(&p->base, own.all, own.prepared);
    if (r)
        return r;
    prs_attention_place_prepared(&p->shape, p->args.stream.schedule.place.world, p->base.own.at + own.prepared,
                                 &p->prepare);
    p->args.sums.turns = (uint64_t *)(p->base.own.at + own.turns);
    p->args.far.converted = (uint32_t *)(p->base.own.at + own.converted);
    return upload_tasks(p);
}

/* The needs of the plan (core/plan.h), by number. Staging: the stream, terms, parts of dq that arrive, parts for other
 * nodes. Flags: a count of parts for each rank, arrival counters in two banks, credits. */
enum { STAGING, FLAGS, SIGNALS, SWITCH };

static uint64_t flag_words(const struct prs_attention_schedule *s)
{
    return s->place.world + 2ull * prs_attention_arrival_words(s) + prs_attention_credit(s, s->place.local_ranks, 0);
}

static int need_workspace(struct prs_attention_backward_plan *p)
{
    const struct prs_attention_schedule *s = &p->args.stream.schedule;
    int r = prs_plan_scratch(&p->base, sums_bytes(p) + (s->place.world == 1 ? terms_bytes(p) : 0));
    if (r || s->place.world == 1)
        return r;
    prs_plan_need(&p->base, STAGING, (struct prs_need){PRS_SYMMETRIC_DATA, true, PRS_ATTENTION_POOL_STAGING},
                  p->staging_bytes + terms_bytes(p) + part_bytes(p, s->place.world - 1 + far_ranks(p)));
    prs_plan_shares(&p->base, SWITCH, PRS_ATTENTION_POOL_SWITCH);
    p->base.switching.always = p->shape.stripe != 0;
    prs_plan_need(&p->base, FLAGS, (struct prs_need){PRS_SYMMETRIC_CLEAN, false, NULL},
                  flag_words(s) * sizeof(uint32_t));
    if (s->place.nodes > 1)
        prs_plan_need(&p->base, SIGNALS, (struct prs_need){PRS_SYMMETRIC_SIGNALS, true, NULL},
                      prs_backward_far_words(s) * sizeof(uint64_t));
    return 0;
}

static int decide(struct prs_plan *base, const struct prs_hint *agreed)
{
    struct prs_attention_backward_plan *p = self(base);
    int r = check(p);
    if (!r)
        r = choose(p, agreed);
    if (r)
        return r;
    fill_args(p);
    add_terms(base, &p->shape, &p->info.tuning);
    r = need_workspace(p);
    return r ? r : open_own(p);
}

static int place(struct prs_plan *base)
{
    struct prs_attention_backward_plan *p = self(base);
    struct prs_backward_args *a = &p->args;
    struct prs_attention_args *x = &a->stream;
    uint32_t world = x->schedule.place.world;
    x->arrival_words = prs_attention_arrival_words(&x->schedule);
    a->sums.sums = (float *)base->scratch.at;
    if (world == 1)
        p->terms.terms[0] = (struct prs_backward_term *)(base->scratch.at + sums_bytes(p));
    a->far.parts = p->staging_bytes + terms_bytes(p);
    a->far.leaving = a->far.parts + part_bytes(p, world - 1);
    for (uint32_t peer = 0; peer < base->ctx->place.local_ranks && world > 1; peer++) {
        uint8_t *staging = base->memory[STAGING]->at[peer];
        uint32_t *flags = (uint32_t *)base->memory[FLAGS]->at[peer];
        a->sums.arrivals[peer] = flags;
        x->arrivals[peer] = flags + world;
        x->credits[peer] = x->arrivals[peer] + 2 * x->arrival_words;
        x->staging[peer] = staging;
        p->terms.terms[peer] = (struct prs_backward_term *)(staging + p->staging_bytes);
        a->sums.parts[peer] = (uint16_t *)(staging + a->far.parts);
    }
    if (x->schedule.place.nodes > 1)
        prs_symmetric_far(base->ctx, base->memory[STAGING], base->memory[SIGNALS], &x->far);
    p->finish.far = x->far;
    x->sync = p->finish.sync = p->terms.sync;
    a->terms = p->terms.terms[0];
    p->finish.sums = a->sums;
    return take_size(p, &p->shape);
}

/* ---- opening ---- */
int prs_attention_backward_plan_open(struct prs_fused *ctx, const struct prs_attention_shape *shape,
                                     const struct prs_attention_tuning *tuning,
                                     struct prs_attention_backward_plan **out)
{
    static const struct prs_plan_steps steps = {.name = "the backward pass of ring attention",
                                                .awaited = prs_attention_awaited,
                                                .decide = decide,
                                                .place = place,
                                                .switch_plan = prs_attention_kernel_switch_plan};
    struct prs_attention_backward_plan *p = prs_plan_new(ctx, &steps, sizeof(*p));
    if (!p)
        return -ENOMEM;
    p->base.sync = &p->terms.sync;
    p->shape = *shape;
    if (tuning)
        p->wanted = *tuning;
    return prs_plan_open(&p->base, (void **)out);
}

void prs_attention_backward_plan_close(struct prs_attention_backward_plan *p)
{
    prs_plan_close(p ? &p->base : NULL);
}

void prs_attention_backward_plan_query(const struct prs_attention_backward_plan *p, struct prs_attention_info *info)
{
    *info = p->info;
    info->workspace_bytes = p->base.workspace_bytes;
    info->shared_bytes = p->base.shared_bytes;
}

/* ---- launching ---- */
static int launch_terms(struct prs_plan *base, cudaStream_t stream)
{
    struct prs_attention_backward_plan *p = self(base);
    return prs_backward_kernel_terms(&p->kernel, &p->terms, p->info.tuning.ctas, stream);
}

static int launch_prepare(struct prs_plan *base, cudaStream_t stream)
{
    return prs_attention_kernel_prepare_stripes(&self(base)->prepare, stream);
}

static int launch_lay(struct prs_plan *base, cudaStream_t stream)
{
    struct prs_attention_backward_plan *p = self(base);
    return !prs_attention_same_size(&p->now, &p->shape) ? prs_backward_kernel_lay(&p->lay, stream) : 0;
}

static int launch_sinks(struct prs_plan *base, cudaStream_t stream)
{
    struct prs_attention_backward_plan *p = self(base);
    return p->sinks.dsinks ? prs_backward_kernel_sinks(&p->sinks, stream) : 0;
}

static int launch_pass(struct prs_plan *base, cudaStream_t stream)
{
    struct prs_attention_backward_plan *p = self(base);
    return prs_backward_kernel_pass(&p->kernel, &p->args, p->info.tuning.ctas, stream);
}

static int launch_finish(struct prs_plan *base, cudaStream_t stream)
{
    struct prs_attention_backward_plan *p = self(base);
    return prs_backward_kernel_finish(&p->kernel, &p->finish, p->info.tuning.ctas, stream);
}

static prs_launch_step_fn *const backward_steps[] = {launch_prepare, launch_lay,    launch_terms, launch_sinks,
                                                     launch_pass,    launch_finish, NULL};

static int check_operands(const struct prs_attention_gradients *x)
{
    const struct {
        const char *name;
        const void *at;
        uint32_t alignment;
    } operand[] = {{"q", x->q, 16},       {"k", x->k, 16},   {"v", x->v, 16},   {"out", x->out, 16}, {"lse", x->lse, 4},
                   {"dout", x->dout, 16}, {"dq", x->dq, 16}, {"dk", x->dk, 16}, {"dv", x->dv, 16}};
    for (size_t i = 0; i < sizeof(operand) / sizeof(*operand); i++)
        if (!operand[i].at || (uintptr_t)operand[i].at % operand[i].alignment != 0)
            return prs_fail(-EINVAL, "attention: %s %p of a backward launch: must be %u-byte aligned, and not NULL",
                            operand[i].name, operand[i].at, operand[i].alignment);
    if ((uintptr_t)x->dlse % 4 != 0)
        return prs_fail(-EINVAL, "attention: dlse %p of a backward launch: must be 4-byte aligned, or NULL",
                        (const void *)x->dlse);
    return prs_check_reserved(x, "struct prs_attention_gradients");
}

/* Encodes this rank's keys and values in tiles, and the stream (queries and gradients of results) in blocks and in
 * pieces of messages. */
static int encode(struct prs_attention_backward_plan *p, const struct prs_attention_gradients *g)
{
    struct prs_attention_args *x = &p->args.stream;
    const struct prs_attention_schedule *s = &x->schedule;
    struct prs_attention_box rows = {PRS_ATTENTION_WARPGROUP_ROWS, true, false}, block = {s->block_rows, true, false};
    struct prs_attention_box piece = {prs_attention_piece_rows(x->row_bytes), false, false};
    const struct {
        const void *base;
        uint32_t heads;
        const struct prs_attention_box *box;
        CUtensorMap *map;
    } maps[] = {{g->k, p->args.shape.heads, &rows, &x->q}, {g->v, p->args.shape.heads, &rows, &p->args.second},
                {g->q, s->heads_kv, &block, &x->k},        {g->dout, s->heads_kv, &block, &x->v},
                {g->q, s->heads_kv, &piece, &x->push_k},   {g->dout, s->heads_kv, &piece, &x->push_v}};
    int r = 0;
    for (size_t i = 0; i < (s->place.world > 1 ? 6 : 4) && !r; i++)
        r = prs_attention_encode(&p->now, s, maps[i].base, 1, maps[i].heads, *maps[i].box, maps[i].map);
    return r;
}

int prs_attention_backward_launch(struct prs_attention_backward_plan *p, const struct prs_attention_gradients *x,
                                  struct CUstream_st *stream)
{
    struct prs_striped_operands striped = {x->cu_seqlens, x->sequences, x->stripe_ranks, x->sinks};
    struct prs_attention_shape launch;
    double scale;
    int before, r = check_operands(x);
    if (!r)
        r = prs_attention_tuning_launch(&p->shape, &p->base.ctx->place, x->batch, x->seq, &launch);
    if (!r)
        r = prs_attention_tuning_scale(&p->shape, x->scale, &scale);
    if (!r)
        r = prs_attention_check_striped(&p->shape, &striped);
    if (r == 0 && (!x->sinks != !x->dsinks || (uintptr_t)x->dsinks % 4 != 0))
        r = prs_fail(-EINVAL, "attention: sinks %p, dsinks %p of a backward launch: want both or none, 4-byte aligned",
                     (const void *)x->sinks, (void *)x->dsinks);
    if (!r)
        r = prs_plan_enter(&p->base, &before);
    if (r)
        return r;
    take_scale(p, &launch, scale);
    r = take_size(p, &launch);
    p->terms.out = x->out, p->terms.dout = x->dout, p->terms.lse = x->lse, p->terms.dlse = x->dlse;
    prs_attention_take_striped(&launch, &p->base, &striped, &p->prepare, &p->args.stream.stripes);
    p->finish.stripes = p->args.stream.stripes;
    p->sinks = (struct prs_sinks_args){p->terms, x->sinks, x->dsinks};
    p->finish.dq = x->dq;
    p->args.result[0] = x->dk, p->args.result[1] = x->dv;
    if (!r)
        r = encode(p, x);
    if (!r)
        r = prs_plan_launch(&p->base, backward_steps, stream);
    prs_cuda_leave(before);
    return r;
}
