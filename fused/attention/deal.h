/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention: deals the tasks to the CTAs. Plain C, host only. */
#ifndef PERSEUS_FUSED_ATTENTION_DEAL_H
#define PERSEUS_FUSED_ATTENTION_DEAL_H

#include "fused/attention/schedule.h"

struct prs_attention_deal {
    uint32_t *starts; /* [ctas + 1]: indices into pieces */
    struct prs_attention_piece *pieces;
    struct prs_attention_part *parts;
    uint32_t pieces_count, parts_count;
    uint64_t mean, most; /* steps of a CTA, including the fixed cost of each piece */
};

/* Deals all tasks to `ctas` CTAs: equal work for each, and each CTA's pieces in the order in which groups arrive. The
 * same schedule always gives the same result. 0 or -ENOMEM. */
int prs_attention_deal_init(struct prs_attention_deal *deal, const struct prs_attention_schedule *s, uint32_t ctas);
void prs_attention_deal_fini(struct prs_attention_deal *deal);

#endif
