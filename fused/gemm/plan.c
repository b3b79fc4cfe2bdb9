/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/gemm/plan.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "fused/core/tensor_map.h"
#include "fused/gemm/copies.h"
#include "fused/gemm/kernels.h"
#include "fused/gemm/norm.h"
#include "fused/gemm/paths.h"
#include "fused/gemm/scales.h"
#include "fused/gemm/table.h"
#include "fused/gemm/tuning.h"
#include "fused/gemm/unfused/lt.h"
#include "fused/gemm/unfused/unfused.h"
#include "transport/util/error.h"

enum { MOST_DIMENSION = INT32_MAX - PRS_PAIR_M + 1 }; /* a tile's coordinate in a tensor is a signed number */

/* Bytes of one bank of the memory that other ranks write here. */
static uint64_t bank_bytes(const struct prs_gemm_plan *p)
{
    const struct prs_schedule *s = &p->args.schedule;
    if (s->place.world == 1 || s->op == PRS_GEMM_ALONE)
        return 0;
    if (s->op == PRS_GEMM_ALLGATHER && s->segments != 0 && p->args.scales.sent == 0)
        return (uint64_t)(s->place.world - 1) * s->pairs * PRS_PAIR_M * p->shape.k * prs_operand_bytes(&p->shape);
    if (s->op == PRS_GEMM_ALLGATHER) { /* each bank of scales begins where a bank of stages begins */
        uint64_t bytes = prs_layout_scales(s, p->args.scales.sent, prs_schedule_gathered_slots(s), 0, 0);
        return (bytes + PRS_STAGE_A - 1) / PRS_STAGE_A * PRS_STAGE_A;
    }
    return prs_layout_partial(s, prs_schedule_slots(s), 0, 0);
}

/* Flags, or one bank of counters. */
static uint64_t flag_count(const struct prs_schedule *s)
{
    if (s->segments != 0)
        return prs_schedule_segment_flag(s, s->place.world - 1, 0, 0);
    if (s->op == PRS_GEMM_ALLGATHER)
        return prs_schedule_arrival(s, prs_schedule_gathered_slots(s), 0, 0);
    return prs_schedule_partial_flag(s, s->place.nodes * (s->place.local_ranks - 1), 0, 0);
}

static struct prs_gemm_plan *self(struct prs_plan *p)
{
    return (struct prs_gemm_plan *)p;
}

static void fill_args(struct prs_gemm_plan *p)
{
    struct prs_kernel_args *a = &p->args;
    struct prs_schedule *s = &a->schedule;
    if (prs_tuning_copies(&p->info.tuning))
        s->segments = p->info.tuning.segments;
    a->paced = p->info.tuning.paced == PRS_GEMM_PACED;
    prs_tuning_gaps(&p->shape, &p->info.tuning, s, &a->push_gap, &a->store_gap);
    s->group = p->info.tuning.tiles_per_signal;
    a->scales.sent = prs_scales_sent(&p->shape);
    a->flag_bank = (uint32_t)flag_count(s);
    a->staging_bank_bytes = bank_bytes(p);
}

/* All banks of flags or counters. */
static uint64_t flag_words(const struct prs_gemm_plan *p)
{
    const struct prs_schedule *s = &p->args.schedule;
    return (s->op == PRS_GEMM_ALLGATHER && s->segments == 0 ? 2 : 1) * (uint64_t)p->args.flag_bank;
}

