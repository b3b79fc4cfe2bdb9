/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/moe/time.h"

#include <math.h>

#include "fused/core/machine.h"
#include "fused/moe/few.h"

/* The first two are the times in addition to reading weights. They were fitted to Qwen3-30B on 2 and 4 GPUs and
 * DeepSeek-V3 on 4, with 1 to 128 tokens for each rank (doc/fused-notes.md, "One launch for few tokens"). */
static const double ONE_US = 32; /* the launch, and three waits for other ranks */
/* five kernels, each of which begins after the previous one has ended, and their waits */
static const double LAYER_US = 105;
static const double ROUTING_US = 25; /* counts, offsets, maps: of a dispatch with its product */

enum { BF16_BYTES = 2 };

static double larger(double a, double b)
{
    return a > b ? a : b;
}

/* Experts of a rank that have a row. The others' weights are not read. */
static double hit_experts(const struct prs_moe_shape *s, uint32_t world)
{
    return (double)s->experts / world * (1 - exp(-(double)s->tokens * s->top_k * world / s->experts));
}

/* Columns of the first product's result. */
static double inner_columns(const struct prs_moe_shape *s)
{
    return s->gated ? s->columns / 2.0 : s->columns;
}

struct prs_moe_time prs_moe_time_of_kernels(const struct prs_moe_shape *s, uint32_t world, uint32_t row_bytes,
                                            uint32_t element_bytes)
{
    struct prs_moe_time t;
    double rows = (double)s->tokens * s->top_k, hit = hit_experts(s, world), misses = 1;
    double blocks = rows / PRS_TILE_M + hit / 2, weights, link;
    for (uint32_t i = 0; i < s->top_k; i++)
        misses *= 1 - 1.0 / world;
    t.sent_bytes = (uint64_t)(s->tokens * (1 - misses) * (world - 1) * row_bytes);
    link = (double)t.sent_bytes / PRS_ROW_STORE_BYTES_PER_US;
    t.product =
        prs_compute_us(2.0 * larger(blocks, hit) * PRS_TILE_M * s->hidden * s->columns, PRS_MOE_FLOPS_PER_US, PRS_SMS);
    /* The tensor cores take the same time for the same number of bytes; that was not measured for e4m3. */
    t.product *= element_bytes / 2.0;
    weights = (hit * s->columns + rows * 3) * row_bytes / PRS_MEMORY_BYTES_PER_US; /* rows: staged, placed, read */
    t.product = larger(t.product, weights);
    t.all = ROUTING_US + larger(t.product, link);
    if (s->layer) { /* the second product; after it results are read, and sums sent */
        double result_bytes = (double)s->hidden * BF16_BYTES;
        t.all += LAYER_US - ROUTING_US + t.product * inner_columns(s) / s->columns +
                 larger(rows * result_bytes / PRS_MEMORY_BYTES_PER_US, link * result_bytes / row_bytes);
    }
    return t;
}

/* Each tile takes as long as reading its weights, even if they come from L2. Each choice's result is sent. */
double prs_moe_time_of_one(const struct prs_moe_shape *s, uint32_t world, uint32_t element_bytes)
{
    double row_bytes = (double)s->hidden * BF16_BYTES, rows = (double)s->tokens * s->top_k;
    double hit = hit_experts(s, world), tiles = larger(hit, rows / PRS_FEW_TILE + hit / 2);
    double weights = (s->columns + inner_columns(s)) * s->hidden * element_bytes / PRS_MEMORY_BYTES_PER_US;
    return ONE_US + tiles * weights + rows * (world - 1) / world * row_bytes / PRS_ROW_STORE_BYTES_PER_US;
}
