/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Matrix products, MoE dispatch and attention fused with their communication, for Hopper GPUs. A launch is one or two
 * kernels in which every SM computes while data travels; ranks of one node reach each other's memory over NVLink, nodes
 * are connected by RDMA.
 *
 * Terms. W = world, the number of ranks; one rank = one GPU. A node holds up to PRS_MAX_LOCAL_RANKS ranks, and all
 * nodes hold as many. All matrices are row-major, bf16, or for products fp16 (prs_gemm_shape.dtype); sums are fp32.
 * m, n, k are the dimensions of the product that a rank takes part in:
 *
 *     operation        A (this rank)    B (this rank)    C (this rank)    meaning
 *     ALONE            [m, k]           [k, n]           [m, n]           C = A B, no communication
 *     REDUCE_SCATTER   [m, k]           [k, n]           [m / W, n]       C = rows rank * m/W ... of the sum of all A B
 *     ALLGATHER        [m / W, k]       [k, n]           [m, n]           C = (the A of all ranks, stacked) B
 *     ALLREDUCE        [m, k]           [k, n]           [m, n]           C = the sum of all A B
 *
 * B may instead be given as [n, k], its transpose, which is how torch.nn.Linear keeps weights.
 *
 * Sums. A rank's partial product is rounded to the type of A and B once to travel; the owner adds its own fp32 sum and
 * the others' in a fixed order and rounds once more. Results repeat bit by bit for the same inputs, shape and tuning.
 *
 * Returns. 0 or -errno. An error is logged where it is found; prs_fused_error_text() returns the text.
 *
 * Threads. A context and its plans must be used by one thread at a time, but for prs_fused_poll_error() and
 * prs_fused_abort(). Different contexts are independent; ranks may be threads of one process or processes of one host.
 * Calls marked *collective* must be made by all ranks in the same order; they block in the caller's allgather. Where one
 * rank fails, or passes something that must be the same on all ranks and is not, the call fails on all ranks, and the
 * text names the rank and what differs. Functions make the context's device current while they run and restore the
 * caller's device.
 *
 * Memory. A context has arenas of device memory, which grow when a plan or an allocation needs more than is free. Where
 * there is room, opening a plan costs one allgather, no cudaMalloc() and no synchronisation of the device. Closing a
 * plan and freeing memory are local and wait for nobody. The memory can be used again when all ranks have closed it,
 * which they learn in the next collective call, and goes back to CUDA when the context is closed.
 *
 * Ownership. Plans and symmetric memory belong to their context and must be released before it, by their own calls.
 * What a caller passes in structs is copied; buffers of a launch must stay until it is done in stream order.
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
struct prs_gemm_plan;
struct CUstream_st;

/** Ranks of one node. The number of nodes is not limited by it. */
enum { PRS_MAX_LOCAL_RANKS = 8 };

/** Gives `bytes` bytes of each rank to all ranks: all[r] = what rank r gave, in rank order. Returns 0 or -errno;
 * anything above 0 is taken for a failure (-EIO). */
typedef int prs_fused_allgather_fn(void *user, const void *mine, void *all, size_t bytes);

/** One rank of a job. Fields that are 0 have the default that they name. */
struct prs_fused_config {
    uint32_t rank, world;
    int device;                        /**< CUDA device ordinal of this rank */
    uint32_t timeout_ms;               /**< how long a kernel waits for another rank; 0: 600000 */
    prs_fused_allgather_fn *allgather; /**< may be NULL when world is 1 */
    void *user;                        /**< for allgather */
    /** Ranks with equal numbers share a node. 0: PERSEUS_NODE, else the machine's boot id and network. */
    uint64_t node;
    /** SMs that the fused kernels of this context take at most, so that others run beside them; the same on all ranks.
     * 0: all. */
    uint32_t max_sms;
};

/** *Collective.* -ENODEV: no Hopper GPU, or several nodes and no RDMA device. -EXDEV: a peer's memory cannot be mapped.
 * -EINVAL: also for nodes of unequal size, or whose ranks are not consecutive, and for ranks that differ in the version
 * of the library, the name of their GPU, or the SMs that they may use. -ETIMEDOUT: a rank cannot be reached;
 * the text names it. -ENOMEM, -EIO. */
PRS_API int prs_fused_open(const struct prs_fused_config *config, struct prs_fused **out);
/** Plans and symmetric memory of the context must have been released, and none of its launches may run. NULL does
 * nothing.
 *
 * Memory that other ranks can write is freed when they have closed the context too. On one node the call waits for them
 * for 5 s at most; several nodes: *collective*. After an error that prs_fused_poll_error() reports (but not -EINVAL: a
 * number of rows that cannot be), or prs_fused_abort(), the call is local and waits for no rank: after a lost rank the
 * others close, and open a smaller world. What could not be freed is freed when a context is opened on the same device
 * after all ranks of the old one on this node have closed it or their processes have ended, or at exit. Ranks that have seen
 * no error call prs_fused_abort() first. */
PRS_API void prs_fused_close(struct prs_fused *ctx);