static int need_workspace(struct prs_gemm_plan *p)
{
    const struct prs_schedule *s = &p->args.schedule;
    uint64_t counters = s->place.nodes > 1 ? prs_schedule_row_counter(s, s->pairs * 2) : 0;
    fill_args(p);
    if (!p->args.staging_bank_bytes)
        return 0;
    /* Copy engines cannot choose a bank by the turn, which the host does not know. So they use one bank, and wait until
     * the other ranks have read it. */
    if (s->segments != 0)
        prs_plan_need(&p->base, PRS_GEMM_STAGING, (struct prs_need){PRS_SYMMETRIC_DATA, true, PRS_POOL_COPIED},
                      p->args.staging_bank_bytes);
    else
        prs_plan_need(&p->base, PRS_GEMM_STAGING, (struct prs_need){PRS_SYMMETRIC_DATA, true, PRS_POOL_BANKS},
                      2 * p->args.staging_bank_bytes);
    prs_plan_need(&p->base, PRS_GEMM_FLAGS, (struct prs_need){PRS_SYMMETRIC_CLEAN, false, NULL},
                  (flag_words(p) + 2 * s->place.local_ranks + counters) * sizeof(uint32_t));
    prs_plan_need(&p->base, PRS_GEMM_SIGNALS, (struct prs_need){PRS_SYMMETRIC_SIGNALS, true, NULL},
                  s->place.nodes == 1 ? 0 : prs_schedule_row_word(s, 0, s->pairs * 2) * sizeof(uint64_t));
    prs_plan_need(&p->base, PRS_GEMM_TURNS, (struct prs_need){PRS_SYMMETRIC_CLEAN, false, PRS_POOL_TURNS},
                  prs_turns_bytes(s->place.world));
    return s->segments != 0 ? prs_plan_copies(&p->base) : 0;
}

static int place_copies(struct prs_gemm_plan *p)
{
    const struct prs_schedule *s = &p->args.schedule;
    struct prs_tensor t = {.base = p->args.staging[0],
                           .type = p->shape.dtype,
                           .columns = p->shape.k,
                           .box_rows = PRS_TILE_M,
                           .swizzled = true,
                           .rows = (uint64_t)(s->place.world - 1) * s->pairs * PRS_PAIR_M};
    int r = prs_tensor_map_encode(&t, &p->args.gathered);
    t.box_rows = PRS_PUSH_ROWS;
    return r ? r : prs_tensor_map_encode(&t, &p->args.keep_from);
}

static int place(struct prs_plan *base)
{
    struct prs_gemm_plan *p = self(base);
    struct prs_kernel_args *a = &p->args;
    const struct prs_schedule *s = &a->schedule;
    a->plan = base->common;
    if (!base->memory[PRS_GEMM_STAGING])
        return 0;
    for (uint32_t peer = 0; peer < s->place.local_ranks; peer++) {
        a->staging[peer] = base->memory[PRS_GEMM_STAGING]->at[peer];
        a->flags[peer] = (uint32_t *)base->memory[PRS_GEMM_FLAGS]->at[peer];
        a->done[peer] = a->flags[peer] + flag_words(p);
        a->alarms[peer] = base->ctx->alarm ? (struct prs_alarm *)base->ctx->alarm->at[peer] : NULL;
        if (p->info.tuning.path == PRS_GEMM_PATH_FUSED)
            a->turns[peer] = (struct prs_turns *)base->memory[PRS_GEMM_TURNS]->at[peer];
    }
    /* Banks begin at the same places for all plans. */
    a->staging_bank_bytes = base->memory[PRS_GEMM_STAGING]->bytes / 2 / PRS_STAGE_A * PRS_STAGE_A;
    if (s->place.nodes > 1) {
        a->far.counters =
            a->done[0] + 2 * s->place.local_ranks; /* only this rank uses them, but they follow its flags in memory */
        prs_symmetric_far(base->ctx, base->memory[PRS_GEMM_STAGING], base->memory[PRS_GEMM_SIGNALS], &a->far);
    }
    return base->copies ? place_copies(p) : 0;
}

static int check_stride(char name, uint32_t ld, uint32_t columns, uint32_t type)
{
    uint32_t step = prs_element_vector(type);
    if (ld == 0 || (ld >= columns && ld % step == 0))
        return 0;
    return prs_fail(-EINVAL, "fused: rows of %c are %u elements apart: that must be a multiple of %u, and at least %u",
                    name, ld, step, columns);
}

