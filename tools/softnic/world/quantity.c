/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/world/quantity.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

struct unit {
    const char *suffix;
    double scale;
};

static const struct unit rate_units[] = {
    {"K", 1e3},    {"M", 1e6},    {"G", 1e9},     {"T", 1e12}, {"Kbps", 1e3},
    {"Mbps", 1e6}, {"Gbps", 1e9}, {"Tbps", 1e12}, {"bps", 1},  {NULL, 0},
};

static const struct unit duration_units[] = {{"ns", 1}, {"us", 1e3}, {"ms", 1e6}, {"s", 1e9}, {NULL, 0}};

static int parse(const char *text, const struct unit *units, uint64_t *out)
{
    if (!strcmp(text, "off") || !strcmp(text, "0")) {
        *out = 0;
        return 0;
    }
    /* strtod would also accept signs, blanks, hexadecimal, "inf" and "nan". */
    if (!isdigit((unsigned char)text[0]) || text[1] == 'x' || text[1] == 'X')
        return -EINVAL;
    char *end;
    double number = strtod(text, &end);
    for (; units->suffix; units++)
        if (!strcmp(end, units->suffix))
            break;
    if (!units->suffix)
        return -EINVAL;
    number = round(number * units->scale);
    if (!(number < 9.2e18)) /* also false for a number that overflowed to infinity */
        return -ERANGE;
    *out = (uint64_t)number;
    return 0;
}

int sn_quantity_rate(const char *text, uint64_t *bits_per_s)
{
    return parse(text, rate_units, bits_per_s);
}

int sn_quantity_duration(const char *text, uint64_t *ns)
{
    return parse(text, duration_units, ns);
}

int sn_quantity_fraction(const char *text, uint64_t *parts_per_billion)
{
    static const struct unit plain[] = {{"", 1e9}, {"%", 1e7}, {NULL, 0}};
    uint64_t value;
    int r = parse(text, plain, &value);

    if (r || value > 1000000000)
        return r ? r : -ERANGE;
    *parts_per_billion = value;
    return 0;
}

int sn_quantity_count(const char *text, uint64_t least, uint64_t most, uint64_t *count)
{
    if (!isdigit((unsigned char)text[0]))
        return -EINVAL;
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (*end)
        return -EINVAL;
    if (errno || value < least || value > most)
        return -ERANGE;
    *count = value;
    return 0;
}
