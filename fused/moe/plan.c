/* SPDX-License-Identifier: Apache-2.0 */
/* Plans of MoE: dispatch, grouped product, combine. */
#include <assert.h>
#include <errno.h>

#include "fused/moe/plan.h"
#include "fused/core/machine.h"
#include "fused/core/network.h"
#include "fused/core/tensor_map.h"
#include "fused/moe/time.h"
#include "transport/util/error.h"

enum {
    CHOICES_PER_ROUTE_CTA = 512, /* two per thread; more CTAs take longer to add up their counts */
    LEAST_ROUTE_CTAS = 16,       /* with few choices, reading them takes most of the time */
    MAX_ROUTE_CTAS = PRS_ROUTE_MAX_CHUNKS,
    FEW_TOKENS = 512,
    EARLY_RETURN_RANKS = 4,
    EARLY_RETURN_CHOICES = 4096 * 8,
};

/* ---- choices ---- */
static uint32_t type_of(const struct prs_moe_shape *s)
{
    return s->dtype == PRS_DTYPE_DEFAULT ? (uint32_t)PRS_MOE_TYPE : s->dtype;
}

/* What e4m3 cannot do yet, by name. */
static int check_type(const struct prs_moe_shape *s)
{
    const struct prs_element *type = prs_element_find(type_of(s));
    uint32_t columns = s->gated ? 2 * PRS_SCALE_BLOCK : PRS_SCALE_BLOCK;
    if (s->scaling != PRS_SCALING_NONE && (s->dtype != PRS_DTYPE_E4M3 || s->scaling != PRS_SCALING_BLOCKS))
        return prs_fail(-EINVAL,
                        "fused: MoE of dtype %u with scaling %u: only e4m3 has scales, those of PRS_SCALING_BLOCKS",
                        s->dtype, s->scaling);
    if (type_of(s) == PRS_MOE_TYPE)
        return 0;
    if (s->dtype != PRS_DTYPE_E4M3)
        return prs_fail(-EINVAL, "fused: MoE of dtype %u (%s): tokens and weights are bf16 or e4m3", s->dtype,
                        type ? type->name : "not known");
    if (!s->weights_transposed && s->columns != 0)
        return prs_fail(-EINVAL, "fused: the weights of a MoE of e4m3 must be [E / W, N, H] (weights_transposed): the "
                                 "tensor cores take no other layout of one-byte types");
    if (s->hidden % PRS_SCALE_BLOCK != 0 || s->columns % columns != 0)
        return prs_fail(-EINVAL,
                        "fused: MoE of e4m3 with rows of %u and %u columns: they must be multiples of %u and %u, so "
                        "that whole blocks have a scale",
                        s->hidden, s->columns, PRS_SCALE_BLOCK, columns);
    return 0;
}

