/* SPDX-License-Identifier: Apache-2.0 */
/* Memory by cache lines. With many peers a message finds nothing of its peer in a cache, so it costs what it touches:
 * what every message uses of an object stands together, and the object begins with a line. */
#ifndef TRANSPORT_UTIL_LINES_H
#define TRANSPORT_UTIL_LINES_H

#include <stdlib.h>
#include <string.h>

enum { PRS_LINE = 64 };

/* For free(). NULL: there is none. */
static inline void *prs_lines_alloc(size_t bytes)
{
    return aligned_alloc(2 * PRS_LINE, (bytes + 2 * PRS_LINE - 1) / (2 * PRS_LINE) * (2 * PRS_LINE));
}

/* Zeroed. */
static inline void *prs_lines_calloc(size_t bytes)
{
    void *memory = prs_lines_alloc(bytes);

    return memory ? memset(memory, 0, bytes) : NULL;
}

#endif