/** *Collective.* Zeroed device memory that every rank of the node maps; the same size on all ranks. Results of
 * ALLREDUCE must lie in such memory, or in imported memory, at the same offset on every rank, unless shape.c_anywhere
 * is set. Free it with prs_fused_free(), not with cudaFree(). -ENOMEM: also for more than 4095 plans and allocations in
 * a context. */
PRS_API int prs_fused_alloc(struct prs_fused *ctx, size_t bytes, void **out);
/** *Collective.* Memory of the caller's that all ranks of the node have mapped, a buffer of torch's symmetric memory for
 * example, or VMM handles, or a part of NVSHMEM's heap. at[i]: the memory of the node's i-th rank, in rank order and this
 * rank included, as kernels of this rank reach it, 16-byte aligned; `bytes` is the same on all ranks. Results of
 * ALLREDUCE may then lie there. The memory stays the caller's. Give it up with prs_fused_free(ctx, at[own]), after which
 * the caller may unmap and free it on one node. Several nodes: the memory is registered with the network too, and must
 * stay until a collective call after which all ranks have given it up. -EINVAL, -ENOMEM; several nodes: -ENOTSUP, -EIO
 * when it cannot be registered. */
PRS_API int prs_fused_import(struct prs_fused *ctx, void *const *at, size_t bytes);
/** Local. No launch of this rank that uses the memory may be in flight. -EINVAL: not the start of such memory. */
PRS_API int prs_fused_free(struct prs_fused *ctx, void *ptr);

/* ---- matrix products ---- */

enum prs_gemm_op { PRS_GEMM_ALONE = 0, PRS_GEMM_REDUCE_SCATTER = 1, PRS_GEMM_ALLGATHER = 2, PRS_GEMM_ALLREDUCE = 3 };

/** What is applied to each element of the finished sum, in fp32: C = activation(sum + bias) + residual; for a gated
 * product see struct prs_gemm_shape. */
enum prs_activation {
    PRS_ACTIVATION_NONE = 0,
    PRS_ACTIVATION_RELU = 1,
    PRS_ACTIVATION_GELU = 2,      /**< x * (1 + erf(x / sqrt(2))) / 2 */
    PRS_ACTIVATION_GELU_TANH = 3, /**< its approximation by tanh */
    PRS_ACTIVATION_SILU = 4       /**< x / (1 + exp(-x)) */
};

/** Of the elements of a product's matrices. */
enum prs_dtype {
    PRS_DTYPE_BF16 = 0,
    PRS_DTYPE_FP16 = 1, /**< IEEE binary16, with subnormal numbers; what is above 65504 rounds to infinity */
    PRS_DTYPE_FP32 = 2  /**< of C only */
};

/** A product that a rank takes part in; see the table at the top. The same on all ranks. Set all fields that are not
 * named to 0, so that a later version can add some. */
struct prs_gemm_shape {
    enum prs_gemm_op op;
    uint32_t m, n, k;      /**< W divides m for REDUCE_SCATTER and ALLGATHER */
    uint32_t b_transposed; /**< B is [n, k] */
    uint32_t activation;   /**< enum prs_activation */
    /** Elements from one row of A, B, C to the next: multiples of 8, at least a row. 0: rows without gaps. With gaps the
     * plan takes the fused path. Between nodes the C of an ALLREDUCE has no gaps. */
    uint32_t lda, ldb, ldc;
    /** 1: a gated product, of weights gate | up as torch.cat makes them. The first n / 2 columns of B (rows, when B is
     * [n, k]) are the gate, and C has n / 2 columns: C = activation(gate + bias) * (up + bias of its columns) + residual.
     * n is even. REDUCE_SCATTER and ALLREDUCE take the fused path. */
    uint32_t gated;
    /** 1: the C of an ALLREDUCE may lie in any device memory, without gaps. Except for few rows on one node, the ranks then
     * store the result into memory that all plans of the context share, and a copy from there ends the launch. */
    uint32_t c_anywhere;
    uint32_t dtype; /**< enum prs_dtype: of A, B, bias and gathered, and of sums that travel */
    /** PRS_DTYPE_FP32: C and residual are fp32, for weight gradients and logits; with residual = C a launch adds to what is
     * there. The plan takes the unfused path. Not for an ALLREDUCE between nodes. 0: C and residual are of type dtype. */
    uint32_t c_dtype;
};

enum prs_gemm_path { PRS_GEMM_PATH_AUTO = 0, PRS_GEMM_PATH_FUSED = 1, PRS_GEMM_PATH_UNFUSED = 2 };

/** How an SM sends. PRS_GEMM_PACED: the next slab only after the one before has landed; ALLGATHER: to one rank after
 * the other. PRS_GEMM_UNPACED: as many slabs as its buffers hold; ALLGATHER: to all ranks at once. */
enum prs_gemm_pace { PRS_GEMM_UNPACED = 1, PRS_GEMM_PACED = 2 };

/** What moves the blocks of an all-gather, or the keys and values of attention.
 *
 * Copy engines move one piece after the other, to one rank after the other. Each piece and rank takes some 3 us of host
 * time, two or three times, while the kernel runs. They work inside one node only, and not where two ranks share a GPU,
 * because copies from a GPU to itself are kernels. CTAs push the data themselves, everywhere. */
