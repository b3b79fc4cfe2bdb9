/* SPDX-License-Identifier: Apache-2.0 */
/**
 * MoE dispatch fused with the experts' product, and combine. Rank r owns the E/W experts from number r * E/W on; with a
 * map these are places for experts (batch->placement). Each rank has up to `tokens` rows of `hidden` columns and, for
 * each row, the top_k experts that its router chose and their weights. On the own node every token travels once to each
 * rank that owns one of its experts. To another node it travels once, and the ranks there forward it. At the owner each
 * pair of token and expert becomes one row of
 *
 *     out[capacity, columns] = activation(token [hidden] times weights of the expert [hidden, columns])
 *
 * Rows of `out` are sorted by expert. The rows of expert e begin at expert_rows[e].first_row, a multiple of 128; rows
 * between the rows of two experts are undefined. The rows of one expert are sorted by sender, then by token. The order
 * of senders: this rank; the other ranks of its node in rank order, beginning after this rank and wrapping around; then
 * the ranks of the next nodes, node by node, each node beginning with the rank whose local rank is that of this rank.
 *
 * A launch is two kernels in one stream, after a kernel of a single warp. Routing computes counts, offsets and maps on
 * the GPU. The product starts each block of 128 rows of an expert as soon as its rows have arrived. Nothing waits for
 * the host.
 *
 * FP8. In a plan with dtype PRS_DTYPE_E4M3, weights are e4m3 [E/W, N, H] (weights_transposed), with a float for each
 * 128 x 128 of them. Tokens are quantised, by the launch or by the caller, with a float for each 128 numbers of a row;
 * a row and its scales travel together. The value of an element is its e4m3 number times its scale. Sums of 128
 * products are scaled and added in fp32. In a layer, the activation is applied to the sums of the first product, and
 * the result is quantised in registers. The results of experts, which combine adds up, and the residual are bf16. H and
 * N are multiples of 128; a gated N is a multiple of 256. There are no gradients. Quantising: the scale of 128 numbers
 * is their largest magnitude / 448, and at least 2^-126, so that zeros stay zeros and no number saturates. A
 * not-a-number stays one, and does not affect the others. An infinity makes its scale infinite, so all products with
 * its block are not-a-numbers. */
#ifndef PERSEUS_MOE_H
#define PERSEUS_MOE_H

#include <perseus/fused.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Sizes of a plan. */
struct prs_moe_shape {
    uint32_t tokens;  /**< the most tokens that any rank has in one launch */
    uint32_t hidden;  /**< H, a multiple of 8 */
    uint32_t columns; /**< N, a multiple of 8; 0: a plan for prs_moe_dispatch() and prs_moe_combine() alone */
    uint32_t experts; /**< E, of all ranks: a multiple of W, at most 1024; with a map, the places for experts */
    uint32_t top_k;   /**< at most 32 */
    /** Rows of `out` on this rank, a multiple of 128. Each expert's number of rows is rounded up to a multiple of 128.
     * 0: as many as can ever arrive. May differ between ranks. */
    uint32_t capacity;
    uint32_t weights_transposed; /**< the experts' weights are [E/W, N, H]; 0: [E/W, H, N] */
    uint32_t activation;         /**< of the product: enum prs_activation */
    /** 1: the first N / 2 columns of the weights are the gate; out has N / 2 columns, activation(gate) * up. N is then
     * a multiple of 16. */
    uint32_t gated;
    uint32_t layer; /**< 1: the plan is also for prs_moe_layer(), with memory for the data between its two products */
    /** L, at most 1024: the router chooses among L experts, and each dispatch has a map (batch->placement) from these
     * to the E places. 0: no map, and an expert's number is its place. May differ between ranks, as `replicas` may. */
    uint32_t logical_experts;
    uint32_t replicas; /**< R, at most 64: entries of the map for each expert. 0 without a map */
    uint32_t dtype;    /**< enum prs_dtype: of tokens and weights. Default: bf16; e4m3: see the top */
    uint32_t scaling;  /**< enum prs_scaling; e4m3: PRS_SCALING_BLOCKS, also by default; bf16: 0 */
    uint64_t reserved[PRS_RESERVED_WORDS - 1]; /**< 0 */
};

