/* SPDX-License-Identifier: Apache-2.0 */
/* The structures that the host passes to the kernels of MoE. */
#ifndef PERSEUS_FUSED_MOE_ARGS_H
#define PERSEUS_FUSED_MOE_ARGS_H

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdint.h>

#include <perseus/device.h>
#include "fused/core/epilogue.h"
#include "fused/core/plan_switch.h"
#include "fused/core/scales.h"
#include "fused/core/sync.h"
#include "fused/core/tile.h"
#include "fused/moe/route.h"

enum { PRS_ROUTE_THREADS = 256 };

/* The routing kernel writes these for the kernels after it. */
struct prs_moe_totals {
    uint32_t tokens; /* number of this rank's tokens */
    uint32_t blocks; /* row blocks of this rank's experts */
    uint32_t deliveries;
    uint32_t sent[PRS_ROUTE_MAX_WORLD];    /* [p]: tokens for the peer at distance p */
    uint32_t relayed[PRS_ROUTE_MAX_WORLD]; /* [b]: tokens for the node at distance b */
};

/* What a kernel needs to reach other nodes. The source of a put must lie in a window, too. The next launch may
 * overwrite the source, because a launch ends only when its puts are complete. */
struct prs_moe_far {
    struct prs_device device;
    uint64_t *signals;   /* this rank's words, which peers set to the epoch; kernels poll the low halves like flags */
    uint8_t *relay;      /* this rank's: rows from and for other nodes; see route.h */
    uint32_t *tokens;    /* this rank's [b][i]: the token that is row i of those for the node at distance b */
    uint32_t *counters;  /* this rank's counts of rows and puts, on the way out and then back; zero between launches */
    uint8_t *forwarding; /* this rank's: the forwarding tables of a dispatch, [distance of the sender's node] */
    uint32_t *near;      /* this rank's [expert here]: prs_route_near_blocks() */
    uint32_t message_window, relay_window, signal_window;
    uint32_t back; /* index of the first part of relay memory for the way back: 2 in a layer, else 0 */
};

/* Counters of the CTAs of a rank. Zero between launches. */
struct prs_moe_claims {
    /* The routing kernel: chunks that are claimed, counted and sent; parts of what is received that are claimed. */
    uint32_t chunks, counted, sent, parts;
    /* Wrong choices, wrong entries of the map, and ~ of the first token with one. */
    uint32_t wrong, wrong_places, wrong_token;
    uint32_t absent; /* choices of experts that have no place */
    /* The product's kernel: units; lists of deliveries; rows. */
    uint32_t units, deliveries, pushed, relayed, forwarded;
    /* Combine: deliveries added up for their senders, and this rank's tokens. `forwarded` counts relayed rows. */
    uint32_t returned, combined;
    uint32_t left; /* CTAs that have left the kernel */
};

struct prs_moe_args {
    CUtensorMap rows;    /* rows of all experts here: A of the product */
    CUtensorMap experts; /* their weights: one plane each */
    CUtensorMap out;
    struct prs_route route;
    struct prs_sync sync;

    /* From the caller: */
    const uint8_t *tokens;
    const int64_t *chosen;
    const int32_t *placement; /* the map, or NULL */
    const float *weights;
    struct prs_moe_row *row_map;            /* or NULL */
    struct prs_moe_expert_rows *expert_map; /* or NULL */
    uint32_t count;                         /* tokens of this rank */
    const uint32_t *count_on_device;        /* or NULL */
    struct prs_moe_status *status;          /* or NULL */
    struct prs_epilogue epilogue;
    uint32_t n; /* columns of the result */
    uint32_t k_steps;
    uint32_t push_gap;   /* SM clocks from one pushed row to the next */
    uint32_t dispatches; /* 0: only the product, on rows that an earlier launch delivered */
    uint32_t ends;       /* 0: other kernels of the launch follow; 1, or without routing 2: this one is the last */

    /* Combine: */
    const uint8_t *results;  /* rows of the experts */
    const uint8_t *residual; /* or NULL */
    uint8_t *combined;       /* [token] */
    uint32_t unweighted;
    uint32_t returns_early; /* layers on one node: sums return during the second product (returns.cuh) */

    /* Gradients: */
    const uint8_t *beside; /* rows with which dispatched rows are multiplied, or NULL */
    float *products;
    const float *values;               /* [row] */
    const struct prs_moe_row *origins; /* [row] */
    float *returned;                   /* [token][slot] */

    /* Activation, forward and backward (n: columns of its result): */
    const uint8_t *columns; /* result of the first product */
    uint8_t *activated;     /* backward: times the router weight */
    const uint8_t *of_activated;
    uint8_t *of_columns;

    /* The maps of a dispatch: this rank's memory, or the caller's */
    struct prs_moe_totals *totals;
    struct prs_moe_expert_rows *table; /* [expert here] */
    uint32_t *sent;                    /* [p][i]: the token that is row i of those for the peer at distance p */
    uint8_t *deliveries;
    struct prs_route_source *sources; /* [token][slot] */

    /* This rank's memory: */
    uint64_t *chunks; /* [chunk][expert]: choices, leads << 16, relay leads << 32 */
    uint32_t *ready;  /* [block]: number of rows in place; the routing kernel clears it */
    uint32_t *stored; /* [expert here]: tiles of the second product's result that are stored; cleared likewise */
    struct prs_moe_claims *claims;

    /* This rank's memory, which plans share: */
    uint8_t *value_rows; /* [row]; next: [token]; values that return, prs_moe_value_bytes() each */
    uint8_t *value_sums;
    uint8_t *row_bytes; /* memory of `rows` */

