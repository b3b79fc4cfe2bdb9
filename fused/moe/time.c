/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/moe/time.h"

#include <math.h>
#include <stdbool.h>

#include "fused/core/machine.h"
#include "fused/moe/few.h"

/* Fitted to the layers of Qwen3-30B and DeepSeek-V3 that test_moe_paths.c lists, on 1, 2 and 4 H200s. Those as one
 * kernel have at most 4096 choices of all ranks; more were not measured. doc/fused-notes.md ("One launch for few
 * tokens") says more.
 *
 * In addition to reading weights and multiplying: */
static const double ONE_US = 20, ONE_WAITS_US = 12; /* one kernel; its waits for other ranks, if there are any */
/* five kernels, each of which begins after the previous one has ended; their waits for other ranks */
static const double LAYER_US = 72, LAYER_WAITS_US = 33;
static const double ROUTING_US = 25; /* counts, offsets and maps of a dispatch with its product */
static const double ROW_US = 0.004;  /* for each row of a layer as five kernels, in addition to its bytes */
/* Products of several kernels read weights at this part of PRS_MEMORY_BYTES_PER_US. */
static const double WEIGHTS_RATE = 0.94;
static const double SCALED_TIME = 0.75; /* e4m3: the time of a tile over its time in bf16; sums are promoted */

/* In a layer as one kernel (one rank's load of 4 on one H200, moe-layer-one-kernel-turns-1xH200.json): */
static const double STAGE_US = 0.3, UNIT_US = 1;      /* multiplying a stage; the end of a unit */
static const double SCALED_UNIT_US[2] = {5.5, 2};     /* e4m3; the first product's results are quantised */
static const double PACK_US = 8, PACK_ROW_US = 0.008; /* copying the rows of wide tiles: the least, and of each */
static const double BOX_US = 0.001; /* TMA takes 15 ns for 128 bytes of a row; this part of it is not hidden */

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

/* The time of a product of several kernels. All SMs wait for those that have one tile more. row_bytes: of all rows that
 * are read and written beside it. */
static double product_us(double blocks, double hit, uint32_t inputs, uint32_t columns, uint32_t element_bytes,
                         double row_bytes)
{
    double tile = prs_compute_us(2.0 * PRS_TILE_M * PRS_TILE_N * inputs, PRS_MOE_FLOPS_PER_US, 1);
    double most = ceil(blocks * prs_ceil_div(columns, PRS_TILE_N) / PRS_SMS); /* tiles of an SM */
    double weights = hit * columns * inputs * element_bytes / WEIGHTS_RATE;
    return larger(most * tile * (element_bytes == 1 ? SCALED_TIME : 1),
                  (weights + row_bytes) / PRS_MEMORY_BYTES_PER_US);
}

struct prs_moe_time prs_moe_time_of_kernels(const struct prs_moe_shape *s, uint32_t world, uint32_t row_bytes,
                                            uint32_t element_bytes)
{
    struct prs_moe_time t;
    double rows = (double)s->tokens * s->top_k, hit = hit_experts(s, world), misses = 1;
    double blocks = larger(rows / PRS_TILE_M + hit / 2, hit), weights, link;
    double moved = rows * 3 * row_bytes; /* staged, placed, read */
    for (uint32_t i = 0; i < s->top_k; i++)
        misses *= 1 - 1.0 / world;
    t.sent_bytes = (uint64_t)(s->tokens * (1 - misses) * (world - 1) * row_bytes);
    link = (double)t.sent_bytes / PRS_ROW_STORE_BYTES_PER_US;
    t.product = prs_compute_us(2.0 * blocks * PRS_TILE_M * s->hidden * s->columns, PRS_MOE_FLOPS_PER_US, PRS_SMS);
    t.product *= element_bytes / 2.0;
    weights = (hit * s->columns * row_bytes + moved) / PRS_MEMORY_BYTES_PER_US;
    t.product = larger(t.product, weights);
    t.all = ROUTING_US + larger(product_us(blocks, hit, s->hidden, s->columns, element_bytes, moved), link);
    if (s->layer) { /* the second product; after it results are read, and sums sent */
        double result_bytes = (double)s->hidden * BF16_BYTES, inner = inner_columns(s);
        t.all += LAYER_US - ROUTING_US + (world > 1 ? LAYER_WAITS_US : 0) + rows * ROW_US +
                 product_us(blocks, hit, (uint32_t)inner, s->hidden, element_bytes, rows * inner * element_bytes) +
                 larger(rows * result_bytes / PRS_MEMORY_BYTES_PER_US, link * result_bytes / row_bytes);
    }
    return t;
}

/* The time that tiles take, if all SMs share them. Weights of an expert's first tile come from memory, those of others
 * from L2. Two warpgroups take units by turns: one multiplies while the other ends its unit. */
static double tiles_us(const struct prs_moe_shape *s, uint32_t element_bytes, double hit, double tiles)
{
    uint32_t inner = (uint32_t)inner_columns(s), inputs[2] = {s->hidden, inner}, rows[2] = {s->columns, s->hidden};
    double us = 0;
    for (uint32_t i = 0; i < 2; i++) {
        double bytes = (double)inputs[i] * element_bytes, units = (double)rows[i] / PRS_FEW_WEIGHTS;
        double multiplied = bytes / PRS_FEW_STEP * STAGE_US, end = element_bytes == 1 ? SCALED_UNIT_US[i] : UNIT_US;
        double unit = larger(multiplied, (multiplied + end) / 2) / PRS_SMS;
        us += units * (hit * larger(bytes * PRS_FEW_WEIGHTS / PRS_MEMORY_BYTES_PER_US, unit) + (tiles - hit) * unit);
    }
    return us;
}

double prs_moe_time_of_one(const struct prs_moe_shape *s, uint32_t world, uint32_t element_bytes, uint32_t *tile)
{
    double row_bytes = (double)s->hidden * BF16_BYTES, rows = (double)s->tokens * s->top_k, hit = hit_experts(s, world);
    double boxes = rows * s->hidden / PRS_STAGE_ROW * s->columns / PRS_FEW_WEIGHTS;
    double narrow =
        tiles_us(s, element_bytes, hit, larger(hit, rows / PRS_FEW_NARROW + hit / 2)) + boxes * BOX_US / PRS_SMS;
    double wide = tiles_us(s, element_bytes, hit, larger(hit, rows / PRS_FEW_WIDE + hit / 2)) +
                  larger(PACK_US, rows * PACK_ROW_US);
    bool is_wide = wide < narrow || rows > hit * PRS_FEW_NARROW;
    if (tile)
        *tile = is_wide ? PRS_FEW_WIDE : PRS_FEW_NARROW;
    return ONE_US + (world > 1 ? ONE_WAITS_US : 0) + (is_wide ? wide : narrow) +
           rows * (world - 1) / world * row_bytes / PRS_ROW_STORE_BYTES_PER_US; /* each choice's result is sent */
}