static int check_strides(const struct prs_fused *ctx, const struct prs_gemm_shape *s)
{
    int r = check_stride('A', s->lda, s->k, s->dtype);
    if (!r)
        r = check_stride('B', s->ldb, s->b_transposed ? s->k : s->n, s->dtype);
    if (!r)
        r = check_stride('C', s->ldc, prs_result_columns(s),
                         s->c_dtype == PRS_DTYPE_E4M3 ? PRS_DTYPE_E4M3 : s->sum_dtype);
    if (r || !prs_has_gaps(s))
        return r;
    if (s->op == PRS_GEMM_ALLREDUCE && ctx->place.nodes > 1 && s->ldc != 0 && s->ldc != prs_result_columns(s))
        return prs_fail(-EINVAL,
                        "fused: between nodes the rows of an all-reduce's C have no gaps, but ldc is %u for %u "
                        "columns",
                        s->ldc, prs_result_columns(s));
    return 0;
}

static const char *type_name(uint32_t type)
{
    const struct prs_element *element = prs_element_find(type);
    return element ? element->name : "not a type that is known";
}

static int check_types(const struct prs_fused *ctx, const struct prs_gemm_shape *s)
{
    const struct prs_element *type = prs_element_find(s->dtype);
    if (!type || !type->multiplies)
        return prs_fail(-EINVAL, "fused: dtype %u (%s): the A and B of a product are bf16, fp16 or e4m3", s->dtype,
                        type_name(s->dtype));
    if (s->sum_dtype != type->sum)
        return prs_fail(-EINVAL, "fused: sum_dtype %u (%s): partial sums travel in %s where A and B are %s",
                        s->sum_dtype, type_name(s->sum_dtype), type_name(type->sum), type->name);
    if (s->c_dtype != type->sum && s->c_dtype != PRS_DTYPE_FP32 &&
        (s->c_dtype != PRS_DTYPE_E4M3 || s->dtype != PRS_DTYPE_E4M3))
        return prs_fail(-EINVAL, "fused: c_dtype %u (%s): C has the type of %s, %s, or is fp32", s->c_dtype,
                        type_name(s->c_dtype), type->sum == s->dtype ? "A and B" : "sums", type_name(type->sum));
    if (s->c_dtype != type->sum && s->op == PRS_GEMM_ALLREDUCE && ctx->place.nodes > 1)
        return prs_fail(-EINVAL, "fused: c_dtype %u (%s): between nodes the C of an all-reduce has the type of A and B",
                        s->c_dtype, type_name(s->c_dtype));
    return 0;
}

int prs_gemm_shape_check(const struct prs_fused *ctx, const struct prs_gemm_shape *shape)
{
    int r = prs_check_reserved(shape, "struct prs_gemm_shape");
    if (!r)
        r = check_types(ctx, shape);
    if (r)
        return r;
    if (shape->m == 0 || shape->n == 0 || (shape->k == 0 && !prs_may_lack_product(shape)))
        return prs_fail(
            -EINVAL,
            "fused: empty product %u x %u x %u: only k may be 0, of a REDUCE_SCATTER or ALLREDUCE without a "
            "gate, e4m3 or gaps between rows",
            shape->m, shape->n, shape->k);
    if (shape->m > MOST_DIMENSION || shape->n > MOST_DIMENSION || shape->k > MOST_DIMENSION)
        return prs_fail(-EINVAL, "fused: product %u x %u x %u: no dimension may exceed %u", shape->m, shape->n,
                        shape->k, MOST_DIMENSION);
    if (shape->op > PRS_GEMM_ALLREDUCE)
        return prs_fail(-EINVAL, "fused: operation %d is not known", (int)shape->op);
    if ((shape->op == PRS_GEMM_REDUCE_SCATTER || shape->op == PRS_GEMM_ALLGATHER) && shape->m % ctx->config.world != 0)
        return prs_fail(-EINVAL, "fused: %u rows do not divide among %u ranks", shape->m, ctx->config.world);
    if (shape->activation > PRS_ACTIVATION_SILU)
        return prs_fail(-EINVAL, "fused: activation %u is not known", shape->activation);
    if (shape->gated && shape->n % 2 != 0)
        return prs_fail(
            -EINVAL, "fused: a gated product of %u columns: half of them are the gate, so they must be even", shape->n);
    if (shape->c_anywhere && shape->op == PRS_GEMM_ALLREDUCE && shape->ldc != 0 &&
        shape->ldc != prs_result_columns(shape))
        return prs_fail(-EINVAL, "fused: with c_anywhere the rows of C have no gaps, but ldc is %u for %u columns",
                        shape->ldc, prs_result_columns(shape));
    r = prs_scales_check_shape(shape);
    if (!r)
        r = prs_norm_check_shape(shape);
    return r ? r : check_strides(ctx, shape);
}