/** When a prs_moe_layer() of several kernels returns the sums of results to the tokens' ranks. */
enum prs_moe_returns {
    PRS_MOE_RETURNS_AUTO = 0,  /**< chosen by the plan: early for many tokens on a node of 4 ranks or more */
    PRS_MOE_RETURNS_LATE = 1,  /**< when the second product has ended */
    PRS_MOE_RETURNS_EARLY = 2, /**< while the second product runs; on one node */
};

/** How prs_moe_layer() runs. */
enum prs_moe_path {
    PRS_MOE_PATH_AUTO = 0, /**< chosen by the plan: one kernel if that can run on all ranks and should be faster */
    PRS_MOE_PATH_KERNELS = 1,
    PRS_MOE_PATH_ONE = 2 /**< one kernel, for few tokens: see prs_moe_layer() */
};

/** The plan chooses each field that is 0. */
struct prs_moe_tuning {
    uint32_t ctas; /**< SMs that work */
    uint32_t
        cluster; /**< 2: a pair of SMs computes two column tiles of the same rows, loading the rows once; 1: no pairs */
    uint32_t route_ctas; /**< CTAs of the routing kernel */
    uint32_t spread;     /**< percent of the product's time over which an SM spreads what it sends; 1: no pauses */
    /* Several nodes, the same on all ranks: */
    uint32_t rows_per_signal; /**< rounded up to whole puts */
    uint32_t rows_per_put;    /**< at most rows_per_signal */
    /** 1: the product goes expert by expert. 2: for half of the experts, it first computes the blocks without rows of
     * other nodes. */
    uint32_t passes;
    uint32_t path;                             /**< enum prs_moe_path, the same on all ranks */
    uint32_t returns;                          /**< enum prs_moe_returns, the same on all ranks */
    uint32_t unused;                           /**< 0 */
    uint64_t reserved[PRS_RESERVED_WORDS - 1]; /**< 0 */
};

/** What a plan of MoE has decided. */
struct prs_moe_info {
    struct prs_moe_tuning tuning; /**< all fields decided */
    uint32_t capacity;
    uint64_t workspace_bytes; /**< device memory of this plan on this rank, in addition to the caller's */
    uint64_t shared_bytes;    /**< memory that it shares with other plans of the context, counted in each of them */
    /** Bytes per launch over NVLink from this rank, if all ranks have `tokens` tokens and choices are spread evenly
     * over experts. */
    uint64_t sent_bytes;
    double predicted_us; /**< for the same */
    uint64_t maps_bytes; /**< of the maps of one dispatch */
    uint64_t row_bytes;  /**< of a row of prs_moe_dispatch()'s out */
    const char *reason;  /**< why the path of a layer was chosen; static text */
    uint64_t reserved[PRS_RESERVED_WORDS - 2];
};

/** Where a row of `out` came from. The rows that fill up an expert's last block of 128 have rank, token and slot
 * UINT32_MAX. */
struct prs_moe_row {
    uint32_t rank, token;
    uint32_t slot; /**< of the token's top_k */
    float weight;
};

/** The rows of one expert. */
struct prs_moe_expert_rows {
    uint32_t first_row, rows; /**< first_row: a multiple of 128 */
};

/** What one launch found on this rank. Dropped rows and wrong choices are not errors: the launch, the other ranks and
 * later launches continue. */
