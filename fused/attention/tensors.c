/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/attention/tensors.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "fused/attention/assign.h"
#include "fused/attention/tuning.h"
#include "fused/core/tensor_map.h"
#include "transport/util/error.h"

static const double LOG2_E = 1.4426950408889634;

const char *prs_attention_awaited(uint32_t what)
{
    switch (what) {
    case PRS_AWAIT_KEYS:
        return "keys or values";
    case PRS_AWAIT_CREDIT:
        return "credit for what is sent to it";
    case PRS_AWAIT_QUERIES:
        return "queries or gradients of results";
    case PRS_AWAIT_GRADIENTS:
        return "its parts of gradients of queries";
    default:
        return NULL;
    }
}

/* A capped score is already in log2, so scale_log2 is 1. */
void prs_attention_set_scale(const struct prs_attention_shape *shape, double scale, struct prs_attention_args *a)
{
    double cap = (double)shape->soft_cap;
    a->scale = (float)scale;
    a->scale_log2 = (float)(scale * LOG2_E);
    if (shape->soft_cap == 0)
        return;
    a->cap = (float)(cap * LOG2_E);
    a->cap_inner = (float)(2 * LOG2_E * (double)a->scale / cap);
    a->scale_log2 = 1;
}

void prs_attention_set_stripes(const struct prs_attention_shape *shape, struct prs_attention_args *a)
{
    uint32_t far = shape->seq, within = shape->window != 0 && shape->window < far ? shape->window - 1 : far;
    if (shape->stripe == 0)
        return;
    while (1u << a->stripes.log_rows < shape->stripe)
        a->stripes.log_rows++;
    a->stripes.before = within;
    a->stripes.after = shape->causal != 0 ? 0 : within;
}

void prs_attention_score_terms(struct prs_plan *p, const struct prs_attention_shape *shape)
{
    uint32_t cap, scale_bits;
    double given;
    float scale = prs_attention_tuning_scale(shape, 0, &given) == 0 ? (float)given : 0;
    memcpy(&cap, &shape->soft_cap, sizeof(cap));
    memcpy(&scale_bits, &scale, sizeof(scale_bits));
    prs_plan_term(p, "scale", scale_bits);
    prs_plan_term(p, "stripe", shape->stripe);
    prs_plan_term(p, "window", shape->window);
    prs_plan_term(p, "packed", shape->packed != 0);
    prs_plan_term(p, "soft_cap", cap);
}

static uint64_t parts_bytes(const struct prs_attention_shape *shape)
{
    return shape->packed != 0 ? shape->seq * sizeof(struct prs_span) : 0;
}

uint64_t prs_attention_prepared_bytes(const struct prs_attention_shape *shape, uint32_t world)
{
    uint64_t stripes = shape->stripe != 0 ? shape->seq / shape->stripe : 0;
    return stripes != 0 ? parts_bytes(shape) + (stripes + (stripes + 1) * world) * sizeof(uint32_t) : 0;
}

void prs_attention_place_prepared(const struct prs_attention_shape *shape, uint32_t world, uint8_t *memory,
                                  struct prs_prepare_args *x)
{
    if (shape->stripe == 0)
        return;
    x->world = world;
    x->parts = (struct prs_span *)memory;
    x->stripe_of = (uint32_t *)(memory + parts_bytes(shape));
    x->how_many = x->stripe_of + shape->seq / shape->stripe;
}

int prs_attention_check_striped(const struct prs_attention_shape *shape, const struct prs_striped_operands *x)
{
    bool packed = shape->packed != 0;
    const struct {
        const char *name;
        const void *at;
    } striped[] = {{"sinks", x->sinks}, {"stripe_ranks", x->stripe_ranks}};
    if (packed != (x->cu_seqlens != NULL) || packed != (x->sequences != 0) || (uintptr_t)x->cu_seqlens % 4 != 0)
        return prs_fail(-EINVAL, "attention: cu_seqlens %p of %u sequences: a launch of a plan %s",
                        (const void *)x->cu_seqlens, x->sequences,
                        packed ? "of packed sequences needs them, 4-byte aligned"
                               : "without packed sequences has none");
    for (size_t i = 0; i < sizeof(striped) / sizeof(*striped); i++)
        if (striped[i].at && (shape->stripe == 0 || (uintptr_t)striped[i].at % 4 != 0))
            return prs_fail(-EINVAL, "attention: %s %p: want a plan with stripes (this one: %u), and 4-byte alignment",
                            striped[i].name, striped[i].at, shape->stripe);
    return 0;
}