enum prs_mover { PRS_MOVED_BY_COPY_ENGINES = 1, PRS_MOVED_BY_CTAS = 2 };

/** A field that is 0 is chosen by the plan. The same on all ranks. */
struct prs_gemm_tuning {
    uint32_t path;     /**< enum prs_gemm_path */
    uint32_t clusters; /**< pairs of SMs that work, at most half the SMs */
    uint32_t band;     /**< row pairs (256 rows) that are communicated together */
    uint32_t mover;    /**< ALLGATHER: enum prs_mover; 0 in a plan of another operation */
    uint32_t segments; /**< ALLGATHER by copy engines: pieces along k in which a band travels */
    uint32_t spread;   /**< percent of the compute time over which an SM spreads what it sends; 1: no pauses */
    uint32_t paced;    /**< enum prs_gemm_pace */
    /** Between nodes: tiles of 64 KB, of one band, that travel in one put with one signal. */
    uint32_t tiles_per_signal;
};

/** What a plan of a product has decided. */
struct prs_gemm_info {
    struct prs_gemm_tuning tuning; /**< all fields decided */
    uint64_t workspace_bytes;      /**< device memory on this rank beside A, B and C, of this plan alone */
    uint64_t sent_bytes;           /**< per launch over NVLink, from this rank */
    uint64_t far_bytes;            /**< per launch to other nodes, from this rank */
    /** A model. Fused: the start of the pipeline, and the longer of compute and communication. Unfused: their sum.
     * ALLGATHER on one node: the schedule simulated step by step, or an estimate for pushing. */
    double predicted_us;
    const char *reason;    /**< why the path was chosen; static text */
    uint64_t shared_bytes; /**< device memory that it shares with other plans of the context: counted in each of them */
};

/** *Collective.* tuning NULL: the entry that rank 0 finds in its tuning file (PERSEUS_FUSED_TUNING), or the analytic
 * default. A shape takes the unfused path (cuBLASLt, then separate communication) when the fused kernel cannot run it,
 * because n or k is not a multiple of 8, or would be slower; prs_gemm_plan_query() says so. -EINVAL: no path can run
 * it, or the path that the tuning forces cannot. -ENOMEM, -EIO. */
PRS_API int prs_gemm_plan_open(struct prs_fused *ctx, const struct prs_gemm_shape *shape,
                               const struct prs_gemm_tuning *tuning, struct prs_gemm_plan **out);
/** Local. No launch of the plan may be in flight on this rank, and no graph with one may run later. NULL does
 * nothing. */
PRS_API void prs_gemm_plan_close(struct prs_gemm_plan *plan);
/** Local; from any thread until the plan is closed. */
PRS_API void prs_gemm_plan_query(const struct prs_gemm_plan *plan, struct prs_gemm_info *info);

/** What one launch works on: device memory, 16-byte aligned, not NULL. Set all fields that are not named to 0, so that a
 * later version can add some. */
struct prs_gemm_operands {
    const void *a, *b;
    void *c;
    /** [n], added once to every row of the product; or NULL. ALLREDUCE: the same on all ranks. */
    const void *bias;
    /** As many rows and columns as C on this rank, with the row stride of C; or NULL. Without an
     * activation it may be C itself, to add to what is there. ALLREDUCE: the same on all ranks. */
    const void *residual;
    /** ALLGATHER: [m, k] without gaps, to which the launch also writes the A of all ranks, stacked, for the gradient
     * of B for example; or NULL. */
    void *gathered;
    /** Rows of this launch, the same on all ranks, at most shape.m: A, C and what travels are then as with a shape of m
     * rows. W divides m as it divides shape.m. 0: shape.m, or what m_on_device says. */
    uint32_t m;
    /** Where the kernel finds m when it starts (so that a captured graph serves any m), or NULL. m is then 0, the plan
     * takes the fused path, and A and C are as with shape.m rows, of which the first are used: of the first m / W rows
     * of each rank's A (ALLGATHER), or of the first m, come the first m rows of C (m / W for REDUCE_SCATTER). Rows of C
     * after them, up to a whole 64 of each block, are not defined. The number is a multiple of W for REDUCE_SCATTER, of
     * 64 W for ALLGATHER, and for ALLREDUCE between nodes. Otherwise nothing is computed, and prs_fused_poll_error()
     * says so (-EINVAL). */
    const uint32_t *m_on_device;
};

/**
 * Enqueues one launch on `stream` and returns. Every rank must launch a plan the same number of times, at any relative
 * timing, without host synchronisation in between. A launch may be captured into a CUDA graph and replayed. A and B
 * must not change, and C must not be read, until the launch is done in stream order. `operands` is copied.
 *
 * The launches of a context run one after the other on each rank, in one stream or with events between streams, because
 * plans share memory; and all ranks enqueue them in the same order, like calls on an NCCL communicator. For launches
 * that shall overlap open a context each.
 *
 * -EINVAL: a wrong pointer. -EIO: CUDA refuses the launch. The error of an earlier launch on this context, when one has
 * failed: then C is not valid, see prs_fused_poll_error().
 */
PRS_API int prs_gemm_launch(struct prs_gemm_plan *plan, const struct prs_gemm_operands *operands,
                            struct CUstream_st *stream);

