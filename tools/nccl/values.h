/* SPDX-License-Identifier: Apache-2.0 */
/* Test data whose sums are exact in every NCCL type: small whole numbers that depend on rank, place and seed. */
#ifndef TOOLS_NCCL_VALUES_H
#define TOOLS_NCCL_VALUES_H

#include <stddef.h>
#include <stdint.h>

#include "tools/nccl/nccl_library.h"

/* Bytes of one element; 0 for an unknown type. */
size_t values_size(enum nccl_type type);
const char *values_type_name(enum nccl_type type);
/* The type of that name (as nccl-tests spells it), or -1. */
int values_type_parse(const char *name);

/* What rank holds at place i before the collective: 0..6. */
static inline unsigned values_at(unsigned rank, size_t i, unsigned seed)
{
    /* The second term breaks the period, so that a block that landed seven elements off is seen. */
    return (unsigned)((i + i / 1021 + 3u * rank + seed) % 7u);
}

/* Write count elements of rank, from place first on. */
void values_fill(void *out, enum nccl_type type, unsigned rank, size_t first, size_t count, unsigned seed);

/* Count the elements that differ from the reduction (op) over ranks 0..ranks-1 at places first.. ; ranks == 1 with
 * rank_base r: a copy of r's data. *where gets the first wrong place. */
size_t values_check(const void *got, enum nccl_type type, enum nccl_redop op, unsigned rank_base, unsigned ranks,
                    size_t first, size_t count, unsigned seed, size_t *where);

#endif