struct prs_moe_status {
    uint32_t rows_needed;    /**< rows of `out` that all choices need; if more than capacity, some were dropped */
    uint32_t rows_dropped;   /**< choices, of any rank, that found no room here: the last rows of the last experts */
    uint32_t wrong_choices;  /**< this rank's choices that name E (with a map: L) or more. They are ignored */
    uint32_t wrong_token;    /**< the first of this rank's tokens with a wrong choice or place; UINT32_MAX: none */
    uint32_t tokens_dropped; /**< the excess of *count_on_device over shape.tokens */
    uint32_t absent_choices; /**< this rank's choices of experts for which the map has no place. They are ignored */
    uint32_t wrong_places;   /**< this rank's choices for which the map has a place of E or more. They are ignored */
    uint32_t unused;
};

/** Device memory of one launch, 16-byte aligned. What is const must not change, and the results must not be read, until
 * the launch is done in stream order. */
struct prs_moe_batch {
    const void *tokens;          /**< bf16 [count, H]; with token_scales e4m3 */
    uint32_t count;              /**< 0 ... shape.tokens, may differ between ranks */
    const int64_t *chosen;       /**< [count, top_k], as from torch.topk; negative: no expert in this slot */
    const float *router_weights; /**< [count, top_k] */
    const void *weights;         /**< of this rank's experts */
    void *out;                   /**< bf16 [capacity, N], gated: [capacity, N / 2]; of a layer: [count, H] */
    struct prs_moe_row *rows;    /**< [capacity]; of a layer or a dispatch alone it may be NULL */
    struct prs_moe_expert_rows *expert_rows; /**< [E/W]; of a layer it may be NULL */
    /** NULL, or the count, which the kernel reads when it starts: so a captured graph serves any count. Then `count` is
     * ignored. */
    const uint32_t *count_on_device;
    struct prs_moe_status *status; /**< NULL, or written by the launch */
    /** NULL, or info.maps_bytes of device memory, 256-byte aligned, for the data about this dispatch that
     * prs_moe_combine() and prs_moe_gemm() need. NULL: the plan keeps it until its next dispatch. */
    void *maps;
    /** Of a layer: the weights of the second product, [E/W, I, H], or [E/W, H, I] with weights_transposed. I is N, or N
     * / 2 if gated. */
    const void *down;
    const void *residual; /**< of a layer: bf16 [count, H], which is added; it may be out itself; or NULL */
    /** Of prs_moe_dispatch(): 1: the rows that fill up an expert's last block of 128 become zeros, for products over
     * whole blocks. 0: they are undefined. */
    uint32_t clear_fill;
    /** With shape.logical_experts: [L, R], the places that hold each expert; negative: no place. If n entries of an
     * expert are not negative, token t of rank r takes entry (t + r) mod n of these. So tokens take turns, in the same
     * way in each run; a place may appear twice. An expert without a place is absent: choices of it are ignored, tokens
     * keep their other experts, and status->absent_choices counts such choices. Only the token's rank reads its map,
     * when the launch runs. So the map may differ between ranks (a rank may list only its own replica), and may be
     * rewritten between two launches, also between replays of a captured graph. Each place must hold the weights of the
     * expert that the map assigns to it. */
    const int32_t *placement;
    /** Of a layer: NULL, or memory for what gradients need. kept_rows: the tokens in the rows of their experts, bf16
     * [capacity, H]; the rows that fill up an expert's last block of 128 are zeros. kept_columns: the first product
     * before its activation, rounded, bf16 [capacity, N]; in such rows it is undefined. Both or neither. */
    void *kept_rows;
    void *kept_columns;
    /** Of a plan of e4m3, else NULL; 4-byte aligned. token_scales: [count, H / 128], and tokens are e4m3; NULL: tokens
     * are bf16, and the launch quantises them. weight_scales: [E/W, N / 128, H / 128]; down_scales, of a layer: [E/W,
     * H / 128, I / 128]. As checkpoints have them (weight_scale_inv). */
    const float *token_scales, *weight_scales, *down_scales;
    uint64_t reserved[PRS_RESERVED_WORDS - 3]; /**< 0 */
};

