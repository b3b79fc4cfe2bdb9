/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Matrix products fused with their communication, for Hopper GPUs that reach each other's memory (NVLink). Each call is
 * one kernel launch in which every SM multiplies while tiles travel.
 *
 * Terms. W = world, the number of ranks; one rank = one GPU. All matrices are bf16, row-major, without gaps between
 * rows; sums are fp32. m, n, k are the dimensions of the product that a rank takes part in:
 *
 *     operation        A (this rank)    B (this rank)    C (this rank)     meaning
 *     GEMM             [m, k]           [k, n]           [m, n]            C = A B, no communication
 *     REDUCE_SCATTER   [m, k]           [k, n]           [m / W, n]        C = rows rank * m/W ... of the sum of all A
 * B ALLGATHER        [m / W, k]       [k, n]           [m, n]            C = (all A below each other) B ALLREDUCE [m,
 * k]           [k, n]           [m, n]            C = the sum of all A B
 *
 * B may instead be given as [n, k], its transpose, which is how torch.nn.Linear keeps weights.
 *
 * Sums. A rank's partial product is rounded to bf16 once to travel; the owner adds its own fp32 sum and the others' in
 * a fixed order and rounds once more. Results repeat bit by bit for the same inputs, shape and tuning.
 *
 * Returns. 0 is done; negative is -errno, already logged by whoever detected it.
 *
 * Threads. A context and its plans are for one thread at a time. Different contexts are independent; ranks may be
 * threads of one process or processes of one host. Calls marked *collective* must be made by all ranks in the same
 * order and block in the caller's allgather. Functions make the context's device current while they run and restore the
 * caller's.
 */
#ifndef PERSEUS_FUSED_H
#define PERSEUS_FUSED_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifndef PRS_API
#    define PRS_API __attribute__((visibility("default")))
#endif

struct prs_fused;
struct prs_fused_plan;
struct CUstream_st;

enum { PRS_MAX_LOCAL_RANKS = 8 }; /**< Ranks of one node, which map each other's memory. Any number of nodes. */

/** Gives `bytes` bytes of each rank to all: all[r] = what rank r gave, in rank order. 0 or -errno; anything
 * above 0 is taken for a failure (-EIO). */
typedef int prs_fused_allgather_fn(void *user, const void *mine, void *all, size_t bytes);

struct prs_fused_config {
    uint32_t rank, world;
    int device;                        /* CUDA device ordinal of this rank */
    uint32_t timeout_ms;               /* how long a kernel waits for another rank; 0: 10000 */
    prs_fused_allgather_fn *allgather; /* may be NULL when world is 1 */
    void *user;
    uint64_t node; /* ranks with equal numbers share a node; 0: PERSEUS_NODE, else the machine's boot id and network */
};

/** *Collective.* -ENODEV without a Hopper GPU, or without an RDMA device where there are several nodes; -EXDEV when a
 * peer's memory cannot be mapped, -EINVAL (also for nodes of unequal size, or whose ranks are not consecutive),
 * -ETIMEDOUT (a rank cannot be reached: the text names it), -ENOMEM, -EIO. */
PRS_API int prs_fused_open(const struct prs_fused_config *config, struct prs_fused **out);
/** *Collective* where there are several nodes. Plans and symmetric memory of the context must have been released. NULL
 * does nothing. */
PRS_API void prs_fused_close(struct prs_fused *ctx);

/** *Collective.* Device memory, zeroed, that every rank maps; the same size on all ranks. Results of ALLREDUCE must lie
 * in such memory, at the same offset on every rank. Freed by prs_fused_free() (also collective), not by cudaFree(). */
PRS_API int prs_fused_alloc(struct prs_fused *ctx, size_t bytes, void **out);
PRS_API int prs_fused_free(struct prs_fused *ctx, void *ptr);

enum prs_fused_op {
    PRS_FUSED_GEMM = 0,
    PRS_FUSED_REDUCE_SCATTER = 1,
    PRS_FUSED_ALLGATHER = 2,
    PRS_FUSED_ALLREDUCE = 3
};