/** *Collective.* Times the candidates for this shape on the given operands (C is overwritten), `rounds` launches each,
 * and returns the one whose slowest rank is fastest. With PERSEUS_FUSED_TUNING set, rank 0 also appends it to that
 * file. Waits for the launches. Errors: those of prs_gemm_plan_open() and prs_gemm_launch(). */
PRS_API int prs_gemm_autotune(struct prs_fused *ctx, const struct prs_gemm_shape *shape,
                              const struct prs_gemm_operands *operands, uint32_t rounds, struct CUstream_st *stream,
                              struct prs_gemm_tuning *best);

/* ---- MoE ---- */

/**
 * MoE dispatch fused with the experts' product, and combine. Rank r owns experts r * E/W ... of E; with a map these are
 * places for experts (batch->placement). Each rank has up to `tokens` rows of `hidden` columns and, for each row, the
 * top_k experts that its router chose and their weights. Every token travels once to each rank that owns one of its
 * experts, or once to a node, whose ranks pass it on. There each (token, expert) becomes one row of
 *
 *     out[capacity, columns] = activation(token [hidden] times weights of the expert [hidden, columns])
 *
 * Rows of `out` lie expert by expert. The rows of expert e begin at expert_rows[e].first_row, a multiple of 128; rows
 * between two experts are not defined. Inside an expert rows are sorted by sender, then by token. Senders: this rank,
 * then the other ranks of its node in rank order, beginning after this rank; then, node by node, those of the next
 * nodes, each beginning with the rank of the same local rank as this one.
 *
 * A launch is two kernels in one stream. Routing computes counts, offsets and maps on the GPU. The product starts each
 * block of 128 rows of an expert as soon as its rows have arrived. The host takes no part.
 */
struct prs_moe_shape {
    uint32_t tokens;  /**< the most of any rank in one launch */
    uint32_t hidden;  /**< H, a multiple of 8 */
    uint32_t columns; /**< N, a multiple of 8; 0: a plan for prs_moe_dispatch() and prs_moe_combine() alone */
    uint32_t experts; /**< E, of all ranks: a multiple of W, at most 1024; with a map, the places for experts */
    uint32_t top_k;   /**< at most 32 */
    /** Rows of out on each rank, a multiple of 128; each expert that has rows takes whole 128s. 0: as many as can ever
     * arrive. May differ between ranks. */
    uint32_t capacity;
    uint32_t weights_transposed; /**< the experts' weights are [E/W, N, H]; 0: [E/W, H, N] */
    uint32_t activation;         /**< of the product: enum prs_activation */
    /** 1: the first N / 2 columns of the weights are the gate; out has N / 2 columns, activation(gate) * up. N is then a
     * multiple of 16. */
    uint32_t gated;
    uint32_t layer; /**< 1: a plan for prs_moe_layer(), too: memory for what lies between its two products */
    /** L, at most 1024: each dispatch comes with a map (batch->placement) of L experts, which the router chooses among,
     * to E places. 0: no map, an expert's number is its place. May differ between ranks, as `replicas` may. */
    uint32_t logical_experts;
    uint32_t replicas; /**< R, at most 64: places that the map has for each expert. 0 without a map */
};

/** A field that is 0 is chosen by the plan. */
struct prs_moe_tuning {
    uint32_t ctas;    /**< SMs that work */
    uint32_t cluster; /**< 2: pairs of SMs compute two column tiles of the same rows and load the rows once; 1: not */
    uint32_t route_ctas; /**< CTAs of the routing kernel */
    uint32_t spread;     /**< percent of the product's time over which an SM spreads what it sends; 1: no pauses */
    /* Several nodes, the same on all ranks: */
    uint32_t rows_per_signal; /**< rounded up to whole puts */
    uint32_t rows_per_put;    /**< at most rows_per_signal */
    /** 2: blocks without rows of other nodes are computed first, for half of the experts; 1: expert by expert. */
    uint32_t passes;
};

/** What a plan of MoE has decided. */
struct prs_moe_info {
    struct prs_moe_tuning tuning; /**< all fields decided */
    uint32_t capacity;
    uint64_t workspace_bytes; /**< device memory on this rank beside the caller's */
    /** Per launch over NVLink from this rank, when all ranks have `tokens` tokens and choices are even. */
    uint64_t sent_bytes;
    double predicted_us; /**< for the same */
    uint64_t maps_bytes; /**< of the maps of one dispatch */
};

/** Where a row of out came from. Rows that only fill an expert's last 128 have rank, token and slot UINT32_MAX. */
struct prs_moe_row {
    uint32_t rank, token;
    uint32_t slot; /**< of the token's top_k */
    float weight;
};

/** The rows of one expert. */
struct prs_moe_expert_rows {
    uint32_t first_row, rows; /**< first_row: a multiple of 128 */
};

/** How one launch went on this rank. Neither drops nor wrong choices stop anything: the launch, the other ranks and
 * later launches go on. */
