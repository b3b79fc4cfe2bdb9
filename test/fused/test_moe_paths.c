/* SPDX-License-Identifier: Apache-2.0 */
/* The predicted times of a layer of MoE as one kernel and as several, and which is the shorter one. */
#include <criterion/criterion.h>

#include "fused/moe/time.h"

enum { BF16_ROW = 2 };

static struct prs_moe_shape layer_of(uint32_t tokens, uint32_t hidden, uint32_t inner, uint32_t experts, uint32_t top_k)
{
    return (struct prs_moe_shape){.tokens = tokens,
                                  .hidden = hidden,
                                  .columns = 2 * inner,
                                  .experts = experts,
                                  .top_k = top_k,
                                  .gated = 1,
                                  .layer = 1,
                                  .weights_transposed = 1};
}

static double several_us(const struct prs_moe_shape *s, uint32_t world)
{
    return prs_moe_time_of_kernels(s, world, s->hidden * BF16_ROW, BF16_ROW).all;
}

#define QWEN3_30B   2048, 768, 128, 8
#define DEEPSEEK_V3 7168, 2048, 256, 8
#define MIXTRAL     4096, 14336, 8, 2

/* Measured on H100s, which read memory at 0.7 of the rate of the predicted H200s; with 128 tokens, before tiles had up
 * to 64 rows. */
Test(moe_paths, predicted_times_are_as_measured)
{
    static const struct {
        uint32_t world, tokens, hidden, inner, experts, top_k;
        double one_us, several_us;
    } rows[] = {
        {2, 1, QWEN3_30B, 56.4, 119.6},   {2, 8, QWEN3_30B, 158, 239},       {2, 32, QWEN3_30B, 221, 315},
        {2, 128, QWEN3_30B, 240, 324},    {4, 1, QWEN3_30B, 64, 131},        {4, 8, QWEN3_30B, 122, 200},
        {4, 32, QWEN3_30B, 135, 217},     {4, 128, QWEN3_30B, 195, 230},     {4, 8, DEEPSEEK_V3, 1316, 1517},
        {4, 32, DEEPSEEK_V3, 1803, 2028}, {4, 128, DEEPSEEK_V3, 1934, 2055},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct prs_moe_shape s =
            layer_of(rows[i].tokens, rows[i].hidden, rows[i].inner, rows[i].experts, rows[i].top_k);
        double one = prs_moe_time_of_one(&s, rows[i].world, BF16_ROW, NULL) / rows[i].one_us;
        double several = several_us(&s, rows[i].world) / rows[i].several_us;
        cr_assert(one > 0.6 && one < 0.9, "row %zu: one kernel, %g of what was measured", i, one);
        cr_assert(several > 0.6 && several < 1.05, "row %zu: several kernels, %g of what was measured", i, several);
        cr_assert_lt(prs_moe_time_of_one(&s, rows[i].world, BF16_ROW, NULL), several_us(&s, rows[i].world), "row %zu",
                     i);
    }
}

Test(moe_paths, experts_with_many_rows_take_several_kernels)
{
    static const struct {
        uint32_t tokens;
        bool one;
    } rows[] = {{1, true}, {8, true}, {16, true}, {128, false}, {512, false}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct prs_moe_shape s = layer_of(rows[i].tokens, MIXTRAL);
        cr_assert_eq(prs_moe_time_of_one(&s, 4, BF16_ROW, NULL) < several_us(&s, 4), rows[i].one,
                     "%u tokens: %g us, several %g", rows[i].tokens, prs_moe_time_of_one(&s, 4, BF16_ROW, NULL),
                     several_us(&s, 4));
    }
}

/* Measured on one H200 with one rank's load of 4 (doc/results/moe-layer-one-kernel-turns-1xH200.json): its experts are
 * a quarter of all. */
Test(moe_paths, tiles_are_wide_where_experts_have_many_rows)
{
    static const struct {
        uint32_t tokens, hidden, inner, experts, tile;
        double us; /* e4m3 */
    } rows[] = {
        {8, 2048, 768, 32, 32, 53.5},     {64, 2048, 768, 32, 32, 66.5},    {128, 2048, 768, 32, 64, 74.7},
        {256, 2048, 768, 32, 64, 96.8},   {512, 2048, 768, 32, 64, 149.7},  {8, 7168, 2048, 64, 32, 454.5},
        {128, 7168, 2048, 64, 64, 698.3}, {256, 7168, 2048, 64, 64, 727.8},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct prs_moe_shape s = layer_of(rows[i].tokens, rows[i].hidden, rows[i].inner, rows[i].experts, 8);
        uint32_t tile = 0;
        double us = prs_moe_time_of_one(&s, 1, 1, &tile) / rows[i].us;
        cr_assert_eq(tile, rows[i].tile, "row %zu: %u rows", i, tile);
        cr_assert(us > 0.9 && us < 1.3, "row %zu: %g of what was measured", i, us); /* one rank waits for no other */
    }
}

/* In e4m3, measured on 4 H100s (doc/results/moe-layer-fp8-peers-4xH100.json). Their memory has 0.7 of the bandwidth
 * that plans expect, and one warpgroup multiplied and ended all units. */
Test(moe_paths, the_faster_path_of_e4m3_is_chosen)
{
    static const struct {
        uint32_t tokens, hidden, inner, experts, top_k;
        double one_us, several_us;
    } rows[] = {
        {8, QWEN3_30B, 91.8, 164.5},
        {128, QWEN3_30B, 152.1, 188.3},
        {8, DEEPSEEK_V3, 695.9, 862.9},
        {128, DEEPSEEK_V3, 1010.7, 1149.5},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct prs_moe_shape s =
            layer_of(rows[i].tokens, rows[i].hidden, rows[i].inner, rows[i].experts, rows[i].top_k);
        double one = prs_moe_time_of_one(&s, 4, 1, NULL);
        double several = prs_moe_time_of_kernels(&s, 4, s.hidden + s.hidden / 32, 1).all;
        cr_assert_eq(one < several, rows[i].one_us < rows[i].several_us, "row %zu: %g us, several %g", i, one, several);
        cr_assert(one / rows[i].one_us > 0.5 && one / rows[i].one_us < 1, "row %zu: %g us", i, one);
    }
}
