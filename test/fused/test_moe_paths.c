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

static double larger(double a, double b)
{
    return a > b ? a : b;
}

#define QWEN3_30B   2048, 768, 128, 8
#define DEEPSEEK_V3 7168, 2048, 256, 8
#define MIXTRAL     4096, 14336, 8, 2
/* one rank's load of 4 */
#define QWEN3_30B_4   2048, 768, 32, 8
#define DEEPSEEK_V3_4 7168, 2048, 64, 8

/* Measured on H200s, by turns in one process where both are of one row: moe-layer-one-kernel-turns-1xH200.json,
 * moe-layer-one-kernel-wide-1xH200.json, moe-layer-one-kernel-turns-2xH200.json, moe-layer-4xH200.json. Where one
 * warpgroup multiplied (the wide and the last file), few rows or large weights made no difference. */
static const struct measured {
    uint32_t world, tokens, hidden, inner, experts, top_k, bytes;
    double one_us, several_us;
} measured[] = {
    {1, 1, QWEN3_30B_4, 1, 27.1, 71.7},        {1, 8, QWEN3_30B_4, 1, 53.5, 112.0},
    {1, 32, QWEN3_30B_4, 1, 63.0, 117.3},      {1, 64, QWEN3_30B_4, 1, 66.5, 120.4},
    {1, 128, QWEN3_30B_4, 1, 75.0, 125.2},     {1, 256, QWEN3_30B_4, 1, 97.2, 139.6},
    {1, 512, QWEN3_30B_4, 1, 149.1, 170.2},    {1, 1, QWEN3_30B_4, 2, 38.2, 85.3},
    {1, 8, QWEN3_30B_4, 2, 78.7, 135.6},       {1, 32, QWEN3_30B_4, 2, 91.2, 150.0},
    {1, 128, QWEN3_30B_4, 2, 101.8, 158.5},    {1, 256, QWEN3_30B_4, 2, 127.2, 171.4},
    {1, 512, QWEN3_30B_4, 2, 183.0, 212.3},    {1, 8, DEEPSEEK_V3_4, 1, 454.5, 591.3},
    {1, 32, DEEPSEEK_V3_4, 1, 681.1, 818.6},   {1, 128, DEEPSEEK_V3_4, 1, 698.3, 831.9},
    {1, 256, DEEPSEEK_V3_4, 1, 727.8, 847.0},  {1, 8, DEEPSEEK_V3_4, 2, 882.3, 1007.7},
    {1, 32, DEEPSEEK_V3_4, 2, 1332.9, 1480.5}, {1, 128, DEEPSEEK_V3_4, 2, 1336.1, 1487.2},
    {2, 8, QWEN3_30B, 1, 76.7, 149.2},         {2, 32, QWEN3_30B, 1, 103.9, 187.8},
    {2, 64, QWEN3_30B, 1, 108.4, 195.0},       {2, 128, QWEN3_30B, 1, 119.0, 197.6},
    {2, 256, QWEN3_30B, 1, 131.2, 204.2},      {2, 8, QWEN3_30B, 2, 121.6, 191.4},
    {2, 32, QWEN3_30B, 2, 168.0, 249.9},       {2, 128, QWEN3_30B, 2, 172.9, 257.8},
    {2, 256, QWEN3_30B, 2, 190.1, 265.6},      {4, 128, DEEPSEEK_V3, 2, 1457.9, 1535.6},
};

Test(moe_paths, of_what_was_measured_the_chosen_path_is_within_5_percent_of_the_faster_one)
{
    for (size_t i = 0; i < sizeof(measured) / sizeof(*measured); i++) {
        const struct measured *m = &measured[i];
        struct prs_moe_shape s = layer_of(m->tokens, m->hidden, m->inner, m->experts, m->top_k);
        uint32_t row_bytes = m->bytes == BF16_ROW ? m->hidden * BF16_ROW : m->hidden + m->hidden / 32;
        double one = prs_moe_time_of_one(&s, m->world, m->bytes, NULL);
        double several = prs_moe_time_of_kernels(&s, m->world, row_bytes, m->bytes).all;
        double chosen = one < several ? m->one_us : m->several_us;
        cr_expect(chosen <= 1.05 * m->one_us && chosen <= 1.05 * m->several_us, "row %zu: %g us, several %g", i, one,
                  several);
        cr_expect(larger(one / m->one_us, m->one_us / one) < 1.2, "row %zu: one kernel: %g us", i, one);
        /* A single token: not all of a kernel's steps are as long as for more. */
        cr_expect(larger(several / m->several_us, m->several_us / several) < (m->tokens == 1 ? 1.4 : 1.12),
                  "row %zu: several kernels: %g us", i, several);
    }
}

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
        cr_assert(several > 0.6 && several < 1.2, "row %zu: several kernels, %g of what was measured", i, several);
        cr_assert_lt(prs_moe_time_of_one(&s, rows[i].world, BF16_ROW, NULL), several_us(&s, rows[i].world), "row %zu",
                     i);
    }
}

/* Not measured. Of 128 tokens the second product has 48 tiles for 132 SMs as several kernels, of 14336 columns each. */
Test(moe_paths, experts_with_many_rows_take_several_kernels)
{
    static const struct {
        uint32_t tokens;
        bool one;
    } rows[] = {{1, true}, {8, true}, {16, true}, {128, true}, {512, false}, {2048, false}};
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
        cr_assert(us > 0.8 && us < 1.1, "row %zu: %g of what was measured", i, us);
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