/* Flags of the hint. */
enum { WITHOUT_LT = 1 }; /* cuBLASLt cannot run the shape on some rank */

/* All ranks use what rank 0 finds: it alone writes to the tuning file, and others may not see that file. */
static_assert(sizeof(struct prs_table_found) <= sizeof(((struct prs_hint *)NULL)->first), "what is found fits a hint");

/* Without cuBLASLt, a plan that prefers the unfused path but does not need it takes the fused path, which is slower. */
static int choose_path(struct prs_gemm_plan *p, const struct prs_hint *agreed)
{
    bool demanded = p->wanted && p->wanted->path == PRS_GEMM_PATH_UNFUSED;
    int r = agreed && (agreed->flags & WITHOUT_LT) ? -ENOTSUP : prs_unfused_open(p);
    if (r != -ENOTSUP || demanded || !prs_tuning_can_fuse(&p->shape, p->args.schedule.place.world))
        return r;
    p->base.call.hint.flags |= WITHOUT_LT;
    p->info.tuning.path = PRS_GEMM_PATH_FUSED;
    p->info.reason = "unfused would be faster, but cuBLASLt cannot run it";
    return need_workspace(p);
}

/* The ranks of an all-reduce store into the result of all; no rank begins to store before this one has begun the same
 * launch, and so has copied the result of the previous launch. */
static void need_result(struct prs_gemm_plan *p)
{
    const struct prs_gemm_shape *s = &p->shape;
    if (s->c_anywhere && s->op == PRS_GEMM_ALLREDUCE && p->args.schedule.place.world > 1 && p->inbox_rows < s->m)
        prs_plan_need(&p->base, PRS_GEMM_RESULT, (struct prs_need){PRS_SYMMETRIC_DATA, true, PRS_POOL_RESULTS},
                      (uint64_t)s->m * p->args.n * prs_result_bytes(s));
}

static void add_terms(struct prs_plan *p, const struct prs_gemm_shape *sh, const struct prs_gemm_tuning *t)
{
    prs_plan_term(p, "operation", sh->op);
    prs_plan_term(p, "m", sh->m);
    prs_plan_term(p, "n", sh->n);
    prs_plan_term(p, "k", sh->k);
    prs_plan_term(p, "b_transposed", sh->b_transposed != 0);
    prs_plan_term(p, "activation", sh->activation);
    prs_plan_term(p, "ldc", sh->op == PRS_GEMM_ALLREDUCE ? sh->ldc : 0); /* ranks store into each other's C */
    prs_plan_term(p, "gated", sh->gated != 0);
    prs_plan_term(p, "c_anywhere", sh->c_anywhere != 0);
    prs_plan_term(p, "dtype", sh->dtype);
    prs_plan_term(p, "sum_dtype", sh->sum_dtype);
    prs_plan_term(p, "c_dtype", sh->c_dtype);
    prs_plan_term(p, "scaling", sh->scaling);
    prs_plan_term(p, "fast_accumulation", sh->fast_accumulation != 0);
    prs_plan_term(p, "norm", sh->norm);
    prs_plan_term(p, "fewest_m", sh->fewest_m);
    prs_plan_term(p, "path", t->path);
    prs_plan_term(p, "clusters", t->clusters);
    prs_plan_term(p, "band", t->band);
    prs_plan_term(p, "mover", t->mover);
    prs_plan_term(p, "segments", t->segments);
    prs_plan_term(p, "spread", t->spread);
    prs_plan_term(p, "paced", t->paced);
    prs_plan_term(p, "tiles_per_signal", t->tiles_per_signal);
    prs_plan_term(p, "columns", t->columns);
    prs_plan_term(p, "bytes of arguments", sizeof(struct prs_kernel_args));
}

