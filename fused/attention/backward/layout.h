/* SPDX-License-Identifier: Apache-2.0 */
/* The backward pass of ring attention: what host and kernels agree on. */
#ifndef PERSEUS_FUSED_ATTENTION_BACKWARD_LAYOUT_H
#define PERSEUS_FUSED_ATTENTION_BACKWARD_LAYOUT_H

#include "fused/attention/backward/schedule.h"
#include "fused/attention/layout.h"

enum {
    PRS_BACKWARD_TILE = 128,
    PRS_BACKWARD_BLOCK = 64,
    PRS_BACKWARD_SUMS = 2 /* buffers of a CTA */,
    PRS_BACKWARD_NAP_NS = 500,
    PRS_BACKWARD_WARPS = 16 /* of a CTA of terms_kernel */,
    PRS_FINISH_THREADS = 256
};

/* What the pass needs of a query row. Rows that only fill a tile have zeros. */
struct prs_backward_term {
    float lse;   /* times log2(e) */
    float delta; /* the sum of out * dout, less dlse */
};
static_assert(sizeof(struct prs_backward_term) == 8, "two of them are one vector");

/* Where the pass adds to dq. */
struct prs_backward_sums {
    /* Of the queries of all ranks, in the order of the ring (prs_backward_sum()): 64 x head_dim elements each, as
     * sums.cuh says; and how many tasks have added to each, zero between launches. */
    float *sums;
    uint64_t *turns;
    /* [p]: at neighbour p: what other ranks send, by their place in its order; and how many CTAs of each have sent,
     * over all launches. */
    uint16_t *parts[PRS_MAX_LOCAL_RANKS];
    uint32_t *arrivals[PRS_MAX_LOCAL_RANKS];
};

/* The same between nodes: what goes to ranks of other nodes lies in staging memory before it is put. */
struct prs_backward_far {
    uint64_t parts, leaving; /* places in staging memory: of what arrives, and of what is put */
    uint32_t *converted;     /* of each rank of another node and query head: sums that lie there; 0 between launches */
};

/* The pass. */
struct prs_backward_args {
    /* What the roles of the forward pass work with: q is the first own tensor, k and v are the stream. */
    struct prs_attention_args stream;
    CUtensorMap second; /* own tensor */
    struct prs_backward_shape shape;
    const struct prs_backward_term *terms; /* of all ranks, in two banks (prs_backward_term()) */
    uint32_t pairs_q;                      /* batch * query heads */
    void *result[2];                       /* dk, dv */
    struct prs_backward_sums sums;
    struct prs_backward_far far; /* several nodes only */
};

/* The kernel before it: computes the terms of the own queries and stores them at all ranks. */
struct prs_terms_args {
    struct prs_attention_schedule schedule; /* of the pass */
    struct prs_sync sync;
    const void *out, *dout;
    const float *lse, *dlse;                              /* dlse: or NULL */
    struct prs_attention_strides strides;                 /* of out and dout */
    struct prs_backward_term *terms[PRS_MAX_LOCAL_RANKS]; /* [p]: at neighbour p */
    uint32_t mirrored; /* terms lie as the pass numbers segments (prs_backward_segment()) */
};

/* The kernel that sums the gradients of sinks: one CTA for each query head. */
struct prs_sinks_args {
    struct prs_terms_args terms;
    const float *sinks;
    float *dsinks;
};

/* The kernel after the pass. */
struct prs_finish_args {
    struct prs_attention_schedule schedule; /* of the pass */
    struct prs_sync sync;
    struct prs_attention_strides strides; /* of dq */
    struct prs_attention_stripes stripes; /* as the pass has them */
    struct prs_backward_sums sums;
    void *dq;
    float scale;
    uint32_t pairs_q;
    struct prs_far far; /* several nodes only */
};

/* Terms need no flag: a rank stores them before it sends queries, so what arrives of those says that they are here
 * [terms]. A rank writes a bank again two launches later. Then all have finished this launch, because the one between
 * needed what they sent in it, or, striped, began with a barrier. To other nodes they are put before the queries
 * (fused/attention/far.cuh). */
PRS_SHARED uint32_t prs_backward_bank(uint32_t epoch)
{
    return epoch & 1;
}

/* Whether rank `rank` adds to a block of rank `source`'s queries. */
PRS_SHARED bool prs_backward_adds(const struct prs_attention_stripes *x, const struct prs_attention_schedule *s,
                                  uint32_t rank, uint32_t source, uint32_t segment, uint32_t block)
{
    return x->log_rows != 0 ? prs_backward_stripe_meets(x, s, rank, source, segment, block)
                            : prs_backward_meets(s, rank, source, segment);
}

#endif