static int check_shape(const struct prs_fused *ctx, const struct prs_moe_shape *s)
{
    uint32_t world = ctx->config.world, vector = prs_element_vector(PRS_MOE_TYPE);
    int r = check_type(s);
    if (r)
        return r;
    if (s->tokens == 0 || s->hidden == 0 || s->experts == 0 || s->top_k == 0)
        return prs_fail(-EINVAL, "fused: MoE without tokens or experts: %u tokens of %u, %u experts, top %u", s->tokens,
                        s->hidden, s->experts, s->top_k);
    if (s->hidden % vector != 0 || s->columns % vector != 0)
        return prs_fail(-EINVAL, "fused: MoE with rows of %u and %u columns: both must be multiples of %u", s->hidden,
                        s->columns, vector);
    if (s->activation > PRS_ACTIVATION_SILU)
        return prs_fail(-EINVAL, "fused: activation %u is not known", s->activation);
    if (s->gated && s->columns % (2 * vector) != 0)
        return prs_fail(-EINVAL, "fused: a gated MoE product of %u columns: they must be a multiple of %u", s->columns,
                        2 * vector);
    if (s->layer && s->columns == 0)
        return prs_fail(-EINVAL, "fused: a MoE layer without columns of its first product");
    if (s->experts % world != 0 || s->experts > PRS_ROUTE_MAX_EXPERTS || s->top_k > PRS_ROUTE_MAX_CHOICES)
        return prs_fail(
            -EINVAL,
            "fused: %u experts on %u ranks, top %u: experts must divide among ranks, at most %d, top at most %d",
            s->experts, world, s->top_k, PRS_ROUTE_MAX_EXPERTS, PRS_ROUTE_MAX_CHOICES);
    if ((s->logical_experts == 0) != (s->replicas == 0) || s->logical_experts > PRS_ROUTE_MAX_EXPERTS ||
        s->replicas > PRS_ROUTE_MAX_REPLICAS)
        return prs_fail(
            -EINVAL, "fused: a MoE map of %u experts with %u places each: both 0, or at least 1 and at most %d and %d",
            s->logical_experts, s->replicas, PRS_ROUTE_MAX_EXPERTS, PRS_ROUTE_MAX_REPLICAS);
    if (world > PRS_ROUTE_MAX_WORLD)
        return prs_fail(-EINVAL, "fused: MoE on %u ranks: at most %d", world, PRS_ROUTE_MAX_WORLD);
    if (s->capacity % PRS_TILE_M != 0)
        return prs_fail(-EINVAL, "fused: MoE capacity %u is not a multiple of %d", s->capacity, PRS_TILE_M);
    if ((uint64_t)s->tokens * s->top_k > (uint64_t)MAX_ROUTE_CTAS * (PRS_ROUTE_CHUNK_CHOICES - s->top_k))
        return prs_fail(-EINVAL, "fused: %u tokens, top %u: at most %d choices a rank", s->tokens, s->top_k,
                        MAX_ROUTE_CTAS * PRS_ROUTE_CHUNK_CHOICES);
    return 0;
}

/* The rows needed if every choice of every rank comes here and each expert's last block is nearly empty. */
static uint64_t most_rows(const struct prs_fused *ctx, const struct prs_moe_shape *s)
{
    uint32_t local = s->experts / ctx->config.world;
    uint64_t rows = (uint64_t)s->tokens * ctx->config.world * s->top_k;
    return (rows / PRS_TILE_M + local + 1) * PRS_TILE_M;
}

/* Of a token. */
static uint32_t row_bytes(const struct prs_moe_shape *s)
{
    return prs_moe_row_bytes(type_of(s), s->hidden);
}

static uint32_t at_most(uint32_t v, uint32_t most)
{
    return v < 1 ? 1 : v > most ? most : v;
}

/* A second pass reads weights a second time, and the first pass has work only where experts have whole blocks of this
 * node's rows. Measured for 4096 and 8192 tokens of DeepSeek-V3 on 2 x 1 nodes (moe-passes-2xH200.json): with one NIC
 * of 400G, which is busy for as long as the product, 2485 and 4042 us in two passes, 2604 and 4529 us in one; with two
 * NICs, 2399 and 3978 us in two passes, 2366 and 4066 us in one. */
static uint32_t best_passes(const struct prs_fused *ctx, const struct prs_moe_shape *s)
{
    const struct prs_place *at = &ctx->place;
    double rows = (double)s->tokens * s->top_k, near = rows * at->local_ranks / s->experts;
    double product = prs_compute_us(2 * rows * s->hidden * s->columns, PRS_MOE_FLOPS_PER_US, PRS_SMS);
    double far = (double)s->tokens * row_bytes(s) * (at->nodes - 1) / PRS_ROW_PORT_BYTES_PER_US;
    int rails = ctx->network ? ctx->network->rails.count : 1;
    return near >= PRS_TILE_M && far / rails > 0.7 * product ? 2 : 1;
}

/* Columns of the first product's result. */
static uint32_t result_columns(const struct prs_moe_shape *s)
{
    return s->gated ? s->columns / 2 : s->columns;
}

