/* SPDX-License-Identifier: Apache-2.0 */
/* The backward pass of ring attention: what host and kernels agree on. */
#ifndef PERSEUS_FUSED_ATTENTION_BACKWARD_LAYOUT_H
#define PERSEUS_FUSED_ATTENTION_BACKWARD_LAYOUT_H

#include "fused/attention/backward/schedule.h"
#include "fused/attention/layout.h"

enum { PRS_BACKWARD_TILE = 128, PRS_BACKWARD_BLOCK = 64, PRS_BACKWARD_WARPS = 16 /* of a CTA of terms_kernel */ };

/* What both passes need of a query row. Rows that only fill a tile have zeros. */
struct prs_backward_term {
    float lse;   /* times log2(e) */
    float delta; /* the sum of out * dout, less dlse */
};
static_assert(sizeof(struct prs_backward_term) == 8, "two of them are one vector");

/* A pass. */
struct prs_backward_args {
    /* What the roles of the forward pass work with: q is the first own tensor, k and v are the stream. */
    struct prs_attention_args stream;
    CUtensorMap second; /* own tensor */
    struct prs_backward_pass_shape shape;
    const struct prs_backward_term *terms; /* of all ranks, in two banks (prs_backward_term()) */
    uint32_t pairs_q;                      /* batch * query heads */
    void *result[2];                       /* dq; or dk, dv */
};

/* The kernel before both: computes the terms of the own queries and stores them at all ranks. */
struct prs_terms_args {
    struct prs_attention_schedule schedule; /* of the pass for keys */
    struct prs_sync sync;
    const void *out, *dout;
    const float *lse, *dlse;                              /* dlse: or NULL */
    struct prs_attention_strides strides;                 /* of out and dout */
    struct prs_backward_term *terms[PRS_MAX_LOCAL_RANKS]; /* [p]: at neighbour p */
    uint32_t order; /* terms lie as this pass numbers segments (prs_backward_segment()) */
};

/* The kernel that sums the gradients of sinks: one CTA for each query head. */
struct prs_sinks_args {
    struct prs_terms_args terms;
    const float *sinks;
    float *dsinks;
};

/* A launch is two epochs of the plan, one of each pass. Terms need no flag: a rank stores them before it sends queries,
 * so what arrives of those says that they are here [terms]. A rank writes a bank again two launches later. Then all
 * have finished this launch, because the one between needed what they sent in it. */
PRS_SHARED uint32_t prs_backward_bank(uint32_t keys_epoch)
{
    return keys_epoch / 2 & 1;
}

#endif
