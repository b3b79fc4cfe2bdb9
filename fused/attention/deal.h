/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention: cuts the tasks into pieces, which the CTAs claim one after the other. Plain C, host only. */
#ifndef PERSEUS_FUSED_ATTENTION_DEAL_H
#define PERSEUS_FUSED_ATTENTION_DEAL_H

#include "fused/attention/schedule.h"

struct prs_attention_deal {
    struct prs_attention_piece *pieces; /* in the order in which CTAs claim them: group by group */
    uint32_t *pieces_of;                /* [groups]: how many are of the group */
    struct prs_attention_part *parts;
    struct prs_attention_cut *cuts; /* [parts_count] */
    uint32_t pieces_count, parts_count;
    /* Steps of a CTA, including the fixed cost of each piece, when all CTAs run and each step takes as long. */
    uint64_t mean, most;
};

/* Cuts the last tasks so that `ctas` CTAs end together if each claims its next piece when it has finished one. The same
 * schedule always gives the same result. 0 or -ENOMEM. */
int prs_attention_deal_init(struct prs_attention_deal *deal, const struct prs_attention_schedule *s, uint32_t ctas);
/* How many parts it makes at most. */
uint32_t prs_attention_deal_most_parts(uint32_t ctas);
/* The same without cuts, for striped attention, where the launch decides how many steps a task has. */
int prs_attention_deal_whole(struct prs_attention_deal *deal, const struct prs_attention_schedule *s);
void prs_attention_deal_fini(struct prs_attention_deal *deal);

#endif
