/* SPDX-License-Identifier: Apache-2.0 */
/**
 * The context of fused kernels for Hopper GPUs: matrix products (gemm.h), MoE (moe.h) and attention (attention.h), each
 * fused with its communication. A launch is a few kernels in which every SM computes while data travels. Ranks of one
 * node reach each other's memory over NVLink; between nodes data travels by RDMA.
 *
 * Terms. W = world, the number of ranks; one rank = one GPU. A node holds up to PRS_MAX_LOCAL_RANKS ranks, and all
 * nodes hold the same number. All matrices are row-major. On a rank, sums are computed in fp32.
 *
 * Calls. Each family has plans and launches. A plan is made from a shape and a tuning; where the tuning is NULL, or a
 * field of it is 0, the plan chooses. Launches are prs_<family>_...(plan, operands, stream).
 *
 * Launches. A launch is enqueued on `stream` and the call returns. Every rank must launch a plan the same number of
 * times, at any relative timing, without host synchronisation in between. A launch may be captured into a CUDA graph
 * and replayed. What it reads must not change, and what it writes must not be read, until it is done in stream order.
 * The struct of operands is copied. -EINVAL: a wrong pointer or size. -EIO: CUDA refuses the launch. If an earlier
 * launch on this context has failed, its error is returned, and results are not valid (see prs_fused_poll_error()).
 *
 * The launches of a context run one after the other on each rank, in one stream or with events between streams, because
 * plans share memory; and all ranks enqueue them in the same order, like calls on an NCCL communicator. To let launches
 * overlap, open a context for each.
 *
 * Returns. 0 or -errno. The function that finds an error logs it; prs_fused_error_text() returns the text.
 *
 * Threads. A context and its plans must be used by one thread at a time, except for prs_fused_poll_error() and
 * prs_fused_abort(). Different contexts are independent; ranks may be threads of one process or processes of one host.
 * Calls marked *collective* must be made by all ranks in the same order; they block in the caller's allgather. If one
 * rank fails, or passes a value that must be equal on all ranks but differs, the call fails on all ranks. The text
 * names the rank and what differs. Functions make the context's device current while they run and restore the caller's
 * device.
 *
 * Memory. A context has arenas of device memory, which grow when a plan or an allocation needs more than is free. If
 * there is room, opening a plan costs one allgather, no cudaMalloc() and no synchronisation of the device. Closing a
 * plan and freeing memory are local and wait for nobody. The memory of a plan or allocation can be used again when all
 * ranks have released it, which they learn in the next collective call. It goes back to CUDA when the context is
 * closed.
 *
 * Ownership. Plans and symmetric memory belong to their context and must be released before it, by their own calls.
 * What a caller passes in structs is copied; buffers of a launch must stay until it is done in stream order.
 *
 * Time limits and `reserved` words: common.h.
 */
#ifndef PERSEUS_FUSED_H
#define PERSEUS_FUSED_H

#include <perseus/common.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct prs_fused;
struct CUstream_st;

/** Ranks of one node. The number of nodes is not limited by it. */
enum { PRS_MAX_LOCAL_RANKS = 8 };

/** One rank of a job. Fields that are 0 have the default that they name. */
struct prs_fused_config {
    uint32_t rank, world;
    int device;                  /**< CUDA device ordinal of this rank */
    uint32_t timeout_ms;         /**< of each wait of a kernel for another rank (common.h) */
    prs_allgather_fn *allgather; /**< may be NULL when world is 1 */
    void *user;                  /**< for allgather */
    /** Ranks with equal numbers share a node. 0: PERSEUS_NODE, else the machine's boot id and network. */
    uint64_t node;
    /** The most SMs that fused kernels of this context take, so that other kernels run at the same time; equal on all
     * ranks. 0: all. */
    uint32_t max_sms;
    /** 1: prs_fused_sleep() may give the context's memory back. One node only; equal on all ranks. */
    uint64_t sleeps;
    uint64_t reserved[PRS_RESERVED_WORDS - 1]; /**< 0 */
};

