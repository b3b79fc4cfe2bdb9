/* SPDX-License-Identifier: Apache-2.0 */
/* The backward pass of ring attention: what host and kernels agree on. */
#ifndef PERSEUS_FUSED_ATTENTION_BACKWARD_LAYOUT_H
#define PERSEUS_FUSED_ATTENTION_BACKWARD_LAYOUT_H

#include "fused/attention/backward/schedule.h"
#include "fused/attention/layout.h"

enum {
    PRS_BACKWARD_TILE = 128,
    PRS_BACKWARD_BLOCK = 8192, /* elements of a block of queries: its rows times head_dim */
    PRS_BACKWARD_SUMS = 2 /* buffers of a CTA */,
    PRS_BACKWARD_NAP_NS = 500,
    PRS_BACKWARD_WARPS = 16 /* of a CTA of terms_kernel */,
    PRS_FINISH_THREADS = 256
};

/* Rows of a block. */
PRS_SHARED uint32_t prs_backward_block_rows(uint32_t head_dim)
{
    return PRS_BACKWARD_BLOCK / head_dim;
}

/* What the pass needs to know of a query row. Rows that fill up a tile have zeros. */
struct prs_backward_term {
    float lse;   /* times log2(e) */
    float delta; /* the sum of out * dout, less dlse */
};
static_assert(sizeof(struct prs_backward_term) == 8, "two of them are one vector");

/* Memory in which the pass adds up dq. */
struct prs_backward_sums {
    float *sums;     /* [prs_backward_sum()]: PRS_BACKWARD_BLOCK elements each; for the queries of all ranks */
    uint64_t *turns; /* [prs_backward_sum()]: how many tasks have added to the sum; zero between launches */
    uint16_t *parts[PRS_MAX_LOCAL_RANKS]; /* [p]: at neighbour p: parts of dq from other ranks (prs_backward_slot()) */
    /* [p]: at neighbour p: how many CTAs of each rank of the node have sent their parts, over all launches */
    uint32_t *arrivals[PRS_MAX_LOCAL_RANKS];
};

/* The same between nodes: sums for ranks of other nodes lie in staging memory before they are put. */
struct prs_backward_far {
    uint64_t parts, leaving; /* offsets in staging memory: of parts that arrive, and of parts that are put */
    /* for each query head and rank of another node: how many sums lie there; 0 between launches */
    uint32_t *converted;
};

/* The kernel before a launch that is smaller than its plan, as struct prs_lay_args: no task is cut. */
struct prs_lay_tasks_args {
    struct prs_attention_schedule schedule; /* of the pass */
    struct prs_backward_shape shape;
    struct prs_attention_piece *tasks;
    uint32_t *tasks_of; /* [group] */
    uint32_t striped;
};

/* The pass. */
struct prs_backward_args {
    /* The arguments of the forward pass's roles: q is this rank's first tensor, k and v are the stream. */
    struct prs_attention_args stream;
    CUtensorMap second; /* this rank's second tensor */
    struct prs_backward_shape shape;
    const struct prs_backward_term *terms; /* of all ranks, in two banks (prs_backward_term()) */
    uint32_t pairs_q;                      /* batch * query heads */
    void *result[2];                       /* dk, dv */
    struct prs_backward_sums sums;
    struct prs_backward_far far; /* several nodes only */
};

/* The kernel before the pass: computes the terms of this rank's queries, and stores them at all ranks. */
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

/* Terms need no flag: a rank stores them before it sends queries, so the arrival of queries shows that their terms are
 * here [terms]. A rank writes a bank again two launches later. All ranks have finished this launch then, because the
 * launch between needed data from each of them or, in striped attention, began with a barrier. To other nodes they are
 * put before the queries (fused/attention/far.cuh). */
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