static int decide(struct prs_plan *base, const struct prs_hint *agreed)
{
    struct prs_gemm_plan *p = self(base);
    const struct prs_gemm_shape *shape = &p->shape;
    struct prs_fused *ctx = base->ctx;
    struct prs_table_found found = {.source = PRS_TABLE_NONE};
    uint32_t clusters, world = base->alone ? 1 : ctx->config.world, nodes = base->alone ? 1 : ctx->place.nodes;
    int r = prs_gemm_shape_check(ctx, shape);
    if (!r && p->wanted)
        r = prs_check_reserved(p->wanted, "struct prs_gemm_tuning");
    if (r)
        return r;
    p->info = (struct prs_gemm_info){.reason = NULL};
    p->inbox_rows = 0;
    if (agreed)
        memcpy(&found, agreed->first, sizeof(found));
    else if (p->measured)
        found = *p->measured;
    else if (!p->wanted)
        prs_table_find(ctx, shape, &found);
    memcpy(base->call.hint.first, &found, sizeof(found));
    r = prs_kernels_prepare(shape, nodes > 1, &clusters);
    if (r)
        return prs_fail(r, "fused: the kernel does not fit device %d: built for another GPU?", ctx->config.device);
    clusters = prs_context_clusters(ctx, clusters, 2);
    r = prs_tuning_choose(ctx, shape, p->wanted, &found, clusters, &p->info);
    if (r)
        return r;
    prs_schedule_init(&p->args.schedule, shape->op, ctx->config.rank % world, world, nodes, shape->m,
                      prs_column_tiles(shape, p->info.tuning.columns), prs_k_steps(shape), p->info.tuning.band);
    p->args.schedule.wide = p->info.tuning.columns;
    p->args.n = prs_result_columns(shape);
    p->args.claim_step = p->args.schedule.k_steps > PRS_STAGES ? p->args.schedule.k_steps - PRS_STAGES : 0;
    r = p->info.tuning.path == PRS_GEMM_PATH_FUSED ? need_workspace(p) : choose_path(p, agreed);
    need_result(p);
    add_terms(base, shape, &p->info.tuning);
    return r;
}

static void close_lt(struct prs_plan *base)
{
    prs_lt_close(self(base)->lt);
    self(base)->lt = NULL;
}

static int launch_kernel(struct prs_plan *base, cudaStream_t stream)
{
    struct prs_gemm_plan *p = self(base);
    return prs_kernels_launch(&p->shape, &p->args, p->info.tuning.clusters, stream);
}

static prs_launch_step_fn *const fused_steps[] = {launch_kernel, NULL};

static int begin_copies(struct prs_plan *base, cudaStream_t stream)
{
    return prs_kernels_begin_copies(&self(base)->args, stream);
}

static int enqueue_copies(struct prs_plan *base)
{
    return prs_copies_enqueue(self(base));
}

static const char *awaited(uint32_t what)
{
    switch (what) {
    case PRS_AWAIT_PARTIAL:
        return "partial sums";
    case PRS_AWAIT_CHUNK:
        return "rows of A";
    case PRS_AWAIT_BROADCAST:
        return "reduced tiles";
    default:
        return NULL;
    }
}