/* Returning sums during the second product makes it longer. With many tokens, the added time is less than returning
 * them afterwards takes. Time with early returns over time with late returns, on 4 x H100 (moe-returns-4xH100.json,
 * moe-layer-fp8-peers-4xH100.json): 0.92 to 0.96 for 16384 tokens, 0.96 to 0.99 for 8192, 0.98 to 1.00 for 4096; 1.00
 * to 1.03 for 2048, in runs without a results file. On 2 GPUs, 8192 tokens (moe-layer-few-fp8-2xH100.json): 1.04, since
 * half of the rows stay. */
static uint32_t choose_returns(const struct prs_moe_plan *p)
{
    const struct prs_moe_shape *s = &p->shape;
    const struct prs_place *at = &p->base.ctx->place;
    uint32_t wanted = p->info.tuning.returns;
    if (!s->layer || at->nodes > 1 || at->world == 1)
        return PRS_MOE_RETURNS_LATE;
    if (wanted != PRS_MOE_RETURNS_AUTO)
        return wanted;
    return at->world < EARLY_RETURN_RANKS || s->tokens * s->top_k < EARLY_RETURN_CHOICES ? PRS_MOE_RETURNS_LATE
                                                                                         : PRS_MOE_RETURNS_EARLY;
}

static void choose(struct prs_moe_plan *p)
{
    struct prs_moe_tuning *t = &p->info.tuning;
    uint32_t tiles = prs_ceil_div(p->shape.columns, prs_moe_tile_columns());
    if (t->cluster != 1 && t->cluster != 2)
        t->cluster = tiles % 2 == 0 ? 2 : 1; /* else one SM of each pair would be idle during the last tile */
    if (t->route_ctas == 0) {
        t->route_ctas = prs_ceil_div(p->shape.tokens * p->shape.top_k, CHOICES_PER_ROUTE_CTA);
        t->route_ctas = t->route_ctas < LEAST_ROUTE_CTAS ? LEAST_ROUTE_CTAS : t->route_ctas;
        t->route_ctas = at_most(t->route_ctas, p->shape.tokens); /* a token is not split */
    }
    prs_route_put_sizes(p->shape.tokens, row_bytes(&p->shape), &t->rows_per_put, &t->rows_per_signal);
    t->passes = at_most(t->passes != 0 ? t->passes : best_passes(p->base.ctx, &p->shape),
                        p->base.ctx->place.nodes == 1 ? 1 : 2);
    t->returns = choose_returns(p);
    if (t->spread == 0) /* rows are needed early, but all at once they delay the product's loads */
        t->spread = p->shape.tokens <= FEW_TOKENS ? 1 : 20;
    t->route_ctas = at_most(t->route_ctas, p->base.ctx->sms < MAX_ROUTE_CTAS ? p->base.ctx->sms : MAX_ROUTE_CTAS);
    p->info.row_bytes = row_bytes(&p->shape);
    p->info.capacity = p->shape.capacity != 0 ? p->shape.capacity : (uint32_t)most_rows(p->base.ctx, &p->shape);
}

/* Also sets the time between two rows that a CTA sends. */
static void predict(struct prs_moe_plan *p)
{
    const struct prs_moe_tuning *t = &p->info.tuning;
    double bytes = row_bytes(&p->shape);
    struct prs_moe_time time = prs_moe_time_of_kernels(&p->shape, p->base.ctx->config.world, row_bytes(&p->shape),
                                                       prs_element_bytes(type_of(&p->shape)));
    p->info.sent_bytes = time.sent_bytes;
    p->info.predicted_us = time.all;
    if (t->spread > 1)
        p->args.push_gap = (uint32_t)(time.product * t->spread / 100 * PRS_CLOCKS_PER_US * t->ctas /
                                      ((double)time.sent_bytes / bytes + 1));
}