struct prs_fused_shape {
    enum prs_fused_op op;
    uint32_t m, n, k;  /* W divides m for REDUCE_SCATTER and ALLGATHER */
    uint32_t b_is_n_k; /* B is [n, k] */
};

enum prs_fused_pace { PRS_UNPACED = 1, PRS_PACED = 2 };
/** Who moves an all-gather's blocks, or attention's keys and values. Copy engines: a piece after the other, to one rank
 * after the other; some 3 us of host time for each piece and rank, two or three times, beside the kernel. Or the CTAs
 * push them, which is the only way between nodes, and where two ranks share a GPU: its copies to itself are kernels. */
enum prs_mover { PRS_MOVED_BY_COPY_ENGINES = 1, PRS_MOVED_BY_CTAS = 2 };
enum prs_fused_path { PRS_PATH_AUTO = 0, PRS_PATH_FUSED = 1, PRS_PATH_UNFUSED = 2 };

/** 0 in a field: chosen by the plan. The same on all ranks. */
struct prs_fused_tuning {
    uint32_t path;      /* enum prs_fused_path */
    uint32_t clusters;  /* pairs of SMs that work, at most half the SMs */
    uint32_t band;      /* row pairs (256 rows) that are communicated together */
    uint32_t push_ctas; /* ALLGATHER by CTAs: how many push the own block, besides multiplying */
    uint32_t mover;     /* ALLGATHER, enum prs_mover; 0 in a plan of another operation */
    uint32_t segments;  /* ALLGATHER by copy engine: pieces along k in which a band travels */
    uint32_t spread;    /* percent of the compute time over which an SM spreads what it sends; 1: as fast as it can */
    uint32_t
        paced; /* enum prs_fused_pace. PRS_PACED: an SM sends a slab only when the one before has landed; ALLGATHER: to
                  one rank after the other. PRS_UNPACED: as many as its buffers hold; ALLGATHER: to all ranks at once */
    uint32_t tiles_per_signal; /* between nodes: pieces of 64 KB, of one band, that travel in one put with one signal */
};

struct prs_fused_plan_info {
    struct prs_fused_tuning tuning; /* all fields decided */
    uint64_t workspace_bytes;       /* device memory on this rank beside A, B and C */
    uint64_t sent_bytes;            /* per launch over NVLink, from this rank */
    uint64_t far_bytes;             /* per launch to other nodes, from this rank */
    double predicted_us; /* model: the start of the pipeline, and max(compute, communication); unfused: their sum;
                            ALLGATHER on one node: the schedule played, or pushing estimated */
    const char *reason;  /* why the path was chosen; static text */
};

/** *Collective.* tuning NULL: the entry that rank 0 finds in its tuning file (PERSEUS_FUSED_TUNING), or the analytic
 * default. A shape that the fused kernel cannot run (rows not a multiple of 16 bytes: n or k not a multiple of 8) or
 * cannot win takes the unfused path, and prs_fused_plan_query() says so; -EINVAL when no path can, or when it is forced
 * by the tuning and cannot. */
PRS_API int prs_fused_plan_open(struct prs_fused *ctx, const struct prs_fused_shape *shape,
                                const struct prs_fused_tuning *tuning, struct prs_fused_plan **out);
/** *Collective.* No launch of it may be in flight. NULL does nothing. */
PRS_API void prs_fused_plan_close(struct prs_fused_plan *plan);
PRS_API void prs_fused_plan_query(const struct prs_fused_plan *plan, struct prs_fused_plan_info *info);

/**
 * Enqueues one launch on `stream` and returns; every rank must do the same number of launches of a plan, in any
 * relative timing, without host synchronisation between them. May be captured into a CUDA graph and replayed. A and B
 * must not change, and C must not be read, until the launch is done in stream order. Launches of one plan must not
 * overlap on one rank. Launches of several plans may: but one that waits for other ranks keeps its SMs, so that two in
 * different streams, which ranks may begin in different order, wait for each other's until the limit (-ETIMEDOUT)
 * unless both fit on the GPU (tuning: clusters, ctas). One stream, or events between them, is the way round. Pointers
 * are 16-byte aligned, and not NULL. -EINVAL for a wrong pointer or a plan of another operation, -EIO when CUDA refuses
 * the launch, -ETIMEDOUT when an earlier launch gave up waiting (then C is not valid, see prs_fused_poll_error()).
 */
