/* SPDX-License-Identifier: Apache-2.0 */
/* The whole layer in one kernel, for few tokens: its arguments and the layout of its memory. few.cuh has the kernel,
 * doc/fused-notes.md ("One launch for few tokens") the reasons, fused/README.md the terms.
 *
 *   choices --> places: each rank has a word for each choice of every rank
 *   tokens ---> rows: at each rank that has one of the token's experts, in a fixed slot for each source rank and token
 *   rows of an expert, in tiles of up to prs_few.tile --> first product, activation --> inner --> second product
 *   results --> the inbox of the token's rank: a row for each choice; that rank adds them up
 *
 * Inner rows, and the tokens of wide tiles, have the layout of a product's stages, so that one bulk copy loads a half
 * of a stage: tile by tile, [step of PRS_FEW_STEP bytes][half of PRS_STAGE_ROW bytes][row of the tile], swizzled. With
 * e4m3 the scales of a step follow its rows, [half][row]. If a row does not fill its last step, the rest is zero: the
 * warps that copy tokens write the zeros; the memory of inner rows is zeroed once, and nobody writes there.
 *
 * e4m3. The warps that send a token quantise it. The results of the first product are rounded to bf16. One scale covers
 * the columns of several units. A warp stores the same rows of each unit, in any CTA. So the last of these warps that
 * stores its part of a block quantises the block of its rows. The scales of all stages lie after the last stage; the
 * gatherer warps load them.
 *
 * No counts are exchanged: the slots are fixed, and each CTA finds the rows of its rank's experts in the places. A
 * *choice* is numbered over all ranks: (source rank * tokens + token) * top_k + slot.
 *
 * Arrival. A place contains the low half of the launch's number, so it is its own flag. Every rank writes all its
 * places in every launch; places of tokens that it does not have are PRS_ROUTE_NONE. So a word is never older than two
 * launches. A row has a flag for each of its pieces, which contains the launch's number. Words of results are never 0
 * (inbox_word.h); their only reader clears them.
 *
 * Reuse. All of this has two banks, which launches use in turn. A rank in launch t + 2 has ended t + 1, and for that it
 * needed the places of every rank. A rank sends the places of t + 1 after it has ended t, and by then it has read and
 * cleared everything that was sent to it in t. Only launches of this kernel are counted here; other launches of the
 * plan may come between them. The memory belongs to the plan, so other plans do not matter. Only the tokens of wide
 * tiles and the unscaled inner rows, which last for one launch of this rank, are in memory that all plans use. */
#ifndef PERSEUS_FUSED_MOE_FEW_H
#define PERSEUS_FUSED_MOE_FEW_H

#include "fused/moe/args.h"

enum {
    PRS_FEW_MOST_CHOICES = 32768, /* choices of all ranks in one launch; at first shared memory holds them */
    /* rows of an expert that are multiplied at a time, the N of the tensor cores. The plan chooses one of the two */
    PRS_FEW_NARROW = 32,
    PRS_FEW_WIDE = 64,
    PRS_FEW_WEIGHTS = 64,   /* rows of weights in a unit: the M of the tensor cores */
    PRS_FEW_STEP = 256,     /* bytes of rows and weights in a stage: two rows of PRS_STAGE_ROW */
    PRS_FEW_GROUP = 8,      /* consecutive rows of weights; gated: groups of the gate and of up alternate */
    PRS_FEW_PIECE = 1024,   /* columns of a token that a warp sends */
    PRS_FEW_GATHERERS = 7,  /* warps that load rows */
    PRS_FEW_CONSUMERS = 4,  /* warps that multiply a unit: a warpgroup */
    PRS_FEW_WARPGROUPS = 2, /* take units by turns */
    PRS_FEW_WARPS = 1 + PRS_FEW_GATHERERS + PRS_FEW_WARPGROUPS * PRS_FEW_CONSUMERS,
};
static_assert((1 + PRS_FEW_GATHERERS) % 4 == 0, "the warps that multiply are warpgroups");

/* Memory of this rank; zero before the first launch. */
struct prs_few_state {
    uint32_t launches; /* number of launches that have ended */
};

