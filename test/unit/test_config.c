/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "transport/host/config.h"
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

Test(config, who_replaces_lost_rails_follows_from_three_variables)
{
    static const struct {
        const char *failover, *standby;
        int taken;
    } rows[] = {{NULL, NULL, PRS_FAILOVER_UNSET}, {"0", NULL, 0}, {"1", NULL, 1}, {NULL, "1", 1}, {"0", "1", 0}};
    struct prs_config config;

    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        unsetenv("NCCL_IB_RESILIENCY_PORT_FAILOVER");
        unsetenv("PERSEUS_STANDBY_RAIL");
        if (rows[i].failover)
            setenv("NCCL_IB_RESILIENCY_PORT_FAILOVER", rows[i].failover, 1);
        if (rows[i].standby)
            setenv("PERSEUS_STANDBY_RAIL", rows[i].standby, 1);
        cr_assert_eq(prs_config_read(NULL, &config), 0);
        cr_assert_eq(config.failover, rows[i].taken, "row %zu", i);
        cr_assert_eq(config.recovery, 1);
    }
}

/* A job that NCCL's own transport would run must not fall back to another network by a typing error. */
Test(config, a_bad_number_of_nccl_is_clamped_with_a_warning)
{
    static const struct {
        const char *name, *value;
        size_t at;
        int taken;
    } rows[] = {
        {"NCCL_IB_QPS_PER_CONNECTION", "128", offsetof(struct prs_config, queues_per_rail), 16},
        {"NCCL_IB_RETRY_CNT", "15", offsetof(struct prs_config, retry_count), 7},
        {"NCCL_IB_TIMEOUT", "-3", offsetof(struct prs_config, timeout), 0},
        {"NCCL_IB_TIMEOUT", "99999999999999999999", offsetof(struct prs_config, timeout), 31},
        {"NCCL_IB_RETURN_ASYNC_EVENTS", "yes", offsetof(struct prs_config, return_async_events), 1},
        {"NCCL_SOCKET_FAMILY", "AF_UNIX", offsetof(struct prs_config, socket_family), AF_UNSPEC},
        {"NCCL_IB_ADDR_FAMILY", "AF_UNIX", offsetof(struct prs_config, gid_family), AF_INET},
    };
    static const char *const ranges[] = {"10.0.0.0",    "10.0.0.0/", "10.0.0.0/40",
                                         "10.0.0.0/8x", "ten/8",     "10.0.0.0/18446744073709551615"};
    struct prs_config config;

    prs_log_sink(keep, NULL);
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        logged[0] = 0;
        setenv(rows[i].name, rows[i].value, 1);
        cr_assert_eq(prs_config_read(NULL, &config), 0, "%s=%s", rows[i].name, rows[i].value);
        cr_assert_eq(*(int *)((char *)&config + rows[i].at), rows[i].taken, "%s=%s", rows[i].name, rows[i].value);
        cr_assert(strstr(logged, rows[i].name) && strstr(logged, rows[i].value), "%s", logged);
        unsetenv(rows[i].name);
    }
    for (size_t i = 0; i < sizeof(ranges) / sizeof(*ranges); i++) {
        logged[0] = 0;
        setenv("NCCL_IB_ADDR_RANGE", ranges[i], 1);
        cr_assert_eq(prs_config_read(NULL, &config), 0, "%s", ranges[i]);
        cr_assert_not(config.gid_range_set, "%s", ranges[i]);
        cr_assert(strstr(logged, ranges[i]), "%s", logged);
    }
}

Test(config, a_wrong_value_of_our_own_is_refused_by_the_name_of_its_variable)
{
    struct prs_config config;

    setenv("PERSEUS_ORDER", "whatever", 1);
    cr_assert_eq(prs_config_read(NULL, &config), -EINVAL);
    cr_assert(strstr(prs_error_last(), "PERSEUS_ORDER") && strstr(prs_error_last(), "whatever"), "%s",
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
    setenv("PERSEUS_FUSED_LIBRARY", "x", 1); /* a variable of the Python package, in the same process */
    prs_log_sink(keep, NULL);
    prs_config_warn_ignored();
    cr_assert(strstr(logged, "PERSEUS_REQIRED is no variable") && strstr(logged, "did you mean PERSEUS_REQUIRED?"),
              "%s", logged);
    cr_assert(strstr(logged, "PERSEUS_COLOUR_OF_CABLE is no variable of Perseus and has no effect"), "%s", logged);
    cr_assert(!strstr(logged, "PERSEUS_LOG is") && !strstr(logged, "PERSEUS_TEST") &&
                  !strstr(logged, "PERSEUS_FUSED_LIBRARY"),
              "%s", logged);
}