PRS_API int prs_fused_launch(struct prs_fused_plan *plan, const void *a, const void *b, void *c,
                             struct CUstream_st *stream);

/**
 * MoE dispatch fused with the experts' product. Rank r owns experts r * E/W ... of E. Each rank has up to `tokens` rows
 * of `hidden` columns and, for each of them, what its router chose: top_k experts and their weights. Every token
 * travels once to each rank that owns one of its experts; there each (token, expert) becomes one row of
 *
 *     out[capacity, columns] = token [hidden] times weights of the expert [hidden, columns]
 *
 * expert by expert. The rows of expert e begin at expert_rows[e].first_row; they are sorted by sender, beginning with
 * the own rank and then in rank order, then by token; on several nodes, this node's ranks come first, from the own one
 * on, then those of the nodes behind it, each from the rank with the same place on its node on. first_row is a multiple
 * of 128; rows of `out` between two experts are not defined. Two kernels in one stream: routing (counts, offsets and
 * maps, made on the GPU), and the product, which begins an expert's block of 128 rows when the rows are there. No step
 * of the host. To another node a token travels once, and is given to that node's ranks there.
 */
struct prs_moe_shape {
    uint32_t tokens;   /* the most of any rank in one launch */
    uint32_t hidden;   /* H, a multiple of 8 */
    uint32_t columns;  /* N, a multiple of 8 */
    uint32_t experts;  /* E, of all ranks: a multiple of W, at most 1024 */
    uint32_t top_k;    /* at most 32 */
    uint32_t capacity; /* rows of out on each rank, a multiple of 128; each expert with rows takes whole 128s. 0: as
                          many as can ever come. May differ between ranks. */
    uint32_t weights_are_n_h; /* the experts' weights are [E/W, N, H]; 0: [E/W, H, N] */
};

/** 0 in a field: chosen by the plan. */
struct prs_moe_tuning {
    uint32_t ctas;       /* SMs that work */
    uint32_t cluster;    /* 2: pairs of SMs compute two column tiles of the same rows and load them once; 1: not */
    uint32_t route_ctas; /* CTAs of the routing kernel */
    uint32_t spread; /* percent of the product's time over which an SM spreads what it sends; 1: as fast as it can */
    /* Several nodes, the same on all ranks: */
    uint32_t rows_per_signal; /* rows that one signal stands for, rounded up to whole puts */
    uint32_t rows_per_put;    /* at most rows_per_signal */
    uint32_t passes; /* 2: blocks without rows of other nodes are computed first, for half of the experts; 1: expert by
                        expert */
};

struct prs_moe_info {
    struct prs_moe_tuning tuning; /* all fields decided */
    uint32_t capacity;
    uint64_t workspace_bytes; /* device memory on this rank beside what the caller gives */
    uint64_t sent_bytes;      /* per launch over NVLink from this rank, when all have `tokens` tokens and choices are
                                 even */
    double predicted_us;      /* for the same */
};

/** Where a row of out came from. Rows that only fill an expert's last 128 have rank, token and slot UINT32_MAX. */
struct prs_moe_row {
    uint32_t rank, token;
    uint32_t slot; /* of the token's top_k */
    float weight;
};

struct prs_moe_expert_rows {
    uint32_t first_row, rows;
};

/** Device memory, 16-byte aligned, of one launch. What is const must not change, and the results must not be read,
 * until the launch is done in stream order. */
struct prs_moe_batch {
    const void *tokens;          /* bf16 [count, H] */
    uint32_t count;              /* 0 .. shape.tokens, any on each rank */
    const int64_t *chosen;       /* [count, top_k], as torch.topk gives them; negative: no expert in this slot */
    const float *router_weights; /* [count, top_k] */
    const void *weights;         /* bf16, of this rank's experts */
    void *out;                   /* bf16 [capacity, N] */
    struct prs_moe_row *rows;    /* [capacity] */
    struct prs_moe_expert_rows *expert_rows; /* [E/W] */
};

