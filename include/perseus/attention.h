/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Attention over a sequence that is split among the ranks, forward and backward. Each rank has the queries, keys and
 * values of its slice. It gets the result of its queries over the whole sequence; backward, the gradients of its
 * queries, and those of its keys and values from the queries of all ranks.
 *
 *     out = softmax(scale * q kT) v,  lse = log(sum(exp(scale * q kT)))
 *
 * Slices; W is the number of ranks. Not causal: the sequence is cut into W equal slices, and rank r has slice r. Causal
 * with W > 1: the sequence is cut into 2 W chunks, and rank r has chunk r followed by chunk 2 W - 1 - r (zigzag), which
 * gives all ranks the same work. Query head h uses KV head h / (heads_q / heads_kv).
 *
 * Striped attention (`stripe` in the shape): sequences of any lengths packed into one, sliding windows, soft caps and
 * sinks, forward and backward, on one node. The sequence is cut into stripes of `stripe` rows. Causal or not, they are
 * dealt to the ranks in zigzag: to ranks 0 ... W - 1, then to W - 1 ... 0, and so on; a rank has its stripes in
 * ascending order (prs_attention_positions()). So all ranks have nearly the same share of each long sequence, wherever
 * it begins. Who knows the lengths of packed sequences, or has a window, can assign the stripes to ranks instead
 * (prs_attention_assign_stripes()): then most sequences stay on one rank. A stripe of keys and values is sent only to
 * ranks with a query that attends to it.
 *
 * Tensors, bf16, rows = seq / W: q and out [batch, rows, heads_q, head_dim], k and v [batch, rows, heads_kv, head_dim],
 * or with `heads_first` [batch, heads, rows, head_dim], as torch's scaled_dot_product_attention has them; v and out may
 * have another head_dim (value_dim). lse is fp32 [batch, heads_q, rows] in both layouts. The softmax is computed in
 * fp32. The probabilities are rounded to bf16 once, and so is the result. Results repeat bit by bit.
 *
 * Sources: H. Liu, M. Zaharia, P. Abbeel, Ring Attention with Blockwise Transformers, 2023 (arXiv 2310.01889); the
 * kernel's pipeline: J. Shah et al., FlashAttention-3, 2024 (arXiv 2407.08608).
 */
#ifndef PERSEUS_ATTENTION_H
#define PERSEUS_ATTENTION_H

#include <perseus/fused.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Sizes of a plan. The same on all ranks. */
struct prs_attention_shape {
    uint32_t batch;             /**< sequences of one length; the most of a launch */
    uint32_t heads_q, heads_kv; /**< heads_kv divides heads_q */
    uint32_t head_dim;          /**< of q and k: 64, 96, 128, 192 or 256 (value_dim) */
    uint32_t seq;               /**< of the whole sequence; a multiple of W, causal with W > 1: of 2 W. The most
                                 * positions of a launch */
    uint32_t causal, heads_first;
    float scale; /**< of launches that say none, 1e-20 to 1e20; 0: 1 / sqrt(head_dim) */
    /** Rows of a stripe: a power of two, 128 at least; seq is a multiple of 2 W of them. Shorter stripes divide work
     * more evenly among the ranks; with longer ones less is sent. A good choice is the longest one, up to 512 rows, of
     * which each rank has at least 32. 0: not striped; window, packed and soft_cap must then be 0. */
    uint32_t stripe;
    /** A query attends only to keys whose positions differ from its own by less than this (with `causal`, only to keys
     * up to its own). 0: no window. */
    uint32_t window;
    /** 1: a launch packs sequences into the positions of one batch (cu_seqlens); batch is 1. Each attends to itself
     * only. Their lengths, and how many there are, belong to a launch. */
    uint32_t packed;
    float soft_cap; /**< a score x, after the scale, becomes soft_cap * tanh(x / soft_cap); 0: it stays x */
    /** The head_dim of v and out; 0: head_dim. There are kernels for 64, 96, 128 and 256 for both, and for 128 with a
     * head_dim of 192 (DeepSeek's MLA, prefill). Striped, between nodes and backward: 64 and 128 only. */
    uint64_t value_dim;
    uint64_t reserved[PRS_RESERVED_WORDS - 1]; /**< 0 */
};

/** The positions in the whole sequence of the rows of a rank's slice: seq / world numbers, for RoPE and for cutting
 * inputs. With packed sequences subtract the beginning of each row's own sequence. -EINVAL: as for a plan. */
PRS_API int prs_attention_positions(const struct prs_attention_shape *shape, uint32_t rank, uint32_t world,
                                    uint32_t *positions);

/** Chooses which rank has which stripe of a launch, from the lengths of its sequences: all ranks get equally many
 * stripes and nearly the same work, forward and backward, and few sequences are cut. Local; the same arguments give the
 * same result on all ranks. It takes some 0.1 ms for 512 stripes, and 2 ms for 8192 of 8 ranks.
 *
 * shape: of a striped plan, with the seq of the launch. cu_seqlens: as for a launch, but in host memory; NULL if the
 * shape is not packed. stripe_ranks: gets the rank of each of the seq / stripe stripes; a copy of it in device memory
 * is an operand of the launch. -EINVAL: the shape, or bounds that decrease or exceed seq. -ENOMEM. */