struct prs_moe_plan;

/** *Collective.* tuning NULL: the plan chooses all fields. -EINVAL: the shape cannot run, or differs between ranks.
 * -ENOMEM, -ENOTSUP, -EIO. */
PRS_API int prs_moe_plan_open(struct prs_fused *ctx, const struct prs_moe_shape *shape,
                              const struct prs_moe_tuning *tuning, struct prs_moe_plan **out);
/** Local. No launch of the plan may be in flight on this rank, and no graph with one may run later. NULL does
 * nothing. */
PRS_API void prs_moe_plan_close(struct prs_moe_plan *plan);
/** Local; from any thread until the plan is closed. */
PRS_API void prs_moe_plan_query(const struct prs_moe_plan *plan, struct prs_moe_info *info);

/** Enqueues one launch, by the rules of launches (fused.h). Rows beyond capacity are dropped, and choices of experts
 * that do not exist are ignored; only batch->status reports this. A plan with capacity 0 drops nothing. */
PRS_API int prs_moe_dispatch_gemm(struct prs_moe_plan *plan, const struct prs_moe_batch *batch,
                                  struct CUstream_st *stream);

/** Another product, with other weights of the same shape, of the rows that the last prs_moe_dispatch_gemm() in this
 * stream received. Of the batch only weights and out are used. Not collective. The MoE and attention plans of a context
 * share the memory of these rows: -EINVAL if another such plan, or a layer as one kernel, was launched since. This is
 * not detected if graphs are replayed in another order than they were captured. */
PRS_API int prs_moe_gemm(struct prs_moe_plan *plan, const struct prs_moe_batch *batch, struct CUstream_st *stream);

/** Dispatch for experts that the caller computes: out gets the rows themselves, bf16 [capacity, H], in the order
 * described at the top. Of a plan of e4m3: [capacity] rows of info.row_bytes bytes, each H of e4m3, then H / 128
 * floats, its scales. batch->weights is not used. By the rules of launches. */
PRS_API int prs_moe_dispatch(struct prs_moe_plan *plan, const struct prs_moe_batch *batch, struct CUstream_st *stream);

/** What prs_moe_combine() works on: device memory, 16-byte aligned. */
struct prs_moe_results {
    const void *rows;     /**< bf16 [capacity, H]: the experts' results for the rows of a dispatch */
    void *out;            /**< bf16 [count, H]; count: that of the dispatch */
    const void *residual; /**< bf16 [count, H], which is added; it may be out itself; or NULL */
    const void *maps;     /**< as in the dispatch */
    uint32_t unweighted;  /**< 1: rows are added without their router weights; 0: times their weights */
    uint64_t reserved[PRS_RESERVED_WORDS]; /**< 0 */
};

/** Combine: out = the sum of each token's rows, times their router weights, + residual. A rank adds up its experts'
 * rows of a token before they travel, so that each rank sends one row per token. Sums are fp32, in an order that the
 * choices alone determine; a sum from another rank is rounded to bf16, and the result once more. Rows that a dispatch
 * has dropped, and slots without an expert, add nothing; a token without any row gets the residual, or zeros.
 *
 * Between nodes, the ranks of a node add up their sums of a token and send one row per node, which is rounded once
 * more. May be called any number of times after a dispatch, equally often on all ranks, by the rules of launches. */
PRS_API int prs_moe_combine(struct prs_moe_plan *plan, const struct prs_moe_results *results,
                            struct CUstream_st *stream);