static void init_route(struct prs_moe_plan *p)
{
    struct prs_route *r = &p->args.route;
    p->args.type = type_of(&p->shape);
    p->args.hidden = p->shape.hidden;
    r->place = p->base.ctx->place;
    r->experts = p->shape.experts, r->experts_per_rank = p->shape.experts / r->place.world;
    r->choices = p->shape.top_k, r->tokens = p->shape.tokens;
    r->blocks = p->info.capacity / PRS_TILE_M;
    p->args.epilogue.activation = p->shape.activation;
    p->args.epilogue.gated = p->shape.gated != 0;
    p->args.epilogue.any = p->shape.gated != 0 || p->shape.activation != PRS_ACTIVATION_NONE;
    p->args.n = result_columns(&p->shape);
    r->columns = prs_ceil_div(p->args.n,
                              prs_epilogue_columns(&p->args.epilogue, prs_moe_tile_columns()) * p->info.tuning.cluster);
    r->row_bytes = row_bytes(&p->shape);
    r->chunks = p->info.tuning.route_ctas;
    r->put = p->info.tuning.rows_per_put, r->group = p->info.tuning.rows_per_signal;
    r->passes = p->info.tuning.passes;
    r->logical = p->shape.logical_experts, r->replicas = p->shape.replicas;
    p->args.k_steps = prs_ceil_div(p->shape.hidden, prs_element_step(p->args.type));
}

/* ---- memory ---- */
/* Returns the next `bytes` bytes after base + *used; if base is NULL, only counts them. */
static void *take(uint8_t *base, uint64_t *used, uint64_t bytes)
{
    void *at = !base ? NULL : base + *used;
    *used += (bytes + 255) / 256 * 256;
    return at;
}

/* Lays out the maps that combine needs of a dispatch. */
static uint64_t lay_out_maps(struct prs_moe_args *a, uint8_t *base)
{
    const struct prs_route *r = &a->route;
    uint64_t used = 0;
    a->totals = take(base, &used, sizeof(*a->totals));
    a->table = take(base, &used, (uint64_t)r->experts_per_rank * sizeof(*a->table));
    a->sent = take(base, &used, (uint64_t)r->place.world * r->tokens * sizeof(*a->sent));
    a->deliveries = take(base, &used, (uint64_t)r->place.world * r->tokens * prs_route_delivery_bytes(r));
    a->sources = take(base, &used, (uint64_t)r->tokens * r->choices * sizeof(*a->sources));
    if (r->place.nodes > 1) {
        a->far.tokens = take(base, &used, (uint64_t)r->place.nodes * r->tokens * sizeof(*a->far.tokens));
        a->far.near = take(base, &used, (uint64_t)r->experts_per_rank * sizeof(*a->far.near));
        a->far.forwarding = take(base, &used, r->place.nodes * prs_route_forwarding_bytes(r));
    }
    return used;
}

void prs_moe_use_maps(struct prs_moe_plan *p, const void *maps)
{
    (void)lay_out_maps(&p->args, maps ? (uint8_t *)(uintptr_t)maps : p->base.own.at);
}

/* Lays out memory that must survive between launches, must be zero between launches, or must hold valid values even
 * after a launch that gave up. The plan's own maps come first. */
static uint64_t lay_out(struct prs_moe_args *a, uint8_t *base)
{
    const struct prs_route *r = &a->route;
    uint64_t used = lay_out_maps(a, base);
    a->claims = take(base, &used, sizeof(*a->claims));
    a->chunks = take(base, &used, (uint64_t)r->chunks * r->experts * sizeof(*a->chunks));
    if (r->place.nodes > 1)
        a->far.counters = take(base, &used, 2ull * prs_route_back_counters(r) * sizeof(*a->far.counters));
    a->ready = take(base, &used, (uint64_t)r->blocks * sizeof(*a->ready));
    a->stored = take(base, &used, (uint64_t)r->experts_per_rank * sizeof(*a->stored));
    return used;
}

/* Bytes of a row of tokens or of results. */
static uint32_t wider_row(const struct prs_moe_plan *p)
{
    uint32_t token = p->args.route.row_bytes, result = prs_moe_result_bytes(p);
    return token > result ? token : result;
}

/* Lays out memory that is written and read within one launch, except for the rows of prs_moe_gemm(). Plans share it.
 * Dispatch alone needs no rows here, because they go to the caller. */
