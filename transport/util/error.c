/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/util/error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>

#include "transport/util/log.h"

static __thread char last_text[1024];

int prs_error_raise(const char *file, int line, int code, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(last_text, sizeof(last_text), format, args);
    va_end(args);
    if (prs_log_wanted(PRS_LEVEL_ERROR))
        prs_log_line(PRS_LEVEL_ERROR, file, line, "%s", last_text);
    return code;
}

int prs_error_repeat(int code, const char *text)
{
    snprintf(last_text, sizeof(last_text), "%s", text);
    return code;
}

void prs_error_keep_text(struct prs_first_error *first, int code)
{
    first->code = code;
    snprintf(first->text, sizeof(first->text), "%s", last_text);
}

int prs_error_reserved(const uint64_t *words, size_t count, const char *what)
{
    for (size_t i = 0; i < count; i++)
        if (words[i])
            return prs_fail(-EINVAL,
                            "%s: reserved[%zu] is %#llx, not 0: either it was not set to zero, or the program was "
                            "written for a newer version of this library",
                            what, i, (unsigned long long)words[i]);
    return 0;
}

const char *prs_error_last(void)
{
    return last_text;
}