struct prs_moe_status {
    uint32_t rows_needed;    /**< rows of out that all choices need; more than capacity: some were dropped */
    uint32_t rows_dropped;   /**< choices, of any rank, that found no room here: the last rows of the last experts */
    uint32_t wrong_choices;  /**< of this rank's choices: E (with a map: L) or more. They count as no choice */
    uint32_t wrong_token;    /**< the first of this rank's tokens with a wrong choice or place; UINT32_MAX: none */
    uint32_t tokens_dropped; /**< what *count_on_device has beyond shape.tokens */
    uint32_t absent_choices; /**< of this rank's choices: experts for which the map has no place. They count as none */
    uint32_t wrong_places;   /**< of this rank's choices: the map's place is E or more. They count as none */
    uint32_t unused;
};

/** Device memory of one launch, 16-byte aligned. What is const must not change, and the results must not be read, until
 * the launch is done in stream order. Set all fields that are not named to 0, so that a later version can add some. */
struct prs_moe_batch {
    const void *tokens;          /**< bf16 [count, H] */
    uint32_t count;              /**< 0 ... shape.tokens, may differ between ranks */
    const int64_t *chosen;       /**< [count, top_k], as from torch.topk; negative: no expert in this slot */
    const float *router_weights; /**< [count, top_k] */
    const void *weights;         /**< bf16, of this rank's experts */
    void *out;                   /**< bf16 [capacity, N], gated: [capacity, N / 2]; of a layer: [count, H] */
    struct prs_moe_row *rows;    /**< [capacity]; of a layer or a dispatch alone it may be NULL */
    struct prs_moe_expert_rows *expert_rows; /**< [E/W]; of a layer it may be NULL */
    /** NULL, or the count, which the kernel reads when it starts: so a captured graph serves any count. Then `count` is
     * ignored. */
    const uint32_t *count_on_device;
    struct prs_moe_status *status; /**< NULL, or written by the launch */
    /** NULL, or info.maps_bytes of device memory, 256-byte aligned, for what prs_moe_combine() and prs_moe_gemm() must
     * know of this dispatch. NULL: it stays in the plan until the plan's next dispatch. */
    void *maps;
    /** Of a layer: the second product's weights, bf16 [E/W, I, H], or [E/W, H, I] with weights_transposed; I is N,
     * gated N / 2. */
    const void *down;
    const void *residual; /**< of a layer: bf16 [count, H], which is added; it may be out itself; or NULL */
    /** Of prs_moe_dispatch(): 1: rows that only fill an expert's last 128 become zeros, for products over whole blocks. */
    uint32_t clear_fill;
    /** With shape.logical_experts: [L, R], the places that hold each expert; negative: none. A choice goes to one of
     * them: token t of rank r to entry (t + r) mod n of the n that are not negative, so that tokens take turns, in each
     * run alike; an entry may stand there twice. An expert without any is absent: its choices count as none, tokens
     * keep their other experts, and status->absent_choices says how many. Only the token's rank reads its map, when the
     * launch runs. So the map may differ between ranks (one may list its own replica alone), and may be written anew
     * between two launches, also those of a captured graph. Places must hold the weights that the map says. */
    const int32_t *placement;
    /** Of a layer: NULL, or what gradients need, which then stays here: the tokens in the rows of their experts, bf16
     * [capacity, H], where rows that only fill an expert's last 128 are zeros; and the first product before its
     * activation, rounded, bf16 [capacity, N], where such rows are not defined. Both or neither. */
    void *kept_rows;
    void *kept_columns;
};

struct prs_moe_plan;

/** *Collective.* tuning NULL: all fields chosen. -EINVAL: the shape cannot run, or differs between ranks. -ENOMEM,
 * -ENOTSUP, -EIO. */
PRS_API int prs_moe_plan_open(struct prs_fused *ctx, const struct prs_moe_shape *shape,
                              const struct prs_moe_tuning *tuning, struct prs_moe_plan **out);
/** Local, as prs_gemm_plan_close(). */
PRS_API void prs_moe_plan_close(struct prs_moe_plan *plan);
/** Local, as prs_gemm_plan_query(). */
PRS_API void prs_moe_plan_query(const struct prs_moe_plan *plan, struct prs_moe_info *info);

/** Enqueues one launch, by the rules of prs_gemm_launch(). Rows beyond capacity are dropped, and choices of experts
 * that do not exist are ignored: only batch->status says so. A plan with capacity 0 drops nothing. */
PRS_API int prs_moe_dispatch_gemm(struct prs_moe_plan *plan, const struct prs_moe_batch *batch,
                                  struct CUstream_st *stream);

/** Another product, with other weights of the same shape, of the rows that the last prs_moe_dispatch_gemm() in this
 * stream brought here. Of the batch only weights and out are used. Not collective. */
PRS_API int prs_moe_gemm(struct prs_moe_plan *plan, const struct prs_moe_batch *batch, struct CUstream_st *stream);

/** Dispatch for experts of the caller's: out gets the rows themselves, bf16 [capacity, H], in the order that is written
 * above. batch->weights is not used. By the rules of prs_gemm_launch(). */
PRS_API int prs_moe_dispatch(struct prs_moe_plan *plan, const struct prs_moe_batch *batch, struct CUstream_st *stream);

/** What prs_moe_combine() works on: device memory, 16-byte aligned. Set all fields that are not named to 0, so that a
 * later version can add some. */