static uint64_t lay_out_scratch(struct prs_moe_plan *p, uint8_t *base)
{
    struct prs_moe_args *a = &p->args;
    const struct prs_route *r = &a->route;
    uint64_t used = 0, rows = (uint64_t)r->blocks * PRS_TILE_M;
    a->value_rows = take(base, &used, rows * prs_moe_value_bytes(r));
    a->value_sums = take(base, &used, (uint64_t)r->tokens * prs_moe_value_bytes(r));
    if (a->n != 0) /* then, for a layer, its results */
        a->row_bytes = take(base, &used, rows * (p->shape.layer ? wider_row(p) : r->row_bytes));
    if (p->shape.layer)
        p->activations = take(base, &used, rows * prs_moe_row_bytes(a->type, a->n));
    if (prs_moe_is_scaled(p))
        a->scaled_tokens = take(base, &used, (uint64_t)r->tokens * r->row_bytes);
    return used;
}

static int open_tables(struct prs_moe_plan *p)
{
    struct prs_moe_args *a = &p->args;
    uint64_t tables = lay_out(a, NULL), scratch = lay_out_scratch(p, NULL), few = prs_few_lay_out_scratch(p, NULL);
    int r;
    r = prs_plan_local(&p->base, tables, tables); /* the tables must be empty before the first launch */
    if (!r)
        r = prs_plan_scratch(&p->base, scratch > few ? scratch : few);
    if (r)
        return r;
    lay_out(a, p->base.own.at);
    lay_out_scratch(p, p->base.scratch.at);
    prs_few_lay_out_scratch(p, p->base.scratch.at);
    p->info.maps_bytes = lay_out_maps(a, p->base.own.at);
    if (a->n == 0)
        return 0;
    return prs_moe_encode_rows(p, a->row_bytes, p->shape.hidden, &a->rows);
}

/* The kinds of memory that a plan needs:
 * - MESSAGES: route.h.
 * - STAGING: tokens from other ranks. Without RETURNS also the results that come back for this rank's tokens.
 * - FLAGS: one for each sender of messages, the end of each rank, and the end of its sums; then one for each row of
 *   STAGING and RETURNS.
 * - RETURNS: only a layer has it, for results that come back.
 * - RELAY, SIGNALS: only between nodes: tokens and results on their way, and signal words.
 * - SWITCH: plan_switch.h. FEW: few.h. */
enum { MESSAGES, STAGING, FLAGS, RETURNS, RELAY, SIGNALS, SWITCH, FEW };

/* Memory that the plans of a context share. Each plan has its own messages: a launch that gives up may read messages
 * that nobody has written for it, and must then find those of an earlier launch of the same sizes. */
#define PRS_POOL_STAGING "MoE: staging"
#define PRS_POOL_RETURNS "MoE: sums that come back to layers"
#define PRS_POOL_RELAY   "MoE: rows on their way between nodes"
#define PRS_POOL_SWITCH  "MoE: plan_switch.h"

static struct prs_route with_rows(const struct prs_route *r, uint32_t row_bytes)
{
    struct prs_route rows = *r;
    rows.row_bytes = row_bytes;
    return rows;
}

/* Room for a row of each token of each other rank. */
static uint64_t staging_bytes(const struct prs_route *r, uint32_t row_bytes)
{
    struct prs_route rows = with_rows(r, row_bytes);
    return prs_route_staging_at(&rows, r->place.world, 0);
}

/* Relay memory: first the tokens for other nodes, then, of a layer, the sums that come back. Both parts are as long as
 * the wider of the two kinds of rows needs. */
static uint64_t relay_bytes(const struct prs_moe_plan *p)
{
    struct prs_route rows = with_rows(&p->args.route, wider_row(p));
    return prs_route_relay_at(&rows, p->shape.layer ? 4 : 2, 1, 0);
}

