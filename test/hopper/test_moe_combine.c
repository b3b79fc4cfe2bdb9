/* SPDX-License-Identifier: Apache-2.0 */
/* MoE there and back on emulated GPUs: dispatch, experts, combine. Every element of a token's result is compared with
 * the definition in double precision. */
#include <criterion/criterion.h>

#include "test/hopper/ranks_moe.h"

Test(moe_combine, experts_of_the_caller_get_rows_and_tokens_their_sums, .timeout = 600)
{
    static const struct ranks_moe rows[] = {
        {1, 50, 136, 4, 2, 2, EVEN, .residual = true},
        {2, 60, 264, 8, 3, 4, EVEN, .residual = true, .in_place = true},
        {2, 60, 72, 8, 3, 4, SOME_NONE},
        {4, 40, 1032, 8, 4, 4, SOME_NONE, .residual = true},
        {8, 20, 72, 16, 4, 4, EVEN},
        {3, 30, 7168, 6, 2, 2, EVEN, .unweighted = 1},
    };
    ranks_moe_assert_right(rows, sizeof(rows) / sizeof(*rows));
}

Test(moe_combine, sums_of_products_come_back, .timeout = 600)
{
    static const struct ranks_moe rows[] = {
        {2, 60, 136, 8, 3, 3, EVEN, PRODUCT, .residual = true},
        {4, 40, 264, 8, 4, 3, SOME_NONE, PRODUCT},
    };
    ranks_moe_assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* Every access checked for its order (memory_order.py). */
Test(moe_combine_order, of_sums_that_come_back, .timeout = 600)
{
    static const struct ranks_moe rows[] = {
        {2, 20, 72, 4, 2, 3, EVEN, .residual = true},
        {2, 20, 72, 4, 2, 3, EVEN, LAYER, .inner = 72, .activation = PRS_ACTIVATION_SILU, .gated = 1},
        {2, 20, 72, 4, 2, 3, EVEN, LAYER, .inner = 72, .activation = PRS_ACTIVATION_SILU, .gated = 1,
         .tuning = {.returns = PRS_MOE_RETURNS_EARLY}},
    };
    ranks_moe_assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* The second combine must give the same bits, without a dispatch in between. */
Test(moe_combine, a_dispatch_is_combined_any_number_of_times, .timeout = 600)
{
    static const struct ranks_moe rows[] = {
        {2, 60, 264, 8, 3, 3, EVEN, .combines = 3},
        {4, 40, 72, 8, 4, 3, ANY, PRODUCT, .combines = 2},
    };
    ranks_moe_assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* As layers of a model do in training: all forward, then all back. */
Test(moe_combine, maps_that_are_kept_serve_later_combines, .timeout = 600)
{
    static const struct ranks_moe rows[] = {
        {2, 60, 72, 8, 3, 5, ANY, .kept_maps = true, .residual = true},
        {4, 40, 136, 8, 4, 4, SOME_NONE, PRODUCT, .kept_maps = true},
    };
    ranks_moe_assert_right(rows, sizeof(rows) / sizeof(*rows));
}

Test(moe_combine, skewed_choices_come_back, .timeout = 600)
{
    static const struct ranks_moe rows[] = {
        {4, 60, 72, 8, 2, 3, ONE_EXPERT, .residual = true},
        {4, 60, 72, 8, 4, 3, HALF_EMPTY},
    };
    ranks_moe_assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* Ranks without tokens, experts without rows, an expert that a token has chosen twice. */
Test(moe_combine, many_launches_of_any_choices_are_right, .timeout = 600)
{
    static const struct ranks_moe rows[] = {
        {2, 24, 72, 4, 3, RANKS_MOE_MOST_LAUNCHES, ANY, .residual = true},
        {4, 16, 72, 8, 2, RANKS_MOE_MOST_LAUNCHES, ANY},
        {3, 16, 72, 6, 2, 20, ANY, .combines = 2},
    };
    ranks_moe_assert_right(rows, sizeof(rows) / sizeof(*rows));
}

Test(moe_combine, rows_without_room_add_nothing, .timeout = 600)
{
    static const struct ranks_moe rows[] = {
        {2, 150, 72, 4, 2, 3, EVEN, .capacity_of_last = 128, .residual = true},
        {3, 120, 72, 6, 3, 3, SOME_NONE, .capacity_of_last = 256},
    };
    ranks_moe_assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* ---- the whole layer ---- */
Test(moe_combine, a_layer_is_right_in_one_launch, .timeout = 900)
{
    static const struct ranks_moe rows[] = {
        {1, 40, 136, 4, 2, 2, EVEN, LAYER, .inner = 136, .activation = PRS_ACTIVATION_SILU, .gated = 1},
        {2, 50, 136, 8, 3, 3, EVEN, LAYER, .inner = 264, .activation = PRS_ACTIVATION_SILU, .gated = 1,
         .residual = true, .in_place = true},
        {2, 50, 264, 8, 3, 3, SOME_NONE, LAYER, .inner = 72, .activation = PRS_ACTIVATION_SILU, .gated = 1, .k_n = 1,
         .residual = true},
        {4, 30, 72, 8, 4, 3, EVEN, LAYER, .inner = 136, .activation = PRS_ACTIVATION_GELU, .k_n = 1},
        {3, 30, 72, 6, 2, 2, EVEN, LAYER, .inner = 72, .activation = PRS_ACTIVATION_RELU, .gated = 1},
    };
    ranks_moe_assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* More rows than a tile; two SMs that share rows, or not. */
Test(moe_combine, a_layer_of_many_rows_is_right, .timeout = 900)
{
    static const struct ranks_moe rows[] = {
        {2, 200, 72, 4, 2, 2, EVEN, LAYER, .inner = 264, .activation = PRS_ACTIVATION_SILU, .gated = 1,
         .tuning = {.cluster = 2}},
        {2, 200, 264, 4, 2, 2, EVEN, LAYER, .inner = 72, .activation = PRS_ACTIVATION_SILU, .gated = 1, .k_n = 1,
         .tuning = {.cluster = 1}},
    };
    ranks_moe_assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* Beside the second product: rows of several pieces, the last of which is shorter; pairs of SMs, one of which has no
 * tile; tokens for which there is no room, and more deliveries than are claimed at a time. */
Test(moe_combine, a_layer_returns_its_sums_early, .timeout = 900)
{
    static const struct ranks_moe rows[] = {
        {2, 40, 1288, 4, 3, 6, EVEN, LAYER, .combines = 2, .inner = 72, .gated = 1,
         .tuning = {.cluster = 1, .returns = PRS_MOE_RETURNS_EARLY}},
        {4, 20, 1544, 8, 3, 6, ANY, LAYER, .combines = 2, .inner = 72, .residual = true,
         .tuning = {.cluster = 2, .returns = PRS_MOE_RETURNS_EARLY}},
        {2, 150, 520, 4, 2, 2, EVEN, LAYER, .combines = 2, .inner = 72, .gated = 1, .capacity_of_last = 128,
         .tuning = {.returns = PRS_MOE_RETURNS_EARLY}},
        {4, 40, 72, 8, 2, 3, ONE_EXPERT, LAYER, .combines = 2, .inner = 72, .k_n = 1,
         .tuning = {.returns = PRS_MOE_RETURNS_EARLY}},
    };
    ranks_moe_assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* The second launch must give the same bits. */
Test(moe_combine, a_layer_repeats_bit_by_bit_for_any_choices, .timeout = 900)
{
    static const struct ranks_moe rows[] = {
        {2, 24, 72, 4, 3, 12, ANY, LAYER, .combines = 2, .inner = 72, .activation = PRS_ACTIVATION_SILU, .gated = 1},
        {4, 20, 72, 8, 2, 8, ANY, LAYER, .combines = 2, .inner = 72, .activation = PRS_ACTIVATION_SILU, .gated = 1,
         .residual = true},
        {4, 40, 72, 8, 2, 2, ONE_EXPERT, LAYER, .combines = 2, .inner = 72, .gated = 1},
        {2, 150, 72, 4, 2, 2, EVEN, LAYER, .combines = 2, .inner = 72, .gated = 1, .capacity_of_last = 128},
    };
    ranks_moe_assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* ---- several nodes: the real transport, over any verbs device (softnic in the suite) ---- */
Test(moe_combine_nodes, sums_come_back_from_other_nodes, .timeout = 900)
{
    static const struct ranks_moe rows[] = {
        {2, 60, 72, 4, 2, 4, EVEN, .nodes = 2, .residual = true},
        {4, 40, 136, 8, 4, 4, SOME_NONE, .nodes = 2, .tuning = {.rows_per_signal = 8, .rows_per_put = 4}},
        {6, 20, 72, 12, 4, 2, EVEN, .nodes = 3, .tuning = {.rows_per_signal = 16, .rows_per_put = 4}},
        {4, 24, 72, 8, 3, 10, ANY, .nodes = 2, .combines = 2, .tuning = {.rows_per_signal = 8}},
    };
    ranks_need_a_device();
    ranks_moe_assert_right(rows, sizeof(rows) / sizeof(*rows));
}

Test(moe_combine_nodes, maps_that_are_kept_serve_later_combines, .timeout = 900)
{
    static const struct ranks_moe rows[] = {
        {4, 40, 72, 8, 3, 4, SOME_NONE, .nodes = 2, .kept_maps = true, .tuning = {.rows_per_signal = 8}},
        {4, 40, 72, 8, 2, 3, ONE_EXPERT, .nodes = 2, .kept_maps = true},
    };
    ranks_need_a_device();
    ranks_moe_assert_right(rows, sizeof(rows) / sizeof(*rows));
}

Test(moe_combine_nodes, a_layer_spans_nodes, .timeout = 900)
{
    static const struct ranks_moe rows[] = {
        {2, 50, 72, 4, 2, 3, EVEN, LAYER, .nodes = 2, .inner = 72, .activation = PRS_ACTIVATION_SILU, .gated = 1},
        {4, 40, 72, 8, 3, 3, SOME_NONE, LAYER, .nodes = 2, .inner = 136, .activation = PRS_ACTIVATION_SILU, .gated = 1,
         .residual = true, .tuning = {.rows_per_signal = 8, .rows_per_put = 4}},
        {4, 20, 72, 8, 2, 8, ANY, LAYER, .nodes = 2, .combines = 2, .inner = 72, .gated = 1},
    };
    ranks_need_a_device();
    ranks_moe_assert_right(rows, sizeof(rows) / sizeof(*rows));
}
