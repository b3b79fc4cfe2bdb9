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

static inline void stdout_check(void)
{
    int error;

    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout))
        return;
    error = errno; /* 0: it was an earlier write that failed */
    fprintf(stderr, "%s: cannot write all of the output: %s\n", stdout_program,
            error ? strerror(error) : "an error of stdout; is the disk full?");
    _exit(1);
}

/* Call it once, before the first output. */
static inline void stdout_check_at_exit(const char *program)
{
    stdout_program = program;
    atexit(stdout_check);
}

#endif
