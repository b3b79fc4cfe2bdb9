/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "transport/config.h"
#include "transport/util/error.h"
#include "transport/util/log.h"

static char logged[1024];

static void keep(void *user, int level, const char *file, int line, const char *text)
{
    strncat(logged, text, sizeof(logged) - strlen(logged) - 1);
}

Test(config, what_nccl_means_by_an_unset_variable_holds)
{
    struct prs_config config;

    cr_assert_eq(prs_config_read(NULL, &config), 0);
    cr_assert_eq(config.timeout, 20);
    cr_assert_eq(config.retry_count, 7);
    cr_assert_eq(config.queues_per_rail, 1);
    cr_assert_eq(config.return_async_events, 1);
}

Test(config, a_wrong_value_is_refused_by_the_name_of_its_variable)
{
    struct prs_config config;

    setenv("NCCL_IB_RETURN_ASYNC_EVENTS", "yes", 1);
    cr_assert_eq(prs_config_read(NULL, &config), -EINVAL);
    cr_assert(strstr(prs_error_last(), "NCCL_IB_RETURN_ASYNC_EVENTS") && strstr(prs_error_last(), "yes"), "%s",
              prs_error_last());
}

Test(config, a_variable_without_effect_is_named_with_the_reason)
{
    prs_log_sink(keep, NULL);
    prs_config_warn_ignored();
    cr_assert_str_empty(logged);
    setenv("NCCL_IB_FIFO_TC", "104", 1);
    prs_config_warn_ignored();
    cr_assert(strstr(logged, "NCCL_IB_FIFO_TC=104") && strstr(logged, "NCCL_IB_TC"), "%s", logged);
}

Test(config, an_unknown_name_of_our_own_is_named_with_the_likely_one)
{
    setenv("PERSEUS_LOG", "warn", 1);
    setenv("PERSEUS_REQIRED", "1", 1);
    setenv("PERSEUS_COLOUR_OF_CABLE", "blue", 1);
    setenv("PERSEUS_TEST_PLUGIN", "x", 1);
    prs_log_sink(keep, NULL);
    prs_config_warn_ignored();
    cr_assert(strstr(logged, "PERSEUS_REQIRED is no variable") && strstr(logged, "did you mean PERSEUS_REQUIRED?"),
              "%s", logged);
    cr_assert(strstr(logged, "PERSEUS_COLOUR_OF_CABLE is no variable of Perseus and has no effect"), "%s", logged);
    cr_assert(!strstr(logged, "PERSEUS_LOG is") && !strstr(logged, "PERSEUS_TEST"), "%s", logged);
}
