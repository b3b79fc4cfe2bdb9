/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention: what host and kernel agree on. */
#ifndef PERSEUS_FUSED_ATTENTION_LAYOUT_H
#define PERSEUS_FUSED_ATTENTION_LAYOUT_H

#include <cuda.h>

#include "fused/attention/stripes.h"
#include "fused/core/far.h"
#include "fused/core/sync.h"

enum {
    PRS_ATTENTION_PUSH_BYTES = 8192, /* one piece of a message; larger ones leave no room for two stages of 176 keys */
    PRS_ATTENTION_PUSH_SLOTS = 2,
    PRS_ATTENTION_PUSH_PIECES = 4, /* of a message, at most; the count after them needs one fence */
    PRS_ATTENTION_WARPGROUP_ROWS = 64,
    PRS_ATTENTION_STAGES = 2,      /* of keys, and the same number of values */
    PRS_ATTENTION_PIECE_SLOTS = 2, /* claimed pieces of tasks that a CTA holds at a time */
    PRS_ATTENTION_BARRIER_BYTES = 256
};

/* Positions of one head in a piece of a message: a power of two, so that a slab is a whole number of messages.
 * row_bytes: bytes of one position of one head, in the wider of the two tensors. */
PRS_SHARED uint32_t prs_attention_piece_rows(uint32_t row_bytes)
{
    uint32_t rows = PRS_ATTENTION_PUSH_BYTES / 128;
    while (rows * row_bytes > PRS_ATTENTION_PUSH_BYTES)
        rows /= 2;
    return rows;
}

/* Bytes of staging memory for keys and values, or for the stream; row_bytes: of one position of one head. */
PRS_SHARED uint64_t prs_attention_staged_bytes(const struct prs_attention_schedule *s, uint32_t row_bytes)
{
    return ((uint64_t)prs_attention_stages(s) * s->room_rows * row_bytes + 1023) / 1024 * 1024;
}

/* Memory that the plans of a context share, forward and backward. */
#define PRS_ATTENTION_POOL_STAGING "attention: what other ranks send"
#define PRS_ATTENTION_POOL_SWITCH  "attention: plan_switch.h"

/* Strides of a tensor [batch, positions, heads, head_dim] or [batch, heads, positions, head_dim]. For TMA it has five
 * dimensions: the columns in 128 bytes; the positions of a segment; the parts of 128 bytes of a row; then head and
 * batch * segments, or with heads first segment and batch * heads. So rows beyond a segment are beyond the tensor, and
 * TMA reads them as zeros. */
struct prs_attention_strides {
    uint64_t row, head, batch, segment; /* elements */
};

/* What the loader leaves for the consumers with the keys of a block: in striped attention, and in the backward pass. */
struct prs_attention_step {
    uint32_t position; /* of its first row; not striped: the number of the block in its segment */
    uint32_t flags;    /* enum prs_attention_step_flags */
};
enum prs_attention_step_flags {
    PRS_STEP_LAST = 1,     /* of the task */
    PRS_STEP_MASKED = 2,   /* not every row of the task meets every row of the block */
    PRS_STEP_DIAGONAL = 4, /* backward, not striped: the walk's `diagonal` */
};

/* Counters by which the CTAs of a rank claim work, zero between launches; and what this plan's previous launch was. */
struct prs_attention_claims {
    uint32_t pieces, messages;
    uint32_t groups_before; /* how many it had */
    uint32_t before;        /* its epoch */
};

enum { PRS_ATTENTION_MOST_CUTS = 401 }; /* of 200 CTAs; with the rest, 4 KB of arguments */

/* The kernel before a launch that is smaller than its plan: it writes the pieces, their parts, and how many pieces each
 * group has. So a plan has memory for one such launch only, and a graph brings its own size. */
struct prs_lay_args {
    struct prs_attention_schedule schedule; /* of the launch */
    struct prs_attention_piece *pieces;
    struct prs_attention_part *parts;
    uint32_t *pieces_of; /* [group] */
    uint32_t striped;    /* no task is cut */
    uint32_t cuts_count;
    struct prs_attention_cut cuts[PRS_ATTENTION_MOST_CUTS];
};
static_assert(sizeof(struct prs_lay_args) <= 4096, "as large as arguments of a kernel may be");

struct prs_attention_args {
    CUtensorMap q, k, v;  /* this rank's tensors, in boxes of 64 rows (q) and of a block (k, v) */
    CUtensorMap received; /* staging memory, in blocks: segments as they are pushed, or tensors as they are copied */
    CUtensorMap push_k, push_v; /* own, in pieces of messages */
    struct prs_attention_schedule schedule;
    struct prs_sync sync;
    /* Neighbour 0 is this rank (geometry.h). */
    uint8_t *staging[PRS_MAX_LOCAL_RANKS]; /* [p]: at neighbour p */
    /* [p]: arrival counters at neighbour p, in two banks of arrival_words, zero between launches. If copy engines move
     * the data, flags instead. */
    uint32_t *arrivals[PRS_MAX_LOCAL_RANKS];
    uint32_t *credits[PRS_MAX_LOCAL_RANKS]; /* [p]: credits given to neighbour p */
    struct prs_attention_claims *claims;
    /* Three per group: pieces that have been read; backward, adders that have added (sums.cuh); between nodes, pieces
     * read and messages forwarded, which a counterpart's credit needs. Zero between launches. */
    uint32_t *finished;
    const uint32_t *pieces_of; /* [group]: how many pieces */
    struct prs_far far;        /* several nodes only */
    const struct prs_attention_piece *pieces;
    const struct prs_attention_part *parts;
    uint32_t *parts_done; /* per part and warp; a task's first part counts for all. 0 between launches */
    float *partial;       /* per part: merge.cuh */
    void *out;
    float *lse;
    struct prs_attention_strides out_strides;
    float scale, scale_log2; /* of the scores; times log2(e) */
    uint32_t heads_first;    /* layout of the tensors */
    uint32_t row_bytes;      /* bytes of one position of one head, of the wider tensor */
    uint32_t planes;         /* size of a copied tensor in TMA's last dimension; 0: CTAs push the data */
    uint32_t pieces_count, arrival_words, push_gap;
    /* Striped attention only. */
    struct prs_attention_stripes stripes;
    float cap, cap_inner;        /* a score x, not scaled, becomes cap * tanh(x * cap_inner / 2), in log2; 0: no cap */
    const float *sinks;          /* [heads_q], or NULL */
    CUtensorMap received_values; /* staging memory, where values have another width than keys */
};

#endif