void prs_attention_take_striped(const struct prs_attention_shape *launch, const struct prs_plan *p,
                                const struct prs_striped_operands *x, struct prs_prepare_args *prepare,
                                struct prs_attention_stripes *stripes)
{
    if (launch->stripe == 0)
        return;
    prepare->sync = *p->sync;
    prepare->bounds = x->cu_seqlens;
    prepare->assigned = x->stripe_ranks;
    prepare->sequences = x->sequences;
    prepare->positions = launch->seq;
    prepare->stripes = launch->seq / launch->stripe;
    prepare->rank = p->ctx->config.rank;
    stripes->positions = launch->seq;
    stripes->parts = x->cu_seqlens ? prepare->parts : NULL;
    stripes->stripe_of = x->stripe_ranks ? prepare->stripe_of : NULL;
    stripes->how_many = x->stripe_ranks ? prepare->how_many : NULL;
}

int prs_attention_positions(const struct prs_attention_shape *shape, uint32_t rank, uint32_t world, uint32_t *positions)
{
    uint32_t rows, segments = shape->causal != 0 && world > 1 ? 2 : 1, in_segment;
    int r = world == 0 || rank >= world || !positions
                ? prs_fail(-EINVAL, "attention: positions %p of rank %u of %u", (void *)positions, rank, world)
                : prs_attention_tuning_check(shape, world);
    if (r)
        return r;
    rows = shape->seq / world;
    in_segment = shape->stripe != 0 ? shape->stripe : rows / segments;
    for (uint32_t row = 0; row < rows; row++) {
        uint32_t segment = row / in_segment;
        uint32_t chunk = shape->stripe != 0 ? prs_stripe_zigzag(world, rank, segment)
                         : segment == 0     ? rank
                                            : 2 * world - 1 - rank;
        positions[row] = chunk * in_segment + row % in_segment;
    }
    return 0;
}

static int check_bounds(const int32_t *bounds, uint32_t sequences, uint32_t positions)
{
    for (uint32_t i = 0; bounds && i <= sequences; i++)
        if (bounds[i] < (i == 0 ? 0 : bounds[i - 1]) || bounds[i] > (int32_t)positions)
            return prs_fail(-EINVAL, "attention: cu_seqlens[%u] is %d: want numbers that do not decrease, 0 to %u", i,
                            bounds[i], positions);
    return 0;
}

/* Checks a shape for which stripes are assigned. */
static int check_shape(const struct prs_attention_shape *shape, uint32_t world, const uint32_t *ranks)
{
    int r = world == 0 || !ranks
                ? prs_fail(-EINVAL, "attention: stripe_ranks %p of %u ranks", (const void *)ranks, world)
                : prs_attention_tuning_check(shape, world);
    if (r == 0 && shape->stripe == 0)
        r = prs_fail(-EINVAL, "attention: stripe 0: only stripes are assigned to ranks");
    return r;
}

int prs_attention_assign_stripes(const struct prs_attention_shape *shape, uint32_t world, const int32_t *cu_seqlens,
                                 uint32_t sequences, uint32_t *stripe_ranks)
{
    struct prs_striped_operands operands = {cu_seqlens, sequences, stripe_ranks, NULL};
    struct prs_attention_args far = {.scale = 0};
    struct prs_packing x;
    int r = check_shape(shape, world, stripe_ranks);
    if (!r)
        r = prs_attention_check_striped(shape, &operands);
    if (!r)
        r = check_bounds(cu_seqlens, sequences, shape->seq);
    if (r)
        return r;
    prs_attention_set_stripes(shape, &far);
    x = (struct prs_packing){cu_seqlens, sequences, shape->seq, far.stripes.before, far.stripes.after};
    return prs_stripe_assign(&x, shape->stripe, world, stripe_ranks);
}

int prs_attention_assigned_positions(const struct prs_attention_shape *shape, const uint32_t *stripe_ranks,
                                     uint32_t rank, uint32_t world, uint32_t *positions)
{
    uint32_t row = 0, rows;
    int r = check_shape(shape, world, stripe_ranks);
    if (r == 0 && (rank >= world || !positions))
        r = prs_fail(-EINVAL, "attention: positions %p of rank %u of %u", (void *)positions, rank, world);
    if (r)
        return r;
    rows = shape->seq / world;
    for (uint32_t at = 0; at < shape->seq && row <= rows; at++)
        if (stripe_ranks[at / shape->stripe] == rank && row++ < rows)
            positions[row - 1] = at;
    return row == rows ? 0
                       : prs_fail(-EINVAL, "attention: stripe_ranks gives rank %u %s than %u stripes", rank,
                                  row < rows ? "less" : "more", rows / shape->stripe);
}