struct prs_moe_results {
    const void *rows;     /**< bf16 [capacity, H]: what the experts made of the rows of a dispatch */
    void *out;            /**< bf16 [count, H]; count: that of the dispatch */
    const void *residual; /**< bf16 [count, H], which is added; it may be out itself; or NULL */
    const void *maps;     /**< as in the dispatch */
    uint32_t unweighted;  /**< 1: rows are added as they are; 0: times their router weights */
};

/** Combine: out = the sum of each token's rows, times their router weights, + residual. A rank adds up its experts'
 * rows of a token before they travel, so that each rank sends one row a token. Sums are fp32, in an order that the
 * choices alone determine; what another rank sends is rounded to bf16, and the result once more. Rows that a dispatch
 * has dropped, and slots without an expert, add nothing; a token without any gets the residual, or zeros.
 *
 * Between nodes, a node's ranks add up their sums of a token before it travels, so that one row a node comes back: it is
 * rounded once more. Any number of times after a dispatch, by all ranks alike, by the rules of prs_gemm_launch(). */
PRS_API int prs_moe_combine(struct prs_moe_plan *plan, const struct prs_moe_results *results,
                            struct CUstream_st *stream);

/** What prs_moe_dispatch_again() works on: device memory, 16-byte aligned. Set all fields that are not named to 0, so
 * that a later version can add some. */
struct prs_moe_again {
    const void *tokens;  /**< bf16 [count, H]; count: that of the dispatch. It may be NULL on a rank without tokens */
    void *out;           /**< bf16 [capacity, H] */
    const void *beside;  /**< bf16 [capacity, H], other rows of the same order; or NULL */
    float *products;     /**< [capacity]: of each token's row, not weighted, with the row of beside; NULL without it */
    const void *maps;    /**< as in the dispatch */
    uint32_t weighted;   /**< 1: rows are multiplied by their router weights, in fp32, and rounded once */
    uint32_t clear_fill; /**< as in the dispatch */
};

/** Dispatch along the maps of an earlier one, without routing: tokens[i] goes to the rows of that dispatch's token i.
 *
 * Gradients need it. The gradient of what prs_moe_combine() adds up (its rows) is the gradient of its result, dispatched
 * again and weighted. That of the router weights is `products`, with those rows as `beside`;
 * prs_moe_return_values() brings them to the tokens. The gradient of the tokens of prs_moe_dispatch() is
 * prs_moe_combine() of the rows' gradients, unweighted.
 *
 * products are sums in fp32, in a fixed order; those of rows that only fill up are not defined. Any number of times
 * after a dispatch, by all ranks alike, by the rules of prs_gemm_launch(). */
PRS_API int prs_moe_dispatch_again(struct prs_moe_plan *plan, const struct prs_moe_again *again,
                                   struct CUstream_st *stream);

/** What prs_moe_return_values() works on: device memory, 16-byte aligned. Set all fields that are not named to 0, so
 * that a later version can add some. */
struct prs_moe_values {
    const float *values;            /**< [capacity]: one of each row */
    const struct prs_moe_row *rows; /**< [capacity]: as the dispatch has written it to batch->rows */
    float *out;                     /**< [count, top_k]; it may be NULL on a rank without tokens */
    const void *maps;               /**< as in the dispatch */
};

/** A value of each row goes to the token and slot of the row. A slot without a row gets 0. Values arrive unchanged, down
 * to 2^-110 in size. H must be at least 3 top_k. Any number of times after a dispatch, by all ranks alike, by the rules
 * of prs_gemm_launch(). */
PRS_API int prs_moe_return_values(struct prs_moe_plan *plan, const struct prs_moe_values *values,
                                  struct CUstream_st *stream);

/** The whole layer, in one launch of four kernels: dispatch with the first product, whose activation (and gate) is
 * applied before its only rounding; the second product; combine, which adds batch->residual. For a plan with
 * shape.layer. By the rules of prs_gemm_launch(), and of prs_moe_combine().
 *
 * With batch->kept_rows the first product is rounded before its activation, which is a kernel of its own. */
PRS_API int prs_moe_layer(struct prs_moe_plan *plan, const struct prs_moe_batch *batch, struct CUstream_st *stream);

/** What prs_moe_multiply() works on: device memory, 16-byte aligned. Set all fields that are not named to 0, so that a
 * later version can add some. */
struct prs_moe_product {
    const void *rows;            /**< bf16 [capacity, k], in the order of a dispatch */
    const void *weights;         /**< bf16 [E/W, k, n] */
    void *out;                   /**< bf16 [capacity, n] */
    uint32_t k, n;               /**< multiples of 8 */
    uint32_t weights_transposed; /**< weights are [E/W, n, k] */
    const void *maps;            /**< as in the dispatch; it may be NULL as there */
};

/** Rows of any width, times the matrix of their expert. What becomes of rows that only fill up is not defined. Gradients
 * need it: weights transposed are the same memory with the other layout. By the rules of prs_gemm_launch(), but not
 * collective. */
PRS_API int prs_moe_multiply(struct prs_moe_plan *plan, const struct prs_moe_product *product,
                             struct CUstream_st *stream);

