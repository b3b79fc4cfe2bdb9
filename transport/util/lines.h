/* SPDX-License-Identifier: Apache-2.0 */
/* Memory by cache lines and by pages. With many peers, no memory of a message's peer is in a cache, so each cache line
 * that the message touches costs time. Members that every message uses are therefore next to each other, and the object
 * begins with a line. */
#ifndef TRANSPORT_UTIL_LINES_H
#define TRANSPORT_UTIL_LINES_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PRS_LINE = 64 };

/* Allocate memory for prs_lines_free(). NULL: there is none. The pointer from malloc() is kept before the memory.
 * aligned_alloc() is not used, because with glibc before 2.38 the heap then grows, by 7 MB in a thousand connections
 * over libfabric's net. */
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

/* Zeroed pages, for long arrays of which a message uses a few lines. On the heap they would lie between the objects of
 * the peers, which would then spread over more pages than the TLB holds. NULL, with errno: there is none. */
static inline void *prs_pages_alloc(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    return memory == MAP_FAILED ? NULL : memory;
}

static inline void prs_pages_free(void *memory, size_t bytes)
{
    if (memory)
        munmap(memory, bytes);
}

#endif