int prs_gemm_plan_open_as(struct prs_fused *ctx, const struct prs_gemm_shape *shape,
                          const struct prs_gemm_tuning *tuning, const struct prs_table_found *measured,
                          struct prs_gemm_plan **out)
{
    static const struct prs_plan_steps steps = {.name = "a matrix product",
                                                .awaited = awaited,
                                                .decide = decide,
                                                .place = place,
                                                .close = close_lt,
                                                .begin_copies = begin_copies,
                                                .copies = enqueue_copies};
    struct prs_gemm_plan *p = prs_plan_new(ctx, &steps, sizeof(*p));
    if (!p)
        return -ENOMEM;
    p->base.sync = &p->args.sync;
    p->base.alone = shape->op == PRS_GEMM_ALONE;
    p->shape = *shape;
    prs_gemm_shape_fill(&p->shape);
    p->rows = shape->m;
    p->wanted = tuning;
    p->measured = measured;
    return prs_plan_open(&p->base, (void **)out);
}

void prs_gemm_plan_close(struct prs_gemm_plan *p)
{
    if (p)
        prs_gemm_plan_close(p->next);
    prs_plan_close(p ? &p->base : NULL);
}

void prs_gemm_plan_query(const struct prs_gemm_plan *p, struct prs_gemm_info *info)
{
    *info = p->info;
    info->workspace_bytes = p->base.workspace_bytes;
    info->shared_bytes = p->base.shared_bytes;
    for (p = p->next; p; p = p->next) {
        info->workspace_bytes += p->base.workspace_bytes;
        info->shared_bytes += p->base.shared_bytes;
    }
}

static int encode_inputs(struct prs_gemm_plan *p)
{
    const struct prs_gemm_shape *sh = &p->shape;
    bool gathers = sh->op == PRS_GEMM_ALLGATHER;
    uint64_t rows = gathers ? p->schedule.block_rows : p->rows;
    struct prs_tensor ta = {.base = p->operands.a,
                            .type = sh->dtype,
                            .columns = sh->k,
                            .rows = rows,
                            .pitch = sh->lda,
                            .box_rows = PRS_TILE_M,
                            .swizzled = true};
    struct prs_tensor tb = {.base = p->operands.b, .type = sh->dtype, .pitch = sh->ldb, .swizzled = true};
    int r = prs_tensor_map_encode(&ta, &p->args.a);
    if (sh->b_transposed) { /* half of the columns of B per CTA */
        tb.columns = sh->k, tb.rows = sh->n, tb.box_rows = p->schedule.wide / 2;
    } else {
        tb.columns = sh->n, tb.rows = sh->k, tb.box_rows = prs_element_step(sh->dtype);
    }
    if (!r)
        r = prs_tensor_map_encode(&tb, &p->args.b);
    if (r == 0 && gathers) {
        ta.box_rows = PRS_PUSH_ROWS;
        r = prs_tensor_map_encode(&ta, &p->args.push_source);
    }
    return r;
}

/* Describes a matrix with the rows of the launch, in boxes of 64 rows: one plane for each block, or one for all. */
static struct prs_tensor blocks_of(const struct prs_gemm_plan *p, void *base, uint32_t type, uint32_t columns,
                                   uint32_t pitch)
{
    const struct prs_schedule *s = &p->schedule;
    bool one = p->shape.op == PRS_GEMM_REDUCE_SCATTER || p->args.whole != 0;
    return (struct prs_tensor){.base = base,
                               .type = type,
                               .columns = columns,
                               .pitch = pitch,
                               .rows = p->args.whole != 0 ? p->rows : s->block_rows,
                               .planes = one ? 1 : s->place.world,
                               .box_rows = 64,
                               .swizzled = true};
}