struct prs_moe_plan;

/** *Collective.* tuning NULL: all chosen. -EINVAL for a shape that cannot be, -ENOMEM, -ENOTSUP, -EIO. */
PRS_API int prs_moe_plan_open(struct prs_fused *ctx, const struct prs_moe_shape *shape,
                              const struct prs_moe_tuning *tuning, struct prs_moe_plan **out);
/** *Collective.* No launch of it may be in flight. NULL does nothing. */
PRS_API void prs_moe_plan_close(struct prs_moe_plan *plan);
PRS_API void prs_moe_plan_query(const struct prs_moe_plan *plan, struct prs_moe_info *info);

/** Enqueues one launch, as prs_gemm() and the others do: same rules for ranks, graphs and errors. More rows than
 * capacity: nothing is computed on that rank, and the error (-ENOSPC: rank, expert, rows, capacity) comes out of
 * prs_fused_poll_error() and every later call; the other ranks go on. */
PRS_API int prs_moe_dispatch_gemm(struct prs_moe_plan *plan, const struct prs_moe_batch *batch,
                                  struct CUstream_st *stream);

/** Another product (other weights of the same shape) of the rows that the last prs_moe_dispatch_gemm() in this stream
 * brought here; of the batch only weights and out are used. Not collective. */
PRS_API int prs_moe_gemm(struct prs_moe_plan *plan, const struct prs_moe_batch *batch, struct CUstream_st *stream);

/** What a kernel of this rank gave up waiting for or found wrong, or what the network between nodes failed with. */
struct prs_fused_error {
    int code;           /* 0, -ETIMEDOUT; -ECANCELED: another rank of this node gave up in a launch that this one took
                           part in, so that what came from it may be wrong; MoE: -ENOSPC (capacity), -EINVAL (an expert
                           that does not exist); or the network's -errno, which leaves the four numbers below 0 */
    uint32_t from_rank; /* who should have raised the flag, or whose input or capacity is wrong */
    uint32_t flag, want, seen;
    uint64_t waited_ns;
    char text[256];
};

/** The text of the calling thread's last failed call: what failed, on which object, with which value, the likely cause.
 * Valid until the thread's next failure; empty before the first. */
PRS_API const char *prs_fused_error_text(void);

/** Does not block and may be called while kernels run. Sticky: the first error stays, and nothing more is launched on
 * this context: plans and context are to be closed, on all ranks, and opened anew. Returns error->code. */
PRS_API int prs_fused_poll_error(struct prs_fused *ctx, struct prs_fused_error *error);

/** What this rank has sent to other nodes since the context was opened; zeros on a single node. */
struct prs_fused_traffic {
    uint32_t nodes;
    uint32_t rails; /* by which this rank reaches them: those nearest to its GPU, shared out among the node's ranks */
    uint64_t puts, signals;
    uint64_t fences; /* of the NIC, or waits for all completions, by the ordering policy (PERSEUS_ORDER) */
    uint64_t bytes;
};

/** Exact while no launch is in flight. */
PRS_API void prs_fused_traffic(const struct prs_fused *ctx, struct prs_fused_traffic *traffic);

/** *Collective.* Times the candidates for this shape on the given buffers (C is overwritten), `rounds` launches each,
 * and gives the one whose slowest rank is fastest. With PERSEUS_FUSED_TUNING set, rank 0 also appends it to that file.
 */
PRS_API int prs_autotune(struct prs_fused *ctx, const struct prs_fused_shape *shape, const void *a, const void *b,
                         void *c, uint32_t rounds, struct CUstream_st *stream, struct prs_fused_tuning *best);

