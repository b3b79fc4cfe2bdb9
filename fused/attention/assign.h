/* SPDX-License-Identifier: Apache-2.0 */
/* Striped attention: which rank has which stripe, chosen from the lengths of the sequences. Plain C, host only. */
#ifndef PERSEUS_FUSED_ATTENTION_ASSIGN_H
#define PERSEUS_FUSED_ATTENTION_ASSIGN_H

#include "fused/attention/stripes.h"

/* Packed sequences, and how far a row sees (struct prs_attention_stripes). */
struct prs_packing {
    const int32_t *bounds; /* [sequences + 1], ascending; NULL: one sequence */
    uint32_t sequences, positions, before, after;
};

/* Gives each of `world` ranks equally many stripes of `rows` rows, about the same work forward and backward, and
 * neighbouring stripes where possible. ranks: [positions / rows]. The same input always gives the same result. 0 or
 * -ENOMEM. */
int prs_stripe_assign(const struct prs_packing *x, uint32_t rows, uint32_t world, uint32_t *ranks);

#endif