static int encode_results(struct prs_gemm_plan *p)
{
    void *c = p->operands.c;
    const struct prs_schedule *s = &p->schedule;
    struct prs_tensor t = blocks_of(p, c, p->shape.c_dtype, p->args.n, p->shape.ldc);
    uint64_t bytes =
        (((uint64_t)p->rows - 1) * prs_pitch(p->shape.ldc, p->args.n) + p->args.n) * prs_result_bytes(&p->shape);
    const struct prs_symmetric *home = NULL;
    int r = 0;
    if (p->shape.op == PRS_GEMM_ALLREDUCE && s->place.world > 1) {
        home = prs_result_home(p, bytes);
        if (!home)
            return prs_fail(-EINVAL,
                            "fused: the result of an all-reduce (%p, %llu bytes) must lie in memory of "
                            "prs_fused_alloc() or prs_fused_import(), unless c_anywhere is set",
                            c, (unsigned long long)bytes);
    }
    if (home && s->place.nodes > 1) {
        p->args.far.result_window = home->window;
        p->args.far.result_offset = (uint64_t)((uint8_t *)c - home->at[0]);
    }
    for (uint32_t peer = 0; peer < (!home ? 1 : s->place.local_ranks) && r == 0; peer++) {
        if (home)
            t.base = home->at[peer] + ((uint8_t *)c - home->at[0]);
        p->args.far.result[peer] = (uint8_t *)(uintptr_t)t.base;
        r = prs_tensor_map_encode(&t, &p->args.c[peer]);
    }
    return r;
}

/* What the operands ask for, for kernels of both paths. */
static struct prs_epilogue epilogue_of(const struct prs_gemm_plan *p)
{
    struct prs_epilogue e = {.bias = p->operands.bias,
                             .residual = p->operands.residual,
                             .residual_pitch = prs_pitch(p->shape.ldc, p->args.n),
                             .activation = p->shape.activation,
                             .gated = p->shape.gated != 0};
    e.any = e.bias || e.residual || e.gated || e.activation != PRS_ACTIVATION_NONE;
    return e;
}

static int check_rows(const struct prs_gemm_plan *p, const struct prs_gemm_operands *x)
{
    const struct prs_place *at = &p->args.schedule.place;
    bool fused = p->info.tuning.path == PRS_GEMM_PATH_FUSED;
    bool divided = p->shape.op != PRS_GEMM_ALLREDUCE || (fused && at->nodes > 1);
    if (x->m > p->shape.m)
        return prs_fail(-EINVAL, "fused: a launch of %u rows: the plan was opened for at most %u", x->m, p->shape.m);
    if (divided && x->m % at->world != 0)
        return prs_fail(-EINVAL, "fused: a launch of %u rows: they do not divide among %u ranks", x->m, at->world);
    if (x->m_on_device && x->m != 0)
        return prs_fail(-EINVAL, "fused: m is %u and m_on_device is set: only one of them can hold", x->m);
    if (x->m_on_device && !fused)
        return prs_fail(-EINVAL,
                        "fused: m_on_device needs the fused path, and this plan takes the unfused one (%s): "
                        "open it with tuning.path = PRS_GEMM_PATH_FUSED",
                        p->info.reason);
    return 0;
}

/* Blocks must be whole, so that one map of C is enough, if the host does not know the number of rows or the ranks do
 * not divide it. */
static void set_rows(struct prs_gemm_plan *p)
{
    struct prs_kernel_args *a = &p->args;
    const struct prs_place *at = &a->schedule.place;
    enum prs_gemm_op op = p->shape.op;
    const uint32_t *device = p->operands.m_on_device;
    bool blocks = (op == PRS_GEMM_ALLGATHER || op == PRS_GEMM_ALLREDUCE) && at->world > 1;
    p->rows = p->operands.m != 0 ? p->operands.m : p->shape.m;
    p->schedule = a->schedule;
    a->m = p->rows;
    a->m_on_device = device;
    a->most_rows = p->shape.m;
    a->row_step = 1;
    a->whole = blocks && (device || p->rows % at->world != 0);
    if (device && op != PRS_GEMM_ALLREDUCE)
        a->row_step = at->world;
    if (device && blocks && (op == PRS_GEMM_ALLGATHER || at->nodes > 1))
        a->row_step = PRS_PUSH_ROWS * at->world;
    prs_schedule_rows(&p->schedule, p->rows, a->whole != 0 && !device);
}

