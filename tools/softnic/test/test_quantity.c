/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/world/quantity.h"

#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <errno.h>
#include <stdint.h>

struct row {
    char text[32];
    int r;
    uint64_t value;
};

static struct row rates[] = {
    {"400G", 0, 400000000000},
    {"12.5G", 0, 12500000000},
    {"10Gbps", 0, 10000000000},
    {"100M", 0, 100000000},
    {"1.5T", 0, 1500000000000},
    {"64K", 0, 64000},
    {"0.1K", 0, 100},
    {"9bps", 0, 9},
    {"0", 0, 0},
    {"off", 0, 0},
    {"", -EINVAL, 0},
    {"400", -EINVAL, 0}, /* the unit is missing */
    {"400g", -EINVAL, 0},
    {"400GB", -EINVAL, 0},
    {"400 G", -EINVAL, 0},
    {" 400G", -EINVAL, 0},
    {"+400G", -EINVAL, 0},
    {"-1G", -EINVAL, 0},
    {"0x10G", -EINVAL, 0},
    {"nan", -EINVAL, 0},
    {"inf", -EINVAL, 0},
    {"1e30T", -ERANGE, 0},
};

static struct row durations[] = {
    {"2us", 0, 2000},     {"1.5ms", 0, 1500000}, {"50ns", 0, 50},    {"1s", 0, 1000000000}, {"0.4ns", 0, 0},
    {"off", 0, 0},        {"2", -EINVAL, 0},     {"2u", -EINVAL, 0}, {"us", -EINVAL, 0},    {"2 us", -EINVAL, 0},
    {"-2us", -EINVAL, 0}, {"2us ", -EINVAL, 0},  {"2G", -EINVAL, 0}, {"2us3", -EINVAL, 0},  {"1e300s", -ERANGE, 0},
};

static struct row shares[] = {
    {"0.001", 0, 1000000}, {"0.1%", 0, 1000000}, {"1", 0, 1000000000},       {"100%", 0, 1000000000},
    {"0", 0, 0},           {"off", 0, 0},        {"1.1", -ERANGE, 0},        {"101%", -ERANGE, 0},
    {"-0.1", -EINVAL, 0},  {"", -EINVAL, 0},     {"0.1percent", -EINVAL, 0}, {"nan", -EINVAL, 0},
};

static struct row counts[] = {
    /* in 1 to 16 */
    {"1", 0, 1},        {"16", 0, 16},       {"0", -ERANGE, 0},  {"17", -ERANGE, 0},
    {"", -EINVAL, 0},   {"-1", -EINVAL, 0},  {"2x", -EINVAL, 0}, {"99999999999999999999", -ERANGE, 0},
    {" 1", -EINVAL, 0}, {"1.5", -EINVAL, 0},
};

static void check(const struct row *row, int r, uint64_t value)
{
    cr_assert_eq(r, row->r, "'%s' gives %d, want %d", row->text, r, row->r);
    cr_assert(r || value == row->value, "'%s' is %llu, want %llu", row->text, (unsigned long long)value,
              (unsigned long long)row->value);
}

ParameterizedTestParameters(units, a_rate_needs_its_unit)
{
    return cr_make_param_array(struct row, rates, sizeof(rates) / sizeof(rates[0]));
}

ParameterizedTest(struct row *row, units, a_rate_needs_its_unit)
{
    uint64_t value = 0;
    int r = sn_quantity_rate(row->text, &value);
    check(row, r, value);
}

ParameterizedTestParameters(units, a_duration_needs_its_unit)
{
    return cr_make_param_array(struct row, durations, sizeof(durations) / sizeof(durations[0]));
}

ParameterizedTest(struct row *row, units, a_duration_needs_its_unit)
{
    uint64_t value = 0;
    int r = sn_quantity_duration(row->text, &value);
    check(row, r, value);
}

ParameterizedTestParameters(units, a_share_is_at_most_the_whole)
{
    return cr_make_param_array(struct row, shares, sizeof(shares) / sizeof(shares[0]));
}

ParameterizedTest(struct row *row, units, a_share_is_at_most_the_whole)
{
    uint64_t value = 0;
    int r = sn_quantity_fraction(row->text, &value);
    check(row, r, value);
}

ParameterizedTestParameters(units, a_count_is_whole_and_in_range)
{
    return cr_make_param_array(struct row, counts, sizeof(counts) / sizeof(counts[0]));
}

ParameterizedTest(struct row *row, units, a_count_is_whole_and_in_range)
{
    uint64_t value = 0;
    int r = sn_quantity_count(row->text, 1, 16, &value);
    check(row, r, value);
}