static void need_shared(struct prs_moe_plan *p)
{
    const struct prs_route *r = &p->args.route;
    bool several = r->place.world > 1, layer = p->shape.layer != 0;
    uint64_t rows = several ? prs_route_row_flag(r, r->place.world, 0) : 0;
    /* Zeros at first: a launch that gives up continues with the counts and places that are there. */
    prs_plan_need(&p->base, MESSAGES, (struct prs_need){PRS_SYMMETRIC_CLEAN, true, NULL}, prs_route_messages_bytes(r));
    prs_plan_need(&p->base, STAGING, (struct prs_need){PRS_SYMMETRIC_DATA, false, PRS_POOL_STAGING},
                  several ? staging_bytes(r, layer ? r->row_bytes : wider_row(p)) : 0);
    prs_plan_need(&p->base, FLAGS, (struct prs_need){PRS_SYMMETRIC_CLEAN, false, NULL},
                  (3 * r->place.world + (layer ? 2 : 1) * rows) * sizeof(uint32_t));
    prs_plan_need(&p->base, RETURNS, (struct prs_need){PRS_SYMMETRIC_DATA, false, PRS_POOL_RETURNS},
                  several && layer ? staging_bytes(r, prs_moe_result_bytes(p)) : 0);
    if (several)
        prs_plan_shares(&p->base, SWITCH, PRS_POOL_SWITCH);
    if (r->place.nodes == 1)
        return;
    prs_plan_need(&p->base, RELAY, (struct prs_need){PRS_SYMMETRIC_DATA, true, PRS_POOL_RELAY}, relay_bytes(p));
    prs_plan_need(&p->base, SIGNALS, (struct prs_need){PRS_SYMMETRIC_SIGNALS, true, NULL},
                  prs_route_end_word(r, r->place.nodes) * sizeof(uint64_t));
}

static int place(struct prs_plan *base)
{
    struct prs_moe_args *a = &prs_moe_self(base)->args;
    const struct prs_route *r = &a->route;
    struct prs_symmetric *const *memory = base->memory;
    for (uint32_t q = 0; q < r->place.local_ranks; q++) {
        a->messages[q] = memory[MESSAGES]->at[q];
        a->message_flags[q] = (uint32_t *)memory[FLAGS]->at[q];
        a->end_flags[q] = a->message_flags[q] + r->place.world;
        a->returned_flags[q] = a->end_flags[q] + r->place.world;
        a->staging_flags[q] = a->returned_flags[q] + r->place.world;
        a->staging[q] = memory[STAGING] ? memory[STAGING]->at[q] : NULL;
        /* Combine alone is a separate launch, whose sums arrive after all ranks have ended the dispatch, so STAGING can
         * hold them. */
        a->returns[q] = memory[RETURNS] ? memory[RETURNS]->at[q] : a->staging[q];
        a->return_flags[q] = a->staging_flags[q] + (memory[RETURNS] ? prs_route_row_flag(r, r->place.world, 0) : 0);
    }
    if (memory[FEW])
        return prs_few_place(prs_moe_self(base), memory[FEW], memory[SWITCH]); /* on one node only */
    if (r->place.nodes == 1)
        return 0;
    a->far.device = base->ctx->network->device;
    a->far.signals = (uint64_t *)memory[SIGNALS]->at[0];
    a->far.relay = memory[RELAY]->at[0];
    a->far.back = prs_moe_self(base)->shape.layer ? 2 : 0;
    a->far.message_window = memory[MESSAGES]->window;
    a->far.relay_window = memory[RELAY]->window;
    a->far.signal_window = memory[SIGNALS]->window;
    return 0;
}

/* ---- plans ---- */
/* Ranks read each other's routing entries, so their sizes must agree. Between nodes they count each other's puts. */
static void add_terms(struct prs_moe_plan *p)
{
    const struct prs_moe_shape *s = &p->shape;
    const struct prs_moe_tuning *t = &p->info.tuning;
    bool far = p->base.ctx->place.nodes > 1;
    prs_plan_term(&p->base, "tokens", s->tokens);
    prs_plan_term(&p->base, "hidden", s->hidden);
    prs_plan_term(&p->base, "dtype", type_of(s));
    prs_plan_term(&p->base, "experts", s->experts);
    prs_plan_term(&p->base, "top_k", s->top_k);
    prs_plan_term(&p->base, "rows_per_signal", far ? t->rows_per_signal : 0);
    prs_plan_term(&p->base, "rows_per_put", far ? t->rows_per_put : 0);
    prs_plan_term(&p->base, "passes", far ? t->passes : 0);
    prs_plan_term(&p->base, "layer", s->layer != 0);
    prs_plan_term(&p->base, "path", t->path);
    prs_plan_term(&p->base, "returns", t->returns);
    prs_plan_term(&p->base, "bytes of arguments", sizeof(p->args));
}