/** *Collective.* -ENODEV: no Hopper GPU, or several nodes and no RDMA device. -EXDEV: a peer's memory cannot be mapped.
 * -EOPNOTSUPP: several nodes, and `sleeps`. -EINVAL: also for nodes of unequal size, for nodes whose ranks are not
 * consecutive, and for ranks that differ in the version of the library, in `sleeps`, in the name of their GPU or in the
 * SMs that they may use. -ETIMEDOUT: a rank cannot be reached; the text names it. -ENOMEM, -EIO. */
PRS_API int prs_fused_open(const struct prs_fused_config *config, struct prs_fused **out);
/** Plans and symmetric memory of the context must have been released, and none of its launches may run. NULL does
 * nothing.
 *
 * Memory that other ranks can write is freed when they have closed the context too. On one node the call waits for
 * them for 5 s at most; several nodes: *collective*. After an error that prs_fused_poll_error() reports (other than an
 * impossible number of rows on the device), or after prs_fused_abort(), the call is local and waits for no rank. So
 * after a lost rank the others can close, and open a smaller world. Memory that could not be freed is freed at exit,
 * or when a context is opened on the same device. For that, all ranks of the old context on this node must have closed
 * it, or their processes must have ended. Ranks that have seen no error call prs_fused_abort() first. */
PRS_API void prs_fused_close(struct prs_fused *ctx);

/** *Collective.* Zeroed device memory that every rank of the node maps; the same size on all ranks. Results of
 * ALLREDUCE must lie in such memory, or in imported memory, at the same offset on every rank, unless shape.c_anywhere
 * is set. Free it with prs_fused_free(), not with cudaFree(). -ENOMEM: also for more than 4095 plans and allocations in
 * a context. A plan of a product that was opened without a tuning may count as up to 7 plans (gemm.h). */
PRS_API int prs_fused_alloc(struct prs_fused *ctx, size_t bytes, void **out);
/** *Collective.* Lets kernels use memory of the caller that all ranks of the node have mapped: for example a buffer of
 * torch's symmetric memory, VMM handles, or a part of NVSHMEM's heap. at[i] is the address at which kernels of this
 * rank reach the memory of the node's i-th rank, in rank order, this rank included. It is 16-byte aligned; `bytes` is
 * the same on all ranks. Results of ALLREDUCE may then lie there. The memory stays the caller's. Give it up with
 * prs_fused_free(ctx, at[own]), after which the caller may unmap and free it on one node. Several nodes: the memory is
 * registered with the network too, and must stay until a collective call after which all ranks have given it up.
 * -EINVAL, -ENOMEM; several nodes: -ENOTSUP, -EIO when it cannot be registered. */
PRS_API int prs_fused_import(struct prs_fused *ctx, void *const *at, size_t bytes);
/** Local. No launch of this rank that uses the memory may be in flight. -EINVAL: not the start of such memory. */
PRS_API int prs_fused_free(struct prs_fused *ctx, void *ptr);

/* ---- what families share ---- */

/** What is applied to each element of a product's finished sum, in fp32. */
enum prs_activation {
    PRS_ACTIVATION_NONE = 0,
    PRS_ACTIVATION_RELU = 1,
    PRS_ACTIVATION_GELU = 2,      /**< x * (1 + erf(x / sqrt(2))) / 2 */
    PRS_ACTIVATION_GELU_TANH = 3, /**< the approximation of GELU by tanh */
    PRS_ACTIVATION_SILU = 4       /**< x / (1 + exp(-x)) */
};

