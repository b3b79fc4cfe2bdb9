/* SPDX-License-Identifier: Apache-2.0 */
/* tools/nccl/values.c: a checker that cannot fail would make every NCCL figure worthless. */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <string.h>

#include "tools/nccl/values.h"

enum { COUNT = 5000, RANKS = 4, SEED = 11 };

ParameterizedTestParameters(values, a_sum_made_by_hand_passes_and_one_changed_element_is_found)
{
    static enum nccl_type types[] = {NCCL_INT8,  NCCL_UINT8,  NCCL_INT32,   NCCL_UINT32,
                                     NCCL_INT64, NCCL_UINT64, NCCL_FLOAT32, NCCL_FLOAT64};

    return cr_make_param_array(enum nccl_type, types, sizeof(types) / sizeof(types[0]));
}

/* Adds the ranks' data with the type's own arithmetic, independent of the checker's table. */
static void add_ranks(char *sum, enum nccl_type type)
{
    static char part[COUNT * 8];

    for (unsigned r = 0; r < RANKS; r++) {
        values_fill(part, type, r, 0, COUNT, SEED);
        for (size_t i = 0; i < COUNT; i++) {
            switch (type) {
            case NCCL_FLOAT32:
                ((float *)sum)[i] += ((float *)part)[i];
                break;
            case NCCL_FLOAT64:
                ((double *)sum)[i] += ((double *)part)[i];
                break;
            default:
                if (values_size(type) == 1)
                    sum[i] = (char)(sum[i] + part[i]);
                else if (values_size(type) == 4)
                    ((uint32_t *)sum)[i] += ((uint32_t *)part)[i];
                else
                    ((uint64_t *)sum)[i] += ((uint64_t *)part)[i];
            }
        }
    }
}

ParameterizedTest(enum nccl_type *type, values, a_sum_made_by_hand_passes_and_one_changed_element_is_found)
{
    static char sum[COUNT * 8];
    size_t where = 0;

    memset(sum, 0, sizeof(sum));
    add_ranks(sum, *type);
    cr_assert_eq(values_check(sum, *type, NCCL_SUM, 0, RANKS, 0, COUNT, SEED, &where), 0);
    sum[1234 * values_size(*type)] ^= 1;
    cr_assert_eq(values_check(sum, *type, NCCL_SUM, 0, RANKS, 0, COUNT, SEED, &where), 1);
    cr_assert_eq(where, 1234);
}

Test(values, a_block_that_landed_elsewhere_is_found)
{
    static uint16_t data[COUNT + 7 * 1021];
    size_t where;

    values_fill(data, NCCL_FLOAT16, 2, 0, COUNT + 7 * 1021, SEED);
    for (size_t shift = 1; shift < 64; shift++)
        cr_assert_gt(values_check(data + shift, NCCL_FLOAT16, NCCL_SUM, 2, 1, 0, COUNT, SEED, &where), 0, "shift %zu",
                     shift);
}

Test(values, another_rank_or_seed_is_found)
{
    static float data[COUNT];
    size_t where;

    values_fill(data, NCCL_FLOAT32, 1, 0, COUNT, SEED);
    cr_assert_eq(values_check(data, NCCL_FLOAT32, NCCL_SUM, 1, 1, 0, COUNT, SEED, &where), 0);
    cr_assert_eq(values_check(data, NCCL_FLOAT32, NCCL_SUM, 0, 1, 0, COUNT, SEED, &where), COUNT);
    cr_assert_eq(values_check(data, NCCL_FLOAT32, NCCL_SUM, 1, 1, 0, COUNT, SEED + 1, &where), COUNT);
}