/** What prs_moe_activation_back() works on: device memory, 16-byte aligned, all of it needed. I is N, gated N / 2. Set
 * all fields that are not named to 0, so that a later version can add some. */
struct prs_moe_activation {
    const void *columns;            /**< bf16 [capacity, N]: the first product before its activation */
    const void *gradients;          /**< bf16 [capacity, I]: of the activated columns, not weighted */
    const struct prs_moe_row *rows; /**< [capacity]: as the dispatch has written it to batch->rows */
    void *of_columns;               /**< bf16 [capacity, N]: the gradients of `columns` */
    void *weighted;                 /**< bf16 [capacity, I]: the activated columns, times the router weight */
    float *products;                /**< [capacity]: of activated columns and `gradients`, not weighted */
    const void *maps;               /**< as in the dispatch; it may be NULL as there */
};

/** The gradients of a layer's activation, in one pass. With h = activation(gate) * up of a row, w its router weight and u
 * the row of `gradients`, which is (the gradient of the layer's result) times down transposed: of_columns are the
 * gradients of gate and up under w u, weighted is w h, and products is the sum of u h, which is the gradient of w. All in
 * fp32, each rounded once. Rows that only fill up become zeros in both matrices, for products over whole blocks. By the
 * rules of prs_gemm_launch(), but not collective. */
PRS_API int prs_moe_activation_back(struct prs_moe_plan *plan, const struct prs_moe_activation *activation,
                                    struct CUstream_st *stream);

/** What prs_moe_balance() reads, and where it writes: host memory. Set all fields that are not named to 0, so that a
 * later version can add some. */
struct prs_moe_loads {
    uint32_t world;           /**< W, at most 64 */
    uint32_t experts;         /**< E, the places: a multiple of W, at most 1024; as shape.experts */
    uint32_t logical_experts; /**< L, at most 1024; as in the shape */
    uint32_t replicas;        /**< R, at most 64; as in the shape */
    /** [L]: how often each expert is chosen, in any unit. Negative: the expert is absent and gets no place. At most E
     * experts are present. */
    const double *loads;
    int32_t *placement; /**< [L, R]: the map; copy it to device memory for batch->placement */
    int32_t *held;      /**< [E], or NULL: the expert whose weights each place must hold; -1: none */
    double *rank_loads; /**< [W], or NULL: what each rank gets if the loads stay as they are */
};

/** A map for skewed loads: hot experts get several places, and ranks loads as even as can be. Local, on the host,
 * without a context; the same input gives the same map everywhere.
 *
 * Each present expert has a place. Of the places that are left, each goes to the expert with the largest load a replica
 * (the divisor method of Adams), while it has fewer than R and W. Then replicas are assigned, heaviest first, each to the
 * rank with the least load that has room (longest processing time first; R. L. Graham, Bounds on Multiprocessing Timing
 * Anomalies, 1969), replicas of an expert to different ranks. -EINVAL, -ENOMEM. */
PRS_API int prs_moe_balance(const struct prs_moe_loads *loads);

/* ---- ring attention ---- */

/**
 * Forward attention over a sequence that is split among the ranks. Each rank has the queries, keys and values of its
 * slice, and gets the rows of the result that belong to its queries, as if it had seen the whole sequence.
 *
 *     out = softmax(scale * q kT) v,  lse = log(sum(exp(scale * q kT)))
 *
 * Slices. Not causal: rank r has positions r * seq / W ... of the sequence. Causal with W > 1: the sequence is cut into
 * 2 W chunks, and rank r has chunk r followed by chunk 2 W - 1 - r (zigzag), which gives all ranks the same work. Query
 * head h uses KV head h / (heads_q / heads_kv).
 *
 * Tensors, bf16, rows = seq / W: q and out [batch, rows, heads_q, head_dim], k and v [batch, rows, heads_kv, head_dim],
 * or with `heads_first` [batch, heads, rows, head_dim], as torch's scaled_dot_product_attention has them. lse is fp32
 * [batch, heads_q, rows] in both layouts. The softmax is fp32 and stays in registers from the first key to the last.
 * The probabilities are rounded to bf16 once, the result once. Results repeat bit by bit.
 *
 * Sources: H. Liu, M. Zaharia, P. Abbeel, Ring Attention with Blockwise Transformers, 2023 (arXiv 2310.01889); the
 * kernel's pipeline: J. Shah et al., FlashAttention-3, 2024 (arXiv 2407.08608).
 */
struct prs_attention_shape {
    uint32_t batch, heads_q, heads_kv; /**< heads_kv divides heads_q */
    uint32_t head_dim;                 /**< 64 or 128 */
    uint32_t seq;                      /**< of the whole sequence; a multiple of W, causal with W > 1: of 2 W */
    uint32_t causal, heads_first;
    float scale; /**< 0: 1 / sqrt(head_dim) */
};

enum prs_attention_mode {
    PRS_ATTENTION_ALONE = 1,    /**< one rank: nothing travels */
    PRS_ATTENTION_RESIDENT = 2, /**< memory for the keys and values of all other ranks */
    PRS_ATTENTION_RING = 3      /**< memory for two steps of them: senders wait for credit */
};