/** The type of a matrix's elements. */
enum prs_dtype {
    PRS_DTYPE_DEFAULT = 0, /**< the default in the comment of the field */
    PRS_DTYPE_BF16 = 1,
    PRS_DTYPE_FP16 = 2, /**< IEEE binary16, with subnormal numbers; numbers beyond 65504 become infinite */
    PRS_DTYPE_FP32 = 3,
    PRS_DTYPE_E4M3 = 4 /**< FP8, as OCP defines it: up to 448, no infinity; A and B of scaled products (gemm.h) */
};

/** Which numbers of A and B share a scale. The value of an element is its e4m3 number times its scale; scales are
 * fp32. */
enum prs_scaling {
    PRS_SCALING_NONE = 0,
    /** One for A, one for B. ALLGATHER: A's scale is the same on all ranks. */
    PRS_SCALING_TENSOR = 1,
    PRS_SCALING_ROWS = 2, /**< one for each row of A, and for each column of B (row of [n, k]) */
    /** One for 1 row x 128 columns of A, and for 128 x 128 of B. 128 divides k; 256 divides n of a gated product. */
    PRS_SCALING_BLOCKS = 3
};

/** What moves data that all ranks get: the blocks of an all-gather, the keys and values of attention.
 *
 * Copy engines move one piece after the other, to one rank after the other. Each piece to each rank takes two or three
 * calls of some 3 us on the host, while the kernel runs. Copy engines work inside one node only, and not if two ranks
 * share a GPU, because copies from a GPU to itself are kernels. CTAs push the data themselves, everywhere. */
enum prs_mover { PRS_MOVED_BY_COPY_ENGINES = 1, PRS_MOVED_BY_CTAS = 2 };

/* ---- errors and statistics ---- */

/** "0.2.0": the version of the library, which may be newer than this header (CONTRIBUTING.md, "Stability"). */
PRS_API const char *prs_fused_version(void);

/** The text of common.h, fused.h and the headers of the families, as the library was built with them, for bindings that
 * read layouts and functions from it. */
PRS_API const char *prs_fused_header(void);

/** The first error of a context: what a kernel of this rank stopped waiting for or found wrong, or how the network
 * between nodes failed. */
struct prs_fused_error {
    /** 0; -ETIMEDOUT; -EINVAL: an impossible number of rows, or ranks that made different launches; -ECANCELED:
     * prs_fused_abort(), or another rank of this node gave up in a launch that this rank took part in, so that what it
     * sent may be wrong; or the network's -errno: waits end with it, and the next four fields are 0 where no kernel
     * waited. */
    int code;
    uint32_t from_rank; /**< the rank that should have raised the flag, or whose input is wrong */
    uint32_t flag, want, seen;
    uint64_t waited_ns;
    char text[256];
    uint64_t blamed; /**< the rank to blame, plus one; if the network failed, the rank at the other end of the
                      * connection; 0: not known */
    uint64_t reserved[PRS_RESERVED_WORDS - 1];
};

/** The text of the calling thread's last failed call: what failed, on which object, with which value, the likely cause.
 * Valid until the thread's next failure; empty before the first. */
PRS_API const char *prs_fused_error_text(void);

/** Returns error->code. Does not block; from any thread, at any time before prs_fused_close(). The first error stays,
 * and nothing more is launched on this context: close the plans and the context on all ranks and open them again. */
PRS_API int prs_fused_poll_error(struct prs_fused *ctx, struct prs_fused_error *error);

/** For a watchdog: gives up at once instead of at timeout_ms. Does not block; from any thread, at any time before
 * prs_fused_close(). Kernels of this rank that wait for another rank, now or later, end within some milliseconds. Their
 * results are not valid, and nothing more is launched. prs_fused_poll_error() returns -ECANCELED and, if a kernel
 * waited, names the rank for which it waited. Waiting kernels of other ranks of the same node end, too; every other
 * rank needs a call of its own. */
PRS_API void prs_fused_abort(struct prs_fused *ctx);

/** Ranks of this node that can write nothing any more: their processes have ended, or they have closed their contexts.
 * Bit r stands for rank r. 0 with several nodes. Does not block; from any thread. */