/** What prs_moe_dispatch_again() works on: device memory, 16-byte aligned. */
struct prs_moe_again {
    const void *tokens;  /**< bf16 [count, H]; count: that of the dispatch. It may be NULL on a rank without tokens */
    void *out;           /**< bf16 [capacity, H] */
    const void *beside;  /**< bf16 [capacity, H], other rows in the same order, for `products`; or NULL */
    float *products;     /**< [capacity]: the dot product of each token's row, not weighted, with the row of `beside`;
                          * NULL without `beside` */
    const void *maps;    /**< as in the dispatch */
    uint32_t weighted;   /**< 1: rows are multiplied by their router weights, in fp32, and rounded once */
    uint32_t clear_fill; /**< as in the dispatch */
    uint64_t reserved[PRS_RESERVED_WORDS]; /**< 0 */
};

/** Dispatch along the maps of an earlier one, without routing: tokens[i] goes to the rows of that dispatch's token i.
 *
 * It is for gradients. The gradient of the rows that prs_moe_combine() adds up is the gradient of its result,
 * dispatched again and weighted. The gradient of the router weights is `products`, with those rows as `beside`;
 * prs_moe_return_values() returns it to the tokens. The gradient of the tokens of prs_moe_dispatch() is
 * prs_moe_combine() of the rows' gradients, unweighted.
 *
 * products are summed in fp32, in a fixed order; they are undefined for rows that fill up a block. May be called any
 * number of times after a dispatch, equally often on all ranks, by the rules of launches. */
PRS_API int prs_moe_dispatch_again(struct prs_moe_plan *plan, const struct prs_moe_again *again,
                                   struct CUstream_st *stream);

/** What prs_moe_return_values() works on: device memory, 16-byte aligned. */
struct prs_moe_values {
    const float *values;                   /**< [capacity]: one for each row */
    const struct prs_moe_row *rows;        /**< [capacity]: as the dispatch has written it to batch->rows */
    float *out;                            /**< [count, top_k]; it may be NULL on a rank without tokens */
    const void *maps;                      /**< as in the dispatch */
    uint64_t reserved[PRS_RESERVED_WORDS]; /**< 0 */
};

/** Returns one value of each row to the row's token and slot. A slot without a row gets 0. Values of at least 2^-110 in
 * magnitude arrive unchanged. H must be at least 3 top_k. May be called any number of times after a dispatch, equally
 * often on all ranks, by the rules of launches. */
PRS_API int prs_moe_return_values(struct prs_moe_plan *plan, const struct prs_moe_values *values,
                                  struct CUstream_st *stream);

/** The whole layer, in one launch of four kernels, after a kernel of a single warp: dispatch with the first product,
 * whose activation (and gate) is applied before it is rounded; the second product; combine, which adds batch->residual.
 * For a plan with shape.layer. By the rules of launches, and of prs_moe_combine().
 *
 * With batch->kept_rows the first product is rounded before its activation, which is a kernel of its own.
 *
 * With PRS_MOE_PATH_ONE the layer is one kernel, made for few tokens: no kernel of a single warp comes before it, no
 * counts are exchanged, and a token's results are not rounded before they are sent. In e4m3, tokens are quantised by
 * the warps that send them, and the activated columns are rounded to bf16 before they are quantised. The plan needs one
 * node, weights_transposed, capacity 0 and W * tokens * top_k of at most 32768; opening it with that path is refused
 * otherwise. info.tuning.path says which path a plan has, info.reason why. The path depends on shape.tokens, which all
 * ranks know, and not on the number of tokens of a launch: for batches of different sizes open a plan for each.
 *
 * In any plan, a launch with rows, expert_rows, maps or kept_rows runs as several kernels, so either all ranks must
 * pass these or none. A rank that runs one kernel while another rank runs several ends with an error that names
 * both. */
PRS_API int prs_moe_layer(struct prs_moe_plan *plan, const struct prs_moe_batch *batch, struct CUstream_st *stream);

/** What prs_moe_multiply() works on: device memory, 16-byte aligned. */
struct prs_moe_product {
    const void *rows;                      /**< bf16 [capacity, k], in the order of a dispatch */
    const void *weights;                   /**< bf16 [E/W, k, n] */
    void *out;                             /**< bf16 [capacity, n] */
    uint32_t k, n;                         /**< multiples of 8 */
    uint32_t weights_transposed;           /**< weights are [E/W, n, k] */
    const void *maps;                      /**< as in the dispatch; it may be NULL as there */
    uint64_t reserved[PRS_RESERVED_WORDS]; /**< 0 */
};

