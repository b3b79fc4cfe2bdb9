/* SPDX-License-Identifier: Apache-2.0 */
/* The host's part of few.h: memory, tensor maps, launch. */
#include <assert.h>
#include <errno.h>

#include "fused/core/tensor_map.h"
#include "fused/moe/plan.h"
#include "fused/moe/time.h"
#include "transport/util/error.h"

/* ---- which path ---- */
/* Why this rank's layer cannot be one kernel; NULL: it can. Static text. */
static const char *obstacle(const struct prs_moe_plan *p)
{
    const struct prs_moe_shape *s = &p->shape;
    const struct prs_route *r = &p->args.route;
    if (!s->layer)
        return "the plan is not of a layer (shape.layer is 0)";
    if (!s->weights_transposed)
        return "one kernel needs shape.weights_transposed: experts' weights [E/W, N, H]";
    if (s->capacity != 0)
        return "one kernel needs shape.capacity 0: it drops no rows";
    if (r->place.nodes > 1)
        return "one kernel runs on one node only";
    if ((uint64_t)r->place.world * s->tokens * s->top_k > PRS_FEW_MOST_CHOICES)
        return "one kernel takes at most 32768 choices of all ranks: ranks times shape.tokens times shape.top_k";
    return NULL;
}
static_assert(PRS_FEW_MOST_CHOICES == 32768, "as obstacle() says");

int prs_few_choose(struct prs_moe_plan *p, const struct prs_hint *agreed)
{
    const struct prs_moe_shape *s = &p->shape;
    struct prs_moe_info *info = &p->info;
    const char *why = obstacle(p);
    double us = why ? 0 : prs_moe_time_of_one(s, p->args.route.place.world, prs_element_bytes(p->args.type), NULL);
    if (info->tuning.path > PRS_MOE_PATH_ONE)
        return prs_fail(-EINVAL, "fused: MoE tuning: path %u is not known", info->tuning.path);
    if (info->tuning.path == PRS_MOE_PATH_ONE && why)
        return prs_fail(-EINVAL,
                        "fused: MoE tuning: path %u, a layer as one kernel: %s (%u ranks of %u tokens, top %u, layer "
                        "%u, weights_transposed %u, capacity %u)",
                        info->tuning.path, why, p->args.route.place.world, s->tokens, s->top_k, s->layer,
                        s->weights_transposed, s->capacity);
    info->reason = "as tuning.path says";
    if (info->tuning.path == PRS_MOE_PATH_AUTO) {
        if (!why && us > info->predicted_us)
            why = "experts have so many rows that one kernel should be slower";
        if (why)
            p->base.call.hint.flags |= PRS_FEW_REFUSED;
        else if (agreed && (agreed->flags & PRS_FEW_REFUSED) != 0)
            why = "on another rank one kernel cannot run, or should be slower";
        info->tuning.path = why ? PRS_MOE_PATH_KERNELS : PRS_MOE_PATH_ONE;
        info->reason = why ? why : "few tokens: one kernel should be faster";
    }
    if (info->tuning.path == PRS_MOE_PATH_ONE)
        info->predicted_us = us;
    return 0;
}

/* ---- memory ---- */
static uint64_t take(uint64_t *used, uint64_t bytes)
{
    uint64_t at = *used;
    *used += (bytes + 255) / 256 * 256;
    return at;
}

/* Byte offsets in the plan's symmetric memory. What comes after `results` only its own rank uses. */
struct layout {
    uint64_t places, flags, rows, results, state, list, done[2], inner, stored, bytes;
};

/* The most tiles of a launch: all choices may be this rank's. */
static uint64_t most_tiles(const struct prs_moe_plan *p)
{
    const struct prs_route *r = &p->args.route;
    uint64_t choices = prs_few_choices(r);
    return choices / p->few.tile + (choices < r->experts_per_rank ? choices : r->experts_per_rank);
}

static struct layout lay_out(const struct prs_moe_plan *p)
{
    const struct prs_route *r = &p->args.route;
    const struct prs_few *few = &p->few;
    struct layout l = {0};
    uint64_t slots = prs_few_slot(r, 2, 0, 0), choices = prs_few_choices(r), tiles = most_tiles(p);
    l.places = take(&l.bytes, slots * prs_few_place_words(r) * sizeof(uint32_t));
    l.flags = take(&l.bytes, slots * few->pieces * sizeof(uint32_t));
    l.rows = take(&l.bytes, slots * r->row_bytes);
    l.results = take(&l.bytes, prs_few_results_at(r, few->result_bytes, 2, 0));
    l.state = take(&l.bytes, sizeof(struct prs_few_state));
    l.list = take(&l.bytes, choices * sizeof(uint32_t));
    for (uint32_t i = 0; i < 2; i++)
        l.done[i] = take(&l.bytes, tiles * sizeof(uint32_t));
    l.inner = take(&l.bytes, tiles * few->tile_bytes[1]);
    if (prs_moe_is_scaled(p))
        l.stored = take(&l.bytes, tiles * (few->inputs[1] / PRS_SCALE_BLOCK) * PRS_FEW_CONSUMERS * sizeof(uint32_t));
    return l;
}

uint64_t prs_few_lay_out_scratch(struct prs_moe_plan *p, uint8_t *base)
{
    struct prs_few *few = &p->few;
    uint64_t used = 0, tokens, unscaled;
    if (p->info.tuning.path != PRS_MOE_PATH_ONE)
        return 0;
    tokens = take(&used, most_tiles(p) * few->tile_bytes[0]);
    unscaled = take(&used, prs_moe_is_scaled(p) ? (uint64_t)prs_few_choices(&p->args.route) * few->inputs[1] *
                                                      prs_element_bytes(PRS_MOE_TYPE)
                                                : 0);
    if (base)
        few->tiles[0] = base + tokens, few->unscaled = base + unscaled;
    return used;
}