PRS_API int prs_attention_assign_stripes(const struct prs_attention_shape *shape, uint32_t world,
                                         const int32_t *cu_seqlens, uint32_t sequences, uint32_t *stripe_ranks);

/** As prs_attention_positions(), where stripe_ranks (host memory) says which rank has which stripe; a rank has its
 * stripes in ascending order. -EINVAL: also if the rank has not seq / world rows. */
PRS_API int prs_attention_assigned_positions(const struct prs_attention_shape *shape, const uint32_t *stripe_ranks,
                                             uint32_t rank, uint32_t world, uint32_t *positions);

enum prs_attention_mode {
    PRS_ATTENTION_ALONE = 1,    /**< one rank: nothing travels */
    PRS_ATTENTION_RESIDENT = 2, /**< memory for the keys and values of all other ranks */
    PRS_ATTENTION_RING = 3      /**< memory for two steps of these: senders wait for credit */
};

/** A field that is 0 is chosen by the plan. The same on all ranks. */
struct prs_attention_tuning {
    uint32_t mode;           /**< enum prs_attention_mode */
    uint32_t ctas;           /**< CTAs of the launch, one on an SM */
    uint32_t heads_per_step; /**< (batch, KV head) pairs that travel, and are worked on, together */
    uint32_t slab_rows;      /**< if CTAs move the data: positions that share one arrival counter, a multiple of 64 */
    uint32_t spread;         /**< percent of the compute time over which an SM spreads what it sends; 1: no pauses */
    uint32_t block_rows;     /**< keys multiplied at a time: 128; also 176 (head_dim 128, one node, not striped); 64 if
                              * head_dim is 256 */
    /** 3: the softmax overlaps products of its own warpgroup and of the other one. 7 (head_dim 64 or 128, one node, not
     * striped): in addition, results are rescaled only when probabilities could exceed 2^8. */
    uint32_t overlap;
    uint32_t mover;                        /**< enum prs_mover; copy engines need one node and PRS_ATTENTION_RESIDENT */
    uint64_t workspace_limit;              /**< bytes; default: half of what is free on the fullest GPU */
    uint64_t reserved[PRS_RESERVED_WORDS]; /**< 0 */
};

struct prs_attention_plan;

/** What a plan of attention has decided. */
struct prs_attention_info {
    struct prs_attention_tuning tuning; /**< all fields decided */
    uint64_t workspace_bytes;           /**< device memory of this plan on this rank, in addition to the tensors */
    uint64_t shared_bytes;              /**< memory that it shares with other plans of the context, counted in each of
                                         * them */
    uint64_t sent_bytes;                /**< per launch over NVLink, from this rank; striped: at most */
    double predicted_us;                /**< by a model: the time until the first products run, plus the longer of
                                         * compute and transfer */
    const char *reason;                 /**< why the mode was chosen; static text */
    uint64_t reserved[PRS_RESERVED_WORDS];
};

/** *Collective.* -EINVAL: a shape or tuning that cannot run; the text says what is wrong. -ENOMEM: not even two steps
 * fit the limit. -ENOTSUP: the kernel does not fit this GPU. -EIO. */
PRS_API int prs_attention_plan_open(struct prs_fused *ctx, const struct prs_attention_shape *shape,
                                    const struct prs_attention_tuning *tuning, struct prs_attention_plan **out);
/** Local. No launch of the plan may be in flight on this rank, and no graph with one may run later. NULL does
 * nothing. */
PRS_API void prs_attention_plan_close(struct prs_attention_plan *plan);
/** Local; from any thread until the plan is closed. */
PRS_API void prs_attention_plan_query(const struct prs_attention_plan *plan, struct prs_attention_info *info);

/** What one launch works on: device memory, 16-byte aligned, not NULL. */
struct prs_attention_operands {
    const void *q, *k, *v;
    void *out;
    float *lse; /**< 4-byte aligned, or NULL */
    /** Packed sequences: where each begins in the whole sequence, in ascending order, and where the last one ends;
     * `sequences` + 1 numbers in device memory, the same on all ranks. Empty sequences are allowed, so a captured
     * graph may be replayed with fewer. Rows outside of all sequences attend to themselves. Numbers that decrease, are
     * negative, or are above the launch's seq are reported by prs_fused_poll_error() (-EINVAL); what the launch wrote
     * is then wrong. */
    const int32_t *cu_seqlens;
    uint32_t sequences;
    /** Striped attention: a further score for each query head (fp32, [heads_q], device memory). No row of v belongs to
     * it, so it only makes the other probabilities smaller. lse includes it. NULL: none. */
    const float *sinks;
    /** Positions of the whole sequence in this launch, the same on all ranks: at most the plan's seq, and a multiple of
     * W, causal with W > 1 of 2 W, with stripes of 2 W stripes. The slice of a rank, and its tensors, have seq / W rows
     * (prs_attention_positions() of a shape with this seq). A short launch costs what its own length costs, and gives
     * the bits of a plan of this length with the same tuning. Ranks of a node that launch a plan with different lengths
     * get an error (prs_fused_poll_error()). 0: the plan's seq. */
    uint64_t seq;
    /** Sequences of this launch, the same on all ranks: at most the plan's batch. Time, bits and errors are as for seq;
     * both may be less than the plan's. 0: the plan's batch. */
    uint64_t batch;
    /** The scale of this launch, the same on all ranks: 1e-20 to 1e20, since maxima are taken of scores before the
     * scale. For a negative scale, negate the queries. Ranks of a node that launch a plan with different scales get an
     * error, as for seq. 0: the plan's scale. */
    double scale;
    /** Striped attention: which rank has which stripe, seq / stripe numbers in device memory, the same on all ranks;
     * each rank has equally many. The rows of a rank's slice are those of its stripes, in ascending order. If the
     * numbers are wrong, prs_fused_poll_error() reports it (-EINVAL), and so are the results. NULL: zigzag. */
    const uint32_t *stripe_ranks;
    uint64_t reserved[PRS_RESERVED_WORDS - 4]; /**< 0 */
};