/** Multiplies rows of any width by the matrix of their expert. The results of rows that fill up a block are undefined.
 * It is for gradients: transposed weights are the same memory with the other value of weights_transposed. By the rules
 * of launches, but not collective. */
PRS_API int prs_moe_multiply(struct prs_moe_plan *plan, const struct prs_moe_product *product,
                             struct CUstream_st *stream);

/** What prs_moe_activation_back() works on: device memory, 16-byte aligned; all pointers are needed, except maps. I is
 * N, or N / 2 if gated. */
struct prs_moe_activation {
    const void *columns;            /**< bf16 [capacity, N]: the first product before its activation */
    const void *gradients;          /**< bf16 [capacity, I]: the gradients of the activated columns, not
                                            * weighted */
    const struct prs_moe_row *rows; /**< [capacity]: as the dispatch has written it to batch->rows */
    void *of_columns;               /**< bf16 [capacity, N]: the gradients of `columns` */
    void *weighted;                 /**< bf16 [capacity, I]: the activated columns, times the router weight */
    float *products;  /**< [capacity]: the dot product of activated columns and `gradients`, not weighted */
    const void *maps; /**< as in the dispatch; it may be NULL as there */
    uint64_t reserved[PRS_RESERVED_WORDS]; /**< 0 */
};

/** The gradients of a layer's activation, in one pass. For a row let h = activation(gate) * up, let w be its router
 * weight, and let u be its row of `gradients`: the gradient of the layer's result times down transposed. Then
 * of_columns are the gradients of gate and up for the gradient w u of h. weighted is w h. products is the sum of u h:
 * the gradient of w. All are computed in fp32 and rounded once. Rows that fill up a block become zeros in both
 * matrices, for products over whole blocks. By the rules of launches, but not collective. */
PRS_API int prs_moe_activation_back(struct prs_moe_plan *plan, const struct prs_moe_activation *activation,
                                    struct CUstream_st *stream);

/** What prs_moe_balance() reads, and where it writes: host memory. */
struct prs_moe_loads {
    uint32_t world;           /**< W, at most 64 */
    uint32_t experts;         /**< E, the places: a multiple of W, at most 1024; as shape.experts */
    uint32_t logical_experts; /**< L, at most 1024; as in the shape */
    uint32_t replicas;        /**< R, at most 64; as in the shape */
    /** [L]: how often each expert is chosen, in any unit. Negative: the expert is absent and gets no place. At most E
     * experts are present. */
    const double *loads;
    int32_t *placement;                    /**< [L, R]: the map; copy it to device memory for batch->placement */
    int32_t *held;                         /**< [E], or NULL: the expert whose weights each place must hold; -1: none */
    double *rank_loads;                    /**< [W], or NULL: the load of each rank if the loads stay as they are */
    uint64_t reserved[PRS_RESERVED_WORDS]; /**< 0 */
};

/** Makes a map for skewed loads: experts that are chosen often get several places, and the loads of ranks are as even
 * as possible. Local, on the host, without a context; the same input gives the same map everywhere.
 *
 * Each present expert gets a place. Then each remaining place goes to the expert with the largest load per replica (the
 * divisor method of Adams) among those with fewer than min(R, W) replicas. Then replicas are assigned, heaviest first,
 * each to the rank with the least load that has room (longest processing time first; R. L. Graham, Bounds on
 * Multiprocessing Timing Anomalies, 1969), replicas of an expert to different ranks. -EINVAL, -ENOMEM. */
PRS_API int prs_moe_balance(const struct prs_moe_loads *loads);

#ifdef __cplusplus
}
#endif

#endif