PRS_API uint64_t prs_fused_lost(const struct prs_fused *ctx);
/** MoE layers that run as one kernel (PRS_MOE_PATH_ONE) continue without these ranks, including running launches and
 * captured graphs: a choice of one of their experts counts as a choice of an absent expert (prs_moe_status). The call
 * affects this rank only, so every rank that continues must make it. A launch that waits ends within milliseconds; its
 * tokens may lack a part of a lost expert's result. All other launches, and collective calls, are refused from then on
 * (-ECANCELED). Closing the context waits for no rank. A rank comes back in a new context. Does not block, and makes no
 * call of CUDA; from any thread. -EINVAL: prs_fused_lost() does not name the rank. -EOPNOTSUPP: several nodes. */
PRS_API int prs_fused_leave_out(struct prs_fused *ctx, uint64_t ranks);

/** Device memory of this rank's context. */
struct prs_fused_memory {
    /** Bytes that it has taken from CUDA; 0 while the context is asleep. Otherwise it only grows, when plans are opened
     * and memory is allocated. */
    uint64_t held;
    uint64_t used;  /**< by plans and allocations that are open, or were closed since the last collective call */
    uint64_t saved; /**< bytes of host memory that keep the surviving data while the context is asleep */
    uint64_t reserved[PRS_RESERVED_WORDS - 1];
};

/** Fills in *memory. A plan takes its memory when it is opened: a server that opens all plans first takes no more
 * memory later. */
PRS_API void prs_fused_memory(const struct prs_fused *ctx, struct prs_fused_memory *memory);

/** *Collective*, of a context that was opened with `sleeps`. Gives the device memory of the context back to CUDA, so
 * that GPUs can be used otherwise while a server has nothing to do. All addresses stay, so plans stay open, and graphs
 * that hold their launches can be replayed after prs_fused_wake(). Symmetric memory of prs_fused_alloc() keeps its
 * content, by a copy in host memory. Data that a launch left in a plan for a later call is lost: rows of a dispatch
 * that was not combined, and what gradients need of a forward pass. Imported memory stays as it is.
 *
 * Waits for all work of the device, and then for the other ranks, for timeout_ms at most. -ETIMEDOUT: a rank, which the
 * text names, did not make the call; then no rank is asleep. -EALREADY: the context is asleep already. -EOPNOTSUPP:
 * opened without `sleeps`. -ENOMEM: no host memory. If an earlier launch has failed, its error.
 *
 * Until prs_fused_wake() launches and collective calls are refused (-EBUSY). A graph with launches of this context must
 * not be replayed, and symmetric memory of it must not be touched: both fault. Plans, memory and the context may be
 * closed. */
PRS_API int prs_fused_sleep(struct prs_fused *ctx);
/** *Collective.* Allocates the memory again. -ENOMEM: a rank, which the text names, has not enough free memory.
 * -ETIMEDOUT: a rank did not make the call. After both errors all ranks are still asleep, and may try again. -EINVAL:
 * the context is not asleep. */
PRS_API int prs_fused_wake(struct prs_fused *ctx);

/** What this rank has sent to other nodes since the context was opened; zeros on a single node. */
struct prs_fused_traffic {
    uint32_t nodes;
    uint32_t rails; /**< rails that this rank uses: those nearest to its GPU, divided among the ranks of the node */
    uint64_t puts, signals;
    uint64_t fences; /**< fences of the NIC, or waits for all completions, by the ordering policy (PERSEUS_ORDER) */
    uint64_t bytes;
    uint64_t reserved[PRS_RESERVED_WORDS];
};

/** Exact while no launch is in flight, with one exception: the last signals of a launch of MoE or of an unfused
 * product, which say that it has ended, may be counted some microseconds later. */
PRS_API void prs_fused_traffic(const struct prs_fused *ctx, struct prs_fused_traffic *traffic);

#ifdef __cplusplus
}
#endif

#endif
