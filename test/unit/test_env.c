/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "transport/util/env.h"
#include "transport/util/error.h"

struct row {
    char value[24];
    int result;
    long number;
};

ParameterizedTestParameters(env, a_number_must_be_whole_and_in_range)
{
    static struct row rows[] = {
        {"", 0, 7},
        {"0", 0, 0},
        {"7", 0, 7},
        {"0x7", 0, 7},
        {"-1", -EINVAL, 0},
        {"8", -EINVAL, 0},
        {"15", -EINVAL, 0},
        {"3x", -EINVAL, 0},
        {"x", -EINVAL, 0},
        {"3.0", -EINVAL, 0},
        {"99999999999999999", -EINVAL, 0},
    };
    return cr_make_param_array(struct row, rows, sizeof(rows) / sizeof(*rows));
}

ParameterizedTest(struct row *row, env, a_number_must_be_whole_and_in_range)
{
    long number;

    setenv("NCCL_IB_RETRY_CNT", row->value, 1);
    cr_assert_eq(prs_env_int("NCCL_IB_RETRY_CNT", 7, 0, 7, &number), row->result, "value \"%s\"", row->value);
    if (row->result == 0)
        cr_assert_eq(number, row->number);
    else
        cr_assert(strstr(prs_error_last(), row->value) && strstr(prs_error_last(), "NCCL_IB_RETRY_CNT") &&
                      strstr(prs_error_last(), "0 to 7"),
                  "the text names variable, value and range: %s", prs_error_last());
}

Test(env, an_unset_variable_gives_the_default)
{
    long number;

    unsetenv("PRS_TEST");
    cr_assert_eq(prs_env_int("PRS_TEST", -5, 0, 1, &number), 0);
    cr_assert_eq(number, -5);
    cr_assert_null(prs_env_text("PRS_TEST"));
}

Test(env, a_word_must_be_one_of_the_list)
{
    static const char *const words[] = {"AF_INET", "AF_INET6", NULL};
    int which;

    setenv("PRS_TEST", "af_inet6", 1);
    cr_assert_eq(prs_env_word("PRS_TEST", 0, words, &which), 0);
    cr_assert_eq(which, 1);
    setenv("PRS_TEST", "AF_UNIX", 1);
    cr_assert_eq(prs_env_word("PRS_TEST", 0, words, &which), -EINVAL);
    cr_assert(strstr(prs_error_last(), "AF_UNIX") && strstr(prs_error_last(), "AF_INET, AF_INET6"), "%s",
              prs_error_last());
}
