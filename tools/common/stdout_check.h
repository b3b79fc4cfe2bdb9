/* SPDX-License-Identifier: Apache-2.0 */
/* Output that is lost must not look like success: a program whose stdout cannot be written says so, and ends with
 * status 1. */
#ifndef TOOLS_COMMON_STDOUT_CHECK_H
#define TOOLS_COMMON_STDOUT_CHECK_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *stdout_program;

/* Whether output was lost; if so, prints that. */
static inline int stdout_is_lost(const char *program)
{
    int error;

    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout))
        return 0;
    error = errno; /* 0: it was an earlier write that failed */
    fprintf(stderr, "%s: cannot write all of the output: %s\n", program,
            error ? strerror(error) : "an error of stdout; is the disk full?");
    return 1;
}

static inline void stdout_check(void)
{
    if (stdout_is_lost(stdout_program))
        _exit(1);
}

/* Call it once, before the first output. */
static inline void stdout_check_at_exit(const char *program)
{
    stdout_program = program;
    atexit(stdout_check);
}

#endif