int prs_few_decide(struct prs_moe_plan *p, uint32_t need)
{
    const struct prs_moe_args *a = &p->args;
    struct prs_few *few = &p->few;
    uint32_t ctas, bytes = prs_element_bytes(a->type);
    int r;
    if (p->info.tuning.path != PRS_MOE_PATH_ONE)
        return 0;
    (void)prs_moe_time_of_one(&p->shape, a->route.place.world, bytes, &few->tile);
    r = prs_few_kernel_prepare(a->type, few->tile, &ctas);
    if (r)
        return prs_fail(r, "fused: the MoE kernel for few tokens does not fit device %d: built for another GPU?",
                        p->base.ctx->config.device);
    ctas = prs_context_clusters(p->base.ctx, ctas, 1);
    p->few_ctas = p->info.tuning.ctas < ctas ? p->info.tuning.ctas : ctas;
    few->pieces = prs_ceil_div(p->shape.hidden, PRS_FEW_PIECE);
    few->result_bytes = prs_moe_result_bytes(p);
    few->inputs[0] = few->columns[1] = p->shape.hidden;
    few->inputs[1] = few->columns[0] = a->n;
    for (uint32_t i = 0; i < 2; i++) {
        few->unit[i] = i == 0 && a->epilogue.gated ? PRS_FEW_WEIGHTS / 2 : PRS_FEW_WEIGHTS;
        few->units[i] = prs_ceil_div(few->columns[i], few->unit[i]);
        if (i == 1 || few->tile == PRS_FEW_WIDE)
            few->tile_bytes[i] =
                prs_ceil_div(few->inputs[i] * bytes, PRS_FEW_STEP) * prs_few_tile_step(few->tile, bytes);
    }
    prs_plan_need(&p->base, need, (struct prs_need){PRS_SYMMETRIC_CLEAN, false, NULL}, lay_out(p).bytes);
    return 0;
}

int prs_few_place(struct prs_moe_plan *p, const struct prs_symmetric *memory, const struct prs_symmetric *switches)
{
    const struct prs_route *r = &p->args.route;
    struct prs_few *few = &p->few;
    struct layout l = lay_out(p);
    for (uint32_t q = 0; q < r->place.local_ranks; q++) {
        uint8_t *at = memory->at[q];
        few->places[q] = (uint32_t *)(at + l.places);
        few->row_flags[q] = (uint32_t *)(at + l.flags);
        few->rows[q] = at + l.rows;
        few->results[q] = at + l.results;
    }
    few->state = (struct prs_few_state *)(memory->at[0] + l.state);
    few->list = (uint32_t *)(memory->at[0] + l.list);
    for (uint32_t i = 0; i < 2; i++)
        few->done[i] = (uint32_t *)(memory->at[0] + l.done[i]);
    few->tiles[1] = memory->at[0] + l.inner;
    few->stored = (uint32_t *)(memory->at[0] + l.stored);
    few->switches = switches ? (const uint64_t *)switches->at[0] : NULL;
    struct prs_tensor slots = {.base = few->rows[0],
                               .type = p->args.type,
                               .columns = p->shape.hidden,
                               .rows = prs_few_slot(r, 2, 0, 0),
                               .pitch = r->row_bytes / prs_element_bytes(p->args.type),
                               .box_rows = 1,
                               .swizzled = true};
    return prs_tensor_map_encode(&slots, &few->sent);
}

/* ---- launch ---- */
/* The experts' matrices, [n, k] each. A box has PRS_FEW_WEIGHTS rows, in groups of PRS_FEW_GROUP; gated, a group of up
 * follows each of the gate. */
static int encode(const struct prs_moe_plan *p, uint32_t product, const void *at, CUtensorMap *map)
{
    const struct prs_few *few = &p->few;
    uint32_t halves = product == 0 && p->args.epilogue.gated ? 2 : 1, n = few->columns[product], type = p->args.type;
    uint64_t row = (uint64_t)few->inputs[product] * prs_element_bytes(type);
    struct prs_tensor_view v = {
        .base = at,
        .type = type,
        .size = {few->inputs[product], PRS_FEW_GROUP, halves, n / PRS_FEW_GROUP, p->args.route.experts_per_rank},
        .stride = {row, n * row, PRS_FEW_GROUP * row, halves * n * row},
        .box = {prs_element_step(type), PRS_FEW_GROUP, halves, PRS_FEW_WEIGHTS / PRS_FEW_GROUP / halves, 1},
        .swizzled = true};
    return prs_tensor_view_encode(&v, map);
}

static int run(struct prs_plan *base, cudaStream_t stream)
{
    struct prs_moe_plan *p = prs_moe_self(base);
    struct prs_few_args args = {p->args, p->few};
    return prs_few_kernel_launch(&args, p->few_ctas, stream);
}

static prs_launch_step_fn *const steps[] = {run, NULL};

bool prs_few_runs(const struct prs_moe_plan *p, const struct prs_moe_batch *b)
{
    return p->info.tuning.path == PRS_MOE_PATH_ONE && !b->rows && !b->expert_rows && !b->maps && !b->kept_rows;
}

int prs_few_layer(struct prs_moe_plan *p, const struct prs_moe_batch *b, cudaStream_t stream)
{
    int r = encode(p, 0, b->weights, &p->few.weights[0]);
    p->few.scales[0] = b->weight_scales, p->few.scales[1] = b->down_scales;
    if (!r)
        r = encode(p, 1, b->down, &p->few.weights[1]);
    return r ? r : prs_plan_launch_own(&p->base, steps, stream);
}