static int launch_fused(struct prs_gemm_plan *p, cudaStream_t stream)
{
    struct prs_tensor kept = blocks_of(p, p->operands.gathered, p->shape.dtype, p->shape.k, 0);
    int r = encode_inputs(p);
    if (!r)
        r = encode_results(p);
    p->args.keeps = p->operands.gathered != NULL;
    if (r == 0 && p->operands.gathered)
        r = prs_tensor_map_encode(&kept, &p->args.keep_to);
    return r ? r : prs_plan_launch(&p->base, fused_steps, stream);
}

static int check_operands(const struct prs_gemm_plan *p, const struct prs_gemm_operands *x)
{
    int r = prs_check_reserved(x, "struct prs_gemm_operands");
    if (r)
        return r;
    if (!x->a || !x->b != (p->shape.k == 0) || !x->c || ((uintptr_t)x->a | (uintptr_t)x->b | (uintptr_t)x->c) % 16 != 0)
        return prs_fail(
            -EINVAL,
            "fused: A %p, B %p, C %p: pointers must be 16-byte aligned, and not NULL but for B where k is 0 "
            "(here %u)",
            x->a, x->b, x->c, p->shape.k);
    if (x->a == x->c && p->shape.k == 0)
        return prs_fail(-EINVAL, "fused: C (%p) is A, which other threads of the launch still read", x->c);
    if (((uintptr_t)x->bias | (uintptr_t)x->residual) % 16 != 0)
        return prs_fail(-EINVAL, "fused: bias %p, residual %p: pointers must be 16-byte aligned", x->bias, x->residual);
    if ((uintptr_t)x->gathered % 16 != 0)
        return prs_fail(-EINVAL, "fused: gathered %p: the pointer must be 16-byte aligned", x->gathered);
    if (x->gathered && p->shape.op != PRS_GEMM_ALLGATHER)
        return prs_fail(-EINVAL, "fused: gathered is set, but operation %d gathers nothing", (int)p->shape.op);
    if (x->residual && x->residual == x->c && p->shape.activation != PRS_ACTIVATION_NONE)
        return prs_fail(-EINVAL, "fused: C (%p) may be its own residual only without an activation", x->c);
    r = prs_scales_check_operands(p, x);
    if (!r)
        r = prs_norm_check_operands(p, x);
    return r ? r : check_rows(p, x);
}

int prs_gemm_launch(struct prs_gemm_plan *p, const struct prs_gemm_operands *x, struct CUstream_st *stream)
{
    int before, r;
    bool copies;
    p = prs_paths_plan(p, x);
    r = check_operands(p, x);
    if (r)
        return r;
    r = prs_plan_enter(&p->base, &before);
    if (r)
        return r;
    p->operands = *x;
    set_rows(p);
    copies = p->base.memory[PRS_GEMM_RESULT] && !prs_unfused_has_inbox(p);
    if (copies)
        p->operands.c = p->base.memory[PRS_GEMM_RESULT]->at[0];
    p->args.epilogue = epilogue_of(p);
    prs_scales_fill(p);
    if (p->info.tuning.path == PRS_GEMM_PATH_UNFUSED)
        r = prs_unfused_launch(p, stream);
    else
        r = launch_fused(p, stream);
    if (r == 0 && p->shape.norm && !prs_unfused_norms(p))
        r = prs_norm_launch(p, copies ? x->c : NULL, stream);
    else if (r == 0 && copies)
        r = prs_unfused_copy_rows(p->operands.c, x->c, (uint64_t)p->rows * p->args.n * prs_result_bytes(&p->shape),
                                  stream);
    prs_cuda_leave(before);
    return r;
}