/** Enqueues one launch, by the rules of launches (fused.h). */
PRS_API int prs_attention_launch(struct prs_attention_plan *plan, const struct prs_attention_operands *operands,
                                 struct CUstream_st *stream);

/* ---- backward ---- */

struct prs_attention_backward_plan;

/** *Collective.* A plan of the backward pass, for results of a forward launch of the same shape: every shape that the
 * forward pass takes whose heads have 64 or 128 columns. In the tuning, `block_rows`, `overlap` and `mover` have only
 * one possible value here (0, or what the query says). `heads_per_step` counts KV heads; `workspace_limit` is for the
 * queries and gradients that other ranks send. They lie in memory that the context's plans of attention share, forward
 * and backward. The limit does not count the sums of dq. These take 4 bytes an element of the dq of all ranks, in
 * memory that all plans of the context share, and 2 bytes an element of what other ranks send and of what goes to other
 * nodes. However the ranks are divided into nodes, the gradients have the same bits.
 *
 * -EINVAL: a shape or tuning that cannot run; the text says what is wrong. -ENOTSUP: other heads, stripes between
 * nodes, or the kernels do not fit this GPU. -ENOMEM: not even two steps fit the limit. -EIO. */
PRS_API int prs_attention_backward_plan_open(struct prs_fused *ctx, const struct prs_attention_shape *shape,
                                             const struct prs_attention_tuning *tuning,
                                             struct prs_attention_backward_plan **out);
/** As prs_attention_plan_close() and prs_attention_plan_query(). */
PRS_API void prs_attention_backward_plan_close(struct prs_attention_backward_plan *plan);
PRS_API void prs_attention_backward_plan_query(const struct prs_attention_backward_plan *plan,
                                               struct prs_attention_info *info);

/** What one backward launch works on: device memory, 16-byte aligned (lse: 4-byte), not NULL. q, k, v, out and lse are
 * what the forward launch read and wrote, dout and dlse are the gradients of out and lse. A result must not overlap an
 * input or another result. */
struct prs_attention_gradients {
    const void *q, *k, *v, *out;
    const float *lse;
    const void *dout;          /**< as out */
    const float *dlse;         /**< as lse; NULL: zeros */
    void *dq;                  /**< as q */
    void *dk, *dv;             /**< as k and v; sums over the query heads that share a KV head, of all ranks */
    const int32_t *cu_seqlens; /**< as in the forward launch */
    uint32_t sequences;        /**< the same */
    /** sinks: as in the forward launch. dsinks: their gradient from the queries of this rank alone; the caller adds up
     * the dsinks of all ranks. Give both or neither. */
    const float *sinks;
    float *dsinks;
    uint64_t seq, batch; /**< as in the forward launch */
    /** As in the forward launch, whose lse follows from it: with another scale the gradients are wrong, and nothing
     * tells. 0: the plan's scale. */
    double scale;
    const uint32_t *stripe_ranks;              /**< as in the forward launch */
    uint64_t reserved[PRS_RESERVED_WORDS - 4]; /**< 0 */
};

/** Enqueues one backward launch, by the rules of launches (fused.h). Four kernels: one waits for the other plans'
 * launches (not with one rank), one computes sum(out * dout) of each row, one computes dk, dv and the parts of all
 * ranks' dq that this rank's keys contribute, and one adds up dq. Packed sequences or assigned stripes take one more
 * kernel, and sinks another one.
 * P and dS are rounded to bf16 for the products; each gradient is summed in fp32 in a fixed order, and rounded once.
 * Parts of dq travel between ranks with a sign and 13 bits, relative to the largest of four neighbours, so dq of
 * several ranks is as exact as that of one. Results repeat bit by bit. */
PRS_API int prs_attention_backward_launch(struct prs_attention_backward_plan *plan,
                                          const struct prs_attention_gradients *operands, struct CUstream_st *stream);

#ifdef __cplusplus
}
#endif

#endif
