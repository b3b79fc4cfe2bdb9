/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/attention/tensors.h"

#include <math.h>

#include "fused/attention/tuning.h"
#include "fused/core/tensor_map.h"

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
    default:
        return NULL;
    }
}

void prs_attention_set_scale(const struct prs_attention_shape *shape, struct prs_attention_args *a)
{
    double scale = shape->scale != 0 ? (double)shape->scale : 1 / sqrt((double)shape->head_dim);
    a->scale = (float)scale;
    a->scale_log2 = (float)(scale * LOG2_E);
}

struct prs_attention_strides prs_attention_strides_of(const struct prs_attention_shape *shape,
                                                      const struct prs_attention_schedule *s, uint32_t heads)
{
    uint64_t d = shape->head_dim, rows = (uint64_t)s->segments * s->segment_rows;
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

int prs_attention_encode(const struct prs_attention_shape *shape, const struct prs_attention_schedule *s,
                         const void *base, uint32_t count, uint32_t heads, struct prs_attention_box box,
                         CUtensorMap *map)
{
    struct prs_attention_strides x = prs_attention_strides_of(shape, s, heads);
    uint32_t bytes = prs_element_bytes(PRS_ATTENTION_TYPE);
    uint32_t columns = box.swizzled ? prs_element_step(PRS_ATTENTION_TYPE) : shape->head_dim;
    uint32_t parts = shape->head_dim / columns;
    struct prs_tensor_view v = {
        .base = base,
        .type = PRS_ATTENTION_TYPE,
        .size = {columns, s->segment_rows, parts, heads, (uint64_t)count * prs_attention_planes(shape, s, heads)},
        .stride = {x.row * bytes, (uint64_t)columns * bytes, x.head * bytes, x.segment * bytes},
        .box = {columns, box.rows, parts, 1, 1},
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
    uint64_t row = prs_attention_row_bytes(shape), stage = s->segment_rows * row;
    uint32_t columns = prs_element_step(PRS_ATTENTION_TYPE), parts = shape->head_dim / columns;
    struct prs_tensor_view v = {.base = base,
                                .type = PRS_ATTENTION_TYPE,
                                .size = {columns, s->segment_rows, parts, prs_attention_stages(s), 1},
                                .stride = {row, PRS_STAGE_ROW, stage, stage},
                                .box = {columns, box.rows, parts, 1, 1},
                                .swizzled = true};
    return prs_tensor_view_encode(&v, map);
}
