/* SPDX-License-Identifier: Apache-2.0 */
/* Test data whose sums are exact in every NCCL type: small whole numbers that depend on rank, index and seed. */
#ifndef TOOLS_NCCL_VALUES_H
#define TOOLS_NCCL_VALUES_H

#include <stddef.h>
#include <stdint.h>

#include "tools/nccl/nccl_library.h"

/* Bytes of one element; 0 for an unknown type. */
size_t values_size(enum nccl_type type);
/* By enum nccl_type, as nccl-tests spells them; NULL after the last. */
extern const char *const values_type_names[];

/* The element of a rank at index i before the collective: 0..6. */
static inline unsigned values_at(unsigned rank, size_t i, unsigned seed)
{
    /* The second term breaks the period, so that a block at an offset of seven elements is found. */
    return (unsigned)((i + i / 1021 + 3u * rank + seed) % 7u);
}

/* Write count elements of rank, from index first on. */
void values_fill(void *out, enum nccl_type type, unsigned rank, size_t first, size_t count, unsigned seed);

/* Count the elements that differ from the reduction (op) over ranks rank_base..rank_base+ranks-1 at the indices from
 * first on; with one rank it is a copy of its data. *where becomes the index of the first wrong element. */
size_t values_check(const void *got, enum nccl_type type, enum nccl_redop op, unsigned rank_base, unsigned ranks,
                    size_t first, size_t count, unsigned seed, size_t *where);

#endif