/* Arrays of two are for the first and the second product. */
struct prs_few {
    CUtensorMap weights[2]; /* dimensions: columns; a group's rows; gate and up; groups; experts */
    CUtensorMap sent;       /* this rank's slots of both banks; a box is a row's part of a stage */
    uint32_t inputs[2];     /* columns of the product's rows: H and I */
    const float *scales[2]; /* e4m3: scales of the weights, [expert here][rows of weights / 128][inputs / 128] */
    uint32_t columns[2];    /* columns of the product's results: I and H */
    /* columns of the results that a unit has: as many as rows of weights; gated: half as many */
    uint32_t unit[2];
    uint32_t units[2]; /* units of a tile */
    struct prs_few_state *state;
    uint32_t *done[2];      /* [tile]: how many parts of the tile's rows are stored; zero between launches */
    uint8_t *tiles[2];      /* [tile][tile_bytes]: the tile's rows */
    uint32_t tile_bytes[2]; /* tile_bytes[0] is 0 if tiles are narrow */
    uint32_t tile;          /* rows of an expert that are multiplied at a time: PRS_FEW_NARROW or PRS_FEW_WIDE */
    uint32_t *list;         /* [row of the list]: its choice, if shared memory has no room for all (few_listed()) */
    uint8_t *unscaled;      /* e4m3: [row of the list][I]: results of the first product in bf16 */
    uint32_t *stored;       /* e4m3: [tile][I / 128][warp]: how many units are stored there; zero between launches */
    uint32_t pieces;        /* pieces of a token */
    uint32_t result_bytes;  /* bytes of a row of the second product's results */
    /* Symmetric memory; [q]: at neighbour q. */
    uint32_t *places[PRS_MAX_LOCAL_RANKS];
    uint8_t *rows[PRS_MAX_LOCAL_RANKS];
    uint32_t *row_flags[PRS_MAX_LOCAL_RANKS];
    uint8_t *results[PRS_MAX_LOCAL_RANKS];
    const uint64_t *switches; /* this rank's words of plan_switch.h; NULL: a plan of one rank */
};

/* This kernel uses these members of moe: tokens, choices, weights of the router, count, status, residual, combined,
 * route, sync, claims. */
struct prs_few_args {
    struct prs_moe_args moe;
    struct prs_few few;
};
static_assert(sizeof(struct prs_few_args) <= 4096, "kernel arguments");

/* ---- places and slots; source: the token's rank; bank: 0 or 1 ---- */
PRS_SHARED uint32_t prs_few_slot(const struct prs_route *r, uint32_t bank, uint32_t source, uint32_t token)
{
    return (bank * r->place.world + source) * r->tokens + token;
}

/* Bytes of one step of a tile's rows. e4m3: each row has two scales in a step. */
PRS_SHARED uint32_t prs_few_tile_step(uint32_t tile, uint32_t element_bytes)
{
    return tile * (PRS_FEW_STEP + (element_bytes == 1 ? 2 * (uint32_t)sizeof(float) : 0));
}

/* How many words the places of a token take: a multiple of four, because they are read four at a time. */
PRS_SHARED uint32_t prs_few_place_words(const struct prs_route *r)
{
    return (r->choices + 3) / 4 * 4;
}

/* Offset of the token's first result in the inbox of the token's rank. */
PRS_SHARED uint64_t prs_few_results_at(const struct prs_route *r, uint32_t result_bytes, uint32_t bank, uint32_t token)
{
    return ((uint64_t)bank * r->tokens + token) * r->choices * result_bytes;
}

PRS_SHARED uint32_t prs_few_choices(const struct prs_route *r)
{
    return r->place.world * r->tokens * r->choices;
}

/* The content of a place in this launch. */
PRS_SHARED uint32_t prs_few_word(uint32_t launch, uint32_t expert)
{
    return launch << 16 | expert;
}

PRS_SHARED int prs_few_has_come(uint32_t word, uint32_t launch)
{
    return word >> 16 == (launch & 0xffff);
}

PRS_SHARED uint32_t prs_few_expert(uint32_t word)
{
    return word & 0xffff;
}

#ifdef __cplusplus
extern "C" {
#endif

/* Prepares the kernel for a type and a tile on the current device. *ctas: how many CTAs can run at once. Returns 0 or
 * -ENOTSUP. */
int prs_few_kernel_prepare(uint32_t type, uint32_t tile, uint32_t *ctas);
/* Returns 0 or -EIO. */
int prs_few_kernel_launch(const struct prs_few_args *args, uint32_t ctas, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