/* ---- ring attention ---- */
/**
 * Forward attention over a sequence that is shared out among the ranks: each rank has the queries, keys and values of
 * its share and gets the rows of the result that belong to its queries, as if it had looked at the whole sequence.
 *
 *     out = softmax(scale * q kT) v,  lse = log(sum(exp(scale * q kT)))
 *
 * Shares. Not causal: rank r has positions r * seq / W ... of the sequence. Causal with W > 1: the sequence is cut into
 * 2 W chunks and rank r has chunk r followed by chunk 2 W - 1 - r (zigzag), which gives all ranks the same work. Query
 * head h looks at KV head h / (heads_q / heads_kv).
 *
 * Tensors, bf16, rows = seq / W: q and out [batch, rows, heads_q, head_dim], k and v [batch, rows, heads_kv, head_dim],
 * or with `heads_first` [batch, heads, rows, head_dim], as torch's scaled_dot_product_attention has them. lse is fp32
 * [batch, heads_q, rows] in both. The softmax is fp32 and lives in registers from the first key to the last; the
 * probabilities are rounded to bf16 once, the result once. Results repeat bit by bit.
 */
struct prs_attention_shape {
    uint32_t batch, heads_q, heads_kv; /* heads_kv divides heads_q */
    uint32_t head_dim;                 /* 64 or 128 */
    uint32_t seq;                      /* of the whole sequence; W, causal 2 W, divides it */
    uint32_t causal, heads_first;
    float scale; /* 0: 1 / sqrt(head_dim) */
};

enum prs_attention_mode {
    PRS_ATTENTION_ALONE = 1,    /* one rank: nothing travels */
    PRS_ATTENTION_RESIDENT = 2, /* the other ranks' keys and values all have a place here */
    PRS_ATTENTION_RING = 3      /* only those of two groups of heads have: senders wait for credit */
};

/** 0 in a field: chosen by the plan. The same on all ranks. */
struct prs_attention_tuning {
    uint32_t mode;            /* enum prs_attention_mode */
    uint32_t ctas;            /* SMs that work */
    uint32_t heads_per_step;  /* (batch, KV head) pairs that travel, and are worked on, together */
    uint32_t slab_rows;       /* pushed: positions that share one arrival counter, a multiple of 64 */
    uint32_t push_ctas;       /* SMs that send, besides computing; 0: copy engines do */
    uint32_t spread;          /* percent of the compute time over which an SM spreads what it sends; 1: at once */
    uint32_t block_rows;      /* keys of one step: 176 or 128, as compiled */
    uint32_t overlap;         /* bits: 1 softmax under products of the same warpgroup, 2 under the other's, 4 results
                             multiplied only when probabilities could exceed 2^8 */
    uint32_t mover;           /* enum prs_mover: who moves keys and values. Copy engines: on one node, resident */
    uint64_t workspace_limit; /* bytes; default half of what is free on the fullest GPU */
};

struct prs_attention_plan;

struct prs_attention_info {
    struct prs_attention_tuning tuning; /* all fields decided */
    uint64_t workspace_bytes;           /* device memory on this rank beside the tensors */
    uint64_t sent_bytes;                /* per launch over NVLink, from this rank */
    double predicted_us;                /* model: max(compute, communication) and the start of the pipeline */
    const char *reason;                 /* why the mode was chosen; static text */
};

/** *Collective.* -EINVAL for a shape or tuning that cannot run (logged with what is wrong), -ENOMEM when not even the
 * two-buffer ring fits the limit, -ENOTSUP for other GPUs or several nodes. */
PRS_API int prs_attention_plan_open(struct prs_fused *ctx, const struct prs_attention_shape *shape,
                                    const struct prs_attention_tuning *tuning, struct prs_attention_plan **out);
/** *Collective.* No launch of it may be in flight. NULL does nothing. */
PRS_API void prs_attention_plan_close(struct prs_attention_plan *plan);
PRS_API void prs_attention_plan_query(const struct prs_attention_plan *plan, struct prs_attention_info *info);

/** Enqueues one launch; the rules and returns are those of the matrix products above. lse may be NULL. */
PRS_API int prs_ring_attention(struct prs_attention_plan *plan, const void *q, const void *k, const void *v, void *out,
                               float *lse, struct CUstream_st *stream);

#ifdef __cplusplus
}
#endif

#endif
