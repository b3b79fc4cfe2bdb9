/* SPDX-License-Identifier: Apache-2.0 */
/* The MoE layer as one kernel, for few tokens (fused/moe/few.h), on emulated GPUs. Every token's result is compared
 * with the layer in double precision. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>

#include "test/hopper/ranks_moe.h"
#include "tools/hopper/hopper.h"

static void assert_right(const struct ranks_moe *rows, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        struct ranks_moe one = rows[i];
        one.what = LAYER;
        one.tuning.path = PRS_MOE_PATH_ONE;
        ranks_moe_assert_right(&one, 1);
    }
}

Test(moe_few, few_tokens_take_one_launch, .timeout = 600)
{
    static const struct ranks_moe rows[] = {
        {1, 2, 136, 4, 2, 2, EVEN, .inner = 136, .activation = PRS_ACTIVATION_SILU, .gated = 1},
        {2, 1, 136, 8, 2, 6, ANY, .inner = 72, .activation = PRS_ACTIVATION_SILU, .gated = 1, .residual = true,
         .in_place = true},
        {2, 3, 264, 8, 3, 4, EVEN, .inner = 136, .activation = PRS_ACTIVATION_SILU, .gated = 1},
        {2, 16, 1224, 4, 2, 2, EVEN, .inner = 72, .activation = PRS_ACTIVATION_GELU, .residual = true},
    };
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

Test(moe_few, experts_with_many_rows_have_several_tiles, .timeout = 600)
{
    static const struct ranks_moe rows[] = {
        {2, 32, 136, 4, 2, 2, EVEN, .inner = 72, .activation = PRS_ACTIVATION_SILU, .gated = 1},
        {2, 32, 72, 4, 2, 2, ONE_EXPERT, .inner = 72, .activation = PRS_ACTIVATION_RELU, .residual = true},
        {2, 12, 72, 18, 9, 2, HALF_EMPTY, .inner = 40, .activation = PRS_ACTIVATION_SILU, .gated = 1},
    };
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* Ranks without tokens, experts without rows, an expert chosen twice by a token; the second time the same bits. */
Test(moe_few, any_choices_are_right_in_many_launches, .timeout = 600)
{
    static const struct ranks_moe rows[] = {
        {2, 6, 72, 4, 3, 24, ANY, .combines = 2, .inner = 72, .activation = PRS_ACTIVATION_SILU, .gated = 1},
        {4, 3, 72, 8, 2, 8, ANY, .inner = 72, .activation = PRS_ACTIVATION_SILU, .gated = 1, .residual = true},
        {2, 3, 72, 8, 2, 4, SOME_NONE, .inner = 72, .activation = PRS_ACTIVATION_SILU, .gated = 1,
         .tuning = {.ctas = 1}},
    };
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* Every access checked for its order (memory_order.py). */
Test(moe_few_order, of_a_layer_in_one_launch, .timeout = 600)
{
    static const struct ranks_moe rows[] = {
        {2, 4, 136, 4, 2, 3, EVEN, .inner = 72, .activation = PRS_ACTIVATION_SILU, .gated = 1},
    };
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}