static int decide(struct prs_plan *base, const struct prs_hint *agreed)
{
    struct prs_moe_plan *p = prs_moe_self(base);
    struct prs_moe_tuning *t = &p->info.tuning;
    uint32_t clusters, ctas;
    int r = prs_check_reserved(&p->shape, "struct prs_moe_shape");
    if (!r)
        r = prs_check_reserved(&p->wanted, "struct prs_moe_tuning");
    if (!r)
        r = check_shape(base->ctx, &p->shape);
    if (!r && p->wanted.returns > PRS_MOE_RETURNS_EARLY)
        r = prs_fail(-EINVAL, "fused: MoE tuning: returns %u is not known", p->wanted.returns);
    if (r)
        return r;
    p->info.tuning = p->wanted;
    choose(p);
    init_route(p);
    r = prs_moe_kernels_prepare(p->args.type, &p->args.route, t->cluster, &clusters);
    if (r)
        return prs_fail(r, "fused: the MoE kernels do not fit device %d: built for another GPU?",
                        base->ctx->config.device);
    clusters = prs_context_clusters(base->ctx, clusters, t->cluster);
    ctas = clusters * t->cluster;
    t->ctas = t->ctas == 0 ? ctas : at_most(t->ctas / t->cluster, clusters) * t->cluster;
    predict(p);
    r = prs_few_choose(p, agreed);
    need_shared(p);
    add_terms(p);
    if (!r)
        r = prs_few_decide(p, FEW);
    return r != 0 ? r : open_tables(p);
}

static const char *awaited(uint32_t what)
{
    switch (what) {
    case PRS_AWAIT_ROUTES:
        return "counts and routes";
    case PRS_AWAIT_TOKEN:
        return "a token's row";
    case PRS_AWAIT_BLOCK:
        return "a block of rows to be put together";
    case PRS_AWAIT_END:
        return "the end of the launch before";
    case PRS_AWAIT_SUM:
        return "a token's result";
    case PRS_AWAIT_EXPERT:
        return "an expert's results";
    default:
        return NULL;
    }
}

int prs_moe_plan_open(struct prs_fused *ctx, const struct prs_moe_shape *shape, const struct prs_moe_tuning *tuning,
                      struct prs_moe_plan **out)
{
    static const struct prs_plan_steps steps = {.name = "MoE",
                                                .awaited = awaited,
                                                .decide = decide,
                                                .place = place,
                                                .switch_plan = prs_moe_kernels_switch_plan};
    struct prs_moe_plan *p = prs_plan_new(ctx, &steps, sizeof(*p));
    if (!p)
        return -ENOMEM;
    p->base.sync = &p->args.sync;
    p->shape = *shape;
    if (tuning)
        p->wanted = *tuning;
    return prs_plan_open(&p->base, (void **)out);
}

void prs_moe_plan_close(struct prs_moe_plan *p)
{
    prs_plan_close(p ? &p->base : NULL);
}

void prs_moe_plan_query(const struct prs_moe_plan *p, struct prs_moe_info *info)
{
    *info = p->info;
    info->workspace_bytes = p->base.workspace_bytes;
    info->shared_bytes = p->base.shared_bytes;
}

int prs_moe_launch(struct prs_moe_plan *p, prs_launch_step_fn *const *steps, bool dispatches, uint32_t ends,
                   cudaStream_t stream)
{
    p->args.dispatches = dispatches;
    p->args.ends = ends;
    return dispatches || ends != 0 ? prs_plan_launch(&p->base, steps, stream)
                                   : prs_plan_launch_local(&p->base, steps, stream);
}