/** A field that is 0 is chosen by the plan. The same on all ranks. */
struct prs_attention_tuning {
    uint32_t mode;           /**< enum prs_attention_mode */
    uint32_t ctas;           /**< SMs that work */
    uint32_t heads_per_step; /**< (batch, KV head) pairs that travel, and are worked on, together */
    uint32_t slab_rows;      /**< by CTAs: positions that share one arrival counter, a multiple of 64 */
    uint32_t spread;         /**< percent of the compute time over which an SM spreads what it sends; 1: no pauses */
    uint32_t block_rows;     /**< keys multiplied at a time: 176 (head_dim 128 on one node only) or 128 */
    /** 3: the softmax runs under products, of its own warpgroup and of the other one. 7 (one node only): also, results
     * are rescaled only when probabilities could exceed 2^8. */
    uint32_t overlap;
    uint32_t mover;           /**< enum prs_mover; copy engines need one node and PRS_ATTENTION_RESIDENT */
    uint64_t workspace_limit; /**< bytes; default: half of what is free on the fullest GPU */
};

struct prs_attention_plan;

/** What a plan of attention has decided. */
struct prs_attention_info {
    struct prs_attention_tuning tuning; /**< all fields decided */
    uint64_t workspace_bytes;           /**< device memory on this rank beside the tensors */
    uint64_t sent_bytes;                /**< per launch over NVLink, from this rank */
    double predicted_us;                /**< a model: the start of the pipeline, and the longer of compute and travel */
    const char *reason;                 /**< why the mode was chosen; static text */
};

/** *Collective.* -EINVAL: a shape or tuning that cannot run; the text says what is wrong. -ENOMEM: not even two steps
 * fit the limit. -ENOTSUP: the kernel does not fit this GPU. -EIO. */
PRS_API int prs_attention_plan_open(struct prs_fused *ctx, const struct prs_attention_shape *shape,
                                    const struct prs_attention_tuning *tuning, struct prs_attention_plan **out);
/** Local, as prs_gemm_plan_close(). */
PRS_API void prs_attention_plan_close(struct prs_attention_plan *plan);
/** Local, as prs_gemm_plan_query(). */
PRS_API void prs_attention_plan_query(const struct prs_attention_plan *plan, struct prs_attention_info *info);

/** Enqueues one launch, by the rules of prs_gemm_launch(). lse is 4-byte aligned, and may be NULL. */
PRS_API int prs_attention_launch(struct prs_attention_plan *plan, const void *q, const void *k, const void *v,
                                 void *out, float *lse, struct CUstream_st *stream);

/* ---- errors and statistics ---- */

/** "0.1.0": the version of the library, which may be newer than this header (CONTRIBUTING.md, "Stability"). */
PRS_API const char *prs_fused_version(void);

/** The text of this header as the library was built with it, for bindings that read layouts and functions from it. */
PRS_API const char *prs_fused_header(void);

/** What a kernel of this rank stopped waiting for or found wrong, or how the network between nodes failed. */
struct prs_fused_error {
    /** 0; -ETIMEDOUT; -ECANCELED: prs_fused_abort(), or another rank of this node gave up in a launch that this rank
     * took part in, so that what it sent may be wrong; or the network's -errno: waits end with it, and the next four
     * fields are 0 where no kernel waited. */
    int code;
    uint32_t from_rank; /**< the rank that should have raised the flag, or whose input is wrong */
    uint32_t flag, want, seen;
    uint64_t waited_ns;
    char text[256];
};

/** The text of the calling thread's last failed call: what failed, on which object, with which value, the likely cause.
 * Valid until the thread's next failure; empty before the first. */
PRS_API const char *prs_fused_error_text(void);

/** Returns error->code. Does not block; from any thread, at any time before prs_fused_close(). The first error stays, and
 * nothing more is launched on this context: close the plans and the context on all ranks and open them again. */
PRS_API int prs_fused_poll_error(struct prs_fused *ctx, struct prs_fused_error *error);

/** For a watchdog: gives up at once instead of at timeout_ms. Does not block; from any thread, at any time before
 * prs_fused_close(). Kernels of this rank that wait for another rank, now or later, end within some milliseconds, their
 * results are not valid, and no more are launched: prs_fused_poll_error() says -ECANCELED and, if a kernel waited, for
 * which rank. Ranks of the same node whose kernels wait end with it; every other rank needs a call of its own. */
PRS_API void prs_fused_abort(struct prs_fused *ctx);

/** What this rank has sent to other nodes since the context was opened; zeros on a single node. */
struct prs_fused_traffic {
    uint32_t nodes;
    uint32_t rails; /**< that this rank uses: those nearest to its GPU, divided among the ranks of the node */
    uint64_t puts, signals;
    uint64_t fences; /**< of the NIC, or waits for all completions, by the ordering policy (PERSEUS_ORDER) */
    uint64_t bytes;
};

/** Exact while no launch is in flight, but for the last signals of a launch of MoE, which say that it has ended: they may
 * be counted some microseconds later. */
PRS_API void prs_fused_traffic(const struct prs_fused *ctx, struct prs_fused_traffic *traffic);

#ifdef __cplusplus
}
#endif

#endif
