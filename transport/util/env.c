/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/util/env.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "transport/util/error.h"
#include "transport/util/log.h"

const char *prs_env_text(const char *name)
{
    const char *value = getenv(name);

    return value && *value ? value : NULL;
}

int prs_env_int(const char *name, long fallback, long min, long max, long *out)
{
    const char *value = prs_env_text(name);
    char *end;

    *out = fallback;
    if (!value)
        return 0;
    errno = 0;
    long number = strtol(value, &end, 0);
    if (errno || *end || end == value || number < min || number > max)
        return prs_fail(-EINVAL, "%s=%s: must be a whole number from %ld to %ld", name, value, min, max);
    *out = number;
    return 0;
}

int prs_env_clamp(const char *name, long fallback, long min, long max)
{
    const char *value = prs_env_text(name);
    char *end;
    long number;

    if (!value)
        return (int)fallback;
    number = strtol(value, &end, 0); /* a number that does not fit becomes the largest or smallest */
    if (*end || end == value)
        number = fallback;
    else if (number >= min && number <= max)
        return (int)number;
    else
        number = number < min ? min : max;
    PRS_WARN("%s=%s: must be a whole number from %ld to %ld; %ld is used", name, value, min, max, number);
    return (int)number;
}

int prs_env_word(const char *name, int fallback, const char *const words[], int *out)
{
    const char *value = prs_env_text(name);
    char allowed[256] = "";

    *out = fallback;
    if (!value)
        return 0;
    for (int i = 0; words[i]; i++) {
        if (!strcasecmp(value, words[i])) {
            *out = i;
            return 0;
        }
        snprintf(allowed + strlen(allowed), sizeof(allowed) - strlen(allowed), "%s%s", i ? ", " : "", words[i]);
    }
    return prs_fail(-EINVAL, "%s=%s: must be one of %s", name, value, allowed);
}
