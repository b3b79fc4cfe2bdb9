/* SPDX-License-Identifier: Apache-2.0 */
/* Memory by cache lines. With many peers a message finds nothing of its peer in a cache, so it costs what it touches:
 * what every message uses of an object stands together, and the object begins with a line. */
#ifndef TRANSPORT_UTIL_LINES_H
#define TRANSPORT_UTIL_LINES_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { PRS_LINE = 64 };

/* For prs_lines_free(). NULL: there is none. Before the memory stands what malloc() has returned: with aligned_alloc()
 * of glibc before 2.38 the heap grows, by 7 MB in a thousand connections over libfabric's net. */
static inline void *prs_lines_alloc(size_t bytes)
{
    char *whole = malloc(bytes + 2 * PRS_LINE + sizeof(void *));
    char *at;

    if (!whole)
        return NULL;
    at = whole + sizeof(void *);
    at += (2 * PRS_LINE - (uintptr_t)at % (2 * PRS_LINE)) % (2 * PRS_LINE);
    memcpy(at - sizeof(void *), &whole, sizeof(void *));
    return at;
}

/* Zeroed. */
static inline void *prs_lines_calloc(size_t bytes)
{
    void *memory = prs_lines_alloc(bytes);

    return memory ? memset(memory, 0, bytes) : NULL;
}

static inline void prs_lines_free(void *memory)
{
    void *whole = NULL;

    if (memory)
        memcpy(&whole, (char *)memory - sizeof(void *), sizeof(void *));
    free(whole);
}

#endif