struct prs_attention_strides prs_attention_strides_of(const struct prs_attention_shape *shape,
                                                      const struct prs_attention_schedule *s, uint32_t heads,
                                                      uint32_t columns)
{
    uint64_t d = columns, rows = (uint64_t)s->segments * s->segment_rows;
    struct prs_attention_strides x = {.row = heads * d, .head = d, .batch = rows * heads * d};
    if (shape->heads_first != 0)
        x.row = d, x.head = rows * d;
    x.segment = s->segment_rows * x.row;
    return x;
}

uint32_t prs_attention_planes(const struct prs_attention_shape *shape, const struct prs_attention_schedule *s,
                              uint32_t heads)
{
    return shape->batch * (shape->heads_first != 0 ? heads : s->segments);
}

uint32_t prs_attention_kind_bytes(const struct prs_attention_shape *shape, uint32_t kind)
{
    uint32_t columns = kind == PRS_KEYS ? shape->head_dim : prs_attention_value_dim(shape);
    return columns * prs_element_bytes(PRS_ATTENTION_TYPE);
}

uint64_t prs_attention_copied_at(const struct prs_attention_shape *shape, const struct prs_attention_schedule *s,
                                 uint32_t order, uint32_t kind)
{
    uint64_t rows = (uint64_t)s->pairs * s->segments * s->segment_rows, number = prs_attention_tensor(s, order, kind);
    uint64_t keys = kind == PRS_KEYS ? number : s->place.world - 1;
    return rows * (keys * prs_attention_kind_bytes(shape, PRS_KEYS) +
                   (number - keys) * prs_attention_kind_bytes(shape, PRS_VALUES));
}

/* How TMA sees the columns of a head. If they are a multiple of a stage row (128 bytes), one box has all of them.
 * Otherwise a box has one stage row, and the last box of a row reaches beyond the tensor. */
struct columns {
    uint32_t all, size, parts, box;
};

static struct columns columns_of(const struct prs_attention_shape *shape, struct prs_attention_box box)
{
    uint32_t all = box.values ? prs_attention_value_dim(shape) : shape->head_dim;
    uint32_t step = prs_element_step(PRS_ATTENTION_TYPE);
    if (!box.swizzled)
        return (struct columns){all, all, 1, all};
    if (all % step != 0)
        return (struct columns){all, all, 1, step};
    return (struct columns){all, step, all / step, step};
}

int prs_attention_encode(const struct prs_attention_shape *shape, const struct prs_attention_schedule *s,
                         const void *base, uint32_t count, uint32_t heads, struct prs_attention_box box,
                         CUtensorMap *map)
{
    uint32_t bytes = prs_element_bytes(PRS_ATTENTION_TYPE);
    struct columns c = columns_of(shape, box);
    struct prs_attention_strides x = prs_attention_strides_of(shape, s, heads, c.all);
    struct prs_tensor_view v = {
        .base = base,
        .type = PRS_ATTENTION_TYPE,
        .size = {c.size, s->segment_rows, c.parts, heads, (uint64_t)count * prs_attention_planes(shape, s, heads)},
        .stride = {x.row * bytes, (uint64_t)c.box * bytes, x.head * bytes, x.segment * bytes},
        .box = {c.box, box.rows, c.parts, 1, 1},
        .swizzled = box.swizzled};
    if (shape->heads_first != 0) {
        v.size[3] = s->segments;
        v.stride[2] = x.segment * bytes, v.stride[3] = x.head * bytes;
    }
    return prs_tensor_view_encode(&v, map);
}

int prs_attention_encode_stages(const struct prs_attention_shape *shape, const struct prs_attention_schedule *s,
                                const void *base, struct prs_attention_box box, CUtensorMap *map)
{
    struct columns c = columns_of(shape, box);
    uint64_t row = (uint64_t)c.all * prs_element_bytes(PRS_ATTENTION_TYPE);
    uint64_t stage = (uint64_t)s->room_rows * prs_attention_row_bytes(shape);
    struct prs_tensor_view v = {.base = base,
                                .type = PRS_ATTENTION_TYPE,
                                .size = {c.size, s->segment_rows, c.parts, prs_attention_stages(s), 1},
                                .stride = {row, PRS_STAGE_ROW, stage, stage},
                                .box = {c.box, box.rows, c.parts, 1, 1},
                                .swizzled = true};
    return prs_tensor_view_encode(&v, map);
}