    /* Symmetric memory; [q]: at neighbour q of this node. */
    uint8_t *messages[PRS_MAX_LOCAL_RANKS];       /* all messages and forwarding tables: route.h */
    uint32_t *message_flags[PRS_MAX_LOCAL_RANKS]; /* [sender's distance]: epoch */
    uint32_t *end_flags[PRS_MAX_LOCAL_RANKS];     /* [peer's distance]: epoch of the last launch that it has ended */
    uint8_t *staging[PRS_MAX_LOCAL_RANKS];        /* tokens of other ranks */
    uint32_t *staging_flags[PRS_MAX_LOCAL_RANKS]; /* [row]: epoch */
    uint8_t *returns[PRS_MAX_LOCAL_RANKS];        /* sums that return, at the same places, for token i of peer p */
    uint32_t *return_flags[PRS_MAX_LOCAL_RANKS];
    uint32_t *returned_flags[PRS_MAX_LOCAL_RANKS]; /* [peer's distance]: epoch once all of its sums have arrived */
    struct prs_moe_far far;                        /* several nodes only */

    uint32_t type; /* enum prs_dtype of rows and weights, by which the host chooses the kernels */

    /* e4m3: rows travel with their scales (prs_moe_scaled_bytes()). */
    const void *unscaled;      /* the caller's tokens: bf16; with token_scales e4m3 */
    const float *token_scales; /* [token][block of H], or NULL */
    uint8_t *scaled_tokens;    /* this rank's memory: `tokens` */
    uint32_t hidden;           /* columns of a token */
    struct prs_scales scales;  /* scales of the product; b has those of all experts here */
    uint32_t quantises;        /* the product's result becomes rows of e4m3, at `activated`; for the host */
};
static_assert(sizeof(struct prs_moe_args) <= 4096, "kernel arguments");

/* A row of e4m3 has the numbers, a scale for each 128 of them, and a gap up to the next cache line. So numbers and
 * scales travel together, and no two rows, which may arrive at different times, share a cache line. */
PRS_SHARED uint32_t prs_moe_scaled_bytes(uint32_t columns)
{
    return (columns + columns / PRS_SCALE_BLOCK * 4 + 127) / 128 * 128;
}

/* Shared memory of the routing kernel: six tables by expert, a few totals, which chunks the CTA has counted, and the
 * choices of one chunk. */
enum {
    PRS_ROUTE_MAX_CHUNKS = 128,
    PRS_ROUTE_TABLES = 6,
    PRS_ROUTE_TOTALS = 2 + PRS_ROUTE_MAX_WORLD + 2,
    PRS_ROUTE_CLAIM_WORDS = 4 + PRS_ROUTE_MAX_CHUNKS / 32
};

PRS_SHARED uint32_t prs_moe_table_words(const struct prs_route *r)
{
    return (r->experts + 3) / 4 * 4; /* the memory after the tables is read as 16-byte vectors */
}

/* A value travels as the sum of three bf16, each with eight bits of it: a row has three columns for each slot. */
enum { PRS_MOE_VALUE_PARTS = 3, PRS_MOE_PART_BYTES = 2 };

PRS_SHARED uint32_t prs_moe_value_bytes(const struct prs_route *r)
{
    return (r->choices * PRS_MOE_VALUE_PARTS * PRS_MOE_PART_BYTES + 15) / 16 * 16;
}

PRS_SHARED uint32_t prs_moe_route_shared(const struct prs_route *r)
{
    uint32_t choices = prs_ceil_div(r->tokens, r->chunks) * r->choices;
    return (PRS_ROUTE_TABLES * prs_moe_table_words(r) + PRS_ROUTE_TOTALS + PRS_ROUTE_CLAIM_WORDS) * 4 +
           (choices + 7) / 8 * 8 * 8;
}

#ifdef __cplusplus
extern "C" {
#endif

/* Prepares the kernels of a type on the current device. cluster: CTAs that share rows (1 or 2); *clusters: how many
 * clusters can run at once, whatever the layout of the weights. Returns 0 or -ENOTSUP. */
int prs_moe_kernels_prepare(uint32_t type, const struct prs_route *route, uint32_t cluster, uint32_t *clusters);

/* Each enqueues one kernel. Return 0 or -EIO. */
int prs_moe_kernels_switch_plan(const struct prs_switch_args *args, cudaStream_t stream);
int prs_moe_kernels_route(const struct prs_moe_args *args, cudaStream_t stream);
int prs_moe_kernels_product(const struct prs_moe_args *args, int b_n_major, uint32_t cluster, uint32_t clusters,
                            cudaStream_t stream);
int prs_moe_kernels_scale_tokens(const struct prs_moe_args *args, uint32_t sms, cudaStream_t stream);
int prs_moe_kernels_dispatch(const struct prs_moe_args *args, uint32_t ctas, cudaStream_t stream);
int prs_moe_kernels_combine(const struct prs_moe_args *args, uint32_t ctas, cudaStream_t stream);
int prs_moe_kernels_dispatch_again(const struct prs_moe_args *args, uint32_t ctas, cudaStream_t stream);
int prs_moe_kernels_clear_fill(const struct prs_moe_args *args, uint32_t ctas, cudaStream_t stream);
int prs_moe_kernels_split_values(const struct prs_moe_args *args, uint32_t ctas, cudaStream_t stream);
int prs_moe_kernels_join_values(const struct prs_moe_args *args, uint32_t ctas, cudaStream_t stream);
int prs_moe_kernels_activate(const struct prs_moe_args *args, uint32_t sms, cudaStream_t stream);
int prs_moe_kernels_activation_back(const struct prs_moe_args *args, uint32_t sms, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
